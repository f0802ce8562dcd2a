"""After kill -9 of a whole engine, no token that was sent is lost or changed in the next one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batchengine.core import BatchEngineError, Kind, Sampling
from batchengine.engine.sessions import recovery
from bench.models.hashlm import LAYOUT, WORKER_COMMAND, hashlm_tokens
from kv_store.errors import StoreFull
from tests.engine.test_worker_faults import FAULTY
from tests.support.engine_process import engine_process
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
from tests.support.faulty_worker import CRASH_ENGINE


@pytest.mark.parametrize("level", [pytest.param("turn", marks=pytest.mark.slow), "power"])
async def test_a_killed_engine_is_resumed_without_losing_a_sent_token(
    site: Site, reference: Reference, level: str
) -> None:
    """Three sessions, killed several times during their answers, end with the right tokens."""
    prompts = {"a": words(1, 30), "b": words(2, 700), "c": words(3, 250)}
    sampling = Sampling(temperature=0.7, seed=5)
    whole = {name: reference.tokens(p, 200, sampling) for name, p in prompts.items()}

    sent: dict[str, list[int]] = {}
    async with engine_process(site, store__durability=level) as engine:
        asked = {
            name: engine.ask("submit", prompt=p, n=200, session=name, temperature=0.7, seed=5)
            for name, p in prompts.items()
        }
        for name, at in asked.items():
            sent[name] = (await engine.tokens(at, 25))[0]
        await engine.end()
        for name, at in asked.items():
            sent[name] += (await engine.tokens(at))[0]
    for run in range(2):
        async with engine_process(site, store__durability=level) as engine:
            asked = {}
            for name in prompts:
                record = await engine.call("record", session=name)
                durable = record["tokens"][len(prompts[name]) :]
                assert durable == whole[name][: len(durable)]
                if level == "power":
                    assert len(durable) >= len(sent[name])
                asked[name] = engine.ask("resume", session=name, from_token=len(sent[name]))
            for name, at in asked.items():
                sent[name] += (await engine.tokens(at, 40 if run == 0 else 1000))[0]
            if run == 0:
                await engine.end()
                for name, at in asked.items():
                    sent[name] += (await engine.tokens(at))[0]
    assert sent == whole


@pytest.mark.parametrize(("prompt_tokens", "sent_tokens"), [(2100, 50), (130, 60), (760, 20)])
async def test_few_tokens_are_recomputed_after_all_processes_were_killed(
    site: Site, prompt_tokens: int, sent_tokens: int
) -> None:
    """At most eight tokens are computed twice: rows that were not sealed are imported, and HashLM,
    whose every token depends on each byte of KV, shows that they are right."""
    prompt = words(4, prompt_tokens)
    whole = hashlm_tokens(prompt, 300)
    async with engine_process(site, WORKER_COMMAND) as engine:
        at = engine.ask("submit", prompt=prompt, n=300, session="s")
        sent, _ = await engine.tokens(at, sent_tokens)
        await engine.end()
        sent += (await engine.tokens(at))[0]
    async with engine_process(site, WORKER_COMMAND) as engine:
        durable = len((await engine.call("record", session="s"))["tokens"])
        at = engine.ask("resume", session="s", from_token=len(sent))
        tokens, last = await engine.tokens(at)
        assert sent + tokens == whole
        computed = (await engine.call("computed"))["tokens"]
        # the last token has no KV: one step for each token after a durable one
        again = computed - (prompt_tokens + 300 - durable)
        assert again <= 8, (again, last)
        assert last["usage"]["cached_tokens"] >= prompt_tokens - 8


async def test_a_client_that_sends_its_request_again_gets_the_same_answer(
    site: Site, reference: Reference
) -> None:
    """A repeated request is answered alike; one with the longer history that the client received
    continues from there, although the ledger lacks its end."""
    prompt = words(5, 60)
    whole = reference.tokens(prompt, 120)
    async with engine_process(site) as engine:
        for session in ("s", "t"):
            at = engine.ask("submit", prompt=prompt, n=120, session=session)
            sent, _ = await engine.tokens(at, 40)
        await engine.end()
    async with engine_process(site) as engine:
        at = engine.ask("submit", prompt=prompt, n=120, session="s")
        assert (await engine.tokens(at))[0] == whole
        longer = [*prompt, *whole[:40]]
        at = engine.ask("submit", prompt=longer, n=80, session="t")
        assert (await engine.tokens(at))[0] == whole[40:]
        record = await engine.call("record", session="t")
        assert record["tokens"] == prompt + whole
        assert sent == whole[:40]


async def test_interrupted_sessions_are_listed_until_they_continue(site: Site) -> None:
    prompt = words(6, 30)
    async with engine_process(site, WORKER_COMMAND) as engine:
        await engine.tokens(engine.ask("submit", prompt=prompt, n=5, session="whole"))
        await engine.tokens(engine.ask("submit", prompt=prompt, n=900, session="cut"), 3)
        await engine.end()
    async with engine_process(site, WORKER_COMMAND) as engine:
        rows = (await engine.call("sessions"))["sessions"]
        assert [(row["session_id"], row["state"]) for row in rows] == [("cut", "interrupted")]
        await engine.tokens(engine.ask("resume", session="cut"), 1)
        (row,) = (await engine.call("sessions"))["sessions"]
        assert row["session_id"] == "cut"
        assert row["state"] != "interrupted"  # a fast lane may have finished it


async def test_the_engine_can_be_killed_at_any_moment(site: Site) -> None:
    """Over five kills, every token sent is that of HashLM, in order, once."""
    prompts = {f"s{i}": words(20 + i, 200 + 90 * i) for i in range(4)}
    whole = {name: hashlm_tokens(p, 250) for name, p in prompts.items()}

    sent: dict[str, list[int]] = {name: [] for name in prompts}
    for run in range(6):
        async with engine_process(site, WORKER_COMMAND) as engine:

            async def one(name: str) -> None:
                at = engine.ask("resume", session=name, from_token=len(sent[name]))
                tokens, last = await engine.tokens(at)
                if last.get("error") == "session_not_found":  # it was not durable yet
                    assert sent[name] == []
                    at = engine.ask("submit", prompt=prompts[name], n=250, session=name)
                    tokens, last = await engine.tokens(at)
                sent[name] += tokens

            readers = [asyncio.ensure_future(one(name)) for name in prompts]
            if run < 5:
                await asyncio.sleep(0.02 + 0.05 * run)
                await engine.end()
            await asyncio.gather(*readers)
    assert sent == whole


async def test_level_power_sends_nothing_that_is_not_durable(
    site: Site, reference: Reference
) -> None:
    """When the ledger's disk fails during a stream, all tokens sent until then are durable, and
    none is sent afterwards, although the lane continues to compute."""
    prompt = words(7, 40)
    async with running_engine(site, store__durability="power") as engine:
        ledger = engine.running.store.ledger
        transact, commits = ledger._transact, [0]

        def dying(intents: Any) -> Any:
            commits[0] += 1
            if commits[0] > 10:
                raise ledger._latch(OSError(5, "injected EIO"))
            return transact(intents)

        ledger._transact = dying
        generation = engine.submit(request(prompt, 400, session="s"))
        answer = await read(generation)
        assert answer.error is not None
        assert engine.fatal is not None
        sent = answer.tokens
        assert 0 < len(sent) < 400
        assert sent == reference.tokens(prompt, 400)[: len(sent)]
        with pytest.raises(BatchEngineError) as error:
            engine.submit(request(prompt, 5))
        assert error.value.kind is Kind.UNAVAILABLE
        record = await asyncio.wrap_future(ledger.load_session("\x1fs"))
        assert record is not None
        assert record.tokens[: len(prompt) + len(sent)] == prompt + sent


@pytest.mark.parametrize("choice", ["fail", "finish"])
async def test_a_full_disk_ends_running_turns_as_configured(
    site: Site, reference: Reference, choice: str
) -> None:
    prompt = words(8, 40)
    async with running_engine(site, store__full_disk=choice) as engine:
        _, reader = await started(engine, request(prompt, 300, session="s"), 50)
        ledger = engine.running.store.ledger

        def refuse(_: Any) -> Any:
            raise StoreFull("the disk is full")

        real, ledger._transact = ledger._transact, refuse
        answer = await reader
        assert answer.tokens == reference.tokens(prompt, 300)
        if choice == "finish":
            assert answer.done is not None
            assert not answer.done.usage.durable
        else:
            assert answer.error is not None
            assert answer.error.name == "durability_unavailable"
        refused = await read(engine.submit(request(words(9, 9), 5, session="new")))
        assert refused.error is not None
        assert (refused.error.kind, refused.tokens) == (Kind.UNAVAILABLE, [])
        ledger._transact = real


async def test_a_session_that_crashes_the_engine_is_quarantined(site: Site) -> None:
    """After its first crash a session computes alone; after two of those it is refused."""
    good, bad = words(10, 30), [*words(11, 30), CRASH_ENGINE, *words(12, 5)]

    run_count = 0
    while True:
        async with engine_process(site, FAULTY, store__durability="power") as engine:
            at = engine.ask("submit", prompt=bad, n=50, session="bad")
            other = engine.ask("submit", prompt=good, n=50, session=f"good{run_count}")
            sent, last = await engine.tokens(at)
            run_count += 1
            assert sent == []
            if "error" in last:
                assert last["error"] == "session_quarantined"
                assert len((await engine.tokens(other))[0]) == 50
                again = await engine.call("resume", session="bad")
                assert again["error"] == "session_quarantined"
                break
            assert run_count < 5
    assert run_count == 4


async def killed(site: Site, prompts: dict[str, list[int]], at_least: int) -> dict[str, list[int]]:
    """The tokens that a HashLM engine had sent, of 300 per session, when it was killed."""
    sent: dict[str, list[int]] = {}
    async with engine_process(site, WORKER_COMMAND) as engine:
        asked = {
            name: engine.ask("submit", prompt=p, n=300, session=name) for name, p in prompts.items()
        }
        for name, at in asked.items():
            sent[name] = (await engine.tokens(at, at_least))[0]
        await engine.end()
        for name, at in asked.items():
            sent[name] += (await engine.tokens(at))[0]
    return sent


async def test_arenas_of_a_dead_engine_are_deleted_when_its_sessions_had_time_to_resume(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "ORPHANED_S", 3.0)
    prompts = {"a": words(13, 100), "b": words(14, 400)}
    arenas = site.folder / "kv" / "arena"

    sent = await killed(site, prompts, 20)
    left = {path.name for path in arenas.iterdir()}
    assert len(left) == 1
    async with running_engine(site, WORKER_COMMAND) as engine:
        for name, prompt in prompts.items():
            answer = await read(await engine.resume("", name, len(sent[name])))
            assert sent[name] + answer.tokens == hashlm_tokens(prompt, 300)
        await until(lambda: not left & {path.name for path in arenas.iterdir()})


async def test_damaged_rows_of_a_dead_engine_are_computed_again(site: Site) -> None:
    """Rows without a valid record are computed again; sealed pages before them are used."""
    prompts = {"s": words(15, 600)}
    layout = LAYOUT

    sent = await killed(site, prompts, 150)  # pages are sealed
    (path,) = (site.folder / "kv" / "arena").iterdir()
    size = path.stat().st_size
    slots = (size - 65536) // (layout.page_bytes + 8192)
    with path.open("r+b") as file:
        for slot in range(slots):
            at = 65536 + slot * layout.page_bytes
            file.seek(at)
            page = bytearray(file.read(layout.payload_bytes))
            page[layout.payload_bytes // 2 :] = b"\x55" * (layout.payload_bytes // 2)
            file.seek(at)
            file.write(page)
    async with running_engine(site, WORKER_COMMAND) as engine:
        answer = await read(await engine.resume("", "s", len(sent["s"])))
        assert sent["s"] + answer.tokens == hashlm_tokens(prompts["s"], 300)
        assert answer.done is not None
        assert answer.done.usage.cached_tokens == 512
        assert answer.done.usage.reuse_reason == "tail lost with its worker"
        rejected = engine.metrics.kv_rejected_total.labels("worker")
        assert rejected._value.get() == 1
