"""The parser of answers with markup: reasoning, text, and calls of tools in any form of the markup.

Markup is never shown; what looks like a call and is none comes out as text, also after its end. A
call is certain once its name and the beginning of its arguments were read: from there on they are
passed on as they come, so a call that the model writes wrong has arguments that are no JSON, and so
has one that is cut off there. Of a call that is cut off before nothing is shown: a client could run
one without arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from batchengine.core import OutputForm
from batchengine.markup import (
    ARGS,
    CALL_ID,
    FIELDS_END,
    FIELDS_NAME,
    KEY,
    MARKUPS,
    CallForm,
    Markup,
    Named,
    numbered_name,
)
from service.protocols.markup.harmony import HarmonyParser
from service.protocols.markup.python_calls import PYTHON_KEY, PYTHON_NAME, PythonArguments
from service.protocols.markup.reader import AnswerReader, Reader, Reading
from service.protocols.markup.values import (
    NAME_CHARS_MAX,
    TAG_NAME,
    Values,
    decoded,
    name_of,
)
from service.protocols.output import (
    OutputParser,
    OutputPart,
    PlainText,
    Reasoning,
    Text,
)

_NAME = re.compile(r"[\w.:/-]")
_NAME_KEYS = ("name", "function", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_OTHER_KEYS = ("type", "id")  # of a call that has no marker in front


class MarkupParser(AnswerReader):
    """Splits an answer of one form; parts of one kind that follow each other are joined."""

    def __init__(self, form: OutputForm) -> None:
        self._form = form
        self._markup: Markup = MARKUPS[form.markup]
        super().__init__(has_breaks=self._markup.has_breaks)
        self._held = ""  # white space that is text if more text follows
        self._shown = False  # whether any text was since the last call
        self._hides = False  # what is left is part of a call
        self._has_thought = False

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        if is_cut and not self._shown:  # what was held back may be the beginning of a marker
            self._hides = self._form.checked or self._calls > 0
        return super().flush(is_cut=is_cut)

    def _text(self, text: str) -> None:
        """Adds text of the answer; white space waits until other text follows."""
        if self._hides:
            return
        body = text.rstrip()
        if not body:
            self._held += text
            return
        whole, self._held = self._held + body, text[len(body) :]
        self._add(Text(whole))
        self._shown = True

    def _no_call(self, text: str) -> None:
        """Adds text that began as a call and is none, unless it was cut off."""
        self._hides |= self._is_cut
        self._text(text)

    def _answer(self) -> Reading[bool]:
        yield from self._reasoning()
        markup, reader = self._markup, self._reader
        thoughts = tuple(start for start, _ in markup.reasoning) if markup.thinks_again else ()
        if not self._form.calls:
            while (yield from reader.until(thoughts, lambda text: self._add(Text(text)))):
                yield from self._thought()
            return True
        if markup.bare:
            space, following = yield from reader.kept_space()
            self._held += space
            if following == "{":
                yield from self._objects("", strict=True)
            elif following == "[":
                yield from self._bracket()
        while marker := (yield from reader.until((*markup.forms, *thoughts), self._text)):
            if marker in thoughts:
                yield from self._thought()
            else:
                yield from self._call(markup.forms[marker], marker)
        if self._held and not self._hides and (self._shown or not self._calls):
            self._add(Text(self._held))
        return True

    def _reasoning(self) -> Reading[None]:
        """Reasoning before all else; of an answer without any, white space is text."""
        reader = self._reader
        if not self._form.in_reasoning:
            space, _ = yield from reader.kept_space()
            for start, _ in self._markup.reasoning:
                if (yield from reader.has(start)):
                    break
            else:
                self._held = space
                if not self._form.calls and space:
                    self._add(Text(space))
                return
        yield from self._thought()

    def _thought(self) -> Reading[None]:
        """Reasoning behind its marker; an empty line stands in front of any but the first."""
        before, ends = "\n\n" * self._has_thought, tuple(e for _, e in self._markup.reasoning)
        self._has_thought |= yield from self._reader.trimmed(
            ends, lambda text: self._add(Reasoning(text)), before
        )

    def _start(self, name: str) -> None:
        """Begins a call, whose head is what was kept."""
        self._reader.kept()
        self._begin_call(name)
        self._held, self._shown = "", False

    def _values(self, name: str) -> Values:
        """The reader of the arguments of a call of this tool that are no JSON object."""
        texts = self._form.text_parameters.get(name, ())
        return Values(self._reader, texts, self._arguments, lambda: self._is_cut)

    def _call(self, form: CallForm, marker: str) -> Reading[None]:
        """One call, or several, behind `marker`, which is text if there is none."""
        forms: dict[CallForm, Callable[[str], Reading[None]]] = {
            "object": self._tagged,
            "function": self._function,
            "objects": self._objects,
            "list": self._listed,
            "named": self._named,
            "fields": self._fields,
            "python": self._python,
        }
        yield from forms[form](marker)

    def _tagged(self, marker: str) -> Reading[None]:
        reader, function = self._reader, self._markup.tags.call
        space, following = yield from reader.kept_space()
        if following == "<" and (yield from reader.has(function)):
            yield from self._function(marker + space + function)
            while self._markup.joins:
                space, following = yield from reader.kept_space()
                if following != "<" or not (yield from reader.has(function)):
                    self._held += space
                    break
                yield from self._function(space + function)
        elif following == "{":
            while following == "{":
                if not (yield from self._object(marker + space)):
                    return
                marker = space = ""
                following = yield from reader.space()
            yield from reader.has(self._markup.closing)
        elif self._markup.writes == "pairs":
            yield from self._pairs(marker + space)
        else:
            self._no_call(marker + space)

    def _pairs(self, marker: str) -> Reading[None]:
        """NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>..., white space between or not."""
        reader = self._reader
        reader.keep()
        name = yield from reader.word(_NAME, NAME_CHARS_MAX)
        yield from reader.space()
        has_any = bool(name) and (yield from reader.has(KEY))
        if not has_any and not (name and (yield from reader.has(self._markup.closing))):
            self._no_call(marker + reader.kept())
            return
        self._start(name)
        if has_any:
            yield from self._values(name).pairs()
            yield from reader.space()
            yield from reader.has(self._markup.closing)
        else:
            self._arguments("{}")

    def _fields(self, marker: str) -> Reading[None]:
        """call:NAME{KEY:VALUE,...}, white space between or not."""
        reader = self._reader
        reader.keep()
        name = yield from _fields_head(reader)
        if not name or (yield from reader.space()) != "{":
            self._no_call(marker + reader.kept())
            return
        self._start(name)
        yield from self._values(name).fields()
        yield from reader.space()
        yield from reader.has(FIELDS_END)

    def _objects(self, prefix: str, strict: bool = False) -> Reading[None]:
        """Objects with a semicolon between them, if there is one."""
        reader = self._reader
        while True:
            space, following = yield from reader.kept_space()
            if following != "{":
                return self._no_call(prefix + space)
            is_call = yield from self._object(prefix + space, strict)
            if not is_call or (yield from reader.space()) != ";":
                return
            prefix = reader.take()

    def _listed(self, marker: str) -> Reading[None]:
        """[{...}, {...}], of which brackets may be missing, or NAME[CALL_ID]id[ARGS]{...}."""
        reader = self._reader
        reader.keep()
        yield from reader.space()
        is_list = yield from reader.has("[")
        following = yield from reader.space()
        if is_list or following == "{":
            prefix = marker + reader.kept()
            if following != "{":
                self._no_call(prefix)
            while following == "{" and (yield from self._object(prefix)):
                prefix = ""
                if (yield from reader.space()) == ",":
                    reader.take()
                following = yield from reader.space()
            if not prefix:
                yield from self._list_end()
            return
        name = yield from _listed_head(reader)
        taken = reader.kept()
        if not name or (yield from reader.peek()) != "{":
            self._no_call(marker + taken)
            return
        self._start(name)
        yield from reader.json_value(self._arguments)

    def _named(self, marker: str) -> Reading[None]:
        """Calls, each between two marks, of whose first `marker` may be one."""
        reader, marks = self._reader, self._markup.named
        is_begun = marker == marks.call
        while True:
            reader.keep()
            yield from reader.space()
            if not is_begun and not (yield from reader.has(marks.call)):
                break
            is_begun = False
            name = yield from _named_head(reader, marks)
            if not name or (yield from reader.space()) != "{":
                break
            marker = ""
            self._start(name)
            yield from reader.json_value(self._arguments)
            for end in ("```", marks.call_end):
                yield from reader.space()
                yield from reader.has(end)
        self._no_call(marker + reader.kept())
        if not marker:
            yield from self._calls_end(marks.end)

    def _bracket(self) -> Reading[None]:
        """An answer that begins with a bracket: that of a marker, or of calls as Python's."""
        for marker, form in self._markup.forms.items():
            if marker[0] == "[" and (yield from self._reader.has(marker)):
                return (yield from self._call(form, marker))
        yield from self._python()

    def _python(self, marker: str = "") -> Reading[None]:
        """[NAME(KEY=VALUE, ...), {"name": NAME, "arguments": {...}}, ...] and what ends it, white
        space between or not; brackets and commas may be missing. Without a marker, only calls of
        Python, with commas."""
        reader, prefix, is_first = self._reader, marker, True
        names, keys = (_NAME, PYTHON_KEY) if marker else (PYTHON_NAME, PYTHON_NAME)
        arguments = PythonArguments(reader, self._arguments, keys, self._markup.end)
        reader.keep()
        yield from reader.space()
        yield from reader.has("[")
        while True:
            following = yield from reader.space()
            if following == "]" and not is_first:
                return (yield from self._list_end())
            if following == "{" and marker:
                if not (yield from self._object(prefix + reader.kept())):
                    return
            else:
                name, key = yield from arguments.head(names)
                if key is None:
                    break
                self._start(name)
                yield from arguments.rest(key)
            prefix, is_first = "", False
            reader.keep()
            yield from reader.space()
            has_comma = (yield from reader.has(",")) or (marker and (yield from reader.has(";")))
            if not has_comma and not marker and (yield from reader.peek()) != "]":
                break
        (self._no_call if marker and is_first else self._text)(prefix + reader.kept())
        if not is_first and self._markup.end:
            yield from self._list_end()

    def _list_end(self) -> Reading[None]:
        """Takes the bracket behind a list of calls, if it is there, and the mark of their end."""
        yield from self._reader.has("]")
        self._held += (yield from self._reader.kept_space())[0]
        if self._markup.end:
            yield from self._calls_end(self._markup.end)

    def _calls_end(self, end: str) -> Reading[None]:
        """Takes the mark of the end of calls; what is before it, up to further calls, is text."""
        yield from self._reader.until((end, *self._markup.forms), self._text, takes=False)
        if (yield from self._reader.has(end)):
            self._held = ""

    def _object(self, prefix: str, strict: bool = False) -> Reading[bool]:
        """One call as a JSON object; False if it was none, and `prefix` and it are text.

        `strict`: its keys must be those of a call, as nothing else says that it is one.
        """
        reader = self._reader
        reader.keep()
        reader.take()
        name = arguments = ""
        started = nested = False
        while (following := (yield from reader.space())) != "}" or nested:
            if following == "}":
                nested = False
                reader.take()
                continue
            if following == ",":
                reader.take()
                continue
            key = yield from reader.json_text()
            if key is None or (yield from reader.space()) != ":":
                break
            reader.take()
            following = yield from reader.space()
            if key in _NAME_KEYS and following == '"' and not name:
                name = (yield from reader.json_text()) or ""
                if not 0 < len(name) <= NAME_CHARS_MAX:
                    break
            elif key == "function" and following == "{" and not nested and not started:
                reader.take()
                nested = True
            elif key in _ARGUMENT_KEYS and name and not started and following == "{":
                self._start(name)
                started = True
                if not (yield from reader.json_value(self._arguments)):
                    break
            elif started or not strict or key in (*_OTHER_KEYS, *_ARGUMENT_KEYS):
                value: list[str] = []
                if not (yield from reader.json_value(value.append)):
                    break
                if key in _ARGUMENT_KEYS:
                    arguments = "".join(value)
            else:
                break
        else:
            reader.take()
            if name and not started and (arguments or not strict):
                self._start(name)
                started = True
                self._arguments(_as_object(arguments))
        if not started:
            (self._text if strict else self._no_call)(prefix + reader.kept())
            return False
        return True

    def _function(self, marker: str) -> Reading[None]:
        """NAME><parameter=KEY>VALUE</parameter>...</function> or NAME>{...}</function>, in the tags
        of the markup."""
        reader, tags = self._reader, self._markup.tags
        reader.keep()
        name = yield from name_of(reader, tags)
        if not name or not (yield from reader.has(">")):
            self._no_call(marker + reader.kept())
            return
        if (yield from reader.space()) == "{":
            self._start(name)
            yield from reader.json_value(self._arguments)
        else:
            has_any = yield from reader.has(tags.parameter)
            if self._is_cut and not has_any:
                self._hides = True
                return
            self._start(name)
            yield from self._values(name).parameters(has_any, tags)
        yield from reader.space()
        if (yield from reader.has(tags.call_end)):
            yield from reader.space()
        yield from reader.has(self._markup.closing)


def _listed_head(reader: Reader) -> Reading[str]:
    """NAME[CALL_ID]id[ARGS], of which the name alone need be there; the name."""
    name = yield from reader.word(_NAME, NAME_CHARS_MAX)
    if name and (yield from reader.has(CALL_ID)):
        yield from reader.word(_NAME, NAME_CHARS_MAX)
    if name and (yield from reader.has(ARGS)):
        yield from reader.space()
    return name


def _fields_head(reader: Reader) -> Reading[str]:
    """call:NAME; the name, "" if there is none."""
    yield from reader.space()
    is_named = yield from reader.has(FIELDS_NAME)
    return (yield from reader.word(_NAME, NAME_CHARS_MAX)) if is_named else ""


def _named_head(reader: Reader, marks: Named) -> Reading[str]:
    """NAME SEP, function SEP NAME and the begin of a block, or functions.NAME:NUMBER SEP; the name,
    "" if there is none."""
    name = yield from reader.word(
        TAG_NAME, 2 * NAME_CHARS_MAX if marks.numbered else NAME_CHARS_MAX
    )
    if not (yield from reader.has(marks.sep)):
        return ""
    if marks.numbered:
        return numbered_name(name)[:NAME_CHARS_MAX]
    if name == "function":
        name = yield from reader.word(TAG_NAME, NAME_CHARS_MAX)
        yield from reader.space()
        yield from reader.has("```json")
    return name.strip()


def _as_object(arguments: str) -> str:
    """Arguments that came in front of the name, as text, or not at all, as a JSON object."""
    value = decoded(arguments or "{}")
    if isinstance(value, str):
        arguments, value = value, decoded(value or "{}")
    return "{}" if value is None or arguments == "" else arguments


def parser_of(form: OutputForm) -> OutputParser:
    """The parser of an answer of this form."""
    if form.markup not in MARKUPS:
        return PlainText()
    has_channels = MARKUPS[form.markup].writes == "channel"
    return HarmonyParser(form) if has_channels else MarkupParser(form)
