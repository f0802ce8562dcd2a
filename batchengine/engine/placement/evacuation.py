"""Evacuation: moves turns from a lane that is down to other lanes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.move_report import MoveCause
from batchengine.engine.state import EngineState
from batchengine.engine.tasks import Spawn
from batchengine.session import Session

Move = Callable[[Session, LaneLoop, MoveCause], Awaitable[object]]


class Evacuation:
    """Evacuates the lanes of one engine."""

    def __init__(self, state: EngineState, move: Move, spawn: Spawn) -> None:
        """`spawn` runs a task that nothing awaits."""
        self._state, self._move, self._spawn = state, move, spawn
        self._under_way: set[LaneLoop] = set()

    def __repr__(self) -> str:
        return f"<Evacuation of {[loop.lane.name for loop in self._under_way]}>"

    async def follow(self, loop: LaneLoop) -> None:
        """Begin whenever the lane's worker has ended or cannot start, until cancelled. Turns of a
        lane that cannot start fail if no other lane is up."""
        outage = loop.outage
        while True:
            await outage.news.wait()
            outage.news.clear()
            self.begin(loop)
            if outage.failure is not None and not self._others(loop):
                for turn in loop.seats.turns:
                    loop.seats.fail(turn, outage.failure)

    def begin(self, loop: LaneLoop) -> None:
        """Begin to move turns if the lane is down."""
        if loop not in self._under_way and self._evacuees(loop):
            self._spawn(self._evacuate(loop), "evacuation")

    def refuge(self, away_from: LaneLoop) -> LaneLoop | None:
        """Return the other lane that is up with most free seats, or None if none has any, except
        for turns of a lane that cannot start: these may wait for a seat."""
        able = self._others(away_from)
        best = max(able, key=lambda loop: loop.seats.free, default=None)
        if best is None or not (best.seats.free > 0 or away_from.outage.failed_starts):
            return None
        return best

    def _others(self, away_from: LaneLoop) -> list[LaneLoop]:
        lanes = self._state.lanes
        return [loop for loop in lanes if loop is not away_from and loop.up and not loop.stopping]

    async def _evacuate(self, loop: LaneLoop) -> None:
        self._under_way.add(loop)
        try:
            for session in self._evacuees(loop):
                to = self.refuge(loop)
                if (loop.kv.slots.is_attached and not loop.draining) or to is None:
                    return
                await self._move(session, to, MoveCause.EVACUATION)
        finally:
            self._under_way.discard(loop)

    def _evacuees(self, loop: LaneLoop) -> list[Session]:
        """Return sessions with turns on a lane that is down, except suspects if one of them may be
        the cause; of a drained lane only after they have dropped its rows."""
        settled = not loop.is_rechecking if loop.draining else not loop.kv.slots.is_attached
        if not settled or loop.stopping:
            return []
        turns = [*loop.running.values(), *loop.waiting.values()]
        all_leave = loop.outage.may_be_the_lane
        return [turn.session for turn in turns if all_leave or not turn.session.suspect]
