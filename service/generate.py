"""From submitted generations to HTTP answers, streaming or whole.

Owns the order of events of API 1.3 and the fan-in of several choices. Whatever ends a handler
(finish, error, disconnect, slow reader) cancels every generation that still runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from batchengine.config import ServerConfig
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationEvent,
    QueuedEvent,
    TokenEvent,
)
from service import errors, sse
from service.door import Generation
from service.shape import Answer, Shape

log = logging.getLogger("batchengine.service")

EVENTS_MAX = 256  # per request, between engine and socket; a full queue holds the engine's reader


class FanIn:
    """Events of several generations in one bounded queue, each with its choice index."""

    def __init__(self, generations: list[Generation]) -> None:
        self._generations = generations
        self._queue: asyncio.Queue[tuple[int, GenerationEvent]] = asyncio.Queue(EVENTS_MAX)
        self._tasks = [
            asyncio.create_task(self._pump(index, generation))
            for index, generation in enumerate(generations)
        ]

    async def _pump(self, index: int, generation: Generation) -> None:
        """Puts exactly one DoneEvent or ErrorEvent, last."""
        try:
            async for event in generation:
                await self._queue.put((index, event))
                if isinstance(event, DoneEvent | ErrorEvent):
                    return
            # only a cancelled generation ends without a last event
            await self._queue.put((index, ErrorEvent(errors.cancelled())))
        except BatchEngineError as error:
            await self._queue.put((index, ErrorEvent(error)))
        except Exception:
            log.exception("request %s failed", generation.request_id)
            await self._queue.put((index, ErrorEvent(errors.internal(generation.request_id))))

    async def next(self, timeout_s: float | None) -> list[tuple[int, GenerationEvent]]:
        """The next events, all that are there; empty after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                events = [await self._queue.get()]
        except TimeoutError:
            return []
        while not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events

    def close(self) -> None:
        """Idempotent; after a DoneEvent the cancellation of a generation changes nothing."""
        for generation in self._generations:
            generation.cancel()
        for task in self._tasks:
            task.cancel()


async def answer_whole(shape: Shape, generations: list[Generation]) -> web.Response:
    """Waits for every choice; raises the error of the first that fails."""
    answers = [Answer() for _ in generations]
    fan = FanIn(generations)
    try:
        waiting = len(generations)
        while waiting:
            for index, event in await fan.next(None):
                match event:
                    case TokenEvent():
                        answers[index].texts.append(event.text)
                        if event.logprob is None:
                            answers[index].bare += 1
                        else:
                            answers[index].events.append(event)
                    case DoneEvent():
                        _finish(answers[index], event)
                        waiting -= 1
                    case ErrorEvent():
                        raise event.error
                    case QueuedEvent():
                        pass
    finally:
        fan.close()
    return web.Response(
        body=msgspec.json.encode(shape.whole(answers)), content_type="application/json"
    )


def _finish(answer: Answer, event: DoneEvent) -> None:
    if event.text:
        answer.texts.append(event.text)
    answer.finish_reason = event.finish_reason
    answer.usage = event.usage


async def answer_stream(
    request: web.Request,
    shape: Shape,
    generations: list[Generation],
    headers: dict[str, str],
    server: ServerConfig,
    on_end: Callable[[str], None],
    first_id: int | None = None,
) -> web.StreamResponse:
    """Streams until every choice is done. `on_end` hears how it ended, once.

    The stream ends with [DONE] only when every choice finished; after an error event it just ends.
    With `first_id` events carry ids: the turn of the only choice, and its tokens told so far,
    counted from there.
    """
    stream = sse.EventStream(request, headers, server.reader_stall_s)
    marks = None if first_id is None else sse.Marks(first_id, lambda: generations[0].turn_id)
    fan = FanIn(generations)
    outcome = "disconnected"
    try:
        await stream.open()
        await stream.send(b"".join(sse.data(shape.first(i)) for i in range(len(generations))))
        outcome = await _relay(stream, shape, fan, len(generations), server, marks)
        await stream.close()
    except sse.SlowReader:
        outcome = "client_too_slow"
        log.warning("%s: %s", shape.job.request_id, errors.client_too_slow(server.reader_stall_s))
        stream.abort()
    except ConnectionResetError:
        pass  # the client is gone; `finally` calls the work off
    except Exception:
        outcome = "failed"
        raise
    finally:
        fan.close()
        on_end(outcome)
    return stream.response


async def _relay(
    stream: sse.EventStream,
    shape: Shape,
    fan: FanIn,
    choices: int,
    server: ServerConfig,
    marks: sse.Marks | None,
) -> str:
    """Events to the socket until the end; returns how it ended."""
    answers = [Answer() for _ in range(choices)]
    waiting = choices
    queued: QueuedEvent | None = None
    wrote_at = visible_at = time.monotonic()
    while waiting:
        quiet_s = time.monotonic() - wrote_at
        events = await fan.next(max(0.001, server.keepalive_s - quiet_s))
        chunks: list[dict[str, object]] = []
        ids: list[int] = []  # of the first chunks; the others have the last one
        for index, event in events:
            match event:
                case TokenEvent():
                    queued = None
                    answers[index].bare += event.logprob is None
                    told = 0 if marks is None else marks.count()
                    if (chunk := shape.token(index, event)) is not None:
                        chunks.append(chunk)
                        ids.append(told)
                case DoneEvent():
                    chunks.extend(shape.finish(index, event))
                    _finish(answers[index], event)
                    waiting -= 1
                case ErrorEvent():
                    await stream.send(_encode(chunks, marks, ids))
                    await stream.fail(event.error)
                    return event.error.api_code
                case QueuedEvent():
                    queued = event
        now = time.monotonic()
        if not chunks and now - visible_at >= server.noop_event_s:
            chunks.append(shape.noop())
        if not waiting:
            chunks = shape.closing(chunks, answers)
        payload = _encode(chunks, marks, ids)
        if chunks:
            visible_at = now
        elif now - wrote_at >= server.keepalive_s:
            payload = sse.comment(_waiting_text(queued), marks)
        if payload:
            await stream.send(payload if waiting else payload + sse.DONE)
            wrote_at = time.monotonic()
    return "finished"


def _encode(chunks: list[dict[str, object]], marks: sse.Marks | None, ids: list[int]) -> bytes:
    if marks is None or marks.told == marks.first:
        return b"".join(map(sse.data, chunks))
    ids = ids + [marks.told] * (len(chunks) - len(ids))
    pairs = zip(chunks, ids, strict=True)
    return b"".join(sse.data(chunk, marks.event_id(told)) for chunk, told in pairs)


def _waiting_text(queued: QueuedEvent | None) -> str:
    if queued is None:
        return "working"
    eta = "unknown" if queued.eta_ms is None else str(round(queued.eta_ms))
    return f"queued pos={queued.position} eta_ms={eta}"
