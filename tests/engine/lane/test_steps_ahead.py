"""A lane with two steps in flight gives the tokens of a lane with one."""

from __future__ import annotations

import asyncio
from array import array

import msgspec
import pytest

from batchengine.core import GREEDY, Sampling
from batchengine.lanes.step_input import BadStep, StepLimits, take_samples, unpack
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from tests.engine.test_constrained import LONG, constrained, expected
from tests.support.engines import Reference, Site, read, request, running_engine, words

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3, logprobs=2),
    Sampling(temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
)
LIMITS = StepLimits(tokens_max=16, entries_max=4, context_tokens=2048, vocab_size=2048)


async def test_decodes_are_sent_ahead(site: Site, reference: Reference) -> None:
    """Also over the end of a page, and with penalties that see the token not known yet."""
    prompts = [words(i, n) for i, n in enumerate((40, 250, 300))]
    async with running_engine(site, lane__steps_in_flight=2) as engine:
        asked = [
            request(prompt, 60, sampling=sampling)
            for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
        ]
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        meter = engine.state.lanes[0].meter
        assert meter.ahead > meter.steps // 2
        assert not meter.void  # each turn ends where it was known to end
    for prompt, sampling, answer in zip(prompts, SAMPLINGS, answers, strict=True):
        assert answer.tokens == reference.tokens(prompt, 60, sampling)


async def test_the_entry_after_an_early_end_is_void(site: Site, reference: Reference) -> None:
    """A stop string ends one turn while its next entry is computed; its session then goes on."""
    prompt = words(8, 40)
    expected = reference.tokens(prompt, 30)
    async with running_engine(site, lane__steps_in_flight=2) as engine:
        answer = await read(engine.submit(request(prompt, 30)))
        stop = answer.text[len(answer.text) // 2 :][:6]
        meter = engine.state.lanes[0].meter
        for attempt in range(9):  # something else may have to be done just before the end
            asked = request(prompt, 30, session=f"s{attempt}", stop=(stop,))
            stopped = await read(engine.submit(asked))
            n = len(stopped.tokens)
            assert (stopped.reason, n < 30) == ("stop", True)
            longer = [*prompt, *expected[:n], 77]
            again = await read(engine.submit(request(longer, 20, session=f"s{attempt}")))
            assert again.tokens == reference.tokens(longer, 20)
            assert again.done is not None
            assert again.done.usage.cached_tokens >= len(prompt)
            if meter.void:
                break
    assert meter.void


async def test_constrained_answers_are_sent_ahead(site: Site, reference: Reference) -> None:
    """Their masks follow the commit of the step before; the entry after the end has none."""
    asked = [constrained(words(i, 40 + i), LONG) for i in range(3)]
    free = request(words(9, 50), 90)
    async with running_engine(site, lane__steps_in_flight=2) as engine:
        generations = [engine.submit(one) for one in (*asked, free)]
        answers = await asyncio.gather(*map(read, generations))
        meter = engine.state.lanes[0].meter
        assert meter.ahead > meter.steps // 3
    for one, answer in zip(asked, answers, strict=False):
        assert answer.tokens == expected(reference, one)
        assert answer.reason == "stop"
    assert answers[3].tokens == reference.tokens(words(9, 50), 90)


def test_a_sample_is_the_token_and_the_end_of_the_history() -> None:
    """Session 1 brings its token, session 2 takes a sample, session 3 has none to take."""
    entries = [wire.Entry(1, 1, 4, 1, 1, GREEDY)] + [
        wire.Entry(key, 1, 4, 1, 1, GREEDY, 3, takes_sample=True) for key in (2, 3)
    ]
    codes = array("Q", [ARENA_BIT | i for i in range(3)])
    payload = codes.tobytes() + array("i", [9, 0, 0, 5, 6, 0, 7, 8, 0]).tobytes()
    batch = unpack(wire.Step(tuple(entries)), payload, LIMITS)
    take_samples(batch, {1: 30, 2: 40})
    assert batch.tokens.tolist() == [9, 40, 0]
    histories = [None if found is None else found.tolist() for found in batch.histories]
    assert histories == [None, [5, 6, 40], [7, 8, 0]]


@pytest.mark.parametrize("change", [{"n_tokens": 2}, {"sampling": None}])
def test_only_an_entry_of_one_token_that_wants_another_takes_a_sample(
    change: dict[str, object],
) -> None:
    entry = wire.Entry(1, 1, 4, 1, 1, GREEDY, takes_sample=True)
    made = wire.Step((msgspec.structs.replace(entry, **change),))
    payload = array("Q", [ARENA_BIT]).tobytes() + bytes(4 * made.entries[0].n_tokens)
    with pytest.raises(BadStep, match="sample"):
        unpack(made, payload, LIMITS)
