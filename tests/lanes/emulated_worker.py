"""A worker whose GPU is emulated.

Started by exec as `python -m tests.lanes.emulated_worker [PLAN] ...`. The index of the GPU says how
it fails: see `open_emulated`. With PLAN, a file, it fails as `plan_failure` has written there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import cast

from batchengine import errors
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.gpu.device import CudaDevice
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire
from bench.simt.emulator import ROOT, Emulator, compile_kernels
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import Gpu, GpuFault, KernelLaunch
from tests.kernels.cuda.fake_driver import FakeDriver

GOOD, FULL, ABSENT, WRONG, QUEUED = range(5)
FULL_SHARE = 2  # FULL has the memory that the lane may take, divided by this


ARGUMENTS = 6  # of a worker without a plan, with the program's name


def plan_failure(plan: Path, failure: str, launches: int) -> None:
    """Have the GPU fail after so many launches: `fault` and `memory` once; with `abort` the worker
    ends, and with `gone` no other one finds a GPU until the file is removed."""
    written = plan.with_suffix(".part")
    written.write_text(f"{failure} {launches}")
    written.replace(plan)


class LimitedGpu(Emulator):
    """An emulated GPU with so many bytes of memory."""

    def __init__(self, n_bytes: int, wrong: bool = False) -> None:
        super().__init__(compile_kernels(ROOT / "build/simt", is_checked=False))
        self._limit, self._wrong = n_bytes, wrong

    def allocate(self, n_bytes: int) -> int:
        if self.used + n_bytes > self._limit:
            raise MemoryError
        return super().allocate(n_bytes)

    def _launch(self, launch: KernelLaunch) -> None:
        given = launch.arguments
        if self._wrong and launch.kernel == "place_kv":  # another number of rotated values
            launch = launch._replace(arguments=[*given[:14], 0, *given[15:]])
        super()._launch(launch)


class PlannedGpu(LimitedGpu):
    """An emulated GPU whose failures are in a file. A failure lasts as long as the process."""

    def __init__(self, n_bytes: int, plan: Path) -> None:
        super().__init__(n_bytes)
        self._plan, self._failure, self._until = plan, "", 0

    def _launch(self, launch: KernelLaunch) -> None:
        if not self._failure and (found := _planned(self._plan)):
            self._failure, self._until = found
            if self._failure != "gone":
                self._plan.unlink()
        self._until -= 1
        if self._failure and self._until < 0:
            if self._failure == "memory":
                raise MemoryError
            if self._failure in ("gone", "abort"):
                os.abort()
            raise GpuFault("an illegal memory access was encountered")
        super()._launch(launch)


def _planned(plan: Path) -> tuple[str, int] | None:
    with contextlib.suppress(FileNotFoundError):
        failure, launches = plan.read_text().split()
        return failure, int(launches)
    return None


def open_emulated(
    resources: wire.CudaResources,
    cache_dir: Path,
    kinds: Collection[str],
    compiling: Callable[[], None],
    plan: Path | None = None,
) -> Gpu:
    """The GPU of an index: GOOD; FULL has less memory than the lane counts on; ABSENT is none;
    WRONG computes other numbers; QUEUED computes nothing before it is waited for."""
    if plan is not None:
        if (found := _planned(plan)) and found[0] == "gone":
            raise errors.GPU_UNUSABLE(index=resources.index, why="it has fallen off the bus")
        return PlannedGpu(resources.vram_bytes, plan)
    if resources.index == ABSENT:
        raise errors.GPU_UNUSABLE(index=resources.index, why="there is none")
    memory = resources.vram_bytes // (FULL_SHARE if resources.index == FULL else 1)
    if resources.index == QUEUED:
        fake = FakeDriver(LimitedGpu(memory))
        sys.modules["cuda.bindings.driver"] = cast(ModuleType, fake)
        return CudaGpu(QUEUED, lambda target: {"all": target.encode()})
    return LimitedGpu(memory, resources.index == WRONG)


if __name__ == "__main__":
    plan = Path(sys.argv.pop(1)) if len(sys.argv) > ARGUMENTS else None
    devices = {
        wire.CpuResources: CpuDevice,
        wire.CudaResources: partial(CudaDevice, partial(open_emulated, plan=plan)),
    }
    main(partial(Worker, devices=devices))
