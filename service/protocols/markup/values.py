"""Arguments of calls that are no JSON: parameters and pairs of keys and values, which stand without
quotes, and fields, whose texts stand between marks.

They become a JSON object as they come. Where the answer ends inside it, and where a pair is none,
what was made of them is no JSON, so no client runs the call.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from batchengine.markup import (
    FIELDS,
    FIELDS_END,
    KEY,
    KEY_END,
    PARAMETER_END,
    QUOTE,
    VALUE,
    VALUE_END,
    Tags,
)
from service.protocols.markup.reader import Reader, Reading, Sink

NAME_CHARS_MAX = 256
TAG_NAME = re.compile(r"[^<>\n]")
PYTHON_NAME = re.compile(r"[\w.]")
PYTHON_KEY = re.compile(r"[^=,()\[\]{}'\"\\<>\n]")
_AHEAD_MAX = 2 * NAME_CHARS_MAX  # characters that are looked at behind a quote
_ESCAPES = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))
_HEX = {"x": 2, "u": 4, "U": 8}  # digits behind these letters
_HEX_DIGIT = re.compile(r"[0-9a-fA-F]")
_OCTAL_DIGIT = re.compile(r"[0-7]")
_CONSTANTS = {"true": True, "false": False, "null": None}
_QUOTED = re.compile(r"([\"'])(.*)\1")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BARE_KEY = re.compile(r"[^,:{}\[\]<]+")
_BARE_VALUE = re.compile(r"[^,{}\[\]<]+")
_FIELD_MARKS = (QUOTE, FIELDS, FIELDS_END)


@dataclass(frozen=True, slots=True)
class Values:
    """The arguments of one call, passed to `sink`. texts: those whose values are text, whatever
    they look like. is_cut: whether the answer was cut at its end."""

    reader: Reader
    texts: tuple[str, ...]
    sink: Sink
    is_cut: Callable[[], bool]

    def parameters(self, has_any: bool, tags: Tags) -> Reading[None]:
        """KEY>VALUE</parameter>..., behind the beginning of the first one, if there is any."""
        reader, before = self.reader, "{"
        ends = (tags.line + PARAMETER_END, PARAMETER_END)
        while has_any:
            key = yield from name_of(reader, tags)
            yield from reader.has(">")
            yield from reader.has(tags.line)
            self.sink(f"{before}{quoted(key)}: ")
            if not (yield from self._value(key in self.texts, ends)):
                return
            before = ", "
            if (yield from reader.space()) == "":
                return
            has_any = yield from reader.has(tags.parameter)
            if self.is_cut() and not has_any:
                return
        self.sink("{}" if before == "{" else "}")

    def pairs(self) -> Reading[None]:
        """KEY</arg_key><arg_value>VALUE</arg_value>..., behind the mark of the first key."""
        reader, before = self.reader, "{"
        has_any = True
        while has_any:
            self.sink(before)
            before = ", "
            key = (yield from reader.word(TAG_NAME, NAME_CHARS_MAX)).strip()
            has_value = yield from reader.has(KEY_END)
            if has_value:
                yield from reader.space()
                has_value = yield from reader.has(VALUE)
            if not has_value:
                return
            self.sink(f"{quoted(key)}: ")
            if not (yield from self._value(key in self.texts, (VALUE_END,))):
                return
            if (yield from reader.space()) == "":
                return
            has_any = yield from reader.has(KEY)
            if self.is_cut() and not has_any:
                return
        self.sink("}")

    def keyword(self, pattern: re.Pattern[str] = PYTHON_NAME) -> Reading[str | None]:
        """The name of an argument as Python writes it, with the sign behind it; "" where there is
        none, None where something else is."""
        reader = self.reader
        yield from reader.space()
        key = (yield from reader.word(pattern, NAME_CHARS_MAX)).strip()
        yield from reader.space()
        return key if not key or (yield from reader.has("=")) else None

    def keywords(self, key: str, pattern: re.Pattern[str], end: str = "") -> Reading[bool]:
        """VALUE, KEY=VALUE, ..., behind the first key, if that is not ""; False where the answer,
        `end` or something else ends them. What is wrong is passed on as the model wrote it."""
        reader, ends, before = self.reader, (end,) if end else (), "{"
        following: str | None = key
        while following:
            self.sink(f"{before}{quoted(following)}: ")
            before = ", "
            if not (yield from self._python_value(ends)):
                return False
            yield from reader.space()
            has_more = yield from reader.has(",")
            reader.keep()
            following = (yield from self.keyword(pattern)) if has_more else ""
            kept = reader.kept()
            if following is None:
                self.sink(f"{before}{kept}")
                return False
        if (yield from reader.space()) != ")":
            return False
        self.sink("{}" if before == "{" else "}")
        return True

    def _python_value(self, ends: tuple[str, ...]) -> Reading[bool]:
        """Passes on one value; False where the answer or one of `ends` ends it."""
        reader = self.reader
        if (yield from reader.space()) in ("'", '"'):
            return (yield from self._python_text(ends))
        value = yield from reader.python_value(ends)
        if value:
            self.sink(_from_python(value))
        return bool(value)

    def _python_text(self, ends: tuple[str, ...]) -> Reading[bool]:
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
            found = yield from reader.until((quote, "\\", *ends), add, takes=False)
            if found == "\\":
                yield from self._escape(quote, ends)
            elif found != quote:
                return False
            elif is_long or (yield from self._closes(1, ends, is_last=is_quoting)):
                reader.take(len(quote))
                self.sink('"')
                return True
            else:
                is_quoting = not is_quoting and not before.isalnum()
                add(reader.take())

    def _closes(self, at: int, ends: tuple[str, ...], *, is_last: bool = False) -> Reading[bool]:
        """Whether `at` characters on something stands that ends an argument. is_last: only the end
        of all calls."""
        reader = self.reader
        at, character = yield from self._behind_space(at)
        if character == ")":
            at, character = yield from self._behind_space(at + 1)
            if is_last and character == "]":
                at, character = yield from self._behind_space(at + 1)
            if character in ("", "<") and ends:
                return (yield from self._stands(at, ends))
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

    def _stands(self, at: int, marks: tuple[str, ...]) -> Reading[bool]:
        """Whether one of `marks` stands `at` characters on, or the text ends there."""
        for mark in marks:
            for offset, sign in enumerate(mark):
                character = yield from self.reader.ahead(at + offset)
                if character != sign:
                    break
            else:
                return True
        return (yield from self.reader.ahead(at)) == ""

    def _escape(self, quote: str, ends: tuple[str, ...]) -> Reading[None]:
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
        elif following == quote and (yield from self._closes(1, ends, is_last=True)):
            self._quote("\\")
        elif following in _ESCAPES:
            self._quote(_ESCAPES[reader.take()])
        else:
            self._quote("\\")

    def fields(self) -> Reading[None]:
        """{KEY:VALUE,...}. A comma too many is left out; behind anything else that is wrong, the
        call is passed on as the model wrote it."""
        if not (yield from self._whole_fields()):
            yield from self.reader.until((FIELDS_END, FIELDS), self.sink, takes=False)

    def _whole_fields(self) -> Reading[bool]:
        """As `fields`; False at what is wrong, and at the end of the answer."""
        reader, closing = self.reader, ["}"]
        self.sink(reader.take())
        before = ""  # the comma in front of the next key or value
        while closing:
            following = yield from reader.space()
            if following != closing[-1]:
                self.sink(before)
                if closing[-1] == "}":
                    if not (yield from self._field_key()):
                        return False
                    following = yield from reader.space()
                if following in ("{", "["):
                    self.sink(reader.take())
                    closing.append("}" if following == "{" else "]")
                    before = ""
                    continue
                if not (yield from self._field_value(following)):
                    return False
            else:
                self.sink(reader.take())
                closing.pop()
            before = ", "
            is_over = not closing or (yield from reader.space()) == closing[-1]
            if not is_over and not (yield from reader.has(",")):
                return False
        return True

    def _field_key(self) -> Reading[bool]:
        """Passes on a key and the colon behind it; False where there is none."""
        reader, pieces = self.reader, list[str]()
        reader.keep()
        key: str | None
        if (yield from reader.peek()) == '"':
            key = yield from reader.json_text()
        elif (yield from reader.has(QUOTE)):
            ended = yield from reader.until((QUOTE,), pieces.append)
            key = "".join(pieces) if ended else None
        else:
            key = (yield from reader.run(_BARE_KEY, _FIELD_MARKS)).strip() or None
        yield from reader.space()
        has_colon = key is not None and (yield from reader.has(":"))
        kept = reader.kept()
        self.sink(f"{quoted(key)}: " if key is not None and has_colon else kept)
        return has_colon

    def _field_value(self, following: str) -> Reading[bool]:
        """Passes on one value that is no list and has no fields; False where there is none."""
        reader = self.reader
        if following == '"':
            return (yield from reader.json_value(self.sink))
        if (yield from reader.has(QUOTE)):
            self.sink('"')
            ended = yield from reader.until((QUOTE,), self._quote)
            self.sink('"' if ended else "")
            return bool(ended)
        bare = (yield from reader.run(_BARE_VALUE, _FIELD_MARKS)).strip()
        self.sink(as_value(bare) if bare else "")
        return bool(bare)

    def _value(self, is_text: bool, ends: tuple[str, ...]) -> Reading[bool]:
        """One value up to one of `ends`; False where the answer ends inside it."""
        if is_text:
            self.sink('"')
            ended = yield from self.reader.until(ends, self._quote)
            if ended:
                self.sink('"')
            return bool(ended)
        value: list[str] = []
        ended = yield from self.reader.until(ends, value.append)
        if ended:
            self.sink(as_value("".join(value)))
        return bool(ended)

    def _quote(self, text: str) -> None:
        self.sink(quoted(text)[1:-1])


def is_tag_name(name: str) -> bool:
    """Whether `name_of` reads this name in a tag."""
    is_read = all(TAG_NAME.match(char) for char in name) and name == name.strip()
    return is_read and 0 < len(name) <= NAME_CHARS_MAX


def name_of(reader: Reader, tags: Tags) -> Reading[str]:
    """The name that stands in a tag, without its quotes; "" where there is none."""
    chars_max = NAME_CHARS_MAX + 2 * len(tags.quote)
    name = (yield from reader.word(TAG_NAME, chars_max)).strip()
    found = _QUOTED.fullmatch(name) if tags.quote else None
    return found[2].strip() if found else name


def quoted(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def as_value(text: str) -> str:
    """A value without quotes as JSON: itself if it is JSON, else text. A number may be of any
    size."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    if bare == "null" or _NUMBER.fullmatch(bare) or decoded(bare) is not None:
        return bare
    return quoted(text)


def decoded(text: str) -> object:
    """The value of JSON text; None where it is none, or null."""
    try:
        return cast("object", msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError):
        return None


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
