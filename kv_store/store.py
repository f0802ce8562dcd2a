"""The store directory: its lock, recovery at opening, arenas, maintenance and closing.

    LOCK               held while open; inside, the process, and how the last opening ended
    `BALLAST`          reserve bytes, freed when the ledger meets a full disk
    meta.db, -wal      ledger and manifest (SQLite)
    ext/000001.kv      sealed pages
    arena/<lane>.<n>   open pages of one worker incarnation
    state/<key>.state  recurrent states of sessions

Opening never fails for damaged pages: rows that do not verify are dropped and counted in
`dropped`. It fails for a second owner, a newer format, and an unsuitable file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import mul

from kv_store import osio
from kv_store.arenas.arena import ARENA_NAME, LANE_NAME, Arena, delete_arena
from kv_store.arenas.orphaned import ORPHANED_SHARE, OrphanedArenas
from kv_store.errors import StoreCorrupt, StoreFull, StoreGone, StoreLocked, StoreUnsupported
from kv_store.layout import Descriptor
from kv_store.ledger import continuity, writes
from kv_store.ledger.ledger import Ledger, Opener, Replay, connect, is_damage
from kv_store.ledger.reserve import ReserveFile
from kv_store.pages.allocator import EVICT_TO_PERCENT
from kv_store.pages.core import Budget, StoreCore, derived_floor_bytes
from kv_store.pages.extents import EXTENT_BYTES, ExtentInfo, Extents, extent_path
from kv_store.pages.index import PageState
from kv_store.pages.maintenance import LEDGER_BYTES_MAX, SESSIONS_MAX, GcReport
from kv_store.pages.pool import PagePool
from kv_store.pools import StorePools
from kv_store.states import STATES_DIR, SavedStates

LOGS = "-wal", "-shm"  # suffixes of the files of SQLite beside a ledger
AGES_MAX = 4096  # pages whose age one call of `maintain` writes: bounds its commit
_GONE = (
    "the folder {} was moved, removed or replaced: the next start finds nothing of what is written"
    " now; move it back, or restart the daemon"
)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of a store. None = the default named below.

    `ballast_bytes`: 64 MiB, or a sixteenth of a budget below 1 GiB. free_floor_bytes: by the size
    of the file system. allow_any_fs turns a refused file system into a warning.
    keep_arenas leaves arenas of this boot for import, the newest ones up to a share of the budget.
    states_bytes: for recurrent states, of a model that has some, beside budget_bytes; 0 = none are
    kept. `gc` leaves up to sessions_max sessions with ledger_bytes_max bytes of rows, shared fairly
    between tenants.
    """

    budget_bytes: int
    extent_bytes: int = EXTENT_BYTES
    ballast_bytes: int | None = None
    free_floor_bytes: int | None = None
    allow_any_fs: bool = False
    keep_arenas: bool = False
    states_bytes: int = 0
    sessions_max: int = SESSIONS_MAX
    ledger_bytes_max: int = LEDGER_BYTES_MAX


class Store:
    """An open store. Use `Store.open`.

    `pages` is the pool of the representation it was opened for; `pool` opens further ones.
    """

    def __init__(
        self,
        path: str,
        core: StoreCore,
        descriptor: Descriptor,
        settings: StoreSettings,
        reserve: ReserveFile,
        lock_fd: int,
    ) -> None:
        self.path = path
        self.core = core
        self.ledger = core.ledger
        self.events = core.events
        self.counters = core.counters
        self.rates = core.rates
        self.epoch = core.epoch
        self.warnings: list[str] = []
        self.losses: list[str] = []  # for health: what this opening found to be lost for good
        self.dropped = Counter[str]()  # pages that this opening dropped, by reason
        self.orphaned = OrphanedArenas()  # of earlier runs, if StoreSettings.keep_arenas
        self.pages = PagePool(core, descriptor)
        self.pools = StorePools(core, self.pages, lambda why: self.warnings.append(why))
        self.states: SavedStates | None = None  # None: of a model without, or the disk refuses
        self._settings = settings
        self._reserve = reserve
        self._lock_fd = lock_fd
        self._folder = os.stat(path)
        self._is_gone = False  # the folder, at the last look
        self._closed = False

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
        found = continuity.gather(path, lock_fd)
        warnings += found.implausible
        try:
            return cls._open_locked(
                path, descriptor, settings, files, connect, lock_fd, warnings, found
            )
        except BaseException:
            opening = continuity.read_opening(lock_fd)
            if not found.log or opening != found.opening:  # else the next opening finds no loss
                with contextlib.suppress(OSError):  # closing the ledger removed its log
                    continuity.mark_closed(files, lock_fd, opening.lost)
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
        found: continuity.Traces,
    ) -> Store:
        boot = osio.boot_id()
        reserve = ReserveFile(path, files, settings.ballast_bytes, settings.budget_bytes)
        start = partial(
            _start_epoch,
            path,
            descriptor,
            boot,
            found.epoch,
            on_full=reserve.spend,
            connect=connect,
        )
        ledger, epoch, lost, losses = _open_ledger(path, found, start)
        warnings += losses
        try:
            try:
                opening, uuid = continuity.Opening(epoch, False, lost), ledger.replay.store_uuid
                continuity.write_opening(files, lock_fd, uuid.hex(), boot, opening)
            except OSError as error:  # it only informs; the lock itself is in the kernel
                warnings.append(f"the LOCK file does not name this process: {error}")
            floor = settings.free_floor_bytes
            if floor is None:
                floor = derived_floor_bytes(files.free_bytes(path)[1])
            core = StoreCore(
                ledger,
                Extents(os.path.join(path, "ext"), files),
                files,
                Budget(settings.budget_bytes, settings.extent_bytes, floor),
                epoch=epoch,
            )
            self = cls(path, core, descriptor, settings, reserve, lock_fd)
        except BaseException:
            ledger.close()
            raise
        self.warnings, self.losses = warnings, losses
        try:
            self._recover(ledger.replay, boot)
            reserve.make()
            if settings.budget_bytes < descriptor.layout.page_bytes:
                warnings.append("the store budget is smaller than one page: nothing is cached")
            elif not self.pages.allocator.infos:
                self.pages.allocator.grow()
                if blocked := self.pages.allocator.growth_blocked:
                    warnings.append(f"caching is off: {blocked}")
            self._open_states()
            self.pages.loader.self_test()
            if core.write_failure:
                warnings.append(f"pages cannot be cached now: {core.write_failure}")
            ledger.commit().result()
        except BaseException:
            self._end(clean=False)
            raise
        return self

    def _open_states(self) -> None:
        """Open the folder of recurrent states; of a model without, those of others are removed."""
        folder = os.path.join(self.path, STATES_DIR)
        if not self._settings.states_bytes and not os.path.isdir(folder):
            return
        try:
            found = SavedStates(
                folder,
                self._settings.states_bytes,
                self.core.thread.submit,
                self.core.budget.free_floor_bytes,
            )
        except OSError as error:
            self.warnings.append(f"recurrent states are not kept: {error}")
        else:
            self.states = found if self._settings.states_bytes else None

    def pool(self, descriptor: Descriptor) -> PagePool:
        """The pool of a representation, opened at the first call; blocks.

        Raises LedgerError, StoreCorrupt.
        """
        return self.pools.open(descriptor).result()

    def create_arena(
        self, lane: str, incarnation: int, slots: int, pool: PagePool | None = None
    ) -> Arena:
        """Create the arena file of one worker incarnation; the worker opens it as `ArenaMapping`.

        Its slots are pages of `pool`, or of the store's own representation.
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
        pool = pool or self.pages
        return Arena.create(path, pool.layout, slots, incarnation, self.core.files, pool.repr_id)

    def is_in_place(self) -> bool:
        """Whether the folder at `path` is the one that was opened; may block."""
        try:
            return os.path.samestat(os.stat(self.path), self._folder)
        except OSError:
            return False

    def maintain(self) -> None:
        """Call every few seconds when idle, on a thread that may wait: check a part of the indexes,
        write ages, retry what a full disk stopped, look for the folder. Raises AssertionError for a
        wrong index."""
        self._is_gone = not self.is_in_place()
        for pool in self.pools:
            pool.maintenance.check()
            pool.maintenance.write_ages(AGES_MAX)
            pool.allocator.try_again()
        with self.core.lock:
            self.core.retry_rows()
        self.core.thread.submit(self.core.look_again)
        self.core.thread.submit(self._reserve.make)
        if self.ledger.failure is None:
            self.ledger.commit()

    def gc(self, keep: Collection[str] = ()) -> Future[GcReport]:
        """Evict to the target; drop superseded tails, other models' extents while the budget is
        too full, and ledger rows beyond both limits; never sessions named in `keep`.
        """
        return self.core.thread.submit(lambda: self._collect(keep))

    def _collect(self, keep: Collection[str]) -> GcReport:
        """Collect garbage, for `gc` (page thread)."""
        found = [pool.maintenance.collect() for pool in self.pools]
        limit, extents, slots = self.core.budget.budget_bytes * EVICT_TO_PERCENT // 100, 0, 0
        while self.core.foreign and self.core.extent_bytes > limit:
            slots += self.core.drop_oldest_foreign()
            extents += 1
        evicted, tails = map(sum, zip(*found, strict=True))
        limits, sessions = self._settings, 0
        with contextlib.suppress(StoreFull):  # its rows stay; the other parts are deleted
            sessions = self.ledger.prune(limits.sessions_max, keep, limits.ledger_bytes_max)
        self.ledger.commit()  # also where there was nothing to prune
        return GcReport(evicted, tails, extents, slots, sessions)

    def give_disk_space(self) -> Future[int]:
        """Delete the extents of other models, or else the one of this model that has the fewest
        pages: room for the ledger on a full disk. Resolves to the number of extents."""
        return self.core.thread.submit(self.core.give_disk_space)

    @property
    def tier(self) -> str:
        """The state of the page cache, for health: "ok", or what is wrong."""
        core, pages = self.core, self.pages
        if not pages.allocator.slots_max:
            return "off: the budget is smaller than one page"
        if not core.thread.alive:
            return "off: the page thread has ended"
        if not len(pages.index):
            return f"off: {pages.allocator.growth_blocked or 'there is no extent yet'}"
        if core.write_failure:
            return f"failing: {core.write_failure}"
        return f"not growing: {core.not_growing}" if core.not_growing else "ok"

    @property
    def troubles(self) -> list[str]:
        """Sentences for health about faults other than those of the ledger and the page tier."""
        gone = _GONE.format(self.path) if self._is_gone else ""
        return [*self.losses, *filter(None, (self._reserve.trouble, gone))]

    def stat(self) -> dict[str, int | float | str]:
        """Numbers for health, metrics and the status command, of all pools together where they
        add up; all from counters. A rate is 0 until measured."""
        core, pages = self.core, self.pages
        with core.lock:
            pools = list(self.pools)
            counts = [pool.index.counts() for pool in pools]
        sizes = [pool.layout.page_bytes for pool in pools]
        numbers: dict[str, int | float | str] = {
            "epoch": self.epoch,
            "page_bytes": pages.layout.page_bytes,
            "budget_bytes": core.budget.budget_bytes,
            "extent_bytes": core.extent_bytes,
            "extent_bytes_other_reprs": core.foreign_bytes,
            "used_bytes": sum(
                (sum(n.values()) - n[PageState.FREE]) * size
                for n, size in zip(counts, sizes, strict=True)
            ),
            "disk_free_floor_bytes": core.budget.free_floor_bytes,
            "pages_total": sum(sum(n.values()) for n in counts),
            "pages_max": pages.allocator.slots_max,
            "pages_pinned": sum(pool.index.pinned for pool in pools),
            "tails": sum(pool.index.tails for pool in pools),
            "tails_superseded": sum(pool.index.superseded for pool in pools),
            "states": 0 if self.states is None else len(self.states),
            "states_bytes": 0 if self.states is None else self.states.bytes,
            "states_budget_bytes": self._settings.states_bytes,
            "page_tier": self.tier,
            "growth_blocked": pages.allocator.growth_blocked,
            "page_backlog": core.thread.backlog(),
        }
        for state in PageState:
            each = [n[state] for n in counts]
            numbers[f"pages_{state.value}"] = sum(each)
            numbers[f"bytes_{state.value}"] = sum(map(mul, each, sizes))
        times = sorted(self.ledger.stats.commit_us)
        numbers |= {
            "read_bytes_per_s": core.rates.read_bytes_per_s or 0.0,
            "seal_bytes_per_s": core.rates.seal_bytes_per_s or 0.0,
            "sessions": self.ledger.stats.sessions,
            "sessions_max": self._settings.sessions_max,
            "ledger_bytes": self.ledger.stats.session_bytes,
            "ledger_bytes_max": self._settings.ledger_bytes_max,
            "commits": self.ledger.stats.commits,
            "commit_us_p50": times[len(times) // 2] if times else 0.0,
            "commit_us_p99": times[len(times) * 99 // 100] if times else 0.0,
            "ledger_failed": str(self.ledger.failure or ""),
            "ledger_lost": "; ".join(self.losses),
            "ballast": self._reserve.trouble or "ok",
        }
        return numbers | {f"{name}_total": n for name, n in core.counters.items()}

    def end_reading(self) -> None:
        """End the page thread: from here on arenas may be deleted, and nothing is sealed."""
        self.core.thread.close()

    def close(self) -> None:
        """Write what is pending, mark the store clean, release the lock."""
        if self._closed:  # closing a descriptor twice may close another file's
            return
        self._closed = True
        self._end(clean=True)
        with contextlib.suppress(OSError):
            continuity.mark_closed(self.core.files, self._lock_fd)
        os.close(self._lock_fd)

    def __repr__(self) -> str:
        with self.core.lock:
            index, pages = self.pages.index, self.pages
            mib = pages.layout.page_bytes / (1 << 20)
            return (
                f"<Store epoch={self.epoch} pages={index.used}/{pages.allocator.slots_max}"
                f" published={index.count(PageState.PUBLISHED)}"
                f" listed={index.count(PageState.LISTED)}"
                f" {index.used * mib:.0f}/{self.core.budget.budget_bytes >> 20} MiB"
                f"{' blocked' if pages.allocator.growth_blocked else ''} {self.ledger!r}>"
            )

    # -- opening and closing ------------------------------------------------------------------

    def _recover(self, replay: Replay, boot: str) -> None:
        """Rebuild the index from the manifest; nothing is read from the extents yet."""
        core, pages = self.core, self.pages
        if replay.pages_malformed:
            self.dropped["malformed row"] = replay.pages_malformed
        self._open_extents(replay)
        known = [*pages.allocator.infos, *core.foreign]
        for stray in core.extents.strays({info.index for info in known}):
            try:
                os.unlink(stray)
            except OSError as error:
                self.warnings.append(f"{stray} is in the way: {os.strerror(error.errno or 0)}")
        for row in replay.pages:  # oldest first, so ages keep their order
            if reason := pages.restore(row):
                self.dropped[reason] += 1
        for reason, count in self.dropped.items():
            self.warnings.append(f"{count} pages were dropped: {reason}")
        pages.index.supersede_tails(pages.index.tail_parents())
        folder = os.path.join(self.path, "arena")
        if self._settings.keep_arenas and boot and boot == replay.boot_id:
            bytes_max = self._settings.budget_bytes // ORPHANED_SHARE
            self.orphaned = OrphanedArenas(
                folder, pages.layout, pages.repr_id, core.files, bytes_max
            )
            self.warnings += self.orphaned.warnings
        else:
            _sweep_arenas(folder, self.warnings)

    def _open_extents(self, replay: Replay) -> None:
        """Open the pool's extents, note those of other representations, drop those over the
        budget."""
        core, pages = self.core, self.pages
        folder, rows = core.extents.folder, {row.ref.page_id: row for row in replay.pages}
        gens = {page_id: row.ref.gen for page_id, row in rows.items()}
        published = {page_id for page_id, row in rows.items() if row.state == "published"}
        infos = [ExtentInfo(*row, path=extent_path(folder, row[0])) for row in replay.extents]
        for info in sorted(infos, key=lambda i: (i.repr_id != pages.repr_id, i.index)):
            gone = ""
            if core.extent_bytes + info.file_bytes > core.budget.budget_bytes:
                gone = "over budget"
            elif info.repr_id != pages.repr_id:
                core.add_foreign(info)
            elif info.page_bytes != pages.layout.page_bytes:
                gone = "other page size"
            else:
                try:
                    pages.allocator.open_extent(info, gens)
                except StoreCorrupt as error:
                    gone = "extent missing or truncated"
                    self.warnings.append(str(error))
            if gone:
                lost = published.intersection(info.page_ids)
                published -= lost
                if lost:
                    self.dropped[gone] += len(lost)
                core.extents.drop(info)
                core.forget_extent(info)
        # the extents with the fewest pages are dropped first
        core.foreign.sort(key=lambda info: len(published.intersection(info.page_ids)))

    def _end(self, *, clean: bool) -> None:
        """End the threads and close the files, except for LOCK."""
        self.core.thread.close()
        if clean and self.ledger.failure is None:
            for pool in self.pools:
                pool.maintenance.write_ages()
            self.ledger.append(writes.MarkClean())
        self.ledger.close()
        self.core.extents.close()
        self.orphaned.close()


def _sweep_arenas(folder: str, warnings: list[str]) -> None:
    """Delete the arenas of dead writers; those still in use stay."""
    for name in sorted(filter(ARENA_NAME.fullmatch, os.listdir(folder))):
        path = os.path.join(folder, name)
        try:
            delete_arena(path)
        except OSError as error:  # a directory, a link: left alone
            warnings.append(f"{path} is no arena: {os.strerror(error.errno or 0)}")


def _prepare_directory(path: str, allow_any_fs: bool) -> list[str]:
    """Make the directories, mode 0700. Returns warnings. Raises StoreUnsupported."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        fs = osio.file_system(path)
        warnings = _check_file_system(fs, path, allow_any_fs)
        for folder in (path, os.path.join(path, "ext"), os.path.join(path, "arena")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            mode = check_is_folder(folder).st_mode
            warnings += _check_owner(folder, os.lstat(folder).st_uid)
            if mode & 0o077:  # KV equals the prompt: other users must not read it
                os.chmod(folder, 0o700)
    except OSError as error:
        raise StoreUnsupported(
            f"the store directory {path} cannot be used",
            why=os.strerror(error.errno or 0),
            fix="choose a writable directory on a local ext4 or XFS file system",
        ) from error
    return warnings


def check_is_folder(folder: str) -> os.stat_result:
    """What `lstat` says of a folder. Raises StoreUnsupported for a link and for all else."""
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        raise StoreUnsupported(
            f"{folder} is a symbolic link",
            why="what it leads to could be exchanged while the store is open",
            fix=f"name the folder that it leads to, {os.path.realpath(folder)}, or mount that here",
        )
    if not stat.S_ISDIR(found.st_mode):
        raise StoreUnsupported(
            f"{folder} is not a directory",
            why="a store keeps its files in folders of its own",
            fix="move away what stands there, or choose another store directory",
        )
    return found


def check_directory(path: str, allow_any_fs: bool) -> list[str]:
    """What `Store.open` would say of a store directory, which may not exist yet: warnings. Changes
    nothing. Raises StoreUnsupported, OSError."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    found = _check_file_system(osio.file_system(nearest), path, allow_any_fs)
    if nearest != os.path.abspath(path):
        return found
    for name in ("", "ext", "arena"):
        with contextlib.suppress(FileNotFoundError):
            check_is_folder(os.path.join(nearest, name).rstrip("/"))
    owner, above = os.stat(path).st_uid, os.stat(os.path.dirname(nearest)).st_uid
    if os.geteuid() == 0 and owner == above:  # root looks at what a service of its own user has
        return found
    return found + _check_owner(path, owner)


def _check_owner(folder: str, owner: int) -> list[str]:
    """A folder of another user, who can read and replace what it holds, serves root only, with a
    warning: containers and operators have such folders."""
    if owner in (0, os.geteuid()):
        return []
    if os.geteuid() == 0:
        return [f"{folder} belongs to user {owner}, who can change what it holds"]
    raise StoreUnsupported(
        f"{folder} belongs to user {owner}",
        why="its owner can read prompts and replace what the store holds",
        fix="choose a folder of the daemon's own user, or change the owner of this one",
    )


def _check_file_system(fs: osio.FileSystem, path: str, allow_any_fs: bool) -> list[str]:
    if fs.support == "ok":
        return []
    if fs.support == "volatile":
        return [f"the store {path} is on {fs.name}: {fs.why}"]
    if allow_any_fs:
        return [f"the store {path} is on {fs.name}, which is not for production: {fs.why}"]
    raise StoreUnsupported(
        f"the store {path} is on {fs.name}",
        why=fs.why,
        fix="put the store on a local ext4 or XFS file system, or allow this one:"
        " store.allow_volatile = true (serve --allow-volatile-store)",
    )


def take_lock(path: str) -> int:
    name = os.path.join(path, "LOCK")
    try:
        fd = osio.open_plain(name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise StoreUnsupported(
            f"the store {path} cannot be locked",
            why=f"{name}: {error.strerror}",
            fix="LOCK must be a plain file of this user: move away what stands there (no data is in"
            " it), or fix its permissions",
        ) from error
    if osio.lock_exclusive(fd):
        return fd
    pid = _holder(fd)
    os.close(fd)
    raise StoreLocked(path, pid)


def check_lock(path: str) -> None:
    """Raises StoreLocked if another process holds the store, which may not exist yet; OSError.
    Changes nothing."""
    try:
        fd = osio.open_plain(os.path.join(path, "LOCK"), os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        if osio.is_locked(fd):
            raise StoreLocked(path, _holder(fd))
    finally:
        os.close(fd)


def _holder(fd: int) -> int:
    """The process that the LOCK file names; 0 = unreadable."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return int(json.loads(os.pread(fd, 4096, 0))["pid"])
    return 0


def _open_ledger(
    path: str, found: continuity.Traces, start: Callable[[], tuple[Ledger, int]]
) -> tuple[Ledger, int, str, list[str]]:
    """Open the ledger by `start`; a damaged file is set aside and a new one started.

    Returns the ledger, the new epoch, why the ledger is not the newest one written ("" = it is),
    and sentences about what was lost.
    """
    try:
        ledger, epoch = start()
    except StoreCorrupt as error:
        aside = set_aside(os.path.join(path, "meta.db"))
        ledger, epoch = start()
        return ledger, epoch, "", [f"{error}; it was kept as {aside} and the store starts empty"]
    before = ledger.replay
    if not before.epoch and (found.epoch or os.listdir(os.path.join(path, "ext"))):
        gone = (
            f"{path} was in use, but its ledger is gone or empty: the store starts empty, and"
            " no earlier session is known. Restore meta.db and meta.db-wal together, if you can"
        )
        return ledger, epoch, "", [gone]
    lost = found.lost(before.epoch, before.clean) if before.epoch else ""
    return ledger, epoch, lost, [continuity.describe(lost)] if lost else []


def _start_epoch(
    path: str,
    descriptor: Descriptor,
    boot: str,
    known: int,
    *,
    on_full: Callable[[], bool],
    connect: Opener,
) -> tuple[Ledger, int]:
    """Open the ledger and commit a new epoch, which makes work of earlier processes void.

    The epoch is above `known`, too: open rows of an opening that the ledger lost must not match.
    """
    ledger = Ledger(
        os.path.join(path, "meta.db"),
        descriptor.repr_id,
        store_uuid=secrets.token_bytes(16),
        on_full=on_full,
        connect=connect,
    )
    epoch = max(ledger.replay.epoch, known) + 1
    layout = descriptor.layout
    try:
        ledger.append(
            writes.StartEpoch(epoch, boot),
            writes.AddRepr(descriptor.repr_id, descriptor.to_json(), layout.page_bytes),
        )
        ledger.commit().result()
    except BaseException as error:
        ledger.close()
        if is_damage(error.__cause__):
            raise StoreCorrupt("the ledger is damaged", why=str(error.__cause__)) from error
        raise
    return ledger, epoch


def name_aside(name: str) -> str:
    """The first free name for a damaged ledger."""
    number = 1
    while any(os.path.lexists(f"{name}.damaged-{number}{suffix}") for suffix in (*LOGS, "")):
        number += 1
    return f"{name}.damaged-{number}"


def set_aside(name: str) -> str:
    """Rename a ledger to the first free name and return that. Its log is renamed first: SQLite
    would replay the old log into a new file."""
    aside = name_aside(name)
    for suffix in LOGS:
        with contextlib.suppress(FileNotFoundError):
            os.rename(name + suffix, aside + suffix)
    os.rename(name, aside)
    return os.path.basename(aside)
