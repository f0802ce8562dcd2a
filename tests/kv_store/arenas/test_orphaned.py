"""Arenas of earlier runs: kept, found by session, and deleted, but not while a writer lives."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kv_store import osio
from kv_store.arenas import orphaned as orphaned_module
from kv_store.arenas.arena import (
    SLOT_HEADER,
    Arena,
    ArenaFile,
    ArenaMapping,
    ArenaShape,
    SlotOwner,
    _file_header,
)
from kv_store.arenas.orphaned import OrphanedArenas, OrphanedSlot, oldest_beyond
from kv_store.layout import PAGE_TOKENS, Descriptor, PageLayout
from kv_store.store import Store
from tests.kv.test_importing import DAMAGE, header
from tests.support.kv_workload import LAYOUT, descriptor, failing_files, settings

REPR = bytes(range(32))
SLOTS = 4
ROOT = Path(__file__).resolve().parents[3]


def write(mapping: ArenaMapping, slot: int, owner: SlotOwner, rows: int) -> None:
    """A slot with `rows` recorded rows; `OrphanedArenas` reads records only."""
    mapping.reserve(slot, owner)
    mapping.write_records(
        slot, 0, np.arange(rows, dtype=np.uint32), np.arange(rows, dtype=np.uint64)
    )


def leave(folder: Path, name: str, *uses: tuple[int, SlotOwner, int], **more: bytes) -> str:
    """An arena file as a dead worker leaves it."""
    path = str(folder / name)
    arena = Arena.create(path, LAYOUT, SLOTS, 1, repr_id=more.get("repr_id", REPR))
    mapping = ArenaMapping(path, LAYOUT)
    for slot, owner, rows in uses:
        write(mapping, slot, owner, rows)
    mapping.close()
    arena.close(delete=False)
    return path


def open_orphaned(folder: Path, files: osio.Files | None = None) -> OrphanedArenas:
    return OrphanedArenas(str(folder), LAYOUT, REPR, files)


@pytest.fixture
def orphaned(tmp_path: Path) -> Iterator[OrphanedArenas]:
    leave(
        tmp_path,
        "cpu.10001",
        (0, SlotOwner(b"a", 2, 5, 0), 256),
        (1, SlotOwner(b"a", 2, 0, 1), 30),
        (2, SlotOwner(b"a", 1, 0, 1), 90),
        (3, SlotOwner(b"b", 7, 0, 3), 1),
    )
    leave(
        tmp_path,
        "fast-1.10002",
        (3, SlotOwner(b"a", 2, 1, 1), 44),
        (1, SlotOwner(b"c", 1, 0, 0), 0),
    )
    made = open_orphaned(tmp_path)
    yield made
    made.close()


def test_slots_are_found_by_session_and_epoch_in_page_order(orphaned: OrphanedArenas) -> None:
    assert orphaned.find(b"a", 2) == [
        OrphanedSlot("cpu.10001", 0, 5, 0, 256),
        OrphanedSlot("fast-1.10002", 3, 1, 1, 44),  # more rows of the same page come first
        OrphanedSlot("cpu.10001", 1, 0, 1, 30),
    ]
    assert orphaned.find(b"a", 1) == [OrphanedSlot("cpu.10001", 2, 0, 1, 90)]
    assert orphaned.find(b"b", 7) == [OrphanedSlot("cpu.10001", 3, 0, 3, 1)]
    assert orphaned.find(b"a", 3) == orphaned.find(b"b", 1) == orphaned.find(b"zz", 1) == []
    assert orphaned.find(b"c", 1) == [], "a place without a row is nothing to adopt"
    assert orphaned.names == ("cpu.10001", "fast-1.10002")


def test_a_lookup_does_not_wait_for_the_deletions_of_a_sweep(
    orphaned: OrphanedArenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop looks sessions up while a thread deletes gigabytes."""
    deleting, lookup_done, unlink = threading.Event(), threading.Event(), os.unlink

    def slow_unlink(path: str) -> None:
        deleting.set()
        assert lookup_done.wait(20)
        unlink(path)

    monkeypatch.setattr(os, "unlink", slow_unlink)
    with ThreadPoolExecutor(2) as pool:
        sweep = pool.submit(orphaned.sweep)
        assert deleting.wait(20)
        lookup = pool.submit(orphaned.find, b"b", 7)
        try:
            assert lookup.result(5) == []
        finally:
            lookup_done.set()
        assert sweep.result(20) == 2


def test_a_sweep_deletes_every_arena(orphaned: OrphanedArenas, tmp_path: Path) -> None:
    assert orphaned.sweep() == 2
    assert os.listdir(tmp_path) == []
    assert orphaned.find(b"a", 2) == []


def test_close_leaves_the_files_and_releases_the_locks(
    orphaned: OrphanedArenas, tmp_path: Path
) -> None:
    other = open_orphaned(tmp_path)
    assert other.names == ()
    assert other.busy == ("cpu.10001", "fast-1.10002")
    assert other.sweep() == 0
    orphaned.close()
    other.retry()
    assert other.busy == ()
    assert len(other.find(b"a", 2)) == 3
    other.close()


def test_an_arena_without_rows_is_deleted_at_once(tmp_path: Path) -> None:
    leave(tmp_path, "cpu.1")
    leave(tmp_path, "cpu.2", (0, SlotOwner(b"a", 1, 0, 0), 9))
    mapping = ArenaMapping(str(tmp_path / "cpu.2"), LAYOUT)
    mapping.poison(0)
    mapping.close()
    orphaned = open_orphaned(tmp_path)
    assert orphaned.names == ()
    assert os.listdir(tmp_path) == []
    assert orphaned.warnings == []


@pytest.mark.parametrize(
    ("what", "damage"),
    [d for d in DAMAGE if d[0] not in ("gone", "a link", "a folder", "a pipe", "arena id")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_or_foreign_arena_is_deleted_and_counted(
    what: str, damage: object, tmp_path: Path
) -> None:
    """F77, F12: nothing is imported from it, and the store opens."""
    path = leave(tmp_path, "cpu.1", (0, SlotOwner(b"a", 1, 0, 0), 9))
    leave(tmp_path, "cpu.2", (0, SlotOwner(b"a", 1, 0, 0), 9))
    damage(path)  # type: ignore[operator]
    orphaned = open_orphaned(tmp_path)
    assert orphaned.names == ("cpu.2",)
    assert len(orphaned.warnings) == 1
    assert [slot.arena for slot in orphaned.find(b"a", 1)] == ["cpu.2"]
    orphaned.close()
    assert os.listdir(tmp_path) == ["cpu.2"]


def test_the_oldest_arenas_beyond_the_bound_are_named() -> None:
    sizes = {"cpu.10001": 10, "cpu.20001": 10, "cpu.100001": 10, "gpu.20002": 10}
    assert oldest_beyond(sizes, 40) == []
    assert oldest_beyond(sizes, 39) == ["cpu.10001"]
    assert oldest_beyond(sizes, 20) == ["cpu.20001", "cpu.10001"]
    assert oldest_beyond(sizes, 0) == ["cpu.20001", "cpu.10001"], "the newest of each lane stays"
    assert oldest_beyond({}, 0) == []


def test_arenas_of_many_killed_runs_are_bounded(tmp_path: Path) -> None:
    """The newest ones stay, and no entry points into a deleted one."""
    for run in range(1, 6):
        leave(tmp_path, f"cpu.{run}0001", (0, SlotOwner(b"a", 1, 0, 0), run))
    size = os.path.getsize(tmp_path / "cpu.10001")
    before = open_files()
    orphaned = OrphanedArenas(str(tmp_path), LAYOUT, REPR, None, 2 * size)
    assert orphaned.names == ("cpu.40001", "cpu.50001")
    assert sorted(os.listdir(tmp_path)) == ["cpu.40001", "cpu.50001"]
    assert [slot.arena for slot in orphaned.find(b"a", 1)] == ["cpu.50001", "cpu.40001"]
    assert len(orphaned.warnings) == 1
    orphaned.erase(b"a")
    assert orphaned.sweep() == 2
    assert open_files() == before
    assert os.listdir(tmp_path) == []


def test_files_that_are_not_arenas_are_left(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "arena"
    folder.mkdir()
    (folder / "cpu.1").symlink_to(outside)
    (folder / "cpu.2").mkdir()
    (folder / "notes.txt").write_text("precious")
    orphaned = open_orphaned(folder)
    assert orphaned.sweep() == 0
    assert outside.read_bytes() == b"precious"
    assert sorted(os.listdir(folder)) == ["cpu.1", "cpu.2", "notes.txt"]
    assert len(orphaned.warnings) == 2
    (folder / "cpu.3").mkdir()
    os.mkfifo(folder / "gpu.1")
    orphaned = open_orphaned(folder)  # a pipe does not hold it
    assert "gpu.1" not in os.listdir(folder)
    orphaned.close()


def test_a_flipped_slot_header_hides_that_slot_only(tmp_path: Path) -> None:
    path = leave(
        tmp_path,
        "cpu.1",
        (0, SlotOwner(b"a", 1, 0, 0), 9),
        (1, SlotOwner(b"a", 1, 0, 1), 9),
    )
    orphaned = open_orphaned(tmp_path)
    arena = orphaned._read("cpu.1", orphaned._held["cpu.1"])
    assert len(arena) == 2
    orphaned.close()
    at = os.path.getsize(path) - SLOTS * 8192 + 4096
    for offset in range(0, SLOT_HEADER.size - 8, 5):
        with open(path, "r+b") as file:
            file.seek(at + offset)
            byte = file.read(1)[0]
            file.seek(at + offset)
            file.write(bytes([byte ^ 1]))
            file.flush()
            orphaned = open_orphaned(tmp_path)
            assert [slot.page_index for slot in orphaned.find(b"a", 1)] == [1], offset
            orphaned.close()
            file.seek(at + offset)
            file.write(bytes([byte]))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_sparse_file_costs_neither_memory_nor_a_descriptor(tmp_path: Path) -> None:
    """Its header asks for 128 GiB of sidecars; the file takes one block of the disk."""
    shape, before = ArenaShape(LAYOUT, 1 << 24), open_files()
    leave(tmp_path, "cpu.1", (0, SlotOwner(b"a", 1, 0, 0), 9))
    with open(tmp_path / "cpu.2", "wb") as file:
        file.write(_file_header(shape, bytes(16), 2, REPR))
        file.truncate(shape.file_bytes)
    orphaned = open_orphaned(tmp_path)
    assert orphaned.names == ("cpu.1",), "one that its creator allocated is whole"
    assert len(orphaned.warnings) == 1
    assert "holes" in orphaned.warnings[0]
    orphaned.close()
    assert open_files() == before


def test_an_arena_made_on_a_real_disk_has_no_holes(tmp_path: Path) -> None:
    for folder in (tmp_path, Path("/dev/shm")):
        path = str(folder / f"cpu.{os.getpid()}")
        arena = Arena.create(path, LAYOUT, SLOTS, 1)
        try:
            ArenaFile.read(arena.fd, LAYOUT).check_allocated()
        finally:
            arena.close(delete=True)


def test_slots_are_found_in_every_slice_of_sidecars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = [(slot, SlotOwner(b"a", 1, 0, slot), slot + 1) for slot in range(SLOTS)]
    leave(tmp_path, "cpu.1", *uses)
    for slots in (1, 3, SLOTS, SLOTS + 1):
        monkeypatch.setattr(orphaned_module, "_SLICE_SLOTS", slots)
        orphaned = open_orphaned(tmp_path)
        found = orphaned.find(b"a", 1)
        assert [(at.slot, at.page_index, at.rows) for at in found] == [
            (slot, slot, slot + 1) for slot in range(SLOTS)
        ]
        orphaned.close()


def test_an_unexpected_error_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, "cpu.1", (0, SlotOwner(b"a", 1, 0, 0), 9))
    before = open_files()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(OrphanedArenas, "_read", fail)
    with pytest.raises(MemoryError):
        open_orphaned(tmp_path)
    assert open_files() == before
    assert os.listdir(tmp_path) == ["cpu.1"]


def test_a_file_that_cannot_be_read_is_deleted(tmp_path: Path) -> None:
    leave(tmp_path, "cpu.1", (0, SlotOwner(b"a", 1, 0, 0), 9))
    orphaned = open_orphaned(tmp_path, failing_files({"pread": 1}, errno.EIO))
    assert len(orphaned.warnings) == 1
    assert os.listdir(tmp_path) == []


ZOMBIE = """
import sys
from kv_store.arenas.arena import ArenaMapping
from kv_store.layout import PageLayout
mapping = ArenaMapping(sys.argv[1], PageLayout.uniform(*map(int, sys.argv[2:])))
print("locked", flush=True)
sys.stdin.readline()
"""


def test_an_arena_whose_writer_lingers_is_neither_imported_nor_deleted(tmp_path: Path) -> None:
    """F79: it may still write; once it has ended, its arena is imported and deleted."""
    path = leave(tmp_path, "cpu.1", (0, SlotOwner(b"a", 1, 0, 0), 9))
    shape = [str(n) for n in (LAYOUT.n_layer, *LAYOUT.layers[0])]
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, path, *shape],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert zombie.stdout is not None
    assert zombie.stdin is not None
    with zombie.stdout, zombie.stdin:
        assert zombie.stdout.readline() == b"locked\n"
        orphaned = open_orphaned(tmp_path)
        assert orphaned.busy == ("cpu.1",)
        assert orphaned.find(b"a", 1) == []
        assert orphaned.sweep() == 0
        assert os.path.exists(path)
        zombie.kill()
        zombie.wait()
    orphaned.retry()
    assert orphaned.busy == ()
    assert len(orphaned.find(b"a", 1)) == 1
    assert orphaned.sweep() == 1
    assert not os.path.exists(path)


def test_a_new_arena_of_this_run_is_not_treated_as_orphaned(
    orphaned: OrphanedArenas, tmp_path: Path
) -> None:
    """Its worker locks it a moment after the engine made it."""
    fresh = Arena.create(str(tmp_path / "cpu.20001"), LAYOUT, SLOTS, 1, repr_id=REPR)
    orphaned.sweep()
    ArenaMapping(fresh.path, LAYOUT).close()
    fresh.close(delete=True)


# ------------------------------------------------------------------------------ in the store


def open_store(folder: Path, *, keep: bool = True, describe: Descriptor | None = None) -> Store:
    return Store.open(folder / "kv", describe or descriptor(), settings(keep_arenas=keep))


def use(store: Store) -> None:
    """A run that ends without deleting its arena."""
    arena = store.create_arena("cpu", store.epoch * 10_000 + 1, SLOTS)
    mapping = ArenaMapping(arena.path, store.pages.layout)
    write(mapping, 2, SlotOwner(b"s", 3, 0, 1), 17)
    mapping.close()
    arena.close(delete=False)
    store.close()


def test_the_next_run_finds_arenas_of_the_last_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.orphaned.names == ()
    use(store)
    store = open_store(tmp_path)
    assert store.orphaned.find(b"s", 3) == [OrphanedSlot("cpu.10001", 2, 0, 1, 17)]
    store.close()
    store = open_store(tmp_path)  # and the one after it, if nothing was imported
    assert len(store.orphaned.find(b"s", 3)) == 1
    store.orphaned.sweep()
    assert os.listdir(tmp_path / "kv/arena") == []
    store.close()


def test_arenas_of_killed_runs_take_a_share_of_the_budget(tmp_path: Path) -> None:
    for _ in range(4):
        use(open_store(tmp_path))
    store = open_store(tmp_path)
    assert store.orphaned.names == ("cpu.40001",)
    assert any("arenas of killed runs were deleted" in text for text in store.warnings)
    store.close()


def test_arenas_of_another_boot_model_or_layout_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the store is opened without keeping arenas."""
    lives = [
        ("not kept", lambda: open_store(tmp_path, keep=False)),
        ("model", lambda: open_store(tmp_path, describe=descriptor(model_hash="ef" * 32))),
        ("layout", lambda: open_store(tmp_path, describe=descriptor(PageLayout.uniform(3, 1, 32)))),
    ]
    for name, reopen in lives:
        use(open_store(tmp_path))
        store = reopen()
        assert store.orphaned.find(b"s", 3) == [], name
        assert os.listdir(tmp_path / "kv/arena") == [], name
        store.close()
    use(open_store(tmp_path))
    monkeypatch.setattr(osio, "boot_id", lambda: "another boot")
    store = open_store(tmp_path)
    assert store.orphaned.names == ()
    assert os.listdir(tmp_path / "kv/arena") == []
    store.close()


def test_a_copied_directory_of_this_boot_holds_no_arena_of_another(tmp_path: Path) -> None:
    use(open_store(tmp_path))
    header(str(tmp_path / "kv/arena/cpu.10001"), boot=b"another boot")
    store = open_store(tmp_path)
    assert store.orphaned.names == ()
    assert len(store.orphaned.warnings) == 1
    store.close()


def test_every_row_of_a_full_slot_is_counted(tmp_path: Path) -> None:
    leave(tmp_path, "cpu.1", (0, SlotOwner(b"a", 1, 0, 0), PAGE_TOKENS))
    orphaned = open_orphaned(tmp_path)
    assert orphaned.find(b"a", 1)[0].rows == PAGE_TOKENS
    orphaned.close()
