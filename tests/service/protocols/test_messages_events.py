"""Events of the Messages protocol: what the SDK accumulates of a stream is the whole message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import (
    ContextBound,
    DoneEvent,
    GenerationRequest,
    SkippedEvent,
    TokenEvent,
    Usage,
)
from service.protocols import requests
from service.protocols.messages.events import Facts, MessagesFormatter, error_object
from service.protocols.messages.signatures import SHOWN, HiddenReasoning, reasoning_of
from service.protocols.output import CallArguments, CallStart, OutputPart, Reasoning, Text

USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5)


class Script:
    """A parser that gives prepared parts, one list for each token."""

    def __init__(self, parts: Sequence[Sequence[OutputPart]]) -> None:
        self.parts = [list(of_token) for of_token in parts]

    def push(self, text: str) -> list[OutputPart]:
        return self.parts.pop(0) if text else []

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        return [part for of_token in self.parts for part in of_token]


def formatter(parts: Sequence[Sequence[OutputPart]], facts: Facts | None = None) -> Any:
    asked = GenerationRequest("req_1234", tuple(range(7)), 4)
    job = requests.HttpJob(
        asked=asked, model="m", stream=True, include_usage=False, route="cpu", seed=1,
        requests=[asked], echo=requests.NOTHING if facts is None else json.dumps(
            {name: getattr(facts, name) for name in facts.__struct_fields__}
        ).encode(),
    )  # fmt: skip
    made = MessagesFormatter(job)
    made.answers[0].parser = Script(parts)
    return made


def streamed(
    parts: Sequence[Sequence[OutputPart]], done: DoneEvent, facts: Facts | None = None
) -> list[dict[str, Any]]:
    made = formatter(parts, facts)
    events = made.opening()
    for index in range(len(parts) - 1):  # the last ones are held back until the end
        events += made.token(0, TokenEvent(index, "x"))
    events += made.finish(0, done)
    assert made.is_done
    assert all(event.name == json.loads(event.data)["type"] for event in events)
    return [json.loads(event.data) for event in events]


def whole(
    parts: Sequence[Sequence[OutputPart]], done: DoneEvent, facts: Facts | None = None
) -> dict[str, Any]:
    made = formatter(parts, facts)
    for index in range(len(parts) - 1):
        made.collect(0, TokenEvent(index, "x"))
    made.collect(0, done)
    return json.loads(b"".join(made.whole()))


def accumulated(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(
            event=event,  # pyright: ignore[reportArgumentType]
            current_snapshot=snapshot, json_bufs=buffers,
        )  # fmt: skip
    return snapshot.to_dict()


def check_order(events: Sequence[dict[str, Any]]) -> None:
    """Blocks follow one another, each begun once and ended once."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    opened = -1
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            opened, is_open = opened + 1, True
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
        else:
            assert event["type"] == "content_block_delta"
            assert is_open
        assert event["index"] == opened
    assert not is_open
    assert opened >= 0


def _calls(found: list[tuple[str, Any]]) -> list[OutputPart]:
    """Parts of an answer; calls are numbered, and their arguments cut into pieces."""
    parts: list[OutputPart] = []
    calls = 0
    for kind, value in found:
        if kind == "call":
            text = json.dumps(value, ensure_ascii=False)
            cut = len(text) // 2
            parts.append(CallStart(calls, "tool"))
            parts += [CallArguments(calls, piece) for piece in (text[:cut], text[cut:]) if piece]
            calls += 1
        else:
            parts.append(Text(value) if kind == "text" else Reasoning(value))
    return parts


texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=8)
values = st.recursive(
    st.booleans() | st.integers(-(1 << 53), 1 << 53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
answers = st.lists(
    st.tuples(st.just("text"), texts)
    | st.tuples(st.just("reasoning"), texts)
    | st.tuples(st.just("call"), st.dictionaries(texts, values, max_size=3)),
    max_size=8,
).map(_calls)


@given(parts=answers, cuts=st.lists(st.integers(0, 20), max_size=6), hides=st.booleans())
def test_the_accumulated_message_is_the_whole_one(
    parts: list[OutputPart], cuts: list[int], hides: bool
) -> None:
    places = sorted({0, len(parts), *(min(cut, len(parts)) for cut in cuts)})
    tokens = [parts[a:b] for a, b in zip(places, [*places[1:], len(parts)], strict=True)]
    done = DoneEvent("stop", USAGE)
    facts = Facts(hides_reasoning=hides)
    events = streamed(tokens, done, facts)
    check_order(events)
    one = whole(tokens, done, facts)
    del one["batchengine"]
    found = accumulated(events)
    assert found == one
    Message.model_validate(one)
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    thinking = [block for block in one["content"] if block["type"] == "thinking"]
    assert all(block["signature"] for block in thinking)
    assert "".join(map(reasoning_of, thinking)) == reasoning


def test_every_kind_of_block_has_its_events() -> None:
    parts = [
        [Reasoning("why")], [Text("so"), Text("!")],
        [CallStart(0, "ls"), CallArguments(0, '{"a"'), CallArguments(0, ":1}")],
        [CallStart(1, "pwd")], [],
    ]  # fmt: skip
    events = streamed(parts, DoneEvent("stop", USAGE))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "why"},
        {"type": "signature_delta", "signature": SHOWN},
        {"type": "text_delta", "text": "so"},
        {"type": "text_delta", "text": "!"},
        {"type": "input_json_delta", "partial_json": '{"a"'},
        {"type": "input_json_delta", "partial_json": ":1}"},
    ]
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [(block["type"], block.get("id")) for block in blocks] == [
        ("thinking", None), ("text", None), ("tool_use", "toolu_1234n0"),
        ("tool_use", "toolu_1234n1"),
    ]  # fmt: skip
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    usage = events[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 3)
    assert usage["output_tokens"] == 5
    assert usage["output_tokens_details"] == {"thinking_tokens": 1}
    assert events[0]["message"]["usage"]["input_tokens"] == 7


@pytest.mark.parametrize(
    ("done", "facts", "reason"),
    [
        (DoneEvent("stop", USAGE), Facts(), "end_turn"),
        (DoneEvent("stop", USAGE, stop_string="END"), Facts(), "stop_sequence"),
        (DoneEvent("length", USAGE), Facts(), "max_tokens"),
        (DoneEvent("length", USAGE), Facts(fills_context=True), "model_context_window_exceeded"),
        (DoneEvent("shutdown", USAGE), Facts(), "pause_turn"),
    ],
)
def test_stop_reasons(done: DoneEvent, facts: Facts, reason: str) -> None:
    made = whole([[Text("a")], []], done, facts)
    assert made["stop_reason"] == reason
    assert made["stop_sequence"] == (done.stop_string or None)


@pytest.mark.parametrize(
    ("behind", "reason"),
    [
        ([], "tool_use"),
        ([Text("so")], "tool_use"),
        ([CallStart(1, "rm"), CallArguments(1, '{"a": ')], "stop_sequence"),
    ],
)
def test_a_stop_sequence_behind_whole_calls(behind: list[OutputPart], reason: str) -> None:
    """A client that gets calls and another reason sends no results, and cannot go on."""
    call = [CallStart(0, "ls"), CallArguments(0, "{}")]
    made = whole([call, behind, []], DoneEvent("stop", USAGE, stop_string="END"))
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, "END")


def test_a_call_that_was_cut_short_keeps_its_text() -> None:
    parts = [[CallStart(0, "ls"), CallArguments(0, '{"a": [1')], []]
    block = whole(parts, DoneEvent("length", USAGE))["content"][0]
    assert block["input"] == {"partial_json": '{"a": [1'}


def test_warming_shows_no_output() -> None:
    made = whole([[Text("a")], []], DoneEvent("length", USAGE), Facts(warms=True))
    assert made["usage"]["output_tokens"] == 0
    assert made["usage"]["cache_creation_input_tokens"] == 4
    assert (made["content"], made["stop_reason"]) == ([], "max_tokens")


def test_a_failure_is_an_error_event_with_the_request() -> None:
    made = formatter([[]])
    event = made.failure(errors.STEP_MISMATCH(what="digests"))[0]
    body = json.loads(event.data)
    assert (event.name, body["type"], body["error"]["type"]) == ("error", "error", "api_error")
    assert body["request_id"] == "req_1234"


def test_overflow_is_said_in_the_words_that_clients_read() -> None:
    error = errors.PROMPT_TOO_LONG(
        asked="71,204 tokens", n_prompt_tokens=71204, n_ctx=65536, longer=ContextBound.SETTING
    )
    found: Any = error_object(error)["error"]
    assert found["message"] == "prompt is too long: 71204 tokens > 65536 maximum"
    error = errors.PROMPT_TOO_LONG(
        asked="8 tokens + max 99", n_prompt_tokens=8, n_ctx=64, longer=ContextBound.SETTING
    )
    found = error_object(error)["error"]
    assert "8 tokens + max 99" in found["message"]


def test_threads_are_refused_in_the_words_that_make_the_sdk_send_all_messages() -> None:
    found: Any = error_object(errors.THREADS_UNSUPPORTED())["error"]
    assert (found["type"], found["param"]) == ("invalid_request_error", "thread")
    said = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert found["details"] == said
    assert "details" not in cast("Any", error_object(errors.STEP_MISMATCH(what="digests"))["error"])


def test_hostile_signatures_give_no_reasoning() -> None:
    for signature in ("", "batchengine", "batchengine.", "batchengine.%%", "batchengine.AAAA", 7):
        assert reasoning_of({"thinking": "", "signature": signature}) == ""
    for size, is_kept in ((4000, True), (50_000_000, False)):
        made = HiddenReasoning()
        made.push("a" * size)
        bomb = {"thinking": "", "signature": made.signature()}
        assert bool(reasoning_of(bomb)) == is_kept


def test_a_resumed_stream_goes_on_in_the_open_block() -> None:
    parts = [[Reasoning("why")], [Text("so")], [Text("!"), CallStart(0, "ls")], []]
    made = formatter(parts)
    every = [event.data for token in range(3) for event in made.token(0, TokenEvent(token, "x"))]
    resumed = formatter(parts)
    for _ in range(2):
        resumed.skip(0, SkippedEvent("x"))
    rest = [event.data for event in resumed.token(0, TokenEvent(2, "x"))]
    assert rest == every[-len(rest) :]
    assert json.loads(rest[0])["index"] == 1
    done = DoneEvent("stop", USAGE)
    assert resumed.finish(0, done) == made.finish(0, done)
