"""Rows about the running engine for callers that poll: made at most twice a second for all of
them together, so that watchers cost the event loop nothing that grows with their number."""

from __future__ import annotations

import time
from collections.abc import Sequence

from service.engine_api import EngineApi, Facts

FRESH_S = 0.5


class Overview:
    """The engine's requests and sessions, up to FRESH_S old."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._requests: tuple[float, Sequence[Facts]] = (0.0, ())
        self._sessions: tuple[float, dict[str, list[Facts]]] = (0.0, {})

    async def requests(self) -> Sequence[Facts]:
        """One row per request that has not ended, of every tenant."""
        made, rows = self._requests
        if time.monotonic() - made > FRESH_S:
            rows = self._engine.requests()
            self._requests = time.monotonic(), rows
        return rows
