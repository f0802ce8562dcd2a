"""Routes: ranges stay contiguous, budgets are kept, and pages do not go to and fro."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.core import SUPERPAGE_PAGES
from batchengine.policy.linked.routes import (
    HERE,
    GrowthPolicy,
    PageMove,
    PeerRoom,
    RouteView,
    SlowPeers,
    fair_share,
    plan_route,
)

POLICY = GrowthPolicy()


def room(name: str, free: int, **other: object) -> PeerRoom:
    return PeerRoom(name, free, **other)  # type: ignore[arg-type]


def view(
    local: int, share: int, *peers: PeerRoom, ranges: tuple[tuple[str, int], ...] = ()
) -> RouteView:
    return RouteView(ranges, local, local, share, peers)


def test_a_session_within_its_share_stays_where_it_is() -> None:
    assert plan_route(view(32, 32, room("a", 100))) == ()
    assert plan_route(view(17, 32, room("a", 100), ranges=(("a", 8),))) == ()


def test_the_oldest_pages_go_to_the_peer_with_most_room_then_fewest_hops() -> None:
    peers = room("far", 40, hops=2.0), room("near", 42, hops=1.0), room("small", 12)
    assert plan_route(view(33, 32, *peers)) == (PageMove(HERE, "near", 0, 12),)
    assert plan_route(view(33, 32, room("far", 43, hops=2.0), room("near", 41))) == (
        PageMove(HERE, "near", 0, 12),  # as many super-pages fit both
    )


def test_the_last_holder_is_filled_first_and_the_rest_goes_on() -> None:
    found = plan_route(view(40, 32, room("a", 9), room("b", 90), ranges=(("b", 4), ("a", 8))))
    assert found == (PageMove(HERE, "a", 12, 8), PageMove(HERE, "b", 20, 8))


def test_what_may_not_get_pages_gets_none() -> None:
    peers = room("down", 90, usable=False), room("leaving", 90, leaves=True), room("full", 3)
    assert plan_route(view(40, 32, *peers)) == ()
    assert plan_route(RouteView((), 7, 7, 4, (room("a", 90),))) == ()  # the tail stays
    open_after = plan_route(RouteView((), 15, 7, 8, (room("a", 90),)))
    assert open_after == (PageMove(HERE, "a", 0, 4),), "open pages are the tail"


def test_a_slow_peer_gets_pages_only_when_no_other_has_room() -> None:
    slow = room("slow", 90, slow=True)
    assert plan_route(view(40, 32, slow, room("b", 8))) == (
        PageMove(HERE, "b", 0, 8),
        PageMove(HERE, "slow", 8, 8),
    )
    last = room("b", 90), slow
    assert plan_route(view(40, 32, *last, ranges=(("slow", 8),))) == (PageMove("slow", "b", 0, 8),)
    others_are_slow = slow, room("b", 90, slow=True)
    assert plan_route(view(24, 32, *others_are_slow, ranges=(("slow", 8),))) == ()
    assert plan_route(view(12, 32, *others_are_slow, ranges=(("slow", 8), ("b", 8)))) == (
        PageMove("b", HERE, 8, 8),
    )


def test_a_holder_that_needs_room_gives_the_end_of_its_range_to_the_next() -> None:
    ranges = ("a", 16), ("b", 8)
    assert plan_route(view(30, 32, room("a", -5), room("b", 20), ranges=ranges)) == (
        PageMove("a", "b", 8, 8),
    )
    assert plan_route(view(30, 32, room("a", 5), room("b", -1), room("c", 9), ranges=ranges)) == (
        PageMove("b", "c", 20, 4),
    )
    assert plan_route(view(20, 32, room("a", 5), room("b", -1), ranges=ranges)) == (
        PageMove("b", HERE, 20, 4),
    )
    leaving = room("a", 5, leaves=True)
    found = plan_route(view(30, 32, leaving, room("b", 8), room("c", 9), ranges=ranges))
    assert found == (PageMove("a", "b", 8, 8), PageMove("a", "c", 0, 8))


def test_a_peer_is_slow_after_some_time_and_each_time_avoided_for_longer() -> None:
    slow, layers = SlowPeers(), 4

    def looks(first: float, waited_ms: float, seconds: float = 2.0) -> list[str]:
        times = [first + 0.25 * n for n in range(int(seconds * 4))]
        found = [slow.look("b", waited_ms, 20.0, layers, now) for now in times]
        return [why for why in found if why]

    assert not looks(0.0, 79.0), "below four times the prediction"
    assert not looks(10.0, 500.0, 1.0), "for too short a time"
    assert not looks(20.0, 10.0)
    assert not looks(22.0, 500.0, 1.0)
    assert looks(30.0, 500.0) == ["steps wait 500 ms for it, 20.0 ms was predicted"]
    assert slow.why("b", 40.0)
    assert not slow.why("b", 62.0)
    assert not slow.why("c", 40.0)
    assert looks(70.0, 500.0)
    assert slow.why("b", 130.0), "the second time for twice as long"
    assert not slow.why("b", 132.0)
    assert not slow.look("d", 39.0, 0.0, layers, 0.0)
    assert not slow.look("d", 39.0, 0.0, layers, 9.0), "so short a wait is no reason"


def test_pages_come_back_when_there_is_room() -> None:
    ranges = ("a", 8), ("b", 8)
    assert plan_route(view(16, 32, room("a", 0), room("b", 0), ranges=ranges)) == (
        PageMove("b", HERE, 8, 8),
    )
    assert plan_route(view(17, 32, room("a", 0), room("b", 0), ranges=ranges)) == ()


def test_a_range_joins_the_one_before_it_if_that_leaves_room() -> None:
    ranges = ("a", 8), ("b", 8)
    full, roomy = room("a", 23), room("a", 24)
    assert plan_route(view(30, 32, full, room("b", 0), ranges=ranges)) == ()
    assert plan_route(view(30, 32, roomy, room("b", 0), ranges=ranges)) == (
        PageMove("b", "a", 8, 8),
    )


@pytest.mark.parametrize(
    ("pages", "wanted", "share"),
    [(100, [10, 200, 300], 45), (90, [50, 50, 50], 30), (90, [1, 2], 89), (0, [5], 0), (9, [], 9)],
)
def test_a_fair_share(pages: int, wanted: list[int], share: int) -> None:
    assert fair_share(pages, wanted) == share


# -- simulation -----------------------------------------------------------------------------------


class Daemon:
    """Sessions of one daemon and its peers: where every page lies, and how often it moved."""

    def __init__(self, pool: int, budgets: dict[str, int]) -> None:
        self.pool = pool
        self.budgets = budgets
        self.leaving: set[str] = set()
        self.slow: set[str] = set()
        self.sessions: dict[int, list[str]] = {}  # page -> where, oldest first
        self.moved: Counter[tuple[int, int]] = Counter()
        self.pushes: Counter[tuple[int, int]] = Counter()

    def held(self, name: str) -> int:
        return sum(where.count(name) for where in self.sessions.values())

    def view(self, key: int) -> RouteView:
        where = self.sessions[key]
        ranges: list[tuple[str, int]] = []
        for name in where:
            if name == HERE:
                break
            if ranges and ranges[-1][0] == name:
                ranges[-1] = name, ranges[-1][1] + 1
            else:
                ranges.append((name, 1))
        n_held = sum(pages for _, pages in ranges)
        assert HERE not in where[:n_held]
        assert all(name == HERE for name in where[n_held:]), where
        assert all(pages % SUPERPAGE_PAGES == 0 for _, pages in ranges)
        local = len(where) - n_held
        share = fair_share(self.pool, [len(where) for where in self.sessions.values()])
        peers = tuple(
            PeerRoom(
                name,
                budget - self.held(name),
                float(len(name)),
                True,
                name in self.leaving,
                name in self.slow,
            )
            for name, budget in self.budgets.items()
        )
        return RouteView(tuple(ranges), local, max(0, local - 1), share, peers)

    def settle(self, rounds: int = 60) -> int:
        """Apply plans until there are none; returns the number of pages that were moved."""
        total = 0
        for _ in range(rounds):
            planned = 0
            for key in self.sessions:
                for move in plan_route(self.view(key)):
                    self.apply(key, move)
                    planned += move.n_pages
            total += planned
            if not planned:
                return total
        raise AssertionError("the plan does not come to rest")

    def apply(self, key: int, move: PageMove) -> None:
        where = self.sessions[key]
        pages = range(move.first, move.first + move.n_pages)
        assert move.n_pages > 0
        assert move.n_pages % SUPERPAGE_PAGES == 0
        assert {where[page] for page in pages} == {move.source} != {move.target}
        for page in pages:
            where[page] = move.target
            self.moved[key, page] += 1
            self.pushes[key, page] += move.source == HERE
        if move.target != HERE:
            assert self.held(move.target) <= self.budgets[move.target]
            assert move.target not in self.leaving
        self.view(key)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30))
def test_a_page_that_only_ages_is_pushed_once(seed: int) -> None:
    """Sessions grow, one page at a time; pages move to a peer once, and never back."""
    tape = random.Random(seed)
    daemon = Daemon(tape.randint(16, 64), {"a": tape.randint(0, 80), "bb": tape.randint(0, 80)})
    for key in range(tape.randint(1, 4)):
        daemon.sessions[key] = []
    room_everywhere = daemon.pool + sum(daemon.budgets.values())
    for _ in range(tape.randint(10, room_everywhere)):
        daemon.sessions[tape.choice(list(daemon.sessions))].append(HERE)
        daemon.settle()
    assert not daemon.pushes or max(daemon.pushes.values()) == 1
    for key, where in daemon.sessions.items():
        excess = where.count(HERE) - daemon.view(key).share_pages
        free = [b - daemon.held(n) for n, b in daemon.budgets.items()]
        spared = POLICY.tail_pages + SUPERPAGE_PAGES + 1
        assert excess <= 0 or max(free) < SUPERPAGE_PAGES or where.count(HERE) <= spared


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30))
def test_routes_follow_budgets_that_change_and_come_to_rest(seed: int) -> None:
    tape = random.Random(seed)
    daemon = Daemon(tape.randint(16, 96), {name: tape.randint(0, 96) for name in "abcd"})
    for key in range(tape.randint(1, 5)):
        daemon.sessions[key] = [HERE] * tape.randint(1, 60)
    daemon.settle()
    for _ in range(25):
        act = tape.choice(["grow", "grow", "end", "budget", "leave", "come", "slow", "pool"])
        name = tape.choice("abcd")
        if act == "grow" and daemon.sessions:
            daemon.sessions[tape.choice(list(daemon.sessions))] += [HERE] * tape.randint(1, 12)
        elif act == "end" and len(daemon.sessions) > 1:
            daemon.sessions.pop(tape.choice(list(daemon.sessions)))
        elif act == "budget":
            daemon.budgets[name] = tape.randint(0, 96)
        elif act == "leave":
            daemon.leaving.add(name)
        elif act == "come":
            daemon.leaving.discard(name)
            daemon.slow.discard(name)
        elif act == "slow":
            daemon.slow.add(name)
        elif act == "pool":
            daemon.pool = tape.randint(16, 96)
        daemon.settle()
        assert daemon.settle(1) == 0  # at rest


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1 << 30))
def test_a_share_that_wavers_inside_the_band_moves_nothing(seed: int) -> None:
    tape = random.Random(seed)
    daemon = Daemon(64, {"a": 200, "bb": 200})
    daemon.sessions[0] = [HERE] * 120
    daemon.settle()
    local = daemon.sessions[0].count(HERE)
    for _ in range(50):
        daemon.pool = tape.randint(local, 2 * local - 1)
        assert daemon.settle() == 0
