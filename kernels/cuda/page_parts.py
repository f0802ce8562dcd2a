"""The layers of a page, in parts that have copies of their own in memory of a GPU.

Queries of a layer with a window see the last tokens of a timeline only. So the GPU needs K and V of
such layers for the last pages of it, and of the other layers for all. On the host a page is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kernels

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
BoolArray = NDArray[np.bool_]
PAGE_TOKENS = kernels.PAGE_TOKENS


class Run(NamedTuple):
    """Bytes [start, end) of a page on the host."""

    start: int
    end: int


class LayerPart(NamedTuple):
    """Layers of a page whose queries see a `window` of tokens; 0: all. `runs`: where the page has
    them; in the part they lie one after another."""

    window: int
    runs: tuple[Run, ...]

    @property
    def n_bytes(self) -> int:
        return sum([run.end - run.start for run in self.runs])


class Place(NamedTuple):
    """Where a layer lies: in which part, and from which byte of it on."""

    part: int
    offset: int


class PageParts:
    """The parts of the pages of a model: layers with windows, the shortest first, then the others.

    windows: of each layer of the page, 0 for none. A window of `context_tokens`, which are those of
    the longest timeline, or more is none.
    """

    def __init__(
        self, shape: kernels.PageShape, windows: Sequence[int] = (), context_tokens: int = 0
    ) -> None:
        """Without windows, pages have one part. ValueError unless there is one of each layer."""
        layers = [shape.layer(index) for index in range(shape.n_layer)]
        of_layers = [
            w if w < (context_tokens or w + 1) else 0 for w in windows or [0] * len(layers)
        ]
        if len(of_layers) != len(layers):
            raise ValueError(f"{len(of_layers)} windows of {len(layers)} layers")
        kinds = sorted(set(of_layers), key=lambda window: (window == 0, window))
        self.places: list[Place] = [Place(0, 0)] * len(layers)
        parts: list[LayerPart] = []
        for part, window in enumerate(kinds):
            runs, offset = list[Run](), 0
            for index, (layer, own) in enumerate(zip(layers, of_layers, strict=True)):
                if own != window:
                    continue
                self.places[index] = Place(part, offset)
                start, end = layer.page_offset, layer.page_offset + layer.page_bytes
                if runs and runs[-1].end == start:
                    start = runs.pop().start
                runs.append(Run(start, end))
                offset += layer.page_bytes
            parts.append(LayerPart(window, tuple(runs)))
        self.parts = tuple(parts)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each part."""
        return tuple([part.window for part in self.parts])


def first_seen(starts: I32, window: int) -> I32:
    """The index of the first page that the first token of each entry sees, of entries that begin at
    these positions."""
    return np.maximum(starts - (window - 1), 0) // PAGE_TOKENS if window else np.zeros_like(starts)


def pages_seen_max(window: int) -> int:
    """Pages that one token sees at most."""
    return (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1


def page_indices(n_pages: I32) -> I32:
    """The index of each page of a step among those of its entry; n_pages: of each entry."""
    return np.arange(int(n_pages.sum())) - np.repeat(np.cumsum(n_pages) - n_pages, n_pages)


def seen(shape: I32, window: int) -> BoolArray:
    """Whether a token of its entry sees each page of a step. shape (n, 3): tokens, start position
    and pages of each entry."""
    pages = shape[:, 2]
    if not window:
        return np.ones(int(pages.sum()), np.bool_)
    return page_indices(pages) >= np.repeat(first_seen(shape[:, 1], window), pages)


class PageTable(NamedTuple):
    """The pages of a step, of one part, by address. firsts: of each entry, where its page 0 is, or
    would be if it were there."""

    pages: U64
    firsts: I32


def page_table(entries: I32, addresses: U64, window: int) -> PageTable:
    """The pages of a part that tokens of their entries see. With a window, each entry has as many
    places as a token sees pages, at least."""
    starts, n_pages = entries[:, 1], entries[:, 2]
    if not window:
        return PageTable(addresses, np.cumsum(n_pages) - n_pages)
    hidden = first_seen(starts, window)
    counts = n_pages - hidden
    places = np.maximum(counts, pages_seen_max(window))
    firsts = np.cumsum(places) - places - hidden
    pages = np.zeros(int(places.sum()), np.uint64)
    is_seen = seen(entries, window)
    at = np.repeat(firsts, n_pages) + page_indices(n_pages)
    pages[at[is_seen]] = addresses[is_seen]
    return PageTable(pages, firsts)
