"""Automatic recovery: damaged pages, a full disk, lost seals, a lane without slots."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from batchengine.core import Kind
from batchengine.engine import Engine
from batchengine.engine.lane import seats, supervisor
from batchengine.engine.lane.supervisor import WorkerSupervisor
from batchengine.lanes.worker_process import LaneDied
from batchengine.wire import lane as wire
from kv_store.errors import StoreFull
from kv_store.ledger import continuity
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    until,
    words,
)
from tests.support.kv_workload import append_tokens

PAGE_BYTES = 327_680


def flip(store: Path, page: int) -> None:
    """Change one byte of a page of the first extent."""
    with (store / "ext" / "000001.kv").open("r+b") as file:
        file.seek(page * PAGE_BYTES + 1000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


async def sealed(engine: Engine, pages: int) -> None:
    await until(lambda: int(engine.stats()["pages_sealed"]) >= pages)


def pages_pinned(engine: Engine) -> int:
    return int(engine.stats()["store"]["pages_pinned"])


@pytest.mark.parametrize("bad", [0, 1, 3])
async def test_a_damaged_page_between_valid_ones_is_recomputed(
    site: Site, reference: Reference, bad: int
) -> None:
    """The page is published anew although the pages after it exist already."""
    prompt = words(1, 1300)
    async with running_engine(site) as engine:
        await read(engine.submit(request(prompt, 4)))
        await sealed(engine, 5)
    flip(site.folder / "kv", bad)
    async with running_engine(site) as engine:
        answer = await read(engine.submit(request(prompt, 30)))
        assert answer.done is not None
        assert answer.done.usage.cached_tokens == bad * 256
        assert answer.tokens == reference.tokens(prompt, 30)
        pages = engine.running.store.pages
        await until(lambda: len(pages.match_prefix(prompt, b"")) == 5 and not pages_pinned(engine))
        again = await read(engine.submit(request(prompt, 30)))
        assert again.done is not None
        assert again.done.usage.cached_tokens == 1280
        assert again.tokens == answer.tokens


async def test_a_truncated_extent_ends_workers_but_no_stream(
    site: Site, reference: Reference
) -> None:
    """SIGBUS at a mapped page ends the worker; the page is invalidated and computed again. No page
    is sealed before: that would make the file grow, and zeros be read where it was cut."""
    prompt = words(2, 780)
    async with running_engine(site) as engine:
        running = engine.submit(request(prompt, 300))
        reader = asyncio.ensure_future(read(running))
        await sealed(engine, 3)
        os.truncate(site.folder / "kv" / "ext" / "000001.kv", PAGE_BYTES)
        answer = await reader
        assert answer.error is None
        assert answer.tokens == reference.tokens(prompt, 300)
        assert engine.lanes()[0]["incarnation"] <= 3


async def test_a_worker_death_during_verification_leaks_nothing(
    site: Site, reference: Reference
) -> None:
    prompt = words(3, 900)
    async with running_engine(site) as engine:
        lane = engine.state.lanes[0].lane
        post, kills = lane.post, list[int]()

        def post_and_kill(step: wire.Step, *rest: Any, **named: Any) -> Any:
            if step.verify and not kills:
                kills.append(lane.pid)
                os.kill(lane.pid, signal.SIGKILL)
            return post(step, *rest, **named)

        lane.post = post_and_kill  # type: ignore[method-assign]
        answer = await read(engine.submit(request(prompt, 60)))
        assert answer.tokens == reference.tokens(prompt, 60)
        assert kills
        await until(lambda: pages_pinned(engine) == 0)
        await until(lambda: len(list((site.folder / "kv" / "arena").iterdir())) == 1)


async def test_idle_sessions_release_their_pins_after_a_worker_death(
    site: Site, reference: Reference
) -> None:
    """A new session finds room in a store of twelve pages that idle sessions hold."""
    async with running_engine(
        site, store__budget_bytes=12 * PAGE_BYTES, lane__open_pages=8, lane__entries_max=2
    ) as engine:
        for i in range(4):
            await read(engine.submit(request(words(40 + i, 800), 4, session=f"s{i}")))
            await until(lambda: not engine.state.lanes[0].kv.is_sealing)
        os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        await until(lambda: engine.lanes()[0]["incarnation"] == 2)
        prompt = words(50, 2300)
        answer = await read(engine.submit(request(prompt, 40)))
        assert answer.error is None, answer.error
        assert answer.tokens == reference.tokens(prompt, 40)


def full_disk(engine: Engine) -> Any:
    """The ledger refuses every commit until the returned function is called."""
    ledger = engine.running.store.ledger
    real = ledger._transact

    def refuse(_: Any) -> Any:
        raise StoreFull("the disk is full: nothing more can be made durable")

    ledger._transact = refuse  # type: ignore[method-assign]

    def make_room() -> None:
        ledger._transact = real  # type: ignore[method-assign]

    return make_room


async def test_a_session_continues_after_a_full_disk(site: Site, reference: Reference) -> None:
    """Named turns are refused with a reason, anonymous ones served; with room again, all are."""
    start, fresh = words(4, 700), words(5, 30)
    longer = [*start, *reference.tokens(start, 20), *words(6, 20)]
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(start, 20, session="s")))
        make_room = full_disk(engine)
        for session, prompt in [("s", longer), ("new", fresh), ("s", longer)]:
            refused = await read(engine.submit(request(prompt, 200, session=session)))
            assert refused.error is not None
            assert refused.error.name == "durability_unavailable"
            assert refused.tokens == []
        other = words(7, 900)
        served = await read(engine.submit(request(other, 300)))
        assert served.tokens == reference.tokens(other, 300)
        await until(lambda: not engine.state.turns)  # refused turns stop computing
        make_room()
        for session, prompt in [("s", longer), ("new", fresh)]:
            good = await read(engine.submit(request(prompt, 20, session=session)))
            assert good.error is None, good.error
            assert good.tokens == reference.tokens(prompt, 20)
        record = await asyncio.wrap_future(engine.running.store.ledger.load_session("\x1fs"))
        assert record is not None
        assert record.tokens == [*longer, *reference.tokens(longer, 20)]
        assert first.tokens == reference.tokens(start, 20)
    async with running_engine(site) as engine:
        again = await read(engine.submit(request([*longer, 99], 5, session="s")))
        assert again.done is not None
        assert again.done.usage.cached_tokens >= 512
        assert again.tokens == reference.tokens([*longer, 99], 5)


async def test_a_disk_that_fills_up_during_a_turn_ends_it_with_a_reason(
    site: Site, reference: Reference
) -> None:
    prompt = words(8, 40)
    async with running_engine(site) as engine:
        generation, reader = await started(engine, request(prompt, 500, session="s"), 100)
        make_room = full_disk(engine)
        await until(lambda: generation.completion_tokens > 300)
        make_room()
        answer = await reader
        assert answer.error is not None
        assert answer.error.name == "durability_unavailable"
        assert answer.tokens == reference.tokens(prompt, 500)
        after = [*prompt, *answer.tokens, 99]
        good = await read(engine.submit(request(after, 10, session="s")))
        assert good.tokens == reference.tokens(after, 10)
        record = await asyncio.wrap_future(engine.running.store.ledger.load_session("\x1fs"))
        assert record is not None
        assert record.tokens == [*after, *good.tokens]


async def test_a_refusal_of_one_session_does_not_refuse_others_of_its_commit(
    site: Site, reference: Reference
) -> None:
    """Sessions whose records share a commit get separate results."""
    async with running_engine(site) as engine:
        bad: Future[int] = append_tokens(engine.running.store.ledger, "unknown", 1, 0, [1, 2])
        answer = await read(engine.submit(request(words(9, 20), 5, session="s")))
        assert answer.error is None
        assert answer.tokens == reference.tokens(words(9, 20), 5)
        assert "no session" in str(bad.exception(1))


async def test_a_store_without_room_serves_what_fits_the_arena(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an extent pages stay open and turns alternate; one that cannot fit ends with a
    reason."""
    monkeypatch.setattr(seats, "STALL_S", 0.05)
    monkeypatch.setattr(seats, "STALL_ALONE_S", 0.3)
    prompts = [words(60 + i, 500 + 10 * i) for i in range(5)]
    async with running_engine(
        site, lane__open_pages=5, lane__entries_max=4, store__free_floor_bytes=1 << 50
    ) as engine:
        assert engine.stats()["store"]["pages_total"] == 0
        names = [None, "a", None, "b", "c"]
        running = [
            engine.submit(request(p, 300, session=s)) for p, s in zip(prompts, names, strict=True)
        ]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(read(g) for g in running))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.error is None, answer.error
                assert answer.tokens == reference.tokens(prompt, 300)
            long = await read(engine.submit(request(words(70, 1500), 20)))
            assert long.error is not None
            assert long.error.name == "kv_full"
            short = await read(engine.submit(request(prompts[0], 9)))
            assert short.tokens == answers[0].tokens[:9]


async def test_requests_for_a_lane_that_cannot_start_end_with_the_reason(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that came after the third attempt to start it get the reason, too."""
    async with running_engine(site) as engine:

        async def fails(*_: Any) -> Any:
            raise LaneDied("cpu0", "was ended by SIGKILL")

        monkeypatch.setattr(supervisor, "DOWN_MAX_S", 0.2)
        monkeypatch.setattr(WorkerSupervisor, "restart", fails)
        monkeypatch.setattr(engine.state.lanes[0].lane, "backoff_s", lambda: 0.05)
        os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        for _ in range(3):
            async with asyncio.timeout(60):
                answer = await read(engine.submit(request(words(1, 9), 5)))
            assert answer.error is not None
            assert answer.error.name == "lane_down"
            assert engine.phase == "refusing", "/health is 503"


async def test_the_queue_is_bounded_while_sessions_are_reopened(site: Site) -> None:
    async with running_engine(site, limits__queue_max=5, lane__entries_max=2) as engine:
        taken, refused = [], 0
        for i in range(20):
            try:
                taken.append(engine.submit(request(words(i, 9), 5, session=f"s{i}")))
            except Exception as error:
                refused += getattr(error, "kind", None) is Kind.UNAVAILABLE
        assert (len(taken), refused) == (5, 15)
        answers = await asyncio.gather(*(read(g) for g in taken))
        assert all(a.reason == "length" for a in answers)


async def test_ten_thousand_worker_lives_are_no_lost_ledger(
    site: Site, reference: Reference
) -> None:
    """An arena of a late life is of this opening of the store: the next one reports no loss."""
    prompt = words(90, 300)
    async with running_engine(site) as engine:
        (loop,) = engine.state.lanes
        loop.lane.incarnation = continuity.INCARNATIONS - 1
        os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        await until(lambda: loop.up and loop.lane.incarnation == continuity.INCARNATIONS)
        answer = await read(engine.submit(request(prompt, 20, session="s")))
        shutil.copytree(site.folder / "kv", site.folder / "killed" / "kv")  # as SIGKILL leaves it
    async with running_engine(site.at("killed")) as engine:
        assert engine.running.store.losses == []
        assert engine.phase == "ready"
        again = await read(await engine.resume("", "s"))
        assert again.tokens == answer.tokens == reference.tokens(prompt, 20)
