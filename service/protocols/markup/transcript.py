"""Histories of sessions whose answers are shown with their marks, as messages of a chat.

An answer of Gemma 4 is one message: thoughts, texts, calls of tools and their results.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

from batchengine.core import OutputForm
from batchengine.markup import MARKUPS, RESULT_MARKS
from service.protocols.markup.parser import parser_of
from service.protocols.output import (
    OutputPart,
    arguments_of,
    calls_of,
    plain_text,
    reasoning_text,
)

Message = dict[str, Any]

_FORM = OutputForm(markup="gemma", calls=True)
_BEGIN, _END = RESULT_MARKS
_RESULT = re.compile(r"response:([^{<]*)\{(.*)\}", re.DOTALL)
_TEXT = re.compile(r'value:<\|"\|>(.*)<\|"\|>', re.DOTALL)
_MARKS = (*MARKUPS["gemma"].markers, *RESULT_MARKS)


async def chat_messages(messages: list[Message]) -> list[Message]:
    """The messages with those of the assistant split at their marks; others stay as they are."""
    made: list[Message] = []
    for message in messages:
        await asyncio.sleep(0)  # a history may be long
        content = str(message.get("content", ""))
        if message["role"] == "assistant" and any(mark in content for mark in _MARKS):
            made += _split(content, len(made))
        else:
            made.append(message)
    return made


def _split(content: str, number: int) -> Iterator[Message]:
    """The messages of an answer. Calls have ids of their number in it, and of the answer's."""
    waiting: dict[str, str] = {}  # ids of calls without a result: names of their tools
    count = 0
    for part in content.split(_BEGIN):
        body, end, text = part.partition(_END)
        result = _RESULT.fullmatch(body) if end else None
        if result is not None:
            yield _result(result[1], result[2], waiting)
        answer = _answer(part if result is None else text)
        calls: list[Message] = answer.get("tool_calls", [])
        for call in calls:
            call["id"] = f"call_{number}_{count}"
            waiting[call["id"]] = call["function"]["name"]
            count += 1
        if answer["content"] or len(answer) > 2:
            yield answer


def _answer(content: str) -> Message:
    parser = parser_of(_FORM)
    parts: list[OutputPart] = [*parser.push(content), *parser.flush()]
    made: Message = {"role": "assistant", "content": plain_text(parts).strip()}
    if reasoning := reasoning_text(parts).strip():
        made["reasoning_content"] = reasoning
    calls = zip(calls_of(parts), arguments_of(parts), strict=True)
    functions = [{"name": call.name, "arguments": arguments} for call, arguments in calls]
    if functions:
        made["tool_calls"] = [{"type": "function", "function": one} for one in functions]
    return made


def _result(name: str, body: str, waiting: dict[str, str]) -> Message:
    """A result, of the first call of this tool that waits for one."""
    text = _TEXT.fullmatch(body)
    message = {"role": "tool", "name": name, "content": body if text is None else text[1]}
    call = next((one for one, tool in waiting.items() if tool == name), None)
    if call is not None:
        del waiting[call]
        message["tool_call_id"] = call
    return message
