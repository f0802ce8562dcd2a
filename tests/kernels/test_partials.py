"""Partials: attention computed in parts, folded and finished, has the bits of attend().

The parts of a test are attended in batches that have only the pages of those parts, as on several
machines; every other page is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

SUPERPAGE = K.SUPERPAGE_TOKENS
PAGES = SUPERPAGE // PAGE  # of a super-page
Spans = Sequence[tuple[int, int, int]]  # entry, first super-page, count


def prepare(
    pool: K.Pool, d: int, n_head: int, n_kv: int, lengths: Sequence[tuple[int, int]]
) -> Step:
    """A batch whose entries have (history, new) tokens, K and V placed, random everywhere."""
    timelines: list[Timeline] = []
    rows: list[F32] = []
    for seed, (history, new) in enumerate(lengths):
        qkv = random_qkv(seed, history + new, n_head, n_kv, d)
        timeline = Timeline(K.PageShape(1, n_kv, d), n_head, -(-(history + new) // PAGE))
        append(pool, timeline, qkv[:history])
        timelines.append(timeline)
        rows.append(qkv[history:])
    return Step(pool, timelines, rows)


def superpages(step: Step) -> list[int]:
    """Super-pages that the last token of each entry sees."""
    return [-(-int(n + start) // SUPERPAGE) for n, start, _ in step.entries]


def partials_of(step: Step, spans: Spans) -> K.Partials:
    """Attends to `spans` with a batch that has no other page."""
    addresses = np.zeros_like(step.addresses)
    starts = np.concatenate([[0], np.cumsum(step.entries[:, 2])])
    for entry, first, count in spans:
        here = slice(
            starts[entry] + first * PAGES,
            min(starts[entry] + (first + count) * PAGES, starts[entry + 1]),
        )
        addresses[here] = step.addresses[here]
    batch = K.Batch(step.total, len(step.counts), len(addresses))
    batch.set(np.zeros(step.total, np.int32), step.entries, addresses, absent_pages=True)
    out = K.Partials(step.total, step.n_head, step.shape.layer(0).head_dim)
    K.attend_partials(
        step.pool, step.queries, batch, step.shape, step.layer, spans_array(spans), out
    )
    return out


def spans_array(spans: Spans) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    return np.array(spans, np.int32).reshape(-1, 3)


def everything(step: Step) -> Spans:
    return [(e, 0, n) for e, n in enumerate(superpages(step))]


def finished(step: Step, partials: K.Partials) -> F32:
    out = step.rows()
    K.finish(step.pool, partials, out)
    return out.view(step.total).copy()


def folded(step: Step, parts: Sequence[K.Partials]) -> K.Partials:
    def fold(into: K.Partials, following: K.Partials) -> K.Partials:
        K.fold(step.pool, into, following)
        return into

    return reduce(fold, parts)


def cut(step: Step, cuts: Sequence[Sequence[int]]) -> list[Spans]:
    """Parts of the whole: cuts[i] are the super-pages at which entry i is cut, rising."""
    parts: list[list[tuple[int, int, int]]] = [[] for _ in range(len(cuts[0]) + 1)]
    for entry, (at, n) in enumerate(zip(cuts, superpages(step), strict=True)):
        edges = [0, *at, n]
        for part, (a, b) in enumerate(pairwise(edges)):
            parts[part].append((entry, a, b - a))
    return parts


# Decode, prefill inside a super-page and across two borders, and an entry shorter than a page.
MIXED = [(2500, 1), (0, 5), (3070, 9), (1020, 1100), (4095, 1)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("d", "n_head", "n_kv"), [(64, 4, 2), (96, 3, 3), (128, 8, 1), (256, 6, 2), (512, 2, 1)]
)
def test_parts_fold_to_the_bits_of_attend(
    pool: K.Pool, level: str, d: int, n_head: int, n_kv: int
) -> None:
    lengths = [(1030, 1), (0, 5), (2046, 4)] if level == "scalar" else MIXED
    step = prepare(pool, d, n_head, n_kv, lengths)
    rng = np.random.default_rng(d)
    K.set_isa(level)
    expected = bits(step.attend())
    for n_cuts in (0, 1, 2):
        cuts = [sorted(rng.integers(0, n + 1, n_cuts).tolist()) for n in superpages(step)]
        parts = [partials_of(step, spans) for spans in cut(step, cuts)]
        np.testing.assert_array_equal(bits(finished(step, folded(step, parts))), expected)


@pytest.fixture(scope="module")
def mixed(pool: K.Pool) -> tuple[Step, F32]:
    K.set_isa(BEST)
    step = prepare(pool, 64, 4, 2, MIXED)
    return step, step.attend()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_division_and_grouping_gives_equal_bits(
    mixed: tuple[Step, F32], data: st.DataObject
) -> None:
    """fold is associative, on any number of threads, and does not depend on the batch of a part."""
    step, expected = mixed
    n_cuts = data.draw(st.integers(0, 4))
    at = [st.lists(st.integers(0, n), min_size=n_cuts, max_size=n_cuts) for n in superpages(step)]
    parts = [partials_of(step, s) for s in cut(step, [sorted(data.draw(a)) for a in at])]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        K.fold(step.pool, parts[i], parts[i + 1])
        del parts[i + 1]
    np.testing.assert_array_equal(bits(finished(step, parts[0])), bits(expected))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(mixed: tuple[Step, F32], threads: int) -> None:
    """A long entry is cut by super-page among the threads, and folded in order."""
    step, expected = mixed
    shared = step.pool
    step.pool = K.Pool(threads)
    try:
        alone = [partials_of(step, [(e, 0, n)]) for e, n in enumerate(superpages(step))]
        rows = finished(step, folded(step, alone))
    finally:
        step.pool.close()
        step.pool = shared
    np.testing.assert_array_equal(bits(rows), bits(expected))


def test_levels_give_the_same_partials(pool: K.Pool) -> None:
    step = prepare(pool, 96, 4, 2, [(2040, 20), (7, 3)])
    exported: set[bytes] = set()
    for level in LEVELS:
        K.set_isa(level)
        first = partials_of(step, [(0, 1, 2), (1, 0, 1)])
        exported.add(first.to_bytes())
    assert len(exported) == 1


def test_later_superpages_keep_separate_accumulators(mixed: tuple[Step, F32]) -> None:
    """Fold order changes bits: one accumulator from super-page 0 on, else one per super-page."""
    step, _ = mixed
    rows = [n * step.n_head for n in step.counts]
    head = partials_of(step, [(0, 0, 2), (4, 0, 3)])
    assert head.n_accumulators == rows[0] + rows[4]
    assert head.spans == [(0, 2), (0, 0), (0, 0), (0, 0), (0, 3)]
    tail = partials_of(step, [(0, 1, 2), (3, 2, 1)])
    assert tail.n_accumulators == 2 * rows[0] + rows[3]
    assert len(tail.to_bytes()) == 16 + 24 * 5 + 4 * (64 + 2) * tail.n_accumulators
    K.fold(step.pool, head, partials_of(step, [(0, 2, 1)]))
    assert head.n_accumulators == rows[0] + rows[4], "a prefix stays one accumulator"


def test_rows_that_attend_to_nothing_of_a_span_are_zero(pool: K.Pool) -> None:
    """Tokens before the span's first super-page, also in memory that held other accumulators."""
    step = prepare(pool, 64, 2, 1, [(1000, 30)])
    out = partials_of(step, [(0, 1, 1)])
    again = K.Partials(30, 2, 64)
    again.load_bytes(nan_bytes(out))
    K.attend_partials(
        pool, step.queries, step.batch, step.shape, 0, spans_array([(0, 1, 1)]), again
    )
    assert again.to_bytes() == out.to_bytes()
    m, denominator, o = accumulators(out)
    unseen = 24 * 2  # 24 of the 30 tokens are before position 1024
    assert not any(part[:unseen].any() for part in (m, denominator, o))
    assert (denominator[unseen:] > 0).all()


def nan_bytes(partials: K.Partials) -> bytes:
    data = partials.to_bytes()
    values = 4 * (partials.head_dim + 2) * partials.n_accumulators
    return data[:-values] + b"\xff" * values


def accumulators(partials: K.Partials) -> tuple[F32, F32, F32]:
    n, d = partials.n_accumulators, partials.head_dim
    values = np.frombuffer(partials.to_bytes()[-4 * (d + 2) * n :], np.float32)
    return values[:n], values[n : 2 * n], values[2 * n :].reshape(n, d)


def test_partials_sent_as_bytes_fold_to_equal_bits(mixed: tuple[Step, F32]) -> None:
    """A chain over three machines that exchange only bytes."""
    step, expected = mixed
    parts = cut(step, [[1, n - 1] if n > 1 else [0, 0] for n in superpages(step)])
    passed = partials_of(step, parts[0]).to_bytes()
    for spans in parts[1:]:
        received = K.Partials(step.total, step.n_head, 64)
        received.load_bytes(passed)
        assert received.to_bytes() == passed
        K.fold(step.pool, received, partials_of(step, spans))
        passed = received.to_bytes()
    last = K.Partials(step.total, step.n_head, 64)
    last.load_bytes(memoryview(passed))
    np.testing.assert_array_equal(bits(finished(step, last)), bits(expected))


@pytest.mark.parametrize("part", [0, 1])
def test_nonfinite_values_reach_the_result(pool: K.Pool, part: int) -> None:
    """A NaN in K of either part makes the rows of its KV head NaN, in the bits of attend."""
    timeline = Timeline(K.PageShape(1, 2, 64), 4, 6)
    qkv = random_qkv(1, 1500, 4, 2, 64)
    qkv[100 + 1024 * part, 4 * 64 + 3] = np.nan
    append(pool, timeline, qkv[:-2])
    step = Step(pool, [timeline], [qkv[-2:]])
    parts = [partials_of(step, [(0, 0, 1)]), partials_of(step, [(0, 1, 1)])]
    rows = finished(step, folded(step, parts))
    np.testing.assert_array_equal(bits(rows), bits(step.attend()))
    assert (bits(rows[:, : 2 * 64]) == 0x7FC00000).all()
    assert np.isfinite(rows[:, 2 * 64 :]).all()


def test_spans_outside_an_entry_are_refused(mixed: tuple[Step, F32]) -> None:
    step, _ = mixed
    out = K.Partials(step.total, step.n_head, 64)

    def refuse(spans: Spans, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            K.attend_partials(
                step.pool, step.queries, step.batch, step.shape, 0, spans_array(spans), out
            )
        assert out.n_accumulators == 0

    refuse([(5, 0, 1)], "entry 5 of 5")
    refuse([(0, -1, 1)], "negative")
    refuse([(0, 0, 4)], "has 3 super-pages, not 4 from 0")
    refuse([(0, 3, 1)], "has 3 super-pages")
    refuse([(0, 2**31 - 1, 2**31 - 1)], "has 3 super-pages")
    refuse([(0, 0, 1), (0, 1, 1)], "entry 0 has two spans")


def test_absent_pages_are_refused_where_they_are_needed(pool: K.Pool) -> None:
    step = prepare(pool, 64, 2, 1, [(1500, 4)])
    out, rows = K.Partials(4, 2, 64), K.Rows(4, 4 * 64)
    batch = K.Batch(4, 1, 6)
    tokens = np.zeros(4, np.int32)
    at = (pool, step.queries, batch, step.shape, 0)
    addresses = step.addresses.copy()
    addresses[4] = 0
    with pytest.raises(ValueError, match="null"):
        batch.set(tokens, step.entries, addresses)
    batch.set(tokens, step.entries, addresses, absent_pages=True)
    K.attend_partials(*at, spans_array([(0, 0, 1)]), out)
    with pytest.raises(ValueError, match="page 4 of entry 0 is absent"):
        K.attend_partials(*at, spans_array([(0, 1, 1)]), out)
    with pytest.raises(ValueError, match="absent"):
        K.attend(*at, step.rows())
    K.row_digests(batch, step.shape, np.zeros(4, np.uint64))
    addresses[5] = 0
    batch.set(tokens, step.entries, addresses, absent_pages=True)
    with pytest.raises(ValueError, match="page 5 of entry 0 is absent"):
        K.row_digests(batch, step.shape, np.zeros(4, np.uint64))
    with pytest.raises(ValueError, match="page 5 of entry 0 is absent"):
        K.place_kv(pool, rows, batch, step.shape, 0, 2, None, None, 1e-6, None, 0.125, step.queries)


def test_folds_out_of_order_are_refused(mixed: tuple[Step, F32]) -> None:
    step, _ = mixed
    head = partials_of(step, [(0, 0, 1)])
    before = head.to_bytes()
    other = prepare(step.pool, 64, 4, 2, [(2500, 1)])

    def refuse(following: K.Partials, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            K.fold(step.pool, head, following)
        assert head.to_bytes() == before

    refuse(partials_of(step, [(0, 2, 1)]), r"super-pages 2\.\.3 do not follow super-pages 0\.\.1")
    refuse(partials_of(step, [(0, 0, 1)]), "do not follow")
    refuse(partials_of(other, [(0, 1, 1)]), "differ in heads, head_dim, v_first or entries")
    refuse(head, "must differ")
    with pytest.raises(ValueError, match=r"entry 0 has super-pages 0\.\.1 of 0\.\.3"):
        finished(step, head)
    later = prepare(step.pool, 64, 4, 2, [(h + 1, n) for h, n in MIXED])
    refuse(partials_of(later, [(0, 1, 1)]), "of another step")


def test_mismatched_buffers_are_refused(mixed: tuple[Step, F32]) -> None:
    step, _ = mixed
    whole = partials_of(step, everything(step))
    call = (step.pool, step.queries, step.batch, step.shape, 0, spans_array([]))
    with pytest.raises(ValueError, match="4 heads of 96"):
        K.attend_partials(*call, K.Partials(step.total, 4, 96))
    with pytest.raises(ValueError, match="do not fit 1"):
        K.attend_partials(*call, K.Partials(1, 4, 64))
    with pytest.raises(ValueError, match="do not fit 1"):
        K.finish(step.pool, whole, K.Rows(1, 4 * 64))
    with pytest.raises(ValueError, match="width"):
        K.finish(step.pool, whole, K.Rows(step.total, 3 * 64))
    with pytest.raises(ValueError, match="multiple of 32"):
        K.Partials(1, 4, 48)


def damage(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + value + data[offset + len(value) :]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:15], "no header"),
        (lambda data: data[:-4], "more accumulators"),
        (lambda data: data + b"\0", "not the accumulators"),
        (lambda data: data + b"\0" * 264, "not the accumulators"),
        (lambda data: data[: 16 + 24 * 5], "more accumulators"),
        (lambda data: data[: 16 + 23], "do not fit"),
        (damage(0, b"\x05"), "4 heads of 64"),
        (damage(4, b"\x60"), "4 heads of 64"),
        (damage(8, b"\xff\xff\xff\xff"), "do not fit"),
        (damage(16, b"\0\0\0\0"), "entry 0 has 0 tokens"),
        (damage(16, b"\xff\xff\xff\xff"), "at most"),
        (damage(16 + 4, b"\x03"), "entry 0 has 3 super-pages"),
        (damage(16 + 8, b"\xff\xff\xff\xff"), "entry 0 has 3 super-pages"),
        (damage(16 + 12, b"\x01"), "malformed"),
        (damage(16 + 16, b"\xff" * 8), "malformed"),
        (damage(16 + 24 + 4, b"\x01"), "malformed"),
    ],
)
def test_malformed_bytes_are_refused(
    mixed: tuple[Step, F32], change: Callable[[bytes], bytes], match: str
) -> None:
    step, _ = mixed
    data = partials_of(step, [(0, 1, 2), (4, 0, 3)]).to_bytes()
    into = K.Partials(step.total, 4, 64)
    into.load_bytes(data)
    with pytest.raises(ValueError, match=match):
        into.load_bytes(change(data))
    assert into.to_bytes() == data


@pytest.mark.parametrize("level", LEVELS)
def test_some_heads_of_some_entries_have_the_bits_of_attend(pool: K.Pool, level: str) -> None:
    """As a peer computes them: its queries are bytes, and its batch has a part of the entries."""
    step = prepare(pool, 64, 6, 3, [(1500, 3), (0, 5), (2046, 1)])
    K.set_isa(level)
    expected = bits(step.attend())
    out = step.rows()
    starts = [0, 3, 8]
    for entries in ([1], [0, 2]):
        for first, count in ((0, 1), (1, 2)):
            runs = [(starts[e], int(step.entries[e, 0])) for e in entries]
            queries = K.Queries(20, 2 * count, 64)
            data = step.queries.to_bytes(3, (2 * first, 2 * count), runs)
            total = sum(n for _, n in runs)
            assert len(data) == total * 2 * count * (64 + 8)
            assert queries.load_bytes(data, count) == total
            assert queries.to_bytes(count, (0, 2 * count), [(0, total)]) == data
            pages = np.split(step.addresses, np.cumsum(step.entries[:, 2])[:-1])
            mine = np.concatenate([pages[e] for e in entries])
            batch = K.Batch(total, len(entries), len(mine))
            batch.set(np.zeros(total, np.int32), step.entries[entries], mine)
            spans = [(i, 0, superpages(step)[e]) for i, e in enumerate(entries)]
            part = K.Partials(total, 2 * count, 64)
            K.attend_partials(
                pool, queries, batch, step.shape, 0, spans_array(spans), part, heads=(first, count)
            )
            K.finish(pool, part, out, rows=[starts[e] for e in entries], first_head=2 * first)
    np.testing.assert_array_equal(bits(out.view(step.total)), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_parts_of_a_latent_layer_have_the_values_of_attend(pool: K.Pool, level: str) -> None:
    """Accumulators have the dims of V alone, also where a part has some of the heads that read the
    one KV head."""
    d, v_first, n_head = 96, 32, 6
    timelines: list[Timeline] = []
    rows: list[F32] = []
    for seed, (history, new) in enumerate([(2500, 1), (0, 5), (1020, 8)]):
        rng = np.random.default_rng(seed)
        qkv = rng.standard_normal((history + new, (n_head + 1) * d)).astype(np.float32)
        timeline = Timeline(K.PageShape(1, 1, d, v_first), n_head, -(-(history + new) // PAGE))
        append(pool, timeline, qkv[:history])
        timelines.append(timeline)
        rows.append(qkv[history:])
    step = Step(pool, timelines, rows)
    K.set_isa(level)
    expected = step.attend().reshape(step.total, n_head, d)[:, :, v_first:]
    out = step.rows()
    starts, runs = [0, 1, 6], [(0, step.total)]
    for first, count in ((0, 4), (4, 1), (5, 1)):
        queries = K.Queries(step.total, count, d)
        assert queries.load_bytes(step.queries.to_bytes(1, (first, count), runs), 1) == step.total
        total = None
        for spans in ([(0, 0, 1), (1, 0, 1), (2, 0, 1)], [(0, 1, 2), (2, 1, 1)]):
            part, again = (K.Partials(step.total, count, d, v_first) for _ in range(2))
            at = pool, queries, step.batch, step.shape, 0
            K.attend_partials(*at, spans_array(spans), part)
            data = part.to_bytes()
            assert len(data) == 16 + 24 * 3 + 4 * (d - v_first + 2) * part.n_accumulators
            again.load_bytes(data)
            assert again.to_bytes() == data
            if total is None:
                total = again
            else:
                K.fold(pool, total, again)
        assert total is not None
        K.finish(pool, total, out, rows=starts, first_head=first)
    found = out.view(step.total).reshape(step.total, n_head, d)
    np.testing.assert_array_equal(bits(found[:, :, v_first:]), bits(expected))
    assert not found[:, :, :v_first].any()


def test_partials_of_another_v_first_are_refused(pool: K.Pool) -> None:
    step = prepare(pool, 64, 2, 1, [(1500, 4)])
    other = K.Partials(step.total, 2, 64, 32)
    at = (pool, step.queries, step.batch, step.shape, 0, spans_array([(0, 0, 1)]))
    with pytest.raises(ValueError, match="partials have v_first 32, pages 0"):
        K.attend_partials(*at, other)
    part = partials_of(step, [(0, 0, 1)])
    with pytest.raises(ValueError, match="not partials of 2 heads of 64, v_first 32"):
        other.load_bytes(part.to_bytes())
    with pytest.raises(ValueError, match="differ in heads, head_dim, v_first or entries"):
        K.fold(pool, part, other)
    for wrong in (64, 16, 96):
        with pytest.raises(ValueError, match="v_first must be a multiple of 32 below head_dim"):
            K.Partials(1, 2, 64, wrong)


def test_heads_tokens_and_bytes_that_do_not_exist_are_refused(mixed: tuple[Step, F32]) -> None:
    step, _ = mixed  # 4 heads for 2 KV heads
    queries, total = step.queries, step.total
    for heads in ((4, 1), (0, 5), (2, 3), (0, 0), (2, 2**63)):
        with pytest.raises(ValueError, match="no such heads"):
            queries.to_bytes(2, heads, [(0, 1)])
    for heads in ((1, 2), (0, 3), (1, 3)):
        with pytest.raises(ValueError, match="neither those of whole KV heads nor of one"):
            queries.to_bytes(2, heads, [(0, 1)])
    for heads in ((2, 1), (0, 3), (1, 2), (0, 0), (1, 2**63)):
        part = K.Partials(total, 2, 64)
        at = (step.pool, queries, step.batch, step.shape, 0, spans_array([]), part)
        with pytest.raises(ValueError, match="no such heads"):
            K.attend_partials(*at, heads=heads)
    for run in ((queries.tokens_max, 1), (0, queries.tokens_max + 1), (2**63, 2**63)):
        with pytest.raises(ValueError, match="no such tokens"):
            queries.to_bytes(2, (0, 1), [run])
    one = K.Queries(2, 4, 64)
    data = queries.to_bytes(2, (0, 4), [(0, 2)])
    for wrong in (data[:-1], data + b"\0", data + data, data[: len(data) // 4]):
        with pytest.raises(ValueError, match="are not those of 0 to 2 tokens"):
            one.load_bytes(wrong, 2)
    with pytest.raises(ValueError, match="do not divide"):
        one.load_bytes(data, 3)
    whole, out = partials_of(step, everything(step)), step.rows()
    n = len(MIXED)
    for rows, match in (
        ([0] * (n - 1), "one row"),
        ([total] * n, "do not fit"),
        ([2**63] * n, "no such row"),
    ):
        with pytest.raises(ValueError, match=match):
            K.finish(step.pool, whole, out, rows=rows)
    for first in (1, 4, 2**63):
        with pytest.raises(ValueError, match="no such heads"):
            K.finish(step.pool, whole, out, first_head=first)
