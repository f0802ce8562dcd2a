"""A libcuda.so.1 whose functions are those of a FakeDriver: what cuda-bindings loads and calls.

It tests types, orders and numbers of arguments and results of the installed cuda-bindings, which a
FakeDriver alone does not know. One process has one, before it imports cuda.bindings.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kernels
from bench.cuda import first
from bench.cuda.arrays import Arrays
from bench.cuda.cases import cases
from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import GpuFault
from tests.kernels.cuda.fake_driver import SHAPE, FakeDriver, Status

SOURCE = r"""
#include <stddef.h>
#include <string.h>
static struct { const char* name; void* function; } table[99];
static int count;
void add(const char* name, void* function) {
    table[count].name = strdup(name);
    table[count++].function = function;
}
int cuGetProcAddress_v2(const char* name, void** to, int version, size_t flags, int* status) {
    *to = NULL;
    for (int i = 0; i < count; i++)
        if (strcmp(table[i].name, name) == 0) *to = table[i].function;
    if (status) *status = *to ? 0 : 1;
    return *to ? 0 : 500;
}
"""
HANDLE, INT, WORD, SIZE, ADDRESS, TEXT = c_void_p, c_int, c_uint, c_size_t, c_uint64, c_char_p
TO_HANDLE, TO_INT, TO_SIZE, TO_ADDRESS, TO_FLOAT = (
    POINTER(kind) for kind in (c_void_p, c_int, c_size_t, c_uint64, c_float)
)
# By cuda.h; a TO_... is a result.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (WORD,),
    "cuDriverGetVersion": (TO_INT,),
    "cuDeviceGet": (TO_INT, INT),
    "cuDeviceTotalMem": (TO_SIZE, INT),
    "cuDevicePrimaryCtxRetain": (TO_HANDLE, INT),
    "cuCtxSetCurrent": (HANDLE,),
    "cuGreenCtxCreate": (TO_HANDLE, HANDLE, INT, WORD),
    "cuCtxFromGreenCtx": (TO_HANDLE, HANDLE),
    "cuStreamCreate": (TO_HANDLE, WORD),
    "cuStreamSynchronize": (HANDLE,),
    "cuStreamWaitEvent": (HANDLE, HANDLE, WORD),
    "cuStreamBeginCapture": (HANDLE, INT),
    "cuStreamEndCapture": (HANDLE, TO_HANDLE),
    "cuEventCreate": (TO_HANDLE, WORD),
    "cuEventRecord": (HANDLE, HANDLE),
    "cuEventQuery": (HANDLE,),
    "cuEventSynchronize": (HANDLE,),
    "cuEventElapsedTime": (TO_FLOAT, HANDLE, HANDLE),
    "cuEventDestroy": (HANDLE,),
    "cuMemAlloc": (TO_ADDRESS, SIZE),
    "cuMemFree": (ADDRESS,),
    "cuMemGetInfo": (TO_SIZE, TO_SIZE),
    "cuMemHostAlloc": (TO_HANDLE, SIZE, WORD),
    "cuMemHostRegister": (HANDLE, SIZE, WORD),
    "cuMemcpyHtoDAsync": (ADDRESS, HANDLE, SIZE, HANDLE),
    "cuMemcpyDtoHAsync": (HANDLE, ADDRESS, SIZE, HANDLE),
    "cuModuleLoadData": (TO_HANDLE, HANDLE),
    "cuModuleGetFunction": (TO_HANDLE, HANDLE, TEXT),
    "cuFuncGetParamInfo": (HANDLE, SIZE, TO_SIZE, TO_SIZE),
    "cuFuncSetAttribute": (HANDLE, INT, INT),
    "cuGraphInstantiateWithFlags": (TO_HANDLE, HANDLE, ctypes.c_ulonglong),
    "cuGraphLaunch": (HANDLE, HANDLE),
    "cuGraphExecDestroy": (HANDLE,),
    "cuGraphDestroy": (HANDLE,),
}
ALIASES = {"cuGraphInstantiateWithFlags": "cuGraphInstantiate"}
ATTRIBUTES = {16: "MULTIPROCESSOR_COUNT"} | {
    75: "COMPUTE_CAPABILITY_MAJOR",
    76: "COMPUTE_CAPABILITY_MINOR",
    81: "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
}
FOREVER: list[Any] = []  # what the library calls
RESOURCE_BYTES = 144  # of a CUdevResource
SM_TYPE, SM_COUNT_AT = 1, 96  # its type is the first word; smCount


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes, here its first word."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_int), ("rest", c_int * 15))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    )


class CDriver:
    """The library, loaded; it stays so until the process ends."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self._driver = driver
        self._objects: list[Any] = [None]  # by handle, for what is not an integer
        source, library = folder / "driver.c", folder / "libcuda.so.1"
        source.write_text(SOURCE)
        flags = ["-shared", "-fPIC", "-x", "c", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([str(COMPILER), *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        for name, kinds in FUNCTIONS.items():
            self._add(name, kinds, lambda *given, n=name, k=kinds: self._called(n, k, given))
        self._add("cuDeviceGetName", (HANDLE, INT, INT), self._name)
        self._add("cuDeviceGetAttribute", (TO_INT, INT, INT), self._attribute)
        self._add("cuDeviceGetDevResource", (INT, HANDLE, INT), self._resource)
        split = TO_HANDLE, POINTER(c_uint), HANDLE, HANDLE, WORD, WORD
        self._add("cuDevSmResourceSplitByCount", (HANDLE, *split[1:]), self._split)
        self._add("cuDevResourceGenerateDesc", (TO_HANDLE, HANDLE, WORD), self._describe)
        self._add("cuLaunchKernelEx", (POINTER(LaunchConfig), HANDLE, HANDLE, HANDLE), self._launch)

    def _add(self, name: str, kinds: tuple[Any, ...], call: Any) -> None:
        function = ctypes.CFUNCTYPE(c_int, *kinds)(call)
        FOREVER.append(function)
        self._library.add(name.encode(), ctypes.cast(function, c_void_p))

    def _called(self, name: str, kinds: tuple[Any, ...], given: tuple[Any, ...]) -> int:
        """A function whose results come first or last, as the FakeDriver gives them."""
        outs = [to for kind, to in zip(kinds, given, strict=True) if kind in OUTS]
        ins = [
            self._object(x) if kind is HANDLE and name not in RAW else x or 0
            for kind, x in zip(kinds, given, strict=True)
            if kind not in OUTS
        ]
        try:
            status, *values = getattr(self._driver, ALIASES.get(name, name))(*ins)
        except BaseException as error:
            print(f"{name}: {error!r}", flush=True)
            return 999
        if status is Status.CUDA_SUCCESS:
            for to, value in zip(outs, values, strict=False):
                to[0] = value if isinstance(value, int | float) else self._handle(value)
        return int(status.value)

    def _handle(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1 << 32

    def _object(self, handle: int | None) -> Any:
        index = (handle or 0) >> 32
        return self._objects[index] if index and index < len(self._objects) else handle or 0

    # -- what has structures or text

    def _name(self, to: int, n: int, device: int) -> int:
        name = self._driver.cuDeviceGetName(n, device)[1].rstrip()
        ctypes.memmove(to, name, len(name))  # what is behind it stays as it is
        return 0

    def _attribute(self, to: Any, attribute: int, device: int) -> int:
        to[0] = SHAPE[ATTRIBUTES[attribute]]
        return 0

    def _put(self, at: int, count: int) -> None:
        ctypes.memset(at, 0, RESOURCE_BYTES)
        c_int.from_address(at).value = SM_TYPE
        c_uint.from_address(at + SM_COUNT_AT).value = count

    def _count(self, at: int) -> SimpleNamespace:
        assert c_int.from_address(at).value == SM_TYPE
        return SimpleNamespace(
            sm=SimpleNamespace(smCount=c_uint.from_address(at + SM_COUNT_AT).value)
        )

    def _resource(self, device: int, to: int, kind: int) -> int:
        assert kind == SM_TYPE
        self._put(to, self._driver.cuDeviceGetDevResource(device, kind)[1].sm.smCount)
        return 0

    def _split(self, to: int, groups: Any, every: int, rest: int, flags: int, least: int) -> int:
        assert groups[0] == 1
        _, parts, _, left = self._driver.cuDevSmResourceSplitByCount(
            1, self._count(every), flags, least
        )
        self._put(to, parts[0].sm.smCount)
        if rest:
            self._put(rest, left.sm.smCount)
        return 0

    def _describe(self, to: Any, resources: int, count: int) -> int:
        described = self._driver.cuDevResourceGenerateDesc([self._count(resources)], count)[1]
        to[0] = self._handle(described)
        return 0

    def _launch(self, config: Any, kernel: int, parameters: int, extra: int | None) -> int:
        """As `_called`, from a structure."""
        given = config.contents
        attributes = [given.attrs[i] for i in range(given.numAttrs)]
        fields = {
            **{f"gridDim{axis}": n for axis, n in zip("XYZ", given.grid, strict=True)},
            **{f"blockDim{axis}": n for axis, n in zip("XYZ", given.block, strict=True)},
            "hStream": given.hStream or 0,
            "attrs": [
                SimpleNamespace(
                    id=one.id,
                    value=SimpleNamespace(programmaticStreamSerializationAllowed=one.value),
                )
                for one in attributes
            ],
        }
        assert given.sharedMemBytes == 0
        config = SimpleNamespace(**fields)
        (status,) = self._driver.cuLaunchKernelEx(
            config, self._object(kernel), parameters, extra or 0
        )
        return int(status.value)


OUTS = (TO_HANDLE, TO_INT, TO_SIZE, TO_ADDRESS, TO_FLOAT)
RAW = ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemHostRegister")


def main(folder: Path) -> None:
    """Everything that CudaGpu calls, through cuda-bindings."""
    driver = FakeDriver(Emulator(compile_kernels(ROOT / "build/simt")))
    CDriver(driver, folder)
    pool = kernels.Pool(1)
    for most, context in ((0, "whole"), (30, "context: green, 32 multiprocessors")):
        gpu = CudaGpu(0, lambda target: {"all": target.encode()}, most)
        assert (gpu.facts.name, driver.context) == ("Emulated", context)
        for name in ("quantise", "linear q4_0"):
            cases()[name](gpu, pool, np.random.default_rng(3))
        assert first.contact(gpu, pool) == []
        marked = gpu.mark()
        marked.wait()
        assert marked.is_passed
        with Arrays(gpu) as arrays:
            values = np.arange(8, dtype=np.float32)
            x, y = arrays.put(values), arrays.zeros(np.float32, 8)
            arguments = [x.address, 8, arrays.zeros(np.int32, 1).address, 8, y.address, 8]
            run = partial(gpu.launch, "take_rows", (1, 1, 1), 32, arguments)
            graph = gpu.capture(run)
            assert not y.read().any()
            graph.replay()
            pinned = np.zeros(8, np.float32)
            gpu.pin(pinned)
            gpu.copy_out(y.address, pinned)
            graph.close()
            assert pinned.tolist() == values.tolist()
            driver.launches.clear()
            run()
            run()
            assert [is_early for _, is_early in driver.launches] == [False, True]
            assert gpu.seconds(run, 3) == 0.002  # the driver says 6 ms
            gpu.copy_aside(x.address, -values)
            gpu.join()
            assert x.read().tolist() == (-values).tolist()
        assert gpu.free_bytes() == 1 << 29
        driver.fail["cuMemAlloc"] = Status.CUDA_ERROR_OUT_OF_MEMORY
        with pytest.raises(MemoryError):
            gpu.allocate(1)
        driver.fail.clear()
        gpu.launch("take_rows", (1, 1, 1), 32, [8, 1, 8, 1, 8, 1])  # no such memory
        with pytest.raises(GpuFault, match="cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
            gpu.synchronize()
    driver.fail["cuModuleLoadData"] = Status.CUDA_ERROR_NOT_FOUND
    with pytest.raises(GpuFault, match=r"CUDA_ERROR_NOT_FOUND \(the driver is of CUDA 13\.2"):
        CudaGpu(0, lambda target: {"all": target.encode()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print("called through cuda-bindings")
