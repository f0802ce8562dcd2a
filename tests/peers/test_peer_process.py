"""A peer in another process is stopped, goes on, is killed and begins again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from batchengine.peers.transitions import LinkState
from batchengine.wire.peer import Bulk, BulkReceived
from tests.peers.scene import Node, certify, node

ROOT = Path(__file__).resolve().parents[2]
UP, SUSPECT, DOWN = LinkState.UP, LinkState.SUSPECT, LinkState.DOWN


@contextlib.asynccontextmanager
async def process(
    folder: Path, port: int = 0, incarnation: int = 5
) -> AsyncIterator[tuple[int, int]]:
    """(pid, port) of a process with the links of the daemon whose files are in `folder`."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "tests.peers.peer_process", str(folder), str(port),
        str(incarnation), cwd=ROOT, stdout=asyncio.subprocess.PIPE, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    try:
        yield child.pid, int(await child.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def time_until(here: Node, state: LinkState, began: float, seconds: float) -> float:
    await here.until("b", state, seconds)
    return time.monotonic() - began


@pytest.mark.alone
async def test_a_stopped_peer_is_suspect_then_down_and_comes_back(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b", "c")
    async with (
        node(tmp_path, "a") as a,
        node(tmp_path, "c") as c,
        process(tmp_path / "b") as (pid, port),
    ):
        await asyncio.gather(a.know(c), c.know(a))
        peer = Node("b", tmp_path / "b", a.peers, a.task, [], [])
        await a.add("b", port)
        (peer.folder / "peers.d" / "a.toml").write_text(f'address = "127.0.0.1:{a.peers.port}"')
        await a.until("b", UP)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        suspect_s = await time_until(a, SUSPECT, began, 5)
        down_s = await time_until(a, DOWN, began, 5)
        assert suspect_s < 2.5  # 1 s, and what the machine takes
        assert 2.5 < down_s < 5.0  # 3 s
        assert a.link("c").state is UP, "another link never notices"
        frame = await a.link("c").request(Bulk(), b"1", timeout_s=1)
        assert frame.message == BulkReceived(1)
        began = time.monotonic()
        psutil.Process(pid).send_signal(signal.SIGCONT)
        await a.until("b", UP, 15)
        assert time.monotonic() - began < 10
        assert a.link("b").incarnation == 5
        # a short stop is suspect only
        changes = len(a.states)
        psutil.Process(pid).send_signal(signal.SIGSTOP)
        await a.until("b", SUSPECT, 5)
        psutil.Process(pid).send_signal(signal.SIGCONT)
        await a.until("b", UP, 5)
        assert [s for s in a.states[changes:] if s[0] == "b"] == [
            ("b", UP, SUSPECT), ("b", SUSPECT, UP),
        ]  # fmt: skip


@pytest.mark.alone
async def test_a_killed_peer_is_down_at_once_and_its_next_run_is_another(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "a") as a:
        port = 0
        for run in range(3):
            async with process(tmp_path / "b", port, 100 + run) as (pid, port):
                if run == 0:
                    await a.add("b", port)
                    own = tmp_path / "b" / "peers.d" / "a.toml"
                    own.write_text(f'address = "127.0.0.1:{a.peers.port}"')
                link = await a.until("b", UP, 20)
                assert link.incarnation == 100 + run
                began = time.monotonic()
                psutil.Process(pid).kill()
                assert await time_until(a, DOWN, began, 5) < 2.5  # 3 s for one that is silent
