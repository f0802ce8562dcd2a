"""A GPU that is emulated: kernels of kernels/cuda/src, compiled for the CPU by g++.

`compile_kernels` builds it once per source text. Faults of kernels are `EmulatorFault`s.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.cuda.compile import texts
from kernels.cuda.gpu import DeviceFacts, Gpu, GpuFault, Graph, KernelLaunch, Mark, words_of

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels/cuda/src"
COMPILER = shutil.which("g++")  # whose flags keep every call in one place
FLAGS = (
    *("-std=c++20", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
    # simt.cpp compares the calls by which threads reach a collective: each is in one place.
    *("-fno-omit-frame-pointer", "-fno-thread-jumps", "-fno-crossjumping", "-fno-tree-tail-merge"),
    "-freorder-blocks-algorithm=simple",  # the other one copies blocks
    "-fno-ipa-icf",  # one of two equal functions in place of the other has arrays of other sizes
)
RUNNER = HERE / "simt.cpp"
# Of kernels, and of what runs them, where most of the time is spent: kernels at -O2 take half as
# long again to compile, and as long to run.
LEVELS = "-O1", "-O3"
FILLS = (0xA5, 0xFF, 0x00, 0x7F)  # bytes of new memory, by seed: any value, NaN, zero, large
INCLUDE = (f"-I{ROOT / 'kernels/csrc'}", f"-I{KERNELS}", f"-I{HERE}", "-DBATCHENGINE_SIMT")


class EmulatorFault(GpuFault):
    """A kernel did what a GPU does not define, or a launch is impossible."""


def compile_kernels(
    folder: Path,
    sources: Iterable[Path] | None = None,
    *,
    is_checked: bool = True,
) -> Path:
    """The shared library of kernel sources (default: all) in `folder`, built unless it is there."""
    sources = sorted(KERNELS.glob("*.cu")) if sources is None else list(sources)
    flags = (*FLAGS, *INCLUDE, *(() if is_checked else ("-DSIMT_UNCHECKED",)))
    text = hashlib.sha256(" ".join((*LEVELS, *flags)).encode())
    included = {path for source in sources for path in texts(source)}
    for path in (*sorted(included), *sorted(HERE.glob("simt.*"))):
        text.update(path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"simt-{text.hexdigest()[:16]}.so"
    if not library.exists():
        with library.with_suffix(".lock").open("w") as lock:  # others may want the same
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(library, sources, flags)
    return library


def _compile(library: Path, sources: Iterable[Path], flags: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as own:
        objects: list[str] = []
        for path in (RUNNER, *sources):
            objects.append(f"{own}/{path.stem}.o")
            level = LEVELS[path == RUNNER]
            command = [
                str(COMPILER),
                level,
                *flags,
                "-c",
                "-x",
                "c++",
                str(path),
                "-o",
                objects[-1],
            ]
            subprocess.run(command, check=True)
        part = Path(own) / library.name
        subprocess.run([str(COMPILER), "-shared", *objects, "-o", str(part)], check=True)
        part.replace(library)


@dataclass(frozen=True, slots=True)
class Launches(Graph):
    """Launches in their order."""

    gpu: Gpu
    captured: list[KernelLaunch]

    def replay(self) -> None:
        """Run them."""
        for launch in self.captured:
            self.gpu.launch(*launch)

    def close(self) -> None:
        """Nothing is held."""


class Ended(Mark):
    """A point that is always passed."""

    is_passed = True

    def wait(self) -> None:
        """Nothing goes on."""


class Emulator(Gpu):
    """An emulated GPU; a launch has ended when it returns. Raises EmulatorFault.

    `seed`: the order of blocks and threads (0 rising, 1 falling, else shuffled), and what new
    memory holds. `first_block`: the first one of a grid that runs.
    """

    def __init__(self, library: Path, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.first_block = 0, 0, 0
        self._captured: list[KernelLaunch] | None = None
        self.facts = DeviceFacts("an emulated GPU", 1 << 30, 1, (0, 0))
        self._c = c = ctypes.CDLL(str(library))
        c.simt_error.restype = ctypes.c_char_p
        c.simt_kernels.restype = ctypes.c_char_p
        c.simt_allocate.restype = ctypes.c_uint64

    def kernels(self) -> list[str]:
        """Names of the kernels."""
        return str(self._c.simt_kernels().decode()).split()

    def size_of(self, address: int) -> int:
        """Bytes of an allocation."""
        return self._sizes[address]

    def _allocate(self, n_bytes: int) -> int:
        fill = FILLS[self.seed % len(FILLS)]
        address: int = self._c.simt_allocate(ctypes.c_size_t(n_bytes), ctypes.c_int(fill))
        self._check(0)
        if not address:
            raise MemoryError
        return address

    def _free(self, address: int) -> None:
        self._check(self._c.simt_free(ctypes.c_uint64(address)))

    def copy_in(self, address: int, array: NDArray[np.generic]) -> None:
        """Copies a contiguous array to memory of the device."""
        pointer = ctypes.c_void_p(array.ctypes.data)
        self._check(
            self._c.simt_copy_in(ctypes.c_uint64(address), pointer, ctypes.c_size_t(array.nbytes))
        )

    def copy_aside(self, address: int, array: NDArray[np.generic]) -> None:
        """As `copy_in`."""
        self.copy_in(address, array)

    def fork(self) -> None:
        """Every call has ended."""

    def join(self) -> None:
        """Nothing is on its way."""

    def fetch(self, address: int, array: NDArray[np.generic]) -> None:
        """Copies memory of the device into a contiguous array."""
        pointer = ctypes.c_void_p(array.ctypes.data)
        self._check(
            self._c.simt_copy_out(pointer, ctypes.c_uint64(address), ctypes.c_size_t(array.nbytes))
        )

    def pin(self, array: NDArray[np.generic]) -> None:
        """Memory of the host is as good as any."""

    def synchronize(self) -> None:
        """Every call has ended."""

    def mark(self) -> Ended:
        """Every call has ended."""
        return Ended()

    def _launch(self, launch: KernelLaunch) -> None:
        if self._captured is not None:
            self._captured.append(launch)
            return
        words = words_of(launch.arguments)
        grid, first = (np.array(of, np.int32) for of in (launch.blocks, self.first_block))
        self._c.simt_begin_at(ctypes.c_void_p(first.ctypes.data))
        self._check(
            self._c.simt_launch(
                launch.kernel.encode(),
                ctypes.c_void_p(grid.ctypes.data),
                ctypes.c_int(launch.threads),
                ctypes.c_void_p(words.ctypes.data),
                ctypes.c_size_t(len(words)),
                ctypes.c_uint64(self.seed),
            )
        )

    def capture(self, run: Callable[[], None]) -> Launches:
        """The launches of `run`; EmulatorFault if it copies or allocates something."""
        captured = self._captured = []
        try:
            run()
        finally:
            self._captured = None
        return Launches(self, captured)

    def _check(self, failed: int) -> None:
        if self._captured is not None:
            raise EmulatorFault("a copy or an allocation in what is captured")
        if failed:
            raise EmulatorFault(self._c.simt_error().decode())
