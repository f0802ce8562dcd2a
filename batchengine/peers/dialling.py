"""Makes connections to peers: name lookup, TCP, the first bytes, TLS of a control link.

One attempt tries the addresses of a host in turn. Lookups run in one thread of their own: a name
server that does not answer holds back other lookups, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from batchengine.peers.channel import Channel, introduce, present
from batchengine.peers.connection import prepare
from batchengine.peers.identity import Identity

ATTEMPT_S = 3.0  # for TCP and TLS with one address
ADDRESSES_MAX = 4

T = TypeVar("T")


class Dialler:
    """Connects to the peer port of other daemons."""

    def __init__(self) -> None:
        self._lookups = ThreadPoolExecutor(1, "peers-lookup")

    async def connect(
        self, identity: Identity, name: str, host: str, port: int
    ) -> tuple[socket.socket, Channel]:
        """Return a connection to peer `name`, whose certificate was checked. Raises OSError (of
        which ssl.SSLError and TimeoutError are kinds) with the reason of the last address."""
        return await self._connect(host, port, lambda sock: introduce(sock, identity, name))

    async def connect_data(self, host: str, port: int, token: bytes) -> socket.socket:
        """Return a connection for a data link, on which the token was sent. Raises OSError."""
        return (await self._connect(host, port, lambda sock: present(sock, token)))[0]

    async def _connect(
        self, host: str, port: int, begin: Callable[[socket.socket], Awaitable[T]]
    ) -> tuple[socket.socket, T]:
        failure: OSError = OSError(f"{host} has no address")
        for family, address in (await self._addresses(host, port))[:ADDRESSES_MAX]:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                prepare(sock)
                async with asyncio.timeout(ATTEMPT_S):
                    await asyncio.get_running_loop().sock_connect(sock, address)
                    return sock, await begin(sock)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        if isinstance(failure, TimeoutError):
            raise TimeoutError(f"no answer within {ATTEMPT_S:g} s") from None
        raise failure

    def close(self) -> None:
        """End the lookup thread; a lookup under way is not waited for."""
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _addresses(self, host: str, port: int) -> list[tuple[int, tuple[str, int]]]:
        with contextlib.suppress(ValueError):
            version = ipaddress.ip_address(host).version
            return [(socket.AF_INET if version == 4 else socket.AF_INET6, (host, port))]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._lookups, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [(int(family), (str(to[0]), port)) for family, _, _, _, to in found]
