"""Log-probabilities of prompts: those of a model that computes one token at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
from array import array
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from batchengine.config import LaneConfig
from batchengine.core import (
    GREEDY,
    BatchEngineError,
    GenerationRequest,
    PromptTokenEvent,
    Sampling,
    TokenEvent,
)
from batchengine.engine import Engine, Generation
from batchengine.engine.lane.steps.inflight import InFlightStep, StepEntry, check_answer
from batchengine.lanes.step_input import BadStep, StepLimits, unpack
from batchengine.model import sample_spec
from batchengine.policy import scheduler
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from bench.models.local_runner import LocalSequence
from tests.support.engines import Answer, Reference, Site, read, request, running_engine, words

Scores = list[tuple[float, list[tuple[int, float]]]]


def asking(prompt: Sequence[int], best: int, tokens_max: int = 1) -> GenerationRequest:
    sampling = Sampling(logprobs=best)
    return dataclasses.replace(request(prompt, tokens_max, sampling=sampling), prompt_logprobs=best)


def expected(reference: Reference, prompt: Sequence[int], best: int) -> Scores:
    """What follows each token but the last, chosen by a bias instead of a mask."""
    runner, timeline, found = reference.runner, LocalSequence(), Scores()
    for before, token in itertools.pairwise(prompt):
        logits = runner.step([(timeline, [before])])[0].astype(np.float64)
        sampling = Sampling(logprobs=best, logit_bias=((token, 1e6),))
        spec = sample_spec(sampling, position=0, history=None)
        (one,) = runner.stepper.ops.sample(runner.stepper.logits_rows, [spec])
        shifted = logits - logits.max()
        assert one.token == token
        assert abs(one.logprob - (shifted[token] - np.log(np.exp(shifted).sum()))) < 1e-3
        found.append((one.logprob, one.top))
    runner.release(timeline)
    return found


def scores_of(answer: Answer, prompt: Sequence[int]) -> Scores:
    events = [event for event in answer.events if isinstance(event, PromptTokenEvent)]
    assert answer.error is None
    assert [event.token for event in events] == list(prompt)
    assert events[0].logprob is None
    found = Scores()
    for event in events[1:]:
        assert event.logprob is not None
        found.append((event.logprob, [(one.token, one.logprob) for one in event.top]))
    return found


@pytest.mark.parametrize("chunk", [16, 100, 512])
async def test_chunks_and_neighbours_change_nothing(
    site: Site, reference: Reference, chunk: int
) -> None:
    """Several prompts at once, beside an answer that decodes; one of them is known to the store."""
    prompts = [words(1, 300), words(2, 17), words(3, 2), words(4, 1)]
    lane = LaneConfig(name="cpu", threads=1, chunk_tokens_max=chunk, tokens_per_step=640)
    async with running_engine(site, lanes=(lane,)) as engine:
        other = asyncio.ensure_future(read(engine.submit(request(words(9, 40), 60))))
        await read(engine.submit(request(prompts[0], 2)))
        best = [3, 0, 20, 5]
        made = [engine.submit(asking(*one)) for one in zip(prompts, best, strict=True)]
        answers = await asyncio.gather(*map(read, made))
        for prompt, n, answer in zip(prompts, best, answers, strict=True):
            assert scores_of(answer, prompt) == expected(reference, prompt, n)
            assert answer.tokens == reference.tokens(prompt, 1)
            assert answer.done is not None
            assert answer.done.usage.cached_tokens == 0
        assert (await other).tokens == reference.tokens(words(9, 40), 60)
        again = await read(engine.submit(request(prompts[0], 2)))
        assert again.done is not None
        assert again.done.usage.cached_tokens == 256  # what it has computed serves others


async def test_a_small_lane(site: Site, reference: Reference) -> None:
    """A lane with one seat has rows with logits for more than one token."""
    lane = LaneConfig(name="cpu", threads=1, entries_max=1)
    prompt = words(5, 60)
    async with running_engine(site, lanes=(lane,)) as engine:
        answer = await read(engine.submit(asking(prompt, 2)))
    assert scores_of(answer, prompt) == expected(reference, prompt, 2)


@pytest.mark.parametrize("at", [2, 5, 9])
async def test_a_worker_that_dies_in_the_middle(site: Site, reference: Reference, at: int) -> None:
    """Rows whose KV was kept are scored already; the others are computed again."""
    prompt = words(6, 600)
    lane = LaneConfig(name="cpu", threads=1, chunk_tokens_max=64)
    async with running_engine(site, lanes=(lane,)) as engine:
        await read(engine.submit(request(prompt, 1)))  # all pages of the prompt are in the store
        worker, steps = engine.state.lanes[0].lane, list[int]()
        post = worker.post

        def post_and_kill(step: wire.Step, *rest: Any, **named: Any) -> Any:
            if any(entry.scored for entry in step.entries):
                steps.append(step.entries[0].start)
                if len(steps) == at:
                    os.kill(worker.pid, signal.SIGKILL)
            return post(step, *rest, **named)

        worker.post = post_and_kill  # type: ignore[method-assign]
        answer = await read(engine.submit(asking(prompt, 1, 8)))
        assert worker.incarnation > 1
    assert scores_of(answer, prompt) == expected(reference, prompt, 1)
    assert answer.tokens == reference.tokens(prompt, 8)
    assert len(steps) > at


async def test_steps_are_planned_with_what_scoring_takes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the prompt is not whole, and other work of the lane as before."""
    lane = LaneConfig(name="cpu", threads=1, chunk_tokens_max=64)
    views, plan = list[scheduler.LaneView](), scheduler.plan

    def spy(view: scheduler.LaneView, now_ms: float) -> scheduler.StepPlan:
        views.append(view)
        return plan(view, now_ms)

    monkeypatch.setattr(scheduler, "plan", spy)
    async with running_engine(site, lanes=(lane,)) as engine:
        cost, before = engine.state.lanes[0].cost, engine.state.lanes[0].cost.cost
        first = before.prefill_token_ms + cost.scored_cost.prefill_token_ms
        answer = await read(engine.submit(asking(words(6, 300), 1, 4)))
        assert answer.error is None
        assert before.prefill_token_ms + cost.scored_cost.prefill_token_ms != first
    rows = [row for view in views for row in (*view.running, *view.waiting)]
    assert {row.to_compute > 1 for row in rows if row.scored} == {True}
    assert {row.to_compute for row in rows if not row.scored} == {1}
    assert all(view.scored_cost.prefill_token_ms > view.cost.prefill_token_ms for view in views)


async def test_a_slow_reader_holds_no_more_than_a_slice(site: Site, reference: Reference) -> None:
    prompt = words(7, 200)
    async with running_engine(site) as engine:
        generation = engine.submit(asking(prompt, 2, 4))
        sizes, tokens = list[int](), list[int]()
        while events := await generation.events():
            sizes.append(len(events))
            tokens += [event.token for event in events if isinstance(event, PromptTokenEvent)]
        assert max(sizes) <= 16
        assert tokens == prompt
        generation = engine.submit(asking(prompt, 2, 4))
        await generation.events()
        generation.cancel()
        assert not await generation.events()
        await read(engine.submit(request(prompt, 1)))


async def test_the_token_that_ends_an_answer_has_one_too(site: Site) -> None:
    """So the number of tokens behind the prompt is known."""
    async with running_engine(site) as engine:
        end = min(engine.text.tokenizer.eog)
        forced = Sampling(logprobs=1, logit_bias=((end, 100.0),))
        for stop in ((), ("no such text",)):
            asked = asking(words(11, 20), 1, 9)
            answer = await read(
                engine.submit(
                    dataclasses.replace(asked, sampling=forced, ignore_eos=False, stop=stop)
                )
            )
            assert (answer.tokens, answer.text, answer.reason) == ([end], "", "stop")
            (event,) = [one for one in answer.events if isinstance(one, TokenEvent)]
            assert event.logprob is not None
            assert event.logprob.token == end


async def test_a_session_has_none(site: Site) -> None:
    async with running_engine(site) as engine:
        asked = dataclasses.replace(asking(words(8, 9), 1), session_id="s")
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(asked)
        assert caught.value.param == "prompt_logprobs"


async def test_a_move_in_the_middle(site: Site, reference: Reference) -> None:
    """The lane that takes a turn over scores the rest of its prompt."""
    prompt = words(10, 1400)
    lanes = tuple(
        LaneConfig(name=name, threads=1, chunk_tokens_max=16) for name in ("left", "right")
    )
    async with running_engine(site, lanes=lanes) as engine:
        generation = engine.submit(asking(prompt, 1))
        reader = asyncio.ensure_future(read(generation))
        lane = await _scoring(engine, generation)
        await engine.promote("", generation.session_id, to="left" if lane == "right" else "right")
        answer = await reader
        assert all(loop.meter.tokens for loop in engine.state.lanes)
    assert scores_of(answer, prompt) == expected(reference, prompt, 1)


async def _scoring(engine: Engine, generation: Generation) -> str:
    """Wait until a part of the prompt is computed; the name of its lane."""
    async with asyncio.timeout(30):
        while generation.computing is None or generation.computing.frontier < 64:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return generation.lane


LIMITS = StepLimits(tokens_max=64, entries_max=4, context_tokens=2048, vocab_size=2048)


def test_a_frame_has_the_tokens_to_score() -> None:
    entries = (
        wire.Entry(1, 1, 0, 3, 1, None, scored=2, scored_best=1),
        wire.Entry(2, 1, 0, 1, 1, GREEDY),
        wire.Entry(3, 1, 0, 1, 1, GREEDY, scored=1),
    )
    codes = array("Q", [ARENA_BIT | i for i in range(3)]).tobytes()
    ids = [5, 6, 7, 8, 9]

    def payload(*scored: int) -> bytes:
        return codes + array("i", [*ids, *scored]).tobytes()

    batch = unpack(wire.Step(entries), payload(6, 7, 2047), LIMITS)
    assert [tokens.tolist() for tokens in batch.scored] == [[6, 7], [], [2047]]
    for wrong in ((6, 7), (6, 7, 2048), (6, -1, 3), (6, 7, 8, 9)):
        with pytest.raises(BadStep):
            unpack(wire.Step(entries), payload(*wrong), LIMITS)
    for change in ({"scored": 4}, {"scored": -1}, {"scored_best": 21}, {"scored_best": -1}):
        changed = (msgspec.structs.replace(entries[0], **change), *entries[1:])
        with pytest.raises(BadStep):
            unpack(wire.Step(changed), payload(*[1] * (1 + changed[0].scored)), LIMITS)


def test_an_answer_has_all_scores() -> None:
    """Of each entry that asked for some, unless its rows cannot be used."""
    entries = tuple(wire.Entry(key, 1, 0, 2, 1, None, scored=2) for key in (1, 2))
    step = InFlightStep(wire.Step(entries), b"", [], [], [], None, 1.0)
    step = step._replace(parts=[StepEntry(cast("Any", None), 2, False)] * 2)

    def rows(session: int, n: int = 2, best: bytes = bytes(16)) -> wire.ScoredRows:
        return wire.ScoredRows(session, bytes(4 * n), best, best)

    done = wire.StepDone((), (), (), (), 1, scores=(rows(1), rows(2)))
    check_answer(step, done)
    check_answer(step, msgspec.structs.replace(done, nonfinite=(0,), scores=(rows(2),)))
    for wrong in (
        (), (rows(1),), (rows(2), rows(1)), (rows(1), rows(2, 1)), (rows(1), rows(2, 3)),
        (rows(1), rows(2, best=bytes(12))), (rows(1), wire.ScoredRows(2, bytes(8), b"", bytes(8))),
    ):  # fmt: skip
        with pytest.raises(BatchEngineError):
            check_answer(step, msgspec.structs.replace(done, scores=wrong))


def test_an_answer_says_of_all_states_whether_they_were_saved_or_loaded() -> None:
    file = wire.StateFile(1, "", 0)
    frame = wire.Step((), save_states=(file, file), load_states=(file,))
    step = InFlightStep(frame, b"", [], [], [], cast("Any", None), 1.0)
    done = wire.StepDone((), (), (), (), 1, states=(True, False, True))
    check_answer(step, done)
    for wrong in ((), (True, True), (True, True, True, True)):
        with pytest.raises(BatchEngineError):
            check_answer(step, msgspec.structs.replace(done, states=wrong))
