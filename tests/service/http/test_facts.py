"""What the service says of itself and of a request: probes, the end of an answer, the log."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import aiohttp
import pytest

from batchengine.config import ApiKey
from service.log import TEXT, JsonLines, TextLines
from tests.service.http.test_http import data_of, events
from tests.support.fake_engine import FakeEngine, chat, fake_config, post, serving, with_server

KEYS = (ApiKey("alpha", "alpha-key-123"),)


async def test_probes_need_no_key_and_show_no_details() -> None:
    config = replace(fake_config(), auth=KEYS)
    async with serving(config=config) as served, aiohttp.ClientSession(served.base) as client:
        for path in ("/health", "/ready"):
            async with client.get(path) as reply:
                assert (reply.status, await reply.json()) == (200, {"status": "ok"})
            wrong = {"Authorization": "Bearer wrong"}
            async with client.get(path, headers=wrong) as reply:
                assert reply.status == 401
        async with client.get("/metrics") as reply:
            assert reply.status == 401
        async with client.get("/health", headers={"x-api-key": KEYS[0].key}) as reply:
            assert "lanes" in await reply.json()
        served.service.accepting = False
        for path in ("/health", "/ready"):
            async with client.get(path) as reply:
                assert (reply.status, await reply.json()) == (503, {"status": "draining"})
    config = with_server(config, keyless_routes=("/metrics",))
    async with serving(config=config) as served, aiohttp.ClientSession(served.base) as client:
        for path, status in (("/health", 401), ("/ready", 401), ("/metrics", 200)):
            async with client.get(path) as reply:
                assert reply.status == status, path


async def test_an_answer_that_is_cut_ends_with_a_reason_that_clients_know() -> None:
    engine = FakeEngine()
    engine.cut = "shutdown"
    async with serving(engine) as served:
        _, whole, _ = await post(served, "/v1/chat/completions", chat())
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["batchengine"]["cut"] == "shutdown"
        blocks = await events(served, "/v1/completions", {"prompt": "x"})
        *_, last = [c for c in data_of(blocks) if c["choices"]]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["batchengine"]["cut"] == "shutdown"
        engine.cut = ""
        _, whole, _ = await post(served, "/v1/chat/completions", chat())
        assert "cut" not in whole["batchengine"]


async def test_an_answer_without_a_session_names_none() -> None:
    async with serving() as served:
        _, whole, headers = await post(served, "/v1/chat/completions", chat())
        assert "x-batchengine-session-id" not in headers
        assert whole["batchengine"]["session_id"] is None
        named = chat(batchengine={"session_id": "tale"})
        _, whole, headers = await post(served, "/v1/chat/completions", named)
        assert headers["x-batchengine-session-id"] == whole["batchengine"]["session_id"]
        assert served.engine.generations[-1].request.client_name == "tale"


async def test_a_request_leaves_one_line_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "batchengine.service")
    async with serving() as served:
        await post(served, "/v1/chat/completions", chat("secret", session_id="my agent=1"))
    (record,) = [r for r in caplog.records if hasattr(r, "facts")]
    line = json.loads(JsonLines().format(record))
    assert line["message"].endswith("finished")
    assert (line["client_session"], line["lane"], line["class"]) == (
        "my agent=1",
        "cpu",
        "standard",
    )
    assert (line["output_tokens"], line["ttft_ms"], line["tpot_ms"]) == (3, 5.0, 2.0)
    assert line["cached_tokens"] > 0
    assert re.search(r"[+-]\d{4}$", line["time"])
    text = TextLines(TEXT).format(record)
    assert ' client_session="my agent=1" ' in text
    assert "\n" not in text
    assert "secret" not in text + json.dumps(line)
