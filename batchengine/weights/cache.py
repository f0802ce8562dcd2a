"""The packed-weights cache: one file per model, written once, mapped read-only by every lane.

Owns: the file format, the lock between starters, and the decision whether a file on disk may
be used. Promises: a process sees either a complete, verified file or none (unique temporary
file, fsync, rename); processes on one host share its memory. Refuses to use a file that was
written for other model bytes, another packing, by another user, or that does not verify; the
reason is returned so that it can be logged, and the caller packs again.

    [0, 64)               prologue: where the table is, and its checksum
    [64 * k, ...)         packed matrices and float32 vectors, each 64-byte aligned
    [table_offset, end)   table: msgpack of CacheTable

The table holds an XXH3-128 of every entry; opening reads the whole file once, which verifies it
and brings it into memory (9 GB/s and more from the page cache).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import logging
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from batchengine import errors
from kv_store import osio

logger = logging.getLogger(__name__)

MAGIC = b"BEWEIGHT"
FORMAT_VERSION = 1
ALIGNMENT = 64
LOCK_WAIT_S_MAX = 600.0  # longer than packing takes; then pack without waiting (rename is safe)
CHUNK_BYTES = 1 << 24
TABLE_BYTES_MAX = 64 << 20  # 100 bytes per tensor: far above any model
FLUSH_BYTES = 1 << 30  # written at most before the disk has it, so that no one wait is long
WAIT_REPORT_S = 0.5  # between two reports of a process that waits for the lock
FILES = osio.Files()

# magic, format version, reserved, table offset, table bytes, SHA-256 of the table
PROLOGUE = struct.Struct("<8sIIQQ32s")
if PROLOGUE.size != 64:
    raise AssertionError("the prologue of the weights cache is 64 bytes")

Progress = Callable[[float], None]
Read = Callable[[int, int], bytes | memoryview]  # bytes [start, stop); fewer past the file's end


class CacheEntry(msgspec.Struct, frozen=True, array_like=True):
    """One packed matrix (kind as kernels.Matrix) or vector (kind "vector", cols 1)."""

    name: str
    kind: str
    rows: int
    cols: int
    offset: int
    n_bytes: int
    digest: bytes  # XXH3-128 of the bytes


class CacheTable(msgspec.Struct, frozen=True):
    """The entries of a cache file, and the model file and packing for which it is valid."""

    pack_version: int
    identity: tuple[int, int, int, int, int]  # of the model file: dev, ino, size, mtime, ctime
    header_digest: bytes  # SHA-256 of the GGUF header
    fingerprint: bytes  # SHA-256 over header and tensor data
    entries: tuple[CacheEntry, ...]


class CacheMismatch(Exception):
    """Why a cache file cannot be used; its text goes to the log."""


class CacheAbsent(CacheMismatch):
    """The cache file does not exist yet."""


def cache_path(cache_dir: Path, model: Path) -> Path:
    """The path of the packed form of a model file: one file per model path."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(model))).hexdigest()[:16]
    return cache_dir / f"{model.stem[:64]}-{name}.weights"


class CacheFile:
    """A verified cache file, mapped read-only. `entry(name)` gives the bytes of one entry."""

    def __init__(self, path: Path, mapping: mmap.mmap, table: CacheTable) -> None:
        self.path = path
        self.table = table
        self._map = mapping
        self._view = memoryview(mapping)
        self._entries = {entry.name: entry for entry in table.entries}

    def __repr__(self) -> str:
        return f"<CacheFile {self.path.name} entries={len(self._entries)} bytes={len(self._view)}>"

    @property
    def size_bytes(self) -> int:
        return len(self._view)

    def entry(self, name: str) -> memoryview:
        """Bytes of a packed matrix or vector, read-only, 64-byte aligned."""
        entry = self._entries[name]
        return self._view[entry.offset : entry.offset + entry.n_bytes]


def open_cache(path: Path, check: Callable[[CacheTable], None], progress: Progress) -> CacheFile:
    """Maps and verifies a cache file; CacheMismatch with the reason if it cannot be used.

    `check` raises CacheMismatch when the table does not fit the model at hand. A file that is cut
    short meanwhile ends the process, which is why only lane workers call this.
    """
    with _opened(path) as (fd, size):
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_SH)  # kept by the mapping: `remove_unused` leaves the file
        if not os.fstat(fd).st_nlink:
            raise CacheAbsent("it has just been removed")
        _mark_used(path)
        try:
            mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CacheMismatch(f"it cannot be mapped: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages; before the first read
        mapping.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(mapping)
    table = _read_table(lambda start, stop: view[start:stop], size)
    check(table)
    _verify_entries(lambda start, stop: view[start:stop], table, progress)
    return CacheFile(path, mapping, table)


def verify_cache(path: Path) -> CacheTable:
    """Verifies a cache file by reading, without a mapping; CacheMismatch with the reason."""
    with _opened(path) as (fd, size):

        def read(start: int, stop: int) -> bytes:
            try:
                return os.pread(fd, stop - start, start)
            except OSError as error:
                raise CacheMismatch(f"it cannot be read: {error.strerror}") from error

        table = _read_table(read, size)
        _verify_entries(read, table, lambda _: None)
        return table


@contextlib.contextmanager
def _opened(path: Path) -> Generator[tuple[int, int]]:
    """A descriptor of a cache file that no other user can have written, and its size."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise CacheAbsent("there is none yet") from None
    except OSError as error:
        raise CacheMismatch(f"it cannot be opened: {error.strerror}") from error
    try:
        yield fd, _check_owner(os.fstat(fd))
    finally:
        os.close(fd)


def _check_owner(status: os.stat_result) -> int:
    """Size of the file, if no user but this one (or root) can have written it."""
    if not stat.S_ISREG(status.st_mode):
        raise CacheMismatch("it is not a regular file")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise CacheMismatch("others can write it")
    if status.st_size < PROLOGUE.size:
        raise CacheMismatch(f"it is cut short ({status.st_size} bytes)")
    return status.st_size


def _read_table(read: Read, size: int) -> CacheTable:
    head = read(0, PROLOGUE.size)
    if len(head) < PROLOGUE.size:
        raise CacheMismatch("it is cut short")
    magic, version, _, offset, n_bytes, digest = PROLOGUE.unpack(head)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise CacheMismatch("it has another format")
    if offset < PROLOGUE.size or offset + n_bytes != size:
        raise CacheMismatch("it is cut short")
    if n_bytes > TABLE_BYTES_MAX:
        raise CacheMismatch("its table is corrupt")
    packed = bytes(read(offset, size))
    if hashlib.sha256(packed).digest() != digest:
        raise CacheMismatch("its table is corrupt")
    try:
        table = msgspec.msgpack.decode(packed, type=CacheTable)
    except msgspec.MsgspecError as error:
        raise CacheMismatch(f"its table is corrupt: {error}") from error
    for entry in table.entries:
        if entry.offset % ALIGNMENT or not PROLOGUE.size <= entry.offset <= offset - entry.n_bytes:
            raise CacheMismatch(f"entry {entry.name} lies outside the file")
    return table


def _verify_entries(read: Read, table: CacheTable, progress: Progress) -> None:
    total = sum(entry.n_bytes for entry in table.entries) or 1
    done = 0
    for entry in table.entries:
        digest = xxhash.xxh3_128()
        end = entry.offset + entry.n_bytes
        for start in range(entry.offset, end, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, end)
            digest.update(read(start, stop))
            done += stop - start
            progress(done / total)
        if digest.digest() != entry.digest:
            raise CacheMismatch(f"entry {entry.name} is corrupt")


class CacheWriter:
    """Writes one cache file: add entries, then commit. Leaving without commit removes it."""

    def __init__(self, path: Path, data_bytes: int, waiting: Callable[[], None]) -> None:
        """`waiting` is called again and again while the file is made as large as it will be."""
        self.path = path
        self._entries: list[CacheEntry] = []
        self._offset = PROLOGUE.size
        self._flushed = 0
        self._committed = False
        with _disk_errors(path):
            self._fd, name = tempfile.mkstemp(
                prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
            )
        self._temporary = Path(name)
        try:
            # A full disk fails here rather than after minutes of packing.
            with _disk_errors(path):
                size = max(data_bytes, PROLOGUE.size)
                for start in range(0, size, FLUSH_BYTES):  # some file systems write every block
                    os.posix_fallocate(self._fd, start, min(FLUSH_BYTES, size - start))
                    waiting()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, kind: str, rows: int, cols: int, data: memoryview) -> None:
        """Appends one entry at the next aligned offset."""
        with _disk_errors(self.path):
            FILES.write_all(self._fd, data, self._offset)
            if self._offset + len(data) - self._flushed >= FLUSH_BYTES:
                os.fdatasync(self._fd)
                self._flushed = self._offset + len(data)
        digest = xxhash.xxh3_128_digest(data)
        self._entries.append(CacheEntry(name, kind, rows, cols, self._offset, len(data), digest))
        self._offset = align(self._offset + len(data))

    def commit(
        self,
        *,
        pack_version: int,
        identity: tuple[int, int, int, int, int],
        header_digest: bytes,
        fingerprint: bytes,
    ) -> None:
        """Writes table and prologue, makes the file durable, and gives it its name."""
        table = CacheTable(pack_version, identity, header_digest, fingerprint, tuple(self._entries))
        packed = msgspec.msgpack.encode(table)
        prologue = PROLOGUE.pack(
            MAGIC, FORMAT_VERSION, 0, self._offset, len(packed), hashlib.sha256(packed).digest()
        )
        with _disk_errors(self.path):
            FILES.write_all(self._fd, memoryview(packed), self._offset)
            os.ftruncate(self._fd, self._offset + len(packed))
            os.fsync(self._fd)  # the data first: no prologue without its data
            FILES.write_all(self._fd, memoryview(prologue), 0)
            os.fsync(self._fd)
            # Written pages stay in memory in small pieces; read again, they come in huge pages.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.rename(self._temporary, self.path)
            self._committed = True
            osio.fsync_directory(FILES, str(self.path.parent))

    def close(self) -> None:
        """Closes the file, and removes it unless it was committed."""
        os.close(self._fd)
        if not self._committed:
            self._temporary.unlink(missing_ok=True)


class CacheUse(NamedTuple):
    """A cache file on disk."""

    path: Path
    size_bytes: int
    used_s: float  # when it was last written or mapped, in seconds since the epoch
    is_mapped: bool  # by a running worker


def list_uses(cache_dir: Path) -> list[CacheUse]:
    """The cache files of a folder that this user can read, the one used last first."""
    found: list[CacheUse] = []
    for path in cache_dir.glob("*.weights"):
        with contextlib.suppress(OSError, CacheMismatch), _opened(path) as (fd, size):
            used_s = os.fstat(fd).st_mtime
            with contextlib.suppress(OSError):
                used_s = max(used_s, path.with_suffix(".lock").stat().st_mtime)
            found.append(CacheUse(path, size, used_s, not _is_free(fd)))
    return sorted(found, key=lambda use: -use.used_s)


def remove_unused(path: Path) -> bool:
    """Removes a cache file unless a worker has it mapped; False if it stays."""
    with contextlib.suppress(OSError, CacheMismatch), _opened(path) as (fd, _):
        if _is_free(fd):  # locked until it is closed: a starter waits, and finds it gone
            path.unlink()
            path.with_suffix(".lock").unlink(missing_ok=True)
            return True
    return False


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # mapped; or on a file system without locks
        return False
    return True


def _mark_used(path: Path) -> None:
    """Records the time in the lock file: lanes watch the times of the cache file itself."""
    with contextlib.suppress(OSError):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path.with_suffix(".lock"), flags, 0o600)
        try:
            os.utime(fd)
        finally:
            os.close(fd)


def align(offset: int) -> int:
    """The next multiple of the entry alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@contextlib.contextmanager
def _disk_errors(path: Path) -> Generator[None]:
    """Turns errors of the file system into BatchEngineErrors with a fix."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        row = errors.CACHE_FULL if full else errors.CACHE_UNWRITABLE
        raise row(folder=path.parent, why=error.strerror or str(error)) from error


def make_cache_dir(cache_dir: Path) -> None:
    """Creates the cache folder, private to this user."""
    with _disk_errors(cache_dir / "x"):
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def starter_lock(path: Path, waiting: Callable[[], None]) -> Generator[None]:
    """Lets one process at a time pack `path`; the others wait and then find it packed.

    `waiting` is called again and again meanwhile.

    The lock only saves time. Where the file system has none, or its holder hangs, packing goes
    on without it: each writer has its own temporary file and the last rename wins.
    """
    fd = -1
    try:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path.with_suffix(".lock"), flags, 0o600)
        if fd >= 0 and _acquire(fd, path, waiting):
            _remove_leftovers(path)
        yield
    finally:
        if fd >= 0:
            os.close(fd)  # which also releases the lock


def _acquire(fd: int, path: Path, waiting: Callable[[], None]) -> bool:
    deadline = time.monotonic() + LOCK_WAIT_S_MAX
    report_s = 0.0
    is_logged = False
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not is_logged:
                logger.info("another process is packing %s: waiting for it", path.name)
                is_logged = True
            if time.monotonic() >= report_s:
                waiting()
                report_s = time.monotonic() + WAIT_REPORT_S
            time.sleep(0.05)
        except OSError:
            return False
    logger.warning("the process that packs %s does not end: packing beside it", path.name)
    return False


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed starters; with the lock held they have no writer."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()
            logger.info("removed %s, left by a process that was killed", leftover.name)
