"""`chat` and `top` in a terminal: line editing, history, Ctrl-C, its size."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.service.cli.test_cli import ROOT, daemon, wait_for

WAIT_S = 60.0
CTRL_C, CTRL_D, BACKSPACE, UP = "\x03", "\x04", "\x7f", "\x1b[A"


class Terminal:
    """A program in a terminal of its own: keys in, and what it has printed."""

    def __init__(self, pid: int, fd: int) -> None:
        self._pid, self._fd = pid, fd
        self._is_over = False
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def size(self, columns: int, rows: int = 24) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str, again: str = "") -> str:
        """Waits for a text; returns what came before it, and forgets both. Keys in `again` are
        pressed after each second without output: readline does not see a signal that came just
        before it waited."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, (text, self.shown)
            before = self.shown
            assert self._read(), (text, self.shown)
            if again and self.shown == before:
                self.press(again)
        before, _, self.shown = self.shown.partition(text)
        return before

    def _read(self) -> bool:
        """What the program has printed by now; False once it has ended."""
        if not select.select([self._fd], [], [], 1.0)[0]:
            return True
        try:
            piece = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)

    def end(self) -> int:
        """The exit code."""
        while self._read():
            pass
        self._is_over = True
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def close(self) -> None:
        os.close(self._fd)
        if not self._is_over:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


@contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    """A command in a terminal of 80 columns."""
    command = [sys.executable, "-m", "service.cli.main", *arguments]
    variables = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment}
    variables.pop("COLUMNS", None)
    pid, fd = pty.fork()
    if not pid:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests may run where it is ignored
        os.chdir(ROOT)
        os.execve(command[0], command, variables)
    made = Terminal(pid, fd)
    try:
        made.size(80)
        yield made
    finally:
        made.close()


def test_chat_edits_lines_and_keeps_them_for_later(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with daemon(tmp_path, HISTORY="1") as running:
        with terminal("chat", "--url", running.url, **state) as one:
            one.until("> ")
            one.press(f"hellx{BACKSPACE}o\r")
            one.until("w w w ")
            one.until("> ")
            one.press("half a line")
            one.until("half a line")
            one.press(CTRL_C)  # drops it, and stays
            one.until("> ", again=CTRL_C)
            one.press("/help\r")
            shown = one.until("several lines.").splitlines()
            assert max(map(len, shown)) <= 80
            one.until("> ")
            one.press(CTRL_D)
            assert one.end() == 0
        with terminal("chat", "--url", running.url, **state) as one:
            one.until("> ")
            one.press(UP + UP + "!\r")
            one.until("w w w ")
            one.until("> ")
            one.press("/bye\r")
            assert one.end() == 0
        wait_for(lambda: '"content": "hello!"' in running.output())
        chats = [line for line in running.lines if line.startswith("chat ")]
        assert '"content": "hello"' in chats[0]
        assert '"content": "hello!"' in chats[-1]


def test_ctrl_c_stops_an_answer_and_the_next_one_is_whole(tmp_path: Path) -> None:
    with (
        daemon(tmp_path, reply=40, delay_s=0.05) as running,
        terminal("chat", "--url", running.url, XDG_STATE_HOME=str(tmp_path / "s")) as one,
    ):
        one.until("> ")
        one.press("hello\r")
        one.until("w w ")
        one.press(CTRL_C)
        assert one.until("(stopped)").count("w ") < 36
        one.until("> ")
        one.press("again\r")
        one.until("w " * 40)
        one.until("> ")
        one.press(CTRL_D)
        assert one.end() == 0


def test_top_follows_the_size_of_the_terminal(tmp_path: Path) -> None:
    with (
        daemon(tmp_path) as running,
        terminal("top", "--seconds", "0.1", "--admin-socket", running.admin) as one,
    ):
        one.until("nothing is running")
        one.size(40)
        while "prefill/s   pid" in one.until("nothing is running"):
            pass
        one.size(120)
        while "prefill/s   pid" not in one.until("nothing is running"):
            pass
        one.press(CTRL_C)
        assert one.end() == 130
        assert "Traceback" not in one.shown


def test_ctrl_c_ends_a_start_without_a_word_of_its_processes(tmp_path: Path) -> None:
    """The terminal interrupts the daemon alone, which ends the processes that it has started."""
    own = ("--store", "kv", "--cache-dir", "cache", "--admin-socket", "a.sock")
    places = [word if word.startswith("--") else str(tmp_path / word) for word in own]
    with terminal("serve", "pocket", "--port", "0", "--allow-volatile-store", *places) as one:
        one.until("admin ")
        one.press(CTRL_C)
        one.until("stopped")
        assert one.end() in (0, 130)
        assert "Traceback" not in one.shown


def test_standard_streams_may_be_closed(tmp_path: Path) -> None:
    """No file of the program gets the number of one, and a question without a terminal is a no."""
    report = tmp_path / "report"
    program = (
        "import os, sys; from pathlib import Path; from service.cli.main import run\n"
        "code = run(sys.argv[2:])\n"
        "found = [os.path.realpath(f'/proc/self/fd/{number}') for number in (0, 1, 2)]\n"
        "Path(sys.argv[1]).write_text(' '.join([str(code), *found]))"
    )
    with daemon(tmp_path) as running:
        connect = [
            "connect",
            "claude",
            "--write",
            "--file",
            str(tmp_path / "x"),
            "--url",
            running.url,
        ]
        for command, code in ((connect, 1), (["chat", "--url", running.url], 0)):
            line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
            subprocess.run([*line, str(report), *command], cwd=ROOT, check=True, timeout=WAIT_S)
            assert report.read_text().split() == [str(code), *["/dev/null"] * 3]
