"""Data links between the real workers of two daemons, and of one with peers that do not behave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchengine.engine.linked import data_link, lane_links
from batchengine.engine.linked.data_link import DataState
from batchengine.engine.linked.lane_links import ASKED_EVERY_S
from batchengine.peers import certificates, listener
from batchengine.peers.channel import DATA
from batchengine.peers.features import DATA_LINKS
from batchengine.peers.transitions import LinkState
from batchengine.wire import data
from batchengine.wire.peer import (
    ONE_WAY,
    REPLY,
    REQUEST,
    BulkReceived,
    DataExpected,
    DataReady,
    DataRefused,
    Heartbeat,
    OpenData,
    PeerLoad,
    PeerMessage,
)
from tests.peers.scene import Scripted, ScriptedListener, certify, dial, identity, until
from tests.peers.workers import Daemon, daemon, two_daemons
from tests.support.engines import Site

FEATURES = (DATA_LINKS,)


@pytest.mark.parametrize("tls", [True, False])
async def test_a_link_is_up_on_both_sides_and_comes_back(site: Site, tls: bool) -> None:
    """After the death of either worker, and after a loss of the control link."""
    async with two_daemons(site, tls=tls) as (a, b):
        assert a.links.row("b").items() >= {"data": "up", "data_why": ""}.items()
        for killed, other in ((a, b), (b, a)) if tls else ((b, a),):
            numbers = killed.links.number(other.node.name), other.links.number(killed.node.name)
            await killed.kill_worker()
            assert killed.links.number(other.node.name) is None
            await other.until_down(killed.node.name, 2.5)
            await killed.start_worker()
            found = await asyncio.gather(
                killed.until_up(other.node.name), other.until_up(killed.node.name)
            )
            assert not set(found) & set(numbers), "no number is used twice"
            assert killed.workers[-1] == killed.lane.incarnation
        a.node.link("b").abort("of the test")
        await asyncio.gather(a.until_down("b", 2.5), b.until_down("a", 2.5))
        await asyncio.gather(a.until_up("b"), b.until_up("a"))
        assert a.changes[-2:] == [("b", None), ("b", a.links.number("b"))]
        assert a.node.peers.connections_refused == b.node.peers.connections_refused == 0


async def test_files_that_come_or_change_give_the_worker_another_identity(site: Site) -> None:
    """A daemon without certificates works without data links; a new certificate is used."""
    certify(site.folder / "made", "b", "c")
    (site.folder / "b").mkdir()
    async with daemon(site, "b") as b:
        assert b.loader.linked_as is None
        for round in range(2):
            pid = b.lane.pid
            if round:
                issued = certificates.issue_bundle(site.folder / "made" / "b", "b2")
                certificates.import_bundle(site.folder / "made" / "b2", issued)
            for file in ("ca.crt", "own.pem"):
                source = site.folder / "made" / ("b2" if round else "b") / file
                (site.folder / "b" / f"{file}.new").write_bytes(source.read_bytes())
                (site.folder / "b" / f"{file}.new").chmod(0o600)
                (site.folder / "b" / f"{file}.new").rename(site.folder / "b" / file)
            await until(lambda: not b.lane.alive)
            death = await b.lane.died()
            assert not death.blames_step
            assert "old certificate" in death.reason
            await b.start_worker()
            assert b.lane.pid != pid
            assert b.loader.linked_as is not None
            assert b.loader.linked_as.name == ("b2" if round else "b")
            b.links._renew_at = 0.0


# ---------------------------------------------------------------------------- hostile peers


class Stranger:
    """A peer of daemon `b` whose control link the test speaks."""

    def __init__(self, b: Daemon, name: str, scripted: Scripted) -> None:
        self.b = b
        self.name = name
        self.scripted = scripted

    @property
    def state(self) -> DataState:
        return self.b.links._links[self.name].machine.state

    @property
    def row(self) -> dict[str, object]:
        return self.b.links.row(self.name)

    async def ask(self, message: PeerMessage | None = None, role: int = REQUEST) -> PeerMessage:
        await self.scripted.send(message or OpenData(), step=5, attempt=role)
        answer = await self.scripted.receive()
        assert answer is not None
        assert (answer.step, answer.attempt) == (5, REPLY)
        return answer.message

    async def token(self) -> bytes:
        await asyncio.sleep(ASKED_EVERY_S)
        answer = await self.ask()
        assert isinstance(answer, DataExpected)
        return answer.token

    async def connect(self, token: bytes) -> socket.socket:
        """A connection that presents the token."""
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", self.b.node.peers.port))
        await loop.sock_sendall(sock, DATA + token)
        return sock

    async def refused(self, token: bytes, why: str) -> None:
        """The token is refused and counted."""
        before = self.b.node.peers.connections_refused
        sock = await self.connect(token)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        sock.close()
        await until(lambda: self.b.node.peers.connections_refused == before + 1)
        assert why in self.b.node.peers.status()["last_refused"]


@contextlib.asynccontextmanager
async def stranger(site: Site) -> AsyncIterator[Stranger]:
    """Daemon `b` with an open control link to `a`, which the test speaks."""
    certify(site.folder, "b", "a", "c")
    certify(site.folder / "other", "b", "a")
    async with daemon(site, "b") as b:
        await b.node.add("a")
        scripted = await dial(identity(site.folder, "a"), "b", b.node.peers.port)
        await scripted.greet("a", features=FEATURES)
        await b.node.until("a", LinkState.UP)
        beating = asyncio.create_task(_beat(scripted))
        try:
            yield Stranger(b, "a", scripted)
        finally:
            beating.cancel()
            scripted.close()


async def _beat(scripted: Scripted) -> None:
    """Keep a control link alive."""
    while True:
        await asyncio.sleep(0.5)
        with contextlib.suppress(OSError):
            await scripted.send(Heartbeat(1, 0, 0, PeerLoad()))


async def handshake(sock: socket.socket, folder: Path, name: str) -> ssl.SSLSocket:
    """Prove a name to the worker behind a connection. Raises OSError."""
    context = identity(folder, name).client
    assert context is not None
    sock.setblocking(True)
    sock.settimeout(60)
    return await asyncio.to_thread(context.wrap_socket, sock, server_hostname="b")


async def test_tokens(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is good for one connection of one peer, soon."""
    async with stranger(site) as a:
        await a.refused(bytes(16), "not known")  # none was made
        first = await a.token()
        await a.refused(bytes(reversed(first)), "not known")
        token = await a.token()
        await a.refused(first, "not known")  # a later one voids it
        # of another peer: the worker wants the name that the token was made for
        for folder, name, why in (
            (site.folder, "c", "certificate is of ['c']"),
            (site.folder / "other", "a", "certificate"),
        ):
            sock = await a.connect(token)
            with contextlib.suppress(OSError):  # the server's certificate is of another authority
                tls = await handshake(sock, folder, name)
                with tls:
                    await until(lambda: a.state is DataState.DOWN)
            sock.close()
            await until(lambda: a.state is DataState.DOWN)
            assert why in str(a.row["data_why"]) or folder != site.folder
            token = await a.token()
        with await handshake(await a.connect(token), site.folder, "a") as tls:
            assert await a.b.until_up("a")
            await a.token()
            with monkeypatch.context() as patched:
                patched.setattr(lane_links, "ASKED_EVERY_S", 60.0)
                assert await a.ask() == DataRefused("it is asked too often")
            assert a.state is DataState.EXPECTED
        token = await a.token()
        with await handshake(await a.connect(token), site.folder, "a") as tls:
            assert await a.b.until_up("a")
            await a.refused(token, "not known")  # replayed
            assert a.state is DataState.UP
            monkeypatch.setattr(listener, "EXPECTED_S", 0.05)
            late = await a.token()  # which ends the link
            assert a.state is DataState.EXPECTED
            assert await asyncio.to_thread(tls.recv, 1) == b""
        await asyncio.sleep(0.06)
        await a.refused(late, "too late")
        assert a.b.node.link("a").state is LinkState.UP
        assert a.b.lane.alive


async def test_a_peer_that_does_not_go_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks and never connects, or connects and never proves who it is."""
    monkeypatch.setitem(data_link.DEADLINES_S, DataState.EXPECTED, 0.3)
    monkeypatch.setitem(data_link.DEADLINES_S, DataState.OPENING, 0.3)
    async with stranger(site) as a:
        token = await a.token()
        await until(lambda: a.state is DataState.DOWN)
        assert a.row["data_why"] == "the peer did not connect within 0.3 s"
        await a.refused(token, "not known")
        monkeypatch.setitem(data_link.DEADLINES_S, DataState.EXPECTED, 60.0)
        sock = await a.connect(await a.token())
        await until(lambda: a.state is DataState.OPENING)
        await until(lambda: a.state is DataState.DOWN)
        assert a.row["data_why"] == "no handshake within 0.3 s"
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b"", "no copy is left open"
        sock.close()
        await a.b.kill_worker()
        await asyncio.sleep(ASKED_EVERY_S)
        assert await a.ask() == DataRefused("the worker of this daemon starts")


async def test_a_message_that_does_not_fit_ends_the_control_link(site: Site) -> None:
    async with stranger(site) as a:
        scripted = a.scripted
        for message in (DataExpected(bytes(16)), DataRefused(""), OpenData(), DataReady()):
            await scripted.send(message, attempt=ONE_WAY)
            assert await scripted.receive() is None
            await until(lambda: a.b.node.link("a").state is LinkState.DOWN)
            assert a.b.node.link("a").why.startswith(
                ("it sent Data", "it asks for", "it waits for")
            )
            scripted.close()
            scripted = await dial(identity(site.folder, "a"), "b", a.b.node.peers.port)
            await scripted.greet("a", features=FEATURES)
            await a.b.node.until("a", LinkState.UP)
        scripted.close()


async def test_a_peer_that_is_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no data links, refuses, answers with another message, accepts and does not go on."""
    monkeypatch.setitem(data_link.DEADLINES_S, DataState.OPENING, 0.3)
    certify(site.folder, "b", "c")
    other = ScriptedListener(identity(site.folder, "c"))
    async with daemon(site, "b") as b:
        await b.node.add("c", other.port)

        async def greeted(features: tuple[str, ...] = FEATURES) -> Scripted:
            scripted = await other.accept()
            await scripted.greet("c", features=features)
            await b.node.until("c", LinkState.UP)
            return scripted

        for features in ((), (f"data {data.VERSION + 1}",)):
            c = await greeted(features)
            await asyncio.sleep(0.3)
            why = "it knows no data links, or those of another version"
            assert b.links.row("c")["data_why"] == why
            c.close()
        c = await greeted()
        asked = await c.receive()
        assert asked is not None
        assert asked.message == OpenData()
        await c.send(DataRefused("not today"), step=asked.step, attempt=REPLY)
        await until(lambda: b.links.row("c")["data_why"] == "it refuses: not today")
        asked = await c.receive()
        assert asked is not None
        await c.send(DataExpected(b"t" * 16), step=asked.step, attempt=REPLY)
        sock, _ = await asyncio.get_running_loop().sock_accept(other._sock)
        assert await asyncio.get_running_loop().sock_recv(sock, 21) == DATA + b"t" * 16
        await until(lambda: b.links.row("c")["data_why"] == "no handshake within 0.3 s")
        sock.close()
        asked = await c.receive()
        assert asked is not None
        await c.send(BulkReceived(1), step=asked.step, attempt=REPLY)
        assert await c.receive() is None
        await until(lambda: "answered OpenData" in b.node.link("c").why)
        c.close()
        c = await greeted()
        await c.receive()
        await c.send(OpenData(), step=1, attempt=REQUEST)  # b dials
        assert await c.receive() is None
        c.close()
    other.close()
