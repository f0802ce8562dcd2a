"""Guards a worker process at its start: it ends with its parent, is private, and yields to it.

Owns the order of the calls; independent of models and frames.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

from batchengine.child import guard

# A worker is disposable and the engine is not: the kernel should choose the worker first.
OOM_SCORE_ADJ = "300"
# Below the engine, which a woken worker would otherwise displace for some ms at each step: it
# plans steps of other lanes, sends tokens and admits requests.
LANE_NICE = 10


def guard_process(parent_pid: int, report_fd: int) -> None:
    """Tie this process to its parent, lower its priority, and send the report of a fatal signal to
    `report_fd`.

    Ends at once when the parent is already gone. Order matters: once the process is not dumpable,
    /proc/self belongs to root, so the oom score is written before that.
    """
    guard.tie_to_parent(parent_pid)
    os.nice(LANE_NICE)
    with contextlib.suppress(OSError):  # containers may forbid it; the worker runs anyway
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
    guard.drop_privileges()
    guard.keep_private()
    faulthandler.enable(file=report_fd, all_threads=False)
    # Ctrl-C in a terminal reaches the whole group; only the engine may decide to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
