"""Kernels that a bench needs, compiled for a target, so that a device of it waits for no compiler.

python -m bench.cuda.ahead TARGET
"""

from __future__ import annotations

import sys

from bench.cuda import ceilings
from bench.cuda.gpus import CUBINS
from kernels.cuda.compile import cubins, units


def main(targets: list[str]) -> int:
    for target in targets:
        made = cubins(target, CUBINS, [*units(), ceilings.SOURCE])
        print(f"{target}: {', '.join(made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
