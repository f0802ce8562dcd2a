"""Queue of open pages that the next frame digests, besides those that its own entries fill."""

from __future__ import annotations

from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.kv.slots import Slots
from batchengine.session import Session, State
from batchengine.session_kv import full_pages, page_start, rows_in
from kv_store.arenas.arena import ArenaSlot

REST_TICKS = 3  # seconds a session is idle before its tail is parked


class DueDigest(NamedTuple):
    """Leading rows of an open page to digest: 256, or fewer of a tail that will be parked."""

    session: Session
    page: int
    rows: int
    slot: ArenaSlot


class DigestQueue:
    """Digests to compute in the next frame: of imported full pages, and of tails to park."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._due: dict[ArenaSlot, DueDigest] = {}
        self._rested: dict[Session, int] = {}  # ticks without a run

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, session: Session, page: int, slot: ArenaSlot) -> None:
        """Queue a full page that was imported into the arena."""
        self._due[slot] = DueDigest(session, page, PAGE_TOKENS, slot)

    def add_tail(self, session: Session) -> bool:
        """Queue the open tail of a session that does not run. False if there is none to park."""
        page, slot = full_pages(session.frontier), session.kv.slot_at(session.frontier)
        rows = rows_in(page, session.frontier)
        if not rows or slot is None or session.kv.parked is not None:
            return False
        if slot in self._slots.seals or not self.may_park(session):
            return False
        self._due[slot] = DueDigest(session, page, rows, slot)
        return True

    def may_park(self, session: Session) -> bool:
        """Whether the session is a member that does not run."""
        return self._slots.owns(session) and session.state in (State.IDLE, State.WAITING)

    def tick(self) -> list[Session]:
        """Return the sessions that have now been idle for REST_TICKS calls, or for 2, 4, 8, …
        times as many: a tail cannot be parked while an earlier one is. Call once a second."""
        self._rested = {
            session: self._rested.get(session, 0) + 1
            for session in self._slots.reclaimable
            if session.state is State.IDLE
        }
        return [session for session, ticks in self._rested.items() if _is_rested(ticks)]

    def take(self) -> list[DueDigest]:
        """Take the digests of the next frame.

        The worker zeroes a tail beyond its rows first: never while its session computes.
        """
        due, self._due = self._due, {}
        return [digest for digest in due.values() if self.is_due(*digest)]

    def is_due(self, session: Session, page: int, rows: int, slot: ArenaSlot) -> bool:
        """Whether the slot still holds these rows of the session, and no others."""
        if not self._slots.owns(session) or slot not in session.kv.open:
            return False
        if rows == PAGE_TOKENS:
            return session.frontier >= page_start(page + 1)
        return self.may_park(session) and session.frontier == page_start(page) + rows

    def clear(self) -> None:
        """Drop all queued digests."""
        self._due = {}


def _is_rested(ticks: int) -> bool:
    times, rest = divmod(ticks, REST_TICKS)
    return not rest and times.bit_count() == 1
