"""Moves pages of a session: to a peer, from one peer to another, or back.

Owns one move from its first message to the change of the page table, which happens between two
steps of the lane, if the session still has the pages. Whatever fails before leaves the session as
it is, and what was reserved is released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from batchengine.core import BatchEngineError
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.holds_taken import HoldsTaken, TakenHold
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.peer_pages import KnownPage, MoveFailed, PeerPages, WrongPage
from batchengine.policy.linked.routes import HERE, PageMove
from batchengine.session import Session, State
from batchengine.session_kv import HeldSegment, page_start, split_segments
from kv_store.errors import StoreError
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

GROW_POLLS, POLL_S = 100, 0.01


class TableChanged(Exception):
    """The session has no longer the pages of a move, or not there."""


class HeldPlace(NamedTuple):
    """A page of a hold."""

    taken: TakenHold
    at: int


class PageMover:
    """Carries out moves of sessions of the linked lane."""

    def __init__(
        self,
        store: Store,
        loop: LaneLoop,
        taken: HoldsTaken,
        pages: PeerPages,
        links: LaneLinks,
    ) -> None:
        self._store = store
        self._loop = loop
        self._taken = taken
        self._pages = pages
        self._links = links

    async def move(self, session: Session, move: PageMove) -> bool:
        """Carry out one move; False: it failed, and the session is as it was."""
        try:
            if move.target == HERE:
                await self._take_back(session, move)
            else:
                await self._place(session, move)
        except TableChanged as change:
            log.debug("%r: no move from page %d on: %s", session, move.first, change)
            return False
        except (MoveFailed, BatchEngineError, StoreError, OSError, ValueError) as error:
            log.info("%r: pages %d.. stay with %s: %s", session, move.first,
                     move.source or "this daemon", error)  # fmt: skip
            if move.target != HERE:
                self._taken.avoid(move.target)
            return False
        return True

    async def is_served(self, taken: TakenHold) -> bool:
        """Whether the holder's worker answers that it serves the hold."""
        try:
            await self._pages.serve(taken)
        except (MoveFailed, BatchEngineError) as error:
            log.warning("%r is not served: %s", taken, error)
            return False
        return True

    # --------------------------------------------------------------------------- to a peer

    async def _place(self, session: Session, move: PageMove) -> None:
        """Put pages into a hold of a peer, then into the table."""
        held = session.kv.held
        before, _ = split_segments(held, move.first)
        taken = self._hold_for(move, before)
        sources = self._sources(session, move)
        pages = self._known(session, move, sources)
        index = taken.n_pages
        try:
            await self._pages.reserve(taken, move.n_pages)
            await self._each(
                [
                    self._send(taken, index + offset, page, source)
                    for offset, (page, source) in enumerate(zip(pages, sources, strict=True))
                ]
            )
            await self._pages.serve(taken)
            await self._between_steps(lambda: self._placed(session, move, sources, taken, index))
        finally:
            self._taken.trim(taken)  # what the table does not use

    def _hold_for(self, move: PageMove, before: Sequence[HeldSegment]) -> TakenHold:
        """The hold of the segment before, if that lies with the target too, else a new one."""
        if before and before[-1].peer == move.target:
            taken = self._taken.hold_of(before[-1])
            if taken is not None and before[-1].first + before[-1].n_pages == taken.n_pages:
                return taken
        return self._taken.begin(move.target)

    async def _send(
        self, taken: TakenHold, index: int, page: KnownPage, source: PageRef | HeldPlace
    ) -> None:
        data = await self._read(source, page) if isinstance(source, HeldPlace) else source
        await self._pages.put(taken, index, page, data)

    def _placed(
        self,
        session: Session,
        move: PageMove,
        sources: Sequence[PageRef | HeldPlace],
        taken: TakenHold,
        index: int,
    ) -> None:
        """Change the table, between two steps."""
        kv, end = session.kv, move.first + move.n_pages
        self._check(session, move, sources)
        link = self._links.number(taken.peer)
        if link is None or not self._taken.is_alive(taken):
            raise MoveFailed(f"the link to {taken.peer} was lost meanwhile")
        segment = taken.segment(link, index, move.n_pages)
        if move.source == HERE:
            self._loop.kv.held.hand_over(session, segment)
            self._taken.use(taken, index, move.n_pages)
        else:
            before, rest = split_segments(kv.held, move.first)
            replaced, after = split_segments(rest, move.n_pages)
            assert end <= kv.n_held
            self._taken.use(taken, index, move.n_pages)
            kv.replace_held([*before, segment, *after])
            self._taken.release(replaced)
        self._changed(session)
        log.info("%r: pages %d to %d are with peer %s", session, move.first, end, taken.peer)

    # --------------------------------------------------------------------------------- back

    async def _take_back(self, session: Session, move: PageMove) -> None:
        """Read the last held pages from their peers, import them, and put them into the table."""
        sources = self._sources(session, move)
        pages = self._known(session, move, sources)
        refs: list[PageRef | None] = [None] * len(pages)
        try:
            await self._each(
                [self._fetch(session, sources[at], pages[at], refs, at) for at in range(len(pages))]
            )
            await self._between_steps(lambda: self._taken_back(session, move, sources, refs))
        finally:
            for ref in refs:
                if ref is not None:
                    self._store.pages.unpin(ref)

    async def _fetch(
        self,
        session: Session,
        source: PageRef | HeldPlace,
        page: KnownPage,
        refs: list[PageRef | None],
        at: int,
    ) -> None:
        assert isinstance(source, HeldPlace)
        data = await self._read(source, page)
        for _ in range(GROW_POLLS):
            found = self._store.pages.import_page(
                *page, data, origin=source.taken.peer, priority=session.priority
            )
            if not isinstance(found, NoRoom):
                try:
                    refs[at] = await asyncio.wrap_future(found)
                except asyncio.CancelledError:
                    found.add_done_callback(self._unpin)  # it is stored all the same
                    raise
                return
            if found is NoRoom.FULL and not self._loop.kv.slots.evict_oldest(session):
                break
            await asyncio.sleep(POLL_S)
        raise MoveFailed("this daemon's store has no room")

    def _unpin(self, stored: Future[PageRef]) -> None:
        """Give up a page that came too late for its move."""
        if stored.exception() is None:
            self._store.pages.unpin(stored.result())

    def _taken_back(
        self,
        session: Session,
        move: PageMove,
        sources: Sequence[PageRef | HeldPlace],
        refs: list[PageRef | None],
    ) -> None:
        """Change the table, between two steps."""
        self._check(session, move, sources)
        good = [ref for ref in refs if ref is not None and self._store.pages.is_resident(ref)]
        if len(good) < len(refs) or session.kv.n_held != move.first + move.n_pages:
            raise TableChanged("its table has changed")
        refs.clear()  # their pins pass to the table
        self._loop.kv.held.take_back(session, good)
        self._changed(session)
        log.info("%r: %d pages are back", session, len(good))

    async def _read(self, source: HeldPlace, page: KnownPage) -> bytearray:
        try:
            return await self._pages.read(source.taken, source.at, page)
        except WrongPage as error:
            log.error("%s: its pages are computed again", error)
            self._taken.avoid(source.taken.peer, lied=True)
            self._taken.lose([source.taken])
            raise

    # ------------------------------------------------------------------------------- helpers

    async def _each(self, works: list[Coroutine[Any, Any, None]]) -> None:
        """Do all of it, some at once; the first error ends the others."""

        async def one(work: Coroutine[Any, Any, None]) -> None:
            async with self._pages.room:
                await work

        tasks = [asyncio.ensure_future(one(work)) for work in works]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for work in works:
                work.close()  # of tasks that did not begin

    def _sources(self, session: Session, move: PageMove) -> list[PageRef | HeldPlace]:
        """Where the pages of a move are: references of sealed pages, or places with peers."""
        kv = session.kv
        if move.source == HERE:
            if kv.n_held != move.first or len(kv.sealed) < move.n_pages:
                raise TableChanged("its table has changed")
            return list(kv.sealed[: move.n_pages])
        places: list[PageRef | HeldPlace] = []
        _, rest = split_segments(kv.held, move.first)
        for segment in split_segments(rest, move.n_pages)[0]:
            taken = self._taken.hold_of(segment)
            if taken is None or segment.peer != move.source:
                raise TableChanged("its table has changed")
            places += [HeldPlace(taken, segment.first + at) for at in range(segment.n_pages)]
        if len(places) != move.n_pages:
            raise TableChanged("its table has changed")
        return places

    def _known(
        self, session: Session, move: PageMove, sources: Sequence[PageRef | HeldPlace]
    ) -> list[KnownPage]:
        kv, first = session.kv, move.first
        self._loop.kv.slots.know_keys(session, first + move.n_pages)
        found: list[KnownPage] = []
        for page, source in enumerate(sources, first):
            if isinstance(source, HeldPlace):
                digest = kv.digests.get(kv.keys[page])
                if digest is None:
                    raise MoveFailed("the digest of a page is not known")
            else:
                digest = self._store.pages.digest(source)
            found.append(KnownPage.of(session, page, digest))
        return found

    def _check(
        self, session: Session, move: PageMove, sources: Sequence[PageRef | HeldPlace]
    ) -> None:
        """Raise MoveFailed unless the session still has these pages in these places."""
        if session.state in (State.FROZEN, State.CLOSED) or not self._loop.kv.slots.owns(session):
            raise TableChanged("the session is leaving")
        if session.frontier < page_start(move.first + move.n_pages):
            raise TableChanged("its timeline was cut")
        if self._sources(session, move) != list(sources):
            raise TableChanged("its table has changed")

    def _changed(self, session: Session) -> None:
        turn = self._loop.seats.turn_of(session)
        if turn is not None:
            self._loop.seats.forget_row(turn)

    async def _between_steps(self, change: Callable[[], None]) -> None:
        """Have the lane make a change between two of its steps. Raises what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def make() -> None:
            if done.done():
                return  # the move was cancelled
            try:
                change()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._loop.between_steps(make)
        await done
