"""Faults of a worker: the turns they end, and that the daemon continues."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from batchengine import errors
from batchengine.core import PAGE_TOKENS, Kind, Sampling
from batchengine.engine.lane import supervisor
from batchengine.engine.lane.steps import inflight
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    suspend,
    until,
    words,
)
from tests.support.faulty_worker import HANG, NAN, RAISE, SEGV

FAULTY = (sys.executable, "-m", "tests.support.faulty_worker")


@pytest.mark.parametrize("fault", [SEGV, RAISE])
async def test_a_session_that_ends_the_worker_is_stopped_and_others_continue(
    site: Site, reference: Reference, fault: int
) -> None:
    """All sessions of the crashed step are suspects; computed alone, only the one at fault
    crashes."""
    good = [words(i, 40) for i in range(3)]
    bad = [*words(9, 30), fault, *words(10, 5)]
    async with running_engine(site, FAULTY) as engine:
        running = [engine.submit(request(p, 60)) for p in good]
        tasks = [asyncio.ensure_future(read(g)) for g in running]
        await until(lambda: running[0].completion_tokens > 3)
        crashing = await read(engine.submit(request(bad, 60)))
        assert crashing.error is not None
        assert crashing.error.name == "session_quarantined"
        assert crashing.tokens == []
        answers = await asyncio.gather(*tasks)
        assert [a.tokens for a in answers] == [reference.tokens(p, 60) for p in good]
        after = await read(engine.submit(request(good[0], 8)))
        assert after.tokens == answers[0].tokens[:8]
        assert engine.lanes()[0]["incarnation"] <= 4


async def test_a_nonfinite_number_ends_its_turn_only(site: Site, reference: Reference) -> None:
    prompt = words(1, 40)
    bad = [*words(2, 600), NAN]
    async with running_engine(site, FAULTY) as engine:
        fine = engine.submit(request(prompt, 60))
        poisoned = engine.submit(request(bad, 60, session="s"))
        answers = await asyncio.gather(read(fine), read(poisoned))
        assert answers[0].tokens == reference.tokens(prompt, 60)
        error = answers[1].error
        assert error is not None
        assert (error.name, error.kind) == ("numeric_fault", Kind.INTERNAL)
        assert answers[1].tokens == []
        again = await read(engine.submit(request([*bad[:-1], 77], 9, session="s")))
        assert again.tokens == reference.tokens([*bad[:-1], 77], 9)
        assert engine.lanes()[0]["incarnation"] == 1


async def test_a_worker_that_hangs_is_killed_at_its_deadline(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflight, "STEP_DEADLINE_MIN_S", 2.0)
    monkeypatch.setattr(inflight, "STEP_DEADLINE_FACTOR", 0.0)
    prompt = words(1, 40)
    async with running_engine(site, FAULTY) as engine:
        fine = asyncio.ensure_future(read(engine.submit(request(prompt, 200))))
        hanging = await read(engine.submit(request([5, HANG, 6], 10)))
        assert hanging.error is not None
        assert (await fine).tokens == reference.tokens(prompt, 200)


async def test_a_stopped_worker_that_continues_late_changes_nothing(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker stopped by SIGSTOP is killed at its deadline, and the next incarnation continues."""
    monkeypatch.setattr(inflight, "STEP_DEADLINE_MIN_S", 2.0)
    monkeypatch.setattr(inflight, "STEP_DEADLINE_FACTOR", 0.0)
    prompt = words(3, 300)
    async with running_engine(site) as engine:
        _, task = await started(engine, request(prompt, 150), 20)
        suspend(int(engine.lanes()[0]["pid"]))
        assert (await task).tokens == reference.tokens(prompt, 150)
        assert engine.lanes()[0]["incarnation"] == 2


@pytest.mark.parametrize("broken", ["lane", "pages", "pages on disk"])
async def test_a_defect_of_the_engine_before_a_turn_ends_the_request_only(
    site: Site, reference: Reference, broken: str
) -> None:
    """The next request of the session, which waited behind the failed one, is served."""
    prompt = words(70, PAGE_TOKENS + 30)
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(prompt, 8, session="s")))
        longer = [*prompt, *first.tokens, 5]
        await until(lambda: engine.stats()["pages_sealed"] >= 1)
    async with running_engine(site) as engine:
        owner, name = {
            "lane": (engine.running.dispatcher, "choose"),
            "pages": (engine.state.lanes[0].kv.prefix, "extend"),
            "pages on disk": (engine.state.lanes[0].kv.prefix, "loaded"),
        }[broken]
        real, broke = getattr(owner, name), []

        def once(*given: object) -> object:
            if not broke:
                broke.append(given)
                raise RuntimeError("a defect of ours")
            return real(*given)

        setattr(owner, name, once)
        running = [engine.submit(request(longer, 8, session="s")) for _ in range(2)]
        ended, served = await asyncio.gather(*map(read, running))
        assert broke
        assert ended.error is not None
        assert (ended.error.code, ended.error.kind) == ("BE1213", Kind.INTERNAL)
        assert served.tokens == reference.tokens(longer, 8)
        assert engine.stats()["requests_running"] == 0
        assert engine.state.lanes[0].assigned == 0
        assert engine.stats()["troubles"] == []


async def test_the_death_of_an_idle_worker_is_detected_and_sessions_stay_usable(
    site: Site, reference: Reference
) -> None:
    prompt = words(4, 400)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(prompt, 10, session="s")))
        await until(lambda: int(engine.stats()["pages_sealed"]) == 1)
        os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        await until(lambda: engine.lanes()[0]["incarnation"] == 2)
        longer = [*prompt, *one.tokens, 55, 66]
        two = await read(engine.submit(request(longer, 10, session="s")))
        assert two.done is not None
        assert two.done.usage.cached_tokens == 409  # pages and rows remain after the worker's death
        assert two.tokens == reference.tokens(longer, 10)


async def test_repeated_kills_from_outside_make_no_session_a_suspect(
    site: Site, reference: Reference
) -> None:
    """A SIGKILL comes from the operator or the OOM killer."""
    prompt = words(5, 30)
    sampling = Sampling(temperature=0.9, seed=4)
    async with running_engine(site) as engine:
        generation = engine.submit(request(prompt, 40, sampling=sampling))
        task = asyncio.ensure_future(read(generation))
        for life in range(1, 4):
            await until(lambda: engine.lanes()[0]["incarnation"] == life)  # noqa: B023
            await until(lambda: engine.lanes()[0]["steps"] > 0)
            os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        assert (await task).tokens == reference.tokens(prompt, 40, sampling)


async def test_the_turn_of_a_slow_reader_pauses_and_then_ends(
    site: Site, reference: Reference
) -> None:
    prompt = words(6, 20)
    async with running_engine(site, server__reader_stall_s=2) as engine:
        slow = engine.submit(request(prompt, 700))
        never = engine.submit(request(words(7, 20), 700))
        await until(lambda: any(r["state"] == "paused" for r in engine.requests()))
        await asyncio.sleep(0.3)
        assert slow.completion_tokens < 400, "it must not compute into a full buffer"
        answer = await read(slow)
        assert answer.tokens == reference.tokens(prompt, 700)
        await until(lambda: never.finished)
        ended = await read(never)
        assert ended.error is not None
        assert ended.error.name == "client_too_slow"


def test_a_worker_with_another_model_is_reported_once() -> None:
    """The error has one fix: of the error inside, only what happened is reported."""
    inner = errors.LANE_OTHER_MODEL(lane="fast")
    reported = str(supervisor.cannot_start("fast", inner))
    assert reported.count("Fix: ") == 1
    assert inner.code not in reported
    assert "the model file was written or replaced" in reported
    assert reported.endswith(inner.fix)
    other = supervisor.cannot_start("fast", errors.LANE_DISAGREES(lane="fast"))
    assert "model file" not in str(other)
    assert supervisor.cannot_start("fast", OSError("no room")).why == "no room"
