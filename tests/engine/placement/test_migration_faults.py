"""Faults during a migration: one owner, no lost token, no wrong token, no leaked slot."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from batchengine.core import BatchEngineError
from batchengine.engine import Engine, Generation
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement import migration
from batchengine.session import Session
from kv_store.errors import LedgerRefused, StoreFull
from kv_store.ledger import writes
from tests.engine.placement.test_migration import other, two_lanes
from tests.support.engines import (
    Answer,
    Reference,
    Site,
    WatchedEngine,
    hold_restarts,
    read,
    request,
    started,
    suspend,
    until,
    words,
)

POINTS = [f"P{i}" for i in range(8)]
BEFORE_COMMIT = POINTS[:5]


def lanes_of(engine: Engine, session_id: str) -> tuple[LaneLoop, LaneLoop]:
    """(its lane, the other one)"""
    left, right = engine.state.lanes
    here = {"left": left, "right": right}[other(engine, session_id)]
    return (right, left) if here is left else (left, right)


async def kill(loop: LaneLoop) -> None:
    """SIGKILL the worker, and wait until the engine has noticed."""
    lane, incarnation = loop.lane, loop.lane.incarnation
    os.kill(lane.pid, signal.SIGKILL)
    await until(lambda: not lane.alive or lane.incarnation > incarnation)


def plant(engine: WatchedEngine, point: str, fault: Callable[[], Awaitable[None]]) -> None:
    """Run `fault` the next time a migration reaches `point`."""

    async def at(now: str) -> None:
        if now == point:
            engine.plant(migration.pass_point)
            await fault()

    engine.plant(at)


async def all_up(engine: Engine) -> None:
    await until(lambda: all(loop.lane.alive and loop.kv.slots.arena for loop in engine.state.lanes))


async def start(
    engine: Engine, session_id: str, prompt: list[int], n: int
) -> tuple[Generation, asyncio.Future[Answer]]:
    generation, reader = await started(engine, request(prompt, n, session=session_id), 3)
    return generation, reader


async def try_to_move(engine: Engine, session_id: str) -> str:
    """ "moved", or the reason."""
    try:
        report = await engine.promote("", session_id, to=other(engine, session_id))
    except BatchEngineError as error:
        assert error.code == "BE3005", error  # noqa: PT017
        return error.why
    return str(report["result"])


async def no_leaks(engine: Engine) -> None:
    """Every slot is free again, or held by a session of that lane."""
    for loop in engine.state.lanes:
        await until(lambda loop=loop: slots_held(loop) == slots_open(loop))
        assert loop.seats.expected == 0


def slots_held(loop: LaneLoop) -> int:
    return sum(len(session.kv.open) for session in loop.sessions.values())


def slots_open(loop: LaneLoop) -> int:
    arena = loop.kv.slots.arena
    return -1 if arena is None else arena.n_open


@pytest.mark.parametrize(
    "victim", ["source", "target", pytest.param("both", marks=pytest.mark.slow)]
)
async def test_worker_deaths_at_every_point_change_no_token(
    site: Site, reference: Reference, victim: str
) -> None:
    """Nine streams that migrate, and one beside each that does not, are right."""
    prompts, n = [words(1, 700), words(2, 90)], 240
    wanted = [reference.tokens(p, n) for p in prompts]
    async with two_lanes(site) as engine:
        results: dict[str, str] = {}
        for i, point in enumerate(POINTS):
            _, reader = await start(engine, f"s{i}", prompts[0], n)
            _, quiet = await start(engine, f"q{i}", prompts[1], n)
            source, target = lanes_of(engine, f"s{i}")

            session = engine.state.sessions["", f"s{i}"]
            at_fault: list[int] = []

            async def fault(
                source: LaneLoop = source,
                target: LaneLoop = target,
                session: Session = session,
                at_fault: list[int] = at_fault,
            ) -> None:
                at_fault.append(session.frontier)
                if victim in ("source", "both"):
                    await kill(source)
                if victim in ("target", "both"):
                    await kill(target)

            before, began = engine.stats()["tokens_recomputed"], session.frontier
            plant(engine, point, fault)
            results[point] = await try_to_move(engine, f"s{i}")
            await all_up(engine)
            answers = await asyncio.gather(reader, quiet)
            for answer, tokens in zip(answers, wanted, strict=True):
                assert answer.error is None, (point, answer.error)
                assert answer.tokens == tokens, point
            # Of each stream the step in flight, twice if both lanes died under it; and what the
            # source computed while the rows were copied: a source that lives hands few of those
            # over, one that has died any number. The step in flight may be the one that computes
            # what was handed over.
            recomputed = engine.stats()["tokens_recomputed"] - before
            (reached,) = at_fault
            handed_over = max(migration.RECOMPUTE_MAX, reached - began)
            assert recomputed <= 4 + migration.RECOMPUTE_MAX + handed_over, point
        if victim == "source":
            assert results == dict.fromkeys(POINTS, "moved")
        else:
            assert all("lane" in results[p] for p in BEFORE_COMMIT), results
            assert all(results[p] == "moved" for p in POINTS[5:]), results
        await no_leaks(engine)
        arenas = site.folder / "kv" / "arena"
        await until(lambda: len(list(arenas.iterdir())) == 2)


async def test_clients_that_leave_at_every_point_leak_nothing(
    site: Site, reference: Reference
) -> None:
    """The turn ends, the session stays usable, and no slot or seat is lost."""
    async with two_lanes(site) as engine:
        for i, point in enumerate(POINTS):
            name, prompt = f"s{i}", words(10 + i, 300 + 40 * i)
            generation, reader = await start(engine, name, prompt, 500)

            async def fault(generation: Generation = generation) -> None:
                generation.cancel()

            plant(engine, point, fault)
            result = await try_to_move(engine, name)
            if point in ("P1", "P2", "P3", "P4"):
                assert result != "moved", point
            if point in ("P5", "P6", "P7"):
                assert result == "moved", point
            reader.cancel()
            await until(lambda: not engine.state.turns)
            asked = asyncio.get_running_loop().time()
            again = await read(engine.submit(request(prompt, 20, session=name)))
            assert again.tokens == reference.tokens(prompt, 20)
            assert asyncio.get_running_loop().time() - asked < migration.FIRST_COMMIT_S
        await no_leaks(engine)


async def test_sessions_dropped_at_every_point_leave_nothing(
    site: Site, reference: Reference
) -> None:
    """A drop waits for the migration or ends it."""

    reasons: set[str] = set()
    async with two_lanes(site) as engine:
        for i, point in enumerate(POINTS):
            name, prompt = f"s{i}", words(30 + i, 300)
            _, reader = await start(engine, name, prompt, 500)
            drops: list[asyncio.Future[Any]] = []

            async def fault(name: str = name, drops: list[Any] = drops) -> None:
                drops.append(asyncio.ensure_future(engine.drop("", name)))
                await asyncio.sleep(0.01)

            plant(engine, point, fault)
            reasons.add(await try_to_move(engine, name))
            await asyncio.gather(*drops)
            assert (await reader).error is not None
            assert ("", name) not in engine.state.sessions
        await no_leaks(engine)
        assert not any(loop.sessions for loop in engine.state.lanes)
    assert "its request was cancelled" in reasons


@pytest.mark.parametrize(
    "point",
    [p if p in ("P2", "P4", "P5") else pytest.param(p, marks=pytest.mark.slow) for p in POINTS],
)
async def test_a_stop_of_the_daemon_at_every_point_leaves_one_owner(
    site: Site, reference: Reference, point: str
) -> None:
    """The ledger names it, and the session continues in the next engine."""
    prompt = words(50, 500)

    received: list[int] = []
    async with two_lanes(site) as engine:
        _, reader = await start(engine, "s", prompt, 400)
        stopping: list[asyncio.Future[None]] = []

        async def fault() -> None:
            stopping.append(asyncio.ensure_future(engine.stop(0.0)))
            await asyncio.sleep(0.02)

        plant(engine, point, fault)
        await try_to_move(engine, "s")
        await asyncio.gather(*stopping)
        received = (await reader).tokens
        assert received == reference.tokens(prompt, len(received))
    async with two_lanes(site) as engine:
        longer = [*prompt, *received, 5]
        answer = await read(engine.submit(request(longer, 20, session="s")))
        assert answer.tokens == reference.tokens(longer, 20)


N_LONG = 1200  # of an answer that has not ended when a move is refused on a busy machine


@pytest.mark.parametrize(
    "error", [LedgerRefused("planted"), StoreFull("the disk is full (planted)")]
)
async def test_an_owner_the_ledger_refuses_does_not_compute(
    site: Site, reference: Reference, error: Exception
) -> None:
    prompt = words(60, 300)
    async with two_lanes(site) as engine:
        generation, reader = await start(engine, "s", prompt, N_LONG)
        session, ledger = engine.state.sessions["", "s"], engine.running.store.ledger
        epoch, here = session.epoch, lanes_of(engine, "s")[0]
        real = ledger.append

        def refuse(*ops: writes.Op) -> Future[int]:
            if not isinstance(ops[0], writes.SetOwner):
                return real(*ops)
            future: Future[int] = Future()
            future.set_exception(error)
            return future

        ledger.append = refuse  # type: ignore[method-assign]
        assert "the ledger refused" in await try_to_move(engine, "s")
        assert (session.epoch, lanes_of(engine, "s")[0]) == (epoch, here)
        ledger.append = real  # type: ignore[method-assign]
        at = generation.completion_tokens
        await until(lambda: generation.completion_tokens > at + 5)
        assert await try_to_move(engine, "s") == "moved"
        assert session.epoch == epoch + 2  # an epoch that was tried is not used again
        answer = await reader
        assert answer.error is None
        assert answer.tokens == reference.tokens(prompt, N_LONG)


async def test_a_session_with_unproven_rows_does_not_migrate(
    site: Site, reference: Reference
) -> None:
    """A record in the source's arena is flipped; its rows are valid there."""
    prompt = words(70, 400)
    async with two_lanes(site) as engine:
        _, reader = await start(engine, "s", prompt, 300)
        session, (source, _) = engine.state.sessions["", "s"], lanes_of(engine, "s")

        async def fault() -> None:
            flip_record(source, session)

        plant(engine, "P0", fault)
        assert "could not be proven" in await try_to_move(engine, "s")
        assert lanes_of(engine, "s")[0] is source
        assert (await reader).tokens == reference.tokens(prompt, 300)


def flip_record(loop: LaneLoop, session: Session) -> None:
    """Damage the digest of the first row of the session's last open page."""
    arena = loop.kv.slots.arena
    assert arena is not None
    at = arena.shape.rows_offset(session.kv.open[-1].slot)
    record = os.pread(arena.fd, 16, at)
    os.pwrite(arena.fd, bytes(byte ^ 0x5A for byte in record[:8]), at)


async def test_turns_leave_a_lane_whose_worker_cannot_start(
    site: Site, reference: Reference
) -> None:
    """Their open rows are imported on the other lane."""
    prompts = [words(80 + i, 200 + 30 * i) for i in range(4)]
    async with two_lanes(site) as engine:
        started = [await start(engine, f"s{i}", p, 1000) for i, p in enumerate(prompts)]
        source, target = engine.state.lanes
        n_there = len(source.running)
        assert n_there
        may_start = hold_restarts(engine)
        await kill(source)
        answers = await asyncio.gather(*(reader for _, reader in started))
        assert [a.tokens for a in answers] == [reference.tokens(p, 1000) for p in prompts]
        assert engine.stats()["tokens_recomputed"] <= n_there
        assert all(home is target for home in engine.state.home.values())
        may_start.set()
        await all_up(engine)


async def test_a_migration_to_a_lane_that_hangs_fails(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream continues, and a later migration succeeds."""
    monkeypatch.setattr(migration, "ANSWER_S", 0.3)
    prompt = words(90, 300)
    async with two_lanes(site) as engine:
        generation, reader = await start(engine, "s", prompt, 900)
        _, target = lanes_of(engine, "s")
        suspend(target.lane.pid)
        before = generation.completion_tokens
        assert "does not answer" in await try_to_move(engine, "s")
        await until(lambda: generation.completion_tokens > before + 20)
        os.kill(target.lane.pid, signal.SIGCONT)
        monkeypatch.setattr(migration, "ANSWER_S", 60.0)
        assert await try_to_move(engine, "s") == "moved"
        assert (await reader).tokens == reference.tokens(prompt, 900)
