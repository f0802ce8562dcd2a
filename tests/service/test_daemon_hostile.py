"""Limits and hostile inputs against the real daemon: its engine, its lanes, its text processes.

Two keys; the limits are small. After each scene the answer of a key is what it was before, the
lanes are the same processes, and nothing is left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from batchengine.text.vocab import Tokenizer
from service.cli.local.child import ChildDaemon
from service.daemon import CONNECTIONS_SPARE
from tests.service.http.hostile.test_bodies import BAD_BODIES, bad_requests, worst_bodies
from tests.service.least import least

pytestmark = pytest.mark.alone

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
A, B = {"x-api-key": "key-of-a-1234"}, {"x-api-key": "key-of-b-1234"}
STREAMS_MAX, CONTEXT_TOKENS, BODY_BYTES_MAX = 8, 16_384, 5 << 19
CONFIG = f"""
[server]
reader_stall_s = 2.0
body_bytes_max = {BODY_BYTES_MAX}
[limits]
context_tokens = {CONTEXT_TOKENS}
streams_max = {STREAMS_MAX}
[auth.keys.a]
key = "{A["x-api-key"]}"
[auth.keys.b]
key = "{B["x-api-key"]}"
class = "background"
"""
QUESTION = [{"role": "user", "content": "Hello! Who are you?"}]
LONG: dict[str, Any] = {
    "messages": QUESTION, "stream": True, "max_tokens": 1500, "ignore_eos": True
}  # fmt: skip


@pytest.fixture(scope="module")
def daemon(pocket_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildDaemon]:
    config = tmp_path_factory.mktemp("hostile") / "c.toml"
    config.write_text(CONFIG)
    config.chmod(0o600)
    with ChildDaemon(
        pocket_path, lambda _: None, "--config", str(config), "--lanes", "2", "--threads", "1"
    ) as running:
        running.wait_ready(60)
        yield running
        assert running.stop() == 0


class Client:
    """One caller of the daemon."""

    def __init__(self, daemon: ChildDaemon, session: aiohttp.ClientSession) -> None:
        self.daemon = daemon
        self.session = session
        self.port = session._base_url.port  # type: ignore[union-attr]

    async def call(
        self, method: str, path: str, headers: dict[str, str] = A, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        async with self.session.request(method, path, headers=headers, **more) as reply:
            return reply.status, await reply.json()

    async def send(
        self, path: str, data: bytes, headers: dict[str, str] = A
    ) -> tuple[int, dict[str, Any]]:
        headers = {**headers, "Content-Type": "application/json"}
        return await self.call("POST", path, headers, data=io.BytesIO(data))

    async def answer(self, headers: dict[str, str] = A, **more: Any) -> tuple[str, int]:
        """Text and reused tokens of one greedy answer."""
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, **more}
        status, reply = await self.call("POST", CHAT, headers, json=body)
        assert status == 200, reply
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reply["choices"][0]["message"]["content"], cached

    def workers(self) -> set[int]:
        children = psutil.Process(self.daemon.pid).children(recursive=True)
        return {child.pid for child in children if any("worker" in arg for arg in child.cmdline())}

    async def until_idle(self) -> None:
        async with asyncio.timeout(20):
            while True:
                _, health = await self.call("GET", "/health")
                if not health["requests_running"] + health["requests_waiting"]:
                    return
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def unharmed(daemon: ChildDaemon) -> AsyncIterator[Client]:
    """The daemon answers after the block as before it, from the same processes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(daemon.url.split("/v1")[0], connector=connector) as session:
        client = Client(daemon, session)
        workers, before = client.workers(), await client.answer()
        assert workers
        yield client
        await client.until_idle()
        assert (await client.answer())[0] == before[0]
        assert client.workers() == workers


async def test_refusals_of_bad_requests(daemon: ChildDaemon, pocket_path: Path) -> None:
    """The stand-in engine and the real one refuse the same requests in the same way."""
    vocab = Tokenizer(pocket_path).vocab_size
    async with unharmed(daemon) as client:
        for path, body, status, code, param in bad_requests(vocab, CONTEXT_TOKENS):
            got, reply = await client.send(path, json.dumps(body).encode())
            assert got == status, (body, reply)
            assert (reply["error"]["code"], reply["error"]["param"]) == (code, param), body
        for data, param in BAD_BODIES:
            got, reply = await client.send(CHAT, data)
            error = reply["error"]
            assert (got, error["code"], error["param"]) == (400, "invalid_json", param), data[:60]
        got, reply = await client.send(CHAT, b" " * (BODY_BYTES_MAX + 1))
        assert (got, reply["error"]["code"]) == (413, "request_too_large")


async def test_the_most_expensive_bodies_do_not_stop_a_stream(daemon: ChildDaemon) -> None:
    """While one key sends them, three at once, tokens of the other one's streams arrive."""
    async with unharmed(daemon) as client:

        async def stream() -> None:
            nonlocal longest_s, events
            while True:
                async with client.session.post(CHAT, json=LONG, headers=A) as reply:
                    assert reply.status == 200
                    before = time.monotonic()
                    async for line in reply.content:
                        if line.startswith(b"data: {"):
                            now = time.monotonic()
                            longest_s, before = max(longest_s, now - before), now
                            events += 1

        async def longest_wait_s() -> float:
            nonlocal longest_s, events
            longest_s, events = 0.0, 0
            streaming = asyncio.create_task(stream())
            await asyncio.sleep(0.2)
            for first in range(0, len(bodies), 3):
                three = bodies[first : first + 3]
                got = await asyncio.gather(*(client.send(path, data, B) for _, path, data in three))
                assert [status for status, _ in got] == [400] * len(three), got
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)
            assert events > 200
            return longest_s

        longest_s, events = 0.0, 0
        bodies = worst_bodies(BODY_BYTES_MAX - 1000)
        assert await least(longest_wait_s, 0.5) < 0.5  # 0.05 to 0.07 on two cores


async def test_a_key_takes_its_share_of_the_streams(daemon: ChildDaemon) -> None:
    async with unharmed(daemon) as client:
        held = [await client.session.post(CHAT, json=LONG, headers=B) for _ in range(12)]
        counts = Counter(reply.status for reply in held)
        assert counts == {200: STREAMS_MAX // 2, 429: 12 - STREAMS_MAX // 2}
        assert len((await client.answer())[0]) > 0
        for reply in held:
            reply.close()


async def test_classes_above_the_key_s_are_lowered(daemon: ChildDaemon) -> None:
    async with unharmed(daemon) as client:
        body = {"messages": QUESTION, "max_tokens": 2,
                "batchengine": {"class": "interactive", "ttft_ms": 0.001}}  # fmt: skip
        async with client.session.post(CHAT, json=body, headers=B) as reply:
            assert reply.status == 200
            assert reply.headers["x-batchengine-class"] == "background"


async def test_a_foreign_session_is_unknown(daemon: ChildDaemon) -> None:
    """Reading, resuming, promoting, forking, cancelling and erasing name no session of another."""
    async with unharmed(daemon) as client:
        await client.answer(session_id="mine")
        async with client.session.post(
            CHAT, json={**LONG, "session_id": "mine"}, headers=A
        ) as stream:
            for _ in range(10):
                await stream.content.readline()
            request_id = stream.headers["x-request-id"]
            for method, path, body in (
                ("GET", "/v1/sessions/mine", None),
                ("GET", "/v1/stream?session_id=mine", None),
                ("GET", f"/v1/stream?session_id={request_id}", None),
                ("DELETE", "/v1/sessions/mine", None),
                ("POST", "/v1/sessions/mine/promote", {}),
                ("POST", "/v1/sessions/mine/park", {}),
                ("POST", "/v1/sessions/mine/fork", {"session_id": "taken"}),
                ("POST", f"/v1/requests/{request_id}/cancel", {}),
            ):
                status, reply = await client.call(method, path, B, json=body)
                assert status == 404, (path, reply)
            assert await client.call("GET", "/v1/sessions", B) == (
                200,
                {"object": "list", "data": []},
            )
            last = [line async for line in stream.content if line.strip()][-1]
            assert last == b"data: [DONE]\n"
        messages = [*QUESTION, {"role": "assistant", "content": "x"}, *QUESTION]
        assert (await client.answer(B, session_id="mine", messages=messages))[1] == 0


async def test_clients_that_never_read_give_their_connections_back(daemon: ChildDaemon) -> None:
    """Pipelined requests whose answers fill every buffer, and bodies that do not come."""
    async with unharmed(daemon) as client:
        head = f"Host: localhost\r\nx-api-key: {B['x-api-key']}\r\n"
        typed = "Content-Type: application/json\r\nContent-Length: 1000\r\n"
        half = f"POST {CHAT} HTTP/1.1\r\n{head}{typed}\r\n{{".encode()
        pipelined = f"GET /metrics HTTP/1.1\r\n{head}\r\n".encode() * 1_000
        held = [
            await asyncio.open_connection("127.0.0.1", client.port, limit=1024)
            for _ in range(STREAMS_MAX + CONNECTIONS_SPARE)
        ]
        for number, (_, writer) in enumerate(held):
            writer.write(half if number > 5 else pipelined)
        assert not await is_open(client.port)
        async with asyncio.timeout(30):
            while not await is_open(client.port):  # noqa: ASYNC110  a place becomes free
                await asyncio.sleep(0.1)
        for _, writer in held:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def is_open(port: int) -> bool:
    """Whether a new connection is read: without a key, the answer is then a 401."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    try:
        return (await reader.read(16)).startswith(b"HTTP/1.1 401 ")
    except ConnectionResetError:
        return False
    finally:
        writer.close()


async def test_a_storm_of_cancelled_requests_leaves_nothing(daemon: ChildDaemon) -> None:
    async with unharmed(daemon) as client:

        async def leave(number: int) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002 * number):
                    await client.call("POST", CHAT, B, json={**LONG, "stream": number % 2 == 0})

        for _ in range(3):
            await asyncio.gather(*(leave(number) for number in range(40)))
        await client.until_idle()
        status, health = await client.call("GET", "/health")
        assert (status, health["status"], health["troubles"]) == (200, "ok", [])
