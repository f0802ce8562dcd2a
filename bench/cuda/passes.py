"""Whole forward passes on a GPU: decoding by batch, and prefill by length.

A step is what a lane does for one: tokens and pages set, the layers, logits, sampling, the new rows
hashed and stored on the host, those of decodes of many entries by tiles. As in a lane, the GPU has
the next step before the host waits for the one before, whose samples a decode takes. `on the
device` are the launches alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.lanes.gpu.device import upload_weights
from batchengine.lanes.gpu.lane import LATE_ENTRIES_MIN
from batchengine.lanes.gpu.late_rows import LateRows
from batchengine.lanes.gpu.step import GpuSteps
from batchengine.model import CpuOps, Ops, Stepper
from bench.cuda.cases import random_page
from bench.cuda.gpus import seconds
from bench.cuda.weights import expert_bytes, random_model, streamed_bytes, token_parameters
from bench.models.synthetic import Shape
from bench.models.tensors import aligned
from kernels.cuda.driver import CudaGpu
from kernels.cuda.experts import ExpertPairs
from kernels.cuda.gpu import Gpu, Mark
from kernels.cuda.memory import BadRows, Batch
from kernels.cuda.ops import NOTHING_TAKEN, BegunSample, CudaOps

Row = dict[str, float | str]


class Begun(NamedTuple):
    """A step that the GPU was given."""

    entries: NDArray[np.int32]
    bad_rows: list[BadRows]
    rows: kernels.KvRows
    begun: BegunSample
    end: Mark


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. chunk: tokens of a step of a prefill; context: tokens before a decode."""

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    context: int
    chunk: int
    steps: int


REAL = Sizes((1, 2, 4, 8, 16, 32, 64, 128), (512, 2048, 8192, 32768), 1024, 2048, 12)
TINY = Sizes((2,), (20,), 20, 20, 1)
CHECKED_TOKENS = 17  # of the prompt of the comparison: more than kernels for few tokens take
DRAFTED = 5  # tokens of a draft behind it, of which some are taken back
LENGTH_S_MAX = 40.0  # of a prefill that is expected to take longer, only the expectation is kept
GROWN_TOKENS = 8192  # of the run before a prefill, in which buffers grow
SPARE_BYTES = 2 << 30  # of the device, beside weights and pages


class Passes:
    """One model on one GPU."""

    def __init__(self, gpu: Gpu, pool: kernels.Pool, shape: Shape, sizes: Sizes) -> None:
        self._gpu, self._pool, self._sizes = gpu, pool, sizes
        self._model = model = random_model(shape, pool)
        self._ops: Any = CudaOps(gpu, pool)
        upload_weights(self._ops, model.weights)
        checked = CHECKED_TOKENS + 2 + DRAFTED
        context = max(*sizes.lengths, sizes.context + 2 * sizes.steps, checked)
        for table in model.ropes.values():
            self._ops.upload_rope(table, context + 1)
        self._tokens_max = max(sizes.chunk, *sizes.batches, CHECKED_TOKENS)
        entries_max = max(sizes.batches)
        per_entry = -(-(sizes.context + 2 * sizes.steps) // kernels.PAGE_TOKENS)
        pages_max = max(entries_max * per_entry, -(-context // kernels.PAGE_TOKENS))
        self._limits = {
            "tokens_max": self._tokens_max,
            "entries_max": entries_max,
            "pages_max": pages_max,
        }
        self._stepper = Stepper(cast(Ops, self._ops), model, **self._limits)
        self._steps = GpuSteps(gpu, self._ops, self._stepper)
        self._rng = np.random.default_rng(3)
        self._page = random_page(model.shape, self._rng)
        self._pages: list[int] = []
        self._experts: dict[int, int] = {}  # see _experts_of
        self._on_host = kernels.Batch(self._tokens_max, entries_max, pages_max)
        self._host_pages: list[NDArray[np.uint8]] = []
        self._late = LateRows(self._pool, model.shape, self._host_page, lambda *_: None)
        self._states: list[int] = []  # two for each entry: a step reads one and writes the other
        self._n_begun = 0

    # -- steps

    def _reserve(self, n_pages: int) -> NDArray[np.uint64]:
        """Addresses of pages with random rows. Raises MemoryError."""
        while len(self._pages) < n_pages:
            if isinstance(self._gpu, CudaGpu) and self._gpu.free_bytes() < SPARE_BYTES:
                raise MemoryError(f"{len(self._pages)} of {n_pages} pages fit")
            address = self._gpu.allocate(self._model.shape.payload_bytes)
            self._gpu.copy_in(address, self._page)
            self._pages.append(address)
        return np.array(self._pages[:n_pages], np.uint64)

    def _states_of(self, entries: NDArray[np.int32]) -> NDArray[np.uint64] | None:
        """Where the states of a step's entries are read and written, if the model has some: each
        step reads what the one before has written. Raises MemoryError."""
        if (shape := self._model.states) is None:
            return None
        while len(self._states) < 2 * len(entries):
            if isinstance(self._gpu, CudaGpu) and self._gpu.free_bytes() < SPARE_BYTES:
                raise MemoryError(f"states of {len(self._states) // 2} of {len(entries)} entries")
            self._states.append(self._gpu.allocate(shape.image_bytes))
            self._gpu.copy_in(self._states[-1], np.zeros(shape.image_bytes, np.uint8))
        found = np.array(self._states[: 2 * len(entries)], np.uint64).reshape(-1, 2)
        found = found[:, ::-1].copy() if self._n_begun % 2 else found
        self._n_begun += 1
        found[entries[:, 1] == 0, 0] = 0
        return found

    def _random_tokens(self, n: int) -> NDArray[np.int32]:
        return self._rng.integers(0, self._model.spec.n_vocab, n).astype(np.int32)

    def _begin(
        self, entries: NDArray[np.int32], pages: NDArray[np.uint64], *, is_fed: bool = False
    ) -> Begun:
        """Give the GPU a step. is_fed: its tokens are the samples of the one before."""
        ends = np.cumsum(entries[:, 0], dtype=np.int32)
        tokens, wanted = self._random_tokens(int(ends[-1])), ends - np.int32(1)
        taken = {i: i for i in range(len(ends))} if is_fed else NOTHING_TAKEN
        states = self._states_of(entries)
        bad_rows, rows = self._steps.begin(tokens, entries, pages, wanted, taken, states)
        specs = [kernels.SampleSpec(temperature=0.0) for _ in ends]
        return Begun(
            entries, bad_rows, rows, self._steps.sample(specs, NOTHING_TAKEN), self._gpu.mark()
        )

    def _finish(self, step: Begun) -> float:
        """Wait for a step, and do what is left on the host; returns when the GPU had computed it
        (s). Raises ArithmeticError if a row is not finite."""
        step.end.wait()
        at, n = time.perf_counter(), int(step.entries[:, 0].sum())
        samples, bad = step.begun.chosen(), [index for rows in step.bad_rows for index in rows]
        digests = kernels.step_digests(self._pool, step.rows, np.arange(n, dtype=np.uint64))
        if n == len(step.entries) >= LATE_ENTRIES_MIN:
            places = (step.entries[:, 1] % kernels.PAGE_TOKENS).tolist()
            self._late.add(range(n), places, step.rows.view(n), [0] * n, digests)
        else:
            on_host = self._addresses_on_host(step.entries)
            self._on_host.set(np.zeros(n, np.int32), step.entries, on_host)
            kernels.store_rows(self._pool, step.rows, self._on_host)
        if bad or any(sample.nonfinite for sample in samples):
            raise ArithmeticError("a row of the random model is not finite")
        return at

    def _addresses_on_host(self, entries: NDArray[np.int32]) -> NDArray[np.uint64]:
        """A page on the host for each page of a step; those of prompts and of decodes are other
        ones."""
        n_pages = int(entries[:, 2].sum())
        return np.array([self._host_page(index) for index in range(n_pages)], np.uint64)

    def _host_page(self, index: int) -> int:
        while len(self._host_pages) <= index:
            self._host_pages.append(aligned(self._model.shape.payload_bytes))
        return kernels.address_of(self._host_pages[index])

    # -- figures

    def is_identical(self) -> bool:
        """Whether a prompt and a token give the logits, rows and states of the CPU; and, of a model
        with recurrent state, tokens of which the last ones are taken back."""
        model, tokens = self._model, self._random_tokens(CHECKED_TOKENS)
        (page,) = self._reserve(1)
        self._gpu.copy_in(int(page), self._page)
        on_host = aligned(model.shape.payload_bytes)
        on_host[:] = self._page
        limits = {"tokens_max": CHECKED_TOKENS, "entries_max": 1, "pages_max": 1}
        cpu = Stepper(CpuOps(self._pool), model, **limits)
        same, start = True, 0
        n_bytes = 0 if model.states is None else model.states.image_bytes
        got_state = np.zeros(n_bytes, np.uint8)
        images = [aligned(n_bytes) for _ in range(2)]
        for part, n_drafts in ((tokens, 0), (tokens[:1], 0), (tokens[: 1 + DRAFTED], DRAFTED)):
            entry = np.array([[len(part), start, 1]], np.int32)
            seeds = np.arange(len(part), dtype=np.uint64)
            on_gpu, on_cpu = self._states_of(entry), None
            if on_gpu is not None:
                images.reverse()
                first = kernels.address_of(images[0]) if start else 0
                on_cpu = np.array([[first, kernels.address_of(images[1])]], np.uint64)
            for stepper, address, states in (
                (self._stepper, page, on_gpu),
                (cpu, kernels.address_of(on_host), on_cpu),
            ):
                stepper.set(part, entry, np.array([address], np.uint64), None, states, [n_drafts])
                stepper.run(np.array([len(part) - 1], np.int32))
            got = self._ops.read_rows(cast(Any, self._stepper.logits(1)), 1)
            same &= got.tobytes() == cpu.logits(1).view(1).tobytes()
            same &= np.array_equal(self._stepper.row_digests(seeds), cpu.row_digests(seeds))
            if on_gpu is not None:
                for stepper in (self._stepper, cpu):
                    stepper.rewind([(0, n_drafts // 2)] if n_drafts else [])
                self._gpu.copy_out(int(on_gpu[0, 1]), got_state)
                same &= got_state.tobytes() == images[1][:n_bytes].tobytes()
            start += len(part)
        return bool(same)

    def replays_agree(self) -> bool:
        """Whether the largest step that fits gives the same logits and rows however its launches
        are begun: each behind the end of the one before, early, captured, and replayed."""
        start = self._sizes.context
        needed = start // kernels.PAGE_TOKENS + 1
        for batch in sorted(self._sizes.batches, reverse=True):
            try:
                pages = self._reserve(batch * needed)
                break
            except MemoryError:
                continue
        else:
            raise MemoryError("no step fits")
        tokens, wanted = self._random_tokens(batch), np.arange(batch, dtype=np.int32)
        entries = np.array([[1, start, needed]] * batch, np.int32)

        def outcome() -> bytes:
            self._n_begun = 0
            states = self._states_of(entries)
            _, rows = self._steps.begin(tokens, entries, pages, wanted, states=states)
            self._gpu.synchronize()
            logits = self._ops.read_rows(cast(Any, self._stepper.logits_rows), batch)
            return logits.tobytes() + rows.view(batch).tobytes()

        self._steps.graphs.clear()
        if isinstance(self._gpu, CudaGpu) and self._gpu.begins_early:
            self._gpu.begins_early = False
            in_turn = outcome()
            self._gpu.begins_early = True
            self._steps.graphs.clear()
        else:
            in_turn = outcome()
        return all(outcome() == in_turn for _ in range(4))

    def decode(self, copy_gbps: float) -> dict[str, Row]:
        """Medians of steps with a token of each entry, by entries. of_copy: the bytes that a step
        must read, at the rate of a copy, over its time. experts: those of all layers that are
        among them."""
        sizes, found = self._sizes, dict[str, Row]()
        per_entry = -(-(sizes.context + 2 * sizes.steps) // kernels.PAGE_TOKENS)
        for batch in sizes.batches:
            try:
                pages = self._reserve(batch * per_entry)
                self._decode(batch, per_entry, pages)  # until the clocks have risen
                ended = self._decode(batch, per_entry, pages)
            except MemoryError as error:
                found[str(batch)] = {"not_measured": f"memory of the GPU: {error}"}
                continue
            step_s = statistics.median(np.diff(ended[sizes.steps - 1 :]).tolist())
            n_bytes = self._step_bytes(batch)
            found[str(batch)] = {
                "step_ms": round(step_s * 1000, 3),
                "tokens_per_s": round(batch / step_s, 1),
                "gbps": round(n_bytes / step_s / 1e9, 1),
                "of_copy": round(n_bytes / step_s / 1e9 / copy_gbps, 4),
                "graphs": len(self._steps.graphs),
            }
            if experts := self._experts_of(batch):
                found[str(batch)]["experts"] = experts
            if not len(self._steps.graphs):
                raise RuntimeError(f"no step of {batch} entries was captured: see the log")
        return found

    def _step_bytes(self, batch: int) -> float:
        kv = self._model.shape.payload_bytes / kernels.PAGE_TOKENS * self._sizes.context
        experts = self._experts_of(batch) * expert_bytes(self._model)
        states = 0 if self._model.states is None else 2 * self._model.states.image_bytes
        return streamed_bytes(self._model) + experts + batch * (kv + states)

    def _experts_of(self, batch: int) -> int:
        """How many experts of all layers together the tokens of a step choose. Raises
        MemoryError."""
        if self._model.spec.experts is None:
            return 0
        if batch not in self._experts:
            select, counts = self._ops.select_experts, list[int]()

            def counting(
                logits: Any, tokens: int, scale: float, pairs: ExpertPairs, *gating: Any
            ) -> None:
                select(logits, tokens, scale, pairs, *gating)
                counts.append(len(np.unique(pairs.unpack()[0])))

            self._ops.select_experts = counting
            try:
                self._launches(batch)()
            finally:
                self._ops.select_experts = select
            self._experts[batch] = sum(counts)
        return self._experts[batch]

    def _decode(self, batch: int, per_entry: int, pages: NDArray[np.uint64]) -> list[float]:
        """Decode, a token of each entry in a step; when the GPU had computed each step (s)."""
        ended, running = list[float](), None
        for start in range(self._sizes.context, self._sizes.context + 2 * self._sizes.steps + 1):
            needed = start // kernels.PAGE_TOKENS + 1
            own = pages.reshape(batch, per_entry)[:, :needed].reshape(-1).copy()
            entries = np.array([[1, start, needed]] * batch, np.int32)
            following = self._begin(entries, own, is_fed=running is not None)
            if running is not None:
                ended.append(self._finish(running))
            running = following
        self._gpu.synchronize()
        return ended

    def decode_on_device(self, copy_gbps: float) -> dict[str, Row]:
        """The same steps without the host: the launches of a step, replayed. ms_in_turn: if no
        launch begins while the one before it ends."""
        found = dict[str, Row]()
        for batch in self._sizes.batches:
            try:
                run = self._launches(batch)
                step_s = seconds(self._gpu, run, 5)
            except MemoryError as error:
                found[str(batch)] = {"not_measured": f"memory of the GPU: {error}"}
                continue
            gbps = self._step_bytes(batch) / step_s / 1e9
            row: Row = {"ms": round(step_s * 1000, 3), "of_copy": round(gbps / copy_gbps, 4)}
            if isinstance(self._gpu, CudaGpu) and self._gpu.begins_early:
                self._gpu.begins_early = False
                row["ms_in_turn"] = round(seconds(self._gpu, run, 5) * 1000, 3)
                self._gpu.begins_early = True
            found[str(batch)] = row
        return found

    def _launches(self, batch: int) -> Callable[[], None]:
        """The launches of a step with a token of each entry. Raises MemoryError."""
        stepper, start = self._stepper, self._sizes.context
        needed = start // kernels.PAGE_TOKENS + 1
        wanted = np.arange(batch, dtype=np.int32)
        entries = np.array([[1, start, needed]] * batch, np.int32)
        tokens, pages = self._random_tokens(batch), self._reserve(batch * needed)
        stepper.set(tokens, entries, pages, states=self._states_of(entries))
        self._ops.stage(cast(Batch, stepper.batch), tokens, wanted)

        def run() -> None:
            stepper.start(wanted)
            stepper.logits(batch)

        return run

    def prefill(self, ceilings: Mapping[str, float]) -> dict[str, Row]:
        """Prompts of one entry, by length. of_ceiling: of the ceiling of canonical products; the
        operations are those of the matrices, without attention."""
        found, rate = dict[str, Row](), 0.0  # tokens a second, of the length before
        parameters = token_parameters(self._model)
        for length in self._sizes.lengths:
            if rate and length / rate > LENGTH_S_MAX:
                why = f"about {length / rate:.0f} s are expected"
                found[str(length)] = {"not_measured": why}
                continue
            try:
                pages = self._reserve(-(-length // kernels.PAGE_TOKENS))
            except MemoryError as error:
                found[str(length)] = {"not_measured": f"memory of the GPU: {error}"}
                continue
            self._prefill_s(min(length, GROWN_TOKENS), pages)
            took_s = self._prefill_s(length, pages)
            rate = length / took_s
            gops = 2.0 * parameters * rate / 1e9
            found[str(length)] = {
                "ms": round(took_s * 1000, 2),
                "tokens_per_s": round(rate, 1),
                "gops": round(gops, 1),
                "of_ceiling": round(gops / ceilings["epilogue_gops"], 4),
            }
        return found

    def _prefill_s(self, length: int, pages: NDArray[np.uint64]) -> float:
        started, running = time.perf_counter(), None
        for start in range(0, length, self._sizes.chunk):
            n = min(self._sizes.chunk, length - start)
            needed = -(-(start + n) // kernels.PAGE_TOKENS)
            following = self._begin(np.array([[n, start, needed]], np.int32), pages[:needed])
            if running is not None:
                self._finish(running)
            running = following
        if running is not None:
            self._finish(running)
        return time.perf_counter() - started
