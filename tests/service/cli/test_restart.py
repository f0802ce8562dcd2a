"""A restart under load with a socket that the service manager keeps: nothing is lost or refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.admin.client import admin
from service.http.listener import bind
from tests.service.test_daemon_sessions import BODY, ROOT, Reader

# As the service manager starts a daemon: its socket is descriptor 3, and the pid is known.
START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-m", "service.cli.main", *sys.argv[2:]])
"""
SEEDS = {"a": 1, "b": 2}  # by session
PATH = "/v1/chat/completions"
SETTINGS = """
cache_dir = "{cache}"
[server]
port = {port}
admin_socket = "{folder}/a.sock"
drain_s = 0.0
[store]
dir = "{folder}/kv"
allow_volatile = true
"""


@contextmanager
def started(listening: int, model: Path, config: Path) -> Iterator[subprocess.Popen[str]]:
    """A daemon that has the listening socket; it may still be loading."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(listening), "serve", str(model), "--config", str(config)],
        cwd=ROOT, pass_fds=(listening,), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.strip().startswith(word):
            return
    raise AssertionError("".join(lines))


def asked(name: str, seed: int) -> dict[str, Any]:
    return {**BODY, "seed": seed, "max_tokens": 800, "batchengine": {"session_id": name}}


def test_a_restart_loses_no_session_and_refuses_no_client(
    pocket_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("r")
    config = folder / "c.toml"
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        config.write_text(SETTINGS.format(cache=cache_dir, port=port, folder=folder))
        with started(sock.fileno(), pocket_path, config) as process:
            read_until(process, "ready")
            streams = {name: Reader(port, "POST", PATH, asked(name, seed))
                       for name, seed in SEEDS.items()}  # fmt: skip
            for stream in streams.values():
                stream.read(50)
            os.kill(process.pid, signal.SIGTERM)
            for stream in streams.values():
                stream.read()
            read_until(process, "stopped")
            assert process.wait(30) == 0
        answers: list[str] = []
        between = threading.Thread(target=lambda: answers.append(_story(port)))
        between.start()  # connects while no daemon runs
        with started(sock.fileno(), pocket_path, config) as process:
            read_until(process, "ready")
            known = admin(str(folder / "a.sock"), "sessions", stored=True)["sessions"]
            assert {row["name"] for row in known} >= {"a", "b"}
            for name, stream in streams.items():
                path = f"/v1/stream?session_id={name}"
                rest = Reader(port, "GET", path, None, **{"Last-Event-ID": stream.event_id})
                rest.read()
                seed = SEEDS[name]
                whole = Reader(port, "POST", PATH, asked(f"{name}-whole", seed))
                whole.read()
                assert 50 <= stream.last_id < whole.last_id == 800
                assert stream.text + rest.text == whole.text
                assert rest.is_done
                for reader in (stream, rest, whole):
                    reader.close()
            between.join(30)
            assert answers
            assert answers[0]


def _story(port: int) -> str:
    reader = Reader(port, "POST", PATH, {**BODY, "max_tokens": 20})
    reader.read()
    reader.close()
    return reader.text
