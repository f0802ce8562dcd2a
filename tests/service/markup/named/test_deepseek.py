"""DeepSeek: the two forms of its calls, templates that join the arguments as text, and reasoning
whose end stands in the prompt of an answer without any."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from batchengine.text.encoder import TextEncoder
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from service.protocols import append
from service.protocols.conversation import ToolChoice
from service.protocols.markup.parser import parser_of
from service.protocols.output import arguments_of, plain_text, reasoning_text
from tests.service.markup.test_glm import prompt_of, weather
from tests.service.markup.test_grammars import NOW, WEATHER, allows
from tests.service.markup.test_parser import parts_of, summary
from tests.text.harmony import shown
from tests.text.test_tokenizer import CONTROL, NORMAL, USER, byte_alphabet, write_vocab

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
OUT, OUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
ENDS, USER_MARK, ASSISTANT = "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
MARKS = (BEGIN, END, CALL, SEP, CALL_END, OUT, OUT_END, "<think>", "</think>")
TEMPLATE = f"""
{{%- set ns = namespace(asked=false) %}}
{{%- if tools %}}{{{{ tools | tojson }}}}{{% endif %}}
{{%- for m in messages %}}
{{%- if m.role == "user" %}}{{% set ns.asked = true %}}{USER_MARK}{{{{ m.content }}}}
{{%- elif m.role == "tool" %}}{OUT}{{{{ m.content }}}}{OUT_END}
{{%- elif m.role == "assistant" %}}
{{%- if ns.asked %}}{ASSISTANT}BEFORE{{% endif %}}
{{%- set ns.asked = false %}}{{{{ m.content }}}}
{{%- if m.tool_calls %}}{BEGIN}
{{%- for call in m.tool_calls %}}
{{%- if not loop.first %}}{{{{ BETWEEN }}}}{{% endif %}}
{{{{- "{CALL}" + HEAD + ARGUMENTS + TAIL + "{CALL_END}" }}}}
{{%- endfor %}}{END}
{{%- endif %}}{ENDS}
{{%- else %}}{{{{ m.content }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt and ns.asked %}}{ASSISTANT}THOUGHT{{% endif %}}"""
BLOCK = {
    "BETWEEN": "'\\n'",
    "HEAD": f"call.type + '{SEP}' + call.function.name + '\\n```json\\n'",
    "TAIL": "'\\n```'",
    "BEFORE": "",
    "THOUGHT": "",
}
INLINE = {
    "BETWEEN": "''",
    "HEAD": f"call.function.name + '{SEP}'",
    "TAIL": "''",
    "BEFORE": "</think>",
    "THOUGHT": "{{ '<think>' if thinking else '</think>' }}",
}
FORMS = {"deepseek": BLOCK, "deepseek_inline": INLINE}
ARGUMENTS = {"text": "call.function.arguments", "object": "call.function.arguments | tojson"}
ASKED = {"role": "user", "content": "hi"}


def encoder(path: Path, form: str, arguments: str = "text", *, tools: bool = True) -> TextEncoder:
    template = TEMPLATE.replace("ARGUMENTS", ARGUMENTS[arguments])
    template = template if tools else template.replace("if tools", "if false")
    for name, text in FORMS[form].items():
        template = template.replace(name, text)
    tokens = [*((one, NORMAL) for one in byte_alphabet()), ("th", NORMAL), (ENDS, CONTROL)]
    tokens += [(USER_MARK, CONTROL), (ASSISTANT, CONTROL), *((one, USER) for one in MARKS)]
    write_vocab(
        path / "deepseek.gguf",
        "gpt2",
        tokens,
        tokenizer_pre="deepseek-v3",
        token_merges=["t h"],
        eos_token_id=257,
        chat_template=template,
    )
    text = TextEncoder(
        Tokenizer(path / "deepseek.gguf"), Renderer(template, datetime.date(2026, 2, 3), 1 << 20)
    )
    assert (text.markup.name, text.markup.writes) == (form, "named")
    return text


def written(form: str, name: str = "weather", **arguments: Any) -> str:
    """A call as the model writes it."""
    body = json.dumps(arguments, ensure_ascii=False)
    if form == "deepseek":
        return f"{CALL}function{SEP}{name}\n```json\n{body}\n```{CALL_END}"
    return f"{CALL}{name}{SEP}{body}{CALL_END}"


def listed(form: str, *calls: str) -> str:
    between = "\n" if form == "deepseek" else ""
    return f"{BEGIN}{between.join(calls)}{END}"


@pytest.mark.parametrize("arguments", list(ARGUMENTS))
@pytest.mark.parametrize("form", list(FORMS))
def test_an_answer_stands_in_the_next_prompt_as_the_model_wrote_it(
    form: str, arguments: str, tmp_path: Path
) -> None:
    """Where templates join the arguments as text, too."""
    text = encoder(tmp_path, form, arguments)
    first = prompt_of(text, [ASKED], tools=[WEATHER])
    assert not first.output.in_reasoning
    both = {"city": 'Paris "1"\n', "days": 3}, {"city": "3", "unit": "ü"}
    answer = f"Wait.{listed(form, *(written(form, **one) for one in both))}"
    parser = parser_of(first.output)
    parts = [*parser.push(answer), *parser.flush()]
    assert [json.loads(one) for one in arguments_of(parts)] == list(both)
    calls = [weather(str(i), **json.loads(one)) for i, one in enumerate(arguments_of(parts))]
    said = {"role": "assistant", "content": plain_text(parts), "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in range(2)]
    later = prompt_of(text, [ASKED, said, *results], tools=[WEATHER])
    found = shown(text, later.tokens[0])
    behind = "".join(f"{OUT}r{number}{OUT_END}" for number in range(2))
    assert found == shown(text, first.tokens[0]) + answer + ENDS + behind
    assert shown(text, append.appended(text, results, None, {})) == ENDS + behind


@pytest.mark.parametrize("form", list(FORMS))
def test_forced_calls_are_in_the_form_of_the_template(form: str, tmp_path: Path) -> None:
    text = encoder(tmp_path, form)
    made = prompt_of(
        text, [ASKED], tools=[WEATHER, NOW], tool_choice=ToolChoice("required")
    ).constraint
    one, two = written(form, city="x", days=2), written(form, "now")
    assert allows(made, listed(form, one, two))
    assert not allows(made, listed(form, one.replace('"x"', "3")))
    other = next(name for name in FORMS if name != form)
    assert not allows(made, listed(other, written(other, city="x")))
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    free = prompt_of(text, [ASKED], tools=[strict]).constraint
    assert allows(free, f"Hm.{listed(form, one)}")
    assert allows(free, "Hm.")
    assert not allows(free, f"Hm.{listed(form, written(form, days='x'))}")


@pytest.mark.parametrize("thinks", [True, False])
def test_an_answer_reasons_where_the_prompt_begins_it(thinks: bool, tmp_path: Path) -> None:
    text = encoder(tmp_path, "deepseek_inline")
    variables = {"thinking": thinks}
    first = prompt_of(
        text, [ASKED], tools=[NOW], tool_choice=ToolChoice("required"), template=variables
    )
    assert first.output.in_reasoning == thinks
    call = listed("deepseek_inline", written("deepseek_inline", "now"))
    thought = "So.</think>" if thinks else ""
    assert allows(first.constraint, thought + call)
    assert allows(first.constraint, f"<think>So.</think>{call}") == thinks
    parser = parser_of(first.output)
    parts = [*parser.push(f"{thought}Hi"), *parser.flush()]
    assert (reasoning_text(parts), plain_text(parts)) == ("So." if thinks else "", "Hi")
    said = {"role": "assistant", "content": "Hi", "reasoning_content": "So."}
    later = prompt_of(text, [ASKED, said, ASKED], template=variables)
    begun = f"{USER_MARK}hi{ASSISTANT}"
    end = "<think>" if thinks else "</think>"
    assert shown(text, later.tokens[0]) == f"{begun}</think>Hi{ENDS}{begun}{end}"


@pytest.mark.parametrize("form", list(FORMS))
def test_templates_without_tools_get_them_as_text_with_the_form_of_calls(
    form: str, tmp_path: Path
) -> None:
    text = encoder(tmp_path, form, tools=False)
    found = shown(text, prompt_of(text, [ASKED], tools=[NOW]).tokens[0])
    assert json.dumps(NOW) in found
    assert listed(form, written(form, "NAME")) in found
    assert "<tool_call>" not in found


ANSWERS: list[tuple[str, tuple[str, str, list[tuple[str, object]]]]] = [
    (f"{BEGIN}{CALL}f{SEP}{{}}{CALL_END} and{END}!", ("", " and!", [("f", {})])),
    (f"{BEGIN}{CALL}f{SEP}{{}}{CALL_END}{CALL}function{SEP}g\n```json\n{{}}\n```{CALL_END}{END}",
     ("", "", [("f", {}), ("g", {})])),
    (f"{CALL}f{SEP}{{}}{CALL_END}\n{BEGIN}{CALL}g{SEP}{{}}{CALL_END}{END}\nDone.",
     ("", "\nDone.", [("f", {}), ("g", {})])),
    (f"{BEGIN}{CALL}f{CALL_END}{END}", ("", f"{BEGIN}{CALL}f{CALL_END}{END}", [])),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
@pytest.mark.parametrize("form", list(FORMS))
def test_answers(form: str, answer: str, expected: tuple[Any, ...]) -> None:
    """Either form is read, and lists that are slightly wrong."""
    parts = parts_of(answer, markup=form)
    assert summary(parts) == expected
    assert parts_of(answer, list(range(len(answer))), markup=form) == parts
