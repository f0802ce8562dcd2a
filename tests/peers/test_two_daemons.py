"""Two real daemons with the pocket model: they see each other, and the loss of one is no news to
the sessions of the other."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.admin.client import Client, admin
from service.cli.local.child import ChildDaemon
from service.cli.local.cluster import free_ports
from service.cli.main import run
from tests.peers.scene import certify

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0,
    "ignore_eos": True, "max_tokens": 1200,
}  # fmt: skip


def daemon(pocket: Path, folder: Path, name: str, port: int) -> ChildDaemon:
    return ChildDaemon(
        pocket, lambda _: None, "--threads", "1", "--peer-listen", f"127.0.0.1:{port}",
        "--peers-dir", str(folder / name),
    )  # fmt: skip


def peers_of(daemon: ChildDaemon) -> dict[str, Any]:
    return admin(daemon.admin_socket, "peers")["peers"]


def states(daemon: ChildDaemon) -> list[str]:
    return [row["state"] for row in peers_of(daemon)["peers"]]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture
def linked(pocket_path: Path, tmp_path: Path) -> Iterator[tuple[ChildDaemon, ChildDaemon]]:
    """Daemons `a` and `b`; each knows the other from its folder."""
    certify(tmp_path, "a", "b")
    ports = dict(zip("ab", free_ports(2), strict=True))
    for name, other in (("a", "b"), ("b", "a")):
        file = tmp_path / name / "peers.d" / f"{other}.toml"
        file.write_text(f'address = "127.0.0.1:{ports[other]}"\n')
    with (
        daemon(pocket_path, tmp_path, "a", ports["a"]) as a,
        daemon(pocket_path, tmp_path, "b", ports["b"]) as b,
    ):
        a.wait_ready(60)
        b.wait_ready(60)
        until(lambda: all(states(one) == ["up"] for one in (a, b)))
        yield a, b


def measured(daemon: ChildDaemon, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `peers status --bandwidth` prints; a measurement may come to nothing."""
    lines: list[str] = []

    def is_measured() -> bool:
        capsys.readouterr()
        assert run(["peers", "status", "--admin-socket", daemon.admin_socket, "--bandwidth"]) == 0
        lines[:] = capsys.readouterr().out.splitlines()
        return peers_of(daemon)["peers"][0]["bandwidth_bytes_per_s"] is not None

    until(is_measured)
    return lines


def kill_worker(daemon: ChildDaemon) -> None:
    for child in psutil.Process(daemon.pid).children():
        if "batchengine.lanes.worker" in child.cmdline():
            child.kill()


def metrics_of(daemon: ChildDaemon) -> str:
    url = daemon.url.removesuffix("/v1") + "/metrics"
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def story(client: Client, on_chunk: Callable[[int], None]) -> tuple[str, list[float]]:
    """A long greedy answer, and the seconds before each of its chunks."""
    text, gaps, last = "", list[float](), time.monotonic()
    for chunk in client.stream_chat(BODY):
        gaps.append(time.monotonic() - last)
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
        on_chunk(len(gaps))
        last = time.monotonic()
    return text, gaps


def test_two_daemons_and_the_death_of_one(
    linked: tuple[ChildDaemon, ChildDaemon], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = linked
    for one, other in ((a, "b"), (b, "a")):
        until(lambda: peers_of(one)["peers"][0]["rtt_ms"] is not None)  # noqa: B023
        until(lambda: peers_of(one)["peers"][0]["data"] == "up")  # noqa: B023
        lines = measured(one, capsys)
        assert "TLS" in lines[0]
        assert lines[2].split()[:3] == [other, "up", "up"]
        assert "the same" in lines[2]
        row = peers_of(one)["peers"][0]
        assert row["bandwidth_bytes_per_s"] > 1 << 20
        assert row["kv_bytes"] > 0
        assert row["model"] == "pocket-q4_0"
        assert row["repr_id"] == peers_of(one)["repr_id"]
    client = Client(a.url)
    health = client.get("/health")
    assert (health["peers"], health["peers_up"], health["data_links_up"]) == (1, 1, 1)
    until(lambda: 'batchengine_peer_data_up{peer="b"} 1.0' in metrics_of(a))  # once a second
    kill_worker(b)
    for is_up in (False, True):
        until(lambda: (peers_of(a)["peers"][0]["data"] == "up") == is_up)  # noqa: B023
    alone, gaps_alone = story(client, lambda _: None)
    workers = psutil.Process(b.pid).children(recursive=True)
    noticing: list[concurrent.futures.Future[float]] = []

    def kill(chunk: int) -> None:
        if chunk == 200:
            os.kill(b.pid, signal.SIGKILL)
            noticing.append(pool.submit(until, lambda: states(a) != ["up"]))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        text, gaps = story(client, kill)
    assert noticing[0].result() < 3.5
    assert text == alone
    assert max(gaps[150:]) < 2.5 + max(gaps_alone), "the stream did not pause"
    row = peers_of(a)["peers"][0]
    assert row["state"] in ("down", "dialling")
    assert any(word in row["why"] for word in ("refused", "closed", "reset")), row["why"]
    health = client.get("/health")
    assert (health["status"], health["peers_up"]) == ("ok", 0)
    psutil.wait_procs(workers, timeout=30)
    for worker in workers:
        assert not worker.is_running()


def test_health_says_that_there_can_be_no_link(pocket_path: Path, tmp_path: Path) -> None:
    with daemon(pocket_path, tmp_path, "a", free_ports(1)[0]) as a:
        a.wait_ready(60)
        client = Client(a.url)
        until(lambda: client.get("/health")["status"] == "degraded")
        (trouble,) = client.get("/health")["troubles"]
        assert trouble.startswith("no link to other daemons: BE")
        assert "peers init" in trouble
        certify(tmp_path, "a")
        until(lambda: client.get("/health")["status"] == "ok")
