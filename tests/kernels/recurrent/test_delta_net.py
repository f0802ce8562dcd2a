"""The gated delta rule is the formula of the document, bit for bit, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

import kernels as K
from tests.kernels.recurrent.images import (
    BEST,
    EPS,
    LEVELS,
    Entry,
    Weights,
    bits,
    check_levels,
    formula,
    random_rows,
    random_weights,
    run,
    step,
)

# n_k_head, n_v_head, head_dim, conv_kernel, and key_run unless it is 1
SHAPES = [(1, 1, 32, 2), (2, 4, 64, 3), (1, 3, 128, 4), (2, 8, 32, 4), (1, 2, 128, 2)]
GROUPED = [(2, 4, 64, 3, 2), (2, 8, 32, 4, 4), (2, 8, 32, 4, 2), (3, 9, 32, 2, 3)]
ODD_WIDTHS = [(1, 1, 96, 4), (1, 1, 160, 3), (1, 1, 192, 4), (1, 1, 224, 4), (1, 1, 256, 4)]


def shape_of(sizes: tuple[int, ...], n_layer: int = 1) -> K.StateShape:
    return K.StateShape(n_layer, *sizes)


@pytest.mark.parametrize("sizes", [*SHAPES, *GROUPED, *ODD_WIDTHS])
def test_every_level_computes_the_formula(pool: K.Pool, sizes: tuple[int, ...]) -> None:
    shape = shape_of(sizes)
    weights, rows = random_weights(shape, 1), random_rows(shape, 9, 2)
    check_levels(pool, shape, weights, rows, *formula(shape, weights, rows))


def test_the_formula_is_the_gated_delta_rule(pool: K.Pool) -> None:
    """In binary64, by the textbook form: the state decays, then learns what v lacks."""
    shape = shape_of((2, 4, 64, 4))
    w, rows = random_weights(shape, 3), random_rows(shape, 40, 4)
    got, _ = run(pool, shape, w, rows)
    d, n_k, n_v = 64, 2, 4
    x = np.concatenate([np.zeros((3, shape.channels)), rows[:, : shape.channels]])
    c = sum(x[j : j + 40] * w.conv[:, j].astype(float) for j in range(4))
    c = np.asarray(c / (1 + np.exp(-c))).reshape(40, -1, d)
    q, k, v = np.split(c, [n_k, 2 * n_k], axis=1)
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + EPS) for y in (q, k))
    z, beta, alpha = np.split(rows[:, shape.channels :].astype(float), [n_v * d, n_v * d + n_v], 1)
    state = np.zeros((n_v, d, d))
    for t in range(40):
        for h in range(n_v):
            key, query = k[t, h % n_k], q[t, h % n_k]
            state[h] *= np.exp(w.a[h] * np.log1p(np.exp(alpha[t, h] + w.dt_bias[h])))
            lacking = v[t, h] - state[h].T @ key
            state[h] += np.outer(key, lacking / (1 + np.exp(-beta[t, h])))
            o = state[h].T @ query / 8
            o = o / np.sqrt((o**2).mean() + EPS) * w.norm
            gate = z[t, h * d : (h + 1) * d]
            wanted = o * gate / (1 + np.exp(-gate))
            np.testing.assert_allclose(got[t, h * d : (h + 1) * d], wanted, rtol=2e-4, atol=2e-4)


def test_a_prompt_token_by_token_is_the_prompt_in_one_step(pool: K.Pool) -> None:
    shape = shape_of((2, 4, 128, 4))
    weights, rows = random_weights(shape, 5), random_rows(shape, 60, 6)
    whole, image = run(pool, shape, weights, rows)
    single, last = run(pool, shape, weights, rows, range(1, 60))
    assert np.array_equal(bits(whole), bits(single))
    assert np.array_equal(image, last)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["q", "k", "v", "z", "beta", "alpha"])
def test_what_is_not_finite_stays_so(pool: K.Pool, part: str, value: float, level: str) -> None:
    """In the outputs at that token; from all but z, beyond it, by the state or its inputs."""
    K.set_isa(level)
    shape = shape_of((1, 2, 64, 4))
    d, z = 64, shape.channels
    weights, rows = random_weights(shape, 14), random_rows(shape, 8, 15)
    column = {"q": 3, "k": d + 3, "v": 2 * d + 3, "z": z + 3}
    column |= {"beta": z + 2 * d, "alpha": z + 2 * d + 2}
    rows[4, column[part]] = value
    for cuts in ([], [4], [4, 5]):
        out, _ = run(pool, shape, weights, rows, cuts)
        finite = np.isfinite(out[:, :d]).all(1)
        assert finite[:4].all()
        assert not finite[4]
        if part in ("k", "v", "beta", "alpha"):
            assert not finite[5:].any()
        if part == "q":
            assert not finite[5:7].any()


def test_a_decay_may_be_one_or_zero(pool: K.Pool) -> None:
    shape = shape_of((1, 1, 32, 2))
    random = random_weights(shape, 16)
    weights = Weights(random.conv, np.zeros(1, np.float32), np.float32([-5]), random.norm)
    rows = random_rows(shape, 6, 17)
    rows[:, -1] = [-90, -20, 0, 19.5, 60, 1e30]
    wanted, wanted_s, _ = formula(shape, weights, rows)
    for level in LEVELS:
        K.set_isa(level)
        entry = Entry(shape, weights)
        step(pool, [entry], [rows])
        assert np.array_equal(bits(entry.outputs[0]), bits(wanted))
        assert np.array_equal(bits(entry.state()[0]), bits(wanted_s))


def test_levels_agree_on_long_steps() -> None:
    shape, two = shape_of((2, 4, 128, 4)), K.Pool(2)
    weights, rows = random_weights(shape, 18), random_rows(shape, 24, 19)
    found = []
    for level in LEVELS:
        K.set_isa(level)
        found.append(run(two, shape, weights, rows, [17]))
    for outputs, image in found:
        assert np.array_equal(bits(outputs), bits(found[0][0]))
        assert np.array_equal(image, found[0][1])
    K.set_isa(BEST)
    two.close()
