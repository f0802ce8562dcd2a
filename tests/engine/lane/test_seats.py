"""Turns that wait while none computes: who makes way for the first, and how the wait ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchengine.core import SlaClass
from batchengine.engine.lane import seats
from batchengine.engine.lane.tenants import Tenants
from batchengine.policy.rows import RANK
from batchengine.session_kv import page_start
from tests.engine.linked.scene import Scene
from tests.simulation.stage import words
from tests.support import kv_scene

tmp_path = kv_scene.tmp_path


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(seats, "STALL_S", 0.0)
    made = Scene(tmp_path)
    yield made
    made.close()


def test_a_turn_that_waits_gives_its_pages_with_peers_up(scene: Scene) -> None:
    """They are all that peers have room for, and the first turn has no room without them."""
    prompt, other = words(1, 2500), words(2, 3000)
    scene.say(away := scene.session(1), prompt, 2)
    scene.settle()
    scene.push(away, "north", 2)
    scene.seats.pages_budget, scene.seats.pages_beyond = 10, 8
    first = scene.begin(scene.session(2), other, 2)
    second = scene.begin(away, [*prompt, 5], 2)
    first.deadline_ms, second.deadline_ms = 1.0, 2.0
    before = len(scene.sent)
    while scene.step():
        pass
    assert len(scene.sent) == before
    while away.kv.held:
        scene.seats.check_stall()
    assert first.end is second.end is None
    scene.seats.pages_beyond_free = 8
    scene.run(first, second)
    assert away.tokens[: len(prompt)] == prompt


def test_a_turn_is_refused_for_good_only_if_peers_could_never_have_room(scene: Scene) -> None:
    scene.seats.pages_budget, scene.seats.pages_lent, scene.seats.pages_beyond_max = 8, 6, 5
    away = scene.begin(scene.session(2), words(2, 3000), 2)
    never = scene.begin(scene.session(3), words(3, 3500), 2)
    scene.step()
    ends = [turn.end.error.name if turn.end and turn.end.error else "" for turn in (away, never)]
    assert ends == ["kv_full", "kv_too_small"]
    fits = scene.begin(scene.session(1), words(1, 1500), 2)
    assert (scene.seats.pages_needed(), scene.seats.pages_needed(9)) == (6, 6)
    assert scene.seats.pages_lacking == 4
    while scene.step():
        pass
    assert fits.end is None, "it waits for what is kept for peers"
    scene.seats.pages_lent = 0
    scene.run(fits)


def test_a_turn_that_needs_peers_lacks_what_is_kept_for_them(scene: Scene) -> None:
    """Only while peers would take the rest of it: else the pages would be given back in vain."""
    lane = scene.seats
    lane.pages_budget, lane.pages_lent, lane.pages_beyond = 8, 6, 5
    turn = scene.begin(scene.session(1), words(1, 2800), 2)  # 11 pages
    assert (lane.pages_needed(), lane.pages_lacking) == (0, -2)
    lane.pages_beyond_free, lane.pages_beyond_sure = 5, 4
    assert (lane.pages_needed(), lane.pages_needed(9), lane.pages_lacking) == (7, 7, 5)
    lane.pages_beyond_sure = -4  # they want back what they have
    assert (lane.pages_needed(), lane.pages_lacking) == (0, -2)
    lane.pages_beyond_sure = 4
    lane._refuse(turn)
    assert turn.end is not None
    assert turn.end.error is not None
    assert "6 pages of this store are kept for peers" in turn.end.error.why


def test_a_turn_that_nothing_can_help_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits alone for pages that peers do not give; its own open pages are of no use to it."""
    scene.seats.pages_budget, scene.seats.pages_beyond = 4, 20
    turn = scene.begin(scene.session(1), words(1, 3000), 2)
    assert not scene.step()
    monkeypatch.setattr(seats, "STALL_ALONE_S", 0.0)
    while turn.end is None:
        scene.seats.check_stall()
    assert turn.end.error is not None
    assert turn.end.error.name == "kv_full"
    assert not scene.seats.turns


@pytest.mark.parametrize("gets_further", [False, True])
def test_a_turn_that_is_computed_again_without_getting_further_fails(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, gets_further: bool
) -> None:
    """Each time that it finds no room, its pages are given to another turn."""
    monkeypatch.setattr(seats, "STALL_S", 1e9)
    scene.disk.refuses = True
    slots, session = scene.kv.slots, scene.session(1)
    taken = [slot for _ in range(scene.arena.n_free - 2) if (slot := slots.take()) is not None]
    turn = scene.begin(session, words(1, 5000), 2)
    stalls = 0
    while turn.end is None and stalls < seats.RELAPSES_MAX + 2:
        n_pages = scene.arena.n_free + len(session.kv.open)
        while session.frontier < page_start(n_pages) or scene.kv.is_sealing:
            scene.step()
        stalls += 1
        for _ in range(3):  # looks at the same stall
            scene.seats.check_stall()
        slots.clear(session)
        slots.changed(session)
        if gets_further:
            slots.free(taken.pop())
    assert stalls == seats.RELAPSES_MAX + 2
    if gets_further:
        assert turn.end is None
    else:
        assert turn.end is not None
        assert turn.end.error is not None
        assert turn.end.error.name == "kv_full"


@pytest.mark.parametrize("horizon_ms", [20.0, 80.0])
def test_turns_that_each_need_more_than_the_lane_has_do_not_displace_each_other_for_ever(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, horizon_ms: float
) -> None:
    """The disk is full; those that wait are overdue again and again."""
    monkeypatch.setattr(seats, "STALL_S", 0.01)
    monkeypatch.setattr(seats, "STALL_ALONE_S", 0.2)
    scene.disk.refuses = True
    n_tokens = page_start(scene.arena.n_free) + 300
    turns = [scene.begin(scene.session(n), words(n, n_tokens), 2) for n in range(1, 5)]
    for turn in turns:
        turn.horizon_ms, turn.deadline_ms = horizon_ms, scene.seats.now_ms() + horizon_ms
    until = time.monotonic() + 100.0
    while not all(turn.end for turn in turns):
        assert time.monotonic() < until
        if not scene.step() and not scene.kv.is_sealing:
            scene.seats.check_stall()
    names = [turn.end.error.name for turn in turns if turn.end and turn.end.error]
    assert names == ["kv_full"] * 4


def test_what_a_lane_computes_for_one_tenant_leaves_the_others_their_shares(scene: Scene) -> None:
    """Beside turns of its own, and of none, a tenant gets as long as the lane's steps."""
    lane = scene.seats
    lane.tenants = Tenants({"heavy": 4.0, "a": 2.0})
    assert (lane.owed_to_steps("a"), lane.have_urgent()) == (1.0, False)
    turns = []
    for key, tenant in enumerate(["a", "b", "c", "heavy"], 1):
        session = scene.session(key)
        session.tenant = tenant
        turns.append(scene.begin(session, words(key, 40), 2))
        turns[-1].rank = RANK[SlaClass.BATCH]
    found = [lane.owed_to_steps(tenant) for tenant in ("a", "b", "heavy", "d")]
    assert found == [3.0, 7.0, 1.0, 8.0]  # the weights of the others over its own
    assert not lane.have_urgent()
    turns[-1].paused = True
    assert lane.owed_to_steps("b") == 3.0
    turns[0].rank = RANK[SlaClass.STANDARD]
    assert lane.have_urgent()
    turns[0].paused = True
    assert not lane.have_urgent()
