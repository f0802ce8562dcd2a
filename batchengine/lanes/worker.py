"""The lane worker process: map weights and pages, execute Step frames, answer, forget.

Owns the only writable mapping of its arena. Keeps no session state: a step carries everything.
Started by exec as `python -m batchengine.lanes.worker SOCKET_FD PARENT_PID REPORT_FD INCARNATION`;
frames of another incarnation are ignored. Ends when the socket ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable

from batchengine import wire
from batchengine.core import BatchEngineError
from batchengine.lanes.memory import PageMemory
from batchengine.lanes.process import guard_process
from batchengine.lanes.steps import Compute, Limits, ModelFacts, StepBatch, unpack
from kv_store.layout import PageLayout

log = logging.getLogger("batchengine.worker")


class Worker:
    """One worker life: load, attach, then steps until the link closes."""

    def __init__(self, link: wire.BlockingLink, compute: Compute, incarnation: int) -> None:
        self._link = link
        self._compute = compute
        self._incarnation = incarnation
        self._facts: ModelFacts | None = None
        self._limits: Limits | None = None
        self._memory: PageMemory | None = None

    def serve(self) -> None:
        """Answer frames until the engine closes the link or says Shutdown."""
        while (frame := self._link.receive()) is not None:
            if frame.incarnation != self._incarnation:
                continue
            if isinstance(frame.message, wire.Shutdown):
                break
            try:
                answer = self._answer(frame)
            except BatchEngineError as error:
                fatal = isinstance(frame.message, wire.Load | wire.Attach)
                answer = wire.Failed(error.code, error.what, error.why, error.fix, fatal)
            except Exception as error:
                # A defect of ours: the engine kills this process and may blame the step.
                log.exception("worker failed in %s", type(frame.message).__name__)
                answer = wire.Failed("BE2299", "the worker failed", repr(error), "", True)
            self._send(answer, frame)
        self._compute.close()

    def _answer(self, frame: wire.Frame) -> wire.AnyMessage:
        match frame.message:
            case wire.Step() as step:
                return self._step(step, frame.payload)
            case wire.Load() as load:
                return self._load(load, frame)
            case wire.Attach() as attach:
                return self._attach(attach)
            case wire.Ping():
                return wire.Pong()
            case _:
                raise BatchEngineError("BE2202", f"unexpected {type(frame.message).__name__}")

    def _send(self, message: wire.AnyMessage, asked: wire.Frame) -> None:
        self._link.send(
            wire.encode(
                message, step=asked.step, incarnation=self._incarnation, attempt=asked.attempt
            )
        )

    def _load(self, load: wire.Load, frame: wire.Frame) -> wire.AnyMessage:
        def report(stage: str, detail: str, progress: float, seconds: float) -> None:
            self._send(wire.Loading(stage, detail, progress, seconds), frame)

        facts = self._compute.load(load, report)
        self._facts = facts
        self._limits = Limits(
            load.tokens_max, load.entries_max, load.context_tokens, facts.vocab_size
        )
        return wire.Ready(
            pid=os.getpid(),
            arith_id=facts.arith_id,
            isa=facts.isa,
            threads=facts.threads,
            n_layer=facts.n_layer,
            n_kv_head=facts.n_kv_head,
            head_dim=facts.head_dim,
            payload_bytes=facts.payload_bytes,
            identity=facts.identity,
        )

    def _attach(self, attach: wire.Attach) -> wire.AnyMessage:
        if self._facts is None:
            raise BatchEngineError("BE2203", "Attach before Load")
        if self._memory is not None:
            raise BatchEngineError("BE2204", "this worker is already attached")
        facts = self._facts
        layout = PageLayout(facts.n_layer, facts.n_kv_head, facts.head_dim)
        if layout.payload_bytes != facts.payload_bytes:
            raise BatchEngineError("BE2206", "kernels and store disagree about the page layout")
        self._memory = PageMemory(attach, layout)
        return wire.Attached(attach.places)

    def _step(self, step: wire.Step, payload: bytes) -> wire.AnyMessage:
        memory, limits = self._memory, self._limits
        if memory is None or limits is None:
            raise BatchEngineError("BE2205", "Step before Attach")
        started = time.perf_counter_ns()
        batch = unpack(step, payload, limits)
        memory.check(step)
        adopted = self._prepare(memory, step, batch)
        rows: tuple[wire.Row, ...] = ()
        poisoned: tuple[int, ...] = ()
        forward_us = 0
        if batch.entries:
            addresses = memory.addresses(batch.codes)
            own = memory.rows_of(batch)
            before = time.perf_counter_ns()
            output = self._compute.run(batch, addresses, own.seeds)
            forward_us = (time.perf_counter_ns() - before) // 1000
            memory.record_rows(batch, own, output)
            rows, poisoned = output.rows, output.poisoned
        digests = tuple(memory.digest_place(digest) for digest in step.digest)
        verified = tuple(memory.is_sealed(v) for v in step.verify)
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return wire.StepDone(rows, poisoned, digests, verified, elapsed_us, forward_us, adopted)

    def _prepare(self, memory: PageMemory, step: wire.Step, batch: StepBatch) -> tuple[int, ...]:
        """The chores before the computation, in their order; what each Adopt yielded."""
        for place in step.poison:
            memory.poison(place)
        for fresh in step.reserve:
            memory.reserve(fresh)
        for retitle in step.retitle:
            memory.retitle(retitle)
        adopted = memory.adopt(step.adopt, batch.adopted)
        memory.touch(step.touch)
        return adopted


def main(make_compute: Callable[[], Compute], worker: type[Worker] = Worker) -> None:
    """Entry of the process; `make_compute` is called after the process is guarded."""
    socket_fd, parent_pid, report_fd, incarnation = (int(a) for a in sys.argv[1:5])
    guard_process(parent_pid, report_fd)
    link = wire.BlockingLink(socket.socket(fileno=socket_fd))
    with contextlib.suppress(ConnectionError, wire.Truncated):  # the engine was killed
        worker(link, make_compute(), incarnation).serve()
    link.close()


def _cpu() -> Compute:
    from batchengine.lanes.cpu import CpuCompute

    return CpuCompute()


if __name__ == "__main__":
    main(_cpu)
