"""Grammars in llama.cpp's GBNF: what they allow as llguidance reads them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchengine.core import BatchEngineError, Constraint
from batchengine.text.grammar import GrammarCompiler
from batchengine.text.vocab import Tokenizer
from service.protocols.openai.gbnf import lark_of
from tests.support.fake_engine import chat, post, serving


@pytest.fixture(scope="module")
def tokenizer(pocket_path: Path) -> Tokenizer:
    return Tokenizer(pocket_path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, answer: str) -> bool:
    """Whether the grammar allows this answer, and nothing has to follow it."""
    matcher = compiler.matcher(Constraint("lark", lark_of(source)))
    for token in tokenizer.encode(answer):
        if not int.from_bytes(matcher.mask(), "little") >> token & 1:
            return False
        matcher.accept([token])
    bits = int.from_bytes(matcher.mask(), "little")
    return any(bits >> end & 1 for end in tokenizer.eog)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= ("a"?)*', ["", "a", "aaa"], ["b"]),
        ('root ::= ("a"*)*', ["", "aa"], ["b"]),
        ('root ::= ("a"{1,2}){1,2}', ["a", "aaaa"], ["", "aaaaa"]),
        ('root ::= "a"{2} "b"{1,}', ["aab", "aabb"], ["ab", "aa"]),
        (r"root ::= [\u00e9\U0001F389]{2}", ["é🎉", "🎉🎉"], ["é", "e"]),
        ('root ::= start end\nstart ::= "x"\nend ::= "y" | ', ["xy", "x"], ["y"]),
        ('root ::= a-b a_b A\na-b ::= "1"\na_b ::= "2" root?\nA ::= "3" # c', ["123"], ["12"]),
        (r'root ::= "x" [^"\\\x41-\x43\n]+ .', ["xzz\n", "x--q"], ["xAz"]),
        (r"root ::= [-a] [a-] [a\]] [!-#]", ["-a]!", "a-a#"], ["b", "-a]$"]),
        (r'root ::= ( | "a") "\"\n\x41\\"', ['"\nA\\', 'a"\nA\\'], ["a"]),
        ('root ::=\n  "a" |\n  "b" (\n "c"\n )', ["a", "bc"], ["b"]),
        ('root ::= t ("+" t)*\nt ::= n | "(" root ")"\nn ::= [0-9]+', ["1+(2+3)", "2"], ["1+"]),
    ],
)
def test_a_grammar_allows_what_it_says(
    compiler: GrammarCompiler, tokenizer: Tokenizer, source: str, good: list[str], bad: list[str]
) -> None:
    assert [is_allowed(compiler, tokenizer, source, one) for one in good] == [True] * len(good)
    assert [is_allowed(compiler, tokenizer, source, one) for one in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= b", "no rule 'b'"),
        ('"a" root ::= "b"', "in front of the first rule"),
        ('root ::= "a', "cannot be read as GBNF: at"),
        (r'root ::= "\q"', "is no character"),
        (r'root ::= "\ud800"', "is no character"),
        ("root ::= []", "a set has no character"),
    ],
)
async def test_what_cannot_be_read_is_refused(source: str, why: str) -> None:
    async with serving() as served:
        status, answer, _ = await post(served, "/v1/chat/completions", chat(grammar=source))
    assert (status, answer["error"]["param"]) == (400, "grammar")
    assert why in answer["error"]["message"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ('root ::= ("a"', "Expected token"),
        ('root ::= "a")', "expecting rule"),
        ("root ::= *", "Expected value"),
    ],
)
def test_the_check_of_the_grammar_finds_the_rest(
    compiler: GrammarCompiler, source: str, why: str
) -> None:
    with pytest.raises(BatchEngineError, match=why) as caught:
        compiler.check(Constraint("lark", lark_of(source)))
    assert caught.value.name == "invalid_grammar"
