"""Moving a running session between two lanes: against prefill and files, or what its reader sees.

`--zero-pause` is the second: the longest wait between two tokens around a move (`gap`). The first
measures the whole hand-over beside computing the KV again and beside llama.cpp's files (`moves`).
"""

from __future__ import annotations

from bench.promote import gap, moves

ZERO_PAUSE = "--zero-pause"


def main(argv: list[str]) -> int:
    if ZERO_PAUSE in argv:
        return gap.main([given for given in argv if given != ZERO_PAUSE])
    return moves.main(argv)
