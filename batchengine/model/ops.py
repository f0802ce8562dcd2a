"""The operations of a lane: the kernels bound to one thread pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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

    def call_between(self, between: Callable[[], None]) -> None:
        """Call `between` after each operation from now on that may be long."""
        for name in ("linear", "linear_add", "linear_gated", "place_kv", "attend"):
            setattr(self, name, _then(getattr(self, name), between))


def _then(operation: Callable[..., None], between: Callable[[], None]) -> Callable[..., None]:
    def both(*arguments: Any) -> None:
        operation(*arguments)
        between()

    return both


def is_float(matrix: kernels.Matrix) -> bool:
    """Whether a matrix has unquantised weights, whose activations must keep their floats."""
    return matrix.kind in ("f16", "bf16", "f32")
