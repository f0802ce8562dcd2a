"""The mixture of experts (`MoeSpec`): norm, selector, the chosen experts of each token, residual.

A (token, expert) pair is a row of its own: the pairs of a step, sorted by expert, are computed
group by group, so that each expert's weights are read once. The result of a pair depends on its
token and expert alone, and a token's pairs are summed in the order of their experts: what else a
step computes changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import kernels
from batchengine.model.ops import Ops, is_float
from batchengine.weights import MoeSpec, MoeWeights
from batchengine.weights.roles import SharedRoles


class MoeBuffers:
    """Rows of one step, and its pairs, shared by mixtures of specs that differ in their limits."""

    def __init__(
        self,
        ops: Ops,
        spec: MoeSpec,
        weights: Iterable[MoeWeights],
        tokens_max: int,
        n_embd: int,
    ) -> None:
        banks = list(weights)
        self.logits = ops.make_rows(tokens_max, spec.n_expert)
        self.pairs = ops.make_expert_pairs(tokens_max, spec.n_expert, spec.n_used)
        rows = self.pairs.rows_max
        keep_float = any(is_float(m) for w in banks for m in (w.gate, w.up) if m is not None)
        self.gathered = ops.make_activations(rows, spec.n_latent or n_embd, keep_float)
        self.gated = ops.make_rows(rows, spec.n_ff)
        self.gated_q8 = ops.make_activations(rows, spec.n_ff, any(is_float(w.down) for w in banks))
        self.latent: LatentBuffers | None = None
        if spec.n_latent:
            keep_float |= any(is_float(w.latent_up) for w in banks if w.latent_up is not None)
            self.latent = LatentBuffers(
                ops.make_rows(tokens_max, spec.n_latent),
                ops.make_activations(tokens_max, spec.n_latent, keep_float),
            )
        # Before the norm of the sum of all, if it has one.
        self.output = ops.make_rows(tokens_max if spec.has_post_norm else 0, n_embd)
        shared = [w.shared for w in banks if w.shared is not None]
        self.shared: SharedBuffers | None = None
        if shared:
            keep_float = any(is_float(of.down) for of in shared)
            weighted_max = tokens_max if spec.has_shared_weight else 0
            self.shared = SharedBuffers(
                ops.make_rows(weighted_max, 1),
                ops.make_rows(tokens_max, spec.n_ff_shared),
                ops.make_activations(tokens_max, spec.n_ff_shared, keep_float),
                ops.make_rows(weighted_max, n_embd),
            )


class LatentBuffers(NamedTuple):
    """What experts read in place of the row, then their sum: values, and quantised."""

    rows: kernels.Rows
    rows_q8: kernels.Activations


class SharedBuffers(NamedTuple):
    """Rows of the expert that every token uses: its weight, and what it makes of the token. Without
    a weight, what it makes is added at once, and `weight` and `output` are empty."""

    weight: kernels.Rows
    gated: kernels.Rows
    gated_q8: kernels.Activations
    output: kernels.Rows


@dataclass(frozen=True, slots=True)
class MoeFfn:
    """The feed-forward part of one layer of a lane."""

    ops: Ops
    spec: MoeSpec
    weights: MoeWeights
    eps: float
    buffers: MoeBuffers

    def add(
        self,
        hidden: kernels.Rows,
        n: int,
        normed: kernels.Activations,
        out: kernels.Rows | None = None,
    ) -> None:
        """hidden, or `out` if it is given, += the weighted sum of what the chosen experts make of
        the normed rows of hidden, for the first `n` rows; then, if there is one, += what the shared
        expert makes of them, times the sigmoid of its selector if it has one. Where the spec has a
        second norm, the sum of both is normed and added. `normed` keeps floats, which selectors
        read."""
        to, post_norm = hidden if out is None else out, self.weights.post_norm
        if not self.spec.has_post_norm or post_norm is None:
            self._add_all(hidden, n, normed, to)
            return
        self.ops.zero_rows(n, self.buffers.output)
        self._add_all(hidden, n, normed, self.buffers.output)
        self.ops.norm_add(self.buffers.output, post_norm, self.eps, n, to)

    def _add_all(
        self, hidden: kernels.Rows, n: int, normed: kernels.Activations, to: kernels.Rows
    ) -> None:
        """to += what experts and the shared expert make of the normed rows of hidden."""
        ops, w, buffers, spec = self.ops, self.weights, self.buffers, self.spec
        pairs, gated = buffers.pairs, buffers.gated
        ops.norm_quantise(hidden, w.selector_norm or w.norm, self.eps, n, normed)
        ops.linear(normed, [w.selector], [w.selector_bias], n, buffers.logits)
        gating = spec.gating, w.choice_bias, w.scales, spec.n_group, spec.n_group_used
        ops.select_experts(buffers.logits, n, spec.scale, pairs, *gating)
        if w.selector_norm is not None:
            ops.norm_quantise(hidden, w.norm, self.eps, n, normed)
        ops.gather_pairs(self._projected(n, normed), pairs, buffers.gathered)
        biases, function = (w.gate_bias, w.up_bias), (spec.activation, spec.limit)
        ops.pairs_gated(buffers.gathered, w.gate, w.up, pairs, gated, *biases, *function)
        ops.quantise_pairs(gated, pairs, buffers.gated_q8)
        self._add_pairs(n, to)
        if w.shared is not None and buffers.shared is not None:
            self._add_shared(w.shared, buffers.shared, to, n, normed)

    def _projected(self, n: int, normed: kernels.Activations) -> kernels.Activations:
        """What experts read: the normed rows, or a projection of them."""
        down, latent = self.weights.latent_down, self.buffers.latent
        if down is None or latent is None:
            return normed
        self.ops.linear(normed, [down], [None], n, latent.rows)
        self.ops.quantise(latent.rows, n, latent.rows_q8)
        return latent.rows_q8

    def _add_pairs(self, n: int, to: kernels.Rows) -> None:
        """to += the weighted sum of the outputs of experts, or what projects it back."""
        ops, w, buffers, latent = self.ops, self.weights, self.buffers, self.buffers.latent
        of_pairs = buffers.gated_q8, w.down, buffers.pairs
        if w.latent_up is None or latent is None:
            ops.pairs_add(*of_pairs, to, w.down_bias)
            return
        ops.zero_rows(n, latent.rows)
        ops.pairs_add(*of_pairs, latent.rows, w.down_bias)
        ops.quantise(latent.rows, n, latent.rows_q8)
        ops.linear_add(latent.rows_q8, w.latent_up, None, n, to)

    def _add_shared(
        self,
        w: SharedRoles[kernels.Matrix],
        buffers: SharedBuffers,
        hidden: kernels.Rows,
        n: int,
        normed: kernels.Activations,
    ) -> None:
        ops = self.ops
        if w.selector is not None:
            ops.linear(normed, [w.selector], [None], n, buffers.weight)
        at = None, None, n, buffers.gated
        ops.linear_gated(normed, w.gate, w.up, *at, self.spec.activation, self.spec.shared_limit)
        ops.quantise(buffers.gated, n, buffers.gated_q8)
        if w.selector is None:
            ops.linear_add(buffers.gated_q8, w.down, None, n, hidden)
            return
        ops.linear(buffers.gated_q8, [w.down], [None], n, buffers.output)
        ops.gate_add(buffers.output, buffers.weight, n, hidden)
