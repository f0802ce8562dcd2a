"""Operations on fp32 rows, value by value, on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import kernels
from kernels.cuda.gpu import Argument, Gpu
from kernels.cuda.memory import Rows

THREADS = 256
NORM_THREADS_MIN = 64
NORM_THREADS_MAX = 512


class RowOps:
    """The functions of `kernels` on rows. address_of: where weights lie on the GPU."""

    def __init__(self, gpu: Gpu, address_of: Callable[[kernels.Vector | None], int]) -> None:
        self._gpu, self._address_of = gpu, address_of

    def gate_rows(self, gate: Rows, tokens: int, out: Rows) -> None:
        """As `kernels.gate_rows`."""
        each = out.width // gate.width
        given = [gate.address, gate.width, out.width, out.address, out.width, each]
        self._launch("gate_rows", tokens, out, given)

    def gate_add(self, x: Rows, gate: Rows, tokens: int, out: Rows) -> None:
        """As `kernels.gate_add`."""
        given = [x.address, x.width, gate.address, gate.width]
        self._launch("gate_add", tokens, out, [*given, out.width, out.address, out.width])

    def zero_rows(self, tokens: int, out: Rows) -> None:
        """As `kernels.zero_rows`."""
        self._launch("zero_rows", tokens, out, [out.address, out.width, out.width])

    def scale_rows(self, factor: float, tokens: int, out: Rows) -> None:
        """As `kernels.scale_rows`."""
        self._launch("scale_rows", tokens, out, [factor, out.address, out.width, out.width])

    def scaled_add(self, x: Rows, factor: float, tokens: int, out: Rows) -> None:
        """As `kernels.scaled_add`."""
        given = [x.address, x.width, out.width, out.address, out.width, factor]
        self._launch("scaled_add", tokens, out, given)

    def cap_rows(self, cap: float, tokens: int, out: Rows) -> None:
        """As `kernels.cap_rows`."""
        self._launch("cap_rows", tokens, out, [cap, out.address, out.width, out.width])

    def gelu_rows(self, factors: Rows, column: int, tokens: int, out: Rows) -> None:
        """As `kernels.gelu_rows`."""
        first = factors.address + 4 * column
        given = [first, factors.width, out.width, out.address, out.width]
        self._launch("gelu_rows", tokens, out, given)

    def mix_inputs(
        self, x: Rows, scale: float, norm: kernels.Vector, eps: float, tokens: int, out: Rows
    ) -> None:
        """As `kernels.mix_inputs`."""
        width = norm.size
        self._gpu.launch(
            "mix_inputs",
            (tokens, out.width // width, 1),
            _norm_threads(width),
            [
                *(x.address, x.width, scale, self._address_of(norm), eps),
                *(width, out.address, out.width),
            ],
        )

    def norm_columns(
        self, column: int, norm: kernels.Vector, eps: float, tokens: int, out: Rows
    ) -> None:
        """As `kernels.norm_columns`."""
        given = [column, self._address_of(norm), eps, norm.size, out.address, out.width]
        self._gpu.launch("norm_columns", (tokens, 1, 1), _norm_threads(norm.size), given)

    def _launch(self, kernel: str, tokens: int, out: Rows, arguments: Sequence[Argument]) -> None:
        """A kernel with a thread for each value of a row."""
        self._gpu.launch(kernel, (tokens, -(-out.width // THREADS), 1), THREADS, arguments)


def _norm_threads(width: int) -> int:
    """Threads of a block that norms so many values."""
    return min(max(-(-width // 32) * 32, NORM_THREADS_MIN), NORM_THREADS_MAX)
