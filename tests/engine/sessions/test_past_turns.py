"""Requests behind the answer of a turn that is named by its id alone."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from batchengine.core import (
    FORM_RESPONSES,
    BatchEngineError,
    GenerationRequest,
    Sampling,
    TimelineUse,
    TokenEvent,
)
from batchengine.engine.engine import Engine
from tests.support.engines import Answer, Reference, Site, read, request, running_engine, words

END = 2045  # <|im_end|> of the pocket model


def behind(turn_id: str, added: list[int], session: str | None) -> GenerationRequest:
    asked = request(words(90, 7), 8, session=session)
    return dataclasses.replace(asked, append=(END, *added), append_to=turn_id)


async def made(engine: Engine, asked: GenerationRequest) -> tuple[GenerationRequest, Answer]:
    generation = await engine.begin(asked)
    answer = await read(generation)
    return generation.request, answer


async def test_a_chain_goes_on_and_an_earlier_turn_forks(site: Site, reference: Reference) -> None:
    """The last turn's session goes on, also in the next engine; an earlier turn has its own."""
    prompt, added = words(1, 300), words(2, 20)
    async with running_engine(site) as engine:
        first, answer = await made(engine, request(prompt, 8, session="s"))
        second, more = await made(engine, behind(first.request_id, added, "fresh-1"))
        assert second.session_id == "s"
        assert list(second.prompt) == [*prompt, *answer.tokens, END, *added]
        assert more.tokens == reference.tokens(list(second.prompt), 8)
        past = await engine.past_turn("", first.request_id)
        assert (past.finish_reason, past.tokens, past.is_last) == ("length", 8, False)
        assert list(past.request.prompt) == prompt
        assert past.text == answer.text
    async with running_engine(site) as engine:
        forked, other = await made(engine, behind(first.request_id, words(3, 5), "fresh-2"))
        assert forked.session_id == "fresh-2"
        assert forked.found is not None
        assert forked.found.use is TimelineUse.FORKED
        assert list(forked.prompt) == [*prompt, *answer.tokens, END, *words(3, 5)]
        assert other.tokens == reference.tokens(list(forked.prompt), 8)
        assert other.done is not None
        assert other.done.usage.cached_tokens >= 256  # the sealed page
        third, last = await made(engine, behind(second.request_id, words(4, 5), "fresh-3"))
        assert third.session_id == "s"
        assert list(third.prompt) == [*second.prompt, *more.tokens, END, *words(4, 5)]
        assert last.done is not None
        past = await engine.past_turn("", third.request_id)
        assert past.cached_tokens == last.done.usage.cached_tokens
        shown = [event.text for event in last.events if isinstance(event, TokenEvent)]
        assert past.texts[:-1] == tuple(shown)
        assert last.done.usage.cached_tokens >= len(second.prompt) + len(more.tokens) - 1


async def test_two_at_once_behind_one_turn_both_have_its_answer(site: Site) -> None:
    async with running_engine(site) as engine:
        first, answer = await made(engine, request(words(1, 40), 8, session="s"))
        both = await asyncio.gather(
            *(made(engine, behind(first.request_id, words(i, 5), f"f-{i}")) for i in (2, 3))
        )
        names = {asked.session_id for asked, _ in both}
        assert "s" in names
        assert len(names) == 2
        for number, (asked, _) in zip((2, 3), both, strict=True):
            assert list(asked.prompt) == [*words(1, 40), *answer.tokens, END, *words(number, 5)]
            assert (await engine.past_turn("", asked.request_id)).request.prompt == asked.prompt


async def test_a_forgotten_response_leaves_its_tokens_to_the_others(site: Site) -> None:
    """Its record goes at once, also from the next engine; the last one has the session alone."""
    prompt, echo = words(1, 40), '{"fields":{"store":true}}'
    secret = "secret " * 1000  # longer than a page of the ledger

    def files_with(text: str) -> set[str]:
        files = [path for path in site.folder.rglob("meta.db*") if path.is_file()]
        return {path.name for path in files if text.encode() in path.read_bytes()}

    async def respond(
        engine: Engine, asked: GenerationRequest, echo: str = echo
    ) -> GenerationRequest:
        asked = dataclasses.replace(asked, form=FORM_RESPONSES, echo=echo)
        return (await made(engine, asked))[0]

    async with running_engine(site) as engine:
        first = await respond(engine, request(prompt, 8, session="s"))
        second = await respond(engine, behind(first.request_id, words(2, 5), "x"), secret)
        third = await respond(engine, behind(second.request_id, words(3, 5), "y"))
        before = await engine.past_turn("", first.request_id)
        assert 0 < before.ended_s <= time.time() + 1
        assert not (await engine.past_turn("", third.request_id)).only
        assert files_with("secret secret")
        await engine.forget_turn("", second.request_id)
        assert not files_with("secret")
        with pytest.raises(BatchEngineError):
            await engine.forget_turn("other", first.request_id)
    async with running_engine(site) as engine:
        assert (await engine.past_turn("", second.request_id)).request.echo == ""
        again = await engine.past_turn("", first.request_id)
        assert (again.text, again.request.echo, again.only) == (before.text, echo, False)
        last = await engine.past_turn("", third.request_id)
        assert last.request.prompt == third.prompt
        follows = await respond(engine, behind(third.request_id, words(4, 5), "z"))
        assert follows.session_id == "s"
        for turn_id in (first.request_id, third.request_id):
            await engine.forget_turn("", turn_id)
        assert (await engine.past_turn("", follows.request_id)).only


async def test_without_a_session_nothing_is_kept(site: Site) -> None:
    async with running_engine(site) as engine:
        first, _ = await made(engine, request(words(1, 40), 8, session="s"))
        asked, _ = await made(engine, behind(first.request_id, words(2, 5), None))
        assert asked.session_id is None
        assert (await engine.past_turn("", first.request_id)).is_last
        with pytest.raises(BatchEngineError) as caught:
            await engine.past_turn("", asked.request_id)
        assert caught.value.name == "unknown_turn"


async def test_the_templates_end_takes_the_place_of_another_one(
    site: Site, reference: Reference
) -> None:
    """As in Harmony, whose answers end with a token that no prompt has; they stay whole."""
    prompt, closing = words(1, 300), words(5, 1)[0]
    ending = Sampling(logit_bias=((END, 100.0),), tokens_min=4)
    async with running_engine(site) as engine:
        tokenizer = engine.text.tokenizer
        tokenizer.closes = tokenizer.eog | {closing}
        asked = request(prompt, 8, session="s", sampling=ending, ignore_eos=False)
        first, answer = await made(engine, asked)
        assert answer.done is not None
        assert answer.done.finish_reason == "stop"
        assert engine.state.sessions["", "s"].tokens == [*prompt, *answer.tokens, END]
        before = await engine.past_turn("", first.request_id)
        added = dataclasses.replace(behind(first.request_id, [], "x"), append=(closing, 7, 8))
        second, more = await made(engine, added)
        assert list(second.prompt) == [*prompt, *answer.tokens, closing, 7, 8]
        assert second.found is not None
        assert (second.found.use, second.found.shared) == (
            TimelineUse.APPENDED,
            len(prompt) + len(answer.tokens),
        )
        assert more.tokens == reference.tokens(list(second.prompt), 8)
        assert more.done is not None
        assert more.done.usage.cached_tokens >= len(prompt) + len(answer.tokens) - 1
        past = await engine.past_turn("", first.request_id)
        assert past.text == before.text == answer.text
        fork = dataclasses.replace(behind(first.request_id, [], "y"), append=(closing, 9))
        forked, _ = await made(engine, fork)
        assert list(forked.prompt) == [*prompt, *answer.tokens, closing, 9]
        keeps = dataclasses.replace(behind(first.request_id, [], "z"), append=(6, 7))
        edited = request([*prompt, *answer.tokens, 3, 4], 8, session="s")
        await made(engine, edited)
        with pytest.raises(BatchEngineError):
            await engine.begin(keeps)


async def test_a_turn_of_another_tenant_or_of_edited_history_is_unknown(site: Site) -> None:
    async with running_engine(site) as engine:
        first, _ = await made(engine, request(words(1, 40), 8, session="s"))
        for tenant, turn_id in (("other", first.request_id), ("", "req_none"), ("", "")):
            with pytest.raises(BatchEngineError):
                await engine.past_turn(tenant, turn_id)
        foreign = dataclasses.replace(behind(first.request_id, [5], "x"), tenant="other")
        with pytest.raises(BatchEngineError) as caught:
            await engine.begin(foreign)
        assert caught.value.name == "unknown_turn"
        await made(engine, request([*words(1, 20), *words(7, 9)], 4, session="s"))
        with pytest.raises(BatchEngineError):
            await engine.past_turn("", first.request_id)


async def test_an_answer_that_was_cut_by_an_edit_is_unknown(site: Site) -> None:
    async with running_engine(site) as engine:
        first, answer = await made(engine, request(words(1, 40), 8, session="s"))
        await made(engine, request([*words(1, 40), *answer.tokens[:3], 7], 4, session="s"))
        with pytest.raises(BatchEngineError):
            await engine.begin(behind(first.request_id, [5], "x"))


async def test_behind_a_turn_that_computes_waits_for_its_end(site: Site) -> None:
    async with running_engine(site) as engine:
        generation = await engine.begin(request(words(1, 40), 40, session="s"))
        token = await anext(generation)  # so the turn is in the ledger
        assert isinstance(token, TokenEvent)
        waiting = asyncio.create_task(made(engine, behind(generation.request_id, [5], "x")))
        answer = await read(generation)
        asked, _ = await waiting
        assert list(asked.prompt) == [*words(1, 40), token.token, *answer.tokens, END, 5]


async def test_a_repetition_is_the_same_turn(site: Site) -> None:
    async with running_engine(site) as engine:
        first, _ = await made(engine, request(words(1, 40), 8, session="s"))
        asked = dataclasses.replace(behind(first.request_id, [5], "x"), idempotency_key="k")
        one, answer = await made(engine, asked)
        again = dataclasses.replace(asked, request_id="req_again", session_id="y")
        other, repeated = await made(engine, again)
        assert (other.request_id, other.session_id) == (one.request_id, "s")
        assert repeated.tokens == answer.tokens
