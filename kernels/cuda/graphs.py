"""Steps of the same shape, whose launches are captured once and then replayed together."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kernels.cuda.gpu import Gpu, GpuFault, Graph

log = logging.getLogger("batchengine.worker")

T = TypeVar("T")
SEEN = 4  # times as many keys are known as graphs are held


class Graphs(Generic[T]):
    """Up to `most` graphs by key, the least recently used of which gives way.

    Launches of equal keys have equal arguments: what varies lies in memory that they read. Without
    a graph they are begun one by one.
    """

    def __init__(self, gpu: Gpu, most: int) -> None:
        self._gpu, self._most = gpu, most
        self._held = OrderedDict[Hashable, tuple[Graph, T]]()
        self._seen = OrderedDict[Hashable, None]()  # keys of launches that were begun plainly
        self._freed = gpu.freed

    def __len__(self) -> int:
        return len(self._held)

    def run(self, key: Hashable, launch: Callable[[], T]) -> T:
        """Begin the launches of `launch`, and return its result. It is called the first time, and a
        second time to be captured; later calls replay the graph.

        It may allocate and copy the first time only.
        """
        if self._freed != self._gpu.freed:  # a graph may name what was freed
            self.clear()
        is_again = key in self._seen and self._most > 0
        if key not in self._held and not (is_again and self._capture(key, launch)):
            plain = launch()  # if it raises, it has not allocated what a capture needs
            self._seen[key] = None
            if len(self._seen) > SEEN * self._most:
                self._seen.popitem(last=False)
            return plain
        self._held.move_to_end(key)
        graph, result = self._held[key]
        graph.replay()
        return result

    def clear(self) -> None:
        """Give up all graphs."""
        for graph, _ in self._held.values():
            graph.close()
        self._held.clear()
        self._seen.clear()
        self._freed = self._gpu.freed

    def _capture(self, key: Hashable, launch: Callable[[], T]) -> bool:
        """Hold the graph of a key, if the device can."""
        results: list[T] = []
        try:
            graph = self._gpu.capture(lambda: results.append(launch()))
        except MemoryError:
            return False
        except GpuFault as fault:  # one of the device itself is met again without a capture
            log.warning("launches are not captured any longer: %s", fault)
            self._most = 0
            return False
        self._held[key] = graph, results[0]
        if len(self._held) > self._most:
            _, (oldest, _) = self._held.popitem(last=False)
            oldest.close()
        return True
