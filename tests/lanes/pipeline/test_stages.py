"""Pages that several workers compute layer by layer are those of one worker."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from batchengine.core import PAGE_TOKENS
from batchengine.wire import lane as wire
from tests.lanes.pipeline.scene import Ended, Pipeline, event_of, page_bytes, parts_of
from tests.lanes.ring.scene import Scene, lasting_scene, running_scene
from tests.support.engines import words

N_LAYERS = 4  # of the pocket model
PAGES = {1: 4, 2: 2, 3: 1}
TOKENS = {key: words(key, n * PAGE_TOKENS) for key, n in PAGES.items()}


class Stages(NamedTuple):
    """A scene, the loop that it lives on, and the pages as one worker computes them."""

    runner: asyncio.Runner
    scene: Scene
    expected: dict[int, list[bytes]]


@pytest.fixture(scope="module", params=["socketpair", "tcp and tls"])
def stages(
    request: pytest.FixtureRequest,
    pocket_path: Path,
    cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stages]:
    folder, is_tcp = tmp_path_factory.mktemp("stages"), request.param != "socketpair"
    with lasting_scene("abcd", pocket_path, cache_dir, folder, tcp=is_tcp) as (runner, scene):
        node = scene["a"]
        expected: dict[int, list[bytes]] = {}
        for key, tokens in TOKENS.items():
            runner.run(node.prefill(key, tokens))
            expected[key] = [page_bytes(node, slot) for slot in node.timelines[key].slots]
        yield Stages(runner, scene, expected)


@pytest.mark.parametrize("seed", range(4))
def test_pages_of_a_pipeline_are_those_of_one_worker(stages: Stages, seed: int) -> None:
    """Random owner, stages, splits and pieces; several pipelines at once on the same workers."""
    rng = random.Random(seed)

    async def run() -> None:
        pipelines: list[tuple[int, Pipeline]] = []
        for key, tokens in TOKENS.items():
            names = rng.sample("abcd", rng.randint(2, 4))
            cuts = sorted(rng.sample(range(1, N_LAYERS), len(names) - 1))
            owner = rng.choice("abcd")
            parts = parts_of(cuts, names, N_LAYERS)
            run = rng.getrandbits(64)
            pipelines.append((key, Pipeline(stages.scene, run, owner, parts, tokens)))
        await asyncio.gather(
            *(
                pipeline.compute(rng.getrandbits(32), rng.choice((7, 100, 512)))
                for _, pipeline in pipelines
            )
        )
        for key, pipeline in pipelines:
            assert pipeline.pages() == stages.expected[key]
            pipeline.close()

    stages.runner.run(run())


def test_a_stage_alone_is_a_pipeline_of_one(stages: Stages) -> None:
    async def run() -> None:
        pipeline = Pipeline(stages.scene, 77, "b", [wire.Part("c", 0, N_LAYERS)], TOKENS[2])
        await pipeline.compute(0)
        assert pipeline.pages() == stages.expected[2]
        pipeline.close()

    stages.runner.run(run())


@pytest.mark.parametrize(
    ("note", "why"),
    [
        (wire.OpenStage(5, 0, 5, 256, "", "", "a"), "layers"),
        (wire.OpenStage(5, 2, 2, 256, "a", "c", "a"), "layers"),
        (wire.OpenStage(5, 0, 2, 300, "", "c", "a"), "whole pages"),
        (wire.OpenStage(5, 0, 2, 0, "", "c", "a"), "whole pages"),
        (wire.OpenStage(5, 0, 2, 256, "a", "c", "a"), "neighbours"),
        (wire.OpenStage(5, 0, 2, 256, "", "", "a"), "neighbours"),
        (wire.OpenStage(5, 0, 2, 256, "", "x", "a"), "no link to x"),
        (wire.OpenStage(5, 0, 4, 256, "", "", ""), "no owner"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(stages: Stages, note: wire.OpenStage, why: str) -> None:
    async def run() -> None:
        node = stages.scene["b"]
        node.lane.note(note)
        assert why in (await event_of(node, wire.StageChanged, 5)).why

    stages.runner.run(run())


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([("a", 0, 2), ("b", 3, 4)], "follow"),
        ([("a", 0, 2), ("b", 2, 2), ("c", 2, 4)], "follow"),
        ([("a", 0, 3)], "3 layers"),
        ([("a", 0, 2), ("b", 2, 9)], "9 layers"),
        ([], "0 layers"),
        ([("x", 0, 4)], "no link to x"),
    ],
)
def test_a_gathering_that_cannot_be_is_refused(
    stages: Stages, parts: list[tuple[str, int, int]], why: str
) -> None:
    async def run() -> None:
        node = stages.scene["b"]
        node.lane.note(wire.Gather(6, tuple(wire.Part(*part) for part in parts)))
        assert why in (await event_of(node, wire.GatherChanged, 6)).why

    stages.runner.run(run())


def test_a_killed_stage_ends_the_others_and_the_workers_go_on(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running_scene("abc", pocket_path, cache_dir, tmp_path) as scene:
            parts = parts_of([1, 3], "abc", N_LAYERS)
            pipeline = Pipeline(scene, 9, "a", parts, TOKENS[1])
            await pipeline.open()
            first = asyncio.ensure_future(pipeline.stage(0, random.Random(1), 64))
            second = asyncio.ensure_future(pipeline.stage(1, random.Random(2), 64))
            assert (await event_of(scene["c"], wire.StageChanged, 9)).arrived
            os.kill(scene["b"].lane.pid, signal.SIGKILL)
            with pytest.raises(Ended):
                await pipeline.gathered()
            second.cancel()  # it may wait for rows
            await asyncio.wait([first, second])
            why = ""
            while not why:
                why = (await event_of(scene["c"], wire.StageChanged, 9)).why
            pipeline.close()
            await scene.link("a", "c")
            again = Pipeline(scene, 10, "a", parts_of([2], "ca", N_LAYERS), TOKENS[2])
            await again.compute(3)
            node = scene["c"]
            await node.prefill(2, TOKENS[2])
            assert again.pages() == [page_bytes(node, s) for s in node.timelines[2].slots]

    asyncio.run(run())
