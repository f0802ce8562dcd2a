"""Sessions that are forked, edited, parked and dropped, in one engine and the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import time
from pathlib import Path

import pytest

from batchengine.core import BatchEngineError, GenerationRequest, Kind, OutputForm
from batchengine.engine import Engine
from batchengine.engine.sessions import tool_calls
from batchengine.engine.turns.records import TimelineMark
from batchengine.gguf import GgufFile
from bench.models.hashlm import WORKER_COMMAND, hashlm_tokens
from service.protocols.output import call_id_of, turns_of
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


@pytest.mark.parametrize(("at", "why"), [(300, "sealed page"), (590, "open page was not kept")])
async def test_an_edit_after_a_restart_reports_what_could_not_be_reused(
    site: Site, at: int, why: str
) -> None:
    start = words(14, 600)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(start, 10, session="s")))
    async with running_engine(site) as engine:
        edited = [*start[:at], 77, *start[at + 1 :], *one.tokens, 55]
        two = await read(engine.submit(request(edited, 10, session="s")))
        assert two.done is not None
        reason = two.done.usage.reuse_reason
        assert reason.startswith(f"history edited at token {at}")
        assert why in reason
        assert two.done.usage.cached_tokens == at // 256 * 256


def full_pages(engine: Engine) -> int:
    """Count of published full pages; the number of tails varies with idle sessions."""
    store = engine.stats()["store"]
    return int(store["pages_published"]) - int(store["tails"])


async def test_forks_share_their_common_pages_and_continue_separately(
    site: Site, reference: Reference
) -> None:
    start = words(11, 700)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(start, 20, session="s")))
        await until(lambda: int(engine.stats()["pages_sealed"]) >= 2)
        for name in ("f0", "f1", "f2"):
            fork = await engine.fork("", "s", name)
            assert fork["tokens"] == 720
            assert fork["pages_shared"] == 2
        pages = full_pages(engine)
        for index, name in enumerate(("f0", "f1", "f2", "s")):
            prompt = [*start, *one.tokens, *words(20 + index, 9)]
            answer = await read(engine.submit(request(prompt, 12, session=name)))
            assert answer.tokens == reference.tokens(prompt, 12)
            assert answer.done is not None
            assert answer.done.usage.cached_tokens >= 512
        assert full_pages(engine) == pages
        with pytest.raises(BatchEngineError) as error:
            await engine.fork("", "s", "f0")
        assert error.value.name == "session_exists"
        with pytest.raises(BatchEngineError) as error:
            await engine.fork("", "unknown", "x")
        assert error.value.kind is Kind.NOT_FOUND


async def test_a_dropped_session_is_not_found_and_its_name_is_free(
    site: Site, reference: Reference
) -> None:
    prompt = words(12, 50)
    async with running_engine(site) as engine:
        _, reader = await started(engine, request(prompt, 500, session="s"), 5)
        dropped = await engine.drop("", "s")
        assert dropped["state"] == "dropped"
        ended = await reader
        assert ended.error is not None
        with pytest.raises(BatchEngineError) as error:
            await engine.resume("", "s")
        assert error.value.kind is Kind.NOT_FOUND
        fresh = await read(engine.submit(request(words(13, 9), 5, session="s")))
        assert fresh.tokens == reference.tokens(words(13, 9), 5)


async def test_the_tail_of_a_dropped_session_is_found_by_its_fork(
    site: Site, reference: Reference
) -> None:
    prompt = words(15, 90)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(prompt, 20, session="s")))
        await engine.park("", "s", None)
        await engine.fork("", "s", "twin")
        await engine.drop("", "s")
        assert engine.stats()["store"]["tails"] == 1
        longer = [*prompt, *one.tokens, 7]
        two = await read(engine.submit(request(longer, 4, session="twin")))
        assert two.tokens == reference.tokens(longer, 4)
        assert two.done is not None
        assert two.done.usage.cached_tokens > 100
        await engine.park("", "twin", None)
        await engine.drop("", "twin")
        assert engine.stats()["store"]["pages_pinned"] == 0, "what is left may be evicted"


async def test_why_reports_the_first_token_that_differs(site: Site) -> None:
    start = words(14, 600)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(start, 10, session="s")))
        edited = [*start[:300], 77, *start[301:], *one.tokens, 55]
        two = await read(engine.submit(request(edited, 10, session="s")))
        assert two.done is not None
        assert "history edited at token 300" in two.done.usage.reuse_reason
        why = await engine.why("", "s")
        assert why["edit"]["first_difference"] == 300
        assert why["edit"]["old_token"] == start[300]
        assert why["edit"]["new_token"] == 77
        assert engine.text.piece(start[300]).decode() in why["edit"]["old_text"]
        assert why["edit"]["tokens_reused"] == two.done.usage.cached_tokens
        longer = [*edited, *two.tokens, 8]
        three = await read(engine.submit(request(longer, 10, session="s")))
        assert three.done is not None
        assert three.done.usage.reuse_reason == ""
    async with running_engine(site) as engine:
        why = await engine.why("", "s")
        assert why["edit"]["first_difference"] == 300
        assert not why["last"]["is_edit"]
        detail = await engine.session_detail("", "s")
        assert [turn["status"] for turn in detail["turns"]] == ["done"] * 3


async def test_after_a_clean_restart_nothing_is_recomputed(
    site: Site, reference: Reference
) -> None:
    """Sealed pages and the parked tail hold all tokens but the last, which never had KV."""
    start = words(15, 700)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(start, 20, session="s")))
    longer = [*start, *one.tokens, *words(16, 9)]
    async with running_engine(site) as engine:
        assert (await read(await engine.resume("", "s"))).tokens == one.tokens
        assert engine.sessions()[0]["class"] == "", "it has had no turn since"
        two = await read(engine.submit(request(longer, 20, session="s")))
        assert two.tokens == reference.tokens(longer, 20)
        assert two.done is not None
        assert two.done.usage.cached_tokens == 719
        assert two.done.usage.reuse_reason == ""
        row = engine.sessions()[0]
        assert (row["tokens_reused"], row["tokens_prompt"], row["reason"]) == (719, 729, "")
        assert row["class"] == "standard"
        used = engine.metrics.kv_restored_tokens_used_total
        assert used._value.get() == 719
        assert engine.stats()["tokens_computed"] == 10 + 19


async def test_a_parked_session_leaves_its_lane_and_is_found_by_its_tool_call(
    site: Site, reference: Reference
) -> None:
    """A request that names no session, only the tool call it answers, continues that session."""
    start = words(17, 300)

    def after(history: list[int], call: str) -> GenerationRequest:
        made = request([*history, *words(18, 20)], 10)
        return dataclasses.replace(made, tool_call_ids=("older", call))

    async with running_engine(site, lane__open_pages=12) as engine:
        asked = dataclasses.replace(request(start, 30, session="s"), park=True)
        one = await read(engine.submit(asked))
        await engine.park("", "s", "call-1")
        loop = engine.state.lanes[0]
        await until(lambda: engine.sessions()[0]["pages"] == 0)
        await until(lambda: loop.kv.slots.available == 12)
        assert int(engine.stats()["store"]["pages_pinned"]) == 0
        history = [*start, *one.tokens]
        other_tenant = dataclasses.replace(after(history, "call-1"), tenant="other")
        assert (await read(engine.submit(other_tenant))).done is not None
        two = await read(engine.submit(after(history, "call-1")))
        assert two.done is not None
        assert two.done.usage.session_id == "s"
        assert two.done.usage.cached_tokens == 329
        history += [*words(18, 20), *two.tokens]
        assert two.tokens == reference.tokens(history[:-10], 10)
        parked = await engine.park("", "s", "call-2")
        assert parked["tool_calls"] == ("call-1", "call-2")
    async with running_engine(site) as engine:
        three = await read(engine.submit(after(history, "call-2")))
        assert three.done is not None
        assert three.done.usage.session_id == "s"
        assert three.done.usage.cached_tokens == len(history) - 1
        assert three.tokens == reference.tokens([*history, *words(18, 20)], 10)
        with pytest.raises(BatchEngineError) as error:
            await engine.park("", "unknown")
        assert error.value.kind is Kind.NOT_FOUND


async def test_a_foreign_tool_call_takes_over_no_session(site: Site, reference: Reference) -> None:
    """Conversations with the same call are distinguished by their tokens, after a restart too."""
    starts = {name: words(seed, 60) for name, seed in (("a", 60), ("b", 61), ("c", 62))}

    def answered(history: list[int]) -> GenerationRequest:
        made = request([*history, *words(63, 20)], 6)
        return dataclasses.replace(made, tool_call_ids=("call_1",))

    async def session_of(engine: Engine, history: list[int]) -> str:
        answer = await read(engine.submit(answered(history)))
        assert answer.tokens == reference.tokens([*history, *words(63, 20)], 6)
        assert answer.done is not None
        return answer.done.usage.session_id

    async with running_engine(site) as engine:
        histories: dict[str, list[int]] = {}
        for name, start in starts.items():
            one = await read(engine.submit(request(start, 12, session=name)))
            histories[name] = [*start, *one.tokens]
            await engine.park("", name, "call_1")
        foreign = [*histories["a"][:-20], *words(64, 40)]
        assert (await session_of(engine, foreign)).startswith("be_")
        assert (await session_of(engine, words(65, 4))).startswith("be_")
        for name, history in histories.items():
            found = await asyncio.wrap_future(
                engine.running.store.ledger.load_session(f"\x1f{name}")
            )
            assert found is not None
            assert found.tokens == history
        assert await session_of(engine, histories["b"]) == "b"
    async with running_engine(site) as engine:
        assert (await session_of(engine, foreign)).startswith("be_")
        last = [*histories["a"][:-2], 5]  # the answer's end is written anew
        assert await session_of(engine, last) == "a"
        assert await session_of(engine, histories["c"]) == "c"


def test_tool_calls_of_one_tenant_do_not_evict_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_calls, "CALLS_MAX", 4)
    monkeypatch.setattr(tool_calls, "CALLS_ALL", 6)
    links, timeline = tool_calls.ToolCalls(), words(1, 9)
    mark = TimelineMark.of(timeline)

    def session_of(tenant: str, call: str) -> str | None:
        return links.find(tenant, [call], timeline)

    links.add("small", "mine", "s", mark)
    for number in range(20):
        links.add("large", f"call-{number}", "x", mark)
    assert session_of("small", "mine") == "s"
    found = [session_of("large", f"call-{number}") for number in range(20)]
    assert found == [None] * 16 + ["x"] * 4
    for tenant in ("third", "fourth"):
        links.add(tenant, "call", "y", mark)
    assert session_of("small", "mine") == "s"
    assert session_of("large", "call-16") is None
    assert session_of("large", "call-17") == "x"
    links.forget("large", "x")
    assert session_of("large", "call-19") is None


async def test_a_fork_uses_the_parked_tail(site: Site, reference: Reference) -> None:
    start = words(19, 400)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(start, 20, session="s")))
        for name in ("x", "y"):
            await engine.fork("", "s", name)
        for index, name in enumerate(("x", "y", "s")):
            prompt = [*start, *one.tokens, *words(30 + index, 9)]
            answer = await read(engine.submit(request(prompt, 12, session=name)))
            assert answer.tokens == reference.tokens(prompt, 12)
            assert answer.done is not None
            assert answer.done.usage.cached_tokens == 419


async def test_another_model_keeps_the_tokens_and_reports_the_change(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of another model is not used, and a repeated request is computed, not sent again."""
    start = words(21, 600)
    async with running_engine(site, WORKER_COMMAND) as engine:
        one = await read(engine.submit(request(start, 20, session="s")))
        assert one.tokens == hashlm_tokens(start, 20)
    monkeypatch.setenv("HASHLM_FAULTS", '{"model": "other"}')
    async with running_engine(site, WORKER_COMMAND) as engine:
        two = await read(engine.submit(request(start, 20, session="s")))
        assert two.tokens == hashlm_tokens(start, 20, model="other")
        assert two.done is not None
        assert two.done.usage.cached_tokens == 0
        assert two.done.usage.resumed_tokens == 0
        longer = [*start, *two.tokens, 9]
        three = await read(engine.submit(request(longer, 20, session="s")))
        assert three.done is not None
        assert three.done.usage.cached_tokens >= 512
    assert "model or numerics changed: model_hash" in two.done.usage.reuse_reason


async def test_no_answer_is_of_two_models(site: Site, tmp_path: Path) -> None:
    """A turn of another model with the same tokenizer is refused, unless it had ended."""
    prompt, other = words(97, 40), words(98, 40)
    model = tmp_path / "model.gguf"
    model.write_bytes(site.model.read_bytes())
    own = dataclasses.replace(site, model=model, cache_dir=tmp_path / "cache")

    def keyed(prompt: list[int], n: int, key: str) -> GenerationRequest:
        return dataclasses.replace(request(prompt, n, session=key), idempotency_key=key)

    async with running_engine(own) as engine:
        done = await read(engine.submit(keyed(other, 8, "done")))
        cut = [engine.submit(keyed(prompt, 400, key)) for key in ("resumed", "keyed", "plain")]
        await until(lambda: all(generation.completion_tokens > 5 for generation in cut))
        await engine.stop(0.0)
        before = [(await read(generation)).tokens for generation in cut]
        assert all(0 < len(tokens) < 400 for tokens in before)
    with GgufFile(model) as file:
        tensor = next(t for t in file.tensors.values() if t.type.name == "Q4_0")
    weights = bytearray(model.read_bytes())
    for block in range(tensor.offset, tensor.offset + tensor.n_bytes, tensor.type.block_bytes):
        weights[block + 9] ^= 0x55  # two numbers of the block, not its scale
    model.write_bytes(weights)
    async with running_engine(own) as engine:
        for again in (
            await engine.resume("", "resumed"),
            engine.submit(keyed(prompt, 400, "keyed")),
        ):
            answer = await read(again)
            assert answer.error is not None
            assert (answer.error.kind, answer.error.name) == (Kind.CONFLICT, "turn_of_other_model")
            assert "model_hash" in answer.error.why
            assert answer.tokens == []
        assert (await read(engine.submit(keyed(other, 8, "done")))).tokens == done.tokens
        assert (await read(await engine.resume("", "done"))).tokens == done.tokens
        fresh = (await read(engine.submit(request(prompt, 30)))).tokens
        assert fresh != before[2][:30]
        for _ in range(2):  # the second time the turn is this model's own
            anew = await read(engine.submit(request(prompt, 30, session="plain")))
            assert anew.tokens == fresh
        rest = await read(await engine.resume("", "plain", 10))
        assert rest.tokens == fresh[10:]


async def test_a_session_that_is_parked_with_its_turn_is_found_by_the_calls_of_that(
    site: Site,
) -> None:
    """In the same engine and in the next, by each call of the answer as its client knows it."""
    start, turn_id = words(17, 300), "req_" + "0c" * 12

    def after(history: list[int], call: str) -> GenerationRequest:
        made = request([*history, *words(18, 20)], 10)
        return dataclasses.replace(made, tool_call_ids=(call, *turns_of([call])))

    async with running_engine(site) as engine:
        asked = dataclasses.replace(
            request(start, 30, session="s"),
            request_id=turn_id,
            park=True,
            output=OutputForm("hermes", calls=True),
        )
        one = await read(engine.submit(asked))
        history = [*start, *one.tokens]
        assert (await engine.session_detail("", "s"))["tool_calls"] == [turn_id]
        for wrong in ("call_1", call_id_of("req_" + "0d" * 12, 0)):
            other = await read(engine.submit(after(history, wrong)))
            assert other.done is not None
            assert other.done.usage.session_id != "s"
        two = await read(engine.submit(after(history, call_id_of(turn_id, 1))))
        assert two.done is not None
        assert two.done.usage.session_id == "s"
        history += [*words(18, 20), *two.tokens]
    async with running_engine(site) as engine:
        three = await read(engine.submit(after(history, call_id_of(turn_id, 0, "toolu_"))))
        assert three.done is not None
        assert three.done.usage.session_id == "s"


async def test_a_parked_session_is_listed_as_parked_until_it_continues(site: Site) -> None:
    """In memory, on disk and in the next engine."""
    prompt = words(90, 30)
    now_s = time.time()

    def seen(engine: Engine) -> tuple[object, object]:
        (row,) = [row for row in engine.sessions() if row["session_id"] == "s"]
        assert row["state"] != "parked" or abs(row["parked_since"] - now_s) < 600
        return row["state"], row.get("tool_call_id")

    async def stored(engine: Engine) -> tuple[object, object]:
        (row,) = await engine.stored_sessions(10)
        return row["state"], row.get("tool_call_id")

    async with running_engine(site) as engine:
        one = await read(engine.submit(request(prompt, 4, session="s")))
        assert seen(engine) == ("idle", None)
        await engine.park("", "s", "call_1")
        assert seen(engine) == await stored(engine) == ("parked", "call_1")
        assert (await engine.session_detail("", "s"))["state"] == "parked"
        assert engine.explain("s")["state"] == "parked"
    async with running_engine(site) as engine:
        assert await stored(engine) == ("parked", "call_1")
        assert (await engine.session_detail("", "s"))["tool_call_id"] == "call_1"
        longer = [*prompt, *one.tokens, 5]
        generation = engine.submit(request(longer, 400, session="s"))
        await until(lambda: generation.completion_tokens > 3)
        assert seen(engine) == ("running", None)
        received = await engine.park("", "s", "call_2")
        assert received["state"] == "parks at the end of its turn"
        two = await read(generation)
        await until(lambda: seen(engine) == ("parked", "call_2"))
        assert await stored(engine) == ("parked", "call_2")
        longer += [*two.tokens, 6]
        asked = dataclasses.replace(request(longer, 4, session="s"), park=True)
        three = await read(engine.submit(asked))
        await until(lambda: seen(engine) == ("parked", None))
        assert await stored(engine) == ("parked", None)
        await read(engine.submit(request([*longer, *three.tokens, 7], 4, session="s")))
        await until(lambda: seen(engine) == ("idle", None))
        assert (await stored(engine))[0] == "on disk"


async def test_lost_pages_are_not_reported_as_evicted(site: Site) -> None:
    """The pages of an extent that was lost between two engines."""
    start = words(93, 600)
    async with running_engine(site, WORKER_COMMAND) as engine:
        one = await read(engine.submit(request(start, 20, session="s")))
    for extent in (site.folder / "kv" / "ext").iterdir():
        extent.unlink()
    longer = [*start, *one.tokens, 9]
    async with running_engine(site, WORKER_COMMAND) as engine:
        two = await read(engine.submit(request(longer, 20, session="s")))
        assert two.tokens == hashlm_tokens(longer, 20)
        assert two.done is not None
        assert two.done.usage.cached_tokens == 0
        assert two.done.usage.reuse_reason.endswith("are no longer in the store")


async def test_a_damaged_history_is_refused_with_one_fix(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the damaged row; the client receives one error with a fix that works."""
    start = words(94, 30)
    async with running_engine(site, WORKER_COMMAND) as engine:
        await read(engine.submit(request(start, 4, session="s")))
    with contextlib.closing(sqlite3.connect(site.folder / "kv" / "meta.db")) as db, db:
        db.execute("UPDATE token_blob SET checksum = zeroblob(4)")
    async with running_engine(site, WORKER_COMMAND) as engine:
        refused = (await read(engine.submit(request(start, 4, session="s")))).error
        assert refused is not None
        assert (refused.code, refused.why) == ("BE2401", "the ledger file was damaged")
        assert "resend" not in str(refused)
        assert (await read(engine.submit(request(start, 4, session="other")))).error is None
    assert any("fail their checksum" in record.getMessage() for record in caplog.records)
