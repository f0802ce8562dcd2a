"""What a child process may use: memory, processor time, and no files, processes or sockets.

Owns the limits of the calling process; all of them are for good.
"""

from __future__ import annotations

import os
import resource

from batchengine.child import confinement


def confine(address_bytes: int) -> None:
    """Limits this process for good: bounded memory, no files, processes or sockets.

    A kernel that refuses the filter of system calls refuses it to workers too, which log it.
    """
    confinement.confine()
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 3)
    _limit(resource.RLIMIT_AS, address_bytes)


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


class Memory:
    """The memory of this process; opened before files are forbidden."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def resident_bytes(self) -> int:
        return int(os.pread(self._fd, 256, 0).split()[1]) * resource.getpagesize()

    def address_bytes(self) -> int:
        return int(os.pread(self._fd, 256, 0).split()[0]) * resource.getpagesize()


def set_cpu_limit(cpu_s: int) -> None:
    """CPU limits count from the start of the process; each request gets a share of its own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
