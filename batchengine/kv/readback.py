"""Read-back: published pages are read from the store before they replace open pages in tables.

Owns the order. The lane's next frame reads them; after a worker's exit the store does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Future

from batchengine.kv.slots import Seal
from batchengine.session import Session
from kv_store.errors import StaleRef
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class ReadBack:
    """Seals whose pages are published and not yet verified."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.queued: list[Seal] = []
        self._proofs: list[Future[bool]] = []  # of pages that the store reads

    def due(self) -> list[Seal]:
        """Return the seals that the next frame verifies: of each session in page order.

        Publications may be out of order: a page that the store already had is published at once.
        """
        if not self.queued:
            return []
        due: list[Seal] = []
        swapped: dict[Session, int] = {}
        for seal in sorted(self.queued, key=lambda seal: seal.index):
            session = seal.session
            if session is not None:
                index = swapped.get(session, session.kv.first_open)
                if seal.index != index:
                    continue
                swapped[session] = index + 1
            due.append(seal)
        return due

    def take(self) -> list[Seal]:
        """Take the seals that the next frame verifies."""
        due = self.due()
        self.queued = [seal for seal in self.queued if seal not in due]
        return due

    def waiting(self) -> set[Seal]:
        """Return the seals that wait for an earlier page of their session."""
        return set(self.queued) - set(self.due())

    def clear(self) -> list[Seal]:
        """Take all queued seals, after the worker's exit."""
        queued, self.queued = self.queued, []
        return queued

    def by_store(self, ref: PageRef) -> None:
        """Have the store read a page back; the store invalidates a damaged one."""
        with contextlib.suppress(StaleRef):  # invalid meanwhile
            self._proofs.append(self._store.pages.verify(ref))

    async def settled(self) -> None:
        """Wait until the store has read all pages of `by_store`."""
        proofs, self._proofs = self._proofs, []
        for proof in proofs:
            try:
                await asyncio.wrap_future(proof)
            except Exception as error:  # the lane continues without the page
                log.warning("a page could not be read back: %s", error)
