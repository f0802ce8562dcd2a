"""Kernels compiled for a target by NVRTC, and a folder of cubins that are ready.

A target is a compute capability, such as `sm_90`. Compiling needs the packages of the extra `cuda`
and no device.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kernels.cuda.products import kernel_of

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")  # those that are tested; others of this age compile
SOURCES = Path(__file__).resolve().parent / "src"
INCLUDES = (SOURCES, SOURCES.parents[1] / "csrc")
# No option may change a rounding: ca.h writes each one, and nothing is merged or approximated.
OPTIONS: dict[str, str | bool] = {
    "std": "c++20",
    "fmad": False,
    "ftz": False,
    "prec_div": True,
    "prec_sqrt": True,
    "ptxas_options": "-v",  # the report has registers, stack frame and spills of each kernel
}
_importing = threading.Lock()
WAITING_S = 5.0
DIGEST_BYTES = hashlib.sha256().digest_size
OF_KIND = re.compile(r"^QUANTISED\(([a-z]\w+)\)$", re.MULTILINE)  # lines of `linear.cu`


class CompileError(Exception):
    """The compiler refused a source, or it is not installed; the text is its log."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One source compiled for one target."""

    cubin: bytes
    ptx: str
    report: str  # of the assembler


class CompileUnit(NamedTuple):
    """What is compiled alone: a source, or what it has for one kind of quantised matrices."""

    source: Path
    kind: str = ""

    @property
    def name(self) -> str:
        """That of the source, with the kind."""
        return f"{self.source.stem}-{self.kind}" if self.kind else self.source.stem


def sources() -> list[Path]:
    """The files of kernels."""
    return sorted(SOURCES.glob("*.cu"))


def units(kinds: Collection[str] | None = None) -> list[CompileUnit]:
    """What to compile for matrices of these kinds, or of all: of a source with kernels by kind a
    unit a kind, which takes as long as most other sources together."""
    needed = None if kinds is None else {kernel_of(kind) for kind in kinds}
    found: list[CompileUnit] = []
    for source in sources():
        own = OF_KIND.findall(source.read_text())
        wanted = [CompileUnit(source, kind) for kind in own if needed is None or kind in needed]
        found += wanted if own else [CompileUnit(source)]
    return found


def compile_unit(unit: CompileUnit, target: str, **changes: str | bool) -> Compiled:
    """One unit for one target, with `changes` of OPTIONS. Raises CompileError."""
    nvrtc = _package("cuda.bindings.nvrtc")
    options = [f"--gpu-architecture={target}", *[f"--include-path={path}" for path in INCLUDES]]
    if unit.kind:
        options.append(f"--define-macro=KIND={unit.kind}")
    for name, value in (OPTIONS | changes).items():
        text = str(value).lower() if isinstance(value, bool) else value
        options.append(f"--{name.replace('_', '-')}={text}")
    given = [option.encode() for option in options]
    try:
        text, name = unit.source.read_bytes(), unit.source.name.encode()
        _, program = nvrtc.nvrtcCreateProgram(text, name, 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        report = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{status.name} {report.decode()}")
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        nvrtc.nvrtcDestroyProgram(program)
    except Exception as error:  # the library is not there, or knows no such function
        by = "NVRTC {}.{}".format(*_compiler())
        raise CompileError(f"{unit.name} for {target} by {by}: {error}") from error
    return Compiled(cubin, ptx.rstrip(b"\0").decode(), report.rstrip(b"\0").decode())


def _read(size: Any, read: Any, program: Any) -> bytes:
    """What NVRTC has made of a program."""
    data = bytes(size(program)[1])
    read(program, data)
    return data


def cubins(
    target: str,
    folder: Path,
    wanted: Iterable[CompileUnit] | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> dict[str, bytes]:
    """Cubins of units (default: all) by their names, from `folder` or compiled into it.

    Uses all cores of this process, and calls `waiting` every WAITING_S meanwhile. Raises
    CompileError, and OSError if the folder cannot be used.
    """
    wanted = units() if wanted is None else wanted
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = {unit.name: pool.submit(_cubin, unit, target, folder) for unit in wanted}
        while wait(made.values(), WAITING_S).not_done:
            waiting()
        return {name: cubin.result() for name, cubin in made.items()}


def _cubin(unit: CompileUnit, target: str, folder: Path) -> bytes:
    path = folder / f"{unit.name}-{target}-{_key(unit, target)}.cubin"
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        kept = b""
    digest, cubin = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    if digest == hashlib.sha256(cubin).digest():
        return cubin
    cubin = compile_unit(unit, target).cubin
    fd, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=folder)
    try:
        with open(fd, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.rename(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return cubin


def _key(unit: CompileUnit, target: str) -> str:
    """What a cubin is made of: texts, kind, options, target, compiler."""
    key = hashlib.sha256(repr((unit.kind, OPTIONS, target, _compiler())).encode())
    for path in texts(unit.source):
        text = path.read_bytes()
        key.update(len(text).to_bytes(8, "little") + text)
    return key.hexdigest()[:32]


def texts(source: Path) -> list[Path]:
    """A source and every file that it includes, in the order of their first mention."""
    found = [source]
    for path in found:
        for name in re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE):
            for folder in INCLUDES:
                if (folder / name).is_file() and folder / name not in found:
                    found.append(folder / name)
    return found


def _compiler() -> tuple[int, int]:
    try:
        major, minor = _package("cuda.bindings.nvrtc").nvrtcVersion()[1:]
    except CompileError:
        raise
    except Exception as error:  # the library is not there
        raise CompileError(str(error)) from error
    return int(major), int(minor)


def _package(name: str) -> Any:
    """A module of the extra `cuda`, which has no types."""
    try:
        with _importing:  # a module is not whole to a thread that comes second
            return importlib.import_module(name)
    except ImportError as error:
        raise CompileError(f"{error}: install batchengine[cuda]") from error
