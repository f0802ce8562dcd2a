"""GET /api/queue: the caller's requests, their places in the queue and when they should begin."""

from __future__ import annotations

from aiohttp import web

from service.engine_api import check_serving
from service.http.admission import CALLER, SERVICE
from service.http.answers import json_answer
from service.http.routes.route import Route
from service.operations import public

ROWS_MAX = 200
ROWS_SEARCHED = 1000  # for a named request or session


async def _queue(request: web.Request) -> web.Response:
    service, tenant = request.app[SERVICE], request[CALLER].tenant
    check_serving(service.engine)
    named = request.query.get("request_id") or request.query.get("session_id")
    rows = service.request_rows(tenant, ROWS_SEARCHED if named else ROWS_MAX)
    own = [
        row for row in rows if named is None or named in (row["request_id"], row.get("session_id"))
    ]
    lanes = service.engine.lanes()
    return json_answer(
        {
            "object": "queue",
            "running": sum(int(lane.get("running", 0)) for lane in lanes),
            "waiting": sum(int(lane.get("waiting", 0)) for lane in lanes),
            "requests": len(own) if named else service.requests_of(tenant),
            "data": [public(row) for row in own],
        }
    )


ROUTES = (
    Route(
        "GET", "/api/queue", _queue, "The caller's requests: place in the queue, ETA, progress.",
        "operation",
        query=(
            ("request_id", "only this request, an x-request-id"),
            ("session_id", "only this session, an x-batchengine-session-id"),
        ),
    ),
)  # fmt: skip
