"""The device of a GPU lane: it opens the GPU, uploads the model and compares both processors."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

import kernels
from batchengine import errors
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.device import LaneMemory, Report, StartedStep
from batchengine.lanes.gpu.kv_room import KvRoom, bytes_min, divide
from batchengine.lanes.gpu.lane import GpuLane, LoadedGpu
from batchengine.lanes.gpu.memory import DeviceMemory
from batchengine.lanes.gpu.page_cache import PageCache, PageCopies
from batchengine.lanes.gpu.states import DeviceStates
from batchengine.lanes.gpu.step import GpuSteps
from batchengine.lanes.host_device import facts_of, load_model
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.state_memory import NoStates, StateSlots, states_at_rest, states_of_seats
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.model import CpuOps, Model, Ops, Stepper
from batchengine.weights import Weights
from batchengine.weights.roles import AttentionRoles
from batchengine.wire import lane as wire
from kernels.cuda.compile import CompileError, cubins, units
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import Gpu, GpuFault
from kernels.cuda.memory import Rows
from kernels.cuda.ops import CudaOps
from kernels.cuda.page_parts import LayerPart, PageParts
from kv_store.layout import PageLayout

TEST_TOKENS = 17  # of the self-test: one more than the kernels for few tokens take
SCRATCH_SHARE = 16  # of the memory: for the buffers of a step that grow with it

CUBINS_DIR = "cuda"  # in the folder of packed weights

# By the lane's resources, the folder of packed weights, and the kinds of the model's matrices; the
# last one is called while kernels are compiled.
OpenGpu = Callable[[wire.CudaResources, Path, Collection[str], Callable[[], None]], Gpu]


def open_gpu(
    resources: wire.CudaResources,
    cache_dir: Path,
    kinds: Collection[str],
    compiling: Callable[[], None] = lambda: None,
) -> Gpu:
    """The GPU of a lane, with the kernels for matrices of `kinds`. Raises GPU_UNUSABLE.

    They are in `cache_dir`, or compiled into it, which may take longer than a load may be silent:
    `compiling` is called meanwhile.
    """

    def made(target: str) -> dict[str, bytes]:
        return cubins(target, cache_dir / CUBINS_DIR, units(kinds), compiling)

    try:
        return CudaGpu(resources.index, made, resources.multiprocessors_max)
    except (GpuFault, CompileError, OSError) as error:
        raise errors.GPU_UNUSABLE(index=resources.index, why=str(error)) from error
    except MemoryError as error:
        why = f"no memory is left on it: {error}"
        raise errors.GPU_UNUSABLE(index=resources.index, why=why) from error


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


class CudaDevice:
    """A `Device` that computes on a GPU. The CPU hashes and stores the rows that come back."""

    overlaps = True

    def __init__(self, open_gpu: OpenGpu = open_gpu) -> None:
        self._open_gpu = open_gpu
        self._pool: kernels.Pool | None = None
        self.gpu: LoadedGpu | None = None
        self.lane: GpuLane | None = None
        self.memory: DeviceMemory | None = None

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

        kinds = {x.kind for x in model.weights.tensors() if isinstance(x, kernels.Matrix)}
        gpu = self._open_gpu(resources, Path(load.cache_dir), kinds, compiling)
        gpu.bytes_max = resources.vram_bytes
        context_pages = -(-load.context_tokens // PAGE_TOKENS)
        pages_max = load.entries_max * (context_pages + 1)
        limits = load.tokens_max, load.entries_max, pages_max

        def uploaded(share: float) -> None:
            report("upload weights", "", 0.6 + 0.3 * share, time.perf_counter() - started)

        def testing() -> None:
            report("compare with the CPU", "", 0.9, time.perf_counter() - started)

        try:
            parts = PageParts(model.shape, model.windows, load.context_tokens)
            ops = CudaOps(gpu, pool, parts)
            upload_weights(ops, model.weights, uploaded)
            for table in model.ropes.values():
                ops.upload_rope(table, load.context_tokens)
            steps = GpuSteps(gpu, ops, _stepper(ops, model, *limits))
            _self_test(steps, ops, parts.parts, pool, min(TEST_TOKENS, load.tokens_max), testing)
        except MemoryError as error:
            why = f"no memory for weights and buffers, {gpu.used >> 20} MiB are taken"
            why += f" of the lane's {resources.vram_bytes >> 20}: {error}"
            raise errors.GPU_UNUSABLE(index=resources.index, why=why) from None
        room = resources.vram_bytes * (SCRATCH_SHARE - 1) // SCRATCH_SHARE - gpu.used
        left, states_bytes, states = room, 0, ""
        if (shape := model.states) is not None:
            state_bytes = gpu.taken_by(shape.image_bytes)
            n_states = states_of_seats(load.entries_max, load.steps_in_flight)
            n_states += states_at_rest(load.entries_max, resources.vram_bytes, shape.image_bytes)
            states_bytes = n_states * state_bytes
            states = f"; with entries_max {load.entries_max} there are {n_states} states"
            states += f" of {state_bytes >> 10} KiB, with a smaller one fewer"
        of_pages = KvRoom(room - states_bytes, context_pages, load.tokens_max, load.entries_max)
        needed = bytes_min(parts.parts, of_pages, gpu.taken_by)
        if of_pages.n_bytes < needed:
            why = f"{max(0, left) >> 20} MiB are left for KV, and the {context_pages} pages of one"
            why += f" context take {needed >> 20}{states}"
            raise errors.GPU_UNUSABLE(index=resources.index, why=why)
        counts = divide(parts.parts, of_pages, gpu.taken_by)
        copies = PageCopies(
            [
                PageCache(gpu, part, n, of_pages.pages_min(part))
                for part, n in zip(parts.parts, counts, strict=True)
            ]
        )
        self.gpu = LoadedGpu(pool, steps, copies, kernels.Batch(*limits))
        detail = f"self-test ok, room for {copies}"
        report("gpu kernels", detail, 0.95, time.perf_counter() - started)
        gpu_facts = wire.GpuFacts(gpu.facts.name, gpu.facts.multiprocessors, gpu.facts.memory_bytes)
        facts = facts_of(model, pool, f"cuda {resources.index}")
        return msgspec.structs.replace(facts, gpu=gpu_facts)

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena of this worker."""
        if self.gpu is None:
            raise RuntimeError("attach before load")
        states: StateSlots = NoStates()
        if attach.state_bytes:
            states = DeviceStates(
                self.gpu.steps.gpu,
                attach.state_slots,
                attach.state_bytes,
                attach.states_dir,
                self.gpu.pages.shrink,
            )
        self.memory = DeviceMemory(attach, layout, self.gpu.pages, self.gpu.pool, states)
        self.lane = GpuLane(self.gpu, self.memory)
        return self.memory

    def connect(self, links: DataLinks) -> Ring:
        """A GPU lane is given no links."""
        raise RuntimeError("this device attends to no page of a peer")

    def start(self, batch: StepInput, after: StartedStep | None = None) -> StartedStep:
        """Start a step; see Device."""
        if self.lane is None:
            raise RuntimeError("start before attach")
        return self.lane.start(batch, after)

    def do_deferred(self) -> bool:
        """Store the rows of one page that are on their way."""
        return self.memory is not None and self.memory.late.flush_one()

    def close(self) -> None:
        """Store all rows, and end the pool's threads."""
        if self.memory is not None:
            self.memory.late.flush()
        if self._pool is not None:
            self._pool.close()


def _stepper(ops: Any, model: Model, tokens: int, entries: int, pages: int) -> Stepper:
    return Stepper(
        cast(Ops, ops),
        model,
        tokens_max=tokens,
        entries_max=entries,
        pages_max=pages,
        logits_max=wire.logits_rows_max(entries),
    )


def upload_weights(
    ops: CudaOps, weights: Weights, progress: Callable[[float], None] = lambda _: None
) -> None:
    """Copy the weights of a model to the GPU; `progress` is 0 to 1. Raises MemoryError."""
    for layer in weights.layer.values():
        ops.upload(*layer.mixer.readers)
        if isinstance(layer.mixer, AttentionRoles):
            ops.upload(*[bias for bias in layer.mixer.qkv_bias if bias is not None])
    tensors = weights.tensors()
    for index, tensor in enumerate(tensors):
        ops.upload(tensor)
        progress(index / len(tensors))


class SelfTestStates:
    """The recurrent state of the self-test, on the GPU and on the CPU."""

    def __init__(self, gpu: Gpu, n_bytes: int) -> None:
        """Raises MemoryError."""
        self._gpu = gpu
        self._on_gpu = [gpu.allocate(n_bytes) for _ in range(2)]
        self._on_cpu = [mmap.mmap(-1, n_bytes) for _ in range(2)]
        self._n_bytes, self._steps = n_bytes, 0

    def next(self) -> tuple[U64Array, U64Array]:
        """What the next step reads and writes there and here: 0 and an address, then two."""
        self._steps += 1
        both: list[U64Array] = []
        for images in (self._on_gpu, [kernels.address_of(image) for image in self._on_cpu]):
            pair = [images[(self._steps - i) % 2] if self._steps > i else 0 for i in (1, 0)]
            both.append(np.array([pair], np.uint64))
        return both[0], both[1]

    def are_equal(self) -> bool:
        """Whether both processors have written the same state."""
        got = np.empty(self._n_bytes, np.uint8)
        self._gpu.copy_out(self._on_gpu[self._steps % 2], got)
        return got.tobytes() == self._on_cpu[self._steps % 2][:]

    def free(self) -> None:
        """End the allocations of the GPU."""
        for address in self._on_gpu:
            self._gpu.free(address)


def _self_test(
    on_gpu: GpuSteps,
    ops: CudaOps,
    parts: Sequence[LayerPart],
    pool: kernels.Pool,
    most: int,
    testing: Callable[[], None],
) -> None:
    """Raise GPU_DISAGREES unless the GPU gives the bits of the CPU for small steps, the largest of
    `most` tokens, of which the last ones are a captured one and its replay. `testing` is called
    before each: a step of a large model takes the CPU long. Raises MemoryError."""
    gpu, model = on_gpu.gpu, on_gpu.stepper.model
    pages = [gpu.allocate(part.n_bytes) for part in parts]
    for page, part in zip(pages, parts, strict=True):
        gpu.copy_in(page, np.zeros(part.n_bytes, np.uint8))
    states = None if model.states is None else SelfTestStates(gpu, model.states.image_bytes)
    on_host = mmap.mmap(-1, model.shape.payload_bytes)
    on_cpu = _stepper(CpuOps(pool), model, most, 1, 1)
    rng = np.random.default_rng(1)
    start = 0
    for n in (most, 1, 1, 1):
        testing()
        tokens = rng.integers(0, model.spec.n_vocab, n).astype(np.int32)
        seeds, entry = np.arange(n, dtype=np.uint64), np.array([[n, start, 1]], np.int32)
        last = np.array([n - 1], np.int32)
        of_gpu, of_cpu = (None, None) if states is None else states.next()
        of_step = np.array(pages, np.uint64).reshape(-1, 1)
        on_gpu.begin(tokens, entry, of_step, last, states=of_gpu)
        at = np.array([kernels.address_of(on_host)], np.uint64)
        on_cpu.set(tokens, entry, at, states=of_cpu)
        on_cpu.run(last)
        got = ops.read_rows(cast(Rows, on_gpu.stepper.logits_rows), 1)
        same = got.tobytes() == on_cpu.logits(1).view(1).tobytes()
        digests = on_gpu.stepper.row_digests(seeds)
        same = same and np.array_equal(digests, on_cpu.row_digests(seeds))
        if not same or (states is not None and not states.are_equal()):
            raise errors.GPU_DISAGREES(tokens=n)
        start += n
    on_gpu.graphs.clear()
    for page in pages:
        gpu.free(page)
    if states is not None:
        states.free()
