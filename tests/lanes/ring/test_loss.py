"""A holder that dies, stops, closes or forgets: only the entries that need it are unreachable."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batchengine.wire import lane as wire
from kernels import SUPERPAGE_TOKENS
from tests.lanes.ring.certificates import Authority
from tests.lanes.ring.scene import Entry, Piece, Scene, running_scene, same_rows
from tests.support.engines import suspend, words

LENGTH = 3 * SUPERPAGE_TOKENS + 40
BY_B = Entry(1, LENGTH - 1, 1, [Piece("b", 0, 3)])
BY_B_AND_C = Entry(2, LENGTH - 9, 9, [Piece("c", 0, 1), Piece("b", 1, 1), Piece("c", 2, 1)])
BY_C = Entry(3, LENGTH - 1, 1, [Piece("c", 0, 2)])
LOCAL = Entry(4, 500, 1)
ALL = (BY_B, BY_C, LOCAL, BY_B_AND_C)


@asynccontextmanager
async def scene_of(
    model: Path, cache_dir: Path, folder: Path, **options: object
) -> AsyncIterator[tuple[Scene, wire.StepDone]]:
    """Nodes a, b, c with four timelines, and the answer of `a` alone to a step of ALL."""
    async with running_scene("abc", model, cache_dir, folder, **options) as scene:  # type: ignore[arg-type]
        lengths = {entry.key: LENGTH if entry.pieces else 600 for entry in ALL}
        await scene.prefill("a", {key: words(key, length) for key, length in lengths.items()})
        alone = await scene["a"].step(*(Entry(e.key, e.start, e.n) for e in ALL))
        yield scene, alone


def without(done: wire.StepDone, *lost: Entry) -> wire.StepDone:
    keys = {entry.key for entry in lost}
    return wire.StepDone(tuple(r for r in done.rows if r.session not in keys), (), (), (), 0)


async def expect(scene: Scene, alone: wire.StepDone, *lost: Entry, lap_ms: int = 20_000) -> float:
    """A step of ALL, of which these are unreachable; returns its seconds."""
    began = time.monotonic()
    done = await scene["a"].step(*ALL, scene=scene, lap_ms=lap_ms)
    assert done.unreachable == tuple(i for i, entry in enumerate(ALL) if entry in lost)
    assert done.nonfinite == ()
    assert same_rows(done, without(alone, *lost))
    return time.monotonic() - began


async def test_a_stopped_holder_costs_its_entries_and_one_lap(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async with scene_of(pocket_path, cache_dir, tmp_path) as (scene, alone):
        await expect(scene, alone)
        suspend(scene["b"].lane.pid)
        for _ in range(2):
            took = await expect(scene, alone, BY_B, BY_B_AND_C, lap_ms=1500)
            assert 1.5 <= took < 15.0, "far below the deadline of other laps"
        os.kill(scene["b"].lane.pid, signal.SIGCONT)
        await expect(scene, alone)
        counts = await scene["a"].counts()
        assert counts["late"] >= 2, "what b sends after the end of a lap is counted"
        assert set(counts) == {"late"}


async def die(scene: Scene) -> None:
    os.kill(scene["b"].lane.pid, signal.SIGKILL)


async def close_link(scene: Scene) -> None:
    for name in "ac":
        node = scene[name]
        node.lane.note(wire.CloseLink(node.links["b"]))


async def release(scene: Scene) -> None:
    """The holder's own engine takes its pages back, and the holder answers nothing more."""
    for hold in scene["b"].holds.values():
        scene["b"].lane.note(wire.Release(hold))
    os.kill(scene["b"].lane.pid, signal.SIGCONT)


@pytest.mark.parametrize("end", [die, close_link, release])
async def test_a_lap_under_way_ends_with_its_holder(
    end: Callable[[Scene], Awaitable[None]], pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async with scene_of(pocket_path, cache_dir, tmp_path) as (scene, alone):
        suspend(scene["b"].lane.pid)  # so that it is in the middle of a lap
        began = time.monotonic()
        step = scene["a"].start_step(*ALL, scene=scene)
        await asyncio.sleep(0.3)
        assert not step.done()
        await end(scene)
        done = await step
        assert time.monotonic() - began < 10.0, "far below the deadline of a lap"
        assert done.unreachable == (0, 3)
        assert done.waited_us > 0
        assert same_rows(done, without(alone, BY_B, BY_B_AND_C))
        await expect(scene, alone, BY_B, BY_B_AND_C)
        os.kill(scene["b"].lane.pid or os.getpid(), signal.SIGCONT)


async def test_a_hold_that_cannot_be_served_is_refused(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async with scene_of(pocket_path, cache_dir, tmp_path) as (scene, alone):
        hold = scene["b"].holds[1]
        scene["b"].holds[1] = hold ^ 1  # there is none of this number
        await expect(scene, alone, BY_B)
        scene["b"].holds[1] = hold
        await expect(scene, alone)
        scene["b"].lane.note(wire.Hold(99, (1 << 63 | 80,)))
        why = "BE2201 step refused: an arena slot is used before it was reserved"
        await scene["b"].until(wire.HoldChanged(99, False, why))
        assert (await scene["b"].counts())["refused"] >= 1


async def test_a_link_needs_a_certificate_of_the_authority_and_of_the_name(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    ours, theirs = Authority(tmp_path), Authority(tmp_path, "other")
    identities = {name: ours.identity(name) for name in "ab"}
    identities["c"] = ours.identity("c", certified="b")
    identities["d"] = theirs.identity("d", trusts=ours.certificate)
    async with running_scene(
        "abcd", pocket_path, cache_dir, tmp_path, identities=identities, is_linked=False
    ) as scene:
        await scene.link("a", "b", tcp=True)
        for impostor in "cd":
            for pair in (("a", impostor), (impostor, "a")):
                await scene.link(*pair, up=False)
                number = scene["a"].links[impostor]
                event = await scene["a"].next_change(number)
                if event.is_up:  # the end that dials is done before its certificate is looked at
                    event = await scene["a"].next_change(number)
                assert not event.is_up
                assert "b" in event.why if impostor == "c" else "CERTIFICATE" in event.why.upper()
        assert isinstance(await scene["a"].lane._ask(wire.Ping(), b"", 5.0), wire.Pong)
