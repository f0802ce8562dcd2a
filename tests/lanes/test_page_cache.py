"""A GPU lane without a GPU: its page cache, a step in parts, and a device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.lanes.gpu.device import open_gpu
from batchengine.lanes.gpu.lane import GpuLane, LoadedGpu
from batchengine.lanes.gpu.memory import DeviceMemory
from batchengine.lanes.gpu.page_cache import PageCache, PageCopies
from batchengine.lanes.gpu.step import Room, parts_of, unwritten
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.wire import lane as wire
from kernels.cuda.gpu import DeviceFacts, Gpu, GpuFault, Graph, KernelLaunch, Mark
from kernels.cuda.page_parts import LayerPart, Run
from kv_store.arenas.arena import Arena
from tests.kv.test_importing import LAYOUT, REPR, SLOTS, Bank

BYTES = 64
SPACING = 1 << 20  # of arrays of FakeGpu
ANY = 99  # what new memory holds


def whole(n_bytes: int) -> LayerPart:
    """Pages of one part."""
    return LayerPart(0, (Run(0, n_bytes),))


class FakeGpu(Gpu):
    """Arrays by address; room for so many pages. What is copied aside is there after a join.

    copied: pages of one run, since the start. forks: how many copies aside there had been at each
    fork."""

    facts = DeviceFacts("", 0, 0, (0, 0))

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.pages, self.made, self.copied = pages, 0, 0
        self.held: dict[int, np.ndarray[Any, Any]] = {}
        self.aside: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.forks: list[int] = []

    def _allocate(self, n_bytes: int) -> int:
        if len(self.held) == self.pages:
            raise MemoryError
        self.made += 1
        self.held[SPACING * self.made] = np.full(n_bytes, ANY, np.uint8)
        return SPACING * self.made

    def _bytes(self, address: int, n_bytes: int) -> np.ndarray[Any, Any]:
        offset = address % SPACING
        return self.held[address - offset][offset : offset + n_bytes]

    def _free(self, address: int) -> None:
        del self.held[address]

    def copy_in(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self._bytes(address, array.nbytes)[:] = array
        self.copied += 1

    def copy_aside(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self.aside.append((address, array.copy()))
        self.copied += 1

    def fork(self) -> None:
        self.forks.append(len(self.aside))

    def mark(self) -> Mark:
        raise AssertionError

    def join(self) -> None:
        for address, array in self.aside:
            self._bytes(address, array.nbytes)[:] = array
        self.aside.clear()

    def fetch(self, address: int, array: np.ndarray[Any, Any]) -> None:
        raise AssertionError

    def pin(self, array: np.ndarray[Any, Any]) -> None:
        raise AssertionError

    def synchronize(self) -> None:
        raise AssertionError

    def _launch(self, launch: KernelLaunch) -> None:
        raise AssertionError

    def capture(self, run: Callable[[], None]) -> Graph:
        raise AssertionError


class Scene:
    """Host pages of values 0, 1, ... with codes 10, 11, ..., and a cache of them."""

    def __init__(self, pages_max: int, fit: int = 100) -> None:
        self.host = np.arange(8, dtype=np.uint8).repeat(BYTES).reshape(8, BYTES).copy()
        self.gpu = FakeGpu(fit)
        self.cache = PageCache(self.gpu, whole(BYTES), pages_max)

    def at(self, *pages: int) -> U64Array:
        """Addresses on the host."""
        base = kernels.address_of(self.host.data)
        return np.array([base + BYTES * page for page in pages], np.uint64)

    def use(self, *pages: int, unwritten: Sequence[int] = ()) -> list[int]:
        """Values of the copies that a step of these pages sees."""
        codes = np.array([10 + page for page in pages], np.uint64)
        empty = np.isin(np.array(pages), np.array(unwritten))
        found = self.cache.addresses(codes, self.at(*pages), empty)
        return [int(self.gpu.held[int(a)][-1]) for a in found]

    def expect(self, *pages: int, n: int = 8, used: Sequence[int] = ()) -> None:
        """Let pages be copied beside a step that has `used`, up to `n` of them."""
        self.cache.expect([10 + page for page in pages], self.at(*pages))
        self.cache.copy_expected(n * BYTES, [10 + page for page in used])


def test_a_page_is_copied_once_until_it_is_freed() -> None:
    scene = Scene(4)
    assert scene.use(0, 1, 0) == [0, 1, 0]
    scene.host[0] = 77
    assert scene.use(0, 1) == [0, 1]
    assert scene.gpu.copied == 2
    scene.cache.forget([10, 999])
    assert scene.use(0, 1) == [77, 1]
    assert (scene.gpu.copied, scene.gpu.made) == (3, 2)


def test_the_least_recently_used_page_gives_way_never_one_of_the_step() -> None:
    scene = Scene(3)
    scene.use(0, 1, 2)
    scene.use(0)
    assert scene.use(3, 2, 0) == [3, 2, 0]  # for page 1
    assert scene.gpu.copied == 4
    scene.use(0)
    assert scene.gpu.copied == 4
    with pytest.raises(MemoryError):
        scene.use(4, 5, 6, 7)


def test_a_cache_that_does_not_fit_becomes_smaller() -> None:
    scene = Scene(100, fit=4)
    assert scene.use(0, 1, 2, 3) == [0, 1, 2, 3]
    assert scene.use(4, 1) == [4, 1]
    with pytest.raises(MemoryError):
        scene.use(0, 1, 2, 3, 4)
    copies = PageCopies([scene.cache])
    assert copies.shrink()
    assert (scene.cache.pages_max, scene.gpu.held) == (3, {})
    assert not copies.shrink()
    assert scene.use(0, 1, 2) == [0, 1, 2]


def test_a_part_gets_its_share_of_memory_that_another_part_has_taken() -> None:
    """Memory that is refused to layers with a window is not taken from them alone."""
    scene = Scene(1, fit=10)
    windowed, others = LayerPart(40, (Run(0, 32),)), whole(BYTES // 2)
    caches = PageCache(scene.gpu, windowed, 50, 2), PageCache(scene.gpu, others, 100, 8)
    copies = PageCopies(caches)
    pages = list(range(8))
    codes = np.arange(10, 18, dtype=np.uint64)
    hidden = np.array([[1, 7 * 256 + 200, 8]], np.int32)  # of all pages but the last
    both = np.array([[300, 5 * 256, 8]], np.int32)  # a token sees the last four
    copies.addresses(codes, scene.at(*pages), hidden, np.zeros(8, bool))
    with pytest.raises(MemoryError):
        copies.addresses(codes, scene.at(*pages), both, np.zeros(8, bool))
    assert [len(cache) for cache in caches] == [2, 8]
    assert copies.shrink()  # to 7 pages of 10
    assert [cache.pages_max for cache in caches] == [2, 5]
    assert scene.gpu.held == {}
    copies.addresses(codes[3:], scene.at(*pages[3:]), np.array([[1, 1024, 5]]), np.zeros(5, bool))
    assert copies.shrink()
    assert [cache.pages_max for cache in caches] == [2, 3]


def test_each_part_keeps_what_one_entry_needs_if_there_is_room() -> None:
    scene = Scene(1)
    windowed = PageCache(scene.gpu, LayerPart(40, (Run(0, BYTES),)), 3, 3)
    copies = PageCopies((windowed, PageCache(scene.gpu, whole(BYTES // 2), 50, 3)))
    of_ten = np.array([[1, 9 * 256 - 1, 9], [1, 255, 1]], np.int32)
    pages = [0, 1, 2, 3, 4, 5, 6, 7, 7, 6]
    codes = np.arange(20, 30, dtype=np.uint64)
    copies.addresses(codes, scene.at(*pages), of_ten, np.zeros(10, bool))
    assert [len(cache) for cache in copies.caches] == [2, 10]
    assert copies.shrink()  # to the bytes of three pages and of four and a half
    assert [cache.pages_max for cache in copies.caches] == [3, 4]


def test_memory_that_was_refused_is_not_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(100, fit=2)
    assert scene.use(0, 1) == [0, 1]
    scene.use(2)
    scene.gpu.pages = 100
    assert scene.use(3, 2) == [3, 2]
    assert (scene.gpu.made, scene.cache.pages_max) == (2, 2)
    assert caplog.messages == ["no memory on the GPU: it holds 2 pages now"]


def test_a_page_without_rows_is_not_copied() -> None:
    scene = Scene(4)
    assert scene.use(0, 1, unwritten=[1]) == [0, ANY]
    assert scene.gpu.copied == 1
    step = np.array([(3, 254, 2), (1, 256, 2), (600, 100, 3)], np.int32)  # tokens, start, pages
    assert unwritten(step).tolist() == [False, True, False, True, False, True, True]


def test_expected_pages_come_beside_a_step_and_before_theirs() -> None:
    scene = Scene(4)
    scene.use(0)
    scene.expect(1, 2, 0, n=2, used=[0])
    assert (len(scene.gpu.aside), scene.gpu.copied) == (2, 3)
    assert scene.use(0) == [0]
    assert len(scene.gpu.aside) == 2  # that step does not wait for them
    assert scene.use(0, 2, 1) == [0, 2, 1]
    assert (len(scene.gpu.aside), scene.gpu.copied) == (0, 3)


def test_expected_pages_take_memory_that_the_step_before_may_read() -> None:
    """So their copies come after what was begun before the step that they are copied beside."""
    scene = Scene(2)
    scene.use(0, 1)
    assert scene.gpu.forks == []  # nothing is expected
    scene.cache.expect([12], scene.at(2))
    scene.use(1)
    assert scene.gpu.forks == [0]
    scene.cache.copy_expected(BYTES, [11])  # for page 0
    assert len(scene.gpu.aside) == 1


def test_expected_pages_take_no_page_of_the_step_and_may_be_given_up() -> None:
    scene = Scene(2)
    scene.use(0, 1)
    scene.expect(2, used=[0, 1])
    scene.expect(3, 4, used=[0])  # for page 1, and for none
    assert scene.use(0) == [0]
    assert scene.gpu.copied == 3
    scene.host[3] = 33
    scene.cache.forget([13])
    assert not scene.gpu.aside  # no copy comes later than those into the same memory
    assert scene.use(0, 3) == [0, 33]
    scene.cache.expect([15], scene.at(5))
    scene.cache.forget([15])
    scene.cache.copy_expected(BYTES)
    assert not scene.gpu.aside


def test_sealed_pages_are_expected_once_they_are_touched(tmp_path: Path) -> None:
    bank, gpu = Bank(tmp_path), FakeGpu(4)
    cache = PageCache(gpu, whole(LAYOUT.payload_bytes), 4)
    folders = str(tmp_path / "ext"), str(tmp_path / "arena")
    arena = Arena.create(f"{tmp_path}/arena/gpu.1", LAYOUT, SLOTS, 3, repr_id=REPR)
    attach = wire.Attach(arena.path, SLOTS, LAYOUT.page_bytes, *folders)
    memory = DeviceMemory(attach, LAYOUT, PageCopies([cache]), kernels.Pool(1))
    first, second, absent = bank.seal(0).code, bank.seal(1).code, 9 << 32
    entry = wire.Entry(1, 1, 0, 1, 1, None)
    memory.prepare(wire.Step((entry,), touch=(first, second, absent)), [])
    assert not gpu.aside  # before the GPU has begun the step
    cache.copy_expected(1)
    assert [array.tobytes() for _, array in gpu.aside] == [bank.rows.tobytes()]
    memory.prepare(wire.Step(()), [])  # nothing else to do
    assert (len(gpu.aside), len(cache)) == (2, 2)
    memory.prepare(wire.Step((), freed=(first,)), [])
    assert len(cache) == 1
    arena.close(delete=False)
    bank.close()


def step_of(*entries: tuple[int, list[int]]) -> StepInput:
    """Entries of (tokens, codes)."""
    shape = np.array([[n, 0, len(codes)] for n, codes in entries], np.int32)
    made = tuple(wire.Entry(i, 1, 0, n, len(codes), None) for i, (n, codes) in enumerate(entries))
    tokens = np.arange(int(shape[:, 0].sum()), dtype=np.int32)
    codes = np.array([code for _, codes in entries for code in codes], np.uint64)
    return StepInput(made, shape, tokens, codes, [None] * len(made), [])


def test_a_step_is_divided_between_entries() -> None:
    step = step_of((1, [1, 2]), (2, [1, 3]), (1, [4]), (3, [5, 6, 7, 8]), (1, [9]))
    parts = list(parts_of(step, [Room(0, 3)]))
    assert [first for first, _ in parts] == [0, 2, 3, 4]
    assert [len(part.entries) for _, part in parts] == [2, 1, 1, 1]
    assert [part.codes.tolist() for _, part in parts] == [[1, 2, 1, 3], [4], [5, 6, 7, 8], [9]]
    assert [part.tokens.tolist() for _, part in parts] == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert [len(part.histories) for _, part in parts] == [2, 1, 1, 1]
    assert [first for first, _ in parts_of(step, [Room(0, 10)])] == [0]


def test_a_page_of_several_sessions_takes_room_once() -> None:
    step = step_of((1, [1, 2]), (1, [1, 2]), (1, [1, 3]))
    assert [first for first, _ in parts_of(step, [Room(0, 3)])] == [0]
    assert [first for first, _ in parts_of(step, [Room(0, 2)])] == [0, 2]


def test_a_session_that_does_not_fit_ends_the_worker_at_once() -> None:
    """The engine starts it again, with all of the memory that there is then."""
    cache = PageCache(FakeGpu(3), whole(BYTES), 3)
    absent: Any = None
    lane = GpuLane(LoadedGpu(absent, absent, PageCopies([cache]), absent), absent)
    with pytest.raises(
        GpuFault, match="a session of 4 pages, and room for 3 pages: memory was refused"
    ):
        lane.run(step_of((3, [5, 6, 7, 8])))
    assert cache.pages_max == 3


def test_a_gpu_that_is_not_there_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BatchEngineError, match="GPU 63 cannot be used") as refusal:
        open_gpu(wire.CudaResources(63, 1 << 30, 0, 1, (), 0), tmp_path, ())
    assert refusal.value.code == errors.GPU_UNUSABLE.code
    assert refusal.value.why


def test_a_gpu_whose_memory_others_have_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullGpu:
        def __init__(self, *_: object) -> None:
            raise MemoryError("cuDevicePrimaryCtxRetain")

    monkeypatch.setattr("batchengine.lanes.gpu.device.CudaGpu", FullGpu)
    with pytest.raises(BatchEngineError, match="GPU 0 cannot be used") as refusal:
        open_gpu(wire.CudaResources(0, 1 << 30, 0, 1, (), 0), tmp_path, ())
    assert refusal.value.code == errors.GPU_UNUSABLE.code
    assert refusal.value.why == "no memory is left on it: cuDevicePrimaryCtxRetain"
