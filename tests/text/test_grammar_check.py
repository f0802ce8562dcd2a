"""The check of a grammar, in a text process of its own: what it refuses is a 400."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint, Kind
from batchengine.markup import MARKUPS
from batchengine.text import grammar
from batchengine.text.frontend import TextFrontend
from batchengine.text.grammar import CHECK_CPU_S_MAX, GrammarCompiler
from batchengine.text.vocab import Tokenizer
from bench.grammar import Words
from service.protocols.markup.grammars import Calls, constraint_of
from tests.text.test_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, write_vocab


def schema(value: object) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


def words(count: int) -> list[str]:
    return [f"w{number * 7919 % 100_003}" for number in range(count)]


def fields(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "string"} for name in words(count)}}


def tool(number: int, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def calls(markup: str, tools: list[dict[str, Any]], *, required: bool = True) -> Constraint:
    found = constraint_of(
        MARKUPS[markup],
        lambda _: None,
        in_reasoning=False,
        may_reason=True,
        calls=Calls(tools, required, True),
        response=None,
    )
    assert found is not None
    return found


TOOLS = [tool(number, fields(3 + number % 12)) for number in range(100)]
HONEST = {
    "an enumeration of 3,000 values": schema({"enum": words(3000)}),
    "the same in an object": schema({"properties": {"a": {"enum": words(3000)}}}),
    "an object of 500 properties": schema(fields(500)),
    "500 properties and no others": schema(fields(500) | {"additionalProperties": False}),
    "500 required properties": schema(fields(500) | {"required": words(500)}),
    "3,000 alternatives": Constraint("lark", "start: " + " | ".join(f'"{w}"' for w in words(3000))),
    "100 kinds of objects": schema({"anyOf": [fields(n % 9) for n in range(100)]}),
    "100 tools": calls("hermes", TOOLS),
    "100 tools, or text": calls("hermes", TOOLS, required=False),
    "100 tools in XML": calls("xml", TOOLS),
    "100 tools of MiniMax": calls("minimax", TOOLS),
    "100 tools of MiniMax, or text": calls("minimax", TOOLS, required=False),
    "100 tools of LFM2": calls("lfm", TOOLS),
    "100 tools of LFM2, or text": calls("lfm", TOOLS, required=False),
    "a tool of 500 properties, of LFM2": calls("lfm", [tool(0, fields(500))]),
    "100 tools of Gemma": calls("gemma", TOOLS),
    "100 tools of Gemma, or text": calls("gemma", TOOLS, required=False),
    "a tool of 500 properties, of Gemma": calls("gemma", [tool(0, fields(500))]),
    "a tool of 500 properties": calls("hermes", [tool(0, fields(500))]),
}
HOSTILE = {
    "an object of 2,500 properties": schema(fields(2500)),
    "a tool of 1,500 properties": calls("hermes", [*TOOLS[:5], tool(7, fields(1500))]),
    "alternatives behind the first token": Constraint(
        "lark",
        'start: "{" ('
        + " | ".join(f"x{n}" for n in range(6000))
        + ")\n"
        + "".join(f'x{n}: "{w}" x{n}?\n' for n, w in enumerate(words(6000))),
    ),
    "a long literal": schema({"const": "ab " * 300_000}),
    "a product of alternatives": schema(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(4)]}
                for i in "abcdef"
            ]
        }
    ),
}


@pytest.fixture(scope="module", params=["pocket", "large"])
def compiler(request: pytest.FixtureRequest, pocket_path: Path) -> GrammarCompiler:
    """One of 2,048 tokens, and one of 151,936."""
    made: dict[str, Callable[[], Any]] = {"pocket": lambda: Tokenizer(pocket_path), "large": Words}
    return GrammarCompiler(cast(Tokenizer, made[request.param]()))


INTEGER = {"type": "integer"}
NOT_ENFORCED: list[tuple[dict[str, Any], list[str]]] = [
    ({"type": "array", "items": INTEGER, "minItems": 2, "title": "x"}, []),
    ({"properties": {"contains": INTEGER, "not": {"enum": ["uniqueItems"]}}}, []),
    ({"type": "array", "uniqueItems": True, "contains": INTEGER}, ["contains", "uniqueItems"]),
    ({"properties": {"a": {"type": "object", "propertyNames": {}}}}, ["propertyNames"]),
    ({"properties": {"a": {"type": "string", "pattern": "^(?=a)b"}}}, ["pattern"]),
    ({"patternProperties": {"^(?=a)b": INTEGER, "c": INTEGER}}, ["patternProperties"]),
    ({"oneOf": [INTEGER, {"type": "number"}]}, ["oneOf"]),
    ({"type": "string", "format": "tax-number"}, ["format"]),
    (INTEGER | {"minimum": (1 << 53) + 1}, ["minimum"]),
    (INTEGER | {"maximum": (1 << 53) - 1}, []),
    ({"additionalProperties": INTEGER, "minProperties": 1}, []),
    ({"additionalProperties": INTEGER, "minProperties": 2}, ["minProperties"]),
]


@pytest.mark.parametrize(("value", "lost"), NOT_ENFORCED)
def test_keywords_that_are_not_enforced_are_named(
    compiler: GrammarCompiler, value: dict[str, Any], lost: list[str]
) -> None:
    """The schema as a format, alone and behind reasoning, and as that of a tool's arguments."""
    for may_reason in (False, True):
        found = constraint_of(
            MARKUPS["hermes"], lambda _: None, in_reasoning=False, may_reason=may_reason,
            calls=None, response=schema(value),
        )  # fmt: skip
        assert found is not None
        assert compiler.check(found) == lost
    given = calls("hermes", [tool(1, {"properties": {"b": value}})])
    assert compiler.check(given) == lost


async def test_what_is_not_enforced_is_remembered(pocket_path: Path) -> None:
    text = await TextFrontend.open(pocket_path)
    try:
        given = schema({"type": "array", "uniqueItems": True})
        for _ in range(2):
            assert await text.check(given, b"a") == ["uniqueItems"]
    finally:
        await text.close()


@pytest.mark.parametrize("name", HONEST)
def test_what_agents_send_passes(compiler: GrammarCompiler, name: str) -> None:
    compiler.check(HONEST[name])


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_fails_behind_the_first_token_is_refused(
    compiler: GrammarCompiler, name: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine too, where no time is left for a second answer or schema."""
    if slow:
        monkeypatch.setattr(grammar, "PARTS_CPU_S", 0.0)
        monkeypatch.setattr(grammar, "WALK_CPU_S", 0.0)
    compiler.matcher(Constraint("regex", "a"))  # the vocabulary is read
    with pytest.raises(BatchEngineError) as caught:
        compiler.check(HOSTILE[name])
    assert caught.value.code == errors.GRAMMAR_REFUSED.code
    assert caught.value.kind is Kind.INVALID


@pytest.mark.parametrize(
    "endless",
    [
        schema({"$ref": "#"}),
        schema({"allOf": [{"$ref": "#"}]}),
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
        Constraint("lark", "start: a\na: a"),
    ],
)
def test_what_consists_of_itself_is_refused_in_plain_words(
    compiler: GrammarCompiler, endless: Constraint
) -> None:
    with pytest.raises(BatchEngineError) as caught:
        compiler.check(endless)
    assert "consists of itself" in caught.value.why


@pytest.mark.parametrize(
    ("markup", "wrong"),
    [("hermes", fields(1300)), *((one, {"$ref": "#/no"}) for one in ("hermes", "xml", "llama"))],
)
def test_the_tool_whose_schema_is_refused_is_named(
    compiler: GrammarCompiler, markup: str, wrong: dict[str, Any]
) -> None:
    good = [tool(number, fields(3)) for number in range(20)]
    bad = tool(77, {"properties": {"n": wrong}, "required": ["n"]})
    with pytest.raises(BatchEngineError, match="the schema of the tool 'tool_77': ") as caught:
        compiler.check(calls(markup, [*good, bad]))
    assert caught.value.code == errors.GRAMMAR_REFUSED.code


def test_no_tool_is_named_for_the_form_of_the_text(compiler: GrammarCompiler) -> None:
    """Nor for a schema whose keyword is no name."""
    for keyword in ({}, {"x-tool": 7}):
        wrong = {"$ref": "#/no"} | keyword
        with pytest.raises(BatchEngineError) as caught:
            compiler.check(Constraint("lark", f"start: %json {json.dumps(wrong)}"))
        assert "tool" not in caught.value.why


def test_a_constraint_that_takes_long_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((0.0, *[CHECK_CPU_S_MAX + 0.1] * 99))
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    with pytest.raises(BatchEngineError, match="takes more than 1 s"):
        compiler.check(schema({}))


def test_reading_the_vocabulary_is_no_part_of_the_first_check(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than most checks: on a slow machine the first one would be refused."""
    now_s, pieces = 0.0, grammar._Pieces

    def read_slowly(tokenizer: Tokenizer) -> grammar._Pieces:
        nonlocal now_s
        now_s += CHECK_CPU_S_MAX + 0.1
        return pieces(tokenizer)

    monkeypatch.setattr(grammar, "_Pieces", read_slowly)
    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    GrammarCompiler(Tokenizer(pocket_path)).check(schema({}))
    assert now_s > CHECK_CPU_S_MAX


async def test_a_process_checks_grammars(pocket_path: Path) -> None:
    """It is confined by then, and serves the next one after a refusal."""
    text = await TextFrontend.open(pocket_path)

    async def check(kind: Any, grammar: str) -> None:
        await text.check(Constraint(kind, grammar), grammar.encode())

    try:
        await check("json_schema", '{"type": "object"}')
        for kind, bad in (("lark", "start: missing"), ("regex", "("), ("json_schema", "[")):
            for _ in range(2):
                with pytest.raises(BatchEngineError) as caught:
                    await check(kind, bad)
                assert caught.value.code == errors.GRAMMAR_REFUSED.code
                assert caught.value.kind is Kind.INVALID
        with pytest.raises(BatchEngineError, match="regex parse error: unclosed character class"):
            await check("json_schema", '{"type": "string", "pattern": "["}')
        await check("regex", "a+")
    finally:
        await text.close()


SLOW = schema({"type": "integer", "multipleOf": 999_983})  # seconds inside the library


async def test_a_grammar_that_takes_long_delays_no_text_of_its_own_tenant(
    pocket_path: Path,
) -> None:
    """Nor grammars of others; its process is ended."""
    text = await TextFrontend.open(pocket_path)
    try:
        await text.encode("the")
        both = (text.check(schema({}), name.encode(), tenant=name) for name in ("a", "b"))
        await asyncio.gather(*both)  # both processes run
        slow = asyncio.ensure_future(text.check(SLOW, b"slow", tenant="a"))
        await asyncio.sleep(0)
        assert await text.encode("the", tenant="a")
        await text.check(schema({"type": "null"}), b"other", tenant="b")
        assert not slow.done()
        await text.check(schema({}), b"a", tenant="a")  # known to be good
        assert not slow.done()
        with pytest.raises(BatchEngineError, match="more processor time than it may") as caught:
            await slow
        assert caught.value.code == errors.GRAMMAR_REFUSED.code
        await text.check(schema({"type": "null"}), b"again", tenant="a")
    finally:
        await text.close()


def read_defect(*_: object) -> bytes:
    raise KeyboardInterrupt  # as a panic of the library: no Exception


async def test_a_defect_of_the_library_is_a_refusal_by_a_process_that_goes_on(
    pocket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = "tests.text.test_grammar_check:read_defect"
    text = await TextFrontend.open(pocket_path, reader=reader)
    try:
        with pytest.raises(BatchEngineError, match="it failed: KeyboardInterrupt") as caught:
            await text.read(b"", b"")
        assert caught.value.kind is Kind.INVALID
        assert not [one for one in caplog.records if one.name == "batchengine.text"]
    finally:
        await text.close()


@pytest.mark.parametrize("model", ["llama", "gemma4"])
def test_a_mask_has_the_tokens_that_texts_have(model: str, tmp_path: Path) -> None:
    """Not those of bytes, which have the same pieces where a byte is a character."""
    names = [("<unk>", UNKNOWN), ("<eos>", CONTROL), *((f"<0x{b:02X}>", BYTE) for b in range(256))]
    tokens = [*names, *((one, NORMAL) for one in ("a", "b", "ab", "\n"))]
    path = write_vocab(
        tmp_path / "v.gguf",
        model,
        tokens,
        eos_token_id=1,
        token_merges=["a b"],
        add_bos_token=False,
    )
    tokenizer = Tokenizer(path)
    text = tokenizer.encode("a\nabé", add_bos=False)
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("regex", "(.|\n)*"))
    for token in text[-5:]:
        assert int.from_bytes(matcher.mask(), "little") >> token & 1
        matcher.accept([token])
    mask = int.from_bytes(matcher.mask(), "little")
    byte_of_a = 2 + ord("a")
    assert not mask >> byte_of_a & 1
    assert mask >> 1 & 1
