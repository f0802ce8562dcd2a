"""Published silent-wrong-KV incidents, each as a checker that passes on this store and fails when
the incident's mechanism is put in (which proves that the checker can fail).

Each has the letter and the source of its incident; this file has those that concern a store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kv_store.store as store_module
from kv_store import keys, osio
from kv_store.errors import StaleRef, StoreCorrupt, StoreError, StoreLocked
from kv_store.keys import ROOT_KEY, payload_digest
from kv_store.layout import Descriptor, PageLayout
from kv_store.pages.allocator import SlotAllocator
from kv_store.pages.index import Page, PageEvent, PageIndex, PageState
from kv_store.pages.load import PageLoader
from kv_store.pages.seal import PageSealer, Ticket
from kv_store.store import Store
from kv_store.threads import IntentThread, new_future
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    CountedFiles,
    Lane,
    add_chain,
    descriptor,
    evict,
    payload_of,
    read_page,
    settings,
    tokens_of,
    wait_for_growth,
)

SIZE = LAYOUT.page_bytes
IDS = tokens_of(1, 4)
ONE, TWO = tokens_of(11, 1), tokens_of(12, 1)
Checker = Callable[[Path], None]
Mechanism = Callable[[pytest.MonkeyPatch], None]
tmp_path = kv_scene.tmp_path


def opened(folder: Path, files: osio.Files | None = None, **changes: Any) -> Store:
    return Store.open(folder / "s", descriptor(**changes), settings(), files=files)


def check_served(store: Store, ids: np.ndarray) -> int:
    """Every page found and loaded holds the bytes of its tokens; returns how many."""
    refs = store.pages.match_prefix(ids, SALT)
    good = store.pages.load(refs).result(20)
    for key, ref, ok in zip(
        keys.chain_keys(ids, store.pages.repr_id, SALT), refs, good, strict=False
    ):
        if ok:
            same = read_page(store, ref) == payload_of(key).tobytes()
            assert same, "wrong KV is served"  # without a diff of the bytes, which takes minutes
    return sum(good)


def flip(store: Store, slot: int) -> None:
    with open(store.pages.allocator.infos[0].path, "r+b") as extent:
        at = slot * SIZE + 5
        extent.seek(at)
        byte = extent.read(1)[0]
        os.pwrite(extent.fileno(), bytes([byte ^ 1]), at)


# -- A, I: identity without the model or the layout -------------------------------------------


def check_other(folder: Path, other: Descriptor) -> None:
    assert other.layout.page_bytes == SIZE, "only its name may tell it apart"
    store = opened(folder)
    add_chain(store, IDS)
    store.close()
    store = Store.open(folder / "s", other, settings())
    found = store.pages.match_prefix(IDS, SALT)
    store.close()
    assert found == [], "KV of another representation is found"


def check_other_model(folder: Path) -> None:
    """Pages of one model are never pages of another that has the same shape."""
    check_other(folder, descriptor(model_hash="cc" * 32))


def check_other_layout(folder: Path) -> None:
    """Pages of one layout are never pages of another that has the same size."""
    check_other(folder, descriptor(layout=PageLayout.uniform(2, 1, 32)))


def name_by_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Descriptor, "repr_id", property(lambda self: bytes.fromhex(self.layout.layout_id))
    )


def name_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def repr_id(self: Descriptor) -> bytes:
        return keys.hash_parts(b"", (self.model_hash.encode(), b"%d" % self.layout.page_bytes))

    monkeypatch.setattr(Descriptor, "repr_id", property(repr_id))


# -- B: published before verified; one name for two writers -----------------------------------


def check_failed_write(folder: Path) -> None:
    """A page whose write failed, or was lost, is never visible."""

    class LosingWrites(osio.Files):
        loses_writes = False

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return len(data) if self.loses_writes else super().pwrite(fd, data, offset)

    files = LosingWrites()
    store = opened(folder, files)
    lane = Lane(store)
    files.loses_writes = True
    with contextlib.suppress(StoreError):
        lane.add(ROOT_KEY, ONE)
    files.loses_writes = False
    try:
        check_served(store, ONE)
    finally:
        lane.close()
        store.close()


def publish_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_page(
        self: PageSealer, ticket: Ticket, page: Page, copy: Callable[[memoryview], None]
    ) -> None:
        with contextlib.suppress(StoreCorrupt):
            copy(self._slots.buffer)
        info = self._slots.info(page.page_id)
        self._core.extents.write_page(info, page.page_id, self._slots.buffer)
        page.digest = ticket.digest
        page.checksum = keys.sealed_checksum(self._slots.buffer, self._slots.seed(page))

    monkeypatch.setattr(PageSealer, "_copy_page", copy_page)


def check_two_writers(folder: Path) -> None:
    """Two pages sealed at once get two slots."""
    store = opened(folder)
    lane = Lane(store)
    try:
        tickets = [lane.seal(ROOT_KEY, ids) for ids in (ONE, TWO)]
        futures = [store.pages.publish(ticket) for ticket in tickets]
        store.ledger.commit()
        for future in futures:
            future.exception(20)
        assert check_served(store, ONE) == 1
        assert check_served(store, TWO) == 1
    finally:
        lane.close()
        store.close()


def one_staging_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: PageIndex) -> Page | None:
        page = self._pages[0]
        if page.state is PageState.FREE:
            self.apply(page, PageEvent.RESERVE)
            return page
        duplicate = Page(page.page_id, page.gen, PageState.RESERVED)
        self._counts[PageState.RESERVED] += 1
        return duplicate

    monkeypatch.setattr(PageIndex, "take_free", take)


# -- C: a buffer is used again before the write from it is over -------------------------------


def check_reused_buffer(folder: Path) -> None:
    """When a seal reports success, the arena slot may hold the next session's page."""
    gate = threading.Event()
    store = opened(folder)
    lane = Lane(store)
    try:
        ticket, at = store.pages.reserve(ROOT_KEY, ONE, SALT), lane.arena.reserve()
        assert ticket is not None
        assert at is not None
        page = np.frombuffer(lane.mapping.page(at.slot), np.uint8)
        page[:] = payload_of(ticket.key)
        store.core.thread.submit(lambda: gate.wait(20))  # the disk is slow
        sealed = store.pages.seal(ticket, lane.arena, at, lane.mapping.digest(at.slot))
        if not sealed.done():
            gate.set()
            sealed.result(20)
        page[:] = payload_of(store.pages.key_of(ROOT_KEY, TWO, SALT))  # the slot's next use
        gate.set()
        store.core.thread.submit(lambda: None).result(20)
        published = store.pages.publish(ticket)
        store.ledger.commit()
        published.result(20)
        assert check_served(store, ONE) == 1
    finally:
        gate.set()
        lane.close()
        store.close()


def acknowledge_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def seal(self: PageSealer, ticket: Ticket, arena: Any, at: Any, digest: bytes) -> Any:
        page = ticket.page
        assert page is not None
        self._index.apply(page, PageEvent.SEAL)
        self._index.apply(page, PageEvent.SEALED)

        def later() -> None:
            arena.read_page(self._core.files, at, self._slots.buffer)
            page.digest = ticket.digest = payload_digest(self._slots.buffer)
            page.checksum = keys.sealed_checksum(self._slots.buffer, self._slots.seed(page))
            info = self._slots.info(page.page_id)
            self._core.extents.write_page(info, page.page_id, self._slots.buffer)

        ticket.digest = digest
        self._core.thread.submit(later)
        future = new_future()
        future.set_result(page.ref)
        return future

    monkeypatch.setattr(PageSealer, "seal", seal)


# -- D: some of a batch is returned without having been loaded --------------------------------


def check_batch(folder: Path) -> None:
    """A page that was not read and verified is never handed out as readable."""
    store = opened(folder)
    add_chain(store, IDS)
    store.close()
    store = opened(folder)
    flip(store, 1)
    try:
        assert check_served(store, IDS) == 3
    finally:
        store.close()


def load_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageLoader, "_bytes_match", lambda self, page: True)


# -- E: a reference without a generation ------------------------------------------------------


def check_stale_reference(folder: Path) -> None:
    """A reference to a reused slot is invalid and does not give the new bytes."""
    store = opened(folder)
    lane = Lane(store)
    try:
        (old,) = lane.add_chain(ONE)
        evict(store, 1)
        wait_for_growth(store)
        (new,) = lane.add_chain(TWO)
        assert new.page_id == old.page_id
        assert store.pages.load([old]).result(20) == [False], "an old reference found other bytes"
        with pytest.raises(StaleRef):
            store.pages.slot_code(old)
    finally:
        lane.close()
        store.close()


def forget_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageIndex, "live", lambda self, ref: self._pages[ref.page_id])


# -- F: an abort frees the slot under a writer -----------------------------------------------


def check_abort_under_writer(folder: Path) -> None:
    """While a write is in flight its slot is not reused."""
    gate, inside = threading.Event(), threading.Event()
    files = CountedFiles(lambda name, number: None)
    store = opened(folder, files)
    lane = Lane(store)
    ticket, at = store.pages.reserve(ROOT_KEY, ONE, SALT), lane.arena.reserve()
    assert ticket is not None
    assert ticket.page is not None
    assert at is not None
    slot = ticket.page.page_id

    def hang(name: str, _: int) -> None:
        if name == "pwrite":
            inside.set()
            gate.wait(20)

    files.on_call = hang
    try:
        store.pages.seal(ticket, lane.arena, at, lane.mapping.digest(at.slot))
        assert inside.wait(20)
        store.pages.abort(ticket)
        other = store.pages.reserve(ROOT_KEY, TWO, SALT)
        assert other is not None
        assert other.page is not None
        assert other.page.page_id != slot, "the place was given away under its writer"
        store.pages.abort(other)
    finally:
        files.on_call = lambda name, number: None
        gate.set()
        store.core.thread.submit(lambda: None).exception(20)
        lane.close()
        store.close()


def one_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: SlotAllocator, page: Page) -> None:
        if page.state is PageState.QUARANTINE:
            page.writers = page.pins = 0  # "the request is gone, so the block is free"
            self.index.apply(page, PageEvent.FREE)

    monkeypatch.setattr(SlotAllocator, "settle", settle)


# -- G: identity from a clock, and no lock ----------------------------------------------------


def check_two_engines(folder: Path) -> None:
    """A second engine on the directory is refused, and the first one named."""
    store = opened(folder)
    try:
        with pytest.raises(StoreLocked):
            opened(folder).close()
    except StoreError as error:  # SQLite's lock is a second line, but names no process
        raise AssertionError("the second engine was let in") from error
    finally:
        store.close()


def no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osio, "lock_exclusive", lambda fd: True)


def check_two_stores(folder: Path) -> None:
    """Two stores made in one second are two stores."""
    uuids = set[bytes]()
    for name in ("a", "b"):
        store = Store.open(folder / name, descriptor(), settings())
        uuids.add(store.core.uuid)
        store.close()
    assert len(uuids) == 2, "two stores have one identity"


def clock_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    second = int(time.monotonic()) << 12
    monkeypatch.setattr(store_module.secrets, "token_bytes", lambda n: second.to_bytes(n, "little"))


# -- H: a rejected restore leaves its bytes behind --------------------------------------------


def check_rejected_restore(folder: Path) -> None:
    """After a failed load the page is neither in the index nor found by a later caller."""
    store = opened(folder)
    add_chain(store, IDS)
    store.close()
    store = opened(folder)
    flip(store, 0)
    try:
        refs = store.pages.match_prefix(IDS, SALT)
        assert store.pages.load(refs).result(20)[0] is False
        assert check_served(store, IDS) == 0
        assert store.pages.load(refs[:1]).result(20) == [False]
        assert store.pages.load(refs[1:]).result(20) == [True] * 3, "later pages are not touched"
    finally:
        store.close()


def keep_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: SlotAllocator, page: Page, *, slot_failed: bool) -> None:
        if page.state is PageState.LOADING:
            self.index.apply(page, PageEvent.VERIFY)  # "it is in memory now, after all"

    monkeypatch.setattr(SlotAllocator, "invalidate", keep)


# -- L: one bad intent ends the thread --------------------------------------------------------


def check_bad_intent(folder: Path) -> None:
    """An intent that raises fails alone: the next one runs, and no caller waits for ever."""
    store = opened(folder)
    lane = Lane(store)
    lost = False

    def broken() -> None:
        raise RuntimeError("one bad intent")

    try:
        assert isinstance(store.core.thread.submit(broken).exception(1), RuntimeError)
        lane.add_chain(ONE)
        assert check_served(store, ONE) == 1
    except TimeoutError:
        lost = True
        store.ledger.close()  # the page thread does not end before the process
    finally:
        lane.close()
        if not lost:
            store.close()
    assert not lost, "a request waits for a thread that is gone"


def unsupervised(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: IntentThread, intent: Callable[[], Any]) -> Any:
        future = new_future()

        def run() -> None:
            future.set_result(intent())

        self._queue.put(run)
        return future

    def run(self: IntentThread) -> None:
        while (intent := self._queue.get()) is not None:
            try:
                intent()
            except RuntimeError:
                return  # as if the thread had died, without its traceback in the test's output

    monkeypatch.setattr(IntentThread, "submit", submit)
    monkeypatch.setattr(IntentThread, "_run", run)


# -- M: what was granted at opening is refused at writing -------------------------------------


def check_dead_tier(folder: Path) -> None:
    """A tier that cannot be written is not healthy, from the first moment on."""

    class Unaligned(osio.Files):
        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".kv"):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().pwrite(fd, data, offset)

    store = opened(folder, Unaligned())
    try:
        assert store.stat()["page_tier"] != "ok", "a dead tier reports health"
        assert any("cannot be cached" in text for text in store.warnings)
    finally:
        store.close()


def no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageLoader, "self_test", lambda self: None)


# letter and source, checker, mechanism, the checker's message when the mechanism is there
INCIDENTS: list[tuple[str, Checker, Mechanism, str]] = [
    ("A LMCache#4492: keys without the model", check_other_model, name_by_layout, "another repr"),
    ("B LMCache#4991: a failed store is visible", check_failed_write, publish_unverified, "wrong"),
    ("B LMCache#4991: two writers share a name", check_two_writers, one_staging_name, "wrong"),
    (
        "C LMCache#4385: buffer used before the write",
        check_reused_buffer,
        acknowledge_at_once,
        "wrong",
    ),
    ("D LMCache#3022: given but never loaded", check_batch, load_without_reading, "wrong KV"),
    ("E vLLM#52234: no generation", check_stale_reference, forget_generations, "other bytes"),
    ("F SGLang#24527: freed under a writer", check_abort_under_writer, one_lifetime, "given away"),
    ("G SGLang#35484: two engines, one directory", check_two_engines, no_lock, "was let in"),
    ("G SGLang#35484: identity from a clock", check_two_stores, clock_identity, "one ident"),
    ("H llama.cpp#27068: a rejected restore stays", check_rejected_restore, keep_rejected, "wrong"),
    ("I vLLM#57661: layout told by its size", check_other_layout, name_by_size, "another repr"),
    ("L pegaflow: one bad intent ends the thread", check_bad_intent, unsupervised, "waits for a"),
    ("M LMCache#4364: capability guessed", check_dead_tier, no_self_test, "a dead tier"),
]
NAMES = [name.partition(":")[0] for name, *_ in INCIDENTS]


@pytest.mark.parametrize(("name", "check", "mechanism", "words"), INCIDENTS, ids=NAMES)
def test_the_store_passes_the_checker(
    tmp_path: Path, name: str, check: Checker, mechanism: Mechanism, words: str
) -> None:
    check(tmp_path)


@pytest.mark.parametrize(("name", "check", "mechanism", "words"), INCIDENTS, ids=NAMES)
def test_the_checker_fails_when_the_mechanism_is_put_in(
    tmp_path: Path,
    name: str,
    check: Checker,
    mechanism: Mechanism,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        mechanism(patched)
        with pytest.raises(AssertionError, match=words):
            check(tmp_path)
