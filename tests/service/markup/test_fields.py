"""Grammars of calls whose arguments are fields: whole schemas of tools, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchengine.core import BatchEngineError
from batchengine.markup import MARKUPS
from service.protocols.markup.grammars import Calls, constraint_of
from service.protocols.markup.values import as_value
from service.protocols.output import arguments_of
from tests.service.markup.test_gemma import forced, written
from tests.service.markup.test_grammars import CONTROL, allows, no_control
from tests.service.markup.test_parser import parts_of
from tests.text.gemma import open_gemma, write_gemma


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("vocab") / "gemma.gguf")


NULL, FLAG = {"type": "null"}, {"type": "boolean"}
ONE = {"type": "object", "properties": {"a": FLAG}, "required": ["a"]}
TWO = {"properties": {"a": FLAG, "b": NULL}}
NEED_B = {"properties": {"b": NULL}, "required": ["b"]}
ROOTS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"$ref": "#/$defs/one", "$defs": {"one": ONE}}, [{"a": True}], [{}, {"a": 1}]),
    ({"$ref": "#/$defs/one", "$defs": {"one": ONE}, **NEED_B}, [{"a": True, "b": None}],
     [{}, {"a": True}, {"b": None}]),
    ({"allOf": [ONE, NEED_B]}, [{"a": True, "b": None}], [{}, {"a": True}, {"b": None}]),
    ({"anyOf": [ONE, NEED_B, {"type": "string"}]}, [{"a": True}, {"b": None}], [{}, "a", {"a": 1}]),
    ({"oneOf": [ONE, NEED_B]}, [{"a": True}, {"b": None}], [{}]),
    ({**TWO, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": True}, {"b": None}, {"a": True, "b": None}], [{}]),
    ({"type": "object"}, [{}, {"x": 1, "y": ["z"]}], [[]]),
    ({"type": "object", "additionalProperties": FLAG}, [{}, {"x": True}], [{"x": 1}]),
    ({"type": "object", "additionalProperties": False}, [{}], [{"x": 1}]),
    ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    ({}, [{}], [{"x": 1}]),
    (None, [{}], [{"x": 1}]),
    ({"enum": [{"a": 1}, 2]}, [{"a": 1}], [{}, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), ROOTS)
def test_arguments_follow_the_whole_schema_of_their_tool(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    made = forced(schema)
    for one in good:
        assert allows(made, written("f", one)), one
    for one in bad:
        assert not allows(made, written("f", one)), one


def test_a_strict_tool_without_properties_has_no_arguments() -> None:
    tool: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    made = constraint_of(
        MARKUPS["gemma"],
        CONTROL.get,
        in_reasoning=False,
        may_reason=False,
        calls=Calls([{"type": "function", "function": tool}], required=True, parallel=False),
        response=None,
    )
    assert allows(made, written("f", {}))
    assert not allows(made, written("f", {"x": 1}))


def test_what_of_a_root_does_not_hold_is_named(path: Path) -> None:
    text = open_gemma(path)
    schemas: dict[str, Any] = {
        "minProperties": {**TWO, "minProperties": 1},
        "not": {**TWO, "not": {"required": ["a"]}},
        "oneOf": {"oneOf": [ONE, NEED_B]},
        "$ref": {"$ref": "#unknown"},
        "pattern": {"allOf": [{"properties": {"a": {"type": "string", "pattern": "^a"}}},
                              {"properties": {"a": {"pattern": "b$"}}}]},
    }  # fmt: skip
    for name, schema in schemas.items():
        assert text.check_constraint(forced(schema, text.control_id)) == [name]


OF_TYPES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "enum": ["a", 1, None, 2.5, True]}, [1], ["a", None, 2.5, True]),
    ({"type": "number", "enum": [1, 7, 2.5], "maximum": 3}, [1, 2.5], [7]),
    ({"type": ["string", "null"], "enum": ["a", "abc", None, 1], "maxLength": 1}, ["a", None],
     ["abc", 1]),
    ({"const": 1, "enum": [1, 2]}, [1], [2]),
    ({"anyOf": [{"enum": [1, "a"]}, {"const": 2}, {"const": "b"}], "type": "string"}, ["a", "b"],
     [1, 2]),
    ({"anyOf": [False, {"type": "null"}, {"minLength": 2, "maxLength": 1, "type": "string"}]},
     [None], ["a", ""]),
    ({"type": "array", "items": {"type": "integer", "enum": ["a"]}}, [[]], [["a"], [1]]),
    ({"type": "object", "properties": {"a": {"minItems": 2, "maxItems": 1, "type": "array"},
                                       "b": True}}, [{}, {"b": 1}], [{"a": [1]}, {"a": []}]),
    ({"additionalProperties": {"type": "integer", "minimum": 2, "maximum": 1}, "type": "object"},
     [{}], [{"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), OF_TYPES)
def test_values_that_fit_no_type_are_left_out(schema: Any, good: list[Any], bad: list[Any]) -> None:
    made = forced({"properties": {"p": schema}, "required": ["p"]})
    for one in good:
        assert allows(made, written("f", {"p": one})), one
    for one in bad:
        assert not allows(made, written("f", {"p": one})), one


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "a("}, "unclosed group"),
        ({"type": "string", "pattern": "^[b-a]$"}, "invalid character class range"),
        ({"type": "string", "pattern": 1}, "'pattern' must be text, not 1"),
        ({"type": "string", "minLength": -1}, "'minLength' must be a whole number from 0 on"),
        ({"type": "array", "maxItems": 1.5}, "'maxItems' must be a whole number from 0 on"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "no value is as it says"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "no value is as it says"),
        ({"type": "array", "minItems": 1, "items": False}, "no value is as it says"),
        ({"type": "number", "minimum": 3, "maximum": 1}, "no value is as it says"),
        ({"type": "integer", "enum": ["a"]}, "no value is as it says"),
        ({"enum": []}, "no value is as it says"),
        ({"allOf": [{"const": 1}, {"type": "string"}]}, "no value is as it says"),
        ({"$ref": "#/$defs/low", "type": "string"}, "no value is as it says"),
        ({"type": "integer", "minimum": "3"}, "minimum"),
        (False, "no value is as it says"),
    ],
)
def test_what_is_wrong_in_a_schema_is_said_of_its_tool(path: Path, schema: Any, why: str) -> None:
    text = open_gemma(path)
    definitions = {"low": {"type": "integer"}}
    whole = {"properties": {"p": schema}, "required": ["p"], "$defs": definitions}
    with pytest.raises(BatchEngineError) as refused:
        text.check_constraint(forced(whole, text.control_id))
    assert refused.value.why.startswith("the schema of the tool 'f': ")
    assert why in refused.value.why


def test_parts_without_values_cost_little(path: Path) -> None:
    """A rule that is tried and left out leaves none behind that others lack."""
    parts: dict[str, Any] = {"d0": {"type": "integer", "enum": ["a"]}}
    for number in range(1, 11):
        part = {"$ref": f"#/$defs/d{number - 1}"}
        parts[f"d{number}"] = {"anyOf": [part, {**part, "minimum": 1}]}
    loop = {
        "properties": {"q": {"$ref": "#/$defs/loop"}, "r": {"$ref": "#/$defs/d10"}},
        "required": ["q", "r"],
    }
    fields = {"p": {"$ref": "#/$defs/d10"}, "o": {"$ref": "#/$defs/loop"}, "n": {"type": "null"}}
    text = open_gemma(path)
    made = forced({"properties": fields, "$defs": parts | {"loop": loop}}, text.control_id)
    text.check_constraint(made)
    assert allows(forced({"properties": fields, "$defs": parts | {"loop": loop}}), written("f", {}))
    assert len(made.text) < 1000


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"^\d{2}$", ["12"], ["١٢", "1a"]),
    (r"^[\d-]+$", ["1-2"], ["٣", "a"]),
    (r"^\w+$", ["aZ_9"], ["é", "ß1", "-"]),
    (r"^[^\w]$", ["é", "-"], ["a", "_"]),
    (r"^\s$", [" ", "\t", "\n", "\u00a0", "\ufeff", "\u2028"], ["\x85", "a"]),
    (r"^[\s,]+$", [" ,\u3000"], ["\x85", "s"]),
    (r"^\D\W\S$", ["١éa", "x-\x85"], ["1-a", "aaa", "a- "]),
    (r"^[\D1]$", ["1", "٢", "a"], ["2"]),
    (r"^[^\D1]$", ["2"], ["1", "٢", "a"]),
    (r"^\\d\[\w\]$", [r"\d[a]"], ["\\1[a]", r"\d[é]"]),
    (r"^[[&&~~]+$", ["[&~"], ["]", "a"]),
    (r"^[\D$]|\d$", ["x", "é"], []),  # said to be lost
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_classes_of_patterns_are_those_of_their_language(
    pattern: str, good: list[str], bad: list[str]
) -> None:
    made = forced({"properties": {"p": {"type": "string", "pattern": pattern}}, "required": ["p"]})
    for one in good:
        assert allows(made, written("f", {"p": one})), one
    for one in bad:
        assert not allows(made, written("f", {"p": one})), one


def test_patterns_are_checked_as_they_are_followed(path: Path) -> None:
    text = open_gemma(path)
    for pattern, _, _ in PATTERNS:
        made = forced({"properties": {"p": {"type": "string", "pattern": pattern}}})
        text.check_constraint(made)


@pytest.mark.parametrize("control_id", [no_control, CONTROL.get])
def test_a_thought_begins_with_a_line(control_id: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    made = constraint_of(
        MARKUPS["gemma"],
        control_id,
        in_reasoning=False,
        may_reason=True,
        calls=Calls([tool], required=True, parallel=False),
        response=None,
    )
    call = written("f", {})
    for good in ("", "<|channel>thought\n<channel|>", "<|channel>thought\nSo.\n<channel|>"):
        assert allows(made, good + call), good
    for bad in ("<|channel>thought<channel|>", "<|channel>thoughts\n<channel|>"):
        assert not allows(made, bad + call), bad


def test_every_character_may_stand_in_constants() -> None:
    characters = "".join(map(chr, [*range(0x20), *range(0x7E, 0xA1), 0x2028, 0xFEFF, 0x10FFFF]))
    made = forced({"properties": {f"k\x7f{characters[-3:]}": {"const": characters}}})
    assert allows(made, written("f", {f"k\x7f{characters[-3:]}": characters}))
    assert not allows(made, written("f", {f"k\x7f{characters[-3:]}": characters[1:]}))


@pytest.mark.parametrize("number", ["2e1708", "-1.5E+999", "1e-999", "1" + "0" * 400, "0"])
def test_numbers_of_any_size_are_numbers(number: str) -> None:
    answer = f"<|tool_call>call:f{{p:{number},q:[{number}]}}<tool_call|>"
    assert allows(forced({"properties": {"p": {"type": "number"}, "q": {}}}), answer)
    arguments = arguments_of(parts_of(answer, markup="gemma"))
    assert arguments == [f'{{"p": {number}, "q": [{number}]}}']
    for text in ("01", "1.", ".5", "+1", "1e", "١", "1_0"):
        assert as_value(text) == f'"{text}"'
