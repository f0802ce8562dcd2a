"""Predictions of ring decode, by hand and against a simulation of every message."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.policy.cost import LinkSpeed
from batchengine.policy.linked.ring import (
    EARLY_MAX,
    RingHolder,
    RingShape,
    shape_of,
    token_ms,
)
from tests.policy import layouts_simulation

LAN = LinkSpeed(1.25e6, 0.06)  # 10 Gb/s
SMALL = shape_of(28, 16, 8, 128)


def holder(name: str, tokens: int, kv_ms: float = 1e-3, link: LinkSpeed = LAN) -> RingHolder:
    return RingHolder(name, tokens, kv_ms, link)


# ---- bytes of a unit ----


def test_the_bytes_of_a_head_group() -> None:
    shape = shape_of(80, 64, 8, 128)
    assert (shape.kv_heads, shape.query_bytes, shape.accumulator_bytes) == (8, 1152, 4160)
    wide = shape_of(16, 24, 4, 256)
    assert (wide.query_bytes, wide.accumulator_bytes) == (1728, 6192)


# ---- closed form ----


def test_one_holder_by_hand() -> None:
    """One layer and head group: query, attention, accumulators; the owner attends meanwhile."""
    shape = RingShape(1, 1, 1000, 4000)
    link = LinkSpeed(1000.0, 0.5)
    found = token_ms(shape, [holder("b", 1000, 0.01, link)], link, 1200, 0.01)
    assert found == pytest.approx(1 + 0.5 + 10 + 4 + 0.5)


def test_a_query_is_passed_on_before_it_is_answered() -> None:
    """Three equal holders compute at the same time: the lap is one share and the hops."""
    holders = [holder(name, 8192) for name in "bcd"]
    lap = token_ms(SMALL, holders, LAN, 8192, 1e-3)
    share = 8192 * 1e-3
    hops = SMALL.layers * 4 * (LAN.latency_ms + SMALL.accumulator_bytes / LAN.bytes_per_ms)
    assert lap <= share + hops
    assert lap < 0.5 * (4 * share)


links = st.builds(
    LinkSpeed, st.sampled_from((5e6, 1.25e6, 1.25e5)), st.sampled_from((0.005, 0.06, 0.5))
)
holders_of_a_route = st.lists(
    st.builds(
        RingHolder,
        st.just(""),
        st.integers(1, 32).map(lambda n: 1024 * n),
        st.floats(1e-4, 2e-3),
        links,
        st.sampled_from((0.0, 0.0, 0.1)),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: [one._replace(name=str(i)) for i, one in enumerate(found)])
shapes = st.sampled_from((SMALL, shape_of(80, 64, 8, 128), shape_of(16, 24, 4, 256)))


@settings(deadline=None)
@given(shapes, holders_of_a_route, links, st.integers(0, 30_000), st.floats(1e-4, 2e-3))
def test_times_agree_with_a_simulation_of_every_message(
    shape: RingShape,
    holders: list[RingHolder],
    home: LinkSpeed,
    own_tokens: int,
    own_kv_ms: float,
) -> None:
    found = token_ms(shape, holders, home, own_tokens, own_kv_ms)
    seen = layouts_simulation.ring(shape, holders, home, own_tokens, own_kv_ms)
    assert found <= seen * (1 + 1e-9)
    assert seen <= (1 + EARLY_MAX) * found


def test_a_daemon_twice_on_a_route_is_predicted_roughly() -> None:
    """Which of its two visits is served first is not modelled: within a factor of 0.6 to 1.6."""
    rng = random.Random(3)
    for _ in range(200):
        holders = [
            RingHolder(name, 1024 * rng.randrange(1, 33), rng.uniform(1e-4, 2e-3), LAN)
            for name in ("b", "c", "b")[rng.randrange(2) :]
        ]
        holders[0] = holders[0]._replace(name="b")
        own = rng.randrange(30_000)
        found = token_ms(SMALL, holders, LAN, own, 1e-3)
        seen = layouts_simulation.ring(SMALL, holders, LAN, own, 1e-3)
        assert 0.6 < seen / found < 1.6


@settings(deadline=None)
@given(shapes, holders_of_a_route, links, st.integers(0, 30_000), st.integers(0, 2))
def test_more_work_is_never_predicted_to_be_faster(
    shape: RingShape, holders: list[RingHolder], home: LinkSpeed, own_tokens: int, at: int
) -> None:
    base = token_ms(shape, holders, home, own_tokens, 1e-3)
    at %= len(holders)
    one = holders[at]
    slow = LinkSpeed(one.link.bytes_per_ms / 2, one.link.latency_ms)
    far = LinkSpeed(one.link.bytes_per_ms, one.link.latency_ms + 0.1)
    for changed in (
        one._replace(tokens=one.tokens + 1024),
        one._replace(kv_token_ms=2 * one.kv_token_ms),
        one._replace(wait_ms=one.wait_ms + 0.1),
        one._replace(link=slow),
        one._replace(link=far),
    ):
        route = [*holders[:at], changed, *holders[at + 1 :]]
        assert token_ms(shape, route, home, own_tokens, 1e-3) >= base
    assert token_ms(shape, holders, home, own_tokens + 1024, 1e-3) >= base
