"""The listening socket: binding it, counting its connections, and answering malformed HTTP.

Owns the connection cap (beyond it a plain 503), the time a client has to send its first request
and to take an answer, and the small send buffers that make a slow reader visible. Refuses a port in
use with a fix.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage

from batchengine import errors
from batchengine.core import BatchEngineError
from service.http.admission import CALLER, SERVICE
from service.http.answers import error_headers, json_answer
from service.protocols.openai.envelope import error_object

log = logging.getLogger("batchengine.service")

FIRST_REQUEST_SECONDS = 20.0
IDLE_SECONDS = 120.0  # keep-alive between requests of one connection
REST_SECONDS = 5.0  # without a request: then a connection gives way to a new one at the cap
SWEEP_SECONDS = 1.0  # between two looks at what clients have not taken
READ_BYTES_PER_S = 16 * 1024  # at least, of an answer that fills the buffers
# At once of a body: aiohttp takes a chunk for each 16 of them, and 4,096 tiny chunks cost some ms.
READ_BUFFER_BYTES = 64 * 1024
LINGER_SECONDS = 1.0  # for a refused body: long enough to read the refusal
SEND_BUFFER_BYTES = 128 * 1024  # the kernel doubles it: 256 KiB per stream at most
BACKLOG = 1024
# a client that vanished without a word is noticed after a minute: its request is computed no more
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
HEADER_BYTES_MAX = 8190
TLS_HELLO = b"\x16\x03"  # the first bytes of a client that speaks TLS


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises CANNOT_LISTEN."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family = found[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _bind_error(host, port, error) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(found[0][4])
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error) from None
    return sock


def take(passed: Sequence[socket.socket], host: str, port: int) -> socket.socket | None:
    """The listening socket that a service manager passed, if any; it must be at the configured
    address, of which the checks of keys and hosts know. Raises CANNOT_LISTEN."""
    if not passed:
        return None
    sock = passed[0]
    try:
        wanted = [row[4][:2] for row in socket.getaddrinfo(host.strip("[]"), port)]
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if len(passed) == 1 and is_tcp and sock.getsockname()[:2] in wanted:
            for option, value in KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            sock.setblocking(False)
            return sock
        names = ", ".join(str(each.getsockname()) for each in passed)
    except OSError as error:
        raise _bind_error(host, port, error) from None
    fix = "make ListenStream of batchengine.socket that address, or disable the socket unit"
    why = f"the service manager passed {names}"
    raise errors.CANNOT_LISTEN(host=host, port=port, why=why, fix=fix)


def _bind_error(host: str, port: int, error: OSError) -> BatchEngineError:
    fixes = {
        errno.EADDRINUSE: f"stop the program that listens there (ss -ltnp 'sport = :{port}'),"
        " or choose another port with --port; a second daemon has all of its own with"
        " --instance NAME",
        errno.EACCES: "choose a port above 1023 with --port",
        errno.EADDRNOTAVAIL: "name an address of this machine with --host",
    }
    why = (error.strerror or str(error)).lower()
    fix = fixes.get(error.errno or 0, "check --host and --port")
    return errors.CANNOT_LISTEN(host=host, port=port, why=why, fix=fix)


class Connection(web.RequestHandler):
    """aiohttp's protocol with deadlines: for the first request and for taking an answer; with
    errors as JSON, also for a body that turns out to be malformed while it is read."""

    __slots__ = (
        "_body", "_deadline", "_has_begun", "_idle_since", "_is_resuming", "_look_at", "_stream",
        "_unsent",
    )  # fmt: skip

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **kw: Any) -> None:
        super().__init__(manager, loop=loop, **kw)
        self._deadline: asyncio.TimerHandle | None = None
        self._stream: asyncio.Transport | None = None  # also while aiohttp waits for its close
        self._body: StreamReader | None = None  # of the last request
        self._idle_since = loop.time()
        self._has_begun = False  # a byte was received
        self._is_resuming = False
        self._unsent = 0  # bytes when the client was last looked at; 0 = it takes what is sent
        self._look_at = 0.0  # loop time of the next look

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = cast("asyncio.Transport", transport)
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(FIRST_REQUEST_SECONDS, self._give_up)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            if data.startswith(TLS_HELLO) and self._stream is not None:
                self._stream.write(_canned("400 Bad Request", errors.LOOKS_LIKE_TLS()))
                self._stream.close()
                return
        super().data_received(data)
        if not self._messages:
            return
        message, payload = self._messages[-1]
        if isinstance(message, RawRequestMessage):
            self._body = payload
        elif self._body is not None and not self._body.is_eof():  # the fault is inside this body
            self._messages.pop()
            self._body.set_exception(errors.MALFORMED_HTTP())
            self._body.feed_eof()  # aiohttp does not wait for the rest once it was answered
            self.close()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Goes on with a body in the next turn of the event loop.

        aiohttp would parse on at once, after each chunk that is taken: as much as was received.
        """
        if not resume_parser:  # the body is complete
            super().resume_reading(resume_parser=False)
        elif self._reading_paused and not self._is_resuming:
            self._is_resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._is_resuming = False
        if self.transport is not None and self._reading_paused:
            super().resume_reading()

    def resume_writing(self) -> None:
        self._unsent = 0
        super().resume_writing()

    def check_reader(self, now: float, stall_s: float) -> None:
        """Ends the connection if its client does not take what was sent: within `stall_s` the
        buffer must have room again, or be smaller by what the least speed gives."""
        stream = self._stream
        if stream is None or not (self._paused or stream.is_closing()):
            return
        unsent = stream.get_write_buffer_size()
        if self._unsent and now < self._look_at:
            return
        if self._unsent and self._unsent - unsent < READ_BYTES_PER_S * stall_s:
            stream.abort()
        self._unsent, self._look_at = unsent, now + stall_s

    def idle_s(self, now: float) -> float:
        """Seconds without a request that passed the access checks."""
        request = self._current_request  # None also while its answer is being sent
        is_served = self._request_in_progress and (request is None or CALLER in request)
        if is_served or self._stream is None or self._stream.is_closing():
            self._idle_since = now
        return now - self._idle_since

    def abort(self) -> None:
        """Drops the connection and what was not sent."""
        if self._stream is not None:
            self._stream.abort()

    def _give_up(self) -> None:
        if self._request_count == 0 and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._stream = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are not HTTP: 400, without repeating any of them."""
        if status >= 500 and not isinstance(exc, ConnectionResetError):  # else the client is gone
            log.error("%s %s failed", request.method, request.path[:80], exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: nothing can be added")
        error = errors.INTERNAL_ERROR(request_id="-") if status >= 500 else errors.MALFORMED_HTTP()
        response = json_answer(error_object(error), status, {"Server": "batchengine"})
        response.force_close()
        return response


def _canned(status: str, error: BatchEngineError) -> bytes:
    """A whole answer, after which the connection is closed."""
    body = msgspec.json.encode(error_object(error))
    head = [f"HTTP/1.1 {status}", "Content-Type: application/json"]
    head += [f"{name}: {value}" for name, value in error_headers(error).items()]
    head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(head).encode() + body


class Refusal(asyncio.Protocol):
    """A connection beyond the cap: one canned 503, then closed."""

    def __init__(self, connections_max: int) -> None:
        error = errors.TOO_MANY_CONNECTIONS(connections_max=connections_max)
        self._answer = _canned("503 Service Unavailable", error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)
        stream.write(self._answer)
        stream.close()


class Listener:
    """Serves one application on one socket until closed."""

    def __init__(self, app: web.Application, sock: socket.socket, connections_max: int) -> None:
        self._protocol_args: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": IDLE_SECONDS,
            "lingering_time": LINGER_SECONDS,
            "read_bufsize": READ_BUFFER_BYTES,
            "max_line_size": HEADER_BYTES_MAX,
            "max_field_size": HEADER_BYTES_MAX,
        }
        # a client that goes away cancels its handler
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=5.0)
        self._sock = sock
        self._connections_max = connections_max
        self._server: asyncio.Server | None = None
        self._http: web.Server | None = None
        self._stall_s = app[SERVICE].config.server.reader_stall_s
        self._lag = app[SERVICE].engine.metrics.event_loop_lag_seconds
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return cast("int", self._sock.getsockname()[1])

    async def open(self) -> None:
        """Starts accepting. Raises NO_C_PARSER: aiohttp's Python parser has allowed smuggling."""
        if HttpRequestParser.__module__ != "aiohttp._http_parser":
            raise errors.NO_C_PARSER()
        await self._runner.setup()
        self._http = self._runner.server
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, sock=self._sock)
        self._sweeping = asyncio.create_task(self._sweep())

    def _accept(self) -> asyncio.Protocol:
        http = self._http
        assert http is not None
        if len(http.connections) >= self._connections_max and not self._drop_idle():
            return Refusal(self._connections_max)
        return Connection(http, loop=asyncio.get_running_loop(), **self._protocol_args)

    def _connections(self) -> list[Connection]:
        assert self._http is not None
        return cast("list[Connection]", list(self._http.connections))

    def _drop_idle(self) -> bool:
        """Drops the connection that has had no request for the longest time; False if all are
        in use."""
        now = asyncio.get_running_loop().time()
        idlest = max(self._connections(), key=lambda one: one.idle_s(now))
        if idlest.idle_s(now) < REST_SECONDS:
            return False
        idlest.abort()
        return True

    async def _sweep(self) -> None:
        """Looks after connections that hold a place for no work, once a second."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + min(SWEEP_SECONDS, self._stall_s)
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self._lag.observe(max(0.0, now - due))
            for connection in self._connections():
                connection.check_reader(now, self._stall_s)
                connection.idle_s(now)

    def stop_accepting(self) -> None:
        """Leaves new connections to the process that listens on the same socket next."""
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Stops accepting, gives handlers five seconds, closes every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self.stop_accepting()
        await self._runner.cleanup()
