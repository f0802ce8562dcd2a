"""Embeddings of a token that layers have of their own (`ModelSpec.n_embd_layer`), and what each
layer makes of its part behind its feed-forward part: gate, gelu, product, norm, residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import kernels
from batchengine.model.ops import I32, Ops, is_float
from batchengine.weights import LayerEmbeddingWeights, LayerInputWeights, ModelSpec


class LayerEmbeddings:
    """The embeddings of the tokens of one step: rows with the parts of all layers, layer 0 first.

    `wanted` has those of the rows that are taken last.
    """

    def __init__(
        self,
        ops: Ops,
        spec: ModelSpec,
        weights: LayerEmbeddingWeights,
        tokens_max: int,
        wanted_max: int,
    ) -> None:
        width = spec.n_embd_layer * spec.n_layer
        self._ops, self._weights, self._eps = ops, weights, spec.eps
        self._scale = math.sqrt(spec.n_embd_layer)
        self._projected_scale = 1 / math.sqrt(spec.n_embd)
        self.rows = ops.make_rows(tokens_max, width)
        self.wanted = ops.make_rows(wanted_max, width)
        self._projected = ops.make_rows(tokens_max, width)
        keep_float = is_float(weights.projection)
        self._hidden_q8 = ops.make_activations(tokens_max, spec.n_embd, keep_float)

    def compute(self, tokens: I32, hidden: kernels.Rows) -> None:
        """Fill `rows` for tokens whose embeddings are the rows of `hidden`."""
        ops, w, n = self._ops, self._weights, len(tokens)
        ops.embed(w.table, tokens, self.rows, self._scale)
        ops.quantise(hidden, n, self._hidden_q8)
        ops.linear(self._hidden_q8, [w.projection], [None], n, self._projected)
        ops.mix_inputs(self._projected, self._projected_scale, w.norm, self._eps, n, self.rows)

    def take(self, wanted: I32) -> None:
        """Fill `wanted` with these of the rows."""
        self._ops.take_rows(self.rows, wanted, self.wanted)


class LayerInputBuffers:
    """Rows of one step, shared by all layers."""

    def __init__(
        self, ops: Ops, spec: ModelSpec, weights: Iterable[LayerInputWeights], tokens_max: int
    ) -> None:
        layers = list(weights)
        gate_float = any(is_float(w.gate) for w in layers)
        output_float = any(is_float(w.output) for w in layers)
        self.hidden_q8 = ops.make_activations(tokens_max, spec.n_embd, gate_float)
        self.gated = ops.make_rows(tokens_max, spec.n_embd_layer)
        self.gated_q8 = ops.make_activations(tokens_max, spec.n_embd_layer, output_float)
        self.output = ops.make_rows(tokens_max, spec.n_embd)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one layer adds for its own embeddings; `column` is where its part of a row begins."""

    ops: Ops
    weights: LayerInputWeights
    eps: float
    column: int
    buffers: LayerInputBuffers

    def add(self, hidden: kernels.Rows, n: int, embeddings: kernels.Rows) -> None:
        """hidden += norm(output(gelu(gate·hidden) * embeddings)), for the first `n` rows."""
        ops, w, buffers = self.ops, self.weights, self.buffers
        ops.quantise(hidden, n, buffers.hidden_q8)
        ops.linear(buffers.hidden_q8, [w.gate], [None], n, buffers.gated)
        ops.gelu_rows(embeddings, self.column, n, buffers.gated)
        ops.quantise(buffers.gated, n, buffers.gated_q8)
        ops.linear(buffers.gated_q8, [w.output], [None], n, buffers.output)
        ops.norm_add(buffers.output, w.post_norm, self.eps, n, hidden)
