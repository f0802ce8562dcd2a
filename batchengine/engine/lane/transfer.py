"""Freezes and thaws sessions on one lane: the lane's part of a migration.

Owns the requests to freeze that wait for the end of a step. The protocol of a migration is in
`placement.migration`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from batchengine.engine.lane.seats import Seats
from batchengine.engine.turns.turn import Turn
from batchengine.kv import LaneKv
from batchengine.session import Event, Session, State


class Frozen(NamedTuple):
    """What a frozen session had on its lane: its turn, if any, and whether that had a seat.

    `last_ms` is when its last token was committed, `audits` the number of audits until then.
    """

    turn: Turn | None
    seated: bool
    last_ms: float
    audits: int


class Transfers:
    """Freeze and thaw of one lane's sessions, and futures of conditions on its pages. All methods
    run between two steps, except `at_boundary` and `when`."""

    def __init__(self, lane_name: str, kv: LaneKv, seats: Seats) -> None:
        self.due: list[tuple[Session, asyncio.Future[Frozen | None]]] = []  # at the next boundary
        self._waits: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._lane_name = lane_name
        self._kv = kv
        self._seats = seats

    @property
    def is_due(self) -> bool:
        """Whether anything waits for a moment between two steps."""
        return bool(self.due or self._waits)

    def at_boundary(self, session: Session) -> asyncio.Future[Frozen | None]:
        """Have the session frozen at the end of the step in flight."""
        boundary: asyncio.Future[Frozen | None] = asyncio.get_running_loop().create_future()
        self.due.append((session, boundary))
        return boundary

    def take_due(self) -> list[tuple[Session, asyncio.Future[Frozen | None]]]:
        """Return the sessions to freeze now with their futures, except those that are done."""
        due, self.due = self.due, []
        return [(session, boundary) for session, boundary in due if not boundary.done()]

    def when(self, holds: Callable[[], bool]) -> asyncio.Future[None]:
        """Return a future that resolves between two steps, or now, once `holds` returns True."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.append((holds, future))
        self.settle_waits()
        return future

    def settle_waits(self) -> None:
        """Resolve the futures of `when` whose condition holds now."""
        for wait in list(self._waits):
            holds, future = wait
            if future.done() or holds():
                self._waits.remove(wait)
                if not future.done():
                    future.set_result(None)

    def freeze(self, session: Session) -> Frozen | None:
        """Take the session out of the plan; None if it is frozen or closed already.

        Call after its tokens were emitted, and its invalid pages dropped.
        """
        if session.state in (State.FROZEN, State.CLOSED):
            return None
        turn, seated = self._seats.take(session)
        session.on(Event.FREEZE)
        self._seats.forget_arrival(session)
        self._kv.slots.protect(session)
        last_ms = self._seats.now_ms() if turn is None else turn.served_ms
        return Frozen(turn, seated, last_ms, self._kv.disputes.audits)

    def thaw(self, session: Session, frozen: Frozen) -> bool:
        """Continue the session on this lane, with the seat and the deadline it had.

        Returns whether an audit took place meanwhile: then open rows are dropped, and the turn must
        match its prompt with the store again.
        """
        session.on(Event.THAW)
        self._kv.slots.enter(session)
        turn = frozen.turn
        self._kv.slots.make_reclaimable(session)
        if turn is not None:
            self._seats.wait(turn)
            self._seats.forget_row(turn)
            if turn.generation.started_ms is not None:
                turn.generation.lane = self._lane_name
            if frozen.seated and (turn.paused or self._seats.free > 0):
                self._seats.seat(session.key)
        if frozen.audits == self._kv.disputes.audits:
            return False
        self._kv.slots.keep_sealed(session)
        return True
