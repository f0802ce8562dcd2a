"""Sessions migrate between two lanes while they compute: no stream stops, no token differs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError, Kind, Sampling
from batchengine.engine import Engine
from batchengine.engine.placement.migration import RECOMPUTE_MAX
from batchengine.kv import importing
from batchengine.session import State
from tests.support.engines import (
    Reference,
    Site,
    WatchedEngine,
    read,
    request,
    running_engine,
    started,
    until,
    words,
)

LANES = (LaneConfig(name="left", threads=1), LaneConfig(name="right", threads=1))


@asynccontextmanager
async def two_lanes(site: Site, **overrides: object) -> AsyncIterator[WatchedEngine]:
    """An engine with two lanes; sessions move on request only. No resource is leaked."""
    overrides.setdefault("router__promote_auto", False)
    async with running_engine(site, lanes=LANES, **overrides) as engine:
        yield engine
        await until(lambda: not engine.state.turns)
        for loop in engine.state.lanes:
            assert loop.seats.expected == 0
            await until(lambda loop=loop: not loop.kv.importing.imports)
            assert not loop.seats.arrivals
            for session in loop.sessions.values():
                session.check()
                assert engine.state.home[session.key] is loop


def other(engine: Engine, session_id: str) -> str:
    """The lane the session is not on."""
    rows = {row["session_id"]: row["lane"] for row in engine.sessions()}
    return "right" if rows[session_id] == "left" else "left"


async def migrate_repeatedly(
    engine: Engine, session_id: str, moves: int
) -> list[dict[str, object]]:
    """Migrate a session between the lanes; every migration must succeed."""
    reports: list[dict[str, object]] = []
    for _ in range(moves):
        report = await engine.promote("", session_id, to=other(engine, session_id))
        assert report["result"] == "moved", report
        reports.append(report)
        await asyncio.sleep(0.003)
    return reports


async def test_a_stream_continues_over_fifty_migrations(site: Site, reference: Reference) -> None:
    prompt = words(1, 300)
    async with two_lanes(site) as engine:
        generation, reader = await started(engine, request(prompt, 15_000, session="s"), 3)
        reports = await migrate_repeatedly(engine, "s", 50)
        assert not generation.finished, "the stream was too short for this test"
        generation.cancel()
        answer = await reader
        assert answer.tokens == reference.tokens(prompt, len(answer.tokens))
        assert sum(int(str(r["rows_copied"])) for r in reports) > 50 * 40
        recomputed = [int(str(r["rows_recomputed"])) for r in reports]
        assert max(recomputed) <= RECOMPUTE_MAX
        assert all(float(str(r["gap_ms"])) > 0 for r in reports)
        assert engine.stats()["tokens_recomputed"] == sum(recomputed)
        longer = [*prompt, *answer.tokens, 77]
        again = await read(engine.submit(request(longer, 4, session="s")))
        assert again.tokens == reference.tokens(longer, 4)
        record = await asyncio.wrap_future(engine.running.store.ledger.load_session("\x1fs"))
        assert record is not None
        assert record.info.epoch >= 51
        assert record.info.owner_lane != other(engine, "s")
        assert record.tokens == [*longer, *again.tokens]


async def test_idle_sessions_of_any_length_migrate(site: Site, reference: Reference) -> None:
    """A request on the other lane computes new tokens only."""
    async with two_lanes(site) as engine:
        for n in (1, 2, 255, 256, 257, 512, 1300):
            name, prompt = f"s{n}", words(n, n)
            first = await read(engine.submit(request(prompt, 2, session=name)))
            report = await engine.promote("", name, to=other(engine, name))
            assert (report["result"], report["gap_ms"]) == ("moved", 0), n
            longer = [*prompt, *first.tokens, 77, 78]
            again = await read(engine.submit(request(longer, 20, session=name)))
            assert again.tokens == reference.tokens(longer, 20), n
            assert again.done is not None
            assert again.done.usage.cached_tokens == n + 1
        assert engine.stats()["tokens_recomputed"] == 0


@pytest.mark.slow  # test_migration_storm.py moves several streams at once
async def test_eight_streams_migrate_while_they_run(site: Site, reference: Reference) -> None:
    """Half of them are named; all are migrated all the time."""
    prompts = [words(10 + i, 40 + 150 * i) for i in range(8)]
    async with two_lanes(site) as engine:
        running = [
            engine.submit(request(p, 4000, session=f"s{i}" if i % 2 else None))
            for i, p in enumerate(prompts)
        ]
        readers = [asyncio.ensure_future(read(g)) for g in running]
        moved = 0
        while moved < 2 * len(prompts):
            assert not any(generation.finished for generation in running)
            for generation in running:
                if generation.started_ms is None:
                    continue
                try:
                    name = generation.session_id
                    report = await engine.promote("", name, to=other(engine, name))
                    moved += report["result"] == "moved"
                except BatchEngineError as error:
                    if error.code not in ("BE2403", "BE3005"):
                        raise
            await asyncio.sleep(0.001)
        for generation in running:
            generation.cancel()
        for answer, prompt in zip(await asyncio.gather(*readers), prompts, strict=True):
            assert answer.error is None
            assert answer.tokens == reference.tokens(prompt, len(answer.tokens))


async def test_a_prompt_migrates_during_its_prefill(site: Site, reference: Reference) -> None:
    prompt = words(20, 2500)
    # 137 steps are left for five migrations, in which the lane continues to compute.
    lanes = tuple(
        LaneConfig(name=name, threads=1, chunk_tokens_max=16) for name in ("left", "right")
    )
    async with running_engine(site, lanes=lanes, router__promote_auto=False) as engine:
        generation = engine.submit(request(prompt, 10))
        reader = asyncio.ensure_future(read(generation))
        await until(lambda: engine.stats()["tokens_computed"] > 300)
        for _ in range(5):
            report = await engine.promote(
                "", generation.session_id, to=other(engine, generation.session_id)
            )
            assert report["result"] == "moved"
        assert generation.completion_tokens == 0, "the prompt was too short for this test"
        answer = await reader
        assert answer.tokens == reference.tokens(prompt, 10)
        assert engine.stats()["tokens_recomputed"] == 0


async def test_sampling_penalties_logprobs_and_stops_survive_a_migration(
    site: Site, reference: Reference
) -> None:
    """The state of the sampler and of the text migrates with the turn."""
    prompt = words(30, 60)
    sampling = Sampling(
        temperature=0.9, top_k=50, seed=7, repetition_penalty=1.2, penalty_tokens=64, logprobs=3
    )
    async with two_lanes(site) as engine:
        still = await read(engine.submit(request(prompt, 800, sampling=sampling)))
        stop = still.text[len(still.text) * 3 // 4 :][:12]
        quiet = await read(engine.submit(request(prompt, 800, sampling=sampling, stop=(stop,))))
        generation = engine.submit(
            request(prompt, 800, session="s", sampling=sampling, stop=(stop,))
        )
        reader = asyncio.ensure_future(read(generation))
        await until(lambda: generation.completion_tokens > 3)
        moved = 0
        while not generation.finished:
            try:
                report = await engine.promote("", "s", to=other(engine, "s"))
                moved += report["result"] == "moved"
            except BatchEngineError as error:
                if error.code != "BE3005":
                    raise
            await asyncio.sleep(0.002)
        answer = await reader
        assert moved > 1
        assert answer.text == quiet.text
        assert answer.tokens == quiet.tokens == still.tokens[: len(answer.tokens)]
        assert [e.logprob for e in answer.events if hasattr(e, "logprob")] == [
            e.logprob for e in quiet.events if hasattr(e, "logprob")
        ]
        assert answer.reason == "stop"


async def test_a_waiting_session_migrates_to_a_lane_with_room(
    site: Site, reference: Reference
) -> None:
    """A session without a seat starts at once on the other lane."""
    lanes = tuple(LaneConfig(name=n, threads=1, entries_max=1) for n in ("left", "right"))
    async with running_engine(site, lanes=lanes, router__promote_auto=False) as engine:
        left, right = engine.state.lanes
        long = [engine.submit(request(words(40 + i, 30), 600)) for i in range(2)]
        await until(lambda: len(left.running) == len(right.running) == 1)
        late = engine.submit(request(words(45, 300), 30, session="s"))
        await until(lambda: late.session_id in {r["session_id"] for r in engine.sessions()})
        session = engine.state.sessions["", "s"]
        await until(lambda: session.state is State.WAITING)
        home = engine.state.home[session.key]
        away = right if home is left else left
        for generation in long:
            if generation.lane == away.lane.name:
                generation.cancel()
        await until(lambda: not away.running)
        report = await engine.demote("", "s", to=away.lane.name)
        assert report["result"] == "moved"
        answer = await read(late)
        assert answer.tokens == reference.tokens(words(45, 300), 30)
        assert late.lane == away.lane.name
        for generation in long:
            generation.cancel()


async def test_impossible_migrations_are_refused_with_a_reason(
    site: Site, reference: Reference
) -> None:
    async with two_lanes(site) as engine:
        await read(engine.submit(request(words(50, 30), 5, session="alpha-1")))
        await read(engine.submit(request(words(51, 30), 5, session="alpha-2")))
        for tenant, given, to, code, kind in (
            ("", "unknown", "left", "BE2403", Kind.NOT_FOUND),
            ("", "alpha", "left", "BE2403", Kind.NOT_FOUND),  # no prefixes here
            ("another", "alpha-1", "left", "BE2403", Kind.NOT_FOUND),
            ("", "alpha-1", "middle", "BE3003", Kind.INVALID),
        ):
            with pytest.raises(BatchEngineError) as caught:
                await engine.promote(tenant, given, to=to)
            assert (caught.value.code, caught.value.kind) == (code, kind)
        at = other(engine, "alpha-1")
        assert (await engine.promote("", "alpha-1", to=at))["result"] == "moved"
        assert (await engine.promote("", "alpha-1", to=at))["result"] == "already there"


async def test_migrations_of_one_session_run_one_after_the_other(
    site: Site, reference: Reference
) -> None:
    prompt = words(60, 200)
    async with two_lanes(site) as engine:
        _, reader = await started(engine, request(prompt, 200, session="s"), 3)
        names = ["left", "right"] * 5
        reports = await asyncio.gather(*(engine.promote("", "s", to=n) for n in names))
        assert {r["result"] for r in reports} <= {"moved", "already there"}
        assert sum(r["result"] == "moved" for r in reports) >= 5
        assert (await reader).tokens == reference.tokens(prompt, 200)


async def test_a_request_that_comes_during_a_migration_waits_for_it(
    site: Site, reference: Reference
) -> None:
    prompt = words(70, 400)
    async with two_lanes(site) as engine:
        first = await read(engine.submit(request(prompt, 5, session="s")))
        longer = [*prompt, *first.tokens, 9]
        answers: list[asyncio.Future[object]] = []
        to = other(engine, "s")

        def at(point: str) -> None:
            if point in ("P0", "P2", "P4", "P5", "P6"):
                one = engine.submit(request([*longer, len(answers) + 30], 20, session="s"))
                answers.append(asyncio.ensure_future(read(one)))

        engine.plant(at)
        assert (await engine.promote("", "s", to=to))["result"] == "moved"
        for i, answer in enumerate(await asyncio.gather(*answers)):
            assert answer.tokens == reference.tokens([*longer, i + 30], 20)  # type: ignore[attr-defined]
        assert len(answers) == 5


async def test_an_idle_lane_computes_for_an_arriving_session_before_a_canary(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No canary frame is in flight when the rows are there, even if a frame carries one page
    only."""
    monkeypatch.setattr(importing, "IMPORT_BYTES", 1)
    prompt = words(80, 60)  # one open page
    async with two_lanes(site) as engine:
        _, reader = await started(engine, request(prompt, 200, session="s"), 3)
        target = next(x for x in engine.state.lanes if x.lane.name == other(engine, "s"))
        free: dict[str, bool] = {}

        def at(point: str) -> None:
            free[point] = not target._in_flight

        engine.plant(at)
        report = await engine.promote("", "s", to=target.lane.name)
        assert (report["result"], report["pages_copied"]) == ("moved", 1)
        assert free["P4"]
        assert free["P5"]
        assert (await reader).tokens == reference.tokens(prompt, 200)
