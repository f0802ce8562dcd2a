"""Launches of matrix products: which kernel, for how many columns, in which grid."""

from __future__ import annotations

from typing import NamedTuple

import kernels
from kernels.cuda.gpu import Argument, Gpu
from kernels.cuda.memory import Activations, Scratch

FLOATS = ("f16", "bf16", "f32")
# Kinds that are multiplied by the kernels of another one, which is packed in the same way.
PACKED_AS = {"iq2_xxs": "iq2_s", "iq2_xs": "iq2_s", "iq1_s": "iq1_m"}
STORE, ADD, RELU2, GATE = range(4)  # what follows a product: `Then` of products.h
GATE_OF = {"silu": GATE, "oai": GATE + 1, "gelu": GATE + 2}  # by activation
LIMITED = GATE + 3  # silu within a limit
TILE_ROWS = 16  # rows of a tile of packed weights
# Up to FEW_TOKENS_MAX a block reads a tile of weights for FEW_TOKENS or for all of them, up to
# SOME_TOKENS four tiles for so many, else for MANY_TOKENS. A multiprocessor has MANY_AT_ONCE blocks
# of these at once; where there are fewer, their segments are parted.
FEW_TOKENS, FEW_TOKENS_MAX, SOME_TOKENS, MANY_TOKENS = 8, 16, 32, 64
MANY_TILES, MANY_THREADS, MANY_AT_ONCE = 4, 128, 3
FEW_WARPS_MIN, FEW_WARPS_MAX, SEGMENT = 4, 8, 1024
# A block of a float matrix has so many tokens, and threads for so many segments at once.
FLOAT_TOKENS, FLOAT_THREADS, FLOAT_SEGMENTS = (FEW_TOKENS, 32), 128, (4, 2)
THREADS, WARP = 256, 32


class MatrixAt(NamedTuple):
    """A matrix in memory of the GPU; of a bank, `rows` are those of one expert."""

    address: int
    kind: str
    rows: int
    cols: int


class GateAt(NamedTuple):
    """The matrix of a gate, of the size and kind of the other one, and its bias, if any."""

    address: int = 0
    bias: int = 0


class OutputAt(NamedTuple):
    """What follows a product, and the address of its first row.

    The bias has a value for each row of a matrix, of a bank too. limit: of LIMITED.
    """

    bias: int
    then: int
    address: int
    width: int
    limit: float = 0.0


class PairsAt(NamedTuple):
    """Pairs of tokens and experts, sorted (experts.cu): up to `portions_max` portions of up
    to `columns`. So
    many pairs as `of_row` says read one row of activations."""

    portions: int
    portions_max: int
    columns: int
    order: int
    of_row: int


NO_GATE = GateAt()


def few_threads(cols: int, matrices: int = 1) -> int:
    """Threads of a block of `linear_few`: a warp a segment of a row, in rounds of equal size."""
    segments = -(-cols // SEGMENT) * matrices
    rounds = -(-segments // FEW_WARPS_MAX)
    return WARP * max(FEW_WARPS_MIN, -(-segments // rounds))


def then_of(
    operation: str,
    activation: str,
    gate: kernels.Matrix | None,
    gate_bias: kernels.Vector | None,
    limit: float,
) -> int:
    """What follows a product that has an activation. ValueError for an unknown one, for relu2 with
    a gate, for another one without, and for a limit of another one than silu."""
    if limit and activation != "silu":
        raise ValueError(f"{operation}: {activation} has no limit")
    if activation == "relu2":
        if gate is not None or gate_bias is not None:
            raise ValueError(f"{operation}: relu2 has no gate")
        return RELU2
    if activation not in GATE_OF:
        raise ValueError(f"{operation}: no activation is named {activation}")
    if gate is None:
        raise ValueError(f"{operation}: {activation} needs a gate")
    return LIMITED if limit else GATE_OF[activation]


class Products:
    """Launches on one GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._partials = Scratch(gpu)  # sums of segments

    def launch(
        self,
        x: Activations,
        matrix: MatrixAt,
        n: int,
        out: OutputAt,
        gate: GateAt = NO_GATE,
        pairs: PairsAt | None = None,
    ) -> None:
        """The product of a matrix with n tokens, or of a bank with n pairs.

        gate: for the kernels for few tokens. Raises MemoryError.
        """
        columns = n if pairs is None else pairs.columns
        if matrix.kind in FLOATS:
            self._floats(x, matrix, n, out, pairs)
        elif columns <= FEW_TOKENS_MAX:
            self._few(x, matrix, n, out, gate, pairs)
        else:
            self._many(x, matrix, n, out, pairs)

    def _few(
        self,
        x: Activations,
        matrix: MatrixAt,
        n: int,
        out: OutputAt,
        gate: GateAt,
        pairs: PairsAt | None,
    ) -> None:
        matrices = 2 if gate.address else 1
        threads, each = few_threads(matrix.cols, matrices), 1
        if pairs is not None:  # experts are narrow: a block has tiles for all of its warps
            each = max(1, FEW_WARPS_MIN // (-(-matrix.cols // SEGMENT) * matrices))
        columns, blocks = (n, 1) if pairs is None else (pairs.columns, pairs.portions_max)
        name = "few" if columns <= FEW_TOKENS else "few2"
        self._gpu.launch(
            f"linear_{name}_{kernel_of(matrix.kind)}",
            (blocks, -(-matrix.rows // (TILE_ROWS * each)), 1),
            threads,
            [*_quantised(x, matrix, n, out), *gate, *_sorted(pairs), each],
        )

    def _many(
        self, x: Activations, matrix: MatrixAt, n: int, out: OutputAt, pairs: PairsAt | None
    ) -> None:
        columns = n if pairs is None else pairs.columns
        name, size = ("some", SOME_TOKENS) if columns <= SOME_TOKENS else ("many", MANY_TOKENS)
        grid = (
            -(-n // size) if pairs is None else pairs.portions_max,
            -(-matrix.rows // (TILE_ROWS * MANY_TILES)),
        )
        segments = each = -(-matrix.cols // SEGMENT)
        if pairs is None:
            parts = MANY_AT_ONCE * self._gpu.facts.multiprocessors // (grid[0] * grid[1])
            each = -(-segments // max(1, parts))
        parts = -(-segments // each)
        partials = self._partials.reserve(4 * segments * n * matrix.rows) if parts > 1 else 0
        arguments = [*_quantised(x, matrix, n, out), partials, each, *_sorted(pairs)]
        kernel = f"linear_{name}_{kernel_of(matrix.kind)}"
        self._gpu.launch(kernel, (*grid, parts), MANY_THREADS, arguments)
        if parts > 1:
            rest = [partials, segments, matrix.rows, n, *out]
            blocks = n, -(-matrix.rows // THREADS), 1
            self._gpu.launch("add_segments", blocks, THREADS, rest)

    def _floats(
        self, x: Activations, matrix: MatrixAt, n: int, out: OutputAt, pairs: PairsAt | None
    ) -> None:
        columns = n if pairs is None else pairs.columns
        index = 0 if columns <= FEW_TOKENS else 1
        size, segments = FLOAT_TOKENS[index], FLOAT_SEGMENTS[index]
        grid = (
            -(-n // size) if pairs is None else pairs.portions_max,
            -(-matrix.rows // TILE_ROWS),
            1 if pairs is None else -(-columns // size),
        )
        threads = FLOAT_THREADS * min(segments, -(-matrix.cols // SEGMENT))
        weights = [matrix.address, matrix.rows, matrix.cols]
        arguments = [*weights, x.values, x.stride, x.scale, n, *out, *_sorted(pairs)]
        name = ("linear", "linear_many")[index]
        self._gpu.launch(f"{name}_{matrix.kind}", grid, threads, arguments)


def kernel_of(kind: str) -> str:
    """The kind whose kernels multiply matrices of this one."""
    return PACKED_AS.get(kind, kind)


def _quantised(x: Activations, matrix: MatrixAt, n: int, out: OutputAt) -> list[Argument]:
    """The first arguments of kernels of quantised products."""
    return [matrix.address, matrix.rows, matrix.cols, *x.addresses, n, *out]


def _sorted(pairs: PairsAt | None) -> list[int]:
    return [0, 0, 1] if pairs is None else [pairs.portions, pairs.order, pairs.of_row]
