"""A scripted engine: bytes are tokens, the answer is given, delays are settings.

It gives the guarantees the service relies on (one last event, idempotent cancel, bounded read)
and records its calls, so that tests can check what the service asks for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from batchengine import errors
from batchengine.config import ApiKey, Config, LimitsConfig, ModelConfig, ServerConfig
from batchengine.core import (
    BatchEngineError,
    Constraint,
    ContextBound,
    DaemonLoad,
    DoneEvent,
    ErrorEvent,
    GenerationEvent,
    GenerationRequest,
    ModelInfo,
    PastTurn,
    Presence,
    PromptTokenEvent,
    QueuedEvent,
    SlaClass,
    Stage,
    TokenEvent,
    TokenLogprob,
    Usage,
    Waiting,
)
from batchengine.engine.sessions import directory
from batchengine.markup import MARKUPS
from batchengine.metrics import Metrics
from service.http import app
from service.http.listener import Listener, bind
from service.protocols import reading

VOCAB_SIZE = 300
CONTEXT_TOKENS = 2048
MODEL_ID = "fake"
ENDED_S = 1_700_000_000  # when answers of the past ended, seconds since the Unix epoch


class FakeText:
    """One token per UTF-8 byte; a chat is its messages, one per line."""

    def __init__(self) -> None:
        self.markup = MARKUPS["hermes"]
        self.reasons = False
        self.chats: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, Any]] = []

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode())

    def takes(self, probe: str) -> bool:
        return True

    def control_id(self, text: str) -> int | None:
        return None

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> list[int]:
        self.chats.append((messages, tools, kwargs))
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode())

    def ends_turn(self, token: int) -> bool:
        return token == ord("\n")

    async def check(self, constraint: Constraint, digest: bytes, *, tenant: str) -> list[str]:
        """Every grammar will do."""
        return []

    async def read(self, question: bytes, body: bytes | memoryview, *, tenant: str) -> bytes:
        await asyncio.sleep(0)
        return reading.read(self, question, bytes(body))

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


def _cached(request: GenerationRequest) -> int:
    return len(request.prompt) // 2


class FakeGeneration:
    """Scripted events; ends without an event when cancelled."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, skip: int = 0) -> None:
        self.request = request
        self.skip = skip  # tokens the reader has from an earlier stream
        self.request_id = request.request_id
        self.session_id = request.session_id or f"be_{request.request_id}"
        self.turn_id = request.request_id
        self.recorded = asyncio.Event()
        if not engine.records_late:
            self.recorded.set()
        self.cancelled = asyncio.Event()
        self.finished = self.is_cut = False
        self.is_queued = False
        self._events = engine.script(self)
        self._next: asyncio.Future[GenerationEvent | None] | None = None

    async def events(self) -> list[GenerationEvent]:
        """One event at a time; the script continues where a reader stopped."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events, None))
        event = await asyncio.shield(self._next)
        self._next = None
        return [] if event is None else [event]

    def waiting(self) -> Waiting:
        return Waiting(3, 42_000.0) if self.is_queued else Waiting(0, None, 8, 8)

    def cancel(self) -> None:
        self.is_cut = self.is_cut or not self.finished
        self.cancelled.set()


class FakeEngine:
    """Satisfies `service.engine_api.EngineApi`."""

    def __init__(
        self, reply: Sequence[str] = ("Hel", "lo", " wörld"), delay_s: float = 0.0
    ) -> None:
        self.metrics = Metrics()
        self.text = FakeText()
        self.phase = "ready"
        self.progress = 1.0
        self.fatal: BaseException | None = None
        self.reply = tuple(reply)
        self.delay_s = delay_s
        self.queued_s = 0.0
        self.records_late = False  # a test sets `recorded` of each generation
        self.history: list[dict[str, str]] = []  # of every session
        self.cut = ""  # reason with which answers are cut
        self.fail_after: int | None = None  # tokens before an ErrorEvent
        self.refuse: BatchEngineError | None = None
        self.lane_names = ["cpu"]
        self.known: dict[tuple[str, str], GenerationRequest] = {}  # named sessions: the last turn
        self.parked: dict[str, tuple[float, str]] = {}  # session -> since when, for which call
        self.pages_given: Mapping[str, Any] | None = None  # the row of a peer
        self.asleep: list[tuple[str, str]] = []  # of them, on disk only
        self.calls: list[tuple[Any, ...]] = []  # operations, with their arguments
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
            chat_template="{% for tool in tools %}{% endfor %}{{ messages }}",
            created=1_700_000_000,
            model_hash="fade" * 16,
            arith_id="cafe" * 16,
            context_bound=ContextBound.SETTING,
        )

    async def start(self, on_stage: Callable[[Stage], None]) -> None:
        self.phase = "loading"
        for index, name in enumerate(("map weights", "cpu kernels"), 1):
            on_stage(Stage(index, 2, name, "pretended", 0.0))
            await asyncio.sleep(0)
        self.phase = "ready"

    async def stop(self, drain_s: float) -> None:
        self.phase = "draining"
        deadline = asyncio.get_running_loop().time() + drain_s
        while any(not g.finished and not g.cancelled.is_set() for g in self.generations):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        self.phase = "stopped"

    def submit(self, request: GenerationRequest) -> FakeGeneration:
        if self.refuse is not None:
            raise self.refuse
        if len(request.prompt) + request.tokens_max > self.info.context_tokens:
            n = len(request.prompt)
            raise errors.PROMPT_TOO_LONG(
                asked="it",
                n_prompt_tokens=n,
                n_ctx=CONTEXT_TOKENS,
                longer=self.info.context_bound,
            )
        generation = FakeGeneration(self, request)
        self.generations.append(generation)
        if request.session_id is not None:
            self.known[request.tenant, request.session_id] = request
        return generation

    async def begin(self, request: GenerationRequest) -> FakeGeneration:
        return self.submit(request)

    async def past_turn(self, tenant: str, turn_id: str, *, has_texts: bool = True) -> PastTurn:
        for generation in self.generations:
            asked = generation.request
            if asked.request_id == turn_id and asked.tenant == tenant and asked.session_id:
                texts = (*self.reply[: asked.tokens_max], "") if has_texts else ("",)
                reason = "stop" if generation.finished else ""
                reason = "cancelled" if generation.is_cut else reason
                running = not reason
                ended_s = ENDED_S if generation.finished else 0
                return PastTurn(
                    asked, len(self.reply), texts, reason, True, running, True, ended_s,
                    cached_tokens=_cached(asked),
                )  # fmt: skip
        raise errors.UNKNOWN_TURN(turn_id=turn_id)

    async def forget_turn(self, tenant: str, turn_id: str) -> Mapping[str, Any]:
        self.calls.append(("forget", tenant, turn_id))
        return {"turn_id": turn_id, "state": "forgotten"}

    def _last(self, tenant: str | None, session_id: str) -> GenerationRequest:
        for (owner, name), request in self.known.items():
            if name == session_id and tenant in (None, owner):
                return request
        raise errors.UNKNOWN_SESSION(given=session_id)

    async def resume(
        self, tenant: str, session_id: str, from_token: int = 0, turn_id: str = ""
    ) -> FakeGeneration:
        request = self._last(tenant, session_id)
        if turn_id not in ("", request.request_id):
            raise errors.TURN_FOLLOWED(session_id=session_id, turn_id=turn_id)
        generation = FakeGeneration(self, request, from_token)
        self.generations.append(generation)
        return generation

    async def promote(
        self, tenant: str, session_id: str, to: str | None = None
    ) -> Mapping[str, Any]:
        return self._move("promote", session_id, to or self.lane_names[0], tenant)

    async def demote(
        self, tenant: str, session_id: str, to: str | None = None
    ) -> Mapping[str, Any]:
        return self._move("demote", session_id, to or self.lane_names[-1], tenant)

    def _move(self, name: str, session_id: str, to: str, tenant: str) -> dict[str, Any]:
        self._last(tenant, session_id)
        if (tenant, session_id) in self.asleep:
            raise errors.SESSION_AT_REST(session_id=session_id)
        if to not in self.lane_names:
            raise errors.UNKNOWN_LANE(given=to, lanes=" or ".join(self.lane_names))
        self.calls.append((name, tenant, session_id, to))
        return {
            "session_id": session_id, "source": "bulk", "target": to, "cause": name, "tokens": 300,
            "pages_shared": 1, "pages_copied": 1, "rows_copied": 44, "rows_recomputed": 0,
            "gap_ms": 1.5, "total_ms": 4.0, "result": "moved",
        }  # fmt: skip

    async def session_detail(self, tenant: str, session_id: str) -> Mapping[str, Any]:
        request = self._last(tenant, session_id)
        return {
            "session_id": session_id, "family": session_id, "tenant": tenant,
            "tokens": len(request.prompt),
            "state": "idle", "turns": [{"turn": request.request_id}], "tool_calls": [],
            **self._parked_row(session_id),
        }  # fmt: skip

    def _parked_row(self, session_id: str) -> dict[str, Any]:
        if session_id not in self.parked:
            return {}
        since, call = self.parked[session_id]
        return {"state": "parked", "parked_since": since, "tool_call_id": call}

    async def why(self, tenant: str, session_id: str) -> Mapping[str, Any]:
        self._last(tenant, session_id)
        edit = {
            "common_prefix_tokens": 5812, "timeline_tokens": 9000, "prompt_tokens": 9100,
            "is_edit": True, "tokens_reused": 5632, "tokens_computed": 3468, "pages_kept": 22,
            "reason": "history edited at token 5812", "first_difference": 5812,
            "old_token": 7, "new_token": 8, "old_text": "Current time: 10:00", "new_text": "11:00",
        }  # fmt: skip
        return {"session_id": session_id, "last": edit, "edit": edit}

    async def messages(self, tenant: str, session_id: str) -> Mapping[str, Any]:
        request = self._last(tenant, session_id)
        answer = {"session_id": session_id, "tokens": len(request.prompt), "messages": self.history}
        return answer if self.history else answer | {"text": "[INST] x"}

    async def fork(
        self, tenant: str, session_id: str, new_id: str, name: str = ""
    ) -> Mapping[str, Any]:
        request = self._last(tenant, session_id)
        if (tenant, new_id) in self.known:
            raise errors.SESSION_EXISTS(given=new_id)
        self.calls.append(("fork", tenant, new_id, name))
        self.known[tenant, new_id] = request
        return {
            "session_id": new_id, "forked_from": session_id, "tokens": len(request.prompt),
            "pages_shared": 1, "tokens_shared": 256,
        }  # fmt: skip

    async def park(
        self, tenant: str, session_id: str, tool_call_id: str | None = None
    ) -> Mapping[str, Any]:
        self._last(tenant, session_id)
        self.calls.append(("park", tenant, session_id, tool_call_id))
        calls = [tool_call_id] if tool_call_id else []
        return {"session_id": session_id, "state": "parked", "tokens": 3, "tool_calls": calls}

    async def drop(self, tenant: str, session_id: str) -> Mapping[str, Any]:
        self._last(tenant, session_id)
        del self.known[tenant, session_id]
        return {"session_id": session_id, "tokens": 3, "state": "dropped"}

    def explain(self, given: str, tenant: str | None = None) -> Mapping[str, Any]:
        for generation in reversed(self.generations):
            request = generation.request
            if tenant not in (None, request.tenant):
                continue
            decision = self._decision(generation)
            if request.request_id == given:
                return {"kind": "request", **decision}
            if generation.session_id == given:
                facts = {"session_id": given, "tenant": request.tenant, "lane": "cpu"}
                return {"kind": "session", **facts, "decisions": [decision]}
        raise errors.NOTHING_TO_EXPLAIN(given=given)

    def _decision(self, generation: FakeGeneration) -> dict[str, Any]:
        request = generation.request
        return {
            "request_id": request.request_id, "session_id": generation.session_id,
            "tenant": request.tenant, "class": str(request.sla.sla_class), "age_s": 1.0,
            "lane": "cpu", "reason": "only this lane can take it", "reason_id": "only",
            "strategy": {"name": "local"}, "session": None, "moves": [], "restore": None,
            "request": {"rank": 1, "prompt_tokens": 9, "tokens_out": 16, "promote": False},
            "predicted": {"lane": "cpu", "ttft_ms": 6.0, "tpot_ms": 2.0, "move_ms": 0.0},
            "candidates": [{"lane": "cpu", "ttft_ms": 6.0, "tpot_ms": 2.0, "sla_ratio": 0.1,
                            "excluded": "", "waiting": 0, "seated": 1, "seats": 64}],
            "happened": None, "notes": [],
        }  # fmt: skip

    def predicted(self, request_id: str) -> Mapping[str, Any] | None:
        return {"lane": "cpu", "ttft_ms": 6.0, "tpot_ms": 2.0, "move_ms": 0.0}

    async def stored_sessions(self, count_max: int) -> Sequence[Mapping[str, Any]]:
        rows = [(tenant, name) for tenant, name in self.known]
        return [
            {
                "session_id": name,
                "tenant": tenant,
                "state": "on disk",
                "tokens": 3,
                **self._parked_row(name),
            }
            for tenant, name in rows[:count_max]
        ]

    async def store_op(self, op: str) -> Mapping[str, Any]:
        self.calls.append(("store", op))
        if op == "verify":
            return {"total": 3, "good": 2, "bad": 1, "gone": 0, "read_bytes": 3 << 20,
                    "seconds": 0.1}  # fmt: skip
        if op == "gc":
            return {"pages_evicted": 2, "tails_superseded": 1, "extents_other_reprs": 0,
                    "slots_other_reprs": 0, "sessions": 0, "extents_given": 0,
                    "left": ""}  # fmt: skip
        return {"budget_bytes": 1 << 30, "used_bytes": 1 << 20, "page_tier": "ok", "sessions": 2}

    async def script(self, generation: FakeGeneration) -> AsyncIterator[GenerationEvent]:
        """The events of one generation: queue, tokens, end."""
        request = generation.request
        try:
            if self.queued_s:
                generation.is_queued = True
                yield QueuedEvent(3, 42_000.0)
                if await self._pause(generation, self.queued_s):
                    return
            generation.is_queued = False
            if request.prompt_logprobs >= 0:
                for event in self._scores(request):
                    yield event
            count = 0
            for text in self.reply[: request.tokens_max]:
                if self.fail_after is not None and count >= self.fail_after:
                    yield ErrorEvent(errors.NUMERIC_FAULT(request_id=request.request_id))
                    return
                if count >= generation.skip and await self._pause(generation, self.delay_s):
                    return
                count += 1
                if count > generation.skip:
                    yield self._token(count - 1, text, request.sampling.logprobs)
            usage = Usage(
                prompt_tokens=len(request.prompt),
                cached_tokens=_cached(request),
                completion_tokens=count,
                queue_ms=1.0,
                ttft_ms=5.0,
                total_ms=9.0,
                lane="cpu",
                session_id=generation.session_id,
                reuse_reason="first use",
                resumed_tokens=generation.skip,
            )
            generation.finished = True
            if self.cut:
                yield DoneEvent(self.cut, usage, text="")
                return
            reason = "length" if len(self.reply) > request.tokens_max else "stop"
            yield DoneEvent(reason, usage, text="")
        finally:
            generation.finished = True

    def _scores(self, request: GenerationRequest) -> list[PromptTokenEvent]:
        found: list[PromptTokenEvent] = []
        for index, token in enumerate(request.prompt):
            piece = self.text.piece(token)
            logprob = -index / 4 if index else None
            best = (TokenLogprob(token, piece, -index / 4), TokenLogprob(0, b"\xf0\x9f", -math.inf))
            top = best[: request.prompt_logprobs] if index else ()
            found.append(PromptTokenEvent(token, piece, logprob, top))
        return found

    async def _pause(self, generation: FakeGeneration, seconds: float) -> bool:
        """True if the generation was cancelled meanwhile."""
        if seconds:
            try:
                async with asyncio.timeout(seconds):
                    await generation.cancelled.wait()
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(0)
        return generation.cancelled.is_set()

    def _token(self, index: int, text: str, logprobs: int) -> TokenEvent:
        if logprobs < 0:
            return TokenEvent(index, text)
        chosen = TokenLogprob(index, text.encode(), -0.25)
        others = (TokenLogprob(299, b"\xf0\x9f", -math.inf),)
        return TokenEvent(index, text, chosen, (chosen, *others)[:logprobs])

    def peer_names(self) -> Sequence[str]:
        return []

    def lanes(self) -> Sequence[Mapping[str, Any]]:
        return [
            {"name": name, "kind": "cpu", "state": "ready", "pid": 4242} for name in self.lane_names
        ]

    def timelines(self, tenant: str, session_id: str) -> list[str]:
        return [session_id]

    async def presence(self, tenant: str, session_id: str) -> Presence:
        if self.has_session(tenant, session_id):
            return Presence.IN_MEMORY
        is_known = (tenant, session_id) in self.known
        return Presence.STORED if is_known else Presence.UNKNOWN

    async def find_sessions(
        self, given: str, own: Collection[tuple[str, str]], tenant: str | None
    ) -> list[tuple[str, str]]:
        awake = [(row["tenant"], row["session_id"]) for row in self.sessions()]
        return directory.matching(awake, given, own, tenant) or directory.matching(
            self.known, given, own, tenant
        )

    def has_session(self, tenant: str, session_id: str) -> bool:
        return any(row["session_id"] == session_id for row in self.sessions(tenant))

    def sessions(
        self, tenant: str | None = None, count_max: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        computing = [
            (g.request.tenant, g.session_id)
            for g in self.generations
            if g.request.session_id is None and not g.finished
        ]
        awake = [pair for pair in self.known if pair not in self.asleep]
        return [
            {"session_id": name, "tenant": owner, "class": "standard", "state": "idle",
             "tokens": 3, "lane": "cpu", "tokens_reused": 1, "tokens_prompt": 3, "reason": ""}
            for owner, name in [*awake, *computing]
            if tenant in (None, owner)
        ]  # fmt: skip

    def requests(
        self, tenant: str | None = None, count_max: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        return [
            {
                "request_id": g.request_id,
                "session_id": g.session_id,
                "tenant": g.request.tenant,
                "class": str(g.request.sla.sla_class),
                "position": None,
                "eta_ms": None,
                "lane": "cpu",
            }
            for g in self.generations
            if not g.finished and tenant in (None, g.request.tenant)
        ][:count_max]

    async def peers(self, *, measure: bool = False) -> Mapping[str, Any]:
        self.calls.append(("peers", measure))
        return {"name": "host-a", "peers": []}

    def leave(self, *, undo: bool = False) -> None:
        self.phase = "ready" if undo else "leaving"
        self.calls.append(("leave", undo))

    def remains(self) -> Mapping[str, Any]:
        rows = [{**row, "state": "running", "session_id": "s"} for row in self.requests()]
        given = [] if self.pages_given is None else [self.pages_given]
        over = not (rows or given)
        leaving = self.phase == "leaving"
        return {"leaving": leaving, "requests": rows, "given": given, "stages": [], "over": over}

    def load(self) -> DaemonLoad:
        running = sum(not g.finished for g in self.generations)
        return DaemonLoad(running, len(self.generations) - running, 0.25)

    def stats(self) -> Mapping[str, Any]:
        return {"running": sum(not g.finished for g in self.generations)}


def fake_config(**server: Any) -> Config:
    """Loopback, free port, one alias."""
    return Config(
        model=ModelConfig(path="fake.gguf", id=MODEL_ID, aliases=("tiny",)),
        server=ServerConfig(port=0, **server),
        limits=LimitsConfig(streams_max=400),
    )


def with_keys() -> Config:
    """`fake_config` with two keys, one of background work."""
    keys = (
        ApiKey(name="alpha", key="alpha-key-123"),
        ApiKey(name="beta", key="beta-key-4567", sla_class=SlaClass.BACKGROUND),
    )
    return replace(fake_config(), auth=keys)


class Served:
    """A service on a real port."""

    def __init__(self, service: app.Service, engine: FakeEngine, listener: Listener) -> None:
        self.service = service
        self.engine = engine
        self.port = listener.port
        self.base = f"http://127.0.0.1:{listener.port}"

    async def raw(self, data: bytes, *, timeout_s: float = 5.0) -> bytes:
        """Send bytes to the port; returns all bytes until the server closes or pauses."""
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
    engine: FakeEngine | None = None,
    config: Config | None = None,
    connections_max: int = 500,
    port: int = 0,
) -> AsyncIterator[Served]:
    """A service around a fake engine, listening on a loopback port; 0 = a free one."""
    engine = engine or FakeEngine()
    config = config or fake_config()
    service = app.Service.create(engine, config)
    listener = Listener(app.build(service), bind("127.0.0.1", port), connections_max)
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
