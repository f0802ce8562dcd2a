"""Recurrent states of pipelines: those that a stage computes, and those that come to an owner.

A stage keeps the state behind each position that its owner wants until the stage ends, since its
parts are sent while later tokens are computed. An owner puts the parts of a state together and
saves it to a file, from which sessions go on.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

import kernels
from batchengine.lanes.pipeline.gather import BadTile, GatherPart
from batchengine.lanes.step_input import U64Array
from batchengine.wire import lane as wire
from batchengine.wire.data import STATE_PART_BYTES, StatePart
from batchengine.wire.frames import Payload
from kv_store.states import is_state_name

CACHE_LINE = 64  # bytes
SCRATCH = 2  # states of a stage that no owner wants: one is read while the other is written

SaveState = Callable[[str, int, memoryview], bool]  # name, seed and bytes of a file


class StageStates:
    """The states of one stage: bytes [first, end) of the model's whole state, behind each multiple
    of `interval` tokens, behind the last of `n_tokens`, and at the frontier."""

    def __init__(self, first: int, end: int, interval: int, n_tokens: int) -> None:
        """Raises OSError without memory for them."""
        self.interval = interval
        self._n_tokens = n_tokens
        self._first, self._bytes = first, end - first
        self._stride = max(self._bytes, CACHE_LINE)  # of layers without state, too
        self._n_wanted = -(-n_tokens // interval)
        self._computed = 0  # chunks
        self._read = 0  # address of the state at the frontier, 0 at position 0
        self._memory = memoryview(mmap.mmap(-1, (self._n_wanted + SCRATCH) * self._stride))
        self._origin = kernels.address_of(self._memory) - first

    def next_wanted(self, position: int) -> int:
        """The first position behind `position` whose state is wanted."""
        return min((position // self.interval + 1) * self.interval, self._n_tokens)

    def is_wanted(self, position: int) -> bool:
        """Whether the owner wants the state behind the first `position` tokens."""
        return position % self.interval == 0 or position == self._n_tokens

    def chunk(self, end: int) -> U64Array:
        """Where the next chunk, up to position `end`, reads its state and writes the one behind it
        (1, 2)."""
        slot = self._slot(end) if self.is_wanted(end) else self._n_wanted + self._computed % SCRATCH
        read, self._read = self._read, self._origin + slot * self._stride
        self._computed += 1
        return np.array([[read, self._read]], np.uint64)

    def parts(self, position: int) -> Iterator[tuple[int, memoryview]]:
        """Offset in the model's whole state, and bytes, of each part of the state at a wanted
        position."""
        at = self._slot(position) * self._stride
        for offset in range(0, self._bytes, STATE_PART_BYTES):
            n = min(STATE_PART_BYTES, self._bytes - offset)
            yield self._first + offset, self._memory[at + offset : at + offset + n]

    def _slot(self, wanted: int) -> int:
        return -(-wanted // self.interval) - 1


class ComingState(NamedTuple):
    """A state that is not complete: its memory, None if it is left out, and of each part of the
    pipeline the offset of the next byte."""

    name: str
    seed: int
    memory: memoryview | None
    offsets: list[int]


class StateGather:
    """The states of one pipeline in the order in which the engine has named them. `complete` counts
    the leading ones that are saved, or were left out."""

    def __init__(
        self,
        parts: Sequence[GatherPart],
        state_bytes: int,
        save: SaveState,
        counts: Counter[str],
    ) -> None:
        self.complete = 0
        self._parts = tuple(parts)
        self._bytes = state_bytes
        self._save, self._counts = save, counts
        self._positions: list[int] = []
        self._coming: dict[int, ComingState] = {}  # by position

    def accept(self, note: wire.GatherState) -> None:
        """Take parts of the state at this position. Raises BadTile for one that does not follow
        those before, or without memory for it."""
        if not self._bytes or note.position <= max([0, *self._positions[-1:]]):
            raise BadTile(f"a state at {note.position} does not follow")
        memory: memoryview | None = None
        if note.name and not is_state_name(note.name):
            raise BadTile("a file that is not named like a state")
        if note.name:
            try:
                memory = memoryview(mmap.mmap(-1, self._bytes))
            except OSError as error:
                raise BadTile(f"no memory for a state: {error.strerror}") from None
        self._positions.append(note.position)
        offsets = [part.state_first for part in self._parts]
        self._coming[note.position] = ComingState(note.name, note.seed, memory, offsets)

    def take(self, link: int, part: StatePart, data: Payload) -> bool:
        """Put a part of a state into its place; True if more leading states are complete by it.

        One that is there already is counted and dropped. Raises BadTile for one that does not fit,
        with other bytes than its digest, or of a state that the disk does not take.
        """
        at, n = part.offset, len(data)
        index = next(
            (i for i, of in enumerate(self._parts) if of.state_first <= at < of.state_end), None
        )
        if index is None or self._parts[index].link != link:
            raise BadTile(f"byte {at} of a state from a peer that does not compute it")
        if part.position not in self._positions:
            raise BadTile(f"a state at {part.position}, which was not named")
        if not 1 <= n <= STATE_PART_BYTES or xxhash.xxh3_128_digest(data) != part.digest:
            raise BadTile(f"{n} bytes of a state at {part.position} differ from their digest")
        state = self._coming.get(part.position)
        if state is None or at < state.offsets[index]:
            self._counts["duplicate"] += 1
            return False
        if at > state.offsets[index] or at + n > self._parts[index].state_end:
            raise BadTile(f"bytes {at} to {at + n} of a state at {part.position} do not follow")
        state.offsets[index] = at + n
        if state.memory is not None:
            state.memory[at : at + n] = data
        if any(
            offset < of.state_end for offset, of in zip(state.offsets, self._parts, strict=True)
        ):
            return False
        del self._coming[part.position]
        if state.memory is not None and not self._save(state.name, state.seed, state.memory):
            raise BadTile("the disk takes no state")
        before = self.complete
        while self.complete < len(self._positions) and (
            self._positions[self.complete] not in self._coming
        ):
            self.complete += 1
        return self.complete > before
