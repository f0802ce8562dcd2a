"""GET /openapi.json: the OpenAPI 3.1 document of every route, made from the rows and the structs
that check their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

import batchengine
from service.http.routes.route import Route
from service.protocols.carriers import REQUEST_HEADERS
from service.protocols.messages.protocol import MESSAGES
from service.protocols.table import protocol_of

TITLE = "batchengine"
REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{([a-z_]+)(?::[^{}]*)?\}")
DOCUMENT = web.AppKey("openapi", bytes)

Object = dict[str, Any]


class ErrorFields(Struct):
    """The error object of OpenAI's routes, with added fields."""

    message: str
    type: str
    param: str | None
    code: str | None
    batchengine_code: str
    what: str
    why: str
    fix: str


class Error(Struct):
    error: ErrorFields


class MessagesErrorFields(Struct):
    """The error object of Anthropic's routes, with added fields."""

    type: str
    message: str
    param: str | None
    code: str | None
    batchengine_code: str
    fix: str


class MessagesError(Struct):
    type: str
    error: MessagesErrorFields
    request_id: str | None


def document(routes: Sequence[Route], *, has_keys: bool) -> bytes:
    """The document of these routes, as JSON."""
    bodies = {route.body for route in routes if route.body is not None}
    ordered = sorted(bodies, key=lambda body: body.__name__)
    kinds = [Error, MessagesError, *ordered]
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    ref_of = dict(zip(kinds, refs, strict=True))
    paths: dict[str, Object] = {}
    for route in routes:
        operation = _operation(route, ref_of)
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = operation
    found: Object = {
        "openapi": "3.1.0",
        "info": {
            "title": TITLE,
            "version": batchengine.__version__,
            "description": "An LLM for fleets of agents, under the protocols that they speak.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        bearer = {"type": "http", "scheme": "bearer"}
        header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        found["components"]["securitySchemes"] = {"bearer": bearer, "header": header}
        found["security"] = [{"bearer": []}, {"header": []}]
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


def _operation(route: Route, ref_of: dict[type[Struct], Object]) -> Object:
    names = _PARAMETER.findall(route.path)
    parameters = [_parameter(name, "path", "", is_required=True) for name in names]
    parameters += [_parameter(name, "query", text) for name, text in route.query]
    if route.tag == "generation" and route.body is not None:
        headers = ((names[0], text) for names, text in REQUEST_HEADERS)
        parameters += [_parameter(name, "header", text) for name, text in headers]
    types: Object = {kind: {} for kind in route.content}
    error = MessagesError if protocol_of(route.path, {}) is MESSAGES else Error
    failure: Object = {
        "description": "An error, in the form of the route's protocol.",
        "content": {"application/json": {"schema": ref_of[error]}},
    }
    made: Object = {} if route.needs_key else {"security": []}
    made |= {
        "summary": route.summary,
        "tags": [route.tag],
        "operationId": _operation_id(route),
        "responses": {"200": {"description": "OK", "content": types}, "default": failure},
    }
    if parameters:
        made["parameters"] = parameters
    if route.body is not None:
        required = any(one.required for one in msgspec.structs.fields(route.body))
        content = {"application/json": {"schema": ref_of[route.body]}}
        made["requestBody"] = {"required": required, "content": content}
    return made


def _parameter(name: str, where: str, text: str, *, is_required: bool = False) -> Object:
    made: Object = {
        "name": name, "in": where, "required": is_required, "schema": {"type": "string"},
    }  # fmt: skip
    return made | ({"description": text} if text else {})


def _operation_id(route: Route) -> str:
    words = re.findall(r"[a-z0-9]+", _PARAMETER.sub(r"\1", route.path))
    return "_".join([route.method.lower(), *words])


async def _answer(request: web.Request) -> web.Response:
    return web.Response(body=request.app[DOCUMENT], content_type="application/json")


ROUTES = (Route("GET", "/openapi.json", _answer, "This document.", "operation"),)
