"""Arguments of calls whose values stand without quotes: parameters, and pairs of keys and values.

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

from batchengine.markup import KEY, KEY_END, VALUE, VALUE_END
from service.protocols.markup.reader import Reader, Reading, Sink

NAME_CHARS_MAX = 256
TAG_NAME = re.compile(r"[^<>\n]")
PARAMETER = "<parameter="
_PARAMETER_ENDS = ("\n</parameter>", "</parameter>")
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Values:
    """The arguments of one call, passed to `sink`. texts: those whose values are text, whatever
    they look like. is_cut: whether the answer was cut at its end."""

    reader: Reader
    texts: tuple[str, ...]
    sink: Sink
    is_cut: Callable[[], bool]

    def parameters(self, has_any: bool) -> Reading[None]:
        """KEY>VALUE</parameter>..., behind the beginning of the first one, if there is any."""
        reader, before = self.reader, "{"
        while has_any:
            key = (yield from reader.word(TAG_NAME, NAME_CHARS_MAX)).strip()
            yield from reader.has(">")
            yield from reader.has("\n")
            self.sink(f"{before}{quoted(key)}: ")
            if not (yield from self._value(key in self.texts, _PARAMETER_ENDS)):
                return
            before = ", "
            if (yield from reader.space()) == "":
                return
            has_any = yield from reader.has(PARAMETER)
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


def quoted(text: str) -> str:
    """A text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def as_value(text: str) -> str:
    """A value without quotes as JSON: itself if it is JSON, else text."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    return bare if bare == "null" or decoded(bare) is not None else quoted(text)


def decoded(text: str) -> object:
    """The value of JSON text; None where it is none, or null."""
    try:
        return cast("object", msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError):
        return None
