"""Kimi K2: calls with numbers in their ids, in prompts, answers and histories."""

from __future__ import annotations

import asyncio
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.core import OutputForm
from batchengine.markup import BREAK, markup_of
from batchengine.text.encoder import TextEncoder
from batchengine.text.frontend import TextFrontend
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from service.protocols import append
from service.protocols.conversation import ToolChoice
from service.protocols.markup.history import MissingNames, prepare_later
from service.protocols.markup.parser import parser_of
from service.protocols.output import CallArguments, Text, arguments_of, calls_of, plain_text
from tests.service.markup.test_glm import OTHERS, TEXTS, prompt_of, weather
from tests.service.markup.test_grammars import NOW, WEATHER, allows
from tests.service.markup.test_parser import parts_of, summary
from tests.text.harmony import shown
from tests.text.test_tokenizer import CONTROL, NORMAL, USER, byte_alphabet, write_vocab

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKS = (BEGIN, END, CALL, ARGUMENTS, CALL_END)
ENDS = "<|im_end|>"
CONTROLS = (ENDS, "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
CALLS = f"""{BEGIN}
{{%- for call in m.tool_calls %}}{{% set id = ID %}}{CALL}{{{{ id }}}}{ARGUMENTS}
{{{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}}}{CALL_END}
{{%- endfor %}}{END}"""
TEMPLATE = """
{%- set ns = namespace(count=0, ids=[]) %}
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_system|>{{ m.name or "tool" }}<|im_middle|>## Return of RETURN
{{ m.content }}
{%- elif m.role == "assistant" %}<|im_assistant|>assistant<|im_middle|>THOUGHT{{ m.content }}
{%- if m.tool_calls %}CALLS{% endif %}
{%- else %}<|im_user|>{{ m.role }}<|im_middle|>{{ m.content }}
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
# What templates print as the id of a call, and in front of a result.
PRINTS = {
    "ids": ("call.id", "{{ m.tool_call_id }}"),
    "counts": (
        "'functions.' ~ call.function.name ~ ':' ~ ns.count %}{% set ns.count = ns.count + 1 %}"
        "{% set _ = ns.ids.append(id)",
        "{{ ns.ids.pop(0) }}",
    ),
    "places": ("'functions.' ~ call.function.name ~ ':' ~ loop.index0", "{{ m.tool_call_id }}"),
}
THOUGHT = "<think>{{ m.reasoning_content or '' }}</think>"
ASKED = {"role": "user", "content": "hi"}


def encoder(
    path: Path, prints: str = "ids", *, kind: int = CONTROL, thinks: bool = True
) -> TextEncoder:
    own, result = PRINTS[prints]
    template = TEMPLATE.replace("CALLS", CALLS.replace("ID", own)).replace("RETURN", result)
    template = template.replace("THOUGHT", THOUGHT if thinks else "")
    tokens = [*((one, NORMAL) for one in byte_alphabet()), ("th", NORMAL)]
    tokens += [*((one, CONTROL) for one in CONTROLS), *((one, kind) for one in MARKS)]
    tokens += [("<think>", kind), ("</think>", kind)] * thinks
    write_vocab(
        path / "kimi.gguf",
        "gpt2",
        tokens,
        tokenizer_pre="kimi-k2",
        token_merges=["t h"],
        eos_token_id=257,
        chat_template=template,
    )
    text = TextEncoder(
        Tokenizer(path / "kimi.gguf"), Renderer(template, datetime.date(2026, 2, 3), 1 << 20)
    )
    assert (text.markup.name, text.markup.writes) == ("kimi", "named")
    return text


@pytest.fixture(params=list(PRINTS))
def text(request: pytest.FixtureRequest, tmp_path: Path) -> TextEncoder:
    return encoder(tmp_path, request.param)


def written(name: str = "weather", number: int = 0, **arguments: Any) -> str:
    """A call as the model writes it."""
    body = json.dumps(arguments, ensure_ascii=False)
    return f"{CALL}functions.{name}:{number}{ARGUMENTS}{body}{CALL_END}"


def section(*calls: str) -> str:
    return f"{BEGIN}{''.join(calls)}{END}"


def result(call: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


def test_an_answer_stands_in_the_next_prompt_as_the_model_wrote_it(text: TextEncoder) -> None:
    """With the ids of this server, whose numbers are those that the model has written."""
    first = prompt_of(text, [ASKED], tools=[WEATHER])
    prompt = shown(text, first.tokens[0])
    both = {"city": 'Paris "1"\n', "days": 3}, {"city": "3", "unit": "C"}
    calls = [written(number=number, **one) for number, one in enumerate(both)]
    answer = f"<think>So.</think>Wait.{section(*calls)}"
    parser = parser_of(first.output)
    parts = [*parser.push(answer), *parser.flush()]
    assert [json.loads(one) for one in arguments_of(parts)] == list(both)
    said = {"role": "assistant", "content": "Wait.", "reasoning_content": "So."}
    said["tool_calls"] = [weather(f"call_1n{i}", **one) for i, one in enumerate(both)]
    results = [result("call_1n1", "r1"), result("call_1n0", "r0")]
    later = prompt_of(text, [ASKED, said, *results], tools=[WEATHER])
    found = shown(text, later.tokens[0])
    assert found.startswith(prompt + answer + ENDS)
    for number in range(2):
        assert f"## Return of functions.weather:{number}\nr{number}{ENDS}" in found
    assert found.index("\nr0") < found.index("\nr1")


@pytest.mark.parametrize(("prints", "number"), [("ids", 2), ("counts", 2), ("places", 0)])
def test_numbers_go_on_where_the_template_counts_all_calls(
    prints: str, number: int, tmp_path: Path
) -> None:
    text = encoder(tmp_path, prints)
    turns: list[dict[str, Any]] = [ASKED]
    for ids in (("a", "b"), ("a",)):  # the ids of another server may come again
        turns.append({"role": "assistant", "content": "", "tool_calls": [weather(i) for i in ids]})
        turns += [result(one, f"r{one}") for one in ids]
    found = shown(text, prompt_of(text, turns).tokens[0])
    last = found[found.rindex(CALL) :]
    assert last.startswith(written(number=number) + END)
    assert f"## Return of functions.weather:{number}\nra{ENDS}" in last


def test_new_results_alone_are_those_of_the_whole_conversation(text: TextEncoder) -> None:
    said = {"role": "assistant", "content": "", "tool_calls": [weather("c0", city="x")]}
    whole = shown(text, prompt_of(text, [ASKED, said, result("c0", "r")]).tokens[0])
    with pytest.raises(MissingNames):
        prepare_later([result("c0", "r")], [], None, text, {})
    new = prepare_later([result("c0", "r")], [], None, text, {"c0": "weather"})
    added = shown(text, append.appended(text, new, None, {}))
    assert whole.endswith(added)
    assert added.startswith(f"{ENDS}<|im_system|>tool<|im_middle|>## Return of functions.weather:0")


def test_forced_calls_are_in_the_form_of_the_template(tmp_path: Path) -> None:
    text = encoder(tmp_path, kind=USER)
    choice = ToolChoice("required")
    made = prompt_of(text, [ASKED], tools=[WEATHER, NOW], tool_choice=choice).constraint
    one, two = written(city="x", days=2), written("now", 12)
    for before in ("", "<think>So.</think>", "<think></think>\n"):
        assert allows(made, before + section(one, two))
    assert not allows(made, section(one.replace("weather:0", "weather")))
    assert not allows(made, section(one.replace("x", 'x"')))
    assert not allows(made, "Hello.")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    free = prompt_of(text, [ASKED], tools=[strict]).constraint
    assert allows(free, f"Hm.{section(one)}")
    assert allows(free, "Hm.")
    assert not allows(free, f"Hm.{section(written('weather', days='x'))}")
    named = prompt_of(
        text, [ASKED], tools=[WEATHER, NOW], tool_choice=ToolChoice("required", ("now",), False)
    )
    assert allows(named.constraint, section(two))
    assert not allows(named.constraint, section(two, two))
    refused = prompt_of(text, [ASKED], tools=[WEATHER], tool_choice=ToolChoice("none")).constraint
    assert allows(refused, "Hm.")
    assert not allows(refused, f"Hm.{section(one)}")


def test_marks_of_forced_calls_are_tokens_where_they_are_control_tokens(text: TextEncoder) -> None:
    made = prompt_of(text, [ASKED], tools=[NOW], tool_choice=ToolChoice("required")).constraint
    assert made is not None
    for mark in MARKS:
        assert f"<[{text.control_id(mark)}]>" in made.text
        assert mark not in made.text


ANSWERS: list[tuple[str, tuple[str, str, list[tuple[str, object]]]]] = [
    (
        f"<think>\nwhy\n</think>\n\nhm\n{section(written(city='x'), written('now', 1))}",
        ("why", "hm", [("weather", {"city": "x"}), ("now", {})]),
    ),
    (
        f"{section(written())}{section(written('g:2', 3))} ok",
        ("", " ok", [("weather", {}), ("g:2", {})]),
    ),
    # Sections that are slightly wrong.
    (f"{BEGIN}{written()}", ("", "", [("weather", {})])),
    (f"{written()} Done.", ("", " Done.", [("weather", {})])),
    (
        f"{BEGIN}\n{written()}\n{written('now', 1)}\n{END}\n!",
        ("", "\n!", [("weather", {}), ("now", {})]),
    ),
    (
        f"{BEGIN}{written()} and {written('now', 1)} so{END}!",
        ("", " and so!", [("weather", {}), ("now", {})]),
    ),
    (f"{BEGIN}{CALL} functions.f:0 {ARGUMENTS} {{}} {CALL_END} {END}", ("", "", [("f", {})])),
    (f"{BEGIN}{CALL}f{ARGUMENTS}{{}}{CALL_END}{END}", ("", "", [("f", {})])),
    (f"{BEGIN}{CALL}functions.f{ARGUMENTS}{{}}{END}", ("", "", [("f", {})])),
    (
        f"{BEGIN}{CALL}functions.f:0{ARGUMENTS}{{}}{CALL}g:1{ARGUMENTS}{{}}{END}",
        ("", "", [("f", {}), ("g", {})]),
    ),
    # What is none.
    (section(), ("", section(), [])),
    (f"{BEGIN} what?", ("", f"{BEGIN} what?", [])),
    (f"{CALL}functions.f:0{CALL_END}", ("", f"{CALL}functions.f:0{CALL_END}", [])),
    (f"{CALL}functions.:0{ARGUMENTS}{{}}", ("", f"{CALL}functions.:0{ARGUMENTS}{{}}", [])),
    (f"{CALL}functions.f:0{ARGUMENTS}[1]", ("", f"{CALL}functions.f:0{ARGUMENTS}[1]", [])),
    ("Say functions.f:0 <think>.", ("", "Say functions.f:0 <think>.", [])),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ("", "", [("f", {"a": 1})]),
    ),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_answers(answer: str, expected: tuple[Any, ...]) -> None:
    parts = parts_of(answer, markup="kimi")
    assert summary(parts) == expected
    assert parts_of(answer, list(range(len(answer))), markup="kimi") == parts


def test_arguments_come_while_they_are_written() -> None:
    parser = parser_of(OutputForm("kimi", calls=True))
    assert parser.push(f"Hi{BEGIN}{CALL}functions.f:0") == [Text("Hi")]
    found = parser.push(f'{ARGUMENTS}{{"t": "a')
    assert [type(part) for part in found[1:]] == [CallArguments] * len(found[1:])
    assert parser.push("b\n") == [CallArguments(0, "b\\n")]
    assert parser.push(f'"}}{CALL_END}{END}') == [CallArguments(0, '"}')]


@pytest.mark.parametrize("kind", [CONTROL, USER])
def test_text_that_spells_a_mark_is_none(kind: int, tmp_path: Path) -> None:
    """A call in a file that is quoted is no call, inside one that is, too; marks that are tokens
    are shown to the parser whatever kind the file gives them."""
    encoder(tmp_path, kind=kind)
    spelled = section(written("g"))
    pieces = [spelled[:9], spelled[9:]] if kind == USER else [spelled]

    async def main() -> str:
        frontend = await TextFrontend.open(tmp_path / "kimi.gguf")
        tokens = await frontend.encode(
            f'So {BEGIN}{CALL}functions.f:0{ARGUMENTS}{{"a": "', special=True
        )
        for piece in pieces:
            tokens += await frontend.encode(piece[:1]) + await frontend.encode(piece[1:5])
            tokens += [token for one in piece[5:] for token in await frontend.encode(one)]
        tokens += await frontend.encode(f'"}}{CALL_END}{END}', special=True)
        detokeniser = frontend.detokeniser(OutputForm("kimi", calls=True))
        found = "".join([*map(detokeniser.push, tokens), detokeniser.flush()])
        await frontend.close()
        return found

    parts = parts_of(asyncio.run(main()), markup="kimi")
    assert summary(parts) == ("", "So", [("f", {"a": spelled})])


def test_marks_of_a_vocabulary_without_their_tokens_are_text() -> None:
    quoted = section(written()).replace("<|", f"<{BREAK}|").replace("|>", f"|{BREAK}>")
    assert plain_text(parts_of(quoted, markup="kimi")) == section(written())
    assert calls_of(parts_of(section(written()), markup="kimi"))


@pytest.mark.parametrize(
    ("template", "tokens", "markup"),
    [
        ("{{ m.content }}" + BEGIN, (), "kimi"),
        ("{{ m.content }}", (BEGIN,), "kimi"),
        ("{{ '<tool_call>' }}", (BEGIN,), "hermes"),
    ],
)
def test_signs(template: str, tokens: tuple[str, ...], markup: str) -> None:
    assert markup_of(template, tokens.__contains__).name == markup


@settings(deadline=None)
@given(
    arguments=st.dictionaries(st.sampled_from(["a", 'b"', "c d"]), TEXTS | OTHERS),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
)
def test_any_values_are_read_back(arguments: dict[str, Any], cuts: list[int]) -> None:
    answer = f"Hm.{section(written(**arguments), written('now', 1))}"
    parts = parts_of(answer, cuts, markup="kimi")
    assert summary(parts) == ("", "Hm.", [("weather", arguments), ("now", {})])
