"""Who is wrong when two computations of a page differ (F46), and what NaN takes along (F45).

In the simulated world: one bit of one row comes out differently where the script says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from batchengine.core import BatchEngineError, ErrorEvent
from batchengine.engine import Generation
from batchengine.engine.doubt import TRIAL_S, PageOf, Verdict
from batchengine.engine.trial import KEY
from kv_store.store import Store
from tests.simulation.stage import Plan, Stage, play, words
from tests.simulation.wrong import wrong_lane

LANES = ("left", "right")


def store_of(stage: Stage) -> Store:
    store = stage.now.seam.opened
    assert store is not None
    return store


def pages_of(stage: Stage, tokens: Sequence[int]) -> int:
    """How many pages of these tokens the store would serve."""
    return len(store_of(stage).match_prefix(tokens, b""))


@contextlib.contextmanager
def no_prefix() -> Iterator[None]:
    """Nobody finds a page of the store: everything is computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "match_prefix", lambda *a, **k: [])
        yield


def strike(
    stage: Stage, lane: str, is_struck: Callable[[Any], bool], times: int = 1, **how: bool
) -> list[int]:
    """The lane is wrong in the first `times` frames of turns that `is_struck` picks."""
    struck: list[int] = []

    def plan(of: Any, step: Any) -> Plan | None:
        mine = [e for e in step.entries if e.session != KEY]
        if of.name != lane or not mine or len(struck) >= times or not is_struck(mine[0]):
            return None
        struck.append(mine[0].start)
        return Plan(0.004, **(how or {"flip": True}))  # type: ignore[arg-type]

    stage.plans.append(plan)
    return struck


@contextlib.contextmanager
def only(stage: Stage, lane: str) -> Iterator[None]:
    """Requests go to this lane."""
    others = [loop for loop in stage.now.loops if loop.lane.name != lane and not loop.drained]
    for loop in others:
        loop.drained = "for a moment"
    try:
        yield
    finally:
        for loop in others:
            loop.drained = ""
            loop.wake()


async def ask(stage: Stage, lane: str, prompt: Sequence[int], n: int, session: str) -> Generation:
    """A request that computes on this lane."""
    with only(stage, lane):
        asked = stage.ask(prompt, n, session)
        await stage.until(lambda: bool(asked.lane) or asked.finished)
    assert asked.lane == lane
    return asked


async def read_wrong(generation: Generation) -> tuple[int, str]:
    """How many tokens, whichever, and the error at the end."""
    tokens, error = 0, ""
    async for event in generation:
        if isinstance(event, ErrorEvent):
            error = event.error.api_code
        tokens += type(event).__name__ == "TokenEvent"
    return tokens, error


async def publish(stage: Stage, lane: str, prompt: Sequence[int]) -> None:
    """The pages of a prompt are in the store, computed by this lane."""
    await stage.read(await ask(stage, lane, prompt, 1, f"first {prompt[0]} {len(prompt)}"))
    await stage.until(lambda: pages_of(stage, prompt) == len(prompt) // 256)
    await stage.until(lambda: not any(loop.pages._flying for loop in stage.now.loops))


def told_aloud(stage: Stage, *texts: str) -> None:
    """They were logged as critical, which a seed takes for a failure."""
    for text in texts:
        assert any(text in line for line in stage._wrong), stage._wrong
    stage._wrong.clear()


def refuse() -> Any:
    """There is no fresh worker."""
    raise BatchEngineError("BE0000", "no memory for another worker")


def no_referee(stage: Stage) -> None:
    assert stage.up._upkeep is not None
    stage.up._upkeep._jury._referee = refuse


# ------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("bad", LANES)
def test_f46_a_lane_that_differs_in_one_bit_is_drained(bad: str) -> None:
    """Its page is not published, and its session goes on elsewhere, from good rows only."""

    async def scene(stage: Stage) -> None:
        good, prompt = LANES[bad == "left"], words(80, 300)
        await publish(stage, good, prompt)
        store = store_of(stage)
        published = store.digest(store.match_prefix(prompt, b"")[0])
        struck = strike(stage, bad, lambda e: e.start == 0)
        with no_prefix():
            asked = await ask(stage, bad, prompt, 1, "bad")
            await stage.until(lambda: bool(stage.lane(bad).drained))
        assert struck == [0]
        assert not stage.lane(good).drained
        assert store.counters["numerics_faults"] == 1
        assert store.digest(store.match_prefix(prompt, b"")[0]) == published
        told_aloud(stage, "a fresh worker computes what the store has")
        await read_wrong(asked)
        await stage.answer([*prompt, 81], 20, "bad")
        assert stage.home("bad") == good

    play(scene, limits__canary_s=0)


def test_f46_without_a_fresh_worker_the_writer_is_asked_again() -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(81, 300)
        no_referee(stage)
        await publish(stage, "left", prompt)
        strike(stage, "right", lambda e: e.start == 0)
        with no_prefix():
            asked = await ask(stage, "right", prompt, 1, "bad")
            await stage.until(lambda: bool(stage.lane("right").drained))
        assert "lane left computes what the store has" in stage.lane("right").drained
        told_aloud(stage, "lane right was wrong")
        await read_wrong(asked)
        await stage.answer([*prompt, 82], 20, "bad")

    play(scene, limits__canary_s=0)


def test_f46_when_nobody_can_say_neither_page_is_believed() -> None:
    """No witness at all: the stored page goes, no lane is blamed, the turn computes it again."""

    async def scene(stage: Stage) -> None:
        prompt = words(82, 300)
        await publish(stage, "left", prompt)
        stage.lane("left").drain("it is out of order")
        no_referee(stage)
        store = store_of(stage)
        (old,) = store.match_prefix(prompt, b"")
        strike(stage, "right", lambda e: e.start == 0)
        with no_prefix():
            asked = stage.ask(prompt, 30, "bad")
            await stage.until(lambda: not store.is_resident(old))
        await read_wrong(asked)
        told_aloud(stage, "nobody can say which is right")
        assert not stage.lane("right").drained
        assert not stage.lane("right").pages.muted
        await stage.until(lambda: pages_of(stage, prompt) == 1)
        await stage.answer([*prompt, 83], 20, "good")  # the page that was computed again is right

    play(scene, limits__canary_s=0)


def test_f46_the_only_lane_is_muted_after_two_verdicts() -> None:
    """It serves on with a third worker, but nothing that it computes is published any more."""

    async def scene(stage: Stage) -> None:
        first, second = words(83, 300), words(84, 300)
        for prompt in (first, second):
            await publish(stage, "right", prompt)  # the verdicts on left leave them
        stage.lane("right").drain("it is out of order")
        left = stage.lane("left")
        for incarnation, prompt in ((2, first), (3, second)):
            assert not left.pages.muted
            strike(stage, "left", lambda e: e.start == 0)
            with no_prefix():
                asked = stage.ask(prompt, 1, f"bad {incarnation}")
                await stage.until(lambda n=incarnation: left.lane.incarnation == n and left.up)
                await read_wrong(asked)
        told_aloud(stage, "a fresh worker computes what the store has", "none is published")
        assert not left.drained
        row = next(row for row in stage.up.lanes() if row["name"] == "left")
        assert "2 of its pages differed: none is published" in row["why"]
        assert stage.up.state == "degraded"
        third = words(85, 300)
        await stage.answer(third, 20, "third")
        await asyncio.sleep(5.0)
        assert pages_of(stage, third) == 0
        left.pages.muted = ""  # what waits for that would wait for ever
        left.wake()

    play(scene, limits__canary_s=0)


def test_f46_a_turn_whose_pages_are_in_doubt_again_and_again_fails() -> None:
    """Its lane is wrong each time, and no trial finds that out: twice it goes on."""

    async def scene(stage: Stage) -> None:
        prompt = words(86, 300)
        await publish(stage, "right", prompt)
        assert stage.up._upkeep is not None
        jury: Any = stage.up._upkeep._jury

        async def judge(*_: Any) -> None:
            """Nobody can compute the page."""

        jury.judge = judge
        struck = strike(stage, "left", lambda e: e.start == 0, times=9)
        with no_prefix():
            asked = await ask(stage, "left", prompt, 400, "new")
            tokens, error = await read_wrong(asked)
        assert error == "numeric_fault"
        assert tokens < 400
        assert len(struck) == 3
        assert [loop.drained for loop in stage.now.loops] == ["", ""]
        stage.plans.clear()
        await stage.answer(words(87, 600), 20, "new")
        stage._wrong.clear()

    play(scene, limits__canary_s=0)


def test_f46_pages_of_an_older_life_go_with_the_wrong_one_they_were_computed_from() -> None:
    """Sound copies of wrong rows: they would be found again behind the page computed anew."""

    async def scene(stage: Stage) -> None:
        prompt = words(88, 800)
        struck = strike(stage, "left", lambda e: e.start == 0)
        await read_wrong(await ask(stage, "left", prompt, 1, "old"))
        await stage.until(lambda: pages_of(stage, prompt) == 3)
        assert struck == [0]
        await stage.crash()
        stage.plans.clear()
        store = store_of(stage)
        old = store.match_prefix(prompt, b"")
        with no_prefix():
            told = await stage.read(stage.ask(prompt[:256], 300, "new"))
        assert not told.error
        told_aloud(stage, "nobody who is here was wrong")
        assert store.counters["numerics_faults"] == 1
        assert not any(store.is_resident(ref) for ref in old)
        await publish(stage, "right", prompt[:300])
        assert pages_of(stage, prompt) == 1
        await stage.answer(prompt, 20, "third")

    play(scene, limits__canary_s=0)


def test_f46_a_wrong_page_that_is_stored_again_during_the_trials_goes_too() -> None:
    """They take minutes: meanwhile it was evicted, and the wrong lane computed it anew."""

    async def scene(stage: Stage) -> None:
        prompt = words(89, 300)

        async def wrong(session: str) -> bytes:
            strike(stage, "left", lambda e: e.start == 0)
            await read_wrong(await ask(stage, "left", prompt, 1, session))
            await stage.until(lambda: pages_of(stage, prompt) == 1)
            store = store_of(stage)
            return store.digest(store.match_prefix(prompt, b"")[0])

        stored = await wrong("old")
        await stage.crash()
        stage.plans.clear()
        assert stage.up._upkeep is not None
        jury: Any = stage.up._upkeep._jury

        async def vote(*_: Any) -> Verdict:
            assert store_of(stage).evict(1) == 1
            assert await wrong("new") == stored
            return Verdict(None, False, "nobody who is here was wrong")

        jury._vote = vote
        page = PageOf(array("i", prompt[:256]), b"", 0)
        await jury.judge(stage.lane("right"), page, bytes(16), None)
        assert pages_of(stage, prompt) == 0
        told_aloud(stage, "nobody who is here was wrong")
        await stage.answer(prompt, 20, "third")

    play(scene, limits__canary_s=0)


# ------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("lag_s", [0.0005, 0.05, 3.0])
def test_f45_no_page_of_a_poisoned_turn_stays_published(lag_s: float) -> None:
    """Sealed before, on their way, or not begun: none is found afterwards."""

    async def scene(stage: Stage) -> None:
        stage.now.threads.delay = lambda name: lag_s if name == "kv-pages" else 0.0005
        prompt = words(45, 700)
        strike(stage, stage.lane("left").lane.name, lambda e: e.start >= 710, nan=True)
        strike(stage, stage.lane("right").lane.name, lambda e: e.start >= 710, nan=True)
        told = await stage.read(stage.ask(prompt, 60, "s"))
        assert told.error == "numeric_fault"
        assert 5 < len(told.tokens) < 20
        if lag_s < 0.001:
            assert store_of(stage).counters["pages_published"] == 2
            assert pages_of(stage, prompt) == 0
        stage.plans.clear()
        await asyncio.sleep(20.0)
        assert pages_of(stage, prompt) == 0
        again = await stage.answer([*prompt, *told.tokens], 20, "s")
        assert again.done is not None
        assert again.done.usage.cached_tokens == 0

    play(scene, limits__canary_s=0)


def test_f45_pages_from_before_the_turn_stay() -> None:
    """Somebody else's work, found in the store, is none of its own."""

    async def scene(stage: Stage) -> None:
        shared = words(46, 520)
        await publish(stage, "left", shared)
        strike(stage, "left", lambda e: e.start >= 900, nan=True)
        prompt = [*shared, *words(47, 360)]
        told = await stage.read(await ask(stage, "left", prompt, 60, "s"))
        assert told.error == "numeric_fault"
        assert pages_of(stage, prompt) == 2
        await stage.answer([*prompt, *told.tokens], 20, "s")

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_f45_a_page_that_others_hold_is_computed_again(is_wrong: bool) -> None:
    """It stays if it comes out alike on the other lane; else it goes, and its lane is judged."""

    async def scene(stage: Stage) -> None:
        prompt = words(48, 600)
        if is_wrong:
            strike(stage, "left", lambda e: e.start == 0)
        strike(stage, "left", lambda e: e.start >= 660, nan=True)
        proofs: list[str] = []

        def watch(lane: Any, step: Any) -> None:
            proofs.extend(lane.name for e in step.entries if e.session == KEY)

        stage.plans.insert(0, watch)
        bad = await ask(stage, "left", prompt, 100, "bad")
        await stage.until(lambda: pages_of(stage, prompt) == 2)
        other = await ask(stage, "left", [*prompt, 7], 100, "other")
        reading = asyncio.ensure_future(read_wrong(other))
        stage.tasks.add(reading)  # type: ignore[arg-type]
        assert (await read_wrong(bad))[1] == "numeric_fault"
        assert other.cached_tokens == 512
        await reading
        await asyncio.sleep(1.0)
        assert proofs
        assert proofs[0] == "right"
        if is_wrong:
            told_aloud(stage, "lane left was wrong")
            assert stage.lane("left").drained
        else:
            assert pages_of(stage, prompt) == 2
            assert set(proofs) == {"right"}
        await stage.answer([*prompt, 9], 20, "third")

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("seed", range(6))
def test_f46_a_lane_that_is_wrong_for_a_while_is_found_out(seed: int) -> None:
    """More of them: `python -m tests.simulation --wrong`."""
    outcome = wrong_lane(seed)
    assert outcome.counts["wrong steps"] > 0
    assert outcome.counts["right answers"] == 1


# ------------------------------------------------------------------- several reasons at once


def test_f46_a_verdict_is_one_of_as_many_as_there_are_doubts() -> None:
    """Until the last of them the lane publishes nothing; and a turn in doubt computes nothing,
    however fast its reader is."""

    async def scene(stage: Stage) -> None:
        prompts = [words(seed, 300) for seed in (60, 61)]
        for prompt in prompts:
            await publish(stage, "right", prompt)
        assert stage.up._upkeep is not None
        jury: Any = stage.up._upkeep._jury
        verdicts: list[asyncio.Event] = []

        async def judge(*_: Any) -> None:
            verdicts.append(asyncio.Event())
            if len(verdicts) <= len(prompts):
                await verdicts[-1].wait()

        jury.judge = judge
        strike(stage, "left", lambda e: e.start == 0, times=2)
        left, asked = stage.lane("left"), list[Generation]()
        stage.now.threads.delay = lambda name: 0.5 if name == "kv-pages" else 0.0005
        with no_prefix():
            for prompt in prompts:
                asked.append(await ask(stage, "left", prompt, 400, f"bad {prompt[0]}"))
                await stage.until(lambda: len(left.pages._flying) == len(asked))
            seals = list(left.pages._flying)
            await stage.until(lambda: len(verdicts) == 1)
        (other,) = [seal for seal in seals if seal.session is stage.up._turns[asked[1]].session]
        jury.doubt(left, other)  # it was with the store, too
        await stage.until(lambda: len(verdicts) == 2)
        turns = [stage.up._turns[generation] for generation in asked]
        for turn in turns:
            turn.generation.paused_since_ms = 1.0  # and its reader is slow
            stage.up._has_room(turn.generation)
        assert [turn.paused for turn in turns] == [True, True]
        verdicts[0].set()
        await stage.until(lambda: not turns[0].paused)
        assert turns[1].paused
        assert left.pages.muted
        turns[1].generation.paused_since_ms = left.now_ms()
        verdicts[1].set()
        await asyncio.sleep(1.0)
        assert not left.pages.muted
        assert turns[1].paused, "its reader is still slow"
        stage.up._has_room(turns[1].generation)
        assert not turns[1].paused
        for generation in asked:
            await read_wrong(generation)
        stage._wrong.clear()

    play(scene, limits__canary_s=0)


def test_a_page_that_is_computed_again_has_time_to_be_written() -> None:
    """The limit is one of computing: the disk may take longer, and the page has its writer."""

    async def scene(stage: Stage) -> None:
        prompt = words(62, 256)
        await publish(stage, "left", prompt)
        store, upkeep = store_of(stage), stage.up._upkeep
        assert upkeep is not None
        (ref,) = store.match_prefix(prompt, b"")
        digest = store.digest(ref)
        store.condemn(ref)
        for loop in stage.now.loops:
            loop.recheck()
        stage.now.threads.delay = lambda name: TRIAL_S if name == "kv-pages" else 0.0005
        await upkeep.recompute(PageOf(array("i", prompt), b"", 0), digest)
        stage.now.threads.delay = lambda name: 0.0005
        (again,) = store.match_prefix(prompt, b"")
        assert again != ref
        assert any(again in loop.pages.wrote for loop in stage.now.loops)

    play(scene, limits__canary_s=0)
