"""Chat answers with reasoning and calls of tools: deltas, whole answers, resumed streams."""

from __future__ import annotations

import json
import time
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
from service.protocols.output import CallArguments, CallStart, OutputPart
from tests.support.fake_engine import FakeEngine, chat, post, serving

REPLY = (
    "<think>\nOne", " two", "\n</think>\n\nLet", " me see.\n\n", "<tool", "_call>\n{",
    '"name": "weather", "argu', 'ments": {"city"', ': "Paris"', "}}\n</tool", "_call>",
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "\n",
)  # fmt: skip
USER = {"role": "user", "content": "x"}
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
                function = call["function"]
                begun = [call["id"], function["name"], function["arguments"]]
                message["tool_calls"][call["index"]] = begun
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


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize("tokens", [6, 7])
def test_a_call_that_is_cut_before_its_arguments_is_not_shown(tokens: int, reason: str) -> None:
    ended = DoneEvent(reason, Usage(), "", stop_string="!" if reason == "stop" else "")
    choices = deltas_of(formatter_of(), [*TOKENS[:tokens], ended])
    assert message_of(choices) == MESSAGE | {"tool_calls": {}}
    assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [(8, "stop"), (9, "stop"), (10, "tool_calls"), (len(TOKENS), "tool_calls")],
)
def test_a_call_that_a_stop_string_cuts_off_is_none_to_run(tokens: int, reason: str) -> None:
    """A client runs the calls of an answer that ends with "tool_calls"."""
    ended = DoneEvent("stop", Usage(), "", stop_string="!")
    choices = deltas_of(formatter_of(), [*TOKENS[:tokens], ended])
    assert choices[-1]["finish_reason"] == reason


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


PATCH = (
    '<tool_call>\n{"name": "patch", "argum', 'ents": {"in', 'put": "say \\"', "h\\", 'u00e9\\"',
    '\\n"}}\n</tool_call>', '\n<tool_call>\n{"name": "weather", "arguments": {"a": ', "1}}\n",
    '</tool_call>\n<tool_call>\n{"name": "patch", "arguments": {"text": "x"}}', "\n</tool_call>",
)  # fmt: skip
PATCH_CALLS = {
    0: ("call_abn0", "custom", "patch", 'say "hé"\n'),
    1: ("call_abn1", "function", "weather", '{"a": 1}'),
    2: ("call_abn2", "custom", "patch", '{"text": "x"}'),
}


def typed_calls(choices: list[dict[str, Any]]) -> dict[int, tuple[str, str, str, str]]:
    """(id, type, name, text) of the calls that a client builds of its deltas."""
    found: dict[int, tuple[str, str, str, str]] = {}
    for call in (one for choice in choices for one in choice["delta"].get("tool_calls", ())):
        (kind,) = {"custom", "function"} & set(call)
        text = call[kind]["input" if kind == "custom" else "arguments"]
        if "id" in call:
            found[call["index"]] = call["id"], call["type"], call[kind]["name"], text
        else:
            call_id, begun, name, before = found[call["index"]]
            assert begun == kind
            found[call["index"]] = call_id, kind, name, before + text
    return found


@pytest.mark.parametrize("start", range(len(PATCH) + 1))
def test_calls_of_custom_tools_have_their_input(start: int) -> None:
    """In one stream, and in one that goes on where another was left."""
    first, again = formatter_of(echo=b'["patch"]'), formatter_of(echo=b'["patch"]')
    tokens = [TokenEvent(number, text) for number, text in enumerate(PATCH)]
    events = deltas_of(first, [*tokens[:start]])
    rest = deltas_of(again, [*map(SkippedEvent, PATCH[:start]), *tokens[start:], DONE])
    assert typed_calls(events + rest) == PATCH_CALLS
    assert rest[-1]["finish_reason"] == "tool_calls"


CUSTOM: Any = {"type": "custom", "custom": {"name": "patch", "description": "Edit."}}
LETTERS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+c"}}


async def test_a_custom_tool_is_a_function_to_the_model() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a"b'}}
    of_function = {"name": "patch", "arguments": '{"input":"a\\"b"}'}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    prompts: list[Any] = []
    for one in (call, {"id": "c1", "type": "function", "function": of_function}):
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [one]}]
        status, _, request = await asked(chat(messages=[*turns, result], tools=[CUSTOM, TOOL]))
        assert status == 200
        assert (request.echo, request.tool_call_ids) == ('["patch"]', ("c1",))
        prompts.append(request.prompt)
    assert prompts[0] == prompts[1]


async def test_whole_answers_with_calls_of_custom_tools() -> None:
    _, body, _ = await asked(chat(tools=[CUSTOM, TOOL]), PATCH)
    message = body["choices"][0]["message"]
    assert [call["type"] for call in message["tool_calls"]] == ["custom", "function", "custom"]
    assert message["tool_calls"][0]["custom"] == {"name": "patch", "input": 'say "hé"\n'}
    assert body["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}},
    ],
)  # fmt: skip
async def test_a_forced_custom_tool_follows_its_format(choice: Any) -> None:
    tool = {"type": "custom", "custom": CUSTOM["custom"] | {"format": LETTERS}}
    status, _, request = await asked(chat(tools=[TOOL, tool], tool_choice=choice))
    assert status == 200
    assert "[ab]+c" in request.constraint.text
    assert "weather" not in request.constraint.text


async def asked(body: dict[str, Any], reply: tuple[str, ...] = REPLY) -> tuple[int, Any, Any]:
    """(status, answer, request of the engine) of a chat."""
    async with (
        serving(FakeEngine(reply)) as served,
        aiohttp.ClientSession() as http,
        http.post(f"{served.base}/v1/chat/completions", json=body) as answer,
    ):
        found = await answer.json()
    made = served.engine.generations
    return answer.status, found, made[0].request if made else None


NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None), ("auto", None), ("none", "& ~/"), ("required", "start: answer"),
        (NAMED, "start: answer"), (ALLOWED, "head[suffix="),
    ],
)  # fmt: skip
async def test_tool_choices(choice: Any, expected: str | None) -> None:
    status, _, request = await asked(chat(tools=[TOOL], tool_choice=choice))
    assert status == 200
    constraint = request.constraint
    assert (constraint is None) == (expected is None)
    assert expected is None or expected in constraint.text
    assert request.output.calls == (choice != "none")
    _, _, plain = await asked(chat(tools=[TOOL]))
    assert request.prompt == plain.prompt, "the tools stay, so that the prefix is found again"


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("name", ["mcp.server/read-file", "github:search", "größe", "a" * 256])
async def test_names_of_tools_that_agents_send(name: str) -> None:
    """OpenAI's servers refuse them; parsers of answers read them."""
    reply = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    status, body, _ = await asked(chat(tools=[named(name)]), (reply,))
    assert status == 200
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, CUSTOM, TOOL]}, "tools[2].function.name"),
        ({"tools": [CUSTOM, CUSTOM]}, "tools[1].custom.name"),
        ({"tools": [TOOL, named("a b")]}, "tools[1].function.name"),
        ({"tools": [named("a>")]}, "tools[0].function.name"),
        ({"tools": [named("a" * 257)]}, "tools[0].function.name"),
        ({"functions": [{"name": "a"}, {"name": "a"}]}, "functions[1].name"),
        ({"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {}}}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "c"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_wrong_choices_and_formats(fields: dict[str, Any], param: str) -> None:
    status, body, _ = await asked(chat(**fields))
    assert status == 400, body
    assert body["error"]["param"] == param


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"guided_json": SCHEMA}, "response_format.not"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools.not"),
        ({}, None),
    ],
)
async def test_keywords_that_an_answer_may_break_are_named_in_a_header(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], named: str | None
) -> None:
    async def check(*_: object, **__: object) -> list[str]:
        return ["not"]

    engine = FakeEngine()
    monkeypatch.setattr(engine.text, "check", check)
    async with serving(engine) as served:
        status, _, headers = await post(served, "/v1/chat/completions?strict=1", chat(**fields))
    assert (status, headers.get("x-batchengine-ignored-fields")) == (200, named)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema", json.dumps(SCHEMA, separators=(",", ":")),
        ),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", '"properties"'),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes", 'n"o']}, "lark", 'start: "yes" | "n\\"o"'),
        ({"structured_outputs": {"choice": ["a"]}}, "lark", 'start: "a"'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)  # fmt: skip
async def test_formats(fields: dict[str, Any], kind: str | None, text: str) -> None:
    status, body, request = await asked(chat(**fields))
    assert status == 200, body
    if kind is None:
        assert request.constraint is None
        return
    assert request.constraint.kind == kind
    assert text in request.constraint.text


@pytest.mark.parametrize(
    ("forms", "param"),
    [
        ({"regex": "a", "choice": ["b"]}, "structured_outputs.choice"),
        ({"json_object": True, "structural_tag": "{}"}, "structured_outputs.structural_tag"),
        ({"structural_tag": "{}"}, "structured_outputs"),
        ({"regexp": "a"}, "structured_outputs"),
        ({"json": None, "json_object": False}, "structured_outputs"),
        ({}, "structured_outputs"),
    ],
)
async def test_structured_outputs_have_one_form_that_is_known(
    forms: dict[str, Any], param: str
) -> None:
    for path, body in (
        ("/v1/chat/completions", chat()), ("/v1/responses", {"input": "x"}),
        ("/v1/messages", chat(max_tokens=9)),
    ):  # fmt: skip
        async with serving() as served:
            status, found, _ = await post(served, path, {**body, "structured_outputs": forms})
            assert status == 400, found
            assert param in found["error"]["message"]
            only = {"regex": "a", "choice": None, "disable_any_whitespace": True}
            status, found, _ = await post(served, path, {**body, "structured_outputs": only})
            assert status == 200, found


async def test_gbnf_is_converted() -> None:
    status, body, request = await asked(chat(grammar='root ::= "a" [0-9]+\n'))
    assert status == 200, body
    assert request.constraint.text.startswith("start: ")
    status, body, _ = await asked(chat(grammar='root ::= "a'))
    assert (status, body["error"]["param"]) == (400, "grammar")


async def test_functions_of_the_older_form() -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "sunny"},
    ]
    body = chat(functions=[function], function_call={"name": "weather"}) | {"messages": history}
    status, found, request = await asked(body)
    assert status == 200, found
    assert request.constraint is not None
    choice = found["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "weather"
    assert request.tool_call_ids == ("f",)


async def test_an_answer_goes_on_with_the_last_message() -> None:
    said = {"role": "assistant", "content": "The sky is"}
    body = chat() | {"messages": [{"role": "user", "content": "x"}, said]}
    _, _, request = await asked(body)
    assert bytes(request.prompt).endswith(b"The sky is")
    _, _, request = await asked(body | {"add_generation_prompt": True})
    assert not bytes(request.prompt).endswith(b"The sky is")
    _, _, request = await asked(body | {"continue_final_message": False})
    assert not bytes(request.prompt).endswith(b"The sky is")
    more = {"continue_final_message": True, "add_generation_prompt": True}
    _, _, request = await asked(body | more)
    assert bytes(request.prompt).endswith(b"The sky is")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    for last in ({"role": "user", "content": "y"}, call):
        wrong = {**body, "messages": [*body["messages"][:1], last], "continue_final_message": True}
        async with serving() as served:
            status, found, _ = await post(served, "/v1/chat/completions", wrong)
        assert (status, found["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"guided_regex": "[0-9]+"}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {}}, "max_tokens": 9}),
    ],
)
async def test_an_answer_that_goes_on_with_a_message_has_no_form(
    path: str, fields: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": '{"a": '}
    async with serving() as served:
        body = {"messages": [USER, said], **fields}
        status, found, _ = await post(served, path, body)
        assert status == 400
        assert "cannot go on with a message of the assistant" in found["error"]["message"]
        status, found, _ = await post(served, path, body | {"messages": [USER, said, USER]})
        assert status == 200, found


async def test_a_client_may_predict_the_text_of_the_answer() -> None:
    parts = [{"type": "text", "text": "def f():"}, {"type": "text", "text": "  x"}]
    for content in ("def f():\n  x", parts):
        _, _, request = await asked(chat(prediction={"type": "content", "content": content}))
        assert bytes(request.predicted) == b"def f():\n  x"
    _, _, request = await asked(chat())
    assert request.predicted == ()
    wrong = (
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 4}, "prediction.content"),
        ("x", "prediction"),
        ({"type": "content", "content": "x" * 900_000}, "prediction"),
    )
    async with serving() as served:
        for prediction, param in wrong:
            body = chat(prediction=prediction)
            status, found, _ = await post(served, "/v1/chat/completions", body)
            assert (status, found["error"]["param"]) == (400, param), found


async def test_a_prompt_may_end_without_the_beginning_of_an_answer() -> None:
    said = {"role": "assistant", "content": "The sky is"}
    whole = {"add_generation_prompt": False, "continue_final_message": False}
    async with serving() as served:
        for messages, more, is_open in (
            ([USER], {}, True), ([USER], {"add_generation_prompt": False}, False),
            ([USER, said], whole, False), ([USER, said], {"add_generation_prompt": False}, True),
        ):  # fmt: skip
            body = chat() | {"messages": messages} | more
            status, _, _ = await post(served, "/apply-template", body)
            assert status == 200
            _, _, variables = served.engine.text.chats[-1]
            assert variables.get("add_generation_prompt", True) is is_open, (messages, more)


def test_what_one_token_shows_is_one_chunk() -> None:
    """Its id says that the reader has the token: a reader that goes on there lacks none of it."""
    text = 'Hm.<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    text += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    formatter = formatter_of()
    chunks = formatter.token(0, TokenEvent(1, text))
    assert len(chunks) == 1
    message = message_of(json.loads(chunks[0].data)["choices"])
    assert message["content"] == "Hm."
    assert list(message["tool_calls"].values()) == [
        ["call_abn0", "weather", '{"city": "Paris"}'], ["call_abn1", "now", "{}"],
    ]  # fmt: skip


async def test_a_message_of_the_assistant_alone_is_refused() -> None:
    """Templates ask for the first message, and there would be none to go on behind."""
    alone = {**chat(), "messages": [{"role": "assistant", "content": "Once"}]}
    status, found, request = await asked(alone)
    assert (status, found["error"]["code"], request) == (400, "invalid_messages", None)


async def test_no_effort_is_no_thinking() -> None:
    async with (
        serving() as served,
        aiohttp.ClientSession() as http,
        http.post(f"{served.base}/v1/chat/completions", json=chat(reasoning_effort="none")),
    ):
        assert served.engine.text.chats[0][2]["enable_thinking"] is False


async def test_limits_and_penalties_by_other_names() -> None:
    _, _, request = await asked(chat(max_tokens=-1, repeat_penalty=1.5))
    assert request.tokens_max > 1
    assert request.sampling.repetition_penalty == 1.5
    _, _, request = await asked(chat(n_predict=3))
    assert request.tokens_max == 3


def test_an_answer_of_many_calls_costs_time_in_proportion() -> None:
    """It is made on the event loop."""
    formatter = formatter_of()
    answer, parts = formatter.answers[0], list[OutputPart]()
    for call in range(5000):
        parts += [CallStart(call, "f"), CallArguments(call, "{"), CallArguments(call, "}")]
    answer.parts, answer.calls, answer.finish_reason = parts, 5000, "stop"
    began = time.process_time()
    (choice,) = json.loads(b"".join(formatter.whole()))["choices"]
    assert time.process_time() - began < 1.0
    calls = choice["message"]["tool_calls"]
    assert {one["function"]["arguments"] for one in calls} == {"{}"}
    assert len({one["id"] for one in calls}) == 5000
