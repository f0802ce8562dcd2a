"""States of sequences of llama.cpp, as the bench moves them between contexts."""

from __future__ import annotations

import numpy as np
import pytest

from bench.models.llama_state import CELL_BYTES, SequenceState, Tensor

CELLS, LAYERS = 5, 2
MAGIC = np.arange(8, dtype=np.uint8)


def row_tensor(width: int) -> Tensor:
    """K, or V that is not transposed: `width` bytes of each token."""
    head = np.concatenate([np.zeros(4, np.uint8), np.array([width], "<u8").view(np.uint8)])
    rows = np.arange(CELLS * width, dtype=np.uint8).reshape(CELLS, width)
    return Tensor(head, rows)


@pytest.mark.parametrize("has_v", [True, False])  # with latent attention K has V
@pytest.mark.parametrize(("stream", "streams"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_a_state_is_read_as_it_is_written(has_v: bool, stream: int, streams: int) -> None:
    k = [row_tensor(12) for _ in range(LAYERS)]
    v = [row_tensor(8) for _ in range(LAYERS)] if has_v else []
    data = SequenceState(MAGIC, CELLS, False, k, v).data(stream, streams)
    read = SequenceState.parse(data)
    assert (read.cells, len(read.k), len(read.v)) == (CELLS, LAYERS, len(v))
    assert np.array_equal(read.data(stream, streams), data)
    longer = SequenceState.parse(read.repeated(3).data(0, 1))
    for once, thrice in zip([*k, *v], [*longer.k, *longer.v], strict=True):
        assert np.array_equal(thrice.rows, np.tile(once.rows, (3, 1)))


def test_a_state_that_is_cut_off_is_refused() -> None:
    k = [row_tensor(12) for _ in range(LAYERS)]
    data = SequenceState(MAGIC, CELLS, False, k, k).data(0, 1)
    for size in (len(data) - 1, 12 + CELL_BYTES):
        with pytest.raises(ValueError, match="not a sequence state"):
            SequenceState.parse(data[:size])
