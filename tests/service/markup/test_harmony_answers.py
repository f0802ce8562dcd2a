"""Answers in Harmony through every protocol, whole and streamed, and results behind an answer."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
import pytest

from batchengine.core import BatchEngineError
from batchengine.text.encoder import TextEncoder
from service.protocols import append, reading
from service.protocols.markup import history
from service.protocols.protocol import PromptLimits
from tests.support.fake_engine import FakeEngine, FakeText, Served, post, serving
from tests.text.harmony import open_harmony, shown, write_harmony

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "It says.", "parameters": SCHEMA}
USER = {"role": "user", "content": "hi"}
CALLS = (
    "<|channel|>", "analysis", "<|message|>", "So", ".", "<|end|>", "<|start|>", "assistant",
    "<|channel|>", "commentary", "<|message|>", "Wait", ".", "<|end|>", "<|start|>", "assistant",
    "<|channel|>", "commentary", " to=", "functions.weather", " ", "<|constrain|>", "json",
    "<|message|>", '{"ci', 'ty": "Par', 'is"}', "",
)  # fmt: skip
TEXTS = (*CALLS[:8], "<|channel|>", "final", "<|message|>", "Hi", " there.", "")
ARGUMENTS = '{"city": "Paris"}'


class HarmonyText(FakeText):
    """The encoder of a vocabulary with Harmony, in this process."""

    def __init__(self, text: TextEncoder) -> None:
        super().__init__()
        for name in ("encode", "takes", "control_id", "encode_chat", "ends_turn", "piece"):
            setattr(self, name, getattr(text, name))
        self.markup, self.reasons = text.markup, text.reasons


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return open_harmony(write_harmony(tmp_path_factory.mktemp("vocab") / "harmony.gguf"))


@pytest.fixture
def engine(text: TextEncoder) -> FakeEngine:
    made = FakeEngine()
    made.text = HarmonyText(text)
    return made


async def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    url = served.base + path
    async with (
        aiohttp.ClientSession() as client,
        client.post(url, json=body | {"stream": True}) as reply,
    ):
        lines = (await reply.text()).splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(one) for one in found]


async def test_chat_completions(engine: FakeEngine) -> None:
    tool = {"type": "function", "function": FUNCTION}
    body = {"messages": [USER], "tools": [tool], "max_tokens": 64}
    async with serving(engine) as served:
        engine.reply = CALLS
        status, answer, _ = await post(served, "/v1/chat/completions", body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("So.", "Wait.")
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        chunks = await events(served, "/v1/chat/completions", body)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        calls = [one for delta in deltas for one in delta.get("tool_calls", ())]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So."
        assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
        assert "".join(one["function"].get("arguments", "") for one in calls) == ARGUMENTS
        assert len(calls) > 2
        engine.reply = TEXTS
        _, answer, _ = await post(served, "/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("So.", "Hi there.")
        assert "tool_calls" not in message
        assert answer["choices"][0]["finish_reason"] == "stop"
        del body["tools"]
        _, answer, _ = await post(served, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "Hi there."


async def test_messages(engine: FakeEngine) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": [USER], "tools": [tool], "max_tokens": 64, "thinking": thinking}
    async with serving(engine) as served:
        engine.reply = CALLS
        status, answer, _ = await post(served, "/v1/messages", body)
        assert status == 200, answer
        thought, said, call = answer["content"]
        assert (thought["thinking"], said["text"]) == ("So.", "Wait.")
        assert (call["name"], call["input"]) == ("weather", {"city": "Paris"})
        assert answer["stop_reason"] == "tool_use"
        found = await events(served, "/v1/messages", body)
        blocks = [one["content_block"]["type"] for one in found if "content_block" in one]
        assert blocks == ["thinking", "text", "tool_use"]
        inputs = [one["delta"].get("partial_json", "") for one in found if "delta" in one]
        assert "".join(inputs) == ARGUMENTS
        assert "<|" not in json.dumps(found)


async def test_responses_and_results_behind_an_answer(
    engine: FakeEngine, text: TextEncoder
) -> None:
    """The client sends the id of the call alone; the template wants the name of its tool."""
    tool = {"type": "function", **FUNCTION}
    body: dict[str, Any] = {"input": "hi", "tools": [tool], "max_output_tokens": 64}
    async with serving(engine) as served:
        engine.reply = CALLS
        status, answer, _ = await post(served, "/v1/responses", body)
        assert status == 200, answer
        kinds = [one["type"] for one in answer["output"]]
        assert kinds == ["reasoning", "message", "function_call"]
        call = answer["output"][-1]
        assert (call["name"], call["arguments"]) == ("weather", ARGUMENTS)
        found = await events(served, "/v1/responses", body)
        done = next(one for one in found if one["type"] == "response.completed")
        assert [one["type"] for one in done["response"]["output"]] == kinds
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        more = {**body, "input": [output], "previous_response_id": answer["id"]}
        status, answer, _ = await post(served, "/v1/responses", more)
        assert status == 200, answer
        added = shown(text, list(engine.generations[-1].request.append))
        assert added == (
            "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
            '"sun"<|end|><|start|>assistant'
        )
        count = await post(served, "/v1/responses/input_tokens", more)
        assert count[0] == 200
        output["call_id"] = "call_of_another_server"
        status, answer, _ = await post(served, "/v1/responses", more)
        assert (status, answer["error"]["code"]) == (400, "not_appendable")
        assert answer["error"]["param"] == "previous_response_id"
        assert "'call_of_another_server': send the call_id of" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "banana"}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "banana"}}),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"model_identity": "x"}},
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": ["high"]}},
        ),
    ],
)
async def test_unknown_efforts_are_refused(
    engine: FakeEngine, path: str, more: dict[str, Any]
) -> None:
    async with serving(engine) as served:
        assert (await post(served, path, more))[0] == 400


@pytest.mark.parametrize(
    ("path", "more", "effort"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "high"),
        ("/v1/chat/completions", {}, "medium"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "low"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"},
            "low",
        ),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "low"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, "low"),
        ("/v1/messages", {}, "low"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "medium"),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "high"),
    ],
)
async def test_efforts_reach_the_template(
    engine: FakeEngine, text: TextEncoder, path: str, more: dict[str, Any], effort: str
) -> None:
    body = {"input": "hi"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 9}
    async with serving(engine) as served:
        status, answer, _ = await post(served, path, body | more)
        assert status == 200, answer
        prompt = shown(text, list(engine.generations[-1].request.prompt))
        assert f"Reasoning: {effort}<|end|>" in prompt


def test_a_result_of_an_unknown_turn_cannot_be_appended(text: TextEncoder) -> None:
    limits = PromptLimits(10_000, 300, 10, append=True)
    body = {"messages": [{"role": "tool", "tool_call_id": "call_abn0", "content": "r"}]}
    data = json.dumps(body).encode()

    def read(**more: Any) -> reading.Reading:
        question = reading.encode(reading.Question("chat", limits, **more))
        return reading.decode_reading(reading.read(HarmonyText(text), question, data))

    first = read()
    assert (first.turns, first.has_results) == (["ab"], True)
    with pytest.raises(BatchEngineError) as caught:
        read(answers=[])
    assert (caught.value.name, caught.value.param) == ("not_appendable", "batchengine.append")
    assert "'call_abn0'" in caught.value.why
    assert "send the call_id of the answer, or the field `name`" in caught.value.why
    body = {
        "previous_response_id": "resp_ab",
        "input": [{"type": "function_call_output", "call_id": "c1", "output": "r"}],
    }
    question = reading.encode(reading.Question("responses", PromptLimits(10_000, 300, 10)))
    with pytest.raises(BatchEngineError) as caught:
        reading.read(HarmonyText(text), question, json.dumps(body).encode())
    assert "'c1'" in caught.value.why
    assert caught.value.param == "previous_response_id"
    assert "without batchengine.append or previous_response_id" in caught.value.fix


def test_a_result_without_a_call_is_a_message_of_the_user(text: TextEncoder) -> None:
    """Clients cut their histories; the template would refuse it."""
    messages = [
        {"role": "tool", "tool_call_id": "a", "content": "r"},
        {"role": "assistant", "content": "x"},
        USER,
    ]
    data = json.dumps({"messages": messages}).encode()
    question = reading.encode(reading.Question("chat", PromptLimits(10_000, 300, 10)))
    found = reading.decode_reading(reading.read(HarmonyText(text), question, data))
    prompt = shown(text, found.prompt.tokens[0])
    assert "<|start|>user<|message|><tool_response>\nr\n</tool_response><|end|>" in prompt


# ---- new messages behind an answer ----

CALL_OF_B = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "2", "type": "function", "function": {"name": "b", "arguments": ""}}],
}


def of_tool(name: str, call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "name": name, "content": f"r{call}"}


def behind(text: TextEncoder, *messages: dict[str, Any]) -> str:
    """What new messages add behind an answer."""
    later = history.prepare_later(list(messages), [], None, text, {})
    return shown(text, append.appended(text, later, None, {}))


@pytest.mark.parametrize("between", [[], [USER]])
def test_results_of_several_tools_cannot_be_appended(
    text: TextEncoder, between: list[dict[str, Any]]
) -> None:
    """The template would give all of them the name of the first."""
    with pytest.raises(BatchEngineError) as caught:
        behind(text, of_tool("a", "1"), *between, of_tool("b", "2"))
    assert caught.value.name == "not_appendable"
    assert "'a', 'b'" in caught.value.why
    assert behind(text, of_tool("a", "1"), of_tool("a", "2")).count("<|start|>functions.a to=") == 2


def test_a_result_of_a_later_call_has_the_name_of_that_call(text: TextEncoder) -> None:
    added = behind(text, of_tool("a", "1"), USER, CALL_OF_B, of_tool("b", "2"))
    assert added.startswith("<|call|><|start|>functions.a to=assistant")
    assert (
        "<|start|>assistant to=functions.b<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.b to=assistant<|channel|>commentary<|message|>"r2"<|end|>'
    ) in added


def test_a_result_behind_a_new_message_of_the_user_is_text(text: TextEncoder) -> None:
    added = behind(text, USER, of_tool("a", "1"))
    assert added.startswith(
        "<|end|><|start|>user<|message|>hi\n\n<tool_response>\nr1\n</tool_response><|end|>"
    )


def test_results_find_their_calls_in_time_that_grows_with_their_number(text: TextEncoder) -> None:
    number = 20_000  # as a quadratic search: 200 million comparisons
    calls = [
        {"id": f"c{one}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for one in range(number)
    ]
    results = [of_tool("f", f"c{one}") for one in reversed(range(number))]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    begun = time.process_time()
    made, _ = history.prepare([USER, answer, *results], None, text)
    assert time.process_time() - begun < 5
    assert [one["content"] for one in made[2::2]] == [f"rc{one}" for one in range(number)]
