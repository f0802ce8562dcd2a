"""A worker that tries to reach beyond itself at one token of the prompt, as stolen code would.

Same process, frames and memory as the real one. Started by exec as
`python -m tests.support.confined_worker FILE ...`; FILE receives the errno of each attempt (JSON).
`read` does the same in a text process.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from batchengine.child import confinement
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.host_device import Computed
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire

PRY = 2010
X32_GETPID = 0x40000000 | 39


def errno_of(attempt: Callable[[], object]) -> int:
    """0 if the attempt succeeds."""
    try:
        attempt()
    except OSError as error:
        return error.errno or -1
    return 0


def call(number: int) -> None:
    """A system call with arguments that no kernel accepts, should it look at them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6) == -1:
        raise OSError(ctypes.get_errno(), "refused")


def run_thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def end_itself_softly() -> None:
    os.kill(os.getpid(), 0)
    signal.raise_signal(signal.SIGTERM)  # which it ignores


def attempts() -> dict[str, Callable[[], object]]:
    calls = confinement.ARCHITECTURES[platform.machine()].calls
    names = [name for name in confinement.REFUSED if name in calls]
    engine = os.getppid()
    found: dict[str, Callable[[], object]] = {
        name: partial(call, calls[name]) for name in names if name not in ("fork", "vfork")
    }
    found |= {
        "a socket": socket.socket,
        "a pair of sockets": socket.socketpair,
        "a signal to the engine": partial(os.kill, engine, 0),
        "a signal to the group": partial(os.kill, 0, 0),
        "a limit of the engine": partial(_prlimit, engine),
        "the cores of the engine": partial(os.sched_setaffinity, engine, {0}),
        "input of a terminal": lambda: fcntl.ioctl(1, termios.TIOCSTI, b"x"),
        "a signal by a file": lambda: fcntl.fcntl(1, fcntl.F_SETOWN, engine),
        "a program": partial(os.execv, "/bin/true", ["true"]),
        "a process": os.fork,
    }
    if platform.machine() == "x86_64":
        found["the x32 calls"] = partial(call, X32_GETPID)
    return found


def own() -> dict[str, Callable[[], object]]:
    """What a confined process may still do."""
    return {
        "own thread": run_thread,
        "own signal": end_itself_softly,
        "own limit": partial(_prlimit, 0),
        "own file": Path(__file__).read_text,
    }


def tried(attempts: dict[str, Callable[[], object]]) -> bytes:
    """The errno of each attempt, as JSON."""
    return json.dumps({name: errno_of(attempt) for name, attempt in attempts.items()}).encode()


def _prlimit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def read(encoder: object, question: bytes, body: bytes) -> bytes:
    """A reader of a text process."""
    return tried(attempts())


class PryingDevice(CpuDevice):
    """Tries everything when PRY is among the tokens of a step, then computes the step."""

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        if PRY in batch.tokens.tolist():
            Path(FILE).write_bytes(tried(attempts() | own()))
        return super().compute(batch, addresses, seeds)


if __name__ == "__main__":
    FILE = sys.argv.pop(1)
    main(partial(Worker, devices={wire.CpuResources: PryingDevice}))
