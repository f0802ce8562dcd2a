"""A worker that hangs while it loads is replaced; one that makes progress may take its time."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchengine.child import process
from batchengine.core import BatchEngineError
from batchengine.lanes import worker_process
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.weights import cache
from batchengine.wire import lane as wire
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    suspend,
    until,
    words,
)
from tests.support.stopping_worker import STAGES

pytestmark = pytest.mark.usefixtures("started_by_exec")

SILENCE_S = 1.5


def stopping(stage: str, incarnation: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.support.stopping_worker", stage, str(incarnation))


def load_message(model: Path, cache_dir: Path) -> wire.Load:
    return wire.Load(str(model), str(cache_dir), wire.CpuResources(1, (), 60), 600, 4, 2048)


async def load_and_attach(lane: Lane, model: Path, folder: Path) -> None:
    """The start of a lane with an empty cache of weights: its worker packs them."""
    await lane.start(load_message(model, folder))
    attach = wire.Attach(str(folder / "none"), 8, 327_680, str(folder))
    await lane.attach(attach, deadline_s=SILENCE_S)


async def test_a_worker_that_stops_in_any_stage_of_its_load_is_ended(
    pocket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "LOADING_SILENCE_S", SILENCE_S)
    lanes = [Lane(stage, command=stopping(stage, 0)) for stage in STAGES]
    starts = (load_and_attach(lane, pocket_path, tmp_path / lane.name) for lane in lanes)
    async with asyncio.timeout(30):
        ends = await asyncio.gather(*starts, return_exceptions=True)
    for lane, end in zip(lanes, ends, strict=True):
        assert isinstance(end, LaneDied), (lane, end)
        assert "missed a deadline" in end.reason
        assert not lane.alive


async def test_a_turn_survives_a_worker_that_hangs_at_its_restart(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = words(41, 300)
    async with running_engine(site, stopping("map weights", 2)) as engine:
        _, reader = await started(engine, request(prompt, 40), 3)
        lane = engine.state.lanes[0].lane
        with monkeypatch.context() as patched:
            patched.setattr(worker_process, "LOADING_SILENCE_S", SILENCE_S)
            lane.kill("is replaced by one that hangs")
            async with asyncio.timeout(30):
                await until(lambda: lane.incarnation >= 3)
        async with asyncio.timeout(30):  # a worker that loads has its usual deadline again
            answer = await reader
        assert answer.tokens == reference.tokens(prompt, 40)
        assert lane.incarnation >= 3
        assert len((await read(engine.submit(request(prompt, 4)))).tokens) == 4


async def test_a_worker_that_cannot_be_ended_is_given_up(
    pocket_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits inside the kernel; it is reaped when it ends after all."""
    monkeypatch.setattr(process, "KILL_S", 0.3)
    lane = Lane("cpu")
    await lane.start(load_message(pocket_path, cache_dir))
    stuck = lane.pid
    suspend(stuck)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "send_signal", lambda *_: None)
        lane.kill("missed a deadline")
        death = await asyncio.wait_for(lane.died(), 10)
    assert death.reason == "missed a deadline, and could not be ended"
    await lane.start(load_message(pocket_path, cache_dir))
    os.kill(stuck, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{stuck}").exists())
    assert lane.alive
    assert lane.incarnation == 2
    await lane.close()


async def test_closing_does_not_wait_for_a_worker_that_cannot_be_ended(
    pocket_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "KILL_S", 0.3)
    lane = Lane("cpu")
    await lane.start(load_message(pocket_path, cache_dir))
    stuck = lane.pid
    suspend(stuck)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "send_signal", lambda *_: None)
        await asyncio.wait_for(lane.close(grace_s=0.1), 10)
    assert (await lane.died()).reason == "was closed, and could not be ended"
    os.kill(stuck, signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{stuck}").exists())


async def test_progress_extends_the_deadline_of_a_load(
    pocket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for another one to pack the weights reports that it waits."""
    path = cache.cache_path(tmp_path, pocket_path).with_suffix(".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    reported = asyncio.Event()
    silence_s = worker_process.LOADING_SILENCE_S

    def on_loading(_: wire.Loading) -> None:
        reported.set()

    lane = Lane("cpu")
    start = asyncio.ensure_future(lane.start(load_message(pocket_path, tmp_path), on_loading))
    await reported.wait()
    with monkeypatch.context() as patched:
        patched.setattr(worker_process, "LOADING_SILENCE_S", SILENCE_S)
        began = time.monotonic()
        _, waiting = await asyncio.wait({start}, timeout=2.5 * SILENCE_S)
        assert waiting, "the worker was ended although it reports progress"
    assert silence_s == worker_process.LOADING_SILENCE_S
    reported.clear()
    await reported.wait()  # its deadline is the usual one again: a busy machine packs slowly
    os.close(fd)
    await start
    assert lane.incarnation == 1
    assert time.monotonic() - began > 2 * SILENCE_S
    await lane.close()


async def test_an_engine_whose_first_worker_hangs_refuses_to_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "LOADING_SILENCE_S", SILENCE_S)
    with pytest.raises(BatchEngineError, match="missed a deadline") as caught:
        async with running_engine(site, stopping("cpu kernels", 0)):
            pass
    assert caught.value.name == "lane_down"
