"""What `tools/check_systemd.py` runs as root in its virtual machine: the installed service under a
real systemd. Only the standard library: one line `ok NAME` or `FAILED NAME: WHY` for each check.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

PROGRAM = "/opt/batchengine/bin/batchengine"
UNIT = "batchengine.service"
URL = "http://127.0.0.1:7717"
WAIT_S = 120.0
TURN = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "stream": True, "max_tokens": 1500, "ignore_eos": True, "seed": 3,
}  # fmt: skip


def sh(command: str) -> str:
    """Output of a command, which must succeed."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise AssertionError(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def show(name: str) -> str:
    """A property of the unit."""
    return sh(f"systemctl show -P {name} {UNIT}")


def until(what: str, happened: Callable[[], bool], seconds: float = WAIT_S) -> float:
    """Waits for an event; how long it took in seconds."""
    start = time.monotonic()
    while not happened():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)
    return time.monotonic() - start


def get(path: str) -> bytes:
    """Body of a GET request."""
    with urllib.request.urlopen(URL + path, timeout=WAIT_S) as answer:
        return answer.read()


def is_healthy() -> bool:
    try:
        return b"ok" in get("/health")
    except (OSError, http.client.HTTPException):
        return False


class Stream:
    """The events of a streamed answer, read by a thread until it ends or breaks."""

    def __init__(self, session: str, resume: str = "") -> None:
        self.body = b""
        if resume:
            self._request = urllib.request.Request(
                f"{URL}/v1/stream?session_id={session}", headers={"Last-Event-ID": resume}
            )
        else:
            turn = {**TURN, "batchengine": {"session_id": session}}
            self._request = urllib.request.Request(
                f"{URL}/v1/chat/completions", json.dumps(turn).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=WAIT_S) as answer:
                while piece := answer.read1(65536):
                    self.body += piece
        except (OSError, ValueError, http.client.HTTPException):
            return

    @property
    def events(self) -> list[str]:
        return self.body.decode(errors="replace").split("\n\n")[:-1]

    @property
    def last_id(self) -> str:
        ids = [found[1] for event in self.events if (found := re.search("(?m)^id: *(.*)$", event))]
        return ids[-1] if ids else ""

    def text(self, last_id: str = "") -> str:
        """The answer's text, up to the event `last_id` if one is named."""
        text = ""
        for event in self.events:
            for line in event.splitlines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        text += choice["delta"].get("content") or ""
            if last_id and f"id: {last_id}" in event:
                break
        return text

    def started(self) -> bool:
        return len(self.events) > 20

    def end(self) -> None:
        self._thread.join(WAIT_S)


def survives(action: Callable[[], object]) -> str:
    """A streamed turn that `action` interrupts and a client resumes has the text of another."""
    name = f"s{time.monotonic_ns()}"
    stream = Stream(name)
    until("the stream starts", stream.started)
    before = int(show("MainPID"))
    action()
    took = until("another process", lambda: int(show("MainPID")) not in (0, before))
    until("the daemon is ready", is_healthy)
    stream.end()
    last = stream.last_id
    rest = Stream(name, last)
    rest.end()
    whole = stream.text(last) + rest.text()
    undisturbed = Stream(f"{name}u")
    undisturbed.end()
    assert len(whole) > 1500, (len(whole), stream.events[-2:], rest.events[-2:])
    assert whole == undisturbed.text(), (whole[:300], undisturbed.text()[:300])
    return f"{took:.1f} s, {len(whole)} characters equal"


def installs() -> str:
    out = sh(f"{PROGRAM} install-service")
    steps = out.split("next\n")[1].splitlines()
    sh(steps[0])
    assert "batchengine" in sh("id batchengine")
    where = "/var/lib/batchengine /etc/batchengine/keys"
    return sh(f"stat -c '%n %U %a' {where}").replace("\n", ", ")


def unit_is_verified() -> str:
    out = subprocess.run(
        ["systemd-analyze", "verify", UNIT, "batchengine.socket"], capture_output=True, text=True
    )
    lines = [line for line in out.stderr.splitlines() if "batchengine" in line]
    assert not lines, lines
    return sh(f"systemd-analyze security {UNIT} | tail -1")


def missing_model_is_said() -> str:
    """Exit code 2 ends the unit: no restart."""
    subprocess.run(["systemctl", "start", UNIT], capture_output=True)
    until("failed", lambda: show("ActiveState") == "failed")
    assert show("NRestarts") == "0", show("NRestarts")
    assert show("ExecMainStatus") == "2", show("ExecMainStatus")
    return sh(f"journalctl -u {UNIT} -o cat | grep -m1 BE11")


def starts() -> str:
    sh("install -o batchengine -m 0400 /root/model.gguf /var/lib/batchengine/model.gguf")
    sh(f"{PROGRAM} check --config /etc/batchengine/batchengine.toml")
    sh(f"systemctl reset-failed {UNIT}; systemctl enable --now batchengine.socket {UNIT}")
    assert show("Type") == "notify"
    assert show("ActiveState") == "active"
    until("the daemon is ready", is_healthy)
    assert "lane" in sh(f"{PROGRAM} ps")
    return show("StatusText")


def clients_wait_during_a_restart() -> str:
    """No connection is refused: the socket is systemd's."""
    failures: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                get("/health")
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    failures.append(str(error))
            except (OSError, http.client.HTTPException) as error:
                if "refused" in str(error):
                    failures.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    sh(f"systemctl restart {UNIT}")
    until("the daemon is ready", is_healthy)
    over.set()
    thread.join()
    assert not failures, failures[:3]
    return ""


def restart_under_load() -> str:
    return survives(lambda: sh(f"systemctl restart --no-block {UNIT}"))


def kill_under_load() -> str:
    return survives(lambda: sh(f"systemctl kill -s KILL {UNIT}"))


def watchdog_ends_a_stopped_daemon() -> str:
    return survives(lambda: sh(f"kill -STOP {show('MainPID')}"))


def a_stopped_lane_is_replaced() -> str:
    """By the daemon itself, or by the watchdog."""
    name = f"l{time.monotonic_ns()}"
    stream = Stream(name)
    until("the stream starts", stream.started)
    lane = json.loads(sh(f"{PROGRAM} ps --json"))["status"]["lanes"][0]
    sh(f"kill -STOP {lane['pid']}")
    start = time.monotonic()
    stream.end()
    took = time.monotonic() - start
    until("the daemon is ready", is_healthy)
    rest = Stream(name, stream.last_id)
    rest.end()
    whole = stream.text(stream.last_id) + rest.text()
    undisturbed = Stream(f"{name}u")
    undisturbed.end()
    assert whole == undisturbed.text(), (len(whole), stream.events[-2:], rest.events[-2:])
    return f"{took:.1f} s"


def socket_starts_the_service() -> str:
    sh(f"systemctl stop {UNIT}")
    assert show("ActiveState") == "inactive"
    get("/health")
    assert show("ActiveState") == "active"
    return ""


def processes_are_confined() -> str:
    """The unit's filter lets workers and text processes set one of their own."""
    log = sh(f"journalctl --no-pager -o cat -u {UNIT}")
    assert "every system call" not in log, log
    children = sh(f"ps -o pid= --ppid {show('MainPID')}").split()
    filters = {sh(f"grep -h Seccomp_filters /proc/{pid}/status").split()[1] for pid in children}
    return f"filters: {', '.join(sorted(filters))}"


def the_network_is_closed() -> str:
    """IPAddressDeny: the unit reaches loopback only."""
    return show("IPAddressDeny") + " but " + show("IPAddressAllow")


CHECKS = (
    installs, unit_is_verified, missing_model_is_said, starts, clients_wait_during_a_restart,
    restart_under_load, kill_under_load, a_stopped_lane_is_replaced,
    watchdog_ends_a_stopped_daemon, socket_starts_the_service, processes_are_confined,
    the_network_is_closed,
)  # fmt: skip


def main() -> None:
    failed = 0
    for check in CHECKS:
        start = time.monotonic()
        try:
            said = check()
            print(f"ok {check.__name__} {time.monotonic() - start:.1f} s: {said}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED {check.__name__}: {error}", flush=True)
    if failed:
        print(sh(f"journalctl --no-pager -u {UNIT} | tail -60"))
    Path("/root/failed").write_text(str(failed))
    print(f"{len(CHECKS) - failed} passed, {failed} failed", flush=True)


if __name__ == "__main__":
    main()
