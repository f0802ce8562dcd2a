"""The KV of one lane with a worker that the test executes step by step."""

from __future__ import annotations

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
from tests.support.kv_workload import LAYOUT, descriptor, settings


class Disk(osio.Files):
    """Pages cannot be written while `refuses`, with an error that the store does not expect."""

    refuses = False

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.refuses:
            raise OSError(errno.EROFS, "read-only")
        return super().pwrite(fd, data, offset)


class Scene:
    """The pages of one lane whose worker the test executes; one session that runs."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.disk = Disk()
        self.store = Store.open(folder / "store", descriptor(), settings(**limits), files=self.disk)
        self.pages = LaneKv(self.store, Disputes(self.store), lambda: None, self._commit)
        self.arena: Arena = self.store.create_arena("cpu", 1, 8)
        self.pages.slots.attach(self.arena)
        self.session = self.member(1, 2000)

    def _commit(self) -> None:
        self.store.ledger.commit()

    def member(self, key: int, n_tokens: int) -> Session:
        """A session that runs, with the same first tokens as any other."""
        session = Session(key, f"s{key}", "tenant")
        session.tokens = list(range(n_tokens))
        session.on(Event.START)
        session.on(Event.ADMIT)
        self.pages.slots.enter(session)
        return session

    def fill(self, index: int) -> None:
        """Compute a page of zeros."""
        session = self.session
        assert session.frontier == index * PAGE_TOKENS
        assert self.pages.slots.ensure(session, (index + 1) * PAGE_TOKENS)
        session.frontier = (index + 1) * PAGE_TOKENS
        slot = session.kv.open[index - len(session.kv.sealed)]
        digest = payload_digest(memoryview(bytearray(LAYOUT.page_bytes)))
        self.pages.sealing.filled(session, index, slot, digest)
        self.frame()

    def frame(self) -> list[Seal]:
        """Execute the next frame; the caller answers what it verifies."""
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

    def seal(self, n_pages: int) -> None:
        """The first pages of the session are in the store."""
        for index in range(n_pages):
            self.fill(index)
        self.published(*range(n_pages))
        self.swap()

    def swap(self) -> None:
        """Every published page verifies when it is read back."""
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
