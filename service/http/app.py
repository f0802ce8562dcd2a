"""The HTTP application: routes, the checks in front of them, and how errors are answered.

Owns the way from a parsed HTTP request to its answer. Refuses every request to an
unlisted host, without a key where keys exist, or with a body that is not plain JSON; nothing
whose cost grows with the input runs on the event loop.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from batchengine import errors
from batchengine.config import keys
from batchengine.core import BatchEngineError, Kind
from service.engine_api import EngineApi, check_serving
from service.http import appending, relay, sessions
from service.http.access import address_of, has_key
from service.http.admission import (
    CALLER,
    HEADERS,
    REQUEST_ID,
    SERVICE,
    Live,
    Service,
    prompt_limits,
    read_json_body,
)
from service.http.answers import STATUS, error_headers, json_answer, load_header
from service.http.dashboard import page, snapshots
from service.http.routes import models, openapi, queue, responses, route, texts, unbuilt
from service.http.routes.route import Route
from service.protocols import carriers, reading, requests
from service.protocols.formatter import Formatter
from service.protocols.messages.protocol import MESSAGES, unknown_betas
from service.protocols.protocol import Protocol
from service.protocols.table import BY_ROUTE, protocol_of
from service.session_ids import is_kept

log = logging.getLogger("batchengine.service")

UNREAD = (errors.TOO_MANY_BODIES.code, errors.MALFORMED_HTTP.code)  # the body, or its rest
HEADER_IGNORED = "x-batchengine-ignored-fields"
_FIELD_NAME = re.compile(r"[\w.\[\]$-]{1,64}", re.ASCII)
_TARGET = re.compile(r"[!-~]{1,4096}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,1024}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CORS_SECONDS = 600  # in which a page need not ask again
GENERATED = ("application/json", "text/event-stream")


def build(service: Service) -> web.Application:
    """The application with every route; ready for `service.http.listener`."""
    app = web.Application(
        middlewares=[_answer_errors, _guard], client_max_size=service.config.server.body_bytes_max
    )
    app[SERVICE] = service
    app.on_response_prepare.append(_name_server)
    for row in ROUTES:
        route.add(app, row, _expect)
    app[snapshots.SNAPSHOTS] = snapshots.Snapshots()
    app[openapi.DOCUMENT] = openapi.document(ROUTES, has_keys=bool(service.config.auth))
    # aiohttp's own 404 and 405 would answer Expect in front of `_guard`
    app.router.add_route("*", "/{rest:.*}", _nowhere, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Answers the `Expect` header, before any middleware, of requests that will pass `_guard`.

    All others go on to `_guard`, which refuses them without their body.
    """
    service = request.app[SERVICE]
    try:
        service.origin_policy.check(request.headers)
        caller = service.keyring.identify(request.headers)
    except BatchEngineError:
        return None
    address = address_of(request.transport and request.transport.get_extra_info("peername"))
    if service.config.auth and service.attempts.must_wait(address, caller, time.monotonic()):
        return None  # an answer now would show that the key is right
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _error_response(request, errors.MALFORMED_HTTP(), 417)
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    return None


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "batchengine"  # not which version of which library


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every failure into an error object; every answer gets its x-request-id."""
    request_id = request[REQUEST_ID] = requests.new_request_id()
    headers: dict[str, str] = {"x-request-id": request_id}
    if protocol_of(request.path, request.headers) is MESSAGES:
        headers["request-id"] = request_id
    request[HEADERS] = headers
    try:
        response = await handler(request)
    except ConnectionResetError:
        raise  # the client is gone
    except Exception as error:
        if request.writer.output_size > 0:  # a second answer would be read as part of the first
            log.error("request %s failed in the middle of its answer", request_id)
            if request.transport is not None:
                request.transport.abort()
            raise
        response = _error_response(request, *_error_of(request, error))
        _without_folders(request.app[SERVICE], response)
    if not response.prepared:
        for name, value in headers.items():
            response.headers.setdefault(name, value)
    return response


def _without_folders(service: Service, response: web.Response) -> web.Response:
    """The answer, with the names of files instead of their paths on this machine."""
    if isinstance(response.body, bytes):
        response.body = service.hide(response.body)
    return response


def _error_of(request: web.Request, error: Exception) -> tuple[BatchEngineError, int]:
    """The error that answers `error`, and its status."""
    if isinstance(error, web.HTTPException):
        return _http_error(request, error), max(400, error.status)
    if not isinstance(error, BatchEngineError):
        log.error("request %s failed", request[REQUEST_ID], exc_info=error)
        error = errors.INTERNAL_ERROR(request_id=request[REQUEST_ID])
    return error, STATUS[error.kind]


def _error_response(request: web.Request, error: BatchEngineError, status: int) -> web.Response:
    protocol = protocol_of(request.path, request.headers)
    body = protocol.error(error, request.get(REQUEST_ID, ""))
    response = json_answer(body, status, error_headers(error))
    if status in (408, 413, 417) or error.code in UNREAD:
        response.force_close()  # the rest of the body is not worth reading
    return response


def _http_error(request: web.Request, error: web.HTTPException) -> BatchEngineError:
    """The catalogue's error for a refusal of aiohttp itself."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = sorted(error.allowed_methods)
        usable = " or ".join(name for name in allowed if name != "HEAD")
        return errors.WRONG_METHOD(method=request.method, usable=usable, allowed=", ".join(allowed))
    if error.status == 404:
        path = request.path if _TARGET.fullmatch(request.path) else "there"
        return unbuilt.refusal(request.method, path, PATHS)
    return errors.MALFORMED_HTTP()


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Checks Host, Origin and API key before any route; also before 404 and 405."""
    service, now = request.app[SERVICE], time.monotonic()
    service.origin_policy.check(request.headers)
    request[HEADERS] |= service.origin_policy.consent(request.headers)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return _preflight(request)
    if request.match_info.handler in KEYLESS or _is_keyless(request):
        return await handler(request)
    address = address_of(request.transport and request.transport.get_extra_info("peername"))
    try:
        caller = service.keyring.identify(request.headers)
    except BatchEngineError:
        await service.attempts.wait(address, None, now)
        raise
    if service.config.auth:
        await service.attempts.wait(address, caller, now)
    request[CALLER] = caller
    if not keys.is_alone(service.config, caller.tenant):
        await service.fair_admission.begin(caller.tenant)
    return await handler(request)


def _preflight(request: web.Request) -> web.Response:
    """The answer to a browser that asks, without a key, what a page of an allowed origin may
    send; for the page of this daemon there is nothing to ask."""
    asked = request.headers.get("Access-Control-Request-Headers", "")
    allowed = asked if _HEADER_NAMES.fullmatch(asked) else "*"
    headers = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
        "Access-Control-Allow-Headers": allowed,
        "Access-Control-Max-Age": str(CORS_SECONDS),
    }
    return web.Response(status=204, headers=headers)


def _is_keyless(request: web.Request) -> bool:
    """Whether this is a probe without a key, on a route that needs none."""
    service = request.app[SERVICE]
    return (
        bool(service.config.auth)
        and request.method in ("GET", "HEAD")
        and request.path in service.config.server.keyless_routes
        and not (has_key(request.headers) or request.can_read_body)
    )


async def _admit(request: web.Request, protocol: Protocol[Any]) -> tuple[Formatter, Live]:
    """Reads, checks and submits a request; its body is released on return."""
    service = request.app[SERVICE]
    engine, config = service.engine, service.config
    with service.admit(request[CALLER].tenant) as admission:
        data = await read_json_body(request, admission)
        if not service.accepting:
            raise errors.DRAINING()
        check_serving(engine)
        strict = config.server.strict_fields or request.query.get("strict") == "1"
        appends = carriers.appends(request.headers, request[CALLER], config)
        limits = msgspec.structs.replace(prompt_limits(service), append=appends)
        question = reading.Question(protocol.name, limits, strict)
        found = await responses.read(engine, request[CALLER].tenant, question, data)
        lost = await _check_constraint(engine, found, request[CALLER].tenant)
        ignored = [*found.ignored, *unknown_betas(request.headers), *lost]
        for name in ignored:
            engine.metrics.count_ignored_field(name, request[CALLER].tenant)
        if named := [name for name in ignored if _FIELD_NAME.fullmatch(name)]:
            request[HEADERS][HEADER_IGNORED] = ", ".join(named)
        job = requests.open_job(
            protocol.name, found.fields, request.headers, request[CALLER], engine, config,
            request[REQUEST_ID],
        )  # fmt: skip
        prompt, _ = await appending.followed(
            engine, request[CALLER].tenant, found.prompt, job.asked.session_id
        )
        requests.fill(job, found.fields, prompt, engine.info)
        generations = await requests.submit_all(engine, job)
        live = service.enter(Live(job, generations, time.monotonic()))
        return protocol.formatter(job), live


async def _check_constraint(engine: EngineApi, found: reading.Reading, tenant: str) -> list[str]:
    """The keywords of schemas that the answer may break, as fields; raises 400 for a constraint
    that answers cannot follow."""
    constraint, param = found.prompt.constraint, found.prompt.constraint_param
    if constraint is None:
        return []
    try:
        lost = await engine.text.check(constraint, found.constraint_digest, tenant=tenant)
        return [f"{param}.{name}" for name in lost]
    except BatchEngineError as error:
        if error.kind is Kind.INVALID:
            error.param = param
        raise


async def _generate(request: web.Request) -> web.StreamResponse:
    """One generation request: check, admit, answer."""
    service = request.app[SERVICE]
    formatter, live = await _admit(request, BY_ROUTE[request.path])
    job, generations = live.job, live.generations
    headers = request[HEADERS]
    headers["x-batchengine-route"] = job.route
    headers["x-batchengine-class"] = job.asked.sla.sla_class.value
    headers["x-batchengine-load"] = load_header(service.engine.load())
    session_id = generations[0].session_id or job.asked.session_id or ""
    if is_kept(session_id):
        headers["x-batchengine-session-id"] = session_id
    if (found := job.requests[0].found) is not None:
        headers["x-batchengine-timeline"] = found.use.value
        if found.is_history_missing:
            headers["x-batchengine-warning"] = "history-missing"
    if responses.is_background(job):
        return await responses.in_background(request, formatter, live)
    try:
        if not job.stream:
            return await relay.answer_whole(request, formatter, live)
        can_resume = len(generations) == 1 and generations[0].request.session_id is not None
        return await relay.answer_stream(request, formatter, live, 0 if can_resume else None)
    finally:
        service.leave(live, live.outcome)


async def _health(request: web.Request) -> web.Response:
    """200 only when a request sent now would be computed; details for callers with a key only."""
    service = request.app[SERVICE]
    status, is_well = _status(service)
    if CALLER not in request or service.engine.phase == "loading":
        return _probe_answer(service, status, is_well)
    lanes = [{k: v for k, v in lane.items() if k != "pid"} for lane in service.engine.lanes()]
    body: dict[str, object] = {"status": status, "lanes": lanes, **service.engine.stats()}
    return _without_folders(service, _probe(body, is_well))


async def _ready(request: web.Request) -> web.Response:
    """The status and nothing else."""
    service = request.app[SERVICE]
    return _probe_answer(service, *_status(service))


def _status(service: Service) -> tuple[str, bool]:
    """The state of the daemon in a word, and whether a request sent now would be computed."""
    engine = service.engine
    if engine.phase == "loading":
        return "loading model", False
    state = engine.phase if service.accepting else "draining"
    if engine.fatal is not None:
        return "failed", False
    return "ok" if state == "ready" else state, state in ("ready", "degraded")


def _probe_answer(service: Service, status: str, is_well: bool) -> web.Response:
    body: dict[str, object] = {"status": status}
    if service.engine.phase == "loading":
        return _probe(body | {"progress": round(service.engine.progress, 4)}, is_well, 1)
    return _probe(body, is_well)


def _probe(body: dict[str, object], is_well: bool, retry_s: int = 5) -> web.Response:
    if is_well:
        return json_answer(body)
    return json_answer(body, 503, {"Retry-After": str(retry_s)})


async def _metrics(request: web.Request) -> web.Response:
    text, content_type = request.app[SERVICE].engine.metrics.render()
    return web.Response(body=text, headers={"Content-Type": content_type})


async def _nowhere(request: web.Request) -> web.Response:
    """Raises 405 where another method has a route, else 404."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        allowed |= (await resource.resolve(request))[1]
    if allowed := allowed - {"*"}:  # "*" is this route
        raise web.HTTPMethodNotAllowed(request.method, allowed)
    raise web.HTTPNotFound


_STRICT = (("strict", "1 = refuse fields that the daemon does not know"),)

ROUTES = (
    *(
        Route(
            "POST", path, _generate, f"Generates: {one.body.__name__} in, an answer or its events"
            " out.", "generation", one.body, _STRICT, GENERATED,
        )
        for path, one in BY_ROUTE.items()
    ),
    *texts.ROUTES,
    *models.ROUTES,
    *sessions.ROUTES,
    Route("GET", "/ready", _ready, "As /health, without details.", "operation"),
    *responses.ROUTES,
    Route("GET", "/health", _health, "200 = a request sent now is computed.", "operation"),
    Route(
        "GET", "/metrics", _metrics, "Numbers for Prometheus.", "operation",
        content=("text/plain",),
    ),
    *queue.ROUTES,
    *openapi.ROUTES,
    *page.ROUTES,
    *snapshots.ROUTES,
)  # fmt: skip
KEYLESS = frozenset(row.handler for row in ROUTES if not row.needs_key)
PATHS = tuple(dict.fromkeys(row.path for row in ROUTES))
