"""How many pages the sessions of a lane hold, each page counted once.

Owns the count that the scheduler's page budget is checked against. A fleet of sessions that begin
with the same tokens pins the same sealed pages: they cost the store one copy, and count as one.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchengine.engine.turn import Turn
from batchengine.session import Session
from kv_store.pages import PageRef


class SharedPages:
    """Pages of seated sessions. A page follows its whole prefix, so the last one names them all.

    That makes it cheap before every step: as long as nobody's last sealed page is another one,
    the pages are those of the last step.
    """

    def __init__(self) -> None:
        self.changed = False  # at the last `count`: what is loose may have become more or less
        self._pinned: set[PageRef] = set()
        self._last: list[PageRef | None] = []
        self._seated: frozenset[int] = frozenset()

    def count(self, running: Mapping[int, Turn], waiting: Mapping[int, Turn]) -> int:
        """Pages that seated sessions hold: sealed ones once, open ones are nobody else's."""
        sessions = [turn.session for turn in running.values()]
        last = [session.pinned[-1] if session.pinned else None for session in sessions]
        if last != self._last:
            self._last = last
            self._pinned = set[PageRef]().union(*[session.pinned for session in sessions])
        seated = frozenset(running)
        self.changed = seated != self._seated
        if self.changed:
            self._seated = seated
            for turn in waiting.values():
                if turn.session.pinned:
                    turn.cached_row = None
        return len(self._pinned) + sum([len(session.places) for session in sessions])

    def loose(self, session: Session) -> int:
        """Pages of a waiting session that no seated one holds: they are free to evict."""
        pinned, low, high = session.pinned, 0, len(session.pinned)
        while low < high:  # what is shared is a prefix
            middle = (low + high) // 2
            if pinned[middle] in self._pinned:
                low = middle + 1
            else:
                high = middle
        return len(session.codes) - low
