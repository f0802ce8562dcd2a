"""The identity of the arithmetic: one hex for every instruction set, stored with KV pages."""

from __future__ import annotations

import pytest

import kernels

# Changes only when CA-1 is changed on purpose: pages and peers of another arith_id are not used.
ARITH_ID = "96cd44b9edfb1a9561efc5f10e883132b017c592b21f1853e3266629ddf93229"


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_every_level_has_the_arith_id_of_the_arithmetic_ca_1(
    pool: kernels.Pool, level: str
) -> None:
    kernels.set_isa(level)
    assert kernels.arith_id(pool) == ARITH_ID
