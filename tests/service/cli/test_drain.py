"""`batchengine drain`: what it waits for, what it says is left, and that it can be undone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from service.admin.client import Client, admin
from tests.service.cli.test_cli import ROOT, ask, cli, daemon, requests_of, wait_for


def test_drain_waits_for_requests_and_can_be_undone(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with daemon(tmp_path, GATE=str(gate)) as running:
        done = cli("drain", "--admin-socket", running.admin)
        assert (done.returncode, done.stderr) == (0, "")
        assert "drained" in done.stdout
        health = Client(running.url).get("/health")
        assert health["status"] == "leaving"
        assert "leaving" in cli("ps", "--admin-socket", running.admin).stdout
        done = cli("drain", "--undo", "--admin-socket", running.admin)
        assert (done.returncode, done.stdout) == (0, "new sessions are taken again\n")
        assert Client(running.url).get("/health")["status"] == "ok"

        answers: list[Any] = []
        stream = threading.Thread(target=lambda: answers.append(ask(running.url)))
        stream.start()
        wait_for(lambda: len(requests_of(running)) == 1)
        done = cli("drain", "--timeout", "0", "--admin-socket", running.admin)
        assert done.returncode == 1
        assert "left after 0 s" in done.stdout
        assert requests_of(running)[0]["request_id"] in done.stdout
        command = ["drain", "--admin-socket", running.admin]
        with subprocess.Popen(
            [sys.executable, "-u", "-m", "service.cli.main", *command],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        ) as waiting:  # fmt: skip
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "waits for 1 request\n"
            gate.touch()
            assert "drained" in waiting.stdout.read()
        assert waiting.returncode == 0
        stream.join(60)
        assert answers[0]["choices"][0]["finish_reason"] == "stop"
        done = cli("drain", "--json", "--admin-socket", running.admin)
        assert json.loads(done.stdout) == {
            "leaving": True,
            "requests": [],
            "given": [],
            "stages": [],
            "over": True,
        }


def test_a_drain_that_another_operator_undoes_ends(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with daemon(tmp_path, GATE=str(gate)) as running:
        stream = threading.Thread(target=lambda: ask(running.url))
        stream.start()
        wait_for(lambda: len(requests_of(running)) == 1)
        ends: list[Any] = []
        waiting = threading.Thread(
            target=lambda: ends.append(cli("drain", "--admin-socket", running.admin))
        )
        waiting.start()
        wait_for(lambda: admin(running.admin, "drain", action="show")["drain"]["leaving"])
        admin(running.admin, "drain", action="undo")
        waiting.join(60)
        gate.touch()
        stream.join(60)
        assert ends[0].returncode == 1
        assert "undone meanwhile" in ends[0].stdout
