"""Several linked daemons on a simulated network, in virtual time.

Every seed has its own daemons, clients and faults; the invariants are in
`tests/simulation/linked/world.py`. `python -m tests.simulation --linked` runs many seeds.
"""

from __future__ import annotations

import random

import pytest

from tests.simulation.__main__ import again
from tests.simulation.linked.planted import DEFECTS, seeds_until_found
from tests.simulation.linked.world import LinkedWorld
from tests.simulation.world import simulate

# Every seed runs the same kinds of operations and faults; more of them are for `make soak`.
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 14))]
TWICE = range(3, 14, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_several_daemons_holds_and_is_deterministic(seed: int) -> None:
    outcome = simulate(seed, world=LinkedWorld)
    assert not outcome.error, f"{outcome.error}\n{again(seed, '--linked ')}"
    if seed in TWICE:
        random.seed(1)  # no global state has an effect
        assert simulate(seed, world=LinkedWorld).hash == outcome.hash, again(seed, "--linked ")


@pytest.mark.parametrize("defect", DEFECTS)
def test_seeds_find_a_planted_defect(defect: str) -> None:
    assert seeds_until_found(defect, range(3, 10)) <= 7
