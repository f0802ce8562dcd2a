"""An engine in a process started by exec, with the product's own worker processes.

Slower to start than the forks of `zygote`, and needed where lanes pin their threads to cores: the
threads of a clone do not have the ids that the C library remembers. Both sides of the pipes are
those of `engine_child`. `settings["prefix"]` may be words before the command, which end in an
exec, so that the pid is the engine's. `python -m bench.processes.engine_exec` with JSON settings as
argument.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from typing import Any

import uvloop

from batchengine.child.command import python_command
from batchengine.engine import Engine
from bench.processes import engine_child
from bench.processes.kill_switch import KillSwitch
from bench.processes.zygote import ROOT


class ExecSpawner:
    """Starts and reaps engine processes; stands in for a zygote."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def spawn(self, settings: dict[str, Any]) -> tuple[int, int, int]:
        """(pid, file for commands, file of answers) of a new engine process."""
        command = python_command("bench.processes.engine_exec", json.dumps(settings))
        process = subprocess.Popen(
            [*settings.get("prefix", ()), *command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self._processes[process.pid] = process
        with process.stdin as stdin, process.stdout as stdout:  # type: ignore[union-attr]  # pipes
            return process.pid, os.dup(stdin.fileno()), os.dup(stdout.fileno())

    def reap(self, pid: int) -> int:
        """Wait for an engine's end; its exit status, negative for a signal."""
        return self._processes.pop(pid).wait()


def main(settings: dict[str, Any]) -> int:
    """One run of an engine: `settings` as in `engine_child.main`, and `command` of the workers."""
    if settings.get("quiet", False):
        logging.disable(logging.CRITICAL)
    child = engine_child.Child(sys.stdout.fileno(), KillSwitch(0, "engine"))
    engine = Engine(engine_child.config_of(settings), worker_command=tuple(settings["command"]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(engine_child.live(child, engine, sys.stdin.fileno()))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
