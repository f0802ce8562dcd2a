"""Parking: seals the open tail of a session at rest into the store, and may free its lane slots.

Owns when that happens: at the end of a turn whose session waits for a tool, when the engine stops,
or when an operation requests it.
"""

from __future__ import annotations

import asyncio

from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.session import Session, State

PARK_S = 5.0  # timeout; a frame, a write and a commit take milliseconds


class Parking:
    """Parks sessions of one engine."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def takes(self, turn: Turn) -> bool:
        """Whether the session of a turn that ended waits for a tool, and must be parked."""
        facts = self._state.facts.get(turn.session.key)
        if facts is not None and facts.parks is not None:
            facts.parks = None
            return True
        return turn.generation.request.park

    async def park_all(self) -> None:
        """Park every named session at rest, so that the next run need not recompute its tail."""
        named = [s for s in self._state.sessions.values() if self._state.is_at_rest(s)]
        await asyncio.gather(*(self.park(session, leave=False) for session in named))

    async def park(self, session: Session, *, leave: bool) -> None:
        """Have the open tail sealed; then, if the session is to leave the lane, drop its table.

        Its next turn finds the pages of this daemon by content; those that peers hold stay in it. A
        session that runs again meanwhile stays.
        """
        loop = self._state.home.get(session.key)
        if loop is None or session.state is not State.IDLE:
            return
        if (parked := loop.park(session)) is not None:
            await asyncio.wait([parked], timeout=PARK_S)
            parked.cancel()
        is_still_there = self._state.home.get(session.key) is loop
        if leave and is_still_there and self._state.is_at_rest(session):
            loop.kv.slots.keep_held(session)
            loop.wake()
