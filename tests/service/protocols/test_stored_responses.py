"""Responses that were stored: fetched, followed, cancelled and deleted, by their key alone."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import aiohttp

from batchengine.config import ApiKey
from batchengine.core import PastTurn, SlaClass
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


async def test_a_stored_response_is_fetched_again_with_its_fields() -> None:
    async with serving() as served:
        asked = {"input": "hi", "instructions": "be brief", "metadata": {"a": "b"}, "model": "tiny"}
        _, made, _ = await post(served, "/v1/responses", asked)
        status, found = await get(served, "/v1/responses/" + made["id"])
        assert status == 200
        for name in ("id", "output", "status", "instructions", "metadata", "model", "created_at"):
            assert found[name] == made[name], name
        assert found["usage"]["input_tokens"] == made["usage"]["input_tokens"]
        assert "input_tokens_details" not in found["usage"]  # nothing recorded it
        status, text = await call(served, "GET", f"/v1/responses/{made['id']}?stream=true")
        assert status == 200
        assert isinstance(text, str)
        assert text.count("event: response.output_text.delta\n") == 3
        last = f"/v1/responses/{made['id']}?stream=true&starting_after=4"
        _, rest = await call(served, "GET", last)
        assert isinstance(rest, str)
        assert rest.count("event: ") == text.count("event: ") - 5
        assert text.endswith(rest)
        for wrong in ("-1", "x", "9" * 9, ""):
            wrong_start = last.rpartition("=")[0] + f"={wrong}"
            status, body = await get(served, wrong_start)
            assert (status, body["error"]["param"]) == (400, "starting_after")


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
            assert (b"system: " in bytes(asked.append)) is expected
            assert b"user: more\n" in bytes(asked.append)
            assert asked.session_id not in (None, served.engine.generations[0].request.session_id)


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

        engine.delay_s = 30.0
        asked["background_options"] = {"completion_window": "8h"}
        _, made, _ = await post(served, "/v1/responses", asked)
        assert engine.generations[-1].request.sla.sla_class is SlaClass.BATCH
        status, body = await call(served, "POST", f"/v1/responses/{made['id']}/cancel")
        assert isinstance(body, dict)
        assert (status, body["status"]) == (200, "cancelled")
        assert engine.generations[-1].cancelled.is_set()


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


async def test_a_response_is_deleted_with_its_session() -> None:
    async with serving() as served:
        _, made, _ = await post(served, "/v1/responses", {"input": "hi"})
        session = served.engine.generations[0].request.session_id
        status, body = await call(served, "DELETE", "/v1/responses/" + made["id"])
        assert (status, body) == (200, {"id": made["id"], "object": "response", "deleted": True})
        assert ("", session) not in served.engine.known


async def test_what_is_not_built_is_404() -> None:
    async with serving() as served:
        status, _, _ = await post(served, "/v1/responses/compact", {})
        assert status == 404
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
