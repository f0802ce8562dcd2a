"""A dense part and a mixture of experts side by side (`PairedSpec`): both read the residual stream,
their outputs are normed and added, and the sum is normed and added to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import kernels
from batchengine.model.layers.ffn import DenseFfn
from batchengine.model.layers.moe import MoeFfn
from batchengine.model.ops import Ops
from batchengine.weights import PairedWeights


class PairedBuffers:
    """Rows of one step, shared by the pairs of one spec."""

    def __init__(self, ops: Ops, tokens_max: int, n_embd: int) -> None:
        self.experts = ops.make_rows(tokens_max, n_embd)  # their sum
        self.both = ops.make_rows(tokens_max, n_embd)


@dataclass(frozen=True, slots=True)
class PairedFfn:
    """The feed-forward part of one layer of a lane."""

    ops: Ops
    weights: PairedWeights
    eps: float
    dense: DenseFfn
    experts: MoeFfn
    buffers: PairedBuffers

    def add(
        self,
        hidden: kernels.Rows,
        n: int,
        normed: kernels.Activations,
        out: kernels.Rows | None = None,
    ) -> None:
        """hidden, or `out` if it is given, += norm(norm of what the dense part makes of hidden +
        norm of what the experts do), for the first `n` rows. `normed` keeps floats, which selectors
        read."""
        ops, w, buffers = self.ops, self.weights, self.buffers
        ops.zero_rows(n, buffers.both)
        self.dense.add(hidden, n, normed, buffers.both)
        ops.zero_rows(n, buffers.experts)
        self.experts.add(hidden, n, normed, buffers.experts)
        if w.experts.post_norm is not None:
            ops.norm_add(buffers.experts, w.experts.post_norm, self.eps, n, buffers.both)
        ops.norm_add(buffers.both, w.post_norm, self.eps, n, hidden if out is None else out)
