"""Which lanes computed which pages in this run, and pages that two computations made differently.

Owns the record of page writers and the queue of disputed pages; all lanes of an engine share one.
A page names the lanes that computed its own rows only: what was computed from it follows through
the chain of content keys.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchengine.kv.slots import Seal
from kv_store.pages.index import PageRef
from kv_store.store import Store

WRITTEN_MAX = 1 << 16  # pages whose writers are remembered, newest first


class Written(NamedTuple):
    """A page that was published in this run: its content key, its parent's, and its writers."""

    key: bytes
    parent: bytes
    lanes: frozenset[str]


class DisputedPage(NamedTuple):
    """A page computed by `lanes` with another content than the store has under its key.

    `tokens` is the timeline up to the end of the page, `digest` that of the computed payload.
    """

    tokens: Sequence[int]
    salt: bytes
    priority: int
    digest: bytes
    lanes: frozenset[str]


class Provenance:
    """Writers of pages and disputed pages. Used on the event loop only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._written: dict[PageRef, Written] = {}
        self.seals: set[Seal] = set()  # of all lanes, with the store
        self.audits = 0  # open rows that were computed before the last one are invalid
        self.disputed: deque[DisputedPage] = deque()
        self.has_disputed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Provenance pages={len(self._written)} audits={self.audits}>"

    def record(self, ref: PageRef, written: Written) -> None:
        """A page was published."""
        self._written[ref] = written
        while len(self._written) > WRITTEN_MAX:
            del self._written[next(iter(self._written))]

    def lanes_of(self, ref: PageRef) -> frozenset[str]:
        """The lanes that computed rows of this page; empty if it is of an earlier run."""
        written = self._written.get(ref)
        return frozenset() if written is None else written.lanes

    def keys_written_by(self, lanes: Iterable[str]) -> set[bytes]:
        """Content keys of published pages with rows of any of these lanes."""
        of = frozenset(lanes)
        return {written.key for written in self._written.values() if written.lanes & of}

    def dispute(self, page: DisputedPage) -> None:
        """Queue a page for the audit. No lane plans a step until that has ended."""
        self.disputed.append(page)
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

        The chain from a page to a later one is cut here, so the later one could no longer be found
        if the first proved wrong.
        """
        lost = set(keys)
        after = self._with_descendants(lost) - lost
        self._drop_seals(after)
        self._store.pages.invalidate(*after)

    def _with_descendants(self, keys: set[bytes]) -> set[bytes]:
        """`keys` and those of all pages that follow and that this run published or is sealing."""
        children: dict[bytes, list[bytes]] = {}
        for written in self._written.values():
            children.setdefault(written.parent, []).append(written.key)
        for seal in self.seals:
            if seal.ticket is not None:
                children.setdefault(seal.parent, []).append(seal.ticket.key)
        found, left = set[bytes](), list(keys)
        while left:
            key = left.pop()
            if key not in found:
                found.add(key)
                left += children.get(key, ())
        return found

    def _drop_seals(self, keys: set[bytes]) -> None:
        for seal in self.seals:
            if seal.ticket is not None and seal.ticket.key in keys:
                seal.dropped = True
