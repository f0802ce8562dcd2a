"""The listening socket: binding it, counting its connections, and answering malformed HTTP.

Owns the connection cap (beyond it a plain 503), the time a client has to send its first request,
and the small send buffers that make a slow reader visible. Refuses a port in use with a fix.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser

from batchengine import errors
from batchengine.core import BatchEngineError
from service.http.answers import error_headers, json_answer
from service.protocols.openai import error_object

log = logging.getLogger("batchengine.service")

FIRST_REQUEST_SECONDS = 20.0
IDLE_SECONDS = 120.0  # keep-alive between requests of one connection
LINGER_SECONDS = 1.0  # for a refused body: long enough to read the refusal
SEND_BUFFER_BYTES = 128 * 1024  # the kernel doubles it: 256 KiB per stream at most
BACKLOG = 1024
HEADER_BYTES_MAX = 8190


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
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(found[0][4])
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error) from None
    return sock


def _bind_error(host: str, port: int, error: OSError) -> BatchEngineError:
    fixes = {
        errno.EADDRINUSE: f"stop the program that listens there (ss -ltnp 'sport = :{port}'),"
        " or choose another port with --port",
        errno.EACCES: "choose a port above 1023 with --port",
        errno.EADDRNOTAVAIL: "name an address of this machine with --host",
    }
    why = (error.strerror or str(error)).lower()
    fix = fixes.get(error.errno or 0, "check --host and --port")
    return errors.CANNOT_LISTEN(host=host, port=port, why=why, fix=fix)


class Connection(web.RequestHandler):
    """aiohttp's protocol with two additions: a deadline for the first request, errors as JSON."""

    __slots__ = ("_deadline",)

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **kw: Any) -> None:
        super().__init__(manager, loop=loop, **kw)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(FIRST_REQUEST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self._request_count == 0 and self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are not HTTP: 400, without repeating any of them."""
        if status >= 500:
            log.error("%s %s failed", request.method, request.path[:80], exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: nothing can be added")
        error = errors.INTERNAL_ERROR(request_id="-") if status >= 500 else errors.MALFORMED_HTTP()
        response = json_answer(error_object(error), status, {"Server": "batchengine"})
        response.force_close()
        return response


class Refusal(asyncio.Protocol):
    """A connection beyond the cap: one canned 503, then closed."""

    def __init__(self, connections_max: int) -> None:
        error = errors.TOO_MANY_CONNECTIONS(connections_max=connections_max)
        body = msgspec.json.encode(error_object(error))
        head = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json"]
        head += [f"{name}: {value}" for name, value in error_headers(error).items()]
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        self._answer = "\r\n".join(head).encode() + body

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
            "max_line_size": HEADER_BYTES_MAX,
            "max_field_size": HEADER_BYTES_MAX,
        }
        # a client that goes away cancels its handler
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=5.0)
        self._sock = sock
        self._connections_max = connections_max
        self._server: asyncio.Server | None = None
        self._http: web.Server | None = None

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

    def _accept(self) -> asyncio.Protocol:
        http = self._http
        assert http is not None
        if len(http.connections) >= self._connections_max:
            return Refusal(self._connections_max)
        return Connection(http, loop=asyncio.get_running_loop(), **self._protocol_args)

    async def close(self) -> None:
        """Stops accepting, gives handlers five seconds, closes every connection."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()
