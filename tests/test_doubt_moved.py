"""Rows that moved: a lane is found wrong while its open rows are elsewhere, or on their way (F46).

In the simulated world: one bit of one open row of a session is wrong. Whatever the moment of the
verdict, the next answer is right.
"""

from __future__ import annotations

import pytest

from tests.simulation.stage import Plan, Stage, play, words
from tests.test_doubt import ask, pages_of, publish, read_wrong, strike

POINTS = ("P0", "P1", "P2", "P3", "P4", "P5")
PROMPT = words(90, 300)


async def wrong_tail(stage: Stage) -> None:
    """An idle session on the left lane: its page is right, and the first row after it is not."""
    await publish(stage, "right", PROMPT)
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
