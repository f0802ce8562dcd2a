"""Recurrent mixers on a GPU: gated delta networks, Mamba-2 and gated short convolutions."""

from __future__ import annotations

from collections.abc import Callable

import kernels
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import Batch, Rows, Scratch

HEAD_THREADS = 64  # THREADS of recurrent.cu
CHANNEL_THREADS, GROUP_THREADS_MAX = 256, 512  # CHANNEL_THREADS and GROUP_THREADS there
HEAD_FACTORS = 4  # FACTORS there
COLUMNS = 32  # of a state, in a block


class RecurrentOps:
    """The functions of `kernels` for recurrent layers, on one GPU. address_of: where weights lie
    there."""

    def __init__(self, gpu: Gpu, address_of: Callable[[kernels.Vector | None], int]) -> None:
        self._gpu, self._address_of = gpu, address_of
        self._convolved = Scratch(gpu)  # rows of `convolve_heads` and `convolve_channels`

    def delta_net(
        self,
        projected: Rows,
        batch: Batch,
        shape: kernels.StateShape,
        layer: int,
        conv: kernels.Vector,
        dt_bias: kernels.Vector,
        a: kernels.Vector,
        norm: kernels.Vector,
        eps: float,
        out: Rows,
    ) -> None:
        """As `kernels.delta_net`. ValueError if the batch has no states, or the shape another
        kind."""
        _require("delta", shape)
        entry_of, entries = batch.states
        width = shape.channels + HEAD_FACTORS * shape.n_v_head
        convolved = self._convolved.reserve(4 * projected.tokens_max * width)
        weights = [self._address_of(vector) for vector in (conv, dt_bias, a)]
        offset = layer * shape.layer_bytes // 4
        heads = [shape.n_k_head, shape.n_v_head, shape.head_dim]
        rows = [projected.address, projected.width]
        self._gpu.launch(
            "convolve_heads",
            (batch.n_tokens, 2 * shape.n_k_head + shape.n_v_head, 1),
            HEAD_THREADS,
            [
                *(*rows, entry_of, entries, offset, *heads, shape.conv_kernel),
                *(*weights, eps, convolved, width),
            ],
        )
        self._gpu.launch(
            "recur_heads",
            (batch.n_entries, shape.n_v_head, shape.head_dim // COLUMNS),
            shape.head_dim,
            [convolved, width, entries, offset, *heads, shape.key_run, out.address, out.width],
        )
        self._gpu.launch(
            "gate_heads",
            (batch.n_tokens, shape.n_v_head, 1),
            HEAD_THREADS,
            [
                *(*rows, shape.channels, shape.head_dim, self._address_of(norm), eps),
                *(out.address, out.width),
            ],
        )

    def mamba2(
        self,
        projected: Rows,
        batch: Batch,
        shape: kernels.StateShape,
        layer: int,
        conv: kernels.Vector,
        conv_bias: kernels.Vector | None,
        dt_bias: kernels.Vector,
        a: kernels.Vector,
        d: kernels.Vector,
        norm: kernels.Vector | None,
        eps: float,
        out: Rows,
    ) -> None:
        """As `kernels.mamba2`. ValueError as of `delta_net`."""
        _require("mamba2", shape)
        entry_of, entries = batch.states
        stride = shape.channels + HEAD_FACTORS * shape.n_v_head
        convolved = self._convolved.reserve(4 * projected.tokens_max * stride)
        weights = [self._address_of(vector) for vector in (conv, conv_bias, dt_bias, a)]
        offset = layer * shape.layer_bytes // 4
        heads = [shape.n_k_head, shape.n_v_head, shape.state_dim, shape.head_dim]
        rows = [projected.address, projected.width]
        width = shape.value_width // shape.n_k_head
        self._gpu.launch(
            "convolve_channels",
            (batch.n_tokens, -(-(shape.channels + shape.n_v_head) // CHANNEL_THREADS), 1),
            CHANNEL_THREADS,
            [
                *(*rows, entry_of, entries, offset, *heads, shape.conv_kernel),
                *(*weights, convolved, stride),
            ],
        )
        self._gpu.launch(
            "recur_mamba2",
            (batch.n_entries, shape.n_v_head, -(-shape.head_dim // COLUMNS)),
            shape.state_dim,
            [convolved, stride, entries, offset, *heads, out.address, out.width],
        )
        self._gpu.launch(
            "gate_groups",
            (batch.n_tokens, shape.n_k_head, 1),
            min(max(-(-width // 32) * 32, HEAD_THREADS), GROUP_THREADS_MAX),
            [
                *(*rows, shape.channels, convolved, stride, shape.head_dim, self._address_of(d)),
                *(self._address_of(norm), eps, width, out.address, out.width),
            ],
        )

    def short_conv(
        self,
        projected: Rows,
        batch: Batch,
        shape: kernels.StateShape,
        layer: int,
        conv: kernels.Vector,
        out: Rows,
    ) -> None:
        """As `kernels.short_conv`. ValueError as of `delta_net`."""
        _require("conv", shape)
        entry_of, entries = batch.states
        width = shape.value_width
        self._gpu.launch(
            "convolve_gated",
            (batch.n_tokens, -(-width // CHANNEL_THREADS), 1),
            CHANNEL_THREADS,
            [
                *(projected.address, projected.width, entry_of, entries),
                *(layer * shape.layer_bytes // 4, width, shape.conv_kernel),
                *(self._address_of(conv), out.address, out.width),
            ],
        )


def _require(kind: str, shape: kernels.StateShape) -> None:
    if shape.kind != kind:
        raise ValueError(f"a shape of {shape.kind} where one of {kind} is needed")
