"""Load of every lane, for the router.

Owns a cached `LaneState` per lane, and the average length of answers, which is part of the load. A
lane with many sessions is counted again every REFRESH_MS, and its load is estimated in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from batchengine.core import GenerationRequest
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.policy import cost, router
from batchengine.policy.cost import LoadRow

REFRESH_MS = 20.0  # a lane of many sessions is counted this often, and estimated in between
FEW_ROWS = 128  # a lane of at most so many sessions is counted after every change
ANSWER_GAIN = 0.05  # weight of the newest answer in the average share of tokens_max


@dataclass(slots=True)
class _Counted:
    """A cached lane state, its input counters, and its time (ms)."""

    state: router.LaneState
    mark: tuple[object, ...]
    at_ms: float


class LaneViews:
    """Cached states of the lanes of one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._counted: dict[LaneLoop, _Counted] = {}
        self._answer_share = 1.0

    def all(self) -> tuple[router.LaneState, ...]:
        """Return the state of every lane, in the order of the configuration."""
        return tuple([self.of(loop) for loop in self._state.lanes])

    def of(self, loop: LaneLoop) -> router.LaneState:
        """Return the state of one lane; a busy lane's may be up to REFRESH_MS old."""
        now_ms = self._state.now_ms()
        rows = max(loop.assigned, len(loop.running) + len(loop.waiting))
        mark = (loop.meter.steps, loop.assigned, rows, loop.up)
        counted = self._counted.get(loop)
        if counted is not None:
            few = rows <= FEW_ROWS or not counted.state.alive
            if counted.mark == mark or not (few or now_ms - counted.at_ms > REFRESH_MS):
                return counted.state
        state = self._count(loop)
        self._counted[loop] = _Counted(state, mark, now_ms)
        return state

    def joined(self, loop: LaneLoop, rank: int, frontier: int, n_tokens: int) -> None:
        """Add a request that was routed to the lane to its cached load."""
        counted = self._counted.get(loop)
        if counted is not None:
            load = cost.joined(counted.state.load, rank, frontier, n_tokens)
            counted.state = msgspec.structs.replace(counted.state, load=load)

    def tokens_out(self, request: GenerationRequest) -> int:
        """Estimate how many tokens the answer will have."""
        expected = request.expected_output_tokens
        if expected is None:
            expected = int(self._answer_share * request.tokens_max)
        return max(1, min(expected, request.tokens_max))

    def learn_answer(self, tokens: int, tokens_max: int) -> None:
        """Learn from an answer that was complete after `tokens` of at most `tokens_max` tokens."""
        if tokens_max > 0:
            self._answer_share += ANSWER_GAIN * (tokens / tokens_max - self._answer_share)

    def _count(self, loop: LaneLoop) -> router.LaneState:
        config = loop.config
        step = loop.cost.cost
        step = step._replace(fixed_ms=step.fixed_ms + loop.meter.overhead_ms)
        joining = self._joining(loop)
        rows = self._rows(loop, joining)
        load = cost.load_of(step, config.entries_max, config.chunk_tokens_max, rows)
        queue_max = config.queue_max or self._state.config.limits.queue_max
        n_waiting = len(loop.waiting) + len(joining)
        return router.LaneState(
            loop.lane.name,
            load,
            loop.up,
            config.tier or router.ANY,
            config.pool,
            loop.context_max,
            n_waiting >= queue_max,
        )

    def _rows(self, loop: LaneLoop, joining: Sequence[Turn]) -> Iterable[LoadRow]:
        for turns, seated in ((loop.running, True), (loop.waiting, False)):
            for turn in turns.values():
                if turn.paused:
                    continue
                session, generation = turn.session, turn.generation
                left = self.tokens_out(generation.request) - generation.completion_tokens
                frontier = session.frontier
                to_compute = max(1, len(session.tokens) - frontier)
                yield LoadRow(turn.rank, frontier, to_compute, max(1, left), seated)
        for turn in joining:
            request = turn.generation.request
            n_prompt, left = len(request.prompt), self.tokens_out(request)
            yield LoadRow(turn.rank, 0, n_prompt, left, False)

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
