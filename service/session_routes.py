"""The routes about sessions: look, why, promote, demote, park, fork, drop, explain, resume.

A caller reaches the sessions of its own key and nobody else's: a foreign id is answered word for
word like one that never was. Nothing here is the operator's: no store, no lane, no other tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from batchengine.core import FORM_TEXT, BatchEngineError
from service import errors, generate, strict_json, verbs, work
from service.auth import check_content
from service.chat import ChatShape
from service.completions import CompletionShape
from service.state import CALLER, HEADERS, SERVICE, Live, Service

BODY_BYTES_MAX = 16 << 10
BODY_SECONDS_MAX = 10.0
LAST_EVENT = "Last-Event-ID"
TURN_CHARS_MAX = 128
TOKENS_MAX = 1 << 24

Label = Annotated[str, Meta(min_length=1, max_length=256)]


class MoveBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of promote and demote; `to` None = the best lane of the tier."""

    to: Label | None = None


class ParkBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of park: the call whose result will lead back to the session."""

    tool_call_id: Label | None = None


class ForkBody(msgspec.Struct, forbid_unknown_fields=True):
    """Of fork: the client's id for the copy; None = one is made."""

    session_id: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Expect = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


def add(app: web.Application, expect: Expect) -> None:
    """Every route of this module; `expect` answers the Expect header."""
    one = "/v1/sessions/{session}"
    app.router.add_get("/v1/sessions", _list, expect_handler=expect)
    app.router.add_get(one, _show, expect_handler=expect)
    app.router.add_delete(one, _drop, expect_handler=expect)
    app.router.add_get(one + "/why", _why, expect_handler=expect)
    for verb, handler in (
        ("promote", _promote), ("demote", _demote), ("park", _park), ("fork", _fork),
    ):  # fmt: skip
        app.router.add_post(f"{one}/{verb}", handler, expect_handler=expect)
    app.router.add_get("/v1/explain/{id}", _explain, expect_handler=expect)
    # no HEAD: it would take the turn over from its reader, and has no body to tell it in
    app.router.add_get("/v1/stream", _stream, allow_head=False, expect_handler=expect)


def _ready(request: web.Request) -> Service:
    """The service, once its engine can answer; raises 503."""
    service = request.app[SERVICE]
    work.check_serving(service.engine)
    return service


def _named(request: web.Request) -> tuple[Service, str, str, str]:
    """Service, tenant, session id in the engine, and the id as the caller wrote it."""
    service, tenant = _ready(request), request[CALLER].tenant
    given = request.match_info["session"]
    return service, tenant, verbs.own_session(service, tenant, given), given


async def _body(request: web.Request, kind: type[Body]) -> Body:
    """A small JSON body; none at all means the defaults."""
    if (request.content_length or 0) > BODY_BYTES_MAX:
        raise errors.body_too_large(BODY_BYTES_MAX)
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            data = await request.content.read(BODY_BYTES_MAX + 1)
            while len(data) <= BODY_BYTES_MAX and (
                more := await request.content.read(BODY_BYTES_MAX + 1)
            ):
                data += more
    except TimeoutError:
        raise errors.body_too_slow(BODY_SECONDS_MAX) from None
    if len(data) > BODY_BYTES_MAX:
        raise errors.body_too_large(BODY_BYTES_MAX)
    if not data:
        return kind()
    check_content(request.headers, request.content_type, request.charset)
    try:
        return msgspec.convert(strict_json.parse_object(data), kind, strict=True)
    except msgspec.ValidationError as error:
        why = str(error).replace("`", "")
        raise errors.invalid_field(
            None,
            "the body has a wrong value",
            why=why[:1].lower() + why[1:],
            fix="the body may hold " + (", ".join(kind.__struct_fields__) or "nothing"),
        ) from None


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def _list(request: web.Request) -> web.Response:
    """The caller's sessions that are in memory, or were interrupted."""
    service, tenant = _ready(request), request[CALLER].tenant
    rows = service.engine.sessions(tenant)
    return _json({"object": "list", "data": [verbs.public(row) for row in rows]})


async def _show(request: web.Request) -> web.Response:
    service, tenant, session_id, given = _named(request)
    return _json(await verbs.own_call(given, service.engine.session_detail(tenant, session_id)))


async def _why(request: web.Request) -> web.Response:
    service, tenant, session_id, given = _named(request)
    return _json(await verbs.own_call(given, service.engine.why(tenant, session_id)))


async def _drop(request: web.Request) -> web.Response:
    service, tenant, session_id, given = _named(request)
    return _json(await verbs.own_call(given, service.engine.drop(tenant, session_id)))


async def _promote(request: web.Request) -> web.Response:
    return await _move(request, "promote")


async def _demote(request: web.Request) -> web.Response:
    return await _move(request, "demote")


async def _move(request: web.Request, verb: str) -> web.Response:
    body = await _body(request, MoveBody)
    service, tenant, session_id, given = _named(request)
    return _json(
        await verbs.own_call(given, verbs.move(service, verb, tenant, session_id, body.to))
    )


async def _park(request: web.Request) -> web.Response:
    body = await _body(request, ParkBody)
    service, tenant, session_id, given = _named(request)
    call = verbs.park(service, tenant, session_id, body.tool_call_id)
    return _json(await verbs.own_call(given, call))


async def _fork(request: web.Request) -> web.Response:
    body = await _body(request, ForkBody)
    service, tenant, session_id, given = _named(request)
    call = verbs.fork(service, tenant, session_id, body.session_id)
    return _json(await verbs.own_call(given, call))


async def _explain(request: web.Request) -> web.Response:
    service, tenant = _ready(request), request[CALLER].tenant
    return _json(await verbs.explain_own(service, tenant, request.match_info["id"]))


# ---- GET /v1/stream ----


async def _stream(request: web.Request) -> web.StreamResponse:
    """The last turn of a session again, from token `from` of its answer on, and onwards.

    Whoever has tokens already says of which turn: another's are never told as their rest.
    """
    service, caller = _ready(request), request[CALLER]
    if not service.accepting:
        raise errors.draining()
    given = request.query.get("session_id") or request.headers.get("x-batchengine-session-id", "")
    if not given:
        raise errors.invalid_field(
            "session_id", "session_id is required", fix="GET /v1/stream?session_id=…&from=0"
        )
    turn_id, from_token = _place(request)
    session_id = verbs.own_session(service, caller.tenant, given)
    with service.place():
        try:
            generation = await service.engine.resume(caller.tenant, session_id, from_token, turn_id)
        except BatchEngineError as error:
            if error.http_status == verbs.NOT_FOUND:
                raise errors.unknown_session(strict_json.printable(given)) from None
            raise
        job = _job(service, request, generation.request)
        is_text = generation.request.form == FORM_TEXT  # as the request was that began the turn
        shape = CompletionShape(job) if is_text else ChatShape(job)
        headers = request[HEADERS]
        headers["x-batchengine-route"] = job.route
        headers["x-batchengine-session-id"] = generation.session_id or session_id
        live = service.enter(Live(job, [generation], time.monotonic()))
    outcome = "failed"

    def on_end(how: str) -> None:
        nonlocal outcome
        outcome = how

    try:
        return await generate.answer_stream(
            request, shape, [generation], headers, service.config.server, on_end,
            first_id=from_token,
        )  # fmt: skip
    finally:
        service.leave(live, f"resumed from {from_token}, {outcome}")


def _place(request: web.Request) -> tuple[str, int]:
    """(turn, tokens of it that the reader has): what it last saw wins over what it once asked for.

    The turn is "" = the last one, whichever that is, only for a reader that has nothing yet.
    """
    param, text = LAST_EVENT, request.headers.get(LAST_EVENT)
    turn_id = request.query.get("turn", "")
    if text is None:
        param, text = "from", request.query.get("from", "0")
    else:
        named, _, text = text.rpartition(":")
        turn_id = named or turn_id
    if not (text.isascii() and text.isdecimal() and len(text) <= 8) or int(text) > TOKENS_MAX:
        raise errors.invalid_field(
            param,
            f"{param} has a wrong value",
            why="it says how many tokens of the answer were received",
            fix="send all of the last id: line, or from=0",
        )
    if len(turn_id) > TURN_CHARS_MAX or not (turn_id.isascii() and turn_id.isprintable()):
        raise errors.invalid_field(
            "turn",
            "there is no such turn",
            why=f"its name is printable ASCII, {TURN_CHARS_MAX} characters at most",
            fix="send the part of the last id: line before the colon",
        )
    if int(text) and not turn_id:
        raise errors.invalid_field(
            "turn",
            f"tokens after {text} can only be told of a turn that is named",
            why="the session may have had another turn since, and its tokens would be taken for"
            " the rest of the first one's",
            fix=f"send all of the last id: line as {LAST_EVENT} (TURN:{text}), or turn=TURN beside"
            " the number; from=0 tells the last turn from its beginning",
        )
    return turn_id, int(text)


def _job(service: Service, request: web.Request, asked: work.GenerationRequest) -> work.Job:
    """The job of the turn that goes on: its own request id, class and seed."""
    return work.Job(
        request_id=asked.request_id,
        caller=request[CALLER],
        model=service.engine.info.model_id,
        created=int(time.time()),
        stream=True,
        include_usage=request.query.get("include_usage", "1") != "0",
        sla=asked.sla,
        session=None,
        route=work.route_name(service.engine),
        service_tier=None,
        seed=asked.sampling.seed,
        predict=lambda: service.engine.predicted(asked.request_id),
        requests=[asked],
    )
