"""Every GPU kernel gives the bits of the CPU's, in any order of blocks and threads."""

from __future__ import annotations

import re

import numpy as np
import pytest

import kernels
from bench.cuda.cases import Differs, cases, compare, experts_case, linear_case
from bench.simt.emulator import KERNELS, Emulator
from kernels.cuda import experts, memory, products, recurrent

CASES = cases()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
)
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


def constants(source: str) -> dict[str, int]:
    text = (KERNELS / source).read_text()
    return {name: int(n) for name, n in re.findall(r"\b([A-Z_]+) = (\d+)[,;]", text)}


def test_launches_count_on_what_the_kernels_are_compiled_for() -> None:
    found = constants("linear.cu")
    assert found["FEW_WARPS"] == products.FEW_WARPS_MAX
    assert found["MANY_WARPS"] * products.WARP == products.MANY_THREADS
    assert found["MANY_WARPS"] == products.MANY_TILES
    some_and_many = products.SOME_TOKENS, products.MANY_TOKENS
    assert (found["SOME_TOKENS"], found["MANY_TOKENS"]) == some_and_many
    assert found["FEW_BLOCK_TOKENS"] == products.FEW_TOKENS == products.FEW_TOKENS_MAX // 2
    assert found["MANY_AT_ONCE"] == products.MANY_AT_ONCE
    assert constants("floats.cu")["SLOTS"] * products.TILE_ROWS == products.FLOAT_THREADS
    found = constants("experts.cu")
    assert found["THREADS_MAX"] == experts.EXPERTS_MAX
    assert found["PAIRS_MAX"] == experts.CHUNK_PAIRS_MAX
    assert constants("attention.cu")["NARROW_DIMS"] == memory.NARROW_DIMS
    found = constants("recurrent.cu")
    assert found["THREADS"] == recurrent.HEAD_THREADS
    assert found["CHANNEL_THREADS"] == recurrent.CHANNEL_THREADS
    assert found["GROUP_THREADS"] == recurrent.GROUP_THREADS_MAX
    assert found["FACTORS"] == recurrent.HEAD_FACTORS
    assert recurrent.COLUMNS == products.WARP


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x7F])
@pytest.mark.parametrize("kind", [kind for kind in kernels.KINDS if kind not in products.FLOATS])
def test_the_largest_sums_of_products_are_exact(
    gpu: Emulator, pool: kernels.Pool, kind: str, byte: int
) -> None:
    linear_case(gpu, pool, np.random.default_rng(byte), kind, (20, 256, 9), byte)


@pytest.mark.parametrize("kind", ["q4_0", "q6_k", "bf16"])
@pytest.mark.parametrize(
    ("counts", "columns"),
    [((5, 7, 3), 8), ((30, 6, 1), 8), ((50, 6, 2), 32), ((30, 5, 2), 16), ((60, 3, 2), 64)],
)
def test_portions_of_every_size(
    gpu: Emulator, pool: kernels.Pool, kind: str, counts: tuple[int, int, int], columns: int
) -> None:
    """Of a bank of few experts, so that a token count has portions that are full, and others."""
    assert experts.portion_columns(*counts) == columns
    gpu.seed = 1
    experts_case(gpu, pool, np.random.default_rng(columns), kind, counts)


@pytest.mark.parametrize("kind", ["q4_0", "f32"])
@pytest.mark.parametrize("widths", [(96, 32), (160, 96), (32, 2880), (2880, 32)])
def test_experts_of_widths_that_fill_no_span_or_segment(
    gpu: Emulator, pool: kernels.Pool, kind: str, widths: tuple[int, int]
) -> None:
    """Of few tokens and of more; 2,880 is the width of gpt-oss."""
    for counts in ((3, 8, 4), (20, 4, 4)):
        gpu.seed = sum(counts)
        experts_case(gpu, pool, np.random.default_rng([*counts, *widths]), kind, counts, widths)


@pytest.mark.parametrize(("n_expert", "n_used"), [(1, 1), (8, 1), (8, 2), (128, 8), (1024, 1024)])
def test_a_launch_has_a_block_for_every_portion(n_expert: int, n_used: int) -> None:
    """Most portions have pairs of as many experts as there can be, with full ones but for a pair
    more."""
    for tokens in (1, 2, 8, 9, 17, 64, 65, 200, 1000):
        pairs, columns = tokens * n_used, experts.portion_columns(tokens, n_expert, n_used)
        with_one = min(n_expert, pairs)
        full = (pairs - with_one) // columns
        assert experts.portions_max(pairs, n_expert, columns) == with_one + full
        assert tokens > products.FEW_TOKENS or columns == products.FEW_TOKENS
