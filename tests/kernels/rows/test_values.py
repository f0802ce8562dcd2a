"""Rule 13: rows value by value, on every level, against the rule written with numpy."""

from __future__ import annotations

import numpy as np
import pytest

import kernels as K
from tests.kernels import binary32
from tests.kernels.binary32 import F32
from tests.kernels.linear.test_gelu import gelu
from tests.kernels.recurrent.images import LEVELS, bits
from tests.kernels.recurrent.test_gates import rows_of

WIDTHS = [1, 15, 16, 33, 2050]
COEFFICIENTS = (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
ONE = np.float32(1)


def some(seed: int, tokens: int, width: int, size: float = 6.0) -> F32:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((tokens, width)) * size * rng.choice([1e-3, 1.0], (tokens, 1))
    return values.astype(np.float32)


def tanh(x: F32) -> F32:
    """The tree of rule 13, for finite values."""
    z = x * x
    p = np.full(x.shape, -5.70498872745e-3, np.float32)
    for coefficient in COEFFICIENTS:
        p = binary32.fma(p, z, np.full(x.shape, coefficient, np.float32))
    t = binary32.exp(np.abs(x) * np.float32(-2))
    large = np.copysign((ONE - t) / (ONE + t), x)
    return np.where(np.abs(x) >= np.float32(0.625), large, binary32.fma(p * z, x, x))


def norm_factor(x: F32, eps: float) -> np.float32:
    """1 / sqrt(mean of squares + eps) by rule 3."""
    lanes = np.zeros(64, np.float32)
    for i, value in enumerate(x):
        of = np.array([value], np.float32)
        lanes[i % 64] = binary32.fma(of, of, lanes[i % 64 : i % 64 + 1])[0]
    for width in (32, 16, 8, 4, 2, 1):
        lanes[:width] += lanes[width : 2 * width]
    mean = np.float32(lanes[0] / np.float32(len(x)) + np.float32(eps))
    return np.float32(ONE / np.sqrt(mean))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("level", LEVELS)
def test_each_value_is_the_rule(pool: K.Pool, level: str, width: int) -> None:
    """Rows behind the first ones stay."""
    K.set_isa(level)
    x, factors = some(1, 6, width), some(2, 6, width + 9)
    out = rows_of(x)
    K.scale_rows(pool, 0.3, 5, out)
    assert np.array_equal(bits(out.view(6)), bits(np.vstack([x[:5] * np.float32(0.3), x[5:]])))
    out = rows_of(x)
    K.scaled_add(pool, rows_of(factors[:, 9:]), 0.22, 5, out)
    want = binary32.fma(factors[:5, 9:], np.float32(0.22), x[:5])
    assert np.array_equal(bits(out.view(6)), bits(np.vstack([want, x[5:]])))
    for cap in (0.5, 30.0):
        out, bound = rows_of(x), np.float32(cap)
        K.cap_rows(pool, cap, 5, out)
        want = bound * tanh(x[:5] * (ONE / bound)) + np.float32(0)
        assert np.array_equal(bits(out.view(6)), bits(np.vstack([want, x[5:]])))
    out = rows_of(x)
    K.gelu_rows(pool, rows_of(factors), 9, 5, out)
    want = gelu(x[:5], factors[:5, 9:])
    assert np.array_equal(bits(out.view(6)), bits(np.vstack([want, x[5:]])))
    K.zero_rows(pool, 5, out)
    assert not out.view(6)[:5].any()
    assert np.array_equal(out.view(6)[5], x[5])


@pytest.mark.parametrize(("group", "groups"), [(1, 3), (32, 4), (100, 2), (256, 1)])
@pytest.mark.parametrize("level", LEVELS)
def test_inputs_of_layers_are_mixed(pool: K.Pool, level: str, group: int, groups: int) -> None:
    K.set_isa(level)
    x, before = some(3, 4, group * groups, 40.0), some(4, 4, group * groups, 1.0)
    norm, scale, eps = some(5, 1, group, 1.0)[0], np.float32(0.02), 1e-6
    out = rows_of(before)
    K.mix_inputs(pool, rows_of(x), float(scale), K.Vector(norm), eps, 3, out)
    for token in range(3):
        for at in range(0, group * groups, group):
            scaled = x[token, at : at + group] * scale
            normed = scaled * norm_factor(scaled, eps) * norm
            want = (before[token, at : at + group] + normed) * np.float32(0.5**0.5)
            assert np.array_equal(bits(out.view(4)[token, at : at + group]), bits(want))
    assert np.array_equal(out.view(4)[3], before[3])


@pytest.mark.parametrize(("first", "width"), [(0, 1), (3, 40), (7, 700), (0, 300)])
@pytest.mark.parametrize("level", LEVELS)
def test_columns_are_normed_in_place(pool: K.Pool, level: str, first: int, width: int) -> None:
    K.set_isa(level)
    before, norm, eps = some(8, 4, first + width + 5), some(9, 1, width, 1.0)[0], 1e-6
    out = rows_of(before)
    K.norm_columns(pool, first, K.Vector(norm), eps, 3, out)
    want = before.copy()
    for token in range(3):
        columns = before[token, first : first + width]
        want[token, first : first + width] = columns * norm_factor(columns, eps) * norm
    assert np.array_equal(bits(out.view(4)), bits(want))


def test_the_bound_is_near_that_of_binary64(pool: K.Pool) -> None:
    x = np.concatenate([np.linspace(-120, 120, 20001), np.linspace(-1, 1, 20001)])
    out = rows_of(x.astype(np.float32)[None])
    K.cap_rows(pool, 30.0, 1, out)
    want = 30 * np.tanh(x.astype(np.float32).astype(np.float64) / 30)
    assert np.abs(out.view(1)[0] - want).max() <= 4 * 2.0**-24 * 30
    assert (np.diff(out.view(1)[0][:20001]) >= 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_is_not_hidden(pool: K.Pool, level: str, value: float) -> None:
    K.set_isa(level)
    x = np.ones((3, 40), np.float32)
    x[1, 39] = x[2, 3] = value
    capped, scaled, mixed, added, to = (rows_of(x) for _ in range(5))
    K.cap_rows(pool, 30.0, 3, capped)
    K.scale_rows(pool, 2.0, 3, scaled)
    K.mix_inputs(pool, rows_of(x), 1.0, K.Vector(np.ones(20, np.float32)), 1e-6, 3, mixed)
    K.scaled_add(pool, rows_of(x), 0.22, 3, added)
    K.scaled_add(pool, rows_of(np.ones_like(x)), 0.22, 3, to)
    for rows in (capped, scaled, mixed, added, to):
        assert K.nonfinite_rows(pool, rows, 3) == [1, 2]


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_experts_are_times_their_scales(pool: K.Pool, level: str) -> None:
    K.set_isa(level)
    logits, scales = some(6, 20, 12), some(7, 1, 12, 1.0)[0]
    plain, scaled = (K.ExpertPairs(20, 12, 4) for _ in range(2))
    K.select_experts(pool, rows_of(logits), 20, 1.5, plain)
    K.select_experts(pool, rows_of(logits), 20, 1.5, scaled, scales=K.Vector(scales))
    ids, weights = plain.unpack()
    assert np.array_equal(scaled.unpack()[0], ids)
    assert np.array_equal(bits(scaled.unpack()[1]), bits(weights * scales[ids]))


def test_sizes_that_are_refused(pool: K.Pool) -> None:
    wide, narrow, norm = K.Rows(2, 40), K.Rows(2, 39), K.Vector(np.ones(12, np.float32))
    for call, said in [
        (lambda: K.zero_rows(pool, 3, wide), "zero_rows: 3 tokens do not fit 2"),
        (lambda: K.scale_rows(pool, 1.0, 3, wide), "scale_rows: 3 tokens do not fit 2"),
        (lambda: K.scaled_add(pool, wide, 1.0, 3, wide), "scaled_add: 3 tokens do not fit 2"),
        (lambda: K.scaled_add(pool, K.Rows(1, 40), 1.0, 2, wide), "2 tokens do not fit 1"),
        (lambda: K.scaled_add(pool, narrow, 1.0, 2, wide), "scaled_add: width is 39, expected 40"),
        (lambda: K.scaled_add(pool, wide, float("nan"), 2, wide), "the factor is not finite"),
        (lambda: K.cap_rows(pool, 0.0, 2, wide), "cap must be positive"),
        (lambda: K.cap_rows(pool, float("nan"), 2, wide), "cap must be positive"),
        (lambda: K.gelu_rows(pool, narrow, 0, 2, wide), "no columns 0 to 40"),
        (lambda: K.gelu_rows(pool, wide, 2, 2, narrow), "no columns 2 to 41"),
        (lambda: K.gelu_rows(pool, wide, 1 << 63, 2, narrow), "no columns"),
        (lambda: K.mix_inputs(pool, narrow, 1.0, norm, 1e-6, 2, wide), "width is 39"),
        (lambda: K.mix_inputs(pool, wide, 1.0, norm, 1e-6, 2, wide), "no whole groups of 12"),
        (lambda: K.norm_columns(pool, 0, norm, 1e-6, 3, wide), "3 tokens do not fit 2"),
        (lambda: K.norm_columns(pool, 29, norm, 1e-6, 2, wide), "no columns 29 to 41"),
        (lambda: K.norm_columns(pool, 1 << 63, norm, 1e-6, 2, wide), "no columns"),
        (
            lambda: K.select_experts(pool, wide, 2, 1.0, K.ExpertPairs(2, 40, 2), scales=norm),
            "one value per expert",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            call()
