"""Drafts change no token, whatever ends, moves or kills a session while it has one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from batchengine.config import LaneConfig
from batchengine.core import GREEDY, PAGE_TOKENS, Sampling, TokenEvent
from batchengine.engine import Engine
from batchengine.engine.lane.steps.meter import StepMeter
from batchengine.engine.lane.steps.writer import StepWriter
from batchengine.engine.turns.drafts import TurnDrafts
from batchengine.engine.turns.stream import Generation
from batchengine.kv.states import LaneStates
from batchengine.lanes import host_device
from batchengine.lanes.host_device import n_accepted, sample_specs, wanted_rows
from batchengine.lanes.step_input import BadStep, StepLimits, unpack
from batchengine.policy.cost import CostModel
from batchengine.policy.drafts import NO_DRAFT, Draft
from batchengine.session import Session
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT, LOGITS_ROWS_MIN
from tests.simulation.stage import Stage, play
from tests.support.engines import (
    Answer,
    Reference,
    Site,
    read,
    request,
    running_engine,
    until,
    words,
)

SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.4, seed=3, logprobs=2),
    Sampling(temperature=0.3, seed=5, presence_penalty=0.4, penalty_tokens=48),
    Sampling(repetition_penalty=1.05, tokens_min=30),
)
pytestmark = pytest.mark.usefixtures("cheap_drafts")
LIMITS = StepLimits(tokens_max=64, entries_max=4, context_tokens=2048, vocab_size=2048)


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a draft costs as little as with weights that a step takes long to read."""
    for name in ("DRAFT_SHARE", "DRAFT_SHARE_MAX"):
        monkeypatch.setattr(CostModel, name, 0.02)


def repeating(seed: int, n: int) -> list[int]:
    """A prompt whose text comes again and again, as code in a conversation about it does."""
    part = words(seed, 37)
    return (part * (n // len(part) + 1))[:n]


def sampled(answer: Answer) -> list[object]:
    return [(e.token, e.logprob, e.top) for e in answer.events if isinstance(e, TokenEvent)]


def sum_of(stage: Stage, count: str) -> int:
    return sum([getattr(loop.meter, count) for loop in stage.now.loops])


def meter_of(engine: Engine) -> StepMeter:
    return engine.state.lanes[0].meter


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_tokens_are_those_without_drafts(
    site: Site, reference: Reference, sampling: Sampling
) -> None:
    """Over the ends of pages, alone and beside others; penalties see the tokens of drafts."""
    prompts = [repeating(i, n) for i, n in enumerate((40, 250, 300))]
    asked = [request(prompt, 220, sampling=sampling) for prompt in prompts]
    async with running_engine(site) as engine:
        alone = await read(engine.submit(request(prompts[1], 220, sampling=sampling)))
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        meter = meter_of(engine)
        assert 0 < meter.accepted <= meter.drafted
        assert meter.generated == sum(len(a.tokens) for a in [alone, *answers])
    async with running_engine(site, lane__draft_tokens_max=0) as engine:
        plain = [await read(engine.submit(one)) for one in asked]
        assert not meter_of(engine).drafted
    assert alone.tokens == plain[1].tokens
    if not sampling.tokens_min:
        assert alone.tokens == reference.tokens(prompts[1], 220, sampling)
    for answer, without in zip(answers, plain, strict=True):
        assert answer.tokens == without.tokens
        assert sampled(answer) == sampled(without)
        assert (answer.text, answer.reason) == (without.text, without.reason)


async def test_a_prediction_of_the_client_changes_no_token(
    site: Site, reference: Reference
) -> None:
    """One that is right is what drafts are made of from the first token on."""
    prompt = words(5, 80)
    expected = reference.tokens(prompt, 100)
    wrong, part = words(6, 100), [*expected[:40], *words(7, 5), *expected[40:]]
    async with running_engine(site) as engine:
        accepted: list[int] = []
        for predicted in ((), expected, wrong, part):
            asked = replace(request(prompt, 100), predicted=tuple(predicted))
            before = meter_of(engine).accepted
            answer = await read(engine.submit(asked))
            assert answer.tokens == expected
            accepted.append(meter_of(engine).accepted - before)
        assert accepted[1] > 70 > accepted[0]
        assert accepted[3] > accepted[0]


def test_a_prediction_follows_the_prompt() -> None:
    drafts = TurnDrafts((7, 8, 9), 4)
    assert drafts.find([1, 2, 3, 4], 5) == Draft((7, 8, 9, 1, 2), 4)
    assert drafts.find([1, 2, 3, 4, 7, 8], 2) == Draft((9, 1), 6)
    assert TurnDrafts((7,), 1).find([1], 5) == NO_DRAFT


async def test_an_answer_ends_inside_a_draft(site: Site, reference: Reference) -> None:
    """With a stop string, with its last token: what is behind it is dropped, and its session goes
    on as if it had not been computed."""
    prompt = repeating(1, 100)
    expected = reference.tokens(prompt, 120)
    async with running_engine(site) as engine:
        whole = await read(engine.submit(request(prompt, 120)))
        for n in (41, 60, 83):
            stop = whole.text[2 * n : 2 * n + 5]
            name = f"s{n}"
            stopped = await read(engine.submit(request(prompt, 120, session=name, stop=(stop,))))
            short = await read(engine.submit(request(prompt, n, session=f"t{n}")))
            for answer, session in ((stopped, name), (short, f"t{n}")):
                m = len(answer.tokens)
                assert answer.tokens == expected[:m]
                longer = [*prompt, *expected[:m], 77]
                again = await read(engine.submit(request(longer, 60, session=session)))
                assert again.tokens == reference.tokens(longer, 60)
                assert again.done is not None
                assert again.done.usage.cached_tokens >= len(prompt)
        assert meter_of(engine).accepted


async def test_a_session_moves_and_its_worker_dies_while_it_has_drafts(
    site: Site, reference: Reference
) -> None:
    """The rows of tokens that were wrong are no rows of the session, wherever it goes on."""
    lanes = tuple(LaneConfig(name, threads=1, tier="any") for name in ("left", "right"))
    prompt, n = repeating(2, 120), 500
    async with running_engine(site, lanes=lanes) as engine:
        generation = engine.submit(request(prompt, n, session="s"))
        reading = asyncio.ensure_future(read(generation))
        loops = {loop.lane.name: loop for loop in engine.state.lanes}
        for i in range(1, 9):
            await until(lambda at=60 * i: generation.completion_tokens >= at)
            here = generation.lane
            if i % 3:
                await until(lambda: all(loop.up for loop in loops.values()))
                await engine.promote("", "s", "right" if here == "left" else "left")
            elif (pid := loops[here].lane.pid) is not None:
                os.kill(pid, signal.SIGKILL)
        answer = await reading
        assert sum(loop.meter.accepted for loop in loops.values())
    assert answer.tokens == reference.tokens(prompt, n)


def test_a_model_that_says_few_tokens_is_drafted_all_the_time() -> None:
    """HashLM, of which every token depends on all rows: right and wrong drafts, while its session
    moves, loses its worker, is parked and goes on."""

    async def scene(stage: Stage) -> None:
        prompt = words(1, 700)
        asked = stage.ask(prompt, 400, "s")
        reading = stage.start(asked)
        for n in range(30, 360, 30):
            await stage.computed(asked, n)
            if n % 90:
                report = await stage.up.promote("", "s", to=stage.other("s"))
                assert report["result"] == "moved", report
            else:
                stage.process(stage.home("s")).end(-9)
        history = [*prompt, *(await reading).tokens]
        session = stage.up.state.sessions["", "s"]
        await stage.until(lambda: session.kv.parked is not None)
        again = stage.ask([*history, 9], 200, "s")
        reading = stage.start(again)
        await reading
        assert again.cached_tokens == len(history) - 1
        assert 0 < sum_of(stage, "accepted") < sum_of(stage, "drafted")

    play(scene, repeats=2, router__dwell_s=0.0)


def test_a_state_is_the_one_behind_the_tokens_of_a_draft_that_were_right() -> None:
    """HashLM with recurrent state, which says other tokens behind a state of other rows."""

    async def scene(stage: Stage) -> None:
        prompt = words(1, 300)
        asked = stage.ask(prompt, 300, "s")
        reading = stage.start(asked)
        for n in range(30, 270, 30):
            await stage.computed(asked, n)
            if n % 90:
                await stage.up.promote("", "s", to=stage.other("s"))
            else:
                stage.process(stage.home("s")).end(-9)
        await reading
        assert 0 < sum_of(stage, "accepted") < sum_of(stage, "drafted")

    play(scene, recurrent=4096, repeats=2, router__dwell_s=0.0)


@pytest.mark.parametrize("way", ["stays", "moves", "parks", "parks, and its worker dies"])
def test_a_state_survives_a_turn_that_ends_inside_a_draft(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session falls back to the state before the step, which is saved where it goes."""
    prompt, n = words(1, 1200), 200
    ends = dict[str, int]()
    finish = StepWriter._finish

    def ended(writer: StepWriter, generation: Generation, token: int, n_tokens: int) -> str:
        if ends.get(generation.request.request_id, n_tokens + 1) <= n_tokens:
            return "stop"
        return finish(writer, generation, token, n_tokens)

    dropped: list[int] = []
    fall_back = LaneStates.fall_back

    def falls_back(states: LaneStates, session: Session) -> None:
        before = session.frontier
        fall_back(states, session)
        dropped.append(before - session.frontier)

    monkeypatch.setattr(StepWriter, "_finish", ended)
    monkeypatch.setattr(LaneStates, "fall_back", falls_back)

    async def scene(stage: Stage) -> None:
        for at in range(30, n):
            asked = stage.ask(prompt, n, f"s{at}")
            ends[asked.request.request_id] = at
            await stage.start(asked)
            if dropped:
                break
        assert 0 < dropped[0] <= PAGE_TOKENS
        name, session = f"s{at}", stage.up.state.sessions["", f"s{at}"]
        history = list(session.tokens)
        if way.startswith("parks"):
            await stage.until(lambda: session.kv.parked is not None)
            stage.process(stage.home(name)).end(-9)
        elif way == "moves":
            await stage.up.promote("", name, to=stage.other(name))
        again = stage.ask([*history, 9], 20, name)
        await stage.start(again)
        assert again.cached_tokens >= len(history) - 17

    play(scene, recurrent=4096, repeats=2, router__dwell_s=0.0)


@pytest.mark.parametrize(
    "seed", [0, 1, 53]
)  # the last one reads such a row, if it is not invalidated
def test_turns_end_inside_drafts_and_sessions_go_on_otherwise(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of what a turn has not kept have records. Its session goes on with other tokens, of
    few different ones, so that a later one is often the token of such a row; then its worker dies,
    and rows are imported."""
    ends: dict[str, int] = {}
    finish = StepWriter._finish

    def ended(writer: StepWriter, generation: Generation, token: int, n_tokens: int) -> str:
        if ends.get(generation.request.request_id) == n_tokens:
            return "stop"
        return finish(writer, generation, token, n_tokens)

    monkeypatch.setattr(StepWriter, "_finish", ended)

    async def scene(stage: Stage) -> None:
        rng = random.Random(seed)

        async def turns(name: str, history: list[int]) -> None:
            for _ in range(30):
                history += [rng.choice([20, 21]) for _ in range(rng.randrange(1, 5))]
                asked = stage.ask(history, rng.choice([1, 2, 3, 5, 20, 60]), name)
                ends[asked.request.request_id] = rng.randrange(1, asked.request.tokens_max + 1)
                await stage.start(asked)
                history = list(stage.up.state.sessions["", name].tokens)
                if rng.random() < 0.25:
                    stage.process(rng.choice(["left", "right"])).end(-9)
                if rng.random() < 0.2:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(turns(f"s{i}", words(10 * seed + i, 40)) for i in range(4)))
        assert sum_of(stage, "accepted")

    play(scene, repeats=2, slots=24, router__dwell_s=0.0)


async def test_a_draft_whose_row_is_not_finite_is_computed_again_without(
    site: Site, reference: Reference
) -> None:
    """The draft may be the cause, and no token depends on it: the turn has none any more."""
    prompt = repeating(3, 100)
    async with running_engine(site) as engine:
        loop = engine.state.lanes[0]
        answered: list[wire.StepDone] = []
        answer_of = loop.lane.answer

        async def wrong(asked: Any) -> wire.StepDone:
            done = await answer_of(asked)
            step = next(iter(loop._in_flight))
            if not answered and any(entry.drafts for entry in step.step.entries):
                answered.append(done)
                return wire.StepDone((), (0,), done.digests, done.verified, done.elapsed_us)
            return done

        loop.lane.answer = wrong  # type: ignore[method-assign]
        answer = await read(engine.submit(request(prompt, 150)))
        assert answered
        drafted = loop.meter.drafted
        assert answer.tokens == reference.tokens(prompt, 150)
        assert not drafted  # of a turn that has none any more
        await read(engine.submit(request(prompt, 150)))
        assert loop.meter.drafted


def step_of(*entries: wire.Entry, tokens: list[int], history: list[int] | None = None) -> Any:
    codes = array("Q", [ARENA_BIT | i for i in range(sum(e.n_pages for e in entries))])
    payload = codes.tobytes() + array("i", [*tokens, *(history or [])]).tobytes()
    return unpack(wire.Step(entries), payload, LIMITS)


def test_rows_behind_each_token_of_a_draft_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees the history up to its own token, and has a position of its own."""
    sampling = Sampling(temperature=1.0, presence_penalty=1.0, penalty_tokens=3)
    batch = step_of(
        wire.Entry(1, 1, 4, 2, 1, None),
        wire.Entry(2, 1, 8, 3, 1, sampling, 2, masked=True, drafts=2),
        wire.Entry(3, 1, 9, 1, 1, GREEDY),
        tokens=[1, 2, 30, 31, 32, 4],
        history=[29, 30],
    )
    wanted = wanted_rows(batch)
    assert (wanted.entries, wanted.rows.tolist()) == ([1, 1, 1, 2], [2, 3, 4, 5])
    assert wanted.masks == [(2, 9), (2, 10), (2, 11), None]
    asked: list[tuple[int, list[int] | None, int]] = []

    def keep(_sampling: Sampling, *, position: int, history: Any, mask: Any, **_: Any) -> None:
        asked.append((position, None if history is None else history.tolist(), mask))

    monkeypatch.setattr(host_device, "sample_spec", keep)
    masks: Any = [7, 8, 9, 0]
    sample_specs(batch, masks, wanted)
    assert asked == [(9, [29, 30], 7), (10, [29, 30, 31], 8), (11, [30, 31, 32], 9), (10, None, 0)]


def test_what_was_drafted_is_kept_up_to_the_first_mask_that_is_late() -> None:
    """Without the first mask there is no token. The masks of other entries do not matter."""
    entries = [wire.Entry(i, 1, 8, 3, 1, GREEDY, masked=True, drafts=2) for i in (1, 2)]
    batch = step_of(*entries, tokens=[30, 31, 32, 40, 41, 42])
    wanted = wanted_rows(batch)
    right: Any = [SimpleNamespace(token=t, logprob=0.0, top=(), nonfinite=False) for t in
                  (31, 32, 33, 41, 42, 43)]  # fmt: skip

    def kept(*late: int) -> tuple[list[int], list[int], list[int], dict[int, int]]:
        rows, nonfinite, unmasked, rejected = host_device.sampled(batch, wanted, right, [], late)
        assert not nonfinite
        of = [[row.token for row in rows if row.session == key] for key in (1, 2)]
        return of[0], of[1], unmasked, dict(rejected)

    assert kept() == ([31, 32, 33], [41, 42, 43], [], {})
    assert kept(1) == ([31], [41, 42, 43], [], {0: 2})
    assert kept(2, 4) == ([31, 32], [41], [], {0: 1, 1: 2})
    assert kept(0) == ([], [41, 42, 43], [0], {})
    assert kept(0, 1, 2, 5) == ([], [41, 42], [0], {1: 1})
    right[0].nonfinite = True
    assert host_device.sampled(batch, wanted, right, [], (0,))[1:3] == ([0], [])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (wire.Entry(1, 1, 4, 3, 1, GREEDY, drafts=3), "are a draft"),  # and no token before it
        (wire.Entry(1, 1, 4, 3, 1, GREEDY, drafts=-1), "are a draft"),
        (wire.Entry(1, 1, 253, 3, 1, GREEDY, drafts=2), "are a draft"),  # it would fill the page
        (wire.Entry(1, 1, 254, 4, 2, GREEDY, drafts=2), "are a draft"),  # is in two pages
        (wire.Entry(1, 1, 255, 4, 2, GREEDY, drafts=3), "are a draft"),  # in another page
        (wire.Entry(1, 1, 4, 3, 1, None, drafts=2), "no plain one"),
        (wire.Entry(1, 1, 4, 3, 1, GREEDY, banned=(3,), drafts=2), "no plain one"),
        (wire.Entry(1, 1, 4, 17, 1, GREEDY, drafts=LOGITS_ROWS_MIN), "rows with logits"),
    ],
)
def test_a_worker_refuses_drafts_that_cannot_be(entry: wire.Entry, why: str) -> None:
    with pytest.raises(BadStep, match=why):
        step_of(entry, tokens=[1] * entry.n_tokens)


def test_a_draft_may_reach_the_last_row_but_one_of_a_page() -> None:
    n = PAGE_TOKENS - 1 - 250
    step_of(wire.Entry(1, 1, 250, n, 1, GREEDY, drafts=n - 1), tokens=[1] * n)


def test_tokens_of_a_draft_are_right_up_to_the_first_that_differs() -> None:
    assert [n_accepted([1, 2, 3], of) for of in ([1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4])] == [
        3,
        1,
        0,
    ]
    assert n_accepted([], [5]) == 0
