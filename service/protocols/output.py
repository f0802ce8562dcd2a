"""Output parsers: the text that the engine generates, split into the parts a client is shown.

A parser stands between the events of one choice and its formatter. Formatters match on the kinds
of `OutputPart`, so a parser for a model with reasoning or tool calls adds its kinds to the union
and the type checker reports every formatter that does not handle them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

CALL_PREFIXES = ("call_", "toolu_")
OWN_CALL = re.compile(r"(?:call|toolu)_([0-9a-f]+)n[0-9]+")  # as `call_id_of` makes them


class Text(NamedTuple):
    """Part of the answer's text, never empty."""

    text: str


class Reasoning(NamedTuple):
    """Part of the text that the model wrote before its answer, never empty."""

    text: str


class CallStart(NamedTuple):
    """The beginning of call number `call` (from 0) of a tool; parts of other kinds end it."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """Part of the arguments of call `call`, which is JSON text once the call is over."""

    call: int
    json: str


OutputPart = Text | Reasoning | CallStart | CallArguments


class GrowingParts:
    """Parts as a parser finds them; those of one kind that follow each other are joined."""

    def __init__(self) -> None:
        self._parts: list[OutputPart] = []
        self._more: list[str] = []  # texts that belong to the last part

    def add(self, part: OutputPart) -> None:
        """Adds a part."""
        kind = type(part)
        if self._parts and type(self._parts[-1]) is kind and kind is not CallStart:
            self._more.append(part[-1])
        else:
            self._join()
            self._parts.append(part)

    def take(self) -> list[OutputPart]:
        """The parts since the last call."""
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def _join(self) -> None:
        if not self._more:
            return
        last = self._parts[-1]
        text = "".join([last[-1], *self._more])
        self._parts[-1] = last._replace(**{last._fields[-1]: text})
        self._more = []


class OutputParser(Protocol):
    """Splits the text of one choice; holds back text whose kind is not certain yet."""

    def push(self, text: str) -> list[OutputPart]:
        """The parts that `text` completes, in order; none for an empty text."""
        ...

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        """The parts that were held back until the end of the choice; `is_cut`: the model did not
        end it."""
        ...


class PlainText:
    """The parser of models without markup in their output: all of it is text, at once."""

    def push(self, text: str) -> list[OutputPart]:
        return [Text(text)] if text else []

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        return []


def plain_text(parts: Iterable[OutputPart]) -> str:
    """The answer's text without reasoning and calls."""
    return "".join(part.text for part in parts if isinstance(part, Text))


def reasoning_text(parts: Iterable[OutputPart]) -> str:
    """The reasoning of an answer."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def calls_of(parts: Iterable[OutputPart]) -> list[CallStart]:
    """The beginnings of an answer's calls."""
    return [part for part in parts if isinstance(part, CallStart)]


def arguments_of(parts: Iterable[OutputPart]) -> list[str]:
    """The arguments of an answer's calls, in the order of `calls_of`."""
    found: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            found.append([])
        elif isinstance(part, CallArguments):
            found[part.call].append(part.json)
    return list(map("".join, found))


def call_id_of(turn_id: str, call: int, prefix: str = "call_") -> str:
    """The id of call number `call` of an answer: the same in every stream of its turn."""
    return f"{prefix}{turn_id.removeprefix('req_').replace('-', 'c')}n{call}"


def turns_of(calls: Iterable[str]) -> list[str]:
    """The ids of the turns whose answers have these calls, but for calls of other servers."""
    found = map(OWN_CALL.fullmatch, calls)
    return list(dict.fromkeys(f"req_{one[1]}" for one in found if one is not None))
