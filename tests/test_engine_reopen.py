"""Sessions that come back: resumed, repeated, forked, edited, dropped; in one life and the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchengine.core import (
    FORM_CHAT,
    FORM_TEXT,
    BatchEngineError,
    GenerationRequest,
    Sampling,
    TokenEvent,
)
from batchengine.engine import Engine
from batchengine.engine.record import TurnRecord, encode, turn_record
from bench.hashlm import WORKER_COMMAND, hashlm_tokens
from tests.fakes import Answer, Reference, read, request, run, running_engine, until, words

WARM = Sampling(temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def reference(pocket_path: Path, cache_dir: Path) -> Iterator[Reference]:
    made = Reference(pocket_path, cache_dir)
    yield made
    made.close()


async def some(engine: Engine, asked: GenerationRequest, tokens: int) -> list[int]:
    """Read so many tokens, then go away."""
    generation = engine.submit(asked)
    seen: list[int] = []
    async for event in generation:
        if isinstance(event, TokenEvent):
            seen.append(event.token)
        if len(seen) == tokens:
            break
    generation.cancel()
    await until(lambda: not engine._queues)
    return seen


async def resumed(engine: Engine, session: str, from_token: int = 0, turn_id: str = "") -> Answer:
    return await read(await engine.resume("", session, from_token, turn_id))


def test_a_stream_that_its_reader_left_is_resumed_where_it_was(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """Same life and next life; the text from the resumed token on is the original's."""
    prompt = words(1, 300)
    whole = reference.tokens(prompt, 60, WARM)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            other = await read(engine.submit(request(prompt, 60, sampling=WARM)))
            asked = request(prompt, 60, session="s", sampling=WARM)
            seen = await some(engine, asked, 10)
            assert seen == whole[:10]
            record = await asyncio.wrap_future(engine._store.ledger.load_session("\x1fs"))
            assert record is not None
            assert record.turns[-1].status == "cancelled"
            answer = await resumed(engine, "s", 10)
            assert answer.tokens == whole[10:]
            assert answer.reason == "length"
            texts = [e.text for e in other.events if isinstance(e, TokenEvent)]
            assert [e.text for e in answer.events if isinstance(e, TokenEvent)] == texts[10:]
            assert answer.done is not None
            assert answer.done.usage.completion_tokens == 60
            again = await resumed(engine, "s", 55)
            assert again.tokens == whole[55:]
            assert again.done is not None
            assert again.done.usage.resumed_tokens == 60
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            assert (await resumed(engine, "s", 3)).tokens == whole[3:]
            assert (await resumed(engine, "s", 60)).tokens == []

    run(work())


def test_no_turn_is_told_as_the_rest_of_another(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """A reader left, somebody else went on with the session; in this life and the next."""
    prompt = words(6, 60)
    whole = reference.tokens(prompt, 40)
    other = [*prompt, *whole, *words(7, 9)]

    async def refused(engine: Engine, turn_id: str, why: str) -> None:
        with pytest.raises(BatchEngineError) as caught:
            await engine.resume("", "s", 10, turn_id)
        assert (caught.value.api_code, caught.value.http_status) == ("turn_followed", 409)
        assert why in caught.value.why

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            asked = request(prompt, 40, session="s")
            assert await some(engine, asked, 10) == whole[:10]
            first = asked.request_id
            again = engine.submit(request(prompt, 40, session="s"))  # goes on with the same turn
            assert (await read(again)).tokens == whole
            assert again.request_id != again.turn_id == first
            assert (await resumed(engine, "s", 10, first)).tokens == whole[10:]
            running = engine.submit(request(other, 200, session="s"))
            reader = asyncio.ensure_future(read(running))
            await until(lambda: running.completion_tokens > 5)
            await refused(engine, first, "followed it")
            answer = await reader
            assert answer.tokens == reference.tokens(other, 200)
            assert running.turn_id == running.request_id
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await refused(engine, first, "followed it")
            await refused(engine, "req_lost", "no such turn")
            rest = await resumed(engine, "s", 10, running.turn_id)
            assert rest.tokens == answer.tokens[10:]

    run(work())


def test_a_turn_that_begins_while_another_is_resumed_goes_on(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """Its row is not durable yet: the reader is let in, and must neither end nor tell it."""
    prompt = words(8, 60)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = engine.submit(request(prompt, 10, session="s"))
            told = (await read(one)).tokens
            other = [*prompt, *told, 5]
            found = await engine.reopener.record("\x1fs", "s")
            running = engine.submit(request(other, 60, session="s"))
            reader = asyncio.ensure_future(read(running))
            await until(lambda: running.completion_tokens > 5)
            real = engine.reopener.record

            async def before(*_: str) -> Any:
                engine.reopener.record = real  # type: ignore[method-assign]
                return found

            engine.reopener.record = before  # type: ignore[method-assign]
            late = await resumed(engine, "s", 5, one.turn_id)
            assert late.error is not None
            assert (late.error.api_code, late.tokens) == ("turn_followed", [])
            assert (await reader).tokens == reference.tokens(other, 60)

    run(work())


@pytest.mark.parametrize(("at", "why"), [(300, "sealed page"), (590, "open page was not kept")])
def test_an_edit_after_a_restart_says_what_could_not_be_reused(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, at: int, why: str
) -> None:
    start = words(14, 600)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(request(start, 10, session="s")))
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            edited = [*start[:at], 77, *start[at + 1 :], *one.tokens, 55]
            two = await read(engine.submit(request(edited, 10, session="s")))
            assert two.done is not None
            reason = two.done.usage.reuse_reason
            assert reason.startswith(f"history edited at token {at}")
            assert why in reason
            assert two.done.usage.cached_tokens == at // 256 * 256

    run(work())


def test_a_turn_ended_by_shutdown_goes_on_after_it(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    prompt = words(2, 40)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            generation = engine.submit(request(prompt, 400, session="s"))
            await until(lambda: generation.completion_tokens > 20)
            await engine.stop(0.0)
            cut = await read(generation)
            assert cut.reason == "shutdown"
            assert 20 < len(cut.tokens) < 400
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            rest = await resumed(engine, "s", len(cut.tokens))
            assert cut.tokens + rest.tokens == reference.tokens(prompt, 400)
            assert rest.reason == "length"

    run(work())


def test_a_running_turn_is_taken_over_by_the_newest_reader(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    prompt = words(3, 40)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            first = engine.submit(request(prompt, 300, session="s", sampling=WARM))
            reader = asyncio.ensure_future(read(first))
            await until(lambda: first.completion_tokens > 30)
            second = await engine.resume("", "s", 0)
            answer = await read(second)
            lost = await reader
            assert lost.error is not None
            assert lost.error.api_code == "resumed_elsewhere"
            assert answer.tokens == reference.tokens(prompt, 300, WARM)

    run(work())


def test_a_resumed_turn_knows_the_form_of_its_request(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    asked = dataclasses.replace(request(words(5, 20), 8, session="s"), form=FORM_TEXT)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await read(engine.submit(asked))
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            again = await engine.resume("", "s")
            assert again.request.form == FORM_TEXT
            assert len((await read(again)).tokens) == 8

    run(work())
    older = encode(TurnRecord.of(asked)).replace(f',"form":"{FORM_TEXT}"', "")
    known = turn_record(older)
    assert known is not None
    assert "form" not in older
    assert known.form == FORM_CHAT


def test_what_cannot_be_resumed_says_why(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await read(engine.submit(request(words(4, 9), 5, session="s", tenant="a")))
            for tenant, session, at, code in [
                ("", "s", 0, "session_not_found"),
                ("a", "t", 0, "session_not_found"),
                ("a", "s", 6, "invalid_value"),
                ("a", "s", -1, "invalid_value"),
            ]:
                with pytest.raises(BatchEngineError) as error:
                    await engine.resume(tenant, session, at)
                assert error.value.api_code == code
            assert (await read(await engine.resume("a", "s"))).reason == "length"

    run(work())


def test_the_same_request_again_is_told_again_and_not_computed(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """Same session, prompt and sampling: in this life and the next; a longer limit goes on."""
    prompt = words(5, 60)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            first = await read(engine.submit(request(prompt, 20, session="s", sampling=WARM)))
            steps = engine.lanes()[0]["steps"]
            again = await read(engine.submit(request(prompt, 20, session="s", sampling=WARM)))
            assert again.tokens == first.tokens == reference.tokens(prompt, 20, WARM)
            assert again.text == first.text
            assert engine.lanes()[0]["steps"] == steps
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            longer = await read(engine.submit(request(prompt, 40, session="s", sampling=WARM)))
            assert longer.tokens == reference.tokens(prompt, 40, WARM)
            assert longer.done is not None
            assert longer.done.usage.resumed_tokens == 20
            short = await read(engine.submit(request(prompt, 7, session="s", sampling=WARM)))
            assert short.tokens == first.tokens[:7]
            other = Sampling(temperature=0.8, seed=12)
            fresh = await read(engine.submit(request(prompt, 20, session="s", sampling=other)))
            assert fresh.tokens == reference.tokens(prompt, 20, other)
            assert fresh.done is not None
            assert fresh.done.usage.resumed_tokens == 0

    run(work())


def test_one_idempotency_key_is_one_execution(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """A storm of retries with a random seed each: every one hears the first one's answer."""
    prompt = words(6, 50)

    def keyed(seed: int, key: str = "k", text: list[int] = prompt) -> GenerationRequest:
        made = request(text, 30, sampling=Sampling(temperature=0.9, seed=seed))
        return dataclasses.replace(made, idempotency_key=key)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            storm = [engine.submit(keyed(seed)) for seed in range(8)]
            answers = await asyncio.gather(*(read(g) for g in storm))
            expected = reference.tokens(prompt, 30, Sampling(temperature=0.9, seed=0))
            assert [a.tokens for a in answers] == [expected] * 8
            assert sum(loop.generated for loop in engine._loops) == 30
            conflict = await read(engine.submit(keyed(0, text=words(7, 50))))
            assert conflict.error is not None
            assert conflict.error.api_code == "idempotency_conflict"
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            late = await read(engine.submit(keyed(99)))
            assert late.tokens == expected
            assert sum(loop.generated for loop in engine._loops) == 0

    run(work())


def test_an_older_idempotency_key_answers_while_its_tokens_exist(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    start = words(8, 40)

    def keyed(prompt: list[int], key: str) -> GenerationRequest:
        return dataclasses.replace(request(prompt, 10, session="s"), idempotency_key=key)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(keyed(start, "one")))
            longer = [*start, *one.tokens, *words(9, 12)]
            two = await read(engine.submit(keyed(longer, "two")))
            again = await read(engine.submit(keyed(start, "one")))
            assert again.tokens == one.tokens
            assert (await read(engine.submit(keyed(longer, "two")))).tokens == two.tokens
            edited = [*start[:20], *words(10, 9)]
            await read(engine.submit(keyed(edited, "three")))
            gone = await read(engine.submit(keyed(start, "one")))
            assert gone.error is not None
            assert gone.error.api_code == "idempotency_conflict"

    run(work())


def test_forks_share_their_past_and_go_their_own_ways(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    start = words(11, 700)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(request(start, 20, session="s")))
            await until(lambda: int(engine.stats()["pages_sealed"]) >= 2)
            for name in ("f0", "f1", "f2"):
                fork = await engine.fork("", "s", name)
                assert fork["tokens"] == 720
                assert fork["pages_shared"] == 2
            pages = int(engine.stats()["store"]["pages_published"])
            for index, name in enumerate(("f0", "f1", "f2", "s")):
                prompt = [*start, *one.tokens, *words(20 + index, 9)]
                answer = await read(engine.submit(request(prompt, 12, session=name)))
                assert answer.tokens == reference.tokens(prompt, 12)
                assert answer.done is not None
                assert answer.done.usage.cached_tokens >= 512
            assert int(engine.stats()["store"]["pages_published"]) == pages
            with pytest.raises(BatchEngineError) as error:
                await engine.fork("", "s", "f0")
            assert error.value.api_code == "session_exists"
            with pytest.raises(BatchEngineError) as error:
                await engine.fork("", "nobody", "x")
            assert error.value.http_status == 404

    run(work())


def test_a_dropped_session_is_gone_and_its_name_is_free(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    prompt = words(12, 50)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            running = engine.submit(request(prompt, 500, session="s"))
            reader = asyncio.ensure_future(read(running))
            await until(lambda: running.completion_tokens > 5)
            dropped = await engine.drop("", "s")
            assert dropped["state"] == "dropped"
            ended = await reader
            assert ended.error is not None
            with pytest.raises(BatchEngineError) as error:
                await engine.resume("", "s")
            assert error.value.http_status == 404
            fresh = await read(engine.submit(request(words(13, 9), 5, session="s")))
            assert fresh.tokens == reference.tokens(words(13, 9), 5)

    run(work())


def test_a_dropped_session_takes_its_tail_along_unless_a_fork_has_it(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    prompt = words(15, 90)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
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
            assert engine.stats()["store"]["tails"] == 0
            assert engine.stats()["store"]["tails_dropped_total"] == 2

    run(work())


def test_why_names_the_first_token_that_differs(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    start = words(14, 600)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
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
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            why = await engine.why("", "s")
            assert why["edit"]["first_difference"] == 300
            assert not why["last"]["is_edit"]
            detail = await engine.session_detail("", "s")
            assert [turn["status"] for turn in detail["turns"]] == ["done"] * 3

    run(work())


def test_after_a_clean_restart_nothing_is_computed_again(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """Sealed pages and the parked tail: all but the last token, which never had KV."""
    start = words(15, 700)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(request(start, 20, session="s")))
        longer = [*start, *one.tokens, *words(16, 9)]
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            two = await read(engine.submit(request(longer, 20, session="s")))
            assert two.tokens == reference.tokens(longer, 20)
            assert two.done is not None
            assert two.done.usage.cached_tokens == 719
            assert two.done.usage.reuse_reason == ""
            row = engine.sessions()[0]
            assert (row["tokens_reused"], row["tokens_prompt"], row["reason"]) == (719, 729, "")
            used = engine.metrics.kv_restored_tokens_used_total
            assert used._value.get() == 719
            assert engine.stats()["tokens_computed"] == 10 + 19

    run(work())


def test_a_parked_session_leaves_its_lane_and_comes_back_by_its_tool_call(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """The next request names no session, only the call whose result it carries."""
    start = words(17, 300)

    def after(history: list[int], call: str) -> GenerationRequest:
        made = request([*history, *words(18, 20)], 10)
        return dataclasses.replace(made, tool_call_ids=("older", call))

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir, lane__places=12) as engine:
            asked = dataclasses.replace(request(start, 30, session="s"), park=True)
            one = await read(engine.submit(asked))
            await engine.park("", "s", "call-1")
            loop = engine._loops[0]
            await until(lambda: engine.sessions()[0]["pages"] == 0)
            await until(lambda: loop.pages.places_free == 12)
            assert int(engine.stats()["store"]["pages_pinned"]) == 0
            history = [*start, *one.tokens]
            stranger = dataclasses.replace(after(history, "call-1"), tenant="other")
            assert (await read(engine.submit(stranger))).done is not None
            two = await read(engine.submit(after(history, "call-1")))
            assert two.done is not None
            assert two.done.usage.session_id == "s"
            assert two.done.usage.cached_tokens == 329
            history += [*words(18, 20), *two.tokens]
            assert two.tokens == reference.tokens(history[:-10], 10)
            parked = await engine.park("", "s", "call-2")
            assert parked["tool_calls"] == ("call-1", "call-2")
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            three = await read(engine.submit(after(history, "call-2")))
            assert three.done is not None
            assert three.done.usage.session_id == "s"
            assert three.done.usage.cached_tokens == len(history) - 1
            assert three.tokens == reference.tokens([*history, *words(18, 20)], 10)
            with pytest.raises(BatchEngineError) as error:
                await engine.park("", "nobody")
            assert error.value.http_status == 404

    run(work())


def test_a_fork_takes_the_tail_along(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    start = words(19, 400)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(request(start, 20, session="s")))
            for name in ("x", "y"):
                await engine.fork("", "s", name)
            for index, name in enumerate(("x", "y", "s")):
                prompt = [*start, *one.tokens, *words(30 + index, 9)]
                answer = await read(engine.submit(request(prompt, 12, session=name)))
                assert answer.tokens == reference.tokens(prompt, 12)
                assert answer.done is not None
                assert answer.done.usage.cached_tokens == 419

    run(work())


def test_another_model_keeps_the_tokens_and_says_so(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV of the old model is never used; a repeated request is computed, not told again."""
    start = words(21, 600)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir, WORKER_COMMAND) as engine:
            one = await read(engine.submit(request(start, 20, session="s")))
            assert one.tokens == hashlm_tokens(start, 20)
        monkeypatch.setenv("HASHLM_FAULTS", '{"model": "other"}')
        async with running_engine(pocket_path, tmp_path, cache_dir, WORKER_COMMAND) as engine:
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

    run(work())


def test_of_many_that_resume_at_once_the_newest_reads(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """A client that lost its connection several times: no reader waits for another's stream."""
    prompt = words(22, 40)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            await some(engine, request(prompt, 300, session="s"), 5)
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            readers = await asyncio.gather(*(engine.resume("", "s", at) for at in (1, 2, 3, 5)))
            answers = await asyncio.gather(*(read(reader) for reader in readers))
            assert answers[-1].tokens == reference.tokens(prompt, 300)[5:]
            for answer in answers[:-1]:
                assert answer.error is not None
                assert answer.error.api_code == "resumed_elsewhere"

    run(work())


def test_a_parked_session_says_so_until_it_goes_on(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """In memory, on disk, in the next life; and when it parks at the end of its turn."""
    prompt = words(90, 30)
    now_s = time.time()

    def seen(engine: Engine) -> tuple[object, object]:
        (row,) = [row for row in engine.sessions() if row["session_id"] == "s"]
        assert row["state"] != "parked" or abs(row["parked_since"] - now_s) < 600
        return row["state"], row.get("tool_call_id")

    async def stored(engine: Engine) -> tuple[object, object]:
        (row,) = await engine.stored_sessions(10)
        return row["state"], row.get("tool_call_id")

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(request(prompt, 4, session="s")))
            assert seen(engine) == ("idle", None)
            await engine.park("", "s", "call_1")
            assert seen(engine) == await stored(engine) == ("parked", "call_1")
            assert (await engine.session_detail("", "s"))["state"] == "parked"
            assert engine.explain("s")["state"] == "parked"
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            assert await stored(engine) == ("parked", "call_1")
            assert (await engine.session_detail("", "s"))["tool_call_id"] == "call_1"
            longer = [*prompt, *one.tokens, 5]
            generation = engine.submit(request(longer, 400, session="s"))
            await until(lambda: generation.completion_tokens > 3)
            assert seen(engine) == ("running", None)
            told = await engine.park("", "s", "call_2")
            assert told["state"] == "parks at the end of its turn"
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

    run(work())


def test_turns_of_one_commit_keep_their_order(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """The later one edited history at an earlier place: it is still the one that is resumed."""
    prompt = words(91, 30)
    other = [*prompt[:5], *words(92, 25)]

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            one = await read(engine.submit(request(prompt, 4, session="s")))
            await read(engine.submit(request([*prompt, *one.tokens, 5], 4, session="s")))
            last = request(other, 6, session="s")
            told = await read(engine.submit(last))
        with contextlib.closing(sqlite3.connect(tmp_path / "kv" / "meta.db")) as db, db:
            db.execute("UPDATE turn SET seq = (SELECT max(seq) FROM turn)")
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
            again = await engine.resume("", "s")
            assert again.request_id == last.request_id
            assert (await read(again)).tokens == told.tokens
            shown = (await engine.session_detail("", "s"))["turns"]
            assert [turn["prompt_tokens"] for turn in shown] == [30, 35, 30]
            assert shown[-1]["turn"] == last.request_id

    run(work())


def test_pages_that_vanished_are_not_called_evicted(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """The extent was lost between two lives: nobody evicted anything, and nobody says so."""
    start = words(93, 600)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir, WORKER_COMMAND) as engine:
            one = await read(engine.submit(request(start, 20, session="s")))
        for extent in (tmp_path / "kv" / "ext").iterdir():
            extent.unlink()
        longer = [*start, *one.tokens, 9]
        async with running_engine(pocket_path, tmp_path, cache_dir, WORKER_COMMAND) as engine:
            two = await read(engine.submit(request(longer, 20, session="s")))
            assert two.tokens == hashlm_tokens(longer, 20)
            assert two.done is not None
            assert two.done.usage.cached_tokens == 0
            assert two.done.usage.reuse_reason == "pages are no longer in the store"

    run(work())


def test_a_damaged_history_is_refused_with_one_way_out(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The row is for the log; the client hears what to do, once, and that it works."""
    start = words(94, 30)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir, WORKER_COMMAND) as engine:
            await read(engine.submit(request(start, 4, session="s")))
        with contextlib.closing(sqlite3.connect(tmp_path / "kv" / "meta.db")) as db, db:
            db.execute("UPDATE token_blob SET checksum = zeroblob(4)")
        async with running_engine(pocket_path, tmp_path, cache_dir, WORKER_COMMAND) as engine:
            refused = (await read(engine.submit(request(start, 4, session="s")))).error
            assert refused is not None
            assert (refused.code, refused.why) == ("BE2401", "the ledger file was damaged")
            assert "resend" not in str(refused)
            assert (await read(engine.submit(request(start, 4, session="other")))).error is None
        assert any("fail their checksum" in record.getMessage() for record in caplog.records)

    run(work())
