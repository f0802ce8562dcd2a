"""Attention with heads of more than 256 dims: every level has the bits of the scalar one."""

from __future__ import annotations

import numpy as np
import pytest

import kernels as K
from tests.kernels.timelines import (
    BEST,
    F32,
    LEVELS,
    PAGE,
    Step,
    Timeline,
    append,
    bits,
    random_qkv,
)

Case = tuple[int, int]  # tokens before a step, and in it

# One token, at the end of a page and in a second super-page; tiles of few rows and of 32 and more.
CASES: list[Case] = [(255, 1), (1100, 1), (250, 4), (1000, 9)]


def placed(pool: K.Pool, d: int, group: int, n_kv: int, scale: float = 0.0) -> Step:
    """A step whose entries are CASES, with norms and RoPE, K and V placed."""
    rope = K.RopeTable("neox", d, d, 1e6)
    weight = np.random.default_rng(d).uniform(0.5, 1.5, d).astype(np.float32)
    timelines: list[Timeline] = []
    rows: list[F32] = []
    for seed, (history, new) in enumerate(CASES):
        qkv = random_qkv(seed, history + new, group * n_kv, n_kv, d)
        pages = -(-(history + new) // PAGE)
        shape, norm = K.PageShape(1, n_kv, d), K.Vector(weight)
        timelines.append(Timeline(shape, group * n_kv, pages, rope, norm, scale))
        append(pool, timelines[-1], qkv[:history])
        rows.append(qkv[history:])
    return Step(pool, timelines, rows)


def assert_levels_agree(one: Step, window: int, sinks: K.Sinks | None) -> None:
    results: list[F32] = []
    for level in LEVELS:
        K.set_isa(level)
        results.append(one.attend(window, sinks))
    assert np.isfinite(results[0]).all()
    for out in results[1:]:
        np.testing.assert_array_equal(bits(out), bits(results[0]))


@pytest.mark.parametrize("group", range(1, 10))
def test_levels_agree_for_every_group(pool: K.Pool, group: int) -> None:
    K.set_isa(BEST)
    assert_levels_agree(placed(pool, 576 if group % 2 else 512, group, 1), 0, None)


@pytest.mark.parametrize("window", [0, 1, 100, 257, 1024])
@pytest.mark.parametrize("d", [288, 320, 384, 512, 576])
def test_levels_agree_with_windows_sinks_and_a_scale_of_one(
    pool: K.Pool, d: int, window: int
) -> None:
    K.set_isa(BEST)
    one = placed(pool, d, 3, 2, scale=1.0)
    sinks = K.Sinks((3 * np.random.default_rng(1).standard_normal(6)).astype(np.float32))
    assert_levels_agree(one, window, sinks)


@pytest.mark.parametrize("d", [288, 448, 512, 576])
def test_levels_store_equal_queries_and_pages(pool: K.Pool, d: int) -> None:
    """Transforms of 32, 64 and 512 values, with outliers, zeros and values that are not finite."""
    qkv = random_qkv(3, 40, 4, 2, d)
    qkv[:, 5::97] *= 300
    qkv[3, : 2 * d] = 0
    qkv[7, d] = np.nan
    qkv[9, 4 * d + 1], qkv[11, 6 * d + 300 % d] = np.inf, np.nan
    stored: set[bytes] = set()
    for level in LEVELS:
        K.set_isa(level)
        t = Timeline(K.PageShape(1, 2, d), 4, 1, K.RopeTable("norm", d, d // 2, 1e4))
        queries = Step(pool, [t], [qkv]).queries.to_bytes(2, (0, 2), [(0, 40)])
        stored.add(t.memory.tobytes() + queries)
    assert len(stored) == 1


def test_the_largest_sums_of_a_page_are_exact(pool: K.Pool) -> None:
    """All V are 127 and all weights 16,376, of 16,383 at most; then all K and q are 127, too."""
    d = 512
    qkv = np.zeros((PAGE, 3 * d), np.float32)
    qkv[:, 2 * d :] = 127 * 2047 / 1024  # a scale with eleven bits; scores of 0 leave it the weight
    sharp = qkv.copy()
    sharp[:, 0] = sharp[:, d] = 3  # the transform makes it all values of a head
    results: list[F32] = []
    for level in LEVELS:
        K.set_isa(level)
        t, u = (Timeline(K.PageShape(1, 1, d), 1, 1) for _ in range(2))
        for timeline, rows in ((t, qkv), (u, sharp)):
            append(pool, timeline, rows[:-1])
            results.append(Step(pool, [timeline], [rows[-1:]]).attend())
        assert (t.head_page(0, 0)["v"] == 127).all()
        assert (u.head_page(0, 0)["k"] == 127).all()
    for flat, peaked in zip(results[::2], results[1::2], strict=True):
        assert (flat == np.float32(127 * 2047 / 1024)).all()
        np.testing.assert_array_equal(bits(peaked), bits(results[1]))
        np.testing.assert_allclose(peaked, flat, rtol=2e-4)
