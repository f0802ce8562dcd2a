"""Cases of products of heads: their activations, their products with a bank, copies, transforms."""

from __future__ import annotations

import numpy as np

import kernels
from bench.cuda.cases.experts import BANK_VALUES, PAIR_VALUES, Owned, compare_finite
from bench.cuda.cases.values import compare, one_nan, packed_with_bytes, rows_of, some_values
from bench.models.tensors import SUPERBLOCK_KINDS
from kernels.cuda.gpu import Gpu
from kernels.cuda.ops import CudaOps
from kernels.cuda.products import FLOATS


def heads_case(
    gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator, kind: str, tokens: int | None = None
) -> None:
    """Random heads with a bank of `kind`, whose outputs lie apart at times; rows of heads copied
    between others. tokens: else a random number."""
    step = 256 if kind in SUPERBLOCK_KINDS else 32
    cols, rows = step * int(rng.integers(1, max(2, 161 // step))), 16 * int(rng.integers(1, 8))
    n_head = max(1, min(int(rng.integers(1, 23)), BANK_VALUES // (rows * cols)))
    n = tokens or int(np.exp(rng.uniform(0, np.log(150.5))))
    n = max(1, min(n, PAIR_VALUES // (rows * cols * n_head)))
    column, gap = (4 * int(rng.integers(0, 9)) for _ in range(2))
    run, is_apart = column + cols + gap, bool(rng.integers(2))
    to, stride = (int(rng.integers(0, 40)), rows + 3) if is_apart else (0, rows)
    width = to + n_head * stride + (int(rng.integers(0, 9)) if is_apart else 0)
    values, before = some_values(rng, n, n_head * run), rng.standard_normal((n, width))
    bank = packed_with_bytes(pool, kind, n_head * rows, cols, rng)[0]
    what = f"{kind}, {n} tokens, {n_head} heads, {rows} x {cols}, from {column} to {to} by {stride}"
    with Owned(gpu) as own:
        ops = CudaOps(own, pool)
        ops.upload(bank)
        x, out = ops.make_rows(*values.shape), ops.make_rows(n, width)
        want = rows_of(before.astype(np.float32))
        own.copy_in(x.address, values)
        own.copy_in(out.address, before.astype(np.float32))
        activations = ops.make_head_activations(n, n_head, cols, kind in FLOATS)
        on_cpu = kernels.HeadActivations(n, n_head, cols, kind in FLOATS)
        if rng.integers(2):
            ops.begin_heads(n)
        ops.quantise_heads(x, column, n, activations)
        kernels.quantise_heads(pool, rows_of(values), column, n, on_cpu)
        ops.linear_heads(activations, bank, n, out, to, stride)
        kernels.linear_heads(pool, on_cpu, bank, n, want, to, stride)
        compare_finite(ops.read_rows(out, n), want.view(n), f"linear_heads: {what}")
        to, stride = int(rng.integers(0, 40)), run + int(rng.integers(0, 9))
        copied = ops.make_rows(n, to + n_head * stride)
        own.copy_in(copied.address, np.zeros((n, copied.width), np.float32))
        want = kernels.Rows(n, copied.width)
        ops.copy_heads(x, n_head, n, copied, to, stride)
        kernels.copy_heads(pool, rows_of(values), n_head, n, want, to, stride)
        compare(ops.read_rows(copied, n), want.view(n), f"copy_heads: {what}")
        transform_case(own, ops, pool, rng, n)


def transform_case(
    gpu: Gpu, ops: CudaOps, pool: kernels.Pool, rng: np.random.Generator, tokens: int
) -> None:
    """Raise Differs unless the transforms of heads are those of the CPU."""
    n_head, width = int(rng.integers(1, 4)), 32 << int(rng.integers(0, 5))
    column = int(rng.integers(0, 40))
    run = column + width * int(rng.integers(1, kernels.HEAD_DIM_MAX // width + 1))
    values = some_values(rng, tokens, n_head * run)
    x, want = ops.make_rows(*values.shape), rows_of(values)
    gpu.copy_in(x.address, values)
    ops.transform_heads(x, n_head, column, width, tokens)
    kernels.transform_heads(pool, want, n_head, column, width, tokens)
    what = f"{tokens} tokens, {n_head} heads of {run}, {width} values from {column} on"
    compare(one_nan(ops.read_rows(x, tokens)), one_nan(want.view(tokens)), what)
