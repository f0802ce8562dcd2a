"""Families of timelines on a real engine: forks, edits, retries, and the next run."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, GenerationRequest, Sampling, TimelineUse
from batchengine.engine import Engine
from batchengine.engine.sessions.timelines.outline import MARKS_MAX, Outline, Outlines
from batchengine.policy.timelines.choice import MEMBERS_MAX
from batchengine.session import Session
from batchengine.text.vocab import Tokenizer
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    until,
    words,
)


def of_family(prompt: list[int], tokens_max: int = 8, **more: Any) -> GenerationRequest:
    asked = request(prompt, tokens_max, session="s")
    return dataclasses.replace(asked, in_family=True, **more)


async def asks(engine: Engine, prompt: list[int], **more: Any) -> tuple[Any, Any]:
    """The generation and its answer."""
    generation = await engine.begin(of_family(prompt, **more))
    return generation, await read(generation)


def use_of(generation: Any) -> TimelineUse:
    assert generation.request.found is not None
    return generation.request.found.use


async def test_another_prompt_forks_and_each_timeline_goes_on(
    site: Site, reference: Reference
) -> None:
    """Also in the next run of the engine; nothing that was said is lost."""
    first, title = words(1, 600), words(2, 80)
    async with running_engine(site) as engine:
        main, answer = await asks(engine, first)
        assert (main.session_id, use_of(main)) == ("s", TimelineUse.NEW)
        other, named = await asks(engine, title)
        assert (other.session_id, use_of(other)) == ("s.2", TimelineUse.FORKED)
        assert named.tokens == reference.tokens(title, 8)
        again = [*first, *answer.tokens, *words(3, 9)]
        more, answer = await asks(engine, again)
        assert (more.session_id, use_of(more)) == ("s", TimelineUse.CONTINUED)
        assert answer.tokens == reference.tokens(again, 8)
        assert more.cached_tokens >= len(first) + 7
        assert engine.timelines("", "s") == ["s.2", "s"]
        assert engine.timelines("", "s.2") == ["s.2"]
        assert engine.timelines("", "s.1") == ["s"]
    async with running_engine(site) as engine:
        once_more = [*again, *answer.tokens, *words(4, 9)]
        more, answer = await asks(engine, once_more)
        assert (more.session_id, use_of(more)) == ("s", TimelineUse.CONTINUED)
        assert answer.tokens == reference.tokens(once_more, 8)
        follows = [*title, *named.tokens, *words(5, 9)]
        other, _ = await asks(engine, follows)
        assert (other.session_id, use_of(other)) == ("s.2", TimelineUse.CONTINUED)
        assert other.cached_tokens >= len(title) + 7


async def test_a_request_beside_a_running_turn_neither_waits_nor_rewrites(
    site: Site, reference: Reference
) -> None:
    first, title = words(1, 300), words(2, 80)
    async with running_engine(site) as engine:
        generation = await engine.begin(of_family(first, 90))
        await until(lambda: generation.completion_tokens > 3)
        other, named = await asks(engine, title)
        assert other.session_id == "s.2"
        assert named.tokens == reference.tokens(title, 8)
        beside, parallel = await asks(engine, first)
        assert (beside.session_id, use_of(beside)) == ("s.3", TimelineUse.FORKED)
        assert parallel.tokens == reference.tokens(first, 8)
        assert beside.cached_tokens >= 256
        assert not generation.finished
        answer = await read(generation)
        assert answer.tokens == reference.tokens(first, 90)


async def test_a_stream_is_resumed_in_the_timeline_of_its_turn(site: Site) -> None:
    """Without a turn it is the main timeline; a refusal is that of the timeline of the turn."""
    async with running_engine(site) as engine:
        first = words(1, 300)
        _, begun = await asks(engine, first)
        title, named = await asks(engine, words(2, 80))
        main, answer = await asks(engine, [*first, *begun.tokens, *words(3, 9)])
        assert engine.timelines("", "s") == ["s.2", "s"]
        main_turn, title_turn = main.request.request_id, title.request.request_id
        for turn, expected in (("", answer), (main_turn, answer), (title_turn, named)):
            again = await engine.resume("", "s", 0, turn)
            assert (await read(again)).tokens == expected.tokens
        with pytest.raises(BatchEngineError) as caught:
            await engine.resume("", "s", 9999, title_turn)
        assert caught.value.code == errors.FROM_TOKEN_OUTSIDE.code
        with pytest.raises(BatchEngineError) as caught:
            await engine.resume("", "s", 0, "no turn")
        assert caught.value.code == errors.TURN_FOLLOWED.code


async def test_an_edit_of_the_last_part_stays_in_its_timeline(site: Site) -> None:
    first = words(1, 600)
    async with running_engine(site) as engine:
        _, answer = await asks(engine, first)
        edited, _ = await asks(engine, [*first[:580], *words(6, 20)])
        assert (edited.session_id, use_of(edited)) == ("s", TimelineUse.EDITED)
        assert edited.request.found.cut == 20 + len(answer.tokens)
        back, _ = await asks(engine, [*first[:100], *words(7, 20)])
        assert (back.session_id, use_of(back)) == ("s.2", TimelineUse.FORKED)


async def test_a_retry_takes_the_running_turn_over(site: Site, reference: Reference) -> None:
    """What was computed is not computed again, and the answer is the same."""
    first = words(1, 300)
    async with running_engine(site) as engine:
        generation = await engine.begin(of_family(first, 60))
        await until(lambda: generation.completion_tokens > 20)
        retry, answer = await asks(engine, first, tokens_max=60, is_retry=True)
        assert retry.session_id == "s"
        assert (await read(generation)).error is not None
        assert answer.tokens == reference.tokens(first, 60)
        assert answer.done is not None
        assert answer.done.usage.resumed_tokens > 20
        assert engine.timelines("", "s") == ["s"]


async def test_a_retry_of_a_turn_that_was_cut_goes_on_with_its_seed(
    site: Site, reference: Reference
) -> None:
    """A client without a seed gets another one at each attempt; the answer began with the first."""
    first, warm = words(1, 100), Sampling(temperature=0.8, seed=11)
    async with running_engine(site) as engine:
        generation = await engine.begin(of_family(first, 40, sampling=warm))
        await until(lambda: generation.completion_tokens > 5)
        generation.cancel()
        await until(lambda: not engine.state.lines)
        other = Sampling(temperature=0.8, seed=12)
        _, answer = await asks(engine, first, tokens_max=40, sampling=other, is_retry=True)
        assert answer.tokens == reference.tokens(first, 40, warm)
        assert answer.done is not None
        assert answer.done.usage.seed == 11  # which is what the client can send to repeat it


async def test_a_repeat_without_a_stream_takes_the_running_stream_over(
    site: Site, reference: Reference
) -> None:
    """Its client got no end of the stream, through a proxy that keeps the connection."""
    first, warm = words(1, 100), Sampling(temperature=0.8, seed=11)
    other = Sampling(temperature=0.8, seed=12)
    async with running_engine(site) as engine:
        asked = of_family(first, 40, sampling=warm, attempt="body", streams=True)
        generation = await engine.begin(asked)
        await until(lambda: generation.completion_tokens > 5)
        repeat, answer = await asks(engine, first, tokens_max=40, sampling=other, attempt="body")
        assert repeat.session_id == "s"
        assert answer.tokens == reference.tokens(first, 40, warm)
        assert (await read(generation)).error is not None


async def test_a_turn_that_was_taken_over_is_taken_over_again(
    site: Site, reference: Reference
) -> None:
    """By a library's retry, then by a repeat without a stream, while no client is seen to leave."""
    first, more = words(1, 100), {"attempt": "body", "tokens_max": 60}
    async with running_engine(site) as engine:
        generation = await engine.begin(of_family(first, streams=True, **more))
        await until(lambda: generation.completion_tokens > 5)
        retry = await engine.begin(of_family(first, streams=True, is_retry=True, **more))
        await until(lambda: retry.resumed_tokens > 5)
        repeat, answer = await asks(engine, first, **more)
        assert repeat.session_id == "s"
        assert answer.tokens == reference.tokens(first, 60)
        for left in (generation, retry):
            assert (await read(left)).error is not None


async def test_one_idempotency_key_is_one_prompt_of_a_family(site: Site) -> None:
    """While the first request runs, after it, in the next run, and whatever the timeline."""
    prompt, other = words(1, 300), words(2, 80)

    async def refused(engine: Engine) -> None:
        with pytest.raises(BatchEngineError) as caught:
            await asks(engine, other, idempotency_key="k")
        assert caught.value.code == errors.OTHER_REQUEST_OF_KEY.code
        assert engine.timelines("", "s") == ["s"]

    async with running_engine(site) as engine:
        first = await engine.begin(of_family(prompt, 60, idempotency_key="k"))
        await until(lambda: first.completion_tokens > 3)
        await refused(engine)
        answer = await read(first)
        await refused(engine)
        _, again = await asks(engine, prompt, tokens_max=60, idempotency_key="k")
        assert again.tokens == answer.tokens
    async with running_engine(site) as engine:
        await refused(engine)
        await asks(engine, other, idempotency_key="k2")
        _, again = await asks(engine, prompt, tokens_max=60, idempotency_key="k")
        assert again.tokens == answer.tokens
        assert engine.timelines("", "s") == ["s.2", "s"]


@pytest.mark.parametrize("more", [{"is_retry": True}, {"attempt": "body"}])
async def test_of_two_that_ask_the_same_none_is_taken_over(
    site: Site, reference: Reference, more: dict[str, Any]
) -> None:
    """Samples that a client takes side by side: each has its answer, also the one sent again."""
    first, seeds = words(1, 100), (11, 12, 13)
    async with running_engine(site) as engine:
        warm = [Sampling(temperature=0.8, seed=seed) for seed in seeds]
        both = [
            await engine.begin(of_family(first, 40, sampling=one, attempt="body", streams=True))
            for one in warm[:2]
        ]
        await until(lambda: all(one.completion_tokens > 2 for one in both))
        _, answer = await asks(engine, first, tokens_max=40, sampling=warm[2], **more)
        answers = [*[await read(one) for one in both], answer]
        for one, sampling in zip(answers, warm, strict=True):
            assert one.tokens == reference.tokens(first, 40, sampling)


async def test_a_retry_with_other_parameters_is_another_request(
    site: Site, reference: Reference
) -> None:
    first = words(1, 100)
    async with running_engine(site) as engine:
        generation = await engine.begin(of_family(first, 60))
        await until(lambda: generation.completion_tokens > 5)
        retry, answer = await asks(engine, first, tokens_max=8, is_retry=True)
        assert retry.session_id == "s.2"
        assert answer.tokens == reference.tokens(first, 8)
        assert (await read(generation)).tokens == reference.tokens(first, 60)


async def test_a_flood_of_conversations_is_bounded(site: Site) -> None:
    """One id for everything: the long conversation stays, and no request is refused."""
    first = words(1, 600)
    async with running_engine(site) as engine:
        await asks(engine, first)
        for seed in range(100, 100 + MEMBERS_MAX + 4):
            await asks(engine, words(seed, 20), tokens_max=2)
        assert len(engine.timelines("", "s")) == MEMBERS_MAX
        more, _ = await asks(engine, [*first, *words(3, 9)])
        assert more.session_id == "s"
        held = [
            engine.submit(request(words(1, 5), 400, session=one))
            for one in engine.timelines("", "s")
        ]
        beside, answer = await asks(engine, words(9, 20))
        assert use_of(beside) is TimelineUse.UNNAMED
        assert len(answer.tokens) == 8
        for generation in held:
            generation.cancel()


async def test_tenants_have_families_of_their_own(site: Site) -> None:
    async with running_engine(site) as engine:
        await asks(engine, words(1, 40))
        other = dataclasses.replace(of_family(words(1, 40)), tenant="b")
        generation = await engine.begin(other)
        await read(generation)
        assert use_of(generation) is TimelineUse.NEW
        await asks(engine, words(2, 40))
        assert set(engine.timelines("", "s")) == {"s", "s.2"}
        assert engine.timelines("b", "s") == ["s"]


async def test_a_dropped_timeline_leaves_its_family(site: Site) -> None:
    async with running_engine(site) as engine:
        await asks(engine, words(1, 40))
        await asks(engine, words(2, 40))
        await engine.drop("", "s")
        assert engine.timelines("", "s") == ["s.2"]
        generation, _ = await asks(engine, words(1, 40))
        assert generation.session_id == "s.3"
        await engine.drop("", "s.2")
        await engine.drop("", "s.3")
        with pytest.raises(BatchEngineError):
            await engine.drop("", "s")
        generation, _ = await asks(engine, words(1, 40))
        assert use_of(generation) is TimelineUse.NEW


async def test_the_open_page_of_an_idle_timeline_is_shared_too(site: Site) -> None:
    """A fork begins with all that it has in common, not with whole pages of it."""
    first = words(1, 200)
    async with running_engine(site) as engine:
        await asks(engine, first)
        fork, _ = await asks(engine, [*first[:90], *words(2, 150)])
        assert use_of(fork) is TimelineUse.FORKED
        assert fork.cached_tokens == 90
        child = dataclasses.replace(
            request([*first[:120], *words(4, 30)], 8, session="child"),
            in_family=True,
            parent_id="s",
        )
        generation = await engine.begin(child)
        await read(generation)
        assert generation.cached_tokens == 120
        families = {row["session_id"]: row["family"] for row in engine.sessions()}
        assert families == {"s": "s", "s.2": "s", "child": "child"}
        await asks(engine, [*first[:120], *words(4, 30)])
    async with running_engine(site) as engine:
        rows = await engine.stored_sessions(9)
        assert families.items() <= {row["session_id"]: row["family"] for row in rows}.items()
        assert (await engine.session_detail("", "child"))["parent"] == "s"
        assert (await engine.session_detail("", "s"))["parent"] is None


async def test_several_timelines_are_compared_by_the_keys_of_their_pages(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[tuple[int, int]] = []
    common = Session.common

    def counted(session: Session, prompt: list[int], page_keys: list[bytes]) -> int:
        known.append((len(session.kv.keys), len(page_keys)))
        return common(session, prompt, page_keys)

    shared = words(1, 600)
    async with running_engine(site) as engine:
        for seed in range(2, 5):
            await asks(engine, [*shared, *words(seed, 700)])
        monkeypatch.setattr(Session, "common", counted)
        fork, _ = await asks(engine, [*shared, *words(5, 700)])
        assert use_of(fork) is TimelineUse.FORKED
        assert fork.request.found.shared == 600
    assert [pages for _, pages in known[:3]] == [5] * 3
    assert all(keys >= 2 for keys, _ in known[:3])


def test_the_outline_of_a_hostile_prompt_costs_no_more(pocket_path: Path) -> None:
    """A prompt of token ids may be messages without any text."""
    tokenizer = Tokenizer(pocket_path)
    outlines = Outlines(tokenizer)
    (mark,) = outlines.marks
    user = tokenizer.encode("user\nHello", special=False, add_bos=False)
    few, many = (mark,) * (MARKS_MAX - 1), (mark,) * 100_000
    assert outlines.of((*few, mark, *user)) == Outline(len(few), len(few) + 1 + len(user), True)
    began = time.process_time()
    assert outlines.of((*many, *user)) == Outline()
    assert time.process_time() - began < 0.1
