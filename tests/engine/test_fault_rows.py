"""Faults that need two lanes, with the real engine, store and worker code in the simulation.

Each test has the number of its fault in its name. The stage checks at the end that every token is
right, that each session has one owner, and that all resources are free again.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from typing import Any

import pytest

from batchengine.core import BatchEngineError
from bench.models.hashlm import POINTS
from tests.simulation.stage import Plan, Stage, play, words


def both_seal(stage: Stage) -> None:
    """The store's page thread lags, so that both lanes seal at the same time."""
    stage.now.threads.delay = lambda name: 0.3 if name == "kv-pages" else 0.0005


def test_f8_two_lanes_seal_one_page_at_the_same_time() -> None:
    """The first seal is published, the second is deduplicated, and their digests are equal."""

    async def scene(stage: Stage) -> None:
        both_seal(stage)
        prompt = words(1, 300)
        left = stage.ask(prompt, 12, "l")
        right = stage.ask(prompt, 12, "r")
        readers = [stage.start(left), stage.start(right)]
        await stage.until(lambda: bool(left.lane and right.lane))
        assert {left.lane, right.lane} == {"left", "right"}
        answers = await asyncio.gather(*readers)
        assert [len(t.tokens) for t in answers] == [12, 12]
        store = stage.now.seam.opened
        assert store is not None
        await stage.until(lambda: not any(loop.kv.sealing.in_flight for loop in stage.now.loops))
        await stage.until(lambda: sum(loop.kv.sealing.sealed for loop in stage.now.loops) == 2)
        assert store.counters["pages_published"] == 1
        assert store.counters["pages_deduplicated"] == 1
        assert store.counters["numerics_faults"] == 0

    play(scene)


def test_f20_a_client_leaves_while_its_rows_are_copied() -> None:
    """It left before the session had stopped: the session moves as an idle one, and no slot is
    lost."""

    async def scene(stage: Stage) -> None:
        stage.plans.append(lambda lane, step: Plan(0.4) if step.import_rows else None)
        generation = stage.ask(words(2, 300), 90, "s")
        reader = stage.start(generation)
        await stage.computed(generation, 5)
        target = stage.other("s")
        move = asyncio.ensure_future(stage.up.promote("", "s", to=target))
        await stage.until(lambda: bool(stage.lane(target).kv.importing.imports) and
                          not stage.lane(target).kv.importing.queue)  # fmt: skip
        await asyncio.sleep(0.02)
        generation.cancel()
        others = [stage.start(stage.ask(words(20 + i, 200), 20)) for i in range(6)]
        assert (await move)["result"] == "moved"
        assert [len(t.tokens) for t in await asyncio.gather(*others)] == [20] * 6
        assert stage.home("s") == target
        reader.cancel()
        await stage.answer([*words(2, 300), 77], 20, "s")

    play(scene)


def test_f28_the_daemon_is_stopped_during_migrations_and_seals() -> None:
    """Every stream ends with a reason, and the next engine continues each from its last token."""

    async def scene(stage: Stage, at: str) -> None:
        both_seal(stage)
        prompts = [words(30 + i, 250) for i in range(4)]
        asked = [stage.ask(p, 60, f"s{i}") for i, p in enumerate(prompts)]
        readers = [stage.start(generation) for generation in asked]
        for generation in asked:
            await stage.computed(generation, 10)
        stopping: list[asyncio.Task[None]] = []

        async def on_point(point: str) -> None:
            if point == at and not stopping:
                stopping.append(asyncio.ensure_future(stage.up.stop(0.0)))
                stage.tasks.add(stopping[0])

        stage.plant(on_point)
        stage.ground.stopping = True
        try:
            await stage.up.promote("", "s0", to=stage.other("s0"))
        except BatchEngineError:
            assert at < "P5", "what is committed is not taken back"
        await stopping[0]
        answers = await asyncio.gather(*readers)
        assert all(t.done is not None and t.done.finish_reason == "shutdown" for t in answers)
        stage.now.dead = True
        await stage.boot()
        for i, prompt in enumerate(prompts):
            again = await stage.read(await stage.up.resume("", f"s{i}", len(answers[i].tokens)))
            assert len(answers[i].tokens) + len(again.tokens) == 60
            await stage.answer([*prompt, 78], 4, f"s{i}")

    for point in (f"P{i}" for i in range(8)):
        play(lambda stage, at=point: scene(stage, at))


def test_f29_only_the_session_that_ends_workers_is_quarantined() -> None:
    """It is refused after its second crash alone; other sessions continue."""

    async def scene(stage: Stage) -> None:
        bad = stage.ask(words(40, 100), 40, "bad")
        key = next(s.key for s in stage.up.state.sessions.values())

        def plan(lane: Any, step: Any) -> Plan | None:
            at_fault = any(e.session == key and e.start > 110 for e in step.entries)
            return Plan(0.004, die="before_rows", by=signal.SIGSEGV) if at_fault else None

        stage.plans.append(plan)
        good = [stage.ask(words(41 + i, 100), 60, f"g{i}") for i in range(4)]
        answers = await asyncio.gather(*[stage.start(g) for g in (bad, *good)])
        assert answers[0].error == "session_quarantined"
        assert [len(t.tokens) for t in answers[1:]] == [60] * 4
        deaths = sum(loop.lane.incarnation - 1 for loop in stage.now.loops)
        assert deaths <= 3

    play(scene)


def test_f45_a_nonfinite_row_is_in_no_page_and_no_record() -> None:
    """After NaN the turn ends, no session imports its rows, and its page is not published."""

    async def scene(stage: Stage) -> None:
        prompt = words(45, 250)
        hit: list[str] = []

        def plan(lane: Any, step: Any) -> Plan | None:
            if not hit and any(e.start == 253 for e in step.entries):
                hit.append(lane.name)
                return Plan(0.004, nan=True, flip=True)
            return None

        stage.plans.append(plan)
        answer = await stage.read(stage.ask(prompt, 20, "s"))
        assert answer.error == "numeric_fault"
        assert len(answer.tokens) == 4
        store = stage.now.seam.opened
        assert store is not None
        longer = [*prompt, *answer.tokens, 1, 2]
        assert not store.pages.match_prefix(longer[:256], b"")
        stage.process(hit[0]).end(-9)
        await stage.answer([*prompt, *answer.tokens], 20, "s")

    play(scene)


@pytest.mark.parametrize("lane", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_f73_a_worker_dies_at_any_point_of_a_step(lane: str) -> None:
    """The stream continues and repeats no token, whichever lane dies, by either signal."""

    async def scene(stage: Stage, point: str, by: int) -> None:
        asked = [stage.ask(words(60 + i, 240), 40, f"s{i}") for i in range(4)]
        readers = [stage.start(generation) for generation in asked]
        hit: list[int] = []

        def plan(of: Any, step: Any) -> Plan | None:
            if of.name == lane and not hit and any(e.start > 250 for e in step.entries):
                hit.append(sum(e.n_tokens for e in step.entries))
                return Plan(0.004, die=point, by=by)
            return None

        stage.plans.append(plan)
        answers = await asyncio.gather(*readers)
        assert hit
        assert [len(t.tokens) for t in answers] == [40] * 4
        recomputed = sum(loop.meter.recomputed for loop in stage.now.loops)
        assert recomputed <= hit[0], f"{recomputed} tokens for a step of {hit[0]}"

    for point, by in itertools.product(POINTS, (signal.SIGKILL, signal.SIGSEGV)):
        try:
            play(lambda stage, point=point, by=by: scene(stage, point, by))
        except AssertionError as error:
            raise AssertionError(f"{signal.Signals(by).name} at {point}: {error}") from None


def test_f76_a_worker_that_continues_after_its_deadline_is_ignored() -> None:
    """It was stopped, and declared dead at its deadline."""

    async def scene(stage: Stage) -> None:
        generation = stage.ask(words(70, 300), 60, "s")
        reader = stage.start(generation)
        await stage.computed(generation, 20)
        name = stage.home("s")
        old = stage.process(name)
        frames: list[bytes] = []
        old.protocol.data_received, hear = frames.append, old.protocol.data_received
        lane = stage.lane(name).lane
        await stage.until(lambda: lane.incarnation == 2 and lane.alive, 200.0)
        assert frames, "it had answered before it was killed"
        before = lane.frames_late
        for frame in frames:
            hear(frame)
        assert lane.frames_late == before + len(frames)
        assert len((await reader).tokens) == 60

    play(scene)
