"""Drafts of constrained answers: each of their tokens has a mask, and no draft changes a token."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from batchengine.core import GREEDY, Constraint, GenerationRequest, Sampling
from batchengine.engine import Engine
from tests.engine.lane.test_drafts import cheap_drafts, meter_of, repeating, sampled
from tests.engine.test_constrained import TWO_LANES, constrained, expected
from tests.support.engines import (
    Answer,
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

__all__ = ["cheap_drafts"]
pytestmark = pytest.mark.usefixtures("cheap_drafts")
SONG = Constraint("regex", "((la li lo|la lu) ){50}")
LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"path": {"enum": ["a.py", "b.py"]}, "line": {"enum": [1, 10]}},
        "required": ["path", "line"],
        "additionalProperties": False,
    },
    "minItems": 12,
    "maxItems": 12,
}
EDITS = Constraint("json_schema", json.dumps(LIST))
WARM = Sampling(temperature=0.5, seed=4, logprobs=2)


def asked_of(n: int) -> list[GenerationRequest]:
    kinds = [(SONG, GREEDY), (EDITS, WARM), (SONG, WARM), (EDITS, GREEDY)]
    return [
        constrained(repeating(i, 40 + i), constraint, sampling=sampling)
        for i, (constraint, sampling) in enumerate((kinds * n)[:n])
    ]


async def without_drafts(site: Site, asked: list[GenerationRequest]) -> list[Answer]:
    async with running_engine(site, lane__draft_tokens_max=0) as engine:
        answers = [await read(engine.submit(one)) for one in asked]
        assert not meter_of(engine).drafted
    return answers


async def test_tokens_are_those_without_drafts(site: Site, reference: Reference) -> None:
    """Alone and beside others, free ones too; log-probabilities are those under the masks."""
    asked = asked_of(6)
    free = request(repeating(9, 60), 150)
    async with running_engine(site) as engine:
        alone = [await read(engine.submit(one)) for one in asked[:2]]
        meter = meter_of(engine)
        assert 0 < meter.accepted < meter.drafted
        both = await asyncio.gather(*(read(engine.submit(one)) for one in (*asked, free)))
    plain = await without_drafts(site, asked)
    for answer, want in zip([*alone, *both[:6]], [*plain[:2], *plain], strict=True):
        assert sampled(answer) == sampled(want)
        assert (answer.text, answer.reason) == (want.text, "stop")
    assert both[6].tokens == reference.tokens(free.prompt, 150)
    for one, answer in zip(asked, plain, strict=True):
        assert answer.tokens == expected(reference, one)
        if one.constraint == EDITS:
            assert len(json.loads(answer.text)) == 12


async def until_further(answers: list[Answer], engine: Engine, by: int) -> None:
    before = meter_of(engine).accepted
    await until(lambda: meter_of(engine).accepted >= before + by or bool(answers))


async def test_processes_end_while_answers_have_drafts(site: Site, reference: Reference) -> None:
    """The grammar process, whose matchers begin again, and the worker; a matcher with whose draft
    the process ended has none any more, the next turn has."""
    asked = asked_of(3)
    ended: list[Answer] = []
    async with running_engine(site) as engine:
        readers = [asyncio.ensure_future(read(engine.submit(one))) for one in asked]
        for one in readers:
            one.add_done_callback(lambda done: ended.append(done.result()))
        for n in range(4):
            await until_further(ended, engine, 8)
            pid = engine.running.grammars.pid if n % 2 else engine.state.lanes[0].lane.pid
            if pid:
                os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*readers)
        before = meter_of(engine).accepted
        again = await read(engine.submit(asked[0]))
        assert meter_of(engine).accepted > before
    for one, answer in zip((*asked, asked[0]), (*answers, again), strict=True):
        assert answer.tokens == expected(reference, one)


async def test_an_answer_moves_while_it_has_drafts(site: Site, reference: Reference) -> None:
    asked = constrained(repeating(3, 60), SONG, session="s")
    async with running_engine(site, lanes=TWO_LANES, router__promote_auto=False) as engine:
        generation, reader = await started(engine, asked, 5)
        for lane in ("fast", "bulk", "fast", "bulk"):
            n = generation.completion_tokens
            report = await engine.promote("", "s", to=lane)
            assert report["result"] in ("moved", "already", "ended"), report
            await until(lambda n=n: generation.completion_tokens > n + 9 or generation.finished)
        assert sum(loop.meter.accepted for loop in engine.state.lanes)
        assert (await reader).tokens == expected(reference, asked)


async def test_masks_of_a_draft_that_are_late_cost_tokens_of_the_draft_only(
    site: Site, reference: Reference
) -> None:
    """While the grammar process stands still, turns beside it go on; then this one does."""
    asked = constrained(repeating(3, 60), SONG)
    async with running_engine(site) as engine:
        _, reader = await started(engine, asked, 5)
        await until(lambda: meter_of(engine).accepted > 4)
        suspend(engine.running.grammars.pid)
        answer = await read(engine.submit(request(words(4, 40), 30)))
        assert answer.tokens == reference.tokens(words(4, 40), 30)
        assert not reader.done()
        os.kill(engine.running.grammars.pid, signal.SIGCONT)
        assert (await reader).tokens == expected(reference, asked)


async def test_a_turn_whose_masks_are_slow_has_no_drafts(site: Site, reference: Reference) -> None:
    asked = constrained(repeating(3, 60), SONG)
    async with running_engine(site) as engine:
        limits = engine.running.grammars._limits
        object.__setattr__(limits, "slow_us", -1)  # every one is
        answer = await read(engine.submit(asked))
        assert not meter_of(engine).drafted
    assert answer.tokens == expected(reference, asked)
