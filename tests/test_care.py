"""What is refused: each refusal says what is true, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchengine.core import BatchEngineError
from batchengine.engine import Engine, refusals
from kv_store import records
from service import errors, verbs
from tests.fakes import read, request, run, running_engine, until, words


def full_disk(_: Sequence[object]) -> Any:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    raise error


async def refused(verb: Any) -> tuple[int, str]:
    """Status and code of what must be refused."""
    with pytest.raises(BatchEngineError) as caught:
        await verb
    return caught.value.http_status, caught.value.api_code


def ledger_of(engine: Engine) -> Any:
    assert engine._store is not None
    return engine._store.ledger


def test_a_session_whose_first_turn_was_refused_cannot_be_parked(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full, and has room again: the ledger has never heard of the session."""

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(ledger_of(engine), "_transact_once", full_disk)
                answer = await read(engine.submit(request(words(3, 20), 5, session="n")))
            assert answer.error is not None
            assert answer.error.api_code == "durability_unavailable"
            await until(lambda: not engine._queues)
            assert await refused(engine.park("", "n", "c1")) == (404, "session_not_found")
            assert engine.reopener.session_of("", ["c1"]) is None
            again = await read(engine.submit(request(words(3, 20), 5, session="n")))
            assert len(again.tokens) == 5
            assert (await engine.park("", "n", "c1"))["state"] == "parked"
            assert engine.reopener.session_of("", ["c1"]) == "n"

    run(work())


def test_a_session_is_parked_though_its_last_turn_was_refused(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second life, where the ledger's owner is still that of the first."""

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            first = await read(engine.submit(request(words(4, 20), 5, session="s")))
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            longer = [*words(4, 20), *first.tokens, 7]
            with monkeypatch.context() as patch:
                patch.setattr(ledger_of(engine), "_transact_once", full_disk)
                answer = await read(engine.submit(request(longer, 5, session="s")))
                assert answer.error is not None
                await until(lambda: not engine._queues)
                status, code = await refused(engine.park("", "s", "c1"))
                assert (status, code) == (503, "durability_unavailable")
                assert engine.reopener.session_of("", ["c1"]) is None
                (session,) = engine._named.values()
                assert engine._tables.facts[session.key].meta.parked is None
            assert (await engine.park("", "s", "c1"))["state"] == "parked"
            assert engine.reopener.session_of("", ["c1"]) == "s"

    run(work())


def test_a_park_that_another_owner_overtakes_is_to_be_asked_again(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await read(engine.submit(request(words(5, 20), 5, session="s")))
            (session,) = engine._named.values()
            session.logged_epoch += 1
            assert await refused(engine.park("", "s", "c1")) == (409, "session_busy")
            session.logged_epoch -= 1
            assert engine.reopener.session_of("", ["c1"]) is None
            assert (await engine.park("", "s", "c1"))["state"] == "parked"

    run(work())


def test_a_call_of_a_session_that_was_dropped_meanwhile_leads_nowhere(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await read(engine.submit(request(words(8, 20), 5, session="s")))
            park, drop = engine.park("", "s", "c1"), engine.drop("", "s")
            await asyncio.gather(park, drop, return_exceptions=True)
            assert engine.reopener.session_of("", ["c1"]) is None

    run(work())


def test_a_fork_says_whether_its_source_went_or_its_name_is_taken(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await read(engine.submit(request(words(6, 20), 5, session="s")))
            assert (await engine.fork("", "s", "taken"))["tokens"] == 25
            assert await refused(engine.fork("", "s", "taken")) == (409, "session_exists")
            ledger = ledger_of(engine)
            real = ledger.append

            def overtaken(*ops: records.Op) -> Any:
                ledger.append = real
                real(records.DropSession("\x1fs"))
                return real(*ops)

            ledger.append = overtaken
            assert await refused(engine.fork("", "s", "new")) == (404, "session_not_found")

    run(work())


def test_two_keys_with_one_idempotency_key_each_explain_their_own(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """The session's id is made of the key alone, so both have it."""

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            service, name = cast("Any", SimpleNamespace(engine=engine)), ""
            for tenant in ("alpha", "beta"):
                asked = request(words(7, 20), 3, tenant=tenant)
                generation = engine.submit(dataclasses.replace(asked, idempotency_key="k"))
                await read(generation)
                name = generation.session_id
            for tenant in ("alpha", "beta"):
                assert (await verbs.explain_own(service, tenant, name))["kind"] == "session"
                assert engine.explain(name, tenant)["tenant"] == tenant
                assert [row["tenant"] for row in engine.sessions(tenant)] == [tenant]
                assert engine.has_session(tenant, name)
            assert len(engine.sessions()) == 2
            assert not engine.has_session("gamma", name)
            assert await refused(verbs.explain_own(service, "gamma", name)) == (404, "not_found")
            with pytest.raises(BatchEngineError) as caught:
                engine.explain(name)
            assert caught.value.http_status == 409

    run(work())


def test_what_can_never_run_here_is_not_to_be_tried_again() -> None:
    """A status of 503 had clients send it for ever."""
    error = refusals.too_large(cast("Any", SimpleNamespace(pages_max=9)), 8)
    assert (error.code, error.http_status) == ("BE2301", 400)
    assert error.error_type == "invalid_request_error"
    assert errors.error_headers(error) == {"x-should-retry": "false"}
