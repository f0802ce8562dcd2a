"""Rows of requests for callers that poll, bounded in number and made at most twice a second for
all callers of a key together: what watching costs does not grow with the watchers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from service.engine_api import EngineApi, Facts

FRESH_S = 0.5


class Overview:
    """The requests of the engine by key, up to FRESH_S old."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._made: dict[tuple[str, int], tuple[float, Sequence[Facts]]] = {}

    def requests(self, tenant: str, count_max: int) -> Sequence[Facts]:
        """One row per request of the tenant that has not ended; `count_max` of them at most."""
        made, rows = self._made.get((tenant, count_max), (0.0, ()))
        now = time.monotonic()
        if now - made > FRESH_S:
            rows = self._engine.requests(tenant, count_max)
            self._made[tenant, count_max] = now, rows
        return rows
