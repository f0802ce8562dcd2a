"""One lane with its real step writer, tables, store and HashLM, and peers that are dictionaries.

The worker runs in this process. A page that a peer holds is read from the peer's copy; an entry
that needs a peer which does not answer comes back unreachable.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from batchengine.config import LaneConfig
from batchengine.core import GenerationRequest, Sampling
from batchengine.engine.lane.seats import Seats
from batchengine.engine.lane.steps.emission import Emissions
from batchengine.engine.lane.steps.inflight import check_answer
from batchengine.engine.lane.steps.meter import StepMeter
from batchengine.engine.lane.steps.writer import StepWriter
from batchengine.engine.turns.turn import Turn
from batchengine.kv import Disputes, LaneKv
from batchengine.lanes.host_device import Computed
from batchengine.lanes.step_input import StepInput, StepLimits, StepOutput, U64Array
from batchengine.metrics import Metrics
from batchengine.policy import scheduler
from batchengine.policy.cost import CostModel, StepCost
from batchengine.session import Session
from batchengine.session_kv import SELF, HeldSegment
from batchengine.wire import lane as wire
from bench.models.hashlm import FIRST_TOKEN, LAYOUT, Faults, HashDevice, HashWorker
from kv_store import osio
from kv_store.pages.index import PageRef
from kv_store.store import Store
from tests.support.kv_workload import descriptor, read_page, settings

VOCAB = 2048
SUPERPAGE = 4


class Disk(osio.Files):
    """A disk that is full while `refuses`."""

    refuses = False

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if self.refuses:
            raise OSError(errno.ENOSPC, "no space")
        return super().pwrite(fd, data, offset)


class Peer:
    """A daemon that holds pages: (hold, index) -> bytes."""

    def __init__(self, link: int) -> None:
        self.link: int | None = link
        self.answers = True
        self.pages: dict[tuple[int, int], np.ndarray] = {}


class Peers:
    """The holders of one lane's pages."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.peers = {name: Peer(number) for number, name in enumerate(("north", "south"), 1)}
        self.peers[SELF] = Peer(0)
        self.pins: dict[tuple[int, int], PageRef] = {}  # of holds of this daemon
        self.holds = 0

    def link(self, segment: HeldSegment) -> int | None:
        peer = self.peers[segment.peer]
        first = (segment.hold, segment.first)
        return peer.link if first in peer.pages else None

    def release(self, segments: Sequence[HeldSegment]) -> None:
        for segment in segments:
            for index in range(segment.first, segment.first + segment.n_pages):
                self.peers[segment.peer].pages.pop((segment.hold, index), None)
                if segment.peer == SELF:
                    self.store.pages.unpin(self.pins.pop((segment.hold, index)))

    def holder(self, segment: wire.Segment) -> Peer:
        """The peer behind the link of a segment."""
        return next(peer for peer in self.peers.values() if peer.link == segment.link)

    def is_served(self, segment: wire.Segment) -> bool:
        peer = self.holder(segment)
        return peer.answers and (segment.hold, segment.first_page) in peer.pages

    def hold_here(self, refs: Sequence[PageRef]) -> HeldSegment:
        segment = self.take(SELF, refs)
        for index, ref in enumerate(refs):
            self.pins[segment.hold, index] = ref
        return segment

    def take(
        self, name: str, refs: Sequence[PageRef], after: HeldSegment | None = None
    ) -> HeldSegment:
        """Copy pages of the store to a peer, into a new hold or at the end of one."""
        first = 0
        if after is None:
            self.holds += 1
            hold = self.holds
        else:
            hold, first = after.hold, after.first + after.n_pages
        peer = self.peers[name]
        for index, ref in enumerate(refs, first):
            peer.pages[hold, index] = np.frombuffer(read_page(self.store, ref), np.uint8).copy()
        assert peer.link is not None
        return HeldSegment(name, 1, peer.link, hold, first, len(refs))

    def end(self, name: str) -> None:
        """The peer's process ends: its pages are gone."""
        self.peers[name].pages.clear()
        self.peers[name].answers = True


class RoutedDevice(HashDevice):
    """HashLM whose entries are unreachable when a peer does not answer."""

    def __init__(self, peers: Peers, state_bytes: int) -> None:
        super().__init__(Faults(state_bytes=state_bytes))
        self._n_tokens = VOCAB - FIRST_TOKEN
        self.peers = peers
        self._absent = np.zeros(LAYOUT.page_bytes, np.uint8)

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        self._views.clear()  # pages of a peer come and go
        assert (addresses == 0).sum() == sum(s.n_pages for e in batch.entries for s in e.segments)
        addresses[addresses == 0] = [
            page.ctypes.data
            for entry in batch.entries
            for segment in entry.segments
            for page in self._pages(segment)
        ]
        output, digests = super().compute(batch, addresses, seeds)
        unreachable = tuple(
            index
            for index, entry in enumerate(batch.entries)
            if not all(map(self.peers.is_served, entry.segments))
        )
        lost = {batch.entries[index].session for index in unreachable}
        rows = tuple(row for row in output.rows if row.session not in lost)
        return StepOutput(rows, output.nonfinite, unreachable), digests

    def _pages(self, segment: wire.Segment) -> list[np.ndarray]:
        pages = self.peers.holder(segment).pages
        first, end = segment.first_page, segment.first_page + segment.n_pages
        return [pages.get((segment.hold, index), self._absent) for index in range(first, end)]


class Scene:
    """A lane of one process; `say` runs a turn of a session to its end, or some steps of it."""

    def __init__(
        self, folder: Path, *, pages: int = 64, slots: int = 24, state_bytes: int = 0
    ) -> None:
        self.disk = Disk()
        self.store = Store.open(
            folder / "store",
            descriptor(LAYOUT),
            settings(budget_bytes=pages * LAYOUT.page_bytes, extent_bytes=16 * LAYOUT.page_bytes),
            files=self.disk,
        )
        self.peers = Peers(self.store)
        self.kv = LaneKv(
            self.store, Disputes(self.store), lambda: None, lambda: self.store.ledger.commit()
        )
        self.kv.slots.holders = self.peers
        self.device = RoutedDevice(self.peers, state_bytes)
        self.worker = HashWorker(None, 1, self.device)  # type: ignore[arg-type]
        self.worker._device = self.device
        self.worker._facts = wire.ModelFacts(
            "a", "hash", 1, LAYOUT.layers, LAYOUT.payload_bytes, VOCAB, {}, state_bytes=state_bytes,
        )  # fmt: skip
        self.worker._limits = StepLimits(4096, 64, 1 << 20, VOCAB, has_links=True)
        self.arena = self.store.create_arena("cpu", 1, slots)
        self.worker._attach(
            wire.Attach(
                self.arena.path, slots, LAYOUT.page_bytes, str(folder / "store" / "ext"), "",
                state_slots=8 if state_bytes else 0, state_bytes=state_bytes,
            )
        )  # fmt: skip
        self.kv.slots.attach(self.arena)
        self.kv.states.attach(8, state_bytes)
        metrics, cost = Metrics(), StepCost()
        config = LaneConfig(name="cpu", threads=1)
        self.seats = Seats(self.kv, config, self.store.pages.allocator.slots_max, metrics, {})
        self.meter = StepMeter(CostModel(cost), metrics.step_seconds.labels("cpu"))
        self.steps = StepWriter(
            config, self.kv, self.seats, Emissions(lambda token: b""), self.meter,
            end_tokens=(), suspects=SimpleNamespace(clear=lambda session: None),  # type: ignore[arg-type]
            journal=SimpleNamespace(note=lambda: None), metrics=metrics,  # type: ignore[arg-type]
        )  # fmt: skip
        self.unreachable = 0
        self.sent: list[tuple[int, int, int]] = []  # (session, start, tokens) of every entry

    def close(self) -> None:
        memory = self.device.memory
        assert memory is not None
        self.device._views.clear()
        memory._arena.close()
        for extent in memory.extents._extents.values():
            extent.view.release()
            extent._map.close()
        self.kv.close()
        self.store.close()

    # ------------------------------------------------------------------------------- sessions

    def session(self, key: int) -> Session:
        session = Session(key, f"s{key}", "tenant")
        self.kv.slots.enter(session)
        return session

    def begin(self, session: Session, prompt: Sequence[int], tokens_max: int) -> Turn:
        """Join a turn to the lane, as the engine does it."""
        request = GenerationRequest("r", tuple(prompt), tokens_max, Sampling(), ignore_eos=True)
        generation: Any = SimpleNamespace(
            request=request, request_id="r", arrived_ms=0.0, started_ms=None, lane="",
            completion_tokens=0, first_token_ms=None, last_token_ms=None, full=False,
            cached_tokens=0, add_token=lambda *_: False,
        )  # fmt: skip
        turn = Turn(session, generation, horizon_ms=1e9, tpot_ms=1e9, now_ms=self.seats.now_ms())
        self.kv.slots.protect(session)
        session.rebase(prompt)
        self.kv.slots.fit(session)
        future = self.kv.prefix.extend(session, session.salt, 0)
        if future is not None:
            self.kv.prefix.loaded(session, future.result(20))
        self.seats.wait(turn)
        self.kv.slots.make_reclaimable(session)
        return turn

    def step(self) -> bool:
        """One step of the lane's loop; False if there was nothing to send."""
        self.kv.poll()
        self.kv.sealing.start_seals()
        for session in self.kv.slots.take_changed():
            turn = self.seats.turn_of(session)
            if turn is not None:
                turn.needs_match = True
                self.seats.forget_row(turn)
        plan = scheduler.plan(self.seats.view(self.meter.cost), self.seats.now_ms())
        in_flight = self.steps.prepare(plan)
        for turn in self.seats.turns:
            turn.session.check()
        if in_flight is None:
            return False
        self.sent += [(e.session, e.start, e.n_tokens) for e in in_flight.step.entries]
        done = self.worker._step(0, in_flight.step, in_flight.payload)
        assert isinstance(done, wire.StepDone), done
        self.unreachable += len(done.unreachable)
        check_answer(in_flight, done)
        self.steps.commit(in_flight, done)
        for turn, *_ in in_flight.parts:
            turn.session.check()
        return True

    def run(self, *turns: Turn, until: Callable[[], bool] | None = None) -> None:
        """Step until these turns have ended, or `until` is true."""
        deadline = time.monotonic() + 60
        while any(self.seats.holds(turn) for turn in turns):
            if until is not None and until():
                return
            assert time.monotonic() < deadline, f"it does not end: {turns}"
            if not self.step():
                time.sleep(0.001)

    def say(self, session: Session, prompt: Sequence[int], tokens_max: int) -> list[int]:
        """Run one turn; returns its tokens."""
        self.run(self.begin(session, prompt, tokens_max))
        return session.tokens[len(prompt) :]

    def settle(self) -> None:
        """Step until every full page is sealed."""
        deadline = time.monotonic() + 20
        while self.kv.is_sealing or self.kv.is_busy:
            assert time.monotonic() < deadline
            if not self.step():
                time.sleep(0.001)

    # -------------------------------------------------------------------------------- routes

    def push(self, session: Session, name: str, n_superpages: int = 1, *, new: bool = True) -> None:
        """Hand the session's oldest super-pages over to a peer."""
        kv = session.kv
        refs = kv.sealed[: n_superpages * SUPERPAGE]
        after = kv.held[-1] if kv.held and not new and kv.held[-1].peer == name else None
        self.kv.held.hand_over(session, self.peers.take(name, refs, after))

    def lose(self, name: str) -> None:
        """The peer ends, and every session of the lane looks again, as `recheck` has it do."""
        self.peers.end(name)
        for session in list(self.kv.slots.members.values()):
            if self.kv.invalidation.fall_back(session, only_sealed=False):
                turn = self.seats.turn_of(session)
                if turn is not None:
                    turn.needs_match = True
                    self.seats.forget_row(turn)

    def computed(self, session: Session) -> list[tuple[int, int]]:
        """Ranges of positions that steps computed for the session since the last call, merged."""
        mine = sorted((start, start + n) for key, start, n in self.sent if key == session.key)
        self.sent.clear()
        merged: list[tuple[int, int]] = []
        for start, end in mine:
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged


def fixture(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    for session in made.kv.slots.members.values():
        session.check()
    made.close()
