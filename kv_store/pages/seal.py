"""Seals pages: reserves a slot, copies a page into it from its arena or a peer, publishes its row.

A page is published after it was verified; only its manifest row makes it findable.
The first of two pages with one key wins; their payload digests must be equal.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from kv_store import keys
from kv_store.arenas.arena import Arena, ArenaSlot
from kv_store.errors import NumericsFault, StaleRef, StoreCorrupt, StoreFull
from kv_store.ledger import writes
from kv_store.pages.allocator import NoRoom, SlotAllocator
from kv_store.pages.core import StoreCore
from kv_store.pages.index import SUPERSEDED, Page, PageEvent, PageRef, PageState
from kv_store.pages.load import PageLoader
from kv_store.threads import new_future


@dataclass(slots=True, eq=False)
class Ticket:
    """A reserved page. `page` is its own slot, `duplicate` the resident page with the same key."""

    key: bytes
    parent: bytes
    tokens: bytes
    salt: bytes
    priority: int
    page: Page | None
    duplicate: Page | None
    digest: bytes = b""
    done: bool = False

    def __repr__(self) -> str:
        return f"<Ticket {self.key[:4].hex()} page={self.page!r} duplicate={self.duplicate!r}>"


class PageSealer:
    """Writes pages of one pool."""

    def __init__(self, core: StoreCore, allocator: SlotAllocator, loader: PageLoader) -> None:
        self._core = core
        self._slots = allocator
        self._index = allocator.index
        self._loader = loader
        self._publishing: dict[bytes, tuple[Page, list[Future[PageRef]]]] = {}

    def reserve(
        self,
        parent: bytes,
        tokens: keys.Tokens | bytes,
        salt: bytes,
        priority: int = 0,
        lanes: frozenset[str] = frozenset(),
    ) -> Ticket | NoRoom:
        """A slot for the page of `tokens` after `parent`, computed by `lanes`; evicts if need be.

        Fewer than 256 tokens make a parked tail, which no page can follow (ValueError).
        NoRoom: no slot can be had now; the page stays in its arena.
        """
        ids = keys.token_bytes(tokens)
        key = keys.content_key(parent, ids, self._slots.repr_id, salt)
        with self._core.lock:
            before = self._index.resident(parent)
            if before is not None and before.is_tail:
                raise ValueError(f"{before!r} is a tail: no page follows it")
            duplicate = self._index.resident(key)
            if duplicate is not None and duplicate.tokens != ids:
                # SHA-256 does not collide: the manifest row is damaged
                self._slots.invalidate(duplicate, slot_failed=True)
                duplicate = None
            if duplicate is not None:
                self._index.pin(duplicate)
                return Ticket(key, parent, ids, salt, priority, None, duplicate)
            page = self._slots.take()
            if isinstance(page, NoRoom):
                self._core.counters["reserve_refused"] += 1
                return page
            page.key, page.parent, page.tokens, page.hashed = key, parent, ids, True
            page.lanes = lanes
            return Ticket(key, parent, ids, salt, priority, page, None)

    def seal(
        self, ticket: Ticket, arena: Arena, at: ArenaSlot, lane_digest: bytes
    ) -> Future[PageRef]:
        """Copy an arena slot into the ticket's slot, comparing with the lane's digest.

        Fails with StoreCorrupt (bytes changed), NumericsFault (an equal key has other bytes),
        StoreFull or OSError; the ticket is then given up already.
        """

        def copy(into: memoryview) -> None:
            arena.read_page(self._core.files, at, into)
            if keys.payload_digest(into) != lane_digest:
                raise StoreCorrupt(
                    "an open page changed after its lane had hashed it",
                    why="a stray or late write hit the arena",
                    fix="the page is recomputed",
                )

        return self._seal(ticket, lane_digest, copy)

    def seal_bytes(
        self, ticket: Ticket, data: bytes | bytearray | memoryview, digest: bytes
    ) -> Future[PageRef]:
        """As `seal`, of the bytes of a whole page that another daemon has computed.

        Fails with StoreCorrupt unless `digest` is theirs.
        """

        def copy(into: memoryview) -> None:
            into[:] = data
            if keys.payload_digest(into) != digest:
                raise StoreCorrupt(
                    "the bytes of a page that a peer sent do not have its digest",
                    why="they changed on the way, or the peer is wrong",
                    fix="the page is sent again, or recomputed",
                )

        return self._seal(ticket, digest, copy)

    def _seal(
        self, ticket: Ticket, digest: bytes, copy: Callable[[memoryview], None]
    ) -> Future[PageRef]:
        """Fill the ticket's slot by `copy` on the page thread, or compare with the duplicate."""
        with self._core.lock:
            if ticket.done or ticket.digest:
                raise StaleRef(f"{ticket!r} was used already")
            ticket.digest = digest
            if ticket.page is not None:
                self._index.apply(ticket.page, PageEvent.SEAL)
                ticket.page.writers += 1
        if ticket.page is None:
            return self._core.thread.submit(lambda: self._seal_duplicate(ticket))
        return self._core.thread.submit(lambda: self._seal_page(ticket, copy))

    def publish(self, ticket: Ticket) -> Future[PageRef]:
        """Name a sealed page in the manifest; resolves with the next durable `ledger.commit()`.

        The result is pinned once for the caller and may be an older page with equal bytes.
        """
        future: Future[PageRef] = new_future()
        with self._core.lock:
            if ticket.done or not ticket.digest:
                raise StaleRef(f"{ticket!r} is not sealed")
            page = ticket.page
            if page is not None and page.state is not PageState.SEALED:
                raise StaleRef(f"{page!r} is not sealed")
            ticket.done = True
            if page is None:
                assert ticket.duplicate is not None
                self._publish_duplicate(ticket.duplicate, future)
                return future
            pending = self._publishing.get(ticket.key)
            first = pending[0] if pending else self._index.resident(ticket.key)
            if first is None:
                self._start_publish(ticket, page, future)
                return future
            self._slots.release(page)
            if first.digest != ticket.digest:
                future.set_exception(self._numerics_fault(ticket, first))
            elif pending:
                pending[1].append(future)
            else:
                self._index.pin(first)
                self._core.counters["pages_deduplicated"] += 1
                future.set_result(first.ref)
        return future

    def abort(self, ticket: Ticket) -> None:
        """Give a ticket up before `publish`; does nothing afterwards."""
        with self._core.lock:
            if ticket.done:
                return
            ticket.done = True
            if ticket.page is not None:
                self._slots.release(ticket.page)
            elif ticket.duplicate is not None:
                self._slots.unpin(ticket.duplicate)

    # -- caller's and ledger's threads, under the lock ----------------------------------------

    def _start_publish(self, ticket: Ticket, page: Page, future: Future[PageRef]) -> None:
        row = writes.PublishPage(
            page.ref,
            ticket.key,
            ticket.parent,
            ticket.tokens,
            self._slots.repr_id,
            page.digest,
            page.checksum,
            self._core.epoch,
            ticket.priority,
        )
        self._publishing[ticket.key] = (page, [future])
        written = self._core.ledger.append(*self._slots.extent_row(page.page_id), row)
        written.add_done_callback(lambda done: self._published(ticket, page, done))

    def _publish_duplicate(self, duplicate: Page, future: Future[PageRef]) -> None:
        """Resolve to the older page with the same key, whose pin passes to the caller; a page not
        read since start is verified first."""

        def loaded(done: Future[bool]) -> None:
            if done.result():
                self._core.counters["pages_deduplicated"] += 1
                future.set_result(duplicate.ref)
                return
            with self._core.lock:
                self._slots.unpin(duplicate)
            future.set_exception(StaleRef("the stored page was damaged: reserve and seal again"))

        self._loader.load_one(duplicate.ref).add_done_callback(loaded)

    def _published(self, ticket: Ticket, page: Page, done: Future[int]) -> None:
        """Finish publishing once the manifest row is durable or was refused (ledger thread)."""
        error = done.exception()
        with self._core.lock:
            futures = self._publishing.pop(page.key)[1]
            if error is None:
                page.listed = True
                self._index.apply(page, PageEvent.PUBLISH)
                self._index.touch(page, ticket.priority)
                self._index.pin(page, len(futures))
                self._supersede(ticket)
                self._core.counters["pages_published"] += 1
                self._core.counters["pages_deduplicated"] += len(futures) - 1
            else:
                self._slots.release(page)
            ref = page.ref
        for future in futures:
            if error is None:
                future.set_result(ref)
            else:
                future.set_exception(error)

    def _supersede(self, ticket: Ticket) -> None:
        """Give shorter tails that the new page continues the lowest priority."""
        length = len(ticket.tokens) // 4
        for n in self._index.tail_lengths(ticket.parent, length - 1):
            part = ticket.tokens[: n * 4]
            key = keys.content_key(ticket.parent, part, self._slots.repr_id, ticket.salt)
            tail = self._index.resident(key)
            if tail is not None and tail.priority != SUPERSEDED:
                self._index.touch(tail, SUPERSEDED)
                self._core.counters["tails_superseded"] += 1

    def _numerics_fault(self, ticket: Ticket, first: Page) -> NumericsFault:
        self._core.counters["numerics_faults"] += 1
        return NumericsFault(
            f"one content key has two contents ({ticket.digest.hex()} and {first.digest.hex()})",
            why="a lane computed a page that differs from the one in the store",
            fix="drain the lane and compare its self-test with the others'",
        )

    # -- page thread --------------------------------------------------------------------------

    def _seal_duplicate(self, ticket: Ticket) -> PageRef:
        """Compare with the resident page of the key instead of copying: digests must be equal."""
        duplicate = ticket.duplicate
        assert duplicate is not None
        if duplicate.digest != ticket.digest:
            error = self._numerics_fault(ticket, duplicate)
            self.abort(ticket)
            raise error
        return duplicate.ref

    def _seal_page(self, ticket: Ticket, copy: Callable[[memoryview], None]) -> PageRef:
        page = ticket.page
        assert page is not None
        page_error: BaseException | None = None
        try:
            self._copy_page(ticket, page, copy)
        except BaseException as error:
            page_error = error
        with self._core.lock:
            page.writers -= 1
            if page.state is not PageState.SEALING:  # aborted while the copy ran
                self._slots.settle(page)
                raise StaleRef(f"{ticket!r} was given up")
            if page_error is not None:
                if isinstance(page_error, OSError):
                    page.fails += page_error.errno == errno.EIO
                    self._core.counters["seal_io_errors"] += 1
                    self._core.write_failure = str(page_error)
                self.abort(ticket)
                raise _as_store_error(page_error)
            self._index.apply(page, PageEvent.SEALED)
            self._core.write_failure = ""
            self._core.counters["pages_sealed"] += 1
            return page.ref

    def _copy_page(self, ticket: Ticket, page: Page, copy: Callable[[memoryview], None]) -> None:
        """Fill the buffer with verified bytes, pwrite it, read it back."""
        data, start = self._slots.buffer, time.perf_counter()
        copy(data)
        seed = self._slots.seed(page)
        checksum = keys.sealed_checksum(data, seed)
        info = self._slots.info(page.page_id)
        self._core.extents.write_page(info, page.page_id, data)
        self._core.extents.read_page(info, page.page_id, data)
        if keys.sealed_checksum(data, seed) != checksum:
            page.fails += 1
            self._core.write_failure = "a page read back differs from what was written"
            raise StoreCorrupt(self._core.write_failure)
        page.digest, page.checksum = ticket.digest, checksum
        self._core.rates.note_seal(info.page_bytes, time.perf_counter() - start)


def _as_store_error(error: BaseException) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk is full: the page was not cached", why=str(error))
    return error
