"""An operation whose caller leaves before its answer is done whole, at whatever point that is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from batchengine.core import Presence
from batchengine.engine import Engine
from tests.support.engines import Site, read, request, running_engine, until, words


async def leave(operation: Coroutine[Any, Any, Any], passes: int) -> None:
    """Start an operation, and cancel it after so many passes of the event loop, as HTTP does."""
    task = asyncio.ensure_future(operation)
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def is_waiting(engine: Engine, call: str, name: str) -> bool:
    return name in engine.running.recovery.calls._calls.get("", {}).get(call, {})


def pages_held(engine: Engine, name: str) -> int:
    session = engine.state.sessions["", name]
    return len(session.kv.sealed) + len(session.kv.open)


async def test_a_client_that_leaves_amid_park(site: Site) -> None:
    async with running_engine(site) as engine:
        for passes in range(1, 7):
            name, call = f"s{passes}", f"call_{passes}"
            await read(engine.submit(request(words(passes, 300), 4, session=name)))
            assert pages_held(engine, name)
            await leave(engine.park("", name, call), passes)
            await until(
                lambda name=name, call=call: (
                    is_waiting(engine, call, name) and not pages_held(engine, name)
                )
            )
            row = next(row for row in engine.sessions() if row["session_id"] == name)
            assert row["parked_since"]


async def test_a_client_that_leaves_amid_fork_and_drop(site: Site) -> None:
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(9, 300), 4, session="s")))
        await leave(engine.fork("", "s", "twin"), 2)
        async with asyncio.timeout(60):
            while await engine.presence("", "twin") is not Presence.STORED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await leave(engine.drop("", "s"), 2)
        async with asyncio.timeout(60):
            while await engine.presence("", "s") is not Presence.UNKNOWN:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
