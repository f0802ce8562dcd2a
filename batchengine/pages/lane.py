"""The pages of one lane as its step loop sees them: what a frame carries, and a worker's death.

Owns the arena's life. A session whose worker died keeps its sealed pages; its open rows stay in
the dead arena until the next one has adopted them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from batchengine import wire
from batchengine.pages.adoption import AdoptingPages, Chores
from batchengine.pages.places import Seal
from batchengine.session import Session, State
from kv_store.arena import Arena, ArenaPlace
from kv_store.errors import StoreError

log = logging.getLogger("batchengine.pages")


class LanePages(AdoptingPages):
    """Page tables of the sessions of one lane. `on_change` hears of sessions whose KV changed."""

    _retitling: frozenset[ArenaPlace] = frozenset()  # by the frame in flight

    def __repr__(self) -> str:
        return (
            f"<LanePages {self._arena!r} lenders={len(self._lenders)} seals={len(self._seals)}"
            f" pending={len(self._pending)} orphaned={len(self._orphaned)}>"
        )

    # ------------------------------------------------------------------------------ the step

    def is_retitling(self, session: Session) -> bool:
        """Whether headers of its places are yet to follow a cut of its timeline."""
        under_way = self._retitles.keys() | self._retitling
        return not under_way.isdisjoint(session.places)

    def chores(self) -> tuple[Chores, list[Seal]]:
        """What the next frame carries besides entries, and the seals it verifies. Taken once.

        Call it after the entries were chosen: nobody who computes may be parked.
        """
        adopt, tokens, adoptions = self._take_adopts()
        touch, touches = self._take_touches()
        digests = self._take_digests()
        poison, self._poison = tuple(self._poison), {}
        fresh, self._fresh = tuple(self._fresh.values()), {}
        self._retitling = frozenset(self._retitles)
        retitles, self._retitles = tuple(self._retitles.values()), {}
        chores = Chores(
            poison,
            fresh,
            retitles,
            tuple(adopt),
            tokens,
            tuple(touch),
            tuple([wire.Digest(place.place, rows) for _, _, rows, place in digests]),
            adoptions,
            touches,
            digests,
        )
        return chores, self._take_verify()

    def answered(
        self, chores: Chores, digests: tuple[bytes, ...], adopted: tuple[int, ...]
    ) -> None:
        """The frame with these chores was executed."""
        self._retitling = frozenset()
        for (session, index, rows, place), digest in zip(chores.digests, digests, strict=True):
            self.digested(session, index, rows, place, digest)
        self._arrived(chores, adopted)

    @property
    def has_chores(self) -> bool:
        return self._has_other_chores or bool(self._verifiable())

    @property
    def _has_other_chores(self) -> bool:
        """A frame must go out, for more than to read what was published."""
        return bool(
            self._poison or self._fresh or self._retitles or self._due or self._has_arrivals
        )

    # ------------------------------------------------------------------------ lane life cycle

    @property
    def has_work(self) -> bool:
        """Something waits for the next frame, or for room in the store."""
        return bool(self._done or self._pending or self.has_chores)

    @property
    def is_sealing(self) -> bool:
        """Places may come back without anybody's doing: seals are in flight, or room is made.

        A seal that failed before does not count: it may fail again, once a second and for ever.
        """
        waiting = set(self._verify) - set(self._verifiable())  # for a page before them
        in_flight = any(not seal.again for seal in self._flying - waiting)
        room_is_made = self._pending and "being allocated" in self._store.refusal
        return bool(in_flight or self._has_other_chores or room_is_made)

    def close(self) -> None:
        """The worker is gone for good: its arena goes too."""
        for arena in (*self._old_arenas, *([self._arena] if self._arena else [])):
            arena.close(delete=True)
        self._old_arenas, self._arena = [], None

    def attach(self, arena: Arena) -> None:
        """A new worker has mapped this arena; no session has a place in it yet."""
        self._arena = arena

    def lane_died(self, chores: Chores | None) -> None:
        """The worker is reaped: open rows are orphans. Seals in flight go on from the old file.

        `chores` were in its last frame, if any: nobody will answer them.
        """
        arena, self._arena = self._arena, None
        for seal in self._seals.values():
            seal.session, seal.taken_by = None, seal.session
        # Keys of a dead arena's places may repeat in the new one.
        self._seals, self._pending, self._stalled = {}, [], []
        if arena is not None:
            self._old_arenas.append(arena)
            release = self.hold(arena)  # until everybody has said what they want of it
            for session in self.members.values():
                self._orphan(session, arena)
            self._adoptions_died(arena)
            release()
        if chores is not None:
            self._touched(chores.touches)
        self._poison, self._fresh, self._retitles, self._titles = {}, {}, {}, {}
        self._retitling = frozenset()
        self._due = {}
        # Places are gone, but sessions that do not run still give their pins.
        self._lenders = {session: 0 for session in self._lenders if session.pinned}
        # No new worker is needed for them.
        seals, self._verify = self._verify, []
        self.unverified(seals)
        self.close_old_arenas()

    def forsake_dead_arenas(self) -> None:
        """There is no room for a new arena beside them: their rows are computed again."""
        for session in list(self._orphaned):
            if any(isinstance(orphan.source, wire.FromArena) for orphan in session.orphans):
                self.truncate(session, len(session.codes))
                self._on_change(session)

    def forsake(self, session: Session) -> None:
        """The rows that are elsewhere may have killed a worker: they are computed again."""
        self.truncate(session, len(session.codes))

    async def recheck(self, sessions: list[Session]) -> None:
        """Read the sealed pages of sessions again: one of them may have ended the worker.

        A page that fails is never served again: whoever else holds it hears of it at once, and
        its session falls back to the pages before it, unless it moves or has moved meanwhile.
        """
        if self._proofs:
            await asyncio.wait(list(self._proofs))
        for session in sessions:
            refs = list(session.pinned)
            good = len(refs)
            for index, ref in enumerate(refs):
                sound = False
                with contextlib.suppress(StoreError, OSError):
                    sound = await asyncio.wrap_future(self._store.verify(ref))
                if not sound:
                    good = index
                    break
            is_ours = self.owns(session) and session.state is not State.FROZEN
            if good < len(refs) and is_ours and session.pinned[: good + 1] == refs[: good + 1]:
                log.warning("%r: page %d does not verify, it is computed again", session, good)
                self.truncate(session, good)
