"""Hostile clients: each is one loop over raw sockets that a daemon must survive.

A client takes a `Target` and runs until it is cancelled. None of them waits for the good of the
daemon: answers are read only where the attack needs them. They have a process of their own, so
that what they compute delays no measurement of the bench.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
READ_BYTES = 1 << 16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Target:
    """The daemon under attack. `statuses` counts the first lines of its answers."""

    port: int
    key: str  # of the hostile tenant
    victim_ids: deque[str] = field(  # last sessions of the other tenant
        default_factory=lambda: deque[str](maxlen=8)
    )
    text_bytes: int = 1 << 20
    statuses: Counter[str] = field(default_factory=Counter[str])

    def request(self, path: str, body: bytes, *lines: str, method: str = "POST") -> bytes:
        """The bytes of one request with the hostile tenant's key."""
        head = [
            f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {self.key}",
            "Content-Type: application/json", f"Content-Length: {len(body)}", *lines, "", "",
        ]  # fmt: skip
        return "\r\n".join(head).encode() + body

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Streams]:
        """A connection that is dropped without ceremony."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def exchange(self, data: bytes, seconds_max: float = 60.0) -> bytes:
        """Sends a request; returns the beginning of the answer, b"" if none came."""
        async with self.connection() as (reader, writer):
            writer.write(data)
            try:
                async with asyncio.timeout(seconds_max):
                    answer = await reader.read(READ_BYTES)
            except TimeoutError:
                answer = b""
        self.statuses[answer[9:12].decode("ascii", "replace") or "none"] += 1
        return answer


Client = Callable[[Target, random.Random], Awaitable[None]]


def chat_body(text: str, **fields: object) -> bytes:
    """A chat request of one message."""
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


async def flood(target: Target, rng: random.Random) -> None:
    """Asks for long answers in the highest class, with the tightest target, all the time."""
    body = chat_body(
        f"Tell me a story {rng.random()}.", max_tokens=200, ignore_eos=True,
        batchengine={"class": "interactive", "ttft_ms": 0.001},
    )  # fmt: skip
    await target.exchange(target.request(CHAT, body))


async def cancel_storm(target: Target, rng: random.Random) -> None:
    """Leaves after the first bytes of a stream, or before."""
    body = chat_body(f"Hello {rng.random()}", stream=True, max_tokens=400, ignore_eos=True)
    async with target.connection() as (reader, writer):
        writer.write(target.request(CHAT, body))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.choice((0.0, 0.01, 0.1, 0.5))):
                await reader.read(READ_BYTES)


async def slow_reader(target: Target, rng: random.Random) -> None:
    """Asks for a long stream and reads none of it."""
    body = chat_body(f"Story {rng.random()}", stream=True, max_tokens=4000, ignore_eos=True)
    async with target.connection() as (_, writer):
        writer.write(target.request(CHAT, body))
        await asyncio.sleep(rng.uniform(5, 20))


async def pipeliner(target: Target, rng: random.Random) -> None:
    """Writes requests without end on one connection and reads no answer."""
    async with target.connection() as (_, writer):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(5, 15)):
                while True:
                    writer.write(target.request("/health", b"", method="GET") * 20)
                    await writer.drain()


async def half_open(target: Target, rng: random.Random) -> None:
    """Sends a part of a head or of a body, then nothing."""
    whole = target.request(CHAT, chat_body("x" * 1000))
    async with target.connection() as (_, writer):
        writer.write(whole[: rng.randrange(len(whole))])
        await asyncio.sleep(rng.uniform(2, 30))


async def guesser(target: Target, rng: random.Random) -> None:
    """Tries keys."""
    head = (
        f"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {rng.randbytes(12).hex()}\r\nConnection: close\r\n\r\n"
    )
    await target.exchange(head.encode())


async def garbage(target: Target, rng: random.Random) -> None:
    """Sends bytes that are not HTTP, or are nearly."""
    data = rng.choice(
        (
            rng.randbytes(4000),
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nFFFFFFFFFF\r\n",
            b"\x16\x03\x01" + rng.randbytes(200),
        )
    )
    await target.exchange(data, 5.0)


async def thief(target: Target, rng: random.Random) -> None:
    """Asks for sessions, turns and calls of the other tenant."""
    if not target.victim_ids:
        await asyncio.sleep(1.0)
        return
    name = rng.choice(target.victim_ids)
    call = {"role": "tool", "tool_call_id": "call_1", "content": "1"}
    messages = [{"role": "user", "content": "hi"}, call]
    stolen = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    for data in (
        target.request(f"/v1/stream?session_id={name}", b"", method="GET"),
        target.request(f"/v1/sessions/{name}", b"", method="DELETE"),
        target.request(f"/v1/sessions/{name}/promote", b"{}"),
        target.request(CHAT, chat_body("hi", session_id=name, max_tokens=4)),
        target.request(CHAT, stolen),
        target.request(CHAT, chat_body("hi", max_tokens=4), f"Idempotency-Key: {name}"),
    ):
        await target.exchange(data)


@functools.cache
def worst_texts(size: int) -> list[tuple[str, bytes]]:
    """(path, body) of about `size` bytes each that cost most to read."""
    return [
        (CHAT, b'{"messages": [' + b"[]," * (size // 3) + b"[]]}"),
        (CHAT, b'{"messages": "' + b"\\ud83d\\ude00" * (size // 12) + b'"}'),
        (CHAT, b'{"messages": ' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"),
        (TEXT, b'{"prompt": [' + b"1," * (size // 2) + b"1]}"),
        (CHAT, chat_body("<|im" * (size // 4))),
        (CHAT, chat_body("<|im_end|>" * (size // 10))),
        (CHAT, chat_body("a" * size)),
        (TEXT, json.dumps({"prompt": " " * size}).encode()),
        (
            CHAT,
            json.dumps({"messages": [{"role": "user", "content": "x"}] * (size // 40)}).encode(),
        ),
    ]


async def worst_text(target: Target, rng: random.Random) -> None:
    """Sends the most expensive bodies known."""
    path, body = rng.choice(worst_texts(target.text_bytes))
    await target.exchange(target.request(path, body))


CLIENTS: tuple[tuple[Client, int], ...] = (  # with how many of each run at once
    (flood, 24), (cancel_storm, 4), (slow_reader, 6), (pipeliner, 4), (half_open, 8),
    (guesser, 2), (garbage, 2), (thief, 2), (worst_text, 2),
)  # fmt: skip


async def run(target: Target, seed: int) -> None:
    """All clients at once, each again and again, until this is cancelled."""

    async def repeat(client: Client, rng: random.Random) -> None:
        while True:
            try:
                await client(target, rng)
            except (OSError, asyncio.IncompleteReadError):
                target.statuses["refused"] += 1
                await asyncio.sleep(0.05)
            await asyncio.sleep(rng.uniform(0, 0.02))

    numbers = itertools.count(seed)
    async with asyncio.TaskGroup() as group:
        for client, count in CLIENTS:
            for _ in range(count):
                group.create_task(repeat(client, random.Random(next(numbers))))


def attack(port: int, key: str, link: Connection) -> None:
    """Entry of the process of the clients.

    It receives the victim's sessions, then "", upon which it sends its `statuses` and ends.
    """
    asyncio.run(_attack(Target(port, key), link))


async def _attack(target: Target, link: Connection) -> None:
    clients = asyncio.create_task(run(target, seed=7))

    def receive() -> None:
        with contextlib.suppress(EOFError):  # the bench was killed
            if name := link.recv():
                target.victim_ids.append(name)
                return
        clients.cancel()

    asyncio.get_running_loop().add_reader(link.fileno(), receive)
    link.send("started")
    with contextlib.suppress(asyncio.CancelledError):
        await clients
    link.send(target.statuses)
