"""The engine over a real worker process and the pocket model: every answer is bit-identical."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import shutil
import signal
from typing import Any

import pytest

from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError, Kind, Sampling, TokenEvent
from batchengine.engine import Engine
from bench.processes.store_check import check_integrity
from kv_store.store import Store
from service.protocols.reading import READER
from tests.hostile.rewrite import edited
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

pytestmark = pytest.mark.usefixtures("own_threads")
PAGE_BYTES = 327_680  # of the pocket model's KV


async def test_batch_chunks_and_seeds_change_no_token(site: Site, reference: Reference) -> None:
    """Prompts of mixed lengths, in chunks of 48 and one batch, get the tokens of each alone."""
    jobs = [
        (words(i, n), Sampling(temperature=t, seed=i, top_p=p, repetition_penalty=r))
        for i, (n, t, p, r) in enumerate(
            [(1, 0, 1, 1), (5, 0, 1, 1), (255, 0.8, 0.9, 1), (256, 0, 1, 1.1), (257, 1.2, 1, 1),
             (700, 0, 1, 1), (300, 0.7, 0.95, 1.2), (33, 1.0, 1, 1)]
        )
    ]  # fmt: skip
    async with running_engine(
        site, lane__chunk_tokens_max=48, lane__entries_max=5, lane__tokens_per_step=64
    ) as engine:
        running = [engine.submit(request(p, 40, sampling=s)) for p, s in jobs]
        answers = await asyncio.gather(*(read(g) for g in running))
    assert all(a.reason == "length" for a in answers)
    assert [a.tokens for a in answers] == [reference.tokens(p, 40, s) for p, s in jobs]


async def test_a_chat_template_that_no_chat_can_use_is_a_trouble(site: Site) -> None:
    """The daemon serves on: plain completions need no template."""

    def edit(values: dict[str, Any], _: object) -> None:
        source = "{{ raise_exception('never') }}"
        values["tokenizer.chat_template"] = source, values["tokenizer.chat_template"][1]

    shutil.copyfile(site.model, site.folder / "m.gguf")
    own = dataclasses.replace(site, model=edited(site.folder / "m.gguf", edit))
    async with running_engine(own, reader=READER) as engine:
        assert engine.phase == "degraded"
        why = "the model's chat template refuses these messages: never; plain completions work"
        assert engine.stats()["troubles"] == engine.info.notes == [why]
        answer = await read(engine.submit(request(words(3, 40), 4)))
        assert answer.reason == "length"
    async with running_engine(site.at("other"), reader=READER) as engine:
        assert engine.phase == "ready"


async def test_a_daemon_whose_text_processes_cannot_start_does_not_start(site: Site) -> None:
    with pytest.raises(BatchEngineError) as refusal:
        async with running_engine(site, reader="tests.nowhere:READER"):
            pass
    assert refusal.value.code == "BE1507"
    assert "limits of memory" in refusal.value.fix


async def test_an_arena_that_cannot_be_made_is_an_error_of_the_store(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(Store, "create_arena", refuse)
    with pytest.raises(BatchEngineError) as refusal:
        async with running_engine(site):
            pass
    assert refusal.value.code == "BE1603"
    assert "lane cpu: File too large" in refusal.value.why


async def test_a_matched_prefix_changes_no_token(site: Site, reference: Reference) -> None:
    prompt = words(7, 1100)
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(prompt, 16)))
        assert first.done is not None
        assert first.done.usage.cached_tokens == 0
        await sealed(engine, 4)
        again = await read(engine.submit(request(prompt, 16)))
        branch = [*prompt[:600], *words(8, 50)]
        other = await read(engine.submit(request(branch, 16)))
        exact = await read(engine.submit(request(prompt[:512], 8)))
        foreign = await read(engine.submit(request(prompt, 16, tenant="someone")))
    assert again.done is not None
    assert other.done is not None
    assert exact.done is not None
    assert foreign.done is not None
    assert again.done.usage.cached_tokens == 1024
    assert other.done.usage.cached_tokens == 512
    assert exact.done.usage.cached_tokens == 256  # one token must remain to be computed
    assert foreign.done.usage.cached_tokens == 0  # another tenant shares nothing
    assert first.tokens == again.tokens == foreign.tokens == reference.tokens(prompt, 16)
    assert other.tokens == reference.tokens(branch, 16)
    assert exact.tokens == reference.tokens(prompt[:512], 8)


async def sealed(engine: Engine, pages: int) -> None:
    """Wait until that many pages were published and verified."""
    await until(lambda: int(engine.stats()["pages_sealed"]) >= pages)


async def test_a_named_session_keeps_its_kv_and_accepts_edits(
    site: Site, reference: Reference
) -> None:
    start = words(11, 300)
    async with running_engine(site) as engine:
        one = await read(engine.submit(request(start, 20, session="s")))
        longer = [*start, *one.tokens, *words(12, 30)]
        two = await read(engine.submit(request(longer, 20, session="s")))
        edited = [*start[:280], *words(13, 40)]
        three = await read(engine.submit(request(edited, 20, session="s")))
        assert one.done is not None
        assert two.done is not None
        assert three.done is not None
        assert two.done.usage.cached_tokens == 319  # all but the last generated token
        assert three.done.usage.cached_tokens in (256, 280)  # sealed by then or still open
        assert one.tokens == reference.tokens(start, 20)
        assert two.tokens == reference.tokens(longer, 20)
        assert three.tokens == reference.tokens(edited, 20)

    async with running_engine(site) as engine:
        again = await read(engine.submit(request(edited, 20, session="s")))
        assert again.done is not None
        assert again.done.usage.resumed_tokens == 20  # a repeated request is not computed
        assert again.tokens == three.tokens
        other = [*edited[:300], *words(14, 30)]
        four = await read(engine.submit(request(other, 20, session="s")))
        assert four.done is not None
        assert four.done.usage.cached_tokens >= 256  # from disk, verified
        assert four.tokens == reference.tokens(other, 20)


async def test_two_turns_of_one_session_run_one_after_the_other(
    site: Site, reference: Reference
) -> None:
    async with running_engine(site) as engine:
        prompts = [words(20 + i, 40) for i in range(3)]
        running = [engine.submit(request(p, 12, session="one")) for p in prompts]
        answers = await asyncio.gather(*(read(g) for g in running))
        assert [a.tokens for a in answers] == [reference.tokens(p, 12) for p in prompts]


@pytest.mark.parametrize("kills", [1, 3])
async def test_a_stream_survives_kill_9_of_the_worker(
    site: Site, reference: Reference, kills: int
) -> None:
    """It continues without repetition after kills during prefill and decode."""
    prompts = [words(30 + i, 200 + 150 * i) for i in range(3)]
    n = 120
    async with running_engine(site, lane__chunk_tokens_max=64) as engine:
        running = [engine.submit(request(p, n)) for p in prompts]
        tasks = [asyncio.ensure_future(read(g)) for g in running]
        for kill in range(kills):
            await until(lambda: running[0].completion_tokens > 25 * kill)  # noqa: B023
            os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        answers = await asyncio.gather(*tasks)
        assert [a.tokens for a in answers] == [reference.tokens(p, n) for p in prompts]
        assert engine.lanes()[0]["incarnation"] == kills + 1
        assert engine.phase == "ready"


async def test_a_cancel_frees_seat_slots_and_pages(site: Site) -> None:
    async with running_engine(site, lane__open_pages=20) as engine:
        generations = [engine.submit(request(words(i, 100), 4000)) for i in range(6)]
        async for event in generations[0]:
            if isinstance(event, TokenEvent):
                break
        for generation in generations:
            generation.cancel()
            generation.cancel()
        await until(lambda: not engine.state.turns)
        loop = engine.state.lanes[0]
        assert not loop.running
        assert not loop.waiting
        assert not loop.sessions
        assert loop.kv.slots.available == 20
        assert [e async for e in generations[1]] == []


async def test_two_hundred_concurrent_requests_are_answered(
    site: Site, reference: Reference
) -> None:
    prompts = [words(1000 + i, 5 + i % 37) for i in range(200)]
    async with running_engine(site) as engine:
        running = [engine.submit(request(p, 10)) for p in prompts]
        answers = await asyncio.gather(*(read(g) for g in running))
    assert [a.tokens for a in answers] == [reference.tokens(p, 10) for p in prompts]


async def test_preemption_for_lack_of_pages_changes_no_answer(
    site: Site, reference: Reference
) -> None:
    """Eight sessions of three pages are right on a store of sixteen pages and six open slots."""
    prompts = [words(50 + i, 700) for i in range(8)]
    async with running_engine(
        site, store__budget_bytes=16 * 327_680, lane__open_pages=6, lane__entries_max=4
    ) as engine:
        assert engine.stats()["store"]["pages_max"] == 16
        running = [engine.submit(request(p, 60)) for p in prompts]
        answers = await asyncio.gather(*(read(g) for g in running))
    assert all(a.reason == "length" for a in answers), answers
    assert [a.tokens for a in answers] == [reference.tokens(p, 60) for p in prompts]


async def test_idle_sessions_release_their_pages_when_the_store_is_full(
    site: Site, reference: Reference
) -> None:
    """Seven idle sessions that pin more pages than the store has can all be continued."""
    prompts = [words(120 + i, 800) for i in range(7)]
    async with running_engine(
        site, store__budget_bytes=16 * 327_680, lane__open_pages=10
    ) as engine:
        for i, prompt in enumerate(prompts):
            answer = await read(engine.submit(request(prompt, 10, session=f"s{i}")))
            assert answer.tokens == reference.tokens(prompt, 10)
        for i, prompt in enumerate(prompts):
            longer = [*prompt, *words(i, 300)]
            answer = await read(engine.submit(request(longer, 10, session=f"s{i}")))
            assert answer.tokens == reference.tokens(longer, 10)
        check_integrity(engine.running.store)


async def test_preemption_by_urgent_requests_changes_no_token(
    site: Site, reference: Reference
) -> None:
    slow = [words(70 + i, 60) for i in range(3)]
    fast = [words(80 + i, 40) for i in range(4)]
    async with running_engine(site, lane__entries_max=2) as engine:
        background = [engine.submit(request(p, 300, sla="batch")) for p in slow]
        tasks = [asyncio.ensure_future(read(g)) for g in background]
        await asyncio.sleep(0.1)
        urgent = [engine.submit(request(p, 30, sla="interactive")) for p in fast]
        answers = await asyncio.gather(*(read(g) for g in urgent))
        assert [a.tokens for a in answers] == [reference.tokens(p, 30) for p in fast]
        slow_answers = await asyncio.gather(*tasks)
        assert [a.tokens for a in slow_answers] == [reference.tokens(p, 300) for p in slow]


async def test_refusals_give_their_reason(site: Site) -> None:
    async with running_engine(
        site, limits__queue_max=2, lane__entries_max=1, sla__standard__patience_s=0
    ) as engine:
        context = engine.info.context_tokens
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(request(words(1, context), 1))
        assert caught.value.name == "context_length_exceeded"
        assert caught.value.kind is Kind.INVALID
        assert caught.value.details == {"n_prompt_tokens": context, "n_ctx": context}
        assert not engine.requests()
        for bad in ([], [-1], [2048]):
            with pytest.raises(BatchEngineError) as caught:
                engine.submit(request(bad, 1))
            assert caught.value.kind is Kind.INVALID
        with pytest.raises(BatchEngineError):
            engine.submit(request([1], 0))
        made = [engine.submit(request(words(1, 20), 9000)) for _ in range(2)]
        reading = [asyncio.ensure_future(read(g)) for g in made]
        await until(lambda: made[0].completion_tokens > 0)  # it has the only seat
        made.append(engine.submit(request(words(1, 20), 9000)))
        reading.append(asyncio.ensure_future(read(made[2])))
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(request(words(1, 20), 9000))
        assert caught.value.kind is Kind.UNAVAILABLE
        assert caught.value.retry_ms is not None
        stopping = asyncio.ensure_future(engine.stop(0.05))
        await asyncio.sleep(0)
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(request([1], 1))
        assert caught.value.kind is Kind.UNAVAILABLE
        await stopping
        answers = await asyncio.gather(*reading)
        assert {a.reason for a in answers} == {"shutdown"}


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({}, "a model that was trained for a longer context"),
        ({"limits__context_tokens": 512}, "a larger --ctx"),
        ({"store__budget_bytes": 18 * PAGE_BYTES}, "store.budget_bytes"),
    ],
    ids=["model", "setting", "store"],
)
async def test_a_prompt_that_is_too_long_says_what_bounds_the_context(
    site: Site, settings: dict[str, Any], fix: str
) -> None:
    async with running_engine(site, **settings) as engine:
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(request(words(1, engine.info.context_tokens), 1))
    assert caught.value.fix.startswith("shorten the prompt or max_tokens, or ")
    assert fix in caught.value.fix
    assert ("--ctx" in caught.value.fix) == (fix == "a larger --ctx")


async def test_a_request_that_never_began_gets_a_retryable_error_at_the_stop(site: Site) -> None:
    """A request that still waits for its session does not end with an empty answer."""
    async with running_engine(site) as engine:
        running = engine.submit(request(words(1, 20), 4000, session="s"))
        queued = engine.submit(request(words(2, 20), 50, session="s"))
        reading = [asyncio.ensure_future(read(g)) for g in (running, queued)]
        await until(lambda: running.completion_tokens > 0)
        await engine.stop(0.0)
        cut, never = await asyncio.gather(*reading)
        assert cut.reason == "shutdown"
        assert cut.tokens
        assert never.error is not None
        assert (never.error.kind, never.error.name) == (Kind.UNAVAILABLE, "draining")
        assert never.error.retry_ms is not None


async def test_a_stop_ends_the_backoff_before_a_restart(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(site) as engine:
        loop = engine.state.lanes[0]
        monkeypatch.setattr(loop.lane, "backoff_s", lambda: 300.0)
        loop.lane.kill("a test")
        await until(lambda: not loop.kv.slots.is_attached)
        async with asyncio.timeout(60):
            await engine.stop(0.0)


async def test_stop_strings_end_the_stream_and_are_not_sent(site: Site) -> None:
    async with running_engine(site) as engine:
        prompt = await engine.text.encode_chat(
            [{"role": "user", "content": "Copy: the red fox and the blue bird"}]
        )
        whole = await read(engine.submit(request(prompt, 40)))
        middle = whole.text[len(whole.text) // 2 :][:4]
        assert len(middle) == 4
        cut = await read(engine.submit(request(prompt, 40, stop=(middle,))))
        assert cut.reason == "stop"
        assert cut.text == whole.text[: whole.text.index(middle)]
        assert whole.tokens[: len(cut.tokens)] == cut.tokens


async def test_logprobs_and_usage_are_reported(site: Site) -> None:
    async with running_engine(site) as engine:
        answer = await read(engine.submit(request(words(3, 30), 5, sampling=Sampling(logprobs=4))))
        tokens = [e for e in answer.events if isinstance(e, TokenEvent)]
        assert len(tokens) == 5
        for event in tokens:
            assert event.logprob is not None
            assert event.logprob.token == event.token
            assert event.logprob.logprob <= 0.0
            assert [t.logprob for t in event.top] == sorted(
                (t.logprob for t in event.top), reverse=True
            )
            assert len(event.top) == 4
            assert event.top[0].token == event.token  # greedy
        assert answer.done is not None
        usage = answer.done.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (30, 5)
        assert 0 <= usage.queue_ms <= usage.ttft_ms <= usage.total_ms
        assert usage.lane == "cpu"


async def test_a_fact_is_recalled_over_five_thousand_tokens(site: Site) -> None:
    """A wrong page would lose the fact at the start."""
    async with running_engine(site) as engine:
        messages = [
            {"role": "user", "content": "Remember this: The code for banana is 4829."},
            {"role": "assistant", "content": "OK."},
        ]
        while True:
            for ask, answer in (("3 + 4?", "7"), ("What is 12 + 5?", "17")):
                messages.append({"role": "user", "content": ask})
                messages.append({"role": "assistant", "content": answer})
            if len(messages) % 40 == 2 and len(await engine.text.encode_chat(messages)) > 5000:
                break
        messages.append({"role": "user", "content": "What is the code for banana?"})
        prompt = await engine.text.encode_chat(messages)
        assert len(prompt) > 5000
        for session in ("recall", "recall", None):
            answer = await read(
                engine.submit(request(prompt, 30, session=session, ignore_eos=False))
            )
            assert answer.reason == "stop"
            assert "4829" in answer.text, answer.text


async def test_sessions_never_use_rows_of_each_other(site: Site, reference: Reference) -> None:
    """Two sessions with histories of the same length are computed in turn."""
    base = {name: words(90 + i, 290) for i, name in enumerate(("a", "b"))}
    async with running_engine(site) as engine:
        history = {name: list(tokens) for name, tokens in base.items()}
        for _ in range(4):
            answers = await asyncio.gather(
                *(read(engine.submit(request(h, 9, session=s))) for s, h in history.items())
            )
            for (name, timeline), answer in zip(history.items(), answers, strict=True):
                assert answer.tokens == reference.tokens(timeline, 9), name
                timeline += answer.tokens + words(ord(name), 21)


async def test_two_lanes_share_pages_and_give_equal_tokens(
    site: Site, reference: Reference
) -> None:
    """A lane reads pages that another lane sealed, and survives that lane's death."""
    prompts = [words(140 + i, 600) for i in range(4)]
    lanes = (LaneConfig(name="a", threads=1), LaneConfig(name="b", threads=1))
    async with running_engine(site, lanes=lanes) as engine:
        first = await asyncio.gather(*(read(engine.submit(request(p, 9))) for p in prompts))
        await sealed(engine, 8)
        again = [engine.submit(request(p, 200)) for p in reversed(prompts)]
        tasks = [asyncio.ensure_future(read(g)) for g in again]
        await until(lambda: again[0].completion_tokens > 5)
        os.kill(int(engine.lanes()[1]["pid"]), signal.SIGKILL)
        second = await asyncio.gather(*tasks)
        expected = [reference.tokens(p, 200) for p in prompts]
        assert [a.tokens for a in first] == [e[:9] for e in expected]
        assert [a.tokens for a in reversed(second)] == expected
        used = {a.done.usage.lane for a in first if a.done}
        assert used == {"a", "b"}
        assert {a.done.usage.cached_tokens for a in second if a.done} == {512}


async def test_shutdown_ends_named_streams_with_a_reason(site: Site, reference: Reference) -> None:
    """The tokens sent before a stop are in the ledger, and the next engine continues them."""
    prompt = words(150, 30)
    async with running_engine(site) as engine:
        _, task = await started(engine, request(prompt, 5000, session="s"), 20)
        await engine.stop(0.0)
        answer = await task
        assert answer.reason == "shutdown"
        assert answer.tokens == reference.tokens(prompt, len(answer.tokens))
    async with running_engine(site) as engine:
        assert engine.running.store is not None
        record = engine.running.store.ledger.load_session("\x1fs").result()
        assert record is not None
        assert record.tokens[: 30 + len(answer.tokens)] == prompt + answer.tokens
        assert [turn.finish_reason for turn in record.turns] == ["shutdown"]
