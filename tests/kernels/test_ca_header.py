"""ca.h is one definition for C++ and CUDA C++: both readings of it compute the same bits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "kernels/csrc/common/ca.h"
HERE = Path(__file__).parent / "header"
PROGRAM = HERE / "print_ca.cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")

SHIM = ("-include", str(HERE / "cuda_shim.h"))
DEVICE = ("-D__CUDACC__", "-D__CUDA_ARCH__=900", *SHIM)
HOST = ("-D__CUDACC__", *SHIM)  # nvcc compiles every file for the host too
RUN_TIME = ("-D__CUDACC_RTC__", "-D__CUDA_ARCH__=900", *SHIM)  # NVRTC has no standard headers

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compile_with(*arguments: str) -> None:
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    include = f"-I{ROOT}/kernels/csrc"
    subprocess.run([str(COMPILER), *flags, include, *arguments], check=True)


def printed(binary: Path, *definitions: str) -> dict[str, str]:
    """The hash of each function's results, in one reading of the header."""
    compile_with(*definitions, str(PROGRAM), "-o", str(binary))
    output = subprocess.run([binary], check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(line.rsplit(" ", 1) for line in output.splitlines())


@needs_compiler
def test_the_header_computes_the_same_as_cplusplus_and_as_cuda(tmp_path: Path) -> None:
    plain = printed(tmp_path / "plain")
    assert len(plain) >= 40
    assert printed(tmp_path / "device", *DEVICE) == plain
    assert printed(tmp_path / "host", *HOST) == plain


@needs_compiler
def test_the_header_needs_no_standard_header_at_run_time(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text('#include "common/ca.h"\n')
    compile_with(*RUN_TIME, "-nostdinc", "-nostdinc++", "-fsyntax-only", str(source))


def test_the_program_calls_every_function() -> None:
    """A function that others of the header call is covered by them."""
    code = re.sub(r"//.*", "", HEADER.read_text())
    functions = set(re.findall(r"^CA_FN [\w ]+?(\w+)\(", code, re.MULTILINE))
    assert {"expc", "fold", "share_of"} <= functions
    program = PROGRAM.read_text()
    for name in functions:
        called = len(re.findall(rf"\b{name}\(", code)) - len(
            re.findall(rf"^CA_FN [\w ]+?\b{name}\(", code, re.MULTILINE)
        )
        assert called or f"ca::{name}(" in program, f"print_ca.cpp does not call {name}"
