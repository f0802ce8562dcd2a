"""One stage of a pipeline: some layers of one timeline, in memory of its own.

Pages and recurrent states hold these layers only. Rows of the residual stream come in the order of
the tokens, in any pieces, and are computed in any other pieces: the bits are the same.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import kernels
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.pipeline.states import StageStates
from batchengine.lanes.step_input import I32Array
from batchengine.model import Model, Stepper
from batchengine.wire import lane as wire
from batchengine.wire.data import WINDOW_PAGES, Hidden
from batchengine.wire.frames import Payload

F32 = npt.NDArray[np.float32]


class StageEnded(Exception):
    """Why a stage cannot go on."""


class StageLayers:
    """The pages and states of one stage, and the rows that wait for it.

    `previous`, `following`, `owner` are numbers of open links; None: there is no such stage.
    """

    def __init__(
        self,
        note: wire.OpenStage,
        stepper: Stepper,
        *,
        previous: int | None,
        following: int | None,
        owner: int,
    ) -> None:
        """Raises StageEnded for a note that does not fit the model, or without memory for it."""
        n_layers = len(stepper.model.layers)
        if not 0 <= note.first < note.end <= n_layers:
            raise StageEnded(f"layers {note.first} to {note.end} of {n_layers}")
        if note.n_tokens < PAGE_TOKENS or note.n_tokens % PAGE_TOKENS:
            raise StageEnded(f"{note.n_tokens} tokens are not whole pages")
        if (note.first == 0) != (previous is None) or (note.end == n_layers) != (following is None):
            raise StageEnded("its neighbours do not fit its layers")
        self.note = note
        self.previous, self.following, self.owner = previous, following, owner
        self.frontier = 0
        self.arrived = 0 if note.first else note.n_tokens
        self._stepper = stepper
        model = stepper.model
        self._layers = list(model.layers)[note.first : note.end]
        rows = rows_of(model, note.first, note.end)
        layers = [model.shape.layer(index) for index in rows]
        self._first_tile = rows.start
        self._origin = layers[0].page_offset if layers else 0
        self._tiles = [(of.page_offset - self._origin, of.page_bytes) for of in layers]
        self._page_bytes = sum(n_bytes for _, n_bytes in self._tiles)
        self._n_embd = model.spec.n_embd
        self._rows: deque[F32] = deque()
        self.states: StageStates | None = None
        if (model.states is None) != (note.state_interval == 0):
            raise StageEnded("it has recurrent state, or none, and its owner says otherwise")
        if note.state_interval % PAGE_TOKENS or note.state_interval < 0:
            raise StageEnded(f"{note.state_interval} tokens between two states")
        try:
            n_pages = note.n_tokens // PAGE_TOKENS
            self._memory = mmap.mmap(-1, max(1, self._page_bytes * n_pages))
            if note.state_interval:
                first, end = state_span(model, note.first, note.end)
                self.states = StageStates(first, end, note.state_interval, note.n_tokens)
        except OSError as error:
            raise StageEnded(f"no memory for its pages: {error.strerror}") from None
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._base = kernels.address_of(self._view)

    @property
    def links(self) -> set[int]:
        """The links that the stage needs."""
        return {link for link in (self.previous, self.following, self.owner) if link is not None}

    def on_hidden(self, link: int, message: Hidden, data: Payload) -> None:
        """Keep rows until they are computed. Raises StageEnded for rows that do not follow."""
        n = message.n_tokens
        if link != self.previous or message.start != self.arrived:
            raise StageEnded(f"rows from {message.start} came by link {link}, not {self.arrived}")
        if not 1 <= n <= self.note.n_tokens - self.arrived or len(data) != 4 * n * self._n_embd:
            raise StageEnded(f"{n} rows in {len(data)} bytes")
        if self.arrived + n - self.frontier > WINDOW_PAGES * PAGE_TOKENS:
            raise StageEnded(f"{self.arrived + n - self.frontier} rows wait")
        self._rows.append(np.frombuffer(data, np.float32).reshape(n, self._n_embd))
        self.arrived += n

    def compute(self, n: int, tokens: I32Array) -> F32:
        """Compute the next `n` tokens; returns their rows after the last layer of the stage, which
        the next call overwrites. Raises StageEnded for rows that are not finite."""
        stepper, start = self._stepper, self.frontier
        n_pages = -(-(start + n) // PAGE_TOKENS)
        # The kernels find a layer of a page at its offset: the page's address is before its memory.
        origin = self._base - self._origin
        pages = np.uint64(origin) + np.arange(n_pages, dtype=np.uint64) * np.uint64(
            self._page_bytes
        )
        ids = tokens if not self.note.first else np.zeros(n, np.int32)
        states = None if self.states is None else self.states.chunk(start + n)
        stepper.set(ids, np.array([[n, start, n_pages]], np.int32), pages, states=states)
        hidden = stepper.hidden.view(n)
        if self.note.first:
            self._take_rows(hidden)
        else:
            stepper.embed()
        if not stepper.run_stage(self._layers):
            raise StageEnded("its numbers are not finite")
        self.frontier += n
        return hidden

    def _take_rows(self, into: F32) -> None:
        at = 0
        while at < len(into):
            rows = self._rows.popleft()
            n = min(len(rows), len(into) - at)
            into[at : at + n] = rows[:n]
            if n < len(rows):
                self._rows.appendleft(rows[n:])
            at += n

    def tiles(self, page: int) -> Iterator[tuple[int, memoryview]]:
        """Layer of the page and bytes of each tile of a full page."""
        for index, (offset, n_bytes) in enumerate(self._tiles):
            at = page * self._page_bytes + offset
            yield self._first_tile + index, self._view[at : at + n_bytes]

    def state_parts(self) -> Iterator[tuple[int, memoryview]]:
        """Offset and bytes of each part of the state at the frontier, if the owner wants it."""
        if self.states is not None and self.states.is_wanted(self.frontier):
            yield from self.states.parts(self.frontier)


def rows_of(model: Model, first: int, end: int) -> range:
    """The layers of a page that layers [first, end) of the model have."""
    has_rows = model.spec.has_rows
    return range(sum(has_rows[:first]), sum(has_rows[:end]))


def state_span(model: Model, first: int, end: int) -> tuple[int, int]:
    """The bytes [first, end) of the model's recurrent state that its layers [first, end) have."""
    if model.states is None:
        return 0, 0
    rows = rows_of(model, first, end)
    n_bytes = model.states.layer_bytes
    return (first - rows.start) * n_bytes, (end - rows.stop) * n_bytes
