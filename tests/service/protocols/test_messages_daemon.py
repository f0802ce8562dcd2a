"""End to end: the Anthropic SDK against the real daemon on the bundled pocket model.

One daemon for the whole file. Bodies of an agent have the shape that Claude Code sends; their text
is short, since the pocket model's vocabulary needs many tokens for prose.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from service.cli.local.child import ChildDaemon
from tests.service.protocols.test_messages import TOOL, text, user

SESSION = {"X-Claude-Code-Session-Id": "11111111-2222-3333-4444-555555555555"}
NAMES = ("Agent", "Bash", "Edit", "Glob", "Grep", "Read", "Search", "Skill", "Task", "Write")


@pytest.fixture(scope="module")
def daemon(pocket_path: Path) -> Iterator[ChildDaemon]:
    with ChildDaemon(pocket_path, lambda _: None) as running:
        running.wait_ready(60)
        yield running
        assert running.stop() == 0


@pytest.fixture
def sdk(daemon: ChildDaemon) -> Iterator[anthropic.Anthropic]:
    base = daemon.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def model(sdk: anthropic.Anthropic) -> str:
    return next(iter(sdk.models.list())).id


def greedy(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 24, "extra_body": {"temperature": 0}, **more}


def test_whole_streamed_and_resumed_messages_agree(
    daemon: ChildDaemon, sdk: anthropic.Anthropic, model: str
) -> None:
    messages: Any = [user(text("Hello! Who are you?"))]
    asked = greedy(model=model, messages=messages)
    whole = sdk.messages.create(**asked)
    with sdk.messages.stream(**asked, extra_headers={"session-id": "m-1"}) as stream:
        types = [event.type for event in stream]
        last = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert [block.to_dict() for block in last.content] == [
        block.to_dict() for block in whole.content
    ]
    assert types[0] == "message_start"
    assert types[-1] == "message_stop"
    request = urllib.request.Request(f"{daemon.url}/stream?session_id=m-1&from=0")
    with urllib.request.urlopen(request, timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert data[0]["message"]["id"] == last.id
    again = "".join(event["delta"]["text"] for event in data if "text" in event.get("delta", ()))
    assert again == whole.content[0].text
    assert data[-1] == {"type": "message_stop"}


def test_stop_sequences_are_named(sdk: anthropic.Anthropic, model: str) -> None:
    messages: Any = [user(text("Hello! Who are you?"))]
    full = sdk.messages.create(**greedy(model=model, messages=messages))
    assert full.content[0].type == "text"
    word = full.content[0].text.split()[2]
    cut = sdk.messages.create(**greedy(model=model, messages=messages, stop_sequences=["%", word]))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)


def agent_body(model: str, *messages: Any, fetch: bool = False) -> dict[str, Any]:
    tools = [{**TOOL, "name": name} for name in NAMES]
    placeholder = {**TOOL, "name": "DeferredToolPlaceholder", "defer_loading": True}
    if fetch:  # the client sorts its tools: the new one stands between others
        tools.insert(7, {**TOOL, "name": "Fetch", "defer_loading": True})
    return greedy(
        model=model,
        system=[
            text("x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=sdk-cli;"),
            text("You are an agent.", cache_control={"type": "ephemeral"}),
        ],
        messages=[
            user(text("<hint>Be kind.</hint>"), text("List the files.")),
            {"role": "system", "content": [text("# Environment\nlinux")]},
            *messages,
        ],
        tools=[*tools, placeholder],
        extra_headers=SESSION,
    )


def test_an_agents_turns_reuse_the_prefix_also_after_a_tool_was_found(
    sdk: anthropic.Anthropic, model: str
) -> None:
    first = sdk.messages.create(**agent_body(model))
    prompt = first.usage.input_tokens
    assert first.usage.cache_read_input_tokens == 0
    history: list[Any] = [{"role": "assistant", "content": first.content}, user(text("Go on."))]
    second = sdk.messages.create(**agent_body(model, *history))
    assert (second.usage.cache_read_input_tokens or 0) >= prompt
    find = {"type": "tool_use", "id": "toolu_1", "name": "Search", "input": {"query": "Fetch"}}
    found = {
        "type": "tool_result", "tool_use_id": "toolu_1",
        "content": [{"type": "tool_reference", "tool_name": "Fetch"}],
    }  # fmt: skip
    more: Any = [*history, {"role": "assistant", "content": [find]}, user(found)]
    third = sdk.messages.create(**agent_body(model, *more, fetch=True))
    usage = second.usage
    known = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (third.usage.cache_read_input_tokens or 0) >= known


def test_counted_tokens_are_those_of_the_prompt(sdk: anthropic.Anthropic, model: str) -> None:
    messages: Any = [user(text("Hello! Who are you?"))]
    counted = sdk.messages.count_tokens(model=model, messages=messages)
    usage = sdk.messages.create(**greedy(model=model, messages=messages)).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_forced_calls_and_formats_are_valid(sdk: anthropic.Anthropic, model: str) -> None:
    schema = {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    tool: Any = {"name": "get_weather", "description": "The weather.", "input_schema": schema}
    asked: dict[str, Any] = {
        "model": model, "max_tokens": 64, "tools": [tool, {**TOOL, "name": "other"}],
        "messages": [user(text("What is the weather?"))],
        "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = sdk.messages.create(**asked)
    with sdk.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        [block] = message.content
        assert (block.type, getattr(block, "name", "")) == ("tool_use", "get_weather")
        assert getattr(block, "input", {})["city"] in ("Paris", "Rome")
    form = {"type": "json_schema", "schema": schema}
    messages: Any = [user(text("Which city?"))]
    made = sdk.messages.create(**greedy(
        model=model, messages=messages, output_config={"format": form}, max_tokens=32
    ))  # fmt: skip
    assert made.content[0].type == "text"
    assert json.loads(made.content[0].text)["city"] in ("Paris", "Rome")


def test_a_prefilled_answer_goes_on(sdk: anthropic.Anthropic, model: str) -> None:
    messages: Any = [user(text("Hello! Who are you?"))]
    full = sdk.messages.create(**greedy(model=model, messages=messages))
    assert full.content[0].type == "text"
    begun, _, rest = full.content[0].text.partition(" ")
    prefilled = [*messages, {"role": "assistant", "content": begun}]
    made = sdk.messages.create(**greedy(model=model, messages=prefilled))
    assert made.content[0].type == "text"
    assert made.content[0].text.split() == rest.split()


def pages_sealed(daemon: ChildDaemon) -> float:
    with urllib.request.urlopen(daemon.url.removesuffix("/v1") + "/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found = [
        line for line in lines if line.startswith('batchengine_kv_pages_total{event="sealed"}')
    ]
    return sum(float(line.split()[-1]) for line in found)


def test_warming_leaves_the_prompts_kv(
    daemon: ChildDaemon, sdk: anthropic.Anthropic, model: str
) -> None:
    before = pages_sealed(daemon)
    messages: Any = [user(text("A long text about nothing. " * 150))]
    warmed = sdk.messages.create(model=model, max_tokens=0, messages=messages)
    assert (warmed.content, warmed.usage.output_tokens) == ([], 0)
    deadline = time.monotonic() + 20
    while pages_sealed(daemon) < before + 2:  # a moment after the answer
        assert time.monotonic() < deadline
        time.sleep(0.02)
    usage = sdk.messages.create(**greedy(model=model, messages=messages, max_tokens=1)).usage
    assert (usage.cache_read_input_tokens or 0) >= 256
