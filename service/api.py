"""The HTTP application: routes, the checks in front of them, and errors in one shape.

Owns what happens between a parsed HTTP request and an answer. Refuses every request to an
unlisted host, without a key where keys exist, or with a body that is not plain JSON; nothing
whose cost grows with the input runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

import batchengine
from batchengine.core import BatchEngineError
from service import (
    chat,
    completions,
    errors,
    generate,
    schema,
    session_routes,
    sla,
    strict_json,
    work,
)
from service.auth import check_content
from service.door import Engine
from service.shape import Shape
from service.state import CALLER, HEADERS, REQUEST_ID, SERVICE, Live, Place, Service

log = logging.getLogger("batchengine.service")

BODY_SECONDS_MAX = 60.0  # a body that takes longer is an attack or a dead link
UNKNOWN_COUNTED_MAX = 64  # more names in one body are noise, not a client's habit
_TARGET = re.compile(r"[!-~]{1,4096}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Prepare = Callable[[work.Job, Any, Engine, int], Awaitable[Shape]]  # Any: the body of its route

NOT_BUILT = (
    "responses",
    "messages",
    "embeddings",
    "rerank",
    "moderations",
    "batches",
    "files",
    "uploads",
    "assistants",
    "threads",
    "vector_stores",
    "audio/{rest:.*}",
    "images/{rest:.*}",
    "fine_tuning/{rest:.*}",
)


def build(service: Service) -> web.Application:
    """The application with every route; ready for `service.listen`."""
    app = web.Application(
        middlewares=[_shape_errors, _guard], client_max_size=service.config.server.body_bytes_max
    )
    app[SERVICE] = service
    app.on_response_prepare.append(_name_server)
    app.router.add_post("/v1/chat/completions", _chat, expect_handler=_expect)
    app.router.add_post("/v1/completions", _completions, expect_handler=_expect)
    app.router.add_get("/v1/models", _models, expect_handler=_expect)
    app.router.add_get("/v1/models/{model:.+}", _model, expect_handler=_expect)
    app.router.add_get("/models", _models, expect_handler=_expect)
    app.router.add_get("/health", _health, expect_handler=_expect)
    app.router.add_get("/metrics", _metrics, expect_handler=_expect)
    app.router.add_get("/props", _props, expect_handler=_expect)
    session_routes.add(app, _expect)
    for path in NOT_BUILT:
        app.router.add_route("*", f"/v1/{path}", _not_built, expect_handler=_expect)
        if "{" not in path:
            app.router.add_route("*", f"/v1/{path}/{{rest:.*}}", _not_built, expect_handler=_expect)
    # aiohttp's own 404 and 405 would answer Expect in front of `_guard`
    app.router.add_route("*", "/{rest:.*}", _nowhere, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """`Expect`, which aiohttp asks about before any middleware: only who may come in is waved on.

    Everybody else goes on to `_guard`, which refuses them without their body.
    """
    service = request.app[SERVICE]
    try:
        service.doorkeeper.check(request.headers)
        service.keyring.identify(request.headers)
    except BatchEngineError:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _error_response(errors.malformed_http(417))
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun
    return None


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "batchengine"  # not which version of which library


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure becomes an error object; every answer names its request."""
    request_id = request[REQUEST_ID] = work.new_request_id()
    headers: dict[str, str] = {"x-request-id": request_id}
    request[HEADERS] = headers
    try:
        response = await handler(request)
    except ConnectionResetError:
        raise  # nobody is left to answer
    except Exception as error:
        if request.writer.output_size > 0:  # a second answer would be read as part of the first
            log.error("request %s failed in the middle of its answer", request_id)
            if request.transport is not None:
                request.transport.abort()
            raise
        response = _error_response(_error_of(request, error))
    if not response.prepared:
        for name, value in headers.items():
            response.headers.setdefault(name, value)
    return response


def _error_of(request: web.Request, error: Exception) -> BatchEngineError:
    if isinstance(error, BatchEngineError):
        return error
    if isinstance(error, web.HTTPException):
        return _http_error(request, error)
    log.error("request %s failed", request[REQUEST_ID], exc_info=error)
    return errors.internal(request[REQUEST_ID])


def _error_response(error: BatchEngineError) -> web.Response:
    response = web.Response(
        status=error.http_status,
        body=errors.error_bytes(error),
        content_type="application/json",
        headers=errors.error_headers(error),
    )
    if error.http_status in (408, 413, 417) or error.api_code == "too_many_bodies":
        response.force_close()  # the rest of the body is not worth reading
    return response


def _http_error(request: web.Request, error: web.HTTPException) -> BatchEngineError:
    """aiohttp's own refusals in our words."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return errors.wrong_method(request.method, sorted(error.allowed_methods))
    if error.status == 404:
        path = request.path if _TARGET.fullmatch(request.path) else "there"
        return errors.unknown_route(request.method, path)
    return errors.malformed_http(error.status if error.status >= 400 else 400)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Host, Origin, key and content headers, before any route; also before 404 and 405."""
    service = request.app[SERVICE]
    service.doorkeeper.check(request.headers)
    request[CALLER] = service.keyring.identify(request.headers)
    return await handler(request)


async def _read_body(request: web.Request, place: Place) -> bytearray:
    """The bytes of a POST, never more than allowed; raises 400, 408, 413, 415 or 503."""
    check_content(request.headers, request.content_type, request.charset)
    service = request.app[SERVICE]
    bytes_max = service.config.server.body_bytes_max
    if service.engine.state != "loading":
        bytes_max = min(bytes_max, work.body_bytes_max(service.engine.info.context_tokens))
    if (request.content_length or 0) > bytes_max:
        raise errors.body_too_large(bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            while part := await request.content.readany():  # a chunked one has told no length
                place.hold(len(part))
                body += part
                if len(body) > bytes_max:
                    raise errors.body_too_large(bytes_max)
    except TimeoutError:
        raise errors.body_too_slow(BODY_SECONDS_MAX) from None
    return body


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _generate(request, schema.ChatRequest, chat.prepare)


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, schema.CompletionRequest, completions.prepare)


async def _admit(
    request: web.Request, kind: type[schema.Body], prepare: Prepare
) -> tuple[Shape, Live]:
    """From the body to running generations; the body is forgotten on return."""
    service = request.app[SERVICE]
    engine, config = service.engine, service.config
    with service.place() as place:
        data = await _read_body(request, place)
        if not service.accepting:
            raise errors.draining()
        work.check_serving(engine)
        body, unknown = await strict_json.off_loop(len(data), schema.decode_request, kind, data)
        strict = config.server.strict_fields or request.query.get("strict") == "1"
        if unknown and strict:
            raise errors.unknown_fields(unknown)
        for name in unknown[:UNKNOWN_COUNTED_MAX]:
            engine.metrics.count_ignored_field(name)
        caller, request_id = request[CALLER], request[REQUEST_ID]
        job = work.open_job(body, request.headers, caller, engine, config, request_id)
        job.body_bytes = len(data)
        shape = await prepare(job, body, engine, config.limits.tokens_max_default)
        generations = work.submit_all(engine, job)
        return shape, service.enter(Live(job, generations, time.monotonic()))


async def _generate(
    request: web.Request, kind: type[schema.Body], prepare: Prepare
) -> web.StreamResponse:
    """One generation request: check, admit, answer."""
    service = request.app[SERVICE]
    shape, live = await _admit(request, kind, prepare)
    job, generations = live.job, live.generations
    headers = request[HEADERS]
    headers["x-batchengine-route"] = job.route
    session_id = generations[0].session_id or (job.session.session_id if job.session else None)
    if session_id:
        headers["x-batchengine-session-id"] = session_id
    outcome = "failed"
    try:
        if not job.stream:
            response = await generate.answer_whole(shape, generations)
            outcome = "finished"
            return response

        def on_end(how: str) -> None:
            nonlocal outcome
            outcome = how

        can_resume = len(generations) == 1 and generations[0].request.session_id is not None
        return await generate.answer_stream(
            request, shape, generations, headers, service.config.server, on_end,
            first_id=0 if can_resume else None,
        )  # fmt: skip
    except asyncio.CancelledError:
        outcome = "disconnected"
        raise
    finally:
        service.leave(live, outcome)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json"
    )


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
        "class": str(sla.alias_class(name) or service.config.sla.default_class),
    }


def _served(service: Service) -> list[str]:
    if service.engine.state == "loading":
        raise errors.still_loading(service.engine.progress)
    return sla.model_names(service.engine.info.model_id, service.config.model.aliases)


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    rows = [_model_row(service, name) for name in _served(service)]
    return _json({"object": "list", "data": rows})


async def _model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked = request.match_info["model"]
    names = _served(service)
    if asked not in names:
        raise errors.unknown_model(strict_json.printable(asked), names)
    return _json(_model_row(service, asked))


async def _health(request: web.Request) -> web.Response:
    """200 only when a request sent now would be computed."""
    service = request.app[SERVICE]
    engine = service.engine
    state = engine.state if service.accepting or engine.state == "loading" else "draining"
    if state == "loading":
        body = {"status": "loading model", "progress": round(engine.progress, 4)}
        response = _json(body, 503)
        response.headers["Retry-After"] = "1"
        return response
    lanes = [{k: v for k, v in lane.items() if k != "pid"} for lane in engine.lanes()]
    body = {"status": "ok" if state == "ready" else state, "lanes": lanes, **engine.stats()}
    if engine.fatal is not None:
        body["status"] = "failed"
    elif state in ("ready", "degraded"):
        return _json(body)
    response = _json(body, 503)
    response.headers["Retry-After"] = "5"
    return response


async def _metrics(request: web.Request) -> web.Response:
    text, content_type = request.app[SERVICE].engine.metrics.render()
    return web.Response(body=text, headers={"Content-Type": content_type})


async def _props(request: web.Request) -> web.Response:
    """What a llama-server client reads to learn the context size and what the template can do."""
    service = request.app[SERVICE]
    _served(service)
    info = service.engine.info
    return _json(
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
    raise errors.not_supported(
        f"{request.path[:80]} is not implemented in this version",
        "use POST /v1/chat/completions or /v1/completions",
    )


async def _nowhere(request: web.Request) -> web.Response:
    """405 where another method would find something, 404 where none would."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        allowed |= (await resource.resolve(request))[1]
    if allowed := allowed - {"*"}:  # what leads here
        raise web.HTTPMethodNotAllowed(request.method, allowed)
    raise web.HTTPNotFound
