"""Failed seals: what the session loses and keeps, and which turns still wait for a slot."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from kv_store.layout import PAGE_TOKENS
from tests.kv import scene as lane_scene
from tests.kv.scene import Scene
from tests.simulation.stage import Stage, play, words
from tests.support import kv_scene
from tests.support.kv_workload import LAYOUT

tmp_path, scene = kv_scene.tmp_path, lane_scene.scene


def test_rows_of_a_page_that_must_not_be_published_are_computed_again(scene: Scene) -> None:
    """Its parent was not readable in the store: the seal did not fail for lack of room."""
    pages, session = scene.pages, scene.session
    scene.fill(0)
    scene.published(0)
    (first,) = scene.frame()
    scene.fill(1)
    pages.sealing.verified(first, False)
    lost = scene.store.events.drain()
    assert lost == session.kv.keys[:1]
    pages.disputes.invalidate_descendants(lost)
    assert not pages.invalidation.fall_back(session, only_sealed=False)
    scene.until(lambda: not pages.sealing.in_flight)
    assert [seal.index for seal in pages.sealing.stalled] == [0], "sound where it is"
    assert session.frontier == PAGE_TOKENS
    assert pages.slots.take_changed() == [session]
    scene.fill(1)
    scene.fill(2)
    pages.sealing.retry()
    scene.published(0, 1, 2)
    scene.swap()
    assert len(session.kv.sealed) == 3
    assert not session.kv.open
    assert not pages.slots.seals


def test_a_page_invalidated_after_publishing_does_not_replace_open_rows(scene: Scene) -> None:
    pages, session = scene.pages, scene.session
    scene.fill(0)
    scene.published(0)
    (seal,) = scene.frame()
    assert seal.ref is not None
    scene.store.pages.invalidate(seal.ref)
    pages.sealing.verified(seal, True)
    assert not session.kv.sealed
    assert session.frontier == 0
    scene.fill(0)
    scene.published(0)
    scene.swap()
    assert len(session.kv.sealed) == 1


def test_a_seal_dropped_between_its_publishing_and_its_proof_is_not_published(scene: Scene) -> None:
    pages, session = scene.pages, scene.session
    scene.fill(0)
    scene.fill(1)
    scene.published(0, 1)
    first, second = sorted(pages.sealing.read_back.queued, key=lambda seal: seal.index)
    pages.disputes.invalidate_descendants(session.kv.keys[:1])
    assert second.dropped
    assert second.ref is not None
    assert not first.dropped
    scene.swap()
    assert len(session.kv.sealed) == 1
    assert session.frontier == PAGE_TOKENS
    assert not scene.store.pages.is_resident(second.ref)


def test_a_loss_reaches_pages_of_this_run_behind_pages_of_an_earlier_one(scene: Scene) -> None:
    """A page whose rows were all imported names no lane of this run; its descendants do."""
    scene.seal(4)
    store, session = scene.store, scene.session
    for n, ref in enumerate(session.kv.sealed):
        store.pages.index.get(ref).lanes = frozenset({"cpu"} if n != 2 else ())
    store.pages.invalidate(session.kv.sealed[1])
    scene.pages.disputes.invalidate_descendants(session.kv.keys[1:2])
    resident = [store.pages.is_resident(ref) for ref in session.kv.sealed]
    assert resident == [True, False, True, False]


def test_a_retried_seal_is_not_waited_for(scene: Scene) -> None:
    """A turn that waits for its slot would wait for ever: the seal fails again, once a second."""
    pages = scene.pages
    scene.disk.refuses = True
    scene.fill(0)
    assert pages.is_sealing
    scene.until(lambda: bool(pages.sealing.stalled))
    for _ in range(3):
        assert not pages.is_sealing
        pages.sealing.retry()
        pages.sealing.start_seals()
        assert pages.sealing.in_flight
        assert not pages.is_sealing
        scene.until(lambda: bool(pages.sealing.stalled))
    scene.disk.refuses = False
    scene.fill(1)
    assert pages.is_sealing, "a first attempt does"
    pages.sealing.retry()
    scene.published(0, 1)
    scene.swap()
    assert len(scene.session.kv.sealed) == 2


def test_pages_that_were_sealed_too_early_make_room_for_the_one_before(tmp_path: Path) -> None:
    """The session itself pins all that the store has room for, and its table has nothing of it."""
    scene = Scene(tmp_path, budget_bytes=3 * LAYOUT.page_bytes, extent_bytes=LAYOUT.page_bytes)
    pages, session = scene.pages, scene.session
    scene.disk.refuses = True
    scene.fill(0)
    scene.until(lambda: bool(pages.sealing.stalled))
    scene.disk.refuses = False
    for index in (1, 2, 3):
        scene.fill(index)
        scene.published(*range(1, index + 1))
    assert not scene.frame()
    pages.sealing.retry()
    scene.published(0, 1, 2)
    scene.swap()
    assert len(session.kv.sealed) == 3
    assert [seal.index for seal in pages.sealing.queued] == [3]
    assert session.frontier == 4 * PAGE_TOKENS, "its rows are in the arena"
    session.check()
    pages.close()
    scene.store.close()


def test_a_turn_that_is_alone_is_refused_for_lack_of_room() -> None:
    """Pages cannot be written, and each of them is tried again every second."""

    async def script(stage: Stage) -> None:
        good, files = stage.now.files.pwrite, stage.now.files

        def refuse(fd: int, data: memoryview, offset: int) -> int:
            if len(data) >= LAYOUT.page_bytes // 2:
                raise OSError(errno.EROFS, "read-only")
            return good(fd, data, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "pwrite", refuse)
            asked = stage.ask(words(60, 1500), 5)
            answer = await asyncio.wait_for(stage.read(asked), 60)
        assert answer.error == "kv_full"
        await stage.answer(words(61, 600), 5)

    play(script, slots=4, limits__canary_s=0)
