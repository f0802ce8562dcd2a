"""Limits of what clients may make the service hold, and isolation of requests."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from batchengine.config import ApiKey, Config
from service.http import admission
from service.protocols.openai import chat as chat_module
from tests.support.engines import until
from tests.support.fake_engine import (
    FakeEngine,
    Served,
    chat,
    fake_config,
    post,
    serving,
)

CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()


def with_streams(count: int) -> Config:
    config = fake_config()
    return replace(config, limits=replace(config.limits, streams_max=count))


def is_idle(served: Served) -> bool:
    service = served.service
    return not (service.live or service.preparing.total() or service.body_bytes.total())


async def test_one_key_does_not_take_every_stream() -> None:
    """Of eight streams key a takes four, and then two of the four that b left when b has two."""
    keys = (ApiKey("a", "key-of-a-1234"), ApiKey("b", "key-of-b-1234", streams_max=2))
    config = replace(with_streams(8), auth=keys)
    engine = FakeEngine(["tok"] * 4, delay_s=60)
    async with serving(engine, config=config) as served:
        a, b = {"x-api-key": "key-of-a-1234"}, {"x-api-key": "key-of-b-1234"}
        held: list[asyncio.Task[Any]] = []

        async def hold(headers: dict[str, str], count: int) -> None:
            for _ in range(count):
                streams = len(served.service.live)
                held.append(asyncio.ensure_future(post(served, CHAT, chat(), headers=headers)))
                await until(lambda: len(served.service.live) > streams)  # noqa: B023

        await hold(a, 4)
        status, reply, _ = await post(served, CHAT, chat(), headers=a)
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "of this key" in reply["error"]["message"]
        await hold(b, 2)
        assert (await post(served, CHAT, chat(), headers=b))[0] == 429  # its own limit
        text, _ = engine.metrics.render()
        assert b'batchengine_shed_total{class="",reason="key_streams"} 2.0' in text
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_head_of_a_stream_is_refused_and_resumes_nothing() -> None:
    engine = FakeEngine(["tok"] * 3)
    async with serving(engine) as served:
        await post(served, CHAT, chat(session_id="mine"))
        answer = await served.raw(
            b"HEAD /v1/stream?session_id=mine HTTP/1.1\r\nHost: localhost\r\n\r\n"
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        first, _, rest = answer.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 405 ")
        assert b"\r\nAllow: GET\r\n" in first + b"\r\n"
        assert rest.startswith(b"HTTP/1.1 200 ")  # no body between them
        assert len(engine.generations) == 1
        async with aiohttp.ClientSession(served.base) as client:
            for path in ("/health", "/v1/models", "/v1/sessions"):
                async with client.head(path) as reply:
                    assert reply.status == 200


async def test_every_resume_of_one_turn_counts_as_a_stream() -> None:
    """Streams of a turn have its request id; each of them holds events and a connection."""
    engine = FakeEngine(["tok"] * 50, delay_s=0.1)
    async with serving(engine, with_streams(3)) as served:
        async with aiohttp.ClientSession(served.base) as client:
            held = [await client.post(CHAT, json=chat(session_id="mine", stream=True))]
            held += [await client.get("/v1/stream?session_id=mine") for _ in range(2)]
            assert [reply.status for reply in held] == [200, 200, 200]
            async with client.get("/v1/stream?session_id=mine") as reply:
                assert reply.status == 503
            assert (
                b'batchengine_shed_total{class="",reason="streams"} 1.0'
                in engine.metrics.render()[0]
            )
            assert len(served.service.live) == 3
            request_id = engine.generations[0].request_id
            assert served.service.cancel(request_id)
            assert all(generation.cancelled.is_set() for generation in engine.generations)
            for reply in held:
                reply.close()
        await until(lambda: is_idle(served))


async def test_a_wrong_method_is_answered_with_the_allowed_ones() -> None:
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        for method, path, allowed in (
            ("GET", CHAT, "POST"),
            ("POST", "/health", "GET, HEAD"),
            ("PUT", "/v1/sessions/s", "DELETE, GET, HEAD"),
            ("POST", "/v1/stream", "GET"),
        ):
            async with client.request(method, path) as reply:
                assert (reply.status, reply.headers["Allow"]) == (405, allowed)
                assert (await reply.json())["error"]["allowed"] == allowed


async def test_expect_is_answered_after_the_access_checks() -> None:
    config = replace(fake_config(), auth=(ApiKey("alpha", "alpha-key-123"),))
    async with serving(config=config) as served:
        for method, path in (
            ("GET", "/metrics"), ("GET", "/v1/models/fake"), ("GET", "/v1/stream"),
            ("GET", "/v1/sessions"), ("DELETE", "/v1/sessions/s"), ("GET", "/nothing"),
            ("POST", "/v1/sessions/s/park"), ("POST", "/v1/embeddings"), ("PUT", "/health"),
        ):  # fmt: skip
            for lines, status in (
                ("Host: evil", b"403"),
                ("Host: localhost", b"401"),
                ("Host: localhost\r\nAuthorization: Bearer alpha-key-123", b"417"),
            ):
                answer = await served.raw(
                    f"{method} {path} HTTP/1.1\r\n{lines}\r\nExpect: nonsense\r\n"
                    "Connection: close\r\nContent-Length: 0\r\n\r\n".encode()
                )
                assert answer[9:12] == status, (method, path, answer[:200])
                assert b"nonsense" not in answer
                assert b'"error"' in answer


async def pour(served: Served, bytes_max: int) -> tuple[int, bytes]:
    """(bytes of an endless chunked body that were taken, the answer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(CHUNKED)
    answer = asyncio.create_task(reader.read(4096))
    sent = 0
    try:
        while sent < bytes_max and not answer.done():
            writer.write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
            sent += 0x4000
            async with asyncio.timeout(60):
                await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            return sent, await answer
    finally:
        writer.close()


async def test_a_chunked_body_is_refused_as_soon_as_it_is_too_long() -> None:
    """F59: no length was sent, so the bytes themselves are counted."""
    bytes_max = 1 << 20
    async with serving(config=fake_config(body_bytes_max=bytes_max)) as served:
        sent, answer = await pour(served, 30 << 20)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"request_too_large" in answer
        assert b"Connection: close" in answer
        assert bytes_max < sent < bytes_max + (12 << 20)  # socket buffers hold some more
        await until(lambda: is_idle(served))
        assert (await post(served, CHAT, chat()))[0] == 200


async def test_bodies_being_received_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODIES_BYTES_MAX", 100_000)
    async with serving(config=fake_config(body_bytes_max=60_000)) as served:
        body = json.dumps(chat("x" * 50_000)).encode()
        head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
        first, slow = await asyncio.open_connection("127.0.0.1", served.port)
        slow.write(head + body[:-1])
        await until(lambda: served.service.body_bytes.total() == len(body) - 1)
        answer = await served.raw(head + body)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_bodies" in answer
        assert b"Retry-After: 2" in answer
        assert b"Connection: close" in answer
        assert (await post(served, CHAT, chat()))[0] == 200  # a small one is still admitted
        slow.write(body[-1:])  # and the first one is not affected
        assert b"context_length_exceeded" in await first.read(4096)
        slow.close()
        await until(lambda: is_idle(served))


async def test_requests_being_prepared_count_as_streams() -> None:
    engine = FakeEngine()
    gate = asyncio.Event()
    real = engine.text.read

    async def gated(question: bytes, body: bytes | memoryview, *, tenant: str) -> bytes:
        await gate.wait()
        return await real(question, body, tenant=tenant)

    engine.text.read = gated  # type: ignore[method-assign]
    async with serving(engine, with_streams(2)) as served:
        tokenising = asyncio.create_task(post(served, CHAT, chat(session_id="s")))
        _, sending = await asyncio.open_connection("127.0.0.1", served.port)
        sending.write(f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        await until(lambda: served.service.preparing.total() == 2)
        status, reply, headers = await post(served, CHAT, chat())
        assert (status, reply["error"]["code"]) == (503, "too_many_requests")
        assert "Retry-After" in headers
        async with (
            aiohttp.ClientSession(served.base) as client,
            client.get("/v1/stream?session_id=s") as resumed,
        ):
            assert resumed.status == 503  # not admitted
        sending.close()  # and is no longer counted
        await until(lambda: served.service.preparing.total() == 1)
        gate.set()
        assert (await tokenising)[0] == 200
        for body in ({"messages": []}, chat("x" * 5000), chat(model="none"), chat()):
            await post(served, CHAT, body)
        await until(lambda: is_idle(served))
        engine.refuse = RuntimeError("broken")  # type: ignore[assignment]
        assert (await post(served, CHAT, chat()))[0] == 500
        assert is_idle(served)


async def test_the_newest_tool_calls_are_looked_up() -> None:
    calls = [{"id": f"call_{i}"} for i in range(500)]
    large = {"messages": [{"role": "assistant", "tool_calls": calls}] * 4}
    async with serving() as served:
        await post(served, CHAT, large)
        found = served.engine.generations[-1].request.tool_call_ids
        assert found == tuple(f"call_{i}" for i in range(436, 500))


async def test_a_fault_within_a_stream_ends_the_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second answer would be read as part of the first."""

    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(chat_module.ChatFormatter, "token", broken)

    caplog.set_level("INFO", logger="batchengine")
    body = json.dumps(chat(stream=True)).encode()
    async with serving() as served:
        answer = await served.raw(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"internal_error" not in answer
        await until(lambda: is_idle(served))
        assert [g.cancelled.is_set() for g in served.engine.generations] == [True]
    assert "in the middle of its answer" in caplog.text
    assert caplog.text.count("RuntimeError: secret") == 1
    assert any(re.fullmatch(r"req_\w+ failed", record.getMessage()) for record in caplog.records)


async def test_any_failure_of_a_submission_cancels_its_other_choices() -> None:
    engine = FakeEngine()
    real = engine.submit

    def third_breaks(request: Any) -> Any:
        if len(engine.generations) == 2:
            raise MemoryError
        return real(request)

    engine.submit = third_breaks  # type: ignore[method-assign]
    async with serving(engine) as served:
        assert (await post(served, CHAT, chat(n=4)))[0] == 500
        assert [g.cancelled.is_set() for g in engine.generations] == [True, True]


async def test_fields_that_nothing_reads_count_as_ignored() -> None:
    async with serving() as served:
        for name, value in (("max_context_tokens", 100),):
            body = chat(batchengine={name: value, "class": "batch"})
            assert (await post(served, CHAT, body))[0] == 200
            text = served.engine.metrics.render()[0].decode()
            assert f'field="batchengine.{name}"' in text
            status, reply, _ = await post(served, CHAT + "?strict=1", body)
            assert (status, reply["error"]["code"]) == (400, "unknown_parameter")
            assert reply["error"]["param"] == f"batchengine.{name}"
        body = chat(batchengine={"parent_session_id": None, "class": "batch"})
        assert (await post(served, CHAT + "?strict=1", body))[0] == 200
