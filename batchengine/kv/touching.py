"""Sealed pages that a lane faults in before a session migrates to it, and copies that it drops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

TOUCH_BYTES = 64 << 20  # pages faulted in by one frame at most, mostly from the page cache


class PageTouches:
    """Queue of touches for the next frames of one lane. Calls `wake` when one is added."""

    def __init__(self, page_bytes: int, wake: Callable[[], None]) -> None:
        self._pages_max = max(1, TOUCH_BYTES // page_bytes)  # of one frame
        self._wake = wake
        self._queue: deque[tuple[deque[int], asyncio.Future[None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def touch(self, codes: Sequence[int]) -> asyncio.Future[None]:
        """Queue pages of the store to fault in.

        The returned future resolves after the last frame with such a page, or the worker's exit.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((deque(codes), done))
        self._wake()
        return done

    def take(self) -> tuple[list[int], list[asyncio.Future[None]]]:
        """Take page codes for the next frame, and the futures that `touched` resolves after it."""
        codes, ended = list[int](), list[asyncio.Future[None]]()
        while self._queue and len(codes) < self._pages_max:
            left, done = self._queue[0]
            while left and len(codes) < self._pages_max:
                codes.append(left.popleft())
            if not left:
                self._queue.popleft()
                ended.append(done)
        return codes, ended

    def touched(self, ended: Sequence[asyncio.Future[None]]) -> None:
        """Resolve the futures of a frame, after its answer or its worker's exit."""
        for done in ended:
            if not done.done():
                done.set_result(None)

    def arena_died(self) -> None:
        """Resolve all queued touches, after the worker's exit."""
        queue, self._queue = self._queue, deque()
        self.touched([done for _, done in queue])


class FreedCodes:
    """Codes of freed pages, for a lane with copies of pages, or numbers of deleted extents, which
    it maps: its next frame names them, before a code names another page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes = set[int]()

    def __bool__(self) -> bool:
        return bool(self._codes)

    def add(self, code: int) -> None:
        """Remember a code. Any thread."""
        with self._lock:
            self._codes.add(code)

    def take(self) -> tuple[int, ...]:
        """Take the codes for the next frame."""
        with self._lock:
            codes, self._codes = self._codes, set[int]()
        return tuple(codes)
