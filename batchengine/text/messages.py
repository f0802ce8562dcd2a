"""Messages, tools and template arguments of a chat request: checked, in the shape of templates.

Pure functions over plain data. Roles and template variables come from fixed sets, because
templates build control tokens from them (`<|` + role + `|>`); everything else is text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError

ROLES = ("system", "user", "assistant", "tool", "developer")

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Template variables a request may set, with the values each may take.
KWARGS: dict[str, tuple[object, ...]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "preserve_thinking": (True, False),
    "clear_thinking": (True, False),
    "add_generation_prompt": (True, False),
    "reasoning_effort": _EFFORTS,
}


def prepare_chat(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    kwargs: Mapping[str, object] | None,
) -> dict[str, object]:
    """Template variables {"messages", "tools", "kwargs"} as plain lists, dicts and strings.

    Text parts are joined by newlines, missing content becomes "", tool-call arguments given as
    JSON text become objects, `developer` becomes `system`. 4xx BatchEngineError otherwise.
    """
    if not messages:
        raise _invalid("messages is empty", "messages", "send at least one message")
    return {
        "messages": [_message(index, message) for index, message in enumerate(messages)],
        "tools": [_tool(index, tool) for index, tool in enumerate(tools)] if tools else None,
        "kwargs": _kwargs(kwargs or {}),
    }


def _message(index: int, message: Mapping[str, object]) -> dict[str, object]:
    where = f"messages[{index}]"
    role = message.get("role")
    if role not in ROLES:
        raise _invalid(f"{where}.role is {role!r}", f"{where}.role", f"one of {', '.join(ROLES)}")
    result = {key: value for key, value in message.items() if value is not None}
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content(where, message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise _invalid(f"{where}.tool_calls is no list", f"{where}.tool_calls", "send a list")
        result["tool_calls"] = [
            _tool_call(f"{where}.tool_calls[{slot}]", call)
            for slot, call in enumerate(cast(list[object], calls))
        ]
    else:
        result.pop("tool_calls", None)
    return result


def _content(where: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in cast(list[object], content) if isinstance(content, list) else [content]:
        fields = cast(dict[str, object], part) if isinstance(part, dict) else {}
        text = fields.get("text")
        if fields.get("type", "text") not in ("text", "input_text") or not isinstance(text, str):
            raise _invalid(
                f"{where}.content holds a part that is no text",
                f"{where}.content",
                "this model reads text only: send a string or text parts",
            )
        texts.append(text)
    return "\n".join(texts)


def _tool_call(where: str, call: object) -> dict[str, object]:
    fields = cast(dict[str, object], call) if isinstance(call, dict) else {}
    function = fields.get("function")
    body = cast(dict[str, object], function) if isinstance(function, dict) else {}
    if not isinstance(body.get("name"), str):
        raise _invalid(
            f"{where} names no function", where, "send {id, type, function: {name, arguments}}"
        )
    arguments = body.get("arguments")
    return {**fields, "function": {**body, "arguments": _arguments(arguments)}}


def _arguments(arguments: object) -> object:
    """JSON text of an object becomes the object, as templates apply `tojson` themselves."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = msgspec.json.decode(arguments.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments  # not JSON: the template gets the text that the model wrote
    return cast(object, value) if isinstance(value, dict) else arguments


def _tool(index: int, tool: Mapping[str, object]) -> dict[str, object]:
    function = tool.get("function")
    named = isinstance(function, dict) and isinstance(
        cast(dict[str, object], function).get("name"), str
    )
    if not named:
        raise _invalid(
            f"tools[{index}] names no function", f"tools[{index}]", "send {type, function: {name}}"
        )
    return dict(tool)


def _kwargs(kwargs: Mapping[str, object]) -> dict[str, object]:
    for name, value in kwargs.items():
        allowed = KWARGS.get(name)
        where = f"chat_template_kwargs.{name}"
        if allowed is None:
            raise _invalid(f"{where} is not known", where, f"one of {', '.join(KWARGS)}")
        # True == 1, so the type is compared as well.
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise _invalid(f"{where} has no allowed value", where, f"one of {list(allowed)}")
    return dict(kwargs)


def _invalid(what: str, param: str, fix: str) -> BatchEngineError:
    return errors.INVALID_MESSAGES(what=what, param=param, fix=fix)
