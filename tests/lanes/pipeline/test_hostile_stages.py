"""What a peer that lies, repeats or floods can do to a pipeline: end it, nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import xxhash

from batchengine.core import PAGE_TOKENS
from batchengine.wire import lane as wire
from batchengine.wire.data import Hidden, Tile
from tests.lanes.pipeline.scene import Pipeline, event_of, page_bytes, parts_of
from tests.lanes.ring.scene import Scene, running_scene
from tests.lanes.ring.test_hostile_peers import Peer, peer_of
from tests.support.engines import words

N_LAYERS = 4  # of the pocket model
TOKENS = words(1, PAGE_TOKENS)
LONG = 512 * PAGE_TOKENS


async def open_stage(scene: Scene, run: int, n_tokens: int = LONG) -> None:
    """Have `a` be the last stage after the peer `m`."""
    node = scene["a"]
    node.lane.note(wire.OpenStage(run, 2, N_LAYERS, n_tokens, "m", "", "a"))
    assert not (await event_of(node, wire.StageChanged, run)).why


async def open_gather(scene: Scene, run: int) -> None:
    """Have `a` gather one page, whose last two layers `m` computes."""
    node = scene["a"]
    reserve = (wire.ReserveSlot(node.used, 0, b"x", 1, 0),)
    await node.lane.run(wire.Step((), reserve=reserve), b"", deadline_s=20.0)
    node.lane.note(wire.Gather(run, (wire.Part("a", 0, 2), wire.Part("m", 2, N_LAYERS))))
    node.lane.note(wire.GatherPages(run, (node.used,)))
    node.used += 1
    for _ in range(2):
        assert not (await event_of(node, wire.GatherChanged, run)).why


def tile(scene: Scene, run: int, page: int = 0, layer: int = 2, n: int = 0) -> tuple[Tile, bytes]:
    data = bytes(n or scene["a"].layout.payload_bytes // N_LAYERS)
    return Tile(run, page, layer, xxhash.xxh3_128_digest(data)), data


def test_what_does_not_fit_ends_one_pipeline_only(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with running_scene("ab", pocket_path, cache_dir, tmp_path) as scene:
            node, m = scene["a"], await peer_of(scene, "a", 50)
            other = await peer_of(scene, "a", 51, "z")
            width = 4 * embedding(pocket_path)
            rows = [
                (Hidden(0, 1, 1), bytes(width)),
                (Hidden(0, 0, 0), b""),
                (Hidden(0, 0, -1), b""),
                (Hidden(0, 0, 2), bytes(width)),
                (Hidden(0, 0, LONG + 1), bytes(width)),
            ]
            for number, (message, data) in enumerate(rows, 1):
                await open_stage(scene, number)
                await m.send(Hidden(number, message.start, message.n_tokens), data)
                assert (await event_of(node, wire.StageChanged, number)).why
            tiles = [
                (page_layer, n)
                for page_layer, n in [
                    ((1, 2), 0), ((-1, 2), 0), ((0, 1), 0), ((0, N_LAYERS), 0), ((0, -1), 0),
                    ((0, 2), 5),
                ]
            ]  # fmt: skip
            for number, ((page, layer), n) in enumerate(tiles, 20):
                await open_gather(scene, number)
                await m.send(*tile(scene, number, page, layer, n))
                assert (await event_of(node, wire.GatherChanged, number)).why
            await open_gather(scene, 30)
            await m.send(Tile(30, 0, 2, bytes(16)), tile(scene, 30)[1])
            assert "digest" in (await event_of(node, wire.GatherChanged, 30)).why

            # Of no such run, by a peer that has no part in it, twice: dropped.
            await open_stage(scene, 40)
            await open_gather(scene, 41)
            await m.send(Hidden(39, 0, 1), bytes(width))
            await m.send(*tile(scene, 39))
            await other.send(Hidden(40, 0, 1), bytes(width))
            await other.send(*tile(scene, 41))
            for _ in range(2):
                await m.send(*tile(scene, 41))
            await m.send(Hidden(40, 0, 1), bytes(width))
            assert (await event_of(node, wire.StageChanged, 40)) == wire.StageChanged(40, 1)
            counts = await node.counts()
            assert (counts["late"], counts["malformed"], counts["duplicate"]) == (2, 2, 1)

            await flood(scene, m, width)
            pipeline = Pipeline(scene, 99, "a", parts_of([1], "ab", N_LAYERS), TOKENS)
            await pipeline.compute(0)
            await node.prefill(1, TOKENS)
            assert pipeline.pages() == [page_bytes(node, node.timelines[1].slots[0])]

    asyncio.run(run())


async def flood(scene: Scene, m: Peer, width: int) -> None:
    """More rows than may wait: those of 16 pages."""
    await open_stage(scene, 60)
    n = PAGE_TOKENS
    for start in range(0, 17 * PAGE_TOKENS, n):
        await m.send(Hidden(60, start, n), bytes(n * width))
    why = ""
    while not why:
        why = (await event_of(scene["a"], wire.StageChanged, 60)).why
    assert "wait" in why


def embedding(path: Path) -> int:
    """Width of the residual stream."""
    from batchengine.gguf import GgufFile
    from batchengine.weights import read_spec

    with GgufFile(str(path)) as gguf:
        return read_spec(gguf).n_embd


@pytest.mark.parametrize("step", [wire.StageStep(8, 1, 1), wire.StageStep(8, 0, 0)])
def test_a_step_that_does_not_follow_is_refused(
    pocket_path: Path, cache_dir: Path, tmp_path: Path, step: wire.StageStep
) -> None:
    async def run() -> None:
        async with running_scene("a", pocket_path, cache_dir, tmp_path) as scene:
            node = scene["a"]
            done = await node.lane.run_stage(step, b"", deadline_s=20.0)
            assert done.why
            node.lane.note(wire.OpenStage(8, 0, N_LAYERS, PAGE_TOKENS, "", "", "a"))
            await event_of(node, wire.StageChanged, 8)
            with pytest.raises(Exception, match="stage"):
                await node.lane.run_stage(step, bytes(4 * step.n_tokens), deadline_s=20.0)

    asyncio.run(run())
