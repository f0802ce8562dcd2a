"""Builds a frame from a plan, and applies the worker's answer to turns, sessions and pages.

Owns their changes at both ends of a step. Runs between two steps and awaits nothing; the loop sends
the frame.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from batchengine import errors
from batchengine.config import LaneConfig
from batchengine.engine.lane.seats import Seats
from batchengine.engine.lane.steps.drafting import Drafting
from batchengine.engine.lane.steps.emission import Emissions
from batchengine.engine.lane.steps.inflight import InFlightStep, StepBuilder, StepEntry
from batchengine.engine.lane.steps.meter import StepMeter
from batchengine.engine.lane.suspects import Suspects
from batchengine.engine.turns.journal import Journal
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn, TurnEnd
from batchengine.kv import LaneKv
from batchengine.metrics import Metrics
from batchengine.policy import scheduler
from batchengine.policy.cost import entry_ms
from batchengine.policy.drafts import NO_DRAFT, Draft
from batchengine.session_kv import StateSlot, full_pages
from batchengine.wire import lane as wire

LAP_FACTOR = 4.0  # a visit to all holders in one layer may take this many times the whole step,
LAP_MS_MIN = 1000  # and this in any case: a peer that is busy is not lost


class StepWriter:
    """Prepares and commits the steps of one lane."""

    def __init__(
        self,
        config: LaneConfig,
        kv: LaneKv,
        seats: Seats,
        emissions: Emissions,
        meter: StepMeter,
        *,
        end_tokens: Collection[int],
        suspects: Suspects,
        journal: Journal,
        metrics: Metrics,
    ) -> None:
        """`end_tokens`: tokens that end a generation."""
        self._lane_name = config.name
        self._kv = kv
        self._seats = seats
        self._emissions = emissions
        self._meter = meter
        self._drafting = Drafting(config, meter.cost, end_tokens)
        self._end_tokens = end_tokens
        self._suspects = suspects
        self._journal = journal
        self._metrics = metrics
        self._next: dict[int, int] = {}  # session -> token at its frontier, by the last step

    # --------------------------------------------------------------------------- plan -> frame

    def prepare(self, plan: scheduler.StepPlan) -> InFlightStep | None:
        """Carry out the plan and build its step; None when there is nothing to send."""
        seats = self._seats
        for key in plan.preempt:
            seats.preempt(key)
        for key in plan.shed:
            seats.fail(seats.waiting[key], seats.too_large(seats.waiting[key]))
        for key in plan.admit:
            self._admit(key)
        for key in plan.aged:
            seats.tenants.aged(seats.running[key].session.tenant, seats.now_ms())
        builder = StepBuilder()
        planned = [(seats.running[key], n) for key, n in plan.batch]
        planned = [(turn, self._room(turn, n)) for turn, n in planned]
        planned = [(turn, n) for turn, n in planned if n > 0]
        drafts = self._drafting.choose(planned, self._meter.overhead_ms)
        for turn, n in planned:
            self._add(builder, turn, n, drafts.get(turn, NO_DRAFT))
        if not builder.entries and not self._kv.has_chores:
            return None
        drafts_ms = sum([self._draft_ms(turn, draft) for turn, draft in drafts.items()])
        lap_ms = int(max(LAP_MS_MIN, LAP_FACTOR * plan.predicted_ms))
        return builder.finish(self._kv, plan.predicted_ms + drafts_ms, lap_ms=lap_ms)

    def may_draft_after(self, step: InFlightStep) -> bool:
        """Whether the step after one in flight may have a draft, so that none is sent ahead."""
        return self._drafting.may_follow(step)

    def _add(self, builder: StepBuilder, turn: Turn, n_tokens: int, draft: Draft) -> None:
        """Add the next tokens of a turn to a step, if there is room for the state behind them."""
        session, states = turn.session, None
        if self._kv.states.is_used and (states := self._kv.states.begin(session)) is None:
            return
        end = session.frontier + n_tokens
        builder.add(turn, session.frontier, end, states=states, draft=draft)

    def _draft_ms(self, turn: Turn, draft: Draft) -> float:
        """What a draft behind the frontier of a turn adds to a step."""
        return len(draft.tokens) * self._meter.cost.draft_ms(turn.session.frontier)

    def _admit(self, key: int) -> None:
        turn = self._seats.seat(key)
        turn.admitted_ms = self._seats.now_ms()
        generation = turn.generation
        if generation.started_ms is None:
            turn.needs_match = True  # pages may have been published while it waited
        if turn.needs_match:
            self._match(turn)
        if generation.started_ms is None:
            generation.started_ms = turn.admitted_ms
            generation.lane = self._lane_name

    def _report(self, turn: Turn) -> None:
        """Report how much KV the turn reuses, before its first step is sent."""
        session = turn.session
        if session.frontier:
            self._metrics.prefix_hit_tokens_total.inc(session.frontier)
        turn.start(session.frontier, session.loss)
        session.loss = None

    def _match(self, turn: Turn) -> None:
        """Take pages from the store, except those that must be read from disk first."""
        turn.needs_match = False
        session = turn.session
        pending = self._kv.prefix.extend(
            session, session.salt, turn.priority, lambda _tokens, _cold, _bytes: False
        )
        if pending is not None:
            self._kv.prefix.loaded(session, [False])

    def _room(self, turn: Turn, planned: int) -> int:
        """Return how many of the `planned` tokens have a slot; the plan only estimated slots."""
        session = turn.session
        kv = session.kv
        if kv.invalid_from is not None and self._kv.invalidation.fall_back(
            session, only_sealed=False
        ):
            turn.needs_match = True
        if kv.pending or kv.cut_off:
            return 0  # its rows are still being imported, or a peer does not answer
        if turn.needs_match:
            self._match(turn)
        if session.frontier > turn.reusable:
            self._kv.slots.truncate(session, full_pages(int(turn.reusable)))
        if not self._kv.states.prepare(session):
            return 0  # its state is being loaded
        if not turn.reported:
            self._report(turn)
        while session.frontier >= kv.compute_until:
            if not self._kv.rejoin(session):
                return 0  # the pages before those that it has already are being sealed
            if kv.cut_off or not self._kv.states.prepare(session):
                return 0  # the state behind the pages that it has taken is another one
        n = min(planned, len(session.tokens) - session.frontier)
        n = min(n, kv.compute_until - session.frontier)
        end = self._kv.states.until(session, session.frontier, session.frontier + n)
        n = end - session.frontier
        if end > session.kv.reach() and not self._kv.slots.ensure(session, end):
            n = session.kv.reach() - session.frontier
        return n

    # -------------------------------------------------------------------------- answer -> state

    def commit(self, in_flight: InFlightStep, done: wire.StepDone) -> bool:
        """Apply the worker's answer: frontiers, tokens, seals.

        Entries that a peer did not serve have no rows and no token, and are computed again. So are
        entries of a step ahead whose turn is over, or does not go on as it was assumed, those whose
        mask was late, and those with a draft and a row that is not finite, without it.
        Returns whether pages became invalid, which other sessions of the lane may hold.
        """
        turns = [part.turn for part in in_flight.parts]
        void = self._void(in_flight, done)
        nonfinite = {turns[i] for i in done.nonfinite} - void
        unreachable = {turns[i] for i in done.unreachable} - void - nonfinite
        without_rows = nonfinite | unreachable | void
        self._commit_entries(in_flight, done, without_rows)
        self._commit_pages(in_flight, done, without_rows)
        for turn in nonfinite:
            self._nonfinite(turn)
        for turn in unreachable:
            if turn.session.kv.held:  # else they were lost, or came back, meanwhile
                self._seats.cut_off(turn)
        for turn in void:
            if self._kv.slots.owns(turn.session):
                self._kv.slots.trim(turn.session)
        self._meter.committed(in_flight, done, len(void))
        if in_flight.parts:
            self._journal.note()
        return bool(nonfinite)

    def _void(self, in_flight: InFlightStep, done: wire.StepDone) -> set[Turn]:
        """The turns of which nothing is committed."""
        parts, entries = in_flight.parts, in_flight.step.entries
        void = {
            part.turn
            for part, entry in zip(parts, entries, strict=True)
            if in_flight.is_ahead and not self._is_current(part.turn, entry)
        }
        for index in done.unmasked:
            parts[index].turn.is_late = True
            void.add(parts[index].turn)
        for index in done.nonfinite:
            if parts[index].draft.tokens:  # the row may be one of the draft's
                parts[index].turn.drafts.is_off = True
                void.add(parts[index].turn)
        return void

    def _commit_entries(
        self, in_flight: InFlightStep, done: wire.StepDone, without_rows: set[Turn]
    ) -> None:
        """Advance the sessions that have rows, and give them their tokens."""
        seats, now_ms = self._seats, self._seats.now_ms()
        rows: dict[int, list[wire.SampledRow]] = {}
        for row in done.rows:
            rows.setdefault(row.session, []).append(row)
        scores = {scored.session: scored for scored in done.scores}
        following: dict[int, int] = {}
        cost, scored = self._meter.cost.cost, self._meter.cost.scored_cost
        fixed_ms = (cost.fixed_ms + self._meter.overhead_ms) / max(1, len(in_flight.parts))
        for part, entry in zip(in_flight.parts, in_flight.step.entries, strict=True):
            turn, n, wants, state, draft = part
            session = turn.session
            if seats.tenants.several:
                ms = fixed_ms + entry_ms(scored if entry.scored else cost, entry.start, n)
                ms += self._draft_ms(turn, draft)
                seats.tenants.computed(turn.rank, session.tenant, ms)
            if turn in without_rows:
                if state is not None:
                    state.release()
                continue
            if entry.scored and turn.scores is not None:
                turn.scores.add(entry.start, scores[session.key])
            session.advance(n, self._lane_name)
            if state is not None and not wants:
                self._kv.states.computed(session, state)
            turn.served_ms = now_ms
            if session.key in seats.arrivals:
                seats.arrivals.pop(session.key).set_result(now_ms)
            if session.suspect and session.frontier >= turn.suspect_until:
                self._suspects.clear(session)
            if wants:
                self._add_samples(part, rows[session.key], now_ms)
                following[session.key] = rows[session.key][-1].token
            else:
                following[session.key] = session.tokens[session.frontier]
        self._next = following

    def _add_samples(self, part: StepEntry, rows: Sequence[wire.SampledRow], now_ms: float) -> None:
        """Take the tokens that a step has sampled for a session. Those behind the first one follow
        tokens of its draft that were right, whose rows have become the session's.

        What follows one that ends or pauses the turn is dropped.
        """
        turn, _, _, state, draft = part
        session, n_before = turn.session, len(turn.session.tokens)
        if draft.tokens:
            turn.drafts.odds.learn(draft.matched, len(draft.tokens), len(rows) - 1)
            self._meter.drafted += len(draft.tokens)
        self._add_rows(turn, rows, state, now_ms)
        if turn.matcher is not None and self._seats.holds(turn):
            turn.matcher.accept(session.tokens[n_before:])
            turn.is_late = False

    def _add_rows(
        self,
        turn: Turn,
        rows: Sequence[wire.SampledRow],
        state: StateSlot | None,
        now_ms: float,
    ) -> None:
        """Take the tokens of rows. `state` is the one behind the last row: if tokens are dropped,
        it is that of no timeline, and the session falls back to the one before the step."""
        session, left = turn.session, len(rows)
        for n, row in enumerate(rows):
            left -= 1
            if n:
                session.advance(1, self._lane_name)
                session.computed = max(session.computed, session.frontier)
                self._meter.accepted += 1
                self._meter.tokens += 1
            if state is not None and not left:
                self._kv.states.computed(session, state)
            self._meter.generated += 1
            if session.frontier < len(session.tokens):  # another daemon was faster
                if not self._compare(turn, session.frontier, row):
                    break
            else:
                self._add_token(turn, row, now_ms)
            if not self._seats.holds(turn) or turn.paused or session.to_compute != 1:
                break
        if state is not None and left:
            state.release()
            self._kv.states.fall_back(session)

    def _commit_pages(
        self, in_flight: InFlightStep, done: wire.StepDone, without_rows: set[Turn]
    ) -> None:
        """Apply the answer to pages: those that are full now, chores, and seals that were read."""
        n_fills = len(in_flight.fills)
        for (turn, index, slot), digest in zip(
            in_flight.fills, done.digests[:n_fills], strict=True
        ):
            if turn not in without_rows and slot in turn.session.kv.open:
                self._kv.sealing.filled(turn.session, index, slot, digest)
        self._kv.answered(in_flight.chores, done.digests[n_fills:], done.imported, done.states)
        for seal, good in zip(in_flight.verify, done.verified, strict=True):
            session = seal.session
            self._kv.sealing.verified(seal, good)
            if session is not None and session.key in self._seats.waiting:
                # one slot fewer is reclaimable
                self._seats.forget_row(self._seats.waiting[session.key])

    def forget_samples(self) -> None:
        """Have a step ahead, if one is in flight, change nothing: it is computed again."""
        self._next = {}

    def _is_current(self, turn: Turn, entry: wire.Entry) -> bool:
        """Whether the turn is where the entry of a step ahead assumed, and its first token, which
        the worker may have sampled, is the session's."""
        session = turn.session
        return (
            self._seats.running.get(entry.session) is turn
            and not turn.paused
            and session.epoch == entry.epoch
            and session.frontier == entry.start < len(session.tokens)
            and session.tokens[entry.start] == self._next.get(entry.session)
        )

    def take(
        self, turn: Turn, first: int, rows: Sequence[wire.SampledRow], *, in_step: bool
    ) -> int:
        """Append tokens from position `first` on that another daemon has computed, and compare
        those that are there. After a difference, or without `Turn.shared_with`, none are taken.

        Returns how many are done with. While a step computes the session (`in_step`), the others
        are those from the first one on that may end the turn.
        """
        session, now_ms = turn.session, self._seats.now_ms()
        self._seats.forget_row(turn)
        for n, row in enumerate(rows):
            position, end = first + n, len(session.tokens)
            if not (turn.shared_with and self._seats.holds(turn)):
                break
            if position < end:
                self._compare(turn, position, row)
            elif position > end or (in_step and self._may_end(turn, row.token)):
                return n
            else:
                self._add_token(turn, row, now_ms)
        return len(rows)

    def _compare(self, turn: Turn, position: int, row: wire.SampledRow) -> bool:
        """Compare a token that was computed by two daemons; returns whether it is the same."""
        if turn.session.tokens[position] == row.token:
            return True
        turn.shared_with, turn.differs = "", True
        return False

    def _may_end(self, turn: Turn, token: int) -> bool:
        """Whether the turn may end with this token, which is the next one."""
        generation = turn.generation
        return turn.stop_early or bool(
            self._finish(generation, token, generation.completion_tokens + 1)
        )

    def _finish(self, generation: Generation, token: int, n_tokens: int) -> str:
        """Why an answer ends with its token number `n_tokens`; "" = it goes on."""
        if generation.request.ends_at_end_token and token in self._end_tokens:
            return "stop"
        return "length" if n_tokens >= generation.request.tokens_max else ""

    def _add_token(self, turn: Turn, row: wire.SampledRow, now_ms: float) -> None:
        """Append a sampled token to the timeline, queue it for the reader, and end the turn after
        its last token."""
        session, generation = turn.session, turn.generation
        session.tokens.append(row.token)
        generation.completion_tokens += 1
        if generation.first_token_ms is None:
            generation.first_token_ms = now_ms
            self._emissions.show_prompt(turn)
        generation.last_token_ms = now_ms
        finish = self._finish(generation, row.token, generation.completion_tokens)
        row_seen = None if finish == "stop" and turn.scores is None else row
        if turn.stop_early and finish != "stop":
            if self._emissions.emit(turn, row):
                finish = "stop"
            row_seen = None
        if row_seen is not None or finish:
            self._emissions.add(turn, row_seen, finish)
        if finish:
            self._seats.leave(turn)
            return
        if generation.full:
            turn.paused = True
            generation.paused_since_ms = now_ms

    def _nonfinite(self, turn: Turn) -> None:
        """Fail a turn with NaN or Inf in a row; every page that it computed is invalid."""
        self._metrics.numeric_faults_total.inc()
        session = turn.session
        self._kv.invalidation.invalidate_turn(session, turn.generation.cached_tokens)
        if self._seats.holds(turn):
            self._seats.leave(turn)
        request_id = turn.generation.request_id
        turn.finish(TurnEnd(error=errors.NUMERIC_FAULT(request_id=request_id)))
