"""Parking: the open tail of a session at rest goes to the store, and its KV may leave the lane.

Owns when that happens: at the end of a turn whose session waits for a tool, when the engine stops,
or when an operation asks for it.
"""

from __future__ import annotations

import asyncio

from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.session import Session, State

PARK_S = 5.0  # a frame, a write and a commit: milliseconds, unless the store is stuck


class Parking:
    """Parks sessions of one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def takes(self, turn: Turn) -> bool:
        """The turn is over: whether its session waits for a tool now, and is to be parked."""
        facts = self._state.facts.get(turn.session.key)
        if facts is not None and facts.parks is not None:
            facts.parks = None
            return True
        return turn.generation.request.park

    async def park_all(self) -> None:
        """Before the engine stops: no tail of a session at rest is to be computed again."""
        named = [s for s in self._state.sessions.values() if self._state.is_at_rest(s)]
        await asyncio.gather(*(self.park(session, leave=False) for session in named))

    async def park(self, session: Session, *, leave: bool) -> None:
        """Have the open tail sealed; then, if the session is to leave the lane, drop its table.

        What it had is found again by its content. A session that runs again meanwhile stays.
        """
        loop = self._state.home.get(session.key)
        if loop is None or session.state is not State.IDLE:
            return
        if (parked := loop.park(session)) is not None:
            await asyncio.wait([parked], timeout=PARK_S)
            parked.cancel()
        is_still_there = self._state.home.get(session.key) is loop
        if leave and is_still_there and self._state.is_at_rest(session):
            loop.kv.slots.truncate(session, 0)
            loop.wake()
