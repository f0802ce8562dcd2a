"""From the arena to the store: full pages are sealed, tails of sessions that rest are parked.

Owns the seal pipeline of one lane. A seal whose session left goes on, for the sake of prefix
sharing. A seal that failed for want of room stalls: its arena copy is sound, and `retry` tries
again. One whose rows are in doubt never tries again: its session computes them anew. A tail's seal
is a courtesy: when it fails, or its session runs on, nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.pages.places import Places, Seal
from batchengine.session import LOST_TO_CHECKSUM, Parked, Session, State
from kv_store import keys
from kv_store.arena import Arena, ArenaPlace
from kv_store.errors import NumericsFault, StaleRef, StoreCorrupt, StoreError
from kv_store.pages import PageRef
from kv_store.pool import Ticket
from kv_store.store import Store

log = logging.getLogger("batchengine.pages")

REST_TICKS = 3  # seconds a session rests before its tail is parked
WROTE_MAX = 1 << 16  # pages whose lane is remembered
# Tokens, salt and priority of a timeline, and (index, page) of pages of it that may be wrong.
Withdrawn = Callable[[Sequence[int], bytes, int, list[tuple[int, PageRef]]], None]


class Wrote(NamedTuple):
    """A page of the store that was computed here: its content key, that of the page before it, and
    the lanes that computed its timeline up to there."""

    key: bytes
    parent: bytes
    lanes: frozenset[str]


class SealLine(Places):
    """`Places` plus the way to the store."""

    def __init__(
        self,
        store: Store,
        repr_id: bytes,
        wake: Callable[[], None],
        commit: Callable[[], None],
        on_change: Callable[[Session], None],
    ) -> None:
        super().__init__(store, repr_id, wake, commit, on_change)
        self._old_arenas: list[Arena] = []
        self._held: dict[Arena, int] = {}  # rows in them that somebody still wants
        self._flying: set[Seal] = set()  # with the store or about to be verified
        self._done: deque[tuple[Seal, Future[PageRef]]] = deque()
        self._verify: list[Seal] = []
        self._due: dict[ArenaPlace, tuple[Session, int, int]] = {}  # to digest: page, rows
        self._rested: dict[Session, int] = {}  # ticks that a lender has not run
        self.sealed = 0
        self.seal_failures = 0
        self.tails_parked = 0
        self.muted = ""  # why this lane's pages are not to be published
        self.wrote: dict[PageRef, Wrote] = {}
        self.writers: Callable[[PageRef], frozenset[str]] = lambda ref: frozenset()  # of any lane
        self.on_doubt: Callable[[Seal], None] | None = None  # the store has other bytes for it
        self.on_withdrawn: Withdrawn | None = None  # of these, some are in the store
        self._proofs: set[asyncio.Future[bool]] = set()  # pages the store reads for us

    # ----------------------------------------------------------------------------- digests

    def fills(self, session: Session, n_tokens: int) -> list[tuple[Session, int, ArenaPlace]]:
        """Pages that will be full once `n_tokens` more tokens are computed."""
        #  pages   first = frontier // 256                last = (frontier + n) // 256
        #          [ first ......... full after the step ......... )
        first = session.frontier // PAGE_TOKENS
        last = (session.frontier + n_tokens) // PAGE_TOKENS
        sealed = len(session.pinned)
        return [(session, page, session.places[page - sealed]) for page in range(first, last)]

    def park(self, session: Session) -> bool:
        """Have the open tail of a session that does not run sealed as a partial page.

        False if there is nothing to park. It is done when `session.parked` is set, or never.
        """
        index, rows = divmod(session.frontier, PAGE_TOKENS)
        at = index - len(session.pinned)
        if not rows or not 0 <= at < len(session.places) or session.parked is not None:
            return False
        place = session.places[at]
        if self.muted or place in self._seals or not self._may_park(session):
            return False
        self._due[place] = (session, index, rows)
        self._wake()
        return True

    def park_resting(self) -> None:
        """Park the tails of sessions that have not run for a while. Call once a second."""
        self._rested = {
            session: self._rested.get(session, 0) + 1
            for session in self._lenders
            if session.state is State.IDLE
        }
        for session, ticks in self._rested.items():
            if ticks == REST_TICKS:
                self.park(session)

    @property
    def is_parking(self) -> bool:
        """Tails are on their way to the store."""
        tails = any(rows < PAGE_TOKENS for _, _, rows in self._due.values())
        return tails or any(seal.is_tail for seal in (*self._flying, *self._pending))

    def give_up_tails(self, timeline: Sequence[int]) -> bool:
        """The session of a timeline is dropped: no tail of it that is on its way is published.

        False while the manifest is about to name one: that is not called back, so ask again.
        """
        tails = [seal for seal in self._flying if seal.is_tail and seal.timeline is timeline]
        for seal in tails:
            if not seal.written:
                seal.spoilt = "its session was dropped"
        return not any(seal.written for seal in tails)

    def _may_park(self, session: Session) -> bool:
        return self.owns(session) and session.state in (State.IDLE, State.WAITING)

    def _take_digests(self) -> list[tuple[Session, int, int, ArenaPlace]]:
        """(session, page, rows, place) of what the next frame digests beside its own fills.

        A tail is zeroed beyond its rows first: never in a frame in which its session computes.
        """
        due, self._due = self._due, {}
        return [
            (session, index, rows, place)
            for place, (session, index, rows) in due.items()
            if self._is_due(session, index, rows, place)
        ]

    def _is_due(self, session: Session, index: int, rows: int, place: ArenaPlace) -> bool:
        if not self.owns(session) or place not in session.places:
            return False
        if rows == PAGE_TOKENS:
            return session.frontier >= (index + 1) * PAGE_TOKENS
        return self._may_park(session) and session.frontier == index * PAGE_TOKENS + rows

    def digested(
        self, session: Session, index: int, rows: int, place: ArenaPlace, digest: bytes
    ) -> None:
        """The lane digested what `_take_digests` named."""
        if place in self._seals or not self._is_due(session, index, rows, place):
            return
        if rows == PAGE_TOKENS:
            self.filled(session, index, place, digest)
        elif session.parked is None and self._arena is not None:
            self._begin_seal(session, index, place, digest, rows)

    def filled(self, session: Session, index: int, place: ArenaPlace, digest: bytes) -> None:
        """A page is full and the lane digested it: start sealing."""
        if self._arena is not None:
            self._begin_seal(session, index, place, digest, PAGE_TOKENS)

    def _begin_seal(
        self, session: Session, index: int, place: ArenaPlace, digest: bytes, rows: int
    ) -> None:
        if self._arena is None:
            raise RuntimeError("a digest without an arena")
        n_keys = index + (rows == PAGE_TOKENS)
        while len(session.keys) < n_keys:
            page = len(session.keys)
            parent = session.keys[-1] if page else keys.ROOT_KEY
            tokens = session.tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            session.keys.append(keys.content_key(parent, tokens, self._repr_id, session.salt))
        parent = session.keys[index - 1] if index else keys.ROOT_KEY
        older = self._seals.get(place)  # of the tail this page was, if anything
        if older is not None and older.ticket is None:
            self._pending.remove(older)
        seal = Seal(session, index, place, self._arena, digest, parent, rows)
        self._seals[place] = seal
        self._pending.append(seal)
        self.start_seals()

    # ------------------------------------------------------------------------------- seals

    def start_seals(self) -> None:
        """Give tickets to full pages, in page order within a session, while the store has room.

        The first refusal ends the round, since each costs a look at every page, and sends its
        session to the end of the line: a later one may find its page in the store already.
        """
        if self.muted:
            return
        for seal in list(self._pending):
            session = seal.session
            if session is None or self._seals.get(seal.place) is not seal:
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
            self._count_lender(session)
            self._follow(seal, self._store.seal(seal.ticket, seal.arena, seal.place, seal.digest))

    def _reserve(self, seal: Seal, session: Session) -> Ticket | None:
        """A place in the store; sessions that do not run give their pins for it."""
        while True:
            ticket = self._store.reserve(seal.parent, seal.tokens, seal.salt, seal.priority)
            if ticket is not None or "being allocated" in self._store.refusal or seal.is_tail:
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
            elif self.muted or seal.spoilt:
                self._give_up(seal, future.result())
            elif not seal.written:
                seal.written = True
                self._follow(seal, self._store.publish(seal.ticket))
                self._commit()
            else:
                seal.ref = future.result()  # may name an older, equal page
                self._note_written(seal, seal.ref)
                if seal.is_tail:
                    self._tail_parked(seal, seal.ref)
                elif seal.arena is self._arena:
                    self._verify.append(seal)
                else:
                    self.unverified([seal])

    def _note_written(self, seal: Seal, ref: PageRef) -> None:
        ticket = seal.ticket
        if ticket is not None and ticket.page is not None and ticket.page.ref == ref:
            self.wrote[ref] = Wrote(ticket.key, ticket.parent, seal.lanes)
            while len(self.wrote) > WROTE_MAX:
                del self.wrote[next(iter(self.wrote))]

    def _give_up(self, seal: Seal, ref: PageRef) -> None:
        """It was on its way when this lane's pages fell into doubt: it may try again later. If it
        is in doubt itself, its rows go."""
        if seal.written:  # it was published a moment ago, or an equal one long before
            own = None if seal.ticket is None else seal.ticket.page
            self._store.unpin(ref)
            if own is not None and own.ref == ref:
                if seal.spoilt and self.on_withdrawn is not None:  # somebody may hold it already
                    self.on_withdrawn(seal.timeline, seal.salt, seal.priority, [(seal.index, ref)])
                else:
                    self._condemn(ref)
        self._seal_failed(seal, StoreError(seal.spoilt or self.muted))

    def _condemn(self, ref: PageRef, *, place_failed: bool = False) -> None:
        with contextlib.suppress(StaleRef):  # evicted meanwhile: then nobody holds it
            self._store.condemn(ref, place_failed=place_failed)

    def fall_back(self, session: Session, *, only_sealed: bool) -> bool:
        """Keep the sealed pages before the first that was condemned; True if any KV went.

        `only_sealed`, or a session that is distrusted: open pages go in any case. Not while
        somebody moves the session.
        """
        if session.state is State.FROZEN:
            return False
        only_sealed, session.distrusted = only_sealed or session.distrusted, False
        if session.parked is not None and not self._store.is_resident(session.parked.ref):
            self.unpark(session)
        good = len(session.pinned)
        for index, ref in enumerate(session.pinned):
            if not self._store.is_resident(ref):
                good = index
                break
        everything = only_sealed and (session.places or session.orphans)
        if good == len(session.pinned) and not everything:
            return False
        if good < len(session.pinned):
            session.loss = LOST_TO_CHECKSUM
        self._spoil(
            [s for s in self._flying if s.session is session], "rows before it are in doubt"
        )
        self.truncate(session, good)
        return True

    def distrust(self, lane: str, why: str) -> list[PageRef]:
        """A lane was found wrong: open rows that it may have computed go at the next look, wherever
        they are now, and no page that is under way is published. Returns the pages that were."""
        for session in self.members.values():
            session.distrusted = session.distrusted or lane in session.lanes
        seals = (*self._flying, *self._pending, *self._stalled)
        self._spoil([seal for seal in seals if lane in seal.lanes], why)
        return [ref for ref, wrote in self.wrote.items() if lane in wrote.lanes]

    def spoil_after(self, wrong: set[bytes], why: str) -> bool:
        """Pages under way that follow pages with these keys are not published.

        True if there are any; their keys are added.
        """
        found = [s for s in self._flying if s.parent in wrong and s.ticket and not s.spoilt]
        self._spoil(found, why)
        wrong.update(seal.ticket.key for seal in found if seal.ticket is not None)
        return bool(found)

    def _spoil(self, seals: Sequence[Seal], why: str) -> None:
        for seal in seals:
            seal.spoilt = seal.spoilt or why

    def withdraw(self, session: Session, tokens: int) -> None:
        """The session's pages that were computed here after `tokens` tokens may be wrong (F45).

        Those on their way are not published, and it falls back to the pages before them; what is
        in the store already is for `on_withdrawn` to judge.
        """
        first = min(tokens, session.frontier) // PAGE_TOKENS
        flying = [s for s in self._flying if s.session is session and s.index >= first]
        mine = [(i, ref) for i, ref in enumerate(session.pinned) if i >= first]
        self.truncate(session, first)
        for seal in flying:
            seal.spoilt = "a row of its turn was not finite"
            if seal in self._verify and seal.ref is not None:  # published a moment ago
                self._verify.remove(seal)
                self._give_up(seal, seal.ref)
        if self.on_withdrawn is not None:
            wrote = [(i, ref) for i, ref in mine if ref in self.wrote]
            self.on_withdrawn(session.tokens, session.salt, session.priority, wrote)

    def _tail_parked(self, seal: Seal, ref: PageRef) -> None:
        """The tail is in the store: its session may lose its place without losing rows."""
        session, rows = seal.session, len(seal.tokens)
        self._leave_tail(seal)
        if (
            session is not None
            and self._may_park(session)
            and seal.arena is self._arena
            and seal.place in session.places
            and session.frontier == seal.index * PAGE_TOKENS + rows
            and session.parked is None
        ):
            session.parked = Parked(seal.index, rows, ref)
            self.tails_parked += 1
        else:
            self._store.unpin(ref)

    def _leave_tail(self, seal: Seal) -> None:
        """A tail's seal is over: its place goes only if its session let go of it meanwhile."""
        session = seal.session
        self._end(seal)
        if session is None and seal.arena is self._arena:
            self._free(seal.place)
        elif session is not None:
            self._count_lender(session)

    def verified(self, seal: Seal, good: bool) -> None:
        """The lane read the extent copy: the table entry swaps, the arena place is free."""
        ref, session = seal.ref, seal.session
        if ref is None:
            raise RuntimeError("verified before publish")
        if not good:
            # others may hold it: it was published, or is an older, equal page
            self._condemn(ref, place_failed=True)
            self._store.unpin(ref)
            self._seal_failed(seal, StoreError(f"page {ref!r} does not read back as written"))
            return
        if session is not None and seal.index != len(session.pinned):
            self._verify.append(seal)  # the page before it, verified by the same frame, was bad
            return
        if session is not None and not (seal.spoilt or self._store.is_resident(ref)):
            seal.spoilt = "its page was given up since it was published"
        if session is not None and seal.spoilt:
            self._give_up(seal, ref)
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
        self._count_lender(session)

    def _seal_failed(self, seal: Seal, error: BaseException) -> None:
        """A seal is one intent: its failure costs at most a recompute of this page."""
        ran_on = seal.is_tail and not isinstance(error, NumericsFault)
        if not ran_on:
            self.seal_failures += 1
        level = logging.ERROR if isinstance(error, NumericsFault) else logging.WARNING
        log.log(logging.DEBUG if ran_on else level, "page %d was not sealed: %s", seal.index, error)
        is_news = isinstance(error, NumericsFault) and not seal.spoilt
        if is_news and self.on_doubt is not None:
            self.on_doubt(seal)
        if seal.ticket is not None and seal.ref is None:
            try:
                self._store.abort(seal.ticket)
            except StoreError as again:
                log.warning("giving up its place failed too: %s", again)
        if seal.is_tail:
            self._leave_tail(seal)
            return
        session, place = seal.session, seal.place
        in_table = self._seals.get(place) is seal
        self._end(seal)
        if session is None:
            if seal.arena is self._arena:
                self._free(place)
        elif in_table and not (seal.spoilt or isinstance(error, StoreCorrupt | NumericsFault)):
            # No room, or a bad place in the store: what the lane hashed is still in the arena.
            seal.written, seal.ref, seal.again = False, None, True
            self._seals[place] = seal
            self._stalled.append(seal)
            self._count_lender(session)
        elif session.state is State.FROZEN:
            session.distrusted = True  # its table is somebody else's: who takes it up drops them
        else:
            # Its bytes are in doubt: recompute from the start of the page.
            self.truncate(session, seal.index)
            self._on_change(session)

    def retry(self) -> None:
        """Try again to seal what failed for want of room. Call about once a second."""
        if self._stalled:
            self._pending = [*self._stalled, *self._pending]
            self._stalled = []

    def _end(self, seal: Seal) -> None:
        if self._seals.get(seal.place) is seal:
            del self._seals[seal.place]
        self._flying.discard(seal)
        seal.ticket = None
        if self._old_arenas:
            self.close_old_arenas()

    def _take_verify(self) -> list[Seal]:
        verify = self._verifiable()
        self._verify = [seal for seal in self._verify if seal not in verify]
        return verify

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

    def unverified(self, seals: list[Seal]) -> None:
        """Published pages that the worker died over: the store reads them itself."""
        for seal in seals:
            self._end(seal)
            if seal.ref is not None:
                with contextlib.suppress(StaleRef):  # given up meanwhile
                    proof = asyncio.wrap_future(self._store.verify(seal.ref))
                    self._proofs.add(proof)
                    proof.add_done_callback(self._proven)
                self._store.unpin(seal.ref)

    def _proven(self, proof: asyncio.Future[bool]) -> None:
        self._proofs.discard(proof)
        if not proof.cancelled() and (error := proof.exception()) is not None:
            log.warning("a page could not be read back: %s", error)

    # -------------------------------------------------------------------------- old arenas

    def hold(self, arena: Arena) -> Callable[[], None]:
        """Keep a dead worker's arena for the sake of one page; returns how to let it go."""
        self._held[arena] = self._held.get(arena, 0) + 1
        held = [arena]

        def release() -> None:
            if held:
                arena = held.pop()
                self._held[arena] -= 1
                if not self._held[arena]:
                    del self._held[arena]
                self.close_old_arenas()

        return release

    def close_old_arenas(self) -> None:
        """Delete the file of a dead worker once no seal reads it and no row in it is wanted."""
        for arena in list(self._old_arenas):
            if not self._held.get(arena) and not any(seal.arena is arena for seal in self._flying):
                self._held.pop(arena, None)
                self._old_arenas.remove(arena)
                arena.close(delete=True)
