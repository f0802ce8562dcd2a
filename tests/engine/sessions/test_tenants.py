"""Sessions of one tenant stay, and are found, whatever other tenants do."""

from __future__ import annotations

import asyncio

import pytest

from batchengine.engine.sessions import directory
from kv_store import keys
from kv_store.ledger import writes
from tests.support.engines import Reference, Site, read, request, running_engine, until, words

BUDGET = 24 << 20


async def test_a_flood_of_one_tenant_forgets_its_own_sessions_only(
    site: Site, reference: Reference
) -> None:
    """By the number of sessions, and by the bytes of the ledger; `store stat` shows both."""
    prompt = words(78, 40)
    async with running_engine(
        site, store__budget_bytes=BUDGET, store__sessions_max=8, store__ledger_bytes_max=1 << 20
    ) as engine:
        answers = [
            await read(engine.submit(request(prompt, 4, session=f"mine-{i}", tenant="victim")))
            for i in range(3)
        ]
        for i in range(14):
            asked = request(words(i, 20), 2, session=f"flood-{i}", tenant="flood")
            assert (await read(engine.submit(asked))).error is None
        await until(lambda: not engine.state.lines)
        for session in list(engine.state.sessions.values()):
            engine.state.forget(session)
        await until(lambda: int(engine.stats()["store"]["sessions"]) == 17)
        assert (await engine.store_op("gc"))["sessions"] == 9
        stat = await engine.store_op("stat")
        assert (stat["sessions of victim"], stat["sessions of flood"]) == (3, 5)
        assert (
            stat["ledger_bytes of victim"] + stat["ledger_bytes of flood"] == stat["ledger_bytes"]
        )
        assert stat["ledger_bytes"] <= stat["ledger_bytes_max"] == 1 << 20
        again = await engine.resume("victim", "mine-0")
        assert (await read(again)).tokens == answers[0].tokens == reference.tokens(prompt, 4)
        assert await engine.find_sessions("mine-1", (), "victim") == [("victim", "mine-1")]

        ledger = engine.running.store.ledger
        name = "flood\x1fhuge"
        ids = keys.token_bytes(range(400_000))
        for index in range(2):
            ledger.append(
                writes.OpenSession(f"{name}{index}", "flood", bytes(32), 1, "{}"),
                writes.AppendTokens(f"{name}{index}", 1, 0, ids),
            )
        await asyncio.wrap_future(ledger.commit())
        engine.state.forget(engine.state.sessions["victim", "mine-0"])
        await until(lambda: int(engine.stats()["store"]["ledger_bytes"]) < 1 << 20)
        stat = await engine.store_op("stat")
        assert stat["sessions of victim"] == 3


async def test_a_session_is_found_behind_those_of_other_tenants(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only sessions of the asking tenant count to how many are searched."""
    monkeypatch.setattr(directory, "STORED_MAX", 2)
    async with running_engine(site, store__budget_bytes=BUDGET) as engine:
        for tenant, name in (("a", "mine"), ("b", "x1"), ("b", "x2"), ("b", "x3")):
            await read(engine.submit(request(words(79, 9), 2, session=name, tenant=tenant)))
        await until(lambda: not engine.state.lines)
        for session in list(engine.state.sessions.values()):
            engine.state.forget(session)
        assert await engine.find_sessions("mine", (), "a") == [("a", "mine")]
