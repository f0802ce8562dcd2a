"""A GPU whose rows are hashes, for tests of the memory of a lane.

A row is the hash of its token and of the rows before it: of two layers, those that a window of
tokens has, and of one all. The GPU computes when it is waited for, piece by piece, or at once.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

import kernels
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.device import LaneMemory
from batchengine.lanes.gpu.device import CudaDevice
from batchengine.lanes.gpu.lane import GpuLane, Launched, LoadedGpu
from batchengine.lanes.gpu.page_cache import PageCache, PageCopies
from batchengine.lanes.step_input import I32Array, StepInput
from batchengine.wire import lane as wire
from bench.models.tensors import aligned
from kernels.cuda.gpu import DeviceFacts, Gpu, Graph, KernelLaunch
from kernels.cuda.memory import BadRows, KvRows
from kernels.cuda.ops import NOTHING_TAKEN, BegunSample, Taken
from kernels.cuda.page_parts import PageParts
from kv_store.layout import PageLayout

LAYOUT = PageLayout.uniform(3, 1, 32)
WIDTH = LAYOUT.row_bytes
WINDOWED, WHOLE = (0, 2), (1,)  # layers with a window, if a model has one, and the other
VOCAB, ENTRIES, TOKENS = 64, 20, 500  # entries and tokens of a step, at most
CONTEXT = 3 * PAGE_TOKENS
BAD = bytes([255]) * WIDTH  # a row that is not finite
PART_BYTES = LAYOUT.layers[0].layer_bytes  # a part of a page is as large, or several times
FACTS = wire.ModelFacts("", "", 1, LAYOUT.layers, LAYOUT.payload_bytes, VOCAB, {})


def page_shape() -> kernels.PageShape:
    """The shape of LAYOUT."""
    return kernels.PageShape(LAYOUT.layers)


def columns_of(layers: Sequence[int]) -> I32Array:
    """The bytes of a row that are of these layers."""
    width = WIDTH // LAYOUT.n_layer
    return np.concatenate([np.arange(width, dtype=np.int32) + width * layer for layer in layers])


def hidden(n: int, window: int) -> int:
    """How many of `n` rows a window hides from a token behind them; 0: there is no window."""
    return max(0, n - (window - 1)) if window else 0


def row_of(before: bytes | bytearray, token: int, window: int) -> bytes:
    """The row of a token behind these rows."""
    if n := hidden(len(before) // WIDTH, window):
        rows = np.frombuffer(before, np.uint8).reshape(-1, LAYOUT.n_layer, WIDTH // LAYOUT.n_layer)
        before = rows[:n, WHOLE].tobytes() + rows[n:].tobytes()
    state = xxhash.xxh3_64_digest(before, token & 0xFFFF)
    return hashlib.shake_128(state).digest(WIDTH)


def token_of(row: bytes, mask: bytes) -> int:
    """The sample of a row; -1 if it is not finite."""
    bits = int.from_bytes(mask, "little") if mask else (1 << VOCAB) - 1
    allowed = [token for token in range(VOCAB) if bits >> token & 1]
    return -1 if row == BAD else allowed[int.from_bytes(row[:4], "little") % len(allowed)]


def mask_of(session: int, position: int) -> bytes:
    """The mask of a session with masks."""
    return xxhash.xxh3_64_digest(b"%d %d" % (session, position))


class LazyGpu(Gpu):
    """Arrays by address. Work ends when it is waited for, with a look at a mark, or by chance at
    once; what is copied aside, by chance as early or as late as it may."""

    facts = DeviceFacts("", 0, 0, (0, 0))

    def __init__(self, rng: random.Random, pages: int) -> None:
        super().__init__()
        self._rng, self._pages = rng, pages
        self._haste = rng.choice([0.0, 0.05, 1.0])
        self.held: dict[int, np.ndarray[Any, Any]] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._aside: deque[tuple[int, Callable[[], None]]] = deque()  # what it comes after, copy
        self.ended = self._forked = self._aside_ended = 0

    @property
    def begun(self) -> int:
        return self.ended + len(self._queue)

    def begin(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if self._rng.random() < self._haste:
            self.run(self.begun)

    def run(self, end: int) -> None:
        """Do the first `end` pieces of work, but for those that have ended."""
        while self.ended < end:
            self.ended += 1
            self._queue.popleft()()

    def _run_aside(self, end: int) -> None:
        while self._aside_ended < end:
            after, copy = self._aside.popleft()
            self._aside_ended += 1
            self.run(after)
            copy()

    def _allocate(self, n_bytes: int) -> int:
        of_pages = [len(one) for one in self.held.values() if len(one) % PART_BYTES == 0]
        if (
            n_bytes % PART_BYTES == 0
            and sum(of_pages) + n_bytes > self._pages * LAYOUT.payload_bytes
        ):
            raise MemoryError
        memory = aligned(n_bytes)
        memory[:] = 255
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def _free(self, address: int) -> None:
        self.run(self.begun)
        del self.held[address]

    def _copy(self, address: int, array: np.ndarray[Any, Any]) -> Callable[[], None]:
        given = array.tobytes()
        start = next(at for at, one in self.held.items() if 0 <= address - at < len(one))
        target = self.held[start][address - start :][: len(given)]
        return lambda: target.__setitem__(slice(None), np.frombuffer(given, np.uint8))

    def copy_in(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self.begin(self._copy(address, array))

    def copy_aside(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self._aside.append((self._forked, self._copy(address, array)))
        if self._rng.random() < 0.5:
            self._run_aside(self._aside_ended + len(self._aside))

    def fork(self) -> None:
        self._forked = self.begun

    def join(self) -> None:
        end = self._aside_ended + len(self._aside)
        self.begin(lambda: self._run_aside(end))

    def fetch(self, address: int, array: np.ndarray[Any, Any]) -> None:
        source, target = self.held[address], array.reshape(-1).view(np.uint8)
        self.begin(lambda: target.__setitem__(slice(None), source[: len(target)]))

    def pin(self, array: np.ndarray[Any, Any]) -> None: ...

    def synchronize(self) -> None:
        self.run(self.begun)

    def mark(self) -> LazyMark:
        return LazyMark(self, self.begun)

    def wait(self, end: int) -> None:
        self.run(end if self._rng.random() < 0.5 else self.begun)

    def _launch(self, launch: KernelLaunch) -> None:
        raise AssertionError

    def capture(self, run: Callable[[], None]) -> Graph:
        raise AssertionError


class LazyMark:
    def __init__(self, gpu: LazyGpu, end: int) -> None:
        self._gpu, self._end = gpu, end

    @property
    def is_passed(self) -> bool:
        self._gpu.run(min(self._end, self._gpu.ended + 1))
        return self._gpu.ended >= self._end

    def wait(self) -> None:
        self._gpu.wait(self._end)


def no_states(_: object) -> None:
    """As Stepper.rewind of a model without recurrent state."""


class RowPart:
    """The bytes of rows of some layers, which are a part of each page. window: of these layers."""

    def __init__(self, layers: Sequence[int], window: int) -> None:
        self.window, self.columns = window, columns_of(layers)
        self.layout = PageLayout.uniform(len(layers), 1, 32)
        self.shape = kernels.PageShape(self.layout.layers)
        self._rows = kernels.KvRows(TOKENS, self.shape)
        self._batch = kernels.Batch(TOKENS, ENTRIES, 3 * ENTRIES)
        self._hidden = aligned(self.layout.payload_bytes)  # in place of pages that are not there

    def read(self, page: Any) -> Any:
        return self.layout.gather_rows(page.data, 0, PAGE_TOKENS)

    def store(self, pool: kernels.Pool, rows: Any, table: Any, pages: Sequence[int]) -> None:
        """Write rows (n, WIDTH) to pages at these addresses."""
        self._rows.view(len(rows))[:] = rows[:, self.columns]
        at = np.array([address or self._hidden.ctypes.data for address in pages], np.uint64)
        self._batch.set(np.zeros(len(rows), np.int32), table, at)
        kernels.store_rows(pool, self._rows, self._batch)


class HashSteps:
    """`GpuSteps` that reads and writes rows of pages by address. computed: tokens and rows of each
    entry, by session and first position. window: of some layers; 0: all rows are seen."""

    def __init__(self, gpu: LazyGpu, refusals: int, window: int) -> None:
        model = SimpleNamespace(spec=SimpleNamespace(suppressed=()))
        self.gpu = gpu
        self.stepper = SimpleNamespace(logits_max=ENTRIES, rewind=no_states, model=model)
        self.pool, self.refusals, self.window = kernels.Pool(1), refusals, window
        every = range(LAYOUT.n_layer)
        self.whole = RowPart(every, 0)
        self.parts = [RowPart(WINDOWED, window), RowPart(WHOLE, 0)] if window else [self.whole]
        self.fails = set[
            tuple[int, int]
        ]()  # entries whose last row, or only its sample, is not finite
        self.computed: dict[tuple[int, int], tuple[list[int], bytes]] = {}
        self.rows: dict[int, bytearray] = {}  # that each session should have
        self.batch: StepInput
        self._rows, self._flags = KvRows(gpu, TOKENS, page_shape()), gpu.allocate(TOKENS)
        self._made = kernels.KvRows(TOKENS, page_shape())
        self._wanted, self._sampled = list[bytes](), list[int]()

    def begin(
        self,
        tokens: Any,
        entries: Any,
        pages: Any,
        wanted: Any,
        taken: Taken = NOTHING_TAKEN,
        states: None = None,
        drafts: Any = (),
    ) -> tuple[list[Any], kernels.KvRows]:
        batch, ids = self.batch, tokens.tolist()
        self._refuse()
        self.gpu.begin(lambda: self._compute(batch, ids, entries, pages, wanted, taken))
        fetched = self._rows.fetch(len(tokens))
        return [BadRows(self.gpu, self._flags, len(tokens)).fetch(), []], fetched

    def _compute(
        self, batch: StepInput, ids: list[int], table: Any, pages: Any, wanted: Any, taken: Taken
    ) -> None:
        for at, row in taken.items():
            ids[at] = self._sampled[row]
        made, first, first_page, invalid = self._made.view(TOKENS), 0, 0, set[int]()
        for entry, (n, start, n_pages) in zip(batch.entries, table.tolist(), strict=True):
            rows, known = bytearray(start * WIDTH), self.rows[entry.session][: start * WIDTH]
            on_gpu = np.frombuffer(rows, np.uint8).reshape(-1, WIDTH)
            wanted_rows = np.frombuffer(known, np.uint8).reshape(-1, WIDTH)
            for part, addresses in zip(self.parts, pages, strict=True):
                of_entry = addresses[first_page : first_page + n_pages].tolist()
                for page in range(-(-start // PAGE_TOKENS)):
                    low = max(page * PAGE_TOKENS, hidden(start, part.window))
                    high = min((page + 1) * PAGE_TOKENS, start)
                    if low < high:
                        held = part.read(self.gpu.held[of_entry[page]])[low % 256 :][: high - low]
                        on_gpu[low:high, part.columns] = held
                        want = wanted_rows[low:high, part.columns]
                        assert np.array_equal(held[: len(want)], want), f"pages on the GPU: {entry}"
            is_bad = bool((on_gpu[:, columns_of(WHOLE)] == 255).all(1).any())
            del on_gpu  # rows may grow
            for i in range(first, first + n):
                if i == first + n - 1 and (entry.session, start) in self.fails:
                    invalid.add(i)
                    is_bad = is_bad or start % 2 == 0
                    del self.rows[entry.session][len(rows) :]  # when it computes them again
                rows += BAD if is_bad else row_of(rows, ids[i], self.window)
            self.computed[entry.session, start] = ids[first : first + n], bytes(rows)[-n * WIDTH :]
            made[first : first + n] = np.frombuffer(rows[-n * WIDTH :], np.uint8).reshape(n, -1)
            first, first_page = first + n, first_page + n_pages
        for part, addresses in zip(self.parts, pages, strict=True):
            part.store(self.pool, made[:first], table, addresses.tolist())
        self.gpu.held[self._rows.address][: first * WIDTH] = made[:first].reshape(-1)
        self.gpu.held[self._flags][:first] = (made[:first] == 255).all(1)
        self._wanted = [BAD if i in invalid else made[i].tobytes() for i in wanted.tolist()]

    def _refuse(self) -> None:
        """Raise MemoryError, by chance and not too often."""
        if self.refusals and random.Random(self.gpu.begun).random() < 0.01:
            self.refusals -= 1
            raise MemoryError

    def sample(self, specs: Sequence[kernels.SampleSpec], taken: Taken) -> BegunSample:
        self._refuse()
        got, masks = np.zeros(2 * len(specs), np.int32), [spec.mask.tobytes() for spec in specs]

        def run() -> None:
            self._sampled = [token_of(*one) for one in zip(self._wanted, masks, strict=True)]
            got[: len(specs)] = self._sampled

        if specs:
            self.gpu.begin(run)
        return BegunSample(0, got, [0] * len(specs))


class HashLane(GpuLane):
    """A `GpuLane` that shows each batch to its `HashSteps`."""

    def launch(self, batch: StepInput, addresses: Any, taken: Taken = NOTHING_TAKEN) -> Launched:
        steps: Any = self._steps
        steps.batch = batch
        return super().launch(batch, addresses, taken)


class HashDevice(CudaDevice):
    """A `CudaDevice` with `HashSteps`."""

    def __init__(self, steps: HashSteps, counts: Sequence[int]) -> None:
        """counts: how many pages of each part of its steps the GPU holds."""
        super().__init__()
        self._hashes, self._counts = steps, counts

    def load(self, load: wire.Load, report: Any) -> wire.ModelFacts:
        steps: Any = self._hashes
        windows = [self._hashes.window if i in WINDOWED else 0 for i in range(LAYOUT.n_layer)]
        parts = PageParts(page_shape(), windows).parts
        least = CONTEXT // PAGE_TOKENS
        caches = [
            PageCache(self._hashes.gpu, part, n, least)
            for part, n in zip(parts, self._counts, strict=True)
        ]
        copies = PageCopies(caches)
        on_host = kernels.Batch(TOKENS, ENTRIES, 3 * ENTRIES)
        self.gpu = LoadedGpu(self._hashes.pool, steps, copies, on_host)
        return FACTS

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        made = super().attach(attach, layout)
        assert self.gpu is not None
        assert self.memory is not None
        self.lane = HashLane(self.gpu, self.memory)
        return made
