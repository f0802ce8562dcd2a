"""Messages as a template takes them, and what a template takes."""

from __future__ import annotations

import datetime
from typing import Any

from batchengine.markup import MARKUPS
from batchengine.text.messages import PROBE_TEXT, PROBES
from batchengine.text.renderer import Renderer
from service.protocols.markup.history import prepare, prepare_later
from tests.support.fake_engine import FakeText

STRICT = """{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{- m.role + ': ' + m.content + '\n' }}
{%- endfor %}"""
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


class Takes(FakeText):
    """A template that takes some probes."""

    def __init__(self, *taken: str, markup: str = "hermes") -> None:
        super().__init__()
        self.markup = MARKUPS[markup]
        self.taken = taken

    def takes(self, probe: str) -> bool:
        return probe in self.taken


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_messages_that_a_template_takes_stay() -> None:
    messages = [
        message("system", "s"), message("user", "u"),
        message("assistant", "", tool_calls=[CALL]), message("tool", "r", tool_call_id="call_1"),
    ]  # fmt: skip
    assert prepare(messages, [CALL], Takes(*PROBES)) == (messages, [CALL])


def test_messages_in_a_row_are_joined() -> None:
    messages = [
        message("system", "s"), message("system", "t"), message("user", "u"),
        message("system", "later"), message("user", "v"), message("assistant", "a"),
    ]  # fmt: skip
    later = "u\n\n<system>\nlater\n</system>\n\nv"
    joined = [message("system", "s\n\nt"), message("user", later), message("assistant", "a")]
    assert prepare(messages, None, Takes(*PROBES))[0] == joined
    assert prepare(messages, None, Takes())[0] == [
        message("user", f"s\n\n<system>\nt\n</system>\n\n{later}"), message("assistant", "a"),
    ]  # fmt: skip
    assert messages[0]["content"] == "s"  # the request's own stay


def test_calls_and_tools_are_text_where_a_template_has_none() -> None:
    messages = [
        message("user", "u"),
        message("assistant", "Wait.", tool_calls=[CALL]),
        message("tool", "sunny", tool_call_id="call_1"),
    ]
    found, tools = prepare(messages, [{"type": "function"}], Takes("system"))
    assert tools is None
    assert '{"type": "function"}' in found[0]["content"]
    assert found[2]["content"].startswith('Wait.\n\n<tool_call>\n{"name": "f", "arguments": {"a"')
    assert found[3] == message("user", "<tool_response>\nsunny\n</tool_response>")


def test_what_is_new_to_a_conversation_stands_behind_the_results_of_its_calls() -> None:
    heading, result = [message("system", "s")], message("tool", "r", tool_call_id="call_1")
    found = prepare_later([result, message("user", "u")], heading, [CALL], Takes(*PROBES), {})
    assert found[0] == result
    assert found[1]["content"].startswith("<system>\ns\n</system>\n\n<system>\nYou can call")
    assert '"name": "f"' in found[1]["content"]
    assert found[1]["content"].endswith("\n\nu")
    only = [message("system", "s"), message("user", "u")]
    for takes in (Takes(*PROBES), Takes()):
        found = prepare_later(only, [], None, takes, {})
        assert found == [message("user", "<system>\ns\n</system>\n\nu")]


def test_results_without_a_call_are_text_where_a_template_refuses_them() -> None:
    """As those of calls that were cut off."""
    cut = {**CALL, "function": {"name": "f", "arguments": '{"a": '}}
    lone, result = message("tool", "r", tool_call_id="call_1"), message("tool", "s")
    calls = [
        message("assistant", "", tool_calls=[cut]), lone,
        message("assistant", "", tool_calls=[CALL]), result,
    ]  # fmt: skip
    for taken in ({"lone results"}, set[str]()):
        text = Takes("calls", "results", *taken)
        found = prepare([message("user", "u"), *calls], None, text)[0]
        shown = lone if taken else message("user", "<tool_response>\nr\n</tool_response>")
        assert '"arguments": {"a": }' in found[1]["content"]
        assert found[2:] == [shown, *calls[2:]]
        assert prepare_later([lone], [], None, text, {}) == [lone]


def test_call_ids_of_mistral_have_nine_characters() -> None:
    messages = [
        message("assistant", "", tool_calls=[CALL]),
        message("tool", "r", tool_call_id="call_1"),
        message("tool", "r", tool_call_id="abcdefghi"),
    ]
    found, _ = prepare(messages, None, Takes(*PROBES, markup="mistral"))
    made = found[0]["tool_calls"][0]["id"]
    assert len(made) == 9
    assert found[1]["tool_call_id"] == made
    assert found[2]["tool_call_id"] == "abcdefghi"


def test_probes_see_what_a_template_refuses_or_loses() -> None:
    def shown(source: str | None, probe: str) -> bool:
        renderer = Renderer(source, datetime.date(2026, 1, 1), 10_000)
        try:
            return PROBE_TEXT in renderer.render(PROBES[probe])
        except Exception:
            return False

    chatml = {"system", "results", "lone results"}
    assert {probe for probe in PROBES if shown(None, probe)} == chatml
    assert {probe for probe in PROBES if shown(STRICT, probe)} == {"results", "lone results"}
