"""Gated short convolutions are the formula of the document, bit for bit, on every level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels as K
from tests.kernels.recurrent.images import (
    LEVELS,
    Entry,
    bits,
    conv_formula,
    random_conv,
    random_rows,
    run,
    step,
)

SHAPES = [(32, 2), (224, 3), (2048, 3), (96, 4)]  # width, conv_kernel


def shape_of(sizes: tuple[int, int], n_layer: int = 1) -> K.StateShape:
    return K.StateShape.short_conv(n_layer, *sizes)


@pytest.mark.parametrize("sizes", SHAPES)
def test_every_level_computes_the_formula(pool: K.Pool, sizes: tuple[int, int]) -> None:
    shape = shape_of(sizes)
    weights, rows = random_conv(shape, 1), random_rows(shape, 9, 2)
    wanted, wanted_conv = conv_formula(weights, rows)
    for level in LEVELS:
        K.set_isa(level)
        for cuts in ([], range(1, 9)):
            entry = Entry(shape, weights)
            for part in np.split(rows, list(cuts)):
                step(pool, [entry], [part])
            _, conv = entry.state()
            assert np.array_equal(bits(np.concatenate(entry.outputs)), bits(wanted)), level
            assert np.array_equal(bits(conv), bits(wanted_conv)), level


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.sampled_from(SHAPES),
    cuts=st.sets(st.integers(1, 39), max_size=9),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_division_of_a_prompt_changes_a_bit(
    sizes: tuple[int, int], cuts: set[int], level: str, seed: int
) -> None:
    shape, two = shape_of(sizes), K.Pool(2)
    K.set_isa(level)
    weights, rows = random_conv(shape, seed), random_rows(shape, 40, seed + 1)
    whole, image = run(two, shape, weights, rows)
    parts, last = run(two, shape, weights, rows, sorted(cuts))
    assert np.array_equal(bits(whole), bits(parts))
    assert np.array_equal(image, last)
    two.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_entries_of_a_step_and_threads_change_no_bit(threads: int) -> None:
    shape = shape_of((1056, 3))
    weights = random_conv(shape, 7)
    prompts = [random_rows(shape, n, 20 + n) for n in (1, 5, 12, 2)]
    alone, many = K.Pool(1), K.Pool(threads)
    wanted = [run(alone, shape, weights, rows) for rows in prompts]
    # The first step has the fronts of three entries, the second one the rest and a new entry.
    entries = [Entry(shape, weights) for _ in prompts]
    step(many, entries[1:], [rows[: len(rows) // 2] for rows in prompts[1:]])
    rest = [rows[len(rows) // 2 :] for rows in prompts[1:]]
    step(many, [*entries[1:], entries[0]], [*rest, prompts[0]])
    for entry, (outputs, image) in zip(entries, wanted, strict=True):
        assert entry.read is not None
        assert np.array_equal(bits(np.concatenate(entry.outputs)), bits(outputs))
        assert np.array_equal(entry.read, image)
    alone.close()
    many.close()


def test_a_layer_touches_its_part_of_an_image_only(pool: K.Pool) -> None:
    shape, one = shape_of((96, 4), n_layer=3), shape_of((96, 4))
    weights, rows = random_conv(shape, 12), random_rows(shape, 5, 13)
    entry = Entry(shape, weights, layer=1)
    step(pool, [entry], [rows])
    assert entry.read is not None
    parts = np.split(entry.read, 3)
    assert (parts[0] == 0xFF).all()
    assert (parts[2] == 0xFF).all()
    _, image = run(pool, one, weights, rows)
    assert np.array_equal(parts[1][: 4 * 3 * 96], image[: 4 * 3 * 96])


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
