"""How the memory of a GPU that is left for KV is divided between the parts of pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kernels.cuda.page_parts import PAGE_TOKENS, LayerPart, pages_seen_max


class KvRoom(NamedTuple):
    """What memory for copies of pages is for: steps of up to `tokens_max` tokens of up to
    `entries_max` entries, each of up to `context_pages`."""

    n_bytes: int
    context_pages: int
    tokens_max: int
    entries_max: int

    def pages_min(self, part: LayerPart) -> int:
        """Pages that a step of one entry may see."""
        if not part.window:
            return self.context_pages
        return min(self.context_pages, pages_seen_max(part.window + self.tokens_max - 1))

    def pages_useful(self, part: LayerPart) -> int:
        """Pages that a step of all entries may see, of a part with a window."""
        n = self.entries_max * pages_seen_max(part.window) + -(-self.tokens_max // PAGE_TOKENS)
        return min(n, self.entries_max * self.context_pages)


def bytes_min(parts: Sequence[LayerPart], room: KvRoom, taken_by: Callable[[int], int]) -> int:
    """Bytes of the pages of one context. taken_by: what an allocation of some bytes takes."""
    return sum([room.pages_min(part) * taken_by(part.n_bytes) for part in parts])


def divide(
    parts: Sequence[LayerPart], room: KvRoom, taken_by: Callable[[int], int]
) -> tuple[int, ...]:
    """How many pages of each part fit together: of each but the last as many as steps may see, if
    half of what one context leaves has room for them. There must be room for one context."""
    left = room.n_bytes - bytes_min(parts, room, taken_by)
    counts: list[int] = []
    for part in parts[:-1]:
        least, of_page = room.pages_min(part), taken_by(part.n_bytes)
        more = max(0, min(room.pages_useful(part) - least, left // 2 // of_page))
        counts.append(least + more)
        left -= more * of_page
    return *counts, room.pages_min(parts[-1]) + left // taken_by(parts[-1].n_bytes)
