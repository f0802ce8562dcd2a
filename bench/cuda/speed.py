"""Speed of single kernels on a GPU, as shares of its ceilings.

`us` is the time on the device. `of_ceiling` is the least time over it: what is read and written at
the rate of a copy, or the operations at the ceiling of canonical products (of fp32 multiply-adds
for float matrices, of products alone for attention: three per pair of a query and a key), whichever
takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import kernels
from bench.cuda.arrays import Arrays
from bench.cuda.cases import random_page
from bench.cuda.gpus import seconds
from bench.cuda.weights import RandomMatrices
from kernels.cuda.gpu import Gpu
from kernels.cuda.ops import FLOATS, CudaOps

Row = dict[str, float]
Ceilings = Mapping[str, float]

TOKENS, TINY_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048), (1, 20)
LINEAR, TINY_LINEAR = (14336, 4096), (64, 256)  # rows, columns
COLD_BYTES = 512 << 20  # of matrices, or pages, that take turns, so that none stays in a cache
N_HEAD, N_KV, HEAD_DIM = 32, 8, 128
# Queries of an entry, context, entries.
DECODES, TINY_DECODES = ((1, 1024, 64), (1, 4096, 16), (1, 32768, 4)), ((1, 20, 1),)
PREFILLS, TINY_PREFILLS = ((512, 512, 1), (512, 4096, 1), (512, 32768, 1)), ((2, 20, 1),)
EPS, ROPE_BASE = 1e-6, 10000.0


def of_ceiling(took_s: float, n_bytes: float, operations: float, gbps: float, gops: float) -> Row:
    """A row of the result."""
    least_s = max(n_bytes / gbps, operations / gops) / 1e9
    return {
        "us": round(took_s * 1e6, 2),
        "gbps": round(n_bytes / took_s / 1e9, 2),
        "gops": round(operations / took_s / 1e9, 2),
        "of_ceiling": round(least_s / took_s, 4),
    }


class Speeds:
    """Rows of one GPU, whose memory is not given back."""

    def __init__(self, gpu: Gpu, pool: kernels.Pool, ceilings: Ceilings, tiny: bool) -> None:
        self._gpu, self._pool, self._ceilings, self._tiny = gpu, pool, ceilings, tiny
        self._rng = np.random.default_rng(5)

    def linear(self, kind: str) -> dict[str, Row]:
        """Products of matrices of a kind, by tokens."""
        rows, cols = TINY_LINEAR if self._tiny else LINEAR
        counts = TINY_TOKENS if self._tiny else TOKENS
        one = kernels.packed_bytes(kind, rows, cols)
        ops = CudaOps(self._gpu, self._pool)
        source = RandomMatrices(self._pool)
        copies = 1 if self._tiny else -(-COLD_BYTES // one)
        matrices = [source.make(kind, rows, cols) for _ in range(copies)]
        for matrix in matrices:
            ops.upload(matrix)
        x, out = ops.make_rows(max(counts), cols), ops.make_rows(max(counts), rows)
        values = self._rng.standard_normal((max(counts), cols)).astype(np.float32)
        self._gpu.copy_in(x.address, values)
        activations = ops.make_activations(max(counts), cols, kind in FLOATS)
        found: dict[str, Row] = {}
        gops = self._ceilings["floats_gops" if kind in FLOATS else "epilogue_gops"]
        for tokens in counts:
            ops.quantise(x, tokens, activations)
            turns = matrices if tokens < 128 else matrices[:2]

            def run(tokens: int = tokens, turns: list[kernels.Matrix] = turns) -> None:
                for matrix in turns:
                    ops.linear(activations, [matrix], [None], tokens, out)

            took_s = seconds(self._gpu, run, 5) / len(turns)
            n_bytes = one + tokens * (cols * (4 if kind in FLOATS else 1.25) + 4 * rows)
            operations = 2.0 * rows * cols * tokens
            gbps = self._ceilings["copy_gbps"]
            found[str(tokens)] = of_ceiling(took_s, n_bytes, operations, gbps, gops)
        return found

    def attend(self) -> dict[str, Row]:
        """Attention of one layer: decoding and prefill, by entries, queries and context."""
        found: dict[str, Row] = {}
        shapes = (*TINY_DECODES, *TINY_PREFILLS) if self._tiny else (*DECODES, *PREFILLS)
        for queries, context, entries in shapes:
            row = self._attend(queries, context, entries)
            found[f"{entries} x {queries} of {context}"] = row
        return found

    def _attend(self, queries: int, context: int, entries: int) -> Row:
        shape = kernels.PageShape(1, N_KV, HEAD_DIM)
        n_pages, tokens = -(-context // kernels.PAGE_TOKENS), queries * entries
        ops: Any = CudaOps(self._gpu, self._pool)
        rope = kernels.RopeTable("neox", HEAD_DIM, HEAD_DIM, ROPE_BASE)
        ops.upload_rope(rope, context)
        width = (N_HEAD + 2 * N_KV) * HEAD_DIM
        qkv, out = ops.make_rows(tokens, width), ops.make_rows(tokens, N_HEAD * HEAD_DIM)
        n_bytes = float(shape.payload_bytes * context // kernels.PAGE_TOKENS * entries)
        turns = [
            ops.make_batch(tokens, entries, entries * n_pages)
            for _ in range(1 if self._tiny or queries > 1 else -(-COLD_BYTES // int(n_bytes)))
        ]
        held = ops.make_queries(tokens, N_HEAD, HEAD_DIM)
        rows = ops.make_kv_rows(tokens, shape)
        values = self._rng.standard_normal((tokens, width)).astype(np.float32)
        self._gpu.copy_in(qkv.address, values)
        page = random_page(shape, self._rng)
        table = np.array([[queries, context - queries, n_pages]] * entries, np.int32)
        with Arrays(self._gpu) as arrays:
            for batch in turns:
                pages = [arrays.put(page).address for _ in range(entries * n_pages)]
                batch.set(np.zeros(tokens, np.int32), table, np.array(pages, np.uint64))
                scale = HEAD_DIM**-0.5
                ops.place_kv(qkv, batch, shape, 0, N_HEAD, None, None, EPS, rope, scale, held, rows)

            def run() -> None:
                for batch in turns:
                    ops.attend(held, batch, shape, 0, out)

            took_s = seconds(self._gpu, run, 5) / len(turns)
        pairs = sum(context - queries + i + 1 for i in range(queries)) * entries
        operations = 3.0 * 2 * pairs * HEAD_DIM * N_HEAD
        ceilings = self._ceilings
        gbps, gops = ceilings["copy_gbps"], ceilings["products_gops"]
        return of_ceiling(took_s, n_bytes, operations, gbps, gops)
