"""Makes the command line and the environment of every child process.

A child imports its modules from where this process does, never from the working directory, and
gets none of the variables of this process but a few that loaders, kernels and drivers read: the
others may hold keys. NumPy's library of linear algebra, which no child calls, starts no threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "/"  # the working directory of a child: no relative path finds a file of a caller
# which GPU has which index, and by whom it is shared
GPU_KEPT = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY"}
LOADERS_KEPT = {"LD_LIBRARY_PATH", "LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS"}
KEPT = {"BATCHENGINE_ISA", "CUDA_PATH", "CUDA_HOME"} | GPU_KEPT | LOADERS_KEPT


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module in this interpreter."""
    return (sys.executable, "-P", "-m", module, *arguments)


def environment(kept: Iterable[str] = ()) -> dict[str, str]:
    """The variables of a child: its search path, and those of `kept` and KEPT that are set."""
    return {
        **{name: os.environ[name] for name in (*KEPT, *kept) if name in os.environ},
        "PYTHONPATH": os.pathsep.join(search_path()),
        "PYTHONSAFEPATH": "1",  # as -P, for command lines that are made elsewhere
        "LC_ALL": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
    }


def search_path() -> list[str]:
    """The module search path of this process, without its working directory.

    A checkout that is the working directory stays: this package is loaded from there.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # the folder was removed
        here = ""
    found = [str(ROOT)] if str(ROOT) not in sys.path else []
    for entry in sys.path:
        is_here = os.path.realpath(entry) == here and here != str(ROOT)
        if os.path.isabs(entry) and os.pathsep not in entry and not is_here:
            found.append(entry)
    return found
