"""The router inside a running engine: two lanes, real steps, decisions that can be explained."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchengine.config import LaneConfig, SlaConfig
from batchengine.core import BatchEngineError, QueuedEvent
from batchengine.engine import Engine, Generation
from tests.fakes import Reference, read, request, run, running_engine, until, words

LANES = (
    LaneConfig(name="quick", tier="fast", threads=1, cores=(0,), entries_max=4),
    LaneConfig(name="many", tier="bulk", threads=1, cores=(1,), entries_max=16),
)


@pytest.fixture(scope="module")
def reference(pocket_path: Path, cache_dir: Path) -> Iterator[Reference]:
    made = Reference(pocket_path, cache_dir)
    yield made
    made.close()


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


def test_classes_find_their_lanes_and_every_decision_is_explained(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir, lanes=LANES) as engine:
            jobs = [
                request(words(i, 40 + i), 24, sla=sla)
                for i, sla in enumerate(["interactive", "standard", "background", "batch"])
            ]
            answers = await asyncio.gather(*[read(engine.submit(job)) for job in jobs])
            for job, answer in zip(jobs, answers, strict=True):
                assert answer.tokens == reference.tokens(job.prompt, 24)
                told = engine.explain(job.request_id)
                json.dumps(told, allow_nan=False)
                urgent = job.sla.sla_class == "interactive"
                assert told["lane"] == ("quick" if urgent else "many")
                assert answer.done is not None
                assert told["happened"]["lane"] == told["lane"] == answer.done.usage.lane
                assert told["happened"]["tokens"] == 24
                assert told["happened"]["ttft_ratio"] > 0
                assert told["happened"]["tpot_ratio"] > 0
            assert scrape(engine, "route_decisions_total") == {
                ("quick", "urgent"): 1,
                ("many", "short"): 1,
                ("many", "tolerant"): 2,
            }
            assert sum(scrape(engine, "prediction_ratio_count").values()) == 8

    run(work())


def test_predictions_learn_from_steps(pocket_path: Path, tmp_path: Path, cache_dir: Path) -> None:
    """Whatever the machine does, the medians of actual over predicted time are of its order."""

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir) as engine:
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

    run(work())


def test_a_wait_beyond_patience_is_refused_with_the_time_to_come_back(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    async def work() -> None:
        async with running_engine(
            pocket_path, tmp_path, cache_dir, lane__entries_max=1, sla__standard__patience_s=5
        ) as engine:
            accepted, refused = submit_until_refused(engine, "standard", 400)
            assert len(accepted) > 1
            assert (refused.http_status, refused.code) == (429, "BE1208")
            assert refused.retry_after_ms is not None
            assert refused.retry_after_ms >= 100
            answer = await read(engine.submit(request(words(2, 20), 4, sla="interactive")))
            assert len(answer.tokens) == 4
            assert not any(isinstance(event, QueuedEvent) for event in answer.events)
            told = (await accepted[-1].events())[0]
            assert isinstance(told, QueuedEvent)
            assert told.position == len(accepted)
            assert told.eta_ms is not None
            assert 0.0 < told.eta_ms <= 5000.0
            for generation in accepted:
                generation.cancel()

    run(work())


def test_per_lane_queues_are_bounded(pocket_path: Path, tmp_path: Path, cache_dir: Path) -> None:
    lanes = tuple(dataclasses.replace(lane, entries_max=1, queue_max=2) for lane in LANES)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, cache_dir, lanes=lanes) as engine:
            accepted, refused = submit_until_refused(engine, "batch", 30)
            assert refused.code == "BE1204"
            assert 4 <= len(accepted) <= 6
            for generation in accepted:
                generation.cancel()
            await until(lambda: not engine.requests())
            used = {engine.explain(g.request_id)["lane"] for g in accepted}
            assert used == {"quick", "many"}

    run(work())


def test_defaults_shed_nobody(pocket_path: Path) -> None:
    """A class may be more patient than the one before it, never less; batch waits for ever."""
    sla = SlaConfig()
    patience = [c.patience_s for c in (sla.interactive, sla.standard, sla.background)]
    assert patience == sorted(patience)
    assert sla.batch.patience_s == 0.0
