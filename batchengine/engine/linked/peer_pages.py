"""Pages to and from the holds of peers: the owner's side of the control link.

Owns the pages that were asked for and have not come. What a peer sends back is compared with the
digest that is known here. Waits are bounded; page bytes go in parts, each after there is room.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from batchengine.engine.linked.holds import Misfit
from batchengine.engine.linked.holds_taken import TakenHold
from batchengine.peers.connection import FRAME_BYTES
from batchengine.peers.link import PeerLink
from batchengine.session import Session
from batchengine.session_kv import page_start
from batchengine.wire import peer
from batchengine.wire.peer import PeerFrame, PeerMessage
from kv_store import keys
from kv_store.pages.index import PageRef
from kv_store.store import Store

PAGES_AT_ONCE = 4  # on their way, of all sessions: each has a buffer
ANSWER_S = 5.0  # for an answer about a hold
STORED_S = 15.0  # for a page to be written and published, or to be read and sent


class MoveFailed(Exception):
    """A page cannot go where it should; the text says why. The session stays as it is."""


class KnownPage(NamedTuple):
    """A page of a timeline: what its key is made of, and the digest of its bytes."""

    parent: bytes
    tokens: bytes
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, session: Session, page: int, digest: bytes) -> KnownPage:
        """Return a page of a session whose keys are known up to the page before."""
        parent = session.kv.keys[page - 1] if page else keys.ROOT_KEY
        tokens = keys.token_bytes(session.tokens[page_start(page) : page_start(page + 1)])
        return cls(parent, tokens, session.salt, digest)


class PeerPages:
    """Requests about pages to peers. Used on the event loop only."""

    def __init__(self, store: Store, peers: dict[str, PeerLink]) -> None:
        self._store = store
        self._peers = peers
        self.room = asyncio.Semaphore(PAGES_AT_ONCE)  # for callers of `put`
        self._expected: dict[tuple[str, int, int], bytearray] = {}  # (peer, hold, index)

    # ------------------------------------------------------------------------------ requests

    async def reserve(self, taken: TakenHold, n_pages: int) -> None:
        """Have room promised for pages at the end of a hold. Raises MoveFailed."""
        asked = peer.ReserveHold(taken.hold, n_pages)
        reply = await self._ask(taken, asked)
        if not isinstance(reply, peer.HoldReserved) or reply.why:
            raise MoveFailed(_why(reply))
        if reply.first != taken.n_pages:
            raise MoveFailed(f"{taken.peer} numbers the pages of the hold in another way")
        taken.n_pages += n_pages

    async def put(
        self, taken: TakenHold, index: int, page: KnownPage, data: PageRef | bytes | bytearray
    ) -> None:
        """Put a page into a promised place: a page of the store, or its bytes. Raises MoveFailed,
        StoreError or BatchEngineError."""
        offer = peer.OfferPage(taken.hold, index, page.parent, page.digest, page.salt)
        reply = await self._ask(taken, offer, page.tokens)
        if not isinstance(reply, peer.PageAnswer) or reply.why:
            raise MoveFailed(_why(reply))
        if not reply.is_wanted:
            return
        if isinstance(data, PageRef):
            data = await asyncio.wrap_future(self._store.pages.read_page(data))
        link = self._link(taken)
        for offset in range(0, len(data), FRAME_BYTES):
            await link.room()
            message = peer.PagePart(taken.hold, index, offset)
            part = bytes(data[offset : offset + FRAME_BYTES])
            if offset + len(part) < len(data):
                link.send(message, part)
                continue
            reply = (await link.request(message, part, timeout_s=STORED_S)).message
            if not isinstance(reply, peer.PageStored) or reply.why:
                raise MoveFailed(_why(reply))

    async def serve(self, taken: TakenHold) -> None:
        """Have the pages of a hold attended to. Raises MoveFailed."""
        reply = await self._ask(taken, peer.ServeHold(taken.hold), seconds=STORED_S)
        if not isinstance(reply, peer.HoldServed) or reply.why:
            raise MoveFailed(_why(reply))
        if reply.n_pages < taken.n_pages:
            raise MoveFailed(f"{taken.peer} serves {reply.n_pages} of {taken.n_pages} pages")

    async def read(self, taken: TakenHold, index: int, page: KnownPage) -> bytearray:
        """The bytes of a page of a hold. Raises MoveFailed, also for other bytes than expected."""
        place = taken.peer, taken.hold, index
        if place in self._expected:
            raise MoveFailed("the page is being read")
        buffer = self._expected[place] = bytearray()
        try:
            asked = peer.ReadPage(taken.hold, index)
            reply = await self._ask(taken, asked, seconds=STORED_S)
        finally:
            del self._expected[place]
        if not isinstance(reply, peer.PageSent) or reply.why:
            raise MoveFailed(_why(reply))
        if len(buffer) != self._store.pages.layout.page_bytes:
            raise MoveFailed(f"{taken.peer} sent {len(buffer)} bytes")
        if keys.payload_digest(buffer) != page.digest:
            raise WrongPage(f"{taken.peer} sent other bytes than it was given")
        return buffer

    async def _ask(
        self,
        taken: TakenHold,
        message: PeerMessage,
        payload: bytes = b"",
        seconds: float = ANSWER_S,
    ) -> PeerMessage:
        return (await self._link(taken).request(message, payload, timeout_s=seconds)).message

    def _link(self, taken: TakenHold) -> PeerLink:
        link = self._peers.get(taken.peer)
        if link is None or link.incarnation != taken.incarnation:
            raise MoveFailed(f"there is no link to this run of {taken.peer}")
        return link

    # ------------------------------------------------------------------------------- parts

    def on_part(self, link: PeerLink, frame: PeerFrame, part: peer.PagePart) -> bool:
        """Take a part of a page that was asked for; False: it was not. Raises Misfit for one
        that does not follow those before."""
        buffer = self._expected.get((link.name, part.hold, part.index))
        if buffer is None:
            return False
        end = len(buffer) + len(frame.payload)
        if part.offset != len(buffer) or end > self._store.pages.layout.page_bytes:
            raise Misfit(f"bytes {part.offset} .. {end} of a page")
        buffer += frame.payload
        return True


class WrongPage(MoveFailed):
    """A peer has other bytes than those it was given."""


def _why(reply: PeerMessage) -> str:
    why = getattr(reply, "why", "")
    return why or f"the answer is {type(reply).__name__}"
