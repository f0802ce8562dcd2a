"""Row imports: only proven rows are copied, and a wrong source yields fewer rows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.step_input import BadStep, StepLimits, unpack
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from bench.models import hashlm
from kv_store import keys
from kv_store.arenas.arena import FILE_HEADER, Arena, ArenaMapping, SlotOwner
from kv_store.layout import PAGE_TOKENS, PageLayout
from kv_store.osio import Files
from tests.lanes.test_lane import frame_of, load_message, slot
from tests.support.arena_rows import row_digests, valid_rows
from tests.support.engines import Reference, words

LAYOUT = PageLayout.uniform(2, 2, 64)
SLOTS = 4
FILES = Files()
IDS = np.arange(1000, 1000 + PAGE_TOKENS, dtype=np.int32)
OLD = SlotOwner(b"s", epoch=3, gen=0, page_index=2)
SOURCE = wire.FromArena("cpu.1", 1, 0, 3)  # the slot of `OLD`
TO = wire.ReserveSlot(0, 5, b"s", 9, 2)  # another generation, another epoch
REPR = bytes(range(32))


class Bank:
    """An arena that a dead worker left, extents, and the memory of the worker that imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ext").mkdir()
        (folder / "arena").mkdir()
        self.old = Arena.create(str(folder / "arena/cpu.1"), LAYOUT, SLOTS, 1, repr_id=REPR)
        self.new = Arena.create(str(folder / "arena/cpu.2"), LAYOUT, SLOTS, 2, repr_id=REPR)
        self.mapping = ArenaMapping(self.old.path, LAYOUT)
        self.memory = HostMemory(
            wire.Attach(
                self.new.path, SLOTS, LAYOUT.page_bytes, f"{folder}/ext", f"{folder}/arena"
            ),
            LAYOUT,
        )
        self.rows = np.random.default_rng(1).integers(0, 256, LAYOUT.payload_bytes, np.uint8)

    def leave(self, rows: int, at: int = 1, owner: SlotOwner = OLD) -> None:
        """Write what the dead worker left: `rows` rows with records, and bytes of later rows."""
        self.mapping.reserve(at, owner)
        page = self.mapping.page(at)
        page[: LAYOUT.payload_bytes] = self.rows.data
        seeds = owner.seeds(self.mapping.arena_id, at, 0, rows)
        digests = row_digests(LAYOUT, page, seeds)
        self.mapping.write_records(at, 0, IDS[:rows].astype(np.uint32), digests)

    def import_rows(
        self,
        rows: int = PAGE_TOKENS,
        source: wire.FromArena | wire.FromPage = SOURCE,
        to: wire.ReserveSlot = TO,
        ids: np.ndarray = IDS,
    ) -> int:
        import_rows = wire.ImportRows(to, rows, source)
        self.memory.check(wire.Step((), import_rows=(import_rows,)))
        (count,) = self.memory.import_rows((import_rows,), (ids[:rows],))
        return count

    def page(self, at: int = TO.slot) -> bytes:
        return bytes(self.memory._arena.page(at))

    def expect(self, count: int, to: wire.ReserveSlot = TO) -> None:
        """Exactly `count` rows are in `to`, recorded for its new owner; all else is zero."""
        page = self.page(to.slot)
        mine = LAYOUT.gather_rows(page, 0, PAGE_TOKENS)
        assert np.array_equal(mine[:count], LAYOUT.gather_rows(self.rows.data, 0, count))
        assert not mine[count:].any()
        assert not any(page[LAYOUT.payload_bytes :])
        owner = SlotOwner(to.session, to.epoch, to.gen, to.page)
        shape, ident = self.new.shape, self.new.arena_id
        proven = valid_rows(FILES, self.new.fd, shape, ident, to.slot, owner, IDS.tolist())
        assert proven == count
        assert int(self.memory._valid[to.slot].sum()) == count

    def seal(self, extent: int = 0, at: int = 1) -> wire.FromPage:
        """The page of rows as a sealed one, in slot `at` of an extent of three."""
        page = bytearray(LAYOUT.page_bytes)
        page[: LAYOUT.payload_bytes] = self.rows.data
        path = self.folder / f"ext/{extent:06}.kv"
        path.write_bytes(bytes(at * LAYOUT.page_bytes) + bytes(page) + bytes(LAYOUT.page_bytes))
        return wire.FromPage(extent << 32 | at, 77, keys.sealed_checksum(bytes(page), 77))

    def close(self) -> None:
        self.mapping.close()
        self.memory._arena.close()
        self.old.close(delete=False)
        self.new.close(delete=False)


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    made = Bank(tmp_path)
    yield made
    made.close()


# --------------------------------------------------------------------------- from an arena


@pytest.mark.parametrize("rows", [0, 1, 3, 128, 255, 256])
def test_rows_of_a_dead_worker_are_imported(bank: Bank, rows: int) -> None:
    bank.leave(rows)
    before = bytes(bank.mapping.page(1))
    assert bank.import_rows() == rows
    bank.expect(rows)
    assert bytes(bank.mapping.page(1)) == before


@pytest.mark.parametrize("wanted", [0, 1, 17, 100])
def test_no_more_rows_are_imported_than_requested(bank: Bank, wanted: int) -> None:
    bank.leave(100)
    assert bank.import_rows(wanted) == wanted
    bank.expect(wanted)


def test_an_import_clears_the_earlier_content_of_its_slot(bank: Bank) -> None:
    bank.leave(256)
    bank.memory.reserve(TO)
    np.frombuffer(bank.memory._arena.page(0), np.uint8)[:] = 0xAA
    bank.memory._valid[0] = 1
    bank.leave(9)
    assert bank.import_rows() == 9
    bank.expect(9)


def test_rows_whose_tokens_differ_from_the_ledger_are_not_imported(bank: Bank) -> None:
    bank.leave(100)
    for wrong in (0, 1, 63, 99):
        ids = IDS.copy()
        ids[wrong] ^= 1
        assert bank.import_rows(ids=ids) == wrong
        bank.expect(wrong)


def byte_of(row: int, layer: int, head: int, part: str) -> int:
    """Where a page has the first byte of one part of one row."""
    heads = LAYOUT.layers[layer]
    base = layer * heads.layer_bytes + head * heads.head_bytes
    d = heads.head_dim
    k_scale = heads.k_bytes
    v = k_scale + heads.k_scale_bytes
    return (
        base
        + {
            "k": row // 16 * 16 * d + row % 16 * 4,
            "k scale": k_scale + (row // 16 * 16 * (d // 32) + row % 16) * 2,
            "v": v + row // 4 * 4 * d + row % 4,
            "v scale": v + heads.v_bytes + row * 2,
        }[part]
    )


@pytest.mark.parametrize("part", ["k", "k scale", "v", "v scale"])
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (0, 1), (1, 1)])
def test_a_changed_byte_ends_the_import_at_its_row(
    bank: Bank, part: str, layer: int, head: int
) -> None:
    bank.leave(200)
    page = bank.mapping.page(1)
    for row in (0, 5, 129, 199):
        at = byte_of(row, layer, head, part)
        page[at] ^= 4
        assert bank.import_rows() == row
        bank.expect(row)
        page[at] ^= 4
    page[byte_of(200, layer, head, part)] ^= 4  # of a row that was never recorded
    assert bank.import_rows() == 200
    bank.expect(200)


@pytest.mark.parametrize("field", ["digest", "token", "valid"])
def test_a_changed_record_ends_the_import_at_its_row(bank: Bank, field: str) -> None:
    bank.leave(50)
    records = bank.mapping._records(1)
    for value in (0, 2):  # 2: "valid" is 1 or nothing
        bank.leave(50)
        records[field][31] = value
        assert bank.import_rows() == 31
        bank.expect(31)


def test_a_torn_slot_header_hides_the_slot(bank: Bank) -> None:
    bank.leave(50)
    flip(bank.old.path, bank.old.shape.slot_header_offset(1) + 40)
    assert bank.import_rows() == 0
    bank.expect(0)


STRANGERS: list[tuple[str, wire.FromArena, wire.ReserveSlot]] = [
    ("epoch", wire.FromArena("cpu.1", 1, 0, 4), TO),
    ("generation", wire.FromArena("cpu.1", 1, 1, 3), TO),
    ("slot", wire.FromArena("cpu.1", 2, 0, 3), TO),
    ("no such slot", wire.FromArena("cpu.1", SLOTS, 0, 3), TO),
    ("session", SOURCE, wire.ReserveSlot(0, 5, b"t", 9, 2)),
    ("page", SOURCE, wire.ReserveSlot(0, 5, b"s", 9, 3)),
    ("arena", wire.FromArena("cpu.9", 1, 0, 3), TO),
]


@pytest.mark.parametrize(("what", "source", "to"), STRANGERS, ids=[s[0] for s in STRANGERS])
def test_rows_of_another_owner_are_not_imported(
    bank: Bank, what: str, source: wire.FromArena, to: wire.ReserveSlot
) -> None:
    bank.leave(100)
    assert bank.import_rows(source=source, to=to) == 0
    bank.expect(0, to)
    assert bank.import_rows() == 100  # the worker still imports


def header(path: str, **changes: Any) -> None:
    """Write a complete, wrong header."""
    names = ("magic", "version", "slots", "page_bytes", "arena_id", "layout_id", "repr_id",
             "boot", "incarnation")  # fmt: skip
    with open(path, "r+b") as file:
        fields = dict(zip(names, FILE_HEADER.unpack(file.read(FILE_HEADER.size)), strict=False))
        values = (fields | changes).values()
        check = xxhash.xxh3_64_intdigest(FILE_HEADER.pack(*values, 0)[:-8])
        file.seek(0)
        file.write(FILE_HEADER.pack(*values, check))


def become_link(path: str) -> None:
    os.rename(path, path + "0")
    os.symlink(path + "0", path)


def become(make: Callable[[str], None]) -> Callable[[str], None]:
    def change(path: str) -> None:
        os.rename(path, path + "0")
        make(path)

    return change


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


DAMAGE: list[tuple[str, Callable[[str], None]]] = [
    ("magic", lambda path: header(path, magic=b"BEKVARE0")),
    ("version", lambda path: header(path, version=1)),
    ("layout", lambda path: header(path, layout_id=bytes(32))),
    ("page size", lambda path: header(path, page_bytes=LAYOUT.page_bytes * 2)),
    ("model", lambda path: header(path, repr_id=bytes(32))),
    ("boot", lambda path: header(path, boot=b"b" * 36)),
    ("no boot", lambda path: header(path, boot=b"")),
    ("arena id", lambda path: header(path, arena_id=bytes(16))),
    ("slots", lambda path: header(path, slots=SLOTS + 1)),
    ("no places", lambda path: header(path, slots=0)),
    ("a flipped header", lambda path: flip(path, 20)),
    ("truncated by a byte", lambda path: os.truncate(path, os.path.getsize(path) - 1)),
    ("truncated to a page", lambda path: os.truncate(path, 65536 + LAYOUT.page_bytes)),
    ("empty", lambda path: os.truncate(path, 0)),
    ("gone", os.unlink),
    ("a link", become_link),
    ("a folder", become(os.mkdir)),
    ("a pipe", become(os.mkfifo)),
]


@pytest.mark.parametrize(("what", "damage"), DAMAGE, ids=[d[0] for d in DAMAGE])
def test_a_damaged_arena_yields_no_row_and_no_error(
    bank: Bank, what: str, damage: Callable[[str], None]
) -> None:
    bank.leave(100)
    damage(bank.old.path)
    assert bank.import_rows() == 0
    bank.expect(0)


def test_a_file_that_shrinks_while_it_is_read_yields_no_row(bank: Bank) -> None:
    """Between the header and the page: read, never mapped, so there is no SIGBUS."""
    bank.leave(100)

    class Shrinking(Files):
        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            if len(into) >= LAYOUT.page_bytes:
                os.truncate(bank.old.path, 70_000)
            return super().pread(fd, into, offset)

    bank.memory._files = Shrinking()
    assert bank.import_rows() == 0
    bank.expect(0)


def test_a_poisoned_free_slot_is_cleared_for_imported_rows(bank: Bank) -> None:
    """A session that migrates here takes no page fault; no other memory is touched."""
    bank.memory.reserve(TO)
    bank.memory.poison(TO.slot)
    assert bank.memory._proof._own is None
    bank.memory.poison(TO.slot)
    assert bank.memory._proof._own is not None
    bank.leave(40)
    assert bank.import_rows(40) == 40
    bank.expect(40)


def test_several_pages_are_imported_in_one_step_without_a_descriptor_leak(bank: Bank) -> None:
    bank.leave(256, at=0, owner=SlotOwner(b"s", 3, 0, 0))
    bank.leave(40, at=1, owner=SlotOwner(b"s", 3, 2, 1))
    before = len(os.listdir("/proc/self/fd"))
    imports = (
        wire.ImportRows(wire.ReserveSlot(2, 0, b"s", 4, 0), 256, wire.FromArena("cpu.1", 0, 0, 3)),
        wire.ImportRows(wire.ReserveSlot(1, 7, b"s", 4, 7), 40, wire.FromArena("cpu.7", 0, 0, 3)),
        wire.ImportRows(wire.ReserveSlot(3, 0, b"s", 4, 1), 256, wire.FromArena("cpu.1", 1, 2, 3)),
    )
    assert bank.memory.import_rows(imports, (IDS, IDS[:40], IDS)) == (256, 0, 40)
    for import_rows, count in zip(imports, (256, 0, 40), strict=True):
        bank.expect(count, import_rows.to)
    assert len(os.listdir("/proc/self/fd")) == before


def test_rows_are_imported_from_the_arena_of_the_same_worker(bank: Bank) -> None:
    """A fork on one lane, or a slot that moves."""
    bank.leave(77)
    assert bank.import_rows() == 77
    to = wire.ReserveSlot(3, 0, b"s", 10, 2)
    assert bank.import_rows(source=wire.FromArena("cpu.2", 0, 5, 9), to=to) == 77
    bank.expect(77, to)
    bank.expect(77)


def test_without_a_folder_of_arenas_nothing_is_imported(bank: Bank) -> None:
    bank.leave(10)
    bank.memory._arenas_dir = ""
    assert bank.import_rows() == 0


# ------------------------------------------------------------------------- from a sealed page


@pytest.mark.parametrize("rows", [0, 1, 128, 255, 256])
def test_rows_of_a_sealed_page_are_imported(bank: Bank, rows: int) -> None:
    assert bank.import_rows(rows, bank.seal()) == rows
    bank.expect(rows)


def test_a_sealed_page_is_imported_completely_or_not_at_all(bank: Bank) -> None:
    source = bank.seal()
    for wrong in (
        msgspec.structs.replace(source, seed=78),
        msgspec.structs.replace(source, checksum=bytes(16)),
        msgspec.structs.replace(source, code=0),
        msgspec.structs.replace(source, code=3),
        msgspec.structs.replace(source, code=1 << 32 | 1),
        msgspec.structs.replace(source, code=1 << 62),
    ):
        assert bank.import_rows(128, wrong) == 0
        bank.expect(0)
    flip(str(bank.folder / "ext/000000.kv"), LAYOUT.page_bytes + byte_of(255, 1, 1, "v"))
    assert bank.import_rows(128, source) == 0  # even a byte of a row that is not wanted
    bank.expect(0)


def test_a_truncated_extent_does_not_end_the_worker(bank: Bank) -> None:
    """F18: mapped bytes past the end of the file; reading them through the mapping is a SIGBUS."""
    source = bank.seal()
    verify = wire.Verify(source.code, source.seed, source.checksum)
    assert bank.memory.is_sealed(verify)
    os.truncate(bank.folder / "ext/000000.kv", LAYOUT.page_bytes + 4096)
    assert not bank.memory.is_sealed(verify)
    assert bank.import_rows(128, source) == 0
    bank.expect(0)


# ----------------------------------------------------------------------------------- refusals

BEYOND, NEGATIVE = (wire.ReserveSlot(slot, 0, b"s", 1, 0) for slot in (SLOTS, -1))
MALFORMED: list[wire.Step] = [
    *(
        wire.Step((), import_rows=(wire.ImportRows(TO, 1, msgspec.structs.replace(SOURCE,
        arena=name)),))
        for name in ("", "cpu", "cpu.", ".1", "../cpu.1", "a/cpu.1", "cpu.1\n", "CPU.1", "cpu.1\0",
                     "cpu.12345678901", "/etc/passwd", "x" * 33 + ".1")
    ),
    wire.Step((), import_rows=(wire.ImportRows(TO, 1, wire.FromArena("cpu.1", -1, 0, 3)),)),
    wire.Step((), import_rows=(wire.ImportRows(TO, 1, wire.FromArena("cpu.1", 0, -1, 3)),)),
    wire.Step((), import_rows=(wire.ImportRows(TO, 1, wire.FromArena("cpu.1", 0, 0, -3)),)),
    wire.Step((), import_rows=(wire.ImportRows(TO, 1, wire.FromPage(ARENA_BIT, 1, b"")),)),
    wire.Step((), import_rows=(wire.ImportRows(TO, 1, wire.FromPage(-1, 1, b"")),)),
    wire.Step((), import_rows=(wire.ImportRows(TO, 1, wire.FromPage(1, -1, b"")),)),
    wire.Step((), import_rows=(wire.ImportRows(BEYOND, 1, SOURCE),)),
    wire.Step((), import_rows=(wire.ImportRows(NEGATIVE, 1, SOURCE),)),
    wire.Step((), reserve=(wire.ReserveSlot(0, 1 << 32, b"s", 1, 0),)),
    wire.Step((), reserve=(wire.ReserveSlot(0, 0, b"s", 1 << 64, 0),)),
    wire.Step((), reserve=(wire.ReserveSlot(0, 0, b"s", 1, -1),)),
    wire.Step((), relabel=(wire.Relabel(SLOTS, 0, b"s", 1, 0, 1),)),
    wire.Step((), relabel=(wire.Relabel(0, 0, b"s", 1, 0, 257),)),
    wire.Step((), relabel=(wire.Relabel(0, 0, b"s", 1, 0, -1),)),
    wire.Step((), digest=(wire.Digest(0, 257),)),
    wire.Step((), digest=(wire.Digest(SLOTS, 256),)),
    wire.Step((), poison=(SLOTS,)),
]  # fmt: skip


@pytest.mark.parametrize("step", MALFORMED)
def test_a_malformed_chore_is_refused_before_any_is_done(bank: Bank, step: wire.Step) -> None:
    with pytest.raises(BadStep):
        bank.memory.check(step)


def test_imported_rows_and_their_tokens_are_counted() -> None:
    limits = StepLimits(64, 4, 2048, 2048)
    imports = (
        wire.ImportRows(TO, 2, SOURCE),
        wire.ImportRows(TO, 0, SOURCE),
        wire.ImportRows(TO, 3, SOURCE),
    )
    tokens = array("i", [7, 8, 9, 10, 11]).tobytes()
    batch = unpack(wire.Step((), import_rows=imports), tokens, limits)
    assert [ids.tolist() for ids in batch.imported] == [[7, 8], [], [9, 10, 11]]
    for wrong in (tokens[:-4], tokens + bytes(4), b""):
        with pytest.raises(BadStep):
            unpack(wire.Step((), import_rows=imports), wrong, limits)
    for rows in (-1, 257):
        with pytest.raises(BadStep):
            unpack(
                wire.Step((), import_rows=(wire.ImportRows(TO, rows, SOURCE),)), bytes(1028), limits
            )


# ------------------------------------------------------------------------ the other chores


def test_relabelled_rows_are_proven_for_the_new_owner_only(bank: Bank) -> None:
    bank.leave(200)
    assert bank.import_rows() == 200
    before = bank.page()
    bank.memory.relabel(wire.Relabel(0, 6, b"fork", 1, 2, 150))
    assert bank.page() == before
    shape, ident, ids = bank.new.shape, bank.new.arena_id, IDS.tolist()
    new, old = SlotOwner(b"fork", 1, 6, 2), SlotOwner(b"s", 9, 5, 2)
    assert valid_rows(FILES, bank.new.fd, shape, ident, 0, new, ids) == 150
    assert valid_rows(FILES, bank.new.fd, shape, ident, 0, old, ids) == 0
    assert int(bank.memory._valid[0].sum()) == 150


def test_relabelling_records_only_proven_rows(bank: Bank) -> None:
    bank.leave(200)
    for prepare, count in (
        (lambda: bank.memory._valid[0].__setitem__(70, 0), 70),
        (lambda: bank.memory._arena.page(0).__setitem__(byte_of(60, 1, 0, "v"), 1), 60),
    ):
        assert bank.import_rows() == 200
        prepare()
        bank.memory.relabel(wire.Relabel(0, 6, b"s", 12, 2, 200))
        assert int(bank.memory._valid[0].sum()) == count
    with pytest.raises(BadStep, match="before it was reserved"):
        bank.memory.relabel(wire.Relabel(3, 6, b"s", 12, 2, 0))


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 130, 255, 256])
def test_the_digest_of_a_partial_page_ends_with_its_rows(bank: Bank, rows: int) -> None:
    bank.leave(256)
    assert bank.import_rows() == 256
    digest = bank.memory.digest_slot(wire.Digest(0, rows))
    bank.expect(rows)
    clean = memoryview(bytearray(LAYOUT.page_bytes))
    LAYOUT.copy_rows(bank.rows.data, clean, rows)
    assert digest == keys.payload_digest(clean)


def test_touching_missing_pages_does_not_fail_a_step(bank: Bank) -> None:
    bank.seal()
    bank.memory.touch((0, 1, 2))
    assert bank.memory.touch_failures == 0
    os.truncate(bank.folder / "ext/000000.kv", 1)  # a read through the mapping would be a SIGBUS
    bank.memory.touch((1, 3, 7 << 32, ARENA_BIT | 1, -1))  # an open page is there
    assert bank.memory.touch_failures == 4


def test_rows_of_a_poisoned_entry_get_no_record(bank: Bank) -> None:
    for index in (0, 1):
        bank.memory.reserve(wire.ReserveSlot(index, 0, b"s", 1, index))
    entries = tuple(wire.Entry(i + 1, 1, 0, n, 1, None) for i, n in ((0, 3), (1, 4)))
    payload = array("Q", [ARENA_BIT, ARENA_BIT | 1]).tobytes() + IDS[:7].tobytes()
    batch = unpack(wire.Step(entries), payload, StepLimits(64, 4, 2048, 2048))
    own = bank.memory.rows_of(batch)
    digests = np.arange(7, dtype=np.uint64)
    bank.memory.record_rows(batch, own, digests, ())
    assert bank.memory._valid[:2].sum(axis=1).tolist() == [3, 4]
    bank.memory.record_rows(batch, own, digests, (0,))
    assert bank.memory._valid[:2].sum(axis=1).tolist() == [0, 4]


# ------------------------------------------------------------------------- the real worker


async def attach(lane: Lane, load: wire.Load, layout: PageLayout, folder: Path) -> Arena:
    """Start a worker with an arena of its own among those in `folder`."""
    await lane.start(load)
    ext, arenas = folder / "ext", folder / "arena"
    ext.mkdir(exist_ok=True)
    arenas.mkdir(exist_ok=True)
    path = str(arenas / f"cpu.{lane.incarnation}")
    arena = Arena.create(path, layout, 8, lane.incarnation)
    await lane.attach(wire.Attach(path, 8, layout.page_bytes, str(ext), str(arenas)))
    return arena


async def decode(lane: Lane, tokens: list[int], codes: list[int], n: int) -> None:
    """Append `n` tokens, one step each."""
    for _ in range(n):
        start = len(tokens) - 1
        done = await lane.run(*frame_of([(start, tokens[-1:], codes)]), deadline_s=10)
        tokens.append(done.rows[0].token)


async def test_a_new_worker_continues_where_the_killed_one_stopped(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Same tokens as an undisturbed run, and the same bytes in the page."""
    layout, folder = PageLayout.uniform(4, 2, 64), tmp_path / "arena"
    prompt = words(3, 300)
    reference = Reference(pocket_path, cache_dir)
    expected = reference.tokens(prompt, 12)
    reference.close()

    lane = Lane("cpu")
    first = await attach(lane, load_message(pocket_path, cache_dir), layout, tmp_path)
    codes = [ARENA_BIT, ARENA_BIT | 1]
    step, payload = frame_of([(0, prompt, codes)], reserve=(slot(0, 0), slot(1, 1)))
    done = await lane.run(step, payload, deadline_s=10)
    tokens = [*prompt, done.rows[0].token]
    await decode(lane, tokens, codes, 5)
    lane.kill("test")
    await lane.died()
    second = await attach(lane, load_message(pocket_path, cache_dir), layout, tmp_path)
    assert lane.incarnation == 2
    imports = tuple(
        wire.ImportRows(
            wire.ReserveSlot(5 - page, 0, b"s", 2, page),
            rows,
            wire.FromArena("cpu.1", page, 0, 1),
        )
        for page, rows in ((0, 256), (1, len(tokens) - 256))
    )
    codes = [ARENA_BIT | 5, ARENA_BIT | 4]
    # The last token has no row yet: it is the one to compute.
    step, payload = frame_of([(len(tokens) - 1, tokens[-1:], codes)], import_rows=imports)
    done = await lane.run(step, payload + array("i", tokens).tobytes(), deadline_s=10)
    assert done.imported == (256, len(tokens) - 257)
    tokens.append(done.rows[0].token)
    await decode(lane, tokens, codes, 5)
    assert tokens[len(prompt) :] == expected
    # Imported and computed rows are proven again, for the new owner.
    ident = second.arena_id
    for page, at in ((0, 5), (1, 4)):
        part = tokens[:-1][page * 256 :][:256]
        owner = SlotOwner(b"s", 2, 0, page)
        assert valid_rows(FILES, second.fd, second.shape, ident, at, owner, part) == len(part)
    pages = [memoryview(bytearray(layout.page_bytes)) for _ in range(2)]
    os.preadv(first.fd, [pages[0]], first.shape.page_offset(0))
    os.preadv(second.fd, [pages[1]], second.shape.page_offset(5))
    assert pages[0] == pages[1]
    # The tail goes to a fork, is digested as a partial page, and missing pages
    # are touched: all in one frame of chores.
    rows = len(tokens) - 1 - 256
    step, payload = frame_of(
        [],
        relabel=(wire.Relabel(4, 1, b"fork", 1, 1, rows),),
        digest=(wire.Digest(4, rows - 2),),
        touch=(0, 99 << 32),
    )
    done = await lane.run(step, payload, deadline_s=10)
    owner, part = SlotOwner(b"fork", 1, 1, 1), tokens[256:-1]
    assert valid_rows(FILES, second.fd, second.shape, ident, 4, owner, part) == rows - 2
    os.preadv(second.fd, [pages[1]], second.shape.page_offset(4))
    assert done.digests == (keys.payload_digest(pages[1]),)
    # A bad source costs rows, a malformed one the step; neither the worker.
    shutil.copy(folder / "cpu.1", folder / "cpu.3")
    flip(str(folder / "cpu.3"), second.shape.page_offset(0) + 100)
    lost = wire.ImportRows(
        wire.ReserveSlot(6, 0, b"s", 3, 0), 256, wire.FromArena("cpu.3", 0, 0, 1)
    )
    step, payload = frame_of([], import_rows=(lost,))
    done = await lane.run(step, payload + array("i", tokens[:256]).tobytes(), deadline_s=10)
    assert done.imported[0] < 256
    assert lane.alive
    await lane.close()
    first.close(delete=True)
    second.close(delete=True)


@pytest.mark.parametrize("point", hashlm.POINTS)
async def test_a_worker_death_within_a_step_costs_at_most_that_step(
    point: str, pocket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F73, F77: rows are proven up to the last record, never beyond what was written."""
    monkeypatch.setenv(hashlm.FAULTS, json.dumps({"die": point, "at": 5, "life": 1}))
    prompt = words(4, 250)
    expected = hashlm.hashlm_tokens(prompt, 20)
    load = wire.Load(str(pocket_path), "", wire.CpuResources(1, (), 0), 600, 4, 2048)

    lane = Lane("cpu", command=hashlm.WORKER_COMMAND)
    await attach(lane, load, hashlm.LAYOUT, tmp_path)
    codes = [ARENA_BIT]
    step, payload = frame_of([(0, prompt, codes)], reserve=(slot(0, 0),))
    done = await lane.run(step, payload, deadline_s=10)
    tokens = [*prompt, done.rows[0].token]
    with contextlib.suppress(LaneDied):  # in the fifth step
        await decode(lane, tokens, codes, 4)
    await lane.died()
    heard = len(tokens) - 1 - len(prompt)
    assert heard == (4 if point == "after_answer" else 3)
    await attach(lane, load, hashlm.LAYOUT, tmp_path)
    # Wanted: a row for every token that is known, the one that was to be computed included.
    import_rows = wire.ImportRows(slot(0, 0), len(tokens), wire.FromArena("cpu.1", 0, 0, 1))
    step, payload = frame_of([], import_rows=(import_rows,))
    done = await lane.run(step, payload + array("i", tokens).tobytes(), deadline_s=10)
    (proven,) = done.imported
    recorded = point in ("before_answer", "inside_answer")
    assert proven == len(prompt) + heard + recorded
    tokens = tokens[: proven + 1]
    if recorded:  # its row exists, but its output is lost: computed again
        start = len(tokens) - 1
        done = await lane.run(*frame_of([(start, tokens[-1:], codes)]), deadline_s=10)
        tokens.append(done.rows[0].token)
    await decode(lane, tokens, codes, 255 - len(tokens))
    assert tokens[len(prompt) :] == expected[: len(tokens) - len(prompt)]
    await lane.close()


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("model", ["real", "hash"])
async def test_rows_behind_a_wrong_token_of_a_draft_are_not_proven(
    model: str, is_kept: bool, pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Not even where a later token of the timeline is the one that they were computed for: they
    depend on all tokens before it."""
    load = wire.Load(str(pocket_path), str(cache_dir), wire.CpuResources(1, (), 0), 600, 4, 2048)
    command = hashlm.WORKER_COMMAND if model == "hash" else None
    layout = hashlm.LAYOUT if model == "hash" else PageLayout.uniform(4, 2, 64)
    lane = Lane("cpu", command=command) if command else Lane("cpu")
    await attach(lane, load, layout, tmp_path)
    codes, tokens = [ARENA_BIT], words(5, 40)
    done = await lane.run(*frame_of([(0, tokens, codes)], reserve=(slot(0, 0),)), deadline_s=10)
    tokens.append(done.rows[0].token)
    await decode(lane, (known := [*tokens]), codes, 4)
    right, others = known[41:44], [known[44] ^ 1, 77, 78]
    draft = [*right[:2], *others]  # two are right, rows of these two have records
    step, payload = frame_of([(40, [*tokens[-1:], *draft], codes)])
    entry = msgspec.structs.replace(step.entries[0], drafts=len(draft))
    done = await lane.run(msgspec.structs.replace(step, entries=(entry,)), payload, deadline_s=10)
    assert [row.token for row in done.rows] == known[41:44]
    # The turn has ended with the first of these tokens; another one follows it.
    ended = [*tokens, known[41] ^ 1, known[42]]
    if is_kept:
        ended = [*tokens, *right[:2], *others]
    else:
        await lane.run(*frame_of([(41, ended[41:42], codes)]), deadline_s=10)
    lane.kill("test")
    await lane.died()
    await attach(lane, load, layout, tmp_path)
    proven = 43 if is_kept else 42
    for timeline in (ended, [*ended[:proven], known[proven], 77]):
        rows = wire.ImportRows(slot(0, 0), len(timeline), wire.FromArena("cpu.1", 0, 0, 1))
        step, payload = frame_of([], import_rows=(rows,))
        done = await lane.run(step, payload + array("i", timeline).tobytes(), deadline_s=10)
        assert done.imported == (proven,)
    await lane.close()
