"""A page with two contents (F46) and a turn with NaN (F45): which pages become invalid, and which
lane is drained.

In the simulation. `Stage.answer` compares every token of the next answers with an undisturbed run,
so that rows of the wrong lane are detected in every place that uses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from batchengine.engine.audit import audit as audit_module
from batchengine.engine.audit.majority import Outcome, Statement
from tests.engine.audit.scene import (
    LANES,
    ask,
    audit_of,
    audits_of,
    expose,
    is_recompute,
    logged,
    make_wrong,
    no_fresh_worker,
    no_prefix,
    only,
    pages_of,
    publish,
    read_wrong,
    seals_of,
    settled,
    store_of,
)
from tests.simulation.stage import Plan, Stage, play, words
from tests.simulation.wrong import wrong_lane

PROMPT = words(90, 300)


# ------------------------------------------------------------------------- which lane was wrong


@pytest.mark.parametrize("bad", LANES)
def test_a_lane_that_differs_in_one_bit_is_drained(bad: str) -> None:
    """The wrong lane's page is not published, its session continues elsewhere from valid rows."""

    async def scene(stage: Stage) -> None:
        good, prompt = LANES[bad == "left"], words(80, 300)
        await publish(stage, good, prompt)
        store = store_of(stage)
        published = store.pages.digest(store.pages.match_prefix(prompt, b"")[0])
        make_wrong(stage, bad, lambda e: e.start == 0)
        with no_prefix():
            asked = await ask(stage, bad, prompt, 1, "bad")
            await stage.until(lambda: bool(stage.lane(bad).draining))
        row = next(row for row in stage.up.lanes() if row["name"] == bad)
        assert row["state"] == "drained"
        # The wrong lane is a witness, too: what it computes for the audit is right.
        agreed = "a fresh worker and left and right agree"
        assert row["why"] == f"{agreed}: lane {bad} was wrong"
        assert not stage.lane(good).draining
        assert store.pages.digest(store.pages.match_prefix(prompt, b"")[0]) == published
        logged(stage, f"lane {bad} was wrong")
        await read_wrong(asked)
        await stage.answer([*prompt, 81], 20, "bad")
        assert stage.home("bad") == good

    play(scene, limits__canary_s=0)


def test_no_token_is_sent_while_a_page_is_disputed() -> None:
    """No lane plans a step during an audit; afterwards the turn continues and ends."""

    async def scene(stage: Stage) -> None:
        await publish(stage, "right", PROMPT)
        make_wrong(stage, "left", lambda e: e.start == 0)
        stage.plans.insert(0, lambda lane, step: Plan(3.0) if is_recompute(step) else None)
        with no_prefix():
            other = await ask(stage, "right", words(79, 40), 400, "other")
            asked = await ask(stage, "left", PROMPT, 400, "s")
            await stage.until(lambda: audits_of(stage) == 1)
            sent = asked.completion_tokens, other.completion_tokens
            await asyncio.sleep(2.0)
            assert (asked.completion_tokens, other.completion_tokens) == sent
            readers = [stage.start(other), asyncio.ensure_future(read_wrong(asked))]
            await stage.until(lambda: not stage.lane("right").is_paused)
        for reader in readers:
            await reader
        assert asked.completion_tokens == other.completion_tokens == 400
        logged(stage, "lane left was wrong")

    play(scene, limits__canary_s=0)


def test_without_a_majority_both_contents_become_invalid() -> None:
    """Both contents are invalid, no lane is drained, the turn recomputes, and /health reports
    it."""

    async def scene(stage: Stage) -> None:
        prompt = words(82, 300)
        await publish(stage, "left", prompt)
        stage.lane("left").drain("it is out of order")
        no_fresh_worker(stage)
        store = store_of(stage)
        (old,) = store.pages.match_prefix(prompt, b"")
        make_wrong(stage, "right", lambda e: e.start == 0)
        stage.plans.insert(0, lambda _, step: Plan(0.01, flip=True) if is_recompute(step) else None)
        with no_prefix():
            asked = stage.ask(prompt, 30, "bad")
            await stage.until(lambda: not store.pages.is_resident(old))
        await read_wrong(asked)
        logged(stage, "no majority")
        assert not stage.lane("right").draining
        assert stage.lane("right").kv.sealing.publishes
        assert any("no majority" in line for line in stage.up.stats()["troubles"])
        await stage.until(lambda: pages_of(stage, prompt) == 1)
        await stage.answer([*prompt, 83], 20, "good")  # the recomputed page is right
        del stage.plans[0]
        stage.lane("left").draining, stage.lane("left").kv.sealing.publishes = "", True
        await expose(stage, "right")
        assert not any("no majority" in line for line in stage.up.stats()["troubles"])

    play(scene, limits__canary_s=0)


def test_the_only_lane_gets_a_new_worker_and_publishes_no_more_after_two_faults() -> None:
    async def scene(stage: Stage) -> None:
        first, second, third = words(83, 300), words(84, 300), words(85, 300)
        for prompt in (first, second):
            await publish(stage, "right", prompt)
        stage.lane("right").drain("it is out of order")
        left = stage.lane("left")
        for incarnation, prompt in ((2, first), (3, second)):
            assert left.kv.sealing.publishes
            make_wrong(stage, "left", lambda e: e.start == 0)
            with no_prefix():
                asked = stage.ask(prompt, 1, f"bad {incarnation}")
                await stage.until(lambda n=incarnation: left.lane.incarnation == n and left.up)
                await read_wrong(asked)
            await stage.answer([*prompt, 3], 20, f"bad {incarnation}")
        logged(stage, "lane left was wrong", "it publishes no more")
        assert not left.draining
        row = next(row for row in stage.up.lanes() if row["name"] == "left")
        assert row["state"] == "ready"
        assert "none is published" in row["why"]
        assert stage.up.phase == "degraded"
        await stage.answer(third, 20, "third")
        await asyncio.sleep(5.0)
        assert pages_of(stage, third) == 0
        left.kv.sealing.publishes = True  # whatever waits for that would wait for ever
        left.wake()

    play(scene, limits__canary_s=0)


def test_a_turn_whose_pages_are_disputed_three_times_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No lane is found wrong, so the disputes would not end."""

    def stored(statements: Iterable[Statement]) -> Outcome:
        return Outcome(list(statements)[1].digest, frozenset(), "no lane was wrong")

    async def scene(stage: Stage) -> None:
        prompt = words(86, 300)
        await publish(stage, "right", prompt)
        monkeypatch.setattr(audit_module, "majority", stored)
        selected = make_wrong(stage, "left", lambda e: e.start == 0, times=9)
        with no_prefix():
            asked = await ask(stage, "left", prompt, 400, "new")
            tokens, error = await read_wrong(asked)
        assert error == "numeric_fault"
        assert tokens < 400
        assert len(selected) == 3
        stage.plans.clear()
        await stage.answer(words(87, 600), 20, "new")
        logged(stage, "no lane was wrong")

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("gap", [False, True])
def test_pages_of_an_earlier_run_become_invalid_with_their_wrong_ancestor(gap: bool) -> None:
    """Descendants of a wrong page are invalid even if one between them was lost before; otherwise
    they would be found again behind the recomputed page."""

    async def scene(stage: Stage) -> None:
        prompt = words(88, 800)
        make_wrong(stage, "left", lambda e: e.start == 0)
        await read_wrong(await ask(stage, "left", prompt, 1, "old"))
        await stage.until(lambda: pages_of(stage, prompt) == 3)
        await stage.crash()
        stage.plans.clear()
        store = store_of(stage)
        old = store.pages.match_prefix(prompt, b"")
        if gap:
            store.pages.invalidate(old[1])
        with no_prefix():
            sent = await stage.read(stage.ask(prompt[:256], 300, "new"))
        assert not sent.error
        logged(stage, "an earlier run was wrong")
        assert not any(loop.draining for loop in stage.now.loops)
        assert not any(store.pages.is_resident(ref) for ref in old)
        await publish(stage, "right", prompt[:300])
        assert pages_of(stage, prompt) == 1
        await stage.answer(prompt, 20, "third")

    play(scene, limits__canary_s=0)


# ------------------------------------------------------------- where wrong rows may have been used


async def wrong_tail(stage: Stage) -> None:
    """An idle session on the left lane: its page is right, and the first row after it is wrong."""
    await publish(stage, "right", PROMPT[:256])
    selected = make_wrong(stage, "left", lambda e: e.start == 256)
    asked = await ask(stage, "left", PROMPT, 1, "s")
    await read_wrong(asked)
    assert selected == [256]
    assert asked.cached_tokens == 256
    assert stage.up.state.sessions["", "s"].frontier == 300


async def stays(stage: Stage) -> None:
    """The session is on the lane that is wrong."""


async def is_parked(stage: Stage) -> None:
    session = stage.up.state.sessions["", "s"]
    await stage.until(lambda: session.kv.parked is not None)


async def moved(stage: Stage) -> None:
    report = await stage.up.promote("", "s", to="right")
    assert report["rows_copied"] == 44


async def moved_and_filled(stage: Stage) -> None:
    """The other lane fills and publishes the page that the wrong lane began."""
    await moved(stage)
    longer = [*PROMPT, *words(93, 300)]
    await read_wrong(stage.ask(longer, 1, "s"))
    await stage.until(lambda: pages_of(stage, longer) == 2)


async def moved_and_computing(stage: Stage) -> None:
    """The other lane is filling the page."""
    await moved(stage)
    stage.plans.insert(
        0, lambda of, step: Plan(2.0) if of.name == "right" and step.entries else None
    )
    asked = stage.ask([*PROMPT, *words(93, 300)], 1, "s")
    await stage.until(lambda: bool(stage.lane("right")._in_flight))
    stage.tasks.add(stage.loop.create_task(_ignore(asked)))


async def _ignore(asked: Any) -> None:
    await read_wrong(asked)


async def tail_taken(stage: Stage) -> None:
    """Another session has imported the parked tail on the other lane."""
    await is_parked(stage)
    with only(stage, "right"):
        twin = stage.ask([*PROMPT, 91], 1, "twin")
        await read_wrong(twin)
    assert twin.cached_tokens == 300


async def tail_taken_and_filled(stage: Stage) -> None:
    """Another session has imported the parked tail and published its page."""
    await tail_taken(stage)
    longer = [*PROMPT, *words(93, 300)]
    with only(stage, "right"):
        await read_wrong(stage.ask(longer, 1, "twin"))
    await stage.until(lambda: pages_of(stage, longer) == 2)


async def forked(stage: Stage) -> None:
    await stage.up.fork("", "s", "twin")
    with only(stage, "right"):
        twin = stage.ask([*PROMPT, 91], 1, "twin")
        await read_wrong(twin)
    assert twin.cached_tokens == 300


async def imported(stage: Stage) -> None:
    """The next worker of the lane has imported the rows from the arena of the dead one."""
    left, session = stage.lane("left"), stage.up.state.sessions["", "s"]
    stage.process("left").end(-9)
    await stage.until(lambda: left.lane.incarnation == 2 and left.up)
    await stage.until(lambda: session.frontier == 300)


WAYS = (
    stays, is_parked, moved, moved_and_filled, moved_and_computing,
    tail_taken, tail_taken_and_filled, forked, imported,
)  # fmt: skip


async def assert_right(stage: Stage) -> None:
    """The sessions and a new one with the same prompt answer right, and use the first page only."""
    stage.now.threads.delay = lambda name: 0.0005
    stage.plans.clear()
    await settled(stage)
    longer = [*PROMPT, *words(93, 300)]
    for session in ("s", "twin", None):
        for prompt in ([*longer, 94], [*PROMPT, 92]):
            sent = await stage.answer(prompt, 20, session)
            assert sent.done is not None
        assert stage.up.lanes()


@pytest.mark.parametrize("went", WAYS)
def test_rows_of_a_wrong_lane_are_dropped_wherever_they_are(
    went: Callable[[Stage], Awaitable[None]],
) -> None:
    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)
        await went(stage)
        await expose(stage, "left")
        assert pages_of(stage, PROMPT) == 1, "the page of the other lane stays"
        longer = [*PROMPT, *words(93, 300)]
        stage.now.threads.delay = lambda name: 0.0005
        await settled(stage)
        assert pages_of(stage, longer) == 1, "and nothing computed from the wrong row"
        await assert_right(stage)

    play(scene, limits__canary_s=0)


def test_a_page_being_sealed_by_the_wrong_lane_is_not_published() -> None:
    """The disk is slower than the audit, which ends before the seal."""

    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)
        await moved(stage)
        seals, longer, exposing = seals_of(stage), [*PROMPT, *words(93, 300)], words(95, 300)
        await publish(stage, "right", exposing)
        stage.now.threads.delay = lambda name: 2.0 if name == "kv-pages" else 0.0005
        make_wrong(stage, "left", lambda e: e.start == 0)
        with no_prefix():
            asked = await ask(stage, "left", exposing, 1, "exposes")
            await stage.until(lambda: len(seals) == 1)
            await asyncio.sleep(1.0)
            await read_wrong(stage.ask(longer, 1, "s"))
            await stage.until(lambda: len(seals) == 2)
            await stage.until(lambda: audits_of(stage) == 1)
            assert len(seals) == 1, "of the filled page"
            await stage.until(lambda: bool(stage.lane("left").draining))
        await read_wrong(asked)
        logged(stage, "lane left was wrong")
        await stage.until(lambda: not seals)
        assert pages_of(stage, longer) == 1
        await assert_right(stage)

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("point", ["P0", "P1", "P2", "P3", "P4", "P5"])
def test_a_page_is_disputed_while_a_session_migrates(point: str) -> None:
    """Open rows of the session are not copied; before P5 it stays, from P5 on it has moved."""

    async def scene(stage: Stage) -> None:
        await wrong_tail(stage)
        session, exposed = stage.up.state.sessions["", "s"], list[str]()

        async def on_point(at: str) -> None:
            if at == point and not exposed:
                exposed.append(at)
                await expose(stage, "left")

        stage.plant(on_point)
        try:
            result = (await stage.up.promote("", "s", to="right"))["result"]
        except Exception as error:
            result = str(error)
        assert exposed
        if point == "P5":
            assert result == "moved"
        await stage.until(lambda: session.frontier == 256)
        assert not session.kv.open
        await assert_right(stage)

    play(scene, limits__canary_s=0)


# ---------------------------------------------------------------------- faults during the audit


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("when", ["in a step", "at its vote"])
def test_a_lane_that_dies_or_hangs_does_not_delay_the_audit(how: str, when: str) -> None:
    """The lane has no vote; a step that was in flight ends by its own deadline, with its worker."""

    async def scene(stage: Stage) -> None:
        await publish(stage, "right", PROMPT)
        right, selected = stage.lane("right"), list[Any]()

        def plan(of: Any, step: Any) -> Plan | None:
            mine = is_recompute(step) if when == "at its vote" else bool(step.entries)
            if of.name != "right" or not mine or selected:
                return None
            selected.append(step)
            return Plan(0.2, die="after_chores" if how == "dies" else "", hang=how == "hangs")

        other = await ask(stage, "right", words(78, 40), 300, "other")
        reading = stage.start(other)
        make_wrong(stage, "left", lambda e: e.start == 0)
        with no_prefix():
            asked = await ask(stage, "left", PROMPT, 30, "s")
            stage.plans.insert(0, plan)
            await stage.until(lambda: audits_of(stage) == 1 and not right.is_paused, 300.0)
        assert selected
        logged(stage, "lane left was wrong")
        await read_wrong(asked)
        assert not (await reading).error
        assert right.lane.incarnation == 2
        await stage.answer([*PROMPT, 81], 20, "s")
        assert pages_of(stage, PROMPT) == 1

    play(scene, limits__canary_s=0)


def test_lanes_continue_after_an_audit_that_cannot_read_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        await publish(stage, "right", PROMPT)
        make_wrong(stage, "left", lambda e: e.start == 0)

        async def votes(_: object) -> list[Statement]:
            raise OSError("the disk is gone")

        monkeypatch.setattr(audit_of(stage), "_votes", votes)
        with no_prefix():
            asked = await ask(stage, "left", PROMPT, 30, "s")
            await read_wrong(asked)
        assert not any(loop.is_paused for loop in stage.now.loops)
        logged(stage, "two contents")
        await stage.answer([*PROMPT, 81], 20, "s")

    play(scene, limits__canary_s=0)


# ------------------------------------------------------------------------------------- NaN


@pytest.mark.parametrize("lag_s", [0.0005, 0.05, 3.0])
def test_no_page_of_a_turn_with_nan_stays_published(lag_s: float) -> None:
    """Pages sealed before the NaN, being sealed, or not begun are not matched afterwards."""

    async def scene(stage: Stage) -> None:
        stage.now.threads.delay = lambda name: lag_s if name == "kv-pages" else 0.0005
        prompt = words(45, 700)
        for lane in LANES:
            make_wrong(stage, lane, lambda e: e.start >= 710, nan=True)
        sent = await stage.read(stage.ask(prompt, 60, "s"))
        assert sent.error == "numeric_fault"
        assert 5 < len(sent.tokens) < 20
        if lag_s < 0.001:
            assert store_of(stage).counters["pages_published"] == 2
            assert pages_of(stage, prompt) == 0
        stage.plans.clear()
        await asyncio.sleep(20.0)
        assert pages_of(stage, prompt) == 0
        again = await stage.answer([*prompt, *sent.tokens], 20, "s")
        assert again.done is not None
        assert again.done.usage.cached_tokens == 0

    play(scene, limits__canary_s=0)


def test_pages_of_a_turn_with_nan_being_sealed_by_its_earlier_lane_become_invalid() -> None:
    """The turn filled the page before its migration, and has NaN on the other lane."""

    async def scene(stage: Stage) -> None:
        stage.now.threads.delay = lambda name: 2.0 if name == "kv-pages" else 0.0005
        prompt = words(43, 300)
        asked = await ask(stage, "left", prompt, 200, "s")
        reading = stage.start(asked)
        await stage.computed(asked, 2)
        make_wrong(stage, "right", lambda e: e.start > 300, nan=True)
        assert (await stage.up.promote("", "s", to="right"))["result"] == "moved"
        assert (await reading).error == "numeric_fault"
        assert store_of(stage).counters["pages_published"] == 0
        await asyncio.sleep(20.0)
        assert pages_of(stage, prompt) == 0

    play(scene, limits__canary_s=0)


def test_a_tail_that_a_turn_with_nan_parked_becomes_invalid() -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(42, 300)
        asked = await ask(stage, "left", prompt, 200, "s")
        reading = stage.start(asked)
        await stage.computed(asked, 2)
        left, session = stage.lane("left"), stage.up.state.sessions["", "s"]
        left.seats.preempt(session.key)
        left.kv.sealing.park(session)
        session.priority = 0
        left.wake()
        await asyncio.sleep(0)
        make_wrong(stage, "left", lambda e: e.start > 305, nan=True)
        assert (await reading).error == "numeric_fault"
        await settled(stage)
        store = store_of(stage)
        assert store.stat()["pages_published"] == 0

    play(scene, limits__canary_s=0)


def test_pages_from_before_a_turn_with_nan_stay_valid() -> None:
    """Another turn computed them, and this turn matched them in the store."""

    async def scene(stage: Stage) -> None:
        prefix = words(46, 520)
        await publish(stage, "left", prefix)
        make_wrong(stage, "left", lambda e: e.start >= 900, nan=True)
        prompt = [*prefix, *words(47, 360)]
        sent = await stage.read(await ask(stage, "left", prompt, 60, "s"))
        assert sent.error == "numeric_fault"
        assert pages_of(stage, prompt) == 2
        await stage.answer([*prompt, *sent.tokens], 20, "s")

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("home", LANES)
def test_other_holders_of_pages_of_a_turn_with_nan_fall_back(home: str) -> None:
    """No next token of another holder is computed from a page with a wrong row."""

    async def scene(stage: Stage) -> None:
        prompt = words(48, 600)
        make_wrong(stage, "left", lambda e: e.start == 0)
        make_wrong(stage, "left", lambda e: e.start >= 660, nan=True)
        bad = await ask(stage, "left", prompt, 100, "bad")
        await stage.until(lambda: pages_of(stage, prompt) == 2)
        other = await ask(stage, home, [*prompt, 7], 4, "other")
        await read_wrong(other)
        assert other.cached_tokens == 512
        session = stage.up.state.sessions["", "other"]
        await stage.until(lambda: len(session.kv.sealed) == 2)
        assert (await read_wrong(bad))[1] == "numeric_fault"
        await stage.until(lambda: not session.kv.sealed)
        assert pages_of(stage, prompt) == 0
        await stage.answer([*prompt, 7, 9], 20, "other")
        await stage.answer([*prompt, 9], 20, "third")

    play(scene, limits__canary_s=0)


# ----------------------------------------------------------------------------- on other lanes


@pytest.mark.parametrize("kept", [300, 200])
def test_a_turn_on_a_drained_lane_migrates_when_another_lane_is_up(kept: int) -> None:
    """It migrates although its open page is parked or sealed in the store."""

    async def scene(stage: Stage) -> None:
        await publish(stage, "left", PROMPT[:256])
        await stage.read(await ask(stage, "left", PROMPT, 1, "s"))
        await is_parked(stage)
        stage.lane("left").drain("it is out of order")
        await stage.until(lambda: not stage.lane("left").is_rechecking)
        with only(stage, "left"):  # the other lane is not available
            asked = stage.ask([*PROMPT[:kept], 99], 20, "s")
            await asyncio.sleep(5.0)
            assert not asked.lane
            assert stage.home("s") == "left"
        sent = await asyncio.wait_for(stage.read(asked), 10.0)
        assert len(sent.tokens) == 20
        assert stage.home("s") == "right"

    play(scene, limits__canary_s=0)


@pytest.mark.parametrize("seed", range(6))
def test_a_lane_that_is_wrong_for_a_while_is_drained(seed: int) -> None:
    """Every seed passes; `python -m tests.simulation --wrong` runs more of them."""
    outcome = wrong_lane(seed)
    assert outcome.counts["wrong steps"] > 0
    assert outcome.counts["right answers"] == 1
