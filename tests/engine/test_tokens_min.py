"""Answers with a least number of tokens: the same tokens on every lane, in steps ahead, after moves
and restarts. Every answer here would end with its first token."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from batchengine.core import Constraint, GenerationRequest, Sampling
from batchengine.engine.remote.served import ServedTurns
from batchengine.engine.turns.stream import EVENTS_MAX
from batchengine.peers.link import PeerLink
from batchengine.text.vocab import Tokenizer
from batchengine.wire.peer import RunTurn
from tests.engine.linked.daemons import daemons, slow_down
from tests.engine.test_constrained import TWO_LANES
from tests.support.engines import (
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

N = 40  # tokens of each answer


def asked(
    reference: Reference, number: int, temperature: float = 1.0, n: int = N
) -> GenerationRequest:
    """A request whose every next token would be one that ends the answer."""
    ends = sorted(Tokenizer(reference.model).eog)
    sampling = Sampling(
        temperature=temperature, seed=number, tokens_min=n, repetition_penalty=1.1,
        logit_bias=tuple((token, 100.0) for token in ends),
    )  # fmt: skip
    made = request(words(number, 30 + number), 600, sampling=sampling, ignore_eos=False)
    return dataclasses.replace(made, session_id=f"s{number}")


def expected(reference: Reference, one: GenerationRequest) -> list[int]:
    """The answer of one timeline alone, with the tokens left out by a mask."""
    ends, n = Tokenizer(reference.model).eog, one.sampling.tokens_min
    n_vocab = reference.runner.model.spec.n_vocab
    bits = np.ones(-(-n_vocab // 32) * 32, np.uint8)
    every = np.packbits(bits, bitorder="little").view(np.uint32)
    bits[sorted(ends)] = 0
    without = np.packbits(bits, bitorder="little").view(np.uint32)

    def mask_of(_: int, tokens: list[int]) -> NDArray[np.uint32]:
        return without if len(tokens) < n else every

    (tokens,) = reference.runner.generate(
        [list(one.prompt)], one.tokens_max, sampling=one.sampling, eos=ends, mask_of=mask_of
    )
    assert (len(tokens), tokens[-1] in ends) == (n + 1, True)
    return tokens[:-1]


async def test_no_answer_ends_before(site: Site, reference: Reference) -> None:
    """Greedy or not, beside others; a step ahead knows its position."""
    requests = [asked(reference, number, number / 2) for number in range(3)]
    free = dataclasses.replace(requests[0], session_id="free", request_id="free")
    free = dataclasses.replace(free, sampling=Sampling(logit_bias=free.sampling.logit_bias))
    async with running_engine(site, lane__steps_in_flight=2) as engine:
        generations = [engine.submit(one) for one in (*requests, free)]
        *answers, ended = await asyncio.gather(*map(read, generations))
        assert engine.state.lanes[0].meter.ahead > N // 2
    assert (ended.tokens, ended.reason) == ([], "stop")
    for one, answer in zip(requests, answers, strict=True):
        assert (answer.tokens, answer.reason) == (expected(reference, one), "stop")


async def test_moves_between_lanes(site: Site, reference: Reference) -> None:
    one = asked(reference, 3)
    async with running_engine(site, lanes=TWO_LANES, router__promote_auto=False) as engine:
        generation, reader = await started(engine, one, 2)
        for lane_name in ("fast", "bulk"):
            n = generation.completion_tokens
            await engine.promote("", "s3", to=lane_name)
            await until(lambda n=n: generation.completion_tokens > n + 3 or generation.finished)
        answer = await reader
    assert (answer.tokens, answer.reason) == (expected(reference, one), "stop")


async def test_a_restart_in_the_middle(site: Site, reference: Reference) -> None:
    one = asked(reference, 4, n=EVENTS_MAX + N)
    async with running_engine(site) as engine:
        generation = await unread(engine, one, 5)
        assert not generation.finished
    async with running_engine(site) as engine:
        answer = await read(await engine.resume("", "s4"))
    assert (answer.tokens, answer.reason) == (expected(reference, one), "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_grammar_that_is_complete_ends_the_answer(
    site: Site, reference: Reference, temperature: float
) -> None:
    """One that may be longer is as long as it must."""
    one = asked(reference, 5, temperature)
    async with running_engine(site) as engine:
        for regex in ("maybe", "no!+"):
            limited = dataclasses.replace(one, constraint=Constraint("regex", regex))
            answer = await read(engine.submit(dataclasses.replace(limited, session_id=None)))
            assert re.fullmatch(regex, answer.text)
            assert answer.reason == "stop"
            assert (len(answer.tokens) == N) == (regex == "no!+")


async def test_a_stop_string_before_is_text(site: Site, reference: Reference) -> None:
    one = asked(reference, 6)
    async with running_engine(site) as engine:
        whole = await read(engine.submit(dataclasses.replace(one, session_id=None)))
        early = whole.text[: len(whole.text) // 3]
        answer = await read(engine.submit(dataclasses.replace(one, stop=(early,))))
    assert (answer.text, answer.reason) == (whole.text, "stop")


async def test_a_turn_goes_to_a_peer(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is asked for the tokens that are left."""
    one = asked(reference, 7)
    runs: list[RunTurn] = []

    def ask(self: ServedTurns, link: PeerLink, run: RunTurn) -> str:
        runs.append(run)
        return begin(self, link, run)

    begin = ServedTurns.ask
    monkeypatch.setattr(ServedTurns, "ask", ask)
    slow_down(monkeypatch, 0.02)
    async with daemons(site, "ab", 40) as (a, _):
        _, reader = await started(a.engine, one, 3)
        await a.engine.promote("", "s7", "b")
        answer = await reader
    (run,) = runs
    assert 0 < run.sampling.tokens_min == N - (run.n_tokens - len(one.prompt)) < N
    assert (answer.tokens, answer.reason) == (expected(reference, one), "stop")
