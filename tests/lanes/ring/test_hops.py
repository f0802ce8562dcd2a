"""A query visits a worker and comes back, with TLS and without; prints how long that takes."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from batchengine.lanes.ring.data_links import tls_contexts
from batchengine.wire import lane as wire
from tests.lanes.ring.certificates import Authority
from tests.lanes.ring.scene import loopback, measure_visits, running_scene
from tests.support.engines import words

VISIT_MAX_S = 0.02  # far above any machine: some 0.1 ms is usual


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_visit_takes_a_fraction_of_a_millisecond(
    has_tls: bool, pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path) if has_tls else None
    identities = {"a": authority.identity("a")} if authority else None
    contexts = tls_contexts(authority.identity("bench")) if authority else None
    async with running_scene("a", pocket_path, cache_dir, tmp_path, identities=identities) as scene:
        node = scene["a"]
        await node.prefill(1, words(1, 1100))
        await scene.hold("a", 1)
        ours, theirs = loopback()
        node.lane.open_link(wire.OpenLink(1, "bench", bytes(16), False), theirs)
        theirs.close()
        if contexts is not None:
            ours = await asyncio.to_thread(contexts[0].wrap_socket, ours)
        await node.until(wire.LinkChanged(1, True))
        with ours:
            visits = await asyncio.to_thread(measure_visits, scene, "a", 1, ours, 300)
    median = statistics.median(visits)
    print(f"visit of {median * 1e6:.0f} us, TLS {has_tls}")
    assert median < VISIT_MAX_S
