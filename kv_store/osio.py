"""Every system call that touches a store file, behind one object that tests can replace.

Owns whole-buffer reads and writes (short transfers and EINTR), the OFD lock, and what kind of
file system a directory lies on. Independent of pages.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from typing import Literal

from kv_store.errors import StoreCorrupt

CHUNK_BYTES = 4 << 20  # bounds one transfer, so a page thread never blocks on a single huge call
TEST_BYTE = 0xA5  # neither zero nor poison, so that a self-test recognises its own bytes
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
assert _FLOCK.size == 32


class Files:
    """The system calls on store files. Test subclasses fail, shorten or record them."""

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def free_bytes(self, path: str) -> tuple[int, int]:
        """(free for this user, total) bytes of the file system."""
        s = os.statvfs(path)
        return s.f_bavail * s.f_frsize, s.f_blocks * s.f_frsize

    def read_all(self, fd: int, into: memoryview, offset: int) -> None:
        """Fill `into`. Raises StoreCorrupt at end of file, OSError as the system gives it."""
        done = 0
        while done < len(into):
            got = self.pread(fd, into[done : done + CHUNK_BYTES], offset + done)
            if got <= 0:
                raise StoreCorrupt(
                    f"a store file ends at {offset + done}, {len(into) - done} bytes too early",
                    why="it was truncated",
                )
            done += got

    def write_all(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data`. A write that makes no progress is an I/O error."""
        done = 0
        while done < len(data):
            put = self.pwrite(fd, data[done : done + CHUNK_BYTES], offset + done)
            if put <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            done += put


def open_private(path: str, flags: int) -> int:
    """Open a store file: never through a symbolic link, 0600 when created."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_plain(path: str, flags: int) -> int:
    """Open a store file that must be a regular one. Raises OSError, whose `strerror` says why."""
    fd = open_private(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return fd


def fsync_directory(files: Files, path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.fsync(fd)
    finally:
        os.close(fd)


def create_allocated(files: Files, path: str, size: int, head: bytes = b"") -> int:
    """Create a file with every byte allocated, `head` written and its name durable; nothing
    remains on failure. Returns the descriptor."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        files.fallocate(fd, 0, size)
        files.write_all(fd, memoryview(head), 0)
        files.fsync(fd)
        fsync_directory(files, os.path.dirname(path))
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def lock_exclusive(fd: int) -> bool:
    """Take the open-file-description write lock of a file; False if another holder has it.

    The lock ends when the last copy of this descriptor is closed, not when others are.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int) -> bool:
    """Whether another holder has the lock of `lock_exclusive`; takes none."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK


def boot_id() -> str:
    """Identity of this boot; empty where the kernel has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            return f.read().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class FileSystem:
    name: str
    support: Literal["ok", "volatile", "refuse"]
    why: str = ""


_SHARED = "locks and preallocation are not dependable over a network"
_FUSE = "a FUSE server may ignore locks, preallocation and fsync"
_COW = "copy-on-write voids preallocation: a mapped page can meet a full disk"
_KNOWN = {
    0xEF53: FileSystem("ext4", "ok"),
    0x58465342: FileSystem("xfs", "ok"),
    0x01021994: FileSystem("tmpfs", "volatile", "its contents do not survive a reboot"),
    0x858458F6: FileSystem("ramfs", "volatile", "its contents do not survive a reboot"),
    0x794C7630: FileSystem("overlayfs", "refuse", "a container layer vanishes with its container"),
    0x6969: FileSystem("nfs", "refuse", _SHARED),
    0xFF534D42: FileSystem("cifs", "refuse", _SHARED),
    0xFE534D42: FileSystem("smb2", "refuse", _SHARED),
    0x00C36400: FileSystem("ceph", "refuse", _SHARED),
    0x01021997: FileSystem("9p", "refuse", _SHARED),
    0x65735546: FileSystem("fuse", "refuse", _FUSE),
    0x9123683E: FileSystem("btrfs", "refuse", _COW),
    0x2FC12FC1: FileSystem("zfs", "refuse", _COW),
}


def file_system(path: str) -> FileSystem:
    """The file system that `path` lies on, and whether a store may be kept there."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; f_type comes first
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    kind = int.from_bytes(buffer.raw[:8], "little") & 0xFFFFFFFF
    return classify(kind)


def classify(kind: int) -> FileSystem:
    """Look a file system up by its magic number; an unknown one is refused."""
    unknown = FileSystem(f"0x{kind:x}", "refuse", "this file system was never tested")
    return _KNOWN.get(kind, unknown)
