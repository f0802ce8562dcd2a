"""A daemon as a child process on a free loopback port, for the demos and `chat MODEL.gguf`.

Owns the child process and its scratch folder, and stops one and removes the other. A real
installation runs the daemon under systemd instead.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from batchengine import errors
from batchengine.child.command import environment, python_command
from batchengine.core import BatchEngineError

READY_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 30.0
LINES_KEPT = 40  # of the child's output, for the error message
KEPT = ("HOME", "TMPDIR")  # variables that its configuration reads
_CODE = re.compile(r"\bBE\d{4}\b")  # of an error
_READY = re.compile(r"\s+ready\s+(?P<url>http://\S+)")


class ChildDaemon:
    """A child daemon; a context manager that always stops it and removes its scratch folder."""

    def __init__(
        self,
        model: Path,
        on_line: Callable[[str], None],
        *extra: str,
        scratch: Path | None = None,
        keeps: bool = False,
    ) -> None:
        """`extra`: options of `serve`. `scratch`: a folder of its own, by default a new one; it
        stays if `keeps`."""
        self._on_line = on_line
        self.url = ""
        self.scratch = scratch or new_scratch()
        self._keeps = keeps
        self._was_signalled = False
        own = {"--port": "0", "--cache-dir": str(self.scratch / "cache")}
        command = ["serve", str(model.absolute())]
        command += [part for pair in own.items() if pair[0] not in extra for part in pair]
        command += ["--store", str(self.scratch / "kv"), "--allow-volatile-store"]
        command += ["--admin-socket", self.admin_socket, *extra]
        removed = "" if keeps else str(self.scratch)
        program = python_command("service.cli.local.child_process", str(os.getpid()), removed)
        try:
            self._process = subprocess.Popen(
                [*program, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment(KEPT),
                cwd=self.scratch,
                start_new_session=True,  # Ctrl-C reaches this process only, which stops it
            )
        except BaseException:
            self._remove_scratch()
            raise
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._kept: deque[str] = deque(maxlen=LINES_KEPT)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def admin_socket(self) -> str:
        return str(self.scratch / "admin.sock")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_ready(self, seconds_max: float = READY_SECONDS_MAX) -> str:
        """The base URL, once it serves; raises START_FAILED with the child's last error."""
        deadline = time.monotonic() + seconds_max
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failed(f"it was not ready after {seconds_max:g} s") from None
            if line is None:
                raise self._failed(f"it ended with exit code {self._process.wait()}")
            self._kept.append(line)
            self._on_line(line)
            if found := _READY.match(line):
                self.url = found["url"]
                return self.url

    def rest(self) -> list[str]:
        """Lines printed since the last call."""
        found: list[str] = []
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                found.append(line)
        return found

    def _failed(self, why: str) -> BatchEngineError:
        last = next((line for line in reversed(self._kept) if _CODE.search(line)), "")
        return errors.START_FAILED(why=why + (f"; it said: {last.strip()}" if last else ""))

    @property
    def exit_code(self) -> int | None:
        """The exit code of a child that has ended; minus a signal's number if that ended it."""
        return self._process.poll()

    def begin_stop(self) -> None:
        """Has the child drain and end, without waiting for that. Idempotent."""
        if self._process.poll() is None and not self._was_signalled:
            self._was_signalled = True  # a second signal would end the drain
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Drains and ends the child; returns its exit code. Idempotent."""
        process = self._process
        self.begin_stop()
        if process.poll() is None:
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
        code = process.wait()
        self._reader.join(5.0)
        if process.stdout is not None and not self._reader.is_alive():
            process.stdout.close()
        self._remove_scratch()
        return code

    def _remove_scratch(self) -> None:
        if not self._keeps:
            remove_scratch(self.scratch)

    def __enter__(self) -> ChildDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def new_scratch() -> Path:
    """A new folder for one child, with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="batchengine-"))
    if len(os.fsencode(folder)) > 80:  # a unix socket path may have 107 bytes
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="batchengine-", dir="/tmp"))
    return folder


def remove_scratch(folder: Path) -> None:
    """Removes the scratch folder, again if an ending worker puts another file into it."""
    for _ in range(30):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP end this program like Ctrl-C, so that its child is stopped in order."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
