"""The least of a figure over a few runs of a scene, for limits on time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

RUNS = 3


async def least(scene: Callable[[], Awaitable[float]], limit: float) -> float:
    """The least figure of up to RUNS runs; the first one below `limit` ends them.

    A delay that the code causes recurs in every run; one that the machine causes, whose cores other
    programs share, does not.
    """
    found: list[float] = []
    while len(found) < RUNS and not (found and found[-1] < limit):
        found.append(await scene())
    return min(found)
