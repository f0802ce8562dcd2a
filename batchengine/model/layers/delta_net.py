"""A gated delta network (`DeltaNetSpec`): norm, inputs, convolution and recurrence, output.

As attention it has two halves: `mix` runs for every row of a step, because each changes the state;
`add_output` runs for the rows that are wanted, once they are quantised. A state is read and written
as a whole (kernels.StateShape); a step does not change the one that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import kernels
from batchengine.model.layers.attention import Attend
from batchengine.model.ops import Ops, is_float
from batchengine.weights import DeltaNetSpec, DeltaNetWeights


class DeltaNetBuffers:
    """Rows of one step, shared by the recurrent layers of a model."""

    def __init__(
        self,
        ops: Ops,
        shape: kernels.StateShape,
        spec: DeltaNetSpec,
        weights: Iterable[DeltaNetWeights],
        tokens_max: int,
        wanted_max: int,
    ) -> None:
        keep_float = any(is_float(w.output) for w in weights)
        self.inputs = ops.make_rows(tokens_max, shape.in_width)
        self.mixed = ops.make_rows(tokens_max, spec.value_width)
        self.wanted = ops.make_rows(wanted_max, spec.value_width)
        self.mixed_q8 = ops.make_activations(tokens_max, spec.value_width, keep_float)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """One recurrent layer of a lane; state_layer is its index among those that a state has."""

    ops: Ops
    weights: DeltaNetWeights
    eps: float
    shape: kernels.StateShape
    state_layer: int
    buffers: DeltaNetBuffers

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
        be quantised; the states behind each entry are written. `attend` is for other layers."""
        ops, w, buffers, n = self.ops, self.weights, self.buffers, batch.n_tokens
        ops.norm_quantise(hidden, w.norm, self.eps, n, normed)
        ops.linear(normed, w.inputs, [None] * len(w.inputs), n, buffers.inputs)
        vectors = w.conv, w.dt_bias, w.a, w.value_norm
        at = batch, self.shape, self.state_layer
        ops.delta_net(buffers.inputs, *at, *vectors, self.eps, buffers.mixed)
        if is_quantised:
            ops.quantise(buffers.mixed, n, buffers.mixed_q8)

    def add_output(self, n: int, hidden: kernels.Rows) -> None:
        """hidden += output(mixed_q8), for the first `n` rows."""
        self.ops.linear_add(self.buffers.mixed_q8, self.weights.output, None, n, hidden)
