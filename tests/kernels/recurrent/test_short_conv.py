"""Gated short convolutions are the formula of the document, bit for bit, on every level."""

from __future__ import annotations

import numpy as np
import pytest

import kernels as K
from tests.kernels.recurrent.images import (
    LEVELS,
    check_levels,
    conv_formula,
    random_conv,
    random_rows,
    run,
)

SHAPES = [(32, 2), (224, 3), (2048, 3), (96, 4)]  # width, conv_kernel


def shape_of(sizes: tuple[int, int], n_layer: int = 1) -> K.StateShape:
    return K.StateShape.short_conv(n_layer, *sizes)


@pytest.mark.parametrize("sizes", SHAPES)
def test_every_level_computes_the_formula(pool: K.Pool, sizes: tuple[int, int]) -> None:
    shape = shape_of(sizes)
    weights, rows = random_conv(shape, 1), random_rows(shape, 9, 2)
    check_levels(pool, shape, weights, rows, *conv_formula(weights, rows))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["b", "c", "x"])
def test_what_is_not_finite_stays_so(pool: K.Pool, part: str, value: float, level: str) -> None:
    """In the outputs at that token; from b and x, in those of the next two."""
    K.set_isa(level)
    shape = shape_of((32, 3))
    weights, rows = random_conv(shape, 14), random_rows(shape, 8, 15)
    rows[4, 32 * "bcx".index(part) + 3] = value
    for cuts in ([], [4], [4, 5]):
        out, _ = run(pool, shape, weights, rows, cuts)
        finite = np.isfinite(out).all(1)
        assert finite[:4].all()
        reached = 1 if part == "c" else 3
        assert finite[4:].tolist() == [False] * reached + [True] * (4 - reached)
