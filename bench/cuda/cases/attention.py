"""Cases of attention: K, V and queries placed, attended to whole and by spans."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.arrays import Arrays, DeviceArray
from bench.cuda.cases.values import (
    F32,
    U64,
    Quantised,
    compare,
    one_nan,
    rows_of,
    ties,
)
from bench.models.tensors import aligned, hadamard
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import LINE_BYTES
from kv_store.layout import KvHeads

# Of each kernel: rows of a tile, and accumulators of a super-page. Wide: of more than 256 dims.
ATTEND = {"attend": (16, 1), "attend_many": (32, 1), "attend_pages": (16, 4)}
ATTEND_WIDE = {"attend_wide": (16, 1), "attend_pages_wide": (16, 4)}
ATTEND_LATENT = {"attend_latent": (16, 1), "attend_pages_latent": (16, 4)}
ATTEND_THREADS = 256
LOG2_E = 1.4426950408889634
BAD_HALVES = 0x7E00, 0x7C00, 0xFC00  # NaN and infinities
WINDOWS = 1, 16, 100, 128, 255, 256, 257, 1024, 5000
Spans = list[tuple[int, int]]  # of each entry: its first super-page, and how many


def attention_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """K, V and queries of a random batch placed, then attention over all pages and over spans."""
    head_dim = 32 * int(rng.integers(1, 9))
    n_kv = int(rng.integers(1, 4))
    n_head = n_kv * int(rng.integers(1, 9))
    entries = [
        (int(rng.integers(1, 12)), int(rng.choice([0, 3, 250, 511, 1020, 2040])))
        for _ in range(int(rng.integers(1, 4)))
    ]
    Attention(pool, rng, n_head, n_kv, head_dim, entries).compare(gpu, rng)


def attention_small_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Small heads; at times a whole tile of 16 or 17 rows."""
    head_dim, n_kv = 32 * int(rng.integers(1, 3)), int(rng.integers(1, 3))
    starts = rng.choice([0, 3, 250, 511, 1020, 1023, 2040], 2)
    n = int(rng.choice([1, 3, 16, 17, 33]))
    entries = [(n, int(starts[0])), (int(rng.integers(1, 6)), int(starts[1]))]
    group = int(rng.integers(1, 5)) if n <= 3 else 1
    Attention(pool, rng, n_kv * group, n_kv, head_dim, entries).compare(gpu, rng)


def attention_wide_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Heads of up to 576 dims, at times with a window and with a scale of 1; the rows of a tile are
    of one token to sixteen."""
    head_dim = int(rng.choice([512, 576, 288, 320, 384]))
    group, n_kv = int(rng.integers(1, 10)), int(rng.integers(1, 3))
    window = int(rng.choice([0, 0, *WINDOWS]))
    n = int(rng.choice([1, 1, 3, 33 // group + 1]))
    entries = [(n, int(rng.choice([0, 255, 511, 1020, 1100]))), (1, int(rng.choice([0, 300])))]
    Attention(pool, rng, n_kv * group, n_kv, head_dim, entries, window).compare(gpu, rng)


def attention_spans_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Spans of several super-pages that do not begin at the first one, beside shorter ones."""
    starts = rng.choice([1023, 2100, 3080], 2)
    entries = [(int(rng.integers(1, 6)), int(start)) for start in starts]
    Attention(pool, rng, 2, 1, 32, entries).compare(gpu, rng)


def attention_long_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """More super-pages than a fold loads at once."""
    Attention(pool, rng, 2, 1, 32, [(int(rng.integers(1, 3)), 9300)]).compare(gpu, rng)


def attention_window_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """A window that begins anywhere in pages and super-pages; rows of a tile that begin to see in
    different ones."""
    head_dim, group = int(rng.choice([64, 96, 128, 256])), int(rng.choice([1, 3, 8]))
    window = int(rng.choice(WINDOWS))
    starts = (0, 255, window, 900 + window, 1023 + window, 2047 - 3, 2300)
    entries = [
        (int(rng.choice([1, 1, 5, 33 // group + 1])), int(start)) for start in rng.choice(starts, 2)
    ]
    Attention(pool, rng, group, 1, head_dim, entries, window).compare(gpu, rng)


def attention_window_spans_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Spans of which a window hides some super-pages from some rows, or all from all."""
    window = int(rng.choice([1, 128, 900, 1024, 1300, 2500]))
    starts = rng.choice([1020, 1020 + window, 2047, 3500], 2)
    entries = [(int(rng.integers(1, 18)), int(start)) for start in starts]
    Attention(pool, rng, 2, 1, 32, entries, window).compare(gpu, rng)


@dataclass(frozen=True, slots=True)
class Attended:
    """Tiles of a step and their accumulators in memory of a GPU (attention.cu)."""

    entry_of: list[int]  # of each tile
    tiles: DeviceArray
    m: DeviceArray
    denominators: DeviceArray
    o: DeviceArray

    @property
    def addresses(self) -> list[int]:
        return [a.address for a in (self.tiles, self.m, self.denominators, self.o)]


def heads_of(
    page: NDArray[np.uint8], shape: kernels.PageShape
) -> list[tuple[KvHeads, NDArray[np.uint8]]]:
    """The layers of a page, and the heads of each, which are views."""
    found = []
    for index in range(shape.n_layer):
        at = shape.layer(index)
        memory = page[at.page_offset : at.page_offset + at.page_bytes]
        of = KvHeads(at.n_kv_head, at.head_dim, at.v_first)
        found.append((of, memory.reshape(at.n_kv_head, at.head_bytes)))
    return found


def random_page(shape: kernels.PageShape, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Any int8 values with small scales; at times V of one sign, and K that weighs all alike."""
    page = rng.integers(0, 256, shape.payload_bytes, np.uint8)
    has_large_sums, k_largest = bool(rng.integers(2)), rng.choice([0.02, 0.002, 0.0])
    for of, heads in heads_of(page, shape):
        v_scales = of.head_bytes - 512
        if has_large_sums:
            v = heads[:, v_scales - of.v_bytes : v_scales] if of.v_bytes else heads[:, : of.k_bytes]
            v &= 127
            v |= 64
        k, v = (of.k_bytes, of.k_scale_bytes // 2, k_largest), (v_scales, 256, 0.02)
        for start, count, largest in (k, v):
            scales = (rng.random((len(heads), count)) * largest).astype(np.float16)
            heads[:, start : start + 2 * count] = scales.view(np.uint8)
    return page


def invalidate(
    page: NDArray[np.uint8], shape: kernels.PageShape, tokens: slice, rng: np.random.Generator
) -> None:
    """Give some tokens of a page scales that are not finite."""
    bad = rng.choice(BAD_HALVES)
    for of, heads in heads_of(page, shape):
        groups, k_at, v_at = of.k_scales, of.k_bytes, of.head_bytes - 512
        k_end, v_end = k_at + of.k_scale_bytes, v_at + 512
        v = heads[:, v_at:v_end].copy().view(np.uint16)
        v[:, tokens] = bad
        heads[:, v_at:v_end] = v.view(np.uint8)
        k = heads[:, k_at:k_end].copy().view(np.uint16).reshape(len(heads), 16, groups, 16)
        by_token = k.transpose(0, 1, 3, 2).reshape(len(heads), 256, groups)
        by_token[:, tokens] = BAD_HALVES[0]
        k = by_token.reshape(len(heads), 16, 16, groups).transpose(0, 1, 3, 2)
        heads[:, k_at:k_end] = np.ascontiguousarray(k).view(np.uint8).reshape(len(heads), -1)


class Attention:
    """One step of one attention layer, computed on the CPU."""

    LAYER, EPS = 1, 1e-6  # the layer behind one of other heads

    def __init__(
        self,
        pool: kernels.Pool,
        rng: np.random.Generator,
        n_head: int,
        n_kv: int,
        head_dim: int,
        entries: list[tuple[int, int]],
        window: int = 0,
        v_first: int = -1,
    ) -> None:
        """v_first: of a latent layer; 0: it is none; -1: it is one at times."""
        self.n_head, self.n_kv, self.head_dim, self.entries = n_head, n_kv, head_dim, entries
        self.window = window
        self.sinks = None
        if rng.integers(2):
            self.sinks = kernels.Sinks((6 * rng.standard_normal(n_head)).astype(np.float32).data)
        if v_first < 0:
            is_latent = head_dim > 32 and rng.random() < 0.2
            v_first = 32 * int(rng.integers(1, head_dim // 32)) if is_latent else 0
        self.v_first = v_first
        self.kernels = ATTEND_LATENT if v_first else ATTEND_WIDE if head_dim > 256 else ATTEND
        other = int(rng.integers(1, 4)), 32 * int(rng.integers(1, 6)), 0
        self.shape = shape = kernels.PageShape([other, (n_kv, head_dim, v_first)])
        self.layer = shape.layer(self.LAYER)
        self.has_kv = rng.random() < 0.8  # else another layer has put K and V there
        self.style = str(rng.choice(["norm", "neox"]))
        n_rot = head_dim if self.style == "norm" else 2 * int(rng.integers(1, head_dim // 2 + 1))
        scaling = (0.5, int(rng.integers(1, 300))) if rng.integers(2) else (0.0, 1)
        self.rope = kernels.RopeTable(
            self.style, head_dim, n_rot, 10000.0, None, 1.0, 1.0, *scaling
        )
        self.scale = 1 / math.sqrt(head_dim) if rng.integers(4) else 1.0
        self.tokens = sum(n for n, _ in entries)
        n_of_kv = (1 if self.v_first else 2) * n_kv if self.has_kv else 0
        self.n_rows = n_head + n_of_kv  # heads of qkv
        self.width = self.n_rows * head_dim
        self.qkv = self._some_rows(rng)
        self.norms = [
            rng.standard_normal(head_dim).astype(np.float32) if rng.integers(2) else None
            for _ in range(3)
        ]
        if self.v_first:
            self.norms[2] = None
        self.has_rope = rng.random() < 0.75
        self.norms_rotated = bool(rng.integers(2))
        if rng.random() < 0.4:
            self.norms, self.has_rope = [None] * 3, False
            self._put_ties(rng)
        self.n_pages = [-(-(start + n) // kernels.PAGE_TOKENS) for n, start in entries]
        self.before = [random_page(self.shape, rng) for _ in range(sum(self.n_pages))]
        for end, n_pages, (n, start) in zip(
            np.cumsum(self.n_pages), self.n_pages, entries, strict=True
        ):
            if rng.integers(2):
                invalidate(self.before[end - 1], shape, slice((start + n - 1) % 256 + 1, None), rng)
            hidden = self.first_seen(start)
            for page in self.before[end - n_pages : end] if rng.integers(2) else ():
                invalidate(page, shape, slice(max(0, hidden)), rng)
                hidden -= kernels.PAGE_TOKENS
        self.pages = [aligned(shape.payload_bytes) for _ in self.before]
        for page, before in zip(self.pages, self.before, strict=True):
            page[:] = before
        self._compute(pool)

    def first_seen(self, position: int) -> int:
        """The first position that a row sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def _some_rows(self, rng: np.random.Generator) -> F32:
        """K, V and queries before they are placed: some groups tiny, at times one huge or bad."""
        rows = rng.standard_normal((self.tokens, self.width)).astype(np.float32)
        groups = rows.reshape(-1, 32)
        some = np.flatnonzero(rng.random(len(groups)) < 0.1)
        factors = rng.choice([0.0, 1e-30, 1e-7, 1e-5, 1e-4], (len(some), 1))
        groups[some] = (groups[some] * factors).astype(np.float32)
        if rng.random() < 0.3:
            groups[rng.integers(len(groups))] *= np.float32(1e7)
        if rng.random() < 0.3:
            rows[rng.integers(self.tokens), rng.integers(self.width)] = np.nan
        return rows

    def _put_ties(self, rng: np.random.Generator) -> None:
        """Let heads hold what the transform, exact for these values, turns into ties of their
        quantisation, without norm and rope. The factor of Q is a power of two."""
        self.scale = 0.125 / LOG2_E
        heads = self.qkv.reshape(self.tokens, -1, self.head_dim)
        for token, head in np.argwhere(rng.random(heads.shape[:2]) < 0.3).tolist():
            is_query, unit = head < self.n_head, float(rng.integers(65, 128)) / 1024
            largest = 126.75 if is_query else 127.0
            values = np.concatenate(
                [ties(rng, 32, largest, unit) for _ in range(self.head_dim // 32)]
            )
            is_v = head >= self.n_head + self.n_kv
            heads[token, head] = (
                values if is_v else self._transform(values) / self.layer.transform_width
            )

    def _transform(self, values: F32) -> NDArray[np.float64]:
        """The transform of K and Q."""
        return hadamard(values.reshape(-1, self.layer.transform_width)).reshape(-1)

    def _compute(self, pool: kernels.Pool) -> None:
        tokens, n_pages = self.tokens, len(self.pages)
        self.pool = pool
        self.batch = batch = kernels.Batch(tokens, len(self.entries), n_pages)
        table = [(n, start, p) for (n, start), p in zip(self.entries, self.n_pages, strict=True)]
        addresses = np.array([kernels.address_of(page) for page in self.pages], np.uint64)
        batch.set(np.zeros(tokens, np.int32), np.array(table, np.int32), addresses)
        self.queries = queries = kernels.Queries(tokens, self.n_head, self.head_dim)
        norms = [None if w is None else kernels.Vector(w) for w in self.norms]
        kept = kernels.KvRows(tokens, self.shape)
        kernels.place_kv(
            pool,
            rows_of(self.qkv),
            batch,
            self.shape,
            self.LAYER,
            self.n_head,
            *norms[:2],
            self.EPS,
            self.rope if self.has_rope else None,
            self.scale,
            queries,
            kept,
            norms[2],
            self.has_kv,
            self.norms_rotated,
        )
        self.kept = kept.view(tokens).copy()
        out = kernels.Rows(tokens, self.n_head * self.head_dim)
        at = pool, queries, batch, self.shape, self.LAYER
        kernels.attend(*at, out, window=self.window, sinks=self.sinks)
        self.want = out.view(tokens).copy()

    def tiles(self, rows_max: int, each: int, spans: Spans) -> tuple[NDArray[np.int32], list[int]]:
        """`AttendTile` rows of attention.cu, and the entry of each; a row has `each` accumulators
        of a super-page. Super-pages that the first row does not see are not of its tile."""
        entry_of: list[int] = []
        group, rows, result, first_token, first_page = self.n_head // self.n_kv, [], 0, 0, 0
        for entry, (n, start) in enumerate(self.entries):
            span = spans[entry]
            for first in range(0, n * group, rows_max) if span[1] else ():
                count = min(rows_max, n * group - first)
                end = min((start + (first + count - 1) // group) // 1024 + 1, sum(span))
                begin = max(self.first_seen(start + first // group) // 1024, span[0])
                superpages = max(end - begin, 0)
                rows.append(
                    (first_token, start, first_page, first, count, superpages, result, begin)
                )
                entry_of.append(entry)
                result += -(-count // 16) * superpages * each
            first_token += n
            first_page += self.n_pages[entry]
        return np.array(rows, np.int32), entry_of

    def attend(
        self,
        gpu: Gpu,
        arrays: Arrays,
        kernel: str,
        spans: Spans,
        step: list[int],
        n_kv: int,
    ) -> Attended:
        """Accumulators of `n_kv` KV heads; `step`: addresses of q, scales, pages; the line
        of a page where the layer begins."""
        rows_max, each = self.kernels[kernel]
        table, entry_of = self.tiles(rows_max, each * n_kv, spans)
        accumulators = 16 * int((-(-table[:, 4] // 16) * table[:, 5]).sum()) * each * n_kv
        tiles = arrays.put(table)
        m, denominators = (arrays.empty(np.float32, accumulators) for _ in range(2))
        out = Attended(
            entry_of, tiles, m, denominators, arrays.empty(np.float32, accumulators, self.head_dim)
        )
        _, *results = out.addresses
        q, scale, pages, layer_offset = step
        heads = [self.n_head // self.n_kv * n_kv, n_kv, self.head_dim]
        grid = len(table), n_kv, each * max(1, int(table[:, 5].max()))
        arguments = [q, scale, tiles.address, pages, layer_offset, *heads, *results]
        arguments += [self.window, self.v_first]
        gpu.launch(kernel, grid, ATTEND_THREADS, arguments)
        return out

    def compare_partials(
        self,
        gpu: Gpu,
        arrays: Arrays,
        q: DeviceArray,
        scale: DeviceArray,
        addresses: U64,
        rng: np.random.Generator,
    ) -> None:
        """Raise Differs unless spans of super-pages give the accumulators of `attend_partials`."""
        spans = []
        for n, start in self.entries:
            seen = (start + n - 1) // 1024 + 1
            first = int(rng.integers(0, seen))
            spans.append((first, int(rng.integers(0, seen - first + 1))))
        first_kv = int(rng.integers(0, self.n_kv))
        n_kv = int(rng.integers(1, self.n_kv - first_kv + 1))
        group = self.n_head // self.n_kv
        n_head, tokens = group * n_kv, self.tokens
        queries = kernels.Queries(tokens, n_head, self.head_dim)
        some, runs = (group * first_kv, n_head), [(0, tokens)]
        queries.load_bytes(self.queries.to_bytes(self.n_kv, some, runs), n_kv)
        want = kernels.Partials(tokens, n_head, self.head_dim, self.v_first)
        table = np.array([(entry, *span) for entry, span in enumerate(spans)], np.int32)
        kernels.attend_partials(
            self.pool,
            queries,
            self.batch,
            self.shape,
            self.LAYER,
            table,
            want,
            heads=(first_kv, n_kv),
            window=self.window,
        )
        if want.n_accumulators == 0:
            return
        heads = slice(group * first_kv, group * (first_kv + n_kv))
        first_head = self.layer.page_offset + first_kv * self.layer.head_bytes
        step = [arrays.put(a.read()[:, heads]).address for a in (q, scale)]
        step += [arrays.put(addresses + np.uint64(first_head)).address, 0]
        places, index = [], 0
        for (n, _), (first, count) in zip(self.entries, spans, strict=True):
            places.append((index, n, count, first))
            index += (1 if first == 0 and count else count) * n * n_head
        for kernel, (rows_max, each) in self.kernels.items():
            attended = self.attend(gpu, arrays, kernel, spans, step, n_kv)
            place = np.array(places, np.int32)[attended.entry_of]
            m, denominators = (arrays.empty(np.float32, index) for _ in range(2))
            o = arrays.empty(np.float32, index, self.head_dim)
            tiles, *results = attended.addresses
            sizes = [n_head, n_kv, self.head_dim, each]
            arguments = [tiles, arrays.put(place).address, *results, *sizes]
            gpu.launch(
                "gather_partials",
                (len(place), n_kv, rows_max),
                min(256, self.head_dim),
                [*arguments, m.address, denominators.address, o.address, self.window],
            )
            parts = m.read(), denominators.read(), o.read()[:, self.v_first :]
            got = one_nan(np.concatenate([part.reshape(-1) for part in parts]))
            values = one_nan(np.frombuffer(want.to_bytes(), np.float32)[-len(got) :])
            what = f"{kernel} of {n_kv} KV heads from {first_kv} of {self.n_kv}"
            what = f"{what}, spans {spans} of {self.entries}, window {self.window}"
            compare(got, values, what)

    def compare(self, gpu: Gpu, rng: np.random.Generator) -> None:
        """Raise Differs unless K, V, attention and partials of random spans are the CPU's."""
        n_head, n_kv, head_dim, tokens = self.n_head, self.n_kv, self.head_dim, self.tokens
        what = f"{n_head} heads, {n_kv} KV heads of {head_dim}, entries {self.entries}"
        what += f", window {self.window}, v_first {self.v_first}"
        with Arrays(gpu) as arrays:
            pages = [arrays.put(page) for page in self.before]
            addresses = np.array([page.address for page in pages], np.uint64)
            firsts = np.cumsum([0, *self.n_pages[:-1]])
            positions = [p for n, start in self.entries for p in range(start, start + n)]
            page_of = [
                addresses[first + p // 256]
                for (n, start), first in zip(self.entries, firsts, strict=True)
                for p in range(start, start + n)
            ]
            rope_rows = [self.rope.row(p) for p in range(max(positions) + 1)]
            rope = arrays.put(np.array(rope_rows, np.float32))
            norms = [0 if w is None else arrays.put(w).address for w in self.norms]
            q = arrays.empty(np.int8, tokens, n_head, head_dim)
            scale = arrays.empty(np.float32, tokens, n_head, head_dim // 32)
            rows = arrays.empty(np.uint8, tokens, self.shape.row_bytes)
            geometry = [
                self.layer.page_offset // LINE_BYTES,
                self.shape.row_bytes,
                self.layer.row_offset,
            ]
            geometry += [n_head, n_kv, head_dim]
            rotation = [rope.address, self.rope.n_rot, int(self.style == "neox")]
            query_scales = 0
            if self.has_rope and self.rope.scales_queries:
                scales = [self.rope.query_scale(p) for p in range(max(positions) + 1)]
                query_scales = arrays.put(np.array(scales, np.float32)).address
            factor = float(np.float32(LOG2_E * self.scale / self.layer.transform_width))
            gpu.launch(
                "place_kv",
                (tokens, self.n_rows, 1),
                64,
                [
                    arrays.put(self.qkv).address,
                    self.width,
                    arrays.put(np.array(positions, np.int32)).address,
                    arrays.put(np.array(page_of, np.uint64)).address,
                    *geometry,
                    *norms,
                    self.EPS,
                    *(rotation if self.has_rope else [0, 0, 0]),
                    factor,
                    query_scales,
                    q.address,
                    scale.address,
                    rows.address,
                    self.v_first,
                    int(self.norms_rotated),
                ],
            )
            if self.has_kv:
                one = slice(self.layer.row_offset, self.layer.row_offset + self.layer.row_bytes)
                compare(rows.read()[:, one], self.kept[:, one], f"place_kv: rows, {what}")
            for page, want in zip(pages, self.pages, strict=True):
                compare(page.read(), want, f"place_kv, {what}")
            width = n_head * head_dim
            step = [q.address, scale.address, arrays.put(addresses).address]
            step.append(self.layer.page_offset // LINE_BYTES)
            whole = [(0, (start + n - 1) // 1024 + 1) for n, start in self.entries]
            sinks = 0 if self.sinks is None else arrays.put(self.sinks.view()).address
            for kernel, (rows_max, each) in self.kernels.items():
                attended = self.attend(gpu, arrays, kernel, whole, step, n_kv)
                quantised = Quantised.empty(arrays, tokens, width)
                out, q8 = quantised.values, quantised.addresses if rng.integers(4) else [0, 0, 0]
                gpu.launch(
                    "fold_attention",
                    (len(attended.entry_of), n_kv, rows_max),
                    min(256, head_dim),
                    [
                        *(*attended.addresses, n_head, n_kv, head_dim, each, out.address, width),
                        *(*q8, self.window, sinks),
                    ],
                )
                compare(out.read(), self.want, f"{kernel}, {what}")
                if q8[0]:
                    want = kernels.Activations(tokens, width)
                    kernels.quantise(self.pool, rows_of(self.want), tokens, want)
                    quantised.compare(want, f"{kernel}, {what}")
            self.compare_partials(gpu, arrays, q, scale, addresses, rng)
