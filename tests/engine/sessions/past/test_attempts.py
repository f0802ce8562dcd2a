"""Requests that are sent again after their client left, without a session."""

from __future__ import annotations

import dataclasses
from typing import Any

from batchengine.core import GenerationRequest, Sampling
from batchengine.engine import Engine
from batchengine.engine.sessions.past.attempts import (
    ATTEMPTS_MAX,
    KEPT_S,
    OF_TENANT_MAX,
    LeftAttempts,
)
from batchengine.engine.turns.stream import Generation
from batchengine.text.detokeniser import Detokeniser
from tests.support.engines import Reference, Site, read, request, running_engine, until, words

WARM = Sampling(temperature=0.8, seed=11)
OTHER = Sampling(temperature=0.8, seed=12)  # of a client that sends no seed: new at each attempt
PROMPT = words(1, 300)


def asked(sampling: Sampling = WARM, **more: Any) -> GenerationRequest:
    made = request(PROMPT, 60)
    more = {"attempt": "same", "streams": True} | more
    return dataclasses.replace(made, sampling=sampling, **more)


async def left(engine: Engine, tokens: int = 20) -> Generation:
    """A request whose client left behind so many tokens of its answer."""
    generation = await engine.begin(asked())
    await until(lambda: generation.completion_tokens > tokens)
    generation.cancel()
    return generation


async def test_a_repeat_goes_on_where_its_client_left(site: Site, reference: Reference) -> None:
    """At once, while the first turn still ends; not even a row of the open page is computed."""
    async with running_engine(site) as engine:
        first = await left(engine)
        again = await engine.begin(asked(OTHER, streams=False))
        answer = await read(again)
        assert answer.tokens == reference.tokens(PROMPT, 60, WARM)
        assert answer.done is not None
        usage = answer.done.usage
        assert usage.resumed_tokens >= first.completion_tokens > 20
        assert usage.cached_tokens == len(PROMPT)
        assert not engine.state.requests
        assert len(engine.running.requests.attempts) == 0


async def test_a_retry_that_says_so_is_one(site: Site, reference: Reference) -> None:
    async with running_engine(site) as engine:
        await left(engine)
        answer = await read(await engine.begin(asked(OTHER, is_retry=True)))
        assert answer.tokens == reference.tokens(PROMPT, 60, WARM)


async def test_a_request_with_a_session_of_its_own_goes_on_in_that_of_the_first(
    site: Site, reference: Reference
) -> None:
    """As a response that is stored: later requests name the turn, which keeps its id."""
    async with running_engine(site) as engine:
        first = await engine.begin(asked(session_id="one"))
        await until(lambda: first.completion_tokens > 20)
        first.cancel()
        again = await engine.begin(asked(OTHER, session_id="other", is_retry=True))
        answer = await read(again)
        assert (again.session_id, again.turn_id) == ("one", first.request_id)
        assert again.request.request_id == first.request_id
        assert answer.tokens == reference.tokens(PROMPT, 60, WARM)
        assert answer.done is not None
        assert answer.done.usage.resumed_tokens > 20
        assert (await engine.past_turn("", first.request_id)).tokens == 60
        assert engine.state.find("", "other") is None


async def test_others_get_an_answer_of_their_own(site: Site, reference: Reference) -> None:
    """The same question by choice, by another tenant, or while the first one has its reader."""
    own = reference.tokens(PROMPT, 60, OTHER)
    assert own != reference.tokens(PROMPT, 60, WARM)
    async with running_engine(site) as engine:
        first = await engine.begin(asked())
        await until(lambda: first.completion_tokens > 3)
        beside = await read(await engine.begin(asked(OTHER, streams=False, is_retry=True)))
        assert beside.tokens == own
        assert (await read(first)).tokens == reference.tokens(PROMPT, 60, WARM)
        await left(engine)
        for more in ({}, {"streams": False, "tenant": "b"}, {"attempt": "other", "is_retry": True}):
            answer = await read(await engine.begin(asked(OTHER, **more)))
            assert answer.tokens == own
            assert answer.done is not None
            assert not answer.done.usage.resumed_tokens


async def test_log_probabilities_are_computed_again(site: Site, reference: Reference) -> None:
    warm = Sampling(temperature=0.8, seed=11, logprobs=1)
    async with running_engine(site) as engine:
        first = await engine.begin(asked(warm))
        await until(lambda: first.completion_tokens > 3)
        first.cancel()
        other = Sampling(temperature=0.8, seed=12, logprobs=1)
        answer = await read(await engine.begin(asked(other, is_retry=True)))
        assert answer.tokens == reference.tokens(PROMPT, 60, warm)
        assert answer.done is not None
        assert not answer.done.usage.resumed_tokens


async def test_a_client_may_leave_again(site: Site, reference: Reference) -> None:
    async with running_engine(site) as engine:
        await left(engine)
        again = await engine.begin(asked(OTHER, is_retry=True))
        await until(lambda: again.completion_tokens > 35)
        again.cancel()
        answer = await read(await engine.begin(asked(OTHER, is_retry=True)))
        assert answer.tokens == reference.tokens(PROMPT, 60, WARM)
        assert answer.done is not None
        assert answer.done.usage.resumed_tokens > 35


async def test_attempts_are_bounded_in_count_and_time() -> None:
    now = 0.0
    attempts = LeftAttempts(lambda: now)

    def leaves(tenant: str, index: int) -> None:
        made = asked(attempt=str(index), tenant=tenant)
        Generation(made, "", silent, 0.0, attempts.left, ignore).cancel()

    for index in range(2 * OF_TENANT_MAX):
        leaves("flood", index)
    assert len(attempts) == OF_TENANT_MAX
    for index in range(2 * ATTEMPTS_MAX):
        leaves(f"tenant {index}", index)
    assert len(attempts) == ATTEMPTS_MAX
    now = KEPT_S + 1
    late = asked(attempt=str(2 * ATTEMPTS_MAX - 1), tenant=f"tenant {2 * ATTEMPTS_MAX - 1}")
    assert await attempts.taken(dataclasses.replace(late, is_retry=True)) == (
        dataclasses.replace(late, is_retry=True),
        None,
    )
    leaves("late", 0)
    assert len(attempts) == 1


def silent() -> Detokeniser:
    return Detokeniser(lambda _: b"", lambda _: False)


def ignore(_: Generation) -> None:
    """A callback of a generation that nothing computes."""
