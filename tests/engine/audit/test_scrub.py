"""Store maintenance by the engine while it serves: page budget, scrub, audit, garbage, health."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
from concurrent.futures import Future

import pytest

from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError
from batchengine.engine import Engine
from batchengine.engine.audit import scrub
from batchengine.engine.lane import recompute
from kv_store.errors import StoreFull
from kv_store.ledger import writes
from kv_store.pages.index import PageRef
from kv_store.store import Store
from tests.support.engines import (
    Answer,
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    until,
    words,
)
from tests.support.wrong_worker import WRONG

PAGE = 256


def number(engine: Engine, name: str) -> int:
    """One number of the store's statistics."""
    return int(engine.stats()["store"][name])


async def sealed(engine: Engine, pages: int) -> None:
    """Wait until that many pages were published and verified."""
    await until(lambda: int(engine.stats()["pages_sealed"]) >= pages)


def lane(name: str = "cpu", **settings: object) -> LaneConfig:
    return LaneConfig(name=name, threads=1, **settings)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- the page budget


async def test_sessions_that_share_a_prefix_count_its_pages_once(
    site: Site, reference: Reference
) -> None:
    """12 sessions that share 8 pages of prefix in a store of 60 all have seats at once."""
    fleet, prefix = 12, words(1, 8 * PAGE)
    prompts = [[*prefix, *words(100 + i, 20)] for i in range(fleet)]
    page_bytes = await page_bytes_of(site.at("probe"))
    async with running_engine(
        site, lanes=(lane(entries_max=fleet, open_pages=48),), store__budget_bytes=60 * page_bytes
    ) as engine:
        await read(engine.submit(request(prefix, 1)))
        await sealed(engine, 8)
        running = [engine.submit(request(p, 520)) for p in prompts]  # unread, so none ends
        await until(lambda: engine.stats()["requests_running"] == fleet)
        await until(lambda: min(one.completion_tokens for one in running) > 20)
        for one in running:
            one.cancel()
        for one, prompt in list(zip(running, prompts, strict=True))[:2]:
            tokens = (await read(one)).tokens
            assert tokens == reference.tokens(prompt, len(tokens))


async def page_bytes_of(site: Site) -> int:
    async with running_engine(site) as engine:
        return number(engine, "page_bytes")


# ------------------------------------------------------------------------------ scrub, audit

FAULTY = (sys.executable, "-m", "tests.support.wrong_worker")


@pytest.fixture
def fast_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes count as idle at once, and pages are scrubbed as fast as they can be read."""
    monkeypatch.setattr(scrub, "IDLE_S", 0.05)
    monkeypatch.setattr(scrub, "REST_S", 0.05)
    monkeypatch.setattr(scrub, "SCRUB_S_MIN", 0.002)
    monkeypatch.setattr(scrub, "SCRUB_SHARE", 1e9)


def metric(engine: Engine, name: str, **labels: str) -> float:
    return engine.metrics.registry.get_sample_value(f"batchengine_{name}", labels) or 0.0


def damage(engine: Engine, tokens: list[int], page: int) -> None:
    """Flip one bit of the stored copy of a page."""
    store = engine.state.store
    assert store is not None
    code = store.pages.slot_code(store.pages.match_prefix(tokens, b"")[page])
    info = store.pages.allocator.infos[(code >> 32) - 1]
    assert info.index == code >> 32
    with open(info.path, "r+b") as file:
        at = (code & 0xFFFFFFFF) * info.page_bytes + 12345
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


async def test_scrub_detects_a_flipped_bit_while_idle(
    site: Site, reference: Reference, fast_maintenance: None
) -> None:
    """F52: the damaged middle page of an idle session is dropped, and so is the page after it,
    which this run may have computed from the flipped bit."""
    prompt = words(21, 3 * PAGE + 40)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(prompt, 8, session="s")))
        await sealed(engine, 3)
        damage(engine, prompt, 1)
        await until(lambda: metric(engine, "kv_scrubbed_pages_total", result="bad") == 1)
        longer = [*prompt, *one.tokens, 77]
        two = await read(engine.submit(request(longer, 8, session="s")))
        assert two.done is not None
        assert two.done.usage.cached_tokens == PAGE
        assert two.tokens == reference.tokens(longer, 8)
        assert engine.stats()["troubles"] == []


async def test_descendants_of_a_page_that_failed_verification_are_not_matched(
    site: Site, reference: Reference
) -> None:
    """Pages that this run may have computed from the flipped bit are dropped; the invalid page
    is sealed anew."""
    prompt = words(23, 3 * PAGE + 40)
    async with running_engine(site) as engine:
        await read(engine.submit(request(prompt, 8, session="s")))
        await sealed(engine, 3)
        damage(engine, prompt, 1)
        assert (await engine.store_op("verify"))["bad"] == 1
        await read(engine.submit(request(prompt[: 2 * PAGE + 40], 2)))
        await sealed(engine, 4)
        again = await read(engine.submit(request(prompt, 8)))
        assert again.done is not None
        assert again.done.usage.cached_tokens == 2 * PAGE
        assert again.tokens == reference.tokens(prompt, 8)


@pytest.mark.parametrize("third", [False, True])
@pytest.mark.parametrize("first", ["good", "bad"])
async def test_when_lanes_differ_the_wrong_one_is_drained(
    site: Site, reference: Reference, first: str,
    third: bool
) -> None:  # fmt: skip
    """F46: the wrong lane is drained whichever sealed the page first; two lanes need a fresh
    worker's vote, three do not."""
    prompt = [*words(23, 100), WRONG, *words(24, 250)]
    other = words(25, 30)
    lanes = (lane("good", tier="fast"), lane("bad", tier="bulk"))
    lanes += (lane("third", tier="fast", queue_max=1),) if third else ()

    async with running_engine(site, FAULTY, lanes=lanes, router__tolerance=10.0) as engine:
        loops = {loop.lane.name: loop for loop in engine.state.lanes}
        for loop in loops.values():
            loop.kv.sealing.publishes = False  # until both have computed the page
        right = engine.submit(request(prompt, 300, sla="interactive"))
        wrong = engine.submit(request(prompt, 300, sla="batch"))
        await until(lambda: min(one.completion_tokens for one in (right, wrong)) > 0)
        tasks: dict[bool, asyncio.Task[Answer]] = {}
        for is_bad in sorted((False, True), reverse=first == "bad"):
            for name, loop in loops.items():
                loop.kv.sealing.publishes |= (name == "bad") == is_bad
            # A turn whose answer was not read has not ended.
            tasks[is_bad] = asyncio.ensure_future(read(wrong if is_bad else right))
            await until(lambda: any(loop.kv.sealing.sealed for loop in loops.values()))
        await until(lambda: bool(loops["bad"].draining))
        answers = [await tasks[False], await tasks[True]]
        assert [name for name, loop in loops.items() if loop.draining] == ["bad"]
        assert answers[0].tokens == reference.tokens(prompt, 300)
        assert answers[1].error is None
        row = next(row for row in engine.lanes() if row["name"] == "bad")
        assert row["state"] == "drained"
        others = "good and third" if third else "a fresh worker and good"
        assert row["why"] == f"{others} agree: lane bad was wrong"
        assert engine.phase == "degraded"
        assert any("lane bad drained" in line for line in engine.stats()["troubles"])
        after = await read(engine.submit(request(other, 8, sla="batch")))
        assert after.tokens == reference.tokens(other, 8)
        again = await read(engine.submit(request(prompt, 40, sla="batch")))
        assert again.tokens == reference.tokens(prompt, 40), "no wrong page is left"


async def test_a_recompute_that_is_not_urgent_fails_when_a_turn_comes(site: Site) -> None:
    """An urgent one runs beside the turn."""
    prompt = words(28, 2 * PAGE + 5)
    async with running_engine(site) as engine:
        loop = engine.state.lanes[0]
        await read(engine.submit(request(prompt, 2)))
        await sealed(engine, 2)
        codes = [engine.running.store.pages.slot_code(ref) for ref in pinned(engine, prompt, 1)]
        generation, task = await started(engine, request(words(29, 20), 9000), 2)
        lazy = recompute.PageRecompute(prompt[: 2 * PAGE], codes, urgent=False)
        loop.ask_recompute(lazy)
        with pytest.raises(recompute.RecomputeFailed, match="other work"):
            await lazy.digest
        keen = recompute.PageRecompute(prompt[: 2 * PAGE], codes, urgent=True)
        loop.ask_recompute(keen)
        digest = await keen.digest
        assert not generation.finished
        loop.recomputes.close(keen)
        store = engine.state.store
        assert store is not None
        assert digest == store.pages.digest(store.pages.match_prefix(prompt, b"")[1])
        generation.cancel()
        await task


def pinned(engine: Engine, tokens: list[int], pages: int) -> list[PageRef]:
    store = engine.state.store
    assert store is not None
    return store.pages.match_prefix(tokens, b"", tokens_max=pages * PAGE, pin=True)


# ------------------------------------------------------------------------ the store's folder


@pytest.mark.parametrize("other", [False, True], ids=["gone", "another store's"])
async def test_a_store_folder_that_was_moved_is_reported_until_it_is_back(
    site: Site, reference: Reference, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker continues, the next one cannot start, and the engine does not end."""
    kv, moved, prompt = site.folder / "kv", site.folder / "moved", words(37, 20)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    async with running_engine(site) as engine:
        (arena,) = (kv / "arena").iterdir()
        kv.rename(moved)
        if other:
            (kv / "arena").mkdir(parents=True)
            (kv / "arena" / arena.name).write_bytes(b"of another daemon")
        await until(lambda: "moved, removed or replaced" in str(engine.stats()["troubles"]))
        answer = await read(engine.submit(request(prompt, 5)))
        assert answer.tokens == reference.tokens(prompt, 5)
        os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        await until(lambda: engine.lanes()[0]["state"] == "down")
        assert "folder of the KV store" in str(engine.lanes()[0]["why"])
        assert engine.fatal is None
        if other:
            assert [f.name for f in (kv / "arena").iterdir()] == [arena.name]
            shutil.rmtree(kv)
        moved.rename(kv)
        await until(lambda: engine.phase == "ready")
        answer = await read(engine.submit(request(prompt, 5)))
        assert answer.tokens == reference.tokens(prompt, 5)


# ----------------------------------------------------------------------------------- garbage


async def test_garbage_collection_keeps_sessions_in_memory(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten sessions with room for two, the oldest that are not in memory are removed."""
    async with running_engine(site) as engine:
        for i in range(6):
            await read(engine.submit(request(words(40 + i, 9), 2, session=f"old{i}")))
    monkeypatch.setattr(scrub, "GC_S", 0.05)
    async with running_engine(site) as engine:
        for i in range(4):
            await read(engine.submit(request(words(50 + i, 9), 2, session=f"new{i}")))
        store = engine.state.store
        assert store is not None
        await asyncio.sleep(0.3)
        assert number(engine, "sessions") == 10
        store._settings = dataclasses.replace(store._settings, sessions_max=2)
        await until(lambda: number(engine, "sessions") == 4)
        rows = await engine.stored_sessions(100)
        assert {row["session_id"] for row in rows} == {f"new{i}" for i in range(4)}
        assert (await engine.store_op("gc"))["sessions"] == 0


async def test_idle_sessions_beyond_the_limit_leave_memory_and_are_forgotten(site: Site) -> None:
    async with running_engine(site, store__sessions_max=2) as engine:
        for i in range(6):
            await read(engine.submit(request(words(60 + i, 9), 2, session=f"s{i}")))
        await until(lambda: len(engine.state.sessions) == 2)
        assert (await engine.store_op("gc"))["sessions"] == 4
        rows = await engine.stored_sessions(100)
        assert {row["session_id"] for row in rows} == {"s4", "s5"}


async def test_only_the_command_rewrites_the_ledger(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits wait for a rewrite. Sessions that garbage collection forgets leave free pages."""
    monkeypatch.setattr(scrub, "LEDGER_S", 300.0)
    async with running_engine(site, store__sessions_max=2) as engine:
        ledger, ids = engine.running.store.ledger, bytes(1 << 18)

        async def free_pages() -> int:
            found = ledger.read(lambda db: db.execute("PRAGMA freelist_count").fetchone()[0])
            return int(await asyncio.wrap_future(found))

        for name in "abcd":
            ledger.append(
                writes.OpenSession(name, "", bytes(32), 1, "{}"),
                writes.AppendTokens(name, 1, 0, ids),
            )
        await asyncio.wrap_future(ledger.commit())
        assert (await engine.running.maintenance.collect()).sessions == 2
        assert await free_pages() > 100
        await engine.store_op("gc")
        assert await free_pages() == 0


async def test_the_command_deletes_extents_when_the_ledger_has_no_room(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "UNMAP_S", 0.0)
    async with running_engine(site) as engine:
        store, room = engine.running.store, [False, False, True]

        def clean(_: int = 0) -> Future[None]:
            done: Future[None] = Future()
            if room.pop(0):
                done.set_result(None)
            else:
                done.set_exception(StoreFull("the ledger cannot be rewritten"))
            return done

        monkeypatch.setattr(store.ledger, "clean", clean)
        extents = len(store.pages.allocator.infos)
        found = await engine.store_op("gc")
        assert (found["extents_given"], found["left"]) == (1, "")
        assert len(store.pages.allocator.infos) == extents - 1
        room += [False] * 20
        assert "cannot be rewritten" in (await engine.store_op("gc"))["left"]


async def test_arenas_are_deleted_before_the_ledger_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk their bytes are the room for its last commit."""
    arenas = [["none was seen"]]

    def closed(store: Store) -> None:
        arenas[0] = os.listdir(os.path.join(store.path, "arena"))
        close(store)

    close = Store.close
    monkeypatch.setattr(Store, "close", closed)
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(40, 9), 2, session="a")))
    assert arenas == [[]]


# ------------------------------------------------------------------------------------ health


async def test_health_reports_a_restarting_lane(site: Site) -> None:
    async with running_engine(site) as engine:
        stats = engine.stats()
        assert (stats["kv_tier"], stats["ledger"], stats["troubles"]) == ("ok", "ok", [])
        assert stats["durability"] == "turn"
        assert engine.lanes()[0]["state"] == "ready"
        engine.state.lanes[0].lane.kill("the test says so")
        await until(lambda: engine.lanes()[0]["state"] == "restarting")
        assert engine.phase == "degraded"
        await until(lambda: engine.phase == "ready")


async def test_a_store_that_holds_no_session_is_refused_at_the_start(site: Site) -> None:
    with pytest.raises(BatchEngineError, match="BE1608"):
        async with running_engine(site.at("tiny"), store__budget_bytes=1 << 16):
            pass
