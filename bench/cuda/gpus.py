"""The GPU of a bench: a device through the CUDA driver, or the emulator; and time on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.simt.emulator import ROOT, Emulator, compile_kernels
from kernels.cuda.compile import CompileUnit, cubins
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import Gpu

BUILD = ROOT / "build"
CUBINS = BUILD / "cuda"
WARM_S = 0.3


def open_gpu(
    emulated: bool,
    units: Sequence[CompileUnit],
    *,
    is_checked: bool = True,
    multiprocessors_max: int = 0,
) -> tuple[Gpu, dict[str, Any]]:
    """A GPU with the kernels of `units`, and what it is. Raises GpuFault and CompileError."""
    if emulated:
        sources = sorted({unit.source for unit in units})
        library = compile_kernels(BUILD / "simt", sources, is_checked=is_checked)
        return Emulator(library), {"name": "the emulator", "multiprocessors": 1}
    gpu = CudaGpu(0, lambda target: cubins(target, CUBINS, units), multiprocessors_max)
    facts = gpu.facts
    return gpu, {
        "name": facts.name,
        "memory_bytes": facts.memory_bytes,
        "multiprocessors": facts.multiprocessors,
        "target": facts.target,
    }


def wait(gpu: Gpu) -> None:
    """Return when everything that was launched has ended."""
    if isinstance(gpu, CudaGpu):
        gpu.synchronize()


def warm_up(gpu: Gpu, run: Callable[[], None]) -> None:
    """Repeat `run` until the clocks of a device have risen, which were low while it had no work."""
    end = time.monotonic() + WARM_S
    while isinstance(gpu, CudaGpu) and time.monotonic() < end:
        run()
        wait(gpu)


def seconds(gpu: Gpu, run: Callable[[], None], repeats: int) -> float:
    """Seconds of the launches of `run`, on the device: the least mean of three times `repeats`.

    `run` is called once before. It may not wait for the GPU.
    """
    run()
    wait(gpu)
    if isinstance(gpu, CudaGpu):
        return min(gpu.seconds(run, repeats) for _ in range(3))
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
