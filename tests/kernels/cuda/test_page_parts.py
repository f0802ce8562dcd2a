"""Parts of pages: which layers are in which, and which pages of a timeline a step needs of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kernels
from kernels.cuda.page_parts import PageParts, Place, Run, page_table, pages_seen_max, seen

TOKENS = kernels.PAGE_TOKENS


def test_layers_with_a_window_are_a_part_of_runs() -> None:
    shape = kernels.PageShape([(2, 32), (1, 64), (1, 32), (1, 32), (3, 32)])
    sizes = [shape.layer(i).page_bytes for i in range(5)]
    parts = PageParts(shape, [40, 40, 0, 40, 0], 1024)
    first, second = parts.parts
    ends = np.cumsum(sizes).tolist()
    assert first.runs == (Run(0, ends[1]), Run(ends[2], ends[3]))
    assert second.runs == (Run(ends[1], ends[2]), Run(ends[3], ends[4]))
    assert (parts.windows, first.n_bytes) == ((40, 0), sizes[0] + sizes[1] + sizes[3])
    assert first.n_bytes + second.n_bytes == shape.payload_bytes
    of_first = Place(0, 0), Place(0, sizes[0]), Place(0, sizes[0] + sizes[1])
    assert parts.places == [*of_first[:2], Place(1, 0), of_first[2], Place(1, sizes[2])]


def test_pages_are_whole_without_windows_that_hide_anything() -> None:
    shape = kernels.PageShape([(1, 32), (1, 32)])
    for parts in (
        PageParts(shape),
        PageParts(shape, [0, 0]),
        PageParts(shape, [1024, 0], 1024),
        PageParts(shape, [2048, 4096], 1024),
    ):
        assert parts.windows == (0,)
        assert parts.parts[0].runs == (Run(0, shape.payload_bytes),)
        assert [place.offset for place in parts.places] == [0, shape.layer(1).page_offset]
    assert PageParts(shape, [1023, 1023], 1024).windows == (1023,)
    with pytest.raises(ValueError, match="1 windows of 2 layers"):
        PageParts(shape, [40])


@pytest.mark.parametrize("window", [1, 2, 40, 255, 256, 257, 258, 513, 1024])
def test_a_token_sees_at_most_so_many_pages(window: int) -> None:
    positions = np.arange(3 * TOKENS + window)
    first = np.maximum(positions - window + 1, 0) // TOKENS
    assert int((positions // TOKENS - first).max()) + 1 == pages_seen_max(window)


def random_step(rng: np.random.Generator, *, decodes: bool) -> np.ndarray[Any, Any]:
    """Tokens, start and pages of some entries."""
    n = int(rng.integers(1, 5))
    counts = np.ones(n, np.int64) if decodes else rng.integers(1, 700, n)
    starts = rng.integers(0, 2500, n)
    return np.stack([counts, starts, -(-(starts + counts) // TOKENS)], 1).astype(np.int32)


@pytest.mark.parametrize("window", [0, 1, 40, 256, 300, 1024])
def test_the_table_of_a_step_has_the_pages_that_its_tokens_see(window: int) -> None:
    """Wherever a kernel looks for them; those of hidden pages are at most behind the others."""
    rng = np.random.default_rng(window)
    for _ in range(100):
        shape = random_step(rng, decodes=bool(rng.integers(2)))
        n_pages = shape[:, 2]
        addresses = rng.integers(1, 1 << 40, int(n_pages.sum())).astype(np.uint64)
        is_seen = seen(shape, window)
        addresses[~is_seen] = 0
        table = page_table(shape, addresses, window)
        wanted, index = [], []
        first = 0
        for (n, start, pages), of_entry in zip(shape.tolist(), table.firsts.tolist(), strict=True):
            for position in range(start, start + n):
                low = max(0, position - window + 1) // TOKENS if window else 0
                for page in range(low, position // TOKENS + 1):
                    wanted.append(addresses[first + page])
                    index.append(of_entry + page)
            first += pages
        assert min(index) >= 0
        assert all(wanted)
        assert np.array_equal(table.pages[index], wanted)
        assert set(table.pages.tolist()) <= {0, *wanted}
        if window:
            assert set(is_seen.nonzero()[0]) == {addresses.tolist().index(a) for a in wanted}


@pytest.mark.parametrize("window", [1, 40, 256, 300])
def test_tables_of_decodes_have_one_size(window: int) -> None:
    """What lies behind them is where it was, as captured launches need it."""
    rng, sizes = np.random.default_rng(3), set[int]()
    for _ in range(30):
        starts = rng.integers(0, 3000, 4)
        shape = np.stack([np.ones(4, np.int64), starts, starts // TOKENS + 1], 1).astype(np.int32)
        addresses = np.ones(int(shape[:, 2].sum()), np.uint64)
        sizes.add(len(page_table(shape, addresses, window).pages))
    assert sizes == {4 * pages_seen_max(window)}
