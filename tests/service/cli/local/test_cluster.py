"""`batchengine cluster demo`: it runs to its end, reports the end of a daemon, leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from batchengine.core import BatchEngineError
from service.cli import render
from service.cli.local.cluster import NODE_BYTES, Cluster, page_bytes
from tests.service.cli.test_cli import ROOT, cli, wait_for

DEMO = [sys.executable, "-m", "service.cli", "cluster", "demo"]


@pytest.mark.slow  # docs/linked-hosts.md runs it once in the default suite
def test_it_runs_to_its_end_and_can_use_its_folder_again(tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            [*DEMO, "--once", "--nodes", "2", "--keep", str(tmp_path / "kept")],
            cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""
        assert len(re.findall(r"^node-[12]  .* 1 of 1 up ", done.stdout, re.MULTILINE)) == 2
        assert done.stdout.endswith("stopping\ncluster demo: done\n")
    assert os.listdir(tmp_path) == ["kept"]
    for name in ("node-1", "node-2"):
        assert (tmp_path / "kept" / name / "kv" / "meta.db").exists()


def test_too_little_memory_is_refused_with_what_is_needed(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = pocket_path.stat().st_size + 3 * (NODE_BYTES + 2 * 24 * page_bytes(pocket_path))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with Cluster(pocket_path, kv_pages=24) as cluster, pytest.raises(BatchEngineError) as refusal:
        cluster.start(3)
    assert refusal.value.code == "BE1119"
    assert render.size(needed) in refusal.value.why


def test_a_dead_daemon_is_reported_and_a_killed_demo_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    scratch = tmp_path_factory.mktemp("s")  # a short path: unix sockets live in it
    output = tmp_path / "out"
    with output.open("w") as out:
        demo = subprocess.Popen(
            [*DEMO, "--nodes", "3"], cwd=ROOT,
            env={**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": ""},
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_for(lambda: "kill -9 " in output.read_text() or demo.poll() is not None, 90)
        assert demo.poll() is None, output.read_text()
        daemons = psutil.Process(demo.pid).children()
        assert len(daemons) == 3
        assert output.read_text().count(" 2 of 2 up ") == 3
        victim = int(re.findall(r"kill -9 (\d+)", output.read_text())[0])
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: output.read_text().count("sees node-2 down") >= 2)
        wait_for(lambda: "node-2 has ended: killed by signal 9" in output.read_text())
    finally:
        demo.kill()
        demo.wait()
    _, alive = psutil.wait_procs(daemons, timeout=30)
    assert not alive
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--nodes", "1"], 2, ("BE1118", "2 to 8")),
        (["--model", "/nowhere/x.gguf"], 2, ("BE1116", "/nowhere/x.gguf")),
        (["--model", "/dev/null"], 2, ("BE1116", "not a regular file")),
        (["--keep", "/proc/nowhere"], 1, ("BE2506", "cannot write")),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    arguments: list[str], code: int, words: tuple[str, ...]
) -> None:
    done = cli("cluster", "demo", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr
