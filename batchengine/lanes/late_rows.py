"""Rows of open pages that are on the host, and not in the arena yet.

A page has the bytes of 16 neighbouring tokens side by side, so that one row alone touches as many
cache lines as 16: storing a row of each of 64 sessions of an 8B model takes one core 11 ms, and 1.5
if 16 of a session are stored together. Rows of decodes of many sessions wait here for that. Those
that wait when the worker ends have no record, and are computed again, as those of its last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.lanes.step_input import U64Array

TOGETHER = 16  # tokens whose bytes lie side by side in a page

Record = Callable[
    [int, int, NDArray[np.uint32], U64Array], None
]  # slot, first row, tokens, digests


@dataclass(slots=True)
class _Waiting:
    """Rows of one slot, from row `first` on."""

    first: int
    count: int
    rows: kernels.KvRows
    tokens: NDArray[np.uint32]
    digests: U64Array


class LateRows:
    """Up to 16 rows of each slot, which are stored and recorded together."""

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
        self._waiting: dict[int, _Waiting] = {}
        self._free: list[_Waiting] = []
        self._batch = kernels.Batch(TOGETHER, 1, 1)

    def __len__(self) -> int:
        return sum([waiting.count for waiting in self._waiting.values()])

    def add(
        self,
        slots: Sequence[int],
        rows: Sequence[int],
        bytes_of: NDArray[np.uint8],
        tokens: Sequence[int],
        digests: U64Array,
    ) -> None:
        """Keep a row of each of these slots; a row that is there already gives way, with those
        behind it. bytes_of: (rows, bytes of a row), copied."""
        full: list[int] = []
        for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            waiting = self._waiting.get(slot)
            if waiting is not None and not 0 <= row - waiting.first <= waiting.count:
                self.flush((slot,))
                waiting = None
            if waiting is None:
                waiting = self._waiting[slot] = self._empty(row)
            at = row - waiting.first
            waiting.rows.view(TOGETHER)[at] = bytes_of[i]
            waiting.tokens[at], waiting.digests[at] = tokens[i], digests[i]
            waiting.count = at + 1
            if row % TOGETHER == TOGETHER - 1:
                full.append(slot)
        self.flush(full)

    def flush(self, slots: Iterable[int] | None = None) -> None:
        """Store and record what waits for these slots, or for all."""
        for slot in list(self._waiting) if slots is None else slots:
            waiting = self._waiting.pop(slot, None)
            if waiting is None:
                continue
            n = waiting.count
            entry = np.array([[n, waiting.first, 1]], np.int32)
            self._batch.set(
                np.zeros(n, np.int32), entry, np.array([self._address(slot)], np.uint64)
            )
            kernels.store_rows(self._pool, waiting.rows, self._batch)
            self._record(slot, waiting.first, waiting.tokens[:n], waiting.digests[:n])
            self._free.append(waiting)

    def drop(self, slots: Iterable[int]) -> None:
        """Forget what waits for these slots, which are overwritten."""
        self._free += [
            waiting for slot in slots if (waiting := self._waiting.pop(slot, None)) is not None
        ]

    def _empty(self, first: int) -> _Waiting:
        if not self._free:
            rows = kernels.KvRows(TOGETHER, self._shape)
            tokens, digests = np.zeros(TOGETHER, np.uint32), np.zeros(TOGETHER, np.uint64)
            self._free.append(_Waiting(0, 0, rows, tokens, digests))
        waiting = self._free.pop()
        waiting.first, waiting.count = first, 0
        return waiting
