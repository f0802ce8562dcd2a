"""The activation gelu: rule 5 on every level, in dense layers and experts, at all magnitudes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from tests.kernels import binary32
from tests.kernels.linear.test_experts import ANY_SIZE, LEVELS, Gates
from tests.kernels.test_linear import quantised
from tests.kernels.test_twin import assert_bits, packed

F32 = NDArray[np.float32]
SMALL = [2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-75), 1e-20, 0.0]
LARGE = [20.0, 88.0, 1e6, 7e12, 1.8e19, 1.85e19, 1e26, 3.4028235e38]  # past each overflow
# Gates whose argument is near the two ends of exp, and where it is least.
EDGES = [*SMALL, *LARGE, *[-x for x in LARGE], -0.7517, -9.95, -9.96, -10.0, -10.05, 9.95, 10.02]


def gelu(gate: F32, up: F32) -> F32:
    """The twin of rule 5, for finite values."""
    with np.errstate(over="ignore"):
        square = gate * gate
        within = np.isfinite(square)
        slope = binary32.fma(
            np.where(within, square, np.float32(0)),
            binary32.constant(0x3D922279),
            binary32.constant(0x3FCC422A),
        )
        x = -gate * np.where(within, slope, np.float32(np.inf))
        grown = np.where(x > 88, np.float32(np.inf), binary32.exp(np.minimum(x, np.float32(88))))
        return gate / (np.float32(1) + grown) * up


def dense(pool: k.Pool, gate: F32, up: F32) -> F32:
    """The gate of a dense layer whose matrices have no weights: each product is its bias."""
    zero = packed(pool, "q4_0", len(gate), 32, bytes(18 * len(gate)))
    x, out = quantised(pool, np.ones((1, 32), np.float32)), k.Rows(1, len(gate))
    k.linear_gated(pool, x, zero, zero, k.Vector(gate), k.Vector(up), 1, out, "gelu")
    return out.view(1)[0].copy()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gelu_is_rule_5_on_every_level(pool: k.Pool, data: st.DataObject) -> None:
    one = st.sampled_from(EDGES) | st.floats(-12, 12, width=32) | ANY_SIZE
    rows = data.draw(st.lists(st.tuples(one, one), min_size=32, max_size=32))
    gate, up = np.array(rows, np.float32).T.copy() + np.float32(0)  # a product is no -0
    wanted, gates = [gelu(gate, up).tolist()], Gates(pool, 32)
    for level in LEVELS:
        k.set_isa(level)
        assert_bits(gates.of(gate, up, "gelu")[None], wanted)
        assert_bits(dense(pool, gate, up)[None], wanted)


@pytest.mark.parametrize("level", LEVELS)
def test_a_large_gate_is_itself_or_minus_zero(pool: k.Pool, level: str) -> None:
    k.set_isa(level)
    large, one = np.array(LARGE, np.float32), np.ones(len(LARGE), np.float32)
    assert_bits(dense(pool, large, one)[None], [large.tolist()])
    assert_bits(dense(pool, -large, one)[None], [[-0.0] * len(LARGE)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(pool: k.Pool, level: str, bad: float) -> None:
    k.set_isa(level)
    sound = np.array([-1e30, -50.0, -3.0, 0.0, 0.5, 9.0, 1e30], np.float32)
    invalid = np.full_like(sound, bad)
    for gate, up in ((invalid, sound), (sound, invalid), (invalid, invalid), (invalid, -invalid)):
        assert not np.isfinite(dense(pool, gate, up)).any()


def test_gelu_is_the_one_with_tanh(pool: k.Pool) -> None:
    """Within a few units of binary32; the argument is rounded thrice, and its error grows with the
    exponent."""
    gate = np.concatenate([np.linspace(-9, 9, 8191), np.geomspace(1e-30, 1e30, 101)])
    gate = gate.astype(np.float32) + np.float32(0)
    x = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        argument = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        wanted = x / (1 + np.exp(-argument))
        by_tanh = x / 2 * (1 + np.tanh(argument / 2))
    found = dense(pool, gate, np.ones_like(gate))
    assert (np.abs(found - wanted) <= 2.0**-22 * np.abs(wanted) * np.maximum(1, -argument)).all()
    assert np.allclose(wanted, by_tanh, rtol=1e-13, atol=1e-14)
