"""Grammars of forced and checked calls, and of formats, against texts that they allow or not."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from batchengine.core import BatchEngineError, Constraint, OutputForm
from batchengine.markup import MARKUPS
from service.protocols.markup.grammars import Calls, constraint_of
from service.protocols.markup.parser import parser_of
from service.protocols.markup.rules import PATTERN
from service.protocols.output import OutputPart, arguments_of, calls_of, plain_text

llguidance = pytest.importorskip("llguidance")

CONTROL = {
    name: 257 + number
    for number, name in enumerate(
        (
            *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>", "<|tool_call>", "<tool_call|>", '<|"|>'),
            *("<|channel>", "<channel|>", "<minimax:tool_call>", "</minimax:tool_call>"),
        )
    )
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
FORMAT = Constraint("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')


class Bytes:
    """A vocabulary of bytes and a few control tokens."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = 256, None
    tokens: ClassVar = [
        *(bytes([i]) for i in range(256)),
        b"</s>",
        *(name.encode() for name in CONTROL),
    ]
    special_token_ids: ClassVar = [256, *CONTROL.values()]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def ids(text: str, grammar: str) -> list[int]:
    """The tokens of a text. Marks but those of Mistral are text where a grammar has them so."""
    tokens = {name: i for name, i in CONTROL.items() if name[0] == "[" or f"<[{i}]>" in grammar}
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    return [i for p in pieces for i in ([tokens[p]] if p in tokens else list(p.encode()))]


def allows(constraint: Constraint | None, text: str) -> bool:
    """Whether `text` is a whole answer that the constraint allows."""
    assert constraint is not None
    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    grammar = getattr(llguidance.LLMatcher, f"grammar_from_{constraint.kind}")(constraint.text)
    matcher = llguidance.LLMatcher(made, grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = ids(text, constraint.text)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


def no_control(text: str) -> int | None:
    return None


def grammar(
    markup: str,
    control_id: Callable[[str], int | None] = no_control,
    *,
    required: bool = True,
    parallel: bool = True,
    inside: bool = False,
    may: bool = False,
    tools: bool = True,
    response: Constraint | None = None,
) -> Constraint | None:
    return constraint_of(
        MARKUPS[markup],
        control_id,
        in_reasoning=inside,
        may_reason=may,
        calls=Calls([WEATHER, NOW], required, parallel) if tools else None,
        response=response,
    )


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)  # fmt: skip
SEED = XML.replace("tool_call>", "seed:tool_call>")
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>unit</arg_key>"
    "\n<arg_value>C</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)  # fmt: skip
GLM_INLINE = GLM.replace("\n", "")
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="unit">C</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
)
MINIMAX, MINIMAX_TWO = (
    f"<minimax:tool_call>\n{calls}</minimax:tool_call>" for calls in (INVOKE, INVOKE * 2)
)
LLAMA = '{"name": "weather", "parameters": {"city": "Paris"}}'
MISTRAL = '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
OLD_MISTRAL = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather"
    '\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
)
INLINE = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = (
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|>'
)
GEMMA = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3,unit:<|"|>C<|"|>}<tool_call|>'
FORMS: list[tuple[str, Callable[[str], int | None], str, str]] = [
    ("hermes", no_control, HERMES, f"{HERMES}\n{HERMES}"),
    ("generic", no_control, HERMES, f"{HERMES}\n{HERMES}"),
    ("xml", no_control, XML, f"{XML}\n{XML}"),
    ("seed", no_control, SEED, f"{SEED}\n{SEED}"),
    ("glm", no_control, GLM, f"{GLM}\n{GLM}"),
    ("glm_inline", no_control, GLM_INLINE, GLM_INLINE * 2),
    ("glm", CONTROL.get, GLM, f"{GLM}\n{GLM}"),
    ("minimax", no_control, MINIMAX, MINIMAX_TWO),
    ("minimax", CONTROL.get, f"\n{MINIMAX}", MINIMAX_TWO),
    ("llama", no_control, LLAMA, f"{LLAMA}; {LLAMA}"),
    ("mistral", CONTROL.get, MISTRAL, MISTRAL + MISTRAL),
    ("gemma", no_control, GEMMA, GEMMA + GEMMA),
    ("gemma", CONTROL.get, GEMMA, GEMMA + GEMMA),
    ("deepseek", no_control, f"{BEGIN}{DEEPSEEK}{END}", f"{BEGIN}{DEEPSEEK}\n{DEEPSEEK}{END}"),
    ("deepseek_inline", no_control, f"{BEGIN}{INLINE}{END}", f"{BEGIN}{INLINE}{INLINE}{END}"),
    ("kimi", no_control, f"{SECTION}{KIMI}{SECTION_END}", f"{SECTION}{KIMI}{KIMI}{SECTION_END}"),
]


@pytest.mark.parametrize(("markup", "control_id", "one", "two"), FORMS)
def test_forced_calls(
    markup: str, control_id: Callable[[str], int | None], one: str, two: str
) -> None:
    forced = grammar(markup, control_id)
    assert allows(forced, one)
    assert allows(forced, two)
    assert not allows(grammar(markup, control_id, parallel=False), two)
    assert not allows(forced, "Hello.")
    assert not allows(forced, one.replace("weather", "wether"))
    assert not allows(forced, one.replace("city", "town"))
    form = OutputForm(markup, calls=True, text_parameters={"weather": ("city", "unit")})
    parser = parser_of(form)
    parts = [*parser.push(one), *parser.flush()]
    assert [call.name for call in calls_of(parts)] == ["weather"]
    assert json.loads(arguments_of(parts)[0])["city"] == "Paris"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        *((markup, two) for markup, _, _, two in FORMS),
        ("mistral", f"[TOOL_CALLS]{OLD_MISTRAL[:-1]}, {OLD_MISTRAL[1:]}"),
        ("llama", "[weather(city='Paris', days=3), weather(city='Paris')]"),
    ],
)
@pytest.mark.parametrize("before", ["", "\n", "Let me see.\n\n"])
def test_calls_that_are_cut_anywhere_are_no_text(markup: str, text: str, before: str) -> None:
    """And none has arguments that look whole, since clients run those."""
    if markup == "llama" and before.strip():
        return  # its calls stand at the beginning
    form = OutputForm(markup, calls=True, text_parameters={"weather": ("city", "unit")})
    checked = msgspec.structs.replace(form, checked=True)
    whole = parser_of(form).push(before + text)
    expected = [json.loads(one) for one in arguments_of(whole)]
    assert len(expected) == 2
    opener = next(iter(MARKUPS[markup].forms))
    for end in range(1, len(text)):
        parts = cut_off(checked, before + text[:end])
        shown = plain_text(parts)
        if before.strip() and end < len(opener):  # may be text as well
            assert shown.strip() == before + text[:end]
            continue
        assert shown == before.rstrip()
        for call, arguments in enumerate(arguments_of(parts)):
            with contextlib.suppress(ValueError):
                assert json.loads(arguments) == expected[call]
            assert arguments
        if markup != "llama" and end >= len(opener):
            assert cut_off(form, before + text[:end]) == parts


def cut_off(form: OutputForm, text: str) -> list[OutputPart]:
    parser = parser_of(form)
    return [*parser.push(text), *parser.flush(is_cut=True)]


@pytest.mark.parametrize("text", ['{"name": "f", "age', "[f(a", "a <", "<", "<tool_"])
def test_what_is_no_certain_call_is_text_when_it_is_cut(text: str) -> None:
    for markup in ("llama", "generic"):
        form = OutputForm(markup, calls=True)
        assert plain_text(cut_off(form, text)) == text


@pytest.mark.parametrize(("markup", "control_id", "one", "two"), FORMS)
def test_free_text_that_goes_over_to_calls(
    markup: str, control_id: Callable[[str], int | None], one: str, two: str
) -> None:
    free = grammar(markup, control_id, required=False)
    assert allows(free, "Hello.\nHow < are [you]?")
    assert allows(free, one)
    assert allows(free, two)
    assert not allows(free, one.replace("weather", "wether"))
    if markup != "llama":
        assert allows(free, f"Let me see.\n\n{one}")


@pytest.mark.parametrize(("markup", "control_id", "one", "two"), FORMS)
def test_text_without_calls(
    markup: str, control_id: Callable[[str], int | None], one: str, two: str
) -> None:
    def made(**more: Any) -> Constraint | None:
        fields: dict[str, Any] = {"in_reasoning": False, "may_reason": True, "calls": None}
        return constraint_of(
            MARKUPS[markup], control_id, **{**fields, "response": None, "refuses": True, **more}
        )

    opening, closing = MARKUPS[markup].reasoning[0]
    assert allows(made(), "Hello.\nHow < are [you]? {}")
    assert allows(made(), f"{opening}\nSo.{closing}\n\nHello.")
    assert allows(made(in_reasoning=True), f"So.{closing}\n\nHello.")
    if markup != "llama":  # whose calls are objects, which are text here
        assert not allows(made(), one)
        assert not allows(made(), f"Let me see.\n\n{two}")
    assert made(response=FORMAT, may_reason=False) == FORMAT


def test_old_mistral_lists() -> None:
    only = {"[TOOL_CALLS]": 257}.get
    two = "[TOOL_CALLS]" + OLD_MISTRAL[:-1] + ', {"name": "now", "arguments": {}}]'
    assert allows(grammar("mistral", only), "[TOOL_CALLS]" + OLD_MISTRAL)
    assert allows(grammar("mistral", only), two)
    assert not allows(grammar("mistral", only, parallel=False), two)


def test_reasoning_is_free_in_front() -> None:
    assert allows(grammar("hermes", may=True), HERMES)
    assert allows(grammar("hermes", may=True), f"<think>\nSo.\n</think>\n\n{HERMES}")
    assert allows(grammar("hermes", inside=True), f"So.\n</think>\n\n{HERMES}")
    assert not allows(grammar("hermes", inside=True), HERMES)
    for line in ("", "\n"):
        assert allows(grammar("glm", may=True), f"{line}<think>So.</think>\n{GLM}")
    assert allows(grammar("glm_inline", may=True), f"<think>So.</think>{GLM_INLINE}")
    for control_id in (no_control, CONTROL.get):
        thought = f"<|channel>thought\nSo.\n<channel|>{GEMMA}"
        assert allows(grammar("gemma", control_id, may=True), thought)
        assert allows(grammar("gemma", control_id, may=True), GEMMA)
        inside = grammar("gemma", control_id, inside=True)
        assert allows(inside, thought.removeprefix("<|channel>thought"))
    thought = f"[THINK]So.[/THINK]{MISTRAL}"
    assert allows(grammar("mistral", CONTROL.get, may=True), thought)


@pytest.mark.parametrize(
    ("response", "good", "bad"),
    [
        (FORMAT, '{"a": 1}', '{"a": "x"}'),
        (Constraint("regex", r"a/b\/[0-9]+"), "a/b/12", "a/b/"),
        (Constraint("lark", 'start: "a" x\nx: "b"\n'), "ab", "ac"),
    ],
)
def test_formats(response: Constraint, good: str, bad: str) -> None:
    assert grammar("hermes", tools=False, response=response) == response
    inside = grammar("hermes", tools=False, response=response, inside=True)
    assert allows(inside, f"So.</think>\n\n{good}")
    assert not allows(inside, f"So.</think>\n\n{bad}")
    either = grammar("hermes", required=False, response=response)
    assert allows(either, good)
    assert allows(either, HERMES)
    assert not allows(either, "Hello.")


def test_patterns_that_look_around_are_left_out() -> None:
    mail = {"type": "string", "pattern": "^(?!a)b", "maxLength": 2}
    schema = {"type": "object", "properties": {"a": mail}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    forced = constraint_of(
        MARKUPS["hermes"],
        no_control,
        in_reasoning=False,
        may_reason=False,
        calls=Calls([tool], True, False),
        response=None,
    )
    head = '<tool_call>\n{"name": "f", "arguments": {"a": '
    assert allows(forced, head + '"xy"}}\n</tool_call>')
    assert not allows(forced, head + '"xyz"}}\n</tool_call>')
    response = Constraint("json_schema", json.dumps(schema))
    assert allows(grammar("hermes", tools=False, response=response), '{"a":"xy"}')


@pytest.mark.parametrize(
    "more",
    [
        {"$schema": "http://json-schema.org/schema#"},
        {"$schema": "https://json-schema.org/draft-07/schema"},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"$schema": 7},
        {"properties": {"b": {"type": "object", "required": None, "properties": None}}},
    ],
)
def test_other_names_of_a_dialect_and_lists_that_are_null_do_not_keep_a_schema_from_being_read(
    more: dict[str, Any],
) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "object"}}, "required": ["b"]} | more
    response = Constraint("json_schema", json.dumps(schema))
    constraint = grammar("hermes", tools=False, response=response)
    assert allows(constraint, '{"b":{}}')
    assert not allows(constraint, '{"b":1}')


def test_definitions_that_every_parameter_repeats_are_bounded() -> None:
    """They stand beside each value of a call in XML."""
    fields = {f"p{number}": {"type": "integer"} for number in range(1000)}
    schema = {"properties": fields, "$defs": {"a": {"const": "x" * 10_000}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(BatchEngineError, match="more than 1048576 characters") as caught:
        constraint_of(
            MARKUPS["xml"],
            no_control,
            in_reasoning=False,
            may_reason=False,
            calls=Calls([tool], True, False),
            response=None,
        )
    assert caught.value.param == "tools"


def test_properties_whose_schema_is_no_object() -> None:
    """true allows any value, false none."""
    fields = {"any": True, "none": False, "odd": None}
    function = {"name": "f", "parameters": {"type": "object", "properties": fields}}
    tool: Any = {"type": "function", "function": function}
    calls = Calls([tool], required=True, parallel=False)
    made = constraint_of(
        MARKUPS["xml"], no_control, in_reasoning=False, may_reason=False, calls=calls, response=None
    )

    def call(name: str, value: str) -> str:
        parameter = f"<parameter={name}>\n{value}\n</parameter>"
        return f"<tool_call>\n<function=f>\n{parameter}\n</function>\n</tool_call>"

    assert allows(made, call("any", '{"a": [1]}'))
    assert allows(made, call("odd", "3"))
    assert not allows(made, call("none", "3"))


@pytest.mark.parametrize("control_id", [no_control, CONTROL.get])
def test_values_of_pairs_follow_their_schemas(control_id: Callable[[str], int | None]) -> None:
    """A text is as it is, also with line ends and marks of other forms; other values are JSON."""
    fields = {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}
    function = {"name": "f", "parameters": {"properties": fields, "required": ["a", "b"]}}
    tool: Any = {"type": "function", "function": function}
    calls = Calls([tool, NOW], required=True, parallel=False)
    made = constraint_of(
        MARKUPS["glm"],
        control_id,
        in_reasoning=False,
        may_reason=False,
        calls=calls,
        response=None,
    )

    def call(a: str, b: str) -> str:
        first = f"<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>"
        second = f"<arg_key>b</arg_key>\n<arg_value>{b}</arg_value>"
        return f"<tool_call>f\n{first}\n{second}\n</tool_call>"

    text = '\n x "</parameter>\n'
    assert allows(made, call(text, "[1, 2]"))
    assert allows(made, call("", "[]"))
    assert not allows(made, call("x", '["1"]'))
    assert not allows(made, call("x", "1"))
    assert allows(made, "<tool_call>now\n</tool_call>")
    parser = parser_of(OutputForm("glm", calls=True, text_parameters={"f": ("a",)}))
    parts = [*parser.push(call(text, "[1, 2]")), *parser.flush()]
    assert json.loads(arguments_of(parts)[0]) == {"a": text, "b": [1, 2]}


PATTERN_FORMS = [
    ("glm", "<tool_call>f\n<arg_key>input</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="input">',
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "xml",
        "<tool_call>\n<function=f>\n<parameter=input>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize("control_id", [no_control, CONTROL.get])
@pytest.mark.parametrize(("markup", "head", "end"), PATTERN_FORMS)
def test_a_pattern_of_a_text_without_quotes(
    markup: str, head: str, end: str, control_id: Callable[[str], int | None]
) -> None:
    function = {"name": "f", "parameters": {"required": ["input"]}}
    tool: Any = {"type": "function", "function": function, PATTERN: "^a/[0-9]+\n?$"}
    calls = Calls([tool], required=True, parallel=False)
    made = constraint_of(
        MARKUPS[markup],
        control_id,
        in_reasoning=False,
        may_reason=False,
        calls=calls,
        response=None,
    )
    assert allows(made, f"{head}a/12\n{end}")
    assert allows(made, f"{head}a/12{end}")
    assert not allows(made, f"{head}b/12{end}")


TAG_FORMS = [
    ("xml", "<tool_call>\n<function=f>\n", "\n</function>\n</tool_call>"),
    ("minimax", '<minimax:tool_call>\n<invoke name="f">\n', "\n</invoke>\n</minimax:tool_call>"),
]


@pytest.mark.parametrize("key", ["k>", "<k", "k\n", " k", "", "k" * 257, "</parameter>"])
@pytest.mark.parametrize(("markup", "head", "end"), TAG_FORMS)
def test_names_of_parameters_that_no_tag_can_have_are_in_an_object(
    markup: str, head: str, end: str, key: str
) -> None:
    schema = {"properties": {key: {"type": "integer"}, "b": {"type": "string"}}, "required": [key]}
    function = {"name": "f", "parameters": {"type": "object", **schema}}
    tool: Any = {"type": "function", "function": function}
    made = constraint_of(
        MARKUPS[markup],
        no_control,
        in_reasoning=False,
        may_reason=False,
        calls=Calls([tool], required=True, parallel=False),
        response=None,
    )
    arguments = json.dumps({key: 12, "b": "x"})
    assert allows(made, f"{head}{arguments}{end}")
    assert not allows(made, f"{head}{json.dumps({'b': 'x'})}{end}")
    parser = parser_of(OutputForm(markup, calls=True, text_parameters={"f": ("b",)}))
    parts = [*parser.push(f"{head}{arguments}{end}"), *parser.flush()]
    assert json.loads("".join(arguments_of(parts))) == {key: 12, "b": "x"}


def test_nothing_is_constrained_without_need() -> None:
    assert grammar("hermes", tools=False, may=True) is None
