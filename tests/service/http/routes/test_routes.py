"""Routes beside generation: llama-server's, counting, the queue, OpenAPI, and paths without one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import aiohttp
import pytest

from batchengine.config import ApiKey
from batchengine.core import BatchEngineError, SlaClass
from service.http import app
from service.http.routes import unbuilt
from service.protocols.llama import texts
from service.protocols.protocol import PromptLimits
from tests.support.fake_engine import (
    FakeEngine,
    FakeText,
    Served,
    chat,
    fake_config,
    post,
    serving,
    with_server,
)


async def get(served: Served, path: str, **headers: str) -> tuple[int, Any]:
    """Status and JSON body of one GET."""
    async with (
        aiohttp.ClientSession(served.base) as client,
        client.get(path, headers=headers) as reply,
    ):
        return reply.status, await reply.json()


async def test_texts_are_tokenised_and_counted_in_a_text_process() -> None:
    async with serving() as served:
        found = (await post(served, "/tokenize", {"content": "né"}))[1]
        assert found == {"tokens": [110, 195, 169]}
        found = (await post(served, "/tokenize", {"content": "né", "with_pieces": True}))[1]
        assert [one["piece"] for one in found["tokens"]] == ["n", [195], [169]]
        status, found, _ = await post(served, "/detokenize", {"tokens": [110, 195, 169]})
        assert (status, found) == (200, {"content": "né"})
        prompt = "user: hi\n"
        found = (await post(served, "/apply-template", chat()))[1]
        assert found == {"prompt": prompt, "tokens": len(prompt)}
        counted = (await post(served, "/v1/chat/completions/input_tokens", chat()))[1]
        assert counted == {"object": "response.input_tokens", "input_tokens": len(prompt)}
        long = chat("x" * 5000)  # more than the context, which is no error here
        counted = (await post(served, "/chat/completions/input_tokens", long))[1]
        assert counted["input_tokens"] == 5000 + len("user: \n")
        assert not served.service.preparing.total()


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/tokenize", {}, "missing_required_parameter"),
        ("/tokenize", {"content": 3}, "invalid_parameter"),
        ("/detokenize", {"tokens": [1, 300]}, "invalid_parameter"),
        ("/detokenize", {"tokens": [-1]}, "invalid_parameter"),
        ("/detokenize", {"tokens": "x"}, "invalid_parameter"),
        ("/apply-template", {"messages": []}, "invalid_parameter"),
        ("/v1/chat/completions/input_tokens", {}, "missing_required_parameter"),
    ],
)
async def test_wrong_bodies_of_text_routes_are_refused(
    path: str, body: dict[str, Any], name: str
) -> None:
    async with serving() as served:
        status, found, _ = await post(served, path, body)
        assert status == 400, found
        assert found["error"]["batchengine_code"].startswith("BE17")


def test_answers_about_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "ANSWER_BYTES_MAX", 1 << 20)
    limits = PromptLimits(100, 300, 16)
    body = json.dumps({"tokens": [65] * ((1 << 20) + 1)}).encode()
    with pytest.raises(BatchEngineError, match="at most 1048576"):
        texts.detokenize(FakeText(), limits, body)
    monkeypatch.setattr(texts, "ANSWER_BYTES_MAX", 1000)
    with pytest.raises(BatchEngineError, match="BE1750"):
        texts.detokenize(FakeText(), limits, json.dumps({"tokens": [65] * 1001}).encode())
    with pytest.raises(BatchEngineError, match="BE1750"):
        texts.tokenize(FakeText(), limits, json.dumps({"content": "x" * 1001}).encode())


async def test_generation_routes_have_aliases_without_the_prefix() -> None:
    async with serving() as served:
        status, body, _ = await post(served, "/chat/completions", chat())
        assert (status, body["object"]) == (200, "chat.completion")
        assert body["system_fingerprint"] == "be-fadefadefade-cafecafecafe"
        status, body, _ = await post(served, "/completions", {"prompt": "x"})
        assert (status, body["object"]) == (200, "text_completion")
        status, body, _ = await post(served, "/chat/completions", {})
        assert (status, body["error"]["param"]) == (400, "messages")


async def test_llama_server_probes_find_what_they_read() -> None:
    config = fake_config()
    async with serving(config=config) as served:
        assert (await get(served, "/models"))[1] == (await get(served, "/v1/models"))[1]
        props = (await get(served, "/props?model=fake&autoload=false"))[1]
        seats = config.lanes[0].entries_max
        assert props["total_slots"] == seats
        features = props["chat_template_caps"]
        assert features["supports_typed_content"] is True
        assert features["supports_tool_calls"] is True  # else OpenClaw turns tools off
        assert features["supports_parallel_tool_calls"] is True
        assert features["supports_reasoning_effort"] is False
        served.engine.info.chat_template = "{{ messages }}{# protools #}"
        features = (await get(served, "/props"))[1]["chat_template_caps"]
        assert features["supports_tool_calls"] is False
        served.engine.info.tool_template = "{{ tools }}"
        props = (await get(served, "/props"))[1]
        assert props["chat_template_caps"]["supports_tool_calls"] is True
        assert props["chat_template_tool_use"] == "{{ tools }}"
        served.engine.info.chat_template = "{{ tools }}<|channel|>"  # an answer has one call
        props = (await get(served, "/props"))[1]
        assert props["chat_template_caps"]["supports_parallel_tool_calls"] is False
        slots = (await get(served, "/slots"))[1]
        assert [row["id"] for row in slots] == list(range(seats))
        assert not any(row["is_processing"] for row in slots)
        found = (await get(served, "/version"))[1]
        assert found["system_fingerprint"] == props["system_fingerprint"]
        served.engine.phase = "loading"
        assert list((await get(served, "/version"))[1]) == ["version"]
        for path in ("/props", "/slots", "/api/queue"):
            assert (await get(served, path))[0] == 503


async def test_the_queue_shows_places_of_the_callers_requests_only() -> None:
    engine = FakeEngine(delay_s=30.0)
    engine.queued_s = 30.0
    auth = tuple(ApiKey(key=f"key-{n}" * 8, name=n, sla_class=SlaClass.STANDARD) for n in "ab")
    config = dataclasses.replace(fake_config(), auth=auth)
    async with serving(engine, config) as served, aiohttp.ClientSession(served.base) as client:
        keys = [{"Authorization": f"Bearer {one.key}"} for one in auth]
        waiting = await client.post(
            "/v1/chat/completions", json=chat(stream=True, session_id="s"), headers=keys[0]
        )
        rows = [dict(row) | {"position": 3, "eta_ms": 42_000.0} for row in engine.requests()]
        engine.requests = lambda tenant, _: [  # type: ignore[method-assign]
            row for row in rows if row["tenant"] == tenant
        ]
        for headers, count in ((keys[0], 1), (keys[1], 0)):
            async with client.get("/api/queue", headers=headers) as reply:
                body = await reply.json()
            assert (body["requests"], len(body["data"])) == (count, count)
        async with client.get("/api/queue?session_id=none", headers=keys[0]) as reply:
            assert (await reply.json())["data"] == []
        own = waiting.headers["x-batchengine-session-id"]
        async with client.get(f"/api/queue?session_id={own}", headers=keys[0]) as reply:
            row = (await reply.json())["data"][0]
        assert (row["position"], row["eta_ms"]) == (3, 42_000.0)
        assert "tenant" not in row
        async with client.get("/api/queue") as reply:
            assert reply.status == 401
        waiting.close()


async def test_watchers_share_the_rows_of_half_a_second() -> None:
    async with serving() as served:
        made: list[int] = []
        real = served.engine.requests

        def counted(*asked: Any) -> Any:
            made.append(1)
            return real(*asked)

        served.engine.requests = counted  # type: ignore[method-assign]
        await asyncio.gather(*(get(served, "/api/queue") for _ in range(20)))
        assert len(made) <= 2


async def test_every_route_is_in_the_openapi_document() -> None:
    async with serving() as served:
        document = (await get(served, "/openapi.json"))[1]
        service = app.Service.create(served.engine, fake_config())
        registered = {
            (one.method.lower(), one.resource.canonical)
            for one in app.build(service).router.routes()
            if one.resource is not None and one.method not in ("HEAD", "*")
        }
        assert len(app.ROUTES) == len(registered)
        described = {
            (method, path) for path, methods in document["paths"].items() for method in methods
        }
        assert described == registered
        assert document["openapi"] == "3.1.0"
        assert "securitySchemes" not in document["components"]
        names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
        assert len(set(names)) == len(names)
        schemas = document["components"]["schemas"]
        assert "messages" in schemas["ChatRequest"]["required"]
        text = json.dumps(document)
        for ref in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
            assert ref in schemas


async def test_paths_without_a_route_are_404_with_a_replacement() -> None:
    async with serving() as served:
        for path, word in [
            ("/v1/embeddings", "llama-server --embeddings"), ("/embeddings", "--embeddings"),
            ("/v1/files", "messages"), ("/v1/files/file-1/content", "messages"),
            ("/v1/audio/speech", "speech"), ("/v1/batches", "NAME:batch"),
            ("/v1/v1/chat/completions", "one /v1"), ("/api/chat", "base URL"),
            ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
            ("/heath", "did you mean /health?"), ("/" + "x" * 3000, "/openapi.json"),
            ("/v1/messages/batches", "service_tier"),
            ("/v1/chat/completions/chatcmpl-1", "POST /v1/responses"),
            ("/v1/chat/completions/chatcmpl-1/messages", "POST /v1/responses"),
            ("/v1beta/models/fake:generateContent", "OpenAI's"),
        ]:  # fmt: skip
            status, body, headers = await post(served, path, {})
            assert status == 404, path
            assert headers["x-should-retry"] == "false"
            assert word in body["error"]["fix"], path
            status, _ = await get(served, path)
            assert status == 404


def test_a_base_url_that_ends_in_a_slash_is_named() -> None:
    error = unbuilt.refusal("GET", "//v1/models", ["/v1/models"])
    assert error.fix == "leave the / at the end of the base URL out"


def test_no_row_of_unbuilt_paths_hides_a_route() -> None:
    """Rows of the protocols that are built are there for the rest of their paths only."""
    built = {row.path.removeprefix("/v1").lstrip("/").partition("/")[0] for row in app.ROUTES}
    assert set(unbuilt.SAME.values()) <= unbuilt.UNBUILT.keys()
    assert built & unbuilt.UNBUILT.keys() <= {"responses", "messages", "api"}


async def test_tls_is_recognised_on_the_port() -> None:
    async with serving() as served:
        hello = bytes.fromhex("16030100c8010000c40303") + bytes(32)
        answer = await served.raw(hello)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"this looks like TLS" in answer
        assert b"use http://" in answer


async def test_pages_of_allowed_origins_may_read_answers() -> None:
    origin = "http://localhost:3000"
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    config = with_server(fake_config(), allowed_origins=(origin,))
    auth = (ApiKey(key="k" * 32, name="a", sla_class=SlaClass.STANDARD),)
    config = dataclasses.replace(config, auth=auth)
    async with serving(config=config) as served, aiohttp.ClientSession(served.base) as client:
        async with client.options("/v1/chat/completions", headers=asked) as reply:
            assert reply.status == 204  # browsers ask without a key
            assert reply.headers["Access-Control-Allow-Origin"] == origin
            assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        headers = {"Origin": origin, "Authorization": "Bearer " + "k" * 32}
        for path, more in (("/v1/models", {}), ("/nowhere", {}), ("/health", {"x": "y"})):
            async with client.get(path, headers=headers | more) as reply:
                assert reply.headers["Access-Control-Allow-Origin"] == origin
        async with client.post(
            "/v1/chat/completions", json=chat(stream=True), headers=headers
        ) as reply:
            assert reply.headers["Access-Control-Allow-Origin"] == origin
        other = asked | {"Origin": "http://evil.example"}
        async with client.options("/v1/chat/completions", headers=other) as reply:
            assert reply.status == 403
            assert "Access-Control-Allow-Origin" not in reply.headers
            fix = (await reply.json())["error"]["fix"]
            assert "add http://evil.example to server.allowed_origins" in fix
        async with client.get("/v1/models", headers={"Authorization": "Bearer x"}) as reply:
            assert "Access-Control-Allow-Origin" not in reply.headers
