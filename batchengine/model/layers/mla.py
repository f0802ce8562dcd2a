"""Multi-head latent attention (`AttentionSpec.mla`): K and V of a token are one latent row.

The absorbed form, for prompts too: each head maps its query to the latent rows, attends to them as
all heads of one KV head do, and maps the result to its output. The halves of a mixer are those of
`Attention`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import kernels
from batchengine.model.layers.attention import Attend
from batchengine.model.ops import Ops, is_float
from batchengine.weights import AttentionSpec, MlaSpec, MlaWeights


class MlaBuffers:
    """Rows of one step, shared by the layers of a model with MLA."""

    def __init__(
        self,
        ops: Ops,
        spec: AttentionSpec,
        mla: MlaSpec,
        weights: Iterable[MlaWeights],
        tokens_max: int,
        wanted_max: int,
    ) -> None:
        layers, heads = list(weights), spec.n_head
        self.q_down = ops.make_rows(tokens_max if mla.q_rank else 0, mla.q_rank)
        keep_float = any(is_float(matrix) for w in layers for matrix in w.queries)
        self.q_down_q8 = ops.make_activations(
            tokens_max if mla.q_rank else 0, mla.q_rank, keep_float
        )
        self.nope = ops.make_rows(tokens_max, heads * mla.nope_dim)
        keep_float = any(is_float(w.key_bank) for w in layers)
        self.nope_q8 = ops.make_head_activations(tokens_max, heads, mla.nope_dim, keep_float)
        self.rotated = ops.make_rows(tokens_max, heads * spec.rope.n_rot)
        self.kv = ops.make_rows(tokens_max, spec.head_dim)
        self.qk = ops.make_rows(tokens_max, spec.q_rows + spec.head_dim)
        self.queries = ops.make_queries(tokens_max, heads, spec.head_dim)
        self.attended = ops.make_rows(tokens_max, spec.q_rows)
        keep_float = any(is_float(w.value_bank) for w in layers)
        self.attended_q8 = ops.make_head_activations(tokens_max, heads, mla.kv_rank, keep_float)
        width, keep_float = heads * mla.value_dim, any(is_float(w.output) for w in layers)
        self.mixed = ops.make_rows(tokens_max, width)
        self.wanted = ops.make_rows(wanted_max, width)
        self.mixed_q8 = ops.make_activations(tokens_max, width, keep_float)


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """One layer of a lane; kv_layer is the index of its rows in a page."""

    ops: Ops
    spec: AttentionSpec
    mla: MlaSpec
    weights: MlaWeights
    eps: float
    rope: kernels.RopeTable
    shape: kernels.PageShape
    rows: kernels.KvRows
    kv_layer: int
    buffers: MlaBuffers

    def mix(
        self,
        batch: kernels.Batch,
        hidden: kernels.Rows,
        normed: kernels.Activations,
        attend: Attend | None,
        *,
        is_quantised: bool,
    ) -> None:
        """As `Attention.mix`."""
        ops, spec, w, buffers = self.ops, self.spec, self.weights, self.buffers
        n, n_rot = batch.n_tokens, spec.rope.n_rot
        ops.norm_quantise(hidden, w.norm, self.eps, n, normed)
        self._project_queries(n, normed)
        ops.linear(normed, w.kv, [None, None], n, buffers.kv)
        ops.norm_columns(n_rot, w.kv_norm, self.eps, n, buffers.kv)
        ops.copy_heads(buffers.kv, 1, n, buffers.qk, spec.q_rows, spec.head_dim)
        at = batch, self.shape, self.kv_layer, spec.n_head, None, None, self.eps
        rope = self.rope, spec.scale
        ops.place_kv(buffers.qk, *at, *rope, buffers.queries, self.rows)
        if attend is None:
            ops.attend(buffers.queries, batch, self.shape, self.kv_layer, buffers.attended)
        else:
            attend(buffers.queries, self.kv_layer, buffers.attended, 0, None)
        width = self.shape.layer(self.kv_layer).transform_width
        ops.transform_heads(buffers.attended, spec.n_head, n_rot, width, n)
        ops.quantise_heads(buffers.attended, n_rot, n, buffers.attended_q8)
        value_dim = self.mla.value_dim
        ops.linear_heads(buffers.attended_q8, w.value_bank, n, buffers.mixed, 0, value_dim)
        if is_quantised:
            ops.quantise(buffers.mixed, n, buffers.mixed_q8)

    def _project_queries(self, n: int, normed: kernels.Activations) -> None:
        """normed -> the heads of q in buffers.qk: rotated values, then those for latent rows."""
        ops, spec, w, buffers = self.ops, self.spec, self.weights, self.buffers
        source = normed
        if w.q_down is not None and w.q_norm is not None:
            ops.linear(normed, [w.q_down], [None], n, buffers.q_down)
            ops.norm_quantise(buffers.q_down, w.q_norm, self.eps, n, buffers.q_down_q8)
            source = buffers.q_down_q8
        nope, rotated = w.queries
        ops.linear(source, [nope], [None], n, buffers.nope)
        ops.linear(source, [rotated], [None], n, buffers.rotated)
        ops.quantise_heads(buffers.nope, 0, n, buffers.nope_q8)
        n_rot, stride = spec.rope.n_rot, spec.head_dim
        ops.linear_heads(buffers.nope_q8, w.key_bank, n, buffers.qk, n_rot, stride)
        ops.copy_heads(buffers.rotated, spec.n_head, n, buffers.qk, 0, stride)

    def add_output(self, n: int, hidden: kernels.Rows) -> None:
        """hidden += output(mixed_q8), for the first `n` rows."""
        w, buffers = self.weights, self.buffers
        self.ops.linear_add(buffers.mixed_q8, w.output, None, n, hidden)
