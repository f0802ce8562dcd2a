"""The functions of `cuda.bindings.driver` that CudaGpu calls, over an emulated GPU.

Work that was queued on a stream happens when the stream is waited for, by the host or by another
stream, so that an early change of pinned memory is seen; a piece of it with each look at an event.
"""

from __future__ import annotations

import ctypes
import enum
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.simt.emulator import Emulator, EmulatorFault

SHAPE = {
    "MULTIPROCESSOR_COUNT": 132,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 << 10,
}
CARVEOUT = 9  # the attribute of a kernel that is the share of L1 that it prefers as shared memory


GRID_MAX = (1 << 31) - 1, 65535, 65535
PARTED_BY = 8  # multiprocessors of an H100
EARLY = 6  # the attribute of a launch that may begin before the one before it has ended


class Status(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


class Attributes:
    """`CUdevice_attribute`: each stands for itself."""

    def __getattr__(self, name: str) -> str:
        return name.removeprefix("CU_DEVICE_ATTRIBUTE_")


class FakeDriver:
    """`fail[name]` is the status of the next calls of a function. is_early: a wait for an event
    lets all queued work of its stream happen."""

    CUresult = Status
    CUdevice_attribute = Attributes()
    CUstreamCaptureMode = int
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=CARVEOUT
    )
    CUlaunchConfig = CUlaunchAttribute = CUlaunchAttributeValue = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=EARLY
    )

    def __init__(self, gpu: Emulator) -> None:
        self.gpu = gpu
        self.fail: dict[str, Status] = {}
        self.calls: list[str] = []
        self.context = ""  # the current one
        self.pinned: list[NDArray[np.uint8]] = []
        self.queues: dict[int, list[Callable[[], None]]] = {}  # by stream
        self.ended: dict[int, int] = {}  # pieces of work of a stream
        self.events: dict[int, tuple[int, int]] = {}  # stream, and its pieces before the event
        self.capturing: list[Callable[[], None]] = []
        self.version = 13020
        self.is_early = False
        self.launches: list[tuple[str, bool]] = []  # kernels; whether they may begin early
        self.shares: dict[str, int] = {}  # percent of shared memory that kernels prefer

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name], None
            given = getattr(self, "_" + name)(*arguments) if hasattr(type(self), "_" + name) else 0
            if isinstance(given, Status):
                return (given,) if given is Status.CUDA_SUCCESS else (given, None)
            return (Status.CUDA_SUCCESS, *given) if isinstance(given, tuple) else (Status(0), given)

        return call

    def _cuDriverGetVersion(self) -> int:
        return self.version

    def _cuDeviceGetName(self, n: int, device: int) -> bytes:
        return b"Emulated\0".ljust(n)  # what the bindings have behind the name

    def _cuDeviceTotalMem(self, device: int) -> int:
        return 1 << 30

    def _cuDeviceGetAttribute(self, attribute: str, device: int) -> int:
        return SHAPE[attribute]

    def _cuDevicePrimaryCtxRetain(self, device: int) -> str:
        return "whole"

    def _cuCtxSetCurrent(self, context: str) -> tuple[()]:
        self.context = context
        return ()

    def _cuDeviceGetDevResource(self, device: int, kind: int) -> SimpleNamespace:
        return SimpleNamespace(sm=SimpleNamespace(smCount=SHAPE["MULTIPROCESSOR_COUNT"]))

    def _cuDevSmResourceSplitByCount(
        self, groups: int, every: SimpleNamespace, flags: int, least: int
    ) -> tuple[list[SimpleNamespace], int, SimpleNamespace]:
        count = -(-least // PARTED_BY) * PARTED_BY
        rest = every.sm.smCount - count
        parts = [SimpleNamespace(sm=SimpleNamespace(smCount=n)) for n in (count, rest)]
        return parts[:1], groups, parts[1]

    def _cuDevResourceGenerateDesc(self, resources: list[SimpleNamespace], count: int) -> str:
        assert len(resources) == count
        return f"{resources[0].sm.smCount} multiprocessors"

    def _cuGreenCtxCreate(self, described: str, device: int, flags: int) -> str:
        return f"green, {described}"

    def _cuCtxFromGreenCtx(self, green: str) -> str:
        return f"context: {green}"

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return 1 << 29, 1 << 30

    def _cuMemHostAlloc(self, n_bytes: int, flags: int) -> int:
        self.pinned.append(np.zeros(n_bytes, np.uint8))
        return self.pinned[-1].ctypes.data

    def _cuMemAlloc(self, n_bytes: int) -> int | Status:
        return self.gpu.allocate(n_bytes) if n_bytes else Status.CUDA_ERROR_INVALID_VALUE

    def _cuMemFree(self, address: int) -> tuple[()]:
        for stream in self.queues:
            self._cuStreamSynchronize(stream)
        self.gpu.free(address)
        return ()

    def _cuMemcpyHtoDAsync(self, to: int, source: int, n: int, stream: int) -> tuple[()]:
        self.queues[stream].append(lambda: self.gpu.copy_in(to, memory(source, n)))
        return ()

    def _cuMemcpyDtoHAsync(self, to: int, source: int, n: int, stream: int) -> tuple[()]:
        self.queues[stream].append(lambda: self.gpu.copy_out(source, memory(to, n)))
        return ()

    def _cuStreamCreate(self, flags: int) -> int:
        stream = len(self.queues) + 1
        self.queues[stream], self.ended[stream] = [], 0
        return stream

    def _cuEventCreate(self, flags: int) -> int:
        self.events[len(self.events) + 1] = (0, 0)
        return len(self.events)

    def _cuEventRecord(self, event: int, stream: int) -> tuple[()]:
        self.events[event] = stream, self.ended[stream] + len(self.queues[stream])
        return ()

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[()]:
        of = self.events[event]
        if of[0]:
            self.queues[stream].append(lambda: self._run(*of))
        return ()

    def _cuEventQuery(self, event: int) -> Status:
        stream, end = self.events[event]
        if not stream or self.ended[stream] >= end:
            return Status.CUDA_SUCCESS
        done = self._ran(stream, self.ended[stream] + 1)
        return Status.CUDA_ERROR_NOT_READY if done is Status.CUDA_SUCCESS else done

    def _cuEventSynchronize(self, event: int) -> Status:
        stream, end = self.events[event]
        if self.is_early:
            end = self.ended[stream] + len(self.queues[stream])
        return self._ran(stream, end)

    def _ran(self, stream: int, end: int) -> Status:
        try:
            self._run(stream, end)
        except EmulatorFault:
            return Status.CUDA_ERROR_ILLEGAL_ADDRESS
        return Status.CUDA_SUCCESS

    def _run(self, stream: int, end: int) -> None:
        """Do the first `end` pieces of work of a stream, but for those that have ended."""
        while self.ended[stream] < end:
            self.ended[stream] += 1
            self.queues[stream].pop(0)()

    def _cuStreamSynchronize(self, stream: int) -> Status:
        return self._ran(stream, self.ended[stream] + len(self.queues[stream]))

    def _cuModuleGetFunction(self, module: str, name: bytes) -> str | Status:
        known = name.decode() in self.gpu.kernels()
        return name.decode() if known else Status.CUDA_ERROR_NOT_FOUND

    def _cuFuncGetParamInfo(self, kernel: str, index: int) -> tuple[int, int] | Status:
        with pytest.raises(EmulatorFault, match="parameters") as fault:
            self.gpu.launch(kernel, (1, 1, 1), 32, [])
        known = re.findall(r"(\d+) parameters", str(fault.value))
        return (8 * index, 8) if index < int(known[0]) else Status.CUDA_ERROR_NOT_FOUND

    def _cuFuncSetAttribute(self, kernel: str, attribute: int, value: int) -> tuple[()]:
        assert int(attribute) == CARVEOUT
        self.shares[kernel] = value
        return ()

    def _cuLaunchKernelEx(
        self, config: SimpleNamespace, kernel: str, parameters: int, extra: int
    ) -> tuple[()] | Status:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        if not all(0 < n <= most for n, most in zip(grid, GRID_MAX, strict=True)):
            return Status.CUDA_ERROR_INVALID_VALUE
        attributes = [
            (given.id, given.value.programmaticStreamSerializationAllowed)
            for given in getattr(config, "attrs", [])
        ]
        assert attributes in ([], [(EARLY, 1)])
        assert (config.blockDimY, config.blockDimZ, extra) == (1, 1, 0)
        self.launches.append((kernel, bool(attributes)))
        n = next(n for n in range(99) if isinstance(self._cuFuncGetParamInfo(kernel, n), Status))
        words = [
            int(memory(int(at), 8).view(np.uint64)[0])
            for at in memory(parameters, 8 * n).view(np.uint64)
        ]
        threads = config.blockDimX
        self.queues[config.hStream].append(lambda: self.gpu.launch(kernel, grid, threads, words))
        return ()

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[()]:
        self.capturing, self.queues[stream] = self.queues[stream], []
        return ()

    def _cuStreamEndCapture(self, stream: int) -> tuple[list[Callable[[], None]]]:
        captured, self.queues[stream] = self.queues[stream], self.capturing
        return (captured,)

    def _cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any]:
        return (graph,)

    def _cuGraphLaunch(self, graph: list[Callable[[], None]], stream: int) -> tuple[()]:
        self.queues[stream] += graph
        return ()

    def _cuEventElapsedTime(self, start: int, end: int) -> float:
        return 6.0


def memory(address: int, n: int) -> NDArray[np.uint8]:
    """`n` bytes of this process."""
    return np.frombuffer((ctypes.c_uint8 * n).from_address(address), np.uint8)
