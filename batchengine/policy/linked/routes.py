"""Routes: which pages of a session lie with which peer, and when they move, as one pure function.

The pages of a session are contiguous ranges in the order of its tokens: first those of peers, each
of whole super-pages, then those of this daemon. All moves are of super-pages at a boundary of two
ranges, so they stay contiguous. `plan_route` says what to move now; nothing is moved here.

 1. A holder that needs its room back, or leaves, gives up the end of its range: to the next holder,
    to this daemon if it is the last holder, or else to the peer of rule 2.
 2. A session that has more pages here than its share pushes its oldest super-pages out, until it
    has `low` of its share: to its last holder as far as that has room, then to the peer with the
    most room, of those the one with the fewest hops.
 3. A session that has at most `pull` of its share here takes the end of its last range back, until
    it has `low` of it.
 4. A range that fits the holder of the range before it goes there: one hop less.

Rule 1 also applies to a holder that is slow (`SlowPeers`): steps wait longer for it than predicted.
Of such a holder this daemon takes back as much as by rule 3, and other slow ones take nothing. It
gets pages by rule 2 alone, once no other peer has room: a session that is slow beats one that ends.

Rules 2 and 3 cannot alternate: after a push, the session has less than a super-page below `low` of
its share here, after a pull at most `low`, and it pushes above all of its share. Rule 4 leaves the
target room, and makes every route shorter. A rule applies only if no earlier one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from batchengine.core import SUPERPAGE_PAGES

HERE = ""  # this daemon, as a source or target


class GrowthPolicy(msgspec.Struct, frozen=True, gc=False):
    """Constants of the rules, as ratios of a session's share, and pages."""

    low: float = 0.75
    pull: float = 0.5
    tail_pages: int = SUPERPAGE_PAGES  # at the end, sealed or open, that are never pushed
    merge_room: int = 4 * SUPERPAGE_PAGES  # that rule 4 leaves at the target


class PeerRoom(msgspec.Struct, frozen=True, gc=False):
    """One peer. `free_pages` after all moves that are under way; below 0 it needs room back."""

    name: str
    free_pages: int
    hops: float = 1.0  # to it, or ms: only compared with those of other peers
    usable: bool = True  # up and not suspect: may get pages
    leaves: bool = False  # gives back all that it holds
    slow: bool = False  # gives back what it holds as far as others have room


class RouteView(msgspec.Struct, frozen=True, gc=False):
    """One session: `ranges` are (peer, pages) in route order, then its pages here.

    `sealed_pages` of `local_pages` may be moved; `share_pages` is what it may have here.
    """

    ranges: tuple[tuple[str, int], ...]
    local_pages: int
    sealed_pages: int
    share_pages: int
    peers: tuple[PeerRoom, ...]
    policy: GrowthPolicy = GrowthPolicy()


class PageMove(msgspec.Struct, frozen=True, gc=False):
    """Move pages [first, first + n_pages) of the session from one daemon to another."""

    source: str
    target: str
    first: int
    n_pages: int


class SlowPeers:
    """Which peers make steps wait for longer than predicted.

    A peer is slow after steps waited `RATIO` times the prediction, and FLOOR_MS per layer, in every
    look for `AFTER_S`. Then it is avoided for REST_S, each time for twice as long.
    """

    RATIO = 4.0
    FLOOR_MS = 50.0  # also prefill on a shared core stays below
    AFTER_S = 1.5
    REST_S, REST_S_MAX = 30.0, 600.0

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}  # first and last look of a series
        self._until: dict[str, tuple[float, float, str]] = {}  # until when, for how long, and why

    def look(
        self, peer: str, waited_ms: float, predicted_ms: float, layers: int, now: float
    ) -> str:
        """Note what steps waited for a peer on average; returns why it is slow since now, or ""."""
        if waited_ms < max(self.RATIO * predicted_ms, self.FLOOR_MS * layers):
            self._since.pop(peer, None)
            return ""
        if self.why(peer, now):
            return ""
        first, last = self._since.get(peer, (now, now))
        first = now if now - last > self.AFTER_S else first  # nothing was measured meanwhile
        self._since[peer] = first, now
        if now - first < self.AFTER_S:
            return ""
        why = f"steps wait {waited_ms:.0f} ms for it, {predicted_ms:.1f} ms was predicted"
        rest_s = min(self.REST_S_MAX, 2 * self._until.get(peer, (0.0, self.REST_S / 2, ""))[1])
        self._until[peer] = now + rest_s, rest_s, why
        del self._since[peer]
        return why

    def why(self, peer: str, now: float) -> str:
        """Why a peer is avoided now; "" = it is not."""
        until, _, why = self._until.get(peer, (0.0, 0.0, ""))
        return why if now < until else ""


def fair_share(pages_max: int, wanted: Sequence[int]) -> int:
    """Pages that each session may have of `pages_max`, if they want so many: what small ones leave
    is for the others."""
    left, share = pages_max, pages_max
    for number, pages in enumerate(sorted(wanted)):
        share = max(0, left) // (len(wanted) - number)
        left -= min(pages, share)
    return share


def plan_route(view: RouteView) -> tuple[PageMove, ...]:
    """The moves to begin now, first to last; () if the session lies well.

    Each must have ended, or failed, before the next plan for this session.
    """
    rooms = {peer.name: peer for peer in view.peers}
    return (
        tuple(_give_back(view, rooms))
        or tuple(_push(view, rooms))
        or tuple(_pull(view))
        or tuple(_merge(view, rooms))
    )


def _give_back(view: RouteView, rooms: dict[str, PeerRoom]) -> Iterator[PageMove]:
    """Rule 1, for the last such range of the route."""
    first = sum(pages for _, pages in view.ranges)
    for index in reversed(range(len(view.ranges))):
        name, pages = view.ranges[index]
        first -= pages
        peer = rooms.get(name)
        if peer is None or not (peer.leaves or peer.slow or peer.free_pages < 0):
            continue
        gives_all, must = peer.leaves or peer.slow, peer.leaves or peer.free_pages < 0
        n_pages = pages if gives_all else min(pages, _superpages_up(-peer.free_pages))
        share = view.share_pages if must else int(view.share_pages * view.policy.low)
        end = first + pages
        if index + 1 < len(view.ranges):
            prefers = (view.ranges[index + 1][0],)
        elif n_here := min(n_pages, _superpages(share - view.local_pages)):
            yield PageMove(name, HERE, end - n_here, n_here)
            return
        else:
            prefers = ()
        moves = list(_placed(view, rooms, name, end - n_pages, n_pages, prefers))
        if moves:
            yield from moves
            return


def _push(view: RouteView, rooms: dict[str, PeerRoom]) -> Iterator[PageMove]:
    """Rule 2."""
    if view.local_pages <= view.share_pages:
        return
    excess = view.local_pages - int(view.share_pages * view.policy.low)
    movable = min(view.sealed_pages, max(0, view.local_pages - view.policy.tail_pages))
    n_pages = min(_superpages_up(excess), _superpages(movable))
    first = sum(pages for _, pages in view.ranges)
    prefers = (view.ranges[-1][0],) if view.ranges else ()
    yield from _placed(view, rooms, HERE, first, n_pages, prefers)


def _pull(view: RouteView) -> Iterator[PageMove]:
    """Rule 3, the end of the last range: the next plan looks at the range before it."""
    if not view.ranges or view.local_pages > view.share_pages * view.policy.pull:
        return
    name, pages = view.ranges[-1]
    room = int(view.share_pages * view.policy.low) - view.local_pages
    n_pages = min(pages, _superpages(room))
    if n_pages and name != HERE:
        yield PageMove(name, HERE, sum(pages for _, pages in view.ranges) - n_pages, n_pages)


def _merge(view: RouteView, rooms: dict[str, PeerRoom]) -> Iterator[PageMove]:
    """Rule 4."""
    first = 0
    for (before, n_before), (name, pages) in zip(view.ranges, view.ranges[1:], strict=False):
        first += n_before
        peer = rooms.get(before)
        if peer is None or before == name or peer.slow or not _takes(peer):
            continue
        if peer.free_pages - pages >= view.policy.merge_room:
            yield PageMove(name, before, first, pages)
            return


def _placed(
    view: RouteView,
    rooms: dict[str, PeerRoom],
    source: str,
    first: int,
    n_pages: int,
    prefers: tuple[str, ...],
) -> Iterator[PageMove]:
    """Moves of pages from `first` on to peers with room: the preferred ones, then by room, and
    from here to slow ones at last.

    Pages that are pushed out are placed oldest first. Of a range in the middle of the route the
    newest are placed first, so that the ranges stay whole when some find no room.
    """
    others = sorted(
        (peer for peer in view.peers if peer.name not in prefers),
        key=lambda peer: (-_superpages(peer.free_pages), peer.hops, peer.name),
    )
    left, end = n_pages, first + n_pages
    in_turn = [*(rooms[name] for name in prefers if name in rooms), *others]
    for peer in sorted(in_turn, key=lambda peer: peer.slow):
        part = min(left, _superpages(peer.free_pages))
        is_no_better = peer.slow and source != HERE
        if part < 1 or peer.name == source or not _takes(peer) or is_no_better:
            continue
        start = end - left if source == HERE else first + left - part
        yield PageMove(source, peer.name, start, part)
        left -= part


def _takes(peer: PeerRoom) -> bool:
    return peer.usable and not peer.leaves


def _superpages(pages: int) -> int:
    """Whole super-pages in so many pages, in pages; 0 below 0."""
    return max(0, pages) // SUPERPAGE_PAGES * SUPERPAGE_PAGES


def _superpages_up(pages: int) -> int:
    """The super-pages that so many pages need, in pages."""
    return -(-pages // SUPERPAGE_PAGES) * SUPERPAGE_PAGES
