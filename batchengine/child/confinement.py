"""The system calls that a process gives up once it has loaded, as a seccomp filter.

A lane worker and a text process then compute on what they have open: they start no program and no
process, open no socket, and cannot touch another process or the machine. A refused call fails
with EPERM. Owns the tables of call numbers and the filter program; it holds for every thread, and
for good.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass

SET_MODE_FILTER, ALL_THREADS = 1, 1
KEEP_SPECULATION = 4  # kernels before 5.16 slow every store of a filtered process otherwise
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
CLONE_THREAD = 0x10000
X32_BIT = 0x40000000  # call numbers of the x32 ABI
TIOCLINUX = 0x541C

# Offsets in struct seccomp_data, and the words of the filter language.
OFFSET_NR, OFFSET_ARCH, OFFSET_ARGS = 0, 4, 16
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


@dataclass(frozen=True, slots=True)
class Architecture:
    """A processor architecture: its audit number, and the numbers of calls that differ by it."""

    audit: int
    has_x32: bool
    seccomp: int
    calls: Mapping[str, int]


# Refused by number. Those that an architecture does not have are left out of its table.
REFUSED = (
    # programs and processes
    "execve", "execveat", "fork", "vfork",
    # the network, and the sockets of other programs
    "socket", "socketpair", "connect", "bind", "listen", "accept", "accept4",
    # other processes
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease",
    "kcmp", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "tkill", "migrate_pages",
    "move_pages", "setpriority", "ioprio_set", "sched_setscheduler", "sched_setparam",
    "sched_setattr",
    # file systems and namespaces
    "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "mount_setattr", "open_tree",
    "open_tree_attr", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "quotactl",
    "quotactl_fd", "name_to_handle_at", "open_by_handle_at", "fanotify_init",
    # the larger attack surfaces of the kernel
    "bpf", "keyctl", "add_key", "request_key", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "userfaultfd", "perf_event_open", "modify_ldt", "personality",
    # the machine
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
    "swapon", "swapoff", "acct", "syslog", "iopl", "ioperm", "sethostname", "setdomainname",
    "settimeofday", "clock_settime", "adjtimex", "clock_adjtime",
)  # fmt: skip
# Allowed for this process only: their first argument is a process id.
OWN_ONLY = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
SELF_OR_ZERO = ("prlimit64", "sched_setaffinity")  # where 0 is the caller
# Second arguments that are refused: signals to an owner of a file, input for a terminal.
REFUSED_COMMANDS = {
    "fcntl": (fcntl.F_SETOWN, 15, 10),  # F_SETOWN_EX, F_SETSIG
    "ioctl": (termios.TIOCSTI, TIOCLINUX),
}
# The number of every call since Linux 5.1 is the same on both.
NEW_CALLS = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "process_mrelease": 448,
    "open_tree_attr": 467,
}  # fmt: skip
X86_64 = Architecture(0xC000003E, True, 317, NEW_CALLS | {
    "ioctl": 16, "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50,
    "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "fcntl": 72,
    "ptrace": 101, "syslog": 103, "rt_sigqueueinfo": 129, "personality": 135, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "modify_ldt": 154, "pivot_root": 155,
    "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
    "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
    "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "quotactl": 179, "tkill": 200, "sched_setaffinity": 203, "clock_settime": 227, "tgkill": 234,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "migrate_pages": 256, "unshare": 272, "move_pages": 279, "accept4": 288,
    "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "sched_setattr": 314, "kexec_file_load": 320, "bpf": 321, "execveat": 322, "userfaultfd": 323,
})  # fmt: skip
AARCH64 = Architecture(0xC00000B7, False, 277, NEW_CALLS | {
    "fcntl": 25, "ioctl": 29, "ioprio_set": 30, "umount2": 39, "mount": 40, "pivot_root": 41,
    "chroot": 51, "quotactl": 60, "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117,
    "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129,
    "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
    "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203,
    "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "execve": 221, "swapon": 224,
    "swapoff": 225, "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240,
    "perf_event_open": 241, "accept4": 242, "prlimit64": 261, "fanotify_init": 262,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
    "sched_setattr": 274, "bpf": 280, "execveat": 281, "userfaultfd": 282, "kexec_file_load": 294,
})  # fmt: skip
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("words", ctypes.c_void_p))


def confine() -> str:
    """Give the calls up, in every thread; returns why the kernel refuses the filter, or "".

    The kernel takes it from a process that has called `guard.drop_privileges`.
    """
    kind = ARCHITECTURES.get(platform.machine())
    if kind is None:
        return f"there is no table of system calls for {platform.machine()}"
    words = ctypes.create_string_buffer(program(kind, os.getpid()))
    length = len(words) // 8  # one word has 8 bytes; the buffer ends with a zero byte
    filter_program = _Program(length, ctypes.cast(words, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(kind.seccomp),
        ctypes.c_ulong(SET_MODE_FILTER),
        ctypes.c_ulong(ALL_THREADS | KEEP_SPECULATION),
        ctypes.byref(filter_program),
    )
    if done < 0:
        return os.strerror(ctypes.get_errno())
    return f"thread {done} has another filter" if done else ""


def program(architecture: Architecture, pid: int) -> bytes:
    """The filter for process `pid`, in the kernel's form. Pure."""
    calls = architecture.calls
    words = [
        _word(LOAD, OFFSET_ARCH),
        _word(JUMP_EQUAL, architecture.audit, 1, 0),
        _refuse(errno.EPERM),
        _word(LOAD, OFFSET_NR),
    ]
    if architecture.has_x32:
        words += [_word(JUMP_AT_LEAST, X32_BIT, 0, 1), _refuse(errno.EPERM)]
    # Its flags are in memory, which a filter cannot read; without it the C library uses clone.
    words += [_word(JUMP_EQUAL, calls["clone3"], 0, 1), _refuse(errno.ENOSYS)]
    for name in REFUSED:
        if name in calls:
            words += [_word(JUMP_EQUAL, calls[name], 0, 1), _refuse(errno.EPERM)]
    words += _on_argument(calls["clone"], 0, [_word(JUMP_ANY_BIT, CLONE_THREAD, 1, 0)])
    for name in OWN_ONLY:
        words += _on_argument(calls[name], 0, [_word(JUMP_EQUAL, pid, 1, 0)])
    for name in SELF_OR_ZERO:
        either = [_word(JUMP_EQUAL, 0, 2, 0), _word(JUMP_EQUAL, pid, 1, 0)]
        words += _on_argument(calls[name], 0, either)
    for name, commands in REFUSED_COMMANDS.items():
        for command in commands:
            other = [_word(JUMP_EQUAL, command, 0, 1)]
            words += _on_argument(calls[name], 1, other)
    return b"".join([*words, _word(RETURN, RET_ALLOW)])


def _on_argument(call: int, index: int, checks: list[bytes]) -> list[bytes]:
    """Checks on the low half of an argument, which decide whether the call is refused.

    They fall through to the refusal, or jump over it.
    """
    body = [_word(LOAD, OFFSET_ARGS + 8 * index), *checks, _refuse(errno.EPERM)]
    return [_word(JUMP_EQUAL, call, 0, len(body) + 1), *body, _word(LOAD, OFFSET_NR)]


def _refuse(number: int) -> bytes:
    return _word(RETURN, RET_ERRNO | number)


def _word(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
