"""The memory of a GPU lane in random steps: records and rows of the arena, and copies of pages.

The worker, its device, its link and the rule of steps ahead are the real ones. The GPU computes
hashes: a row is that of all rows before it and its token, so a page that lacks a row shows. Run as
a program it takes the first seed and the count of seeds.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kernels
from batchengine.core import GREEDY, PAGE_TOKENS
from batchengine.engine.lane.steps.inflight import (
    InFlightStep,
    StepBuilder,
    check_answer,
    prepare_ahead,
    reaches_of,
)
from batchengine.engine.turns.turn import Turn
from batchengine.kv.lane_kv import Chores
from batchengine.kv.slots import Slots
from batchengine.lanes.gpu import lane
from batchengine.lanes.step_input import SLOT_MASK
from batchengine.lanes.worker import IDLE_MS, Worker
from batchengine.policy.scheduler import PlannedEntry, StepPlan
from batchengine.session import Session
from batchengine.session_kv import page_start
from batchengine.wire import lane as wire
from batchengine.wire.frames import BlockingLink
from batchengine.wire.lane import ARENA_BIT
from bench.models.tensors import aligned
from kv_store.arenas.arena import SIDECAR_BYTES, Arena, ArenaSlot, SlotOwner
from kv_store.keys import payload_digest
from kv_store.layout import ROW_RECORD_DTYPE, ROW_RECORDS_BYTES
from kv_store.pages.extents import extent_path
from tests.lanes.memory.hashing_gpu import (
    CONTEXT,
    ENTRIES,
    LAYOUT,
    TOKENS,
    VOCAB,
    WIDTH,
    HashDevice,
    HashSteps,
    LazyGpu,
    mask_of,
    page_shape,
    row_of,
    token_of,
)
from tests.support.kv_workload import scratch

SLOTS, SEALED = 44, 16
LOAD = wire.Load("", "", wire.CudaResources(0, 1 << 30, 0, 1, (), 0), TOKENS, ENTRIES, CONTEXT)
# Pages that the cache may hold, those that fit, and how often the memory for samples is refused.
MEMORIES = [(3, 3, 0), (8, 9, 0), (16, 16, 1), (24, 24, 0), (64, 8, 1), (64, 64, 0), (64, 64, 1)]
WINDOWS = [0, 0, 1, 2, 40, 200, 255, 256, 257, 258, 400]  # of some layers
STEPS = 60
ASIDE_BYTES = LAYOUT.payload_bytes  # of one expected page beside each step
SEEDS = int(os.environ.get("GPU_MEMORY_SEEDS", "12"))


class SteppedWorker(Worker):
    """A `Worker` that answers when it is sent to, and by chance sees a frame later than it came."""

    rng: random.Random
    masked: set[tuple[int, int]]  # session and position of each mask that it had in time

    def _is_readable(self, within_ms: float) -> bool:
        chance = 0.95 if within_ms == IDLE_MS else 0.6 if not within_ms else 0.9
        return self.rng.random() < chance and super()._is_readable(0)

    def _wait_masks(self, number: int, found: Any, keys: Any) -> Any:
        masks = super()._wait_masks(number, found, keys)
        self.masked |= {place for place, of in zip(keys, masks, strict=True) if of is not None}
        return masks

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
        self.seen = defaultdict[int, Any](lambda: defaultdict[int, set[Any]](set))
        self.owed = defaultdict[int, dict[int, tuple[int, bytes]]](dict)
        self.owners: dict[int, SlotOwner] = {}
        self._ends: dict[int, int] = {}  # of the rows that were computed last, by slot
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
        if row < self._ends.get(slot, 0):
            self.owed[slot] = {r: of for r, of in self.owed[slot].items() if r < row}
        self._ends[slot] = row + 1
        if is_usable:
            self.owed[slot][row] = token, made
            self.seen[slot][row].add((token, made))

    def check(self) -> None:
        """Check each record that is new, or whose row is."""
        records, pages, rows = self._before
        pairs = (records, self._records), (pages, self._pages)
        is_new = [(a.view(np.uint64) != b.view(np.uint64)).any(1) for a, b in pairs]
        for slot in {*np.flatnonzero(is_new[0] | is_new[1]).tolist(), *self.changed}:
            own, now = self._records[slot], LAYOUT.gather_rows(self._pages[slot].data, 0, 256)
            is_new = (own != records[slot]) | (now != rows[slot]).any(1) | (slot in self.changed)
            new = np.flatnonzero(is_new & (own["valid"] == 1)).tolist()
            digests = np.zeros(PAGE_TOKENS, np.uint64)
            if new:
                seeds = self.owners[slot].seeds(self._arena_id, slot, 0, PAGE_TOKENS)
                address = np.array([self._pages[slot].ctypes.data], np.uint64)
                self._batch.set(np.zeros(256, np.int32), np.array([[256, 0, 1]], np.int32), address)
                digests = kernels.row_digests(self._batch, page_shape(), seeds)
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
    """What a step asks of a turn that it computes, with the rows that its session should have."""

    history_tokens, scores, shared_with, sampling = 0, None, "", GREEDY
    masks_are_slow = needs_match = is_scoring = False
    is_bound: Any = Turn.is_bound

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
        self.states = SimpleNamespace(is_used=False, until=lambda _session, _at, end: end)
        self.slots.attach(self.arena)
        pages_max, fit, refusals = rng.choice(MEMORIES)
        window = rng.choice(WINDOWS)
        self.steps = HashSteps(LazyGpu(rng, fit), refusals, window)
        counts = [min(rng.choice([3, 22, 26, 64]), pages_max), pages_max] if window else [pages_max]
        self.device = HashDevice(self.steps, counts)
        ours, theirs = socket.socketpair()
        self.end, self.link = (BlockingLink(one, wire.LANE_LINK) for one in (ours, theirs))
        self.worker = SteppedWorker(self.link, 1, {wire.CudaResources: lambda: self.device})
        self.worker.masked = set[tuple[int, int]]()
        self.worker.rng = rng
        attach = wire.Attach(self.arena.path, SLOTS, LAYOUT.page_bytes, str(folder), str(folder))
        for message in (LOAD, attach):
            self.send(message)
            self.worker.answer()
        self.rows = Rows(self.arena)
        self.players: dict[int, Player] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.n_posted = 0
        self.sampled: dict[int, int] = {}  # session -> token, by the last step with entries
        self.following: dict[int, int] = {}  # session -> its token there, if the step counts
        self.seals: list[tuple[Player, int, ArenaSlot]] = []
        self.imports: list[tuple[Player, wire.ImportRows]] = []
        self.moving: list[tuple[Player, wire.ImportRows]] = []  # in flight
        self.tails, self.touch = list[wire.Digest](), list[int]()
        self.crowd = rng.choice([(1, 4), (4, ENTRIES), (ENTRIES,), (ENTRIES,)])  # that runs

    def send(self, message: Any, payload: bytes = b"", *, step: int = 0) -> None:
        self.end.send(wire.LANE_LINK.encode(message, payload, step=step, incarnation=1))

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
        return Chores(labels, imports, ids.tobytes(), touch, digest, freed, (), [], [], []), []

    # ---------------------------------------------------------------------------- frames

    def post(self, step: InFlightStep) -> None:
        for entry in step.step.entries:
            if self.rng.random() < 0.003:
                self.steps.fails.add((entry.session, entry.start))
        self.in_flight.append(step)
        self.n_posted += 1
        self.send(step.step, step.payload, step=self.n_posted)

    def send_masks(self) -> None:
        """As InFlightSteps.send_masks; some are not sent."""
        number = self.n_posted - len(self.in_flight) + 1
        for part, entry in zip(
            self.in_flight[0].parts, self.in_flight[0].step.entries, strict=True
        ):
            player: Any = part.turn
            position = entry.start + entry.n_tokens
            is_current = player.state == "runs" and len(player.session.tokens) == position
            if entry.masked and self.rng.random() < 0.9:
                bits = mask_of(entry.session, position) if is_current else b""
                self.send(wire.Mask(entry.session, position, bits), step=number)

    def first(self) -> InFlightStep:
        """A step that is not ahead, with what only such a one may hold."""
        rng, left, builder = self.rng, TOKENS, StepBuilder()
        running = [player for player in self.players.values() if player.state == "runs"]
        rng.shuffle(running)
        for player in running[: rng.choice([0, *[ENTRIES] * 12])]:
            session, start = player.session, player.session.frontier
            n = min(session.to_compute, rng.choice([1, 1, 30, 300]), left)
            if n < 1 or not self.slots.ensure(session, start + n):
                continue
            left -= n
            turn: Any = player
            builder.add(turn, start, start + n)
        self.add_chores()
        kv: Any = self
        return builder.finish(kv, 0.0)

    def add_chores(self) -> None:
        """Digest tails of idle sessions, touch pages, import rows from the own arena."""
        rng = self.rng
        idle = [player for player in self.players.values() if player.state == "idle"]
        for player in idle:
            session, kv = player.session, player.session.kv
            slot, rows, chance = kv.slot_at(session.frontier), session.frontier % 256, rng.random()
            if slot is None or not rows or chance > 0.6:
                continue
            if chance < 0.15:
                self.tails.append(wire.Digest(slot.slot, rows))
            elif len(kv.open) == 1 and (fresh := self.slots.take(reclaim=False)) is not None:
                source = wire.FromArena("gpu.1", slot.slot, slot.gen, self.slots.epochs[slot])
                label = self.slots.label(fresh, session, session.next_epoch(), kv.first_open)
                self.imports.append((player, wire.ImportRows(label, rows, source)))
                self.slots.protect(session)
                player.state = "moves"
        if rng.random() < 0.5:
            codes = [code for one in self.slots.members.values() for code in one.kv.codes]
            self.touch += rng.sample(codes, min(len(codes), 6))

    def send_ahead(self) -> bool:
        """Send a step for most sessions of the last one, if it may be; whether it was."""
        reaches, batch, left = reaches_of(self.in_flight), list[tuple[int, int]](), TOKENS
        for part in self.in_flight[-1].parts:
            player: Any = part.turn
            key, reach = player.session.key, reaches.get(player.session.key)
            is_last = reach is not None and reach.samples >= player.left
            if reach is None or is_last or player.state != "runs" or self.rng.random() < 0.02:
                continue
            known = len(player.session.tokens) - reach.end
            n = min(1 if part.wants else min(known, self.rng.choice([1, 1, 30, 300])), left)
            if n > 0:
                batch.append((key, n))
                left -= n
        kv: Any = self
        plan = StepPlan(tuple([PlannedEntry(*one) for one in batch]))
        step = prepare_ahead(plan, list(self.in_flight), kv)
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
            place = entry.session, entry.start + entry.n_tokens
            is_masked = place in self.worker.masked
            self.worker.masked.discard(place)
            is_known = not entry.takes_sample or entry.session in self.sampled
            is_usable = is_known and i not in {*done.nonfinite, *done.unmasked}
            if not is_known:
                sampled.pop(entry.session, None)  # a sample behind an unknown token is none
            for at, token in enumerate(ids):
                page, row = divmod(entry.start + at, PAGE_TOKENS)
                slot = codes[base + page] & SLOT_MASK
                before.setdefault(slot, row)
                bytes_of = made[at * WIDTH : (at + 1) * WIDTH]
                self.rows.add(slot, row, token, bytes_of, is_usable=is_usable)
            base += entry.n_pages
            fails = (entry.session, entry.start) in self.steps.fails
            fails = fails and (part.wants or entry.start % 2 == 0)
            self.steps.fails.discard((entry.session, entry.start))
            if not self._is_current(player, entry, step.is_ahead):
                without.append(player)
                if self.slots.owns(player.session):
                    self.slots.trim(player.session)
            elif i in done.nonfinite or i in done.unmasked:
                assert fails == (i in done.nonfinite), f"nonfinite: {entry}"
                assert fails or not is_masked, f"a mask is lost: {entry}"
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
            rows += row_of(rows, token, self.steps.window)
        assert ids == session.tokens[entry.start : entry.start + entry.n_tokens], f"{entry}"
        assert made == rows[first:], f"rows of {entry}"
        player.rows[: len(rows)] = rows
        session.advance(entry.n_tokens, "gpu")

    def _add_token(self, player: Player, token: int, wanted: int) -> None:
        assert token == wanted, f"sample of {player.session}"
        player.session.tokens.append(token)
        player.left -= 1
        if player.left and self.rng.random() > 0.03:
            player.state = self.rng.choice(["waits", *["runs"] * 99])
            return
        player.state = "idle"
        self.slots.make_reclaimable(player.session)
        if self.rng.random() < 0.15:
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
                code: Any = self.codes.pop()
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
            while self.device.do_deferred():
                pass
            self.rows.check()
            self.rows.check_stored(range(SLOTS), {})
        for player in list(self.players.values()):
            player.session.check()
            if player.state == "waits":
                player.state = "runs"
            elif player.state == "idle" and rng.random() < 0.4:
                self.resume(player)
        running = sum(player.state == "runs" for player in self.players.values())
        for _ in range(rng.choice(self.crowd) - running):
            key = len(self.players)
            player = self.players[key] = Player(Session(key, f"s{key}", "t"), rng)
            self.steps.rows[key] = player.rows
            n = rng.choice([rng.randint(1, 30), rng.randint(1, 30), rng.randint(230, 290), 510])
            player.session.tokens = [rng.randrange(VOCAB) for _ in range(n)]
            player.left = rng.randint(1, 90)
            self.slots.enter(player.session)
            if n > PAGE_TOKENS and self.codes and rng.random() < 0.8:
                self.arrive(player)

    def arrive(self, player: Player) -> None:
        """Have a page of the session in the store, and touch it before the session runs."""
        session, code, page = player.session, self.codes.pop(), aligned(LAYOUT.page_bytes)
        for token in session.tokens[:PAGE_TOKENS]:
            player.rows += row_of(player.rows, token, self.steps.window)
        rows = np.frombuffer(bytes(player.rows), np.uint8).reshape(-1, WIDTH)
        entry = np.array([[PAGE_TOKENS, 0, 1]], np.int32)
        self.steps.whole.store(self.steps.pool, rows, entry, [page.ctypes.data])
        os.pwrite(self.extent.fileno(), page.tobytes(), code * LAYOUT.page_bytes)
        ref: Any = code
        session.kv.extend_sealed([ref], [code])
        session.frontier, player.state = PAGE_TOKENS, "waits"
        self.touch.append(code)

    def resume(self, player: Player) -> None:
        """Continue an idle session, or cut it; a cut leaves whole sealed pages."""
        session, rng = player.session, self.rng
        end = len(session.tokens) if rng.random() < 0.7 else rng.randrange(len(session.tokens))
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
                lasts = steps > 0 and self.rng.random() > 0.15
                while lasts and len(self.in_flight) < 3 and self.send_ahead():
                    pass
                self.commit()
                steps -= 1
                if self.in_flight:
                    self.send_masks()
                    if all(step.is_ahead for step in self.in_flight):
                        self.seal()
        while self.device.do_deferred():
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
def test_the_rows_of_a_gpu_lane_are_where_they_are_said_to_be(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "ASIDE_BYTES", ASIDE_BYTES)
    simulate(seed)


if __name__ == "__main__":
    lane.ASIDE_BYTES = ASIDE_BYTES
    for number in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        print("seed", number, flush=True)
        simulate(number)
