"""Tool calls of chat messages, in the form that templates expect; everything else stays as it is.

Pure functions over plain data. Roles come from a fixed set, because templates build control
tokens from them (`<|` + role + `|>`); the service checks them, and all other fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from batchengine import errors

ROLES = ("system", "developer", "user", "assistant", "tool")

# Chats that a template may take or not: it shows the text of the last one, or loses or refuses it.
PROBE_TEXT = "probetext"


def _probe(*messages: tuple[str, str], tools: list[str] | None = None) -> dict[str, object]:
    chat: dict[str, object] = {
        "messages": [{"role": role, "content": text} for role, text in messages]
    }
    if tools is not None:
        schema: dict[str, object] = {"type": "object", "properties": {}}
        functions: list[dict[str, object]] = [
            {"name": one, "description": "", "parameters": schema} for one in tools
        ]
        chat["tools"] = [{"type": "function", "function": one} for one in functions]
    return chat


_CALL = {
    "id": PROBE_TEXT,  # templates of Kimi print ids and no names
    "type": "function",
    "function": {"name": PROBE_TEXT, "arguments": {"a": "b"}},
}
_CALLS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    ]
}
# A call that was cut: its arguments are text that is no JSON.
_CUT_CALL = {
    **_CALL,
    "id": "abcdefghi",
    "function": {"name": "f", "arguments": PROBE_TEXT},
}
_CUT_CALLS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CUT_CALL]},
    ]
}
_RESULT_CALL = {**_CALL, "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": "b"}}}
_RESULT = {"role": "tool", "content": PROBE_TEXT, "tool_call_id": "abcdefghi", "name": "f"}
_RESULTS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_RESULT_CALL]},
        _RESULT,
    ]
}
# A result whose call is written as text.
_LONE_RESULTS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        _RESULT,
    ]
}
# A result in the message of its call, as templates of Gemma 4 show it.
_INNER_RESULT = {"name": "f", "response": PROBE_TEXT}
_INNER_CALL = {"tool_calls": [_RESULT_CALL], "tool_responses": [_INNER_RESULT]}
_INNER_RESULTS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", **_INNER_CALL},
    ]
}
# Reasoning in front of a call.
_THOUGHTS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": PROBE_TEXT,
            "tool_calls": [_RESULT_CALL],
        },
    ]
}
# The id of a call.
_CALL_IDS: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**_RESULT_CALL, "id": PROBE_TEXT}],
        },
    ]
}
# A call of the form "python" with a text of two lines.
LINES = ("b", "c")
LINES_PROBE: dict[str, object] = {
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**_CALL, "function": {"name": "f", "arguments": {"a": "\n".join(LINES)}}}
            ],
        },
    ]
}
TEXT_PROBE = _probe(("user", PROBE_TEXT))
PROBES: dict[str, dict[str, object]] = {
    "system": _probe(("system", PROBE_TEXT), ("user", "a")),
    "tools": _probe(("user", "a"), tools=[PROBE_TEXT]),
    "calls": _CALLS,
    "cut calls": _CUT_CALLS,
    "results": _RESULTS,
    "lone results": _LONE_RESULTS,
    "inner results": _INNER_RESULTS,
    "thoughts": _THOUGHTS,
    "call ids": _CALL_IDS,
}


def in_parts(chat: Mapping[str, object]) -> dict[str, object]:
    """The chat with every content that is a text, or absent, as a list of one part of text."""
    messages = cast("list[dict[str, object]]", chat["messages"])
    return {**chat, "messages": [_message_in_parts(message) for message in messages]}


def _message_in_parts(message: dict[str, object]) -> dict[str, object]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def has_calls(chat: Mapping[str, object]) -> bool:
    """Whether a message of the chat has calls."""
    return any("tool_calls" in one for one in cast("list[dict[str, object]]", chat["messages"]))


def with_text_arguments(chat: Mapping[str, object]) -> dict[str, object]:
    """The chat with arguments of calls that are objects as JSON text."""
    messages = cast("list[dict[str, object]]", chat["messages"])
    return {**chat, "messages": [_with_text_arguments(message) for message in messages]}


def _with_text_arguments(message: dict[str, object]) -> dict[str, object]:
    calls = cast("list[dict[str, dict[str, object]]] | None", message.get("tool_calls"))
    if not calls:
        return message
    made: list[dict[str, object]] = []
    for call in calls:
        function = call["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        made.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": made}


def prepare_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The messages, with the arguments of tool calls as objects where they are JSON text of one:
    templates apply `tojson` themselves. INVALID_MESSAGES for a call without a function's name."""
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, object]) -> dict[str, object]:
    prepared = dict(message)
    calls = cast("list[dict[str, object]]", prepared.pop("tool_calls", None))
    if calls:
        where = f"messages[{index}].tool_calls"
        prepared["tool_calls"] = [
            _tool_call(f"{where}[{slot}]", call) for slot, call in enumerate(calls)
        ]
    return prepared


def _tool_call(where: str, call: dict[str, object]) -> dict[str, object]:
    function = call.get("function")
    body = cast("dict[str, object]", function) if isinstance(function, dict) else {}
    if not isinstance(body.get("name"), str):
        raise errors.INVALID_MESSAGES(
            what=f"{where} names no function",
            param=where,
            fix="send {id, type, function: {name, arguments}}",
        )
    return {**call, "function": {**body, "arguments": call_arguments(body.get("arguments"))}}


def call_arguments(arguments: object) -> object:
    """The arguments of a call: an object, or what the model wrote instead; {} for no text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments  # not JSON: the template gets the text that the model wrote
    return cast("object", value) if isinstance(value, dict) else arguments
