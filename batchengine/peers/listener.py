"""Accepts connections on the peer port, up to the point where the other side is known.

Owns what strangers may cost: WAITING_MAX connections at once that are not authenticated, KNOWN_S
for each, and one log line a minute about all of them. A data link comes in only with a token that
was made for it: one at a time for each peer, for one use within EXPECTED_S.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from batchengine import errors
from batchengine.peers.channel import TOKEN_BYTES, Channel, receive_purpose, recognise
from batchengine.peers.connection import prepare
from batchengine.peers.identity import Identity, reason_of

log = logging.getLogger("batchengine.peers")

WAITING_MAX = 16
GIVE_WAY_S = 0.02  # while all places are taken, the oldest gives way this often
KNOWN_S = 1.0  # from accept to the end of the handshake, or of the token
EXPECTED_S = 5.0  # from the making of a token to its use
LOG_EVERY_S = 60.0
BACKLOG = 128
ACCEPT_PAUSE_S = 0.1  # when the process has no descriptor left


@dataclass(frozen=True, slots=True)
class ExpectedData:
    """A connection that peer `peer` is to make; `take` gets its socket, which it does not keep."""

    peer: str
    take: Callable[[socket.socket], None]
    due: float


class PeerListener:
    """The listening socket of the peer port. Use: `bind`, `run` as a task, `close`."""

    def __init__(
        self,
        identity: Callable[[], Identity | None],
        on_known: Callable[[str, socket.socket, Channel], Awaitable[None]],
    ) -> None:
        """`on_known` gets the name of a daemon that has connected, and its connection to keep."""
        self._identity = identity
        self._on_known = on_known
        self._sock: socket.socket | None = None
        self._waiting: dict[asyncio.Task[None], None] = {}  # oldest first
        self._expected: dict[bytes, ExpectedData] = {}  # by token
        self.refused = 0  # connections that ended before they were known
        self.last_refused = ""
        self._logged_at = -LOG_EVERY_S

    @property
    def port(self) -> int:
        return 0 if self._sock is None else self._sock.getsockname()[1]

    def bind(self, host: str, port: int) -> None:
        """Open the socket. Raises CANNOT_LISTEN."""
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            why = (error.strerror or str(error)).lower()
            fix = "choose another address with --peer-listen or listen in [peers]"
            raise errors.CANNOT_LISTEN(host=host, port=port, why=why, fix=fix) from None
        sock.setblocking(False)
        self._sock = sock

    async def run(self) -> None:
        """Accept until cancelled."""
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # a waiting connection is accepted without a pause
            if len(self._waiting) >= WAITING_MAX:
                await self._give_way()
            try:
                sock, address = await loop.sock_accept(self._sock)
            except OSError as error:
                self._refuse("", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = loop.create_task(self._welcome(sock, str(address[0])))
            self._waiting[task] = None
            task.add_done_callback(partial(self._end, sock))

    def _end(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._waiting.pop(task, None)
        if task.cancelled():  # before it ran
            sock.close()

    def expect(self, peer: str, take: Callable[[socket.socket], None]) -> bytes:
        """Return the token with which `peer` may connect once; an earlier one is void.

        `take` is called with the socket, which is closed afterwards.
        """
        self.forget(peer)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._expected[token] = ExpectedData(peer, take, time.monotonic() + EXPECTED_S)
        return token

    def forget(self, peer: str) -> None:
        """Make the token of a peer void, if there is one."""
        for token, expected in list(self._expected.items()):
            if expected.peer == peer:
                del self._expected[token]

    def close(self) -> None:
        """Close the socket and what waits on it."""
        for task in self._waiting:
            task.cancel("this daemon stops")
        if self._sock is not None:
            self._sock.close()

    async def _give_way(self) -> None:
        """Wait for a place; without one, end the oldest connection, which may be a slow one."""
        await asyncio.wait(self._waiting, timeout=GIVE_WAY_S, return_when=asyncio.FIRST_COMPLETED)
        if len(self._waiting) >= WAITING_MAX:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.cancel("it was the slowest of too many")

    async def _welcome(self, sock: socket.socket, address: str) -> None:
        """Find out who has connected, or end the connection."""
        is_known = False
        try:
            prepare(sock)
            identity = self._identity()
            if identity is None:
                raise ConnectionAbortedError("this daemon has no certificate yet")
            async with asyncio.timeout(KNOWN_S):
                token = await receive_purpose(sock)
                if token is not None:
                    return self._pass_on(token, sock)
                name, channel = await recognise(sock, identity)
            is_known = True
            await self._on_known(name, sock, channel)
        except TimeoutError:
            self._refuse(address, TimeoutError(f"it was not known within {KNOWN_S:g} s"))
        except OSError as error:  # TLS errors are of that kind
            self._refuse(address, error)
        except asyncio.CancelledError as error:
            self._refuse(address, ConnectionAbortedError(str(error)))
        finally:
            if not is_known:
                sock.close()
        return None

    def _pass_on(self, token: bytes, sock: socket.socket) -> None:
        """Hand on a connection for a data link. Raises ConnectionAbortedError."""
        expected = self._expected.pop(token, None)
        if expected is None:
            raise ConnectionAbortedError("its token for a data link is not known")
        if expected.due < time.monotonic():
            raise ConnectionAbortedError(f"{expected.peer} was too late with its data link")
        expected.take(sock)

    def _refuse(self, address: str, error: Exception) -> None:
        """Count a connection that came to nothing; log at most once a minute."""
        self.refused += 1
        self.last_refused = f"{address}: {reason_of(error)}"
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning(
                "connections to the peer port that came to nothing: %d so far, the last from %s",
                self.refused,
                self.last_refused,
            )
