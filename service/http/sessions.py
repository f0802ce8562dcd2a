"""The routes about sessions: one per row of `service.operations`, the listing, and resume.

A caller reaches the sessions of its own key only: a foreign id is answered word for word like one
that does not exist. The operator's commands (store, lanes, other tenants) have no route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from batchengine import errors
from batchengine.core import BatchEngineError, Kind
from service import operations
from service.engine_api import Facts, check_serving
from service.http import relay
from service.http.access import check_changes, check_content
from service.http.admission import CALLER, HEADERS, SERVICE, Live, Service, read_body
from service.http.answers import json_answer
from service.http.routes.route import Route
from service.operations import OPERATIONS, Operation
from service.protocols import requests, schema, strict_json
from service.protocols.table import BY_NAME
from service.session_ids import printable

BODY_BYTES_MAX = 16 << 10
BODY_SECONDS_MAX = 10.0
LAST_EVENT = "Last-Event-ID"
TURN_CHARS_MAX = 128
TOKENS_MAX = 1 << 24
ROWS_AT_ONCE = 256  # of a listing, between two chances for other tasks


def _text(chars_max: int) -> Any:
    text: Any = Annotated[str, Meta(min_length=1, max_length=chars_max)]
    return text | None


def _route(operation: Operation) -> Route:
    """The route of one row."""
    fields: list[tuple[str, Any, Any]] = [
        (one.body, _text(one.chars_max), None) for one in operation.arguments
    ]
    body = msgspec.defstruct(operation.name, fields, forbid_unknown_fields=True)

    async def handle(request: web.Request) -> web.Response:
        given = await _body(request, body) if operation.method == "POST" else body()
        engine = _ready(request).engine
        subject = operations.own_subject(
            operation, engine, request[CALLER].tenant, request.match_info[operation.subject]
        )
        arguments = {one.name: getattr(given, one.body) for one in operation.arguments}
        found = await operations.perform(operation, engine, subject, arguments)
        # a session may have thousands of turns
        turns: Sequence[Facts] | None = found.get("turns")
        if turns is None:
            return json_answer(operations.public(found))
        answer = operations.public({**found, "turns": []})
        return json_answer(answer | {"turns": await _public_rows(turns)})

    takes_body = operation.method == "POST" and fields
    return Route(
        operation.method, operation.path, handle, operation.synopsis, "sessions",
        body if takes_body else None,
    )  # fmt: skip


def _ready(request: web.Request) -> Service:
    """The service, once its engine can answer; raises 503."""
    service = request.app[SERVICE]
    check_serving(service.engine)
    return service


async def _body(request: web.Request, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A small JSON body; none at all means the defaults."""
    data = await read_body(request, BODY_BYTES_MAX, BODY_SECONDS_MAX)
    if not data:
        return kind()
    check_content(request.headers, request.content_type, request.charset)
    return schema.convert(kind, strict_json.parse_object(data))


async def _list(request: web.Request) -> web.Response:
    """The caller's sessions that are in memory, or were interrupted."""
    service, tenant = _ready(request), request[CALLER].tenant
    rows = await _public_rows(service.engine.sessions(tenant))
    return json_answer({"object": "list", "data": rows})


async def _public_rows(rows: Sequence[Facts]) -> list[dict[str, Any]]:
    """The rows as their owner may see them; other tasks run meanwhile."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        found += map(operations.public, rows[start : start + ROWS_AT_ONCE])
        await asyncio.sleep(0)
    return found


# ---- GET /v1/stream ----


async def _stream(request: web.Request) -> web.StreamResponse:
    """Streams the last turn of a session again from token `from` of its answer, and what follows.

    A reader that has tokens names their turn: the tokens of another turn are never sent as its
    rest.
    """
    service, caller = _ready(request), request[CALLER]
    check_changes(request.headers)
    if not service.accepting:
        raise errors.DRAINING()
    given = request.query.get("session_id") or request.headers.get("x-batchengine-session-id", "")
    if not given:
        what, fix = "session_id is required", "GET /v1/stream?session_id=…&from=0"
        raise errors.INVALID_FIELD(param="session_id", what=what, fix=fix)
    turn_id, from_token, known = _position(request)
    with service.admit(caller.tenant):
        session_id = operations.own_session(service.engine, caller.tenant, given)
        try:
            generation = await service.engine.resume(caller.tenant, session_id, from_token, turn_id)
        except BatchEngineError as error:
            if error.kind is Kind.NOT_FOUND:
                raise errors.UNKNOWN_SESSION(given=printable(given)) from None
            raise
        asked = generation.request  # the turn's own, with its request id, class and seed
        include_usage = request.query.get("include_usage", "1") != "0"
        job = requests.job_again(asked, service.engine, service.config, include_usage=include_usage)
        formatter = BY_NAME[asked.form].formatter(job)
        headers = request[HEADERS]
        headers["x-batchengine-route"] = job.route
        headers["x-batchengine-session-id"] = generation.session_id or session_id
        live = service.enter(Live(job, [generation], time.monotonic()))
    try:
        return await relay.answer_stream(request, formatter, live, from_token, known)
    finally:
        service.leave(live, f"resumed from {from_token}, {live.outcome}")


def _position(request: web.Request) -> tuple[str, int, int]:
    """(turn, tokens of it that the reader has, events behind them); Last-Event-ID wins over `turn`
    and `from`.

    The turn is "" = the last one only for a reader that has no token yet.
    """
    param, text = LAST_EVENT, request.headers.get(LAST_EVENT)
    turn_id = request.query.get("turn", "")
    if text is None:
        param, text = "from", request.query.get("from", "0")
    else:
        named, _, text = text.rpartition(":")
        turn_id = named or turn_id
    text, point, events = text.partition(".")
    if not _is_count(text) or not _is_count(events if point else "0"):
        raise errors.INVALID_FIELD(
            param=param,
            what=f"{param} has a wrong value",
            why="it says how many tokens of the answer were received",
            fix="send all of the last id: line, or from=0",
        )
    if len(turn_id) > TURN_CHARS_MAX or not (turn_id.isascii() and turn_id.isprintable()):
        raise errors.INVALID_FIELD(
            param="turn",
            what="there is no such turn",
            why=f"its name is printable ASCII, {TURN_CHARS_MAX} characters at most",
            fix="send the part of the last id: line before the colon",
        )
    if int(text) and not turn_id:
        raise errors.INVALID_FIELD(
            param="turn",
            what=f"tokens after {text} can only be sent of a turn that is named",
            why="the session may have had another turn since, and its tokens would be taken for"
            " the rest of the first one's",
            fix=f"send all of the last id: line as {LAST_EVENT} (TURN:{text}), or turn=TURN beside"
            " the number; from=0 streams the last turn from its beginning",
        )
    return turn_id, int(text), int(events or "0")


def _is_count(text: str) -> bool:
    is_number = text.isascii() and text.isdecimal() and len(text) <= 8
    return is_number and int(text) <= TOKENS_MAX


ROUTES = (
    Route("GET", "/v1/sessions", _list, "The caller's sessions in memory.", "sessions"),
    *map(_route, OPERATIONS),
    Route(
        "GET", "/v1/stream", _stream, "The last turn of a session again, and what follows.",
        "sessions",
        query=(
            ("session_id", "an x-batchengine-session-id, or the client's own id"),
            ("from", "how many tokens of the answer the reader has; 0 = all are sent"),
            ("turn", "the part of the last id: line before the colon, beside `from`"),
            ("include_usage", "0 = without the usage chunk"),
        ),
        content=("text/event-stream",),
        head=False,  # it would take the turn over from its reader, and has no body for its events
    ),
)  # fmt: skip
