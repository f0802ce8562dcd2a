"""Lost ledger records and a full disk are reported in warnings, health, fsck and stat."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kv_store.errors import StoreError
from kv_store.fsck import fsck
from kv_store.ledger import continuity
from kv_store.store import Store, set_aside, take_lock
from tests.support import kv_scene
from tests.support.engines import Site, running_engine
from tests.support.kv_workload import (
    append_tokens,
    descriptor,
    open_session,
    settings,
)

MIB = 1 << 20
LOST = "lost what was written last"
tmp_path = kv_scene.tmp_path
Damage = Callable[[Path], object]


def opened(path: Path) -> closing[Store]:
    return closing(Store.open(path, descriptor(), settings(keep_arenas=True)))


def write(store: Store, first: int, last: int) -> None:
    """Acknowledged commits, one per number, of a few pages each."""
    for number in range(first, last):
        append_tokens(store.ledger, "s", 1, number * 3000, range(3000))
        store.ledger.commit().result(20)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A store whose second run was killed: the ledger's log holds all of that run."""
    path, copy = tmp_path / "first", tmp_path / "kv"
    with opened(path) as store:
        open_session(store.ledger, "s", "t")
        write(store, 0, 1)
    with opened(path) as store:
        write(store, 1, 20)
        store.create_arena("cpu", store.epoch * continuity.INCARNATIONS + 1, 2).close(delete=False)
        shutil.copytree(path, copy)  # as SIGKILL leaves it
    return copy


def checkpointed(path: Path) -> None:
    """As if a checkpoint had run before: the file has the epoch, and the log is needed."""
    with closing(sqlite3.connect(path / "meta.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    (path / "meta.db-wal").unlink(missing_ok=True)


def cut(path: Path, size: int) -> None:
    os.truncate(path / "meta.db-wal", size)


def flip(path: Path, at: int) -> None:
    with open(path / "meta.db-wal", "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def zero(path: Path) -> None:
    log = path / "meta.db-wal"
    log.write_bytes(bytes(log.stat().st_size))


def without_lock(damage: Damage) -> Damage:
    def both(path: Path) -> None:
        damage(path)
        (path / "LOCK").unlink()

    return both


DAMAGES: dict[str, Damage] = {
    "deleted": lambda path: (path / "meta.db-wal").unlink(),
    "emptied": lambda path: cut(path, 0),
    "cut to 33 bytes": lambda path: cut(path, 33),
    "zeroed": zero,
    "flipped in the head": lambda path: flip(path, 17),
    "flipped at the front": lambda path: flip(path, 32 + 24 + 100),
    "flipped in the middle": lambda path: flip(path, 32 + 4120 * 20 + 2000),
    "deleted after a checkpoint": checkpointed,
    "deleted, and LOCK too": without_lock(lambda path: (path / "meta.db-wal").unlink()),
    "deleted after a checkpoint, and LOCK too": without_lock(checkpointed),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_lost_ledger_log_is_reported_and_no_epoch_is_used_twice(killed: Path, name: str) -> None:
    """Otherwise sessions are missing or older without a report, and the epoch of the lost run is
    used again, so that rows of its arena pass as rows of the new one."""
    DAMAGES[name](killed)
    report = fsck(killed)
    assert [f.severity for f in report.findings if LOST in f.what] == ["warning"]
    with opened(killed) as store:
        assert store.epoch == 3, "the run that is lost was the second"
        assert [LOST in text for text in store.losses] == [True]
        assert store.losses[0] in store.warnings
        assert store.losses == store.troubles
        assert LOST in str(store.stat()["ledger_lost"])
        store.create_arena("cpu", store.epoch * continuity.INCARNATIONS + 1, 2).close(delete=True)
    with opened(killed) as store:
        assert (store.epoch, store.losses) == (4, [])
    assert not any(LOST in f.what for f in fsck(killed).findings)


def test_a_first_run_that_lost_everything_is_reported(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        open_session(store.ledger, "s", "t")
        store.ledger.commit().result(20)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "meta.db-wal").unlink()
    with opened(tmp_path / "b") as store:
        assert store.epoch == 2
        assert any("its ledger is gone or empty" in text for text in store.troubles)


@pytest.mark.parametrize("name", ["killed", "torn", "old LOCK", "no LOCK", "junk LOCK", "repaired"])
def test_a_killed_store_reports_no_loss(killed: Path, name: str) -> None:
    """A last commit torn by a crash was never acknowledged; other states report no loss either."""
    lock = killed / "LOCK"
    match name:
        case "torn":
            flip(killed, (killed / "meta.db-wal").stat().st_size - 2000)
        case "old LOCK":
            info = json.loads(lock.read_text())
            del info["closed"], info["lost"]
            lock.write_text(json.dumps(info))
        case "no LOCK":
            lock.unlink()
        case "junk LOCK":
            lock.write_text('{"epoch": 9e99, "closed": 7, "lost": [1]}' + "[" * 9000)
        case "repaired":
            assert fsck(killed, repair=True).ok
        case _:
            pass
    with opened(killed) as store:
        assert (store.epoch, store.losses) == (3, [])
        record = store.ledger.load_session("s").result(20)
        assert record is not None
        assert len(record.tokens) >= 3000 * 19


def test_a_repair_does_not_hide_the_loss_from_the_next_opening(killed: Path) -> None:
    DAMAGES["flipped in the middle"](killed)
    assert fsck(killed, repair=True).ok
    with opened(killed) as store:
        assert [LOST in text for text in store.losses] == [True]


def test_a_failed_opening_neither_reports_nor_hides_a_loss(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("no")

    whole = killed.with_name("whole")
    shutil.copytree(killed, whole)
    DAMAGES["flipped in the middle"](killed)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "_recover", fail)
        for path in (killed, whole):
            with pytest.raises(StoreError):
                Store.open(path, descriptor(), settings())
            assert not (path / "meta.db-wal").exists()
    with opened(whole) as store:
        assert (store.losses, store.epoch) == ([], 4)
    with opened(killed) as store:
        assert [LOST in text for text in store.losses] == [True]


def test_implausible_numbers_do_not_change_the_epoch(killed: Path) -> None:
    (killed / "arena" / "cpu.9999999999").write_bytes(b"x")
    (killed / "LOCK").write_text(json.dumps({"epoch": 1 << 62, "closed": False}))
    with opened(killed) as store:
        assert (store.epoch, store.losses) == (3, [])


@pytest.mark.parametrize("number", [1_999_999_999, 2_000_009_999, 4_299_999_999, 9_999_999_999])
def test_no_arena_file_name_prevents_new_arenas(killed: Path, number: int) -> None:
    """A plausible epoch is continued; an implausible one is reported and ignored."""
    name = f"cpu.{number}"
    (killed / "arena" / name).write_bytes(b"")
    plausible = number // continuity.INCARNATIONS <= continuity.EPOCH_PLAUSIBLE_MAX
    reported = [finding.what for finding in fsck(killed).findings if "is ignored" in finding.what]
    assert [name in text for text in reported] == ([] if plausible else [True])
    for _ in range(3):
        with opened(killed) as store:
            assert (store.epoch > 1000) == plausible
            if not plausible:
                assert any(name in text and "is ignored" in text for text in store.warnings)
            number = store.epoch * continuity.INCARNATIONS + continuity.INCARNATIONS - 1
            store.create_arena("cpu", number, 1).close(delete=True)
        (killed / "arena" / name).write_bytes(b"")


def test_an_arena_number_fits_its_header(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        store.create_arena("cpu", 0xFFFFFFFF, 1).close(delete=True)
        for number in (1 << 32, -1):
            with pytest.raises(StoreError, match="number"):
                store.create_arena("cpu", number, 1)
        assert os.listdir(tmp_path / "s" / "arena") == []


def test_the_write_ahead_log_is_read_as_sqlite_reads_it(killed: Path) -> None:
    """Every frame of a complete log is valid; frames of older salts after its end are ignored."""
    log = killed / "meta.db-wal"
    data = log.read_bytes()
    assert continuity.check_log(str(log)) == ""
    frame = bytearray(data[32 : 32 + 4120])
    struct.pack_into(">2I", frame, 4, 7, 123)  # a commit, of another salt
    log.write_bytes(data + bytes(frame) * 5)
    assert continuity.check_log(str(log)) == ""
    for at in (32 + 3, 32 + 9, 32 + 17, 32 + 24, 32 + 4119, 32 + 4120 * 3 + 24):
        log.write_bytes(data)
        flip(killed, at)
        assert "commits" in continuity.check_log(str(log)), at
    log.write_bytes(data)
    os.truncate(log, len(data) - 1)
    assert continuity.check_log(str(log)) == "", "the last commit is torn"


def test_a_lock_is_written_in_place_and_read_back(tmp_path: Path) -> None:
    fd = take_lock(str(tmp_path))
    files = continuity.osio.Files()
    continuity.write_opening(files, fd, "u", "b", continuity.Opening(7, False, "x" * 500))
    continuity.mark_closed(files, fd)
    os.close(fd)
    text = json.loads((tmp_path / "LOCK").read_text())
    assert (text["epoch"], text["closed"], text["lost"]) == (7, True, "")
    assert (text["pid"], text["store_uuid"]) == (os.getpid(), "u")


def test_setting_a_ledger_aside_is_reported_in_that_run_only(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    with opened(path):
        pass
    (path / "meta.db").write_bytes(b"not a database" * 1000)
    with opened(path) as store:
        assert store.epoch == 2
        assert [("kept as meta.db.damaged-1" in text) for text in store.troubles] == [True]
    with opened(path) as store:
        assert (store.epoch, store.troubles) == (3, [])


def test_a_new_ledger_never_reads_the_log_of_one_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any rename: no log has the name that a new ledger reads, and none is lost."""
    db, log = tmp_path / "meta.db", tmp_path / "meta.db-wal"
    rename = os.rename

    def killed_after_one(source: str, target: str) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    db.write_bytes(b"old")
    log.write_bytes(b"log")
    monkeypatch.setattr(os, "rename", killed_after_one)
    with pytest.raises(KeyboardInterrupt):
        set_aside(str(db))
    monkeypatch.undo()
    assert db.exists() > log.exists()
    log.write_bytes(b"new log")
    assert set_aside(str(db)) == "meta.db.damaged-2"
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert left == {
        "meta.db.damaged-1-wal": b"log",
        "meta.db.damaged-2": b"old",
        "meta.db.damaged-2-wal": b"new log",
    }


def test_a_full_disk_is_reported_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    with kv_scene.small_disk("size=8m") as folder:
        kept = settings(4, 4, ballast_bytes=MIB)
        store = Store.open(Path(folder) / "s", descriptor(), kept)
        assert store.troubles == []
        filler = Path(folder) / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        open_session(store.ledger, "s", "t")
        append_tokens(store.ledger, "s", 1, 0, range(100_000))
        store.ledger.commit().result(20)
        (trouble,) = store.troubles
        assert "the spare bytes in BALLAST are spent" in trouble
        assert store.stat()["ballast"] == trouble
        for _ in range(3):
            store.maintain()
            store.core.thread.submit(lambda: None).result(20)
        assert store.troubles == [trouble]
        filler.unlink()
        store.maintain()
        store.core.thread.submit(lambda: None).result(20)
        assert store.troubles == []
        lines = [record.getMessage() for record in caplog.records if "BALLAST" in record.message]
        assert [("spent" in line, "back" in line) for line in lines] == [
            (True, False), (False, True)
        ]  # fmt: skip
        store.close()


async def test_health_reports_a_loss(site: Site) -> None:
    def folder() -> Path:
        (ledger,) = site.folder.rglob("meta.db")
        return ledger.parent

    async with running_engine(site) as engine:
        assert engine.stats()["troubles"] == []
    path = folder()
    with closing(sqlite3.connect(path / "meta.db")) as db:
        db.execute("UPDATE store SET clean = 0")
        db.commit()
    info = json.loads((path / "LOCK").read_text()) | {"closed": False}
    (path / "LOCK").write_text(json.dumps(info))  # as if killed, and its log taken
    async with running_engine(site) as engine:
        (trouble,) = engine.stats()["troubles"]
        assert LOST in trouble
        assert engine.phase == "degraded"
