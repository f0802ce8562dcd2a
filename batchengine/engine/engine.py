"""The engine as the service sees it: start, submit, stop, and what is going on.

Owns sessions by name, admission and the background tasks. Computes nothing and never blocks:
arithmetic is in lane workers, files and SQLite in the store's threads, text on its own thread.

A session computes one request at a time. A second request with the same session id waits for the
first: agents send parallel calls under one id, and refusing them would break clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from batchengine import cost, scheduler
from batchengine.config import Config
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    ModelInfo,
    QueuedEvent,
    Stage,
)
from batchengine.engine import refusals
from batchengine.engine.generation import Generation
from batchengine.engine.journal import Journal
from batchengine.engine.loop import LaneLoop
from batchengine.engine.start import Starter
from batchengine.engine.turn import Turn
from batchengine.metrics import Metrics
from batchengine.session import LOG_UNKNOWN, Session, State
from batchengine.tokenizer import TextFrontend
from kv_store.store import Store

log = logging.getLogger("batchengine.engine")

HOUSEKEEPING_S = 1.0
MAINTAIN_S = 10.0  # store audit and ages, when idle
NAMED_SESSIONS_MAX = 4096  # in memory; older idle ones live on in the ledger,
NAMED_TOKENS_MAX = 8 << 20  # and so do those beyond this many tokens: about 40 bytes each
MAINTAIN_BUSY_S = 60.0  # what a full disk had stopped is tried again under load too
SESSION_QUEUE_MAX = 16  # requests waiting for one session
QUEUED_EVENT_S = 5.0


class Engine:
    """One model, its lanes, its store. Use: `start`, `submit`..., `stop`."""

    def __init__(self, config: Config, *, worker_command: tuple[str, ...] = ()) -> None:
        """`worker_command` replaces the worker program (tests of the same protocol)."""
        self.config = config
        self.metrics = Metrics()
        self._state = "loading"
        self._progress = 0.0
        self._starter = Starter(config, self, worker_command)
        self._info: ModelInfo | None = None
        self._text: TextFrontend | None = None
        self._store: Store | None = None
        self._journal: Journal | None = None
        self._loops: list[LaneLoop] = []
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._turns: dict[Generation, Turn] = {}
        self._home: dict[int, LaneLoop] = {}  # session key -> its lane
        self._named: dict[tuple[str, str], Session] = {}  # oldest use first
        self._queues: dict[int, deque[Generation]] = {}  # session key -> waiting requests
        self._keys = itertools.count(1)
        self._ends: frozenset[int] = frozenset()
        self._started = time.monotonic()
        self._finished = 0
        self._reopening = 0  # named sessions that are being read from the ledger
        self._maintained = time.monotonic()
        self._fatal: BaseException | None = None
        self._turn_over = asyncio.Event()
        self._told: dict[str, dict[tuple[Counter, tuple[str, ...]], float]] = {}

    def __repr__(self) -> str:
        return f"<Engine {self._state} turns={len(self._turns)} sessions={len(self._named)}>"

    # ------------------------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """loading, ready, degraded, draining or stopped."""
        if self._state == "ready" and not any(loop.lane.alive for loop in self._loops):
            return "degraded"
        return self._state

    @property
    def fatal(self) -> BaseException | None:
        """Why the engine cannot go on (a failed ledger: exit and recover), or None."""
        return self._fatal

    @property
    def progress(self) -> float:
        """Of loading, 0 to 1."""
        return self._progress

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; an error until they are known."""
        if self._info is None:
            raise refusals.loading(self._progress)
        return self._info

    @property
    def text(self) -> TextFrontend:
        """Tokenizer and template of the model."""
        if self._text is None:
            raise refusals.loading(self._progress)
        return self._text

    def lanes(self) -> list[dict[str, Any]]:
        """One row per lane."""
        return [
            {
                "name": loop.lane.name,
                "kind": loop.config.kind,
                "state": "ready" if loop.lane.alive else "restarting",
                "pid": loop.lane.pid,
                "incarnation": loop.lane.incarnation,
                "threads": loop.config.threads,
                "running": len(loop.running),
                "waiting": len(loop.waiting),
                "steps": loop.steps,
                "step_ms": round(loop.step_ms, 3),
                "isa": loop.lane.ready.isa if loop.lane.ready else "",
            }
            for loop in self._loops
        ]

    def sessions(self) -> list[dict[str, Any]]:
        """Named sessions in memory, and anonymous ones that compute now."""
        found = {s.key: s for s in self._named.values()}
        found.update({t.session.key: t.session for t in self._turns.values()})
        return [
            {
                "session_id": session.session_id,
                "tenant": session.tenant,
                "state": session.state.value,
                "tokens": len(session.tokens),
                "frontier": session.frontier,
                "pages": len(session.codes),
                "pages_sealed": len(session.pinned),
                "epoch": session.epoch,
                "lane": self._home[session.key].lane.name if session.key in self._home else "",
            }
            for session in found.values()
        ]

    def requests(self) -> list[dict[str, Any]]:
        """Requests that were admitted and have neither ended nor been cancelled."""
        now_ms = self._now_ms()
        queued = [g for queue in self._queues.values() for g in queue]
        live = [g for g in [*self._turns, *queued] if not g.cancelled]
        return [self._request_row(g, now_ms) for g in live]

    def _request_row(self, generation: Generation, now_ms: float) -> dict[str, Any]:
        turn = self._turns.get(generation)
        state = "queued" if turn is None else turn.session.state.value
        usage = generation.usage(now_ms)
        return {
            "request_id": generation.request_id,
            "session_id": generation.session_id,
            "class": generation.request.sla.sla_class.value,
            "state": "paused" if turn is not None and turn.paused else state,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "to_compute": 0 if turn is None else turn.session.to_compute,
            "age_ms": round(usage.total_ms, 1),
            "lane": generation.lane,
        }

    def stats(self) -> dict[str, Any]:
        """Numbers for /health and the status command."""
        numbers: dict[str, Any] = {
            "uptime_s": round(time.monotonic() - self._started, 1),
            "requests_running": sum(len(loop.running) for loop in self._loops),
            "requests_waiting": self._waiting(),
            "requests_finished": self._finished,
            "sessions": len(self._named),
            "tokens_computed": sum(loop.tokens for loop in self._loops),
            "pages_sealed": sum(loop.pages.sealed for loop in self._loops),
            "seal_failures": sum(loop.pages.seal_failures for loop in self._loops),
        }
        if self._store is not None:
            numbers["store"] = self._store.stat()
        return numbers

    def _waiting(self) -> int:
        queued = sum(len(queue) for queue in self._queues.values())
        running = sum(len(loop.running) for loop in self._loops)
        return queued + self._reopening + max(0, len(self._turns) - running)

    def _now_ms(self) -> float:
        return time.monotonic() * 1000.0

    # -------------------------------------------------------------------------- start, stop

    async def start(self, on_stage: Callable[[Stage], None]) -> None:
        """Load the model on every lane and open the store; requests may come afterwards."""
        try:
            await self._starter.start(on_stage, self._set_progress)
        except BaseException:
            self._state = "stopped"
            await self._starter.abandon()
            raise
        self._info, self._text = self._starter.info, self._starter.text
        self._store, self._journal = self._starter.store, self._starter.journal
        self._loops = self._starter.loops
        self._ends = self._text.tokenizer.eog
        for loop in self._loops:
            self._spawn(loop.run(), f"lane {loop.lane.name}")
        self._spawn(self._journal.run(), "journal")
        self._spawn(self._housekeeping(), "housekeeping")
        self._progress, self._state = 1.0, "ready"

    def _set_progress(self, fraction: float) -> None:
        self._progress = max(self._progress, min(0.99, fraction))

    async def stop(self, drain_s: float) -> None:
        """Stop admitting, let turns finish for up to `drain_s`, end the rest with "shutdown"."""
        if self._state == "stopped":
            return
        self._state = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._turns or self._queues:
                    self._turn_over.clear()
                    await self._turn_over.wait()
        for loop in self._loops:
            loop.stopping = True
            loop.wake()
        await self._join_tasks("lane")
        for generation, turn in list(self._turns.items()):
            self._end(generation, turn, "shutdown")
        for queue in self._queues.values():
            for generation in queue:
                self._finish(generation, "shutdown")
        self._queues.clear()
        if self._journal is not None:
            self._journal.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._starter.close()
        self._state = "stopped"

    async def _join_tasks(self, prefix: str) -> None:
        mine = [task for task, name in self._tasks.items() if name.startswith(prefix)]
        if mine:
            await asyncio.wait(mine, timeout=40.0)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """No background task may end unseen: one that fails is logged and fails its turns."""
        name = self._tasks.pop(task, "")
        if task.cancelled() or self._state in ("draining", "stopped"):
            return
        error = task.exception()
        if error is None and not name.startswith(("lane", "journal", "housekeeping")):
            return
        log.critical("%s ended: %r", name, error, exc_info=error)
        if name.startswith(("lane", "journal", "housekeeping")):
            self.fail_everything(error or RuntimeError(f"{name} ended"))

    def fail_everything(self, error: BaseException) -> None:
        """The engine cannot go on: every reader hears it, and new requests are refused."""
        self._fatal = self._fatal or error
        self._state = "degraded"
        for generation in list(self._turns):
            generation.fail(refusals.internal(error))
        self._turns.clear()

    # ------------------------------------------------------------------------------ requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Admit one generation, or raise BatchEngineError with the HTTP status to answer."""
        loop = self._admit(request)
        now_ms = self._now_ms()
        session_id = request.session_id or f"be_{request.request_id}"
        generation = Generation(
            request, session_id, self.text.detokeniser(), now_ms, self._cancel, self._has_room
        )
        if request.session_id is None:
            generation.release()  # nobody can resume it: nothing to make durable
            self._begin(Session(next(self._keys), session_id, request.tenant), generation, loop)
            return generation
        name = (request.tenant, request.session_id)
        session = self._named.pop(name, None)
        fresh = session is None
        if session is None:
            session = Session(next(self._keys), request.session_id, request.tenant)
        self._named[name] = session  # newest use last
        queue = self._queues.get(session.key)
        if queue is not None:
            queue.append(generation)
            generation.push(QueuedEvent(len(queue), None))
            return generation
        self._queues[session.key] = deque()
        if fresh:
            self._reopen_soon(session, generation, loop)
        else:
            self._begin(session, generation, self._home.get(session.key, loop))
        return generation

    def _admit(self, request: GenerationRequest) -> LaneLoop:
        """Every reason to refuse, checked before anything changes; then the lane."""
        if self._state == "loading":
            raise refusals.loading(self._progress)
        if self._state in ("draining", "stopped"):
            raise refusals.draining()
        if self._fatal is not None:
            raise refusals.internal(self._fatal)
        info = self.info
        refusals.check_request(request, info.context_tokens, info.vocab_size)
        if self._waiting() >= self.config.limits.queue_max:
            raise refusals.overloaded(self._waiting(), self._eta_ms())
        if request.session_id is not None:
            session = self._named.get((request.tenant, request.session_id))
            queue = None if session is None else self._queues.get(session.key)
            if queue is not None and len(queue) >= SESSION_QUEUE_MAX:
                raise refusals.session_busy(len(queue))
        return min(self._loops, key=lambda loop: loop.assigned)

    def _eta_ms(self) -> float:
        """Predicted wait of a request that joined the longest queue now."""
        loop = max(self._loops, key=lambda lane: len(lane.waiting))
        return _eta_ms(loop)

    def _reopen_soon(self, session: Session, generation: Generation, loop: LaneLoop) -> None:
        self._reopening += 1
        self._spawn(self._reopen(session, generation, loop), "reopen")

    async def _reopen(self, session: Session, generation: Generation, loop: LaneLoop) -> None:
        """A named session that is not in memory, or whose records were refused: ask the ledger."""
        if self._journal is None:
            raise RuntimeError("submit before start")
        try:
            await self._journal.load(session)
        except Exception as error:
            log.error("session %s cannot be reopened: %s", session.session_id, error)
            known = error if isinstance(error, BatchEngineError) else refusals.internal(error)
            self._forget(session)
            for waiting in [generation, *self._queues.pop(session.key, ())]:
                waiting.fail(known)
            self._turn_over.set()
            return
        except asyncio.CancelledError:
            self._finish(generation, "shutdown")
            raise
        finally:
            self._reopening -= 1
        self._begin(session, generation, loop)

    def _begin(self, session: Session, generation: Generation, loop: LaneLoop) -> None:
        """Put the prompt on the session, find KV that exists, and queue the turn."""
        if generation.cancelled:
            self._next_in_queue(session, loop)
            return
        if session.logged == LOG_UNKNOWN:
            self._reopen_soon(session, generation, loop)
            return
        request, now_ms = generation.request, self._now_ms()
        sla = request.sla
        targets = self._targets(request)
        expected_ms = self._expected_ms(loop, request)
        horizon = scheduler.horizon_ms(sla, targets, expected_ms)
        turn = Turn(
            session,
            generation,
            rank=scheduler.RANK[sla.sla_class],
            deadline_ms=generation.arrived_ms + horizon,
            horizon_ms=horizon,
            tpot_ms=scheduler.tpot_ms(sla, targets),
            now_ms=now_ms,
        )
        self._turns[generation] = turn
        if session.key not in self._home:
            loop = min(self._loops, key=lambda other: other.assigned)  # others came meanwhile
        self._home[session.key] = loop
        loop.assigned += 1
        loop.pages.recall(session)
        shared = session.rebase(request.prompt)
        loop.pages.fit(session)
        if request.session_id is not None and self._journal is not None:
            self._journal.begin(turn, shared)
        pending = loop.pages.extend(session, turn.salt, turn.priority)
        if pending is None:
            self._join(turn, loop)
        else:
            self._spawn(self._join_when_loaded(turn, loop, asyncio.wrap_future(pending)), "load")

    async def _join_when_loaded(
        self, turn: Turn, loop: LaneLoop, pending: asyncio.Future[list[bool]]
    ) -> None:
        """Pages found on disk are verified before anything reads them."""
        try:
            good = await pending
        except Exception as error:
            log.error("pages of %s cannot be read, it is computed again: %s", turn, error)
            good = [False]
        loop.pages.loaded(turn.session, good)
        self._join(turn, loop)

    def _join(self, turn: Turn, loop: LaneLoop) -> None:
        if turn.generation.cancelled or turn.generation.finished:
            self.turn_ended(turn, "cancelled")
            return
        behind = len(loop.waiting)
        loop.join(turn)
        if behind or len(loop.running) >= loop.config.entries_max:
            turn.generation.push(QueuedEvent(behind + 1, _eta_ms(loop)))

    def _targets(self, request: GenerationRequest) -> scheduler.ClassTargets:
        chosen = self.config.sla.of(request.sla.sla_class)
        return scheduler.ClassTargets(chosen.ttft_ms, chosen.tpot_ms)

    def _expected_ms(self, loop: LaneLoop, request: GenerationRequest) -> float:
        """Compute time of the whole request, alone on the lane."""
        work = cost.work_of([(0, len(request.prompt))])
        step = cost.work_of([(len(request.prompt), 1)])
        now = loop.cost.cost
        return now.predict_ms(work) + request.tokens_max * now.predict_ms(step)

    def _cancel(self, generation: Generation) -> None:
        """From Generation.cancel: the reader is gone."""
        turn = self._turns.get(generation)
        if turn is not None:
            loop = self._home.get(turn.session.key)
            if loop is not None and turn.session.state is not State.IDLE:
                loop.cancel(turn)
            return
        for queue in self._queues.values():
            with contextlib.suppress(ValueError):
                queue.remove(generation)

    def _has_room(self, generation: Generation) -> None:
        """A slow reader caught up."""
        generation.paused_since_ms = None
        turn = self._turns.get(generation)
        if turn is not None and turn.paused:
            self._home[turn.session.key].resume(turn)

    # ---------------------------------------------------------------- what lane loops report

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation by itself."""
        return token in self._ends

    def piece(self, token: int) -> bytes:
        """Bytes of one token."""
        return self.text.piece(token)

    def tokens_committed(self) -> None:
        """A step is committed: its tokens join the next group commit."""
        if self._journal is not None:
            self._journal.note()

    def turn_ended(self, turn: Turn, reason: str) -> None:
        """The session is idle again; the reader gets its last event."""
        self._end(turn.generation, turn, reason)
        self._after_turn(turn)

    def turn_failed(self, turn: Turn, error: BatchEngineError) -> None:
        """The turn cannot go on; the session forgets its KV, its tokens stay."""
        generation = turn.generation
        self._turns.pop(generation, None)
        self._count(turn, "error")
        if turn.turn_id and self._journal is not None:
            self._journal.end(turn, ErrorEvent(error))
        else:
            generation.fail(error)
        self._after_turn(turn)

    async def revive(self, loop: LaneLoop) -> None:
        """Start the next worker of a lane whose worker died."""
        await self._starter.revive(loop)

    def _end(self, generation: Generation, turn: Turn, reason: str) -> None:
        self._turns.pop(generation, None)
        self._count(turn, reason)
        stopped = reason == "stop" and generation.stops.stopped
        text = generation.rest(stopped)
        event = DoneEvent(
            "stop" if reason == "cancelled" else reason, generation.usage(self._now_ms()), text
        )
        if turn.turn_id and self._journal is not None:
            self._journal.end(turn, event)
        else:
            generation.end(event)

    def _finish(self, generation: Generation, reason: str) -> None:
        """End a generation that never had a turn."""
        generation.end(DoneEvent(reason, generation.usage(self._now_ms())))

    def _after_turn(self, turn: Turn) -> None:
        """Named sessions keep tokens and KV; anonymous ones leave their pages to the store."""
        session = turn.session
        self._turn_over.set()
        loop = self._home[session.key]
        loop.assigned -= 1
        if turn.generation.request.session_id is None:
            self._home.pop(session.key, None)
            loop.close_session(session)
            return
        self._next_in_queue(session, loop)

    def _next_in_queue(self, session: Session, loop: LaneLoop | None) -> None:
        queue = self._queues.get(session.key)
        while queue:
            generation = queue.popleft()
            if not generation.cancelled:
                self._begin(session, generation, loop or self._loops[0])
                return
        self._queues.pop(session.key, None)

    def _forget(self, session: Session) -> None:
        """An idle named session leaves the memory; the ledger remembers it."""
        self._named.pop((session.tenant, session.session_id), None)
        loop = self._home.pop(session.key, None)
        if loop is not None:
            loop.close_session(session)

    def _forget_old_sessions(self) -> None:
        """Keep idle named sessions and their tokens bounded."""
        count = len(self._named)
        tokens = sum(len(session.tokens) for session in self._named.values())
        for session in list(self._named.values()):
            if count <= NAMED_SESSIONS_MAX and tokens <= NAMED_TOKENS_MAX:
                return
            if session.key not in self._queues:
                self._forget(session)
                count -= 1
                tokens -= len(session.tokens)

    # ---------------------------------------------------------------------------- background

    def _count(self, turn: Turn, reason: str) -> None:
        self._finished += 1
        generation, metrics = turn.generation, self.metrics
        sla_class, route = generation.request.sla.sla_class.value, generation.lane or "none"
        now_ms = self._now_ms()
        usage = generation.usage(now_ms)
        first, last = generation.first_token_ms, generation.last_token_ms
        metrics.e2e_seconds.labels(sla_class, route).observe(usage.total_ms / 1000)
        if first is None or last is None:
            return
        metrics.ttft_seconds.labels(sla_class, route).observe(usage.ttft_ms / 1000)
        tpot_ms = (last - first) / max(1, usage.completion_tokens - 1)
        if usage.completion_tokens > 1:
            metrics.tpot_seconds.labels(sla_class, route).observe(tpot_ms / 1000)
        if reason in ("stop", "length"):
            metrics.slo_requests_total.labels(sla_class, _outcome(turn, tpot_ms, now_ms)).inc()

    async def _housekeeping(self) -> None:
        """Once a second: slow readers, gauges, waiting positions, the store's own duties."""
        told = 0.0
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_ms = self._now_ms()
            self._end_slow_readers(now_ms)
            self._set_gauges()
            self._set_counters()
            if now_ms - told > QUEUED_EVENT_S * 1000:
                told = now_ms
                self._tell_waiting()
            self._forget_old_sessions()
            for loop in self._loops:
                loop.pages.retry()
                if loop.pages.has_work:
                    loop.wake()
            since_s = now_ms / 1000 - self._maintained
            if since_s > (MAINTAIN_BUSY_S if self._turns else MAINTAIN_S):
                self._maintained = now_ms / 1000
                await self._audit()

    def _end_slow_readers(self, now_ms: float) -> None:
        limit_ms = self.config.server.reader_stall_s * 1000
        for generation, turn in list(self._turns.items()):
            since = generation.paused_since_ms
            if since is not None and now_ms - since > limit_ms:
                generation.fail(refusals.client_too_slow(limit_ms))
                self._home[turn.session.key].cancel(turn)

    def _tell_waiting(self) -> None:
        for loop in self._loops:
            eta_ms = _eta_ms(loop) if loop.waiting else 0.0
            for position, turn in enumerate(loop.waiting.values(), 1):
                if turn.generation.started_ms is None:
                    turn.generation.push(QueuedEvent(position, eta_ms))

    def _set_gauges(self) -> None:
        waiting: dict[str, int] = {}
        running: dict[tuple[str, str], int] = {}
        for loop in self._loops:
            for turn in loop.waiting.values():
                name = turn.generation.request.sla.sla_class.value
                waiting[name] = waiting.get(name, 0) + 1
            for turn in loop.running.values():
                pair = (turn.generation.request.sla.sla_class.value, loop.lane.name)
                running[pair] = running.get(pair, 0) + 1
        for sla_class in scheduler.RANK:
            name = sla_class.value
            self.metrics.requests_waiting.labels(name).set(waiting.get(name, 0))
            for loop in self._loops:
                pair = (name, loop.lane.name)
                self.metrics.requests_running.labels(*pair).set(running.get(pair, 0))

    def _set_counters(self) -> None:
        """Counters kept as plain numbers by the step loops, brought up to date."""
        for loop in self._loops:
            name, told = loop.lane.name, self._told.setdefault(loop.lane.name, {})
            for counter, labels, value in (
                (self.metrics.steps_total, (name,), loop.steps),
                (self.metrics.tokens_total, ("computed",), loop.tokens),
                (self.metrics.tokens_total, ("generated",), loop.generated),
                (self.metrics.step_predicted_seconds_total, (name,), loop.predicted_ms / 1000),
                (self.metrics.kv_pages_total, ("sealed",), loop.pages.sealed),
                (self.metrics.kv_pages_total, ("seal_failed",), loop.pages.seal_failures),
            ):
                key = (counter, labels)
                counter.labels(*labels).inc(value - told.get(key, 0))
                told[key] = value
        if self._store is not None:
            stat = self._store.stat()
            used, budget = float(stat["used_bytes"]), float(stat["budget_bytes"])
            self.metrics.kv_usage_ratio.labels("disk").set(used / max(budget, 1.0))

    async def _audit(self) -> None:
        """Invariants of every idle session, then of the store, which also does its own duties."""
        for session in self._named.values():
            if session.state is State.IDLE and session.key not in self._queues:
                session.check()
        if self._store is not None:
            await asyncio.to_thread(self._store.maintain)


def _outcome(turn: Turn, tpot_ms: float, now_ms: float) -> str:
    generation, sla = turn.generation, turn.generation.request.sla
    if sla.ttlt_ms is not None and now_ms - generation.arrived_ms > sla.ttlt_ms:
        return "ttlt_miss"
    due_ms = generation.arrived_ms + turn.horizon_ms
    if generation.first_token_ms is not None and generation.first_token_ms > due_ms:
        return "ttft_miss"
    return "tpot_miss" if tpot_ms > turn.tpot_ms else "met"


def _eta_ms(loop: LaneLoop) -> float:
    def work(turn: Turn) -> cost.QueuedWork:
        left = turn.generation.request.tokens_max - turn.generation.completion_tokens
        return cost.QueuedWork(turn.session.frontier, turn.session.to_compute, left)

    seated = [work(turn) for turn in loop.running.values()]
    free = loop.config.entries_max - len(seated)
    queue = [work(turn) for turn in loop.waiting.values()]
    return cost.eta_ms(loop.cost.cost, seated, free, queue)
