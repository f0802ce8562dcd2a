"""Products of heads (rule 16): each is the product of the head's part of a row alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import kernels as k
from bench.models.tensors import aligned, random_tensor
from tests.kernels.linear.test_experts import LEVELS
from tests.kernels.test_linear import quantised, rows_of

HEADS, COLS, ROWS = 5, 256, 48
RUN, COLUMN = 300, 13  # values of a head, and the first that its product reads


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    k.set_isa(request.param)
    return str(request.param)


def packed(pool: k.Pool, kind: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """The packed bytes of a random matrix."""
    buffer = aligned(k.packed_bytes(kind, rows, cols))
    k.pack(pool, kind, rows, cols, random_tensor(kind, rows, cols, rng), buffer)
    return buffer


def bank_of(pool: k.Pool, kind: str) -> tuple[k.Matrix, list[k.Matrix]]:
    """A bank, and the matrices of its heads alone."""
    rng = np.random.default_rng(list(kind.encode()))
    whole = packed(pool, kind, HEADS * ROWS, COLS, rng)
    each = len(whole) // HEADS
    parts = [aligned(each) for _ in range(HEADS)]
    for head, part in enumerate(parts):
        part[:] = whole[head * each : (head + 1) * each]
    return k.Matrix(kind, HEADS * ROWS, COLS, whole), [
        k.Matrix(kind, ROWS, COLS, part) for part in parts
    ]


def outputs(pool: k.Pool, bank: k.Matrix, values: np.ndarray, column: int, stride: int) -> k.Rows:
    """Products of all heads, in rows that hold 7 elsewhere."""
    tokens = len(values)
    x = k.HeadActivations(tokens + 3, HEADS, COLS, keep_float=True)
    out = k.Rows(tokens, column + HEADS * stride)
    out.view(tokens)[:] = 7
    k.quantise_heads(pool, rows_of(values), COLUMN, tokens, x)
    k.linear_heads(pool, x, bank, tokens, out, column, stride)
    return out


@pytest.mark.parametrize("tokens", [1, 3, 16, 50, 150])
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q4_k", "q6_k", "bf16"])
def test_each_head_has_the_product_of_its_part_alone(
    level: str, pool: k.Pool, kind: str, tokens: int
) -> None:
    rng = np.random.default_rng(tokens)
    values = rng.standard_normal((tokens, HEADS * RUN)).astype(np.float32)
    values[tokens // 2, RUN + COLUMN + 5] = np.nan  # of the second head
    bank, alone = bank_of(pool, kind)
    stride = ROWS + 9
    with_threads = k.Pool(2)
    got = outputs(pool, bank, values, 4, stride).view(tokens).copy()
    assert np.array_equal(
        got.view(np.uint32), outputs(with_threads, bank, values, 4, stride).view(tokens).view("u4")
    )
    with_threads.close()
    for head, matrix in enumerate(alone):
        first = head * RUN + COLUMN
        x = quantised(pool, np.ascontiguousarray(values[:, first : first + COLS]))
        want = k.Rows(tokens, ROWS)
        k.linear(pool, x, [matrix], [None], tokens, want)
        at = 4 + head * stride
        assert np.array_equal(
            got[:, at : at + ROWS].view(np.uint32), want.view(tokens).view(np.uint32)
        )
        assert (got[:, at + ROWS : at + stride] == 7).all()
    assert np.isnan(got[tokens // 2, 4 + stride : 4 + stride + ROWS]).all()
    assert np.isfinite(np.delete(got, tokens // 2, 0)).all()


def test_copies_of_heads(pool: k.Pool) -> None:
    values = np.random.default_rng(1).standard_normal((70, HEADS * 33)).astype(np.float32)
    out = k.Rows(70, 300)
    out.view(70)[:] = 7
    k.copy_heads(pool, rows_of(values), HEADS, 69, out, 11, 40)
    want = np.full((70, 300), 7, np.float32)
    for head in range(HEADS):
        at = 11 + 40 * head
        want[:69, at : at + 33] = values[:69, 33 * head : 33 * head + 33]
    assert np.array_equal(out.view(70), want)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda p, x, b, o, r: k.quantise_heads(p, r, RUN - COLS + 1, 2, x),
            "have no 256 from 45 on",
        ),
        (lambda p, x, b, o, r: k.quantise_heads(p, k.Rows(2, 301), 0, 2, x), "no whole heads"),
        (lambda p, x, b, o, r: k.quantise_heads(p, r, 0, 3, x), "3 tokens do not fit 2"),
        (lambda p, x, b, o, r: k.linear_heads(p, x, b, 2, o, 1, ROWS), "have no 5 heads of 48"),
        (lambda p, x, b, o, r: k.linear_heads(p, x, b, 2, o, 0, ROWS - 1), "have no 5 heads of 48"),
        (lambda p, x, b, o, r: k.linear_heads(p, x, b, 3, o, 0, ROWS), "3 tokens do not fit 2"),
        (lambda p, x, b, o, r: k.copy_heads(p, r, 7, 2, o, 0, 30), "no whole heads"),
        (lambda p, x, b, o, r: k.copy_heads(p, r, 0, 2, o, 0, 30), "no whole heads"),
        (lambda p, x, b, o, r: k.copy_heads(p, r, 50, 2, o, 211, 30), "have no 50 heads of 30"),
        (lambda p, x, b, o, r: k.copy_heads(p, r, 1, 2, r, 0, 1500), "must differ"),
        (lambda p, x, b, o, r: k.HeadActivations(2, 0, 32, keep_float=False), "0 heads"),
    ],
)
def test_what_does_not_fit_is_refused(pool: k.Pool, call: Callable[..., None], why: str) -> None:
    bank, _ = bank_of(pool, "q4_0")
    x = k.HeadActivations(2, HEADS, COLS, keep_float=False)
    with pytest.raises(ValueError, match=why):
        call(pool, x, bank, k.Rows(2, HEADS * ROWS), k.Rows(2, HEADS * RUN))


def test_banks_that_do_not_fit_are_refused(pool: k.Pool) -> None:
    rng = np.random.default_rng(0)
    x, out = k.HeadActivations(2, HEADS, COLS, keep_float=False), k.Rows(2, HEADS * ROWS)
    for kind, rows, cols, why in (
        ("q4_0", HEADS * ROWS + 16, COLS, "are not 5 heads of a multiple of 16"),
        ("q4_0", HEADS * ROWS, COLS + 32, "288 cols"),
        ("f16", HEADS * ROWS, COLS, "keep_float"),
    ):
        bank = k.Matrix(kind, rows, cols, packed(pool, kind, rows, cols, rng))
        with pytest.raises(ValueError, match=why):
            k.linear_heads(pool, x, bank, 2, out, 0, ROWS)
