"""The routes about responses that were made: fetching, cancelling and forgetting them.

A response is a turn of a session, and its id names that turn, so a restart of the daemon changes
nothing. One that was begun in the background goes on without a reader; after a restart it goes on
when it is next asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from aiohttp import web

from batchengine import errors
from batchengine.core import (
    FORM_RESPONSES,
    BatchEngineError,
    DoneEvent,
    GenerationEvent,
    Kind,
    PastTurn,
    QueuedEvent,
    TokenEvent,
    Usage,
    Waiting,
)
from service.engine_api import EngineApi, GenerationApi, check_serving
from service.http import relay
from service.http.access import check_changes
from service.http.admission import (
    CALLER,
    HEADERS,
    SERVICE,
    Live,
    Service,
    prompt_limits,
)
from service.http.answers import json_answer
from service.http.routes.route import Route
from service.protocols import reading, requests
from service.protocols.formatter import Formatter
from service.protocols.protocol import PastAnswer
from service.protocols.requests import HttpJob
from service.protocols.responses import past_items
from service.protocols.responses.formatter import (
    ID_PREFIX,
    TURN_PREFIX,
    ResponsesFormatter,
    echo_of,
    turn_id_of,
)

log = logging.getLogger("batchengine.service")

TOKENS_SLICE = 256  # of a past answer that are events at a time
CANCEL_LOOKS, CANCEL_LOOK_S = 500, 0.02  # for the end of a turn that was cancelled


async def read(
    engine: EngineApi, tenant: str, question: reading.Question, data: bytearray
) -> reading.Reading:
    """What a text process makes of a body, and of the responses that it refers to."""
    answer = await engine.text.read(reading.encode(question), memoryview(data), tenant=tenant)
    found = reading.decode_reading(answer)
    if not found.turns:
        return found
    question = msgspec.structs.replace(
        question,
        answers=await _answers(engine, tenant, found.turns, has_results=found.has_results),
    )
    return await read(engine, tenant, question, data)


async def _answers(
    engine: EngineApi, tenant: str, turns: Sequence[str], *, has_results: bool
) -> list[PastAnswer]:
    """Stored responses whose items a request refers to, or, with `has_results`, any turns;
    without those that are not found.

    Raises 400 if they hold more than any prompt.
    """
    found: list[PastAnswer] = []
    info, text_bytes = engine.info, 0
    for turn in turns:
        try:
            past = await engine.past_turn(tenant, TURN_PREFIX + turn)
        except BatchEngineError as error:
            if error.code != errors.UNKNOWN_TURN.code:
                raise
            continue
        asked = past.request
        if (has_results or is_stored(past)) and past.finish_reason:
            echo = asked.echo.encode()
            text = past.text
            found.append(PastAnswer(turn, text, asked.output, echo, past.finish_reason))
            text_bytes += len(text)
            requests.check_text_size(text_bytes, info.context_tokens, info.context_bound, "input")
    return found


# ---- responses that nothing waits for ----


def is_background(job: HttpJob) -> bool:
    """Whether the client fetches the response later."""
    return job.asked.form == FORM_RESPONSES and _says(job.echo, "background")


async def in_background(
    request: web.Request, formatter: Formatter, live: Live
) -> web.StreamResponse:
    """The response as it begins, or its events; its generation goes on without a reader."""
    live.begun = asyncio.Event()
    assert isinstance(formatter, ResponsesFormatter)
    if live.job.stream:
        return await _shown(request, formatter, live, in_background=True)
    _finish_alone(request.app[SERVICE], live)
    await relay.recorded(live)
    return _begun(formatter, live)


async def _shown(
    request: web.Request, formatter: Formatter, live: Live, *, in_background: bool
) -> web.StreamResponse:
    """The events of a response; one in the background goes on when its client leaves."""
    service = request.app[SERVICE]
    try:
        return await relay.answer_stream(request, formatter, live, 0, keeps=in_background)
    finally:
        if in_background and live.outcome in relay.LEFT:
            _finish_alone(service, live)
        else:
            if live.begun is not None:
                live.begun.set()
            service.leave(live, live.outcome)


def _finish_alone(service: Service, live: Live) -> None:
    """Reads a generation to its end, as its turn waits for a reader."""
    begun = live.begun = live.begun or asyncio.Event()

    async def read(generation: GenerationApi) -> None:
        try:
            while events := await generation.events():
                if not isinstance(events[-1], QueuedEvent):
                    begun.set()
            live.outcome = "finished in the background"
        except BatchEngineError as error:
            log.warning("%s: %s", generation.request_id, error)
        finally:
            begun.set()
            generation.cancel()
            service.leave(live, live.outcome)

    task = asyncio.create_task(read(live.generations[0]), name="background")
    service.background.add(task)
    task.add_done_callback(service.background.discard)


async def _go_on(service: Service, past: PastTurn) -> None:
    """Computes the rest of a background response whose daemon or disk stopped it."""
    asked = past.request
    assert asked.session_id is not None
    with service.admit(asked.tenant):
        generation = await service.engine.resume(
            asked.tenant, asked.session_id, past.tokens, asked.request_id
        )
        live = service.enter(Live(_job(service, past), [generation], time.monotonic()))
    _finish_alone(service, live)


class PastGeneration:
    """A turn that has ended, as events of its texts: nothing is computed."""

    def __init__(self, past: PastTurn) -> None:
        request = self.request = past.request
        self.request_id = self.turn_id = request.request_id
        self.session_id = request.session_id
        self.recorded = asyncio.Event()
        self.recorded.set()
        named = request.session_id or ""
        usage = Usage(len(request.prompt), past.cached_tokens, past.tokens, session_id=named)
        *tokens, rest = past.texts
        self._left: deque[GenerationEvent] = deque(TokenEvent(0, text) for text in tokens)
        self._left.append(DoneEvent(past.finish_reason, usage, rest))

    async def events(self) -> list[GenerationEvent]:
        """The next events; [] once the last one was taken."""
        return [self._left.popleft() for _ in range(min(TOKENS_SLICE, len(self._left)))]

    def waiting(self) -> Waiting:
        """It waits for nothing."""
        return Waiting()

    def cancel(self) -> None:
        """Give no further event."""
        self._left.clear()


# ---- the routes ----


async def _past(request: web.Request) -> tuple[Service, PastTurn]:
    """The turn of the response in the path; raises 404, also for those of other keys."""
    service, given = request.app[SERVICE], request.match_info["response_id"]
    check_serving(service.engine)
    try:
        if not given.startswith(ID_PREFIX):
            raise errors.UNKNOWN_TURN(turn_id=given)
        past = await service.engine.past_turn(request[CALLER].tenant, turn_id_of(given))
    except BatchEngineError as error:
        if error.code != errors.UNKNOWN_TURN.code:
            raise
        raise errors.UNKNOWN_RESPONSE(given=given) from None
    if not is_stored(past):
        raise errors.UNKNOWN_RESPONSE(given=given)
    return service, past


async def _get(request: web.Request) -> web.StreamResponse:
    """The response object, or the events of it from the first one on."""
    service, past = await _past(request)
    if request.query.get("stream") == "true":
        return await _stream(request, service, past)
    is_cut = not past.is_running and past.finish_reason in ("", "shutdown")
    if is_cut and past.is_last and _says(past.request.echo.encode(), "background"):
        await _go_on(service, past)
        past = dataclasses.replace(past, is_running=True, finish_reason="")
    return await _answer(request, service, past)


async def _stream(request: web.Request, service: Service, past: PastTurn) -> web.StreamResponse:
    check_changes(request.headers)
    asked, tenant = past.request, request[CALLER].tenant
    assert asked.session_id is not None
    alone = _says(asked.echo.encode(), "background")
    skip = _events_shown(request.query.get("starting_after"))
    if (running := _live_of(service, past)) is not None and running.begun is not None:
        await running.begun.wait()  # before its first token it is not in the ledger
    is_cancelled = past.finish_reason == "cancelled" and alone  # else its client has left
    is_kept = bool(past.finish_reason) and (is_cancelled or not past.is_last)
    with service.admit(tenant):
        if is_kept and not past.is_running:
            generation, alone = PastGeneration(past), False
        else:
            generation = await service.engine.resume(tenant, asked.session_id, 0, asked.request_id)
        live = service.enter(Live(_job(service, past), [generation], time.monotonic()))
        formatter = ResponsesFormatter(live.job, skip, past if past.ended_s else None)
    request[HEADERS]["x-batchengine-session-id"] = asked.session_id
    return await _shown(request, formatter, live, in_background=alone)


def _events_shown(starting_after: str | None) -> int:
    """How many events the reader of a stream has, by the number of the last one."""
    if starting_after is None:
        return 0
    return _number(starting_after, "starting_after") + 1


def _number(given: str, param: str) -> int:
    """A number of a query; raises 400."""
    if not (given.isascii() and given.isdecimal() and len(given) < 9):
        what, fix = f"{param} is no number", f"send a whole number, or leave {param} out"
        raise errors.INVALID_FIELD(param=param, what=what, fix=fix)
    return int(given)


async def _cancel(request: web.Request) -> web.StreamResponse:
    """Ends a response that is being made; one that has ended stays as it is."""
    check_changes(request.headers)
    service, past = await _past(request)
    if past.is_running and not past.finish_reason:
        service.cancel(past.request.request_id)
        past = await _cancelled(service.engine, past)
    return await _answer(request, service, past)


async def _cancelled(engine: EngineApi, past: PastTurn) -> PastTurn:
    """A cancelled turn once it has ended, which it does within a step; one that had not begun is
    in no ledger."""
    tenant, turn_id = past.request.tenant, past.request.request_id
    with contextlib.suppress(BatchEngineError):
        for _ in range(CANCEL_LOOKS):
            if (await engine.past_turn(tenant, turn_id, has_texts=False)).finish_reason:
                return await engine.past_turn(tenant, turn_id)
            await asyncio.sleep(CANCEL_LOOK_S)
    return dataclasses.replace(past, is_running=False, finish_reason="cancelled")


async def _delete(request: web.Request) -> web.Response:
    """Forgets a response: its session is erased if it has no other.

    Otherwise its tokens, of which others are made, stay until the last of them is deleted.
    """
    check_changes(request.headers)
    service, past = await _past(request)
    asked, engine = past.request, service.engine
    assert asked.session_id is not None
    if past.is_running:
        service.cancel(asked.request_id)
    try:
        if past.only:
            await engine.drop(asked.tenant, asked.session_id)
        else:
            await engine.forget_turn(asked.tenant, asked.request_id)
    except BatchEngineError as error:
        if not past.is_running or error.kind is not Kind.MISSING:  # it had not begun
            raise
    given = request.match_info["response_id"]
    return json_answer({"id": given, "object": "response", "deleted": True})


async def _input_items(request: web.Request) -> web.Response:
    """A page of the items that a response was asked with."""
    service, past = await _past(request)
    echo = echo_of(past.request.echo.encode())
    if not echo.input:
        given, kib = request.match_info["response_id"], past_items.INPUT_BYTES_MAX >> 10
        raise errors.INPUT_NOT_KEPT(given=given, kib=kib)
    turn = past.request.request_id.removeprefix(TURN_PREFIX)
    asked = _page_of(request, turn, echo.input)
    question = reading.Question(FORM_RESPONSES, prompt_limits(service), task="input-items")
    answer = await service.engine.text.read(
        reading.encode(question), msgspec.json.encode(asked), tenant=past.request.tenant
    )
    return web.Response(body=answer, content_type="application/json")


def _page_of(request: web.Request, turn: str, kept: str) -> past_items.InputPage:
    """The page that the query asks for; raises 400."""
    order, limit = request.query.get("order", "desc"), request.query.get("limit")
    if order not in ("asc", "desc"):
        what, fix = "order is unknown", "use asc or desc"
        raise errors.INVALID_FIELD(param="order", what=what, fix=fix)
    number = past_items.PAGE_DEFAULT if limit is None else _number(limit, "limit")
    if not 1 <= number <= past_items.PAGE_MAX:
        what, fix = "limit has a wrong value", f"use 1 to {past_items.PAGE_MAX}"
        raise errors.INVALID_FIELD(param="limit", what=what, fix=fix)
    return past_items.InputPage(turn, kept, order, number, request.query.get("after"))


async def _unbuilt(request: web.Request) -> web.Response:
    why = "clients compact a conversation by themselves, where it is not OpenAI that serves them"
    fix = "ask for a summary with POST /v1/responses, and send that instead of the items"
    raise errors.NOT_SUPPORTED(path=request.path, why=why, fix=fix)


def _job(service: Service, past: PastTurn) -> HttpJob:
    return requests.job_again(past.request, service.engine, service.config)


async def _answer(request: web.Request, service: Service, past: PastTurn) -> web.StreamResponse:
    formatter = ResponsesFormatter(_job(service, past), past=past)
    if not past.finish_reason:
        return _begun(formatter, _live_of(service, past))
    # one that has ended may still run for a reader of its stream
    ended = Live(formatter.job, [PastGeneration(past)], time.monotonic())
    return await relay.answer_whole(request, formatter, ended)


def _begun(formatter: ResponsesFormatter, live: Live | None) -> web.Response:
    """The response object while it is made, by `live` if that is known here."""
    waits = live is not None and live.generations[0].waiting().position > 0
    body = formatter.begun("queued" if waits else "in_progress")
    return web.Response(body=body, content_type="application/json")


def _live_of(service: Service, past: PastTurn) -> Live | None:
    """The request in the background that makes a response."""
    turn = past.request.request_id
    found = (one for one in service.live.values() if one.job.requests[0].request_id == turn)
    return next((one for one in found if one.begun is not None), None)


def is_stored(past: PastTurn) -> bool:
    """Whether a turn is a response that clients may ask for."""
    return past.request.form == FORM_RESPONSES and _says(past.request.echo.encode(), "store")


def _says(echo: bytes, name: str) -> bool:
    """Whether a response's field is true."""
    return bytes(echo_of(echo or requests.NOTHING).fields.get(name, b"")) == b"true"


_ID = "/v1/responses/{response_id}"
ROUTES = (
    Route("GET", _ID, _get, "A response that was stored.", "generation",
          query=(("stream", "true = its events"), ("starting_after", "number of the last event")),
          content=("application/json", "text/event-stream"), head=False),
    Route("DELETE", _ID, _delete, "Forgets a response.", "generation"),
    Route("POST", _ID + "/cancel", _cancel, "Ends a response that is being made.", "generation"),
    Route("GET", _ID + "/input_items", _input_items, "What a stored response was asked with.",
          "generation", head=False,
          query=(("after", "id of the item before the first one"), ("limit", "how many, up to 100"),
                 ("order", "desc = the newest first, or asc"))),
    Route("POST", "/v1/responses/compact", _unbuilt, "Not built.", "generation"),
)  # fmt: skip
