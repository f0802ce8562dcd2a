"""The functions of `kernels` that a forward pass calls, on a GPU: each launches what it names.

Arguments are those of `kernels`, without the pool, with buffers of this module. Weights are named
by the objects of `kernels` that hold them, once `upload` has copied them. The bits are the CPU's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

import kernels
from kernels.cuda.experts import ExpertOps, ExpertPairs
from kernels.cuda.gpu import Gpu
from kernels.cuda.heads import HeadOps
from kernels.cuda.memory import (
    I32,
    LINE_BYTES,
    NARROW_DIMS,
    QUERY_TILE_ROWS,
    SPAN_VALUES,
    U64,
    Activations,
    BadRows,
    Batch,
    KvRows,
    Parcel,
    Queries,
    Rows,
    Scratch,
    TileHeads,
)
from kernels.cuda.page_parts import PageParts, Place
from kernels.cuda.products import (
    ADD,
    FEW_TOKENS_MAX,
    FLOATS,
    NO_GATE,
    STORE,
    THREADS,
    TILE_ROWS,
    WARP,
    GateAt,
    MatrixAt,
    OutputAt,
    Products,
    then_of,
)
from kernels.cuda.recurrent import RecurrentOps
from kernels.cuda.rows import RowOps

KIND_INDEX = {kind: index for index, kind in enumerate(kernels.KINDS)}
NORM_THREADS_MAX = 512
QUANTISE_SPANS = 4  # of a block, a warp each
LOG2_E = 1.4426950408889634
WINDOW_MAX = 1 << 30  # more than any position
SAMPLE_THREADS_MAX = 1024
SAMPLE_ROW = np.dtype(  # the integers of a SampleRow of sample_row.h that are used here
    {
        "names": ["logprobs", "first_history", "n_history", "first_bias", "n_bias", "first_mask"],
        "formats": [np.int32] * 6,
        "offsets": [28, 52, 56, 60, 64, 68],
        "itemsize": 72,
    }
)
BIAS = np.dtype([("token", np.int32), ("value", np.float32)])

Held = kernels.Matrix | kernels.Vector | kernels.Sinks | kernels.RopeTable
Taken = Mapping[int, int]  # where a token goes, and of which row it is the sample
NOTHING_TAKEN: Taken = {}


@dataclass(frozen=True, slots=True)
class BegunSample:
    """Tokens that a GPU samples. fetched: what `sample` of sample.cu writes, once a later mark is
    passed; counts: of the best tokens that each row asks for."""

    n_best: int
    fetched: I32
    counts: list[int]

    def chosen(self) -> list[kernels.Sampled]:
        """What was sampled, once it is on the host."""
        got, n = self.fetched, len(self.counts)
        tokens, chances = got[:n].tolist(), got.view(np.float32)[n : 2 * n].tolist()
        best_ids, best = got[2 * n :].reshape(2, n, self.n_best)
        best_chances = best.view(np.float32)
        top = [
            list(zip(best_ids[i, :count].tolist(), best_chances[i, :count].tolist(), strict=True))
            if token >= 0
            else []
            for i, (count, token) in enumerate(zip(self.counts, tokens, strict=True))
        ]
        return [kernels.Sampled(*one) for one in zip(tokens, chances, top, strict=True)]


def _arrays_of(taken: Taken) -> tuple[I32, I32]:
    """Sources and places of `take_samples`."""
    return np.array(list(taken.values()), np.int32), np.array(list(taken), np.int32)


def _attend_kernel(rows: int, each: int, layer: kernels.LayerShape) -> str:
    """The kernel for tiles of up to `rows` with `each` accumulators of a super-page."""
    if layer.v_first:
        return "attend_pages_latent" if each > 1 else "attend_latent"
    if layer.head_dim > NARROW_DIMS:
        return "attend_pages_wide" if each > 1 else "attend_wide"
    if each > 1:
        return "attend_pages"
    return "attend" if rows == QUERY_TILE_ROWS else "attend_many"


def _norm_threads(width: int) -> int:
    """Threads of a block that norms a row: a warp for each span of it, at least two."""
    return WARP * min(max(-(-width // SPAN_VALUES), 2), NORM_THREADS_MAX // WARP)


class CudaOps:
    """The kernels bound to one GPU, and to a pool for what the CPU does. parts: of the pages of all
    steps; None: they are whole."""

    def __init__(self, gpu: Gpu, pool: kernels.Pool, parts: PageParts | None = None) -> None:
        self._gpu = gpu
        self._parts = parts
        self._pool = pool
        self._held: dict[Held, int] = {}
        self._query_scales: dict[kernels.RopeTable | None, int] = {}  # of tables that have any
        self._indices = Scratch(gpu)
        self._staged: list[tuple[I32, int]] = []  # with their addresses
        self._given = Parcel(gpu)  # parameters of `sample`
        self._adjusted, self._weights, self._out = Scratch(gpu), Scratch(gpu), Scratch(gpu)
        self._products = Products(gpu)
        experts = ExpertOps(gpu, self._products, self._address)
        self.select_experts, self.gather_pairs = experts.select_experts, experts.gather_pairs
        self.pairs_gated, self.pairs_add = experts.pairs_gated, experts.pairs_add
        heads = HeadOps(gpu, self._products, self._address)
        self.make_head_activations = heads.make_head_activations
        self.quantise_heads, self.linear_heads = heads.quantise_heads, heads.linear_heads
        self.transform_heads = heads.transform_heads
        self.copy_heads, self.begin_heads = heads.copy_heads, heads.begin
        recurrent = RecurrentOps(gpu, self._address)
        self.delta_net, self.mamba2 = recurrent.delta_net, recurrent.mamba2
        self.short_conv = recurrent.short_conv
        rows = RowOps(gpu, self._address)
        self.gate_rows, self.gate_add = rows.gate_rows, rows.gate_add
        self.zero_rows, self.scale_rows = rows.zero_rows, rows.scale_rows
        self.scaled_add = rows.scaled_add
        self.cap_rows, self.gelu_rows = rows.cap_rows, rows.gelu_rows
        self.mix_inputs, self.norm_columns = rows.mix_inputs, rows.norm_columns
        self.make_rows = partial(Rows, gpu)
        self.make_activations = partial(Activations, gpu)
        self.make_queries = partial(Queries, gpu)
        windows = (0,) if parts is None else parts.windows
        self.make_batch = partial(Batch, gpu, windows=windows)
        self.make_kv_rows = partial(KvRows, gpu)
        self.make_expert_pairs = partial(ExpertPairs, gpu)

    # -- weights

    def upload(self, *weights: kernels.Matrix | kernels.Vector | kernels.Sinks) -> None:
        """Copy weights to the GPU, one behind the other, but for those that are there.

        Matrices of one kind that are copied together are one to `linear`. Raises MemoryError.
        """
        views = {weight: weight.view() for weight in weights if weight not in self._held}
        if not views:
            return
        address = self._gpu.allocate(sum([view.nbytes for view in views.values()]))
        for weight, view in views.items():
            self._gpu.copy_in(address, view)
            self._held[weight] = address
            address += view.nbytes

    def upload_rope(self, table: kernels.RopeTable, positions: int) -> None:
        """Copy what a table has of the first positions. Raises MemoryError."""
        self._held[table] = self._hold([table.row(position) for position in range(positions)])
        if table.scales_queries:
            scales = [table.query_scale(position) for position in range(positions)]
            self._query_scales[table] = self._hold(scales)

    def _hold(self, values: Sequence[Sequence[float]] | Sequence[float]) -> int:
        array = np.array(values, np.float32)
        address = self._gpu.allocate(array.nbytes)
        self._gpu.copy_in(address, array)
        return address

    def _address(self, held: Held | None) -> int:
        return 0 if held is None else self._held[held]

    def _place(self, shape: kernels.PageShape, layer: int) -> Place:
        """Where a layer of a page lies."""
        if self._parts is None:
            return Place(0, shape.layer(layer).page_offset)
        return self._parts.places[layer]

    # -- rows

    def stage(self, batch: Batch, tokens: I32, wanted: I32, taken: Taken = NOTHING_TAKEN) -> None:
        """Copy what `batch` was set to, and what `embed` and `take_rows` are given in that step,
        which copy nothing then.

        taken: the tokens that are those of the last `begin_sample`.
        """
        self.begin_heads(batch.n_tokens)
        sent = batch.send((tokens, wanted), _arrays_of(taken))
        self._staged = [(tokens, sent[0]), (wanted, sent[1])]
        self._take_samples(taken, sent[2:], sent[0])

    def _take_samples(self, taken: Taken, arrays: Sequence[int], out: int) -> None:
        """Write tokens of the last `begin_sample` to an array."""
        if taken:
            arguments = [self._out.address, *arrays, len(taken), out]
            self._gpu.launch("take_samples", (-(-len(taken) // THREADS), 1, 1), THREADS, arguments)

    def _indices_of(self, array: I32) -> int:
        """The address of a copy."""
        for staged, address in self._staged:
            if staged is array:
                return address
        return self._indices.put(array)

    def embed(self, matrix: kernels.Matrix, tokens: I32, out: Rows, scale: float = 1.0) -> None:
        """As `kernels.embed`."""
        kind, ids = KIND_INDEX[matrix.kind], self._indices_of(tokens)
        weights = [self._address(matrix), kind, matrix.cols]
        arguments = [*weights, ids, out.address, out.width, float(scale)]
        self._gpu.launch("embed", (len(tokens), 1, 1), THREADS, arguments)

    def norm_add(self, x: Rows, w: kernels.Vector, eps: float, tokens: int, out: Rows) -> None:
        """As `kernels.norm_add`."""
        arguments = [x.address, x.width, self._address(w), eps, x.width, out.address, out.width]
        self._gpu.launch("norm_add", (tokens, 1, 1), _norm_threads(x.width), arguments)

    def norm_quantise(
        self, x: Rows, w: kernels.Vector, eps: float, tokens: int, out: Activations
    ) -> None:
        """As `kernels.norm_quantise`."""
        out.values, out.gathered = out.kept, None
        kept = [out.kept, x.width if out.kept else 0]
        arguments = [x.address, x.width, self._address(w), eps, x.width, *out.addresses, *kept]
        self._gpu.launch("norm_quantise", (tokens, 1, 1), _norm_threads(x.width), arguments)

    def quantise(self, x: Rows, tokens: int, out: Activations) -> None:
        """As `kernels.quantise`; float matrices read the rows of `x` itself."""
        out.values, out.gathered = x.address, None
        arguments = [x.address, x.width, x.width, *out.addresses]
        spans = -(-x.width // SPAN_VALUES)
        grid = tokens, -(-spans // QUANTISE_SPANS), 1
        self._gpu.launch("quantise", grid, WARP * QUANTISE_SPANS, arguments)

    def quantise_pairs(self, x: Rows, pairs: ExpertPairs, out: Activations) -> None:
        """As `kernels.quantise_pairs`; float matrices read the rows of `x` itself."""
        self.quantise(x, pairs.tokens * pairs.n_used, out)

    def take_rows(self, x: Rows, indices: I32, out: Rows) -> None:
        """As `kernels.take_rows`."""
        at = self._indices_of(indices)
        arguments = [x.address, x.width, at, x.width, out.address, out.width]
        self._gpu.launch("take_rows", (len(indices), 1, 1), THREADS, arguments)

    def nonfinite_rows(self, x: Rows, tokens: int) -> BadRows:
        """As `kernels.nonfinite_rows`; they may be fetched before they are looked at."""
        arguments = [x.address, x.width, x.width, x.nonfinite]
        self._gpu.launch("nonfinite_rows", (tokens, 1, 1), THREADS, arguments)
        return BadRows(self._gpu, x.nonfinite, tokens)

    # -- products

    def linear(
        self,
        x: Activations,
        matrices: Sequence[kernels.Matrix],
        biases: Sequence[kernels.Vector | None],
        tokens: int,
        out: Rows,
    ) -> None:
        """As `kernels.linear`."""
        column = first = 0
        for i, matrix in enumerate(matrices):
            if i + 1 < len(matrices) and self._is_followed(i, matrices, biases):
                continue
            rows = sum([one.rows for one in matrices[first : i + 1]])
            address = self._address(matrices[first])
            to = OutputAt(self._address(biases[first]), STORE, out.address + 4 * column, out.width)
            self._products.launch(x, MatrixAt(address, matrix.kind, rows, matrix.cols), tokens, to)
            column, first = column + rows, i + 1

    def _is_followed(
        self, i: int, matrices: Sequence[kernels.Matrix], biases: Sequence[kernels.Vector | None]
    ) -> bool:
        """Whether matrix i + 1 and its bias lie directly behind matrix i and its bias in the memory
        of the GPU, so that a product can treat both as one."""
        (matrix, other), (bias, other_bias) = matrices[i : i + 2], biases[i : i + 2]
        if (matrix.kind, matrix.cols) != (other.kind, other.cols) or matrix.rows % TILE_ROWS:
            return False
        if self._held[other] != self._held[matrix] + matrix.bytes:
            return False
        if bias is None or other_bias is None:
            return bias is other_bias
        return self._held[other_bias] == self._held[bias] + 4 * bias.size

    def linear_add(
        self,
        x: Activations,
        matrix: kernels.Matrix,
        bias: kernels.Vector | None,
        tokens: int,
        out: Rows,
    ) -> None:
        """As `kernels.linear_add`."""
        self._product(x, matrix, bias, tokens, ADD, out)

    def linear_gated(
        self,
        x: Activations,
        gate: kernels.Matrix | None,
        up: kernels.Matrix,
        gate_bias: kernels.Vector | None,
        up_bias: kernels.Vector | None,
        tokens: int,
        out: Rows,
        activation: str = "silu",
        limit: float = 0.0,
    ) -> None:
        """As `kernels.linear_gated`: for few tokens one launch, if the matrices are of one kind."""
        then = then_of("linear_gated", activation, gate, gate_bias, limit)
        first = NO_GATE
        if gate is not None:
            is_small = gate.kind not in FLOATS and tokens <= FEW_TOKENS_MAX
            if is_small and gate.kind == up.kind:
                first = GateAt(self._address(gate), self._address(gate_bias))
            else:
                self._product(x, gate, gate_bias, tokens, STORE, out)
        self._product(x, up, up_bias, tokens, then, out, first, limit)

    def _product(
        self,
        x: Activations,
        matrix: kernels.Matrix,
        bias: kernels.Vector | None,
        tokens: int,
        then: int,
        out: Rows,
        gate: GateAt = NO_GATE,
        limit: float = 0.0,
    ) -> None:
        at = MatrixAt(self._address(matrix), matrix.kind, matrix.rows, matrix.cols)
        to = OutputAt(self._address(bias), then, out.address, out.width, limit)
        self._products.launch(x, at, tokens, to, gate)

    # -- attention

    def place_kv(
        self,
        qkv: Rows,
        batch: Batch,
        shape: kernels.PageShape,
        layer: int,
        n_head: int,
        q_norm: kernels.Vector | None,
        k_norm: kernels.Vector | None,
        eps: float,
        rope: kernels.RopeTable | None,
        scale: float,
        queries: Queries,
        rows: KvRows,
        v_norm: kernels.Vector | None = None,
        has_kv: bool = True,
        norms_rotated: bool = False,
    ) -> None:
        """As `kernels.place_kv`, with rows in any case."""
        at, place = shape.layer(layer), self._place(shape, layer)
        is_neox = rope is not None and rope.style == "neox"
        n_of_kv = 0 if not has_kv else 1 if at.v_first else 2
        self._gpu.launch(
            "place_kv",
            (batch.n_tokens, n_head + n_of_kv * at.n_kv_head, 1),
            64,
            [
                *(qkv.address, qkv.width, batch.positions, batch.written(place.part)),
                *(place.offset // LINE_BYTES, shape.row_bytes, at.row_offset),
                *(n_head, at.n_kv_head, at.head_dim),
                *(self._address(q_norm), self._address(k_norm), self._address(v_norm), eps),
                *(self._address(rope), 0 if rope is None else rope.n_rot, int(is_neox)),
                *(LOG2_E * scale / at.transform_width, self._query_scales.get(rope, 0)),
                *(queries.q, queries.scale, rows.address, at.v_first, int(norms_rotated)),
            ],
        )

    def attend(
        self,
        queries: Queries,
        batch: Batch,
        shape: kernels.PageShape,
        layer: int,
        out: Rows,
        quantised: Activations | None = None,
        window: int = 0,
        sinks: kernels.Sinks | None = None,
    ) -> None:
        """As `kernels.attend`, and `quantise` of all tokens of the step."""
        window, at = min(window, WINDOW_MAX), shape.layer(layer)
        place = self._place(shape, layer)
        if quantised is not None:
            quantised.values = out.address
        q8 = [0, 0, 0] if quantised is None else quantised.addresses
        heads = queries.n_head, at.n_kv_head, at.head_dim
        is_latent = at.v_first > 0
        tiles = batch.tiles(TileHeads(*heads, window, place.part, is_latent))
        results = [tiles.m, tiles.denominators, tiles.o]
        for rows, each, first, n_tiles, superpages in tiles.launches:
            table = tiles.address_of(first)
            self._gpu.launch(
                _attend_kernel(rows, each, at),
                (n_tiles, at.n_kv_head, superpages * each),
                THREADS,
                [
                    queries.q,
                    queries.scale,
                    table,
                    batch.pages(place.part),
                    place.offset // LINE_BYTES,
                    *heads,
                    *results,
                    *(window, at.v_first),
                ],
            )
            self._gpu.launch(
                "fold_attention",
                (n_tiles, at.n_kv_head, rows),
                min(at.head_dim, THREADS),
                [
                    *(table, *results, *heads, each, out.address, out.width, *q8),
                    *(window, self._address(sinks)),
                ],
            )

    # -- what goes back to the CPU

    def step_digests(self, rows: KvRows, seeds: U64) -> U64:
        """As `kernels.step_digests`; fetches the rows and waits for the GPU."""
        fetched = rows.fetch(len(seeds))
        self._gpu.synchronize()
        return kernels.step_digests(self._pool, fetched, seeds)

    def sample(self, logits: Rows, rows: Sequence[kernels.SampleSpec]) -> list[kernels.Sampled]:
        """As `kernels.sample`: all of it on the GPU. Errors as of `begin_sample`; waits for the
        GPU."""
        begun = self.begin_sample(logits, rows)
        self._gpu.synchronize()
        return begun.chosen()

    def begin_sample(
        self, logits: Rows, rows: Sequence[kernels.SampleSpec], taken: Taken = NOTHING_TAKEN
    ) -> BegunSample:
        """`sample`, without the wait. ValueError for a token of a history or a bias outside the
        vocabulary. taken: the rows whose last token of the history is one of the last call."""
        n, vocab = len(rows), logits.width
        if n == 0:
            return BegunSample(0, np.zeros(0, np.int32), [])
        table = np.frombuffer(bytearray().join([spec.row for spec in rows]), SAMPLE_ROW)
        table["first_history"] = np.cumsum(table["n_history"]) - table["n_history"]
        table["first_bias"] = np.cumsum(table["n_bias"]) - table["n_bias"]
        history = np.concatenate([spec.history for spec in rows])
        bias = np.array([pair for spec in rows for pair in spec.bias], BIAS)
        for ids in (history, bias["token"]):
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab):
                raise ValueError("sample: a token that is not in the vocabulary")
        words = np.array([len(spec.mask) for spec in rows])
        if not ((words == 0) | (words == -(-vocab // 32))).all():
            raise ValueError("sample: a mask has another size")
        table["first_mask"] = np.where(words > 0, np.cumsum(words) - words, -1)
        masks = np.concatenate([spec.mask for spec in rows])
        given = table, history, bias["token"], bias["value"], masks
        n_best = max(0, int(table["logprobs"].max()))
        got = np.empty(2 * n * (1 + n_best), np.int32)
        ends = (table["first_history"] + table["n_history"] - 1).tolist()
        lasts = {ends[row]: of for row, of in taken.items() if table["n_history"][row]}
        *copied, sources, places = self._given.send((*given, *_arrays_of(lasts)))
        self._take_samples(lasts, (sources, places), copied[1])  # from what is overwritten now
        tokens = self._out.reserve(got.nbytes)
        logprobs, top_tokens = tokens + 4 * n, tokens + 8 * n
        arguments = [
            *(logits.address, logits.width, vocab),
            *copied,
            *(self._adjusted.reserve(4 * n * vocab), self._weights.reserve(4 * n * vocab)),
            *(tokens, logprobs, top_tokens, top_tokens + 4 * n * n_best, n_best),
        ]
        threads = min(-(-vocab // 32) * 32, SAMPLE_THREADS_MAX)
        self._gpu.launch("sample", (n, 1, 1), threads, arguments)
        self._gpu.fetch(tokens, got)
        return BegunSample(n_best, got, table["logprobs"].clip(0, vocab).tolist())

    def read_rows(self, rows: Rows, n: int) -> NDArray[np.float32]:
        """A copy of the first rows; waits for the GPU."""
        values = np.empty((n, rows.width), np.float32)
        self._gpu.copy_out(rows.address, values)
        return values
