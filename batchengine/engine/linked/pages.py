"""Pages of sessions with peers, and pages of peers here: the parts, and who gets which message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec

from batchengine.core import BatchEngineError
from batchengine.engine.linked.holds import HoldName, HoldsGiven, Misfit, PageFormats
from batchengine.engine.linked.holds_server import HoldServer
from batchengine.engine.linked.holds_taken import HoldsTaken, OtherLane
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.page_move import PageMover
from batchengine.engine.linked.peer_pages import PeerPages
from batchengine.engine.linked.peer_states import PeerStates
from batchengine.engine.linked.routes import RouteKeeper, keeps_pages
from batchengine.engine.state import EngineState
from batchengine.engine.tasks import Spawn
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import Peers
from batchengine.peers.transitions import LinkState
from batchengine.policy.cost import LaneLoad
from batchengine.wire import peer
from batchengine.wire.peer import PeerFrame, PeerLoad
from kv_store import keys
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

ERASE_S = 10.0  # for a peer to overwrite the pages of a session


class LinkedPages:
    """What this daemon and its peers hold for each other. Use: `keeper.run` as a vital task."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        peers: Peers,
        links: LaneLinks,
        spawn: Spawn,
        n_head: int,
    ) -> None:
        loop = self._loop = state.lanes[0]
        bytes_max = state.config.peers.hold_bytes or state.config.store.budget_bytes // 2
        self._bytes_max = bytes_max  # that of `given` shrinks with what its own sessions leave
        self.given = HoldsGiven(bytes_max)
        self.taken = HoldsTaken(store, loop, peers.links, links)
        self.pages = PeerPages(store, peers.links)
        self.states = PeerStates(store, state.lanes, spawn)
        self.keeper = RouteKeeper(
            loop,
            peers.links,
            links,
            self.taken,
            PageMover(store, loop, self.taken, self.pages, links),
            spawn,
            store.pages.layout,
            n_head,
        )
        self._state = state
        self._peers = peers
        self.formats = PageFormats(store)
        self._server = HoldServer(
            store, loop, self.given, self.formats, state.lanes, spawn, self._why_not, self.states
        )
        self.keeper.expire += [self._server.expire, self._recall]
        for other in state.lanes:
            other.kv.slots.holders = self.taken if other is loop else OtherLane(self.taken)
        loop.kv.disputes.lost.append(self._end_holds)
        state.erase_at_peers = self.erase
        links.on_hold = self._server.on_hold
        links.on_worker = self._worker_began
        peers.subscribe(self._on_message, self._on_state)

    def __repr__(self) -> str:
        return f"<LinkedPages {self.given!r} {self.taken!r}>"

    def load(self, load: PeerLoad, lane: LaneLoad, to: str) -> PeerLoad:
        """The load that peer `to` learns, with what is held for peers, and with the work of the
        first lane but its stages for that peer."""
        free = others_free = 0
        if not self._why_not():
            free, others_free = self.given.bytes_free, self.formats.bytes_free(self.given)
        first, second, third, fourth = map(round, lane.prefill_ms)
        others_ms = lane.stage_ms - self._loop.stages.left_ms(lane.cost, to)
        return msgspec.structs.replace(
            load,
            prefill_ms=(first, second, third, fourth),
            stage_ms=max(0, round(others_ms)),
            pages_held=self.given.n_pages,
            hold_bytes_free=free,
            other_bytes_free=others_free,
            hold_bytes_max=self.formats.bytes_max(self._peers.links.get(to), self._bytes_max),
        )

    async def erase(self, tokens: Sequence[int], salt: bytes, kept: int) -> None:
        """Have peers erase the pages of a dropped session after its first `kept` tokens.

        One that cannot be reached is named in the log: its pages go when it evicts them.
        """
        asked, ids = peer.ErasePages(salt, kept), keys.token_bytes(tokens)

        async def ask(link: PeerLink) -> None:
            try:
                reply = (await link.request(asked, ids, timeout_s=ERASE_S)).message
                why = getattr(reply, "why", "")
            except (BatchEngineError, ValueError) as error:
                why = str(error)
            if why:
                log.warning("pages of a dropped session may be with peer %s: %s", link.name, why)

        links = self._peers.links.values()
        asked_links = [link for link in links if keeps_pages(link) or not link.state.is_open]
        await asyncio.gather(*map(ask, asked_links))

    def _why_not(self) -> str:
        """Why this daemon takes no pages of peers; "" = it does."""
        return "this daemon takes no more pages" if self._state.leaving else ""

    def _on_message(self, link: PeerLink, frame: PeerFrame) -> None:
        message = frame.message
        try:
            if isinstance(message, peer.HoldGone):
                self.taken.gone(link.name, message.hold)
                return
            is_taken = (
                (isinstance(message, peer.PagePart) and self.pages.on_part(link, frame, message))
                or self._server.on_message(link, frame)
                or self.states.on_message(link, frame)
            )
            if not is_taken and isinstance(message, peer.HoldReplies):
                raise Misfit(f"{type(message).__name__} was not asked for")
        except Misfit as error:
            link.abort(str(error))

    def _on_state(self, link: PeerLink, before: LinkState) -> None:
        if link.state.is_open and not before.is_open:
            self._server.peer_up(link)
        elif before.is_open and not link.state.is_open:
            self._server.peer_down(link.name)
            self.states.peer_down(link.name)
            self.taken.peer_down(link.name)

    def _worker_began(self) -> None:
        self._server.worker_began()
        self.taken.worker_began()

    def _end_holds(self, keys: Sequence[bytes]) -> None:
        """End holds with pages of these keys, which became invalid."""
        self._tell_owners(self._server.pages_invalid(keys), "a page of it became invalid")

    def _recall(self, now: float) -> None:
        """End holds whose owners did not take them back when their room was lacking here."""
        self._tell_owners(self._server.recall(now), "its holder needs the room")

    def _tell_owners(self, ended: Sequence[HoldName], why: str) -> None:
        for name in ended:
            log.info("%s of peer %s has ended: %s", f"hold {name.hold:x}", name.peer, why)
            with contextlib.suppress(BatchEngineError, KeyError):  # it is not there any more
                self._peers.links[name.peer].send(peer.HoldGone(name.hold, why))
