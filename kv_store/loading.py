"""Reading pages back: load, verify, doubt. Only what passed its checksum is readable.

A page that was not read since start is LISTED; reading it and comparing makes it PUBLISHED. A page
that fails is forgotten and its place reused once: the second failure retires the place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from kv_store import keys
from kv_store.errors import StaleRef, StoreCorrupt
from kv_store.pages import RESIDENT, Page, PageEvent, PageRef, PageState
from kv_store.places import Parts, PlacePool
from kv_store.threads import new_future


class LoadingPool(PlacePool):
    """`PlacePool` plus reading."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._loads: dict[PageRef, Future[bool]] = {}

    def load(self, refs: Sequence[PageRef]) -> Future[list[bool]]:
        """Make pages readable: those not read since start are verified against their checksum.

        False = gone or rejected: recompute it. Pages after it in the chain stay valid.
        """
        result: Future[list[bool]] = new_future()
        with self._lock:
            waits = [self._load_one(ref) for ref in refs]
        left = [len(waits)]
        lock = threading.Lock()

        def one_done(_: Future[bool]) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            result.set_result([wait.result() for wait in waits])

        if not waits:
            result.set_result([])
        for wait in waits:
            wait.add_done_callback(one_done)
        return result

    def cold(self, refs: Sequence[PageRef]) -> list[bool]:
        """Which of these pages were not read since start: `load` would read them from disk."""
        with self._lock:
            return [self._is_cold(ref) for ref in refs]

    @property
    def bytes_loading(self) -> int:
        """Of pages that were asked for before and are still being read."""
        return len(self._loads) * self.layout.page_bytes

    def verify(self, ref: PageRef) -> Future[bool]:
        """Read a published page again and condemn it if its checksum fails (scrub, doubt)."""
        with self._lock:
            page = self._table.get(ref)
            if page.state is not PageState.PUBLISHED:
                raise StaleRef(f"{page!r} is not published")
            page.pins += 1

        def intent() -> bool:
            good = False
            try:
                good = self._bytes_match(page)
            finally:
                with self._lock:
                    if not good:
                        self._reject(page)
                    elif page.state is PageState.PUBLISHED:
                        self._table.note_verified(page)
                    page.pins -= 1
                    self._settle(page)
            return good

        return self._pages_io.submit(intent)

    def condemn(self, ref: PageRef, *, place_failed: bool = False) -> None:
        """Never serve this page again, not in a later life either. Commits.

        `place_failed`: it does not read back as written; the second time retires the place.
        """
        with self._lock:
            page = self._table.get(ref)
            if page.state in RESIDENT:
                self._reject(page, place_failed=place_failed)
                self.ledger.commit()

    def condemn_with_descendants(
        self, wrong: Iterable[bytes], *, orphans: bool = False
    ) -> set[bytes]:
        """Never serve pages with these keys again, nor what any life computed from them, and gives
        the keys of all. One commit: no later life finds a page without the one before it.

        `orphans`: nor pages whose parent is gone, since nobody knows what it was computed from.
        """
        with self._lock:
            after: dict[bytes, list[bytes]] = {}
            for page in self._table:
                if page.state in RESIDENT:
                    after.setdefault(page.parent, []).append(page.key)
            left, found = list(wrong), set[bytes]()
            if orphans:
                gone = [p for p in after if p != keys.ROOT_KEY and self._table.resident(p) is None]
                left += [key for parent in gone for key in after[parent]]
            while left:
                key = left.pop()
                if key not in found:
                    found.add(key)
                    left += after.get(key, ())
            pages = [page for key in found if (page := self._table.resident(key)) is not None]
            if pages:
                self._reject(*pages, place_failed=False)
                self.ledger.commit()
            return found

    # -- caller's thread, under the lock ------------------------------------------------------

    def _is_cold(self, ref: PageRef) -> bool:
        try:
            return self._table.get(ref).state in (PageState.LISTED, PageState.LOADING)
        except StaleRef:
            return False

    def _load_one(self, ref: PageRef) -> Future[bool]:
        future: Future[bool] = new_future()
        try:
            page = self._table.get(ref)
        except StaleRef:
            future.set_result(False)
            return future
        if page.state is PageState.LOADING:
            return self._loads[ref]
        if page.state is not PageState.LISTED:
            future.set_result(page.state is PageState.PUBLISHED)
            return future
        self._table.apply(page, PageEvent.LOAD)
        page.writers += 1
        self._loads[ref] = future
        submitted = self._pages_io.submit(lambda: self._load_page(page, future))
        if submitted.done() and not future.done():
            future.set_result(False)  # the store is closed
        return future

    # -- page thread --------------------------------------------------------------------------

    def _load_page(self, page: Page, future: Future[bool]) -> None:
        good = False
        try:
            good = self._bytes_match(page)
        finally:
            with self._lock:
                ref = page.ref
                page.writers -= 1
                if good and page.state is PageState.LOADING:
                    self._table.apply(page, PageEvent.VERIFY)
                elif page.state is PageState.LOADING:
                    self._reject(page)
                else:
                    good = False
                    self._settle(page)
                del self._loads[ref]
            future.set_result(good)

    def _bytes_match(self, page: Page) -> bool:
        info, start = self._info(page.page_id), time.perf_counter()
        try:
            self._extents.read_page(info, info.place_of(page.page_id), self._buffer)
        except (OSError, StoreCorrupt):
            return False
        self.counters["pages_verified"] += 1
        good = (
            keys.sealed_checksum(self._buffer, self._seed(page)) == page.checksum
            and keys.payload_digest(self._buffer) == page.digest
        )
        self.rates.note_read(info.page_bytes, time.perf_counter() - start)
        return good
