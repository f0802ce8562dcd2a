"""A queue that is fair between tenants: start-time fair queueing (Goyal, Vin, Cheng 1996).

Each tenant has a FIFO of its own. Of the first items, the one with the smallest start tag leaves
next: a tenant's tag grows by the cost of what it took, so over any busy time two tenants that
always wait take equal cost, up to one item each, however many items either has queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several tenants; `pop` takes turns between them in proportion to cost."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[float, float, T]]] = {}  # start tag, cost, item
        self._finish: dict[str, float] = {}  # of each tenant's last item, while above the clock
        self._clock = 0.0  # start tag of the item that left last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, tenant: str, cost: float, item: T) -> None:
        """Appends `item` to the tenant's own FIFO."""
        start = max(self._clock, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + cost
        self._waiting.setdefault(tenant, deque()).append((start, cost, item))

    def pop(self, can_leave: Callable[[str], bool] = lambda _: True) -> T | None:
        """The next item of a tenant that `can_leave`; None when there is none."""
        able = [tenant for tenant in self._waiting if can_leave(tenant)]
        if not able:
            return None
        tenant = min(able, key=lambda name: self._waiting[name][0][0])
        own = self._waiting[tenant]
        self._clock, _, item = own.popleft()
        if not own:
            del self._waiting[tenant]
        if not self._waiting:  # tags matter among those that wait at the same time
            self._finish.clear()
        return item
