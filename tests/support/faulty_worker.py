"""A worker that fails at fault tokens of the prompt.

Same process, frames and memory as the real one; only `compute` is wrapped. Started by exec as
`python -m tests.support.faulty_worker ...`.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.host_device import Computed
from batchengine.lanes.step_input import StepInput, StepOutput, U64Array
from batchengine.lanes.worker import Worker, main
from batchengine.wire import lane as wire

# Ordinary words of the pocket vocabulary that tests otherwise avoid.
SEGV, NAN, HANG, RAISE, CRASH_ENGINE, KILL_ENGINE = 2001, 2002, 2003, 2004, 2005, 2006


def signaller() -> int:
    """A process beside the worker, which may send no signal itself, and the file that it reads:
    one byte is the number of a signal to the engine."""
    engine = os.getppid()
    numbers, ours = os.pipe()
    if os.fork() == 0:
        os.closerange(3, numbers)
        os.closerange(numbers + 1, 1024)
        if number := os.read(numbers, 1):
            os.kill(engine, number[0])
        os._exit(0)
    os.close(numbers)
    return ours


class FaultyDevice(CpuDevice):
    """Acts when a fault token is among the tokens of a step, after the KV was written."""

    def __init__(self) -> None:
        super().__init__()
        self._signals = signaller()

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        output, digests = super().compute(batch, addresses, seeds)
        tokens = set(batch.tokens.tolist())
        if SEGV in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        if tokens & {CRASH_ENGINE, KILL_ENGINE}:
            its_own = CRASH_ENGINE in tokens
            os.write(self._signals, bytes([signal.SIGSEGV if its_own else signal.SIGKILL]))
            time.sleep(3600)  # it ends with its parent
        if HANG in tokens:
            time.sleep(3600)
        if RAISE in tokens:
            raise RuntimeError("planted")
        if NAN in tokens:
            ends = batch.shape[:, 0].cumsum()
            hit = [int((ends <= i).sum()) for i, t in enumerate(batch.tokens) if t == NAN]
            rows = tuple(
                r for r in output.rows if r.session not in {batch.entries[i].session for i in hit}
            )
            return StepOutput(rows, tuple(sorted(set(hit)))), digests
        return output, digests


if __name__ == "__main__":
    main(partial(Worker, devices={wire.CpuResources: FaultyDevice}))
