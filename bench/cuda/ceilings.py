"""What a GPU does at most, measured on it: the ceilings that speeds of kernels are shares of.

`copy_gbps`: bytes read and written by a copy that no cache holds; `read_gbps`: bytes read.
`products_gops`: m16n8k32 products of bytes on the tensor cores. `steps_gops`: the same with the
float step of rule 2 after each block, as the rule writes it: three operations, the first of them a
conversion or an addition of the integer. `epilogue_gops` is the faster of the two, and the ceiling
of canonical products. `steps_scaled_gops`: the same step in two operations, as the kernels of kinds
of few bits have it. `floats_gops`: fp32 multiply-adds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.cuda.arrays import Arrays
from bench.cuda.gpus import seconds, warm_up
from kernels.cuda.gpu import Argument, Gpu

SOURCE = Path(__file__).with_name("ceilings.cu")
THREADS, WARPS, CHAINS = 256, 8, 8  # of a block, and of a warp: as in ceilings.cu
MMA_OPERATIONS = 2 * 16 * 8 * 32
BLOCKS_PER_MULTIPROCESSOR = 8
COPY_BYTES = 2 << 30  # far more than a cache holds
ROUNDS = 2000
TINY_COPY_BYTES, TINY_ROUNDS = 1 << 16, 4  # for the emulator


def measure(gpu: Gpu, multiprocessors: int, tiny: bool) -> dict[str, float]:
    """Every ceiling of a GPU that has the kernels of SOURCE."""
    blocks = multiprocessors * (1 if tiny else BLOCKS_PER_MULTIPROCESSOR)
    rounds, n_bytes = (TINY_ROUNDS, TINY_COPY_BYTES) if tiny else (ROUNDS, COPY_BYTES)
    found: dict[str, float] = {}
    with Arrays(gpu) as arrays:
        some = np.random.default_rng(1).integers(0, 256, min(n_bytes, 64 << 20), np.uint8)
        source = arrays.empty(np.uint8, n_bytes)
        for start in range(0, n_bytes, len(some)):
            gpu.copy_in(source.address + start, some)
        target = arrays.empty(np.uint8, n_bytes)

        def rate(kernel: str, work: float, arguments: list[Argument]) -> float:
            def run() -> None:
                gpu.launch(kernel, (blocks, 1, 1), THREADS, arguments)

            return work / seconds(gpu, run, 5) / 1e9

        out = arrays.empty(np.uint32, blocks, THREADS).address
        products = float(blocks * WARPS * CHAINS * rounds * MMA_OPERATIONS)
        warm_up(gpu, lambda: gpu.launch("ceiling_products", (blocks, 1, 1), THREADS, [rounds, out]))
        count = n_bytes // 16
        moved = [source.address, target.address, count]
        found["copy_gbps"] = rate("ceiling_copy", 2.0 * n_bytes, moved)
        found["read_gbps"] = rate("ceiling_read", n_bytes, [source.address, out, count])
        found["products_gops"] = rate("ceiling_products", products, [rounds, out])
        for way in ("converted", "added", "scaled"):
            arguments = [rounds, 0.01, 0.02, out]
            found[f"steps_{way}_gops"] = rate(f"ceiling_steps_{way}", products, arguments)
        floats = 2.0 * blocks * THREADS * 4 * CHAINS * rounds
        found["floats_gops"] = rate("ceiling_floats", floats, [rounds, 0.5, out])
    found["epilogue_gops"] = max(found["steps_converted_gops"], found["steps_added_gops"])
    return {name: round(value, 3) for name, value in found.items()}
