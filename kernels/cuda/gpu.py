"""The interface of a GPU: memory, copies and launches, by address and by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Argument = int | float  # an integer or an address; a float is passed as binary32


class GpuFault(Exception):
    """The device failed, or a launch is impossible: nothing that it holds can be used again."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device is."""

    name: str
    memory_bytes: int
    multiprocessors: int
    capability: tuple[int, int]

    @property
    def target(self) -> str:
        """What to compile for."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def words_of(arguments: Sequence[Argument]) -> NDArray[np.uint64]:
    """Each argument of a launch in the low bytes of a word."""
    words = np.zeros(len(arguments), np.uint64)
    for i, argument in enumerate(arguments):
        if isinstance(argument, float):
            words[i] = np.float32(argument).view(np.uint32)
        else:
            words[i] = argument & (1 << 64) - 1
    return words


class Gpu(Protocol):
    """One device. Copies and launches take effect in the order of their calls."""

    facts: DeviceFacts

    @abstractmethod
    def allocate(self, n_bytes: int) -> int:
        """The address of `n_bytes` of any value, aligned to 256. Raises MemoryError."""

    @abstractmethod
    def free(self, address: int) -> None:
        """End an allocation."""

    @abstractmethod
    def copy_in(self, address: int, array: NDArray[np.generic]) -> None:
        """Copy a contiguous array to memory of the device; it may be changed afterwards."""

    @abstractmethod
    def copy_out(self, address: int, array: NDArray[np.generic]) -> None:
        """Fill a contiguous array from memory of the device, after what was called before."""

    @abstractmethod
    def launch(
        self,
        kernel: str,
        blocks: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Run a kernel of kernels/cuda/src."""
