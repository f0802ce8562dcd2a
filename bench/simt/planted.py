"""Kernels with one fault each (planted.cu), and what the emulator says of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from bench.cuda.arrays import Arrays
from bench.simt.emulator import Emulator, EmulatorFault

SOURCE = Path(__file__).parent / "planted.cu"
N = 64
SEEDS = (0, 1, 2, 3)
X = np.arange(1, N + 1, dtype=np.int32)
PLANTED = {
    "missing_barrier": "races|nothing has written",
    "missing_second_barrier": "races",
    "barrier_of_half": "ends while others wait|a thread has ended",
    "two_barriers": "at the barrier of line",
    "shuffle_of_half": "another collective|lanes that do not come",
    "smallest_of_half": "another collective|lanes that do not come",
    "shuffle_by_two_calls": "which other lanes reach by other calls",
    "barrier_by_two_calls": "which others reach by other calls",
    "out_of_bounds": "outside: 4 bytes at offset 256 of 256",
    "out_of_shared": "outside: 4 bytes at offset 252 of 252",
    "misaligned": "misaligned",
    "unwritten_shared": "shared memory that nothing has written",
    "unwritten_global": r"global memory that nothing has written, byte \d+",
    "two_writers": "races with thread",
    "word_of_bytes": "races with thread",
    "byte_of_a_word": "races with thread",
    "across_blocks": "races with thread",
    "no_wait_for_copy": "under way",
    "no_barrier_after_copy": "under way|nothing has written|races",
    "early_copy": "races|under way",
    "missing_warp_barrier": "nothing has written|races",
    "shuffle_for_barrier": "races|nothing has written",
    "number_of_no_byte": "a number of a byte is above 7",
    "count_and_write": "races",
    "no_dependency_wait": "ends without a dependency_wait",
    "read_before_wait": "before its dependency_wait",
    "wait_of_one": "before its dependency_wait",
    "prefetch_outside": "outside: 272 bytes at offset 0 of 256",
    "prefetch_misaligned": "not whole 16",
}


def outcome(gpu: Emulator, kernel: str, seed: int, blocks: int = 1) -> list[int]:
    """What the kernel writes for X, over 2 N zeros; N values behind them have no value. Raises
    EmulatorFault."""
    gpu.seed = seed
    with Arrays(gpu) as arrays:
        x, y = arrays.put(X), arrays.empty(np.int32, 3 * N)
        gpu.copy_in(y.address, np.zeros(2 * N, np.int32))
        gpu.launch(kernel, (blocks, 1, 1), N, [x.address, y.address])
        return y.read()[: 2 * N].tolist()


def is_caught(gpu: Emulator, kernel: str, seed: int) -> bool:
    """Whether the emulator finds the fault of a kernel of PLANTED, and names it."""
    try:
        outcome(gpu, kernel, seed, 2 if kernel == "across_blocks" else 1)
    except EmulatorFault as fault:
        text = str(fault)
        return text.startswith(kernel) and re.search(PLANTED[kernel], text) is not None
    return False
