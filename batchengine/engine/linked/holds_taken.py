"""Holds taken: pages of this daemon's sessions that peers keep, and routes' pages it keeps itself.

Owns which holds are in use, and up to which page. A page table that gives pages up calls `release`;
the peer is sent that its hold ends, or is shorter. A hold lives as long as the control link over
which it was made. A data link that is lost makes sessions wait, for DATA_LOST_S; then the pages
count as lost.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence

from batchengine.core import BatchEngineError
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.peers.link import PeerLink
from batchengine.session_kv import SELF, HeldSegment
from batchengine.wire import lane as wire
from batchengine.wire import peer as messages
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

DATA_LOST_S = 2.0  # without a data link, after which the pages of a peer count as lost
AVOIDED_MIN_S, AVOIDED_S = 0.5, 60.0
HOLD_BITS = 63


class TakenHold:
    """A hold of a peer: it was promised `n_pages`; `used` of them are in page tables, all of these
    before `end`."""

    def __init__(self, peer: str, incarnation: int, era: int) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.era = era  # of the link
        self.hold = secrets.randbits(HOLD_BITS)
        self.n_pages = 0
        self.used = 0
        self.end = 0

    def __repr__(self) -> str:
        return f"<TakenHold {self.hold:x} of {self.peer} {self.used}/{self.n_pages}>"

    def segment(self, link: int, first: int, n_pages: int) -> HeldSegment:
        """A segment of these pages of the hold."""
        return HeldSegment(self.peer, self.incarnation, link, self.hold, first, n_pages)


class OwnHold:
    """Pages that this daemon holds between those of two peers; `used` are in page tables."""

    def __init__(self, refs: Sequence[PageRef]) -> None:
        self.refs = list(refs)
        self.used = len(self.refs)


class HoldsTaken:
    """The `Holders` of the linked lane. Used on the event loop only."""

    def __init__(
        self, store: Store, loop: LaneLoop, peers: dict[str, PeerLink], links: LaneLinks
    ) -> None:
        self._store = store
        self._loop = loop
        self._peers = peers
        self._links = links
        self._taken: dict[int, TakenHold] = {}
        self._own: dict[int, OwnHold] = {}
        self._avoided: dict[str, tuple[float, float]] = {}  # until when, and for how long
        self._eras = Counter[str]()  # how often the link to a peer was lost
        self._lost_at: dict[str, float] = {}  # when the data link to a peer was lost
        links.watchers.append(self._link_changed)

    def __repr__(self) -> str:
        return f"<HoldsTaken {list(self._taken.values())} own={len(self._own)}>"

    @property
    def n_pages(self) -> int:
        """Pages of this lane's sessions that peers hold."""
        return sum([taken.used for taken in self._taken.values()])

    def pages_with(self, peer: str) -> int:
        """Pages of this lane's sessions that one peer holds."""
        return sum([taken.used for taken in self._taken.values() if taken.peer == peer])

    def hold_of(self, segment: HeldSegment) -> TakenHold | None:
        """The hold of a peer that a segment is of; None: it has been lost, or is none of a peer."""
        return self._taken.get(segment.hold)

    # ------------------------------------------------------------------------------- Holders

    def link(self, segment: HeldSegment) -> int | None:
        """Number of the lane's data link to the holder; None: the pages are lost.

        While the data link is lost for a moment, it is the last number: entries are unreachable,
        and their sessions wait.
        """
        if segment.peer == SELF:
            own = self._own.get(segment.hold)
            is_good = own is not None and all(map(self._store.pages.is_resident, own.refs))
            return wire.SELF if is_good else None
        if segment.hold not in self._taken:
            return None
        number = self._links.number(segment.peer)
        if number is not None:
            return number
        lost_at = self._lost_at.setdefault(segment.peer, time.monotonic())
        return segment.link if time.monotonic() - lost_at < DATA_LOST_S else None

    def release(self, segments: Sequence[HeldSegment]) -> None:
        """These pages are not needed for their session any more."""
        for segment in segments:
            if segment.peer == SELF:
                self._release_own(segment)
            elif (taken := self._taken.get(segment.hold)) is not None:
                taken.used -= segment.n_pages
                if segment.first + segment.n_pages == taken.end:
                    taken.end = segment.first
                self.trim(taken)

    def hold_here(self, refs: Sequence[PageRef]) -> HeldSegment:
        """Make pages of this daemon's store a segment of a route; takes over one pin each."""
        hold = secrets.randbits(HOLD_BITS)
        own = self._own[hold] = OwnHold(refs)
        self._serve_own(hold, own)
        return HeldSegment(SELF, 0, wire.SELF, hold, 0, len(refs))

    # ---------------------------------------------------------------------------- for movers

    def begin(self, peer: str) -> TakenHold:
        """A new hold of a peer, without pages yet."""
        return TakenHold(peer, self._peers[peer].incarnation, self._eras[peer])

    def use(self, taken: TakenHold, first: int, n_pages: int) -> None:
        """Note that a page table has these pages of a hold from now on."""
        self._taken[taken.hold] = taken
        self._avoided.pop(taken.peer, None)
        taken.used += n_pages
        taken.end = max(taken.end, first + n_pages)

    def is_alive(self, taken: TakenHold) -> bool:
        """Whether pages may be used that were put into the hold: its link has not been lost."""
        is_same = self._taken.get(taken.hold, taken) is taken
        return is_same and self._eras[taken.peer] == taken.era

    def trim(self, taken: TakenHold) -> None:
        """Have the peer release what no page table uses of a hold."""
        if not taken.used:
            taken.end = 0
            self._taken.pop(taken.hold, None)
        if taken.n_pages == taken.end:
            return
        taken.n_pages = taken.end
        link = self._peers.get(taken.peer)
        if link is not None and link.incarnation == taken.incarnation:
            with contextlib.suppress(BatchEngineError):  # the link is lost, and with it the hold
                link.send(messages.ReleaseHold(taken.hold, taken.end))

    # ------------------------------------------------------------------------- what is lost

    def avoid(self, peer: str, *, lied: bool = False) -> None:
        """Have no pages put with a peer for a while, after a move to it failed: each time for
        longer, or for AVOIDED_S if it does not do what it says."""
        pause_s = self._avoided.get(peer, (0.0, AVOIDED_MIN_S / 2))[1]
        pause_s = AVOIDED_S if lied else min(AVOIDED_S, 2 * pause_s)
        self._avoided[peer] = time.monotonic() + pause_s, pause_s

    def is_avoided(self, peer: str) -> bool:
        """Whether a peer gets no pages for now."""
        return peer in self._avoided and time.monotonic() < self._avoided[peer][0]

    def peer_down(self, name: str) -> None:
        """The link to a peer is lost, and with it its holds."""
        self._eras[name] += 1
        self.lose([taken for taken in self._taken.values() if taken.peer == name])

    def gone(self, peer: str, hold: int) -> None:
        """A peer has ended a hold."""
        taken = self._taken.get(hold)
        if taken is not None and taken.peer == peer:
            self.lose([taken])

    def lose(self, holds: Sequence[TakenHold]) -> None:
        """Have sessions compute the pages of these holds again; their peers release them."""
        for taken in holds:
            log.warning("%r is lost", taken)
            taken.used = 0
            self.trim(taken)
        if holds:
            self._loop.recheck()

    def expire(self, now: float) -> None:
        """Lose the holds of peers without a data link for too long."""
        for name, lost_at in list(self._lost_at.items()):
            if now - lost_at >= DATA_LOST_S:
                del self._lost_at[name]
                log.warning("there was no data link to peer %s for %.0f s", name, DATA_LOST_S)
                self.lose([taken for taken in self._taken.values() if taken.peer == name])

    def _link_changed(self, peer: str) -> None:
        """The data link to a peer came up, was lost, or has another number."""
        if self._links.number(peer) is None:
            if self.pages_with(peer):
                self._lost_at.setdefault(peer, time.monotonic())
        else:
            self._lost_at.pop(peer, None)
        self._loop.recheck()  # sets the numbers of segments, and lets sessions try again

    # ----------------------------------------------------------------------------- own holds

    def worker_began(self) -> None:
        """Have a new worker serve the holds of this daemon's own sessions."""
        for hold, own in self._own.items():
            self._serve_own(hold, own)

    def _serve_own(self, hold: int, own: OwnHold) -> None:
        if self._loop.lane.is_attached:
            codes = tuple([self._store.pages.slot_code(ref) for ref in own.refs])
            self._loop.lane.note(wire.Hold(hold, codes))

    def _release_own(self, segment: HeldSegment) -> None:
        own = self._own.get(segment.hold)
        if own is None:
            return
        own.used -= segment.n_pages
        if own.used:
            return
        del self._own[segment.hold]
        for ref in own.refs:
            self._store.pages.unpin(ref)
        if self._loop.lane.is_attached:
            self._loop.lane.note(wire.Release(segment.hold))


class OtherLane:
    """The `Holders` of a lane without data links: pages of peers are computed again there."""

    def __init__(self, taken: HoldsTaken) -> None:
        self._taken = taken

    def link(self, segment: HeldSegment) -> int | None:
        """None: no route begins on this lane."""
        return None

    def release(self, segments: Sequence[HeldSegment]) -> None:
        """As HoldsTaken.release: the pages are not needed any more."""
        self._taken.release(segments)

    def hold_here(self, refs: Sequence[PageRef]) -> HeldSegment:
        """Raises RuntimeError: no route begins on this lane."""
        raise RuntimeError("no route begins on this lane")
