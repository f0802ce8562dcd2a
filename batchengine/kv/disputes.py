"""Disputed pages, which two computations made differently, and invalidation of descendants.

Owns the queue of disputed pages and the set of seals with a ticket, for all lanes of an engine.
The descendants of a page, in the chain of content keys, are the pages computed from it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from batchengine.kv.slots import Seal
from kv_store.store import Store


class Disputes:
    """Disputed pages of all lanes, and invalidation by content. Used on the event loop only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.seals: set[Seal] = set()  # of all lanes, with a ticket of the store
        self.audits = 0  # number of audits; each invalidates all open rows
        self.disputed: deque[Seal] = deque()
        self.has_disputed = asyncio.Event()
        self.watchers: list[Callable[[set[bytes]], None]] = []  # get the keys of wrong pages
        self.lost: list[Callable[[Sequence[bytes]], None]] = []  # get those of all invalid pages

    def __repr__(self) -> str:
        return f"<Disputes disputed={len(self.disputed)} audits={self.audits}>"

    def dispute(self, seal: Seal) -> None:
        """Queue a page for the audit, since the store has other bytes under its content key.

        No lane plans a step until the audit has ended.
        """
        self.disputed.append(seal)
        self.has_disputed.set()

    def invalidate(self, keys: Iterable[bytes], *, rootless: bool = False) -> None:
        """Invalidate pages with wrong content and their descendants, and drop seals of them.

        Descendants are pages of any run. `rootless`: invalidate also pages whose parent is not in
        the store, since they may be descendants too.
        """
        before, wrong = set[bytes](), set(keys)
        while wrong != before:
            before = wrong
            wrong = self._with_descendants(wrong)
            wrong |= self._store.pages.invalidate(*wrong, descendants=True, rootless=rootless)
        self._drop_seals(wrong)
        if self._store.states is not None:
            self._store.states.invalidate(wrong)
        for watcher in self.watchers:
            watcher(wrong)

    def invalidate_descendants(self, keys: Sequence[bytes]) -> None:
        """Invalidate what this run computed from these pages, which the store does not serve now.

        Pages of earlier runs stay: their bytes were checked. Without the lost page the chain is
        broken: its descendants could not be found later if the page turned out to be wrong.
        """
        lost = set(keys)
        after = self._with_descendants(lost) - lost
        self._drop_seals(after)
        self._store.pages.invalidate(*self._store.pages.of_this_run(after))
        for watcher in self.lost:
            watcher(keys)

    def _with_descendants(self, keys: set[bytes]) -> set[bytes]:
        """Return `keys` and the keys of all descendants, resident or being sealed."""
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
