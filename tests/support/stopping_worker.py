"""A worker that stops for good while it loads, as one that waits for a dead disk.

Same process, frames and memory as the real one. Started by exec as
`python -m tests.support.stopping_worker STAGE INCARNATION ...`: where it stops, and in which
incarnation; 0 = in every one. As stage, SLOWLY does not stop it: its load takes four seconds and
reports progress all the time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial

from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.device import LaneMemory, Report
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire
from kv_store.layout import PageLayout

STAGES = ("start", "map weights", "cpu kernels", "attach")
SLOWLY = "slowly"


class StoppingDevice(CpuDevice):
    """Stops after the first report of its stage."""

    stage = ""

    def stop_in(self, stage: str) -> None:
        if stage == self.stage:
            os.kill(os.getpid(), signal.SIGSTOP)

    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts:
        def reported(stage: str, detail: str, progress: float, seconds: float) -> None:
            report(stage, detail, progress, seconds)
            self.stop_in(stage)

        if self.stage == SLOWLY:
            for step in range(80):
                report("map weights", "", 0.01 * step, 0.05 * step)
                time.sleep(0.05)
        return super().load(load, reported)

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        self.stop_in("attach")
        return super().attach(attach, layout)


if __name__ == "__main__":
    stage, incarnation = sys.argv.pop(1), sys.argv.pop(1)
    if incarnation in ("0", sys.argv[5]):
        StoppingDevice.stage = stage
    StoppingDevice().stop_in("start")
    main(partial(Worker, devices={wire.CpuResources: StoppingDevice}))
