"""An invalid page is dropped by every session that holds it, on every lane."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest

from batchengine.config import LaneConfig
from batchengine.engine import Engine
from batchengine.engine.lane.loop import LaneLoop
from batchengine.lanes.worker_process import WORKER
from batchengine.session import Session, State
from kv_store.pages.index import PageRef
from kv_store.threads import new_future
from tests.engine.placement.test_migration import LANES, other
from tests.engine.placement.test_migration_faults import lanes_of, plant, start
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    suspend,
    until,
    words,
)
from tests.support.faulty_worker import SEGV

PAGES = 3
PROMPT = words(1, PAGES * 256 + 20)
FAULTY = (sys.executable, "-m", "tests.support.faulty_worker")
ONE_LANE = (LaneConfig(name="left", threads=1),)


@asynccontextmanager
async def engine_of(
    lanes: int, site: Site, command: tuple[str, ...] = WORKER
) -> AsyncIterator[Engine]:
    made = ONE_LANE if lanes == 1 else LANES
    async with running_engine(site, command, lanes=made, router__promote_auto=False) as engine:
        yield engine


async def held(engine: Engine, name: str, prompt: list[int], pages: int) -> Session:
    """An idle session that holds so many pages of the store."""
    await read(engine.submit(request(prompt, 4, session=name)))
    session = engine.state.sessions["", name]
    await until(lambda: len(session.kv.sealed) == pages)
    return session


async def put(engine: Engine, name: str, lane: str) -> None:
    """Migrate the session to a lane if it is on another one."""
    if engine.state.home[engine.state.sessions["", name].key].lane.name != lane:
        assert (await engine.promote("", name, to=lane))["result"] == "moved"


def flip_byte(engine: Engine, ref: PageRef) -> None:
    """Change one byte of the page on disk, and so in the mapped memory."""
    store = engine.running.store
    info = store.pages.allocator.info(ref.page_id)
    with open(info.path, "r+b") as file:
        at = info.offset_of(ref.page_id) + 1000
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def die_at(loop: LaneLoop, wanted: Callable[[Any], bool]) -> asyncio.Event:
    """The worker crashes at the next such frame, before it reads it."""
    real, died = loop.lane.post, asyncio.Event()

    def post(step: Any, payload: bytes, **how: Any) -> Any:
        if not wanted(step):
            return real(step, payload, **how)
        loop.lane.post = real  # type: ignore[method-assign]
        suspend(loop.lane.pid)
        reply = real(step, payload, **how)
        os.kill(loop.lane.pid, signal.SIGSEGV)
        os.kill(loop.lane.pid, signal.SIGCONT)
        died.set()
        return reply

    loop.lane.post = post  # type: ignore[method-assign]
    return died


def at_restart(engine: Engine, fact: Callable[[], bool]) -> list[bool]:
    """Call this whenever a worker is about to be started again."""
    seen: list[bool] = []
    supervisor = engine.running.supervisor
    real = supervisor.restart

    async def restart(*given: Any) -> None:
        seen.append(fact())
        await real(*given)

    supervisor.restart = restart  # type: ignore[method-assign]
    return seen


def drops_page(engine: Engine, session: Session, bad: PageRef) -> bool:
    """The session dropped the page, or its lane drops it before the next step."""
    return bad not in session.kv.sealed or engine.state.home[session.key].is_rechecking


async def check_continues(
    engine: Engine, session: Session, bad: PageRef, reference: Reference
) -> None:
    """The session continues without the page, with the right tokens."""
    longer = [*session.tokens, 9, 8]
    answer = await read(engine.submit(request(longer, 30, session=session.session_id)))
    assert answer.tokens == reference.tokens(longer, 30)
    assert bad not in session.kv.sealed


@pytest.mark.parametrize("lanes", [1, 2])
async def test_every_holder_drops_a_page_that_ended_a_worker(
    site: Site, reference: Reference, lanes: int
) -> None:
    async with engine_of(lanes, site, FAULTY) as engine:
        a = await held(engine, "a", PROMPT, PAGES)
        b = await held(engine, "b", [*PROMPT[:700], 9, 9], 2)
        await put(engine, "a", "left")
        await put(engine, "b", "left" if lanes == 1 else "right")
        bad = a.kv.sealed[1]
        assert bad in b.kv.sealed
        flip_byte(engine, bad)
        seen = at_restart(
            engine,
            lambda: not engine.running.store.pages.is_resident(bad) and drops_page(engine, b, bad),
        )
        answer = await read(engine.submit(request([*a.tokens, SEGV], 4, session="a")))
        assert answer.error is not None  # the worker dies at that token, too
        assert seen
        assert all(seen)
        await check_continues(engine, b, bad, reference)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("dies", [False, True])
async def test_every_holder_drops_a_page_that_a_seal_found_invalid(
    site: Site, reference: Reference, lanes: int, dies: bool
) -> None:
    """The seal compared its page with the stored one, which the lane could not read."""
    async with engine_of(lanes, site) as engine:
        b = await held(engine, "b", PROMPT[:500], 1)
        await put(engine, "b", "left" if lanes == 1 else "right")
        bad = b.kv.sealed[0]
        left = engine.state.lanes[0]
        await held(engine, "a", PROMPT[:20], 0)
        await put(engine, "a", "left")
        left.kv.prefix.extend = lambda *_: None  # type: ignore[method-assign]
        flip_byte(engine, bad)
        died = die_at(left, lambda step: dies and bool(step.verify))
        seen = at_restart(engine, lambda: drops_page(engine, b, bad))
        longer = PROMPT[:300]
        answer = await read(engine.submit(request(longer, 4, session="a")))
        assert answer.tokens == reference.tokens(longer, 4)
        await until(lambda: not engine.running.store.pages.is_resident(bad))
        slot = engine.running.store.pages.index.find(bad.page_id)
        assert slot is not None
        assert slot.fails == 1, "it does not read back as written"
        if dies:
            await died.wait()
            await until(lambda: bool(seen))
            assert all(seen)
        del left.kv.prefix.extend
        await check_continues(engine, b, bad, reference)


class Unreadable:
    """A store whose verification fails after a delay."""

    def __init__(self, engine: Engine) -> None:
        self._store: Any = engine.running.store
        self._real = self._store.pages.verify
        self._held: list[Future[bool]] = []
        self._store.pages.verify = self._verify

    def _verify(self, _: PageRef) -> Future[bool]:
        late: Future[bool] = new_future()
        self._held.append(late)
        return late

    @property
    def is_asked(self) -> bool:
        return bool(self._held)

    def answer(self) -> None:
        self._store.pages.verify = self._real
        for late in self._held:
            late.set_result(False)


def is_every_slot_owned(loop: LaneLoop) -> bool:
    held = sum(len(member.kv.open) for member in loop.sessions.values())
    arena = loop.kv.slots.arena
    assert arena is not None
    return arena.n_open <= held + len(loop.kv.slots.seals)


@pytest.mark.parametrize("moved", [True, False])
async def test_a_suspect_that_migrates_while_its_pages_are_read_is_not_cut(
    site: Site, reference: Reference, moved: bool
) -> None:
    """A lane does not cut the page table of a session that has moved to another lane meanwhile."""
    async with engine_of(2, site) as engine:
        generation, reader = await start(engine, "s", PROMPT, 2000)
        session = engine.state.sessions["", "s"]
        await until(lambda: len(session.kv.sealed) >= PAGES)
        assert not generation.finished
        here, there = lanes_of(engine, "s")
        disk, revived = Unreadable(engine), at_restart(engine, lambda: True)
        session.alone_deaths = 1  # its next token ends the turn: an idle session may move
        await die_at(here, lambda step: bool(step.entries)).wait()
        assert (await reader).error is not None
        await until(lambda: disk.is_asked)
        before, kept = list(session.kv.sealed), list[bool]()

        async def answer() -> None:
            assert (session.state is State.FROZEN) is not moved
            disk.answer()
            await until(lambda: bool(revived))
            kept.append(session.kv.sealed == before)

        if not moved:
            plant(engine, "P2", answer)
        await engine.promote("", "s", to=other(engine, "s"))
        assert engine.state.home[session.key] is there
        if moved:
            await answer()
        assert moved or kept == [True]
        longer = [*session.tokens, 9]
        more = await read(engine.submit(request(longer, 20, session="s")))
        assert more.tokens == reference.tokens(longer, 20)
        await until(lambda: here.kv.slots.is_attached and there.kv.slots.is_attached)
        # a table cut by the wrong lane leaves slots without an owner
        await until(lambda: all(is_every_slot_owned(loop) for loop in (here, there)))


@pytest.mark.parametrize("stage", ["seal", "publish"])
async def test_a_tail_being_parked_is_not_held_by_a_dropped_session(site: Site, stage: str) -> None:
    async with running_engine(site) as engine:
        session = await held(engine, "s", PROMPT[:300], 1)
        loop = engine.state.home[session.key]
        slots = loop.kv.slots.available
        store: Any = engine.running.store.pages
        real, late = getattr(store, stage), list[tuple[Future[Any], Future[Any]]]()

        def slow(*given: Any) -> Future[Any]:
            future: Future[Any] = new_future()
            late.append((future, real(*given)))
            return future

        setattr(store, stage, slow)
        loop.kv.sealing.park(session)
        loop.wake()
        await until(lambda: bool(late))
        dropping = asyncio.ensure_future(engine.drop("", "s"))
        await until(lambda: session.state is State.CLOSED)
        await asyncio.sleep(0.05)  # the ledger drops it before its tail is published
        future, answer = late[0]
        future.set_result(await asyncio.wrap_future(answer))
        await dropping
        await until(lambda: not loop.kv.sealing.in_flight)
        assert engine.stats()["store"]["pages_pinned"] == 0
        await until(lambda: loop.kv.slots.available == slots)
