"""Server-sent events on one response: headers, events, comments, and readers that stop reading.

Owns the bytes of the event stream and the time limit of slow readers. Never
buffers more than the transport's high-water mark: a full socket pauses the writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable

from aiohttp import web

from service.protocols.formatter import SseEvent

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


AT_ONCE_BYTES = 16 * 1024  # an empty buffer of a transport takes them without a pause


class SlowReader(Exception):
    """The client has not taken a byte for the configured time."""


class EventStream:
    """An open event stream; headers go out with `open`."""

    def __init__(self, request: web.Request, headers: dict[str, str], stall_s: float) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._stall_s = stall_s

    async def open(self) -> None:
        """Sends status line and headers, at once."""
        await self._response.prepare(self._request)

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, payload: bytes) -> None:
        """Sends whole events; raises SlowReader, or ConnectionResetError if the client is gone."""
        if not payload:
            return
        writing, transport = self._response.write(payload), self._request.transport
        has_room = transport is not None and not transport.get_write_buffer_size()
        if has_room and len(payload) <= AT_ONCE_BYTES:
            await writing  # it ends at once; a time limit takes a tenth of the time of a token
        else:
            await self._taken(writing)

    async def close(self) -> None:
        """Ends the body; raises as `send` does."""
        await self._taken(self._response.write_eof())

    async def _taken(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await writing
        except TimeoutError:
            raise SlowReader from None

    def abort(self) -> None:
        """Drop the connection now: what is buffered would never be read."""
        if self._request.transport is not None:
            self._request.transport.abort()


def encode(events: Iterable[SseEvent]) -> bytes:
    """The bytes of whole events."""
    return b"".join(map(_block, events))


def _block(event: SseEvent) -> bytes:
    name = b"event: " + event.name.encode() + b"\n" if event.name else b""
    event_id = b"id: " + event.id.encode() + b"\n" if event.id else b""
    return name + event_id + b"data: " + event.data + b"\n\n"


def comment(text: str, *, after_id: bool) -> bytes:
    """A comment line: keeps proxies awake, invisible to SDKs.

    After an event with an id no empty line follows: the OpenAI and Anthropic decoders would take
    it for an event with that id and no data, and fail.
    """
    return b": " + text.encode() + (b"\n" if after_id else b"\n\n")
