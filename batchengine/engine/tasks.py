"""Background tasks of the engine, and what follows when one ends.

Owns the tasks. A task that fails is logged; the end of a vital one (a lane, the journal) resolves
`failure`, which the engine awaits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("batchengine.engine")

Spawn = Callable[[Coroutine[Any, Any, object], str], object]  # as `Tasks.spawn`


class Tasks:
    """Tasks on the running event loop, by name."""

    def __init__(self) -> None:
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Tasks {sorted(self._tasks.values())}>"

    def spawn(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        """Run `work` as a task; an exception is logged."""
        return self._run(work, name)

    def spawn_request(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run one request as a task; an exception resolves `failure`."""
        return self._run(work, "request", is_vital=True, may_end=True)

    def spawn_vital(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` as a task; if it ends before `cancel`, however it ends, `failure` resolves."""
        self._run(work, name, is_vital=True, may_end=False)

    async def cancel(self) -> None:
        """Cancel every task and wait for its end."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def lanes_over(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the tasks of the lanes to end by themselves."""
        self._stopping = True
        lanes = [task for task, name in self._tasks.items() if name.startswith("lane")]
        if lanes:
            await asyncio.wait(lanes, timeout=timeout_s)

    def _run(
        self,
        work: Coroutine[Any, Any, object],
        name: str,
        *,
        is_vital: bool = False,
        may_end: bool = True,
    ) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = name

        def done(task: asyncio.Task[Any]) -> None:
            del self._tasks[task]
            if task.cancelled() or self._stopping:
                return
            error = task.exception()
            if error is None and may_end:
                return
            log.critical("%s ended: %r", name, error, exc_info=error)
            if is_vital and not self.failure.done():
                self.failure.set_result(error or RuntimeError(f"{name} ended"))

        task.add_done_callback(done)
        return task
