"""Answers as HTTP: JSON bodies, and the status and the headers of each kind of error."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from batchengine.core import BatchEngineError, DaemonLoad, Kind, TimelineUse

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
# Headers of answers that clients of this daemon may read, and what they say.
ANSWER_HEADERS = {
    "x-request-id": "The request, as logs and `batchengine explain` name it",
    "x-batchengine-session-id": "The id of its session here, if the request named one",
    "x-batchengine-route": "Kinds of the daemon's lanes",
    "x-batchengine-class": "The class that it is served as",
    "x-batchengine-timeline": "How the messages relate to what the session has: "
    + ", ".join(f"`{use}`" for use in TimelineUse),
    "x-batchengine-warning": "`history-missing`: the client seems to send its newest message only",
    "x-batchengine-ignored-fields": "Fields of the body, and keywords of schemas, without effect",
    "x-batchengine-load": "The daemon's `requests_running`, `requests_waiting` and"
    " `kv_usage_ratio` (cpu) as the answer begins, for those who spread requests over hosts",
    "Retry-After": "Of 429 and 503: seconds until a repetition makes sense",
    "x-should-retry": "Of errors: whether a repetition makes sense; SDKs obey it",
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


def load_header(load: DaemonLoad) -> str:
    """The value of x-batchengine-load, a dictionary of RFC 8941."""
    running, waiting, ratio = load
    return f"requests_running={running}, requests_waiting={waiting}, kv_usage_ratio={ratio:.3f}"


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
