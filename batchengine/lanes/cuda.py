"""The arithmetic of a GPU lane: weights and copies of pages in the memory of a GPU.

Host memory stays the truth. A step copies the pages that it needs to the GPU, unless they are
there, and computes. Its new rows come back with its tokens, are copied to the arena and recorded as
those of a CPU lane, at once or some steps later (`late_rows.py`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

import kernels
from batchengine import errors
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.device import LaneMemory, Report, StartedStep
from batchengine.lanes.host_device import (
    HostDevice,
    HostOutput,
    addresses_of,
    facts_of,
    late_masks,
    load_model,
    logits_max,
    recorded,
    sample_specs,
    sampled,
    scored,
    without,
)
from batchengine.lanes.host_memory import BatchRows, HostMemory
from batchengine.lanes.late_rows import LateRows
from batchengine.lanes.page_cache import BoolArray, PageCache
from batchengine.lanes.step_input import (
    SLOT_MASK,
    I32Array,
    StepInput,
    StepOutput,
    U64Array,
    takers_of,
    written_slots,
)
from batchengine.model import CpuOps, Model, Ops, Stepper, nonfinite_entries
from batchengine.weights import Weights
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from kernels.cuda.compile import CompileError, cubins
from kernels.cuda.driver import STAGING_BYTES, CudaGpu
from kernels.cuda.gpu import Gpu, GpuFault, Mark
from kernels.cuda.graphs import Graphs
from kernels.cuda.memory import BadRows, Batch, KvRows, Rows
from kernels.cuda.ops import NOTHING_TAKEN, BegunSample, CudaOps, Taken
from kv_store.layout import PageLayout

log = logging.getLogger("batchengine.worker")

TEST_TOKENS = 17  # of the self-test: one more than the kernels for few tokens take
SCRATCH_SHARE = 16  # of the memory: for the buffers of a step that grow with it

NO_DIGESTS = np.zeros(0, np.uint64)
# Of expected pages, copied beside one step: those of two steps find staging memory.
ASIDE_BYTES = STAGING_BYTES // 2
IDLE_BYTES = 1 << 30  # of expected pages, copied by a frame without a step
GRAPHS_MAX = 64  # shapes of steps
LATE_ENTRIES_MIN = 9  # of a step of decodes whose rows are not stored one by one

CUBINS_DIR = "cuda"  # in the folder of packed weights

OpenGpu = Callable[[wire.CudaResources, Path, Callable[[], None]], Gpu]


def open_gpu(
    resources: wire.CudaResources, cache_dir: Path, compiling: Callable[[], None] = lambda: None
) -> Gpu:
    """The GPU of a lane, with its kernels from `cache_dir`, or compiled into it, which may take
    longer than a load may be silent: `compiling` is called meanwhile. Raises GPU_UNUSABLE."""
    try:
        return CudaGpu(
            resources.index,
            lambda target: cubins(target, cache_dir / CUBINS_DIR, waiting=compiling),
            resources.multiprocessors_max,
        )
    except (GpuFault, CompileError, OSError) as error:
        raise errors.GPU_UNUSABLE(index=resources.index, why=str(error)) from error
    except MemoryError as error:
        why = f"no memory is left on it: {error}"
        raise errors.GPU_UNUSABLE(index=resources.index, why=why) from error


class DeviceMemory(HostMemory):
    """Host memory whose changes make copies of its pages invalid. `late`: rows on their way."""

    def __init__(
        self, attach: wire.Attach, layout: PageLayout, cache: PageCache, pool: kernels.Pool
    ) -> None:
        super().__init__(attach, layout)
        self._cache = cache
        shape = kernels.PageShape(layout.n_layer, layout.n_kv_head, layout.head_dim)
        self.late = LateRows(pool, shape, self._address, self.record_places)

    def _address(self, slot: int) -> int:
        return int(self.addresses(np.array([ARENA_BIT | slot], np.uint64))[0])

    def prepare(self, step: wire.Step, imported: Sequence[I32Array]) -> tuple[int, ...]:
        """Do the chores before the computation; see LaneMemory."""
        changed = [
            *step.poison,
            *(slot.slot for slot in step.reserve),
            *(rows.to.slot for rows in step.import_rows),
        ]
        self.late.drop(changed)
        self.late.flush([rows.slot for rows in step.relabel])
        sources = [rows.source for rows in step.import_rows]
        own = [
            of for of in sources if isinstance(of, wire.FromArena) and of.arena == self.arena_name
        ]
        self.late.flush([source.slot for source in own])
        counts = super().prepare(step, imported)
        self._cache.forget([ARENA_BIT | slot for slot in changed])
        self._cache.forget(step.freed)
        if not step.entries:
            self._cache.copy_expected(IDLE_BYTES)
        return counts

    def touch(self, codes: Sequence[int]) -> list[int]:
        """Fault sealed pages in, and expect them on the GPU; store the rows of open ones that are
        on their way. See HostMemory."""
        self.late.flush([code & SLOT_MASK for code in codes if code >= ARENA_BIT])
        readable = super().touch(codes)
        if readable:
            self._cache.expect(readable, self.addresses(np.array(readable, np.uint64)))
        return readable

    def finish(self, step: wire.Step) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
        """Do the chores after the computation; see LaneMemory."""
        self.late.flush([of.slot for of in step.digest])
        self._cache.forget([ARENA_BIT | of.slot for of in step.digest if of.rows < PAGE_TOKENS])
        return super().finish(step)


def check_gpus(indices: Sequence[int]) -> None:
    """Raise GPU_REQUIRED unless one of these GPUs answers. Compiles and computes nothing."""
    failures: list[str] = []
    for index in indices:
        try:
            CudaGpu(index, lambda _: {})
        except (GpuFault, MemoryError) as error:
            failures.append(f"GPU {index}: {error}")
        else:
            return
    raise errors.GPU_REQUIRED(why="; ".join(failures))


class CudaDevice(HostDevice):
    """A whole model on a GPU. The CPU hashes the rows that come back."""

    overlaps = True

    def __init__(self, open_gpu: OpenGpu = open_gpu) -> None:
        super().__init__()
        self._open_gpu = open_gpu
        self._pool: kernels.Pool | None = None
        self._steps: GpuSteps | None = None
        self._cache: PageCache | None = None
        self._on_host: kernels.Batch | None = None
        self._late_memory: DeviceMemory | None = None  # is `memory`

    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts:
        """Copy the weights to the GPU, and compare what it computes with the CPU."""
        resources = load.device
        if not isinstance(resources, wire.CudaResources):
            raise RuntimeError("a GPU lane is loaded with the resources of another device")
        started = time.perf_counter()
        pool = self._pool = kernels.Pool(resources.threads, resources.cores, resources.spin_us)
        model = load_model(load, pool, report, 0.6)

        def compiling() -> None:
            report("compile kernels", "", 0.6, time.perf_counter() - started)

        gpu = self._open_gpu(resources, Path(load.cache_dir), compiling)
        context_pages = -(-load.context_tokens // PAGE_TOKENS)
        pages_max = load.entries_max * (context_pages + 1)
        limits = load.tokens_max, load.entries_max, pages_max

        def uploaded(share: float) -> None:
            report("upload weights", "", 0.6 + 0.3 * share, time.perf_counter() - started)

        def testing() -> None:
            report("compare with the CPU", "", 0.9, time.perf_counter() - started)

        try:
            ops = CudaOps(gpu, pool)
            upload_weights(ops, model.weights, uploaded)
            ops.upload_rope(model.rope, load.context_tokens)
            _self_test(ops, gpu, model, pool, testing)
            self._steps = GpuSteps(gpu, ops, _stepper(ops, model, *limits))
        except MemoryError:
            why = f"the weights and buffers need more than its {resources.vram_bytes >> 20} MiB"
            raise errors.GPU_UNUSABLE(index=resources.index, why=why) from None
        payload_bytes = model.shape.payload_bytes
        room = resources.vram_bytes * (SCRATCH_SHARE - 1) // SCRATCH_SHARE - gpu.used
        if room < context_pages * payload_bytes:
            why = f"{max(0, room) >> 20} MiB are left for KV, and one context has {context_pages}"
            why += f" pages of {payload_bytes >> 10} KiB"
            raise errors.GPU_UNUSABLE(index=resources.index, why=why)
        self._cache = PageCache(gpu, payload_bytes, room // payload_bytes)
        self._on_host = kernels.Batch(*limits)
        detail = f"self-test ok, room for {self._cache.pages_max} pages"
        report("gpu kernels", detail, 0.95, time.perf_counter() - started)
        gpu_facts = wire.GpuFacts(gpu.facts.name, gpu.facts.multiprocessors, gpu.facts.memory_bytes)
        facts = facts_of(model, pool, f"cuda {resources.index}")
        return msgspec.structs.replace(facts, gpu=gpu_facts)

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena of this worker."""
        if self._cache is None or self._pool is None:
            raise RuntimeError("attach before load")
        self.memory = self._late_memory = DeviceMemory(attach, layout, self._cache, self._pool)
        return self.memory

    def start(self, batch: StepInput, after: StartedStep | None = None) -> StartedStep:
        """Start a step on the GPU, if it fits there at once; see Device."""
        if self.memory is None or self._cache is None:
            raise RuntimeError("start before attach")
        taken = after.rows_of(batch) if isinstance(after, GpuStep) else NOTHING_TAKEN
        if len(batch.codes) <= self._cache.pages_max:
            addresses, rows = addresses_of(self.memory, batch), self.memory.rows_of(batch)
            with contextlib.suppress(MemoryError):
                launched = self.launch(batch, addresses, taken)
                waits = any(entry.masked for entry in batch.entries)
                sampling = None if waits else self.begin_sample(batch, launched)
                return GpuStep(self, batch, addresses, rows, launched, sampling)
        return super().start(batch)

    def run(self, batch: StepInput) -> StepOutput:
        """Compute a step, in parts if the pages of all its entries do not fit in the memory."""
        if self._cache is None:
            raise RuntimeError("run before load")
        while True:
            try:
                return self._run_parts(batch, self._cache.pages_max)
            except MemoryError as error:
                if not self._cache.shrink():
                    raise GpuFault(f"out of memory: {error}") from error
                log.warning("no memory on the GPU: it holds %d pages now", self._cache.pages_max)

    def _run_parts(self, batch: StepInput, pages_max: int) -> StepOutput:
        rows: list[wire.SampledRow] = []
        nonfinite: list[int] = []
        unmasked: list[int] = []
        scores: list[wire.ScoredRows] = []
        for first, part in parts_of(batch, pages_max):
            output = super().run(part)
            rows += output.rows
            nonfinite += [first + index for index in output.nonfinite]
            unmasked += [first + index for index in output.unmasked]
            scores += output.scores
        return StepOutput(
            tuple(rows), tuple(nonfinite), unmasked=tuple(unmasked), scores=tuple(scores)
        )

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> HostOutput:
        """Run one forward pass on the GPU, and copy its rows to the pages of the host."""
        launched = self.launch(batch, addresses)
        output = self.choose(batch, launched, self.begin_sample(batch, launched))
        output.row_digests = self.store(batch, addresses, seeds, launched.rows)
        return output

    def launch(
        self, batch: StepInput, addresses: U64Array, taken: Taken = NOTHING_TAKEN
    ) -> Launched:
        """Begin one forward pass. taken: the entries that take samples of the step before, which
        may be under way, and of which row of it. Raises MemoryError."""
        steps, cache, memory = self._steps, self._cache, self._late_memory
        if steps is None or cache is None or memory is None:
            raise RuntimeError("launch before attach")
        wanting = [i for i, entry in enumerate(batch.entries) if entry.sampling is not None]
        ends = np.cumsum(batch.shape[:, 0], dtype=np.int32)
        wanted = (ends - np.int32(1))[wanting]
        if len(memory.late):  # the GPU gets pages as they are on the host
            slots = np.array(written_slots(batch), np.uint64)
            lacking = cache.lacking(slots | np.uint64(ARENA_BIT))
            memory.late.flush([code & SLOT_MASK for code in lacking])
        pages = cache.addresses(batch.codes, addresses, unwritten(batch.shape))
        tokens = {int(ends[entry]) - 1: row for entry, row in taken.items()}
        bad_rows, rows = steps.begin(batch.tokens, batch.shape, pages, wanted, tokens)
        cache.copy_expected(ASIDE_BYTES, batch.codes.tolist())
        histories = {row: taken[entry] for row, entry in enumerate(wanting) if entry in taken}
        return Launched(wanting, wanted, ends, bad_rows, rows, histories)

    def begin_sample(self, batch: StepInput, launched: Launched) -> GpuSampling:
        """Have the GPU sample, once the masks are here. Raises MemoryError."""
        if self._steps is None:
            raise RuntimeError("begin_sample before load")
        masks = batch.masks(batch.entries)
        begun = self._steps.sample(sample_specs(batch, masks), launched.histories)
        return GpuSampling(late_masks(batch, masks), begun, self._steps.gpu.mark())

    def choose(self, batch: StepInput, launched: Launched, sampling: GpuSampling) -> HostOutput:
        """Wait for what was sampled; everything of the step is on the host then. The output has no
        digests yet. Raises MemoryError if there are scores."""
        if self._steps is None:
            raise RuntimeError("choose before load")
        sampling.end.wait()
        choices, late = sampling.begun.chosen(), sampling.late
        nonfinite = nonfinite_entries(launched.ends, launched.wanted, launched.bad_rows)
        chosen, nonfinite = sampled(batch, launched.wanting, choices, nonfinite)
        unmasked = [index for index in late if index not in nonfinite]
        scores, bad = scored(self._steps.stepper, batch, [*nonfinite, *unmasked])
        chosen, nonfinite = without(chosen, batch, [*unmasked, *bad]), sorted([*nonfinite, *bad])
        return HostOutput(
            tuple(chosen), tuple(nonfinite), NO_DIGESTS, unmasked=tuple(unmasked), scores=scores
        )

    def store(
        self, batch: StepInput, addresses: U64Array, seeds: U64Array, rows: kernels.KvRows
    ) -> U64Array:
        """Copy rows that are on the host to their pages; returns their digests."""
        pool, on_host, memory = self._pool, self._on_host, self._late_memory
        if pool is None or on_host is None or memory is None:
            raise RuntimeError("store before attach")
        if len(memory.late):
            memory.late.flush(written_slots(batch))
        on_host.set(batch.tokens, batch.shape, addresses)
        kernels.store_rows(pool, rows, on_host)
        return kernels.step_digests(pool, rows, seeds)

    def finish(
        self,
        batch: StepInput,
        addresses: U64Array,
        at: BatchRows,
        rows: kernels.KvRows,
        output: HostOutput,
    ) -> StepOutput:
        """Store and record the rows of a step, or let those of decodes of many sessions wait."""
        pool, memory = self._pool, self._late_memory
        if pool is None or memory is None:
            raise RuntimeError("finish before attach")
        counts = batch.shape[:, 0]
        firsts, unusable = np.cumsum(counts) - counts, {*output.unusable, *batch.untaken}
        decodes = [i for i in np.flatnonzero(counts == 1).tolist() if i not in unusable]
        if len(decodes) < LATE_ENTRIES_MIN:
            output.row_digests = self.store(batch, addresses, at.seeds, rows)
            return recorded(memory, batch, at, output)
        digests = kernels.step_digests(pool, rows, at.seeds)
        wait, view = firsts[decodes], rows.view(len(digests))
        memory.late.add(
            at.slots[wait].tolist(),
            at.rows[wait].tolist(),
            view if len(wait) == len(view) else view[wait],
            batch.tokens[wait].tolist(),
            digests[wait],
        )
        self._store_chunks(batch, addresses, at, rows, digests, unusable)
        return output.of_step()

    def _store_chunks(
        self,
        batch: StepInput,
        addresses: U64Array,
        at: BatchRows,
        rows: kernels.KvRows,
        digests: U64Array,
        unusable: set[int],
    ) -> None:
        """Store and record the rows of entries of several tokens."""
        pool, memory, on_host = self._pool, self._late_memory, self._on_host
        if pool is None or memory is None or on_host is None:
            raise RuntimeError("store before attach")
        first = first_page = 0
        for index, (n, start, n_pages) in enumerate(batch.shape.tolist()):
            part, pages = slice(first, first + n), slice(first_page, first_page + n_pages)
            if n > 1 and index not in unusable:
                memory.late.flush(np.unique(at.slots[part]).tolist())
                entry = np.array([[n, start, n_pages]], np.int32)
                on_host.set(batch.tokens[part], entry, addresses[pages])
                kernels.store_rows(pool, rows, on_host, first)
                memory.record_places(
                    at.slots[part], at.rows[part], batch.tokens[part], digests[part]
                )
            first, first_page = first + n, first_page + n_pages

    def do_deferred(self) -> bool:
        """Store the rows of one page that are on their way."""
        return self._late_memory is not None and self._late_memory.late.flush_one()

    def close(self) -> None:
        """Store all rows, and end the pool's threads."""
        if self._late_memory is not None:
            self._late_memory.late.flush()
        if self._pool is not None:
            self._pool.close()


class Launched(NamedTuple):
    """A step that the GPU computes: which of its entries want a token, and the rows of the step
    with their logits; the row behind each entry; the rows that are not finite, and the page rows,
    once it has ended. histories: which of those that want a token have a history that ends with a
    sample of the step before, and of which row of it."""

    wanting: list[int]
    wanted: I32Array
    ends: I32Array
    bad_rows: list[BadRows]
    rows: kernels.KvRows
    histories: Taken


class GpuSampling(NamedTuple):
    """What a GPU samples; the entries whose mask is late; the point at which it has ended."""

    late: tuple[int, ...]
    begun: BegunSample
    end: Mark


class GpuStep:
    """A step that a GPU has been given as a whole. Once it samples, the GPU may be given the next
    step, which takes the samples there; unless it scores, which is done with what the step left."""

    def __init__(
        self,
        device: CudaDevice,
        batch: StepInput,
        addresses: U64Array,
        rows: BatchRows,
        launched: Launched,
        sampling: GpuSampling | None,
    ) -> None:
        """sampling: None if masks lack for it."""
        self._device, self._batch = device, batch
        self._addresses, self._rows, self._launched = addresses, rows, launched
        self._sampling = sampling
        self._output: HostOutput | None = None
        self._again: StepOutput | None = None  # of a step that was computed again

    @property
    def may_be_followed(self) -> bool:
        return self._sampling is not None and not any(len(of) for of in self._batch.scored)

    @property
    def is_computed(self) -> bool:
        return self._sampling is None or self._sampling.end.is_passed

    def rows_of(self, batch: StepInput) -> dict[int, int]:
        """For each entry of the next step that takes a sample of this one: the row it is of."""
        wanting = self._launched.wanting
        rows = {self._batch.entries[index].session: row for row, index in enumerate(wanting)}
        takers = [(i, rows.get(batch.entries[i].session)) for i in takers_of(batch)]
        return {index: row for index, row in takers if row is not None}

    def sample(self) -> None:
        """See StartedStep. A step that gets no memory is computed again."""
        if self._sampling is None and self._again is None:
            try:
                self._sampling = self._device.begin_sample(self._batch, self._launched)
            except MemoryError:
                self._again = self._device.run(self._batch)

    def tokens(self) -> dict[int, int]:
        """Wait for the GPU; see StartedStep. A step that gets no memory is computed again."""
        self.sample()
        rows: tuple[wire.SampledRow, ...] = ()
        if self._sampling is not None:
            try:
                self._output = self._device.choose(self._batch, self._launched, self._sampling)
                rows = self._output.rows
            except MemoryError:
                self._again = self._device.run(self._batch)
        if self._again is not None:
            rows = self._again.rows
        return {row.session: row.token for row in rows}

    def finish(self) -> StepOutput:
        """Copy the rows to the pages of the host, and record them."""
        if self._again is not None:
            return self._again
        if self._output is None:
            raise RuntimeError("finish before tokens")
        return self._device.finish(
            self._batch, self._addresses, self._rows, self._launched.rows, self._output
        )


class GpuSteps:
    """Steps of one model on one GPU; those of one token of each entry are replayed from the third
    one of a shape on."""

    def __init__(self, gpu: Gpu, ops: CudaOps, stepper: Stepper) -> None:
        self.gpu, self.stepper = gpu, stepper
        self._rows = cast(KvRows, stepper.rows)
        self._ops = ops
        self._batch = cast(Batch, stepper.batch)
        self.graphs = Graphs[list[BadRows]](gpu, GRAPHS_MAX)

    def begin(
        self,
        tokens: I32Array,
        entries: I32Array,
        pages: U64Array,
        wanted: I32Array,
        taken: Taken = NOTHING_TAKEN,
    ) -> tuple[list[BadRows], kernels.KvRows]:
        """Set a step, and begin it, the logits of `wanted` and the copies of what goes back;
        returns what Stepper.start does, and the page rows, which are there after the next wait for
        the GPU and stay until the step after the next one begins. taken: tokens that were sampled
        last."""
        stepper = self.stepper

        def launch() -> list[BadRows]:
            bad_rows = stepper.start(wanted)
            if len(wanted):
                stepper.logits(len(wanted))
            return cast(list[BadRows], bad_rows)

        stepper.set(tokens, entries, pages)
        self._ops.stage(self._batch, tokens, wanted, taken)
        if len(tokens) > len(entries):
            bad_rows = launch()
        else:
            key = len(tokens), len(wanted), self._batch.launches
            bad_rows = self.graphs.run(key, launch)
        fetched = self._rows.fetch(len(tokens))
        return [rows.fetch() for rows in bad_rows], fetched

    def sample(self, specs: Sequence[kernels.SampleSpec], taken: Taken) -> BegunSample:
        """Begin to sample from the logits of `wanted`. taken: see CudaOps.begin_sample."""
        return self._ops.begin_sample(cast(Rows, self.stepper.logits_rows), specs, taken)


def unwritten(shape: I32Array) -> BoolArray:
    """Whether each page of a step has no row before those that the step writes."""
    starts, pages = shape[:, 1], shape[:, 2]
    index = np.arange(int(pages.sum())) - np.repeat(np.cumsum(pages) - pages, pages)
    return index * PAGE_TOKENS >= np.repeat(starts, pages)


def parts_of(batch: StepInput, pages_max: int) -> Iterator[tuple[int, StepInput]]:
    """The step as steps of up to `pages_max` different pages, or of one entry; and where each
    begins."""
    counts, pages = batch.shape[:, 0], batch.shape[:, 2]
    if len(batch.codes) <= pages_max:
        yield 0, batch
        return
    first_token, first_page = np.cumsum(counts) - counts, np.cumsum(pages) - pages
    first, held = 0, set[int]()
    for index in range(len(batch.entries) + 1):
        if index < len(batch.entries):
            at = first_page[index]
            own = set(batch.codes[at : at + pages[index]].tolist())
            if index == first or len(held | own) <= pages_max:
                held |= own
                continue
        else:
            own = set[int]()
        token, page = first_token[first], first_page[first]
        end_token, end_page = token + counts[first:index].sum(), page + pages[first:index].sum()
        yield (
            first,
            replace(
                batch,
                entries=batch.entries[first:index],
                shape=batch.shape[first:index],
                tokens=batch.tokens[token:end_token],
                codes=batch.codes[page:end_page],
                histories=batch.histories[first:index],
                scored=batch.scored[first:index],
                untaken=tuple([i - first for i in batch.untaken if first <= i < index]),
            ),
        )
        first, held = index, own


def _stepper(ops: Any, model: Model, tokens: int, entries: int, pages: int) -> Stepper:
    return Stepper(
        cast(Ops, ops),
        model,
        tokens_max=tokens,
        entries_max=entries,
        pages_max=pages,
        logits_max=logits_max(entries),
    )


def upload_weights(
    ops: CudaOps, weights: Weights, progress: Callable[[float], None] = lambda _: None
) -> None:
    """Copy the weights of a model to the GPU; `progress` is 0 to 1. Raises MemoryError."""
    for layer in weights.layer.values():
        ops.upload(*layer.mixer.qkv)
        ops.upload(*[bias for bias in layer.mixer.qkv_bias if bias is not None])
    tensors = weights.tensors()
    for index, tensor in enumerate(tensors):
        ops.upload(tensor)
        progress(index / len(tensors))


def _self_test(
    ops: CudaOps, gpu: Gpu, model: Model, pool: kernels.Pool, testing: Callable[[], None]
) -> None:
    """Raise GPU_DISAGREES unless the GPU gives the bits of the CPU for small steps, of which the
    last ones are a captured one and its replay. `testing` is called before each: a step of a large
    model takes the CPU long."""
    page = gpu.allocate(model.shape.payload_bytes)
    gpu.copy_in(page, np.zeros(model.shape.payload_bytes, np.uint8))
    on_host = mmap.mmap(-1, model.shape.payload_bytes)
    on_gpu = GpuSteps(gpu, ops, _stepper(ops, model, TEST_TOKENS, 1, 1))
    on_cpu = _stepper(CpuOps(pool), model, TEST_TOKENS, 1, 1)
    rng = np.random.default_rng(1)
    start = 0
    for n in (TEST_TOKENS, 1, 1, 1):
        testing()
        tokens = rng.integers(0, model.spec.n_vocab, n).astype(np.int32)
        seeds, entry = np.arange(n, dtype=np.uint64), np.array([[n, start, 1]], np.int32)
        last = np.array([n - 1], np.int32)
        on_gpu.begin(tokens, entry, np.array([page], np.uint64), last)
        on_cpu.set(tokens, entry, np.array([kernels.address_of(on_host)], np.uint64))
        on_cpu.run(last)
        got = ops.read_rows(cast(Rows, on_gpu.stepper.logits_rows), 1)
        same = got.tobytes() == on_cpu.logits(1).view(1).tobytes()
        digests = on_gpu.stepper.row_digests(seeds)
        if not (same and np.array_equal(digests, on_cpu.row_digests(seeds))):
            raise errors.GPU_DISAGREES(tokens=n)
        start += n
    on_gpu.graphs.clear()
    gpu.free(page)
