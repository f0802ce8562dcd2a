"""Pipelines over several engines: tokens are those of one engine, whatever happens to a stage."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from batchengine.config import LaneConfig
from batchengine.core import PAGE_TOKENS
from batchengine.engine import Engine
from batchengine.engine.lane.stage_queue import StageOwner, StageWork
from batchengine.engine.linked.pipelines import Pipelines
from batchengine.session import Session
from batchengine.wire.peer import OpenPipeline, PipelineEnded, PipelineGo, PipelineOpened
from tests.engine.linked.daemons import fix_speeds
from tests.engine.linked.pipelines.scene import are_linked, linked_engines
from tests.support.engines import Reference, Site, read, request, until, words

N_LAYERS = 4  # of the pocket model
SLOW = (LaneConfig("cpu", threads=1, entries_max=4, tokens_per_step=64, chunk_tokens_max=32),)
Stages = list[tuple[str, int, int]]


def pipelines(engine: Engine) -> Pipelines:
    return engine.running.pipelines


async def fill(
    engine: Engine,
    stages: Stages,
    tokens: list[int],
    *,
    deadline_s: float = 30.0,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[int, str]:
    session = Session(1 << 60, "s", "")
    return await pipelines(engine).fill(stages, 512, tokens, session, deadline_s, is_over)


async def check_clean(*engines: Engine) -> None:
    """Nothing is left of any pipeline."""
    for engine in engines:
        loop = engine.state.lanes[0]
        await until(lambda: not pipelines(engine).rows())  # noqa: B023
        assert not loop.stages
        assert not loop.sessions
        await until(lambda: not loop.kv.slots.epochs)  # noqa: B023  no slot is held


async def check_answer(
    engine: Engine, reference: Reference, prompt: list[int], cached: int
) -> None:
    """The answer to a prompt is that of one timeline alone, with `cached` pages from the store."""
    answer = await read(engine.submit(request(prompt, 8)))
    assert answer.tokens == reference.tokens(prompt, 8)
    assert answer.done is not None
    assert answer.done.usage.cached_tokens == cached * PAGE_TOKENS


def random_stages(rng: random.Random, names: str) -> Stages:
    chosen = rng.sample(names, rng.randint(1, len(names)))
    cuts = sorted(rng.sample(range(1, N_LAYERS), len(chosen) - 1))
    ends = zip([0, *cuts], [*cuts, N_LAYERS], strict=True)
    return [(name.replace("a", ""), *part) for name, part in zip(chosen, ends, strict=True)]


async def test_answers_after_a_pipeline_are_those_of_one_engine(
    site: Site, reference: Reference
) -> None:
    """Any splits and orders, several at once, with and without the owner as a stage."""
    rng = random.Random(4)
    async with linked_engines(site, "abc") as engines:
        a = engines["a"]
        prompts = {key: words(key, n * PAGE_TOKENS + 9) for key, n in ((1, 4), (2, 1), (3, 2))}
        stages = [random_stages(rng, "abc"), [("b", 0, 2), ("c", 2, 4)], [("", 0, 1), ("b", 1, 4)]]
        found = await asyncio.gather(
            *(fill(a, each, prompts[key]) for each, key in zip(stages, prompts, strict=True))
        )
        assert found == [(4, ""), (1, ""), (2, "")]
        await check_clean(*engines.values())
        for key, pages in ((1, 4), (2, 1), (3, 2)):
            await check_answer(a, reference, prompts[key], pages)


async def test_a_lost_stage_costs_time_only(site: Site, reference: Reference) -> None:
    """Kills of a stage's worker, of the owner's, and of a stage's engine, in mid-chunk."""
    async with linked_engines(site, "abc", SLOW) as engines:
        a, b, c = (engines[name] for name in "abc")
        prompt = words(7, 12 * PAGE_TOKENS + 9)
        stages: Stages = [("", 0, 1), ("b", 1, 3), ("c", 3, 4)]
        for victim in (b, a):
            filling = asyncio.ensure_future(fill(a, stages, prompt))
            await until(lambda: any(run.complete for run in pipelines(a)._owned.values()))
            os.kill(victim.state.lanes[0].lane.pid, signal.SIGKILL)
            pages, why = await filling
            assert why
            assert pages < 12
            await until(lambda: all(are_linked(engine, 2) for engine in engines.values()))
        filling = asyncio.ensure_future(fill(a, stages, prompt))
        await until(lambda: len(pipelines(c).served) == 1)
        await c.stop(0.0)
        pages, why = await filling
        assert why, "of the engine or of its worker's link, whichever is noticed first"
        assert pages < 12
        await until(lambda: not pipelines(b).served)
        answer = await read(a.submit(request(prompt, 8)))
        assert answer.tokens == reference.tokens(prompt, 8)
        assert await fill(a, [("b", 0, 4)], words(8, 2 * PAGE_TOKENS)) == (2, "")
        await check_clean(b)


async def test_a_pipeline_that_cannot_be_says_why(site: Site, reference: Reference) -> None:
    """Refusals, a deadline, a request that ends, and messages that do not fit."""
    async with linked_engines(site, "ab", SLOW) as engines:
        a, b = engines["a"], engines["b"]
        prompt = words(9, 8 * PAGE_TOKENS)
        halves: Stages = [("", 0, 2), ("b", 2, 4)]
        assert "x" in (await fill(a, [("x", 0, 4)], prompt))[1]
        assert "layers" in (await fill(a, [("", 0, 2), ("b", 2, 5)], prompt))[1]
        assert (await fill(a, halves, prompt, deadline_s=0.05))[1] == "it took too long"
        assert (await fill(a, halves, prompt, is_over=lambda: True))[1] == "its request has ended"
        pipelines(b).served.bytes_max = 1000
        assert "no room" in (await fill(a, halves, prompt))[1]
        pipelines(b).served.bytes_max = 1 << 30
        link = a.running.peers.links["b"]
        b.leave()
        asked = OpenPipeline(4, 0, 4, PAGE_TOKENS, 512, "", "", 0)
        answer = (await link.request(asked, bytes(4 * PAGE_TOKENS), timeout_s=5)).message
        assert isinstance(answer, PipelineOpened)
        assert answer.why == "it is leaving"
        assert "b" in (await fill(a, halves, prompt))[1]
        b.leave(undo=True)
        await until(lambda: pipelines(a).can_use("b"))
        assert "outside" in (await fill(a, [("b", 0, 4)], [1 << 30] * PAGE_TOKENS))[1]
        for message in (PipelineGo(5, 256), PipelineEnded(5, "no such run")):
            link.send(message)
        twice = OpenPipeline(5, 0, 4, PAGE_TOKENS, 512, "", "", 0)
        tokens = bytes(4 * PAGE_TOKENS)
        answers = [(await link.request(twice, tokens, timeout_s=5)).message for _ in range(2)]
        assert [bool(answer.why) for answer in answers] == [False, True]  # type: ignore[union-attr]
        link.send(PipelineEnded(5, ""))
        assert await fill(a, halves, prompt) == (8, "")
        await check_clean(a, b)
        for wrong in (twice, PipelineOpened("")):
            before = link.incarnation, a.running.lane_links.number("b")
            link.send(wrong)
            await until(lambda: a.running.lane_links.number("b") is None)
            await until(lambda: are_linked(a, 1) and are_linked(b, 1))
            assert before != (link.incarnation, a.running.lane_links.number("b"))
        await check_answer(a, reference, [*prompt, 5], 8)


async def test_a_batch_prompt_goes_through_the_pipeline_and_explain_says_so(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_speeds(monkeypatch)
    async with linked_engines(site, "ab") as engines:
        a = engines["a"]
        plans = a.running.plans
        await until(lambda: plans.facts.pipeline is not None)
        prompt = words(11, 12 * PAGE_TOKENS + 7)

        def rejected(found: dict[str, Any]) -> str:
            return next(o["rejected"] for o in found["outlooks"] if o["prefill"] == "pipeline")

        async def decision(prompt: list[int], sla: str) -> dict[str, Any]:
            asked = request(prompt, 8, sla=sla)
            await until(lambda: pipelines(a).can_use("b"))
            answer = await read(a.submit(asked))
            assert answer.tokens == reference.tokens(prompt, 8)
            return a.running.dispatcher.explain(asked.request_id)

        found = await decision(prompt, "batch")
        assert found["strategy"] == {"prefill": "pipeline", "decode": "local", "peers": ["b"]}
        assert found["reason_id"] == "pipeline"
        assert found["notes"][0].startswith("the pipeline computed 12 pages in ")
        found = await decision(prompt, "batch")
        assert found["strategy"]["prefill"] == "local"  # the store has its pages
        assert found["notes"] == []
        found = await decision(words(12, 12 * PAGE_TOKENS + 7), "standard")
        assert found["strategy"]["prefill"] == "local"
        assert rejected(found) == "only for throughput-tolerant requests"
        found = await decision(words(13, 40), "batch")
        assert rejected(found) == "the prompt does not fill the pipeline"


async def test_a_peer_reports_prefill_and_the_stages_of_other_daemons(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_speeds(monkeypatch)
    async with linked_engines(site, "ab", lanes=SLOW) as engines:
        a, b = engines["a"], engines["b"]
        link, stages = a.running.peers.links["b"], b.state.lanes[0].stages
        await until(lambda: link.load.stage_ms == 0 and not any(link.load.prefill_ms))
        for run, peer in ((9001, "a"), (9002, "c")):  # whose rows do not come
            tokens = array("i", words(run, 2048))
            stages.add(StageWork(run, 0.5, 2048, 256, tokens, owner=StageOwner(peer)))
        one_ms = stages.left_ms(b.state.lanes[0].cost.cost, "c")
        await until(lambda: link.load.stage_ms > 0)
        assert 0.9 * one_ms < link.load.stage_ms < 1.1 * one_ms
        for run in (9001, 9002):
            stages.remove(run)
        await until(lambda: link.load.stage_ms == 0)
        reading = asyncio.ensure_future(read(b.submit(request(words(40, 3000), 4))))
        await until(lambda: link.load.prefill_ms[-1] > 0)
        assert link.load.prefill_ms[0] == 0  # the request is of class standard
        await reading
        await until(lambda: not any(link.load.prefill_ms))


async def test_batch_prompts_that_come_together_all_go_through_the_pipeline(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than have a seat: each is predicted after those before it."""
    fix_speeds(monkeypatch)
    async with linked_engines(site, "ab") as engines:
        a = engines["a"]
        plans, queue = a.running.plans, a.running.plans.queue
        await until(lambda: plans.facts.pipeline is not None)
        prompts = [words(20 + index, 12 * PAGE_TOKENS + 7) for index in range(6)]
        asked = [request(prompt, 8, sla="batch") for prompt in prompts]
        reading = [asyncio.ensure_future(read(a.submit(one))) for one in asked]
        await until(lambda: len(a.running.dispatcher.log) == 6)
        lane = a.running.dispatcher.state().lanes[0].load
        assert lane.stage_ms > 0.0
        assert lane.waiting == 0
        for prompt, answer in zip(prompts, await asyncio.gather(*reading), strict=True):
            assert answer.tokens == reference.tokens(prompt, 8)
        found = [a.running.dispatcher.explain(one.request_id) for one in asked]
        assert [one["reason_id"] for one in found] == ["pipeline"] * 6
        queues = [
            outlook["queue_ms"]
            for one in found
            for outlook in one["outlooks"]
            if outlook["prefill"] == "pipeline"
        ]
        assert queues[0] == 0.0
        assert all(one < other for one, other in itertools.pairwise(queues))
        assert all("computed 12 pages" in one["notes"][0] for one in found)
        assert queue.queue_ms("") == (0.0, 0.0)
        assert a.running.dispatcher.state().lanes[0].load.stage_ms == 0.0
        await check_clean(*engines.values())
