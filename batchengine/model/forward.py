"""The forward pass: the layers of a model in order, over the kernels API.

Owns `Model` (weights, RoPE tables, page shape) and `Stepper` (the buffers of one lane: a step is
set, run, logits). The layer kinds are in `batchengine.model.layers`. Everything here only orders
kernel calls; no number of the model is computed in Python. One step costs ten calls per layer (13
with experts, 12 with second norms) and no numpy allocation: 0.2 ms of Python and binding for 28
layers.
NaN and infinity are never replaced: entries with such a row are returned as nonfinite.

Rows of a step are the tokens of its entries in order; entries are independent timelines. The
result of a row depends on the tokens of its own timeline alone, never on the rest of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kernels
from batchengine.model.layers import (
    Attend,
    Attention,
    AttentionBuffers,
    DenseBuffers,
    DenseFfn,
    LayerEmbeddings,
    LayerInputBuffers,
    LayerInputs,
    MlaAttention,
    MlaBuffers,
    MoeBuffers,
    MoeFfn,
    PairedBuffers,
    PairedFfn,
    Recurrent,
    RecurrentBuffers,
)
from batchengine.model.ops import I32, U64, Ops, is_float
from batchengine.weights import (
    AttentionRoles,
    AttentionSpec,
    AttentionWeights,
    AttentionWidths,
    DeltaNetSpec,
    DenseRoles,
    DenseSpec,
    DenseWeights,
    FfnSpec,
    LayerWeights,
    Mamba2Spec,
    MlaRoles,
    MlaWeights,
    MoeRoles,
    MoeSpec,
    MoeWeights,
    PairedRoles,
    PairedSpec,
    PairedWeights,
    RecurrentSpec,
    RopeSpec,
    Weights,
)

F32 = npt.NDArray[np.float32]


class Model:
    """Weights with what is derived from them once: the RoPE tables and the shape of a KV page.

    `layers` are those of this lane; a page has rows of the attention layers among them, whose
    `windows` are 0 where queries see all; `states` is the shape of the recurrent state of the
    others; None = there are none.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.spec = weights.spec
        self.layers = weights.layers
        mixers = [self.spec.layers[index].mixer for index in self.layers]
        owners = [m for m in mixers if isinstance(m, AttentionSpec) and m.has_kv]
        self.shape = kernels.PageShape([of.kv_heads for of in owners])
        self.windows = tuple([of.window for of in owners])
        self.states: kernels.StateShape | None = None
        n_recurrent = sum(not isinstance(mixer, AttentionSpec) for mixer in mixers)
        if (recurrent := self.spec.recurrent) is not None and n_recurrent:
            self.states = _state_shape(recurrent, n_recurrent)
        rotations = dict.fromkeys((of.rope, of.head_dim) for of in self.spec.attentions)
        self.ropes = {rotation: self._table(*rotation) for rotation in rotations}

    def _table(self, rope: RopeSpec, head_dim: int) -> kernels.RopeTable:
        factors = self.weights.rope_factors if rope.has_factors else None
        if factors is not None and factors.size > rope.n_rot // 2:
            factors = kernels.Vector(factors.view()[: rope.n_rot // 2].data)
        return kernels.RopeTable(
            rope.style,
            head_dim,
            rope.n_rot,
            rope.base,
            factors or _factors(rope.factors),
            rope.position_scale,
            rope.attn_factor,
            rope.query_log,
            rope.query_span,
        )

    def rope_digest(self) -> str:
        """What the rotations of all layers are."""
        return " ".join(str(table.digest()) for table in self.ropes.values())

    def __repr__(self) -> str:
        return f"<Model {self.spec!r} pages of {self.shape.payload_bytes} bytes>"


def _factors(factors: Sequence[float]) -> kernels.Vector | None:
    return kernels.Vector(np.array(factors, np.float32).data) if factors else None


def _state_shape(spec: RecurrentSpec, n_layer: int) -> kernels.StateShape:
    if isinstance(spec, DeltaNetSpec):
        heads = spec.n_k_head, spec.n_v_head, spec.head_dim
        return kernels.StateShape(n_layer, *heads, spec.conv_kernel, spec.key_run)
    if isinstance(spec, Mamba2Spec):
        heads = spec.n_group, spec.n_head, spec.head_dim
        return kernels.StateShape.mamba2(n_layer, *heads, spec.state_dim, spec.conv_kernel)
    return kernels.StateShape.short_conv(n_layer, spec.width, spec.conv_kernel)


Mixer = Attention | MlaAttention | Recurrent
Ffn = DenseFfn | MoeFfn | PairedFfn


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a lane, ready to run. inputs: what it adds for its own embeddings; scale: what
    the residual stream is multiplied by behind it. branch: rows for what mixer and ffn add, where
    the model scales it by branch_scale."""

    ops: Ops
    mixer: Mixer
    ffn: Ffn | None
    inputs: LayerInputs | None = None
    scale: float | None = None
    branch: kernels.Rows | None = None
    branch_scale: float = 1.0

    def finish(
        self,
        n: int,
        hidden: kernels.Rows,
        normed: kernels.Activations,
        embeddings: kernels.Rows | None,
    ) -> None:
        """What follows the layer's mixer, for the first `n` rows of the residual stream."""
        if self.branch is not None:
            self._add_scaled(n, hidden, normed, self.branch)
        else:
            self.mixer.add_output(n, hidden)
            if self.ffn is not None:
                self.ffn.add(hidden, n, normed)
        if self.inputs is not None and embeddings is not None:
            self.inputs.add(hidden, n, embeddings)
        if self.scale is not None:
            self.ops.scale_rows(self.scale, n, hidden)

    def _add_scaled(
        self, n: int, hidden: kernels.Rows, normed: kernels.Activations, branch: kernels.Rows
    ) -> None:
        """hidden += branch_scale * what the mixer adds, then the same for the ffn."""
        ops = self.ops
        ops.zero_rows(n, branch)
        self.mixer.add_output(n, branch)
        ops.scaled_add(branch, self.branch_scale, n, hidden)
        if self.ffn is not None:
            ops.zero_rows(n, branch)
            self.ffn.add(hidden, n, normed, branch)
            ops.scaled_add(branch, self.branch_scale, n, hidden)


def make_layers(
    ops: Ops, model: Model, rows: kernels.KvRows, tokens_max: int, wanted_max: int
) -> dict[int, Layer]:
    """The layers of a lane by index. Buffers are shared: those of mixers by all layers of a kind,
    those of feed-forward parts by layers whose specs differ in limits alone."""
    specs = {i: model.spec.layers[i] for i in model.layers}
    weights = model.weights.layer
    mixers = _make_mixers(ops, model, rows, tokens_max, wanted_max)
    ffns: dict[int, Ffn] = {}
    alike: dict[FfnSpec, dict[int, FfnSpec]] = {}
    for index, layer in specs.items():
        if layer.ffn is not None:
            alike.setdefault(layer.ffn.unlimited, {})[index] = layer.ffn
    for of_layers in alike.values():
        ffns |= _make_ffns(ops, model, of_layers, tokens_max)
    branch: kernels.Rows | None = None
    if (scale := model.spec.residual_scale) != 1.0:
        branch = ops.make_rows(max(tokens_max, wanted_max), model.spec.n_embd)
    inputs = _make_inputs(ops, model, tokens_max)
    return {
        index: Layer(
            ops,
            mixer,
            ffns.get(index),
            inputs.get(index),
            _scale_of(weights[index]),
            branch,
            scale,
        )
        for index, mixer in mixers.items()
    }


def _make_inputs(ops: Ops, model: Model, tokens_max: int) -> dict[int, LayerInputs]:
    """What layers add for their own embeddings, of a model that has some."""
    spec = model.spec
    found = {i: of for i in model.layers if (of := model.weights.layer[i].inputs) is not None}
    if not found:
        return {}
    buffers = LayerInputBuffers(ops, spec, found.values(), tokens_max)
    width = spec.n_embd_layer
    return {i: LayerInputs(ops, of, spec.eps, i * width, buffers) for i, of in found.items()}


def _scale_of(weights: LayerWeights) -> float | None:
    return None if weights.scale is None else float(weights.scale.view()[0])


def _make_mixers(
    ops: Ops, model: Model, rows: kernels.KvRows, tokens_max: int, wanted_max: int
) -> dict[int, Mixer]:
    """The parts that mix tokens, by layer; each kind counts its layers by itself."""
    spec, eps = model.spec, model.spec.eps
    weights = {index: model.weights.layer[index].mixer for index in model.layers}
    attending = {i: w for i, w in weights.items() if isinstance(w, AttentionRoles)}
    latent = {i: w for i, w in weights.items() if isinstance(w, MlaRoles)}
    recurrent = {i: w for i, w in weights.items() if not isinstance(w, AttentionRoles | MlaRoles)}
    mixers: dict[int, Mixer] = {}
    mixers |= _make_latent(ops, model, rows, latent, tokens_max, wanted_max)
    attentions = {
        i: mixer for i in attending if isinstance(mixer := spec.layers[i].mixer, AttentionSpec)
    }
    buffers = _make_attention_buffers(
        ops, attentions, attending, tokens_max, wanted_max, spec.n_embd
    )
    kv_layers = {i: n for n, i in enumerate([i for i, of in attentions.items() if of.has_kv])}
    for index, mixer in attentions.items():
        rope = model.ropes[mixer.rope, mixer.head_dim]
        at = model.shape, rows, kv_layers[index if mixer.has_kv else mixer.kv_from]
        of = attending[index]
        mixers[index] = Attention(ops, mixer, of, eps, rope, *at, buffers[mixer.widths])
    if model.states is not None:
        weights_of = recurrent.values()
        buffers = RecurrentBuffers(ops, model.states, weights_of, tokens_max, wanted_max)
        for layer, (index, of) in enumerate(recurrent.items()):
            mixers[index] = Recurrent(ops, of, eps, model.states, layer, buffers)
    return {index: mixers[index] for index in model.layers}


def _make_latent(
    ops: Ops,
    model: Model,
    rows: kernels.KvRows,
    weights: Mapping[int, MlaWeights],
    tokens_max: int,
    wanted_max: int,
) -> dict[int, MlaAttention]:
    """The layers of a model with MLA, all of one shape."""
    spec = model.spec.attention
    if spec.mla is None or not weights:
        return {}
    buffers = MlaBuffers(ops, spec, spec.mla, weights.values(), tokens_max, wanted_max)
    rope = model.ropes[spec.rope, spec.head_dim]
    made: dict[int, MlaAttention] = {}
    for layer, (index, of) in enumerate(weights.items()):
        at = rope, model.shape, rows, layer, buffers
        made[index] = MlaAttention(ops, spec, spec.mla, of, model.spec.eps, *at)
    return made


def _make_attention_buffers(
    ops: Ops,
    attentions: Mapping[int, AttentionSpec],
    weights: Mapping[int, AttentionWeights],
    tokens_max: int,
    wanted_max: int,
    n_embd: int,
) -> dict[AttentionWidths, AttentionBuffers]:
    """The buffers of attention, which layers of equal widths share."""
    made: dict[AttentionWidths, AttentionBuffers] = {}
    for spec in attentions.values():
        if spec.widths not in made:
            equal = [weights[i] for i, of in attentions.items() if of.widths == spec.widths]
            made[spec.widths] = AttentionBuffers(ops, spec, equal, tokens_max, wanted_max, n_embd)
    return made


def _make_ffns(
    ops: Ops, model: Model, specs: Mapping[int, FfnSpec], tokens_max: int
) -> Mapping[int, Ffn]:
    """The feed-forward parts of layers, whose specs differ in limits alone; they share their
    buffers."""
    dense, moe, paired = DenseParts(), MoeParts(), dict[int, PairedWeights]()
    for index, spec in specs.items():
        weights = model.weights.layer[index].ffn
        if isinstance(spec, DenseSpec) and isinstance(weights, DenseRoles):
            dense[index] = spec, weights
        elif isinstance(spec, MoeSpec) and isinstance(weights, MoeRoles):
            moe[index] = spec, weights
        elif isinstance(spec, PairedSpec) and isinstance(weights, PairedRoles):
            dense[index], moe[index] = (spec.dense, weights.dense), (spec.experts, weights.experts)
            paired[index] = weights
    eps, n_embd = model.spec.eps, model.spec.n_embd
    denses = _make_dense(ops, dense, eps, tokens_max, n_embd)
    experts = _make_experts(ops, moe, eps, tokens_max, n_embd)
    if not paired:
        return denses or experts
    buffers = PairedBuffers(ops, tokens_max, n_embd)
    return {i: PairedFfn(ops, w, eps, denses[i], experts[i], buffers) for i, w in paired.items()}


DenseParts = dict[int, tuple[DenseSpec, DenseWeights]]
MoeParts = dict[int, tuple[MoeSpec, MoeWeights]]


def _make_dense(
    ops: Ops, parts: DenseParts, eps: float, tokens_max: int, n_embd: int
) -> dict[int, DenseFfn]:
    if not parts:
        return {}
    first = next(iter(parts.values()))[0]
    buffers = DenseBuffers(ops, first, [w for _, w in parts.values()], tokens_max, n_embd)
    return {i: DenseFfn(ops, spec, w, eps, buffers) for i, (spec, w) in parts.items()}


def _make_experts(
    ops: Ops, parts: MoeParts, eps: float, tokens_max: int, n_embd: int
) -> dict[int, MoeFfn]:
    if not parts:
        return {}
    first = next(iter(parts.values()))[0]
    buffers = MoeBuffers(ops, first, [w for _, w in parts.values()], tokens_max, n_embd)
    return {i: MoeFfn(ops, spec, w, eps, buffers) for i, (spec, w) in parts.items()}


class KeptInputs(NamedTuple):
    """An entry whose inputs recurrent layers keep: the first of its kept rows, how many there are,
    where its state is read and written, and its first page, or the parts of it."""

    first: int
    n_tokens: int
    states: U64
    page: U64


class Stepper:
    """Runs steps of one model on one lane: `set` the entries, then `forward`, then `logits`.

    The order of calls is the caller's: a pipeline stage fills `hidden` itself and runs a part of
    the layers; a whole model calls run(), which skips the last layer's feed-forward part for the
    rows that are not wanted. Buffers are allocated once: tokens_max rows through the layers,
    logits_max (default entries_max) rows through the head.
    """

    def __init__(
        self,
        ops: Ops,
        model: Model,
        *,
        tokens_max: int,
        entries_max: int,
        pages_max: int,
        logits_max: int | None = None,
    ) -> None:
        self.ops = ops
        self.model = model
        self.logits_max = logits_max or entries_max
        self.batch = ops.make_batch(tokens_max, entries_max, pages_max)
        self._limits = tokens_max, entries_max, entries_max  # of a batch of which a page is named
        self.rows = ops.make_kv_rows(tokens_max, model.shape)
        self._layers = make_layers(ops, model, self.rows, tokens_max, self.logits_max)
        n_embd, weights = model.spec.n_embd, model.weights
        keep_float = any(
            is_float(matrix)
            for w in weights.layer.values()
            for matrix in (*w.mixer.readers, *(w.ffn.readers if w.ffn is not None else []))
        )
        self.hidden = ops.make_rows(tokens_max, n_embd)  # residual stream, a row per token
        self._normed = ops.make_activations(tokens_max, n_embd, keep_float)
        self._last = ops.make_rows(self.logits_max, n_embd)  # wanted rows of `hidden`
        self._last_q8 = ops.make_activations(self.logits_max, n_embd, is_float(weights.head))
        self.logits_rows = ops.make_rows(self.logits_max, model.spec.n_vocab)  # of logits()
        self._embeddings: LayerEmbeddings | None = None  # of the layers' own
        if weights.layer_embeddings is not None:
            of = weights.layer_embeddings
            self._embeddings = LayerEmbeddings(ops, model.spec, of, tokens_max, self.logits_max)
        self._tokens: I32 = np.zeros(0, np.int32)
        self._ends: I32 = np.zeros(0, np.int32)
        self._attend: Attend | None = None
        self._kept: dict[int, KeptInputs] = {}  # by the index of the entry
        mixers = [layer.mixer for layer in self._layers.values()]
        shared = {id(m.buffers): m.buffers for m in mixers if isinstance(m, Recurrent)}
        self._recurrent_buffers = tuple(shared.values())

    @property
    def n_tokens(self) -> int:
        """Tokens of the step that is set."""
        return self.batch.n_tokens

    def set(
        self,
        tokens: I32,
        entries: I32,
        page_addresses: U64,
        attend: Attend | None = None,
        states: U64 | None = None,
        drafts: Sequence[int] = (),
    ) -> None:
        """Set the step: tokens of all entries in order; entries (n, 3) of n_tokens, start position
        and n_pages; page addresses of all entries in order, or of each part of the pages, if the
        ops know parts. With `attend`, which computes the attention of each layer then, they may be
        0. states (n, 2), of a model with recurrent state: where each entry's is read, 0 at position
        0, and where the next one is written. drafts: how many of the last tokens of each entry
        `rewind` may take back; empty: none. ValueError if they do not fit; MemoryError for drafts.
        """
        if (states is None) == (self.model.states is not None):
            raise ValueError("states are for models with recurrent state, and needed by these")
        absent = attend is not None
        self.batch.set(tokens, entries, page_addresses, absent_pages=absent)
        if states is not None:
            read, written = np.ascontiguousarray(states.T)
            self.batch.set_states(read, written)
            self._keep(drafts, entries, page_addresses, states)
        self._attend = attend
        self._tokens = tokens
        self._ends = np.cumsum(entries[:, 0], dtype=np.int32)

    def _keep(self, drafts: Sequence[int], entries: I32, pages: U64, states: U64) -> None:
        """Have the recurrent layers keep the inputs of entries with drafts."""
        self._kept = {}
        rows, first, page = list[int](), 0, 0
        for index, (drafted, (n, _, n_pages)) in enumerate(
            zip(drafts, entries.tolist(), strict=False)
        ):
            if drafted:
                self._kept[index] = KeptInputs(len(rows), n, states[index], pages[..., page])
                rows += range(first, first + n)
            first, page = first + n, page + n_pages
        for buffers in self._recurrent_buffers:
            buffers.keep(np.array(rows, np.int32))

    def rewind(self, rejected: Sequence[tuple[int, int]]) -> None:
        """Write the states of entries once more, as without the last tokens of each: pairs of the
        index of an entry with a draft and how many. Call once nothing else of the step is wanted.
        Nothing happens in a model without recurrent state."""
        if not self._kept or not rejected:
            return
        of = [(self._kept[index], n) for index, n in rejected]
        counts = [kept.n_tokens - n for kept, n in of]
        entries = np.array([(n, 0, 1) for n in counts], np.int32)
        pages = np.stack([kept.page for kept, _ in of], axis=-1)  # a batch names some
        self._rewound.set(np.zeros(sum(counts), np.int32), entries, pages)
        reads, writes = np.array([kept.states for kept, _ in of], np.uint64).T
        self._rewound.set_states(np.ascontiguousarray(reads), np.ascontiguousarray(writes))
        spans = [range(kept.first, kept.first + n) for (kept, _), n in zip(of, counts, strict=True)]
        rows = np.array([row for span in spans for row in span], np.int32)
        for layer in self._layers.values():
            if isinstance(layer.mixer, Recurrent):
                layer.mixer.rewind(self._rewound, rows)

    @functools.cached_property
    def _rewound(self) -> kernels.Batch:
        return self.ops.make_batch(*self._limits)

    def embed(self) -> None:
        """Fills the residual stream with the embeddings of the step's tokens."""
        model = self.model
        self.ops.embed(model.weights.embedding, self._tokens, self.hidden, model.spec.embed_scale)
        if self._embeddings is not None:
            self._embeddings.compute(self._tokens, self.hidden)

    def forward(self, layers: Sequence[int]) -> None:
        """Runs the residual stream through `layers`, appending K and V to the pages."""
        n, embeddings = self.n_tokens, self._embeddings and self._embeddings.rows
        for index in layers:
            layer = self._layers[index]
            layer.mixer.mix(self.batch, self.hidden, self._normed, self._attend, is_quantised=True)
            layer.finish(n, self.hidden, self._normed, embeddings)

    def run(self, wanted: I32) -> list[int]:
        """The whole model for this step: residual rows `wanted` end up ready for logits().

        Returns the nonfinite entries: those with a row that holds a NaN or an infinity.
        """
        return self.nonfinite(wanted, self.start(wanted))

    def start(self, wanted: I32) -> list[Sequence[int]]:
        """As run(). Returns what `nonfinite` is given, without a wait for another device."""
        layers, ops = self.model.layers, self.ops
        self.embed()
        self.forward(layers[:-1])
        last = self._layers[layers[-1]]
        buffers = last.mixer.buffers
        last.mixer.mix(self.batch, self.hidden, self._normed, self._attend, is_quantised=False)
        bad_rows = [
            ops.nonfinite_rows(rows, self.n_tokens) for rows in (self.hidden, buffers.mixed)
        ]
        if len(wanted):
            bad_rows.append(self.finish(wanted))
        return bad_rows

    def finish(self, wanted: I32) -> Sequence[int]:
        """Runs what `start` has left out, for at most logits_max rows of its step, which end up
        ready for logits(); once `start` has run, for other rows too.

        Returns the indexes in `wanted` of those that hold a NaN or an infinity.
        """
        ops, last = self.ops, self._layers[self.model.layers[-1]]
        buffers = last.mixer.buffers
        self.take(wanted)
        ops.take_rows(buffers.mixed, wanted, buffers.wanted)
        ops.quantise(buffers.wanted, len(wanted), buffers.mixed_q8)
        embeddings = None
        if self._embeddings is not None:
            self._embeddings.take(wanted)
            embeddings = self._embeddings.wanted
        last.finish(len(wanted), self._last, self._normed, embeddings)
        return ops.nonfinite_rows(self._last, len(wanted))

    def nonfinite(self, wanted: I32, bad_rows: Sequence[Sequence[int]]) -> list[int]:
        """The nonfinite entries of the step that is set; `start` has returned its `bad_rows`."""
        return nonfinite_entries(self._ends, wanted, bad_rows)

    def run_stage(self, layers: Sequence[int]) -> bool:
        """Runs the residual stream through `layers` for their KV; False if it is not finite.

        Of the model's last layer only what is appended to the pages is computed.
        """
        ops, n, last = self.ops, self.n_tokens, self.model.layers[-1]
        self.forward([index for index in layers if index != last])
        bad_rows: Sequence[int] = ()
        if layers[-1] == last:
            mixer = self._layers[last].mixer
            mixer.mix(self.batch, self.hidden, self._normed, self._attend, is_quantised=False)
            bad_rows = ops.nonfinite_rows(mixer.buffers.mixed, n)
        return not (bad_rows or ops.nonfinite_rows(self.hidden, n))

    def row_digests(self, seeds: U64) -> U64:
        """Seeded digests of the page rows that this step wrote, one per token, after run()."""
        return self.ops.step_digests(self.rows, seeds)

    def take(self, wanted: I32) -> None:
        """Moves rows of the residual stream to where logits() reads them."""
        self.ops.take_rows(self.hidden, wanted, self._last)

    def logits(self, n_rows: int) -> kernels.Rows:
        """Logits (n_rows, n_vocab) of the rows taken last; the next step reuses the buffer."""
        weights = self.model.weights
        self.ops.norm_quantise(
            self._last, weights.output_norm, self.model.spec.eps, n_rows, self._last_q8
        )
        self.ops.linear(
            self._last_q8, [weights.head], [weights.head_bias], n_rows, self.logits_rows
        )
        if (scale := self.model.spec.logit_scale) != 1.0:
            self.ops.scale_rows(scale, n_rows, self.logits_rows)
        if cap := self.model.spec.logit_cap:
            self.ops.cap_rows(cap, n_rows, self.logits_rows)
        return self.logits_rows


def nonfinite_entries(ends: I32, wanted: I32, bad_rows: Sequence[Sequence[int]]) -> list[int]:
    """The nonfinite entries of a step, as `Stepper.nonfinite`; `ends`: the row behind each."""
    hidden, mixed, *last = bad_rows
    rows = [*hidden, *mixed, *(int(wanted[i]) for of in last for i in of)]
    return sorted({int(np.searchsorted(ends, row, side="right")) for row in rows})
