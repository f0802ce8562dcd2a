"""Arenas of earlier runs of this boot: open rows without a writer, until they are imported.

Owns their files: locks each one, reads the owners of its slots, deletes those without a row, and at
a `sweep` all of them.
A file that is locked already has a writer that may still write: it is left alone. Rows are not
verified here: a slot is found by its header, and the worker that imports its rows proves them.
Several kills in a row would leave an arena each: at opening the oldest files beyond `bytes_max` go.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from kv_store import osio
from kv_store.arenas.arena import (
    ARENA_NAME,
    POISON,
    SIDECAR_BYTES,
    SLOT_HEADER,
    ArenaFile,
    leading,
    session_name,
)
from kv_store.errors import StoreCorrupt
from kv_store.layout import PAGE_TOKENS, ROW_RECORD_DTYPE, ROW_RECORDS_BYTES, PageLayout

ORPHANED_S = 600.0  # rows of sessions that were reopened are imported by then: the rest is swept
ORPHANED_SHARE = 3  # they may take one part in so many of the store's budget, besides it
_SLICE_SLOTS = 512  # sidecars read at once: 4 MiB
_HEADER_SPAN = 48  # of a slot header: what its checksum covers


class OrphanedSlot(NamedTuple):
    """A slot whose header names a session; `rows` = leading rows that claim to be whole."""

    arena: str
    slot: int
    gen: int
    page_index: int
    rows: int = 0


class OrphanedArenas:
    """Arena files that earlier runs left in `folder`; none without it. Thread safe."""

    def __init__(
        self,
        folder: str = "",
        layout: PageLayout | None = None,
        repr_id: bytes = b"",
        files: osio.Files | None = None,
        bytes_max: int | None = None,
    ) -> None:
        self.warnings: list[str] = []
        self._folder = folder
        self._layout = layout
        self._repr_id = repr_id
        self._files = files or osio.Files()
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}  # descriptors of locked files
        self._busy: set[str] = set()
        # per session name and epoch
        self._index = defaultdict[bytes, dict[int, list[OrphanedSlot]]](dict)
        if folder:
            self._busy = {name for name in os.listdir(folder) if ARENA_NAME.fullmatch(name)}
            self.retry()
            if bytes_max is not None:
                self._keep_newest(bytes_max)

    def __repr__(self) -> str:
        return (
            f"<OrphanedArenas files={len(self._held)} busy={len(self._busy)}"
            f" sessions={len(self._index)}>"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Arena files held here."""
        with self._lock:
            return tuple(sorted(self._held))

    @property
    def busy(self) -> tuple[str, ...]:
        """Arena files whose old writer still holds its lock: neither imported nor deleted."""
        with self._lock:
            return tuple(sorted(self._busy))

    def find(self, session: bytes, epoch: int) -> list[OrphanedSlot]:
        """Slots whose header names (session, epoch), by page; most rows first within a page."""
        with self._lock:
            slots = self._index.get(session_name(session), {}).get(epoch, [])
            return sorted(slots, key=lambda slot: (slot.page_index, -slot.rows, slot.arena))

    def erase(self, session: bytes) -> None:
        """Overwrite the session's rows and their records, and forget them; blocks."""
        with self._lock:
            for slots in self._index.pop(session_name(session), {}).values():
                for slot in slots:
                    self._overwrite(self._held[slot.arena], slot.slot)

    def sweep(self) -> int:
        """Delete all files that are held; returns how many. Those that were busy are examined again
        first. Blocks for the deletions."""
        self.retry()
        with self._lock:
            doomed, self._held = self._held, {}
            self._index.clear()
        for name, fd in doomed.items():  # without the lock, for which the event loop waits
            self._delete(name, fd)
        return len(doomed)

    def retry(self) -> None:
        """Take the files whose writer has ended meanwhile. Files of this run are never examined:
        they are unlocked until their worker has locked them."""
        with self._lock:
            for name in sorted(self._busy):
                self._examine(name)

    def close(self) -> None:
        """Release the locks; the files stay for the next run."""
        with self._lock:
            for fd in self._held.values():
                os.close(fd)
            self._held.clear()
            self._busy.clear()
            self._index.clear()

    # -- inside: the lock is held, except for `_delete` ---------------------------------------

    def _examine(self, name: str) -> None:
        """Lock and index one file, delete it if no row in it is usable, or leave it busy."""
        path = os.path.join(self._folder, name)
        try:
            fd = osio.open_private(path, os.O_RDWR)
        except OSError as error:  # a directory, a link, gone: left alone
            self._busy.discard(name)
            self.warnings.append(f"{path} is no arena: {os.strerror(error.errno or 0)}")
            return
        try:
            if not osio.lock_exclusive(fd):
                os.close(fd)
                return
            self._busy.discard(name)
            slots = self._read(name, fd)
        except (OSError, StoreCorrupt) as error:
            self._busy.discard(name)
            self.warnings.append(f"arena {name} is of no use: {error}")
            self._delete(name, fd)
            return
        except BaseException:
            os.close(fd)
            raise
        if not slots:
            self._delete(name, fd)
            return
        self._held[name] = fd
        for session, epoch, slot in slots:
            self._index[session].setdefault(epoch, []).append(slot)

    def _read(self, name: str, fd: int) -> list[tuple[bytes, int, OrphanedSlot]]:
        """(session name, epoch, slot) of every slot with a whole header and a written row."""
        assert self._layout is not None
        arena = ArenaFile.read(fd, self._layout)
        if arena.repr_id != self._repr_id:
            raise StoreCorrupt("its rows are of another model or arithmetic")
        if not arena.boot or arena.boot != osio.boot_id():
            raise StoreCorrupt("it was written before this boot")
        arena.check_allocated()
        shape = arena.shape
        slots: list[tuple[bytes, int, OrphanedSlot]] = []
        sidecars = memoryview(bytearray(_SLICE_SLOTS * SIDECAR_BYTES))
        for first in range(0, shape.slots, _SLICE_SLOTS):
            count = min(_SLICE_SLOTS, shape.slots - first)
            self._files.read_all(fd, sidecars[: count * SIDECAR_BYTES], shape.rows_offset(first))
            for index in range(count):
                found = _headed(sidecars[index * SIDECAR_BYTES :], name, first + index)
                if found is not None:
                    slots.append(found)
        return slots

    def _keep_newest(self, bytes_max: int) -> None:
        """Delete the files that `oldest_beyond` names, and the index entries that point to them."""
        sizes = {name: os.fstat(fd).st_size for name, fd in self._held.items()}
        if not (names := oldest_beyond(sizes, bytes_max)):
            return
        for name in names:
            self._delete(name, self._held.pop(name))
        for epochs in self._index.values():
            for epoch, slots in epochs.items():
                epochs[epoch] = [slot for slot in slots if slot.arena in self._held]
        self.warnings.append(
            f"{len(names)} of the arenas of killed runs were deleted: all took more than"
            f" {bytes_max >> 20} MiB"
        )

    def _overwrite(self, fd: int, slot: int) -> None:
        assert self._layout is not None
        shape = ArenaFile.read(fd, self._layout).shape
        blank = memoryview(bytes([POISON]) * shape.layout.page_bytes)
        self._files.write_all(fd, blank, shape.page_offset(slot))
        self._files.write_all(fd, memoryview(bytes(SIDECAR_BYTES)), shape.rows_offset(slot))

    def _delete(self, name: str, fd: int) -> None:
        """Unlink while the lock is still held, so that no file of a live writer can go."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))
        os.close(fd)


def oldest_beyond(sizes: Mapping[str, int], bytes_max: int) -> list[str]:
    """Names of the oldest arenas, without which the others take at most `bytes_max`. The newest of
    each lane is never among them: sessions that the last run computed have their rows there."""
    lanes, taken, beyond = set[str](), 0, list[str]()
    for name in sorted(sizes, key=lambda name: int(name.rpartition(".")[2]), reverse=True):
        lane = name.rpartition(".")[0]
        taken += sizes[name]
        if lane in lanes and taken > bytes_max:
            beyond.append(name)
        lanes.add(lane)
    return beyond


def _headed(sidecar: memoryview, name: str, slot: int) -> tuple[bytes, int, OrphanedSlot] | None:
    """(session name, epoch, slot) of a sidecar with a whole header and a written row."""
    header = sidecar[ROW_RECORDS_BYTES:]
    session, epoch, gen, page, check = SLOT_HEADER.unpack_from(header)
    if check != xxhash.xxh3_64_intdigest(bytes(header[:_HEADER_SPAN])):
        return None  # never used, poisoned, or torn
    valid = np.frombuffer(sidecar, ROW_RECORD_DTYPE, PAGE_TOKENS)["valid"] == 1
    rows = leading(valid)
    return (session, epoch, OrphanedSlot(name, slot, gen, page, rows)) if rows else None
