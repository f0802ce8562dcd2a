"""The process of a `ChildDaemon`: the command line, drained by SIGTERM when its parent ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil

from batchengine.child import guard
from service.cli import main
from service.cli.local.child import remove_scratch


def run(arguments: list[str]) -> None:
    """`arguments`: the parent's pid, the scratch folder that it removes ("" = none), the command
    line."""
    parent, scratch, *command = arguments
    try:
        guard.tie_to_parent(int(parent), signal.SIGTERM)
        code = main.run(command)
    finally:
        if os.getppid() != int(parent) and scratch:
            # Only after every thread has ended: one may still be packing weights into the folder.
            atexit.register(_clean_up, Path(scratch))
    sys.exit(code)


def _clean_up(scratch: Path) -> None:
    """Ends the workers and removes the folder, in place of the parent."""
    workers = psutil.Process().children(recursive=True)
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    psutil.wait_procs(workers, timeout=5.0)
    remove_scratch(scratch)


if __name__ == "__main__":
    run(sys.argv[1:])
