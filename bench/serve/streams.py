"""Clients of the load: many streams at once over raw sockets, and connections that say nothing.

Raw sockets, because a client library would use more of the two cores than the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What the streams saw."""

    answers: int = 0
    errors: list[str] = field(default_factory=list[str])
    ttft_ms: list[float] = field(default_factory=list[float])
    open_max: int = 0
    open_now: int = 0


def request_of(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def stream(port: int, number: int, tokens: int, tally: Tally) -> None:
    """One streamed answer on a connection of its own; it must end with [DONE]."""
    words = random.Random(number).choices("abcdefgh", k=40)
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": f"{number} " + " ".join(words)}],
        "stream": True,
        "max_tokens": tokens,
        "ignore_eos": True,
        "batchengine": {"class": "background"},
    }
    began, first = time.perf_counter(), 0.0
    tally.open_now += 1
    tally.open_max = max(tally.open_max, tally.open_now)
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_of("/v1/chat/completions", body))
        tail = await reader.readuntil(b"\r\n")
        if b" 200 " not in tail:
            tally.errors.append((tail + await reader.read(300)).decode("utf-8", "replace"))
            return
        while b"[DONE]" not in tail:
            part = await reader.read(1 << 16)
            if not part:
                tally.errors.append("the stream ended before its end")
                return
            if not first and b'"content":"' in part.replace(b'"content":""', b""):
                first = time.perf_counter()
                tally.ttft_ms.append(1000 * (first - began))
            if b"event: error" in part:
                tally.errors.append(part.decode("utf-8", "replace")[:300])
                return
            tail = (tail + part)[-64:]
        tally.answers += 1
    except (OSError, asyncio.IncompleteReadError) as error:
        tally.errors.append(repr(error))
    finally:
        tally.open_now -= 1
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def keep_busy(port: int, count: int, seconds: float, tokens: int, first: int) -> Tally:
    """`count` streams at once for `seconds`: one that ends is followed by another."""
    tally, until = Tally(), time.monotonic() + seconds
    numbers = iter(range(first, 1 << 62))

    async def one() -> None:
        while True:
            await stream(port, next(numbers), tokens, tally)
            if time.monotonic() > until:
                return

    await asyncio.gather(*(one() for _ in range(count)))
    return tally


@contextlib.asynccontextmanager
async def idle_connections(port: int, count: int):
    """`count` open connections, of which each has asked once and stays."""
    made: list[asyncio.StreamWriter] = []
    ask = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        made.append(writer)
        writer.write(ask)
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(size)

    try:
        for start in range(0, count, 100):
            await asyncio.gather(*(one() for _ in range(min(100, count - start))))
        yield
    finally:
        for writer in made:
            writer.transport.abort()
