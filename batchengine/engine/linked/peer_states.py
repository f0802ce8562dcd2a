"""Recurrent states to and from peers, so that a turn goes on where its pages end.

A state is the content of its file. The receiver computes its key from the page in front of it, and
keeps it only if its bytes have the checksum that came along, as it does with pages. One state of a
peer is on its way at a time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.engine.lane.loop import LaneLoop, states_saved
from batchengine.engine.linked.holds import Misfit
from batchengine.engine.linked.peer_pages import KnownPage, MoveFailed
from batchengine.engine.tasks import Spawn
from batchengine.peers.connection import FRAME_BYTES
from batchengine.peers.features import STATES
from batchengine.peers.link import PeerLink
from batchengine.wire import peer
from batchengine.wire.peer import PeerFrame, PeerMessage
from kv_store.errors import StoreError
from kv_store.states import STATE_HEAD_BYTES, SavedStates, checksum_of
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

ANSWER_S = 5.0
STORED_S = 30.0  # for a state to be written
TOKEN_BYTES = 4 * PAGE_TOKENS
Over = Callable[[], bool]


class IncomingState(NamedTuple):
    """A state on its way in: what its name and its checksum must be."""

    key: bytes
    parent: bytes
    digest: bytes
    data: bytearray
    size: int


class PeerStates:
    """States for turns at peers, both ways. Used on the event loop only."""

    def __init__(self, store: Store, lanes: Sequence[LaneLoop], spawn: Spawn) -> None:
        """`lanes`: all of this daemon, which save states to the store's files."""
        self._store, self._lanes, self._spawn = store, lanes, spawn
        self._incoming: dict[str, IncomingState] = {}  # by peer
        self._writing: dict[str, asyncio.Future[None]] = {}  # by peer
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)  # of what is sent to a peer

    def __repr__(self) -> str:
        return f"<PeerStates incoming={len(self._incoming)}>"

    # ---------------------------------------------------------------------------- to a peer

    async def put(self, link: PeerLink, page: KnownPage, key: bytes, is_over: Over) -> None:
        """Send a peer the state behind a page, whose file has this key, unless `is_over`. Raises
        MoveFailed, OSError or BatchEngineError."""
        saved = self._store.states
        if saved is None or not link.offers(STATES):
            return
        async with self._turns[link.name]:
            file = await asyncio.to_thread(open, saved.path(key, page.parent), "rb")
            try:
                await self._send(link, page, file, is_over)
            finally:
                file.close()

    async def _send(self, link: PeerLink, page: KnownPage, file: Any, is_over: Over) -> None:
        head = await asyncio.to_thread(file.read, STATE_HEAD_BYTES)
        left = os.fstat(file.fileno()).st_size - STATE_HEAD_BYTES
        offer = peer.OfferState(page.parent, checksum_of(head), page.salt)
        reply = (await link.request(offer, page.tokens, timeout_s=ANSWER_S)).message
        if not isinstance(reply, peer.PageAnswer) or reply.why:
            raise MoveFailed(getattr(reply, "why", "") or f"{link.name} gave a wrong answer")
        while reply.is_wanted and left > 0 and not is_over():
            part = await asyncio.to_thread(file.read, min(left, FRAME_BYTES))
            if not part:
                raise MoveFailed("the file of the state was cut")
            left -= len(part)
            await link.room()
            if left:
                link.send(peer.StateBytes(), part)
                continue
            stored = (await link.request(peer.StateBytes(), part, timeout_s=STORED_S)).message
            if not isinstance(stored, peer.PageStored) or stored.why:
                raise MoveFailed(getattr(stored, "why", "") or f"{link.name} gave a wrong answer")

    # -------------------------------------------------------------------------- from a peer

    def on_message(self, link: PeerLink, frame: PeerFrame) -> bool:
        """Take a message about a state; False if it is none. Raises Misfit."""
        match frame.message:
            case peer.OfferState() as offer:
                if frame.attempt != peer.REQUEST or len(frame.payload) != TOKEN_BYTES:
                    raise Misfit("an offer of a state that is no request, or of no page")
                link.reply(frame, self._offer(link, offer, bytes(frame.payload)))
            case peer.StateBytes():
                self._take(link, frame)
            case _:
                return False
        return True

    def _offer(self, link: PeerLink, offer: peer.OfferState, tokens: bytes) -> PeerMessage:
        self._incoming.pop(link.name, None)  # which the peer has given up
        saved, n_bytes = self._store.states, self._lanes[0].kv.states.state_bytes
        if saved is None or not n_bytes or link.is_of_other_model:
            return peer.PageAnswer(False, "this daemon keeps no states of its model")
        key = self._store.pages.key_of(offer.parent, array("I", tokens), offer.salt)
        if key in saved:
            return peer.PageAnswer(False)
        if link.name in self._writing:
            return peer.PageAnswer(False, "a state is being written")
        if not saved.has_room(n_bytes):
            return peer.PageAnswer(False, "there is no room for a state")
        self._incoming[link.name] = IncomingState(
            key, offer.parent, offer.digest, bytearray(), n_bytes
        )
        return peer.PageAnswer(True)

    def _take(self, link: PeerLink, frame: PeerFrame) -> None:
        state = self._incoming.get(link.name)
        if state is None or not frame.payload:
            raise Misfit("bytes of a state that is not wanted")
        state.data.extend(frame.payload)
        is_last = frame.attempt == peer.REQUEST
        if len(state.data) > state.size or is_last != (len(state.data) == state.size):
            raise Misfit(f"{len(state.data)} bytes of a state of {state.size}")
        if is_last:
            del self._incoming[link.name]
            saved = self._store.states
            assert saved is not None
            written = saved.write(state.key, state.parent, state.digest, state.data)
            self._writing[link.name] = asyncio.wrap_future(written)
            self._spawn(self._keep(link, frame, state, saved), f"state of {link.name}")

    async def _keep(
        self, link: PeerLink, frame: PeerFrame, state: IncomingState, saved: SavedStates
    ) -> None:
        writing, why = self._writing[link.name], ""
        try:
            await writing
            saved.saved(state.key, state.parent, state.size)
        except (StoreError, OSError, ValueError) as error:
            why = str(error)
            log.warning("a state of peer %s is not kept: %s", link.name, why)
        finally:
            del self._writing[link.name]
        if link.state.is_open:
            link.reply(frame, peer.PageStored(why[: peer.TEXT_CHARS_MAX]))

    def peer_down(self, name: str) -> None:
        """Forget what a peer was sending."""
        self._incoming.pop(name, None)

    # --------------------------------------------------------------------------------- both

    async def erase(self, ids: bytes, salt: bytes, kept: int) -> None:
        """Overwrite the states of a timeline behind its first `kept` tokens, those included that
        are being written. Raises OSError."""
        if (saved := self._store.states) is None:
            return
        await asyncio.gather(*self._writing.values(), return_exceptions=True)
        for loop in self._lanes:
            await states_saved(loop)
        tokens = array("I", ids)
        await asyncio.wrap_future(saved.erase(tokens, self._store.pages.repr_id, salt, kept))
