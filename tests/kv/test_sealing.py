"""Seals that fail: what their session loses, what it keeps, and who still waits for a slot."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchengine.kv import Disputes, LaneKv, Seal
from batchengine.session import Event, Session
from kv_store import osio
from kv_store.arenas.arena import Arena
from kv_store.keys import payload_digest
from kv_store.layout import PAGE_TOKENS
from kv_store.store import Store
from tests.simulation.stage import Stage, play, words
from tests.support import kv_scene
from tests.support.kv_workload import LAYOUT, descriptor, settings

tmp_path = kv_scene.tmp_path


class Disk(osio.Files):
    """Pages cannot be written while `refuses`: for no reason that the store knows."""

    refuses = False

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.refuses:
            raise OSError(errno.EROFS, "read-only")
        return super().pwrite(fd, data, offset)


class Scene:
    """The pages of one lane, its worker played by hand; one session that runs."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk()
        self.store = Store.open(folder / "store", descriptor(), settings(), files=self.disk)
        self.pages = LaneKv(self.store, Disputes(self.store), lambda: None, self._commit)
        self.arena: Arena = self.store.create_arena("cpu", 1, 8)
        self.pages.slots.attach(self.arena)
        self.session = Session(1, "s", "tenant")
        self.session.tokens = list(range(2000))
        self.session.on(Event.START)
        self.session.on(Event.ADMIT)
        self.pages.slots.enter(self.session)

    def _commit(self) -> None:
        self.store.ledger.commit()

    def fill(self, index: int) -> None:
        """Compute a page: zeros will do."""
        session = self.session
        assert session.frontier == index * PAGE_TOKENS
        assert self.pages.slots.ensure(session, (index + 1) * PAGE_TOKENS)
        session.frontier = (index + 1) * PAGE_TOKENS
        slot = session.kv.open[index - len(session.kv.sealed)]
        digest = payload_digest(memoryview(bytearray(LAYOUT.page_bytes)))
        self.pages.sealing.filled(session, index, slot, digest)
        self.frame()

    def frame(self) -> list[Seal]:
        """The next frame is executed; what it verifies is for the caller to answer."""
        chores, verify = self.pages.chores()
        self.pages.answered(chores, (), ())
        return verify

    def poll(self) -> None:
        self.pages.poll()
        self.pages.sealing.start_seals()

    def until(self, fact: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not fact():
            assert time.monotonic() < end, "it does not happen"
            self.poll()
            time.sleep(0.001)

    def published(self, *pages: int) -> None:
        self.until(
            lambda: sorted(seal.index for seal in self.pages.sealing.read_back.queued) == [*pages]
        )

    def swap(self) -> None:
        """Whatever is published reads well."""
        while seals := self.frame():
            for seal in seals:
                self.pages.sealing.verified(seal, True)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.session.check()
    made.pages.close()
    made.store.close()


def test_rows_of_a_page_that_must_not_be_published_are_computed_again(scene: Scene) -> None:
    """The page before it was not readable in the store: no room is not what it lacks."""
    pages, session = scene.pages, scene.session
    scene.fill(0)
    scene.published(0)
    (first,) = scene.frame()
    scene.fill(1)
    pages.sealing.verified(first, False)
    lost = [event.key for event in scene.store.events.drain()]
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


def test_a_page_that_is_invalid_since_it_was_published_does_not_swap(scene: Scene) -> None:
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


def test_a_seal_that_failed_before_promises_no_place(scene: Scene) -> None:
    """A turn that waits for one would wait for ever: the seal fails again, once a second."""
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


def test_a_turn_that_is_alone_hears_that_there_is_no_room() -> None:
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
