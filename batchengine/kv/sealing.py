"""From the arena to the store: full pages are sealed, tails of sessions that rest are parked.

Owns the seal pipeline of one lane. A seal whose session left goes on, for the sake of prefix
sharing. A seal that failed for want of room stalls: its arena copy is sound, and `retry` tries
again. One whose rows are invalid is dropped: its session computes them again. Sealing a tail is
best effort: when it fails, or its session runs on, nothing is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.kv.arenas import DeadArenas
from batchengine.kv.digests import DigestQueue
from batchengine.kv.disputes import Disputes
from batchengine.kv.readback import ReadBack
from batchengine.kv.slots import Seal, Slots
from batchengine.session import Session, State
from batchengine.session_kv import ParkedTail, page_start
from kv_store import keys
from kv_store.arenas.arena import ArenaSlot
from kv_store.errors import NumericsFault, StoreCorrupt, StoreError
from kv_store.pages.allocator import NoRoomKind
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
        self.in_flight: dict[Seal, Callable[[], None]] = {}  # how to let go of their arenas
        self._pending: list[Seal] = []  # without a ticket, oldest first
        self._stalled: list[Seal] = []  # failed although their rows are sound: see `retry`
        self._done: deque[tuple[Seal, Future[PageRef]]] = deque()
        self.publishes = True
        self.sealed = 0
        self.seal_failures = 0
        self.tails_parked = 0

    def __repr__(self) -> str:
        return f"<SealPipeline queued={len(self.queued)} in_flight={len(self.in_flight)}>"

    # ------------------------------------------------------------------------------- questions

    @property
    def queued(self) -> list[Seal]:
        """Seals without a ticket, oldest first. One that lost its slot is forgotten."""
        self._pending = [seal for seal in self._pending if self._has_slot(seal)]
        return self._pending

    @property
    def stalled(self) -> list[Seal]:
        """Seals that failed although their rows are sound."""
        self._stalled = [seal for seal in self._stalled if self._has_slot(seal)]
        return self._stalled

    def _has_slot(self, seal: Seal) -> bool:
        return self._slots.seals.get(seal.slot) is seal

    @property
    def has_results(self) -> bool:
        """The store's threads are done with something: call `poll`."""
        return bool(self._done)

    @property
    def is_moving(self) -> bool:
        """Slots come back by themselves: seals are in flight, or the store is making room.

        A seal that failed before does not count: it may fail again, once a second and for ever.
        """
        waiting = self.read_back.waiting()
        in_flight = any(not seal.again for seal in self.in_flight.keys() - waiting)
        return in_flight or bool(self.queued and self._store.pages.allocator.is_growing)

    # ----------------------------------------------------------------------------- digests

    def park(self, session: Session) -> bool:
        """Have the open tail of a session that does not run sealed as a partial page.

        False if there is nothing to park. It is done when `session.kv.parked` is set, or never.
        """
        if not self.publishes or not self.digests.add_tail(session):
            return False
        self._wake()
        return True

    def park_resting(self) -> None:
        """Park the tails of sessions that have not run for a while. Call once a second."""
        for session in self.digests.tick():
            self.park(session)

    def digested(
        self, session: Session, index: int, rows: int, slot: ArenaSlot, digest: bytes
    ) -> None:
        """The lane digested what `digests.take` named."""
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
        """The lane digested a page that is full, or a tail of so many rows: start sealing."""
        if self._slots.arena is None:
            return
        known, kv = len(session.kv.keys), session.kv
        if known < (n_keys := index + (rows == PAGE_TOKENS)):
            parent = kv.keys[-1] if known else keys.ROOT_KEY
            tokens = session.tokens[page_start(known) : page_start(n_keys)]
            kv.keys += keys.chain_keys(tokens, self._store.pages.repr_id, session.salt, parent)
        parent = kv.keys[index - 1] if index else keys.ROOT_KEY
        seal = Seal(session, index, slot, self._slots.arena, digest, parent, rows)
        self._slots.seals[slot] = seal  # instead of that of the tail this page was, if any
        self._pending.append(seal)
        self.start_seals()

    # ------------------------------------------------------------------------------- seals

    def start_seals(self) -> None:
        """Give tickets to full pages, in page order within a session, while the store has room.

        The first refusal ends the round, since each costs a look at every page, and sends its
        session to the end of the line: a later one may find its page in the store already.
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
        """A slot in the store; sessions that do not run give their pins for it."""
        while True:
            found = self._store.pages.reserve(
                seal.parent, seal.tokens, seal.salt, seal.priority, seal.lanes
            )
            if isinstance(found, Ticket):
                return found
            if found.kind is NoRoomKind.GROWING or seal.is_tail:
                return None
            if not self._slots.evict_oldest(session):
                return None

    def _follow(self, seal: Seal, future: Future[PageRef]) -> None:
        if seal not in self.in_flight:
            self.in_flight[seal] = self._arenas.hold(seal.arena)
        self._disputes.seals.add(seal)

        def done(finished: Future[PageRef]) -> None:
            self._done.append((seal, finished))
            self._wake()

        future.add_done_callback(done)

    def poll(self) -> None:
        """Take the results of the store's threads. Called between steps."""
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
        """The store is done with a seal that must not be published, or has just published it."""
        if seal.written:
            ticket = seal.ticket
            self._store.pages.unpin(ref)
            if ticket is not None and ticket.page is not None and ticket.page.ref == ref:
                self._disputes.invalidate([ticket.key])  # else it is an older, equal page
        self._seal_failed(seal, StoreError("its rows are invalid, or its lane publishes nothing"))

    def _tail_parked(self, seal: Seal, ref: PageRef) -> None:
        """The tail is in the store: its session may lose its slot without losing rows."""
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
            self.tails_parked += 1
        else:
            self._store.pages.unpin(ref)

    def _leave_tail(self, seal: Seal) -> None:
        """A tail's seal is over: its slot goes only if its session let go of it meanwhile."""
        session = seal.session
        self._end(seal)
        if session is None and seal.arena is self._slots.arena:
            self._slots.free(seal.slot)
        elif session is not None:
            self._slots.recount(session)

    def verified(self, seal: Seal, good: bool) -> None:
        """The lane read the extent copy: the table entry swaps, the arena slot is free."""
        ref, session = seal.ref, seal.session
        if ref is None:
            raise RuntimeError("verified before publish")
        if not good:
            # others may hold it: it was published, or is an older, equal page
            self._store.pages.invalidate(ref, slot_failed=True)
            self._store.pages.unpin(ref)
            self._seal_failed(seal, StoreError(f"page {ref!r} does not read back as written"))
            return
        if session is not None and seal.index != len(session.kv.sealed):
            self.read_back.queued.append(
                seal
            )  # the page before it, verified by the same frame, was bad
            return
        if session is not None and (seal.dropped or not self._store.pages.is_resident(ref)):
            seal.dropped = True  # it is invalid since it was published
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
        """A seal is one intent: its failure costs at most a recompute of this page."""
        ran_on = seal.is_tail and not isinstance(error, NumericsFault)
        if not ran_on:
            self.seal_failures += 1
        level = logging.ERROR if isinstance(error, NumericsFault) else logging.WARNING
        log.log(logging.DEBUG if ran_on else level, "page %d was not sealed: %s", seal.index, error)
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
            # No room, or a bad slot in the store: what the lane hashed is still in the arena.
            # A frozen session's table is not ours to cut: it fails again after the thaw.
            seal.written, seal.ref, seal.again = False, None, True
            self._slots.seals[slot] = seal
            self._stalled.append(seal)
            self._slots.recount(session)
        elif session.state is not State.FROZEN:
            # Its bytes are invalid: recompute from the start of the page.
            self._slots.truncate(session, seal.index)
            self._slots.changed(session)

    def retry(self) -> None:
        """Try again to seal what failed for want of room. Call about once a second."""
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
        """What the worker checks the extent copy of a seal against."""
        if seal.ref is None:
            raise RuntimeError("verify before publish")
        proof = self._store.pages.proof(seal.ref)
        return wire.Verify(proof.slot_code, proof.seed, proof.checksum)

    def stop_publishing(self) -> None:
        """The lane's rows are not trusted any more: nothing of it is published from now on."""
        self.publishes = False

    def drop(self, session: Session | None = None) -> None:
        """Publish nothing that is on its way: of one session, or of the lane."""
        if session is None:
            for seal in (*self.in_flight, *self.queued, *self.stalled):
                seal.dropped = True
            return
        for seal in self.in_flight:
            if seal.session is session:
                seal.dropped = True

    def arena_died(self) -> None:
        """Nothing is to be digested; the store itself reads back what was published."""
        self.digests.clear()
        self.unverified(self.read_back.clear())

    def unverified(self, seals: Sequence[Seal]) -> None:
        """Published pages that the worker died over: the store reads them itself."""
        for seal in seals:
            self._end(seal)
            if seal.ref is not None:
                self.read_back.by_store(seal.ref)
                self._store.pages.unpin(seal.ref)
