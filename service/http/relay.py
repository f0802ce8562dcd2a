"""Writes the events of submitted generations as an HTTP answer, streaming or whole.

Owns the order of events and the fan-in of several choices. However a handler ends
(finish, error, disconnect, slow reader), every generation that still runs is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from batchengine import errors
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationEvent,
    PromptTokenEvent,
    QueuedEvent,
    SkippedEvent,
    TokenEvent,
)
from service.engine_api import GenerationApi
from service.http import sse
from service.http.admission import HEADERS, SERVICE, Live, Service
from service.protocols.formatter import EventIds, Formatter, SseEvent

log = logging.getLogger("batchengine.service")

RECORD_WAIT_S = 2.0  # of the first event of an answer that can be asked for by its id
BATCHES_MAX = 32  # of all choices of one request, between their tasks and the socket
SLICE = 32  # events between two chances for other tasks; with log-probabilities 100 us each
PART_BYTES = 128 * 1024  # of a whole answer, between two such chances

LEFT = ("disconnected", "client_too_slow")  # outcomes of requests whose client left

Indexed = tuple[int, GenerationEvent]  # with the index of its choice


def source_of(generations: list[GenerationApi]) -> OneChoice | FanIn:
    """The reader of a request's generations: one is read directly, several need a task each.

    `next` returns all events that are ready, [] after its timeout; each choice ends with one
    DoneEvent or ErrorEvent. `close` cancels what still runs, and is idempotent.
    """
    return OneChoice(generations[0]) if len(generations) == 1 else FanIn(generations)


class OneChoice:
    """Batches of one generation, straight from its own buffer."""

    def __init__(self, generation: GenerationApi) -> None:
        self.generations = [generation]
        self._generation = generation

    async def next(self, timeout_s: float | None) -> list[Indexed]:
        try:
            async with asyncio.timeout(timeout_s):
                return [(0, event) for event in await _batch(self._generation)]
        except TimeoutError:
            return []

    def close(self) -> None:
        self._generation.cancel()


class FanIn:
    """Batches of several generations through one bounded queue."""

    def __init__(self, generations: list[GenerationApi]) -> None:
        self.generations = generations
        self._queue: asyncio.Queue[list[Indexed]] = asyncio.Queue(BATCHES_MAX)
        self._tasks = [
            asyncio.create_task(self._pump(index, generation))
            for index, generation in enumerate(generations)
        ]

    async def _pump(self, index: int, generation: GenerationApi) -> None:
        is_over = False
        while not is_over:
            batch = await _batch(generation)
            is_over = isinstance(batch[-1], DoneEvent | ErrorEvent)
            await self._queue.put([(index, event) for event in batch])

    async def next(self, timeout_s: float | None) -> list[Indexed]:
        try:
            async with asyncio.timeout(timeout_s):
                events = await self._queue.get()
        except TimeoutError:
            return []
        while not self._queue.empty():
            events += self._queue.get_nowait()
        return events

    def close(self) -> None:
        for generation in self.generations:
            generation.cancel()
        for task in self._tasks:
            task.cancel()


async def _batch(generation: GenerationApi) -> list[GenerationEvent]:
    """The next events of a generation, never none; a fault of the engine becomes an ErrorEvent."""
    try:
        events = await generation.events()
    except BatchEngineError as error:
        return [ErrorEvent(error)]
    except Exception:
        log.exception("request %s failed", generation.request_id)
        return [ErrorEvent(errors.INTERNAL_ERROR(request_id=generation.request_id))]
    return events or [ErrorEvent(errors.CANCELLED())]  # only a cancelled one has no last event


async def _sliced(events: list[Indexed]) -> AsyncIterator[list[Indexed]]:
    """Slices of `events`, at least one; other tasks run between two of them."""
    yield events[:SLICE]
    for start in range(SLICE, len(events), SLICE):
        await asyncio.sleep(0)
        yield events[start : start + SLICE]


async def answer_whole(
    request: web.Request, formatter: Formatter, live: Live
) -> web.StreamResponse:
    """Waits for every choice; raises the error of the first that fails."""
    source = source_of(live.generations)
    try:
        while not formatter.is_done:
            async for events in _sliced(await source.next(None)):
                for index, event in events:
                    match event:
                        case TokenEvent() | DoneEvent():
                            formatter.collect(index, event)
                        case PromptTokenEvent():
                            formatter.collect_prompt(index, event)
                        case ErrorEvent():
                            raise event.error
                        case SkippedEvent():
                            formatter.skip(index, event)
                        case QueuedEvent():
                            continue
        answer = await _send_parts(request, formatter.whole())
        live.outcome, live.usage = "finished", formatter.answers[0].usage
        return answer
    except ConnectionResetError:
        raise  # the client is gone, while a large answer is sent
    except Exception:
        live.outcome = "failed"
        raise
    finally:
        source.close()


async def _send_parts(request: web.Request, parts: Iterator[bytes]) -> web.StreamResponse:
    """A whole answer of JSON; a large one is sent part by part, and never held as one text."""
    head = bytearray()
    for part in parts:
        head += part
        if len(head) > PART_BYTES:
            break
    else:
        return web.Response(body=bytes(head), content_type="application/json")
    response = web.StreamResponse(headers=request[HEADERS])
    response.content_type = "application/json"
    await response.prepare(request)
    await response.write(bytes(head))
    for part in parts:
        await response.write(part)
        await asyncio.sleep(0)
    await response.write_eof()
    return response


async def answer_stream(
    request: web.Request,
    formatter: Formatter,
    live: Live,
    first_id: int | None = None,
    known: int = 0,
    *,
    keeps: bool = False,
) -> web.StreamResponse:
    """Streams until every choice is done. `keeps`: generations whose client leaves go on.

    A stream ends with the formatter's last events only when every choice finished; after an error
    event it just ends. With `first_id` events carry ids: the turn of the only choice, and how many
    of its tokens were sent so far, counted from there; `known` events behind them are not sent.
    """
    server = request.app[SERVICE].config.server
    stream = sse.EventStream(request, request[HEADERS], server.reader_stall_s)
    if first_id is not None:
        formatter.ids = EventIds(first_id, lambda: live.generations[0].turn_id, known)
    source = source_of(live.generations)
    try:
        await stream.open()
        if formatter.is_fetched:
            await recorded(live)
        await stream.send(sse.encode(formatter.opening()))
        live.outcome = await _relay(stream, formatter, source, live, request.app[SERVICE])
        live.usage = formatter.answers[0].usage if formatter.is_done else None
        await stream.close()
    except sse.SlowReader:
        live.outcome = "client_too_slow"
        error = errors.CLIENT_TOO_SLOW(seconds=server.reader_stall_s)
        log.warning("%s: %s", formatter.job.asked.request_id, error)
        stream.abort()
    except ConnectionResetError:
        pass  # the client is gone; `finally` cancels its generations
    except Exception:
        live.outcome = "failed"
        raise
    finally:
        if not (keeps and live.outcome in LEFT):
            source.close()
    return stream.response


async def recorded(live: Live) -> None:
    """Waits until the turns of a request are in the ledger: their ids can be asked for after a
    crash. One that waits longer for its session or a lane is shown before that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(RECORD_WAIT_S):
            for generation in live.generations:
                await generation.recorded.wait()


async def _relay(
    stream: sse.EventStream,
    formatter: Formatter,
    source: OneChoice | FanIn,
    live: Live,
    service: Service,
) -> str:
    """Sends events to the socket until the end; returns how it ended."""
    server = service.config.server
    wrote_at = visible_at = time.monotonic()
    while not formatter.is_done:
        quiet_s = time.monotonic() - wrote_at
        ready = await source.next(max(0.001, server.keepalive_s - quiet_s))
        if live.begun is not None and any(not isinstance(one, QueuedEvent) for _, one in ready):
            live.begun.set()
        async for events in _sliced(ready):
            out: list[SseEvent] = []
            for index, event in events:
                match event:
                    case TokenEvent():
                        out += formatter.token(index, event)
                    case PromptTokenEvent():
                        out += formatter.prompt_token(index, event)
                    case SkippedEvent():
                        formatter.skip(index, event)
                    case DoneEvent():
                        out += formatter.finish(index, event)
                    case ErrorEvent():
                        failure = service.hide(sse.encode(formatter.failure(event.error)))
                        await stream.send(sse.encode(out) + failure)
                        return event.error.name
                    case QueuedEvent():
                        continue
            now = time.monotonic()
            if not out and now - visible_at >= server.noop_event_s:
                out = formatter.noop()
            payload = sse.encode(out)
            if out:
                visible_at = now
            elif now - wrote_at >= server.keepalive_s:
                after_id = formatter.ids is not None and formatter.ids.has_begun
                payload = sse.comment(_waiting_text(source.generations), after_id=after_id)
            if payload:
                await stream.send(payload)
                wrote_at = time.monotonic()
    return "finished"


def _waiting_text(generations: list[GenerationApi]) -> str:
    """What a client waits for, as the text of a comment; of the request that has come least far."""
    found = max((one.waiting() for one in generations), key=lambda one: one.position)
    eta = "unknown" if found.eta_ms is None else str(round(found.eta_ms))
    if found.position:
        return f"queued pos={found.position} eta_ms={eta}"
    if found.computed_tokens < found.prompt_tokens:
        return f"prefill {found.computed_tokens}/{found.prompt_tokens} eta_ms={eta}"
    return "working"
