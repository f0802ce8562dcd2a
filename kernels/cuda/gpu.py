"""The interface of a GPU: memory, copies and launches, by address and by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class KernelLaunch(NamedTuple):
    """A kernel by name, its grid, the threads of a block, and its arguments in order."""

    kernel: str
    blocks: tuple[int, int, int]
    threads: int
    arguments: Sequence[Argument]


class Graph(Protocol):
    """Launches that were captured."""

    @abstractmethod
    def replay(self) -> None:
        """Begin them again, with the same arguments."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""


class Mark(Protocol):
    """A point in the order of calls."""

    @property
    @abstractmethod
    def is_passed(self) -> bool:
        """Whether everything that was called before has ended: `wait` returns at once."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for everything that was called before, but for `copy_aside`: each `fetch` has filled
        its array. What was called since may go on."""


class Gpu(ABC):
    """One device. Copies and launches take effect in the order of their calls, but for those of
    `copy_aside`; the host waits in `synchronize`, `copy_out` and `Mark.wait` only.

    used: bytes that are allocated, and bytes_max: how many may be. freed: allocations that have
    ended.
    """

    facts: DeviceFacts

    def __init__(self) -> None:
        self.used = self.freed = 0
        self.bytes_max = 1 << 62
        self._sizes: dict[int, int] = {}

    def allocate(self, n_bytes: int) -> int:
        """The address of `n_bytes` of any value, aligned to 256. Raises MemoryError."""
        taken = self.taken_by(n_bytes)
        if self.used + taken > self.bytes_max:
            raise MemoryError(f"{taken >> 10} KiB beyond the limit of {self.bytes_max >> 20} MiB")
        address = self._allocate(n_bytes)
        self._sizes[address] = n_bytes
        self.used += taken
        return address

    def taken_by(self, n_bytes: int) -> int:
        """Bytes of the device that an allocation takes."""
        return n_bytes

    def free(self, address: int) -> None:
        """End an allocation, when what was called before has ended."""
        self._free(address)
        self.used -= self.taken_by(self._sizes.pop(address))
        self.freed += 1

    def copy_out(self, address: int, array: NDArray[np.generic]) -> None:
        """Fill a contiguous array from memory of the device, and wait for it."""
        self.fetch(address, array)
        self.synchronize()

    def launch(
        self,
        kernel: str,
        blocks: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Run a kernel of kernels/cuda/src. Its failure may be raised by a later call."""
        self._launch(KernelLaunch(kernel, blocks, threads, arguments))

    @abstractmethod
    def _allocate(self, n_bytes: int) -> int: ...

    @abstractmethod
    def _free(self, address: int) -> None: ...

    @abstractmethod
    def copy_in(self, address: int, array: NDArray[np.generic]) -> None:
        """Copy a contiguous array to memory of the device; it may be changed afterwards."""

    @abstractmethod
    def copy_aside(self, address: int, array: NDArray[np.generic]) -> None:
        """As `copy_in`, at any time between the last `fork` and the next `join`."""

    @abstractmethod
    def fork(self) -> None:
        """Every `copy_aside` from now on comes after what was called so far."""

    @abstractmethod
    def join(self) -> None:
        """What is called from now on comes after every `copy_aside` so far."""

    @abstractmethod
    def fetch(self, address: int, array: NDArray[np.generic]) -> None:
        """Fill a contiguous array from memory of the device, by the end of `synchronize`, or of the
        `wait` of a later mark."""

    @abstractmethod
    def pin(self, array: NDArray[np.generic]) -> None:
        """`fetch` often fills this array, or parts of it. It is kept."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that was called, but for `copy_aside`."""

    @abstractmethod
    def mark(self) -> Mark:
        """The point behind everything that was called so far."""

    @abstractmethod
    def _launch(self, launch: KernelLaunch) -> None: ...

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Graph:
        """The launches of `run`, which begin with `Graph.replay` only; it may not copy anything.
        Raises MemoryError."""
