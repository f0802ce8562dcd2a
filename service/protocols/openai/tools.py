"""Tools and tool choices of chat requests, in the present form and the one of `functions`."""

from __future__ import annotations

from typing import Any, cast

from batchengine import errors
from batchengine.core import BatchEngineError
from service.protocols.conversation import ToolChoice
from service.protocols.schema import ChatRequest

NAME_CHARS_MAX = 256
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def tools_of(body: ChatRequest) -> list[dict[str, Any]]:
    """The functions that a request offers; raises 400."""
    if body.tools is None:
        return [
            {"type": "function", "function": _function(one, f"functions[{index}]")}
            for index, one in enumerate(body.functions or ())
        ]
    for index, tool in enumerate(body.tools):
        if tool.get("type") != "function":
            raise _no_function(f"tools[{index}]")
        _function(tool.get("function"), f"tools[{index}]")
    return body.tools


def choice_of(body: ChatRequest) -> ToolChoice:
    """Which tools the answer may or must call; raises 400."""
    given, param = body.tool_choice, "tool_choice"
    parallel = body.parallel_tool_calls is not False and body.function_call is None
    if given is None and body.function_call is not None:
        given, param = body.function_call, "function_call"
        if isinstance(given, dict):
            return ToolChoice("required", (_name(given, param),), False)
    if given is None:
        return ToolChoice(parallel=parallel)
    if isinstance(given, str):
        return ToolChoice(_mode(given, param), (), parallel)
    allowed: object = given.get("allowed_tools", given)
    if given.get("type") == "allowed_tools" and isinstance(allowed, dict):
        fields = cast("dict[str, Any]", allowed)
        tools: object = fields.get("tools")
        if not isinstance(tools, list) or not tools:
            raise _wrong("tool_choice.allowed_tools.tools", "must be a list of functions")
        names = tuple(_name(one, "tool_choice.allowed_tools") for one in cast("list[Any]", tools))
        return ToolChoice(_mode(fields.get("mode", "auto"), "tool_choice.mode"), names, parallel)
    if given.get("type") == "function":
        return ToolChoice("required", (_name(given, param),), False)
    raise _wrong(param, "names no function")


def _mode(value: object, param: str) -> Any:
    mode = _MODES.get(value) if isinstance(value, str) else None
    if mode is None:
        raise _wrong(param, "must be auto, none, required, or name a function")
    return mode


def _name(given: object, param: str) -> str:
    """The function that {"type", "function": {"name"}} or {"name"} names."""
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    inner: object = fields.get("function", fields)
    name: object = cast("dict[str, Any]", inner).get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str):
        raise _wrong(param, "names no function")
    return name


def _function(given: object, param: str) -> dict[str, Any]:
    fields = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    name, schema = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise _no_function(param)
    if schema is not None and not isinstance(schema, dict):
        what = f"{param} has parameters that are no JSON Schema"
        raise errors.INVALID_FIELD(param=param, what=what, fix="send an object")
    return fields


def _no_function(param: str) -> BatchEngineError:
    return errors.INVALID_FIELD(
        param=param,
        what=f"{param} is not a function with a name",
        fix='send {"type": "function", "function": {"name": "…", "parameters": {…}}}',
    )


def _wrong(param: str, why: str) -> BatchEngineError:
    fix = 'send "auto", "none", "required" or {"type": "function", "function": {"name": "…"}}'
    return errors.INVALID_FIELD(param=param, what=f"{param} {why}", fix=fix)
