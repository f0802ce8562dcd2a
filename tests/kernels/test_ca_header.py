"""ca.h and choice.h are one definition for C++ and CUDA C++: both readings of it compute the same
bits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = [ROOT / "kernels/csrc" / name for name in ("common/ca.h", "experts/choice.h")]
HERE = Path(__file__).parent / "header"
PROGRAM = HERE / "print_ca.cpp"
DEVICE_CODE = HERE / "device_ca.cu"
COMPILER = shutil.which("g++") or shutil.which("clang++")

SHIM = ("-include", str(HERE / "cuda_shim.h"))
DEVICE = ("-D__CUDACC__", "-D__CUDA_ARCH__=900", *SHIM)
HOST = ("-D__CUDACC__", *SHIM)  # nvcc compiles every file for the host too
RUN_TIME = ("-D__CUDACC_RTC__", "-D__CUDA_ARCH__=900", *SHIM)  # NVRTC has no standard headers

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")
ROUNDED = {"add", "sub", "mul", "div", "sqrt", "fma"}  # PTX operations that ca.h may use


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
@needs_nvcc
def test_the_host_code_of_nvcc_computes_the_same(tmp_path: Path) -> None:
    plain, cuda = tmp_path / "plain", tmp_path / "cuda"
    flags = ["-std=c++20", "-O2", "-Xcompiler", "-ffp-contract=off", f"-I{ROOT}/kernels/csrc"]
    subprocess.run([str(NVCC), *flags, "-x", "cu", str(PROGRAM), "-o", str(cuda)], check=True)
    output = subprocess.run([cuda], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert dict(line.rsplit(" ", 1) for line in output.splitlines()) == printed(plain)


@needs_nvcc
def test_the_device_code_of_nvcc_rounds_every_operation_as_written(tmp_path: Path) -> None:
    """nvcc may contract `mul.f32` and `add.f32`, but neither `mul.rn.f32` nor `add.rn.f32`; `.ftz`
    and `.approx` are other arithmetic."""
    flags = ["-std=c++20", "-arch=sm_90", f"-I{ROOT}/kernels/csrc", "-ptx"]
    ptx = tmp_path / "device.ptx"
    subprocess.run([str(NVCC), *flags, str(DEVICE_CODE), "-o", str(ptx)], check=True)
    operations = set(
        re.findall(r"^\s*(?:@\S+ )?([a-z][a-z0-9.]*f32[a-z0-9.]*)", ptx.read_text(), re.M)
    )
    assert {"add.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= operations
    for operation in operations:
        assert "ftz" not in operation, operation
        assert "approx" not in operation, operation
        name = operation.split(".")[0]
        assert name not in ROUNDED or operation == f"{name}.rn.f32", operation


@needs_compiler
def test_the_header_needs_no_standard_header_at_run_time(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text('#include "common/ca.h"\n#include "experts/choice.h"\n')
    compile_with(*RUN_TIME, "-nostdinc", "-nostdinc++", "-fsyntax-only", str(source))


def test_the_program_calls_every_function() -> None:
    """A function that others of the header call is covered by them."""
    code = re.sub(r"//.*", "", "".join([header.read_text() for header in HEADERS]))
    functions = set(re.findall(r"^CA_FN [\w ]+?(\w+)\(", code, re.MULTILINE))
    assert {"expc", "fold", "share_of"} <= functions
    program, device = PROGRAM.read_text(), DEVICE_CODE.read_text()
    for name in functions:
        called = len(re.findall(rf"\b{name}\(", code)) - len(
            re.findall(rf"^CA_FN [\w ]+?\b{name}\(", code, re.MULTILINE)
        )
        assert called or f"ca::{name}(" in program, f"print_ca.cpp does not call {name}"
        assert f"ADDRESS({name})" in device, f"device_ca.cu does not take {name}"
