"""The activation relu2, of parts without a gate: rule 5 on every level, of one product alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from bench.cuda.cases.experts import cpu_rows
from tests.kernels.linear.test_experts import (
    ANY_SIZE,
    LEVELS,
    SUPERBLOCK_BYTES,
    Bank,
    selected,
    step_of,
)
from tests.kernels.recurrent.images import bits
from tests.kernels.test_linear import quantised
from tests.kernels.test_twin import assert_bits, packed

F32 = NDArray[np.float32]
EDGES = [0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-75, 1.8e19, 1.85e19, 3.4028235e38, -3.4028235e38]


def relu2(x: F32) -> F32:
    """The twin of rule 5."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        r = np.where(x >= 0, x, x * np.float32(0))
        return r * r


def of_biases(pool: k.Pool, up: F32) -> tuple[F32, F32]:
    """The activation of values, in a dense layer and in the second of two experts whose matrices
    have no weights: each product is its bias."""
    n = len(up)
    x = quantised(pool, np.ones((1, 32), np.float32))
    dense, zero = k.Rows(1, n), packed(pool, "q4_0", n, 32, bytes(18 * n))
    k.linear_gated(pool, x, None, zero, None, k.Vector(up), 1, dense, "relu2")
    pairs, _, _ = selected(pool, np.array([[0, 1]], np.float32), 1)
    gathered, out = k.Activations(pairs.rows_max, 32), k.Rows(pairs.rows_max, n)
    k.gather_pairs(pool, x, pairs, gathered)
    bank = packed(pool, "q4_0", 2 * n, 32, bytes(36 * n))
    bias = k.Vector(np.concatenate([np.full_like(up, 1e9), up]))
    k.pairs_gated(pool, gathered, None, bank, pairs, out, None, bias, "relu2")
    return dense.view(1).copy(), out.view(1).copy()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_relu2_is_rule_5_on_every_level(pool: k.Pool, data: st.DataObject) -> None:
    one = st.sampled_from(EDGES) | st.floats(-12, 12, width=32) | ANY_SIZE
    up = np.array(data.draw(st.lists(one, min_size=32, max_size=32)), np.float32)
    wanted = [relu2(up).tolist()]
    for level in LEVELS:
        k.set_isa(level)
        for found in of_biases(pool, up):
            assert_bits(found, wanted)
            assert not np.signbit(found).any()


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_stays_so(pool: k.Pool, level: str) -> None:
    k.set_isa(level)
    up = np.ones(16, np.float32)
    up[:3] = np.nan, np.inf, -np.inf
    for found in of_biases(pool, up):
        assert not np.isfinite(found[0, :3]).any()
        assert (found[0, 3:] == 1).all()


@pytest.mark.parametrize("kind", ["q4_0", "q6_k", "f16"])
@pytest.mark.parametrize("tokens", [1, 19, 200])
def test_a_product_is_squared_on_every_level(pool: k.Pool, kind: str, tokens: int) -> None:
    """As `linear`, then the activation; by one thread and by three. A token that is no number does
    not affect others."""
    rows, cols = 75, 512
    up = Bank(pool, kind, 1, rows, cols, 1).matrix
    x = np.random.default_rng(tokens).standard_normal((tokens, cols)).astype(np.float32)
    x[tokens // 2, 7] = np.nan
    bias = np.random.default_rng(1).standard_normal(rows).astype(np.float32)
    three = k.Pool(3)
    for level in LEVELS:
        k.set_isa(level)
        plain, given = k.Rows(tokens, rows), quantised(pool, x)
        for of_up in (None, k.Vector(bias)):
            k.linear(pool, given, [up], [of_up], tokens, plain)
            wanted = relu2(plain.view(tokens))
            assert np.isnan(wanted).all(axis=1).tolist() == [
                t == tokens // 2 for t in range(tokens)
            ]
            for threads in (pool, three):
                out = k.Rows(tokens, rows)
                k.linear_gated(threads, given, None, up, None, of_up, tokens, out, "relu2")
                assert np.array_equal(out.view(tokens), wanted, equal_nan=True)
    three.close()


@pytest.mark.parametrize("kind", ["q4_0", "q6_k", "f16"])
def test_pairs_are_products_of_dense_layers_on_every_level(pool: k.Pool, kind: str) -> None:
    n_embd, n_ff = (256, 64) if kind in SUPERBLOCK_BYTES else (96, 64)
    bank = Bank(pool, kind, 6, n_ff, n_embd, 2)
    bias = np.random.default_rng(4).standard_normal((6, n_ff)).astype(np.float32)
    x, logits = step_of(2, 40, n_embd, 6)
    logits[3:33, 2] += 20  # an expert of more than two groups
    logits[:, 4] = -50  # one that no token chose
    one = k.Rows(1, n_ff)
    for level in LEVELS:
        k.set_isa(level)
        pairs, ids, _ = selected(pool, logits, 2)
        gathered = k.Activations(pairs.rows_max, n_embd, keep_float=True)
        out = k.Rows(pairs.rows_max, n_ff)
        k.gather_pairs(pool, quantised(pool, x), pairs, gathered)
        of_up = k.Vector(bias.reshape(-1))
        k.pairs_gated(pool, gathered, None, bank.matrix, pairs, out, None, of_up, "relu2")
        order, rows = np.argsort(ids.reshape(-1), kind="stable"), cpu_rows(pairs)
        for pair, row in zip(order.tolist(), rows.tolist(), strict=True):
            expert, given = int(ids.reshape(-1)[pair]), quantised(pool, x[pair // 2][None])
            dense = bank.experts[expert], None, k.Vector(bias[expert])
            k.linear_gated(pool, given, None, *dense, 1, one, "relu2")
            assert np.array_equal(bits(out.view(row + 1)[row]), bits(one.view(1)[0]))


def test_gates_that_do_not_fit_the_activation_are_refused(pool: k.Pool) -> None:
    bank = Bank(pool, "q4_0", 2, 16, 32, 1)
    matrix, up = bank.experts[0], bank.matrix
    pairs, _, _ = selected(pool, np.zeros((3, 2), np.float32), 1)
    x, of_pairs = k.Activations(3, 32), k.Activations(pairs.rows_max, 32)
    out, gated = k.Rows(3, 16), k.Rows(pairs.rows_max, 16)
    bias, biases = (k.Vector(np.zeros(n, np.float32)) for n in (16, 32))
    for call, said in [
        (
            lambda: k.linear_gated(pool, x, matrix, matrix, None, None, 3, out, "relu2"),
            "linear_gated: relu2 has no gate",
        ),
        (
            lambda: k.linear_gated(pool, x, None, matrix, bias, None, 3, out, "relu2"),
            "linear_gated: relu2 has no gate",
        ),
        (
            lambda: k.linear_gated(pool, x, None, matrix, None, None, 3, out),
            "linear_gated: silu needs a gate",
        ),
        (
            lambda: k.linear_gated(pool, x, None, matrix, None, None, 3, out, "relu"),
            "linear_gated: no activation is named relu$",
        ),
        (
            lambda: k.linear_gated(pool, x, None, matrix, None, biases, 3, out, "relu2"),
            "a bias has one value per row",
        ),
        (
            lambda: k.linear_gated(pool, x, None, matrix, None, None, 4, out, "relu2"),
            "4 tokens do not fit 3",
        ),
        (
            lambda: k.pairs_gated(pool, of_pairs, up, up, pairs, gated, activation="relu2"),
            "pairs_gated: relu2 has no gate",
        ),
        (
            lambda: k.pairs_gated(pool, of_pairs, None, up, pairs, gated, biases, None, "relu2"),
            "pairs_gated: relu2 has no gate",
        ),
        (
            lambda: k.pairs_gated(pool, of_pairs, None, up, pairs, gated, activation="gelu"),
            "pairs_gated: gelu needs a gate",
        ),
        (
            lambda: k.pairs_gated(pool, of_pairs, None, matrix, pairs, gated, activation="relu2"),
            "pairs_gated: the bank has 16 rows",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            call()
