"""Sessions with pages at peers over networks that are slow: limited in rate, or with a delay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.processes.cluster import ClusterPlan, NodePlan, cluster
from bench.processes.networks import Namespaces, Network, Relays, namespaces_work
from service.cli.local.cluster import page_bytes
from tests.support.engines import Reference, Site, words

N_PROMPT, N_TOKENS = 256 * 28, 12

NETWORKS = [
    pytest.param(
        Namespaces(100),
        id="100 Mbit/s",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not namespaces_work(), reason="no namespaces with a limited rate"),
        ],
    ),
    pytest.param(Relays(delay_ms=5), id="5 ms"),
]


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_slow_network_changes_no_token(
    network: Network, site: Site, reference: Reference, tmp_path: Path
) -> None:
    """Three engines with TLS: a session that none of them has room for."""
    core, size = sorted(os.sched_getaffinity(0))[:1], page_bytes(site.model)
    nodes = [NodePlan(name, tuple(core), 8 * size, 8 * size) for name in "abc"]
    plan = ClusterPlan(site.model, tmp_path, site.cache_dir, 8192)
    async with cluster(plan, nodes, network) as made:
        ids = words(5, N_PROMPT)
        await made.has_room("a", N_PROMPT + N_TOKENS)
        engine, tokens, held = made.engines["a"], list[int](), list[tuple[str, int]]()
        stream = engine.ask("submit", prompt=ids, n=N_TOKENS, session="s")
        while "token" in (message := await stream.get()):
            tokens.append(message["token"])
            held = held or (await engine.call("held"))["held"]["s"]  # while it is computed
        assert tokens == reference.tokens(ids, N_TOKENS), message
        assert sum(pages for peer, pages in held if peer) > 0
