"""Content blocks of the Messages protocol to a conversation.

Owns what each kind of block becomes for the chat template. Definitions of deferred tools stand
where a message refers to the tool, not in front of the conversation: a tool that is found later
leaves all tokens before it as they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, cast

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint
from service.protocols.conversation import Conversation, ToolChoice, check_names, omitted
from service.protocols.messages import client_tools, signatures
from service.protocols.messages.body import Choice, MessagesRequest, Object
from service.protocols.openai import formats
from service.protocols.strict_json import object_of

BILLING = "x-anthropic-billing-header:"  # a line that differs between sessions, for no model
UNTIL_NEXT = "next_user_message"
TEXT_ONLY = "this daemon reads text only"
FOUND = "This tool can be called from here on:\n"
REMOVED = "This tool cannot be called any more: "
# blocks of tools that a provider ran: what came of them is in the text that followed
RUN_BY_PROVIDER = re.compile(r".+_tool_(?:use|result)")
FALLBACK = "fallback"  # a note that another model went on with the answer
ERROR = "Error: "  # in front of the result of a call that failed
MODES: dict[str, ToolChoice] = {
    "auto": ToolChoice(),
    "any": ToolChoice("required"),
    "none": ToolChoice("none"),
}


def conversation_of(body: MessagesRequest) -> Conversation:
    """The conversation of a request; raises 400."""
    tools = _Tools(body.tools or [])
    system = _system(body.system)
    messages = [{"role": "system", "content": system}] if system else []
    last_user = max((i for i, m in enumerate(body.messages) if m.get("role") == "user"), default=-1)
    for index, message in enumerate(body.messages):
        where, role = f"messages.{index}", message.get("role")
        if role == "user":
            messages += _user(message.get("content"), where, tools)
        elif role == "assistant":
            messages.append(_assistant(message.get("content"), where, tools))
        elif role == "system":
            if message.get("clear_at") == UNTIL_NEXT and index < last_user:
                continue
            if text := _instructions(message.get("content"), where, tools):
                messages.append({"role": "system", "content": text})
        else:
            raise errors.INVALID_FIELD(
                param=f"{where}.role",
                what=f"{where}.role is missing or unknown",
                fix="use user, assistant or system",
            )
    config = body.output_config
    template: dict[str, Any] = {"enable_thinking": is_thinking(body)}
    if config is not None and config.effort is not None:
        template["reasoning_effort"] = config.effort
    return Conversation(
        messages=messages,
        tools=tools.header,
        inline_tools=tools.inline,
        tool_choice=_choice(body.tool_choice, tools),
        response=_response(body),
        response_param="output_config.format",
        continues=body.messages[-1].get("role") == "assistant",
        template=template,
        heading=1 if system else 0,
        unread=tuple(dict.fromkeys(tools.unread)),
    )


def is_thinking(body: MessagesRequest) -> bool:
    """Whether reasoning is asked for; who does not ask reads `content[0].text`."""
    return body.thinking is not None and body.thinking.type != "disabled"


def _system(system: str | list[Object] | None) -> str:
    if isinstance(system, str):
        return _without_billing(system)
    texts = [
        _without_billing(_text(block, f"system.{index}"))
        for index, block in enumerate(system or [])
    ]
    return "\n".join(text for text in texts if text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


class _Tools:
    """The tools of a request: in the header, or where a message refers to them."""

    def __init__(self, tools: list[Object]) -> None:
        self.header: list[Object] = []
        self.inline: list[Object] = []  # in the order of the messages that define them
        self.names: set[str] = set()
        self.unread: list[str] = []
        self._deferred: dict[str, Object] = {}
        named: list[tuple[str, str]] = []  # fields and the names in them
        for index, tool in enumerate(map(client_tools.with_parameters, tools)):
            kind: object = tool.get("type")
            if kind not in (
                None,
                "custom",
                "function",
            ):  # of Anthropic's servers, or for its models alone
                self.unread.append(f"tools.{kind:.64}" if isinstance(kind, str) else "tools")
                continue
            function = _function(tool, f"tools.{index}")
            self.names.add(tool["name"])
            named.append((f"tools.{index}.name", tool["name"]))
            if tool.get("defer_loading") is True:
                self._deferred[tool["name"]] = function
            else:
                self.header.append(function)
        check_names(named)

    def define(self, name: str) -> str:
        """What a message says that refers to a tool; its definition only the first time."""
        function = self._deferred.pop(name, None)
        return FOUND + name if function is None else self.define_new(function)

    def define_new(self, function: Object) -> str:
        self.inline.append(function)
        self.names.add(function["function"]["name"])
        return FOUND + json.dumps(function, ensure_ascii=False)


def _function(tool: Object, where: str) -> Object:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise errors.INVALID_FIELD(
            param=where,
            what=f"{where} has no name or no input_schema",
            fix='send {"name": "…", "description": "…", "input_schema": {…}}',
        )
    function: Object = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = schema
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _choice(choice: Choice | None, tools: _Tools) -> ToolChoice:
    if choice is None:
        return MODES["auto"]
    is_parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name not in tools.names:
            raise errors.INVALID_FIELD(
                param="tool_choice.name",
                what="tool_choice names a tool that is not in tools",
                fix="name one of the tools",
            )
        return ToolChoice("required", (choice.name or "",), is_parallel)
    if choice.type not in MODES:
        raise errors.INVALID_FIELD(
            param="tool_choice.type",
            what="tool_choice.type is unknown",
            fix="use " + ", ".join([*MODES, "tool"]),
        )
    mode = MODES[choice.type].mode
    if mode == "required" and not tools.names:
        raise errors.INVALID_FIELD(
            param="tool_choice", what="there is no tool to call", fix="send tools"
        )
    return ToolChoice(mode, parallel=is_parallel)


def _response(body: MessagesRequest) -> Constraint | None:
    form = body.output_format or (body.output_config.format if body.output_config else None)
    if form is None:
        return formats.structured_outputs(body.structured_outputs)
    if form.type != "json_schema" or form.schema is None:
        raise errors.INVALID_FIELD(
            param="output_config.format",
            what="output_config.format is not a JSON schema",
            fix='send {"type": "json_schema", "schema": {…}}',
        )
    return Constraint("json_schema", json.dumps(form.schema, ensure_ascii=False))


# ---- content ----


def _blocks(content: object, where: str) -> Iterator[tuple[Object, str]]:
    """The blocks of a message, and where each stands; a text alone is one block."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    if not isinstance(content, list):
        raise errors.INVALID_FIELD(
            param=where,
            what=f"{where} is missing or neither text nor a list of blocks",
            fix="send a string",
        )
    for number, block in enumerate(cast("list[object]", content)):
        param = f"{where}.{number}"
        if not isinstance(block, dict):
            raise errors.INVALID_FIELD(param=param, what=f"{param} must be an object")
        yield cast("Object", block), param


def _text(block: Object, param: str) -> str:
    """The text of a block; raises 400."""
    text = _read(block, param)
    if text is None:
        raise _unreadable(block.get("type"), param)
    return text


def _read(block: Object, param: str) -> str | None:
    """The text of a block of text, a document of plain text or a search result; None for others."""
    kind = block.get("type")
    if kind == "text" and isinstance(block.get("text"), str):
        return block["text"]
    if kind == "document":
        fields = object_of(block.get("source"))
        head, at = _strings(block.get("title"), block.get("context")), f"{param}.source.content"
        if fields.get("type") == "text" and isinstance(fields.get("data"), str):
            return "\n".join([*head, fields["data"]])
        if fields.get("type") == "content":
            parts = [_text(part, place) for part, place in _blocks(fields.get("content"), at)]
            return "\n".join([*head, *parts])
    if kind == "search_result":
        parts = [_text(part, at) for part, at in _blocks(block.get("content"), f"{param}.content")]
        return "\n".join([*_strings(block.get("title"), block.get("source")), *parts])
    return None


def _strings(*values: object) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _unreadable(kind: object, param: str) -> BatchEngineError:
    return errors.INVALID_FIELD(
        param=f"{param}.type",
        what=f"{param} is a block that cannot be read here"
        + (f" ({kind[:40]!r})" if isinstance(kind, str) else ""),
        why=TEXT_ONLY,
        fix='send {"type": "text", "text": "…"}',
    )


def _user(content: object, where: str, tools: _Tools) -> list[Object]:
    """Results of calls are messages of their own, in their order among the texts."""
    made: list[Object] = []
    texts: list[str] = []
    for block, param in _blocks(content, f"{where}.content"):
        if block.get("type") != "tool_result":
            texts.append(_text(block, param))
            continue
        if texts:
            made.append({"role": "user", "content": "\n".join(texts)})
            texts = []
        made.append(_result(block, param, tools))
    if texts or not made:
        made.append({"role": "user", "content": "\n".join(texts)})
    return made


def _result(block: Object, param: str, tools: _Tools) -> Object:
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        what = f"{param}.tool_use_id is missing"
        raise errors.INVALID_FIELD(param=f"{param}.tool_use_id", what=what)
    texts: list[str] = []
    for part, at in _blocks(block.get("content") or "", f"{param}.content"):
        if part.get("type") == "tool_reference" and isinstance(part.get("tool_name"), str):
            texts.append(tools.define(part["tool_name"]))
        elif (text := _read(part, at)) is not None:
            texts.append(text)
        elif (instead := omitted(part.get("type"))) is not None:
            texts.append(instead)
            tools.unread.append(f"tool_result.{part['type']}")
        else:
            raise _unreadable(part.get("type"), at)
    text = "\n".join(texts)
    if block.get("is_error") is True:
        text = ERROR + text
    return {"role": "tool", "tool_call_id": call, "content": text}


def _instructions(content: object, where: str, tools: _Tools) -> str:
    """The text of a system message in mid-conversation."""
    texts: list[str] = []
    for block, param in _blocks(content, f"{where}.content"):
        kind = block.get("type")
        if kind not in ("tool_addition", "tool_removal"):
            texts.append(_without_billing(_text(block, param)))
            continue
        change = object_of(block.get("tool"))
        name, definition = change.get("name"), change.get("definition")
        if kind == "tool_addition" and isinstance(definition, dict):
            function = _function(cast("Object", definition), f"{param}.tool.definition")
            texts.append(tools.define_new(function))
        elif not isinstance(name, str):
            raise errors.INVALID_FIELD(param=f"{param}.tool", what=f"{param}.tool names no tool")
        else:
            texts.append(tools.define(name) if kind == "tool_addition" else REMOVED + name)
    return "\n".join(texts)


def _assistant(content: object, where: str, tools: _Tools) -> Object:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Object] = []
    for block, param in _blocks(content, f"{where}.content"):
        match block.get("type"):
            case "thinking":
                thoughts.append(signatures.reasoning_of(block))
            case "redacted_thinking":
                continue  # of another daemon: nothing in it can be read
            case "tool_use":
                calls.append(_call(block, param))
            case str() as kind if kind == FALLBACK or RUN_BY_PROVIDER.fullmatch(kind):
                tools.unread.append(f"messages.{kind:.64}")
            case "compaction" if isinstance(block.get("content"), str):
                texts.append(block["content"])  # a summary of what came before
            case _:
                texts.append(_text(block, param))
    message: Object = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Object, param: str) -> Object:
    name, call, given = block.get("name"), block.get("id"), block.get("input")
    if not (isinstance(name, str) and isinstance(call, str) and isinstance(given, dict)):
        raise errors.INVALID_FIELD(
            param=param,
            what=f"{param} is no whole tool_use",
            fix='send {"type": "tool_use", "id": "…", "name": "…", "input": {…}}',
        )
    return {"id": call, "type": "function", "function": {"name": name, "arguments": given}}
