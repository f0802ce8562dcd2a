"""Sealed extents of the store, mapped read-only by one worker.

Owns the mappings. A code that names no page of an extent is an error, never an address.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

import numpy as np

import kernels
from batchengine.lanes.step_input import SLOT_MASK, BadStep, U64Array
from kv_store.pages.extents import extent_path

EXTENTS_MAX = 1 << 16
_SLOT_MASK = np.uint64(SLOT_MASK)


class Extent:
    """One sealed extent, mapped PROT_READ: a stray write faults instead of changing a page."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size < page_bytes:
                raise BadStep(f"extent {path.name} is not a file of whole pages")
            self.slots = info.st_size // page_bytes
            self._map = mmap.mmap(fd, info.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTDUMP)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.base = kernels.address_of(self.view)


class MappedExtents:
    """The extents of one store, each mapped when a page of it is first asked for."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._extents: dict[int, Extent] = {}

    def addresses(self, codes: U64Array, page_bytes: int) -> U64Array:
        """Address of each sealed page of a model whose pages have so many bytes. Raises BadStep
        for one that is not there."""
        slots, bases = codes & _SLOT_MASK, np.zeros(len(codes), np.uint64)
        for index in set((codes >> np.uint64(32)).tolist()):
            extent = self._extent(index, page_bytes)
            mine = (codes >> np.uint64(32)) == index
            if int(slots[mine].max()) >= extent.slots:
                raise BadStep(f"extent {index} has {extent.slots} slots")
            bases[mine] = extent.base
        return bases + slots * np.uint64(page_bytes)

    def page(self, code: int, page_bytes: int) -> memoryview | None:
        """The page behind the code of a sealed page; None if nothing can be mapped there."""
        slot = code & SLOT_MASK
        try:
            found = self._extent(code >> 32, page_bytes)
        except BadStep:
            return None
        if slot >= found.slots:
            return None
        return found.view[slot * page_bytes : (slot + 1) * page_bytes]

    def forget(self, index: int) -> None:
        """Unmap an extent that was deleted: no page of it is in use, and the disk has its room back
        only then."""
        self._extents.pop(index, None)

    def _extent(self, index: int, page_bytes: int) -> Extent:
        extent = self._extents.get(index)
        if extent is None:
            if not 0 <= index < EXTENTS_MAX:
                raise BadStep(f"no extent {index}")
            path = Path(extent_path(self._folder, index))
            try:
                extent = self._extents[index] = Extent(path, page_bytes)
            except OSError as error:
                raise BadStep(f"extent {index} cannot be mapped: {error.strerror}") from None
        if extent.page_bytes != page_bytes:
            raise BadStep(f"extent {index} has pages of {extent.page_bytes} bytes")
        return extent
