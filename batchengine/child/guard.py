"""What a process gives up for good: core files, being read by others, and privileges.

Owns the system calls. Every function concerns the calling process only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def tie_to_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this process when its parent ends; exit if it has ended.

    Call it from the main thread, before others are started.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit(0)


def keep_private() -> None:
    """No core file, and no other process of this user may read or trace this one.

    A core holds prompts and keys. Where cores go to a program, its limit is ignored, and only
    the second call prevents one. What it costs: `py-spy` and `gdb` need root, and /proc/self/*
    belongs to root, so that files there that only their owner may open are closed to this process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_privileges() -> None:
    """Drop every capability but those that open files, and the way to gain others.

    They are per thread: call it before others are started. Without CAP_SYS_PTRACE a worker of
    root cannot read a process that is not dumpable either.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then those above 31
    libc.capget(header, data)
    files = 1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH
    libc.capset(header, (ctypes.c_uint32 * 6)(data[0] & files, data[1] & files, 0, 0, 0, 0))
