"""Custom tools whose input has a grammar: the pattern it becomes, and calls that follow it."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchengine.markup import MARKUPS
from service.protocols.markup.grammars import Calls, constraint_of
from service.protocols.openai.custom_tools import CustomInput, call_arguments, custom_input
from service.protocols.openai.input_formats import PATTERN_CHARS_MAX, pattern_of
from service.protocols.responses import tools
from tests.service.markup.test_grammars import allows

PATCH = r"""
start: begin hunk+ end   // a patch of several files
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add_file | delete_file | update_file
add_file: "*** Add File: " path LF added+
delete_file: "*** Delete File: " path LF
update_file: "*** Update File: " path LF moved? lines?
moved: "*** Move to: " path LF
path: /(.+)/
added: "+" /(.*)/ LF -> line
lines: (context | line)+ last?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
GOOD = """*** Begin Patch
*** Update File: src/a "b".py
*** Move to: src/c.py
@@ def f():
-    return "a\\n"
+    return 'ü'
*** Delete File: old.py
*** Add File: new.py
+x = 1
*** End Patch"""
BAD = (
    GOOD.replace("*** Begin", "** Begin"),
    GOOD.replace("-    return", "return"),
    GOOD.removesuffix("*** End Patch"),
    GOOD + "\nDone.",
)


def lark(definition: str) -> dict[str, str]:
    return {"type": "grammar", "syntax": "lark", "definition": definition}


def test_a_patch_as_agents_describe_it() -> None:
    pattern = pattern_of(lark(PATCH))
    assert pattern is not None
    assert re.fullmatch(pattern, GOOD)
    assert re.fullmatch(pattern, GOOD + "\n")
    assert not [text for text in BAD if re.fullmatch(pattern, text)]


@pytest.mark.parametrize("markup", ["hermes", "xml"])
def test_a_forced_call_follows_the_grammar_of_its_input(markup: str) -> None:
    given: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
    (tool,), names, left_out = tools.functions([given | {"format": lark(PATCH)}])
    assert (names.custom, left_out) == (("apply_patch",), [])
    assert "*** Begin Patch" in tool["function"]["description"]
    forced = constraint_of(
        MARKUPS[markup],
        lambda _: None,
        in_reasoning=False,
        may_reason=False,
        calls=Calls([tool], True, False),
        response=None,
    )

    def call(text: str) -> str:
        if markup == "hermes":
            arguments = json.dumps({"input": text}, ensure_ascii=False)
            return f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
        return (
            f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{text}\n</parameter>\n"
            "</function>\n</tool_call>"
        )

    assert allows(forced, call(GOOD))
    assert not [text for text in BAD if allows(forced, call(text))]


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        ('start: "a".."c"~2..3', ["ab", "abc"], ["a", "abcd", "ad"]),
        ('start: ("x"i | /[0-9]+/)* ["."]', ["", "X12x.", "."], ["y"]),
        ('?start: A B?\n// no rule: x\nA.2: /a\\/b/i\nB: "\\n"', ["A/b", "a/b\n"], ["ab"]),
        ("start: WORD as\nas: INT\n%import common.WORD\n%import common.INT", ["ab1"], ["1"]),
        ("start: NL\n%import common.NEWLINE -> NL", ["\n\n"], [""]),
    ],
)
def test_rules_of_lark(definition: str, good: list[str], bad: list[str]) -> None:
    pattern = pattern_of(lark(definition))
    assert pattern is not None
    assert all(re.fullmatch(pattern, text) for text in good)
    assert not [text for text in bad if re.fullmatch(pattern, text)]


DOUBLED = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "ab"\nstart: r0'
UNWRITABLE = [
    lark('start: "(" start ")" | "x"'), lark("start: missing"), lark('start: ("a"'), lark(""),
    lark('start: "a"\n%ignore " "'), lark("start: a{b}"), lark('start: "a" -> '), lark(DOUBLED),
    lark("start: " + "(" * 50_000), lark('start: "a"' * PATTERN_CHARS_MAX),
    lark("\n".join(f"r{n}: r{n + 1}" for n in range(5000)) + '\nr5000: "a"\nstart: r0'),
    {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"},
    {"type": "grammar", "syntax": "abnf", "definition": "a"}, {"type": "grammar"},
]  # fmt: skip


@pytest.mark.parametrize("form", UNWRITABLE)
def test_what_no_pattern_says_is_reported_and_not_enforced(form: dict[str, str]) -> None:
    assert pattern_of(form) is None
    (tool,), _, left_out = tools.functions([{"type": "custom", "name": "f", "format": form}])
    assert left_out == ["tools.format"]
    assert set(tool) == {"type", "function"}


def test_other_formats() -> None:
    assert pattern_of(None) == pattern_of({"type": "text"}) == pattern_of("x") == ""
    form = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    assert pattern_of(form) == "^(?:a|b)$"


@given(st.text(alphabet='abz:|()[]?*+~.>-"/\\n1 %{', max_size=60))
def test_any_definition_is_read_or_not(text: str) -> None:
    pattern_of(lark(f"start: {text}"))


# ---- the input, read from the arguments of a function ----


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    """The pieces of a text between places."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


texts = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\/\n\t\x00\U0001f600é'))


@given(texts, st.booleans(), st.lists(st.integers(0, 999), max_size=6))
def test_the_input_is_read_from_arguments_in_pieces(
    text: str, plain: bool, cuts: list[int]
) -> None:
    arguments = call_arguments(text) if plain else json.dumps({"input": text}, indent=1)
    reader = CustomInput()
    assert "".join(map(reader.push, in_pieces(arguments, cuts))) == text
    assert reader.flush() == ""


@given(texts, st.integers(0, 200))
def test_arguments_that_were_cut_give_the_input_up_to_there(text: str, end: int) -> None:
    found = custom_input(json.dumps({"input": text})[:end])
    assert text.startswith(found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"say \\"h', 'say "h'), ('{"input":"a\\ud83d\\ude0', "a"), ('{"inp', ""),
        ("no object", "no object"), ('{"x": 1}', '{"x": 1}'), ('{"input": 1}', '{"input": 1}'),
        (" " * 999 + "x", " " * 999 + "x"),
        ('{"x": 1, "input": "a"}', "a"), ('{"input": "a\\d"}', "a\\d"),
        ('{"input": "\\ud83d and more text"}', "\ufffd and more text"),
    ],
)  # fmt: skip
def test_arguments_that_are_no_such_object(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
    reader = CustomInput()
    assert "".join(map(reader.push, arguments)) + reader.flush() == text
