"""GPU kernels compared bit for bit with the CPU, on an emulated GPU or on a real one."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    # Not above: `comparison` uses bench.simt, which uses this package.
    from bench.cuda import comparison

    return comparison.main(argv)
