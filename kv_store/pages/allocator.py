"""The slots of one pool: which exist, which are free, what is evicted, how freed ones are cleaned.

Pages are copied into slots and read from them elsewhere. Unless a method says otherwise, it runs
under the store's lock and does no I/O.
"""

from __future__ import annotations

import enum
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from kv_store import keys
from kv_store.arenas.arena import POISON
from kv_store.errors import StaleRef, StoreCorrupt, StoreError
from kv_store.layout import Descriptor
from kv_store.ledger import writes
from kv_store.pages.core import BudgetSpent, StoreCore
from kv_store.pages.extents import ExtentInfo, extent_path
from kv_store.pages.index import (
    EVICTABLE,
    FAILURES_MAX,
    RESIDENT,
    SLICE_PAGES,
    UNPUBLISHED,
    Page,
    PageEvent,
    PageIndex,
    PageRef,
    PageState,
)

FILL_MAX_PERCENT = 90  # the last tenth is for pages that are pinned
EVICT_TO_PERCENT = 85
RETRACT_SLICE = 32  # pages retracted, or let go, under one hold of the lock
EVICT_BATCH = 16  # pages that one reservation evicts: bounds one hold of the lock
CHAIN_MAX = 512  # descendants evicted per page when an extent is given back
_first_page_id = attrgetter("first_page_id")
GROW_BELOW_SLOTS = 8  # a prefill seals a few pages per second; an extent is allocated sooner


class NoRoom(enum.Enum):
    """Why `reserve` has no slot to give; the values are sentences for a person."""

    GROWING = "an extent is being allocated, or slots are being freed"  # try again soon
    FULL = "every page is in use"  # and no extent can be added


class Retracted(NamedTuple):
    """An invalid page and its former state: `listed` = the manifest has its row."""

    page: Page
    ref: PageRef
    listed: bool
    resident: bool


class SlotAllocator:
    """Every slot of one representation in an open store."""

    def __init__(
        self, core: StoreCore, index: PageIndex, descriptor: Descriptor, *, on_demand: bool = False
    ) -> None:
        """`on_demand`: it gets no extent before a page needs it."""
        self.core = core
        self.on_demand = on_demand
        self.index = index
        self.layout = descriptor.layout
        self.repr_id = descriptor.repr_id
        self.infos: list[ExtentInfo] = []  # by first page id
        self.file_bytes = 0
        self.growth_blocked = ""
        self.leaving = 0  # slots of invalid pages that the page thread is about to free
        self.buffer = memoryview(bytearray(self.layout.page_bytes))  # page thread only
        self._layout_id = self.layout.layout_id
        self._growing: Future[None] | None = None
        self._unpoisoned = deque[int]()  # page id << 32 | generation: cheap for the collector

    # -- extents ------------------------------------------------------------------------------

    def info(self, page_id: int) -> ExtentInfo:
        """The extent that holds a slot. Raises StaleRef."""
        at = bisect_right(self.infos, page_id, key=_first_page_id) - 1
        if at < 0 or page_id not in self.infos[at].page_ids:
            raise StaleRef(f"no extent holds page {page_id}")
        return self.infos[at]

    def slices(self) -> Iterator[range]:
        """The ids of every slot, a few at a time."""
        for info in list(self.infos):
            yield from info.slices(SLICE_PAGES)

    def seed(self, page: Page) -> int:
        return keys.sealed_seed(self.core.uuid, page.page_id, page.gen, page.key, self._layout_id)

    def open_extent(self, info: ExtentInfo, gens: dict[int, int]) -> None:
        """Open the file of a recorded extent and add its slots. Raises StoreCorrupt."""
        if info.page_bytes != self.layout.page_bytes:
            raise StoreCorrupt(f"extent {info.index} has pages of another size")
        self.core.extents.open(info)
        self._add(info, gens)

    def _add(self, info: ExtentInfo, gens: dict[int, int]) -> None:
        insort(self.infos, info, key=_first_page_id)
        self.file_bytes += info.file_bytes
        self.core.pool_bytes += info.file_bytes
        for page_id in info.page_ids:
            self.index.add_slot(page_id, gens.get(page_id, 0))

    @property
    def slots_max(self) -> int:
        """Pages that the budget allows beside what the other pools hold."""
        others = self.core.pool_bytes - self.file_bytes
        return max(0, self.core.budget.budget_bytes - others) // self.layout.page_bytes

    @property
    def slots_now(self) -> int:
        """Pages that there are or can be: fewer than `slots_max` while the disk has no room."""
        return min(self.slots_max, len(self.index)) if self.core.not_growing else self.slots_max

    @property
    def is_growing(self) -> bool:
        """Whether an extent is being allocated: a refused `reserve` may soon succeed."""
        return self._growing is not None

    def try_again(self) -> None:
        """Let the pool grow after an extent was refused (takes the lock)."""
        with self.core.lock:
            self.growth_blocked = ""
            if not self.on_demand:
                self.grow_ahead()

    def grow_ahead(self) -> None:
        free = self.index.count(PageState.FREE)
        if free >= GROW_BELOW_SLOTS or self._growing or self.growth_blocked:
            return
        if self.slots_max > len(self.index) or self._may_reclaim():
            self._growing = self.core.thread.submit(self.grow)

    def _may_reclaim(self) -> bool:
        """Whether another pool is so much larger that it must give an extent."""
        wanted = self._extent_slots() * self.layout.page_bytes
        return any(self.core.may_give(pool, self, wanted) for pool in self.core.pools)

    def _extent_slots(self) -> int:
        return max(1, self.core.budget.extent_bytes // self.layout.page_bytes)

    def grow(self) -> None:
        """Add one extent (page thread, or the opener before anything else runs)."""
        core, page_bytes = self.core, self.layout.page_bytes
        with core.lock:
            slots = self._extent_slots()
            left = self.slots_max - len(self.index)
            if left < slots and not self._may_reclaim():
                slots = left
            if slots < 1:
                self._growing = None
                return
        blocked, disk = "", ""
        info = ExtentInfo(
            core.next_extent,
            core.next_page_id,
            slots,
            page_bytes,
            self.repr_id,
            extent_path(core.extents.folder, core.next_extent),
        )
        try:
            core.make_room(info.file_bytes, self)
            core.extents.create(info)
        except BudgetSpent as error:
            blocked = str(error)
        except (StoreError, OSError) as error:
            blocked = disk = str(error)
        with core.lock:
            self._growing = None
            self.growth_blocked = blocked
            core.note_growth(disk)
            if blocked:
                core.counters["growth_blocked"] += 1
                return
            core.next_extent, core.next_page_id = info.index + 1, info.first_page_id + slots
            core.record_extent(
                writes.AddExtent(info.index, info.first_page_id, slots, page_bytes, self.repr_id)
            )
            self._add(info, {})

    def extent_row(self, page_id: int) -> tuple[writes.AddExtent, ...]:
        """The extent's own row while it is not durable, else nothing: it is written in the same
        intent as rows of the extent's pages, so that none of them is durable without it."""
        row = self.core.unrecorded.get(self.info(page_id).index)
        return () if row is None else (row,)

    def give_idle_extents(self) -> int:
        """Delete the extents without a page in use (page thread); returns how many.

        Their pages are evicted first, and overwritten while the page thread is idle: until then
        none is deleted.
        """
        for info in list(self.infos):
            if self._cost(info):
                self._evict_extent(info)
        with self.core.lock:
            if self._unpoisoned:
                return 0
        n = 0
        while self.give_extent():
            n += 1
        return n

    def give_extent(self) -> bool:
        """Evict the pages of one extent, with their descendants, and delete it (page thread).

        The extent with the fewest resident pages is chosen; False = each has a page in use. Takes
        the lock for a slice of pages at a time.
        """
        costs = [
            (cost, info) for info in list(self.infos) if (cost := self._cost(info)) is not None
        ]
        for _, info in sorted(costs, key=lambda pair: (pair[0], pair[1].index)):
            if self._evict_extent(info) and self._remove(info):
                self.core.drop_extent(info)
                self.core.counters["extents_reclaimed"] += 1
                return True
        return False

    def _cost(self, info: ExtentInfo) -> int | None:
        """Resident pages in an extent; None = one of its pages is in use."""
        cost = 0
        for part in info.slices(SLICE_PAGES):
            with self.core.lock:
                pages = [page for i in part if (page := self.index.find(i)) is not None]
                if not all(_is_idle(page) for page in pages):
                    return None
                cost += sum(page.state in EVICTABLE for page in pages)
        return cost

    def _evict_extent(self, info: ExtentInfo) -> bool:
        """Evict the pages of an extent, mostly those first that follow others; False = one is in
        use."""
        return all(map(self._evict_slots, reversed([*info.slices(SLICE_PAGES)])))

    def _evict_slots(self, part: range) -> bool:
        """Evict the pages of a slice of slots; False = one is in use."""
        with self.core.lock:
            pages = filter(None, map(self.index.find, reversed(part)))
            return all(map(self._evict_chain, pages))

    def _remove(self, info: ExtentInfo) -> bool:
        """Forget an extent whose pages were evicted; False = one of its slots has a new page."""
        with self.core.lock:
            if not all(map(self.index.is_empty, info.page_ids)):
                return False
            for page_id in info.page_ids:
                self.index.remove_slot(page_id)
            self.infos.remove(info)
            self.file_bytes -= info.file_bytes
            self.core.pool_bytes -= info.file_bytes
            self.core.forget_extent(info)
            return True

    def _evict_chain(self, page: Page) -> bool:
        """Evict a page, deepest descendants first; False = one is in use, or they are too many."""
        if page.state in (PageState.FREE, PageState.BAD):
            return True
        chain, left = list[Page](), [page]
        while left:
            if len(chain) > CHAIN_MAX:
                return False
            one = left.pop()
            chain.append(one)
            left += self.index.children(one.key)
        if not all(_is_idle(one) for one in chain):
            return False
        for one in reversed(chain):
            self.release(one)
        self.core.counters["pages_evicted"] += len(chain)
        return True

    # -- slots --------------------------------------------------------------------------------

    def take(self) -> Page | NoRoom:
        """Take a slot: (1) evict to stay under the fill limit, (2) take a free slot, (3) evict for
        one when no extent can be added, (4) refuse.

        While the ledger finds no room no page can be published, and the row of an evicted one stays
        until it does: none is evicted under the fill limit, and a single one where no slot is left.
        """
        is_full = self.core.ledger.stats.is_full
        cap = self.slots_max
        high = max(1, cap * FILL_MAX_PERCENT // 100)
        low = min(high - 1, cap * EVICT_TO_PERCENT // 100)
        used = self.index.used - self.leaving
        if used >= high and not is_full:
            self.evict(min(EVICT_BATCH, used - low))
        page = self.index.take_free()
        if page is None or not self.on_demand:
            self.grow_ahead()
        if page is not None:
            return page
        if self.is_growing or self.leaving or (is_full and self.index.count(*UNPUBLISHED)):
            return NoRoom.GROWING
        share = 1 if is_full else len(self.index) * (100 - EVICT_TO_PERCENT) // 100
        if self.evict(max(1, min(EVICT_BATCH, share))) and (page := self.index.take_free()):
            return page
        return NoRoom.FULL

    def evict(self, count: int, priority_max: int | None = None) -> int:
        """Evict up to `count` pages, least valuable first; returns how many."""
        pages = list[Page]()
        while len(pages) < count and (page := self.index.next_victim(priority_max)) is not None:
            self.index.apply(page, PageEvent.RELEASE)
            pages.append(page)
        self.settle(*pages)
        self.core.counters["pages_evicted"] += len(pages)
        return len(pages)

    def release(self, page: Page) -> None:
        self.index.apply(page, PageEvent.RELEASE)
        self.settle(page)

    def unpin(self, page: Page, is_use: bool = True) -> None:
        self.index.unpin(page, is_use)
        self.settle(page)

    def settle(self, *pages: Page) -> None:
        """QUARANTINE -> FREE or BAD once no reader pins the slot and no writer is in it."""
        free, bad, rows = list[PageRef](), list[PageRef](), dict[int, writes.AddExtent]()
        for page in pages:
            if page.state is not PageState.QUARANTINE or page.pins or page.writers:
                continue
            is_bad, listed = page.fails >= FAILURES_MAX, page.listed
            self.index.apply(page, PageEvent.RETIRE if is_bad else PageEvent.FREE)
            page.listed, ref = False, page.ref
            if not is_bad:
                self.poison_later(ref)
            if listed or is_bad:
                (bad if is_bad else free).append(ref)
                rows |= {row.index: row for row in self.extent_row(ref.page_id)}
        if free or bad:
            self.core.append(
                *rows.values(),
                writes.FreePages(tuple(free)),
                writes.RetirePages(tuple(bad), self.repr_id),
            )

    # -- invalid pages ------------------------------------------------------------------------

    def invalidate(self, page: Page, *, slot_failed: bool) -> None:
        """Never serve this page again; its manifest row is freed by the next commit."""
        retracted = [self.retract(page, slot_failed=slot_failed)]
        self.report(retracted)
        self.free_rows(retracted)
        self.unpin(page)

    def retract(self, page: Page, *, slot_failed: bool) -> Retracted:
        """Take a page out of service. A pin keeps its slot until its row is freed.

        `slot_failed`: the bytes failed, which counts against the slot; otherwise only the content
        is wrong.
        """
        page.fails += slot_failed
        retracted = Retracted(page, page.ref, page.listed, page.state in RESIDENT)
        if retracted.resident:
            page.listed = False
            self.index.apply(page, PageEvent.RELEASE)
        self.index.pin(page)
        return retracted

    def report(self, pages: Sequence[Retracted]) -> None:
        """Count retracted pages and say which of them were resident."""
        self.core.counters["pages_rejected"] += len(pages)
        self.core.events.put([one.page.key for one in pages if one.resident])

    def free_rows(self, pages: Sequence[Retracted]) -> None:
        """Free the manifest rows of retracted pages, all or none, before their slots: a slot may
        stay pinned until exit, and no later run may find its bytes. Needs no lock."""
        refs = tuple(PageRef(one.ref.page_id, one.ref.gen + 1) for one in pages if one.listed)
        if refs:
            self.core.append(writes.FreePages(refs))

    def let_go(self, pages: Sequence[Retracted], leaving: bool = False) -> None:
        """Give the pins of retracted pages back, in slices (takes the lock)."""
        for first in range(0, len(pages), RETRACT_SLICE):
            part = pages[first : first + RETRACT_SLICE]
            with self.core.lock:
                for one in part:
                    self.unpin(one.page)
                if leaving:
                    self.leaving -= len(part)

    def poison_later(self, ref: PageRef) -> None:
        """Queue a freed slot for overwriting when the page thread is idle."""
        if not self._unpoisoned:
            self.core.thread.wake()
        self._unpoisoned.append(ref.page_id << 32 | ref.gen)

    def poison_one(self) -> bool:
        """Overwrite one freed slot, unless it has a new use (page thread; takes the lock); False:
        none is left."""
        with self.core.lock:
            if not self._unpoisoned:
                return False
            page_id, gen = divmod(self._unpoisoned.popleft(), 1 << 32)
            page = self.index.find(page_id)
            # a later reserve() of this slot queues its copy behind this write, on this thread
            if page is None or page.gen != gen or page.state is not PageState.FREE:
                return True
        self.overwrite(page_id)
        return True

    def overwrite(self, page_id: int) -> None:
        """Overwrite a slot that nothing reads (page thread; takes the lock)."""
        with self.core.lock:
            info = self.info(page_id)
        np.frombuffer(self.buffer, np.uint8)[:] = POISON
        self.core.extents.write_page(info, page_id, self.buffer)


def _is_idle(page: Page) -> bool:
    if page.state in EVICTABLE:
        return not page.pins
    return page.state in (PageState.FREE, PageState.BAD)
