"""Histories of Gemma 4 whose messages stand in other places than its templates show."""

from __future__ import annotations

from typing import Any

import pytest

from batchengine.text.encoder import TextEncoder
from tests.service.markup.test_gemma import USER, path, prompt_of, result, text, weather, written
from tests.text.harmony import shown

__all__ = ["path", "text"]
ROME = written("weather", {"city": "Rome"})


def said(*ids: str, content: str = "") -> dict[str, Any]:
    calls = [weather(one, city="Rome") for one in ids]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def response(content: str) -> str:
    return f'<|tool_response>response:weather{{value:<|"|>{content}<|"|>}}<tool_response|>'


def test_a_result_goes_behind_its_call(text: TextEncoder) -> None:
    """Messages may stand between, and results may come in any order."""
    given = [USER, said("1"), {"role": "user", "content": "and?"}, result("1", "late")]
    found = shown(text, prompt_of(text, given).tokens[0])
    assert f"{ROME}{response('late')}" in found
    assert found.index("late") < found.index("and?")
    given = [USER, said("1"), said("2"), result("2", "second"), result("1", "first")]
    found = shown(text, prompt_of(text, given).tokens[0])
    assert found.index(f"{ROME}{response('first')}") < found.index(f"{ROME}{response('second')}")
    given = [USER, said("1", "2"), result("", "x"), result("unknown", "y")]
    found = shown(text, prompt_of(text, given).tokens[0])
    assert 'value:<|"|>x<|"|>' in found
    assert 'value:<|"|>y<|"|>' in found


@pytest.mark.parametrize("messages", [[], [said("1"), result("1", "r"), USER]])
def test_a_result_of_no_call_is_a_message_of_the_user(
    text: TextEncoder, messages: list[dict[str, Any]]
) -> None:
    given = [USER, *messages, result("9", "stray")]
    found = shown(text, prompt_of(text, given).tokens[0])
    assert "<tool_response>\nstray\n</tool_response>" in found


def test_text_in_front_of_calls_of_earlier_turns_stays(text: TextEncoder) -> None:
    """Templates drop reasoning in front of the last question."""
    turn = [USER, said("1", content="Wait for me."), result("1", "r")]
    for given in (turn, [*turn, {"role": "assistant", "content": "Warm."}, USER], [*turn, USER]):
        found = shown(text, prompt_of(text, given).tokens[0])
        assert "Wait for me." in found
        assert f"{ROME}{response('r')}" in found


def test_references_of_a_schema_are_followed_as_json_pointers(text: TextEncoder) -> None:
    choices = {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}
    fields = {
        "a": {"$ref": "#/properties/u/anyOf/1"},
        "b": {"$ref": "#/$defs/My%20Type~1x"},
        "c": {"$ref": "#name"},
        "d": {"$ref": "#/properties/u/anyOf/9"},
        "u": choices,
    }
    schema = {"type": "object", "properties": fields, "$defs": {"My Type/x": {"type": "number"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = shown(text, prompt_of(text, [USER], tools=[tool]).tokens[0])
    for name, kind in (("a", "boolean"), ("b", "number"), ("c", "any"), ("d", "any")):
        assert f'{name}:{{type:<|"|>{kind}<|"|>}}' in found
