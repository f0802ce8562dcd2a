"""Fixtures of the kernel tests: a pool of two threads, and the best instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kernels


@pytest.fixture(scope="module")
def pool() -> Iterator[kernels.Pool]:
    two = kernels.Pool(2)
    yield two
    two.close()


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    """Every test starts at the best level and may select others."""
    kernels.set_isa(kernels.isa_levels()[-1])
    yield
    kernels.set_isa(kernels.isa_levels()[-1])
