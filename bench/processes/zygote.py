"""Engines and workers as forks of a process that has imported everything: runs cost milliseconds.

Kill benches need tens of thousands of process runs, and most of a real start is importing. One
zygote forks engine processes; each engine forks, before it starts anything, a template that
clones its workers as the engine's own children (CLONE_PARENT), so that death signals, exit
statuses and parents are those of processes started by exec. Forks run the product's own code; only
the chat template's child process is left out, as these benches send no chat requests.

Owns processes and pipes; the program that is forked speaks to the engine.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchengine.child.command import environment, python_command

ROOT = Path(__file__).resolve().parents[2]
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[platform.machine()]
MESSAGE_BYTES_MAX = 1 << 16
FILES_MAX = 8  # of one message


def send(sock: socket.socket, message: Any, fds: Sequence[int] = ()) -> None:
    """Send one JSON message with open files; blocks."""
    data = json.dumps(message).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)


def receive(sock: socket.socket) -> tuple[Any, list[int]]:
    """Receive one message and its files; (None, []) when the other side is gone. Blocks."""
    data, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES_MAX, FILES_MAX)
    return (json.loads(data) if data else None), list(fds)


def die_with_parent() -> None:
    """Have this process receive SIGKILL when its parent ends."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def number_of_thread(libc: ctypes.CDLL) -> ctypes.c_int:
    """Where the C library keeps the number of this thread, by which it pins threads to cores. It
    changes it in fork(), but not in the system call clone."""
    libc.pthread_self.restype = ctypes.c_size_t
    kept = (ctypes.c_int * 256).from_address(libc.pthread_self())
    (index,) = (i for i, value in enumerate(kept) if value == threading.get_native_id())
    return ctypes.c_int.from_address(ctypes.addressof(kept) + index * ctypes.sizeof(ctypes.c_int))


def close_files(keep: Sequence[int]) -> None:
    """Close every inherited file but these and 0, 1, 2: pipes and locks end with their owner."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


# ------------------------------------------------------------------------------- worker template


class Template:
    """The engine's side of its worker template; `popen` stands in for subprocess.Popen."""

    def __init__(self, compute: str, on_spawn: Callable[[int, int], None]) -> None:
        """`compute`: hash or cpu. `on_spawn(pid, incarnation)` after each worker's start."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            die_with_parent()
            close_files((theirs.fileno(),))
            with contextlib.suppress(OSError):  # the engine was killed
                _serve_workers(theirs, compute)
            os._exit(0)
        theirs.close()
        self._sock = ours
        self._on_spawn = on_spawn

    def popen(
        self, args: Sequence[str], *, pass_fds: Sequence[int], **_: object
    ) -> subprocess.Popen[bytes]:
        """Start a worker with the last five words of the command line `args`."""
        send(self._sock, list(args)[-5:], pass_fds)
        pid, _fds = receive(self._sock)
        self._on_spawn(pid, int(args[-1]))
        return _Process(pid)  # type: ignore[return-value]  # the part that a lane uses


class _Process:
    """The part of Popen that a lane uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def wait(self) -> int:
        """The exit status, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        return os.waitstatus_to_exitcode(status)


def _serve_workers(sock: socket.socket, compute: str) -> None:
    """The template's loop: each request becomes a clone that is the engine's child."""
    libc = ctypes.CDLL(None)
    tid = number_of_thread(libc)
    while True:
        asked, fds = receive(sock)
        if asked is None:
            os._exit(0)
        pid = libc.syscall(SYS_CLONE, CLONE_PARENT | int(signal.SIGCHLD), 0, 0, 0, 0)
        if pid == 0:
            tid.value = threading.get_native_id()
            _, parent, _, _, incarnation = asked
            sock_fd, report_fd, files_fd = (str(fd) for fd in fds)
            sys.argv = ["worker", sock_fd, parent, report_fd, files_fd, incarnation]
            sock.close()
            _be_worker(compute)
        for fd in fds:
            os.close(fd)
        send(sock, pid)


def _be_worker(compute: str) -> None:
    code = 1
    try:
        if compute == "hash":
            from batchengine.lanes.worker import main
            from bench.models.hashlm import HashWorker

            main(HashWorker)
        else:
            from batchengine.lanes.worker import main

            main()
        code = 0
    except SystemExit:
        code = 0
    except BaseException as error:
        print(f"worker: {error!r}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


# ---------------------------------------------------------------------------------------- zygote


class Zygote:
    """The bench's side: `spawn` engines, `reap` them. Blocking, about a millisecond each."""

    def __init__(self, program: str) -> None:
        """`program` is a module that calls `serve` when it is run with a file number."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            python_command(program, str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            cwd=ROOT,
            env=environment() | one_thread,
        )
        theirs.close()
        self._sock = ours

    def spawn(self, settings: dict[str, Any]) -> tuple[int, int, int]:
        """(pid, file for commands, file of answers) of a new engine process."""
        commands_read, commands = os.pipe()
        answers, answers_write = os.pipe()
        send(self._sock, {"settings": settings}, (commands_read, answers_write))
        os.close(commands_read)
        os.close(answers_write)
        pid, _ = receive(self._sock)
        return pid, commands, answers

    def reap(self, pid: int) -> int:
        """Wait for an engine's end; its exit status, negative for a signal."""
        send(self._sock, {"reap": pid})
        status, _ = receive(self._sock)
        return status

    def close(self) -> None:
        """End the zygote, and with it every engine that still runs."""
        self._sock.close()
        self._process.wait(30)


def serve(fd: int, main: Callable[[dict[str, Any], int, int], int]) -> None:
    """Fork a process per request, which runs `main(settings, commands, answers)`."""
    sock = socket.socket(fileno=fd)
    die_with_parent()
    while True:
        asked, fds = receive(sock)
        if asked is None:
            return
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            send(sock, os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                commands, answers = fds
                close_files((commands, answers))
                code = main(asked["settings"], commands, answers)
            except BaseException as error:
                print(f"engine: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)
        send(sock, pid)
