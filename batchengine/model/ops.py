"""The operations of a lane: the kernels bound to one thread pool."""

from __future__ import annotations

from functools import partial

import kernels


class CpuOps:
    """The kernels bound to one pinned thread pool; other kinds of lanes offer the same names."""

    def __init__(self, pool: kernels.Pool) -> None:
        self.pool = pool
        self.embed = partial(kernels.embed, pool)
        self.norm_quantise = partial(kernels.norm_quantise, pool)
        self.quantise = partial(kernels.quantise, pool)
        self.linear = partial(kernels.linear, pool)
        self.linear_add = partial(kernels.linear_add, pool)
        self.linear_gated = partial(kernels.linear_gated, pool)
        self.place_kv = partial(kernels.place_kv, pool)
        self.step_digests = partial(kernels.step_digests, pool)
        self.attend = partial(kernels.attend, pool)
        self.nonfinite_rows = partial(kernels.nonfinite_rows, pool)
        self.sample = partial(kernels.sample, pool)
        self.take_rows = kernels.take_rows


def is_float(matrix: kernels.Matrix) -> bool:
    """Whether a matrix has unquantised weights, whose activations must keep their floats."""
    return matrix.kind in ("f16", "bf16", "f32")
