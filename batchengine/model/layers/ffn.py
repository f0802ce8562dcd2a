"""The dense feed-forward part (`DenseSpec`): norm, gate and up, silu, down, residual."""

from __future__ import annotations

from collections.abc import Iterable

import kernels
from batchengine.model.ops import CpuOps, is_float
from batchengine.weights import DenseSpec, DenseWeights


class DenseBuffers:
    """Rows of one step, shared by the feed-forward parts of one spec."""

    def __init__(self, spec: DenseSpec, weights: Iterable[DenseWeights], tokens_max: int) -> None:
        keep_float = any(is_float(w.down) for w in weights)
        self.gated = kernels.Rows(tokens_max, spec.n_ff)
        self.gated_q8 = kernels.Activations(tokens_max, spec.n_ff, keep_float)


class DenseFfn:
    """The feed-forward part of one layer of a lane."""

    def __init__(
        self, ops: CpuOps, weights: DenseWeights, *, eps: float, buffers: DenseBuffers
    ) -> None:
        self._ops = ops
        self._weights = weights
        self._eps = eps
        self._buffers = buffers

    def add(self, hidden: kernels.Rows, n: int, normed: kernels.Activations) -> None:
        """hidden += down(silu(gate·x) * (up·x)) of the normed rows, for the first `n` rows."""
        ops, w, buffers = self._ops, self._weights, self._buffers
        ops.norm_quantise(hidden, w.norm, self._eps, n, normed)
        ops.linear_gated(normed, w.gate, w.up, w.gate_bias, w.up_bias, n, buffers.gated)
        ops.quantise(buffers.gated, n, buffers.gated_q8)
        ops.linear_add(buffers.gated_q8, w.down, w.down_bias, n, hidden)
