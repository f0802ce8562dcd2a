"""What the cases share: random values, results that are compared, activations on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.arrays import Arrays, DeviceArray
from bench.models.tensors import (
    BLOCK_BYTES,
    aligned,
    random_tensor,
    random_values,
    scale_bytes,
)
from kernels.cuda.products import GATE_OF

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
WARP = 32


class Differs(AssertionError):
    """A GPU kernel did not write the bits of the CPU."""


def compare(got: NDArray[Any], want: NDArray[Any], what: str) -> None:
    """Raise Differs unless both hold the same bytes."""
    left, right = (np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in (got, want))
    if left.size != right.size:
        raise Differs(f"{what}: {left.size} bytes, not {right.size}")
    if wrong := int(np.count_nonzero(left != right)):
        at = int(np.flatnonzero(left != right)[0]) // got.itemsize
        raise Differs(f"{what}: {wrong} of {left.size} bytes, first in element {at}")


def one_nan(values: F32) -> F32:
    """The values with one NaN: the bits of a NaN that an operation makes are the processor's own,
    and the denominator of a row that is not finite is one."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def some_activation(rng: np.random.Generator) -> tuple[str, float]:
    """An activation, and its limit, if it may have one: of a half of those."""
    activation = str(rng.choice([*GATE_OF, "relu2"]))
    has_limit = activation == "silu" and rng.random() < 0.5
    return activation, float(np.float32(rng.choice([0.3, 7.0, 40.0]))) if has_limit else 0.0


def rows_of(values: F32) -> kernels.Rows:
    """Rows of the CPU with these values."""
    rows = kernels.Rows(*values.shape)
    rows.view(len(values))[:] = values
    return rows


@dataclass(frozen=True, slots=True)
class Quantised:
    """Activations in memory of a GPU (activations.h); `values` are the fp32 rows."""

    q: DeviceArray
    scale: DeviceArray
    sums: DeviceArray
    values: DeviceArray

    @staticmethod
    def empty(arrays: Arrays, tokens: int, width: int) -> Quantised:
        spans = -(-width // 128)
        return Quantised(
            arrays.empty(np.int8, tokens, spans, 4, 4, 2, 4),  # t, block, half, k
            arrays.empty(np.float32, tokens, 4 * spans),
            arrays.empty(np.int32, tokens, 4 * spans),
            arrays.empty(np.float32, tokens, width),
        )

    @property
    def addresses(self) -> list[int]:
        return [a.address for a in (self.q, self.scale, self.sums)]

    def compare(self, want: kernels.Activations, what: str) -> None:
        """Raise Differs unless these are the activations of the CPU."""
        tokens, width = self.values.shape
        blocks = -(-width // 32)
        values, scales = (
            np.concatenate([np.frombuffer(x, kind) for x in part])
            for part, kind in zip(want.unpack(tokens), (np.int8, np.float32), strict=True)
        )
        q = self.q.read().transpose(0, 1, 3, 4, 2, 5).reshape(tokens, -1, 32)[:, :blocks]
        same = values.reshape(tokens, -1, 32)[:, :blocks]
        compare(q, same, f"{what}: q of {tokens} x {width}")
        scale = self.scale.read()[:, :blocks]  # NaN where the CPU has 1 in a row that it marks
        same = np.where(np.isnan(scale), np.float32(1), scale)
        compare(same, scales.reshape(tokens, -1)[:, :blocks], f"{what}: scales")
        sums = q.sum(axis=2, dtype=np.int32)
        compare(self.sums.read()[:, :blocks], sums, f"{what}: sums")


def some_values(rng: np.random.Generator, tokens: int, width: int) -> F32:
    """Rows with groups of ties, at times with a value that is not finite."""
    values = random_values(tokens, width, rng)
    for row in values:
        for first in range(0, width, 32):
            if rng.random() < 0.1:
                group = row[first : first + 32]
                group[:] = ties(rng, len(group), 126.75, float(rng.integers(64, 128)) / 256)
    if rng.random() < 0.3:
        bad = np.float32(rng.choice([np.nan, np.inf, -np.inf, 2.0**97]))
        values[rng.integers(tokens), rng.choice([0, width - 1, rng.integers(width)])] = bad
    return values


def ties(rng: np.random.Generator, n: int, largest: float, unit: float) -> F32:
    """Values that lie between two steps of their quantisation: (k + 1/2) units, after the largest
    one, which is `largest` units."""
    steps = (rng.integers(-126, 126, n) + 0.5).astype(np.float32)
    steps[0] = largest
    return steps * np.float32(unit)


def any_threads(rng: np.random.Generator, warps_max: int = 8) -> int:
    """Threads of a block."""
    return WARP * int(rng.integers(1, warps_max + 1))


def packed_with_bytes(
    pool: kernels.Pool,
    kind: str,
    rows: int,
    cols: int,
    rng: np.random.Generator,
    byte: int | None = None,
) -> tuple[kernels.Matrix, NDArray[np.uint8]]:
    """A random matrix, and its packed bytes. byte: of a quantised one, all but the scales."""
    tensor = random_tensor(kind, rows, cols, rng)
    if byte is not None:
        blocks = tensor.reshape(-1, BLOCK_BYTES[kind])
        blocks[:, ~scale_bytes(kind)] = byte
    buffer = aligned(kernels.packed_bytes(kind, rows, cols))
    kernels.pack(pool, kind, rows, cols, tensor, buffer)
    return kernels.Matrix(kind, rows, cols, buffer), buffer
