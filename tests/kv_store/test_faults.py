"""Damage, full disks, I/O errors, kills: no wrong KV is served, nothing acknowledged is lost."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import kv_store.osio as osio
from bench.processes.store_check import check_integrity
from kv_store.arenas.arena import Arena
from kv_store.errors import LedgerError, StoreCorrupt, StoreError, StoreFull
from kv_store.keys import ROOT_KEY
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import PageRef, PageState
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
    failing_files,
    open_session,
    page_state,
    payload_of,
    pin,
    read_page,
    scratch,
    settings,
    tokens_of,
    wait_for_growth,
)

ROOT = Path(__file__).resolve().parents[2]
IDS = tokens_of(1, 4)
SIZE = LAYOUT.page_bytes
tmp_path = kv_scene.tmp_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store with one chain of four pages, one per slot of its only extent."""
    store = Store.open(tmp_path / "store", descriptor(), settings())
    lane = Lane(store)
    refs = lane.add_chain(IDS)
    assert [ref.page_id for ref in refs] == [0, 1, 2, 3]
    open_session(store.ledger, "s", "t")
    append_tokens(store.ledger, "s", 1, 0, IDS)
    lane.close()
    store.close()
    return tmp_path / "store"


def reopened(path: Path, files: osio.Files | None = None) -> Store:
    return Store.open(path, descriptor(), settings(), files=files)


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def check_every_page(store: Store, damaged: set[int]) -> None:
    """Exactly the damaged pages are rejected; recomputing them repairs the chain in place."""
    refs = store.pages.match_prefix(IDS, SALT)
    good = store.pages.load(refs).result(20)
    assert [i for i, ok in enumerate(good) if not ok] == sorted(damaged)
    lane = Lane(store, incarnation=9)
    keys = [store.pages.digest(ref) for ref, ok in zip(refs, good, strict=True) if ok]
    lane.add_chain(IDS)
    again = store.pages.match_prefix(IDS, SALT)
    assert len(again) == 4
    kept = [ref for ref, ok in zip(refs, good, strict=True) if ok]
    assert [ref for i, ref in enumerate(again) if i not in damaged] == kept, "later pages stay"
    assert [store.pages.digest(ref) for ref in kept] == keys
    parent = ROOT_KEY
    for index, ref in enumerate(again):
        parent = store.pages.key_of(parent, IDS[index * 256 : (index + 1) * 256], SALT)
        assert read_page(store, ref) == payload_of(parent).tobytes()
    assert store.pages.load(again).result(20) == [True] * 4
    check_integrity(store)
    lane.close()


# -- damaged bytes ----------------------------------------------------------------------------


def flip(data: bytearray) -> None:
    data[SIZE + 1234] ^= 8


def flip_padding(data: bytearray) -> None:
    data[2 * SIZE - 1] ^= 1


def zero(data: bytearray) -> None:
    data[SIZE : 2 * SIZE] = bytes(SIZE)


def tear(data: bytearray) -> None:
    data[SIZE + 4096 : SIZE + 8192] = bytes(4096)


def swap(data: bytearray) -> None:
    data[SIZE : 2 * SIZE], data[2 * SIZE : 3 * SIZE] = (
        data[2 * SIZE : 3 * SIZE],
        data[SIZE : 2 * SIZE],
    )


def misdirect(data: bytearray) -> None:
    data[SIZE : 2 * SIZE] = data[0:SIZE]


@pytest.mark.parametrize(
    ("change", "damaged"),
    [(flip, {1}), (flip_padding, {1}), (zero, {1}), (tear, {1}), (swap, {1, 2}), (misdirect, {1})],
)
def test_damaged_pages_are_rejected_and_later_ones_kept(
    path: Path, change: Callable[[bytearray], None], damaged: set[int]
) -> None:
    edit(path / "ext" / "000001.kv", change)
    store = reopened(path)
    check_every_page(store, damaged)
    assert store.stat()["pages_rejected_total"] == len(damaged)
    store.close()


def test_pages_with_random_bit_flips_never_verify(path: Path) -> None:
    extent, rng = path / "ext" / "000001.kv", np.random.default_rng(2)
    original = extent.read_bytes()
    for offset in rng.integers(0, 4 * SIZE, 40).tolist():
        data = bytearray(original)
        data[offset] ^= 1 << int(rng.integers(8))
        extent.write_bytes(data)
        store = reopened(path)
        good = store.pages.load(store.pages.match_prefix(IDS, SALT)).result(20)
        assert [i for i, ok in enumerate(good) if not ok] == [offset // SIZE]
        add_chain(store, IDS)  # repairs the page in its slot
        store.close()
        original = extent.read_bytes()


def test_a_stale_page_of_the_same_slot_is_rejected(path: Path) -> None:
    """The slot has the bytes of an earlier generation, as after a lost write."""
    extent = path / "ext" / "000001.kv"
    old = extent.read_bytes()[:SIZE]
    store = reopened(path)
    evict(store, 4)
    lane = Lane(store, incarnation=3)
    other = tokens_of(2, 1)
    (ref,) = lane.add_chain(other)
    assert ref == PageRef(0, 1)
    lane.close()
    store.close()
    edit(extent, lambda data: data.__setitem__(slice(0, SIZE), old))
    store = reopened(path)
    assert store.pages.load(store.pages.match_prefix(other, SALT)).result(20) == [False]
    store.close()


def test_an_extent_of_another_store_is_rejected(path: Path, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "other", descriptor(), settings(pages=4))
    lane = Lane(other)
    lane.add_chain(IDS)  # the very same content, with that store's identity
    lane.close()
    other.close()
    shutil.copy(tmp_path / "other" / "ext" / "000001.kv", path / "ext" / "000001.kv")
    store = reopened(path)
    # the bytes are right, but no digest of this store covers them
    good = store.pages.load(store.pages.match_prefix(IDS, SALT)).result(20)
    assert good == [True] * 4, "content equal to what was sealed passes its own checksum"
    store.close()
    edit(path / "ext" / "000001.kv", flip)
    store = reopened(path)
    assert store.pages.load(store.pages.match_prefix(IDS, SALT)).result(20) == [
        True,
        False,
        True,
        True,
    ]
    store.close()


@pytest.mark.parametrize("size", [0, SIZE - 1, 3 * SIZE, 5 * SIZE])
def test_a_resized_extent_is_dropped_with_its_pages(path: Path, size: int) -> None:
    os.truncate(path / "ext" / "000001.kv", size)
    store = reopened(path)
    assert store.dropped == {"extent missing or truncated": 4}
    assert any("resized" in text for text in store.warnings)
    assert store.pages.match_prefix(IDS, SALT) == []
    assert store.ledger.load_session("s").result(20) is not None, "sessions are not lost"
    lane = Lane(store, incarnation=2)
    lane.add_chain(IDS)
    check_integrity(store)
    lane.close()
    store.close()


def test_a_missing_or_replaced_extent_is_dropped(path: Path, tmp_path: Path) -> None:
    (path / "ext" / "000001.kv").rename(tmp_path / "moved")
    (path / "ext" / "000001.kv").symlink_to(tmp_path / "moved")
    store = reopened(path)
    assert store.dropped == {"extent missing or truncated": 4}
    assert (tmp_path / "moved").stat().st_size == 4 * SIZE, "a link's target is not touched"
    store.close()


def test_an_extent_truncated_while_serving_costs_a_recompute(path: Path) -> None:
    store = reopened(path)
    os.truncate(path / "ext" / "000001.kv", SIZE)
    good = store.pages.load(store.pages.match_prefix(IDS, SALT)).result(20)
    assert good == [True, False, False, False]
    check_integrity(store)
    store.close()


def test_stray_files_of_a_crash_are_removed_and_others_left(path: Path) -> None:
    (path / "ext" / "000077.kv").write_bytes(b"half an extent")
    (path / "ext" / "readme.txt").write_text("mine")
    reopened(path).close()
    names = set(os.listdir(path / "ext"))
    assert "000077.kv" not in names
    assert {"000001.kv", "readme.txt"} <= names


def test_a_damaged_ledger_file_never_gives_wrong_tokens_or_pages(
    path: Path, tmp_path: Path
) -> None:
    """Overwrite 64 bytes at some offset: a refused session, an empty store, or no effect; most
    offsets have none."""
    size = (path / "meta.db").stat().st_size
    whole = 0
    for where in range(0, 100, 7):
        at, copy = max(24, size * where // 100), tmp_path / f"copy{where}"
        shutil.copytree(path, copy)

        def damage(data: bytearray, at: int = at) -> None:
            data[at : at + 64] = bytes(byte ^ 0x5A for byte in data[at : at + 64])

        edit(copy / "meta.db", damage)
        try:
            store = reopened(copy)
        except StoreError:
            continue  # the whole store is refused
        future = store.ledger.load_session("s")
        error = future.exception(20)
        assert error is None or isinstance(error, StoreCorrupt)
        record = None if error else future.result()
        assert record is None or record.tokens == IDS.tolist()
        refs = store.pages.match_prefix(IDS, SALT)
        valid = store.pages.load(refs).result(20)
        parent = ROOT_KEY
        for index, (ref, ok) in enumerate(zip(refs, valid, strict=True)):
            parent = store.pages.key_of(parent, IDS[index * 256 : (index + 1) * 256], SALT)
            if ok:
                assert read_page(store, ref) == payload_of(parent).tobytes()
        whole += record is not None and sum(valid) == 4
        check_integrity(store)
        store.close()
    assert whole >= 9


@pytest.mark.parametrize("junk", [b"", b"not a database" * 1000, bytes(8192)])
def test_a_destroyed_ledger_is_set_aside_and_the_store_starts_empty(
    path: Path, junk: bytes
) -> None:
    (path / "meta.db").write_bytes(junk)
    store = reopened(path)
    assert store.pages.match_prefix(IDS, SALT) == []
    assert store.ledger.list_sessions().result(20) == []
    if junk:
        assert any("kept as meta.db.damaged-1" in text for text in store.warnings)
        assert (path / "meta.db.damaged-1").read_bytes() == junk
    lane = Lane(store, incarnation=2)
    lane.add_chain(IDS)
    lane.close()
    store.close()


# -- full disks and I/O errors ----------------------------------------------------------------


def test_an_arena_without_room_names_the_setting(tmp_path: Path) -> None:
    files = failing_files({"fallocate": 1}, errno.ENOSPC)
    with pytest.raises(StoreFull, match="open_pages"):
        Arena.create(str(tmp_path / "cpu.1"), LAYOUT, 4, files=files)


def test_without_room_for_extents_the_store_serves_but_caches_nothing(tmp_path: Path) -> None:
    files = failing_files({"fallocate": 1}, errno.ENOSPC)
    store = Store.open(tmp_path / "s", descriptor(), settings(), files=files)
    assert any("caching is off" in text for text in store.warnings)
    refused = store.pages.reserve(ROOT_KEY, IDS[:256], SALT)
    assert refused is NoRoom.FULL
    assert "No space" in store.tier
    assert os.listdir(tmp_path / "s" / "ext") == [], "a failed extent leaves no file"
    open_session(store.ledger, "s", "t")
    store.ledger.commit().result(20)
    files.on_call = lambda name, number: None  # space is back
    store.maintain()
    wait_for_growth(store)
    add_chain(store, IDS)
    store.close()


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    class Nearly(osio.Files):
        def free_bytes(self, path: str) -> tuple[int, int]:
            return 10 * SIZE, 100 * SIZE

    floor = settings(pages=16, extent_pages=4, free_floor_bytes=7 * SIZE)
    store = Store.open(tmp_path / "s", descriptor(), floor, files=Nearly())
    assert any("caching is off" in text for text in store.warnings)
    assert "stay free" in store.stat()["growth_blocked"]  # type: ignore[operator]
    store.close()


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("pwrite", errno.EIO, OSError),
        ("pwrite second half", errno.EIO, OSError),
        ("pwrite", errno.ENOSPC, StoreFull),
        ("pread", errno.EIO, OSError),
    ],
)
def test_an_io_error_in_a_seal_fails_that_page_only(
    tmp_path: Path, name: str, error: int, expected: type[Exception]
) -> None:
    files = CountedFiles(lambda name, number: None)
    store = Store.open(tmp_path / "s", descriptor(), settings(), files=files)
    lane = Lane(store)
    first = lane.add(ROOT_KEY, IDS[:256])[0]
    files.on_call = failing_files({name: 1}, error).on_call
    with pytest.raises(expected):
        lane.seal(ROOT_KEY, IDS[256:512])
    files.on_call = lambda name, number: None
    again = lane.add(ROOT_KEY, IDS[256:512])[0]
    assert store.pages.load([first, again]).result(20) == [True, True]
    assert store.stat()["seal_io_errors_total"] == 1
    lane.close()
    check_integrity(store)
    store.close()


def test_a_slot_that_fails_twice_is_retired_permanently(tmp_path: Path) -> None:
    files = CountedFiles(lambda name, number: None)
    store = Store.open(tmp_path / "s", descriptor(), settings(), files=files)
    lane = Lane(store)
    files.on_call = failing_files({"pwrite": 1}, errno.EIO).on_call
    for _ in range(2):
        with pytest.raises(OSError, match="error"):
            lane.seal(ROOT_KEY, IDS[:256])
    files.on_call = lambda name, number: None
    assert store.stat()["pages_bad"] == 1
    assert lane.add(ROOT_KEY, IDS[:256])[0].page_id == 1
    lane.close()
    store.close()
    store = Store.open(tmp_path / "s", descriptor(), settings())
    assert store.stat()["pages_bad"] == 1
    check_integrity(store)
    store.close()


def test_a_lost_write_is_detected_before_the_arena_copy_is_freed(tmp_path: Path) -> None:
    class LosingWrites(osio.Files):
        loses_writes = False

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return len(data) if self.loses_writes else super().pwrite(fd, data, offset)

    files = LosingWrites()
    store = Store.open(tmp_path / "s", descriptor(), settings(), files=files)
    lane = Lane(store)
    files.loses_writes = True
    with pytest.raises(StoreCorrupt, match="differs from what was written"):
        lane.seal(ROOT_KEY, IDS[:256])
    files.loses_writes = False
    lane.add_chain(IDS)
    lane.close()
    store.close()


def test_an_unreadable_page_is_recomputed(path: Path) -> None:
    files = failing_files({"pread": 1}, errno.EIO)
    store = reopened(path, files)
    assert store.pages.load(store.pages.match_prefix(IDS, SALT)).result(20) == [False] * 4
    files.on_call = lambda name, number: None
    lane = Lane(store, incarnation=2)
    lane.add_chain(IDS)
    lane.close()
    store.close()


def test_verify_invalidates_a_corrupt_page(path: Path) -> None:
    store = reopened(path)
    refs = store.pages.match_prefix(IDS, SALT)
    assert store.pages.load(refs).result(20) == [True] * 4
    pin(store, refs[1])
    edit(path / "ext" / "000001.kv", flip)
    assert [store.pages.verify(ref).result(20) for ref in refs] == [True, False, True, True]
    assert store.pages.match_prefix(IDS, SALT) == refs[:1]
    assert page_state(store, refs[1]) is PageState.QUARANTINE, "its reader still holds the place"
    store.pages.unpin(refs[1])
    assert store.pages.load([refs[1]]).result(20) == [False]
    check_integrity(store)
    store.close()


def test_a_failed_ledger_publishes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    lane = Lane(store)
    ticket = lane.seal(ROOT_KEY, IDS[:256])
    store.ledger._latch(OSError(errno.EIO, "injected"))
    future = store.pages.publish(ticket)
    with pytest.raises(LedgerError):
        future.result(20)
    assert store.pages.match_prefix(IDS, SALT) == []
    assert store.stat()["used_bytes"] == 0
    assert store.stat()["ledger_failed"]
    lane.close()
    check_integrity(store)
    store.close()


def test_a_failing_background_task_ends_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    lane = Lane(store)
    lane.add_chain(IDS)

    def broken(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(store.pages.allocator, "poison_one", broken)
    evict(store, 4)
    for _ in range(5):
        store.core.thread.submit(lambda: None).result(20)
    assert store.core.thread.alive
    lane.add_chain(IDS)
    lane.close()
    store.close()


# -- a really full file system ----------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with kv_scene.small_disk("size=3m") as folder:
        yield folder


def test_a_store_works_on_a_full_file_system(small_disk: Path) -> None:
    roomy = settings(pages=64, extent_pages=4, ballast_bytes=4 * SIZE)
    store = Store.open(small_disk / "s", descriptor(), roomy)
    lane, name = Lane(store, slots=2), 0
    while not store.stat()["growth_blocked"]:
        lane.add_chain(tokens_of(name, 1))
        wait_for_growth(store)
        name += 1
        assert name < 40
    (small_disk / "filler").write_bytes(bytes(64 << 10))
    with open(small_disk / "filler", "ab", buffering=0) as filler:
        while True:
            try:
                filler.write(bytes(4096))
            except OSError:
                break
    for again in range(100, 120):  # the slots that exist go on being used
        lane.add_chain(tokens_of(again, 1))
    assert len(store.pages.match_prefix(tokens_of(119, 1), SALT)) == 1
    open_session(store.ledger, "s", "t")
    done = 0
    while done < 2_000_000:
        append_tokens(store.ledger, "s", 1, done, range(done, done + 20_000))
        error = store.ledger.commit().exception(20)
        if error is not None:
            break
        done += 20_000
    assert isinstance(error, StoreFull)
    assert not os.path.exists(small_disk / "s" / "BALLAST"), "its bytes were spent first"
    os.unlink(small_disk / "filler")
    append_tokens(store.ledger, "s", 1, done, [7])
    store.ledger.commit().result(20)
    lane.close()
    store.close()
    store = Store.open(small_disk / "s", descriptor(), roomy)
    record = store.ledger.load_session("s").result(20)
    assert record is not None
    assert record.tokens == [*range(done), 7], "what was acknowledged is there, nothing else"
    store.close()


# -- kills ------------------------------------------------------------------------------------


def sweep(first: int, step: int) -> int:
    """Kill a workload at every step-th system call or SQL statement; returns the kills."""
    folders = scratch()
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kv_workload", str(first), str(step)],
        cwd=ROOT,
        env=os.environ | {"KV_CRASH_DIR": str(next(folders))},
        capture_output=True,
        text=True,
        timeout=110,
    )
    folders.close()
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split()[1])


def test_a_kill_at_many_points_leaves_a_prefix() -> None:
    assert sweep(2, 7) >= 90


@pytest.mark.slow
def test_a_kill_at_every_point_leaves_a_prefix(request: pytest.FixtureRequest) -> None:
    if "slow" not in request.config.option.markexpr:
        pytest.skip("all points: pytest -m slow")
    assert sweep(1, 1) >= 700
