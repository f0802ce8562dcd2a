"""SentencePiece BPE: characters are joined pair by pair, the pair whose token has the best score
first, of equal ones the leftmost; characters that are no token become bytes.

The package `tokenizers` ranks pairs, not tokens, and joins pairs of equal scores in another order.
Text is cut into words where no token can span the cut; ids of short words are kept.
"""

from __future__ import annotations

import heapq
import re

import numpy as np

from batchengine.gguf import GgufFile
from batchengine.text.encoders.special import SpecialTokens
from batchengine.text.vocab_facts import SCORES, VocabFacts

SPACE = "▁"
WORDS = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_KEPT_MAX = 1 << 16
_KEPT_CHARS_MAX = 64


class SpmEncoder:
    """Text to ids; a space goes in front of text that begins or follows a special token."""

    def __init__(self, facts: VocabFacts) -> None:
        self._special = SpecialTokens(facts)
        self._ids = _texts(facts)
        self._scores = _read_scores(facts)
        self._bytes = [_byte_token(self._ids, byte) for byte in range(256)]
        self._prefix = SPACE if facts.add_space_prefix else ""
        self._has_words = not any(_spans_words(token, self._ids) for token in self._ids)
        self._kept: dict[str, list[int]] = {}

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of a text; `control` lets control tokens written in it count."""
        ids: list[int] = []
        prefix = self._prefix
        for piece in self._special.cut(text, control=control):
            if isinstance(piece, int):
                ids.append(piece)
                prefix = self._prefix
                continue
            escaped = prefix + piece.replace(" ", SPACE)
            prefix = ""
            for word in WORDS.findall(escaped) if self._has_words else (escaped,):
                ids += self._encode_word(word)
        return ids

    def begin_request(self) -> None:
        """Words are kept for all requests."""

    def close(self) -> None:
        """Nothing is held that the interpreter does not free."""

    def _encode_word(self, word: str) -> list[int]:
        found = self._kept.get(word)
        if found is None:
            found = self._join(word)
            if len(word) <= _KEPT_CHARS_MAX and len(self._kept) < _KEPT_MAX:
                self._kept[word] = found
        return found

    def _join(self, word: str) -> list[int]:
        count = len(word)
        ids, scores = self._ids, self._scores
        end = list(range(1, count + 1))  # of the part that begins here; 0 = it was joined
        before = list(range(-1, count - 1))  # where the part before begins
        heap: list[tuple[float, int, int]] = []

        def add(left: int) -> None:
            right = end[left]
            if left >= 0 and right < count:
                token = ids.get(word[left : end[right]])
                if token is not None:
                    heapq.heappush(heap, (-scores[token], left, end[right]))

        for left in range(count - 1):
            add(left)
        while heap:
            _, left, stop = heapq.heappop(heap)
            right = end[left]
            if not right or right >= count or end[right] != stop:
                continue  # one of the two was joined meanwhile
            end[left], end[right] = stop, 0
            if stop < count:
                before[stop] = left
            if before[left] >= 0:
                add(before[left])
            add(left)
        found: list[int] = []
        at = 0
        while at < count:
            token = ids.get(word[at : end[at]])
            if token is None:
                found += [self._bytes[byte] for byte in word[at].encode()]
            else:
                found.append(token)
            at = end[at]
        return found


def _texts(facts: VocabFacts) -> dict[str, int]:
    """Tokens by their text; those that are no text are left out."""
    decoded = (token.decode("utf-8", "surrogateescape") for token in facts.tokens)
    return {text: index for index, text in enumerate(decoded) if text}


def _read_scores(facts: VocabFacts) -> list[float]:
    with GgufFile(facts.path) as file:
        scores = file.values.get(SCORES)
    if not isinstance(scores, np.ndarray):
        return [0.0] * len(facts.tokens)
    return [float(score) for score in scores]


def _byte_token(ids: dict[str, int], byte: int) -> int:
    found = ids.get(f"<0x{byte:02X}>")
    return ids[bytes([byte]).decode("utf-8", "surrogateescape")] if found is None else found


def _spans_words(token: str, ids: dict[str, int]) -> bool:
    """Whether the token has a space after something else, and can be joined of two parts."""
    if SPACE not in token.lstrip(SPACE):
        return False
    parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    return any(all(len(p) == 1 or p in ids for p in pair) for pair in parts)
