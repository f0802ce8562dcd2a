"""The lane worker process: map weights and pages, execute Step frames, answer.

Owns the only writable mapping of its arena. Keeps no session state: a step carries everything, but
for tokens that the step before it has sampled, and rows that the device stores late.
Started by exec as `python -m batchengine.lanes.worker SOCKET_FD PARENT_PID REPORT_FD FILES_FD
INCARNATION`; sockets of data links come by FILES_FD. Frames of another incarnation are ignored.
Ends when the socket ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batchengine import errors
from batchengine.child import confinement
from batchengine.core import BatchEngineError
from batchengine.lanes.device import Device, LaneMemory, StartedStep
from batchengine.lanes.process_guard import guard_process
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.state_memory import check_states
from batchengine.lanes.step_input import (
    Mask,
    MaskKey,
    StepInput,
    StepLimits,
    StepOutput,
    take_samples,
    unpack,
    written_slots,
)
from batchengine.wire import lane as wire
from batchengine.wire.frames import BlockingLink, Payload, Truncated
from kernels.cuda.gpu import GpuFault
from kv_store.layout import PageLayout

log = logging.getLogger("batchengine.worker")

NO_OUTPUT = StepOutput((), ())  # of a step that has chores only
IDLE_MS = 50.0  # after so long without a frame a device does what it has put off
POLL_S = 5e-5  # between two looks for a frame, or the tokens of a step
MASK_WAIT_S = 0.02  # for masks that are late, in a step: other entries wait too


def _cpu() -> Device:
    from batchengine.lanes.cpu import CpuDevice  # only the device of this worker is imported

    return CpuDevice()


def _cuda() -> Device:
    from batchengine.lanes.gpu.device import CudaDevice

    return CudaDevice()


class BegunStep(NamedTuple):
    """A step whose chores before the computation are done; `imported`, `states`: their answers."""

    number: int
    step: wire.Step
    batch: StepInput
    imported: tuple[int, ...]
    states: tuple[bool, ...]
    started: StartedStep | None  # None: it has no entries


class RefusedStep(NamedTuple):
    """A step that was refused when it was begun early. The error is its answer, in its turn."""

    number: int
    error: BatchEngineError


MaskOfStep = tuple[int, MaskKey]  # number of the step, and which mask of it
Devices = Mapping[type[wire.Resources], Callable[[], Device]]
DEVICES: Devices = {wire.CpuResources: _cpu, wire.CudaResources: _cuda}


class Worker:
    """One run of a worker: load, attach, then steps until the link closes.

    `devices` makes the device that a Load names by the type of its resources. `on_loaded` is called
    once: in a process of its own, the worker then gives up what only loading needs. `files` is
    where the sockets of data links come from; without it the worker has no links.
    """

    def __init__(
        self, link: BlockingLink[wire.LaneMessage], incarnation: int, devices: Devices = DEVICES
    ) -> None:
        self.on_loaded: Callable[[], str] = lambda: ""
        self.files: socket.socket | None = None
        self._link = link
        self._incarnation = incarnation
        self._devices = devices
        self._device: Device | None = None
        self._facts: wire.ModelFacts | None = None
        self._limits: StepLimits | None = None
        self._memory: LaneMemory | None = None
        self._links: DataLinks | None = None
        self._ring: Ring | None = None
        self._received: deque[wire.LaneFrame | None] = deque()  # during a step, not yet answered
        self._begun: BegunStep | RefusedStep | None = None  # the step of the oldest of those
        self._sampled: dict[int, int] = {}  # session -> token, by the last step
        self._masks: dict[MaskOfStep, bytes] = {}

    def serve(self) -> None:
        """Answer frames until the engine closes the link or sends Shutdown."""
        while (frame := self._next()) is not None:
            if frame.incarnation != self._incarnation:
                continue
            if isinstance(frame.message, wire.Shutdown):
                break
            try:
                answer = self._answer(frame)
            except BatchEngineError as error:
                fatal = isinstance(frame.message, wire.Load | wire.Attach)
                answer = _failed(error, fatal)
            except GpuFault as error:
                self._store_deferred()
                answer = _failed(errors.GPU_FAILED(why=str(error)), True)
            except Exception as error:
                # A defect of this program: the engine kills the process and may blame the step.
                log.exception("worker failed in %s", type(frame.message).__name__)
                answer = _failed(errors.WORKER_FAILED(defect=repr(error)), True)
            self._send(answer, frame)
        if self._device is not None:
            self._device.close()

    def _store_deferred(self) -> None:
        """Do what the device has put off, before the engine ends this worker: rows of steps that
        were answered need not be computed again."""
        try:
            is_left = self._device is not None
            while self._device is not None and is_left:
                is_left = self._device.do_deferred()
        except Exception:
            log.exception("rows that waited are not stored")

    def _next(self) -> wire.LaneFrame | None:
        """The next request; data links are served until it comes."""
        while not self._received:
            if self._ring is None:
                wait_ms = IDLE_MS
                while self._device is not None and not self._is_readable(wait_ms):
                    if not self._device.do_deferred():
                        break
                    wait_ms = 0.0
                self._receive()
            else:
                self._ring.poll(None)
        return self._received.popleft()

    def _on_engine(self) -> None:
        """Take one frame from the engine, also while a step runs: its notes take effect at once.

        The payload of the step stays, also when the next step comes.
        """
        if not self._received:
            self._receive()

    def _receive(self) -> None:
        """Take one frame from the engine: notes take effect, others wait in `_received`."""
        frame = self._link.receive()
        is_own = frame is not None and frame.incarnation == self._incarnation
        if frame is not None and isinstance(frame.message, wire.Mask):
            if is_own:
                key = frame.message.session, frame.message.position
                self._masks[frame.step, key] = frame.message.bits
        elif (
            self._ring is not None
            and frame is not None
            and isinstance(frame.message, wire.LinkNote)
        ):
            if is_own:
                self._ring.take(frame.message)
        else:
            self._received.append(frame)

    def _is_readable(self, within_ms: float) -> bool:
        """Whether something of a frame has come, or comes within so long."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        return bool(poll.poll(within_ms))

    def _wait_masks(
        self, number: int, found: dict[MaskKey, Mask | None], keys: Sequence[MaskKey | None]
    ) -> list[Mask | None]:
        """Masks of the step of this number. Those that do not come in time are late: None. `found`
        holds those of the step from then on: it may ask again, when it is computed again."""
        wanted = {key for key in keys if key is not None} - found.keys()
        missing, end_s = {(number, key) for key in wanted}, time.monotonic() + MASK_WAIT_S
        while missing := missing - self._masks.keys():
            left_ms = (end_s - time.monotonic()) * 1000
            if left_ms <= 0 or not self._is_readable(left_ms) or None in self._received:
                break
            self._receive()
        found.update({key: self._mask(self._masks.pop((number, key), b"")) for key in wanted})
        return [None if key is None else found[key] for key in keys]

    def _mask(self, bits: bytes) -> Mask | None:
        """A mask as the kernels take it; None if it does not fit the vocabulary."""
        vocab = self._facts.vocab_size if self._facts is not None else 0
        if not bits or len(bits) > 4 * -(-vocab // 32) or len(bits) % 4:
            return None
        words = np.zeros(-(-vocab // 32), np.uint32)
        words[: len(bits) // 4] = np.frombuffer(bits, np.uint32)
        if vocab % 32:
            words[-1] &= np.uint32((1 << vocab % 32) - 1)
        return words if words.any() else None

    def _report(self, event: wire.LaneEvent) -> None:
        self._link.send(wire.LANE_LINK.encode(event, incarnation=self._incarnation))

    def _answer(self, frame: wire.LaneFrame) -> wire.LaneMessage:
        match frame.message:
            case wire.Step() as step:
                return self._step(frame.step, step, frame.payload)
            case wire.StageStep() as stage if self._ring is not None:
                return self._ring.stages.step(stage, frame.payload)
            case wire.Load() as load:
                return self._load(load, frame)
            case wire.Attach() as attach:
                return self._attach(attach)
            case wire.Ping():
                return wire.Pong(dict(self._ring.counts) if self._ring is not None else {})
            case _:
                raise errors.FRAME_UNEXPECTED(message=type(frame.message).__name__)

    def _send(self, message: wire.LaneMessage, asked: wire.LaneFrame) -> None:
        self._link.send(
            wire.LANE_LINK.encode(message, step=asked.step, incarnation=self._incarnation)
        )

    def _load(self, load: wire.Load, frame: wire.LaneFrame) -> wire.LaneMessage:
        def report(stage: str, detail: str, progress: float, seconds: float) -> None:
            self._send(wire.Loading(stage, detail, progress, seconds), frame)

        device = self._device = self._devices[type(load.device)]()
        facts = self._facts = device.load(load, report)
        if load.links is not None and self.files is not None:
            self._links = DataLinks(
                load.links, self.files, self._link.fileno(), self._report, load.device.spin_us
            )
        self._limits = StepLimits(
            load.tokens_max,
            load.entries_max,
            load.context_tokens,
            facts.vocab_size,
            self._links is not None,
        )
        return wire.Ready(facts, self.on_loaded())

    def _attach(self, attach: wire.Attach) -> wire.LaneMessage:
        device, facts = self._device, self._facts
        if device is None or facts is None:
            raise errors.ATTACH_BEFORE_LOAD()
        if self._memory is not None:
            raise errors.ATTACHED_TWICE()
        layout = PageLayout(facts.layers)
        if (layout.payload_bytes, attach.state_bytes) != (facts.payload_bytes, facts.state_bytes):
            raise errors.LAYOUT_DISAGREES()
        self._memory = device.attach(attach, layout)
        if self._links is not None:
            self._ring = device.connect(self._links)
            self._ring.on_engine = self._on_engine
            self._ring.report = self._report
        return wire.Attached(attach.slots)

    def _step(self, number: int, step: wire.Step, payload: Payload) -> wire.LaneMessage:
        memory, started = self._memory, time.perf_counter_ns()
        begun, self._begun = self._begun, None
        if begun is None or begun.number != number:
            begun = self._begin(number, step, payload)
        self._sampled = {}  # a step behind one that fails has none to take
        if isinstance(begun, RefusedStep):
            raise begun.error
        output = NO_OUTPUT
        if begun.started is not None:
            self._sampled = self._tokens_of(begun, begun.started)
            self._begin_next(begun)
            output = begun.started.finish()
        if memory is None:
            raise errors.STEP_BEFORE_ATTACH()
        digests, verified = memory.finish(step)
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return wire.StepDone(
            output.rows,
            output.nonfinite,
            digests,
            verified,
            elapsed_us - output.waited_us,
            begun.imported,
            output.unreachable,
            output.waited_us,
            output.unmasked,
            output.scores,
            begun.states,
        )

    def _tokens_of(self, begun: BegunStep, started: StartedStep) -> dict[int, int]:
        """The tokens of a step, once they are there. The next step is begun meanwhile, if it comes
        and the device can feed it."""
        started.sample()
        if self._device is not None and self._device.overlaps and started.may_be_followed:
            self._begin_next(begun, started)
            while self._begun is None and not self._received and not started.is_computed:
                self._begin_next(begun, started)
                time.sleep(POLL_S)
        of_unknown = {begun.batch.entries[index].session for index in begun.batch.untaken}
        tokens = started.tokens().items()
        sampled = {session: token for session, token in tokens if session not in of_unknown}
        if isinstance(self._begun, BegunStep):
            take_samples(self._begun.batch, sampled)
        return sampled

    def _begin(
        self, number: int, step: wire.Step, payload: Payload, after: StartedStep | None = None
    ) -> BegunStep:
        """Check a step, do the chores before it, and start it. after: the step before, if its
        tokens are not known yet. Raises BatchEngineError."""
        device, memory, limits = self._device, self._memory, self._limits
        if device is None or memory is None or limits is None:
            raise errors.STEP_BEFORE_ATTACH()
        sampled: Mapping[int, int] = {}
        if after is None:
            sampled, self._sampled = self._sampled, {}
        batch = unpack(step, payload, limits)
        # Masks of steps before this one came too late.
        self._masks = {key: bits for key, bits in self._masks.items() if key[0] >= number}
        batch.masks = functools.partial(self._wait_masks, number, {})
        if after is None:
            take_samples(batch, sampled)
        memory.check(step)
        check_states(step, memory.states.n_slots)
        if self._ring is not None:
            self._ring.stages.reused(step)
        imported = memory.prepare(step, batch.imported)
        states = memory.states.move(step)
        started = device.start(batch, after) if batch.entries else None
        return BegunStep(number, step, batch, imported, states, started)

    def _begin_next(self, begun: BegunStep, after: StartedStep | None = None) -> None:
        """Begin the next step if its frame has come and `_may_begin_early` allows it. The device
        computes it while this process finishes `begun`. after: see `_begin`."""
        if self._device is None or not self._device.overlaps or self._begun is not None:
            return
        while not self._received and self._is_readable(0):
            self._receive()
        frame = self._received[0] if self._received else None
        if frame is None or frame.incarnation != self._incarnation:
            return
        step = frame.message
        if isinstance(step, wire.Step) and _may_begin_early(step, begun):
            try:
                self._begun = self._begin(frame.step, step, frame.payload, after)
            except BatchEngineError as error:
                self._begun = RefusedStep(frame.step, error)


def _may_begin_early(step: wire.Step, begun: BegunStep) -> bool:
    """Whether `step` has entries, and no chore of it before the computation changes a slot that
    `begun` writes or digests."""
    if not step.entries or step.relabel or step.import_rows or step.load_states:
        return False
    changed = {*step.poison, *(slot.slot for slot in step.reserve)}
    digested = {of.slot for of in begun.step.digest}
    return not changed or changed.isdisjoint(digested.union(written_slots(begun.batch)))


def _confine() -> str:
    if why := confinement.confine():
        log.warning("this worker may use every system call: %s", why)
    return why


def _failed(error: BatchEngineError, fatal: bool) -> wire.Failed:
    return wire.Failed(error.code, error.what, error.why, error.fix, fatal)


def main(make_worker: Callable[[BlockingLink[wire.LaneMessage], int], Worker] = Worker) -> None:
    """Entry of the process; `make_worker` is called once the process is guarded."""
    socket_fd, parent_pid, report_fd, files_fd, incarnation = (int(a) for a in sys.argv[1:6])
    guard_process(parent_pid, report_fd)
    link = BlockingLink(socket.socket(fileno=socket_fd), wire.LANE_LINK)
    with contextlib.suppress(ConnectionError, Truncated):  # the engine was killed
        worker = make_worker(link, incarnation)
        worker.files = socket.socket(fileno=files_fd)
        worker.on_loaded = _confine
        worker.serve()
    link.close()


if __name__ == "__main__":
    main()
