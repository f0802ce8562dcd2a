"""How many pages the sessions of a lane hold, each page counted once.

Owns the count that is checked against the scheduler's page budget. Sessions that begin with the
same tokens pin the same sealed pages: the store has one copy of them, and they count once.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchengine.engine.turns.turn import Turn
from batchengine.session import Session
from kv_store.pages.index import PageRef


class PinnedPages:
    """Pages of seated sessions. The key of a page depends on its whole prefix, so the last sealed
    page identifies all of a session.

    While no session has another last sealed page, the result of the last step is used again.
    """

    def __init__(self) -> None:
        self.changed = False  # by the last `count`: evictable pages may have changed
        self._pinned: set[PageRef] = set()
        self._last: list[PageRef | None] = []
        self._seated: frozenset[int] = frozenset()

    def count(self, running: Mapping[int, Turn], waiting: Mapping[int, Turn]) -> int:
        """Return how many pages seated sessions hold; a sealed page counts once."""
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
        """Return how many pages of a waiting session can be evicted: no seated one holds them."""
        pinned, low, high = session.kv.sealed, 0, len(session.kv.sealed)
        while low < high:  # the shared pages are a prefix of the table
            middle = (low + high) // 2
            if pinned[middle] in self._pinned:
                low = middle + 1
            else:
                high = middle
        return len(session.kv.codes) - low
