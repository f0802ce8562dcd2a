"""Attention of some tokens to spans of super-pages, in slices whose accumulators fit a bound.

What lies before a span is folded first, so the accumulators of a span that does not begin at
super-page 0 stay apart, one per super-page, until those before it are known. One slice of them may
be computed early; the others follow when the fold has come that far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import kernels
from batchengine.lanes.step_input import I32Array, U64Array
from batchengine.wire.frames import Payload

SLICE_BYTES = 8 << 20  # accumulators of one slice
FREE_MAX = 8  # buffers kept for the next use, per number of heads
COUNTS_MAX = 4  # numbers of heads for which buffers are kept


@dataclass(frozen=True, slots=True)
class Heads:
    """KV heads [first, first + count) of a model, and the query heads that read them."""

    first: int
    count: int
    first_query: int
    n_query: int


class Spans:
    """Entries of a batch and the super-pages of each to attend to.

    entries: (n_tokens, start, first super-page, count) of each; addresses: per entry those of all
    its pages, 0 for a page outside the span. At least one super-page of each, and all of the
    entries begin at super-page 0, or none does.
    """

    def __init__(
        self, entries: Sequence[tuple[int, int, int, int]], addresses: Sequence[U64Array]
    ) -> None:
        self.n_tokens = sum(entry[0] for entry in entries)
        self.starts = [entry[1] for entry in entries]
        self.first = [entry[2] for entry in entries]
        self.is_first = self.first[0] == 0
        self._slices: dict[int, list[I32Array]] = {}
        self._counts = [entry[3] for entry in entries]
        # The spans, and all super-pages before them, whose pages a window must hide.
        ends = [(e, 0, first + n) for e, (_, _, first, n) in enumerate(entries)]
        self.with_hidden: I32Array = np.array(ends, np.int32)
        shape = np.array([(n, start, 0) for n, start, _, _ in entries], np.int32)
        shape[:, 2] = [len(pages) for pages in addresses]
        pages = np.concatenate(addresses)
        self.batch = kernels.Batch(self.n_tokens, len(entries), len(pages))
        self.batch.set(np.zeros(self.n_tokens, np.int32), shape, pages, absent_pages=True)

    def hides(self, window: int) -> bool:
        """Whether no token sees anything before the spans."""
        return self.is_first or all(
            0 < window <= start - first * kernels.SUPERPAGE_TOKENS + 1
            for start, first in zip(self.starts, self.first, strict=True)
        )

    def slices(self, row_bytes: int) -> list[I32Array]:
        """The spans in slices of at most SLICE_BYTES; row_bytes: of the accumulators of a token."""
        found = self._slices.get(row_bytes)
        if found is None:
            found = self._slices[row_bytes] = self._cut(row_bytes)
        return found

    def _cut(self, row_bytes: int) -> list[I32Array]:
        most = max(self._counts)
        size = most
        if not self.is_first:
            size = max(1, SLICE_BYTES // (row_bytes * self.n_tokens))
        found: list[I32Array] = []
        for at in range(0, most, size):
            rows = [
                (entry, first + at, min(size, count - at))
                for entry, (first, count) in enumerate(zip(self.first, self._counts, strict=True))
                if count > at
            ]
            found.append(np.array(rows, np.int32))
        return found


class SpanAttention:
    """Attends to spans on one pool; owns the buffers for that. Layers have the heads of the first
    one: `kernels` raise ValueError for others."""

    def __init__(
        self, pool: kernels.Pool, shape: kernels.PageShape, n_head: int, tokens_max: int
    ) -> None:
        layer = shape.layer(0)
        self.n_kv_head, self.head_dim = layer.n_kv_head, layer.head_dim
        if n_head % self.n_kv_head:
            raise ValueError(f"{n_head} query heads of {self.n_kv_head} KV heads")
        self.pool = pool
        self.shape = shape
        self.tokens_max = tokens_max
        self.group = n_head // self.n_kv_head
        self._queries: dict[int, kernels.Queries] = {}
        self._partials: dict[int, list[kernels.Partials]] = {}

    def heads(self, first: int, count: int) -> Heads:
        """The KV heads [first, first + count)."""
        return Heads(first, count, first * self.group, count * self.group)

    def row_bytes(self, heads: Heads) -> int:
        """Bytes of the accumulators of one token and super-page."""
        return 4 * (self.head_dim + 2) * heads.n_query

    def query_bytes(self, heads: Heads) -> int:
        """Bytes of the queries of one token."""
        return heads.n_query * (self.head_dim + self.head_dim // 8)

    def slices(self, spans: Spans, heads: Heads) -> list[I32Array]:
        """The spans in slices to attend to one after the other."""
        return spans.slices(self.row_bytes(heads))

    def load(self, queries: Payload, heads: Heads) -> kernels.Queries:
        """Queries from bytes, in a buffer that the next call for as many heads overwrites.

        Raises ValueError.
        """
        buffer = self._queries.get(heads.count)
        if buffer is None:
            _make_room(self._queries)
            buffer = self._queries[heads.count] = kernels.Queries(
                self.tokens_max, heads.n_query, self.head_dim
            )
        buffer.load_bytes(queries, heads.count)
        return buffer

    def take(self, heads: Heads) -> kernels.Partials:
        """Empty partials for these heads; `put` them back."""
        free = self._partials.get(heads.count)
        if free:
            return free.pop()
        return kernels.Partials(self.tokens_max, heads.n_query, self.head_dim)

    def put(self, partials: kernels.Partials, heads: Heads) -> None:
        """Keep a buffer for the next `take`."""
        free = self._partials.get(heads.count)
        if free is None:
            _make_room(self._partials)
            free = self._partials[heads.count] = []
        if len(free) < FREE_MAX:
            free.append(partials)

    def attend(
        self,
        queries: kernels.Queries,
        spans: Spans,
        span: I32Array,
        layer: int,
        heads: Heads,
        window: int,
    ) -> kernels.Partials:
        """Partials of one slice; `put` them back."""
        out = self.take(heads)
        kernels.attend_partials(
            self.pool,
            queries,
            spans.batch,
            self.shape,
            layer,
            span,
            out,
            heads=(heads.first, heads.count),
            window=window,
        )
        return out

    def take_before(self, data: Payload, spans: Spans, heads: Heads) -> kernels.Partials:
        """Partials of everything before the spans, from bytes; ValueError unless they are that."""
        before = self.take(heads)
        before.load_bytes(data)
        if before.spans != [(0, first) for first in spans.first]:
            raise ValueError(f"accumulators of super-pages {before.spans}")
        return before


def _make_room(buffers: dict[int, Any]) -> None:
    """Keep buffers for a few numbers of heads only: a peer may ask for any."""
    if len(buffers) >= COUNTS_MAX:
        del buffers[next(iter(buffers))]
