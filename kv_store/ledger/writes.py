"""The ledger's tables and its writes: one frozen record class per kind of write.

Owns the SQL. Every write of a session names its epoch: another one is refused (fencing), and
tokens only append at the end of the timeline (no holes). Threads and files are elsewhere.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from kv_store import keys
from kv_store.errors import LedgerRefused, StoreCorrupt
from kv_store.pages.index import PageRef

APPLICATION_ID = 0x42454B56  # "BEKV", in the SQLite header
SCHEMA_VERSION = 1
TURNS_KEPT = 64  # per session: enough to answer a repeated or resumed request
TURN_INDEX = "CREATE INDEX IF NOT EXISTS turn_by_id ON turn (id)"  # older files are without it

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
CREATE INDEX IF NOT EXISTS turn_by_id ON turn (id);
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


class Op(msgspec.Struct, frozen=True):
    """One record of an intent."""

    def write(self, db: sqlite3.Connection) -> int | None:
        """Write the record; returns the change in the number of sessions, None = 0. Raises
        LedgerRefused when it breaks a rule; the caller rolls back."""
        raise NotImplementedError  # every record has its own; a Struct has no abstract methods


class OpenSession(Op, frozen=True):
    session: str
    tenant: str
    repr_id: bytes
    epoch: int
    meta: str

    def write(self, db: sqlite3.Connection) -> int:
        db.execute(
            "INSERT INTO session VALUES (?,?,?,?,0,'',0,'idle',?,?)",
            (self.session, self.tenant, self.repr_id, self.epoch, self.meta, _commit_seq(db)),
        )
        return 1


class SetMeta(Op, frozen=True):
    session: str
    epoch: int
    state: str
    meta: str

    def write(self, db: sqlite3.Connection) -> None:
        _fence(db, self.session, self.epoch)
        db.execute(
            "UPDATE session SET state = ?, meta = ?, used_seq = ? WHERE id = ?",
            (self.state, self.meta, _commit_seq(db), self.session),
        )


class SetOwner(Op, frozen=True):
    """Commit point of a change of owner: `epoch`, which must be higher, becomes the session's."""

    session: str
    epoch: int
    incarnation: int
    lane: str

    def write(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT epoch FROM session WHERE id = ?", (self.session,)).fetchone()
        if row is None or self.epoch <= row[0]:
            raise LedgerRefused(f"session {self.session}: epoch {self.epoch} is not a new one")
        db.execute(
            "UPDATE session SET epoch = ?, owner_incarnation = ?, owner_lane = ? WHERE id = ?",
            (self.epoch, self.incarnation, self.lane, self.session),
        )


class DropSession(Op, frozen=True):
    session: str

    def write(self, db: sqlite3.Connection) -> int:
        gone = db.execute("DELETE FROM session WHERE id = ?", (self.session,)).rowcount
        for table in ("turn", "token_blob", "suspect"):
            db.execute(f"DELETE FROM {table} WHERE session = ?", (self.session,))
        return -gone


class CopySession(Op, frozen=True):
    """A fork: a new session with the source's tokens and `meta`, and no turns."""

    source: str
    session: str
    tenant: str
    epoch: int

    def write(self, db: sqlite3.Connection) -> int:
        """Write the ids again, as a blob's checksum covers its session and position."""
        row = db.execute(
            "SELECT repr_id, ledger_len, meta FROM session WHERE id = ?", (self.source,)
        ).fetchone()
        if row is None:
            raise LedgerRefused(f"there is no session {self.source} to copy")
        repr_id, length, meta = row
        ids = read_tokens(db, self.source)
        if len(ids) != length * 4:
            raise StoreCorrupt(
                f"session {self.source} should have {length} tokens, has {len(ids) // 4}"
            )
        db.execute(
            "INSERT INTO session VALUES (?,?,?,?,0,'',?,'idle',?,?)",
            (self.session, self.tenant, repr_id, self.epoch, length, meta, _commit_seq(db)),
        )
        if length:
            _insert_blob(db, self.session, 0, ids)
        return 1


class ForgetIdle(Op, frozen=True):
    """Drop a session unless it was used, or changed its epoch, since it was chosen."""

    session: str
    epoch: int
    used_seq: int

    def write(self, db: sqlite3.Connection) -> int:
        found = db.execute(
            "SELECT 1 FROM session WHERE id = ? AND epoch = ? AND used_seq = ?",
            (self.session, self.epoch, self.used_seq),
        ).fetchone()
        return 0 if found is None else DropSession(self.session).write(db)


class AppendTurn(Op, frozen=True):
    session: str
    epoch: int
    turn: str
    prompt_start: int
    prompt_end: int
    sampling: str
    seed: int
    idempotency_key: str | None

    def write(self, db: sqlite3.Connection) -> None:
        _fence(db, self.session, self.epoch)
        seq = _commit_seq(db)
        db.execute(
            "INSERT INTO turn VALUES (?,?,?,?,?,?,?,?,'running','')",
            (
                self.session, self.turn, seq, self.idempotency_key, self.prompt_start,
                self.prompt_end, self.sampling, _signed(self.seed),
            ),
        )  # fmt: skip
        db.execute("UPDATE session SET used_seq = ? WHERE id = ?", (seq, self.session))


class SetTurnRecord(Op, frozen=True):
    """A turn gets another record, and no repetition finds it by its key."""

    session: str
    turn: str
    sampling: str

    def write(self, db: sqlite3.Connection) -> None:
        db.execute(
            "UPDATE turn SET sampling = ?, idempotency_key = NULL WHERE session = ? AND id = ?",
            (self.sampling, self.session, self.turn),
        )


class FinishTurn(Op, frozen=True):
    """A turn has ended; finished ones before the last TURNS_KEPT of its session go.

    `ended_s`, seconds since the Unix epoch, and `cached_tokens` are what the turn's record gets;
    nothing if `ended_s` is 0.
    """

    session: str
    epoch: int
    turn: str
    status: str
    finish_reason: str
    ended_s: int = 0
    cached_tokens: int = 0

    def write(self, db: sqlite3.Connection) -> None:
        _fence(db, self.session, self.epoch)
        row = db.execute(
            "SELECT prompt_start FROM turn WHERE session = ? AND id = ?", (self.session, self.turn)
        ).fetchone()
        if row is None:
            raise LedgerRefused(f"session {self.session} has no turn {self.turn}")
        db.execute(
            "UPDATE turn SET status = ?, finish_reason = ? WHERE session = ? AND id = ?",
            (self.status, self.finish_reason, self.session, self.turn),
        )
        if self.ended_s:
            db.execute(
                "UPDATE turn SET"
                " sampling = json_set(sampling, '$.ended_s', ?, '$.cached_tokens', ?)"
                " WHERE session = ? AND id = ? AND json_valid(sampling)",
                (self.ended_s, self.cached_tokens, self.session, self.turn),
            )
        _join_blobs(db, self.session, row[0])
        oldest_kept = db.execute(
            "SELECT seq FROM turn WHERE session = ? ORDER BY seq DESC LIMIT 1 OFFSET ?",
            (self.session, TURNS_KEPT - 1),
        ).fetchone()
        if oldest_kept is not None:
            db.execute(
                "DELETE FROM turn WHERE session = ? AND seq < ? AND status != 'running'",
                (self.session, oldest_kept[0]),
            )


class AppendTokens(Op, frozen=True):
    session: str
    epoch: int
    start: int
    ids: bytes  # u32 LE

    def write(self, db: sqlite3.Connection) -> None:
        length = _fence(db, self.session, self.epoch)
        if self.start != length:
            raise LedgerRefused(
                f"tokens of session {self.session} must continue at {length}, not {self.start}"
            )
        if self.ids:
            _insert_blob(db, self.session, self.start, self.ids)
            _set_length(db, self.session, length + len(self.ids) // 4)


class TruncateTokens(Op, frozen=True):
    """Cut the timeline to `length` tokens (a client edited its history)."""

    session: str
    epoch: int
    length: int

    def write(self, db: sqlite3.Connection) -> None:
        session, cut, length = self.session, self.length, _fence(db, self.session, self.epoch)
        if not 0 <= cut <= length:
            raise LedgerRefused(f"session {session} has {length} tokens, cannot keep {cut}")
        row = db.execute(
            "SELECT start, ids, checksum FROM token_blob WHERE session = ? AND start < ?"
            " ORDER BY start DESC LIMIT 1",
            (session, cut),
        ).fetchone()
        db.execute("DELETE FROM token_blob WHERE session = ? AND start >= ?", (session, cut))
        if row and row[0] + len(row[1]) // 4 > cut:
            _check_blob(session, *row)
            db.execute("DELETE FROM token_blob WHERE session = ? AND start = ?", (session, row[0]))
            _insert_blob(db, session, row[0], row[1][: (cut - row[0]) * 4])
        _set_length(db, session, cut)


class SetSuspect(Op, frozen=True):
    """Mark (strikes > 0) or clear (0) a session that was in a crashed step."""

    session: str
    incarnation: int
    strikes: int
    alone: bool

    def write(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM suspect WHERE session = ?", (self.session,))
        if self.strikes:
            db.execute(
                "INSERT INTO suspect VALUES (?,?,?,?)",
                (self.session, self.incarnation, self.strikes, int(self.alone)),
            )


class PublishPage(Op, frozen=True):
    ref: PageRef
    key: bytes
    parent: bytes
    tokens: bytes
    repr_id: bytes
    digest: bytes
    checksum: bytes
    epoch: int
    priority: int

    def write(self, db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT OR REPLACE INTO page VALUES (?,?,'published',?,?,?,?,?,?,?,?,?,0)",
            (
                *self.ref, self.repr_id, self.key, self.parent, len(self.tokens) // 4, self.tokens,
                self.digest, self.checksum, self.epoch, self.priority,
            ),
        )  # fmt: skip


class FreePages(Op, frozen=True):
    """Free page slots: `ref.gen` is the next generation of each."""

    refs: tuple[PageRef, ...]

    def write(self, db: sqlite3.Connection) -> None:
        """Write the new states; rows stay, as generations must keep rising across restarts. A page
        published in the slot since then keeps its row, also when this is written late."""
        db.executemany(
            "UPDATE page SET gen = ?2, state = 'free', content_key = NULL, parent_key = NULL,"
            " n_tokens = 0, tokens = NULL, payload_digest = NULL, sealed_checksum = NULL,"
            " epoch = 0, priority = 0, lru_seq = 0"
            " WHERE page_id = ?1 AND gen < ?2 AND state = 'published'",
            self.refs,
        )


class RetirePages(Op, frozen=True):
    """Retire page slots for good: `ref.gen` is the next generation of each."""

    refs: tuple[PageRef, ...]
    repr_id: bytes

    def write(self, db: sqlite3.Connection) -> None:
        db.executemany(
            "INSERT OR REPLACE INTO page VALUES (?,?,'bad',?,NULL,NULL,0,NULL,NULL,NULL,0,0,0)",
            [(*ref, self.repr_id) for ref in self.refs],
        )


class AgePages(Op, frozen=True):
    """Persist (page_id, gen, priority, lru_seq)."""

    rows: tuple[tuple[int, int, int, int], ...]

    def write(self, db: sqlite3.Connection) -> None:
        db.executemany(
            "UPDATE page SET priority = ?3, lru_seq = ?4 WHERE page_id = ?1 AND gen = ?2",
            self.rows,
        )


class AddExtent(Op, frozen=True):
    index: int
    first_page_id: int
    slots: int
    page_bytes: int
    repr_id: bytes

    def write(self, db: sqlite3.Connection) -> None:
        """Write the row; a repetition is no error, as a caller may not know if it was written."""
        row = (self.index, "page", self.first_page_id, self.slots, self.page_bytes, self.repr_id)
        known = db.execute("SELECT * FROM extent WHERE extent_index = ?", (self.index,)).fetchone()
        if known == row:
            return
        if known is not None:
            raise LedgerRefused(f"extent {self.index} is another one")
        db.execute("INSERT INTO extent VALUES (?,?,?,?,?,?)", row)
        db.execute(
            "UPDATE store SET next_extent = max(next_extent, ?),"
            " next_page_id = max(next_page_id, ?)",
            (self.index + 1, self.first_page_id + self.slots),
        )


class DropExtent(Op, frozen=True):
    index: int
    first_page_id: int
    slots: int

    def write(self, db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM extent WHERE extent_index = ?", (self.index,))
        db.execute(
            "DELETE FROM page WHERE page_id >= ? AND page_id < ?",
            (self.first_page_id, self.first_page_id + self.slots),
        )


class AddRepr(Op, frozen=True):
    """A representation that this process keeps pages of."""

    repr_id: bytes
    descriptor: str
    page_bytes: int

    def write(self, db: sqlite3.Connection) -> None:
        row = (self.repr_id, self.descriptor, self.page_bytes)
        db.execute("INSERT OR IGNORE INTO repr VALUES (?,?,?)", row)


class StartEpoch(Op, frozen=True):
    """First write of a process: older work is void from here on."""

    epoch: int
    boot_id: str

    def write(self, db: sqlite3.Connection) -> None:
        db.execute("UPDATE store SET epoch = ?, boot_id = ?, clean = 0", (self.epoch, self.boot_id))


class MarkClean(Op, frozen=True):
    def write(self, db: sqlite3.Connection) -> None:
        db.execute("UPDATE store SET clean = 1")


def read_tokens(db: sqlite3.Connection, session: str, start: int = 0) -> bytes:
    """Token ids of a session, from the first blob at or after `start` on. Raises StoreCorrupt for
    a hole or a blob that fails its checksum."""
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
    """The session's length in tokens. Raises LedgerRefused unless it is at `epoch`."""
    row = db.execute("SELECT epoch, ledger_len FROM session WHERE id = ?", (session,)).fetchone()
    if row is None:
        raise LedgerRefused(f"there is no session {session}")
    if epoch != row[0]:
        raise LedgerRefused(
            f"a write with epoch {epoch} came for session {session}, which is at {row[0]}",
            why="its ownership moved on",
        )
    return row[1]


def _commit_seq(db: sqlite3.Connection) -> int:
    """The number of the commit that is being written."""
    return db.execute("SELECT commit_seq FROM store").fetchone()[0]


def _set_length(db: sqlite3.Connection, session: str, tokens: int) -> None:
    db.execute("UPDATE session SET ledger_len = ? WHERE id = ?", (tokens, session))


def _insert_blob(db: sqlite3.Connection, session: str, start: int, ids: bytes) -> None:
    checksum = keys.blob_checksum(session, start, ids)
    db.execute(
        "INSERT INTO token_blob VALUES (?,?,?,?,?)", (session, start, len(ids) // 4, ids, checksum)
    )


def _check_blob(session: str, start: Any, ids: Any, checksum: Any) -> None:
    """Raise StoreCorrupt for a bad blob; a damaged file may hold values of any type."""
    sound = type(start) is int and start >= 0 and type(ids) is bytes and not len(ids) % 4
    if not sound or keys.blob_checksum(session, start, ids) != checksum:
        raise StoreCorrupt(
            f"token ids of session {session} at {start} fail their checksum",
            why="the ledger file was damaged",
            fix="resend the whole history; other sessions are unaffected",
        )


def _join_blobs(db: sqlite3.Connection, session: str, start: int) -> None:
    """Merge a finished turn's blobs, one per commit, into one, so that reading stays fast."""
    first = db.execute(
        "SELECT min(start), count(*) FROM token_blob WHERE session = ? AND start >= ?",
        (session, start),
    ).fetchone()
    if first[1] > 1:
        ids = read_tokens(db, session, first[0])
        db.execute("DELETE FROM token_blob WHERE session = ? AND start >= ?", (session, first[0]))
        _insert_blob(db, session, first[0], ids)


def _signed(seed: int) -> int:
    """The i64 with the bits of a u64 seed, as SQLite integers are signed."""
    return seed - (1 << 64) if seed >> 63 else seed


def unsigned(seed: int) -> int:
    return seed & keys.MASK64
