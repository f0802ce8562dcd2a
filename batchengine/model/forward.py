"""The forward pass: any layer range of llama, qwen2 and qwen3, over the kernels API.

Owns `CpuOps` (the kernels bound to one thread pool), `Model` (weights, RoPE table, page shape)
and `Stepper` (the scratch of one lane: a step is set, run, logits). Everything here only
orders kernel calls; no number of the model is computed in Python. One step costs ten calls per
layer and no numpy allocation: 0.03 ms of Python for 28 layers.
Refuses to sanitise: a row with a NaN or an infinity makes its entry *poisoned*, and says so.

Rows of a step are the tokens of its entries in order; entries are independent timelines. The
result of a row depends on the tokens of its own timeline alone, never on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

import kernels
from batchengine.weights import LayerWeights, ModelSpec, Weights

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]


class CpuOps:
    """The kernels bound to one pinned thread pool; a lane of another kind has the same names."""

    def __init__(self, pool: kernels.Pool) -> None:
        self.pool = pool
        self.embed = partial(kernels.embed, pool)
        self.norm_quantise = partial(kernels.norm_quantise, pool)
        self.quantise = partial(kernels.quantise, pool)
        self.linear = partial(kernels.linear, pool)
        self.linear_add = partial(kernels.linear_add, pool)
        self.linear_gated = partial(kernels.linear_gated, pool)
        self.place_kv = partial(kernels.place_kv, pool)
        self.attend = partial(kernels.attend, pool)
        self.nonfinite_rows = partial(kernels.nonfinite_rows, pool)
        self.sample = partial(kernels.sample, pool)
        self.take_rows = kernels.take_rows


class Model:
    """Weights with what is derived from them once: the RoPE table and the shape of a KV page."""

    def __init__(self, weights: Weights) -> None:
        spec = weights.spec
        self.weights = weights
        self.spec = spec
        self.layers = weights.layers
        self.shape = kernels.PageShape(len(weights.layers), spec.n_kv_head, spec.head_dim)
        self.rope = kernels.RopeTable(
            spec.rope_style,
            spec.head_dim,
            spec.n_rot,
            spec.rope_base,
            weights.rope_factors,
            spec.position_scale,
            spec.attn_factor,
        )

    def __repr__(self) -> str:
        return f"<Model {self.spec!r} pages of {self.shape.payload_bytes} bytes>"


class Scratch:
    """The buffers of one step, allocated once.

    tokens_max rows through the layers, logits_max rows through the head.
    """

    def __init__(self, model: Model, tokens_max: int, logits_max: int) -> None:
        spec, weights = model.spec, model.weights
        layers = list(weights.layer.values())
        narrow = any(_is_float(m) for w in layers for m in (*w.qkv, w.gate, w.up))
        attention = any(_is_float(w.attn_output) for w in layers)
        wide = any(_is_float(w.down) for w in layers)
        self.tokens_max = tokens_max
        self.logits_max = logits_max
        self.hidden = kernels.Rows(tokens_max, spec.n_embd)
        self.normed = kernels.Activations(tokens_max, spec.n_embd, narrow)
        self.qkv = kernels.Rows(tokens_max, spec.q_rows + 2 * spec.kv_rows)
        self.queries = kernels.Queries(tokens_max, spec.n_head, spec.head_dim)
        self.attended = kernels.Rows(tokens_max, spec.q_rows)
        self.attended_q8 = kernels.Activations(tokens_max, spec.q_rows, attention)
        self.gated = kernels.Rows(tokens_max, spec.n_ff)
        self.gated_q8 = kernels.Activations(tokens_max, spec.n_ff, wide)
        # The wanted rows alone, from the last layer's attention on.
        self.last = kernels.Rows(logits_max, spec.n_embd)
        self.last_attended = kernels.Rows(logits_max, spec.q_rows)
        self.last_q8 = kernels.Activations(logits_max, spec.n_embd, _is_float(weights.head))
        self.logits = kernels.Rows(logits_max, spec.n_vocab)


def _is_float(matrix: kernels.Matrix) -> bool:
    return matrix.kind in ("f16", "bf16", "f32")


class Stepper:
    """Runs steps of one model on one lane: `set` the entries, then `forward`, then `logits`.

    The order of calls is the caller's: a pipeline stage fills `hidden` itself and runs a part of
    the layers; a whole model calls run(), which skips the last layer's feed-forward part for
    rows nobody reads.
    """

    def __init__(
        self,
        ops: CpuOps,
        model: Model,
        *,
        tokens_max: int,
        entries_max: int,
        pages_max: int,
        logits_max: int | None = None,
    ) -> None:
        self.ops = ops
        self.model = model
        self.batch = kernels.Batch(tokens_max, entries_max, pages_max)
        self.scratch = Scratch(model, tokens_max, logits_max or entries_max)
        self.n_tokens = 0
        self._tokens: I32 = np.zeros(0, np.int32)
        self._ends: I32 = np.zeros(0, np.int32)

    @property
    def hidden(self) -> kernels.Rows:
        """Residual stream, one row per token of the step, fp32."""
        return self.scratch.hidden

    def set(self, tokens: I32, entries: I32, page_addresses: U64) -> None:
        """The step: tokens of all entries in order; entries (n, 3) of n_tokens, start position
        and n_pages; page addresses of all entries in order. ValueError if they do not fit.
        """
        self.batch.set(tokens, entries, page_addresses)
        self._tokens = tokens
        self.n_tokens = len(tokens)
        self._ends = np.cumsum(entries[:, 0], dtype=np.int32)

    def embed(self) -> None:
        """Fills the residual stream with the embeddings of the step's tokens."""
        self.ops.embed(self.model.weights.embedding, self._tokens, self.scratch.hidden)

    def forward(self, layers: range) -> None:
        """Runs the residual stream through `layers`, appending K and V to the pages."""
        for index in layers:
            self._attention(index)
            weights, scratch, n = self.model.weights.layer[index], self.scratch, self.n_tokens
            self._finish(weights, scratch.attended, scratch.hidden, n)

    def run(self, wanted: I32) -> list[int]:
        """The whole model for this step: residual rows `wanted` end up ready for logits().

        Returns the poisoned entries: those with a row that is not finite.
        """
        layers = self.model.layers
        scratch, ops = self.scratch, self.ops
        self.embed()
        self.forward(layers[:-1])
        last = layers[-1]
        self._attention(last)
        bad_rows = ops.nonfinite_rows(scratch.hidden, self.n_tokens)
        bad_rows += ops.nonfinite_rows(scratch.attended, self.n_tokens)
        if len(wanted):
            ops.take_rows(scratch.hidden, wanted, scratch.last)
            ops.take_rows(scratch.attended, wanted, scratch.last_attended)
            weights = self.model.weights.layer[last]
            self._finish(weights, scratch.last_attended, scratch.last, len(wanted))
            bad_rows += [int(wanted[i]) for i in ops.nonfinite_rows(scratch.last, len(wanted))]
        return self.entries_of(bad_rows)

    def take(self, wanted: I32) -> None:
        """Moves rows of the residual stream to where logits() reads them."""
        self.ops.take_rows(self.scratch.hidden, wanted, self.scratch.last)

    def logits(self, n_rows: int) -> kernels.Rows:
        """Logits (n_rows, n_vocab) of the rows taken last; the next step reuses the buffer."""
        weights, scratch = self.model.weights, self.scratch
        self.ops.norm_quantise(
            scratch.last, weights.output_norm, self.model.spec.eps, n_rows, scratch.last_q8
        )
        self.ops.linear(
            scratch.last_q8, [weights.head], [weights.head_bias], n_rows, scratch.logits
        )
        return scratch.logits

    def entries_of(self, rows: Sequence[int]) -> list[int]:
        """Indexes of the entries that the given rows of the step belong to."""
        return sorted({int(np.searchsorted(self._ends, row, side="right")) for row in rows})

    def _attention(self, index: int) -> None:
        """hidden -> attended, for every row; appends K and V of layer `index`."""
        model, ops, scratch, n = self.model, self.ops, self.scratch, self.n_tokens
        spec: ModelSpec = model.spec
        w = model.weights.layer[index]
        place = index - model.layers.start  # a page holds the layers of this lane only
        ops.norm_quantise(scratch.hidden, w.attn_norm, spec.eps, n, scratch.normed)
        ops.linear(scratch.normed, w.qkv, w.qkv_bias, n, scratch.qkv)
        ops.place_kv(
            scratch.qkv,
            self.batch,
            model.shape,
            place,
            spec.n_head,
            w.q_norm,
            w.k_norm,
            spec.eps,
            model.rope,
            spec.attention_scale,
            scratch.queries,
        )
        ops.attend(scratch.queries, self.batch, model.shape, place, scratch.attended)

    def _finish(
        self, w: LayerWeights, attended: kernels.Rows, hidden: kernels.Rows, n: int
    ) -> None:
        """The rest of a layer after attention, for `n` rows: output, residual, feed-forward."""
        ops, scratch = self.ops, self.scratch
        ops.quantise(attended, n, scratch.attended_q8)
        ops.linear_add(scratch.attended_q8, w.attn_output, w.attn_output_bias, n, hidden)
        ops.norm_quantise(hidden, w.ffn_norm, self.model.spec.eps, n, scratch.normed)
        ops.linear_gated(scratch.normed, w.gate, w.up, w.gate_bias, w.up_bias, n, scratch.gated)
        ops.quantise(scratch.gated, n, scratch.gated_q8)
        ops.linear_add(scratch.gated_q8, w.down, w.down_bias, n, hidden)
