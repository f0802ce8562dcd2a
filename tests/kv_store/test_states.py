"""Files of recurrent states: what is found, what is refused, what goes first."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from kv_store import keys, states
from kv_store.states import SavedStates

STATE = memoryview(bytes(range(256)) * 40)
HEAD = 32


def submit(work: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()
    done.set_result(work())
    return done


def key(n: int) -> bytes:
    return bytes([n]) * 32


def opened(folder: Path, budget: int = 1 << 20) -> SavedStates:
    return SavedStates(str(folder / "state"), budget, submit)


def add(found: SavedStates, name: bytes, parent: bytes = keys.ROOT_KEY) -> str:
    path = found.path(name, parent)
    states.save_state(path, STATE, states.state_seed(name))
    found.saved(name, parent, len(STATE))
    return path


def load(path: str, name: bytes, size: int = len(STATE)) -> bool:
    into = memoryview(bytearray(size))
    is_good = states.load_state(path, into, states.state_seed(name))
    assert not is_good or into == STATE
    return is_good


def test_a_state_is_read_as_it_was_written_by_the_next_opening(tmp_path: Path) -> None:
    first = opened(tmp_path)
    path = add(first, key(1))
    again = opened(tmp_path)
    assert key(1) in again
    assert key(2) not in again
    assert again.bytes == first.bytes == len(STATE) + HEAD
    assert load(path, key(1))
    assert states.is_intact(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(again.folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at", [0, 7, 8, 15, 16, 31, 32, 5000, len(STATE) + HEAD - 1])
def test_every_byte_counts(tmp_path: Path, at: int) -> None:
    path = add(opened(tmp_path), key(1))
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 0x10
    Path(path).write_bytes(data)
    assert not load(path, key(1))
    assert not states.is_intact(path)


@pytest.mark.parametrize("size", [0, 5, HEAD, len(STATE), len(STATE) + HEAD - 1])
def test_a_file_that_is_cut_short_or_too_long_is_refused(tmp_path: Path, size: int) -> None:
    path = add(opened(tmp_path), key(1))
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:size])
    assert not load(path, key(1))
    Path(path).write_bytes(whole + b"\0")
    assert not load(path, key(1))


def test_a_state_of_another_key_or_size_is_refused(tmp_path: Path) -> None:
    path = add(opened(tmp_path), key(1))
    assert not load(path, key(2))
    assert not load(path, key(1), len(STATE) - 64)
    os.rename(path, path.replace(key(1).hex(), key(3).hex()))
    assert not states.is_intact(path.replace(key(1).hex(), key(3).hex()))


def test_the_least_recently_used_ones_go(tmp_path: Path) -> None:
    found = opened(tmp_path, budget=3 * (len(STATE) + HEAD))
    for n in (1, 2, 3):
        add(found, key(n))
    found.used(key(1))
    found.used(key(3), is_last=True)
    add(found, key(4))
    assert [key(n) in found for n in (1, 2, 3, 4)] == [True, True, False, True]
    add(found, key(5))
    assert [key(n) in found for n in (1, 2, 4, 5)] == [True, False, True, True]
    assert len(os.listdir(found.folder)) == len(found) == 3
    smaller = opened(tmp_path, budget=len(STATE) + HEAD)
    assert len(smaller) == len(os.listdir(found.folder)) == 1


def test_a_state_that_is_saved_twice_counts_once(tmp_path: Path) -> None:
    found = opened(tmp_path)
    add(found, key(1))
    add(found, key(1))
    assert (len(found), found.bytes) == (1, len(STATE) + HEAD)
    found.drop(key(1))
    found.drop(key(1))
    assert (len(found), found.bytes, os.listdir(found.folder)) == (0, 0, [])


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    found = opened(tmp_path)
    path = add(found, key(1))
    Path(f"{path}.77.tmp").write_bytes(b"half")
    assert len(opened(tmp_path)) == 1
    assert len(os.listdir(found.folder)) == 1


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(tmp_path)
    path = found.path(key(1), keys.ROOT_KEY)
    written = list[int]()

    def write(fd: int, data: memoryview) -> int:
        if written:
            raise OSError(28, "No space left on device")
        written.append(fd)
        return os.pwrite(fd, data, 0)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        states.save_state(path, STATE, 0)
    assert os.listdir(found.folder) == []


def test_a_timeline_is_erased_behind_what_others_share(tmp_path: Path) -> None:
    tokens, repr_id, salt = list(range(1000)), b"r" * 32, b"tenant"
    chain = keys.chain_keys(tokens, repr_id, salt)
    tail = keys.content_key(chain[2], tokens[768:900], repr_id, salt)
    early = keys.content_key(keys.ROOT_KEY, tokens[:30], repr_id, salt)

    def filled() -> SavedStates:
        found = opened(tmp_path)
        for parent, name in zip([keys.ROOT_KEY, *chain], chain, strict=False):
            add(found, name, parent)
        add(found, tail, chain[2])
        add(found, early)
        add(found, key(9), key(8))  # another's
        return found

    found = filled()
    found.erase(tokens, repr_id, salt, 600).result()
    assert [name in found for name in chain] == [True, True, False]
    assert tail not in found
    assert key(9) in found
    found = filled()
    found.erase(tokens, repr_id, salt, 0).result()
    assert os.listdir(found.folder) == [states.state_name(key(9), key(8))]


def test_no_state_is_written_where_the_disk_or_the_budget_has_no_room(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    found = SavedStates(str(tmp_path / "state"), 1000, submit, free // 2)
    assert found.has_room(900)
    assert not found.has_room(1000)
    found.free_floor_bytes = 2 * free
    assert not found.has_room(900)
    os.rmdir(found.folder)
    assert not found.has_room(900)
