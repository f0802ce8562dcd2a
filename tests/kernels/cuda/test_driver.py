"""The CUDA driver behind a Gpu: over a driver that an emulated GPU stands for, and on a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kernels
import kernels.cuda.driver as module
from bench.cuda.arrays import Arrays
from bench.cuda.cases import cases
from bench.simt.emulator import ROOT, Emulator
from kernels.cuda.compile import cubins
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import GpuFault
from tests.kernels.cuda.fake_driver import SHAPE, FakeDriver, Status

SOME = ("quantise", "attention", "sample", "linear q4_0", "linear f16", "embed q6_k")


@pytest.fixture
def driver(gpu: Emulator, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver, with little pinned memory."""
    gpu.seed = 0
    fake = FakeDriver(gpu)
    monkeypatch.setattr(module, "STAGING_BYTES", 4096)
    monkeypatch.setattr(module, "CHUNK_BYTES", 1500)
    monkeypatch.setattr(module.importlib, "import_module", {"cuda.bindings.driver": fake}.get)
    return fake


def opened(driver: FakeDriver) -> CudaGpu:
    return CudaGpu(0, lambda target: {"all": target.encode()})


@pytest.mark.parametrize("name", SOME)
def test_cases_through_the_driver(driver: FakeDriver, pool: kernels.Pool, name: str) -> None:
    cases()[name](opened(driver), pool, np.random.default_rng(3))


def test_facts_choose_the_target(driver: FakeDriver) -> None:
    targets: list[str] = []

    def load(target: str) -> dict[str, bytes]:
        targets.append(target)
        return {}

    facts = CudaGpu(0, load).facts
    assert (facts.name, facts.memory_bytes, facts.multiprocessors) == ("Emulated", 1 << 30, 132)
    assert targets == [facts.target] == ["sm_90"]


@pytest.mark.parametrize(
    ("most", "used", "context"),
    [
        (0, 132, "whole"),
        (132, 132, "whole"),
        (30, 32, "context: green, 32 multiprocessors"),
        (1, 8, "context: green, 8 multiprocessors"),
    ],
)
def test_a_gpu_may_use_a_part_of_the_multiprocessors(
    driver: FakeDriver, pool: kernels.Pool, most: int, used: int, context: str
) -> None:
    gpu = CudaGpu(0, lambda target: {"all": target.encode()}, most)
    assert (gpu.facts.multiprocessors, driver.context) == (used, context)
    cases()["quantise"](gpu, pool, np.random.default_rng(3))


def test_a_device_that_cannot_be_parted_is_a_fault(driver: FakeDriver) -> None:
    driver.fail["cuGreenCtxCreate"] = Status.CUDA_ERROR_NO_DEVICE
    with pytest.raises(GpuFault, match="cuGreenCtxCreate"):
        CudaGpu(0, lambda target: {}, 8)


def test_a_cubin_that_the_driver_refuses_is_a_fault_with_its_version(driver: FakeDriver) -> None:
    driver.fail["cuModuleLoadData"] = Status.CUDA_ERROR_NOT_FOUND
    with pytest.raises(
        GpuFault, match=r"all: cuModuleLoadData: CUDA_ERROR_NOT_FOUND .* CUDA 13\.2"
    ):
        opened(driver)


def test_a_gpu_that_is_too_old_is_a_fault(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPE, "COMPUTE_CAPABILITY_MAJOR", 7)
    with pytest.raises(GpuFault, match=r"Emulated has compute capability 7\.0: 8\.0 is needed"):
        opened(driver)


def test_bindings_that_know_no_part_of_a_device_are_a_fault(driver: FakeDriver) -> None:
    driver.CUdevResourceType = SimpleNamespace()  # type: ignore[misc]
    with pytest.raises(GpuFault, match="CU_DEV_RESOURCE_TYPE_SM"):
        CudaGpu(0, lambda target: {}, 8)


def test_memory_is_counted_as_the_driver_maps_it_and_limited(driver: FakeDriver) -> None:
    gpu = opened(driver)
    gpu.bytes_max = 5 << 20
    small, large = gpu.allocate(1000), gpu.allocate((2 << 20) + 1)
    assert gpu.used == 1000 + (4 << 20)
    with pytest.raises(MemoryError, match="2048 KiB beyond the limit of 5 MiB"):
        gpu.allocate(1 << 20)
    gpu.free(large)
    gpu.free(small)
    assert gpu.used == 0


def test_what_was_copied_in_may_change_at_once(driver: FakeDriver) -> None:
    gpu = opened(driver)
    values = np.arange(5000, dtype=np.int32)
    with Arrays(gpu) as arrays:
        array = arrays.put(values)
        values[:] = 0
        assert array.read().tolist() == list(range(5000))
        empty = np.empty(0, np.int32)
        gpu.copy_in(array.address, empty)
        gpu.copy_out(array.address, empty)


def test_what_is_copied_aside_is_there_after_a_join(driver: FakeDriver) -> None:
    gpu = opened(driver)
    with Arrays(gpu) as arrays:
        array, values = arrays.zeros(np.int32, 3000), np.arange(3000, dtype=np.int32)
        gpu.copy_aside(array.address, values[:300])
        values[:300] = -1
        assert array.read().tolist() == [0] * 3000
        gpu.join()
        assert array.read()[:301].tolist() == [*range(300), 0]
        gpu.copy_aside(array.address, values)  # more than the pinned memory holds
        gpu.join()
        assert array.read().tolist() == values.tolist()


def test_a_copy_aside_waits_for_earlier_ones_only(driver: FakeDriver) -> None:
    """Not for those behind the last fork, which wait for a step that is being computed."""
    gpu, values = opened(driver), np.arange(1200, dtype=np.int32)  # 4,800 bytes
    with Arrays(gpu) as arrays:
        array, other = arrays.zeros(np.int32, 1200), arrays.zeros(np.int32, 500)
        gpu.synchronize()
        waits = driver.calls.count("cuStreamSynchronize")
        for _ in range(3):
            gpu.copy_in(other.address, values[:10])  # a step
            gpu.fork()
            gpu.copy_aside(array.address, values[:500])
            assert len(driver.queues[1]) > 0  # the step goes on
        assert driver.calls.count("cuStreamSynchronize") == waits
        assert driver.calls.count("cuEventSynchronize") == 1  # for the first one's memory
        gpu.fork()
        gpu.copy_aside(array.address, values)  # more than there is
        gpu.join()
        assert array.read().tolist() == values.tolist()


@pytest.mark.parametrize("can_register", [True, False])
def test_fetched_arrays_are_filled_by_one_wait(driver: FakeDriver, can_register: bool) -> None:
    if not can_register:
        driver.fail["cuMemHostRegister"] = Status.CUDA_ERROR_NO_DEVICE
    gpu = opened(driver)
    with Arrays(gpu) as arrays:
        values = np.arange(600, dtype=np.int32)
        array, pinned, other = arrays.put(values), np.zeros(900, np.int32), np.zeros(600, np.int32)
        gpu.synchronize()
        gpu.pin(pinned)
        gpu.fetch(array.address, pinned[100:700])
        gpu.fetch(array.address, other[:200])
        gpu.fetch(array.address + 800, other[200:250])
        waits = driver.calls.count("cuStreamSynchronize")
        assert not pinned.any()
        assert not other.any()
        gpu.synchronize()
        assert driver.calls.count("cuStreamSynchronize") == waits + 1
        assert pinned.tolist() == [0] * 100 + [*range(600)] + [0] * 200
        assert other.tolist() == [*range(250)] + [0] * 350
    assert gpu.used == 0


def test_no_memory_is_a_memory_error_and_the_device_goes_on(driver: FakeDriver) -> None:
    gpu = opened(driver)
    driver.fail["cuMemAlloc"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(MemoryError):
        gpu.allocate(1)
    driver.fail.clear()
    gpu.free(gpu.allocate(1))
    assert gpu.free_bytes() == 1 << 29


def test_an_allocation_may_be_empty(driver: FakeDriver) -> None:
    gpu = opened(driver)
    gpu.free(gpu.allocate(0))
    assert gpu.used == 0


def test_other_failures_are_faults(driver: FakeDriver) -> None:
    gpu = opened(driver)
    with pytest.raises(GpuFault, match="no kernel none"):
        gpu.launch("none", (1, 1, 1), 32, [])
    with pytest.raises(GpuFault, match="take_rows: 6 parameters, not 1"):
        gpu.launch("take_rows", (1, 1, 1), 32, [1])
    gpu.launch("take_rows", (1, 1, 1), 32, [8, 1, 8, 1, 8, 1])  # no such memory
    with pytest.raises(GpuFault, match="cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.synchronize()
    driver.fail["cuInit"] = Status.CUDA_ERROR_NO_DEVICE
    with pytest.raises(GpuFault, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        opened(driver)


def test_a_fault_of_a_launch_is_not_a_kernel_that_lacks(driver: FakeDriver) -> None:
    gpu = opened(driver)
    driver.fail["cuModuleGetFunction"] = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(GpuFault, match="cuModuleGetFunction: CUDA_ERROR_ILLEGAL_ADDRESS"):
        gpu.launch("take_rows", (1, 1, 1), 32, [8, 1, 8, 1, 8, 1])
    driver.fail["cuModuleGetFunction"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(MemoryError):
        gpu.launch("take_rows", (1, 1, 1), 32, [8, 1, 8, 1, 8, 1])


def test_what_fails_while_it_is_captured_is_raised(driver: FakeDriver) -> None:
    gpu = opened(driver)
    driver.fail["cuMemAlloc"] = driver.fail["cuStreamEndCapture"] = (
        Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    )
    with pytest.raises(GpuFault, match="cuMemAlloc: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        gpu.capture(lambda: gpu.free(gpu.allocate(1)))
    driver.fail.clear()
    assert gpu.capture(lambda: None)


def test_seconds_are_the_mean_of_replays(driver: FakeDriver) -> None:
    gpu = opened(driver)
    with Arrays(gpu) as arrays:
        x = arrays.put(np.ones(4, np.float32))
        y, at = arrays.zeros(np.float32, 4), arrays.zeros(np.int32, 1)
        arguments = [x.address, 4, at.address, 4, y.address, 4]
        run = lambda: gpu.launch("take_rows", (1, 1, 1), 32, arguments)  # noqa: E731
        assert gpu.seconds(run, 3) == 0.002
        assert y.read().tolist() == [1, 1, 1, 1]
    assert driver.calls.count("cuGraphLaunch") == 4


def test_a_graph_repeats_launches_and_no_copies(driver: FakeDriver) -> None:
    gpu = opened(driver)
    with Arrays(gpu) as arrays:
        x, at = arrays.put(np.ones(4, np.float32)), arrays.zeros(np.int32, 1)
        y = arrays.zeros(np.float32, 4)
        arguments = [x.address, 4, at.address, 4, y.address, 4]
        graph = gpu.capture(lambda: gpu.launch("take_rows", (1, 1, 1), 32, arguments))
        assert y.read().tolist() == [0] * 4
        for value in (2, 3):
            gpu.copy_in(x.address, np.full(4, value, np.float32))
            graph.replay()
            assert y.read().tolist() == [value] * 4
        graph.close()
        for copy in (gpu.copy_in, gpu.fetch):
            with pytest.raises(GpuFault, match="a copy in what is captured"):
                gpu.capture(lambda copy=copy: copy(x.address, np.zeros(4, np.float32)))
        assert x.read().tolist() == [3] * 4
    assert driver.calls.count("cuGraphExecDestroy") == 1


@pytest.mark.parametrize(
    ("shared", "percent"), [(228 << 10, 57), (164 << 10, 80), (100 << 10, 100)]
)
def test_all_kernels_prefer_the_same_shared_memory(
    driver: FakeDriver,
    pool: kernels.Pool,
    monkeypatch: pytest.MonkeyPatch,
    shared: int,
    percent: int,
) -> None:
    monkeypatch.setitem(SHAPE, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", shared)
    cases()["quantise"](opened(driver), pool, np.random.default_rng(3))
    assert driver.shares == {"quantise": percent, "norm_quantise": percent}
    driver.fail["cuFuncSetAttribute"] = Status.CUDA_ERROR_NOT_FOUND  # it is a wish
    cases()["quantise"](opened(driver), pool, np.random.default_rng(3))


def test_a_launch_begins_early_behind_a_launch_only(driver: FakeDriver) -> None:
    gpu = opened(driver)
    with Arrays(gpu) as arrays:
        x, at = arrays.put(np.ones(4, np.float32)), arrays.zeros(np.int32, 1)
        y = arrays.zeros(np.float32, 4)
        arguments = [x.address, 4, at.address, 4, y.address, 4]

        def run(times: int = 2) -> list[bool]:
            driver.launches.clear()
            for _ in range(times):
                gpu.launch("take_rows", (1, 1, 1), 32, arguments)
            return [is_early for _, is_early in driver.launches]

        host, pinned = np.zeros(4, np.float32), np.zeros(4, np.float32)
        gpu.pin(pinned)
        graph = gpu.capture(run)
        assert [is_early for _, is_early in driver.launches] == [False, True]
        for between in (
            lambda: gpu.copy_in(x.address, host),
            lambda: gpu.fetch(y.address, host),
            lambda: gpu.fetch(y.address, pinned),
            gpu.join,
            graph.replay,
        ):
            run()
            between()
            assert run(3) == [False, True, True]
        gpu.begins_early = False
        assert run(3) == [False, False, False]


@pytest.mark.parametrize(("major", "version"), [(8, 13020), (9, 12020)])
def test_devices_and_drivers_that_cannot_begin_early(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, major: int, version: int
) -> None:
    assert opened(driver).begins_early
    monkeypatch.setitem(SHAPE, "COMPUTE_CAPABILITY_MAJOR", major)
    driver.version = version
    assert not opened(driver).begins_early


def test_the_cpu_path_does_not_import_cuda() -> None:
    code = "import sys, service.cli.main, batchengine.lanes.worker; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert not {name for name in loaded.stdout.split() if name.split(".")[0] == "cuda"}


@pytest.fixture(scope="module")
def device() -> CudaGpu:
    try:
        return CudaGpu(0, lambda target: cubins(target, Path(ROOT) / "build/cuda"))
    except GpuFault as fault:
        pytest.skip(f"no GPU: {fault}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases())
def test_cases_on_a_device(device: CudaGpu, pool: kernels.Pool, name: str) -> None:
    for seed in range(4):
        cases()[name](device, pool, np.random.default_rng([seed, *name.encode()]))
