"""Maintenance of a pool's pages: scrub, verify all, check, write ages, collect garbage.

Has no thread of its own: each part is one short intent of the page thread, so a seal waits for at
most one page; scans of all pages take the lock for one slice at a time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from kv_store.ledger import writes
from kv_store.pages.allocator import EVICT_BATCH, EVICT_TO_PERCENT, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.index import EVICTABLE, RESIDENT, SLICE_PAGES, SUPERSEDED, PageRef
from kv_store.pages.load import PageLoader
from kv_store.threads import new_future

SESSIONS_MAX = 10_000
LEDGER_BYTES_MAX = 1 << 30
COMMIT_PAGES = 256  # evicted pages whose rows one commit of `collect` writes
CHECK_SLOTS = 16_384  # compared by one `check`: it shares the interpreter with the event loop


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """One page read again. `good` False: it is invalid now."""

    ref: PageRef
    good: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Pages of `total` that were read: `good`, `bad` (invalid now); `gone`: evicted meanwhile."""

    total: int
    good: int = 0
    bad: int = 0
    gone: int = 0
    read_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GcReport:
    """What `gc` removed. `slots_other_reprs` are page slots of other models' extents."""

    pages_evicted: int
    tails_superseded: int
    extents_other_reprs: int
    slots_other_reprs: int
    sessions: int


class PageMaintenance:
    """Maintenance of one pool."""

    def __init__(self, core: StoreCore, allocator: SlotAllocator, loader: PageLoader) -> None:
        self._core = core
        self._slots = allocator
        self._index = allocator.index
        self._loader = loader
        self._verifying: Future[VerifyReport] | None = None
        self._unchecked = self._slots.slices()

    def scrub_next(self) -> Future[ScrubResult | None]:
        """Read the page that was verified longest ago, never verified ones first.

        A bad one becomes invalid. None = no page to read. Bytes come through the kernel's page
        cache, as the lanes see them.
        """
        return self._core.thread.submit(self._scrub)

    def _scrub(self) -> ScrubResult | None:
        with self._core.lock:
            page = self._index.least_verified()
            if page is None:
                return None
            self._index.pin(page)
            ref = page.ref
        good = self._loader.read_again(page)
        self._core.counters["pages_scrubbed"] += 1
        return ScrubResult(ref, good)

    def verify_all(self) -> Future[VerifyReport]:
        """Read every page; those that fail become invalid. Serving goes on in between.

        One run at a time: a second call gets the first one's future.
        """
        with self._core.lock:
            if self._verifying is None or self._verifying.done():
                self._verifying = self._verify_all()
            return self._verifying

    def _evictable_refs(self) -> Iterator[PageRef]:
        for ids in self._slots.slices():
            with self._core.lock:
                pages = filter(None, map(self._index.find, ids))
                refs = [page.ref for page in pages if page.state in EVICTABLE]
            yield from refs

    def _verify_all(self) -> Future[VerifyReport]:
        left, counts, start = self._evictable_refs(), Counter[str](), time.monotonic()
        result: Future[VerifyReport] = new_future()

        def check() -> None:
            """Check one page, and submit the check of the next: other intents run in between."""
            ref = next(left, None)
            if ref is not None:
                counts[self._check(ref)] += 1
                self._core.thread.submit(check).add_done_callback(done)
                return
            read_bytes = (counts["good"] + counts["bad"]) * self._slots.layout.page_bytes
            seconds = time.monotonic() - start
            result.set_result(
                VerifyReport(counts.total(), **counts, read_bytes=read_bytes, seconds=seconds)
            )

        def done(checked: Future[None]) -> None:
            if (error := checked.exception()) is not None:  # e.g. the store is closed
                result.set_exception(error)

        self._core.thread.submit(check).add_done_callback(done)
        return result

    def _check(self, ref: PageRef) -> str:
        """Read one page; returns the field of VerifyReport that counts it."""
        with self._core.lock:
            page = self._index.find(ref.page_id)
            if page is None or page.ref != ref or page.state not in RESIDENT:
                return "gone"
            self._index.pin(page)
        return "good" if self._loader.read_again(page) else "bad"

    # -- in slices ----------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the next CHECK_SLOTS slots with the indexes, in slices, starting again after the
        last slot. Raises AssertionError."""
        with self._core.lock:
            self._index.check_sums()
            assert len(self._index) == sum(info.slots for info in self._slots.infos)
        left = CHECK_SLOTS
        while left > 0:
            ids = next(self._unchecked, None)
            if ids is None:
                self._unchecked = self._slots.slices()
                return
            with self._core.lock:
                for page in filter(None, map(self._index.find, ids)):
                    self._index.check_page(page)
            left -= len(ids)

    def write_ages(self, count: int | None = None) -> None:
        """Record priority and age of up to `count` pages (None: all) that the manifest lacks."""
        left = len(self._index.dirty_lru) if count is None else count
        dirty = self._index.dirty_lru
        while left > 0 and dirty:
            with self._core.lock:
                ids = [dirty.pop() for _ in range(min(len(dirty), left, SLICE_PAGES))]
                rows = tuple(
                    (page.page_id, page.gen, page.priority, page.lru_seq)
                    for page_id in ids
                    if (page := self._index.find(page_id)) is not None and page.listed
                )
                if rows:
                    self._core.ledger.append(writes.AgePages(rows))
            left -= len(ids)

    def collect(self) -> tuple[int, int]:
        """Evict superseded tails, then to the target, in slices: (pages, tails)."""
        with self._core.lock:
            parents = self._index.tail_parents()
        for first in range(0, len(parents), SLICE_PAGES):
            with self._core.lock:
                self._index.supersede_tails(parents[first : first + SLICE_PAGES])
        tails = evicted = 0
        while done := self._evict(COMMIT_PAGES, SUPERSEDED):
            tails += done
        low = self._slots.slots_max * EVICT_TO_PERCENT // 100
        while (over := self._index.used - low) > 0:
            done = self._evict(min(over, COMMIT_PAGES))
            evicted += done
            if not done:
                break
        return evicted, tails

    def _evict(self, count: int, priority_max: int | None = None) -> int:
        """Evict up to `count` pages and wait until their rows are written: tens of thousands of
        waiting records would make Python's collector run for up to 100 ms under the lock."""
        evicted = 0
        while evicted < count:
            with self._core.lock:
                done = self._slots.evict(min(count - evicted, EVICT_BATCH), priority_max)
            evicted += done
            if not done:
                break
        self._core.ledger.commit().exception()  # waits; whether they were written is no matter here
        return evicted
