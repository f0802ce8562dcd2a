"""From a request to its lane: admission, the routing decision, its log, and who moves when.

Owns what the router is told (`RouteState`, kept cheap), the decision log, what was learned about
predictions and moves, and the policy of automatic promotion and demotion. Refuses to move
anything itself: a `Mover` does; and to order turns: the scheduler does.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

from batchengine import cost, router, scheduler
from batchengine.config import RouterConfig
from batchengine.core import PAGE_TOKENS, GenerationRequest, SlaClass
from batchengine.cost import LoadRow
from batchengine.engine import refusals, reports
from batchengine.engine.decisions import (
    DecisionLog,
    Moved,
    Outcome,
    Record,
    move_dict,
)
from batchengine.engine.generation import Generation
from batchengine.engine.loop import LaneLoop
from batchengine.engine.tables import Tables
from batchengine.engine.turn import Turn
from batchengine.session import Session, State, common_prefix

log = logging.getLogger("batchengine.engine")

REFRESH_MS = 20.0  # a lane of many sessions is looked at this often, and estimated in between
FEW_ROWS = 128  # a lane of fewer is looked at whenever something happened
DEMOTIONS_MAX = 4  # idle sessions that leave the fast lanes per second
ANSWER_GAIN = 0.05  # of the average share of tokens_max that answers really take
MOVE_GAIN = 0.2  # of the average cost of a hand-over
NO_TIME = -math.inf


class Mover(Protocol):
    """Moves a session between lanes; `handover.Handover` does."""

    def move(self, session: Session, to: LaneLoop, cause: str) -> Awaitable[Moved]: ...


Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class Note:
    """When things last happened to a session; milliseconds of the engine's clock."""

    __slots__ = ("moved_ms", "urgent_ms", "used_ms")

    def __init__(self, now_ms: float) -> None:
        self.moved_ms = NO_TIME
        self.urgent_ms = NO_TIME
        self.used_ms = now_ms


class _Seen:
    """A lane's state and what it was made from."""

    __slots__ = ("at_ms", "mark", "state")

    def __init__(self, state: router.LaneState, mark: tuple[object, ...], at_ms: float) -> None:
        self.state = state
        self.mark = mark
        self.at_ms = at_ms


class Dispatcher:
    """The engine's router. `mover` is set once lanes can hand sessions over."""

    def __init__(self, tables: Tables, spawn: Spawn, mover: Mover | None = None) -> None:
        self._tables = tables
        self._spawn = spawn
        self.mover = mover
        self.log = DecisionLog()
        self._seen: dict[LaneLoop, _Seen] = {}
        self._notes: dict[int, Note] = {}
        self._moving: set[int] = set()  # session keys with a hand-over on the way
        self._answer_share = 1.0
        self._policy = _policy(tables.config.router, tables)

    def __repr__(self) -> str:
        return f"<Dispatcher decisions={len(self.log)} moving={len(self._moving)}>"

    # ------------------------------------------------------------------- what the router sees

    def state(self) -> router.RouteState:
        """Every lane as it is now, about."""
        now_ms = self._tables.now_ms()
        lanes = tuple([self._lane(loop, now_ms) for loop in self._tables.loops])
        return router.RouteState(lanes, (), self._policy)

    def _lane(self, loop: LaneLoop, now_ms: float) -> router.LaneState:
        """Counted again when something happened; a long queue only every REFRESH_MS."""
        rows = len(loop.running) + len(loop.waiting)
        mark = (loop.steps, loop.assigned, rows, loop.up)
        seen = self._seen.get(loop)
        if seen is not None:
            few = rows <= FEW_ROWS or not seen.state.alive
            if seen.mark == mark or not (few or now_ms - seen.at_ms > REFRESH_MS):
                return seen.state
        state = self._look(loop)
        self._seen[loop] = _Seen(state, mark, now_ms)
        return state

    def _look(self, loop: LaneLoop) -> router.LaneState:
        config = loop.config
        paused = sum(turn.paused for turn in loop.running.values())
        step = loop.cost.cost
        step = dataclasses.replace(step, fixed_ms=step.fixed_ms + loop.overhead_ms)
        load = cost.load_of(
            step, config.entries_max, config.chunk_tokens_max, self._rows(loop), paused
        )
        queue_max = config.queue_max or self._tables.config.limits.queue_max
        return router.LaneState(
            loop.lane.name,
            load,
            loop.up,
            config.tier or router.ANY,
            config.pool,
            loop.context_max,
            len(loop.waiting) >= queue_max,
        )

    def _rows(self, loop: LaneLoop) -> Iterable[LoadRow]:
        for turns, seated in ((loop.running, True), (loop.waiting, False)):
            for turn in turns.values():
                if turn.paused:
                    continue
                session, generation = turn.session, turn.generation
                left = self._tokens_out(generation.request) - generation.completion_tokens
                frontier = session.frontier
                to_compute = max(1, len(session.tokens) - frontier)
                yield LoadRow(turn.rank, frontier, to_compute, max(1, left), seated)

    def _tokens_out(self, request: GenerationRequest) -> int:
        """Tokens the answer will probably have."""
        expected = request.expected_output_tokens
        if expected is None:
            expected = int(self._answer_share * request.tokens_max)
        return max(1, min(expected, request.tokens_max))

    def _asked(self, request: GenerationRequest) -> router.RouteRequest:
        sla = request.sla
        targets = self._tables.config.sla.of(sla.sla_class)
        n_prompt = len(request.prompt)
        return router.RouteRequest(
            scheduler.RANK[sla.sla_class],
            n_prompt,
            self._tokens_out(request),
            n_prompt + request.tokens_max,
            max(1.0, targets.ttft_ms if sla.ttft_ms is None else sla.ttft_ms),
            max(0.1, targets.tpot_ms if sla.tpot_ms is None else sla.tpot_ms),
            math.inf if sla.ttlt_ms is None else max(1.0, sla.ttlt_ms),
            request.promote,
        )

    def _known(
        self, session: Session, home: LaneLoop | None, prompt: tuple[int, ...]
    ) -> router.RouteSession | None:
        """What there is of the session's KV, and where; None for one without KV."""
        if home is None:
            return None
        reused = min(common_prefix(session.tokens, prompt), session.frontier, len(prompt) - 1)
        note, now_ms = self._note(session), self._tables.now_ms()
        return router.RouteSession(
            home.lane.name,
            reused,
            max(0, reused - len(session.pinned) * PAGE_TOKENS),
            now_ms - note.moved_ms,
            now_ms - note.urgent_ms,
        )

    def _note(self, session: Session) -> Note:
        note = self._notes.get(session.key)
        if note is None:
            note = self._notes[session.key] = Note(self._tables.now_ms())
        return note

    # ------------------------------------------------------------------------------ admission

    def admit(self, request: GenerationRequest) -> None:
        """Raises 429 with the time to come back when no lane would begin with it in time."""
        state = self.state()
        up = [lane for lane in state.lanes if lane.alive]
        if not up:
            return  # lanes come back: it waits, as everybody else does
        sla_class = request.sla.sla_class
        rank = scheduler.RANK[sla_class]
        waits = [cost.wait_ms(lane.load, rank) for lane in up if not lane.full]
        if not waits:
            wait_ms = min(cost.wait_ms(lane.load, rank) for lane in up)
            self._tables.metrics.shed_total.labels(sla_class.value, "queue_full").inc()
            raise refusals.overloaded(sum(lane.load.waiting for lane in up), wait_ms)
        patience_ms = self._tables.config.sla.of(sla_class).patience_s * 1000
        if patience_ms and min(waits) > patience_ms:
            self._tables.metrics.shed_total.labels(sla_class.value, "patience").inc()
            raise refusals.wait_too_long(min(waits), patience_ms, sla_class.value)

    def wait_ms(self, request: GenerationRequest, loop: LaneLoop | None = None) -> float:
        """Predicted wait of a request until its own work begins, on `loop` or the best lane."""
        rank, now_ms = scheduler.RANK[request.sla.sla_class], self._tables.now_ms()
        loops = self._tables.loops if loop is None else [loop]
        return min(cost.wait_ms(self._lane(one, now_ms).load, rank) for one in loops)

    def pace(self, loop: LaneLoop, request: GenerationRequest) -> tuple[float, float]:
        """Until when the request is late on the lane, and its target per token; both in ms."""
        chosen = self._tables.config.sla.of(request.sla.sla_class)
        targets = scheduler.ClassTargets(chosen.ttft_ms, chosen.tpot_ms)
        now, n_prompt = loop.cost.cost, len(request.prompt)
        step_ms = now.predict_ms(cost.work_of([(n_prompt, 1)]))
        alone_ms = now.predict_ms(cost.work_of([(0, n_prompt)])) + request.tokens_max * step_ms
        horizon_ms = scheduler.horizon_ms(request.sla, targets, alone_ms)
        return horizon_ms, scheduler.tpot_ms(request.sla, targets)

    # ------------------------------------------------------------------------------- decisions

    def place(self, session: Session, generation: Generation) -> LaneLoop:
        """Decide where the session's next turn computes, and write down why.

        The lane may be another than the session's home: then `move` it there first.
        """
        request, home = generation.request, self._tables.home.get(session.key)
        asked = self._asked(request)
        known = self._known(session, home, request.prompt)
        state = self.state()
        decision = router.route(asked, known, state)
        loop = self._named(decision.lane) or home or self._least_assigned()
        record = Record(
            request.request_id,
            session.session_id,
            session.tenant,
            request.sla.sla_class.value,
            self._tables.now_ms(),
            asked,
            known,
            state,
            decision,
            loop.lane.name,
        )
        if home is not None and loop is not home:
            held = self._held_back(session, home)
            if held:
                record.note(f"it stays on {home.lane.name}: {held}")
                loop, record.lane = home, home.lane.name
        self._remark(session, request, record)
        self.log.add(record)
        self._count(record)
        seen = self._seen.get(loop)
        if seen is not None:
            n = max(1, asked.prompt_tokens - (0 if known is None else known.reused_tokens))
            frontier = asked.prompt_tokens - n
            load = cost.joined(seen.state.load, asked.rank, frontier, n)
            seen.state = seen.state._replace(load=load)
        return loop

    def _held_back(self, session: Session, home: LaneLoop) -> str:
        """Why a session that should move does not; "" = it does."""
        if self.mover is None:
            return "lanes cannot hand sessions over"
        if not self._tables.config.router.promote_auto and home.up:
            return "router.promote_auto is off"
        if session.key in self._moving:
            return "a hand-over is on the way"
        return ""

    def _remark(self, session: Session, request: GenerationRequest, record: Record) -> None:
        """Remember urgency, and say when a background request follows a human at once."""
        note, now_ms = self._note(session), self._tables.now_ms()
        note.used_ms = now_ms
        if router.is_urgent(record.request, self._policy):
            note.urgent_ms = now_ms
        elif request.sla.sla_class in (SlaClass.BACKGROUND, SlaClass.BATCH):
            since_ms = now_ms - note.urgent_ms
            if since_ms < self._policy.demote_idle_ms:
                text = (
                    f"a {record.sla_class} request {since_ms / 1000:.1f} s after an interactive"
                    " turn: the client may have left a background model on this session"
                )
                record.note(text)
                log.info("session %s: %s", session.session_id, text)

    def _count(self, record: Record) -> None:
        metrics, predicted = self._tables.metrics, record.decision.predicted
        reason = record.decision.reason.name.lower()
        metrics.route_decisions_total.labels(record.lane, reason).inc()
        if predicted is not None and predicted.lane == record.lane:
            labels = (record.sla_class, record.lane)
            metrics.ttft_predicted_seconds.labels(*labels).observe(predicted.ttft_ms / 1000)
            metrics.tpot_predicted_seconds.labels(*labels).observe(predicted.tpot_ms / 1000)

    def _named(self, lane: str) -> LaneLoop | None:
        return next((loop for loop in self._tables.loops if loop.lane.name == lane), None)

    def _least_assigned(self) -> LaneLoop:
        return min(self._tables.loops, key=lambda loop: loop.assigned)

    # ---------------------------------------------------------------------------------- moves

    def waits_behind(self, session: Session, generation: Generation) -> None:
        """A request queued behind the session's running turn: an urgent one hurries that turn.

        The turn inherits the urgency of who waits for it, and its session moves to where the
        waiting request would go: it will be there when its own turn comes.
        """
        asked = self._asked(generation.request)
        home = self._tables.home.get(session.key)
        if home is None or not router.is_urgent(asked, self._policy):
            return
        note = self._note(session)
        note.urgent_ms = self._tables.now_ms()
        turn = home.running.get(session.key) or home.waiting.get(session.key)
        if turn is not None:
            home.hurry(turn, asked.rank, asked.ttft_ms, asked.tpot_ms)
        known = self._known(session, home, tuple(session.tokens)) if session.tokens else None
        decision = router.route(asked, known, self.state())
        to = self._named(decision.lane)
        if to is not None and to is not home and not self._held_back(session, home):
            self._spawn(self._move_quietly(session, to, "promotion"), "move")

    async def move(self, session: Session, to: LaneLoop, cause: str) -> Moved | None:
        """Hand the session over; None when that failed, and it stays where it was."""
        if self.mover is None:
            return None
        source = self._tables.home.get(session.key)
        metrics = self._tables.metrics
        names = (source.lane.name if source is not None else "none", to.lane.name)
        self._moving.add(session.key)
        try:
            moved = await self.mover.move(session, to, cause)
        except Exception as error:  # whatever it was, the session's requests go on
            log.warning("session %s stays on %s: %r", session.session_id, names[0], error)
            metrics.promotions_total.labels(*names, "failed").inc()
            return None
        finally:
            self._moving.discard(session.key)
        self.moved(session, moved)
        return moved

    async def _move_quietly(self, session: Session, to: LaneLoop, cause: str) -> None:
        await self.move(session, to, cause)

    def moved(self, session: Session, moved: Moved) -> None:
        """Write a hand-over down and learn what it costs."""
        metrics = self._tables.metrics
        result = moved.result.partition(":")[0].replace(" ", "_")
        metrics.promotions_total.labels(moved.source, moved.target, result).inc()
        record = self.log.latest(session.session_id, session.tenant)
        if record is not None and len(record.moves) < 16:
            record.moves.append(move_dict(moved))
        if moved.result != "moved":
            return
        note = self._note(session)
        note.moved_ms = self._tables.now_ms()
        if moved.cause.startswith("promotion"):
            note.urgent_ms = note.moved_ms  # asked for by a person: it stays a while
        metrics.promotion_seconds.observe(moved.total_ms / 1000)
        if moved.gap_ms > 0.0:
            metrics.promotion_gap_seconds.observe(moved.gap_ms / 1000)
        self._learn_move(moved)

    def _learn_move(self, moved: Moved) -> None:
        """What a hand-over costs at all; the share of copied rows keeps its prior."""
        policy = self._policy
        fixed_ms = max(0.1, moved.total_ms - policy.move_row_ms * moved.rows_copied)
        move_ms = policy.move_ms + MOVE_GAIN * (fixed_ms - policy.move_ms)
        self._policy = policy._replace(move_ms=move_ms)

    def lane_for(self, session: Session, tier: str) -> LaneLoop | None:
        """The best other lane of a tier for an explicit promote or demote."""
        home = self._tables.home.get(session.key)
        away_from = "" if home is None else home.lane.name
        return self._named(router.best_lane(self.state(), tier, len(session.tokens), away_from))

    def tick(self) -> None:
        """Once a second: idle sessions give fast lanes back; what is gone is forgotten."""
        tables = self._tables
        live = {s.key for s in tables.named.values()}
        live.update(turn.session.key for turn in tables.turns.values())
        for key in [key for key in self._notes if key not in live]:
            del self._notes[key]
        fast = any(loop.config.tier == router.FAST for loop in tables.loops)
        if not fast or self.mover is None or not tables.config.router.promote_auto:
            return
        for session, to in self._demotions():
            self._moving.add(session.key)
            self._spawn(self._move_quietly(session, to, "demotion: idle"), "move")

    def _demotions(self) -> list[tuple[Session, LaneLoop]]:
        """Idle sessions that stand on a fast lane for no reason, oldest use first."""
        tables, state, now_ms = self._tables, self.state(), self._tables.now_ms()
        found: list[tuple[Session, LaneLoop]] = []
        for session in tables.named.values():
            home = tables.home.get(session.key)
            if (
                home is None
                or home.config.tier != router.FAST
                or session.state is not State.IDLE
                or session.key in tables.queues
                or session.key in self._moving
            ):
                continue
            note = self._note(session)
            known = self._known(session, home, tuple(session.tokens[-1:]))
            if known is None:
                continue
            idle_ms = now_ms - note.used_ms
            to = self._named(router.demotion(known, idle_ms, len(session.tokens), state))
            if to is not None:
                found.append((session, to))
                if len(found) >= DEMOTIONS_MAX:
                    break
        return found

    # --------------------------------------------------------------------------------- outcome

    def ended(self, turn: Turn, finish: str) -> None:
        """A turn is over: compare with what was predicted, and learn how long answers are."""
        generation, session = turn.generation, turn.session
        note, now_ms = self._note(session), self._tables.now_ms()
        note.used_ms = now_ms
        record = self.log.of_request(generation.request_id)
        if record is None:
            return
        if router.is_urgent(record.request, self._policy):
            note.urgent_ms = now_ms
        if finish in ("stop", "length") and generation.request.tokens_max > 0:
            share = generation.completion_tokens / generation.request.tokens_max
            self._answer_share += ANSWER_GAIN * (share - self._answer_share)
        ttft_ms, tpot_ms = _times(generation, record.decided_ms)
        record.outcome = Outcome(
            generation.lane,
            finish,
            generation.completion_tokens,
            generation.cached_tokens,
            ttft_ms,
            tpot_ms,
        )
        predicted = record.decision.predicted
        if predicted is None or predicted.lane != generation.lane or record.moves:
            return
        ratio = self._tables.metrics.prediction_ratio
        if ttft_ms is not None:
            ratio.labels("ttft", generation.lane).observe(ttft_ms / max(predicted.ttft_ms, 1e-3))
        if tpot_ms is not None:
            ratio.labels("tpot", generation.lane).observe(tpot_ms / max(predicted.tpot_ms, 1e-3))

    # --------------------------------------------------------------------------------- restore

    def plan_restore(
        self, turn: Turn, loop: LaneLoop, tokens: int, cold_tokens: int, cold_bytes: int
    ) -> cost.RestorePlan:
        """Read KV from disk or compute it again; see `cost.plan_restore`. Logged for `explain`."""
        load, store = self._lane(loop, self._tables.now_ms()).load, self._tables.store
        found = cost.plan_restore(
            load.cost,
            tokens=tokens,
            cold_tokens=cold_tokens,
            cold_bytes=cold_bytes,
            read_bytes_per_s=self._read_rate(),
            queued_bytes=0 if store is None else store.bytes_loading,
            decodes=load.decodes,
        )
        self._tables.metrics.restores_total.labels(found.choice).inc()
        record = self.log.of_request(turn.generation.request_id)
        if record is not None:
            record.restore = found
        return found

    def _read_rate(self) -> float:
        store = self._tables.store
        return 0.0 if store is None else store.rates.read_bytes_per_s or 0.0

    def restored(self, turn: Turn, actual_ms: float) -> None:
        """The reading that was planned took `actual_ms`."""
        record = self.log.of_request(turn.generation.request_id)
        if record is None or record.restore is None:
            return
        record.restored_ms = actual_ms
        if record.restore.choice == "load" and record.restore.load_ms > 0.0:
            ratio = actual_ms / record.restore.load_ms
            self._tables.metrics.restore_ratio.observe(ratio)

    # --------------------------------------------------------------------------------- explain

    def explain(self, given: str, tenant: str | None = None) -> dict[str, Any]:
        """Why a request or a session is where it is: plain data; `given` may be a unique prefix.

        With `tenant` only what is that tenant's can be meant.
        """
        tables = self._tables
        computing = ((t.session.tenant, t.session.session_id) for t in tables.turns.values())
        names = self.log.find(given, [*tables.named, *computing], tenant)
        if len(names) != 1:
            raise refusals.nothing_to_explain(given, [name[-1] for name in names])
        now_ms = tables.now_ms()
        kind, *rest = names[0]
        if kind == "request":
            record = self.log.of_request(rest[0], tenant)
            if record is None:
                raise refusals.nothing_to_explain(given, [])
            return {"kind": "request", **record.as_dict(now_ms)}
        owner, session_id = rest
        records = self.log.of_session(session_id, owner)
        session = tables.named.get((owner, session_id))
        return {
            "kind": "session",
            "session_id": session_id,
            "tenant": owner,
            **({} if session is None else self._session_facts(session, now_ms)),
            "decisions": [record.as_dict(now_ms) for record in records],
        }

    def _session_facts(self, session: Session, now_ms: float) -> dict[str, Any]:
        home, note = self._tables.home.get(session.key), self._note(session)

        def ago(at_ms: float) -> float | None:
            return None if at_ms == NO_TIME else round((now_ms - at_ms) / 1000, 3)

        return {
            "lane": "" if home is None else home.lane.name,
            "state": session.state.value,
            **reports.parked_facts(self._tables, session),
            "tokens": len(session.tokens),
            "moving": session.key in self._moving,
            "moved_ago_s": ago(note.moved_ms),
            "urgent_ago_s": ago(note.urgent_ms),
            "used_ago_s": ago(note.used_ms),
        }


def _policy(config: RouterConfig, tables: Tables) -> router.RoutePolicy:
    interactive = tables.config.sla.interactive
    return router.RoutePolicy(
        long_prompt_tokens=config.long_prompt_tokens,
        urgent_ttft_ms=interactive.ttft_ms,
        urgent_tpot_ms=interactive.tpot_ms,
        tolerance=config.tolerance,
        dwell_ms_min=config.dwell_s * 1000,
        demote_idle_ms=config.demote_idle_s * 1000,
        loaded_ratio=config.loaded_ratio,
    )


def _times(generation: Generation, since_ms: float) -> tuple[float | None, float | None]:
    """TTFT since the decision and TPOT of what was generated; None = there was none."""
    first, last = generation.first_token_ms, generation.last_token_ms
    if first is None or last is None:
        return None, None
    n = generation.completion_tokens
    return max(0.0, first - since_ms), (last - first) / (n - 1) if n > 1 else None
