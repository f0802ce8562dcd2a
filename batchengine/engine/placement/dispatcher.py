"""Placement policy: which lane a request computes on, what is admitted, and which sessions move.

Owns the router's view of the lanes (`RouteState`), the decision log, the measured cost of moves,
and automatic promotion and demotion. The `Migrator` does the migrations, the scheduler
decides the order of turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import msgspec

from batchengine import errors
from batchengine.config import Config, keys
from batchengine.core import BatchEngineError, GenerationRequest, SlaClass
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.pipelines import PipelineQueue
from batchengine.engine.placement.decision_log import (
    DecisionLog,
    DecisionRecord,
    RequestOutcome,
)
from batchengine.engine.placement.evacuation import Evacuation
from batchengine.engine.placement.explain import explain
from batchengine.engine.placement.lane_view import LaneViews, QueueLimit, scored_ms_of
from batchengine.engine.placement.migration import Migrator
from batchengine.engine.placement.move_report import MoveCause, MoveOutcome, MoveReport
from batchengine.engine.placement.moves import OwnMoves
from batchengine.engine.placement.plans import CACHED_MAX, PeerPlans
from batchengine.engine.placement.restore import Restores
from batchengine.engine.placement.session_times import TimesOfSessions
from batchengine.engine.state import EngineState
from batchengine.engine.tasks import Spawn
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn
from batchengine.policy import cost, router, scheduler
from batchengine.session import Session, common_prefix

log = logging.getLogger("batchengine.placement")

MOVE_GAIN = 0.2  # weight of the newest migration in the average cost of one


class Dispatcher:
    """Routes the requests of one engine; the only caller of its migrator."""

    def __init__(
        self,
        state: EngineState,
        migrator: Migrator,
        plans: PeerPlans,
        decisions: DecisionLog,
        pipeline_queue: PipelineQueue,
        spawn: Spawn,
    ) -> None:
        """`spawn` runs a task that nothing awaits."""
        self._state = state
        self._migrator = migrator
        self._spawn = spawn
        self.plans = plans
        self.log = decisions
        self._lanes = LaneViews(state, pipeline_queue)
        self.restores = Restores(state, self._lanes, self.log)
        self._times = TimesOfSessions(state)
        self.evacuation = Evacuation(state, self.move, spawn)
        self._own_moves = OwnMoves(state, self._lanes, self._times, self.log)
        self._policy = _policy(state.config)

    def __repr__(self) -> str:
        return f"<Dispatcher decisions={len(self.log)} moving={len(self._state.moves)}>"

    # -------------------------------------------------------------------- inputs of the router

    def state(
        self,
        session: Session | None = None,
        *,
        tenant: str | None = None,
        explicit: bool = False,
        scored: bool = False,
    ) -> router.RouteState:
        """Return all lanes with estimated loads, as full as they are for a tenant, the policy, and
        unless its prompt is `scored` the peers for a session: with their lanes if it may move by
        itself, or `explicit`."""
        state = router.RouteState(self._lanes.all(tenant, scored=scored), self._policy)
        remote = explicit or self._state.config.router.promote_auto
        if scored:
            return state
        return self.plans.with_peers(state, session, remote=remote)

    def load_of(self, loop: LaneLoop) -> cost.LaneLoad:
        """Return the estimated load of a lane."""
        return self._lanes.of(loop).load

    def _known(
        self, session: Session, home: LaneLoop, prompt: tuple[int, ...]
    ) -> router.RouteSession:
        """Return how much of the prompt has KV, and on which lane."""
        reused = min(common_prefix(session.tokens, list(prompt)), session.frontier, len(prompt) - 1)
        note, now_ms = self._times.of(session), self._state.now_ms()
        return router.RouteSession(
            home.lane.name,
            reused,
            max(0, reused - session.kv.sealed_tokens),
            now_ms - note.moved_ms,
            now_ms - note.urgent_ms,
            *self.plans.held(session, reused),
        )

    # ------------------------------------------------------------------------------ admission

    def admit(self, request: GenerationRequest) -> None:
        """Raise BatchEngineError with the time to retry if no lane could begin in time, or the
        requests that wait are too many of one tenant."""
        self._check_share(request)
        lanes = self._lanes.all(request.tenant)
        pairs = list(zip(self._state.lanes, lanes, strict=True))
        up = [(loop, lane) for loop, lane in pairs if lane.alive]
        if not up:
            return  # every lane is down: the request waits until one is up again
        sla_class, tenant = request.sla.sla_class, request.tenant
        rank = scheduler.RANK[sla_class]
        waits = [self._lanes.wait_ms(loop, rank, tenant) for loop, lane in up if not lane.full]
        if not waits:
            raise self._no_room([loop for loop, _ in up], request)
        patience_ms = self._state.config.sla.of(sla_class).patience_s * 1000
        if patience_ms and min(waits) > patience_ms:
            self._state.metrics.shed_total.labels(sla_class.value, "patience").inc()
            raise errors.WAIT_TOO_LONG(
                wait_s=min(waits) / 1000,
                patience_s=patience_ms / 1000,
                sla_class=sla_class.value,
                retry_ms=cost.retry_after_ms(min(waits) - patience_ms),
            )
        if request.patience_ms is not None and min(waits) > request.patience_ms:
            self._state.metrics.shed_total.labels(sla_class.value, "client_patience").inc()
            raise errors.CLIENT_LEAVES(
                wait_s=min(waits) / 1000,
                patience_s=request.patience_ms / 1000,
                retry_ms=cost.retry_after_ms(min(waits) - request.patience_ms),
            )

    def _no_room(self, loops: list[LaneLoop], request: GenerationRequest) -> BatchEngineError:
        """Why the queue of no lane takes a request: they are full, or the tenant's part of one."""
        rank, tenant = scheduler.RANK[request.sla.sla_class], request.tenant
        wait_ms = min(self._lanes.wait_ms(loop, rank, tenant) for loop in loops)
        retry_ms = cost.retry_after_ms(wait_ms)
        for loop in loops:
            if not self._lanes.of(loop).full:
                held = sum(turn.session.tenant == tenant for turn in loop.waiting.values())
                limit = self._lanes.queue_limit(loop)
                return _key_full(self._state, request, held, limit, retry_ms)
        self._state.metrics.shed_total.labels(request.sla.sla_class.value, "queue_full").inc()
        settings = dict.fromkeys([self._lanes.queue_limit(loop).setting for loop in loops])
        return errors.OVERLOADED(
            waiting=sum(self._lanes.of(loop).load.waiting for loop in loops),
            setting=" or ".join(settings),
            retry_ms=retry_ms,
        )

    def _check_share(self, request: GenerationRequest) -> None:
        """Raise KEY_QUEUE_FULL if the tenant has its share of `limits.queue_max` waiting."""
        state, tenant = self._state, request.tenant
        if keys.is_alone(state.config, tenant):
            return
        held = sum(session.tenant == tenant for session in state.requests.values())
        for loop in state.lanes:
            held -= sum(turn.session.tenant == tenant for turn in loop.running.values())
        limit, own_max = state.config.limits.queue_max, keys.key_of(state.config, tenant).queue_max
        if not keys.may_take(state.config, tenant, held, limit, state.waiting, own_max):
            retry_ms = cost.retry_after_ms(self.wait_ms(request))
            raise _key_full(state, request, held, QueueLimit("limits.queue_max", limit), retry_ms)

    def wait_ms(self, request: GenerationRequest, loop: LaneLoop | None = None) -> float:
        """Predict the ms that a request waits until its work begins, on `loop` or the best lane."""
        rank = scheduler.RANK[request.sla.sla_class]
        loops = self._state.lanes if loop is None else [loop]
        return min(self._lanes.wait_ms(one, rank, request.tenant) for one in loops)

    def pace(self, loop: LaneLoop, request: GenerationRequest) -> tuple[float, float]:
        """Return the time to the request's deadline and its target per token, both in ms."""
        sla, targets = request.sla, self._state.config.sla.of(request.sla.sla_class)
        now, n_prompt = loop.cost.cost, len(request.prompt)
        step_ms = now.predict_ms(cost.work_of([(n_prompt, 1)]))
        alone_ms = now.predict_ms(cost.work_of([(0, n_prompt)])) + request.tokens_max * step_ms
        horizon_ms = scheduler.horizon_ms(sla, targets.ttft_ms, alone_ms)
        return horizon_ms, targets.tpot_ms if sla.tpot_ms is None else sla.tpot_ms

    # ------------------------------------------------------------------------------- decisions

    def choose(self, session: Session, generation: Generation) -> LaneLoop:
        """Choose the lane of the session's next turn, and log the decision.

        The lane may be another than the session's home: then `move` it there first.
        """
        request, home = generation.request, self._state.home.get(session.key)
        asked = self._lanes.asked(request)
        known = None if home is None else self._known(session, home, request.prompt)
        scores = request.prompt_logprobs >= 0  # the whole prompt is computed, and here
        if known is None and self._state.lanes and not scores:
            stored = self._state.lanes[0].kv.prefix.stored_tokens(request.prompt, session.salt)
            asked = msgspec.structs.replace(asked, stored_tokens=stored)
        state = self.state(session, tenant=session.tenant, scored=scores)
        decision = router.route(asked, known, state)
        name = decision.begins_on or decision.lane
        loop = self._state.lane(name) or home or _any_lane(self._state, decision)
        record = DecisionRecord(
            request.request_id,
            session.session_id,
            session.tenant,
            request.sla.sla_class.value,
            self._state.now_ms(),
            asked,
            known,
            state,
            decision,
            loop.lane.name,
        )
        if home is not None and loop is not home:
            held = _held_back(self._state, session, home)
            if held:
                record.note(f"it stays on {home.lane.name}: {held}")
                loop, record.lane = home, home.lane.name
        self._remark(session, request, record)
        self.log.add(record)
        self._count(record)
        generation.lane_wait_ms = self.wait_ms(request, loop)
        reused = asked.stored_tokens if known is None else known.reused_tokens
        n = max(1, asked.prompt_tokens - reused)
        work = asked.rank, asked.prompt_tokens - n, n, scored_ms_of(loop, request, n)
        if not self.plans.expect(generation, record):
            self._lanes.joined(loop, session.tenant, *work)
        return loop

    def _remark(self, session: Session, request: GenerationRequest, record: DecisionRecord) -> None:
        """Record the time of an urgent request; note a background one that follows one shortly."""
        note, now_ms = self._times.of(session), self._state.now_ms()
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

    def _count(self, record: DecisionRecord) -> None:
        metrics, predicted = self._state.metrics, record.decision.predicted
        reason = record.decision.reason.name.lower()
        metrics.route_decisions_total.labels(record.lane, reason).inc()
        if predicted is not None and predicted.lane == record.lane:
            labels = (record.sla_class, record.lane)
            metrics.ttft_predicted_seconds.labels(*labels).observe(predicted.ttft_ms / 1000)
            metrics.tpot_predicted_seconds.labels(*labels).observe(predicted.tpot_ms / 1000)

    # ---------------------------------------------------------------------------------- moves

    def waits_behind(self, session: Session, generation: Generation) -> None:
        """Apply priority inheritance for a request queued behind the session's running turn.

        If the request is urgent, the running turn gets its rank and targets, and the session moves
        now to the lane that the request would be routed to. A peer computes the turn only; if it
        refuses, the session moves to the best lane here.
        """
        asked = self._lanes.asked(generation.request)
        home = self._state.home.get(session.key)
        if home is None or not router.is_urgent(asked, self._policy):
            return
        note = self._times.of(session)
        note.urgent_ms = self._state.now_ms()
        turn = home.seats.turn_of(session)
        if turn is not None:
            home.seats.raise_priority(turn, asked.rank, asked.ttft_ms, asked.tpot_ms)
        known = self._known(session, home, tuple(session.tokens)) if session.tokens else None
        decision = router.route(asked, known, self.state(session))
        to = self._state.lane(decision.begins_on or decision.lane)

        def move_here() -> None:
            if to is not None and to is not home and not _held_back(self._state, session, home):
                self._spawn(self.move(session, to, MoveCause.PROMOTION), "move")

        if decision.strategy == router.ON_PEER and turn is not None:
            self.plans.send_away(turn, decision.lane, move_here)
        else:
            move_here()

    async def move(self, session: Session, to: LaneLoop, cause: MoveCause) -> MoveReport:
        """Migrate the session to lane `to`, and `learn` from it. A defect is reported as FAILED."""
        try:
            moved = await self._migrator.move(session, to, cause)
        except Exception as error:  # the session's requests go on after any defect
            home = self._state.home.get(session.key)
            where = "none" if home is None else home.lane.name
            log.exception("session %s stays on %s", session.session_id, where)
            why = f"a defect ({type(error).__name__}): the log has the details"
            failed, name = MoveOutcome.FAILED, to.lane.name
            moved = MoveReport(session.session_id, where, name, cause, outcome=failed, why=why)
        self.learn(session, moved)
        return moved

    def learn(self, session: Session, moved: MoveReport) -> None:
        """Log and count a migration; one that nothing computed in updates the average cost."""
        metrics = self._state.metrics
        outcome = moved.outcome.value.replace(" ", "_")
        metrics.promotions_total.labels(moved.source, moved.target, outcome).inc()
        if moved.outcome in (MoveOutcome.STAYED, MoveOutcome.FAILED):
            self._refused(session, moved)
        if moved.outcome is MoveOutcome.FAILED:
            return
        record = self.log.latest(session.session_id, session.tenant)
        if record is not None:
            record.add_move(moved, self._state.now_ms())
        if moved.outcome is not MoveOutcome.MOVED:
            return
        note = self._times.of(session)
        note.moved_ms, note.refused = self._state.now_ms(), None
        if moved.cause is MoveCause.PROMOTION:
            note.urgent_ms = note.moved_ms  # so that the session is not demoted soon
        metrics.promotion_seconds.observe(moved.total_ms / 1000)
        if moved.gap_ms > 0.0:  # it computed on while its rows were copied: no turn waits so long
            metrics.promotion_gap_seconds.observe(moved.gap_ms / 1000)
            return
        policy = self._policy  # the cost per copied row keeps its initial value
        fixed_ms = max(0.1, moved.total_ms - policy.move_row_ms * moved.rows_copied)
        move_ms = policy.move_ms + MOVE_GAIN * (fixed_ms - policy.move_ms)
        self._policy = msgspec.structs.replace(policy, move_ms=move_ms)

    def _refused(self, session: Session, moved: MoveReport) -> None:
        """Record a migration without a change; log its reason unless it was that of the last."""
        note, why = self._times.of(session), (moved.target, moved.why)
        note.refused_ms = self._state.now_ms()
        if moved.outcome is MoveOutcome.STAYED and note.refused != why:
            log.info("%r stays on %s: %s", session, moved.source, moved.why)
        note.refused = why

    async def relocate(self, session: Session, to: str | None, tier: str) -> MoveReport:
        """Move a session to lane `to`, or to the best other one of `tier`.

        Raises BatchEngineError: then nothing has changed.
        """
        home = self._state.home.get(session.key)
        name = "" if home is None else home.lane.name
        loop = self.lane_for(session, tier) if to is None else self._state.lane(to)
        if to is not None and loop is None:
            names = [loop.lane.name for loop in self._state.lanes] + self.plans.peer_names()
            raise errors.UNKNOWN_LANE(given=to, lanes=" or ".join(names))
        if loop is None and home is not None:  # a second request for the same tier moves nothing
            settled = home.config.tier == tier and home.lane.alive and home.kv.slots.is_attached
            loop = home if settled else self.evacuation.refuge(home)
        if loop is None:
            raise errors.NO_OTHER_LANE(lane=name or "here")
        cause = MoveCause.PROMOTION if tier == router.FAST else MoveCause.DEMOTION
        if tier == router.FAST:
            self.plans.gather(session)
        # Shielded: a migration that has begun ends even if the caller is cancelled.
        moved = await asyncio.shield(asyncio.ensure_future(self.move(session, loop, cause)))
        if moved.outcome in (MoveOutcome.STAYED, MoveOutcome.FAILED):
            where = f"on lane {name}" if name else "on no lane"
            raise errors.NOT_MOVED(where=where, why=moved.why)
        return moved

    def peer_for(self, session: Session) -> tuple[str, str]:
        """Return the peer for a promote of the turn that runs, and why; ("", "") = a lane here."""
        turn = self._state.turn_of(session)
        home = self._state.home.get(session.key)
        if turn is None or home is None or not turn.reported or turn.shared_with:
            return ("" if turn is None else turn.shared_with), ""  # it stays there
        tokens, generation, request = session.tokens, turn.generation, turn.generation.request
        asked = msgspec.structs.replace(
            self._lanes.asked(request),
            prompt_tokens=len(tokens),
            tokens_out=max(1, self._lanes.tokens_out(request) - generation.completion_tokens),
            ttft_ms=math.inf,  # it has its first token
            promote=True,
        )
        known = self._known(session, home, tuple(tokens))
        decision = router.route(asked, known, self.state(session, explicit=True))
        is_remote = decision.strategy == router.ON_PEER
        return (decision.lane, decision.reason) if is_remote else ("", "")

    def lane_for(self, session: Session, tier: str) -> LaneLoop | None:
        """Return the best other lane of a tier for an explicit promote or demote, or None."""
        home = self._state.home.get(session.key)
        away_from = "" if home is None else home.lane.name
        return self._state.lane(
            router.best_lane(self.state(), tier, len(session.tokens), away_from)
        )

    def tick(self) -> None:
        """Start evacuations of lanes that are down, and moves that no request asks for; drop the
        times of sessions that are not in memory. Call once a second."""
        state = self._state
        self._times.forget_others({session.key for session in state.known()})
        for loop in state.lanes:
            self.evacuation.begin(loop)
        if state.config.router.promote_auto:
            for session, to, cause in self._own_moves.due(self._policy):
                self._spawn(self.move(session, to, cause), "move")

    # --------------------------------------------------------------------------------- outcome

    def ended(self, turn: Turn, finish: str) -> None:
        """Record the outcome of a turn, its length, and its times against the prediction."""
        generation, session = turn.generation, turn.session
        note, now_ms = self._times.of(session), self._state.now_ms()
        note.used_ms = now_ms
        record = self.log.of_request(generation.request_id)
        if record is None:
            return
        if router.is_urgent(record.request, self._policy):
            note.urgent_ms = now_ms
            self.plans.gather(session)
        if finish in ("stop", "length"):
            self._lanes.learn_answer(generation.completion_tokens, generation.request.tokens_max)
        first_ms, tpot_ms = generation.first_token_ms, generation.tpot_ms
        ttft_ms = None if first_ms is None else max(0.0, first_ms - record.decided_ms)
        record.outcome = RequestOutcome(
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
        ratio = self._state.metrics.prediction_ratio
        if ttft_ms is not None:
            ratio.labels("ttft", generation.lane).observe(ttft_ms / max(predicted.ttft_ms, 1e-3))
        if tpot_ms is not None:
            ratio.labels("tpot", generation.lane).observe(tpot_ms / max(predicted.tpot_ms, 1e-3))

    # --------------------------------------------------------------------------------- explain

    def explain(self, given: str, tenant: str | None = None) -> dict[str, Any]:
        """Return the decisions about a request or session; see `explain.explain`."""
        return explain(self._state, self.log, self._times, given, tenant)


def _held_back(state: EngineState, session: Session, home: LaneLoop) -> str:
    """Return why a session that should move stays; "" = it moves."""
    if not state.config.router.promote_auto and home.up:
        return "router.promote_auto is off"
    if session.key in state.moves:
        return "it moves already"
    if session.kv.held and home.up:
        return "peers hold pages of it"
    return ""


def _any_lane(state: EngineState, decision: router.Decision) -> LaneLoop:
    """The lane where a request waits that none can take now."""
    if decision.reason is router.Reason.NO_FIT:
        return state.lanes[0]  # its sessions may have pages with peers
    return min(state.lanes, key=lambda lane: lane.assigned)


def _key_full(
    state: EngineState, request: GenerationRequest, held: int, limit: QueueLimit, retry_ms: int
) -> BatchEngineError:
    """KEY_QUEUE_FULL for a tenant that has `held` requests under a limit of all tenants."""
    state.metrics.shed_total.labels(request.sla.sla_class.value, "key_limit").inc()
    config, setting = state.config, f"auth.keys.{request.tenant}.queue_max"
    if own_max := keys.key_of(config, request.tenant).queue_max:
        why = f"{setting} = {own_max} allows no more"
    else:
        why = f"the rest of {limit.setting} = {limit.n} is for other keys"
        is_key = any(key.name == request.tenant for key in config.auth)
        setting = f"{limit.setting}, or set {setting}" if is_key else limit.setting
    return errors.KEY_QUEUE_FULL(waiting=held, limit=why, setting=setting, retry_ms=retry_ms)


def _policy(config: Config) -> router.RoutePolicy:
    interactive, routing = config.sla.interactive, config.router
    return router.RoutePolicy(
        long_prompt_tokens=routing.long_prompt_tokens,
        urgent_ttft_ms=interactive.ttft_ms,
        urgent_tpot_ms=interactive.tpot_ms,
        tolerance=routing.tolerance,
        dwell_ms_min=routing.dwell_s * 1000,
        demote_idle_ms=routing.demote_idle_s * 1000,
        loaded_ratio=routing.loaded_ratio,
        pipeline_cached_max=CACHED_MAX,
    )
