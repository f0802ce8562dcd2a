"""The OpenAI SDK's Responses against a daemon with the pocket model: chains, restarts, resuming."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.service.test_daemon_sessions import serving


@contextmanager
def client_of(model: Path, folder: Path, cache_dir: Path) -> Iterator[tuple[openai.OpenAI, int]]:
    """A client, and the pid of its daemon."""
    with (
        serving(model, folder, cache_dir) as (port, pid, _),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client, pid


def test_a_chain_of_responses_survives_a_restart_and_reuses_its_kv(
    pocket_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("r")
    asked: dict[str, Any] = {"model": "", "temperature": 0, "max_output_tokens": 24}
    story = "Tell me a long story about a small dog that finds a red ball in the garden. " * 12
    with client_of(pocket_path, folder, cache_dir) as (client, pid):
        asked["model"] = client.models.list().data[0].id
        first = client.responses.create(input=story, instructions="Be kind.", **asked)
        assert first.status in ("completed", "incomplete")
        more = {**asked, "instructions": "Be kind."}
        second = client.responses.create(input="And then?", previous_response_id=first.id, **more)
        assert reused(second) >= first.usage.total_tokens - 1
        with client.responses.stream(
            input="What else?", previous_response_id=first.id, **more
        ) as stream:
            events = list(stream)
        assert events[-1].type in ("response.completed", "response.incomplete")
        beside = events[-1].response
        assert beside.batchengine["timeline"]["use"] == "forked"
        with client.responses.create(input="A", stream=True, **asked) as events_of:
            cut_id = next(iter(events_of)).response.id
            os.kill(pid, signal.SIGKILL)
    with client_of(pocket_path, folder, cache_dir) as (client, _):
        assert client.responses.retrieve(cut_id).id == cut_id  # it was sent, so it is kept
        found = client.responses.retrieve(second.id)
        assert found.output_text == second.output_text
        assert (found.status, found.instructions) == (second.status, "Be kind.")
        third = client.responses.create(
            input="Good. And now?", previous_response_id=second.id, **more
        )
        assert third.batchengine["timeline"]["use"] == "appended"
        assert third.usage.input_tokens > second.usage.total_tokens
        assert reused(third) >= 256
        with client.responses.retrieve(third.id, stream=True) as events_again:
            *_, last = events_again
        assert last.response.usage == client.responses.retrieve(third.id).usage == third.usage
        whole = client.responses.create(input="Once", store=False, **asked)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        with pytest.raises(openai.NotFoundError, match="Previous response with id"):
            client.responses.create(input="x", previous_response_id=whole.id, **asked)
        client.responses.delete(beside.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(beside.id)
        later = client.responses.create(input="Hi", background=True, **asked)
        with client.responses.retrieve(later.id, stream=True) as events_again:
            shown = [event.type for event in events_again]
        assert shown[0] == "response.created"
        assert shown[-1] in ("response.completed", "response.incomplete")
        listed = client.responses.input_items.list(third.id)
        assert [item.content[0].text for item in listed] == ["Good. And now?"]
        assert found.completed_at is not None or found.status == "incomplete"
        items: Any = [{"type": "item_reference", "id": item} for item in (
            listed.data[0].id, third.output[0].id)]  # fmt: skip
        named = client.responses.create(input=[*items, message("user", "More.")], **asked)
        whole = client.responses.create(
            input=[listed.data[0].to_dict(), third.output[0].to_dict(), message("user", "More.")],
            **asked,
        )
        counted = client.responses.input_tokens.count(
            model=asked["model"], input=[*items, message("user", "More.")]
        )
        assert counted.input_tokens == named.usage.input_tokens
        counted = client.responses.input_tokens.count(
            model=asked["model"], input="Good. And now?", previous_response_id=second.id,
            instructions="Be kind.",
        )  # fmt: skip
        assert counted.input_tokens == third.usage.input_tokens
        assert named.output_text == whole.output_text
        assert named.usage.input_tokens == whole.usage.input_tokens
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        assert client.responses.retrieve(third.id).output_text == third.output_text
        more["max_output_tokens"] = 200
        with client.responses.create(input="Hi", background=True, stream=True, **more) as left:
            left_id = next(iter(left)).response.id
        with client.responses.retrieve(left_id, stream=True) as events_again:
            *_, last = events_again
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == client.responses.retrieve(left_id).output_text
        for body in captured(asked["model"]):
            with client.responses.stream(**body) as stream:
                kinds = [event.type for event in stream]
            assert "response.output_item.done" in kinds
            assert kinds[-1] in ("response.completed", "response.incomplete")


def test_a_response_that_is_asked_for_again_has_the_id_of_the_first(
    pocket_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By an idempotency key, also while the first is made; and in a session by its sampling."""
    with client_of(pocket_path, tmp_path_factory.mktemp("i"), cache_dir) as (client, _):
        model = client.models.list().data[0].id

        def made(key: str, **more: Any) -> Any:
            asked = {"model": model, "input": "Tell me a story.", "max_output_tokens": 12, **more}
            return client.responses.create(**asked, extra_headers={"Idempotency-Key": key})

        def streamed(key: str, **more: Any) -> Any:
            with made(key, stream=True, **more) as events:
                begun, *_, last = events
            assert begun.response.id == last.response.id
            return last.response

        first = made("one")
        assert (made("one").id, streamed("one").id) == (first.id, first.id)
        assert made("one").output_text == client.responses.retrieve(first.id).output_text
        assert made("two").id != first.id
        with pytest.raises(openai.ConflictError):
            made("one", input="Something else.")
        behind = made("behind", previous_response_id=first.id)
        forks = [make("fork", previous_response_id=first.id) for make in (made, streamed, made)]
        assert forks[0].id != behind.id
        assert {fork.id for fork in forks} == {forks[0].id}

        named: dict[str, Any] = {"prompt_cache_key": "chat", "temperature": 0}
        again = [made("", **named), made("", **named), streamed("", **named)]
        assert {one.id for one in again} == {again[0].id}
        assert client.responses.retrieve(again[0].id).output_text == again[1].output_text
        for other in (made("", **named, max_output_tokens=8), made("three", **named)):
            assert other.id != again[0].id
            assert client.responses.retrieve(other.id).output_text == other.output_text

        long: dict[str, Any] = {"background": True, "max_output_tokens": 12_000}
        long["extra_body"] = {"ignore_eos": True}
        begun = [made("long", **long) for _ in range(3)]
        assert {one.id for one in begun} == {begun[0].id}
        assert client.responses.cancel(begun[0].id).status == "cancelled"
        deadline = time.monotonic() + 30
        while running(client) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running(client)
        assert client.responses.retrieve(begun[0].id).status == "cancelled"


def test_what_has_ended_is_shown_and_not_computed(
    pocket_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A response that its client cancelled, and one behind which its conversation went on."""
    with client_of(pocket_path, tmp_path_factory.mktemp("r"), cache_dir) as (client, _):
        asked: dict[str, Any] = {"model": client.models.list().data[0].id, "temperature": 0}
        long = {**asked, "max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}
        begun = client.responses.create(input="Hi", background=True, **long)
        time.sleep(0.3)
        ended = client.responses.cancel(begun.id)
        assert ended.status == "cancelled"
        assert ended.usage is not None
        assert 0 < ended.usage.output_tokens < 3000
        for _ in range(2):
            found = client.responses.retrieve(begun.id)
            assert (found.status, found.usage, found.output) == (
                "cancelled", ended.usage, ended.output,
            )  # fmt: skip
            with client.responses.retrieve(begun.id, stream=True) as events:
                *_, last = events
            assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
            assert (last.response.usage, last.response.output) == (ended.usage, ended.output)
        with client.responses.retrieve(begun.id, stream=True, starting_after=4) as events:
            assert next(iter(events)).sequence_number == 5
        first = client.responses.create(input="Once", max_output_tokens=20, **asked)
        with client.responses.retrieve(first.id, stream=True) as events:
            before = [event.to_dict() for event in events]
        client.responses.create(input="Go", previous_response_id=first.id, **asked)
        with client.responses.retrieve(first.id, stream=True) as events:
            after = [event.to_dict() for event in events]
        assert [event["type"] for event in after] == [event["type"] for event in before]
        assert after[-1]["response"]["output"] == first.to_dict()["output"]
        with client.responses.create(input="Hi", stream=True, **long) as stream:
            created = next(iter(stream))
            client.responses.cancel(created.response.id)
            *_, last = stream
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


def running(client: openai.OpenAI) -> int:
    """How many requests of this client are computed or wait."""
    queue: Any = client.get(str(client.base_url.copy_with(path="/api/queue")), cast_to=object)
    return queue["running"] + queue["waiting"]


class Dog(pydantic.BaseModel):
    name: str
    age: int


def test_a_forced_call_and_a_schema_are_valid_from_any_model(
    pocket_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "name": "weather", "parameters": parameters, "strict": True}
    with client_of(pocket_path, folder, cache_dir) as (client, _):
        asked: dict[str, Any] = {
            "model": client.models.list().data[0].id, "input": "Weather in Paris?", "tools": [tool],
            "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200,
        }  # fmt: skip
        made = client.responses.create(**asked)
        (call,) = made.output
        assert (made.status, call.type, call.name) == ("completed", "function_call", "weather")
        assert isinstance(json.loads(call.arguments)["city"], str)
        with client.responses.stream(
            **{
                **asked,
                "input": [{"type": "function_call_output", "call_id": call.call_id, "output": "x"}],
                "previous_response_id": made.id,
            }
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        assert final.output[0].type == "function_call"
        assert reused(final) >= made.usage.total_tokens - 1
        dog = client.responses.parse(
            model=asked["model"], input="Invent a dog.", text_format=Dog, max_output_tokens=400,
            temperature=0,
        )  # fmt: skip
        assert dog.status == "incomplete" or isinstance(dog.output_parsed, Dog)


def reused(response: Any) -> int:
    return response.usage.input_tokens_details.cached_tokens


def captured(model: str) -> list[dict[str, Any]]:
    """Bodies of the shape that Codex and pi send after a tool call."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "limit": {"maximum": 9007199254740991}},
        "required": ["cmd"],
        "additionalProperties": False,
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "arguments": '{"cmd":"ls"}'}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt\n"}
    codex = {
        "model": model,
        "temperature": 0,
        "max_output_tokens": 12,
        "input": [
            message("developer", "You are a coding agent.", id="msg_1"),
            message("developer", "Sandbox: none.", id="msg_2"),
            message("user", "List the files.", id="msg_3"),
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "I list them."}], "encrypted_content": None},
            {**call, "status": "completed", "name": "exec_command"},
            {**output, "id": "fco_1"},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "strict": False, "parameters": schema},
            {"type": "namespace", "name": "agents", "description": "d", "tools": [
                {"type": "function", "name": "spawn", "strict": False, "parameters": schema}]},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "extra_body": {"client_metadata": {"turn_id": "t"}},
        "extra_headers": {"session-id": "thread-1", "thread-id": "thread-1"},
    }  # fmt: skip
    pi = {
        "model": model,
        "temperature": 0,
        "max_output_tokens": 12,
        "input": [
            {"role": "system", "content": "You are an expert coding assistant."},
            {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
            {**call, "name": "bash"},
            output,
        ],
        "tools": [{"type": "function", "name": "bash", "parameters": schema, "strict": False}],
        "prompt_cache_key": "01a201a8",
        "store": False,
    }
    return [json.loads(json.dumps(codex)), pi]


def message(role: str, text: str, **more: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "role": role, "content": content, **more}
