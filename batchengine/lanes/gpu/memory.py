"""Host memory of a GPU lane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import kernels
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.gpu.late_rows import LateRows
from batchengine.lanes.gpu.page_cache import PageCopies
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.state_memory import StateSlots
from batchengine.lanes.step_input import SLOT_MASK, I32Array
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from kv_store.layout import PageLayout

IDLE_BYTES = 1 << 30  # of expected pages, copied by a frame without a step


class DeviceMemory(HostMemory):
    """Host memory whose changes make copies of its pages invalid. `late`: rows on their way."""

    def __init__(
        self,
        attach: wire.Attach,
        layout: PageLayout,
        copies: PageCopies,
        pool: kernels.Pool,
        states: StateSlots | None = None,
    ) -> None:
        """states: None of a model without."""
        super().__init__(attach, layout, states)
        self._copies = copies
        shape = kernels.PageShape(layout.layers)
        self.late = LateRows(pool, shape, self._address, self.record_places)

    def _address(self, slot: int) -> int:
        return int(self.addresses(np.array([ARENA_BIT | slot], np.uint64))[0])

    def prepare(self, step: wire.Step, imported: Sequence[I32Array]) -> tuple[int, ...]:
        """Do the chores before the computation; see LaneMemory."""
        changed = [
            *step.poison,
            *(slot.slot for slot in step.reserve),
            *(rows.to.slot for rows in step.import_rows),
        ]
        self.late.drop(changed)
        self.late.flush([rows.slot for rows in step.relabel])
        sources = [rows.source for rows in step.import_rows]
        own = [
            of for of in sources if isinstance(of, wire.FromArena) and of.arena == self.arena_name
        ]
        self.late.flush([source.slot for source in own])
        counts = super().prepare(step, imported)
        self._copies.forget([ARENA_BIT | slot for slot in changed])
        self._copies.forget(step.freed)
        if not step.entries:
            self._copies.copy_expected(IDLE_BYTES)
        return counts

    def touch(self, codes: Sequence[int]) -> list[int]:
        """Fault sealed pages in, and expect them on the GPU; store the rows of open ones that are
        on their way. See HostMemory."""
        self.late.flush([code & SLOT_MASK for code in codes if code >= ARENA_BIT])
        readable = super().touch(codes)
        if readable:
            self._copies.expect(readable, self.addresses(np.array(readable, np.uint64)))
        return readable

    def finish(self, step: wire.Step) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
        """Do the chores after the computation; see LaneMemory."""
        self.late.flush([of.slot for of in step.digest])
        self._copies.forget([ARENA_BIT | of.slot for of in step.digest if of.rows < PAGE_TOKENS])
        return super().finish(step)
