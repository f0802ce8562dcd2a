"""Gates of the attention output and of the shared expert."""

from __future__ import annotations

import numpy as np
import pytest

import kernels as K
from tests.kernels.binary32 import F32
from tests.kernels.recurrent.images import LEVELS, bits, sigmoid

WIDTHS = [1, 15, 16, 33, 2048]


def rows_of(values: F32) -> K.Rows:
    rows = K.Rows(*values.shape)
    rows.view(len(values))[:] = values
    return rows


def random_values(seed: int, tokens: int, width: int) -> F32:
    values = np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)
    return values * np.float32(6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_gate_of_attention(pool: K.Pool, level: str, width: int) -> None:
    K.set_isa(level)
    gate, y = random_values(1, 21, width), random_values(2, 21, width)
    gate[0, 0], gate[1, 0], gate[2, 0] = 95, -87.5, 0
    out = rows_of(y)
    K.gate_rows(pool, rows_of(gate), 20, out)
    got = out.view(21)
    assert np.array_equal(bits(got[:20]), bits(y[:20] * sigmoid(gate[:20])))
    assert np.array_equal(got[20], y[20])


@pytest.mark.parametrize(("heads", "run"), [(1, 40), (3, 35), (6, 128), (5, 2)])
@pytest.mark.parametrize("level", LEVELS)
def test_the_gate_of_each_head(pool: K.Pool, level: str, heads: int, run: int) -> None:
    """One value of the gate is for a run of neighbours: as if each of these had it."""
    K.set_isa(level)
    gate, y = random_values(6, 21, heads), random_values(7, 21, heads * run)
    gate[0, 0], gate[1, 0], gate[2, 0] = 95, -87.5, 0
    out, wanted = rows_of(y), rows_of(y)
    K.gate_rows(pool, rows_of(gate), 20, out)
    K.gate_rows(pool, rows_of(np.repeat(gate, run, axis=1)), 20, wanted)
    assert np.array_equal(bits(out.view(21)), bits(wanted.view(21)))
    assert np.array_equal(out.view(21)[20], y[20])
    gate[3, heads - 1] = np.inf
    K.gate_rows(pool, rows_of(gate), 20, out)
    assert np.isnan(out.view(21)[3]).tolist() == [False] * (heads - 1) * run + [True] * run


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_share_of_an_expert(pool: K.Pool, level: str, width: int) -> None:
    K.set_isa(level)
    x, h, gate = random_values(3, 9, width), random_values(4, 9, width), random_values(5, 9, 1)
    out = rows_of(h)
    K.gate_add(pool, rows_of(x), rows_of(gate), 8, out)
    got = out.view(9)
    assert np.array_equal(bits(got[:8]), bits(h[:8] + sigmoid(gate[:8]) * x[:8]))
    assert np.array_equal(got[8], h[8])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gate_that_is_not_finite_is_not_hidden(pool: K.Pool, level: str, value: float) -> None:
    K.set_isa(level)
    for width in (40, 1):
        gate = np.zeros((3, width), np.float32)
        gate[1, -1] = value
        out = rows_of(np.ones((3, 40), np.float32))
        if width == 40:
            K.gate_rows(pool, rows_of(gate), 3, out)
        else:
            K.gate_add(pool, rows_of(np.ones((3, 40), np.float32)), rows_of(gate), 3, out)
        assert K.nonfinite_rows(pool, out, 3) == [1]


def test_sizes_that_are_refused(pool: K.Pool) -> None:
    wide, narrow, one = K.Rows(2, 40), K.Rows(2, 39), K.Rows(2, 1)
    for call, said in [
        (lambda: K.gate_rows(pool, narrow, 2, wide), "gate_rows: 40 values for 39 gates"),
        (lambda: K.gate_rows(pool, wide, 3, wide), "gate_rows: 3 tokens do not fit 2"),
        (lambda: K.gate_add(pool, narrow, one, 2, wide), "gate_add: width is 39, expected 40"),
        (lambda: K.gate_add(pool, wide, narrow, 2, wide), "gate_add: gate: width is 39"),
        (lambda: K.gate_add(pool, wide, K.Rows(1, 1), 2, wide), "2 tokens do not fit 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            call()
