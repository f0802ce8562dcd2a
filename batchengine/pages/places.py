"""Page tables of the sessions of one lane, and the places of its arena.

Owns who holds which place, and who lends it. A session whose place is taken away keeps its sealed
pages; the rest is recomputed with the same bits, or adopted from where its rows still are: a
parked tail in the store, the arena of a dead worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.session import (
    LOST_TO_CHECKSUM,
    LOST_TO_EVICTION,
    LOST_TO_OTHERS,
    Orphan,
    Session,
)
from kv_store import keys
from kv_store.arena import Arena, ArenaPlace, PlaceState
from kv_store.pages import PageRef
from kv_store.pool import Ticket
from kv_store.store import Store

log = logging.getLogger("batchengine.pages")


class Seal:
    """One page on its way from the arena to the store. `session` None = its owner left.

    A page of fewer than 256 tokens is a tail being parked: it leaves no place free by itself.
    """

    __slots__ = (
        "again", "arena", "digest", "index", "lanes", "parent", "place", "priority", "ref", "salt",
        "session", "spoilt", "taken_by", "ticket", "timeline", "tokens", "written",
    )  # fmt: skip

    def __init__(
        self, session: Session, index: int, place: ArenaPlace, arena: Arena, digest: bytes,
        parent: bytes, rows: int = PAGE_TOKENS,
    ) -> None:  # fmt: skip
        start = index * PAGE_TOKENS
        self.session: Session | None = session
        self.taken_by: Session | None = None  # its owner, if that has the rows elsewhere now
        self.index = index
        self.place = place
        self.arena = arena
        self.digest = digest
        self.parent = parent
        self.lanes = session.lanes
        self.timeline = session.tokens  # which may grow, or be replaced, but never shrinks
        self.tokens = session.tokens[start : start + rows]
        self.salt = session.salt
        self.priority = session.priority
        self.ticket: Ticket | None = None
        self.written = False  # the page thread is done; the manifest row is next
        self.ref: PageRef | None = None
        self.spoilt = ""  # why it must not be published after all
        self.again = False  # it failed before: it promises nobody a place

    @property
    def is_tail(self) -> bool:
        return len(self.tokens) < PAGE_TOKENS


class Places:
    """Tables and places. `on_change` hears of sessions whose KV became less, or came back."""

    def __init__(
        self,
        store: Store,
        repr_id: bytes,
        wake: Callable[[], None],
        commit: Callable[[], None],
        on_change: Callable[[Session], None],
    ) -> None:
        self._store = store
        self._repr_id = repr_id
        self._wake = wake  # from any thread: poll() has something to do
        self._commit = commit  # a manifest row waits for a commit
        self._on_change = on_change
        self.members: dict[int, Session] = {}  # sessions of this lane, by key
        self._arena: Arena | None = None
        self._poison: dict[int, None] = {}
        self._fresh: dict[ArenaPlace, wire.Place] = {}
        self._retitles: dict[ArenaPlace, wire.Retitle] = {}
        self._titles: dict[ArenaPlace, int] = {}  # epoch in the header of every held place
        self._pending: list[Seal] = []  # full, no ticket yet, oldest first
        self._stalled: list[Seal] = []  # failed without doubt about the bytes: see `retry`
        self._seals: dict[ArenaPlace, Seal] = {}  # every seal that still holds a place
        self._lenders: dict[Session, int] = {}  # not running; places they would give back
        self._orphaned: dict[Session, None] = {}  # members whose open rows are elsewhere

    @property
    def is_attached(self) -> bool:
        """A worker is up and has mapped its arena."""
        return self._arena is not None

    def owns(self, session: Session) -> bool:
        """Whether the session is at home here; places of two arenas may be equal as values."""
        return self.members.get(session.key) is session

    # ------------------------------------------------------------------------------- places

    @property
    def places_free(self) -> int:
        """Places the next step may use: free ones, and those that idle sessions lend."""
        return self._free_places() + sum(self._lenders.values())

    def ensure(self, session: Session, until: int) -> bool:
        """Give the session places for positions below `until`; False = the arena is full."""
        if session.frontier > len(session.codes) * PAGE_TOKENS:  # never; but zeros are not KV
            log.error("%r has fewer pages than its frontier says: it is computed again", session)
            self.truncate(session, len(session.codes))
            return False
        while len(session.codes) * PAGE_TOKENS < until:
            place = self._take_place()
            if place is None:
                return False
            self._fresh[place] = self._title(place, session, session.epoch, len(session.codes))
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
        self._forsake(session, n_pages * PAGE_TOKENS)
        self.unpark(session)
        self._count_lender(session)

    def enter(self, session: Session) -> None:
        """The session is at home here from now on."""
        self.members[session.key] = session
        if session.orphans:
            self._orphaned[session] = None

    def fit(self, session: Session) -> None:
        """After the timeline changed: keep the pages that still hold it, under its epoch."""
        self._stop_adopting(session)  # what is still wanted is asked for again
        if not session.orphans:
            self._orphaned.pop(session, None)
        self._fit(session)
        if any(self._titles.get(place) != session.epoch for place in session.places):
            self._retitle(session)

    def _fit(self, session: Session) -> None:
        """Keep the pages below the frontier that may be appended to.

        A frontier inside a sealed page continues in a copy of its leading rows; inside one that is
        on its way to the store it falls back to the page's start.
        """
        full, rest = divmod(session.frontier, PAGE_TOKENS)
        open_index = full - len(session.pinned)
        if session.orphans and not rest and open_index == 0:
            return  # nothing is open here, and what is elsewhere fits already
        if rest and open_index >= 0 and not self._is_sealing(session.places[open_index]):
            parked = session.parked
            if full + 1 < len(session.codes):
                self.truncate(session, full + 1)
            elif parked is not None and (parked.page, parked.rows) != (full, rest):
                self.unpark(session)
        elif rest and open_index < 0:
            self.truncate(session, full + 1)
            ref = session.pinned.pop()  # its pin passes to the orphan
            session.codes.pop()
            session.frontier = full * PAGE_TOKENS
            self.inherit(session, [self._page_orphan(full, rest, ref)])
        else:
            self.truncate(session, full)

    def _is_sealing(self, place: ArenaPlace) -> bool:
        seal = self._seals.get(place)
        return seal is not None and not seal.is_tail

    def _retitle(self, session: Session) -> None:
        """Open places get the session's present epoch in their headers."""
        sealed = len(session.pinned)
        for offset, place in enumerate(session.places):
            page = sealed + offset
            title = self._title(place, session, session.epoch, page)
            if place in self._fresh:
                self._fresh[place] = title
                continue
            rows = max(0, min(PAGE_TOKENS, session.frontier - page * PAGE_TOKENS))
            self._retitles[place] = wire.Retitle(
                place.place, place.gen, session.name, session.epoch, page, rows
            )

    def _title(self, place: ArenaPlace, session: Session, epoch: int, page: int) -> wire.Place:
        self._titles[place] = epoch
        return wire.Place(place.place, place.gen, session.name, epoch, page)

    def _take_place(self, *, borrow: bool = True) -> ArenaPlace | None:
        """A place of the arena, now held; a lender gives one if there is none."""
        if self._arena is None:
            return None
        place = self._arena.reserve()
        while place is None:
            if not borrow or not self._borrow():
                return None
            place = self._arena.reserve()
        self._poison.pop(place.place, None)  # it is zeroed anyway
        return place

    def _count_lender(self, session: Session) -> None:
        if session in self._lenders:
            self._lenders[session] = self._lendable(session)

    def _lendable(self, session: Session) -> int:
        return sum(1 for place in session.places if self._is_free_to_go(place))

    def _is_free_to_go(self, place: ArenaPlace) -> bool:
        """Nobody reads the place but its session: `_drop` would free it at once."""
        seal = self._seals.get(place)
        return seal is None or seal.ticket is None

    def _borrow(self) -> bool:
        """Take the open places of the oldest lender that has any, before all a parked one's.

        A parked tail is adopted when its session runs again; any other is recomputed.
        """
        lender = None
        for session, count in self._lenders.items():
            if count and session.parked is not None:
                lender = session
                break
            if count and lender is None:
                lender = session
        if lender is None:
            return False
        self.send_away(lender)
        self._on_change(lender)
        return True

    def send_away(self, session: Session) -> None:
        """The session keeps what is sealed; a parked tail that follows it waits in the store."""
        parked, session.parked = session.parked, None
        self.truncate(session, len(session.pinned))
        if parked is None:
            session.loss = LOST_TO_OTHERS
            return
        if parked.page == len(session.codes):
            session.orphans = [self._page_orphan(parked.page, parked.rows, parked.ref)]
            self._orphaned[session] = None
        else:
            self._store.unpin(parked.ref)

    def _page_orphan(self, index: int, rows: int, ref: PageRef) -> Orphan:
        """Leading rows of a page of the store as something to adopt; the pin passes to it."""
        return Orphan(index, rows, ref, lambda: self._store.unpin(ref))

    def unpark(self, session: Session) -> None:
        """The parked copy of the tail is of no more use: its place is here and will change."""
        parked, session.parked = session.parked, None
        if parked is not None:
            self._store.unpin(parked.ref)

    def _unpin_oldest(self, taker: Session) -> bool:
        """Let the store evict the sealed pages of the oldest lender that pins any.

        They may well be found again: `extend` looks when the session computes next.
        """
        for session in self._lenders:
            if session.pinned and session is not taker:
                self.truncate(session, 0)
                session.loss = LOST_TO_EVICTION
                self._on_change(session)
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
            self._unqueue(seal)
        self._free(place)

    def _unqueue(self, seal: Seal) -> None:
        """It has no ticket yet, and will not ask for one."""
        (self._pending if seal in self._pending else self._stalled).remove(seal)
        del self._seals[seal.place]

    def _free(self, place: ArenaPlace) -> None:
        if self._arena is None:
            return
        self._arena.release(place)
        self._arena.freed(place)  # the frame that poisons it goes out before any that uses it
        self._titles.pop(place, None)
        self._retitles.pop(place, None)
        self._fresh.pop(place, None)
        self._poison[place.place] = None

    # ------------------------------------------------------------------------------ orphans

    def inherit(self, session: Session, orphans: Sequence[Orphan]) -> None:
        """Rows of the pages right after those the session holds, which are elsewhere."""
        first = len(session.codes)
        if [orphan.page for orphan in orphans] != list(range(first, first + len(orphans))):
            raise ValueError(f"{session!r}: orphans do not follow page {first - 1}")
        self._forsake(session, 0)
        session.orphans = list(orphans)
        if orphans and self.owns(session):
            self._orphaned[session] = None

    def _forsake(self, session: Session, tokens: int) -> None:
        """Of the rows that are elsewhere only those of the first `tokens` are still wanted."""
        if not session.orphans:
            return
        kept: list[Orphan] = []
        for orphan in session.orphans:
            rows = min(orphan.rows, tokens - orphan.page * PAGE_TOKENS)
            if rows > 0:
                kept.append(orphan._replace(rows=rows))
            else:
                orphan.release()
        if kept != session.orphans:
            self._stop_adopting(session)
        session.orphans = kept
        if not kept:
            self._orphaned.pop(session, None)

    def _stop_adopting(self, session: Session) -> None:
        """Rows on their way into this arena belong to another timeline now."""

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
        orphans = [orphan for orphan in session.orphans if orphan.page >= len(refs)]
        if orphans and orphans[0].page == len(refs):
            session.orphans = [o for o in session.orphans if o.page < len(refs)]
        else:
            orphans = []
        self.truncate(session, 0)
        session.pinned.extend(refs)
        session.codes.extend(self._store.place_code(ref) for ref in refs)
        tokens = session.tokens[: len(refs) * PAGE_TOKENS]
        session.keys = keys.chain_keys(tokens, self._repr_id, salt)
        if orphans:
            self._stop_adopting(session)
            self.inherit(session, orphans)
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
        """Pages verified or not: the frontier moves to the first that did not.

        The table may have lost pages, and a page its good name, since they were asked for.
        """
        pinned = zip(session.pinned, good, strict=False)
        good = [ok and self._store.is_resident(ref) for ref, ok in pinned]
        count = good.index(False) if False in good else len(good)
        session.frontier = count * PAGE_TOKENS
        if count < len(good):
            session.loss = LOST_TO_CHECKSUM
        if count < len(session.codes):
            self.truncate(session, count)
