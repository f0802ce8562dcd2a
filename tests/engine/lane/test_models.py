"""A whole engine that serves models of other kinds than the pocket model: the tokens of a session
stay the same."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFValueType as ValueType

from batchengine.config import LaneConfig, load
from batchengine.core import Constraint, Sampling
from batchengine.engine.model_facts import inspect_model, prior_cost
from batchengine.policy.cost import StepWork
from batchengine.session import State
from bench.models.synthetic import PRESETS, write_synthetic
from tests.engine.lane.test_drafts import cheap_drafts, repeating
from tests.engine.test_constrained import constrained, expected
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

__all__ = ["cheap_drafts"]
SHAPE = dataclasses.replace(PRESETS["moe-tiny"], n_vocab=2000, tied=True)
LANES = (LaneConfig(name="left", threads=1), LaneConfig(name="right", threads=1))
OTHER = {"left": "right", "right": "left"}
MODELS = ["gpt-oss-tiny", "gemma4-tiny", "qwen35moe-tiny"]
OTHER_MODELS = [
    "minimax-m2-tiny",
    "nemotron_h_moe-tiny",
    "moe-tiny",
    "gemma3-tiny",
    "qwen35-tiny",
    "glm4moe-tiny",
    "deepseek2-tiny",
    "qwen3next-tiny",
    "granitehybrid-tiny",
    "lfm2moe-tiny",
    "step35-tiny",
]
SAMPLING = Sampling(temperature=0.7, seed=5)


@pytest.fixture(
    scope="module",
    params=[*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_MODELS)],
)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_synthetic(path, dataclasses.replace(PRESETS[request.param], n_vocab=2000))
    return path


@pytest.fixture(scope="module")
def alone(model: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers when the model computes one timeline alone."""
    made = Reference(model, cache_dir)
    yield made
    made.close()


async def test_sessions_survive_moves_and_a_restart(
    model: Path, alone: Reference, tmp_path: Path, cache_dir: Path
) -> None:
    """One moves between two lanes while it computes, others compute in the same steps; the next
    engine goes on with all of them."""
    site = Site(model, tmp_path, cache_dir)
    prompts = {name: words(seed, n) for seed, (name, n) in enumerate((("s", 300), ("t", 40)))}
    timelines: dict[str, list[int]] = {}
    async with running_engine(site, lanes=LANES, router__promote_auto=False) as engine:
        asked = {
            name: await started(engine, request(prompt, 4000, session=name, sampling=SAMPLING), 3)
            for name, prompt in prompts.items()
        }
        for _ in range(4):
            at = {row["session_id"]: row["lane"] for row in engine.sessions()}
            report = await engine.promote("", "s", to=OTHER[at["s"]])
            assert report["result"] == "moved", report
            await asyncio.sleep(0.01)
        for name, (generation, reader) in asked.items():
            assert not generation.finished
            generation.cancel()
            answer = await reader
            # The session may have a token that came with the end of the turn.
            session = engine.state.sessions["", name]
            await until(lambda session=session: session.state is State.IDLE)
            timeline = list(session.tokens)
            made = timeline[len(prompts[name]) :]
            assert made == alone.tokens(prompts[name], len(made), SAMPLING)
            assert answer.tokens == made[: len(answer.tokens)]
            timelines[name] = timeline
    async with running_engine(site, lanes=LANES) as engine:
        for name, timeline in timelines.items():
            longer = [*timeline, 77]
            again = await read(engine.submit(request(longer, 30, session=name)))
            assert again.tokens == alone.tokens(longer, 30)
            assert again.done is not None
            assert again.done.usage.cached_tokens >= len(timeline) - 1


@pytest.mark.usefixtures("cheap_drafts")
async def test_drafts_change_no_token(
    model: Path, alone: Reference, tmp_path: Path, cache_dir: Path
) -> None:
    """Of free and of constrained answers; what stops inside a draft goes on."""
    site = Site(model, tmp_path, cache_dir)
    prompts = [repeating(seed, n) for seed, n in enumerate((60, 240, 300))]
    song = Constraint("regex", "((la li lo|la lu) ){30}")
    async with running_engine(site, lanes=LANES[:1]) as engine:
        asked = [request(p, 150, session=f"s{i}") for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        sung = await read(engine.submit(constrained(prompts[0], song, sampling=SAMPLING)))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == alone.tokens(prompt, 150)
        stop = answers[1].text[60:64]
        stopped = await read(engine.submit(request(prompts[1], 150, session="t", stop=(stop,))))
        longer = [*prompts[1], *stopped.tokens, 77]
        again = await read(engine.submit(request(longer, 40, session="t")))
        assert again.tokens == alone.tokens(longer, 40)
        meter = engine.state.lanes[0].meter
        assert 0 < meter.accepted < meter.drafted
    assert sung.tokens == expected(alone, constrained(prompts[0], song, sampling=SAMPLING))


def test_a_lane_begins_with_the_costs_of_the_experts_that_steps_use(tmp_path: Path) -> None:
    """A step reads and computes less than a dense one of as many bytes; more with each session."""
    write_synthetic(tmp_path / "experts.gguf", SHAPE)
    info = inspect_model(load(None, {"model.path": str(tmp_path / "experts.gguf")}))
    assert (info.shape.n_expert, info.shape.n_expert_used) == (10, 3)
    banks = SHAPE.n_layer * SHAPE.n_expert * 3 * SHAPE.n_embd * SHAPE.n_ff
    assert info.shape.expert_params == banks
    assert info.shape.expert_bytes == banks // 32 * 18
    found = prior_cost(info, LANES[0], None)
    dense_shape = dataclasses.replace(info.shape, n_expert=0, expert_bytes=0)
    dense = prior_cost(dataclasses.replace(info, shape=dense_shape), LANES[0], None)
    assert found.fixed_ms < dense.fixed_ms
    read_ms = found.decode_entry_ms - found.prefill_token_ms
    assert read_ms > dense.decode_entry_ms - dense.prefill_token_ms
    for sessions in (1, 16):
        work = StepWork(0, sessions, 0, 0.0)
        assert found.predict_ms(work) < dense.predict_ms(work)


def test_a_window_makes_long_contexts_cheap(tmp_path: Path) -> None:
    """Of gpt-oss half of the layers see the whole context."""
    shape = dataclasses.replace(PRESETS["gpt-oss-tiny"], n_vocab=2000)
    write_synthetic(tmp_path / "m.gguf", shape)
    info = inspect_model(load(None, {"model.path": str(tmp_path / "m.gguf")}))
    assert info.shape.n_layer_whole == 2
    found = prior_cost(info, LANES[0], None)
    whole = dataclasses.replace(info.shape, whole_kv_share=1.0)
    dense = prior_cost(dataclasses.replace(info, shape=whole), LANES[0], None)
    assert found.decode_kv_ms == pytest.approx(dense.decode_kv_ms / 2)
    assert found.prefill_token_ms == dense.prefill_token_ms


async def test_tokens_that_the_file_suppresses_are_in_no_answer(
    tmp_path: Path, cache_dir: Path
) -> None:
    """Free, sampled and constrained answers of both lanes."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, dataclasses.replace(PRESETS["gemma4-tiny"], n_vocab=2000))
    plain = Reference(path, cache_dir)
    prompt = words(3, 30)
    tokens = sorted({*plain.tokens(prompt, 20), *plain.tokens(prompt, 20, SAMPLING)})
    plain.close()
    key, types = "tokenizer.ggml.suppress_tokens", [ValueType.ARRAY, ValueType.INT32]
    changed = edited(path, lambda values, _: values.__setitem__(key, (tokens, types)))
    alone = Reference(changed, cache_dir)
    song = Constraint("regex", "((la li lo|la lu) ){30}")
    async with running_engine(Site(changed, tmp_path, cache_dir), lanes=LANES) as engine:
        for sampling in (None, SAMPLING):
            changes = {} if sampling is None else {"sampling": sampling}
            answer = await read(engine.submit(request(prompt, 20, **changes)))
            assert not {*answer.tokens} & {*tokens}
            assert answer.tokens == alone.tokens(prompt, 20, sampling)
        sung = await read(engine.submit(constrained(prompt, song, sampling=SAMPLING)))
        assert sung.error is None
        assert sung.text.startswith("la l")
    alone.close()
