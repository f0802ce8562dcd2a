"""Sessions over HTTP: operations, ownership, resumable streams, and their fields."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from batchengine.config import ApiKey, Config
from batchengine.core import TokenEvent
from service.http import sse
from service.protocols.formatter import EventIds
from service.session_ids import session_key
from tests.support.engines import until
from tests.support.fake_engine import (
    MODEL_ID,
    FakeEngine,
    Served,
    chat,
    fake_config,
    post,
    serving,
)

CHAT = "/v1/chat/completions"
ALPHA = {"Authorization": "Bearer alpha-key-123"}
BETA = {"Authorization": "Bearer beta-key-4567"}


def with_keys() -> Config:
    keys = (ApiKey("alpha", "alpha-key-123"), ApiKey("beta", "beta-key-4567"))
    return replace(fake_config(), auth=keys)


async def call(
    served: Served, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    sent = {k.replace("_", "-"): v for k, v in headers.items()}
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, served.base + path, json=body, headers=sent) as reply,
    ):
        return reply.status, await reply.json()


async def blocks_of(served: Served, path: str, body: Any = None, **headers: str) -> list[str]:
    """The SSE blocks of a stream, by POST when there is a body."""
    async with aiohttp.ClientSession() as client:
        method = "GET" if body is None else "POST"
        sent = {k.replace("_", "-"): v for k, v in headers.items()}
        async with client.request(method, served.base + path, json=body, headers=sent) as reply:
            assert reply.status == 200, await reply.text()
            return (await reply.read()).decode()[:-2].split("\n\n")


def numbered_texts(blocks: list[str]) -> list[tuple[int | None, str]]:
    """(number of the id, text) of every chunk with text."""
    found: list[tuple[int | None, str]] = []
    for block in blocks:
        number: int | None = None
        for line in block.split("\n"):
            if line.startswith("id: "):
                number = int(line.rpartition(":")[2].partition(".")[0])
            elif line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text = choices[0]["delta"].get("content") if choices else ""
                if text:
                    found.append((number, text))
    return found


async def test_operations_reach_the_engine_by_the_clients_id_and_by_the_daemons_id() -> None:
    engine = FakeEngine()
    engine.lane_names = ["fast", "bulk"]
    async with serving(engine) as served:
        await post(served, CHAT, chat(session_id="mine"))
        ours = session_key("", "mine")
        for name in ("mine", ours):
            status, body = await call(served, "GET", f"/v1/sessions/{name}")
            assert (status, body["session_id"]) == (200, ours)
            assert "tenant" not in body
        status, body = await call(served, "POST", "/v1/sessions/mine/promote", {"to": "bulk"})
        assert (status, body["result"], body["target"]) == (200, "moved", "bulk")
        await call(served, "POST", f"/v1/sessions/{ours}/demote")
        await call(served, "POST", "/v1/sessions/mine/park", {"tool_call_id": "call-7"})
        assert engine.calls == [
            ("promote", "", ours, "bulk"), ("demote", "", ours, "bulk"),
            ("park", "", ours, "call-7"),
        ]  # fmt: skip
        status, body = await call(served, "POST", "/v1/sessions/mine/fork", {"session_id": "twin"})
        assert (status, body["session_id"]) == (200, session_key("", "twin"))
        status, unnamed = await call(served, "POST", "/v1/sessions/mine/fork")
        assert status == 200
        assert unnamed["session_id"] not in (ours, body["session_id"])
        assert engine.calls[-2:] == [
            ("fork", "", body["session_id"], "twin"), ("fork", "", unnamed["session_id"], ""),
        ]  # fmt: skip
        status, body = await call(served, "GET", "/v1/sessions/mine/why")
        assert (status, body["edit"]["first_difference"]) == (200, 5812)
        status, body = await call(served, "GET", "/v1/sessions")
        assert {row["session_id"] for row in body["data"]} >= {ours, session_key("", "twin")}
        status, body = await call(served, "DELETE", "/v1/sessions/mine")
        assert (status, body["state"]) == (200, "dropped")
        status, body = await call(served, "GET", "/v1/sessions/mine")
        assert (status, body["error"]["code"]) == (404, "session_not_found")


async def test_bad_session_options_are_refused_with_a_reason() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await post(served, CHAT, chat(session_id="s"))
        status, body = await call(served, "POST", "/v1/sessions/s/promote")
        assert (status, body["error"]["code"]) == (409, "one_lane")
        assert "--lanes 2" in body["error"]["fix"]
        engine.lane_names = ["fast", "bulk"]
        cases: list[tuple[str, Any, int, str]] = [
            ("/v1/sessions/s/promote", {"to": "gpu9"}, 400, "fast or bulk"),
            ("/v1/sessions/s/promote", {"too": "fast"}, 400, "too"),
            ("/v1/sessions/s/promote", {"to": 3}, 400, "to has a wrong value: it must be text"),
            ("/v1/sessions/s/park", {"tool_call_id": ""}, 400, "tool_call_id"),
            ("/v1/sessions/s/park", {"tool_call_id": "x" * 20_000}, 413, "16,384"),
            ("/v1/sessions/s/fork", [], 400, "object"),
            ("/v1/sessions/%0a/fork", {}, 400, "printable"),
        ]
        for path, body, status_wanted, word in cases:
            status, answer = await call(served, "POST", path, body)
            assert status == status_wanted, (path, answer)
            assert word in answer["error"]["message"], answer
        async with aiohttp.ClientSession() as client:
            url = served.base + "/v1/sessions/s/park"
            async with client.post(url, data=b"{}") as reply:  # a form, to a browser
                assert reply.status == 415
        assert engine.calls == []


ROUTES = [
    ("GET", "/v1/sessions/{}"), ("GET", "/v1/sessions/{}/why"), ("DELETE", "/v1/sessions/{}"),
    ("POST", "/v1/sessions/{}/promote"), ("POST", "/v1/sessions/{}/demote"),
    ("POST", "/v1/sessions/{}/park"), ("POST", "/v1/sessions/{}/fork"),
    ("GET", "/v1/stream?session_id={}"), ("GET", "/v1/explain/{}"),
]  # fmt: skip


async def test_a_session_of_another_key_is_answered_like_an_unknown_one() -> None:
    """F69: no answer shows whether another key has the session."""

    engine = FakeEngine(delay_s=0.01)
    engine.lane_names = ["fast", "bulk"]
    async with serving(engine, with_keys()) as served:
        status, first, _ = await post(
            served, CHAT, chat(session_id="their-own-name"), headers=ALPHA
        )
        assert status == 200
        anonymous, _, _ = await post(served, CHAT, chat(), headers=ALPHA)
        assert anonymous == 200
        theirs = session_key("alpha", "their-own-name")
        request_id = first["batchengine"]["request_id"]
        unknown = session_key("beta", "never used")
        for method, path in ROUTES:
            answers: list[Any] = []
            for name in (theirs, "their-own-name", unknown, "be_" + request_id):
                status, body = await call(
                    served, method, path.format(name), Authorization=BETA["Authorization"]
                )
                assert status == 404, (method, path, name, body)
                body["error"].pop("request_id")
                answers.append(json.dumps(body).replace(name, "NAME"))
            assert len(set(answers)) == 1, answers
        status, _ = await call(served, "GET", f"/v1/explain/{request_id}", **BETA)
        assert status == 404
        status, body = await call(served, "GET", f"/v1/explain/{request_id[:12]}", **ALPHA)
        assert status == 404  # only the operator may use prefixes: others' ids would show
        status, body = await call(served, "GET", f"/v1/explain/{request_id}", **ALPHA)
        assert (status, body["reason_id"], "tenant" in body) == (200, "only", False)
        status, body = await call(served, "GET", "/v1/explain/their-own-name", **ALPHA)
        assert (status, body["kind"]) == (200, "session")
        _, body = await call(served, "GET", "/v1/sessions", **BETA)
        assert body["data"] == []
        assert engine.calls == []


async def test_a_stream_can_be_resumed_from_the_last_event_id() -> None:
    engine = FakeEngine(["a", "", "b", "c", "d"])  # the second token shows no text
    async with serving(engine) as served:
        whole = await blocks_of(served, CHAT, chat(session_id="s", stream=True))
        assert whole[-1] == "data: [DONE]"
        assert not whole[0].startswith("id:")  # before the first token there is nothing to skip
        shown = numbered_texts(whole)
        assert shown == [(1, "a"), (3, "b"), (4, "c"), (5, "d")]
        turn = engine.generations[0].request_id
        assert f"\nid: {turn}:5\n" in "\n" + "\n".join(whole)
        for number, _ in shown:
            path = "/v1/stream?session_id=s&from=0"  # what EventSource keeps sending
            again = await blocks_of(served, path, Last_Event_ID=f"{turn}:{number}")
            assert again[-1] == "data: [DONE]"
            assert numbered_texts(again) == [pair for pair in shown if pair[0] > number]
            path += f"&turn={turn}"  # for clients that count tokens
            again = await blocks_of(served, path, Last_Event_ID=str(number))
            assert numbered_texts(again) == [pair for pair in shown if pair[0] > number]
        assert numbered_texts(await blocks_of(served, "/v1/stream?session_id=s")) == shown
        assert (
            numbered_texts(
                await blocks_of(
                    served, f"/v1/stream?from=3&turn={turn}", x_batchengine_session_id="s"
                )
            )
            == shown[2:]
        )
        last = json.loads(
            (await blocks_of(served, "/v1/stream?session_id=s"))[-2].split("data: ")[1]
        )
        assert last["usage"]["completion_tokens"] == 5
        for path in ("?session_id=s&from=-1", "?session_id=s&from=x", "?from=1",
                     "?session_id=s&from=99999999999", "?session_id=s&turn=%0a",
                     "?session_id=s&from=3"):  # fmt: skip
            status, body = await call(served, "GET", "/v1/stream" + path)
            assert status == 400, body
            assert body["error"]["fix"]
        for number in ("3", ":3", "req_x:"):  # a number without a turn is ambiguous
            status, body = await call(
                served, "GET", "/v1/stream?session_id=s", Last_Event_ID=number
            )
            assert status == 400, body
            assert "last id: line" in body["error"]["fix"]
        status, body = await call(
            served, "GET", f"/v1/stream?session_id=s&turn={turn}", Last_Event_ID="req_other:3"
        )
        assert (status, body["error"]["code"]) == (409, "turn_followed")
        assert served.service.live == {}


async def test_a_resumed_stream_has_the_format_of_its_request() -> None:
    async with serving(FakeEngine(["a", "b", "c"])) as served:
        asked = {"model": MODEL_ID, "prompt": "x", "stream": True, "session_id": "s"}
        whole = await blocks_of(served, "/v1/completions", asked)
        turn = served.engine.generations[-1].request_id
        path = f"/v1/stream?session_id=s&from=1&turn={turn}&include_usage=0"
        again = await blocks_of(served, path)
        assert again[-1] == whole[-1] == "data: [DONE]"
        chunks = [[json.loads(b.split("data: ")[1]) for b in s[:-1]] for s in (whole, again)]
        for chunk in [*chunks[0], *chunks[1]]:
            assert chunk["object"] == "text_completion"
            assert chunk["id"] == chunks[0][0]["id"]
        texts = ["".join(c["choices"][0]["text"] for c in part) for part in chunks]
        assert texts == ["abc", "bc"]
        await blocks_of(served, CHAT, chat(session_id="s", stream=True))  # a separate turn
        assert numbered_texts(await blocks_of(served, "/v1/stream?session_id=s"))


@pytest.mark.parametrize(
    ("position", "texts"), [("", "xabc"), (":1", "bc"), (":3", ""), (":0.1", "bc")]
)
async def test_a_resumed_stream_repeats_the_prompt_only_from_its_beginning(
    position: str, texts: str
) -> None:
    async with serving(FakeEngine(["a", "b", "c"])) as served:
        asked = {"prompt": "x", "stream": True, "session_id": "s", "echo": True}
        await blocks_of(served, "/v1/completions", asked)
        turn = served.engine.generations[-1].request_id
        given = {"Last_Event_ID": turn + position} if position else {}
        blocks = await blocks_of(served, "/v1/stream?session_id=s&include_usage=0", **given)
        chunks = [json.loads(block.split("data: ")[1]) for block in blocks[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts


class Resending(FakeEngine):
    """Sends its first two tokens again, without their log-probabilities."""

    def _token(self, index: int, text: str, logprobs: int) -> TokenEvent:
        return super()._token(index, text, -1 if index < 2 else logprobs)


async def test_an_answer_reports_how_many_log_probabilities_it_lacks() -> None:
    async with serving(Resending(["a", "b", "c"])) as served:
        asked = chat(session_id="s", stream=True, logprobs=True)
        for path, body, bare in ((CHAT, asked, 2), ("/v1/stream?session_id=s&from=1", None, 1)):
            if body is None:
                path += f"&turn={served.engine.generations[-1].request_id}"
            blocks = await blocks_of(served, path, body)
            last = json.loads(blocks[-2].split("data: ")[1])
            assert last["batchengine"]["tokens_without_logprobs"] == bare
        for bare, wanted in ((2, True), (None, False)):
            asked = chat(session_id="t", logprobs=wanted)
            _, whole = await call(served, "POST", CHAT, asked)
            assert whole["batchengine"].get("tokens_without_logprobs") == bare


async def test_only_streams_that_can_be_resumed_have_ids() -> None:
    async with serving() as served:
        for body in (chat(stream=True), chat(stream=True, session_id="s", n=2)):
            assert not any("id: " in b for b in await blocks_of(served, CHAT, body))
    async with serving(config=fake_config(keepalive_s=0.1)) as served:
        served.engine.delay_s = 0.3
        blocks = await blocks_of(served, CHAT, chat(stream=True, session_id="s"))
        assert any(": working\nid: " in block for block in blocks)


async def test_comments_after_ids_do_not_break_the_sdk() -> None:
    """Its decoder makes an event of every empty line once it has seen an id."""
    async with serving(config=fake_config(keepalive_s=0.1)) as served:
        served.engine.delay_s = 0.25
        client = openai.AsyncOpenAI(base_url=served.base + "/v1", api_key="x", max_retries=0)
        stream = await client.chat.completions.create(
            model=MODEL_ID,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_body={"session_id": "s"},
        )
        texts = [c.choices[0].delta.content async for c in stream if c.choices]
        await client.close()
        assert [text for text in texts if text] == ["Hel", "lo", " wörld"]
    ids = EventIds(0, lambda: "req_1")
    assert sse.comment("x", after_id=ids.has_begun) == b": x\n\n"
    ids.of_token([])
    assert sse.comment("x", after_id=ids.has_begun) == b": x\n"
    assert ids.current == "req_1:1"


async def test_session_options_reach_the_engine() -> None:
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}, {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "bad\n"}, {"id": 5}]},
    ]
    async with serving() as served:
        body = chat(
            batchengine={"promote": True, "park": True, "expected_output_tokens": 12}, n=2,
            session_id="s",
        ) | {"messages": messages}  # fmt: skip
        status, answer, _ = await post(served, CHAT, body, headers={"Idempotency-Key": "k1"})
        assert status == 200
        first, second = (g.request for g in served.engine.generations)
        assert (first.promote, first.park, first.expected_output_tokens) == (True, True, 12)
        assert first.tool_call_ids == ("c2", "c1")  # the last mention wins
        assert second.tool_call_ids == ()
        assert (first.idempotency_key, second.idempotency_key) == ("k1", "k1#1")
        assert (first.choices, second.choices) == (2, 2)  # as a conflict of keys is found
        assert not first.has_seed
        facts = answer["batchengine"]
        assert facts["predicted_ttft_ms"] == 6.0
        assert facts["tokens_reused"] == answer["usage"]["prompt_tokens"] // 2
        assert facts["reuse_reason"] == "first use"
        for more, headers in (
            ({"batchengine": {"final": True}}, {}),
            ({}, {"x-dynamo-session-final": "true"}),
        ):
            await post(served, CHAT, chat(**more), headers=headers)
            assert served.engine.generations[-1].request.park
        await post(served, CHAT, chat(seed=0, nvext={"agent_hints": {"osl": 9}}))
        last = served.engine.generations[-1].request
        assert last.has_seed
        assert (last.expected_output_tokens, last.park, last.promote) == (9, False, False)
        assert last.idempotency_key == ""
        many = [{"role": "tool", "tool_call_id": f"t{i}", "content": "x"} for i in range(100)]
        await post(served, CHAT, chat() | {"messages": many})
        calls = served.engine.generations[-1].request.tool_call_ids
        assert calls == tuple(f"t{i}" for i in range(36, 100))
        status, answer, _ = await post(served, CHAT, chat(), headers={"Idempotency-Key": "x" * 256})
        assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def test_an_unnamed_session_belongs_to_its_caller_while_it_computes() -> None:
    engine = FakeEngine(delay_s=5.0)
    engine.lane_names = ["fast", "bulk"]
    async with serving(engine, with_keys()) as served:
        asking = asyncio.create_task(post(served, CHAT, chat(), headers=ALPHA))
        await until(lambda: bool(engine.generations))
        name = engine.generations[0].session_id
        engine.known["alpha", name] = engine.generations[0].request
        path = f"/v1/sessions/{name}/promote"
        status, _ = await call(served, "POST", path, **BETA)
        assert (status, engine.calls) == (404, [])
        status, _ = await call(served, "POST", path, **ALPHA)
        assert (status, engine.calls[0][:3]) == (200, ("promote", "alpha", name))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_name_used_by_two_keys_is_explained_to_each_without_a_listing() -> None:
    """An operation on one session must not list the sessions of all keys."""

    engine = FakeEngine()
    name = "idem_" + "0" * 32
    async with serving(engine, with_keys()) as served:
        for key in (ALPHA, BETA):
            status, _, _ = await post(served, CHAT, chat(session_id=name), headers=key)
            assert status == 200
        for key in (ALPHA, BETA):
            status, body = await call(served, "GET", f"/v1/explain/{name}", **key)
            assert (status, body.get("session_id")) == (200, name)
        asked: list[str | None] = []
        listing = engine.sessions

        def sessions(tenant: str | None = None) -> Any:
            asked.append(tenant)
            return listing(tenant)

        engine.sessions = sessions
        engine.has_session = lambda tenant, session_id: False
        assert (await call(served, "GET", "/v1/sessions/be_req_1", **ALPHA))[0] == 404
        assert asked == []
        _, body = await call(served, "GET", "/v1/sessions", **ALPHA)
        assert (asked, len(body["data"])) == (["alpha"], 1)


async def test_the_fake_engine_skips_tokens_that_the_reader_has() -> None:
    engine = FakeEngine(["a", "b"])
    engine.known["", "s"] = replace(_request(), session_id="s")
    generation = await engine.resume("", "s", 1)
    events: list[Any] = []
    while batch := await generation.events():
        events += batch
    assert [e.text for e in events if isinstance(e, TokenEvent)] == ["b"]


def _request() -> Any:
    from batchengine.core import GenerationRequest

    return GenerationRequest("req_x", (1,), 2)
