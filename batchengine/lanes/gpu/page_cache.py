"""Copies of a lane's pages in the memory of a GPU, by slot code.

Host memory has every page too, so a copy may be given up at any time. The least recently used
ones are, never one of the step at hand. Of a model with windows, each page has two parts, which are
copied and given up on their own: of a long timeline, the GPU has the layers with a window for its
last pages only.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from batchengine.lanes.step_input import I32Array, U64Array
from kernels.cuda.gpu import Gpu
from kernels.cuda.page_parts import BoolArray, LayerPart, seen

log = logging.getLogger("batchengine.worker")


class PageCache:
    """A part of each of up to `pages_max` pages. pages_min: what a step of one entry may need.

    is_alone: no other part has copies. Memory that is refused makes it smaller then; otherwise
    `PageCopies.shrink` does, as the other parts may have the memory that it lacks.
    """

    def __init__(self, gpu: Gpu, part: LayerPart, pages_max: int, pages_min: int = 1) -> None:
        self.part, self.pages_max, self.pages_min = part, pages_max, pages_min
        self.page_bytes = gpu.taken_by(part.n_bytes)
        self.is_alone = True
        self._gpu = gpu
        self._n_bytes = part.n_bytes
        self._held = OrderedDict[int, int]()  # address by code, least recently used first
        self._free: list[int] = []
        self._expected: dict[int, int] = {}  # address on the host by code
        self._arriving: set[int] = set()  # held, and their copies may be under way

    def __len__(self) -> int:
        return len(self._held)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the GPU that it has taken."""
        return (len(self._held) + len(self._free)) * self.page_bytes

    def addresses(self, codes: U64Array, on_host: U64Array, is_unwritten: BoolArray) -> U64Array:
        """The addresses of the copies of pages, which lie at `on_host`; copies those that lack,
        but for pages without a row that is read before the step has written it.

        Raises MemoryError if all pages together do not fit.
        """
        wanted = codes.tolist()
        if self._expected:  # their copies may take the memory of pages that steps so far read
            self._gpu.fork()
        for code in wanted:
            if code in self._held:
                self._held.move_to_end(code)
        if not self._arriving.isdisjoint(wanted):
            self._arrive()
        missing = dict(
            zip(wanted, zip(on_host.tolist(), is_unwritten.tolist(), strict=True), strict=True)
        )
        used = set(missing)
        for code, (address, is_empty) in missing.items():
            if code not in self._held:
                self._held[code] = self._room(used)
                if not is_empty:
                    for offset, run in self._runs(address):
                        self._gpu.copy_in(self._held[code] + offset, run)
        return np.array([self._held[code] for code in wanted], np.uint64)

    def lacking(self, codes: U64Array) -> list[int]:
        """Those of these pages of which it has no copy."""
        return [code for code in codes.tolist() if code not in self._held]

    def forget(self, codes: Iterable[int]) -> None:
        """Give up the copies of pages whose bytes on the host have changed, or will."""
        for code in codes:
            self._expected.pop(code, None)
            if code in self._held:
                self._free.append(self._evict(code))

    def expect(self, codes: Sequence[int], on_host: U64Array) -> None:
        """Pages at `on_host` will be wanted by a later step."""
        self._expected.update(zip(codes, on_host.tolist(), strict=True))

    def copy_expected(self, n_bytes: int, used: Iterable[int] = ()) -> None:
        """Copy expected pages, about `n_bytes` of them, beside what the GPU computes with the pages
        `used`. What finds no room is not expected any longer."""
        if not self._expected:
            return
        kept = {*used, *self._expected, *self._arriving}
        for code in list(self._expected)[: -(-n_bytes // self._n_bytes)]:
            address = self._expected.pop(code)
            if code in self._held:
                continue
            try:
                self._held[code] = self._room(kept)
            except MemoryError:
                self._expected.clear()
                return
            for offset, run in self._runs(address):
                self._gpu.copy_aside(self._held[code] + offset, run)
            self._arriving.add(code)

    def give_back(self, pages_max: int) -> None:
        """Give the memory of all pages back, and hold up to `pages_max` from now on."""
        self.forget(list(self._held))
        self.pages_max = pages_max
        for address in self._free:
            self._gpu.free(address)
        self._free.clear()

    def _room(self, used: set[int]) -> int:
        """Memory for one more page, of a page that is not in `used` if there is no other."""
        if self._free:
            return self._free.pop()
        if len(self._held) < self.pages_max:
            try:
                return self._gpu.allocate(self._n_bytes)
            except MemoryError:
                if not self.is_alone or not self._held.keys() - used:
                    raise
                self.pages_max = len(self._held)
                log.warning("no memory on the GPU: it holds %d pages now", self.pages_max)
        oldest = next((code for code in self._held if code not in used), None)
        if oldest is None:
            raise MemoryError(f"a step of {len(used)} pages, and {self.pages_max} fit")
        return self._evict(oldest)

    def _evict(self, code: int) -> int:
        """Remove a held page and return its address. If a copy into it may be under way, later work
        of the GPU waits for that."""
        if code in self._arriving:
            self._arrive()
        return self._held.pop(code)

    def _arrive(self) -> None:
        """Let what the GPU does from now on come after the copies that are under way."""
        self._gpu.join()
        self._arriving.clear()

    def _runs(self, address: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The bytes to copy of a page on the host, and where in the copy each of them begins."""
        offset = 0
        for start, end in self.part.runs:
            memory = (ctypes.c_ubyte * (end - start)).from_address(address + start)
            yield offset, np.frombuffer(memoryview(memory), np.uint8)
            offset += end - start


class PageCopies:
    """The copies of all parts of pages."""

    def __init__(self, caches: Sequence[PageCache]) -> None:
        self.caches = tuple(caches)
        for cache in caches:
            cache.is_alone = len(caches) == 1

    def __str__(self) -> str:
        """How many pages fit."""
        counts = [f"{self.caches[-1].pages_max} pages"]
        counts += [
            f"{cache.pages_max} of the layers with a window of {cache.part.window}"
            for cache in self.caches[:-1]
        ]
        return ", ".join(counts)

    def addresses(
        self, codes: U64Array, on_host: U64Array, shape: I32Array, is_unwritten: BoolArray
    ) -> U64Array:
        """Addresses (parts, pages) of what a step reads and writes, 0 of a part that no token of
        its entry sees. shape: tokens, start position and pages of each entry; the rest as of
        `PageCache.addresses`."""
        found = np.zeros((len(self.caches), len(codes)), np.uint64)
        for at, cache in zip(found, self.caches, strict=True):
            of = seen(shape, cache.part.window)
            at[of] = cache.addresses(codes[of], on_host[of], is_unwritten[of])
        return found

    def lacking(self, codes: U64Array) -> list[int]:
        """Those of these pages of which a part has no copy."""
        return sorted({code for cache in self.caches for code in cache.lacking(codes)})

    def forget(self, codes: Collection[int]) -> None:
        """Give up the copies of pages whose bytes on the host have changed, or will."""
        for cache in self.caches:
            cache.forget(codes)

    def expect(self, codes: Sequence[int], on_host: U64Array) -> None:
        """Pages at `on_host` will be wanted by a later step. Layers with a window beside others are
        left to it, as few of the pages have a token that it sees."""
        self.caches[-1].expect(codes, on_host)

    def copy_expected(self, n_bytes: int, used: Iterable[int] = ()) -> None:
        """Copy expected pages; see PageCache."""
        self.caches[-1].copy_expected(n_bytes, used)

    def shrink(self) -> bool:
        """Give the memory of all pages back, and hold three quarters of it from now on, each part
        its share. A part has what one entry needs of it as long as that leaves the others half of
        the memory, or what one entry needs of them. False if some part would have none."""
        left = sum([cache.taken_bytes for cache in self.caches]) * 3 // 4
        planned = sum([cache.pages_max * cache.page_bytes for cache in self.caches])
        least = sum([cache.pages_min * cache.page_bytes for cache in self.caches])
        counts: list[int] = []
        for cache in self.caches[:-1]:
            least -= cache.pages_min * cache.page_bytes
            n = max(cache.pages_max * left // planned, cache.pages_min)
            counts.append(min(n, max(left - least, left // 2) // cache.page_bytes))
            left -= counts[-1] * cache.page_bytes
            planned -= cache.pages_max * cache.page_bytes
        counts.append(left // self.caches[-1].page_bytes)
        if not all(counts):
            return False
        for cache, pages_max in zip(self.caches, counts, strict=True):
            cache.give_back(pages_max)
        return True
