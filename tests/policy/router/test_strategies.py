"""Strategies over peers: each rule case by case, then properties of every state."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchengine.policy.cost import LinkSpeed, StepCost
from batchengine.policy.linked import layouts
from batchengine.policy.linked.layouts import (
    LOCAL,
    PIPELINE,
    REMOTE,
    RING,
    LayoutFacts,
    PeerState,
    Rejected,
)
from batchengine.policy.linked.pipeline import (
    PipelineModel,
    PromptWork,
    StageHost,
    plan,
)
from batchengine.policy.linked.ring import shape_of
from batchengine.policy.router import (
    BULK,
    FAST,
    Decision,
    LaneState,
    Outlook,
    Reason,
    RouteRequest,
    RouteSession,
    RouteState,
    Strategy,
    route,
)
from tests.policy.router.test_router import CPU, GPU, calls, heavier, load, loads, request

LAYERS = 28
KV_BYTES = LAYERS * 2176
MODEL = PipelineModel(LAYERS, 2176, 4096)
SHAPE = shape_of(LAYERS, 16, 8, 128)
LAN = 1.25e6  # bytes per ms: 10 Gb/s


def stage(name: str, cost: StepCost = CPU) -> StageHost:
    return StageHost(
        name, cost.fixed_ms / LAYERS, cost.prefill_token_ms / LAYERS, cost.prefill_pair_ms / LAYERS
    )


PLAN = plan(
    (stage("here"), stage("b")),
    {(x, y): LinkSpeed(LAN, 0.05) for x, y in (("here", "b"), ("b", "here"))},
    "here",
    MODEL,
    PromptWork(0, 8192),
)
FACTS = LayoutFacts(SHAPE, KV_BYTES, PLAN)


def peer(name: str = "b", **given_fields: object) -> PeerState:
    fields = {"load": load(CPU), "kv_free_bytes": 100 << 30, "rtt_ms": 0.1, "bytes_per_ms": LAN}
    fields |= given_fields
    fields.setdefault("hold_bytes_free", fields["kv_free_bytes"])
    return PeerState(name, **fields)  # type: ignore[arg-type]


def state(
    *peers: PeerState,
    decodes: int = 0,
    context_max: int = 1 << 30,
    facts: LayoutFacts | None = FACTS,
    cost: StepCost = CPU,
    waiting: int = 0,
) -> RouteState:
    lane = LaneState("cpu", load(cost, decodes, waiting), tier=BULK, context_max=context_max)
    return RouteState((lane,), peers=peers, facts=facts)


def outlook(decision: Decision, decode: str, prefill: str = LOCAL, at: int = 0) -> Outlook:
    return [o for o in decision.outlooks if o.strategy == Strategy(prefill, decode)][at]


def long_request(rank: int = 2, prompt: int = 60_000, out: int = 2_000) -> RouteRequest:
    return request(rank, prompt, out)


# ---- nothing changes without peers ----


@settings(deadline=None)
@given(calls())
def test_without_a_peer_that_is_up_lanes_alone_decide(
    call: tuple[RouteRequest, RouteSession | None, RouteState],
) -> None:
    asked, session, alone = call
    before = route(*call)
    assert before.strategy == Strategy(LOCAL, LOCAL)
    assert before.outlooks == ()
    assert route(asked, session, replace(alone, facts=FACTS)) == before
    assert route(asked, session, replace(alone, peers=(peer(),))) == before
    useless = [peer(name, state=name) for name in ("down", "suspect", "refused", "dialling")]
    useless.append(peer("slow", bytes_per_ms=0.0))
    after = route(asked, session, replace(alone, peers=tuple(useless), facts=FACTS))
    assert replace(after, outlooks=()) == before
    whys = {o.peers[0]: o.why for o in after.outlooks if o.strategy.decode == REMOTE}
    assert whys == {
        "down": Rejected.DOWN,
        "suspect": Rejected.SUSPECT,
        "refused": Rejected.REFUSED,
        "dialling": Rejected.DOWN,
        "slow": Rejected.NOT_MEASURED,
    }


# ---- rule 7: the context exceeds this daemon ----


@pytest.mark.parametrize("rank", range(4))
def test_a_context_beyond_every_lane_goes_on_a_ring(rank: int) -> None:
    """Neither daemon can hold it alone."""
    half = peer(kv_free_bytes=40_000 * KV_BYTES)
    decision = route(long_request(rank), None, state(half, context_max=40_000))
    assert (decision.lane, decision.reason) == ("cpu", Reason.RING_CONTEXT)
    assert (decision.strategy, decision.peers) == (Strategy(LOCAL, RING), ("b",))
    assert decision.predicted is not None
    assert decision.predicted.tpot_ms > 0.0
    assert outlook(decision, REMOTE, REMOTE).why is Rejected.NO_ROOM
    small = peer(kv_free_bytes=20_000 * KV_BYTES)
    refused = route(long_request(rank), None, state(small, context_max=40_000))
    assert (refused.lane, refused.reason) == ("", Reason.NO_FIT)
    assert outlook(refused, RING).why is Rejected.NO_ROOM
    for why in (Rejected.OWN_HEADS, Rejected.LONG_STEPS):
        facts = replace(FACTS, unheld=why)
        refused = route(long_request(rank), None, state(half, context_max=40_000, facts=facts))
        assert (refused.lane, refused.reason) == ("", Reason.NO_FIT)
        assert outlook(refused, RING).why is why
    three = route(
        long_request(rank), None, state(small, replace(small, name="c"), context_max=40_000)
    )
    assert set(three.peers) == {"b", "c"}


def test_a_turn_that_cannot_begin_here_goes_to_no_peer() -> None:
    """Not even to one that could hold the whole context."""
    fast = peer(load=load(GPU))
    decision = route(long_request(0), None, state(fast, context_max=40_000))
    assert (decision.lane, decision.reason) == ("cpu", Reason.RING_CONTEXT)
    assert outlook(decision, REMOTE, REMOTE).why is Rejected.NOT_AVAILABLE
    full = state(fast)
    full = replace(full, lanes=(replace(full.lanes[0], full=True),))
    decision = route(request(2), None, full)
    assert (decision.lane, decision.reason) == ("", Reason.FULL)
    assert [o.why for o in decision.outlooks] == [Rejected.NOT_AVAILABLE]


# ---- rules 8 and 9: rings ----


def test_deep_batches_of_tolerant_work_use_the_ring() -> None:
    for rank, decodes, why in (
        (2, 16, Reason.RING_DEPTH),
        (3, 16, Reason.RING_DEPTH),
        (2, 15, Rejected.SHALLOW),
        (1, 16, Rejected.TOLERANT_ONLY),
        (0, 16, Rejected.TOLERANT_ONLY),
    ):
        found = route(
            request(rank, 60_000, 2_000, ttft_ms=1e7, tpot_ms=1e5),
            None,
            state(peer(), decodes=decodes, facts=LayoutFacts(SHAPE, KV_BYTES)),
        )
        assert outlook(found, RING).why is why
        assert found.strategy.decode == (RING if why is Reason.RING_DEPTH else LOCAL)
        assert found.lane == "cpu"


def test_a_short_context_stays_because_the_hops_take_longer() -> None:
    far = peer(rtt_ms=10.0)
    decision = route(request(2, 3000, 100), None, state(far, decodes=20))
    assert outlook(decision, RING).why is Rejected.SLOWER
    assert decision.strategy.decode == LOCAL


def test_a_session_on_a_ring_stays_until_its_request_is_urgent() -> None:
    known = RouteSession("cpu", 59_000, held=(("b", 30 * 1024),), gather_ms=1.5)
    tolerant = route(long_request(2), known, state(peer()))
    assert (tolerant.strategy, tolerant.reason) == (Strategy(LOCAL, RING), Reason.RING_HOME)
    standard = request(1, 60_000, 100, ttft_ms=1e6, tpot_ms=1e4)
    assert route(standard, known, state(peer())).reason is Reason.RING_HOME
    urgent = route(long_request(0), known, state(peer()))
    assert (urgent.strategy, urgent.reason) == (Strategy(LOCAL, LOCAL), Reason.FROM_RING)
    assert urgent.lane == "cpu"
    assert urgent.predicted is not None
    assert urgent.predicted.move_ms == 1.5
    slow = replace(known, gather_ms=1e6)
    assert route(long_request(0), slow, state(peer())).reason is Reason.RING_HOME


def test_a_ring_with_a_lost_peer_is_left() -> None:
    known = RouteSession("cpu", 20_000, held=(("b", 30 * 1024), ("c", 1024)))
    for name in ("down", "suspect", "refused"):
        decision = route(long_request(2), known, state(peer(), peer("c", state=name)))
        assert "c" not in decision.peers
        assert decision.strategy.decode == LOCAL


def test_a_ring_is_entered_and_left_at_different_predictions() -> None:
    """With latencies between, a session outside stays outside, and one inside stays inside."""
    asked = request(2, 60_000, 2_000, ttft_ms=1e7, tpot_ms=1e5)
    inside = RouteSession("cpu", 59_000, held=(("b", 30 * 1024),))
    outside, both_stay = RouteSession("cpu", 59_000), 0
    facts = LayoutFacts(SHAPE, KV_BYTES)
    for rtt in range(60):
        now = state(peer(rtt_ms=rtt / 20), decodes=20, facts=facts)
        enters = route(asked, outside, now).strategy.decode == RING
        stays = route(asked, inside, now).strategy.decode == RING
        assert stays or not enters
        both_stay += stays and not enters
    assert both_stay >= 5


def test_a_session_that_moved_a_moment_ago_does_not_enter() -> None:
    moved = RouteSession("cpu", 59_000, dwell_ms=1000.0)
    facts = LayoutFacts(SHAPE, KV_BYTES)
    decision = route(long_request(2), moved, state(peer(), decodes=20, facts=facts))
    assert outlook(decision, RING).why is Rejected.DWELL


# ---- rule 10: pipeline ----


def test_tolerant_prompts_that_fill_the_pipeline_use_it() -> None:
    assert PLAN is not None
    chunk = PLAN.chunk_tokens
    for asked, why in (
        (request(2, 20 * chunk), Reason.PIPELINE),
        (request(3, 20 * chunk), Reason.PIPELINE),
        (request(1, 20 * chunk), Rejected.TOLERANT_ONLY),
        (request(0, 20 * chunk), Rejected.TOLERANT_ONLY),
        (request(2, chunk), Rejected.BUBBLE),
        (request(2, 2 * chunk), Rejected.BUBBLE),
    ):
        decision = route(asked, None, state(peer()))
        found = outlook(decision, LOCAL, PIPELINE)
        assert found.why is why
        assert (decision.strategy.prefill == PIPELINE) == (why is Reason.PIPELINE)
    decision = route(request(2, 20 * chunk), None, state(peer()))
    assert decision.predicted is not None
    local = decision.candidates[0]
    assert 1.25 * decision.predicted.ttft_ms < local.ttft_ms < 2 * decision.predicted.ttft_ms
    assert decision.predicted.tpot_ms == pytest.approx(local.tpot_ms)


def test_a_busy_or_lost_stage_is_not_used() -> None:
    assert PLAN is not None
    asked = request(2, 20 * PLAN.chunk_tokens)
    busy = peer(load=load(CPU, decodes=4, prefill_ms=20_000.0))
    assert outlook(route(asked, None, state(busy)), LOCAL, PIPELINE).why is Rejected.SLOWER
    others = peer(load=replace(load(CPU), stage_ms=20_000.0))  # stages of another daemon
    assert outlook(route(asked, None, state(others)), LOCAL, PIPELINE).why is Rejected.SLOWER
    lost = route(asked, None, state(peer("c"), peer(state="suspect")))
    assert outlook(lost, LOCAL, PIPELINE).why is Rejected.SUSPECT
    gone = route(asked, None, state(peer("c")))
    assert outlook(gone, LOCAL, PIPELINE).why is Rejected.DOWN
    none = route(asked, None, state(peer(), facts=LayoutFacts(SHAPE, KV_BYTES)))
    assert outlook(none, LOCAL, PIPELINE).why is Rejected.NO_PLAN


def test_prompts_that_come_together_all_go_through_the_pipeline() -> None:
    """Each as soon as the one before has gone through; those of another tenant count as waiting."""
    assert PLAN is not None
    asked = request(3, 20 * PLAN.chunk_tokens, ttft_ms=1e7)
    alone = outlook(route(asked, None, state(peer())), LOCAL, PIPELINE)
    before = replace(FACTS, queue_ms=10 * alone.alone_ms, own_queue_ms=10 * alone.alone_ms)
    busy = state(peer(), facts=before)
    stage_ms = 5 * route(asked, None, state()).candidates[0].ttft_ms  # half of each of the ten
    lane = replace(busy.lanes[0], load=replace(busy.lanes[0].load, stage_ms=stage_ms))
    eleventh = route(asked, None, replace(busy, lanes=(lane,)))
    found = outlook(eleventh, LOCAL, PIPELINE)
    assert eleventh.strategy.prefill == PIPELINE
    assert found.ttft_ms == pytest.approx(alone.ttft_ms + 10 * alone.alone_ms)
    assert found.queue_ms == pytest.approx(10 * alone.alone_ms)
    assert found.ttft_ms > eleventh.candidates[0].ttft_ms  # it would be sooner here, and delay them
    soon = replace(asked, ttft_ms=eleventh.candidates[0].ttft_ms + 1.0)
    kept = route(soon, None, replace(busy, lanes=(lane,)))
    assert outlook(kept, LOCAL, PIPELINE).why is Rejected.SLOWER
    assert kept.strategy.prefill == LOCAL
    others = replace(busy, lanes=(lane,), facts=replace(before, own_queue_ms=0.0))
    assert outlook(route(asked, None, others), LOCAL, PIPELINE).why is Rejected.SLOWER
    few = replace(before, queue_ms=0.5 * alone.alone_ms, own_queue_ms=0.0)
    second = route(asked, None, state(peer(), facts=few))
    assert (second.strategy.prefill == PIPELINE) == (
        1.25 * alone.ttft_ms + 0.5 * alone.alone_ms <= second.candidates[0].ttft_ms
    )


def test_pipeline_and_ring_go_together() -> None:
    asked = request(2, 60_000, 2_000, ttft_ms=1e7, tpot_ms=1e5)
    decision = route(asked, None, state(peer(), peer("c"), decodes=20))
    assert decision.strategy == Strategy(PIPELINE, RING)
    assert decision.reason is Reason.RING_DEPTH
    assert decision.lane == "cpu"
    assert decision.predicted is not None
    assert decision.predicted.ttft_ms == outlook(decision, LOCAL, PIPELINE).ttft_ms
    assert decision.predicted.tpot_ms == outlook(decision, RING).tpot_ms
    assert set(decision.peers) == {"b", *outlook(decision, RING).peers}


# ---- rule 11: a peer's lane ----


def test_a_peer_takes_requests_whose_promise_would_be_broken_here() -> None:
    fast = peer(load=load(GPU))
    kept = route(request(1), None, state(fast))
    assert (kept.lane, outlook(kept, REMOTE, REMOTE).why) == ("cpu", Rejected.KEPT)
    tight = replace(request(2), tpot_ms=5.0)
    alone = route(tight, None, state())
    spilled = route(tight, None, state(fast))
    assert (spilled.lane, spilled.begins_on) == ("b", "cpu")
    assert spilled.reason is Reason.PEER_SPILL
    assert spilled.strategy == Strategy(REMOTE, REMOTE)
    assert spilled.predicted is not None
    assert alone.predicted is not None
    assert spilled.predicted.ttft_ms == alone.predicted.ttft_ms
    assert spilled.predicted.tpot_ms < alone.predicted.tpot_ms
    same = route(tight, None, state(peer()))
    assert (same.lane, outlook(same, REMOTE, REMOTE).why) == ("cpu", Rejected.SLOWER)
    without = route(tight, None, state(replace(fast, takes_turns=False)))
    assert outlook(without, REMOTE, REMOTE).why is Rejected.NO_TURNS
    moved = RouteSession("cpu", 0, dwell_ms=10.0)
    assert route(tight, moved, state(fast)).lane == "cpu"


def test_a_peer_makes_neither_first_tokens_nor_short_answers_faster() -> None:
    fast = peer(load=load(GPU))
    late = route(request(1, 1900), None, state(fast))  # a long prompt, computed here
    assert late.predicted is not None
    assert late.predicted.ttft_ms > request(1).ttft_ms
    assert (late.lane, outlook(late, REMOTE, REMOTE).why) == ("cpu", Rejected.SLOWER)
    far = replace(fast, rtt_ms=10_000.0)
    short = route(replace(request(1), tpot_ms=5.0), None, state(far))
    assert (short.lane, outlook(short, REMOTE, REMOTE).why) == ("cpu", Rejected.SLOWER)


def test_kv_that_a_peer_lacks_is_sent_to_it() -> None:
    work = layouts.LayoutWork(2, 10_000, 100, 50, 10_150)
    cold = layouts.on_peer(peer(), FACTS, work, ())
    warm = layouts.on_peer(peer(), FACTS, work, (("b", 8192),))
    assert cold.move_ms == pytest.approx(0.1 + 10_000 * KV_BYTES / LAN)
    assert cold.move_ms - warm.move_ms == pytest.approx(8192 * KV_BYTES / LAN)


def test_a_recurrent_state_is_sent_behind_kv() -> None:
    with_state = replace(FACTS, state_bytes=50_000_000)
    work = layouts.LayoutWork(2, 10_000, 100, 50, 10_150)
    times = [layouts.on_peer(peer(), facts, work, ()) for facts in (FACTS, with_state)]
    assert times[1].move_ms - times[0].move_ms == pytest.approx(50_000_000 / LAN)
    new = layouts.on_peer(peer(), with_state, work._replace(frontier=0), ())
    assert new.move_ms == pytest.approx(0.1), "a prompt without KV has no state"


# ---- divisions and gathering ----


@settings(deadline=None)
@given(
    st.integers(1, 100_000),
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 60_000)), min_size=1, max_size=5),
)
def test_a_context_is_divided_by_speed_within_the_rooms(
    total: int, parts: list[tuple[float, int]]
) -> None:
    speeds, rooms = [s for s, _ in parts], [r for _, r in parts]
    found = layouts.divide(total, speeds, rooms)
    assert (found is None) == (sum(rooms) < total)
    if found is not None:
        assert sum(found) == pytest.approx(total)
        pace = [share / speed for share, speed in zip(found, speeds, strict=True)]
        for share, room, own in zip(found, rooms, pace, strict=True):
            assert share <= room * (1 + 1e-9)
            assert own >= max(pace) * (1 - 1e-9) or share == pytest.approx(room)


def test_kv_of_several_peers_is_gathered_at_the_same_time() -> None:
    peers = (peer(), peer("c", bytes_per_ms=LAN / 2))
    held = (("b", 4096), ("c", 4096), ("b", 1024))
    found = layouts.gather_ms(held, peers, KV_BYTES)
    assert found == pytest.approx(0.1 + 4096 * KV_BYTES / (LAN / 2))
    assert layouts.gather_ms((), peers, KV_BYTES) == 0.0
    assert layouts.gather_ms(held, peers[:1], KV_BYTES) == math.inf


# ---- properties ----

Call = tuple[RouteRequest, RouteSession | None, RouteState]


@st.composite
def peer_calls(draw: st.DrawFn) -> Call:
    """A call with up to three peers of any load and state, some of which hold KV."""
    asked, session, alone = draw(calls())
    names = ["b", "c", "d"][: draw(st.integers(1, 3))]
    peers = tuple(
        PeerState(
            name,
            draw(st.sampled_from(("up", "up", "up", "suspect", "down", "refused"))),
            draw(loads()),
            draw(st.sampled_from((0, 4096, 100_000))) * KV_BYTES,
            draw(st.sampled_from((0.05, 5.0))),
            draw(st.sampled_from((LAN, LAN / 100, 0.0))),
            draw(st.sampled_from((0, 4096, 100_000))) * KV_BYTES,
        )
        for name in names
    )
    if session is not None and draw(st.booleans()):
        holders = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
        session = replace(
            session,
            lane=draw(st.sampled_from((session.lane, names[0]))),
            held=tuple((name, 1024) for name in holders),
            gather_ms=draw(st.sampled_from((0.0, 30.0))),
        )
    facts = draw(st.sampled_from((FACTS, LayoutFacts(SHAPE, KV_BYTES))))
    queue_ms = draw(st.sampled_from((0.0, 500.0, 60_000.0)))
    own_queue_ms = draw(st.sampled_from((0.0, queue_ms)))
    facts = replace(facts, queue_ms=queue_ms, own_queue_ms=own_queue_ms)
    return asked, session, replace(alone, peers=peers, facts=facts)


@settings(deadline=None)
@given(peer_calls())
def test_no_work_goes_to_a_peer_that_is_not_up(call: Call) -> None:
    _, _, now = call
    decision = route(*call)
    assert decision == route(*call)
    usable = {one.name for one in now.peers if one.state == "up" and one.bytes_per_ms > 0.0}
    assert set(decision.peers) <= usable
    assert (decision.strategy == Strategy(LOCAL, LOCAL)) == (decision.peers == ())
    assert (decision.predicted is None) == (decision.lane == "")
    if decision.strategy.decode == REMOTE:
        assert decision.lane == decision.peers[0]
    used = [o for o in decision.outlooks if isinstance(o.why, Reason)]
    assert {name for o in used for name in o.peers} == set(decision.peers)


@settings(deadline=None)
@given(peer_calls(), st.integers(0, 2), st.integers(0, 20), st.integers(0, 5), st.floats(0, 5000))
def test_more_load_never_makes_a_peer_preferred(
    call: Call, index: int, decodes: int, waiting: int, ms: float
) -> None:
    asked, session, now = call
    assume(index < len(now.peers))
    one = now.peers[index]
    before = route(*call)
    assume(one.name not in before.peers)
    loaded = replace(one, load=heavier(one.load, decodes, waiting, ms))
    peers = (*now.peers[:index], loaded, *now.peers[index + 1 :])
    after = route(asked, session, replace(now, peers=peers))
    assert one.name not in after.peers
    assert (after.lane, after.strategy, after.reason) == (
        before.lane,
        before.strategy,
        before.reason,
    )


@settings(deadline=None)
@given(peer_calls())
def test_an_urgent_request_gets_on_no_ring_that_it_needs_not(call: Call) -> None:
    asked, session, now = call
    decision = route(replace(asked, rank=0), session, now)
    assert decision.strategy.prefill != PIPELINE
    if decision.strategy.decode == RING:
        on_ring = session is not None and session.held
        assert on_ring or all(candidate.excluded for candidate in decision.candidates)


def test_sessions_do_not_alternate_between_daemons() -> None:
    """Turns of changing class on a loaded daemon beside an idle peer: few moves."""
    where, moved_ms, moves = "cpu", -math.inf, 0
    for turn in range(100):
        now_ms = turn * 1000.0
        known = RouteSession(where, 190, dwell_ms=now_ms - moved_ms)
        now = state(peer(), decodes=10 + turn % 7, waiting=turn % 3)
        decision = route(request(1 if turn % 4 else 2), known, now)
        if decision.lane != where:
            where, moved_ms, moves = decision.lane, now_ms, moves + 1
    assert moves <= 1


def test_a_fast_tier_is_kept_beside_peers() -> None:
    lanes = (LaneState("gpu", load(GPU), tier=FAST), LaneState("cpu", load(CPU), tier=BULK))
    now = RouteState(lanes, peers=(peer(),), facts=FACTS)
    assert (route(request(0), None, now).lane, route(request(1), None, now).lane) == ("gpu", "cpu")
