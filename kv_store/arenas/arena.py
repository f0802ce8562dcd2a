"""OPEN pages: one file per worker incarnation, one process that writes its bytes.

The engine side (`Arena`) creates the file, assigns its slots and reads with pread.
The worker side (`ArenaMapping`) maps it, zero-fills on reserve, poisons on free and writes rows
and row records; it holds the file's lock, so the arena of a live writer is not deleted or imported.

    [0, 64 KiB)                          header: sizes and identity, written once by the creator
    [64 KiB, + slots * page_bytes)      slots, in order
    [.., + slots * 8 KiB)               sidecars: 256 row records (4 KiB), then the slot header

A row record is written after its row, a slot header when the slot is reserved: from both, a later
reader proves which rows of a dead writer are whole and which session they belong to.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kv_store import keys, osio
from kv_store.errors import StaleRef, StoreCorrupt, StoreError, StoreFull
from kv_store.layout import (
    PAGE_TOKENS,
    ROW_RECORD_DTYPE,
    ROW_RECORDS_BYTES,
    PageLayout,
)

LANE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
ARENA_NAME = re.compile(LANE_NAME.pattern + r"\.\d{1,10}")
ARENA_MAGIC = b"BEKVAREN"
POISON = 0xFF  # NaN in fp16, bf16 and fp32: a read of a freed page cannot look like a number
ARENA_SLOT_BIT = 1 << 63  # of a slot code: the low 32 bits are a slot of the lane's own arena

# magic, version, slots, page_bytes, arena id, layout_id, repr_id, boot id, incarnation, XXH3-64
FILE_HEADER = struct.Struct("<8sIIQ16s32s32s36sIQ")
assert FILE_HEADER.size == 152
INCARNATION_MAX = 0xFFFFFFFF  # u32 in the header
FILE_VERSION = 2  # version 1 did not name the model of its rows
FILE_HEADER_BYTES = 64 * 1024  # keeps the first slot aligned
# SHA-256 of the session id, epoch, slot generation, page index, XXH3-64 of the rest
SLOT_HEADER = struct.Struct("<32sQIIQ8x")
assert SLOT_HEADER.size == 64
SIDECAR_BYTES = 8192
assert ROW_RECORDS_BYTES + SLOT_HEADER.size <= SIDECAR_BYTES


@dataclass(frozen=True, slots=True)
class ArenaShape:
    """Offsets inside an arena file, in bytes."""

    layout: PageLayout
    slots: int

    def page_offset(self, slot: int) -> int:
        return FILE_HEADER_BYTES + self._checked(slot) * self.layout.page_bytes

    def rows_offset(self, slot: int) -> int:
        first = FILE_HEADER_BYTES + self.slots * self.layout.page_bytes
        return first + self._checked(slot) * SIDECAR_BYTES

    def slot_header_offset(self, slot: int) -> int:
        return self.rows_offset(slot) + ROW_RECORDS_BYTES

    @property
    def file_bytes(self) -> int:
        return FILE_HEADER_BYTES + self.slots * (self.layout.page_bytes + SIDECAR_BYTES)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise StaleRef(f"arena place {slot} does not exist (0..{self.slots - 1})")
        return slot


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The owner of a slot's rows. `session` is any bytes that identify the session, e.g. its id."""

    session: bytes
    epoch: int
    gen: int
    page_index: int  # the slot holds positions [256*page_index, 256*page_index + 256)

    def pack(self) -> bytes:
        name = session_name(self.session)
        head = SLOT_HEADER.pack(name, self.epoch, self.gen, self.page_index, 0)
        check = xxhash.xxh3_64_intdigest(head[:48])
        return SLOT_HEADER.pack(name, self.epoch, self.gen, self.page_index, check)

    def seeds(
        self, arena_id: bytes, slot: int, first_row: int, count: int
    ) -> npt.NDArray[np.uint64]:
        """Seeds of the row digests of rows [first_row, first_row+count)."""
        first = self.page_index * PAGE_TOKENS + first_row
        return keys.row_seeds(arena_id, slot, self.gen, self.session, self.epoch, first, count)


def session_name(session: bytes) -> bytes:
    """The 32-byte hash that identifies a session in a slot header."""
    return keys.hash_parts(b"batchengine place v1", (session,))


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """One use (generation) of one slot of an arena."""

    slot: int
    gen: int

    @property
    def code(self) -> int:
        """The u64 that stands for this slot in a lane's page table."""
        return ARENA_SLOT_BIT | self.slot


class Arena:
    """Engine side of an arena: the free list, generations, and reading."""

    def __init__(
        self, path: str, fd: int, shape: ArenaShape, arena_id: bytes, incarnation: int
    ) -> None:
        self.path = path
        self.fd = fd
        self.shape = shape
        self.arena_id = arena_id
        self.incarnation = incarnation
        self._free = list(range(shape.slots - 1, -1, -1))  # popped from the end: low first
        self._gens = [0] * shape.slots
        self._open = set[int]()

    @classmethod
    def create(
        cls,
        path: str,
        layout: PageLayout,
        slots: int,
        incarnation: int = 0,
        files: osio.Files | None = None,
        repr_id: bytes = bytes(32),
    ) -> Arena:
        """Create an arena file, fully allocated, mode 0600; `repr_id` is the representation of its
        rows. Raises StoreFull when it does not fit."""
        if slots < 1:
            raise ValueError("an arena needs at least one place")
        if not 0 <= incarnation <= INCARNATION_MAX:
            raise StoreError(
                f"an arena cannot have the number {incarnation}",
                why=f"numbers go up to {INCARNATION_MAX}: something named a run that there was not",
                fix="stop the daemon, move the store's folder away and start with a new one",
            )
        files, shape = files or osio.Files(), ArenaShape(layout, slots)
        arena_id = secrets.token_bytes(16)
        head = _file_header(shape, arena_id, incarnation, repr_id)
        try:
            fd = osio.create_allocated(files, path, shape.file_bytes, head)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(
                    f"no room for an arena of {slots} open pages",
                    why=f"it needs {shape.file_bytes >> 20} MiB",
                    fix="free disk space, or set fewer open pages ([[lane]] open_pages)",
                ) from error
            raise
        return cls(path, fd, shape, arena_id, incarnation)

    def reserve(self) -> ArenaSlot | None:
        """Open a free slot; the worker zero-fills it before use. None = no slot is free."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._open.add(slot)
        return ArenaSlot(slot, self._gens[slot])

    def release(self, at: ArenaSlot) -> None:
        """Free an open slot; its next use has the next generation."""
        self._expect_open(at)
        self._open.remove(at.slot)
        self._gens[at.slot] += 1
        self._free.append(at.slot)

    def read_page(self, files: osio.Files, at: ArenaSlot, into: memoryview) -> None:
        """Fill `into` (page_bytes) from an open slot."""
        self._expect_open(at)
        files.read_all(self.fd, into, self.shape.page_offset(at.slot))

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_open(self) -> int:
        return len(self._open)

    def check(self) -> None:
        assert sorted([*self._free, *self._open]) == [*range(self.shape.slots)]

    def close(self, *, delete: bool) -> None:
        """Close; delete only once the writer is reaped (its process can still write until then)."""
        try:
            if delete:
                # The folder may be gone, or the path may name a file of another store by now.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self.fd), os.stat(self.path)):
                        os.unlink(self.path)
        finally:
            os.close(self.fd)

    def _expect_open(self, at: ArenaSlot) -> None:
        if self._gens[at.slot] != at.gen or at.slot not in self._open:
            raise StaleRef(
                f"arena slot {at.slot}.{at.gen} is not open",
                why=f"its generation is {self._gens[at.slot]}",
            )

    def __repr__(self) -> str:
        return f"<Arena {os.path.basename(self.path)} free={self.n_free} open={self.n_open}>"


@dataclass(frozen=True, slots=True)
class ArenaFile:
    """An open arena file whose header was checked; `boot` is the boot it was made in."""

    fd: int
    shape: ArenaShape
    arena_id: bytes
    incarnation: int
    boot: str
    repr_id: bytes = bytes(32)

    @classmethod
    def read(cls, fd: int, layout: PageLayout) -> ArenaFile:
        """Check the header of an open file. Raises StoreCorrupt for any mismatch."""
        info = os.fstat(fd)
        raw = os.pread(fd, FILE_HEADER.size, 0) if stat.S_ISREG(info.st_mode) else b""
        if len(raw) != FILE_HEADER.size:
            raise StoreCorrupt("the arena file is shorter than its header")
        (
            magic, version, slots, page_bytes, arena_id, layout_id, repr_id, boot, incarnation,
            check,
        ) = FILE_HEADER.unpack(raw)  # fmt: skip
        if (
            magic != ARENA_MAGIC
            or version != FILE_VERSION
            or check != xxhash.xxh3_64_intdigest(raw[:-8])
        ):
            raise StoreCorrupt("this is not an arena file of this version")
        if layout_id.hex() != layout.layout_id or page_bytes != layout.page_bytes or not slots:
            raise StoreCorrupt("the arena was made for another page layout")
        shape = ArenaShape(layout, slots)
        if info.st_size != shape.file_bytes:
            raise StoreCorrupt("the arena file does not have the size its header says")
        name = boot.rstrip(b"\0").decode("ascii", "replace")
        return cls(fd, shape, arena_id, incarnation, name, repr_id)

    def check_allocated(self) -> None:
        """Raises StoreCorrupt for a file with holes: its creator allocated every byte, and a size
        that takes no disk space must not make a reader allocate memory."""
        held = os.fstat(self.fd).st_blocks * 512
        if held < self.shape.file_bytes:
            raise StoreCorrupt(f"the arena file has holes: {held} of {self.shape.file_bytes} bytes")

    @classmethod
    def open(cls, path: str, layout: PageLayout) -> ArenaFile:
        """An arena of this boot, to read rows from. Raises OSError or StoreCorrupt."""
        # O_NONBLOCK: a FIFO of that name must not block the caller.
        fd = osio.open_private(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = cls.read(fd, layout)
            if not found.boot or found.boot != osio.boot_id():
                raise StoreCorrupt("the arena was written before this boot")
        except BaseException:
            os.close(fd)
            raise
        return found


class ArenaMapping:
    """Worker side: the read-write mapping and its lock. The sole writer of the slots."""

    def __init__(self, path: str, layout: PageLayout) -> None:
        self.fd = osio.open_private(path, os.O_RDWR)
        try:
            if not osio.lock_exclusive(self.fd):
                raise StoreError("this arena has a live writer already")
            found = ArenaFile.read(self.fd, layout)
            self.shape, self.arena_id = found.shape, found.arena_id
            self.incarnation, self.repr_id = found.incarnation, found.repr_id
            self._map = mmap.mmap(self.fd, self.shape.file_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._map.madvise(mmap.MADV_DONTDUMP)  # KV equals the prompt: keep it out of core files
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)

    def page(self, slot: int) -> memoryview:
        """The writable bytes of a slot, page_bytes long."""
        at = self.shape.page_offset(slot)
        return self._view[at : at + self.shape.layout.page_bytes]

    def reserve(
        self, slot: int, owner: SlotOwner, rows: memoryview | None = None, count: int = 0
    ) -> None:
        """Write the owner of a slot and zero-fill it: attention multiplies absent rows by 0, and
        0 x NaN is NaN. With `rows` (another page), its first `count` rows are copied into the slot;
        none of them is recorded yet."""
        self._records(slot)[:] = 0
        at = self.shape.slot_header_offset(slot)
        self._view[at : at + SLOT_HEADER.size] = owner.pack()
        page, layout = self.page(slot), self.shape.layout
        if rows is None or not count:
            np.frombuffer(page, np.uint8)[:] = 0
            return
        layout.copy_rows(rows, page, count)
        layout.clear_rows(page, count)
        np.frombuffer(page, np.uint8)[layout.payload_bytes :] = 0

    def label(self, slot: int, owner: SlotOwner) -> None:
        """Write another owner; the rows stay, their records become invalid."""
        self._records(slot)["valid"] = 0
        at = self.shape.slot_header_offset(slot)
        self._view[at : at + SLOT_HEADER.size] = owner.pack()

    def poison(self, slot: int) -> None:
        """Fill a freed slot with POISON (NaN) and clear its owner and records."""
        at = self.shape.slot_header_offset(slot)
        self._view[at : at + SLOT_HEADER.size] = bytes(SLOT_HEADER.size)
        self._records(slot)[:] = 0
        np.frombuffer(self.page(slot), np.uint8)[:] = POISON

    def write_records(
        self,
        slot: int,
        first_row: int,
        tokens: npt.NDArray[np.uint32],
        digests: npt.NDArray[np.uint64],
    ) -> None:
        """Record rows [first_row, first_row+n) after their bytes are in place."""
        records = self._records(slot)[first_row : first_row + len(tokens)]
        if len(records) != len(tokens) or len(digests) != len(tokens):
            raise ValueError("row records must lie inside one page")
        records["digest"] = digests
        records["token"] = tokens
        records["valid"] = 1

    def digest(self, slot: int) -> bytes:
        """Unseeded XXH3-128 of the whole slot; the store compares it with the bytes it reads."""
        return keys.payload_digest(self.page(slot))

    def close(self) -> None:
        """Unmap and release the lock; views still held elsewhere keep the memory mapped."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        os.close(self.fd)

    def _records(self, slot: int) -> npt.NDArray[np.void]:
        at = self.shape.rows_offset(slot)
        return np.frombuffer(self._view[at : at + ROW_RECORDS_BYTES], ROW_RECORD_DTYPE)


def proven_rows(
    files: osio.Files,
    source: ArenaFile,
    slot: int,
    owner: SlotOwner,
    ids: npt.NDArray[np.uint32],
    into: memoryview,
    digests: Callable[[npt.NDArray[np.uint64]], npt.NDArray[np.uint64]],
) -> int:
    """Read a slot into `into` (page_bytes); returns how many leading rows are proven to belong to
    `owner` and to the tokens `ids`, which the ledger has from the page's first position on.

    The caller has reaped the writer and holds the arena's lock. A torn, stale or foreign row ends
    the proven rows. `digests` takes one seed per row, from the first on, and returns the digests of
    those rows of `into`, so that the proof covers the bytes the caller holds.
    """
    shape = source.shape
    sidecar = bytearray(ROW_RECORDS_BYTES + SLOT_HEADER.size)
    files.read_all(source.fd, memoryview(sidecar), shape.rows_offset(slot))
    if bytes(sidecar[ROW_RECORDS_BYTES:]) != owner.pack():
        return 0
    records = np.frombuffer(sidecar, ROW_RECORD_DTYPE, PAGE_TOKENS)[: len(ids)]
    count = leading((records["valid"] == 1) & (records["token"] == ids))
    if not count:
        return 0
    files.read_all(source.fd, into, shape.page_offset(slot))
    found = digests(owner.seeds(source.arena_id, slot, 0, count))
    return leading(found == records["digest"][:count])


def leading(good: npt.NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    return len(good) if good.all() else int(np.argmin(good))


def delete_arena(path: str) -> bool:
    """Delete a dead writer's arena; False while its lock is held."""
    fd = osio.open_private(path, os.O_RDWR)
    try:
        if not osio.lock_exclusive(fd):
            return False
        os.unlink(path)
    finally:
        os.close(fd)
    return True


def _file_header(shape: ArenaShape, arena_id: bytes, incarnation: int, repr_id: bytes) -> bytes:
    fields = (
        ARENA_MAGIC,
        FILE_VERSION,
        shape.slots,
        shape.layout.page_bytes,
        arena_id,
        bytes.fromhex(shape.layout.layout_id),
        repr_id,
        osio.boot_id().encode()[:36],
        incarnation,
    )
    head = FILE_HEADER.pack(*fields, 0)
    return FILE_HEADER.pack(*fields, xxhash.xxh3_64_intdigest(head[:-8]))
