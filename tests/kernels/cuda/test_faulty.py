"""A fault in a kernel is found by the emulator, or by the comparison with the CPU."""

from __future__ import annotations

import pytest

import kernels
from bench.cuda import faulty
from bench.simt.emulator import COMPILER, ROOT, Emulator

pytestmark = pytest.mark.timeout(600)  # of which a minute compiles


@pytest.fixture(scope="module")
def faults() -> Emulator:
    if COMPILER is None:
        pytest.skip("no g++")
    return faulty.compiled(ROOT / "build/simt")


def test_nothing_is_found_in_the_kernels_as_they_are(faults: Emulator, pool: kernels.Pool) -> None:
    assert not faulty.is_found(faults, pool, None)


@pytest.mark.parametrize("name", faulty.FAULTS)
def test_a_fault_is_found(faults: Emulator, pool: kernels.Pool, name: str) -> None:
    assert faulty.is_found(faults, pool, name)
