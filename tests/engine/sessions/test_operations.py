"""Refused operations of sessions: each error states the cause, and changes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Kind, Presence
from batchengine.engine import Engine
from kv_store.ledger import writes
from service import operations
from service.http.answers import STATUS, error_headers
from tests.support.engines import Site, read, request, running_engine, until, words


def full_disk(_: Sequence[object]) -> Any:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    raise error


async def refused(verb: Any) -> tuple[Kind, str]:
    """Kind and name of the error of an operation."""
    with pytest.raises(BatchEngineError) as caught:
        await verb
    return caught.value.kind, caught.value.name


def waiting(engine: Engine) -> list[str]:
    """The sessions that wait for the tool call c1."""
    return [*engine.running.recovery.calls._calls.get("", {}).get("c1", {})]


def ledger_of(engine: Engine) -> Any:
    assert engine.running.store is not None
    return engine.running.store.ledger


async def test_a_session_whose_first_turn_was_refused_cannot_be_parked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger does not have it, because the disk was full, so it is refused as unknown."""
    async with running_engine(site) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(ledger_of(engine), "_transact_once", full_disk)
            answer = await read(engine.submit(request(words(3, 20), 5, session="n")))
        assert answer.error is not None
        assert answer.error.name == "durability_unavailable"
        await until(lambda: not engine.state.lines)
        assert await refused(engine.park("", "n", "c1")) == (
            Kind.NOT_FOUND,
            "session_not_found",
        )
        assert waiting(engine) == []
        again = await read(engine.submit(request(words(3, 20), 5, session="n")))
        assert len(again.tokens) == 5
        assert (await engine.park("", "n", "c1"))["state"] == "parked"
        assert waiting(engine) == ["n"]


async def test_a_session_whose_last_turn_was_refused_can_be_parked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second engine, where the ledger still names the first as owner."""
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(words(4, 20), 5, session="s")))
    async with running_engine(site) as engine:
        longer = [*words(4, 20), *first.tokens, 7]
        with monkeypatch.context() as patch:
            patch.setattr(ledger_of(engine), "_transact_once", full_disk)
            answer = await read(engine.submit(request(longer, 5, session="s")))
            assert answer.error is not None
            await until(lambda: not engine.state.lines)
            kind, name = await refused(engine.park("", "s", "c1"))
            assert (kind, name) == (Kind.UNAVAILABLE, "durability_unavailable")
            assert waiting(engine) == []
            (session,) = engine.state.sessions.values()
            assert engine.state.facts[session.key].meta.parked is None
        assert (await engine.park("", "s", "c1"))["state"] == "parked"
        assert waiting(engine) == ["s"]


async def test_a_park_refused_for_a_change_of_owner_can_be_repeated(site: Site) -> None:
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(5, 20), 5, session="s")))
        (session,) = engine.state.sessions.values()
        session.logged_epoch += 1
        assert await refused(engine.park("", "s", "c1")) == (Kind.CONFLICT, "session_busy")
        session.logged_epoch -= 1
        assert waiting(engine) == []
        assert (await engine.park("", "s", "c1"))["state"] == "parked"


async def test_a_tool_call_of_a_session_dropped_meanwhile_finds_no_session(site: Site) -> None:
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(8, 20), 5, session="s")))
        park, drop = engine.park("", "s", "c1"), engine.drop("", "s")
        await asyncio.gather(park, drop, return_exceptions=True)
        assert waiting(engine) == []


async def test_a_missing_source_and_a_taken_name_of_a_fork_are_different_errors(site: Site) -> None:
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(6, 20), 5, session="s")))
        assert (await engine.fork("", "s", "taken"))["tokens"] == 25
        assert await refused(engine.fork("", "s", "taken")) == (Kind.CONFLICT, "session_exists")
        ledger = ledger_of(engine)
        real = ledger.append

        def overtaken(*ops: writes.Op) -> Any:
            ledger.append = real
            real(writes.DropSession("\x1fs"))
            return real(*ops)

        ledger.append = overtaken
        assert await refused(engine.fork("", "s", "new")) == (
            Kind.NOT_FOUND,
            "session_not_found",
        )


async def test_a_fork_has_the_name_that_its_client_gave_it(site: Site) -> None:
    """In listings, from its beginning and after its first turn."""
    prompt = words(4, 20)
    async with running_engine(site) as engine:
        answer = await read(engine.submit(request(prompt, 3, session="s")))
        await engine.fork("", "s", "be_1", "other ending")
        assert (await engine.session_detail("", "be_1"))["name"] == "other ending"
        names = {row["session_id"]: row["name"] for row in await engine.stored_sessions(9)}
        assert names["be_1"] == "other ending"
        await read(engine.submit(request([*prompt, *answer.tokens, 7], 3, session="be_1")))
        names = {row["session_id"]: row["name"] for row in engine.sessions()}
        assert names["be_1"] == "other ending"


async def test_two_api_keys_with_one_idempotency_key_each_explain_their_own_request(
    site: Site,
) -> None:
    """Two API keys with one idempotency key, and so one session id, each get their own request."""
    async with running_engine(site) as engine:
        name = ""

        async def explain(tenant: str) -> Any:
            subject = operations.own_subject(operations.EXPLAIN, engine, tenant, name)
            return await operations.perform(operations.EXPLAIN, engine, subject, {})

        for tenant in ("alpha", "beta"):
            asked = request(words(7, 20), 3, tenant=tenant)
            generation = engine.submit(dataclasses.replace(asked, idempotency_key="k"))
            await read(generation)
            name = generation.session_id
        for tenant in ("alpha", "beta"):
            assert (await explain(tenant))["kind"] == "session"
            assert engine.explain(name, tenant)["tenant"] == tenant
            assert [row["tenant"] for row in engine.sessions(tenant)] == [tenant]
            assert engine.has_session(tenant, name)
        assert len(engine.sessions()) == 2
        assert not engine.has_session("gamma", name)
        assert await refused(explain("gamma")) == (
            Kind.NOT_FOUND,
            "not_found",
        )
        with pytest.raises(BatchEngineError) as caught:
            engine.explain(name)
        assert caught.value.kind is Kind.CONFLICT


def test_a_request_that_can_never_run_is_not_retryable() -> None:
    """With status 503 clients would repeat the request for ever."""
    error = errors.REQUEST_TOO_LARGE(pages_max=9, room="the store has 8 in all")
    assert (error.code, error.kind) == ("BE2301", Kind.INVALID)
    assert STATUS[error.kind] == 400
    assert error_headers(error) == {"x-should-retry": "false"}


async def test_presence_distinguishes_memory_from_the_ledger(site: Site) -> None:
    async with running_engine(site) as engine:
        assert await engine.presence("", "s") is Presence.UNKNOWN
        await read(engine.submit(request(words(6, 20), 2, session="s")))
        assert await engine.presence("", "s") is Presence.IN_MEMORY
        assert await engine.presence("other", "s") is Presence.UNKNOWN
    async with running_engine(site) as engine:
        assert await engine.presence("", "s") is Presence.STORED
        assert await engine.presence("other", "s") is Presence.UNKNOWN


async def test_the_role_of_an_edit_is_found_at_once_in_a_long_message(site: Site) -> None:
    """The search runs on the event loop: 32,768 tokens in milliseconds of processor time."""
    async with running_engine(site) as engine:
        operations = engine.running.operations
        (mark,) = operations._outlines.marks
        user = await engine.text.encode("user\n")
        near = operations._position_of([*words(3, 200), mark, *user, *words(4, 30_000)])
        assert near["inside"] == "user message"
        long = words(5, 100_000)
        seconds: list[float] = []
        for _ in range(3):
            began = time.thread_time()
            assert "inside" not in operations._position_of(long)
            seconds.append(time.thread_time() - began)
        assert min(seconds) < 0.010


async def test_a_session_for_which_nothing_was_computed_is_in_no_list(site: Site) -> None:
    """Its client left before the first request began."""
    async with running_engine(site) as engine:
        for number in range(3):
            engine.submit(request(words(number, 40), 5, session=f"s{number}")).cancel()
        await until(lambda: not engine.state.lines)
        assert engine.sessions() == []
        await read(engine.submit(request(words(0, 40), 5, session="s0")))
        engine.submit(request([*words(0, 40), 7], 5, session="s0")).cancel()
        await until(lambda: not engine.state.lines)
        assert [row["session_id"] for row in engine.sessions()] == ["s0"]
