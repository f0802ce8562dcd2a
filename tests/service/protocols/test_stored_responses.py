"""Responses that were stored: fetched, followed, cancelled and deleted, by their key alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from batchengine.config import ApiKey
from batchengine.core import PastTurn, SlaClass
from service.http import relay
from service.protocols.responses import formatter as responses_formatter
from service.protocols.responses import responses
from tests.support.fake_engine import FakeEngine, Served, fake_config, post, serving


async def call(
    served: Served, method: str, path: str, key: str = ""
) -> tuple[int, dict[str, Any] | str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as client,
        client.request(method, served.base + path, headers=headers) as reply,
    ):
        is_json = reply.content_type == "application/json"
        return reply.status, await reply.json() if is_json else await reply.text()


async def get(served: Served, path: str, key: str = "") -> tuple[int, dict[str, Any]]:
    status, body = await call(served, "GET", path, key)
    assert isinstance(body, dict)
    return status, body


async def test_a_stored_response_is_fetched_again_with_its_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as served:
        asked = {"input": "hi", "instructions": "be brief", "metadata": {"a": "b"}, "model": "tiny"}
        _, made, _ = await post(served, "/v1/responses", asked)
        status, found = await get(served, "/v1/responses/" + made["id"])
        assert status == 200
        for name in (
            "id", "output", "status", "instructions", "metadata", "model", "created_at", "usage",
        ):  # fmt: skip
            assert found[name] == made[name], name
        assert found["usage"]["input_tokens_details"]["cached_tokens"] > 0
        status, text = await call(served, "GET", f"/v1/responses/{made['id']}?stream=true")
        assert status == 200
        assert isinstance(text, str)
        assert text.count("event: response.output_text.delta\n") == 3
        last = f"/v1/responses/{made['id']}?stream=true&starting_after=4"
        later = SimpleNamespace(time=lambda: time.time() + 100)
        monkeypatch.setattr(responses_formatter, "time", later)
        _, rest = await call(served, "GET", last)
        assert isinstance(rest, str)
        assert rest.count("event: ") == text.count("event: ") - 5
        assert text.endswith(rest)
        for wrong in ("-1", "x", "9" * 9, ""):
            wrong_start = last.rpartition("=")[0] + f"={wrong}"
            status, body = await get(served, wrong_start)
            assert (status, body["error"]["param"]) == (400, "starting_after")


async def test_a_stored_response_counts_its_reasoning() -> None:
    reply = ["<think>\nOne", " two", " three", "\n</think>\n\n", "Four", "."]
    async with serving(FakeEngine(reply)) as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"})
        _, found = await get(served, "/v1/responses/" + made["id"])
        assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
        assert found["usage"] == made["usage"]


async def test_what_was_not_stored_and_what_is_another_keys_is_not_found() -> None:
    config = dataclasses.replace(
        fake_config(), auth=tuple(ApiKey(name=name, key=name * 20) for name in ("a", "b"))
    )
    async with serving(config=config) as served:
        headers = {"Authorization": "Bearer " + "a" * 20}
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"}, headers=headers)
        _, unstored, _ = await post(
            served, "/v1/responses", {"input": "hi", "store": False, "session_id": "s"},
            headers=headers,
        )  # fmt: skip
        assert (await get(served, "/v1/responses/" + made["id"], "a" * 20))[0] == 200
        for given, key in (
            (made["id"], "b"), (unstored["id"], "a"), ("resp_none", "a"), ("x", "a"),
            (made["id"].replace("resp_", "req_"), "a"),
        ):  # fmt: skip
            status, body = await get(served, f"/v1/responses/{given}", key * 20)
            assert status == 404
            assert f"Response with id '{given}' not found." in body["error"]["message"]
            assert body["error"]["type"] == "invalid_request_error"
        follows = {"input": "x", "previous_response_id": made["id"]}
        status, body, _ = await post(
            served, "/v1/responses", follows, headers={"Authorization": "Bearer " + "b" * 20}
        )
        assert (status, body["error"]["code"]) == (404, "previous_response_not_found")
        assert f"Previous response with id '{made['id']}' not found." in body["error"]["message"]


async def test_a_request_that_follows_repeats_no_instructions() -> None:
    """The engine gets the tokens of the new messages, and the turn that they follow."""
    async with serving() as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi", "instructions": "brief"})
        more = {"input": "more", "previous_response_id": made["id"]}
        for instructions, expected in (("brief", False), ("long", True)):
            await post(served, "/v1/responses", {**more, "instructions": instructions})
            asked = served.engine.generations[-1].request
            assert asked.append_to == "req_" + made["id"].removeprefix("resp_")
            assert (b"<system>\nlong\n</system>" in bytes(asked.append)) is expected
            assert bytes(asked.append).endswith(b"more\n")
            assert asked.session_id not in (None, served.engine.generations[0].request.session_id)


async def test_a_request_that_follows_repeats_no_tools_and_says_those_that_are_new() -> None:
    def tools(*names: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"x": {"type": "string"}}}
        large = {"description": "d" * responses.ECHO_BYTES_MAX}
        tool = {"type": "function", "parameters": schema, **large}
        return {"tools": [tool | {"name": name} for name in names]}

    engine = FakeEngine()
    engine.info.context_tokens = 1 << 20
    async with serving(engine) as served:
        body = {"input": "hi", "instructions": "brief"}
        _, made, _ = await post(served, "/v1/responses", body | tools("ls"))
        for names, instructions, new in (
            ((), "brief", ()), (("ls",), "brief", ()), (("ls", "cat"), "brief", ("ls", "cat")),
            (("ls", "cat"), "brief", ()), (("ls",), "long", ("ls",)), (("ls",), "long", ()),
        ):  # fmt: skip
            body = {"input": f"after {made['id']}", "previous_response_id": made["id"]}
            body["instructions"] = instructions
            status, made, _ = await post(served, "/v1/responses", body | tools(*names))
            assert status == 200
            appended = bytes(engine.generations[-1].request.append)
            for name in ("ls", "cat"):
                assert (f'"name": "{name}"'.encode() in appended) is (name in new)
            assert (b"\nlong\n" in appended) is (instructions == "long" and bool(new))


async def test_a_background_response_goes_on_without_a_reader_and_can_be_cancelled() -> None:
    engine = FakeEngine(delay_s=0.02)
    async with serving(engine) as served:
        asked = {"input": "hi", "background": True}
        status, made, _ = await post(served, "/v1/responses", asked)
        assert (status, made["status"], made["background"]) == (200, "in_progress", True)
        assert engine.generations[0].request.sla.sla_class is SlaClass.BACKGROUND
        path = "/v1/responses/" + made["id"]
        await asyncio.gather(*served.service.background)
        _, found = await get(served, path)
        assert found["status"] == "completed"
        assert found["output"][0]["content"][0]["text"] == "Hello wörld"

        engine.queued_s = 30.0
        _, made, _ = await post(served, "/v1/responses", asked)
        await asyncio.sleep(0.05)
        assert (await get(served, f"/v1/responses/{made['id']}"))[1]["status"] == "queued"
        await call(served, "POST", f"/v1/responses/{made['id']}/cancel")
        engine.queued_s, engine.delay_s = 0.0, 30.0
        asked["background_options"] = {"completion_window": "8h"}
        _, made, _ = await post(served, "/v1/responses", asked)
        assert engine.generations[-1].request.sla.sla_class is SlaClass.BATCH
        status, body = await call(served, "POST", f"/v1/responses/{made['id']}/cancel")
        assert isinstance(body, dict)
        assert (status, body["status"]) == (200, "cancelled")
        assert engine.generations[-1].cancelled.is_set()


async def test_a_background_response_goes_on_when_the_reader_of_its_stream_leaves() -> None:
    engine = FakeEngine(delay_s=0.3)
    async with serving(engine) as served:
        body = {"input": "hi", "background": True, "stream": True}
        async with (
            aiohttp.ClientSession() as client,
            client.post(served.base + "/v1/responses", json=body) as reply,
        ):
            line = await anext(aiter(reply.content))  # then the connection is closed
            created = json.loads((await anext(aiter(reply.content))).removeprefix(b"data: "))
        assert line == b"event: response.created\n"
        path = "/v1/responses/" + created["response"]["id"]
        while not served.service.background:  # noqa: ASYNC110  the daemon notices
            await asyncio.sleep(0.01)
        assert not engine.generations[0].cancelled.is_set()
        await asyncio.gather(*served.service.background)
        _, found = await get(served, path)
        assert (found["status"], found["background"]) == ("completed", True)
        _, text = await call(served, "GET", path + "?stream=true")
        assert isinstance(text, str)
        assert text.startswith("event: response.created\n")
        assert not served.service.live


@pytest.mark.parametrize("field", ["stream", "background"])
async def test_an_id_is_sent_once_its_turn_is_in_the_ledger(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RECORD_WAIT_S", 1e6)
    engine = FakeEngine()
    engine.records_late = True
    async with serving(engine) as served, aiohttp.ClientSession() as client:

        async def first_line() -> bytes:
            body = {"input": "hi", field: True}
            async with client.post(served.base + "/v1/responses", json=body) as reply:
                return await reply.content.readline()

        asked = asyncio.create_task(first_line())
        while not engine.generations:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for _ in range(3):
            await get(served, "/v1/models")
        assert not asked.done()
        engine.generations[0].recorded.set()
        assert b"response" in await asked
        monkeypatch.setattr(relay, "RECORD_WAIT_S", 0.01)  # it waits for longer than that
        assert b"response" in await first_line()
        assert not engine.generations[1].recorded.is_set()


async def test_a_stream_after_its_last_event_is_that_event() -> None:
    async with serving() as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"})
        path = f"/v1/responses/{made['id']}?stream=true"
        _, whole = await call(served, "GET", path)
        assert isinstance(whole, str)
        last = whole.count("event: ") - 1
        for after in (last - 1, last, last + 7):
            _, text = await call(served, "GET", f"{path}&starting_after={after}")
            assert isinstance(text, str)
            (event,) = (json.loads(one[6:]) for one in text.split("\n") if one[:5] == "data:")
            assert (event["type"], event["sequence_number"]) == ("response.completed", last)


async def test_a_background_response_that_a_kill_cut_goes_on_when_it_is_asked_for() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi", "background": True})
        await asyncio.gather(*served.service.background)
        past = await engine.past_turn("", "req_" + made["id"].removeprefix("resp_"))
        known = engine.past_turn

        async def cut(tenant: str, turn_id: str) -> PastTurn:
            return dataclasses.replace(past, finish_reason="", is_running=False, tokens=1)

        engine.past_turn = cut  # as the next daemon finds it in the ledger
        _, found = await get(served, "/v1/responses/" + made["id"])
        assert found["status"] == "in_progress"
        assert engine.generations[-1].skip == 1
        await asyncio.gather(*served.service.background)
        engine.past_turn = known
        assert (await get(served, "/v1/responses/" + made["id"]))[1]["status"] == "completed"


async def test_a_response_that_others_follow_is_forgotten_alone() -> None:
    async with serving() as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"})
        turn = "req_" + made["id"].removeprefix("resp_")
        known = served.engine.past_turn

        async def followed(tenant: str, turn_id: str) -> PastTurn:
            return dataclasses.replace(await known(tenant, turn_id), only=False, is_last=False)

        served.engine.past_turn = followed
        status, body = await call(served, "DELETE", "/v1/responses/" + made["id"])
        assert (status, body) == (200, {"id": made["id"], "object": "response", "deleted": True})
        assert served.engine.calls == [("forget", "", turn)]
        assert served.engine.known


async def test_a_response_is_deleted_with_its_session() -> None:
    async with serving() as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"})
        session = served.engine.generations[0].request.session_id
        status, body = await call(served, "DELETE", "/v1/responses/" + made["id"])
        assert (status, body) == (200, {"id": made["id"], "object": "response", "deleted": True})
        assert ("", session) not in served.engine.known


async def test_an_input_refers_to_items_of_earlier_responses() -> None:
    """The engine gets the tokens of the same conversation as if the items had been sent."""
    async with serving() as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"})
        (message,) = made["output"]
        _, listed = await get(served, f"/v1/responses/{made['id']}/input_items")
        whole = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "more"}]
        references = [
            {"type": "item_reference", "id": listed["data"][0]["id"]},
            {"id": message["id"]},
            whole[2],
        ]
        prompts: list[tuple[int, ...]] = []
        for given in (whole, references):
            status, again, _ = await post(served, "/v1/responses", {"input": given})
            assert status == 200
            prompts.append(served.engine.generations[-1].request.prompt)
        assert prompts[0] == prompts[1]
        _, listed = await get(served, f"/v1/responses/{again['id']}/input_items?order=asc")
        assert [one["content"][0]["text"] for one in listed["data"]] == [
            "hi", "Hello wörld", "more",
        ]  # fmt: skip
        assert listed["data"][1]["id"] == message["id"]


async def test_an_unknown_item_is_404_by_its_id() -> None:
    config = dataclasses.replace(
        fake_config(), auth=tuple(ApiKey(name=name, key=name * 20) for name in ("a", "b"))
    )
    async with serving(config=config) as served:
        a, b = ({"Authorization": "Bearer " + key * 20} for key in "ab")
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"}, headers=a)
        _, other, _ = await post(
            served, "/v1/responses", {"input": "hi", "store": False, "session_id": "s"}, headers=a
        )
        mine, unstored = made["output"][0]["id"], other["output"][0]["id"]
        for given, headers in (
            (mine, b), (unstored, a), (mine[:-2] + "07", a), ("rs_x", a), ("msg_" + "0" * 26, a),
            (mine[:-2] + "٠٠", a),
        ):  # fmt: skip
            body = {"input": [{"type": "item_reference", "id": given}]}
            status, answer, _ = await post(served, "/v1/responses", body, headers=headers)
            assert (status, answer["error"]["code"]) == (404, "item_not_found")
            assert f"Item with id '{given}' not found." in answer["error"]["message"]
            assert answer["error"]["param"] == "input"
        many = [{"type": "item_reference", "id": f"msg_{n:024x}00"} for n in range(513)]
        status, answer, _ = await post(served, "/v1/responses", {"input": many}, headers=a)
        assert (status, answer["error"]["param"]) == (400, "input")


async def test_the_input_of_a_response_is_listed_in_pages() -> None:
    async with serving() as served:
        call = {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c", "output": "a.txt"}
        asked = {"input": [{"role": "user", "content": "go", "id": "mine"}, call, output]}
        _, made, _ = await post(served, "/v1/responses", asked)
        path = f"/v1/responses/{made['id']}/input_items"
        _, found = await get(served, path)
        ids = [one["id"] for one in found["data"]]
        assert [one["type"] for one in found["data"]] == [
            "function_call_output", "function_call", "message",
        ]  # fmt: skip
        assert (ids[0][:4], ids[2], found["has_more"]) == ("fco_", "mine", False)
        assert (found["first_id"], found["last_id"]) == (ids[0], ids[2])
        _, first = await get(served, path + "?limit=2&order=asc")
        assert [one["id"] for one in first["data"]] == ids[:0:-1]
        assert first["has_more"]
        _, rest = await get(served, path + f"?limit=2&order=asc&after={first['last_id']}")
        assert [one["id"] for one in rest["data"]] == ids[:1]
        _, none = await get(served, path + f"?after={ids[-1]}")
        assert (none["data"], none["first_id"], none["has_more"]) == ([], None, False)
        for wrong, status, param in (
            ("limit=0", 400, "limit"), ("limit=101", 400, "limit"), ("limit=x", 400, "limit"),
            ("order=up", 400, "order"), ("after=x", 404, "after"),
        ):  # fmt: skip
            got, body = await get(served, f"{path}?{wrong}")
            assert (got, body["error"]["param"]) == (status, param)


async def test_a_large_input_and_one_that_is_not_stored_are_not_kept() -> None:
    async with serving() as served:
        noise = random.Random(1).randbytes(30 << 10).hex()
        system = {"type": "web_search_call", "id": noise}  # left out of the prompt
        _, large, _ = await post(served, "/v1/responses", {"input": [system, {
            "role": "user", "content": "hi"}]})  # fmt: skip
        assert len(served.engine.generations[-1].request.echo) < 4096
        status, body = await get(served, f"/v1/responses/{large['id']}/input_items")
        assert (status, body["error"]["code"]) == (404, "input_not_kept")
        await post(served, "/v1/responses", {"input": "hi", "store": False})
        assert '"input"' not in served.engine.generations[-1].request.echo


async def test_what_is_not_built_is_404() -> None:
    async with serving() as served:
        status, body, _ = await post(served, "/v1/responses/compact", {})
        assert (status, body["error"]["code"]) == (404, "not_supported")
        assert "send that instead of the items" in body["error"]["message"]
        assert (await get(served, "/v1/responses/resp_1/input_items"))[0] == 404


async def test_a_conversation_is_a_session_to_which_input_is_appended() -> None:
    async with serving() as served:
        for conversation in ("conv_1", {"id": "conv_1"}):
            asked = {"input": "hi", "conversation": conversation}
            _, made, _ = await post(served, "/v1/responses", asked)
            assert made["conversation"] == {"id": "conv_1"}
        first, second = (one.request for one in served.engine.generations)
        assert first.session_id == second.session_id
        assert first.append


async def test_the_same_request_is_known_as_such_although_each_has_a_session_of_its_own() -> None:
    async with serving() as served:
        for text in ("hi", "hi", "ho"):
            await post(served, "/v1/responses", {"input": text, "model": "tiny"})
        first, again, other = (one.request for one in served.engine.generations)
    assert first.session_id != again.session_id
    assert first.attempt == again.attempt != ""
    assert other.attempt != first.attempt
