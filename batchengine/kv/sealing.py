"""Seal pipeline: seals full pages from the arena into the store, and parks tails of idle sessions.

Owns the pipeline of one lane. A seal whose session left continues, for prefix sharing. A seal that
fails with valid rows, because the store has no room, stalls until `retry`. A seal with invalid rows
is dropped: its session recomputes them. Sealing a tail is best effort: its rows stay in the arena.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from batchengine.core import PAGE_TOKENS
from batchengine.kv.arenas import DeadArenas
from batchengine.kv.digests import DigestQueue
from batchengine.kv.disputes import Disputes
from batchengine.kv.readback import ReadBack
from batchengine.kv.slots import Seal, Slots
from batchengine.session import Session, State
from batchengine.session_kv import ParkedTail, page_start
from batchengine.wire import lane as wire
from kv_store import keys
from kv_store.arenas.arena import ArenaSlot
from kv_store.errors import NumericsFault, StoreCorrupt, StoreError
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import PageRef
from kv_store.pages.pool import Ticket
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class SealPipeline:
    """Seals of one lane, from the digest of a page to the swap of its table entry.

    `wake` is called from any thread when `poll` has something to do; `commit` when a manifest row
    waits for a commit.
    """

    def __init__(
        self,
        store: Store,
        slots: Slots,
        arenas: DeadArenas,
        disputes: Disputes,
        wake: Callable[[], None],
        commit: Callable[[], None],
    ) -> None:
        self._store = store
        self._slots = slots
        self.digests = DigestQueue(slots)
        self.read_back = ReadBack(store)
        self._arenas = arenas
        self._disputes = disputes
        self._wake = wake
        self._commit = commit
        self.in_flight: dict[Seal, Callable[[], None]] = {}  # seal -> releases its arena
        self._pending: list[Seal] = []  # without a ticket, oldest first
        self._stalled: list[Seal] = []  # failed with valid rows: see `retry`
        self._done: deque[tuple[Seal, Future[PageRef]]] = deque()
        self.publishes = True  # False = the rows of this lane may be wrong
        self.sealed = 0
        self.seal_failures = 0

    def __repr__(self) -> str:
        return f"<SealPipeline queued={len(self.queued)} in_flight={len(self.in_flight)}>"

    # --------------------------------------------------------------------------------- queries

    @property
    def queued(self) -> list[Seal]:
        """Seals without a ticket, oldest first, except those that lost their slot."""
        self._pending = [seal for seal in self._pending if self._has_slot(seal)]
        return self._pending

    @property
    def stalled(self) -> list[Seal]:
        """Seals that failed with valid rows, except those that lost their slot."""
        self._stalled = [seal for seal in self._stalled if self._has_slot(seal)]
        return self._stalled

    def _has_slot(self, seal: Seal) -> bool:
        return self._slots.seals.get(seal.slot) is seal

    @property
    def has_results(self) -> bool:
        """Whether there are results of the store's threads for `poll`."""
        return bool(self._done)

    @property
    def is_moving(self) -> bool:
        """Whether slots will be freed: seals are in flight, or the store is making room.

        A seal that failed before does not count, since every retry may fail again.
        """
        waiting = self.read_back.waiting()
        in_flight = any(not seal.again for seal in self.in_flight.keys() - waiting)
        return in_flight or bool(self.queued and self._store.pages.allocator.is_growing)

    # ----------------------------------------------------------------------------- digests

    def park(self, session: Session) -> bool:
        """Have the open tail of a session that does not run sealed as a partial page.

        False if there is nothing to park. Sets `session.kv.parked` when done, unless it fails.
        """
        if not self.publishes or not self.digests.add_tail(session):
            return False
        self._wake()
        return True

    def digested(
        self, session: Session, index: int, rows: int, slot: ArenaSlot, digest: bytes
    ) -> None:
        """Start sealing what `digests.take` returned and the lane digested."""
        if slot in self._slots.seals or not self.digests.is_due(session, index, rows, slot):
            return
        if rows == PAGE_TOKENS or session.kv.parked is None:
            self.filled(session, index, slot, digest, rows)

    def filled(
        self,
        session: Session,
        index: int,
        slot: ArenaSlot,
        digest: bytes,
        rows: int = PAGE_TOKENS,
    ) -> None:
        """Start sealing an open page of which the lane has digested the first `rows` rows."""
        if self._slots.arena is None:
            return
        self._slots.know_keys(session, index + (rows == PAGE_TOKENS))
        parent = session.kv.keys[index - 1] if index else keys.ROOT_KEY
        seal = Seal(session, index, slot, self._slots.arena, digest, parent, rows)
        if rows == PAGE_TOKENS and session.kv.digests.pop(session.kv.keys[index], digest) != digest:
            log.error("%r: page %d is another one than a peer was given", session, index)
            seal.dropped = True
            self._disputes.dispute(seal)
        self._slots.seals[slot] = seal  # replaces the seal of the page as a tail, if any
        self._pending.append(seal)
        self.start_seals()

    # ------------------------------------------------------------------------------- seals

    def start_seals(self) -> None:
        """Give tickets to full pages, in page order within a session, while the store has room.

        The first refusal, which scans every page, ends the round and puts its session behind the
        others: a page of another session may be in the store already.
        """
        if not self.publishes:
            return
        for seal in list(self.queued):
            session = seal.session
            if session is None or seal.dropped or not self._has_slot(seal):
                continue
            seal.ticket = self._reserve(seal, session)
            if seal.ticket is None and seal.is_tail:
                self._pending.remove(seal)
                self._end(seal)
                return
            if seal.ticket is None:
                self._pending.sort(key=lambda other: other.session is session)  # stable
                return
            self._pending.remove(seal)
            self._slots.recount(session)
            self._follow(
                seal, self._store.pages.seal(seal.ticket, seal.arena, seal.slot, seal.digest)
            )

    def _reserve(self, seal: Seal, session: Session) -> Ticket | None:
        """Reserve a slot in the store, unpinning pages of sessions that do not run if necessary."""
        while True:
            found = self._store.pages.reserve(
                seal.parent, seal.tokens, seal.salt, seal.priority, seal.lanes
            )
            if isinstance(found, Ticket):
                return found
            if found is NoRoom.GROWING or seal.is_tail:
                return None
            if not (self._slots.evict_oldest(session) or self._reopen_last(seal, session)):
                return None

    def _reopen_last(self, seal: Seal, session: Session) -> bool:
        """Unpin the last page of the session that was published before the one of `seal`, which
        precedes it: it takes the room, and cannot enter the table before. It is sealed again."""
        later = [other for other in self.read_back.queued if other.session is session]
        last = max(later, key=lambda other: other.index, default=seal)
        if last.index <= seal.index or last.ref is None:
            return False
        self.read_back.queued.remove(last)
        self._store.pages.unpin(last.ref)
        self._end(last)
        self._keep_open(last, session)
        self._pending.append(last)
        return True

    def _keep_open(self, seal: Seal, session: Session) -> None:
        """Have the seal of an open page begin anew, when it is queued again."""
        seal.written, seal.ref, seal.again = False, None, True
        self._slots.seals[seal.slot] = seal
        self._slots.recount(session)

    def _follow(self, seal: Seal, future: Future[PageRef]) -> None:
        if seal not in self.in_flight:
            self.in_flight[seal] = self._arenas.hold(seal.arena)
        self._disputes.seals.add(seal)

        def done(finished: Future[PageRef]) -> None:
            self._done.append((seal, finished))
            self._wake()

        future.add_done_callback(done)

    def poll(self) -> None:
        """Apply the results of the store's threads. Called between steps."""
        while self._done:
            seal, future = self._done.popleft()
            error = future.exception()
            if error is not None or seal.ticket is None:
                self._seal_failed(seal, error or StoreError("the seal lost its ticket"))
            elif seal.dropped or not self.publishes:
                self._not_published(seal, future.result())
            elif not seal.written:
                seal.written = True
                self._follow(seal, self._store.pages.publish(seal.ticket))
                self._commit()
            else:
                seal.ref = future.result()  # may name an older, equal page
                if seal.is_tail:
                    self._tail_parked(seal, seal.ref)
                elif seal.arena is self._slots.arena:
                    self.read_back.queued.append(seal)
                else:
                    self.unverified([seal])

    def _not_published(self, seal: Seal, ref: PageRef) -> None:
        """Fail a seal that must not be published; if it was, invalidate its page."""
        if seal.written:
            ticket = seal.ticket
            self._store.pages.unpin(ref)
            if ticket is not None and ticket.page is not None and ticket.page.ref == ref:
                self._disputes.invalidate([ticket.key])  # else it is an older, equal page
        self._seal_failed(seal, StoreError("its rows are invalid, or its lane publishes nothing"))

    def _tail_parked(self, seal: Seal, ref: PageRef) -> None:
        """Set `parked` of the tail's session if the tail has not changed; else unpin the copy."""
        session, rows = seal.session, len(seal.tokens)
        self._leave_tail(seal)
        if (
            session is not None
            and self.digests.may_park(session)
            and seal.arena is self._slots.arena
            and seal.slot in session.kv.open
            and session.frontier == page_start(seal.index) + rows
            and session.kv.parked is None
        ):
            session.kv.parked = ParkedTail(seal.index, rows, ref)
        else:
            self._store.pages.unpin(ref)

    def _leave_tail(self, seal: Seal) -> None:
        """End a tail's seal; free the slot only if its session gave it up meanwhile."""
        session = seal.session
        self._end(seal)
        if session is None and seal.arena is self._slots.arena:
            self._slots.free(seal.slot)
        elif session is not None:
            self._slots.recount(session)

    def verified(self, seal: Seal, good: bool) -> None:
        """Replace the open page by its copy in the store, if that was read back `good`."""
        ref, session = seal.ref, seal.session
        if ref is None:
            raise RuntimeError("verified before publish")
        if not good:
            # Other sessions may hold the page: it is published, or an older, equal page.
            self._store.pages.invalidate(ref, slot_failed=True)
            self._store.pages.unpin(ref)
            self._seal_failed(seal, StoreError(f"page {ref!r} does not read back as written"))
            return
        if session is not None and seal.index != session.kv.first_open:
            # The page before, which the same frame verified, was bad.
            self.read_back.queued.append(seal)
            return
        if session is not None and (seal.dropped or not self._store.pages.is_resident(ref)):
            seal.dropped = True  # the page became invalid after its publication
            self._not_published(seal, ref)
            return
        self._end(seal)
        self.sealed += 1
        if session is None:
            self._store.pages.unpin(ref)
            if seal.arena is self._slots.arena:
                self._slots.free(seal.slot)
            return
        if session.kv.open[0] != seal.slot:
            raise AssertionError(f"{session!r}: page {seal.index} sealed out of order")
        self._slots.free(session.kv.seal_first(ref, self._store.pages.slot_code(ref)))
        self._slots.recount(session)

    def _seal_failed(self, seal: Seal, error: BaseException) -> None:
        """End a failed seal: stall it if its rows are valid, else drop its page from the table."""
        ran_on = seal.is_tail and not isinstance(error, NumericsFault)
        if not ran_on:
            self.seal_failures += 1
        level = logging.DEBUG if ran_on or seal.again else logging.WARNING  # once of each page
        level = logging.ERROR if isinstance(error, NumericsFault) else level
        log.log(level, "page %d was not sealed: %s", seal.index, error)
        if isinstance(error, NumericsFault) and not seal.dropped:
            self._disputes.dispute(seal)
        if seal.ticket is not None and seal.ref is None:
            try:
                self._store.pages.abort(seal.ticket)
            except StoreError as again:
                log.warning("releasing its slot in the store failed too: %s", again)
        if seal.is_tail:
            self._leave_tail(seal)
            return
        session, slot = seal.session, seal.slot
        is_wrong = isinstance(error, StoreCorrupt | NumericsFault)
        in_table = self._slots.seals.get(slot) is seal
        self._end(seal)
        if session is None:
            if seal.arena is self._slots.arena:
                self._slots.free(slot)
        elif in_table and (session.state is State.FROZEN or not (seal.dropped or is_wrong)):
            # No room, or a bad slot in the store: the rows are still in the arena. The table of a
            # frozen session must not be cut here: the seal fails again after the thaw.
            self._keep_open(seal, session)
            self._stalled.append(seal)
        elif session.state is not State.FROZEN:
            # The rows are invalid: recompute from the start of the page.
            self._slots.truncate(session, seal.index)
            self._slots.changed(session)

    def retry(self) -> None:
        """Queue stalled seals again. Call about once a second."""
        self._pending, self._stalled = [*self.stalled, *self.queued], []

    def _end(self, seal: Seal) -> None:
        if self._slots.seals.get(seal.slot) is seal:
            del self._slots.seals[seal.slot]
        release = self.in_flight.pop(seal, None)
        if release is not None:
            release()
        self._disputes.seals.discard(seal)
        seal.ticket = None

    def verify_message(self, seal: Seal) -> wire.Verify:
        """Return the message by which the worker verifies the extent copy of a seal."""
        if seal.ref is None:
            raise RuntimeError("verify before publish")
        return wire.Verify(*self._store.pages.proof(seal.ref))

    def drop(self, session: Session | None = None) -> None:
        """Drop seals, so that they are not published: of one session, or of the lane."""
        if session is None:
            for seal in (*self.in_flight, *self.queued, *self.stalled):
                seal.dropped = True
            return
        for seal in self.in_flight:
            if seal.session is session:
                seal.dropped = True

    def arena_died(self) -> None:
        """Drop queued digests, and have the store read published pages back."""
        self.digests.clear()
        self.unverified(self.read_back.clear())

    def unverified(self, seals: Sequence[Seal]) -> None:
        """End seals that no worker will verify, and have the store read their pages back."""
        for seal in seals:
            self._end(seal)
            if seal.ref is not None:
                self.read_back.by_store(seal.ref)
                self._store.pages.unpin(seal.ref)
