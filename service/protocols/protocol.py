"""A protocol of the generation routes: one row, from the body to the answer's events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic

from batchengine.core import BatchEngineError
from service.engine_api import EngineApi
from service.protocols import schema, strict_json
from service.protocols.formatter import Formatter
from service.protocols.requests import HttpJob, Prompt
from service.protocols.schema import Body


@dataclass(frozen=True, slots=True)
class Protocol(Generic[Body]):
    """One row of `service.protocols.table`.

    `check` raises for fields that are known and not implemented. `read_prompt(body, body_bytes,
    engine, tokens_max_default)` tokenises; both raise BatchEngineError 400.
    """

    name: str  # as the ledger stores it in a turn's record
    routes: tuple[str, ...]  # paths of POST requests
    body: type[Body]
    check: Callable[[Body], None]
    read_prompt: Callable[[Body, int, EngineApi, int], Awaitable[Prompt]]
    formatter: Callable[[HttpJob], Formatter]
    error: Callable[[BatchEngineError], dict[str, object]]  # the JSON of a refusal

    def parse(self, data: bytes | bytearray) -> tuple[Body, list[str]]:
        """A request's body, and the names of fields in it that change nothing; raises 400."""
        return schema.read_request(self.body, strict_json.parse_object(data))
