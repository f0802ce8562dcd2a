"""How many pages the sessions of a lane hold, each page counted once.

Owns the count that the scheduler's page budget is checked against. A fleet of sessions that begin
with the same tokens pins the same sealed pages: they cost the store one copy, and count as one.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchengine.engine.turns.turn import Turn
from batchengine.session import Session
from kv_store.pages.index import PageRef


class PinnedPages:
    """Pages of seated sessions. A page follows its whole prefix, so the last one names them all.

    That makes it cheap before every step: as long as no session has another last sealed page,
    the pages are those of the last step.
    """

    def __init__(self) -> None:
        self.changed = False  # at the last `count`: what is evictable may have changed
        self._pinned: set[PageRef] = set()
        self._last: list[PageRef | None] = []
        self._seated: frozenset[int] = frozenset()

    def count(self, running: Mapping[int, Turn], waiting: Mapping[int, Turn]) -> int:
        """Pages that seated sessions hold: sealed ones once, open ones belong to one session."""
        sessions = [turn.session for turn in running.values()]
        last = [session.kv.sealed[-1] if session.kv.sealed else None for session in sessions]
        if last != self._last:
            self._last = last
            self._pinned = set[PageRef]().union(*[session.kv.sealed for session in sessions])
        seated = frozenset(running)
        self.changed = seated != self._seated
        if self.changed:
            self._seated = seated
            for turn in waiting.values():
                if turn.session.kv.sealed:
                    turn.cached_row = None
        return len(self._pinned) + sum([len(session.kv.open) for session in sessions])

    def evictable(self, session: Session) -> int:
        """Pages of a waiting session that no seated one holds: they are evictable."""
        pinned, low, high = session.kv.sealed, 0, len(session.kv.sealed)
        while low < high:  # what is shared is a prefix
            middle = (low + high) // 2
            if pinned[middle] in self._pinned:
                low = middle + 1
            else:
                high = middle
        return len(session.kv.codes) - low
