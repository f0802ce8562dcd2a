"""The shared parts of an open store's page pools: lock, ledger, page thread, extents, byte budget.

The indexes live in memory and are changed on the caller's thread and on the two I/O threads under
one lock, held for microseconds and never across I/O. Files are touched by the page thread only,
SQLite by the ledger thread only.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from kv_store import osio
from kv_store.errors import StoreError, StoreFull
from kv_store.events import StoreEvents
from kv_store.ledger import writes
from kv_store.ledger.ledger import Ledger
from kv_store.pages.extents import ExtentInfo, Extents
from kv_store.threads import IntentThread

log = logging.getLogger("batchengine.store")

RATE_WEIGHT = 0.2  # of the newest page: five pages after a change, two thirds of it show
FREE_FLOOR_PERCENT = 5
FREE_FLOOR_BYTES = 2 << 30  # kept for logs and other programs on a disk of any size,
FREE_FLOOR_SHARE = 4  # but never more than one part in so many of a small disk
FREE_FLOOR_BYTES_MAX = 8 << 30  # a larger disk has no more logs for being larger


def derived_floor_bytes(total_bytes: int) -> int:
    """Bytes of a file system that extents leave free: 5 % of it, from 2 GiB (or a quarter) to 8."""
    least = min(FREE_FLOOR_BYTES, total_bytes // FREE_FLOOR_SHARE)
    return min(max(total_bytes * FREE_FLOOR_PERCENT // 100, least), FREE_FLOOR_BYTES_MAX)


class BudgetSpent(StoreFull):
    """All extents of the budget exist; this is no fault."""


@dataclass(slots=True)
class Budget:
    """How many bytes of extents may exist, and how much disk stays free."""

    budget_bytes: int
    extent_bytes: int
    free_floor_bytes: int


@dataclass(slots=True)
class Rates:
    """Measured speed of page reads and writes; None until the first one."""

    read_bytes_per_s: float | None = None  # read and verify
    seal_bytes_per_s: float | None = None  # arena to extent, and read back

    def note_read(self, size: int, seconds: float) -> None:
        self.read_bytes_per_s = _mixed(self.read_bytes_per_s, size / max(seconds, 1e-9))

    def note_seal(self, size: int, seconds: float) -> None:
        self.seal_bytes_per_s = _mixed(self.seal_bytes_per_s, size / max(seconds, 1e-9))


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else before + RATE_WEIGHT * (now - before)


class ExtentOwner(Protocol):
    """The interface of a pool to other pools: the size of its extents, and giving one back.

    growth_blocked: why it got no extent when it asked last; "" = it did, or may ask again.
    """

    growth_blocked: str

    @property
    @abstractmethod
    def file_bytes(self) -> int:
        """Bytes of all its extents."""

    @property
    @abstractmethod
    def on_demand(self) -> bool:
        """Whether it gets an extent only when a page needs it."""

    @abstractmethod
    def give_extent(self) -> bool:
        """Evict one extent's pages and delete the file (page thread); False: all are in use."""

    @abstractmethod
    def poison_one(self) -> bool:
        """Overwrite one freed slot (page thread, when idle); False: none is left."""


class StoreCore:
    """The parts of an open store below its pools."""

    def __init__(
        self,
        ledger: Ledger,
        extents: Extents,
        files: osio.Files,
        budget: Budget,
        *,
        epoch: int,
    ) -> None:
        self.ledger = ledger
        self.extents = extents
        self.files = files
        self.budget = budget
        self.uuid = ledger.replay.store_uuid
        self.epoch = epoch
        self.lock = threading.RLock()
        self.events = StoreEvents()
        self.counters: Counter[str] = Counter()
        self.rates = Rates()
        self.pools: list[ExtentOwner] = []
        self.on_deleted: list[Callable[[int], None]] = []  # get extents' numbers, on any thread
        self.foreign: list[ExtentInfo] = []  # of representations that are not open: deleted first
        self.foreign_bytes = 0
        self.pool_bytes = 0  # of all pools' extents
        self.next_page_id = ledger.replay.next_page_id
        self.next_extent = ledger.replay.next_extent
        self.unrecorded: dict[int, writes.AddExtent] = {}  # rows that are not durable yet
        self.not_growing = ""  # why the disk refused the last extent; "" = it did not
        self.write_failure = ""  # of the last page written; "" = none
        self._is_below_floor = False
        self.thread = IntentThread(
            "kv-pages", idle=lambda: any(pool.poison_one() for pool in list(self.pools))
        )

    @property
    def extent_bytes(self) -> int:
        return self.pool_bytes + self.foreign_bytes

    # -- extents ------------------------------------------------------------------------------

    def add_foreign(self, info: ExtentInfo) -> None:
        self.foreign.append(info)
        self.foreign_bytes += info.file_bytes

    def take_foreign(self, repr_id: bytes) -> list[ExtentInfo]:
        """Remove and return the extents of a representation that is being opened."""
        taken = [info for info in self.foreign if info.repr_id == repr_id]
        self.foreign = [info for info in self.foreign if info.repr_id != repr_id]
        self.foreign_bytes -= sum(info.file_bytes for info in taken)
        return taken

    def make_room(self, wanted: int, asking: ExtentOwner) -> None:
        """Make room for `wanted` more bytes of extents (page thread).

        Extents of representations that are not open go first; then those of the largest pool that
        `may_give` some. Raises BudgetSpent, or StoreFull for the floor.
        """
        limit = self.budget.budget_bytes
        while self.foreign and self.extent_bytes + wanted > limit:
            self.drop_oldest_foreign()
        while self.extent_bytes + wanted > limit:
            self.check_floor(0)  # else a pool would give an extent in vain
            givers = [pool for pool in self.pools if self.may_give(pool, asking, wanted)]
            givers.sort(key=lambda pool: -pool.file_bytes)
            if not any(pool.give_extent() for pool in givers):
                raise BudgetSpent("the budget has no room for another extent")
        self.check_floor(wanted)

    def may_give(self, pool: ExtentOwner, asking: ExtentOwner, wanted: int) -> bool:
        """Whether a pool gives extents to another one: to a pool on demand, whose user knows how
        much it may ask for, or if it is larger by more than `wanted`."""
        if pool is asking or not pool.file_bytes:
            return False
        is_asked = asking.on_demand and not pool.on_demand
        return is_asked or pool.file_bytes > asking.file_bytes + wanted

    def drop_extent(self, info: ExtentInfo) -> None:
        """Delete the file of an extent that its pool has forgotten (page thread)."""
        try:
            self.extents.drop(info)
        except OSError as error:  # the next opening finds it, and deletes it
            log.error("extent %d cannot be deleted: %s", info.index, error)
        for pool in self.pools:
            pool.growth_blocked = ""  # there may be room for an extent now
        for deleted in self.on_deleted:
            deleted(info.index)

    def drop_oldest_foreign(self) -> int:
        """Delete one extent of a representation that is not open; gives its slots (page thread)."""
        info = self.foreign[0]
        self.drop_foreign(info)
        return info.slots

    def drop_foreign(self, info: ExtentInfo) -> None:
        """Delete an extent of a representation that is not open (page thread)."""
        with self.lock:
            self.foreign.remove(info)
            self.foreign_bytes -= info.file_bytes
            self.forget_extent(info)
        self.extents.drop(info)

    def give_disk_space(self) -> int:
        """Delete the extents of representations that are not open, or else one extent (page
        thread); returns how many."""
        count = len(self.foreign)
        while self.foreign:
            self.drop_oldest_foreign()
        if not count:
            count = int(any(pool.give_extent() for pool in self.pools))
        self.ledger.commit()
        return count

    def forget_extent(self, info: ExtentInfo) -> None:
        """Delete the rows of an extent and of its pages."""
        self.unrecorded.pop(info.index, None)
        self.append(writes.DropExtent(info.index, info.first_page_id, info.slots))

    def append(self, *rows: writes.Op) -> None:
        """Write rows by the next commit; when the disk is full, by the first one with room."""

        def written(done: Future[int]) -> None:
            if isinstance(done.exception(), StoreFull):
                self.append(*rows)

        self.ledger.append(*rows).add_done_callback(written)

    def record_extent(self, row: writes.AddExtent) -> None:
        """Write the row of an extent; `retry_rows` tries again if a full disk refuses it."""
        self.unrecorded[row.index] = row

        def written(done: Future[int]) -> None:
            if done.exception() is None:
                with self.lock:
                    self.unrecorded.pop(row.index, None)

        self.ledger.append(row).add_done_callback(written)

    def retry_rows(self) -> None:
        for row in list(self.unrecorded.values()):
            self.record_extent(row)

    # -- disk space ---------------------------------------------------------------------------

    def check_floor(self, wanted: int) -> None:
        free = self.files.free_bytes(self.extents.folder)[0]
        self._is_below_floor = free - wanted < self.budget.free_floor_bytes
        if self._is_below_floor:
            raise StoreFull(
                f"the disk has {free >> 20} MiB free",
                why=f"{self.budget.free_floor_bytes >> 20} MiB stay free for others",
                fix="free disk space or lower the store's free_floor_bytes; serving goes on with"
                " what is cached",
            )

    def look_again(self) -> None:
        """Check for disk space again after the floor refused an extent (page thread)."""
        if not self.not_growing or not self._is_below_floor:
            return  # other refusals end with the next attempt
        try:
            self.check_floor(min(self.budget.extent_bytes, self.budget.budget_bytes))
        except (StoreError, OSError):
            return
        self.note_growth("")

    def note_growth(self, refusal: str) -> None:
        """Set `not_growing`; log one line when the refusals begin, one when they end."""
        was, self.not_growing = self.not_growing, refusal
        if refusal and not was:
            log.warning("store: no pages are added: %s", refusal)
        elif was and not refusal:
            log.warning("store: there is disk space again, pages are added as needed")
