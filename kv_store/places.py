"""Places of pages: which exist, which are free, who is evicted, how a freed one is cleaned.

The index lives in memory and is changed on the caller's thread and on the two I/O threads under
one lock, held for microseconds and never across I/O. Files are touched by the page thread only,
SQLite by the ledger thread only. Knows nothing of what is copied into a place or read from it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_store import keys, osio, records
from kv_store.arena import POISON
from kv_store.errors import StaleRef, StoreError, StoreFull
from kv_store.extent import ExtentInfo, Extents, extent_path
from kv_store.layout import Descriptor
from kv_store.ledger import Ledger
from kv_store.pages import (
    FAILURES_MAX,
    RESIDENT,
    Page,
    PageEvent,
    PageRef,
    PageState,
    PageTable,
)
from kv_store.threads import IntentThread

log = logging.getLogger("batchengine.store")

# Evicting in batches keeps the choice cheap; the last tenth is for pages that are pinned.
FILL_MAX_PERCENT = 90
EVICT_TO_PERCENT = 85
RATE_WEIGHT = 0.2  # of the newest page: five pages after a change most of it shows
GROW_BELOW_PLACES = 8  # a prefill seals a few pages per second; allocating takes less than that
FREE_FLOOR_PERCENT = 5
FREE_FLOOR_BYTES = 2 << 30  # what logs and other programs need, whatever the disk's size;
FREE_FLOOR_SHARE = 4  # yet never more than this part of a disk too small to spare so much


def derived_floor_bytes(total_bytes: int) -> int:
    """What extents leave free of a file system: max(5 %, min(2 GiB, a quarter of it))."""
    least = min(FREE_FLOOR_BYTES, total_bytes // FREE_FLOOR_SHARE)
    return max(total_bytes * FREE_FLOOR_PERCENT // 100, least)


class BudgetSpent(StoreFull):
    """All extents that may exist do: nothing is wrong."""


@dataclass(slots=True)
class Budget:
    """How many bytes of extents may exist, and how much disk stays free."""

    budget_bytes: int
    extent_bytes: int
    free_floor_bytes: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What an open store consists of, below its index."""

    descriptor: Descriptor
    store_uuid: bytes
    epoch: int
    ledger: Ledger
    extents: Extents
    files: osio.Files
    budget: Budget
    verify_writes: bool


@dataclass(slots=True)
class Rates:
    """How fast this machine's pages move, measured as they do; None until the first one."""

    read_bytes_per_s: float | None = None  # read and verify
    seal_bytes_per_s: float | None = None  # arena to extent, read back if that is on

    def note_read(self, size: int, seconds: float) -> None:
        self.read_bytes_per_s = _mixed(self.read_bytes_per_s, size / max(seconds, 1e-9))

    def note_seal(self, size: int, seconds: float) -> None:
        self.seal_bytes_per_s = _mixed(self.seal_bytes_per_s, size / max(seconds, 1e-9))


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + RATE_WEIGHT * (now - before)


def _ignore(key: bytes) -> None:
    """Nobody asked to be told of rejected pages."""


class PlacePool:
    """Every page place of one open store. Methods without a Future do no I/O."""

    def __init__(self, parts: Parts) -> None:
        self.descriptor = parts.descriptor
        self.layout = parts.descriptor.layout
        self.repr_id = parts.descriptor.repr_id
        self.uuid = parts.store_uuid
        self.epoch = parts.epoch
        self.ledger = parts.ledger
        self.refusal = ""  # why the last reserve() gave None
        self.on_rejected: Callable[[bytes], None] = _ignore  # a key; on any thread, locked
        self.counters: Counter[str] = Counter()
        self._extents = parts.extents
        self._files = parts.files
        self._budget = parts.budget
        self._verify_writes = parts.verify_writes
        self._lock = threading.RLock()
        self._table = PageTable()
        self._infos: list[ExtentInfo] = []  # of this representation, by first page id
        self._foreign: list[ExtentInfo] = []  # of other representations: first to go
        self._unrecorded: dict[int, records.AddExtent] = {}  # rows that are not durable yet
        self._next_page_id = 0
        self._next_extent = 1
        self._growing: Future[None] | None = None
        self._growth_blocked = ""
        self._not_growing = ""  # what the disk refused when a place was wanted last
        self._is_below_floor = False
        self._write_failure = ""  # of the last page written: shown as the tier's state
        self.rates = Rates()
        self._poison_queue: deque[PageRef] = deque()
        self._layout_id = self.layout.layout_id
        self._buffer = memoryview(bytearray(self.layout.page_bytes))  # page thread only
        self._pages_io = IntentThread("kv-pages", self._poison_one)

    def extents(self) -> list[ExtentInfo]:
        """Every extent a lane may have to map."""
        with self._lock:
            return list(self._infos)

    def evict(self, count: int) -> int:
        """Forget up to `count` unpinned pages, least valuable first; returns how many."""
        with self._lock:
            victims = self._table.victims(count)
            for page in victims:
                self._release(page)
            self.counters["pages_evicted"] += len(victims)
            return len(victims)

    def check_integrity(self) -> None:
        """Recount every index; call when idle. Raises AssertionError."""
        with self._lock:
            self._table.check()
            places = sum(info.places for info in self._infos)
            assert len(self._table) == places, (len(self._table), places)
            total = sum(info.file_bytes for info in self._infos + self._foreign)
            assert total <= self._budget.budget_bytes, (total, self._budget)

    def drain(self) -> Future[None]:
        """Resolves when the page thread has done everything submitted so far."""
        return self._pages_io.submit(lambda: None)

    @property
    def places_max(self) -> int:
        """Pages the budget allows."""
        return self._budget.budget_bytes // self.layout.page_bytes

    # -- places: caller's thread, under the lock ----------------------------------------------

    def _take_place(self) -> Page | None:
        """A place, in this order: (1) keep under the fill limit by evicting, (2) a free place,
        (3) evict for one when no extent can be added, (4) refuse and say why."""
        cap = self.places_max
        high = max(1, cap * FILL_MAX_PERCENT // 100)
        low = min(high - 1, cap * EVICT_TO_PERCENT // 100)
        if self._table.used >= high:
            self.evict(self._table.used - low)
        page = self._table.take_free()
        self._grow_ahead()
        if page is not None:
            return page
        if self._growing is not None:
            self.refusal = "the next extent is being allocated"
            return None
        if self.evict(max(1, len(self._table) * (100 - EVICT_TO_PERCENT) // 100)):
            return self._table.take_free()
        if not cap:
            self.refusal = "the budget is smaller than one page"
        else:
            self.refusal = self._growth_blocked or "every page is in use"
        return None

    def _grow_ahead(self) -> None:
        missing = self.places_max - len(self._table)
        free = self._table.count(PageState.FREE)
        if missing <= 0 or free >= GROW_BELOW_PLACES or self._growing or self._growth_blocked:
            return
        self._growing = self._pages_io.submit(self._grow)

    def _grow(self) -> None:
        """Add one extent (page thread, or the opener before anybody else knows the store)."""
        page_bytes = self.layout.page_bytes
        with self._lock:
            places = min(
                max(1, self._budget.extent_bytes // page_bytes),
                self.places_max - len(self._table),
            )
            index, first = self._next_extent, self._next_page_id
            path = extent_path(self._extents.folder, index)
            if places < 1:
                self._growing = None
                return
            info = ExtentInfo(index, first, places, page_bytes, self.repr_id, path)
        blocked, disk = "", ""
        try:
            self._make_room(info.file_bytes)
            self._extents.create(info)
        except BudgetSpent as error:
            blocked = str(error)
        except (StoreError, OSError) as error:
            blocked = disk = str(error)
        with self._lock:
            self._growing = None
            self._growth_blocked = blocked
            self._note_growth(disk)
            if blocked:
                self.counters["growth_blocked"] += 1
                return
            self._next_extent, self._next_page_id = index + 1, first + places
            row = records.AddExtent(index, first, places, page_bytes, self.repr_id)
            self._unrecorded[index] = row
            self._record_extent(row)
            self._add_places(info, {})

    def _record_extent(self, row: records.AddExtent) -> None:
        """Write the row of an extent; `maintain` tries again if a full disk refuses it."""

        def written(done: Future[int]) -> None:
            if done.exception() is None:
                with self._lock:
                    self._unrecorded.pop(row.index, None)

        self.ledger.append(row).add_done_callback(written)

    def _extent_row(self, page_id: int) -> tuple[records.AddExtent, ...]:
        """What the first rows of a new extent's pages are written with: at once or not at all, as
        the extent's own row may have been lost meanwhile."""
        row = self._unrecorded.get(self._info(page_id).index)
        return () if row is None else (row,)

    def _make_room(self, wanted: int) -> None:
        """Drop other representations' extents that the budget has no room for; check the floor."""
        while self._foreign and self._extent_bytes() + wanted > self._budget.budget_bytes:
            self._drop_oldest_foreign()
        if self._extent_bytes() + wanted > self._budget.budget_bytes:
            raise BudgetSpent("the budget has no room for another extent")
        self._check_floor(wanted)

    def _look_again(self) -> None:
        """The disk refused an extent; is there room for one by now? (page thread)"""
        if not self._not_growing or not self._is_below_floor:
            return  # of other refusals only the next try tells
        try:
            self._check_floor(min(self._budget.extent_bytes, self._budget.budget_bytes))
        except (StoreError, OSError):
            return
        self._note_growth("")

    def _note_growth(self, refusal: str) -> None:
        """One log line when the disk begins to refuse extents, one when it ends."""
        was, self._not_growing = self._not_growing, refusal
        if refusal and not was:
            log.warning("store: no pages are added: %s", refusal)
        elif was and not refusal:
            log.warning("store: there is disk space again, pages are added as needed")

    def _check_floor(self, wanted: int) -> None:
        free = self._files.free_bytes(self._extents.folder)[0]
        self._is_below_floor = free - wanted < self._budget.free_floor_bytes
        if self._is_below_floor:
            raise StoreFull(
                f"the disk has {free >> 20} MiB free",
                why=f"{self._budget.free_floor_bytes >> 20} MiB stay free for others",
                fix="free disk space or lower the store's free_floor_bytes; serving goes on with"
                " what is cached",
            )

    def _drop_oldest_foreign(self) -> int:
        """Delete one extent of another representation; gives its places (page thread)."""
        with self._lock:
            info = self._foreign.pop(0)
            self.ledger.append(records.DropExtent(info.index, info.first_page_id, info.places))
        self._extents.drop(info)
        return info.places

    def _extent_bytes(self) -> int:
        return sum(info.file_bytes for info in self._infos + self._foreign)

    def _add_places(self, info: ExtentInfo, gens: dict[int, int]) -> None:
        self._infos.append(info)
        for page_id in range(info.first_page_id, info.first_page_id + info.places):
            self._table.add_place(page_id, gens.get(page_id, 0))

    def _info(self, page_id: int) -> ExtentInfo:
        for info in reversed(self._infos):
            if info.first_page_id <= page_id:
                return info
        raise StaleRef(f"no extent holds page {page_id}")

    def _seed(self, page: Page) -> int:
        return keys.sealed_seed(self.uuid, page.page_id, page.gen, page.key, self._layout_id)

    def _release(self, page: Page) -> None:
        self._table.apply(page, PageEvent.RELEASE)
        self._settle(page)

    def _settle(self, page: Page) -> None:
        """QUARANTINE -> FREE or BAD once nobody reads or writes the place."""
        if page.state is not PageState.QUARANTINE or page.pins or page.writers:
            return
        bad, listed = page.fails >= FAILURES_MAX, page.listed
        self._table.apply(page, PageEvent.RETIRE if bad else PageEvent.FREE)
        page.listed = False
        if listed or bad:
            row = records.FreePage(page.ref, self.repr_id, bad)
            self.ledger.append(*self._extent_row(page.page_id), row)
        if not bad:
            self._poison_queue.append(page.ref)
            self._pages_io.wake()

    def _reject(self, *pages: Page, place_failed: bool = True) -> None:
        """Pages whose bytes failed, and with them the place; or, in a sound one, wrong content."""
        resident = [page for page in pages if page.state in RESIDENT]
        self.counters["pages_rejected"] += len(pages)
        for page in pages:
            page.fails += place_failed
        self._unlist(resident)
        for page in resident:
            key = page.key  # a place that is free has none
            self._release(page)
            self.on_rejected(key)

    def _unlist(self, pages: Sequence[Page]) -> None:
        """Free the manifest rows of pages that are given up, all or none, at once: who pins a place
        may live longer than we do, and no later life may find these bytes again."""
        listed = [(page, page.gen) for page in pages if page.listed]
        if not listed:
            return
        for page, _ in listed:
            page.listed = False

        def written(done: Future[int]) -> None:
            if done.exception() is not None:
                with self._lock:  # no room in the ledger: `_settle` tries again
                    for page, gen in listed:
                        if page.gen == gen and page.state is PageState.QUARANTINE:
                            page.listed = True

        rows = [
            records.FreePage(PageRef(page.page_id, gen + 1), self.repr_id, False)
            for page, gen in listed
        ]
        self.ledger.append(*rows).add_done_callback(written)

    def _poison_one(self) -> bool:
        """Idle work: overwrite one freed place, unless it has a new use. True = more to do."""
        with self._lock:
            if not self._poison_queue:
                return False
            ref = self._poison_queue.popleft()
            page = self._table.find(ref.page_id)
            # a later reserve() of this place queues its copy behind this write, on this thread
            if page is None or page.gen != ref.gen or page.state is not PageState.FREE:
                return True
            info = self._info(ref.page_id)
        block = memoryview(bytes([POISON]) * osio.CHUNK_BYTES)
        done = 0
        offset = info.place_of(ref.page_id) * info.page_bytes
        while done < info.page_bytes:
            part = block[: info.page_bytes - done]
            self._extents.write_at(info, offset + done, part)
            done += len(part)
        return True
