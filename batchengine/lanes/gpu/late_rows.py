"""Rows of open pages that are on the host, and not in the arena yet.

A page has the bytes of 16 neighbouring tokens, a tile, side by side, so that one row alone touches
as many cache lines as 16: storing a row of each of 64 sessions of an 8B model takes one core 11 ms,
and 1.5 if whole tiles are stored. Rows of decodes of many sessions wait here for that. Each step
stores its share of the whole tiles, so that sessions in step with each other do not make one step
long: up to 31 rows of a session wait. Those that wait when the worker dies have no record, and are
computed again, as those of its last step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.lanes.step_input import U64Array

TILE_TOKENS = 16  # tokens whose bytes lie side by side in a page

# Slots, rows, tokens, digests.
Record = Callable[[NDArray[np.intp], NDArray[np.intp], NDArray[np.uint32], U64Array], None]


@dataclass(slots=True)
class _Tile:
    """Rows of one tile of a slot, from row `first` of the page on."""

    first: int
    count: int
    rows: kernels.KvRows
    tokens: NDArray[np.uint32]
    digests: U64Array

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def is_whole(self) -> bool:
        """Whether no further row of the tile will come."""
        return self.end % TILE_TOKENS == 0


class LateRows:
    """Rows that wait, by slot, in tiles that are stored and recorded as a whole."""

    def __init__(
        self,
        pool: kernels.Pool,
        shape: kernels.PageShape,
        address: Callable[[int], int],
        record: Record,
    ) -> None:
        """`address` is that of a slot; `record` is called for rows that are in place."""
        self._pool, self._shape = pool, shape
        self._address, self._record = address, record
        self._waiting: dict[int, deque[_Tile]] = {}
        self._whole: deque[int] = deque()  # slots by each tile that became whole, and may be stored
        self._free: list[_Tile] = []
        self._batch = kernels.Batch(TILE_TOKENS, 1, 1)

    def __len__(self) -> int:
        return sum([tile.count for tiles in self._waiting.values() for tile in tiles])

    def add(
        self,
        slots: Sequence[int],
        rows: Sequence[int],
        bytes_of: NDArray[np.uint8],
        tokens: Sequence[int],
        digests: U64Array,
    ) -> None:
        """Keep a row of each of these slots, and store a sixteenth as many tiles; a row that is
        there already gives way, with those behind it. bytes_of: (rows, bytes of a row), copied."""
        for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            tile = self._tile_of(slot, row)
            at = row - tile.first
            tile.rows.view(TILE_TOKENS)[at] = bytes_of[i]
            tile.tokens[at], tile.digests[at] = tokens[i], digests[i]
            tile.count = at + 1
            if tile.is_whole:
                self._whole.append(slot)
        left = -(-len(slots) // TILE_TOKENS)
        while left and self._whole:
            slot = self._whole.popleft()
            if (tiles := self._waiting.get(slot)) and tiles[0].is_whole:
                self._store(slot, tiles.popleft())
                left -= 1

    def flush(self, slots: Iterable[int] | None = None) -> None:
        """Store and record what waits for these slots, or for all."""
        for slot in list(self._waiting) if slots is None else slots:
            for tile in self._waiting.pop(slot, ()):
                self._store(slot, tile)
        if not self._waiting:
            self._whole.clear()

    def flush_one(self) -> bool:
        """Store and record what waits for one slot; whether more waits."""
        self.flush(list(self._waiting)[:1])
        return bool(self._waiting)

    def drop(self, slots: Iterable[int]) -> None:
        """Forget what waits for these slots, which are overwritten."""
        for slot in slots:
            self._free += self._waiting.pop(slot, ())

    def _tile_of(self, slot: int, row: int) -> _Tile:
        """The tile that takes a row as its next one."""
        tiles = self._waiting.get(slot)
        if tiles and not tiles[-1].first <= row <= tiles[-1].end:
            self.flush((slot,))  # rows lack before this one, or many are computed again
        tiles = self._waiting.setdefault(slot, deque())
        if not tiles or (row == tiles[-1].end and tiles[-1].is_whole):
            tiles.append(self._empty(row))
        return tiles[-1]

    def _store(self, slot: int, tile: _Tile) -> None:
        n, address = tile.count, np.array([self._address(slot)], np.uint64)
        self._batch.set(np.zeros(n, np.int32), np.array([[n, tile.first, 1]], np.int32), address)
        kernels.store_rows(self._pool, tile.rows, self._batch)
        rows = np.arange(tile.first, tile.end)
        self._record(np.full(n, slot), rows, tile.tokens[:n], tile.digests[:n])
        self._free.append(tile)

    def _empty(self, first: int) -> _Tile:
        if not self._free:
            rows = kernels.KvRows(TILE_TOKENS, self._shape)
            tokens, digests = np.zeros(TILE_TOKENS, np.uint32), np.zeros(TILE_TOKENS, np.uint64)
            self._free.append(_Tile(0, 0, rows, tokens, digests))
        tile = self._free.pop()
        tile.first, tile.count = first, 0
        return tile
