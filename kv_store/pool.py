"""Pages between arena and extents: reserve, seal, publish, match, load, evict.

The index lives in memory and is changed on the caller's thread and on the two I/O threads under
one lock, held for microseconds and never across I/O. Files are touched by the page thread only,
SQLite by the ledger thread only. `Store` adds the directory: lock, recovery, arenas, closing.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_store import keys, osio, records
from kv_store.arena import POISON, Arena, ArenaPlace
from kv_store.errors import NumericsFault, StaleRef, StoreCorrupt, StoreError, StoreFull
from kv_store.extent import ExtentInfo, Extents, extent_path
from kv_store.layout import PAGE_TOKENS, Descriptor
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
from kv_store.threads import IntentThread, new_future

# Evicting in batches keeps the choice cheap; the last tenth is for pages that are pinned.
FILL_MAX_PERCENT = 90
EVICT_TO_PERCENT = 85
GROW_BELOW_PLACES = 8  # a prefill seals a few pages per second; allocating takes less than that


@dataclass(frozen=True, slots=True)
class PageProof:
    """What a lane needs to verify an extent copy through its own mapping: XXH3-128 of the whole
    page with `seed` must equal `checksum`."""

    place_code: int
    seed: int
    checksum: bytes


@dataclass(slots=True, eq=False)
class Ticket:
    """A promised page. `page` is its own place, `twin` the resident page with the same key."""

    key: bytes
    parent: bytes
    tokens: bytes
    priority: int
    page: Page | None
    twin: Page | None
    digest: bytes = b""
    done: bool = False

    def __repr__(self) -> str:
        return f"<Ticket {self.key[:4].hex()} page={self.page!r} twin={self.twin!r}>"


@dataclass(slots=True)
class Budget:
    """How many bytes of extents may exist, and how much disk stays free."""

    budget_bytes: int
    extent_bytes: int
    free_floor_bytes: int


class PagePool:
    """The pages of one open store. Methods without a Future do no I/O."""

    def __init__(
        self,
        descriptor: Descriptor,
        store_uuid: bytes,
        ledger: Ledger,
        extents: Extents,
        files: osio.Files,
        budget: Budget,
        *,
        epoch: int,
        verify_writes: bool,
    ) -> None:
        self.descriptor = descriptor
        self.layout = descriptor.layout
        self.repr_id = descriptor.repr_id
        self.uuid = store_uuid
        self.epoch = epoch
        self.ledger = ledger
        self.refusal = ""  # why the last reserve() gave None
        self.counters: Counter[str] = Counter()
        self._extents = extents
        self._files = files
        self._budget = budget
        self._verify_writes = verify_writes
        self._lock = threading.RLock()
        self._table = PageTable()
        self._infos: list[ExtentInfo] = []  # of this representation, by first page id
        self._foreign: list[ExtentInfo] = []  # of other representations: first to go
        self._next_page_id = 0
        self._next_extent = 1
        self._growing: Future[None] | None = None
        self._growth_blocked = ""
        self._publishing: dict[bytes, tuple[Page, list[Future[PageRef]]]] = {}
        self._loads: dict[PageRef, Future[bool]] = {}
        self._poison_queue: deque[PageRef] = deque()
        self._layout_id = self.layout.layout_id
        self._buffer = memoryview(bytearray(self.layout.page_bytes))  # page thread only
        self._pages_io = IntentThread("kv-pages", self._poison_one)

    # -- lookup -------------------------------------------------------------------------------

    def match_prefix(
        self,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        *,
        tokens_max: int | None = None,
        pin: bool = False,
        priority: int | None = None,
    ) -> list[PageRef]:
        """The longest run of full pages, from the first token on, that the store knows.

        Token ids are compared, not only their hash. At most `tokens_max` tokens are covered.
        Pages that were not read since start are included: `load()` them before use.
        """
        ids, parent, found = keys.token_bytes(tokens), keys.ROOT_KEY, list[PageRef]()
        if tokens_max is not None:
            ids = ids[: max(0, tokens_max) * 4]
        step = PAGE_TOKENS * 4
        with self._lock:
            for end in range(step, len(ids) + 1, step):
                part = ids[end - step : end]
                parent = keys.content_key(parent, part, self.repr_id, salt)
                page = self._table.resident(parent)
                if page is None or page.tokens != part:
                    break
                self._table.touch(page, priority)
                page.pins += pin
                found.append(page.ref)
            self.counters["pages_matched"] += len(found)
        return found

    def key_of(self, parent: bytes, tokens: keys.Tokens | bytes, salt: bytes) -> bytes:
        return keys.content_key(parent, tokens, self.repr_id, salt)

    def pin(self, ref: PageRef) -> None:
        """Forbid eviction of a resident page. Raises StaleRef."""
        with self._lock:
            page = self._table.get(ref)
            if page.state not in RESIDENT:
                raise StaleRef(f"{page!r} cannot be pinned")
            page.pins += 1
            self._table.touch(page)

    def unpin(self, ref: PageRef) -> None:
        """Give one pin back. Raises StaleRef when there is none to give."""
        with self._lock:
            page = self._table.get(ref)
            if page.pins < 1:
                raise StaleRef(f"{page!r} is not pinned")
            page.pins -= 1
            self._settle(page)

    def touch(self, refs: Sequence[PageRef], priority: int) -> None:
        """Mark pages as used now, with a new eviction priority (lower goes first)."""
        with self._lock:
            for ref in refs:
                page = self._table.get(ref)
                if page.state in RESIDENT:
                    self._table.touch(page, priority)

    def state(self, ref: PageRef) -> PageState:
        with self._lock:
            return self._table.get(ref).state

    def place_code(self, ref: PageRef) -> int:
        """Where a lane finds the page: (extent index << 32) | place."""
        with self._lock:
            self._table.get(ref)
            return self._info(ref.page_id).place_code(ref.page_id)

    def proof(self, ref: PageRef) -> PageProof:
        """How a lane checks the sealed or published page through its own mapping."""
        with self._lock:
            page = self._table.get(ref)
            if not page.checksum:
                raise StaleRef(f"{page!r} is not sealed")
            return PageProof(
                self._info(ref.page_id).place_code(ref.page_id), self._seed(page), page.checksum
            )

    def digest(self, ref: PageRef) -> bytes:
        """The unseeded payload digest: what a recomputation must equal."""
        with self._lock:
            return self._table.get(ref).digest

    def extents(self) -> list[ExtentInfo]:
        """Every extent a lane may have to map."""
        with self._lock:
            return list(self._infos)

    # -- arena to extent ----------------------------------------------------------------------

    def reserve(
        self, parent: bytes, tokens: keys.Tokens | bytes, salt: bytes, priority: int = 0
    ) -> Ticket | None:
        """A place for the page of `tokens` after `parent`, evicting if need be.

        None = not now, see `refusal`; the page then simply stays in its arena.
        """
        ids = keys.token_bytes(tokens)
        key = keys.content_key(parent, ids, self.repr_id, salt)
        with self._lock:
            twin = self._table.resident(key)
            if twin is not None and twin.tokens != ids:
                self._reject(twin)  # SHA-256 does not collide: the manifest row is damaged
                twin = None
            elif twin is not None and twin.state is PageState.LISTED and not twin.pins:
                self._release(twin)  # never read since start; the copy we are given is certain
                twin = None
            if twin is not None:
                twin.pins += 1
                return Ticket(key, parent, ids, priority, None, twin)
            page = self._take_place()
            if page is None:
                self.counters["reserve_refused"] += 1
                return None
            self.refusal = ""
            page.key, page.parent, page.tokens = key, parent, ids
            return Ticket(key, parent, ids, priority, page, None)

    def seal(
        self, ticket: Ticket, arena: Arena, at: ArenaPlace, lane_digest: bytes
    ) -> Future[PageRef]:
        """Copy an arena place into the ticket's place, comparing with the lane's digest.

        Fails with StoreCorrupt (bytes changed), NumericsFault (an equal key has other bytes),
        StoreFull or OSError; the ticket is then given up already.
        """
        with self._lock:
            if ticket.done or ticket.digest:
                raise StaleRef(f"{ticket!r} was used already")
            ticket.digest = lane_digest
            if ticket.page is not None:
                self._table.apply(ticket.page, PageEvent.SEAL)
                ticket.page.writers += 1
        intent = self._seal_twin if ticket.page is None else self._seal_page
        return self._pages_io.submit(lambda: intent(ticket, arena, at))

    def publish(self, ticket: Ticket) -> Future[PageRef]:
        """Name a sealed page in the manifest; resolves with the next durable `ledger.commit()`.

        The result is pinned once for the caller and may be an older page with equal bytes.
        """
        future: Future[PageRef] = new_future()
        with self._lock:
            if ticket.done or not ticket.digest:
                raise StaleRef(f"{ticket!r} is not sealed")
            page = ticket.page
            if page is not None and page.state is not PageState.SEALED:
                raise StaleRef(f"{page!r} is not sealed")
            ticket.done = True
            if page is None:
                assert ticket.twin is not None
                self._publish_twin(ticket.twin, future)
                return future
            pending = self._publishing.get(ticket.key)
            first = pending[0] if pending else self._table.resident(ticket.key)
            if first is None:
                self._start_publish(ticket, page, future)
                return future
            self._release(page)
            if first.digest != ticket.digest:
                future.set_exception(self._numerics_fault(ticket, first))
            elif pending:
                pending[1].append(future)
            else:
                first.pins += 1
                self.counters["pages_deduplicated"] += 1
                future.set_result(first.ref)
        return future

    def abort(self, ticket: Ticket) -> None:
        """Give a ticket up at any time before publish; harmless afterwards."""
        with self._lock:
            if ticket.done:
                return
            ticket.done = True
            if ticket.page is not None:
                self._release(ticket.page)
            elif ticket.twin is not None:
                ticket.twin.pins -= 1
                self._settle(ticket.twin)

    # -- loading and doubt --------------------------------------------------------------------

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
                    page.pins -= 1
                    self._settle(page)
            return good

        return self._pages_io.submit(intent)

    def condemn(self, ref: PageRef) -> None:
        """Never serve this page again; its place is retired at the second failure."""
        with self._lock:
            page = self._table.get(ref)
            if page.state in (PageState.PUBLISHED, PageState.LISTED):
                self._reject(page)

    # -- the caller's duties ------------------------------------------------------------------

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
        blocked = ""
        try:
            self._make_room(info.file_bytes)
            self._extents.create(info)
        except (StoreError, OSError) as error:
            blocked = str(error)
        with self._lock:
            self._growing = None
            self._growth_blocked = blocked
            if blocked:
                self.counters["growth_blocked"] += 1
                return
            self._next_extent, self._next_page_id = index + 1, first + places
            self.ledger.append(records.AddExtent(index, first, places, page_bytes, self.repr_id))
            self._add_places(info, {})

    def _make_room(self, wanted: int) -> None:
        """Drop other representations' extents that the budget has no room for; check the floor."""
        while self._foreign and self._extent_bytes() + wanted > self._budget.budget_bytes:
            with self._lock:
                info = self._foreign.pop(0)
                self.ledger.append(records.DropExtent(info.index, info.first_page_id, info.places))
            self._extents.drop(info)
        if self._extent_bytes() + wanted > self._budget.budget_bytes:
            raise StoreFull("the budget has no room for another extent")
        free = self._files.free_bytes(self._extents.folder)[0]
        if free - wanted < self._budget.free_floor_bytes:
            raise StoreFull(
                f"the disk has {free >> 20} MiB free",
                why=f"{self._budget.free_floor_bytes >> 20} MiB stay free for others",
                fix="free disk space; serving goes on with what is cached",
            )

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
            self.ledger.append(records.FreePage(page.ref, self.repr_id, bad))
        if not bad:
            self._poison_queue.append(page.ref)
            self._pages_io.wake()

    def _reject(self, page: Page) -> None:
        """A resident page whose bytes or place failed."""
        page.fails += 1
        self.counters["pages_rejected"] += 1
        if page.state in RESIDENT:
            self._release(page)

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

    def _start_publish(self, ticket: Ticket, page: Page, future: Future[PageRef]) -> None:
        row = records.PublishPage(
            page.ref,
            ticket.key,
            ticket.parent,
            ticket.tokens,
            self.repr_id,
            page.digest,
            page.checksum,
            self.epoch,
            ticket.priority,
            0,
        )
        self._publishing[ticket.key] = (page, [future])
        self.ledger.append(row).add_done_callback(
            lambda done: self._published(page, ticket.priority, done)
        )

    def _publish_twin(self, twin: Page, future: Future[PageRef]) -> None:
        """An older page has the key, and the ticket's pin on it passes to the caller; if it was
        not read since start, it must verify first."""

        def loaded(done: Future[bool]) -> None:
            if done.result():
                self.counters["pages_deduplicated"] += 1
                future.set_result(twin.ref)
                return
            with self._lock:
                twin.pins -= 1
                self._settle(twin)
            future.set_exception(StaleRef("the stored page was damaged: reserve and seal again"))

        self._load_one(twin.ref).add_done_callback(loaded)

    def _published(self, page: Page, priority: int, done: Future[int]) -> None:
        """The manifest row is durable, or will never be (ledger thread)."""
        error = done.exception()
        with self._lock:
            futures = self._publishing.pop(page.key)[1]
            if error is None:
                page.listed = True
                self._table.apply(page, PageEvent.PUBLISH)
                self._table.touch(page, priority)
                page.pins += len(futures)
                self.counters["pages_published"] += 1
                self.counters["pages_deduplicated"] += len(futures) - 1
            else:
                self._release(page)
            ref = page.ref
        for future in futures:
            if error is None:
                future.set_result(ref)
            else:
                future.set_exception(error)

    def _numerics_fault(self, ticket: Ticket, first: Page) -> NumericsFault:
        self.counters["numerics_faults"] += 1
        return NumericsFault(
            f"one content key has two contents ({ticket.digest.hex()} and {first.digest.hex()})",
            why="a lane computed a page that differs from the one in the store",
            fix="drain the lane and compare its self-test with the others'",
        )

    # -- page thread --------------------------------------------------------------------------

    def _seal_twin(self, ticket: Ticket, arena: Arena, at: ArenaPlace) -> PageRef:
        """The key is resident already: nothing to copy, but the bytes must be equal."""
        twin = ticket.twin
        assert twin is not None
        if twin.digest != ticket.digest:
            error = self._numerics_fault(ticket, twin)
            self.abort(ticket)
            raise error
        return twin.ref

    def _seal_page(self, ticket: Ticket, arena: Arena, at: ArenaPlace) -> PageRef:
        page = ticket.page
        assert page is not None
        page_error: BaseException | None = None
        try:
            self._copy_page(ticket, page, arena, at)
        except BaseException as error:
            page_error = error
        with self._lock:
            page.writers -= 1
            if page.state is not PageState.SEALING:  # aborted while the copy ran
                self._settle(page)
                raise StaleRef(f"{ticket!r} was given up")
            if page_error is not None:
                if isinstance(page_error, OSError):
                    page.fails += page_error.errno == errno.EIO
                    self.counters["seal_io_errors"] += 1
                self.abort(ticket)
                raise _as_store_error(page_error)
            self._table.apply(page, PageEvent.SEALED)
            self.counters["pages_sealed"] += 1
            return page.ref

    def _copy_page(self, ticket: Ticket, page: Page, arena: Arena, at: ArenaPlace) -> None:
        """pread the arena, compare with the lane, pwrite that very buffer, read it back."""
        data = self._buffer
        arena.read_page(self._files, at, data)
        if keys.payload_digest(data) != ticket.digest:
            raise StoreCorrupt(
                "an open page changed after its lane had hashed it",
                why="a stray or late write hit the arena",
                fix="the page is recomputed",
            )
        seed = keys.sealed_seed(self.uuid, page.page_id, page.gen, ticket.key, self._layout_id)
        checksum = keys.sealed_checksum(data, seed)
        info = self._info(page.page_id)
        place = info.place_of(page.page_id)
        self._extents.write_page(info, place, data)
        if self._verify_writes:
            self._extents.read_page(info, place, data)
            if keys.sealed_checksum(data, seed) != checksum:
                page.fails += 1
                raise StoreCorrupt("a page read back differs from what was written")
        page.digest, page.checksum = ticket.digest, checksum

    def _bytes_match(self, page: Page) -> bool:
        info = self._info(page.page_id)
        try:
            self._extents.read_page(info, info.place_of(page.page_id), self._buffer)
        except (OSError, StoreCorrupt):
            return False
        self.counters["pages_verified"] += 1
        return (
            keys.sealed_checksum(self._buffer, self._seed(page)) == page.checksum
            and keys.payload_digest(self._buffer) == page.digest
        )

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


def _as_store_error(error: BaseException) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk is full: the page was not cached", why=str(error))
    return error
