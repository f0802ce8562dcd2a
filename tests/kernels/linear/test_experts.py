"""Mixtures of experts: selection, and the products of pairs, are rule 11 on every level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as k
from bench.models import tensors
from tests.kernels import binary32
from tests.kernels.test_linear import quantised, rows_of
from tests.kernels.test_twin import (
    add,
    assert_bits,
    bits,
    div,
    exp,
    fma,
    mul,
    product_q4_0,
    rn,
)

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
NAN = 0x7FC00000
INFINITY = float("inf")
LEVELS = k.isa_levels()
BLOCK_BYTES = {
    "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "iq4_nl": 18,
    "mxfp4": 17,
}  # fmt: skip
SUPERBLOCK_BYTES = {
    "q4_k": 144, "q5_k": 176, "q6_k": 210, "iq4_xs": 136, "q3_k": 110, "q2_k": 84,
} | {kind: tensors.BLOCK_BYTES[kind] for kind in tensors.CODEBOOK_KINDS}  # fmt: skip


ALIKE = ("iq3_s", "iq2_xxs", "iq2_xs", "iq1_s", "iq1_m")  # iq3_xxs and iq2_s have their form


def selected(
    pool: k.Pool,
    logits: F32,
    n_used: int,
    scale: float = 1.0,
    gating: str = "softmax",
    bias: F32 | None = None,
    groups: tuple[int, int] = (1, 1),
) -> tuple[k.ExpertPairs, I32, F32]:
    pairs = k.ExpertPairs(len(logits), logits.shape[1], n_used)
    of_choice = None if bias is None else k.Vector(bias)
    given = gating, of_choice, None, *groups
    k.select_experts(pool, rows_of(logits), len(logits), scale, pairs, *given)
    ids, weights = pairs.unpack()
    return pairs, ids.copy(), weights.copy()


def by_rule_11(logits: list[float], n_used: int, scale: float) -> tuple[list[int], list[float]]:
    """The twin: steps 2 and 3, for finite logits."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ids = sorted(ranked[:n_used])
    weights = [exp(max(add(logits[i], -max(logits)), -88.0)) for i in ids]  # 0 below -87
    total = weights[0]
    for weight in weights[1:]:
        total = add(total, weight)
    return ids, [mul(div(weight, total), rn(scale)) for weight in weights]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_selection_is_rule_11(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    n_used = data.draw(st.integers(1, n))
    scale = data.draw(st.sampled_from([1.0, 2.5, 0.3]))
    few = st.sampled_from([0.0, -0.0, 1.0, -3.0, 1e-30, 90.0])  # so that some are equal
    any_size = st.floats(-(2.0**99), 2.0**99, width=32)
    rows = data.draw(
        st.lists(st.lists(few | any_size, min_size=n, max_size=n), min_size=1, max_size=4)
    )
    with_threads = k.Pool(2)
    logits = np.array(rows, np.float32)
    _, ids, weights = selected(with_threads, logits, n_used, scale)
    wanted = [by_rule_11(row, n_used, scale) for row in logits.tolist()]
    assert ids.tolist() == [row for row, _ in wanted]
    assert_bits(weights, [row for _, row in wanted])
    with_threads.close()


def by_sigmoid(
    logits: list[float], n_used: int, scale: float, bias: list[float], is_normed: bool
) -> tuple[list[int], list[float]]:
    """The twin: the same steps with the logistic function, for finite logits."""
    gates = [div(1.0, add(1.0, exp(max(-x, -88.0)) if x > -88 else INFINITY)) for x in logits]
    keys = [add(gate, b) for gate, b in zip(gates, bias, strict=True)]
    ids = sorted(sorted(range(len(keys)), key=lambda i: (-keys[i], i))[:n_used])
    total = gates[ids[0]]
    for i in ids[1:]:
        total = add(total, gates[i])
    divisor = max(total, 2.0**-14) if is_normed else 1.0
    return ids, [mul(div(gates[i], divisor), rn(scale)) for i in ids]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_selection_by_sigmoids_is_rule_11(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    n_used = data.draw(st.integers(1, n))
    scale = data.draw(st.sampled_from([1.0, 2.5, 0.3]))
    is_normed = data.draw(st.booleans())
    few = st.sampled_from([0.0, -0.0, 1.0, -3.0, 30.0, -14.0, -87.5, -89.0])
    any_size = st.floats(-20, 20, width=32) | st.floats(-(2.0**99), 2.0**99, width=32)
    rows = data.draw(
        st.lists(st.lists(few | any_size, min_size=n, max_size=n), min_size=1, max_size=4)
    )
    some = st.sampled_from([0.0, 0.5, -0.5]) | st.floats(-2, 2, width=32)
    bias = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    with_threads = k.Pool(2)
    logits, gating = np.array(rows, np.float32), "normed_sigmoid" if is_normed else "sigmoid"
    given_bias = None if bias is None else np.array(bias, np.float32)
    _, ids, weights = selected(with_threads, logits, n_used, scale, gating, given_bias)
    wanted = [
        by_sigmoid(row, n_used, scale, bias or [0.0] * n, is_normed) for row in logits.tolist()
    ]
    assert ids.tolist() == [row for row, _ in wanted]
    assert_bits(weights, [row for _, row in wanted])
    with_threads.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_weights_of_a_softmax_over_all_are_rule_11(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    n_used = data.draw(st.integers(1, n))
    few = st.sampled_from([0.0, -0.0, 1.0, -3.0, 30.0, -14.0, -87.5, -89.0])
    row = data.draw(st.lists(few | st.floats(-30, 30, width=32), min_size=n, max_size=n))
    pool, logits = k.Pool(1), np.array([row], np.float32)
    _, ids, weights = selected(pool, logits, n_used, 2.5, "softmax_all")
    _, same, _ = selected(pool, logits, n_used, 2.5)
    assert ids.tolist() == same.tolist()
    largest = max(logits[0].tolist())
    parts = [exp(max(add(x, -largest), -88.0)) for x in logits[0].tolist()]
    total = mul(rn(float(sum(round(part * 2**20) for part in parts))), 2.0**-20)
    assert_bits(weights, [[mul(div(parts[i], total), 2.5) for i in ids[0].tolist()]])
    pool.close()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_choice_by_a_softmax_and_a_bias_is_rule_11(data: st.DataObject) -> None:
    """Also of experts that are nearly nothing beside others, whose sum is below the least one."""
    n = data.draw(st.integers(1, 40))
    n_used = data.draw(st.integers(1, n))
    few = st.sampled_from([0.0, -0.0, 1.0, -3.0, 30.0, -14.0, -87.5, -89.0])
    row = data.draw(st.lists(few | st.floats(-30, 30, width=32), min_size=n, max_size=n))
    some = st.sampled_from([0.0, 0.5, -0.5, 3.0]) | st.floats(-2, 2, width=32)
    bias = data.draw(st.none() | st.lists(some, min_size=n, max_size=n))
    pool, logits = k.Pool(1), np.array([row], np.float32)
    given_bias = None if bias is None else np.array(bias, np.float32)
    _, ids, weights = selected(pool, logits, n_used, 2.5, "biased_softmax", given_bias)
    largest = max(logits[0].tolist())
    parts = [exp(max(add(x, -largest), -88.0)) for x in logits[0].tolist()]
    of_all = mul(rn(float(sum(round(part * 2**20) for part in parts))), 2.0**-20)
    keys = [add(div(part, of_all), b) for part, b in zip(parts, bias or [0.0] * n, strict=True)]
    wanted = sorted(sorted(range(n), key=lambda i: (-keys[i], i))[:n_used])
    assert ids[0].tolist() == wanted
    total = parts[wanted[0]]
    for i in wanted[1:]:
        total = add(total, parts[i])
    divisor = max(total, mul(of_all, 2.0**-14))
    assert_bits(weights, [[mul(div(parts[i], divisor), 2.5) for i in wanted]])
    pool.close()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_groups_of_experts_are_rule_11(data: st.DataObject) -> None:
    """The groups that are kept are chosen first; the rest is a choice among their experts."""
    n_group, each = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 6))
    kept = data.draw(st.integers(1, n_group))
    n, n_used = n_group * each, data.draw(st.integers(1, kept * each))
    few = st.sampled_from([0.0, -0.0, 1.0, -3.0, 30.0])
    row = data.draw(st.lists(few | st.floats(-20, 20, width=32), min_size=n, max_size=n))
    some = st.sampled_from([0.0, 0.5, -0.5]) | st.floats(-2, 2, width=32)
    bias = data.draw(st.lists(some, min_size=n, max_size=n))
    pool, logits = k.Pool(1), np.array([row], np.float32)
    given_bias, groups = np.array(bias, np.float32), (n_group, kept)
    _, ids, weights = selected(pool, logits, n_used, 2.5, "normed_sigmoid", given_bias, groups)
    gates = [div(1.0, add(1.0, exp(-x) if x > -88 else INFINITY)) for x in logits[0].tolist()]
    keys = [add(gate, b) for gate, b in zip(gates, given_bias.tolist(), strict=True)]
    best = [sorted(keys[g * each : (g + 1) * each])[-2:] for g in range(n_group)]
    ranked = sorted(range(n_group), key=lambda g: (-add(best[g][1], best[g][0]), g))
    hidden = [i for g in ranked[kept:] for i in range(g * each, (g + 1) * each)]
    lowered = [-(2.0**60) if i in hidden else b for i, b in enumerate(given_bias.tolist())]
    wanted = by_sigmoid(logits[0].tolist(), n_used, 2.5, lowered, is_normed=True)
    assert ids[0].tolist() == wanted[0]
    assert_bits(weights, [wanted[1]])
    pool.close()


@pytest.mark.parametrize(
    ("gating", "groups", "why"),
    [
        ("sigmoid", (5, 2), "not enough experts"),
        ("sigmoid", (6, 2), "not enough experts"),
        ("sigmoid", (12, 12), "not enough experts"),
        ("sigmoid", (4, 0), "1 to 32 groups"),
        ("sigmoid", (4, 5), "1 to 32 groups"),
        ("sigmoid", (-1, 1), "1 to 32 groups"),
        ("softmax", (3, 2), "have no groups"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    pool: k.Pool, gating: str, groups: tuple[int, int], why: str
) -> None:
    logits = np.zeros((1, 12), np.float32)
    with pytest.raises(ValueError, match=why):
        selected(pool, logits, 5, 1.0, gating, None, groups)


def test_the_bias_of_a_choice_changes_no_weight(pool: k.Pool) -> None:
    """Of four experts the first two have the largest logits; a bias makes it the last two, whose
    weights are those of their own logits."""
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    bias = np.array([0.0, 0.0, 5.0, 5.0], np.float32)
    _, ids, weights = selected(pool, logits, 2, 1.0, "sigmoid", bias)
    assert ids.tolist() == [[2, 3]]
    assert weights[0] == pytest.approx(1 / (1 + np.exp([0.0, 1.0])), rel=1e-6)
    _, ids, weights = selected(pool, logits, 2, 3.0, "normed_sigmoid", bias)
    assert ids.tolist() == [[2, 3]]
    assert float(weights.sum()) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    "gating", ["softmax", "sigmoid", "normed_sigmoid", "softmax_all", "biased_softmax"]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_no_number_poisons_its_token_alone(
    pool: k.Pool, bad: float, gating: str
) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32)
    _, ids, weights = selected(pool, logits, 4, 1.0, gating)
    logits[1, 7] = bad
    _, found, poisoned = selected(pool, logits, 4, 1.0, gating)
    assert found[1].tolist() == [0, 1, 2, 3]
    assert [bits(w) for w in poisoned[1].tolist()] == [NAN] * 4
    for token in (0, 2):
        assert found[token].tolist() == ids[token].tolist()
        assert_bits(poisoned[token : token + 1], [weights[token].tolist()])


def oai(gate: F32, up: F32) -> F32:
    """The twin of rule 5, for finite values."""
    g, u = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    with np.errstate(over="ignore"):
        x = -g * binary32.constant(0x3FD9DB23)
    grown = np.where(x > 88, np.float32(np.inf), binary32.exp(np.minimum(x, np.float32(88))))
    return (g / (np.float32(1) + grown)) * (u + np.float32(1))


class Bank:
    """Random weights of experts, in the bytes of a file and packed."""

    def __init__(
        self, pool: k.Pool, kind: str, n_expert: int, rows: int, cols: int, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        if kind in ("f16", "bf16", "f32"):
            values = (rng.standard_normal((n_expert * rows, cols)) / 8).astype(np.float32)
            if kind == "bf16":
                self.source = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            else:
                self.source = values.astype(np.float16 if kind == "f16" else np.float32)
        else:
            width = 256 if kind in SUPERBLOCK_BYTES else 32
            size = (BLOCK_BYTES | SUPERBLOCK_BYTES)[kind]
            blocks = rng.integers(0, 256, (n_expert * rows * cols // width, size), np.uint8)
            halves = {
                "q6_k": [208],
                "q3_k": [108],
                "q2_k": [80, 82],
                "q4_1": [0, 2],
                "q5_1": [0, 2],
                "q4_k": [0, 2],
                "q5_k": [0, 2],
                "iq1_m": [],
            }
            if kind == "mxfp4":
                blocks[:, 0] = 116 + blocks[:, 0] % 8
                halves[kind] = []
            for at in halves.get(kind, [0]):
                d = (rng.standard_normal(len(blocks)) / 256).astype(np.float16)
                blocks[:, at : at + 2] = d.view(np.uint8).reshape(-1, 2)
            if kind == "iq1_m":
                d = (rng.standard_normal(len(blocks)) / 256).astype(np.float16)
                tensors.put_scales(kind, blocks, d)
            self.source = blocks
        self.kind, self.n_expert, self.rows, self.cols = kind, n_expert, rows, cols
        self.matrix = self._packed(pool, self.source.tobytes(), n_expert * rows)
        each = len(self.source.tobytes()) // n_expert
        self.experts = [
            self._packed(pool, self.source.tobytes()[i * each : (i + 1) * each], rows)
            for i in range(n_expert)
        ]

    def _packed(self, pool: k.Pool, source: bytes, rows: int) -> k.Matrix:
        size = k.packed_bytes(self.kind, rows, self.cols)
        raw = np.zeros(size + 64, np.uint8)
        skip = -k.address_of(raw) % 64
        k.pack(pool, self.kind, rows, self.cols, source, raw[skip : skip + size])
        return k.Matrix(self.kind, rows, self.cols, raw[skip : skip + size])


class Layer:
    """The banks of one feed-forward part, at will with a bias each and the activation `oai`."""

    def __init__(
        self,
        pool: k.Pool,
        kind: str,
        n_expert: int,
        n_embd: int,
        n_ff: int,
        down: str = "",
        is_oai: bool = False,
    ) -> None:
        self.n_embd, self.n_ff = n_embd, n_ff
        self.activation = "oai" if is_oai else "silu"
        rng, sizes = np.random.default_rng(4), (n_ff, n_ff, n_embd)
        values = [(6 * rng.standard_normal((n_expert, n))).astype(np.float32) for n in sizes]
        self.biases = values if is_oai else []
        self.gate = Bank(pool, kind, n_expert, n_ff, n_embd, 1)
        self.up = Bank(pool, kind, n_expert, n_ff, n_embd, 2)
        self.down = Bank(pool, down or kind, n_expert, n_embd, n_ff, 3)

    def add(self, pool: k.Pool, x: F32, logits: F32, n_used: int, scale: float = 1.0) -> F32:
        """x + the experts of `x`, by the kernels."""
        pairs, _, _ = selected(pool, logits, n_used, scale)
        gathered = k.Activations(pairs.rows_max, self.n_embd, keep_float=True)
        gated = k.Rows(pairs.rows_max, self.n_ff)
        gated_q8 = k.Activations(pairs.rows_max, self.n_ff, keep_float=True)
        out = rows_of(x)
        k.gather_pairs(pool, quantised(pool, x), pairs, gathered)
        of_gate, of_up, of_down = [k.Vector(b.reshape(-1)) for b in self.biases] or [None] * 3
        banks = self.gate.matrix, self.up.matrix
        k.pairs_gated(pool, gathered, *banks, pairs, gated, of_gate, of_up, self.activation)
        k.quantise_pairs(pool, gated, pairs, gated_q8)
        k.pairs_add(pool, gated_q8, self.down.matrix, pairs, out, of_down)
        return out.view(len(x)).copy()

    def by_dense_kernels(
        self, pool: k.Pool, x: F32, logits: F32, n_used: int, scale: float = 1.0
    ) -> list[list[float]]:
        """The same, one token and expert after the other, by the kernels of dense layers."""
        _, ids, weights = selected(pool, logits, n_used, scale)
        gated, down = k.Rows(1, self.n_ff), k.Rows(1, self.n_embd)
        out: list[list[float]] = []
        for row, of, chosen in zip(x, ids.tolist(), weights.tolist(), strict=True):
            sums = [0.0] * self.n_embd
            for expert, weight in zip(of, chosen, strict=True):
                gate, up = self.gate.experts[expert], self.up.experts[expert]
                biases = [k.Vector(b[expert]) for b in self.biases] or [None] * 3
                x_q8 = quantised(pool, row[None])
                if self.activation == "silu":
                    k.linear_gated(pool, x_q8, gate, up, biases[0], biases[1], 1, gated)
                else:
                    both = k.Rows(1, 2 * self.n_ff)
                    k.linear(pool, x_q8, [gate, up], biases[:2], 1, both)
                    products = both.view(1).reshape(2, -1)
                    gated.view(1)[0] = oai(*products)
                hidden = quantised(pool, gated.view(1).copy())
                k.linear(pool, hidden, [self.down.experts[expert]], biases[2:], 1, down)
                y = down.view(1)[0].tolist()
                sums = [fma(weight, a, b) for a, b in zip(y, sums, strict=True)]
            out.append([add(a, b) for a, b in zip(row.tolist(), sums, strict=True)])
        return out


def step_of(seed: int, tokens: int, n_embd: int, n_expert: int) -> tuple[F32, F32]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, n_embd)).astype(np.float32)
    return x, (2 * rng.standard_normal((tokens, n_expert))).astype(np.float32)


def test_the_experts_of_a_token_are_the_twin(pool: k.Pool) -> None:
    layer = Layer(pool, "q4_0", 5, 64, 32)
    x, logits = step_of(1, 2, 64, 5)
    wanted: list[list[float]] = []
    blocks = {
        name: bank.source.reshape(bank.n_expert, bank.rows, -1, 18)
        for name, bank in (("gate", layer.gate), ("up", layer.up), ("down", layer.down))
    }

    def product(name: str, expert: int, row: F32) -> list[float]:
        def weights(block: NDArray[np.uint8]) -> tuple[float, list[int]]:
            d, q = float(block[:2].view(np.float16)[0]), block[2:]
            return d, [*(q & 15).tolist(), *(q >> 4).tolist()]

        return [product_q4_0(row, [weights(b) for b in line]) for line in blocks[name][expert]]

    for row, own in zip(x, logits.tolist(), strict=True):
        ids, chosen = by_rule_11(own, 3, 0.75)
        sums = [0.0] * 64
        for expert, weight in zip(ids, chosen, strict=True):
            gate, up = product("gate", expert, row), product("up", expert, row)
            hidden = [mul(div(g, add(1.0, exp(-g))), u) for g, u in zip(gate, up, strict=True)]
            d = product("down", expert, np.array(hidden, np.float32))
            sums = [fma(weight, a, b) for a, b in zip(d, sums, strict=True)]
        wanted.append([add(a, b) for a, b in zip(row.tolist(), sums, strict=True)])
    assert_bits(layer.add(pool, x, logits, 3, 0.75), wanted)


@pytest.mark.parametrize(
    ("kind", "is_oai"),
    [
        *(
            pytest.param(kind, False, marks=pytest.mark.slow if kind in ALIKE else ())
            for kind in k.KINDS
        ),
        *((kind, True) for kind in ("q4_0", "mxfp4", "f16")),
    ],
)
def test_pairs_are_products_of_dense_layers_on_every_level(
    pool: k.Pool, kind: str, is_oai: bool
) -> None:
    n_embd, n_ff = (256, 256) if kind in SUPERBLOCK_BYTES else (96, 64)
    layer = Layer(pool, kind, 6, n_embd, n_ff, is_oai=is_oai)
    x, logits = step_of(2, 40, n_embd, 6)
    logits[3:33, 2] += 20  # an expert of more than two groups
    logits[:, 4] = -50  # one that no token chose
    for level in LEVELS:
        k.set_isa(level)
        wanted = layer.by_dense_kernels(pool, x[:35], logits[:35], 2)
        assert_bits(layer.add(pool, x, logits, 2)[:35], wanted)


class Gates:
    """Banks of zeros, so that each product is its bias: the activation of any two values."""

    def __init__(self, pool: k.Pool, n: int) -> None:
        bank = Bank(pool, "q4_0", 2, n, 32, 1)
        self._zero = bank._packed(pool, b"\0" * 18 * 2 * n, 2 * n)
        self._pool, self._n = pool, n

    def of(self, gate: F32, up: F32, activation: str) -> F32:
        """The activation of two rows of n values, as the second of two experts computes it."""
        pairs, _, _ = selected(self._pool, np.array([[0, 1]], np.float32), 1)
        gathered, out = k.Activations(pairs.rows_max, 32), k.Rows(pairs.rows_max, self._n)
        x, other = quantised(self._pool, np.ones((1, 32), np.float32)), np.full_like(gate, 1e9)
        k.gather_pairs(self._pool, x, pairs, gathered)
        biases = [k.Vector(np.concatenate([other, values])) for values in (gate, up)]
        k.pairs_gated(self._pool, gathered, self._zero, self._zero, pairs, out, *biases, activation)
        return out.view(1)[0].copy()


EDGES = [0.0, 7.0, -7.0, 7.0000005, -7.0000005, -1.0, -51.7, -51.71, -51.704, -300.0, 3e38, -3e38]
ANY_SIZE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_oai_is_rule_5_on_every_level(pool: k.Pool, data: st.DataObject) -> None:
    one = st.sampled_from(EDGES) | st.floats(-60, 12, width=32) | ANY_SIZE
    rows = data.draw(st.lists(st.tuples(one, one), min_size=32, max_size=32))
    gate, up = np.array(rows, np.float32).T.copy() + np.float32(0)  # a product is no -0
    gates = Gates(pool, 32)
    for level in LEVELS:
        k.set_isa(level)
        assert_bits(gates.of(gate, up, "oai")[None], [oai(gate, up).tolist()])


@pytest.mark.parametrize("activation", ["silu", "oai", "gelu"])
def test_a_gate_or_an_up_that_is_not_finite_gives_nothing_finite(
    pool: k.Pool, activation: str
) -> None:
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)
    sound = np.array([-100.0, -3.0, 0.5, 9.0], np.float32)
    pairs = [(b, s) for b in bad for s in sound] + [(s, b) for b in bad for s in sound]
    pairs += [(b, c) for b in bad for c in bad]
    gate, up = np.zeros(48, np.float32), np.zeros(48, np.float32)
    gate[: len(pairs)], up[: len(pairs)] = np.array(pairs, np.float32).T
    gates = Gates(pool, 48)
    for level in LEVELS:
        k.set_isa(level)
        found = gates.of(gate, up, activation)
        assert not np.isfinite(found[: len(pairs)]).any()
        assert (found[len(pairs) :] == 0).all()


def test_oai_is_the_activation_of_gpt_oss(pool: k.Pool) -> None:
    """Within a few units of binary32, whose definition has one rounding per operation."""
    rng = np.random.default_rng(6)
    gate, up = (8 * rng.standard_normal((2, 4096))).astype(np.float32)
    g, u = np.minimum(gate.astype(np.float64), 7), np.clip(up.astype(np.float64), -7, 7)
    wanted = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    found = Gates(pool, 4096).of(gate, up, "oai")
    # The slope is rounded, and its error grows with the exponent.
    assert (np.abs(found - wanted) <= 2.0**-21 * np.abs(wanted) * np.maximum(1, -g)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_oai", [False, True])
def test_experts_of_floats_are_near_binary64(pool: k.Pool, level: str, is_oai: bool) -> None:
    k.set_isa(level)
    layer = Layer(pool, "f32", 4, 96, 32, is_oai=is_oai)
    x, logits = step_of(6, 20, 96, 4)
    gate, up, down = (
        bank.source.astype(np.float64).reshape(4, bank.rows, bank.cols)
        for bank in (layer.gate, layer.up, layer.down)
    )
    biases = [b.astype(np.float64) for b in layer.biases] or [np.zeros((4, 1))] * 3
    _, ids, weights = selected(pool, logits, 2)
    wanted = x.astype(np.float64)
    for row, of, chosen in zip(wanted, ids.tolist(), weights.tolist(), strict=True):
        h = row.copy()
        for e, weight in zip(of, chosen, strict=True):
            g, u = gate[e] @ h + biases[0][e], up[e] @ h + biases[1][e]
            if is_oai:
                g, u = np.minimum(g, 7), np.clip(u, -7, 7) + 1
            hidden = g / (1 + np.exp(-g * (1.702 if is_oai else 1))) * u
            row += weight * (down[e] @ hidden + biases[2][e])
    assert np.abs(layer.add(pool, x, logits, 2) - wanted).max() < 1e-4


@pytest.mark.parametrize("is_oai", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_batch_and_threads_change_no_bit(level: str, is_oai: bool) -> None:
    k.set_isa(level)
    x, logits = step_of(3, 70, 192, 16)
    one, three = k.Pool(1), k.Pool(3)
    layer = Layer(one, "q4_0", 16, 192, 160, down="q8_0", is_oai=is_oai)
    together = layer.add(one, x, logits, 4)
    assert_bits(layer.add(three, x, logits, 4), together.tolist())
    for first, end in ((0, 1), (1, 3), (3, 20), (20, 70)):
        alone = layer.add(three, x[first:end], logits[first:end], 4)
        assert_bits(alone, together[first:end].tolist())
    one.close()
    three.close()


@pytest.mark.parametrize("is_oai", [False, True])
def test_a_token_that_is_no_number_does_not_affect_others(pool: k.Pool, is_oai: bool) -> None:
    layer = Layer(pool, "q5_0", 4, 64, 32, is_oai=is_oai)
    x, logits = step_of(4, 9, 64, 4)
    sound = layer.add(pool, x, logits, 2)
    x[5, 3] = np.inf
    found = layer.add(pool, x, logits, 2)
    assert np.isnan(found[5]).all()
    others = [0, 1, 2, 3, 4, 6, 7, 8]
    assert_bits(found[others], sound[others].tolist())
    logits[2, 0] = np.nan  # the weights of one token
    found = layer.add(pool, x, logits, 2)
    assert np.isnan(found[2]).all()
    others.remove(2)
    assert_bits(found[others], sound[others].tolist())


def test_a_step_without_tokens_changes_nothing(pool: k.Pool) -> None:
    pairs = k.ExpertPairs(4, 3, 2)
    k.select_experts(pool, k.Rows(4, 3), 0, 1.0, pairs)
    layer = Layer(pool, "q4_0", 3, 32, 32)
    x, q8 = k.Activations(4, 32), k.Activations(pairs.rows_max, 32)
    gated, out = k.Rows(pairs.rows_max, 32), rows_of(np.ones((4, 32), np.float32))
    k.gather_pairs(pool, x, pairs, q8)
    k.pairs_gated(pool, q8, layer.gate.matrix, layer.up.matrix, pairs, gated)
    k.quantise_pairs(pool, gated, pairs, q8)
    k.pairs_add(pool, q8, layer.down.matrix, pairs, out)
    assert (out.view(4) == 1).all()


@settings(max_examples=100, deadline=None)
@given(tokens=st.integers(1, 60), n_expert=st.integers(1, 20), data=st.data())
def test_buffers_of_pairs_hold_every_step(tokens: int, n_expert: int, data: st.DataObject) -> None:
    """The rows that the worst choice of experts needs are those that `rows_max` says."""
    n_used = data.draw(st.integers(1, n_expert))
    pool = k.Pool(1)
    seed = data.draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, n_expert)).astype(np.float32)
    logits += np.float32(4) * rng.standard_normal(n_expert).astype(np.float32)
    pairs, ids, _ = selected(pool, logits, n_used)
    counts = np.bincount(ids.reshape(-1), minlength=n_expert)
    assert 16 * int((-(-counts // 16)).sum()) <= pairs.rows_max
    total = tokens * n_used
    assert pairs.rows_max == 16 * ((total + 15 * min(total, n_expert)) // 16)
    pool.close()


def test_calls_check_every_size(pool: k.Pool) -> None:
    layer = Layer(pool, "f16", 4, 64, 32)
    pairs, _, _ = selected(pool, step_of(5, 3, 64, 4)[1], 2)
    x, n = k.Activations(3, 64, keep_float=True), pairs.rows_max
    gathered, gated = k.Activations(n, 64, keep_float=True), k.Rows(n, 32)
    gate, up, down = layer.gate.matrix, layer.up.matrix, layer.down.matrix
    q8, out = k.Activations(n, 32, keep_float=True), k.Rows(3, 64)
    of_four = k.Vector(np.zeros(4, np.float32))
    sound, short = k.Vector(np.zeros(128, np.float32)), k.Vector(np.zeros(64, np.float32))
    for call in (
        lambda: k.ExpertPairs(4, 0, 1),
        lambda: k.ExpertPairs(4, 1025, 1),
        lambda: k.ExpertPairs(4, 3, 4),
        lambda: k.ExpertPairs(4, 3, 0),
        lambda: k.select_experts(pool, k.Rows(4, 4), 4, 1.0, pairs),
        lambda: k.select_experts(pool, k.Rows(3, 5), 3, 1.0, pairs),
        lambda: k.select_experts(pool, k.Rows(3, 4), 3, 1.0, pairs, "tanh"),
        lambda: k.select_experts(pool, k.Rows(3, 4), 3, 1.0, pairs, "sigmoid", short),
        lambda: k.select_experts(pool, k.Rows(3, 4), 3, 1.0, pairs, "softmax", of_four),
        lambda: k.gather_pairs(pool, k.Activations(2, 64), pairs, gathered),
        lambda: k.gather_pairs(pool, x, pairs, k.Activations(n - 1, 64)),
        lambda: k.gather_pairs(pool, x, pairs, k.Activations(n, 32)),
        lambda: k.gather_pairs(pool, k.Activations(3, 64), pairs, gathered),
        lambda: k.pairs_gated(pool, k.Activations(n, 64), gate, up, pairs, gated),
        lambda: k.pairs_gated(pool, gathered, gate, down, pairs, gated),
        lambda: k.pairs_gated(pool, gathered, gate, up, pairs, k.Rows(n, 16)),
        lambda: k.pairs_gated(pool, gathered, gate, up, pairs, k.Rows(n - 1, 32)),
        lambda: k.pairs_gated(pool, gathered, gate, up, pairs, gated, short, sound),
        lambda: k.pairs_gated(pool, gathered, gate, up, pairs, gated, sound, short),
        lambda: k.pairs_gated(pool, gathered, gate, up, pairs, gated, sound, sound, "relu"),
        lambda: k.quantise_pairs(pool, gated, pairs, k.Activations(n, 64)),
        lambda: k.quantise_pairs(pool, k.Rows(n - 1, 32), pairs, q8),
        lambda: k.pairs_add(pool, q8, up, pairs, out),
        lambda: k.pairs_add(pool, q8, down, pairs, k.Rows(2, 64)),
        lambda: k.pairs_add(pool, k.Activations(n, 32), down, pairs, out),
        lambda: k.pairs_add(pool, q8, down, pairs, out, sound),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            call()
