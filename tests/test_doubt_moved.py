"""Rows that moved: a lane is found wrong while its open rows are elsewhere, or on their way (F46).

In the simulated world: one bit of one open row of a session is wrong. Whatever the moment of the
verdict, the next answer is right.
"""

from __future__ import annotations

import asyncio

import pytest

from batchengine.engine.trial import TrialFailed
from tests.simulation.stage import Plan, Stage, play, words
from tests.test_doubt import (
    ask,
    no_prefix,
    no_referee,
    only,
    pages_of,
    publish,
    read_wrong,
    strike,
    told_aloud,
)

POINTS = ("P0", "P1", "P2", "P3", "P4", "P5")
PROMPT = words(90, 300)


async def wrong_tail(stage: Stage) -> None:
    """An idle session on the left lane: its page is right, and the first row after it is not."""
    await publish(stage, "right", PROMPT[:256])
    struck = strike(stage, "left", lambda e: e.start == 256)
    asked = await ask(stage, "left", PROMPT, 1, "s")
    await read_wrong(asked)
    assert struck == [256]
    assert asked.cached_tokens == 256
    assert stage.up._named["", "s"].frontier == 300


@pytest.mark.parametrize("point", POINTS)
def test_f46_open_rows_of_a_lane_found_wrong_do_not_move(point: str) -> None:
    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)

        def on_point(at: str) -> None:
            if at == point:
                stage.lane("left").drain("it computes other numbers")

        stage.up.handover.on_point = on_point
        report = await stage.up.promote("s", to="right")
        assert report["result"] == "moved"
        assert report["rows_recomputed"] == (44 if point >= "P2" else 0), "given up on the way"
        session = stage.up._named["", "s"]
        assert (session.frontier, session.places) == (256, [])
        told = await stage.answer([*PROMPT, 91], 20, "s")
        assert told.done is not None
        assert told.done.usage.cached_tokens == 256

    play(scene, limits__canary_s=0)


def test_f46_a_request_takes_no_open_rows_away_from_a_lane_that_is_yet_to_look() -> None:
    """The drained lane has a long frame under way: its sessions fall back only after that."""

    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)
        left = stage.lane("left")
        stage.plans.insert(0, lambda of, step: Plan(3.0) if of.name == "left" else None)
        slow = await ask(stage, "left", words(92, 40), 1, "other")
        await stage.until(lambda: left._flight is not None)
        left.drain("it computes other numbers")
        told = await stage.answer([*PROMPT, 91], 20, "s")
        assert left.is_rechecking, "it has not looked yet"
        assert stage.home("s") == "right"
        assert told.done is not None
        assert told.done.usage.cached_tokens == 256
        stage.plans.clear()
        await read_wrong(slow)
        assert pages_of(stage, PROMPT) == 1

    play(scene, limits__canary_s=0)


# --------------------------------------------------------------------- before the verdict


async def verdict(stage: Stage, lane: str) -> None:
    assert stage.up._upkeep is not None
    await stage.up._upkeep._jury._punish(stage.lane(lane), "it computes other numbers")
    assert stage.lane(lane).drained


async def moved(stage: Stage) -> None:
    """The wrong tail is on the right lane."""
    await wrong_tail(stage)
    report = await stage.up.promote("s", to="right")
    assert report["rows_copied"] == 44


async def assert_right(stage: Stage) -> None:
    """The session and a stranger with the same prompt: only the first page is of any use."""
    for session in ("s", None):
        told = await stage.answer([*PROMPT, 91], 20, session)
        assert told.done is not None
        assert told.done.usage.cached_tokens <= 256


def test_f46_open_rows_that_moved_before_the_verdict_are_given_up() -> None:
    async def scene(stage: Stage) -> None:
        await moved(stage)
        await verdict(stage, "left")
        await assert_right(stage)
        assert stage.up._named["", "s"].pinned, "the page of the other lane stays"

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("lag_s", [0.0005, 0.3])
def test_f46_a_page_begun_by_the_wrong_lane_and_filled_by_another_is_given_up(lag_s: float) -> None:
    """Published at the verdict, or on its way to the store."""

    async def scene(stage: Stage) -> None:
        await moved(stage)
        stage.now.threads.delay = lambda name: lag_s if name == "kv-pages" else 0.0005
        longer = [*PROMPT, *words(93, 300)]
        await read_wrong(stage.ask(longer, 1, "s"))
        assert stage.home("s") == "right"
        await stage.until(lambda: pages_of(stage, longer) == (2 if lag_s < 0.1 else 1))
        await verdict(stage, "left")
        await stage.until(lambda: not stage.lane("right").pages._flying)
        assert pages_of(stage, longer) == 1
        await assert_right(stage)
        for session in ("s", None):
            await stage.answer([*longer, 94], 20, session)

    play(scene, limits__canary_s=0)


def test_f46_a_frame_under_way_at_the_verdict_publishes_nothing() -> None:
    """It fills a page from rows of the wrong lane, and is committed after the verdict."""

    async def scene(stage: Stage) -> None:
        await moved(stage)
        longer = [*PROMPT, *words(93, 300)]
        slow = stage.plans
        slow.insert(0, lambda of, step: Plan(2.0) if of.name == "right" and step.entries else None)
        asked = stage.ask(longer, 1, "s")
        await stage.until(lambda: stage.lane("right")._flight is not None)
        await verdict(stage, "left")
        assert stage.lane("right")._flight is not None
        await read_wrong(asked)
        slow.clear()
        await stage.until(lambda: not stage.lane("right").pages._flying)
        await assert_right(stage)
        for session in ("s", None):
            await stage.answer([*longer, 94], 20, session)

    play(scene, limits__canary_s=0)


def test_f46_a_parked_tail_that_somebody_took_before_the_verdict_is_given_up() -> None:
    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)
        session = stage.up._named["", "s"]
        await stage.until(lambda: session.parked is not None)
        with only(stage, "right"):
            twin = stage.ask([*PROMPT, 95], 1, "twin")
            await read_wrong(twin)
        assert twin.cached_tokens == 300
        await verdict(stage, "left")
        told = await stage.answer([*PROMPT, 95, 96], 20, "twin")
        assert told.done is not None
        assert told.done.usage.cached_tokens == 256

    play(scene, limits__canary_s=0)


def test_f46_who_has_nothing_of_the_wrong_lane_keeps_its_rows() -> None:
    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)
        own = words(97, 300)
        await stage.read(await ask(stage, "right", own, 1, "own"))
        await verdict(stage, "left")
        told = await stage.answer([*own, 98], 20, "own")
        assert told.done is not None
        assert told.done.usage.cached_tokens == 300

    play(scene, limits__canary_s=0)


# ------------------------------------------------------------------------ on a drained lane


@pytest.mark.parametrize("kept", [300, 200])
def test_a_turn_that_waits_on_a_drained_lane_leaves_when_another_comes_back(kept: int) -> None:
    """What the store has of its open page, parked or sealed, holds it nowhere."""

    async def scene(stage: Stage) -> None:
        await publish(stage, "left", PROMPT[:256])
        await stage.read(await ask(stage, "left", PROMPT, 1, "s"))
        await stage.until(lambda: stage.up._named["", "s"].parked is not None)
        stage.lane("left").drain("it is out of order")
        await stage.until(lambda: not stage.lane("left").is_rechecking)
        with only(stage, "left"):  # the other one is down for a moment
            asked = stage.ask([*PROMPT[:kept], 99], 20, "s")
            await asyncio.sleep(5.0)
            assert not asked.lane
            assert stage.home("s") == "left"
        told = await asyncio.wait_for(stage.read(asked), 10.0)
        assert len(told.tokens) == 20
        assert stage.home("s") == "right"

    play(scene, limits__canary_s=0)


# ------------------------------------------------------------------------ doubts on the way


@pytest.mark.parametrize("seen", ["P3", "P4", "P5", "moved", "adopted"])
def test_f46_a_doubt_finds_a_session_that_has_taken_the_rows_elsewhere(seen: str) -> None:
    """Nothing is told before the verdict; nobody can give one, and neither page is believed."""

    async def scene(stage: Stage) -> None:
        await publish(stage, "right", PROMPT[:256])
        assert stage.up._upkeep is not None
        jury, left = stage.up._upkeep._jury, stage.lane("left")
        no_referee(stage)
        decided = asyncio.Event()

        async def digest(*_: object, **__: object) -> bytes:
            await decided.wait()
            raise TrialFailed("no witness")

        def in_doubt() -> bool:
            return bool(jury._open[left])

        jury.digest = digest
        stage.now.threads.delay = lambda name: 2.0 if name == "kv-pages" else 0.0005
        strike(stage, "left", lambda e: e.start == 0)
        with no_prefix():
            asked = await ask(stage, "left", PROMPT, 400, "s")
            await stage.computed(asked, 2)
            if seen == "adopted":
                stage.process("left").end(-9)
                await stage.until(lambda: left.lane.incarnation == 2 and left.up)
                await stage.until(lambda: stage.up._named["", "s"].frontier > 256)
            else:

                async def at(point: str) -> None:
                    if point == seen:
                        await stage.until(in_doubt)

                stage.up.handover.on_point = at
                moving = asyncio.ensure_future(stage.up.promote("s", to="right"))
            await stage.until(in_doubt)
            told = asked.completion_tokens
            await asyncio.sleep(1.0)
            assert asked.completion_tokens <= told + 1, "what was under way, if anything"
            assert stage.up._named["", "s"].frontier == 0
            decided.set()
            if seen != "adopted":
                assert (await moving)["result"] == "moved"
        await read_wrong(asked)
        await assert_right(stage)
        await stage.until(lambda: not any(loop.pages._flying for loop in stage.now.loops))
        told_aloud(stage, "nobody can say which is right")

    play(scene, limits__canary_s=0)
