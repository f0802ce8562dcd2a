"""Granite and Nemotron: the markup of their templates, prompts with calls, forced answers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from batchengine.markup import MARKUPS, markup_of
from batchengine.text.encoder import TextEncoder
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from service.protocols.conversation import ToolChoice
from service.protocols.markup.parser import parser_of
from service.protocols.output import arguments_of, plain_text, reasoning_text
from tests.service.markup.test_glm import prompt_of, weather
from tests.service.markup.test_grammars import NOW, WEATHER, allows
from tests.service.markup.test_parser import parts_of, summary
from tests.text.harmony import shown
from tests.text.test_tokenizer import CONTROL, NORMAL, USER, byte_alphabet, write_vocab

# Messages of ChatML, parameters in tags, and reasoning that the prompt begins or leaves out;
# templates of Granite 4.2 have the same form.
NEMOTRON_3 = """{%- set thinks = enable_thinking if enable_thinking is defined else True %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages if m.role == "user" %}{% set ns.asked = messages.index(m) %}{% endfor %}
{{- "<|im_start|>system\n" }}
{%- if tools %}<tools>
{%- for tool in tools %}
<function><name>{{ tool.function.name }}</name></function>
{%- endfor %}
</tools>
<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
{%- endif %}<|im_end|>
{% for m in messages %}
{%- if m.role == "assistant" %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.asked %}<think>
{{ m.reasoning_content }}
</think>
{% else %}<think></think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if loop.first and m.content %}{{ "\n" }}{% endif %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>
{% endfor %}<|im_end|>
{% elif m.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>
{% if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if thinks %}<think>
{% else %}<think></think>{% endif %}{% endif %}"""
GRANITE_4 = """{%- if tools %}<|start_of_role|>system<|end_of_role|><tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
<tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|end_of_text|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if messages[loop.index0 - 1].role != "tool" %}<|start_of_role|>user<|end_of_role|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|end_of_text|>
{% endif %}
{%- else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ "\n" }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end_of_text|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
NEMOTRON_2 = """<SPECIAL_10>System
{% if tools %}<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>
<TOOLCALL>[{"name": NAME, "arguments": ARGUMENTS}]</TOOLCALL>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<SPECIAL_11>User
<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>
{% elif m.role == "assistant" %}<SPECIAL_11>Assistant
{{ m.content }}
{%- if m.tool_calls %}<TOOLCALL>[
{%- for call in m.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</TOOLCALL>{% endif %}
<SPECIAL_12>
{% else %}<SPECIAL_11>{{ m.role }}
{{ m.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<SPECIAL_11>Assistant
<think>
{% endif %}"""
ASKED = {"role": "user", "content": "hi"}


def encoder(tmp_path: Path, template: str, pre: str, *marks: str) -> TextEncoder:
    """`marks`: that of the end of an answer, then others, which are no control tokens."""
    tokens = [*((one, NORMAL) for one in byte_alphabet()), ("th", NORMAL)]
    tokens += [(marks[0], CONTROL), *((one, USER) for one in marks[1:])]
    path = write_vocab(
        tmp_path / "v.gguf",
        "gpt2",
        tokens,
        tokenizer_pre=pre,
        token_merges=["t h"],
        eos_token_id=257,
        chat_template=template,
    )
    return TextEncoder(Tokenizer(path), Renderer(template, datetime.date(2026, 2, 3), 1 << 20))


@pytest.fixture
def nemotron(tmp_path: Path) -> TextEncoder:
    """As files of Nemotron 3, whose vocabulary still has the marks of Mistral."""
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[INST]")
    return encoder(tmp_path, NEMOTRON_3, "pixtral", "<|im_end|>", *marks)


@pytest.fixture
def granite(tmp_path: Path) -> TextEncoder:
    marks = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
    return encoder(tmp_path, GRANITE_4, "dbrx", "<|end_of_text|>", *marks)


def history(answer: str, prompt: Any) -> dict[str, Any]:
    """The message of an answer, as a client sends it."""
    parser = parser_of(prompt.output)
    parts = [*parser.push(answer), *parser.flush()]
    calls = [weather(str(i), **json.loads(one)) for i, one in enumerate(arguments_of(parts))]
    said = {"role": "assistant", "content": plain_text(parts), "tool_calls": calls}
    return said | {"reasoning_content": reasoning_text(parts)}


BOTH = ({"city": ' Paris "1"\n</x>', "days": 3}, {"city": "3", "unit": "C"})


def in_tags(**arguments: Any) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=weather>\n{lines}</function>\n</tool_call>\n"


def as_json(**arguments: Any) -> str:
    return f'{{"name": "weather", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'


def test_answers_of_nemotron_3_stand_in_the_next_prompt(nemotron: TextEncoder) -> None:
    assert (nemotron.markup.name, nemotron.markup.writes) == ("xml", "function")
    first = prompt_of(nemotron, [ASKED], tools=[WEATHER])
    assert first.output.in_reasoning
    begun = shown(nemotron, first.tokens[0])
    assert begun.endswith("<|im_start|>assistant\n<think>\n")
    answer = "So.\n</think>\nWait.\n" + "".join(in_tags(**one) for one in BOTH)
    said = history(answer, first)
    assert [json.loads(one["function"]["arguments"]) for one in said["tool_calls"]] == list(BOTH)
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in range(2)]
    found = shown(nemotron, prompt_of(nemotron, [ASKED, said, *results], tools=[WEATHER]).tokens[0])
    assert found.startswith(f"{begun}{answer}<|im_end|>\n<|im_start|>user\n<tool_response>\nr0")


def test_forced_calls_of_nemotron_3(nemotron: TextEncoder) -> None:
    choice = ToolChoice("required")
    made = prompt_of(nemotron, [ASKED], tools=[WEATHER, NOW], tool_choice=choice).constraint
    call = in_tags(city="x\n<y>", days=2)
    assert allows(made, f"So.\n</think>\n{call}{call.rstrip()}")
    assert not allows(made, f"So.\n</think>\n{in_tags(days=2).rstrip()}")
    assert not allows(made, "So.\n</think>\nNo.")


def test_nemotron_3_need_not_reason(nemotron: TextEncoder) -> None:
    made = prompt_of(nemotron, [ASKED], template={"enable_thinking": False})
    assert not made.output.in_reasoning
    assert shown(nemotron, made.tokens[0]).endswith("<|im_start|>assistant\n<think></think>")


def test_answers_of_granite_4_stand_in_the_next_prompt(granite: TextEncoder) -> None:
    assert (granite.markup.name, granite.markup.writes) == ("hermes", "object")
    assert not granite.reasons
    first = prompt_of(granite, [ASKED], tools=[WEATHER])
    begun = shown(granite, first.tokens[0])
    answer = "Wait.\n" + "\n".join(f"<tool_call>\n{as_json(**one)}\n</tool_call>" for one in BOTH)
    said = history(answer, first)
    result = {"role": "tool", "tool_call_id": "0", "content": "r0"}
    found = shown(granite, prompt_of(granite, [ASKED, said, result], tools=[WEATHER]).tokens[0])
    wanted = "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|><tool_response>\nr0"
    assert found.startswith(begun + answer + wanted)
    made = prompt_of(granite, [ASKED], tools=[WEATHER], tool_choice=ToolChoice("required"))
    assert allows(made.constraint, answer.removeprefix("Wait.\n"))
    assert not allows(made.constraint, "Wait.")


@pytest.mark.parametrize(
    ("template", "tokens", "markup"),
    [
        (NEMOTRON_2, ("[TOOL_CALLS]",), "nemotron"),
        ("<|start_header_id|>{{ '<TOOLCALL>[' }}", (), "nemotron"),
        ("<|start_of_role|>{{ m.role }}<|end_of_role|>", ("<|tool_call|>",), "granite"),
        ("<|start_of_role|>respond with <|tool_call|>", ("<|tool_call|>",), "granite"),
        ("<|start_of_role|>{{ '<tool_call>' }}", ("<|tool_call|>", "<tool_call>"), "hermes"),
        ("<|{{ m.role }}|>", ("<|tool_call|>", "<|/tool_call|>"), "phi"),
        ("{{ '<|tool_list_start|>' }}", (), "lfm"),
        ("<|im_start|>List of tools: ", ("<|tool_call_start|>",), "lfm"),
        ("{{ '<|tool_call>call:' }}", ("<|tool_call>",), "gemma"),
    ],
)
def test_signs_of_markups(template: str, tokens: tuple[str, ...], markup: str) -> None:
    assert markup_of(template, tokens.__contains__).name == markup


def test_lists_of_nemotron_2(tmp_path: Path) -> None:
    """Forced as the template writes them, behind reasoning, and read back."""
    text = encoder(tmp_path, NEMOTRON_2, "tekken", "<SPECIAL_12>", "[TOOL_CALLS]", "<SPECIAL_11>")
    assert (text.markup.name, text.markup.writes) == ("nemotron", "list")
    choice = ToolChoice("required")
    made = prompt_of(text, [ASKED], tools=[WEATHER], tool_choice=choice)
    listed = f"<TOOLCALL>[{', '.join(as_json(**one) for one in BOTH)}]</TOOLCALL>"
    assert allows(made.constraint, f"So.\n</think>\n\n{listed}")
    assert not allows(made.constraint, f"So.\n</think>\n\n{listed.removesuffix('</TOOLCALL>')}")
    said = history(f"So.\n</think>\n\n{listed}", made)
    found = shown(text, prompt_of(text, [ASKED, said], tools=[WEATHER]).tokens[0])
    assert f"<SPECIAL_11>Assistant\n{listed}<SPECIAL_12>" in found


CALL = '{"name": "f", "arguments": {"a": "]"}}'


@pytest.mark.parametrize(
    ("markup", "answer", "text"),
    [
        ("nemotron", f"Hm.\n<TOOLCALL>[{CALL}, {CALL}]</TOOLCALL>\nDone.", "Hm.\nDone."),
        ("nemotron", f"<TOOLCALL> [ {CALL} ,{CALL} ] </TOOLCALL>", ""),
        ("granite", f"<|tool_call|>[{CALL}, {CALL}]", ""),
        ("granite", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", ""),
        ("phi", f"<|tool_call|>[{CALL}, {CALL}]<|/tool_call|>", ""),
    ],
)
def test_lists_are_read(markup: str, answer: str, text: str) -> None:
    parts = parts_of(answer, markup=markup)
    _, said, calls = summary(parts)
    assert (said.replace("\n", ""), calls) == (text.replace("\n", ""), [("f", {"a": "]"})] * 2)
    assert parts_of(answer, list(range(len(answer))), markup=markup) == parts


@pytest.mark.parametrize("answer", ["<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>x", f"[{CALL}]"])
def test_what_is_no_list_of_calls_is_text(answer: str) -> None:
    assert plain_text(parts_of(answer, markup="nemotron")) == answer


def test_ends_stand_behind_lists_alone() -> None:
    ends = {name: markup.end for name, markup in MARKUPS.items() if markup.end}
    assert set(ends) == {"nemotron", "phi", "lfm"}
