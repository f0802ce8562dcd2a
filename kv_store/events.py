"""The queue of events from the store's threads to its user, with one wake-up callback.

Calls nothing but that callback: the consumer handles events where it drains the queue.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kv_store.pages.index import PageRef


class PageInvalid(NamedTuple):
    """A resident page became invalid: its bytes failed their check, or its content is wrong.

    `ref` stays valid while its slot is pinned. Evicted pages are not reported.
    """

    key: bytes
    ref: PageRef


StoreEvent = PageInvalid


class StoreEvents:
    """Events of one open store, oldest first. Any thread may put; one consumer drains."""

    def __init__(self) -> None:
        self._events: deque[StoreEvent] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever the queue stops being empty, and at once if it is not empty now.

        `wake` runs on any thread, under the store's lock: it must return at once and not raise.
        """
        with self._lock:
            self._wake = wake
            waiting = bool(self._events)
        if waiting:
            wake()

    def put(self, events: Iterable[StoreEvent]) -> None:
        with self._lock:
            was_empty = not self._events
            self._events.extend(events)
            is_ready = was_empty and bool(self._events)
            wake = self._wake
        if is_ready:
            wake()

    def drain(self) -> list[StoreEvent]:
        """Take every event there is."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events
