"""The step loop of one lane: drain, plan, run, commit; and what a worker's death means.

Owns which turns run and wait on this lane. Decides nothing about order (the scheduler does) and
computes nothing (the worker does). Tables of sessions change only between two steps; the text and
events of a step are produced while the worker computes the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Callable

from batchengine import scheduler, wire
from batchengine.config import LaneConfig
from batchengine.core import PAGE_TOKENS, BatchEngineError, TokenLogprob
from batchengine.cost import CostModel, StepCost, work_of
from batchengine.engine import refusals
from batchengine.engine.flight import Emission, Flight, Frozen, Part, check_answer
from batchengine.engine.owner import Owner
from batchengine.engine.shared import SharedPages
from batchengine.engine.trial import Trial, Trials
from batchengine.engine.turn import Turn
from batchengine.lanes.lane import Lane, LaneDied
from batchengine.pages import LanePages
from batchengine.session import Event, Session, State
from kv_store.arena import ArenaPlace

log = logging.getLogger("batchengine.engine")

STEP_DEADLINE_MIN_S = 30.0  # far above any step, far below a client's patience
STEP_DEADLINE_FACTOR = 20.0  # a step that takes 20 times its prediction is a hang
OBSERVE_ALL = 256  # steps the cost model learns from without exception;
OBSERVE_EVERY = 4  # later, of decode steps, one in so many: they are all alike
REPLAN_S = 0.005  # an empty plan may be a matter of time: places return, deadlines pass
OVERHEAD_GAIN = 0.05
ALONE_DEATHS_MAX = 2  # a session that kills a worker alone twice is the cause
STALL_S = 0.25  # turns that could compute but find no place: one of them gives way,
STALL_ALONE_S = 5.0  # or ends, if it has nobody to wait for
NO_PLAN = scheduler.StepPlan(())


class LaneLoop:
    """Turns of one lane, and the loop that moves their frontiers."""

    def __init__(
        self,
        lane: Lane,
        pages: LanePages,
        config: LaneConfig,
        owner: Owner,
        pages_budget: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lane = lane
        self.pages = pages
        self.config = config
        self.cost = CostModel(StepCost())
        self.running: dict[int, Turn] = {}
        self.waiting: dict[int, Turn] = {}
        self.sessions = pages.members  # every session with pages on this lane
        self.stopping = False
        self.expected = 0  # seats kept for sessions that are on their way here
        self.assigned = 0  # turns that were given to this lane and have not ended
        self.trials = Trials(pages, config)
        self.drained = ""  # why nothing is computed here any more,
        self.down = ""  # or why no worker can be started
        self.is_rechecking = False
        self.step_ms = 0.0
        self.overhead_ms = 0.0  # of a step, on average: what passes outside the worker
        self._owner = owner
        self._pages_budget = pages_budget
        self._clock = clock
        self._wake_event = asyncio.Event()
        self._cancelled: list[Turn] = []
        self._emissions: list[Emission] = []
        self._flight: Flight | None = None
        self._freezes: list[tuple[Session, asyncio.Future[Frozen | None]]] = []
        self._arrivals: dict[int, asyncio.Future[float]] = {}  # sessions whose first step counts
        self._observed: tuple[Flight, wire.StepDone, list[tuple[int, int]]] | None = None
        self._waiting_rows: tuple[scheduler.Row, ...] | None = None
        self._shared = SharedPages()
        self._stalled_ms: float | None = None  # since when nothing could be computed
        self._policy = scheduler.Policy()
        self.steps = 0
        self.tokens = 0
        self.generated = 0
        self.recomputed = 0  # tokens that had been computed, or sent to be, before
        self.predicted_ms = 0.0
        lane.on_death = self.wake  # an idle lane must notice too
        self._step_seconds = owner.metrics.step_seconds.labels(lane.name)

    def __repr__(self) -> str:
        return f"<LaneLoop {self.lane!r} running={len(self.running)} waiting={len(self.waiting)}>"

    def now_ms(self) -> float:
        return self._clock() * 1000.0

    @property
    def up(self) -> bool:
        """Whether it computes."""
        return self.lane.alive and not self.drained

    @property
    def context_max(self) -> int:
        """Tokens whose KV the store can hold for one session of this lane."""
        return self._pages_budget * PAGE_TOKENS

    # ------------------------------------------------------------------ asked by the engine

    def join(self, turn: Turn) -> None:
        """A turn wants to compute; its session is IDLE and belongs to this lane."""
        turn.session.on(Event.START)
        self.pages.enter(turn.session)
        self.waiting[turn.session.key] = turn
        self._waiting_rows = None
        self.pages.lend(turn.session)
        self.wake()

    def cancel(self, turn: Turn) -> None:
        """Stop a turn within one step; nobody reads its stream any more."""
        self._cancelled.append(turn)
        self.wake()

    def resume(self, turn: Turn) -> None:
        """Its reader caught up, or a doubt is over: it goes on if it waits for neither."""
        turn.paused = turn.doubts > 0 or turn.generation.paused_since_ms is not None
        self._forget_row(turn)
        self.wake()

    def hurry(self, turn: Turn, rank: int, horizon_ms: float, tpot_ms: float) -> None:
        """Somebody more urgent waits for this turn: it is served as if it were theirs."""
        turn.rank = min(turn.rank, rank)
        turn.horizon_ms = min(turn.horizon_ms, horizon_ms)
        turn.deadline_ms = min(turn.deadline_ms, self.now_ms() + horizon_ms)
        turn.tpot_ms = min(turn.tpot_ms, tpot_ms)
        self._forget_row(turn)
        self.wake()

    def close_session(self, session: Session) -> None:
        """An idle session ends: its pages go back to the store."""
        self.pages.recall(session)
        self.pages.truncate(session, 0)
        self.sessions.pop(session.key, None)
        session.on(Event.CLOSE)
        if self.pages.has_chores:
            self.wake()

    def fail_turns(self, error: BatchEngineError) -> None:
        """The lane cannot compute: everybody who waits for it hears why."""
        for turn in [*self.running.values(), *self.waiting.values()]:
            self._leave(turn)
            self._owner.turn_failed(turn, error)

    def drain(self, why: str) -> None:
        """It computes no more: its turns wait for another lane, with their sealed pages only."""
        self.drained = self.pages.muted = why
        for session in self.sessions.values():
            session.distrusted = True  # one that moves just now as well
        self.recheck()

    def recheck(self) -> None:
        """Pages were condemned: sessions fall back to those before them."""
        self.is_rechecking = True
        self.wake()

    def ask_trial(self, trial: Trial) -> None:
        """Compute one page for its digest; await `trial.digest`, then close it."""
        self.trials.ask(trial)
        self.wake()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake_event.set()

    def session_cut(self, session: Session) -> None:
        """The session lost KV, or got it back: look again what the store has for its turn."""
        if (turn := self.running.get(session.key) or self.waiting.get(session.key)) is not None:
            turn.needs_match = True
            self._forget_row(turn)

    # ------------------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Steps until `stopping`; a dead worker is replaced and its sessions go on."""
        while not self.stopping:
            try:
                await self._step()
            except LaneDied as death:
                await self._recover(death)
            except BatchEngineError as error:
                log.error("lane %s: %s", self.lane.name, error)
                self.lane.kill(f"refused a step ({error.code})")
                await self._recover(await self.lane.died())
        self._emit()

    # ------------------------------------------------------------------- leaving and arriving

    @property
    def seats_free(self) -> int:
        """Seats nobody computes on or is expected on."""
        seated = sum([not turn.paused for turn in self.running.values()])
        return self.config.entries_max - self.expected - seated

    async def freeze(self, session: Session) -> Frozen | None:
        """Take the session out of the plan at a token boundary; None if it is closed meanwhile.

        Everything it has computed was given to its reader. While it is frozen its table belongs
        to the caller, except that pages sealed meanwhile still swap.
        """
        if self._flight is None or not self._flight.holds(session):
            return self._freeze(session)
        boundary: asyncio.Future[Frozen | None] = asyncio.get_running_loop().create_future()
        self._freezes.append((session, boundary))
        return await boundary

    def thaw(self, session: Session, frozen: Frozen) -> None:
        """The session goes on here, with the seat and the deadline it had."""
        session.on(Event.THAW)
        self.pages.enter(session)
        turn, key = frozen.turn, session.key
        self.pages.lend(session)
        if turn is not None:
            session.on(Event.START)
            self.waiting[key] = turn
            self._forget_row(turn)
            if turn.generation.started_ms is not None:
                turn.generation.lane = self.lane.name
            if frozen.seated and (turn.paused or self.seats_free > 0):
                self._seat(key)
            if turn.generation.cancelled or turn.generation.finished:
                self.cancel(turn)
        self._look_at(session)  # nobody did while it moved
        self.wake()

    def first_commit(self, session: Session) -> asyncio.Future[float]:
        """When the first step here that computes the session is committed, in ms.

        Cancelled if there will be none: its turn ended, or it left again.
        """
        return self._arrivals.setdefault(session.key, asyncio.get_running_loop().create_future())

    def forget_arrival(self, session: Session) -> None:
        """There is no `first_commit` to wait for any more."""
        if (arrival := self._arrivals.pop(session.key, None)) is not None:
            arrival.cancel()

    def _freeze(self, session: Session) -> Frozen | None:
        self._emit()  # what it has computed goes out before anybody computes more
        self._look_at(session)
        key, turn, seated = session.key, None, False
        if session.state is State.RUNNING:
            turn, seated = self.running.pop(key), True
            self.expected += 1  # it may have to come back
        elif session.state is State.WAITING:
            turn = self.waiting.pop(key)
            self._waiting_rows = None
        elif session.state is not State.IDLE:
            return None
        session.on(Event.FREEZE)
        self.forget_arrival(session)
        self.pages.recall(session)
        last_ms = self.now_ms() if turn is None else turn.served_ms
        return Frozen(turn, seated, last_ms)

    def _freeze_due(self) -> None:
        """Between two steps: sessions that computed in the last one may leave now."""
        freezes, self._freezes = self._freezes, []
        for session, boundary in freezes:
            if not boundary.done():  # else the caller gave up
                boundary.set_result(self._freeze(session))

    async def _recover(self, death: LaneDied) -> None:
        """Sessions fall back to what is sealed, and a new worker goes on with them."""
        suspects = self._on_death(death)
        self._freeze_due()
        # A page that cannot be read ends the worker too, and would end the next one as well.
        await self.pages.recheck(suspects)
        await self._owner.revive(self)

    async def _step(self) -> None:
        began_ms = self.now_ms()
        self._drain()
        if self.trials and self.lane.alive:
            await self._try_page()
        if not self.lane.alive:
            raise await self.lane.died()
        plan = NO_PLAN if self.drained else scheduler.plan(self._view(), self.now_ms())
        flight = self._prepare(plan)
        if flight is None or not flight.parts:
            self._check_stall()
        else:
            self._stalled_ms = None
        if flight is None:
            self._emit()
            await self._sleep()
            return
        for turn, _, _ in flight.parts:
            if turn.session.suspect:
                await self._owner.touching(turn.session)
        self._flight = flight
        deadline_s = max(STEP_DEADLINE_MIN_S, STEP_DEADLINE_FACTOR * flight.predicted_ms / 1000)
        reply = self.lane.post(flight.step, flight.payload, deadline_s=deadline_s)
        self._emit()
        done = await reply
        check_answer(flight, done)
        self._flight = None
        self._commit(flight, done)
        if flight.parts:
            lost_ms = self.now_ms() - began_ms - done.elapsed_us / 1000
            self.overhead_ms += OVERHEAD_GAIN * (max(0.0, lost_ms) - self.overhead_ms)

    async def _try_page(self) -> None:
        if not self.trials.is_due(idle=not (self.running or self.waiting)):
            return
        frame = self.trials.frame(self.cost.cost)
        if frame is not None:
            self.trials.answered(await self.lane.run(*frame, deadline_s=STEP_DEADLINE_MIN_S))
        self._drain()  # a verdict may have come meanwhile
        self.wake()

    async def _sleep(self) -> None:
        """Wait for news; not for long while somebody could compute but the plan said not yet."""
        turns = (*self.running.values(), *self.waiting.values())
        if all(turn.paused for turn in turns):
            await self._wake_event.wait()
        elif not self._wake_event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAN_S):
                    await self._wake_event.wait()

    def _check_stall(self) -> None:
        """Running turns find no place, and no seal on its first flight returns one: one gives way.

        The store may have no room for the full pages in the arena (a full disk, a tiny budget),
        which the plan cannot see. A turn that is alone and still finds none can never go on.
        """
        able = [t for t in self.running.values() if not (t.paused or t.session.orphans)]
        if not able or self.pages.is_sealing:
            self._stalled_ms = None
            return
        now_ms = self.now_ms()
        since_ms = self._stalled_ms = now_ms if self._stalled_ms is None else self._stalled_ms
        stalled_s = (now_ms - since_ms) / 1000
        if len(self.running) > 1 and stalled_s > STALL_S:
            paused = [turn for turn in self.running.values() if turn.paused]
            last = max(paused or able, key=lambda turn: (turn.rank, turn.deadline_ms))
            self._stalled_ms = None
            self._preempt(last.session.key)
        elif len(self.running) == 1 and stalled_s > STALL_ALONE_S:
            self._stalled_ms = None
            self._leave(able[0])
            self._owner.turn_failed(able[0], refusals.no_room(able[0]))

    def _drain(self) -> None:
        """What happened outside since the last step."""
        self._wake_event.clear()
        self._freeze_due()
        cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._emit()  # what they computed comes before their end
        for turn in cancelled:
            if self._holds(turn):
                self._leave(turn)
                self._owner.turn_ended(turn, "cancelled")
        if self.is_rechecking:
            self._recheck()
        self.pages.poll()
        self.pages.start_seals()

    def _recheck(self) -> None:
        self.is_rechecking = False
        for key in list(self.running) if self.drained else ():
            self._preempt(key)
        for session in list(self.sessions.values()):
            self._look_at(session)

    def _look_at(self, session: Session) -> None:
        """Its pages that were condemned go, and its open rows if they may be wrong."""
        if self.pages.fall_back(session, only_sealed=bool(self.drained)):
            self.session_cut(session)

    def _holds(self, turn: Turn) -> bool:
        return turn in (self.running.get(turn.session.key), self.waiting.get(turn.session.key))

    def _leave(self, turn: Turn) -> None:
        """The turn is over: its session is idle and lends its places."""
        key = turn.session.key
        if self.waiting.pop(key, None) is not None:
            self._waiting_rows = None
        self.running.pop(key, None)
        turn.session.on(Event.FINISH)
        self.forget_arrival(turn.session)
        turn.session.suspect = False
        self.pages.lend(turn.session)

    def _forget_row(self, turn: Turn) -> None:
        turn.cached_row = None
        self._waiting_rows = None

    def _view(self) -> scheduler.LaneView:
        running = tuple([turn.row(running=True) for turn in self.running.values()])
        held = self._shared.count(self.running, self.waiting)
        if self._shared.changed or self._waiting_rows is None:
            loose = self._shared.loose
            self._waiting_rows = tuple(
                t.row(running=False, loose=loose(t.session)) for t in self.waiting.values()
            )
        config = self.config
        return scheduler.LaneView(
            tokens_max=config.tokens_per_step,
            entries_max=max(1, config.entries_max - self.expected),
            chunk_tokens_max=config.chunk_tokens_max,
            step_ms_max=config.step_ms_max,
            places_free=self.pages.places_free,
            pages_free=max(0, self._pages_budget - held),
            pages_budget=self._pages_budget,
            cost=self.cost.cost,
            running=running,
            waiting=self._waiting_rows,
            policy=self._policy,
        )

    # --------------------------------------------------------------------------- plan -> frame

    def _prepare(self, plan: scheduler.StepPlan) -> Flight | None:
        """Obey the plan; None when there is nothing to send."""
        for key in plan.preempt:
            self._preempt(key)
        for key in plan.shed:
            turn = self.waiting[key]
            self._leave(turn)
            self._owner.turn_failed(turn, refusals.too_large(turn, self._pages_budget))
        for key in plan.admit:
            self._admit(key)
        codes, tokens, history = array("Q"), array("i"), array("i")
        entries: list[wire.Entry] = []
        parts: list[Part] = []
        fills: list[tuple[Turn, int, ArenaPlace]] = []
        for key, planned in plan.batch:
            turn = self.running[key]
            n = self._room(turn, planned)
            if n < 1:
                continue
            session = turn.session
            start = session.frontier
            end = start + n
            wants = end == len(session.tokens)
            if start < session.computed:
                self.recomputed += min(end, session.computed) - start
            if end > session.computed:
                session.computed = end
            n_pages = -(-end // PAGE_TOKENS)
            codes.extend(
                session.codes if n_pages == len(session.codes) else session.codes[:n_pages]
            )
            if n == 1:
                tokens.append(session.tokens[start])
            else:
                tokens.extend(session.tokens[start:end])
            spec = None
            if wants:
                spec = turn.spec_now()
                if spec.history_len:
                    history.extend(session.tokens[-spec.history_len :])
            entries.append(wire.Entry(key, session.epoch, start, n, n_pages, spec))
            parts.append(Part(turn, n, wants))
            if start // PAGE_TOKENS != end // PAGE_TOKENS:
                fills += [(turn, i, place) for _, i, place in self.pages.fills(session, n)]
        if not entries and not self.pages.has_chores:
            return None
        chores, verify = self.pages.chores()
        digest = tuple([wire.Digest(place.place, PAGE_TOKENS) for _, _, place in fills])
        step = wire.Step(
            tuple(entries),
            chores.poison,
            chores.reserve,
            digest + chores.digest,
            tuple([self.pages.verify_message(seal) for seal in verify]),
            chores.retitle,
            chores.adopt,
            chores.touch,
        )
        payload = b"".join(
            (codes.tobytes(), tokens.tobytes(), history.tobytes(), chores.adopt_tokens)
        )
        return Flight(step, payload, parts, fills, verify, chores, plan.predicted_ms)

    def _preempt(self, key: int) -> None:
        turn = self.running.pop(key)
        turn.session.on(Event.PREEMPT)
        turn.deadline_ms = self.now_ms() + turn.horizon_ms  # it joins the queue anew
        self.waiting[key] = turn
        self._forget_row(turn)
        self.pages.lend(turn.session)
        sla_class = turn.generation.request.sla.sla_class.value
        self._owner.metrics.preemptions_total.labels(sla_class).inc()

    def _seat(self, key: int) -> Turn:
        turn = self.waiting.pop(key)
        self._waiting_rows = None
        turn.session.on(Event.ADMIT)
        self.running[key] = turn
        turn.cached_row = None
        self.pages.recall(turn.session)
        self.pages.unpark(turn.session)
        return turn

    def _admit(self, key: int) -> None:
        turn = self._seat(key)
        turn.admitted_ms = self.now_ms()
        generation = turn.generation
        if generation.started_ms is None:
            turn.needs_match = True  # pages may have been published while it waited
        if turn.needs_match:
            self._match(turn)
        if generation.started_ms is None:
            generation.started_ms = turn.admitted_ms
            generation.lane = self.lane.name

    def _report(self, turn: Turn) -> None:
        """It is about to compute for the first time: what it reuses is known."""
        turn.reported = True
        session, generation = turn.session, turn.generation
        generation.cached_tokens = session.frontier
        if session.frontier:
            self._owner.metrics.prefix_hit_tokens_total.inc(session.frontier)
        self._owner.turn_admitted(turn)

    def _match(self, turn: Turn) -> None:
        """Take what the store has, unless it must be read from disk first."""
        turn.needs_match = False
        pending = self.pages.extend(turn.session, turn.salt, turn.priority, _never)
        if pending is not None:
            self.pages.loaded(turn.session, [False])

    def _room(self, turn: Turn, planned: int) -> int:
        """Tokens of this entry that have a place; the plan counted places, but not exactly."""
        session = turn.session
        if session.orphans:
            return 0  # this very frame fetches its rows
        if turn.needs_match:
            self._match(turn)
        if not turn.reported:
            self._report(turn)
        n = min(planned, len(session.tokens) - session.frontier)
        end = session.frontier + n
        if end > len(session.codes) * PAGE_TOKENS and not self.pages.ensure(session, end):
            n = len(session.codes) * PAGE_TOKENS - session.frontier
        return n

    # -------------------------------------------------------------------------- answer -> state

    def _commit(self, flight: Flight, done: wire.StepDone) -> None:
        """The worker's answer becomes state: frontiers, tokens, seals."""
        now_ms = self.now_ms()
        poisoned = {flight.parts[i].turn for i in done.poisoned}
        rows = iter(done.rows)
        computed: list[tuple[int, int]] = []
        for turn, n, wants in flight.parts:
            session = turn.session
            computed.append((session.frontier, n))
            if turn in poisoned:
                continue
            session.advance(n, self.lane.name)
            turn.served_ms = now_ms
            if session.key in self._arrivals:
                self._arrivals.pop(session.key).set_result(now_ms)
            if session.suspect and session.frontier >= turn.suspect_until:
                session.suspect, session.alone_deaths = False, 0
                self._owner.trusted(session)
            if wants:
                self._add_token(turn, next(rows), now_ms)
        n_fills = len(flight.fills)
        for (turn, index, place), digest in zip(flight.fills, done.digests[:n_fills], strict=True):
            if turn not in poisoned and place in turn.session.places:
                self.pages.filled(turn.session, index, place, digest)
        self.pages.answered(flight.chores, done.digests[n_fills:], done.adopted)
        for seal, good in zip(flight.verify, done.verified, strict=True):
            session = seal.session
            self.pages.verified(seal, good)
            if session is not None and session.key in self.waiting:
                self._forget_row(self.waiting[session.key])  # it lends a place less
        for turn in poisoned:
            self._poison(turn)
        self.steps += 1
        self._observed = (flight, done, computed)
        if computed:
            self._owner.tokens_committed()

    def _add_token(self, turn: Turn, row: wire.Row, now_ms: float) -> None:
        """One sampled token: to the timeline, to the reader, and is it the last?"""
        session, generation = turn.session, turn.generation
        session.tokens.append(row.token)
        generation.completion_tokens += 1
        self.generated += 1
        if generation.first_token_ms is None:
            generation.first_token_ms = now_ms
        generation.last_token_ms = now_ms
        finish, row_seen = "", row
        if not generation.request.ignore_eos and self._owner.is_end(row.token):
            finish, row_seen = "stop", None
        elif generation.completion_tokens >= generation.request.tokens_max:
            finish = "length"
        if turn.stop_early and row_seen is not None:
            if self._emit_token(turn, row_seen):
                finish = "stop"
            row_seen = None
        if row_seen is not None or finish:
            self._emissions.append(Emission(turn, row_seen, finish))
        if finish:
            self._leave(turn)
        elif generation.full:
            turn.paused = True
            generation.paused_since_ms = now_ms

    def _poison(self, turn: Turn) -> None:
        """NaN or Inf in a row: the turn fails, and no page that it computed is published (F45)."""
        self._owner.metrics.numeric_faults_total.inc()
        session = turn.session
        self.pages.withdraw(session, turn.generation.cached_tokens)
        if self._holds(turn):
            self._leave(turn)
        self._owner.turn_failed(turn, refusals.numeric_fault(turn))

    def _observe(self) -> None:
        """Learn from the last step; like text, this is done while the next one computes."""
        if self._observed is None:
            return
        (flight, done, computed), self._observed = self._observed, None
        if computed:
            self.step_ms = done.elapsed_us / 1000.0
            self.tokens += sum([n for _, n in computed])
            work = work_of(computed)
            if work.prefill_tokens or self.steps < OBSERVE_ALL or not self.steps % OBSERVE_EVERY:
                self.cost.observe(work, self.step_ms)
            self._step_seconds.observe(done.elapsed_us / 1e6)
            self.predicted_ms += flight.predicted_ms

    # ------------------------------------------------------------------------------- readers

    def _emit(self) -> None:
        """Text and events of the last step, while the worker computes the next."""
        self._observe()
        emissions, self._emissions = self._emissions, []
        for turn, row, finish in emissions:
            if row is not None and self._emit_token(turn, row) and not finish:
                raise AssertionError("a stop string was found too late")
            if finish:
                self._owner.turn_ended(turn, finish)

    def _emit_token(self, turn: Turn, row: wire.Row) -> bool:
        logprob, top = None, ()
        if turn.spec.logprobs >= 0:
            piece = self._owner.piece
            logprob = TokenLogprob(row.token, piece(row.token), row.logprob)
            top = tuple([TokenLogprob(t, piece(t), value) for t, value in row.top])
        return turn.generation.add_token(row.token, logprob, top)

    # --------------------------------------------------------------------------------- death

    def _on_death(self, death: LaneDied) -> list[Session]:
        """The worker is gone: open rows wait for the next one, the guilty are marked.

        Returns the suspects.
        """
        flight, self._flight = self._flight, None
        self._emit()
        self.trials.died()
        self.pages.lane_died(None if flight is None else flight.chores)
        if flight is not None:
            self.pages.unverified(flight.verify)
        for turn in (*self.running.values(), *self.waiting.values()):
            turn.needs_match = True
            turn.cached_row = None
        self._waiting_rows = None
        self._owner.metrics.worker_restarts_total.labels(self.lane.name).inc()
        if flight is None or not death.blames_step:
            return []
        for adoption in flight.chores.adoptions:  # what it copied may be the cause
            if self.pages.owns(adoption.session):
                self.pages.forsake(adoption.session)
        alone = len(flight.parts) == 1
        for turn, n, _ in flight.parts:
            session = turn.session
            session.suspect = True
            turn.suspect_until = max(turn.suspect_until, len(session.tokens), session.frontier + n)
            session.alone_deaths += alone
            if session.alone_deaths >= ALONE_DEATHS_MAX and self._holds(turn):
                self._leave(turn)
                self._owner.turn_failed(turn, refusals.quarantined(turn))
        return [turn.session for turn, _, _ in flight.parts]


def _never(tokens: int, cold_tokens: int, cold_bytes: int) -> bool:
    """Whether to read pages from disk between two steps."""
    return False
