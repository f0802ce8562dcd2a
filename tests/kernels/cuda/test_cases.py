"""Every GPU kernel gives the bits of the CPU's, in any order of blocks and threads."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kernels
from bench.cuda.cases import Differs, cases, compare, linear_case
from bench.simt.emulator import KERNELS, Emulator
from kernels.cuda import ops

CASES = cases()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_random_cases(gpu: Emulator, pool: kernels.Pool, name: str, seed: int) -> None:
    gpu.seed = seed
    CASES[name](gpu, pool, np.random.default_rng([seed, *name.encode()]))


def test_the_comparison_can_fail() -> None:
    a = np.array([0.0, 1.0], np.float32)
    compare(a, a.copy(), "same")
    with pytest.raises(Differs, match="1 of 8 bytes, first in element 0"):
        compare(a, np.array([-0.0, 1.0], np.float32), "signs of zero")
    with pytest.raises(Differs, match="8 bytes, not 4"):
        compare(a, a[:1], "sizes")


def test_launches_count_on_what_the_kernels_are_compiled_for() -> None:
    source = (KERNELS / "linear.cu").read_text()
    found = {name: int(n) for name, n in re.findall(r"\b([A-Z_]+) = (\d+)[,;]", source)}
    assert found["FEW_WARPS"] == ops.FEW_WARPS_MAX
    assert found["MANY_WARPS"] * ops.WARP == ops.MANY_THREADS
    assert found["MANY_WARPS"] == ops.MANY_TILES
    assert (found["SOME_TOKENS"], found["MANY_TOKENS"]) == (ops.SOME_TOKENS, ops.MANY_TOKENS)
    assert found["FEW_BLOCK_TOKENS"] == ops.FEW_TOKENS == ops.FEW_TOKENS_MAX // 2
    assert found["MANY_AT_ONCE"] == ops.MANY_AT_ONCE


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x7F])
@pytest.mark.parametrize("kind", [kind for kind in kernels.KINDS if kind not in ops.FLOATS])
def test_the_largest_sums_of_products_are_exact(
    gpu: Emulator, pool: kernels.Pool, kind: str, byte: int
) -> None:
    linear_case(gpu, pool, np.random.default_rng(byte), kind, (20, 256, 9), byte)
