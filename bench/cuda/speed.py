"""Speed of single kernels on a GPU, as shares of its ceilings.

`us` is the time on the device. `of_ceiling` is the least time over it: what is read and written at
the rate of a copy, or the operations at the ceiling of canonical products (of fp32 multiply-adds
for float matrices, of products alone for attention: three per pair of a query and a key), whichever
takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.arrays import Arrays
from bench.cuda.cases import random_page
from bench.cuda.gpus import seconds, warm_up
from bench.cuda.weights import RandomMatrices
from kernels.cuda.experts import ExpertPairs
from kernels.cuda.gpu import Gpu
from kernels.cuda.ops import CudaOps
from kernels.cuda.products import FLOATS

Row = dict[str, float]
Ceilings = Mapping[str, float]

TOKENS, TINY_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048), (1, 20)
LINEAR, TINY_LINEAR = (14336, 4096), (64, 256)  # rows, columns
# Experts, those of a token, n_embd, n_ff; and how many layers of them take turns.
EXPERTS, TINY_EXPERTS = (128, 8, 2048, 768), (6, 2, 256, 256)
EXPERT_LAYERS = 2
COLD_BYTES = 512 << 20  # of matrices, or pages, that take turns, so that none stays in a cache
N_HEAD, N_KV, HEAD_DIM = 32, 8, 128
# Queries of an entry, context, entries.
DECODES, TINY_DECODES = ((1, 1024, 64), (1, 4096, 16), (1, 32768, 4)), ((1, 20, 1),)
PREFILLS, TINY_PREFILLS = ((512, 512, 1), (512, 4096, 1), (512, 32768, 1)), ((2, 20, 1),)
EPS, ROPE_BASE = 1e-6, 10000.0
IDLE_S = 0.1  # without work, after which a device may have lowered its clocks


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
        self._ended = 0.0  # monotonic time of the last measurement

    def _seconds(self, run: Callable[[], None]) -> float:
        """`gpus.seconds` with five repeats, of a device whose clocks have risen."""
        if time.monotonic() - self._ended > IDLE_S:
            warm_up(self._gpu, run)
        took_s = seconds(self._gpu, run, 5)
        self._ended = time.monotonic()
        return took_s

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
        self._gpu.copy_in(x.address, self._random(max(counts), cols))
        activations = ops.make_activations(max(counts), cols, kind in FLOATS)
        found: dict[str, Row] = {}
        gops = self._ceilings["floats_gops" if kind in FLOATS else "epilogue_gops"]
        for tokens in counts:
            ops.quantise(x, tokens, activations)
            turns = matrices if tokens < 128 else matrices[:2]

            def run(tokens: int = tokens, turns: list[kernels.Matrix] = turns) -> None:
                for matrix in turns:
                    ops.linear(activations, [matrix], [None], tokens, out)

            took_s = self._seconds(run) / len(turns)
            n_bytes = one + tokens * (cols * (4 if kind in FLOATS else 1.25) + 4 * rows)
            operations = 2.0 * rows * cols * tokens
            gbps = self._ceilings["copy_gbps"]
            found[str(tokens)] = of_ceiling(took_s, n_bytes, operations, gbps, gops)
        return found

    def experts(self, kind: str) -> dict[str, Row]:
        """The launches of a feed-forward part of experts, by tokens, which choose at random.
        gated, add: of the least time to read the experts that are chosen."""
        n_expert, n_used, n_embd, n_ff = TINY_EXPERTS if self._tiny else EXPERTS
        counts = TINY_TOKENS if self._tiny else TOKENS
        ops, source = CudaOps(self._gpu, self._pool), RandomMatrices(self._pool)
        shapes = (n_expert * n_ff, n_embd), (n_expert * n_ff, n_embd), (n_expert * n_embd, n_ff)
        layers = [[source.make(kind, *shape) for shape in shapes] for _ in range(EXPERT_LAYERS)]
        n_selectors = 1 if self._tiny else COLD_BYTES // (4 * n_expert * n_embd)
        selectors = [source.make("f32", n_expert, n_embd) for _ in range(n_selectors)]
        for matrix in (*selectors, *[bank for banks in layers for bank in banks]):
            ops.upload(matrix)
        one = sum(bank.bytes for bank in layers[0]) / n_expert / len(shapes)  # matrix of an expert
        most = max(counts)
        x, logits, out = (ops.make_rows(most, width) for width in (n_embd, n_expert, n_embd))
        gathered, gated = (
            ops.make_activations(most * n_used, n_embd, False),
            ops.make_rows(most * n_used, n_ff),
        )
        gated_q8 = ops.make_activations(most * n_used, n_ff, False)
        self._gpu.copy_in(x.address, self._random(most, n_embd))
        normed = ops.make_activations(most, n_embd, False)
        ops.quantise(x, most, normed)
        found: dict[str, Row] = {}
        for tokens in counts:
            chosen = min(float(n_expert), tokens * n_used)
            n = 1 if self._tiny else max(2, -(-COLD_BYTES // int(chosen * one)))
            turns = [ops.make_expert_pairs(tokens, n_expert, n_used) for _ in range(n)]
            read = 0
            for pairs in turns:
                self._gpu.copy_in(logits.address, self._random(tokens, n_expert))
                ops.select_experts(logits, tokens, 1.0, pairs)
                read += len(np.unique(pairs.unpack()[0]))
            ops.gather_pairs(normed, turns[0], gathered)

            def select(tokens: int = tokens, turns: list[ExpertPairs] = turns) -> None:
                for selector, pairs in zip(selectors, cycle(turns), strict=False):
                    ops.linear(normed, [selector], [None], tokens, logits)
                    ops.select_experts(logits, tokens, 1.0, pairs)

            def gate(turns: list[ExpertPairs] = turns) -> None:
                for pairs, banks in zip(turns, cycle(layers), strict=False):
                    ops.pairs_gated(gathered, banks[0], banks[1], pairs, gated)
                    ops.quantise_pairs(gated, pairs, gated_q8)

            def add(turns: list[ExpertPairs] = turns) -> None:
                for pairs, banks in zip(turns, cycle(layers), strict=False):
                    ops.pairs_add(gated_q8, banks[2], pairs, out)

            rows = tokens * n_used
            values = rows * n_ff * 4.0 + tokens * n_embd * 1.25
            products = 2.0 * n_ff * n_embd * rows
            sizes = {
                "gated": (gate, 2 * one * read / n + values, 2 * products),
                "add": (add, one * read / n + rows * (n_ff * 1.25 + 8.0 * n_embd), products),
                # Last: it chooses others.
                "select": (select, 4.0 * n_expert * n_embd, 2.0 * n_expert * n_embd * tokens),
            }
            for what, (run, n_bytes, operations) in sizes.items():
                took_s = self._seconds(run) / (n_selectors if what == "select" else n)
                gbps = self._ceilings["copy_gbps"]
                gops = self._ceilings["floats_gops" if what == "select" else "epilogue_gops"]
                found[f"{tokens} {what}"] = of_ceiling(took_s, n_bytes, operations, gbps, gops)
        return found

    def _random(self, rows: int, width: int) -> NDArray[np.float32]:
        return self._rng.standard_normal((rows, width)).astype(np.float32)

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
        self._gpu.copy_in(qkv.address, self._random(tokens, width))
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

            took_s = self._seconds(run) / len(turns)
        pairs = sum(context - queries + i + 1 for i in range(queries)) * entries
        operations = 3.0 * 2 * pairs * HEAD_DIM * N_HEAD
        ceilings = self._ceilings
        gbps, gops = ceilings["copy_gbps"], ceilings["products_gops"]
        return of_ceiling(took_s, n_bytes, operations, gbps, gops)
