"""The base class of devices whose pages are in host memory.

Translates slot codes to addresses before the arithmetic, and records the new rows after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from batchengine.lanes.device import LaneMemory, Report
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.step_input import StepInput, StepOutput, U64Array
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT, HELD_BIT
from kv_store.layout import PageLayout


@dataclass(slots=True)
class HostOutput:
    """As StepOutput; row_digests: u64 per token of the batch, for the records of its rows."""

    rows: tuple[wire.SampledRow, ...]
    nonfinite: tuple[int, ...]
    row_digests: U64Array
    unreachable: tuple[int, ...] = ()
    waited_us: int = 0


class HostDevice(ABC):
    """A `Device` whose arithmetic, `compute`, reads and writes pages at host addresses."""

    def __init__(self) -> None:
        self.memory: HostMemory | None = None

    @abstractmethod
    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts: ...

    @abstractmethod
    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> HostOutput:
        """Run one forward pass; an address per slot code, a digest seed per token of the batch.

        The address of a page that a peer holds is 0.
        """

    @abstractmethod
    def close(self) -> None: ...

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena of this worker."""
        self.memory = HostMemory(attach, layout)
        return self.memory

    def connect(self, links: DataLinks) -> Ring:
        """Attend to pages over data links; a device that cannot is given none."""
        raise RuntimeError("this device attends to no page of a peer")

    def run(self, batch: StepInput) -> StepOutput:
        """Compute a step, then record which token each finite row holds."""
        memory = self.memory
        if memory is None:
            raise RuntimeError("run before attach")
        addresses, rows = _addresses(memory, batch), memory.rows_of(batch)
        output = self.compute(batch, addresses, rows.seeds)
        unusable = output.nonfinite + output.unreachable
        memory.record_rows(batch, rows, output.row_digests, unusable)
        return StepOutput(output.rows, output.nonfinite, output.unreachable, output.waited_us)


def _addresses(memory: HostMemory, batch: StepInput) -> U64Array:
    if not batch.is_routed:
        return memory.addresses(batch.codes)
    is_here = batch.codes & np.uint64(HELD_BIT | ARENA_BIT) != np.uint64(HELD_BIT)
    addresses = np.zeros(len(batch.codes), np.uint64)
    addresses[is_here] = memory.addresses(batch.codes[is_here])
    return addresses
