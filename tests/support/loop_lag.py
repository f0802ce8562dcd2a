"""The lag of an event loop: how long one task may keep the others waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator


class LoopLag:
    """Processor time of the loop's thread between two runs of a task that is always due.

    Time that other programs take from a busy machine does not count.
    """

    def __init__(self) -> None:
        self.worst_ms = 0.0

    async def run(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            self.worst_ms = max(self.worst_ms, 1000 * (time.thread_time() - began))


@contextlib.asynccontextmanager
async def loop_lag() -> AsyncIterator[LoopLag]:
    """The lag of the running loop within the block, without the garbage of earlier tests."""
    gc.collect()
    gc.freeze()
    lag = LoopLag()
    task = asyncio.create_task(lag.run())
    try:
        yield lag
    finally:
        task.cancel()
        gc.unfreeze()
