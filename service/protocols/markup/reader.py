"""A text that arrives in pieces, read character by character by generators, into parts.

A generator that needs more text yields; it is resumed once there is more, or none will come. So
what it does cannot depend on where the text was cut.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

import msgspec

from batchengine.markup import BREAK
from service.protocols.output import CallArguments, CallStart, GrowingParts, OutputPart

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r'[^"\[\]{}]+')
_BEFORE_MARKS = re.compile(r'[^"\[\]{}<]+')
_SCALAR = re.compile(r"[-+.\w]+")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},<]+")


class Reader:
    """The text that has arrived and was not taken yet."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._taken: list[str] | None = None  # since `keep`

    def feed(self, text: str) -> None:
        """Adds text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Says that no more text will come."""
        self._ended = True

    def keep(self) -> None:
        """Begins to keep what is taken, for `kept`."""
        self._taken = []

    def kept(self) -> str:
        """What was taken since `keep`; ends keeping."""
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def peek(self) -> Reading[str]:
        """The next character, "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def ahead(self, count: int) -> Reading[str]:
        """The character that stands `count` behind the next one, "" at the end."""
        while self._at + count >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at + count]

    def take(self, count: int = 1) -> str:
        """Takes characters that have arrived."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._taken is not None:
            self._taken.append(text)
        return text

    def space(self) -> Reading[str]:
        """Takes white space; returns the character after it."""
        while True:
            self._match(_SPACE)
            if (following := (yield from self.peek())) == "" or not following.isspace():
                return following

    def kept_space(self) -> Reading[tuple[str, str]]:
        """Takes white space; returns it, and the character after it."""
        self.keep()
        following = yield from self.space()
        return self.kept(), following

    def has(self, literal: str) -> Reading[bool]:
        """Whether the text goes on with `literal`, which is taken if so."""
        found = yield from self.is_at((literal,))
        if found:
            self.take(len(literal))
        return found

    def is_at(self, literals: tuple[str, ...]) -> Reading[bool]:
        """Whether the text goes on with one of `literals`."""
        while not self._text.startswith(literals, self._at):
            rest = self._text[self._at : self._at + max(map(len, literals))]
            if self._ended or not any(one.startswith(rest) for one in literals):
                return False
            yield
        return True

    def ends_in(self, literal: str) -> bool:
        """Whether all that is left, at the end of the text, is how `literal` begins."""
        return self._ended and literal.startswith(self._text[self._at :])

    def word(self, pattern: re.Pattern[str], chars_max: int) -> Reading[str]:
        """Takes characters as long as `pattern` matches them, `chars_max` at most."""
        found = ""
        while len(found) < chars_max and (character := (yield from self.peek())):
            if not pattern.fullmatch(character):
                break
            found += self.take()
        return found

    def run(self, pattern: re.Pattern[str], marks: tuple[str, ...]) -> Reading[str]:
        """Takes text as long as `pattern` matches, or "<" that begins none of `marks`."""
        pieces: list[str] = []
        while character := (yield from self.peek()):
            if character == "<":
                if (yield from self.is_at(marks)):
                    break
                pieces.append(self.take())
            elif found := self._match(pattern):
                pieces.append(found)
            else:
                break
        return "".join(pieces)

    def until(self, markers: tuple[str, ...], sink: Sink, *, takes: bool = True) -> Reading[str]:
        """Passes text to `sink` up to the first of `markers`, which is returned, and taken if
        `takes`; "" at the end. Text is held back only while it may be the beginning of a marker."""
        pattern, firsts = _finder(markers)
        while True:
            found = pattern.search(self._text, self._at) if markers else None
            if found is not None:
                if found.start() > self._at:
                    sink(self.take(found.start() - self._at))
                return self.take(len(found[0])) if takes else found[0]
            held = 0 if self._ended else self._held(markers, firsts)
            if count := len(self._text) - self._at - held:
                sink(self.take(count))
            if self._ended:
                return ""
            yield

    def trimmed(self, ends: tuple[str, ...], sink: Sink, before: str) -> Reading[bool]:
        """As `until`, without white space at both ends, and with `before` in front of any text;
        whether there was some."""
        yield from self.space()
        has_any, held = False, before

        def add(text: str) -> None:
            nonlocal has_any, held
            body = text.rstrip()
            if body:
                sink(held + body)
                has_any, held = True, ""
            held += text[len(body) :]

        if (yield from self.until(ends, add)):
            yield from self.space()
        return has_any

    def json_value(self, sink: Sink, ends: tuple[str, ...] = ()) -> Reading[bool]:
        """Passes one JSON value to `sink`, raw control characters of its strings escaped; False
        where the text, or one of `ends` outside its strings, ends it or goes on with none.

        Only strings and brackets are looked at: what else is between two brackets is passed on.
        """
        closing: list[str] = []
        between = _BEFORE_MARKS if ends else _BETWEEN
        while True:
            character = yield from self.peek()
            if character == "":
                return False
            if character == '"':
                if not (yield from self._json_string(sink)):
                    return False
            elif character in "{[":
                closing.append("}" if character == "{" else "]")
                sink(self.take())
            elif closing and character == closing[-1]:
                closing.pop()
                sink(self.take())
            elif closing:
                if ends and character == "<" and (yield from self.is_at(ends)):
                    return False
                sink(self._match(between) or self.take())
                continue
            elif not (yield from self._json_scalar(sink)):
                return False
            if not closing:
                return True

    def python_value(self, ends: tuple[str, ...] = ()) -> Reading[str | None]:
        """Takes one value as Python writes it, up to a comma or bracket behind it; None where the
        text, or one of `ends`, ends it."""
        pieces: list[str] = []
        depth, quote = 0, ""
        while True:
            character = yield from self.peek()
            if character == "":
                return None
            if not quote and not depth and character in ",)]}":
                return "".join(pieces)
            if ends and character == "<" and (yield from self.is_at(ends)):
                return None
            if quote and character == "\\":
                pieces.append(self.take())
                if (yield from self.peek()) == "":
                    return None
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            else:
                depth += (character in "([{") - (character in ")]}")
            pieces.append(self._match(_PLAIN) or self.take())

    def json_text(self) -> Reading[str | None]:
        """The value of a JSON string; None where there is none."""
        pieces: list[str] = []
        if (yield from self.peek()) != '"' or not (yield from self._json_string(pieces.append)):
            return None
        try:
            return msgspec.json.decode("".join(pieces), type=str)
        except msgspec.DecodeError:
            return None

    def _json_string(self, sink: Sink) -> Reading[bool]:
        sink(self.take())
        while True:
            if found := self._match(_IN_STRING):
                sink(found)
            character = yield from self.peek()
            if character == "":
                return False
            if character == "\\":
                escape = self.take()
                if (yield from self.peek()) == "":
                    sink(escape)
                    return False
                sink(escape + self.take())
            elif character == '"':
                sink(self.take())
                return True
            elif character < " ":
                sink(json.dumps(self.take())[1:-1])

    def _json_scalar(self, sink: Sink) -> Reading[bool]:
        found = False
        while True:
            if part := self._match(_SCALAR):
                found = True
                sink(part)
            if self._at < len(self._text) or (yield from self.peek()) == "":
                return found

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def _held(self, markers: tuple[str, ...], firsts: str) -> int:
        """How many of the last characters may be the beginning of a marker."""
        longest = max(map(len, markers), default=1) - 1
        tail = self._text[max(self._at, len(self._text) - longest) :]
        for start, character in enumerate(tail):
            if character in firsts and any(m.startswith(tail[start:]) for m in markers):
                return len(tail) - start
        return 0


class AnswerReader(ABC):
    """A parser of answers (`service.protocols.output.OutputParser`) that is one generator.
    has_breaks: BREAK stands in what is no mark, and is taken out."""

    def __init__(self, *, has_breaks: bool) -> None:
        self._has_breaks = has_breaks
        self._reader = Reader()
        self._parts = GrowingParts()
        self._calls = 0  # that have begun
        self._is_cut = False  # at the end
        self._run = self._answer()
        self._over = False

    def push(self, text: str) -> list[OutputPart]:
        if text:
            self._reader.feed(text)
            self._advance()
        return self._parts.take()

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        self._is_cut = is_cut
        self._reader.end()
        self._advance()
        return self._parts.take()

    def _advance(self) -> None:
        if not self._over:
            self._over = next(self._run, True) is True

    def _begin_call(self, name: str) -> None:
        self._add(CallStart(self._calls, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        """Adds to the arguments of the last call."""
        self._add(CallArguments(self._calls - 1, text))

    def _add(self, part: OutputPart) -> None:
        """Adds a part as the model wrote it."""
        if self._has_breaks and BREAK in part[-1]:
            part = part._replace(**{part._fields[-1]: part[-1].replace(BREAK, "")})
        if part[-1]:
            self._parts.add(part)

    @abstractmethod
    def _answer(self) -> Reading[bool]:
        """Adds parts of the whole answer; returns True."""


@lru_cache(maxsize=64)
def _finder(markers: tuple[str, ...]) -> tuple[re.Pattern[str], str]:
    """A pattern of all markers, and their first characters."""
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
    return pattern, "".join({marker[0] for marker in markers})
