"""No answer, however large, holds the event loop: every other stream goes on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from batchengine.config import ApiKey
from batchengine.core import SkippedEvent, TokenEvent, TokenLogprob
from batchengine.engine.turns.stream import Generation
from batchengine.text.detokeniser import Detokeniser
from tests.service.least import least
from tests.support.engines import request
from tests.support.fake_engine import CONTEXT_TOKENS, FakeEngine, chat, fake_config, serving
from tests.support.loop_lag import loop_lag

pytestmark = pytest.mark.alone

LAG_MS_MAX = 20.0
TOKENS = 12_000
TOP = tuple(TokenLogprob(token, b"\xe2\x82\xac %d" % token, -0.5 - token) for token in range(20))


class Fluent(FakeEngine):
    """An engine that has all tokens of its answer at once, with 20 alternatives each."""

    def __init__(self) -> None:
        super().__init__(())
        self.info.context_tokens = TOKENS + CONTEXT_TOKENS

    def submit(self, request: Any) -> Any:
        generation = super().submit(request)
        rows = [TokenEvent(0, "word ", TOP[0], TOP)] * TOKENS
        last = generation.events

        async def events() -> list[Any]:
            if rows:
                taken, rows[:] = list(rows), []
                return taken
            return await last()

        generation.events = events
        return generation


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_long_answer_with_logprobs_leaves_the_loop_free(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"stream": stream, "max_tokens": TOKENS}
    if "chat" in path:
        body = chat(logprobs=True, top_logprobs=20, **body)
    else:
        body |= {"model": "fake", "prompt": "hi", "logprobs": 20}
    got: list[bytes] = []

    async def scene() -> float:
        got.clear()
        engine = Fluent()
        async with (
            serving(engine) as served,
            aiohttp.ClientSession() as client,
            loop_lag() as lag,
            client.post(served.base + path, json=body) as reply,
        ):
            async for part in reply.content.iter_any():
                got.append(part)
            assert reply.status == 200
        return lag.worst_ms

    assert await least(scene, LAG_MS_MAX) < LAG_MS_MAX
    assert sum(map(len, got)) > TOKENS * 300
    if not stream:
        choice = json.loads(b"".join(got))["choices"][0]
        lists = choice["logprobs"].get("content") or choice["logprobs"]["tokens"]
        assert len(lists) == TOKENS


async def test_a_listing_of_every_session_leaves_the_loop_free() -> None:
    """As many as the engine keeps in memory, with the facts of a named session."""
    rows = [
        {
            "session_id": f"s{number}", "tenant": "", "class": "standard", "state": "idle",
            "tokens": 3, "frontier": 2, "pages": 1, "pages_sealed": 0, "epoch": 1,
            "tokens_reused": 1, "tokens_prompt": 3, "reason": "", "lane": "cpu",
        }
        for number in range(4096)
    ]  # fmt: skip
    engine = FakeEngine()
    engine.sessions = lambda tenant=None: rows  # type: ignore[method-assign]

    async def scene() -> float:
        async with (
            serving(engine) as served,
            aiohttp.ClientSession() as client,
            loop_lag() as lag,
            client.get(served.base + "/v1/sessions") as reply,
        ):
            assert len(await reply.read()) > 4096 * 100
        return lag.worst_ms

    assert await least(scene, LAG_MS_MAX) < LAG_MS_MAX


async def test_a_session_of_many_turns_leaves_the_loop_free() -> None:
    engine = FakeEngine()
    turn = {"turn": "t", "prompt_tokens": 9, "new_tokens": 1, "status": "done"}

    async def detail(tenant: str, session_id: str) -> dict[str, Any]:
        names = {"session_id": session_id, "family": session_id, "tenant": tenant}
        return names | {"turns": [turn] * 20_000}

    engine.session_detail = detail  # type: ignore[method-assign]

    async def scene() -> float:
        async with (
            serving(engine) as served,
            aiohttp.ClientSession() as client,
            loop_lag() as lag,
            client.get(served.base + "/v1/sessions/s") as reply,
        ):
            found = json.loads(await reply.read())
        assert found["turns"] == [turn] * 20_000
        assert "tenant" not in found
        return lag.worst_ms

    assert await least(scene, LAG_MS_MAX) < LAG_MS_MAX


async def test_a_resume_of_a_long_turn_leaves_the_loop_free() -> None:
    """45,000 tokens that an earlier stream computed; the reader has all but the last."""
    tokens = [index % 7 for index in range(45_000)]
    pieces = [b"a", b"b", b"\xe2\x82", b"\xac", b"c", b"d", b" "]

    def resumed(known: int) -> Generation:
        generation = Generation(
            request([1], 100_000, stop=("never",)),
            "s",
            lambda: Detokeniser(pieces.__getitem__, lambda _: False),
            0.0,
            lambda _: None,
            lambda _: None,
        )
        generation.resumes = known
        return generation

    async def scene() -> float:
        async with loop_lag() as lag:
            late, early = resumed(len(tokens) - 1), resumed(0)
            assert await late.replay(tokens, frozenset()) == ""
            assert await early.replay(tokens, frozenset()) == ""
            batch = await late.events()
            while isinstance(batch[-1], SkippedEvent):  # its reader has that text
                batch = await late.events()
            last = [event.token for event in batch if isinstance(event, TokenEvent)]
            assert last == tokens[-1:]
            seen: list[Any] = []
            while len(seen) < len(tokens):
                batch = await early.events()
                assert len(batch) <= 256  # never more in memory, however long the turn
                seen += batch
                await asyncio.sleep(0)
        assert [event.token for event in seen] == tokens
        assert "".join(event.text for event in seen).startswith("ab€cd ab€")
        return lag.worst_ms

    assert await least(scene, LAG_MS_MAX) < LAG_MS_MAX


@pytest.mark.parametrize("key", ["alpha-key-123", "wrong"])  # its body is read, and thrown away
async def test_a_body_of_tiny_chunks_leaves_the_loop_free(key: str) -> None:
    config = replace(fake_config(), auth=(ApiKey(name="alpha", key="alpha-key-123"),))
    text = json.dumps(chat()) + " " * 150_000
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    body = "".join(f"1\r\n{letter}\r\n" for letter in text) + "0\r\n\r\n"

    async def scene() -> float:
        async with serving(config=config) as served, loop_lag() as lag:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write((head + body).encode())
            async with asyncio.timeout(120):
                answer = await reader.readuntil(b"\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):  # all of it may not be taken
                    await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 401" if key == "wrong" else b"HTTP/1.1 200")
        return lag.worst_ms

    assert await least(scene, LAG_MS_MAX) < LAG_MS_MAX


async def test_what_holds_the_loop_is_seen_in_the_metrics() -> None:
    async with serving(FakeEngine()) as served, aiohttp.ClientSession() as client:
        lag_s = 0.0
        async with asyncio.timeout(20):
            while lag_s < 0.1:
                time.sleep(0.2)  # noqa: ASYNC251  the loop is to be held
                await asyncio.sleep(0.01)
                async with client.get(served.base + "/metrics") as reply:
                    lines = (await reply.text()).splitlines()
                name = "batchengine_event_loop_lag_seconds_sum"
                lag_s = next(float(line.split()[1]) for line in lines if line.startswith(name))
