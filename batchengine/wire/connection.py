"""The end of a link in a process with an event loop.

Children have a `BlockingLink` and do not import this module: asyncio takes a tenth of their start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, cast

from batchengine.wire.frames import Decoder, Frame, LinkSchema, M, WireError


class FrameProtocol(asyncio.Protocol, Generic[M]):
    """The asyncio end of a link: calls `on_frame` per frame and `on_lost` exactly once."""

    def __init__(
        self,
        schema: LinkSchema[M],
        on_frame: Callable[[Frame[M]], None],
        on_lost: Callable[[Exception | None], None],
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = Decoder(schema)
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no common base

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except WireError as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # uvloop raises when a closed transport is written to
        self._on_lost(self._error or exc)

    def send(self, frame: bytes) -> None:
        """Queue one frame; the transport sends it at once when the socket takes it.

        A frame for a link that has ended is dropped: `on_lost` reports the end.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def fail(self, error: Exception) -> None:
        """Close the link at once; `on_lost` gets the first error."""
        self._error = self._error or error
        self.close()

    def close(self) -> None:
        """Close the link at once; what is queued is lost."""
        if self._transport is not None:
            self._transport.abort()
