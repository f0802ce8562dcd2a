"""A GPU through the CUDA driver: one context, two streams, kernels by name from cubins.

Needs the extra `cuda` and a device. Nothing is imported before a `CudaGpu` is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.gpu import DeviceFacts, Gpu, GpuFault, Graph, KernelLaunch, Mark, words_of

STAGING_BYTES = 64 << 20  # pinned, for each stream: what copies use that have not ended
CHUNK_BYTES = 8 << 20  # the device reads one chunk while the next is written
ALIGNMENT = 256
BLOCK_BYTES = 2 << 20  # the driver maps memory by such blocks; what is far smaller shares one
NO_TIME = 2  # of an event: it measures none
CAPABILITY_MIN = 8, 0  # products of 32 bytes and copies in the background
# From these on a grid may begin while the launch before it ends, within a graph, too.
EARLY_CAPABILITY_MIN, EARLY_DRIVER_MIN = (9, 0), 12030
# Shared memory that a multiprocessor is asked to have for each kernel: enough for the most
# blocks of any. It changes its share of L1 only while it is idle, so kernels that asked for other
# shares would not begin before the one before has ended.
SHARED_BYTES = 132 << 10


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of a cubin, and its number of parameters."""

    function: Any
    parameters: int


class Fetched(NamedTuple):
    """What is copied to staging memory, from `at` to `end`, for a part of an array."""

    at: int
    end: int
    part: NDArray[np.uint8]


class Stream:
    """Copies in the order of their calls, through pinned memory of their own.

    That memory is a ring, and offsets into it only rise. `_next`: where the next copy begins.
    `_free`: every copy below it has ended.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.handle = call("cuStreamCreate", 1)  # it does not wait for the default stream
        self._address = int(call("cuMemHostAlloc", STAGING_BYTES, 0))
        memory = (ctypes.c_uint8 * STAGING_BYTES).from_address(self._address)
        self._staging = np.ctypeslib.as_array(memory)
        self._next = self._free = 0
        self._fetched = deque[Fetched]()
        self._events: list[Any] = []  # that no mark has
        self._points = deque[StreamMark]()  # see `add_point`
        self.follows_launch = False  # whether the last call was a launch of a kernel

    def copy_in(self, address: int, array: NDArray[np.generic]) -> None:
        """Copy a contiguous array to the device; it may be changed afterwards."""
        self.follows_launch = False
        for start, part in _chunks(array):
            at = self._room(part.size) % STAGING_BYTES
            self._staging[at : at + part.size] = part
            source = self._address + at
            self._call("cuMemcpyHtoDAsync", address + start, source, part.size, self.handle)

    def fetch(self, address: int, array: NDArray[np.generic]) -> None:
        """Fill a contiguous array by the end of `synchronize`, or of the wait for a later mark."""
        for start, part in _chunks(array):
            at = self._room(part.size)
            target = self._address + at % STAGING_BYTES
            self._call("cuMemcpyDtoHAsync", target, address + start, part.size, self.handle)
            self._fetched.append(Fetched(at, self._next, part))

    def synchronize(self) -> None:
        """Wait for everything that was called."""
        self._call("cuStreamSynchronize", self.handle)
        self._passed(self._next)

    def mark(self) -> StreamMark:
        """The point behind everything that was called so far."""
        self.follows_launch = False
        event = self._events.pop() if self._events else self._call("cuEventCreate", NO_TIME)
        self._call("cuEventRecord", event, self.handle)
        return StreamMark(self, event, self._next)

    def add_point(self) -> None:
        """A copy that finds no staging memory waits for copies up to the oldest of these points,
        instead of for all."""
        if self._next > (self._points[-1].end if self._points else self._free):
            self._points.append(self.mark())

    def is_passed(self, mark: StreamMark) -> bool:
        """Whether a mark is passed, before any wait for it."""
        return self._call("cuEventQuery", mark.event) is not None

    def wait(self, mark: StreamMark) -> None:
        """Wait for a mark, for the first time."""
        self._call("cuEventSynchronize", mark.event)
        self._events.append(mark.event)
        self._passed(mark.end)

    def _passed(self, end: int) -> None:
        """Copies that use staging memory before `end` have ended."""
        self._free = max(self._free, end)
        while self._fetched and self._fetched[0].end <= end:
            at, _, part = self._fetched.popleft()
            part[:] = self._staging[at % STAGING_BYTES :][: part.size]

    def _room(self, n_bytes: int) -> int:
        """Where `n_bytes` of staging memory begin, side by side, that no copy uses."""
        n_bytes = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        at = self._next
        if at % STAGING_BYTES + n_bytes > STAGING_BYTES:
            at += STAGING_BYTES - at % STAGING_BYTES
        while at + n_bytes - self._free > STAGING_BYTES and self._points:
            self._points.popleft().wait()
        if at + n_bytes - self._free > STAGING_BYTES:
            self.synchronize()
            self._free = at
        self._next = at + n_bytes
        return at


@dataclass(slots=True)
class StreamMark(Mark):
    """An event of a stream, and where its staging memory was used up to."""

    stream: Stream
    event: Any
    end: int
    was_waited: bool = False

    @property
    def is_passed(self) -> bool:
        return self.was_waited or self.stream.is_passed(self)

    def wait(self) -> None:
        """Wait for what was called before."""
        if not self.was_waited:
            self.stream.wait(self)
            self.was_waited = True


def _chunks(array: NDArray[np.generic]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    data = array.reshape(-1).view(np.uint8)
    for start in range(0, data.size, CHUNK_BYTES):
        yield start, data[start : start + CHUNK_BYTES]


@dataclass(frozen=True, slots=True)
class CudaGraph(Graph):
    """A graph that is ready to be launched on a stream."""

    call: Callable[..., Any]
    captured: Any
    instance: Any
    stream: Stream

    def replay(self) -> None:
        """Begin its launches."""
        self.stream.follows_launch = False
        self.call("cuGraphLaunch", self.instance, self.stream.handle)

    def close(self) -> None:
        """Give back what the driver holds for it."""
        self.call("cuGraphExecDestroy", self.instance)
        self.call("cuGraphDestroy", self.captured)


class CudaGpu(Gpu):
    """One device, for the thread that made it. Every failure but of memory is a GpuFault.

    begins_early: a launch behind a launch may begin while that one ends (programmatic dependent
    launch); kernels wait for it before they touch what it writes (`dependency_wait` of gpu.h).
    """

    def __init__(
        self,
        index: int,
        cubins_for: Callable[[str], Mapping[str, bytes]],
        multiprocessors_max: int = 0,
    ) -> None:
        """`cubins_for`: the cubins for a target. `multiprocessors_max`: how many of the device's
        are used, rounded up to what the driver can part; 0 = all. Raises GpuFault if there is no
        such device."""
        super().__init__()
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise GpuFault(f"{error}: install batchengine[cuda]") from error
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", index)
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxSetCurrent", self._context)
        self.facts = self._facts_of(device)
        if self.facts.capability < CAPABILITY_MIN:
            has = "{}.{}".format(*self.facts.capability)
            raise GpuFault(f"{self.facts.name} has compute capability {has}: 8.0 is needed")
        if 0 < multiprocessors_max < self.facts.multiprocessors:
            self._take_part(device, multiprocessors_max)
        self._stream, self._aside = Stream(self._call), Stream(self._call)
        self._event = self._call("cuEventCreate", NO_TIME)
        version = int(self._call("cuDriverGetVersion"))
        self.begins_early = (
            self.facts.capability >= EARLY_CAPABILITY_MIN and version >= EARLY_DRIVER_MIN
        )
        self._launch_config, self._early_config = self._config(), self._config(is_early=True)
        most = self._attribute(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        self._shared_percent = min(100, 100 * SHARED_BYTES // most)
        cubins = cubins_for(self.facts.target)
        self._modules = [self._load(name, cubin) for name, cubin in cubins.items()]
        self._kernels: dict[str, Kernel] = {}
        self._may_copy = True
        self._pinned: list[tuple[int, int]] = []  # first and end of what `_kept` holds
        self._kept: list[NDArray[np.generic]] = []

    def _load(self, name: str, cubin: bytes) -> Any:
        try:
            return self._call("cuModuleLoadData", cubin)
        except GpuFault as fault:
            version = self._call("cuDriverGetVersion")
            of = f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}"
            raise GpuFault(f"{name}: {fault} ({of}; NVRTC may be of a later one)") from fault

    def _take_part(self, device: Any, multiprocessors_max: int) -> None:
        """Make a green context current, whose launches use some multiprocessors only. No setting
        of the device changes: others use all of them meanwhile."""
        try:
            kind = self._driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            flag = self._driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        except AttributeError as error:
            raise GpuFault(f"cuda-bindings knows no part of a device: {error}") from error
        every = self._call("cuDeviceGetDevResource", device, kind)
        split = self._call("cuDevSmResourceSplitByCount", 1, every, 0, multiprocessors_max)
        part = split[0][0]  # groups, their number, and what remains
        described = self._call("cuDevResourceGenerateDesc", [part], 1)
        green = self._call("cuGreenCtxCreate", described, device, int(flag))
        self._context = self._call("cuCtxFromGreenCtx", green)
        self._call("cuCtxSetCurrent", self._context)
        self.facts = replace(self.facts, multiprocessors=int(part.sm.smCount))

    def _config(self, *, is_early: bool = False) -> Any:
        """What launches have in common. is_early: see `begins_early`."""
        config = self._driver.CUlaunchConfig()
        config.blockDimY = config.blockDimZ = 1
        config.hStream = self._stream.handle
        if is_early:
            ids, attribute = self._driver.CUlaunchAttributeID, self._driver.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value = self._driver.CUlaunchAttributeValue()
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def _attribute(self, device: Any, name: str) -> int:
        key = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", key, device))

    def _facts_of(self, device: Any) -> DeviceFacts:
        def attribute(name: str) -> int:
            return self._attribute(device, name)

        name: bytes = self._call("cuDeviceGetName", 256, device)
        return DeviceFacts(
            name.partition(b"\0")[0].decode(),
            int(self._call("cuDeviceTotalMem", device)),
            attribute("MULTIPROCESSOR_COUNT"),
            (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        """What a function of the driver returns beside its status; None: what was asked for has not
        happened yet."""
        try:
            status, *values = getattr(self._driver, name)(*arguments)
        except Exception as error:  # no driver library; an argument that is none of the driver's
            raise GpuFault(f"{name}: {error}") from error
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return None
        self._check(name, status)
        return values[0] if len(values) == 1 else values

    def _check(self, name: str, status: Any) -> None:
        """Raise what a status of a function is, unless it is success."""
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(name)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise GpuFault(f"{name}: {getattr(status, 'name', status)}")

    # -- memory

    def taken_by(self, n_bytes: int) -> int:
        """Bytes of the device that an allocation takes: of large ones whole blocks."""
        return n_bytes if n_bytes < BLOCK_BYTES // 2 else -(-n_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def _allocate(self, n_bytes: int) -> int:
        return int(self._call("cuMemAlloc", max(1, n_bytes)))  # the driver refuses 0

    def _free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def free_bytes(self) -> int:
        """Memory of the device that is free."""
        return int(self._call("cuMemGetInfo")[0])

    def copy_in(self, address: int, array: NDArray[np.generic]) -> None:
        """Copy a contiguous array to the device, through pinned memory."""
        self._check_copy()
        self._stream.copy_in(address, array)

    def copy_aside(self, address: int, array: NDArray[np.generic]) -> None:
        """As `copy_in`, on a stream of its own."""
        self._aside.copy_in(address, array)

    def fork(self) -> None:
        """Every `copy_aside` from now on comes after what was called so far."""
        self._stream.follows_launch = False
        self._aside.add_point()
        self._call("cuEventRecord", self._event, self._stream.handle)
        self._call("cuStreamWaitEvent", self._aside.handle, self._event, 0)

    def join(self) -> None:
        """What is called from now on comes after every `copy_aside` so far."""
        self._stream.follows_launch = False
        self._call("cuEventRecord", self._event, self._aside.handle)
        self._call("cuStreamWaitEvent", self._stream.handle, self._event, 0)

    def fetch(self, address: int, array: NDArray[np.generic]) -> None:
        """Fill a contiguous array, through pinned memory unless it lies in an array of `pin`."""
        self._check_copy()
        self._stream.follows_launch = False
        at, n_bytes = array.ctypes.data, array.nbytes
        if any(first <= at and at + n_bytes <= end for first, end in self._pinned):
            self._call("cuMemcpyDtoHAsync", at, address, n_bytes, self._stream.handle)
        else:
            self._stream.fetch(address, array)

    def _check_copy(self) -> None:
        if not self._may_copy:
            raise GpuFault("a copy in what is captured")

    def pin(self, array: NDArray[np.generic]) -> None:
        """Let the device write to an array itself, if the driver can."""
        try:
            self._call("cuMemHostRegister", array.ctypes.data, array.nbytes, 0)
        except (GpuFault, MemoryError):
            return
        self._kept.append(array)
        self._pinned.append((array.ctypes.data, array.ctypes.data + array.nbytes))

    def synchronize(self) -> None:
        """Wait for everything that was called, but for `copy_aside`."""
        self._stream.synchronize()

    def mark(self) -> StreamMark:
        """The point behind everything that was called so far."""
        return self._stream.mark()

    # -- kernels

    def _launch(self, launch: KernelLaunch) -> None:
        kernel, blocks, threads, arguments = launch
        found = self._kernels.get(kernel) or self._find(kernel)
        if len(arguments) != found.parameters:
            raise GpuFault(f"{kernel}: {found.parameters} parameters, not {len(arguments)}")
        # The driver reads as many bytes of each word as the parameter has.
        words = words_of(arguments)
        pointers = words.ctypes.data + 8 * np.arange(len(words), dtype=np.uint64)
        is_early = self.begins_early and self._stream.follows_launch
        config = self._early_config if is_early else self._launch_config
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks
        config.blockDimX = threads
        self._call("cuLaunchKernelEx", config, found.function, pointers.ctypes.data, 0)
        self._stream.follows_launch = True

    def _find(self, kernel: str) -> Kernel:
        for module in self._modules:
            status, function = self._driver.cuModuleGetFunction(module, kernel.encode())
            if status == self._driver.CUresult.CUDA_ERROR_NOT_FOUND:
                continue
            self._check("cuModuleGetFunction", status)  # also the fault of an earlier launch
            parameters = 0
            while self._driver.cuFuncGetParamInfo(function, parameters)[0] == status:
                parameters += 1
            self._prefer_shared(function)
            return self._kernels.setdefault(kernel, Kernel(function, parameters))
        raise GpuFault(f"no kernel {kernel}")

    def _prefer_shared(self, function: Any) -> None:
        """Ask for SHARED_BYTES, which a driver may ignore."""
        of = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        with contextlib.suppress(GpuFault):
            self._call("cuFuncSetAttribute", function, of, self._shared_percent)

    # -- graphs

    def capture(self, run: Callable[[], None]) -> CudaGraph:
        """The launches of `run`; GpuFault if it copies something, which a replay would repeat."""
        self._may_copy = False
        try:
            return self._graph_of(run)
        finally:
            self._may_copy = True

    def _graph_of(self, run: Callable[[], None]) -> CudaGraph:
        stream = self._stream
        stream.follows_launch = False
        self._call("cuStreamBeginCapture", stream.handle, self._driver.CUstreamCaptureMode(0))
        try:
            run()
        except BaseException:
            with contextlib.suppress(GpuFault):  # what failed may have ended the capture, too
                self._call("cuGraphDestroy", self._captured())
            raise
        captured = self._captured()
        try:
            instance = self._call("cuGraphInstantiate", captured, 0)
        except BaseException:
            self._call("cuGraphDestroy", captured)
            raise
        return CudaGraph(self._call, captured, instance, stream)

    def _captured(self) -> Any:
        """The graph of what was captured; what follows is captured no more."""
        self._stream.follows_launch = False
        return self._call("cuStreamEndCapture", self._stream.handle)

    def seconds(self, run: Callable[[], None], repeats: int) -> float:
        """Seconds that the launches of `run` take on the device, the mean of `repeats` replays.

        The launches are captured in a graph, so that no time of the host is between them.
        """
        graph, stream = self._graph_of(run), self._stream.handle
        start, end = (self._call("cuEventCreate", 0) for _ in range(2))
        graph.replay()
        self._call("cuEventRecord", start, stream)
        for _ in range(repeats):
            graph.replay()
        self._call("cuEventRecord", end, stream)
        self.synchronize()
        milliseconds = float(self._call("cuEventElapsedTime", start, end))
        for event in (start, end):
            self._call("cuEventDestroy", event)
        graph.close()
        return milliseconds / 1000 / repeats
