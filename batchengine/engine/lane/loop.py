"""The step loop of one lane: drain, plan, prepare, post, commit; and recovery of a dead worker.

Owns what happens between two steps, and in which order. The scheduler decides the order of turns,
the worker computes. Tables of sessions change only between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from batchengine import errors
from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError
from batchengine.engine.lane.recompute import PageRecompute, RecomputeQueue
from batchengine.engine.lane.seats import Seats
from batchengine.engine.lane.stage_queue import StageQueue
from batchengine.engine.lane.steps.emission import Emissions
from batchengine.engine.lane.steps.inflight import InFlightSteps
from batchengine.engine.lane.steps.meter import StepMeter
from batchengine.engine.lane.steps.writer import StepWriter
from batchengine.engine.lane.supervisor import Outage, WorkerSupervisor
from batchengine.engine.lane.suspects import Suspects
from batchengine.engine.lane.transfer import Frozen, Transfers
from batchengine.engine.turns.journal import Journal
from batchengine.engine.turns.turn import Turn
from batchengine.kv import Disputes, LaneKv
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.metrics import Metrics
from batchengine.policy import scheduler
from batchengine.policy.cost import CostModel, StepCost
from batchengine.session import Event, Session, State
from batchengine.session_kv import page_start
from batchengine.text.frontend import TextFrontend
from batchengine.wire import lane as wire
from kv_store.store import Store

log = logging.getLogger("batchengine.lane")

REPLAN_S = 0.005  # after an empty plan: slots return and deadlines pass without a wake-up
SAVED_POLL_S = 0.01
NO_PLAN = scheduler.StepPlan(())


async def states_saved(loop: LaneLoop) -> None:
    """Return once the recurrent states that the lane is saving are in files, or its worker died."""
    states, saving = loop.kv.states, loop.kv.states.saving
    while loop.lane.alive and not saving.isdisjoint(states.saving):
        loop.wake()
        await asyncio.sleep(SAVED_POLL_S)


class LaneLoop:
    """One lane of the engine: its turns, its pages, its worker."""

    def __init__(
        self,
        lane: Lane,
        store: Store,
        config: LaneConfig,
        *,
        disputes: Disputes,
        text: TextFrontend,
        journal: Journal,
        suspects: Suspects,
        supervisor: WorkerSupervisor,
        metrics: Metrics,
        cost: StepCost,
        weights: Mapping[str, float],
    ) -> None:
        """`cost` is what a step is assumed to cost until steps were measured; `weights` are
        those of the tenants' shares."""
        self._event_loop = asyncio.get_running_loop()
        self.lane = lane
        self.kv = LaneKv(store, disputes, self._wake_threadsafe, journal.note, config.kind)
        self.config = config
        self.cost = CostModel(cost)
        self.meter = StepMeter(self.cost, metrics.step_seconds.labels(lane.name))
        self.seats = Seats(self.kv, config, store.pages.allocator.slots_max, metrics, weights)
        self.running, self.waiting = self.seats.running, self.seats.waiting
        self.sessions = self.kv.slots.members  # every session with pages on this lane
        self.stopping = False
        self.assigned = 0  # turns that were given to this lane and have not ended
        self.recomputes = RecomputeQueue(self.kv, config)
        self.stages = StageQueue(config)
        self.draining = ""  # why the lane computes no more; or ""
        self.outage = Outage(lane, config, self.kv, self.cost, supervisor)
        self.is_rechecking = False
        self._suspects = suspects
        self._metrics = metrics
        self._emissions = Emissions(text.piece)
        self._transfers = Transfers(lane.name, self.kv, self.seats)
        self._steps = StepWriter(
            config,
            self.kv,
            self.seats,
            self._emissions,
            self.meter,
            end_tokens=text.tokenizer.eog,
            suspects=suspects,
            journal=journal,
            metrics=metrics,
        )
        self._wake_event = lane.signal
        self._is_asked = self._paused = False  # for a moment between two steps; by an audit
        self._cancelled: list[Turn] = []
        self._changes: list[Callable[[], None]] = []
        self._in_flight = InFlightSteps(lane, config.steps_in_flight, self.meter.add_overhead)

    def __repr__(self) -> str:
        return f"<LaneLoop {self.lane!r} {self.seats!r}>"

    @property
    def up(self) -> bool:
        """Whether the lane computes: its worker has loaded the model and has its arena."""
        return self.lane.alive and self.kv.slots.is_attached and not self.draining

    @property
    def is_stuck(self) -> bool:
        """Whether a step outlived its deadline: this process, not the worker, is at fault."""
        return self._in_flight.is_stuck(self.seats.now_ms())

    @property
    def context_max(self) -> int:
        """Tokens whose KV the store can hold for one session of this lane."""
        return page_start(self.seats.pages_budget)

    # ----------------------------------------------------------------- called by the engine

    def join(self, turn: Turn) -> None:
        """Queue a turn; its session is IDLE and this lane is its home."""
        self.seats.wait(turn)
        self.kv.slots.enter(turn.session)
        self.kv.slots.make_reclaimable(turn.session)
        self.wake()

    def cancel(self, turn: Turn) -> None:
        """End a turn within one step: its stream is not read any more."""
        self._cancelled.append(turn)
        self.wake()

    def resume(self, turn: Turn) -> None:
        """Continue a turn whose stream has room again, unless it is full once more, or away."""
        turn.paused = turn.is_away or turn.generation.paused_since_ms is not None
        self.seats.forget_row(turn)
        self.wake()

    def mask_known(self, turn: Turn) -> None:
        """Look again at a turn that may have waited for a mask."""
        self.seats.forget_row(turn)
        if turn.is_late or (turn.matcher is not None and turn.matcher.is_slow):
            self.wake()

    def close_session(self, session: Session) -> None:
        """Close an idle session: its slots are freed, its pages unpinned."""
        self.kv.slots.protect(session)
        self.kv.slots.clear(session)
        self.sessions.pop(session.key, None)
        session.on(Event.CLOSE)
        if self.kv.has_chores:
            self._wake_event.set()

    def drain(self, why: str) -> None:
        """Stop computing: turns keep their sealed pages only, and wait to be evacuated."""
        self.draining = why
        self.kv.sealing.publishes = False
        self.recheck()

    def recheck(self) -> None:
        """Have every session drop its invalid and lost pages before the next step."""
        self.is_rechecking = True
        self.wake()

    def between_steps(self, change: Callable[[], None]) -> None:
        """Have `change`, which may change tables of sessions, called before the next step."""
        self._changes.append(change)
        self.wake()

    def take_tokens(self, turn: Turn, first: int, rows: Sequence[wire.SampledRow]) -> None:
        """Give a turn tokens of another daemon: see `StepWriter.take`."""
        in_step = self._in_flight.holds(turn.session)
        taken = self._steps.take(turn, first, rows, in_step=in_step)
        if taken < len(rows):
            self._changes.append(lambda: self.take_tokens(turn, first + taken, rows[taken:]))
        self._emissions.flush()
        self.wake()

    def ask_recompute(self, recompute: PageRecompute) -> None:
        """Compute one page for its digest; await `recompute.digest`, then close it."""
        self.recomputes.ask(recompute)
        self.wake()

    def stop(self) -> None:
        """Have `run` return after the steps in flight; a backoff before a restart ends at once."""
        self.stopping = True
        self.wake()

    def wake(self) -> None:
        """Have the loop look again for something to do, once no step is in flight."""
        self._is_asked = True
        self._wake_event.set()

    def _wake_threadsafe(self) -> None:
        """Have a loop that waits look at its pages; one that sends steps ahead does in any case."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._event_loop.call_soon_threadsafe(self._wake_event.set)

    def session_cut(self, session: Session) -> None:
        """Have the turn of a session that lost or regained KV match its prompt with the store."""
        if (turn := self.seats.turn_of(session)) is not None:
            turn.needs_match = True
            self.seats.forget_row(turn)

    def park(self, session: Session) -> asyncio.Future[None] | None:
        """Have the open tail and the recurrent state of an idle session stored; None: there is
        nothing to store.

        The future resolves once they are stored, or are no longer to be.
        """
        if not self.kv.park(session):
            return None
        return self._transfers.when(
            lambda: not self.kv.is_parking(session) or session.state is not State.IDLE
        )

    # ---------------------------------------------------------------------- called by the audit

    @property
    def is_paused(self) -> bool:
        """Whether the lane runs recomputes only: an audit is under way, or about to begin."""
        return self._paused or bool(self.kv.disputes.disputed)

    async def pause(self) -> None:
        """Plan nothing until `unpause`; returns once no step is in flight, which is at their
        deadlines at the latest: then the worker is killed."""
        self._paused = True
        await self._transfers.when(lambda: not self._in_flight)

    def unpause(self) -> None:
        self._paused = False
        self.wake()

    def drop_open(self) -> None:
        """Drop every row that is not sealed, and every recurrent state. Call while the lane is
        paused."""
        self.kv.states.drop_unproven()
        for session in self.kv.invalidation.drop_open():
            self.session_cut(session)

    # ------------------------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Run steps until `stopping`; a worker that died is replaced and its sessions go on."""
        while not self.stopping:
            try:
                await self._step()
            except LaneDied as death:
                await self._recover(death)
            except BatchEngineError as error:
                log.error("lane %s: %s", self.lane.name, error)
                blames_step = error.code != errors.GPU_FAILED.code
                self.lane.kill(f"refused a step ({error.code})", blames_step=blames_step)
                await self._recover(await self.lane.died(), str(error))
        self._emit()

    # ------------------------------------------------------------------- leaving and arriving

    async def freeze(self, session: Session) -> Frozen | None:
        """Take the session out of the plan at a token boundary; None if it is closed meanwhile.

        Its tokens have been emitted by then. The caller owns the table of a frozen session, except
        that completed seals still replace open pages.
        """
        if not self._in_flight.holds(session):
            return self._freeze(session)
        return await self._transfers.at_boundary(session)

    def thaw(self, session: Session, frozen: Frozen) -> None:
        """Continue the session on this lane, with the seat and the deadline it had."""
        is_audited = self._transfers.thaw(session, frozen)
        turn = frozen.turn
        if turn is not None and turn.generation.is_over:
            self.cancel(turn)
        if is_audited:
            self.session_cut(session)
        self._look_at(session)  # `_recheck` leaves out sessions that migrate
        self.wake()

    def _freeze(self, session: Session) -> Frozen | None:
        self._emit()  # its tokens precede those of the other lane
        self._look_at_changed()
        self._look_at(session)
        return self._transfers.freeze(session)

    def _freeze_due(self) -> None:
        """Freeze the sessions that wait for the end of a step."""
        for session, frozen in self._transfers.take_due():
            frozen.set_result(self._freeze(session))

    async def _recover(self, death: LaneDied, why: str = "") -> None:
        """Return sessions to their sealed pages, recheck those of suspects, start a new worker."""
        self.outage.why = why or (str(death) if self.lane.incarnation else "it has not started yet")
        suspects = self._on_death(death)
        self._freeze_due()
        # A page that cannot be read kills the worker too, and would kill the next one as well.
        await self.kv.invalidation.recheck(suspects)
        await self.outage.end(self._stops_within)

    async def _stops_within(self, seconds: float) -> bool:
        """Wait for `stop`, for so long at most; return whether the loop is stopping."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.stopping:
                    self._wake_event.clear()  # the next `_step` looks at everything
                    await self._wake_event.wait()
        return self.stopping

    async def _step(self) -> None:
        began_ms = self.seats.now_ms()
        self._drain()
        if self.lane.alive:
            await self._run_between()
        if not self.lane.alive:
            raise await self.lane.died()
        if self.is_paused:
            self.seats.end_stall()
            self._emit()
            await self._wake_event.wait()
            return
        plan = NO_PLAN
        if not self.draining:
            plan = scheduler.plan(self.seats.view(self.cost), self.seats.now_ms())
        in_flight = self._steps.prepare(plan)
        if self.draining or (in_flight is not None and in_flight.parts):
            self.seats.end_stall()
        else:
            self.seats.check_stall()
        if in_flight is None:
            self._emit()
            await self._sleep()
            return
        self._in_flight.add(in_flight, began_ms)
        await self._suspects.mark_all(in_flight.parts)
        self._in_flight.send()
        self._in_flight.send_masks()
        while self._in_flight:
            self._in_flight.fill(self._view_ahead, self.kv, self.seats.now_ms)
            self._emit()
            await self._commit_oldest()

    def _view_ahead(self) -> scheduler.LaneView | None:
        """The view for a step after those in flight; None if something comes between."""
        if self._in_flight.are_ahead:
            self.kv.poll()
            self._look_at_changed()
        due = self._is_asked, self.is_paused, self._transfers.is_due, self.recomputes, self.stages
        is_free = self.lane.alive and not (any(due) or self.kv.awaits_boundary)
        is_free = is_free and not self._steps.may_draft_after(self._in_flight.last)
        return self.seats.view(self.cost) if is_free else None

    async def _commit_oldest(self) -> None:
        in_flight, done = await self._in_flight.answer()
        self.stages.stepped(done.elapsed_us / 1000)
        if self._steps.commit(in_flight, done):
            self.recheck()
        if self.is_rechecking:
            self._steps.forget_samples()
        self._in_flight.committed(in_flight, done, self.seats.now_ms())
        if self._in_flight:
            self._in_flight.send_masks()

    async def _run_between(self) -> None:
        """Compute what belongs to no turn: recomputes, stages of pipelines."""
        idle, cost, seats = not self.seats.turns, self.cost.cost, self.seats
        ran = await self.recomputes.run(self.lane, cost, idle=idle)
        ran |= not self.is_paused and await self.stages.run(self.lane, cost, seats, idle=idle)
        if ran:
            self._drain()  # what the audit or a peer asked for meanwhile
            self.wake()

    async def _sleep(self) -> None:
        """Wait for `wake`, for REPLAN_S at most while a turn that is not paused is on the lane."""
        if all(turn.paused for turn in self.seats.turns):
            await self._wake_event.wait()
        elif not self._wake_event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAN_S):
                    await self._wake_event.wait()

    def _drain(self) -> None:
        """Apply what was requested since the last step, and the results of seals."""
        self._wake_event.clear()
        self._is_asked = False
        self._freeze_due()
        changes, self._changes = self._changes, []
        for change in changes:
            change()
        cancelled, self._cancelled = self._cancelled, []
        if cancelled:
            self._emit()  # their tokens precede their end
        for turn in cancelled:
            self.seats.cancel(turn)
        if self.is_rechecking:
            self._recheck()
        self.kv.poll()
        self.kv.sealing.start_seals()
        self._look_at_changed()
        self._transfers.settle_waits()

    def _recheck(self) -> None:
        self.is_rechecking = False
        for key in list(self.running) if self.draining else ():
            self.seats.preempt(key)
        for session in list(self.sessions.values()):
            self._look_at(session)

    def _look_at_changed(self) -> None:
        for session in self.kv.slots.take_changed():
            self.session_cut(session)

    def _look_at(self, session: Session) -> None:
        """Drop the session's invalid pages, and its open rows if the lane is draining."""
        if self.kv.invalidation.fall_back(session, only_sealed=bool(self.draining)):
            self.session_cut(session)

    def _emit(self) -> None:
        """Emit and count the last step, while the worker computes the next."""
        self.meter.learn()
        self._emissions.flush()

    # ---------------------------------------------------------------------------- worker exit

    def _on_death(self, death: LaneDied) -> list[Session]:
        """Turn the dead worker's open rows into pending rows; return the sessions of its last
        step, now suspects, if that step may be the cause."""
        in_flight, is_sent, verified = self._in_flight.died()
        self._steps.forget_samples()
        self._emit()
        self.recomputes.died()
        self.stages.died()
        self.kv.lane_died(None if in_flight is None else in_flight.chores)
        self.kv.sealing.unverified(verified)
        self.seats.match_all_again()
        self._transfers.settle_waits()
        self._metrics.worker_restarts_total.labels(self.lane.name).inc()
        if in_flight is None or not is_sent or not death.blames_step:
            return []
        self.kv.drop_imports(in_flight.chores)  # these rows may be the cause
        parts = [part for part in in_flight.parts if self.seats.holds(part.turn)]
        for turn in self._suspects.blame(parts, alone=len(in_flight.parts) == 1):
            self.seats.fail(turn, errors.WORKER_KILLER(request_id=turn.generation.request_id))
        return [part.turn.session for part in parts]
