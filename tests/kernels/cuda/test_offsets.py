"""No offset of a kernel wraps: random cases in blocks, tokens, layers and tiles of large numbers.

The pointers of a launch are moved back by as much as the numbers move forward, so that a kernel
that computes every offset in 64 bits reads and writes the same memory as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

import kernels
from bench.cuda.arrays import Arrays
from bench.cuda.cases import Attention, Differs, cases, linear_case
from bench.simt.emulator import Emulator, EmulatorFault
from kernels.cuda.gpu import Gpu
from kernels.cuda.memory import LINE_BYTES, STATE_ENTRY
from kernels.cuda.products import FLOATS

FAR = 1 << 24  # tokens or blocks
ROWS_FAR = 60_000  # blocks of rows of a matrix: a grid has up to 65,535
LAYERS_FAR, POSITIONS_FAR, RESULTS_FAR = 100_000, 1 << 26, 1 << 28
QUERY_DWORDS = 1 << 31  # a step has fewer: 524,288 tokens of 64 heads of 256
INTS = 1 << 28
VALUES_FAR = 1 << 31  # of an image, before a layer
# Of a kernel of products: tiles and tokens of a block.
GROUPS = {"few": (1, 8), "few2": (1, 16), "some": (4, 32), "many": (4, 64)}
GROUPS_OF_FLOATS = {"": (1, 8), "many": (1, 32)}
EXPERTS_FAR = 1 << 22
PAIRS_FAR, PAIR_SPANS = 1 << 26, 1 << 27  # of less than 2^31 times 16 bytes of activations
Arguments = list[Any]


class Far:
    """An emulated GPU whose launches are moved."""

    def __init__(self, gpu: Emulator) -> None:
        self._gpu = gpu
        self.launched = set[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def launch(
        self, kernel: str, blocks: tuple[int, int, int], threads: int, arguments: Sequence[Any]
    ) -> None:
        """Run a kernel from a block of a large number on."""
        name = next(known for known in MOVES if kernel.startswith(known))
        given = list(arguments)
        with Arrays(self._gpu) as arrays:
            self._gpu.first_block = MOVES[name](Move(self._gpu, arrays, kernel, blocks), given)
            try:
                self._gpu.launch(kernel, blocks, threads, given)
            finally:
                self._gpu.first_block = 0, 0, 0
        self.launched.add(kernel)


class Move:
    """What a launch reads from tables is copied before it is changed."""

    def __init__(
        self, gpu: Emulator, arrays: Arrays, kernel: str, blocks: tuple[int, int, int]
    ) -> None:
        self._gpu, self._arrays = gpu, arrays
        self.kernel, self.blocks = kernel, blocks

    def table(
        self,
        arguments: Arguments,
        at: int,
        kind: type[np.generic],
        columns: int,
        changes: dict[int, int],
    ) -> None:
        """Add to columns of a table of a row a block, and move its pointer by FAR rows."""
        values = np.empty((self.blocks[0], columns), kind)
        self._gpu.copy_out(arguments[at], values)
        for column, change in changes.items():
            values[:, column] += np.array(change).astype(kind)
        arguments[at] = self._arrays.put(values).address - FAR * values[0].nbytes

    def values(
        self, arguments: Arguments, at: int, kind: type[np.generic], change: int, moved: int
    ) -> None:
        """Add to all values of an array, and move its pointer back by `moved` bytes."""
        values = np.empty(self._gpu.size_of(arguments[at]) // np.dtype(kind).itemsize, kind)
        self._gpu.copy_out(arguments[at], values)
        values += np.array(change).astype(kind)
        arguments[at] = self._arrays.put(values).address - moved

    def states(self, arguments: Arguments, at: int, count: int, moved: int) -> None:
        """Move `count` entries by FAR tokens and their images by layers, and their table back by
        `moved` rows."""
        values = np.empty(count, STATE_ENTRY)
        self._gpu.copy_out(arguments[at], values)
        values["first_token"] += FAR
        values["written"] -= np.uint64(4 * VALUES_FAR)
        values["read"] -= np.where(values["read"] > 0, np.uint64(4 * VALUES_FAR), np.uint64(0))
        arguments[at] = self._arrays.put(values).address - moved * values.itemsize

    def largest(self, address: int) -> int:
        """The largest of an array of int32, one a block."""
        values = np.empty(self.blocks[0], np.int32)
        self._gpu.copy_out(address, values)
        return int(values.max())

    def pages(self, arguments: Arguments, at: int, n_bytes: int) -> None:
        """Move all addresses of a table back."""
        values = np.empty(self._gpu.size_of(arguments[at]) // 8, np.uint64)
        self._gpu.copy_out(arguments[at], values)
        arguments[at] = self._arrays.put(values - np.uint64(n_bytes)).address


def back(arguments: Arguments, moves: dict[int, int]) -> None:
    """Move pointers that are not null."""
    for at, n_bytes in moves.items():
        arguments[at] -= n_bytes if arguments[at] else 0


def activations(at: int, tokens: int, width: int) -> dict[int, int]:
    """Moves of q, scale and sums."""
    spans = -(-width // 128)
    return {at: tokens * spans * 128, at + 1: tokens * spans * 16, at + 2: tokens * spans * 16}


def linear(move: Move, a: Arguments) -> tuple[int, int, int]:
    group, _, kind = move.kernel.removeprefix("linear_").partition("_")
    if group in FLOATS:
        group, kind = "", group
    cols, stride = a[2], a[10]
    at = 12 if kind in FLOATS else 14
    if a[at]:
        return pairs(move, a, kind, at)
    tiles, of_block = (GROUPS_OF_FLOATS if kind in FLOATS else GROUPS)[group]
    rows, tokens = 16 * tiles * ROWS_FAR, of_block * FAR
    packed = kernels.packed_bytes(kind, 16, cols) * (rows // 16)
    back(a, {0: packed, 7: 4 * rows, 9: 4 * (tokens * stride + rows)})
    if group in ("few", "few2"):
        back(a, {12: packed, 13: 4 * rows})
    back(a, inputs(a, kind, tokens))
    a[1] += rows
    a[6] += tokens
    return FAR, ROWS_FAR, 0


def inputs(a: Arguments, kind: str, tokens: int) -> dict[int, int]:
    """Moves of the activations of a product."""
    if kind in FLOATS:
        return {3: 4 * tokens * a[4], 5: tokens * -(-a[2] // 128) * 16}
    return activations(3, tokens, a[2])


def pairs(move: Move, a: Arguments, kind: str, at: int) -> tuple[int, int, int]:
    """Of a product of pairs, from argument `at` on: other experts, and pairs of other tokens."""
    bank, of_row = EXPERTS_FAR * kernels.packed_bytes(kind, a[1], a[2]), a[at + 2]
    tokens, biases = min(PAIRS_FAR, PAIR_SPANS // -(-a[2] // 128)) // of_row, 4 * EXPERTS_FAR * a[1]
    back(a, {0: bank, 7: biases, 9: 4 * tokens * of_row * a[10]} | inputs(a, kind, tokens))
    back(a, {12: bank, 13: biases} if "_few" in move.kernel else {})
    move.values(a, at + 1, np.int32, tokens * of_row, 4 * FAR)
    move.table(a, at, np.uint32, 4, {0: EXPERTS_FAR, 1: FAR})
    return FAR, 0, 0


def embed(move: Move, a: Arguments) -> tuple[int, int, int]:
    kind = kernels.KINDS[a[1]]
    move.table(a, 3, np.int32, 1, {0: 16 * FAR})
    back(a, {0: FAR * kernels.packed_bytes(kind, 16, a[2]), 4: 4 * FAR * a[5]})
    return FAR, 0, 0


def norm_quantise(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 8: 4 * FAR * a[9]} | activations(5, FAR, a[4]))
    return FAR, 0, 0


def norm_add(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 5: 4 * FAR * a[6]})
    return FAR, 0, 0


def quantise(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1]} | activations(3, FAR, a[2]))
    return FAR, 0, 0


def take_rows(move: Move, a: Arguments) -> tuple[int, int, int]:
    move.table(a, 2, np.int32, 1, {0: FAR})
    back(a, {0: 4 * FAR * a[1], 4: 4 * FAR * a[5]})
    return FAR, 0, 0


def nonfinite_rows(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 3: FAR})
    return FAR, 0, 0


def place_kv(move: Move, a: Arguments) -> tuple[int, int, int]:
    row_bytes, _, n_head, n_kv, head_dim = a[5:10]
    layers = kernels.PageShape(LAYERS_FAR, n_kv, head_dim, a[22])
    move.table(a, 2, np.int32, 1, {0: POSITIONS_FAR})
    move.table(a, 3, np.uint64, 1, {0: -layers.payload_bytes})
    rows = FAR * row_bytes + layers.row_bytes
    q = FAR * n_head * head_dim
    back(a, {0: 4 * FAR * a[1], 14: 4 * POSITIONS_FAR * a[15], 18: 4 * POSITIONS_FAR})
    back(a, {19: q, 20: q // 8, 21: rows})
    a[4] += layers.payload_bytes // LINE_BYTES
    a[6] += layers.row_bytes
    return FAR, 0, 0


def results(at: int, head_dim: int) -> dict[int, int]:
    """Moves of m, denominators and o of accumulators."""
    n_bytes = 4 * 16 * RESULTS_FAR
    return {at: n_bytes, at + 1: n_bytes, at + 2: n_bytes * head_dim}


def attend(move: Move, a: Arguments) -> tuple[int, int, int]:
    n_head, n_kv, head_dim = a[5:8]
    tokens = QUERY_DWORDS // (n_head * head_dim // 4) - 100
    move.table(a, 2, np.int32, 8, {0: tokens, 6: RESULTS_FAR})
    layers = kernels.PageShape(LAYERS_FAR, n_kv, head_dim, a[12])
    move.pages(a, 3, layers.payload_bytes)
    q = tokens * n_head * head_dim
    back(a, {0: q, 1: q // 8} | results(8, head_dim))
    a[4] += layers.payload_bytes // LINE_BYTES
    return FAR, 0, 0


def fold_attention(move: Move, a: Arguments) -> tuple[int, int, int]:
    n_head, head_dim = a[4], a[6]
    move.table(a, 0, np.int32, 8, {0: FAR, 6: RESULTS_FAR})
    quantised = activations(10, FAR, n_head * head_dim)
    back(a, results(1, head_dim) | {8: 4 * FAR * a[9]} | quantised)
    return FAR, 0, 0


def gather_partials(move: Move, a: Arguments) -> tuple[int, int, int]:
    head_dim = a[7]
    move.table(a, 0, np.int32, 8, {6: RESULTS_FAR})
    move.table(a, 1, np.int32, 4, {0: INTS})
    back(a, results(2, head_dim) | {9: 4 * INTS, 10: 4 * INTS, 11: 4 * INTS * head_dim})
    return FAR, 0, 0


def select_experts(_: Move, a: Arguments) -> tuple[int, int, int]:
    """Not moved: a step has less than 2^31 pairs, and their numbers are those of tokens."""
    return 0, 0, 0


def sort_pairs(_: Move, a: Arguments) -> tuple[int, int, int]:
    """See `select_experts`."""
    return 0, 0, 0


def add_pairs(_: Move, a: Arguments) -> tuple[int, int, int]:
    pairs = FAR * a[2]
    back(a, {0: 4 * pairs * a[3], 1: 4 * pairs, 4: 4 * FAR * a[5]})
    return FAR, 0, 0


def sample(_: Move, a: Arguments) -> tuple[int, int, int]:
    vocab, top = 4 * FAR * a[2], 4 * FAR * a[14]
    back(a, {0: 4 * FAR * a[1], 3: 72 * FAR, 8: vocab, 9: vocab})
    back(a, {10: 4 * FAR, 11: 4 * FAR, 12: top, 13: top})
    return FAR, 0, 0


def convolve_heads(move: Move, a: Arguments) -> tuple[int, int, int]:
    move.states(a, 3, move.largest(a[2]) + 1, 0)
    back(a, {0: 4 * FAR * a[1], 2: 4 * FAR, 13: 4 * FAR * a[14]})
    a[4] += VALUES_FAR
    return FAR, 0, 0


def recur_heads(move: Move, a: Arguments) -> tuple[int, int, int]:
    move.states(a, 2, move.blocks[0], FAR)
    back(a, {0: 4 * FAR * a[1], 8: 4 * FAR * a[9]})
    a[3] += VALUES_FAR
    return FAR, 0, 0


def gate_heads(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 6: 4 * FAR * a[7]})
    return FAR, 0, 0


def convolve_channels(move: Move, a: Arguments) -> tuple[int, int, int]:
    move.states(a, 3, move.largest(a[2]) + 1, 0)
    back(a, {0: 4 * FAR * a[1], 2: 4 * FAR, 14: 4 * FAR * a[15]})
    a[4] += VALUES_FAR
    return FAR, 0, 0


def recur_mamba2(move: Move, a: Arguments) -> tuple[int, int, int]:
    return recur_heads(move, a)


def gate_groups(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 3: 4 * FAR * a[4], 10: 4 * FAR * a[11]})
    return FAR, 0, 0


def convolve_gated(move: Move, a: Arguments) -> tuple[int, int, int]:
    move.states(a, 3, move.largest(a[2]) + 1, 0)
    back(a, {0: 4 * FAR * a[1], 2: 4 * FAR, 8: 4 * FAR * a[9]})
    a[4] += VALUES_FAR
    return FAR, 0, 0


def gate_rows(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 3: 4 * FAR * a[4]})
    return FAR, 0, 0


def gate_add(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 2: 4 * FAR * a[3], 5: 4 * FAR * a[6]})
    return FAR, 0, 0


def zero_rows(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1]})
    return FAR, 0, 0


def scale_rows(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {1: 4 * FAR * a[2]})
    return FAR, 0, 0


def gelu_rows(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 3: 4 * FAR * a[4]})
    return FAR, 0, 0


def sort_heads(_: Move, _arguments: Arguments) -> tuple[int, int, int]:
    """See `select_experts`."""
    return 0, 0, 0


def copy_heads(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1] * a[2], 3: 4 * FAR * a[4]})
    return FAR, 0, 0


def transform_heads(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1]})
    return FAR, 0, 0


def mix_inputs(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {0: 4 * FAR * a[1], 6: 4 * FAR * a[7]})
    return FAR, 0, 0


def norm_columns(_: Move, a: Arguments) -> tuple[int, int, int]:
    back(a, {4: 4 * FAR * a[5]})
    return FAR, 0, 0


MOVES: dict[str, Callable[[Move, Arguments], tuple[int, int, int]]] = (
    {
        one.__name__: one
        for one in (linear, embed, norm_quantise, quantise, take_rows, nonfinite_rows, place_kv)
    }
    | {one.__name__: one for one in (attend, fold_attention, gather_partials, sample, norm_add)}
    | {one.__name__: one for one in (select_experts, sort_pairs, add_pairs)}
    | {one.__name__: one for one in (zero_rows, scale_rows, gelu_rows, mix_inputs, norm_columns)}
    | {one.__name__: one for one in (sort_heads, copy_heads, transform_heads)}
    | {"cap_rows": scale_rows, "scaled_add": gelu_rows}
    | {one.__name__: one for one in (convolve_heads, recur_heads, gate_heads, gate_rows, gate_add)}
    | {one.__name__: one for one in (convolve_channels, recur_mamba2, gate_groups, convolve_gated)}
)
QUICK = (
    *("quantise", "norm add", "sample", "linear q4_0", "linear q4_k", "linear f16", "embed f32"),
    *("experts q4_0", "experts q6_k", "experts f16", "delta net", "mamba 2", "short conv"),
    *("gates", "values", "heads q4_0", "heads f16"),
)
NEAR = {"take samples", "select experts"}  # their numbers are those of the tokens of a step
SEEDS = 3, 4, 5, 6
SHAPE = 20, 4096, 9  # rows, columns, tokens: 60,000 tiles of 4,096 columns have more than 2 GiB


@pytest.mark.parametrize("name", QUICK)
def test_cases_far_from_the_first_block(gpu: Emulator, pool: kernels.Pool, name: str) -> None:
    gpu.seed, far = 0, Far(gpu)
    for seed in (3,) if name.startswith("linear") else SEEDS:
        rng = np.random.default_rng([seed, *name.encode()])
        if name.startswith("linear"):
            linear_case(cast(Gpu, far), pool, rng, name.split()[1], SHAPE)
        else:
            cases()[name](cast(Gpu, far), pool, rng)
    assert far.launched


@pytest.mark.parametrize(
    ("head_dim", "v_first", "attend"),
    [
        (64, 0, {"attend", "attend_many", "attend_pages"}),
        (512, 0, {"attend_wide", "attend_pages_wide"}),
        (576, 64, {"attend_latent", "attend_pages_latent"}),
    ],
)
def test_attention_far_from_the_first_block(
    gpu: Emulator, pool: kernels.Pool, head_dim: int, v_first: int, attend: set[str]
) -> None:
    gpu.seed, far = 0, Far(gpu)
    rng = np.random.default_rng(3)
    entries = [(9, 250), (1, 1024)]
    case = Attention(pool, rng, 4, 2, head_dim, entries, v_first=v_first)
    case.compare(cast(Gpu, far), rng)
    assert far.launched >= attend | {"fold_attention", "place_kv"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(cases()) - NEAR - set(QUICK)))
def test_other_cases_far_from_the_first_block(gpu: Emulator, pool: kernels.Pool, name: str) -> None:
    test_cases_far_from_the_first_block(gpu, pool, name)


def test_an_offset_that_is_off_is_found(
    gpu: Emulator, pool: kernels.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrapped(move: Move, a: Arguments) -> tuple[int, int, int]:
        at = embed(move, a)
        a[4] += 1 << 32  # what a kernel loses that multiplies in 32 bits
        return at

    monkeypatch.setitem(MOVES, "embed", wrapped)
    with pytest.raises((EmulatorFault, Differs)):
        cases()["embed q4_0"](cast(Gpu, Far(gpu)), pool, np.random.default_rng(1))
