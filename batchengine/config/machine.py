"""Facts of this machine that defaults are derived from: cores, memory, directories, disk.

Reads facts only; `loading` makes defaults of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

MIB = 1 << 20
INSTANCES = "instances"  # folder of named instances
PORTS_TRIED = 64


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that defaults are derived from; a parameter so that tests can be another machine."""

    cores: tuple[int, ...]  # one logical core per physical core this process may use
    memory_bytes: int
    is_root: bool
    env: Mapping[str, str]
    home: str
    allowed: tuple[int, ...] = ()  # logical cores this process may use; () = `cores`

    @staticmethod
    def here() -> Machine:
        """This machine, through the affinity mask, the cpuset and the CPU quota."""
        return Machine(
            cores=_usable_cores(),
            memory_bytes=int(psutil.virtual_memory().total),
            is_root=os.geteuid() == 0,
            env=dict(os.environ),
            home=_home(),
            allowed=tuple(sorted(os.sched_getaffinity(0))),
        )


def _home() -> str:
    """The home directory; "" where there is none (a user id that is in no user database)."""
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _usable_cores() -> tuple[int, ...]:
    """The lowest logical core of every physical core in the affinity mask, within the quota."""
    allowed = sorted(os.sched_getaffinity(0))
    first_of: dict[str, int] = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            first_of.setdefault(siblings.read_text().strip(), core)
        except OSError:
            first_of.setdefault(str(core), core)
    cores = sorted(first_of.values())
    return tuple(cores[: max(1, _quota_cores(len(cores)))])


def _quota_cores(cores: int) -> int:
    """Cores a cgroup v2 CPU quota leaves: spinning threads beyond it would be throttled."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        return cores


def directory(machine: Machine, systemd: str, system: str, xdg: str, under_home: str) -> str:
    """A directory in the order: systemd's variable, system path for root, XDG, home.

    A relative path of XDG does not count, as its specification says: it would be another folder
    for each working directory.
    """
    if machine.env.get(systemd):
        return machine.env[systemd].split(":")[0]
    if machine.is_root:
        return f"{system}/batchengine"
    known = under_home and machine.home
    base = machine.env.get(xdg, "")
    if not base.startswith("/"):
        base = f"{machine.home}/{under_home}" if known else ""
    return f"{base}/batchengine" if base else ""


def folder_of(instance: str, base: str) -> str:
    """The folder of an instance below that of the daemon without a name; "" where there is none."""
    return f"{base}/{INSTANCES}/{instance}" if instance and base else base


def free_port(host: str, first: int) -> int:
    """The first port from `first` on without a listener; 0 if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, first + PORTS_TRIED):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
            return port
    return 0


def budget_bytes(store_dir: str, machine: Machine) -> int:
    """Half of memory (the page cache is the tier that serves), at most half of the free disk."""
    free_bytes, _ = disk_bytes(store_dir) or (0, 0)
    return max(64 * MIB, min(machine.memory_bytes // 2, free_bytes // 2))


def disk_bytes(path: str) -> tuple[int, int] | None:
    """Free and total bytes of the disk that holds `path`, or would; None where none is found.

    Whether the path can be used is checked where it is opened.
    """
    probe = Path(path).absolute()
    while True:
        try:
            usage = psutil.disk_usage(str(probe))
            return int(usage.free), int(usage.total)
        except OSError:  # it does not exist yet, is not readable, or is too long
            if probe == probe.parent:
                return None
            probe = probe.parent


def model_hint(path: str) -> str:
    """What to give instead of `path`, which is no model file: one in that folder, if there is."""
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
    found: str | None = None
    with contextlib.suppress(OSError, ValueError):
        found = min(map(str, folder.glob("*.gguf")), default=None)
    such_as = f", such as {found}" if found else ""
    return (
        f"give the path of a GGUF file{such_as}, or on the command line pocket = the toy model;"
        " none is downloaded"
    )
