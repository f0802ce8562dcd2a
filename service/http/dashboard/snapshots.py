"""GET /api/live: a snapshot of the daemon each second, as server-sent events.

Every watcher of a key gets the same bytes. A snapshot holds the key's own sessions and requests,
ROWS_MAX of each at most, and the numbers of lanes, store and links that /health and /metrics have.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

import batchengine
from batchengine import errors
from batchengine.core import BatchEngineError
from service.http import sse
from service.http.admission import CALLER, HEADERS, SERVICE, Service
from service.http.routes.route import Route
from service.operations import public

PERIOD_S = 1.0
ROWS_MAX = 200
WATCHERS_MAX = 64  # of all keys
WATCHERS_OF_KEY_MAX = 16

_encode = msgspec.json.Encoder().encode


class Snapshots:
    """The snapshots of one application, and how many watch them."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}
        self.watchers: dict[str, int] = {}

    async def snapshot(self, service: Service, tenant: str) -> bytes:
        """The event of this moment, up to half a period old; one is made at a time."""
        async with self._making:
            made, event = self._made.get(tenant, (0.0, b""))
            if not event or time.monotonic() - made > PERIOD_S / 2:
                event = b"data: " + service.hide(_encode(await _facts(service, tenant))) + b"\n\n"
                self._made[tenant] = time.monotonic(), event
            return event

    def enter(self, tenant: str) -> None:
        """Counts a watcher; raises 503 when there are too many."""
        own, total = self.watchers.get(tenant, 0), sum(self.watchers.values())
        for running, what, limit in (
            (own, "dashboards of this key", WATCHERS_OF_KEY_MAX),
            (total, "dashboards", WATCHERS_MAX),
        ):
            if running >= limit:
                raise errors.TOO_MANY_REQUESTS(running=running, what=what, limit=limit)
        self.watchers[tenant] = own + 1

    def leave(self, tenant: str) -> None:
        """Ends what `enter` began."""
        self.watchers[tenant] -= 1
        if not self.watchers[tenant]:
            del self.watchers[tenant]
            self._made.pop(tenant, None)


SNAPSHOTS = web.AppKey("snapshots", Snapshots)


async def _facts(service: Service, tenant: str) -> dict[str, Any]:
    engine = service.engine
    state = engine.phase if service.accepting or engine.phase == "loading" else "draining"
    found: dict[str, Any] = {
        "version": batchengine.__version__,
        "state": state,
        "progress": round(engine.progress, 4),
    }
    if engine.phase == "loading":
        return found
    info = engine.info
    requests = service.request_rows(tenant, ROWS_MAX)
    await asyncio.sleep(0)  # other tasks run between the parts
    sessions = engine.sessions(tenant, ROWS_MAX)
    await asyncio.sleep(0)
    return found | {
        "at": round(time.time(), 3),
        "key": tenant,
        "model": info.model_id,
        "context_tokens": info.context_tokens,
        "fingerprint": info.fingerprint,
        "lanes": [public(lane) for lane in engine.lanes()],
        "stats": public(engine.stats()),
        "peers": await _peers(service),
        "n_requests": service.requests_of(tenant),
        "requests": [public(row) for row in requests],
        "sessions": [public(row) for row in sessions],
    }


async def _peers(service: Service) -> list[dict[str, Any]]:
    """One row per peer; none without peers."""
    if not service.engine.peer_names():
        return []
    try:
        rows = (await service.engine.peers())["peers"]
    except BatchEngineError:
        return []
    return [public(row) for row in rows]


async def _live(request: web.Request) -> web.StreamResponse:
    service, tenant = request.app[SERVICE], request[CALLER].tenant
    snapshots = request.app[SNAPSHOTS]
    snapshots.enter(tenant)
    stream = sse.EventStream(request, request[HEADERS], service.config.server.reader_stall_s)
    try:
        await stream.open()
        while service.engine.phase != "stopped":
            await stream.send(await snapshots.snapshot(service, tenant))
            await asyncio.sleep(PERIOD_S)
        await stream.close()
    except sse.SlowReader:
        stream.abort()
    except ConnectionResetError:
        pass  # the page was closed
    finally:
        snapshots.leave(tenant)
    return stream.response


ROUTES = (
    Route(
        "GET", "/api/live", _live, "A snapshot each second: lanes, own sessions and requests.",
        "dashboard", content=("text/event-stream",), head=False,
    ),
)  # fmt: skip
