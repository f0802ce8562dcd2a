"""BPE of characters with the `tokenizers` library, as vocabularies of Gemma 4 have it.

Spaces become SPACE; runs of line ends are split from the rest, and are one token if there is one;
characters that are no token become bytes. Nothing else splits a text, so its words are cut out
where no merge joins what stands on both sides; ids of short words are kept.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from batchengine.gguf import GgufFile
from batchengine.text.encoders.bpe import BpeLibrary, listed_merges
from batchengine.text.encoders.special import SpecialTokens
from batchengine.text.vocab_facts import TOKENS, VocabFacts, unusable

SPACE = "▁"
_LINES = re.compile(r"[^\n]+|\n+")
_WORDS = re.compile(rf"{SPACE}*[^{SPACE}\n]+|{SPACE}+|\n+")
_PART_CHARS = 1 << 16  # of a line that has no words, from which on it may be cut
_KEPT_MAX = 1 << 16
_KEPT_CHARS_MAX = 64


class CharacterBpeEncoder:
    """Text to ids; the library gets the words between special tokens."""

    def __init__(self, facts: VocabFacts) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a text process may start no thread
        self._special = SpecialTokens(facts)
        self._ids = _texts(facts)
        with GgufFile(facts.path) as file:
            merges = listed_merges(file, self._ids)
        self._joins = {(left[-1], right[0]) for left, right in merges}
        self._has_words = all(pair[1] != SPACE or pair[0] == SPACE for pair in self._joins)
        self._library = _build(facts, self._ids, merges)
        self._kept: dict[str, list[int]] = {}

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of a text; `control` lets control tokens written in it count."""
        ids: list[int] = []
        for piece in self._special.cut(text, control=control):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            for word in self._words(piece.replace(" ", SPACE)):
                found = self._kept.get(word)
                ids += self._encode_word(word) if found is None else found
        return ids

    def begin_request(self) -> None:
        """Words are kept for all requests."""

    def close(self) -> None:
        """Nothing is held that the interpreter does not free."""

    def _words(self, text: str) -> Iterator[str]:
        """The text in parts whose ids are those of the whole."""
        if self._has_words:
            yield from _WORDS.findall(text)
            return
        for line in _LINES.findall(text):
            start = 0
            while (cut := self._find_cut(line, start + _PART_CHARS)) > 0:
                yield line[start:cut]
                start = cut
            yield line[start:]

    def _find_cut(self, line: str, start: int) -> int:
        """The first place from `start` on which no merge goes over, 0 if there is none."""
        if line[0] == "\n":
            return 0
        places = range(start, len(line))
        return next((at for at in places if (line[at - 1], line[at]) not in self._joins), 0)

    def _encode_word(self, word: str) -> list[int]:
        whole = self._ids.get(word) if word[0] == "\n" else None
        if whole is None:
            found = self._library.encode_batch_fast([word], add_special_tokens=False)[0].ids
        else:
            found = [whole]
        if len(word) <= _KEPT_CHARS_MAX and len(self._kept) < _KEPT_MAX:
            self._kept[word] = found
        return found


def why_unknown(facts: VocabFacts) -> str:
    """Why ids of this vocabulary may not be those of llama.cpp, "" if they are."""
    if importlib.util.find_spec("tokenizers") is None:
        return "the package tokenizers is not installed"
    known = set(facts.tokens)
    names = (f"<0x{byte:02X}>" for byte in range(256))
    missing = next((name for name in names if name.encode() not in known), "")
    return f"it has no token {missing}" if missing else ""


def _texts(facts: VocabFacts) -> dict[str, int]:
    """Tokens by their text; those that are no text are left out."""
    found: dict[str, int] = {}
    for index, token in enumerate(facts.tokens):
        text = token.decode("utf-8", "ignore")
        if text and len(text.encode()) == len(token):
            found[text] = index
    return found


def _build(facts: VocabFacts, ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> BpeLibrary:
    package: Any = importlib.import_module("tokenizers")
    try:
        model = package.models.BPE(ids, list(merges), byte_fallback=True)
    except Exception as error:  # the library has no class of its own
        raise unusable(facts.path, f"{TOKENS}: {error}") from error
    library: BpeLibrary = package.Tokenizer(model)
    return library
