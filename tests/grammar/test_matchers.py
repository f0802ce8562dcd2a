"""The grammar process and its replacement; what grammars allow."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint
from batchengine.grammar.matchers import GrammarLimits, Grammars
from batchengine.grammar.process import NICE
from batchengine.text import grammar
from batchengine.text.grammar import GrammarCompiler
from batchengine.text.vocab import Tokenizer
from tests.grammar.hostile_process import CRASH, HANG
from tests.support.engines import until

OBJECT = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')


@pytest.fixture(scope="module")
def tokenizer(pocket_path: Path) -> Iterator[Tokenizer]:
    made = Tokenizer(pocket_path)
    yield made
    made.close()


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, special=False)[bool(tokenizer.add_bos) :]


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> (token % 8) & 1}


@pytest.mark.parametrize("bad", [HANG, CRASH])
async def test_a_process_that_ends_is_replaced(pocket_path: Path, bad: Constraint) -> None:
    """A grammar with which it ends twice is refused; others go on where they were."""
    limits = GrammarLimits(request_s=1.0)
    grammars = Grammars(str(pocket_path), limits, "tests.grammar.hostile_process")
    try:
        good = await grammars.begin(OBJECT, "a", ())
        mask, pid = good.mask, grammars.pid
        own = os.getpriority(os.PRIO_PROCESS, 0)
        threads = [int(one) for one in os.listdir(f"/proc/{pid}/task")]
        nice = [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
        assert nice.count(min(own + NICE, 19)) > limits.threads  # those that compute are all lower
        with pytest.raises(BatchEngineError) as caught:
            await grammars.begin(bad, "b", ())
        assert caught.value.code == errors.GRAMMAR_REFUSED.code
        token = min(allowed(mask))
        good.accept([token])
        await until(lambda: good.mask is not None)
        again = await grammars.begin(OBJECT, "a", (token,))
        assert again.mask == good.mask != mask
        assert grammars.pid != pid
        assert good.strikes == 0
    finally:
        await grammars.close()


async def test_without_a_process_a_grammar_is_unavailable(pocket_path: Path) -> None:
    grammars = Grammars(str(pocket_path), GrammarLimits(start_s=5.0), "no.such.module")
    try:
        both = [grammars.begin(OBJECT, "a", ()) for _ in range(2)]
        for found in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(found, BatchEngineError)
            assert found.code == errors.GRAMMAR_UNAVAILABLE.code
    finally:
        await grammars.close()


async def test_one_tenant_does_not_take_all_threads(pocket_path: Path) -> None:
    limits = GrammarLimits(request_s=60.0)
    grammars = Grammars(str(pocket_path), limits, "tests.grammar.hostile_process")
    try:
        hanging = [asyncio.ensure_future(grammars.begin(HANG, "a", ())) for _ in range(9)]
        await until(lambda: grammars.pid > 0)
        async with asyncio.timeout(30):
            assert (await grammars.begin(OBJECT, "b", ())).mask
        for one in hanging:
            one.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
    finally:
        await grammars.close()


ACCEPTED = [
    ({"type": "integer", "maximum": 9007199254740991}, "9007199254740991"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "const": {"a": 1}}, '{"a": 1}'),
    ({"type": "string", "format": "made-up", "pattern": "^a+$"}, '"aa"'),
    ({"type": "object", "patternProperties": {"^x-": {"type": "null"}}}, '{"x-1": null}'),
    ({"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, "[1, 2]"),
    ({"allOf": [{"type": "object"}, {"required": ["b"]}], "default": {}}, '{"b":true}'),
    ({}, '{"any": ["value", {"deep": [[]]}]}'),
]


@pytest.mark.parametrize(("schema", "text"), ACCEPTED)
def test_schemas_of_clients(tokenizer: Tokenizer, schema: dict[str, object], text: str) -> None:
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("json_schema", json.dumps(schema)))
    for token in tokens_of(tokenizer, text):
        assert token in allowed(matcher.mask())
        matcher.accept([token])
    assert tokenizer.eog <= allowed(matcher.mask())


def test_a_schema_of_depth_9(tokenizer: Tokenizer) -> None:
    schema, text = {"type": "integer"}, "1"
    for _ in range(9):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        text = f'{{"a":{text}}}'
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("json_schema", json.dumps(schema)))
    matcher.accept(tokens_of(tokenizer, text))
    assert tokenizer.eog <= allowed(matcher.mask())


def test_a_token_that_is_not_allowed_is_refused(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer).matcher(OBJECT)
    with pytest.raises(BatchEngineError) as caught:
        matcher.accept(tokens_of(tokenizer, "[1]"))
    assert caught.value.code == errors.GRAMMAR_REFUSED.code


def test_tokens_behind_the_end_change_nothing(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("regex", "ab"))
    end = next(iter(tokenizer.eog))
    matcher.accept(tokenizer.encode("ab"))
    mask = matcher.mask()
    matcher.accept([end])
    assert matcher.mask() == mask


def test_after_the_end_only_end_tokens_are_allowed(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer).matcher(Constraint("lark", 'start: "ab"'))
    assert not tokenizer.eog & allowed(matcher.mask())
    matcher.accept(tokens_of(tokenizer, "ab"))
    assert allowed(matcher.mask()) == tokenizer.eog


def test_answers_under_one_grammar_do_not_use_up_its_limits(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer may use does not depend on those before it."""
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 200)
    words = Constraint("regex", "([a-z]{0,30}[0-9]{0,9}){1,20}")

    def follow(compiler: GrammarCompiler, rng: random.Random) -> None:
        matcher = compiler.matcher(words)
        for _ in range(20):
            matcher.accept([rng.choice(sorted(allowed(matcher.mask()) - tokenizer.eog))])

    compiler = GrammarCompiler(tokenizer)
    for seed in range(20):
        follow(compiler, random.Random(seed))
