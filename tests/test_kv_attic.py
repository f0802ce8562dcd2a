"""Arenas of earlier lives: kept, found by session, and deleted; a live writer's is left alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_store import (
    PAGE_TOKENS,
    Arena,
    ArenaMapping,
    Attic,
    AtticPlace,
    Descriptor,
    PageLayout,
    PlaceOwner,
    Store,
    osio,
)
from kv_store import attic as attic_module
from kv_store.arena import PLACE_HEADER, ArenaFile, ArenaShape, _file_header
from tests.kv_workload import LAYOUT, descriptor, failing_files, settings
from tests.test_lane_adopt import DAMAGE, header

REPR = bytes(range(32))
PLACES = 4
ROOT = Path(__file__).resolve().parent.parent


def write(mapping: ArenaMapping, place: int, owner: PlaceOwner, rows: int) -> None:
    """A place with `rows` recorded rows; the attic looks at records only."""
    mapping.reserve(place, owner)
    mapping.write_records(
        place, 0, np.arange(rows, dtype=np.uint32), np.arange(rows, dtype=np.uint64)
    )


def leave(folder: Path, name: str, *uses: tuple[int, PlaceOwner, int], **more: bytes) -> str:
    """An arena file as a dead worker leaves it."""
    path = str(folder / name)
    arena = Arena.create(path, LAYOUT, PLACES, 1, repr_id=more.get("repr_id", REPR))
    mapping = ArenaMapping(path, LAYOUT)
    for place, owner, rows in uses:
        write(mapping, place, owner, rows)
    mapping.close()
    arena.close(delete=False)
    return path


def open_attic(folder: Path, files: osio.Files | None = None) -> Attic:
    return Attic(str(folder), LAYOUT, REPR, files)


@pytest.fixture
def attic(tmp_path: Path) -> Iterator[Attic]:
    leave(
        tmp_path,
        "cpu.10001",
        (0, PlaceOwner(b"a", 2, 5, 0), 256),
        (1, PlaceOwner(b"a", 2, 0, 1), 30),
        (2, PlaceOwner(b"a", 1, 0, 1), 90),
        (3, PlaceOwner(b"b", 7, 0, 3), 1),
    )
    leave(
        tmp_path,
        "fast-1.10002",
        (3, PlaceOwner(b"a", 2, 1, 1), 44),
        (1, PlaceOwner(b"c", 1, 0, 0), 0),
    )
    made = open_attic(tmp_path)
    yield made
    made.close()


def test_places_are_found_by_session_and_epoch_in_page_order(attic: Attic) -> None:
    assert attic.find(b"a", 2) == [
        AtticPlace("cpu.10001", 0, 5, 0, 256),
        AtticPlace("fast-1.10002", 3, 1, 1, 44),  # more rows of the same page come first
        AtticPlace("cpu.10001", 1, 0, 1, 30),
    ]
    assert attic.find(b"a", 1) == [AtticPlace("cpu.10001", 2, 0, 1, 90)]
    assert attic.find(b"b", 7) == [AtticPlace("cpu.10001", 3, 0, 3, 1)]
    assert attic.find(b"a", 3) == attic.find(b"b", 1) == attic.find(b"zz", 1) == []
    assert attic.find(b"c", 1) == [], "a place without a row is nothing to adopt"
    assert attic.names == ("cpu.10001", "fast-1.10002")
    assert attic.bytes == sum(os.path.getsize(f"{attic._folder}/{name}") for name in attic.names)


def test_what_nobody_wants_is_swept(attic: Attic, tmp_path: Path) -> None:
    assert attic.sweep() == 0
    attic.forget(b"zz")
    attic.forget(b"a")
    attic.forget(b"a")
    assert attic.find(b"a", 2) == []
    assert attic.sweep() == 1
    assert sorted(os.listdir(tmp_path)) == ["cpu.10001"]
    assert attic.find(b"b", 7) != []
    attic.retain([b"b", b"zz"])
    assert attic.sweep() == 0
    attic.retain([])
    assert attic.sweep() == 1
    assert os.listdir(tmp_path) == []
    assert attic.bytes == 0
    assert attic.deleted == 2


def test_everything_is_swept_when_its_time_is_over(attic: Attic, tmp_path: Path) -> None:
    assert attic.sweep(everything=True) == 2
    assert os.listdir(tmp_path) == []
    assert attic.find(b"a", 2) == []


def test_close_leaves_the_files_and_gives_up_the_locks(attic: Attic, tmp_path: Path) -> None:
    other = open_attic(tmp_path)
    assert other.names == ()
    assert other.busy == ("cpu.10001", "fast-1.10002")
    assert other.sweep(everything=True) == 0
    attic.close()
    other.retry()
    assert other.busy == ()
    assert len(other.find(b"a", 2)) == 3
    other.close()


def test_an_arena_without_rows_is_deleted_at_once(tmp_path: Path) -> None:
    leave(tmp_path, "cpu.1")
    leave(tmp_path, "cpu.2", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    mapping = ArenaMapping(str(tmp_path / "cpu.2"), LAYOUT)
    mapping.poison(0)
    mapping.close()
    attic = open_attic(tmp_path)
    assert attic.names == ()
    assert os.listdir(tmp_path) == []
    assert (attic.deleted, attic.damaged) == (2, 0)


@pytest.mark.parametrize(
    ("what", "damage"),
    [d for d in DAMAGE if d[0] not in ("gone", "a link", "a folder", "a pipe", "arena id")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_or_foreign_arena_is_deleted_and_counted(
    what: str, damage: object, tmp_path: Path
) -> None:
    """F77, F12: never adopted from, and no reason to fail."""
    path = leave(tmp_path, "cpu.1", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    leave(tmp_path, "cpu.2", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    damage(path)  # type: ignore[operator]
    attic = open_attic(tmp_path)
    assert attic.names == ("cpu.2",)
    assert attic.damaged == attic.deleted == len(attic.warnings) == 1
    assert [place.arena for place in attic.find(b"a", 1)] == ["cpu.2"]
    attic.close()
    assert os.listdir(tmp_path) == ["cpu.2"]


def test_what_is_no_file_of_ours_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "arena"
    folder.mkdir()
    (folder / "cpu.1").symlink_to(outside)
    (folder / "cpu.2").mkdir()
    (folder / "notes.txt").write_text("precious")
    attic = open_attic(folder)
    assert attic.sweep(everything=True) == 0
    assert outside.read_bytes() == b"precious"
    assert sorted(os.listdir(folder)) == ["cpu.1", "cpu.2", "notes.txt"]
    assert len(attic.warnings) == 2
    (folder / "cpu.3").mkdir()
    os.mkfifo(folder / "gpu.1")
    attic = open_attic(folder)  # a pipe does not hold it
    assert "gpu.1" not in os.listdir(folder)
    attic.close()


def test_a_flipped_place_header_hides_that_place_alone(tmp_path: Path) -> None:
    path = leave(
        tmp_path,
        "cpu.1",
        (0, PlaceOwner(b"a", 1, 0, 0), 9),
        (1, PlaceOwner(b"a", 1, 0, 1), 9),
    )
    attic = open_attic(tmp_path)
    arena = attic._read("cpu.1", attic._held["cpu.1"].fd)
    assert len(arena) == 2
    attic.close()
    at = os.path.getsize(path) - PLACES * 8192 + 4096
    for offset in range(0, PLACE_HEADER.size - 8, 5):
        with open(path, "r+b") as file:
            file.seek(at + offset)
            byte = file.read(1)[0]
            file.seek(at + offset)
            file.write(bytes([byte ^ 1]))
            file.flush()
            attic = open_attic(tmp_path)
            assert [place.page_index for place in attic.find(b"a", 1)] == [1], offset
            attic.close()
            file.seek(at + offset)
            file.write(bytes([byte]))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_of_holes_costs_neither_memory_nor_a_descriptor(tmp_path: Path) -> None:
    """Its header asks for 128 GiB of sidecars; the file takes one block of the disk."""
    shape, before = ArenaShape(LAYOUT, 1 << 24), open_files()
    leave(tmp_path, "cpu.1", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    with open(tmp_path / "cpu.2", "wb") as file:
        file.write(_file_header(shape, bytes(16), 2, REPR))
        file.truncate(shape.file_bytes)
    attic = open_attic(tmp_path)
    assert attic.names == ("cpu.1",), "one that its creator allocated is whole"
    assert attic.damaged == attic.deleted == 1
    assert "holes" in attic.warnings[0]
    attic.close()
    assert open_files() == before


def test_an_arena_made_on_a_real_disk_has_no_holes(tmp_path: Path) -> None:
    for folder in (tmp_path, Path("/dev/shm")):
        path = str(folder / f"cpu.{os.getpid()}")
        arena = Arena.create(path, LAYOUT, PLACES, 1)
        try:
            ArenaFile.read(arena.fd, LAYOUT).check_allocated()
        finally:
            arena.close(delete=True)


def test_places_are_found_whatever_slice_of_sidecars_they_are_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = [(place, PlaceOwner(b"a", 1, 0, place), place + 1) for place in range(PLACES)]
    leave(tmp_path, "cpu.1", *uses)
    for places in (1, 3, PLACES, PLACES + 1):
        monkeypatch.setattr(attic_module, "_SLICE_PLACES", places)
        attic = open_attic(tmp_path)
        found = attic.find(b"a", 1)
        assert [(at.place, at.page_index, at.rows) for at in found] == [
            (place, place, place + 1) for place in range(PLACES)
        ]
        attic.close()


def test_an_error_that_nobody_expects_leaks_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, "cpu.1", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    before = open_files()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Attic, "_read", fail)
    with pytest.raises(MemoryError):
        open_attic(tmp_path)
    assert open_files() == before
    assert os.listdir(tmp_path) == ["cpu.1"]


def test_a_file_that_cannot_be_read_is_deleted(tmp_path: Path) -> None:
    leave(tmp_path, "cpu.1", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    attic = open_attic(tmp_path, failing_files({"pread": 1}, errno.EIO))
    assert attic.damaged == 1
    assert os.listdir(tmp_path) == []


ZOMBIE = """
import sys
from kv_store import ArenaMapping, PageLayout
mapping = ArenaMapping(sys.argv[1], PageLayout(*map(int, sys.argv[2:])))
print("locked", flush=True)
sys.stdin.readline()
"""


def test_a_lingering_writer_keeps_its_arena_to_itself(tmp_path: Path) -> None:
    """F79: neither adopted nor deleted while it may still write; both once it has ended."""
    path = leave(tmp_path, "cpu.1", (0, PlaceOwner(b"a", 1, 0, 0), 9))
    shape = [str(n) for n in (LAYOUT.n_layer, LAYOUT.n_kv_head, LAYOUT.head_dim)]
    zombie = subprocess.Popen(
        [sys.executable, "-c", ZOMBIE, path, *shape],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert zombie.stdout is not None
    assert zombie.stdin is not None
    with zombie.stdout, zombie.stdin:
        assert zombie.stdout.readline() == b"locked\n"
        attic = open_attic(tmp_path)
        assert attic.busy == ("cpu.1",)
        assert attic.find(b"a", 1) == []
        assert attic.sweep(everything=True) == 0
        assert os.path.exists(path)
        zombie.kill()
        zombie.wait()
    attic.retry()
    assert attic.busy == ()
    assert len(attic.find(b"a", 1)) == 1
    attic.forget(b"a")
    assert attic.sweep() == 1
    assert not os.path.exists(path)


def test_a_new_arena_of_this_life_is_not_taken_for_an_old_one(attic: Attic, tmp_path: Path) -> None:
    """Its worker locks it a moment after the engine made it."""
    fresh = Arena.create(str(tmp_path / "cpu.20001"), LAYOUT, PLACES, 1, repr_id=REPR)
    attic.sweep(everything=True)
    ArenaMapping(fresh.path, LAYOUT).close()
    fresh.close(delete=True)


# ------------------------------------------------------------------------------ in the store


def open_store(folder: Path, *, keep: bool = True, describe: Descriptor | None = None) -> Store:
    return Store.open(folder / "kv", describe or descriptor(), settings(keep_arenas=keep))


def use(store: Store) -> None:
    """A life that ends without deleting its arena."""
    arena = store.create_arena("cpu", store.epoch * 10_000 + 1, PLACES)
    mapping = ArenaMapping(arena.path, store.layout)
    write(mapping, 2, PlaceOwner(b"s", 3, 0, 1), 17)
    mapping.close()
    arena.close(delete=False)
    store.close()


def test_the_next_life_finds_what_the_last_one_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.attic.names == ()
    use(store)
    store = open_store(tmp_path)
    assert store.attic.find(b"s", 3) == [AtticPlace("cpu.10001", 2, 0, 1, 17)]
    store.close()
    store = open_store(tmp_path)  # and the one after it, if nobody adopted
    assert len(store.attic.find(b"s", 3)) == 1
    store.attic.forget(b"s")
    store.attic.sweep()
    assert os.listdir(tmp_path / "kv/arena") == []
    store.close()


def test_arenas_are_deleted_where_they_cannot_be_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not asked for; after a reboot; written by another model; in another layout."""
    lives = [
        ("not kept", lambda: open_store(tmp_path, keep=False)),
        ("model", lambda: open_store(tmp_path, describe=descriptor(model_hash="ef" * 32))),
        ("layout", lambda: open_store(tmp_path, describe=descriptor(PageLayout(3, 1, 32)))),
    ]
    for name, reopen in lives:
        use(open_store(tmp_path))
        store = reopen()
        assert store.attic.find(b"s", 3) == [], name
        assert store.recovery.arenas_deleted == 1, name
        assert os.listdir(tmp_path / "kv/arena") == [], name
        store.close()
    use(open_store(tmp_path))
    monkeypatch.setattr(osio, "boot_id", lambda: "another boot")
    store = open_store(tmp_path)
    assert store.attic.names == ()
    assert store.recovery.arenas_deleted == 1
    assert os.listdir(tmp_path / "kv/arena") == []
    store.close()


def test_a_copied_directory_of_this_boot_holds_no_arena_of_another(tmp_path: Path) -> None:
    use(open_store(tmp_path))
    header(str(tmp_path / "kv/arena/cpu.10001"), boot=b"another boot")
    store = open_store(tmp_path)
    assert store.attic.names == ()
    assert store.attic.damaged == 1
    store.close()


def test_the_attic_counts_every_row_of_a_full_place(tmp_path: Path) -> None:
    leave(tmp_path, "cpu.1", (0, PlaceOwner(b"a", 1, 0, 0), PAGE_TOKENS))
    attic = open_attic(tmp_path)
    assert attic.find(b"a", 1)[0].rows == PAGE_TOKENS
    attic.close()
