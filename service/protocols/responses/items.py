"""Input items of a Responses request as messages of a chat.

Owns the kinds of items. Reasoning, text and calls of one answer are items of their own and one
message of a chat, so they are joined up to the next item of another role.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, cast

from batchengine import errors
from batchengine.core import BatchEngineError
from service.protocols.conversation import text_of
from service.protocols.openai.custom_tools import call_arguments
from service.protocols.responses.tools import qualified
from service.protocols.strict_json import object_of

Fields = dict[str, Any]
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ENCRYPTED = "be1:"  # the beginning of `encrypted_content` that this daemon wrote
# items of tools that a provider ran, or knows: their results are in the text that followed;
# summaries of a conversation, which only the provider that wrote them can read; and notes for it
PASSED_OVER = re.compile(
    r"mcp_.*|.*_(?:call|output)|compaction(?:_summary)?|context_compaction|program|additional_tools"
    r"|configuration_update"
)
ENCRYPTED_PART = "encrypted_content"  # a part of a message that its provider alone can read
KIND_CHARS_MAX = 64


def messages(
    given: str | list[Any] | None, instructions: str | list[Any] | None
) -> tuple[list[Fields], list[str]]:
    """The messages of a chat, and the kinds of items that were left out; raises 400."""
    read = _Reader()
    if isinstance(instructions, str):
        read.add({"role": "system", "content": instructions})
    elif instructions is not None:
        read.all(instructions, "instructions")
    if isinstance(given, str):
        read.add({"role": "user", "content": given})
    elif given is not None:
        read.all(given, "input")
    return read.made, [f"input.{kind}" for kind in read.passed_over]


def encrypted(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item, for clients that send nothing else of it back."""
    return ENCRYPTED + base64.b64encode(reasoning.encode()).decode()


class _Reader:
    """The messages so far; `_open` is an assistant's, which the next item may belong to."""

    def __init__(self) -> None:
        self.made: list[Fields] = []
        self.passed_over: dict[str, None] = {}
        self._open: Fields | None = None

    def add(self, message: Fields) -> None:
        self.made.append(message)
        self._open = message if message["role"] == "assistant" else None

    def all(self, items: list[Any], name: str) -> None:
        """Adds every item; raises 400 naming the one that cannot be read."""
        for index, item in enumerate(items):
            where = f"{name}[{index}]"
            if not isinstance(item, dict):
                raise _wrong(where, "an object")
            self._item(cast("Fields", item), where)

    def _item(self, item: Fields, where: str) -> None:
        kind: object = item.get("type") or "message"
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                answer = self._answer()
                parts = [answer.get("reasoning_content"), _reasoning(item, where)]
                answer["reasoning_content"] = "\n".join(part for part in parts if part)
            case "function_call" | "custom_tool_call":
                self._call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, where)
            case "agent_message":
                self._between_agents(item, where)
            case "compaction_trigger":
                raise errors.UNSUPPORTED_FIELD(
                    param=where,
                    what="this daemon does not summarise conversations",
                    fix="let the client do it: Codex does for a provider with a name of its own",
                )
            case str() if PASSED_OVER.fullmatch(kind):
                self.passed_over[kind[:KIND_CHARS_MAX]] = None
            case _:
                raise _wrong(f"{where}.type", "a message, a call, its output or reasoning", kind)

    def _message(self, item: Fields, where: str) -> None:
        role: object = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            what, fix = f"{where}.role is missing or unknown", "use " + ", ".join(ROLES)
            raise errors.INVALID_FIELD(param=f"{where}.role", what=what, fix=fix)
        text = text_of(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.add({"role": ROLES[role], "content": text})
            return
        answer = self._answer()
        answer["content"] = f"{answer['content']}\n{text}" if answer["content"] else text

    def _between_agents(self, item: Fields, where: str) -> None:
        """What another agent says; an encrypted part is left out."""
        given: object = item.get("content")
        parts = cast("list[object]", given) if isinstance(given, list) else [given]
        plain = [one for one in parts if not _is_encrypted(one)]
        if len(plain) < len(parts):
            self.passed_over["agent_message"] = None
        if plain:
            text = text_of(plain if isinstance(given, list) else given, f"{where}.content")
            self.add({"role": "user", "content": text})

    def _call(self, item: Fields, where: str) -> None:
        name = qualified(_text_of(item, "name", where), item.get("namespace"))
        if item["type"] == "custom_tool_call":
            arguments = call_arguments(_text_of(item, "input", where))
        else:
            arguments = _text_of(item, "arguments", where)
        call = {
            "id": _text_of(item, "call_id", where),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        self._answer().setdefault("tool_calls", []).append(call)

    def _output(self, item: Fields, where: str) -> None:
        call_id, media = _text_of(item, "call_id", where), dict[str, None]()
        content = text_of(item.get("output"), f"{where}.output", media)
        self.passed_over |= {f"{item['type']}.{kind}": None for kind in media}
        self.add({"role": "tool", "tool_call_id": call_id, "content": content})

    def _answer(self) -> Fields:
        """The assistant's message that the next item belongs to."""
        if self._open is None:
            self.add({"role": "assistant", "content": ""})
        assert self._open is not None
        return self._open


def _is_encrypted(part: object) -> bool:
    return object_of(part).get("type") == ENCRYPTED_PART


def _reasoning(item: Fields, where: str) -> str:
    """The text of a reasoning item: its content, else its summary, else what was encrypted."""
    for name in ("content", "summary"):
        if (parts := item.get(name)) and (text := text_of(parts, f"{where}.{name}")):
            return text
    sealed: object = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed.startswith(ENCRYPTED):
        return ""
    try:
        return base64.b64decode(sealed[len(ENCRYPTED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise _wrong(f"{where}.encrypted_content", "what this daemon sent") from None


def _text_of(item: Fields, name: str, where: str) -> str:
    value: object = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "text")
    return value


def _wrong(where: str, expected: str, got: object = None) -> BatchEngineError:
    value = f"the value {got[:KIND_CHARS_MAX]!r}" if isinstance(got, str) else "a wrong value"
    return errors.INVALID_FIELD(
        param=where,
        what=f"{where} has {value}",
        why=f"expected {expected}",
        fix="see the input items of OpenAI Responses",
    )
