"""The identity of the arithmetic: one hex for every instruction set, stored with KV pages."""

from __future__ import annotations

import pytest

import kernels

# CA-3 as docs/numerics.md states it. A change here is a change of the arithmetic: KV of stores and
# links with other versions become useless, so it comes with a new name there, never alone.
ARITH_ID = "f4944d073cda403d76f2ee0246a5cc8d9205f4f9e21a23527d33e6babe3294dc"


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_every_level_has_the_arith_id_of_this_version(pool: kernels.Pool, level: str) -> None:
    kernels.set_isa(level)
    assert kernels.arith_id(pool) == ARITH_ID
