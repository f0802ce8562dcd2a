"""Failing disks: every call may fail, full tiers, no descriptors or inodes, flipped bits."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kv_store.osio as osio
from bench.processes.store_check import check_integrity
from kv_store import keys
from kv_store.errors import StoreCorrupt, StoreError, StoreFull
from kv_store.fsck import fsck
from kv_store.keys import ROOT_KEY
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.index import PageRef, PageState
from kv_store.pages.pool import Ticket
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    CountedFiles,
    Lane,
    add_chain,
    append_tokens,
    descriptor,
    evict,
    open_session,
    page_state,
    payload_of,
    read_page,
    settings,
    tokens_of,
    wait_for_growth,
)

ROOT = Path(__file__).resolve().parents[2]
SIZE = LAYOUT.page_bytes
IDS = tokens_of(1, 4)
tmp_path = kv_scene.tmp_path


def quiet(_name: str, _number: int) -> None:
    """File calls without faults."""


# -- F15, F17: every file call fails once -----------------------------------------------------


def served(store: Store) -> int:
    """Pages of the timeline that load; each must hold the bytes of its key."""
    refs = store.pages.match_prefix(IDS, SALT)
    good = store.pages.load(refs).result(20)
    chain = keys.chain_keys(IDS, store.pages.repr_id, SALT)
    for ref, key, ok in zip(refs, chain, good, strict=False):
        if ok:
            assert read_page(store, ref) == payload_of(key).tobytes(), "wrong KV"
    return sum(good)


def work(folder: Path, files: osio.Files, incarnation: int) -> None:
    """Open, restore, seal, evict, scrub, close; skip a call that fails, as an engine does."""
    store = Store.open(folder, descriptor(), settings(6, 2), files=files)
    try:
        served(store)
        lane = Lane(store, 2, incarnation)
        try:
            parent = ROOT_KEY
            for start in range(0, len(IDS), PAGE_TOKENS):
                wait_for_growth(store)
                ids = IDS[start : start + PAGE_TOKENS]
                key = store.pages.key_of(parent, ids, SALT)
                with contextlib.suppress(OSError, StoreError, AssertionError):  # no ticket, no seal
                    store.pages.unpin(lane.add(parent, ids)[0])
                parent = key
            served(store)
            evict(store, 1)
            store.pages.scrub_next().result(20)
            store.maintain()
        finally:
            lane.close()
    finally:
        check_integrity(store)
        store.close()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_one_failure_of_any_file_call_costs_only_pages(tmp_path: Path, error: int) -> None:
    """The n-th call fails, for every n until a run meets no failure. Opening may be refused, by a
    named error; all other failures cost pages, never serve a wrong one, and leave a valid store."""
    number, opened = 0, 0
    folder = tmp_path / "s"
    while True:
        number += 1
        failed = False

        def once(_: str, call: int, number: int = number) -> None:
            nonlocal failed
            if call == number:
                failed = True
                raise OSError(error, os.strerror(error))

        with contextlib.suppress(StoreError, OSError):
            work(folder, CountedFiles(once), number)
            opened += 1
        if not failed:
            break
        if number % 7 == 0:  # at some points only: the store serves, and fsck finds nothing
            report = fsck(folder)
            assert not [f for f in report.findings if "page" in f.what], report.findings
    assert number > 60, "the sweep met too few calls"
    assert opened > number * 3 // 4
    store = Store.open(folder, descriptor(), settings(6, 2))
    lane = Lane(store, 2, 10_000)
    lane.add_chain(IDS)
    assert served(store) == 4
    lane.close()
    store.close()


def test_a_tier_that_opens_but_cannot_be_written_is_reported_as_failing(tmp_path: Path) -> None:
    """F7: a capability is tested by a write, not taken from the open call."""
    files = CountedFiles(quiet)

    def refuse(name: str, _: int) -> None:
        if name == "pwrite" and len(os.listdir(tmp_path / "s" / "ext")):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    files.on_call = refuse
    store = Store.open(tmp_path / "s", descriptor(), settings(), files=files)
    assert any("cannot be cached now: [Errno 22]" in text for text in store.warnings)
    assert str(store.stat()["page_tier"]).startswith("failing: [Errno 22]")
    files.on_call = quiet
    lane = Lane(store)
    store.pages.unpin(lane.add(ROOT_KEY, IDS[:256])[0])
    assert store.stat()["page_tier"] == "ok"
    files.on_call = refuse
    with pytest.raises(OSError, match="Invalid"):
        lane.seal(ROOT_KEY, tokens_of(5, 1))
    assert str(store.stat()["page_tier"]).startswith("failing")
    files.on_call = quiet
    lane.close()
    store.close()


def test_the_tier_is_off_without_extents_and_without_a_budget(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "a", descriptor(), settings(0))
    assert str(store.stat()["page_tier"]).startswith("off: the budget")
    store.close()

    class Full(osio.Files):
        def fallocate(self, fd: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store.open(tmp_path / "b", descriptor(), settings(ballast_bytes=0), files=Full())
    assert str(store.stat()["page_tier"]).startswith("off: no room")
    store.close()


# -- F19: a batch that fails half-way ---------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "x"), RuntimeError("x")])
def test_a_batch_that_fails_midway_leaves_no_unread_page_readable(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    add_chain(store, IDS)
    store.close()
    store = Store.open(tmp_path / "s", descriptor(), settings())
    real, calls = store.core.extents.read_page, list[int]()

    def third_fails(*args: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise error
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store.core.extents, "read_page", third_fails)
    refs = store.pages.match_prefix(IDS, SALT)
    assert store.pages.load(refs).result(20) == [True, True, False, True]
    assert store.pages.match_prefix(IDS, SALT) == refs[:2]
    assert store.pages.load([refs[2]]).result(20) == [False], "it is gone, not merely unread"
    assert store.stat()["pages_loading"] == 0
    check_integrity(store)
    store.close()


# -- F52: flipped bits ------------------------------------------------------------------------


def test_bit_flips_after_the_lanes_digest_are_detected(tmp_path: Path) -> None:
    """Between digest and seal, and in the extent: all of them. Before the digest: none, since
    no digest covers those bytes yet; there only a recomputation detects the flip."""
    store = Store.open(tmp_path / "s", descriptor(), settings(64, 8))
    lane = Lane(store)
    rng = np.random.default_rng(9)
    in_arena = in_extent = 0
    for name in range(20):
        bit, at = 1 << int(rng.integers(8)), int(rng.integers(LAYOUT.payload_bytes))
        ids = tokens_of(name, 1)
        ticket = store.pages.reserve(ROOT_KEY, ids, SALT)
        slot = lane.arena.reserve()
        assert isinstance(ticket, Ticket), ticket
        assert slot is not None
        page = np.frombuffer(lane.mapping.page(slot.slot), np.uint8)
        page[:] = payload_of(ticket.key)
        digest = lane.mapping.digest(slot.slot)
        page[at] ^= bit
        in_arena += isinstance(
            store.pages.seal(ticket, lane.arena, slot, digest).exception(20), StoreCorrupt
        )
        lane.arena.release(slot)
        wait_for_growth(store)
        ref, _ = lane.add(ROOT_KEY, ids)
        info = store.pages.allocator.info(ref.page_id)
        with open(info.path, "r+b") as extent:
            os.pwrite(
                extent.fileno(),
                bytes([payload_of(ticket.key)[at] ^ bit]),
                info.offset_of(ref.page_id) + at,
            )
        in_extent += not store.pages.verify(ref).result(20)
        store.pages.unpin(ref)
    ids = tokens_of(50, 1)
    future = store.pages.publish(lane.seal(ROOT_KEY, ids, flip=1))  # the lane computed it wrongly
    store.ledger.commit()
    ref = future.result(20)
    assert store.pages.verify(ref).result(20), "it was sealed as it is"
    right = keys.payload_digest(payload_of(store.pages.key_of(ROOT_KEY, ids, SALT)).tobytes())
    assert store.pages.digest(ref) != right
    store.pages.invalidate(ref)
    assert store.pages.match_prefix(ids, SALT) == []
    store.pages.unpin(ref)
    assert (in_arena, in_extent) == (20, 20)
    lane.close()
    store.close()


@pytest.mark.parametrize("count", [1_500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_corrupt_pages_never_verify(tmp_path: Path, count: int) -> None:
    """Bits, zeros, swapped, stale, foreign, misdirected, shortened: the checksum fails for all."""
    store = Store.open(tmp_path / "s", descriptor(), settings(16, 16))
    lane = Lane(store)
    stale = [read_page(store, ref) for ref in lane.add_chain(tokens_of(70, 4))]
    evict(store, 4)
    wait_for_growth(store)
    refs = lane.add_chain(IDS)
    pages = [store.pages.index.get(ref) for ref in refs]
    sound = [read_page(store, ref) for ref in refs]
    assert [page.gen for page in pages] == [1] * 4, "the stale bytes are of the same places"
    rng, missed = np.random.default_rng(4), 0
    with open(store.pages.allocator.infos[0].path, "r+b") as extent:
        for _ in range(count):
            kind, n = int(rng.integers(6)), int(rng.integers(4))
            at, length = int(rng.integers(LAYOUT.payload_bytes)), int(rng.integers(1, 4096))
            data = bytearray(sound[n])
            if kind == 0:
                data[at] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                data[at : at + length] = bytes(len(data[at : at + length]))
            elif kind == 2:
                data = bytearray(sound[n - 1])
            elif kind == 3:
                data = bytearray(stale[n])
            elif kind == 4:
                data[at : at + length] = rng.bytes(len(data[at : at + length]))
            else:
                data[at:] = stale[n][at:]
            if data == sound[n]:
                continue
            os.pwrite(extent.fileno(), data, n * SIZE)
            missed += store.pages.loader._bytes_match(pages[n])
            os.pwrite(extent.fileno(), sound[n], n * SIZE)
    assert not missed
    assert all(store.pages.loader._bytes_match(page) for page in pages)
    lane.close()
    store.close()


# -- F71: descriptors and inodes --------------------------------------------------------------


def test_without_descriptors_caching_stops_and_resumes(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings(32, 2))
    lane = Lane(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wait_for_growth(store)
    before, taken = len(store.pages.allocator.infos), list[int]()
    try:
        # Every number below the limit is taken: descriptors closed elsewhere must not help.
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest + 1, soft), hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for name in range(before * 2):
            lane.add_chain(tokens_of(name, 1))  # slots that exist are used, and used again
            wait_for_growth(store)
        assert len(store.pages.allocator.infos) == before
        assert "Too many open files" in str(store.stat()["growth_blocked"])
        with pytest.raises(OSError, match="Too many open files"):
            store.create_arena("cpu", 2, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    store.maintain()
    wait_for_growth(store)
    assert len(store.pages.allocator.infos) > before
    lane.close()
    check_integrity(store)
    store.close()


@pytest.fixture
def few_inodes() -> Iterator[Path]:
    with kv_scene.small_disk("size=16m,nr_inodes=10") as folder:
        yield folder


def test_without_inodes_caching_stops_and_the_ledger_continues(few_inodes: Path) -> None:
    store = Store.open(few_inodes / "s", descriptor(), settings(32, 2))
    lane, name = Lane(store, 2), 0
    while not store.stat()["growth_blocked"]:
        lane.add_chain(tokens_of(name, 1))
        wait_for_growth(store)
        name += 1
        assert name < 40
    lane.add_chain(tokens_of(99, 1))
    assert len(store.pages.match_prefix(tokens_of(99, 1), SALT)) == 1
    with pytest.raises((StoreFull, OSError)):
        store.create_arena("cpu", 9, 1)
    open_session(store.ledger, "s", "t")
    append_tokens(store.ledger, "s", 1, 0, IDS)
    store.ledger.commit().result(20)
    lane.close()
    store.close()
    store = Store.open(few_inodes / "s", descriptor(), settings(32, 2))
    assert store.dropped == {}
    store.close()


# -- F20: the writer is late ------------------------------------------------------------------


def test_a_slot_with_a_late_writer_is_not_free(tmp_path: Path) -> None:
    """A seal hangs in its write and its ticket is abandoned: the slot is free after the write."""
    gate, inside = threading.Event(), threading.Event()
    files = CountedFiles(quiet)
    store = Store.open(tmp_path / "s", descriptor(), settings(), files=files)
    lane = Lane(store)
    slot = lane.arena.reserve()
    assert slot is not None
    digest = lane.mapping.digest(slot.slot)
    ticket = store.pages.reserve(ROOT_KEY, IDS[:256], SALT)
    assert ticket is not None
    assert ticket.page is not None
    old = ticket.page.ref

    def hang(name: str, _: int) -> None:
        if name == "pwrite":
            inside.set()
            gate.wait(20)

    files.on_call = hang
    late = store.pages.seal(ticket, lane.arena, slot, digest)
    assert inside.wait(20)
    store.pages.abort(ticket)
    assert page_state(store, old) is PageState.QUARANTINE
    again = store.pages.reserve(ROOT_KEY, IDS[:256], SALT)
    assert again is not None
    assert again.page is not None
    assert again.page.page_id != old.page_id
    store.pages.abort(again)
    files.on_call = quiet
    gate.set()
    with pytest.raises(StoreError, match="given up"):
        late.result(20)
    with pytest.raises(StoreError, match="gone"):
        page_state(store, old)
    lane.add_chain(IDS)
    assert served(store) == 4
    assert store.pages.match_prefix(IDS, SALT)[0] == PageRef(old.page_id, old.gen + 1)
    lane.close()
    check_integrity(store)
    store.close()


# -- F15, F16: the tiers are full -------------------------------------------------------------


def test_below_the_floor_the_store_evicts_instead_of_growing(tmp_path: Path) -> None:
    class Disk(osio.Files):
        free = 1 << 40

        def free_bytes(self, path: str) -> tuple[int, int]:
            return self.free, 1 << 40

    files = Disk()
    roomy = settings(32, 4, free_floor_bytes=1 << 30)
    store = Store.open(tmp_path / "s", descriptor(), roomy, files=files)
    lane = Lane(store)
    lane.add_chain(IDS)
    wait_for_growth(store)
    files.free = (1 << 30) + SIZE  # another program filled the disk
    slots = int(store.stat()["pages_total"])
    for name in range(100, 100 + 2 * slots):
        lane.add_chain(tokens_of(name, 1))
        wait_for_growth(store)
    assert store.stat()["pages_total"] <= slots + 4
    assert "stay free for others" in str(store.stat()["growth_blocked"])
    assert str(store.stat()["page_tier"]).startswith("not growing: the disk has")
    files.free = 1 << 40
    store.maintain()
    wait_for_growth(store)
    assert int(store.stat()["pages_total"]) > slots
    store.core.thread.submit(lambda: None).result(20)
    assert store.stat()["page_tier"] == "ok", "until there is room"
    lane.close()
    store.close()


def test_the_reserve_is_restored_when_there_is_room(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    reserve = tmp_path / "s" / "BALLAST"
    assert reserve.stat().st_blocks * 512 >= reserve.stat().st_size == SIZE, "allocated, not sparse"
    reserve.unlink()
    store.maintain()
    wait_for_growth(store)
    assert reserve.stat().st_size == SIZE
    store.close()


def test_a_kill_on_a_full_disk_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """F16: acknowledged writes survive the use of the reserve and the kill of the process."""
    script = """if True:
        import os, signal, sys
        from tests.kv_store.test_faults_disk import *
        store = Store.open(sys.argv[1], descriptor(), settings(8, 2, ballast_bytes=4 * SIZE))
        open_session(store.ledger, "s", "t")
        done = 0
        while store.ledger.commit().exception(20) is None:
            print(done, flush=True)
            append_tokens(store.ledger, "s", 1, done, range(done, done + 20_000))
            done += 20_000
        os.kill(os.getpid(), signal.SIGKILL)"""
    with kv_scene.small_disk("size=3m") as folder:
        path = os.path.join(folder, "s")
        ran = subprocess.run(
            [sys.executable, "-c", script, path], cwd=ROOT, capture_output=True, text=True
        )
        acknowledged = int(ran.stdout.split()[-1])
        assert acknowledged >= 20_000, ran.stderr
        assert not os.path.exists(os.path.join(path, "BALLAST"))
        store = Store.open(path, descriptor(), settings(8, 2))
        record = store.ledger.load_session("s").result(20)
        assert record is not None
        assert record.tokens == list(range(acknowledged))
        store.close()


def test_a_folder_that_is_moved_away_is_reported(tmp_path: Path) -> None:
    """An open store goes on writing files that no path names."""
    store = Store.open(tmp_path / "kv", descriptor(), settings())
    store.maintain()
    assert store.troubles == []
    os.rename(tmp_path / "kv", tmp_path / "aside")
    store.maintain()
    assert any("was moved, removed or replaced" in text for text in store.troubles)
    os.rename(tmp_path / "aside", tmp_path / "kv")
    store.maintain()
    assert not any("was moved, removed or replaced" in text for text in store.troubles)
    store.close()
