"""From arena to manifest: reserve a place, seal a copy into it, publish its row, or give it up.

Publishing comes after verifying, and the manifest row is the only thing that makes a page found.
The first of two pages with one key wins; their payload digests must be equal.
"""

from __future__ import annotations

import errno
import time
from concurrent.futures import Future
from dataclasses import dataclass

from kv_store import keys, records
from kv_store.arena import Arena, ArenaPlace
from kv_store.errors import NumericsFault, StaleRef, StoreCorrupt, StoreFull
from kv_store.loading import LoadingPool
from kv_store.pages import SUPERSEDED, Page, PageEvent, PageRef, PageState
from kv_store.places import Parts
from kv_store.threads import new_future


@dataclass(slots=True, eq=False)
class Ticket:
    """A promised page. `page` is its own place, `twin` the resident page with the same key."""

    key: bytes
    parent: bytes
    tokens: bytes
    salt: bytes
    priority: int
    page: Page | None
    twin: Page | None
    digest: bytes = b""
    done: bool = False

    def __repr__(self) -> str:
        return f"<Ticket {self.key[:4].hex()} page={self.page!r} twin={self.twin!r}>"


class SealingPool(LoadingPool):
    """`LoadingPool` plus writing."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._publishing: dict[bytes, tuple[Page, list[Future[PageRef]]]] = {}

    def reserve(
        self, parent: bytes, tokens: keys.Tokens | bytes, salt: bytes, priority: int = 0
    ) -> Ticket | None:
        """A place for the page of `tokens` after `parent`, evicting if need be.

        Fewer than 256 tokens make a parked tail, which no page can follow (ValueError). None = not
        now, see `refusal`; the page then simply stays in its arena.
        """
        ids = keys.token_bytes(tokens)
        key = keys.content_key(parent, ids, self.repr_id, salt)
        with self._lock:
            before = self._table.resident(parent)
            if before is not None and before.is_tail:
                raise ValueError(f"{before!r} is a tail: no page follows it")
            twin = self._table.resident(key)
            if twin is not None and twin.tokens != ids:
                self._reject(twin)  # SHA-256 does not collide: the manifest row is damaged
                twin = None
            if twin is not None:
                twin.pins += 1
                return Ticket(key, parent, ids, salt, priority, None, twin)
            page = self._take_place()
            if page is None:
                self.counters["reserve_refused"] += 1
                return None
            self.refusal = ""
            page.key, page.parent, page.tokens = key, parent, ids
            return Ticket(key, parent, ids, salt, priority, page, None)

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

    # -- caller's and ledger's threads, under the lock ----------------------------------------

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
        written = self.ledger.append(*self._extent_row(page.page_id), row)
        written.add_done_callback(lambda done: self._published(ticket, page, done))

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

    def _published(self, ticket: Ticket, page: Page, done: Future[int]) -> None:
        """The manifest row is durable, or will never be (ledger thread)."""
        error = done.exception()
        with self._lock:
            futures = self._publishing.pop(page.key)[1]
            if error is None:
                page.listed = True
                self._table.apply(page, PageEvent.PUBLISH)
                self._table.touch(page, ticket.priority)
                page.pins += len(futures)
                self._supersede(ticket)
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

    def _supersede(self, ticket: Ticket) -> None:
        """Shorter tails that the new page continues are of no more use than any evicted page."""
        length = len(ticket.tokens) // 4
        for n in self._table.tail_lengths(ticket.parent, length - 1):
            part = ticket.tokens[: n * 4]
            key = keys.content_key(ticket.parent, part, self.repr_id, ticket.salt)
            tail = self._table.resident(key)
            if tail is not None and tail.priority != SUPERSEDED:
                self._table.touch(tail, SUPERSEDED)
                self.counters["tails_superseded"] += 1

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
                    self._write_failure = str(page_error)
                self.abort(ticket)
                raise _as_store_error(page_error)
            self._table.apply(page, PageEvent.SEALED)
            self._write_failure = ""
            self.counters["pages_sealed"] += 1
            return page.ref

    def _copy_page(self, ticket: Ticket, page: Page, arena: Arena, at: ArenaPlace) -> None:
        """pread the arena, compare with the lane, pwrite that very buffer, read it back."""
        data, start = self._buffer, time.perf_counter()
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
                self._write_failure = "a page read back differs from what was written"
                raise StoreCorrupt(self._write_failure)
        page.digest, page.checksum = ticket.digest, checksum
        self.rates.note_seal(info.page_bytes, time.perf_counter() - start)


def _as_store_error(error: BaseException) -> BaseException:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull("the disk is full: the page was not cached", why=str(error))
    return error
