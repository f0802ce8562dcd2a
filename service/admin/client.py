"""A small blocking client: HTTP with streamed answers, and the admin socket.

The CLI and the demo use it. Standard library only, so that `chat` starts at once; every failure is
a BatchEngineError with a fix.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote, urlsplit

from batchengine import errors

Json = dict[str, Any]
CONNECT_SECONDS = 10.0
ADMIN_LINE_BYTES_MAX = 16 * 1024  # of one command and its arguments
SILENCE_SECONDS = 600.0  # keep-alive comments come every ten seconds


@dataclass(slots=True)
class Client:
    """One daemon's HTTP address, such as http://127.0.0.1:7717/v1."""

    url: str
    api_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        if not self.url.endswith("/v1"):
            self.url += "/v1"
        if not _is_http(self.url):
            raise errors.NOT_AN_ADDRESS(url=self.url)
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise errors.KEY_UNSENDABLE()

    def get(self, path: str) -> Json:
        """The JSON of `path` below the host (not below /v1), whatever the status."""
        with self._ask("GET", path) as reply:
            return _object(_read(reply))

    def model(self) -> Json:
        """The row of the model itself."""
        return self._rows()[0]

    def models(self) -> list[str]:
        """Model ids, the model itself first."""
        return [row["id"] for row in self._rows()]

    def history(self, session: str) -> Json:
        """The messages of a session of this key; raises UNKNOWN_SESSION."""
        with self._ask("GET", f"/v1/sessions/{quote(session, safe='')}/messages") as reply:
            body = _object(_read(reply))
            _check(reply.status, body)
        return body

    def _rows(self) -> list[Json]:
        with self._ask("GET", "/v1/models") as reply:
            body = _object(_read(reply))
            _check(reply.status, body)
        return body["data"]

    def context_tokens(self) -> int:
        """Tokens that a session may have."""
        return int(self.get("/props")["default_generation_settings"]["n_ctx"])

    def stream_chat(self, body: Json) -> Generator[Json, None, None]:
        """The chunks of one streamed chat completion; closing the iterator cancels it."""
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._ask("POST", "/v1/chat/completions", wanted) as reply:
            if reply.status != 200:
                _check(reply.status, _object(_read(reply)))
            event = ""
            finished = False
            for raw in _lines(reply):
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if line.startswith("event: "):
                    event = line[7:]
                elif line == "data: [DONE]":
                    finished = True
                elif line.startswith("data: "):
                    chunk = _object(line[6:].encode())
                    if event == "error":
                        _check(500, chunk)
                    yield chunk
            if not finished:
                raise errors.CONNECTION_LOST(why="the stream ended before its end")

    @contextmanager
    def _ask(
        self, method: str, path: str, body: Json | None = None
    ) -> Generator[http.client.HTTPResponse]:
        """The answer to one request; leaving cancels what the daemon still computes for it."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=CONNECT_SECONDS
        )
        headers = {"Accept": "application/json, text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        with closing(connection):
            try:
                connection.connect()
            except (OSError, http.client.HTTPException) as error:
                raise errors.NO_DAEMON(where=self.url, why=_reason(error)) from None
            try:
                connection.sock.settimeout(SILENCE_SECONDS)
                connection.request(
                    method, path, None if body is None else json.dumps(body).encode(), headers
                )
                reply = connection.getresponse()
            except OSError as error:  # a closed connection too, which is an HTTPException besides
                raise errors.CONNECTION_LOST(why=str(error) or "no answer came") from None
            except http.client.HTTPException as error:  # the listener speaks no HTTP
                raise errors.NO_DAEMON(where=self.url, why=_reason(error)) from None
            with reply:
                yield reply


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, half an IPv6 address
        return False
    return named and url.isascii() and url.isprintable() and " " not in url


def _read(reply: http.client.HTTPResponse) -> bytes:
    try:
        return reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise errors.CONNECTION_LOST(why=str(error)) from None


def _lines(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        yield from reply
    except (OSError, http.client.HTTPException) as error:
        raise errors.CONNECTION_LOST(why=str(error)) from None


def _object(body: bytes) -> Json:
    try:
        value: object = json.loads(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise errors.CONNECTION_LOST(why="the answer is not a JSON object")
    return cast("Json", value)


def _check(status: int, body: Json) -> None:
    """Raises the daemon's error object as an exception."""
    if status < 400:
        return
    raw: object = body.get("error")
    error = cast("Json", raw) if isinstance(raw, dict) else {}
    raise errors.received(
        str(error.get("batchengine_code", errors.CONNECTION_LOST.code)),
        str(error.get("what", f"the daemon answered {status}")),
        str(error.get("why", "")),
        str(error.get("fix", "")),
    )


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return (strerror or str(error)).lower()


def admin(
    socket_path: str, command: str, *, patience_s: float = CONNECT_SECONDS, **arguments: object
) -> Json:
    """One command to the admin socket of a daemon; `patience_s` is for the answer.

    Arguments that are None are left out. Raises NO_DAEMON when no process listens,
    ADMIN_FORBIDDEN when another user's daemon does, CONNECTION_LOST when no answer comes.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    _check_arguments(given)
    line = json.dumps({"command": command, **given}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CONNECT_SECONDS)
        try:
            sock.connect(socket_path)
        except PermissionError as error:
            raise errors.ADMIN_FORBIDDEN(where=socket_path, reason=_reason(error)) from None
        except OSError as error:
            raise errors.NO_DAEMON(where=socket_path, why=_reason(error)) from None
        try:
            sock.sendall(line)
            sock.settimeout(patience_s)
            with sock.makefile("rb") as answers:
                answer = answers.readline()
        except TimeoutError:
            raise errors.CONNECTION_LOST(
                why=f"no answer to {command} within {patience_s:g} s"
            ) from None
        except OSError as error:
            raise errors.CONNECTION_LOST(why=str(error)) from None
    if not answer:
        raise errors.CONNECTION_LOST(why="it closed the connection without an answer")
    body = _object(answer)
    if not body.get("ok"):
        _check(400, body)
    return body


def _check_arguments(given: Json) -> None:
    """Raises COMMAND_UNSENDABLE for an argument that the socket cannot carry, and names it."""
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    for name, text in texts.items():
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            why, fix = f"its {name.replace('_', ' ')} is no valid UTF-8", "write it in UTF-8"
            raise errors.COMMAND_UNSENDABLE(why=why, fix=fix)
    if len(json.dumps(texts)) > ADMIN_LINE_BYTES_MAX // 2:
        longest = max(texts, key=lambda name: len(texts[name]))
        why = f"its {longest.replace('_', ' ')} has {len(texts[longest]):,} characters"
        fix = "ids have at most 4,096: copy it from `batchengine sessions`"
        raise errors.COMMAND_UNSENDABLE(why=why, fix=fix)
