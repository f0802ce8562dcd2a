"""A lane worker through its link: refusals, the rows it leaves, and its end."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

import kernels
from batchengine.core import GREEDY, PAGE_TOKENS, BatchEngineError
from batchengine.lanes import worker_process
from batchengine.lanes.process_guard import LANE_NICE
from batchengine.lanes.step_input import BadStep, StepLimits, unpack
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from kv_store import keys, layout, osio
from kv_store.arenas.arena import Arena, ArenaMapping, SlotOwner
from kv_store.errors import StoreError
from kv_store.layout import PageLayout
from tests.support.arena_rows import valid_rows
from tests.support.engines import suspend, words

pytestmark = pytest.mark.usefixtures("started_by_exec")

LAYOUT = PageLayout.uniform(4, 2, 64)
LIMITS = StepLimits(tokens_max=600, entries_max=4, context_tokens=2048, vocab_size=2048)


def frame_of(
    entries: list[tuple[int, list[int], list[int]]], **chores: object
) -> tuple[wire.Step, bytes]:
    """(start, tokens, slot codes) per entry -> a Step that wants a token of each."""
    made = tuple(
        wire.Entry(i + 1, 1, start, len(tokens), len(codes), GREEDY)
        for i, (start, tokens, codes) in enumerate(entries)
    )
    codes, tokens = array("Q"), array("i")
    for _, some_tokens, some_codes in entries:
        codes.extend(some_codes)
        tokens.extend(some_tokens)
    return wire.Step(made, **chores), codes.tobytes() + tokens.tobytes()  # type: ignore[arg-type]


OPEN = [ARENA_BIT | i for i in range(8)]
MALFORMED = [
    ("no tokens", [(0, [], [])]),
    ("start below zero", [(-1, [1], [])]),
    ("beyond the context", [(2048, [1], [*OPEN, ARENA_BIT | 8])]),
    ("too few pages", [(256, [1], OPEN[:1])]),
    ("too many pages", [(0, [1], OPEN[:2])]),
    ("too many tokens", [(0, [1] * 601, OPEN[:3])]),
    ("too many entries", [(0, [1], [code]) for code in OPEN[:5]]),
    ("token outside the vocabulary", [(0, [2048], OPEN[:1])]),
    ("negative token", [(0, [-1], OPEN[:1])]),
    ("writes a sealed page", [(0, [1], [3])]),
    ("writes a sealed page late", [(300, [1], [OPEN[0], 7])]),
    ("two writers", [(0, [1], OPEN[:1]), (5, [1], OPEN[:1])]),
]


@pytest.mark.parametrize(("name", "entries"), MALFORMED, ids=[name for name, _ in MALFORMED])
def test_unpack_refuses_malformed_steps(
    name: str, entries: list[tuple[int, list[int], list[int]]]
) -> None:
    step, payload = frame_of(entries)
    with pytest.raises(BadStep):
        unpack(step, payload, LIMITS)


def test_unpack_accepts_valid_steps_and_checks_the_payload() -> None:
    step, payload = frame_of([(0, [1, 2], OPEN[:1]), (300, [3], [7, OPEN[1]])])
    batch = unpack(step, payload, LIMITS)
    assert batch.shape.tolist() == [[2, 0, 1], [1, 300, 2]]
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.codes.tolist() == [OPEN[0], 7, OPEN[1]]
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(BadStep):
            unpack(step, wrong, LIMITS)


def load_message(model: Path, cache_dir: Path) -> wire.Load:
    return wire.Load(str(model), str(cache_dir), wire.CpuResources(1, (), 60), 600, 4, 2048)


async def attached(model: Path, cache_dir: Path, folder: Path) -> tuple[Lane, Arena]:
    lane = Lane("cpu")
    await lane.start(load_message(model, cache_dir))
    (folder / "ext").mkdir(exist_ok=True)
    path = str(folder / f"cpu.{lane.incarnation}")
    arena = Arena.create(path, LAYOUT, 8, lane.incarnation)
    await lane.attach(wire.Attach(path, 8, LAYOUT.page_bytes, str(folder / "ext")))
    return lane, arena


def slot(index: int, page: int, session: bytes = b"s") -> wire.ReserveSlot:
    return wire.ReserveSlot(index, 0, session, 1, page)


async def test_a_real_worker_computes_steps_and_refuses_bad_ones(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    tokens = words(1, 300)

    lane, arena = await attached(pocket_path, cache_dir, tmp_path)
    step, payload = frame_of([(0, tokens, OPEN[:2])])
    with pytest.raises(BatchEngineError, match="before it was reserved"):
        await lane.run(step, payload, deadline_s=10)
    step, payload = frame_of([(0, tokens, [ARENA_BIT | 8, ARENA_BIT | 9])])
    with pytest.raises(BatchEngineError, match="arena slot 9 of 8"):
        await lane.run(step, payload, deadline_s=10)
    step, payload = frame_of([(256, [1], [0, OPEN[0]])], reserve=(slot(0, 1),))
    with pytest.raises(BatchEngineError, match="extent 0 cannot be mapped"):
        await lane.run(step, payload, deadline_s=10)
    for bad in (8, -1, 2**31):
        for chores in ({"poison": (bad,)}, {"digest": (wire.Digest(bad, 256),)}):
            step, payload = frame_of([], **chores)
            with pytest.raises(BatchEngineError):
                await lane.run(step, payload, deadline_s=10)
    missing = wire.Verify(5 << 32, 1, bytes(16))
    step, payload = frame_of([], verify=(missing,))
    done = await lane.run(step, payload, deadline_s=10)
    assert done.verified == (False,)
    # After refusals the same worker computes.
    step, payload = frame_of(
        [(0, tokens, OPEN[:2])],
        reserve=(slot(0, 0), slot(1, 1)),
        digest=(wire.Digest(0, 256),),
    )
    done = await lane.run(step, payload, deadline_s=10)
    assert lane.incarnation == 1
    assert [row.session for row in done.rows] == [1]
    page = memoryview(bytearray(LAYOUT.page_bytes))
    os.preadv(arena.fd, [page], arena.shape.page_offset(0))
    assert done.digests == (keys.payload_digest(page),)
    # Every row is recorded: a later reader can prove which rows are complete, and their owner.
    files = osio.Files()
    for index, part in enumerate((tokens[:256], tokens[256:])):
        owner = SlotOwner(b"s", 1, 0, index)
        shape, ident = arena.shape, arena.arena_id
        assert valid_rows(files, arena.fd, shape, ident, index, owner, part) == len(part)
        other = SlotOwner(b"t", 1, 0, index)
        assert valid_rows(files, arena.fd, shape, ident, index, other, part) == 0
    with pytest.raises(StoreError):  # the worker holds the arena's lock
        ArenaMapping(arena.path, LAYOUT)
    step, payload = frame_of([], poison=(0,))
    await lane.run(step, payload, deadline_s=10)
    os.preadv(arena.fd, [page], arena.shape.page_offset(0))
    assert set(bytes(page)) == {0xFF}
    await lane.close()
    arena.close(delete=True)


async def test_a_worker_yields_to_the_engine_and_is_killed_first_on_low_memory(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    lane, arena = await attached(pocket_path, cache_dir, tmp_path)
    limits = proc(lane.pid, "limits")
    core = next(line for line in limits.splitlines() if line.startswith("Max core"))
    assert core.split()[4] == "0", "a core file holds prompts"
    assert proc(lane.pid, "oom_score_adj").strip() == "300"
    nice = os.getpriority(os.PRIO_PROCESS, lane.pid)
    assert nice == min(os.getpriority(os.PRIO_PROCESS, 0) + LANE_NICE, 19)
    await lane.close()
    arena.close(delete=True)


async def test_frames_of_another_incarnation_are_ignored(
    pocket_path: Path, cache_dir: Path
) -> None:
    lane = Lane("cpu")
    await lane.start(load_message(pocket_path, cache_dir))
    assert lane._protocol is not None
    for incarnation in (0, 2, 99):
        lane._protocol.send(wire.LANE_LINK.encode(wire.Shutdown(), incarnation=incarnation))
        lane._protocol.send(wire.LANE_LINK.encode(wire.Ping(), incarnation=incarnation, step=1))
    answer = await lane._ask(wire.Ping(), b"", 5.0)
    assert isinstance(answer, wire.Pong)
    assert lane.frames_late == 0  # the worker ignored them
    await lane.close()


async def test_errors_of_loading_keep_all_their_fields(tmp_path: Path, cache_dir: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + bytes(100))

    lane = Lane("cpu")
    with pytest.raises(BatchEngineError) as caught:
        await lane.start(load_message(model, cache_dir))
    assert caught.value.code.startswith("BE13")
    assert not lane.alive


async def test_a_start_without_a_free_descriptor_leaves_no_process(
    pocket_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, started = Lane("cpu"), list[int]()

    def none_left(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            await lane.start(load_message(pocket_path, cache_dir))
    assert not lane.alive
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    await lane.start(load_message(pocket_path, cache_dir))
    await lane.close()


async def test_a_worker_death_raises_one_exception_with_its_reason(
    pocket_path: Path, cache_dir: Path
) -> None:
    lane = Lane("cpu")
    for number, name in ((signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "SIGKILL")):
        await lane.start(load_message(pocket_path, cache_dir))
        os.kill(lane.pid, number)
        death = await lane.died()
        assert name in death.reason
        assert death.blames_step is (number == signal.SIGSEGV)
        if number == signal.SIGSEGV:
            assert "Segmentation fault" in death.report
        with pytest.raises(LaneDied):
            await lane.run(*frame_of([]), deadline_s=1)
    assert lane.incarnation == 2
    assert lane.backoff_s() > 0.0


async def test_the_lost_link_of_a_worker_does_not_end_its_successor(
    pocket_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop may report it after the next worker was started."""
    monkeypatch.setattr(worker_process, "LINGER_S", 0.0)
    lane = Lane("cpu")
    await lane.start(load_message(pocket_path, cache_dir))
    link = lane._protocol
    assert link is not None
    os.kill(lane.pid, signal.SIGKILL)
    await lane.died()
    await lane.start(load_message(pocket_path, cache_dir))
    link.connection_lost(None)
    await asyncio.sleep(0.01)
    assert isinstance(await lane._ask(wire.Ping(), b"", 60.0), wire.Pong)
    assert lane.incarnation == 2
    await lane.close()


async def test_a_deadline_ends_a_worker_that_does_not_answer(
    pocket_path: Path, cache_dir: Path
) -> None:
    lane = Lane("cpu")
    await lane.start(load_message(pocket_path, cache_dir))
    suspend(lane.pid)
    with pytest.raises(LaneDied, match="deadline") as caught:
        await lane.run(*frame_of([]), deadline_s=0.2)
    assert caught.value.blames_step


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_engine_that_was_suspended_takes_the_unread_answer(
    new_loop: Callable[[], asyncio.AbstractEventLoop], pocket_path: Path, cache_dir: Path
) -> None:
    """When it wakes, its timer is due and the answer is unread: the engine was late."""

    async def work() -> None:
        lane = Lane("cpu")
        await lane.start(load_message(pocket_path, cache_dir))
        reply = lane._send(wire.Ping(), b"", 0.2)
        time.sleep(0.5)  # noqa: ASYNC251  as SIGSTOP does it
        assert lane._protocol is not None
        transport: Any = lane._protocol._transport
        answer = transport.get_extra_info("socket").fileno()
        assert select.select([answer], [], [], 60.0)[0]  # the worker has answered meanwhile
        assert isinstance(await lane._receive(reply), wire.Pong)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lane.died(), 0.5)
        assert lane.incarnation == 1
        await lane.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


async def test_an_engine_that_was_suspended_extends_the_deadline_once(
    pocket_path: Path, cache_dir: Path
) -> None:
    """By at most one deadline: then a worker that hangs is killed."""

    lane = Lane("cpu")
    await lane.start(load_message(pocket_path, cache_dir))
    suspend(lane.pid)
    reply = lane._send(wire.Ping(), b"", 0.4)
    time.sleep(1.5)  # noqa: ASYNC251  the engine's own stop
    began = time.monotonic()
    with pytest.raises(LaneDied, match="deadline"):
        await lane._receive(reply)
    assert 0.35 < time.monotonic() - began < 30.0


PARENT = """
import asyncio, sys
from pathlib import Path
from batchengine.wire import lane as wire
from batchengine.lanes.worker_process import Lane

async def main():
    lane = Lane("cpu")
    await lane.start(wire.Load(*sys.argv[1:3], wire.CpuResources(1, (), 60), 64, 4, 512))
    print(lane.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_worker_never_outlives_its_engine(pocket_path: Path, cache_dir: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pocket_path), str(cache_dir)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert parent.stdout is not None
    with parent.stdout:
        worker = int(parent.stdout.readline())
    suspend(worker)  # not even a stopped one
    parent.kill()
    parent.wait()
    for _ in range(6000):
        if not _is_running(worker):
            break
        time.sleep(0.01)
    assert not _is_running(worker)


def proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def _is_running(pid: int) -> bool:
    try:
        return proc(pid, "stat").rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_package_has_the_same_page_tokens() -> None:
    assert PAGE_TOKENS == layout.PAGE_TOKENS == kernels.PAGE_TOKENS
