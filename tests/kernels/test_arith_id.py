"""The identity of the arithmetic: one hex for every instruction set, stored with KV pages."""

from __future__ import annotations

import pytest

import kernels


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_every_level_has_the_arith_id_of_the_scalar_definition(
    pool: kernels.Pool, level: str
) -> None:
    kernels.set_isa("scalar")
    want = kernels.arith_id(pool)
    kernels.set_isa(level)
    assert kernels.arith_id(pool) == want
