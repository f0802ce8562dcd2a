"""Pipelines for models with recurrent state: sessions go on behind their pages, with the tokens of
one engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from batchengine.core import PAGE_TOKENS
from batchengine.engine import Engine
from batchengine.engine.linked.pipelines.pipelines import OwnedRun
from batchengine.wire.peer import OfferState, PageAnswer, PageStored, StateBytes
from bench.models.shapes import PRESETS
from bench.models.synthetic import write_synthetic
from kv_store import keys
from kv_store.states import is_intact, state_seed
from tests.engine.linked.daemons import slow_down
from tests.engine.linked.pipelines import test_pipelines
from tests.engine.linked.pipelines.scene import are_linked, linked_engines
from tests.engine.linked.pipelines.test_pipelines import (
    SLOW,
    check_answer,
    check_clean,
    fill,
    pipelines,
    random_stages,
)
from tests.support.engines import Reference, Site, read, request, started, until, words

MODELS = ("qwen35-tiny", "nemotron_h_moe-tiny", "lfm2-tiny")
ONE_MODEL = pytest.mark.parametrize("model", MODELS[:1], indirect=True)


@pytest.fixture(scope="module", params=MODELS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_synthetic(path, replace(PRESETS[request.param], n_vocab=2000))
    return path


@pytest.fixture
def site(model: Path, tmp_path: Path, cache_dir: Path) -> Site:
    return Site(model, tmp_path, cache_dir)


@pytest.fixture(scope="module")
def reference(model: Path, cache_dir: Path) -> Iterator[Reference]:
    made = Reference(model, cache_dir)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _layers(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    n_layers = len(reference.runner.model.layers)
    monkeypatch.setattr(test_pipelines, "N_LAYERS", n_layers)


def states(engine: Engine) -> list[str]:
    """The files of states of an engine's store."""
    store = engine.running.store
    assert store.states is not None
    return sorted(os.listdir(store.states.folder))


def interval_of(engine: Engine) -> int:
    """Tokens between two states that are sent."""
    return engine.state.lanes[0].kv.states.interval


async def test_answers_after_a_pipeline_are_those_of_one_engine(
    site: Site, reference: Reference
) -> None:
    """Any splits and orders, several at once, with and without the owner as a stage; a prompt that
    shares all but the end of another goes on from a state between the two ends."""
    rng = random.Random(3)
    n = len(reference.runner.model.layers)
    async with linked_engines(site, "abc") as engines:
        a = engines["a"]
        prompts = {key: words(key, n * PAGE_TOKENS + 9) for key, n in ((1, 6), (2, 1), (3, 2))}
        stages = [random_stages(rng, "abc"), [("b", 0, 2), ("c", 2, n)], [("", 0, 1), ("b", 1, n)]]
        found = await asyncio.gather(
            *(fill(a, each, prompts[key]) for each, key in zip(stages, prompts, strict=True))
        )
        assert found == [(6, ""), (1, ""), (2, "")]
        await check_clean(*engines.values())
        between = interval_of(a) // PAGE_TOKENS  # pages; of one model more than a prompt has
        assert len(states(a)) == 3 + (between < 6)
        assert not states(engines["b"])
        assert not a.state.lanes[0].kv.states.saving
        for key, pages in ((1, 6), (2, 1), (3, 2)):
            await check_answer(a, reference, prompts[key], pages)
        shared = between if between < 6 else 0
        await check_answer(a, reference, [*prompts[1][: 5 * PAGE_TOKENS], 7, 8, 9], shared)
        assert await fill(a, stages[0], prompts[1]) == (6, ""), "its states are there"


@ONE_MODEL
async def test_the_router_sends_prompts_through_pipelines(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    await test_pipelines.test_a_batch_prompt_goes_through_the_pipeline_and_explain_says_so(
        site, reference, monkeypatch
    )


async def test_a_lost_stage_costs_time_only(site: Site, reference: Reference) -> None:
    """Kills of a stage's worker and of the owner's, while states are on their way."""
    n = len(reference.runner.model.layers)
    async with linked_engines(site, "abc", SLOW) as engines:
        a, b, c = (engines[name] for name in "abc")
        prompt = words(7, 16 * PAGE_TOKENS + 9)

        def has_state(run: OwnedRun) -> bool:
            pages = interval_of(a) // PAGE_TOKENS
            return bool(run.n_states) and len(run.session.kv.sealed) >= pages

        stages = [("", 0, 1), ("b", 1, n - 1), ("c", n - 1, n)]
        for victim in (b, a):
            filling = asyncio.ensure_future(fill(a, stages, prompt))
            await until(lambda: any(map(has_state, pipelines(a)._owned.values())))
            os.kill(victim.state.lanes[0].lane.pid, signal.SIGKILL)
            pages, why = await filling
            assert why
            assert pages < 16
            await until(lambda: all(are_linked(engine, 2) for engine in engines.values()))
            await until(lambda: not a.state.lanes[0].kv.states.saving)
        answer = await read(a.submit(request(prompt, 8)))
        assert answer.tokens == reference.tokens(prompt, 8)
        assert answer.done is not None
        assert answer.done.usage.cached_tokens >= interval_of(a), "a state of a lost pipeline"
        await check_clean(b, c)


@ONE_MODEL
async def test_a_full_folder_of_states_ends_a_pipeline(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that is not written, or has no room, costs time only."""
    n = len(reference.runner.model.layers)
    async with linked_engines(site, "ab", SLOW) as engines:
        a = engines["a"]
        store = a.running.store
        assert store.states is not None
        monkeypatch.setattr(store.states, "budget_bytes", 0)
        prompt, other = words(8, 2 * PAGE_TOKENS + 9), words(9, 2 * PAGE_TOKENS + 9)
        assert await fill(a, [("b", 0, n)], prompt) == (2, "")
        assert not states(a)
        await check_answer(a, reference, prompt, 0)
        monkeypatch.undo()
        folder = store.states.folder
        os.rename(folder, f"{folder}.away")
        os.mknod(folder)  # no folder: the disk has room, and takes no file
        _, why = await fill(a, [("b", 0, n)], other)
        os.unlink(folder)
        os.rename(f"{folder}.away", folder)
        assert "the disk takes no state" in why
        await check_answer(a, reference, other, 0)
        await check_clean(*engines.values())


async def test_a_turn_at_a_peer_begins_at_a_state_of_its_owner(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages go there with the state behind them, and both are erased with the session."""
    slow_down(monkeypatch)
    async with linked_engines(site, "ab") as engines:
        a, b = engines["a"], engines["b"]
        prompt = words(3, 6 * PAGE_TOKENS + 20)
        generation, reading = await started(a, request(prompt, 6000, session="s"), 3)
        session, saved = a.state.sessions["", "s"], a.running.store.states
        await until(lambda: len(session.kv.sealed) == 6 and bool(saved))
        assert (await a.promote("", "s", "b"))["result"] == "moved"
        (served,) = b.requests()
        assert served["cached_tokens"] >= 4 * PAGE_TOKENS
        generation.cancel()
        answer = await reading
        assert answer.tokens == reference.tokens(prompt, len(answer.tokens))
        await until(lambda: not b.requests())
        assert states(b)
        await a.drop("", "s")
        assert not states(a)
        assert not states(b)


@ONE_MODEL
async def test_states_of_a_peer_that_do_not_fit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes with another checksum are not kept; those that were not asked for end the link."""
    async with linked_engines(site, "ab") as engines:
        a, b = engines["a"], engines["b"]
        link, saved = a.running.peers.links["b"], b.running.store.states
        assert saved is not None
        size = b.state.lanes[0].kv.states.state_bytes
        tokens, state = bytes(4 * PAGE_TOKENS), os.urandom(size)
        key = b.running.store.pages.key_of(keys.ROOT_KEY, [0] * PAGE_TOKENS, b"")
        good = xxhash.xxh3_128_digest(state, state_seed(key))

        async def offer(digest: bytes) -> PageAnswer:
            asked = OfferState(keys.ROOT_KEY, digest, b"")
            answer = (await link.request(asked, tokens, timeout_s=5)).message
            assert isinstance(answer, PageAnswer)
            return answer

        async def sent() -> str:
            link.send(StateBytes(), state[:100])
            answer = (await link.request(StateBytes(), state[100:], timeout_s=5)).message
            assert isinstance(answer, PageStored)
            return answer.why

        assert (await offer(bytes(16))).is_wanted
        assert await sent() == "the state differs from its checksum"
        assert not states(b)
        written = Future[None]()
        monkeypatch.setattr(saved, "write", lambda *_: written)
        assert (await offer(good)).is_wanted
        sending = asyncio.ensure_future(sent())
        await until(lambda: bool(b.running.linked.states._writing))
        assert (await offer(good)).why == "a state is being written"
        written.set_result(None)
        assert not await sending
        monkeypatch.undo()
        saved.clear()
        assert (await offer(good)).is_wanted
        assert not await sent()
        assert len(saved) == len(states(b)) == 1
        assert await offer(good) == PageAnswer(False)
        assert is_intact(saved.path(key, keys.ROOT_KEY))
        saved.clear()
        monkeypatch.setattr(saved, "budget_bytes", 0)
        assert (await offer(good)).why == "there is no room for a state"
        monkeypatch.undo()
        for first, rest in ((b"", b"x"), (state[1:], state), (state, b"")):
            before = link.incarnation, a.running.lane_links.number("b")
            if first:
                assert (await offer(good)).is_wanted
                link.send(StateBytes(), first)
            link.send(StateBytes(), rest)
            await until(lambda: a.running.lane_links.number("b") is None)
            await until(lambda: are_linked(a, 1) and are_linked(b, 1))
            assert before != (link.incarnation, a.running.lane_links.number("b"))
        assert not states(b)
