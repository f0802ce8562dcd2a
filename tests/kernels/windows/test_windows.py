"""Attention with windows and sinks: a window hides tokens by their position only, and a sink takes
its share of a row. Levels, chunks, batches, spans and threads change no bit.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

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
    step,
)

SUPERPAGE = K.SUPERPAGE_TOKENS
WINDOWS = [1, 2, 16, 17, 128, 255, 256, 257, 1000, 1024, 5000]
SHAPES = [(64, 16, 2), (96, 3, 3), (128, 5, 1), (256, 4, 2), (512, 2, 1)]
TOLERANCE = 0.02  # int8 K, V and q against exact attention: as without a window


def random_sinks(n_head: int, seed: int = 1) -> K.Sinks:
    values = np.random.default_rng(seed).standard_normal(n_head).astype(np.float32) * 3
    return K.Sinks(values)


def filled(pool: K.Pool, d: int, n_head: int, n_kv: int, lengths: list[tuple[int, int]]) -> Step:
    """A batch whose entries have (history, new) tokens, K and V placed."""
    timelines: list[Timeline] = []
    rows: list[F32] = []
    for seed, (history, new) in enumerate(lengths):
        qkv = random_qkv(seed, history + new, n_head, n_kv, d)
        timelines.append(Timeline(K.PageShape(1, n_kv, d), n_head, -(-(history + new) // PAGE)))
        append(pool, timelines[-1], qkv[:history])
        rows.append(qkv[history:])
    return Step(pool, timelines, rows)


# Decode and chunks whose windows begin in, and at the border of, a page and a super-page.
LENGTHS = [(0, 3), (270, 1), (1020, 40), (2047, 1), (2175, 1), (2900, 9)]


@pytest.mark.parametrize(
    ("d", "n_head", "n_kv", "window"),
    [(*SHAPES[i % len(SHAPES)], window) for i, window in enumerate(2 * WINDOWS)],
)
def test_levels_give_equal_bits(pool: K.Pool, d: int, n_head: int, n_kv: int, window: int) -> None:
    K.set_isa(BEST)
    one = filled(pool, d, n_head, n_kv, LENGTHS)
    for sinks in (None, random_sinks(n_head)):
        results: list[F32] = []
        for level in LEVELS:
            K.set_isa(level)
            results.append(one.attend(window, sinks))
        assert np.isfinite(results[0]).all()
        for out in results[1:]:
            np.testing.assert_array_equal(bits(out), bits(results[0]))


def exact_rows(
    qkv: NDArray[np.float64], n_head: int, n_kv: int, window: int, sinks: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """softmax(q k^T, sink) v over the visible tokens, in binary64: (tokens, n_head, d)."""
    n = len(qkv)
    x = qkv.reshape(n, n_head + 2 * n_kv, -1)
    q, k, v = np.split(x, [n_head, n_head + n_kv], axis=1)
    distance = np.arange(n)[:, None] - np.arange(n)[None]
    is_hidden = (distance < 0) | (distance >= (window or n))
    out = np.empty_like(q)
    for head in range(n_head):
        kv = head // (n_head // n_kv)
        scores = q[:, head] @ k[:, kv].T / np.sqrt(q.shape[-1])
        e = np.where(is_hidden, 0, np.exp(scores))
        total = e.sum(1, keepdims=True) + (0 if sinks is None else np.exp(sinks[head]))
        out[:, head] = e / total @ v[:, kv]
    return out


@pytest.mark.parametrize("window", [0, 1, 30, 128, 300])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_agree_with_binary64(pool: K.Pool, level: str, window: int, has_sinks: bool) -> None:
    K.set_isa(level)
    n_head, n_kv, d, n = 4, 2, 64, 400
    qkv = random_qkv(5, n, n_head, n_kv, d)
    values = np.array([-4.0, 0.0, 1.5, 6.0], np.float32)
    out = step(
        pool,
        [Timeline(K.PageShape(1, n_kv, d), n_head, 2)],
        [qkv],
        window,
        K.Sinks(values) if has_sinks else None,
    )[0].reshape(n, n_head, d)
    exact = exact_rows(
        qkv.astype(np.float64), n_head, n_kv, window, values.astype(float) if has_sinks else None
    )
    for head in range(n_head):
        error = np.linalg.norm(out[:, head] - exact[:, head]) / np.linalg.norm(exact[:, head])
        assert error < TOLERANCE


def owners(d: int) -> NDArray[np.int64]:
    """The token of every byte of a KV head of a page."""
    token, tile, quad = np.arange(PAGE), np.arange(PAGE).reshape(16, 1, 16), np.arange(PAGE // 4)
    parts = [
        np.broadcast_to(tile[..., None], (16, d // 4, 16, 4)),
        np.repeat(np.broadcast_to(tile, (16, d // 32, 16)), 2),
        np.broadcast_to(quad[:, None, None] * 4 + np.arange(4), (PAGE // 4, d, 4)),
        np.repeat(token, 2),
    ]
    return np.concatenate([part.ravel() for part in parts])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [1, 16, 100, 128, 257, 1030])
def test_hidden_tokens_have_no_effect(pool: K.Pool, level: str, window: int) -> None:
    """Every byte of K and V that no row of the step sees is 0xFF: all scales are NaN."""
    K.set_isa(level)
    n_head, n_kv, d = 4, 2, 96
    for history, new in ((1500, 1), (1270, 5), (2047, 3)):
        one = filled(pool, d, n_head, n_kv, [(history, new)])
        sinks = random_sinks(n_head)
        expected = one.attend(window, sinks)
        memory = one.timelines[0].memory
        for page in range(len(memory)):
            token = page * PAGE + np.tile(owners(d), n_kv)
            memory[page][(token <= history - window) | (token >= history + new)] = 0xFF
        np.testing.assert_array_equal(bits(one.attend(window, sinks)), bits(expected))


@pytest.mark.parametrize("level", LEVELS)
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(pool: K.Pool, level: str) -> None:
    K.set_isa(level)
    qkv = random_qkv(6, 300, 4, 2, 64)
    shape, sinks = K.PageShape(1, 2, 64), random_sinks(4)
    clean = step(pool, [Timeline(shape, 4, 2)], [qkv], 40, sinks)[0].reshape(300, 4, 64)
    qkv[20, 5 * 64 + 3] = np.nan  # K of KV head 1
    qkv[200, 6 * 64] = np.inf  # V of KV head 0
    out = step(pool, [Timeline(shape, 4, 2)], [qkv], 40, sinks)[0].reshape(300, 4, 64)
    hit = np.zeros((300, 4), bool)
    hit[20:60, 2:] = hit[200:240, :2] = True
    assert (bits(out[hit]) == 0x7FC00000).all()
    np.testing.assert_array_equal(bits(out[~hit]), bits(clean[~hit]))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_chunks_batches_and_threads_change_no_bit(data: st.DataObject) -> None:
    length, window = data.draw(st.integers(2, 1500)), data.draw(st.sampled_from([0, *WINDOWS]))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=6)))
    sinks = data.draw(st.sampled_from([None, random_sinks(6)]))
    K.set_isa(BEST)
    qkv, other = random_qkv(length, length, 6, 2, 64), random_qkv(9, 700, 6, 2, 64)
    shape = K.PageShape(1, 2, 64)
    expected = step(K.Pool(1), [Timeline(shape, 6, 6)], [qkv], window, sinks)[0]
    parts, beside = Timeline(shape, 6, 6), Timeline(shape, 6, 3)
    pool = K.Pool(data.draw(st.integers(1, 3)))
    out: list[F32] = []
    for rows, more in zip(np.split(qkv, cuts), np.array_split(other, len(cuts) + 1), strict=True):
        out.append(step(pool, [beside, parts], [more, rows], window, sinks)[1])
    np.testing.assert_array_equal(bits(np.concatenate(out)), bits(expected))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("window", [1100, 3000])
def test_splitting_one_long_sequence_changes_no_bit(threads: int, window: int) -> None:
    """Rows of one tile begin to see in different super-pages."""
    qkv = random_qkv(2, 5000, 4, 1, 64)
    results: list[F32] = []
    for count in (1, threads):
        pool = K.Pool(count)
        timeline = Timeline(K.PageShape(1, 1, 64), 4, 20)
        append(pool, timeline, qkv[: 1024 + window])
        rows = qkv[1024 + window : 1024 + window + 8]
        results += step(pool, [timeline], [rows], window + 4, random_sinks(4))
        pool.close()
    np.testing.assert_array_equal(bits(results[1]), bits(results[0]))


def superpages(one: Step) -> list[int]:
    return [-(-int(n + start) // SUPERPAGE) for n, start, _ in one.entries]


def partials_of(one: Step, spans: list[tuple[int, int, int]], window: int) -> K.Partials:
    """Attends to spans (entry, first super-page, count) in a batch that has the pages of them only
    that a row sees."""
    addresses = np.zeros_like(one.addresses)
    starts = np.concatenate([[0], np.cumsum(one.entries[:, 2])])
    pages = SUPERPAGE // PAGE
    for entry, first, count in spans:
        seen = max(0, int(one.entries[entry, 1]) - window + 1) // PAGE if window else 0
        end = min(starts[entry] + (first + count) * pages, starts[entry + 1])
        here = slice(starts[entry] + max(first * pages, seen), end)
        addresses[here] = one.addresses[here]
    batch = K.Batch(one.total, len(one.counts), len(addresses))
    batch.set(np.zeros(one.total, np.int32), one.entries, addresses, absent_pages=True)
    out = K.Partials(one.total, one.n_head, one.shape.layer(0).head_dim)
    array = np.array(spans, np.int32).reshape(-1, 3)
    K.attend_partials(one.pool, one.queries, batch, one.shape, one.layer, array, out, window=window)
    return out


MIXED = [(2500, 1), (0, 5), (3070, 9), (1020, 1100), (4095, 1)]


@pytest.fixture(scope="module")
def mixed(pool: K.Pool) -> Step:
    K.set_isa(BEST)
    return filled(pool, 64, 4, 2, MIXED)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_spans_in_any_division_and_grouping_give_the_bits_of_attend(
    mixed: Step, data: st.DataObject
) -> None:
    window = data.draw(st.sampled_from([0, *WINDOWS]))
    sinks = data.draw(st.sampled_from([None, random_sinks(4)]))
    expected = mixed.attend(window, sinks)
    n_cuts = data.draw(st.integers(0, 4))
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(n_cuts + 1)]
    for entry, n in enumerate(superpages(mixed)):
        at = sorted(data.draw(st.lists(st.integers(0, n), min_size=n_cuts, max_size=n_cuts)))
        for part, (a, b) in enumerate(pairwise([0, *at, n])):
            parts[part].append((entry, a, b - a))
    partials = [partials_of(mixed, spans, window) for spans in parts]
    received = [K.Partials(mixed.total, 4, 64) for _ in partials]
    for part, into in zip(partials, received, strict=True):
        into.load_bytes(part.to_bytes())
    while len(received) > 1:
        i = data.draw(st.integers(0, len(received) - 2))
        K.fold(mixed.pool, received[i], received[i + 1])
        del received[i + 1]
    out = mixed.rows()
    K.finish(mixed.pool, received[0], out, sinks=sinks)
    np.testing.assert_array_equal(bits(out.view(mixed.total)), bits(expected))


def test_accumulators_that_see_nothing_are_zero(mixed: Step) -> None:
    """The same bytes on every machine: the buffer had others before."""
    span = [(3, 0, 1)]  # rows 1020 .. 2119: those from 1151 on do not see it
    out = partials_of(mixed, span, 0)
    fresh = partials_of(mixed, span, 128).to_bytes()
    batch = mixed.batch
    array = np.array(span, np.int32)
    K.attend_partials(mixed.pool, mixed.queries, batch, mixed.shape, 0, array, out, window=128)
    assert out.to_bytes() == fresh
    values = np.frombuffer(fresh[16 + 24 * len(MIXED) :], np.float32)
    m, denominator, o = np.split(values, [1100 * 4, 2 * 1100 * 4])
    is_empty = np.repeat(np.arange(1020, 2120) - 128 >= SUPERPAGE - 1, 4)
    assert not m[is_empty].any()
    assert not o.reshape(-1, 64)[is_empty].any()
    np.testing.assert_array_equal(denominator == 0, is_empty)


@pytest.mark.parametrize("level", LEVELS)
def test_an_empty_partial_changes_nothing_and_an_empty_accumulator_becomes_the_other(
    mixed: Step, level: str
) -> None:
    """Whatever its m and o are, and where the other one's m is far below."""
    K.set_isa(level)
    into, following = (K.Partials(mixed.total, 4, 64) for _ in range(2))
    rng = np.random.default_rng(1)
    parts = [partials_of(mixed, [(0, first, 1)], 0).to_bytes() for first in (0, 1)]
    header = len(parts[0]) - 4 * 4 * 66
    for is_empty in ((False, True), (True, False), (True, True)):
        values = [
            np.concatenate([m, np.zeros(4) if empty else rng.random(4), rng.standard_normal(256)])
            for m, empty in zip((np.full(4, -200.0), np.full(4, 7.0)), is_empty, strict=True)
        ]
        raw = [part.astype(np.float32) for part in values]
        into.load_bytes(parts[0][:header] + raw[0].tobytes())
        following.load_bytes(parts[1][:header] + raw[1].tobytes())
        K.fold(mixed.pool, into, following)
        wanted = raw[0] if is_empty[1] else raw[1]
        assert into.to_bytes()[header:] == wanted.tobytes()


def test_a_window_needs_the_pages_that_a_row_sees_only(mixed: Step) -> None:
    addresses = mixed.addresses.copy()
    addresses[8] = 0  # of entry 0: positions 2048 .. 2303
    batch = K.Batch(mixed.total, len(MIXED), len(addresses))
    batch.set(np.zeros(mixed.total, np.int32), mixed.entries, addresses, absent_pages=True)
    span = np.array([(0, 0, 3)], np.int32)
    at = mixed.pool, mixed.queries, batch, mixed.shape, 0, span, K.Partials(mixed.total, 4, 64)
    K.attend_partials(*at, window=197)
    with pytest.raises(ValueError, match="page 8 of entry 0 is absent"):
        K.attend_partials(*at, window=198)


@pytest.mark.parametrize("level", LEVELS)
def test_some_heads_take_their_own_sinks(pool: K.Pool, mixed: Step, level: str) -> None:
    K.set_isa(level)
    one = filled(pool, 64, 6, 3, [(1500, 3)])
    sinks = random_sinks(6)
    expected, out = one.attend(128, sinks), one.rows()
    for first in range(3):
        data = one.queries.to_bytes(3, (2 * first, 2), [(0, 3)])
        queries, part = K.Queries(3, 2, 64), K.Partials(3, 2, 64)
        queries.load_bytes(data, 1)
        K.attend_partials(
            pool, queries, one.batch, one.shape, 0, np.array([(0, 0, 2)], np.int32), part,
            heads=(first, 1), window=128,
        )  # fmt: skip
        K.finish(pool, part, out, rows=[0], first_head=2 * first, sinks=sinks)
    np.testing.assert_array_equal(bits(out.view(3)), bits(expected))


def test_sinks_are_partials_without_v() -> None:
    """m is the integer above the logit in base 2, and l its power of two to 22 bits."""
    values = np.array([0.0, -0.0, 1.0, -1.0, 88.0, 1e4, -1e4, 1e38], np.float32)
    m, share = K.Sinks(values).view()
    np.testing.assert_array_equal(m[:4], [0, 0, 2, -1])
    assert not np.signbit(m[:2]).any()
    with np.errstate(over="ignore", under="ignore"):
        z = values[:5].astype(np.float64) * 1.4426950408889634
    np.testing.assert_allclose(m[:5] + np.log2(share[:5]), z, atol=2e-5)
    assert (share > 0.49).all()
    assert (share <= 1).all()


def test_a_large_sink_takes_everything_and_a_small_one_nothing(pool: K.Pool) -> None:
    qkv = random_qkv(3, 300, 2, 1, 64)
    at = [Timeline(K.PageShape(1, 1, 64), 2, 2)], [qkv]
    plain = step(pool, *at)[0].reshape(-1, 2, 64)
    at = [Timeline(K.PageShape(1, 1, 64), 2, 2)], [qkv]
    sinks = K.Sinks(np.array([1e30, -1e30], np.float32))
    out = step(pool, *at, sinks=sinks)[0].reshape(-1, 2, 64)
    assert not out[:, 0].any()
    np.testing.assert_array_equal(bits(out[:, 1]), bits(plain[:, 1]))


def test_sinks_that_cannot_be_are_refused(mixed: Step) -> None:
    for value in (np.nan, np.inf, -np.inf, 3e38):
        with pytest.raises(ValueError, match="head 1 is not finite"):
            K.Sinks(np.array([0, value], np.float32))
    for data in (b"", b"abc"):
        with pytest.raises(ValueError, match="are not fp32 values"):
            K.Sinks(data)
    with pytest.raises(ValueError, match="sinks of 3 heads, expected 4"):
        mixed.attend(0, random_sinks(3))
    part = partials_of(mixed, [(e, 0, n) for e, n in enumerate(superpages(mixed))], 0)
    with pytest.raises(ValueError, match="sinks of 8 heads, expected 4"):
        K.finish(mixed.pool, part, mixed.rows(), sinks=random_sinks(8))
    with pytest.raises(TypeError):
        mixed.attend(-1)
