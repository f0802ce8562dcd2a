"""Server-sent events on one response: headers, events, comments, and readers that stop reading.

Owns the bytes of the event stream (API 1.3) and the patience with slow readers (F54). Never
buffers more than the transport's high-water mark: a full socket pauses whoever writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from batchengine.core import BatchEngineError
from service import errors

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class SlowReader(Exception):
    """The client has not taken a byte for the configured time."""


class EventStream:
    """An open event stream; headers go out with `open`."""

    def __init__(self, request: web.Request, headers: dict[str, str], stall_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._stall_s = stall_s

    async def open(self) -> None:
        """Status line and headers, at once."""
        await self._response.prepare(self._request)

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, payload: bytes) -> None:
        """Whole events; raises SlowReader, or ConnectionResetError when the client is gone."""
        if not payload:
            return
        try:
            async with asyncio.timeout(self._stall_s):
                await self._response.write(payload)
        except TimeoutError:
            raise SlowReader from None

    async def fail(self, error: BatchEngineError) -> None:
        """The error event; the stream ends after it, without [DONE]."""
        await self.send(b"event: error\n" + data(errors.error_object(error)))

    async def close(self) -> None:
        """End of the body; as patient as `send`."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._response.write_eof()
        except TimeoutError:
            raise SlowReader from None

    def abort(self) -> None:
        """Drop the connection now: what is buffered would never be read."""
        if self._request.transport is not None:
            self._request.transport.abort()


class Marks:
    """Ids of the events of a stream that can be resumed: its turn, and tokens of it told so far.

    Tokens that show no text count too, so the number is exactly what `from=` takes. The turn is
    part of it: the session may have another by the time that somebody asks for the rest.
    """

    def __init__(self, first: int, turn_of: Callable[[], str]) -> None:
        """`turn_of` is asked once a token was told: an earlier request may have begun the turn."""
        self.first = first
        self.told = first
        self._turn_of = turn_of

    def count(self) -> int:
        """One more token was told; returns how many that makes."""
        self.told += 1
        return self.told

    def event_id(self, told: int) -> str:
        """What `Last-Event-ID` brings back."""
        return f"{self._turn_of()}:{told}"


def data(value: dict[str, object], event_id: str = "") -> bytes:
    """One data event."""
    head = b"id: " + event_id.encode() + b"\n" if event_id else b""
    return head + b"data: " + _encoder.encode(value) + b"\n\n"


def comment(text: str, marks: Marks | None = None) -> bytes:
    """A comment line: keeps proxies awake, invisible to SDKs.

    Once an id was sent no empty line follows: the OpenAI and Anthropic decoders would take it for
    an event with that id and no data, and fail.
    """
    is_marked = marks is not None and marks.told > marks.first
    return b": " + text.encode() + (b"\n" if is_marked else b"\n\n")
