"""The memory of a GPU lane in random steps: records and rows of the arena, and copies of pages.

The worker, its device, its link and the rule of steps ahead are the real ones. The GPU computes
hashes: a row is that of all rows before it and its token, so a page that lacks a row shows. Run as
a program it takes the first seed and the count of seeds.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import socket
import sys
import tempfile
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

import kernels
from batchengine.core import GREEDY, PAGE_TOKENS
from batchengine.engine.lane.inflight import (
    InFlightStep,
    StepEntry,
    check_answer,
    frame,
    prepare_ahead,
    reaches_of,
)
from batchengine.kv.lane_kv import Chores
from batchengine.kv.slots import Slots
from batchengine.lanes.cuda import NOTHING_TAKEN, CudaDevice, Launched, Taken
from batchengine.lanes.page_cache import PageCache
from batchengine.lanes.step_input import SLOT_MASK, StepInput
from batchengine.lanes.worker import IDLE_MS, Worker
from batchengine.policy.scheduler import StepPlan
from batchengine.session import Session
from batchengine.session_kv import page_start, pages_for
from batchengine.wire import lane as wire
from batchengine.wire.frames import BlockingLink
from batchengine.wire.lane import ARENA_BIT
from bench.models.tensors import aligned
from kernels.cuda.gpu import DeviceFacts, Gpu, Graph, KernelLaunch
from kernels.cuda.memory import BadRows, KvRows
from kernels.cuda.ops import BegunSample
from kv_store.arenas.arena import SIDECAR_BYTES, Arena, ArenaSlot, SlotOwner
from kv_store.keys import payload_digest
from kv_store.layout import ROW_RECORD_DTYPE, ROW_RECORDS_BYTES, PageLayout
from kv_store.pages.extents import extent_path
from tests.support.kv_workload import scratch

LAYOUT = PageLayout(1, 1, 32)
SHAPE, WIDTH = kernels.PageShape(1, 1, 32), LAYOUT.row_bytes
VOCAB, CONTEXT, SLOTS, ENTRIES, TOKENS, SEALED = 64, 3 * PAGE_TOKENS, 44, 20, 300, 40
BAD = bytes([255]) * WIDTH  # a row that is not finite
FACTS = wire.ModelFacts("", "", 1, 1, 1, 32, LAYOUT.payload_bytes, VOCAB, {})
LOAD = wire.Load("", "", wire.CudaResources(0, 1 << 30, 0, 1, (), 0), TOKENS, ENTRIES, CONTEXT)
# Pages that the cache may hold, those that fit, and how often the memory for samples is refused.
MEMORIES = [(3, 3, 0), (6, 9, 0), (16, 16, 1), (64, 8, 1), (64, 64, 0), (64, 64, 1)]
STEPS = 60
SEEDS = int(os.environ.get("GPU_MEMORY_SEEDS", "40"))


def row_of(before: bytes | bytearray, token: int) -> bytes:
    """The row of a token behind these rows."""
    state = xxhash.xxh3_64_digest(before, token & 0xFFFF)
    return hashlib.shake_128(state).digest(WIDTH)


def token_of(row: bytes, mask: bytes) -> int:
    """The sample of a row; -1 if it is not finite."""
    bits = int.from_bytes(mask, "little") if mask else (1 << VOCAB) - 1
    allowed = [token for token in range(VOCAB) if bits >> token & 1]
    return -1 if row == BAD else allowed[int.from_bytes(row[:4], "little") % len(allowed)]


def mask_of(session: int, position: int) -> bytes:
    """The mask of a session with masks."""
    return xxhash.xxh3_64_digest(b"%d %d" % (session, position))


class LazyGpu(Gpu):
    """Arrays by address. Work ends when it is waited for, with a look at a mark, or by chance at
    once; what is copied aside, by chance as early or as late as it may."""

    facts = DeviceFacts("", 0, 0, (0, 0))

    def __init__(self, rng: random.Random, pages: int) -> None:
        super().__init__()
        self._rng, self._pages = rng, pages
        self._haste = rng.choice([0.0, 0.05, 1.0])
        self.held: dict[int, np.ndarray[Any, Any]] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._aside: deque[tuple[int, Callable[[], None]]] = deque()  # what it comes after, copy
        self.ended = self._forked = self._aside_ended = 0

    @property
    def begun(self) -> int:
        return self.ended + len(self._queue)

    def begin(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if self._rng.random() < self._haste:
            self.run(self.begun)

    def run(self, end: int) -> None:
        """Do the first `end` pieces of work, but for those that have ended."""
        while self.ended < end:
            self.ended += 1
            self._queue.popleft()()

    def _run_aside(self, end: int) -> None:
        while self._aside_ended < end:
            after, copy = self._aside.popleft()
            self._aside_ended += 1
            self.run(after)
            copy()

    def _allocate(self, n_bytes: int) -> int:
        if sum(len(one) == LAYOUT.payload_bytes for one in self.held.values()) == self._pages:
            raise MemoryError
        memory = aligned(n_bytes)
        memory[:] = 255
        self.held[kernels.address_of(memory)] = memory
        return kernels.address_of(memory)

    def _free(self, address: int) -> None:
        self.run(self.begun)
        del self.held[address]

    def _copy(self, address: int, array: np.ndarray[Any, Any]) -> Callable[[], None]:
        target, given = self.held[address], array.tobytes()
        return lambda: target.__setitem__(slice(len(given)), np.frombuffer(given, np.uint8))

    def copy_in(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self.begin(self._copy(address, array))

    def copy_aside(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self._aside.append((self._forked, self._copy(address, array)))
        if self._rng.random() < 0.5:
            self._run_aside(self._aside_ended + len(self._aside))

    def fork(self) -> None:
        self._forked = self.begun

    def join(self) -> None:
        end = self._aside_ended + len(self._aside)
        self.begin(lambda: self._run_aside(end))

    def fetch(self, address: int, array: np.ndarray[Any, Any]) -> None:
        source, target = self.held[address], array.reshape(-1).view(np.uint8)
        self.begin(lambda: target.__setitem__(slice(None), source[: len(target)]))

    def pin(self, array: np.ndarray[Any, Any]) -> None: ...

    def synchronize(self) -> None:
        self.run(self.begun)

    def mark(self) -> LazyMark:
        return LazyMark(self, self.begun)

    def wait(self, end: int) -> None:
        self.run(end if self._rng.random() < 0.5 else self.begun)

    def _launch(self, launch: KernelLaunch) -> None:
        raise AssertionError

    def capture(self, run: Callable[[], None]) -> Graph:
        raise AssertionError


class LazyMark:
    def __init__(self, gpu: LazyGpu, end: int) -> None:
        self._gpu, self._end = gpu, end

    @property
    def is_passed(self) -> bool:
        self._gpu.run(min(self._end, self._gpu.ended + 1))
        return self._gpu.ended >= self._end

    def wait(self) -> None:
        self._gpu.wait(self._end)


class HashSteps:
    """`GpuSteps` that reads and writes rows of pages by address. computed: tokens and rows of each
    entry, by session and first position."""

    def __init__(self, gpu: LazyGpu, refusals: int) -> None:
        self.gpu, self.stepper = gpu, SimpleNamespace(logits_max=ENTRIES)
        self.pool, self.refusals = kernels.Pool(1), refusals
        self.fails = set[tuple[int, int]]()  # entries whose last row is not finite
        self.computed: dict[tuple[int, int], tuple[list[int], bytes]] = {}
        self.players: dict[int, Player] = {}
        self.batch: StepInput
        self._rows, self._flags = KvRows(gpu, TOKENS, SHAPE), gpu.allocate(TOKENS)
        self._made = kernels.KvRows(TOKENS, SHAPE)
        self._pages = kernels.Batch(TOKENS, ENTRIES, 3 * ENTRIES)
        self._wanted, self._sampled = list[bytes](), list[int]()

    def begin(
        self, tokens: Any, entries: Any, pages: Any, wanted: Any, taken: Taken = NOTHING_TAKEN
    ) -> tuple[list[Any], kernels.KvRows]:
        batch, ids = self.batch, tokens.tolist()
        self.gpu.begin(lambda: self._compute(batch, ids, entries, pages, wanted, taken))
        fetched = self._rows.fetch(len(tokens))
        return [BadRows(self.gpu, self._flags, len(tokens)).fetch(), []], fetched

    def _compute(
        self, batch: StepInput, ids: list[int], table: Any, pages: Any, wanted: Any, taken: Taken
    ) -> None:
        for at, row in taken.items():
            ids[at] = self._sampled[row]
        made, first, first_page = self._made.view(TOKENS), 0, 0
        for entry, (n, start, n_pages) in zip(batch.entries, table.tolist(), strict=True):
            on_gpu = [self.gpu.held[int(at)] for at in pages[first_page : first_page + n_pages]]
            held = [LAYOUT.gather_rows(page.data, 0, PAGE_TOKENS).tobytes() for page in on_gpu]
            rows = bytearray(b"".join(held)[: start * WIDTH])
            known = self.players[entry.session].rows[: start * WIDTH]
            assert rows[: len(known)] == known, f"pages on the GPU: {entry}"
            is_bad = bool((np.frombuffer(rows, np.uint8).reshape(-1, WIDTH) == 255).all(1).any())
            for i in range(first, first + n):
                fails = i == first + n - 1 and (entry.session, start) in self.fails
                is_bad = is_bad or fails
                rows += BAD if is_bad else row_of(rows, ids[i])
            self.computed[entry.session, start] = ids[first : first + n], bytes(rows)[-n * WIDTH :]
            made[first : first + n] = np.frombuffer(rows[-n * WIDTH :], np.uint8).reshape(n, -1)
            first, first_page = first + n, first_page + n_pages
        self._pages.set(np.zeros(first, np.int32), table, pages)
        kernels.store_rows(self.pool, self._made, self._pages)
        self.gpu.held[self._rows.address][: first * WIDTH] = made[:first].reshape(-1)
        self.gpu.held[self._flags][:first] = (made[:first] == 255).all(1)
        self._wanted = [made[row].tobytes() for row in wanted.tolist()]

    def sample(self, specs: Sequence[kernels.SampleSpec], taken: Taken) -> BegunSample:
        if self.refusals and random.Random(self.gpu.begun).random() < 0.01:
            self.refusals -= 1
            raise MemoryError
        got, masks = np.zeros(2 * len(specs), np.int32), [spec.mask.tobytes() for spec in specs]

        def run() -> None:
            self._sampled = [token_of(*one) for one in zip(self._wanted, masks, strict=True)]
            got[: len(specs)] = self._sampled

        if specs:
            self.gpu.begin(run)
        return BegunSample(0, got, [0] * len(specs))


class HashDevice(CudaDevice):
    """A `CudaDevice` with `HashSteps`."""

    def __init__(self, steps: HashSteps, pages_max: int) -> None:
        super().__init__()
        self._hashes, self._pages_max = steps, pages_max

    def load(self, load: wire.Load, report: Any) -> wire.ModelFacts:
        steps: Any = self._hashes
        self._steps, self._pool = steps, self._hashes.pool
        self._cache = PageCache(self._hashes.gpu, LAYOUT.payload_bytes, self._pages_max)
        self._on_host = kernels.Batch(TOKENS, ENTRIES, 3 * ENTRIES)
        return FACTS

    def launch(self, batch: StepInput, addresses: Any, taken: Taken = NOTHING_TAKEN) -> Launched:
        self._hashes.batch = batch
        return super().launch(batch, addresses, taken)


class SteppedWorker(Worker):
    """A `Worker` that answers when it is told to, and by chance sees a frame later than it came."""

    rng: random.Random

    def _is_readable(self, within_ms: float) -> bool:
        chance = 0.95 if within_ms == IDLE_MS else 0.6 if not within_ms else 0.9
        return self.rng.random() < chance and super()._is_readable(0)

    def answer(self) -> Any:
        """The answer to the next frame."""
        asked = self._next()
        assert asked is not None
        return self._answer(asked)


class Rows:
    """The rows that may be in the arena, `seen`, and those that must be once they are stored,
    `owed`: token and bytes by slot and row. All that were computed, but for those of entries that
    have none."""

    def __init__(self, arena: Arena) -> None:
        shape, self._arena_id = arena.shape, arena.arena_id
        memory = mmap.mmap(arena.fd, shape.file_bytes, prot=mmap.PROT_READ)
        whole = np.frombuffer(memory, np.uint8)
        records = whole[shape.rows_offset(0) :].reshape(SLOTS, SIDECAR_BYTES)
        self._records = records[:, :ROW_RECORDS_BYTES].view(ROW_RECORD_DTYPE)
        pages = whole[shape.page_offset(0) : shape.rows_offset(0)].reshape(SLOTS, -1)
        self._pages = pages[:, : LAYOUT.payload_bytes]
        self._before = self._records.copy(), self._pages.copy(), np.zeros((SLOTS, 256, WIDTH))
        self._batch = kernels.Batch(PAGE_TOKENS, 1, 1)
        self.seen = defaultdict[int, Any](lambda: defaultdict(set))
        self.owed = defaultdict[int, dict[int, tuple[int, bytes]]](dict)
        self.owners: dict[int, SlotOwner] = {}
        self.changed = set[int]()  # slots with another owner, or fewer rows

    def page(self, slot: int) -> bytes:
        return self._pages[slot].tobytes().ljust(LAYOUT.page_bytes, b"\0")

    def keep(self, slot: int, end: int, owner: SlotOwner | None = None) -> None:
        """Let the first rows of a slot be those that it has."""
        self.seen[slot] = defaultdict(set, {r: of for r, of in self.seen[slot].items() if r < end})
        self.owed[slot] = {r: of for r, of in self.owed[slot].items() if r < end}
        self.changed.add(slot)
        if owner is not None:
            self.owners[slot] = owner

    def add(self, slot: int, row: int, token: int, made: bytes, *, is_usable: bool) -> None:
        """A row was computed: those behind it need not be stored."""
        self.owed[slot] = {r: of for r, of in self.owed[slot].items() if r < row}
        if is_usable:
            self.owed[slot][row] = token, made
            self.seen[slot][row].add((token, made))

    def check(self) -> None:
        """Check each record that is new, or whose row is."""
        records, pages, rows = self._before
        is_new = (records != self._records).any(1) | (pages != self._pages).any(1)
        for slot in {*np.flatnonzero(is_new).tolist(), *self.changed}:
            own, now = self._records[slot], LAYOUT.gather_rows(self._pages[slot].data, 0, 256)
            is_new = (own != records[slot]) | (now != rows[slot]).any(1) | (slot in self.changed)
            new = np.flatnonzero(is_new & (own["valid"] == 1)).tolist()
            if new:
                seeds = self.owners[slot].seeds(self._arena_id, slot, 0, PAGE_TOKENS)
                address = np.array([self._pages[slot].ctypes.data], np.uint64)
                self._batch.set(np.zeros(256, np.int32), np.array([[256, 0, 1]], np.int32), address)
                digests = kernels.row_digests(self._batch, SHAPE, seeds)
            for row in new:
                assert digests[row] == own["digest"][row], f"record of slot {slot}, row {row}"
                held = int(own["token"][row]), now[row].tobytes()
                assert held in self.seen[slot][row], f"slot {slot}, row {row}: token {held[0]}"
            records[slot], pages[slot], rows[slot] = own, self._pages[slot], now
        self.changed.clear()

    def check_stored(self, slots: Iterable[int], before: dict[int, int]) -> None:
        """Check that rows of slots are stored, before the rows from which on they may wait."""
        for slot in slots:
            own, now = self._records[slot], LAYOUT.gather_rows(self._pages[slot].data, 0, 256)
            for row, (token, made) in self.owed[slot].items():
                if row < before.get(slot, PAGE_TOKENS):
                    is_there = own["valid"][row] == 1 and own["token"][row] == token
                    assert is_there, f"no record of slot {slot}, row {row}"
                    assert now[row].tobytes() == made, f"bytes of slot {slot}, row {row}"


class Player:
    """What `prepare_ahead` asks of a turn, with the rows that its session was told to have."""

    history_tokens, scores, shared_with, sampling = 0, None, "", GREEDY
    masks_are_slow = needs_match = False

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session, self.rows = session, bytearray()
        self.matcher = "masks" if rng.random() < 0.15 else None
        self.state, self.left = "runs", 0  # or "waits" for no step in flight, "idle", "gone"

    def banned(self, end: int) -> tuple[int, ...]:
        return ()


class Scene:
    """An engine with a lane: it makes frames and applies their answers."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.arena = Arena.create(f"{folder}/gpu.1", LAYOUT, SLOTS, 1)
        with open(extent_path(str(folder), 0), "wb") as file:
            file.truncate(SEALED * LAYOUT.page_bytes)
        self.extent = open(extent_path(str(folder), 0), "r+b", 0)  # noqa: SIM115
        self.codes, self.freed, self.named = list(range(SEALED)), list[int](), list[int]()
        store: Any = SimpleNamespace(pages=SimpleNamespace(unpin=self.freed.append))
        self.slots = Slots(store)
        self.slots.attach(self.arena)
        pages_max, fit, refusals = rng.choice(MEMORIES)
        self.steps = HashSteps(LazyGpu(rng, fit), refusals)
        self.device = HashDevice(self.steps, pages_max)
        ours, theirs = socket.socketpair()
        self.end, self.link = (BlockingLink(one, wire.LANE_LINK) for one in (ours, theirs))
        self.worker = SteppedWorker(self.link, 1, {wire.CudaResources: lambda: self.device})
        self.worker.rng = rng
        attach = wire.Attach(self.arena.path, SLOTS, LAYOUT.page_bytes, str(folder), str(folder))
        for message in (LOAD, attach):
            self.send(message)
            self.worker.answer()
        self.rows = Rows(self.arena)
        self.players = self.steps.players
        self.in_flight: deque[InFlightStep] = deque()
        self.sampled: dict[int, int] = {}  # session -> token, by the last step with entries
        self.following: dict[int, int] = {}  # session -> its token there, if the step counts
        self.seals: list[tuple[Player, int, ArenaSlot]] = []
        self.imports: list[tuple[Player, wire.ImportRows]] = []
        self.moving: list[tuple[Player, wire.ImportRows]] = []  # in flight
        self.tails, self.touch = list[wire.Digest](), list[int]()

    def send(self, message: Any, payload: bytes = b"") -> None:
        self.end.send(wire.LANE_LINK.encode(message, payload, incarnation=1))

    def chores(self) -> tuple[Chores, list[Any]]:
        """As LaneKv.chores: a step ahead has no others than of slots and of freed pages."""
        ids = array("i")
        for player, one in self.imports:
            first = page_start(one.to.page)
            ids.extend(player.session.tokens[first : first + one.rows])
        imports = tuple([one for _, one in self.imports])
        self.moving, self.imports = self.moving + self.imports, []
        freed, self.freed[:] = tuple(self.freed), []
        self.named += freed
        labels, touch, digest = self.slots.take_labels(), tuple(self.touch), tuple(self.tails)
        self.tails, self.touch = [], []
        return Chores(labels, imports, ids.tobytes(), touch, digest, freed, [], [], []), []

    # ---------------------------------------------------------------------------- frames

    def post(self, step: InFlightStep) -> None:
        for entry in step.step.entries:
            if self.rng.random() < 0.003:
                self.steps.fails.add((entry.session, entry.start))
        self.in_flight.append(step)
        self.send(step.step, step.payload)

    def send_masks(self) -> None:
        """As InFlightSteps.send_masks; some are not sent."""
        for part, entry in zip(self.in_flight[0].parts, self.in_flight[0].step.entries, strict=True):
            player: Any = part.turn
            position = entry.start + entry.n_tokens
            is_current = player.state == "runs" and len(player.session.tokens) == position
            if entry.masked and self.rng.random() < 0.9:
                bits = mask_of(entry.session, position) if is_current else b""
                self.send(wire.Mask(entry.session, position, bits))

    def first(self) -> InFlightStep:
        """A step that is not ahead, with what only such a one may hold."""
        rng, left, codes, tokens = self.rng, TOKENS, array("Q"), array("i")
        entries, parts, fills = list[wire.Entry](), list[StepEntry](), list[Any]()
        running = [player for player in self.players.values() if player.state == "runs"]
        rng.shuffle(running)
        for player in running[: rng.choice([0, *[ENTRIES] * 12])]:
            session, start = player.session, player.session.frontier
            n = min(session.to_compute, rng.choice([1, 9, 100, 300]), left)
            if n < 1 or not self.slots.ensure(session, start + n):
                continue
            end, left = start + n, left - n
            wants, n_pages = end == len(session.tokens), pages_for(end)
            codes.extend(session.kv.codes[:n_pages])
            tokens.extend(session.tokens[start:end])
            sampling, masked = GREEDY if wants else None, wants and player.matcher is not None
            place = session.key, session.epoch, start, n, n_pages
            entries.append(wire.Entry(*place, sampling, masked=masked))
            turn: Any = player
            parts.append(StepEntry(turn, n, wants))
            fills += [(turn, page, slot) for page, slot in session.kv.filled(start, end)]
        self.add_chores()
        chores, verify = self.chores()
        step = frame(entries, fills, chores, [])
        payload = codes.tobytes() + tokens.tobytes() + chores.import_tokens
        return InFlightStep(step, payload, parts, fills, verify, chores, 0.0)

    def add_chores(self) -> None:
        """Digest tails of idle sessions, touch pages, import rows from the own arena."""
        rng = self.rng
        idle = [player for player in self.players.values() if player.state == "idle"]
        for player in idle:
            session, kv = player.session, player.session.kv
            slot, rows, chance = kv.slot_at(session.frontier), session.frontier % 256, rng.random()
            if slot is None or not rows or chance > 0.3:
                continue
            if chance < 0.15:
                self.tails.append(wire.Digest(slot.slot, rows))
            elif len(kv.open) == 1 and (fresh := self.slots.take(reclaim=False)) is not None:
                source = wire.FromArena("gpu.1", slot.slot, slot.gen, self.slots.epochs[slot])
                label = self.slots.label(fresh, session, session.next_epoch(), kv.first_open)
                self.imports.append((player, wire.ImportRows(label, rows, source)))
                self.slots.protect(session)
                player.state = "moves"
        if rng.random() < 0.3:
            codes = [code for key in self.slots.members for code in self.players[key].session.kv.codes]
            self.touch = rng.sample(codes, min(len(codes), 8))

    def send_ahead(self) -> bool:
        """Send a step for most sessions of the last one, if it may be; whether it was."""
        reaches, batch, left = reaches_of(self.in_flight), list[tuple[int, int]](), TOKENS
        for part in self.in_flight[-1].parts:
            player: Any = part.turn
            key, reach = player.session.key, reaches.get(player.session.key)
            is_last = reach is not None and reach.samples >= player.left
            if reach is None or is_last or player.state != "runs" or self.rng.random() < 0.04:
                continue
            known = len(player.session.tokens) - reach.end
            n = min(1 if part.wants else min(known, self.rng.choice([1, 9, 100])), left)
            if n > 0:
                batch.append((key, n))
                left -= n
        kv: Any = self
        step = prepare_ahead(StepPlan(tuple(batch)), list(self.in_flight), kv)
        if step is not None:
            self.post(step)
        return step is not None

    # ---------------------------------------------------------------------------- answers

    def commit(self) -> None:
        """Take the answer to the oldest step, and check the arena."""
        done = self.worker.answer()
        assert isinstance(done, wire.StepDone), done
        step = self.in_flight.popleft()
        check_answer(step, done)
        due = self._note_chores(step.step, done)
        sampled = {row.session: row.token for row in done.rows}
        codes, base, before = array("Q"), 0, dict[int, int]()
        codes.frombytes(step.payload[: 8 * sum(entry.n_pages for entry in step.step.entries)])
        without, following = list[Player](), dict[int, int]()
        for i, (part, entry) in enumerate(zip(step.parts, step.step.entries, strict=True)):
            player: Any = part.turn
            ids, made = self.steps.computed.pop((entry.session, entry.start))
            is_known = not entry.takes_sample or entry.session in self.sampled
            is_usable = is_known and i not in {*done.nonfinite, *done.unmasked}
            for at, token in enumerate(ids):
                page, row = divmod(entry.start + at, PAGE_TOKENS)
                slot = codes[base + page] & SLOT_MASK
                before.setdefault(slot, row)
                bytes_of = made[at * WIDTH : (at + 1) * WIDTH]
                self.rows.add(slot, row, token, bytes_of, is_usable=is_usable)
            base += entry.n_pages
            fails = (entry.session, entry.start) in self.steps.fails
            self.steps.fails.discard((entry.session, entry.start))
            if not self._is_current(player, entry, step.is_ahead):
                without.append(player)
                if self.slots.owns(player.session):
                    self.slots.trim(player.session)
            elif i in done.nonfinite or i in done.unmasked:
                assert fails == (i in done.nonfinite), f"nonfinite: {entry}"
                without.append(player)
                if fails:
                    self.slots.keep_sealed(player.session)
                    player.state = "waits"
            else:
                assert is_usable, f"an entry without its sample: {entry}"
                self._advance(player, entry, ids, made)
                if part.wants:
                    mask = mask_of(entry.session, entry.start + entry.n_tokens)
                    wanted = token_of(made[-WIDTH:], mask if entry.masked else b"")
                    self._add_token(player, sampled[entry.session], wanted)
                following[entry.session] = player.session.tokens[player.session.frontier]
        for of, digest in zip(step.step.digest, done.digests, strict=True):
            self.rows.keep(of.slot, of.rows)
            assert payload_digest(self.rows.page(of.slot)) == digest
        self.rows.check_stored([of.slot for of in step.step.digest], {})
        self.rows.check_stored(due, before)
        self.rows.check()
        for turn, page, slot in step.fills:
            player = turn
            if player not in without and slot in player.session.kv.open:
                self.seals.append((player, page, slot))
        self.slots.labeled()
        self.following, self.sampled = following, sampled if step.parts else self.sampled
        if not step.is_ahead:
            self._install()

    def _note_chores(self, step: wire.Step, done: wire.StepDone) -> set[int]:
        """Note what a frame did with slots; returns those whose rows before it are stored."""

        def owner(of: Any) -> SlotOwner:
            return SlotOwner(of.session, of.epoch, of.gen, of.page)

        rows, due = self.rows, {code & SLOT_MASK for code in step.touch if code >= ARENA_BIT}
        for slot in step.poison:
            rows.keep(slot, 0)
        for fresh in step.reserve:
            rows.keep(fresh.slot, 0, owner(fresh))
        for label in step.relabel:
            rows.keep(label.slot, label.rows, owner(label))
            due.add(label.slot)
        for one, count in zip(step.import_rows, done.imported, strict=True):
            source: Any = one.source
            assert count == one.rows, f"{count} rows are proven: {one}"
            rows.owed[one.to.slot] = dict(rows.owed[source.slot])
            rows.seen[one.to.slot] = rows.seen[source.slot]
            rows.keep(one.to.slot, count, owner(one.to))
            due |= {source.slot, one.to.slot}
        return due

    def _is_current(self, player: Player, entry: wire.Entry, is_ahead: bool) -> bool:
        """As StepWriter: whether the session is where the entry of a step ahead assumed."""
        session = player.session
        return (
            player.state == "runs"
            and session.epoch == entry.epoch
            and session.frontier == entry.start < len(session.tokens)
            and (not is_ahead or session.tokens[entry.start] == self.following.get(entry.session))
        )

    def _advance(self, player: Player, entry: wire.Entry, ids: list[int], made: bytes) -> None:
        """Compare rows that count with the model's, and move the frontier."""
        session, first = player.session, entry.start * WIDTH
        rows = player.rows[:first]
        for token in session.tokens[entry.start : entry.start + entry.n_tokens]:
            rows += row_of(rows, token)
        assert ids == session.tokens[entry.start : entry.start + entry.n_tokens], f"{entry}"
        assert made == rows[first:], f"rows of {entry}"
        player.rows[: len(rows)] = rows
        session.advance(entry.n_tokens, "gpu")

    def _add_token(self, player: Player, token: int, wanted: int) -> None:
        assert token == wanted, f"sample of {player.session}"
        player.session.tokens.append(token)
        player.left -= 1
        if player.left and self.rng.random() > 0.01:
            return
        player.state = "idle"
        self.slots.make_reclaimable(player.session)
        if self.rng.random() < 0.4:
            self.drop(player)

    def _install(self) -> None:
        """Replace slots by those that their rows were imported to."""
        for player, one in self.moving:
            session, kv = player.session, player.session.kv
            old, kv.open[0] = kv.open[0], ArenaSlot(one.to.slot, one.to.gen)
            kv.codes[one.to.page] = kv.open[0].code
            self.slots.free(old)
            session.epoch, player.state = one.to.epoch, "idle"
            self.slots.make_reclaimable(session)
        self.moving = []

    # ---------------------------------------------------------------------------- sessions

    def seal(self) -> None:
        """Copy full pages to the extent, and have their sessions read them there."""
        for player, page, slot in list(self.seals):
            session, kv = player.session, player.session.kv
            if slot not in kv.open:
                self.seals.remove((player, page, slot))
            elif kv.open[0] == slot and self.codes and self.rng.random() < 0.4:
                self.seals.remove((player, page, slot))
                code: Any = self.codes.pop(0)
                at = code * LAYOUT.page_bytes
                os.pwrite(self.extent.fileno(), self.rows.page(slot.slot), at)
                self.slots.free(kv.seal_first(code, code))
                self.slots.recount(session)

    def drop(self, player: Player) -> None:
        player.state = "gone"
        self.slots.protect(player.session)
        self.slots.clear(player.session)
        self.slots.members.pop(player.session.key)

    def between(self) -> None:
        """Do what is done while no step is in flight."""
        rng = self.rng
        self.codes, self.named = self.codes + self.named, []
        self.seal()
        if rng.random() < 0.15:
            while self.device.rest():
                pass
            self.rows.check()
            self.rows.check_stored(range(SLOTS), {})
        for player in list(self.players.values()):
            player.session.check()
            if player.state == "waits":
                player.state = "runs"
            elif player.state == "idle" and rng.random() < 0.2:
                self.resume(player)
        running = sum(player.state == "runs" for player in self.players.values())
        for _ in range(rng.choice([3, 14, ENTRIES]) - running):
            key = len(self.players)
            player = self.players[key] = Player(Session(key, f"s{key}", "t"), rng)
            n = rng.choice([rng.randint(1, 40), rng.randint(235, 256), rng.randint(490, 515)])
            player.session.tokens = [rng.randrange(VOCAB) for _ in range(n)]
            player.left = rng.randint(1, 60)
            self.slots.enter(player.session)

    def resume(self, player: Player) -> None:
        """Continue an idle session, or cut it; a cut leaves whole sealed pages."""
        session, rng = player.session, self.rng
        end = len(session.tokens) if rng.random() < 0.5 else rng.randrange(len(session.tokens))
        if end < session.kv.sealed_tokens:
            end -= end % PAGE_TOKENS
        if end > CONTEXT - 100:
            self.drop(player)
            return
        more = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        if end < len(session.tokens):
            more[0] = (session.tokens[end] + 1) % VOCAB
        session.rebase([*session.tokens[:end], *more])
        del player.rows[end * WIDTH :]
        self.slots.protect(session)
        self.slots.fit(session)
        self.seals = [one for one in self.seals if one[0] is not player or one[1] < end // 256]
        player.state, player.left = "runs", rng.randint(1, 60)

    def run(self) -> None:
        steps = STEPS
        while steps > 0:
            self.between()
            self.post(self.first())
            self.send_masks()
            while self.in_flight:
                lasts = steps > 0 and self.rng.random() > 0.05
                while lasts and len(self.in_flight) < 3 and self.send_ahead():
                    pass
                self.commit()
                steps -= 1
                if self.in_flight:
                    self.send_masks()
                    if all(step.is_ahead for step in self.in_flight):
                        self.seal()
        while self.device.rest():
            pass
        self.rows.check()
        self.rows.check_stored(range(SLOTS), {})

    def close(self) -> None:
        self.device.close()
        for one in (self.end, self.link, self.extent):
            one.close()
        self.arena.close(delete=True)


def simulate(seed: int) -> None:
    for folder in scratch():
        scene = Scene(folder, seed)
        try:
            scene.run()
        finally:
            scene.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_rows_of_a_gpu_lane_are_where_they_are_said_to_be(seed: int) -> None:
    simulate(seed)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        print("seed", number, flush=True)
        simulate(number)
