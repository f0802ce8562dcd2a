"""Connections: no client holds one of the few places for ever, whether it writes or reads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import pytest

from batchengine.config import ApiKey
from service.http import listener
from tests.support.fake_engine import (
    FakeEngine,
    Served,
    chat,
    fake_config,
    post,
    serving,
    with_server,
)

STALL_S = 1.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
WHOLE = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
BODY = b'{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}'
ASKED = WHOLE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def large() -> FakeEngine:
    """An engine whose whole answer is far larger than the buffers of a socket."""
    return FakeEngine(["x" * 100_000] * 40)


async def connect(served: Served) -> socket.socket:
    """A connection with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.port))
    return sock


async def is_served(served: Served, request: bytes = HEALTH) -> bool:
    answer = await served.raw(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    return answer.startswith(b"HTTP/1.1 200 ")


async def served_within(served: Served, seconds: float, request: bytes = HEALTH) -> bool:
    try:
        async with asyncio.timeout(seconds):
            while not await is_served(served, request):  # noqa: ASYNC110  a place becomes free
                await asyncio.sleep(0.1)
    except TimeoutError:
        return False
    return True


async def test_answers_that_are_never_read_give_their_connections_back() -> None:
    """Pipelined requests whose answers fill every buffer, and one answer that does so alone."""
    config = with_server(fake_config(), reader_stall_s=STALL_S)
    async with serving(large(), config, connections_max=3) as served:
        loop = asyncio.get_running_loop()
        began, held = loop.time(), [await connect(served) for _ in range(3)]
        sending = [
            asyncio.create_task(loop.sock_sendall(held[0], HEALTH * 20_000)),
            asyncio.create_task(loop.sock_sendall(held[1], ASKED)),
            asyncio.create_task(loop.sock_sendall(held[2], HEALTH * 20_000)),
        ]
        await asyncio.sleep(0.5)
        assert not await is_served(served) or loop.time() - began > STALL_S
        assert await served_within(served, 30.0)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        for sock in held:
            sock.close()


async def test_a_large_answer_goes_to_slow_readers_and_not_to_the_slowest() -> None:
    config = with_server(fake_config(), reader_stall_s=STALL_S)
    async with serving(large(), config, connections_max=1) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(ASKED)
        got = 0
        while got < 4_000_000:
            got += len(await reader.read(1 << 16))
            await asyncio.sleep(0.02)
        writer.close()
        assert await served_within(served, 30.0)
        await asyncio.sleep(0.2)  # that one is closed too
        loop = asyncio.get_running_loop()
        began, sock = loop.time(), await connect(served)
        await loop.sock_sendall(sock, ASKED)

        async def crawl() -> None:
            while await loop.sock_recv(sock, 100):  # noqa: ASYNC110  a slow program
                await asyncio.sleep(0.05)

        crawling = asyncio.create_task(crawl())
        await asyncio.sleep(0.5)
        assert not await is_served(served) or loop.time() - began > STALL_S
        assert await served_within(served, 30.0)
        crawling.cancel()
        await asyncio.gather(crawling, return_exceptions=True)
        sock.close()


async def test_a_malformed_chunk_is_answered_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(WHOLE + b"Transfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.2)  # the route waits for the body by now
        writer.write(b"5\r\n{}   \r\n")
        await asyncio.sleep(0.1)
        writer.write(b"zz\r\nno chunk\r\n")
        async with asyncio.timeout(30.0):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"malformed" in answer
        assert (await post(served, "/v1/chat/completions", chat()))[0] == 200
    assert not [row for row in caplog.records if row.levelname == "ERROR"]  # the client's mistake


async def test_idle_connections_give_way_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept alive between requests, they would hold every place with one request in two minutes."""
    monkeypatch.setattr(listener, "REST_SECONDS", 0.5)
    async with serving(connections_max=2) as served:
        loop = asyncio.get_running_loop()
        began = loop.time()
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        for reader, writer in held:
            writer.write(HEALTH)
            await reader.readuntil(b"\r\n\r\n")
        # they may be about to send the next request
        assert not await is_served(served) or loop.time() - began > listener.REST_SECONDS
        assert await served_within(served, 30.0)
        for _, writer in held:
            writer.close()


async def test_guessers_of_keys_give_way_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attempts wait, and a connection with a request that waits is not idle."""
    monkeypatch.setattr(listener, "REST_SECONDS", 0.5)
    config = replace(fake_config(), auth=(ApiKey(name="alpha", key="alpha-key-123"),))
    guess = HEALTH.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer wrong\r\n\r\n")
    right = guess.replace(b"wrong", b"alpha-key-123")
    async with serving(config=config, connections_max=4) as served:

        async def guesser() -> None:
            while True:
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(guess * 200)
                with contextlib.suppress(ConnectionResetError), contextlib.closing(writer):
                    await reader.read(-1)

        guessers = [asyncio.create_task(guesser()) for _ in range(4)]
        await asyncio.sleep(1.0)
        was_served = [await served_within(served, 30.0, right) for _ in range(3)]
        for task in guessers:
            task.cancel()
        await asyncio.gather(*guessers, return_exceptions=True)
    assert was_served == [True] * 3


async def test_a_second_request_that_dribbles_in_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time between two requests is that until the next one is whole."""
    monkeypatch.setattr(listener, "IDLE_SECONDS", 1.0)
    async with serving(connections_max=1) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HEALTH + b"GET /health HTTP/1.1\r\nX-Slow: ")

        async def dribble() -> None:
            for _ in range(600):
                writer.write(b"x")
                await asyncio.sleep(0.05)

        dribbling = asyncio.create_task(dribble())
        async with asyncio.timeout(20.0):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            with contextlib.suppress(ConnectionResetError):  # it has sent more meanwhile
                await reader.read()
        dribbling.cancel()
        await asyncio.gather(dribbling, return_exceptions=True)
        writer.close()


def test_vanished_clients_are_noticed() -> None:
    """Accepted connections have the keep-alive times of the listening socket."""
    listening = listener.bind("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            for option, value in listener.KEEPALIVE:
                assert accepted.getsockopt(socket.IPPROTO_TCP, option) == value
