"""Constrained answers: they follow their grammar, and are the same tokens in every batch, on every
lane, after every restart and move."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchengine import errors
from batchengine.config import LaneConfig
from batchengine.core import Constraint, GenerationRequest, Sampling
from batchengine.text.grammar import GrammarCompiler
from batchengine.text.vocab import Tokenizer
from bench.models.hashlm import WORKER_COMMAND
from tests.support.engine_process import engine_process
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    suspend,
    until,
    words,
)

SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12, "format": "made-up"},
        "size": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 40},
        "kind": {"anyOf": [{"const": "x"}, {"type": "null"}], "default": "x"},
    },
    "required": ["name", "size", "tags", "kind"],
    "additionalProperties": False,
}
OBJECT = Constraint("json_schema", json.dumps(SCHEMA))
LONG = Constraint("regex", "([a-f]{2} ){60}")
WARM = Sampling(temperature=1.0, seed=5)
TWO_LANES = (
    LaneConfig(name="bulk", threads=1, tier="bulk"),
    LaneConfig(name="fast", threads=1, tier="fast"),
)


def constrained(
    prompt: list[int], constraint: Constraint, n: int = 400, **given: Any
) -> GenerationRequest:
    given.setdefault("sampling", WARM)
    return dataclasses.replace(request(prompt, n, **given), constraint=constraint)


def check_object(text: str) -> None:
    found = json.loads(text)
    assert set(found) >= {"name", "size", "tags", "kind"}
    assert isinstance(found["size"], int)
    assert set(found["tags"]) <= {"a", "b", "cc"}


def expected(reference: Reference, asked: GenerationRequest) -> list[int]:
    """The answer of one timeline alone, without an engine and without the grammar process."""
    runner, compiler = reference.runner, GrammarCompiler(Tokenizer(reference.model))
    assert asked.constraint is not None
    matcher, accepted = compiler.matcher(asked.constraint), list[int]()

    def mask_of(_: int, tokens: list[int]) -> NDArray[np.uint32]:
        matcher.accept(tokens[len(accepted) :])
        accepted[:] = tokens
        return np.frombuffer(matcher.mask(), np.uint32)

    ends = Tokenizer(reference.model).eog
    (tokens,) = runner.generate(
        [list(asked.prompt)], asked.tokens_max, sampling=asked.sampling, eos=ends, mask_of=mask_of
    )
    assert tokens[-1] in ends
    return tokens[:-1]


async def test_answers_follow_their_grammar(site: Site) -> None:
    """`ignore_eos` does not prolong an answer whose grammar is complete."""
    async with running_engine(site) as engine:
        for seed in range(4):
            sampling = Sampling(temperature=seed / 2, seed=seed)
            answer = await read(
                engine.submit(constrained(words(seed, 30), OBJECT, sampling=sampling))
            )
            assert answer.reason == "stop", answer.text
            check_object(answer.text)
        answer = await read(
            engine.submit(constrained(words(7, 30), Constraint("regex", "(yes|no)!")))
        )
        assert answer.text in ("yes!", "no!")
        lark = Constraint("lark", 'start: "<" WORD ">" \nWORD: /[a-z]{3,9}/')
        answer = await read(engine.submit(constrained(words(8, 30), lark, ignore_eos=False)))
        assert re.fullmatch("<[a-z]{3,9}>", answer.text)
        assert answer.reason == "stop"
        any_json = Constraint("json_schema", "{}")
        answer = await read(engine.submit(constrained(words(9, 30), any_json, n=300)))
        if answer.reason == "stop":
            json.loads(answer.text)
        cut = await read(engine.submit(constrained(words(1, 30), LONG, n=9)))
        assert (cut.reason, len(cut.tokens)) == ("length", 9)
        assert not engine.running.grammars.count


async def test_a_batch_changes_no_token(site: Site, reference: Reference) -> None:
    """Beside other constrained answers, free ones, and other chunks of prefill."""
    asked = constrained(words(1, 300), LONG)
    want = expected(reference, asked)
    async with running_engine(site, lane__entries_max=16) as engine:
        others = [constrained(words(i, 20 + i), OBJECT) for i in range(6)]
        free = request(words(3, 50), 100)
        generations = [engine.submit(one) for one in (*others, asked, free)]
        answers = await asyncio.gather(*map(read, generations))
    assert answers[6].tokens == want
    assert answers[7].tokens == reference.tokens(words(3, 50), 100)
    for answer in answers[:6]:
        check_object(answer.text)


async def test_an_answer_continues_under_its_grammar_on_another_lane(
    site: Site, reference: Reference
) -> None:
    asked = constrained(words(2, 40), LONG)
    want = expected(reference, asked)
    async with running_engine(site, lanes=TWO_LANES, router__promote_auto=False) as engine:
        named = dataclasses.replace(asked, session_id="s")
        generation, reader = await started(engine, named, 5)
        for lane in ("fast", "bulk", "fast"):
            n = generation.completion_tokens
            report = await engine.promote("", "s", to=lane)
            assert report["result"] in ("moved", "already"), report
            await until(lambda n=n: generation.completion_tokens > n + 3 or generation.finished)
        assert (await reader).tokens == want


async def test_the_grammar_process_dies_in_the_middle(site: Site, reference: Reference) -> None:
    """Its matchers are made again from the tokens; a free answer beside is not concerned."""
    asked, free = constrained(words(3, 40), LONG), request(words(4, 40), 200)
    want = expected(reference, asked)
    async with running_engine(site) as engine:
        beside = asyncio.ensure_future(read(engine.submit(free)))
        generation, reader = await started(engine, asked, 5)
        for _ in range(3):
            n, pid = generation.completion_tokens, engine.running.grammars.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda n=n: generation.completion_tokens > n + 5 or generation.finished)
        assert (await reader).tokens == want
        assert (await beside).tokens == reference.tokens(words(4, 40), 200)


async def test_the_worker_dies_in_the_middle(site: Site, reference: Reference) -> None:
    asked = constrained(words(5, 40), LONG)
    want = expected(reference, asked)
    async with running_engine(site) as engine:
        generation, reader = await started(engine, asked, 5)
        os.kill(engine.state.lanes[0].lane.pid, signal.SIGKILL)
        assert (await reader).tokens == want
        assert generation.finished


BOMBS = {
    "a schema that is none": Constraint("json_schema", '{"type": "nonsense"}'),
    "no JSON": Constraint("json_schema", "{"),
    "too deep": Constraint("json_schema", '{"items":' * 4000 + "{}" + "}" * 4000),
    "too many cases": Constraint(
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {
                        "anyOf": [
                            {"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}}
                            for j in range(6)
                        ]
                    }
                    for i in range(6)
                ]
            }
        ),
    ),
    "no text": Constraint(
        "json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'
    ),
    "a rule without definition": Constraint("lark", "start: missing"),
    "no expression": Constraint("regex", "(a"),
}


async def test_a_grammar_that_cannot_be_used_ends_its_own_request(
    site: Site, reference: Reference
) -> None:
    async with running_engine(site) as engine:
        beside = asyncio.ensure_future(read(engine.submit(request(words(1, 30), 200, tenant="b"))))
        for name, bomb in BOMBS.items():
            answer = await read(engine.submit(constrained(words(1, 30), bomb, n=8)))
            assert answer.error is not None, name
            assert answer.error.code == errors.GRAMMAR_REFUSED.code
            assert answer.tokens == []
        assert (await beside).tokens == reference.tokens(words(1, 30), 200)
        assert not engine.running.grammars.count
        assert engine.lanes()[0]["incarnation"] == 1


def deep_bomb() -> Constraint:
    """A grammar whose states are too many after some tokens only, which no check reaches."""
    rules = [f"x{i}: " + " ".join(f"o{j}" for j in range(i % 50, 200)) + "\n" for i in range(300)]
    rules += [f'o{j}: "b" | "{j}" |\n' for j in range(200)]
    start = '("a" | "c") ' * 120 + "(" + " | ".join(f"x{i}" for i in range(300)) + ")\n"
    return Constraint("lark", f"start: {start}{''.join(rules)}")


async def test_a_grammar_that_fails_inside_an_answer_ends_its_own_request(
    site: Site, reference: Reference
) -> None:
    other = constrained(words(5, 40), LONG)
    want = expected(reference, other)
    bomb = deep_bomb()
    async with running_engine(site) as engine:
        await engine.text.check(bomb, bytes(32), tenant="a")  # the check does not find it
        free = asyncio.ensure_future(read(engine.submit(request(words(1, 30), 300, tenant="b"))))
        beside = asyncio.ensure_future(read(engine.submit(other)))
        answer = await read(engine.submit(constrained(words(1, 30), bomb, n=400)))
        assert answer.tokens
        assert answer.error is not None
        assert answer.error.code == errors.GRAMMAR_REFUSED.code
        assert (await beside).tokens == want
        assert (await free).tokens == reference.tokens(words(1, 30), 300)
        await until(lambda: not engine.running.grammars.count)


async def test_kill_9_in_the_middle_and_resume(site: Site, reference: Reference) -> None:
    asked = constrained(words(6, 40), LONG, session="s")
    want = expected(reference, asked)
    submit = {
        "prompt": list(asked.prompt),
        "n": asked.tokens_max,
        "session": "s",
        "temperature": WARM.temperature,
        "seed": WARM.seed,
        "constraint": msgspec.structs.asdict(LONG),
    }
    async with engine_process(site) as engine:
        seen, _ = await engine.tokens(engine.ask("submit", **submit), 12)
        await engine.end()
    assert seen == want[:12]
    async with running_engine(site) as engine:
        answer = await read(await engine.resume("", "s"))
        assert (answer.tokens, answer.reason) == (want, "stop")
        other = await read(engine.submit(dataclasses.replace(asked, constraint=None)))
        assert other.tokens != want, "a free answer continues no constrained one"


async def test_a_lane_of_another_model_follows_grammars_too(site: Site) -> None:
    async with running_engine(site, WORKER_COMMAND) as engine:
        answer = await read(engine.submit(constrained(words(1, 30), LONG)))
        assert re.fullmatch(LONG.text, answer.text)


async def test_a_late_mask_costs_its_own_turn_only(site: Site, reference: Reference) -> None:
    """While the grammar process stands still, other turns of the lane get their tokens."""
    asked = constrained(words(3, 40), LONG)
    want = expected(reference, asked)
    async with running_engine(site) as engine:
        _, reader = await started(engine, asked, 5)
        suspend(engine.running.grammars.pid)
        answer = await read(engine.submit(request(words(4, 40), 30)))
        assert answer.tokens == reference.tokens(words(4, 40), 30)
        assert not reader.done()
        os.kill(engine.running.grammars.pid, signal.SIGCONT)
        assert (await reader).tokens == want
