"""Stages of pipelines that one lane computes, between its ordinary steps.

Owns which stage is computed, how many tokens at a time, and the share of time: a lane with other
work spends on stages at most as long as on its steps, and on those of one tenant no more than its
share beside the others. Stages of one owner are computed in the order in which they came, so that
prompts leave a pipeline one after another, and a later one only delays itself; several owners have
turns. A stage whose rows have not come lets others go first. Knows no link: its caller says which
rows have come, and hears the end of a stage.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from batchengine.config import LaneConfig
from batchengine.engine.lane.seats import Seats
from batchengine.lanes.worker_process import Lane
from batchengine.policy.cost import StepCost, prefill_ms, work_of
from batchengine.wire import lane as wire

PIECE_MS = 400.0  # predicted time of one piece
URGENT_PIECE_MS = 100.0  # while requests wait for it that are not throughput-tolerant
DEADLINE_S = 60.0
PIECES = (1024, 512, 256, 128, 64, 32)  # tokens


class StageOwner(NamedTuple):
    """Whose prompt it is: one of a peer's, or of a tenant of this daemon (`peer` is "")."""

    peer: str = ""
    tenant: str = ""


NO_OWNER = StageOwner()


@dataclass(eq=False, slots=True)
class StageWork:
    """One stage: its share of the model's layers, and how far its rows have come.

    `tokens` are those of the timeline for the first stage, else none. `chunk_tokens` are computed
    at a time, at most, and none beyond a multiple of `state_interval` (0: any). `allowed`: position
    before which the owner has room for pages and states.
    """

    run: int
    layer_share: float
    n_tokens: int
    chunk_tokens: int
    tokens: array[int]
    state_interval: int = 0
    owner: StageOwner = NO_OWNER
    frontier: int = 0
    arrived: int = 0
    allowed: int = 0

    @property
    def due(self) -> int:
        """Tokens that can be computed now."""
        until = min(self.arrived, self.allowed)
        if self.state_interval:
            until = min(until, (self.frontier // self.state_interval + 1) * self.state_interval)
        return until - self.frontier


class StageQueue:
    """The stages of one lane; the lane's loop calls `run`.

    `on_ended(run, why)` is called when a stage has ended by itself, `on_step` before each look of
    the loop for something to do. `pieces` counts what was computed.
    """

    def __init__(self, config: LaneConfig) -> None:
        self.on_ended: Callable[[int, str], None] = lambda run, why: None
        self.on_step: Callable[[], None] = lambda: None
        self._tokens_max = config.tokens_per_step
        self.pieces = 0
        self._works: dict[int, StageWork] = {}  # in the order in which they came
        self._owners: deque[StageOwner] = deque()  # the next in turn first
        self._owed_ms = 0.0  # by the stages to the lane's steps

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: StageWork) -> None:
        """Compute a stage, which the lane's worker has opened, as its rows come."""
        self._works[work.run] = work
        if work.owner not in self._owners:
            self._owners.append(work.owner)

    def get(self, run: int) -> StageWork | None:
        """The stage of a pipeline; None if it has ended."""
        return self._works.get(run)

    def remove(self, run: int) -> None:
        """Compute no more of a stage."""
        work = self._works.pop(run, None)
        if work is not None and all(other.owner != work.owner for other in self._works.values()):
            self._owners.remove(work.owner)

    def left_ms(self, cost: StepCost, peer: str = "") -> float:
        """Predict how long the stages for peers still take, or those for one of them."""
        return sum(
            [
                work.layer_share * prefill_ms(cost, work.frontier, work.n_tokens - work.frontier)
                for work in self._works.values()
                if work.owner.peer and peer in ("", work.owner.peer)
            ]
        )

    async def run(self, lane: Lane, cost: StepCost, seats: Seats, *, idle: bool) -> bool:
        """Compute a piece if one is due; `idle`: no turn has a seat now.

        Returns whether one was. Errors as of `Lane.answer`.
        """
        self.on_step()
        if idle:
            self._owed_ms = 0.0
        if self._owed_ms > 0.0 or (work := self._next()) is None:
            return False
        limit_ms = URGENT_PIECE_MS if seats.have_urgent() else PIECE_MS
        step, payload = self._piece(work, cost, limit_ms)
        done = await lane.run_stage(step, payload, deadline_s=DEADLINE_S)
        self.pieces += 1
        ratio = 1.0 if work.owner.peer else seats.owed_to_steps(work.owner.tenant)
        self._owed_ms += ratio * done.elapsed_us / 1000
        work.frontier += step.n_tokens
        if done.why and self._works.get(work.run) is work:
            self._end(work, done.why)
        return True

    def stepped(self, ms: float) -> None:
        """Note that the lane computed a step of its own for so long."""
        self._owed_ms = max(0.0, self._owed_ms - ms)

    def _next(self) -> StageWork | None:
        """The first stage that is due, of the next owner in turn that has one."""
        for _ in range(len(self._owners)):
            owner = self._owners[0]
            self._owners.rotate(-1)
            for work in self._works.values():
                if work.owner == owner and work.due > 0:
                    return work
        return None

    def _piece(
        self, work: StageWork, cost: StepCost, limit_ms: float
    ) -> tuple[wire.StageStep, bytes]:
        """Frame and payload of the next piece of a stage, which takes `limit_ms` at most if it has
        more than the fewest tokens."""
        at = work.frontier
        fits = (
            n
            for n in PIECES
            if n <= min(self._tokens_max, work.chunk_tokens)
            and work.layer_share * cost.predict_ms(work_of([(at, n)])) <= limit_ms
        )
        n = min(work.due, next(fits, PIECES[-1]))
        return wire.StageStep(work.run, at, n), work.tokens[at : at + n].tobytes()

    def died(self) -> None:
        """End every stage, after the worker's exit."""
        for work in list(self._works.values()):
            self._end(work, "its worker died")

    def _end(self, work: StageWork, why: str) -> None:
        self.remove(work.run)
        self.on_ended(work.run, why)
