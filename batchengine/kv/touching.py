"""Sealed pages that a lane faults in before a session arrives there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

TOUCH_BYTES = 64 << 20  # of pages faulted in by one frame: mostly from the page cache


class Touch:
    """Sealed pages to fault in; `done` when the lane has, or died. Without pages: an answer."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.codes = deque(codes)
        self.left = max(1, len(codes))
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Nothing is left to fault in."""
        if not self.done.done():
            self.done.set_result(None)


class PageTouches:
    """What the next frames of one lane fault in. `wake` says that there is something."""

    def __init__(self, page_bytes: int, wake: Callable[[], None]) -> None:
        self._pages_max = max(1, TOUCH_BYTES // page_bytes)  # of one frame
        self._wake = wake
        self._queue: deque[Touch] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def touch(self, codes: Sequence[int]) -> asyncio.Future[None]:
        """Fault pages of the store in; without any, have the lane answer a frame."""
        self._queue.append(Touch(codes))
        self._wake()
        return self._queue[-1].done

    def take(self) -> tuple[list[int], list[Touch]]:
        """Codes of pages for the next frame, and what each belongs to, or only asks for it."""
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
        """The frame was executed, or its worker died."""
        for touch in touches:
            touch.left -= 1
            if not touch.left:
                touch.end()

    def arena_died(self) -> None:
        """Nothing is left to fault in: all are done."""
        queue, self._queue = self._queue, deque()
        for touch in queue:
            touch.end()
