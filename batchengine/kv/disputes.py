"""Pages that two computations made differently, and what goes with a page that is wrong or lost.

Owns the queue of disputed pages and the set of seals that are with the store; all lanes of an
engine share one. A page names the lanes that computed its own rows: what was computed from it
follows in the chain of content keys.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from batchengine.kv.slots import Seal
from kv_store.store import Store


class Disputes:
    """Disputed pages of all lanes, and invalidation by content. Used on the event loop only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.seals: set[Seal] = set()  # of all lanes, with the store
        self.audits = 0  # open rows that were computed before the last one are invalid
        self.disputed: deque[Seal] = deque()
        self.has_disputed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Disputes disputed={len(self.disputed)} audits={self.audits}>"

    def dispute(self, seal: Seal) -> None:
        """Queue a page for the audit: the store has another content under its key.

        No lane plans a step until the audit has ended.
        """
        self.disputed.append(seal)
        self.has_disputed.set()

    def invalidate(self, keys: Iterable[bytes], *, rootless: bool = False) -> None:
        """The content of these pages is wrong: never serve or publish them, nor their descendants.

        Descendants are pages of any run. `rootless`: invalidate also pages whose parent is not in
        the store, since nothing says what they were computed from.
        """
        before, wrong = set[bytes](), set(keys)
        while wrong != before:
            before = wrong
            wrong = self._with_descendants(wrong)
            wrong |= self._store.pages.invalidate(*wrong, descendants=True, rootless=rootless)
        self._drop_seals(wrong)

    def invalidate_descendants(self, keys: Iterable[bytes]) -> None:
        """These pages are not served any more: what this run computed from them is not either.

        Pages of earlier runs between them and those of this run stay: their bytes were checked.

        The chain from a page to a later one is cut here, so the later one could no longer be found
        if the first proved wrong.
        """
        lost = set(keys)
        after = self._with_descendants(lost) - lost
        self._drop_seals(after)
        self._store.pages.invalidate(*self._store.pages.of_this_run(after))

    def _with_descendants(self, keys: set[bytes]) -> set[bytes]:
        """`keys` and those of all pages that follow, resident or being sealed."""
        found, left = set[bytes](), list(keys)
        while left:
            key = left.pop()
            if key not in found:
                found.add(key)
                left += self._store.pages.following(key)
                left += [s.ticket.key for s in self.seals if s.ticket and s.parent == key]
        return found

    def _drop_seals(self, keys: set[bytes]) -> None:
        for seal in self.seals:
            if seal.ticket is not None and seal.ticket.key in keys:
                seal.dropped = True
