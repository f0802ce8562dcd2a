"""Steps, neighbours in a step, layers and threads change no bit of outputs or states of a mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels as K
from tests.kernels.recurrent.images import (
    LEVELS,
    Entry,
    Mixer,
    bits,
    random_conv,
    random_mamba2,
    random_rows,
    random_weights,
    run,
    step,
)


@dataclass(frozen=True)
class Kind:
    """A kind of mixer: shapes of so many layers, by their sizes, and random weights."""

    shape: Callable[..., K.StateShape]
    weights: Callable[[K.StateShape, int], Mixer]
    sizes: tuple[tuple[int, ...], ...]


KINDS = {
    "delta": Kind(
        K.StateShape,
        random_weights,
        ((1, 3, 64, 4), (2, 4, 64, 3), (2, 8, 32, 4), (1, 1, 96, 4), (1, 1, 224, 4)),
    ),
    "mamba2": Kind(
        K.StateShape.mamba2,
        random_mamba2,
        ((1, 3, 48, 64, 4), (2, 4, 64, 128, 4), (1, 3, 80, 64, 3), (1, 2, 16, 32, 2)),
    ),
    "mamba2 without bias and norm": Kind(
        K.StateShape.mamba2,
        lambda shape, seed: random_mamba2(shape, seed, has_bias=False, is_normed=False),
        ((1, 1, 48, 96, 4),),
    ),
    "conv": Kind(K.StateShape.short_conv, random_conv, ((1056, 3), (32, 2), (96, 4))),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
@settings(max_examples=12, deadline=None)
@given(
    index=st.integers(0, 4),
    cuts=st.sets(st.integers(1, 69), max_size=6),
    level=st.sampled_from([level for level in LEVELS if level != "scalar"] or LEVELS),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_division_of_a_prompt_changes_a_bit(
    kind: Kind, index: int, cuts: set[int], level: str, seed: int
) -> None:
    shape, two = kind.shape(1, *kind.sizes[index % len(kind.sizes)]), K.Pool(2)
    K.set_isa(level)
    weights, rows = kind.weights(shape, seed), random_rows(shape, 70, seed + 1)
    whole, image = run(two, shape, weights, rows)
    parts, last = run(two, shape, weights, rows, sorted(cuts))
    assert np.array_equal(bits(whole), bits(parts))
    assert np.array_equal(image, last)
    two.close()


@kinds
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_entries_of_a_step_and_threads_change_no_bit(kind: Kind, threads: int) -> None:
    shape = kind.shape(1, *kind.sizes[0])
    weights = kind.weights(shape, 7)
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


@kinds
def test_two_entries_go_on_from_one_image(kind: Kind, pool: K.Pool) -> None:
    shape = kind.shape(1, *kind.sizes[0])
    weights, rows = kind.weights(shape, 8), random_rows(shape, 12, 9)
    source = Entry(shape, weights)
    step(pool, [source], [rows[:6]])
    assert source.read is not None
    before = source.read.copy()
    forks = [Entry(shape, weights) for _ in range(2)]
    for fork in forks:
        fork.read = source.read
    step(pool, forks, [rows[6:], rows[6:9]])
    whole, _ = run(pool, shape, weights, rows)
    assert np.array_equal(bits(forks[0].outputs[0]), bits(whole[6:]))
    assert np.array_equal(bits(forks[1].outputs[0]), bits(whole[6:9]))
    assert np.array_equal(source.read, before)


@kinds
def test_an_image_of_zeros_is_the_beginning(kind: Kind, pool: K.Pool) -> None:
    shape = kind.shape(1, *kind.sizes[-1])
    weights, rows = kind.weights(shape, 10), random_rows(shape, 4, 11)
    for level in LEVELS:
        K.set_isa(level)
        wanted, image = run(pool, shape, weights, rows)
        entry = Entry(shape, weights)
        entry.read = np.zeros(shape.image_bytes + 64, np.uint8)
        entry.read = entry.read[-K.address_of(entry.read) % 64 :][: shape.image_bytes]
        step(pool, [entry], [rows])
        assert np.array_equal(bits(entry.outputs[0]), bits(wanted))
        assert np.array_equal(entry.read, image)


@kinds
def test_a_layer_touches_its_part_of_an_image_only(kind: Kind, pool: K.Pool) -> None:
    sizes = kind.sizes[-1]
    shape, one = kind.shape(3, *sizes), kind.shape(1, *sizes)
    assert shape.layer_bytes % 64 == 0
    assert shape.image_bytes == 3 * shape.layer_bytes
    weights, rows = kind.weights(shape, 12), random_rows(shape, 5, 13)
    entry = Entry(shape, weights, layer=1)
    step(pool, [entry], [rows])
    assert entry.read is not None
    parts = np.split(entry.read, 3)
    assert (parts[0] == 0xFF).all()
    assert (parts[2] == 0xFF).all()
    alone = Entry(one, weights)
    step(pool, [alone], [rows])
    for of_layer, of_one in zip(entry.state(), alone.state(), strict=True):
        assert np.array_equal(bits(of_layer), bits(of_one))
