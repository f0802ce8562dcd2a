"""The router: the decision tree case by case, then properties of every state."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchengine.config import SlaConfig
from batchengine.core import SlaClass
from batchengine.policy import scheduler
from batchengine.policy.cost import RANKS, LaneLoad, StepCost, predict
from batchengine.policy.router import (
    ANY,
    BULK,
    FAST,
    LOCAL,
    RANK_INTERACTIVE,
    RANK_STANDARD,
    Decision,
    LaneState,
    Reason,
    RoutePolicy,
    RouteRequest,
    RouteSession,
    RouteState,
    Strategy,
    best_lane,
    route,
)

GPU = StepCost(4.0, 0.1, 0.2, 1e-4, 1e-6)
CPU = StepCost(8.0, 1.4, 2.0, 5e-4, 1e-5)
TARGETS = {0: (500.0, 50.0), 1: (2_000.0, 100.0), 2: (30_000.0, 500.0), 3: (300_000.0, 2_000.0)}


def request(rank: int = 1, prompt: int = 200, out: int = 100, **given: object) -> RouteRequest:
    ttft_ms, tpot_ms = TARGETS[rank]
    fields = {
        "rank": rank,
        "prompt_tokens": prompt,
        "tokens_out": out,
        "context_tokens": prompt + out,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
    }
    return RouteRequest(**(fields | given))  # type: ignore[arg-type]


def load(cost: StepCost, decodes: int = 0, waiting: int = 0, prefill_ms: float = 0.0) -> LaneLoad:
    step_ms = cost.fixed_ms + cost.decode_entry_ms * decodes
    return LaneLoad(
        cost,
        64,
        decodes,
        waiting,
        512,
        decodes,
        step_ms,
        (prefill_ms,) * RANKS,
        (0.0,) * RANKS,
    )


def lanes(fast: LaneLoad | None = None, bulk: LaneLoad | None = None) -> RouteState:
    return RouteState(
        (
            LaneState("gpu", fast or load(GPU), tier=FAST),
            LaneState("cpu", bulk or load(CPU), tier=BULK),
        )
    )


# ---- the decision tree ----


@pytest.mark.parametrize(
    ("given_request", "lane", "reason"),
    [
        (request(0), "gpu", Reason.URGENT),
        (request(1), "cpu", Reason.SHORT),
        (request(1, prompt=8000), "gpu", Reason.LONG),
        (request(2), "cpu", Reason.TOLERANT),
        (request(3, prompt=8000), "cpu", Reason.TOLERANT),
        (request(1, ttft_ms=400.0), "gpu", Reason.URGENT),
        (request(1, tpot_ms=20.0), "gpu", Reason.URGENT),
        (request(2, promote=True), "gpu", Reason.URGENT),
        (request(1, prompt=1900), "gpu", Reason.SPILL),  # 2.7 s on the CPU: the target is 2 s
    ],
)
def test_each_case_of_the_decision_tree(
    given_request: RouteRequest, lane: str, reason: Reason
) -> None:
    decision = route(given_request, None, lanes())
    assert (decision.lane, decision.reason) == (lane, reason)
    assert decision.strategy == Strategy(LOCAL, LOCAL)
    assert decision.predicted is not None
    assert decision.predicted.lane == lane
    assert [c.lane for c in decision.candidates] == ["gpu", "cpu"]


def test_ranks_are_those_of_the_scheduler() -> None:
    assert scheduler.RANK[SlaClass.INTERACTIVE] == RANK_INTERACTIVE
    assert scheduler.RANK[SlaClass.STANDARD] == RANK_STANDARD
    assert len(scheduler.RANK) == RANKS
    interactive = SlaConfig().interactive
    assert RoutePolicy().urgent_ttft_ms == interactive.ttft_ms
    assert RoutePolicy().urgent_tpot_ms == interactive.tpot_ms


def test_the_background_class_limits_the_rank() -> None:
    """Tight targets do not raise the rank of a :background request."""
    decision = route(request(2, ttft_ms=400.0, tpot_ms=200.0), None, lanes())
    assert (decision.lane, decision.reason) == ("cpu", Reason.TOLERANT)


def test_the_ttlt_target_is_considered() -> None:
    """TTFT and TPOT are met on the CPU, but the last token would be too late."""
    in_time = route(request(1, ttlt_ms=60_000.0), None, lanes())
    too_late = route(request(1, ttlt_ms=900.0), None, lanes())
    assert (in_time.lane, too_late.lane) == ("cpu", "gpu")
    assert too_late.reason is Reason.SPILL


def test_requests_spill_from_bulk_lanes_and_from_fast_lanes() -> None:
    full = load(CPU, decodes=64, waiting=50, prefill_ms=60_000)
    assert route(request(1), None, lanes(bulk=full)).reason is Reason.SPILL
    busy = load(GPU, decodes=64, waiting=50, prefill_ms=60_000)
    decision = route(request(0), None, lanes(fast=busy))
    assert (decision.lane, decision.reason) == ("cpu", Reason.SPILL)
    hopeless = route(request(0), None, lanes(fast=busy, bulk=full))
    assert hopeless.reason is Reason.URGENT  # within the tolerance of the best
    worse = load(GPU, decodes=64, waiting=50, prefill_ms=600_000)
    assert route(request(0), None, lanes(fast=worse, bulk=full)).reason is Reason.BEST


def test_pool_variants_compete_by_prediction() -> None:
    """An urgent request takes the variant with the short queue, in any order of the lanes."""
    crowded = LaneState("many", load(GPU, decodes=60), tier=FAST, pool="throughput")
    calm = LaneState("few", load(GPU, decodes=2), tier=FAST, pool="latency")
    for order in ((crowded, calm), (calm, crowded)):
        assert route(request(0), None, RouteState(order)).lane == "few"


def test_dead_and_too_small_lanes_are_no_candidates() -> None:
    gpu, cpu = lanes().lanes
    dead = replace(gpu, alive=False)
    decision = route(request(0), None, RouteState((dead, cpu)))
    assert (decision.lane, decision.reason) == ("cpu", Reason.ONLY)
    assert decision.candidates[0].excluded == "it is down"
    decision = route(request(0), None, RouteState((replace(dead, starts=True), cpu)))
    assert decision.candidates[0].excluded == "it is starting"
    small = replace(gpu, context_max=4096)
    assert route(request(0, prompt=8000), None, RouteState((small, cpu))).lane == "cpu"
    nowhere = route(request(0), None, RouteState((dead, replace(cpu, alive=False))))
    assert (nowhere.lane, nowhere.reason, nowhere.predicted) == ("", Reason.NO_LANE, None)
    no_fit = route(request(0, prompt=8000), None, RouteState((small,)))
    assert (no_fit.lane, no_fit.reason) == ("", Reason.NO_FIT)


# ---- sessions ----


def home(lane: str, **given: float) -> RouteSession:
    return RouteSession(lane, **({"reused_tokens": 190, "open_rows": 190} | given))  # type: ignore[arg-type]


def test_an_interactive_request_promotes_its_session() -> None:
    decision = route(request(0), home("cpu"), lanes())
    assert (decision.lane, decision.reason) == ("gpu", Reason.URGENT)
    assert decision.predicted is not None
    assert decision.predicted.move_ms > 0
    assert route(request(0), home("gpu"), lanes()).reason is Reason.HOME


def test_kv_is_copied_to_a_lane_with_memory_of_its_own() -> None:
    gpu, cpu = lanes().lanes
    state = RouteState((replace(gpu, copy_token_ms=0.01), cpu))
    for session, ms in ((home("cpu"), 10.0 + 1.9 + 1.9), (home("gpu"), 0.0)):
        decision = route(request(0), session, state)
        assert decision.predicted is not None
        assert (decision.lane, decision.predicted.move_ms) == ("gpu", pytest.approx(ms))


def test_background_work_is_demoted_only_for_others_and_after_a_delay() -> None:
    """Background work leaves the fast lane when others need it, after a delay."""
    loaded = load(GPU, decodes=40)
    for reason, lane, session, state in (
        (Reason.IDLE_FAST, "gpu", home("gpu"), lanes()),
        (Reason.TOLERANT, "cpu", home("gpu"), lanes(fast=loaded)),
        (Reason.DWELL, "gpu", home("gpu", dwell_ms=4_000.0), lanes(fast=loaded)),
        (Reason.CEILING, "gpu", home("gpu", urgent_ms=59_000.0), lanes(fast=loaded)),
        (Reason.TOLERANT, "cpu", home("gpu", urgent_ms=61_000.0), lanes(fast=loaded)),
        (Reason.HOME, "cpu", home("cpu"), lanes()),
    ):
        decision = route(request(2), session, state)
        assert (decision.lane, decision.reason) == (lane, reason)


def test_affinity_includes_the_cost_of_a_migration() -> None:
    """Two equal lanes: the KV stays unless the other lane is better by more than moving costs.

    And by more than a quarter of the target: a smaller gain does not justify a migration.
    """
    busy = LaneState("a", load(CPU, decodes=3, prefill_ms=100.0))
    idle = LaneState("b", load(CPU))
    state = RouteState((busy, idle))
    tight = request(0, prompt=200, tpot_ms=1000.0)
    dear = replace(state, policy=RoutePolicy(move_ms=10_000.0))
    assert route(tight, home("a"), dear).lane == "a"
    cheap = replace(state, policy=RoutePolicy(move_ms=0.1, move_row_ms=0.0))
    assert route(tight, home("a"), cheap).lane == "b"
    assert route(tight, home("b"), cheap).reason is Reason.HOME
    calm = RouteState((LaneState("a", load(CPU, decodes=1)), idle), cheap.policy)
    assert route(tight, home("a"), calm).reason is Reason.HOME
    assert route(tight, home("a"), RouteState((replace(busy, alive=False), idle))).lane == "b"


def test_cached_kv_shortens_what_counts_as_a_long_prompt() -> None:
    session = RouteSession("cpu", reused_tokens=7_990)
    decision = route(request(1, prompt=8_000), session, lanes())
    assert (decision.lane, decision.reason) == ("cpu", Reason.HOME)


def test_sessions_do_not_alternate_between_lanes() -> None:
    """Turns of changing class on a host where both lanes have room: few migrations."""
    lane, moved_ms, urgent_ms, moves = "cpu", -math.inf, -math.inf, 0
    for turn in range(200):
        now_ms = turn * 1000.0
        rank = 0 if turn % 4 == 0 else 2
        decision = route(
            request(rank),
            home(lane, dwell_ms=now_ms - moved_ms, urgent_ms=now_ms - urgent_ms),
            lanes(fast=load(GPU, decodes=40)),
        )
        if decision.lane != lane:
            lane, moved_ms, moves = decision.lane, now_ms, moves + 1
        if rank == 0:
            urgent_ms = now_ms
    assert moves == 1


def test_the_least_loaded_lane_of_a_tier_is_chosen() -> None:
    rows = (
        LaneState("a", load(CPU, decodes=9), tier=BULK),
        LaneState("b", load(CPU, decodes=3), tier=BULK),
        LaneState("c", load(CPU, decodes=3), tier=ANY),
        LaneState("d", load(CPU), alive=False, tier=BULK),
        LaneState("e", load(CPU), tier=BULK, full=True),
        LaneState("f", load(CPU), tier=BULK, context_max=100),
        LaneState("g", load(GPU, decodes=50), tier=FAST),
    )
    state = RouteState(rows)
    assert best_lane(state, BULK, 300) == "b"
    assert best_lane(state, BULK, 300, away_from="b") == "c"
    assert best_lane(state, BULK, 50) == "f"
    assert best_lane(state, FAST, 300) == "c"
    assert best_lane(RouteState(rows[:2]), FAST, 300) == ""


def test_a_full_lane_is_a_candidate_only_for_its_own_sessions() -> None:
    gpu, cpu = lanes().lanes
    state = RouteState((gpu, replace(cpu, full=True)))
    assert route(request(2), None, state).lane == "gpu"
    assert route(request(2), home("cpu"), state).lane == "cpu"
    both = RouteState((replace(gpu, full=True), replace(cpu, full=True)))
    assert (route(request(2), None, both).lane, route(request(2), None, both).reason) == (
        "",
        Reason.FULL,
    )


# ---- properties ----

costs = st.builds(
    StepCost,
    *(
        st.floats(low, high)
        for low, high in ((0.1, 20), (0.01, 5), (0.01, 5), (1e-6, 1e-3), (1e-8, 1e-4))
    ),
)


@st.composite
def loads(draw: st.DrawFn) -> LaneLoad:
    cost = draw(costs)
    decodes = draw(st.integers(0, 64))
    own = [draw(st.sampled_from((0.0, 5.0, 300.0, 20_000.0))) for _ in range(RANKS)]
    seat = sorted(draw(st.sampled_from((0.0, 100.0, 9_000.0))) for _ in range(RANKS))
    return LaneLoad(
        cost,
        64,
        decodes,
        draw(st.sampled_from((0, 0, 3, 800))),
        512,
        decodes,
        cost.fixed_ms + cost.decode_entry_ms * decodes,
        tuple(sum(own[: rank + 1]) for rank in range(RANKS)),
        tuple(seat),
        draw(st.sampled_from((0.0, 0.0, 400.0, 30_000.0))),
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[RouteRequest, RouteSession | None, RouteState]:
    names = [f"lane{i}" for i in range(draw(st.integers(1, 5)))]
    state = RouteState(
        tuple(
            LaneState(
                name,
                draw(loads()),
                draw(st.sampled_from((True, True, True, False))),
                draw(st.sampled_from((FAST, BULK, ANY))),
                "",
                draw(st.sampled_from((1 << 30, 4096))),
            )
            for name in names
        ),
    )
    rank, prompt = draw(st.integers(0, 3)), draw(st.sampled_from((1, 50, 1500, 9000)))
    asked = request(
        rank,
        prompt,
        draw(st.integers(1, 2000)),
        ttft_ms=draw(st.sampled_from((100.0, 500.0, 2000.0, 30_000.0))),
        tpot_ms=draw(st.sampled_from((5.0, 50.0, 500.0))),
        ttlt_ms=draw(st.sampled_from((math.inf, 5_000.0))),
        promote=draw(st.booleans()),
    )
    session = None
    if draw(st.booleans()):
        reused = draw(st.integers(0, prompt))
        session = RouteSession(
            draw(st.sampled_from([*names, "gone"])),
            reused,
            min(reused, draw(st.integers(0, 255))),
            draw(st.sampled_from((math.inf, 1000.0))),
            draw(st.sampled_from((math.inf, 1000.0))),
        )
    return asked, session, state


def heavier(load: LaneLoad, decodes: int, waiting: int, ms: float) -> LaneLoad:
    return msgspec.structs.replace(
        load,
        seated=load.seated + decodes,
        waiting=load.waiting + waiting,
        decodes=load.decodes + decodes,
        step_ms=load.step_ms + load.cost.decode_entry_ms * decodes,
        prefill_ms=tuple(v + ms for v in load.prefill_ms),
        seat_ms=tuple(v + ms for v in load.seat_ms),
        stage_ms=load.stage_ms + ms,
    )


@settings(deadline=None)
@given(calls())
def test_the_same_inputs_give_the_same_decision_and_never_a_dead_lane(
    call: tuple[RouteRequest, RouteSession | None, RouteState],
) -> None:
    asked, _, state = call
    decision = route(*call)
    assert decision == route(*call)
    able = [
        lane.name for lane in state.lanes if lane.alive and asked.context_tokens <= lane.context_max
    ]
    assert decision.lane in able if able else decision.lane == ""
    assert (decision.predicted is None) == (not able)
    assert isinstance(decision.reason, Reason)


@settings(deadline=None)
@given(calls(), st.integers(0, 4), st.integers(0, 20), st.integers(0, 5), st.floats(0, 5000))
def test_more_load_never_makes_a_lane_preferred(
    call: tuple[RouteRequest, RouteSession | None, RouteState],
    index: int,
    decodes: int,
    waiting: int,
    ms: float,
) -> None:
    asked, session, state = call
    assume(index < len(state.lanes))
    lane = state.lanes[index]
    before: Decision = route(*call)
    assume(before.lane != lane.name)
    more = replace(lane, load=heavier(lane.load, decodes, waiting, ms))
    after = route(
        asked,
        session,
        replace(state, lanes=(*state.lanes[:index], more, *state.lanes[index + 1 :])),
    )
    assert after.lane != lane.name
    assert after.candidates[index].sla_ratio >= before.candidates[index].sla_ratio


@settings(deadline=None)
@given(calls())
def test_an_interactive_request_is_never_sent_to_a_much_worse_lane(
    call: tuple[RouteRequest, RouteSession | None, RouteState],
) -> None:
    asked, session, state = call
    decision = route(replace(asked, rank=0), session, state)
    assume(decision.predicted is not None)
    assert decision.predicted is not None
    able = [c.sla_ratio for c in decision.candidates if not c.excluded]
    limit = min(able) + state.policy.tolerance * max(1.0, min(able))
    assert decision.predicted.sla_ratio <= limit * (1 + 1e-12)


@settings(deadline=None)
@given(loads(), st.integers(0, 3), st.integers(0, 9000), st.integers(1, 9000), st.integers(1, 999))
def test_the_router_predicts_as_the_cost_model_does(
    load: LaneLoad, rank: int, frontier: int, n_tokens: int, tokens_out: int
) -> None:
    asked = request(rank, frontier + n_tokens, tokens_out)
    state = RouteState((LaneState("a", load),))
    found = route(asked, RouteSession("a", frontier), state).candidates[0]
    expected = predict(load, rank, frontier, n_tokens, tokens_out)
    assert found.ttft_ms == pytest.approx(expected.ttft_ms)
    assert found.tpot_ms == pytest.approx(expected.tpot_ms)
