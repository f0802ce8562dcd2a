"""The store memory of one worker: its arena mapped read-write, sealed extents read-only.

Owns the translation of slot codes to addresses, with every index checked against the actual
mapping, and the page chores of a step. A code that names no page is an error, never an address. A
row is imported only if its record proves it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.extents import MappedExtents
from batchengine.lanes.state_memory import StateSlots, make_states
from batchengine.lanes.step_input import (
    SLOT_MASK,
    BadStep,
    I32Array,
    StepInput,
    U64Array,
)
from batchengine.wire import lane as wire
from kv_store import keys, osio
from kv_store.arenas.arena import (
    ARENA_NAME,
    SIDECAR_BYTES,
    ArenaFile,
    ArenaMapping,
    SlotOwner,
    proven_rows,
)
from kv_store.errors import StoreError
from kv_store.layout import ROW_RECORD_DTYPE, PageLayout

log = logging.getLogger("batchengine.worker")

MADV_POPULATE_READ = 22  # a page that cannot be read becomes an errno here, not a SIGBUS later
_ROW_STEP = np.uint64(keys.ROW_SEED_STEP)
_SLOT_MASK = np.uint64(SLOT_MASK)
U32_MAX, U64_MAX = (1 << 32) - 1, (1 << 64) - 1


class BatchRows(NamedTuple):
    """Arena slot, row inside it and seed of the row's digest, one per token of a batch."""

    slots: NDArray[np.intp]
    rows: NDArray[np.integer[Any]]
    seeds: U64Array


class ProofPage:
    """A private page: bytes to import are copied to it, proven, and copied on to their slot."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._shape = kernels.PageShape(layout.layers)
        self._batch = kernels.Batch(PAGE_TOKENS, 1, 1)
        self._own: memoryview | None = None  # most workers never import

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


class HostMemory:
    """A `LaneMemory` in host memory: the slots and extents that one run of a worker maps."""

    def __init__(
        self, attach: wire.Attach, layout: PageLayout, states: StateSlots | None = None
    ) -> None:
        """states: None: in host memory, as `attach` says."""
        if layout.page_bytes != attach.page_bytes:
            raise BadStep(f"pages of {attach.page_bytes} bytes, this model has {layout.page_bytes}")
        self._arena = ArenaMapping(attach.arena_path, layout)
        if self._arena.shape.slots != attach.slots:
            raise BadStep(f"the arena has {self._arena.shape.slots} slots, not {attach.slots}")
        # Not populated: the file is allocated, so a first touch cannot meet a full disk, and
        # faulting gigabytes in would make every restart of a worker slow.
        self.layout = layout
        self.page_bytes = layout.page_bytes
        self.slots = attach.slots
        self.touch_failures = 0
        self._files = osio.Files()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._proof = ProofPage(layout)
        self._arenas_dir = attach.arenas_dir
        self.arena_name = os.path.basename(attach.arena_path)
        self._base = kernels.address_of(self._arena.page(0))
        self.extents = MappedExtents(attach.extents_dir)
        self.states: StateSlots = make_states(attach) if states is None else states
        self.states_dir = attach.states_dir
        records = self._record_table()
        self._digests: NDArray[np.uint64] = records["digest"]
        self._tokens: NDArray[np.uint32] = records["token"]
        self._valid: NDArray[np.uint32] = records["valid"]
        # Of each slot: whether it has an owner, and the seed base of its row records.
        self._owned = np.zeros(self.slots, np.bool_)
        self._seeds = np.zeros(self.slots, np.uint64)

    def _record_table(self) -> NDArray[np.void]:
        """The row records of all slots as one array (slots, 256): a step writes them at once.

        A view by address, valid as long as the mapping, which lasts as long as this object.
        """
        shape = self._arena.shape
        start = self._base + shape.rows_offset(0) - shape.page_offset(0)
        memory = (ctypes.c_ubyte * (self.slots * SIDECAR_BYTES)).from_address(start)
        flat: NDArray[np.void] = np.frombuffer(memoryview(memory), ROW_RECORD_DTYPE)
        return flat.reshape(self.slots, -1)[:, :PAGE_TOKENS]

    def check(self, step: wire.Step) -> None:
        """Raise BadStep for a chore with an impossible slot, row or epoch, before any is done."""
        for slot in (
            *step.reserve,
            *(import_rows.to for import_rows in step.import_rows),
            *step.relabel,
        ):
            self._checked(slot.slot)
            if not (0 <= slot.gen <= U32_MAX and 0 <= slot.page <= U32_MAX):
                raise BadStep(f"generation {slot.gen}, page {slot.page}")
            if not 0 <= slot.epoch <= U64_MAX:
                raise BadStep(f"epoch {slot.epoch}")
        for slot in step.poison:
            self._checked(slot)
        for rows in (*step.digest, *step.relabel):
            self._checked(rows.slot)
            if not 0 <= rows.rows <= PAGE_TOKENS:
                raise BadStep(f"{rows.rows} rows of a page")
        for import_rows in step.import_rows:
            _check_source(import_rows.source)

    def prepare(self, step: wire.Step, imported: Sequence[I32Array]) -> tuple[int, ...]:
        """Do the chores before the computation, in their order; see LaneMemory."""
        for index in step.deleted:  # unmapped, or the disk has no room back
            self.extents.forget(index)
        for slot in step.poison:
            self.poison(slot)
        for fresh in step.reserve:
            self.reserve(fresh)
        for relabel in step.relabel:
            self.relabel(relabel)
        counts = self.import_rows(step.import_rows, imported)
        self.touch(step.touch)
        return counts

    def finish(self, step: wire.Step) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
        """Do the chores after the computation; see LaneMemory."""
        digests = tuple([self.digest_slot(digest) for digest in step.digest])
        return digests, tuple([self.is_sealed(verify) for verify in step.verify])

    def reserve(self, slot: wire.ReserveSlot) -> None:
        """Zero the slot and write the header of the page that it now holds."""
        self._arena.reserve(self._checked(slot.slot), _owner(slot))
        self._own(slot)

    def poison(self, slot: int) -> None:
        """Fill a free slot with bytes that are no finite numbers, and invalidate its records."""
        self._arena.poison(self._checked(slot))
        if not self._owned[slot]:  # it was free: rows are imported soon
            _ = self._proof.page
        self._owned[slot] = False

    def relabel(self, to: wire.Relabel) -> None:
        """Record the slot's rows under another owner.

        A row that is not proven by its record under the old owner gets none under the new one.
        """
        index = self._checked(to.slot)
        if not self._owned[index]:
            raise BadStep("an arena slot is relabelled before it was reserved")
        page = self._arena.page(index)
        valid = self._valid[index, : to.rows] == 1
        old = self._slot_seeds(index, to.page, _leading(valid))
        rows = _leading(self._proof.digests(page, old) == self._digests[index, : len(old)])
        self._arena.label(index, _owner(to))
        self._own(to)
        self._record(index, to.page, self._tokens[index, :rows].copy(), page)

    def import_rows(
        self, imports: Sequence[wire.ImportRows], tokens: Sequence[I32Array]
    ) -> tuple[int, ...]:
        """Copy proven rows into slots; returns the count for each import."""
        if not imports:
            return ()
        with ExitStack() as closing:
            sources: dict[str, ArenaFile | None] = {}
            done: list[int] = []
            for import_rows, wanted in zip(imports, tokens, strict=True):
                ids = wanted.astype(np.uint32)
                if isinstance(import_rows.source, wire.FromPage):
                    count = self._read_page(import_rows.source, len(ids))
                else:
                    count = self._read_rows(import_rows, import_rows.source, ids, sources, closing)
                to, page = import_rows.to, self._proof.page
                self._arena.reserve(self._checked(to.slot), _owner(to), page, count)
                self._own(to)
                if count:
                    self._record(to.slot, to.page, ids[:count], page)
                done.append(count)
        return tuple(done)

    def touch(self, codes: Sequence[int]) -> list[int]:
        """Fault sealed pages in before a step reads them, and return those that can be read. The
        first failure of a worker is logged, all are counted. Open pages are there."""
        readable: list[int] = []
        for code in codes:
            if code >= wire.ARENA_BIT:
                continue
            view = self._sealed(code)
            if view is not None and self._fault_in(view):
                readable.append(code)
                continue
            if not self.touch_failures:
                log.warning("page %#x cannot be faulted in", code)
            self.touch_failures += 1
        return readable

    def digest_slot(self, of: wire.Digest) -> bytes:
        """Unseeded digest of an arena slot, 16 bytes; rows from `of.rows` on are zeroed first."""
        index = self._checked(of.slot)
        if of.rows < PAGE_TOKENS:
            self._valid[index, of.rows :] = 0
            self.layout.clear_rows(self._arena.page(index), of.rows)
        return self._arena.digest(index)

    def is_sealed(self, verify: wire.Verify) -> bool:
        """Whether the extent copy, read through this mapping, has its sealed checksum.

        Also False when nothing can be mapped there: the engine then keeps the arena copy.
        """
        page = self._sealed(verify.code)
        if page is None or not self._fault_in(page):
            return False
        return keys.sealed_checksum(page, verify.seed) == verify.checksum

    def addresses(self, codes: U64Array) -> U64Array:
        """Address of each page; BadStep for a slot that is not mapped or has no owner."""
        slots = codes & _SLOT_MASK
        if len(codes) and int(codes.min()) >= wire.ARENA_BIT:  # the common case: open pages only
            self._check_open(slots)
            return np.uint64(self._base) + slots * np.uint64(self.page_bytes)
        is_open = codes >= np.uint64(wire.ARENA_BIT)
        self._check_open(slots[is_open])
        found = np.uint64(self._base) + slots * np.uint64(self.page_bytes)
        found[~is_open] = self.extents.addresses(codes[~is_open], self.page_bytes)
        return found

    def tile(self, slot: int, offset: int, size: int) -> memoryview:
        """Writable bytes of a slot; BadStep for one without owner, or bytes beyond its page."""
        self._check_open(np.array([self._checked(slot)], np.uint64))
        if not 0 <= offset <= self.page_bytes - size:
            raise BadStep(f"bytes {offset} to {offset + size} of a page")
        return self._arena.page(slot)[offset : offset + size]

    def rows_of(self, batch: StepInput) -> BatchRows:
        """Slot, row and digest seed of each token of the batch."""
        counts, starts, pages = batch.shape[:, 0], batch.shape[:, 1], batch.shape[:, 2]
        if len(batch.tokens) == len(counts):  # decodes only: the last page of each entry
            codes, positions = batch.codes[np.cumsum(pages) - 1], starts
        else:
            first_row = np.cumsum(counts) - counts
            positions = np.arange(len(batch.tokens)) + np.repeat(starts - first_row, counts)
            first_page = np.repeat(np.cumsum(pages) - pages, counts)
            codes = batch.codes[first_page + positions // PAGE_TOKENS]
        slots = (codes & _SLOT_MASK).astype(np.intp)
        seeds = self._seeds[slots] + positions.astype(np.uint64) * _ROW_STEP
        return BatchRows(slots, positions % PAGE_TOKENS, seeds)

    def record_rows(
        self,
        batch: StepInput,
        rows: BatchRows,
        digests: U64Array,
        unusable: tuple[int, ...],
        rejected: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Record which token each row of the batch holds; the rows are in place already.

        `digests`: one per token. The rows of the entries `unusable` get no record, nor do the last
        ones of those in `rejected`: a row depends on all tokens before it, a record names its own.
        Nor does the row behind the last one of an entry keep an earlier record: imports end there.
        """
        at = rows.slots, rows.rows
        ends = np.cumsum(batch.shape[:, 0])
        _end_records(self._valid, rows.slots[ends - 1], rows.rows[ends - 1])
        valid: int | NDArray[np.uint32] = 1
        if unusable or rejected:
            good = np.ones(len(batch.entries), np.uint32)
            good[list(unusable)] = 0
            valid = np.repeat(good, batch.shape[:, 0])
            for index, n in rejected:
                valid[ends[index] - n : ends[index]] = 0
        self._digests[at] = digests
        self._tokens[at] = batch.tokens
        self._valid[at] = valid

    def record_places(
        self,
        slots: NDArray[np.intp],
        rows: NDArray[np.integer[Any]],
        tokens: NDArray[np.integer[Any]],
        digests: U64Array,
    ) -> None:
        """Record which token each of these rows holds, which are in place, and of one timeline."""
        at = slots, rows
        _end_records(self._valid, slots[-1:], rows[-1:])
        self._digests[at], self._tokens[at], self._valid[at] = digests, tokens, 1

    def _own(self, slot: wire.ReserveSlot | wire.Relabel) -> None:
        """Remember the seeds of the slot's rows."""
        index, owner = slot.slot, _owner(slot)
        base = keys.row_seeds(
            self._arena.arena_id, index, owner.gen, owner.session, owner.epoch, 0, 1
        )
        self._seeds[index] = base[0]
        self._owned[index] = True

    def _slot_seeds(self, slot: int, page: int, count: int) -> U64Array:
        """Seeds of the first `count` rows of an owned slot that holds page `page`."""
        positions = np.arange(page * PAGE_TOKENS, page * PAGE_TOKENS + count, dtype=np.uint64)
        return self._seeds[slot] + positions * _ROW_STEP

    def _record(self, slot: int, page: int, tokens: NDArray[np.uint32], proven: memoryview) -> None:
        """Record the first rows of a slot; `proven` has their bytes."""
        seeds = self._slot_seeds(slot, page, len(tokens))
        digests = self._proof.digests(proven, seeds)
        self._arena.write_records(slot, 0, tokens, digests)

    def _read_rows(
        self,
        import_rows: wire.ImportRows,
        source: wire.FromArena,
        ids: NDArray[np.uint32],
        sources: dict[str, ArenaFile | None],
        closing: ExitStack,
    ) -> int:
        """Copy a slot of another arena to the private page; returns how many leading rows are
        proven."""
        if source.arena not in sources:
            sources[source.arena] = self._open_arena(source.arena, closing)
        file = sources[source.arena]
        if file is None:
            return 0
        to, proof = import_rows.to, self._proof
        owner = SlotOwner(to.session, source.epoch, source.gen, to.page)
        try:
            return proven_rows(
                self._files,
                file,
                source.slot,
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
        """Copy a sealed page to the private page; returns `rows` if it is proven, else 0."""
        view = self._sealed(source.code)
        if view is None or not rows or not self._fault_in(view):
            return 0
        page = self._proof.page
        page[:] = view
        return rows if keys.sealed_checksum(page, source.seed) == source.checksum else 0

    def _fault_in(self, view: memoryview) -> bool:
        """Fault in pages of a mapping; False if reading them would raise SIGBUS."""
        address = ctypes.c_void_p(kernels.address_of(view))
        if not self._libc.madvise(address, ctypes.c_size_t(len(view)), MADV_POPULATE_READ):
            return True
        return ctypes.get_errno() == errno.EINVAL  # kernels before 5.14 have no such advice

    def _sealed(self, code: int) -> memoryview | None:
        """The page behind the code of a sealed page; None if nothing can be mapped there."""
        return self.extents.page(code, self.page_bytes)

    def _check_open(self, slots: U64Array) -> None:
        if not len(slots):
            return
        highest = int(slots.max())
        if highest >= self.slots:
            raise BadStep(f"arena slot {highest} of {self.slots}")
        if not self._owned[slots].all():
            raise BadStep("an arena slot is used before it was reserved")

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise BadStep(f"arena slot {slot} of {self.slots}")
        return slot


def _owner(slot: wire.ReserveSlot | wire.Relabel) -> SlotOwner:
    return SlotOwner(slot.session, slot.epoch, slot.gen, slot.page)


def _leading(good: NDArray[np.bool_]) -> int:
    """Length of the leading run of True."""
    return len(good) if good.all() else int(np.argmin(good))


def _check_source(source: wire.FromArena | wire.FromPage) -> None:
    """Raise BadStep for a malformed source; a source that does not exist is no error here."""
    if isinstance(source, wire.FromPage):
        if not (0 <= source.code < wire.ARENA_BIT and 0 <= source.seed <= U64_MAX):
            raise BadStep(f"page code {source.code:#x}")
    elif not ARENA_NAME.fullmatch(source.arena):
        raise BadStep("the source is not named like an arena")
    elif not (0 <= source.slot <= U32_MAX and 0 <= source.gen <= U32_MAX):
        raise BadStep(f"source slot {source.slot}, generation {source.gen}")
    elif not 0 <= source.epoch <= U64_MAX:
        raise BadStep(f"source epoch {source.epoch}")


def _end_records(
    valid: NDArray[np.uint32], slots: NDArray[np.integer[Any]], rows: NDArray[np.integer[Any]]
) -> None:
    """Invalidate the record behind each of these rows, which are the last of their timelines.

    It may be of a row that a draft has brought and its turn has not kept: that depends on tokens
    which the timeline has not. Called before the rows are recorded, so that a worker that dies
    leaves no such record behind a valid one.
    """
    is_inside = rows + 1 < PAGE_TOKENS
    valid[slots[is_inside], rows[is_inside] + 1] = 0
