"""Keeps the routes of the linked lane's sessions: decides when pages move, and to whom.

Owns the moves under way, one after the other for a session, sessions beside each other. Looks at
the sessions when a turn finds no page, when a move has ended, and every LOOK_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable

from batchengine.core import PAGE_TOKENS, SUPERPAGE_PAGES
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.holds_taken import HoldsTaken, TakenHold
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.page_move import PageMover
from batchengine.engine.tasks import Spawn
from batchengine.peers.features import HOLDS
from batchengine.peers.link import PeerLink
from batchengine.peers.transitions import LinkState
from batchengine.policy.linked.layouts import Rejected
from batchengine.policy.linked.routes import (
    GrowthPolicy,
    PageMove,
    PeerRoom,
    RouteView,
    SlowPeers,
    fair_share,
    plan_route,
)
from batchengine.session import Loss, Session, State
from batchengine.session_kv import full_pages, whole_superpages
from batchengine.wire.frames import PAYLOAD_BYTES_MAX
from kv_store.layout import PageLayout

log = logging.getLogger("batchengine.linked")

LOOK_S = 0.25
REST_S = 0.02  # between two looks
LOCAL_SHARE = 0.85  # of the pages for sessions: the store evicts below its limit, seals need room
REPORT_S = 0.5  # after which the load of a peer shows what was put there
GROWING, RESTING = GrowthPolicy(), GrowthPolicy(pull=-1.0)  # at rest nothing is taken back
GATHERING = GrowthPolicy(pull=GROWING.low)  # as soon as there is room
ALL_PAGES = 1 << 62
MESSAGE_REST_BYTES = 1 << 20  # of a message of accumulators: what says of which entries they are
BEYOND_S = 5.0  # a request is refused as too large only if no peer had room for so long
UNKNOWN_PAGES = 1 << 40  # of peers that are away
RETRY_S = 1.0  # after a move that failed
UNSERVED_S = 5.0  # of a session that peers do not serve though they could: its pages are lost


def why_unheld(layout: PageLayout, n_head: int, step_tokens: int) -> Rejected | None:
    """Return why peers cannot attend to pages of a model; None = they can: its layers are alike,
    and what one query head accumulates for all tokens of a step fits a message. n_head: of each
    layer; 0 = layers differ."""
    if n_head == 0 or not layout.is_uniform:
        return Rejected.OWN_HEADS
    heads = layout.layers[0]
    n_bytes = step_tokens * 4 * (heads.head_dim - heads.v_first + 2) + MESSAGE_REST_BYTES
    return None if n_bytes <= PAYLOAD_BYTES_MAX else Rejected.LONG_STEPS


class RouteKeeper:
    """Plans and runs the moves of the linked lane. Use: `run` as a vital task."""

    def __init__(
        self,
        loop: LaneLoop,
        peers: dict[str, PeerLink],
        links: LaneLinks,
        taken: HoldsTaken,
        mover: PageMover,
        spawn: Spawn,
        layout: PageLayout,
        n_head: int,
    ) -> None:
        self.moves: dict[Session, PageMove] = {}  # under way
        self.expire: list[Callable[[float], None]] = [taken.expire]  # called at each look
        self._loop = loop
        self._peers = peers
        self._links = links
        self._taken = taken
        self._mover = mover
        self._spawn = spawn
        self._page_bytes = layout.page_bytes
        self.unheld = why_unheld(layout, n_head, loop.config.tokens_per_step)
        self._wanted: dict[Session, int] = {}  # pages that are to be here
        self._free = Counter[str]()  # pages that a peer would take, with those that would give way
        self._slow = SlowPeers()
        self._gave_up = 0.0  # when pages of a session at rest were given up last
        self._on_room: Callable[[int], object] = lambda pages: None
        self._beyond: list[tuple[float, int]] = []  # pages that peers have or would take, and when
        self._begun: list[tuple[float, str, int]] = []  # see `_note`
        self._rests: dict[Session, float] = {}  # sessions with a failed move, until when
        self._unserved: dict[Session, tuple[int, float]] = {}  # frontier, and since when

    def __repr__(self) -> str:
        return f"<RouteKeeper moves={list(self.moves.values())}>"

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self.look()
            short = self._loop.seats.pages_short
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await short.wait()
            short.clear()
            await asyncio.sleep(REST_S)

    def want(self, session: Session, pages: int | None) -> None:
        """Keep at most so many pages of a session here, the others with peers, or ALL_PAGES if its
        share has room for them; None = as many as its share."""
        if pages is None:
            self._wanted.pop(session, None)
        else:
            self._wanted[session] = pages
            self._loop.seats.pages_short.set()

    def on_room(self, hook: Callable[[int], object]) -> None:
        """Have it called at each look, and now, with how many pages all peers keep at most."""
        self._on_room = hook
        hook(self._pages_of_peers())

    def bytes_free(self, peer: str) -> int:
        """What a peer would keep for sessions of this daemon in addition, at most LOOK_S old."""
        return self._free[peer] * self._page_bytes

    def look(self) -> None:
        """Begin the moves that are due, and give up what does not come."""
        now = time.monotonic()
        for expire in self.expire:
            expire(now)
        self._lose_unserved(now)
        self._look_at_waits(now)
        rooms = self._rooms(now)
        seats = self._loop.seats
        taking = [room for room in rooms if room.usable and not room.leaves]
        free = sum([max(0, room.free_pages) for room in taking])
        resting = self._resting()
        self._free = Counter(
            {
                room.name: room.free_pages
                for room in rooms
                if room.usable and not (room.leaves or room.slow)
            }
        )
        for session in resting:
            for segment in session.kv.held:
                self._free[segment.peer] += segment.n_pages
        rested = sum([session.kv.n_held for session in resting])
        seats.pages_beyond_free = free + rested
        seats.pages_beyond_sure = rested + sum([whole_superpages(r.free_pages) for r in taking])
        self._beyond = [(at, pages) for at, pages in self._beyond if now - at < BEYOND_S]
        self._beyond.append((now, free + self._taken.n_pages))
        seats.pages_beyond = max([pages for _, pages in self._beyond])
        seats.pages_beyond_max = self._pages_of_peers()
        self._on_room(seats.pages_beyond_max)
        seats.why_none_beyond = (self.unheld or "") if self._peers else ""
        self._rests = {one: until for one, until in self._rests.items() if until > now}
        for session in [one for one in self._wanted if one.state is State.CLOSED]:
            del self._wanted[session]
        if any(room.usable for room in rooms):
            is_short = False
            for session, share in self._shares().items():
                if session not in self.moves and session not in self._rests:
                    is_short |= self._plan(session, share, rooms)
            if is_short and resting and now - self._gave_up >= REPORT_S:
                self._gave_up = now
                self._loop.between_steps(lambda: self._give_up(resting[0]))
        seats.awaits_peers = bool(self.moves)

    def _shares(self) -> dict[Session, int]:
        """Pages that each session may have here: those with a turn, or pages with peers, share
        them fairly."""
        seats, sessions = self._loop.seats, self._loop.sessions.values()
        wanted = {session: len(session.kv.codes) for session in sessions if session.kv.held}
        wanted |= {turn.session: turn.pages_max for turn in seats.turns}
        share = fair_share(int(seats.pages_now * LOCAL_SHARE), list(wanted.values()))
        return dict.fromkeys(wanted, share)

    def _resting(self) -> list[Session]:
        """Sessions without a request whose pages lie with peers, the one at rest for longest first:
        their pages give way to those of a session that computes."""
        return [
            session
            for session in self._loop.kv.slots.reclaimable
            if session.state is State.IDLE and session.kv.held and session not in self.moves
        ]

    def _give_up(self, session: Session) -> None:
        """Drop the pages of a session that still has no request."""
        slots = self._loop.kv.slots
        if session.state is State.IDLE and session in slots.reclaimable and session.kv.held:
            log.info("%r gives up its pages with peers", session)
            slots.clear(session)
            session.loss = Loss.EVICTED
            slots.changed(session)

    def _plan(self, session: Session, share: int, rooms: tuple[PeerRoom, ...]) -> bool:
        """Begin the moves of a session that are due; True: it has too many pages here, and no peer
        has room for them."""
        kv = session.kv
        if session.state in (State.FROZEN, State.CLOSED) or kv.later or kv.cut_off:
            return False
        ranges = [(segment.peer, segment.n_pages) for segment in kv.held]
        local = len(kv.codes) - kv.n_held
        is_running = session.state is State.RUNNING
        movable = self._movable(session) if is_running else 0
        policy = GROWING if is_running else RESTING
        if (wanted := self._wanted.get(session)) == ALL_PAGES:
            policy = GATHERING if len(kv.codes) <= share * GROWING.low else policy
        elif wanted is not None and any(
            room.usable and not (room.leaves or room.slow) for room in rooms
        ):
            share = min(share, wanted)
        view = RouteView(tuple(ranges), local, movable, share, rooms, policy)
        if not (moves := plan_route(view)):
            is_full = not self._begun and all(room.free_pages < SUPERPAGE_PAGES for room in rooms)
            return is_full and local > share and movable >= 2 * SUPERPAGE_PAGES
        self.moves[session] = moves[0]
        self._spawn(self._run(session, moves), "moves of pages")
        return False

    def _movable(self, session: Session) -> int:
        """Sealed pages that could be handed over now."""
        kv = session.kv
        if self._loop.kv.held.is_cold(session):
            return 0
        return min(len(kv.sealed), full_pages(session.frontier) - kv.n_held)

    async def _run(self, session: Session, moves: tuple[PageMove, ...]) -> None:
        try:
            for move in moves:
                self.moves[session] = move
                self._note(move.target, move.n_pages)
                if not await self._mover.move(session, move):
                    self._rests[session] = time.monotonic() + RETRY_S
                    return
                self._note(move.source, -move.n_pages)
        finally:
            del self.moves[session]
            self._loop.seats.pages_short.set()

    def _note(self, peer: str, n_pages: int) -> None:
        """Remember what was put with a peer, or taken from it: its load may not show it yet."""
        self._begun.append((time.monotonic(), peer, n_pages))

    # ---------------------------------------------------------------------------------- peers

    def _rooms(self, now: float) -> tuple[PeerRoom, ...]:
        moving = Counter[str]()
        self._begun = [begun for begun in self._begun if now - begun[0] < REPORT_S]
        for _, name, n_pages in self._begun:
            moving[name] += n_pages
        return tuple(
            [
                self._room(link, moving[link.name])
                for link in self._peers.values()
                if link.state.is_open
            ]
        )

    def _pages_of_peers(self) -> int:
        """Pages that all peers keep at most, in whole super-pages; UNKNOWN_PAGES while one has not
        said so."""
        if self.unheld is not None:
            return 0
        links = self._peers.values()
        if not all(link.state.is_open and link.load.kv_bytes for link in links):
            return UNKNOWN_PAGES
        return sum(
            [whole_superpages(link.load.hold_bytes_max // self._page_bytes) for link in links]
        )

    def _room(self, link: PeerLink, n_moving: int) -> PeerRoom:
        load = link.load
        free = link.bytes_free // self._page_bytes
        # only the peer itself says that it wants room back: its load may show `n_moving` already
        free = min(free, max(0, free - n_moving)) if n_moving > 0 else free - n_moving
        hops = (link.rtt_us or 1000.0) / 1000
        is_slow = bool(self.why_slow(link.name))
        return PeerRoom(link.name, free, hops, self.is_usable(link), load.leaves, is_slow)

    def why_slow(self, peer: str) -> str:
        """Why pages are moved away from a peer that serves them too slowly; "" = it does not."""
        return self._slow.why(peer, time.monotonic())

    def _look_at_waits(self, now: float) -> None:
        """Compare what steps waited for each peer with its prediction.

        A step's wait counts for all of its holders, so while one of them is silent, the waits say
        nothing about the others.
        """
        cost, facts = self._loop.cost.cost, self._loop.lane.facts
        waits = self._loop.meter.take_waits()
        links = [self._peers[name] for name in waits if name in self._peers]
        if any(link.state is not LinkState.UP for link in links):
            return
        for name, waited_ms in waits.items():
            link = self._peers.get(name)
            if link is None or facts is None:
                continue
            ratio = 1.0
            if not link.is_of_other_model and (rate := link.load.prefill_tokens_per_s):
                ratio = 1000.0 / rate / cost.prefill_token_ms
            read_ms = ratio * cost.decode_kv_ms * PAGE_TOKENS * self._taken.pages_with(name)
            predicted_ms = facts.n_layer * (link.rtt_us or 0.0) / 1000 + read_ms
            if why := self._slow.look(name, waited_ms, predicted_ms, facts.n_layer, now):
                log.warning("pages are moved away from peer %s: %s", name, why)

    def is_usable(self, link: PeerLink) -> bool:
        """Whether a peer may get pages of this daemon's sessions now."""
        return self.unheld is None and self.is_served(link)

    def is_served(self, link: PeerLink) -> bool:
        """Whether a peer is up and keeps pages, as one that computes for others does."""
        return (
            link.state is LinkState.UP
            and keeps_pages(link)
            and self._links.number(link.name) is not None
            and not self._taken.is_avoided(link.name)
        )

    def _lose_unserved(self, now: float) -> None:
        """Give up pages of sessions that peers do not serve, though their links are up."""
        seen: dict[Session, tuple[int, float]] = {}
        for turn in self._loop.seats.running.values():
            session = turn.session
            frontier, since = self._unserved.get(session, (session.frontier, now))
            if not session.kv.held or frontier != session.frontier:
                continue
            if not (session.kv.cut_off or session in self._unserved):
                continue
            seen[session] = frontier, since
            if now - since > UNSERVED_S and session.kv.cut_off:
                del seen[session]
                log.warning("%r is not served by %s", session, session.kv.held)
                holds = [taken for taken in map(self._taken.hold_of, session.kv.held) if taken]
                self._spawn(self._lose_broken(holds), "holds that are not served")
        self._unserved = seen

    async def _lose_broken(self, holds: list[TakenHold]) -> None:
        """Lose those holds of a route that are not served, and avoid their peers.

        Of several peers each is asked. If each serves, the way between them is broken: the first
        one keeps its pages.
        """
        broken = holds
        if len({taken.peer for taken in holds}) > 1:
            served = await asyncio.gather(*map(self._mover.is_served, holds))
            silent = [
                taken for taken, is_served in zip(holds, served, strict=True) if not is_served
            ]
            broken = silent or [taken for taken in holds if taken.peer != holds[0].peer]
        broken = [taken for taken in broken if taken.used]  # the others were lost meanwhile
        for taken in broken:
            self._taken.avoid(taken.peer, lied=True)
        self._taken.lose(broken)


def keeps_pages(link: PeerLink) -> bool:
    """Whether the link is open, to a peer that keeps pages for others."""
    return link.offers(HOLDS)
