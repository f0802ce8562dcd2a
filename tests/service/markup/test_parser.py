"""The parser of answers with markup: recorded forms of each, cuts, and broken calls."""

from __future__ import annotations

import itertools
import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.core import OutputForm
from batchengine.markup import BREAK, MARKUPS, markup_of
from service.protocols.markup.parser import parser_of
from service.protocols.output import (
    CallArguments,
    CallStart,
    OutputPart,
    arguments_of,
    calls_of,
    plain_text,
    reasoning_text,
)


def parts_of(
    text: str, cuts: list[int] | None = None, *, is_cut: bool = False, **fields: Any
) -> list[OutputPart]:
    """The parts of an answer that arrives in pieces; parts of one kind joined."""
    parser = parser_of(OutputForm(**({"markup": "hermes", "calls": True} | fields)))
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts or ()), len(text)]
    found: list[OutputPart] = []
    for start, end in itertools.pairwise(bounds):
        found += parser.push(text[start:end])
    found += parser.flush(is_cut=is_cut)
    joined: list[OutputPart] = []
    for _, equal in itertools.groupby(found, lambda part: (type(part), part[:-1])):
        same = list(equal)
        if len(same) > 1:  # joined at once: one by one would copy the text for each part
            text = "".join([part[-1] for part in same])
            same = [same[0]._replace(**{same[0]._fields[-1]: text})]
        joined += same
    return joined


def summary(parts: list[OutputPart]) -> tuple[str, str, list[tuple[str, object]]]:
    calls = [(one.name, json.loads(arguments_of(parts)[one.call])) for one in calls_of(parts)]
    return reasoning_text(parts), plain_text(parts), calls


SEARCH = '{"query": "a </tool_call> \\" b", "limit": 3}'
ARGUMENTS = {"query": 'a </tool_call> " b', "limit": 3}
XML = (
    "<tool_call>\n<function=search>\n<parameter=query>\nline 1\n\"2\" </function>\n</parameter>\n"
    "<parameter=limit>\n3\n</parameter>\n<parameter=code>\n007\n</parameter>\n"
    "<parameter=deep>\n{\"a\": [1]}\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n"
    "</function>\n</tool_call>"
)  # fmt: skip
GLM = (
    "<tool_call>search\n<arg_key>query</arg_key>\n"
    "<arg_value>line 1\n\"2\" </function></arg_value>\n"
    "<arg_key>limit</arg_key>\n<arg_value>3</arg_value>\n<arg_key>code</arg_key>\n"
    "<arg_value>007</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>{\"a\": [1]}</arg_value>\n"
    "<arg_key>flag</arg_key>\n<arg_value>true</arg_value>\n</tool_call>"
)  # fmt: skip
GLM_INLINE = re.sub(r"\n(?=<)", "", GLM)
XML_ARGUMENTS = {
    "query": 'line 1\n"2" </function>', "limit": 3, "code": "007", "deep": {"a": [1]}, "flag": True,
}  # fmt: skip
GEMMA = (
    '<|tool_call>call:search{query:<|"|>line 1\n"2" </function> {a:1},[]<|"|>,limit:3,'
    'code:<|"|>007<|"|>,deep:{a:[1]},flag:true}<tool_call|>'
)
RECORDED: list[tuple[str, str, tuple[str, str, list[tuple[str, object]]]]] = [
    (
        "hermes",
        "Let me look.\n\n<tool_call>\n"
        f'{{"name": "search", "arguments": {SEARCH}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ("", "Let me look.", [("search", ARGUMENTS), ("now", {})]),
    ),
    (
        "hermes",
        "<think>\nI need\n\nit.\n</think>\n\n"
        f'<tool_call>{{"arguments": {SEARCH}, "name": "search"}}',
        ("I need\n\nit.", "", [("search", ARGUMENTS)]),
    ),
    ("hermes", "<think>\n\n</think>\n\nHi <b>\n", ("", "Hi <b>\n", [])),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}',
        ("", "", [("f", {"a": 1})]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", {})])),
    ("xml", XML, ("", "", [("search", XML_ARGUMENTS)])),
    ("xml", XML.removeprefix("<tool_call>\n"), ("", "", [("search", XML_ARGUMENTS)])),
    ("xml", "<tool_call><function=now></function></tool_call>", ("", "", [("now", {})])),
    (
        "glm",
        f"\n<think>why\n</think>\nhm\n{GLM}\n<tool_call>now\n</tool_call>",
        ("why", "hm", [("search", XML_ARGUMENTS), ("now", {})]),
    ),
    (
        "glm_inline",
        f"<think>why</think>hm{GLM_INLINE}<tool_call>now</tool_call>",
        ("why", "hm", [("search", XML_ARGUMENTS), ("now", {})]),
    ),
    ("glm", GLM_INLINE, ("", "", [("search", XML_ARGUMENTS)])),
    ("glm_inline", GLM, ("", "", [("search", XML_ARGUMENTS)])),
    (
        "glm",
        GLM.removesuffix("\n</tool_call>") + " Done.",
        ("", "Done.", [("search", XML_ARGUMENTS)]),
    ),
    ("glm", XML, ("", "", [("search", XML_ARGUMENTS)])),
    (
        "glm",
        f'<tool_call>{{"name": "search", "arguments": {SEARCH}}}</tool_call>',
        ("", "", [("search", ARGUMENTS)]),
    ),
    (
        "glm",
        "<tool_call>search\n<arg_key>query</arg_key><arg_value></arg_value>"
        "<arg_key>code</arg_key><arg_value> <arg_key>x</tool_call></arg_value></tool_call>",
        ("", "", [("search", {"query": "", "code": " <arg_key>x</tool_call>"})]),
    ),
    (
        "gemma",
        f"<|channel>thought\nwhy\n<channel|>hm {GEMMA}<|tool_call>call:now{{}}<tool_call|>",
        (
            "why",
            "hm",
            [
                ("search", XML_ARGUMENTS | {"query": XML_ARGUMENTS["query"] + " {a:1},[]"}),
                ("now", {}),
            ],
        ),
    ),
    ("gemma", "<|channel>thought\n<channel|>Hi.", ("", "Hi.", [])),
    (
        "gemma",
        "a <|channel>thought\nwhy<channel|> b<|channel>thought\n\n<channel|>"
        "<|channel>thought\nso<channel|>",
        ("why\n\nso", "a b", []),
    ),
    (
        "gemma",
        '<|tool_call> call:f { <|"|>a:b<|"|> : <|"|><|"|> , "c" : "x\\ty", d : [ ], e:{ }, }'
        " <tool_call|> after",
        ("", " after", [("f", {"a:b": "", "c": "x\ty", "d": [], "e": {}})]),
    ),
    (
        "gemma",
        "<|tool_call>call:ns.f-1{a:null,b:-1.5e3,c:False,d:New York,e:[<|"
        '"|>x<|"|>,{f:[[],[1,]]},nan],f g:[{}]}<tool_call|>',
        (
            "",
            "",
            [
                (
                    "ns.f-1",
                    {
                        "a": None,
                        "b": -1500,
                        "c": False,
                        "d": "New York",
                        "e": ["x", {"f": [[], [1]]}, "nan"],
                        "f g": [{}],
                    },
                )
            ],
        ),
    ),
    (
        "gemma",
        '<|tool_call>call:f{a:<|"|><tool_call|><|tool_call>call:g{}<|channel><|"|>}<tool_call|>',
        ("", "", [("f", {"a": "<tool_call|><|tool_call>call:g{}<|channel>"})]),
    ),
    (
        "gemma",
        f'<tool_call>{{"name": "search", "arguments": {SEARCH}}}</tool_call>',
        ("", "", [("search", ARGUMENTS)]),
    ),
    (
        "seed",
        f"<seed:think>why</seed:think>hm {XML.replace('tool_call>', 'seed:tool_call>')}",
        ("why", "hm", [("search", XML_ARGUMENTS)]),
    ),
    (
        "llama",
        f'<|python_tag|>{{"type": "function", "name": "search", "parameters": {SEARCH}}}',
        ("", "", [("search", ARGUMENTS)]),
    ),
    (
        "llama",
        f' {{"name": "search", "parameters": {SEARCH}}}; {{"name": "now", "parameters": {{}}}}',
        ("", "", [("search", ARGUMENTS), ("now", {})]),
    ),
    ("llama", '{"name": "Bob", "age": 5}', ("", '{"name": "Bob", "age": 5}', [])),
    ("llama", '{"name": "Bob"}', ("", '{"name": "Bob"}', [])),
    ("llama", f"<function=search>{SEARCH}</function>", ("", "", [("search", ARGUMENTS)])),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "search", "arguments": {SEARCH}, "id": "abcdefghi"}},'
        ' {"name": "now", "arguments": {}}]',
        ("", "", [("search", ARGUMENTS), ("now", {})]),
    ),
    (
        "mistral",
        f"[THINK]So.[/THINK]Wait.[TOOL_CALLS]search[CALL_ID]abc123456[ARGS]{SEARCH}"
        "[TOOL_CALLS]now[ARGS]{}",
        ("So.", "Wait.", [("search", ARGUMENTS), ("now", {})]),
    ),
    ("generic", XML, ("", "", [("search", XML_ARGUMENTS)])),
    (
        "deepseek",
        "<think>\nSo.\n</think>\n\nWait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search"
        f"\n```json\n{SEARCH}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}"
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("So.", "Wait.", [("search", ARGUMENTS), ("now", {})]),
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{SEARCH}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("", "", [("search", ARGUMENTS)]),
    ),
    (
        "deepseek",
        f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{SEARCH}",
        ("", "", [("search", ARGUMENTS)]),
    ),
    ("deepseek", XML, ("", "", [("search", XML_ARGUMENTS)])),
    (
        "llama",
        """[search(query='a </tool_call> " b', limit=3), now()]""",
        ("", "", [("search", ARGUMENTS), ("now", {})]),
    ),
    (
        "llama",
        r"""[f( a = {'b': [1, True, None]}, c="d'\n)", e = -1.5, g=("x",), h=raw)]""",
        (
            "",
            "",
            [("f", {"a": {"b": [1, True, None]}, "c": "d'\n)", "e": -1.5, "g": ["x"], "h": "raw"})],
        ),
    ),
    ("llama", "[text](http://a) and (b)", ("", "[text](http://a) and (b)", [])),
    ("llama", "[see(it), or not]", ("", "[see(it), or not]", [])),
    ("llama", "[1, 2]", ("", "[1, 2]", [])),
    (
        "llama",
        f'<tool_call>{{"name": "f", "arguments": {SEARCH}}}</tool_call>',
        ("", "", [("f", ARGUMENTS)]),
    ),
    ("generic", f"[TOOL_CALLS]search{SEARCH}", ("", "", [("search", ARGUMENTS)])),
    ("generic", "Just < text [with] {braces}.", ("", "Just < text [with] {braces}.", [])),
]
TEXTS = {"search": ("query", "code")}


@pytest.mark.parametrize(("markup", "text", "expected"), RECORDED)
def test_recorded_answers(markup: str, text: str, expected: tuple[Any, ...]) -> None:
    parts = parts_of(text, markup=markup, text_parameters=TEXTS)
    assert summary(parts) == expected
    assert parts_of(text, list(range(len(text))), markup=markup, text_parameters=TEXTS) == parts


BROKEN = [
    ("hermes", '<tool_call>{"nam": 3} </tool_call> x'),
    ("hermes", "<tool_call> no call </tool_call>"),
    ("hermes", '<tool_call>{"name": <tool_call>'),
    ("hermes", '<tool_call>{"name": ""}'),
    ("xml", "<tool_call>\n<function=a\nb>"),
    ("xml", "<function=>x"),
    ("glm", "<tool_call> no call </tool_call>"),
    ("glm", "<tool_call></tool_call>"),
    ("glm", "<tool_call>f\n<arg_value>1</arg_value></tool_call>"),
    ("glm", "<tool_call>f"),
    ("minimax", "<minimax:tool_call>\n</minimax:tool_call>"),
    ("minimax", "<minimax:tool_call>now</minimax:tool_call>"),
    ("minimax", '<minimax:tool_call>\n<invoke name="f" </invoke>'),
    ("minimax", '<invoke name=" "></invoke>'),
    ("minimax", '<invoke name="a\nb">'),
    ("minimax", "<tool_call>{}</tool_call>"),
    ("hermes", "<tool_call>f</tool_call>"),
    ("gemma", "<|tool_call>weather{}<tool_call|>"),
    ("gemma", "<|tool_call>call:{}<tool_call|>"),
    ("gemma", "<|tool_call>call:f<tool_call|>"),
    ("gemma", "<|tool_call>call:f"),
    ("gemma", "< | <|tool call> |> <|channel>final<channel|>"),
    ("llama", '<|python_tag|>search.call(query="x")'),
    ("llama", '{"name": "f", "parameters'),
    ("mistral", "[TOOL_CALLS] what?"),
    ("deepseek", "<｜tool▁calls▁begin｜> what?"),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]",
    ),
    ("llama", "[f(a"),
    ("llama", "[f(a, b=1)]"),
    ("llama", "[f(1)]"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", "[TOOL_CALLS]search[ARGS]nothing"),
]


@pytest.mark.parametrize(("markup", "text"), BROKEN)
def test_a_broken_call_is_text(markup: str, text: str) -> None:
    assert summary(parts_of(text, markup=markup)) == ("", text, [])


def test_a_call_after_a_broken_one_is_found() -> None:
    text = '<tool_call>{"name": <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert summary(parts_of(text)) == ("", '<tool_call>{"name":', [("f", {})])


def test_a_call_that_is_cut_off_keeps_what_was_written() -> None:
    parts = parts_of('<tool_call>{"name": "f", "arguments": {"a": "x')
    assert [type(part).__name__ for part in parts] == ["CallStart", "CallArguments"]
    assert arguments_of(parts)[0] == '{"a": "x'


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<arg_key>a", "{"),
        ("<arg_key>a</arg_key>", "{"),
        ("<arg_key>a</arg_key> b", "{"),
        ("<arg_key>a</arg_key><arg_value>", '{"a": '),
        ("<arg_key>a</arg_key><arg_value>1", '{"a": '),
        ("<arg_key>a</arg_key><arg_value>1</arg_value>", '{"a": 1'),
        ("<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>", '{"a": 1, '),
        ("<arg_key>t</arg_key><arg_value>x</arg_v", '{"t": "x</arg_v'),
    ],
)
def test_pairs_that_are_wrong_or_end_early_are_no_json(text: str, arguments: str) -> None:
    """No client runs such a call."""
    parts = parts_of(f"<tool_call>f\n{text}", markup="glm", text_parameters={"f": ("t",)})
    assert arguments_of(parts)[0] == arguments


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", "{"),
        ("a", "{a"),
        ("a}", "{a}"),
        ("a,b:1}", "{a,b:1}"),
        ('<|"|>a<|"|>}', '{<|"|>a<|"|>}'),
        ("a:", '{"a": '),
        ("a:}", '{"a": }'),
        ("a:,b:1}", '{"a": ,b:1}'),
        ("a:12", '{"a": 12'),
        ("a:1,2}", '{"a": 1, 2}'),
        ("a:1]}", '{"a": 1]}'),
        ("a:[1}}", '{"a": [1}}'),
        ("a:[1,2", '{"a": [1, 2'),
        ('a:<|"|>x', '{"a": "x'),
        ('a:<|"|>x}<tool_call|>', '{"a": "x}<tool_call|>'),
        ('a:<|"|>x<|"|>y}', '{"a": "x"y}'),
        ('a:1<|"|>x<|"|>}', '{"a": 1<|"|>x<|"|>}'),
        ("{a:1}}", "{{a:1}}"),
        (",a:1}", "{,a:1}"),
        ('"a\\', '{"a\\'),
        ("a:{b:1},", '{"a": {"b": 1}, '),
    ],
)
@pytest.mark.parametrize("end", ["", "<tool_call|>", "<|tool_call>call:g{}<tool_call|>"])
def test_fields_that_are_wrong_or_end_early_are_no_json(
    text: str, arguments: str, end: str
) -> None:
    parts = parts_of(f"<|tool_call>call:f{{{text}{end}", markup="gemma")
    found = arguments_of(parts)[0]
    with pytest.raises(ValueError, match=r"."):
        json.loads(found)
    if not end:
        assert found == arguments
    assert plain_text(parts) == ""


def test_a_call_behind_a_wrong_one_is_found() -> None:
    text = "<|tool_call>call:f{a:1 <|tool_call>call:g{b:2}<tool_call|>Done."
    parts = parts_of(text, markup="gemma")
    assert [call.name for call in calls_of(parts)] == ["f", "g"]
    assert arguments_of(parts) == ['{"a": 1', '{"b": 2}']
    assert plain_text(parts) == "Done."


def test_fields_come_while_they_are_written() -> None:
    parser = parser_of(OutputForm("gemma", calls=True))
    assert parser.push("Hi <|tool_call>call:f{t") == [("Hi",), CallStart(0, "f"), (0, "{")]
    assert parser.push(':<|"|>a"<') == [CallArguments(0, '"t": "a\\"')]
    assert parser.push("b<|") == [CallArguments(0, "<b")]
    assert parser.push('"|>,n:1') == [CallArguments(0, '", "n": ')]
    assert parser.push("2}<tool") == [CallArguments(0, "12}")]
    assert parser.push("_call|>") == []


def test_what_has_breaks_is_no_mark() -> None:
    """Tokens that are no marks have spelled them; the model's own characters are shown."""
    spelled = [f"<{BREAK}|tool_call>call:f{{}}", f"<{BREAK}|channel>thought", f"<channel|{BREAK}>"]
    text = " ".join(spelled)
    quote = f'<{BREAK}|"|{BREAK}>'
    call = f'<|tool_call>call:f{{a:<|"|>{text}{quote}<|"|>,b:x{quote}}}<tool_call|>'
    parts = parts_of(f"<|channel>thought\n{text}<channel|>{text}{call}", markup="gemma")
    shown, mark = text.replace(BREAK, ""), '<|"|>'
    assert summary(parts) == (shown, shown, [("f", {"a": shown + mark, "b": f"x{mark}"})])


def test_values_of_pairs_come_while_they_are_written() -> None:
    parser = parser_of(OutputForm("glm", calls=True, text_parameters={"f": ("t",)}))
    assert parser.push("Hi <tool_call>f\n<arg_k") == [("Hi",)]
    found = parser.push('ey>t</arg_key>\n<arg_value>a"')
    assert [type(part) for part in found[1:]] == [CallArguments] * len(found[1:])
    assert parser.push("b</arg") == [CallArguments(0, "b")]
    assert parser.push("_value>") == [CallArguments(0, '"')]
    assert parser.push("</tool_call>") == [CallArguments(0, "}")]


def test_raw_line_breaks_in_arguments_are_escaped() -> None:
    parts = parts_of('<tool_call>{"name": "f", "arguments": {"a": "x\ny\t"}}</tool_call>')
    assert summary(parts)[2] == [("f", {"a": "x\ny\t"})]


def test_reasoning_of_a_prompt_that_ends_inside_it() -> None:
    parts = parts_of("So.\n</think>\n\nYes.", in_reasoning=True, calls=False)
    assert summary(parts) == ("So.", "Yes.", [])
    assert summary(parts_of("So. ", in_reasoning=True)) == ("So.", "", [])


def test_reasoning_stands_only_at_the_beginning() -> None:
    text = "Write <think> to think, </think> to end."
    assert summary(parts_of(text)) == ("", text, [])


def test_arguments_come_while_they_are_written() -> None:
    parser = parser_of(OutputForm("hermes", calls=True))
    assert parser.push('Hi <tool_call>\n{"name": "f", "arg') == [("Hi",)]
    assert [type(p) for p in parser.push('uments": {"a": "x')][1:] == [CallArguments]
    assert parser.push("yz") == [CallArguments(0, "yz")]
    assert parser.push('"}}') == [CallArguments(0, '"}')]


MARKUP = st.sampled_from(
    [
        *sorted(MARKUPS["generic"].markers | MARKUPS["glm"].markers | MARKUPS["gemma"].markers),
        *sorted(MARKUPS["minimax"].markers), '<parameter name="', '">', "</invoke>",
        "call:f{", BREAK,
        "<think>", "</think>", "[THINK]", "[/THINK]",
        "</function>", "<parameter=", "</parameter>", ">", "{", "}", "[", "]", '"', "\\", ":", ",",
        ";", '"name"', '"arguments"', '"parameters"', '"function"', "f", " ", "\n", "1", "true",
        '{"name": "f", "arguments": {"a": 1}}', "é", "<",
    ]
)  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(MARKUP, max_size=30).map("".join),
    st.lists(st.integers(0, 1000), max_size=12),
    st.fixed_dictionaries(
        {
            "markup": st.sampled_from(sorted(MARKUPS)),
            "in_reasoning": st.booleans(),
            "checked": st.booleans(),
            "is_cut": st.booleans(),
        }
    ),
)
def test_parts_do_not_depend_on_cuts(text: str, cuts: list[int], fields: dict[str, Any]) -> None:
    whole = parts_of(text, **fields)
    assert parts_of(text, cuts, **fields) == whole
    assert parts_of(text, list(range(len(text))), **fields) == whole


@settings(deadline=None)
@given(
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=80),
    st.sampled_from(["hermes", "mistral", "harmony"]),
)
def test_text_without_markup_is_never_changed(text: str, markup: str) -> None:
    if not any(marker in text for marker in MARKUPS[markup].markers):
        assert plain_text(parts_of(text, markup=markup)) == text
        assert plain_text(parts_of(text, markup=markup, calls=False)) == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 20_000,
        '<tool_call>{"a": ' + '"x", "a": ' * 20_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a": [' * 30_000,
        "<" * 100_000,
        "<｜tool▁call▁begin｜>function" * 20_000,
        "<tool_call>{" + " " * 100_000,
        "<function=f><parameter=a>" + "\n" * 50_000 + "</parameter" * 5_000,
        "<tool_call>f<arg_key>" + "a" * 50_000,
        "<tool_call>f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 5_000,
        "<tool_call>f<arg_key>a</arg_key><arg_value>" + "</arg_valu" * 10_000,
        "<tool_call>f " * 20_000,
        "<minimax:tool_call>" * 20_000,
        '<minimax:tool_call><invoke name="f">' * 20_000,
        '<invoke name="f"><parameter name="' + "a" * 50_000,
        '<invoke name="f">' + '<parameter name="a">1</parameter>' * 5_000,
        '<invoke name="f"><parameter name="a">' + "</paramete" * 10_000,
        '<invoke name="f"></invoke>' * 10_000,
        "<|tool_call>" * 20_000,
        "<|tool_call>call:f{" + "a:{" * 50_000,
        "<|tool_call>call:f{a:" + "[" * 50_000 + "]" * 50_000,
        "<|tool_call>call:f{" + "a:1," * 30_000 + "}",
        "<|tool_call>call:f{a:" + "9" * 100_000 + "}",
        "<|tool_call>call:f{a:" + "<" * 50_000 + "<|" * 20_000,
        '<|tool_call>call:f{a:<|"|>' + '<|"|' * 20_000,
        "<|tool_call>call:f{" + '<|"|>a<|"|>' * 20_000,
        "<|channel>thought" * 20_000,
        "<|start|>" * 20_000,
        "<|channel|>analysis" * 20_000,
        "<|channel|>final<|message|>" + "<|end|> " * 20_000,
        "<|channel|>commentary to=f<|message|>" + '{"a": [' * 30_000,
    ],
)
def test_hostile_answers_cost_time_in_proportion(text: str) -> None:
    began = time.process_time()
    markup = "harmony" if "|" in text else "glm" if "_call>f" in text else "hermes"
    markup = "gemma" if text.startswith(("<|tool_call>", "<|channel>")) else markup
    markup = "minimax" if text.startswith(("<minimax", "<invoke")) else markup
    parts_of(text, list(range(0, len(text), 7)), markup=markup)
    parts_of(text, markup=markup)
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("inner", ["1,", "[],", '"",', "\\n"])
def test_a_text_that_arrives_at_once_costs_time_in_proportion(inner: str) -> None:
    """As one of the ledger does."""
    opening, end = '<tool_call>{"name": "f", "arguments": {"a": ', "}}</tool_call>"
    pair = ('"', '"') if inner == "\\n" else ("[", "1]")
    text = opening + pair[0] + inner * (300_000 // len(inner)) + pair[1] + end
    began = time.process_time()
    parts = parts_of(text)
    assert time.process_time() - began < 2.5
    assert arguments_of(parts)[0] == text[len(opening) - len('{"a": ') : -len("}</tool_call>")]


def test_a_markup_is_chosen_by_template_then_vocabulary() -> None:
    def no_token(text: str) -> bool:
        return False

    assert markup_of("x <tool_call> y", no_token).name == "hermes"
    assert markup_of("<tool_call>\n<function=", no_token).name == "xml"
    assert markup_of("<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>", no_token).name == "glm"
    inline = "<tool_call>f<arg_key>k</arg_key><arg_value>"
    assert markup_of(inline, no_token).name == "glm_inline"
    assert markup_of("<seed:tool_call>\n<function=", no_token).name == "seed"
    assert markup_of("{% set begin = '<minimax:tool_call>' %}", no_token).name == "minimax"
    assert markup_of("]~b]ai", "<minimax:tool_call>".__eq__).name == "minimax"
    assert markup_of("{{ '[TOOL_CALLS]' }}", no_token).name == "mistral"
    assert markup_of("<|start_header_id|>", no_token).name == "llama"
    assert markup_of("<|im_start|>", no_token).name == "generic"
    begins = "{{'<｜tool▁calls▁begin｜>'}}"
    assert markup_of(f"{begins}\n```json\n", no_token).name == "deepseek"
    assert markup_of(f"{{{{ '```json' }}}}\n{begins}", no_token).name == "deepseek"
    assert markup_of(f"{{{{ '```' }}}}\n{begins}", no_token).name == "deepseek_inline"
    assert markup_of("<|im_start|>", "<tool_call>".__eq__).name == "hermes"
    assert markup_of("{{ '<|tool_call>call:' }}", no_token).name == "gemma"
    assert markup_of("<|turn>user", "<|tool_call>".__eq__).name == "gemma"
