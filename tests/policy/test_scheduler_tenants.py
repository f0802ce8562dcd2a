"""The scheduler between tenants: equal shares, and the bound on waiting, under a flood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from batchengine.core import SlaClass
from batchengine.policy.scheduler import Policy
from tests.policy.test_scheduler_simulation import SLOW, Job, Lane, flood

INTERACTIVE, STANDARD, BACKGROUND, BATCH = SlaClass
QUEUE = 100  # sessions of the tenant that floods
EAGER_MS = 0.001  # the TTFT target that it claims


def together(*arrivals: Callable[[Lane], None]) -> Callable[[Lane], None]:
    def arrive(lane: Lane) -> None:
        for each in arrivals:
            each(lane)

    return arrive


def computed(lane: Lane) -> Counter[str]:
    """Tokens that each tenant has computed."""
    found: Counter[str] = Counter()
    for job in lane.jobs:
        found[job.tenant] += job.computed
    return found


def tokens_of_a_step(lane: Lane) -> int:
    return max(sum(n for _, n in batch) for batch in lane.log)


@pytest.mark.parametrize("entries", [1, 7])
@pytest.mark.parametrize(
    ("prompt", "tokens"), [(40, 300), (900, 4), (300, 60)], ids=["decode", "prefill", "mixed"]
)
def test_two_busy_tenants_compute_equal_tokens(entries: int, prompt: int, tokens: int) -> None:
    """A has 100 sessions waiting with a target of 1 µs, B has 12: over every second both compute
    the same, but for two steps and what the lane computes in `quantum_urgent_ms`."""
    lane = Lane(entries)
    lane.run(
        1_000.0, a := flood(2.0, STANDARD, prompt, tokens, QUEUE, tenant="a", ttft_ms=EAGER_MS)
    )
    b = flood(2.0, STANDARD, prompt, tokens, 12, tenant="b", first_key=50_000)
    arrive = together(a, b)
    lane.run(1_200.0, arrive)
    for _ in range(3):
        before = computed(lane)
        lane.run(lane.now_ms + 1_000.0, arrive)
        taken = computed(lane) - before
        in_a_quantum = taken.total() * Policy().quantum_urgent_ms / 1_000.0
        assert abs(taken["a"] - taken["b"]) <= 2 * tokens_of_a_step(lane) + in_a_quantum, taken


def test_shares_follow_the_weights() -> None:
    lane = Lane(8, weights={"a": 1.0, "b": 3.0})
    arrive = together(
        flood(2.0, STANDARD, 100, 100, QUEUE, tenant="a", ttft_ms=EAGER_MS),
        flood(2.0, STANDARD, 100, 100, 20, tenant="b", first_key=50_000),
    )
    lane.run(2_000.0, arrive)
    before = computed(lane)
    lane.run(8_000.0, arrive)
    taken = computed(lane) - before
    assert 2.4 < taken["b"] / taken["a"] < 3.6, taken


@pytest.mark.parametrize("sla_class", [INTERACTIVE, STANDARD])
def test_a_flood_delays_one_request_of_another_tenant_by_few_steps(sla_class: SlaClass) -> None:
    """Twelve requests of B with pauses, less than its share, beside A's queue of 100."""

    def first_tokens(arrive: Callable[[Lane], None]) -> list[float]:
        lane = Lane(8, seed=7)
        lane.run(1_000.0, arrive)
        found: list[float] = []
        for key in range(12):
            job = lane.add(Job(key, sla_class, lane.now_ms, 600, 20, tenant="b"))
            while job.done_ms is None:
                arrive(lane)
                lane.step()
            assert job.first_ms is not None
            found.append(job.first_ms - job.joined_ms)
            lane.run(lane.now_ms + 300.0, arrive)
        return sorted(found)

    alone = first_tokens(lambda lane: None)
    beside = first_tokens(flood(5.0, sla_class, 200, 80, QUEUE, tenant="a", ttft_ms=EAGER_MS))
    assert beside[-1] <= 3.0 * alone[6], (alone, beside)


def test_a_target_does_not_raise_a_tenant_above_others_of_its_class() -> None:
    """Decodes with TPOT targets that are always about to be missed do not stop B's prefill, and
    prompts that are always late do not take more than half of the time of B's decodes."""
    lane = Lane(8)
    lane.run(500.0, arrive := flood(5.0, STANDARD, 4_000, 4, 40, tenant="a", ttft_ms=EAGER_MS))
    talker = lane.add(Job(1, STANDARD, lane.now_ms, 50, 150, tenant="b"))
    while talker.done_ms is None:
        arrive(lane)
        lane.step()
    middle = sorted(talker.gaps_ms)[len(talker.gaps_ms) // 2]
    assert middle <= 10.0  # of a target of 100 ms; 2.5 ms alone


@pytest.mark.parametrize("entries", [1, 8])
def test_the_aging_bound_of_a_tenant_does_not_depend_on_the_queues_of_others(entries: int) -> None:
    """Interactive work for three lanes, and a backlog of A that is always late, in every class."""
    lane = Lane(entries, seed=3, cost=SLOW)
    arrive = together(
        flood(60.0, INTERACTIVE, 300, 60, 20, tenant="c", first_key=10_000),
        flood(60.0, STANDARD, 300, 60, 40, tenant="a", ttft_ms=EAGER_MS, first_key=50_000),
        flood(60.0, BATCH, 300, 60, 40, tenant="a", ttft_ms=EAGER_MS, first_key=90_000),
    )
    lane.run(3_000.0, arrive)
    victims = [
        lane.add(Job(key, sla_class, lane.now_ms, 2_000, 40, tenant="b"))
        for key, sla_class in enumerate([STANDARD, BACKGROUND, BATCH])
    ]
    lane.run(60_000.0, arrive)
    for job in victims:
        assert job.computed > 0, job
        assert job.bound_ms is None or job.started_ms < job.bound_ms, job
    # three tenants, and at most two sessions of B before each: not A's 80
    assert max(job.bound_ms or 0.0 for job in victims) < 3_000 + 10_000 + 3 * 3 * 12_000


def test_a_tenant_that_starves_itself_does_not_hold_others() -> None:
    """A tenant that leaves and returns starts level with the others, neither behind nor ahead."""
    lane = Lane(4)
    a = flood(5.0, STANDARD, 100, 50, 40, tenant="a")
    lane.run(5_000.0, a)
    b = flood(5.0, STANDARD, 100, 50, 40, tenant="b", first_key=50_000)
    before = computed(lane)
    lane.run(7_000.0, together(a, b))
    taken = computed(lane) - before
    assert taken["b"] <= taken["a"] + 2 * tokens_of_a_step(lane)
