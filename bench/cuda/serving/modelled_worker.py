"""A worker whose GPU computes nothing, and takes as long for each step as it is given.

Started by exec as `python -m bench.cuda.serving.modelled_worker MODEL FILE ...`, where MODEL is
`BASE_MS,TOKEN_MS`: a step takes that, and so much more for each token. The host does for it what it
does for any GPU. FILE gets a line for each step of the GPU: its tokens, begin and end (s).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.gpu import device
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire
from kernels.cuda.gpu import DeviceFacts, Gpu, Graph, KernelLaunch, Mark

TOKEN = 7  # that is always sampled
SPIN_S = 0.0003  # before the end of a step, as the operating system wakes late
FACTS = DeviceFacts("a modelled GPU", 1 << 40, 132, (9, 0))


class ModelledStep(NamedTuple):
    """When the GPU computed a step."""

    tokens: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Replay(Graph):
    """Launches that are one call."""

    begin: Callable[[], None]

    def replay(self) -> None:
        """Begin them."""
        self.begin()

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class ModelledMark(Mark):
    """The end of a step."""

    end: float

    @property
    def is_passed(self) -> bool:
        return time.perf_counter() >= self.end

    def wait(self) -> None:
        """Wait for it."""
        while (left := self.end - time.perf_counter()) > 0:
            if left > SPIN_S:
                time.sleep(left - SPIN_S)


class ModelledGpu(Gpu):
    """Addresses without memory. A step begins when its first launch does, or when the one before it
    ends."""

    def __init__(self, base_ms: float, token_ms: float) -> None:
        super().__init__()
        self.facts = FACTS
        self.steps: list[ModelledStep] = []
        self._base_s, self._token_s = base_ms / 1000, token_ms / 1000
        self._free_at, self._next = 0.0, 256
        self._captured: list[KernelLaunch] | None = None

    def _allocate(self, n_bytes: int) -> int:
        address = self._next
        self._next += -(-n_bytes // 256) * 256
        return address

    def _free(self, address: int) -> None: ...

    def copy_in(self, address: int, array: NDArray[np.generic]) -> None:
        """Nothing is there."""

    def copy_aside(self, address: int, array: NDArray[np.generic]) -> None:
        """Nothing is there."""

    def fork(self) -> None:
        """Nothing is on its way."""

    def join(self) -> None:
        """Nothing is on its way."""

    def fetch(self, address: int, array: NDArray[np.generic]) -> None:
        """Finite rows, and one token for all."""
        if array.dtype == np.int32:
            array.fill(TOKEN)

    def pin(self, array: NDArray[np.generic]) -> None:
        """Nothing is copied."""

    def synchronize(self) -> None:
        """Wait for the end of the last step."""
        ModelledMark(self._free_at).wait()

    def mark(self) -> ModelledMark:
        """The end of the last step."""
        return ModelledMark(self._free_at)

    def _launch(self, launch: KernelLaunch) -> None:
        if self._captured is not None:
            self._captured.append(launch)
        elif launch.kernel == "embed":
            self._begin(launch.blocks[0])

    def _begin(self, tokens: int) -> None:
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + self._base_s + tokens * self._token_s
        self.steps.append(ModelledStep(tokens, begin, self._free_at))

    def capture(self, run: Callable[[], None]) -> Replay:
        """The launches of `run`."""
        captured = self._captured = []
        try:
            run()
        finally:
            self._captured = None
        (tokens,) = (launch.blocks[0] for launch in captured if launch.kernel == "embed")
        return Replay(partial(self._begin, tokens))


class ModelledDevice(device.CudaDevice):
    """A lane whose GPU is modelled."""

    def __init__(self, gpu: ModelledGpu, steps: Path) -> None:
        super().__init__(lambda *_: gpu)
        self._modelled, self._steps_path = gpu, steps

    def close(self) -> None:
        """Write when each step was computed."""
        super().close()
        rows = [f"{step.tokens} {step.begin:.6f} {step.end:.6f}\n" for step in self._modelled.steps]
        self._steps_path.write_text("".join(rows))


def read_steps(path: Path) -> list[ModelledStep]:
    """What a worker wrote."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return [ModelledStep(int(n), float(begin), float(end)) for n, begin, end in rows]


if __name__ == "__main__":
    base_ms, token_ms = map(float, sys.argv.pop(1).split(","))
    steps = Path(sys.argv.pop(1))
    device._self_test = lambda *_: None  # nothing is computed
    devices = {
        wire.CpuResources: CpuDevice,
        wire.CudaResources: lambda: ModelledDevice(ModelledGpu(base_ms, token_ms), steps),
    }
    main(partial(Worker, devices=devices))
