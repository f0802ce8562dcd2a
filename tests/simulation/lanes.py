"""Worker processes as objects: the real worker and page memory, deaths and delays by seed.

Each run of a worker maps its arena and the extents as a process would, and unmaps them when it
dies. Frames are bytes; they arrive after a delay, perhaps when no request waits any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from batchengine.child.process import ChildProcess
from batchengine.core import BatchEngineError
from batchengine.lanes.host_device import Computed
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.lanes.worker_process import Lane
from batchengine.wire import lane as wire
from batchengine.wire.connection import FrameProtocol
from batchengine.wire.frames import Decoder, Payload
from bench.models.hashlm import (
    LAYOUT,
    PAGE_TOKENS,
    POINTS,
    Faults,
    HashDevice,
    HashWorker,
    _offsets,
)
from tests.simulation.far import FarPages, Fetch

if TYPE_CHECKING:
    from tests.simulation.world import World

TRAVEL_S = 0.0002  # of a frame


class Died(BaseException):
    """The process dies at a point inside a step."""

    def __init__(self, by: int) -> None:
        super().__init__(by)
        self.by = by


class Plan(NamedTuple):
    """Duration and outcome of one step of a worker."""

    duration_s: float
    die: str = ""  # one of POINTS
    by: int = signal.SIGKILL
    hang: bool = False
    nan: bool = False
    flip: bool = False  # one bit of the first row comes out differently,
    spread: bool = False  # and so does every row after it


class SimDevice(HashDevice):
    """A HashLM device that dies by raising an exception."""

    def __init__(self, world: World) -> None:
        super().__init__(
            Faults(model=world.model, state_bytes=world.state_bytes, n_tokens=world.n_tokens)
        )
        self.by: int = signal.SIGKILL
        self.flip = self.spread = False
        self.fetch: Fetch | None = None  # what the next step has of the pages of peers

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        """Compute with the pages that were fetched; an entry without them gets wrong rows."""
        if self.fetch is None:
            return super().compute(batch, addresses, seeds)
        kept: list[Any] = [np.zeros(LAYOUT.payload_bytes, np.uint8)]
        unreachable: list[int] = []
        base = 0
        for index, entry in enumerate(batch.entries):
            found = self.fetch.pages.get(index, [])
            if found is None:
                unreachable.append(index)
            far = [page for pages in found or () for page in pages]
            kept += far
            n_held = sum(segment.n_pages for segment in entry.segments)
            far = far if found is not None else [kept[0]] * n_held
            addresses[base : base + n_held] = [page.ctypes.data for page in far]
            base += entry.n_pages
        output, digests = super().compute(batch, addresses, seeds)
        self._views.clear()  # the fetched pages go
        lost = {batch.entries[index].session for index in unreachable}
        rows = tuple(row for row in output.rows if row.session not in lost)
        return replace(output, rows=rows, unreachable=tuple(unreachable)), digests

    def at(self, point: str) -> None:
        if self.dies_at(point):
            raise Died(self.by)

    def _append(
        self, pages: Any, start: int, tokens: list[int], *, is_good: bool = True
    ) -> list[bytes]:
        rows = super()._append(pages, start, tokens, is_good=is_good)
        if self.flip:
            self.flip = False
            page, row = divmod(start, PAGE_TOKENS)
            where = _offsets()[row]
            rows[0] = bytes([rows[0][0] ^ 1]) + rows[0][1:]
            pages[page][where] = np.frombuffer(rows[0], np.uint8)
            if self.spread and len(tokens) > 1:
                rows[1:] = super()._append(pages, start + 1, tokens[1:])
        return rows


class SimHashWorker(HashWorker):
    """Reports the time that its step takes in the simulation."""

    duration_s = 0.0

    def _load(self, load: wire.Load, frame: wire.LaneFrame) -> wire.LaneMessage:
        ready = super()._load(load, frame)
        assert self._limits is not None
        self._limits = replace(self._limits, has_links=load.links is not None)
        return ready

    def _step(self, number: int, step: wire.Step, payload: Payload) -> wire.LaneMessage:
        done = super()._step(number, step, payload)
        if isinstance(done, wire.StepDone):
            us = int(self.duration_s * 1e6)
            done = msgspec.structs.replace(done, elapsed_us=us)
        return done


class SimProcess:
    """One run of a worker; for the lane it is a Popen and a transport at once."""

    def __init__(self, world: World, lane: SimLane) -> None:
        self.world = world
        self.lane = lane
        self.pid = world.next_pid()
        self.status: int | None = None
        self.hung = False
        self._clock = asyncio.get_running_loop()
        self._device = SimDevice(world)
        self._worker = SimHashWorker(self, lane.incarnation, self._device)  # type: ignore[arg-type]
        self._decoder = Decoder(wire.LANE_LINK)
        self._answer = b""
        self._closed = False  # its frames are not read
        self.far = FarPages(self, world.name)
        self._frames = deque[wire.LaneFrame]()  # on their way
        self._last_at = 0.0  # when the last of them arrives
        self._requests = deque[wire.LaneFrame]()  # not yet begun
        self._is_busy = False
        self.protocol = FrameProtocol(wire.LANE_LINK, lane._on_frame, self._on_lost)
        self.protocol.connection_made(self)  # type: ignore[arg-type]

    def _on_lost(self, error: Exception | None) -> None:
        assert self.lane._child is not None
        self.lane._on_lost(self.lane._child, error)

    # ------------------------------------------------------------------------ as a transport

    def write(self, data: bytes) -> None:
        """Accept a frame of the engine; it arrives after a delay, and after those before it."""
        for frame in self._decoder.feed(data):
            is_note = isinstance(frame.message, wire.LinkNote)
            travel_s = self.world.note_s() if is_note else TRAVEL_S
            self._last_at = max(self._last_at, self._clock.time() + travel_s)
            self._frames.append(frame)
            self._clock.call_at(self._last_at, self._arrive)

    def is_closing(self) -> bool:
        return self._closed

    def abort(self) -> None:
        self._closed = True

    def send(self, data: bytes) -> None:
        """Keep the worker's answer; `_execute` determines when it arrives."""
        self._answer += data

    # -------------------------------------------------------------------------- as a process

    def send_signal(self, number: int) -> None:
        self._clock.call_later(self.world.tape("kill").uniform(0.0, 0.004), self.end, -number)

    def wait(self) -> int:
        if self.status is None:
            raise AssertionError("reaped before it ended")
        return self.status

    def end(self, status: int) -> None:
        """The process ends: release its memory, its locks, its end of the link."""
        if self.status is not None:
            return
        self.status = status
        self._unmap()
        if self.lane.abandoned or self.lane.process is not self:
            return
        if self.world.tape("kill").random() < 0.5:
            self.protocol.connection_lost(None)
        self._clock.call_later(self.world.tape("kill").uniform(0.0, 0.003), self.lane.reap)

    @property
    def memory(self) -> HostMemory:
        assert self._device.memory is not None
        return self._device.memory

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do this in a while, if the process lives then."""

        def if_alive() -> None:
            if self.status is None and not self.hung:
                do()

        self._clock.call_later(seconds, if_alive)

    def report(self, event: wire.LaneEvent) -> None:
        """Tell the engine what has happened."""
        data = wire.LANE_LINK.encode(event, incarnation=self.lane.incarnation)

        def deliver() -> None:
            if not self._closed and self.lane.process is self:
                self.protocol.data_received(data)

        self._clock.call_later(TRAVEL_S, deliver)

    def _arrive(self) -> None:
        frame = self._frames.popleft()
        if self.status is not None or self.hung:
            return
        if isinstance(frame.message, wire.LinkNote):
            self.far.take(frame.message)
        else:
            self._requests.append(frame)
            self._next_request()

    def _next_request(self) -> None:
        """Begin a request, once the one before is answered."""
        if self._requests and not self._is_busy:
            self._is_busy = True
            self._begin(self._requests.popleft())

    def _answered(self) -> None:
        self._is_busy = False
        if self.status is None:
            self._next_request()

    def _unmap(self) -> None:
        self.far.kill()
        memory = self._device.memory
        if memory is None:
            return
        self._device.memory = self._worker._memory = None
        self._device._views.clear()
        memory._arena.close()
        for extent in memory.extents._extents.values():
            extent.view.release()
            extent._map.close()

    # -------------------------------------------------------------------------------- frames

    def _begin(self, frame: wire.LaneFrame) -> None:
        if isinstance(frame.message, wire.Shutdown):
            self.end(0)
            return
        plan = Plan(0.02)
        if isinstance(frame.message, wire.Step):
            plan = self.world.plan_step(self.lane, frame)
            self.hung = plan.hang
            if any(entry.segments for entry in frame.message.entries):
                self.far.fetch(frame.message, lambda fetch: self._go_on(frame, plan, fetch))
                return
        self._go_on(frame, plan, None)

    def _go_on(self, frame: wire.LaneFrame, plan: Plan, fetch: Fetch | None) -> None:
        self._clock.call_later(plan.duration_s * 0.6, self._execute, frame, plan, fetch)

    def _execute(self, frame: wire.LaneFrame, plan: Plan, fetch: Fetch | None) -> None:
        if self.status is not None or self.hung:
            return
        device, worker = self._device, self._worker
        at = device.steps + 1
        device.faults = Faults(
            die=plan.die,
            at=at,
            nan_at=at if plan.nan else 0,
            state_bytes=self.world.state_bytes,
            n_tokens=self.world.n_tokens,
        )
        device.flip, device.spread, device.fetch = plan.flip, plan.spread, fetch
        device.by, worker.duration_s, self._answer = plan.by, plan.duration_s, b""
        died: Died | None = None
        try:
            worker._send(self._message(frame), frame)
        except Died as death:
            died = death
        rest_s, answer = plan.duration_s * 0.4, self._answer
        if answer:
            self._clock.call_later(rest_s + TRAVEL_S, self._deliver, answer)
            self._clock.call_later(rest_s, self._answered)
        if died is not None:
            self._clock.call_later(rest_s if answer else 0.0, self.end, -died.by)

    def _message(self, frame: wire.LaneFrame) -> wire.LaneMessage:
        """As `Worker.serve` does it."""
        try:
            return self._worker._answer(frame)
        except BatchEngineError as error:
            fatal = isinstance(frame.message, wire.Load | wire.Attach)
            return wire.Failed(error.code, error.what, error.why, error.fix, fatal)
        except Exception as error:
            self.world.wrong(f"the worker of {self.lane.name} failed: {error!r}")
            return wire.Failed("BE2299", "the worker failed", repr(error), "", True)

    def _deliver(self, data: bytes) -> None:
        if not self._closed and self.lane.process is self:
            self.protocol.data_received(data)
            if self.world.decides("twice"):
                self.protocol.data_received(data)
        elif self.world.faulty and not self.lane.abandoned:  # it was in the socket
            for frame in Decoder(wire.LANE_LINK).feed(data):
                self.lane._on_frame(frame)


class SimLane(Lane):
    """The real lane over a simulated process."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name, command=("simulated",))
        self.world = world
        self.process: SimProcess | None = None
        self.abandoned = False  # the engine was killed
        self._pidfd = -1

    def open_link(self, note: wire.OpenLink, sock: Any) -> None:
        """The worker gets the connection, and this daemon's engine keeps none."""
        if self.process is None or self.process.status is not None:
            raise BrokenPipeError(f"{self!r} has no process")
        end = sock.take()
        end.is_workers = True
        self.process.far.give(note, end)
        self.note(note)

    async def _spawn(self) -> None:
        self.incarnation += 1
        process = self.process = SimProcess(self.world, self)
        self.world.trace("spawn", self.name, self.incarnation)
        self._protocol = process.protocol
        self._report_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._pidfd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._child = ChildProcess(process, self._pidfd, self._on_end)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        self._born, self._born_steps = loop.time(), self.steps
        self._died = loop.create_future()
        await asyncio.sleep(self.world.tape("spawn").uniform(0.01, 0.2))

    def reap(self) -> None:
        """As the pidfd of a real process does when it becomes readable."""
        if self.abandoned or self.process is None or self._child is None:
            return
        self.world.trace("reap", self.name, self.process.wait())
        self._child.reap()

    def post(self, step: wire.Step, payload: bytes, **how: Any) -> Any:
        self.world.on_step(self, step)
        return super().post(step, payload, **how)

    def drop_pending(self, linger_s: float) -> None:
        """The engine was killed: its workers end at once or after a delay."""
        self.abandoned = True
        for fd in (self._report_fd, self._pidfd):
            if self.alive:
                os.close(fd)
        if self._child is not None:
            self._child.is_running = False  # no timer of a killed engine fires
        if self._timer is not None:
            self._timer.cancel()
        process = self.process
        if process is not None and process.status is None:
            process.hung = True
            asyncio.get_running_loop().call_later(linger_s, process.end, -signal.SIGKILL)


__all__ = ["POINTS", "Died", "Plan", "SimLane", "SimProcess"]
