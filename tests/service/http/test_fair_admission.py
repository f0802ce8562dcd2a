"""Fair admission: a key whose requests arrive together keeps no other key waiting for all."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp

from batchengine.config import ApiKey
from service.http.fair_admission import FairAdmission
from tests.support.fake_engine import FakeEngine, fake_config, serving

FLOOD = 40
KEYS = (ApiKey(name="flood", key="flood-key-123"), ApiKey(name="other", key="other-key-456"))


async def test_a_request_of_another_key_does_not_wait_for_those_of_a_flood() -> None:
    order: list[str] = []
    engine = FakeEngine()

    def sessions(tenant: str | None = None) -> list[dict[str, Any]]:
        order.append(tenant or "")
        return []

    engine.sessions = sessions  # type: ignore[method-assign]
    async with (
        serving(engine, replace(fake_config(), auth=KEYS)) as served,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):

        async def ask(key: ApiKey) -> int:
            headers = {"x-api-key": key.key}
            async with client.get(served.base + "/v1/sessions", headers=headers) as reply:
                return reply.status

        flood, other = KEYS
        statuses = await asyncio.gather(*(ask(flood) for _ in range(FLOOD)), ask(other))
    assert statuses == [200] * (FLOOD + 1)
    assert order.index("other") < FLOOD / 2


async def test_a_turn_of_a_client_that_has_gone_goes_to_the_next() -> None:
    fair, order = FairAdmission(), list[int]()

    async def begin(number: int) -> None:
        await fair.begin("key")
        order.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert order == [0]
    for gone in (tasks[1], tasks[2], tasks[4]):
        gone.cancel()
    await asyncio.wait(tasks)
    assert order == [0, 3]
    await asyncio.sleep(0)
    await fair.begin("key")  # nothing is left of them: it need not wait
    assert "waiting=0" in repr(fair)
