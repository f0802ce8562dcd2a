"""Tool calls of chat messages, in the form that templates expect; everything else stays as it is.

Pure functions over plain data. Roles come from a fixed set, because templates build control
tokens from them (`<|` + role + `|>`); the service checks them, and all other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from batchengine import errors

ROLES = ("system", "developer", "user", "assistant", "tool")


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
    return {**call, "function": {**body, "arguments": _arguments(body.get("arguments"))}}


def _arguments(arguments: object) -> object:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = msgspec.json.decode(arguments.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments  # not JSON: the template gets the text that the model wrote
    return cast("object", value) if isinstance(value, dict) else arguments
