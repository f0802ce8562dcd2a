"""Latent attention over links: 128 heads read one KV head of 576 dims, of which 512 are V, so a
unit has some of the heads, and so many units are under way as there is room for. A step by any
route has the bits of attention to all pages at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import kernels as K
from batchengine.lanes.ring import routed
from batchengine.lanes.ring.spans import SpanAttention
from batchengine.wire.data import Accumulators, DataMessage, Query
from batchengine.wire.frames import Payload
from tests.kernels.timelines import F32, Step, Timeline, bits
from tests.lanes.ring.test_windows import Links, Route, routed_step

N_HEAD, DIM, V_FIRST = 128, 576, 64
ROW_BYTES = 4 * (DIM - V_FIRST + 2)  # of the accumulators of a head


@pytest.fixture(scope="module")
def pool() -> K.Pool:
    return K.Pool(1)


def random_rows(seed: int, tokens: int, n_head: int) -> F32:
    """Rows of q heads and the latent K, which is V."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, (n_head + 1) * DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def scene(pool: K.Pool) -> tuple[Links, Step]:
    """Decode at 2,200, a chunk that crosses a super-page, and an entry of the owner's alone."""
    timelines: list[Timeline] = []
    rows: list[F32] = []
    for seed, (history, new) in enumerate([(2200, 1), (1530, 12), (10, 3)]):
        n_pages = -(-(history + new) // K.PAGE_TOKENS)
        shape = K.PageShape(2, 1, DIM, V_FIRST)
        one = Timeline(shape, 1, n_pages, layer=1)  # one query head: the others have no history
        for start in range(0, history, 512):
            n = min(512, history - start)
            Step(pool, [one], [random_rows(seed + start, n, 1)])
        one.n_head = N_HEAD
        timelines.append(one)
        rows.append(random_rows(seed, new, N_HEAD))
    return Links(pool, timelines, N_HEAD), Step(pool, timelines, rows)


def values_of(rows: F32) -> F32:
    """The values that mean something."""
    return rows.reshape(len(rows), N_HEAD, DIM)[:, :, V_FIRST:]


@pytest.mark.parametrize(
    "routes",
    [
        ([("a", 2)], [("b", 1)], []),
        ([("a", 1), ("b", 1)], [("a", 1)], []),
    ],
)
@pytest.mark.parametrize("unit_heads", [1, 12, 1000])
@pytest.mark.parametrize("way_units", [1, 3, 1000])
def test_units_of_some_heads_give_the_bits_of_all_at_once(
    scene: tuple[Links, Step],
    routes: Sequence[Route],
    unit_heads: int,
    way_units: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """unit_heads: those of 12 tokens that a unit has room for."""
    links, one = scene
    unit_bytes = 12 * unit_heads * ROW_BYTES
    monkeypatch.setattr(routed, "UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(routed, "WAY_BYTES", 2 * way_units * unit_bytes)
    routed_step(links, one, routes)
    links.sent.clear()
    for window in (0, 700):
        out = one.rows()
        out.view(one.total)[:] = np.nan
        links.routed.attend(one.queries, 1, out, window, None)
        found, expected = values_of(out.view(one.total)), values_of(one.attend(window))
        np.testing.assert_array_equal(bits(found), bits(expected), f"window {window}")
    assert links.routed.end() == []
    assert links.sent["Query"] >= (2 * N_HEAD // unit_heads if unit_heads < N_HEAD else 3)


def test_no_more_is_under_way_than_there_is_room_for(
    scene: tuple[Links, Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are sent while less than WAY_BYTES are, in order, and one that is larger alone."""
    links, one = scene
    monkeypatch.setattr(routed, "UNIT_BYTES", 12 * ROW_BYTES)
    token_bytes = ROW_BYTES + DIM + DIM // 8  # of one head
    under_way, seen, send = dict[int, int](), list[int](), links._send

    def count(sender: str, to: str, message: DataMessage, data: Payload) -> bool:
        if isinstance(message, Query) and sender == "owner":
            n_tokens = sum(entry.n_tokens for entry in message.entries)
            under_way[message.unit] = n_tokens * message.n_heads * token_bytes
            seen.append(sum(under_way.values()))
        elif isinstance(message, Accumulators) and to == "owner":
            del under_way[message.unit]
        return send(sender, to, message, data)

    monkeypatch.setattr(links, "_send", count)
    ten, one_unit = 10 * 12 * token_bytes, 12 * token_bytes
    for room, largest in ((ten, ten), (1, one_unit)):
        monkeypatch.setattr(routed, "WAY_BYTES", room)
        routed_step(links, one, ([("a", 1), ("b", 1)], [("a", 1)], []))
        seen.clear()
        links.routed.attend(one.queries, 1, one.rows(), 0, None)
        assert links.routed.end() == []
        assert len(seen) > N_HEAD
        assert max(seen) <= largest


@pytest.mark.parametrize(
    ("n_head", "n_kv", "most", "expected"),
    [
        (128, 1, 1000, [(0, 128, 0, 1)]),
        (128, 1, 127, [(0, 64, 0, 1), (64, 64, 0, 1)]),
        (10, 1, 4, [(0, 4, 0, 1), (4, 4, 0, 1), (8, 2, 0, 1)]),
        (12, 3, 8, [(0, 8, 0, 2), (8, 4, 2, 1)]),
        (12, 3, 7, [(0, 4, 0, 1), (4, 4, 1, 1), (8, 4, 2, 1)]),
        (6, 2, 2, [(0, 2, 0, 1), (2, 1, 0, 1), (3, 2, 1, 1), (5, 1, 1, 1)]),
        (4, 2, 0, [(0, 1, 0, 1), (1, 1, 0, 1), (2, 1, 1, 1), (3, 1, 1, 1)]),
    ],
)
def test_heads_are_cut_by_kv_heads_and_within_one(
    pool: K.Pool, n_head: int, n_kv: int, most: int, expected: list[tuple[int, int, int, int]]
) -> None:
    """most: heads that a part has room for."""
    attention = SpanAttention(pool, K.PageShape(1, n_kv, 64, 32), n_head, 16)
    parts = attention.cut(5, most * 5 * 4 * (32 + 2))
    assert [(p.first, p.count, p.first_kv, p.n_kv) for p in parts] == expected
