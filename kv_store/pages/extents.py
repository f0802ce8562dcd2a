"""Extent files, which hold the sealed pages: `ext/000001.kv`, page-sized slots and nothing else.

Owns creating, opening, reading and writing them, on the page thread. A file is allocated whole,
never resized, and holds no header: identity and checksum of a page are in its manifest row.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kv_store import osio
from kv_store.errors import StoreCorrupt, StoreFull

EXTENT_BYTES = 256 << 20  # large enough that files stay few, small enough to preallocate at once
EXTENT_NAME = re.compile(r"\d{6}\.kv")


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """One extent. Page ids [first_page_id, first_page_id + slots) are its slots, in order."""

    index: int
    first_page_id: int
    slots: int
    page_bytes: int
    repr_id: bytes
    path: str

    @property
    def file_bytes(self) -> int:
        return self.slots * self.page_bytes

    @property
    def page_ids(self) -> range:
        return range(self.first_page_id, self.first_page_id + self.slots)

    def slices(self, count: int) -> Iterator[range]:
        """Its page ids, at most `count` at a time."""
        for first in range(0, self.slots, count):
            yield self.page_ids[first : first + count]

    def offset_of(self, page_id: int) -> int:
        return (page_id - self.first_page_id) * self.page_bytes

    def slot_code(self, page_id: int) -> int:
        """The slot as a u64 of a lane's page table: bit 63 clear, (extent index << 32) | slot."""
        return self.index << 32 | page_id - self.first_page_id


def extent_path(folder: str, index: int) -> str:
    return os.path.join(folder, f"{index:06}.kv")


class Extents:
    """The open extent files of one store."""

    def __init__(self, folder: str, files: osio.Files) -> None:
        self.folder = folder
        self._files = files
        self._fds: dict[int, int] = {}

    def create(self, info: ExtentInfo) -> None:
        """Allocate and sync a new file. Raises StoreFull; leaves nothing behind on failure."""
        try:
            self._fds[info.index] = osio.create_allocated(self._files, info.path, info.file_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StoreFull(
                    f"no room for an extent of {info.file_bytes >> 20} MiB",
                    why=os.strerror(error.errno),
                    fix="free disk space or lower the store budget; serving goes on uncached",
                ) from error
            raise

    def open(self, info: ExtentInfo) -> None:
        """Open an existing file. Raises StoreCorrupt if it is missing, special or resized."""
        try:
            fd = osio.open_private(info.path, os.O_RDWR)
        except OSError as error:
            raise StoreCorrupt(
                f"extent {info.index} cannot be opened", why=os.strerror(error.errno or 0)
            ) from error
        size = os.fstat(fd).st_size
        if size != info.file_bytes:
            os.close(fd)
            raise StoreCorrupt(
                f"extent {info.index} has {size} bytes instead of {info.file_bytes}",
                why="extents are never resized: it was truncated or replaced",
            )
        self._fds[info.index] = fd

    def read_page(self, info: ExtentInfo, page_id: int, into: memoryview) -> None:
        self._files.read_all(self._fds[info.index], into, info.offset_of(page_id))

    def write_page(self, info: ExtentInfo, page_id: int, data: memoryview) -> None:
        if len(data) != info.page_bytes:
            raise ValueError("a page is written whole")
        self._files.write_all(self._fds[info.index], data, info.offset_of(page_id))

    def write_closed(self, info: ExtentInfo, page_id: int, data: memoryview) -> None:
        """Write a page of an extent that is not open, durably. Raises StoreCorrupt."""
        self.open(info)
        try:
            self.write_page(info, page_id, data)
            self.sync(info)
        finally:
            os.close(self._fds.pop(info.index))

    def sync(self, info: ExtentInfo) -> None:
        """Make what was written to one extent durable."""
        self._files.fsync(self._fds[info.index])

    def drop(self, info: ExtentInfo) -> None:
        """Close and delete one extent; a file already gone is fine, and what is no file stays."""
        fd = self._fds.pop(info.index, None)
        if fd is not None:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(info.path)

    def strays(self, known: set[int]) -> list[str]:
        """Paths of extent files without a manifest row, left by a crash before it was recorded."""
        names = [name for name in os.listdir(self.folder) if EXTENT_NAME.fullmatch(name)]
        return [os.path.join(self.folder, n) for n in names if int(n[:6]) not in known]

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
