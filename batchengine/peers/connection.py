"""One connection of a control link: frames on a channel, with a bounded queue of what is unsent.

Owns the bound: a peer that does not read loses its link when QUEUE_BYTES_MAX wait for it, and
nothing else waits. A frame is encrypted in one piece on the event loop (about 1 ms per MiB), so
senders of much data use frames of FRAME_BYTES and wait for `room` between them.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from batchengine.peers.channel import Channel
from batchengine.wire.connection import FrameProtocol
from batchengine.wire.peer import PEER_LINK, PeerFrame, PeerMessage

QUEUE_BYTES_MAX = 32 << 20
ROOM_BYTES = 4 << 20  # `room` waits while more than this is queued
FRAME_BYTES = 1 << 20
LITTLE_BYTES = 4 << 10  # a greeting or a refusal
USER_TIMEOUT_MS = 10_000  # unacknowledged bytes end the connection
KEEPALIVE_S, PROBE_S, PROBES = 5, 2, 3  # an idle one whose other end is gone: a data link may be


class PeerConnection(FrameProtocol[PeerMessage]):
    """Calls `on_start` before anything is read, `on_frame` per frame, and `on_end` exactly once,
    with the reason or None."""

    def __init__(
        self,
        channel: Channel,
        on_start: Callable[[PeerConnection], None],
        on_frame: Callable[[PeerConnection, PeerFrame], None],
        on_end: Callable[[PeerConnection, Exception | None], None],
    ) -> None:
        super().__init__(
            PEER_LINK, lambda frame: on_frame(self, frame), lambda error: on_end(self, error)
        )
        self._channel = channel
        self._on_start = on_start
        self._early: bytearray | None = bytearray()  # what is read before `begin`
        self._has_early_end = False
        self._room = asyncio.Event()
        self._room.set()
        self.heard: Callable[[], None] | None = None  # called whenever bytes arrive

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended, or ends."""
        return self._transport is None or self._transport.is_closing()

    @property
    def queued_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=ROOM_BYTES)

    def begin(self) -> None:
        """Call `on_start`, then take what has been read.

        Until then nothing here closes the transport: uvloop takes a socket object over only some
        time after it began to read, and would leave a descriptor to it that is closed already.
        """
        early, self._early = self._early, None
        self._on_start(self)
        self.data_received(bytes(early or b""))  # or of TLS, read with the handshake
        if self._has_early_end:
            self.close()

    def eof_received(self) -> bool:
        self._has_early_end = self._early is not None
        return self._has_early_end  # keeps the transport open

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early += data
            return
        try:
            plain, answer = self._channel.open(data)
        except ssl.SSLError as error:
            self.fail(error)
            return
        if answer and self._transport is not None:
            self._transport.write(answer)
        if plain:
            if self.heard is not None:
                self.heard()
            super().data_received(plain)

    def send(self, frame: bytes) -> None:
        """Queue one frame; past QUEUE_BYTES_MAX the connection ends instead."""
        if self.is_over:
            return
        queued = self.queued_bytes
        if queued + len(frame) > QUEUE_BYTES_MAX:
            why = f"it does not read: {queued / (1 << 20):.1f} MiB wait to be sent"
            self.fail(ConnectionAbortedError(why))
            return
        super().send(self._channel.seal(frame))

    async def room(self) -> None:
        """Wait until little is queued, or the connection has ended."""
        await self._room.wait()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        if self._early is None:
            super().connection_lost(exc)
        self._transport = None

    def close(self) -> None:
        """End the connection. Little that is queued is still sent: it may say why."""
        if self._transport is not None:
            is_little = self.queued_bytes <= LITTLE_BYTES
            self._transport.close() if is_little else self._transport.abort()


def prepare(sock: socket.socket) -> None:
    """Set the options of every socket of a link, control or data."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


async def start(sock: socket.socket, connection: PeerConnection) -> None:
    """Give a connected socket to `connection`, which closes it at its end.

    Raises ConnectionResetError if it has ended before it began: then nothing is called.
    """
    try:
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)
    except BaseException:
        sock.detach()  # the transport closes its descriptor
        raise
    if connection.is_over:
        sock.detach()
        raise ConnectionResetError("it closed the connection")
    connection.begin()
