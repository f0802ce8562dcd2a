"""Bytes of one connection before and after TLS: who the other side is, and the two directions.

The first five bytes of a connection say what it is for. Of a control link, TLS follows or, between
loopback addresses, the name of the side that connects; of a data link, the token that was agreed
for it, and what follows is for the worker. Owns what an unauthenticated side may cost: at most
UNAUTHENTICATED_BYTES_MAX are read from it; the caller bounds its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from abc import abstractmethod
from typing import Protocol

from batchengine.config.peers import is_peer_name
from batchengine.peers.identity import Identity, name_of

CONTROL = b"BEPC1"  # first bytes of a connection that becomes a control link,
DATA = b"BEPD1"  # or a data link
TOKEN_BYTES = 16
UNAUTHENTICATED_BYTES_MAX = 4096  # a handshake with P-256 certificates takes less than 2 KiB
READ_BYTES = 64 << 10


class Channel(Protocol):
    """What lies between the frames and the socket."""

    @abstractmethod
    def seal(self, data: bytes) -> bytes:
        """The bytes to send for `data`."""

    @abstractmethod
    def open(self, data: bytes) -> tuple[bytes, bytes]:
        """(what `data` from the socket says, bytes to send now). Raises ssl.SSLError."""


class PlainChannel:
    """No TLS."""

    def seal(self, data: bytes) -> bytes:
        return data

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        return data, b""


class TlsChannel:
    """An established TLS connection."""

    def __init__(
        self, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing

    def seal(self, data: bytes) -> bytes:
        self._tls.write(data)
        return self._outgoing.read()

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        self._incoming.write(data)
        parts: list[bytes] = []
        # a closed TLS connection is followed by the end of the socket
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while part := self._tls.read(READ_BYTES):
                parts.append(part)
        return b"".join(parts), self._outgoing.read() if self._outgoing.pending else b""


async def introduce(sock: socket.socket, identity: Identity, peer: str) -> Channel:
    """Open a control link on a connection to `peer`, whose certificate must have that name.

    Raises OSError, of which ssl.SSLError is a kind.
    """
    loop = asyncio.get_running_loop()
    if identity.client is not None:
        await loop.sock_sendall(sock, CONTROL)
        return (await _handshake(sock, identity.client, peer))[0]
    name = identity.name.encode()
    await loop.sock_sendall(sock, CONTROL + bytes([len(name)]) + name)
    return PlainChannel()


async def present(sock: socket.socket, token: bytes) -> None:
    """Open a data link on a connection to the daemon that gave the token. Raises OSError."""
    await asyncio.get_running_loop().sock_sendall(sock, DATA + token)


async def receive_purpose(sock: socket.socket) -> bytes | None:
    """What the other side has connected for: the token of a data link, None = a control link.

    Reads no byte that follows. Raises OSError.
    """
    purpose = await _receive_exactly(sock, len(CONTROL))
    if purpose == DATA:
        return await _receive_exactly(sock, TOKEN_BYTES)
    if purpose != CONTROL:
        raise ConnectionAbortedError("it does not speak this protocol")
    return None


async def recognise(sock: socket.socket, identity: Identity) -> tuple[str, Channel]:
    """The name of the daemon that opens a control link, and the channel to it.

    Raises as `introduce`.
    """
    if identity.server is not None:
        channel, tls = await _handshake(sock, identity.server, None)
        name = name_of(tls)
    else:
        channel = PlainChannel()
        length = (await _receive_exactly(sock, 1))[0]
        name = (await _receive_exactly(sock, length)).decode("ascii", "replace")
    if not is_peer_name(name):
        raise ConnectionAbortedError("it does not have a peer's name")
    return name, channel


async def _receive_exactly(sock: socket.socket, n_bytes: int) -> bytes:
    """The next `n_bytes` and not one more. Raises ConnectionError at the end."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < n_bytes:
        part = await loop.sock_recv(sock, n_bytes - len(data))
        if not part:
            raise ConnectionResetError("it closed the connection")
        data += part
    return data


async def _handshake(
    sock: socket.socket, context: ssl.SSLContext, server: str | None
) -> tuple[TlsChannel, ssl.SSLObject]:
    """Do a TLS handshake, as the client of `server` or, with None, as the server.

    The other side gets the alert when this side refuses it.
    """
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server is None, server_hostname=server)
    left = UNAUTHENTICATED_BYTES_MAX
    while True:
        try:
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                return TlsChannel(tls, incoming, outgoing), tls
        finally:
            if outgoing.pending:
                await loop.sock_sendall(sock, outgoing.read())
        data = await loop.sock_recv(sock, left)
        if not data:
            raise ConnectionResetError("it closed the connection")
        left -= len(data)
        if left == 0:
            raise ConnectionAbortedError("its handshake is too long")
        incoming.write(data)
