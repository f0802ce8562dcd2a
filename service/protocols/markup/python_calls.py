"""Arguments of calls as Python writes them, KEY=VALUE, ...: they become a JSON object as they come.

Where the answer ends inside them, and where something is none, what was made of them is no JSON, so
no client runs the call.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass

from service.protocols.markup.reader import Reader, Reading, Sink
from service.protocols.markup.values import NAME_CHARS_MAX, as_value, decoded, quoted

PYTHON_NAME = re.compile(r"[\w.]")
PYTHON_KEY = re.compile(r"[^=,()\[\]{}'\"\\<>\n]")
_AHEAD_MAX = 2 * NAME_CHARS_MAX  # characters that are looked at behind a quote
_ESCAPES = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))
_HEX = {"x": 2, "u": 4, "U": 8}  # digits behind these letters
_HEX_DIGIT = re.compile(r"[0-9a-fA-F]")
_OCTAL_DIGIT = re.compile(r"[0-7]")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class PythonArguments:
    """The arguments of one call, passed to `sink`. keys: the characters of keys. end: what stands
    behind all calls of the answer, "" for nothing."""

    reader: Reader
    sink: Sink
    keys: re.Pattern[str]
    end: str

    @property
    def _ends(self) -> tuple[str, ...]:
        return (self.end,) if self.end else ()

    def head(self, names: re.Pattern[str]) -> Reading[tuple[str, str | None]]:
        """The name in front of them and the first key: "" if there are none, None where something
        else stands."""
        name = yield from self.reader.word(names, NAME_CHARS_MAX)
        if not name or not (yield from self.reader.has("(")):
            return name, None
        key = yield from self._key()
        is_begun = key or (yield from self.reader.peek()) == ")"
        return name, key if is_begun else None

    def rest(self, key: str) -> Reading[None]:
        """VALUE, KEY=VALUE, ... and the bracket, behind the first key. Behind something that is
        none, all up to the end is passed on as the model wrote it."""
        if (yield from self._whole(key)):
            self.reader.take()
        else:
            yield from self.reader.until(self._ends, self.sink, takes=False)

    def _whole(self, key: str) -> Reading[bool]:
        """As `rest`, up to the bracket; False at something else and at the end."""
        reader, before = self.reader, "{"
        following: str | None = key
        while following:
            self.sink(f"{before}{quoted(following)}: ")
            before = ", "
            if not (yield from self._value()):
                return False
            yield from reader.space()
            has_more = yield from reader.has(",")
            reader.keep()
            following = (yield from self._key()) if has_more else ""
            kept = reader.kept()
            if following is None:
                self.sink(f"{before}{kept}")
                return False
        if (yield from reader.space()) != ")":
            return False
        self.sink("{}" if before == "{" else "}")
        return True

    def _key(self) -> Reading[str | None]:
        """A key and the sign behind it; "" where there is none, None where something else is."""
        reader = self.reader
        yield from reader.space()
        key = (yield from reader.word(self.keys, NAME_CHARS_MAX)).strip()
        yield from reader.space()
        return key if not key or (yield from reader.has("=")) else None

    def _value(self) -> Reading[bool]:
        """Passes on one value; False where the answer or the end of the calls ends it."""
        reader = self.reader
        if (yield from reader.space()) in ("'", '"'):
            return (yield from self._text())
        value = yield from reader.python_value(self._ends)
        if value:
            self.sink(_from_python(value))
        return bool(value)

    def _text(self) -> Reading[bool]:
        """Passes on a text between quotes. Templates write texts as they are, so a quote behind
        which neither another argument nor the end of the call stands is part of the text; and what
        it quotes, up to the next one, too, unless it is an apostrophe."""
        reader = self.reader
        quote = reader.take()
        is_long = (yield from reader.ahead(0)) == (yield from reader.ahead(1)) == quote
        if is_long:
            quote += reader.take(2)
        self.sink('"')
        before, is_quoting = "", False

        def add(text: str) -> None:
            nonlocal before
            before = text[-1]
            self._quote(text)

        while True:
            found = yield from reader.until((quote, "\\", *self._ends), add, takes=False)
            if found == "\\":
                yield from self._escape(quote)
            elif found != quote:
                return False
            elif is_long or (yield from self._closes(is_last=is_quoting)):
                reader.take(len(quote))
                self.sink('"')
                return True
            else:
                is_quoting = not is_quoting and not before.isalnum()
                add(reader.take())

    def _closes(self, *, is_last: bool = False) -> Reading[bool]:
        """Whether what stands behind the next character ends an argument. is_last: only the end of
        all calls."""
        reader = self.reader
        at, character = yield from self._behind_space(1)
        if character == ")":
            at, character = yield from self._behind_space(at + 1)
            if is_last and character == "]":
                at, character = yield from self._behind_space(at + 1)
            if character in ("", "<") and self._ends:
                return (yield from self._ends_at(at))
            return character in (",", "]", "") and not is_last
        if character != "," or is_last:
            return not character and not is_last
        at, character = yield from self._behind_space(at + 1)
        first = at
        while PYTHON_KEY.fullmatch(character) and at < _AHEAD_MAX:
            at += 1
            character = yield from reader.ahead(at)
        return character == ")" if at == first else character == "="

    def _behind_space(self, at: int) -> Reading[tuple[int, str]]:
        """The first character from `at` on that is no white space, and where it stands."""
        character = yield from self.reader.ahead(at)
        while character.isspace() and at < _AHEAD_MAX:
            at += 1
            character = yield from self.reader.ahead(at)
        return at, character

    def _ends_at(self, at: int) -> Reading[bool]:
        """Whether the end of the calls, or of the answer, stands `at` characters on."""
        for offset, sign in enumerate(self.end):
            character = yield from self.reader.ahead(at + offset)
            if character != sign:
                return not offset and character == ""
        return True

    def _escape(self, quote: str) -> Reading[None]:
        """Passes on what a backslash and the characters behind it stand for. In front of the quote
        that ends the last text of all calls it is itself: templates write it so."""
        reader = self.reader
        reader.take()
        following = yield from reader.peek()
        digits = ""
        if following in _HEX:
            letter = reader.take()
            digits = yield from reader.word(_HEX_DIGIT, _HEX[letter])
            code = int(digits, 16) if len(digits) == _HEX[letter] else sys.maxunicode + 1
            if 0xD800 <= code < 0xE000:
                self.sink(f"\\u{code:04x}")  # two of them are one character in JSON, too
            else:
                self._quote(chr(code) if code <= sys.maxunicode else f"\\{letter}{digits}")
        elif digits := (yield from reader.word(_OCTAL_DIGIT, 3)):
            self._quote(chr(int(digits, 8)))
        elif following == quote and (yield from self._closes(is_last=True)):
            self._quote("\\")
        elif following in _ESCAPES:
            self._quote(_ESCAPES[reader.take()])
        else:
            self._quote("\\")

    def _quote(self, text: str) -> None:
        self.sink(quoted(text)[1:-1])


def _from_python(text: str) -> str:
    """A value as Python or JSON writes it as JSON; what is none is text."""
    if decoded(text) is not None:
        return text.strip()
    try:
        tree = _Constants().visit(ast.parse(text.strip(), mode="eval"))
        value = json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
        value.encode()  # half a surrogate cannot be
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return as_value(text)
    return value


class _Constants(ast.NodeTransformer):
    """JSON's words for constants, among values of Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
