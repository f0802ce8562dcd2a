"""An engine in a process started by exec, which a test may kill, and what it had sent until then.

Both sides are those of `bench.processes`; workers are the product's own processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from batchengine.lanes.worker_process import WORKER
from bench.processes import engine_child
from bench.processes.engine_exec import ExecSpawner
from tests.support.engines import Site


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
    made = EngineProcess(ExecSpawner(), settings)
    try:
        assert await made.is_ready(), "the engine died before it was ready"
        yield made
    finally:
        await made.end()
