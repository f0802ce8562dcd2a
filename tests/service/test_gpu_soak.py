"""A daemon whose GPU and workers fail while sessions with live streams move to the GPU and back.

Every stream must have the text of the same request in a session that never moved. The GPU is
emulated (`tests.lanes.emulated_worker`).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchengine.core import BatchEngineError
from bench.simt.emulator import COMPILER, ROOT, compile_kernels
from service.admin.client import Client, admin
from tests.lanes.emulated_worker import plan_failure

KILLS = ("gpu", "fault", "memory", "cpu", "abort")  # SIGKILL of a worker, or a failure of the GPU
LAUNCHES_MAX = 200  # before a failure of the GPU
STREAMS = 3
POLL_S = 0.02
STUCK_S = 120.0
CONFIG = """
require = "gpu"
cache_dir = "{cache_dir}"
[model]
path = "{model}"
[server]
port = 0
admin_socket = "{folder}/admin.sock"
[store]
dir = "{folder}/kv"
allow_volatile = true
budget_bytes = 201326592
[router]
promote_auto = false
[[lane]]
name = "cpu"
threads = 1
tier = "bulk"
[[lane]]
name = "gpu"
kind = "cuda"
threads = 1
tier = "fast"
vram_bytes = 67108864
"""
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")


@contextmanager
def serving(model: Path, folder: Path, cache_dir: Path) -> Iterator[str]:
    """The address of a daemon that fails as `folder / "plan"` says; it must end in order."""
    compile_kernels(ROOT / "build/simt", is_checked=False)
    config = folder / "config.toml"
    config.write_text(CONFIG.format(model=model, folder=folder, cache_dir=cache_dir))
    command = [sys.executable, "-m", "tests.lanes.emulated_daemon", str(folder / "plan")]
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, str(config)], cwd=ROOT, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + STUCK_S
            while not (found := re.search(r"ready\s+(http://\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(POLL_S)
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()[-4000:]
        finally:
            process.kill()
            process.wait()


class Soak:
    """Streams, moves and failures on one daemon, until enough of them were counted."""

    def __init__(
        self, url: str, folder: Path, moves: int, kills: int, cases: int, tokens: int
    ) -> None:
        self.client, self.socket = Client(url), str(folder / "admin.sock")
        self.plan, self.tokens = folder / "plan", tokens
        self.moves, self.kills = moves, kills
        self.counts: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.expected = [self.answer(case) for case in range(cases)]
        self._over = threading.Event()

    def answer(self, case: int, session: str = "", sla_class: str = "background") -> str:
        """The text of one request, in a session of this name."""
        named = {"session_id": session} if session else {}
        body = {
            "messages": [{"role": "user", "content": f"Tell me story number {case} " * (case + 1)}],
            "temperature": 0.8,
            "seed": case,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "batchengine": {"class": sla_class, **named},
        }
        chunks = self.client.stream_chat(body)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    def stream(self, number: int) -> None:
        """One stream after the other, each in a new session."""
        rng = random.Random(number)
        for turn in range(1 << 30):
            if self._over.is_set():
                return
            case = rng.randrange(len(self.expected))
            sla_class = rng.choice(("background", "background", "interactive"))
            text = self.answer(case, f"s{number}-{turn}", sla_class)
            assert text == self.expected[case], (case, number, turn)
            self.counts["streams"] += 1

    def lane(self, name: str) -> dict[str, Any]:
        """The row of a lane."""
        status = admin(self.socket, "status")["status"]
        self.phases[status["state"]] += 1
        return next(lane for lane in status["lanes"] if lane["name"] == name)

    def move(self, rng: random.Random, to: str = "") -> None:
        """Move the session of a stream to lane `to`, or to the one where it is not."""
        rows = [row for row in admin(self.socket, "requests")["requests"] if row["lane"]]
        for row in rows if to else rng.sample(rows, min(1, len(rows))):
            target = to or ("gpu" if row["lane"] == "cpu" else "cpu")
            with contextlib.suppress(BatchEngineError):  # the lane is down, or the stream has ended
                report = admin(self.socket, "promote", session=row["session_id"], to=target)["move"]
                self.counts["moves"] += report["result"] == "moved"

    def kill(self, rng: random.Random, kind: str) -> None:
        """Have a worker end; returns once its lane is ready again."""
        name = "cpu" if kind == "cpu" else "gpu"
        before = self.lane(name)
        if kind == name:
            if before["pid"]:
                os.kill(before["pid"], signal.SIGKILL)
        else:
            plan_failure(self.plan, kind, rng.randrange(LAUNCHES_MAX))
        deadline = time.monotonic() + STUCK_S
        while self.lane(name)["incarnation"] == before["incarnation"]:
            assert time.monotonic() < deadline, f"{kind}: {before}"
            if self.plan.exists():
                self.move(rng, "gpu")  # no stream is there, and nothing is launched
            time.sleep(POLL_S)
        while self.lane(name)["state"] != "ready":
            assert time.monotonic() < deadline, self.lane(name)
            time.sleep(POLL_S)
        self.counts[f"kills: {kind}"] += 1

    def run(self) -> None:
        """Raises AssertionError for the first stream with another text."""
        rng = random.Random(1)
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(self.stream, number) for number in range(STREAMS)]
            try:
                for kill in range(self.kills):
                    while self.counts["moves"] < self.moves * (kill + 1) // self.kills:
                        self._check(streams)
                        self.move(rng)
                    self.kill(rng, KILLS[kill % len(KILLS)])
                    if kill % 10 == 9:
                        print(dict(self.counts), flush=True)
            finally:
                self._over.set()
                while not all(stream.done() for stream in streams):
                    self.move(rng, "cpu")
                    time.sleep(POLL_S)
            self._check(streams)

    def _check(self, streams: list[Any]) -> None:
        for stream in streams:
            if stream.done():
                stream.result()


@pytest.mark.parametrize(
    ("moves", "kills", "cases", "tokens"),
    [
        pytest.param(6, 2, 2, 300, marks=pytest.mark.slow),
        pytest.param(1000, 200, 8, 700, marks=pytest.mark.slow),
    ],
)
def test_streams_that_move_while_workers_fail_have_their_text(
    pocket_path: Path,
    tmp_path: Path,
    cache_dir: Path,
    moves: int,
    kills: int,
    cases: int,
    tokens: int,
) -> None:
    with serving(pocket_path, tmp_path, cache_dir) as url:
        soak = Soak(url, tmp_path, moves, kills, cases, tokens)
        began = time.monotonic()
        soak.run()
        print(f"{dict(soak.counts)} {dict(soak.phases)} in {time.monotonic() - began:.0f} s")
        assert soak.counts["moves"] >= moves
        assert soak.counts["streams"] >= STREAMS
        assert soak.phases["degraded"]
