"""A worker whose GPU is emulated.

Started by exec as `python -m tests.lanes.emulated_worker ...`. The index of the GPU says how it
fails: see `open_emulated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from batchengine import errors
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.cuda import CudaDevice
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire
from bench.simt.emulator import ROOT, Emulator, compile_kernels
from kernels.cuda.gpu import Argument, Gpu, GpuFault

GOOD, LOSSY, FULL, ABSENT, WRONG = range(5)
LAUNCHES = 2000  # of LOSSY, after which it fails
FULL_SHARE = 2  # FULL has the memory that the lane may take, divided by this


class LimitedGpu(Emulator):
    """An emulated GPU with so many bytes of memory, on which so many launches succeed."""

    def __init__(self, n_bytes: int, launches: int, wrong: bool = False) -> None:
        super().__init__(compile_kernels(ROOT / "build/simt", is_checked=False))
        self._limit, self._launches, self._wrong = n_bytes, launches, wrong

    def allocate(self, n_bytes: int) -> int:
        if self.used + n_bytes > self._limit:
            raise MemoryError
        return super().allocate(n_bytes)

    def launch(
        self,
        kernel: str,
        blocks: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
    ) -> None:
        self._launches -= 1
        if self._launches < 0:
            raise GpuFault("an illegal memory access was encountered")
        if self._wrong and kernel == "place_kv":
            arguments = [*arguments[:14], 0, *arguments[15:]]  # another number of rotated values
        super().launch(kernel, blocks, threads, arguments)


def open_emulated(resources: wire.CudaResources, cache_dir: Path) -> Gpu:
    """The GPU of an index: GOOD; LOSSY fails after a while; FULL has less memory than the lane
    counts on; ABSENT is none; WRONG computes other numbers."""
    if resources.index == ABSENT:
        raise errors.GPU_UNUSABLE(index=resources.index, why="there is none")
    memory = resources.vram_bytes // (FULL_SHARE if resources.index == FULL else 1)
    launches = LAUNCHES if resources.index == LOSSY else 1 << 60
    return LimitedGpu(memory, launches, resources.index == WRONG)


if __name__ == "__main__":
    devices = {
        wire.CpuResources: CpuDevice,
        wire.CudaResources: partial(CudaDevice, open_emulated),
    }
    main(partial(Worker, devices=devices))
