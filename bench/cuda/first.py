"""The first contact with a GPU: every kernel once or twice on small shapes, against the CPU.

    python -m bench.cuda.first [NAME...]

Launches are waited for one by one, so that a failure names its kernel. Before it, `contact` shows
in seconds whether the device, its driver and the compiler work, with the kernels of one source.
`sanitized` does the same as the first under compute-sanitizer, if it is there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any, cast

import numpy as np

import kernels
from batchengine.child.command import python_command
from bench.cuda.arrays import Arrays
from bench.cuda.cases import Differs, cases
from bench.cuda.gpus import open_gpu, wait
from kernels.cuda.compile import SOURCES, units
from kernels.cuda.gpu import Gpu, GpuFault, KernelLaunch

SEEDS = 4  # random cases of a name
CONTACT_SOURCE = SOURCES / "rows.cu"
CONTACT_CASES = "take samples", "gates", "values"  # which need no other source
LAUNCHES, VALUES = 50, 1000  # one behind another
MEMCHECK = "memcheck"
TOOLS = MEMCHECK, "synccheck", "racecheck"
SANITIZER, TOOLKITS = "compute-sanitizer", ("/usr/local/cuda/bin", "/opt/cuda/bin")
SANITIZED_S = 150.0
ERRORS_EXIT = 86  # of compute-sanitizer, if it has found something
SAID = re.compile(r"^=+ +(.*\S)", re.MULTILINE)


class OneByOne:
    """Another GPU, which waits after each launch."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def launch(self, *launch: Any) -> None:
        """Run a kernel to its end. Raises GpuFault with its name."""
        try:
            self._gpu.launch(*launch)
            wait(self._gpu)
        except GpuFault as fault:
            one = KernelLaunch(*launch)
            shape = f"grid {one.blocks}, {one.threads} threads"
            raise GpuFault(f"{one.kernel}, {shape}: {fault}") from fault


def differences(gpu: Gpu, pool: kernels.Pool, name: str, seeds: int = SEEDS) -> list[str]:
    """What differs in the first cases of a name. Raises GpuFault with the name of a kernel."""
    found: list[str] = []
    for seed in range(seeds):
        try:
            cases()[name](cast(Gpu, OneByOne(gpu)), pool, np.random.default_rng([seed, 7]))
        except Differs as difference:
            found.append(f"seed {seed}: {difference}")
    return found


def contact(gpu: Gpu, pool: kernels.Pool) -> list[str]:
    """What differs in some cases, and in launches that follow one another without a wait, that are
    captured, and that are replayed; copies go the ways of steps. Raises GpuFault."""
    found = [f"{n}: {x}" for n in CONTACT_CASES for x in differences(gpu, pool, n, 1)]
    pinned, want = np.zeros(VALUES, np.float32), np.zeros(VALUES, np.float32)
    gpu.pin(pinned)
    with Arrays(gpu) as arrays:
        x, y = arrays.put(want), arrays.put(want)
        arguments = [y.address, VALUES, VALUES, x.address, VALUES, 1.0]

        def add() -> None:
            for _ in range(LAUNCHES):  # each reads what the one before has written
                gpu.launch("scaled_add", (1, -(-VALUES // 256), 1), 256, arguments)

        def check(way: str) -> None:
            want[:] += LAUNCHES * added
            gpu.fetch(x.address, pinned)
            gpu.mark().wait()
            if not np.array_equal(pinned, want):
                found.append(f"launches that are {way}: {pinned[0]}, not {want[0]}")

        added = np.arange(VALUES, dtype=np.float32)
        gpu.fork()
        gpu.copy_aside(y.address, added)
        gpu.join()
        add()
        check("queued")
        graph = gpu.capture(add)
        for way in ("captured", "replayed"):
            graph.replay()
            check(way)
        graph.close()
    return found


def sanitized(tool: str) -> dict[str, Any]:
    """What a tool of compute-sanitizer says of the same: `memcheck` of accesses to memory that is
    not allocated or not aligned, `synccheck` of barriers that some threads do not reach, and
    `racecheck` of shared memory. RuntimeError if it finds one."""
    program = shutil.which(SANITIZER, path=os.pathsep.join((os.environ["PATH"], *TOOLKITS)))
    if program is None:
        return {"absent": f"no {SANITIZER}"}
    command = [program, "--tool", tool, "--error-exitcode", str(ERRORS_EXIT)]
    # A kernel is looked for in one module after the other, and its parameters until one lacks.
    if tool == MEMCHECK:
        command += ["--report-api-errors", "no"]
    command += python_command("bench.cuda.first")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZED_S)
    except subprocess.TimeoutExpired:
        return {"absent": f"it took more than {SANITIZED_S:.0f} s"}
    said = SAID.findall(done.stdout)
    if done.returncode == ERRORS_EXIT:
        raise RuntimeError("; ".join(said[:8]))
    if done.returncode:  # it cannot work here, or a kernel differs, which other steps tell
        return {"absent": "; ".join((*said[-2:], *done.stderr.splitlines()[-1:]))}
    return {"said": said[-1] if said else ""}


def main(names: list[str]) -> int:
    gpu, _ = open_gpu(False, units())
    pool, has_failed = kernels.Pool(1), False
    for name in names or cases():
        for difference in differences(gpu, pool, name, 1):
            has_failed = True
            print(f"{name}: {difference}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
