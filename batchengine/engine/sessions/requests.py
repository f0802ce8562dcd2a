"""Requests: the order of a session's requests, and one coroutine for each of them.

Owns every request from `submit` to its last event. A session computes one request at a time. Agents
send parallel calls under one id, so these wait in order of arrival, a resume before the others.
Requests without a session id have a session of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from batchengine import errors
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    GenerationRequest,
    Kind,
    ModelInfo,
    QueuedEvent,
)
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.placement.move_report import MoveCause
from batchengine.engine.sessions.admission import RequestAdmission, with_session, with_turn
from batchengine.engine.sessions.closing import TurnClosing
from batchengine.engine.sessions.grammar import TurnGrammars
from batchengine.engine.sessions.parking import Parking
from batchengine.engine.sessions.past.attempts import LeftAttempts
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState, Line
from batchengine.engine.tasks import Tasks
from batchengine.engine.turns.journal import Journal
from batchengine.engine.turns.stream import Continuation, Generation
from batchengine.engine.turns.turn import Turn, TurnEnd
from batchengine.session import LOG_UNKNOWN, NOT_LOGGED, Session, State
from batchengine.text.frontend import TextFrontend

log = logging.getLogger("batchengine.sessions")


class Requests:
    """Every admitted request of one engine. All methods run on its event loop."""

    def __init__(
        self,
        state: EngineState,
        info: ModelInfo,
        text: TextFrontend,
        grammars: TurnGrammars,
        journal: Journal,
        recovery: SessionRecovery,
        dispatcher: Dispatcher,
        parking: Parking,
        tasks: Tasks,
        check_model: Callable[[], Awaitable[None]],
    ) -> None:
        """`check_model` raises BatchEngineError if the model's files have changed."""
        self._state = state
        self._text = text
        self._grammars = grammars
        self._journal = journal
        self._recovery = recovery
        self._dispatcher = dispatcher
        self._parking = parking
        self._tasks = tasks
        self._check_model = check_model
        self.attempts = LeftAttempts()
        self.admission = RequestAdmission(state, info, dispatcher)
        self._closing = TurnClosing(state, journal, recovery, dispatcher)
        self._running: set[asyncio.Task[None]] = set()
        self._keys = itertools.count(1)

    def __repr__(self) -> str:
        return f"<Requests {len(self._state.requests)} sessions={len(self._state.lines)}>"

    # ------------------------------------------------------------------- called from outside

    def submit(self, request: GenerationRequest, more: Continuation | None = None) -> Generation:
        """Admit one generation, or raise BatchEngineError before anything has changed; `more` is
        what a request without a session goes on with."""
        request = with_turn(with_session(request, self._recovery), self._state)
        self.admission.check(request)
        if request.session_id is None:
            session = Session(next(self._keys), f"be_{request.request_id}", request.tenant)
            generation = self._generation(request, session)
            generation.release()  # without a session id nothing is made durable
            if more is not None:
                session.tokens, generation.continuation = [*request.prompt, *more.tokens], more
            turn = None if more is not None else self._begin_now(session, generation)
            self._spawn(self._serve(session, generation, turn))
            return generation
        session = self._session(request.tenant, request.session_id)
        generation = self._generation(request, session)
        line = self._state.lines.get(session.key)
        if line is None:
            self._serve_line(session, generation)
        else:
            line.waiting.append(generation)
            generation.push(QueuedEvent(len(line.waiting), None))
            self._dispatcher.waits_behind(session, generation)
        return generation

    async def resume(
        self, tenant: str, session_id: str, from_token: int = 0, turn_id: str = ""
    ) -> Generation:
        """Stream the session's last turn again, from token `from_token` of its answer on.

        Existing tokens are sent again; an unfinished turn continues with its parameters and seed,
        a finished one ends as before. If the turn still runs, the new reader replaces the old one.
        Raises BatchEngineError (404, 409, 400), also if `turn_id` is set and not the last turn.
        """
        request = await self._recovery.resumable(tenant, session_id, from_token, turn_id)
        self.admission.check(request)
        session = self._session(tenant, session_id)
        generation = self._generation(request, session)
        generation.resumes = from_token
        line = self._state.lines.get(session.key)
        if line is None:
            self._serve_line(session, generation)
            return generation
        for older in line.waiting:
            if older.resumes is not None:
                older.fail(errors.RESUMED_ELSEWHERE())
        line.waiting.appendleft(generation)
        turn = self._state.turn_of(session)
        if turn is not None and turn.turn_id == request.request_id:
            turn.generation.abort(errors.RESUMED_ELSEWHERE())
        return generation

    async def end(self, session: Session, error: BatchEngineError) -> None:
        """Fail every request of a named session with `error`; returns once none is being served.

        The name is in `EngineState.dropping`, so that no request arrives meanwhile.
        """
        for generation, of in list(self._state.requests.items()):
            if of is session and not generation.finished:
                generation.abort(error)
        while (line := self._state.lines.get(session.key)) is not None:
            await asyncio.wait([line.task])

    # -------------------------------------------------------------------------------- the end

    async def over(self, timeout_s: float) -> None:
        """Wait until every request has ended, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._running:
                    await asyncio.wait(self._running)

    def cancel_all(self) -> None:
        """Refuse requests that have not begun, and cancel turns, which end at a token boundary."""
        _refuse_waiting(self._state)
        for turn in self._state.turns.values():
            if turn.session.state in (State.RUNNING, State.WAITING):
                self._state.home[turn.session.key].cancel(turn)

    def end_all(self) -> None:
        """End all requests that are left after the lanes have stopped; turns with "shutdown"."""
        _refuse_waiting(self._state)
        for turn in list(self._state.turns.values()):
            self._closing.close(turn, TurnEnd("shutdown"))

    def fail_all(self, error: BaseException) -> None:
        """Fail every request, after a defect that stopped the engine."""
        for generation in self._state.requests:
            generation.fail(errors.ENGINE_FAILED(defect=type(error).__name__))
        self._state.turns.clear()

    # -------------------------------------------------------------------------------- parts

    def _generation(self, request: GenerationRequest, session: Session) -> Generation:
        generation = Generation(
            request,
            session.session_id,
            lambda: self._text.detokeniser(request.output),
            self._state.now_ms(),
            self._cancel,
            self._has_room,
        )
        self._state.requests[generation] = session
        return generation

    def _session(self, tenant: str, session_id: str) -> Session:
        """Return the named session, or a new one, as the most recently used."""
        session = self._state.sessions.pop((tenant, session_id), None)
        if session is None:
            session = Session(next(self._keys), session_id, tenant)
            session.epoch = self._state.first_epoch
        self._state.sessions[tenant, session_id] = session
        return session

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.spawn_request(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    # ------------------------------------------------------------------------- one request

    def _serve_line(self, session: Session, first: Generation) -> None:
        waiting = deque[Generation]()
        task = self._spawn(self._serve_all(session, first, waiting))
        self._state.lines[session.key] = Line(waiting, task)

    async def _serve_all(
        self, session: Session, first: Generation, waiting: deque[Generation]
    ) -> None:
        """Serve the requests of a named session, one after the other, until none waits."""
        try:
            await self._serve(session, first)
            while waiting:
                await self._serve(session, waiting.popleft())
        finally:
            del self._state.lines[session.key]
            for generation in waiting:  # not empty only if this task was cancelled
                del self._state.requests[generation]
                generation.fail(errors.DRAINING())
            if not session.tokens and not session.kv.codes and self._state.is_at_rest(session):
                self._state.forget(session)  # its clients left before anything was computed

    async def _serve(
        self, session: Session, generation: Generation, turn: Turn | None = None
    ) -> None:
        """Serve one request until its last event; `turn` is set if its lane is already chosen."""
        try:
            if turn is None and (loop := await self._place(session, generation)) is not None:
                turn = self._begin(loop, session, generation)
            if turn is not None:
                await self._join(turn)
                await turn.started()
                if turn.reported:
                    self._recovery.count_reuse(turn)
                await self._finish(turn, await turn.ended())
        finally:
            self.attempts.end(generation)
            del self._state.requests[generation]

    def _begin_now(self, session: Session, generation: Generation) -> Turn:
        """Begin the turn of an anonymous session, whose lane can be chosen at once, so that it
        counts in the lane's load when the next request is admitted."""
        try:
            return self._begin(self._dispatcher.choose(session, generation), session, generation)
        except Exception:
            del self._state.requests[generation]
            raise

    async def _place(self, session: Session, generation: Generation) -> LaneLoop | None:
        """Move the session to the lane of its next turn; None = the request has ended."""
        try:
            if not await self._is_to_compute(session, generation):
                return None
            await self._state.moved(session)
            loop = self._dispatcher.choose(session, generation)
            if self._state.home.get(session.key, loop) is not loop:
                await self._dispatcher.move(session, loop, MoveCause.ROUTER)
                await self._state.moved(session)
            if self._is_over(session, generation):
                return None
            return self._state.home.get(session.key, loop)
        except asyncio.CancelledError:
            generation.fail(errors.DRAINING())
            raise
        except Exception as error:
            refusal = errors.of_request(error)
            is_ours = refusal.kind in (Kind.INTERNAL, Kind.UNAVAILABLE)
            level = logging.ERROR if is_ours else logging.INFO  # its client gets it
            log.log(level, "session %s: its request cannot begin: %s", session.session_id, error)
            if not isinstance(error, BatchEngineError):
                log.exception("a defect")
            generation.fail(refusal)
            return None

    async def _is_to_compute(self, session: Session, generation: Generation) -> bool:
        """Load the session if necessary; False if the request ends without a turn."""
        if self._is_over(session, generation):
            return False
        if self._recovery.must_load(session, generation):
            await self._load(session, generation)
            if self._is_over(session, generation):
                return False
        more = generation.continuation
        return more is None or not await self._replay(session, generation, more)

    def _is_over(self, session: Session, generation: Generation) -> bool:
        line = self._state.lines.get(session.key)
        if line is not None and generation.is_superseded(line.waiting):
            generation.fail(errors.RESUMED_ELSEWHERE())
        return generation.is_over

    async def _load(self, session: Session, generation: Generation) -> None:
        """Load a session from the ledger. Raises BatchEngineError."""
        try:
            await self._check_model()
            await self._recovery.load(session, generation)
        except Exception:
            if session.logged == NOT_LOGGED:
                session.logged = LOG_UNKNOWN
            waiting = self._state.lines[session.key].waiting
            is_waited_for = waiting or session.key in self._state.moves
            if not (is_waited_for or session.kv.codes):
                self._state.forget(session)  # the next request loads it again
            raise

    async def _replay(self, session: Session, generation: Generation, more: Continuation) -> bool:
        """Send the existing tokens of the turn again; True if the request ends with them."""
        reason, is_of_other = "", bool(more.changed) and more.is_last
        if not is_of_other or more.is_done:
            reason = await generation.replay(more.tokens, self._text.tokenizer.eog)
        if not reason and more.is_last and not is_of_other:
            return False
        if reason:
            generation.cached_tokens = len(generation.request.prompt)
            if more.is_last and not more.is_done and more.turn_id:
                meta = self._recovery.meta(session)
                cached = generation.cached_tokens
                self._journal.settle(session, more.turn_id, reason, cached, meta)
            text = generation.rest(generation.stops.stopped)
            usage = generation.usage(self._state.now_ms())
            generation.end(DoneEvent(reason, usage, text, generation.stops.found))
        elif is_of_other:
            name, turn_id = session.session_id, generation.turn_id
            generation.fail(
                errors.TURN_OF_OTHER_MODEL(turn_id=turn_id, session_id=name, changed=more.changed)
            )
        else:
            generation.fail(errors.OTHER_REQUEST_OF_KEY())
        self._state.finished += 1
        return True

    def _begin(self, loop: LaneLoop, session: Session, generation: Generation) -> Turn:
        """Create the turn and assign it to the lane."""
        state, (horizon_ms, tpot_ms) = self._state, self._dispatcher.pace(loop, generation.request)
        now_ms = state.now_ms()
        turn = Turn(
            session,
            generation,
            horizon_ms=horizon_ms,
            tpot_ms=tpot_ms,
            now_ms=now_ms,
            end_tokens=self._text.tokenizer.eog,
        )
        state.turns[generation] = turn
        generation.computing = session
        state.home[session.key] = loop
        loop.assigned += 1
        loop.kv.slots.protect(session)
        session.priority = turn.priority
        session.sla_class = generation.request.sla.sla_class.value
        return turn

    async def _join(self, turn: Turn) -> None:
        """Queue the turn on its lane. A defect before that ends this request only."""
        session = turn.session
        try:
            if await self._grammars.begin(turn):
                await self._find_kv(turn)
                self._enqueue(turn)
        except Exception as error:
            if session.state is not State.IDLE:
                raise  # the lane's tables may be inconsistent
            log.exception("a request of session %s cannot begin", session.session_id)
            self._state.home[session.key].kv.slots.clear(session)  # may be half filled
            turn.finish(TurnEnd(error=errors.of_request(error)))

    async def _find_kv(self, turn: Turn) -> None:
        """Make the prompt the session's timeline, durably if it has a name; take existing KV, from
        disk too unless a recompute is faster."""
        session, loop = turn.session, self._state.home[turn.session.key]
        self._recovery.begin(turn, loop.lane)
        if turn.scores is not None:
            return  # see `Turn.reusable`
        await self._dispatcher.plans.prepare(turn, self._dispatcher.log)

        def is_worth_reading(tokens: int, cold_tokens: int, cold_bytes: int) -> bool:
            plan = self._dispatcher.restores.plan(turn, loop, tokens, cold_tokens, cold_bytes)
            return plan.choice != "recompute"

        loop.kv.slots.fit(session)
        pending = loop.kv.prefix.extend(session, session.salt, turn.priority, is_worth_reading)
        if pending is not None:
            asked_ms = self._state.now_ms()
            try:
                good = await asyncio.wrap_future(pending)
            except Exception as error:
                log.error("pages of %s cannot be read, it is computed again: %s", turn, error)
                good = [False]
            self._dispatcher.restores.done(turn, self._state.now_ms() - asked_ms)
            await self._state.moved(session)
            self._state.home[session.key].kv.prefix.loaded(session, good)

    def _enqueue(self, turn: Turn) -> None:
        generation, loop = turn.generation, self._state.home[turn.session.key]
        if generation.is_over:
            turn.finish(TurnEnd("cancelled"))
            return
        if turn.scores is None:
            self._recovery.import_open_rows(turn, loop)
        ahead = [t.session.tenant for t in loop.waiting.values() if t.rank <= turn.rank]
        loop.join(turn)
        if ahead or len(loop.running) >= loop.config.entries_max:
            position = ahead.count(turn.session.tenant) + 1
            generation.push(QueuedEvent(position, generation.lane_wait_ms))

    async def _finish(self, turn: Turn, end: TurnEnd) -> None:
        """Close the turn, and an anonymous session, of which only pages in the store stay."""
        session, state = turn.session, self._state
        self._closing.close(turn, end)
        state.home[session.key].assigned -= 1
        if turn.generation.request.session_id is None:
            if self.attempts.keep(turn.generation, session.tokens):
                await self._parking.park(session, leave=False)
            await state.moved(session)
            state.home.pop(session.key).close_session(session)
        elif self._parking.takes(turn):
            self._tasks.spawn(self._parking.park(session, leave=True), "park")

    # -------------------------------------------------------------------------------- readers

    def _cancel(self, generation: Generation) -> None:
        """Cancel the turn of a request, or remove the request from its queue."""
        self.attempts.left(generation)
        if (turn := self._state.turns.get(generation)) is not None:
            loop = self._state.home.get(turn.session.key)
            if loop is not None and turn.session.state is not State.IDLE:
                loop.cancel(turn)
            return
        session = self._state.requests.get(generation)
        line = None if session is None else self._state.lines.get(session.key)
        if line is not None and generation in line.waiting:
            line.waiting.remove(generation)
            del self._state.requests[generation]

    def _has_room(self, generation: Generation) -> None:
        """Resume the paused turn of a reader that caught up."""
        generation.paused_since_ms = None
        if (turn := self._state.turns.get(generation)) is not None and turn.paused:
            self._state.home[turn.session.key].resume(turn)


def _refuse_waiting(state: EngineState) -> None:
    """Fail requests that have no turn yet: the engine stops."""
    for generation in state.requests:
        if generation not in state.turns:
            generation.fail(errors.DRAINING())
