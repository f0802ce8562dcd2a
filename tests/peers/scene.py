"""Peers in one process, with certificates of one authority, and scripted daemons beside them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from batchengine.config import PeersConfig
from batchengine.peers import certificates
from batchengine.peers.channel import Channel, introduce, receive_purpose, recognise
from batchengine.peers.connection import prepare
from batchengine.peers.identity import OWN, Identity, read_identity
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import LocalFacts, Peers
from batchengine.peers.transitions import LinkState
from batchengine.wire.frames import Decoder
from batchengine.wire.peer import (
    PEER_LINK,
    DataReady,
    Heartbeat,
    Hello,
    PeerFrame,
    PeerLoad,
    PeerMessage,
)

FACTS = LocalFacts("pocket", "aa" * 32, "bb" * 32, "cc" * 32)


def certify(folder: Path, *names: str) -> None:
    """Folders FOLDER/NAME with the certificate of each; the first has the authority."""
    first = folder / names[0]
    certificates.create_authority(first, names[0])
    for name in names[1:]:
        certificates.import_bundle(folder / name, certificates.issue_bundle(first, name))


@dataclasses.dataclass(eq=False)
class Node:
    """One daemon's peers."""

    name: str
    folder: Path
    peers: Peers
    task: asyncio.Task[None]
    states: list[tuple[str, LinkState, LinkState]]  # (peer, before, after)
    messages: list[tuple[PeerLink, PeerFrame]]

    def link(self, name: str) -> PeerLink:
        return self.peers.links[name]

    async def add(self, other: str, port: int = 1) -> PeerLink:
        """Write a peer's file and wait until it is noticed."""
        certificates.write_peer(self.folder, other, f"127.0.0.1:{port}")
        await until(lambda: other in self.peers.links)
        return self.link(other)

    async def know(self, other: Node) -> PeerLink:
        return await self.add(other.name, other.peers.port)

    async def until(self, name: str, state: LinkState, seconds: float = 60.0) -> PeerLink:
        await until(lambda: name in self.peers.links and self.link(name).state is state, seconds)
        return self.link(name)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@contextlib.asynccontextmanager
async def node(
    folder: Path,
    name: str,
    facts: LocalFacts = FACTS,
    *,
    port: int = 0,
    incarnation: int = 1,
    tls: bool = True,
    load: PeerLoad | None = None,
) -> AsyncIterator[Node]:
    """Running peers of daemon `name`, whose files are in FOLDER/NAME."""
    config = PeersConfig(
        listen=f"127.0.0.1:{port}", name="" if tls else name, dir=str(folder / name), tls=tls
    )
    peers = Peers(config, facts, lambda _: load or PeerLoad(), incarnation)
    states = list[tuple[str, LinkState, LinkState]]()
    messages = list[tuple[PeerLink, PeerFrame]]()
    peers.subscribe(
        lambda link, frame: messages.append((link, frame)),
        lambda link, before: states.append((link.name, before, link.state)),
    )
    peers.bind()
    await peers.look()
    task = asyncio.create_task(peers.run())
    made = Node(name, folder / name, peers, task, states, messages)
    try:
        yield made
    finally:
        await made.stop()


@contextlib.asynccontextmanager
async def pair(folder: Path, **options: bool) -> AsyncIterator[tuple[Node, Node]]:
    """Two daemons `a` and `b` with an open link; `a` has dialled."""
    if options.get("tls", True):
        certify(folder, "a", "b")
    async with (
        node(folder, "a", incarnation=1, **options) as a,
        node(folder, "b", incarnation=2, **options) as b,
    ):
        await asyncio.gather(a.know(b), b.know(a))
        await a.until("b", LinkState.UP)
        await b.until("a", LinkState.UP)
        yield a, b


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll a condition; the test fails when it does not come."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  a link has no event for every fact
            await asyncio.sleep(0.005)


def identity(folder: Path, name: str) -> Identity:
    return read_identity(folder / name)


def own_pem(folder: Path, name: str) -> Path:
    return folder / name / OWN


@dataclasses.dataclass
class Scripted:
    """A daemon that says what the test wants, on a connection of its own."""

    sock: socket.socket
    channel: Channel
    incarnation: int = 77

    def __post_init__(self) -> None:
        self.decoder = Decoder(PEER_LINK)
        self.frames: list[PeerFrame] = []
        self._take(self.channel.open(b"")[0])

    def _take(self, data: bytes) -> None:
        self.frames += self.decoder.feed(data)

    async def send(self, message: PeerMessage, payload: bytes = b"", **header: int) -> None:
        header.setdefault("incarnation", self.incarnation)
        await self.send_bytes(PEER_LINK.encode(message, payload, **header))

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, self.channel.seal(data))

    async def receive(self) -> PeerFrame | None:
        """The next frame but Heartbeat and DataReady, or None at the end of the connection."""
        while (frame := await self._receive()) is not None:
            if not isinstance(frame.message, Heartbeat | DataReady):
                return frame
        return None

    async def _receive(self) -> PeerFrame | None:
        while not self.frames:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._take(self.channel.open(data)[0])
        return self.frames.pop(0)

    async def greet(
        self, name: str, facts: LocalFacts = FACTS, features: tuple[str, ...] = ()
    ) -> PeerFrame | None:
        """Exchange Hello; returns the other side's first frame."""
        ids = facts.model_id, facts.model_hash, facts.arith_id, facts.repr_id
        await self.send(Hello(name, *ids, features, PeerLoad()))
        return await self.receive()

    def close(self) -> None:
        self.sock.close()


async def dial(who: Identity, peer: str, port: int) -> Scripted:
    """A scripted daemon that connects to `peer`."""
    sock = socket.socket()
    prepare(sock)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return Scripted(sock, await introduce(sock, who, peer))
    except BaseException:
        sock.close()
        raise


class ScriptedListener:
    """A scripted daemon that is connected to."""

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]

    async def accept(self) -> Scripted:
        sock, _ = await asyncio.get_running_loop().sock_accept(self._sock)
        prepare(sock)
        assert await receive_purpose(sock) is None
        return Scripted(sock, (await recognise(sock, self._who))[1])

    def close(self) -> None:
        self._sock.close()
