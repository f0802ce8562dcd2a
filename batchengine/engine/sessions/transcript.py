"""A timeline as the messages that it was rendered from, as far as control tokens show them.

Reads tokens; changes nothing. A template that marks messages otherwise gives none: then the whole
text is the answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from batchengine.markup import CHANNEL, FUNCTIONS, START, tool_of
from batchengine.text.messages import ROLES

MODEL = "model"  # what templates of Gemma call the assistant
SLICE = 4096  # tokens between two chances for other tasks
HEADER_TOKENS_MAX = 16  # from the mark of a message to the end of its role
HEADER = re.compile(rb"\s*([a-z_]{1,16})\s*\n")
HEAD_TOKENS_MAX = 512  # of a message of Harmony: the name of a tool has 256 characters
SPEAKER = re.compile(r"\s*(?!to=)([^\s<]+)")  # a role, or the name of a tool
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HeadMarks(NamedTuple):
    """The tokens of Harmony's marks in the head of a message."""

    start: int
    channel: int
    message: int


async def messages_of(
    tokens: Sequence[int],
    marks: Collection[int],
    control: Collection[int],
    piece: Callable[[int], bytes],
) -> list[dict[str, Any]]:
    """Role and content of each message; `marks` begin one, tokens of `control` show nothing. Marks
    inside an answer that its reader needs are not in `control`.

    Text between the end of a message and the next one is its own: an answer need not end there.
    """
    found: list[dict[str, Any]] = []
    role, text, has_ended = "", bytearray(), False
    header: list[int] | None = None  # tokens since a mark, until the role is known
    for at, token in enumerate(tokens):
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if token in marks:
            text += _shown(header, control, piece)
            header = []
        elif header is not None:
            header.append(token)
            is_over = token in control
            head = b"".join(map(piece, header[:-1] if is_over else header))
            named = HEADER.match(head + b"\n" if is_over else head)
            if named is not None:
                _close(found, role, text)
                text = bytearray(b"" if is_over else head[named.end() :])
                role, header, has_ended = named[1].decode(), None, False
            elif len(header) >= HEADER_TOKENS_MAX:  # no header: a model wrote the mark
                text += _shown(header, control, piece)
                header = None
        elif token in control:
            has_ended = True
        else:
            text += piece(token)
    text += _shown(header, control, piece)
    _close(found, role, text, is_last=not has_ended)
    return found


async def channel_messages_of(
    tokens: Sequence[int], marks: HeadMarks, control: Collection[int], piece: Callable[[int], bytes]
) -> list[dict[str, Any]]:
    """As `messages_of`, of Harmony: messages of one answer are one message of the assistant, with
    its reasoning and its calls, in the form of chat completions."""
    made = _Answers()
    heading, text, has_ended = "", bytearray(), False
    head: list[int] | None = None  # tokens since a mark that may begin a message
    for at, token in enumerate(tokens):
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if token == marks.start or (token == marks.channel and head is None):
            text += _shown(head, control, piece)
            head = [token]
        elif head is None:
            has_ended |= token in control
            text += _shown([token], control, piece)
        elif token == marks.message:
            made.add(heading, text)
            heading = b"".join(map(piece, head)).decode("utf-8", "replace")
            head, text, has_ended = None, bytearray(), False
        else:
            head.append(token)
            if len(head) > HEAD_TOKENS_MAX:
                text += _shown(head, control, piece)
                head = None
    if has_ended or text.strip():
        made.add(heading, text)
    return made.messages


class _Answers:
    """Messages of a chat, made of those of Harmony."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._waiting: dict[str, str] = {}  # ids of calls without a result: names of their tools
        self._count = 0  # of calls

    def add(self, heading: str, text: bytearray) -> None:
        """Adds a message of Harmony, of which `heading` is all in front of its text."""
        if not heading:  # text in front of the first message
            return
        content = bytes(text).decode("utf-8", "replace").strip()
        speaker = SPEAKER.match(heading.removeprefix(START))
        role = "assistant" if speaker is None else speaker[1]
        if role not in ROLES:
            self._add_result(role.removeprefix(FUNCTIONS), content)
        elif role == "assistant":
            self._add_answer(heading, content)
        else:
            self.messages.append({"role": role, "content": content})

    def _add_result(self, name: str, content: str) -> None:
        message = {"role": "tool", "name": name, "content": content}
        call = next((one for one, tool in self._waiting.items() if tool == name), None)
        if call is not None:
            del self._waiting[call]
            message["tool_call_id"] = call
        self.messages.append(message)

    def _add_answer(self, heading: str, content: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        answer = self.messages[-1]
        recipient, channel = RECIPIENT.search(heading), CHANNEL_NAME.search(heading)
        name = "" if recipient is None else tool_of(recipient[1])
        if name:
            call = f"call_{self._count}"
            self._count += 1
            self._waiting[call] = name
            function = {"name": name, "arguments": content or "{}"}
            calls = answer.setdefault("tool_calls", [])
            calls.append({"id": call, "type": "function", "function": function})
            return
        key = "content"
        if channel is not None and channel[1] == "analysis":
            key = "reasoning_content"
        answer[key] = "\n\n".join(filter(None, (answer.get(key), content)))


def _shown(
    header: list[int] | None, control: Collection[int], piece: Callable[[int], bytes]
) -> bytes:
    """The text of tokens behind a mark that began no message."""
    return b"".join(piece(token) for token in header or () if token not in control)


def _close(
    found: list[dict[str, Any]], role: str, text: bytearray, *, is_last: bool = False
) -> None:
    """Adds a message; the last one only if it has begun, since prompts end with an empty one."""
    content = bytes(text).decode("utf-8", "replace").strip()
    if role and (content or not is_last):
        found.append({"role": "assistant" if role == MODEL else role, "content": content})


async def text_of(tokens: Sequence[int], piece: Callable[[int], bytes]) -> str:
    """The text of all tokens."""
    parts: list[bytes] = []
    for start in range(0, len(tokens), SLICE):
        parts.append(b"".join(map(piece, tokens[start : start + SLICE])))
        await asyncio.sleep(0)
    return b"".join(parts).decode("utf-8", "replace")
