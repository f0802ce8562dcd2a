"""Read-only queries of the ledger about sessions and turns; they run on the ledger's thread.

A damaged row, whose values may have any type, raises `StoreCorrupt` for its session alone.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kv_store import keys
from kv_store.errors import StoreCorrupt
from kv_store.ledger import writes
from kv_store.ledger.budget import Kept
from kv_store.pages.index import PageRef

ROW_BYTES = 200  # of a session or a turn beside its tokens and texts
PRUNED_AT_ONCE_MAX = 1000  # sessions: bounds the transaction that all other commits wait for

SHARING_MAX = 1000  # sessions compared with one that is dropped: bounds the time of other commits


class SessionInfo(NamedTuple):
    """A session as the ledger lists it. `used_seq` is the commit of its last use."""

    id: str
    tenant: str
    repr_id: bytes
    epoch: int
    owner_incarnation: int
    owner_lane: str
    ledger_len: int
    state: str
    meta: str
    used_seq: int


class TurnInfo(NamedTuple):
    """A turn; `status` is "running" until it is finished. `seq` is the commit that began it."""

    id: str
    idempotency_key: str | None
    prompt_start: int
    prompt_end: int
    sampling: str
    seed: int
    status: str
    finish_reason: str
    seq: int


class PageLink(NamedTuple):
    """A page that is published, and the page whose tokens precede its own."""

    ref: PageRef
    key: bytes
    parent: bytes
    n_tokens: int


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """Everything durable about one session."""

    info: SessionInfo
    tokens: list[int]
    turns: list[TurnInfo]


@dataclass(frozen=True, slots=True)
class SuspectInfo:
    """A session that was in a step which crashed its worker."""

    session: str
    incarnation: int
    strikes: int
    alone: bool


def load(db: sqlite3.Connection, session: str) -> SessionRecord | None:
    """Tokens and turns of one session; None if unknown. Raises StoreCorrupt."""
    try:
        return _load(db, session)
    except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as error:
        raise StoreCorrupt(
            f"session {session} cannot be read from the ledger", why=str(error)
        ) from error


def infos(db: sqlite3.Connection) -> list[SessionInfo]:
    """Every session, most recently used first."""
    rows = db.execute("SELECT * FROM session ORDER BY used_seq DESC, id")
    return [SessionInfo._make(row) for row in rows]


def session_of_turn(db: sqlite3.Connection, tenant: str, turn: str) -> str | None:
    """The session of a tenant that has this turn; None if none has."""
    found = db.execute(
        "SELECT session.id FROM turn JOIN session ON session.id = turn.session"
        " WHERE turn.id = ? AND session.tenant = ? ORDER BY turn.seq DESC LIMIT 1",
        (turn, tenant),
    ).fetchone()
    return None if found is None else str(found[0])


def suspects(db: sqlite3.Connection) -> list[SuspectInfo]:
    rows = db.execute("SELECT session, incarnation, strikes, alone FROM suspect ORDER BY session")
    return [SuspectInfo(name, inc, strikes, bool(alone)) for name, inc, strikes, alone in rows]


def kept(db: sqlite3.Connection) -> list[Kept]:
    """Every session with the bytes of its rows, longest unused first."""
    rows = db.execute(
        "SELECT id, tenant, epoch, used_seq, 4 * ledger_len + length(meta) + ?1 + coalesce("
        "(SELECT sum(length(sampling) + ?1) FROM turn WHERE turn.session = session.id), 0)"
        " FROM session ORDER BY used_seq, id",
        (ROW_BYTES,),
    )
    return [Kept._make(row) for row in rows]


def shared_tokens(db: sqlite3.Connection, session: str, tenant: str, ids: bytes) -> int:
    """The longest common prefix, in tokens, of these ids with another session of the tenant; of the
    SHARING_MAX most recently used ones."""
    others = db.execute(
        "SELECT id FROM session WHERE tenant = ? AND id != ? ORDER BY used_seq DESC LIMIT ?",
        (tenant, session, SHARING_MAX),
    ).fetchall()
    return max((_shared(db, other, ids) for (other,) in others), default=0)


def _shared(db: sqlite3.Connection, other: str, ids: bytes) -> int:
    """The common prefix, in tokens, of the ids with one session."""
    at = 0
    query = "SELECT start, ids FROM token_blob WHERE session = ? ORDER BY start"
    for start, part in db.execute(query, (other,)):
        if start * 4 != at or not isinstance(part, bytes):
            break  # damaged
        same = _common(part, ids[at : at + len(part)])
        at += same
        if same < len(part):
            break
    return at // 4


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix of two strings of whole tokens, in bytes."""
    n = min(len(a), len(b)) // 4
    if a[: n * 4] == b[: n * 4]:
        return n * 4
    return 4 * int(np.argmax(np.frombuffer(a, "<u4", n) != np.frombuffer(b, "<u4", n)))


def _load(db: sqlite3.Connection, session: str) -> SessionRecord | None:
    row = db.execute("SELECT * FROM session WHERE id = ?", (session,)).fetchone()
    if row is None:
        return None
    info = SessionInfo(*row)
    tokens = keys.token_ids(writes.read_tokens(db, session))
    if len(tokens) != info.ledger_len:
        raise StoreCorrupt(
            f"session {session} should have {info.ledger_len} tokens, the ledger has {len(tokens)}"
        )
    rows = db.execute(
        "SELECT id, idempotency_key, prompt_start, prompt_end, sampling, seed, status,"
        " finish_reason, seq FROM turn WHERE session = ? ORDER BY seq, prompt_start, id",
        (session,),
    )
    turns = [TurnInfo(*row) for row in rows]
    return SessionRecord(
        info, tokens, [turn._replace(seed=writes.unsigned(turn.seed)) for turn in turns]
    )


def page_links(db: sqlite3.Connection, repr_id: bytes) -> list[PageLink]:
    """The published pages of one representation; rows that are damaged are left out."""
    rows = db.execute(
        "SELECT page_id, gen, content_key, parent_key, n_tokens FROM page"
        " WHERE repr_id = ? AND state = 'published'",
        (repr_id,),
    )
    return [
        PageLink(PageRef(page_id, gen), key, parent, n_tokens)
        for page_id, gen, key, parent, n_tokens in rows
        if [*map(type, (page_id, gen, key, parent, n_tokens))] == [int, int, bytes, bytes, int]
    ]
