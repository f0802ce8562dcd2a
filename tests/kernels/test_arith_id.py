"""The identity of the arithmetic: one hex for every instruction set, stored with KV pages."""

from __future__ import annotations

import pytest

import kernels

# Changes only when CA-1 is changed on purpose: pages and peers of another arith_id are not used.
ARITH_ID = "2f974ca8d0dd3df1ddfb216817e9e5204c1a5d9c9470bb26d88a9085d29eca4b"


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_every_level_has_the_arith_id_of_the_arithmetic_ca_1(
    pool: kernels.Pool, level: str
) -> None:
    kernels.set_isa(level)
    assert kernels.arith_id(pool) == ARITH_ID
