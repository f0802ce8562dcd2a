"""Steps of a GPU lane: the GPU computes them, and their rows come back to the pages of the host.

Host memory stays the truth. A step copies the pages that it needs to the GPU, unless they are
there, and computes. Its new rows come back with its tokens, are copied to the arena and recorded as
those of a CPU lane, at once or some steps later (`late_rows.py`).
"""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple

import numpy as np

import kernels
from batchengine.lanes.device import StartedStep
from batchengine.lanes.gpu.memory import DeviceMemory
from batchengine.lanes.gpu.page_cache import PageCopies
from batchengine.lanes.gpu.step import GpuSteps, Room, fits, parts_of, unwritten
from batchengine.lanes.host_device import (
    Computed,
    HostStep,
    WantedRows,
    addresses_of,
    late_rows,
    recorded,
    run_on_host,
    sample_specs,
    sampled,
    scored,
    wanted_rows,
    without,
)
from batchengine.lanes.host_memory import BatchRows
from batchengine.lanes.step_input import (
    SLOT_MASK,
    I32Array,
    StepInput,
    StepOutput,
    U64Array,
    takers_of,
    written_slots,
)
from batchengine.model import nonfinite_entries
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from kernels.cuda.driver import STAGING_BYTES
from kernels.cuda.gpu import GpuFault, Mark
from kernels.cuda.memory import BadRows
from kernels.cuda.ops import NOTHING_TAKEN, BegunSample, Taken

log = logging.getLogger("batchengine.worker")

# Of expected pages, copied beside one step: those of two steps find staging memory.
ASIDE_BYTES = STAGING_BYTES // 2
LATE_ENTRIES_MIN = 9  # of a step of decodes whose rows are not stored one by one


class LoadedGpu(NamedTuple):
    """A GPU with a model. pool: the cores that hash and store its rows; on_host: steps that store
    rows, as the kernels of the host take them."""

    pool: kernels.Pool
    steps: GpuSteps
    pages: PageCopies
    on_host: kernels.Batch


class Launched(NamedTuple):
    """A step that was launched.

    ends: per entry, the row behind its last one. bad_rows, rows: rows that are not finite, and the
    page rows, both valid after the wait for a later mark. histories: by index in `wanted`, the row
    of the step before whose sample ends the entry's history.
    """

    wanted: WantedRows
    ends: I32Array
    bad_rows: list[BadRows]
    rows: kernels.KvRows
    histories: Taken


class GpuSampling(NamedTuple):
    """What the GPU samples. late: rows whose mask had not come, by index in `wanted`; end: the mark
    behind it."""

    late: frozenset[int]
    begun: BegunSample
    end: Mark


class GpuLane:
    """Computes the steps of one model over the pages of one arena."""

    def __init__(self, gpu: LoadedGpu, memory: DeviceMemory) -> None:
        self._pool, self._steps, self._pages, self._on_host = gpu
        self._memory = memory

    def start(self, batch: StepInput, after: StartedStep | None = None) -> StartedStep:
        """Start a step on the GPU, if it fits there at once; see Device."""
        taken = after.rows_of(batch) if isinstance(after, GpuStep) else NOTHING_TAKEN
        if fits(batch, self._rooms()):
            addresses, rows = addresses_of(self._memory, batch), self._memory.rows_of(batch)
            with contextlib.suppress(MemoryError):
                launched = self.launch(batch, addresses, taken)
                waits = any(entry.masked for entry in batch.entries)
                sampling = None if waits else self.begin_sample(batch, launched)
                return GpuStep(self, batch, addresses, rows, launched, sampling)
        return HostStep(lambda: self.run(batch))

    def run(self, batch: StepInput) -> StepOutput:
        """Compute a step, in parts if the pages of all its entries do not fit in the memory."""
        while True:
            try:
                return self._run_parts(batch, self._rooms())
            except MemoryError as error:
                if not self._pages.shrink():
                    raise GpuFault(f"out of memory: {error}") from error
                log.warning("no memory on the GPU: it holds %s now", self._pages)

    def _rooms(self) -> list[Room]:
        return [Room(cache.part.window, cache.pages_max) for cache in self._pages.caches]

    def _run_parts(self, batch: StepInput, rooms: list[Room]) -> StepOutput:
        rows: list[wire.SampledRow] = []
        nonfinite: list[int] = []
        unmasked: list[int] = []
        scores: list[wire.ScoredRows] = []
        rejected: list[tuple[int, int]] = []
        for first, part in parts_of(batch, rooms):
            if not fits(part, rooms):
                n, fit = len(np.unique(part.codes)), self._pages
                raise GpuFault(f"a session of {n} pages, and room for {fit}: memory was refused")
            output = run_on_host(self._memory, part, self._compute)
            rows += output.rows
            nonfinite += [first + index for index in output.nonfinite]
            unmasked += [first + index for index in output.unmasked]
            scores += output.scores
            rejected += [(first + index, n) for index, n in output.rejected]
        return StepOutput(
            tuple(rows),
            tuple(nonfinite),
            unmasked=tuple(unmasked),
            scores=tuple(scores),
            rejected=tuple(rejected),
        )

    def _compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        """Run one forward pass on the GPU, and copy its rows to the pages of the host. Returns
        their digests, too."""
        launched = self.launch(batch, addresses)
        output = self.choose(batch, launched, self.begin_sample(batch, launched))
        return output, self._store(batch, addresses, seeds, launched.rows)

    def launch(
        self, batch: StepInput, addresses: U64Array, taken: Taken = NOTHING_TAKEN
    ) -> Launched:
        """Begin one forward pass. taken: the entries that take samples of the step before, which
        may be under way, and of which row of it. Raises MemoryError."""
        wanted = wanted_rows(batch)
        ends = np.cumsum(batch.shape[:, 0], dtype=np.int32)
        if len(self._memory.late):  # the GPU gets pages as they are on the host
            lacking = self._pages.lacking(batch.codes[batch.codes >= ARENA_BIT])
            self._memory.late.flush([code & SLOT_MASK for code in lacking])
        states = self._memory.states.addresses(batch)
        shape = batch.shape
        pages = self._pages.addresses(batch.codes, addresses, shape, unwritten(shape))
        tokens = {int(ends[entry]) - 1: row for entry, row in taken.items()}
        inputs = batch.tokens, shape, pages, wanted.rows
        bad_rows, rows = self._steps.begin(*inputs, tokens, states, batch.drafts)
        self._pages.copy_expected(ASIDE_BYTES, batch.codes.tolist())
        samplers = enumerate(wanted.entries)
        histories = {row: taken[entry] for row, entry in samplers if entry in taken}
        return Launched(wanted, ends, bad_rows, rows, histories)

    def begin_sample(self, batch: StepInput, launched: Launched) -> GpuSampling:
        """Have the GPU sample, once the masks are here. Raises MemoryError."""
        masks = batch.masks(launched.wanted.masks)
        suppressed = self._steps.stepper.model.spec.suppressed
        specs = sample_specs(batch, masks, launched.wanted, suppressed)
        begun = self._steps.sample(specs, launched.histories)
        late = late_rows(launched.wanted, masks)
        return GpuSampling(late, begun, self._steps.gpu.mark())

    def choose(self, batch: StepInput, launched: Launched, sampling: GpuSampling) -> StepOutput:
        """Wait for what was sampled; everything of the step is on the host then. Raises MemoryError
        if there are scores or drafts."""
        sampling.end.wait()
        nonfinite = nonfinite_entries(launched.ends, launched.wanted.rows, launched.bad_rows)
        chosen, nonfinite, unmasked, rejected = sampled(
            batch, launched.wanted, sampling.begun.chosen(), nonfinite, sampling.late
        )
        scores, bad = scored(self._steps.stepper, batch, [*nonfinite, *unmasked])
        chosen, nonfinite = without(chosen, batch, bad), sorted([*nonfinite, *bad])
        self._steps.stepper.rewind(rejected)
        return StepOutput(
            tuple(chosen),
            tuple(nonfinite),
            unmasked=tuple(unmasked),
            scores=scores,
            rejected=rejected,
        )

    def finish(
        self,
        batch: StepInput,
        addresses: U64Array,
        at: BatchRows,
        rows: kernels.KvRows,
        output: StepOutput,
    ) -> StepOutput:
        """Store and record the rows of a step, or let those of decodes of many sessions wait."""
        counts = batch.shape[:, 0]
        firsts, unusable = np.cumsum(counts) - counts, {*output.unusable, *batch.untaken}
        decodes = [i for i in np.flatnonzero(counts == 1).tolist() if i not in unusable]
        if len(decodes) < LATE_ENTRIES_MIN:
            digests = self._store(batch, addresses, at.seeds, rows)
            return recorded(self._memory, batch, at, output, digests)
        digests = kernels.step_digests(self._pool, rows, at.seeds)
        wait, view = firsts[decodes], rows.view(len(digests))
        self._memory.late.add(
            at.slots[wait].tolist(),
            at.rows[wait].tolist(),
            view if len(wait) == len(view) else view[wait],
            batch.tokens[wait].tolist(),
            digests[wait],
        )
        self._store_chunks(batch, addresses, at, rows, digests, output, unusable)
        return output

    def _store(
        self, batch: StepInput, addresses: U64Array, seeds: U64Array, rows: kernels.KvRows
    ) -> U64Array:
        """Copy rows that are on the host to their pages; returns their digests."""
        if len(self._memory.late):
            self._memory.late.flush(written_slots(batch))
        self._on_host.set(batch.tokens, batch.shape, addresses)
        kernels.store_rows(self._pool, rows, self._on_host)
        return kernels.step_digests(self._pool, rows, seeds)

    def _store_chunks(
        self,
        batch: StepInput,
        addresses: U64Array,
        at: BatchRows,
        rows: kernels.KvRows,
        digests: U64Array,
        output: StepOutput,
        unusable: set[int],
    ) -> None:
        """Store the rows of entries of several tokens, and record those that were not rejected."""
        rejected = dict(output.rejected)
        first = first_page = 0
        for index, (n, start, n_pages) in enumerate(batch.shape.tolist()):
            part, pages = slice(first, first + n), slice(first_page, first_page + n_pages)
            if n > 1 and index not in unusable:
                self._memory.late.flush(np.unique(at.slots[part]).tolist())
                entry = np.array([[n, start, n_pages]], np.int32)
                self._on_host.set(batch.tokens[part], entry, addresses[pages])
                kernels.store_rows(self._pool, rows, self._on_host, first)
                part = slice(first, first + n - rejected.get(index, 0))
                self._memory.record_places(
                    at.slots[part], at.rows[part], batch.tokens[part], digests[part]
                )
            first, first_page = first + n, first_page + n_pages


class GpuStep:
    """A step that the GPU was given as a whole. Once it samples, the GPU may be given the next
    step, which takes the samples there; unless it scores, which is done with what the step left."""

    def __init__(
        self,
        lane: GpuLane,
        batch: StepInput,
        addresses: U64Array,
        rows: BatchRows,
        launched: Launched,
        sampling: GpuSampling | None,
    ) -> None:
        """sampling: None if masks lack for it."""
        self._lane, self._batch = lane, batch
        self._addresses, self._rows, self._launched = addresses, rows, launched
        self._sampling = sampling
        self._output: StepOutput | None = None
        self._again: StepOutput | None = None  # of a step that was computed again

    @property
    def may_be_followed(self) -> bool:
        return self._sampling is not None and not any(len(of) for of in self._batch.scored)

    @property
    def is_computed(self) -> bool:
        return self._sampling is None or self._sampling.end.is_passed

    def rows_of(self, batch: StepInput) -> dict[int, int]:
        """For each entry of the next step that takes a sample of this one: the row it is of."""
        samplers = enumerate(self._launched.wanted.entries)
        rows = {self._batch.entries[index].session: row for row, index in samplers}
        takers = [(i, rows.get(batch.entries[i].session)) for i in takers_of(batch)]
        return {index: row for index, row in takers if row is not None}

    def sample(self) -> None:
        """See StartedStep. A step that gets no memory is computed again."""
        if self._sampling is None and self._again is None:
            try:
                self._sampling = self._lane.begin_sample(self._batch, self._launched)
            except MemoryError:
                self._again = self._lane.run(self._batch)

    def tokens(self) -> dict[int, int]:
        """Wait for the GPU; see StartedStep. A step that gets no memory is computed again."""
        self.sample()
        rows: tuple[wire.SampledRow, ...] = ()
        if self._sampling is not None:
            try:
                self._output = self._lane.choose(self._batch, self._launched, self._sampling)
                rows = self._output.rows
            except MemoryError:
                self._again = self._lane.run(self._batch)
        if self._again is not None:
            rows = self._again.rows
        return {row.session: row.token for row in rows}

    def finish(self) -> StepOutput:
        """Copy the rows to the pages of the host, and record them."""
        if self._again is not None:
            return self._again
        if self._output is None:
            raise RuntimeError("finish before tokens")
        return self._lane.finish(
            self._batch, self._addresses, self._rows, self._launched.rows, self._output
        )
