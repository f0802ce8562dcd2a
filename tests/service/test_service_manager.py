"""The daemon as a unit of systemd: its start-up time, and the unit file itself."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest

from batchengine.config import Config, load
from batchengine.core import BatchEngineError
from batchengine.engine import Engine
from batchengine.engine.lane.steps.inflight import InFlightStep, InFlightSteps
from batchengine.lanes.worker_process import Lane
from batchengine.wire.lane import Step
from service import notify
from service.daemon import Daemon, progresses, start_warnings
from service.http.listener import bind, take
from tests.support.engines import until
from tests.support.fake_engine import FakeEngine, fake_config
from tests.support.stopping_worker import SLOWLY

UNIT = Path(__file__).resolve().parents[2] / "systemd" / "batchengine.service"
SLOW = (sys.executable, "-m", "tests.support.stopping_worker", SLOWLY, "0")


class Manager:
    """The service manager's end of the notify socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)

    async def messages(self, seconds: float) -> list[str]:
        """Messages of the next seconds."""
        await asyncio.sleep(seconds)
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self._socket.recv(4096).decode())
        return found

    def close(self) -> None:
        self._socket.close()


def extensions(messages: list[str]) -> int:
    return sum("EXTEND_TIMEOUT_USEC=120000000" in message for message in messages)


@pytest.mark.alone
@pytest.mark.usefixtures("started_by_exec")
async def test_a_load_extends_its_start_while_it_progresses(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops earns no more time, and goes on earning it once it continues. What the
    start has made is no work for the garbage collector afterwards."""
    monkeypatch.setattr(notify, "EXTEND_EVERY_S", 0.1)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    manager = Manager(tmp_path / "notify")
    given: dict[str, object] = {
        "model.path": str(pocket_path), "store.dir": str(tmp_path / "kv"), "server.port": 0,
        "store.allow_volatile": True, "store.budget_bytes": 192 << 20,
        "server.admin_socket": str(tmp_path / "admin.sock"), "cache_dir": str(cache_dir),
    }  # fmt: skip

    def engine(config: Config) -> Engine:
        return Engine(config, worker_command=SLOW)

    sock = bind("127.0.0.1", 0)
    serving = asyncio.create_task(Daemon(load(None, given), engine).serve(sock))
    try:
        async with asyncio.timeout(40):
            seen: list[str] = []
            while not extensions(seen):
                seen = await manager.messages(0.3)
            (worker,) = (
                child
                for child in psutil.Process().children(recursive=True)
                if SLOW[2] in child.cmdline()
            )
            worker.send_signal(signal.SIGSTOP)
            await manager.messages(0.4)
            assert await manager.messages(1.0) == []
            worker.send_signal(signal.SIGCONT)
            assert extensions(await manager.messages(1.0)) >= 3
            while not any("READY=1" in message for message in seen):
                seen = await manager.messages(0.3)
            assert not any("EXTEND" in message for message in await manager.messages(0.3))
            seconds: list[float] = []
            for _ in range(3):
                began = time.thread_time()
                gc.collect()
                seconds.append(time.thread_time() - began)
            assert min(seconds) < 0.020, "a collection stops every stream"
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == 0
    finally:
        serving.cancel()
        gc.unfreeze()
        sock.close()
        manager.close()


async def test_the_watchdog_gets_no_ping_while_a_lane_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000"}
    engine = FakeEngine()
    states = ["ready"]
    monkeypatch.setattr(engine, "lanes", lambda: [{"name": "a", "state": s} for s in states])
    notifier = notify.Notifier(environment)
    feeding = asyncio.create_task(notifier.feed_watchdog(lambda: progresses(engine)))
    try:
        async with asyncio.timeout(20):
            while "WATCHDOG=1" not in await manager.messages(0.05):
                pass
            states[0] = "stuck"
            await manager.messages(0.05)
            assert await manager.messages(0.2) == []
            states[0] = "restarting"
            while "WATCHDOG=1" not in await manager.messages(0.05):
                pass
    finally:
        feeding.cancel()
        notifier.close()
        manager.close()


def test_a_lane_is_stuck_once_a_step_outlives_its_deadline_twice() -> None:
    steps = InFlightSteps(cast(Lane, None), 1, lambda ms: None)
    assert not steps.is_stuck(1e9)
    step = InFlightStep(cast(Step, None), b"", [], [], [], None, predicted_ms=10_000.0)
    steps.add(step, 1000.0)
    assert not steps.is_stuck(1000.0 + 2 * 200_000)
    assert steps.is_stuck(1001.0 + 2 * 200_000)
    assert not steps.died().is_sent  # nor is it blamed for a death
    assert not steps.is_stuck(1e9)


def passed(sock: socket.socket, pid: int) -> tuple[list[socket.socket], dict[str, str]]:
    """What a process with this id takes of a socket of the service manager."""
    environment = {"LISTEN_FDS": "1", "LISTEN_PID": str(pid), "LISTEN_FDNAMES": "http", "A": "b"}
    number = os.dup(sock.fileno())
    found = notify.passed_sockets(environment, number)
    if not found:
        os.close(number)
    return found, environment


def test_a_listening_socket_of_the_service_manager_is_taken() -> None:
    with bind("127.0.0.1", 0) as sock:
        host, port = sock.getsockname()
        assert passed(sock, os.getpid() + 1) == ([], {"A": "b"})
        found, environment = passed(sock, os.getpid())
        assert environment == {"A": "b"}  # no child takes it for its own
        taken = take(found, "localhost", port)
        assert taken is found[0]
        assert not taken.get_inheritable()
        sock.close()
        with taken, socket.create_connection((host, port)):  # waits until the daemon accepts
            taken.setblocking(True)
            taken.accept()[0].close()
    assert take([], "127.0.0.1", 7717) is None


def test_a_passed_socket_at_another_address_is_refused() -> None:
    """Keys and hosts are checked for the configured address, not for that of the socket unit."""
    with bind("127.0.0.1", 0) as sock:
        found, _ = passed(sock, os.getpid())
        with pytest.raises(BatchEngineError, match=r"passed .*127\.0\.0\.1.*ListenStream"):
            take(found, "127.0.0.1", sock.getsockname()[1] + 1)
        found[0].close()


def test_the_unit_gives_the_daemon_the_time_it_asks_for() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text())
    unit = dict(parser["Service"])
    assert (unit["Type"], unit["NotifyAccess"], unit["KillMode"]) == ("notify", "main", "mixed")
    assert unit["TimeoutStartSec"] == f"{notify.EXTEND_SECONDS}s"
    assert unit["RestartPreventExitStatus"] == "2"
    assert (unit["LimitCORE"], unit["UMask"], unit["NoNewPrivileges"]) == ("0", "0077", "yes")
    assert unit["ExecStart"].split()[1:2] == ["serve"]
    # with which processes give up more; systemd 252 does not count it among @system-service
    assert "\nSystemCallFilter=@system-service @resources seccomp\n" in UNIT.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/bin/batchengine", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert UNIT.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_a_low_limit_of_open_files_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(None, {"limits.streams_max": 100})
    for files, connections in ((256, 64), (64, 1), (65_536, 0)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        said = [text for text in start_warnings(config) if "connections at most" in text]
        assert [int(text.split()[0]) for text in said] == [connections] * bool(connections)


async def test_with_a_log_in_json_nothing_else_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = fake_config()
    server = replace(
        config.server, log_format="json", admin_socket=str(tmp_path / "admin.sock"), port=0
    )
    engine = FakeEngine()
    engine.info.notes.append("a note")
    daemon = Daemon(replace(config, server=server), lambda _: engine)
    with bind("127.0.0.1", 0) as sock:
        serving = asyncio.create_task(daemon.serve(sock))
        async with asyncio.timeout(20):
            await until(lambda: any("ready http" in one.getMessage() for one in caplog.records))
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == 0
    assert capsys.readouterr().out == ""
    notes = [record for record in caplog.records if "a note" in record.getMessage()]
    assert [(one.levelname, one.getMessage()) for one in notes] == [("WARNING", "a note")]
    assert caplog.records[-1].getMessage() == "stopped"
