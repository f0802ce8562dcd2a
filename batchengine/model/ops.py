"""The operations of a lane, and the buffers that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import kernels

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Weight = kernels.Matrix
Bias = kernels.Vector | None


# The operations that may be long.
LONG = (
    "linear", "linear_add", "linear_gated", "pairs_gated", "pairs_add", "linear_heads", "place_kv",
    "attend", "delta_net", "mamba2", "short_conv",
)  # fmt: skip


class Ops(Protocol):
    """The functions of `kernels` that a forward pass calls, on one device.

    Their arguments are those of `kernels`, without the pool, and their results have the same bits.
    Buffers are made by the Ops that uses them: on another device than the CPU, the class of that
    device takes the place of the one that is named here, and only Ops look into it.
    """

    def make_rows(self, tokens_max: int, width: int) -> kernels.Rows: ...
    def make_activations(
        self, tokens_max: int, width: int, keep_float: bool
    ) -> kernels.Activations: ...
    def make_queries(self, tokens_max: int, n_head: int, head_dim: int) -> kernels.Queries: ...
    def make_batch(self, tokens_max: int, entries_max: int, pages_max: int) -> kernels.Batch: ...
    def make_kv_rows(self, tokens_max: int, shape: kernels.PageShape) -> kernels.KvRows: ...
    def make_expert_pairs(
        self, tokens_max: int, n_expert: int, n_used: int
    ) -> kernels.ExpertPairs: ...
    def make_head_activations(
        self, tokens_max: int, n_head: int, width: int, keep_float: bool
    ) -> kernels.HeadActivations: ...

    def embed(self, matrix: Weight, tokens: I32, out: kernels.Rows, scale: float = 1.0) -> None: ...
    def norm_add(
        self, x: kernels.Rows, w: kernels.Vector, eps: float, tokens: int, out: kernels.Rows
    ) -> None: ...
    def norm_quantise(
        self, x: kernels.Rows, w: kernels.Vector, eps: float, tokens: int, out: kernels.Activations
    ) -> None: ...
    def quantise(self, x: kernels.Rows, tokens: int, out: kernels.Activations) -> None: ...
    def linear(
        self,
        x: kernels.Activations,
        matrices: list[Weight],
        biases: list[Bias],
        tokens: int,
        out: kernels.Rows,
    ) -> None: ...
    def linear_add(
        self, x: kernels.Activations, matrix: Weight, bias: Bias, tokens: int, out: kernels.Rows
    ) -> None: ...
    def linear_gated(
        self,
        x: kernels.Activations,
        gate: Weight | None,
        up: Weight,
        gate_bias: Bias,
        up_bias: Bias,
        tokens: int,
        out: kernels.Rows,
        activation: str = "silu",
        limit: float = 0.0,
    ) -> None: ...
    def select_experts(
        self,
        logits: kernels.Rows,
        tokens: int,
        scale: float,
        pairs: kernels.ExpertPairs,
        gating: str = "softmax",
        bias: Bias = None,
        scales: Bias = None,
        n_group: int = 1,
        n_group_used: int = 1,
    ) -> None: ...
    def gather_pairs(
        self, x: kernels.Activations, pairs: kernels.ExpertPairs, out: kernels.Activations
    ) -> None: ...
    def pairs_gated(
        self,
        x: kernels.Activations,
        gate: Weight | None,
        up: Weight,
        pairs: kernels.ExpertPairs,
        out: kernels.Rows,
        gate_bias: Bias = None,
        up_bias: Bias = None,
        activation: str = "silu",
        limit: float = 0.0,
    ) -> None: ...
    def quantise_pairs(
        self, x: kernels.Rows, pairs: kernels.ExpertPairs, out: kernels.Activations
    ) -> None: ...
    def pairs_add(
        self,
        x: kernels.Activations,
        down: Weight,
        pairs: kernels.ExpertPairs,
        out: kernels.Rows,
        bias: Bias = None,
    ) -> None: ...
    def place_kv(
        self,
        qkv: kernels.Rows,
        batch: kernels.Batch,
        shape: kernels.PageShape,
        layer: int,
        n_head: int,
        q_norm: kernels.Vector | None,
        k_norm: kernels.Vector | None,
        eps: float,
        rope: kernels.RopeTable | None,
        scale: float,
        queries: kernels.Queries,
        rows: kernels.KvRows | None = None,
        v_norm: kernels.Vector | None = None,
        has_kv: bool = True,
        norms_rotated: bool = False,
    ) -> None: ...
    def quantise_heads(
        self, x: kernels.Rows, column: int, tokens: int, out: kernels.HeadActivations
    ) -> None: ...
    def transform_heads(
        self, x: kernels.Rows, n_head: int, column: int, width: int, tokens: int
    ) -> None: ...
    def linear_heads(
        self,
        x: kernels.HeadActivations,
        bank: Weight,
        tokens: int,
        out: kernels.Rows,
        column: int,
        stride: int,
    ) -> None: ...
    def copy_heads(
        self,
        x: kernels.Rows,
        n_head: int,
        tokens: int,
        out: kernels.Rows,
        column: int,
        stride: int,
    ) -> None: ...
    def attend(
        self,
        queries: kernels.Queries,
        batch: kernels.Batch,
        shape: kernels.PageShape,
        layer: int,
        out: kernels.Rows,
        quantised: kernels.Activations | None = None,
        window: int = 0,
        sinks: kernels.Sinks | None = None,
    ) -> None:
        """Also quantises the rows of the step, if `quantised` is given."""

    def delta_net(
        self,
        projected: kernels.Rows,
        batch: kernels.Batch,
        shape: kernels.StateShape,
        layer: int,
        conv: kernels.Vector,
        dt_bias: kernels.Vector,
        a: kernels.Vector,
        norm: kernels.Vector,
        eps: float,
        out: kernels.Rows,
    ) -> None: ...
    def mamba2(
        self,
        projected: kernels.Rows,
        batch: kernels.Batch,
        shape: kernels.StateShape,
        layer: int,
        conv: kernels.Vector,
        conv_bias: kernels.Vector | None,
        dt_bias: kernels.Vector,
        a: kernels.Vector,
        d: kernels.Vector,
        norm: kernels.Vector | None,
        eps: float,
        out: kernels.Rows,
    ) -> None: ...
    def short_conv(
        self,
        projected: kernels.Rows,
        batch: kernels.Batch,
        shape: kernels.StateShape,
        layer: int,
        conv: kernels.Vector,
        out: kernels.Rows,
    ) -> None: ...
    def gate_rows(self, gate: kernels.Rows, tokens: int, out: kernels.Rows) -> None: ...
    def gate_add(
        self, x: kernels.Rows, gate: kernels.Rows, tokens: int, out: kernels.Rows
    ) -> None: ...
    def zero_rows(self, tokens: int, out: kernels.Rows) -> None: ...
    def scale_rows(self, factor: float, tokens: int, out: kernels.Rows) -> None: ...
    def scaled_add(
        self, x: kernels.Rows, factor: float, tokens: int, out: kernels.Rows
    ) -> None: ...
    def cap_rows(self, cap: float, tokens: int, out: kernels.Rows) -> None: ...
    def gelu_rows(
        self, factors: kernels.Rows, column: int, tokens: int, out: kernels.Rows
    ) -> None: ...
    def mix_inputs(
        self,
        x: kernels.Rows,
        scale: float,
        norm: kernels.Vector,
        eps: float,
        tokens: int,
        out: kernels.Rows,
    ) -> None: ...
    def norm_columns(
        self, column: int, norm: kernels.Vector, eps: float, tokens: int, out: kernels.Rows
    ) -> None: ...
    def step_digests(self, rows: kernels.KvRows, seeds: U64) -> U64: ...
    def take_rows(self, x: kernels.Rows, indices: I32, out: kernels.Rows) -> None: ...
    def nonfinite_rows(self, x: kernels.Rows, tokens: int) -> Sequence[int]: ...
    def sample(
        self, logits: kernels.Rows, rows: Sequence[kernels.SampleSpec]
    ) -> list[kernels.Sampled]: ...


class CpuOps:
    """`Ops` of the CPU: the kernels bound to one pinned thread pool."""

    def __init__(self, pool: kernels.Pool) -> None:
        self.pool = pool
        self.make_rows = kernels.Rows
        self.make_activations = kernels.Activations
        self.make_queries = kernels.Queries
        self.make_batch = kernels.Batch
        self.make_kv_rows = kernels.KvRows
        self.make_expert_pairs = kernels.ExpertPairs
        self.make_head_activations = kernels.HeadActivations
        self.embed = partial(kernels.embed, pool)
        self.norm_add = partial(kernels.norm_add, pool)
        self.norm_quantise = partial(kernels.norm_quantise, pool)
        self.quantise = partial(kernels.quantise, pool)
        self.linear = partial(kernels.linear, pool)
        self.linear_add = partial(kernels.linear_add, pool)
        self.linear_gated = partial(kernels.linear_gated, pool)
        self.select_experts = partial(kernels.select_experts, pool)
        self.gather_pairs = partial(kernels.gather_pairs, pool)
        self.pairs_gated = partial(kernels.pairs_gated, pool)
        self.quantise_pairs = partial(kernels.quantise_pairs, pool)
        self.pairs_add = partial(kernels.pairs_add, pool)
        self.quantise_heads = partial(kernels.quantise_heads, pool)
        self.transform_heads = partial(kernels.transform_heads, pool)
        self.linear_heads = partial(kernels.linear_heads, pool)
        self.copy_heads = partial(kernels.copy_heads, pool)
        self.place_kv = partial(kernels.place_kv, pool)
        self.delta_net = partial(kernels.delta_net, pool)
        self.mamba2 = partial(kernels.mamba2, pool)
        self.short_conv = partial(kernels.short_conv, pool)
        self.gate_rows = partial(kernels.gate_rows, pool)
        self.gate_add = partial(kernels.gate_add, pool)
        self.zero_rows = partial(kernels.zero_rows, pool)
        self.scale_rows = partial(kernels.scale_rows, pool)
        self.scaled_add = partial(kernels.scaled_add, pool)
        self.cap_rows = partial(kernels.cap_rows, pool)
        self.gelu_rows = partial(kernels.gelu_rows, pool)
        self.mix_inputs = partial(kernels.mix_inputs, pool)
        self.norm_columns = partial(kernels.norm_columns, pool)
        self.step_digests = partial(kernels.step_digests, pool)
        self.nonfinite_rows = partial(kernels.nonfinite_rows, pool)
        self.sample = partial(kernels.sample, pool)
        self.take_rows = kernels.take_rows

    def attend(
        self,
        queries: kernels.Queries,
        batch: kernels.Batch,
        shape: kernels.PageShape,
        layer: int,
        out: kernels.Rows,
        quantised: kernels.Activations | None = None,
        window: int = 0,
        sinks: kernels.Sinks | None = None,
    ) -> None:
        """`kernels.attend`, then `quantise`."""
        kernels.attend(self.pool, queries, batch, shape, layer, out, window=window, sinks=sinks)
        if quantised is not None:
            self.quantise(out, batch.n_tokens, quantised)

    def call_between(self, between: Callable[[], None]) -> None:
        """Call `between` after each operation from now on that may be long."""
        for name in LONG:
            setattr(self, name, _then(getattr(self, name), between))


def _then(operation: Callable[..., None], between: Callable[[], None]) -> Callable[..., None]:
    def both(*arguments: Any, **named: Any) -> None:
        operation(*arguments, **named)
        between()

    return both


def read_row(
    ops: Ops,
    x: kernels.Rows,
    norm: kernels.Vector | None,
    eps: float,
    tokens: int,
    out: kernels.Activations,
) -> None:
    """What a part of a layer reads of the residual stream: the first rows, normed if it has a norm,
    and quantised."""
    if norm is None:
        ops.quantise(x, tokens, out)
    else:
        ops.norm_quantise(x, norm, eps, tokens, out)


def is_float(matrix: kernels.Matrix) -> bool:
    """Whether a matrix has unquantised weights, whose activations must keep their floats."""
    return matrix.kind in ("f16", "bf16", "f32")
