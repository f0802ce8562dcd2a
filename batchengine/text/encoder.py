"""Text and chats to token ids: the tokenizer, the template and the guard of control tokens.

Owns the order of one preparation. Costs time in proportion to its input, or without bound for a
hostile text or template: it runs in a text process (see `process`), never in the engine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from batchengine.core import BatchEngineError, Constraint
from batchengine.markup import Markup, Texts, markup_of
from batchengine.text.control_tokens import ControlGuard
from batchengine.text.grammar import GrammarCompiler
from batchengine.text.messages import (
    LINES,
    LINES_PROBE,
    PROBE_TEXT,
    PROBES,
    TEXT_PROBE,
    has_calls,
    in_parts,
    prepare_messages,
    with_text_arguments,
)
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from batchengine.wire.text import GRAMMAR, TEMPLATE, TOKENIZER

_TEXT = re.compile(rf"""(['"]){LINES[0]}(\n|\\n){LINES[1]}\1""")


class TextEncoder:
    """Encodes with one vocabulary and one template; `on_phase` is called before each of the two."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: Renderer,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._on_phase = on_phase
        self._guard = ControlGuard(tokenizer)
        source = "\n".join(renderer.sources)
        self._markup = markup_of(source, tokenizer.special_ids.__contains__)
        starts = [start for start, _ in self._markup.reasoning]
        known = (source, tokenizer.special_ids)
        self.reasons = any(start in one for start in starts for one in known)
        self._takes: dict[str, bool] = {}
        self._knows_texts = False
        self._wants_parts: bool | None = None  # None = not tried yet
        self._wants_text_arguments: bool | None = None
        self._grammars = GrammarCompiler(tokenizer)
        self._specials = {
            "bos_token": _text(tokenizer, tokenizer.bos),
            "eos_token": _text(tokenizer, tokenizer.eos),
        }

    def begin_request(self) -> None:
        """Keep nothing of earlier requests, and what this one holds several times once."""
        self._tokenizer.begin_request()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of plain text, begin-of-sequence as the metadata asks.

        `special` = control tokens written in the text count (trusted text only).
        """
        self._on_phase(TOKENIZER)
        return self._tokenizer.encode(text, special=special)

    def piece(self, token: int) -> bytes:
        """The bytes of one token; of a control token its name."""
        return self._tokenizer.piece(token)

    def control_id(self, text: str) -> int | None:
        """The control token of this text, if there is one."""
        token = self._tokenizer.special_ids.get(text)
        return token if token is not None and self._tokenizer.is_control(token) else None

    def ends_turn(self, token: int) -> bool:
        """Whether the token ends a message of the model."""
        return token in self._tokenizer.closes

    @property
    def markup(self) -> Markup:
        """The markup of the model; calls that its template cannot show are written in the form
        that stands in the prompt instead."""
        if self._markup.writes not in ("object", "channel") and not self.takes("calls"):
            self._markup = dataclasses.replace(self._markup, writes="object")
        if self._markup.writes == "python" and not self._knows_texts:
            self._markup = dataclasses.replace(self._markup, texts=self._written_texts())
            self._knows_texts = True
        return self._markup

    def _written_texts(self) -> Texts:
        """How the template writes texts in calls."""
        try:
            prompt = self._renderer.render(self._in_form(LINES_PROBE), self._specials)
        except BatchEngineError:
            prompt = ""
        found = _TEXT.search(prompt)
        return Texts() if found is None else Texts(found[1], in_lines=found[2] == "\n")

    def takes(self, probe: str) -> bool:
        """Whether the template shows the last text of a probe of `messages.PROBES`."""
        known = self._takes.get(probe)
        if known is None:
            known = self._takes[probe] = self._shows(self._in_form(PROBES[probe]))
        return known

    def _shows(self, chat: Mapping[str, object]) -> bool:
        try:
            return PROBE_TEXT in self._renderer.render(chat, self._specials)
        except BatchEngineError:
            return False

    def _in_form(self, chat: Mapping[str, object]) -> Mapping[str, object]:
        """The chat with contents as lists of parts, if the template shows no others: those of
        models that see images do so, and lose texts without a word; and with arguments of calls as
        text, if it takes no objects: those of DeepSeek join texts."""
        if self._wants_parts is None:
            plain, parts = TEXT_PROBE, in_parts(TEXT_PROBE)
            self._wants_parts = not self._shows(plain) and self._shows(parts)
        made = in_parts(chat) if self._wants_parts else chat
        if not has_calls(chat):
            return made
        if self._wants_text_arguments is None:
            calls = in_parts(PROBES["calls"]) if self._wants_parts else PROBES["calls"]
            texts = with_text_arguments(calls)
            self._wants_text_arguments = not self._shows(calls) and self._shows(texts)
        return with_text_arguments(made) if self._wants_text_arguments else made

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The prompt as token ids; text of the request never becomes a control token."""
        variables = {**self._specials, **(kwargs or {})}

        def render(chat: object) -> str:
            self._on_phase(TEMPLATE)
            text = self._renderer.render(cast(dict[str, object], chat), variables)
            self._on_phase(TOKENIZER)
            return text

        self._on_phase(TEMPLATE)
        chat = {"messages": prepare_messages(messages), "tools": list(tools or ()) or None}
        return self._guard.encode_chat(self._in_form(chat), render)

    def prepare_check(self) -> None:
        """Read the vocabulary for the first check, which costs 0.6 s at 151,936 tokens."""
        self._on_phase(GRAMMAR)
        self._grammars.prepare()

    def check_constraint(self, constraint: Constraint) -> list[str]:
        """The names of keywords that this does not enforce; raise GRAMMAR_REFUSED unless an answer
        can be constrained to it."""
        self._on_phase(GRAMMAR)
        return self._grammars.check(constraint)


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
