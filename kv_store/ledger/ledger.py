"""The token ledger and page manifest: one SQLite file, one connection, one thread.

An *intent* is what one call writes, all or nothing. `commit()` hands every intent given since
the last one to the thread, which puts all waiting groups into one transaction: group commit.
A future resolves only when its intent is durable. After an I/O error nothing is acknowledged any
more (`LedgerError`, latched): after a failed fsync the kernel's pages are clean, so that a retry
would succeed without writing them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kv_store import keys, osio
from kv_store.errors import (
    LedgerError,
    LedgerRefused,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreVersion,
)
from kv_store.ledger import continuity, queries, writes
from kv_store.ledger.budget import over_share
from kv_store.ledger.queries import SessionInfo, SessionRecord, SuspectInfo
from kv_store.ledger.writes import Op
from kv_store.pages.index import PageRef
from kv_store.threads import new_future, settle

T = TypeVar("T")
Opener = Callable[[str], sqlite3.Connection]
WAL_BYTES_MAX = 4 << 20  # checkpoint beyond this: reopening replays at most so much
COMMIT_BYTES = 8 << 10  # what a small transaction adds to the log, beside its records
RECORD_BYTES = 4 << 10
ZERO_BYTES = 1 << 20  # of the log overwritten at once
COMPACT_BYTES = 4 << 20  # of a ledger that is rewritten in less than 0.1 s
COMPACT_BYTES_MAX = 256 << 20  # rewritten on request: takes seconds, and so much memory
# SQLite's error names for a writable file whose bytes are not a database, or not a whole one
_DAMAGE = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_IOERR_SHORT_READ", "SQLITE_READONLY")
PAGE_QUERY = (
    "SELECT page_id, gen, state, repr_id, content_key, parent_key, tokens, payload_digest,"
    " sealed_checksum, priority, lru_seq FROM page ORDER BY lru_seq"
)
EXTENT_QUERY = (
    "SELECT extent_index, first_page_id, places, page_bytes, repr_id FROM extent"
    " WHERE kind = 'page' ORDER BY extent_index"
)
PRUNES_MAX = 64  # commits of one `prune`
COMMIT_TIMES_KEPT = 512  # enough for a p99
_SQLITE_HEADER = struct.Struct(">60xI4xI")  # user_version at 60, application_id at 68
assert _SQLITE_HEADER.size == 72


@dataclass(frozen=True, slots=True)
class PageRow:
    ref: PageRef
    state: str
    repr_id: bytes
    key: bytes
    parent: bytes
    tokens: bytes
    digest: bytes
    checksum: bytes
    priority: int
    lru_seq: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The ledger's rows when it was opened, without sessions."""

    store_uuid: bytes
    epoch: int
    clean: bool
    boot_id: str
    next_page_id: int
    next_extent: int
    extents: list[tuple[int, int, int, int, bytes]]  # index, first page id, slots, bytes, repr
    pages: list[PageRow]
    pages_malformed: int
    reprs: dict[bytes, str]
    sessions: int
    session_bytes: int  # of their tokens


@dataclass(slots=True)
class _Intent:
    ops: tuple[Op, ...]
    future: Future[int]
    error: Exception | None = None  # of this intent alone


@dataclass(slots=True)
class _Group:
    intents: list[_Intent]
    future: Future[int]


@dataclass(slots=True)
class LedgerStats:
    commits: int = 0
    sessions: int = 0
    session_bytes: int = 0  # of their rows: exact after `prune`, later at most too many
    is_full: bool = False  # the last commit found no room; the next may
    commit_us: deque[float] = field(default_factory=lambda: deque(maxlen=COMMIT_TIMES_KEPT))


def connect(path: str, *, uri: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(path, uri=uri, isolation_level=None, check_same_thread=False, timeout=0)
    db.text_factory = lenient_text
    return db


def lenient_text(raw: bytes) -> str:
    """Decode text, replacing invalid bytes: one damaged row must not hide all the others."""
    return raw.decode("utf-8", "replace")


class Ledger:
    """The open ledger and its thread. The module docstring says when futures resolve."""

    def __init__(
        self,
        path: str,
        repr_id: bytes,
        *,
        store_uuid: bytes,
        on_full: Callable[[], bool] = lambda: False,
        connect: Opener = connect,
    ) -> None:
        """Open or create the file. Raises StoreVersion (untouched), StoreCorrupt, LedgerError.

        `on_full` frees reserve space once and returns whether it did.
        """
        self.path = path
        self.repr_id = repr_id
        self.stats = LedgerStats()
        self._on_full = on_full
        self._pending: list[_Intent] = []
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Group | Callable[[], None] | None] = queue.SimpleQueue()
        self.failure: LedgerError | None = None  # why durability ended
        self._log_bytes = 0  # written since the last checkpoint, roughly
        self._closed = False
        check_version(path)
        self._db = connect(path)
        try:
            self.replay = self._prepare(store_uuid)
            self.stats.sessions = self.replay.sessions
            self.stats.session_bytes = self.replay.session_bytes
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise _opening_error(path, error) from error
            if isinstance(error, TypeError | ValueError | OverflowError):  # a value of another type
                raise StoreCorrupt(f"the ledger {path} is damaged", why=str(error)) from error
            raise
        self._thread = threading.Thread(target=self._run, name="kv-ledger", daemon=True)
        self._thread.start()

    # -- sessions -----------------------------------------------------------------------------

    def load_session(self, session: str) -> Future[SessionRecord | None]:
        """Tokens and turns of a session; None if unknown; StoreCorrupt if damaged."""
        return self.read(lambda db: queries.load(db, session))

    def list_sessions(self) -> Future[list[SessionInfo]]:
        """Every session, most recently used first."""
        return self.read(queries.infos)

    def session_of_turn(self, tenant: str, turn: str) -> Future[str | None]:
        """The session of a tenant that has this turn, None if none has."""
        return self.read(lambda db: queries.session_of_turn(db, tenant, turn))

    def suspects(self) -> Future[list[SuspectInfo]]:
        """Every session that a SetSuspect marks."""
        return self.read(queries.suspects)

    def shared_tokens(self, session: str, tenant: str, tokens: keys.Tokens) -> Future[int]:
        """How many leading tokens of this timeline another session of the tenant has, too."""
        ids = keys.token_bytes(tokens)
        return self.read(lambda db: queries.shared_tokens(db, session, tenant, ids))

    def clean(self, compact_bytes: int = COMPACT_BYTES) -> Future[None]:
        """Have deleted rows gone from the files: overwrite what the log holds of earlier commits,
        and write a file of up to `compact_bytes` anew, as SQLite may leave a copy of a row behind
        when it moves it between two pages. Raises LedgerError, or StoreFull: nothing was changed.
        """
        return self.read(lambda _: self._clean(compact_bytes))

    def prune(self, sessions_max: int, keep: Collection[str], bytes_max: int = 1 << 62) -> int:
        """Forget the longest unused sessions of tenants that have more than their share of
        `sessions_max` or `bytes_max`, never those in `keep`. Returns how many.

        Commits and blocks. A session that is used while this runs stays.
        """
        kept, sessions = frozenset(keep), 0
        for _ in range(PRUNES_MAX):
            known = self.read(queries.kept).result()
            self.stats.session_bytes = sum(session.row_bytes for session in known)
            over = over_share(known, sessions_max, bytes_max, kept, queries.PRUNED_AT_ONCE_MAX)
            if not over:
                break
            forgets = [writes.ForgetIdle(one.id, one.epoch, one.used_seq) for one in over]
            written = self.append(*forgets)
            self.commit()
            written.result()
            sessions += len(over)
        return sessions

    def usage(self) -> Future[dict[str, tuple[int, int]]]:
        """Sessions and bytes of their rows, by tenant."""

        def ask(db: sqlite3.Connection) -> dict[str, tuple[int, int]]:
            found: dict[str, tuple[int, int]] = {}
            for session in queries.kept(db):
                count, size = found.get(session.tenant, (0, 0))
                found[session.tenant] = count + 1, size + session.row_bytes
            return found

        return self.read(ask)

    # -- the interface underneath -------------------------------------------------------------

    def append(self, *ops: Op) -> Future[int]:
        """Add one atomic intent, of any number of records, to the next commit. Resolves to the
        commit's sequence number."""
        future: Future[int] = new_future()
        with self._lock:
            if self.failure is not None or self._closed:
                future.set_exception(self.failure or StoreError("the ledger is closed"))
            else:
                self._pending.append(_Intent(ops, future))
        return future

    def commit(self) -> Future[int]:
        """Make every intent appended so far durable. Fails with the first failure among them."""
        future: Future[int] = new_future()
        with self._lock:
            if self.failure is not None or self._closed:
                future.set_exception(self.failure or StoreError("the ledger is closed"))
            else:
                self._hand_over(future)
        return future

    def _hand_over(self, future: Future[int]) -> None:
        """Give what is pending to the thread; the lock is held."""
        self._queue.put(_Group(self._pending, future))
        self._pending = []

    def read(self, query: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Run a read-only query on the ledger thread, after every commit() made before it."""
        future: Future[T] = new_future()
        with self._lock:
            if self._closed:
                future.set_exception(StoreError("the ledger is closed"))
            else:
                self._queue.put(lambda: settle(future, lambda: self._ask(query)))
        return future

    def _ask(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return query(self._db)
        except sqlite3.DatabaseError as error:
            raise StoreCorrupt("the ledger cannot be read", why=str(error)) from error

    def close(self) -> None:
        """Commit what is pending, checkpoint, close. Every future given before resolves."""
        with self._lock:  # held throughout: an intent appended after the commit would never resolve
            if not self._closed:
                self._hand_over(new_future())
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._db.close()

    def __repr__(self) -> str:
        state = "failed" if self.failure else "closed" if self._closed else "open"
        times = sorted(self.stats.commit_us)
        p50 = f"{times[len(times) // 2]:.0f}us" if times else "-"
        return f"<Ledger {state} commits={self.stats.commits} p50={p50}>"

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            groups: list[_Group] = []
            while isinstance(item, _Group):  # everything that waits shares one transaction
                groups.append(item)
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if groups:
                self._commit_groups(groups)
            if item is None:
                self._checkpoint("TRUNCATE")
                return
            if not isinstance(item, _Group):
                item()

    def _commit_groups(self, groups: list[_Group]) -> None:
        intents = [intent for group in groups for intent in group.intents]
        start = time.perf_counter()
        sequence, everyone = 0, None
        try:
            if self.failure is not None:
                raise self.failure
            sequence = self._transact(intents)
        except Exception as error:
            everyone = error
        self.stats.commits += 1
        self.stats.commit_us.append((time.perf_counter() - start) * 1e6)
        for group in groups:
            first = everyone
            for intent in group.intents:
                first = first or intent.error
                _resolve(intent.future, sequence, everyone or intent.error)
            _resolve(group.future, sequence, first)
        self._log_bytes += COMMIT_BYTES + sum(_size(op) for i in intents for op in i.ops)
        self.stats.session_bytes += sum(_row_bytes(op) for i in intents for op in i.ops)
        if self._log_bytes > WAL_BYTES_MAX:
            self._checkpoint("PASSIVE")

    def _transact(self, intents: list[_Intent]) -> int:
        """Write one transaction. A full disk leaves nothing of it, so it is retried: first after a
        checkpoint, which frees the log's file for reuse, then after `on_full` has freed space."""
        for attempt, make_room in enumerate((lambda: True, lambda: True, self._on_full)):
            if not make_room():
                break
            if attempt:
                self._checkpoint("PASSIVE")
                if self.failure is not None:  # a disk error: a commit may not be durable any more
                    self._roll_back()
                    raise self.failure
            try:
                sequence = self._transact_once(intents)
                self.stats.is_full = False
                return sequence
            except sqlite3.DatabaseError as error:
                self._roll_back()
                if not _is_full(error):
                    raise self._latch(error) from error
        self.stats.is_full = True
        raise StoreFull(
            "the disk is full: nothing more can be made durable",
            fix="free disk space; new turns are refused until then",
        )

    def _transact_once(self, intents: list[_Intent]) -> int:
        db, sessions = self._db, 0
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE store SET commit_seq = commit_seq + 1")
        for intent in intents:
            db.execute("SAVEPOINT intent")
            change, intent.error = 0, None
            try:
                for op in intent.ops:
                    change += op.write(db) or 0
            except sqlite3.IntegrityError as error:
                intent.error = LedgerRefused("the ledger refused a record", why=str(error))
            except sqlite3.DatabaseError:
                raise
            except Exception as error:
                intent.error = error
            if intent.error is None:
                sessions += change
            else:
                db.execute("ROLLBACK TO intent")
            db.execute("RELEASE intent")
        sequence: int = db.execute("SELECT commit_seq FROM store").fetchone()[0]
        db.execute("COMMIT")
        self.stats.sessions += sessions
        return sequence

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            try:
                self._db.execute("ROLLBACK")
            except sqlite3.DatabaseError as error:
                raise self._latch(error) from error

    def _latch(self, error: BaseException) -> LedgerError:
        name = getattr(error, "sqlite_errorname", "") or type(error).__name__
        self.failure = LedgerError(
            "the ledger cannot promise durability any more",
            why=f"{name}: {error}",
            fix="check the disk; the daemon exits and recovers from what was durable",
        )
        return self.failure

    def _checkpoint(self, kind: str) -> None:
        """Run a checkpoint; SQLite's automatic ones are off, as SQLite ignores their errors.

        PASSIVE keeps the log's file, so its bytes stay allocated when the disk fills up.
        """
        if self.failure is not None:
            return
        try:
            self._db.execute(f"PRAGMA wal_checkpoint({kind})").fetchall()
            self._log_bytes = 0
        except sqlite3.DatabaseError as error:
            if not _is_full(error):
                self._latch(error)

    def _clean(self, compact_bytes: int) -> None:
        """Rewrite a small file, begin the log again with a commit, and zero what is behind that.
        Then cut the log, which a rewrite makes as long as the file, to WAL_BYTES_MAX.

        The log always has a valid head: an empty one would read as lost after a crash.
        """
        if self.failure is not None:
            raise self.failure
        db = self._db
        try:
            page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
            if db.execute("PRAGMA page_count").fetchone()[0] * page_bytes <= compact_bytes:
                db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
            db.execute("UPDATE store SET commit_seq = commit_seq + 1")
            frames = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
        except sqlite3.DatabaseError as error:
            if _is_full(error):
                raise StoreFull(
                    "the disk is full: the ledger cannot be rewritten",
                    why="that takes as much free space as the ledger is large",
                    fix="free disk space where the store lies, then try again",
                ) from error
            raise self._latch(error) from error
        self._log_bytes = 0
        used = continuity.log_bytes(frames, page_bytes)
        try:
            with open(osio.open_plain(f"{self.path}-wal", os.O_RDWR), "r+b", buffering=0) as log:
                size = os.fstat(log.fileno()).st_size
                for start in range(used, size, ZERO_BYTES):
                    os.pwrite(log.fileno(), bytes(min(ZERO_BYTES, size - start)), start)
                os.fsync(log.fileno())
                os.ftruncate(log.fileno(), min(size, max(used, WAL_BYTES_MAX)))
        except OSError as error:
            raise self._latch(error) from error

    # -- opening ------------------------------------------------------------------------------

    def _prepare(self, store_uuid: bytes) -> Replay:
        db = self._db
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # before the first access: no shared memory
        mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerError(f"the ledger cannot use write-ahead logging (mode {mode})")
        for pragma in (
            "synchronous=FULL",
            "mmap_size=0",
            "trusted_schema=OFF",
            "cell_size_check=ON",
            "wal_autocheckpoint=0",
            "secure_delete=ON",
            "temp_store=MEMORY",  # what `VACUUM` copies must not lie outside of the store
        ):
            db.execute(f"PRAGMA {pragma}").fetchall()
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._create(store_uuid)
        elif version != writes.SCHEMA_VERSION:
            raise StoreVersion(f"the store has schema {version}, this program knows 1")
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk: searches take longer
            db.execute(writes.TURN_INDEX)
        return _replay(db)

    def _create(self, store_uuid: bytes) -> None:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        for statement in writes.SCHEMA.split(";"):
            if statement.strip():
                db.execute(statement)
        db.execute("INSERT INTO store VALUES (1, ?, 0, 1, '', 0, 1, 0)", (store_uuid,))
        db.execute(f"PRAGMA application_id={writes.APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={writes.SCHEMA_VERSION}")
        db.execute("COMMIT")
        # the version must be readable in the file itself, without opening it as a database
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _resolve(future: Future[int], sequence: int, error: Exception | None) -> None:
    if error is None:
        future.set_result(sequence)
    else:
        future.set_exception(error)


def check_version(path: str) -> None:
    """Refuse a newer file before SQLite can touch it; create a missing one with mode 0600."""
    try:
        fd = osio.open_plain(path, os.O_RDWR | os.O_CREAT)
        with open(fd, "rb", buffering=0) as file:
            head = file.read(_SQLITE_HEADER.size)
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be opened",
            why=error.strerror or "",
            fix="it must be a plain file that this user may write: move away what stands there, or"
            " fix its permissions",
        ) from error
    if len(head) < _SQLITE_HEADER.size:
        return  # a crash before the first checkpoint: the log, if any, has the rest
    version, application = _SQLITE_HEADER.unpack(head)
    if application == writes.APPLICATION_ID and version > writes.SCHEMA_VERSION:
        raise StoreVersion(
            f"the store was written by a newer program (schema {version})",
            why=f"this one knows schema {writes.SCHEMA_VERSION}",
            fix="use the newer program, or another store directory; nothing was changed",
        )


def _opening_error(path: str, error: sqlite3.DatabaseError) -> StoreError:
    name = getattr(error, "sqlite_errorname", "")
    if is_damage(error) or name == "SQLITE_ERROR":  # valid SQL fails only on another schema
        return StoreCorrupt(f"the ledger {path} is damaged", why=str(error))
    if _is_full(error):
        return StoreFull("the disk is full: the ledger cannot be opened", why=str(error))
    return LedgerError(f"the ledger {path} cannot be opened", why=f"{name}: {error}")


def is_damage(error: BaseException | None) -> bool:
    """Whether an error of SQLite means wrong bytes in the file, not a disk error or broken rule."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(_DAMAGE)


def pages_of(db: sqlite3.Connection, repr_id: bytes) -> list[PageRow]:
    """The sound rows of one representation's pages, oldest first."""
    rows = (page_row(row) for row in db.execute(PAGE_QUERY))
    return [row for row in rows if row is not None and row.repr_id == repr_id]


def page_row(row: tuple[Any, ...]) -> PageRow | None:
    """A manifest row, or None if a damaged file gave a field another type than it was written."""
    page_id, gen, state, repr_id, *blobs, priority, lru_seq = row
    blobs = [b"" if blob is None else blob for blob in blobs]
    numbers = (page_id, gen, priority, lru_seq)
    if not all(type(n) is int for n in numbers) or not all(type(b) is bytes for b in blobs):
        return None
    if not isinstance(state, str) or not isinstance(repr_id, bytes) or min(numbers[:2]) < 0:
        return None
    key, parent, tokens, digest, checksum = blobs
    ref = PageRef(page_id, gen)
    return PageRow(ref, state, repr_id, key, parent, tokens, digest, checksum, priority, lru_seq)


def _size(op: Op) -> int:
    rows = len(op.refs) if isinstance(op, (writes.FreePages, writes.RetirePages)) else 1
    return RECORD_BYTES * rows + (len(op.ids) if isinstance(op, writes.AppendTokens) else 0)


def _row_bytes(op: Op) -> int:
    """What a record adds to the rows of its session."""
    match op:
        case writes.AppendTokens():
            return len(op.ids)
        case writes.AppendTurn():
            return queries.ROW_BYTES + len(op.sampling)
        case writes.OpenSession():
            return queries.ROW_BYTES + len(op.meta)
        case _:
            return 0


def _is_full(error: BaseException) -> bool:
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"


def why_refused(db: sqlite3.Connection, *, thorough: bool) -> str:
    """Why the file would be set aside if a store opened it; "" = it would not be. `thorough`: also
    run SQLite's page check, which an opening does only after a crash."""
    try:
        if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            return "it has no table: it was emptied, or its owner was killed before its first write"
        _replay(db, thorough=thorough)
    except StoreCorrupt as error:
        return error.why or error.what
    except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as error:
        return str(error)
    return ""


def _replay(db: sqlite3.Connection, *, thorough: bool = True) -> Replay:
    head = db.execute(
        "SELECT store_uuid, epoch, clean, boot_id, next_page_id, next_extent FROM store"
    ).fetchone()
    if head is None:
        raise StoreCorrupt("the ledger has no store row")
    if thorough and not head[2]:  # the last process did not close it
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreCorrupt("the ledger is damaged", why=found)
    rows = [page_row(row) for row in db.execute(PAGE_QUERY)]
    return Replay(
        store_uuid=head[0],
        epoch=head[1],
        clean=bool(head[2]),
        boot_id=head[3],
        next_page_id=head[4],
        next_extent=head[5],
        extents=db.execute(EXTENT_QUERY).fetchall(),
        pages=[row for row in rows if row is not None],
        pages_malformed=rows.count(None),
        reprs=dict(db.execute("SELECT repr_id, descriptor FROM repr").fetchall()),
        sessions=db.execute("SELECT count(*) FROM session").fetchone()[0],
        session_bytes=4 * int(db.execute("SELECT total(ledger_len) FROM session").fetchone()[0]),
    )
