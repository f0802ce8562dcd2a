"""Packing, quantisation and the linear kernels: every level gives the bits of CA-3 rules 1 and 2.

Three independent references: exact rational arithmetic for the rule itself (few outputs), numpy in
float64 with a tolerance for the values (many), and the scalar level for the bits of the others.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from bench.models.tensors import (
    BLOCK_BYTES,
    SCALES_AT,
    SUPERBLOCK_KINDS,
    aligned,
    packed,
    put_scales,
    random_tensor,
    random_values,
)

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
ROOT = Path(__file__).resolve().parents[2]
GGUF_TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in k.KINDS}
SHAPES = [
    # rows, cols, tokens: ragged tiles, one block, an odd block count, ragged segments, many groups
    (1, 256, 1),
    (16, 256, 2),
    (37, 512, 3),
    (48, 1024, 5),
    (49, 1280, 16),
    (63, 2304, 17),
    (100, 768, 40),
]
ODD_SHAPES = [(16, 32, 1), (33, 96, 7), (20, 1056, 4), (17, 2080, 19)]  # not for superblocks


def dequantised_by_library(kind: str, tensor: U8, rows: int, cols: int) -> F32:
    """The tensor dequantised by the format's own library."""
    if kind == "f32":
        return tensor.view(np.float32).reshape(rows, cols)
    return dequantize(tensor.reshape(rows, -1), GGUF_TYPES[kind]).reshape(rows, cols)


def rows_of(values: F32) -> k.Rows:
    rows = k.Rows(*values.shape)
    rows.view(values.shape[0])[:] = values
    return rows


def quantised(pool: k.Pool, values: F32) -> k.Activations:
    out = k.Activations(*values.shape, keep_float=True)
    k.quantise(pool, rows_of(values), values.shape[0], out)
    return out


def unpacked(x: k.Activations, tokens: int) -> tuple[NDArray[np.int8], F32]:
    q, scales = x.unpack(tokens)
    return (
        np.stack([np.frombuffer(row, np.int8) for row in q]),
        np.stack([np.frombuffer(row, np.float32) for row in scales]),
    )


def product(pool: k.Pool, x: k.Activations, matrix: k.Matrix, tokens: int) -> F32:
    out = k.Rows(tokens, matrix.rows)
    k.linear(pool, x, [matrix], [None], tokens, out)
    return out.view(tokens).copy()


def assert_same_bits(got: F32, want: F32, note: str = "") -> None:
    wrong = np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))
    assert wrong.size == 0, f"{note}: {wrong.size} of {got.size} differ, first at {wrong[:4]}"


def shapes_of(kind: str) -> list[tuple[int, int, int]]:
    return SHAPES if kind in SUPERBLOCK_KINDS else SHAPES + ODD_SHAPES


CASES = [(kind, *shape) for kind in k.KINDS for shape in shapes_of(kind)]


# --- rule 1: quantisation of activations ------------------------------------------------------


def quantised_by_numpy(values: F32) -> tuple[NDArray[np.int8], F32]:
    """Rule 1 with frexp: the scale is a 127th of the largest, rounded up to seven bits."""
    blocks = values.reshape(len(values), -1, 32)
    a = np.abs(blocks).max(axis=2)
    used = (a >= 2.0**-90) & (a < 2.0**96)
    quotient = np.where(used, a, np.float32(1)) * np.uint32(0x3C010204).view(np.float32)
    fraction, exponent = np.frexp(quotient.astype(np.float64))  # 0.5 <= fraction < 1
    scale = np.where(used, np.ldexp(np.ceil(fraction * 128), exponent - 7), 1).astype(np.float32)
    inverse = np.where(used, np.float32(1) / scale, np.float32(0))
    q = np.rint(np.where(used[:, :, None], blocks, 0) * inverse[:, :, None])
    return q.astype(np.int8).reshape(values.shape), scale


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("shape", [(1, 32), (17, 96), (40, 1056)])
def test_quantise_is_rule_1(pool: k.Pool, level: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    values = random_values(*shape, rng) * np.float32(2) ** rng.integers(-40, 40, (shape[0], 1))
    values = values.astype(np.float32)
    values[0, -32:] = np.linspace(-7e28, 7e28, 32, dtype=np.float32)
    k.set_isa(level)
    q, scale = unpacked(quantised(pool, values), len(values))
    want_q, want_scale = quantised_by_numpy(values)
    assert np.array_equal(q, want_q)
    assert_same_bits(scale, want_scale)


@pytest.mark.parametrize("level", k.isa_levels())
def test_quantise_at_the_bounds_of_rule_1(pool: k.Pool, level: str) -> None:
    """The largest magnitude decides: below 2^-90 zero, from 2^96 nonfinite, no q above 127."""
    down, up = np.float32(-np.inf), np.float32(np.inf)
    tiny, large = np.float32(2.0**-90), np.float32(2.0**96)
    cases = [  # the largest of a group, its scale, its q; None: nonfinite
        (0.0, 1.0, 0),
        (np.nextafter(tiny, down), 1.0, 0),
        (tiny, 1.015625 * 2.0**-97, 126),
        (np.nextafter(large, down), 1.015625 * 2.0**89, 126),
        (np.nextafter(np.float32(127), down), 1.0, 127),
        (127.0, 1.0, 127),
        (127.5, 1.015625, 126),
        (128.0, 1.015625, 126),
        (128.98, 1.015625, 127),
        (128.99, 1.03125, 125),
        (254.0, 2.0, 127),
        (254.5, 2.03125, 125),
        (large, 1.0, None),
        (up, 1.0, None),
        (np.nan, 1.0, None),
    ]
    matrix = packed(pool, "f32", np.zeros(64, np.float32).view(np.uint8), 1, 64)
    k.set_isa(level)
    for largest, scale, q in cases:
        for sign in (1, -1):
            row = np.zeros((1, 64), np.float32)
            row[0, 37] = np.float32(largest) * sign
            x = quantised(pool, row)
            got_q, got_scale = unpacked(x, 1)
            assert got_q[0, 37] == sign * (q or 0), largest
            assert got_scale[0].tolist() == [1, scale], largest
            nonfinite = bool(np.isnan(product(pool, x, matrix, 1)[0, 0]))
            assert nonfinite == (q is None), largest


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=32, max_size=64))
@settings(max_examples=120, deadline=None)
def test_quantise_agrees_on_any_floats(values: list[float]) -> None:
    """NaN, infinities, subnormals, widths that are no multiple of 32: all levels agree."""
    pool, row = k.Pool(1), np.array([values], np.float32)
    seen: list[tuple[bytes, bytes]] = []
    before = k.isa()
    for level in k.isa_levels():
        k.set_isa(level)
        q, scale = unpacked(quantised(pool, row), 1)
        seen.append((q.tobytes(), scale.tobytes()))
    k.set_isa(before)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("kind", k.KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**96])
def test_a_nonfinite_token_does_not_affect_other_tokens(
    pool: k.Pool, level: str, kind: str, bad: float
) -> None:
    """All its outputs are the one NaN; the next use of the same activations is clean."""
    rng = np.random.default_rng(3)
    for tokens, where in ((5, 2), (19, 9)):
        values = random_values(tokens, 256, rng)
        matrix = packed(pool, kind, random_tensor(kind, 33, 256, rng), 33, 256)
        k.set_isa(level)
        x = k.Activations(tokens, 256, keep_float=True)
        clean = product(pool, quantised(pool, values), matrix, tokens)
        poisoned = values.copy()
        poisoned[where, 77] = bad
        k.quantise(pool, rows_of(poisoned), tokens, x)
        out = k.Rows(tokens, 33)
        k.linear(pool, x, [matrix], [None], tokens, out)
        assert k.nonfinite_rows(pool, out, tokens) == [where]
        assert (out.view(tokens)[where].view(np.uint32) == 0x7FC00000).all()
        others = [t for t in range(tokens) if t != where]
        assert_same_bits(out.view(tokens)[others], clean[others])
        k.quantise(pool, rows_of(values), tokens, x)
        assert_same_bits(product(pool, x, matrix, tokens), clean)


# --- rule 2: the product ----------------------------------------------------------------------


def round_f32(value: Fraction) -> Fraction:
    """Nearest binary32 value, ties to even, subnormal ones included; without overflow."""
    if value == 0:
        return value
    exponent = 0
    magnitude = abs(value)
    while magnitude >= 2 ** (exponent + 1):
        exponent += 1
    while magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, -149)
    return round(value / unit) * unit


def chain(steps: list[list[tuple[Fraction, Fraction]]]) -> Fraction:
    """The value of one output: per segment a chain of fma over (factor, factor), then the sums."""
    total: Fraction | None = None
    for segment in steps:
        acc = Fraction(0)
        for a, b in segment:
            acc = round_f32(a * b + acc)
        total = acc if total is None else round_f32(total + acc)
    assert total is not None
    return total


def in_segments(
    steps: list[tuple[Fraction, Fraction]], length: int
) -> list[list[tuple[Fraction, Fraction]]]:
    return [steps[at : at + length] for at in range(0, len(steps), length)]


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0", "q6_k"])
def test_linear_is_rule_2(pool: k.Pool, level: str, kind: str) -> None:
    """Segments of 32 blocks, fma inside, rounded sums between: exact arithmetic agrees."""
    rows, cols, tokens = 18, 2304 if kind == "q6_k" else 2080, 5  # two segments and a part
    rng = np.random.default_rng(11)
    tensor = random_tensor(kind, rows, cols, rng)
    size = BLOCK_BYTES[kind]
    blocks = tensor.reshape(rows, -1, size)
    x = quantised(pool, rng.standard_normal((tokens, cols)).astype(np.float32))
    q, dx = unpacked(x, tokens)
    k.set_isa(level)
    got = product(pool, x, packed(pool, kind, tensor, rows, cols), tokens)

    def half(row: int, block: int, at: int) -> Fraction:
        return Fraction(float(blocks[row, block, at : at + 2].view(np.float16)[0]))

    def integers(row: int, block: int) -> list[int]:
        """What multiplies q and the scale of a group."""
        raw = blocks[row, block].astype(np.int64)
        if kind == "q8_0":
            return blocks[row, block, 2:].view(np.int8).astype(np.int64).tolist()
        if kind == "q6_k":  # d = 1 and the format's own library give sub-scale times weight
            one = blocks[row, block].copy()
            one[208:] = np.array([1], np.float16).view(np.uint8)
            return dequantize(one, GGUF_TYPES[kind]).astype(np.int64).tolist()
        nibbles = raw[size - 16 :]
        return np.concatenate([nibbles & 15, nibbles >> 4]).tolist()

    for row, token in [(0, 0), (3, 4), (15, 1), (16, 2), (17, 3)]:
        steps: list[tuple[Fraction, Fraction]] = []
        for b in range(cols // 32):
            scale = Fraction(float(dx[token, b]))
            values = [int(v) for v in q[token, 32 * b : 32 * b + 32]]
            per, at = (8, 208) if kind == "q6_k" else (1, 0)
            weights = integers(row, b // per)[b % per * 32 :][:32]
            zero = 8 if kind == "q4_0" else 0
            dot = sum((w - zero) * v for w, v in zip(weights, values, strict=True))
            steps.append((Fraction(dot), half(row, b // per, at) * scale))
            if kind == "q4_1":
                steps.append((Fraction(sum(values)), half(row, b, 2) * scale))
        want = chain(in_segments(steps, 64 if kind == "q4_1" else 32))
        assert Fraction(float(got[token, row])) == want, (row, token)


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
def test_linear_of_float_weights_is_rule_2(pool: k.Pool, level: str, kind: str) -> None:
    rows, cols, tokens = 18, 2085, 5
    rng = np.random.default_rng(12)
    tensor = random_tensor(kind, rows, cols, rng)
    weights = dequantised_by_library(kind, tensor, rows, cols)
    values = rng.standard_normal((tokens, cols)).astype(np.float32)
    k.set_isa(level)
    got = product(pool, quantised(pool, values), packed(pool, kind, tensor, rows, cols), tokens)
    for row, token in [(0, 0), (15, 4), (17, 3)]:
        pairs = zip(weights[row].tolist(), values[token].tolist(), strict=True)
        steps = [(Fraction(w), Fraction(v)) for w, v in pairs]
        assert Fraction(float(got[token, row])) == chain(in_segments(steps, 1024)), (row, token)


@pytest.mark.parametrize(("kind", "rows", "cols", "tokens"), CASES)
def test_every_level_gives_the_bits_of_the_definition(
    pool: k.Pool, kind: str, rows: int, cols: int, tokens: int
) -> None:
    rng = np.random.default_rng(rows + cols + tokens)
    tensor = random_tensor(kind, rows, cols, rng)
    matrix = packed(pool, kind, tensor, rows, cols)
    values = random_values(tokens, cols, rng)
    k.set_isa("scalar")
    x = quantised(pool, values)
    want = product(pool, x, matrix, tokens)

    q, scale = unpacked(x, tokens)
    seen = values if kind in ("f16", "bf16", "f32") else q * np.repeat(scale, 32, axis=1)
    exact = (
        seen.astype(np.float64)
        @ dequantised_by_library(kind, tensor, rows, cols).astype(np.float64).T
    )
    size = (
        np.abs(seen).astype(np.float64) @ np.abs(dequantised_by_library(kind, tensor, rows, cols)).T
    )
    assert np.all(np.abs(want - exact) <= 2e-6 * size + 1e-30)

    for level in k.isa_levels()[1:]:
        k.set_isa(level)
        assert_same_bits(product(pool, quantised(pool, values), matrix, tokens), want, level)


@given(
    st.sampled_from(k.KINDS),
    st.integers(1, 70),
    st.integers(1, 45),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-20, 1e-28, 1e20, 1e36]),
)
@settings(max_examples=40, deadline=None)
def test_levels_agree_on_random_shapes(
    kind: str, rows: int, blocks: int, tokens: int, seed: int, size: float
) -> None:
    """Includes activations so small or large that products turn subnormal or infinite."""
    cols = 256 * (blocks // 8 + 1) if kind in SUPERBLOCK_KINDS else 32 * blocks
    rng, pool = np.random.default_rng(seed), k.Pool(1)
    matrix = packed(pool, kind, random_tensor(kind, rows, cols, rng), rows, cols)
    values = random_values(tokens, cols, rng) * np.float32(size)
    before = k.isa()
    try:
        outputs: dict[str, F32] = {}
        for level in k.isa_levels():
            k.set_isa(level)
            outputs[level] = product(pool, quantised(pool, values), matrix, tokens)
    finally:
        k.set_isa(before)
    for level, got in outputs.items():
        assert_same_bits(got, outputs["scalar"], level)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("cols", [1, 31, 33, 100])
def test_float_kinds_take_any_width(pool: k.Pool, kind: str, cols: int) -> None:
    rng = np.random.default_rng(cols)
    tensor = random_tensor(kind, 19, cols, rng)
    matrix = packed(pool, kind, tensor, 19, cols)
    values = rng.standard_normal((3, cols)).astype(np.float32)
    want = (
        values.astype(np.float64)
        @ dequantised_by_library(kind, tensor, 19, cols).astype(np.float64).T
    )
    bits: list[F32] = []
    for level in k.isa_levels():
        k.set_isa(level)
        bits.append(product(pool, quantised(pool, values), matrix, 3))
        assert_same_bits(bits[-1], bits[0], level)
    assert np.allclose(bits[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("kind", k.KINDS)
def test_batch_and_threads_change_no_bit(kind: str, level: str) -> None:
    rows, cols, tokens = 83, 512, 37
    rng = np.random.default_rng(8)
    tensor = random_tensor(kind, rows, cols, rng)
    values = random_values(tokens, cols, rng)
    k.set_isa(level)
    results: list[F32] = []
    for threads in (1, 2, 5):  # five: more than most small machines have
        team = k.Pool(threads)
        matrix = packed(team, kind, tensor, rows, cols)
        results.append(product(team, quantised(team, values), matrix, tokens))
        if threads == 1:
            for token in (0, 7, 16, 36):
                alone = product(team, quantised(team, values[token : token + 1]), matrix, 1)
                assert_same_bits(alone[0], results[0][token], f"token {token} alone")
        team.close()
    assert_same_bits(results[1], results[0], "2 threads")
    assert_same_bits(results[2], results[0], "5 threads")


# --- bias, residual and gate -------------------------------------------------------------------


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("tokens", [1, 18])
def test_linear_concatenates_and_adds_biases(pool: k.Pool, level: str, tokens: int) -> None:
    rng = np.random.default_rng(2)
    cols, sizes = 256, (37, 16, 5)
    kinds = ("q4_0", "q6_k", "q8_0")
    x = quantised(pool, random_values(tokens, cols, rng))
    k.set_isa(level)
    matrices = [
        packed(pool, kind, random_tensor(kind, rows, cols, rng), rows, cols)
        for kind, rows in zip(kinds, sizes, strict=True)
    ]
    bias = rng.standard_normal(sizes[0]).astype(np.float32)
    out = k.Rows(tokens, sum(sizes))
    k.linear(pool, x, matrices, [k.Vector(bias), None, None], tokens, out)
    parts = [product(pool, x, matrix, tokens) for matrix in matrices]
    parts[0] = parts[0] + bias  # float32 addition in numpy is the rounded sum of the rule
    assert_same_bits(out.view(tokens).copy(), np.concatenate(parts, axis=1))


@pytest.mark.parametrize("level", k.isa_levels())
def test_linear_add_is_the_residual_stream(pool: k.Pool, level: str) -> None:
    rng = np.random.default_rng(4)
    rows, cols, tokens = 37, 288, 19
    x = quantised(pool, random_values(tokens, cols, rng))
    k.set_isa(level)
    matrix = packed(pool, "q4_0", random_tensor("q4_0", rows, cols, rng), rows, cols)
    bias = rng.standard_normal(rows).astype(np.float32)
    stream = rng.standard_normal((tokens, rows)).astype(np.float32)
    y = product(pool, x, matrix, tokens)
    for vector, expected in ((None, stream + y), (k.Vector(bias), stream + (y + bias))):
        out = rows_of(stream)
        k.linear_add(pool, x, matrix, vector, tokens, out)
        assert_same_bits(out.view(tokens).copy(), expected)


@pytest.mark.parametrize("activation", ["silu", "oai", "gelu"])
@pytest.mark.parametrize("tokens", [1, 18])
def test_linear_gated_is_the_activation_of_gate_and_up(
    pool: k.Pool, tokens: int, activation: str
) -> None:
    rng = np.random.default_rng(6)
    rows, cols = 53, 544
    x = quantised(pool, random_values(tokens, cols, rng))
    gate, up = (
        packed(pool, "q4_0", random_tensor("q4_0", rows, cols, rng), rows, cols) for _ in range(2)
    )
    biases = [rng.standard_normal(rows).astype(np.float32) for _ in range(2)]
    outputs: list[F32] = []
    for level in k.isa_levels():
        k.set_isa(level)
        out = k.Rows(tokens, rows)
        vectors = [k.Vector(bias) for bias in biases]
        k.linear_gated(pool, x, gate, up, vectors[0], vectors[1], tokens, out, activation)
        outputs.append(out.view(tokens).copy())
        assert_same_bits(outputs[-1], outputs[0], level)
    g = (product(pool, x, gate, tokens) + biases[0]).astype(np.float64)
    u = (product(pool, x, up, tokens) + biases[1]).astype(np.float64)
    gelu = g / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
    held = np.minimum(g, 7)
    wanted = {
        "silu": g / (1 + np.exp(-g)) * u,
        "oai": held / (1 + np.exp(-1.702 * held)) * (np.clip(u, -7, 7) + 1),
        "gelu": gelu * u,  # where tanh is near -1, its sum with 1 has few digits
    }
    tolerance = 1e-12 if activation == "gelu" else 1e-30
    assert np.allclose(outputs[0], wanted[activation], rtol=1e-5, atol=tolerance)
    with pytest.raises(ValueError, match="linear_gated: no activation is named relu"):
        k.linear_gated(pool, x, gate, up, None, None, tokens, k.Rows(tokens, rows), "relu")


@pytest.mark.parametrize("level", k.isa_levels())
@pytest.mark.parametrize("kind", list(BLOCK_BYTES))
def test_a_block_without_scale_adds_nothing(pool: k.Pool, level: str, kind: str) -> None:
    """d = +0 and -0, with activations whose scales reach both ends."""
    rows, cols = 5, 512
    tensor = random_tensor(kind, rows, cols, np.random.default_rng(0))
    blocks = tensor.reshape(rows, -1, BLOCK_BYTES[kind])
    if kind == "mxfp4":
        blocks[:, :, 0] = 0
        blocks[:, 1::2, 1] = 0x80
    else:
        put_scales(kind, blocks[:, ::2], np.float16(0.0))
        put_scales(kind, blocks[:, 1::2], np.float16(-0.0))
    if len(SCALES_AT.get(kind, ())) == 2:
        put_scales(kind, blocks, np.float16(0), 1)
    matrix = packed(pool, kind, tensor, rows, cols)
    k.set_isa(level)
    for size in (2.0**95, 2.0**-89, 1.0):
        values = np.full((2, cols), size, np.float32)
        values[1] *= -1
        assert_same_bits(
            product(pool, quantised(pool, values), matrix, 2), np.zeros((2, rows), np.float32)
        )


# --- packing, embedding, rows -----------------------------------------------------------------


@pytest.mark.parametrize("kind", k.KINDS)
def test_embed_gives_the_dequantised_row(pool: k.Pool, kind: str) -> None:
    rows, cols = 35, 512
    tensor = random_tensor(kind, rows, cols, np.random.default_rng(9))
    matrix = packed(pool, kind, tensor, rows, cols)
    ids = np.array([34, 0, 16, 15, 34], np.int32)
    out = k.Rows(5, cols)
    k.embed(pool, matrix, ids, out)
    want = dequantised_by_library(kind, tensor, rows, cols)[ids]
    # Minima are added with one rounding (fma); the format's library rounds twice, on larger terms.
    tolerance = 2e-7 * np.abs(want).max() if len(SCALES_AT.get(kind, ())) == 2 else 1e-9
    assert np.allclose(out.view(5), want, rtol=0, atol=tolerance)
    plain, scale = out.view(5).copy(), np.float32(math.sqrt(cols))
    for level in k.isa_levels():
        k.set_isa(level)
        k.embed(pool, matrix, ids, out, float(scale))
        assert_same_bits(out.view(5).copy(), plain * scale, level)
    for bad in (math.nan, math.inf, 1e39):
        with pytest.raises(ValueError, match="the scale is not finite"):
            k.embed(pool, matrix, ids, out, bad)
    with pytest.raises(ValueError, match="token 35 is not in"):
        k.embed(pool, matrix, np.array([35], np.int32), out)
    with pytest.raises(ValueError, match="token -1 is not in"):
        k.embed(pool, matrix, np.array([-1], np.int32), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", k.KINDS)
def test_pack_reports_the_first_bad_scale(pool: k.Pool, kind: str, bad: float) -> None:
    rows, cols = 40, 512
    tensor = random_tensor(kind, rows, cols, np.random.default_rng(1))
    table = tensor.reshape(rows, -1)
    half = np.array([bad], np.float16).view(np.uint8)
    for row, slot in ((33, 1), (17, 1), (17, 0)):  # every earlier one takes precedence
        if kind == "mxfp4":
            table[row, slot * BLOCK_BYTES[kind]] = 255
        elif kind in BLOCK_BYTES:
            put_scales(kind, table.reshape(rows, -1, BLOCK_BYTES[kind])[row, slot], np.float16(bad))
        else:
            value = np.array([bad], np.float32)
            as_bytes = {"f16": half, "f32": value.view(np.uint8), "bf16": value.view(np.uint8)[2:]}
            size = 4 if kind == "f32" else 2
            table[row, slot * size : (slot + 1) * size] = as_bytes[kind]
        with pytest.raises(ValueError, match=rf"{kind}: row {row}, \w+ {slot}: the \w+ is NaN"):
            packed(pool, kind, tensor, rows, cols)
    if len(SCALES_AT.get(kind, ())) == 2:  # the minimum is a scale too
        tensor = random_tensor(kind, rows, cols, np.random.default_rng(1))
        at = BLOCK_BYTES[kind] + SCALES_AT[kind][1]
        tensor.reshape(rows, -1)[3, at : at + 2] = half
        with pytest.raises(ValueError, match="row 3, block 1"):
            packed(pool, kind, tensor, rows, cols)


def test_pack_refuses_wrong_sizes(pool: k.Pool) -> None:
    tensor = random_tensor("q4_0", 16, 64, np.random.default_rng(0))
    buffer = aligned(k.packed_bytes("q4_0", 16, 64) + 64)
    with pytest.raises(ValueError, match="64 cols are not a multiple of 256"):
        k.packed_bytes("q6_k", 16, 64)
    with pytest.raises(ValueError, match="unknown kind 'q3_x'; known: q4_0"):
        k.packed_bytes("q3_x", 16, 64)
    with pytest.raises(ValueError, match="rows and cols must be"):
        k.packed_bytes("f32", 0, 64)
    with pytest.raises(ValueError, match="the source has"):
        k.pack(pool, "q4_0", 16, 64, tensor[:-1], buffer)
    with pytest.raises(ValueError, match="destination is smaller"):
        k.pack(pool, "q4_0", 16, 64, tensor, buffer[:64])
    with pytest.raises(ValueError, match="64-byte aligned"):
        k.pack(pool, "q4_0", 16, 64, tensor, buffer[8:])
    with pytest.raises(BufferError):
        k.pack(pool, "q4_0", 16, 64, tensor, bytes(4096))
    with pytest.raises(ValueError, match="64-byte aligned"):
        k.Matrix("q4_0", 16, 64, buffer[8:])


def test_a_matrix_keeps_its_mapping_open(pool: k.Pool, tmp_path: Path) -> None:
    path = tmp_path / "packed"
    tensor = random_tensor("q4_0", 16, 64, np.random.default_rng(0))
    buffer = aligned(k.packed_bytes("q4_0", 16, 64))
    k.pack(pool, "q4_0", 16, 64, tensor, buffer)
    path.write_bytes(buffer.tobytes())
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    matrix = k.Matrix("q4_0", 16, 64, mapping)
    with pytest.raises(BufferError):
        mapping.close()
    assert product(pool, quantised(pool, np.ones((1, 64), np.float32)), matrix, 1).shape == (1, 16)
    del matrix
    mapping.close()


def test_calls_check_every_size(pool: k.Pool) -> None:
    rng = np.random.default_rng(0)
    matrix = packed(pool, "q4_0", random_tensor("q4_0", 16, 64, rng), 16, 64)
    floats = packed(pool, "f16", random_tensor("f16", 16, 64, rng), 16, 64)
    x = k.Activations(2, 64)
    narrow = packed(pool, "q4_0", random_tensor("q4_0", 16, 32, rng), 16, 32)
    with pytest.raises(ValueError, match="64 wide, the matrix has"):
        k.linear(pool, x, [narrow], [None], 1, k.Rows(2, 16))
    with pytest.raises(ValueError, match="need Activations"):
        k.linear(pool, x, [floats], [None], 1, k.Rows(2, 16))
    with pytest.raises(ValueError, match="3 tokens do not fit 2"):
        k.linear(pool, x, [matrix], [None], 3, k.Rows(4, 16))
    with pytest.raises(ValueError, match="width is 15, expected 16"):
        k.linear_add(pool, x, matrix, None, 1, k.Rows(2, 15))
    with pytest.raises(ValueError, match="a bias has one value per row"):
        k.linear_add(pool, x, matrix, k.Vector(np.zeros(15, np.float32)), 1, k.Rows(2, 16))
    with pytest.raises(ValueError, match="one bias"):
        k.linear(pool, x, [matrix], [], 1, k.Rows(2, 16))
    with pytest.raises(ValueError, match="no row 2"):
        k.take_rows(k.Rows(2, 8), np.array([2], np.int32), k.Rows(1, 8))


def test_rows_alias_their_memory(pool: k.Pool) -> None:
    rows = k.Rows(3, 5)
    rows.view(3)[:] = np.arange(15, dtype=np.float32).reshape(3, 5)
    out = k.Rows(2, 5)
    k.take_rows(rows, np.array([2, 0], np.int32), out)
    assert out.view(2).tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    view = rows.view(2)
    del rows  # the view keeps the memory
    assert view[1, 4] == 9
    with pytest.raises(ValueError, match="3 tokens do not fit 2"):
        out.view(3)


# --- floating-point environment and threads ---------------------------------------------------


def test_no_level_fuses_multiply_and_add() -> None:
    """One fma would keep the 2^-24 that the rounded product drops."""
    a = 1 + 2.0**-12
    for level in k.isa_levels():
        k.set_isa(level)
        assert k.multiply_then_add(a, a, -(1 + 2.0**-11)) == 0.0, level
    assert Fraction(a) * Fraction(a) - (1 + Fraction(1, 2**11)) == Fraction(1, 2**24)


def test_arith_id_is_the_same_on_every_level() -> None:
    seen: dict[str, str] = {}
    for level in k.isa_levels():
        k.set_isa(level)
        seen[level] = k.arith_id()
    assert len(set(seen.values())) == 1, seen
    names = [name for name, _ in k.golden_records(k.Pool(1))]
    assert {"quantise q", "linear q4_0", "linear_gated q6_k", "embed f16"} <= set(names)


def test_a_changed_rounding_mode_changes_no_bit(pool: k.Pool) -> None:
    """Another library may leave the caller's thread rounding down; kernels set the mode."""
    rng = np.random.default_rng(12)
    values = random_values(4, 512, rng)
    matrix = packed(pool, "q4_0", random_tensor("q4_0", 40, 512, rng), 40, 512)
    rows, out, x = rows_of(values), k.Rows(4, 40), k.Activations(4, 512)
    want = product(pool, quantised(pool, values), matrix, 4)
    libm = ctypes.CDLL("libm.so.6")
    downward = {"x86_64": 0x400, "aarch64": 0x800000}.get(os.uname().machine)
    if downward is None:
        pytest.skip("the code of FE_DOWNWARD is not known here")
    assert libm.fesetround(downward) == 0
    try:
        k.quantise(pool, rows, 4, x)
        k.linear(pool, x, [matrix], [None], 4, out)
        kept = libm.fegetround()
    finally:
        libm.fesetround(0)
    assert kept == downward, "the caller's own mode comes back"
    assert_same_bits(out.view(4).copy(), want)


def test_pool_parks_and_wakes() -> None:
    """Without spinning, every run goes through the futex; more threads than cores still finish."""
    for threads, spin_us in ((2, 0), (9, 0), (9, 60)):
        team = k.Pool(threads, spin_us=spin_us)
        for _ in range(200):
            team.run_empty()
        assert team.environments() == [1] * threads
        team.close()
        team.close()
        with pytest.raises(RuntimeError, match="after close"):
            team.run_empty()


def test_pool_refuses_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="threads must be"):
        k.Pool(0)
    with pytest.raises(ValueError, match="one core per thread"):
        k.Pool(2, [0])
    with pytest.raises(ValueError, match="core 100000"):
        k.Pool(1, [100000])


def test_pool_pins_threads_and_restores_the_affinity_of_the_caller() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    team = k.Pool(2, [core, core])
    assert os.sched_getaffinity(0) == {core}
    team.run_empty()
    team.close()
    assert os.sched_getaffinity(0) == before
