"""How many pages of the store the sessions of a lane hold, each page counted once.

Owns the count that is checked against the scheduler's page budget. Sessions that begin with the
same tokens pin the same sealed pages: the store has one copy of them, and they count once.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchengine.engine.turns.turn import Turn
from batchengine.session import Session
from kv_store.pages.index import PageRef


class PinnedPages:
    """Pages of seated sessions in the store, without those that peers hold. The key of a page
    depends on its whole prefix, so the last sealed page and their number identify all of a session.

    While no session has another last sealed page, the result of the last step is used again.
    """

    def __init__(self) -> None:
        self.changed = False  # by the last `count`: evictable pages may have changed
        self._pinned: set[PageRef] = set()
        self._last: list[tuple[PageRef | None, int]] = []
        self._has_held = False  # a seated session begins with pages of a peer
        self._seated: frozenset[int] = frozenset()

    def count(self, running: Mapping[int, Turn], waiting: Mapping[int, Turn]) -> int:
        """Return how many pages seated sessions hold; a sealed page counts once."""
        sessions = [turn.session for turn in running.values()]
        tables = [session.kv.sealed for session in sessions]
        last = [(sealed[-1] if sealed else None, len(sealed)) for sealed in tables]
        if last != self._last:
            self._last = last
            self._pinned = set[PageRef]().union(*tables)
            self._has_held = any(session.kv.n_held for session in sessions)
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
        n_local = len(session.kv.codes) - session.kv.n_held
        if self._has_held or session.kv.n_held:
            return n_local - sum([ref in self._pinned for ref in pinned])
        while low < high:  # the shared pages are a prefix of the table
            middle = (low + high) // 2
            if pinned[middle] in self._pinned:
                low = middle + 1
            else:
                high = middle
        return n_local - low
