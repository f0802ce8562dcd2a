"""Open rows that come into this lane's arena from where they are: the one way they ever move.

Owns the places they will get, and the order in which frames carry them. A worker's death, a
hand-over between lanes, a parked tail and a restart differ only in the source: the arena of a dead
or another worker, or a partial page of the store. The worker says how many leading rows are
proven; what is not proven is computed again.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.pages.seals import SealLine
from batchengine.session import LOST_WITH_WORKER, Orphan, Session, State
from kv_store.arena import Arena, ArenaPlace
from kv_store.pages import PageRef
from kv_store.store import Store

ADOPT_BYTES = 32 << 20  # of pages copied by one frame: everybody on the lane waits for it
TOUCH_BYTES = 64 << 20  # of pages faulted in by one frame: mostly from the page cache


class Adoption:
    """Open rows of one session on their way into an arena. `rows[i]` answers `orphans[i]`."""

    __slots__ = (
        "arena", "epoch", "fallen", "on_done", "orphans", "over", "places", "rows", "sent",
        "session",
    )  # fmt: skip

    def __init__(
        self, session: Session, epoch: int, arena: Arena, on_done: Callable[[bool], None]
    ) -> None:
        self.session = session
        self.epoch = epoch  # in the headers of the new places
        self.arena = arena
        self.on_done = on_done  # called once, with whether every answer came
        self.orphans: list[Orphan] = []
        self.places: list[ArenaPlace] = []
        self.rows: list[int] = []
        self.sent = 0
        self.over = False  # installed or given up
        self.fallen: Callable[[], None] | None = None  # its worker died; holds the arena

    @property
    def is_complete(self) -> bool:
        return len(self.rows) == len(self.orphans)

    @property
    def proven(self) -> int:
        """Rows that arrived, over all pages."""
        return sum(self.rows)


class Leaving(NamedTuple):
    """Places of a session that computes on another lane now."""

    arena: Arena | None
    places: list[ArenaPlace]


class Touch:
    """Sealed pages to fault in; `on_done` when the lane has, or died. Without pages: an answer."""

    __slots__ = ("codes", "left", "on_done")

    def __init__(self, codes: Sequence[int], on_done: Callable[[], None]) -> None:
        self.codes = deque(codes)
        self.left = max(1, len(codes))
        self.on_done = on_done


class Chores(NamedTuple):
    """What a frame carries besides entries, and what its answers belong to."""

    poison: tuple[int, ...]
    reserve: tuple[wire.Place, ...]
    retitle: tuple[wire.Retitle, ...]
    adopt: tuple[wire.Adopt, ...]
    adopt_tokens: bytes
    touch: tuple[int, ...]
    digest: tuple[wire.Digest, ...]
    adoptions: list[Adoption]  # of each `adopt`
    touches: list[Touch]  # of each `touch`
    digests: list[tuple[Session, int, int, ArenaPlace]]  # of each `digest`


class AdoptingPages(SealLine):
    """`SealLine` plus the way into the arena."""

    def __init__(
        self,
        store: Store,
        repr_id: bytes,
        wake: Callable[[], None],
        commit: Callable[[], None],
        on_change: Callable[[Session], None],
    ) -> None:
        super().__init__(store, repr_id, wake, commit, on_change)
        self._local: dict[Session, Adoption] = {}  # members' own orphans
        self._adoptions: dict[Adoption, None] = {}  # all that hold places
        self._queue: deque[Adoption] = deque()  # those with something to send
        self._touches: deque[Touch] = deque()
        self.rows_adopted = 0

    # ------------------------------------------------------------------------ asked from outside

    def prepare(
        self,
        session: Session,
        epoch: int,
        n_pages: int,
        on_done: Callable[[bool], None],
        *,
        borrow: bool = True,
        warm: bool = False,
    ) -> Adoption | None:
        """Places for `n_pages` open pages of a session; None if the arena has not so many.

        `warm`: the next frame writes to them, so that rows that come later meet no page faults.
        """
        if self._arena is None:
            return None
        adoption = Adoption(session, epoch, self._arena, on_done)
        if not self._widen(adoption, n_pages, borrow):
            return None
        self._adoptions[adoption] = None
        if warm:
            self._poison.update((place.place, None) for place in adoption.places)
        return adoption

    def adopt(self, adoption: Adoption, orphans: Sequence[Orphan], *, borrow: bool = True) -> bool:
        """Start copying. False, and the adoption is over, if there are not enough places."""
        if adoption.over or adoption.arena is not self._arena:
            return False
        if not self._widen(adoption, len(orphans), borrow):
            self.abandon(adoption)
            return False
        while len(adoption.places) > len(orphans):
            self._free(adoption.places.pop())
        adoption.orphans = list(orphans)
        if not orphans:
            adoption.on_done(True)
        else:
            self._queue.append(adoption)
            self._wake()
        return True

    def abandon(self, adoption: Adoption) -> None:
        """Nobody wants these rows here any more; answers still to come are ignored."""
        if adoption.over:
            return
        adoption.over = True
        self._adoptions.pop(adoption, None)
        if adoption.arena is self._arena:
            for place in adoption.places:
                self._free(place)
        if adoption.fallen is not None:
            adoption.fallen()
        self._wake()

    def install(self, adoption: Adoption) -> None:
        """What arrived becomes the session's table after its sealed pages; the frontier moves.

        If the worker died meanwhile, what arrived is in its arena: the next one adopts it again.
        """
        session, sealed = adoption.session, len(adoption.session.pinned)
        adoption.over = True
        self._adoptions.pop(adoption, None)
        self._forsake(session, 0)
        if adoption.fallen is not None:
            self._install_fallen(adoption)
            return
        reach = sealed * PAGE_TOKENS
        for orphan, place, rows in zip(
            adoption.orphans, adoption.places, adoption.rows, strict=True
        ):
            first = orphan.page * PAGE_TOKENS
            if orphan.page < sealed or first != reach or not rows:
                self._free(place)  # sealed meanwhile, or what comes before it is missing
                continue
            session.places.append(place)
            session.codes.append(place.code)
            reach = first + rows
        if not all(adoption.rows):
            session.loss = LOST_WITH_WORKER
        self.rows_adopted += reach - sealed * PAGE_TOKENS
        last = max(0, len(session.tokens) - (session.state is not State.IDLE))  # one is to compute
        session.frontier = min(reach, last)
        session.computed = max(session.computed, session.frontier)
        for place in session.places:
            index = sealed + session.places.index(place)
            if (index + 1) * PAGE_TOKENS <= session.frontier:
                self._due[place] = (session, index, PAGE_TOKENS)

    def _install_fallen(self, adoption: Adoption) -> None:
        session = adoption.session
        first = len(session.pinned)
        session.frontier = min(session.frontier, first * PAGE_TOKENS)  # nothing is open here yet
        orphans = [
            self._arena_orphan(orphan.page, rows, adoption.arena, place, adoption.epoch)
            for orphan, place, rows in zip(
                adoption.orphans, adoption.places, adoption.rows, strict=True
            )
            if orphan.page >= first and rows
        ]
        if adoption.fallen is not None:
            adoption.fallen()
        try:
            self.inherit(session, orphans)
        except ValueError:  # a page before them is missing
            for orphan in orphans:
                orphan.release()

    def sources(self, session: Session) -> list[Orphan]:
        """Where the session's open rows are now, for another lane to copy."""
        if self._arena is None or session.orphans:
            return list(session.orphans)
        sealed = len(session.pinned)
        return [
            Orphan(
                sealed + offset,
                PAGE_TOKENS,
                self._source(self._arena, place, self._titles[place]),
                _nothing,
            )
            for offset, place in enumerate(session.places)
        ]

    def touch(self, codes: Sequence[int], on_done: Callable[[], None]) -> None:
        """Fault sealed pages in before a session arrives; at least, have the lane answer."""
        self._touches.append(Touch(codes, on_done))
        self._wake()

    def pause_adopting(self, session: Session) -> None:
        """The session is frozen: its rows stay where they are. `enter` asks for them again."""
        self._stop_adopting(session)
        self._orphaned.pop(session, None)

    def detach(self, session: Session) -> Leaving:
        """The session computes elsewhere from now on; its sealed pages went with it.

        Seals of its pages that are under way go on as nobody's. `release` what is left.
        """
        left = Leaving(self._arena, list(session.places))
        for place in session.places:
            seal = self._seals.get(place)
            if seal is not None and seal.ticket is not None:
                seal.session, seal.taken_by = None, session
                left.places.remove(place)
            elif seal is not None:
                self._unqueue(seal)
        session.places.clear()
        del session.codes[len(session.pinned) :]
        self._lenders.pop(session, None)
        self.pause_adopting(session)
        self.unpark(session)
        self.members.pop(session.key, None)
        return left

    def release(self, left: Leaving) -> None:
        """Places of a session that left are poisoned and free, unless their arena died."""
        if left.arena is not None and left.arena is self._arena:
            for place in left.places:
                self._drop(place)

    def bring(self, session: Session, tails: Sequence[Orphan]) -> None:
        """Parked rows that came along with a session: wanted if they follow its sealed pages.

        Behind an open page they cannot wait: who has any has all of its open pages here.
        """
        if not tails:
            return
        try:
            if session.places:
                raise ValueError(f"{session!r} has open pages")
            self.inherit(session, tails)
        except ValueError:
            for orphan in tails:
                orphan.release()

    # --------------------------------------------------------------------------- own orphans

    def _stop_adopting(self, session: Session) -> None:
        adoption = self._local.pop(session, None)
        if adoption is not None:
            self.abandon(adoption)

    def _is_adoptable(self, session: Session) -> bool:
        """Rows of a dead arena are fetched at once, a parked tail when its session runs."""
        if session in self._local or session.state in (State.FROZEN, State.CLOSED):
            return False
        if not session.orphans:  # its timeline was cut, and its table not yet
            return False
        return session.state is State.RUNNING or isinstance(
            session.orphans[0].source, wire.FromArena
        )

    def _adopt_orphans(self) -> None:
        """Start fetching the open rows of members: those that hold a seat first."""
        if not self._orphaned or self._arena is None:
            return
        due = [session for session in self._orphaned if self._is_adoptable(session)]
        due.sort(key=lambda session: session.state is not State.RUNNING)
        for session in due:
            if len(self._queue) > self._adopts_max:
                return
            self._adopt_local(session)

    def _adopt_local(self, session: Session) -> None:
        def done(complete: bool) -> None:
            del self._local[session]
            if complete:
                self.install(adoption)
                if session.state in (State.IDLE, State.WAITING):
                    self.lend(session)  # who had nothing left at the death was no lender any more
            self._on_change(session)

        orphans, wanted = session.orphans, session.state is not State.IDLE
        made = self.prepare(session, session.epoch, len(orphans), done, borrow=wanted)
        if made is None:  # no room for them: what is sealed must do
            self.truncate(session, len(session.codes))
            session.loss = LOST_WITH_WORKER
            self._on_change(session)
            return
        adoption = made
        self._local[session] = adoption
        self.adopt(adoption, orphans)

    def _widen(self, adoption: Adoption, n_pages: int, borrow: bool) -> bool:
        """Have at least `n_pages` places; on failure those taken now are given back."""
        before = len(adoption.places)
        while len(adoption.places) < n_pages:
            place = self._take_place(borrow=borrow)
            if place is None:
                while len(adoption.places) > before:
                    self._free(adoption.places.pop())
                return False
            adoption.places.append(place)
        return True

    # ------------------------------------------------------------------------------- frames

    @property
    def _adopts_max(self) -> int:
        return max(1, ADOPT_BYTES // self._store.layout.page_bytes)

    @property
    def _has_arrivals(self) -> bool:
        if self._queue or self._touches:
            return True
        return self._arena is not None and any(map(self._is_adoptable, self._orphaned))

    def _take_adopts(self) -> tuple[list[wire.Adopt], bytes, list[Adoption]]:
        """The next pages to copy, oldest request first, as many as one frame should carry."""
        self._adopt_orphans()
        messages, tokens, owners = list[wire.Adopt](), array("i"), list[Adoption]()
        while self._queue and len(messages) < self._adopts_max:
            adoption = self._queue[0]
            if adoption.over or adoption.sent == len(adoption.orphans):
                self._queue.popleft()
                continue
            at = adoption.sent
            adoption.sent += 1
            message, ids = self._adopt_message(adoption, at)
            messages.append(message)
            tokens.extend(ids)
            owners.append(adoption)
            if adoption.sent == len(adoption.orphans):
                self._queue.popleft()  # else an empty frame would go out for its sake
        return messages, tokens.tobytes(), owners

    def _adopt_message(self, adoption: Adoption, at: int) -> tuple[wire.Adopt, list[int]]:
        orphan, place, session = adoption.orphans[at], adoption.places[at], adoption.session
        first = orphan.page * PAGE_TOKENS
        ids = session.tokens[first : first + orphan.rows]
        title = self._title(place, session, adoption.epoch, orphan.page)
        source = orphan.source
        if not isinstance(source, wire.FromArena):
            session.lanes |= self.writers(source)
            source, ids = self._page_source(source, ids)
        return wire.Adopt(title, len(ids), source), ids

    def _page_source(self, ref: PageRef, ids: list[int]) -> tuple[wire.FromPage, list[int]]:
        """A sealed page proves its bytes, not its tokens: those were compared before."""
        if not self._store.is_resident(ref):  # condemned, though our pin keeps its bytes
            return wire.FromPage(0, 0, bytes(16)), []
        proof = self._store.proof(ref)
        return wire.FromPage(proof.place_code, proof.seed, proof.checksum), ids

    def _take_touches(self) -> tuple[list[int], list[Touch]]:
        codes, owners = list[int](), list[Touch]()
        room = max(1, TOUCH_BYTES // self._store.layout.page_bytes)
        while self._touches and len(codes) < room:
            touch = self._touches[0]
            if touch.codes:
                codes.append(touch.codes.popleft())
            owners.append(touch)
            if not touch.codes:
                self._touches.popleft()
        return codes, owners

    def _arrived(self, chores: Chores, adopted: tuple[int, ...]) -> None:
        """Answers to what `_take_adopts` and `_take_touches` sent."""
        for adoption, rows in zip(chores.adoptions, adopted, strict=True):
            if adoption.over or adoption.fallen is not None:
                continue
            adoption.rows.append(rows)
            if adoption.is_complete:
                adoption.on_done(True)
        self._touched(chores.touches)

    def _touched(self, touches: Sequence[Touch]) -> None:
        for touch in touches:
            touch.left -= 1
            if not touch.left:
                touch.on_done()

    # -------------------------------------------------------------------------------- death

    def _orphan(self, session: Session, arena: Arena) -> None:
        """The session's open pages lie in a dead worker's arena: remember where."""
        if not session.places:
            return
        sealed = len(session.pinned)
        parked = session.parked
        found = [
            self._arena_orphan(sealed + i, PAGE_TOKENS, arena, place, self._titles[place])
            for i, place in enumerate(session.places)
        ]
        if parked is not None and parked.page == found[-1].page:
            found.pop().release()
            found.append(self._page_orphan(parked.page, parked.rows, parked.ref))
            session.parked = None
        session.places.clear()
        del session.codes[sealed:]
        session.frontier = min(session.frontier, sealed * PAGE_TOKENS)
        session.orphans = found
        self._orphaned[session] = None

    def _arena_orphan(
        self, index: int, rows: int, arena: Arena, place: ArenaPlace, epoch: int
    ) -> Orphan:
        source = self._source(arena, place, epoch)
        return Orphan(index, rows, source, self.hold(arena))

    def _source(self, arena: Arena, place: ArenaPlace, epoch: int) -> wire.FromArena:
        return wire.FromArena(os.path.basename(arena.path), place.place, place.gen, epoch)

    def _adoptions_died(self, arena: Arena) -> None:
        """What has arrived waits in the dead arena for `install`; what has not, fails."""
        self._queue.clear()
        touches, self._touches = self._touches, deque()
        for touch in touches:
            touch.left = 1
            self._touched([touch])
        for adoption in list(self._adoptions):
            if adoption.fallen is not None:
                continue  # with an earlier worker
            if adoption.orphans and adoption.is_complete and adoption.session not in self._local:
                adoption.fallen = self.hold(arena)
            else:
                adoption.over = True
                del self._adoptions[adoption]
                adoption.on_done(False)


def _nothing() -> None:
    """Nobody holds the arena of a live worker."""
