"""The peers of this daemon: one link each, in step with the configuration and the folder.

Owns the links, the listener and the tasks that dial. Everything runs on the event loop; one timer
serves all links. An error of one peer, or of one file, ends nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchengine import errors
from batchengine.config import PeerConfig, PeersConfig
from batchengine.config.peers import split_address
from batchengine.core import BatchEngineError
from batchengine.peers.channel import Channel
from batchengine.peers.connection import PeerConnection, start
from batchengine.peers.dialling import Dialler
from batchengine.peers.features import FEATURES
from batchengine.peers.folder import FolderContent, PeersFolder
from batchengine.peers.identity import Identity
from batchengine.peers.link import OnMessage, OnState, PeerLink
from batchengine.peers.listener import PeerListener
from batchengine.peers.transitions import TICK_S, LinkState
from batchengine.wire.peer import (
    PEER_LINK,
    TEXT_CHARS_MAX,
    Declined,
    Hello,
    KvFormat,
    PeerFrame,
    PeerLoad,
)

log = logging.getLogger("batchengine.peers")

HEARTBEAT_TICKS = 2  # ticks from one Heartbeat to the next
WATCH_S = 1.0  # from one look at the folder to the next
PEER_TENANT = "peer:"  # and its name: tenant of its turns that run here; no API key is named so


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """What this daemon computes; ids are hex. `kv`: for peers that serve another model."""

    model_id: str
    model_hash: str
    arith_id: str
    repr_id: str
    kv: KvFormat | None = None


class Peers:
    """Links to all peers. Use: `bind`, `look`, `run` as a task; `links`, `subscribe`; `close`."""

    def __init__(
        self,
        config: PeersConfig,
        facts: LocalFacts,
        load: Callable[[str], PeerLoad],
        incarnation: int,
    ) -> None:
        """`load`: of this daemon, as the named peer learns it. `incarnation`: a random number below
        2**64 of this run. It seeds the retry times too."""
        self.links: dict[str, PeerLink] = {}
        self.incarnation = incarnation
        self._config = config
        self._facts = facts
        self._load = load
        self._identity: Identity | None = None
        self._trouble = ""  # until the folder was read
        self._broken: dict[str, str] = {}
        self._folder = PeersFolder(config)
        self._listener = PeerListener(lambda: self._identity, self._on_known)
        self._dialler = Dialler()
        self._dialling: dict[PeerLink, asyncio.Task[None]] = {}
        self._rng = random.Random(incarnation)
        self._subscribers: list[tuple[OnMessage, OnState]] = []

    def __repr__(self) -> str:
        return f"<Peers {list(self.links.values())}>"

    @property
    def is_on(self) -> bool:
        """Whether the configuration has an address to listen on."""
        return bool(self._config.listen)

    @property
    def trouble(self) -> str:
        """Why there can be no link, though the configuration asks for some; "" = there can."""
        is_missed = self.is_on and bool(self._trouble)
        return f"no link to other daemons: {self._trouble}" if is_missed else ""

    @property
    def port(self) -> int:
        """The port that is listened on; 0 = none."""
        return self._listener.port

    @property
    def identity(self) -> Identity | None:
        """Who this daemon is now; None: it has no usable certificate."""
        return self._identity

    def subscribe(self, on_message: OnMessage, on_state: OnState) -> None:
        """Report every message of another kind than this package's own, and every change of
        state, of all links, also of those that are added later.

        An error of `on_message` ends that link. `on_state(link, before)`: what depends on the
        link has ended if `before.is_open` and the link is not open now.
        """
        self._subscribers.append((on_message, on_state))

    def bind(self) -> None:
        """Open the listening socket. Raises CANNOT_LISTEN."""
        address = split_address(self._config.listen)
        if address is not None:
            self._listener.bind(*address)

    async def run(self) -> None:
        """Keep the links until cancelled. Returns at once if links are off."""
        if not self.is_on:
            return
        accepting = asyncio.create_task(self._listener.run(), name="peer listener")
        watching = asyncio.create_task(self._watch(), name="peers folder")
        try:
            ticks = 0
            while True:
                self._tick(with_heartbeat=ticks % HEARTBEAT_TICKS == 0)
                ticks += 1
                await asyncio.sleep(TICK_S)
        finally:
            accepting.cancel()
            watching.cancel()
            self.close()
            await asyncio.gather(accepting, watching, return_exceptions=True)

    def close(self) -> None:
        """Close the listening socket and every link."""
        self._listener.close()
        self._dialler.close()
        for name in list(self.links):
            self._remove(name, "this daemon stops")

    # ------------------------------------------------------------------------------- reports

    def status(self) -> dict[str, Any]:
        """This daemon as its peers see it, and one row per link and per broken file.

        Raises PEERS_OFF.
        """
        if not self.is_on:
            raise errors.PEERS_OFF()
        rows = [link.row() for _, link in sorted(self.links.items())]
        rows += [
            {"name": file.removesuffix(".toml"), "state": "broken", "why": why}
            for file, why in sorted(self._broken.items())
        ]
        return {
            "name": self._identity.name if self._identity else "",
            "listen": self._config.listen,
            "port": self.port,
            "folder": self._config.dir,
            "tls": self._config.tls,
            "trouble": self._trouble,
            "incarnation": f"{self.incarnation:016x}",
            "repr_id": self._facts.repr_id,
            "arith_id": self._facts.arith_id,
            "connections_refused": self._listener.refused,
            "last_refused": self._listener.last_refused,
            "peers": rows,
        }

    @property
    def connections_refused(self) -> int:
        """Connections to the peer port that ended before the other side was known."""
        return self._listener.refused

    async def measure(self) -> None:
        """Measure the bandwidth of every link that is up, one after the other.

        A link that is lost meanwhile keeps no measurement.
        """
        for link in list(self.links.values()):
            if link.state is LinkState.UP:
                link.bandwidth = None
                with contextlib.suppress(BatchEngineError):
                    await link.measure_bandwidth()

    # ---------------------------------------------------------------------------- data links

    def expect_data(self, name: str, take: Callable[[socket.socket], None]) -> bytes:
        """The token with which peer `name` may connect once for a data link.

        `take` gets the socket, which is closed after the call.
        """
        return self._listener.expect(name, take)

    def forget_data(self, name: str) -> None:
        """Expect no data link of peer `name` any more."""
        self._listener.forget(name)

    async def connect_data(self, name: str, token: bytes) -> socket.socket:
        """A connection to peer `name` for a data link, to be closed. Raises OSError."""
        address = split_address(self.links[name].peer.address) if name in self.links else None
        if address is None:
            raise ConnectionAbortedError("it is no peer any more")
        return await self._dialler.connect_data(*address, token)

    # --------------------------------------------------------------------------------- links

    def _tick(self, *, with_heartbeat: bool) -> None:
        now = time.monotonic()
        for name, link in list(self.links.items()):
            link.tick(now, self._load(name) if with_heartbeat else None)

    async def _watch(self) -> None:
        """Look at the folder every WATCH_S until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self.look()

    async def look(self) -> None:
        """Look at the folder, in a thread since its disk may be slow. Called before `run`: then it
        is known from the start which peers there are."""
        try:
            content = await asyncio.to_thread(self._folder.changed)
            if content is not None:
                self._apply(content)
        except Exception:
            log.exception("the folder of peers cannot be read")

    def _apply(self, content: FolderContent) -> None:
        """Bring the links in step with what the folder says now."""
        for file, why in content.broken.items():
            if self._broken.get(file) != why:
                log.warning("peer file %s is not used: %s", file, why)
        if content.trouble and content.trouble != self._trouble:
            log.warning("no link to other daemons: %s", content.trouble)
        is_other = _name(self._identity) != _name(content.identity)
        self._identity, self._trouble = content.identity, content.trouble
        self._broken = content.broken
        wanted = {} if content.identity is None else content.peers
        for name, link in list(self.links.items()):
            if is_other or wanted.get(name) != link.peer:
                self._remove(name, "it was removed from the configuration")
        for name, peer in wanted.items():
            if name not in self.links:
                self.links[name] = self._new_link(peer)

    def _new_link(self, peer: PeerConfig) -> PeerLink:
        log.info("peer %s at %s", peer.name, peer.address)
        return PeerLink(
            peer,
            functools.partial(self._hello, peer.name),
            self.incarnation,
            self._dial,
            self._on_message,
            self._on_state,
            random.Random(self._rng.random()),
        )

    def _remove(self, name: str, why: str) -> None:
        link = self.links.pop(name)
        if (task := self._dialling.pop(link, None)) is not None:
            task.cancel()
        link.close(why)

    def _hello(self, to: str) -> Hello:
        facts = self._facts
        return Hello(
            _name(self._identity),
            facts.model_id[:TEXT_CHARS_MAX],
            facts.model_hash,
            facts.arith_id,
            facts.repr_id,
            FEATURES,
            self._load(to),
            facts.kv,
        )

    def _on_message(self, link: PeerLink, frame: PeerFrame) -> None:
        for on_message, _ in self._subscribers:
            on_message(link, frame)

    def _on_state(self, link: PeerLink, before: LinkState) -> None:
        for _, on_state in self._subscribers:
            try:
                on_state(link, before)
            except Exception:  # of one subscriber: the timer of all links may be the caller
                log.exception("a change of the link to %s was not taken", link.name)

    # --------------------------------------------------------------------------- connections

    def _dial(self, link: PeerLink) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(link))
        self._dialling[link] = task
        task.add_done_callback(lambda _: self._dialling.pop(link, None))

    async def _connect(self, link: PeerLink) -> None:
        """One attempt to connect, which `link` hears the end of."""
        address = split_address(link.peer.address)
        if self._identity is None or address is None:
            return link.lost(None, OSError("this daemon has no certificate"))
        try:
            sock, channel = await self._dialler.connect(self._identity, link.name, *address)
            connection = PeerConnection(channel, link.connected, link.on_frame, link.lost)
            await start(sock, connection)
        except OSError as error:
            return link.lost(None, error)
        except Exception as error:
            log.exception("cannot connect to peer %s", link.name)
            return link.lost(None, error)
        return None

    async def _on_known(self, name: str, sock: socket.socket, channel: Channel) -> None:
        """Give the connection that peer `name` has made to its link, or say why not."""

        def on_start(connection: PeerConnection) -> None:
            why = self._objection(name)
            if not why:
                return self.links[name].connected(connection)
            log.info("a connection of %s is refused: %s", name, why)
            declined = PEER_LINK.encode(Declined(why), incarnation=self.incarnation)
            connection.send(declined)
            connection.close()
            return None

        def on_frame(connection: PeerConnection, frame: PeerFrame) -> None:
            if (link := self.links.get(name)) is not None:
                link.on_frame(connection, frame)

        def on_end(connection: PeerConnection, error: Exception | None) -> None:
            if (link := self.links.get(name)) is not None:
                link.lost(connection, error)

        await start(sock, PeerConnection(channel, on_start, on_frame, on_end))

    def _objection(self, name: str) -> str:
        """Why a connection that daemon `name` has made is not used; "" = it is."""
        link, own = self.links.get(name), _name(self._identity)
        if link is None:
            return f"{own} has no peer {name}: add it there, `batchengine peers add {name} ADDRESS`"
        if link.dials:
            return f"{own} connects to {name}, whose name sorts behind, and not the other way"
        return ""


def _name(identity: Identity | None) -> str:
    return "" if identity is None else identity.name
