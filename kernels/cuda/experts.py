"""Mixtures of experts on a GPU: buffers of pairs, and the functions of `kernels` for them.

A pair is a token and an expert that it has chosen. Those of a step have numbers, token by token,
and a row each in buffers of pairs; the products read them by expert, in the order that
`select_experts` has written. The host learns nothing of what was chosen: grids are as large as so
many tokens may need.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import kernels
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import I32, Activations, Rows, Scratch
from kernels.cuda.products import (
    FEW_TOKENS,
    FEW_TOKENS_MAX,
    FLOATS,
    MANY_TOKENS,
    SOME_TOKENS,
    STORE,
    THREADS,
    WARP,
    GateAt,
    MatrixAt,
    OutputAt,
    PairsAt,
    Products,
    then_of,
)

EXPERTS_MAX = CHUNK_PAIRS_MAX = 1024  # THREADS_MAX and PAIRS_MAX of experts.cu
# In the order of ca::Gating.
GATINGS = "softmax", "sigmoid", "normed_sigmoid", "softmax_all", "biased_softmax"
CHUNK_TOKENS = 16  # that a block chooses for, a warp for each
PORTION_WORDS = 4
# A portion has room for so many times the pairs that an expert has on average, since they differ.
# One that does not fit is two, and the second reads the weights once more, from a cache.
PORTION_ROOM = 1.25
PORTION_SIZES = FEW_TOKENS, FEW_TOKENS_MAX, SOME_TOKENS, MANY_TOKENS


def portion_columns(tokens: int, n_expert: int, n_used: int) -> int:
    """The most pairs of a portion, for so many tokens."""
    pairs = tokens * n_used
    wanted = min(float(tokens), PORTION_ROOM * pairs / min(n_expert, pairs))
    return next((size for size in PORTION_SIZES if size >= wanted), MANY_TOKENS)


def portions_max(pairs: int, n_expert: int, columns: int) -> int:
    """The most portions of so many pairs: each expert has at most one that is not full."""
    return (pairs + (columns - 1) * min(n_expert, pairs)) // columns


class ExpertPairs:
    """What is chosen for the tokens of a step. See `kernels.ExpertPairs`; rows of pairs have no
    gaps between experts here."""

    def __init__(self, gpu: Gpu, tokens_max: int, n_expert: int, n_used: int) -> None:
        if not 1 <= n_used <= n_expert <= EXPERTS_MAX:
            raise ValueError(f"ExpertPairs: {n_used} of {n_expert} experts")
        self.tokens_max, self.n_expert, self.n_used = tokens_max, n_expert, n_used
        self.rows_max = tokens_max * n_used
        self.tokens = 0  # of the last selection
        self.chunk_tokens = max(1, min(CHUNK_TOKENS, CHUNK_PAIRS_MAX // n_used))
        self._gpu = gpu
        most = portions_max(self.rows_max, n_expert, FEW_TOKENS)  # of no size there are more
        self.portions = gpu.allocate(4 * PORTION_WORDS * most)
        self.ids, self.weights, self.order = (gpu.allocate(4 * self.rows_max) for _ in range(3))
        self.counts = gpu.allocate(4 * n_expert * -(-tokens_max // self.chunk_tokens))

    def at(self, of_row: int) -> PairsAt:
        """What products read. of_row: see PairsAt."""
        columns = portion_columns(self.tokens, self.n_expert, self.n_used)
        count = portions_max(self.tokens * self.n_used, self.n_expert, columns)
        return PairsAt(self.portions, count, columns, self.order, of_row)

    def unpack(self) -> tuple[I32, NDArray[np.float32]]:
        """Copies of the ids and weights of the last selection; waits for the GPU."""
        ids = np.empty((self.tokens, self.n_used), np.int32)
        weights = np.empty((self.tokens, self.n_used), np.float32)
        self._gpu.copy_out(self.ids, ids)
        self._gpu.copy_out(self.weights, weights)
        return ids, weights


class ExpertOps:
    """The functions of `kernels` for mixtures of experts, on one GPU. address_of: where weights lie
    there, 0 for None."""

    def __init__(
        self,
        gpu: Gpu,
        products: Products,
        address_of: Callable[[kernels.Matrix | kernels.Vector | None], int],
    ) -> None:
        self._gpu, self._products, self._address_of = gpu, products, address_of
        self._outputs = Scratch(gpu)  # of the experts, of each pair

    def select_experts(
        self,
        logits: Rows,
        tokens: int,
        scale: float,
        pairs: ExpertPairs,
        gating: str = "softmax",
        bias: kernels.Vector | None = None,
        scales: kernels.Vector | None = None,
        n_group: int = 1,
        n_group_used: int = 1,
    ) -> None:
        """As `kernels.select_experts`."""
        if gating not in GATINGS:
            raise ValueError(f"select_experts: no gating is named {gating}")
        pairs.tokens = tokens
        at, chunk = pairs.at(1), pairs.chunk_tokens
        blocks = -(-tokens // chunk)
        threads = WARP * max(min(chunk, tokens), -(-pairs.n_expert // WARP))
        sorted_to = [at.portions, at.portions_max, at.columns, at.order]
        counts = [pairs.n_expert, pairs.n_used, tokens, chunk]
        self._gpu.launch(
            "select_experts",
            (blocks, 1, 1),
            threads,
            [
                *(logits.address, logits.width, *counts, float(scale)),
                *(GATINGS.index(gating), self._address_of(bias), self._address_of(scales)),
                *(pairs.ids, pairs.weights, pairs.counts, *sorted_to, n_group, n_group_used),
            ],
        )
        if blocks > 1:
            arguments = [pairs.ids, pairs.counts, *counts, *sorted_to]
            self._gpu.launch("sort_pairs", (blocks, 1, 1), threads, arguments)

    def gather_pairs(self, x: Activations, pairs: ExpertPairs, out: Activations) -> None:
        """As `kernels.gather_pairs`, without a copy: products of pairs read the rows of `x`."""
        if pairs.tokens > x.tokens_max:
            raise ValueError("gather_pairs: pairs of more tokens than there are")
        out.gathered = x

    def pairs_gated(
        self,
        x: Activations,
        gate: kernels.Matrix | None,
        up: kernels.Matrix,
        pairs: ExpertPairs,
        out: Rows,
        gate_bias: kernels.Vector | None = None,
        up_bias: kernels.Vector | None = None,
        activation: str = "silu",
        limit: float = 0.0,
    ) -> None:
        """As `kernels.pairs_gated`: for few pairs of an expert one launch, if the banks are of one
        kind."""
        then = then_of("pairs_gated", activation, gate, gate_bias, limit)
        at = pairs.at(1 if x.gathered is None else pairs.n_used)
        source, n = x.gathered or x, pairs.tokens * pairs.n_used
        biases = self._address_of(gate_bias), self._address_of(up_bias)
        gated = OutputAt(biases[1], then, out.address, out.width, limit)
        if gate is None:
            self._products.launch(source, self._bank(up, pairs), n, gated, pairs=at)
        elif gate.kind == up.kind and gate.kind not in FLOATS and at.columns <= FEW_TOKENS_MAX:
            first = GateAt(self._address_of(gate), biases[0])
            self._products.launch(source, self._bank(up, pairs), n, gated, first, at)
        else:
            stored = gated._replace(bias=biases[0], then=STORE)
            self._products.launch(source, self._bank(gate, pairs), n, stored, pairs=at)
            self._products.launch(source, self._bank(up, pairs), n, gated, pairs=at)

    def pairs_add(
        self,
        x: Activations,
        down: kernels.Matrix,
        pairs: ExpertPairs,
        out: Rows,
        bias: kernels.Vector | None = None,
    ) -> None:
        """As `kernels.pairs_add`. Raises MemoryError."""
        n, width = pairs.tokens * pairs.n_used, out.width
        outputs = self._outputs.reserve(4 * pairs.rows_max * width)  # it grows in no later step
        stored = OutputAt(self._address_of(bias), STORE, outputs, width)
        self._products.launch(x, self._bank(down, pairs), n, stored, pairs=pairs.at(1))
        arguments = [outputs, pairs.weights, pairs.n_used, width, out.address, width]
        blocks = pairs.tokens, -(-width // THREADS), 1
        self._gpu.launch("add_pairs", blocks, THREADS, arguments)

    def _bank(self, bank: kernels.Matrix, pairs: ExpertPairs) -> MatrixAt:
        return MatrixAt(self._address_of(bank), bank.kind, bank.rows // pairs.n_expert, bank.cols)
