"""Memory for the state images of a model with recurrent layers, as the caller of a step has it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import kernels

CACHE_LINE = 64


class StateImages:
    """`count` images side by side, each 64-byte aligned; a fresh one has bytes of no float."""

    def __init__(self, shape: kernels.StateShape, count: int) -> None:
        self._bytes = shape.image_bytes  # whole cache lines
        raw = np.full(count * self._bytes + CACHE_LINE, 0xFF, np.uint8)
        start = -kernels.address_of(raw) % CACHE_LINE
        self._memory: NDArray[np.uint8] = raw[start : start + count * self._bytes]

    def address(self, index: int) -> int:
        """Where an image begins."""
        return kernels.address_of(self._memory) + index * self._bytes

    def image(self, index: int) -> bytes:
        """A copy of an image."""
        return self._memory[index * self._bytes : (index + 1) * self._bytes].tobytes()
