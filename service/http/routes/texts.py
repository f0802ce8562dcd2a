"""Routes that tokenise and count prompts; a text process does the work, within its limits."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from service.engine_api import check_serving
from service.http import appending
from service.http.admission import CALLER, SERVICE, prompt_limits, read_json_body
from service.http.answers import json_answer
from service.http.routes import responses
from service.http.routes.route import Handler, Route
from service.protocols import carriers, reading
from service.protocols.llama.texts import DetokenizeRequest, TokenizeRequest
from service.protocols.openai.chat import CHAT
from service.protocols.protocol import Protocol
from service.protocols.schema import TOKENS_MAX
from service.protocols.table import BY_COUNT_ROUTE


def _handler(task: str) -> Handler:
    """The handler of one task of `service.protocols.llama.texts`."""

    async def handle(request: web.Request) -> web.Response:
        service, tenant = request.app[SERVICE], request[CALLER].tenant
        with service.admit(tenant) as admission:
            data = await read_json_body(request, admission)
            check_serving(service.engine)
            question = reading.Question(CHAT.name, prompt_limits(service), task=task)
            answer = await service.engine.text.read(
                reading.encode(question), memoryview(data), tenant=tenant
            )
        return web.Response(body=answer, content_type="application/json")

    return handle


def _counter(protocol: Protocol[Any]) -> Handler:
    """The handler that counts a prompt of `protocol`, with the tokens that it goes behind."""

    async def handle(request: web.Request) -> web.Response:
        service, tenant = request.app[SERVICE], request[CALLER].tenant
        engine = service.engine
        with service.admit(tenant) as admission:
            data = await read_json_body(request, admission)
            check_serving(engine)
            appends = carriers.appends(request.headers, request[CALLER], service.config)
            limits = msgspec.structs.replace(
                prompt_limits(service), context_tokens=TOKENS_MAX, append=appends
            )
            question = reading.Question(protocol.name, limits)
            found = await responses.read(engine, tenant, question, data)
            session_id = carriers.session_of(found.fields, request.headers, tenant)
            prompt, past = await appending.followed(engine, tenant, found.prompt, session_id)
        count = sum(map(len, prompt.tokens))
        if past is not None:  # the token that ends the last message is in both
            before = len(past.request.prompt) + past.tokens
            count = before + len(prompt.append) - (past.finish_reason == "stop")
        return json_answer(protocol.counted(count))

    return handle


_COUNTED = "How many tokens the prompt of this body has."

ROUTES = (
    *(
        Route("POST", path, _counter(one), _COUNTED, "text", one.body)
        for path, one in BY_COUNT_ROUTE.items()
    ),
    Route(
        "POST", "/apply-template", _handler("apply-template"), "The text of a chat's prompt.",
        "text", CHAT.body,
    ),
    Route(
        "POST", "/tokenize", _handler("tokenize"), "The tokens of a text.", "text", TokenizeRequest
    ),
    Route(
        "POST", "/detokenize", _handler("detokenize"), "The text of tokens.", "text",
        DetokenizeRequest,
    ),
)  # fmt: skip
