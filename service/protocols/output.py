"""Output parsers: the text that the engine generates, split into the parts a client is shown.

A parser stands between the events of one choice and its formatter. Formatters match on the kinds
of `OutputPart`, so a parser for a model with reasoning or tool calls adds its kinds to the union
and the type checker reports every formatter that does not handle them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Text(NamedTuple):
    """Part of the answer's text, never empty."""

    text: str


OutputPart = Text


class OutputParser(Protocol):
    """Splits the text of one choice; holds back text whose kind is not certain yet."""

    def push(self, text: str) -> list[OutputPart]:
        """The parts that `text` completes, in order; none for an empty text."""
        ...

    def flush(self) -> list[OutputPart]:
        """The parts that were held back until the end of the choice."""
        ...


class PlainText:
    """The parser of models without markup in their output: all of it is text, at once."""

    def push(self, text: str) -> list[OutputPart]:
        return [Text(text)] if text else []

    def flush(self) -> list[OutputPart]:
        return []


def plain_text(parts: Iterable[OutputPart]) -> str:
    """The answer's text without anything else."""
    return "".join(part.text for part in parts)
