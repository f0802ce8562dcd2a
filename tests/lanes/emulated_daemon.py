"""A daemon whose GPU is emulated: `python -m tests.lanes.emulated_daemon PLAN CONFIG`.

PLAN is that of `emulated_worker`, CONFIG a configuration file.
"""

from __future__ import annotations

import sys

from batchengine.child.command import python_command
from batchengine.config import Config, load
from batchengine.engine import Engine
from service import daemon
from service.protocols.reading import READER


def run(plan: str, path: str) -> int:
    """Serve until a signal; returns the exit code."""
    command = python_command("tests.lanes.emulated_worker", plan)

    def make_engine(config: Config) -> Engine:
        return Engine(config, worker_command=command, reader=READER)

    return daemon.run(load(path), make_engine)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
