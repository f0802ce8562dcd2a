"""The order in which pages are evicted: lowest priority first, then least recently used.

Holds only evictable pages; which pages those are is decided elsewhere. Every operation costs at
most O(log n): a page that was used just now is appended, one that becomes evictable again with an
older use (its last descendant was evicted) goes into a heap.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict


class _Level:
    """Pages of one priority. `recent` is ordered by use; `older` is a heap with stale entries,
    of which those that agree with `uses` are valid."""

    def __init__(self) -> None:
        self.recent: OrderedDict[int, int] = OrderedDict()
        self.older: list[tuple[int, int]] = []
        self.uses: dict[int, int] = {}

    def add(self, page_id: int, use: int) -> None:
        if not self.recent or use >= self.recent[next(reversed(self.recent))]:
            self.recent[page_id] = use
        else:
            self.uses[page_id] = use
            heapq.heappush(self.older, (use, page_id))

    def remove(self, page_id: int) -> None:
        if self.recent.pop(page_id, None) is None:
            self.uses.pop(page_id, None)

    def first(self) -> int | None:
        while self.older and self.uses.get(self.older[0][1]) != self.older[0][0]:
            heapq.heappop(self.older)
        if not self.recent:
            return self.older[0][1] if self.older else None
        page_id, use = next(iter(self.recent.items()))
        return self.older[0][1] if self.older and self.older[0][0] < use else page_id


class EvictionOrder:
    """Page ids by (priority, use); `use` is a sequence number, higher = later."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._level_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._level_of

    def add(self, page_id: int, priority: int, use: int) -> None:
        """Add a page, or move it to its new position."""
        self.remove(page_id)
        self._level_of[page_id] = priority
        self._levels.setdefault(priority, _Level()).add(page_id, use)

    def remove(self, page_id: int) -> None:
        """Take a page out; one that is not in is fine."""
        priority = self._level_of.pop(page_id, None)
        if priority is not None:
            self._levels[priority].remove(page_id)

    def first(self, priority_max: int | None = None) -> int | None:
        """The page to evict first, of those up to `priority_max`; None = there is none."""
        for priority in sorted(self._levels):
            if priority_max is not None and priority > priority_max:
                break
            found = self._levels[priority].first()
            if found is not None:
                return found
            del self._levels[priority]
        return None
