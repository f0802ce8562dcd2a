"""A child process on an event loop: started, killed, and reaped when its pidfd becomes readable.

Owns the process and its descriptor. Start it from the main thread: PR_SET_PDEATHSIG follows the
starting *thread*.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchengine.child import command

KILL_S = 10.0  # after which a killed process that has not ended is given up


@dataclass(slots=True)
class ChildProcess:
    """One process; `on_end` is called once, with how it ended and its exit status."""

    process: subprocess.Popen[Any]
    pidfd: int
    on_end: Callable[[str, int], None]
    is_running: bool = True
    kill_reason: str = ""

    @classmethod
    def start(
        cls, words: Sequence[str], on_end: Callable[[str, int], None], **options: Any
    ) -> ChildProcess:
        """Starts a command line; `options` are those of Popen. Raises OSError.

        Its process group is its own: Ctrl-C in a terminal interrupts this process, which ends it.
        """
        process = subprocess.Popen(
            words, env=command.environment(), cwd=command.FOLDER, process_group=0, **options
        )
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # no descriptor is left: without one its end would not be noticed
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise
        child = cls(process, pidfd, on_end)
        asyncio.get_running_loop().add_reader(pidfd, child.reap)
        return child

    @classmethod
    def start_linked(
        cls, words: Sequence[str], on_end: Callable[[str, int], None]
    ) -> tuple[ChildProcess, socket.socket]:
        """Starts a command line whose descriptor 0 is one end of a link, and which writes nowhere
        else; returns the other end, too. Raises OSError."""
        ours, theirs = socket.socketpair()
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with theirs:
            try:
                return cls.start(words, on_end, stdin=theirs.fileno(), **silent), ours
            except OSError:
                ours.close()
                raise

    def kill(self, reason: str) -> None:
        """SIGKILL; `on_end` is called once the process is reaped, or after KILL_S.

        One that does not end waits inside the kernel, such as for a dead disk: it runs no
        instruction of its own any more, and is reaped if it ends after all.
        """
        if self.is_running:
            if not self.kill_reason:
                self.kill_reason, unended = reason, f"{reason}, and could not be ended"
                asyncio.get_running_loop().call_later(KILL_S, self._end, unended, -signal.SIGKILL)
            self.process.send_signal(signal.SIGKILL)

    def reap(self) -> None:
        """Collects the exit status of the process, which has ended."""
        status = self.process.wait()
        asyncio.get_running_loop().remove_reader(self.pidfd)
        os.close(self.pidfd)
        self._end(self.kill_reason or _describe(status), status)

    def _end(self, how: str, status: int) -> None:
        if self.is_running:
            self.is_running = False
            self.on_end(how, status)


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    known = -status in {*signal.Signals}
    return f"was ended by {signal.Signals(-status).name if known else f'signal {-status}'}"
