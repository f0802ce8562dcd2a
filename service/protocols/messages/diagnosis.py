"""Why a prompt did not begin as an earlier one did: `diagnostics.cache_miss_reason`.

The id of a message whose request asked for diagnostics ends in hashes of that request, so the
comparison needs no record of it, and works in every daemon and after every restart.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, cast

import msgspec

from service.protocols.messages.body import MessagesRequest, Object

HASH_CHARS = 10
_HASH = rf"[0-9a-f]{{{HASH_CHARS}}}"
_MARKS = re.compile(
    rf"(?P<model>{_HASH})(?P<system>{_HASH})(?P<tools>{_HASH})(?P<messages>{_HASH})"
    r"-(?P<count>\d{1,5})-(?P<tokens>\d{1,9})"
)
PARTS = ("model", "system", "tools", "messages")
_encode = msgspec.json.Encoder(order="deterministic").encode


class Miss(msgspec.Struct, frozen=True):
    """The first part of the request that changed, and the tokens of the earlier prompt."""

    type: str
    tokens: int = 0

    def reason(self, cached: int) -> Object:
        """The object of the answer; `cached` tokens of the prompt had KV."""
        if self.type in ("unavailable", "previous_message_not_found"):
            return {"type": self.type}
        return {"type": self.type, "cache_missed_input_tokens": max(0, self.tokens - cached)}


def marks(body: MessagesRequest, tokens: int) -> str:
    """The hashes of a request whose prompt has so many tokens, as the end of a message id."""
    count = len(body.messages)
    return "".join(_hashes(body, count).values()) + f"-{count}-{tokens}"


def miss(body: MessagesRequest, previous_id: str) -> Miss | None:
    """What changed since the request that was answered with `previous_id`; None = nothing."""
    found = _MARKS.fullmatch(previous_id.rpartition("_")[2])
    if found is None:
        return Miss("previous_message_not_found")
    count, tokens = int(found["count"]), int(found["tokens"])
    now = _hashes(body, count)
    changed = [part for part in PARTS if now[part] != found[part]]
    return Miss(f"{changed[0]}_changed", tokens) if changed else None


def _hashes(body: MessagesRequest, count: int) -> dict[str, str]:
    """A hash of each part; of the messages the first `count`."""
    messages = body.messages[:count]
    parts = (body.model, body.system, body.tools, [len(messages), messages])
    return {name: _hash(part) for name, part in zip(PARTS, parts, strict=True)}


def _hash(part: Any) -> str:
    return hashlib.sha256(_encode(_unmarked(part))).hexdigest()[:HASH_CHARS]


def _unmarked(value: Any) -> Any:
    """The value without marks of a cache, which move from turn to turn."""
    if isinstance(value, dict):
        fields = cast("Object", value)
        return {k: _unmarked(v) for k, v in fields.items() if k != "cache_control"}
    if isinstance(value, list):
        return [_unmarked(item) for item in cast("list[Any]", value)]
    return value
