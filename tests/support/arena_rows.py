"""Row digests in Python, the reference for the kernel, and the arena rows that they prove."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kv_store import osio
from kv_store.arenas.arena import Arena, ArenaFile, ArenaShape, ArenaSlot, SlotOwner, proven_rows
from kv_store.layout import PAGE_TOKENS, PageLayout


def row_digests(
    layout: PageLayout,
    page: bytes | bytearray | memoryview,
    seeds: npt.NDArray[np.uint64],
    first_row: int = 0,
) -> npt.NDArray[np.uint64]:
    """XXH3-64 of each row's bytes."""
    rows = layout.gather_rows(page, first_row, len(seeds))
    digests = [
        xxhash.xxh3_64_intdigest(row.tobytes(), int(seed))
        for row, seed in zip(rows, seeds, strict=True)
    ]
    return np.array(digests, np.uint64)


def valid_rows(
    files: osio.Files,
    fd: int,
    shape: ArenaShape,
    arena_id: bytes,
    slot: int,
    owner: SlotOwner,
    ids: Sequence[int],
) -> int:
    """How many leading rows of `slot` are proven to hold the tokens `ids` of `owner`."""
    page = memoryview(bytearray(shape.layout.page_bytes))
    source = ArenaFile(fd, shape, arena_id, 0, "")
    return proven_rows(
        files, source, slot, owner, np.array(ids[:PAGE_TOKENS], np.uint32), page,
        lambda seeds: row_digests(shape.layout, page, seeds),
    )  # fmt: skip


def rows_left(arena: Arena, at: ArenaSlot, owner: SlotOwner, ids: Sequence[int]) -> int:
    """Count of complete rows that a dead writer left in a slot."""
    return valid_rows(osio.Files(), arena.fd, arena.shape, arena.arena_id, at.slot, owner, ids)
