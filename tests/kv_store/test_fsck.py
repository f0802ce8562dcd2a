"""fsck: every kind of damage is found, nothing changes without --repair, repairs are complete."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bench.processes.store_check import check_integrity
from kv_store import keys
from kv_store.arenas.arena import ArenaMapping, SlotOwner
from kv_store.errors import StoreCorrupt, StoreError, StoreLocked, StoreUnsupported, StoreVersion
from kv_store.fsck import FsckReport, fsck
from kv_store.ledger import writes
from kv_store.store import Store
from service.cli.store import fsck as check_command
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    Lane,
    append_tokens,
    append_turn,
    descriptor,
    open_session,
    payload_of,
    read_page,
    settings,
    tokens_of,
)

ROOT = Path(__file__).resolve().parents[2]
SIZE = LAYOUT.page_bytes
IDS = tokens_of(1, 4)
tmp_path = kv_scene.tmp_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store: four full pages, one tail, two sessions, three turns."""
    store = Store.open(tmp_path / "store", descriptor(), settings())
    lane = Lane(store)
    lane.add_chain(IDS)
    parent = keys.chain_keys(IDS, store.pages.repr_id, SALT)[-1]
    tail, _ = lane.add(parent, tokens_of(2, 1)[:30])
    store.pages.unpin(tail)
    for name in ("a", "b"):
        open_session(store.ledger, name, "t")
        for start in range(0, 1024, 100):
            append_tokens(store.ledger, name, 1, start, IDS[start : start + 100])
        append_turn(store.ledger, name, "one", 0, 700)
    append_turn(store.ledger, "a", "two", 700, 800)
    store.ledger.commit().result(20)
    lane.close()
    store.close()
    return tmp_path / "store"


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "LOCK"
    }


def problems(report: FsckReport) -> list[str]:
    return [f.what for f in report.findings if f.severity != "info"]


def run_sql(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path / "meta.db", isolation_level=None)
    for statement in statements:
        db.execute(statement)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    for name in ("meta.db-wal", "meta.db-shm"):
        (path / name).unlink(missing_ok=True)


def checked(path: Path, words: str) -> FsckReport:
    """Found without a change, repaired, then clean; the repaired store opens without a loss."""
    before = contents(path)
    found = fsck(path)
    assert any(words in what for what in problems(found)), found.findings
    assert contents(path) == before, "a check without repair changed something"
    repaired = fsck(path, repair=True)
    assert problems(repaired) == problems(found)
    assert all(finding.repair for finding in repaired.findings)
    again = fsck(path)
    assert problems(again) == [], again.findings
    assert again.ok
    store = Store.open(path, descriptor(), settings())
    assert not store.dropped
    check_integrity(store)
    report = store.pages.verify_all().result(20)
    assert report.bad == 0
    for info in store.ledger.list_sessions().result(20):
        record = store.ledger.load_session(info.id).result(20)
        assert record is not None
        assert record.tokens == IDS[: len(record.tokens)].tolist()
    store.close()
    return found


# -- valid stores -----------------------------------------------------------------------------


def test_a_valid_store_has_no_findings(path: Path) -> None:
    before, steps = contents(path), list[tuple[int, int]]()
    report = fsck(path, progress=lambda done, total: steps.append((done, total)))
    assert report.ok
    assert report.findings == []
    assert report.clean
    assert dict(report.counts) | {"page_rows": 5} == {
        "reprs": 1, "extents": 4, "page_rows": 5, "pages": 5, "pages_good": 5, "tails": 1,
        "sessions": 2, "token_blobs": 22, "tokens": 2048, "turns": 3, "turns_unfinished": 3,
    }  # fmt: skip
    assert steps[-1] == (5, 5)
    assert contents(path) == before
    assert fsck(path, repair=True).findings == []


def test_a_killed_store_is_checked_through_its_log_and_not_changed(tmp_path: Path) -> None:
    script = f"""if True:
        import os, signal
        from tests.kv_store.test_fsck import *
        store = Store.open({str(tmp_path / "s")!r}, descriptor(), settings())
        lane = Lane(store)
        lane.add_chain(IDS)
        open_session(store.ledger, "s", "t")
        append_tokens(store.ledger, "s", 1, 0, IDS)
        store.ledger.commit().result(20)
        os.kill(os.getpid(), signal.SIGKILL)"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    path = tmp_path / "s"
    assert (path / "meta.db-wal").stat().st_size
    before = contents(path)
    report = fsck(path)
    assert [f.what for f in report.findings] == ["the store was not closed"]
    assert (report.counts["pages_good"], report.counts["tokens"]) == (4, 1024)
    assert contents(path) == before
    assert os.listdir(path / "arena") == ["cpu.1"], "its rows may still be adopted"


def test_a_store_in_use_is_refused(path: Path) -> None:
    store = Store.open(path, descriptor(), settings())
    with pytest.raises(StoreLocked) as caught:
        fsck(path)
    assert caught.value.pid == os.getpid()
    store.close()
    assert fsck(path).ok


def test_a_folder_without_a_store_or_with_a_newer_one_is_refused(
    path: Path, tmp_path: Path
) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(StoreUnsupported, match="holds no store"):
            fsck(folder)
    assert not (tmp_path / "nothing").exists()
    run_sql(path, f"PRAGMA user_version={writes.SCHEMA_VERSION + 1}")
    before = contents(path)
    with pytest.raises(StoreVersion):
        fsck(path, repair=True)
    assert contents(path) == before


def test_pages_of_other_models_are_checked_without_their_model(path: Path) -> None:
    other = descriptor(model_hash="dd" * 32)
    store = Store.open(path, other, settings(pages=40))
    lane = Lane(store, incarnation=2)
    lane.add_chain(tokens_of(9, 2))
    lane.close()
    store.close()
    report = fsck(path)
    assert report.findings == []
    assert report.counts["reprs"] == 2
    assert report.counts["pages_good"] == 7


# -- pages and extents ------------------------------------------------------------------------


def edit(file: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)


@pytest.mark.parametrize("offset", [0, 77, SIZE - 1])
def test_a_flipped_bit_anywhere_in_a_page_is_found(path: Path, offset: int) -> None:
    def flip(data: bytearray) -> None:
        data[SIZE + offset] ^= 1

    edit(path / "ext" / "000001.kv", flip)
    report = checked(path, "page 1 is bad")
    assert report.counts["pages_bad"] == 1
    assert report.counts["pages_good"] == 4


def test_two_swapped_pages_are_found(path: Path) -> None:
    def swap(data: bytearray) -> None:
        data[:SIZE], data[SIZE : 2 * SIZE] = data[SIZE : 2 * SIZE], data[:SIZE]

    edit(path / "ext" / "000001.kv", swap)
    assert checked(path, "page 0 is bad").counts["pages_bad"] == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: os.truncate(file, SIZE),
        lambda file: os.truncate(file, 5 * SIZE),
        lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
        lambda file: (file.unlink(), os.mkfifo(file)),
    ],
    ids=["gone", "short", "long", "link", "pipe"],
)
def test_a_missing_extent_is_found_with_its_pages(
    path: Path, damage: Callable[[Path], object]
) -> None:
    damage(path / "ext" / "000001.kv")
    report = checked(path, "extent 1 is lost, and 4 pages with it")
    assert report.counts["pages_good"] == 1


def test_a_ledger_that_was_restored_alone_is_checked(path: Path, tmp_path: Path) -> None:
    """Its sessions are sound, its pages are lost; `repair` makes it a store without pages."""
    alone = tmp_path / "alone"
    alone.mkdir(mode=0o700)
    shutil.copy(path / "meta.db", alone)
    report = fsck(alone)
    assert [one.severity for one in report.findings if "there is no folder" in one.what] == [
        "info"
    ] * 2
    assert any("is lost" in one.what for one in report.findings if one.severity == "error")
    assert report.counts["sessions"] == 2
    fsck(alone, repair=True)
    assert fsck(alone).ok
    with closing(Store.open(alone, descriptor(), settings())) as store:
        assert store.ledger.stats.sessions == 2


def test_an_unfinished_extent_is_removed_and_a_foreign_file_is_left(path: Path) -> None:
    (path / "ext" / "000077.kv").write_bytes(b"x")
    (path / "ext" / "notes.txt").write_text("mine")
    report = checked(path, "ext/000077.kv has no row")
    assert report.ok, "a stray costs space only"
    assert (path / "ext" / "notes.txt").exists()


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE page SET content_key = x'00' WHERE page_id = 1",
        "UPDATE page SET content_key = zeroblob(32) WHERE page_id = 1",
        "UPDATE page SET sealed_checksum = zeroblob(16) WHERE page_id = 1",
        "UPDATE page SET payload_digest = zeroblob(16) WHERE page_id = 1",
        "UPDATE page SET tokens = x'010203' WHERE page_id = 1",
        "UPDATE page SET tokens = 'text' WHERE page_id = 1",
        "UPDATE page SET gen = gen + 1 WHERE page_id = 1",
        "UPDATE page SET gen = 'x' WHERE page_id = 1",
        "UPDATE page SET content_key = CAST(x'ff80' AS TEXT) WHERE page_id = 1",
        "UPDATE page SET state = 'publushed' WHERE page_id = 1",
        "UPDATE page SET repr_id = zeroblob(32) WHERE page_id = 1",
    ],
)
def test_a_damaged_manifest_row_is_found(path: Path, sql: str) -> None:
    run_sql(path, sql)
    report = checked(path, "page 1 is bad")
    assert report.counts["pages_good"] == 4


def test_rows_of_pages_that_cannot_exist_are_found(path: Path) -> None:
    run_sql(
        path,
        "UPDATE page SET page_id = 999 WHERE page_id = 2",
        "INSERT INTO extent SELECT 50, 'page', 0, places, page_bytes, repr_id FROM extent"
        " WHERE extent_index = 1",
        "UPDATE store SET next_extent = 51",
    )
    report = checked(path, "extent 50 is lost")
    assert any("page 999 is bad" in f.what for f in report.findings)
    assert report.counts["pages_good"] == 4


def test_counters_that_would_reuse_a_number_are_found(path: Path) -> None:
    run_sql(path, "UPDATE store SET next_page_id = 1, next_extent = 1")
    checked(path, "would be given twice")


def test_a_representation_without_a_descriptor_loses_its_pages(path: Path) -> None:
    run_sql(path, "UPDATE repr SET descriptor = '{}'")
    found = fsck(path)
    assert found.counts["pages_bad"] == 5
    assert any("is not described" in f.what for f in found.findings)
    fsck(path, repair=True)
    assert fsck(path).counts["pages"] == 0


# -- sessions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "left"),
    [
        ("UPDATE token_blob SET ids = zeroblob(400) WHERE session='a' AND start=300", 300),
        ("UPDATE token_blob SET ids = x'01' WHERE session='a' AND start=300", 300),
        ("UPDATE token_blob SET ids = 'text' WHERE session='a' AND start=0", 0),
        ("UPDATE token_blob SET checksum = zeroblob(8) WHERE session='a' AND start=1000", 1000),
        ("UPDATE token_blob SET start = 301 WHERE session='a' AND start=300", 300),
        ("UPDATE token_blob SET n = 99 WHERE session='a' AND start=300", 300),
        ("DELETE FROM token_blob WHERE session='a' AND start=300", 300),
        ("DELETE FROM token_blob WHERE session='a' AND start=1000", 1000),
        ("DELETE FROM token_blob WHERE session='a'", 0),
        ("UPDATE session SET ledger_len = 2000 WHERE id='a'", 1024),
        ("UPDATE session SET ledger_len = 310 WHERE id='a'", 310),
    ],
)
def test_a_damaged_timeline_keeps_its_longest_valid_prefix(path: Path, sql: str, left: int) -> None:
    run_sql(path, sql)
    checked(path, f"session 'a' lost its tokens from {left} on")
    store = Store.open(path, descriptor(), settings())
    record, other = (store.ledger.load_session(name).result(20) for name in ("a", "b"))
    assert record is not None
    assert other is not None
    assert record.tokens == IDS[:left].tolist()
    assert record.info.epoch == 2, "open rows of the old timeline are fenced off"
    assert (len(other.tokens), other.info.epoch) == (1024, 1)
    store.close()


def test_rows_without_a_session_and_damaged_rows_are_found(path: Path) -> None:
    run_sql(path, "DELETE FROM session WHERE id = 'b'")
    report = checked(path, "rows of token_blob belong to no session")
    assert report.ok, "they are no session's"
    run_sql(path, "UPDATE turn SET prompt_end = 1 WHERE id = 'two'")
    assert fsck(path).ok, "a request that was repeated: its prompt is the timeline's beginning"
    run_sql(path, "UPDATE turn SET prompt_end = -1 WHERE id = 'two'")
    checked(path, "a turn of session 'a' has a damaged row")
    run_sql(path, "UPDATE session SET epoch = 'x' WHERE id = 'a'")
    checked(path, "session 'a' has a damaged row")


# -- the ledger's file ------------------------------------------------------------------------


def tokens_kept(store: Store) -> dict[str, int]:
    """How many tokens each session of a store has, all of them right; 0 for an unreadable one."""
    kept = dict.fromkeys("ab", 0)
    for name in kept:
        future = store.ledger.load_session(name)
        error = future.exception(20)
        assert error is None or isinstance(error, StoreCorrupt)
        record = None if error else future.result()
        if record is not None:
            assert record.tokens == IDS[: len(record.tokens)].tolist()
            kept[name] = len(record.tokens)
    return kept


def test_check_and_repair_handle_any_damage_to_the_ledger_file(path: Path, tmp_path: Path) -> None:
    """64 bytes of junk anywhere: no check or repair fails, later reads are never wrong, and what is
    lost is named by the check; most places lose nothing."""
    size = (path / "meta.db").stat().st_size
    with closing(Store.open(path, descriptor(), settings())) as store:
        wanted = tokens_kept(store)
    assert all(wanted.values())
    whole = 0
    for where in range(0, 100, 6):
        at, copy = max(100, size * where // 100), tmp_path / f"copy{where}"
        shutil.copytree(path, copy)
        edit(
            copy / "meta.db", lambda data, at=at: data.__setitem__(slice(at, at + 64), b"\x5a" * 64)
        )
        before = contents(copy)
        found = fsck(copy)
        assert contents(copy) == before
        fsck(copy, repair=True)
        with closing(Store.open(copy, descriptor(), settings())) as store:
            kept = tokens_kept(store)
        whole += kept == wanted
        assert kept == wanted or problems(found), (where, kept)
    assert whole >= 9


def test_a_ledger_that_is_no_database_is_set_aside(path: Path) -> None:
    (path / "meta.db").write_bytes(b"not a database" * 1000)
    report = fsck(path)
    assert not report.ok
    assert problems(report) == ["the ledger is not a readable database"]
    assert "meta.db.damaged-1" in report.findings[0].repair
    assert (path / "meta.db").exists()
    fsck(path, repair=True)
    assert (path / "meta.db.damaged-1").exists()
    store = Store.open(path, descriptor(), settings())
    assert store.ledger.list_sessions().result(20) == []
    store.close()


def empty_ledger(path: Path) -> None:
    (path / "meta.db").write_bytes(b"")


def foreign_ledger(path: Path) -> None:
    (path / "meta.db").unlink()
    run_sql(path, "CREATE TABLE session (id)", "PRAGMA user_version=1")


def nameless_ledger(path: Path) -> None:
    run_sql(path, "DELETE FROM store")


def damaged_ledger(path: Path) -> None:
    """After a crash, and not only in an index: the next opening would refuse it."""
    run_sql(path, "UPDATE store SET clean = 0")
    run_sql(path, "PRAGMA writable_schema=ON", "UPDATE sqlite_schema SET rootpage = 3")


LEDGERS = [empty_ledger, foreign_ledger, nameless_ledger, damaged_ledger]


@pytest.mark.parametrize("damage", LEDGERS, ids=lambda damage: damage.__name__)
def test_a_ledger_that_cannot_be_opened_is_set_aside_as_advised(
    path: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(path)
    assert check_command(path, debug=True) == 1
    printed = capsys.readouterr().out
    assert "is set aside as meta.db.damaged-1; the store starts empty" in printed
    assert f"Fix: batchengine store fsck {path} --repair" in printed
    assert check_command(path, repair=True, debug=True) == 0, "the advice is true"
    assert "repaired, and sound now" in capsys.readouterr().out
    assert (path / "meta.db.damaged-1").exists()
    assert fsck(path).ok
    store = Store.open(path, descriptor(), settings())
    assert store.ledger.list_sessions().result(20) == []
    store.close()
    assert fsck(path).ok


def test_repair_is_advised_only_where_it_helps(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_store.fsck._TURN_QUERY", "SELECT what_a_bad_page_held FROM turn")
    assert check_command(path, debug=True) == 1
    printed = capsys.readouterr().out
    assert "--repair" not in printed
    assert f"Fix: restore {path} from a copy" in printed


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
@pytest.mark.parametrize("name", ["LOCK", "meta.db"])
def test_an_entry_that_is_not_a_plain_file_is_reported_with_its_fix(
    path: Path, name: str, kind: str
) -> None:
    (path / name).unlink()
    if kind == "folder":
        (path / name).mkdir()
    elif kind == "link":
        (path / name).symlink_to(path / "elsewhere")
    else:
        os.mkfifo(path / name)
    with pytest.raises(StoreError) as error:
        Store.open(path, descriptor(), settings())
    assert error.value.why
    assert "must be a plain file" in error.value.fix
    assert str(path / name) in str(error.value)
    with pytest.raises(StoreError):
        fsck(path)


def test_a_broken_index_is_rebuilt(path: Path) -> None:
    change = "UPDATE sqlite_schema SET sql = replace(sql, '{}', '{}') WHERE name = 'page_key'"
    run_sql(path, "PRAGMA writable_schema=ON", change.format("published", "nothing"))
    run_sql(path, "DELETE FROM page WHERE page_id = 4")
    run_sql(path, "PRAGMA writable_schema=ON", change.format("nothing", "published"))
    checked(path, "SQLite finds the ledger damaged")


# -- arenas, folders, strays ------------------------------------------------------------------


def test_useless_arenas_are_deleted_and_held_ones_are_left(path: Path) -> None:
    store = Store.open(path, descriptor(), settings())
    good, held = store.create_arena("cpu", 5, 2), store.create_arena("cpu", 6, 2)
    for arena in (good, held):
        mapping = ArenaMapping(arena.path, LAYOUT)
        mapping.reserve(0, SlotOwner(b"a", 1, 0, 0))
        mapping.write_records(0, 0, np.arange(1, dtype=np.uint32), np.zeros(1, np.uint64))
        if arena is good:
            mapping.close()
        arena.close(delete=False)
    (path / "arena" / "cpu.7").write_bytes(b"junk")
    (path / "arena" / "mine").write_text("mine")
    store.close()
    report = fsck(path, repair=True)
    found = {f.what: f.severity for f in report.findings}
    assert found == {
        "arena/cpu.6 has a writer that lives": "warning",
        "arena/cpu.7 is of no use": "warning",
        "arena/mine is not ours": "info",
    }
    assert report.ok
    assert sorted(os.listdir(path / "arena")) == ["cpu.5", "cpu.6", "mine"]
    mapping.close()


def test_open_folders_and_killed_checks_are_found(path: Path) -> None:
    (path / "ext").chmod(0o755)
    (path / "fsck-abc").mkdir()
    (path / "fsck-abc" / "meta.db").write_bytes(b"x")
    (path / "meta.db.damaged-1").write_bytes(b"x")
    report = checked(path, "others may look into")
    assert "fsck-abc is in the way" in problems(report)
    assert not (path / "fsck-abc").exists()
    assert (path / "meta.db.damaged-1").exists(), "evidence is a person's to delete"
    assert (path / "ext").stat().st_mode & 0o077 == 0
    shutil.rmtree(path / "ext")
    (path / "ext").write_bytes(b"x")
    with pytest.raises(StoreUnsupported, match="not a directory"):
        fsck(path)
    (path / "ext").unlink()
    (path / "ext").symlink_to("arena")
    with pytest.raises(StoreUnsupported, match="symbolic link"):
        fsck(path)


# -- random damage ----------------------------------------------------------------------------


def test_after_repair_of_random_damage_no_bad_page_is_left(path: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    for number in range(12):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(path, copy, symlinks=True)
        for _ in range(3):
            name = ["ext/000001.kv", "ext/000002.kv", "meta.db"][int(rng.integers(3))]
            size = (copy / name).stat().st_size
            at = int(rng.integers(100, size))
            edit(copy / name, lambda data, at=at: data.__setitem__(at, data[at] ^ 0x40))
        fsck(copy, repair=True)
        store = Store.open(copy, descriptor(), settings())
        assert store.pages.verify_all().result(20).bad == 0
        store.close()


def junk(data: bytearray, rng: np.random.Generator) -> None:
    """Damage a few bytes, in the file's header as often as in the rest."""
    for _ in range(int(rng.integers(1, 4))):
        limit = len(data) if rng.integers(3) else 200
        at, length = int(rng.integers(limit)), int(rng.integers(1, 200))
        kind = int(rng.integers(9))
        if kind < 3:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind < 6:
            data[at : at + length] = rng.bytes(len(data[at : at + length]))
        elif kind < 8:
            data[at : at + length] = bytes(len(data[at : at + length]))
        else:
            del data[max(at, 4096) :]


@pytest.mark.parametrize("count", [45, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_ledger_of_junk_raises_named_errors_or_serves_valid_data(
    path: Path, tmp_path: Path, count: int
) -> None:
    original = (path / "meta.db").read_bytes()
    rng = np.random.default_rng(count)
    copy = tmp_path / "copy"
    for number in range(count):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        data = bytearray(original)
        junk(data, rng)
        (copy / "meta.db").write_bytes(data)
        try:
            if number % 3:
                fsck(copy, repair=number % 3 == 2)
            store = Store.open(copy, descriptor(), settings())
        except StoreVersion:
            continue  # the bytes of the version were hit
        refs = store.pages.match_prefix(IDS, SALT)
        chain = keys.chain_keys(IDS, store.pages.repr_id, SALT)
        for key, ref, ok in zip(chain, refs, store.pages.load(refs).result(20), strict=False):
            if ok:
                assert read_page(store, ref) == payload_of(key).tobytes(), "wrong KV"
        tokens_kept(store)
        check_integrity(store)
        store.close()
