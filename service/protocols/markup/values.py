"""Arguments of calls that are no JSON: parameters and pairs of keys and values, which stand without
quotes, and fields, whose texts stand between marks.

They become a JSON object as they come. Where the answer ends inside it, and where a pair is none,
what was made of them is no JSON, so no client runs the call.
"""

from __future__ import annotations

import json
import re
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
            return (yield from self._value(True, (QUOTE,)))
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
