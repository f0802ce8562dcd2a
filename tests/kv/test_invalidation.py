"""Invalid pages and rows: what a session keeps, and which sessions a lane must not cut."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from batchengine.session import Event, Loss
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.index import PageRef
from tests.kv import scene as lane_scene
from tests.kv.scene import Scene
from tests.support import kv_scene

tmp_path, scene = kv_scene.tmp_path, lane_scene.scene


def add_open(scene: Scene, rows: int) -> None:
    session = scene.session
    assert scene.pages.slots.ensure(session, session.frontier + rows)
    session.frontier += rows


def test_a_session_keeps_the_pages_before_the_first_invalid_one(scene: Scene) -> None:
    scene.seal(3)
    add_open(scene, 10)
    session, invalidation = scene.session, scene.pages.invalidation
    assert not invalidation.fall_back(session, only_sealed=False)
    scene.store.pages.invalidate(session.kv.sealed[1])
    assert invalidation.fall_back(session, only_sealed=False)
    assert (session.frontier, len(session.kv.sealed)) == (PAGE_TOKENS, 1)
    assert not session.kv.open
    assert session.loss is Loss.CHECKSUM
    assert not invalidation.fall_back(session, only_sealed=False)


def test_a_draining_lane_drops_open_rows(scene: Scene) -> None:
    scene.seal(1)
    add_open(scene, 10)
    session, invalidation = scene.session, scene.pages.invalidation
    assert invalidation.fall_back(session, only_sealed=True)
    assert (session.frontier, len(session.kv.sealed)) == (PAGE_TOKENS, 1)
    assert session.loss is None, "no page was bad"
    assert not invalidation.fall_back(session, only_sealed=True)


def test_a_frozen_session_is_not_cut(scene: Scene) -> None:
    scene.seal(1)
    add_open(scene, 10)
    session, invalidation = scene.session, scene.pages.invalidation
    session.on(Event.FREEZE)
    scene.store.pages.invalidate(session.kv.sealed[0])
    assert not invalidation.fall_back(session, only_sealed=True)
    assert invalidation.drop_open() == []
    assert session.frontier == PAGE_TOKENS + 10


def test_dropped_rows_are_not_published(scene: Scene) -> None:
    scene.seal(1)
    scene.fill(1)
    session = scene.session
    (seal,) = scene.pages.sealing.in_flight
    assert scene.pages.invalidation.drop_open() == [session]
    assert seal.dropped
    assert (session.frontier, session.kv.open) == (PAGE_TOKENS, [])
    scene.until(lambda: not scene.pages.sealing.in_flight)
    assert len(scene.store.pages.match_prefix(session.tokens, session.salt)) == 1
    assert scene.pages.invalidation.drop_open() == []


@pytest.mark.parametrize(("tokens", "kept"), [(0, 0), (300, 1), (2000, 3)])
def test_pages_of_a_turn_are_invalidated_with_their_descendants(
    scene: Scene, tokens: int, kept: int
) -> None:
    scene.seal(3)
    session, other = scene.session, scene.member(2, 800)
    assert scene.pages.prefix.extend(other, other.salt, 0) is None
    scene.pages.invalidation.invalidate_turn(session, tokens)
    assert (len(session.kv.sealed), session.frontier) == (kept, kept * PAGE_TOKENS)
    assert len(scene.store.pages.match_prefix(session.tokens, session.salt)) == kept
    assert scene.pages.invalidation.fall_back(other, only_sealed=False) is (kept < 3)
    assert len(other.kv.sealed) == kept


@pytest.mark.parametrize("moves", [False, True])
def test_pages_are_verified_again_after_a_worker_death(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """The session falls back unless it has left the lane, which then no longer owns its table."""
    scene.seal(3)
    session = scene.session
    bad = session.kv.sealed[1]

    def verify(ref: PageRef) -> Future[bool]:
        done = Future[bool]()
        done.set_result(ref != bad)
        if ref == bad and moves:
            scene.pages.slots.detach(session)
        return done

    monkeypatch.setattr(scene.store.pages, "verify", verify)
    asyncio.run(scene.pages.invalidation.recheck([session]))
    assert len(session.kv.sealed) == (3 if moves else 1)
