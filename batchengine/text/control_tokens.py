"""Text from a request never becomes a control token.

A chat prompt is one string made by the template out of its own text and text of the request.
Tokenised with control tokens enabled, a message with `<|im_end|>` in it would end its own turn and
could go on in the role of the system. The guard therefore finds the origin of control tokens:

1. Every control token contains a *guard character*, chosen once per vocabulary: few, and away
   from letters and digits (for ChatML models: `|`). A request without any is safe: render it,
   and encode the text in one call with control tokens enabled.
2. Otherwise it is rendered a second time with *twins*: guard characters in strings of the request
   are swapped for code points of the private planes that occur nowhere in this request. One
   character stays one character, so lengths, slices, trimming, JSON escapes and joins in the
   template work as before. A control token without a twin in it can only be the template's own.
3. The template refuses the request: since it may do so for a control token that it finds in a
   message, the rendering with twins is tried, as in case 5.
4. Both renderings show the same control tokens at the same positions: the request was harmless,
   and the first one is encoded in one call. Its ids are those of llama.cpp's own parse, by
   construction.
5. They differ: the second rendering is split at the template's control tokens, the twins are
   swapped back, and the pieces are encoded with control tokens disabled. These are the ids
   llama.cpp would give if it knew which text to trust, even when the template glues a control
   token together out of several strings of the request. When the guard characters of the forged
   tokens alone account for every control token shown, only those are swapped.

What it does not do: in cases 3 and 5 a template that looks for a guard character in a message sees
the twin; and user-defined tokens (`<tool_call>`) are text that any message may contain, as in
llama.cpp and transformers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import cast

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.text.encoders.special import WHITE_SPACE
from batchengine.text.messages import ROLES
from batchengine.text.vocab import Tokenizer

# First choice first: characters that templates look for in messages come late, letters last.
_PREFERRED = "|｜[]{}()<>#$%&*+=~^▁"
_TWINS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))  # private use planes 15, 16

# Field names (and the values in ROLES of the field `role`) stay as they are: the template compares
# them and looks them up. All other strings are text of the request.
_FIELD_NAMES = frozenset(
    (
        *("role", "content", "name", "type", "text", "id", "image_url", "refusal"),
        *("tool_calls", "tool_call_id", "function", "arguments", "reasoning_content", "thinking"),
        *("description", "parameters", "properties", "required", "items", "enum"),
    )
)


class Twins:
    """The swap of one request: guard characters to private code points and back."""

    def __init__(self, there: dict[int, int]) -> None:
        self._there = there
        self._back = {twin: guard for guard, twin in there.items()}

    def hide(self, value: object) -> object:
        """A copy of JSON-like `value` in which strings carry twins; roles stay."""
        if isinstance(value, str):
            return value.translate(self._there)
        if isinstance(value, dict):
            fields = cast(dict[str, object], value)
            return {self._key(key): self._field(key, item) for key, item in fields.items()}
        if isinstance(value, list):
            return [self.hide(item) for item in cast(list[object], value)]
        return value

    def restore(self, text: str) -> str:
        """The text with the guard characters restored."""
        return text.translate(self._back)

    def _key(self, key: str) -> str:
        return key if key in _FIELD_NAMES else key.translate(self._there)

    def _field(self, key: str, item: object) -> object:
        is_role = key == "role" and isinstance(item, str) and item in ROLES
        return item if is_role else self.hide(item)


class ControlGuard:
    """Renders and encodes chats so that only the template makes control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {tokenizer.token_text(token): token for token in sorted(tokenizer.control)}
        texts = sorted(self._ids, key=len, reverse=True)
        self._control = re.compile(_alternatives(texts)) if texts else None
        self.guards = _cover(texts)
        self._bos_text = "" if tokenizer.bos is None else tokenizer.token_text(tokenizer.bos)

    def encode_chat(self, chat: object, render: Callable[[object], str]) -> list[int]:
        """Ids of `render(chat)`; `chat` is JSON-like data (dict with str keys, list, str, …).

        The begin-of-sequence token is added as the metadata asks, unless the template wrote it.
        """
        strings = list(_strings(chat))
        found = tuple(g for g in self.guards if any(g in text for text in strings))
        used = set[str]().union(*(text for text in strings if not text.isascii()))
        try:
            rendered = render(chat)
        except BatchEngineError as error:
            if not found or error.code != errors.MESSAGES_REFUSED.code:
                raise
            return self._encode_split(*self._render_hidden(chat, render, found, used))
        shown = self._controls(rendered) if found else []
        if not shown:
            return self._encode_trusted(rendered)
        safe, twins = self._render_hidden(chat, render, found, used)
        own = self._controls(safe)
        if own == shown:
            return self._encode_trusted(rendered)
        forged = _cover(sorted({text for _, text in set(shown) - set(own)}))
        fewer = tuple(g for g in found if g in forged)
        if fewer and fewer != found:
            gentle, gentle_twins = self._render_hidden(chat, render, fewer, used)
            if all(any(g in text for g in fewer) for _, text in self._controls(gentle)):
                safe, twins = gentle, gentle_twins
        return self._encode_split(safe, twins)

    def _render_hidden(
        self,
        chat: object,
        render: Callable[[object], str],
        guards: tuple[str, ...],
        used: set[str],
    ) -> tuple[str, Twins]:
        twins = _choose_twins(guards, used)
        try:
            return render(twins.hide(chat)), twins
        except BatchEngineError as error:
            # The error of a template may quote the request.
            error.what, error.why = twins.restore(error.what), twins.restore(error.why)
            raise

    def _controls(self, text: str) -> list[tuple[int, str]]:
        """(position, text) of every control token; twins keep positions comparable."""
        found = self._control.finditer(text) if self._control else ()
        return [(match.start(), match.group()) for match in found]

    def _adds_bos(self, rendered: str) -> bool:
        starts = bool(self._bos_text) and rendered.startswith(self._bos_text)
        return self._tokenizer.add_bos and not starts

    def _encode_trusted(self, rendered: str) -> list[int]:
        add_bos = self._adds_bos(rendered)
        return self._tokenizer.encode(rendered, special=True, add_bos=add_bos)

    def _encode_split(self, rendered: str, twins: Twins) -> list[int]:
        tokenizer = self._tokenizer
        tokens: list[int] = []
        if self._adds_bos(rendered) and tokenizer.bos is not None:
            tokens.append(tokenizer.bos)
        before: int | None = None
        for whole, control in self._split(rendered):
            text = whole.lstrip(WHITE_SPACE) if before in tokenizer.strips else whole
            before = control
            if text:
                tokens += tokenizer.encode(twins.restore(text), special=False, add_bos=False)
            if control is not None:
                tokens.append(control)
        return tokens

    def _split(self, rendered: str) -> Iterable[tuple[str, int | None]]:
        """(text, the control token after it) pieces."""
        start = 0
        for match in self._control.finditer(rendered) if self._control else ():
            yield rendered[start : match.start()], self._ids[match.group()]
            start = match.end()
        yield rendered[start:], None


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern of the longest of `texts` at a position, as a trie: no prefix is read twice."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text)
    branches: list[str] = []
    for _, group in sorted(by_first.items()):
        shared = _common_prefix(group)
        rests = [text[len(shared) :] for text in group]
        after = _alternatives(rests)
        branches.append(re.escape(shared) + (f"{after}?" if "" in rests else after))
    return f"(?:{'|'.join(branches)})" if branches else "(?:)"


def _common_prefix(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    same = (index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, len(first))]


def _choose_twins(guards: tuple[str, ...], used: set[str]) -> Twins:
    free = (code for code in _TWINS if chr(code) not in used)
    there = dict(zip(map(ord, guards), free, strict=False))
    if len(there) < len(guards):
        raise errors.PRIVATE_CHARACTERS()
    return Twins(there)


def _cover(texts: list[str]) -> tuple[str, ...]:
    """Few characters such that every text holds one: by preference, then by how many they cover."""
    left: list[str] = [text for text in texts if text]
    guards: list[str] = []
    while left:
        counts = Counter("".join("".join(set(text)) for text in left))
        best = min(counts, key=lambda c: (_rank(c), -counts[c], c))
        guards.append(best)
        left = [text for text in left if best not in text]
    return tuple(guards)


def _rank(character: str) -> int:
    slot = _PREFERRED.find(character)
    if slot >= 0:
        return slot
    return len(_PREFERRED) + (1 if character.isalnum() or character.isspace() else 0)


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast(dict[str, object], value).items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in cast(list[object], value):
            yield from _strings(item)
