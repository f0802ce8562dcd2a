"""Items of responses that were stored: by their ids, and as the pages that a client lists.

Owns the ids of items, which name their response, and the form in which a response keeps its own
input. An answer is kept as tokens, and its items are made of its text again. Runs in a text
process.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from batchengine import errors
from service.protocols.markup.parser import parser_of
from service.protocols.protocol import PastAnswer, PromptEncoder, PromptLimits
from service.protocols.responses.formatter import STATUS, echo_of
from service.protocols.responses.output import OutputItems

Fields = dict[str, Any]
INPUT_BYTES_MAX = 32 << 10  # kept of a response's input, compressed
INPUT_JSON_BYTES_MAX = 1 << 20  # of it before; bounds what a page costs
TURNS_MAX = 512  # responses that one input refers to
PAGE_MAX = 100
PAGE_DEFAULT = 20
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
_ID = re.compile(r"[a-z]{2,8}_(?P<turn>[0-9a-f]{24})i?[0-9a-f]{2,6}", re.ASCII)
_TEXT_PARTS = {"assistant": "output_text"}  # of a message by its role; "input_text" of the others

_encode = msgspec.json.Encoder().encode


class InputPage(msgspec.Struct, frozen=True):
    """A page that is asked for of the input items of a response."""

    turn: str
    input: str
    order: str = "desc"
    limit: int = PAGE_DEFAULT
    after: str | None = None


# ---- input that refers to items ----


def turns_of(given: str | list[Any] | None) -> list[str]:
    """The turns whose items an input refers to; raises 400 or 404."""
    found: dict[str, None] = {}
    for item_id in map(reference, given if isinstance(given, list) else ()):
        if item_id is None:
            continue
        named = _ID.fullmatch(item_id)
        if named is None:
            raise errors.UNKNOWN_ITEM(given=item_id)
        found[named["turn"]] = None
    if len(found) > TURNS_MAX:
        raise errors.INVALID_FIELD(
            param="input",
            what=f"input refers to items of {len(found)} responses",
            why=f"{TURNS_MAX} are looked up at most",
            fix="send the items themselves, or previous_response_id",
        )
    return list(found)


def reference(item: object) -> str | None:
    """The id that an item of an input consists of; None of an item with contents."""
    if not isinstance(item, dict):
        return None
    fields = cast("Fields", item)
    given: object = fields.get("id")
    is_reference = fields.get("type") in (None, "item_reference") and "role" not in fields
    return given if is_reference and isinstance(given, str) else None


def resolved(given: str | list[Any] | None, answers: Sequence[PastAnswer]) -> Any:
    """The input with the items that it refers to in their places; raises 404."""
    if not isinstance(given, list):
        return given
    known: dict[str, Fields] = {}
    for one in answers:
        known |= {item["id"]: item for item in (*_answered(one), *_asked(one))}
    made: list[Any] = []
    for item in given:
        item_id = reference(item)
        if item_id is not None and item_id not in known:
            raise errors.UNKNOWN_ITEM(given=item_id)
        made.append(item if item_id is None else known[item_id])
    return made


def _answered(one: PastAnswer) -> list[Fields]:
    """The items of an answer, as its client got them."""
    echo, parser = echo_of(one.echo), parser_of(one.output)
    items = OutputItems(one.turn, echo.names, encrypts=False, summarises=echo.summarises)
    parts = parser.push(one.text)
    items.push([*parts, *parser.flush(is_cut=one.finish_reason != "stop")], [])
    items.close(STATUS.get(one.finish_reason, "incomplete"))
    return items.done


def _asked(one: PastAnswer) -> Iterator[Fields]:
    kept = echo_of(one.echo).input
    yield from input_items(kept, one.turn) if kept else ()


# ---- the input of a response ----


def kept_input(given: str | list[Any] | None) -> str:
    """The input as the record of its turn has it; "" of one that is too large."""
    data = _encode(given)
    if len(data) > INPUT_JSON_BYTES_MAX:
        return ""
    packed = zlib.compress(data)
    return base64.b64encode(packed).decode() if len(packed) <= INPUT_BYTES_MAX else ""


def input_items(kept: str, turn: str) -> list[Fields]:
    """The items of a kept input, each with an id."""
    given: str | list[Fields] = msgspec.json.decode(zlib.decompress(base64.b64decode(kept)))
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    return [_with_id(item, f"{turn}i{index:02x}") for index, item in enumerate(items)]


def _with_id(item: Fields, name: str) -> Fields:
    kind = item.get("type") or "message"
    found = {"id": f"{PREFIXES.get(kind, 'item')}_{name}", "type": kind, "status": "completed"}
    found |= {field: value for field, value in item.items() if value is not None}
    content = found.get("content")
    if kind == "message" and isinstance(content, str):
        part = _TEXT_PARTS.get(found.get("role", ""), "input_text")
        found["content"] = [{"type": part, "text": content}]
    return found


def page(text: PromptEncoder, limits: PromptLimits, data: bytes) -> bytes:
    """A page of input items as JSON; a task of a text process."""
    asked = msgspec.json.decode(data, type=InputPage)
    items = input_items(asked.input, asked.turn)
    if asked.order == "desc":
        items.reverse()
    start = 0
    if asked.after is not None:
        ids = [item["id"] for item in items]
        if asked.after not in ids:
            raise errors.UNKNOWN_ITEM(given=asked.after, param="after")
        start = ids.index(asked.after) + 1
    shown = items[start : start + asked.limit]
    return _encode(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": start + len(shown) < len(items),
        }
    )
