"""The dense feed-forward part (`DenseSpec`): norm, gate and up, silu, down, residual."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import kernels
from batchengine.model.ops import Ops, is_float
from batchengine.weights import DenseSpec, DenseWeights


class DenseBuffers:
    """Rows of one step, shared by the feed-forward parts of one spec."""

    def __init__(
        self, ops: Ops, spec: DenseSpec, weights: Iterable[DenseWeights], tokens_max: int
    ) -> None:
        keep_float = any(is_float(w.down) for w in weights)
        self.gated = ops.make_rows(tokens_max, spec.n_ff)
        self.gated_q8 = ops.make_activations(tokens_max, spec.n_ff, keep_float)


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """The feed-forward part of one layer of a lane."""

    ops: Ops
    weights: DenseWeights
    eps: float
    buffers: DenseBuffers

    def add(self, hidden: kernels.Rows, n: int, normed: kernels.Activations) -> None:
        """hidden += down(silu(gate·x) * (up·x)) of the normed rows, for the first `n` rows."""
        ops, w, buffers = self.ops, self.weights, self.buffers
        ops.norm_quantise(hidden, w.norm, self.eps, n, normed)
        ops.linear_gated(normed, w.gate, w.up, w.gate_bias, w.up_bias, n, buffers.gated)
        ops.quantise(buffers.gated, n, buffers.gated_q8)
        ops.linear_add(buffers.gated_q8, w.down, w.down_bias, n, hidden)
