"""The router in a running engine: two lanes, real steps, explained decisions."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from batchengine.config import LaneConfig, SlaConfig
from batchengine.core import BatchEngineError, GenerationRequest, Kind, QueuedEvent, TokenEvent
from batchengine.engine import Engine, Generation
from batchengine.engine.placement import lane_view
from batchengine.policy.cost import StepCost
from tests.support.engines import (
    Reference,
    Site,
    hold_restarts,
    read,
    request,
    running_engine,
    until,
    words,
)

LANES = (
    LaneConfig(name="quick", tier="fast", threads=1, cores=(0,), entries_max=4),
    LaneConfig(name="many", tier="bulk", threads=1, cores=(1,), entries_max=16),
)


def scrape(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in engine.metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"batchengine_{name}"
    }


def submit_until_refused(
    engine: Engine, sla: str, n_prompt: int
) -> tuple[list[Generation], BatchEngineError]:
    accepted: list[Generation] = []
    for i in range(500):
        try:
            accepted.append(engine.submit(request(words(i, n_prompt), 400, sla=sla)))
        except BatchEngineError as refused:
            return accepted, refused
    raise AssertionError("nothing was refused")


async def test_classes_are_routed_to_their_lanes_and_every_decision_is_explained(
    site: Site, reference: Reference
) -> None:
    async with running_engine(site, lanes=LANES) as engine:
        jobs = [
            request(words(i, 40 + i), 24, sla=sla)
            for i, sla in enumerate(["interactive", "standard", "background", "batch"])
        ]
        answers = await asyncio.gather(*[read(engine.submit(job)) for job in jobs])
        for job, answer in zip(jobs, answers, strict=True):
            assert answer.tokens == reference.tokens(job.prompt, 24)
            explained = engine.explain(job.request_id)
            json.dumps(explained, allow_nan=False)
            urgent = job.sla.sla_class == "interactive"
            assert explained["lane"] == ("quick" if urgent else "many")
            assert answer.done is not None
            assert explained["happened"]["lane"] == explained["lane"] == answer.done.usage.lane
            assert explained["happened"]["tokens"] == 24
            assert explained["happened"]["ttft_ratio"] > 0
            assert explained["happened"]["tpot_ratio"] > 0
        assert scrape(engine, "route_decisions_total") == {
            ("quick", "urgent"): 1,
            ("many", "short"): 1,
            ("many", "tolerant"): 2,
        }
        assert sum(scrape(engine, "prediction_ratio_count").values()) == 8


async def test_predictions_are_learned_from_steps(site: Site) -> None:
    """The medians of actual over predicted time are near one on any machine."""
    async with running_engine(site) as engine:
        ratios: dict[str, list[float]] = {"ttft_ratio": [], "tpot_ratio": []}
        for round_ in range(12):
            jobs = [request(words(round_ * 10 + i, 200), 32) for i in range(4)]
            await asyncio.gather(*[read(engine.submit(job)) for job in jobs])
            if round_ < 4:
                continue
            for job in jobs:
                happened = engine.explain(job.request_id)["happened"]
                for name, values in ratios.items():
                    values.append(happened[name])
        for name, values in ratios.items():
            middle = sorted(values)[len(values) // 2]
            assert 0.2 < middle < 5.0, (name, values)


async def test_a_wait_beyond_patience_is_refused_with_a_retry_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_view, "REFRESH_MS", -1.0)  # a long queue is read at every request
    async with running_engine(site, lane__entries_max=1, sla__standard__patience_s=5) as engine:
        # the time of the first steps must not determine how many are accepted
        engine.state.lanes[0].cost.cost = StepCost(fixed_ms=1.0, prefill_token_ms=0.5)
        accepted, refused = submit_until_refused(engine, "standard", 400)
        assert len(accepted) > 1
        assert (refused.kind, refused.code) == (Kind.UNAVAILABLE, "BE1208")
        assert refused.retry_ms is not None
        assert refused.retry_ms >= 100
        answer = await read(engine.submit(request(words(2, 20), 4, sla="interactive")))
        assert len(answer.tokens) == 4
        assert not any(isinstance(event, QueuedEvent) for event in answer.events)
        explained = (await accepted[-1].events())[0]
        assert isinstance(explained, QueuedEvent)
        assert explained.position == len(accepted)
        assert explained.eta_ms is not None
        assert 0.0 < explained.eta_ms <= 5000.0
        for generation in accepted:
            generation.cancel()


async def test_per_lane_queues_are_bounded(site: Site) -> None:
    lanes = tuple(dataclasses.replace(lane, entries_max=1, queue_max=2) for lane in LANES)
    async with running_engine(site, lanes=lanes) as engine:
        accepted, refused = submit_until_refused(engine, "batch", 30)
        assert refused.code == "BE1204"
        assert 4 <= len(accepted) <= 6
        for generation in accepted:
            generation.cancel()
        await until(lambda: not engine.requests())
        used = {engine.explain(g.request_id)["lane"] for g in accepted}
        assert used == {"quick", "many"}


# ---- automatic migrations ----


def lane_of(engine: Engine, session_id: str) -> str:
    return next(row["lane"] for row in engine.sessions() if row["session_id"] == session_id)


async def run_turn(
    engine: Engine, reference: Reference, history: list[int], n: int, sla: str
) -> GenerationRequest:
    """One turn of session "agent" after `history`, which grows; its tokens are the right ones."""
    job = request(history, n, session="agent", sla=sla)
    answer = await read(engine.submit(job))
    assert answer.tokens == reference.tokens(history, n)
    history += [*answer.tokens, 30, 31, 32]
    return job


def know_turns(reference: Reference, history: list[int], *counts: int) -> None:
    """Compute what `run_turn` will compare with: between two turns a session would become idle."""
    history = list(history)
    for n in counts:
        history += [*reference.tokens(history, n), 30, 31, 32]


async def test_a_background_session_is_promoted_for_an_interactive_turn_and_demoted_when_idle(
    site: Site, reference: Reference
) -> None:
    async with running_engine(
        site, lanes=LANES, router__demote_idle_s=0.5, router__dwell_s=0.1
    ) as engine:
        history = words(1, 300)
        know_turns(reference, history, 40, 40, 10, 10)
        await run_turn(engine, reference, history, 40, "background")
        assert lane_of(engine, "agent") == "many"
        job = await run_turn(engine, reference, history, 40, "interactive")
        assert lane_of(engine, "agent") == "quick"
        explained = engine.explain(job.request_id)
        assert (explained["lane"], explained["reason_id"]) == ("quick", "urgent")
        (move,) = explained["moves"]
        assert (move["from"], move["to"], move["result"]) == ("many", "quick", "moved")
        assert move["rows_recomputed"] == 0
        assert explained["happened"]["cached_tokens"] >= 339  # the last token has no KV
        job = await run_turn(engine, reference, history, 10, "background")
        assert engine.explain(job.request_id)["reason_id"] in ("dwell", "ceiling")
        assert lane_of(engine, "agent") == "quick"
        await until(lambda: lane_of(engine, "agent") == "many")
        await run_turn(engine, reference, history, 10, "background")
        assert scrape(engine, "promotions_total") == {
            ("many", "quick", "moved"): 1,
            ("quick", "many", "moved"): 1,
        }
        story = engine.explain("agent")
        assert (story["kind"], story["lane"], len(story["decisions"])) == ("session", "many", 4)


async def test_a_running_background_turn_is_promoted_when_an_interactive_one_waits(
    site: Site, reference: Reference
) -> None:
    async with running_engine(site, lanes=LANES) as engine:
        prompt = words(2, 300)
        slow = request(prompt, 600, session="agent", sla="background")
        background = engine.submit(slow)
        first = await background.events()
        assert first
        assert lane_of(engine, "agent") == "many"
        look = engine.submit(request(words(3, 50), 8, session="agent", sla="interactive"))
        await until(lambda: lane_of(engine, "agent") == "quick")
        assert engine.requests()[0]["request_id"] == slow.request_id  # it is running
        answer = await read(background)
        tokens = [event.token for event in first if isinstance(event, TokenEvent)]
        assert tokens + answer.tokens == reference.tokens(prompt, 600)
        assert (await read(look)).tokens == reference.tokens(words(3, 50), 8)
        (move,) = engine.explain(slow.request_id)["moves"]
        assert (move["cause"], move["to"]) == ("promotion", "quick")
        assert move["gap_ms"] > 0


async def test_a_session_whose_lane_is_down_continues_on_another_lane(
    site: Site, reference: Reference
) -> None:
    """The next turn does not wait for a worker that is slow to start."""
    async with running_engine(site, lanes=LANES, router__promote_auto=False) as engine:
        history = words(4, 300)
        await run_turn(engine, reference, history, 20, "background")
        home = next(loop for loop in engine.state.lanes if loop.lane.name == "many")
        may_start = hold_restarts(engine)
        home.lane.kill("the test wants it")
        await until(lambda: not home.lane.alive)
        async with asyncio.timeout(60):
            job = await run_turn(engine, reference, history, 20, "background")
        assert engine.explain(job.request_id)["lane"] == "quick"
        assert lane_of(engine, "agent") == "quick"
        may_start.set()


# ---- load or recompute ----


@pytest.mark.parametrize(
    ("bytes_per_s", "choice", "cached"), [(1.0, "recompute", 0), (1e15, "load", 512)]
)
async def test_kv_on_a_slow_disk_is_recomputed(
    bytes_per_s: float, choice: str, cached: int, site: Site, reference: Reference
) -> None:
    """Two sealed pages are loaded or computed, by the measured rate of the disk: equal bits."""
    prompt = words(5, 600)
    async with running_engine(site) as engine:
        await read(engine.submit(request(prompt, 4)))
        await until(lambda: engine.stats()["pages_sealed"] >= 2)
    async with running_engine(site) as engine:
        assert engine.running.store is not None
        engine.running.store.rates.read_bytes_per_s = bytes_per_s
        job = request(prompt, 24)
        assert (await read(engine.submit(job))).tokens == reference.tokens(prompt, 24)
        explained = engine.explain(job.request_id)
        assert explained["restore"]["choice"] == choice
        assert explained["restore"]["tokens"] == 512
        assert explained["happened"]["cached_tokens"] == cached
        assert (explained["restore"]["actual_ms"] is not None) == (choice == "load")
        assert scrape(engine, "restores_total") == {(choice,): 1}


def test_defaults_shed_no_request(pocket_path: Path) -> None:
    """A class is at least as patient as the one before it; batch waits without limit."""
    sla = SlaConfig()
    patience = [c.patience_s for c in (sla.interactive, sla.standard, sla.background)]
    assert patience == sorted(patience)
    assert sla.batch.patience_s == 0.0
