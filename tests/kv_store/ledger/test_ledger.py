"""The ledger: timelines are prefixes, intents are atomic, acknowledged writes are durable."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kv_store.errors import LedgerError, LedgerRefused, StoreCorrupt, StoreError, StoreFull
from kv_store.ledger import ledger as ledger_module
from kv_store.ledger import writes
from kv_store.ledger.ledger import Ledger
from tests.support import kv_scene
from tests.support.kv_workload import (
    CountedDb,
    append_tokens,
    append_turn,
    counted_connect,
    cut_session,
    finish_turn,
    fork_session,
    open_session,
    scratch,
    sqlite_error,
)

UUID = b"u" * 16
REPR = b"r" * 32


def opened(folder: Path, **changes: Any) -> Ledger:
    return Ledger(str(folder / "meta.db"), REPR, store_uuid=UUID, **changes)


tmp_path = kv_scene.tmp_path


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = opened(tmp_path)
    yield made
    made.close()


@pytest.fixture
def on_statement() -> Iterator[type[CountedDb]]:
    yield CountedDb
    CountedDb.on_statement = staticmethod(lambda sql: None)


def tokens(ledger: Ledger, session: str = "s") -> list[int]:
    record = ledger.load_session(session).result(20)
    assert record is not None
    return record.tokens


def test_a_session_is_read_back_completely(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    open_session(ledger, "s", "tenant", meta='{"x":1}')
    append_tokens(ledger, "s", 1, 0, [1, 2, 3])
    append_turn(ledger, "s", "t1", 0, 3, "once")
    for token in range(10, 20):
        append_tokens(ledger, "s", 1, token - 7, [token])
        ledger.commit()
    finish_turn(ledger, "s", "t1")
    ledger.append(writes.SetMeta("s", 1, "parked", "{}"))
    ledger.close()
    ledger = opened(tmp_path)
    record = ledger.load_session("s").result(20)
    assert record is not None
    assert record.tokens == [1, 2, 3, *range(10, 20)]
    (turn,) = record.turns
    assert (turn.seed, turn.status, turn.finish_reason) == ((1 << 64) - 1, "done", "stop")
    assert (turn.idempotency_key, turn.sampling) == ("once", '{"temperature":0.5}')
    assert (record.info.state, record.info.tenant, record.info.ledger_len) == (
        "parked",
        "tenant",
        13,
    )
    assert ledger.load_session("unknown").result(20) is None
    blobs = ledger.read(lambda db: db.execute("SELECT count(*) FROM token_blob").fetchone()[0])
    assert blobs.result(20) == 1, "a finished turn is one blob"
    ledger.close()


def test_sessions_are_listed_by_last_use_and_dropped_completely(ledger: Ledger) -> None:
    for name in ("a", "b", "c"):
        open_session(ledger, name, "t")
        append_tokens(ledger, name, 1, 0, [1])
        ledger.commit().result(20)
    ledger.append(writes.SetMeta("a", 1, "idle", "{}"))
    ledger.commit().result(20)
    assert [s.id for s in ledger.list_sessions().result(20)] == ["a", "c", "b"]
    ledger.append(writes.DropSession("c"))
    ledger.commit().result(20)
    assert ledger.load_session("c").result(20) is None
    left = ledger.read(lambda db: db.execute("SELECT DISTINCT session FROM token_blob").fetchall())
    assert left.result(20) == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda led: append_tokens(led, "s", 1, 5, [1]), "continue at 3"),
        (lambda led: append_tokens(led, "s", 1, 2, [1]), "continue at 3"),
        (lambda led: append_tokens(led, "s", 0, 3, [1]), "epoch"),
        (lambda led: append_tokens(led, "s", 2, 3, [1]), "epoch"),
        (lambda led: append_tokens(led, "x", 1, 0, [1]), "no session"),
        (lambda led: led.append(writes.TruncateTokens("s", 1, 9)), "cannot keep"),
        (lambda led: led.append(writes.TruncateTokens("s", 1, -1)), "cannot keep"),
        (lambda led: led.append(writes.SetOwner("s", 1, 1, "cpu")), "not a new"),
        (lambda led: open_session(led, "s", "t"), "refused a record"),
        (lambda led: append_turn(led, "s", "t", 0, 3), "refused a record"),
        (lambda led: append_turn(led, "s", "new", 0, 3, "once"), "refused a record"),
        (lambda led: finish_turn(led, "s", "none"), "no turn"),
    ],
)
def test_a_refused_intent_fails_alone(ledger: Ledger, write: Any, words: str) -> None:
    open_session(ledger, "s", "t")
    append_tokens(ledger, "s", 1, 0, [1, 2, 3])
    append_turn(ledger, "s", "t", 0, 3, "once")
    ledger.commit().result(20)
    before = append_tokens(ledger, "s", 1, 3, [4])
    bad: Future[int] = write(ledger)
    if "continue" in words:
        bad = append_tokens(ledger, "s", 1, 9, [1])
        words = "continue at 4"
    after = append_tokens(ledger, "s", 1, 4, [5])
    commit = ledger.commit()
    with pytest.raises(LedgerRefused, match=words):
        bad.result(20)
    with pytest.raises(LedgerRefused, match=words):
        commit.result(20)
    assert before.result(20) == after.result(20)
    assert tokens(ledger) == [1, 2, 3, 4, 5]


def test_an_intent_of_several_records_is_all_or_nothing(ledger: Ledger) -> None:
    open_session(ledger, "s", "t")
    ledger.commit().result(20)
    both = ledger.append(
        writes.AppendTokens("s", 1, 0, b"\1\0\0\0"), writes.AppendTokens("s", 1, 7, b"\1\0\0\0")
    )
    ledger.commit()
    assert isinstance(both.exception(20), LedgerRefused)
    assert tokens(ledger) == []


def test_the_owner_changes_once_per_epoch(ledger: Ledger) -> None:
    open_session(ledger, "s", "t")
    flip, again = (
        ledger.append(writes.SetOwner("s", 2, 7, "gpu")),
        ledger.append(writes.SetOwner("s", 2, 8, "cpu")),
    )
    late = append_tokens(ledger, "s", 1, 0, [1])
    ledger.commit()
    assert flip.exception(20) is None
    assert isinstance(again.exception(20), LedgerRefused)
    assert isinstance(late.exception(20), LedgerRefused), "the old owner's write is fenced off"
    record = ledger.load_session("s").result(20)
    assert record is not None
    assert (record.info.owner_incarnation, record.info.owner_lane) == (7, "gpu")


def test_a_cut_sets_the_epoch_and_the_end_in_one_record(ledger: Ledger) -> None:
    open_session(ledger, "s", "t")
    append_tokens(ledger, "s", 1, 0, range(10))
    ledger.commit().result(20)
    bad = cut_session(ledger, "s", 11)  # longer than the timeline
    ledger.commit()
    assert isinstance(bad.exception(20), LedgerRefused)
    record = ledger.load_session("s").result(20)
    assert record is not None
    assert (record.info.epoch, record.info.ledger_len) == (1, 10), "all or nothing"
    cut_session(ledger, "s", 4)
    ledger.commit().result(20)
    assert tokens(ledger) == [0, 1, 2, 3]
    late = append_tokens(ledger, "s", 1, 4, [9])
    ledger.commit()
    assert isinstance(late.exception(20), LedgerRefused)


@pytest.mark.parametrize("length", [0, 255, 256, 300, 700])
def test_a_fork_has_its_own_copy_of_the_timeline(ledger: Ledger, length: int) -> None:
    ids = list(range(700))
    open_session(ledger, "s", "t", meta="m")
    append_tokens(ledger, "s", 1, 0, ids[:300])
    append_tokens(ledger, "s", 1, 300, ids[300:])
    append_turn(ledger, "s", "turn", 0, 700, "once")
    fork_session(ledger, "s", "fork", length)
    ledger.commit().result(20)
    record = ledger.load_session("fork").result(20)
    assert record is not None
    assert record.tokens == ids[:length]
    assert (record.info.epoch, record.info.meta, record.info.repr_id) == (1, "m", REPR)
    assert record.turns == []
    append_tokens(ledger, "fork", 1, length, [1])
    ledger.append(writes.TruncateTokens("s", 1, 0))
    ledger.append(writes.DropSession("s"))
    ledger.commit().result(20)
    assert tokens(ledger, "fork") == [*ids[:length], 1]


def test_impossible_forks_are_refused(ledger: Ledger) -> None:
    open_session(ledger, "a", "t")
    append_tokens(ledger, "a", 1, 0, [1, 2])
    open_session(ledger, "b", "t")
    ledger.commit().result(20)
    bad = [
        fork_session(ledger, "absent", "c", 0),
        fork_session(ledger, "a", "b", 2),
        fork_session(ledger, "a", "c", 3),
    ]
    ledger.commit()
    assert all(isinstance(future.exception(20), LedgerRefused) for future in bad)
    assert tokens(ledger, "a") == [1, 2]
    assert {info.id for info in ledger.list_sessions().result(20)} == {"a", "b"}


def test_a_damaged_source_is_not_forked(ledger: Ledger) -> None:
    open_session(ledger, "s", "t")
    append_tokens(ledger, "s", 1, 0, [1, 2])
    ledger.commit().result(20)
    ledger.read(lambda db: db.execute("UPDATE token_blob SET ids = x'0700000008000000'"))
    fork = fork_session(ledger, "s", "fork", 2)
    ledger.commit()
    assert isinstance(fork.exception(20), StoreCorrupt)
    assert ledger.load_session("fork").result(20) is None


def test_marks_of_suspects_survive_a_restart_until_they_are_cleared(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for name in ("a", "b"):
        open_session(ledger, name, "t")
    ledger.append(writes.SetSuspect("a", 3, 1, False))
    ledger.append(writes.SetSuspect("b", 4, 2, alone=True))
    ledger.commit().result(20)
    ledger.close()
    ledger = opened(tmp_path)
    marks = ledger.suspects().result(20)
    assert [(m.session, m.incarnation, m.strikes, m.alone) for m in marks] == [
        ("a", 3, 1, False),
        ("b", 4, 2, True),
    ]
    ledger.append(writes.SetSuspect("b", 0, 0, False))
    ledger.append(writes.DropSession("a"))
    ledger.commit().result(20)
    assert ledger.suspects().result(20) == []
    ledger.close()


def test_turns_are_listed_in_order_of_their_start(ledger: Ledger) -> None:
    """A turn after a cut starts further left than the turns it replaces."""
    open_session(ledger, "s", "t")
    for turn, start in (("one", 0), ("two", 2), ("three", 1)):
        ledger.append(writes.TruncateTokens("s", 1, start))
        append_tokens(ledger, "s", 1, start, [7, 8])
        append_turn(ledger, "s", turn, start, start + 2)
        ledger.commit().result(20)
    record = ledger.load_session("s").result(20)
    assert record is not None
    assert [turn.id for turn in record.turns] == ["one", "two", "three"]


def test_a_session_keeps_its_last_turns_and_every_running_one(ledger: Ledger) -> None:
    open_session(ledger, "s", "t")
    append_turn(ledger, "s", "old and running", 0, 0)
    for number in range(80):
        append_turn(ledger, "s", f"{number}", 0, 0, f"key {number}")
        finish_turn(ledger, "s", f"{number}")
        ledger.commit().result(20)
    record = ledger.load_session("s").result(20)
    assert record is not None
    assert [turn.id for turn in record.turns] == [
        "old and running",
        *(f"{number}" for number in range(80 - writes.TURNS_KEPT, 80)),
    ]


def test_the_least_recently_used_sessions_are_dropped_first_and_live_ones_never(
    ledger: Ledger,
) -> None:
    for name in "abcdef":
        open_session(ledger, name, "t")
        append_tokens(ledger, name, 1, 0, [1])
        ledger.commit().result(20)
    ledger.append(writes.SetMeta("a", 1, "idle", ""))  # used again
    ledger.commit().result(20)
    assert ledger.prune(10, []) == 0
    assert ledger.prune(3, ["b", "zzz"]) == 3
    assert {info.id for info in ledger.list_sessions().result(20)} == {"a", "b", "f"}
    assert ledger.prune(0, ["a", "b", "f"]) == 0
    blobs = ledger.read(lambda db: db.execute("SELECT count(*) FROM token_blob").fetchone()[0])
    assert blobs.result(20) == 3


def test_a_session_used_since_it_was_chosen_is_not_dropped(ledger: Ledger) -> None:
    open_session(ledger, "s", "t")
    ledger.commit().result(20)
    (info,) = ledger.list_sessions().result(20)
    append_turn(ledger, "s", "turn", 0, 0)
    ledger.append(writes.ForgetIdle("s", info.epoch, info.used_seq))
    ledger.commit().result(20)
    (info,) = ledger.list_sessions().result(20)
    ledger.append(writes.SetOwner("s", 2, 1, "cpu"))
    ledger.append(writes.ForgetIdle("s", info.epoch, info.used_seq))
    ledger.commit().result(20)
    assert len(ledger.list_sessions().result(20)) == 1


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "append", "truncate", "finish", "commit", "reopen"]),
            st.integers(0, 300),
        ),
        max_size=25,
    )
)
def test_a_timeline_equals_its_model(steps: list[tuple[str, int]]) -> None:
    model, folders = list[int](), scratch()
    folder = next(folders)
    ledger = opened(folder)
    open_session(ledger, "s", "t")
    append_turn(ledger, "s", "t", 0, 0)
    for action, number in steps:
        if action == "append":
            ids = list(range(len(model), len(model) + number % 40))
            append_tokens(ledger, "s", 1, len(model), ids)
            model += ids
        elif action == "truncate":
            model = model[: number % (len(model) + 1)]
            ledger.append(writes.TruncateTokens("s", 1, len(model)))
        elif action == "finish":
            finish_turn(ledger, "s", "t")
        elif action == "commit":
            ledger.commit()
        else:
            ledger.close()
            ledger = opened(folder)
    ledger.commit().result(20)
    assert tokens(ledger) == model
    ledger.close()
    folders.close()


def test_waiting_groups_share_one_transaction(ledger: Ledger) -> None:
    gate = threading.Event()
    ledger.read(lambda _: gate.wait(20))
    open_session(ledger, "s", "t")
    commits = [ledger.commit()]
    for position in range(50):
        append_tokens(ledger, "s", 1, position, [position])
        commits.append(ledger.commit())
    gate.set()
    assert len({commit.result(20) for commit in commits}) == 1
    assert tokens(ledger) == list(range(50))


# -- damage -----------------------------------------------------------------------------------


def damage(folder: Path, sql: str) -> None:
    with sqlite3.connect(folder / "meta.db") as db:
        assert db.execute(sql).rowcount == 1
    db.close()


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE token_blob SET ids = x'07000000' || substr(ids, 5) WHERE session='s'",
        "UPDATE token_blob SET checksum = x'0000000000000000' WHERE session='s'",
        "UPDATE token_blob SET start = 1 WHERE session='s'",
        "UPDATE token_blob SET session = 'other' WHERE session='s'",
        "UPDATE token_blob SET ids = substr(ids, 1, 6) WHERE session='s'",
        "UPDATE session SET ledger_len = 2 WHERE id='s'",
        "DELETE FROM token_blob WHERE session='s'",
    ],
)
def test_a_damaged_timeline_refuses_that_session_only(tmp_path: Path, sql: str) -> None:
    ledger = opened(tmp_path)
    for name in ("s", "fine"):
        open_session(ledger, name, "t")
        append_tokens(ledger, name, 1, 0, [1, 2, 3])
    ledger.close()
    damage(tmp_path, sql)
    ledger = opened(tmp_path)
    with pytest.raises(StoreCorrupt):
        ledger.load_session("s").result(20)
    assert tokens(ledger, "fine") == [1, 2, 3]
    ledger.close()


def test_a_torn_log_loses_only_its_tail(tmp_path: Path) -> None:
    """Power loss without a checkpoint: every cut of the write-ahead log leaves a prefix."""
    source = tmp_path / "source"
    source.mkdir()
    ledger = opened(source)
    open_session(ledger, "s", "t")
    marks = [(0, 0)]
    wal = source / "meta.db-wal"
    for position in range(12):
        append_tokens(ledger, "s", 1, position, [position])
        ledger.commit().result(20)
        marks.append((wal.stat().st_size, position + 1))
    log, base = wal.read_bytes(), (source / "meta.db").read_bytes()
    ledger.close()
    for cut in range(0, len(log) + 1, len(log) // 29):
        for torn in (log[:cut], log[: max(0, cut - 100)] + bytes(100) + log[cut:]):
            folder = tmp_path / f"cut{cut}-{len(torn)}"
            folder.mkdir(exist_ok=True)
            (folder / "meta.db").write_bytes(base)
            (folder / "meta.db-wal").write_bytes(torn)
            again = opened(folder)
            record = again.load_session("s").result(20)
            kept = record.tokens if record else []
            durable = max(count for size, count in marks if size <= max(0, cut - 100))
            assert kept == list(range(len(kept)))
            assert len(kept) >= durable
            again.close()


@pytest.mark.parametrize("name", ["SQLITE_IOERR_FSYNC", "SQLITE_IOERR_WRITE", "SQLITE_CORRUPT"])
@pytest.mark.parametrize("statement", ["COMMIT", "INSERT", "BEGIN"])
def test_after_an_io_error_nothing_is_acknowledged(
    tmp_path: Path, on_statement: type[CountedDb], name: str, statement: str
) -> None:
    ledger = opened(tmp_path, connect=counted_connect)
    open_session(ledger, "s", "t")
    append_tokens(ledger, "s", 1, 0, [1])
    ledger.commit().result(20)

    def fail(sql: str) -> None:
        if sql.startswith(statement):
            raise sqlite_error(name)

    on_statement.on_statement = staticmethod(fail)
    intent, commit = append_tokens(ledger, "s", 1, 1, [2]), ledger.commit()
    for future in (intent, commit):
        with pytest.raises(LedgerError, match="durability"):
            future.result(20)
    on_statement.on_statement = staticmethod(lambda sql: None)
    with pytest.raises(LedgerError):
        append_tokens(ledger, "s", 1, 1, [2]).result(20)
    with pytest.raises(LedgerError):
        ledger.commit().result(20)
    assert ledger.failure is not None
    assert name in ledger.failure.why
    assert tokens(ledger) == [1], "reading goes on"
    ledger.close()
    ledger = opened(tmp_path)
    assert tokens(ledger) == [1]
    ledger.close()


def test_a_full_disk_spends_the_reserve_then_refuses_without_latching(
    tmp_path: Path, on_statement: type[CountedDb]
) -> None:
    room, freed = [True], list[int]()

    def on_full() -> bool:
        freed.append(1)
        room[0] = len(freed) == 1
        return len(freed) == 1

    def fail(sql: str) -> None:
        if sql == "COMMIT" and not room[0]:
            raise sqlite_error("SQLITE_FULL")

    ledger = opened(tmp_path, connect=counted_connect, on_full=on_full)
    on_statement.on_statement = staticmethod(fail)
    open_session(ledger, "s", "t")
    ledger.commit().result(20)
    room[0] = False
    append_tokens(ledger, "s", 1, 0, [1])
    ledger.commit().result(20)  # the reserve was there for this
    room[0] = False
    refused = append_tokens(ledger, "s", 1, 1, [2])
    with pytest.raises(StoreFull, match="full"):
        ledger.commit().result(20)
    with pytest.raises(StoreFull):
        refused.result(20)
    assert ledger.stats.is_full
    room[0] = True
    append_tokens(ledger, "s", 1, 1, [2])
    ledger.commit().result(20)
    assert not ledger.stats.is_full
    assert tokens(ledger) == [1, 2]
    ledger.close()


def test_acknowledged_intents_are_durable_whichever_statement_fails(
    tmp_path: Path, on_statement: type[CountedDb]
) -> None:
    """The k-th statement of a commit fails, k = 1.. until none does."""
    k = 0
    while True:
        k += 1
        folder = tmp_path / str(k)
        folder.mkdir()
        ledger, seen = opened(folder, connect=counted_connect), [0]

        def fail(sql: str, k: int = k, seen: list[int] = seen) -> None:
            seen[0] += 1
            if seen[0] == k:
                raise sqlite_error("SQLITE_IOERR_WRITE")

        on_statement.on_statement = staticmethod(fail)
        acked = list[int]()
        open_session(ledger, "s", "t")
        for position in range(3):
            intent = append_tokens(ledger, "s", 1, position, [position])
            ledger.commit().exception(20)
            if intent.exception(20) is None:
                acked.append(position)
        on_statement.on_statement = staticmethod(lambda sql: None)
        failed = ledger.failure is not None
        ledger.close()
        ledger = opened(folder)
        record = ledger.load_session("s").result(20)
        kept = record.tokens if record else []
        ledger.close()
        assert kept == list(range(len(kept)))
        assert len(kept) >= len(acked)
        if not failed:
            break
    assert k > 15


def test_the_log_is_checkpointed_before_it_grows_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "WAL_BYTES_MAX", 100_000)
    ledger = opened(tmp_path)
    open_session(ledger, "s", "t")
    sizes = list[int]()
    for position in range(60):
        append_tokens(ledger, "s", 1, position, [position])
        ledger.commit().result(20)
        ledger.read(lambda _: None).result(20)
        sizes.append((tmp_path / "meta.db-wal").stat().st_size)
    assert max(sizes) < 200_000
    assert tokens(ledger) == list(range(60))
    ledger.close()


def test_a_rewrite_of_the_file_leaves_no_long_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would zero all of it, while commits wait."""
    monkeypatch.setattr(ledger_module, "WAL_BYTES_MAX", 100_000)
    source, ids = tmp_path / "source", list(range(100_000))
    source.mkdir()
    ledger, log = opened(source), source / "meta.db-wal"
    open_session(ledger, "s", "t")
    append_tokens(ledger, "s", 1, 0, ids)
    ledger.commit().result(20)
    ledger.clean().result(20)
    assert log.stat().st_size == 100_000
    append_tokens(ledger, "s", 1, len(ids), ids)  # longer than what is left of the log
    ledger.commit().result(20)
    append_tokens(ledger, "s", 1, 2 * len(ids), [1])
    ledger.commit().result(20)
    copy = Path(shutil.copytree(source, tmp_path / "killed"))
    for one in (ledger, opened(copy)):
        assert tokens(one) == [*ids, *ids, 1]
        one.close()


def test_a_failed_read_ends_neither_the_thread_nor_the_ledger(ledger: Ledger) -> None:
    with pytest.raises(StoreCorrupt, match="nonsense"):
        ledger.read(lambda db: db.execute("SELECT nonsense")).result(20)
    open_session(ledger, "s", "t")
    ledger.commit().result(20)
    assert tokens(ledger) == []
    assert repr(ledger).startswith("<Ledger open commits=1 p50=")


def test_the_safety_settings_of_sqlite_are_on(ledger: Ledger) -> None:
    def read(db: sqlite3.Connection) -> dict[str, Any]:
        names = ("journal_mode", "synchronous", "locking_mode", "mmap_size", "trusted_schema",
                 "cell_size_check", "application_id")  # fmt: skip
        return {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in names}

    assert ledger.read(read).result(20) == {
        "journal_mode": "wal", "synchronous": 2, "locking_mode": "exclusive", "mmap_size": 0,
        "trusted_schema": 0, "cell_size_check": 1, "application_id": writes.APPLICATION_ID,
    }  # fmt: skip
    with (
        pytest.raises(sqlite3.OperationalError, match="locked"),
        sqlite3.connect(ledger.path, timeout=0) as other,
    ):
        other.execute("SELECT * FROM store")
    other.close()


def test_a_disk_that_fails_while_room_is_made_acknowledges_nothing(
    tmp_path: Path, on_statement: type[CountedDb]
) -> None:
    """The commit finds no room, the checkpoint that makes some fails: a later commit may report
    success without being durable."""
    ledger = opened(tmp_path, connect=counted_connect)
    commits = list[str]()

    def fail(sql: str) -> None:
        if sql == "COMMIT":
            commits.append(sql)
            if len(commits) == 1:
                raise sqlite_error("SQLITE_FULL")
        if sql.startswith("PRAGMA wal_checkpoint"):
            raise sqlite_error("SQLITE_IOERR_FSYNC")

    on_statement.on_statement = staticmethod(fail)
    intent, commit = open_session(ledger, "s", "t"), ledger.commit()
    for future in (intent, commit):
        with pytest.raises(LedgerError, match="durability"):
            future.result(20)
    assert len(commits) == 1
    on_statement.on_statement = staticmethod(lambda sql: None)
    ledger.close()


class Crowded:
    """A lock; at every release another caller runs before its owner continues."""

    def __init__(self, lock: threading.Lock, other: Callable[[], object]) -> None:
        self._lock, self._other, self._is_in = lock, other, False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._is_in:
            self._is_in = True
            self._other()
            self._is_in = False


def test_every_intent_given_to_a_closing_ledger_resolves(tmp_path: Path) -> None:
    """An intent submitted before the close is written, a later one is refused."""
    ledger, late = opened(tmp_path), list[Future[int]]()
    first = open_session(ledger, "first", "t")
    ledger._lock = Crowded(  # type: ignore[assignment]
        ledger._lock, lambda: late.append(open_session(ledger, f"late{len(late)}", "t"))
    )
    ledger.close()
    ledger.close()
    assert first.result(20) > 0
    assert late
    for future in late:
        with pytest.raises(StoreError, match="closed"):
            future.result(20)


def test_intents_pending_when_the_disk_fails_resolve_at_close(
    tmp_path: Path, on_statement: type[CountedDb]
) -> None:
    ledger = opened(tmp_path, connect=counted_connect)
    late = list[Future[int]]()

    def fail(sql: str) -> None:
        if sql == "COMMIT":
            late.append(open_session(ledger, "late", "t"))
            raise sqlite_error("SQLITE_IOERR_FSYNC")

    on_statement.on_statement = staticmethod(fail)
    open_session(ledger, "s", "t")
    assert ledger.commit().exception(20) is not None
    on_statement.on_statement = staticmethod(lambda sql: None)
    ledger.close()
    with pytest.raises(LedgerError):
        late[0].result(20)
