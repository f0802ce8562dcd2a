"""A recurrent layer (`RecurrentSpec`): norm, inputs, convolution and recurrence, output.

As attention it has two halves: `mix` runs for every row of a step, because each changes the state;
`add_output` runs for the rows that are wanted, once they are quantised. A state is read and written
as a whole (kernels.StateShape); a step does not change the one that it reads.

Rows may turn out not to belong to their timeline, as a draft was wrong. A layer keeps the inputs of
the rows that its caller names, and `rewind` computes the state from those of them that stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

import kernels
from batchengine.model.layers.attention import Attend
from batchengine.model.ops import I32, Ops, is_float
from batchengine.weights import DeltaNetRoles, Mamba2Roles, RecurrentWeights

KEPT_MIN = 16  # rows of drafts for which there is memory at first


class RecurrentBuffers:
    """Rows of one step, shared by the recurrent layers of a model."""

    def __init__(
        self,
        ops: Ops,
        shape: kernels.StateShape,
        weights: Iterable[RecurrentWeights],
        tokens_max: int,
        wanted_max: int,
    ) -> None:
        keep_float = any(is_float(w.output) for w in weights)
        self.inputs = ops.make_rows(tokens_max, shape.in_width)
        self.mixed = ops.make_rows(tokens_max, shape.value_width)
        self.wanted = ops.make_rows(wanted_max, shape.value_width)
        self.mixed_q8 = ops.make_activations(tokens_max, shape.value_width, keep_float)
        self.to_keep: I32 = np.zeros(0, np.int32)  # rows of the step that is set
        self.kept: list[kernels.Rows] = []  # their inputs by layer of the state; more for `rewind`
        self._make_rows, self._n_layer = ops.make_rows, shape.n_layer
        self._widths = shape.in_width, shape.value_width
        self._kept_max = 0

    def keep(self, rows: I32) -> None:
        """Have the layers keep the inputs of these rows of the step. Raises MemoryError; what there
        was memory for is not made again by the next call."""
        self.to_keep = rows
        if len(rows) > self._kept_max:
            # A GPU gets back no rows: doubled, the smaller ones take as much as the last at most.
            self.kept, self._kept_max = [], max(KEPT_MIN, 1 << (len(rows) - 1).bit_length())
        in_width, value_width = self._widths
        while len(rows) and len(self.kept) <= self._n_layer:
            self.kept.append(self._make_rows(self._kept_max, in_width))
        if len(rows) and len(self.kept) == self._n_layer + 1:
            self.kept.append(self._make_rows(self._kept_max, value_width))

    @property
    def again(self) -> tuple[kernels.Rows, kernels.Rows]:
        """Room for the kept inputs that stay, and for what they are mixed to once more."""
        return self.kept[self._n_layer], self.kept[self._n_layer + 1]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """One recurrent layer of a lane; state_layer is its index among those that a state has."""

    ops: Ops
    weights: RecurrentWeights
    eps: float
    shape: kernels.StateShape
    state_layer: int
    buffers: RecurrentBuffers

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
        if len(buffers.to_keep):
            ops.take_rows(buffers.inputs, buffers.to_keep, buffers.kept[self.state_layer])
        self._recur(buffers.inputs, batch, buffers.mixed)
        if is_quantised:
            ops.quantise(buffers.mixed, n, buffers.mixed_q8)

    def rewind(self, batch: kernels.Batch, rows: I32) -> None:
        """Write the states behind the entries of `batch`, whose inputs are these of the kept rows,
        in order."""
        inputs, mixed = self.buffers.again
        self.ops.take_rows(self.buffers.kept[self.state_layer], rows, inputs)
        self._recur(inputs, batch, mixed)

    def _recur(self, inputs: kernels.Rows, batch: kernels.Batch, out: kernels.Rows) -> None:
        w, ops, at = self.weights, self.ops, (batch, self.shape, self.state_layer)
        if isinstance(w, DeltaNetRoles):
            ops.delta_net(inputs, *at, w.conv, w.dt_bias, w.a, w.value_norm, self.eps, out)
        elif isinstance(w, Mamba2Roles):
            vectors = w.conv, w.conv_bias, w.dt_bias, w.a, w.d, w.value_norm
            ops.mamba2(inputs, *at, *vectors, self.eps, out)
        else:
            ops.short_conv(inputs, *at, w.conv, out)

    def add_output(self, n: int, hidden: kernels.Rows) -> None:
        """hidden += output(mixed_q8), for the first `n` rows."""
        self.ops.linear_add(self.buffers.mixed_q8, self.weights.output, None, n, hidden)
