"""Where the pages of sessions are: open places of one lane's arena, sealed pages of the store.

Owns page tables, the lane's arena and the seal pipeline. Refuses I/O and waiting: the store's
threads do the work, results are taken in `poll`. All changes happen between two steps of the
lane, so a place that is freed here can be poisoned, zeroed and used again by the next frame.

    OPEN place --256 tokens--> digest by the lane --> reserve ticket --> seal (store thread)
      --> publish (next commit) --> lane verifies the extent copy --> table entry swaps
      --> place freed

A session whose place is taken away (or whose worker died) keeps its sealed pages; the rest is
recomputed, with the same bits. A seal whose session left goes on, for the sake of prefix sharing.
A seal that failed for want of room is parked: its arena copy is sound, and `retry` tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.session import (
    LOST_TO_CHECKSUM,
    LOST_TO_EVICTION,
    LOST_TO_OTHERS,
    LOST_WITH_WORKER,
    Session,
)
from kv_store import keys
from kv_store.arena import Arena, ArenaPlace, PlaceState
from kv_store.errors import NumericsFault, StaleRef, StoreCorrupt, StoreError
from kv_store.pages import PageRef
from kv_store.pool import Ticket
from kv_store.store import Store

log = logging.getLogger("batchengine.pages")


class Seal:
    """One full page on its way from the arena to the store. `session` None = its owner left."""

    __slots__ = (
        "arena", "digest", "index", "parent", "place", "priority", "ref", "salt", "session",
        "ticket", "tokens", "written",
    )  # fmt: skip

    def __init__(
        self, session: Session, index: int, place: ArenaPlace, arena: Arena, digest: bytes,
        parent: bytes, salt: bytes, priority: int,
    ) -> None:  # fmt: skip
        start = index * PAGE_TOKENS
        self.session: Session | None = session
        self.index = index
        self.place = place
        self.arena = arena
        self.digest = digest
        self.parent = parent
        self.tokens = session.tokens[start : start + PAGE_TOKENS]
        self.salt = salt
        self.priority = priority
        self.ticket: Ticket | None = None
        self.written = False  # the page thread is done; the manifest row is next
        self.ref: PageRef | None = None


class LanePages:
    """Page tables of the sessions of one lane. `on_cut` hears of sessions that lost KV."""

    def __init__(
        self,
        store: Store,
        repr_id: bytes,
        wake: Callable[[], None],
        commit: Callable[[], None],
        on_cut: Callable[[Session], None],
    ) -> None:
        self._store = store
        self._repr_id = repr_id
        self._wake = wake  # from any thread: poll() has something to do
        self._commit = commit  # a manifest row waits for a commit
        self._on_cut = on_cut
        self._arena: Arena | None = None
        self._old_arenas: list[Arena] = []
        self._poison: dict[int, None] = {}
        self._fresh: list[wire.Place] = []
        self._pending: list[Seal] = []  # full, no ticket yet, oldest first
        self._seals: dict[ArenaPlace, Seal] = {}  # every seal that still holds a place
        self._flying: set[Seal] = set()  # with the store or about to be verified
        self._done: deque[tuple[Seal, Future[PageRef]]] = deque()
        self._parked: list[Seal] = []  # failed without doubt about the bytes: see `retry`
        self._verify: list[Seal] = []
        self._lenders: dict[Session, int] = {}  # not running; places they would give back
        self.sealed = 0
        self.seal_failures = 0

    def __repr__(self) -> str:
        return (
            f"<LanePages {self._arena!r} lenders={len(self._lenders)} seals={len(self._seals)}"
            f" pending={len(self._pending)}>"
        )

    # ------------------------------------------------------------------------------- places

    @property
    def places_free(self) -> int:
        """Places the next step may use: free ones, and those that idle sessions lend."""
        return self._free_places() + sum(self._lenders.values())

    def ensure(self, session: Session, until: int) -> bool:
        """Give the session places for positions below `until`; False = the arena is full."""
        arena = self._arena
        if arena is None:
            return False
        while len(session.codes) * PAGE_TOKENS < until:
            place = arena.reserve()
            while place is None:
                if not self._borrow():
                    return False
                place = arena.reserve()
            self._poison.pop(place.place, None)  # it is zeroed anyway
            self._fresh.append(
                wire.Place(place.place, place.gen, session.name, session.epoch, len(session.codes))
            )
            session.places.append(place)
            session.codes.append(place.code)
        return True

    def lend(self, session: Session) -> None:
        """The session does not run now: its places and pins may be taken, oldest lender first."""
        self._lenders.pop(session, None)
        if session.codes:
            self._lenders[session] = self._lendable(session)

    def recall(self, session: Session) -> None:
        """The session runs again, or ends: nobody takes its places."""
        self._lenders.pop(session, None)

    def truncate(self, session: Session, n_pages: int) -> None:
        """Forget the pages from `n_pages` on; the frontier falls back to what is left."""
        sealed = len(session.pinned)
        for place in session.places[max(n_pages - sealed, 0) :]:
            self._drop(place)
        del session.places[max(n_pages - sealed, 0) :]
        for ref in session.pinned[n_pages:]:
            self._store.unpin(ref)
        del session.pinned[n_pages:]
        del session.codes[n_pages:]
        session.frontier = min(session.frontier, n_pages * PAGE_TOKENS)
        if session in self._lenders:
            self._lenders[session] = self._lendable(session)

    def fit(self, session: Session) -> None:
        """After the timeline changed: keep the pages below the frontier that may be appended to.

        A frontier inside a page that is sealed, or on its way, falls back to the page's start.
        """
        full, rest = divmod(session.frontier, PAGE_TOKENS)
        open_index = full - len(session.pinned)
        if rest and open_index >= 0 and session.places[open_index] not in self._seals:
            self.truncate(session, full + 1)
        else:
            self.truncate(session, full)

    def _lendable(self, session: Session) -> int:
        return sum(1 for place in session.places if self._is_free_to_go(place))

    def _is_free_to_go(self, place: ArenaPlace) -> bool:
        """Nobody reads the place but its session: `_drop` would free it at once."""
        seal = self._seals.get(place)
        return seal is None or seal.ticket is None

    def _borrow(self) -> bool:
        """Take the open places of the oldest lender that has any; its tail is recomputed later."""
        for session, count in self._lenders.items():
            if count:
                self.truncate(session, len(session.pinned))
                session.loss = LOST_TO_OTHERS
                self._on_cut(session)
                return True
        return False

    def _unpin_oldest(self, taker: Session) -> bool:
        """Let the store evict the sealed pages of the oldest lender that pins any.

        They may well be found again: `extend` looks when the session computes next.
        """
        for session in self._lenders:
            if session.pinned and session is not taker:
                self.truncate(session, 0)
                session.loss = LOST_TO_EVICTION
                self._on_cut(session)
                return True
        return False

    def _free_places(self) -> int:
        return 0 if self._arena is None else self._arena.count(PlaceState.FREE)

    def _drop(self, place: ArenaPlace) -> None:
        """The session lets go; a seal that already has a ticket keeps the place until it ends."""
        seal = self._seals.get(place)
        if seal is not None and seal.ticket is not None:
            seal.session = None
            return
        if seal is not None:
            (self._pending if seal in self._pending else self._parked).remove(seal)
            del self._seals[place]
        self._free(place)

    def _free(self, place: ArenaPlace) -> None:
        if self._arena is None:
            return
        self._arena.release(place)
        self._arena.freed(place)  # the frame that poisons it goes out before any that uses it
        self._poison[place.place] = None

    # ------------------------------------------------------------------------ prefix sharing

    def extend(
        self,
        session: Session,
        salt: bytes,
        priority: int,
        is_worth_reading: Callable[[int, int, int], bool] | None = None,
    ) -> Future[list[bool]] | None:
        """Take published pages of the timeline's prefix where they reach further than own KV.

        Never the last token: one is left to compute. Returns None when the pages are ready (or
        there are none), else a future of which pages verified; then call `loaded`. Pages that
        must be read from disk are taken only if `is_worth_reading(tokens, tokens after the
        first such page, bytes to read)` says so.
        """
        refs = self._store.match_prefix(session.tokens[:-1], salt, pin=True, priority=priority)
        if is_worth_reading is not None:
            refs = self._without_cold(refs, session.frontier, is_worth_reading)
        if len(refs) * PAGE_TOKENS <= session.frontier:
            for ref in refs:
                self._store.unpin(ref)
            return None
        self.truncate(session, 0)
        session.pinned.extend(refs)
        session.codes.extend(self._store.place_code(ref) for ref in refs)
        tokens = session.tokens[: len(refs) * PAGE_TOKENS]
        session.keys = keys.chain_keys(tokens, self._repr_id, salt)
        future = self._store.load(refs)
        if future.done():
            self.loaded(session, future.result())
            return None
        return future

    def _without_cold(
        self, refs: list[PageRef], frontier: int, is_worth_reading: Callable[[int, int, int], bool]
    ) -> list[PageRef]:
        """`refs` up to the first page on disk, if reading from there on is not worth it."""
        cold = self._store.cold(refs)
        if True not in cold or len(refs) * PAGE_TOKENS <= frontier:
            return refs
        first = cold.index(True)
        tokens = len(refs) * PAGE_TOKENS
        cold_tokens = tokens - max(frontier, first * PAGE_TOKENS)
        if is_worth_reading(tokens, cold_tokens, sum(cold) * self._store.layout.page_bytes):
            return refs
        for ref in refs[first:]:
            self._store.unpin(ref)
        return refs[:first]

    def loaded(self, session: Session, good: list[bool]) -> None:
        """Pages verified or not: the frontier moves to the first that did not."""
        count = good.index(False) if False in good else len(good)
        session.frontier = count * PAGE_TOKENS
        if count < len(good):
            session.loss = LOST_TO_CHECKSUM
        self.truncate(session, count)

    # ------------------------------------------------------------------------------ the step

    def fills(self, session: Session, n_tokens: int) -> list[tuple[Session, int, ArenaPlace]]:
        """Pages that will be full once `n_tokens` more tokens are computed."""
        #  pages   first = frontier // 256                last = (frontier + n) // 256
        #          [ first ......... full after the step ......... )
        first = session.frontier // PAGE_TOKENS
        last = (session.frontier + n_tokens) // PAGE_TOKENS
        sealed = len(session.pinned)
        return [(session, page, session.places[page - sealed]) for page in range(first, last)]

    def chores(self) -> tuple[tuple[int, ...], tuple[wire.Place, ...], list[Seal]]:
        """What the next frame carries besides entries: poison, reserve, verify. Taken once."""
        poison, self._poison = tuple(self._poison), {}
        fresh, self._fresh = tuple(self._fresh), []
        verify = self._verifiable()
        self._verify = [seal for seal in self._verify if seal not in verify]
        return poison, fresh, verify

    @property
    def has_chores(self) -> bool:
        return bool(self._poison or self._fresh or self._verifiable())

    def _verifiable(self) -> list[Seal]:
        """A session's pages swap in page order, whatever order the store was done in.

        A page that was there already is published before an older one that had to be written.
        """
        if not self._verify:
            return []
        due: list[Seal] = []
        swapped: dict[Session, int] = {}
        for seal in sorted(self._verify, key=lambda seal: seal.index):
            session = seal.session
            if session is not None:
                index = swapped.get(session, len(session.pinned))
                if seal.index != index:
                    continue
                swapped[session] = index + 1
            due.append(seal)
        return due

    def verify_message(self, seal: Seal) -> wire.Verify:
        """What the worker checks the extent copy of a seal against."""
        if seal.ref is None:
            raise RuntimeError("verify before publish")
        proof = self._store.proof(seal.ref)
        return wire.Verify(proof.place_code, proof.seed, proof.checksum)

    def filled(
        self, session: Session, index: int, place: ArenaPlace, digest: bytes, salt: bytes,
        priority: int,
    ) -> None:  # fmt: skip
        """A page is full and the lane digested it: start sealing."""
        if self._arena is None:
            return
        while len(session.keys) < index + 1:
            page = len(session.keys)
            parent = session.keys[-1] if page else keys.ROOT_KEY
            tokens = session.tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            session.keys.append(keys.content_key(parent, tokens, self._repr_id, salt))
        parent = session.keys[index - 1] if index else keys.ROOT_KEY
        seal = Seal(session, index, place, self._arena, digest, parent, salt, priority)
        self._seals[place] = seal
        self._pending.append(seal)
        self.start_seals()

    def start_seals(self) -> None:
        """Give tickets to full pages, in page order within a session, while the store has room.

        The first refusal ends the round, since each costs a look at every page, and sends its
        session to the end of the line: a later one may find its page in the store already.
        """
        for seal in list(self._pending):
            session = seal.session
            if session is None or self._seals.get(seal.place) is not seal:
                continue
            seal.ticket = self._reserve(seal, session)
            if seal.ticket is None:
                self._pending.sort(key=lambda other: other.session is session)  # stable
                return
            self._pending.remove(seal)
            if session in self._lenders:
                self._lenders[session] = self._lendable(session)
            self._follow(seal, self._store.seal(seal.ticket, seal.arena, seal.place, seal.digest))

    def _reserve(self, seal: Seal, session: Session) -> Ticket | None:
        """A place in the store; sessions that do not run give their pins for it."""
        while True:
            ticket = self._store.reserve(seal.parent, seal.tokens, seal.salt, seal.priority)
            if ticket is not None or "being allocated" in self._store.refusal:
                return ticket
            if not self._unpin_oldest(session):
                return None

    def _follow(self, seal: Seal, future: Future[PageRef]) -> None:
        self._flying.add(seal)

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
            elif not seal.written:
                seal.written = True
                self._follow(seal, self._store.publish(seal.ticket))
                self._commit()
            else:
                seal.ref = future.result()  # may name an older, equal page
                if seal.arena is self._arena:
                    self._verify.append(seal)
                else:
                    self.unverified([seal])

    def verified(self, seal: Seal, good: bool) -> None:
        """The lane read the extent copy: the table entry swaps, the arena place is free."""
        ref, session = seal.ref, seal.session
        if ref is None:
            raise RuntimeError("verified before publish")
        if not good:
            self._store.condemn(ref)
            self._store.unpin(ref)
            self._seal_failed(seal, StoreError(f"page {ref!r} does not read back as written"))
            return
        if session is not None and seal.index != len(session.pinned):
            self._verify.append(seal)  # the page before it, verified by the same frame, was bad
            return
        self._end(seal)
        self.sealed += 1
        if session is None:
            self._store.unpin(ref)
            if seal.arena is self._arena:
                self._free(seal.place)
            return
        if session.places[0] != seal.place:
            raise AssertionError(f"{session!r}: page {seal.index} sealed out of order")
        session.pinned.append(ref)
        session.codes[seal.index] = self._store.place_code(ref)
        del session.places[0]
        self._free(seal.place)
        if session in self._lenders:
            self._lenders[session] = self._lendable(session)

    def _seal_failed(self, seal: Seal, error: BaseException) -> None:
        """A seal is one intent: its failure costs at most a recompute of this page."""
        self.seal_failures += 1
        level = logging.ERROR if isinstance(error, NumericsFault) else logging.WARNING
        log.log(level, "page %d was not sealed: %s", seal.index, error)
        if seal.ticket is not None and seal.ref is None:
            try:
                self._store.abort(seal.ticket)
            except StoreError as again:
                log.warning("giving up its place failed too: %s", again)
        session, place = seal.session, seal.place
        in_table = self._seals.get(place) is seal
        self._end(seal)
        if session is None:
            if seal.arena is self._arena:
                self._free(place)
        elif in_table and not isinstance(error, StoreCorrupt | NumericsFault):
            # No room, or a bad place in the store: what the lane hashed is still in the arena.
            seal.written, seal.ref = False, None
            self._seals[place] = seal
            self._parked.append(seal)
            if session in self._lenders:
                self._lenders[session] = self._lendable(session)
        else:
            # Its bytes are in doubt: recompute from the start of the page.
            self.truncate(session, seal.index)
            self._on_cut(session)

    def retry(self) -> None:
        """Try again to seal what failed for want of room. Call about once a second."""
        if self._parked:
            self._pending = [*self._parked, *self._pending]
            self._parked = []

    def _end(self, seal: Seal) -> None:
        if self._seals.get(seal.place) is seal:
            del self._seals[seal.place]
        self._flying.discard(seal)
        seal.ticket = None
        if self._old_arenas:
            self._close_old_arenas()

    # ------------------------------------------------------------------------ lane life cycle

    @property
    def has_work(self) -> bool:
        """Something waits for the next frame, or for room in the store."""
        return bool(self._done or self._pending or self.has_chores)

    @property
    def is_sealing(self) -> bool:
        """Places may come back without anybody's doing: seals are in flight, or room is made."""
        in_flight = len(self._flying) - len(self._verify)
        return bool(
            in_flight or self._done or self.has_chores or "being allocated" in self._store.refusal
        )

    def close(self) -> None:
        """The worker is gone for good: its arena goes too."""
        for arena in (*self._old_arenas, *([self._arena] if self._arena else [])):
            arena.close(delete=True)
        self._old_arenas, self._arena = [], None

    def attach(self, arena: Arena) -> None:
        """A new worker has mapped this arena; no session has a place in it yet."""
        self._arena = arena

    def lane_died(self, sessions: list[Session]) -> None:
        """The worker is reaped: places are gone. Seals in flight go on from the old file."""
        arena, self._arena = self._arena, None
        for seal in (*self._pending, *self._parked):
            self._seals.pop(seal.place, None)
        self._pending, self._parked = [], []
        for seal in self._seals.values():
            seal.session = None
        # Keys of a dead arena's places may repeat in the new one.
        self._seals = {}
        self._poison, self._fresh = {}, []
        # Places are gone, but sessions that do not run still give their pins.
        self._lenders = {session: 0 for session in self._lenders if session.pinned}
        for session in sessions:
            if session.places:
                session.loss = LOST_WITH_WORKER
            session.places.clear()
            del session.codes[len(session.pinned) :]
            session.frontier = min(session.frontier, len(session.pinned) * PAGE_TOKENS)
        if arena is not None:
            self._old_arenas.append(arena)
        # No new worker is needed for them: its arena may have to wait for the old one's space.
        orphans, self._verify = self._verify, []
        self.unverified(orphans)
        self._close_old_arenas()

    def unverified(self, seals: list[Seal]) -> None:
        """Published pages that the worker died over: the store reads them itself."""
        for seal in seals:
            self._end(seal)
            if seal.ref is not None:
                with contextlib.suppress(StaleRef):  # given up meanwhile
                    self._store.verify(seal.ref)
                self._store.unpin(seal.ref)

    async def recheck(self, sessions: list[Session]) -> None:
        """Read the sealed pages of sessions again: one of them may have ended the worker.

        A page that fails is never served again; its session falls back to the pages before it.
        """
        for session in sessions:
            refs = list(session.pinned)
            good = len(refs)
            for index, ref in enumerate(refs):
                try:
                    sound = await asyncio.wrap_future(self._store.verify(ref))
                except (StoreError, OSError):
                    sound = False
                if not sound:
                    good = index
                    break
            if good < len(refs) and session.pinned[: good + 1] == refs[: good + 1]:
                log.warning("%r: page %d does not verify, it is computed again", session, good)
                self.truncate(session, good)

    def _close_old_arenas(self) -> None:
        """Delete the file of a dead worker once no seal reads it any more."""
        for arena in list(self._old_arenas):
            if not any(seal.arena is arena for seal in self._flying):
                self._old_arenas.remove(arena)
                arena.close(delete=True)
