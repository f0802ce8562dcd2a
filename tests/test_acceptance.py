"""Defects found by operators and clients, each reproduced through a public interface."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchengine.config import LaneConfig
from batchengine.engine import Engine
from kv_store.errors import StoreFull
from kv_store.store import Store
from tests.engine.test_worker_faults import FAULTY
from tests.service.cli.test_sessions import with_daemon
from tests.service.http.test_sessions import call
from tests.support.engine_process import engine_process
from tests.support.engines import Site, read, request, running_engine, started, until, words
from tests.support.fake_engine import FakeEngine, chat, post, serving
from tests.support.faulty_worker import KILL_ENGINE
from tests.support.kv_workload import descriptor, settings

TIERS = (
    LaneConfig(name="fast", tier="fast", threads=1),
    LaneConfig(name="bulk", tier="bulk", threads=1),
)


async def test_promoting_twice_does_not_demote(site: Site) -> None:
    """Without a lane named, a session on the only fast lane was migrated to a slow lane."""

    async with running_engine(site, lanes=TIERS, router__promote_auto=False) as engine:
        await read(engine.submit(request(words(1, 40), 3, session="s")))
        for verb, lane in ((engine.promote, "fast"), (engine.demote, "bulk")):
            await verb("", "s", to=lane)
            again = await verb("", "s")
            assert (again["target"], again["result"]) == (lane, "already there")


async def test_a_session_parked_during_a_migration_is_parked(site: Site) -> None:
    """An idle session in migration was to be parked "at the end of its turn", which never came."""

    async with running_engine(site, lanes=TIERS, router__promote_auto=False) as engine:
        await read(engine.submit(request(words(2, 300), 3, session="s")))
        begun, resume = asyncio.Event(), asyncio.Event()

        async def hold(point: str) -> None:
            if point == "P3":
                begun.set()
                await resume.wait()

        engine.plant(hold)
        lane = {row["session_id"]: row["lane"] for row in engine.sessions()}["s"]
        to = "bulk" if lane == "fast" else "fast"
        move = asyncio.ensure_future(engine.promote("", "s", to=to))
        await begun.wait()
        park = asyncio.ensure_future(engine.park("", "s"))
        await asyncio.sleep(0.02)
        resume.set()
        assert (await move)["result"] == "moved"
        assert (await park)["state"] == "parked"
        assert (await engine.session_detail("", "s"))["pages"] == 0


async def test_readers_of_a_dropped_session_get_the_error_that_it_was_dropped(site: Site) -> None:
    """During their stream they got the error that the session "was never used here"."""

    async def work(engine: Engine) -> None:
        first = engine.submit(request(words(3, 40), 900, session="s"))
        second = engine.submit(request(words(4, 40), 5, session="s"))
        reader = asyncio.ensure_future(read(first))
        await until(lambda: first.completion_tokens > 3)
        await engine.drop("", "s")
        for answer in (await reader, await read(second)):
            assert answer.error is not None
            assert "dropped while" in str(answer.error)

    async with running_engine(site) as engine:
        await work(engine)


def test_a_key_name_that_is_not_configured_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a misspelt --key-name the error was that the session was never used."""

    async def scenario(ask: Any, engine: Any) -> None:
        code, _, err = await ask("promote", "tale", "--key-name", "alfa")
        assert code == 1
        assert "alfa" in err
        assert "alpha" in err
        code, _, err = await ask("promote", "nothing", "--key-name", "alpha")
        assert code == 1
        assert "no session nothing" in err

    with_daemon(tmp_path, capsys, scenario)


async def test_kills_of_the_engine_quarantine_no_session(site: Site) -> None:
    """A session that computed alone when the engine was killed, twice, was refused for ever."""
    prompt = [*words(5, 30), KILL_ENGINE, *words(6, 5)]

    for life in range(4):
        async with engine_process(site, FAULTY, store__durability="power") as engine:
            sent, last = await engine.tokens(engine.ask("submit", prompt=prompt, n=5, session="s"))
            assert (sent, last) == ([], {"gone": True}), life


def opened(path: Path) -> closing[Store]:
    """A store with one extent."""
    return closing(Store.open(path, descriptor(), settings()))


def test_a_missing_ledger_is_reported(tmp_path: Path) -> None:
    """A store with pages but without a ledger started empty without a warning."""
    with opened(tmp_path / "kv"):
        pass
    for name in (tmp_path / "kv").glob("meta.db*"):
        name.unlink()
    with opened(tmp_path / "kv") as store:
        assert any("its ledger is gone" in warning for warning in store.warnings)
    with opened(tmp_path / "kv") as store:
        assert not store.warnings


def test_a_folder_where_an_extent_was_does_not_stop_the_daemon(tmp_path: Path) -> None:
    """The start failed: "the KV store cannot be opened: Is a directory"."""
    with opened(tmp_path / "kv"):
        pass
    (extent,) = (tmp_path / "kv" / "ext").iterdir()
    extent.unlink()
    extent.mkdir()
    with opened(tmp_path / "kv") as store:
        assert any("is in the way" in warning for warning in store.warnings)


async def test_a_session_on_disk_is_found_after_a_restart() -> None:
    """Promoting it over HTTP failed with the error that it was never used here."""

    engine = FakeEngine()
    engine.lane_names = ["fast", "bulk"]
    async with serving(engine) as served:
        await post(served, "/v1/chat/completions", chat(session_id="mine"))
        engine.asleep = list(engine.known)
        for name, sent in (("mine", (409, "not_moved")), ("no", (404, "session_not_found"))):
            status, body = await call(served, "POST", f"/v1/sessions/{name}/promote")
            assert (status, body["error"]["code"]) == sent


async def test_a_full_disk_does_not_flood_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Every retry of every turn logged the same line."""

    async with running_engine(site, store__full_disk="finish") as engine:
        _, reader = await started(engine, request(words(7, 30), 900, session="s"), 20)

        def refuse(_: Any) -> Any:
            raise StoreFull("the disk is full")

        ledger = engine.running.store.ledger
        real, ledger._transact = ledger._transact, refuse
        assert (await reader).done is not None
        ledger._transact = real
    # The second, if the answer takes longer than the time between two such lines.
    assert sum("the ledger refused" in line for line in caplog.messages) in (1, 2)
