"""The base class of devices whose pages are in host memory.

Translates slot codes to addresses before the arithmetic, and records the new rows after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from batchengine.lanes.device import LaneMemory, Report
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.step_input import StepInput, StepOutput, U64Array
from batchengine.wire import lane as wire
from kv_store.layout import PageLayout


@dataclass(slots=True)
class HostOutput:
    """As StepOutput; row_digests: u64 per token of the batch, for the records of its rows."""

    rows: tuple[wire.SampledRow, ...]
    nonfinite: tuple[int, ...]
    row_digests: U64Array


class HostDevice(ABC):
    """A `Device` whose arithmetic, `compute`, reads and writes pages at host addresses."""

    def __init__(self) -> None:
        self.memory: HostMemory | None = None

    @abstractmethod
    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts: ...

    @abstractmethod
    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> HostOutput:
        """Run one forward pass; an address per slot code, a digest seed per token of the batch."""

    @abstractmethod
    def close(self) -> None: ...

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena of this worker."""
        self.memory = HostMemory(attach, layout)
        return self.memory

    def run(self, batch: StepInput) -> StepOutput:
        """Compute a step, then record which token each finite row holds."""
        memory = self.memory
        if memory is None:
            raise RuntimeError("run before attach")
        addresses, rows = memory.addresses(batch.codes), memory.rows_of(batch)
        output = self.compute(batch, addresses, rows.seeds)
        memory.record_rows(batch, rows, output.row_digests, output.nonfinite)
        return StepOutput(output.rows, output.nonfinite)
