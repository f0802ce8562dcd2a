"""Causal attention over KV pages (`AttentionSpec`): norm, q k v, append, attend, output.

A mixer has two halves. `mix` runs for every row of a step, because K and V of all of them must be
appended; `add_output` runs for the rows that are wanted, once they are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import kernels
from batchengine.model.ops import Ops, is_float, read_row
from batchengine.weights import AttentionSpec, AttentionWeights

# Queries of a step, KV layer, where its rows go, window and sinks: attention to pages that lie
# elsewhere too.
Attend = Callable[[kernels.Queries, int, kernels.Rows, int, kernels.Sinks | None], None]


class AttentionBuffers:
    """Rows of one step, shared by the attention layers of a model."""

    def __init__(
        self,
        ops: Ops,
        spec: AttentionSpec,
        weights: Iterable[AttentionWeights],
        tokens_max: int,
        wanted_max: int,
        n_embd: int,
    ) -> None:
        keep_float = any(is_float(w.output) for w in weights)
        kv_rows = 2 * spec.kv_rows if spec.has_kv else 0
        self.qkv = ops.make_rows(tokens_max, spec.q_rows + kv_rows)
        self.queries = ops.make_queries(tokens_max, spec.n_head, spec.head_dim)
        self.mixed = ops.make_rows(tokens_max, spec.q_rows)
        self.gate = ops.make_rows(tokens_max if spec.has_gate else 0, spec.gate_rows)
        self.wanted = ops.make_rows(wanted_max, spec.q_rows)
        # Before the norm of the output, if it has one.
        self.output = ops.make_rows(tokens_max if spec.has_post_norm else 0, n_embd)
        self.mixed_q8 = ops.make_activations(tokens_max, spec.q_rows, keep_float)


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer of a lane; kv_layer is the index of its rows in a page, or of those that
    it reads."""

    ops: Ops
    spec: AttentionSpec
    weights: AttentionWeights
    eps: float
    rope: kernels.RopeTable
    shape: kernels.PageShape
    rows: kernels.KvRows
    kv_layer: int
    buffers: AttentionBuffers

    def mix(
        self,
        batch: kernels.Batch,
        hidden: kernels.Rows,
        normed: kernels.Activations,
        attend: Attend | None,
        *,
        is_quantised: bool,
    ) -> None:
        """hidden -> buffers.mixed for every token of the batch, and buffers.mixed_q8 if they are to
        be quantised; K and V to pages and rows.

        `attend` takes the place of attention to the pages of the batch, if given.
        """
        ops, spec, w, buffers = self.ops, self.spec, self.weights, self.buffers
        n = batch.n_tokens
        read_row(ops, hidden, w.norm, self.eps, n, normed)
        ops.linear(normed, w.qkv, w.qkv_bias, n, buffers.qkv)
        norms = w.q_norm, w.k_norm
        if spec.norms_whole_qk and w.q_norm is not None and w.k_norm is not None:
            ops.norm_columns(0, w.q_norm, self.eps, n, buffers.qkv)
            ops.norm_columns(spec.q_rows, w.k_norm, self.eps, n, buffers.qkv)
            norms = None, None
        ops.place_kv(
            buffers.qkv,
            batch,
            self.shape,
            self.kv_layer,
            spec.n_head,
            *norms,
            self.eps,
            self.rope if spec.has_rope else None,
            spec.scale,
            buffers.queries,
            self.rows,
            w.v_norm,
            spec.has_kv,
            norms_rotated=spec.norms_rotated,
        )
        quantised = buffers.mixed_q8 if is_quantised else None
        if attend is None:
            at = buffers.queries, batch, self.shape, self.kv_layer, buffers.mixed
            ops.attend(*at, quantised if w.gate is None else None, spec.window, w.sinks)
            if w.gate is None:
                return
        else:
            attend(buffers.queries, self.kv_layer, buffers.mixed, spec.window, w.sinks)
        if w.gate is not None:
            ops.linear(normed, [w.gate], [None], n, buffers.gate)
            ops.gate_rows(buffers.gate, n, buffers.mixed)
        if quantised is not None:
            ops.quantise(buffers.mixed, n, quantised)

    def add_output(self, n: int, hidden: kernels.Rows) -> None:
        """hidden += output(mixed_q8), for the first `n` rows.

        Where the weights have a second norm, what is added is normed.
        """
        w, ops, buffers = self.weights, self.ops, self.buffers
        if w.post_norm is None:
            ops.linear_add(buffers.mixed_q8, w.output, w.output_bias, n, hidden)
            return
        ops.linear(buffers.mixed_q8, [w.output], [w.output_bias], n, buffers.output)
        ops.norm_add(buffers.output, w.post_norm, self.eps, n, hidden)
