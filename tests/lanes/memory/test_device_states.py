"""Recurrent states in memory of a GPU: slots, files, and the order of copies and steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.lanes.gpu.device import CudaDevice
from batchengine.lanes.gpu.states import DeviceStates
from batchengine.lanes.state_memory import StateMemory, states_at_rest, states_of_seats
from batchengine.lanes.step_input import BadStep, StepInput
from batchengine.wire import lane as wire
from bench.models.synthetic import PRESETS, write_synthetic
from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels
from kernels.cuda import driver
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import Gpu, KernelLaunch
from kv_store.states import state_name, state_seed
from tests.kernels.cuda.fake_driver import FakeDriver
from tests.lanes.emulated_worker import LimitedGpu

BYTES = 640
WORDS = BYTES // 4
KEYS = [bytes([i]) * 32 for i in range(3)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """An emulated GPU behind a driver that begins nothing before it is waited for."""
    if COMPILER is None:
        pytest.skip("no g++")
    emulator = Emulator(compile_kernels(ROOT / "build/simt", is_checked=False))
    monkeypatch.setattr(driver, "STAGING_BYTES", 1 << 12)
    monkeypatch.setattr(driver, "CHUNK_BYTES", 1 << 8)
    modules: dict[str, Any] = {"cuda.bindings.driver": FakeDriver(emulator)}
    monkeypatch.setattr(driver.importlib, "import_module", modules.get)
    return CudaGpu(0, lambda target: {"all": target.encode()})


class Slots:
    """States of a GPU, and launches that copy from and to them."""

    def __init__(self, gpu: Gpu, folder: Path, room: int = 0) -> None:
        """room: how often memory can be made."""
        self.gpu, self.room = gpu, room
        self.states = DeviceStates(gpu, 8, BYTES, str(folder), self.make_room)
        self._zero = gpu.allocate(4)
        gpu.copy_in(self._zero, np.zeros(1, np.int32))

    def make_room(self) -> bool:
        self.room -= 1
        self.gpu.bytes_max += BYTES
        return self.room >= 0

    def at(self, read: int, written: int) -> list[int]:
        """The addresses of an entry."""
        return self.states.addresses(step_of((read, written))).tolist()[0]

    def copy(self, source: int, to: int) -> None:
        """Begin a launch, which the driver has not computed yet."""
        arguments = [source, WORDS, self._zero, WORDS, to, WORDS]
        self.gpu.launch("take_rows", (1, 1, 1), 64, arguments)

    def put(self, value: int) -> int:
        address = self.gpu.allocate(BYTES)
        self.gpu.copy_in(address, state_of(value))
        return address

    def read(self, address: int) -> NDArray[np.int32]:
        values = np.empty(WORDS, np.int32)
        self.gpu.copy_out(address, values)
        return values


def state_of(value: int) -> NDArray[np.int32]:
    return np.arange(WORDS, dtype=np.int32) + 1000 * value


def step_of(*slots: tuple[int, int]) -> StepInput:
    entries = tuple(
        wire.Entry(i, 1, read + 1, 1, 1, None, state_read=read, state_written=written)
        for i, (read, written) in enumerate(slots)
    )
    n = len(entries)
    shape = np.array([[1, entry.start, 1] for entry in entries], np.int32)
    return StepInput(entries, shape, np.zeros(n, np.int32), np.zeros(n, np.uint64), [None] * n, [])


def file_of(slot: int, key: bytes) -> wire.StateFile:
    return wire.StateFile(slot, state_name(key, KEYS[0]), state_seed(key))


def saved(slot: int, key: bytes) -> wire.Step:
    return wire.Step((), save_states=(file_of(slot, key),))


def loaded(slot: int, key: bytes) -> wire.Step:
    return wire.Step((), load_states=(file_of(slot, key),))


def test_slots_take_memory_from_their_first_use_on(gpu: Gpu, tmp_path: Path) -> None:
    slots = Slots(gpu, tmp_path)
    assert (slots.states.n_slots, len(slots.states)) == (8, 0)
    nothing, first = slots.at(-1, 5)
    assert nothing == 0
    assert slots.at(5, 2)[0] == first
    assert len(slots.states) == 2
    assert slots.at(2, 5) == slots.at(5, 2)[::-1]
    with pytest.raises(BadStep, match="no state was written"):
        slots.at(7, 5)


def test_a_state_is_saved_as_the_steps_before_have_left_it(gpu: Gpu, tmp_path: Path) -> None:
    slots, memory = Slots(gpu, tmp_path), StateMemory(2, BYTES, str(tmp_path))
    slots.copy(slots.put(1), slots.at(-1, 3)[1])
    assert slots.states.move(saved(3, KEYS[1])) == (True,)
    slots.copy(slots.put(2), slots.at(-1, 3)[1])
    assert memory.move(loaded(0, KEYS[1])) == (True,)
    assert bytes(memory.slot(0)) == state_of(1).tobytes()


def test_a_state_is_loaded_behind_the_steps_that_use_its_slot(gpu: Gpu, tmp_path: Path) -> None:
    slots, memory = Slots(gpu, tmp_path), StateMemory(2, BYTES, str(tmp_path))
    memory.slot(1)[:] = state_of(7).tobytes()
    assert memory.move(saved(1, KEYS[2])) == (True,)
    at, seen = slots.at(-1, 3)[1], slots.put(0)
    slots.copy(slots.put(1), at)
    slots.copy(at, seen)
    assert slots.states.move(loaded(3, KEYS[2])) == (True,)
    assert slots.read(seen).tolist() == state_of(1).tolist()
    assert slots.read(at).tolist() == state_of(7).tolist()
    assert slots.states.move(saved(3, KEYS[1])) == (True,)
    names = [state_name(key, KEYS[0]) for key in KEYS[1:]]
    bodies = [Path(tmp_path / name).read_bytes()[-BYTES:] for name in names]
    assert bodies[0] == bodies[1]


def test_what_cannot_be_saved_or_loaded_is_said(gpu: Gpu, tmp_path: Path) -> None:
    slots = Slots(gpu, tmp_path)
    at = slots.at(-1, 3)[1]
    slots.copy(slots.put(1), at)
    assert slots.states.move(saved(4, KEYS[1])) == (False,)  # which nothing has written
    assert slots.states.move(loaded(3, KEYS[1])) == (False,)
    assert slots.states.move(saved(3, KEYS[1])) == (True,)
    path = tmp_path / state_name(KEYS[1], KEYS[0])
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    both = wire.Step((), (), load_states=(file_of(3, KEYS[1]), file_of(4, KEYS[1])))
    assert slots.states.move(both) == (False, False)
    assert slots.read(at).tolist() == state_of(1).tolist()
    gone = DeviceStates(gpu, 8, BYTES, str(tmp_path / "gone"), lambda: False)
    gone.addresses(step_of((-1, 0)))
    assert gone.move(saved(0, KEYS[1])) == (False,)


def test_memory_that_lacks(gpu: Gpu, tmp_path: Path) -> None:
    """A step gets a MemoryError; for a load, pages give way once they may."""
    slots = Slots(gpu, tmp_path, room=1)
    slots.copy(slots.put(1), slots.at(-1, 3)[1])
    assert slots.states.move(saved(3, KEYS[1])) == (True,)
    gpu.bytes_max = gpu.used
    with pytest.raises(MemoryError):
        slots.at(-1, 4)
    assert slots.states.move(loaded(4, KEYS[1])) == (True,)
    gpu.bytes_max = gpu.used
    assert slots.states.move(loaded(5, KEYS[1])) == (False,)
    assert slots.read(slots.at(4, 3)[0]).tolist() == state_of(1).tolist()


def test_states_of_sessions_at_rest_are_a_part_of_the_memory() -> None:
    assert [states_at_rest(4, memory, 100) for memory in (0, 16 * 250, 1 << 40)] == [0, 2, 4]
    assert states_of_seats(4, 3) == 16


class WrongGpu(LimitedGpu):
    """An emulated GPU that takes the bias of a decay for its factor, in steps of one token."""

    def _launch(self, launch: KernelLaunch) -> None:
        given = launch.arguments
        if launch.kernel == "convolve_heads" and launch.blocks[0] == 1:
            launch = launch._replace(arguments=[*given[:11], given[10], *given[12:]])
        super()._launch(launch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_synthetic(path, replace(PRESETS["qwen35-tiny"], n_vocab=500))
    return path


def load(model: Path, cache_dir: Path, gpu: Gpu, seats: int) -> CudaDevice:
    """A device with 64 MiB of a GPU."""
    device = CudaDevice(lambda *_: gpu)
    resources = wire.CudaResources(0, 64 << 20, 0, 1, (), 0)
    message = wire.Load(str(model), str(cache_dir), resources, 64, seats, 1024, steps_in_flight=3)
    try:
        device.load(message, lambda *_: None)
    finally:
        device.close()
    return device


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_pages_have_the_room_beside_all_states(model: Path, cache_dir: Path) -> None:
    gpu = LimitedGpu(1 << 30)
    device = load(model, cache_dir, gpu, seats=4)
    assert device.gpu is not None
    few = device.gpu.pages.caches[0].pages_max
    more = load(model, cache_dir, LimitedGpu(1 << 30), seats=2).gpu
    assert more is not None
    assert few < more.pages.caches[0].pages_max
    with pytest.raises(BatchEngineError, match="GPU 0 cannot be used") as refusal:
        load(model, cache_dir, LimitedGpu(1 << 30), seats=64)
    assert "with entries_max 64 there are 261 states of" in refusal.value.why


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_a_gpu_whose_states_are_others_is_refused(model: Path, cache_dir: Path) -> None:
    with pytest.raises(BatchEngineError) as refusal:
        load(model, cache_dir, WrongGpu(1 << 30), seats=2)
    assert refusal.value.code == errors.GPU_DISAGREES.code
