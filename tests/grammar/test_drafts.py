"""Matchers that follow drafts: masks behind tokens that may not become the answer's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchengine.core import BatchEngineError, Constraint
from batchengine.grammar import process
from batchengine.grammar.matchers import GrammarLimits, Grammars
from batchengine.text import grammar
from batchengine.text.grammar import GrammarCompiler
from batchengine.text.vocab import Tokenizer
from batchengine.wire import grammar as wire
from tests.grammar.hostile_process import FAILS_AT_DRAFTS, HANGS_AT_DRAFTS
from tests.grammar.test_matchers import allowed, tokens_of
from tests.support.engines import until

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"maxLength": 9}, "c": {"enum": ["xx", "xy"]}},
    "required": ["a", "b", "c"],
}
GRAMMARS = [
    Constraint("json_schema", "{}"),
    Constraint("json_schema", json.dumps(OBJECT)),
    Constraint("regex", "([a-f]{2} ){6}"),
    Constraint("lark", 'start: "<" WORD ">" (" " WORD)*\nWORD: /[a-z]{3,9}/'),
    Constraint("lark", 'start: TEXT ("<x>" TEXT)?\nTEXT: /(.|\\n)*/'),
    Constraint("regex", "(yes|no)!"),
]
WORD = Constraint("regex", "(abc ){9}")


@pytest.fixture(scope="module")
def tokenizer(pocket_path: Path) -> Iterator[Tokenizer]:
    made = Tokenizer(pocket_path)
    yield made
    made.close()


def always() -> bool:
    return True


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_drafts_change_no_later_mask(tokenizer: Tokenizer, number: int) -> None:
    """Random answers with random drafts, of tokens that may come, that may not, and of ends."""
    compiler, rng = GrammarCompiler(tokenizer), random.Random(number)
    ends = sorted(tokenizer.eog)
    n_followed = n_ended = 0
    for _ in range(12):
        plain, follower = (compiler.matcher(GRAMMARS[number]) for _ in range(2))
        accepted: list[int] = []
        for _ in range(40):
            choices = sorted(allowed(plain.mask()))
            draft = rng.choices([*choices[:50], *ends, rng.randrange(tokenizer.vocab_size)], k=4)
            draft[0] = rng.choice(choices)
            masks = follower.follow(draft, always)
            assert follower.mask() == plain.mask()
            behind = compiler.matcher(GRAMMARS[number])
            behind.accept(accepted)
            for token, mask in zip(draft, masks, strict=False):
                behind.accept([token])
                assert behind.mask() == mask
            n_followed += len(masks)
            if len(masks) < len(draft) and masks:
                left_out = draft[len(masks)]
                assert left_out not in allowed(masks[-1]) - tokenizer.eog
            token = rng.choice(choices)
            accepted.append(token)
            plain.accept([token])
            follower.accept([token])
            if token in tokenizer.eog:
                assert follower.mask() == plain.mask()
                n_ended += 1
                break
    assert n_followed > 25
    assert n_ended or number == 0


def test_a_draft_is_followed_while_there_is_time(tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer).matcher(WORD)
    draft, left = tokens_of(tokenizer, "abc abc abc"), 2

    def is_in_time() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    assert len(draft) > 2
    mask = matcher.mask()
    assert len(matcher.follow(draft, is_in_time)) == 2
    assert matcher.mask() == mask
    assert len(matcher.follow(draft, always)) == len(draft)


async def test_masks_behind_a_draft_come_after_the_mask_before_it(
    pocket_path: Path, tokenizer: Tokenizer
) -> None:
    """Those behind a token that is not allowed are empty, and a draft is forgotten with the next
    tokens of the answer, which may be several."""
    grammars = Grammars(str(pocket_path))
    song = tokens_of(tokenizer, "abc abc abc abc abc ")
    own = GrammarCompiler(tokenizer).matcher(WORD)
    given: list[list[bytes]] = []
    try:
        matcher = await grammars.begin(WORD, "a", ())
        matcher.accept(song[:2])
        matcher.give(lambda masks: given.append(list(masks)))
        matcher.follow(song[2:5], lambda masks: given.append(list(masks)))
        await until(lambda: len(given) == 2)
        own.accept(song[:2])
        assert given == [[own.mask()], own.follow(song[2:5], always)]

        wrong = next(iter(set(range(99)) - allowed(matcher.mask)))
        matcher.follow([song[2], wrong, song[3]], lambda masks: given.append(list(masks)))
        await until(lambda: len(given) == 3)
        assert given[2] == [given[1][0], b"", b""]

        matcher.follow(song[2:5], lambda masks: given.append(list(masks)))
        matcher.accept(song[2:4])
        matcher.accept(song[4:7])
        await until(lambda: matcher.mask is not None)
        own.accept(song[2:7])
        assert matcher.mask == own.mask()
        matcher.follow(song[7:9], lambda masks: given.append(list(masks)))
        await until(lambda: len(given) == 4)
        assert given[3] == own.follow(song[7:9], always)
    finally:
        await grammars.close()


async def test_a_process_that_hangs_at_a_draft_is_replaced(
    pocket_path: Path, tokenizer: Tokenizer
) -> None:
    """Its answer goes on, without drafts; others keep theirs."""
    grammars = Grammars(
        str(pocket_path), GrammarLimits(request_s=1.0), "tests.grammar.hostile_process"
    )
    given: list[int] = []
    try:
        other = await grammars.begin(WORD, "b", ())
        matcher = await grammars.begin(HANGS_AT_DRAFTS, "a", ())
        pid, song = grammars.pid, tokens_of(tokenizer, "abc abc ")
        matcher.follow(song[:2], lambda masks: given.append(len(masks)))
        await until(lambda: not matcher.may_follow)
        assert other.may_follow
        for token in song[:3]:
            matcher.accept([token])
            async with asyncio.timeout(10):
                await until(lambda: matcher.mask is not None)
        assert grammars.pid != pid
        assert not given
        assert matcher.error is None
        other.follow(song[:2], lambda masks: given.append(len(masks)))
        await until(lambda: given == [2])
    finally:
        await grammars.close()


async def test_a_matcher_that_fails_at_a_draft_has_none_any_more(
    pocket_path: Path, tokenizer: Tokenizer
) -> None:
    """Its answer goes on as without."""
    grammars = Grammars(str(pocket_path), module="tests.grammar.hostile_process")
    song, given = tokens_of(tokenizer, "abc abc "), list[list[bytes]]()
    own = GrammarCompiler(tokenizer).matcher(WORD)
    try:
        matcher = await grammars.begin(FAILS_AT_DRAFTS, "a", ())
        matcher.follow(song[:2], lambda masks: given.append(list(masks)))
        await until(lambda: bool(given))
        assert given == [[b"", b""]]
        assert not matcher.may_follow
        matcher.accept(song[:3])
        await until(lambda: matcher.mask is not None)
        own.accept(song[:3])
        assert matcher.mask == own.mask()
    finally:
        await grammars.close()


@pytest.mark.parametrize("rule", ["max_tokens=5", 'stop="q"'])
async def test_a_grammar_that_counts_masks_has_no_drafts(
    pocket_path: Path, tokenizer: Tokenizer, rule: str
) -> None:
    """The library cannot go back under it. When it begins again behind an answer, masks are
    computed between the tokens: without them it would be at another place."""
    counting = Constraint("lark", f'start: (x "\\n")+\nx[{rule}]: /(la li lo |la lu )+/')
    compiler, rng, differs = GrammarCompiler(tokenizer), random.Random(2), 0
    for _ in range(20):
        plain, accepted = compiler.matcher(counting), list[int]()
        for _ in range(25):
            choices = sorted(allowed(plain.mask()) - tokenizer.eog) or sorted(tokenizer.eog)
            accepted.append(rng.choice(choices))
            plain.accept(accepted[-1:])
            again, rough = compiler.matcher(counting), compiler.matcher(counting)
            again.accept(accepted, again=True)
            assert again.mask() == plain.mask()
            with contextlib.suppress(BatchEngineError):
                rough.counts = False
                rough.accept(accepted, again=True)
                differs += rough.mask() != plain.mask()
    assert differs or rule.startswith("stop")
    grammars, given = Grammars(str(pocket_path)), list[list[bytes]]()
    try:
        matcher = await grammars.begin(counting, "a", ())
        matcher.follow(tokens_of(tokenizer, "la "), lambda masks: given.append(list(masks)))
        await until(lambda: bool(given))
        assert not any(given[0])
        assert not matcher.may_follow
    finally:
        await grammars.close()


@pytest.mark.parametrize("states", [150, 200, 300])
def test_drafts_use_up_no_limit_of_an_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, states: int
) -> None:
    """It fails at the same token as without them, or not at all, however tokens come."""
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", states)
    hungry = Constraint("regex", "([a-z]{0,30}[0-9]{0,9}){1,20}")
    compiler, n_failed = GrammarCompiler(tokenizer), 0
    for seed in range(6):
        rng, tokens, masks = random.Random(seed), list[int](), list[bytes]()
        plain = compiler.matcher(hungry)
        with contextlib.suppress(BatchEngineError):
            for _ in range(40):
                masks.append(plain.mask())
                tokens.append(rng.choice(sorted(allowed(masks[-1]) - tokenizer.eog)))
                plain.accept(tokens[-1:])
            masks.append(plain.mask())
        n_failed += len(masks) <= len(tokens)

        turn, n = process._Turn("a", hungry), 0
        begin = process._Job(turn, wire.Begin(1, "a", hungry), [])
        found, mask = process._answer(compiler, begin)
        while isinstance(found, wire.Allowed):
            assert mask == masks[n]
            if n == len(tokens):
                break
            draft = tokens[n : n + rng.randrange(9)] + rng.choices(range(tokenizer.vocab_size), k=3)
            process._answer(compiler, process._Job(turn, wire.Follow(1), draft))
            part = tokens[n : n + rng.randint(1, 5)]
            found, mask = process._answer(compiler, process._Job(turn, wire.Accept(1), part))
            n += len(part)
            assert isinstance(found, wire.Allowed) == (n < len(masks))
    assert n_failed or states > 200
