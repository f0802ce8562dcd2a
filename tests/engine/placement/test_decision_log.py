"""Records of decisions as plain data and as lines: strategies over peers with their numbers."""

from __future__ import annotations

import json

from batchengine.engine.placement.decision_log import DecisionRecord
from batchengine.policy.cost import LaneLoad, StepCost
from batchengine.policy.linked.layouts import LayoutFacts, PeerState
from batchengine.policy.linked.ring import shape_of
from batchengine.policy.router import LaneState, RouteRequest, RouteState, route
from service.cli.render import explain_lines

KV_BYTES = 28 * 2176
COST = StepCost(8.0, 1.4, 2.0, 5e-4, 1e-5)


def record(context: int, *peers: PeerState) -> DecisionRecord:
    asked = RouteRequest(2, context - 100, 100, context, 1e6, 1e5)
    lane = LaneState("cpu", LaneLoad(COST), context_max=40_000)
    facts = LayoutFacts(shape_of(28, 16, 8, 128), KV_BYTES) if peers else None
    state = RouteState((lane,), peers=peers, facts=facts)
    decision = route(asked, None, state)
    lane_name = decision.lane
    return DecisionRecord(
        "req-1", "s1", "", "background", 0.0, asked, None, state, decision, lane_name
    )  # fmt: skip


def test_a_ring_is_shown_with_its_peers_and_the_rejected_strategies_with_their_numbers() -> None:
    peer = PeerState("b", "up", LaneLoad(COST), 50_000 * KV_BYTES, 0.1, 1.25e6, 50_000 * KV_BYTES)
    shown = record(60_000, peer, PeerState("c", "suspect")).as_dict(1000.0)
    json.dumps(shown, allow_nan=False)
    assert shown["strategy"] == {"prefill": "local", "decode": "ring", "peers": ["b"]}
    assert shown["reason_id"] == "ring_context"
    b, c, ring = shown["outlooks"]
    assert (b["decode"], b["rejected"]) == ("remote", "free KV memory is too small")
    assert (c["peers"], c["rejected"]) == (["c"], "a peer is suspect")
    assert (ring["decode"], ring["rejected"]) == ("ring", "")
    assert ring["tpot_ms"] > 0
    lines = explain_lines({"kind": "request", **shown})
    text = "\n".join(lines)
    for words in (
        "decision  lane cpu, ring decode with b: the context exceeds every lane here: ring",
        "  lane of peer b (not chosen: free KV memory is too small)",
        "  lane of peer c (not chosen: a peer is suspect)",
        "* ring decode with b: TTFT ",
    ):
        assert words in text, text


def test_a_decision_without_peers_is_shown_as_before() -> None:
    shown = record(1000).as_dict(1000.0)
    assert shown["strategy"] == {"prefill": "local", "decode": "local", "peers": []}
    assert shown["outlooks"] == []
    text = "\n".join(explain_lines({"kind": "request", **shown}))
    assert "decision  lane cpu: only this lane can take it" in text
