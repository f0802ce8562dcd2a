"""Streams that are cut behind any event and resumed: each event comes exactly once."""

from __future__ import annotations

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
from service.protocols.formatter import EventIds, Formatter, SseEvent
from service.protocols.table import BY_NAME

TURN = "req_ab"
NAMES = ("chat", "messages", "responses")
# Tokens that show nothing, one that shows several parts, and text that is held back until the end.
REPLY = (
    "<think>\nOne", " two", "\n</think>\n\nLet", " me see.\n\n", "<tool", "_call>\n{",
    '"name": "weather", "argu', 'ments": {"city"', ': "Paris"', "}}\n</tool", "_call>",
    'So <b\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>And', "", " <tool_", "call",
)  # fmt: skip
DONE = DoneEvent("stop", Usage(completion_tokens=len(REPLY)), " \ufffd")


def formatter_of(name: str, ids: EventIds) -> Formatter:
    form = OutputForm("hermes", calls=True)
    asked = GenerationRequest(TURN, (1, 2), 64, output=form)
    job = requests.HttpJob(
        asked=asked, model="m", created=7, stream=True, include_usage=True, route="cpu", seed=1,
        requests=[asked],
    )  # fmt: skip
    made = BY_NAME[name].formatter(job)
    made.ids = ids
    return made


def events_of(name: str, tokens: int = 0, events: int = 0) -> list[SseEvent]:
    """The events of a stream behind the opening, from a position on."""
    made = formatter_of(name, EventIds(tokens, lambda: TURN, events))
    made.opening()
    for text in REPLY[:tokens]:
        made.skip(0, SkippedEvent(text))
    found: list[SseEvent] = []
    for number, text in enumerate(REPLY[tokens:], tokens + 1):
        found += made.token(0, TokenEvent(number, text))
    return found + made.finish(0, DONE)


def without_times(events: list[SseEvent]) -> list[SseEvent]:
    return [event for event in events if b"completed_at" not in event.data]


@pytest.mark.parametrize("name", NAMES)
def test_each_event_comes_once_however_a_stream_is_cut(name: str) -> None:
    whole = events_of(name)
    assert all(event.id for event in whole[:-1])
    assert len({event.id for event in whole[:-1]}) == len(whole) - 1
    assert sum("." in event.id for event in whole) >= 2
    for count, event in enumerate(whole[:-1], 1):
        tokens, _, events = event.id.removeprefix(f"{TURN}:").partition(".")
        rest = events_of(name, int(tokens), int(events or 0))
        assert without_times(rest) == without_times(whole[count:]), event


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_the_daemon_cut_goes_on_where_it_was(name: str) -> None:
    """Its last events, which end it for the client, are none of the answer."""
    whole = events_of(name)
    for count in range(1, len(REPLY)):
        made = formatter_of(name, EventIds(0, lambda: TURN))
        made.opening()
        begun: list[SseEvent] = []
        for number, text in enumerate(REPLY[:count], 1):
            begun += made.token(0, TokenEvent(number, text))
        cut = made.finish(0, DoneEvent("shutdown", Usage()))
        assert {event.id for event in cut} <= {"", f"{TURN}:{count}"}
        assert without_times(begun + events_of(name, count)) == without_times(whole)


@pytest.mark.parametrize("name", NAMES)
def test_no_stream_is_without_an_end(name: str) -> None:
    for tokens, events in ((len(REPLY), 99), (0, 10**8)):
        assert events_of(name, tokens, events)[-1].data == events_of(name)[-1].data
