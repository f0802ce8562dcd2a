"""Copies of a lane's pages in the memory of a GPU, by slot code.

Host memory has every page too, so a copy may be given up at any time. The least recently used
ones are, never one of the step at hand.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from batchengine.lanes.step_input import U64Array
from kernels.cuda.gpu import Gpu


class PageCache:
    """Up to `pages_max` pages of `payload_bytes` each."""

    def __init__(self, gpu: Gpu, payload_bytes: int, pages_max: int) -> None:
        self.pages_max = pages_max
        self.copied = 0  # pages, since the start
        self._gpu = gpu
        self._payload_bytes = payload_bytes
        self._held = OrderedDict[int, int]()  # address by code, least recently used first
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._held)

    def addresses(self, codes: U64Array, on_host: U64Array) -> U64Array:
        """The addresses of the copies of pages, which lie at `on_host`; copies those that lack.

        Raises MemoryError if all pages together do not fit.
        """
        wanted = codes.tolist()
        for code in wanted:
            if code in self._held:
                self._held.move_to_end(code)
        missing = dict(zip(wanted, on_host.tolist(), strict=True))
        used = set(missing)
        for code, address in missing.items():
            if code not in self._held:
                self._held[code] = self._room(used)
                self._copy(address, self._held[code])
        return np.array([self._held[code] for code in wanted], np.uint64)

    def forget(self, codes: Iterable[int]) -> None:
        """Give up the copies of pages whose bytes on the host have changed, or will."""
        for code in codes:
            address = self._held.pop(code, None)
            if address is not None:
                self._free.append(address)

    def shrink(self) -> bool:
        """Give the memory of all pages back, and hold fewer from now on; False if there is none."""
        self.forget(list(self._held))
        if not self._free:
            return False
        self.pages_max = max(1, len(self._free) * 3 // 4)
        for address in self._free:
            self._gpu.free(address)
        self._free.clear()
        return True

    def _room(self, used: set[int]) -> int:
        """Memory for one more page, of a page that is not in `used` if there is no other."""
        if self._free:
            return self._free.pop()
        if len(self._held) < self.pages_max:
            try:
                return self._gpu.allocate(self._payload_bytes)
            except MemoryError:
                if not self._held.keys() - used:
                    raise
        oldest = next((code for code in self._held if code not in used), None)
        if oldest is None:
            raise MemoryError(f"a step of {len(used)} pages, and {self.pages_max} fit")
        return self._held.pop(oldest)

    def _copy(self, source: int, to: int) -> None:
        memory = (ctypes.c_ubyte * self._payload_bytes).from_address(source)
        self._gpu.copy_in(to, np.frombuffer(memoryview(memory), np.uint8))
        self.copied += 1
