"""What `bench clients` runs of a set of versions."""

from __future__ import annotations

import pytest

from bench.clients import in_set
from bench.clients.agents import AGENTS
from bench.clients.install import PINNED, SETS, Installation


@pytest.mark.parametrize("versions", SETS)
def test_a_set_runs_the_agents_that_it_has(versions: str) -> None:
    asked = ["openai", *(agent.name for agent in AGENTS)]
    found = in_set(asked, Installation(versions))
    assert found[:2] == ["openai", "claude"]
    assert ("copilot" in found) == (versions in (PINNED, "newest"))
    packages = {agent.package for agent in AGENTS if agent.name in found}
    assert packages == set(SETS[versions]["agents"])
