"""Published pages that are to be read back from the store before a table names them.

The lane's next frame does it; after a worker's death the store does. The order is decided here.
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
        self._proofs: list[Future[bool]] = []  # pages that the store reads

    def due(self) -> list[Seal]:
        """What the next frame verifies: a session's pages swap in page order.

        A page that was there already is published before an older one that had to be written.
        """
        if not self.queued:
            return []
        due: list[Seal] = []
        swapped: dict[Session, int] = {}
        for seal in sorted(self.queued, key=lambda seal: seal.index):
            session = seal.session
            if session is not None:
                index = swapped.get(session, len(session.kv.sealed))
                if seal.index != index:
                    continue
                swapped[session] = index + 1
            due.append(seal)
        return due

    def take(self) -> list[Seal]:
        """What the next frame verifies. Taken once."""
        due = self.due()
        self.queued = [seal for seal in self.queued if seal not in due]
        return due

    def waiting(self) -> set[Seal]:
        """Seals that wait for a page before them."""
        return set(self.queued) - set(self.due())

    def clear(self) -> list[Seal]:
        """The worker died: no frame will verify these."""
        queued, self.queued = self.queued, []
        return queued

    def by_store(self, ref: PageRef) -> None:
        """Have the store itself read a page back: it invalidates one that is damaged."""
        with contextlib.suppress(StaleRef):  # invalid meanwhile
            self._proofs.append(self._store.pages.verify(ref))

    async def settled(self) -> None:
        """Returns once the store has read what it was asked to."""
        proofs, self._proofs = self._proofs, []
        for proof in proofs:
            try:
                await asyncio.wrap_future(proof)
            except Exception as error:  # a page that could not be read ends no lane
                log.warning("a page could not be read back: %s", error)
