"""The cost model: learns a lane's coefficients, limits outliers, follows lasting changes."""

from __future__ import annotations

import math
import random

import pytest

from batchengine.policy.cost import (
    QUANTUM_URGENT_MS,
    RANKS,
    CostModel,
    LoadRow,
    QueuedWork,
    StepCost,
    StepWork,
    etas_ms,
    joined,
    load_of,
    plan_restore,
    predict,
    prefill_ms,
    retry_after_ms,
    wait_ms,
    without,
    work_of,
)
from batchengine.policy.scheduler import RANK, Policy

TRUTH = StepCost(0.8, 0.05, 0.3, 2e-4, 3e-6)


def steps(rng: random.Random, count: int) -> list[StepWork]:
    """A mix of steps: pure decodes, pure prefills, both."""
    found: list[StepWork] = []
    for _ in range(count):
        decodes = rng.choice([0, 1, 4, 16, 32])
        entries = [(rng.randrange(0, 4000), 1) for _ in range(decodes)]
        if not decodes or rng.random() < 0.4:
            entries.append((rng.randrange(0, 4000), rng.choice([16, 64, 256, 512])))
        found.append(work_of(entries))
    return found


def errors(model: CostModel, truth: StepCost) -> list[float]:
    probe = steps(random.Random(99), 200)
    return sorted(abs(model.cost.predict_ms(w) / truth.predict_ms(w) - 1) for w in probe)


def test_step_work_counts_decodes_and_attended_pairs() -> None:
    assert work_of([(10, 1), (0, 4), (100, 1)]) == StepWork(4, 2, 112, 8.0)
    assert StepCost(1, 2, 3, 4, 5).predict_ms(StepWork(1, 1, 1, 1.0)) == 15


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_a_wrong_prior_is_corrected(factor: float) -> None:
    rng = random.Random(1)
    prior = StepCost(*(factor * c for c in (1.0, 0.1, 0.1, 1e-4, 1e-5)))
    model = CostModel(prior)
    for work in steps(rng, 400):
        model.observe(work, TRUTH.predict_ms(work) * rng.uniform(0.95, 1.05))
    found = errors(model, TRUTH)
    assert found[100] < 0.05
    assert found[190] < 0.15
    assert model.error_ratio < 0.1


def test_outliers_change_the_coefficients_little() -> None:
    rng = random.Random(2)
    model = CostModel(StepCost(1.0, 0.1, 0.1, 1e-4, 1e-5))
    for work in steps(rng, 600):
        slow = rng.choice([5.0, 30.0]) if rng.random() < 0.05 else rng.uniform(0.97, 1.03)
        model.observe(work, TRUTH.predict_ms(work) * slow)
    assert errors(model, TRUTH)[100] < 0.25


def test_one_outlier_after_steady_steps_is_limited() -> None:
    model = CostModel(TRUTH)
    for work in steps(random.Random(3), 200):
        model.observe(work, TRUTH.predict_ms(work))
    before = model.cost
    work = StepWork(0, 4, 4000, 0.0)
    model.observe(work, 1000 * TRUTH.predict_ms(work))
    assert model.cost.predict_ms(work) < 1.25 * before.predict_ms(work)


def test_coefficients_follow_a_lane_that_lost_half_its_cores() -> None:
    rng = random.Random(4)
    model = CostModel(TRUTH)
    for work in steps(rng, 300):
        model.observe(work, TRUTH.predict_ms(work) * rng.uniform(0.97, 1.03))
    slow = StepCost(1.6, 0.1, 0.6, 4e-4, 6e-6)
    for work in steps(rng, 300):
        model.observe(work, slow.predict_ms(work) * rng.uniform(0.97, 1.03))
    assert errors(model, slow)[100] < 0.1


def test_an_hour_of_decodes_keeps_the_prefill_coefficient() -> None:
    rng = random.Random(5)
    model = CostModel(StepCost(21.0, 4.0, 4.0, 2e-4, 2e-4))
    for work in steps(rng, 300):
        model.observe(work, TRUTH.predict_ms(work))
    for _ in range(20_000):
        work = StepWork(0, 1, rng.randrange(1000), 0.0)
        model.observe(work, TRUTH.predict_ms(work) * rng.uniform(0.9, 1.1))
    prefill = StepWork(512, 0, 0, 512 * 256.0)
    assert model.cost.predict_ms(prefill) == pytest.approx(TRUTH.predict_ms(prefill), rel=0.5)


def test_what_scoring_takes_is_learned_beside_the_coefficients() -> None:
    rng, model = random.Random(8), CostModel(TRUTH)
    dear = TRUTH._replace(prefill_token_ms=0.08)
    assert model.scored_cost.prefill_token_ms == 2 * TRUTH.prefill_token_ms
    for _ in range(40):
        scored, other = rng.choice([16, 64, 512]), rng.choice([0, 100])
        work = work_of([(rng.randrange(4000), scored + other), (700, 1)])
        step_ms = TRUTH.predict_ms(work) + 0.03 * scored
        model.observe_scored(work, scored, step_ms * rng.uniform(0.98, 1.02))
    assert model.scored_cost.prefill_token_ms == pytest.approx(dear.prefill_token_ms, rel=0.1)
    assert (model.cost, model.steps) == (TRUTH, 0)
    known = model.scored_cost
    model.observe_scored(work, scored, 1e6)  # one step that something else delayed
    assert model.scored_cost.prefill_token_ms < 1.2 * known.prefill_token_ms
    for step_ms in (0.0, math.nan, 1e-9):
        model.observe_scored(work, scored, step_ms)
    assert model.scored_cost.prefill_token_ms > TRUTH.prefill_token_ms


def test_coefficients_stay_positive_and_finite() -> None:
    model = CostModel(StepCost())
    rng = random.Random(6)
    for work in steps(rng, 500):
        model.observe(work, rng.choice([0.0, -1.0, math.nan, math.inf, 1e-9, 1e9, 3.0]))
    assert all(math.isfinite(v) and v > 0 for v in model.cost)


def test_the_same_observations_give_equal_bits() -> None:
    models = [CostModel(StepCost()) for _ in range(2)]
    for model in models:
        for i, work in enumerate(steps(random.Random(7), 100)):
            model.observe(work, 1.0 + i % 7)
    assert models[0].cost == models[1].cost


@pytest.mark.parametrize("factor", [1 / 30, 30.0])
def test_rare_prefills_are_learned_between_many_decodes(factor: float) -> None:
    """One prefill among thirty decodes, and a prior that is wrong by a factor of thirty."""
    rng = random.Random(9)
    model = CostModel(StepCost(*(factor * c for c in TRUTH)))
    for _ in range(6):
        for work in [StepWork(256, 0, 0, 256 * 128.0)] + [StepWork(0, 1, 300, 0.0)] * 30:
            model.observe(work, TRUTH.predict_ms(work) * rng.uniform(0.95, 1.05))
    prefill = StepWork(512, 0, 0, 512 * 256.0)
    assert model.cost.predict_ms(prefill) == pytest.approx(TRUTH.predict_ms(prefill), rel=0.3)


def test_a_prior_must_be_positive() -> None:
    with pytest.raises(ValueError, match="not positive"):
        CostModel(StepCost(fixed_ms=0.0))


def test_a_prior_is_replaced_until_steps_were_observed() -> None:
    model = CostModel(StepCost())
    model.assume(TRUTH)
    assert model.cost == TRUTH
    model.observe(StepWork(0, 1, 10, 0.0), 5.0)
    observed = model.cost
    model.assume(StepCost())
    assert model.cost == observed != TRUTH


def test_eta_grows_with_the_queue_and_includes_waits_for_seats() -> None:
    job = QueuedWork(0, 100, 50)
    busy = QueuedWork(200, 1, 50)
    alone = etas_ms(TRUTH, [], 4, [job])[-1]
    assert alone == pytest.approx(0.8 + 0.05 * 100 + 3e-6 * 5000)
    free_seat = etas_ms(TRUTH, [busy], 1, [job])[-1]
    no_seat = etas_ms(TRUTH, [busy], 0, [job])[-1]
    assert alone < free_seat < no_seat
    assert no_seat > 50 * (0.8 + 0.3)  # it waits for the seated session to end
    etas = [etas_ms(TRUTH, [busy] * 4, 0, [job] * n)[-1] for n in range(1, 30)]
    assert etas == sorted(etas)
    assert etas_ms(TRUTH, [], 0, [job])[-1] == math.inf


def test_retry_after_is_bounded() -> None:
    assert [retry_after_ms(w) for w in (0.0, 2500.4, math.inf)] == [100, 2500, 60_000]


def test_each_queued_request_has_its_own_eta() -> None:
    job = QueuedWork(0, 100, 50)
    etas = etas_ms(TRUTH, [QueuedWork(200, 1, 50)] * 2, 1, [job] * 5)
    assert etas == sorted(etas)
    assert len(set(etas)) == 5
    assert etas_ms(TRUTH, [], 0, [job] * 2) == [math.inf] * 2
    assert etas_ms(TRUTH, [], 4, []) == []


# ---- predictions for a request ----


def rows(
    *, decoding: int = 0, prefilling: int = 0, waiting: int = 0, rank: int = 1
) -> list[LoadRow]:
    return [
        *[LoadRow(rank, 300, 1, 100, True)] * decoding,
        *[LoadRow(rank, 0, 400, 100, True)] * prefilling,
        *[LoadRow(rank, 0, 400, 100, False)] * waiting,
    ]


def test_ranks_and_quantum_are_those_of_the_scheduler() -> None:
    assert len(RANK) == RANKS
    assert Policy().quantum_urgent_ms == QUANTUM_URGENT_MS


def test_what_log_probabilities_of_a_prompt_take_delays_what_waits_behind_it() -> None:
    plain, scored = LoadRow(1, 0, 400, 100, True), LoadRow(1, 0, 400, 100, True, 50.0)
    one, other = (load_of(TRUTH, 8, 512, [row]) for row in (plain, scored))
    assert wait_ms(other, 1) == pytest.approx(wait_ms(one, 1) + 2 * 50.0)
    assert without(other, scored).prefill_ms == pytest.approx((0.0,) * RANKS)
    assert joined(one, 1, 0, 400, 50.0).prefill_ms[1] == pytest.approx(
        joined(other, 1, 0, 400).prefill_ms[1]
    )
    job = QueuedWork(0, 400, 10)
    etas = [etas_ms(TRUTH, [], 2, [work, job]) for work in (job, job._replace(scored_ms=50.0))]
    assert [b - a for a, b in zip(*etas, strict=True)] == pytest.approx([50.0, 50.0])
    model = CostModel(TRUTH)
    more_ms = model.scored_cost.prefill_token_ms - TRUTH.prefill_token_ms
    assert model.scored_ms(7) == pytest.approx(7 * more_ms)


def test_an_idle_lane_is_predicted_from_its_coefficients() -> None:
    load = load_of(TRUTH, 8, 512, [])
    found = predict(load, 1, 0, 100, 50)
    assert wait_ms(load, 1) == 0.0
    assert found.ttft_ms == pytest.approx(0.8 + prefill_ms(TRUTH, 0, 100))
    assert found.tpot_ms == pytest.approx(TRUTH.predict_ms(StepWork(0, 1, 125)))


def test_decodes_halve_the_speed_of_prefill_and_slow_each_other() -> None:
    idle = predict(load_of(TRUTH, 8, 512, []), 1, 0, 1000, 50)
    busy = predict(load_of(TRUTH, 8, 512, rows(decoding=4)), 1, 0, 1000, 50)
    assert 1.8 * idle.ttft_ms < busy.ttft_ms < 2.3 * idle.ttft_ms
    step = TRUTH.predict_ms(StepWork(0, 5, 4 * 301 + 1025))
    assert busy.tpot_ms == pytest.approx(step)


def test_only_requests_of_the_same_or_a_higher_rank_are_ahead() -> None:
    load = load_of(TRUTH, 64, 512, rows(prefilling=3, rank=2))
    waits = [wait_ms(load, rank) for rank in range(RANKS)]
    work = 2 * 3 * prefill_ms(TRUTH, 0, 400)  # the first one decodes while the others prefill
    assert waits == pytest.approx([0.0, 0.0, work, work])
    tpots = [predict(load, rank, 0, 10, 100).tpot_ms for rank in range(RANKS)]
    assert len(set(tpots)) == 1  # later tokens share the steps with that prefill, of any turn
    assert tpots[0] > predict(load_of(TRUTH, 64, 512, []), 0, 0, 10, 100).tpot_ms


def test_the_wait_for_a_seat_is_predicted() -> None:
    full = load_of(TRUTH, 4, 512, rows(decoding=4))
    longer = load_of(TRUTH, 4, 512, rows(decoding=4, waiting=5))
    assert wait_ms(full, 0) == QUANTUM_URGENT_MS  # it may preempt one of theirs
    assert wait_ms(load_of(TRUTH, 4, 512, rows(decoding=3)), 1) == 0.0
    turnover = 100 * full.step_ms / 4
    assert wait_ms(full, 1) == pytest.approx(QUANTUM_URGENT_MS + turnover)
    assert wait_ms(longer, 1) > wait_ms(full, 1) + 5 * turnover


def test_every_prediction_grows_with_every_load() -> None:
    rng = random.Random(8)
    for _ in range(300):
        crowd = [
            LoadRow(rng.randrange(4), rng.randrange(3000), rng.choice([1, 1, 900]), 80, seated)
            for seated in [True] * rng.randrange(6) + [False] * rng.randrange(6)
        ]
        more = [*crowd, LoadRow(rng.randrange(4), 100, rng.choice([2, 800]), 80, False)]
        less, full = (load_of(TRUTH, 6, 512, r) for r in (crowd, more))
        for rank in range(RANKS):
            before, after = (predict(one, rank, 50, 200, 100) for one in (less, full))
            assert after.ttft_ms >= before.ttft_ms
            assert after.tpot_ms >= before.tpot_ms


def test_stages_take_half_of_the_lane_as_long_as_there_are_some() -> None:
    crowd = rows(prefilling=1, rank=1)
    for some in ([], crowd):
        loads = [load_of(TRUTH, 8, 512, some, ms) for ms in (0.0, 10.0, 1e6)]
        alone, short, long = (predict(load, 1, 0, 400, 50) for load in loads)
        assert short.ttft_ms == pytest.approx(alone.ttft_ms + 10.0)
        assert long.ttft_ms == pytest.approx(2 * alone.ttft_ms)
        assert alone.tpot_ms < short.tpot_ms < long.tpot_ms <= 2 * alone.tpot_ms
        waits = [wait_ms(load, 1) for load in loads]
        assert waits == pytest.approx([waits[0], waits[0] + min(waits[0], 10.0), 2 * waits[0]])


def test_a_joined_session_is_counted_until_the_next_load_report() -> None:
    load = load_of(TRUTH, 64, 512, rows(decoding=2))
    more = joined(load, 2, 0, 400)
    exact = load_of(TRUTH, 64, 512, [*rows(decoding=2), *rows(waiting=1, rank=2)])
    assert more.prefill_ms == pytest.approx(exact.prefill_ms)
    assert more.waiting == exact.waiting == 1


# ---- load, recompute or share ----

SLOW_DISK, FAST_DISK = 50e6, 3e9  # bytes per second
COLD = {"tokens": 8192, "cold_tokens": 8192, "cold_bytes": 8192 * (28 << 10)}


def test_pages_on_a_slow_disk_are_recomputed() -> None:
    compute_ms = prefill_ms(TRUTH, 0, 8192)
    slow = plan_restore(TRUTH, **COLD, read_bytes_per_s=SLOW_DISK)
    assert (slow.choice, slow.reason) == ("recompute", "computing is faster")
    assert slow.load_ms == pytest.approx(COLD["cold_bytes"] / SLOW_DISK * 1000)
    assert slow.recompute_ms == pytest.approx(compute_ms)
    fast = plan_restore(TRUTH, **COLD, read_bytes_per_s=FAST_DISK)
    assert (fast.choice, fast.reason) == ("load", "reading is faster")
    queued = plan_restore(TRUTH, **COLD, read_bytes_per_s=FAST_DISK, queued_bytes=10 << 30)
    assert queued.choice == "recompute"  # the disk is busy with other reads


def test_decodes_raise_the_cost_of_a_recompute() -> None:
    rate = COLD["cold_bytes"] / prefill_ms(TRUTH, 0, 8192) * 1000 / 1.5
    assert plan_restore(TRUTH, **COLD, read_bytes_per_s=rate).choice == "recompute"
    assert plan_restore(TRUTH, **COLD, read_bytes_per_s=rate, decodes=3).choice == "load"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_with_an_unknown_rate_pages_are_read(rate: float) -> None:
    plan = plan_restore(TRUTH, **COLD, read_bytes_per_s=rate)
    assert (plan.choice, plan.reason) == ("load", "reading was never measured")


def test_pages_in_memory_are_shared() -> None:
    plan = plan_restore(TRUTH, tokens=512, cold_tokens=0, cold_bytes=0, read_bytes_per_s=1.0)
    assert plan.choice == "share"
