"""Mamba-2 is the formula of the document, bit for bit, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kernels as K
from tests.kernels.recurrent.images import (
    LEVELS,
    Entry,
    bits,
    check_levels,
    mamba2_formula,
    random_mamba2,
    random_rows,
    run,
    step,
)

# n_group, n_head, head_dim, state_dim, conv_kernel
SHAPES = [(1, 2, 16, 32, 2), (2, 4, 64, 128, 4), (1, 3, 80, 64, 3), (1, 1, 48, 96, 4)]
WIDE = [(1, 1, 112, 160, 4), (3, 3, 32, 192, 4), (1, 1, 256, 224, 2), (1, 1, 128, 256, 4)]
VARIANTS = [(True, True), (False, True), (True, False)]  # a bias of the convolution, and norms


def shape_of(sizes: tuple[int, ...], n_layer: int = 1) -> K.StateShape:
    return K.StateShape.mamba2(n_layer, *sizes)


@pytest.mark.parametrize("index", range(len(SHAPES + WIDE)))
def test_every_level_computes_the_formula(pool: K.Pool, index: int) -> None:
    shape = shape_of((SHAPES + WIDE)[index])
    has_bias, is_normed = VARIANTS[index % len(VARIANTS)]
    weights = random_mamba2(shape, 1, has_bias=has_bias, is_normed=is_normed)
    rows = random_rows(shape, 7, 2)
    check_levels(pool, shape, weights, rows, *mamba2_formula(shape, weights, rows))


def test_the_formula_is_mamba_2(pool: K.Pool) -> None:
    """In binary64, by the textbook form: the state decays, and gets the input times step size."""
    groups, heads, d, keys, tokens = 2, 4, 64, 32, 30
    shape = shape_of((groups, heads, d, keys, 4))
    w, rows = random_mamba2(shape, 3), random_rows(shape, tokens, 4)
    assert w.conv_bias is not None
    assert w.norm is not None
    got, _ = run(pool, shape, w, rows)
    x = np.concatenate([np.zeros((3, shape.channels)), rows[:, : shape.channels]])
    c = sum(x[j : j + tokens] * w.conv[:, j].astype(float) for j in range(4)) + w.conv_bias
    c = np.asarray(c / (1 + np.exp(-c)))
    x, b, q = np.split(c, [heads * d, heads * d + groups * keys], 1)
    x = x.reshape(tokens, heads, d)
    b, q = (np.repeat(y.reshape(tokens, groups, keys), 2, axis=1) for y in (b, q))
    z, dt = np.split(rows[:, shape.channels :].astype(float), [heads * d], 1)
    size = np.log1p(np.exp(dt + w.dt_bias))
    state = np.zeros((heads, keys, d))
    for t in range(tokens):
        state *= np.exp(w.a * size[t])[:, None, None]
        state += size[t][:, None, None] * b[t][:, :, None] * x[t][:, None, :]
        o = np.einsum("hkd,hk->hd", state, q[t]) + w.d[:, None] * x[t]
        o = (o.reshape(-1) * z[t] / (1 + np.exp(-z[t]))).reshape(groups, -1)
        o = o / np.sqrt((o**2).mean(1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(got[t], o.reshape(-1) * w.norm, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["x", "B", "C", "z", "dt"])
def test_what_is_not_finite_stays_so(pool: K.Pool, part: str, value: float, level: str) -> None:
    """In the outputs at that token; from all but z, beyond it, by the state or its inputs."""
    K.set_isa(level)
    shape = shape_of((1, 2, 64, 32, 4))
    d, z = 64, shape.channels
    weights, rows = random_mamba2(shape, 14), random_rows(shape, 8, 15)
    column = {"x": 3, "B": 2 * d + 3, "C": 2 * d + 35, "z": z + 3, "dt": z + 2 * d}
    rows[4, column[part]] = value
    for is_normed, cuts in ((True, []), (False, [4]), (True, [4, 5])):
        own = weights if is_normed else replace(weights, norm=None)
        out, _ = run(pool, shape, own, rows, cuts)
        finite = np.isfinite(out[:, :d]).all(1)
        assert finite[:4].all()
        assert not finite[4]
        if part in ("x", "B", "dt"):
            assert not finite[5:].any()
        if part == "C":
            assert not finite[5:7].any()


def test_a_decay_may_be_one_or_zero(pool: K.Pool) -> None:
    shape = shape_of((1, 1, 16, 32, 2))
    weights = replace(random_mamba2(shape, 16), dt_bias=np.zeros(1, np.float32), a=np.float32([-5]))
    rows = random_rows(shape, 6, 17)
    rows[:, -1] = [-90, -20, 0, 19.5, 60, 1e9]
    wanted, wanted_s, _ = mamba2_formula(shape, weights, rows)
    for level in LEVELS:
        K.set_isa(level)
        entry = Entry(shape, weights)
        step(pool, [entry], [rows])
        assert np.array_equal(bits(entry.outputs[0]), bits(wanted))
        assert np.array_equal(bits(entry.state()[0]), bits(wanted_s))
