"""The engine as the service sees it: the protocols that `batchengine.engine` satisfies.

The service depends on these shapes only, so a test can stand a fake in the doorway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from batchengine.core import GenerationEvent, GenerationRequest, ModelInfo, Stage
from batchengine.metrics import Metrics


class Generation(Protocol):
    """One admitted request: its events, and the way to call it off."""

    request_id: str
    session_id: str | None

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...
    def cancel(self) -> None: ...


class TextFrontend(Protocol):
    """Tokenizer and chat template; every await leaves the event loop free."""

    async def encode(self, text: str, *, special: bool) -> list[int]: ...
    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[int]: ...
    def piece(self, token: int) -> bytes: ...


class Engine(Protocol):
    """What `service` calls on the engine."""

    metrics: Metrics

    @property
    def info(self) -> ModelInfo: ...
    @property
    def state(self) -> str: ...
    @property
    def progress(self) -> float: ...
    @property
    def text(self) -> TextFrontend: ...

    async def start(self, on_stage: Callable[[Stage], None]) -> None: ...
    async def stop(self, drain_s: float) -> None: ...
    def submit(self, request: GenerationRequest) -> Generation: ...
    def lanes(self) -> Sequence[Mapping[str, Any]]: ...
    def sessions(self) -> Sequence[Mapping[str, Any]]: ...
    def requests(self) -> Sequence[Mapping[str, Any]]: ...
    def stats(self) -> Mapping[str, Any]: ...
