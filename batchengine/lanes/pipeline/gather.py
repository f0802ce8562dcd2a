"""Tiles of one pipeline, gathered into arena slots of the worker that owns it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import xxhash

from batchengine.wire.data import Tile
from batchengine.wire.frames import Payload

PAGES_MAX = 1 << 16


class BadTile(Exception):
    """Why a gathering must end."""


class GatherPart(NamedTuple):
    """What comes by `link`: tiles of layers [first, end) of a page, and bytes [state_first,
    state_end) of the model's recurrent state."""

    link: int
    first: int
    end: int
    state_first: int = 0
    state_end: int = 0


class TileGather:
    """The pages of one pipeline, from the first on: those accepted have a slot.

    `tile` is the writable memory of one layer of a slot.
    """

    def __init__(
        self,
        parts: Sequence[GatherPart],
        tile: Callable[[int, int], memoryview],
        counts: Counter[str],
    ) -> None:
        self.parts = tuple(parts)
        self.complete = 0  # leading pages
        self._n_layers = parts[-1].end
        self._tile = tile
        self._counts = counts
        self._slots: list[int] = []
        self._missing: list[set[int]] = []  # layers, of each accepted page

    @property
    def accepted(self) -> int:
        """Pages that have a slot."""
        return len(self._slots)

    def needs(self, slots: Collection[int]) -> bool:
        """Whether tiles may still come for one of these slots."""
        waiting = range(self.complete, len(self._slots))
        return any(self._slots[page] in slots and self._missing[page] for page in waiting)

    def accept(self, slots: Sequence[int]) -> None:
        """Take tiles of the next pages into these slots. Raises BadStep for a slot without owner,
        BadTile for too many."""
        if len(self._slots) + len(slots) > PAGES_MAX:
            raise BadTile(f"more than {PAGES_MAX} pages")
        for slot in slots:
            self._tile(slot, 0)  # raises
        self._slots += slots
        self._missing += [set(range(self._n_layers)) for _ in slots]

    def take(self, link: int, tile: Tile, data: Payload) -> bool:
        """Put a tile into its place; True if more leading pages are complete by it.

        A tile that is there already is counted and dropped. Raises BadTile for one that does not
        fit: of another link's layer, of a page without a slot, or with other bytes than its digest.
        """
        page, layer = tile.page, tile.layer
        part = next((part for part in self.parts if part.first <= layer < part.end), None)
        if part is None or part.link != link:
            raise BadTile(f"layer {layer} from a peer that does not compute it")
        if not 0 <= page < len(self._slots):
            raise BadTile(f"page {page} of {len(self._slots)}")
        memory = self._tile(self._slots[page], layer)
        if len(data) != len(memory) or xxhash.xxh3_128_digest(data) != tile.digest:
            raise BadTile(f"page {page}, layer {layer}: the bytes differ from their digest")
        if layer not in self._missing[page]:
            self._counts["duplicate"] += 1
            return False
        memory[:] = data
        self._missing[page].discard(layer)
        before = self.complete
        while self.complete < len(self._missing) and not self._missing[self.complete]:
            self.complete += 1
        return self.complete > before
