"""Which sessions change their lane by themselves: turns that end earlier elsewhere, idle ones."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from batchengine.policy.cost import LoadRow, StepCost, load_of, predict, without
from batchengine.policy.moves import RELIEVES, demotion, promotion, relief
from batchengine.policy.router import (
    BULK,
    FAST,
    LaneState,
    Reason,
    RoutePolicy,
    RouteRequest,
    RouteSession,
    RouteState,
    route,
)
from tests.policy.router.test_router import CPU, GPU, home, lanes, load, request

DECODE = LoadRow(1, 190, 1, 100, True)


def left(rank: int = 1, **given: float) -> RouteRequest:
    """What is left of a turn with its first token."""
    return request(rank, 191, **({"ttft_ms": math.inf} | given))  # type: ignore[arg-type]


def on_cpu(rows: list[LoadRow]) -> RouteState:
    return lanes(bulk=load_of(CPU, 64, 512, rows))


# ---- turns ----


@pytest.mark.parametrize(
    ("rank", "tpot_ms", "others", "reason"),
    [
        (0, 50.0, 0, Reason.URGENT),
        (1, 100.0, 0, None),  # the CPU keeps the promise of a short standard turn
        (1, 100.0, 60, Reason.SPILL),  # 130 ms a token
        (2, 500.0, 60, None),
        (2, 100.0, 60, Reason.SPILL),
    ],
)
def test_what_the_cpu_keeps_its_promise_for_stays_there(
    rank: int, tpot_ms: float, others: int, reason: Reason | None
) -> None:
    row = DECODE._replace(rank=rank)
    state = on_cpu([row] * (others + 1))
    found = promotion(left(rank, tpot_ms=tpot_ms), home("cpu"), row, state)
    assert (None if found is None else (found.lane, found.reason)) == (reason and ("gpu", reason))
    if found is not None:
        assert found.there_ms < found.here_ms / 1.25


def test_a_long_prompt_goes_while_most_of_it_is_to_be_computed() -> None:
    for frontier, goes in ((0, True), (1000, True), (7000, False), (7999, False)):
        row = LoadRow(1, frontier, 8000 - frontier, 100, True)
        session = home("cpu", reused_tokens=frontier)
        found = promotion(request(1, 8000, ttft_ms=60_000.0), session, row, on_cpu([row]))
        assert (found is not None) == goes, frontier


def test_a_turn_moves_only_for_a_gain_that_is_worth_the_move() -> None:
    row = DECODE._replace(rank=0)
    for tokens_out, moves in ((1, False), (100, True)):
        found = promotion(
            request(0, 191, tokens_out, ttft_ms=math.inf), home("cpu"), row, on_cpu([row])
        )
        assert (found is not None) == moves
    dear = replace(on_cpu([row]), policy=RoutePolicy(move_ms=2_000.0))
    assert promotion(left(0), home("cpu"), row, dear) is None
    slow = lanes(fast=load(CPU), bulk=load_of(CPU, 64, 512, [row]))  # no faster than its own lane
    assert promotion(left(0), home("cpu"), row, slow) is None


def test_no_turn_moves_to_a_lane_without_a_free_seat_or_that_is_down_or_back() -> None:
    row = DECODE._replace(rank=0)
    gpu, cpu = on_cpu([row]).lanes
    for other, moves in (
        (gpu, True),
        (replace(gpu, alive=False), False),
        (replace(gpu, load=load(GPU, decodes=64)), False),
        (replace(gpu, load=load(GPU, decodes=60, waiting=4)), False),
        (replace(gpu, tier="bulk"), False),
    ):
        found = promotion(left(0), home("cpu"), row, RouteState((other, cpu)))
        assert (found is not None) == moves
    state = on_cpu([row])
    assert promotion(left(0), home("cpu", dwell_ms=4_000.0), row, state) is None
    assert promotion(left(0), home("gone"), row, state) is None
    assert promotion(left(2), home("gpu"), row, state) is None
    dead = RouteState((gpu, replace(cpu, alive=False)))
    assert promotion(left(0), home("cpu"), row, dead) is None  # evacuations have no condition


@pytest.mark.parametrize("seated", [True, False])
@pytest.mark.parametrize("to_compute", [1, 700])
def test_a_turn_is_not_counted_beside_itself(seated: bool, to_compute: int) -> None:
    row = LoadRow(1, 300, to_compute, 100, seated)
    others = [LoadRow(0, 200, 1, 80, True), LoadRow(2, 0, 400, 80, True)]
    found = without(load_of(CPU, 8, 512, [*others, row]), row)
    alone = load_of(CPU, 8, 512, others)
    for rank in range(4):
        got, expected = (predict(one, rank, 300, to_compute, 100) for one in (found, alone))
        assert (got.ttft_ms, got.tpot_ms) == pytest.approx((expected.ttft_ms, expected.tpot_ms))


def test_a_turn_that_can_wait_leaves_a_fast_lane_that_urgent_ones_need() -> None:
    slow = load(GPU, decodes=200)  # 44 ms a step, and 50 are promised
    for given, row, session, fast, leaves in (
        (left(1), DECODE, home("gpu"), slow, True),
        (left(1), DECODE, home("gpu"), load(GPU, decodes=40, waiting=1), True),
        (left(1), DECODE, home("gpu"), load(GPU, decodes=40), False),
        (left(0), DECODE, home("gpu"), slow, False),
        (left(1, tpot_ms=20.0), DECODE, home("gpu"), slow, False),
        (left(1), DECODE._replace(to_compute=300), home("gpu"), slow, False),
        (left(1), DECODE, home("gpu", dwell_ms=4_000.0), slow, False),
        (left(1), DECODE, home("gpu", urgent_ms=4_000.0), slow, False),
        (left(1), DECODE, home("cpu"), slow, False),
    ):
        found = relief(given, session, row, lanes(fast=fast))
        assert (found and (found.lane, found.reason)) == (("cpu", RELIEVES) if leaves else None)
    busy = lanes(fast=slow, bulk=load(CPU, decodes=40))  # 88 ms a token, and 100 are promised
    assert relief(left(1), home("gpu"), DECODE, busy) is None
    gpu, cpu = lanes(fast=slow).lanes
    assert (
        relief(left(1), home("gpu"), DECODE, RouteState((gpu, replace(cpu, alive=False)))) is None
    )


def test_two_processors_keep_the_promises_of_half_as_many_sessions_more() -> None:
    """A 27B model on an L40S and 32 cores, sessions of 8,192 tokens, of which 300 are new; half of
    them are promised 50 ms a token and half 250: the cores are too slow for prompts only."""
    costs = {
        "gpu": StepCost(21.3, 0.345, 0.68, 4.7e-5, 1e-6),
        "cpu": StepCost(1, 11.1, 13.7, 2e-4, 2e-5),
    }
    targets = {0: (500.0, 50.0), 1: (2_000.0, 250.0)}

    def sessions(*names: str) -> int:
        rows: dict[str, list[LoadRow]] = {name: [] for name in names}

        def state() -> RouteState:
            return RouteState(
                tuple(
                    LaneState(
                        name,
                        load_of(costs[name], 256, 512, rows[name]),
                        tier=FAST if name == "gpu" else BULK,
                    )
                    for name in names
                )
            )

        for n in range(100):
            rank = n % 2
            ttft_ms, tpot_ms = targets[rank]
            asked = RouteRequest(rank, 8192, 200, 8392, ttft_ms, tpot_ms)
            row = LoadRow(rank, 8192, 1, 200, True)
            decision = route(asked, RouteSession("", 7892), state())
            rows[decision.lane].append(row)
            for turn in [row for row in rows["gpu"] if row.rank]:  # a second passes
                known = RouteSession("gpu", 8191)
                moved = relief(
                    replace(asked, rank=1, ttft_ms=math.inf, tpot_ms=250.0), known, turn, state()
                )
                if moved is not None:
                    rows["gpu"].remove(turn)
                    rows[moved.lane].append(turn)
            for lane in state().lanes:
                promised = min((targets[row.rank][1] for row in rows[lane.name]), default=math.inf)
                if lane.load.step_ms > promised:
                    return n
        return 100

    alone = sessions("gpu")
    assert 24 <= alone <= 28
    assert sessions("gpu", "cpu") >= 1.35 * alone


# ---- idle sessions ----


def test_idle_sessions_leave_the_fast_lane() -> None:
    state = lanes()
    for lane, idle_ms, session, to in (
        ("gpu", 61_000.0, home("gpu"), "cpu"),
        ("gpu", 59_000.0, home("gpu"), ""),
        ("gpu", 61_000.0, home("gpu", urgent_ms=59_000.0), ""),
        ("gpu", 61_000.0, home("gpu", dwell_ms=1_000.0), ""),
        ("cpu", 61_000.0, home("cpu"), ""),
        ("gone", 61_000.0, home("gone"), ""),
    ):
        assert session.lane == lane
        assert demotion(session, idle_ms, 300, state) == to
    dead = replace(state.lanes[1], alive=False)
    assert demotion(home("gpu"), 61_000.0, 300, RouteState((state.lanes[0], dead))) == ""
