"""The dense feed-forward part (`DenseSpec`): norm, gate and up, activation, down, residual."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import kernels
from batchengine.model.ops import Ops, is_float, read_row
from batchengine.weights import DenseSpec, DenseWeights


class DenseBuffers:
    """Rows of one step, shared by the feed-forward parts of specs that differ in their limits."""

    def __init__(
        self,
        ops: Ops,
        spec: DenseSpec,
        weights: Iterable[DenseWeights],
        tokens_max: int,
        n_embd: int,
    ) -> None:
        keep_float = any(is_float(w.down) for w in weights)
        self.gated = ops.make_rows(tokens_max, spec.n_ff)
        self.gated_q8 = ops.make_activations(tokens_max, spec.n_ff, keep_float)
        # Before the norm of the output, if it has one.
        self.output = ops.make_rows(tokens_max if spec.has_post_norm else 0, n_embd)


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """The feed-forward part of one layer of a lane."""

    ops: Ops
    spec: DenseSpec
    weights: DenseWeights
    eps: float
    buffers: DenseBuffers

    def add(
        self,
        hidden: kernels.Rows,
        n: int,
        normed: kernels.Activations,
        out: kernels.Rows | None = None,
    ) -> None:
        """hidden, or `out` if it is given, += down(activation(gate·x) * (up·x)) of the normed rows
        of hidden, for the first `n` rows.

        Where the weights have a second norm, what is added is normed.
        """
        ops, w, buffers = self.ops, self.weights, self.buffers
        to = hidden if out is None else out
        read_row(ops, hidden, w.norm, self.eps, n, normed)
        function = self.spec.activation, self.spec.limit
        biases = w.gate_bias, w.up_bias
        ops.linear_gated(normed, w.gate, w.up, *biases, n, buffers.gated, *function)
        ops.quantise(buffers.gated, n, buffers.gated_q8)
        if w.post_norm is None:
            ops.linear_add(buffers.gated_q8, w.down, w.down_bias, n, to)
            return
        ops.linear(buffers.gated_q8, [w.down], [w.down_bias], n, buffers.output)
        ops.norm_add(buffers.output, w.post_norm, self.eps, n, to)
