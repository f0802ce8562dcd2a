"""An engine in a process started by exec, which a test may kill, and what it had sent until then.

Both sides are those of `bench.processes.engine_child`; workers are the product's own processes.
`python -m tests.support.engine_process` with JSON settings as argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from batchengine.engine import Engine
from batchengine.lanes.worker_process import WORKER
from bench.processes import engine_child
from bench.processes.kill_switch import KillSwitch
from tests.support.engines import Site


class Spawner:
    """Starts the process; stands in for a zygote."""

    def spawn(self, settings: dict[str, Any]) -> tuple[int, int, int]:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_process", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        with self.process.stdin as stdin, self.process.stdout as stdout:  # type: ignore[union-attr]
            return self.process.pid, os.dup(stdin.fileno()), os.dup(stdout.fileno())

    def reap(self, pid: int) -> int:
        assert pid == self.process.pid
        return self.process.wait()


class EngineProcess(engine_child.EngineProcess):
    """The parent's side. Use `engine_process` below."""

    async def tokens(
        self, stream: asyncio.Queue[dict[str, Any]], at_most: int = 1 << 30
    ) -> tuple[list[int], dict[str, Any]]:
        """Tokens sent until the end, the engine's death, or `at_most`; and the last message."""
        seen: list[int] = []
        message: dict[str, Any] = {}
        while len(seen) < at_most:
            message = await stream.get()
            if "token" not in message:
                break
            seen.append(message["token"])
        return seen, message

    async def end(self) -> None:
        """SIGKILL, and read everything that was sent before."""
        self.kill()
        await self.over()


@contextlib.asynccontextmanager
async def engine_process(
    site: Site, command: Sequence[str] = (), **overrides: object
) -> AsyncIterator[EngineProcess]:
    """A started engine process; killed at the end unless it has ended before."""
    given = {name.replace("__", "."): value for name, value in overrides.items()}
    settings = {
        "model": str(site.model),
        "folder": str(site.folder),
        "cache_dir": str(site.cache_dir),
        "command": list(command) or WORKER,
        "overrides": {
            "store.budget_bytes": 192 << 20,
            "server.admin_socket": "/tmp/unused.sock",
            **given,
        },
    }
    made = EngineProcess(Spawner(), settings)
    try:
        assert await made.is_ready(), "the engine died before it was ready"
        yield made
    finally:
        await made.end()


def main(settings: dict[str, Any]) -> int:
    child = engine_child.Child(sys.stdout.fileno(), KillSwitch(0, "engine"))
    engine = Engine(engine_child.config_of(settings), worker_command=tuple(settings["command"]))
    return asyncio.run(engine_child.live(child, engine, sys.stdin.fileno()))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
