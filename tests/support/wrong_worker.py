"""A worker that computes wrong KV without an error.

Same process, frames and memory as the real one; one token is read as another. Started by exec as
`python -m tests.support.wrong_worker ...`.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import numpy as np

from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.host_device import Computed
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire

WRONG = 2008  # other KV, on the lane that is named "bad"


class WrongDevice(CpuDevice):
    """Computes wrong rows with valid records, as faulty arithmetic does."""

    lane = ""

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        return super().compute(self._misread(batch), addresses, seeds)

    def _misread(self, batch: StepInput) -> StepInput:
        tokens = batch.tokens.tolist()
        if WRONG not in tokens or self.lane != "bad":
            return batch
        other = [99 if token == WRONG else token for token in tokens]
        return dataclasses.replace(batch, tokens=np.array(other, np.int32))


class WrongWorker(Worker):
    """A worker that keeps the name of its lane."""

    def _attach(self, attach: wire.Attach) -> wire.LaneMessage:
        WrongDevice.lane = os.path.basename(attach.arena_path).partition(".")[0]
        return super()._attach(attach)


if __name__ == "__main__":
    main(partial(WrongWorker, devices={wire.CpuResources: WrongDevice}))
