"""Cases of operations on rows, value by value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kernels
from bench.cuda.cases.experts import Owned
from bench.cuda.cases.recurrent import some_rows
from bench.cuda.cases.values import F32, compare, one_nan, rows_of
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import Rows
from kernels.cuda.ops import CudaOps

EPS = 1e-6


class OnBoth:
    """Rows that operations of a GPU and of the CPU change alike."""

    def __init__(self, gpu: Owned, pool: kernels.Pool, before: F32) -> None:
        self.pool, self.tokens = pool, len(before)
        self._gpu, self._ops = gpu, CudaOps(gpu, pool)
        self.rows, self.want = self.put(before), rows_of(before)

    def put(self, values: F32) -> Rows:
        """A copy on the GPU."""
        rows = self._ops.make_rows(*values.shape)
        self._gpu.copy_in(rows.address, values)
        return rows

    def check(self, name: str, change: Callable[[CudaOps], None], want: Callable[[], None]) -> None:
        """Run both; raise Differs unless their rows are equal then."""
        change(self._ops)
        want()
        got = self._ops.read_rows(self.rows, self.tokens)
        compare(one_nan(got), one_nan(self.want.view(self.tokens)), name)

    def upload(self, vector: kernels.Vector) -> kernels.Vector:
        """A vector that the GPU has, too."""
        self._ops.upload(vector)
        return vector


def gates_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """`gate_rows` and `gate_add` of random rows; one gate for each value, or for several."""
    tokens, width = int(rng.integers(1, 9)), int(rng.integers(1, 700))
    x, gate, before = (some_rows(rng, tokens, width) for _ in range(3))
    share = np.ascontiguousarray(gate[:, :1])
    run = int(rng.choice([n for n in range(1, width + 1) if width % n == 0]))
    of_runs = np.ascontiguousarray(gate[:, : width // run])
    with Owned(gpu) as own:
        both = OnBoth(own, pool, before)
        given, gates, shares, runs = (both.put(of) for of in (x, gate, share, of_runs))
        both.check(
            "gate_rows",
            lambda ops: ops.gate_rows(gates, tokens, both.rows),
            lambda: kernels.gate_rows(pool, rows_of(gate), tokens, both.want),
        )
        both.check(
            "gate_rows of runs",
            lambda ops: ops.gate_rows(runs, tokens, both.rows),
            lambda: kernels.gate_rows(pool, rows_of(of_runs), tokens, both.want),
        )
        both.check(
            "gate_add",
            lambda ops: ops.gate_add(given, shares, tokens, both.rows),
            lambda: kernels.gate_add(pool, rows_of(x), rows_of(share), tokens, both.want),
        )


def values_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Rows of which columns are normed; times a factor, with a soft bound, through gelu, mixed with
    others, with others times a factor added, and of zeros."""
    tokens, group, groups = (int(n) for n in rng.integers(1, [9, 300, 5]))
    width, column = group * groups, int(rng.integers(0, 40))
    size = rng.choice([0.01, 1.0, 30.0])
    before, x = (some_rows(rng, tokens, width) * np.float32(size) for _ in range(2))
    factors = some_rows(rng, tokens, width + column + int(rng.integers(0, 9)))
    factor, cap = float(np.float32(rng.standard_normal())), float(rng.choice([0.5, 7.0, 30.0]))
    column_norm = rng.standard_normal(int(rng.integers(1, width + 1))).astype(np.float32)
    with Owned(gpu) as own:
        both = OnBoth(own, pool, before)
        columns = both.upload(kernels.Vector(column_norm))
        first = int(rng.integers(0, width - len(column_norm) + 1))
        both.check(
            "norm_columns",
            lambda ops: ops.norm_columns(first, columns, EPS, tokens, both.rows),
            lambda: kernels.norm_columns(pool, first, columns, EPS, tokens, both.want),
        )
        norm = both.upload(kernels.Vector(rng.standard_normal(group).astype(np.float32)))
        given, other = both.put(x), both.put(factors)
        both.check(
            "mix_inputs",
            lambda ops: ops.mix_inputs(given, factor, norm, EPS, tokens, both.rows),
            lambda: kernels.mix_inputs(pool, rows_of(x), factor, norm, EPS, tokens, both.want),
        )
        both.check(
            "cap_rows",
            lambda ops: ops.cap_rows(cap, tokens, both.rows),
            lambda: kernels.cap_rows(pool, cap, tokens, both.want),
        )
        both.check(
            "gelu_rows",
            lambda ops: ops.gelu_rows(other, column, tokens, both.rows),
            lambda: kernels.gelu_rows(pool, rows_of(factors), column, tokens, both.want),
        )
        both.check(
            "scale_rows",
            lambda ops: ops.scale_rows(factor, tokens, both.rows),
            lambda: kernels.scale_rows(pool, factor, tokens, both.want),
        )
        both.check(
            "scaled_add",
            lambda ops: ops.scaled_add(given, factor, tokens, both.rows),
            lambda: kernels.scaled_add(pool, rows_of(x), factor, tokens, both.want),
        )
        n = int(rng.integers(1, tokens + 1))
        both.check(
            "zero_rows",
            lambda ops: ops.zero_rows(n, both.rows),
            lambda: kernels.zero_rows(pool, n, both.want),
        )
