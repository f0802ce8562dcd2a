"""CudaGpu calls a driver in C as cuda.h has it, through the installed cuda-bindings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from batchengine.child.command import ROOT, python_command
from bench.simt.emulator import COMPILER, Emulator


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="no cuda-bindings")
def test_the_driver_is_called_through_the_bindings(gpu: Emulator, tmp_path: Path) -> None:
    assert gpu.kernels()  # its library is there
    command = [*python_command("tests.kernels.cuda.c_driver"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1:] == ["called through cuda-bindings"]
