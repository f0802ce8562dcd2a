"""What the assembler made of a kernel: float instructions that its source does not write.

`nvdisasm` comes with the package nvidia-cuda-nvdisasm, or with CUDA.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.cuda.assembly.compiled import compiled
from kernels.cuda.compile import CompileUnit

PACKAGE, PROGRAM = "nvidia", "nvdisasm"
FOLDERS = ("cu13/bin", "cuda_nvdisasm/bin")  # of the package, by its version
# Integer operations in place of those that are made of merged or otherwise rounded ones: none of
# these is left then.
OPAQUE = """
#define BITS(x) __float_as_uint(x)
#define __fmaf_rn(a, b, c) __uint_as_float(BITS(a) ^ BITS(b) ^ BITS(c))
#define __fdiv_rn(a, b) __uint_as_float(BITS(a) ^ BITS(b) >> 1)
#define __fsqrt_rn(a) __uint_as_float(BITS(a) >> 1)
"""
DIVISION = 6  # instructions between the parts of one
WAIT, ACCESSES = "ACQBULK", ("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED")
SECTION = re.compile(r"^\.text\.(\w+):", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", re.MULTILINE)
# FADD.FTZ, FFMA2.RZ, MUFU.SQRT. A division of integers has MUFU.RCP; that of 16 bits on sm_100 also
# FMUL.RZ between it and F2I, see `_divides`.
FOREIGN = re.compile(
    r"U?FFMA.*|D(?:ADD|MUL|FMA|SETP).*|MUFU\.(?!RCP).*"
    r"|U?F(?:ADD|MUL|SETP|SET|MNMX)[\d.]*.*\b(?:FTZ|SAT|RZ|RP|RM)\b.*"
)


def disassembler() -> str | None:
    """The path of nvdisasm, if it is installed."""
    found = importlib.util.find_spec(PACKAGE)
    for place in found.submodule_search_locations or () if found else ():
        for folder in FOLDERS:
            if (Path(place) / folder / PROGRAM).is_file():
                return str(Path(place) / folder / PROGRAM)
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/local/cuda/bin")


def listings(cubin: bytes) -> dict[str, list[str]]:
    """The instructions of each kernel with their modifiers, in order.

    Raises FileNotFoundError without nvdisasm.
    """
    program = disassembler()
    if program is None:
        raise FileNotFoundError(PROGRAM)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([program, "-c", file.name], capture_output=True, check=True).stdout
    parts = SECTION.split(text.decode())
    bodies = zip(parts[1::2], parts[2::2], strict=True)
    return {name: INSTRUCTION.findall(body) for name, body in bodies}


def early(listing: Iterable[str]) -> list[str]:
    """Accesses to global memory that stand before the wait of a kernel for the launches before, or
    that it does not wait."""
    before: list[str] = []
    for name in listing:
        operation = name.split(".")[0]
        if operation == WAIT:
            return before
        if operation in ACCESSES:
            before.append(name)
    return ["no wait"]


def loads_at_once(listing: Iterable[str]) -> int:
    """The most loads of global memory without a branch or a product between them."""
    most = now = 0
    for name in listing:
        operation = name.split(".")[0]
        now = 0 if operation in ("BRA", "BAR", "IMMA") else now + (operation == "LDG")
        most = max(most, now)
    return most


def foreign(unit: CompileUnit, target: str, **changes: Any) -> list[str]:
    """Instructions of kernels that merge, flush or round otherwise, though no source says so."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / unit.source.name
        source.write_text(OPAQUE + unit.source.read_text())
        made = listings(compiled(unit._replace(source=source), target, **changes).cubin)
    return sorted(
        f"{kernel}: {name}"
        for kernel, listing in made.items()
        for name in {name for at, name in enumerate(listing) if not _divides(listing, at)}
        if FOREIGN.fullmatch(name)
    )


def _divides(listing: Sequence[str], at: int) -> bool:
    """Whether an instruction is the FMUL.RZ of a division of integers, whose quotient is exact."""
    before, behind = listing[max(0, at - DIVISION) : at], listing[at + 1 : at + 1 + DIVISION]
    converts = any(name.startswith("F2I.U32.TRUNC") for name in behind)
    return listing[at] == "FMUL.RZ" and "I2F.U16.RZ" in before and "MUFU.RCP" in before and converts
