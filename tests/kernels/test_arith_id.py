"""The identity of the arithmetic: one hex for every instruction set, stored with KV pages."""

from __future__ import annotations

import pytest

import kernels

# Changes only when CA-1 is changed on purpose: pages and peers of another arith_id are not used.
ARITH_ID = "7fec23bc65961a19605b1860788b61a49c019ff77e9e9258841e4cd3204f1d9c"


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_every_level_has_the_arith_id_of_the_arithmetic_ca_1(
    pool: kernels.Pool, level: str
) -> None:
    kernels.set_isa(level)
    assert kernels.arith_id(pool) == ARITH_ID
