"""Faults behind a request: what its client learns of them, and what it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, ErrorEvent
from tests.service.http.hostile import CHAT
from tests.support.fake_engine import (
    FakeEngine,
    chat,
    fake_config,
    post,
    serving,
)


async def test_an_unexpected_exception_is_a_500_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()

    def broken(request: Any) -> Any:
        raise RuntimeError("secret /etc/passwd 0x7f00")

    engine.submit = broken
    async with serving(engine) as served:
        status, reply, _ = await post(served, CHAT, chat())
        assert (status, reply["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(reply)
        assert reply["error"]["what"].split()[-1].startswith("req_")
        assert (await post(served, "/v1/chat/completions", {"messages": []}))[0] == 400
    assert "secret" in caplog.text  # the details are in the log


async def test_admitted_choices_are_cancelled_when_another_one_is_refused() -> None:
    engine = FakeEngine()
    real = engine.submit

    def third_refused(request: Any) -> Any:
        if len(engine.generations) == 2:
            raise errors.OVERLOADED(waiting=9, setting="limits.queue_max")
        return real(request)

    engine.submit = third_refused  # type: ignore[method-assign]
    async with serving(engine) as served:
        status, _, _ = await post(served, CHAT, chat(n=4))
        assert status == 503
        assert [g.cancelled.is_set() for g in engine.generations] == [True, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_names_a_folder_of_this_machine(stream: bool) -> None:
    """Errors of the disk have paths in their texts; callers get the name of the file."""
    config = fake_config()
    config = replace(
        config,
        model=replace(config.model, path="/secret/models/fake.gguf"),
        store=replace(config.store, dir="/var/secret/kv"),
    )
    engine = FakeEngine()
    why = "[Errno 5] /var/secret/kv/ledger.db and /secret/models/fake.gguf"
    async with serving(engine, config) as served, aiohttp.ClientSession(served.base) as client:
        engine.stats = lambda: {"troubles": [why]}  # type: ignore[method-assign]
        engine.script = _failing(errors.NOT_DURABLE(why=why))  # type: ignore[method-assign]
        async with client.get("/health") as reply:
            health = await reply.text()
        async with client.post(CHAT, json=chat(stream=stream)) as reply:
            answer = await reply.text()
    for text in (health, answer):
        assert "ledger.db and fake.gguf" in text
        assert "secret" not in text


def _failing(error: BatchEngineError) -> Any:
    async def script(_: object) -> Any:
        yield ErrorEvent(error)

    return script
