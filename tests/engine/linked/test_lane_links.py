"""The table of a data link's states under a simulated clock."""

from __future__ import annotations

import random
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from batchengine.engine.linked.data_link import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    DEADLINES_S,
    EXPECTED_S,
    OPENING_S,
    PROVEN_S,
    TABLE,
    DataEffect,
    DataEvent,
    DataLinkMachine,
    DataState,
)

S, E, F = DataState, DataEvent, DataEffect
TICK_S = 0.1
WITH_WORKER = (S.OPENING, S.UP)  # the worker has the connection
UNDER_WAY = (S.ASKING, S.EXPECTED)  # this side asks, or expects a connection


def machine(*, dials: bool = True) -> DataLinkMachine:
    return DataLinkMachine(dials=dials, rng=random.Random(1), now=0.0)


def test_every_state_can_be_reached_and_left() -> None:
    assert {before for before, _ in TABLE} == {after for after, _ in TABLE.values()} == set(S)
    for state in set(S) - {S.OFF}:
        assert TABLE[state, E.DISABLED][0] is S.OFF


def test_what_a_state_has_ends_with_it() -> None:
    """The worker closes each link that is left; what is under way is given up, unless it ended."""
    for (before, event), (after, effects) in TABLE.items():
        assert (F.CLOSE in effects) == (before in WITH_WORKER and after is not S.UP)
        is_left = before in UNDER_WAY and after in (S.OFF, S.DOWN)
        assert (F.STOP in effects) == (is_left and (before, event) != (S.ASKING, E.LOST))
        assert (F.ASK in effects) == (after is S.ASKING)


def test_the_side_that_dials_tries_again_with_longer_pauses() -> None:
    one, now = machine(), 0.0
    one.on(E.ENABLED, now)
    tries: list[float] = []
    while now < 20.0:
        due = one.tick(now)
        if due == (E.RETRY, ""):
            tries.append(now)
            assert one.on(E.RETRY, now) == (F.ASK,)
            assert one.on(E.LOST, now, "it refuses") == ()
            assert (one.state, one.why) == (S.DOWN, "it refuses")
        now += 0.01
    gaps = [after - before for before, after in pairwise(tries)]
    assert tries[0] == 0.0
    assert gaps[0] <= BACKOFF_MIN_S + 0.02
    assert all(BACKOFF_MAX_S / 2 <= gap <= BACKOFF_MAX_S + 0.02 for gap in gaps[6:])


def test_a_peer_that_is_ready_is_asked_at_once() -> None:
    for has_answer in (False, True):
        one = machine()
        one.on(E.ENABLED, 0.0)
        for now in range(8):
            one.on(E.RETRY, float(now))
            one.on(E.LOST, float(now), "its worker starts")
        one.on(E.RETRY, 10.0)
        if has_answer:
            one.on(E.LOST, 10.0, "its worker starts")
        one.hasten(10.0)  # before its answer or after it
        one.on(E.LOST, 10.0, "its worker starts")
        assert one.tick(10.0 + BACKOFF_MIN_S) == (E.RETRY, "")


def test_the_other_side_waits_to_be_asked() -> None:
    one = machine(dials=False)
    one.on(E.ENABLED, 0.0)
    assert one.tick(100.0) is None
    one.on(E.ASKED, 100.0)
    assert one.state is S.EXPECTED
    one.on(E.ASKED, 104.0)  # a new token, a new deadline
    assert one.tick(104.0 + EXPECTED_S - TICK_S) is None
    due = one.tick(104.0 + EXPECTED_S)
    assert due is not None
    assert one.on(due[0], 110.0, due[1]) == (F.STOP,)
    assert (one.state, one.why) == (S.DOWN, "the peer did not connect within 6 s")


def test_a_worker_that_says_nothing_is_not_waited_for() -> None:
    one = machine()
    for event in (E.ENABLED, E.RETRY, E.GIVEN):
        one.on(event, 0.0)
    due = one.tick(OPENING_S)
    assert due == (E.LOST, "no handshake within 10 s")
    assert one.on(*due[:1], OPENING_S, due[1]) == (F.CLOSE,)


def test_only_a_link_that_was_up_for_a_while_is_tried_at_once() -> None:
    for up_s, expected in ((0.0, BACKOFF_MAX_S / 2), (PROVEN_S, BACKOFF_MIN_S)):
        one, now = machine(), 0.0
        one.on(E.ENABLED, now)
        for _ in range(8):
            now += BACKOFF_MAX_S
            for event in (E.RETRY, E.GIVEN, E.OPENED):
                one.on(event, now)
            assert (one.state, one.why) == (S.UP, "")
            now += up_s
            one.on(E.LOST, now, "the peer closed it")
        assert (one.tick(now + expected - 0.01) is None) == (up_s == 0.0)


@given(st.lists(st.sampled_from(list(product(E, (0.0, 0.3, 7.0)))), max_size=40), st.booleans())
def test_random_events_keep_what_a_state_means(
    events: list[tuple[DataEvent, float]], dials: bool
) -> None:
    one, now, is_enabled = machine(dials=dials), 0.0, False
    for event, wait_s in events:
        now += wait_s
        for _ in range(3):
            if (due := one.tick(now)) is not None:
                one.on(due[0], now, due[1])
        deadline_s = DEADLINES_S.get(one.state)
        assert deadline_s is None or now - one.since < deadline_s
        if event in (E.ENABLED, E.DISABLED):
            is_enabled = event is E.ENABLED
        one.on(event, now, "a reason" if event in (E.DISABLED, E.LOST) else "")
        assert (one.state is S.OFF) == (not is_enabled)
        assert bool(one.why) == (one.state is not S.UP)
