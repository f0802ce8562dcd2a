"""Arenas of earlier lives of this boot: open rows that nobody writes any more, until adopted.

Owns their files: takes each one's lock, reads whose rows its places hold, deletes it in the end.
A file whose lock is held has a writer that may still write: it is left alone. Refuses to judge
rows: a place is found by its header, its rows prove themselves to the worker that adopts them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from kv_store import osio
from kv_store.arena import (
    ARENA_NAME,
    PLACE_HEADER,
    SIDECAR_BYTES,
    ArenaFile,
    session_name,
)
from kv_store.errors import StoreCorrupt
from kv_store.layout import PAGE_TOKENS, ROW_RECORD_DTYPE, ROW_RECORDS_BYTES, PageLayout

ATTIC_S = 600.0  # an owner should have swept everything by then: what was reopened is adopted
_SLICE_PLACES = 512  # sidecars read at once: 4 MiB
_HEADER_SPAN = 48  # of a place header: what its checksum covers


class AtticPlace(NamedTuple):
    """A place whose header names a session; `rows` = leading rows that claim to be whole."""

    arena: str
    place: int
    gen: int
    page_index: int
    rows: int = 0


@dataclass(slots=True)
class _Held:
    """One locked file. `wanted` counts index entries that lead into it."""

    fd: int
    bytes: int
    wanted: int = 0


@dataclass(slots=True)
class _Found:
    """Places of one session, by epoch."""

    by_epoch: dict[int, list[AtticPlace]] = field(default_factory=dict[int, list[AtticPlace]])


class Attic:
    """What earlier lives left in `folder`. Thread safe. An empty one: `Attic()`."""

    def __init__(
        self,
        folder: str = "",
        layout: PageLayout | None = None,
        repr_id: bytes = b"",
        files: osio.Files | None = None,
    ) -> None:
        self.damaged = 0  # files that were not arenas of this representation and boot
        self.deleted = 0  # files deleted, those included
        self.warnings: list[str] = []
        self._folder = folder
        self._layout = layout
        self._repr_id = repr_id
        self._files = files or osio.Files()
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._busy: set[str] = set()
        self._index: dict[bytes, _Found] = {}
        if folder:
            self._busy = {name for name in os.listdir(folder) if ARENA_NAME.fullmatch(name)}
            self.retry()

    def __repr__(self) -> str:
        return (
            f"<Attic files={len(self._held)} busy={len(self._busy)} sessions={len(self._index)}"
            f" {self.bytes >> 20} MiB deleted={self.deleted}>"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Arena files held here."""
        with self._lock:
            return tuple(sorted(self._held))

    @property
    def busy(self) -> tuple[str, ...]:
        """Arena files whose old writer still holds its lock: neither adopted nor deleted."""
        with self._lock:
            return tuple(sorted(self._busy))

    @property
    def bytes(self) -> int:
        """Disk space of the files held here."""
        with self._lock:
            return sum(held.bytes for held in self._held.values())

    def find(self, session: bytes, epoch: int) -> list[AtticPlace]:
        """Places headed (session, epoch), by page; of one page, the one with most rows first."""
        with self._lock:
            found = self._index.get(session_name(session))
            places = [] if found is None else found.by_epoch.get(epoch, [])
            return sorted(places, key=lambda place: (place.page_index, -place.rows, place.arena))

    def forget(self, session: bytes) -> None:
        """The session's rows are adopted or nobody's: `sweep` may delete what held only them."""
        with self._lock:
            self._forget(session_name(session))

    def retain(self, sessions: Iterable[bytes]) -> None:
        """Forget every session but these."""
        wanted = {session_name(session) for session in sessions}
        with self._lock:
            for name in [name for name in self._index if name not in wanted]:
                self._forget(name)

    def sweep(self, *, everything: bool = False) -> int:
        """Delete files that no index entry leads into, or all that are held; how many.

        Files that were busy are looked at again first. Blocks for the deletions.
        """
        self.retry()
        with self._lock:
            doomed = [name for name, held in self._held.items() if everything or not held.wanted]
            if everything:
                self._index.clear()
            for name in doomed:
                self._delete(name, self._held.pop(name).fd)
            return len(doomed)

    def retry(self) -> None:
        """Take the files whose writer has ended meanwhile. New files are never looked at: between
        its creation and its worker's lock an arena of this life looks abandoned."""
        with self._lock:
            for name in sorted(self._busy):
                self._examine(name)

    def close(self) -> None:
        """Give the locks up; the files stay for the next life."""
        with self._lock:
            for held in self._held.values():
                os.close(held.fd)
            self._held.clear()
            self._busy.clear()
            self._index.clear()

    # -- inside: the lock is held -------------------------------------------------------------

    def _examine(self, name: str) -> None:
        """Lock and index one file, delete it if it is of no use, or leave it busy."""
        path = os.path.join(self._folder, name)
        try:
            fd = osio.open_private(path, os.O_RDWR)
        except OSError as error:  # a directory, a link, gone: not ours, and nothing reads it
            self._busy.discard(name)
            self.warnings.append(f"{path} is no arena: {os.strerror(error.errno or 0)}")
            return
        try:
            if not osio.lock_exclusive(fd):
                os.close(fd)
                return
            self._busy.discard(name)
            places = self._read(name, fd)
        except (OSError, StoreCorrupt) as error:
            self._busy.discard(name)
            self.damaged += 1
            self.warnings.append(f"arena {name} is of no use: {error}")
            self._delete(name, fd)
            return
        except BaseException:
            os.close(fd)
            raise
        held = self._held[name] = _Held(fd, os.fstat(fd).st_size, len(places))
        for session, epoch, place in places:
            found = self._index.setdefault(session, _Found())
            found.by_epoch.setdefault(epoch, []).append(place)
        if not held.wanted:
            self._delete(name, self._held.pop(name).fd)

    def _read(self, name: str, fd: int) -> list[tuple[bytes, int, AtticPlace]]:
        """(session name, epoch, place) of every place with a whole header and a written row."""
        assert self._layout is not None
        arena = ArenaFile.read(fd, self._layout)
        if arena.repr_id != self._repr_id:
            raise StoreCorrupt("its rows are of another model or arithmetic")
        if not arena.boot or arena.boot != osio.boot_id():
            raise StoreCorrupt("it was written before this boot")
        arena.check_allocated()
        shape = arena.shape
        places: list[tuple[bytes, int, AtticPlace]] = []
        sidecars = memoryview(bytearray(_SLICE_PLACES * SIDECAR_BYTES))
        for first in range(0, shape.places, _SLICE_PLACES):
            count = min(_SLICE_PLACES, shape.places - first)
            self._files.read_all(fd, sidecars[: count * SIDECAR_BYTES], shape.rows_offset(first))
            for index in range(count):
                found = _headed(sidecars[index * SIDECAR_BYTES :], name, first + index)
                if found is not None:
                    places.append(found)
        return places

    def _forget(self, session: bytes) -> None:
        found = self._index.pop(session, None)
        if found is not None:
            for places in found.by_epoch.values():
                for place in places:
                    if place.arena in self._held:
                        self._held[place.arena].wanted -= 1

    def _delete(self, name: str, fd: int) -> None:
        """Unlink while the lock is still held, so that no file of a live writer can go."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))
            self.deleted += 1
        os.close(fd)


def _headed(sidecar: memoryview, name: str, place: int) -> tuple[bytes, int, AtticPlace] | None:
    """(session name, epoch, place) of a sidecar with a whole header and a written row."""
    header = sidecar[ROW_RECORDS_BYTES:]
    session, epoch, gen, page, check = PLACE_HEADER.unpack_from(header)
    if check != xxhash.xxh3_64_intdigest(bytes(header[:_HEADER_SPAN])):
        return None  # never used, poisoned, or torn
    valid = np.frombuffer(sidecar, ROW_RECORD_DTYPE, PAGE_TOKENS)["valid"] == 1
    rows = PAGE_TOKENS if valid.all() else int(np.argmin(valid))
    return (session, epoch, AtticPlace(name, place, gen, page, rows)) if rows else None
