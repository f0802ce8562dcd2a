"""The first step of `make sanitize`: the instrumented kernels are in use, and they do report.

A child writes 256 tokens of KV into a buffer of half a page; the sanitizer must end it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import kernels


def overflow() -> None:
    """Writes behind the end of a page, which no caller of the engine can do."""
    shape = kernels.PageShape(1, 2, 64)
    half = np.zeros(shape.payload_bytes // 2, np.uint8)
    pool, batch = kernels.Pool(1), kernels.Batch(256, 1, 1)
    rope = kernels.RopeTable("neox", 64, 64, 1e6, None, 1.0, 1.0)
    rows, queries = kernels.Rows(256, 6 * 64), kernels.Queries(256, 2, 64)
    entries = np.array([[256, 0, 1]], np.int32)
    pages = np.array([kernels.address_of(half)], np.uint64)
    batch.set(np.zeros(256, np.int32), entries, pages)
    kernels.place_kv(pool, rows, batch, shape, 0, 2, None, None, 1e-6, rope, 0.1, queries)


def main() -> int:
    if sys.argv[1:] == ["overflow"]:
        overflow()
        return 0
    place = Path(kernels.__file__).parent
    if place.parent.name != "sanitize":
        print(f"not the instrumented module: {place}")
        return 1
    command = [sys.executable, "-P", __file__, "overflow"]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode == 0 or "heap-buffer-overflow" not in child.stderr:
        print("the sanitizer did not report an overflow:", child.stderr[-500:])
        return 1
    print("sanitizer in use: a planted overflow was reported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
