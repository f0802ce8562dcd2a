"""Random cases of every GPU kernel: what it writes has the bits of the CPU's kernels.

A case takes a GPU, a pool and a generator of random numbers, chooses its shapes, and raises
`Differs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.arrays import Arrays, DeviceArray
from bench.models.tensors import aligned, random_tensor, random_values
from kernels.cuda.gpu import Gpu

F32 = NDArray[np.float32]
U64 = NDArray[np.uint64]
# Of each kernel: rows of a tile, and accumulators of a super-page.
ATTEND = {"attend": (16, 1), "attend_many": (32, 1), "attend_pages": (16, 4)}
ATTEND_THREADS = 256
Spans = list[tuple[int, int]]  # of each entry: its first super-page, and how many
FLOATS = ("f16", "bf16", "f32")
KIND_INDEX = {kind: index for index, kind in enumerate(kernels.KINDS)}
STORE, ADD, GATE = range(3)  # what follows a product: `Then` of linear.cu


class Differs(AssertionError):
    """A GPU kernel did not write the bits of the CPU."""


def compare(got: NDArray[Any], want: NDArray[Any], what: str) -> None:
    """Raise Differs unless both hold the same bytes."""
    left, right = (np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in (got, want))
    if left.size != right.size:
        raise Differs(f"{what}: {left.size} bytes, not {right.size}")
    if wrong := int(np.count_nonzero(left != right)):
        at = int(np.flatnonzero(left != right)[0]) // got.itemsize
        raise Differs(f"{what}: {wrong} of {left.size} bytes, first in element {at}")


def one_nan(values: F32) -> F32:
    """The values with one NaN: the bits of a NaN that an operation makes are the processor's own,
    and the denominator of a row that is not finite is one."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def rows_of(values: F32) -> kernels.Rows:
    """Rows of the CPU with these values."""
    rows = kernels.Rows(*values.shape)
    rows.view(len(values))[:] = values
    return rows


@dataclass(frozen=True, slots=True)
class Quantised:
    """Activations in memory of a GPU (activations.h); `values` are the fp32 rows."""

    q: DeviceArray
    scale: DeviceArray
    sums: DeviceArray
    values: DeviceArray

    @staticmethod
    def empty(arrays: Arrays, tokens: int, width: int) -> Quantised:
        spans = -(-width // 128)
        return Quantised(
            arrays.empty(np.int8, tokens, spans, 4, 4, 2, 4),  # t, block, half, k
            arrays.empty(np.float32, tokens, 4 * spans),
            arrays.empty(np.int32, tokens, 4 * spans),
            arrays.empty(np.float32, tokens, width),
        )

    @property
    def addresses(self) -> list[int]:
        return [a.address for a in (self.q, self.scale, self.sums)]

    def compare(self, want: kernels.Activations, what: str) -> None:
        """Raise Differs unless these are the activations of the CPU."""
        tokens, width = self.values.shape
        blocks = -(-width // 32)
        values, scales = (
            np.concatenate([np.frombuffer(x, kind) for x in part])
            for part, kind in zip(want.unpack(tokens), (np.int8, np.float32), strict=True)
        )
        q = self.q.read().transpose(0, 1, 3, 4, 2, 5).reshape(tokens, -1, 32)[:, :blocks]
        same = values.reshape(tokens, -1, 32)[:, :blocks]
        compare(q, same, f"{what}: q of {tokens} x {width}")
        scale = self.scale.read()[:, :blocks]  # NaN where the CPU has 1 in a row that it marks
        same = np.where(np.isnan(scale), np.float32(1), scale)
        compare(same, scales.reshape(tokens, -1)[:, :blocks], f"{what}: scales")
        sums = q.sum(axis=2, dtype=np.int32)
        compare(self.sums.read()[:, :blocks], sums, f"{what}: sums")


def some_values(rng: np.random.Generator, tokens: int, width: int) -> F32:
    """Rows, at times with a value that is not finite."""
    values = random_values(tokens, width, rng)
    if rng.random() < 0.3:
        bad = np.float32(rng.choice([np.nan, np.inf, -np.inf, 2.0**97]))
        values[rng.integers(tokens), rng.integers(width)] = bad
    return values


def packed_with_bytes(
    pool: kernels.Pool, kind: str, rows: int, cols: int, rng: np.random.Generator
) -> tuple[kernels.Matrix, NDArray[np.uint8]]:
    """A random matrix, and its packed bytes."""
    buffer = aligned(kernels.packed_bytes(kind, rows, cols))
    kernels.pack(pool, kind, rows, cols, random_tensor(kind, rows, cols, rng), buffer)
    return kernels.Matrix(kind, rows, cols, buffer), buffer


def quantise_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """`quantise` and `norm_quantise` of random rows; of one in eight cases wider ones, which
    `norm_quantise` holds in parts."""
    tokens, width = int(rng.integers(1, 20)), int(rng.integers(32, 700))
    if rng.random() < 0.125:
        tokens, width = int(rng.integers(1, 3)), int(rng.integers(4000, 9000))
    values, w = some_values(rng, tokens, width), rng.standard_normal(width).astype(np.float32)
    eps, is_kept = 1e-6, bool(rng.integers(2))
    with Arrays(gpu) as arrays:
        x = arrays.put(values)
        plain = Quantised.empty(arrays, tokens, width)
        threads = 32 * int(rng.integers(1, 9))
        grid = tokens, -(-width // (4 * threads)), 1  # a warp for each 128 values
        gpu.launch("quantise", grid, threads, [x.address, width, width, *plain.addresses])
        want = kernels.Activations(tokens, width)
        kernels.quantise(pool, rows_of(values), tokens, want)
        plain.compare(want, "quantise")
        normed = Quantised.empty(arrays, tokens, width)
        weights = arrays.put(w)
        arguments = [x.address, width, weights.address, eps, width, *normed.addresses]
        kept = [normed.values.address, width] if is_kept else [0, 0]
        gpu.launch("norm_quantise", (tokens, 1, 1), max(64, threads), [*arguments, *kept])
        kernels.norm_quantise(pool, rows_of(values), kernels.Vector(w), eps, tokens, want)
        normed.compare(want, "norm_quantise")
        if is_kept:
            out = kernels.Rows(tokens, width)
            kernels.rmsnorm(pool, rows_of(values), kernels.Vector(w), eps, tokens, out)
            finite = np.isfinite(out.view(tokens))
            got = normed.values.read()
            compare(got[finite], out.view(tokens)[finite], "norm_quantise: values")


def linear_case(
    gpu: Gpu,
    pool: kernels.Pool,
    rng: np.random.Generator,
    kind: str,
    shape: tuple[int, int, int] | None = None,
) -> None:
    """A product of a random matrix of `kind`: stored, added and gated, by every kernel for it.

    shape: rows, columns, tokens, else random ones; a block has all segments of a row then.
    """
    rows, tokens = int(rng.integers(1, 90)), int(rng.integers(1, 80))
    cols = 256 * int(rng.integers(1, 10)) if kind.endswith("_k") else 32 * int(rng.integers(1, 70))
    rows, cols, tokens = shape or (rows, cols, tokens)
    values = some_values(rng, tokens, cols)
    matrix, buffer = packed_with_bytes(pool, kind, rows, cols, rng)
    gate, gate_buffer = packed_with_bytes(pool, kind, rows, cols, rng)
    bias = rng.standard_normal(rows).astype(np.float32) if rng.integers(2) else None
    before = rng.standard_normal((tokens, rows)).astype(np.float32)
    activations = kernels.Activations(tokens, cols, keep_float=True)
    kernels.quantise(pool, rows_of(values), tokens, activations)
    vector = None if bias is None else kernels.Vector(bias)
    stored, added, gated = kernels.Rows(tokens, rows), rows_of(before), kernels.Rows(tokens, rows)
    kernels.linear(pool, activations, [matrix], [vector], tokens, stored)
    kernels.linear_add(pool, activations, matrix, vector, tokens, added)
    kernels.linear_gated(pool, activations, gate, matrix, vector, vector, tokens, gated)
    gate_product = kernels.Rows(tokens, rows)
    kernels.linear(pool, activations, [gate], [vector], tokens, gate_product)
    tiles, eights = -(-rows // 16), -(-tokens // 8)
    segments = -(-cols // 1024)
    each = segments if shape else int(rng.integers(1, segments + 1))  # segments of a block
    groups = -(-tiles // 4), -(-segments // each)
    shapes = {
        f"linear_few_{kind}": ((eights, tiles, 1), 32 * int(rng.integers(4, 9))),
        f"linear_some_{kind}": ((-(-tokens // 32), *groups), 128),
        f"linear_many_{kind}": ((-(-tokens // 64), *groups), 128),
    }
    if kind in FLOATS:
        shapes = {f"linear_{kind}": ((eights, tiles, 1), 128)}
    with Arrays(gpu) as arrays:
        x = Quantised.empty(arrays, tokens, cols)
        gpu.copy_in(x.values.address, values)
        grid = tokens, -(-cols // 256), 1
        gpu.launch("quantise", grid, 64, [x.values.address, cols, cols, *x.addresses])
        weights = arrays.put(buffer)
        b = 0 if bias is None else arrays.put(bias).address
        q, scale, sums = x.addresses
        source = [x.values.address, cols, scale] if kind in FLOATS else [q, scale, sums]
        held = gate_product.view(tokens)  # before the other product is gated with it
        once = [arrays.put(gate_buffer).address, b]
        plans: list[tuple[str, int, F32, kernels.Rows, list[int]]] = []
        partials = arrays.empty(np.float32, segments, tokens, rows).address if groups[1] > 1 else 0
        for kernel in shapes:
            rest = [0, 0] if "_few_" in kernel else [partials, each] if kind not in FLOATS else []
            plans += [(kernel, STORE, before, stored, rest), (kernel, ADD, before, added, rest)]
            plans.append((kernel, GATE, held, gated, rest))
            if "_few_" in kernel:  # with both products of a gate
                plans.append((kernel, GATE, before, gated, once))
        for kernel, then, given, want, rest in plans:
            out = arrays.put(given)
            after = [b, then, out.address, rows]
            arguments = [weights.address, rows, cols, *source, tokens, *after]
            gpu.launch(kernel, *shapes[kernel], [*arguments, *rest])
            if rest[:1] == [partials] != [0]:
                grid = tokens, -(-rows // 64), 1
                gpu.launch("add_segments", grid, 64, [partials, segments, rows, tokens, *after])
            finite = np.isfinite(want.view(tokens))
            got = out.read()
            what = f"{kernel}, {rows} x {cols}, {tokens} tokens, then {then}, {rest}"
            compare(np.isfinite(got), finite, what)
            compare(got[finite], want.view(tokens)[finite], what)


def embed_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator, kind: str) -> None:
    """Embeddings of random tokens, rows taken of them, and which are finite."""
    rows, cols, n = int(rng.integers(1, 60)), 256 * int(rng.integers(1, 3)), int(rng.integers(1, 9))
    matrix, buffer = packed_with_bytes(pool, kind, rows, cols, rng)
    tokens = rng.integers(0, rows, n).astype(np.int32)
    want = kernels.Rows(n, cols)
    kernels.embed(pool, matrix, tokens, want)
    with Arrays(gpu) as arrays:
        weights = arrays.put(buffer)
        out, ids = arrays.empty(np.float32, n, cols), arrays.put(tokens)
        index = KIND_INDEX[kind]
        arguments = [weights.address, index, cols, ids.address, out.address, cols]
        gpu.launch("embed", (n, 1, 1), 64, arguments)
        got = out.read()
        compare(got, want.view(n).copy(), f"embed of {kind}")
        chosen = rng.integers(0, n, 3).astype(np.int32)
        taken, at = arrays.empty(np.float32, 3, cols), arrays.put(chosen)
        arguments = [out.address, cols, at.address, cols, taken.address, cols]
        gpu.launch("take_rows", (3, 1, 1), 32, arguments)
        compare(taken.read(), got[chosen], "take_rows")
        values = some_values(rng, n, cols)
        x, bad = arrays.put(values), arrays.zeros(np.uint8, n)
        gpu.launch("nonfinite_rows", (n, 1, 1), 64, [x.address, cols, cols, bad.address])
        compare(bad.read(), (~np.isfinite(values).all(axis=1)).astype(np.uint8), "nonfinite_rows")


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


def random_page(shape: kernels.PageShape, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Any int8 values with small scales."""
    head_dim = shape.head_dim
    page = rng.integers(0, 256, shape.payload_bytes, np.uint8).reshape(-1, shape.head_bytes)
    k_scales = 256 * head_dim
    v_scales = 2 * k_scales + 256 * (head_dim // 32) * 2
    for start, count in ((k_scales, 256 * head_dim // 32), (v_scales, 256)):
        scales = (rng.random((len(page), count)) * 0.02).astype(np.float16)
        page[:, start : start + 2 * count] = scales.view(np.uint8)
    return page.reshape(-1)


class Attention:
    """One step of one attention layer, computed on the CPU."""

    N_LAYER, LAYER, EPS = 2, 1, 1e-6

    def __init__(
        self,
        pool: kernels.Pool,
        rng: np.random.Generator,
        n_head: int,
        n_kv: int,
        head_dim: int,
        entries: list[tuple[int, int]],
    ) -> None:
        self.n_head, self.n_kv, self.head_dim, self.entries = n_head, n_kv, head_dim, entries
        self.shape = shape = kernels.PageShape(self.N_LAYER, n_kv, head_dim)
        self.style = str(rng.choice(["norm", "neox"]))
        n_rot = head_dim if self.style == "norm" else 2 * int(rng.integers(1, head_dim // 2 + 1))
        self.rope = kernels.RopeTable(self.style, head_dim, n_rot, 10000.0)
        self.scale = 1 / math.sqrt(head_dim)
        self.tokens = sum(n for n, _ in entries)
        self.width = (n_head + 2 * n_kv) * head_dim
        self.qkv = rng.standard_normal((self.tokens, self.width)).astype(np.float32)
        if rng.random() < 0.3:
            self.qkv[rng.integers(self.tokens), rng.integers(self.width)] = np.nan
        self.norms = (
            [rng.standard_normal(head_dim).astype(np.float32) for _ in range(2)]
            if rng.integers(2)
            else None
        )
        self.n_pages = [-(-(start + n) // kernels.PAGE_TOKENS) for n, start in entries]
        self.before = [random_page(self.shape, rng) for _ in range(sum(self.n_pages))]
        self.pages = [aligned(shape.payload_bytes) for _ in self.before]
        for page, before in zip(self.pages, self.before, strict=True):
            page[:] = before
        self._compute(pool)

    def _compute(self, pool: kernels.Pool) -> None:
        tokens, n_pages = self.tokens, len(self.pages)
        self.pool = pool
        self.batch = batch = kernels.Batch(tokens, len(self.entries), n_pages)
        table = [(n, start, p) for (n, start), p in zip(self.entries, self.n_pages, strict=True)]
        addresses = np.array([kernels.address_of(page) for page in self.pages], np.uint64)
        batch.set(np.zeros(tokens, np.int32), np.array(table, np.int32), addresses)
        self.queries = queries = kernels.Queries(tokens, self.n_head, self.head_dim)
        norms = [None, None] if self.norms is None else [kernels.Vector(w) for w in self.norms]
        kernels.place_kv(
            pool,
            rows_of(self.qkv),
            batch,
            self.shape,
            self.LAYER,
            self.n_head,
            *norms,
            self.EPS,
            self.rope,
            self.scale,
            queries,
        )
        out = kernels.Rows(tokens, self.n_head * self.head_dim)
        kernels.attend(pool, queries, batch, self.shape, self.LAYER, out)
        self.want = out.view(tokens).copy()

    def tiles(self, rows_max: int, each: int, spans: Spans) -> tuple[NDArray[np.int32], list[int]]:
        """`AttendTile` rows of attention.cu, and the entry of each; a row has `each` accumulators
        of a super-page."""
        entry_of: list[int] = []
        group, rows, result, first_token, first_page = self.n_head // self.n_kv, [], 0, 0, 0
        for entry, (n, start) in enumerate(self.entries):
            span = spans[entry]
            for first in range(0, n * group, rows_max) if span[1] else ():
                count = min(rows_max, n * group - first)
                seen = (start + (first + count - 1) // group) // 1024 + 1
                superpages = min(max(seen - span[0], 0), span[1])
                tile = (first_token, start, first_page, first, count, superpages, result, span[0])
                rows.append(tile)
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
        """Accumulators of `n_kv` KV heads; `step`: addresses of q, scales, pages; the layer."""
        rows_max, each = ATTEND[kernel]
        table, entry_of = self.tiles(rows_max, each * n_kv, spans)
        accumulators = 16 * int((-(-table[:, 4] // 16) * table[:, 5]).sum()) * each * n_kv
        tiles = arrays.put(table)
        m, denominators = (arrays.empty(np.float32, accumulators) for _ in range(2))
        out = Attended(
            entry_of, tiles, m, denominators, arrays.empty(np.float32, accumulators, self.head_dim)
        )
        _, *results = out.addresses
        q, scale, pages, layer = step
        heads = [self.n_head // self.n_kv * n_kv, n_kv, self.head_dim]
        grid = len(table), n_kv, each * max(1, int(table[:, 5].max()))
        arguments = [q, scale, tiles.address, pages, layer, *heads, *results]
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
        queries.load_bytes(self.queries.to_bytes(self.n_kv, (first_kv, n_kv), [(0, tokens)]), n_kv)
        want = kernels.Partials(tokens, n_head, self.head_dim)
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
        )
        if want.n_accumulators == 0:
            return
        heads = slice(group * first_kv, group * (first_kv + n_kv))
        first_head = (self.LAYER * self.n_kv + first_kv) * self.shape.head_bytes
        step = [arrays.put(a.read()[:, heads]).address for a in (q, scale)]
        step += [arrays.put(addresses + np.uint64(first_head)).address, 0]
        places, index = [], 0
        for (n, _), (first, count) in zip(self.entries, spans, strict=True):
            places.append((index, n, count))
            index += (1 if first == 0 and count else count) * n * n_head
        for kernel, (rows_max, each) in ATTEND.items():
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
                [*arguments, m.address, denominators.address, o.address],
            )
            got = one_nan(np.concatenate([a.read().reshape(-1) for a in (m, denominators, o)]))
            values = one_nan(np.frombuffer(want.to_bytes(), np.float32)[-len(got) :])
            what = f"{kernel} of {n_kv} KV heads from {first_kv} of {self.n_kv}"
            compare(got, values, f"{what}, spans {spans} of {self.entries}")

    def compare(self, gpu: Gpu, rng: np.random.Generator) -> None:
        """Raise Differs unless K, V, attention and partials of random spans are the CPU's."""
        n_head, n_kv, head_dim, tokens = self.n_head, self.n_kv, self.head_dim, self.tokens
        what = f"{n_head} heads, {n_kv} KV heads of {head_dim}, entries {self.entries}"
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
            norms = [0, 0] if self.norms is None else [arrays.put(w).address for w in self.norms]
            q = arrays.empty(np.int8, tokens, n_head, head_dim)
            scale = arrays.empty(np.float32, tokens, n_head, head_dim // 32)
            rows = arrays.empty(np.uint8, tokens, self.shape.row_bytes)
            geometry = [self.LAYER, self.N_LAYER, n_head, n_kv, head_dim]
            rotation = [rope.address, self.rope.n_rot, int(self.style == "neox")]
            factor = float(np.float32(1.4426950408889634 * self.scale))
            gpu.launch(
                "place_kv",
                (tokens, n_head + 2 * n_kv, 1),
                64,
                [
                    arrays.put(self.qkv).address,
                    self.width,
                    arrays.put(np.array(positions, np.int32)).address,
                    arrays.put(np.array(page_of, np.uint64)).address,
                    *geometry,
                    *norms,
                    self.EPS,
                    *rotation,
                    factor,
                    q.address,
                    scale.address,
                    rows.address,
                ],
            )
            for page, want in zip(pages, self.pages, strict=True):
                compare(page.read(), want, f"place_kv, {what}")
            width = n_head * head_dim
            step = [q.address, scale.address, arrays.put(addresses).address, self.LAYER]
            whole = [(0, (start + n - 1) // 1024 + 1) for n, start in self.entries]
            for kernel, (rows_max, each) in ATTEND.items():
                attended = self.attend(gpu, arrays, kernel, whole, step, n_kv)
                quantised = Quantised.empty(arrays, tokens, width)
                out, q8 = quantised.values, quantised.addresses if rng.integers(4) else [0, 0, 0]
                gpu.launch(
                    "fold_attention",
                    (len(attended.entry_of), n_kv, rows_max),
                    min(256, head_dim),
                    [*attended.addresses, n_head, n_kv, head_dim, each, out.address, width, *q8],
                )
                compare(out.read(), self.want, f"{kernel}, {what}")
                if q8[0]:
                    want = kernels.Activations(tokens, width)
                    kernels.quantise(self.pool, rows_of(self.want), tokens, want)
                    quantised.compare(want, f"{kernel}, {what}")
            self.compare_partials(gpu, arrays, q, scale, addresses, rng)


SAMPLE_ROW = np.dtype(  # `SampleRow` of sample.cu
    [
        *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
        *((name, np.float32) for name in ("repetition", "frequency", "presence")),
        ("top_k", np.int32),
        ("logprobs", np.int32),
        ("seed", np.uint64),
        ("position", np.uint64),
        ("draw", np.uint32),
        *((name, np.int32) for name in ("first_history", "n_history", "first_bias", "n_bias")),
        ("first_mask", np.int32),
    ]
)


def some_logits(rng: np.random.Generator, rows: int, vocab: int) -> F32:
    """Rows of one kind each: random, of few values, equal but for one, huge, with a bad value."""
    logits = np.empty((rows, vocab), np.float32)
    for row in logits:
        row[:] = rng.standard_normal(vocab) * rng.choice([0.0, 0.1, 1.0, 8.0, 3e37])
        if rng.random() < 0.4:
            row[:] = np.round(row * 2) / 2  # ties, and zeros of both signs
        if rng.random() < 0.3:
            row[rng.integers(vocab)] = rng.choice([10.0, 3e38, -3e38])
        if rng.random() < 0.1:
            row[rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    return logits


def sample_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Tokens and log-probabilities of random logits with random parameters. In one row of ten the
    biases of a token add up to infinity."""
    n, vocab = int(rng.integers(1, 24)), int(rng.choice([1, 2, 33, rng.integers(3, 5000)]))
    logits = some_logits(rng, n, vocab)
    table = np.zeros(n, SAMPLE_ROW)
    table["temperature"] = rng.choice([0.0, 0.01, 0.7, 1.0, 5.0, 100.0], n)
    table["top_p"] = rng.choice([0.0, 0.5, 0.95, 1.0, 1.0, 1.0], n)
    table["min_p"] = rng.choice([0.0, 0.0, 0.0, 0.05, 0.5, 1.0], n)
    table["repetition"] = rng.choice([1.0, 1.1, 0.5, 1e30], n, p=[0.5, 0.3, 0.1, 0.1])
    table["frequency"] = rng.choice([0.0, 0.25, -2.0, 1e38], n, p=[0.5, 0.3, 0.1, 0.1])
    table["presence"] = rng.choice([0.0, 0.5, -1.0, 3e38], n, p=[0.5, 0.3, 0.1, 0.1])
    table["top_k"] = rng.choice([0, 0, 1, 2, 40, vocab, vocab + 1], n)
    table["logprobs"] = rng.choice([-1, 0, 1, 20], n)
    table["seed"], table["position"] = rng.integers(0, 1 << 63, (2, n), np.uint64)
    table["draw"] = rng.integers(0, 4, n)
    table["n_history"] = rng.choice([0, 0, 5, 200], n)
    table["n_bias"] = rng.choice([0, 0, 1, 8], n)
    for name in ("history", "bias"):
        table[f"first_{name}"] = np.cumsum(table[f"n_{name}"]) - table[f"n_{name}"]
    history = rng.integers(0, vocab, int(table["n_history"].sum()) + 1).astype(np.int32)
    bias_tokens = rng.integers(0, vocab, int(table["n_bias"].sum()) + 1).astype(np.int32)
    bias_values = rng.choice([-np.inf, -1.5, 0.25, 100.0, 3e38], len(bias_tokens))
    bias_values = bias_values.astype(np.float32)
    for row in table[(table["n_bias"] > 1) & (rng.random(n) < 0.2)]:
        infinite = slice(row["first_bias"], row["first_bias"] + 2)
        bias_tokens[infinite], bias_values[infinite] = rng.integers(vocab), 3e38
    words = -(-vocab // 32)
    masks = rng.integers(0, 1 << 32, (n, words), np.uint32)
    masks &= rng.integers(0, 1 << 32, (n, words), np.uint32)  # one bit of four
    masks[:, 0] |= 1  # else a mask may allow no token
    table["first_mask"] = np.where(rng.random(n) < 0.4, words * np.arange(n), -1)
    specs = []
    for row, mask in zip(table, masks, strict=True):
        past = slice(row["first_history"], row["first_history"] + row["n_history"])
        biased = slice(row["first_bias"], row["first_bias"] + row["n_bias"])
        specs.append(
            kernels.SampleSpec(
                temperature=float(row["temperature"]),
                top_k=int(row["top_k"]),
                top_p=float(row["top_p"]),
                min_p=float(row["min_p"]),
                repetition_penalty=float(row["repetition"]),
                presence_penalty=float(row["presence"]),
                frequency_penalty=float(row["frequency"]),
                seed=int(row["seed"]),
                position=int(row["position"]),
                draw=int(row["draw"]),
                history=history[past],
                bias=list(
                    zip(bias_tokens[biased].tolist(), bias_values[biased].tolist(), strict=True)
                ),
                logprobs=int(row["logprobs"]),
                mask=mask if row["first_mask"] >= 0 else None,
            )
        )
    want = kernels.sample(pool, rows_of(logits), specs)
    with Arrays(gpu) as arrays:
        tokens, logprobs = arrays.empty(np.int32, n), arrays.empty(np.float32, n)
        top_tokens, top_logprobs = arrays.empty(np.int32, n, 32), arrays.empty(np.float32, n, 32)
        gpu.launch(
            "sample",
            (n, 1, 1),
            32 * int(rng.choice([1, 2, 7, 32])),
            [
                arrays.put(logits).address,
                vocab,
                vocab,
                *(arrays.put(a).address for a in (table, history, bias_tokens, bias_values, masks)),
                arrays.empty(np.float32, n, vocab).address,
                arrays.empty(np.int32, n, vocab).address,
                *(a.address for a in (tokens, logprobs, top_tokens, top_logprobs)),
                32,
            ],
        )
        all_tokens, all_logprobs = top_tokens.read(), top_logprobs.read()
        what = f"sample of {vocab} logits"
        compare(tokens.read(), np.array([one.token for one in want], np.int32), f"{what}: tokens")
        found = np.array([one.logprob for one in want], np.float32)
        compare(logprobs.read(), found, f"{what}: log-probabilities")
        for row, one in enumerate(want):
            ids = np.array([token for token, _ in one.top], np.int32)
            found = np.array([logprob for _, logprob in one.top], np.float32)
            compare(all_tokens[row, : len(ids)], ids, f"{what}: best tokens of {table[row]}")
            compare(all_logprobs[row, : len(ids)], found, f"{what}: the best of {table[row]}")


def take_samples_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Samples of one step, to places of the next one."""
    n, rows, room = int(rng.integers(1, 400)), int(rng.integers(1, 70)), 500
    sampled = rng.integers(-1, 1 << 31, rows).astype(np.int32)
    sampled[rng.random(rows) < 0.2] = -1
    sources = rng.integers(0, rows, n).astype(np.int32)
    places = rng.permutation(room)[:n].astype(np.int32)
    want = rng.integers(0, 1000, room).astype(np.int32)
    with Arrays(gpu) as arrays:
        to = arrays.put(want)
        given = [arrays.put(array).address for array in (sampled, sources, places)]
        threads = 32 * int(rng.choice([1, 3, 8]))
        gpu.launch("take_samples", (-(-n // threads), 1, 1), threads, [*given, n, to.address])
        want[places] = sampled[sources].clip(0)
        compare(to.read(), want, "take_samples")


Case = Callable[[Gpu, kernels.Pool, np.random.Generator], None]


def cases() -> dict[str, Case]:
    """Every case by name."""
    table: dict[str, Case] = {
        "quantise": quantise_case,
        "attention": attention_case,
        "sample": sample_case,
        "take samples": take_samples_case,
    }
    for kind in kernels.KINDS:
        table[f"linear {kind}"] = partial(linear_case, kind=kind)
        table[f"embed {kind}"] = partial(embed_case, kind=kind)
    return table
