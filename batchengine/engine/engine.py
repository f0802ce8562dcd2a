"""The engine as the service sees it: start, submit, stop, and what is going on.

Owns sessions by name, admission and the background tasks. Computes nothing and never blocks:
arithmetic is in lane workers, files and SQLite in the store's threads, text on its own thread.

A session computes one request at a time. A second request with the same session id waits for the
first: agents send parallel calls under one id, and refusing them would break clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from batchengine import router, scheduler
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
from batchengine.engine import refusals, reports
from batchengine.engine.background import Background, count_turn
from batchengine.engine.care import Care
from batchengine.engine.desk import Desk
from batchengine.engine.dispatch import Dispatcher
from batchengine.engine.doubt import Jury
from batchengine.engine.generation import Continuation, Generation
from batchengine.engine.handover import Handover
from batchengine.engine.journal import DONE, Journal
from batchengine.engine.loop import LaneLoop
from batchengine.engine.reopen import Reopener
from batchengine.engine.start import Starter
from batchengine.engine.tables import Tables
from batchengine.engine.turn import Turn
from batchengine.engine.upkeep import Upkeep, identity_of
from batchengine.session import LOG_UNKNOWN, NOT_LOGGED, Session, State
from batchengine.tokenizer import TextFrontend
from kv_store.store import Store

log = logging.getLogger("batchengine.engine")

SESSION_QUEUE_MAX = 16  # requests waiting for one session
SHUTDOWN_S = 5.0  # for turns to end at a token: a step is far shorter
SETTLE_S = 5.0  # for moves between lanes that are under way when the daemon stops


class Engine(Desk):
    """One model, its lanes, its store. Use: `start`, `submit`..., `stop`."""

    def __init__(self, config: Config, *, worker_command: tuple[str, ...] = ()) -> None:
        """`worker_command` replaces the worker program (tests of the same protocol)."""
        self.config = config
        self._tables = Tables(config)
        self.metrics = self._tables.metrics
        self._state = "loading"
        self._progress = 0.0
        self._starter = Starter(config, self, worker_command)
        self._info: ModelInfo | None = None
        self._text: TextFrontend | None = None
        self._journal: Journal | None = None
        self._reopener: Reopener | None = None
        self._care: Care | None = None
        self._upkeep: Upkeep | None = None
        self._dispatch = Dispatcher(self._tables, self._spawn)
        self._handover: Handover | None = None
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._loops, self._turns = self._tables.loops, self._tables.turns
        self._home, self._queues = self._tables.home, self._tables.queues
        self._named = self._tables.named
        self._keys = itertools.count(1)
        self._ends: frozenset[int] = frozenset()
        self._fatal: BaseException | None = None
        self._turn_over = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Engine {self._state} turns={len(self._turns)} sessions={len(self._named)}>"

    # ------------------------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """loading, ready, degraded, draining or stopped."""
        if self._state == "ready" and reports.troubles(self._tables):
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

    @property
    def reopener(self) -> Reopener:
        """What the ledger knows of sessions that memory does not."""
        if self._reopener is None:
            raise refusals.loading(self._progress)
        return self._reopener

    @property
    def care(self) -> Care:
        """Verbs on named sessions."""
        if self._care is None:
            raise refusals.loading(self._progress)
        return self._care

    @property
    def handover(self) -> Handover:
        """Moves of sessions between lanes."""
        if self._handover is None:
            raise refusals.loading(self._progress)
        return self._handover

    @property
    def _store(self) -> Store | None:
        return self._tables.store

    def _now_ms(self) -> float:
        return self._tables.now_ms()

    # -------------------------------------------------------------------------- start, stop

    async def start(self, on_stage: Callable[[Stage], None]) -> None:
        """Load the model on every lane and open the store; requests may come afterwards."""
        model = Path(self.config.model.path)
        self._tables.model_identity = await asyncio.to_thread(identity_of, model)
        try:
            await self._starter.start(on_stage, self._set_progress)
        except BaseException:
            self._state = "stopped"
            await self._starter.abandon()
            raise
        self._info, self._text = self._starter.info, self._starter.text
        self._tables.store, self._journal = self._starter.store, self._starter.journal
        self._reopener = Reopener(self._tables, self._starter.store, self._starter.journal)
        await self._reopener.start(self._starter.last_words)
        self._care = Care(
            self._tables,
            self._starter.store,
            self._starter.journal,
            self._reopener,
            self._starter.text,
            self._spawn,
        )
        self._handover = Handover(
            self._tables, self._starter.journal, self._dispatch, self._next_in_queue
        )
        self._dispatch.mover = self._handover
        self._loops[:] = self._starter.loops
        self._ends = self._text.tokenizer.eog
        for loop in self._loops:
            self._spawn(loop.run(), f"lane {loop.lane.name}")
        self._spawn(self._journal.run(), "journal")
        self._spawn(self._reopener.tidy(), "tidy")
        jury = Jury(self._tables, self._starter.store, self._starter.referee, self._spawn)
        n_vocab = self._text.tokenizer.vocab_size
        self._upkeep = Upkeep(self._tables, self._starter.store, self._reopener, jury, n_vocab)
        self._upkeep.start(self._spawn)
        self._spawn(Background(self._tables, self._tick).run(), "housekeeping")
        self._progress, self._state = 1.0, "ready"

    def _tick(self) -> None:
        self._dispatch.tick()
        self._evacuate()

    def _set_progress(self, fraction: float) -> None:
        self._progress = max(self._progress, min(0.99, fraction))

    async def stop(self, drain_s: float) -> None:
        """Stop admitting, let turns finish for up to `drain_s`, end the rest with "shutdown".

        Requests that wait for their session by then have not begun: 503, with the time to retry.
        """
        if self._state == "stopped":
            return
        self._state = "draining"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._turns or self._queues:
                    self._turn_over.clear()
                    await self._turn_over.wait()
        if self._handover is not None:
            await self._handover.settle(SETTLE_S)
        if self._care is not None and self._fatal is None:
            await self._put_away()
        for loop in self._loops:
            loop.stopping = True
            loop.wake()
        await self._join_tasks("lane")
        for generation, turn in list(self._turns.items()):
            self._end(generation, turn, "shutdown")
        for queue in self._queues.values():
            for generation in queue:
                generation.fail(refusals.draining())
        self._queues.clear()
        if self._journal is not None:
            self._journal.flush()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._starter.close()
        self._state = "stopped"

    async def _put_away(self) -> None:
        """Turns that took too long end at a token, and every tail goes to the store."""
        for queue in self._queues.values():
            while queue:
                queue.popleft().fail(refusals.draining())
        for turn in list(self._turns.values()):
            if turn.session.state in (State.RUNNING, State.WAITING):
                self._home[turn.session.key].cancel(turn)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                while self._turns:
                    self._turn_over.clear()
                    await self._turn_over.wait()
        await self.care.park_everything()

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
        waiting = [generation for queue in self._queues.values() for generation in queue]
        for generation in (*self._turns, *self._tables.beginning, *waiting):
            generation.fail(refusals.internal(error))
        self._turns.clear()

    # ------------------------------------------------------------------------------ requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Admit one generation, or raise BatchEngineError with the HTTP status to answer."""
        request = self.care.named(request)
        self._admit(request)
        text, now_ms = self.text.detokeniser(), self._now_ms()
        session_id = request.session_id or f"be_{request.request_id}"
        generation = Generation(request, session_id, text, now_ms, self._cancel, self._has_room)
        if request.session_id is None:
            generation.release()  # nobody can resume it: nothing to make durable
            self._begin(Session(next(self._keys), session_id, request.tenant), generation)
            return generation
        session, fresh = self._session(request.tenant, request.session_id)
        queue = self._queues.get(session.key)
        if queue is not None:
            queue.append(generation)
            generation.push(QueuedEvent(len(queue), None))
            self._dispatch.waits_behind(session, generation)
            return generation
        self._queues[session.key] = deque()
        if fresh:
            self._reopen_soon(session, generation)
        else:
            self._begin(session, generation)
        return generation

    def _session(self, tenant: str, session_id: str) -> tuple[Session, bool]:
        """The named session, newest use last, and whether memory had never heard of it."""
        session = self._named.pop((tenant, session_id), None)
        fresh = session is None
        if session is None:
            session = Session(next(self._keys), session_id, tenant)
            session.epoch = self._tables.first_epoch
        self._named[tenant, session_id] = session
        return session, fresh

    async def resume(
        self, tenant: str, session_id: str, from_token: int = 0, turn_id: str = ""
    ) -> Generation:
        """The session's last turn again, from token `from_token` of its answer on.

        Tokens that exist are told as the first stream told them; a turn that broke off goes on
        under its own parameters and seed, one that is finished ends as it did. If it still runs,
        the new reader takes it over. `turn_id` says whose tokens the reader has: 409 if that is
        not the last turn. Raises BatchEngineError (404, 409, 400).
        """
        request = await self.care.resumable(tenant, session_id, from_token, turn_id)
        self._admit(request)
        text, now_ms = self.text.detokeniser(), self._now_ms()
        generation = Generation(request, session_id, text, now_ms, self._cancel, self._has_room)
        generation.resume_at(from_token)
        session, _ = self._session(tenant, session_id)
        queue = self._queues.get(session.key)
        if queue is None:
            self._queues[session.key] = deque()
            self._begin(session, generation)
            return generation
        for older in queue:
            if older.resumes is not None:
                older.fail(refusals.resumed_elsewhere())
        queue.appendleft(generation)
        for running, turn in list(self._turns.items()):
            if turn.session is session and turn.turn_id == request.request_id:
                running.abort(refusals.resumed_elsewhere())
        return generation

    async def why(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Where the session's last prompt left its history, and what that cost."""
        return await self.care.why(tenant, session_id)

    async def session_detail(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Everything there is to know about one session, but its text."""
        return await self.care.detail(tenant, session_id)

    async def fork(self, tenant: str, session_id: str, new_id: str) -> dict[str, Any]:
        """A second session with the same timeline, sharing its pages."""
        return await self.care.fork(tenant, session_id, new_id)

    async def park(
        self, tenant: str, session_id: str, tool_call_id: str | None = None
    ) -> dict[str, Any]:
        """The session waits for a tool: its KV leaves the lane, the call leads back to it."""
        return await self.care.park(tenant, session_id, tool_call_id)

    async def drop(self, tenant: str, session_id: str) -> dict[str, Any]:
        """The session and its history end."""
        return await self.care.drop(tenant, session_id)

    async def promote(
        self, session_id: str, to: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Move a session to lane `to`, or to the best fast one, between two of its tokens.

        `session_id` may be a unique prefix. Returns a MoveReport as a dict. Raises
        BatchEngineError (404, 409, 400): nothing has changed then.
        """
        return await self.handover.relocate(session_id, to, tenant, router.FAST)

    async def demote(
        self, session_id: str, to: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """As `promote`, to the best lane for work that can wait."""
        return await self.handover.relocate(session_id, to, tenant, router.BULK)

    def _admit(self, request: GenerationRequest) -> None:
        """Every reason to refuse, checked before anything changes."""
        if self._state == "loading":
            raise refusals.loading(self._progress)
        if self._state in ("draining", "stopped"):
            raise refusals.draining()
        if self._fatal is not None:
            raise refusals.internal(self._fatal)
        if self._tables.model_changed:
            raise refusals.model_changed(self._tables.model_changed)
        info = self.info
        refusals.check_request(request, info.context_tokens, info.vocab_size)
        if self._tables.waiting >= self.config.limits.queue_max:
            raise refusals.overloaded(self._tables.waiting, self._dispatch.wait_ms(request))
        if request.session_id is not None:
            session = self._named.get((request.tenant, request.session_id))
            queue = None if session is None else self._queues.get(session.key)
            if queue is not None and len(queue) >= SESSION_QUEUE_MAX:
                raise refusals.session_busy(len(queue))
        self._dispatch.admit(request)

    def _reopen_soon(self, session: Session, generation: Generation) -> None:
        self._tables.beginning[generation] = session
        self._spawn(self._reopen(session, generation), "reopen")

    async def _reopen(self, session: Session, generation: Generation) -> None:
        """A named session that is not in memory, or whose records were refused: ask the ledger."""
        if self._journal is None:
            raise RuntimeError("submit before start")
        try:
            if self._upkeep is not None:
                await self._upkeep.check_model()
            await self.reopener.look(session, generation)
        except Exception as error:
            log.error("session %s cannot be reopened: %s", session.session_id, error)
            known = refusals.request_failed(error)
            if session.logged == NOT_LOGGED:
                session.logged = LOG_UNKNOWN
            generation.fail(known)
            self._next_in_queue(session)
            if session.key not in self._queues and not session.codes:
                self._tables.forget(session)  # nothing is lost: the ledger is asked again
            return
        except asyncio.CancelledError:
            generation.fail(refusals.draining())
            raise
        finally:
            del self._tables.beginning[generation]
        self._begin(session, generation)

    @contextlib.contextmanager
    def _beginning(self, session: Session, generation: Generation) -> Generator[None]:
        """A fault of ours on the way to a turn ends its request, not its session."""
        try:
            yield
        except Exception as error:
            log.exception("a request of session %s cannot begin", session.session_id)
            known = refusals.request_failed(error)
            turn = self._turns.get(generation)
            if turn is None:
                generation.fail(known)
                self._next_in_queue(session)
            elif session.state is State.IDLE:
                self._home[session.key].pages.truncate(session, 0)  # it may be half done
                self.turn_failed(turn, known)
            else:
                self.fail_everything(error)  # half of a lane's tables have the turn

    def _begin(self, session: Session, generation: Generation) -> None:
        """Choose the lane, and bring the session there if it is elsewhere."""
        with self._beginning(session, generation):
            self._choose(session, generation)

    def _choose(self, session: Session, generation: Generation) -> None:
        if generation.is_superseded(self._queues.get(session.key)):
            generation.fail(refusals.resumed_elsewhere())
        if generation.cancelled or generation.finished:
            self._next_in_queue(session)
            return
        if self.reopener.must_look(session, generation):
            self._reopen_soon(session, generation)
            return
        more = generation.continuation
        is_told = generation.resumed_tokens > 0  # it had to wait for a hand-over since
        if more is not None and not is_told and self._retell(session, generation, more):
            return
        loop = self._dispatch.place(session, generation)
        if self._home.get(session.key, loop) is loop:
            self._begin_on(loop, session, generation)
            return

        def begin_there() -> None:
            self._begin_on(self._home.get(session.key, loop), session, generation)

        move = functools.partial(self._dispatch.move, session, loop, "router")
        self._tables.beginning[generation] = session
        self._spawn(self._begin_after(move, session, generation, begin_there), "move")

    async def _begin_after(
        self,
        move: Callable[[], Awaitable[object]],
        session: Session,
        generation: Generation,
        then: Callable[[], None],
    ) -> None:
        """A hand-over first; then begin wherever that leaves the session."""
        with self._beginning(session, generation):
            try:
                await move()
            except asyncio.CancelledError:
                generation.fail(refusals.draining())
                raise
            finally:
                del self._tables.beginning[generation]
            if generation.cancelled or generation.finished:
                self._next_in_queue(session)
            else:
                then()

    def _begin_on(self, loop: LaneLoop, session: Session, generation: Generation) -> None:
        """Put the prompt on the session, find KV that exists, and queue the turn."""
        move = self.handover.moving(session)
        if move is not None:
            wait, again = (lambda: asyncio.wait([move])), (lambda: self._begin(session, generation))
            self._tables.beginning[generation] = session
            self._spawn(self._begin_after(wait, session, generation, again), "move")
            return
        request = generation.request
        horizon_ms, tpot_ms = self._dispatch.pace(loop, request)
        turn = Turn(
            session,
            generation,
            rank=scheduler.RANK[request.sla.sla_class],
            deadline_ms=generation.arrived_ms + horizon_ms,
            horizon_ms=horizon_ms,
            tpot_ms=tpot_ms,
            now_ms=self._now_ms(),
        )
        self._turns[generation] = turn
        self._home[session.key] = loop
        loop.assigned += 1
        loop.pages.recall(session)
        session.priority = turn.priority
        self.reopener.begin(turn, loop.lane)
        loop.pages.fit(session)

        def is_worth_reading(tokens: int, cold_tokens: int, cold_bytes: int) -> bool:
            plan = self._dispatch.plan_restore(turn, loop, tokens, cold_tokens, cold_bytes)
            return plan.choice != "recompute"

        pending = loop.pages.extend(session, turn.salt, turn.priority, is_worth_reading)
        if pending is None:
            self._join(turn, loop)
        else:
            self._spawn(self._join_when_loaded(turn, loop, asyncio.wrap_future(pending)), "load")

    def _retell(self, session: Session, generation: Generation, more: Continuation) -> bool:
        """Tell the tokens that exist again; True if the answer ends among them."""
        reason = generation.retell(more.tokens, self.is_end)
        if not reason and more.is_last:
            return False
        if reason:
            generation.cached_tokens = len(generation.request.prompt)
            if more.is_last and not more.is_done and more.turn_id and self._journal is not None:
                self._journal.settle(session, more.turn_id, reason)
            text = generation.rest(generation.stops.stopped)
            generation.end(DoneEvent(reason, generation.usage(self._now_ms()), text))
        else:
            generation.fail(refusals.other_request_of_key())
        self._tables.finished += 1
        self._next_in_queue(session)
        return True

    async def _join_when_loaded(
        self, turn: Turn, loop: LaneLoop, pending: asyncio.Future[list[bool]]
    ) -> None:
        """Pages found on disk are verified before anything reads them."""
        asked_ms = self._now_ms()
        try:
            good = await pending
        except Exception as error:
            log.error("pages of %s cannot be read, it is computed again: %s", turn, error)
            good = [False]
        with self._beginning(turn.session, turn.generation):
            self._dispatch.restored(turn, self._now_ms() - asked_ms)
            while (move := self.handover.moving(turn.session)) is not None:
                await asyncio.wait([move])
            loop = self._home.get(turn.session.key, loop)
            loop.pages.loaded(turn.session, good)
            self._join(turn, loop)

    def _join(self, turn: Turn, loop: LaneLoop) -> None:
        if turn.generation.cancelled or turn.generation.finished:
            self.turn_ended(turn, "cancelled")
            return
        self.reopener.fetch(turn, loop.pages)
        wait_ms = self._dispatch.wait_ms(turn.generation.request, loop)
        ahead = sum(other.rank <= turn.rank for other in loop.waiting.values())
        loop.join(turn)
        if ahead or len(loop.running) >= loop.config.entries_max:
            turn.generation.push(QueuedEvent(ahead + 1, wait_ms))

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

    def turn_admitted(self, turn: Turn) -> None:
        """The turn has a seat: how much of its KV was found, and why not more."""
        self.reopener.admitted(turn)

    async def touching(self, session: Session) -> None:
        """A suspect is about to compute alone: durable before it can end anything."""
        await self.reopener.touching(session)

    def trusted(self, session: Session) -> None:
        """A suspect got past the point where it was suspected."""
        self.reopener.trusted(session)

    def turn_ended(self, turn: Turn, reason: str) -> None:
        """The session is idle again; the reader gets its last event."""
        if self._state == "draining" and reason == "cancelled" and not turn.generation.cancelled:
            reason = "shutdown"
        self._end(turn.generation, turn, reason)
        self._after_turn(turn)

    def turn_failed(self, turn: Turn, error: BatchEngineError) -> None:
        """The turn cannot go on; the session forgets its KV, its tokens stay."""
        generation = turn.generation
        self._turns.pop(generation, None)
        count_turn(self._tables, turn, "error")
        self._dispatch.ended(turn, "error")
        if turn.turn_id and self._journal is not None:
            self._journal.end(turn, ErrorEvent(error), "failed")
        else:
            generation.fail(error)
        self._after_turn(turn)

    async def revive(self, loop: LaneLoop) -> None:
        """Start the next worker of a lane whose worker died; who need not wait goes elsewhere."""
        if loop.lane.backoff_s() > 0.0:
            self._evacuate()
        await self._starter.revive(loop)

    def _evacuate(self) -> None:
        """Turns on lanes that are down move to lanes that are up and have seats."""
        for loop in self._loops:
            if self.handover.evacuees(loop):
                self._spawn(self.handover.evacuate(loop), "evacuation")

    def _end(self, generation: Generation, turn: Turn, reason: str) -> None:
        self._turns.pop(generation, None)
        count_turn(self._tables, turn, reason)
        self._dispatch.ended(turn, reason)
        stopped = reason == "stop" and generation.stops.stopped
        text = generation.rest(stopped)
        event = DoneEvent(
            "stop" if reason == "cancelled" else reason, generation.usage(self._now_ms()), text
        )
        if turn.turn_id and self._journal is not None:
            self._journal.end(turn, event, DONE if reason in ("stop", "length") else reason)
        else:
            generation.end(event)

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
        self.care.turn_over(turn)
        self._next_in_queue(session)

    def _next_in_queue(self, session: Session) -> None:
        queue = self._queues.get(session.key)
        while queue:
            generation = queue.popleft()
            if not generation.cancelled:
                self._begin(session, generation)
                return
        self._queues.pop(session.key, None)
        self._turn_over.set()
