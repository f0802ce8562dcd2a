"""Silu within a limit: rule 5 on every level, in dense layers and experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from tests.kernels import binary32
from tests.kernels.linear.test_experts import ANY_SIZE, LEVELS, Bank, selected
from tests.kernels.test_linear import quantised
from tests.kernels.test_twin import assert_bits, packed

F32 = NDArray[np.float32]
LIMITS = 0.001, 0.3, 7.0, 16.0, 1e6
EDGES = [0.0, 7.0, -7.0, 7.0000005, -7.0000005, 7.006, -1.0, -87.5, -88.5, -300.0, 3e38, -3e38]


def limited(gate: F32, up: F32, limit: np.float32) -> F32:
    """The twin of rule 5, for finite values."""
    grown = np.where(
        -gate > 88, np.float32(np.inf), binary32.exp(np.minimum(-gate, np.float32(88)))
    )
    silu = gate / (np.float32(1) + grown)
    return np.minimum(silu, limit) * np.clip(up, -limit, limit)


def of_biases(pool: k.Pool, gate: F32, up: F32, limit: float) -> tuple[F32, F32]:
    """The activation of values, in a dense layer and in the second of two experts whose matrices
    have no weights: each product is its bias."""
    n = len(up)
    x = quantised(pool, np.ones((1, 32), np.float32))
    dense, zero = k.Rows(1, n), packed(pool, "q4_0", n, 32, bytes(18 * n))
    biases = k.Vector(gate), k.Vector(up)
    k.linear_gated(pool, x, zero, zero, *biases, 1, dense, limit=limit)
    pairs, _, _ = selected(pool, np.array([[0, 1]], np.float32), 1)
    gathered, out = k.Activations(pairs.rows_max, 32), k.Rows(pairs.rows_max, n)
    k.gather_pairs(pool, x, pairs, gathered)
    bank = packed(pool, "q4_0", 2 * n, 32, bytes(36 * n))
    of_bank = [k.Vector(np.concatenate([np.full_like(of, 1e9), of])) for of in (gate, up)]
    k.pairs_gated(pool, gathered, bank, bank, pairs, out, *of_bank, limit=limit)
    return dense.view(1).copy(), out.view(1).copy()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_limit_is_rule_5_on_every_level(pool: k.Pool, data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from(LIMITS) | st.floats(0.0009765625, 64, width=32))
    one = st.sampled_from(EDGES) | st.floats(-60, 12, width=32) | ANY_SIZE
    rows = data.draw(st.lists(st.tuples(one, one), min_size=32, max_size=32))
    gate, up = np.array(rows, np.float32).T.copy() + np.float32(0)  # a product is no -0
    wanted = [limited(gate, up, np.float32(limit)).tolist()]
    for level in LEVELS:
        k.set_isa(level)
        for found in of_biases(pool, gate, up, limit):
            assert_bits(found, wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_limit_hides_nothing_that_is_not_finite(pool: k.Pool, level: str) -> None:
    k.set_isa(level)
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)
    sound = np.array([-100.0, -3.0, 0.0, 0.5, 9.0], np.float32)
    pairs = [(b, s) for b in bad for s in sound] + [(s, b) for b in bad for s in sound]
    pairs += [(b, c) for b in bad for c in bad]
    pairs += pairs[:9]  # whole tiles
    gate, up = np.array(pairs, np.float32).T.copy()
    for found in of_biases(pool, gate, up, 2.0):
        assert np.isnan(found).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_limit_that_nothing_reaches_changes_no_bit(pool: k.Pool, level: str) -> None:
    k.set_isa(level)
    gate, up = (3 * np.random.default_rng(3).standard_normal((2, 80))).astype(np.float32)
    without, large = (of_biases(pool, gate, up, limit) for limit in (0.0, 100.0))
    for one, other in zip(without, large, strict=True):
        assert one.tobytes() == other.tobytes()
    small = of_biases(pool, gate, up, 1.0)
    assert all((np.abs(found) <= 1.0).all() for found in small)
    assert all((found == 1.0).any() for found in small)


def test_limits_that_make_no_sense_are_refused(pool: k.Pool) -> None:
    bank = Bank(pool, "q4_0", 2, 16, 32, 1)
    matrix = bank.experts[0]
    pairs, _, _ = selected(pool, np.zeros((3, 2), np.float32), 1)
    x, of_pairs = k.Activations(3, 32), k.Activations(pairs.rows_max, 32)
    out, gated = k.Rows(3, 16), k.Rows(pairs.rows_max, 16)
    for activation, limit, said in [
        ("silu", -1.0, "the limit is no positive number"),
        ("silu", float("nan"), "the limit is no positive number"),
        ("silu", float("inf"), "the limit is no positive number"),
        ("oai", 7.0, "oai has no limit"),
        ("gelu", 7.0, "gelu has no limit"),
        ("relu2", 7.0, "relu2 has no limit"),
    ]:
        given = None if activation == "relu2" else matrix
        with pytest.raises(ValueError, match=f"linear_gated: {said}"):
            k.linear_gated(pool, x, given, matrix, None, None, 3, out, activation, limit)
        given = None if activation == "relu2" else bank.matrix
        functions = None, None, activation, limit
        with pytest.raises(ValueError, match=f"pairs_gated: {said}"):
            k.pairs_gated(pool, of_pairs, given, bank.matrix, pairs, gated, *functions)
