"""OpenAI Responses: input items, tools, and events whose sum is the whole object."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._models import construct_type
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ParsedResponse, ResponseStreamEvent

from batchengine import errors
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    GenerationRequest,
    Kind,
    SkippedEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from service.protocols import requests
from service.protocols.formatter import SseEvent
from service.protocols.output import CallArguments, CallStart, OutputPart, Reasoning, Text
from service.protocols.protocol import PromptLimits
from service.protocols.responses import items, responses, tools
from service.protocols.responses.formatter import Echo, ResponsesFormatter
from service.protocols.responses.responses import RESPONSES, ResponsesRequest
from service.protocols.responses.tools import ToolNames
from tests.support.fake_engine import FakeEngine, post, serving


@pytest.fixture(scope="module", autouse=True)
def second() -> Iterator[None]:
    """All responses end in one second, since whole objects are compared."""
    with mock.patch("service.protocols.responses.formatter.time", SimpleNamespace(time=lambda: 9)):
        yield


NAMES = ToolNames({"agents.spawn": ("agents", "spawn")}, ("patch",))


PLAIN = Echo()


def job_of(echo: Echo = PLAIN) -> requests.HttpJob:
    asked = GenerationRequest("req_00ff", (1, 2), 4)
    job = requests.HttpJob(
        asked=asked, model="m", created=7, stream=True, include_usage=False, route="cpu", seed=1,
        requests=[asked],
    )  # fmt: skip
    job.echo = json.dumps(
        {"names": {"namespaces": echo.names.namespaces, "custom": echo.names.custom},
         "encrypts": echo.encrypts, "summarises": echo.summarises,
         "fields": {"store": True, "tools": []}}
    ).encode()  # fmt: skip
    return job


class Scripted:
    """A parser whose parts are given: one list per text."""

    def __init__(self, script: Sequence[list[OutputPart]]) -> None:
        self.script = list(script)

    def push(self, text: str) -> list[OutputPart]:
        return self.script.pop(0) if self.script and text else []

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        return [part for parts in self.script for part in parts]


def streamed(
    script: Sequence[list[OutputPart]],
    reason: str = "stop",
    *,
    held: int = 0,
    noops: bool = False,
    summarises: bool = False,
) -> list[dict[str, Any]]:
    """The events of an answer; the last `held` lists of parts come at its end."""
    made = ResponsesFormatter(job_of(Echo(names=NAMES, encrypts=True, summarises=summarises)))
    made.answers[0].parser = Scripted(script)
    events = made.opening()
    for _ in range(len(script) - held):
        events += made.token(0, TokenEvent(1, "x"))
        events += made.noop() if noops else []
    events += made.finish(0, DoneEvent(reason, Usage(3, 1, len(script))))
    assert made.is_done
    assert all(event.name == json.loads(event.data)["type"] for event in events)
    return [json.loads(event.data) for event in events]


def whole(script: Sequence[list[OutputPart]], reason: str = "stop") -> dict[str, Any]:
    made = ResponsesFormatter(job_of(Echo(names=NAMES, encrypts=True)))
    made.answers[0].parser = Scripted(script)
    for _ in script:
        made.collect(0, TokenEvent(1, "x"))
    made.collect(0, DoneEvent(reason, Usage(3, 1, len(script))))
    return json.loads(b"".join(made.whole()))


def sdk_final(events: list[dict[str, Any]]) -> tuple[ParsedResponse[Any], list[dict[str, Any]]]:
    """What the SDK returns at the end, and the items that it summed up from the events before."""
    state: ResponseStreamState[Any] = ResponseStreamState(
        input_tools=openai.omit, text_format=openai.omit
    )
    for event in events:
        state.handle_event(cast("Any", construct_type(type_=ResponseStreamEvent, value=event)))
    snapshot = cast("Any", state)._ResponseStreamState__current_snapshot
    final = state._completed_response
    assert final is not None
    return final, [item.to_dict() for item in snapshot.output]


part_lists = st.lists(
    st.lists(
        st.one_of(
            st.builds(Text, st.text(min_size=1, max_size=4)),
            st.builds(Reasoning, st.text(min_size=1, max_size=4)),
            st.builds(
                lambda name, json: [CallStart(0, name), CallArguments(0, json)],
                st.sampled_from(["ls", "agents.spawn", "patch"]),
                st.sampled_from(['{"input":"a\\nb"}', "{}", '{"b":1}']),
            ),
        ),
        max_size=3,
    ),
    max_size=6,
)


def flat(lists: list[list[Any]]) -> list[list[OutputPart]]:
    """The lists with the parts of each call in their places."""
    return [
        [part for one in parts for part in (one if isinstance(one, list) else [one])]
        for parts in lists
    ]


@settings(deadline=None)  # the first call of the SDK builds its models
@given(part_lists, st.sampled_from(["stop", "length"]), st.integers(0, 3), st.booleans())
def test_events_add_up_to_the_whole_object(
    lists: list[list[Any]], reason: str, held: int, noops: bool
) -> None:
    script = flat(lists)
    events = streamed(script, reason, held=min(held, len(script)), noops=noops)
    expected = whole(script, reason)
    last = events[-1]["response"]
    for name in ("output", "status", "incomplete_details", "usage", "id"):
        if name != "usage" or held == 0:
            assert last[name] == expected[name], name
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(numbers)
    assert noops or numbers == list(range(len(numbers)))
    if reason == "stop":
        final, summed = sdk_final(events)
        assert [item.type for item in final.output] == [item["type"] for item in last["output"]]
        text = "".join(part.text for parts in script for part in parts if isinstance(part, Text))
        assert final.output_text == text
        for one, shown in zip(last["output"], summed, strict=True):
            assert one["id"] == shown["id"]
            if one["type"] == "message":
                assert one["content"][0]["text"] == shown["content"][0]["text"]
            if one["type"] == "function_call":
                assert one["arguments"] == shown["arguments"]


def test_events_come_in_the_documented_order() -> None:
    events = streamed(
        [[Reasoning("hm")], [Text("a"), Text("b")], [CallStart(0, "ls"), CallArguments(0, "{}")]]
    )
    assert [(e["type"].removeprefix("response."), e.get("output_index")) for e in events] == [
        ("created", None), ("in_progress", None),
        ("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0),
        ("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1),
        ("output_text.delta", 1), ("output_text.done", 1), ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2), ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2), ("output_item.done", 2),
        ("completed", None),
    ]  # fmt: skip
    usage = events[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 1}
    assert usage["input_tokens_details"]["cached_tokens"] == 1


def test_reasoning_is_its_summary_for_clients_that_ask_for_one() -> None:
    """Most clients show summaries alone."""
    script: list[list[OutputPart]] = [[Reasoning("h")], [Reasoning("m"), Text("a")]]
    events = streamed(script, summarises=True)
    names = ("output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
             "reasoning_summary_text.delta", "reasoning_summary_text.done",
             "reasoning_summary_part.done", "output_item.done")  # fmt: skip
    shown = [event for event in events if event.get("output_index") == 0]
    assert [event["type"] for event in shown] == [f"response.{name}" for name in names]
    assert all(event["summary_index"] == 0 for event in shown[1:-1])
    assert [shown[2]["delta"], shown[3]["delta"], shown[4]["text"]] == ["h", "m", "hm"]
    final, summed = sdk_final(events)
    item = final.output[0].to_dict()
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in item
    assert summed[0]["id"] == item["id"]
    (message,), _ = items.messages([item, summed[1]], None)
    assert (message["reasoning_content"], message["content"]) == ("hm", "a")


def test_calls_have_the_names_of_the_request() -> None:
    output = whole(
        [
            [CallStart(0, "agents.spawn"), CallArguments(0, "{}")],
            [CallStart(1, "patch"), CallArguments(1, '{"input":"*** Begin')],
            [CallArguments(1, '\\n"}'), CallStart(2, "ls"), CallArguments(2, '{"a":1}')],
        ]
    )["output"]
    assert [(one["type"], one["name"], one.get("namespace")) for one in output] == [
        ("function_call", "spawn", "agents"),
        ("custom_tool_call", "patch", None),
        ("function_call", "ls", None),
    ]
    assert output[1]["input"] == "*** Begin\n"
    assert output[2]["arguments"] == '{"a":1}'
    assert len({one["call_id"] for one in output} | {one["id"] for one in output}) == 6


def test_a_failure_ends_the_open_item_and_says_what_clients_retry() -> None:
    made = ResponsesFormatter(job_of())
    made.opening()
    made.token(0, TokenEvent(1, "a"))
    events = [
        json.loads(event.data) for event in made.failure(errors.STEP_MISMATCH(what="digests"))
    ]
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_a_daemon_that_stops_fails_the_response() -> None:
    last = streamed([[Text("a")]], "shutdown")[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_logprobs_of_a_whole_answer_are_those_of_its_text() -> None:
    made = ResponsesFormatter(job_of())
    made.answers[0].parser = Scripted([[Reasoning("h")], [], [Text("ab")], [Text("c")]])
    for number in range(4):
        made.collect(0, TokenEvent(number, "x", TokenLogprob(number, b"%d" % number, -0.5)))
    made.collect(0, DoneEvent("stop", Usage()))
    part = json.loads(b"".join(made.whole()))["output"][1]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["2", "3"]


def test_logprobs_of_a_stream_are_those_of_the_whole_answer() -> None:
    made = ResponsesFormatter(job_of())
    made.answers[0].parser = Scripted([[Reasoning("h")], [], [Text("ab")], [], [Text("c")], []])
    made.opening()
    events = list[SseEvent]()
    for number in range(6):
        logprob = TokenLogprob(number, b"%d" % number, -0.5)
        events += made.token(0, TokenEvent(number, "x", logprob))
    events += made.finish(0, DoneEvent("stop", Usage()))
    found = [json.loads(event.data) for event in events]

    def tokens(logprobs: list[Any]) -> list[str]:
        return [one["token"] for one in logprobs]

    deltas = [tokens(e["logprobs"]) for e in found if e["type"].endswith("output_text.delta")]
    assert deltas == [["2"], ["3", "4"]]
    by_kind = {event["type"]: event for event in found}
    for part in (
        by_kind["response.output_text.done"],
        by_kind["response.content_part.done"]["part"],
        by_kind["response.completed"]["response"]["output"][1]["content"][0],
    ):
        assert tokens(part["logprobs"]) == ["2", "3", "4", "5"]


# ---- input ----


def test_items_of_one_answer_are_one_message() -> None:
    made, passed = items.messages(
        [
            {"type": "message", "role": "developer", "content": [text("rules")]},
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "a", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents",
             "arguments": "{}"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {"type": "function_call_output", "call_id": "c2", "output": [text("y"), text("z")]},
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "p"},
        ],
        "be brief",
    )  # fmt: skip
    assert passed == ["input.web_search_call"]
    assert [message["role"] for message in made] == [
        "system", "system", "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    answer = made[3]
    assert (answer["content"], answer["reasoning_content"]) == ("a", "hm")
    assert [one["function"]["name"] for one in answer["tool_calls"]] == ["ls", "agents.spawn"]
    assert made[5] == {"role": "tool", "tool_call_id": "c2", "content": "y\nz"}
    assert made[6]["tool_calls"][0]["function"]["arguments"] == '{"input":"p"}'


def test_calls_of_tools_that_a_provider_ran_are_left_out_whatever_they_are() -> None:
    """A conversation goes on here that began elsewhere, or in a newer client."""
    made, passed = items.messages(
        [
            {"type": None, "role": "user", "content": "hi"},
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "c", "output": "x"},
            {"type": "mcp_approval_request", "id": "m"},
            {"type": "x" * 90 + "_call"},
        ],
        None,
    )
    assert made == [{"role": "user", "content": "hi"}]
    assert passed == [
        "input.local_shell_call",
        "input.local_shell_call_output",
        "input.mcp_approval_request",
        "input." + "x" * 64,
    ]


def test_summaries_that_a_provider_wrote_are_left_out_and_named() -> None:
    """Codex sends one in each turn of a conversation that was compacted elsewhere."""
    kinds = ["compaction", "compaction_summary", "context_compaction"]
    summaries = [{"type": kind, "encrypted_content": "x"} for kind in kinds]
    made, passed = items.messages([*summaries, {"role": "user", "content": "hi"}], None)
    assert made == [{"role": "user", "content": "hi"}]
    assert passed == [f"input.{kind}" for kind in kinds]


def test_notes_and_messages_between_agents_end_no_conversation_that_began_elsewhere() -> None:
    sealed = {"type": "encrypted_content", "encrypted_content": "x"}
    said = {"type": "agent_message", "author": "a", "recipient": "b"}
    made, passed = items.messages(
        [
            {"type": "additional_tools", "role": "developer", "tools": []},
            {"type": "program", "call_id": "c", "code": "x"},
            {"type": "configuration_update"},
            said | {"content": [{"type": "input_text", "text": "Look."}, sealed]},
            said | {"content": [sealed]},
            {"role": "user", "content": "hi"},
        ],
        None,
    )
    assert made == [{"role": "user", "content": "Look."}, {"role": "user", "content": "hi"}]
    kinds = ("additional_tools", "program", "configuration_update", "agent_message")
    assert passed == [f"input.{kind}" for kind in kinds]
    with pytest.raises(BatchEngineError, match="not a text part"):
        items.messages([said | {"content": [{"type": "input_image"}]}], None)
    with pytest.raises(BatchEngineError, match="neither text nor a list"):
        items.messages([said], None)


def test_a_request_for_a_summary_is_refused() -> None:
    """The client waits for an item that nothing here writes."""
    asked = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    with pytest.raises(BatchEngineError, match="does not summarise") as caught:
        items.messages(asked, None)
    assert (caught.value.param, caught.value.kind) == ("input[1]", Kind.INVALID)


def test_tools_of_unknown_types_are_left_out_and_named() -> None:
    plain = {"type": "function", "name": "f"}
    made, _, left_out = tools.functions([{"type": "tool_of_2027"}, plain])
    assert ([one["function"]["name"] for one in made], left_out) == (["f"], ["tools.tool_of_2027"])
    listed = [{"type": "tool_of_2027"}, plain]
    choice = tools.tool_choice({"type": "allowed_tools", "tools": listed}, made, None)
    assert choice.names == ("f",)
    with pytest.raises(BatchEngineError, match="a function, a custom tool"):
        tools.functions([{"name": "f"}])


def text(value: str) -> dict[str, str]:
    return {"type": "input_text", "text": value}


def test_reasoning_comes_back_from_what_was_encrypted() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": items.encrypted("höm")}
    assert items.messages([sealed], None)[0][0]["reasoning_content"] == "höm"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}
    assert items.messages([foreign], None)[0][0]["reasoning_content"] == ""


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("x", "input[0]"),
        ({"type": "message", "role": "robot", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": 7}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
         "input[0].content[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"type": "function_call", "call_id": "c", "name": "x"}, "input[0].arguments"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "reasoning", "encrypted_content": "be1:??"}, "input[0].encrypted_content"),
        ({"type": ["x"]}, "input[0].type"),
    ],
)  # fmt: skip
def test_items_that_cannot_be_read_are_named(item: Any, param: str) -> None:
    with pytest.raises(BatchEngineError) as caught:
        items.messages([item], None)
    assert caught.value.param == param


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["type", "role", "content", "text", "output", "name", "arguments", "call_id",
                     "namespace", "input", "tools", "mode", "summary", "encrypted_content"]
                ),
                inner | st.sampled_from(
                    ["message", "user", "input_text", "function", "namespace", "custom",
                     "reasoning", "function_call_output", "function_call", "allowed_tools"]
                ),
                max_size=5,
            )
        ),
    )
)  # fmt: skip
def test_hostile_values_are_refused_with_an_error_of_the_catalogue(value: Any) -> None:
    for attempt in (
        lambda: items.messages([value], None),
        lambda: tools.functions([value] if isinstance(value, dict) else []),
        lambda: tools.tool_choice(value if isinstance(value, dict | str) else None, [], None),
    ):
        with contextlib.suppress(BatchEngineError):
            attempt()


def test_namespaces_and_custom_tools_are_functions() -> None:
    made, names, left_out = tools.functions(
        [
            {"type": "function", "name": "ls", "description": "d", "strict": False},
            {"type": "namespace", "name": "agents", "tools": [
                {"type": "function", "name": "spawn", "parameters": {}}]},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "web_search", "external_web_access": True},
        ]
    )  # fmt: skip
    assert [one["function"]["name"] for one in made] == ["ls", "agents.spawn", "patch"]
    assert names == NAMES
    assert left_out == ["tools.web_search"]
    choice = tools.tool_choice(
        {"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "ls"},
            {"type": "function", "name": "spawn", "namespace": "agents"}]},
        made, False,
    )  # fmt: skip
    assert (choice.mode, choice.names, choice.parallel) == (
        "required",
        ("ls", "agents.spawn"),
        False,
    )
    assert tools.tool_choice({"type": "custom", "name": "patch"}, made, None).names == ("patch",)
    with pytest.raises(BatchEngineError):
        tools.tool_choice({"type": "function", "name": "rm"}, made, None)
    with pytest.raises(BatchEngineError):
        tools.tool_choice("required", [], None)


def test_large_fields_are_not_repeated() -> None:
    small = ResponsesRequest(input="x", instructions="be brief")
    assert responses.repeated(small)["instructions"] == "be brief"
    large = ResponsesRequest(input="x", instructions="b" * responses.ECHO_BYTES_MAX)
    assert responses.repeated(large)["instructions"] is None


# ---- over HTTP ----


async def test_the_sdk_reads_a_response_and_its_stream() -> None:
    async with serving() as served:

        def run() -> tuple[Any, Any]:
            with openai.OpenAI(base_url=served.base + "/v1", api_key="x") as client:
                one = client.responses.create(
                    model="tiny",
                    input="hi",
                    instructions="be brief",
                    metadata={"a": "b"},
                    store=False,
                )
                counted = client.responses.input_tokens.count(model="tiny", input="hi")
                assert counted.input_tokens == len(b"user: hi\n")
                with client.responses.stream(model="tiny", input="hi", store=False) as stream:
                    return one, stream.get_final_response()

        one, other = await asyncio.to_thread(run)
        assert one.output_text == other.output_text == "Hello wörld"
        assert (one.status, one.instructions, one.metadata) == ("completed", "be brief", {"a": "b"})
        assert one.usage.input_tokens == len(b"system: be brief\nuser: hi\n")
        assert one.model == "tiny"


async def test_errors_are_objects_and_a_stream_that_fails_ends_with_response_failed() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    async with serving(engine) as served:
        status, body, _ = await post(served, "/v1/responses", {"input": [{"type": "x"}]})
        assert (status, body["error"]["param"]) == (400, "input[0].type")
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                served.base + "/v1/responses", json={"input": "x", "stream": True}
            ) as reply,
        ):
            blocks = (await reply.read()).decode().strip().split("\n\n")
        assert blocks[-1].startswith("event: response.failed\n")
        assert blocks[0].startswith("event: response.created\ndata: ")


AGENTS = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "ls"}]}
LS = {"type": "function", "name": "ls"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": ["message.output_text.logprobs", "reasoning"]}, "include[1]"),
        ({"tools": [LS, AGENTS, {"type": "web_search"}, LS]}, "tools[3].name"),
        ({"tools": [LS, AGENTS, AGENTS]}, "tools[2].tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a\nb"}]}, "tools[0].name"),
    ],
)
async def test_values_that_say_nothing_are_refused(fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        status, body, _ = await post(served, "/v1/responses", {"input": "x"} | fields)
        assert (status, body["error"]["param"]) == (400, param)
        good = {"input": "x", "tools": [LS, AGENTS], "include": ["web_search_call.results"]}
        status, _, headers = await post(served, "/v1/responses", good)
        assert status == 200
        assert headers["x-batchengine-ignored-fields"] == "include.web_search_call.results"


@pytest.mark.parametrize("stream", [False, True])
async def test_warming_computes_the_prompt_outside_every_session(stream: bool) -> None:
    options = {
        "prewarm": True,
        "ttl": "12h",
        "comparison_response_id": "resp_1",
        "mode": "explicit",
    }
    async with serving() as served:

        def run() -> Any:
            with openai.OpenAI(base_url=served.base + "/v1", api_key="x") as client:
                made = client.responses.create(
                    model="tiny",
                    input="hi",
                    stream=stream,
                    extra_body={"prompt_cache_options": options, "conversation": "c"},
                )
                if not stream:
                    return made
                *others, last = list(made)
                kinds = {event.type for event in others}
                assert kinds == {"response.created", "response.in_progress"}
                return last.response

        answer = await asyncio.to_thread(run)
        asked = served.engine.generations[-1].request
        assert (asked.session_id, asked.tokens_max, asked.append) == (None, 1, ())
    assert (answer.status, answer.output, answer.store) == ("completed", [], False)
    assert (answer.usage.output_tokens, answer.usage.input_tokens) == (0, len(b"user: hi\n"))


async def test_marks_of_the_prompts_cache_are_read_over() -> None:
    mark = {"text": "hi", "prompt_cache_breakpoint": {"ttl": "30m"}}
    options = {"mode": "explicit", "ttl": "30m"}
    async with serving() as served:
        for route, body in (
            ("/v1/responses", {"input": [
                {"role": "user", "content": [{"type": "input_text", **mark}]}]}),
            ("/v1/chat/completions", {"messages": [
                {"role": "user", "content": [{"type": "text", **mark}]}]}),
        ):  # fmt: skip
            body = {**body, "prompt_cache_options": options}
            status, answer, _ = await post(served, route + "?strict=1", body)
            assert status == 200, answer
        body["prompt_cache_options"] = {"prewarm": True}
        assert (await post(served, "/v1/chat/completions?strict=1", body))[0] == 400


async def test_what_is_ignored_is_counted_and_refused_where_asked() -> None:
    body: dict[str, Any] = {
        "input": "x", "tools": [{"type": "web_search"}], "truncation": "auto", "include": [],
        "text": {"verbosity": "low"}, "reasoning": {"summary": "auto", "effort": "low"},
    }  # fmt: skip
    async with serving() as served:
        assert (await post(served, "/v1/responses", body))[0] == 200
        status, answer, _ = await post(served, "/v1/responses?strict=1", body)
        assert (status, answer["error"]["param"]) == (400, "truncation")
        kwargs = served.engine.text.chats[0][2]
        assert kwargs == {"reasoning_effort": "low"}
        assert served.engine.text.chats[0][1] is None
        await post(served, "/v1/responses", {"input": "x", "reasoning": {"effort": "none"}})
        kwargs = served.engine.text.chats[-1][2]
        assert kwargs == {"reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "truncation": "some"}, "truncation"),
        ({"input": "x", "background": True, "store": False}, "store"),
        ({"input": "x", "conversation": {}}, "conversation"),
        ({"input": "x", "previous_response_id": ""}, "previous_response_id"),
        ({"input": "x", "reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"input": "x", "conversation": "c", "previous_response_id": "r"}, "previous_response_id"),
        ({"previous_response_id": "resp_1"}, "input"),
        ({}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input"),
        ({"input": "x", "reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ],
)
def test_fields_that_cannot_be_honoured_are_refused(fields: dict[str, Any], param: str) -> None:
    class Nothing:
        def encode(self, text: str, *, special: bool) -> list[int]:
            return [1]

        def encode_chat(self, messages: Any, tools: Any, kwargs: Any) -> list[int]:
            return [1]

    body, _ = RESPONSES.parse(json.dumps(fields).encode())

    def read() -> None:
        RESPONSES.check(body)
        RESPONSES.read_prompt(body, Nothing(), PromptLimits(64, 9, 9))

    with pytest.raises(BatchEngineError) as caught:
        read()
    assert caught.value.param == param


@given(part_lists, st.integers(0, 6))
def test_a_resumed_stream_goes_on_with_the_same_events(lists: list[list[Any]], known: int) -> None:
    script = flat(lists)
    known = min(known, len(script))
    made = ResponsesFormatter(job_of(Echo(names=NAMES, encrypts=True)))
    made.answers[0].parser = Scripted(script)
    made.opening()
    for _ in range(known):
        made.skip(0, SkippedEvent("x"))
    events: list[Any] = []
    for _ in range(len(script) - known):
        events += made.token(0, TokenEvent(1, "x"))
    events += made.finish(0, DoneEvent("stop", Usage(3, 1, len(script))))
    shown = [json.loads(event.data) for event in events]
    assert shown == streamed(script)[len(streamed(script)) - len(shown) :]


def test_the_input_of_a_custom_tool_is_streamed() -> None:
    script: list[list[OutputPart]] = [
        [CallStart(0, "patch"), CallArguments(0, '{"input": "*** Be')],
        [CallArguments(0, "gin\\")],
        [CallArguments(0, 'n"}')],
        [CallStart(1, "patch"), CallArguments(1, "begin")],
    ]
    events = streamed(script)
    deltas = [(e["output_index"], e["delta"]) for e in events if e["type"].endswith("input.delta")]
    assert deltas == [(0, "*** Be"), (0, "gin"), (0, "\n"), (1, "begin")]
    assert [one["input"] for one in events[-1]["response"]["output"]] == ["*** Begin\n", "begin"]
