"""What one worker maps: its arena read-write, sealed extents read-only, and nothing else.

Owns the translation of place codes to addresses, with every index checked against what is really
mapped, and the page chores of a step. Refuses to trust the engine: a bad code is an error, never
an address. Refuses to trust the bytes it adopts: a row that does not prove itself is not copied.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.steps import (
    ARENA_BIT,
    PLACE_MASK,
    BadStep,
    I32Array,
    StepBatch,
    StepOutput,
    U64Array,
)
from kv_store import keys, osio
from kv_store.arena import (
    ARENA_NAME,
    SIDECAR_BYTES,
    ArenaFile,
    ArenaMapping,
    PlaceOwner,
    proven_rows,
)
from kv_store.errors import StoreError
from kv_store.extent import extent_path
from kv_store.layout import ROW_RECORD_DTYPE, PageLayout

log = logging.getLogger("batchengine.worker")

EXTENTS_MAX = 1 << 16
MADV_POPULATE_READ = 22  # a page that cannot be read becomes an errno here, not a SIGBUS later
_ROW_STEP = np.uint64(keys.ROW_SEED_STEP)
_PLACE_MASK = np.uint64(PLACE_MASK)
U32_MAX = (1 << 32) - 1


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


class ProofPage:
    """A private page: bytes are copied here once, proven here, and taken from here."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._shape = kernels.PageShape(layout.n_layer, layout.n_kv_head, layout.head_dim)
        self._batch = kernels.Batch(PAGE_TOKENS, 1, 1)
        self._own: memoryview | None = None  # most workers never adopt

    @property
    def page(self) -> memoryview:
        if self._own is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._own = memoryview(mmap.mmap(-1, self._layout.page_bytes, flags))
        return self._own

    def digests(self, page: memoryview, seeds: U64Array) -> U64Array:
        """Digests of the first len(seeds) rows of a page, as their records have them."""
        if not len(seeds):
            return seeds
        entry = np.array([[len(seeds), 0, 1]], np.int32)
        address = np.array([kernels.address_of(page)], np.uint64)
        self._batch.set(np.zeros(len(seeds), np.int32), entry, address)
        return kernels.row_digests(self._batch, self._shape, seeds)


class PageMemory:
    """Places and extents of one worker life."""

    def __init__(
        self, attach: wire.Attach, layout: PageLayout, files: osio.Files | None = None
    ) -> None:
        if layout.page_bytes != attach.page_bytes:
            raise BadStep(f"pages of {attach.page_bytes} bytes, this model has {layout.page_bytes}")
        self._arena = ArenaMapping(attach.arena_path, layout)
        if self._arena.shape.places != attach.places:
            raise BadStep(f"the arena has {self._arena.shape.places} places, not {attach.places}")
        # Not populated: the file is allocated, so a first touch cannot meet a full disk, and
        # faulting gigabytes in would make every restart of a worker slow.
        self.layout = layout
        self.page_bytes = layout.page_bytes
        self.places = attach.places
        self.touch_failures = 0
        self._files = files or osio.Files()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._proof = ProofPage(layout)
        self._arenas_dir = attach.arenas_dir
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

    def check(self, step: wire.Step) -> None:
        """Raise BadStep for a chore that names what cannot be, before any chore is done."""
        for place in (*step.reserve, *(adopt.to for adopt in step.adopt), *step.retitle):
            self._checked(place.place)
            if not (0 <= place.gen <= U32_MAX and 0 <= place.page <= U32_MAX):
                raise BadStep(f"generation {place.gen}, page {place.page}")
            if not 0 <= place.epoch <= wire.U64_MAX:
                raise BadStep(f"epoch {place.epoch}")
        for place in step.poison:
            self._checked(place)
        for rows in (*step.digest, *step.retitle):
            self._checked(rows.place)
            if not 0 <= rows.rows <= PAGE_TOKENS:
                raise BadStep(f"{rows.rows} rows of a page")
        for adopt in step.adopt:
            _check_source(adopt.source)

    def reserve(self, place: wire.Place) -> None:
        """Zero the place and write whose page it now holds."""
        self._arena.reserve(self._checked(place.place), _owner(place))
        self._own(place)

    def poison(self, place: int) -> None:
        """The place is free: its bytes must not look like numbers, its records not like rows."""
        self._arena.poison(self._checked(place))
        if not self._owned[place]:  # it was free: it is made ready for rows that are adopted soon
            _ = self._proof.page
        self._owned[place] = False

    def retitle(self, to: wire.Retitle) -> None:
        """The place's rows belong to another owner: prove them as they are, then record them anew.

        A row that does not prove itself under its old owner gets no record under the new one.
        """
        index = self._checked(to.place)
        if not self._owned[index]:
            raise BadStep("an arena place is retitled before it was reserved")
        page = self._arena.page(index)
        valid = self._valid[index, : to.rows] == 1
        old = self._place_seeds(index, to.page, _leading(valid))
        rows = _leading(self._proof.digests(page, old) == self._digests[index, : len(old)])
        self._arena.title(index, _owner(to))
        self._own(to)
        self._record(index, to.page, self._tokens[index, :rows].copy(), page)

    def adopt(self, adopts: Sequence[wire.Adopt], tokens: Sequence[I32Array]) -> tuple[int, ...]:
        """Copy proven rows into places; how many of each. A source without proof yields 0."""
        if not adopts:
            return ()
        with ExitStack() as closing:
            sources: dict[str, ArenaFile | None] = {}
            done: list[int] = []
            for adopt, wanted in zip(adopts, tokens, strict=True):
                ids = wanted.astype(np.uint32)
                if isinstance(adopt.source, wire.FromPage):
                    count = self._read_page(adopt.source, len(ids))
                else:
                    count = self._read_rows(adopt, adopt.source, ids, sources, closing)
                to, page = adopt.to, self._proof.page
                self._arena.reserve(self._checked(to.place), _owner(to), page, count)
                self._own(to)
                if count:
                    self._record(to.place, to.page, ids[:count], page)
                done.append(count)
        return tuple(done)

    def touch(self, codes: Sequence[int]) -> None:
        """Fault sealed pages in, so that the step meets no disk; what fails is only counted."""
        for code in codes:
            if not self._touched(code):
                if not self.touch_failures:
                    log.warning("page %#x cannot be faulted in", code)
                self.touch_failures += 1

    def digest_place(self, of: wire.Digest) -> bytes:
        """Unseeded digest of an arena place, 16 bytes; rows from `of.rows` on are zeroed first."""
        index = self._checked(of.place)
        if of.rows < PAGE_TOKENS:
            self._valid[index, of.rows :] = 0
            self.layout.clear_rows(self._arena.page(index), of.rows)
        return self._arena.digest(index)

    def is_sealed(self, verify: wire.Verify) -> bool:
        """Whether the extent copy, read through this mapping, is the page it should be.

        Also False when nothing can be mapped there: the engine then keeps the arena copy.
        """
        page = self._sealed(verify.code)
        if page is None or not self._fault_in(page):
            return False
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

    def record_rows(self, batch: StepBatch, rows: Rows, output: StepOutput) -> None:
        """After the rows are in place: say in the sidecar which token each row holds.

        Rows of a poisoned entry are nobody's: no record may vouch for them.
        """
        at = rows.places, rows.rows
        valid: int | NDArray[np.uint32] = 1
        if output.poisoned:
            good = np.ones(len(batch.entries), np.uint32)
            good[list(output.poisoned)] = 0
            valid = np.repeat(good, batch.shape[:, 0])
        self._digests[at] = output.row_digests
        self._tokens[at] = batch.tokens
        self._valid[at] = valid

    def _own(self, place: wire.Place | wire.Retitle) -> None:
        """Remember the seeds of the place's rows."""
        index, owner = place.place, _owner(place)
        base = keys.row_seeds(
            self._arena.arena_id, index, owner.gen, owner.session, owner.epoch, 0, 1
        )
        self._seeds[index] = base[0]
        self._owned[index] = True

    def _place_seeds(self, place: int, page: int, count: int) -> U64Array:
        """Seeds of the first `count` rows of an owned place that holds page `page`."""
        positions = np.arange(page * PAGE_TOKENS, page * PAGE_TOKENS + count, dtype=np.uint64)
        return self._seeds[place] + positions * _ROW_STEP

    def _record(
        self, place: int, page: int, tokens: NDArray[np.uint32], proven: memoryview
    ) -> None:
        """Record the first rows of a place; `proven` has their bytes."""
        seeds = self._place_seeds(place, page, len(tokens))
        digests = self._proof.digests(proven, seeds)
        self._arena.write_records(place, 0, tokens, digests)

    def _read_rows(
        self,
        adopt: wire.Adopt,
        source: wire.FromArena,
        ids: NDArray[np.uint32],
        sources: dict[str, ArenaFile | None],
        closing: ExitStack,
    ) -> int:
        """Bring a place of another arena to the private page; how many leading rows are proven."""
        if source.arena not in sources:
            sources[source.arena] = self._open_arena(source.arena, closing)
        file = sources[source.arena]
        if file is None:
            return 0
        to, proof = adopt.to, self._proof
        owner = PlaceOwner(to.session, source.epoch, source.gen, to.page)
        try:
            return proven_rows(
                self._files,
                file,
                source.place,
                owner,
                ids,
                proof.page,
                lambda seeds: proof.digests(proof.page, seeds),
            )
        except (OSError, StoreError) as error:
            log.warning("no rows from arena %s: %s", source.arena, error)
            return 0

    def _open_arena(self, name: str, closing: ExitStack) -> ArenaFile | None:
        if not self._arenas_dir:
            return None
        try:
            file = ArenaFile.open(os.path.join(self._arenas_dir, name), self.layout)
        except (OSError, StoreError) as error:
            log.warning("no rows from arena %s: %s", name, error)
            return None
        closing.callback(os.close, file.fd)
        if file.repr_id != self._arena.repr_id:
            log.warning("no rows from arena %s: they are of another model", name)
            return None
        return file

    def _read_page(self, source: wire.FromPage, rows: int) -> int:
        """Bring a sealed page to the private page; all rows of it are proven, or none."""
        view = self._sealed(source.code)
        if view is None or not rows or not self._fault_in(view):
            return 0
        page = self._proof.page
        page[:] = view
        return rows if keys.sealed_checksum(page, source.seed) == source.checksum else 0

    def _touched(self, code: int) -> bool:
        view = self._sealed(code)
        return view is not None and self._fault_in(view)

    def _fault_in(self, view: memoryview) -> bool:
        """Read pages of a mapping in; False where reading them would be a SIGBUS."""
        address = ctypes.c_void_p(kernels.address_of(view))
        if not self._libc.madvise(address, ctypes.c_size_t(len(view)), MADV_POPULATE_READ):
            return True
        return ctypes.get_errno() == errno.EINVAL  # a kernel before 5.14 cannot tell

    def _sealed(self, code: int) -> memoryview | None:
        """The page behind the code of a sealed page; None if nothing can be mapped there."""
        extent, place = code >> 32, code & PLACE_MASK
        try:
            found = self._extent(extent)
        except BadStep:
            return None
        if place >= found.places:
            return None
        return found.view[place * self.page_bytes : (place + 1) * self.page_bytes]

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


def _owner(place: wire.Place | wire.Retitle) -> PlaceOwner:
    return PlaceOwner(place.session, place.epoch, place.gen, place.page)


def _leading(good: NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    return len(good) if good.all() else int(np.argmin(good))


def _check_source(source: wire.FromArena | wire.FromPage) -> None:
    """A source may be missing, but it may not be a path or a number that is none."""
    if isinstance(source, wire.FromPage):
        if not (0 <= source.code < ARENA_BIT and 0 <= source.seed <= wire.U64_MAX):
            raise BadStep(f"page code {source.code:#x}")
    elif not ARENA_NAME.fullmatch(source.arena):
        raise BadStep("that is not the name of an arena")
    elif not (0 <= source.place <= U32_MAX and 0 <= source.gen <= U32_MAX):
        raise BadStep(f"source place {source.place}, generation {source.gen}")
    elif not 0 <= source.epoch <= wire.U64_MAX:
        raise BadStep(f"source epoch {source.epoch}")
