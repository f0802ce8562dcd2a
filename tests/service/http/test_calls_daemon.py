"""End to end: the OpenAI SDK with tools and formats against a daemon with the pocket model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import openai
import pytest
from openai.types.chat import ChatCompletionMessageCustomToolCall
from pydantic import BaseModel

from service.cli.local.child import ChildDaemon

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {
    "type": "function",
    "function": {
        "name": "now",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}


class Light(BaseModel):
    color: Literal["red", "green"]
    on: bool


@pytest.fixture(scope="module")
def daemon(pocket_path: Path) -> Iterator[ChildDaemon]:
    with ChildDaemon(pocket_path, lambda _: None) as running:
        running.wait_ready(60)
        yield running
        assert running.stop() == 0


@pytest.fixture
def sdk(daemon: ChildDaemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=daemon.url, api_key="none", max_retries=0) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "pocket-q4_0", "max_tokens": 96, "temperature": 1.0, "seed": 3, **more}


def resumed(daemon: ChildDaemon, position: str) -> list[tuple[str, dict[str, Any]]]:
    """(id, delta) of the events of the last turn from a position on."""
    url = f"{daemon.url}/stream?session_id=calls-1&{position}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        events = reply.read().decode().split("\n\n")
    found: list[tuple[str, dict[str, Any]]] = []
    for event in events:
        fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if fields.get("data", "").startswith("{"):
            chunk = json.loads(fields["data"])
            found += [(fields.get("id", ""), choice["delta"]) for choice in chunk["choices"]]
    return found


def test_a_forced_call_is_valid_whole_streamed_and_resumed(
    daemon: ChildDaemon, sdk: openai.OpenAI
) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    fields = asked(messages=[USER], tools=[WEATHER, NOW], tool_choice=choice)
    whole = sdk.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    call: Any = (whole.message.tool_calls or [])[0]
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9

    headers = {"x-batchengine-session-id": "calls-1"}
    with sdk.chat.completions.stream(**fields, extra_headers=headers) as stream:
        for _ in stream:
            pass
        last = stream.get_final_completion().choices[0]
    made: Any = (last.message.tool_calls or [])[0]
    assert (last.finish_reason, made.function.arguments) == (
        "tool_calls", call.function.arguments,
    )  # fmt: skip

    events = resumed(daemon, "from=0")
    calls = [one for _, delta in events for one in delta.get("tool_calls", ())]
    assert calls[0]["id"] == made.id
    assert "".join(one["function"]["arguments"] for one in calls) == made.function.arguments
    middle = len(events) // 2  # inside the arguments
    turn, _, sent = events[middle][0].rpartition(":")
    assert events[middle + 1 :] == resumed(daemon, f"turn={turn}&from={sent}")[1:]

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said: Any = whole.message.model_dump(exclude_none=True)
    messages = [USER, said, result]
    after = sdk.chat.completions.create(
        **fields | {"messages": messages, "tool_choice": "auto"}, extra_headers=headers
    )
    assert after.choices[0].finish_reason in ("stop", "length")
    details: Any = after.usage and after.usage.prompt_tokens_details
    assert details.cached_tokens > 100


def test_a_forced_call_that_is_cut_shows_no_markup(daemon: ChildDaemon, sdk: openai.OpenAI) -> None:
    chat = asked(messages=[USER], tools=[WEATHER], tool_choice="required")
    item = {"type": "function", **WEATHER["function"]}
    shared = {"model": "pocket-q4_0", "temperature": 0, "tool_choice": "required", "tools": [item]}
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    message = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}}
    kinds = set[tuple[str, ...]]()
    for most in (1, 3, 6, 10, 14, 18, 22):
        one = sdk.chat.completions.create(**chat | {"max_tokens": most}).choices[0]
        assert (one.message.content or "", one.finish_reason) == ("", "length")
        answer = posted(daemon, "responses", shared | {"input": "Hi", "max_output_tokens": most})
        assert answer["status"] == "incomplete"
        kinds.add(tuple(item["type"] for item in answer["output"]))
        answer = posted(daemon, "messages", message | {"model": "pocket-q4_0", "max_tokens": most})
        assert answer["stop_reason"] == "max_tokens"
        assert "".join(block.get("text", "") for block in answer["content"]) == ""
    assert kinds == {(), ("function_call",)}


def posted(daemon: ChildDaemon, route: str, body: dict[str, Any]) -> Any:
    data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(f"{daemon.url}/{route}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_several_calls_and_one(sdk: openai.OpenAI) -> None:
    fields = asked(messages=[USER], tools=[NOW], tool_choice="required", max_tokens=160)
    one = sdk.chat.completions.create(**fields, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in one.message.tool_calls or []] == ["now"]  # type: ignore
    many = sdk.chat.completions.create(**fields).choices[0]
    assert {call.function.name for call in many.message.tool_calls or []} == {"now"}  # type: ignore


def test_parse(sdk: openai.OpenAI) -> None:
    found = sdk.chat.completions.parse(**asked(messages=[USER], response_format=Light))
    assert isinstance(found.choices[0].message.parsed, Light)
    assert found.choices[0].finish_reason == "stop"


def test_a_grammar_of_llama_cpp(sdk: openai.OpenAI) -> None:
    grammar = 'root ::= ("yes" | "no") "!"\n'
    found = sdk.chat.completions.create(**asked(messages=[USER]), extra_body={"grammar": grammar})
    assert found.choices[0].message.content in ("yes!", "no!")


def test_a_bomb_is_refused(sdk: openai.OpenAI) -> None:
    bomb = 'root ::= x\nx ::= x x | "a" x | x "b"\n' + "".join(
        f"y{i} ::= (x{{1,900}}){{1,900}}\n" for i in range(20)
    )
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(**asked(messages=[USER]), extra_body={"grammar": bomb})


def test_an_answer_goes_on(sdk: openai.OpenAI) -> None:
    begun: Any = {"role": "assistant", "content": "The weather in Paris is"}
    found = sdk.chat.completions.create(**asked(messages=[USER, begun], max_tokens=4))
    assert found.choices[0].message.content
    assert not found.choices[0].message.content.startswith("The weather")


def test_a_custom_tool_follows_the_grammar_of_its_input(sdk: openai.OpenAI) -> None:
    form = {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: ("ab" LF)~2\n%import common.LF',
    }
    tool: Any = {"type": "custom", "name": "write", "format": form}
    answer = sdk.responses.create(
        model="pocket-q4_0", input="Write.", tools=[tool], max_output_tokens=96,
        tool_choice=cast(Any, {"type": "custom", "name": "write"}), parallel_tool_calls=False,
    )  # fmt: skip
    calls = [item.input for item in answer.output if item.type == "custom_tool_call"]
    assert calls == ["ab\nab\n"]


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [("lark", 'start: ("ab" LF)~2\n%import common.LF'), ("regex", "(ab\n){2}")],
)
def test_a_custom_tool_of_a_chat_is_called_streamed_and_answered(
    sdk: openai.OpenAI, syntax: Literal["lark", "regex"], definition: str
) -> None:
    tool: Any = {"type": "custom", "custom": {
        "name": "write", "description": "Writes.",
        "format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}},
    }}  # fmt: skip
    choice: Any = {"type": "custom", "custom": {"name": "write"}}
    fields = asked(messages=[USER], tools=[tool, NOW], tool_choice=choice)
    answer = sdk.chat.completions.create(**fields).choices[0]
    (call,) = answer.message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert (call.custom.name, call.custom.input) == ("write", "ab\nab\n")
    assert answer.finish_reason == "tool_calls"
    pieces: list[str] = []
    for chunk in sdk.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            pieces.append(cast(Any, delta).custom["input"])
    assert pieces[0] == ""
    assert len(pieces) > 2
    assert "".join(pieces) == call.custom.input
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [USER, cast(Any, answer.message.to_dict()), result]
    again = sdk.chat.completions.create(**asked(messages=turns, tools=[tool, NOW], max_tokens=4))
    assert again.choices


def test_a_schema_that_is_none_names_its_tool(sdk: openai.OpenAI) -> None:
    broken: Any = {"type": "object", "properties": {"a": {"type": "strin"}}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": broken}}
    fields = asked(messages=[USER], tools=[tool], tool_choice="required")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**fields)
    assert caught.value.param == "tools"
    assert "the schema of the tool 'f': Invalid type: strin" in str(caught.value)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(("text", "said"), [("pong", ("pong", [])), (CALL, ("", ["now"]))])
def test_a_choice_is_of_the_whole_answer_calls_included(
    sdk: openai.OpenAI, text: str, said: tuple[str, list[str]]
) -> None:
    """A form that is no JSON schema allows nothing else, also where tools are given."""
    choices = {"structured_outputs": {"choice": [text]}}
    answer = sdk.chat.completions.create(
        **asked(messages=[USER], tools=[WEATHER, NOW], extra_body=choices)
    ).choices[0]
    calls = [call.function.name for call in answer.message.tool_calls or ()]
    assert (answer.message.content or "", calls) == said


def test_a_request_sent_again_has_the_calls_of_the_first_and_their_parked_session(
    daemon: ChildDaemon, sdk: openai.OpenAI
) -> None:
    create = sdk.chat.completions.create
    more = asked(messages=[USER], tools=[WEATHER], tool_choice="required")
    more["extra_headers"] = {"Idempotency-Key": "calls of a key"}
    more["extra_body"] = {"batchengine": {"park": True}}
    first = create(**more).choices[0].message
    with create(**more, stream=True) as events:
        deltas = [choice.delta for event in events for choice in event.choices]
    streamed = [call.id for delta in deltas for call in delta.tool_calls or () if call.id]
    again = create(**more)
    message = again.choices[0].message
    ids = [call.id for call in message.tool_calls or ()]
    assert ids == streamed == [call.id for call in first.tool_calls or ()]
    assert messages_calls(daemon) == messages_calls(daemon)
    results: list[Any] = [{"role": "tool", "tool_call_id": one, "content": "sunny"} for one in ids]
    answered: Any = create(**asked(messages=[USER, message, *results], tools=[WEATHER]))
    parked: Any = again
    assert answered.batchengine["session_id"] == parked.batchengine["session_id"]


def messages_calls(daemon: ChildDaemon) -> list[str]:
    """Ids of the calls of an answer to Messages whose request has a key."""
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    body = {
        "messages": [USER], "max_tokens": 96, "tools": [tool], "tool_choice": {"type": "any"},
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Idempotency-Key": "calls of messages"}
    url, data = f"{daemon.url}/messages", json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as reply:
        content = json.load(reply)["content"]
    found = [block["id"] for block in content if block["type"] == "tool_use"]
    assert found
    return found
