"""Peers that lie on the control link: they lose their link or are refused, and no token changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from batchengine.engine.linked import holds_server, peer_pages, routes
from batchengine.peers.identity import Identity
from batchengine.peers.link import PeerLink
from batchengine.policy.linked.routes import PageMove
from batchengine.wire import peer
from batchengine.wire.peer import REPLY, REQUEST, PeerMessage
from kv_store import keys
from tests.engine.linked.daemons import Daemon, daemon, daemons
from tests.peers.scene import Scripted, dial
from tests.support.engines import Reference, Site, read, request, unread, until, words

HOLD = 99
SALT = b"tenant"


class Owner:
    """A scripted daemon `a`, which has pages held by a real one."""

    def __init__(self, holder: Daemon, scripted: Scripted) -> None:
        self.holder = holder
        self.scripted = scripted
        self.page = bytes(range(256)) * (holder.page_bytes() // 256)
        self.tokens = keys.token_bytes(words(1, 256))

    async def ask(self, message: PeerMessage, payload: bytes = b"") -> PeerMessage:
        await self.scripted.send(message, payload, step=7, attempt=REQUEST)
        frame = await self.scripted.receive()
        assert frame is not None, "the link has ended"
        assert (frame.step, frame.attempt) == (7, REPLY)
        return frame.message

    async def offer(self, index: int = 0, digest: bytes | None = None) -> PeerMessage:
        digest = digest or keys.payload_digest(self.page)
        return await self.ask(peer.OfferPage(HOLD, index, keys.ROOT_KEY, digest, SALT), self.tokens)

    async def send_page(self, data: bytes, index: int = 0) -> PeerMessage:
        part = 200_000
        for offset in range(0, len(data) - part, part):
            await self.scripted.send(
                peer.PagePart(HOLD, index, offset), data[offset : offset + part]
            )
        offset = (len(data) - 1) // part * part
        return await self.ask(peer.PagePart(HOLD, index, offset), data[offset:])

    async def read_page(self, index: int) -> bytes:
        """A page that the holder sends back."""
        await self.scripted.send(peer.ReadPage(HOLD, index), step=9, attempt=REQUEST)
        data = b""
        while (frame := await self.scripted.receive()) is not None:
            if isinstance(frame.message, peer.PageSent):
                assert frame.message == peer.PageSent()
                break
            assert frame.message == peer.PagePart(HOLD, index, len(data))
            data += frame.payload
        return data

    async def is_cut(self) -> bool:
        """Whether the other side ends the link."""
        async with asyncio.timeout(60):
            while await self.scripted.receive() is not None:
                pass
        return True


@contextlib.asynccontextmanager
async def owner_of(holder: Daemon) -> AsyncIterator[Owner]:
    """The scripted daemon `a` with a new link."""
    peers = holder.engine.running.peers
    await until(lambda: not peers.links["a"].state.is_open)
    scripted = await dial(Identity("a", None, None), holder.name, peers.port)
    await scripted.greet("a", peers._facts, ("holds",))
    await until(lambda: peers.links["a"].state.is_open)
    with contextlib.closing(scripted):
        yield Owner(holder, scripted)


async def test_an_owner_that_lies(site: Site) -> None:
    async with daemon(site, "b", 16) as b:
        b.knows_at("a", 1)
        await until(lambda: "a" in b.engine.running.peers.links)
        async with owner_of(b) as a:
            answer = await a.ask(peer.ReserveHold(HOLD, 1000))
            assert isinstance(answer, peer.HoldReserved)
            assert "room" in answer.why
            assert await a.offer() == peer.PageAnswer(False, "no such place is reserved")
            assert await a.ask(peer.ReserveHold(HOLD, 4)) == peer.HoldReserved(0)
            assert await a.offer(digest=bytes(16)) == peer.PageAnswer(True)
            answer = await a.send_page(a.page)
            assert isinstance(answer, peer.PageStored)
            assert "digest" in answer.why
            assert await a.ask(peer.ServeHold(HOLD)) == peer.HoldServed(0)
            answer = await a.ask(peer.ServeHold(HOLD + 1))
            assert isinstance(answer, peer.HoldServed)
            assert "no hold" in answer.why
            assert await a.offer() == peer.PageAnswer(True)
            assert await a.send_page(a.page) == peer.PageStored()
            assert await a.offer(1) == peer.PageAnswer(False)  # it has the page
            answer = await a.offer(2, bytes(16))
            assert isinstance(answer, peer.PageAnswer)
            assert "another content" in answer.why
            assert await a.ask(peer.ServeHold(HOLD)) == peer.HoldServed(2)
            assert b.linked.given.n_pages == 3  # of two places with one page, and two promised
            sent = await a.read_page(0)
            assert sent == a.page
            answer = await a.ask(peer.ReadPage(HOLD, 3))
            assert isinstance(answer, peer.PageSent)
            assert answer.why
            no_tokens = b"\xff" * 4 * 300  # above every vocabulary
            assert await a.ask(peer.ErasePages(SALT, 0), no_tokens) == peer.PagesErased(0)
        await until(lambda: not b.linked.given.n_pages)
        for message, payload, attempt in (
            (peer.PagePart(HOLD, 0, 5), b"x", 0),  # does not begin at the beginning
            (peer.PagePart(HOLD, 0, 0), bytes(b.page_bytes() + 1), REQUEST),
            (peer.PagePart(HOLD, 0, 0), b"x", REQUEST),  # ends too soon
            (peer.PagePart(HOLD, 0, 0), b"", 0),
            (peer.PageStored(), b"", 0),  # nothing was sent
            (peer.HoldServed(4), b"", 0),
            (peer.ReserveHold(HOLD, 1), b"", 0),  # no request
            (peer.OfferPage(HOLD, 1, bytes(32), bytes(16), b""), b"few tokens", REQUEST),
        ):
            async with owner_of(b) as a:
                assert await a.ask(peer.ReserveHold(HOLD, 4)) == peer.HoldReserved(0)
                assert await a.offer() in (peer.PageAnswer(True), peer.PageAnswer(False))
                a.tokens = keys.token_bytes(words(2, 256))
                assert await a.offer(1) == peer.PageAnswer(True)
                if isinstance(message, peer.PagePart):
                    message = peer.PagePart(HOLD, 1, message.offset)
                await a.scripted.send(message, payload, step=8, attempt=attempt)
                assert await a.is_cut(), message
        await until(lambda: not b.linked.given.n_pages)
        b.linked.given.check()
        assert b.engine.running.store.stat()["pages_pinned"] == 0


async def test_pages_that_are_given_up_halfway_keep_no_others_out(site: Site) -> None:
    """The buffers of a peer's pages are free again once it releases their hold."""
    async with daemon(site, "b", 24) as b:
        b.knows_at("a", 1)
        await until(lambda: "a" in b.engine.running.peers.links)
        async with owner_of(b) as a:
            assert await a.ask(peer.ReserveHold(HOLD, 8)) == peer.HoldReserved(0)
            for index in range(holds_server.INCOMING_MAX):
                a.tokens = keys.token_bytes(words(index, 256))
                assert await a.offer(index) == peer.PageAnswer(True)
                await a.scripted.send(peer.PagePart(HOLD, index, 0), a.page[:1000])
            a.tokens = keys.token_bytes(words(9, 256))
            answer = await a.offer(7)
            assert isinstance(answer, peer.PageAnswer)
            assert "on their way" in answer.why
            await a.scripted.send(peer.ReleaseHold(HOLD, 3))
            assert await a.ask(peer.ReserveHold(HOLD, 1)) == peer.HoldReserved(3)
            assert await a.offer(3) == peer.PageAnswer(True)
            assert await a.send_page(a.page, 3) == peer.PageStored()
            await a.scripted.send(peer.ReleaseHold(HOLD, 0))
            assert await a.ask(peer.ReserveHold(HOLD, 4)) == peer.HoldReserved(0)
            for index in range(holds_server.INCOMING_MAX):
                a.tokens = keys.token_bytes(words(20 + index, 256))
                assert await a.offer(index) == peer.PageAnswer(True)
        await until(lambda: not b.linked.given.n_pages)
        b.linked.given.check()


Lie = Callable[[pytest.MonkeyPatch, Daemon], None]


def says_that_it_serves(patch: pytest.MonkeyPatch, liar: Daemon) -> None:
    """The worker is never asked to serve the pages."""

    def ask_worker(name: object) -> asyncio.Future[str]:
        server = liar.linked._server
        server._served[name] = len(server.holds.pages(name))  # type: ignore[index, arg-type]
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result("")
        return done

    patch.setattr(liar.linked._server, "_ask_worker", ask_worker)
    patch.setattr(routes, "UNSERVED_S", 0.5)


def never_answers(patch: pytest.MonkeyPatch, liar: Daemon) -> None:
    """Offers of pages are taken and forgotten."""

    async def offer(*given: object) -> PeerMessage:
        await asyncio.sleep(1000)
        raise AssertionError

    patch.setattr(liar.linked._server, "_offer", offer)
    patch.setattr(peer_pages, "ANSWER_S", 0.2)


def has_everything(patch: pytest.MonkeyPatch, liar: Daemon) -> None:
    """No page is wanted, none is there."""

    async def offer(*given: object) -> PeerMessage:
        return peer.PageAnswer(False)

    patch.setattr(liar.linked._server, "_offer", offer)


def promises_other_places(patch: pytest.MonkeyPatch, liar: Daemon) -> None:
    """The first place of every promise is another one than the owner has in mind."""
    patch.setattr(liar.linked._server, "_reserve", lambda *given: peer.HoldReserved(4))


def sends_other_bytes(patch: pytest.MonkeyPatch, liar: Daemon) -> None:
    """A page that is read back is all zeros."""

    async def read_page(link: PeerLink, asked: peer.ReadPage) -> PeerMessage:
        size = 1 << 16
        for offset in range(0, liar.page_bytes(), size):
            data = bytes(min(size, liar.page_bytes() - offset))
            link.send(peer.PagePart(asked.hold, asked.index, offset), data)
        return peer.PageSent()

    patch.setattr(liar.linked._server, "_read", read_page)


LIES: tuple[Lie, ...] = (
    says_that_it_serves,
    never_answers,
    has_everything,
    promises_other_places,
)


async def test_a_holder_that_lies(site: Site, reference: Reference) -> None:
    """Whatever it says, the session goes on without it, or with it once it is honest."""
    async with daemons(site, "ab", 16) as (a, b):
        ids = words(5, 256 * 14)
        for number, lie in enumerate(LIES):
            with pytest.MonkeyPatch.context() as patch:
                lie(patch, b)
                a.linked.taken._avoided.clear()
                answer = await read(a.engine.submit(request(ids, 20, session=f"s{number}")))
                assert answer.error is None
                assert answer.tokens == reference.tokens(ids, 20)
                more = [*ids, *answer.tokens, 7]  # also if the pages went there at its last token
                answer = await read(a.engine.submit(request(more, 3, session=f"s{number}")))
                assert answer.tokens == reference.tokens(more, 3)
                async with asyncio.timeout(60):
                    while a.linked.taken.n_pages:  # they went there at its last step
                        more = [*more, *answer.tokens, 7]
                        asked = request(more, 3, session=f"s{number}")
                        answer = await read(a.engine.submit(asked))
                        assert answer.tokens == reference.tokens(more, 3)
                await a.engine.drop("", f"s{number}")
                await until(lambda: not a.linked.keeper.moves)


async def test_a_holder_that_sends_other_bytes_back(site: Site, reference: Reference) -> None:
    """Its pages are computed again, and it gets no others."""
    async with daemons(site, "ab", 22) as (a, b):
        ids = words(6, 256 * 18 + 128)
        generation = await unread(a.engine, request(ids, 520, session="s"), 5)
        keeper = a.linked.keeper
        session = a.state.sessions["", "s"]
        keeper.want(session, 10)
        await until(lambda: session.kv.n_held >= 8 and not keeper.moves)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keeper, "look", lambda: None)  # it begins no moves of its own
            back = PageMove("b", "", session.kv.n_held - 4, 4)
            assert await keeper._mover.move(session, back)
            assert session.kv.n_held == back.first
            sends_other_bytes(patch, b)
            back = PageMove("b", "", session.kv.n_held - 4, 4)
            assert not await keeper._mover.move(session, back)
        keeper.want(session, None)
        assert a.linked.taken.is_avoided("b")
        answer = await read(generation)
        assert answer.error is None
        assert answer.tokens == reference.tokens(ids, 520)
        assert not a.linked.taken.n_pages
