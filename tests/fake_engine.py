"""An engine that only pretends: bytes are tokens, the answer is scripted, time is settable.

It keeps the promises the service relies on (one last event, idempotent cancel, bounded reading)
and records what it was asked, so that tests can check what crosses the door.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from batchengine.config import Config, LimitsConfig, ModelConfig, ServerConfig
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationEvent,
    GenerationRequest,
    ModelInfo,
    QueuedEvent,
    Stage,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from batchengine.metrics import Metrics
from service import api
from service.listen import Listener, bind

VOCAB_SIZE = 300
CONTEXT_TOKENS = 2048
MODEL_ID = "fake"


class FakeText:
    """One token per UTF-8 byte; a chat is its messages, one per line."""

    def __init__(self) -> None:
        self.chats: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, Any]] = []

    async def encode(self, text: str, *, special: bool) -> list[int]:
        await asyncio.sleep(0)
        return list(text.encode())

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        await asyncio.sleep(0)
        self.chats.append((messages, tools, kwargs))
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode())

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


class FakeGeneration:
    """Scripted events; stops quietly when cancelled."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest) -> None:
        self.request = request
        self.request_id = request.request_id
        self.session_id = request.session_id or f"anon_{request.request_id}"
        self.cancelled = asyncio.Event()
        self.finished = False
        self._events = engine.script(self)

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> GenerationEvent:
        return await anext(self._events)

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """Satisfies `service.door.Engine`."""

    def __init__(
        self, reply: Sequence[str] = ("Hel", "lo", " wörld"), delay_s: float = 0.0
    ) -> None:
        self.metrics = Metrics()
        self.text = FakeText()
        self.state = "ready"
        self.progress = 1.0
        self.fatal: BaseException | None = None
        self.reply = tuple(reply)
        self.delay_s = delay_s
        self.queued_s = 0.0
        self.fail_after: int | None = None  # tokens before an ErrorEvent
        self.refuse: BatchEngineError | None = None
        self.generations: list[FakeGeneration] = []
        self.info = ModelInfo(
            model_id=MODEL_ID,
            path="/somewhere/private/fake.gguf",
            arch="qwen3",
            n_layer=4,
            n_params=1000,
            file_bytes=4096,
            context_tokens=CONTEXT_TOKENS,
            context_trained=4096,
            vocab_size=VOCAB_SIZE,
            quantisation="Q4_0",
            has_chat_template=True,
        )

    async def start(self, on_stage: Callable[[Stage], None]) -> None:
        self.state = "loading"
        for index, name in enumerate(("map weights", "cpu kernels"), 1):
            on_stage(Stage(index, 2, name, "pretended", 0.0))
            await asyncio.sleep(0)
        self.state = "ready"

    async def stop(self, drain_s: float) -> None:
        self.state = "draining"
        deadline = asyncio.get_running_loop().time() + drain_s
        while any(not g.finished and not g.cancelled.is_set() for g in self.generations):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        self.state = "stopped"

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.refuse is not None:
            raise self.refuse
        if len(request.prompt) + request.tokens_max > self.info.context_tokens:
            raise BatchEngineError(
                "BE1203",
                "prompt does not fit",
                http_status=400,
                error_type="invalid_request_error",
                api_code="context_length_exceeded",
                details={"n_prompt_tokens": len(request.prompt), "n_ctx": CONTEXT_TOKENS},
            )
        generation = FakeGeneration(self, request)
        self.generations.append(generation)
        return generation

    async def script(self, generation: FakeGeneration) -> AsyncIterator[GenerationEvent]:
        """The events of one generation: queue, tokens, end."""
        request = generation.request
        try:
            if self.queued_s:
                yield QueuedEvent(3, 42_000.0)
                if await self._pause(generation, self.queued_s):
                    return
            count = 0
            for text in self.reply[: request.tokens_max]:
                if self.fail_after is not None and count >= self.fail_after:
                    yield ErrorEvent(
                        BatchEngineError("BE4001", "numeric fault", api_code="numeric_fault")
                    )
                    return
                if await self._pause(generation, self.delay_s):
                    return
                yield self._token(count, text, request.sampling.logprobs)
                count += 1
            usage = Usage(
                prompt_tokens=len(request.prompt),
                cached_tokens=len(request.prompt) // 2,
                completion_tokens=count,
                queue_ms=1.0,
                ttft_ms=5.0,
                total_ms=9.0,
                lane="cpu",
                session_id=generation.session_id,
            )
            generation.finished = True
            reason = "length" if len(self.reply) > request.tokens_max else "stop"
            yield DoneEvent(reason, usage, text="")
        finally:
            generation.finished = True

    async def _pause(self, generation: FakeGeneration, seconds: float) -> bool:
        """True when the generation was called off meanwhile."""
        if seconds:
            try:
                async with asyncio.timeout(seconds):
                    await generation.cancelled.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        return generation.cancelled.is_set()

    @staticmethod
    def _token(index: int, text: str, logprobs: int) -> TokenEvent:
        if logprobs < 0:
            return TokenEvent(index, text)
        chosen = TokenLogprob(index, text.encode(), -0.25)
        others = (TokenLogprob(299, b"\xf0\x9f", -math.inf),)
        return TokenEvent(index, text, chosen, (chosen, *others)[:logprobs])

    def lanes(self) -> Sequence[Mapping[str, Any]]:
        return [{"name": "cpu", "kind": "cpu", "state": "ready", "pid": 4242}]

    def sessions(self) -> Sequence[Mapping[str, Any]]:
        return [{"session_id": g.session_id, "tokens": 3} for g in self.generations]

    def requests(self) -> Sequence[Mapping[str, Any]]:
        return [
            {"request_id": g.request_id, "class": str(g.request.sla.sla_class)}
            for g in self.generations
            if not g.finished
        ]

    def stats(self) -> Mapping[str, Any]:
        return {"running": sum(not g.finished for g in self.generations)}


def fake_config(**server: Any) -> Config:
    """Loopback, free port, one alias."""
    return Config(
        model=ModelConfig(path="fake.gguf", id=MODEL_ID, aliases=("tiny",)),
        server=ServerConfig(port=0, **server),
        limits=LimitsConfig(streams_max=400),
    )


class Served:
    """A service on a real port."""

    def __init__(self, service: api.Service, engine: FakeEngine, listener: Listener) -> None:
        self.service = service
        self.engine = engine
        self.port = listener.port
        self.base = f"http://127.0.0.1:{listener.port}"

    async def raw(self, data: bytes, *, timeout_s: float = 5.0) -> bytes:
        """Bytes to the port, everything that comes back until the server closes or goes quiet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        got = bytearray()
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(timeout_s):
                while chunk := await reader.read(65536):
                    got += chunk
        except (TimeoutError, ConnectionResetError):
            pass
        finally:
            writer.close()
        return bytes(got)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, config: Config | None = None, connections_max: int = 500
) -> AsyncIterator[Served]:
    """A service around a fake engine, listening on a free loopback port."""
    engine = engine or FakeEngine()
    config = config or fake_config()
    service = api.Service.create(engine, config)
    listener = Listener(api.build(service), bind("127.0.0.1", 0), connections_max)
    await listener.open()
    try:
        yield Served(service, engine, listener)
    finally:
        await listener.close()


async def post(
    served: Served, path: str, body: Any = None, **kwargs: Any
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, JSON body and headers of one POST."""
    async with aiohttp.ClientSession() as client:
        if body is not None:
            kwargs["json"] = body
        async with client.post(served.base + path, **kwargs) as reply:
            return reply.status, await reply.json(), dict(reply.headers)


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    """A minimal chat body."""
    return {"model": MODEL_ID, "messages": [{"role": "user", "content": text}], **more}


def with_server(config: Config, **server: Any) -> Config:
    return replace(config, server=replace(config.server, **server))
