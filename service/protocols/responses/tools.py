"""Tools of a Responses request as functions of a chat, and their calls by the names of the request.

Owns the names: a function inside a namespace is `NAMESPACE.NAME` to the model. Tools that a
provider runs are left out.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError
from service.protocols.conversation import ToolChoice, check_names
from service.protocols.openai import custom_tools
from service.protocols.strict_json import list_of, object_of

Fields = dict[str, Any]
CALLED_BY_NAME = ("function", "custom")  # types; the rest is run by a provider
NAME_CHARS_MAX = 256


class ToolNames(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tools whose calls are written otherwise than those of a plain function."""

    namespaces: dict[str, tuple[str, str]] = {}  # name to the model -> (namespace, name)
    custom: tuple[str, ...] = ()  # names to the model


def qualified(name: str, namespace: object) -> str:
    """The name to the model of a function, which may be in a namespace."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def functions(tools: list[Fields] | None) -> tuple[list[Fields], ToolNames, list[str]]:
    """The tools as functions of a chat, their other names, and the types that were left out."""
    made: list[Fields] = []
    namespaces: dict[str, tuple[str, str]] = {}
    custom: list[str] = []
    left_out: list[str] = []
    named: list[tuple[str, str]] = []  # fields and the names in them
    for index, tool in enumerate(tools or ()):
        where, kind = f"tools[{index}]", tool.get("type")
        if kind == "function":
            made.append(_function(tool, where))
            named.append((f"{where}.name", _name(tool, where)))
        elif kind == "custom":
            made.append(custom_tools.function_of(tool, _name(tool, where), left_out))
            custom.append(_name(tool, where))
            named.append((f"{where}.name", _name(tool, where)))
        elif kind == "namespace":
            outer, inner = _name(tool, where), tool.get("tools")
            if not isinstance(inner, list):
                raise _wrong(where, "a namespace with a list of tools")
            for number, one in enumerate(cast("list[object]", inner)):
                at = f"{where}.tools[{number}]"
                fields = object_of(one)
                name = qualified(_name(fields, at), outer)
                named.append((f"{at}.name", name))
                namespaces[name] = outer, _name(fields, at)
                if fields.get("type") == "custom":
                    made.append(custom_tools.function_of(fields, name, left_out))
                    custom.append(name)
                else:
                    made.append(_function(fields, at, name))
        elif isinstance(kind, str):  # a provider runs it, or a newer client knows it
            left_out.append(f"tools.{kind[:64]}")
        else:
            raise _wrong(where, "a function, a custom tool or a namespace")
    check_names(named)
    return made, ToolNames(namespaces, tuple(custom)), left_out


def tool_choice(
    given: str | Fields | None, tools: list[Fields], parallel: bool | None
) -> ToolChoice:
    """Which of `tools` an answer may call; raises 400."""
    known = {tool["function"]["name"] for tool in tools}
    is_parallel = parallel is not False
    if given is None or given == "auto":
        return ToolChoice(parallel=is_parallel)
    if given == "none":
        return ToolChoice("none")
    if given == "required":
        if not known:
            raise _wrong_choice("no tool is there to call", "send tools")
        return ToolChoice("required", (), is_parallel)
    if isinstance(given, dict):
        kind = given.get("type")
        if kind in CALLED_BY_NAME:
            return ToolChoice("required", (_chosen(given, known),), is_parallel)
        if kind == "allowed_tools" and given.get("mode", "auto") in ("auto", "required"):
            allowed = map(object_of, list_of(given.get("tools")))
            called = (
                one for one in allowed if one.get("type", "function") in CALLED_BY_NAME and one
            )
            names = tuple(dict.fromkeys(_chosen(one, known) for one in called))
            if not names:
                raise _wrong_choice("tool_choice allows no tool", "list functions of tools")
            return ToolChoice(given.get("mode", "auto"), names, is_parallel)
    fix = 'use "auto", "none", "required" or {"type": "function", "name": "…"}'
    raise _wrong_choice("tool_choice is none that this daemon knows", fix)


def _function(tool: Fields, where: str, name: str = "") -> Fields:
    function: Fields = {"name": name or _name(tool, where)}
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        value: object = tool.get(field)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise _wrong(
                f"{where}.{field}",
                {"description": "text", "strict": "true or false"}.get(field, "a JSON Schema"),
            )
        function[field] = value
    return {"type": "function", "function": function}


def _name(tool: Fields, where: str) -> str:
    name: object = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise _wrong(where, f"a tool with a name of at most {NAME_CHARS_MAX} characters")
    return name


def _chosen(given: Fields, known: set[str]) -> str:
    name = qualified(_name(given, "tool_choice"), given.get("namespace"))
    if name not in known:
        raise _wrong_choice(f"tool_choice names {name[:64]!r}, which is not in tools", "add it")
    return name


def _wrong(where: str, expected: str) -> BatchEngineError:
    return errors.INVALID_FIELD(
        param=where,
        what=f"{where} has a wrong value",
        why=f"expected {expected}",
        fix='send {"type": "function", "name": "…", "parameters": {…}}',
    )


def _wrong_choice(what: str, fix: str) -> BatchEngineError:
    return errors.INVALID_FIELD(param="tool_choice", what=what, fix=fix)
