"""Repeated turns: resumed, sent again, taken over; in one engine and the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sqlite3
from typing import Any

import msgspec
import pytest

from batchengine.core import (
    FORM_CHAT,
    FORM_TEXT,
    BatchEngineError,
    GenerationRequest,
    Kind,
    Sampling,
    SkippedEvent,
    TokenEvent,
)
from batchengine.engine import Engine
from batchengine.engine import boot as engine_start
from batchengine.engine.turns.records import TurnRecord, encode, turn_record
from tests.support.engines import (
    Answer,
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    unread,
    until,
    words,
)

WARM = Sampling(temperature=0.8, seed=11)


async def some(engine: Engine, asked: GenerationRequest, tokens: int) -> list[int]:
    """Read so many tokens, then disconnect."""
    generation = engine.submit(asked)
    seen: list[int] = []
    async for event in generation:
        if isinstance(event, TokenEvent):
            seen.append(event.token)
        if len(seen) == tokens:
            break
    generation.cancel()
    await until(lambda: not engine.state.lines)
    return seen


async def resumed(engine: Engine, session: str, from_token: int = 0, turn_id: str = "") -> Answer:
    return await read(await engine.resume("", session, from_token, turn_id))


async def test_a_stream_without_a_reader_is_resumed_at_its_position(
    site: Site, reference: Reference
) -> None:
    """The text from the resumed token on equals the original, in this engine and the next."""
    prompt = words(1, 300)
    whole = reference.tokens(prompt, 60, WARM)
    async with running_engine(site) as engine:
        other = await read(engine.submit(request(prompt, 60, sampling=WARM)))
        asked = request(prompt, 60, session="s", sampling=WARM)
        seen = await some(engine, asked, 10)
        assert seen == whole[:10]
        record = await asyncio.wrap_future(engine.running.store.ledger.load_session("\x1fs"))
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
    async with running_engine(site) as engine:
        assert (await resumed(engine, "s", 3)).tokens == whole[3:]
        assert (await resumed(engine, "s", 60)).tokens == []


async def test_no_turn_is_sent_as_the_rest_of_another(site: Site, reference: Reference) -> None:
    """A resume is refused when another request has continued the session since."""
    prompt = words(6, 60)
    whole = reference.tokens(prompt, 40)
    other = [*prompt, *whole, *words(7, 9)]

    async def refused(engine: Engine, turn_id: str, why: str) -> None:
        with pytest.raises(BatchEngineError) as caught:
            await engine.resume("", "s", 10, turn_id)
        assert (caught.value.name, caught.value.kind) == ("turn_followed", Kind.CONFLICT)
        assert why in caught.value.why

    async with running_engine(site) as engine:
        asked = request(prompt, 40, session="s")
        assert await some(engine, asked, 10) == whole[:10]
        first = asked.request_id
        again = engine.submit(request(prompt, 40, session="s"))  # continues the same turn
        assert (await read(again)).tokens == whole
        assert again.request_id != again.turn_id == first
        assert (await resumed(engine, "s", 10, first)).tokens == whole[10:]
        running, reader = await started(engine, request(other, 200, session="s"), 5)
        await refused(engine, first, "followed it")
        answer = await reader
        assert answer.tokens == reference.tokens(other, 200)
        assert running.turn_id == running.request_id
    async with running_engine(site) as engine:
        await refused(engine, first, "followed it")
        await refused(engine, "req_lost", "no longer holds that turn")
        rest = await resumed(engine, "s", 10, running.turn_id)
        assert rest.tokens == answer.tokens[10:]


async def test_a_turn_that_begins_while_another_is_resumed_continues(
    site: Site, reference: Reference
) -> None:
    """A resume of a turn that is not durable yet waits, and neither ends the turn nor sends it."""
    prompt = words(8, 60)
    async with running_engine(site) as engine:
        one = engine.submit(request(prompt, 10, session="s"))
        received = (await read(one)).tokens
        other = [*prompt, *received, 5]
        found = await engine.running.recovery.record("", "s")
        _, reader = await started(engine, request(other, 60, session="s"), 5)
        real = engine.running.recovery.record

        async def before(*_: str) -> Any:
            engine.running.recovery.record = real  # type: ignore[method-assign]
            return found

        engine.running.recovery.record = before  # type: ignore[method-assign]
        late = await resumed(engine, "s", 5, one.turn_id)
        assert late.error is not None
        assert (late.error.name, late.tokens) == ("turn_followed", [])
        assert (await reader).tokens == reference.tokens(other, 60)


async def test_a_turn_ended_by_a_shutdown_continues_after_it(
    site: Site, reference: Reference
) -> None:
    prompt = words(2, 40)
    async with running_engine(site) as engine:
        generation = engine.submit(request(prompt, 400, session="s"))
        await until(lambda: generation.completion_tokens > 20)
        await engine.stop(0.0)
        cut = await read(generation)
        assert cut.reason == "shutdown"
        assert 20 < len(cut.tokens) < 400
    async with running_engine(site) as engine:
        rest = await resumed(engine, "s", len(cut.tokens))
        assert cut.tokens + rest.tokens == reference.tokens(prompt, 400)
        assert rest.reason == "length"
        received, there = (await engine.why("", "s"))["last"], len(prompt) + len(cut.tokens)
        assert (received["prompt_tokens"], received["tokens_reused"]) == (there, there - 1)


async def test_a_running_turn_is_taken_over_by_the_newest_reader(
    site: Site, reference: Reference
) -> None:
    prompt = words(3, 40)
    async with running_engine(site) as engine:
        first = await unread(engine, request(prompt, 520, session="s", sampling=WARM), 30)
        second = await engine.resume("", "s", 0)
        answer = await read(second)
        lost = await read(first)
        assert lost.error is not None
        assert lost.error.name == "resumed_elsewhere"
        assert answer.tokens == reference.tokens(prompt, 520, WARM)


async def test_a_resumed_turn_has_the_format_of_its_request(site: Site) -> None:
    asked = dataclasses.replace(request(words(5, 20), 8, session="s"), form=FORM_TEXT)
    async with running_engine(site) as engine:
        await read(engine.submit(asked))
    async with running_engine(site) as engine:
        again = await engine.resume("", "s")
        assert again.request.form == FORM_TEXT
        assert len((await read(again)).tokens) == 8
    older = encode(TurnRecord.of(asked)).replace(f',"form":"{FORM_TEXT}"', "")
    known = turn_record(older)
    assert known is not None
    assert "form" not in older
    assert known.form == FORM_CHAT


def test_the_ledger_keeps_every_sampling_field_by_name() -> None:
    sampling = Sampling(temperature=0.5, seed=2**64 - 1, logit_bias=((7, -1.5),))
    record = TurnRecord(sampling, 9)
    text = encode(record)
    assert text == (
        '{"sampling":{"temperature":0.5,"top_k":0,"top_p":1.0,"min_p":0.0,'
        '"repetition_penalty":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,'
        '"penalty_tokens":256,"seed":18446744073709551615,"logprobs":-1,'
        '"logit_bias":[[7,-1.5]],"tokens_min":0},"tokens_max":9}'
    )
    assert turn_record(text) == record
    newer = text.replace('"top_k":0', '"top_k":0,"of_a_later_version":1')
    assert turn_record(newer) == record


async def test_an_impossible_resume_is_refused_with_a_reason(site: Site) -> None:
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(4, 9), 5, session="s", tenant="a")))
        for tenant, session, at, code in [
            ("", "s", 0, "session_not_found"),
            ("a", "t", 0, "session_not_found"),
            ("a", "s", 6, "invalid_value"),
            ("a", "s", -1, "invalid_value"),
        ]:
            with pytest.raises(BatchEngineError) as error:
                await engine.resume(tenant, session, at)
            assert error.value.name == code
        assert (await read(await engine.resume("a", "s"))).reason == "length"


async def test_a_repeated_request_is_answered_from_the_ledger(
    site: Site, reference: Reference
) -> None:
    """Also in the next engine; with a longer limit the turn continues."""
    prompt = words(5, 60)
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(prompt, 20, session="s", sampling=WARM)))
        steps = engine.lanes()[0]["steps"]
        again = await read(engine.submit(request(prompt, 20, session="s", sampling=WARM)))
        assert again.tokens == first.tokens == reference.tokens(prompt, 20, WARM)
        assert again.text == first.text
        assert engine.lanes()[0]["steps"] == steps
    async with running_engine(site) as engine:
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


async def test_one_idempotency_key_is_one_execution(site: Site, reference: Reference) -> None:
    """Many retries, each with a random seed, all receive the answer of the first."""
    prompt = words(6, 50)

    def keyed(seed: int, key: str = "k", text: list[int] = prompt) -> GenerationRequest:
        made = request(text, 30, sampling=Sampling(temperature=0.9, seed=seed))
        return dataclasses.replace(made, idempotency_key=key)

    async with running_engine(site) as engine:
        storm = [engine.submit(keyed(seed)) for seed in range(8)]
        answers = await asyncio.gather(*(read(g) for g in storm))
        expected = reference.tokens(prompt, 30, Sampling(temperature=0.9, seed=0))
        assert [a.tokens for a in answers] == [expected] * 8
        assert sum(loop.meter.generated for loop in engine.state.lanes) == 30
        conflict = await read(engine.submit(keyed(0, text=words(7, 50))))
        assert conflict.error is not None
        assert conflict.error.name == "idempotency_conflict"
    async with running_engine(site) as engine:
        late = await read(engine.submit(keyed(99)))
        assert late.tokens == expected
        assert sum(loop.meter.generated for loop in engine.state.lanes) == 0


async def test_one_idempotency_key_is_one_request(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A key with other limits or sampling is refused, but not one with another random seed."""
    caplog.set_level(logging.INFO)
    prompt = words(26, 50)

    def keyed(n: int, seed: int, **other: Any) -> GenerationRequest:
        sampling = msgspec.structs.replace(WARM, seed=seed, **other)
        made = request(prompt, n, session="s", sampling=sampling)
        return dataclasses.replace(made, idempotency_key="k")

    async with running_engine(site) as engine:
        one = await read(engine.submit(keyed(10, 1)))
        for asked in (
            keyed(40, 1),
            keyed(5, 1),
            keyed(10, 1, temperature=0.5),
            dataclasses.replace(keyed(10, 1), stop=("x",)),
            dataclasses.replace(keyed(10, 1), ignore_eos=False),
            dataclasses.replace(keyed(10, 2), has_seed=True),
            dataclasses.replace(keyed(10, 1), choices=2),
        ):
            other = await read(engine.submit(asked))
            assert other.error is not None
            assert (other.error.kind, other.tokens) == (Kind.CONFLICT, [])
            assert other.error.name == "idempotency_conflict"
        again = await read(engine.submit(keyed(10, 2, logprobs=0)))
        assert again.tokens == one.tokens
        lines = [one for one in caplog.records if "cannot begin" in one.getMessage()]
        assert [one.levelno for one in lines] == [logging.INFO] * 7  # not errors of the daemon
        seeded = dataclasses.replace(keyed(10, 1), has_seed=True)
        assert (await read(engine.submit(seeded))).tokens == one.tokens
        assert sum(loop.meter.generated for loop in engine.state.lanes) == 10


async def test_a_retried_turn_continues_with_its_first_seed(
    site: Site, reference: Reference
) -> None:
    """The seed is in the record; otherwise a resume would mix two seeds."""
    prompt = words(27, 50)
    whole = reference.tokens(prompt, 40, WARM)

    def keyed(seed: int) -> GenerationRequest:
        sampling = msgspec.structs.replace(WARM, seed=seed)
        made = request(prompt, 40, session="s", sampling=sampling)
        return dataclasses.replace(made, idempotency_key="k")

    async with running_engine(site) as engine:
        assert await some(engine, keyed(WARM.seed), 5) == whole[:5]
        assert await some(engine, keyed(99), 15) == whole[:15]
    async with running_engine(site) as engine:
        assert (await read(engine.submit(keyed(100)))).tokens == whole
        assert (await resumed(engine, "s", 3)).tokens == whole[3:]


async def test_an_older_idempotency_key_is_answered_while_its_tokens_exist(
    site: Site, reference: Reference
) -> None:
    start = words(8, 40)

    def keyed(prompt: list[int], key: str) -> GenerationRequest:
        return dataclasses.replace(request(prompt, 10, session="s"), idempotency_key=key)

    async with running_engine(site) as engine:
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
        assert gone.error.name == "idempotency_conflict"


async def test_a_session_is_not_read_under_another_tokenizer_and_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn can be resumed once the right model is back; until then its ids have no meaning: no
    request is appended to them, and they are not shown as text."""
    prompt = words(28, 50)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(prompt, 10, session="s")))
    with monkeypatch.context() as patch:
        patch.setattr(engine_start, "tokenizer_hash", lambda _: "f" * 64)
        async with running_engine(site) as engine:
            with pytest.raises(BatchEngineError) as refusal:
                await engine.resume("", "s", 4)
            assert (refusal.value.kind, refusal.value.name) == (Kind.CONFLICT, "nothing_to_resume")
            added = dataclasses.replace(request([], 4, session="s"), append=(7, 8))
            for asked in (engine.begin(added), engine.messages("", "s")):
                with pytest.raises(BatchEngineError) as refusal:
                    await asked
                assert refusal.value.name == "session_of_other_model"
            assert ("", "s") not in engine.state.sessions
            found = await asyncio.wrap_future(engine.running.store.ledger.load_session("\x1fs"))
            assert found is not None
            assert found.tokens == prompt + one.tokens
    async with running_engine(site) as engine:
        assert (await resumed(engine, "s", 4)).tokens == one.tokens[4:]


async def test_of_many_concurrent_resumes_the_newest_gets_the_stream(
    site: Site, reference: Reference
) -> None:
    """Each newer reader takes the stream over, and no reader waits for another."""
    prompt = words(22, 40)
    async with running_engine(site) as engine:
        await some(engine, request(prompt, 300, session="s"), 5)
    async with running_engine(site) as engine:
        readers = await asyncio.gather(*(engine.resume("", "s", at) for at in (1, 2, 3, 5)))
        answers = await asyncio.gather(*(read(reader) for reader in readers))
        assert answers[-1].tokens == reference.tokens(prompt, 300)[5:]
        for answer in answers[:-1]:
            assert answer.error is not None
            assert answer.error.name == "resumed_elsewhere"


async def test_turns_of_one_commit_keep_their_order(site: Site) -> None:
    """The later turn is resumed although it edited history at an earlier position."""
    prompt = words(91, 30)
    other = [*prompt[:5], *words(92, 25)]
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(prompt, 4, session="s")))
        await read(engine.submit(request([*prompt, *one.tokens, 5], 4, session="s")))
        last = request(other, 6, session="s")
        received = await read(engine.submit(last))
    with contextlib.closing(sqlite3.connect(site.folder / "kv" / "meta.db")) as db, db:
        db.execute("UPDATE turn SET seq = (SELECT max(seq) FROM turn)")
    async with running_engine(site) as engine:
        again = await engine.resume("", "s")
        assert again.request_id == last.request_id
        assert (await read(again)).tokens == received.tokens
        shown = (await engine.session_detail("", "s"))["turns"]
        assert [turn["prompt_tokens"] for turn in shown] == [30, 35, 30]
        assert shown[-1]["turn"] == last.request_id


async def test_an_unread_resume_of_a_finished_turn_costs_few_events(site: Site) -> None:
    """Events are made while the reader takes them, and the session is free meanwhile."""
    async with running_engine(site) as engine:
        prompt = words(7, 40)
        whole = await read(engine.submit(request(prompt, 700, session="s")))
        unread = []
        for known in (0, 0, 650):
            unread.append(generation := await engine.resume("", "s", known))
            await until(lambda generation=generation: generation.finished)
        after = await read(engine.submit(request([*prompt, *whole.tokens, 9], 4, session="s")))
        assert len(after.tokens) == 4
        for generation, known in zip(unread, (0, 0, 650), strict=True):
            batches: list[list[Any]] = []
            while batch := await generation.events():
                batches.append(batch)
            assert max(map(len, batches)) <= 256
            events = [event for batch in batches for event in batch]
            events = [event for event in events if not isinstance(event, SkippedEvent)]
            assert [e.token for e in events[:-1]] == whole.tokens[known:]
            assert "".join(e.text for e in events) == "".join(e.text for e in whole.events[known:])
