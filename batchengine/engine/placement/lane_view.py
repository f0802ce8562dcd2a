"""Load of every lane, for the router.

Owns a cached `LaneState` per lane, and the average length of answers, which is part of the load. A
prompt that a pipeline computes is no session of its lane until then, but work of its stages. A lane
with many sessions is counted again every REFRESH_MS, and its load is estimated in between.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from batchengine.config import keys
from batchengine.core import PAGE_TOKENS, GenerationRequest
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.pipelines import PipelineQueue
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.policy import cost, router, scheduler
from batchengine.policy.capacity import COPY_GBPS
from batchengine.policy.cost import LoadRow

REFRESH_MS = 20.0  # a lane of many sessions is counted this often, and estimated in between
FEW_ROWS = 128  # a lane of at most so many sessions is counted after every change
# An answer without a hint at its length is not expected to be longer: limits are far above what
# comes, and the rest of the context without one.
TOKENS_OUT_MAX = 2048
ANSWER_GAIN = 0.05  # weight of the newest answer in the average share of tokens_max


class QueueLimit(NamedTuple):
    """How many requests may wait, and the setting that says so."""

    setting: str
    n: int


@dataclass(slots=True)
class _Counted:
    """A cached lane state, its input counters, its time (ms), its rows with their tenants, how many
    turns of each tenant wait, and the load of a tenant in its share of the lane."""

    state: router.LaneState
    mark: tuple[object, ...]
    at_ms: float
    rows: list[tuple[str, LoadRow]]
    turns: Counter[str]
    waiting: Counter[str]
    alone: dict[str, cost.LaneLoad] = field(default_factory=dict[str, cost.LaneLoad])


def copy_token_ms(loop: LaneLoop) -> float:
    """Time to copy the KV of a token to a GPU; 0 for a lane whose memory is that of the host."""
    if loop.config.kind != "cuda" or loop.lane.facts is None:
        return 0.0
    return loop.lane.facts.payload_bytes / PAGE_TOKENS / (COPY_GBPS * 1e6)


def scored_ms_of(loop: LaneLoop, request: GenerationRequest, n_tokens: int) -> float:
    """Time that tokens of a prompt take on a lane besides, if the request wants their
    log-probabilities; 0 = it does not."""
    return loop.cost.scored_ms(n_tokens) if request.prompt_logprobs >= 0 else 0.0


class LaneViews:
    """Cached states of the lanes of one engine."""

    def __init__(self, state: EngineState, queue: PipelineQueue) -> None:
        self._state, self._queue = state, queue
        self._counted: dict[LaneLoop, _Counted] = {}
        self._answer_share = 1.0

    def all(
        self, tenant: str | None = None, *, scored: bool = False
    ) -> tuple[router.LaneState, ...]:
        """Return the state of every lane, in the order of the configuration.

        For a tenant, a lane is also full whose queue holds that tenant's share of requests. With
        `scored` their costs are those of a prompt whose log-probabilities are wanted.
        """
        states = [self.of(loop) for loop in self._state.lanes]
        if tenant is not None and not keys.is_alone(self._state.config, tenant):
            for index, loop in enumerate(self._state.lanes):
                if not states[index].full and self._is_full_for(loop, tenant):
                    states[index] = msgspec.structs.replace(states[index], full=True)
        for index, loop in enumerate(self._state.lanes if scored else ()):
            load = states[index].load
            token_ms = load.cost.prefill_token_ms + loop.cost.scored_ms(1)
            load = msgspec.structs.replace(load, cost=load.cost._replace(prefill_token_ms=token_ms))
            states[index] = msgspec.structs.replace(states[index], load=load)
        return tuple(states)

    def _is_full_for(self, loop: LaneLoop, tenant: str) -> bool:
        waiting, config = self._counted[loop].waiting, self._state.config
        held, taken, own_max = (
            waiting[tenant],
            waiting.total(),
            keys.key_of(config, tenant).queue_max,
        )
        return not keys.may_take(config, tenant, held, self.queue_limit(loop).n, taken, own_max)

    def queue_limit(self, loop: LaneLoop) -> QueueLimit:
        """What bounds the queue of a lane."""
        if own := loop.config.queue_max:
            return QueueLimit(f"queue_max of [[lane]] {loop.lane.name}", own)
        return QueueLimit("limits.queue_max", self._state.config.limits.queue_max)

    def wait_ms(self, loop: LaneLoop, rank: int, tenant: str) -> float:
        """Predict the ms until work of a request that joins now begins.

        Beside other tenants, no longer than with the tenant's share of the lane alone.
        """
        load, counted = self.of(loop).load, self._counted[loop]
        wait_ms = cost.wait_ms(load, rank)
        others = set(counted.turns) - {tenant}
        if not others or not wait_ms:
            return wait_ms
        config = self._state.config
        weight = keys.key_of(config, tenant).weight
        share = weight / (weight + sum(keys.key_of(config, name).weight for name in others))
        if tenant not in counted.alone:
            own = [row for name, row in counted.rows if name == tenant]
            seats = max(1, int(load.seats * share))
            counted.alone[tenant] = cost.load_of(load.cost, seats, load.chunk_tokens, own)
        return min(wait_ms, cost.wait_ms(counted.alone[tenant], rank) / share)

    def of(self, loop: LaneLoop) -> router.LaneState:
        """Return the state of one lane; a busy lane's may be up to REFRESH_MS old."""
        now_ms = self._state.now_ms()
        rows = max(loop.assigned, len(loop.running) + len(loop.waiting))
        mark = (
            loop.meter.steps,
            loop.cost.cost,
            loop.assigned,
            rows,
            loop.up,
            bool(loop.outage.failed_starts),
            loop.context_max,
            self._queue.changes,
            loop.stages.pieces,
            len(loop.stages),
        )
        counted = self._counted.get(loop)
        if counted is not None:
            few = rows <= FEW_ROWS or not counted.state.alive
            if counted.mark == mark or not (few or now_ms - counted.at_ms > REFRESH_MS):
                return counted.state
        self._counted[loop] = self._count(loop, mark, now_ms)
        return self._counted[loop].state

    def joined(
        self,
        loop: LaneLoop,
        tenant: str,
        rank: int,
        frontier: int,
        n_tokens: int,
        scored_ms: float = 0.0,
    ) -> None:
        """Add a request that was routed to the lane to its cached load."""
        counted = self._counted.get(loop)
        if counted is not None:
            load = cost.joined(counted.state.load, rank, frontier, n_tokens, scored_ms)
            counted.state = msgspec.structs.replace(counted.state, load=load)
            if (alone := counted.alone.get(tenant)) is not None:
                counted.alone[tenant] = cost.joined(alone, rank, frontier, n_tokens, scored_ms)
            counted.turns[tenant] += 1
            counted.waiting[tenant] += 1

    def asked(self, request: GenerationRequest) -> router.RouteRequest:
        """Return the request as the router sees it, with its own targets or those of its class."""
        sla, n_prompt = request.sla, len(request.prompt)
        targets = self._state.config.sla.of(sla.sla_class)
        return router.RouteRequest(
            scheduler.RANK[sla.sla_class],
            n_prompt,
            self.tokens_out(request),
            n_prompt + request.tokens_max,
            max(1.0, targets.ttft_ms if sla.ttft_ms is None else sla.ttft_ms),
            max(0.1, targets.tpot_ms if sla.tpot_ms is None else sla.tpot_ms),
            math.inf if sla.ttlt_ms is None else max(1.0, sla.ttlt_ms),
            request.promote,
        )

    def tokens_out(self, request: GenerationRequest) -> int:
        """Estimate how many tokens the answer will have."""
        expected = request.expected_output_tokens
        if expected is None:
            expected = int(self._answer_share * answer_max(request))
        return max(1, min(expected, request.tokens_max))

    def learn_answer(self, tokens: int, tokens_max: int) -> None:
        """Learn from an answer that was complete after `tokens` of at most `tokens_max` tokens."""
        tokens_max = min(tokens_max, TOKENS_OUT_MAX)
        if tokens_max > 0:
            tokens = min(tokens, tokens_max)
            self._answer_share += ANSWER_GAIN * (tokens / tokens_max - self._answer_share)

    def _count(self, loop: LaneLoop, mark: tuple[object, ...], now_ms: float) -> _Counted:
        config = loop.config
        step = loop.cost.cost
        step = step._replace(fixed_ms=step.fixed_ms + loop.meter.overhead_ms)
        rows = self._rows(loop)
        stage_ms = loop.stages.left_ms(step)
        if is_linked := loop is self._state.lanes[0]:
            stage_ms += self._queue.lane_ms(step)
        load = cost.load_of(
            step, config.entries_max, config.chunk_tokens_max, [row for _, row in rows], stage_ms
        )
        waiting = Counter(turn.session.tenant for turn in loop.waiting.values())
        waiting.update(turn.session.tenant for turn in self._joining(loop))
        turns = waiting + Counter(turn.session.tenant for turn in loop.running.values())
        state = router.LaneState(
            loop.lane.name,
            load,
            loop.up,
            config.tier or router.ANY,
            config.pool,
            loop.context_max,
            waiting.total() >= self.queue_limit(loop).n,
            is_linked,
            not (loop.up or loop.draining or loop.outage.failed_starts),
            copy_token_ms(loop),
        )
        return _Counted(state, mark, now_ms, rows, turns, waiting)

    def _rows(self, loop: LaneLoop) -> list[tuple[str, LoadRow]]:
        found: list[tuple[str, LoadRow]] = []
        for turns, seated in ((loop.running, True), (loop.waiting, False)):
            for turn in turns.values():
                if turn.paused:
                    continue
                session, generation = turn.session, turn.generation
                left = self.tokens_out(generation.request) - generation.completion_tokens
                frontier = session.frontier
                to_compute = max(1, len(session.tokens) - frontier)
                scored_ms = scored_ms_of(loop, generation.request, to_compute)
                row = LoadRow(turn.rank, frontier, to_compute, max(1, left), seated, scored_ms)
                found.append((session.tenant, row))
        for turn in self._joining(loop):
            if turn.generation in self._queue:
                continue  # part of `stage_ms`
            request = turn.generation.request
            n_prompt, left = len(request.prompt), self.tokens_out(request)
            scored_ms = scored_ms_of(loop, request, n_prompt)
            row = LoadRow(turn.rank, 0, n_prompt, left, False, scored_ms)
            found.append((turn.session.tenant, row))
        return found

    def _joining(self, loop: LaneLoop) -> list[Turn]:
        """Return turns that were routed to the lane and are not in its tables yet."""
        if loop.assigned <= len(loop.running) + len(loop.waiting):
            return []
        return [
            turn
            for turn in self._state.turns.values()
            if turn.end is None
            and self._state.home.get(turn.session.key) is loop
            and turn.session.key not in loop.running
            and turn.session.key not in loop.waiting
        ]


def answer_max(request: GenerationRequest) -> int:
    """The longest answer that is expected."""
    return min(request.tokens_max, max(TOKENS_OUT_MAX, request.expected_output_tokens or 0))
