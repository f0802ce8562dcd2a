"""Canonical CPU kernels (CA-1): the only door to the native module.

Owns packed weights, quantised activations, attention over KV pages and sampling: pure functions
over flat buffers. Refuses to know requests, sessions or files. Every instruction-set level gives
the same bits; `arith_id` names them.
"""

from __future__ import annotations

import hashlib

from kernels._native import (
    Activations,
    Pool,
    Rows,
    Vector,
    address_of,
    golden_records,
    isa,
    isa_levels,
    peak_int8_gops,
    peak_read_gbps,
    set_isa,
)

DISTRIBUTION = "batchengine"

__all__ = [
    "DISTRIBUTION",
    "Activations",
    "Pool",
    "Rows",
    "Vector",
    "address_of",
    "arith_id",
    "golden_records",
    "isa",
    "isa_levels",
    "peak_int8_gops",
    "peak_read_gbps",
    "set_isa",
]


def arith_id(pool: Pool | None = None) -> str:
    """Hex SHA-256 over the golden vectors of every op, computed on the level in use.

    Equal on every level and machine that computes CA-1; KV pages and peers carry it.
    """
    digest = hashlib.sha256()
    for name, output in golden_records(pool or Pool(1)):
        digest.update(f"{name}:{len(output)}:".encode())
        digest.update(output)
    return digest.hexdigest()
