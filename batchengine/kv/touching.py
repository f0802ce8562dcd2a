"""Touching: a lane faults sealed pages in before a session migrates to it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

TOUCH_BYTES = 64 << 20  # pages faulted in by one frame at most, mostly from the page cache


class Touch:
    """Sealed pages to fault in. `done` resolves after the last frame, or the worker's exit."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.codes = deque(codes)
        self.left = max(1, len(codes))
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Resolve `done`."""
        if not self.done.done():
            self.done.set_result(None)


class PageTouches:
    """Queue of touches for the next frames of one lane. Calls `wake` when one is added."""

    def __init__(self, page_bytes: int, wake: Callable[[], None]) -> None:
        self._pages_max = max(1, TOUCH_BYTES // page_bytes)  # of one frame
        self._wake = wake
        self._queue: deque[Touch] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def touch(self, codes: Sequence[int]) -> asyncio.Future[None]:
        """Queue pages of the store to fault in; returns the `done` of the new `Touch`."""
        self._queue.append(Touch(codes))
        self._wake()
        return self._queue[-1].done

    def take(self) -> tuple[list[int], list[Touch]]:
        """Take page codes for the next frame, and the touches that it counts for."""
        codes, owners = list[int](), list[Touch]()
        while self._queue and len(codes) < self._pages_max:
            touch = self._queue[0]
            if touch.codes:
                codes.append(touch.codes.popleft())
            owners.append(touch)
            if not touch.codes:
                self._queue.popleft()
        return codes, owners

    def touched(self, touches: Sequence[Touch]) -> None:
        """Count down the touches of a frame, after its answer or its worker's exit."""
        for touch in touches:
            touch.left -= 1
            if not touch.left:
                touch.end()

    def arena_died(self) -> None:
        """Resolve all queued touches, after the worker's exit."""
        queue, self._queue = self._queue, deque()
        for touch in queue:
            touch.end()
