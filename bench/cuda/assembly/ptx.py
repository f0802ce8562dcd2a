"""What the compiler made of a kernel: float operations that differ from what its source writes,
reads of memory as if no thread wrote it, and accesses that stand before its wait for the launches
before."""

from __future__ import annotations

import re
from collections import Counter

from bench.cuda.assembly.compiled import compiled
from kernels.cuda.compile import CompileUnit

ROUNDED = ("add", "sub", "mul", "div", "sqrt", "fma")
# Operations on floats that are exact, or that the source names: no result depends on the compiler.
EXACT = ("mov", "ld", "st", "selp", "setp", "set", "abs", "neg", "min", "max", "cvt")
HALF = "cvt.f32.f16"  # exact
# Of a kernel's registers the assembler puts a few into local memory where one more warp fits then.
STACK_BYTES_MAX = 48
STALE = "ld.global.nc"  # may give what was there before the launch before
ENTRY = re.compile(r"\.entry (\w+)\(")
FLOAT = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*[\w.:]*\.(?:b?f|tf|e)\d+[\w.]*)\s", re.MULTILINE)
GUARD = re.compile(r"^\s*@!?%p\d+\s+", re.MULTILINE)
WAIT = "griddepcontrol.wait"
WAIT_TARGET_MIN = 90  # below it launches do not begin early
TARGET = re.compile(r"^\.target sm_(\d+)", re.MULTILINE)
ACCESS = re.compile(
    r"^\s*((?:ld|st|atom|red|cp)\.(?!param|async\.bulk\.prefetch)[\w.:]+)", re.MULTILINE
)
STACK = re.compile(
    r"function '(\w+)' for '(\w+)'\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores", re.DOTALL
)


def kernels_of(ptx: str) -> dict[str, str]:
    """The text of each kernel of a PTX module."""
    parts = ENTRY.split(ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def float_operations(ptx: str) -> Counter[str]:
    """Instructions on floats with their whole names, and how often they stand in the text."""
    return Counter(match[1] for match in FLOAT.finditer(ptx))


def early(kernel: str) -> list[str]:
    """Accesses to memory that stand before the wait of a kernel for the launches before, or that it
    does not wait."""
    before, wait, _ = GUARD.sub("", kernel).partition(WAIT)
    return [f"{name} before its wait" for name in ACCESS.findall(before)] if wait else ["no wait"]


def faults(ptx: str, report: str) -> list[str]:
    """What no module may hold: floats that are not binary32 rounded to nearest, local memory,
    reads that may be stale or too early."""
    found: list[str] = []
    targets = [int(target) for target in TARGET.findall(ptx)]
    for kernel, text in kernels_of(ptx).items():
        found += [f"{kernel}: {STALE}"] * (STALE in text)
        if max(targets) >= WAIT_TARGET_MIN:
            found += [f"{kernel}: {fault}" for fault in early(text)]
        for name in float_operations(text):
            operation, *rest = name.split(".")
            if operation in ROUNDED:
                fine = rest in (["rn", "f32"], ["rn", "f32x2"])
            else:
                other = re.compile(r"b?f16|bf16|tf32|f64|e\dm\d|approx|ftz|sat").match
                fine = operation in EXACT and not any(other(part) for part in rest)
                fine = fine or name == HALF
            if not fine:
                found.append(f"{kernel}: {name}")
    for kernel, target, stack, spilled in STACK.findall(report):
        if int(stack) > STACK_BYTES_MAX:
            found.append(f"{kernel} for {target}: {stack} bytes of stack, {spilled} bytes spilled")
    return found


def contracted(unit: CompileUnit, target: str) -> list[str]:
    """Kernels of a unit that would have other operations if the compiler might merge a * b + c.

    Every float operation is written by a function that the compiler may not merge, so none may be.
    """
    plain, free = (kernels_of(compiled(unit, target, fmad=fmad).ptx) for fmad in (False, True))
    return [name for name in plain if float_operations(plain[name]) != float_operations(free[name])]
