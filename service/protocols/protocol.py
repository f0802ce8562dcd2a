"""A protocol of the generation routes: one row, from the body to the answer's events."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import msgspec

from batchengine.core import BatchEngineError, ContextBound, OutputForm
from batchengine.markup import Markup
from service.protocols import schema, strict_json
from service.protocols.formatter import Formatter
from service.protocols.requests import HttpJob, Prompt
from service.protocols.schema import Body, Common


class PromptEncoder(typing.Protocol):
    """Tokenizer and chat template, as `batchengine.text.encoder` has them."""

    @property
    def markup(self) -> Markup: ...
    def encode(self, text: str, *, special: bool) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...
    @property
    def reasons(self) -> bool: ...
    def takes(self, probe: str) -> bool: ...
    def control_id(self, text: str) -> int | None: ...
    def ends_turn(self, token: int) -> bool: ...
    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> list[int]: ...


class PromptLimits(msgspec.Struct, array_like=True, frozen=True):
    """Facts of the model and the configuration that bound a prompt. `append`: the messages are
    new ones behind those that the session has. `called`: names of tools by the ids of calls, of
    turns that the body refers to."""

    context_tokens: int
    vocab_size: int
    tokens_max_default: int
    append: bool = False
    called: dict[str, str] = {}
    context_bound: ContextBound = ContextBound.MODEL


class PastAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A turn of the ledger that a body refers to; `turn` is its id without prefix."""

    turn: str
    text: str
    output: OutputForm
    echo: bytes
    finish_reason: str


def input_tokens(count: int) -> dict[str, object]:
    """OpenAI's object of a counted prompt."""
    return {"object": "response.input_tokens", "input_tokens": count}


@dataclass(frozen=True, slots=True)
class Protocol(Generic[Body]):
    """One row of `service.protocols.table`.

    `check` raises for fields that are known and not implemented, `read_prompt` tokenises, `common`
    says the body's other fields by the names that all protocols share. `turns` names turns of the
    ledger that the body refers to, `resolved` writes what they hold into it. All raise
    BatchEngineError, and run in a text process.
    """

    name: str  # as the ledger stores it in a turn's record
    routes: tuple[str, ...]  # paths of POST requests
    body: type[Body]
    check: Callable[[Body], None]
    read_prompt: Callable[[Body, PromptEncoder, PromptLimits], Prompt]
    formatter: Callable[[HttpJob], Formatter]
    error: Callable[[BatchEngineError, str], dict[str, object]]  # JSON of a refusal; its request id
    common: Callable[[Body], Common] = schema.common_fields
    count_route: str = ""  # path of the POST that counts the tokens of a body's prompt
    counted: Callable[[int], dict[str, object]] = input_tokens  # its answer
    turns: Callable[[Body], list[str]] = lambda _: []
    resolved: Callable[[Body, Sequence[PastAnswer]], Body] = lambda body, _: body

    def parse(self, data: bytes | bytearray) -> tuple[Body, list[str]]:
        """A request's body, and the names of fields in it that change nothing; raises 400."""
        return schema.read_request(self.body, strict_json.parse_object(data))
