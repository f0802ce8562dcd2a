"""Special tokens that are written in a text: where it is cut, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from batchengine.text.vocab_facts import SPECIAL, USER_DEFINED, VocabFacts

WHITE_SPACE = " \t\n\v\f\r"  # what a token of `VocabFacts.strips` takes along


class SpecialTokens:
    """Control, unknown and user-defined tokens of one vocabulary, those of most bytes first.

    The order is llama.cpp's: each token is looked for in all of the text that longer ones left.
    """

    def __init__(self, facts: VocabFacts) -> None:
        marked = [token for token, kind in facts.kinds.items() if kind in SPECIAL]
        # bytes that are no text become half surrogates, which no text of a request has
        texts = [
            (facts.tokens[token].decode("utf-8", "surrogateescape"), token) for token in marked
        ]
        ordered = sorted(
            ((text, token) for text, token in texts if text),
            key=lambda item: (-len(facts.tokens[item[1]]), item[1]),
        )
        self._all = ordered
        self._strips = facts.strips
        self._plain = [item for item in ordered if facts.kinds[item[1]] == USER_DEFINED]

    def cut(self, text: str, *, control: bool) -> list[str | int]:
        """Pieces of text, and the tokens between them; user-defined tokens always count."""
        pieces: list[str | int] = [text] if text else []
        for mark, token in self._all if control else self._plain:
            if mark in text:
                pieces = list(_split(pieces, mark, token, strips=token in self._strips))
        return pieces


def _split(
    pieces: Iterable[str | int], mark: str, token: int, *, strips: bool
) -> Iterator[str | int]:
    for piece in pieces:
        if isinstance(piece, int):
            yield piece
            continue
        first, *rest = piece.split(mark)
        if first:
            yield first
        for text in rest:
            yield token
            if kept := text.lstrip(WHITE_SPACE) if strips else text:
                yield kept
