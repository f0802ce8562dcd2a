"""Rows that the store keeps: parked tails, and the beginning of a sealed page after an edit."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from batchengine.core import PAGE_TOKENS
from batchengine.engine import Engine, housekeeping
from batchengine.session import Session
from batchengine.wire.lane import FromArena
from kv_store.errors import StoreError
from kv_store.pages.index import PageRef
from kv_store.pages.seal import Ticket
from tests.engine.placement.test_migration import other, two_lanes
from tests.engine.placement.test_migration_faults import kill, lanes_of
from tests.support.engines import Reference, Site, read, request, running_engine, until, words


async def parked(engine: Engine, name: str) -> Session:
    """Park an idle session's tail and wait until it is in the store."""
    session = engine.state.sessions["", name]
    pages = engine.state.home[session.key].kv
    assert pages.sealing.park(session)
    await until(lambda: session.kv.parked is not None)
    return session


async def test_a_parked_session_loses_its_slot_and_no_row(site: Site, reference: Reference) -> None:
    """The tail is imported again after another session needed the whole arena."""
    prompt = words(1, 700)
    async with running_engine(site, lane__open_pages=8, lane__entries_max=2) as engine:
        first = await read(engine.submit(request(prompt, 30, session="s")))
        session = await parked(engine, "s")
        assert session.kv.parked is not None
        assert (session.kv.parked.page, session.kv.parked.rows) == (2, 729 - 512)
        pages = engine.state.lanes[0].kv
        wanted = pages.slots.available  # every slot, with that of the session
        taken = pages.importing.prepare(Session(0, "other", ""), 1, wanted)
        assert taken is not None
        pages.importing.abandon(taken)
        assert [type(o.source) for o in session.kv.pending] == [PageRef]
        longer = [*prompt, *first.tokens, 5, 6]
        again = await read(engine.submit(request(longer, 30, session="s")))
        assert again.tokens == reference.tokens(longer, 30)
        assert again.done is not None
        assert again.done.usage.cached_tokens == 729
        assert again.done.usage.reuse_reason == ""
        assert engine.stats()["tokens_recomputed"] == 0


async def test_a_parked_session_migrates_by_reference(site: Site, reference: Reference) -> None:
    prompt = words(10, 700)
    async with two_lanes(site) as engine:
        first = await read(engine.submit(request(prompt, 30, session="s")))
        await parked(engine, "s")
        report = await engine.demote("", "s", to=other(engine, "s"))
        assert (report["pages_copied"], report["rows_copied"]) == (0, 0)
        assert report["pages_shared"] == 3
        longer = [*prompt, *first.tokens, 5, 6]
        again = await read(engine.submit(request(longer, 30, session="s")))
        assert again.tokens == reference.tokens(longer, 30)
        assert engine.stats()["tokens_recomputed"] == 0


async def test_a_parked_tail_behind_an_open_page_of_a_dead_worker_is_recomputed(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full page before it, for which the store had no room, is copied; the tail is
    recomputed."""
    prompt = words(12, 300)
    async with two_lanes(site) as engine:
        store = engine.state.store
        assert store is not None
        seal = store.pages.seal

        def only_tails(ticket: Ticket, *rest: Any) -> Future[PageRef]:
            if len(ticket.tokens) < PAGE_TOKENS * 4:
                return seal(ticket, *rest)
            full: Future[PageRef] = Future()
            full.set_exception(StoreError("no room"))
            return full

        monkeypatch.setattr(store.pages, "seal", only_tails)
        first = await read(engine.submit(request(prompt, 8, session="s")))
        session = await parked(engine, "s")
        here, there = lanes_of(engine, "s")
        await kill(here)
        kinds = [type(pending.source) for pending in session.kv.pending]
        assert kinds == [FromArena, PageRef]
        report = await engine.promote("", "s", to=there.lane.name)
        assert (report["result"], report["pages_copied"]) == ("moved", 1)
        assert (report["rows_copied"], report["pages_shared"]) == (PAGE_TOKENS, 0)
        session.check()
        longer = [*prompt, *first.tokens, 5, 6]
        again = await read(engine.submit(request(longer, 30, session="s")))
        assert again.tokens == reference.tokens(longer, 30)


async def test_idle_sessions_are_parked(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that continues at that moment is not affected."""
    monkeypatch.setattr(housekeeping, "HOUSEKEEPING_S", 0.02)
    prompt = words(20, 100)
    async with running_engine(site) as engine:
        history = list(prompt)
        for turn in range(12):
            answer = await read(engine.submit(request(history, 20, session="s")))
            assert answer.tokens == reference.tokens(history, 20)
            session = engine.state.sessions["", "s"]
            if turn % 3 == 0:
                await until(lambda s=session: s.kv.parked is not None)
            elif turn % 3 == 1:
                await asyncio.sleep(0.06 + turn / 1000)
            history += [*answer.tokens, 40 + turn]
        assert engine.stats()["tokens_recomputed"] == 0


async def test_an_edit_inside_a_sealed_page_keeps_the_rows_before_it(
    site: Site, reference: Reference
) -> None:
    prompt = words(30, 900)
    async with running_engine(site) as engine:
        await read(engine.submit(request(prompt, 5, session="s")))
        await until(lambda: len(engine.state.sessions["", "s"].kv.sealed) == 3)
        edited = [*prompt[:300], *words(31, 100)]
        answer = await read(engine.submit(request(edited, 30, session="s")))
        assert answer.tokens == reference.tokens(edited, 30)
        assert answer.done is not None
        assert answer.done.usage.cached_tokens == 300
        assert engine.stats()["tokens_recomputed"] == 0
        back = await read(engine.submit(request(prompt, 5, session="s")))
        assert back.tokens == reference.tokens(prompt, 5)
