"""End to end with two lanes: promote during a stream, kill all, restart, resume the stream."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchengine.core import BatchEngineError
from service.admin.client import admin

ROOT = Path(__file__).resolve().parents[2]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "seed": 3,
    "temperature": 0.8, "max_tokens": 1200, "ignore_eos": True,
}  # fmt: skip


@contextmanager
def serving(model: Path, folder: Path, cache_dir: Path) -> Iterator[tuple[int, int, str]]:
    """Port, pid and admin socket of a daemon with two lanes; killed at the end."""
    socket = str(folder / "a.sock")
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli.main", "serve", str(model), "--port", "0", "--lanes",
        "2",
         "--threads", "1", "--store", str(folder / "kv"), "--allow-volatile-store",
         "--cache-dir", str(cache_dir), "--admin-socket", socket],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if found := re.match(r"\s+ready\s+http://127.0.0.1:(\d+)", line):
                assert sum(one.startswith("  lane ") for one in lines) == 2, lines
                yield int(found[1]), process.pid, socket
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Reader:
    """One SSE stream, read line by line; keeps the text and the last event id."""

    def __init__(self, port: int, method: str, path: str, body: Any, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        sent = {"Content-Type": "application/json"} | headers
        self.connection.request(method, path, body and json.dumps(body), sent)
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200, self.reply.read()
        self.text, self.last_id, self.is_done = "", 0, False
        self.event_id = ""
        self.serving: dict[str, Any] = {}

    def read(self, tokens: int = 1 << 30) -> None:
        """Read until `tokens` were sent, the stream ends, or the connection is lost."""
        pending, named = 0, ""
        while self.last_id < tokens:
            try:
                line = self.reply.readline().decode()
            except (OSError, http.client.HTTPException):
                return
            if not line:
                return
            if line.startswith("id: "):
                named = line[4:-1]
                pending = int(named.rpartition(":")[2].partition(".")[0])
            elif line == "data: [DONE]\n":
                self.is_done = True
            elif line.startswith("data: {") and line.endswith("}\n"):
                chunk = json.loads(line[6:])
                self.serving = chunk.get("batchengine", self.serving)
                for choice in chunk["choices"]:
                    self.text += choice["delta"].get("content") or ""
                self.last_id = max(self.last_id, pending)
                self.event_id = named

    def close(self) -> None:
        self.reply.close()
        self.connection.close()


def test_a_stream_promoted_killed_and_resumed_has_the_same_text(
    pocket_path: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("e")
    asked = {**BODY, "batchengine": {"session_id": "tale", "class": "background"}}
    with serving(pocket_path, folder, cache_dir) as (port, pid, socket):
        whole = Reader(port, "POST", "/v1/chat/completions", {**BODY, "session_id": "whole"})
        whole.read()
        assert whole.is_done
        whole.close()

        first = Reader(port, "POST", "/v1/chat/completions", asked)
        first.read(100)
        move = admin(socket, "promote", session="tale")["move"]
        assert (move["source"], move["target"], move["result"]) == ("bulk", "fast", "moved")
        first.read(300)
        path = "/v1/sessions/tale/demote"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", path)
        reply = connection.getresponse()
        assert json.loads(reply.read())["target"] == "bulk"
        connection.close()
        decision = admin(socket, "explain", id="tale")["explain"]["decisions"][-1]
        assert [(m["from"], m["to"]) for m in decision["moves"]] == [
            ("bulk", "fast"), ("fast", "bulk"),
        ]  # fmt: skip
        first.read(500)
        os.kill(pid, signal.SIGKILL)
        first.read()
        assert not first.is_done
        first.close()
    assert 500 <= first.last_id < 1200

    with serving(pocket_path, folder, cache_dir) as (port, pid, socket):
        states = {r["session_id"]: r["state"] for r in admin(socket, "sessions")["sessions"]}
        assert states == {first_id(socket): "interrupted"}
        second = Reader(
            port, "GET", "/v1/stream?session_id=tale", None, **{"Last-Event-ID": first.event_id}
        )
        second.read()
        second.close()
        assert second.is_done
        assert first.text + second.text == whole.text
        # what was sent but not yet in the ledger is computed again: the same tokens
        assert second.serving["resumed_tokens"] > 250
        again = Reader(port, "GET", "/v1/stream?session_id=tale&from=0", None)
        again.read()
        again.close()
        assert again.text == whole.text
        again = Reader(
            port, "POST", "/v1/chat/completions", {**asked, "max_tokens": 700, "seed": 4}
        )
        again.read()
        again.close()
        for named in (first.event_id, "req_lost:500"):  # and nothing of the other turn after it
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            path = "/v1/stream?session_id=tale"
            connection.request("GET", path, headers={"Last-Event-ID": named})
            reply = connection.getresponse()
            error = json.loads(reply.read())["error"]
            assert (reply.status, error["code"]) == (409, "turn_followed")
            connection.close()
        assert admin(socket, "store", op="verify")["store"]["bad"] == 0
        assert admin(socket, "drop", session="tale")["dropped"]["state"] == "dropped"
        with pytest.raises(BatchEngineError, match="no session tale"):
            admin(socket, "why", session="tale")


def first_id(socket: str) -> str:
    """The daemon's own id of the session that its client calls tale."""
    return str(admin(socket, "session", session="tale")["session"]["session_id"])
