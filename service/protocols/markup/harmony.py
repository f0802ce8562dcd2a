"""The parser of answers in Harmony: messages, each with a head that names channel and recipient.

The channel `analysis` is reasoning, a message to a tool is a call, all others are text. What stands
behind a mark and is no head is text with its mark; a head that the answer ends in is not shown. An
empty line stands between two messages of one kind.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from batchengine.core import OutputForm
from batchengine.markup import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, tool_of
from service.protocols.markup.reader import AnswerReader, Reading
from service.protocols.output import Reasoning, Text

WORD_CHARS_MAX = 300
HEAD_PARTS_MAX = 12  # words, marks and spaces
TO = "to="
_WORD = re.compile(r"[^\s<]")
_MARKS = (END, START, CHANNEL, CALL)


class Head(NamedTuple):
    """What stands in front of a message's text; `role` may be a tool that the model made up."""

    role: str = "assistant"
    channel: str = "final"
    tool: str = ""

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" or self.role != "assistant"


class HarmonyParser(AnswerReader):
    """Splits an answer that follows the role of its first message."""

    def __init__(self, form: OutputForm) -> None:
        super().__init__(has_breaks=True)
        self._form = form
        self._has_text = False
        self._has_reasoning = False

    def _answer(self) -> Reading[bool]:
        reader = self._reader
        head: Head | None = Head(channel="analysis")
        held = ""
        if not self._form.in_reasoning:
            reader.keep()
            head = yield from self._head("assistant")
            held = "" if head else reader.kept()
        while True:
            head = head or Head()
            if self._form.calls and head.tool:
                held += yield from self._call(head)
            head = yield from self._body(head, held)
            held = ""
            if head is None:
                return True

    def _head(self, role: str, mark: str = "") -> Reading[Head | None]:
        """The head behind a role, or behind the mark of its channel; None if there is none.

        Of a head that the answer ends in nothing is kept.
        """
        reader = self._reader
        channel = recipient = ""
        has_mark = is_addressed = False
        is_started = mark == START
        if role.startswith(TO):
            role, recipient, is_addressed = "assistant", role, True
        for _ in range(HEAD_PARTS_MAX):
            if mark == CHANNEL or (yield from reader.has(CHANNEL)):
                mark, has_mark = "", True
                channel = yield from reader.word(_WORD, WORD_CHARS_MAX)
            elif (yield from reader.has(MESSAGE)):
                reader.kept()
                return Head(role, channel, tool_of(recipient.removeprefix(TO)))
            elif (yield from reader.has(TO)):
                is_addressed = True
                recipient = yield from reader.word(_WORD, WORD_CHARS_MAX)
            elif (yield from reader.has(CONSTRAIN)):
                has_mark = True
                yield from reader.word(_WORD, WORD_CHARS_MAX)
            elif (yield from reader.peek()).isspace():
                reader.take()
            elif not (has_mark or is_addressed) or not (
                yield from reader.word(_WORD, WORD_CHARS_MAX)
            ):
                break
        at_end = (yield from reader.peek()) == ""
        if (at_end and (has_mark or (is_addressed and self._is_cut))) or (
            (is_started or (self._is_cut and self._form.checked)) and reader.ends_in(TO)
        ):
            yield from reader.word(_WORD, WORD_CHARS_MAX)
            reader.kept()  # the answer ends in a head
            reader.keep()
        return None

    def _body(self, head: Head, held: str) -> Reading[Head | None]:
        """Adds the text of a message, `held` first; returns the head of the next one, None at the
        end of the answer."""
        reader, is_begun = self._reader, False

        def add(text: str) -> None:
            nonlocal is_begun
            before = "\n\n" if self._shows(head) and not is_begun else ""
            is_begun = True
            if head.is_reasoning:
                self._add(Reasoning(before + text))
                self._has_reasoning = True
            else:
                self._add(Text(before + text))
                self._has_text = True

        if held:
            add(held)
        while mark := (yield from reader.until(_MARKS, add)):
            reader.keep()
            following = mark
            if mark in (END, CALL):
                if (yield from reader.space()) == "":
                    return None
                following = START if (yield from reader.has(START)) else ""
            role = "assistant"
            if following == START:
                role = yield from reader.word(_WORD, WORD_CHARS_MAX)
                if (yield from reader.peek()) == "":
                    return None
            found = yield from self._head(role or "assistant", following)
            if found is not None:
                return found
            if kept := reader.kept():
                add(mark + kept)
            elif (yield from reader.peek()) == "":
                return None
            else:
                add(mark)
        return None

    def _shows(self, head: Head) -> bool:
        """Whether a message of this kind was shown."""
        return self._has_reasoning if head.is_reasoning else self._has_text

    def _call(self, head: Head) -> Reading[str]:
        """A call; returns white space that was taken and is none of it."""
        reader = self._reader
        reader.keep()
        following = yield from reader.space()
        space = reader.kept()
        is_empty = following == "" and not self._is_cut
        is_empty |= yield from reader.is_at((END, CALL))
        if following != "{" and not is_empty:
            return space
        self._begin_call(head.tool)
        if is_empty:
            self._arguments("{}")
        elif (yield from reader.json_value(self._arguments, _MARKS)):
            yield from reader.space()
        return ""
