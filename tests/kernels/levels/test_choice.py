"""Which instruction set a process uses, and what it asks Linux for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels as k

ROOT = Path(__file__).resolve().parents[3]


def run_with_isa(value: str) -> subprocess.CompletedProcess[str]:
    code = "import kernels; print(kernels.isa())"
    environment = {**os.environ, "BATCHENGINE_ISA": value}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_environment_selects_a_level() -> None:
    assert run_with_isa("scalar").stdout.strip() == "scalar"
    assert run_with_isa("").stdout.strip() == k.isa_levels()[-1]
    failed = run_with_isa("avx1024")
    assert failed.returncode != 0
    assert "BATCHENGINE_ISA: instruction set 'avx1024' is unknown" in failed.stderr
    assert "it supports: scalar" in failed.stderr
    with pytest.raises(ValueError, match="is unknown or not supported"):
        k.set_isa("avx1024")


@pytest.mark.skipif(k.isa_levels()[-1] != "amx-int8", reason="the processor has no tiles")
def test_a_process_that_may_not_use_tiles_goes_without() -> None:
    """Linux refuses them while a thread has a signal stack that is too small for their state."""
    code = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
import kernels
print(*kernels.isa_levels(), kernels.isa())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*k.isa_levels()[:-1], "avx512-vnni"]


@pytest.mark.skipif(k.isa_levels()[-1] != "amx-int8", reason="the processor has no tiles")
def test_a_lower_level_asks_for_no_tiles() -> None:
    """A process that has asked for them needs larger signal stacks."""
    code = """
import ctypes
import kernels
permitted = ctypes.c_uint64()
GET_PERMISSIONS, TILE_DATA = 0x1022, 18
assert ctypes.CDLL(None).syscall(158, GET_PERMISSIONS, ctypes.byref(permitted)) == 0
print(kernels.isa(), permitted.value >> TILE_DATA & 1)
"""
    for isa, asked in (("avx2", "0"), ("amx-int8", "1")):
        environment = {**os.environ, "BATCHENGINE_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.split() == [isa, asked]
