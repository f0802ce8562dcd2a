"""Gated delta networks on a GPU, and the gates of attention and of shared experts."""

from __future__ import annotations

from collections.abc import Callable

import kernels
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import Batch, Rows, Scratch

HEAD_THREADS = 64  # THREADS of delta_net.cu
HEAD_FACTORS = 4  # FACTORS there
COLUMNS = 32  # of a state, in a block


class RecurrentOps:
    """The functions of `kernels` for recurrent layers and gates, on one GPU. address_of: where
    weights lie there."""

    def __init__(self, gpu: Gpu, address_of: Callable[[kernels.Vector], int]) -> None:
        self._gpu, self._address_of = gpu, address_of
        self._convolved = Scratch(gpu)  # rows of `convolve_heads`

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
        """As `kernels.delta_net`. ValueError if the batch has no states."""
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
