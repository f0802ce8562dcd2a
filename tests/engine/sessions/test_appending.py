"""Requests that send their newest messages alone, behind the timeline of their session."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from batchengine.core import BatchEngineError, TimelineUse
from tests.support.engines import Reference, Site, read, request, running_engine, words

END = 2045  # <|im_end|> of the pocket model


def adding(added: list[int], session: str, **more: object):
    """A request whose messages alone are `added`, behind the end of the last answer."""
    asked = request(words(90, 7), 8, session=session)
    return dataclasses.replace(asked, append=(END, *added), **more)  # type: ignore[arg-type]


async def test_new_messages_go_behind_the_daemons_own_tokens(
    site: Site, reference: Reference
) -> None:
    """Also in the next engine; the answer is that of the whole prompt, and its KV is reused."""
    first, added, more = words(1, 300), words(2, 20), words(3, 5)
    async with running_engine(site) as engine:
        made = await read(engine.submit(request(first, 8, session="s")))
        generation = await engine.begin(adding(added, "s"))
        second = [*first, *made.tokens, END, *added]
        assert list(generation.request.prompt) == second
        assert generation.request.found is not None
        assert generation.request.found.use is TimelineUse.APPENDED
        answer = await read(generation)
        assert answer.tokens == reference.tokens(second, 8)
        assert answer.done is not None
        assert answer.done.usage.cached_tokens >= len(first) + len(made.tokens) - 1
    async with running_engine(site) as engine:
        generation = await engine.begin(adding(more, "s"))
        third = [*second, *answer.tokens, END, *more]
        assert list(generation.request.prompt) == third
        last = await read(generation)
        assert last.tokens == reference.tokens(third, 8)
        assert last.done is not None
        assert last.done.usage.cached_tokens >= len(third) - len(more) - 2


async def test_the_end_of_an_answer_is_not_doubled(site: Site) -> None:
    """An answer that ended itself has the token that ends it."""
    first = [*words(1, 30), END]
    async with running_engine(site) as engine:
        record = request(first, 4, session="s")
        generation = engine.submit(record)
        await read(generation)
        engine.state.sessions["", "s"].tokens[-1] = END
        generation = await engine.begin(adding(words(2, 5), "s"))
        assert generation.request.prompt[len(first) + 3 :][:2] == (END, words(2, 5)[0])
        generation.cancel()


async def test_a_new_session_keeps_the_prompt_that_it_has(site: Site) -> None:
    async with running_engine(site) as engine:
        generation = await engine.begin(adding(words(2, 5), "new"))
        assert list(generation.request.prompt) == words(90, 7)
        await read(generation)


async def test_requests_that_append_at_once_come_one_behind_the_other(site: Site) -> None:
    """Each goes behind the answer of the one before: no message is lost or doubled."""
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(1, 30), 4, session="s")))

        async def turn(seed: int) -> list[int]:
            generation = await engine.begin(adding(words(seed, 5), "s"))
            await read(generation)
            return list(generation.request.prompt)

        prompts = await asyncio.gather(*(turn(seed) for seed in range(10, 14)))
        tokens = engine.state.sessions["", "s"].tokens
        for prompt in prompts:
            assert tokens[: len(prompt)] == prompt
        assert len({len(prompt) for prompt in prompts}) == 4


async def test_a_repeated_request_appends_once(site: Site) -> None:
    """By its idempotency key, or where the client says that it tries again."""
    async with running_engine(site) as engine:
        await read(engine.submit(request(words(1, 30), 4, session="s")))
        keyed = adding(words(2, 5), "s", idempotency_key="k")
        first = await engine.begin(keyed)
        answer = await read(first)
        again = await engine.begin(dataclasses.replace(keyed, request_id="again"))
        assert again.request.prompt == first.request.prompt
        assert (await read(again)).tokens == answer.tokens
        retry = await engine.begin(adding(words(2, 5), "s", is_retry=True))
        assert retry.request.prompt == first.request.prompt
        assert (await read(retry)).tokens == answer.tokens
        new = await engine.begin(adding(words(2, 5), "s"))
        assert len(new.request.prompt) > len(first.request.prompt)
        await read(new)


async def test_an_append_needs_a_session_and_room(site: Site) -> None:
    async with running_engine(site) as engine:
        asked = dataclasses.replace(request(words(1, 5), 4), append=(END, 5))
        with pytest.raises(BatchEngineError) as caught:
            await engine.begin(asked)
        assert caught.value.name == "not_appendable"
        context = engine.info.context_tokens
        await read(engine.submit(request(words(1, 30), 4, session="s")))
        cut = await engine.begin(adding(words(2, 5), "s", tokens_max=context - 10))
        assert len(cut.request.prompt) + cut.request.tokens_max == context
        cut.cancel()
        with pytest.raises(BatchEngineError) as caught:
            await engine.begin(adding(words(2, context - 20), "s"))
        assert caught.value.name == "context_length_exceeded"
