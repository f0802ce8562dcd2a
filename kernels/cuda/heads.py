"""Products of heads on a GPU: each head's part of a row with the head's own matrix of a bank.

The products are those of pairs of tokens and experts (experts.py), where every token has chosen
each head: a row of a head has the number token * n_head + head, and lies where this says.
"""

from __future__ import annotations

from collections.abc import Callable

import kernels
from kernels.cuda.experts import PORTION_SIZES, PORTION_WORDS
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import Activations, Rows, Scratch
from kernels.cuda.products import (
    FEW_TOKENS,
    MANY_TOKENS,
    STORE,
    THREADS,
    WARP,
    MatrixAt,
    OutputAt,
    PairsAt,
    Products,
)

QUANTISE_SPANS = 4  # of a block, a warp each
TRANSFORM_THREADS = 64


class HeadTable:
    """The rows of heads sorted by head, for the tokens of the last step."""

    def __init__(self, gpu: Gpu, tokens_max: int, n_head: int) -> None:
        """Raises MemoryError."""
        self.n_head = n_head
        self.tokens = 0
        self._gpu = gpu
        self.order = gpu.allocate(4 * tokens_max * n_head)
        self.portions = gpu.allocate(4 * PORTION_WORDS * n_head * -(-tokens_max // FEW_TOKENS))

    def sort(self, tokens: int) -> None:
        """Sort for so many tokens, unless it was done."""
        if tokens == self.tokens or not tokens:
            return
        self.tokens = tokens
        blocks = -(-tokens * self.n_head // THREADS), 1, 1
        at = [self.n_head, tokens, self.columns, self.portions, self.order]
        self._gpu.launch("sort_heads", blocks, THREADS, at)

    @property
    def columns(self) -> int:
        """The most rows of a portion."""
        return next((size for size in PORTION_SIZES if size >= self.tokens), MANY_TOKENS)

    def at(self) -> PairsAt:
        """What products read."""
        count = self.n_head * -(-self.tokens // self.columns)
        return PairsAt(self.portions, count, self.columns, self.order, 1)


class HeadActivations(Activations):
    """Quantised parts of rows, `width` values of each head. See `kernels.HeadActivations`."""

    def __init__(self, gpu: Gpu, table: HeadTable, tokens_max: int, width: int) -> None:
        super().__init__(gpu, tokens_max * table.n_head, width, keep_float=False)
        self.table = table


class HeadOps:
    """The functions of `kernels` for products of heads, on one GPU. address_of: where weights lie
    there."""

    def __init__(
        self, gpu: Gpu, products: Products, address_of: Callable[[kernels.Matrix | None], int]
    ) -> None:
        self._gpu, self._products, self._address_of = gpu, products, address_of
        self._tables: dict[tuple[int, int], HeadTable] = {}
        self._outputs = Scratch(gpu)  # of heads that lie apart

    def make_head_activations(
        self, tokens_max: int, n_head: int, width: int, keep_float: bool
    ) -> HeadActivations:
        """As `kernels.HeadActivations`; float banks read the rows that were quantised. Raises
        MemoryError."""
        del keep_float
        if (tokens_max, n_head) not in self._tables:
            self._tables[tokens_max, n_head] = HeadTable(self._gpu, tokens_max, n_head)
        return HeadActivations(self._gpu, self._tables[tokens_max, n_head], tokens_max, width)

    def begin(self, tokens: int) -> None:
        """Sort rows for a step of so many tokens, which products do not do again: launches that are
        captured have no part of it."""
        for table in self._tables.values():
            table.sort(tokens)

    def quantise_heads(self, x: Rows, column: int, tokens: int, out: HeadActivations) -> None:
        """As `kernels.quantise_heads`."""
        n_head = out.table.n_head
        stride = x.width // n_head
        out.values, out.stride = x.address + 4 * column, stride
        spans = -(-out.width // (WARP * 4))
        grid = tokens * n_head, -(-spans // QUANTISE_SPANS), 1
        arguments = [out.values, stride, out.width, *out.addresses]
        self._gpu.launch("quantise", grid, WARP * QUANTISE_SPANS, arguments)

    def transform_heads(self, x: Rows, n_head: int, column: int, width: int, tokens: int) -> None:
        """As `kernels.transform_heads`."""
        arguments = [x.address, x.width, x.width // n_head, column, width]
        self._gpu.launch("transform_heads", (tokens, n_head, 1), TRANSFORM_THREADS, arguments)

    def linear_heads(
        self,
        x: HeadActivations,
        bank: kernels.Matrix,
        tokens: int,
        out: Rows,
        column: int,
        stride: int,
    ) -> None:
        """As `kernels.linear_heads`. Raises MemoryError."""
        table = x.table
        table.sort(tokens)
        rows, n = bank.rows // table.n_head, tokens * table.n_head
        is_dense = column == 0 and stride == rows and out.width == table.n_head * rows
        most = x.tokens_max  # the memory grows in no later step
        address = out.address if is_dense else self._outputs.reserve(4 * most * rows)
        at = MatrixAt(self._address_of(bank), bank.kind, rows, bank.cols)
        self._products.launch(x, at, n, OutputAt(0, STORE, address, rows), pairs=table.at())
        if not is_dense:
            self._copy(address, rows, table.n_head, tokens, out, column, stride)

    def copy_heads(
        self, x: Rows, n_head: int, tokens: int, out: Rows, column: int, stride: int
    ) -> None:
        """As `kernels.copy_heads`."""
        self._copy(x.address, x.width // n_head, n_head, tokens, out, column, stride)

    def _copy(
        self, source: int, run: int, n_head: int, tokens: int, out: Rows, column: int, stride: int
    ) -> None:
        blocks = tokens, -(-n_head * run // THREADS), 1
        to = out.address + 4 * column, out.width, stride
        self._gpu.launch("copy_heads", blocks, THREADS, [source, run, n_head, *to])
