"""Tools, tool choices and calls of chat requests, in the present form and that of `functions`."""

from __future__ import annotations

from typing import Any, NamedTuple

from batchengine import errors
from batchengine.core import BatchEngineError
from service.protocols.conversation import ToolChoice, check_names
from service.protocols.openai import custom_tools
from service.protocols.schema import ChatRequest
from service.protocols.strict_json import list_of, object_of

_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


class Offered(NamedTuple):
    """The tools of a request as functions, those of them that stand for custom tools, and the names
    of fields that change nothing."""

    functions: list[dict[str, Any]]
    custom: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def tools_of(body: ChatRequest) -> Offered:
    """The tools that a request offers; raises 400."""
    made: list[dict[str, Any]] = []
    named: list[tuple[str, str]] = []  # fields and the names in them
    custom: list[str] = []
    unread: list[str] = []
    for index, one in enumerate(body.functions or () if body.tools is None else ()):
        function = _function(one, f"functions[{index}]")
        made.append({"type": "function", "function": function})
        named.append((f"functions[{index}].name", function["name"]))
    for index, tool in enumerate(body.tools or ()):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind == "function":
            named.append((f"{where}.function.name", _function(tool.get("function"), where)["name"]))
            made.append(tool)
        elif kind == "custom":
            fields = _function(tool.get("custom"), where)
            name: str = fields["name"]
            fields = fields | {"format": _format(fields.get("format"))}
            made.append(custom_tools.function_of(fields, name, unread))
            custom.append(name)
            named.append((f"{where}.custom.name", name))
        else:
            raise _no_tool(where)
    check_names(named)
    return Offered(made, tuple(custom), tuple(unread))


def calls_of(calls: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The calls of a message as calls of functions; raises 400."""
    made: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        if call.get("type") == "custom":
            fields = object_of(call.get("custom"))
            name, text = fields.get("name"), fields.get("input")
            if not isinstance(name, str) or not isinstance(text, str):
                raise errors.INVALID_FIELD(
                    param=f"{where}[{index}].custom",
                    what=f"{where}[{index}].custom is not a call with a name and an input",
                    fix='send {"id": "…", "type": "custom", "custom": {"name": "…", "input": "…"}}',
                )
            function = {"name": name, "arguments": custom_tools.call_arguments(text)}
            call = {"id": call.get("id"), "type": "function", "function": function}
        made.append(call)
    return made


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
    if given.get("type") == "allowed_tools":
        fields = object_of(given.get("allowed_tools", given))
        if not (tools := list_of(fields.get("tools"))):
            raise _wrong("tool_choice.allowed_tools.tools", "must be a list of tools")
        names = tuple(_name(one, "tool_choice.allowed_tools") for one in tools)
        return ToolChoice(_mode(fields.get("mode", "auto"), "tool_choice.mode"), names, parallel)
    if given.get("type") in ("function", "custom"):
        return ToolChoice("required", (_name(given, param),), False)
    raise _wrong(param, "names no tool")


def _mode(value: object, param: str) -> Any:
    mode = _MODES.get(value) if isinstance(value, str) else None
    if mode is None:
        raise _wrong(param, "must be auto, none, required, or name a tool")
    return mode


def _name(given: object, param: str) -> str:
    """The tool that {"type", "function": {"name"}}, such a "custom" or {"name"} names."""
    fields = object_of(given)
    kind = "custom" if fields.get("type") == "custom" else "function"
    name: object = object_of(fields.get(kind, fields)).get("name")
    if not isinstance(name, str):
        raise _wrong(param, "names no tool")
    return name


def _function(given: object, param: str) -> dict[str, Any]:
    fields = object_of(given)
    name, schema = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str) or not name:
        raise _no_tool(param)
    if schema is not None and not isinstance(schema, dict):
        what = f"{param} has parameters that are no JSON Schema"
        raise errors.INVALID_FIELD(param=param, what=what, fix="send an object")
    return fields


def _format(given: object) -> object:
    """The format of a custom tool as Responses has it: there a grammar is no object of its own."""
    fields = object_of(given)
    return object_of(fields.get("grammar")) | fields


def _no_tool(param: str) -> BatchEngineError:
    return errors.INVALID_FIELD(
        param=param,
        what=f"{param} is not a function or a custom tool with a name",
        fix='send {"type": "function", "function": {"name": "…", "parameters": {…}}}',
    )


def _wrong(param: str, why: str) -> BatchEngineError:
    fix = 'send "auto", "none", "required" or {"type": "function", "function": {"name": "…"}}'
    return errors.INVALID_FIELD(param=param, what=f"{param} {why}", fix=fix)
