"""A lane with two steps in flight gives the tokens of a lane with one."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from batchengine.config import LaneConfig
from batchengine.core import GREEDY, Sampling, TokenEvent
from batchengine.engine import Engine
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.steps import inflight
from batchengine.lanes.step_input import BadStep, StepLimits, take_samples, unpack
from batchengine.session_kv import pages_for
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from tests.engine.test_constrained import LONG, constrained, expected
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    unread,
    until,
    words,
)

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3, logprobs=2),
    Sampling(temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.4),
)
LIMITS = StepLimits(tokens_max=16, entries_max=4, context_tokens=2048, vocab_size=2048)


@pytest.mark.parametrize("depth", [2, 3])
async def test_decodes_are_sent_ahead(site: Site, reference: Reference, depth: int) -> None:
    """Also over the end of a page, and with penalties that see the token not known yet."""
    prompts = [words(i, n) for i, n in enumerate((40, 250, 300))]
    async with running_engine(
        site, lane__steps_in_flight=depth, lane__draft_tokens_max=0
    ) as engine:
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


@pytest.mark.parametrize("depth", [2, 3])
async def test_the_entry_after_an_early_end_is_void(
    site: Site, reference: Reference, depth: int
) -> None:
    """A stop string ends one turn while its next entry is computed; its session then goes on."""
    prompt = words(8, 40)
    expected = reference.tokens(prompt, 30)
    async with running_engine(
        site, lane__steps_in_flight=depth, lane__draft_tokens_max=0
    ) as engine:
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


@pytest.mark.parametrize("depth", [2, 3])
async def test_constrained_answers_are_sent_ahead(
    site: Site, reference: Reference, depth: int
) -> None:
    """Their masks follow the commit of the step before; the entry after the end has none."""
    asked = [constrained(words(i, 40 + i), LONG) for i in range(3)]
    free = request(words(9, 50), 90)
    async with running_engine(
        site, lane__steps_in_flight=depth, lane__draft_tokens_max=0
    ) as engine:
        generations = [engine.submit(one) for one in (*asked, free)]
        answers = await asyncio.gather(*map(read, generations))
        meter = engine.state.lanes[0].meter
        assert meter.ahead > meter.steps // 3
    for one, answer in zip(asked, answers, strict=False):
        assert answer.tokens == expected(reference, one)
        assert answer.reason == "stop"
    assert answers[3].tokens == reference.tokens(words(9, 50), 90)


@pytest.mark.parametrize(
    ("n", "n_tokens"), [(16, 400), pytest.param(48, 900, marks=pytest.mark.slow)]
)
async def test_pages_that_begin_and_end_let_no_step_wait(
    site: Site, reference: Reference, n: int, n_tokens: int
) -> None:
    """Sessions at different places of their pages: each takes a page, and seals the one before. The
    first ones may have hundreds of tokens when the last one begins."""
    prompts = [words(i, 40 + i * 256 // n) for i in range(n)]
    async with running_engine(
        site, lane__steps_in_flight=2, lane__draft_tokens_max=0, lane__entries_max=n
    ) as engine:
        lane = engine.state.lanes[0]
        begun = [engine.submit(request(prompt, n_tokens)) for prompt in prompts]
        readers = [asyncio.ensure_future(read(generation)) for generation in begun]
        await until(lambda: all(generation.completion_tokens > 4 for generation in begun))
        counts = lane.meter.steps, lane.meter.ahead
        end = n_tokens - 10
        await until(lambda: any(generation.completion_tokens > end for generation in begun))
        steps, ahead = lane.meter.steps - counts[0], lane.meter.ahead - counts[1]
        answers = await asyncio.gather(*readers)
        assert lane.kv.sealing.sealed >= n
    assert (steps > 20, ahead > 0.95 * steps) == (True, True), (steps, ahead)
    for i in (0, n // 2, n - 1):
        assert answers[i].tokens == reference.tokens(prompts[i], n_tokens)


@pytest.mark.parametrize("longest_ms", [1e6, 0.0])
async def test_short_chunks_of_a_prompt_are_sent_ahead_beside_decodes(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch, longest_ms: float
) -> None:
    monkeypatch.setattr(inflight, "CHUNK_AHEAD_MS_MAX", longest_ms)
    prompt, beside = words(30, 1900), [words(i, 40) for i in range(3)]
    async with running_engine(
        site, lane__steps_in_flight=2, lane__draft_tokens_max=0, lane__chunk_tokens_max=32
    ) as engine:
        lane = engine.state.lanes[0]
        begun = [await started(engine, request(one, 400), 4) for one in beside]
        frames = watch(lane)
        answer = await read(engine.submit(request(prompt, 5, session="long")))
        chunks = [frame for frame in frames if any(e.n_tokens > 1 for e in frame.entries)]
        assert len(chunks) >= 1900 // 32
        share = sum(map(is_ahead, chunks)) / len(chunks)
        assert share > 0.8 if longest_ms else share == 0.0
        for generation, _ in begun:
            generation.cancel()
        others = [await reader for _, reader in begun]
    assert answer.tokens == reference.tokens(prompt, 5)
    for one, other in zip(beside, others, strict=True):
        assert other.tokens == reference.tokens(one, 400)[: len(other.tokens)]


async def test_a_third_step_is_in_flight_while_all_are_short(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a history lacks more than the last sample, which the worker knows alone."""
    found: list[int] = []
    async with running_engine(site, lane__steps_in_flight=3, lane__draft_tokens_max=0) as engine:
        lane = engine.state.lanes[0]
        for queue_ms, sampling in ((1e6, SAMPLINGS[1]), (0.0, SAMPLINGS[1]), (1e6, SAMPLINGS[2])):
            monkeypatch.setattr(inflight, "QUEUE_MS_MAX", queue_ms)
            deepest: list[int] = []
            lane.lane.post = watched_depth(lane, deepest)  # type: ignore[method-assign]
            answer = await read(engine.submit(request(words(3, 40), 30, sampling=sampling)))
            assert answer.tokens == reference.tokens(words(3, 40), 30, sampling)
            found.append(max(deepest))
    assert found == [3, 2, 2]


def watched_depth(loop: LaneLoop, depths: list[int]) -> Callable[..., Any]:
    """`post`, which notes how many steps are in flight with each."""
    post = loop.lane.post

    def watched(step: wire.Step, payload: bytes, **how: Any) -> Any:
        depths.append(len(loop._in_flight))
        return post(step, payload, **how)

    return watched


async def test_short_chunks_of_a_prompt_alone_are_sent_ahead(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "CHUNK_AHEAD_MS_MAX", 1e6)
    prompt = words(33, 1900)
    async with running_engine(
        site, lane__steps_in_flight=2, lane__draft_tokens_max=0, lane__chunk_tokens_max=64
    ) as engine:
        meter = engine.state.lanes[0].meter
        answer = await read(engine.submit(request(prompt, 1)))
        assert meter.ahead > 1900 // 64 // 2
        assert engine.stats()["tokens_recomputed"] == 0
    assert answer.tokens == reference.tokens(prompt, 1)


async def test_a_page_of_a_step_ahead_may_be_that_of_a_session_at_rest(
    site: Site, reference: Reference
) -> None:
    """The arena is full: the session that has rested longest gives its page up, none that runs."""
    resting, prompts = [words(10 + i, 100) for i in range(2)], [words(i, 240) for i in range(2)]
    async with running_engine(
        site,
        lane__steps_in_flight=2,
        lane__draft_tokens_max=0,
        lane__entries_max=4,
        lane__open_pages=4,
    ) as engine:
        lane = engine.state.lanes[0]
        for i, prompt in enumerate(resting):
            await read(engine.submit(request(prompt, 2, session=f"rests{i}")))
        frames = watch(lane)
        asked = [request(prompt, 40) for prompt in prompts]
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        takes = [frame for frame in frames if any(slot.page == 1 for slot in frame.reserve)]
        assert takes
        assert any(map(is_ahead, takes))
        assert not lane.seats.pages_short.is_set()
        again = [
            await read(engine.submit(request([*prompt, 9], 5, session=f"rests{i}")))
            for i, prompt in enumerate(resting)
        ]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference.tokens(prompt, 40)
    for prompt, answer in zip(resting, again, strict=True):
        assert answer.tokens == reference.tokens([*prompt, 9], 5)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("end", ["stop", "cancel", "move", "kill"])
async def test_a_page_of_a_step_ahead_is_given_back(
    site: Site, reference: Reference, end: str, depth: int
) -> None:
    """The turn ends, moves to another lane or loses its worker while the page is taken."""
    lanes = tuple(
        LaneConfig(name, threads=1, tier=tier, steps_in_flight=depth, draft_tokens_max=0)
        for name, tier in (("fast", "fast"), ("bulk", "bulk"))
    )
    async with running_engine(site, lanes=lanes, router__promote_auto=False) as engine:
        prompt, stop = await ending_with_a_page(engine) if end == "stop" else (words(1, 246), ())
        moves: list[asyncio.Future[Any]] = []
        takes: list[wire.Step] = []

        def sent(home: LaneLoop, frame: wire.Step) -> None:
            if takes or not takes_second_page(frame):
                return
            takes.append(frame)
            if end == "cancel":
                generation.cancel()
            elif end == "move":
                other = "bulk" if home.lane.name == "fast" else "fast"
                moves.append(asyncio.ensure_future(engine.promote("", "s", to=other)))
            elif end == "kill":
                os.kill(home.lane.pid, signal.SIGKILL)

        for loop in engine.state.lanes:
            watch(loop, functools.partial(sent, loop))
        generation = engine.submit(request(prompt, 40, session="s", stop=stop))
        answer = await read(generation)
        assert takes
        await asyncio.gather(*moves)
        await until(lambda: not any(loop._in_flight for loop in engine.state.lanes))
        await until(lambda: are_pages_right(engine))  # once an import that was begun has ended
        longer = [*prompt, *reference.tokens(prompt, 40)[: len(answer.tokens)], 77]
        again = await read(engine.submit(request(longer, 10, session="s")))
    assert answer.tokens == reference.tokens(prompt, 40)[: len(answer.tokens)]
    assert len(answer.tokens) == 40 or end in ("stop", "cancel")
    assert again.tokens == reference.tokens(longer, 10)


async def test_a_turn_that_pauses_gives_the_page_of_its_next_step_back(
    site: Site, reference: Reference
) -> None:
    async with running_engine(site, lane__steps_in_flight=2, lane__draft_tokens_max=0) as engine:
        lane = engine.state.lanes[0]

        def is_paused() -> bool:
            return not lane._in_flight and all(turn.paused for turn in lane.running.values())

        first = await unread(engine, request(words(1, 100), 600), 8)
        await until(is_paused)
        n = first.completion_tokens
        first.cancel()
        prompt = words(2, 513 - n)
        generation = await unread(engine, request(prompt, 600), 8)
        void = lane.meter.void
        await until(is_paused)
        assert (generation.completion_tokens, lane.meter.void) == (n, void + 1)
        (turn,) = lane.running.values()
        assert (turn.session.frontier, len(turn.session.kv.codes)) == (512, 2)
        answer = await read(generation)
    assert answer.tokens == reference.tokens(prompt, 600)


@pytest.mark.parametrize("ahead", [True, False])
async def test_a_session_is_cut_under_steps_ahead_only(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A prompt loses a page, which is not published, while its next chunk is computed: the chunk is
    void if it is ahead; one that is not is committed first, and the one after it is void."""
    monkeypatch.setattr(inflight, "CHUNK_AHEAD_MS_MAX", 1e6)
    prompt = words(31, 1500)
    async with running_engine(
        site, lane__steps_in_flight=2, lane__draft_tokens_max=0, lane__chunk_tokens_max=64
    ) as engine:
        lane = engine.state.lanes[0]
        _, beside = await started(engine, request(words(1, 40), 200), 4)
        dropped: list[wire.Step] = []

        def sent(frame: wire.Step) -> None:
            seals = [seal for seal in lane.kv.sealing.in_flight if not seal.written]
            own = [s.session for s in seals if s.session and s.session.session_id == "long"]
            if not ahead:
                lane.wake()  # the next step is not ahead either
            if not dropped and own and any(entry.n_tokens > 1 for entry in frame.entries):
                assert is_ahead(frame) == ahead
                dropped.append(frame)
                lane.kv.sealing.drop(own[0])
                time.sleep(0.05)  # the store's thread is done before the next step is planned
                lane._is_asked = False  # so the next one is ahead

        watch(lane, sent)
        answer = await read(engine.submit(request(prompt, 5, session="long")))
        await beside
        assert dropped
        assert lane.meter.void == 1
    assert answer.tokens == reference.tokens(prompt, 5)


async def test_a_worker_dies_while_a_step_ahead_would_read_a_page_back(
    site: Site, reference: Reference
) -> None:
    prompt = words(32, 200)
    async with running_engine(site, lane__steps_in_flight=2, lane__draft_tokens_max=0) as engine:
        lane = engine.state.lanes[0]
        killed: list[wire.Step] = []

        def sent(frame: wire.Step) -> None:
            if not killed and frame.verify and is_ahead(frame):
                killed.append(frame)
                os.kill(lane.lane.pid, signal.SIGKILL)

        watch(lane, sent)
        answer = await read(engine.submit(request(prompt, 200)))
        assert killed
        async with asyncio.timeout(20):
            await until(lambda: not lane.kv.sealing.in_flight)
    assert answer.tokens == reference.tokens(prompt, 200)


def watch(
    loop: LaneLoop, then: Callable[[wire.Step], None] = lambda frame: None
) -> list[wire.Step]:
    """The frames that the lane sends from now on; `then` is called after each."""
    frames, post = list[wire.Step](), loop.lane.post

    def watched(step: wire.Step, payload: bytes, **how: Any) -> Any:
        request = post(step, payload, **how)
        frames.append(step)
        then(step)
        return request

    loop.lane.post = watched  # type: ignore[method-assign]
    return frames


def is_ahead(frame: wire.Step) -> bool:
    return any(entry.takes_sample for entry in frame.entries)


def takes_second_page(frame: wire.Step) -> bool:
    """Whether a step ahead begins the second page of its session."""
    return is_ahead(frame) and bool(frame.reserve) and frame.entries[0].start == 256


def are_pages_right(engine: Engine) -> bool:
    """No session holds a page without rows, and no one else holds a slot."""
    for loop in engine.state.lanes:
        arena = loop.kv.slots.arena
        sessions = list(loop.sessions.values())
        if any(len(session.kv.codes) > pages_for(session.frontier) for session in sessions):
            return False
        n_open = sum([len(session.kv.open) for session in sessions])
        if arena is not None and (loop.kv.sealing.in_flight or arena.n_open != n_open):
            return False
    return True


async def ending_with_a_page(engine: Engine) -> tuple[list[int], tuple[str, ...]]:
    """A prompt and a text that ends its answer with the token that the last row of a page gives:
    the step after that takes a page, and is void."""
    for seed in range(50):
        prompt = words(seed, 246)
        found = await read(engine.submit(request(prompt, 20)))
        texts = [event.text for event in found.events if isinstance(event, TokenEvent)]
        stop = "".join(texts[7:11])
        if stop and texts[10] and "".join(texts).find(stop) == len("".join(texts[:7])):
            return prompt, (stop,)
    raise AssertionError("no answer of 50 has such a text")


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
