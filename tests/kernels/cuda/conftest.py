"""The GPU of these tests: an emulated one, whose library is kept in build/simt."""

from __future__ import annotations

import pytest

from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels


@pytest.fixture(scope="package")
def gpu() -> Emulator:
    if COMPILER is None:
        pytest.skip("no g++")
    return Emulator(compile_kernels(ROOT / "build/simt"))
