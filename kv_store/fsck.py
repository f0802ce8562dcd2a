"""Checks a store that no process has open: ledger, token blobs, manifest, pages, arenas, strays.

Reads the whole directory without the model's file. Without `repair` nothing in it changes. With
it, bad pages lose their manifest row, a damaged session keeps its longest sound prefix under a new
epoch, strays are deleted; every finding says what repair does. Refuses a store that is in use and
one of a newer program.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import urllib.parse
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kv_store import keys, osio
from kv_store.arenas.arena import ARENA_NAME, POISON, ArenaFile, delete_arena
from kv_store.errors import StoreCorrupt, StoreError, StoreMissing
from kv_store.layout import PAGE_TOKENS, PageLayout
from kv_store.ledger import continuity, writes
from kv_store.ledger.ledger import (
    EXTENT_QUERY,
    PAGE_QUERY,
    PageRow,
    check_version,
    connect,
    page_row,
    why_refused,
)
from kv_store.pages.extents import EXTENT_NAME, ExtentInfo, extent_path
from kv_store.states import STATES_DIR, is_intact
from kv_store.store import check_is_folder, name_aside, set_aside, take_lock

Severity = Literal["error", "warning", "info"]
Progress = Callable[[int, int], None]  # pages read, pages to read
Fix = Callable[[sqlite3.Connection], object]
_TURN_QUERY = "SELECT session, id, prompt_start, prompt_end, seed, status FROM turn"
_OURS = {"LOCK", "BALLAST", "CRASH", "meta.db", "meta.db-wal", "ext", "arena", STATES_DIR}
_WRONG_BYTES = "its bytes fail their sealed checksum"
SCRATCH = "fsck-"  # folders of this program inside the store
U32_MAX = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect or remark. `repair` says what repair does, or did, about it."""

    severity: Severity
    what: str
    why: str
    repair: str
    is_repairable: bool = True


@dataclass(slots=True)
class FsckReport:
    """What a check found. `ok` = no error; warnings never cause wrong output."""

    path: str
    repaired: bool
    store_uuid: str = ""
    epoch: int = 0
    clean: bool = False
    counts: Counter[str] = field(default_factory=Counter[str])
    findings: list[Finding] = field(default_factory=list[Finding])

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)


def fsck(
    path: str | os.PathLike[str], *, repair: bool = False, progress: Progress | None = None
) -> FsckReport:
    """Check the store at `path`; blocks, reads everything. Raises StoreLocked when a process holds
    it, StoreVersion when a newer program wrote it, StoreMissing when it is no store, and
    StoreUnsupported when it cannot be used as one."""
    path = os.path.abspath(os.fspath(path))
    ledger = os.path.join(path, "meta.db")
    if not os.path.lexists(ledger) and os.path.exists(f"{ledger}.damaged-1"):
        report = FsckReport(path, repair)
        what, why = "there is no ledger", "it was set aside: meta.db.damaged-1"
        nothing = "nothing: the next opening makes a new one"
        report.findings.append(Finding("info", what, why, nothing, is_repairable=False))
        return report
    if not os.path.isfile(ledger):
        why = "there is no meta.db in it" if os.path.isdir(path) else "it is no folder"
        raise StoreMissing(f"{path} holds no store", why=why)
    lock_fd = take_lock(path)
    try:
        check_version(ledger)
        traces = continuity.gather(path, lock_fd)
        check = _Check(path, repair, traces, progress or (lambda done, total: None))
        check.run()
        if repair:  # repair removes the log; LOCK makes the next opening report what was lost
            with contextlib.suppress(OSError):
                continuity.mark_closed(osio.Files(), lock_fd, check.lost)
        return check.report
    finally:
        os.close(lock_fd)


class _Check:
    """One fsck run: its findings, the fixes to apply at its end, and the order of the sections."""

    def __init__(
        self, path: str, repair: bool, traces: continuity.Traces, progress: Progress
    ) -> None:
        self.path = path
        self.repair = repair
        self.traces = traces
        self.progress = progress
        self.report = FsckReport(path, repair)
        self.counts = self.report.counts
        self.lost = ""  # why the ledger is not the newest one written; "" = it is
        self.fixes: list[Fix] = []  # for the ledger, in one transaction
        self.removals: list[Callable[[], object]] = []  # of files, afterwards
        self.layouts: dict[bytes, PageLayout] = {}
        self.buffer = memoryview(b"")  # one page

    def find(
        self, severity: Severity, what: str, why: str, repair: str, fix: Fix | None = None
    ) -> None:
        """Report what repair mends: by `fix` in the ledger, or by one of `removals`."""
        self._report(Finding(severity, what, why, repair))
        if fix is not None:
            self.fixes.append(fix)

    def remark(self, severity: Severity, what: str, why: str, advice: str = "") -> None:
        """Report what no repair mends."""
        nothing = f"nothing: {advice}" if advice else "nothing"
        self._report(Finding(severity, what, why, nothing, is_repairable=False))

    def _report(self, finding: Finding) -> None:
        self.counts[f"{finding.severity}s"] += 1
        self.report.findings.append(finding)

    def run(self) -> None:
        _check_folders(self)
        try:
            with self._opened() as db:
                self._check_database(db)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # its text may be damaged too
            self._set_aside(str(error))
        _check_arenas(self)
        _check_states(self)
        if self.repair:
            for remove in self.removals:
                with contextlib.suppress(OSError):
                    remove()

    def _check_database(self, db: sqlite3.Connection) -> None:
        """Run every section, or set the ledger aside if a store could not open it."""
        why = why_refused(db, thorough=False)
        if not why:
            for section in (
                _check_ledger, _check_store_row, _check_reprs, _check_extents, _check_sessions,
                _check_turns, _check_pending,
            ):  # fmt: skip
                self._try(section, db)
            if self.repair and self.fixes:
                self._apply(db)
            if self.repair or not self.fixes:
                why = why_refused(db, thorough=True)
        if why:
            self._set_aside(why)

    def _try(
        self, section: Callable[[_Check, sqlite3.Connection], None], db: sqlite3.Connection
    ) -> None:
        try:
            section(self, db)
        except (sqlite3.DatabaseError, TypeError, ValueError, OverflowError) as error:
            if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
                raise
            name = section.__name__.removeprefix("_check_").replace("_", " ")
            self.remark(
                "error",
                f"the check of {name} could not be finished",
                f"{type(error).__name__}: {error}",
                "rows that cannot be read stay; restore the file, or start empty",
            )

    @contextlib.contextmanager
    def _opened(self) -> Generator[sqlite3.Connection]:
        """Open the ledger: read-write for repair, else read-only, or a copy if it has a log."""
        name = os.path.join(self.path, "meta.db")
        log = name + "-wal"
        if self.repair:
            db = connect(name)
            db.execute("PRAGMA locking_mode=EXCLUSIVE")
            db.execute("PRAGMA journal_mode=WAL").fetchall()
            db.execute("PRAGMA synchronous=FULL")
            with contextlib.closing(db):
                yield db
            return
        with contextlib.ExitStack() as stack:
            if os.path.exists(log) and os.path.getsize(log):
                # inside the store: token ids reveal the prompt, so its permissions must cover them
                folder = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self.path)
                )
                for source in (name, log):
                    shutil.copyfile(source, os.path.join(folder, os.path.basename(source)))
                db = connect(os.path.join(folder, "meta.db"))
            else:
                uri = f"file:{urllib.parse.quote(name)}?mode=ro&immutable=1"
                db = connect(uri, uri=True)
            yield stack.enter_context(contextlib.closing(db))

    def _set_aside(self, why: str) -> None:
        name = os.path.join(self.path, "meta.db")
        aside = os.path.basename(name_aside(name))
        repair = f"it is set aside as {aside}; the store starts empty at its next opening"
        self.find("error", "the ledger is not a readable database", why, repair)
        self.fixes.clear()
        self.removals = [lambda: set_aside(name)]

    def _apply(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            for fix in self.fixes:
                fix(db)
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            self.removals.clear()
            raise
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


# -- the ledger: its file, small tables, sessions, turns ----------------------------------------


def _check_ledger(check: _Check, db: sqlite3.Connection) -> None:
    db.execute("PRAGMA cell_size_check=ON")
    db.execute("PRAGMA trusted_schema=OFF")
    problems = [str(row[0]) for row in db.execute("PRAGMA integrity_check(100)")]
    if problems == ["ok"]:
        return
    what, why = "SQLite finds the ledger damaged", "; ".join(problems[:5])
    if all("index" in text for text in problems):
        check.find("error", what, why, "its indexes are rebuilt", lambda db: db.execute("REINDEX"))
    else:
        check.remark("error", what, why, "what can still be read is checked below")


def _check_store_row(check: _Check, db: sqlite3.Connection) -> None:
    row = db.execute(
        "SELECT store_uuid, epoch, clean, next_page_id, next_extent FROM store"
    ).fetchone()
    if row is None or type(row[0]) is not bytes or len(row[0]) != 16:
        check.remark(
            "error",
            "the store has lost its identity",
            "the row that names it is missing or damaged",
            "move the directory away, the next start makes a new store",
        )
        return
    report = check.report
    report.store_uuid, report.epoch, report.clean = row[0].hex(), int(row[1]), bool(row[2])
    if not report.clean:
        why = "its last owner was killed"
        if check.traces.opening.closed:  # in LOCK, which needs no free space
            why += ", or could not write that it had stopped (a full disk)"
        check.remark("info", "the store was not closed", why)
    check.lost = check.traces.lost(report.epoch, report.clean)
    if check.lost:
        check.remark(
            "warning",
            "the ledger lost what was written last",
            f"{check.lost}; sessions may be older than clients remember, or unknown",
            "restore meta.db and meta.db-wal together, if there is a copy",
        )
    page, extent = db.execute(
        "SELECT max(first_page_id + places), max(extent_index) + 1 FROM extent"
    ).fetchone()
    if row[3] < (page or 0) or row[4] < (extent or 0):
        check.find(
            "error",
            "numbers of pages or extents would be given twice",
            f"next page {row[3]} of {page}, next extent {row[4]} of {extent}",
            "both numbers are raised",
            lambda db: db.execute(
                "UPDATE store SET next_page_id = max(next_page_id, ?),"
                " next_extent = max(next_extent, ?)",
                (page or 0, extent or 0),
            ),
        )


def _check_reprs(check: _Check, db: sqlite3.Connection) -> None:
    query = "SELECT repr_id, descriptor, page_bytes FROM repr"
    for repr_id, text, page_bytes in db.execute(query).fetchall():
        check.counts["reprs"] += 1
        layout = _layout_of(text)
        if layout is None or layout.page_bytes != page_bytes:
            name = repr_id.hex()[:16] if isinstance(repr_id, bytes) else repr(repr_id)
            check.find(
                "error",
                f"representation {name} is not described",
                "its descriptor is unreadable or names another page layout",
                "its pages are forgotten and recomputed",
            )
        else:
            check.layouts[repr_id] = layout


def _check_sessions(check: _Check, db: sqlite3.Connection) -> None:
    query = "SELECT id, tenant, repr_id, epoch, ledger_len, meta FROM session"
    for name, tenant, repr_id, epoch, length, meta in db.execute(query).fetchall():
        check.counts["sessions"] += 1
        is_sound = _all(str, (name, tenant, meta)) and type(repr_id) is bytes
        if is_sound and _naturals((epoch, length)):
            _check_timeline(check, db, name, epoch, length)
            continue
        check.find(
            "error",
            f"session {name!r} has a damaged row",
            "its fields have other types or signs",
            "it is dropped",
            writes.DropSession(name).write,
        )


def _check_timeline(
    check: _Check, db: sqlite3.Connection, name: str, epoch: int, length: int
) -> None:
    sound, why = bytearray(), ""
    query = "SELECT start, n, ids, checksum FROM token_blob WHERE session = ? ORDER BY start"
    for start, n, ids, checksum in db.execute(query, (name,)):
        check.counts["token_blobs"] += 1
        at = len(sound) // 4
        if start != at:
            why = f"there is a hole or an overlap at token {at}"
        elif type(ids) is not bytes or n != len(ids) // 4 or len(ids) % 4:
            why = f"the ids from token {at} on are damaged"
        elif keys.blob_checksum(name, start, ids) != checksum:
            why = f"the ids from token {at} on fail their checksum"
        if why:
            break
        sound += ids
    have = len(sound) // 4
    check.counts["tokens"] += min(have, length)
    if not why and have != length:
        why = f"it should have {length} tokens and has {have}"
    if why:
        kept = bytes(sound[: length * 4])
        check.find(
            "error",
            f"session {name!r} lost its tokens from {len(kept) // 4} on (of {length})",
            why,
            f"it is cut to its first {len(kept) // 4} tokens, under a new epoch",
            lambda db: _cut_session(db, name, epoch, kept),
        )


def _check_turns(check: _Check, db: sqlite3.Connection) -> None:
    for session, turn, start, end, seed, status in db.execute(_TURN_QUERY).fetchall():
        check.counts["turns"] += 1
        check.counts["turns_unfinished"] += status == "running"
        is_sound = _all(str, (session, turn, status)) and type(seed) is int
        # A prompt may end before it starts: one that repeats the timeline adds nothing to it.
        if not is_sound or not _naturals((start, end)):
            check.find(
                "error",
                f"a turn of session {session!r} has a damaged row",
                "its fields have other types, or are negative",
                "the row is deleted; the timeline is not touched",
                lambda db, key=(session, turn): db.execute(
                    "DELETE FROM turn WHERE session IS ? AND id IS ?", key
                ),
            )


def _check_pending(check: _Check, db: sqlite3.Connection) -> None:
    for table in ("turn", "token_blob", "suspect"):
        of_none = f"FROM {table} WHERE session NOT IN (SELECT id FROM session)"
        lost: int = db.execute(f"SELECT count(*) {of_none}").fetchone()[0]
        if lost:
            check.find(
                "warning",
                f"{lost} rows of {table} belong to no session",
                "their session's row is gone",
                "they are deleted",
                lambda db, of_none=of_none: db.execute(f"DELETE {of_none}"),
            )


# -- extents, their manifest rows, and every page's bytes ---------------------------------------


def _check_extents(check: _Check, db: sqlite3.Connection) -> None:
    if not check.report.store_uuid:
        return  # every checksum is seeded with it
    folder = os.path.join(check.path, "ext")
    infos = [
        ExtentInfo(*row, path=extent_path(folder, row[0]))
        for row in db.execute(EXTENT_QUERY).fetchall()
    ]
    rows = {row[0]: page_row(row) for row in db.execute(PAGE_QUERY).fetchall()}
    check.counts["extents"] = len(infos)
    check.counts["page_rows"] = len(rows)
    _check_strays(check, folder, {info.index for info in infos})
    total = sum(row is not None and row.state == "published" for row in rows.values())
    claimed: set[int] = set()
    done = 0
    for info in infos:
        ids = info.page_ids
        mine = {i: rows.pop(i) for i in ids if i in rows}
        why = "its page ids belong to an extent before it" if claimed & set(ids) else ""
        claimed.update(ids)
        try:
            fd = -1 if why else _open_extent(info)
        except StoreCorrupt as error:
            fd, why = -1, str(error)
        if fd < 0:
            done += len(mine)
            _drop_extent(check, info, why, mine)
            continue
        try:
            for page_id, row in mine.items():
                _check_page(check, db, info, fd, page_id, row)
                done += row is not None and row.state == "published"
                check.progress(done, total)
        finally:
            os.close(fd)
    for page_id, row in rows.items():
        if row is None or row.state == "published":
            _free_page(check, db, page_id, "no extent has its place")


def _check_page(
    check: _Check,
    db: sqlite3.Connection,
    info: ExtentInfo,
    fd: int,
    page_id: int,
    row: PageRow | None,
) -> None:
    if row is None:
        _free_page(check, db, page_id, "fields of its manifest row have other types")
        return
    if row.state == "bad":
        check.counts["slots_retired"] += 1
        return
    if row.state == "free":
        return
    check.counts["pages"] += 1
    why = _why_bad(check, info, fd, row)
    if why == _WRONG_BYTES and bytes(check.buffer) == bytes([POISON]) * info.page_bytes:
        check.counts["pages_evicted"] += 1
        _free_page(check, db, page_id, "")
    elif why:
        check.counts["pages_bad"] += 1
        _free_page(check, db, page_id, why)
    else:
        check.counts["pages_good"] += 1
        check.counts["tails"] += len(row.tokens) < PAGE_TOKENS * 4


def _why_bad(check: _Check, info: ExtentInfo, fd: int, row: PageRow) -> str:
    """Why a published page may not be served; empty if it may."""
    sizes = (len(row.key), len(row.parent), len(row.digest), len(row.checksum))
    if row.state != "published":
        return f"its state is {row.state!r}"
    if sizes != (32, 32, 16, 16) or row.repr_id != info.repr_id:
        return "its manifest row is damaged"
    if not 0 < len(row.tokens) <= PAGE_TOKENS * 4 or len(row.tokens) % 4:
        return "its token ids are damaged"
    layout = check.layouts.get(row.repr_id)
    if layout is None or layout.page_bytes != info.page_bytes:
        return "nothing describes its bytes"
    if len(check.buffer) != info.page_bytes:
        check.buffer = memoryview(bytearray(info.page_bytes))
    data = check.buffer
    try:
        osio.Files().read_all(fd, data, info.offset_of(row.ref.page_id))
    except (OSError, StoreCorrupt) as error:
        return f"it cannot be read: {error}"
    uuid = bytes.fromhex(check.report.store_uuid)
    seed = keys.sealed_seed(uuid, *row.ref, row.key, layout.layout_id)
    if keys.sealed_checksum(data, seed) != row.checksum:
        return _WRONG_BYTES
    if keys.payload_digest(data) != row.digest:
        return "its recorded payload digest is damaged"
    return ""


def _free_page(check: _Check, db: sqlite3.Connection, page_id: Any, why: str) -> None:
    """Report a page that cannot be used; repair leaves a free row with the next generation. No
    `why`: it was evicted, and its slot overwritten."""
    found = db.execute("SELECT gen, repr_id FROM page WHERE page_id = ?", (page_id,)).fetchone()
    gen, repr_id = found if found is not None else (0, b"")
    sound = type(gen) is int and 0 <= gen < U32_MAX
    row = page_id, gen + 1 if sound else U32_MAX, repr_id if type(repr_id) is bytes else b""

    def fix(db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT OR REPLACE INTO page VALUES (?,?,'free',?,NULL,NULL,0,NULL,NULL,NULL,0,0,0)",
            row,
        )

    repair = "its manifest row is deleted; it is recomputed when it is needed"
    if why:
        check.find("error", f"page {page_id} is bad", why, repair, fix)
        return
    why = "the ledger's disk was full, or its owner was killed before the next commit"
    check.find("warning", f"page {page_id} was evicted, and kept its row", why, repair, fix)


def _drop_extent(
    check: _Check, info: ExtentInfo, why: str, rows: dict[int, PageRow | None]
) -> None:
    lost = sum(row is not None and row.state == "published" for row in rows.values())
    check.counts["pages"] += lost
    check.counts["pages_bad"] += lost
    doomed = [*rows]  # not the rest of its range: another extent may have claimed that

    def fix(db: sqlite3.Connection) -> None:
        writes.DropExtent(info.index, 0, 0).write(db)
        db.executemany("DELETE FROM page WHERE page_id = ?", [(i,) for i in doomed])

    check.find(
        "error",
        f"extent {info.index} is lost, and {lost} pages with it",
        why,
        "its rows are deleted; the pages are recomputed when they are needed",
        fix,
    )
    check.removals.append(lambda: os.unlink(info.path))


def _check_strays(check: _Check, folder: str, known: set[int]) -> None:
    for name in _names(folder):
        path = os.path.join(folder, name)
        if not EXTENT_NAME.fullmatch(name):
            check.remark("info", f"ext/{name} is not ours", "no extent has such a name")
        elif int(name[:6]) not in known:
            why = "its creator was killed before it could record it"
            check.find("warning", f"ext/{name} has no row in the manifest", why, "it is deleted")
            check.removals.append(lambda path=path: os.unlink(path))


# -- folders and arenas -------------------------------------------------------------------------


def _check_folders(check: _Check) -> None:
    for folder in (check.path, *(os.path.join(check.path, name) for name in ("ext", "arena"))):
        if not os.path.lexists(folder):
            what, why = f"there is no folder {folder}", "the ledger alone was put here"
            check.remark("info", what, why, "the next opening makes it")
            continue
        if stat.S_IMODE(check_is_folder(folder).st_mode) & 0o077:
            what, why = f"others may look into {folder}", "KV and token ids equal the prompts"
            check.find("warning", what, why, "it is made private")
            check.removals.append(lambda folder=folder: os.chmod(folder, 0o700))
    for name in sorted(set(os.listdir(check.path)) - _OURS):
        if name.startswith(SCRATCH):
            check.find("warning", f"{name} is in the way", "a check was killed", "it is deleted")
            path = os.path.join(check.path, name)
            check.removals.append(lambda path=path: shutil.rmtree(path))
        else:
            check.remark("info", f"{name} is not part of the store", "it was put aside")


def _names(folder: str) -> list[str]:
    """Names in a folder, which may not exist."""
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _check_states(check: _Check) -> None:
    """Recurrent states: each must have the checksum of its name."""
    folder = os.path.join(check.path, STATES_DIR)
    for name in _names(folder):
        path = os.path.join(folder, name)
        check.counts["states"] += 1
        try:
            is_good = is_intact(path)
        except OSError as error:
            check.remark("info", f"{STATES_DIR}/{name} cannot be read", str(error))
            continue
        if not is_good:
            what, why = f"{STATES_DIR}/{name} is damaged", "it is cut short, or not as written"
            check.find("warning", what, why, "it is deleted; the state is computed again")
            check.removals.append(lambda path=path: os.unlink(path))


def _check_arenas(check: _Check) -> None:
    folder = os.path.join(check.path, "arena")
    for text in check.traces.implausible:
        why = "no store is opened so often"
        check.remark("warning", text, why, "no number follows from it")
    for name in _names(folder):
        path = os.path.join(folder, name)
        if not ARENA_NAME.fullmatch(name) or not stat.S_ISREG(os.lstat(path).st_mode):
            check.remark("info", f"arena/{name} is not ours", "no arena is like it")
            continue
        check.counts["arenas"] += 1
        why = _why_useless(check, path)
        if why == "busy":
            what = f"arena/{name} has a writer that lives"
            why = "a worker outlived its engine, and may still write"
            check.remark("warning", what, why, "end that process")
        elif why:
            check.find("warning", f"arena/{name} is of no use", why, "it is deleted")
            check.removals.append(lambda path=path: delete_arena(path))


def _why_useless(check: _Check, path: str) -> str:
    """Why no row of an arena can be imported, "busy" if its lock is held, or empty."""
    fd = osio.open_private(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        if not osio.lock_exclusive(fd):
            return "busy"
        why = "it is of no model that this store knows"
        for repr_id, layout in check.layouts.items():
            try:
                arena = ArenaFile.read(fd, layout)
            except StoreCorrupt as error:
                why = str(error)
                continue
            if arena.repr_id != repr_id:
                continue
            try:
                arena.check_allocated()
            except StoreCorrupt as error:
                return str(error)
            same = arena.boot and arena.boot == osio.boot_id()
            return "" if same else "it was written before this boot"
        return why
    finally:
        os.close(fd)


def _layout_of(descriptor: Any) -> PageLayout | None:
    """The page layout that a stored descriptor names, without the model it describes."""
    try:
        fields = cast(dict[str, object], json.loads(descriptor))
        named = [str(fields[name]) for name in ("n_layer", "n_kv_head", "head_dim")]
        named.append(str(fields.get("v_first", "")))
        layout = PageLayout.from_text(*named)
        return layout if fields["layout_id"] == layout.layout_id else None
    except (ValueError, TypeError, KeyError, RecursionError, StoreError):
        return None


def _open_extent(info: ExtentInfo) -> int:
    """A descriptor to read from. Raises StoreCorrupt for a file that is not the extent recorded."""
    try:
        fd = osio.open_private(info.path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise StoreCorrupt(
            "its file cannot be opened", why=os.strerror(error.errno or 0)
        ) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != info.file_bytes:
        os.close(fd)
        raise StoreCorrupt(f"its file has {found.st_size} bytes instead of {info.file_bytes}")
    return fd


def _cut_session(db: sqlite3.Connection, name: str, epoch: int, ids: bytes) -> None:
    """Cut a session to `ids`, under a new epoch, so that older open rows do not match it."""
    db.execute("DELETE FROM token_blob WHERE session = ?", (name,))
    if ids:
        db.execute(
            "INSERT INTO token_blob VALUES (?,0,?,?,?)",
            (name, len(ids) // 4, ids, keys.blob_checksum(name, 0, ids)),
        )
    db.execute(
        "UPDATE session SET ledger_len = ?, epoch = ? WHERE id = ?",
        (len(ids) // 4, epoch + 1, name),
    )


def _all(kind: type, values: tuple[object, ...]) -> bool:
    return all(type(value) is kind for value in values)


def _naturals(values: tuple[Any, ...]) -> bool:
    return _all(int, values) and min(values) >= 0
