"""Changes during an await: of the page table, the lane of a session, the validity of a page.

Before its fix, each of these cases computed with KV that was missing or known to be wrong.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from batchengine.core import GenerationRequest
from batchengine.engine import Engine, housekeeping
from batchengine.engine.lane.recompute import PageRecompute, RecomputeFailed
from batchengine.session import LOG_UNKNOWN, Session
from kv_store.ledger import writes
from kv_store.pages.index import PageRef
from kv_store.threads import new_future
from tests.engine.placement.test_migration import other, two_lanes
from tests.engine.placement.test_migration_faults import lanes_of, plant, start
from tests.support.engines import Reference, Site, read, request, running_engine, until, words

PAGES = 3
PROMPT = words(1, PAGES * 256 + 20)


class SlowDisk:
    """Answers of `store.pages.load` wait for `answer`."""

    def __init__(self, engine: Engine) -> None:
        self._store: Any = engine.running.store
        self._real: Callable[[Sequence[PageRef]], Future[list[bool]]] = self._store.pages.load
        self._held: list[tuple[Future[list[bool]], Future[list[bool]]]] = []
        self._store.pages.load = self._load

    def _load(self, refs: Sequence[PageRef]) -> Future[list[bool]]:
        late: Future[list[bool]] = new_future()
        self._held.append((late, self._real(refs)))
        return late

    @property
    def is_asked(self) -> bool:
        return bool(self._held)

    async def answer(self) -> None:
        self._store.pages.load = self._real
        for late, real in self._held:
            late.set_result(await asyncio.wrap_future(real))


async def evicted(engine: Engine, session: Session) -> None:
    """Evict pages of the session, as for the oldest reclaimable session of a full store."""
    assert engine.state.home[session.key].kv.slots.evict_oldest(Session(0, "", ""))


async def invalidated(engine: Engine, session: Session) -> None:
    loop = engine.state.home[session.key]
    engine.running.store.pages.invalidate(session.kv.sealed[1])
    loop.recheck()
    await until(lambda: not loop.is_rechecking)


@pytest.mark.parametrize("fault", [evicted, invalidated])
async def test_pages_lost_while_they_are_read_are_not_used(
    site: Site, reference: Reference,
    caplog: pytest.LogCaptureFixture, fault: Any
) -> None:  # fmt: skip

    with caplog.at_level(logging.ERROR, "batchengine.kv"):
        async with two_lanes(site) as engine:
            await read(engine.submit(request(PROMPT, 4, session="s")))
            session = engine.state.sessions["", "s"]
            await until(lambda: len(session.kv.sealed) == PAGES)
        async with two_lanes(site) as engine:
            disk = SlowDisk(engine)
            longer = [*PROMPT, 5]
            reader = asyncio.ensure_future(read(engine.submit(request(longer, 30, session="s"))))
            await until(lambda: disk.is_asked)
            session = engine.state.sessions["", "s"]
            await engine.promote("", "s", to=other(engine, "s"))
            await fault(engine, session)
            assert len(session.kv.sealed) < PAGES
            await disk.answer()
            answer = await reader
            assert answer.tokens == reference.tokens(longer, 30)
            assert answer.done is not None
            if fault is invalidated:
                assert answer.done.usage.cached_tokens <= 256
    assert not caplog.records


async def test_a_page_invalidated_while_its_session_migrates_is_not_used(
    site: Site, reference: Reference
) -> None:
    async with two_lanes(site) as engine:
        generation, reader = await start(engine, "s", PROMPT, 300)
        session = engine.state.sessions["", "s"]
        await until(lambda: len(session.kv.sealed) == PAGES)
        _, there = lanes_of(engine, "s")
        bad = session.kv.sealed[0]

        async def invalidate() -> None:
            engine.running.store.pages.invalidate(bad)
            for loop in engine.state.lanes:
                loop.recheck()
            await until(lambda: not any(loop.is_rechecking for loop in engine.state.lanes))

        plant(engine, "P2", invalidate)
        await engine.promote("", "s", to=there.lane.name)
        before = generation.completion_tokens
        await until(lambda: generation.completion_tokens > before + 2 or reader.done())
        assert bad not in session.kv.sealed
        assert (await reader).tokens == reference.tokens(PROMPT, 300)


@pytest.mark.parametrize("where", ["store", "arena"])
async def test_an_invalid_tail_is_not_imported(site: Site, where: str) -> None:
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(PROMPT, 20, session="s")))
        session = engine.state.sessions["", "s"]
        loop = engine.state.home[session.key]
        loop.kv.sealing.park(session)
        loop.wake()
        await until(lambda: session.kv.parked is not None)
        assert session.kv.parked is not None
        tail = session.kv.parked.ref
        if where == "store":
            loop.kv.slots.vacate(session)
        engine.running.store.pages.invalidate(tail)
        loop.recheck()
        await until(lambda: not loop.is_rechecking)
        assert session.kv.parked is None
        again = await read(engine.submit(request([*PROMPT, *first.tokens, 5, 6], 4, session="s")))
        assert again.done is not None
        cached = again.done.usage.cached_tokens
        assert (cached <= PAGES * 256) is (where == "store")


async def test_a_recompute_closed_in_flight_does_not_answer_the_next_one(site: Site) -> None:
    async with running_engine(site) as engine:
        loop = engine.state.lanes[0]
        late, next_one = (PageRecompute(words(n, 512), [], urgent=True) for n in (1, 2))
        real, asked = loop.lane.run, asyncio.Event()

        async def slow(*given: Any, **how: Any) -> Any:
            asked.set()
            done = await real(*given, **how)
            await asyncio.sleep(0.05)
            return done

        loop.lane.run = slow  # type: ignore[method-assign]
        loop.ask_recompute(late)
        loop.ask_recompute(next_one)
        await asked.wait()
        loop.recomputes.close(late)
        with pytest.raises(RecomputeFailed):
            await late.digest
        digest = await next_one.digest
        loop.recomputes.close(next_one)
        loop.lane.run = real  # type: ignore[method-assign]
        again = PageRecompute(words(2, 512), [], urgent=True)
        loop.ask_recompute(again)
        assert await again.digest == digest, "it was given the answer to another's frame"
        loop.recomputes.close(again)
        assert engine.fatal is None


async def test_a_session_with_fewer_pages_than_its_frontier_is_recomputed(
    site: Site, reference: Reference,
    caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """No known path leads to this state."""

    with caplog.at_level(logging.ERROR, "batchengine.kv"):
        async with running_engine(site) as engine:
            generation, reader = await start(engine, "s", PROMPT, 200)
            session = engine.state.sessions["", "s"]
            loop = engine.state.home[session.key]
            frozen = await loop.freeze(session)
            assert frozen is not None
            frontier = session.frontier
            loop.kv.slots.truncate(session, 1)
            session.frontier = frontier
            loop.thaw(session, frozen)
            await until(lambda: generation.finished)
            assert (await reader).tokens == reference.tokens(PROMPT, 200)
    assert "fewer pages than its frontier" in caplog.text


class SlowLedger:
    """Sessions are read from the ledger, but answers wait for `answer`."""

    def __init__(self, engine: Engine) -> None:
        self._ledger: Any = engine.running.store.ledger
        self._real = self._ledger.load_session
        self.held: list[tuple[Future[Any], Future[Any]]] = []
        self._ledger.load_session = self._load

    def _load(self, name: str) -> Future[Any]:
        late: Future[Any] = new_future()
        self.held.append((late, self._real(name)))
        return late

    async def answer(self) -> None:
        """Release the newest answer."""
        self._ledger.load_session = self._real
        late, real = self.held.pop()
        late.set_result(await asyncio.wrap_future(real))


async def test_a_migration_during_a_ledger_query_keeps_its_new_owner(
    site: Site, reference: Reference
) -> None:
    """The lane in the record is older than the migration, and is not written back as the owner."""
    async with two_lanes(site) as engine:
        first = await read(engine.submit(request(PROMPT, 20, session="s")))
        session = engine.state.sessions["", "s"]
        ledger = SlowLedger(engine)
        again = engine.submit(request(PROMPT, 20, session="s"))  # a prefix: asks the ledger
        reader = asyncio.ensure_future(read(again))
        await until(lambda: bool(ledger.held))
        await engine.promote("", "s", to=other(engine, "s"))
        await ledger.answer()
        answer = await reader
        assert answer.error is None, answer.error
        assert answer.tokens == first.tokens
        assert session.logged_epoch == session.epoch
        longer = [*PROMPT, *answer.tokens, 7]
        more = await read(engine.submit(request(longer, 9, session="s")))
        assert more.error is None, more.error
        assert more.tokens == reference.tokens(longer, 9)


async def test_a_session_can_be_dropped_while_its_request_begins(site: Site) -> None:
    async with two_lanes(site) as engine:
        await read(engine.submit(request(PROMPT, 20, session="s")))
        epoch = engine.state.sessions["", "s"].epoch
        ledger = SlowLedger(engine)
        reader = asyncio.ensure_future(read(engine.submit(request(PROMPT, 20, session="s"))))
        await until(lambda: bool(ledger.held))
        dropping = asyncio.ensure_future(engine.drop("", "s"))
        await until(lambda: len(ledger.held) == 2)
        await ledger.answer()
        answer = await reader
        await ledger.answer()
        async with asyncio.timeout(60):
            await dropping
        assert answer.error is not None
        assert answer.error.code == "BE2414"
        assert not answer.tokens
        assert await asyncio.wrap_future(engine.running.store.ledger.load_session("\x1fs")) is None
        await read(engine.submit(request(PROMPT, 2, session="s")))
        assert engine.state.sessions["", "s"].epoch > epoch, "its old rows would pass for its own"


async def test_a_cut_by_the_ledger_shortens_the_page_table(
    site: Site, reference: Reference
) -> None:
    """A repeated turn computes nothing, so no step would shorten it."""

    def asked(prompt: list[int], n: int) -> GenerationRequest:
        return dataclasses.replace(request(prompt, n, session="s"), idempotency_key="k")

    async with running_engine(site) as engine:
        first = await read(engine.submit(asked(PROMPT[:100], 3)))
        longer = [*PROMPT[:100], *first.tokens, *PROMPT[100:400]]
        await read(engine.submit(request(longer, 60, session="s")))
        session, pages = (
            engine.state.sessions["", "s"],
            engine.state.lanes[0].kv,
        )
        pages.sealing.park(session)
        engine.state.lanes[0].wake()
        await until(lambda: session.kv.parked is not None)
        pages.slots.vacate(session)
        ledger = engine.running.store.ledger  # it has less than the session, as after a full disk
        cut = ledger.append(writes.TruncateTokens("\x1fs", session.logged_epoch, 150))
        ledger.commit()
        await asyncio.wrap_future(cut)
        session.logged = LOG_UNKNOWN
        again = await read(engine.submit(asked(PROMPT[:100], 3)))
        assert again.tokens == first.tokens
        engine.state.lanes[0].wake()
        more = await read(engine.submit(request(longer, 9, session="s")))
        assert engine.fatal is None
        assert more.tokens == reference.tokens(longer, 9)


async def test_a_turn_is_sent_again_after_an_edit_that_a_full_disk_refused(
    site: Site, reference: Reference
) -> None:
    """The turn in the ledger continues from its own prompt, although memory has the edit."""
    prompt = PROMPT[:50]
    whole = reference.tokens(prompt, 30)

    def full(_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorname = "SQLITE_FULL"
        raise error

    async def refused(engine: Engine, asked: list[int]) -> None:
        ledger: Any = engine.running.store.ledger
        real, ledger._transact_once = ledger._transact_once, full
        edit = await read(engine.submit(request(asked, 5, session="s")))
        ledger._transact_once = real
        assert edit.error is not None
        assert edit.error.name == "durability_unavailable"
        session = engine.state.sessions["", "s"]
        assert (session.logged, session.tokens[: len(asked)]) == (LOG_UNKNOWN, asked)

    async with running_engine(site) as engine:
        first = engine.submit(request(prompt, 30, session="s"))
        assert (await read(first)).tokens == whole
        await refused(engine, [*prompt[:20], *words(9, 40)])
        rest = await read(await engine.resume("", "s", 5, first.turn_id))
        assert rest.tokens == whole[5:]
        await refused(engine, [*prompt[:20], *words(9, 70)])
        again = await read(engine.submit(request(prompt, 30, session="s")))
        assert again.tokens == whole
        assert sum(loop.meter.generated for loop in engine.state.lanes) < 40, (
            "it was computed again"
        )
        longer = [*prompt, *whole, 7]
        more = await read(engine.submit(request(longer, 9, session="s")))
        assert more.tokens == reference.tokens(longer, 9)


async def test_a_resume_that_finds_another_prompt_is_refused_and_cuts_nothing(site: Site) -> None:
    """The tokens of another prompt are not sent as the answer; no known path leads there."""
    prompt = PROMPT[:50]
    async with running_engine(site) as engine:
        first = engine.submit(request(prompt, 10, session="s"))
        sent = (await read(first)).tokens
        session = engine.state.sessions["", "s"]
        kept, session.tokens = session.tokens, [*prompt[:20], *words(9, 40)]
        other_one = list(session.tokens)
        late = await read(await engine.resume("", "s", 5, first.turn_id))
        assert late.error is not None
        assert (late.error.name, late.tokens) == ("nothing_to_resume", [])
        assert session.tokens == other_one
        session.tokens = kept
        rest = await read(await engine.resume("", "s", 5, first.turn_id))
        assert rest.tokens == sent[5:]


async def test_an_idle_session_with_an_invalid_page_table_is_dropped_alone(
    site: Site, reference: Reference,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """The daemon and the other sessions continue."""
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_S", 0.02)
    monkeypatch.setattr(housekeeping, "MAINTAIN_S", 0.05)

    with caplog.at_level(logging.ERROR, "batchengine.engine"):
        async with running_engine(site) as engine:
            first = await read(engine.submit(request(PROMPT, 9, session="s")))
            await read(engine.submit(request(PROMPT[:40], 2, session="other")))
            engine.state.sessions["", "s"].frontier = -1
            forgotten = engine.metrics.sessions_forgotten_total._value
            await until(lambda: forgotten.get() == 1)
            assert ("", "s") not in engine.state.sessions
            assert ("", "other") in engine.state.sessions
            assert (await read(await engine.resume("", "s", 2))).tokens == first.tokens[2:]
            longer = [*PROMPT, *first.tokens, 5]
            more = await read(engine.submit(request(longer, 9, session="s")))
            assert more.tokens == reference.tokens(longer, 9)
            assert (engine.phase, forgotten.get()) == ("ready", 1)
    assert "frontier outside the timeline" in caplog.text


async def test_forgetting_a_session_keeps_a_newer_one_of_its_name(site: Site) -> None:
    async with running_engine(site) as engine:
        await read(engine.submit(request(PROMPT[:50], 2, session="s")))
        old = engine.state.sessions["", "s"]
        engine.state.forget(old)
        await read(engine.submit(request(PROMPT[:60], 2, session="s")))
        new = engine.state.sessions["", "s"]
        assert new is not old
        engine.state.forget(old)
        assert engine.state.sessions["", "s"] is new
