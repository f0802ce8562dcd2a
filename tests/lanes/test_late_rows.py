"""Rows that are stored by 16: in shares, in order, with the bytes and records of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

import kernels
from batchengine.lanes.gpu.late_rows import TILE_TOKENS, LateRows
from bench.models.tensors import aligned

N_LAYER, N_KV_HEAD, HEAD_DIM = 2, 1, 32
SLOTS = 40


class Scene:
    """Pages, what is recorded of them, and the same pages with every row stored at once."""

    def __init__(self) -> None:
        self.pool = kernels.Pool(1)
        self.shape = kernels.PageShape(N_LAYER, N_KV_HEAD, HEAD_DIM)
        self.pages, self.wanted = (
            [aligned(self.shape.payload_bytes) for _ in range(SLOTS)] for _ in range(2)
        )
        self.records: list[tuple[int, list[int], list[int]]] = []  # slot, rows, tokens
        self.late = LateRows(self.pool, self.shape, self._address, self._record)
        self._rng = np.random.default_rng(2)

    def _address(self, slot: int) -> int:
        return kernels.address_of(self.pages[slot])

    def _record(self, slots: Any, rows: Any, tokens: Any, digests: Any) -> None:
        (slot,) = set(slots.tolist())
        assert digests.tolist() == (tokens * 3).tolist()
        self.records.append((slot, rows.tolist(), tokens.tolist()))

    def add(self, slots: list[int], row: int, token: int) -> int:
        """A row of each slot; returns how many tiles were stored."""
        rows, before = kernels.KvRows(len(slots), self.shape), len(self.records)
        view = rows.view(len(slots))
        view[:] = self._rng.integers(0, 256, view.shape)
        batch = kernels.Batch(len(slots), len(slots), len(slots))
        table = np.array([[1, row, 1]] * len(slots), np.int32)
        pages = np.array([kernels.address_of(self.wanted[slot]) for slot in slots], np.uint64)
        batch.set(np.zeros(len(slots), np.int32), table, pages)
        kernels.store_rows(self.pool, rows, batch)
        digests = np.full(len(slots), 3 * token, np.uint64)
        self.late.add(slots, [row] * len(slots), view, [token] * len(slots), digests)
        view[:] = 0  # they were copied
        return len(self.records) - before

    def is_stored(self) -> bool:
        pairs = zip(self.pages, self.wanted, strict=True)
        return all(page.tobytes() == wanted.tobytes() for page, wanted in pairs)


def test_each_step_stores_its_share_of_whole_tiles() -> None:
    scene, slots = Scene(), list(range(SLOTS))
    share = -(-SLOTS // TILE_TOKENS)
    counts = [scene.add(slots, 5 + i, i) for i in range(80)]
    assert counts[:10] == [0] * 10  # the first tile begins at row 5
    assert max(counts) == share
    assert sum(counts[10:26]) == SLOTS  # before the next ones are whole
    assert all(
        scene_rows == list(range(scene_rows[0], scene_rows[-1] + 1))
        and scene_rows[0] // TILE_TOKENS == scene_rows[-1] // TILE_TOKENS
        for _, scene_rows, _ in scene.records
    )
    assert len(scene.late) <= SLOTS * (2 * TILE_TOKENS - 1)
    while scene.late.flush_one():
        pass
    assert scene.is_stored()
    for slot in slots:
        rows = [row for of, some, _ in scene.records if of == slot for row in some]
        assert rows == list(range(5, 85))
        tokens = [token for of, _, some in scene.records if of == slot for token in some]
        assert tokens == list(range(80))


def test_rows_that_were_flushed_take_no_share_of_those_that_wait() -> None:
    scene, others, slots = Scene(), list(range(16)), list(range(16, 32))
    for tile in range(6):  # the rows between are stored at once, by small steps
        scene.add([*others, *slots], TILE_TOKENS * (tile + 1) - 1, tile)
        scene.late.flush(others)
    scene.late.drop(others)
    scene.late.flush(slots[:8])
    scene.records.clear()
    for row in range(96, 200):
        scene.add(slots, row, row)
        stored = dict.fromkeys(slots, 0)
        for slot, rows, _ in scene.records:
            stored[slot] += len(rows)
        assert row - 95 - min(stored.values()) <= 2 * TILE_TOKENS - 1
    scene.late.flush()
    assert scene.is_stored()


def test_a_row_that_is_computed_again_gives_way() -> None:
    scene = Scene()
    for row, token in ((14, 1), (15, 2), (16, 3), (16, 4), (17, 5), (15, 6), (16, 7), (40, 8)):
        scene.add([0, 1], row, token)
    scene.late.drop([1])
    scene.late.flush([0, 1])
    assert len(scene.late) == 0
    assert scene.pages[0].tobytes() == scene.wanted[0].tobytes()
    last = {
        row: token
        for slot, rows, tokens in scene.records
        if slot == 0
        for row, token in zip(rows, tokens, strict=True)
    }
    assert last == {14: 1, 15: 6, 16: 7, 17: 5, 40: 8}
    assert (1, [40], [8]) not in scene.records


def test_native_rows_are_stored_from_any_one_on() -> None:
    pool, rng = kernels.Pool(1), np.random.default_rng(3)
    shape = kernels.PageShape(N_LAYER, N_KV_HEAD, HEAD_DIM)
    rows = kernels.KvRows(9, shape)
    rows.view(9)[:] = rng.integers(0, 256, rows.view(9).shape)
    got, wanted = aligned(shape.payload_bytes), aligned(shape.payload_bytes)
    batch = kernels.Batch(9, 1, 1)
    for page, first, n in ((wanted, 0, 9), (got, 6, 3), (got, 0, 6)):
        table = np.array([[n, 20 + first, 1]], np.int32)
        batch.set(np.zeros(n, np.int32), table, np.array([kernels.address_of(page)], np.uint64))
        kernels.store_rows(pool, rows, batch, first)
    assert got.tobytes() == wanted.tobytes()
