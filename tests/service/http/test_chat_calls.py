"""Chat answers with reasoning and calls of tools: deltas, whole answers, resumed streams."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from batchengine.core import (
    DoneEvent,
    GenerationRequest,
    OutputForm,
    SkippedEvent,
    TokenEvent,
    Usage,
)
from service.protocols import requests
from service.protocols.openai.chat import ChatFormatter
from tests.support.fake_engine import FakeEngine, chat, serving

REPLY = (
    "<think>\nOne", " two", "\n</think>\n\nLet", " me see.\n\n", "<tool", "_call>\n{",
    '"name": "weather", "argu', 'ments": {"city"', ': "Paris"', "}}\n</tool", "_call>",
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "\n",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def formatter_of(**fields: Any) -> ChatFormatter:
    form = OutputForm("hermes", calls=True)
    asked = GenerationRequest("req_ab", (1, 2), 64, output=form)
    job = requests.HttpJob(
        asked=asked, model="m", created=7, stream=True, include_usage=True, route="cpu", seed=1,
        requests=[asked], **fields,
    )  # fmt: skip
    return ChatFormatter(job)


def deltas_of(formatter: ChatFormatter, events: list[Any]) -> list[dict[str, Any]]:
    """The choices of every chunk."""
    out: list[bytes] = []
    for event in events:
        match event:
            case SkippedEvent():
                formatter.skip(0, event)
            case TokenEvent():
                out += [one.data for one in formatter.token(0, event)]
            case _:
                out += [one.data for one in formatter.finish(0, event)]
    chunks = [json.loads(data) for data in out if data != b"[DONE]"]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def message_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds of its deltas."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["tool_calls"][call["index"]] = [call["id"], call["function"]["name"], ""]
            else:
                message["tool_calls"][call["index"]][2] += call["function"]["arguments"]
    return message


DONE = DoneEvent("stop", Usage(), "")
TOKENS = [TokenEvent(number, text) for number, text in enumerate(REPLY)]
MESSAGE = {
    "content": "Let me see.",
    "reasoning_content": "One two",
    "tool_calls": {
        0: ["call_abn0", "weather", '{"city": "Paris"}'],
        1: ["call_abn1", "now", "{}"],
    },
}


def test_deltas_of_reasoning_text_and_calls() -> None:
    formatter = formatter_of()
    choices = deltas_of(formatter, [*TOKENS, DONE])
    assert message_of(choices) == MESSAGE
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [
        "tool_calls"
    ]
    assert choices[-1]["delta"] == {}
    assert formatter.answers[0].reasoning_tokens == 2


@pytest.mark.parametrize("start", range(len(REPLY) + 1))
def test_a_resumed_stream_has_the_deltas_of_the_first(start: int) -> None:
    first, again = formatter_of(), formatter_of()
    events = deltas_of(first, [*TOKENS[:start]])
    skipped = [SkippedEvent(text) for text in REPLY[:start]]
    rest = deltas_of(again, [*skipped, *TOKENS[start:], DONE])
    assert message_of(events + rest) == MESSAGE
    assert rest[-1]["finish_reason"] == "tool_calls"
    assert again.answers[0].reasoning_tokens == 2


def test_a_call_that_is_cut_off_ends_with_length() -> None:
    choices = deltas_of(formatter_of(), [*TOKENS[:8], DoneEvent("length", Usage(), "")])
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("tools", [[TOOL], []])
async def test_whole_answers(tools: list[Any]) -> None:
    asked = chat(tools=tools) if tools else chat()
    async with (
        serving(FakeEngine(REPLY)) as served,
        aiohttp.ClientSession() as http,
        http.post(f"{served.base}/v1/chat/completions", json=asked) as answer,
    ):
        body = await answer.json()
    assert served.engine.generations[0].request.output.calls == bool(tools)
    choice = body["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == "One two"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    if not tools:
        assert message["content"].startswith("Let me see.\n\n<tool_call>")
        assert "tool_calls" not in message
        return
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    calls = [(call["type"], call["function"]["name"]) for call in message["tool_calls"]]
    assert calls == [("function", "weather"), ("function", "now")]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
