"""Keeps pages for sessions of other daemons: the holder's side of the control link.

Owns the pages that are on their way in, and what the lane's worker was asked to serve. A peer may
ask for anything: sizes, numbers and waits are bounded per peer, a page enters the store only if its
bytes have the digest that came along, and its key is computed here. A message that does not fit
ends the link.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from batchengine.core import PAGE_TOKENS, BatchEngineError
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.holds import (
    HoldName,
    HoldRefused,
    HoldsGiven,
    KeptPage,
    Misfit,
    PageFormat,
    PageFormats,
)
from batchengine.engine.linked.peer_states import PeerStates
from batchengine.engine.tasks import Spawn
from batchengine.peers.connection import FRAME_BYTES
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import PEER_TENANT
from batchengine.session import Session, common_prefix
from batchengine.wire import lane as wire
from batchengine.wire import peer
from batchengine.wire.peer import PeerFrame, PeerMessage
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

REQUESTS_MAX = 64  # of one peer that are not answered
INCOMING_MAX = 4  # pages of one peer on their way in, each in a buffer
READS_MAX = 4  # pages of one peer on their way out
LATE_BYTES_MAX = 64 << 20  # of parts that fit no page any more, between two that do
SERVE_S = 5.0  # for the worker to answer
ENDING_S = 2.0  # for a turn that a peer has ended
ROOM_S = 5.0  # while the store grows
POLL_S = 0.01
RECALL_S = 2.0  # for owners to take back pages whose room sessions of this daemon lack
AHEAD_PAGES = 16  # that a turn will need soon: their room is asked for before it is lacking
SILENCE_S = 30.0  # after which an incoming page, or a promise of room, is given up
TOKEN_BYTES_EACH = 4
TOKEN_BYTES = TOKEN_BYTES_EACH * PAGE_TOKENS
TIMELINE_BYTES_MAX = 4 << 20


class Incoming:
    """A page on its way in."""

    def __init__(self, offer: peer.OfferPage, tokens: bytes, page_format: PageFormat) -> None:
        self.offer = offer
        self.tokens = tokens
        self.format = page_format
        self.data = bytearray(page_format.page_bytes)
        self.n_bytes = 0
        self.touched = time.monotonic()


class HoldServer:
    """The holds of this daemon for others, by messages. Used on the event loop only."""

    def __init__(
        self,
        store: Store,
        loop: LaneLoop,
        holds: HoldsGiven,
        formats: PageFormats,
        lanes: list[LaneLoop],
        spawn: Spawn,
        refuses: Callable[[], str],
        states: PeerStates,
    ) -> None:
        """`loop` is the lane that serves; `lanes` all lanes, whose sessions at rest give pages up.
        `refuses`: why no more pages are taken, or ""."""
        self._states = states
        self.holds = holds
        self.formats = formats
        self._bytes_max = holds.bytes_max
        self._lacks_since: float | None = None  # own turns lack the room of holds
        self._store = store
        self._loop = loop
        self._lanes = lanes
        self._spawn = spawn
        self._refuses = refuses
        self._incoming = defaultdict[str, dict[tuple[int, int], Incoming]](dict)
        self._running = Counter[str]()  # requests of a peer that are not answered
        self._reading = Counter[str]()
        self._late_bytes = Counter[str]()
        self._served: dict[HoldName, int] = {}  # pages that the worker has, by hold
        self._answers = defaultdict[int, deque[asyncio.Future[str]]](deque)  # of the worker

    def __repr__(self) -> str:
        return f"<HoldServer {self.holds!r} served={len(self._served)}>"

    # ------------------------------------------------------------------------------ messages

    def on_message(self, link: PeerLink, frame: PeerFrame) -> bool:
        """Take a message of an owner; False if it is none. Raises Misfit for one that does not fit:
        the link must end."""
        match frame.message:
            case peer.ReserveHold() as asked:
                self._run(link, frame, partial(self._reserve, link, asked))
            case peer.OfferPage() as offer:
                if len(frame.payload) != TOKEN_BYTES:
                    raise Misfit(f"an offer with {len(frame.payload)} bytes of tokens")
                self._run(link, frame, partial(self._offer, link, offer, bytes(frame.payload)))
            case peer.PagePart() as part:
                self._part(link, frame, part)
            case peer.ServeHold() as asked:
                self._run(link, frame, partial(self._serve, _name(link, asked.hold)))
            case peer.ReleaseHold() as asked:
                self._release(_name(link, asked.hold), asked)
            case peer.ReadPage() as asked:
                self._run(link, frame, partial(self._read, link, asked))
            case peer.ErasePages() as asked:
                if len(frame.payload) % TOKEN_BYTES_EACH or len(frame.payload) > TIMELINE_BYTES_MAX:
                    raise Misfit(f"a timeline of {len(frame.payload)} bytes")
                self._run(link, frame, partial(self._erase, link, asked, bytes(frame.payload)))
            case _:
                return False
        return True

    def _ask(self, link: PeerLink, frame: PeerFrame) -> None:
        if frame.attempt != peer.REQUEST:
            raise Misfit(f"{type(frame.message).__name__} is a request")
        if self._running[link.name] >= REQUESTS_MAX:
            raise Misfit(f"{REQUESTS_MAX} requests are not answered")

    def _run(
        self, link: PeerLink, frame: PeerFrame, work: Callable[[], Awaitable[PeerMessage]]
    ) -> None:
        """Answer a request by what `work` returns."""
        self._ask(link, frame)
        self._running[link.name] += 1

        async def answer() -> None:
            try:
                link.reply(frame, await work())
            except (BatchEngineError, StoreError, OSError) as error:  # the link or a page is lost
                log.info("peer %s gets no answer: %s", link.name, error)
            finally:
                self._running[link.name] -= 1

        self._spawn(answer(), f"request of {link.name}")

    async def _reserve(self, link: PeerLink, asked: peer.ReserveHold) -> PeerMessage:
        if why := self._refuses():
            return peer.HoldReserved(0, why)
        name = _name(link, asked.hold)
        try:
            page_format = await self.formats.of(link, self.holds)
            first = self.holds.reserve(name, asked.n_pages, page_format)
        except (HoldRefused, StoreError, OSError) as refusal:
            return peer.HoldReserved(0, _short(str(refusal)))
        self.changed()
        return peer.HoldReserved(first)

    async def _offer(self, link: PeerLink, offer: peer.OfferPage, tokens: bytes) -> PeerMessage:
        name = _name(link, offer.hold)
        if not self.holds.awaits(name, offer.index):
            return peer.PageAnswer(False, "no such place is reserved")
        page_format = self.holds.format(name)
        if (ref := await self._find(page_format, offer, tokens)) is not None:
            if page_format.pool.digest(ref) != offer.digest:
                page_format.unpin(ref)
                log.error("peer %s has another content of a page than this daemon", link.name)
                return peer.PageAnswer(False, "the page has another content here")
            page = _kept(page_format, ref, offer, tokens)
            if self.holds.add(name, offer.index, page):
                return peer.PageAnswer(False)
            return peer.PageAnswer(False, "its place is gone")
        incoming = self._incoming[link.name]
        if len(incoming) >= INCOMING_MAX:
            return peer.PageAnswer(False, f"{INCOMING_MAX} pages are on their way")
        if (offer.hold, offer.index) in incoming or link.incarnation != name.incarnation:
            return peer.PageAnswer(False, "the page is on its way")
        incoming[offer.hold, offer.index] = Incoming(offer, tokens, page_format)
        return peer.PageAnswer(True)

    async def _find(
        self, page_format: PageFormat, offer: peer.OfferPage, tokens: bytes
    ) -> PageRef | None:
        """The page in the store, pinned and readable, if it is there."""
        pages = page_format.pool
        refs = pages.match_prefix(tokens, offer.salt, pin=True, parent=offer.parent)
        if not refs:
            return None
        good = await asyncio.wrap_future(pages.load(refs))
        if good[0] and pages.is_resident(refs[0]):
            return refs[0]
        pages.unpin(refs[0])
        return None

    def _part(self, link: PeerLink, frame: PeerFrame, part: peer.PagePart) -> None:
        incoming = self._incoming[link.name].get((part.hold, part.index))
        n_bytes = len(frame.payload)
        if incoming is None:
            self._late_bytes[link.name] += n_bytes
            if self._late_bytes[link.name] > LATE_BYTES_MAX:
                raise Misfit("parts of pages that are not wanted")
            if frame.attempt == peer.REQUEST:
                link.reply(frame, peer.PageStored("the page is not wanted any more"))
            return
        end, page_bytes = incoming.n_bytes + n_bytes, len(incoming.data)
        is_last = frame.attempt == peer.REQUEST
        if part.offset != incoming.n_bytes or not n_bytes or is_last != (end == page_bytes):
            raise Misfit(f"bytes {part.offset} .. {part.offset + n_bytes} of a page")
        if end > page_bytes:
            raise Misfit("more bytes than a page has")
        self._late_bytes[link.name] = 0
        incoming.data[incoming.n_bytes : end] = frame.payload
        incoming.n_bytes, incoming.touched = end, time.monotonic()
        if is_last:
            self._run(link, frame, partial(self._store_page, link, incoming))

    async def _store_page(self, link: PeerLink, incoming: Incoming) -> PeerMessage:
        offer, name = incoming.offer, _name(link, incoming.offer.hold)
        try:
            ref = await self._import(name, incoming)
        except (StoreError, OSError, ValueError) as error:
            log.warning("a page of peer %s is not kept: %s", link.name, error)
            return peer.PageStored(_short(str(error)))
        finally:
            place, pages = (offer.hold, offer.index), self._incoming[link.name]
            if pages.get(place) is incoming:
                del pages[place]
        if ref is None:
            return peer.PageStored("its place is gone")
        if not incoming.format.pool.is_resident(ref):  # it became invalid since it was stored
            incoming.format.unpin(ref)
            return peer.PageStored("the page is not valid any more")
        page = _kept(incoming.format, ref, offer, incoming.tokens)
        if not self.holds.add(name, offer.index, page):
            return peer.PageStored("its place is gone")
        return peer.PageStored()

    async def _import(self, name: HoldName, incoming: Incoming) -> PageRef | None:
        """Put the page into the store, whose sessions at rest make room for pages of their own
        model; None: its place is gone. Raises StoreError."""
        offer, until = incoming.offer, time.monotonic() + ROOM_S
        pool, is_own = incoming.format.pool, incoming.format is self.formats.own
        if not is_own:
            pool.allocator.try_again()  # another pool may have an extent to give by now
        while self.holds.awaits(name, offer.index):
            found = pool.import_page(
                offer.parent, incoming.tokens, offer.salt, offer.digest, incoming.data,
                origin=name.peer,
            )  # fmt: skip
            if not isinstance(found, NoRoom):
                return await asyncio.wrap_future(found)
            if found is NoRoom.FULL and not (
                is_own and any(lane.kv.slots.evict_oldest(None) for lane in self._lanes)
            ):
                raise StoreError("the store is full of pages that sessions use")
            if time.monotonic() > until:
                raise StoreError("the store does not grow")
            await asyncio.sleep(POLL_S)
        return None

    async def _serve(self, name: HoldName) -> PeerMessage:
        try:
            answered = self._ask_worker(name)
        except HoldRefused as refusal:
            return peer.HoldServed(0, str(refusal))
        n_pages = self._served[name]
        try:
            async with asyncio.timeout(SERVE_S):
                why = await answered
        except TimeoutError:
            why = "the worker does not answer"
        return peer.HoldServed(0 if why else n_pages, _short(why))

    def _ask_worker(self, name: HoldName) -> asyncio.Future[str]:
        """Have the worker serve the pages of a hold that are there; resolves with why not, or "".

        While there is no worker, it waits for the next. Raises HoldRefused.
        """
        refs, page_format = self.holds.pages(name), self.holds.format(name)
        codes = tuple([page_format.pool.slot_code(ref) for ref in refs])
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._served[name] = len(refs)
        self._answers[name.hold].append(answered)
        if self._loop.lane.is_attached:
            self._loop.lane.note(wire.Hold(name.hold, codes, page_format.shape))
        return answered

    def _release(self, name: HoldName, asked: peer.ReleaseHold) -> None:
        if self.holds.trim(name, asked.kept):
            self._trimmed(name)
            self.changed()

    def _trimmed(self, name: HoldName) -> None:
        """Have the worker serve no page of a hold that is not in it any more, and await none."""
        if name not in self.holds:
            self._end([name])
            return
        self._drop_incoming(name)
        served = self._served.get(name)
        if served is not None and served > self.holds.n_complete(name):
            self._ask_worker(name)

    def _drop_incoming(self, name: HoldName) -> None:
        """Take no more bytes of pages that a hold has no place for any more: they would keep others
        of that peer out. One that is complete ends with `_import`."""
        incoming = self._incoming.get(name.peer, {})
        for place, page in list(incoming.items()):
            is_awaited = self.holds.awaits(name, page.offer.index)
            if place[0] == name.hold and not is_awaited and page.n_bytes < len(page.data):
                del incoming[place]

    async def _read(self, link: PeerLink, asked: peer.ReadPage) -> PeerMessage:
        try:
            refs = self.holds.pages(_name(link, asked.hold))
        except HoldRefused as refusal:
            return peer.PageSent(str(refusal))
        if asked.index >= len(refs) or self._reading[link.name] >= READS_MAX:
            return peer.PageSent("the page is not in the hold, or too many are asked for")
        self._reading[link.name] += 1
        try:
            pool = self.holds.format(_name(link, asked.hold)).pool
            data = await asyncio.wrap_future(pool.read_page(refs[asked.index]))
            for offset in range(0, len(data), FRAME_BYTES):
                await link.room()
                part = peer.PagePart(asked.hold, asked.index, offset)
                link.send(part, data[offset : offset + FRAME_BYTES])
            return peer.PageSent()
        except StoreError as error:
            return peer.PageSent(_short(str(error)))
        finally:
            self._reading[link.name] -= 1

    async def _erase(self, link: PeerLink, asked: peer.ErasePages, ids: bytes) -> PeerMessage:
        """Overwrite pages of a session that its owner has dropped; `ids`: its tokens, as in a
        key."""
        page_format = self.formats.known(link)
        if page_format is not self.formats.own:  # sessions here share no pages with that model's
            return await _erased(page_format, ids, asked, asked.kept)
        await _turns_ended(self._lanes, link, asked, ids)
        tenant = asked.salt.decode(errors="replace")
        kept = await asyncio.wrap_future(self._store.ledger.shared_tokens("", tenant, ids))
        for session in _alike(self._lanes, asked, ids):
            kept = max(kept, common_prefix(session.tokens, array("I", ids).tolist()))
        kept = max(kept, asked.kept)
        try:
            await self._states.erase(ids, asked.salt, kept)
        except OSError as error:
            return peer.PagesErased(0, _short(str(error)))
        return await _erased(page_format, ids, asked, kept)

    # ------------------------------------------------------------------------ what else happens

    def on_hold(self, event: wire.HoldChanged) -> None:
        """Take the worker's answer about a hold."""
        answers = self._answers.get(event.hold)
        if not answers:
            return  # a hold of this daemon's own sessions
        answered = answers.popleft()
        if not answers:
            del self._answers[event.hold]
        if not answered.done():
            answered.set_result("" if event.is_served else event.why or "it is not served")

    def peer_up(self, link: PeerLink) -> None:
        """A link to this run of a peer is up; holds of its earlier runs end."""
        self._end(self.holds.peer_up(link.name, link.incarnation))
        self.changed()

    def peer_down(self, name: str) -> None:
        """The link to a peer is lost, and with it all holds of its sessions."""
        self._incoming.pop(name, None)
        self._end(self.holds.peer_down(name))
        self.changed()

    def pages_invalid(self, keys: Iterable[bytes]) -> list[HoldName]:
        """End the holds with a page of these keys, which became invalid; returns them, for their
        owners."""
        ended = self.holds.invalid(keys)
        self._end(ended)
        if ended:
            self.changed()
        return ended

    def worker_began(self) -> None:
        """Have a new worker serve every hold that the last one did."""
        for answers in self._answers.values():
            for answered in answers:
                if not answered.done():
                    answered.set_result("its worker has ended")
        self._answers.clear()
        for name in list(self._served):
            self._ask_worker(name)

    def expire(self, now: float) -> None:
        """Give up pages that do not come, and room that is not used."""
        for incoming in self._incoming.values():
            for place, page in list(incoming.items()):
                if now - page.touched > SILENCE_S and page.n_bytes < len(page.data):
                    del incoming[place]
        for name in self.holds.unused(now - SILENCE_S):
            self._trimmed(name)
            self.changed()

    def recall(self, now: float) -> list[HoldName]:
        """Lower the bound of all holds to what turns of this daemon do not need, so that owners
        take pages back. While a turn lacks room, for RECALL_S, the newest holds end; returns those,
        for their owners."""
        layout, allocator = self._store.pages.layout, self._store.pages.allocator
        for loop in self._lanes:
            loop.seats.pages_barred = allocator.slots_max - allocator.slots_now
        self.formats.return_room(now, self.holds)
        self.changed()
        needed = max([loop.seats.pages_needed(AHEAD_PAGES) for loop in self._lanes])
        lacking = max([loop.seats.pages_lacking for loop in self._lanes])
        room = (allocator.slots_now - needed) * layout.page_bytes + self.formats.other_bytes
        self.holds.bytes_max = max(0, min(self._bytes_max, room))
        if lacking <= 0 or not self.holds.n_pages:
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now
        elif now - self._lacks_since >= RECALL_S:
            self._lacks_since = now  # their room takes a moment to come back
            ended = self.holds.give_up(lacking * layout.page_bytes)
            self._end(ended)
            self.changed()
            return ended
        return []

    def changed(self) -> None:
        """Take what holds pin from what sessions of this daemon may have, and the files of other
        models' pages."""
        own = self.formats.own
        others = self.formats.bytes_taken(time.monotonic(), self.holds)
        n_pages = self.holds.pages_in(own) - (-others // own.page_bytes)
        for loop in self._lanes:
            loop.seats.pages_lent = n_pages

    def _end(self, names: list[HoldName]) -> None:
        for name in names:
            self._drop_incoming(name)
            if self._served.pop(name, None) is not None and self._loop.lane.is_attached:
                self._loop.lane.note(wire.Release(name.hold))


def _name(link: PeerLink, hold: int) -> HoldName:
    return HoldName(link.name, link.incarnation, hold)


def _kept(page_format: PageFormat, ref: PageRef, offer: peer.OfferPage, tokens: bytes) -> KeptPage:
    return KeptPage(ref, page_format.pool.key_of(offer.parent, tokens, offer.salt), page_format)


async def _turns_ended(
    lanes: Iterable[LaneLoop], link: PeerLink, asked: peer.ErasePages, ids: bytes
) -> None:
    """Return once turns of a peer with this timeline have ended, or after ENDING_S: the peer has
    ended that of the session that it has dropped, and may have others."""
    until, tenant = time.monotonic() + ENDING_S, f"{PEER_TENANT}{link.name}"
    while any(session.tenant == tenant for session in _alike(lanes, asked, ids)):
        if time.monotonic() > until:
            return
        await asyncio.sleep(POLL_S)


def _alike(lanes: Iterable[LaneLoop], asked: peer.ErasePages, ids: bytes) -> list[Session]:
    """Sessions of this daemon that begin with the first page of a timeline."""
    return [
        session
        for loop in lanes
        for session in loop.sessions.values()
        if session.salt == asked.salt
        and keys.token_bytes(session.tokens[:PAGE_TOKENS]) == ids[:TOKEN_BYTES]
    ]


async def _erased(
    page_format: PageFormat, ids: bytes, asked: peer.ErasePages, kept: int
) -> PeerMessage:
    """Overwrite the pages of a timeline after its first `kept` tokens."""
    try:
        erasing = page_format.pool.erase(ids, asked.salt, kept)
        return peer.PagesErased(await asyncio.wrap_future(erasing))
    except (StoreError, OSError) as error:
        return peer.PagesErased(0, _short(str(error)))


def _short(text: str) -> str:
    return text[: peer.TEXT_CHARS_MAX]
