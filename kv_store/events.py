"""The queue of invalid pages from the store's threads to its user, with one wake-up callback.

Calls nothing but that callback: the consumer handles the pages where it drains the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence


class StoreEvents:
    """Content keys of resident pages that became invalid, oldest first: their bytes failed their
    check, or their content is wrong. Any thread may put; one consumer drains."""

    def __init__(self) -> None:
        self._keys: deque[bytes] = deque()
        self._wake: Callable[[], None] = lambda: None

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every `put`, and at once if the queue is not empty now.

        `wake` runs on any thread, under the store's lock: it must return at once and not raise.
        """
        self._wake = wake
        if self._keys:
            wake()

    def put(self, keys: Sequence[bytes]) -> None:
        self._keys.extend(keys)
        if keys:
            self._wake()

    def drain(self) -> list[bytes]:
        """Take every key there is."""
        return [self._keys.popleft() for _ in range(len(self._keys))]
