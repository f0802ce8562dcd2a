"""A network between simulated daemons: connections of ordered bytes, with delays and faults.

What TCP keeps is kept: inside a connection bytes are neither lost, doubled nor reordered. A
direction between two hosts may carry nothing for a while: its bytes wait, and arrive late, or the
sender gives up. A connection may be reset, on both sides or, as seen from one of them, not at all.
Owns every connection; knows nothing of what it carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from types import SimpleNamespace

from batchengine.peers import dialling, listener
from tests.simulation.clock import OWNER, VirtualLoop
from tests.simulation.seams import Tape, replaced

WINDOW_BYTES = 256 << 10  # on their way, beyond which a sender keeps what it has
USER_TIMEOUT_S = 10.0  # of bytes that do not arrive, as `peers.connection.prepare` sets it
BYTES_PER_S = 200e6
EOF, RESET = "eof", "reset"


class Network:
    """All hosts and connections of one seed. Hosts are names."""

    def __init__(self, loop: VirtualLoop, tape: Tape, note: Callable[..., None]) -> None:
        self.loop = loop
        self.note = note
        self.listeners: dict[int, SimSocket] = {}
        self.ends: list[End] = []  # that are open
        self.delay_s = 0.0002  # of one direction
        self.lies: dict[str, Callable[[bytes], list[bytes]]] = {}  # by host: what it sends instead
        self._rng = tape("network")
        self._cuts: dict[tuple[str, str], int] = {}  # directions that carry nothing
        self._blocked: list[End] = []

    # ---------------------------------------------------------------------------- for faults

    def cut(self, source: str, target: str) -> None:
        """Carry nothing in this direction until it is healed as often."""
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """Undo one cut; bytes that wait arrive when they are sent again."""
        self._cuts[source, target] -= 1
        if not self._cuts[source, target]:
            del self._cuts[source, target]
            self._again()

    def heal_all(self) -> None:
        """Undo every cut."""
        self._cuts.clear()
        self._again()

    def reset(self, end: End) -> None:
        """Reset a connection, as a device between the two hosts does."""
        for one in (end, end.other):
            one.die(ConnectionResetError(errno.ECONNRESET, "simulated reset"))

    def vanish(self, end: End) -> None:
        """End a connection at one end; the other end hears nothing."""
        end.die(ConnectionResetError(errno.ECONNRESET, "simulated reset"))

    def kill(self, host: str) -> None:
        """The engine of a host has died: its ends are closed by its system."""
        for sock in list(self.listeners.values()):
            if sock.host == host:
                sock.close()
        for end in [end for end in self.ends if end.host == host and not end.is_workers]:
            end.kill()

    # --------------------------------------------------------------------------- for sockets

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts

    def travel_s(self) -> float:
        """How long bytes take from one host to another."""
        return self.delay_s * self._rng.uniform(0.5, 2.0)

    def connection(self, dialler: SimSocket, accepting: SimSocket) -> tuple[End, End]:
        """The two ends of a new connection."""
        ours, theirs = End(self, dialler), End(self, accepting)
        ours.other, theirs.other = theirs, ours
        self.ends += [ours, theirs]
        return ours, theirs

    def block(self, end: End) -> None:
        """Call `arrive` of this end when the next cut is healed."""
        self._blocked.append(end)

    def _again(self) -> None:
        blocked, self._blocked = self._blocked, []
        for end in blocked:
            later_s = self._rng.uniform(0.0, 0.4)  # until the sender tries again
            self.loop.call_later(later_s, end.arrive, context=end.context)

    def parts(self, data: bytes) -> list[bytes]:
        """How the bytes of one write arrive: whole, or in two parts."""
        at = self._rng.randrange(len(data)) if self._rng.random() < 0.1 else 0
        return [part for part in (data[:at], data[at:]) if part]


class SimSocket:
    """A socket of the code that makes it: it listens, or has one end of a connection."""

    def __init__(self, network: Network, host: str, context: Context) -> None:
        self.network = network
        self.host = host
        self.context = context
        self.end: End | None = None
        self.keepalive_s = 0  # 0 = an end that is gone is never noticed by an idle one
        self.port = 0
        self._waiting: deque[End] = deque()
        self._accepting: asyncio.Future[None] | None = None

    def __enter__(self) -> SimSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, level: int, name: int, value: int) -> None:
        if (level, name) == (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE):
            self.keepalive_s = value
            if self.end is not None:
                self.end.keepalive_s = value

    def bind(self, address: tuple[str, int]) -> None:
        self.port = address[1]
        if self.port in self.network.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    def listen(self, backlog: int) -> None:
        self.network.listeners[self.port] = self

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def close(self) -> None:
        if self.port and self.network.listeners.pop(self.port, None) is not None:
            for end in self._waiting:
                end.abort()
        if self.end is not None:
            self.end.close()
            self.end = None

    def detach(self) -> int:
        self.end = None
        return -1

    def take(self) -> End:
        """The end of the connection; closing this socket leaves it open from now on."""
        end, self.end = self.end, None
        if end is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return end

    async def connect(self, address: tuple[str, int]) -> None:
        network, loop = self.network, self.network.loop
        await asyncio.sleep(network.travel_s())
        found = network.listeners.get(address[1])
        while found is not None and (
            network.is_cut(self.host, found.host) or network.is_cut(found.host, self.host)
        ):
            await asyncio.sleep(0.2)  # the first packet is sent again
            found = network.listeners.get(address[1])
        await asyncio.sleep(network.travel_s())
        if found is None or network.listeners.get(address[1]) is not found:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        self.end, theirs = network.connection(self, found)
        found._waiting.append(theirs)
        if found._accepting is not None and not found._accepting.done():
            loop.call_soon(_set, found._accepting, context=found.context)

    async def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        while not self._waiting:
            self._accepting = self.network.loop.create_future()
            await self._accepting
        sock = SimSocket(self.network, self.host, copy_context())
        sock.end = self._waiting.popleft()
        return sock, ("127.0.0.1", 0)

    async def sendall(self, data: bytes) -> None:
        self._open_end().write(data)
        await asyncio.sleep(0)

    async def recv(self, n_bytes: int) -> bytes:
        return await self._open_end().receive(n_bytes)

    async def attach(self, protocol: asyncio.Protocol) -> tuple[End, asyncio.Protocol]:
        end = self._open_end()
        end.context = copy_context()
        await asyncio.sleep(0)
        end.begin(protocol)
        await asyncio.sleep(0)
        return end, protocol

    def _open_end(self) -> End:
        if self.end is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.end


class End(asyncio.Transport):
    """One end of a connection: raw until it has a protocol, whose transport it is then.

    `is_over`: this side has closed it or knows that it has ended. Bytes that arrive later are
    answered with a reset, if they can be.
    """

    def __init__(self, network: Network, sock: SimSocket) -> None:
        super().__init__()
        self.network = network
        self.host = sock.host
        self.context = sock.context
        self.other: End = self
        self.is_over = False
        self.keepalive_s = sock.keepalive_s
        self.is_workers = False  # the engine has given it to its worker
        self.protocol: asyncio.Protocol | None = None
        self._error: Exception | None = None
        self._incoming: deque[tuple[float, bytes | str]] = deque()  # and when it arrives
        self._incoming_bytes = 0
        self._last_at = 0.0
        self._is_timed = False
        self._since: float | None = None  # bytes do not arrive
        self._read = bytearray()
        self._has_eof = False
        self._reader: asyncio.Future[None] | None = None
        self._high = 64 << 10
        self._is_paused = False

    def __repr__(self) -> str:
        return f"<End {self.host} to {self.other.host}{' over' * self.is_over}>"

    # --------------------------------------------------------------------------- as a socket

    async def receive(self, n_bytes: int) -> bytes:
        """The next bytes, at most so many; b"" at the end."""
        while not self._read and not self._has_eof:
            if self._error is not None:
                raise self._error
            if self.is_over:
                return b""
            self._reader = self.network.loop.create_future()
            await self._reader
        data = bytes(self._read[:n_bytes])
        del self._read[:n_bytes]
        return data

    def begin(self, protocol: asyncio.Protocol) -> None:
        """Have this protocol take what arrives."""
        self.protocol = protocol
        protocol.connection_made(self)
        self.network.loop.call_soon(self._begin_reading, context=self.context)

    def _begin_reading(self) -> None:
        assert self.protocol is not None
        if self._read and not self.is_over:
            data = bytes(self._read)
            self._read.clear()
            self.protocol.data_received(data)
        if self.is_over:
            self._lose(self._error)
        elif self._has_eof and not self.protocol.eof_received():
            self.close()

    # ------------------------------------------------------------------------ as a transport

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if self.is_over or not data:
            return
        lie = self.network.lies.get(self.host)
        for sent in [bytes(data)] if lie is None or self.is_workers else lie(bytes(data)):
            for part in self.network.parts(sent):
                self.other._enqueue(part)
        if self.protocol is not None and self.get_write_buffer_size() > self._high:
            self._is_paused = True
            self.protocol.pause_writing()

    def is_closing(self) -> bool:
        return self.is_over

    def get_write_buffer_size(self) -> int:
        return max(0, self.other._incoming_bytes - WINDOW_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 0

    def close(self) -> None:
        self._end(EOF)

    def abort(self) -> None:
        self._end(RESET)

    def _end(self, how: str) -> None:
        if not self.is_over:
            self.other._enqueue(how)
            self.die(None)

    # ---------------------------------------------------------------------------- the network

    def kill(self) -> None:
        """The process of this end has died: nothing is called any more."""
        if not self.is_over:
            self.other._enqueue(RESET)
        self.protocol = None
        self.die(None)

    def die(self, error: Exception | None) -> None:
        """This end is over, and its protocol hears it; the other end hears nothing."""
        if self.is_over:
            return
        self.is_over, self._error = True, error
        self.network.ends.remove(self)
        self._incoming.clear()
        self._incoming_bytes = 0
        self._wake()
        if self.protocol is not None:
            self.network.loop.call_soon(self._lose, error, context=self.context)
        if error is not None and self.other.keepalive_s:
            self.other.probe_later()

    def probe_later(self) -> None:
        """Ask in a while whether the other end is there."""
        self.network.loop.call_later(self.keepalive_s, self._probe, context=self.context)

    def _probe(self) -> None:
        if self.is_over or not self.other.is_over:
            return
        if self.network.is_cut(self.host, self.other.host):
            self.probe_later()
        else:
            self.other.answer_with_reset()

    def answer_with_reset(self) -> None:
        """Bytes have come for this end, which is over."""
        if not self.network.is_cut(self.other.host, self.host):
            self.other._enqueue(RESET)

    def _lose(self, error: Exception | None) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def _enqueue(self, item: bytes | str) -> None:
        """Send this to here, behind what was sent before."""
        if self.is_over:
            if item != RESET:
                self.answer_with_reset()
            return
        network = self.network
        size = len(item) if isinstance(item, bytes) else 0
        at = max(self._last_at, network.loop.time() + network.travel_s()) + size / BYTES_PER_S
        self._last_at = at
        self._incoming.append((at, item))
        self._incoming_bytes += size
        self._set_timer()

    def _set_timer(self) -> None:
        if self._incoming and not self._is_timed and self._since is None:
            self._is_timed = True
            self.network.loop.call_at(self._incoming[0][0], self.arrive, context=self.context)

    def arrive(self) -> None:
        """Take what has arrived by now, unless this direction carries nothing."""
        self._is_timed = False
        network, now = self.network, self.network.loop.time()
        while self._incoming and self._incoming[0][0] <= now:
            if network.is_cut(self.other.host, self.host):
                self._wait(now)
                return
            self._since = None
            item = self._incoming.popleft()[1]
            if isinstance(item, bytes):
                self._incoming_bytes -= len(item)
                self._take(item)
                self.other._resume()
            elif item == RESET:
                self.die(ConnectionResetError(errno.ECONNRESET, "simulated reset"))
            else:
                self._take_eof()
        if not self._incoming:
            self._since = None
        self._set_timer()

    def _wait(self, now: float) -> None:
        """Nothing arrives; after a time the sender gives up, and this end does not hear of it."""
        self.network.block(self)
        if self._since is None:
            self._since = now
            due, other = now + USER_TIMEOUT_S, self.other

            def give_up() -> None:
                if self._since == now:
                    other.die(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

            self.network.loop.call_at(due, give_up, context=other.context)

    def _take(self, data: bytes) -> None:
        if self.protocol is not None:
            self.protocol.data_received(data)
        else:
            self._read += data
            self._wake()

    def _take_eof(self) -> None:
        self._has_eof = True
        if self.protocol is None:
            self._wake()
        elif not self.protocol.eof_received():
            self.close()

    def _resume(self) -> None:
        if self._is_paused and self.get_write_buffer_size() < self._high // 4:
            self._is_paused = False
            self.network.loop.call_soon(self._resume_writing, context=self.context)

    def _resume_writing(self) -> None:
        if self.protocol is not None and not self._is_paused:
            self.protocol.resume_writing()

    def _wake(self) -> None:
        if self._reader is not None:
            _set(self._reader)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@contextlib.contextmanager
def simulated_sockets(network: Network) -> Iterator[None]:
    """Connections between peers go through the network; a host is `OWNER.get().host`."""

    def make(family: int, kind: int) -> SimSocket:
        return SimSocket(network, OWNER.get().host, copy_context())

    known = {name: getattr(socket, name) for name in dir(socket)}
    fake = SimpleNamespace(**known | {"socket": make})
    with replaced("socket", socket, fake, dialling.__name__, listener.__name__):
        yield
