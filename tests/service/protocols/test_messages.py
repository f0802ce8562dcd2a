"""The Messages route: bodies of real shape become conversations; errors in Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint, Kind
from service.protocols import strict_json
from service.protocols.messages import edits as edits_module
from service.protocols.messages.blocks import conversation_of
from service.protocols.messages.body import MessagesRequest
from service.protocols.messages.signatures import HiddenReasoning
from service.protocols.schema import read_request
from tests.support.fake_engine import MODEL_ID, FakeEngine, fake_config, post, serving

ROUTE = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}
TOOL = {"name": "Bash", "description": "Runs a command.", "input_schema": {"type": "object"}}
LATER = {**TOOL, "name": "Fetch", "defer_loading": True}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def body_of(**fields: Any) -> MessagesRequest:
    fields = {"messages": [user(text("hi"))], **fields}
    data = json.dumps(fields).encode()
    return read_request(MessagesRequest, strict_json.parse_object(data))[0]


def agent_body(*messages: Any, tools: Any = (TOOL, LATER), **more: Any) -> dict[str, Any]:
    """A body of the shape that Claude Code sends."""
    mark = {"type": "ephemeral"}
    return {
        "model": MODEL_ID,
        "system": [
            text("x-anthropic-billing-header: cc_version=9.9.9.abc; cc_entrypoint=cli;"),
            text("You are an agent.", cache_control=mark),
            text("\nWork with care.", cache_control=mark),
        ],
        "messages": [
            user(text("<hint>\nNote.\n</hint>"), text("List the files.")),
            {"role": "system", "content": [text("# Environment\nlinux", cache_control=mark)]},
            *messages,
        ],
        "tools": list(tools),
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s-1"})},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


def hidden(value: str) -> str:
    made = HiddenReasoning()
    made.push(value)
    return made.signature()


def test_an_agents_body_becomes_a_conversation() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    messages = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": hidden("I look.")},
            {"type": "redacted_thinking", "data": "xyz"}, text("Yes."), call,
        ]},
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("a"), text("b")]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no", "is_error": True},
            text("And now?"),
        ),
    ]  # fmt: skip
    made = conversation_of(body_of(**agent_body(*messages)))
    assert made.messages == [
        {"role": "system", "content": "You are an agent.\n\nWork with care."},
        {"role": "user", "content": "<hint>\nNote.\n</hint>\nList the files."},
        {"role": "system", "content": "# Environment\nlinux"},
        {
            "role": "assistant", "content": "Yes.", "reasoning_content": "I look.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function":
                            {"name": "Bash", "arguments": {"command": "ls"}}}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in made.tools] == ["Bash"]
    assert made.template == {"enable_thinking": True, "reasoning_effort": "high"}
    assert not made.continues


def test_a_deferred_tool_stands_where_it_is_referred_to() -> None:
    """And the messages before it are as they were without it."""
    found = {"type": "tool_result", "tool_use_id": "toolu_1",
             "content": [{"type": "tool_reference", "tool_name": "Fetch"}]}  # fmt: skip
    before = conversation_of(body_of(**agent_body(tools=[TOOL])))
    made = conversation_of(body_of(**agent_body(user(found), user(found), tools=[LATER, TOOL])))
    assert made.tools == before.tools
    assert made.messages[: len(before.messages)] == before.messages
    first, second = made.messages[len(before.messages) :]
    assert '"name": "Fetch"' in first["content"]
    assert "input_schema" not in first["content"]
    assert second["content"].endswith("\nFetch")  # defined once
    assert [tool["function"]["name"] for tool in made.inline_tools] == ["Fetch"]
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": LATER}}
    gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Bash"}}
    change = {"role": "system", "content": [added, gone]}
    made = conversation_of(body_of(**agent_body(change, tools=[TOOL])))
    assert '"Fetch"' in made.messages[-1]["content"]
    assert made.messages[-1]["content"].endswith("any more: Bash")


def test_system_messages_for_one_turn_are_left_out_later() -> None:
    note = {"role": "system", "content": "Be quick.", "clear_at": "next_user_message"}
    assert "Be quick." in str(conversation_of(body_of(messages=[user(text("a")), note])).messages)
    later = body_of(messages=[user(text("a")), note, user(text("b"))])
    assert "Be quick." not in str(conversation_of(later).messages)


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ({"type": "auto"}, "auto", ()),
        ({"type": "none"}, "none", ()),
        ({"type": "any"}, "required", ()),
        ({"type": "tool", "name": "Bash"}, "required", ("Bash",)),
    ],
)
def test_tool_choices(choice: dict[str, Any], mode: str, names: tuple[str, ...]) -> None:
    asked = {**choice, "disable_parallel_tool_use": True}
    made = conversation_of(body_of(tools=[TOOL], tool_choice=asked)).tool_choice
    assert (made.mode, made.names, made.parallel) == (mode, names, False)


def test_a_format_becomes_a_constraint() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        made = conversation_of(body_of(**fields)).response
        assert made == Constraint("json_schema", '{"type": "object"}')
    other = conversation_of(body_of(structured_outputs={"choice": ["a", "b"]})).response
    assert other == Constraint("lark", 'start: "a" | "b"\n')


def test_readable_documents_are_text() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}}
    result = {"type": "search_result", "source": "u", "title": "S", "content": [text("hit")]}
    parts = {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}
    made = conversation_of(body_of(messages=[user(document, result, parts)]))
    assert made.messages == [{"role": "user", "content": "T\nbody\nS\nu\nhit\na\nb"}]


def test_blocks_of_tools_that_a_provider_ran_are_left_out_and_named() -> None:
    """A conversation goes on here that began with another provider."""
    said = [
        {"type": "compaction", "content": "what came before"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        text("done"),
    ]
    talk = [user(text("hi")), {"role": "assistant", "content": said}, user(text("go on"))]
    made = conversation_of(body_of(messages=talk))
    assert made.messages[1] == {"role": "assistant", "content": "what came before\ndone"}
    assert made.unread == (
        "messages.server_tool_use",
        "messages.web_search_tool_result",
        "messages.mcp_tool_use",
        "messages.mcp_tool_result",
        "messages.fallback",
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "document", "source": {"type": "base64"}})]},
         "messages.0.content.0.type"),
        ({"messages": [user({"type": "tool_result", "tool_use_id": "t",
                             "content": [{"type": "x"}]})]},
         "messages.0.content.0.content.0.type"),
        ({"messages": [user("a")]}, "messages.0.content.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user({"type": "tool_result", "content": "x"})]},
         "messages.0.content.0.tool_use_id"),
        ({"messages": []}, "messages"),
        ({"tools": [{"name": "x"}]}, "tools.0"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "y"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"output_config": {"effort": "lots"}}, "output_config.effort"),
        ({"context_management": {"edits": [{"keep": "all"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "x", "keep": "some"}]}},
         "context_management.edits[0].keep"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)  # fmt: skip
async def test_what_cannot_be_read_is_a_400_that_names_it(
    fields: dict[str, Any], param: str
) -> None:
    async with serving() as served:
        status, answer, _ = await post(
            served, ROUTE, {"messages": [user(text("hi"))], "max_tokens": 5, **fields}
        )
    assert (status, answer["type"]) == (400, "error")
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param


def loop(number: int, name: str = "Bash") -> list[dict[str, Any]]:
    """A call with its thinking, and its result."""
    call = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number}"}
    thought = {"type": "thinking", "thinking": f"thought {number}", "signature": ""}
    return [{"role": "assistant", "content": [thought, call]}, user(result)]


def edited(*edits: Any, messages: Any = None) -> tuple[str, list[Any], int]:
    """The messages after the edits as JSON, the report, and how often the prompt was counted."""
    asked = [user(text("go")), *loop(1), *loop(2, "Read"), user(text("more")), *loop(3), *loop(4)]
    body = body_of(messages=messages or asked, context_management={"edits": list(edits)})
    counts = 0

    def count(one: MessagesRequest) -> int:
        nonlocal counts
        counts += 1
        return len(json.dumps(one.messages))

    shorter, applied = edits_module.edited(body, count)
    return json.dumps(shorter.messages), applied, counts


def test_an_edit_clears_the_thinking_of_earlier_turns() -> None:
    """A turn goes on while results of tools are all that comes from the user."""
    clear = {"type": "clear_thinking_20251015"}
    shown, (report,), _ = edited(clear)
    assert [f"thought {n}" in shown for n in (1, 2, 3, 4)] == [False, False, True, True]
    assert report["cleared_thinking_turns"] == 1
    assert report["cleared_input_tokens"] > 0
    shown, (report,), _ = edited({**clear, "keep": {"type": "thinking_turns", "value": 0}})
    assert "thought" not in shown.replace('"type": "thinking"', "")
    assert report["cleared_thinking_turns"] == 2
    for keep in ("all", {"type": "thinking_turns", "value": 2}):
        assert edited({**clear, "keep": keep})[1:] == ([], 0)


def test_an_edit_clears_old_results_of_tools() -> None:
    clear: Any = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 3}}
    shown, (report,), _ = edited({**clear, "keep": {"type": "tool_uses", "value": 1}})
    assert [f"result {n}" in shown for n in (1, 2, 3, 4)] == [False, False, False, True]
    assert (report["cleared_tool_uses"], shown.count("ls")) == (3, 4)
    shown, (report,), _ = edited({**clear, "exclude_tools": ["Read"],
                                  "trigger": {"type": "tool_uses", "value": 2},
                                  "clear_tool_inputs": True,
                                  "keep": {"type": "tool_uses", "value": 2}})  # fmt: skip
    assert [f"result {n}" in shown for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert shown.count("ls") == 3
    assert edited({**clear, "trigger": {"type": "tool_uses", "value": 4}})[1] == []
    assert edited({"type": "clear_tool_uses_20250919"})[1] == []  # 100,000 tokens
    least = {"type": "input_tokens", "value": 10_000}
    assert edited({**clear, "clear_at_least": least})[1] == []


def test_edits_come_one_after_the_other_and_count_each_prompt_once() -> None:
    trigger = {"type": "input_tokens", "value": 10}
    _, applied, counts = edited(
        {"type": "clear_thinking_20251015"}, {"type": "compact_20990101"},
        *({"type": "clear_tool_uses_20250919", "trigger": trigger},) * 6,
    )  # fmt: skip
    kinds = [one["type"] for one in applied]
    assert kinds == ["clear_thinking_20251015", "clear_tool_uses_20250919"]
    assert counts == 3
    odd = [{"role": "user", "content": "x"}, {"role": "user", "content": [7]}, {"content": None}]
    for kind in ("clear_thinking_20251015", "clear_tool_uses_20250919"):
        assert edited({"type": kind, "trigger": trigger}, messages=odd)[1] == []


async def test_applied_edits_are_reported_and_shorten_the_prompt() -> None:
    asked: dict[str, Any] = {
        "messages": [user(text("go")), *loop(1), *loop(2), user(text("more"))], "max_tokens": 5,
        "context_management": {"edits": [
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1},
             "keep": {"type": "tool_uses", "value": 1}}, {"type": "compact_20990101"}]},
    }  # fmt: skip
    async with serving() as served:
        _, answer, headers = await post(served, ROUTE, asked)
        (report,) = answer["context_management"]["applied_edits"]
        assert report["cleared_tool_uses"] == 1
        prompt = bytes(served.engine.generations[-1].request.prompt)
        assert b"result 1" not in prompt
        assert b"result 2" in prompt
        ignored = headers["x-batchengine-ignored-fields"]
        assert ignored == "context_management.edits.compact_20990101"
        async with (
            aiohttp.ClientSession() as client,
            client.post(served.base + ROUTE, json={**asked, "stream": True}) as reply,
        ):
            assert json.dumps(report, separators=(",", ":")) in await reply.text()


async def test_templates_get_one_system_message_and_no_two_of_users_in_a_row() -> None:
    async with serving() as served:
        assert (await post(served, ROUTE, agent_body(stream=False)))[0] == 200
        messages, tools, _ = served.engine.text.chats[-1]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[1]["content"].endswith(
        "List the files.\n\n<system>\n# Environment\nlinux\n</system>"
    )
    assert [tool["function"]["name"] for tool in tools or []] == ["Bash"]


async def test_the_sdk_reads_answers_and_streams() -> None:
    engine = FakeEngine()
    async with (
        serving(engine) as served,
        anthropic.AsyncAnthropic(base_url=served.base, auth_token="t", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {
            "model": MODEL_ID, "max_tokens": 20_000,
            "extra_body": {"temperature": 0.5, "top_k": 3},
            "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["X", "Y"],
        }  # fmt: skip
        whole = await client.messages.create(**asked)
        assert whole.content[0].type == "text"
        assert whole.content[0].text == "Hello wörld"
        assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 3)
        request = engine.generations[-1].request
        assert (request.stop, request.sampling.top_k) == (("X", "Y"), 3)
        assert request.form == "messages"
        assert len(request.prompt) + request.tokens_max == engine.info.context_tokens
        async with client.messages.stream(**asked | {"max_tokens": 2}) as stream:
            pieces = [piece async for piece in stream.text_stream]
            last = await stream.get_final_message()
        assert pieces == ["Hel", "lo"]
        assert (last.stop_reason, last.usage.input_tokens) == ("max_tokens", 5)
        assert last.usage.cache_read_input_tokens == 4

        del asked["max_tokens"], asked["stop_sequences"], asked["extra_body"]
        assert (await client.messages.count_tokens(**asked)).input_tokens == 9
        asked["messages"] = [{"role": "user", "content": "x" * 3000}]
        assert (await client.messages.count_tokens(**asked)).input_tokens == 3007

        engine.fail_after = 1
        asked |= {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(**asked) as stream:
                await stream.get_final_message()
        assert "api_error" in str(caught.value)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 3007 tokens > "):
            await client.messages.create(
                model=MODEL_ID, max_tokens=5, messages=[{"role": "user", "content": "x" * 3000}]
            )


async def test_the_tool_runner_of_the_sdk_sends_the_whole_conversation() -> None:
    """Newer versions let the server keep it, unless that says that it does not."""

    @anthropic.beta_async_tool
    async def now() -> str:
        """The time."""
        return "noon"

    engine = FakeEngine(['<tool_call>\n{"name": "now", "arguments": {}}\n', "</tool_call>"])
    async with (
        serving(engine) as served,
        anthropic.AsyncAnthropic(base_url=served.base, api_key="k", max_retries=0) as client,
    ):
        runner = client.beta.messages.tool_runner(
            model=MODEL_ID, max_tokens=9, tools=[now], messages=[{"role": "user", "content": "?"}]
        )
        async for message in runner:
            assert message.stop_reason == "tool_use"
            if len(engine.generations) == 2:
                break
    messages, tools, _ = engine.text.chats[-1]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[-1]["content"] == "noon"
    assert [tool["function"]["name"] for tool in tools or []] == ["now"]


def test_tools_whose_type_says_what_they_take_are_the_clients() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "memory_20250818", "name": "memory", "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "computer_20250124", "name": "computer"},
    ]
    found = conversation_of(body_of(tools=tools))
    assert found.unread == ("tools.web_search_20250305", "tools.computer_20250124")
    functions = [tool["function"] for tool in found.tools]
    assert [one["name"] for one in functions[:3]] == [tool["name"] for tool in tools[:3]]
    bash, editor, early = (one["parameters"]["properties"] for one in functions[:3])
    assert set(bash) == {"command", "restart"}
    assert "undo_edit" not in editor["command"]["enum"]
    assert "undo_edit" in early["command"]["enum"]
    assert "insert_text" in editor
    assert "insert_text" not in early
    assert all(one["description"] for one in functions)


async def test_the_sdk_lists_models_and_gets_its_errors_on_every_path() -> None:
    async with (
        serving() as served,
        anthropic.AsyncAnthropic(base_url=served.base, api_key="k", max_retries=0) as client,
    ):
        every = [model.id async for model in client.models.list(limit=2)]
        assert every[0] == MODEL_ID
        assert len(every) == len(set(every)) > 2  # over several pages
        page = await client.models.list(limit=1000)
        assert ([model.id for model in page.data], page.has_more) == (every, False)
        model = await client.models.retrieve(every[1])
        assert (model.type, model.max_input_tokens) == ("model", 2048)
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("none")
        assert caught.value.request_id == caught.value.body["request_id"]  # type: ignore[index]
        assert str(caught.value.request_id).startswith("req_")
        async with aiohttp.ClientSession(served.base) as plain:
            async with plain.head("/api/hello") as reply:
                assert reply.status == 200
            async with plain.get("/v1/models") as reply:
                assert (await reply.json())["object"] == "list"
            async with plain.get("/v1/models?limit=0", headers=VERSION) as reply:
                assert (await reply.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (
            errors.OVERLOADED(waiting=9, setting="limits.queue_max", retry_ms=1500),
            503,
            "overloaded_error",
        ),
        (errors.WAIT_TOO_LONG(wait_s=9, patience_s=1, sla_class="batch"), 503, "overloaded_error"),
        (
            errors.KEY_QUEUE_FULL(waiting=9, limit="no more", setting="limits.queue_max"),
            429,
            "rate_limit_error",
        ),
    ],
)
async def test_capacity_is_503_and_a_keys_limit_429(
    error: BatchEngineError, status: int, kind: str
) -> None:
    engine = FakeEngine()
    engine.refuse = error
    async with serving(engine) as served:
        body = {"messages": [user(text("hi"))], "max_tokens": 5}
        found, answer, headers = await post(served, ROUTE, body)
    lower = {name.lower(): value for name, value in headers.items()}
    assert (found, answer["error"]["type"]) == (status, kind)
    assert lower["x-should-retry"] == "true"
    assert int(lower["retry-after-ms"]) > 0
    assert lower["request-id"] == lower["x-request-id"] == answer["request_id"]


async def test_features_of_the_header_are_counted_if_they_are_unknown() -> None:
    async with serving() as served:
        sent = "claude-code-20250219, teleport-2031-01-01,,interleaved-thinking-2025-05-14"
        body = {"messages": [user(text("hi"))], "max_tokens": 5}
        status, _, _ = await post(served, ROUTE, body, headers={"anthropic-beta": sent})
        assert status == 200
        scrape = served.engine.metrics.render()[0].decode()
    counted = [line for line in scrape.splitlines() if 'field="anthropic-beta' in line]
    assert counted
    assert all("teleport-2031-01-01" in line for line in counted)


@pytest.mark.parametrize(
    ("headers", "stream", "patience_ms"),
    [
        ({"x-stainless-timeout": "600"}, False, 600_000.0),
        ({"x-stainless-timeout": "NOT_GIVEN", "x-stainless-read-timeout": "120.5"}, False, 120_500),
        ({"x-stainless-timeout": "600"}, True, None),  # it gets its first event at once
        ({"x-stainless-timeout": "nan", "x-stainless-read-timeout": "-1"}, False, None),
        ({"x-stainless-timeout": "9" * 40}, False, None),
        ({}, False, None),
    ],
)
async def test_the_clients_timeout_bounds_the_wait_for_a_whole_answer(
    headers: dict[str, str], stream: bool, patience_ms: float | None
) -> None:
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        body = {"messages": [user(text("hi"))], "max_tokens": 5, "stream": stream}
        async with client.post(ROUTE, json=body, headers=headers) as reply:
            assert reply.status == 200
            await reply.read()
        assert served.engine.generations[-1].request.patience_ms == patience_ms


async def test_warming_computes_the_prompt_outside_every_session() -> None:
    async with serving() as served:
        body = {"messages": [user(text("hi"))], "max_tokens": 0}
        status, answer, _ = await post(served, ROUTE, body, headers={"session-id": "s"})
        request = served.engine.generations[-1].request
    assert (status, answer["content"], answer["stop_reason"]) == (200, [], "max_tokens")
    assert (request.session_id, request.tokens_max) == (None, 1)
    assert answer["usage"]["output_tokens"] == 0


async def test_tools_of_other_servers_are_left_out_and_counted() -> None:
    async with serving() as served:
        tools = [{"type": "web_search_20260318", "name": "web_search"}, TOOL]
        body = {"messages": [user(text("hi"))], "max_tokens": 5, "tools": tools}
        assert (await post(served, ROUTE, body))[0] == 200
        _, shown, _ = served.engine.text.chats[-1]
        scrape = served.engine.metrics.render()[0].decode()
    assert [tool["function"]["name"] for tool in shown or []] == ["Bash"]
    assert 'field="tools.web_search_20260318"' in scrape


async def test_tools_in_the_form_of_openai_are_refused_not_left_out() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with serving() as served:
        body = {"messages": [user(text("hi"))], "max_tokens": 5, "tools": tools}
        status, answer, _ = await post(served, ROUTE, body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "input_schema" in answer["error"]["fix"]


async def test_diagnostics_name_what_changed_since_an_earlier_request() -> None:
    first: dict[str, Any] = {
        "model": MODEL_ID, "system": "s", "tools": [TOOL], "max_tokens": 5,
        "messages": [user(text("hi", cache_control={"type": "ephemeral"}))],
        "diagnostics": {"previous_message_id": None},
    }  # fmt: skip
    async with serving() as served:
        _, answer, _ = await post(served, ROUTE, first)
        assert answer["diagnostics"] is None
        previous = {"previous_message_id": answer["id"]}
        follow_up = {
            **first, "diagnostics": previous,
            "messages": [user(text("hi")), {"role": "assistant", "content": "y"}, user(text("b"))],
        }  # fmt: skip
        changes: list[tuple[dict[str, Any], str | None]] = [
            ({}, None),
            ({"model": "tiny"}, "model_changed"),
            ({"system": "t", "tools": []}, "system_changed"),
            ({"tools": [TOOL, LATER]}, "tools_changed"),
            ({"messages": [user(text("ho"))]}, "messages_changed"),
            ({"diagnostics": {"previous_message_id": "msg_1"}}, "previous_message_not_found"),
        ]
        for change, expected in changes:
            status, answer, _ = await post(served, ROUTE, follow_up | change)
            found = answer["diagnostics"] and answer["diagnostics"]["cache_miss_reason"]
            assert (status, found and found["type"]) == (200, expected)
            if expected and expected.endswith("_changed"):
                assert found["cache_missed_input_tokens"] >= 0
    Message.model_validate(answer)


async def test_pings_keep_a_waiting_stream_and_five_stops_are_not_too_many() -> None:
    engine = FakeEngine()
    engine.queued_s = 0.5
    config = fake_config(keepalive_s=0.1, noop_event_s=0.2)
    async with serving(engine, config) as served, aiohttp.ClientSession(served.base) as client:
        body = {"messages": [user(text("hi"))], "max_tokens": 5, "stream": True}
        async with client.post(ROUTE, json=body | {"stop_sequences": list("12345")}) as reply:
            blocks = (await reply.text()).split("\n\n")
    names = [block.partition("\n")[0] for block in blocks if block.startswith("event: ")]
    assert names[:2] == ["event: message_start", "event: ping"]
    assert names[-1] == "event: message_stop"
    assert len(engine.generations[-1].request.stop) == 5


words = st.sampled_from([
    "user", "assistant", "system", "text", "thinking", "tool_use", "tool_result", "tool_reference",
    "tool_addition", "document", "search_result", "next_user_message", "Bash", "Fetch",
])  # fmt: skip
names = st.sampled_from([
    "type", "text", "content", "role", "source", "data", "title", "name", "id", "input", "tool",
    "tool_use_id", "tool_name", "definition", "is_error", "thinking", "signature", "clear_at",
    "defer_loading", "input_schema",
])  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-9, 9) | words | st.text(max_size=3)
anything = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
    max_leaves=12,
)
messages_of = st.lists(
    st.fixed_dictionaries({"role": words, "content": anything})
    | st.dictionaries(names, anything, max_size=4),
    min_size=1, max_size=4,
)  # fmt: skip


@given(
    messages=messages_of,
    system=st.text() | st.lists(st.dictionaries(names, anything, max_size=3), max_size=3),
    tools=st.lists(st.dictionaries(names, anything, max_size=4) | st.just(LATER), max_size=3),
)
def test_any_body_is_read_or_refused(messages: Any, system: Any, tools: Any) -> None:
    refused: BatchEngineError | None = None
    try:
        made = conversation_of(body_of(messages=messages, system=system, tools=tools))
        assert all(isinstance(message["content"], str) for message in made.messages)
    except BatchEngineError as error:
        refused = error
    assert refused is None or (refused.kind is Kind.INVALID and refused.param)
