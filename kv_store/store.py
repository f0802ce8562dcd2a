"""The store directory: who owns it, what is found in it at opening, and closing it.

    LOCK               lock for life; inside, who holds it, and how the last life ended (`losses`)
    BALLAST            spare bytes, deleted when the ledger meets a full disk
    meta.db, -wal      ledger and manifest (SQLite)
    ext/000001.kv      sealed pages
    arena/<lane>.<n>   open pages of one worker incarnation

Opening never fails for damaged pages: what does not verify is forgotten and counted in
`recovery`. It fails for a second owner, a newer format, and an unsuitable file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from dataclasses import dataclass
from typing import NamedTuple

from kv_store import losses, osio, records
from kv_store.arena import ARENA_NAME, LANE_NAME, Arena, delete_arena
from kv_store.attic import Attic
from kv_store.ballast import Ballast
from kv_store.errors import StoreCorrupt, StoreGone, StoreLocked, StoreUnsupported
from kv_store.extent import EXTENT_BYTES, ExtentInfo, Extents, extent_path
from kv_store.layout import PAGE_TOKENS, Descriptor, differing_fields
from kv_store.ledger import Ledger, Opener, PageRow, Replay, connect, is_damage
from kv_store.pages import PageEvent, PageState
from kv_store.places import Budget, Parts, derived_floor_bytes
from kv_store.upkeep import SESSIONS_MAX, UpkeepPool


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening found. `pages_dropped` counts by reason."""

    created: bool
    clean: bool
    same_boot: bool
    sessions: int
    pages_listed: int
    pages_dropped: dict[str, int]
    arenas_deleted: int
    arenas_busy: tuple[str, ...]
    other_reprs: tuple[tuple[str, ...], ...]  # per older representation: the fields that differ


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Everything about a store that is not its content. None = the default in the text.

    ballast_bytes: 64 MiB, or a sixteenth of a budget below 1 GiB. free_floor_bytes: by the size
    of the file system. allow_any_fs turns a refused file system into a warning.
    keep_arenas leaves arenas of this boot for adoption. sessions_max is what `gc` leaves.
    """

    budget_bytes: int
    extent_bytes: int = EXTENT_BYTES
    ballast_bytes: int | None = None
    free_floor_bytes: int | None = None
    allow_any_fs: bool = False
    verify_writes: bool = True
    keep_arenas: bool = False
    sessions_max: int = SESSIONS_MAX


class Store(UpkeepPool):
    """An open store: `UpkeepPool` plus its directory. Use `Store.open`."""

    path: str
    warnings: list[str]
    losses: list[str]  # what this opening found to be lost for good: sentences for health
    recovery: Recovery
    attic: Attic  # arenas of earlier lives, if StoreSettings.keep_arenas; else empty
    _lock_fd: int
    _folder: os.stat_result  # of `path` when it was opened
    _ballast: Ballast
    _stopped: bool = False
    _settings: StoreSettings

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        descriptor: Descriptor,
        settings: StoreSettings,
        *,
        files: osio.Files | None = None,
        connect: Opener = connect,
    ) -> Store:
        """Open or create the store at `path`; blocks. Raises StoreLocked, StoreUnsupported,
        StoreVersion, StoreFull, LedgerError."""
        path, files = os.path.abspath(os.fspath(path)), files or osio.Files()
        warnings = _prepare_directory(path, settings.allow_any_fs)
        lock_fd = take_lock(path)
        found = losses.gather(path, lock_fd)
        warnings += losses.unbelieved(path)
        try:
            return cls._open_locked(
                path, descriptor, settings, files, connect, lock_fd, warnings, found
            )
        except BaseException:
            life = losses.read_life(lock_fd)
            if not found.log or life != found.life:  # else it would hide what was found
                with contextlib.suppress(OSError):  # the ledger's log went with its closing
                    losses.mark_closed(files, lock_fd, life.lost)
            os.close(lock_fd)
            raise

    @classmethod
    def _open_locked(
        cls,
        path: str,
        descriptor: Descriptor,
        settings: StoreSettings,
        files: osio.Files,
        connect: Opener,
        lock_fd: int,
        warnings: list[str],
        found: losses.Evidence,
    ) -> Store:
        boot = osio.boot_id()
        ballast = Ballast(path, files, settings.ballast_bytes, settings.budget_bytes)
        opener = _Opener(path, descriptor, boot, connect, ballast)
        ledger, epoch, lost, told = _open_ledger(opener, found)
        warnings += told
        try:
            replay = ledger.replay
            try:
                life = losses.Life(epoch, False, lost)
                losses.write_life(files, lock_fd, replay.store_uuid.hex(), boot, life)
            except OSError as error:  # it only informs; the lock itself is in the kernel
                warnings.append(f"the LOCK file does not say who we are: {error}")
            extents = Extents(os.path.join(path, "ext"), files)
            budget = Budget(
                settings.budget_bytes, settings.extent_bytes, _floor(files, path, settings)
            )
            self = cls(
                Parts(
                    descriptor,
                    replay.store_uuid,
                    epoch,
                    ledger,
                    extents,
                    files,
                    budget,
                    settings.verify_writes,
                )
            )
        except BaseException:
            ledger.close()
            raise
        self.path, self.warnings, self._lock_fd = path, warnings, lock_fd
        self._settings, self.attic = settings, Attic()
        self.losses, self._ballast = told, ballast
        self._folder = os.stat(path)
        self.sessions_max = settings.sessions_max
        try:
            self._recover(replay, boot)
            ballast.make()
            if settings.budget_bytes < descriptor.layout.page_bytes:
                warnings.append("the store budget is smaller than one page: nothing is cached")
            elif not self._infos:
                self._grow()
                if self._growth_blocked:
                    warnings.append(f"caching is off: {self._growth_blocked}")
            self._self_test()
            if self._write_failure:
                warnings.append(f"pages cannot be cached now: {self._write_failure}")
            ledger.commit().result()
        except BaseException:
            self._lock_fd = -1  # the caller's to close: once, or it may be somebody else's by then
            self._stop(clean=False)
            raise
        return self

    def create_arena(self, lane: str, incarnation: int, places: int) -> Arena:
        """The arena file of one worker incarnation; the worker opens it as `ArenaMapping`.

        Raises StoreFull, StoreGone, StoreError for a number that no arena can have, OSError.
        """
        if not LANE_NAME.fullmatch(lane):
            raise ValueError(f"a lane's name is [a-z0-9_-], up to 32 characters, got {lane!r}")
        if not self.is_in_place():
            raise StoreGone(
                f"the folder of the KV store {self.path} is gone",
                why="it was moved, removed or replaced while the daemon was running",
                fix="move it back, or restart the daemon with the folder it shall use",
            )
        name = f"{lane}.{incarnation}"
        path = os.path.join(self.path, "arena", name)
        return Arena.create(path, self.layout, places, incarnation, self._files, self.repr_id)

    def is_in_place(self) -> bool:
        """Whether the folder that stands at `path` is the one that was opened; may block."""
        try:
            return os.path.samestat(os.stat(self.path), self._folder)
        except OSError:
            return False

    def maintain(self) -> None:
        """Call every few seconds when idle: audit, write ages, retry what a full disk stopped."""
        self.check_integrity()
        with self._lock:
            self._growth_blocked = ""
            for row in list(self._unrecorded.values()):
                self._record_extent(row)
            self._write_ages()
            self._grow_ahead()
        self._pages_io.submit(self._look_again)
        self._pages_io.submit(self._ballast.make)
        if self.ledger.failure is None:
            self.ledger.commit()

    @property
    def troubles(self) -> list[str]:
        """What is wrong beside the ledger and the page tier: sentences for health."""
        spent = self._ballast.trouble
        return [*self.losses, *([spent] if spent else [])]

    def stat(self) -> dict[str, int | float | str]:
        """`UpkeepPool.stat`, and what is wrong with the folder."""
        return super().stat() | {
            "ledger_lost": "; ".join(self.losses),
            "ballast": self._ballast.trouble or "ok",
        }

    def close(self) -> None:
        """Write what is pending, mark the store clean, release the lock."""
        self._stop(clean=True)

    def __repr__(self) -> str:
        with self._lock:
            table = self._table
            mib = self.layout.page_bytes / (1 << 20)
            return (
                f"<Store epoch={self.epoch} pages={table.used}/{self.places_max}"
                f" published={table.count(PageState.PUBLISHED)}"
                f" listed={table.count(PageState.LISTED)}"
                f" {table.used * mib:.0f}/{self._budget.budget_bytes >> 20} MiB"
                f"{' blocked' if self._growth_blocked else ''} {self.ledger!r}>"
            )

    # -- opening and closing ------------------------------------------------------------------

    def _recover(self, replay: Replay, boot: str) -> None:
        """Bring the index back from the manifest; nothing is read from the extents yet."""
        self._next_extent, self._next_page_id = replay.next_extent, replay.next_page_id
        dropped = {"malformed row": replay.pages_malformed} if replay.pages_malformed else {}
        rows = {row.ref.page_id: row for row in replay.pages}
        self._open_extents(replay, rows, dropped)
        for stray in self._extents.strays({info.index for info in self._infos + self._foreign}):
            try:
                os.unlink(stray)
            except OSError as error:
                self.warnings.append(f"{stray} is in the way: {os.strerror(error.errno or 0)}")
        for row in replay.pages:  # oldest first, so ages keep their order
            reason = self._list_page(row)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + 1
        self._table.supersede_tails()
        same_boot = bool(boot) and boot == replay.boot_id
        if same_boot and self._settings.keep_arenas:
            folder = os.path.join(self.path, "arena")
            self.attic = Attic(folder, self.layout, self.repr_id, self._files)
            self.warnings += self.attic.warnings
            deleted, busy = self.attic.deleted, self.attic.busy
        else:
            deleted, busy = self._sweep_arenas()
        others = [
            tuple(differing_fields(self.descriptor, text))
            for repr_id, text in replay.reprs.items()
            if repr_id != self.repr_id
        ]
        self.recovery = Recovery(
            created=not replay.epoch,
            clean=replay.clean,
            same_boot=same_boot,
            sessions=replay.sessions,
            pages_listed=self._table.count(PageState.LISTED),
            pages_dropped=dropped,
            arenas_deleted=deleted,
            arenas_busy=busy,
            other_reprs=tuple(others),
        )

    def _open_extents(
        self, replay: Replay, rows: dict[int, PageRow], dropped: dict[str, int]
    ) -> None:
        """Own extents join the pool, others wait to be dropped; all within the budget."""
        infos = [
            ExtentInfo(*row, path=extent_path(self._extents.folder, row[0]))
            for row in replay.extents
        ]
        gens = {page_id: row.ref.gen for page_id, row in rows.items()}
        total = 0
        for info in sorted(infos, key=lambda i: (i.repr_id != self.repr_id, i.index)):
            total += info.file_bytes
            gone = ""
            if total > self._budget.budget_bytes:
                gone = "over budget"
            elif info.repr_id == self.repr_id and info.page_bytes != self.layout.page_bytes:
                gone = "other page size"
            elif info.repr_id == self.repr_id:
                try:
                    self._extents.open(info)
                except StoreCorrupt as error:
                    gone = "extent missing or truncated"
                    self.warnings.append(str(error))
            if gone:
                total -= info.file_bytes
                ids = range(info.first_page_id, info.first_page_id + info.places)
                lost = sum(i in rows and rows[i].state == "published" for i in ids)
                dropped[gone] = dropped.get(gone, 0) + lost
                for page_id in ids:
                    rows.pop(page_id, None)
                self._extents.drop(info)
                self.ledger.append(records.DropExtent(info.index, info.first_page_id, info.places))
            elif info.repr_id == self.repr_id:
                self._add_places(info, gens)
            else:
                self._foreign.append(info)
        published = {row.ref.page_id for row in rows.values() if row.state == "published"}
        self._foreign.sort(
            key=lambda info: len(
                published.intersection(range(info.first_page_id, info.first_page_id + info.places))
            )
        )  # the first to go costs least

    def _list_page(self, row: PageRow) -> str:
        """Put one manifest row into the index; the reason if it cannot be, else empty."""
        page = self._table.find(row.ref.page_id)
        if page is None or row.repr_id != self.repr_id:
            return ""  # counted with its extent, or of another representation
        if row.state == "bad":
            self._table.retire_free(page)
            return ""
        if row.state != "published":
            return ""
        sizes = (len(row.key), len(row.parent), len(row.digest), len(row.checksum))
        if sizes != (32, 32, 16, 16) or not 0 < len(row.tokens) <= PAGE_TOKENS * 4:
            return "malformed row"
        if self._table.resident(row.key) is not None:
            return "repeated key"
        page.key, page.parent, page.tokens = row.key, row.parent, row.tokens
        page.digest, page.checksum = row.digest, row.checksum
        page.priority, page.listed = row.priority, True
        self._table.apply(page, PageEvent.LIST)
        self._table.restore_age(page, row.lru_seq)
        return ""

    def _sweep_arenas(self) -> tuple[int, tuple[str, ...]]:
        """Delete arenas of dead writers. A locked one has a writer that may still write."""
        folder, deleted, busy = os.path.join(self.path, "arena"), 0, list[str]()
        for name in os.listdir(folder):
            if not ARENA_NAME.fullmatch(name):
                continue
            path = os.path.join(folder, name)
            try:
                gone = delete_arena(path)
            except OSError as error:  # a directory, a link: not ours, and nothing reads it
                self.warnings.append(f"{path} is no arena: {os.strerror(error.errno or 0)}")
                continue
            if gone:
                deleted += 1
            else:
                busy.append(name)
        return deleted, tuple(sorted(busy))

    def _write_ages(self) -> None:
        rows = [
            (page.page_id, page.gen, page.priority, page.lru_seq)
            for page_id in self._table.dirty_lru
            if (page := self._table.find(page_id)) is not None and page.listed
        ]
        self._table.dirty_lru.clear()
        if rows:
            self.ledger.append(records.AgePages(tuple(rows)))

    def _stop(self, *, clean: bool) -> None:
        if self._stopped:  # closing a descriptor twice may close somebody else's
            return
        self._stopped = True
        self._pages_io.close()
        if clean and self.ledger.failure is None:
            with self._lock:
                self._write_ages()
            self.ledger.append(records.MarkClean())
        self.ledger.close()
        self._extents.close()
        self.attic.close()
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                losses.mark_closed(self._files, self._lock_fd)
            os.close(self._lock_fd)


def _prepare_directory(path: str, allow_any_fs: bool) -> list[str]:
    """Make the directories, private to us. Returns warnings."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        fs = osio.file_system(path)
        warnings = _judge_file_system(fs, path, allow_any_fs)
        for folder in (path, os.path.join(path, "ext"), os.path.join(path, "arena")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            mode = os.lstat(folder).st_mode
            if not stat.S_ISDIR(mode):
                raise StoreUnsupported(
                    f"{folder} is not a directory",
                    fs=fs.name,
                    why="a store keeps its files in folders of its own",
                    fix="move away what stands there, or choose another store directory",
                )
            if mode & 0o077:  # KV equals the prompt: nobody else reads it
                os.chmod(folder, 0o700)
    except OSError as error:
        raise StoreUnsupported(
            f"the store directory {path} cannot be used",
            fs="",
            why=os.strerror(error.errno or 0),
            fix="choose a writable directory on a local ext4 or XFS file system",
        ) from error
    return warnings


def _judge_file_system(fs: osio.FileSystem, path: str, allow_any_fs: bool) -> list[str]:
    if fs.verdict == "ok":
        return []
    if fs.verdict == "volatile":
        return [f"the store {path} is on {fs.name}: {fs.why}"]
    if allow_any_fs:
        return [f"the store {path} is on {fs.name}, which is not for production: {fs.why}"]
    raise StoreUnsupported(
        f"the store {path} is on {fs.name}",
        fs=fs.name,
        why=fs.why,
        fix="put the store on a local ext4 or XFS file system, or allow any file system explicitly",
    )


def take_lock(path: str) -> int:
    name, why = os.path.join(path, "LOCK"), "it is no plain file"
    try:
        fd = osio.open_private(name, os.O_RDWR | os.O_CREAT)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            fd = -1
    except OSError as error:
        fd, why = -1, os.strerror(error.errno or 0)
    if fd < 0:
        raise StoreUnsupported(
            f"the store {path} cannot be locked",
            fs="",
            why=f"{name}: {why}",
            fix="LOCK must be a plain file of this user: move away what stands there (no data is in"
            " it), or fix its permissions",
        )
    if osio.lock_exclusive(fd):
        return fd
    pid = 0
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        pid = int(json.loads(os.pread(fd, 4096, 0))["pid"])
    os.close(fd)
    raise StoreLocked(path, pid)


class _Opener(NamedTuple):
    """What it takes to open the ledger of `path`."""

    path: str
    descriptor: Descriptor
    boot: str
    connect: Opener
    ballast: Ballast


def _open_ledger(opener: _Opener, found: losses.Evidence) -> tuple[Ledger, int, str, list[str]]:
    """Open the ledger; a damaged file is set aside and a new one started, and we say so.

    Gives it, our epoch, why it is not the newest there was ("" = it is), and what was lost.
    """
    path = opener.path
    try:
        ledger, epoch = _start_epoch(opener, found.epoch)
    except StoreCorrupt as error:
        aside = set_aside(os.path.join(path, "meta.db"))
        ledger, epoch = _start_epoch(opener, found.epoch)
        return ledger, epoch, "", [f"{error}; it was kept as {aside} and the store starts empty"]
    before = ledger.replay
    if not before.epoch and (found.epoch or os.listdir(os.path.join(path, "ext"))):
        gone = (
            f"{path} was in use, but its ledger is gone or empty: the store starts empty, and"
            " no earlier session is known. Restore meta.db and meta.db-wal together, if you can"
        )
        return ledger, epoch, "", [gone]
    lost = found.lost(before.epoch, before.clean) if before.epoch else ""
    return ledger, epoch, lost, [losses.describe(lost)] if lost else []


def _start_epoch(opener: _Opener, known: int) -> tuple[Ledger, int]:
    """Open the ledger and commit a new epoch: from here on every older process's work is void.

    It is above `known`, too: open rows of a life that the ledger forgot must not pass for ours.
    """
    descriptor = opener.descriptor
    ledger = Ledger(
        os.path.join(opener.path, "meta.db"),
        descriptor.repr_id,
        store_uuid=secrets.token_bytes(16),
        on_full=opener.ballast.spend,
        connect=opener.connect,
    )
    epoch = max(ledger.replay.epoch, known) + 1
    row = records.StartEpoch(
        epoch,
        opener.boot,
        descriptor.repr_id,
        descriptor.to_json(),
        descriptor.layout.page_bytes,
    )
    try:
        ledger.append(row)
        ledger.commit().result()
    except BaseException as error:
        ledger.close()
        if is_damage(error.__cause__):
            raise StoreCorrupt("the ledger is damaged", why=str(error.__cause__)) from error
        raise
    return ledger, epoch


def set_aside(name: str) -> str:
    """Rename a ledger to the first free name; gives that. Its log goes first: a new file that met
    the old log would be given its records."""
    number, suffixes = 1, ("-wal", "-shm", "")
    while any(os.path.lexists(f"{name}.damaged-{number}{suffix}") for suffix in suffixes):
        number += 1
    aside = f"{name}.damaged-{number}"
    for suffix in suffixes[:-1]:
        with contextlib.suppress(FileNotFoundError):
            os.rename(name + suffix, aside + suffix)
    os.rename(name, aside)
    return os.path.basename(aside)


def _floor(files: osio.Files, path: str, settings: StoreSettings) -> int:
    if settings.free_floor_bytes is not None:
        return settings.free_floor_bytes
    return derived_floor_bytes(files.free_bytes(path)[1])
