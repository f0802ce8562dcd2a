"""What the ledger can record: the tables, one frozen record per kind of write, and their rules.

Owns the SQL. Every write of a session names its epoch: a lower one is refused (fencing), and
tokens only append at the end of the timeline (no holes). Refuses to know threads and files.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from kv_store import keys
from kv_store.errors import LedgerRefused, StoreCorrupt
from kv_store.pages.index import PageRef

APPLICATION_ID = 0x42454B56  # "BEKV", in the SQLite header
SCHEMA_VERSION = 1
TURNS_KEPT = 64  # per session: enough to answer a repeated or resumed request
# finished turns that at least ?1 later ones of their session follow
OLD_TURNS = """SELECT session, id FROM (
  SELECT session, id, status, row_number() OVER
    (PARTITION BY session ORDER BY seq DESC, prompt_start DESC, id DESC) AS age
  FROM turn WHERE session IN
    (SELECT session FROM turn GROUP BY session HAVING count(*) > ?1))
WHERE age > ?1 AND status != 'running'"""

# session_page, snapshot and migration are never written: every store of this version has them
SCHEMA = """
CREATE TABLE store (
  one INTEGER PRIMARY KEY CHECK (one = 1), store_uuid BLOB NOT NULL, epoch INTEGER NOT NULL,
  clean INTEGER NOT NULL, boot_id TEXT NOT NULL, next_page_id INTEGER NOT NULL,
  next_extent INTEGER NOT NULL, commit_seq INTEGER NOT NULL);
CREATE TABLE repr (
  repr_id BLOB PRIMARY KEY, descriptor TEXT NOT NULL, page_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE session (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, repr_id BLOB NOT NULL, epoch INTEGER NOT NULL,
  owner_incarnation INTEGER NOT NULL, owner_lane TEXT NOT NULL, ledger_len INTEGER NOT NULL,
  state TEXT NOT NULL, meta TEXT NOT NULL, used_seq INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE turn (
  session TEXT NOT NULL, id TEXT NOT NULL, seq INTEGER NOT NULL, idempotency_key TEXT,
  prompt_start INTEGER NOT NULL, prompt_end INTEGER NOT NULL, sampling TEXT NOT NULL,
  seed INTEGER NOT NULL, status TEXT NOT NULL, finish_reason TEXT NOT NULL,
  PRIMARY KEY (session, id)) WITHOUT ROWID;
CREATE UNIQUE INDEX turn_idempotency ON turn (session, idempotency_key)
  WHERE idempotency_key IS NOT NULL;
CREATE TABLE token_blob (
  session TEXT NOT NULL, start INTEGER NOT NULL, n INTEGER NOT NULL, ids BLOB NOT NULL,
  checksum BLOB NOT NULL, PRIMARY KEY (session, start)) WITHOUT ROWID;
CREATE TABLE page (
  page_id INTEGER PRIMARY KEY, gen INTEGER NOT NULL, state TEXT NOT NULL, repr_id BLOB NOT NULL,
  content_key BLOB, parent_key BLOB, n_tokens INTEGER NOT NULL, tokens BLOB, payload_digest BLOB,
  sealed_checksum BLOB, epoch INTEGER NOT NULL, priority INTEGER NOT NULL,
  lru_seq INTEGER NOT NULL);
CREATE UNIQUE INDEX page_key ON page (content_key) WHERE state = 'published';
CREATE TABLE session_page (
  session TEXT NOT NULL, page_index INTEGER NOT NULL, page_id INTEGER NOT NULL,
  gen INTEGER NOT NULL, PRIMARY KEY (session, page_index)) WITHOUT ROWID;
CREATE TABLE extent (
  extent_index INTEGER PRIMARY KEY, kind TEXT NOT NULL, first_page_id INTEGER NOT NULL,
  places INTEGER NOT NULL, page_bytes INTEGER NOT NULL, repr_id BLOB NOT NULL);
CREATE TABLE snapshot (
  key BLOB PRIMARY KEY, kind TEXT NOT NULL, boundary INTEGER NOT NULL, page_id INTEGER NOT NULL,
  gen INTEGER NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, checksum BLOB NOT NULL,
  repr_id BLOB NOT NULL, lru_seq INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE migration (
  id TEXT PRIMARY KEY, session TEXT NOT NULL, peer TEXT NOT NULL, role TEXT NOT NULL,
  state TEXT NOT NULL, epoch INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE suspect (
  session TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, strikes INTEGER NOT NULL,
  alone INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class OpenSession:
    session: str
    tenant: str
    repr_id: bytes
    epoch: int
    meta: str


@dataclass(frozen=True, slots=True)
class SetMeta:
    session: str
    epoch: int
    state: str
    meta: str


@dataclass(frozen=True, slots=True)
class SetOwner:
    """The one commit point of a hand-over: `epoch` becomes the session's, and must be higher."""

    session: str
    epoch: int
    incarnation: int
    lane: str


@dataclass(frozen=True, slots=True)
class DropSession:
    session: str


@dataclass(frozen=True, slots=True)
class CopySession:
    """A fork: a new session with the source's tokens and `meta`, and no turns."""

    source: str
    session: str
    tenant: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ForgetIdle:
    """Drop a session unless it was used, or changed hands, since it was chosen."""

    session: str
    epoch: int
    used_seq: int


@dataclass(frozen=True, slots=True)
class PruneTurns:
    """Keep the last `keep` turns of every session, and those still running."""

    keep: int


@dataclass(frozen=True, slots=True)
class AppendTurn:
    session: str
    epoch: int
    turn: str
    prompt_start: int
    prompt_end: int
    sampling: str
    seed: int
    idempotency_key: str | None


@dataclass(frozen=True, slots=True)
class FinishTurn:
    session: str
    epoch: int
    turn: str
    status: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class AppendTokens:
    session: str
    epoch: int
    start: int
    ids: bytes  # u32 LE


@dataclass(frozen=True, slots=True)
class TruncateTokens:
    """Cut the timeline to `length` tokens (a client edited its history)."""

    session: str
    epoch: int
    length: int


@dataclass(frozen=True, slots=True)
class SetSuspect:
    """Mark (strikes > 0) or clear (0) a session that was in a crashed step."""

    session: str
    incarnation: int
    strikes: int
    alone: bool


@dataclass(frozen=True, slots=True)
class PublishPage:
    ref: PageRef
    key: bytes
    parent: bytes
    tokens: bytes
    repr_id: bytes
    digest: bytes
    checksum: bytes
    epoch: int
    priority: int
    lru_seq: int


@dataclass(frozen=True, slots=True)
class FreePage:
    """The slot's next generation is `ref.gen`; `bad` retires it."""

    ref: PageRef
    repr_id: bytes
    bad: bool


@dataclass(frozen=True, slots=True)
class AgePages:
    """Persist (page_id, gen, priority, lru_seq)."""

    rows: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class AddExtent:
    index: int
    first_page_id: int
    slots: int
    page_bytes: int
    repr_id: bytes


@dataclass(frozen=True, slots=True)
class DropExtent:
    index: int
    first_page_id: int
    slots: int


@dataclass(frozen=True, slots=True)
class StartEpoch:
    """First write of a process: older work is void from here on."""

    epoch: int
    boot_id: str
    repr_id: bytes
    descriptor: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class AddRepr:
    """A further representation that this process keeps pages of."""

    repr_id: bytes
    descriptor: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class MarkClean:
    pass


Op = (
    OpenSession
    | SetMeta
    | SetOwner
    | DropSession
    | CopySession
    | ForgetIdle
    | PruneTurns
    | AppendTurn
    | FinishTurn
    | AppendTokens
    | TruncateTokens
    | SetSuspect
    | PublishPage
    | FreePage
    | AgePages
    | AddExtent
    | DropExtent
    | StartEpoch
    | AddRepr
    | MarkClean
)


def apply(db: sqlite3.Connection, op: Op) -> int:
    """Write one record; gives how many sessions there are more. Raises LedgerRefused when it
    breaks a rule; the caller rolls back."""
    match op:
        case AppendTokens() | TruncateTokens():
            _apply_tokens(db, op)
        case AppendTurn() | FinishTurn():
            _apply_turn(db, op)
        case OpenSession() | SetMeta() | SetOwner() | SetSuspect():
            _apply_session(db, op)
        case CopySession():
            _copy_session(db, op)
        case DropSession() | ForgetIdle() | PruneTurns():
            return -_apply_forgetting(db, op)
        case PublishPage() | FreePage() | AgePages():
            _apply_page(db, op)
        case AddExtent() | DropExtent() | StartEpoch() | AddRepr() | MarkClean():
            _apply_store(db, op)
    return int(isinstance(op, OpenSession | CopySession))


def _apply_tokens(db: sqlite3.Connection, op: AppendTokens | TruncateTokens) -> None:
    length = _fence(db, op.session, op.epoch)
    if isinstance(op, AppendTokens):
        n = len(op.ids) // 4
        if op.start != length:
            raise LedgerRefused(
                f"tokens of session {op.session} must continue at {length}, not {op.start}"
            )
        if n:
            _insert_blob(db, op.session, op.start, op.ids)
            db.execute("UPDATE session SET ledger_len = ? WHERE id = ?", (length + n, op.session))
        return
    if not 0 <= op.length <= length:
        raise LedgerRefused(f"session {op.session} has {length} tokens, cannot keep {op.length}")
    row = db.execute(
        "SELECT start, ids, checksum FROM token_blob WHERE session = ? AND start < ?"
        " ORDER BY start DESC LIMIT 1",
        (op.session, op.length),
    ).fetchone()
    db.execute("DELETE FROM token_blob WHERE session = ? AND start >= ?", (op.session, op.length))
    if row and row[0] + len(row[1]) // 4 > op.length:
        _check_blob(op.session, *row)
        db.execute("DELETE FROM token_blob WHERE session = ? AND start = ?", (op.session, row[0]))
        _insert_blob(db, op.session, row[0], row[1][: (op.length - row[0]) * 4])
    db.execute("UPDATE session SET ledger_len = ? WHERE id = ?", (op.length, op.session))


def _apply_turn(db: sqlite3.Connection, op: AppendTurn | FinishTurn) -> None:
    _fence(db, op.session, op.epoch)
    if isinstance(op, AppendTurn):
        seq = db.execute("SELECT commit_seq FROM store").fetchone()[0]
        db.execute(
            "INSERT INTO turn VALUES (?,?,?,?,?,?,?,?,'running','')",
            (
                op.session,
                op.turn,
                seq,
                op.idempotency_key,
                op.prompt_start,
                op.prompt_end,
                op.sampling,
                _signed(op.seed),
            ),
        )
        db.execute("UPDATE session SET used_seq = ? WHERE id = ?", (seq, op.session))
        return
    row = db.execute(
        "SELECT prompt_start FROM turn WHERE session = ? AND id = ?", (op.session, op.turn)
    ).fetchone()
    if row is None:
        raise LedgerRefused(f"session {op.session} has no turn {op.turn}")
    db.execute(
        "UPDATE turn SET status = ?, finish_reason = ? WHERE session = ? AND id = ?",
        (op.status, op.finish_reason, op.session, op.turn),
    )
    _join_blobs(db, op.session, row[0])
    oldest_kept = db.execute(
        "SELECT seq FROM turn WHERE session = ? ORDER BY seq DESC LIMIT 1 OFFSET ?",
        (op.session, TURNS_KEPT - 1),
    ).fetchone()
    if oldest_kept is not None:
        db.execute(
            "DELETE FROM turn WHERE session = ? AND seq < ? AND status != 'running'",
            (op.session, oldest_kept[0]),
        )


def _apply_session(
    db: sqlite3.Connection,
    op: OpenSession | SetMeta | SetOwner | SetSuspect,
) -> None:
    seq = db.execute("SELECT commit_seq FROM store").fetchone()[0]
    match op:
        case OpenSession():
            db.execute(
                "INSERT INTO session VALUES (?,?,?,?,0,'',0,'idle',?,?)",
                (op.session, op.tenant, op.repr_id, op.epoch, op.meta, seq),
            )
        case SetMeta():
            _fence(db, op.session, op.epoch)
            db.execute(
                "UPDATE session SET state = ?, meta = ?, used_seq = ? WHERE id = ?",
                (op.state, op.meta, seq, op.session),
            )
        case SetOwner():
            row = db.execute("SELECT epoch FROM session WHERE id = ?", (op.session,)).fetchone()
            if row is None or op.epoch <= row[0]:
                raise LedgerRefused(f"session {op.session}: epoch {op.epoch} is not a new one")
            db.execute(
                "UPDATE session SET epoch = ?, owner_incarnation = ?, owner_lane = ? WHERE id = ?",
                (op.epoch, op.incarnation, op.lane, op.session),
            )
        case SetSuspect():
            db.execute("DELETE FROM suspect WHERE session = ?", (op.session,))
            if op.strikes:
                db.execute(
                    "INSERT INTO suspect VALUES (?,?,?,?)",
                    (op.session, op.incarnation, op.strikes, int(op.alone)),
                )


def _copy_session(db: sqlite3.Connection, op: CopySession) -> None:
    """The ids are written anew: a blob's checksum names its session and position."""
    row = db.execute(
        "SELECT repr_id, ledger_len, meta FROM session WHERE id = ?", (op.source,)
    ).fetchone()
    if row is None:
        raise LedgerRefused(f"there is no session {op.source} to copy")
    repr_id, length, meta = row
    ids = read_tokens(db, op.source)
    if len(ids) != length * 4:
        raise StoreCorrupt(f"session {op.source} should have {length} tokens, has {len(ids) // 4}")
    seq = db.execute("SELECT commit_seq FROM store").fetchone()[0]
    db.execute(
        "INSERT INTO session VALUES (?,?,?,?,0,'',?,'idle',?,?)",
        (op.session, op.tenant, repr_id, op.epoch, length, meta, seq),
    )
    if length:
        _insert_blob(db, op.session, 0, ids)


def _apply_forgetting(db: sqlite3.Connection, op: DropSession | ForgetIdle | PruneTurns) -> int:
    """Returns the sessions that are gone."""
    if isinstance(op, PruneTurns):
        db.execute(f"DELETE FROM turn WHERE (session, id) IN ({OLD_TURNS})", (op.keep,))
        return 0
    if isinstance(op, ForgetIdle):
        found = db.execute(
            "SELECT 1 FROM session WHERE id = ? AND epoch = ? AND used_seq = ?",
            (op.session, op.epoch, op.used_seq),
        ).fetchone()
        if found is None:
            return 0
    gone = db.execute("DELETE FROM session WHERE id = ?", (op.session,)).rowcount
    for table in ("turn", "token_blob", "suspect"):
        db.execute(f"DELETE FROM {table} WHERE session = ?", (op.session,))
    return gone


def _apply_page(db: sqlite3.Connection, op: PublishPage | FreePage | AgePages) -> None:
    match op:
        case PublishPage():
            db.execute(
                "INSERT OR REPLACE INTO page VALUES (?,?,'published',?,?,?,?,?,?,?,?,?,?)",
                (
                    op.ref.page_id,
                    op.ref.gen,
                    op.repr_id,
                    op.key,
                    op.parent,
                    len(op.tokens) // 4,
                    op.tokens,
                    op.digest,
                    op.checksum,
                    op.epoch,
                    op.priority,
                    op.lru_seq,
                ),
            )
        case FreePage():  # the row stays: generations must keep rising across restarts
            db.execute(
                "INSERT OR REPLACE INTO page VALUES (?,?,?,?,NULL,NULL,0,NULL,NULL,NULL,0,0,0)",
                (op.ref.page_id, op.ref.gen, "bad" if op.bad else "free", op.repr_id),
            )
        case AgePages():
            db.executemany(
                "UPDATE page SET priority = ?3, lru_seq = ?4 WHERE page_id = ?1 AND gen = ?2",
                op.rows,
            )


def _apply_store(
    db: sqlite3.Connection, op: AddExtent | DropExtent | StartEpoch | AddRepr | MarkClean
) -> None:
    match op:
        case AddExtent():
            _add_extent(db, op)
        case DropExtent():
            db.execute("DELETE FROM extent WHERE extent_index = ?", (op.index,))
            db.execute(
                "DELETE FROM page WHERE page_id >= ? AND page_id < ?",
                (op.first_page_id, op.first_page_id + op.slots),
            )
        case StartEpoch():
            db.execute("UPDATE store SET epoch = ?, boot_id = ?, clean = 0", (op.epoch, op.boot_id))
            _add_repr(db, op)
        case AddRepr():
            _add_repr(db, op)
        case MarkClean():
            db.execute("UPDATE store SET clean = 1")


def _add_repr(db: sqlite3.Connection, op: StartEpoch | AddRepr) -> None:
    row = (op.repr_id, op.descriptor, op.page_bytes)
    db.execute("INSERT OR IGNORE INTO repr VALUES (?,?,?)", row)


def _add_extent(db: sqlite3.Connection, op: AddExtent) -> None:
    """Again is no error: who cannot know whether it was written says it with whatever needs it."""
    row = (op.index, "page", op.first_page_id, op.slots, op.page_bytes, op.repr_id)
    known = db.execute("SELECT * FROM extent WHERE extent_index = ?", (op.index,)).fetchone()
    if known == row:
        return
    if known is not None:
        raise LedgerRefused(f"extent {op.index} is another one")
    db.execute("INSERT INTO extent VALUES (?,?,?,?,?,?)", row)
    db.execute(
        "UPDATE store SET next_extent = max(next_extent, ?), next_page_id = max(next_page_id, ?)",
        (op.index + 1, op.first_page_id + op.slots),
    )


def read_tokens(db: sqlite3.Connection, session: str, start: int = 0) -> bytes:
    """Every token id of a session from the blob that holds `start` on. Raises StoreCorrupt for a
    hole or a blob that fails its checksum."""
    ids, at = bytearray(), -1
    for row in db.execute(
        "SELECT start, ids, checksum FROM token_blob WHERE session = ? AND start >= ?"
        " ORDER BY start",
        (session, start),
    ):
        _check_blob(session, *row)
        if at >= 0 and row[0] != at:
            raise StoreCorrupt(f"the timeline of session {session} has a hole at {at}")
        ids += row[1]
        at = row[0] + len(row[1]) // 4
    return bytes(ids)


def _fence(db: sqlite3.Connection, session: str, epoch: int) -> int:
    """The session's length in tokens, if `epoch` may write to it."""
    row = db.execute("SELECT epoch, ledger_len FROM session WHERE id = ?", (session,)).fetchone()
    if row is None:
        raise LedgerRefused(f"there is no session {session}")
    if epoch != row[0]:
        raise LedgerRefused(
            f"a write with epoch {epoch} came for session {session}, which is at {row[0]}",
            why="its ownership moved on",
        )
    return row[1]


def _insert_blob(db: sqlite3.Connection, session: str, start: int, ids: bytes) -> None:
    checksum = keys.blob_checksum(session, start, ids)
    db.execute(
        "INSERT INTO token_blob VALUES (?,?,?,?,?)", (session, start, len(ids) // 4, ids, checksum)
    )


def _check_blob(session: str, start: Any, ids: Any, checksum: Any) -> None:
    """Values come from a file that may be damaged: their types are checked too."""
    sound = type(start) is int and start >= 0 and type(ids) is bytes and not len(ids) % 4
    if not sound or keys.blob_checksum(session, start, ids) != checksum:
        raise StoreCorrupt(
            f"token ids of session {session} at {start} fail their checksum",
            why="the ledger file was damaged",
            fix="resend the whole history; other sessions are unaffected",
        )


def _join_blobs(db: sqlite3.Connection, session: str, start: int) -> None:
    """One blob instead of one per commit for a finished turn: reading it back stays short."""
    first = db.execute(
        "SELECT min(start), count(*) FROM token_blob WHERE session = ? AND start >= ?",
        (session, start),
    ).fetchone()
    if first[1] > 1:
        ids = read_tokens(db, session, first[0])
        db.execute("DELETE FROM token_blob WHERE session = ? AND start >= ?", (session, first[0]))
        _insert_blob(db, session, first[0], ids)


def _signed(seed: int) -> int:
    """SQLite integers are signed: a u64 seed keeps its bits."""
    return (seed & keys.MASK64) - (1 << 64) if seed & (1 << 63) else seed & keys.MASK64


def unsigned(seed: int) -> int:
    return seed & keys.MASK64
