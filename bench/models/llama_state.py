"""The KV of one sequence as llama.cpp serialises it, moved between contexts and made longer.

Owns the layout of `llama_state_seq_get_data` in the pinned llama-cpp-python. A bench needs it
because prefilling 4096 tokens once per setting and KV layout takes llama.cpp minutes on a small
machine, while what is measured, decode, depends on how much KV there is and not on its values.
Refuses models with sliding windows or recurrent layers: their state has another layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

CELL_BYTES = 12  # position, number of sequences (1), sequence


@dataclass(frozen=True)
class Tensor:
    """K or V of one layer: `rows` (rows, bytes) in cell order, or by dimension when transposed."""

    head: U8
    rows: U8


class _Reader:
    def __init__(self, data: U8) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> U8:
        part = self.data[self.at : self.at + size]
        if len(part) != size:
            raise ValueError("not a sequence state of this llama.cpp")
        self.at += size
        return part

    def left(self) -> int:
        return len(self.data) - self.at

    def u32(self) -> int:
        return int(self.take(4).view("<u4")[0])


class SequenceState:
    """A sequence that starts at position 0: `cells` tokens of K and V."""

    def __init__(
        self, magic: U8, cells: int, transposed: bool, k: list[Tensor], v: list[Tensor]
    ) -> None:
        self.magic, self.cells, self.transposed, self.k, self.v = magic, cells, transposed, k, v

    @staticmethod
    def parse(data: U8) -> SequenceState:
        """The state in bytes that llama.cpp wrote; ValueError when the layout is another one."""
        read = _Reader(data)
        magic = read.take(8)  # and the sequence's id
        streams = read.u32()
        cells = 0
        others = streams
        while others and not cells:  # one sequence lies in one stream, the others have no cells
            cells = read.u32()
            others -= 1
        positions = read.take(cells * CELL_BYTES).view("<i4").reshape(cells, 3)[:, 0]
        if not np.array_equal(positions, np.arange(cells)):
            raise ValueError("the sequence does not start at position 0")
        transposed, layers = bool(read.u32()), read.u32()
        k = [_by_token(read, cells) for _ in range(layers)]
        take_v = _by_dimension if transposed else _by_token
        # With latent attention (MLA) K has V.
        v = [take_v(read, cells) for _ in range(layers if read.left() > 4 * others else 0)]
        return SequenceState(magic, cells, transposed, k, v)

    def repeated(self, times: int) -> SequenceState:
        """The same KV `times` in a row, at positions 0, 1, ... of a longer sequence."""
        v_shape = (1, times) if self.transposed else (times, 1)
        return SequenceState(
            self.magic,
            self.cells * times,
            self.transposed,
            [Tensor(t.head, np.tile(t.rows, (times, 1))) for t in self.k],
            [Tensor(t.head, np.tile(t.rows, v_shape)) for t in self.v],
        )

    def data(self, stream: int, streams: int) -> U8:
        """The bytes that a context of `streams` streams (1 = unified KV) restores into `stream`."""
        meta = np.zeros((self.cells, 3), "<i4")
        meta[:, 0] = np.arange(self.cells)
        meta[:, 1] = 1
        tensors = [part for t in (*self.k, *self.v) for part in (t.head, t.rows.reshape(-1))]
        parts = [
            self.magic,
            _words(streams, *[0] * stream, self.cells),
            meta.reshape(-1).view(np.uint8),
            _words(int(self.transposed), len(self.k)),
            *tensors,
            _words(*[0] * (streams - 1 - stream)),
        ]
        return np.concatenate(parts)


def _words(*values: int) -> U8:
    return np.array(values, "<u4").view(np.uint8)


def _by_token(read: _Reader, cells: int) -> Tensor:
    head = read.take(12)  # type, bytes of a row
    size = int(head[4:].view("<u8")[0])
    return Tensor(head, read.take(cells * size).reshape(cells, size))


def _by_dimension(read: _Reader, cells: int) -> Tensor:
    head = read.take(12)  # type, bytes of an element, dimensions
    element, dimensions = (int(x) for x in head[4:].view("<u4"))
    return Tensor(head, read.take(dimensions * cells * element).reshape(dimensions, -1))
