"""The HTTP service over a real port: answers, streams, the OpenAI SDK, concurrency."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from batchengine import errors
from batchengine.core import SlaClass
from service.http import admission, listener
from service.http.answers import ANSWER_HEADERS
from tests.support.fake_engine import (
    MODEL_ID,
    FakeEngine,
    Served,
    chat,
    fake_config,
    post,
    serving,
)


async def events(served: Served, path: str, body: dict[str, Any]) -> list[str]:
    """The SSE blocks of one streamed answer, in order."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(served.base + path, json={**body, "stream": True}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        text = (await reply.read()).decode()
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def data_of(blocks: list[str]) -> list[dict[str, Any]]:
    """The JSON of data blocks, without [DONE]."""
    return [json.loads(b[6:]) for b in blocks if b.startswith("data: {")]


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition that other tasks make true."""
    deadline = asyncio.get_running_loop().time() + seconds
    for _ in range(100_000):
        if condition():
            return
        assert asyncio.get_running_loop().time() < deadline, "never happened"
        await asyncio.sleep(0.005)


async def test_chat_stream_events_come_in_the_documented_order() -> None:
    async with serving() as served:
        body = chat(stream_options={"include_usage": True}, seed=7)
        blocks = await events(served, "/v1/chat/completions", body)
        assert blocks[-1] == "data: [DONE]"
        chunks = data_of(blocks)
        shown = [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks[:-1]]
        assert shown == [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "Hel"}, None),
            ({"content": "lo"}, None),
            ({"content": " wörld"}, None),
            ({}, "stop"),
        ]
        assert all(c["usage"] is None for c in chunks[:-1])
        last = chunks[-1]
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens"] == len(b"user: hi\n")
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        assert last["batchengine"]["class"] == "standard"
        assert last["batchengine"]["seed"] == 7
        assert {c["id"] for c in chunks} == {last["id"]}
        assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


async def test_without_usage_the_last_chunk_has_the_extension_fields() -> None:
    async with serving() as served:
        chunks = data_of(await events(served, "/v1/chat/completions", chat()))
        assert "usage" not in chunks[0]
        assert "usage" not in chunks[-1]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["batchengine"]["lane"] == "cpu"
        assert chunks[-1]["timings"]["predicted_n"] == 3
        assert all("batchengine" not in c for c in chunks[:-1])


async def test_answers_without_a_stream_have_a_body_and_headers() -> None:
    async with serving() as served:
        status, body, headers = await post(
            served, "/v1/chat/completions", chat(max_tokens=2), headers={"session-id": "s1"}
        )
        assert status == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == "Hello"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] == 9 + 2
        session = body["batchengine"]["session_id"]
        assert session.startswith("be_")
        lower = {name.lower(): value for name, value in headers.items()}
        assert lower["x-batchengine-session-id"] == session
        assert lower["x-batchengine-route"] == "cpu"
        assert lower["x-request-id"] == body["batchengine"]["request_id"]
        assert lower["server"] == "batchengine"
        assert lower["x-batchengine-load"] == (
            "requests_running=1, requests_waiting=0, kv_usage_ratio=0.250"
        )
        own = {name for name in lower if name.startswith("x-batchengine-")}
        assert own <= set(ANSWER_HEADERS), "docs/api.md lists them"

        status, body, _ = await post(served, "/v1/completions", {"prompt": "abc"})
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == "Hello wörld"
        assert served.engine.generations[-1].request.tokens_max == 16


async def test_every_parameter_reaches_the_engine() -> None:
    async with serving() as served:
        body = chat(
            temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1,
            presence_penalty=0.5, frequency_penalty=-0.5, seed=-1, stop=["x", "y", "x"],
            logit_bias={"7": 1.5, "3": -100}, max_tokens=9, max_completion_tokens=5,
            ignore_eos=True, logprobs=True, top_logprobs=3, min_tokens=4,
        )  # fmt: skip
        assert (await post(served, "/v1/chat/completions", body))[0] == 200
        request = served.engine.generations[0].request
        sampling = request.sampling
        # 0.7 rounded to binary32
        assert sampling.temperature == 0.699999988079071
        assert sampling.top_p == 0.8999999761581421
        assert sampling.min_p == 0.05000000074505806
        assert sampling.repetition_penalty == 1.100000023841858
        assert (sampling.top_k, sampling.logprobs, sampling.tokens_min) == (40, 3, 4)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
        assert sampling.seed == (1 << 64) - 1
        assert sampling.logit_bias == ((3, -100.0), (7, 1.5))
        assert request.stop == ("x", "y")
        assert request.tokens_max == 5
        assert request.ignore_eos

        assert (await post(served, "/v1/chat/completions", chat()))[0] == 200
        plain = served.engine.generations[1].request
        assert (plain.sampling.temperature, plain.sampling.top_p) == (1.0, 1.0)
        assert (plain.sampling.top_k, plain.sampling.logprobs) == (0, -1)
        assert plain.tokens_max == 2048 - len(plain.prompt)  # no limit: the rest of the context
        near = chat("x" * 2000)
        assert (await post(served, "/v1/chat/completions", near))[0] == 200
        near_full = served.engine.generations[2].request
        assert near_full.tokens_max == 2048 - len(near_full.prompt)


async def test_message_forms_reach_the_template_as_plain_text() -> None:
    async with serving() as served:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "reasoning": "hm",
             "tool_calls": [{"id": "1", "type": "function",
                             "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "42", "surprise": True},
        ]  # fmt: skip
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": [1]}}}]
        body = {
            "messages": messages,
            "tools": tools,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
        }
        status, reply, _ = await post(served, "/v1/chat/completions", body)
        assert status == 200, reply
        seen, seen_tools, kwargs = served.engine.text.chats[0]
        assert [m["role"] for m in seen] == ["system", "user", "assistant", "tool"]
        assert seen[1]["content"] == "a\nb"
        assert seen[2]["content"] == ""
        assert seen[2]["reasoning_content"] == "hm"
        assert seen[2]["tool_calls"] == messages[2]["tool_calls"]
        assert seen[3] == {"role": "tool", "tool_call_id": "1", "content": "42"}
        assert seen_tools == tools
        assert kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
        body["tool_choice"] = "none"
        await post(served, "/v1/chat/completions", body)
        assert served.engine.text.chats[1][1] == tools


async def test_n_choices_have_separate_seeds_and_one_session() -> None:
    async with serving() as served:
        body = chat(n=3, seed=11, session_id="mine")
        status, reply, _ = await post(served, "/v1/chat/completions", body)
        assert status == 200
        assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
        assert reply["usage"]["completion_tokens"] == 9
        assert reply["usage"]["prompt_tokens"] == 9  # the prompt is counted once
        requests = [g.request for g in served.engine.generations]
        seeds = [r.sampling.seed for r in requests]
        assert seeds[0] == 11
        assert len(set(seeds)) == 3
        assert [r.session_id is not None for r in requests] == [True, False, False]
        assert len({r.request_id for r in requests}) == 3

        await post(served, "/v1/chat/completions", body)
        again = [g.request.sampling.seed for g in served.engine.generations[3:]]
        assert again == seeds  # the same request draws the same numbers

        chunks = data_of(await events(served, "/v1/chat/completions", body))
        finished = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
        assert sorted(finished) == [0, 1, 2]
        for index in range(3):
            text = "".join(
                c["choices"][0]["delta"].get("content", "")
                for c in chunks
                if c["choices"][0]["index"] == index
            )
            assert text == "Hello wörld"


async def test_every_form_of_a_prompt_is_accepted() -> None:
    async with serving() as served:
        forms: list[tuple[Any, list[tuple[int, ...]]]] = [
            ("ab", [(97, 98)]),
            (["ab", "c"], [(97, 98), (99,)]),
            ([1, 2, 3], [(1, 2, 3)]),
            ([[1, 2], [3]], [(1, 2), (3,)]),
        ]
        for prompt, expected in forms:
            served.engine.generations.clear()
            status, reply, _ = await post(
                served, "/v1/completions", {"prompt": prompt, "n": 2, "max_tokens": 1}
            )
            assert status == 200
            asked = [g.request.prompt for g in served.engine.generations]
            assert asked == [p for p in expected for _ in range(2)]
            assert [c["index"] for c in reply["choices"]] == list(range(2 * len(expected)))
            prompt_tokens = sum(len(p) for p in expected)
            assert reply["usage"]["prompt_tokens"] == prompt_tokens


async def test_logprobs_are_sent_in_both_protocols() -> None:
    async with serving() as served:
        _, reply, _ = await post(
            served, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2)
        )
        content = reply["choices"][0]["logprobs"]["content"]
        assert [e["token"] for e in content] == ["Hel", "lo", " wörld"]
        assert content[2]["bytes"] == list(" wörld".encode())
        assert content[0]["logprob"] == -0.25
        assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.25, -9999.0]

        _, reply, _ = await post(served, "/v1/completions", {"prompt": "x", "logprobs": 2})
        logprobs = reply["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["Hel", "lo", " wörld"]
        assert logprobs["token_logprobs"] == [-0.25] * 3
        assert logprobs["text_offset"] == [0, 3, 5]
        assert logprobs["top_logprobs"][0] == {"Hel": -0.25, "bytes:\\xf0\\x9f": -9999.0}

        chunks = data_of(await events(served, "/v1/completions", {"prompt": "x", "logprobs": 0}))
        offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks[1:4]]
        assert offsets == [[0], [3], [5]]
        assert chunks[1]["choices"][0]["logprobs"]["top_logprobs"] == [{"Hel": -0.25}]

        _, reply, _ = await post(served, "/v1/chat/completions", chat(logprobs=True))
        assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
        _, reply, _ = await post(served, "/v1/chat/completions", chat())
        assert reply["choices"][0]["logprobs"] is None


async def test_an_error_after_headers_is_an_event_and_ends_the_stream() -> None:
    engine = FakeEngine()
    engine.fail_after = 2
    async with serving(engine) as served:
        blocks = await events(served, "/v1/chat/completions", chat())
        assert blocks[-1].startswith("event: error\ndata: ")
        error = json.loads(blocks[-1].split("data: ", 1)[1])["error"]
        assert error["code"] == "numeric_fault"
        assert "data: [DONE]" not in blocks
        status, reply, _ = await post(served, "/v1/chat/completions", chat())
        assert (status, reply["error"]["batchengine_code"]) == (500, "BE2302")


async def test_keep_alive_comments_and_visible_noops_while_queued() -> None:
    engine = FakeEngine()
    engine.queued_s = 0.6
    config = fake_config(keepalive_s=0.1, noop_event_s=0.25)
    async with serving(engine, config) as served:
        blocks = await events(served, "/v1/chat/completions", chat())
    comments = [b for b in blocks if b.startswith(":")]
    assert len(comments) >= 2
    assert set(comments) == {": queued pos=3 eta_ms=42000"}
    deltas = [c["choices"][0]["delta"] for c in data_of(blocks)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {}  # the no-op came before the first token
    assert deltas[-4:] == [{"content": "Hel"}, {"content": "lo"}, {"content": " wörld"}, {}]


async def test_the_first_event_is_sent_at_once() -> None:
    engine = FakeEngine(delay_s=300.0)
    async with (
        serving(engine) as served,
        aiohttp.ClientSession() as client,
        client.post(served.base + "/v1/chat/completions", json=chat(stream=True)) as reply,
    ):
        async with asyncio.timeout(60):
            line = await reply.content.readline()
        assert json.loads(line[6:])["choices"][0]["delta"]["role"] == "assistant"
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["Cache-Control"] == "no-cache"
        assert reply.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnect_cancels_the_generation(stream: bool) -> None:
    engine = FakeEngine(delay_s=300.0)
    async with serving(engine) as served:
        async with aiohttp.ClientSession() as client:
            task = asyncio.create_task(
                client.post(served.base + "/v1/chat/completions", json=chat(stream=stream, n=2))
            )
            await until(lambda: len(engine.generations) == 2)
            await asyncio.sleep(0.05)
            assert not engine.generations[0].cancelled.is_set()
            if task.done():
                (await task).close()
            task.cancel()
        async with asyncio.timeout(60):
            for generation in engine.generations:
                await generation.cancelled.wait()
        await until(lambda: not served.service.live)


async def test_a_client_that_stops_reading_is_disconnected() -> None:
    engine = FakeEngine(reply=["x" * 20_000] * 400)
    config = fake_config(reader_stall_s=1.0)
    async with serving(engine, config) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        body = json.dumps(chat(stream=True, max_tokens=400)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: "
            + str(len(body)).encode() + b"\r\n\r\n" + body
        )  # fmt: skip
        await reader.readexactly(100)
        transport: Any = writer.transport
        transport.pause_reading()
        async with asyncio.timeout(60):
            await until(lambda: bool(engine.generations))
            await engine.generations[0].cancelled.wait()
        writer.close()


async def test_200_concurrent_streams_are_complete() -> None:
    engine = FakeEngine(reply=["tok "] * 20, delay_s=0.01)
    async with serving(engine) as served:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:

            async def one(number: int) -> str:
                body = chat(f"hello {number}", stream=True)
                url = served.base + "/v1/chat/completions"
                async with client.post(url, json=body) as reply:
                    assert reply.status == 200
                    text = (await reply.read()).decode()
                assert text.endswith("data: [DONE]\n\n")
                return "".join(
                    c["choices"][0]["delta"].get("content", "") for c in data_of(text.split("\n\n"))
                )

            texts = await asyncio.gather(*(one(i) for i in range(200)))
        assert set(texts) == {"tok " * 20}
        assert len({g.request.prompt for g in engine.generations}) == 200


async def test_the_openai_sdk_works_sync_and_async_with_and_without_streams() -> None:
    def sync_client(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
            assert [m.id for m in client.models.list()][:2] == [MODEL_ID, f"{MODEL_ID}:interactive"]
            assert client.models.retrieve(f"{MODEL_ID}:batch").id == f"{MODEL_ID}:batch"
            reply = client.chat.completions.create(
                model=MODEL_ID,
                messages=[{"role": "user", "content": "hi"}],
                logprobs=True,
                top_logprobs=2,
                service_tier="flex",
                extra_body={"batchengine": {"ttft_ms": 300}},
            )
            assert reply.choices[0].message.content == "Hello wörld"
            assert reply.service_tier == "flex"
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            assert reply.usage.prompt_tokens_details.cached_tokens == 4
            logprobs = reply.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            assert logprobs.content[1].token == "lo"
            texts = [
                c.choices[0].text
                for c in client.completions.create(model=MODEL_ID, prompt="x", stream=True)
            ]
            assert "".join(texts) == "Hello wörld"
            with pytest.raises(openai.NotFoundError) as caught:
                client.chat.completions.create(
                    model="gpt-4", messages=[{"role": "user", "content": "x"}]
                )
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                client.chat.completions.create(
                    model=MODEL_ID, messages=[{"role": "user", "content": "x"}], temperature=9
                )
            assert bad.value.param == "temperature"

    async with serving() as served:
        url = served.base + "/v1"
        await asyncio.to_thread(sync_client, url)
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL_ID,
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            text, usage = "", None
            async for chunk in stream:
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert text == "Hello wörld"
            assert usage is not None
            assert usage.completion_tokens == 3
            reply = await client.completions.create(
                model=MODEL_ID, prompt=["a", "b"], logprobs=1, max_tokens=4
            )
            assert [c.text for c in reply.choices] == ["Hello wörld"] * 2


async def test_openai_sdk_raises_on_an_error_event() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    async with serving(engine) as served:
        url = served.base + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL_ID, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            chunks = aiter(stream)
            await anext(chunks)  # the role
            await anext(chunks)  # one token
            with pytest.raises(openai.APIError, match="not finite"):
                await anext(chunks)


async def test_models_health_props_and_metrics_are_reported() -> None:
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        async with client.get("/v1/models") as reply:
            rows = (await reply.json())["data"]
        assert [r["id"] for r in rows] == [
            "fake", "fake:interactive", "fake:background", "fake:batch",
            "tiny", "tiny:interactive", "tiny:background", "tiny:batch",
        ]  # fmt: skip
        assert {r["context_length"] for r in rows} == {2048}  # never the trained 4096
        async with client.get("/props") as reply:
            props = await reply.json()
        assert props["default_generation_settings"]["n_ctx"] == 2048
        assert props["model_path"] == "fake.gguf"  # the folder is not shown
        async with client.get("/health") as reply:
            health = await reply.json()
        assert (reply.status, health["status"]) == (200, "ok")
        assert health["lanes"] == [{"name": "cpu", "kind": "cpu", "state": "ready"}]  # no pid
        await post(served, "/v1/chat/completions", chat(mystery=1))
        async with client.get("/metrics") as reply:
            text = await reply.text()
        assert 'batchengine_ignored_fields_total{field="mystery"} 1.0' in text

        engine = served.engine
        engine.phase, engine.progress = "loading", 0.43
        async with client.get("/health") as reply:
            body = await reply.json()
            assert (reply.status, body) == (
                503,
                {"status": "loading model", "progress": 0.43},
            )
        status, body, headers = await post(served, "/v1/chat/completions", chat())
        assert (status, body["error"]["code"]) == (503, "loading_model")
        assert {"retry-after", "retry-after-ms"} <= {name.lower() for name in headers}
        engine.phase, engine.fatal = "ready", OSError("ledger")
        async with client.get("/health") as reply:
            assert (reply.status, (await reply.json())["status"]) == (503, "failed")
        engine.phase, engine.fatal = "refusing", None
        async with client.get("/ready") as reply:
            assert (reply.status, await reply.json()) == (503, {"status": "refusing"})
        engine.phase = "ready"
        served.service.accepting = False
        async with client.get("/health") as reply:
            assert (reply.status, (await reply.json())["status"]) == (503, "draining")
        assert (await post(served, "/v1/chat/completions", chat()))[0] == 503


async def test_alias_class_reaches_the_engine() -> None:
    async with serving() as served:
        for name, expected in (
            ("fake", SlaClass.STANDARD),
            ("fake:background", SlaClass.BACKGROUND),
            ("tiny:interactive", SlaClass.INTERACTIVE),
        ):
            status, reply, _ = await post(served, "/v1/chat/completions", {**chat(), "model": name})
            assert status == 200
            assert reply["model"] == name
            assert served.engine.generations[-1].request.sla.sla_class == expected


async def test_connections_beyond_the_cap_get_503() -> None:
    async with serving(connections_max=3) as served:
        held = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        await asyncio.sleep(0.05)
        answer = await served.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after-ms" in answer
        assert b"too_many_connections" in answer
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        answer = await served.raw(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_half_a_request_does_not_hold_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "FIRST_REQUEST_SECONDS", 0.2)
    async with serving() as served:
        began = asyncio.get_running_loop().time()
        assert await served.raw(b"POST /v1/chat/comp", timeout_s=5) == b""
        assert asyncio.get_running_loop().time() - began < 3


async def test_a_body_that_never_ends_is_answered_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_SECONDS_MAX", 0.2)
    async with serving() as served:
        answer = await served.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_shed_and_engine_refusal_carry_retry_headers() -> None:
    engine = FakeEngine()
    engine.refuse = errors.OVERLOADED(waiting=9, setting="limits.queue_max", retry_ms=1500)
    async with serving(engine) as served:
        for stream in (True, False):  # a refusal is a status code, never a broken stream
            status, body, headers = await post(served, "/v1/chat/completions", chat(stream=stream))
            lower = {name.lower(): value for name, value in headers.items()}
            assert (status, body["error"]["code"]) == (503, "overloaded")
            assert lower["retry-after"] == "2"
            assert lower["retry-after-ms"] == "1500"
            assert lower["x-should-retry"] == "true"
