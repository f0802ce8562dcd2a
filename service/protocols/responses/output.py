"""Output items of a response as they grow, and the events that say so.

Owns the order of events: an item is added, its one part is added, grows and is done, then the item
is done, before the next one begins. The items at the end are those that the events described.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from service.protocols.openai.custom_tools import CustomInput
from service.protocols.openai.envelope import Chunk
from service.protocols.output import (
    CallArguments,
    CallStart,
    OutputPart,
    Reasoning,
    Text,
    call_id_of,
)
from service.protocols.responses.items import encrypted
from service.protocols.responses.tools import ToolNames

Fields = dict[str, Any]


class PartForm(NamedTuple):
    """The one part of an item: its type, the names of its events, and the item's field with it."""

    kind: str
    text: str
    part: str
    field: str


_TEXT = PartForm("output_text", "output_text", "content_part", "content")
_CONTENT = PartForm("reasoning_text", "reasoning_text", "content_part", "content")
_INPUT = "response.custom_tool_call_input"
_SUMMARY = PartForm("summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary")


class OutputItems:
    """The items of one response. `push` and `close` return events without sequence numbers."""

    def __init__(self, turn: str, names: ToolNames, *, encrypts: bool, summarises: bool) -> None:
        """`turn` makes ids of items: a stream that is sent again has the same. `summarises`:
        reasoning stands in the summary of its item, which clients that ask for one show."""
        self.done: list[Fields] = []
        self.logprobs: list[list[bytes]] = []  # of each message, by its place among them
        self._turn = turn
        self._names = names
        self._encrypts = encrypts
        self._reasoning = _SUMMARY if summarises else _CONTENT
        self._item: Fields | None = None  # that grows
        self._form = _TEXT  # of its part; calls have none
        self._text: list[str] = []  # of it, so far
        self._input = CustomInput()  # of the call of a custom tool
        self._calls = 0

    @property
    def kind(self) -> str:
        """The type of the item that grows; "" = none does."""
        return "" if self._item is None else self._item["type"]

    def push(self, parts: Iterable[OutputPart], logprobs: list[bytes]) -> list[Chunk]:
        """The events of `parts`; the first text takes the log-probabilities, which it removes from
        the list."""
        events: list[Chunk] = []
        for part in parts:
            match part:
                case Text(text):
                    if self.kind != "message":
                        self.logprobs.append([])
                        fields: Fields = {"role": "assistant", "content": []}
                        events += self._begin("message", "msg", fields, _TEXT)
                    shown: Fields = {"logprobs": list(map(msgspec.Raw, logprobs))}
                    events.append(self._grow(text) | shown)
                    self.logprobs[-1] += logprobs
                    logprobs.clear()
                case Reasoning(text):
                    if self.kind != "reasoning":
                        fields = {"summary": [], self._reasoning.field: []}
                        events += self._begin("reasoning", "rs", fields, self._reasoning)
                    events.append(self._grow(text))
                case CallStart(_, name):
                    events += self._begin_call(name)
                case CallArguments(_, json):
                    if self._item is None or "call_id" not in self._item:
                        continue
                    grown = self._grow_call(json)
                    events += [grown] if grown is not None else []
        return events

    def close(self, status: str = "completed") -> list[Chunk]:
        """The events that end the item that grows."""
        item, text, kind = self._item, "".join(self._text), self.kind
        if item is None:
            return []
        at, place = {"item_id": item["id"]}, {"output_index": len(self.done)}
        events: list[Chunk] = []
        if kind == "function_call":
            item["arguments"] = text
            done = "response.function_call_arguments.done"
            events.append({"type": done, **at, **place, "name": item["name"], "arguments": text})
        elif kind == "custom_tool_call":
            if rest := self._input.flush():
                text += rest
                events.append({"type": f"{_INPUT}.delta", **at, **place, "delta": rest})
            item["input"] = text
            events.append({"type": f"{_INPUT}.done", **at, **place, "input": text})
        else:
            form, part = self._form, _part(self._form, text)
            logprobs: Fields = {}
            if kind == "message":
                logprobs["logprobs"] = list(map(msgspec.Raw, self.logprobs[-1]))
            part |= logprobs
            item[form.field] = [part]
            if kind == "reasoning" and self._encrypts:
                item["encrypted_content"] = encrypted(text)
            here = {**at, **place, f"{form.field}_index": 0}
            events.append({"type": f"response.{form.text}.done", **here, "text": text, **logprobs})
            events.append({"type": f"response.{form.part}.done", **here, "part": part})
        if "status" in item:
            item["status"] = status
        events.append({"type": "response.output_item.done", **place, "item": item})
        self.done.append(item)
        self._item, self._text = None, []
        return events

    def _begin_call(self, name: str) -> list[Chunk]:
        fields: Fields = {"call_id": call_id_of(self._turn, self._calls)}
        self._calls += 1
        if name in self._names.namespaces:
            fields["namespace"], fields["name"] = self._names.namespaces[name]
        else:
            fields["name"] = name
        if name in self._names.custom:
            self._input = CustomInput()
            return self._begin("custom_tool_call", "ctc", fields | {"input": ""})
        return self._begin("function_call", "fc", fields | {"arguments": ""})

    def _begin(
        self, kind: str, prefix: str, fields: Fields, form: PartForm | None = None
    ) -> list[Chunk]:
        """The events that end the item before and begin one of `kind`."""
        events = self.close()
        index = len(self.done)
        item: Fields = {"id": f"{prefix}_{self._turn}{index:02x}", "type": kind}
        if kind != "custom_tool_call":
            item["status"] = "in_progress"
        self._item = item | fields
        added = {"type": "response.output_item.added", "output_index": index}
        events.append({**added, "item": dict(self._item)})
        if form is not None:
            self._form = form
            here = {"item_id": item["id"], "output_index": index, f"{form.field}_index": 0}
            added = f"response.{form.part}.added"
            events.append({"type": added, **here, "part": _part(form, "")})
        return events

    def _grow(self, text: str) -> Chunk:
        assert self._item is not None
        self._text.append(text)
        form, here = self._form, {"item_id": self._item["id"], "output_index": len(self.done)}
        here[f"{form.field}_index"] = 0
        return {"type": f"response.{form.text}.delta", **here, "delta": text}

    def _grow_call(self, json: str) -> Chunk | None:
        """The event of more arguments; None if they show nothing of a custom tool's input yet."""
        assert self._item is not None
        is_custom = self.kind == "custom_tool_call"
        shown = self._input.push(json) if is_custom else json
        if not shown:
            return None
        self._text.append(shown)
        name = _INPUT if is_custom else "response.function_call_arguments"
        here = {"item_id": self._item["id"], "output_index": len(self.done)}
        return {"type": f"{name}.delta", **here, "delta": shown}


def _part(form: PartForm, text: str) -> Fields:
    part: Fields = {"type": form.kind, "text": text}
    return part | {"annotations": [], "logprobs": []} if form is _TEXT else part
