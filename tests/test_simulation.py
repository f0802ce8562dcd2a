"""Engine, scheduler, router, hand-over, journal and store together, in virtual time.

Every seed is another configuration, other people and other faults; what must hold is in
`tests/simulation/world.py`. `python -m tests.simulation` runs as many as there is time for.
"""

from __future__ import annotations

import random

import pytest

from tests.simulation.__main__ import again
from tests.simulation.clock import Stuck, VirtualLoop
from tests.simulation.world import simulate

SEEDS = range(40)
TWICE = range(0, 40, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_seed(seed: int) -> None:
    outcome = simulate(seed)
    assert not outcome.error, f"{outcome.error}\n{again(seed)}"
    assert outcome.counts["answers"] > 0
    if seed in TWICE:
        random.seed(1)  # nothing global decides anything
        assert simulate(seed).hash == outcome.hash, again(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 1040, 100))
def test_more_seeds(start: int) -> None:
    for seed in range(start, start + 100):
        assert not simulate(seed).error, again(seed)


def test_a_deadlock_is_seen() -> None:
    loop = VirtualLoop()
    try:
        with pytest.raises(Stuck):
            loop.run_until_complete(loop.create_future())
    finally:
        loop.close()
