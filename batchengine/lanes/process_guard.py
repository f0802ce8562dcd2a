"""Guards a worker process at its start: it ends with its parent and leaves no core file.

Owns the system calls; independent of models and frames.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
# A worker is disposable and the engine is not: the kernel should choose the worker first.
OOM_SCORE_ADJ = "300"


def guard_process(parent_pid: int, report_fd: int) -> None:
    """Tie this process to its parent and send the report of a fatal signal to `report_fd`.

    Ends at once when the parent is already gone. Order matters: after PR_SET_DUMPABLE=0
    /proc/self belongs to root, so the oom score is written before it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit(0)
    with contextlib.suppress(OSError):  # containers may forbid it; the worker runs anyway
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a core holds prompts
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    faulthandler.enable(file=report_fd, all_threads=False)
    # Ctrl-C in a terminal reaches the whole group; only the engine may decide to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
