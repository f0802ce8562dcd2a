"""Saved recurrent states: a file per state, named by the content key of the timeline behind it.

A state is only of use at one position of one timeline: it is found by the key of the page that ends
there, a full one or a tail. Files are never required: one that is missing, cut short or changed
costs a recompute, since its checksum is seeded with its key. The least recently used ones go when
the folder exceeds its budget. Owns the names and the index; the bytes are written and read by those
who compute (`save_state`, `load_state`).
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import Future

import xxhash

from kv_store import keys

STATES_DIR = "state"
_MAGIC = b"BESTATE1"
_HEAD = struct.Struct("<8sQ16s")  # magic, bytes of the state, checksum
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.state")
_WIPE_BYTES = 1 << 20

Submit = Callable[[Callable[[], None]], Future[None]]


STATE_HEAD_BYTES = _HEAD.size  # of a file, in front of the state


def checksum_of(head: bytes) -> bytes:
    """The checksum of a state, by the first STATE_HEAD_BYTES of its file. Raises OSError."""
    if len(head) != _HEAD.size:
        raise OSError("the file of a state was cut")
    return bytes(_HEAD.unpack(head)[2])


def state_name(key: bytes, parent: bytes) -> str:
    """File of the state behind the page `key`, which follows the page `parent`."""
    return f"{key.hex()}-{parent.hex()}.state"


def state_seed(key: bytes) -> int:
    """Seed of the checksum of a state's file: that of another state fails it."""
    return int.from_bytes(key[:8], "little")


def is_state_name(name: str) -> bool:
    """Whether `state_name` may have made this name."""
    return _NAME.fullmatch(name) is not None


def save_state(path: str, state: memoryview, seed: int) -> None:
    """Write a state to a new file, which takes the place of `path` at the end. Raises OSError."""
    head = _HEAD.pack(_MAGIC, len(state), xxhash.xxh3_128_digest(state, seed))
    made = f"{path}.{os.getpid()}.tmp"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        for part in (memoryview(head), state):
            while part:
                part = part[os.write(fd, part) :]
        os.rename(made, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
    finally:
        os.close(fd)


def load_state(path: str, state: memoryview, seed: int) -> bool:
    """Read a file that `save_state` wrote; False if it is not of this size and seed, or damaged.

    `state` may hold anything then. Raises OSError.
    """
    with open(path, "rb", buffering=0) as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return False
        magic, size, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or size != len(state):
            return False
        left = state
        while left:
            if not (got := file.readinto(left)):
                return False
            left = left[got:]
        if file.read(1):
            return False
    return xxhash.xxh3_128_digest(state, seed) == checksum


def is_intact(path: str) -> bool:
    """Whether a file has the state that its name says. Raises OSError."""
    name = _NAME.fullmatch(os.path.basename(path))
    size = os.stat(path).st_size - _HEAD.size
    if name is None or size < 0:
        return False
    return load_state(path, memoryview(bytearray(size)), state_seed(bytes.fromhex(name[1])))


class SavedStates:
    """The files of one folder, least recently used first. All methods in one thread; files are
    removed on another one, by `submit`."""

    def __init__(
        self, folder: str, budget_bytes: int, submit: Submit, free_floor_bytes: int = 0
    ) -> None:
        """Creates the folder, and reads what is in it. Raises OSError. free_floor_bytes: of the
        disk that stay free."""
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.free_floor_bytes = free_floor_bytes
        self.bytes = 0
        self._submit = submit
        self._sizes: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # key: parent, bytes
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._scan()
        self._evict()

    def __repr__(self) -> str:
        return f"<SavedStates {len(self)} of {self.bytes >> 20} MiB>"

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def _scan(self) -> None:
        found: list[tuple[float, bytes, bytes, int]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None:  # an unfinished one
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                    continue
                info = entry.stat(follow_symlinks=False)
                key, parent = (bytes.fromhex(part) for part in match.groups())
                found.append((info.st_mtime, key, parent, info.st_size))
        for _, key, parent, size in sorted(found):
            self._sizes[key] = parent, size
            self.bytes += size

    def path(self, key: bytes, parent: bytes) -> str:
        """The file of a state."""
        return os.path.join(self.folder, state_name(key, parent))

    def saved(self, key: bytes, parent: bytes, n_bytes: int) -> None:
        """Note that a state of `n_bytes` was written to its file; others may go for it."""
        self._forget(key)
        self._sizes[key] = parent, n_bytes + _HEAD.size
        self.bytes += n_bytes + _HEAD.size
        self._evict()

    def write(self, key: bytes, parent: bytes, digest: bytes, state: bytearray) -> Future[None]:
        """Write a state of this checksum to its file; `saved` is the caller's, once the future is
        done. ValueError in it: the state has another checksum; OSError."""

        def check_and_write() -> None:
            seed = state_seed(key)
            if xxhash.xxh3_128_digest(state, seed) != digest:
                raise ValueError("the state differs from its checksum")
            save_state(self.path(key, parent), memoryview(state), seed)

        return self._submit(check_and_write)

    def has_room(self, n_bytes: int) -> bool:
        """Whether a state of this size may be written: it fits the budget, and the disk keeps what
        is to stay free, before others go for it."""
        if n_bytes + _HEAD.size > self.budget_bytes:
            return False
        try:
            disk = os.statvfs(self.folder)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize - n_bytes >= self.free_floor_bytes

    def abandoned(self, key: bytes, parent: bytes) -> None:
        """Note that who was writing a state died: its file may be whole, unfinished or missing."""
        path = self.path(key, parent)
        with contextlib.suppress(OSError):
            self.saved(key, parent, os.stat(path).st_size - _HEAD.size)
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            name = os.path.basename(path)
            for entry in entries:
                if entry.name.startswith(f"{name}.") and _NAME.fullmatch(entry.name) is None:
                    self._remove(entry.path, wipes=True)

    def used(self, key: bytes, *, is_last: bool = False) -> None:
        """Note that a state was loaded; `is_last`: it is hardly of use again, and goes first."""
        if key in self._sizes:
            self._sizes.move_to_end(key, last=not is_last)

    def drop(self, key: bytes) -> None:
        """Remove a state, whose file is missing or damaged."""
        parent = self._forget(key)
        if parent is not None:
            self._remove(self.path(key, parent))

    def invalidate(self, wrong: Set[bytes]) -> None:
        """Remove the states behind pages of these keys, and behind tails that follow them."""
        for key, (parent, _) in list(self._sizes.items()):
            if key in wrong or parent in wrong:
                self.drop(key)

    def clear(self) -> None:
        """Remove all states."""
        for key in list(self._sizes):
            self.drop(key)

    def erase(self, tokens: keys.Tokens, repr_id: bytes, salt: bytes, kept: int) -> Future[None]:
        """Overwrite and remove the states of a timeline behind its first `kept` tokens; resolves
        once they are gone.

        Those of tails go with their page's parent, also where another timeline has the tail: what
        is dropped is computed again.
        """
        chain = keys.chain_keys(tokens, repr_id, salt)
        first = kept // keys.PAGE_TOKENS
        gone = set(chain[first:])
        parents = {*chain[first - 1 :]} if first else {keys.ROOT_KEY, *chain}
        for key, (parent, _) in list(self._sizes.items()):
            if key in gone or (parent in parents and key not in chain):
                self._forget(key)
                self._remove(self.path(key, parent), wipes=True)
        return self._submit(lambda: None)

    def _forget(self, key: bytes) -> bytes | None:
        parent, size = self._sizes.pop(key, (None, 0))
        self.bytes -= size
        return parent

    def _evict(self) -> None:
        while self.bytes > self.budget_bytes and self._sizes:
            key = next(iter(self._sizes))
            self.drop(key)

    def _remove(self, path: str, *, wipes: bool = False) -> None:
        def remove() -> None:
            with contextlib.suppress(OSError):
                if wipes:
                    _wipe(path)
                os.unlink(path)

        self._submit(remove)


def _wipe(path: str) -> None:
    """Overwrite a file with zeros, on the disk too."""
    with open(path, "r+b", buffering=0) as file:
        left, blank = os.fstat(file.fileno()).st_size, bytes(_WIPE_BYTES)
        while left > 0:
            left -= file.write(blank[: min(left, _WIPE_BYTES)]) or left
        os.fsync(file.fileno())
