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

from aiohttp import HttpVersion11, web

import batchengine
from batchengine import errors
from batchengine.config import keys
from batchengine.core import BatchEngineError
from service.engine_api import check_serving
from service.http import relay, sessions
from service.http.access import address_of, check_content
from service.http.admission import (
    CALLER,
    HEADERS,
    REQUEST_ID,
    SERVICE,
    Admission,
    Live,
    Service,
    read_body,
)
from service.http.answers import STATUS, error_headers, json_answer
from service.protocols import carriers, reading, requests
from service.protocols.formatter import Formatter
from service.protocols.openai.chat import CHAT
from service.protocols.protocol import PromptLimits, Protocol
from service.protocols.table import BY_ROUTE
from service.session_ids import printable

log = logging.getLogger("batchengine.service")

BODY_SECONDS_MAX = 60.0  # a body that takes longer is an attack or a dead link
UNREAD = (errors.TOO_MANY_BODIES.code, errors.MALFORMED_HTTP.code)  # the body, or its rest
UNKNOWN_COUNTED_MAX = 64  # names of ignored fields that one body adds to the metrics
_TARGET = re.compile(r"[!-~]{1,4096}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

NOT_BUILT = (
    "responses", "messages", "embeddings", "rerank", "moderations", "batches", "files", "uploads",
    "assistants", "threads", "vector_stores", "audio/{rest:.*}", "images/{rest:.*}",
    "fine_tuning/{rest:.*}",
)  # fmt: skip


def build(service: Service) -> web.Application:
    """The application with every route; ready for `service.http.listener`."""
    app = web.Application(
        middlewares=[_answer_errors, _guard], client_max_size=service.config.server.body_bytes_max
    )
    app[SERVICE] = service
    app.on_response_prepare.append(_name_server)
    for route in BY_ROUTE:
        app.router.add_post(route, _generate, expect_handler=_expect)
    app.router.add_get("/v1/models", _models, expect_handler=_expect)
    app.router.add_get("/v1/models/{model:.+}", _model, expect_handler=_expect)
    app.router.add_get("/models", _models, expect_handler=_expect)
    app.router.add_get("/health", _health, expect_handler=_expect)
    app.router.add_get("/metrics", _metrics, expect_handler=_expect)
    app.router.add_get("/props", _props, expect_handler=_expect)
    sessions.add(app, _expect)
    for path in NOT_BUILT:
        app.router.add_route("*", f"/v1/{path}", _not_built, expect_handler=_expect)
        if "{" not in path:
            app.router.add_route("*", f"/v1/{path}/{{rest:.*}}", _not_built, expect_handler=_expect)
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
        return _error_response(errors.MALFORMED_HTTP(), 417, request.path)
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
        response = _error_response(*_error_of(request, error), request.path)
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


def _error_response(error: BatchEngineError, status: int, path: str) -> web.Response:
    """The error object of the protocol that `path` belongs to; of other paths OpenAI's."""
    body = BY_ROUTE.get(path, CHAT).error(error)
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
        return errors.UNKNOWN_ROUTE(method=request.method, path=path)
    return errors.MALFORMED_HTTP()


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Checks Host, Origin and API key before any route; also before 404 and 405."""
    service, now = request.app[SERVICE], time.monotonic()
    service.origin_policy.check(request.headers)
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


async def _read_body(request: web.Request, admission: Admission) -> bytearray:
    """The bytes of a POST, never more than allowed; raises 400, 408, 413, 415 or 503."""
    check_content(request.headers, request.content_type, request.charset)
    service = request.app[SERVICE]
    bytes_max = service.config.server.body_bytes_max
    if service.engine.phase != "loading":
        bytes_max = min(bytes_max, requests.body_bytes_max(service.engine.info.context_tokens))
    return await read_body(request, bytes_max, BODY_SECONDS_MAX, admission)


async def _admit(request: web.Request, protocol: Protocol[Any]) -> tuple[Formatter, Live]:
    """Reads, checks and submits a request; its body is released on return."""
    service = request.app[SERVICE]
    engine, config = service.engine, service.config
    with service.admit(request[CALLER].tenant) as admission:
        data = await _read_body(request, admission)
        if not service.accepting:
            raise errors.DRAINING()
        check_serving(engine)
        info = engine.info
        limits = PromptLimits(
            info.context_tokens, info.vocab_size, config.limits.tokens_max_default
        )
        strict = config.server.strict_fields or request.query.get("strict") == "1"
        question = reading.encode(reading.Question(protocol.name, limits, strict))
        answer = await engine.text.read(question, memoryview(data), tenant=request[CALLER].tenant)
        found = reading.decode_reading(answer)
        for name in found.ignored[:UNKNOWN_COUNTED_MAX]:
            engine.metrics.count_ignored_field(name)
        job = requests.open_job(
            protocol.name, found.fields, request.headers, request[CALLER], engine, config,
            request[REQUEST_ID],
        )  # fmt: skip
        requests.fill(job, found.fields, found.prompt(), info)
        generations = await requests.submit_all(engine, job)
        live = service.enter(Live(job, generations, time.monotonic()))
        return protocol.formatter(job), live


async def _generate(request: web.Request) -> web.StreamResponse:
    """One generation request: check, admit, answer."""
    service = request.app[SERVICE]
    formatter, live = await _admit(request, BY_ROUTE[request.path])
    job, generations = live.job, live.generations
    headers = request[HEADERS]
    headers["x-batchengine-route"] = job.route
    headers["x-batchengine-class"] = job.asked.sla.sla_class.value
    session_id = generations[0].session_id or job.asked.session_id
    if session_id:
        headers["x-batchengine-session-id"] = session_id
    try:
        if not job.stream:
            return await relay.answer_whole(request, formatter, live)
        can_resume = len(generations) == 1 and generations[0].request.session_id is not None
        return await relay.answer_stream(request, formatter, live, 0 if can_resume else None)
    finally:
        service.leave(live, live.outcome)


def _model_row(service: Service, name: str) -> dict[str, object]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "batchengine",
        "context_length": info.context_tokens,
        "max_model_len": info.context_tokens,
        "meta": {
            "n_ctx": info.context_tokens,
            "n_ctx_train": info.context_trained,
            "n_params": info.n_params,
            "n_vocab": info.vocab_size,
            "size": info.file_bytes,
            "architecture": info.arch,
            "quantisation": info.quantisation,
        },
        "capabilities": ["completion", *(["chat"] if info.has_chat_template else [])],
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": {"value": "loaded"},
        "class": str(carriers.alias_class(name) or service.config.sla.default_class),
    }


def _served(service: Service) -> list[str]:
    if service.engine.phase == "loading":
        raise errors.LOADING(progress=service.engine.progress)
    return carriers.model_names(service.engine.info.model_id, service.config.model.aliases)


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    rows = [_model_row(service, name) for name in _served(service)]
    return json_answer({"object": "list", "data": rows})


async def _model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked = request.match_info["model"]
    names = _served(service)
    if asked not in names:
        asked = printable(asked)
        raise errors.UNKNOWN_MODEL(asked=asked, served=", ".join(names))
    return json_answer(_model_row(service, asked))


async def _health(request: web.Request) -> web.Response:
    """200 only when a request sent now would be computed."""
    service = request.app[SERVICE]
    engine = service.engine
    state = engine.phase if service.accepting or engine.phase == "loading" else "draining"
    if state == "loading":
        body = {"status": "loading model", "progress": round(engine.progress, 4)}
        return json_answer(body, 503, {"Retry-After": "1"})
    lanes = [{k: v for k, v in lane.items() if k != "pid"} for lane in engine.lanes()]
    body = {"status": "ok" if state == "ready" else state, "lanes": lanes, **engine.stats()}
    if engine.fatal is not None:
        body["status"] = "failed"
    is_well = state in ("ready", "degraded") and engine.fatal is None
    response = json_answer(body) if is_well else json_answer(body, 503, {"Retry-After": "5"})
    return _without_folders(service, response)


async def _metrics(request: web.Request) -> web.Response:
    text, content_type = request.app[SERVICE].engine.metrics.render()
    return web.Response(body=text, headers={"Content-Type": content_type})


async def _props(request: web.Request) -> web.Response:
    """The properties that llama-server clients read: context size and template features."""
    service = request.app[SERVICE]
    _served(service)
    info = service.engine.info
    return json_answer(
        {
            "default_generation_settings": {
                "n_ctx": info.context_tokens,
                "params": {"max_tokens": -1, "n_predict": -1, "temperature": 1.0, "top_p": 1.0},
            },
            "total_slots": service.config.lanes[0].entries_max,
            "model_alias": info.model_id,
            "model_path": info.path.rpartition("/")[2],  # the name, not where it lies
            "modalities": {"vision": False, "audio": False},
            "chat_template_caps": {
                "supports_tools": info.has_chat_template,
                "supports_tool_calls": False,
                "supports_typed_content": True,
                "supports_reasoning_effort": False,
            },
            "build_info": f"batchengine {batchengine.__version__}",
        }
    )


async def _not_built(request: web.Request) -> web.Response:
    raise errors.NOT_SUPPORTED(path=request.path)


async def _nowhere(request: web.Request) -> web.Response:
    """Raises 405 where another method has a route, else 404."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        allowed |= (await resource.resolve(request))[1]
    if allowed := allowed - {"*"}:  # "*" is this route
        raise web.HTTPMethodNotAllowed(request.method, allowed)
    raise web.HTTPNotFound
