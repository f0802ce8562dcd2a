"""Detects a ledger older than the last one written, from what the store's other files record.

Owns the text in LOCK (which process opened the store, at which epoch, whether it was closed) and a
check of the ledger's log before SQLite reads it, as SQLite silently ignores what does not verify.
One torn commit at the log's end is no loss: it was never acknowledged. Writes nothing but LOCK.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kv_store import osio
from kv_store.arenas.arena import ARENA_NAME

INCARNATIONS = 10_000  # numbers of arenas per opening of the store
EPOCH_PLAUSIBLE_MAX = 200_000  # uses half of an arena's u32 numbers; an arena or LOCK that names a
# later opening is ignored
LOST_MAX_CHARS = 1000
_LOCK_BYTES_MAX = 8192
_LOG_HEADER = struct.Struct(">8I")  # magic, format, page bytes, checkpoints, 2 salts, 2 checksums
_FRAME_HEADER = 24  # page, pages after a commit or 0, 2 salts, 2 checksums; big-endian
_PAGE_MIN = 512
_MAGIC = 0x377F0682  # its lowest bit: checksums are of big-endian words
_BATCH_FRAMES = 1024


@dataclass(frozen=True, slots=True)
class Opening:
    """The last opening as LOCK records it. `closed` None: an older program wrote LOCK."""

    epoch: int = 0
    closed: bool | None = False
    lost: str = ""


def read_opening(fd: int) -> Opening:
    """Read LOCK's text; one that is unreadable or implausible counts as absent."""
    info = _read(fd)
    epoch, closed, lost = info.get("epoch"), info.get("closed"), info.get("lost")
    if type(epoch) is not int or not 0 <= epoch <= EPOCH_PLAUSIBLE_MAX:
        return Opening()
    return Opening(
        epoch,
        closed if isinstance(closed, bool) else None,
        lost[:LOST_MAX_CHARS] if isinstance(lost, str) else "",
    )


def write_opening(files: osio.Files, fd: int, uuid: str, boot: str, opening: Opening) -> None:
    """Write LOCK's text, for operators, a second process and the next opening to read.

    Overwrites in place, so that a full disk does not matter. Raises OSError.
    """
    with open("/proc/self/stat") as f:
        start_ticks = int(f.read().rsplit(")", 1)[1].split()[19])
    info = {
        "pid": os.getpid(),
        "start_ticks": start_ticks,
        "store_uuid": uuid,
        "boot_id": boot,
        "epoch": opening.epoch,
        "closed": opening.closed,
        "lost": opening.lost[:LOST_MAX_CHARS],
    }
    _write(files, fd, info)


def mark_closed(files: osio.Files, fd: int, lost: str = "") -> None:
    """Record in LOCK that SQLite was closed and therefore left no log. Raises OSError."""
    opening = read_opening(fd)
    _write(files, fd, _read(fd) | {"epoch": opening.epoch, "closed": True, "lost": lost})


def _read(fd: int) -> dict[str, Any]:
    try:
        found: Any = json.loads(os.pread(fd, _LOCK_BYTES_MAX, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _write(files: osio.Files, fd: int, info: dict[str, Any]) -> None:
    text = json.dumps(info).encode()
    files.write_all(fd, memoryview(text), 0)
    os.ftruncate(fd, len(text))
    files.fsync(fd)


@dataclass(frozen=True, slots=True)
class Traces:
    """What LOCK, arenas and log showed before the ledger was opened."""

    opening: Opening
    arenas_epoch: int  # the highest plausible one that an arena's name holds; 0 = none
    implausible: list[str]  # a sentence per arena that names an implausible opening
    log: str  # as `check_log` returns it

    @property
    def epoch(self) -> int:
        """The highest epoch that LOCK or an arena names."""
        return max(self.opening.epoch, self.arenas_epoch)

    def lost(self, epoch: int, clean: bool) -> str:
        """Why a ledger of this epoch is not the newest one written; "" = no sign of that."""
        if self.opening.lost:
            return self.opening.lost  # found by an opening that was not closed since
        if self.opening.epoch > epoch:
            return f"LOCK names opening {self.opening.epoch}, the ledger knows {epoch}"
        if self.arenas_epoch > epoch:
            return f"an arena is of opening {self.arenas_epoch}, the ledger knows {epoch}"
        if self.log == "gone":
            # a failed opening leaves neither clean mark nor log, and records the closing in LOCK
            alarming = not clean and self.opening.closed is False
            return "it was not closed, and its log meta.db-wal is gone or empty" if alarming else ""
        if self.log == "void":
            return "" if clean else "the head of its log meta.db-wal is damaged"
        return self.log


def gather(path: str, lock_fd: int) -> Traces:
    """Read LOCK, arenas and log of the store at `path`, which this process has locked."""
    arenas = sorted(_arena_epochs(os.path.join(path, "arena")).items())
    return Traces(
        read_opening(lock_fd),
        max((epoch for _, epoch in arenas if epoch <= EPOCH_PLAUSIBLE_MAX), default=0),
        [
            f"arena/{name} names opening {epoch} of the store, more than there can be:"
            " it is ignored"
            for name, epoch in arenas
            if epoch > EPOCH_PLAUSIBLE_MAX
        ],
        check_log(os.path.join(path, "meta.db-wal")),
    )


def describe(why: str) -> str:
    """The sentence about a loss that log, health and fsck show."""
    return (
        f"the ledger lost what was written last ({why}): sessions may be older than clients"
        " remember, or unknown"
    )


def arena_number(epoch: int, incarnation: int) -> int:
    """The number of the arena of a worker's incarnation in opening `epoch`; incarnations wrap
    around, so that no number is of another opening."""
    return epoch * INCARNATIONS + incarnation % INCARNATIONS


def _arena_epochs(folder: str) -> dict[str, int]:
    """The epoch that each arena's name holds."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {
        name: int(name.rsplit(".", 1)[1]) // INCARNATIONS
        for name in names
        if ARENA_NAME.fullmatch(name)
    }


def log_bytes(frames: int, page_bytes: int) -> int:
    """The size of a log with so many frames."""
    return _LOG_HEADER.size + frames * (_FRAME_HEADER + page_bytes)


def check_log(name: str) -> str:
    """Check a log: "" = whole or torn in its last commit, "gone", "void" (bad head) or a reason."""
    try:
        fd = osio.open_private(name, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return "gone"
    with open(fd, "rb") as file:
        try:
            data = file.read()
        except OSError:
            return "void"
    if len(data) < _LOG_HEADER.size + _FRAME_HEADER + _PAGE_MIN:
        return "gone"
    head = _LOG_HEADER.unpack_from(data)
    page_bytes = head[2]
    words = ">u4" if head[0] & 1 else "<u4"
    checks = _checksums(
        np.frombuffer(data, words, 6)[None, :].astype(np.uint32), np.zeros((1, 2), np.uint32)
    )
    sane = head[0] & ~1 == _MAGIC and page_bytes in {1 << n for n in range(9, 17)}
    if not sane or tuple(checks[0]) != head[6:]:
        return "void"
    return _check_frames(data, head, words)


def _check_frames(data: bytes, head: tuple[int, ...], words: str) -> str:
    """Check the frames of a log: "" or how it is broken. A commit is acknowledged once its frames
    are synced, so one may be torn; two or more with this log's salts after a bad frame are lost."""
    size = _FRAME_HEADER + head[2]
    n = (len(data) - _LOG_HEADER.size) // size
    if not n:
        return ""
    frames = np.frombuffer(data, np.uint8, n * size, _LOG_HEADER.size).reshape(n, size)
    heads = np.ascontiguousarray(frames[:, :_FRAME_HEADER]).view(">u4").astype(np.uint32)
    ours = (heads[:, 2] == head[4]) & (heads[:, 3] == head[5])
    before = np.concatenate([np.array([head[6:]], np.uint32), heads[:-1, 4:]])
    follows = ours.copy()
    for start in range(0, n, _BATCH_FRAMES):
        part = slice(start, start + _BATCH_FRAMES)
        covered = np.concatenate([frames[part, :8], frames[part, _FRAME_HEADER:]], axis=1)
        checks = _checksums(covered.view(words).astype(np.uint32), before[part])
        follows[part] &= (checks == heads[part, 4:]).all(axis=1)
    if follows.all():
        return ""
    first = int(np.argmin(follows))
    commits = int(((heads[first:, 1] > 0) & ours[first:]).sum())
    if commits < 2:
        return ""
    return f"its log meta.db-wal is damaged: up to {commits} commits behind that are void"


def _checksums(words: np.ndarray, start: np.ndarray) -> np.ndarray:
    """SQLite's checksum of each row of u32 words[n, even], from start[n, 2]; gives u32[n, 2]."""
    a, b = start[:, 0].copy(), start[:, 1].copy()
    columns = np.ascontiguousarray(words.T)
    for index in range(0, len(columns), 2):
        a += columns[index] + b
        b += columns[index + 1] + a
    return np.stack([a, b], axis=1)
