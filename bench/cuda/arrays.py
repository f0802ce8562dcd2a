"""Arrays in memory of a GPU, freed together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kernels.cuda.gpu import Gpu, GpuFault


def free_all(gpu: Gpu, addresses: Iterable[int], error: BaseException | None) -> None:
    """End allocations. After an error a device that failed refuses it, and the error says more."""
    for address in addresses:
        with contextlib.suppress(GpuFault) if error else contextlib.nullcontext():
            gpu.free(address)


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array that lies in memory of a GPU."""

    gpu: Gpu
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self) -> NDArray[Any]:
        """A copy of its values now."""
        values = np.empty(self.shape, self.dtype)
        self.gpu.copy_out(self.address, values)
        return values


class Arrays:
    """Allocations of a `with` block."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._addresses: list[int] = []

    def __enter__(self) -> Arrays:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        free_all(self._gpu, self._addresses, error)

    def put(self, values: NDArray[Any]) -> DeviceArray:
        """A copy of an array."""
        values = np.ascontiguousarray(values)
        array = self.empty(values.dtype, *values.shape)
        self._gpu.copy_in(array.address, values)
        return array

    def zeros(self, dtype: DTypeLike, *shape: int) -> DeviceArray:
        """Zeros."""
        return self.put(np.zeros(shape, dtype))

    def empty(self, dtype: DTypeLike, *shape: int) -> DeviceArray:
        """Any values."""
        of = np.dtype(dtype)
        address = self._gpu.allocate(max(1, int(np.prod(shape)) * of.itemsize))
        self._addresses.append(address)
        return DeviceArray(self._gpu, address, shape, of)
