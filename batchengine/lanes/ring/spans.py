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
    """Query heads [first, first + count) of a model, and the KV heads that they read: all query
    heads of these, or some of the only one's."""

    first: int
    count: int
    first_kv: int
    n_kv: int


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
        self.v_first = layer.v_first
        if n_head % self.n_kv_head:
            raise ValueError(f"{n_head} query heads of {self.n_kv_head} KV heads")
        self.pool = pool
        self.shape = shape
        self.tokens_max = tokens_max
        self.n_head = n_head
        self._group = n_head // self.n_kv_head
        self._queries: dict[int, kernels.Queries] = {}
        self._partials: dict[int, list[kernels.Partials]] = {}

    def heads(self, first: int, count: int) -> Heads:
        """The query heads [first, first + count). Raises ValueError unless they are all those of
        some KV heads, or some of one's."""
        group = self._group
        n_kv, left = divmod(count, group)
        if first % group == 0 and left == 0:
            is_whole = 0 <= first < self.n_head and 0 < count <= self.n_head - first
        else:
            is_whole, n_kv = 0 < count <= group - first % group and 0 <= first < self.n_head, 1
        if not is_whole:
            raise ValueError(f"{count} heads from {first}, {group} to a KV head")
        return Heads(first, count, first // group, n_kv)

    def cut(self, n_tokens: int, most_bytes: int) -> list[Heads]:
        """All heads, in parts whose accumulators of so many tokens take at most `most_bytes`, or
        that are one head. A KV head whose query heads are too many alone is cut into equal parts.
        """
        group, n_head = self._group, self.n_head
        most = max(1, most_bytes // (self.row_bytes(self.heads(0, 1)) * n_tokens))
        if most >= group:
            size = most // group * group
            return [self.heads(at, min(size, n_head - at)) for at in range(0, n_head, size)]
        size = -(-group // -(-group // most))
        return [
            self.heads(of_kv + at, min(size, group - at))
            for of_kv in range(0, n_head, group)
            for at in range(0, group, size)
        ]

    def row_bytes(self, heads: Heads) -> int:
        """Bytes of the accumulators of one token and super-page."""
        return 4 * (self.head_dim - self.v_first + 2) * heads.count

    def query_bytes(self, heads: Heads) -> int:
        """Bytes of the queries of one token."""
        return heads.count * (self.head_dim + self.head_dim // 8)

    def slices(self, spans: Spans, heads: Heads) -> list[I32Array]:
        """The spans in slices to attend to one after the other."""
        return spans.slices(self.row_bytes(heads))

    def load(self, queries: Payload, heads: Heads) -> kernels.Queries:
        """Queries from bytes, in a buffer that the next call for as many heads overwrites.

        Raises ValueError.
        """
        n_tokens = len(queries) // self.query_bytes(heads)
        buffer = self._queries.get(heads.count)
        if buffer is None or buffer.tokens_max < n_tokens:
            self._queries.pop(heads.count, None)
            _make_room(self._queries)
            n_tokens = 1 << max(0, n_tokens - 1).bit_length()
            buffer = self.queries(min(self.tokens_max, n_tokens), heads)
            self._queries[heads.count] = buffer
        buffer.load_bytes(queries, heads.n_kv)
        return buffer

    def queries(self, tokens_max: int, heads: Heads) -> kernels.Queries:
        """A buffer for queries of these heads."""
        return kernels.Queries(tokens_max, heads.count, self.head_dim)

    def take(self, heads: Heads) -> kernels.Partials:
        """Empty partials for these heads; `put` them back."""
        free = self._partials.get(heads.count)
        if free:
            return free.pop()
        return kernels.Partials(self.tokens_max, heads.count, self.head_dim, self.v_first)

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
            heads=(heads.first_kv, heads.n_kv),
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
