"""Loss of a holder: exactly its range is computed again, and the tokens are those of HashLM."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from batchengine.engine.lane import seats
from batchengine.session import Loss, Session
from batchengine.session_kv import SELF, page_start
from batchengine.wire import lane as wire
from batchengine.wire.frames import Payload
from bench.models.hashlm import hashlm_tokens
from tests.engine.linked import scene as linked_scene
from tests.engine.linked.scene import SUPERPAGE, VOCAB, Scene
from tests.support import kv_scene
from tests.support.kv_workload import scratch

tmp_path = kv_scene.tmp_path


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    yield from linked_scene.fixture(tmp_path)


def prompt(n_tokens: int, name: int = 0) -> list[int]:
    return [20 + (name * 7919 + i * 31) % (VOCAB - 20) for i in range(n_tokens)]


PROMPT = prompt(page_start(21) + 77)


def expected(ids: list[int], n: int) -> list[int]:
    return hashlm_tokens(ids, n, vocab=VOCAB)


def routed(scene: Scene, *route: str) -> tuple[list[int], Session]:
    """A session that has answered once, whose oldest super-pages lie with these peers."""
    session = scene.session(1)
    said = scene.say(session, PROMPT, 3)
    assert said == expected(PROMPT, 3)
    scene.settle()
    for name in route:
        scene.push(session, name)
    session.check()
    scene.sent.clear()
    return [*PROMPT, *said, 99], session


def test_tokens_of_a_route_are_those_of_one_daemon(scene: Scene) -> None:
    ids, session = routed(scene, "north", "south", "north")
    assert session.kv.n_held == 12
    before = scene.store.stat()["pages_pinned"]
    assert before == len(session.kv.sealed) == 9
    assert scene.say(session, ids, 40) == expected(ids, 40)
    assert scene.computed(session)[0][0] >= len(PROMPT)  # nothing again


def test_pages_after_a_lost_range_are_taken_again_only_with_their_state(tmp_path: Path) -> None:
    """The state that the session has then is the one before these pages."""
    scene = Scene(tmp_path, state_bytes=4096)
    ids, session = routed(scene, "north", "south", "south")
    scene.lose("north")
    assert session.kv.later
    said = scene.say(session, ids, 40)
    scene.close()
    assert said == expected(ids, 40)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_only_the_lost_range_is_computed_again(scene: Scene, lost: int) -> None:
    route = ["south", "south", "south"]
    route[lost] = "north"
    ids, session = routed(scene, *route)
    later = session.kv.sealed[:]
    scene.lose("north")
    assert session.loss is Loss.PEER
    assert session.frontier == page_start(lost * SUPERPAGE)
    assert scene.store.stat()["pages_pinned"] == len(later)
    assert scene.say(session, ids, 5) == expected(ids, 5)
    again, rest = scene.computed(session)
    assert again == (page_start(lost * SUPERPAGE), page_start((lost + 1) * SUPERPAGE))
    assert rest[0] >= page_start(21)
    assert session.kv.sealed[-len(later) :] == later
    route[lost] = SELF
    assert [segment.peer for segment in session.kv.held] == (route[:2] if lost == 2 else route)
    scene.kv.slots.protect(session)
    scene.kv.slots.clear(session)
    scene.settle()
    assert scene.store.stat()["pages_pinned"] == 0


def test_pages_that_are_still_in_the_store_are_not_computed_again(scene: Scene) -> None:
    session, other = scene.session(1), scene.session(2)
    said = scene.say(session, PROMPT, 3)
    scene.settle()
    scene.say(other, PROMPT, 3)  # pins the same pages
    scene.push(session, "north", 2)
    scene.lose("north")
    scene.sent.clear()
    ids = [*PROMPT, *said, 98]
    assert scene.say(session, ids, 4) == expected(ids, 4)
    assert scene.computed(session)[0][0] >= page_start(21)
    assert not session.kv.n_held


def test_a_peer_that_does_not_answer_costs_no_token(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, session = routed(scene, "north", "south")
    turn = scene.begin(session, ids, 12)
    scene.run(turn, until=lambda: turn.generation.completion_tokens == 4)
    scene.peers.peers["south"].answers = False
    now_ms = scene.seats.now_ms()
    with monkeypatch.context() as patched:  # before CUT_OFF_MS
        patched.setattr(seats.Seats, "now_ms", lambda _: now_ms)
        for _ in range(20):
            scene.step()
    assert turn.generation.completion_tokens == 4
    assert scene.unreachable == 1  # it is not asked again and again
    assert session.kv.cut_off
    scene.peers.peers["south"].answers = True
    scene.run(turn)  # after CUT_OFF_MS
    assert session.tokens[len(ids) :] == expected(ids, 12)
    assert scene.computed(session)[0][0] >= page_start(21)


def test_a_peer_that_is_lost_during_a_step_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, session = routed(scene, "north")
    turn = scene.begin(session, ids, 12)
    scene.run(turn, until=lambda: turn.generation.completion_tokens == 4)
    scene.peers.peers["north"].answers = False
    compute, now_ms = scene.worker._step, scene.seats.now_ms()

    def lost(number: int, step: wire.Step, payload: Payload) -> wire.StepDone:
        done = compute(number, step, payload)
        assert isinstance(done, wire.StepDone)
        if scene.unreachable == 0 and done.unreachable:
            scene.lose("north")
        return done

    monkeypatch.setattr(scene.worker, "_step", lost)
    monkeypatch.setattr(seats.Seats, "now_ms", lambda _: now_ms)  # CUT_OFF_MS never passes
    scene.run(turn)
    assert scene.unreachable == 1
    assert session.tokens[len(ids) :] == expected(ids, 12)


def test_a_session_that_is_cut_waits_for_no_peer(scene: Scene) -> None:
    ids, session = routed(scene, "north")
    turn = scene.begin(session, ids, 12)
    scene.peers.peers["north"].answers = False
    scene.run(turn, until=lambda: session.kv.cut_off)
    scene.kv.slots.protect(session)
    scene.kv.slots.truncate(session, 0)
    assert not session.kv.cut_off


def test_other_sessions_of_a_step_do_not_notice(scene: Scene) -> None:
    ids, session = routed(scene, "north")
    other_ids = prompt(700, 3)
    other = scene.begin(scene.session(2), other_ids, 30)
    turn = scene.begin(session, ids, 80)
    both = turn.generation, other.generation
    scene.run(turn, other, until=lambda: min(one.completion_tokens for one in both) >= 3)
    assert turn.generation.completion_tokens < 80
    scene.peers.peers["north"].answers = False
    made = other.generation.completion_tokens
    for _ in range(10):
        scene.step()
    assert other.generation.completion_tokens >= made + 9
    scene.lose("north")  # it is down at last
    scene.run(turn, other)
    assert session.tokens[len(ids) :] == expected(ids, 80)
    assert other.session.tokens[700:] == expected(other_ids, 30)


def test_a_second_loss_during_the_recompute(scene: Scene) -> None:
    ids, session = routed(scene, "south", "north", "south", "north")
    turn = scene.begin(session, ids, 6)
    scene.lose("north")
    assert [later.first for later in session.kv.later] == [8]
    scene.run(turn, until=lambda: session.frontier > page_start(5))
    scene.lose("south")
    assert session.frontier == 0
    scene.run(turn)
    assert session.tokens[len(ids) :] == expected(ids, 6)
    session.check()
    assert not session.kv.later


def test_a_timeline_that_changes_during_a_recompute(scene: Scene) -> None:
    ids, session = routed(scene, "north", "south")
    scene.lose("north")
    kept = page_start(6) + 11  # inside the pages that south holds
    edited = [*ids[:kept], *prompt(900, 5)]
    assert scene.say(session, edited, 5) == expected(edited, 5)
    assert scene.peers.peers["south"].pages.keys() == {
        (s.hold, s.first + i)
        for s in session.kv.held
        if s.peer == "south"
        for i in range(s.n_pages)
    }
    again = [*ids[: page_start(3) + 5], *prompt(300, 6)]
    assert scene.say(session, again, 5) == expected(again, 5)
    assert not scene.peers.peers["south"].pages


def test_without_room_to_seal_the_rest_is_computed_instead_of_waiting(scene: Scene) -> None:
    ids, session = routed(scene, "north")
    scene.lose("north")
    turn = scene.begin(session, ids, 4)
    scene.disk.refuses = True
    scene.run(turn, until=lambda: not session.kv.later)
    scene.disk.refuses = False
    scene.run(turn)
    assert session.tokens[len(ids) :] == expected(ids, 4)


def test_invalid_pages_of_a_peer_are_dropped_with_what_follows(scene: Scene) -> None:
    ids, session = routed(scene, "north", "south")
    scene.kv.disputes.invalidate([session.kv.keys[5]])
    assert session.kv.invalid_from == 5
    assert scene.say(session, ids, 5) == expected(ids, 5)
    assert [s.n_pages for s in session.kv.held] == [4]
    assert scene.computed(session)[0][0] == page_start(4)


def test_a_recomputed_page_is_compared_with_what_a_peer_was_given(scene: Scene) -> None:
    ids, session = routed(scene, "north", "south")
    key = session.kv.keys[2]
    assert session.kv.digests[key] != bytes(16)
    session.kv.digests[key] = bytes(16)
    scene.lose("north")
    scene.run(scene.begin(session, ids, 2), until=lambda: bool(scene.kv.disputes.disputed))
    assert [seal.index for seal in scene.kv.disputes.disputed] == [2]
    assert scene.store.pages.find(key) is None
    scene.kv.invalidation.drop_open()  # as the audit begins
    scene.kv.disputes.disputed.clear()
    scene.run(*scene.seats.turns)
    assert session.tokens[len(ids) :] == expected(ids, 2)


def test_a_link_that_comes_back_under_another_number(scene: Scene) -> None:
    ids, session = routed(scene, "north", "south")
    scene.peers.peers["north"].link = 9
    assert not scene.kv.invalidation.fall_back(session, only_sealed=False)
    assert {code >> 32 & 0xFF for code in session.kv.codes[:4]} == {9}
    assert scene.say(session, ids, 4) == expected(ids, 4)
    scene.peers.peers["south"].link = None  # this lane has none
    assert scene.kv.invalidation.fall_back(session, only_sealed=False)
    assert session.frontier == page_start(4)
    ids = [*session.tokens, 77]
    assert scene.say(session, ids, 4) == expected(ids, 4)


def test_a_session_that_leaves_its_lane_or_is_evicted_keeps_what_peers_hold(scene: Scene) -> None:
    ids, session = routed(scene, "north", "south")
    scene.kv.slots.keep_held(session)  # as parking does
    assert (session.kv.first_open, session.frontier) == (8, page_start(8))
    assert scene.store.stat()["pages_pinned"] == 0
    assert scene.say(session, ids, 4) == expected(ids, 4)
    assert scene.computed(session)[0][0] >= page_start(21)  # the others are found by content
    left = scene.kv.slots.detach(session)
    scene.kv.slots.release(left)
    session.frontier = session.kv.reach()  # a migration without the open rows
    scene.kv.slots.enter(session)  # of a lane with the same links
    ids = [*session.tokens, 78]
    assert scene.say(session, ids, 4) == expected(ids, 4)
    assert session.kv.n_held == 8


def test_closing_a_session_releases_everything(scene: Scene) -> None:
    _, session = routed(scene, "north", "south", "north")
    scene.lose("south")
    scene.kv.slots.protect(session)
    scene.kv.slots.clear(session)
    session.check()
    assert not any(peer.pages for peer in scene.peers.peers.values())
    assert scene.store.stat()["pages_pinned"] == 0


@hypothesis_settings(deadline=None, max_examples=hypothesis_settings().max_examples // 4)
@given(st.integers(0, 2**32 - 1))
def test_tokens_never_change(seed: int) -> None:
    """Random routes, losses, silences and turns; every token is that of an undisturbed run.

    A seed is drawn instead of each choice: how many steps a turn takes depends on threads.
    """
    rng = random.Random(seed)
    for folder in scratch():
        scene = Scene(folder)
        session = scene.session(1)
        ids = prompt(rng.choice([page_start(17) + 5, page_start(9), 700]))
        for _ in range(rng.randint(1, 3)):
            n = rng.randint(1, 8)
            turn = scene.begin(session, ids, n)
            while scene.seats.holds(turn):
                act = rng.choice(["step"] * 5 + ["push", "lose", "silence", "back"])
                name = rng.choice(["north", "south"])
                if act == "push" and len(session.kv.sealed) >= SUPERPAGE:
                    scene.push(session, name, new=rng.random() < 0.5)
                elif act == "lose":
                    scene.lose(name)
                elif act == "silence":
                    scene.peers.peers[name].answers = False
                elif act == "back":
                    for peer in scene.peers.peers.values():
                        peer.answers = True
                    scene.kv.invalidation.fall_back(session, only_sealed=False)
                else:
                    scene.run(turn, until=iter([False, False, True]).__next__)
                session.check()
                if not all(peer.answers for peer in scene.peers.peers.values()):
                    for peer in scene.peers.peers.values():
                        peer.answers = True
            assert session.tokens[len(ids) :] == expected(ids, n)
            keep = rng.randint(1, len(session.tokens))
            ids = [*session.tokens[:keep], *prompt(rng.randint(1, 600), keep)]
        scene.kv.slots.protect(session)
        scene.kv.slots.clear(session)
        scene.settle()
        assert not any(peer.pages for peer in scene.peers.peers.values())
        assert scene.store.stat()["pages_pinned"] == 0
        assert scene.arena.n_free == 24
        scene.close()
