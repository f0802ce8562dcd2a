"""Q5_0, Q5_1, IQ4_NL, IQ4_XS, Q2_K to Q5_K and MXFP4: rule 2 of docs/numerics.md, exactly.

The file blocks are decoded here from the byte layout alone. Expected outputs are chains of exact
fractions, each step rounded once; every level must give these bits.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from bench.models.tensors import SUPERBLOCK_KINDS, block_width, scale_bytes
from tests.kernels.test_linear import (
    BLOCK_BYTES,
    SCALES_AT,
    assert_same_bits,
    chain,
    dequantised_by_library,
    in_segments,
    packed,
    product,
    quantised,
    random_tensor,
    random_values,
    round_f32,
    unpacked,
)

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
KINDS = ("q5_0", "q5_1", "iq4_nl", "q4_k", "q5_k", "mxfp4", "iq4_xs", "q3_k", "q2_k")
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Group:
    """32 weights: value k is factor·integers[k]·d + minima[k / 16]·m."""

    def __init__(
        self,
        integers: list[int],
        d: Fraction,
        m: Fraction,
        factor: int = 1,
        minima: tuple[int, int] = (1, 1),
    ) -> None:
        self.integers, self.d, self.m = integers, d, m
        self.factor, self.minima = factor, minima


def half(raw: U8) -> Fraction:
    return Fraction(float(raw[:2].copy().view(np.float16)[0]))


def groups_of(kind: str, block: U8) -> list[Group]:
    """The groups of one file block."""
    raw = [int(byte) for byte in block]
    none = Fraction(0)
    nibbles = [byte & 15 for byte in raw[-16:]] + [byte >> 4 for byte in raw[-16:]]
    if kind == "mxfp4":
        power = Fraction(2) ** (raw[0] - 128) if raw[0] > 1 else none
        return [Group([MXFP4_TABLE[n] for n in nibbles], power, none)]
    d = half(block[SCALES_AT.get(kind, (0,))[0] :])
    if kind in ("q5_0", "q5_1", "iq4_nl"):
        if kind == "iq4_nl":
            return [Group([TABLE[n] for n in nibbles], d, none)]
        bits = int.from_bytes(bytes(raw[-20:-16]), "little")
        five = [n + 16 * (bits >> i & 1) for i, n in enumerate(nibbles)]
        if kind == "q5_0":
            return [Group([n - 16 for n in five], d, none)]
        return [Group(five, d, half(block[2:]))]
    if kind == "iq4_xs":
        high = raw[2] | raw[3] << 8
        runs = [raw[8 + 16 * j : 24 + 16 * j] for j in range(8)]
        scales = [
            (raw[4 + j // 2] >> 4 * (j % 2) & 15) + 16 * (high >> 2 * j & 3) - 32 for j in range(8)
        ]
        return [
            Group([TABLE[n & 15] for n in run] + [TABLE[n >> 4] for n in run], d, none, scale)
            for run, scale in zip(runs, scales, strict=True)
        ]
    if kind == "q3_k":
        low, high, packed_scales = raw[32:96], raw[:32], raw[96:108]
        scales = [
            (packed_scales[i % 8] >> 4 * (i // 8) & 15)
            + 16 * (packed_scales[8 + i % 4] >> 2 * (i // 4) & 3)
            - 32
            for i in range(16)
        ]
        weights = [
            (low[32 * (k // 128) + k % 32] >> 2 * (k // 32 % 4) & 3)
            - (0 if high[k % 32] >> k // 32 & 1 else 4)
            for k in range(256)
        ]
        scaled = [scales[k // 16] * weight for k, weight in enumerate(weights)]
        return [Group(scaled[at : at + 32], d, none) for at in range(0, 256, 32)]
    if kind == "q2_k":
        weights = [raw[16 + 32 * (k // 128) + k % 32] >> 2 * (k // 32 % 4) & 3 for k in range(256)]
        scaled = [(raw[k // 16] & 15) * weight for k, weight in enumerate(weights)]
        m = -half(block[82:])
        return [
            Group(scaled[at : at + 32], d, m, 1, (raw[at // 16] >> 4, raw[at // 16 + 1] >> 4))
            for at in range(0, 256, 32)
        ]
    groups: list[Group] = []
    six = raw[4:16]
    for j in range(8):
        if j < 4:
            scale, minimum = six[j] & 63, six[j + 4] & 63
        else:
            scale = (six[j + 4] & 15) + 16 * (six[j - 4] >> 6)
            minimum = (six[j + 4] >> 4) + 16 * (six[j] >> 6)
        run = raw[-128:][32 * (j // 2) : 32 * (j // 2) + 32]
        integers = [byte >> 4 if j % 2 else byte & 15 for byte in run]
        if kind == "q5_k":
            integers = [n + 16 * (raw[16 + i] >> j & 1) for i, n in enumerate(integers)]
        groups.append(Group(integers, d, -half(block[2:]), scale, (minimum, minimum)))
    return groups


def row_groups(kind: str, tensor: U8, rows: int, row: int) -> list[Group]:
    size = BLOCK_BYTES[kind]
    blocks = tensor.reshape(rows, -1, size)[row]
    return [group for block in blocks for group in groups_of(kind, block)]


def expected(
    groups: list[Group], q: NDArray[np.int8], scale: F32, *, with_minimum: bool
) -> Fraction:
    """One output by rule 2."""
    steps: list[tuple[Fraction, Fraction]] = []
    for b, group in enumerate(groups):
        values = [int(v) for v in q[32 * b : 32 * b + 32]]
        t = Fraction(float(scale[b]))
        dot = group.factor * sum(n * v for n, v in zip(group.integers, values, strict=True))
        assert abs(dot) < 2**24
        steps.append((Fraction(dot), group.d * t))
        if with_minimum:
            first, last = group.minima
            least = first * sum(values[:16]) + last * sum(values[16:])
            steps.append((Fraction(least), group.m * t))
    return chain(in_segments(steps, 64 if with_minimum else 32))


def check_rows(
    pool: k.Pool, kind: str, tensor: U8, rows: int, values: F32, cells: list[tuple[int, int]]
) -> None:
    """Every level gives the exact result for (row, token) in cells, and equal bits for the rest."""
    tokens, cols = values.shape
    matrix = packed(pool, kind, tensor, rows, cols)
    results: list[F32] = []
    for level in k.isa_levels():
        k.set_isa(level)
        x = quantised(pool, values)
        results.append(product(pool, x, matrix, tokens))
        assert_same_bits(results[-1], results[0], level)
    q, scale = unpacked(quantised(pool, values), tokens)
    for row, token in cells:
        want = expected(
            row_groups(kind, tensor, rows, row),
            q[token],
            scale[token],
            with_minimum=len(SCALES_AT.get(kind, ())) == 2,
        )
        assert Fraction(float(results[0][token, row])) == want, (row, token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 16, 19])
def test_products_are_rule_2(pool: k.Pool, kind: str, tokens: int) -> None:
    """Two whole segments and a part, a ragged last tile, every tail of a token group."""
    rows, cols = 50, 2304 if kind in SUPERBLOCK_KINDS else 2080
    rng = np.random.default_rng(tokens)
    tensor = random_tensor(kind, rows, cols, rng)
    values = random_values(tokens, cols, rng)
    check_rows(
        pool, kind, tensor, rows, values, [(0, 0), (17, tokens - 1), (47, tokens // 2), (49, 0)]
    )


def filled(kind: str, rows: int, cols: int, rng: np.random.Generator, byte: int) -> U8:
    """Weights and six-bit scales of one byte, sane scales of blocks."""
    tensor = random_tensor(kind, rows, cols, rng)
    size = BLOCK_BYTES[kind]
    table = tensor.reshape(-1, size)
    scale = np.array([0.0137], np.float16).view(np.uint8)
    if kind == "mxfp4":
        scale = np.array([121], np.uint8)
    table[:, ~scale_bytes(kind)] = byte
    at = SCALES_AT.get(kind, (0,))[0]
    table[:, at : at + len(scale)] = scale
    return tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_sums_at_their_bounds_are_exact(pool: k.Pool, kind: str, byte: int) -> None:
    """Weights, scales, minima and activations are as large as they get, in every sign."""
    rows, cols = 17, 512
    tensor = filled(kind, rows, cols, np.random.default_rng(1), byte)
    values = np.full((6, cols), 127, np.float32)
    values[1] = -127
    values[2, ::2] = -127
    values[3] = 2.0**95
    values[4] = -(2.0**-90)
    values[5, 32:] = 0
    check_rows(pool, kind, tensor, rows, values, [(0, t) for t in range(6)] + [(16, 1)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mxfp4"])
def test_zero_and_subnormal_scales(pool: k.Pool, kind: str) -> None:
    """d, m and dmin of 0, -0, the least subnormal and the largest number; six-bit scales of 0."""
    rows, cols, tokens = 36, 512, 5
    rng = np.random.default_rng(2)
    tensor = random_tensor(kind, rows, cols, rng)
    table = tensor.reshape(rows, -1, BLOCK_BYTES[kind])
    special = np.array([0.0, -0.0, 2.0**-24, -(2.0**-24), 65504.0, 1.0], np.float16)
    for row in range(rows):
        at = SCALES_AT.get(kind, (0,))
        table[row, :, at[0] : at[0] + 2] = special[row % 6 : row % 6 + 1].view(np.uint8)
        if len(at) == 2:
            table[row, :, at[1] : at[1] + 2] = special[row // 6 : row // 6 + 1].view(np.uint8)
    if kind == "iq4_xs":  # stored as 32
        table[: rows // 2, 1, 2:8] = [0xAA, 0xAA, 0, 0, 0, 0]
    elif kind == "q3_k":  # as these
        table[: rows // 2, 1, 96:108] = [0] * 8 + [0xAA] * 4
    elif kind in SUPERBLOCK_KINDS:
        table[: rows // 2, 1, slice(0, 16) if kind == "q2_k" else slice(4, 16)] = 0
    values = random_values(tokens, cols, rng)
    check_rows(pool, kind, tensor, rows, values, [(row, row % tokens) for row in range(rows)])


@pytest.mark.parametrize("size", [1.0, 2.0**-30, 2.0**-88, 2.0**60])
def test_smallest_and_largest_scales_of_mxfp4(pool: k.Pool, size: float) -> None:
    """Blocks of no scale, of the least and of the largest one, alone and together in a row: with
    small activations products and sums are subnormal."""
    rows, cols, tokens = 36, 544, 5
    rng = np.random.default_rng(4)
    tensor = random_tensor("mxfp4", rows, cols, rng)
    table = tensor.reshape(rows, -1, 17)
    special = np.array([0, 1, 2, 3, 9, 98, 127, 159, 160], np.uint8)
    table[:, :, 0] = np.resize(special, rows)[:, None]
    for row in range(18, rows):
        table[row, :, 0] = rng.choice(special[: 2 + row % 8], table.shape[1])
    values = random_values(tokens, cols, rng) * np.float32(size)
    check_rows(pool, "mxfp4", tensor, rows, values, [(row, row % tokens) for row in range(rows)])


def test_every_weight_of_mxfp4_is_that_of_the_file(pool: k.Pool) -> None:
    """All scales and indices, as the format's own library has them; below 2^-126 a scale is 0."""
    rows = 161
    tensor = random_tensor("mxfp4", rows, 32, np.random.default_rng(5))
    table = tensor.reshape(rows, 17)
    table[:, 0] = np.arange(rows)
    table[:, 1:] = 17 * np.arange(16)
    out = k.Rows(rows, 32)
    k.embed(pool, packed(pool, "mxfp4", tensor, rows, 32), np.arange(rows, dtype=np.int32), out)
    want = dequantised_by_library("mxfp4", tensor, rows, 32) + np.float32(0)  # -0 is +0
    want[:2] = 0
    assert_same_bits(out.view(rows).copy(), want)


@pytest.mark.parametrize("byte", [161, 200, 254, 255])
@pytest.mark.parametrize(("row", "block"), [(0, 0), (16, 6), (39, 16)])
def test_a_scale_of_mxfp4_above_the_largest_is_refused(
    pool: k.Pool, byte: int, row: int, block: int
) -> None:
    tensor = random_tensor("mxfp4", 40, 544, np.random.default_rng(6))
    tensor.reshape(40, -1, 17)[row, block, 0] = byte
    what = f"mxfp4: row {row}, block {block}: the scale is NaN or above 2\\^32"
    with pytest.raises(ValueError, match=what):
        packed(pool, "mxfp4", tensor, 40, 544)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_has_one_rounding(pool: k.Pool, kind: str) -> None:
    rows, cols = 19, 512
    tensor = random_tensor(kind, rows, cols, np.random.default_rng(3))
    out = k.Rows(rows, cols)
    k.embed(pool, packed(pool, kind, tensor, rows, cols), np.arange(rows, dtype=np.int32), out)
    for row in (0, 15, 18):
        want = [
            round_f32(group.factor * n * group.d + group.minima[i // 16] * group.m)
            for group in row_groups(kind, tensor, rows, row)
            for i, n in enumerate(group.integers)
        ]
        assert [Fraction(value) for value in out.view(rows)[row].tolist()] == want


@given(
    st.sampled_from(KINDS),
    st.integers(1, 67),
    st.integers(1, 6),
    st.integers(1, 37),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-24, 1e24]),
)
@settings(max_examples=60, deadline=None)
def test_levels_agree_on_any_bytes(
    kind: str, rows: int, superblocks: int, tokens: int, seed: int, size: float
) -> None:
    """Any bytes that a file may hold: only scales that are refused are replaced."""
    cols = 256 * superblocks if kind in SUPERBLOCK_KINDS else 160 * superblocks
    rng, pool = np.random.default_rng(seed), k.Pool(1)
    tensor = rng.integers(0, 256, rows * cols // 32 * BLOCK_BYTES[kind], np.uint8)
    tensor = tensor[: rows * cols // block_width(kind) * BLOCK_BYTES[kind]]
    table = tensor.reshape(-1, BLOCK_BYTES[kind])
    if kind == "mxfp4":
        table[:, 0] %= 161
    else:
        for at in SCALES_AT.get(kind, (0,)):
            exponent = table[:, at + 1] & 0x7C
            table[exponent == 0x7C, at + 1] = 0x03
    matrix = packed(pool, kind, tensor, rows, cols)
    values = random_values(tokens, cols, rng) * np.float32(size)
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


BITS_MAX = {
    "q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q8_0": 8.5, "iq4_nl": 4.5,
    "q4_k": 4.63, "q5_k": 5.63, "q6_k": 6.63, "mxfp4": 4.25,
    "iq4_xs": 4.38, "q3_k": 3.63, "q2_k": 2.63, "iq3_xxs": 4.38, "iq3_s": 4.38, "iq2_xxs": 3.38,
    "iq2_xs": 3.38, "iq2_s": 3.38, "iq1_s": 3.38, "iq1_m": 3.38,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bits_max"), BITS_MAX.items())
def test_packed_weights_take_no_more_bytes_than_allowed(kind: str, bits_max: float) -> None:
    """Decode of one token is bound by reading these bytes."""
    assert k.packed_bytes(kind, 1024, 1024) * 8 / 1024**2 <= bits_max
