"""Arena files: slot ownership, and which rows of a dead writer are proven complete."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_store import keys, osio
from kv_store.arenas.arena import (
    SIDECAR_BYTES,
    Arena,
    ArenaMapping,
    ArenaSlot,
    SlotOwner,
    delete_arena,
)
from kv_store.errors import StaleRef, StoreCorrupt, StoreError, StoreFull
from kv_store.layout import PAGE_TOKENS, PageLayout
from tests.support.arena_rows import row_digests, rows_left
from tests.support.kv_workload import LAYOUT, failing_files, payload_of, tokens_of

FILES = osio.Files()
IDS = tokens_of(5, 1)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(str(tmp_path / "cpu.1"), LAYOUT, 3, incarnation=1)
    yield made
    made.check()
    made.close(delete=False)


@pytest.fixture
def mapping(arena: Arena) -> Iterator[ArenaMapping]:
    made = ArenaMapping(arena.path, LAYOUT)
    yield made
    made.close()


def write_rows(mapping: ArenaMapping, at: ArenaSlot, owner: SlotOwner, count: int) -> None:
    """Write and record the rows of `count` tokens, as a worker does."""
    mapping.reserve(at.slot, owner)
    page = np.frombuffer(mapping.page(at.slot), np.uint8)
    page[:] = payload_of(b"rows")
    seeds = owner.seeds(mapping.arena_id, at.slot, 0, count)
    digests = row_digests(LAYOUT, mapping.page(at.slot), seeds)
    mapping.write_records(at.slot, 0, IDS[:count], digests)


def test_slots_are_allocated_once_and_reused_with_a_new_generation(arena: Arena) -> None:
    slots = [arena.reserve() for _ in range(4)]
    assert [p and (p.slot, p.gen) for p in slots] == [(0, 0), (1, 0), (2, 0), None]
    one = slots[1]
    assert one is not None
    assert one.code == 1 << 63 | 1
    arena.release(one)
    assert (arena.n_free, arena.n_open) == (1, 2)
    assert arena.reserve() == ArenaSlot(1, 1)
    with pytest.raises(StaleRef, match=r"slot 1\.0"):
        arena.release(one)


def test_a_reserved_slot_is_zero_and_a_freed_one_is_nan(
    arena: Arena, mapping: ArenaMapping
) -> None:
    at = arena.reserve()
    assert at is not None
    mapping.poison(at.slot)
    page = np.frombuffer(mapping.page(at.slot), np.uint8)
    assert np.isnan(page.view(np.float16)).all()
    mapping.reserve(at.slot, SlotOwner(b"s", 1, at.gen, 0))
    assert not page.any()
    into = memoryview(bytearray(LAYOUT.page_bytes))
    page[3] = 9
    arena.read_page(FILES, at, into)
    assert into[3] == 9
    assert mapping.digest(at.slot) == keys.payload_digest(into)


def test_spans_are_disjoint_aligned_and_end_with_the_file(arena: Arena) -> None:
    shape = arena.shape
    spans = [(shape.page_offset(p), LAYOUT.page_bytes) for p in range(3)]
    spans += [(shape.rows_offset(p), SIDECAR_BYTES) for p in range(3)]
    ends = [start + size for start, size in spans]
    assert [start for start, _ in spans[1:]] == ends[:-1]
    assert ends[-1] == shape.file_bytes == os.stat(arena.path).st_size
    assert all(shape.page_offset(p) % 65536 == 0 for p in range(3))
    assert stat.S_IMODE(os.stat(arena.path).st_mode) == 0o600
    for outside in (-1, 3):
        with pytest.raises(StaleRef):
            shape.page_offset(outside)


@pytest.mark.parametrize("count", [0, 1, 37, 256])
def test_complete_rows_of_a_dead_writer_are_found(
    arena: Arena, mapping: ArenaMapping, count: int
) -> None:
    at, owner = arena.reserve(), SlotOwner(b"s", 4, 0, 2)
    assert at is not None
    write_rows(mapping, at, owner, count)
    assert rows_left(arena, at, owner, IDS.tolist()) == count
    assert rows_left(arena, at, owner, IDS.tolist()[:20]) == min(count, 20)


def test_rows_of_another_owner_epoch_or_slot_are_not_imported(
    arena: Arena, mapping: ArenaMapping
) -> None:
    at, other = arena.reserve(), arena.reserve()
    assert at is not None
    assert other is not None
    owner = SlotOwner(b"s", 4, 0, 2)
    write_rows(mapping, at, owner, 30)
    ids = IDS.tolist()
    assert rows_left(arena, at, owner, ids) == 30
    for other_owner in (
        SlotOwner(b"t", 4, 0, 2),
        SlotOwner(b"s", 5, 0, 2),
        SlotOwner(b"s", 4, 1, 2),
        SlotOwner(b"s", 4, 0, 3),
    ):
        assert rows_left(arena, at, other_owner, ids) == 0
    wrong = [*ids[:12], ids[12] ^ 1, *ids[13:]]
    assert rows_left(arena, at, owner, wrong) == 12
    # the very bytes and records, but in another slot
    mapping.page(other.slot)[:] = mapping.page(at.slot)
    size, shape = SIDECAR_BYTES, arena.shape
    copy = os.pread(arena.fd, size, shape.rows_offset(at.slot))
    os.pwrite(arena.fd, copy, shape.rows_offset(other.slot))
    assert rows_left(arena, other, owner, ids) == 0


@pytest.mark.parametrize("dropped", ["", "header", "seeds", "both"])
def test_the_generation_alone_separates_two_uses_of_a_slot(
    arena: Arena, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch, dropped: str
) -> None:
    """One session takes a slot twice for the same page of the same epoch: header and row digests
    name the use, each by itself, so that bytes of the first never count for the second."""
    if dropped in ("header", "both"):
        pack = SlotOwner.pack
        monkeypatch.setattr(SlotOwner, "pack", lambda self: pack(replace(self, gen=0)))
    if dropped in ("seeds", "both"):
        seeds = SlotOwner.seeds
        monkeypatch.setattr(
            SlotOwner, "seeds", lambda self, *given: seeds(replace(self, gen=0), *given)
        )
    at = arena.reserve()
    assert at is not None
    first, second = SlotOwner(b"s", 4, 0, 2), SlotOwner(b"s", 4, 1, 2)
    shape, ids = arena.shape, IDS.tolist()
    write_rows(mapping, at, first, 30)
    assert rows_left(arena, at, second, ids) == (30 if dropped == "both" else 0)
    # the worker died after it wrote the second header, before the records were cleared
    os.pwrite(arena.fd, second.pack(), shape.slot_header_offset(at.slot))
    assert rows_left(arena, at, second, ids) == (30 if dropped in ("seeds", "both") else 0)
    # a torn page write: the records of the second use under the first header
    write_rows(mapping, at, second, 30)
    os.pwrite(arena.fd, first.pack(), shape.slot_header_offset(at.slot))
    assert rows_left(arena, at, second, ids) == (30 if dropped in ("header", "both") else 0)


@pytest.mark.parametrize("layout", [PageLayout.uniform(1, 1, 32), PageLayout.uniform(2, 3, 96)])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 15, 16, 17, 128, 255, 256])
def test_leading_rows_are_copied_and_others_cleared(layout: PageLayout, count: int) -> None:
    """By the definition of a row, `gather_rows`; padding belongs to no row and stays."""
    rng = np.random.default_rng(count)
    source, target = (
        bytearray(rng.integers(1, 256, layout.page_bytes, np.uint8).tobytes()) for _ in range(2)
    )
    theirs, ours = (layout.gather_rows(bytes(page), 0, PAGE_TOKENS) for page in (source, target))
    padding = target[layout.payload_bytes :]
    layout.copy_rows(bytes(source), target, count)
    now = layout.gather_rows(target, 0, PAGE_TOKENS)
    assert np.array_equal(now[:count], theirs[:count])
    assert np.array_equal(now[count:], ours[count:])
    layout.clear_rows(target, count)
    now = layout.gather_rows(target, 0, PAGE_TOKENS)
    assert np.array_equal(now[:count], theirs[:count])
    assert not now[count:].any()
    assert target[layout.payload_bytes :] == padding


def test_a_flipped_bit_ends_the_proven_rows_at_its_row(arena: Arena, mapping: ArenaMapping) -> None:
    at, owner = arena.reserve(), SlotOwner(b"s", 1, 0, 0)
    assert at is not None
    write_rows(mapping, at, owner, 100)
    page, rng = mapping.page(at.slot), np.random.default_rng(1)
    row_of = np.zeros(LAYOUT.page_bytes, int)  # which token each byte belongs to
    marker = np.zeros(LAYOUT.page_bytes, np.uint8)
    for row in range(PAGE_TOKENS):
        marker[:] = 0
        index = np.arange(LAYOUT.page_bytes)
        low = LAYOUT.gather_rows((index & 0xFF).astype(np.uint8).tobytes(), row, 1).astype(int)
        high = LAYOUT.gather_rows((index >> 8).astype(np.uint8).tobytes(), row, 1).astype(int)
        row_of[(high << 8 | low).ravel()] = row
    for offset in rng.integers(0, LAYOUT.payload_bytes, 60).tolist():
        page[offset] ^= 1 << (offset % 8)
        expected = min(100, int(row_of[offset]))
        assert rows_left(arena, at, owner, IDS.tolist()) == expected, offset
        page[offset] ^= 1 << (offset % 8)
    start = arena.shape.rows_offset(at.slot)
    for bit in rng.integers(0, 100 * 16 * 8, 60).tolist():
        raw = os.pread(arena.fd, 1, start + bit // 8)
        os.pwrite(arena.fd, bytes([raw[0] ^ 1 << (bit % 8)]), start + bit // 8)
        assert rows_left(arena, at, owner, IDS.tolist()) == bit // 128
        os.pwrite(arena.fd, raw, start + bit // 8)
    assert rows_left(arena, at, owner, IDS.tolist()) == 100


def test_only_one_writer_maps_an_arena(arena: Arena, mapping: ArenaMapping) -> None:
    with pytest.raises(StoreError, match="live writer"):
        ArenaMapping(arena.path, LAYOUT)
    assert not delete_arena(arena.path)
    assert os.path.exists(arena.path)


def test_the_lock_of_a_killed_writer_is_free(tmp_path: Path) -> None:
    arena = Arena.create(str(tmp_path / "cpu.1"), LAYOUT, 1)
    code = (
        "from kv_store.arenas.arena import ArenaMapping\n"
        "from kv_store.layout import PageLayout\nimport os, signal\n"
        f"m = ArenaMapping({arena.path!r}, PageLayout.uniform(1, 1, 32))\n"
        "m.page(0)[:4] = b'abcd'\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == -9
    at = arena.reserve()
    assert at is not None
    into = memoryview(bytearray(LAYOUT.page_bytes))
    arena.read_page(FILES, at, into)
    assert bytes(into[:4]) == b"abcd", "a killed writer's bytes are still there"
    assert delete_arena(arena.path)
    arena.close(delete=False)


def test_a_file_that_is_not_this_arena_is_refused(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(StoreCorrupt, match="another page layout"):
        ArenaMapping(arena.path, PageLayout.uniform(1, 1, 64))
    data = Path(arena.path).read_bytes()
    lies = {
        "shorter": data[:50],
        "not an arena": bytes([data[0] ^ 1]) + data[1:],
        "version": data[:12] + b"\xff" + data[13:],
        "size": data[:-1],
    }
    for words, lie in lies.items():
        path = tmp_path / "lie"
        path.write_bytes(lie)
        with pytest.raises(StoreCorrupt, match=words):
            ArenaMapping(str(path), LAYOUT)
    link = tmp_path / "link"
    link.symlink_to(arena.path)
    with pytest.raises(OSError, match=r"[Ss]ymbolic"):
        ArenaMapping(str(link), LAYOUT)


def test_an_arena_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="2 open pages"):
        Arena.create(str(tmp_path / "a"), LAYOUT, 2, files=failing_files({"fallocate": 1}, 28))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="at least one"):
        Arena.create(str(tmp_path / "a"), LAYOUT, 0)
