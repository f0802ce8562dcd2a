"""What one worker maps: its arena read-write, sealed extents read-only, and nothing else.

Owns the translation of place codes to addresses, with every index checked against what is really
mapped. Refuses to trust the engine: a bad code is an error, never an address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.steps import ARENA_BIT, PLACE_MASK, BadStep, StepBatch, U64Array
from kv_store import keys
from kv_store.arena import SIDECAR_BYTES, ArenaMapping, PlaceOwner
from kv_store.extent import extent_path
from kv_store.layout import ROW_RECORD_DTYPE, PageLayout

EXTENTS_MAX = 1 << 16
_ROW_STEP = np.uint64(keys.ROW_SEED_STEP)
_PLACE_MASK = np.uint64(PLACE_MASK)


class Rows(NamedTuple):
    """Arena place, row inside it and seed of the row's digest, one per token of a batch."""

    places: NDArray[np.intp]
    rows: NDArray[np.integer[Any]]
    seeds: U64Array


class Extent:
    """One sealed extent, mapped PROT_READ: a stray write faults instead of changing a page."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_size < page_bytes:
                raise BadStep(f"extent {path.name} is not a file of whole pages")
            self.places = info.st_size // page_bytes
            self._map = mmap.mmap(fd, info.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.view = memoryview(self._map)
        self.base = kernels.address_of(self.view)


class PageMemory:
    """Places and extents of one worker life."""

    def __init__(self, attach: wire.Attach, layout: PageLayout) -> None:
        if layout.page_bytes != attach.page_bytes:
            raise BadStep(f"pages of {attach.page_bytes} bytes, this model has {layout.page_bytes}")
        self._arena = ArenaMapping(attach.arena_path, layout)
        if self._arena.shape.places != attach.places:
            raise BadStep(f"the arena has {self._arena.shape.places} places, not {attach.places}")
        # Not populated: the file is allocated, so a first touch cannot meet a full disk, and
        # faulting gigabytes in would make every restart of a worker slow.
        self.page_bytes = layout.page_bytes
        self.places = attach.places
        self._base = kernels.address_of(self._arena.page(0))
        self._extents_dir = attach.extents_dir
        self._extents: dict[int, Extent] = {}
        records = self._record_table()
        self._digests: NDArray[np.uint64] = records["digest"]
        self._tokens: NDArray[np.uint32] = records["token"]
        self._valid: NDArray[np.uint32] = records["valid"]
        # Seed base of each place's row records, and the position of its first row.
        self._owned = np.zeros(self.places, np.bool_)
        self._seeds = np.zeros(self.places, np.uint64)

    def _record_table(self) -> NDArray[np.void]:
        """The row records of all places as one array (places, 256): a step writes them at once.

        An alias by address, alive as long as the mapping: as long as this object.
        """
        shape = self._arena.shape
        start = self._base + shape.rows_offset(0) - shape.page_offset(0)
        memory = (ctypes.c_ubyte * (self.places * SIDECAR_BYTES)).from_address(start)
        flat: NDArray[np.void] = np.frombuffer(memoryview(memory), ROW_RECORD_DTYPE)
        return flat.reshape(self.places, -1)[:, :PAGE_TOKENS]

    def reserve(self, place: wire.Place) -> None:
        """Zero the place and write whose page it now holds."""
        index = self._checked(place.place)
        owner = PlaceOwner(place.session, place.epoch, place.gen, place.page)
        self._arena.reserve(index, owner)
        base = keys.row_seeds(
            self._arena.arena_id, index, owner.gen, owner.session, owner.epoch, 0, 1
        )
        self._seeds[index] = base[0]
        self._owned[index] = True

    def poison(self, place: int) -> None:
        """The place is free: its bytes must not look like numbers, its records not like rows."""
        self._arena.poison(self._checked(place))
        self._owned[place] = False

    def digest_place(self, place: int) -> bytes:
        """Unseeded digest of an arena place, 16 bytes."""
        return self._arena.digest(self._checked(place))

    def is_sealed(self, verify: wire.Verify) -> bool:
        """Whether the extent copy, read through this mapping, is the page it should be.

        Also False when nothing can be mapped there: the engine then keeps the arena copy.
        """
        extent, place = verify.code >> 32, verify.code & PLACE_MASK
        try:
            found = self._extent(extent)
        except BadStep:
            return False
        if place >= found.places:
            return False
        start = place * self.page_bytes
        page = found.view[start : start + self.page_bytes]
        return keys.sealed_checksum(page, verify.seed) == verify.checksum

    def addresses(self, codes: U64Array) -> U64Array:
        """Address of each page; BadStep for a place that is not mapped or has no owner."""
        places = codes & _PLACE_MASK
        if len(codes) and int(codes.min()) >= ARENA_BIT:  # the common case: open pages only
            self._check_open(places)
            return np.uint64(self._base) + places * np.uint64(self.page_bytes)
        is_open = codes >= np.uint64(ARENA_BIT)
        self._check_open(places[is_open])
        bases = np.full(len(codes), self._base, np.uint64)
        for index in np.unique(codes[~is_open] >> np.uint64(32)).tolist():
            extent = self._extent(index)
            mine = ~is_open & ((codes >> np.uint64(32)) == index)
            if int(places[mine].max()) >= extent.places:
                raise BadStep(f"extent {index} has {extent.places} places")
            bases[mine] = extent.base
        return bases + places * np.uint64(self.page_bytes)

    def rows_of(self, batch: StepBatch) -> Rows:
        """Where each token of the batch has its row."""
        counts, starts, pages = batch.shape[:, 0], batch.shape[:, 1], batch.shape[:, 2]
        if len(batch.tokens) == len(counts):  # decodes only: the last page of each entry
            codes, positions = batch.codes[np.cumsum(pages) - 1], starts
        else:
            first_row = np.cumsum(counts) - counts
            positions = np.arange(len(batch.tokens)) + np.repeat(starts - first_row, counts)
            first_page = np.repeat(np.cumsum(pages) - pages, counts)
            codes = batch.codes[first_page + positions // PAGE_TOKENS]
        places = (codes & _PLACE_MASK).astype(np.intp)
        seeds = self._seeds[places] + positions.astype(np.uint64) * _ROW_STEP
        return Rows(places, positions % PAGE_TOKENS, seeds)

    def record_rows(self, batch: StepBatch, rows: Rows, digests: U64Array) -> None:
        """After the rows are in place: say in the sidecar which token each row holds."""
        at = rows.places, rows.rows
        self._digests[at] = digests
        self._tokens[at] = batch.tokens
        self._valid[at] = 1

    def _check_open(self, places: U64Array) -> None:
        if not len(places):
            return
        highest = int(places.max())
        if highest >= self.places:
            raise BadStep(f"arena place {highest} of {self.places}")
        if not self._owned[places].all():
            raise BadStep("an arena place is used before it was reserved")

    def _checked(self, place: int) -> int:
        if not 0 <= place < self.places:
            raise BadStep(f"arena place {place} of {self.places}")
        return place

    def _extent(self, index: int) -> Extent:
        extent = self._extents.get(index)
        if extent is None:
            if not 0 <= index < EXTENTS_MAX:
                raise BadStep(f"no extent {index}")
            path = Path(extent_path(self._extents_dir, index))
            try:
                extent = self._extents[index] = Extent(path, self.page_bytes)
            except OSError as error:
                raise BadStep(f"extent {index} cannot be mapped: {error.strerror}") from None
        return extent
