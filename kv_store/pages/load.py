"""Reads pages back. Only a page that passed its checksum is readable.

A page that was not read since start is LISTED; verifying its bytes makes it PUBLISHED. A page
that fails is invalid and its slot is used again once: the second failure retires the slot.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from kv_store import keys, osio
from kv_store.errors import StaleRef, StoreCorrupt
from kv_store.pages.allocator import SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.index import Page, PageEvent, PageRef, PageState
from kv_store.threads import new_future


def _known(is_good: bool) -> Future[bool]:
    future: Future[bool] = new_future()
    future.set_result(is_good)
    return future


_GOOD, _BAD = _known(True), _known(False)  # of pages without a load; a long prefix has hundreds


class PageLoader:
    """Reads pages of one pool and verifies them."""

    def __init__(self, core: StoreCore, allocator: SlotAllocator) -> None:
        self._core = core
        self._slots = allocator
        self._index = allocator.index
        self._loads: dict[PageRef, Future[bool]] = {}

    def load(self, refs: Sequence[PageRef]) -> Future[list[bool]]:
        """Make pages readable: those not read since start are verified against their checksum.

        False = gone or invalid: recompute it. Pages after it in the chain stay valid.
        """
        result: Future[list[bool]] = new_future()
        with self._core.lock:
            waits = deque(self.load_one(ref) for ref in refs)
        if all(wait is _GOOD for wait in waits):
            result.set_result([True] * len(waits))
            return result
        good = list[bool]()

        def collect(_: Future[bool] | None = None) -> None:
            """Take finished loads in order; runs again when the first unfinished one is done."""
            while waits and waits[0].done():
                good.append(waits.popleft().result())
            if waits:
                waits[0].add_done_callback(collect)
            else:
                result.set_result(good)

        collect()
        return result

    def cold(self, refs: Sequence[PageRef]) -> list[bool]:
        """Which of these pages were not read since start: `load` would read them from disk."""
        with self._core.lock:
            pages = map(self._index.live, refs)
            cold = (PageState.LISTED, PageState.LOADING)
            return [page is not None and page.state in cold for page in pages]

    @property
    def bytes_loading(self) -> int:
        """Bytes of the pages that are being read or wait for it."""
        return len(self._loads) * self._slots.layout.page_bytes

    def verify(self, ref: PageRef) -> Future[bool]:
        """Read a published page again; a checksum that fails invalidates it."""
        with self._core.lock:
            page = self._index.get(ref)
            if page.state is not PageState.PUBLISHED:
                raise StaleRef(f"{page!r} is not published")
            self._index.pin(page)
        return self._core.thread.submit(lambda: self.read_again(page))

    def read_again(self, page: Page) -> bool:
        """Read a page that the caller pinned, and give that pin back (page thread).

        A page whose bytes are right is readable then, one whose checksum fails is invalid.
        """
        good = False
        try:
            good = self._bytes_match(page)
        finally:
            with self._core.lock:
                self.was_read(page, good)
                self._slots.unpin(page, is_use=False)
        return good

    def was_read(self, page: Page, good: bool) -> None:
        """Apply the result of reading every byte of a page that the caller pinned (under the
        lock)."""
        if not good:
            self._slots.invalidate(page, slot_failed=True)
        elif page.state is PageState.LISTED:
            self._index.apply(page, PageEvent.LOAD)
            self._index.apply(page, PageEvent.VERIFY)
        elif page.state is PageState.PUBLISHED:
            self._index.note_verified(page)

    def self_test(self) -> None:
        """Write and read back a free slot before the pool has users (opener's thread).

        Finds write errors that no query of the file system shows; sets the rates' first values.
        """
        page = self._index.peek_free()
        if page is None:
            return
        info, data = self._slots.info(page.page_id), self._slots.buffer
        data[:] = bytes([osio.TEST_BYTE]) * len(data)
        try:
            start = time.perf_counter()
            expected = keys.payload_digest(data)
            self._core.extents.write_page(info, page.page_id, data)
            written = time.perf_counter()
            data[:] = bytes(len(data))
            read = time.perf_counter()
            self._core.extents.read_page(info, page.page_id, data)
            good = keys.payload_digest(data) == expected
            now = time.perf_counter()
        except (OSError, StoreCorrupt) as error:
            self._core.write_failure = str(error)
            return
        finally:
            self._slots.poison_later(page.ref)
        if not good:
            self._core.write_failure = "a test page read back differs from what was written"
            return
        self._core.rates.note_read(info.page_bytes, now - read)
        self._core.rates.note_seal(info.page_bytes, written - start + now - read)

    # -- caller's thread, under the lock ------------------------------------------------------

    def load_one(self, ref: PageRef) -> Future[bool]:
        page = self._index.live(ref)
        if page is not None and page.state is PageState.LOADING:
            return self._loads[ref]
        if page is None or page.state is not PageState.LISTED:
            return _GOOD if page is not None and page.state is PageState.PUBLISHED else _BAD
        future: Future[bool] = new_future()
        self._index.apply(page, PageEvent.LOAD)
        page.writers += 1
        self._loads[ref] = future
        submitted = self._core.thread.submit(lambda: self._load_page(page, future))
        if submitted.done() and not future.done():
            future.set_result(False)  # the store is closed
        return future

    # -- page thread --------------------------------------------------------------------------

    def _load_page(self, page: Page, future: Future[bool]) -> None:
        good = False
        try:
            good = self._bytes_match(page)
        finally:
            with self._core.lock:
                ref = page.ref
                page.writers -= 1
                if good and page.state is PageState.LOADING:
                    self._index.apply(page, PageEvent.VERIFY)
                elif page.state is PageState.LOADING:
                    self._slots.invalidate(page, slot_failed=True)
                else:
                    good = False
                    self._slots.settle(page)
                del self._loads[ref]
            future.set_result(good)

    def _bytes_match(self, page: Page) -> bool:
        info, start = self._slots.info(page.page_id), time.perf_counter()
        try:
            self._core.extents.read_page(info, page.page_id, self._slots.buffer)
        except (OSError, StoreCorrupt):
            return False
        self._core.counters["pages_verified"] += 1
        good = (
            keys.sealed_checksum(self._slots.buffer, self._slots.seed(page)) == page.checksum
            and keys.payload_digest(self._slots.buffer) == page.digest
        )
        self._core.rates.note_read(info.page_bytes, time.perf_counter() - start)
        return good
