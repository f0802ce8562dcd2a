"""The canary (F46): a page that every idle lane computes, with equal bits.

In the simulation: a lane is wrong by one bit of one row, or by NaN, in frames of the test's choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from batchengine.engine.audit.canary import canary_tokens
from batchengine.engine.lane.recompute import KEY
from tests.engine.audit.scene import is_recompute, logged, no_fresh_worker
from tests.simulation.stage import Plan, Stage, play, words

EVERY_S = 60.0


def canaries(stage: Stage, lane: str, result: str) -> float:
    """The number of canaries of a lane with this result."""
    return stage.up.metrics.canaries_total.labels(lane, result)._value.get()


def wrong(stage: Stage, lane: str, is_wrong: Callable[[Any], bool], **how: bool) -> list[str]:
    """Make the lane wrong in the frames that `is_wrong` selects; they are noted."""
    selected: list[str] = []

    def plan(of: Any, step: Any) -> Plan | None:
        if of.name == lane and step.entries and is_wrong(step):
            selected.append(of.name)
            return Plan(0.004, **(how or {"flip": True}))  # type: ignore[arg-type]
        return None

    stage.plans.append(plan)
    return selected


def test_canary_tokens_are_in_the_vocabulary() -> None:
    for n_vocab in (1, 40, 2048, 151_936):
        tokens = canary_tokens(n_vocab)
        assert len(tokens) == 256
        assert 0 <= min(tokens) <= max(tokens) < n_vocab


def test_idle_lanes_compute_the_same_canary_repeatedly() -> None:
    """A canary leaves no page in the store, no slot in the arena and no session."""

    async def scene(stage: Stage) -> None:
        await asyncio.sleep(2.5 * EVERY_S)
        for name in ("left", "right"):
            assert canaries(stage, name, "equal") == 3
            assert stage.lane(name).kv.slots.available == stage.slots
        store = stage.now.seam.opened
        assert store is not None
        assert store.stat()["pages_published"] == 0
        assert stage.up.stats()["troubles"] == []

    play(scene, limits__canary_s=EVERY_S)


def test_a_canary_interval_of_zero_is_off() -> None:
    async def scene(stage: Stage) -> None:
        frames = wrong(stage, "left", is_recompute)
        await asyncio.sleep(100)
        assert not frames

    play(scene, limits__canary_s=0)


def test_a_busy_lane_computes_no_canary_and_abandons_one_when_a_request_comes() -> None:
    """The first frame after a request belongs to it, except for the canary's piece in flight."""

    async def scene(stage: Stage) -> None:
        frames: list[tuple[str, int, bool]] = []

        def plan(lane: Any, step: Any) -> Plan | None:
            frames.extend((lane.name, e.n_tokens, e.session == KEY) for e in step.entries)
            return Plan(0.5) if is_recompute(step) else None

        stage.plans.append(plan)
        await stage.until(lambda: any(canary for _, _, canary in frames))
        name = frames[0][0]
        assert frames[0][1] == 16, "in pieces"
        loops = [loop for loop in stage.now.loops if loop.lane.name != name]
        for loop in loops:
            loop.assigned += 9  # no request is routed there
        asked = stage.ask(words(1, 40), 200, "s")
        reader = stage.start(asked)
        await stage.until(lambda: canaries(stage, name, "given_up") == 1)
        await reader
        for loop in loops:
            loop.assigned -= 9
        assert asked.lane == name
        mine = [canary for lane, _, canary in frames if lane == name]
        assert mine == sorted(mine, reverse=True), "canary frames, then those of the turn"
        await stage.until(lambda: canaries(stage, name, "equal") == 1)

    play(scene)


def test_a_canary_takes_no_slot_from_an_idle_session() -> None:
    """An arena full of reclaimable slots has no room for a canary: no session loses a row."""

    async def scene(stage: Stage) -> None:
        prompts = [words(10 + i, 100) for i in range(2 * stage.slots)]
        for i, prompt in enumerate(prompts):
            await stage.answer(prompt, 2, f"s{i}")
        before = {
            s.session_id: (s.frontier, list(s.kv.open)) for s in stage.up.state.sessions.values()
        }
        await asyncio.sleep(60)
        assert before == {
            s.session_id: (s.frontier, list(s.kv.open)) for s in stage.up.state.sessions.values()
        }
        given_up = sum(canaries(stage, name, "given_up") for name in ("left", "right"))
        assert given_up >= 1

    play(scene, slots=4)


@pytest.mark.parametrize("bad", ["left", "right"])
@pytest.mark.parametrize("how", ["flip", "nan"])
def test_the_wrong_lane_is_drained_in_any_order_of_canaries(bad: str, how: str) -> None:
    """A fresh worker's vote drains the wrong lane; health and metrics report it; the other
    lane serves."""

    async def scene(stage: Stage) -> None:
        wrong(stage, bad, is_recompute, **{how: True})
        good = "right" if bad == "left" else "left"
        await stage.until(lambda: bool(stage.lane(bad).draining))
        assert not stage.lane(good).draining
        assert stage.up.phase == "degraded"
        row = next(row for row in stage.up.lanes() if row["name"] == bad)
        assert row["state"] == "drained"
        assert "a fresh worker" in row["why"]
        await asyncio.sleep(3 * EVERY_S)
        assert stage.up.stats()["troubles"] == [f"lane {bad} drained: {row['why']}"]
        assert canaries(stage, good, "equal") >= 2
        assert stage.up.metrics.registry.get_sample_value("batchengine_numeric_faults_total") >= 1
        asked = stage.ask(words(2, 300), 20)
        await stage.read(asked)
        assert asked.lane == good
        logged(stage, "two contents")
        stage.plans.clear()

    play(scene, limits__canary_s=EVERY_S)


def test_a_lone_lane_with_a_wrong_canary_gets_a_new_worker() -> None:
    """The canary of the new worker is computed at once, and health is ok again."""

    async def scene(stage: Stage) -> None:
        alone(stage)
        await stage.until(lambda: canaries(stage, "left", "equal") == 1)
        selected = wrong(stage, "left", lambda step: is_recompute(step) and not selected)
        await stage.until(lambda: stage.lane("left").lane.incarnation == 2)
        assert canaries(stage, "left", "different") == 1
        assert any("canary of lane left differs" in line for line in stage.up.stats()["troubles"])
        await stage.until(lambda: canaries(stage, "left", "equal") == 2)
        assert not any("canary" in line for line in stage.up.stats()["troubles"])
        logged(stage, "lane left was wrong")
        assert len((await stage.answer(words(3, 300), 20)).tokens) == 20

    play(scene, limits__canary_s=EVERY_S)


def alone(stage: Stage) -> None:
    """Drain the other lane for another reason."""
    stage.lane("right").drain("the scene has one lane")


def test_without_a_majority_the_reference_is_dropped_and_health_reports_it() -> None:
    """No fresh worker can start, and one lane against another is no majority."""

    async def scene(stage: Stage) -> None:
        no_fresh_worker(stage)
        wrong(stage, "right", is_recompute)
        await stage.until(lambda: canaries(stage, "left", "equal") == 1)
        left = stage.lane("left")
        left.draining = "it is busy"  # it has no vote
        await stage.until(lambda: canaries(stage, "right", "different") == 1)
        await stage.until(lambda: not left.is_paused)
        left.draining = ""
        stage.plans.clear()
        assert not stage.lane("right").draining
        troubles = stage.up.stats()["troubles"]
        assert any("canary of lane right" in line for line in troubles)
        assert any("no majority" in line for line in troubles)
        logged(stage, "no majority")
        await stage.until(lambda: canaries(stage, "right", "equal") == 1)
        await stage.until(lambda: canaries(stage, "left", "equal") == 2)
        assert not any("canary" in line for line in stage.up.stats()["troubles"])

    play(scene, limits__canary_s=EVERY_S)
