"""IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S and IQ1_M: rule 2 of docs/numerics.md, exactly.

The weights are those that the format's own library reads from the same bytes; divided by the
block's scale they are the integers of the rule. Every level must give these bits.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from bench.models.llama import values_of
from bench.models.tensors import BLOCK_BYTES, CODEBOOK_KINDS, put_scales, scale_bytes
from tests.kernels.test_linear import (
    GGUF_TYPES,
    assert_same_bits,
    chain,
    dequantised_by_library,
    in_segments,
    packed,
    product,
    quantised,
    random_tensor,
    random_values,
    unpacked,
)

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
UNIT = {"iq3_xxs": 2, "iq3_s": 1} | dict.fromkeys(CODEBOOK_KINDS[2:], 8)  # weights are n·d/this
FACTOR_MAX = {"iq1_s": 15, "iq1_m": 15}  # of other kinds 31
VALUE_MAX = {"iq3_xxs": 31, "iq3_s": 15, "iq1_s": 9, "iq1_m": 9}  # of other kinds 43


def scales_of(kind: str, tensor: U8) -> NDArray[np.float16]:
    """d of each block."""
    blocks = tensor.reshape(-1, BLOCK_BYTES[kind])
    if kind != "iq1_m":
        return blocks[:, :2].copy().view(np.float16)[:, 0]
    upper = blocks[:, 49::2].astype(np.uint16) >> 4
    bits = upper[:, 0] | upper[:, 1] << 4 | upper[:, 2] << 8 | upper[:, 3] << 12
    return bits.astype(np.uint16).view(np.float16)


def integers_of(kind: str, tensor: U8, rows: int) -> I64:
    """Of each weight the integer n in n·d/UNIT: its value with a d of 1, exactly."""
    with_one = tensor.copy()
    put_scales(kind, with_one.reshape(-1, BLOCK_BYTES[kind]), np.float16(1))
    cols = tensor.size // BLOCK_BYTES[kind] * 256 // rows
    values = dequantised_by_library(kind, with_one, rows, cols) * UNIT[kind]
    assert np.array_equal(values, np.rint(values))
    return values.astype(np.int64)


def check_rows(
    pool: k.Pool, kind: str, tensor: U8, rows: int, values: F32, cells: list[tuple[int, int]]
) -> None:
    """Every level gives the exact result for (row, token) in cells, and equal bits for the rest."""
    tokens, cols = values.shape
    matrix = packed(pool, kind, tensor, rows, cols)
    results: list[F32] = []
    for level in k.isa_levels():
        k.set_isa(level)
        results.append(product(pool, quantised(pool, values), matrix, tokens))
        assert_same_bits(results[-1], results[0], level)
    q, t = unpacked(quantised(pool, values), tokens)
    integers, d = integers_of(kind, tensor, rows), scales_of(kind, tensor).reshape(rows, -1)
    for row, token in cells:
        sums = (integers[row] * q[token]).reshape(-1, 32).sum(1)
        assert abs(sums).max() < 2**24
        steps = [
            (Fraction(int(sums[b])), Fraction(float(d[row, b // 8])) / UNIT[kind] * Fraction(scale))
            for b, scale in enumerate(t[token].tolist())
        ]
        want = chain(in_segments(steps, 32))
        assert Fraction(float(results[0][token, row])) == want, (row, token)


@pytest.mark.parametrize("kind", CODEBOOK_KINDS)
@pytest.mark.parametrize("tokens", [1, 4, 19])
def test_products_are_rule_2(pool: k.Pool, kind: str, tokens: int) -> None:
    """Two whole segments and a part, a ragged last tile."""
    rng = np.random.default_rng(tokens)
    tensor, values = random_tensor(kind, 50, 2304, rng), random_values(tokens, 2304, rng)
    cells = [(0, 0), (17, tokens - 1), (47, tokens // 2), (49, 0)]
    check_rows(pool, kind, tensor, 50, values, cells)


@pytest.mark.parametrize("kind", CODEBOOK_KINDS)
def test_sums_at_their_bounds_are_exact(pool: k.Pool, kind: str) -> None:
    """Activations of 127 have the signs of the largest weights of a block that a file may hold,
    beside d of 0, -0, the least and the largest number."""
    rng, rows = np.random.default_rng(1), 48
    tensor = random_tensor(kind, rows, 2048, rng)
    blocks = tensor.reshape(rows, -1, BLOCK_BYTES[kind])
    special = np.array([0.0, -0.0, 2.0**-24, -(2.0**-24), 65504.0, 1.0], np.float16)
    put_scales(kind, blocks, special[np.arange(rows) % 6][:, None])
    blocks[: rows // 2, :, ~scale_bytes(kind)] |= 0xF0  # the largest factors, of most kinds
    integers = integers_of(kind, tensor, rows)
    assert abs(integers).max() <= FACTOR_MAX.get(kind, 31) * VALUE_MAX.get(kind, 43)
    values = np.full((4, 2048), 127, np.float32)
    values[:2] *= np.sign(integers[[0, 5]])
    values[2] *= np.float32(2.0**80)
    values[3] *= np.float32(-(2.0**-96))
    check_rows(pool, kind, tensor, rows, values, [(row, row % 4) for row in range(rows)])


@pytest.mark.parametrize("kind", CODEBOOK_KINDS)
def test_every_entry_has_the_values_of_llama_cpp(pool: k.Pool, kind: str) -> None:
    """4,096 blocks of random bytes, so every entry and every scale; of llama.cpp's own C."""
    rng, rows, cols = np.random.default_rng(7), 256, 4096
    tensor = random_tensor(kind, rows, cols, rng)
    want = values_of(tensor.reshape(rows, -1), GGUF_TYPES[kind])
    out = k.Rows(rows, cols)
    k.embed(pool, packed(pool, kind, tensor, rows, cols), np.arange(rows, dtype=np.int32), out)
    assert_same_bits(out.view(rows).copy(), want)


@given(
    st.sampled_from(CODEBOOK_KINDS),
    st.integers(1, 67),
    st.integers(1, 6),
    st.integers(1, 37),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-24, 1e24]),
)
@settings(max_examples=40, deadline=None)
def test_levels_agree_on_any_bytes(
    kind: str, rows: int, superblocks: int, tokens: int, seed: int, size: float
) -> None:
    """Any bytes that a file may hold: of d only numbers."""
    rng, pool = np.random.default_rng(seed), k.Pool(1)
    tensor = rng.integers(0, 256, rows * superblocks * BLOCK_BYTES[kind], np.uint8)
    d = scales_of(kind, tensor)
    d[~np.isfinite(d)] = np.float16(0.01)
    put_scales(kind, tensor.reshape(-1, BLOCK_BYTES[kind]), d)
    matrix = packed(pool, kind, tensor, rows, 256 * superblocks)
    values = random_values(tokens, 256 * superblocks, rng) * np.float32(size)
    results: list[F32] = []
    before = k.isa()
    try:
        for level in k.isa_levels():
            k.set_isa(level)
            results.append(product(pool, quantised(pool, values), matrix, tokens))
    finally:
        k.set_isa(before)
    for level, got in zip(k.isa_levels(), results, strict=True):
        assert_same_bits(got, results[0], level)
