"""Answers as HTTP: JSON bodies, and the status and the headers of each kind of error."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from batchengine.core import BatchEngineError, Kind

STATUS: dict[Kind, int] = {  # of the answer to an error
    Kind.INVALID: 400,
    Kind.UNAUTHENTICATED: 401,
    Kind.FORBIDDEN: 403,
    Kind.NOT_FOUND: 404,
    Kind.MISSING: 404,
    Kind.METHOD: 405,
    Kind.TIMEOUT: 408,
    Kind.CONFLICT: 409,
    Kind.TOO_LARGE: 413,
    Kind.MEDIA_TYPE: 415,
    Kind.BUSY: 429,
    Kind.INTERNAL: 500,
    Kind.UNAVAILABLE: 503,
}
RETRY_MS = 1000  # where an error that passes by itself names no time
# Names of errors that refuse a request before any work of it, since the daemon has too much.
SATURATED = {"overloaded", "too_many_requests", "too_many_connections", "too_many_bodies"}


def json_answer(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A whole answer of JSON."""
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        headers=headers,
        content_type="application/json",
    )


def error_headers(error: BatchEngineError) -> dict[str, str]:
    """Retry headers that the OpenAI and Anthropic SDKs obey, only where a retry makes sense; of a
    daemon that is full, the reason as llm-d's routers read it."""
    if error.kind not in (Kind.BUSY, Kind.UNAVAILABLE):
        headers = {"x-should-retry": "false"}
    else:
        retry_ms = RETRY_MS if error.retry_ms is None else max(1, error.retry_ms)
        headers = {
            "Retry-After": str(-(-retry_ms // 1000)),
            "retry-after-ms": str(retry_ms),
            "x-should-retry": "true",
        }
    if error.name in SATURATED:
        headers["x-llm-d-request-dropped-reason"] = "rejected-saturated"
    if error.kind is Kind.METHOD:
        headers["Allow"] = str(error.details["allowed"])
    if error.kind is Kind.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = 'Bearer realm="batchengine"'
    return headers
