"""Stores of other models, owners, programs: faults F11 to F14, F21 and F30."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes.store_check import check_integrity
from kv_store import keys
from kv_store.errors import StoreLocked, StoreUnsupported, StoreVersion
from kv_store.fsck import fsck
from kv_store.layout import PAGE_TOKENS, Descriptor, PageLayout, differing_fields
from kv_store.ledger import writes
from kv_store.pages.index import PageRef
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    Lane,
    add_chain,
    append_tokens,
    descriptor,
    evict,
    payload_of,
    read_page,
    settings,
    tokens_of,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
IDS = tokens_of(1, 4)
SIZE = LAYOUT.page_bytes
tmp_path = kv_scene.tmp_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = Store.open(tmp_path / "store", descriptor(), settings(40))
    add_chain(store, IDS)
    store.close()
    return tmp_path / "store"


# -- F11, F12: another representation ---------------------------------------------------------

# every field of a descriptor, changed alone, and the fields reported as the cause of the miss
ONE_CHANGE = [
    ({"model_hash": "cc" * 32}, {"model_hash"}),
    ({"arith_id": "cc" * 32}, {"arith_id"}),
    ({"arch": "qwen2"}, {"arch"}),
    ({"first_layer": 1}, {"first_layer"}),
    ({"provenance": "other"}, {"provenance"}),
    ({"rope_digest": "x"}, {"rope_digest"}),
    ({"tokenizer_hash": "x"}, {"tokenizer_hash"}),
    ({"extra": (("rope.scale", "2"),)}, {"x.rope.scale"}),
    ({"layout": PageLayout.uniform(1, 2, 32)}, {"layout_id", "n_kv_head"}),
    ({"layout": PageLayout.uniform(2, 1, 32)}, {"layout_id", "n_layer"}),
    ({"layout": PageLayout.uniform(1, 1, 64)}, {"layout_id", "head_dim"}),
]


def test_the_cases_cover_every_field_of_a_descriptor() -> None:
    changed = {name for change, _ in ONE_CHANGE for name in change}
    assert changed == {field.name for field in dataclasses.fields(Descriptor)}


def differing(store: Store) -> set[str]:
    """The fields in which the one other representation of the store differs."""
    reprs = dict(store.ledger.replay.reprs)
    reprs.pop(store.pages.repr_id, None)
    (text,) = reprs.values()
    return set(differing_fields(store.pages.descriptor, text))


@pytest.mark.parametrize(("change", "why"), ONE_CHANGE, ids=max)
def test_a_changed_field_matches_no_page_and_is_reported(
    path: Path, change: dict[str, object], why: set[str]
) -> None:
    other = descriptor(**change)
    assert other.layout.page_bytes == SIZE, "only the name tells these pages apart, not their size"
    store = Store.open(path, other, settings(40))
    assert store.pages.match_prefix(IDS, SALT) == []
    assert differing(store) == why
    lane = Lane(store, incarnation=2)
    lane.add_chain(IDS)
    for parent, ref in zip(
        keys.chain_keys(IDS, store.pages.repr_id, SALT),
        store.pages.match_prefix(IDS, SALT),
        strict=True,
    ):
        assert read_page(store, ref) == payload_of(parent).tobytes()
    lane.close()
    store.close()
    store = Store.open(path, descriptor(), settings(40))
    refs = store.pages.match_prefix(IDS, SALT)
    assert store.pages.load(refs).result(20) == [True] * 4, (
        "the first model's pages are still its own"
    )
    assert differing(store) == why
    store.close()


# -- F13: a second owner ----------------------------------------------------------------------

HOLDER = """if True:
    import sys, time
    from tests.kv_store.test_faults_foreign import *
    from tests.support.kv_workload import open_session
    store = Store.open(sys.argv[1], descriptor(), settings(40))
    print("open", flush=True)
    sys.stdin.read()
    open_session(store.ledger, "late", "t")
    store.ledger.commit().result(20)
    store.close()
"""


def test_a_stopped_owner_keeps_the_lock_and_a_dead_one_does_not(path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    holder.send_signal(signal.SIGSTOP)
    for _ in range(2):
        with pytest.raises(StoreLocked, match=f"locked by pid {holder.pid}") as caught:
            Store.open(path, descriptor(), settings(40))
        assert "--instance" in caught.value.fix
        assert caught.value.pid == holder.pid
    with pytest.raises(StoreLocked):
        fsck(path)
    holder.send_signal(signal.SIGCONT)  # it kept the lock: its writes are valid
    holder.stdin.close()
    assert holder.wait(30) == 0
    holder.stdout.close()
    store = Store.open(path, descriptor(), settings(40))
    assert [info.id for info in store.ledger.list_sessions().result(20)] == ["late"]
    store.close()


def test_a_copied_directory_opens_as_a_separate_store(path: Path, tmp_path: Path) -> None:
    """Its LOCK names the original's owner, who does not hold the copy."""
    original = Store.open(path, descriptor(), settings(40))
    original.ledger.commit().result(20)
    shutil.copytree(path, tmp_path / "copy")
    copy = Store.open(tmp_path / "copy", descriptor(), settings(40))
    assert copy.pages.load(copy.pages.match_prefix(IDS, SALT)).result(20) == [True] * 4
    for store in (original, copy):
        lane = Lane(store, incarnation=5)
        lane.add_chain(tokens_of(7, 1))
        lane.close()
        check_integrity(store)
    assert (tmp_path / "copy" / "LOCK").read_bytes() != (path / "LOCK").read_bytes()
    original.close()
    copy.close()


def test_a_ledger_in_use_by_another_program_is_refused(path: Path) -> None:
    """SQLite's own lock still refuses a second owner if LOCK was deleted."""
    store = Store.open(path, descriptor(), settings(40))
    (path / "LOCK").unlink()
    with pytest.raises(Exception, match="cannot be opened"):
        Store.open(path, descriptor(), settings(40))
    store.close()


# -- F14: folders that can hold no store ------------------------------------------------------


def test_a_read_only_mount_is_refused_with_a_reason(path: Path) -> None:
    with kv_scene.small_disk("size=8m") as folder:
        shutil.copytree(path, folder / "store")
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(StoreUnsupported, match="cannot be"):
            Store.open(folder / "store", descriptor(), settings(40))
        with pytest.raises(StoreUnsupported, match="Read-only"):
            Store.open(folder / "new", descriptor(), settings(40))


# -- F21: clocks ------------------------------------------------------------------------------


def test_a_wall_clock_that_jumps_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, lambda: pytest.fail("a wall clock was asked"))
    store = Store.open(path, descriptor(), settings(4, 4))
    assert store.pages.load(store.pages.match_prefix(IDS, SALT)).result(20) == [True] * 4
    assert evict(store, 1) == 1, "age is a sequence"
    assert len(store.pages.match_prefix(IDS, SALT)) == 3
    store.gc().result(20)
    store.close()


def test_the_store_never_reads_the_wall_clock() -> None:
    for file in (ROOT / "kv_store").glob("*.py"):
        for banned in ("time.time", "time_ns(", "datetime", "import random", "uuid4"):
            assert banned not in file.read_text(), f"{file.name} uses {banned}"


# -- F30: stores of other programs ------------------------------------------------------------


def rebuilt(version: int, folder: Path) -> Path:
    """The golden store of a schema version, as the program of that version left it."""
    (folder / "ext").mkdir(parents=True, mode=0o700)
    (folder / "arena").mkdir(mode=0o700)
    folder.chmod(0o700)
    (folder / "ext").chmod(0o700)
    db = sqlite3.connect(folder / "meta.db")
    db.executescript((GOLDEN / f"store_v{version}.sql").read_text())
    pages = dict(db.execute("SELECT page_id, content_key FROM page WHERE state = 'published'"))
    for index, first, slots, page_bytes in db.execute(
        "SELECT extent_index, first_page_id, places, page_bytes FROM extent"
    ):
        data = bytearray(slots * page_bytes)
        for slot in range(slots):
            if first + slot in pages:
                span = slice(slot * page_bytes, (slot + 1) * page_bytes)
                data[span] = payload_of(pages[first + slot]).tobytes()
        (folder / "ext" / f"{index:06}.kv").write_bytes(data)
    db.close()
    return folder


def test_there_is_a_golden_store_of_every_schema() -> None:
    versions = {int(file.stem.removeprefix("store_v")) for file in GOLDEN.glob("store_v*.sql")}
    assert versions == set(range(1, writes.SCHEMA_VERSION + 1))


@pytest.mark.parametrize("version", range(1, writes.SCHEMA_VERSION + 1))
def test_a_store_of_every_schema_opens_with_nothing_lost(tmp_path: Path, version: int) -> None:
    path = rebuilt(version, tmp_path / "golden")
    assert fsck(path).findings == []
    store = Store.open(path, descriptor(), settings())
    assert store.dropped == {}
    assert store.core.uuid == b"golden store v1."
    refs = store.pages.match_prefix(IDS, SALT)
    parent = keys.chain_keys(IDS[:768], store.pages.repr_id, SALT)[-1]
    tail = store.pages.find_tail(parent, IDS[768:], SALT)
    assert (refs, tail) == ([PageRef(0, 0), PageRef(1, 0), PageRef(2, 0)], PageRef(3, 0))
    assert store.pages.load([*refs, tail]).result(20) == [True] * 4
    alice, bob = (store.ledger.load_session(name).result(20) for name in ("alice", "bob"))
    assert alice is not None
    assert bob is not None
    assert alice.tokens == IDS[:800].tolist()
    assert (alice.info.meta, alice.info.tenant) == ('{"title":"first"}', "tenant")
    (turn,) = alice.turns
    assert (turn.id, turn.idempotency_key, turn.seed) == ("turn-1", "key-1", (1 << 64) - 1)
    assert (turn.prompt_end, turn.status, turn.finish_reason) == (700, "done", "stop")
    assert (bob.tokens, bob.info.epoch, bob.info.owner_lane) == ([1, 2, 3, 4], 2, "cpu")
    assert [turn.status for turn in bob.turns] == ["running"]
    assert [mark.session for mark in store.ledger.suspects().result(20)] == ["bob"]
    append_tokens(store.ledger, "bob", 2, 4, [5])
    store.ledger.commit().result(20)
    add_chain(store, IDS)
    check_integrity(store)
    store.close()
    assert fsck(path).findings == []


def test_a_golden_store_keeps_its_keys_and_checksums(tmp_path: Path) -> None:
    """A changed key, seed or checksum formula would make every existing page a miss."""
    path = rebuilt(1, tmp_path / "golden")
    store = Store.open(path, descriptor(), settings())
    chain = keys.chain_keys(IDS[:768], store.pages.repr_id, SALT)
    assert [store.pages.index.get(PageRef(i, 0)).key for i in range(3)] == chain
    assert store.pages.repr_id.hex().startswith("8cf782ac4d1017fa")
    assert LAYOUT.layout_id == PageLayout.uniform(1, 1, 32).layout_id
    assert PAGE_TOKENS == 256
    store.close()


def test_a_store_of_a_newer_program_is_refused_untouched(tmp_path: Path) -> None:
    path = rebuilt(1, tmp_path / "golden")
    db = sqlite3.connect(path / "meta.db")
    db.execute(f"PRAGMA user_version={writes.SCHEMA_VERSION + 1}")
    db.close()
    before = {f: f.read_bytes() for f in path.rglob("*") if f.is_file()}
    for _ in range(2):
        with pytest.raises(StoreVersion, match="newer program"):
            Store.open(path, descriptor(), settings())
    after = {f: f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != "LOCK"}
    assert after == before
