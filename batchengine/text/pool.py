"""The engine's side of the text processes: a fair queue, deadlines, and replacement.

Owns the processes, starts each when it is first needed, and ends those that break a limit. A
request can cost its own tenant its time limit; it cannot stop the engine, and short texts of
others do not wait behind a long one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from batchengine import errors
from batchengine.child.command import python_command
from batchengine.child.process import ChildProcess
from batchengine.core import BatchEngineError
from batchengine.fair_queue import FairQueue
from batchengine.wire.connection import FrameProtocol
from batchengine.wire.text import (
    BYTES_PER_CPU_S,
    TEXT_LINK,
    Check,
    Done,
    Open,
    Phase,
    Refused,
    TextFrame,
    TextMessage,
    TextRequest,
    problem_of,
)

log = logging.getLogger("batchengine.text")

SHORT_PROCESSES = 2
CHECK_PROCESSES = 2
# Lanes have 10 (`LANE_NICE`). At 0 a tenant's texts make steps of a lane on the same core ten times
# as long, at 8 under three times; at 10 an honest text beside busy lanes takes three times as long.
SHORT_NICE = 8
LONG_NICE = 12  # long texts and grammars leave more to lanes and short texts
SHORT_BYTES_MAX = 256 << 10  # takes some 0.1 s at most unless it is hostile
ATTEMPTS_MAX = 2  # the first loss may be the machine's fault (memory, a killed process)
LINGER_S = 1.0  # between the end of the link and the end of the process


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds of one preparation. The defaults fit a prompt of several million characters.

    What a text costs is bounded in processor time, which a loaded machine does not change.
    """

    cpu_s: int = 5  # and a second for each MiB; of a grammar `process.CHECK_CPU_S`
    wall_s: float = 120.0  # as much again for each MiB; of a process that waits
    idle_s: float = 10.0  # without any processor time: the process is stopped, or waits for nothing
    start_s: float = 30.0  # a cold, loaded machine may take seconds to start an interpreter
    memory_bytes: int = 1 << 30
    output_chars_max: int = 64 << 20


class ProcessLost(Exception):
    """The process ended or broke the protocol; the text describes how."""

    def __init__(
        self, why: str, phase: str, *, is_final: bool = False, is_idle: bool = False
    ) -> None:
        super().__init__(why)
        self.phase = phase
        self.is_final = is_final  # another attempt would take as long
        self.is_idle = is_idle  # it used no processor time: no text is the cause of that


class _Line:
    """Texts that wait in a queue, fair between tenants, for a few processes; one text of each
    tenant is prepared at a time."""

    def __init__(self, workers: list[TextWorker]) -> None:
        self.queue = FairQueue[_Job]()
        self.idle = workers
        self.running: Counter[str] = Counter()  # texts by tenant

    def take(self) -> tuple[TextWorker, _Job] | None:
        """The next text and the process for it; None while one of them is missing."""
        while self.idle:
            job = self.queue.pop(lambda tenant: not self.running[tenant])
            if job is None:
                return None
            if job.answer.done():  # its client has gone
                continue
            # one that runs comes first: starting another takes longer than most requests
            worker = max(self.idle, key=lambda idle: idle.is_running)
            self.idle.remove(worker)
            self.running[job.tenant] += 1
            return worker, job
        return None

    def end(self, job: _Job) -> None:
        """Count a text that has ended."""
        del self.running[job.tenant]


@dataclass(slots=True)
class _Job:
    request: TextRequest
    payload: bytes | memoryview
    tenant: str
    answer: asyncio.Future[bytes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class TextPool:
    """Text processes for short texts; some for grammars and one for long texts, which start with
    the first."""

    def __init__(self, opening: Open, reader: str, limits: TextLimits) -> None:
        short = [TextWorker(opening, reader, limits, SHORT_NICE) for _ in range(SHORT_PROCESSES)]
        long = TextWorker(opening, reader, limits, LONG_NICE)
        check = [TextWorker(opening, "", limits, LONG_NICE) for _ in range(CHECK_PROCESSES)]
        self._all = (*short, long, *check)
        self._first = tuple(short)  # without one of these, most requests are refused
        self._short, self._long, self._check = _Line(short), _Line([long]), _Line(check)
        self._unstarted = ""  # why the last start of a process failed
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def trouble(self) -> str:
        """Why no process for short texts is ready, since the last start of one failed; or ""."""
        is_ready = any(worker.is_ready for worker in self._first)
        return "" if is_ready or self._closed else self._unstarted

    def warm_up(self) -> None:
        """Starts the processes of short texts ahead of the first; a failure shows again there."""
        while self._short.idle:
            self._run(self._start(self._short, self._short.idle.pop()))

    async def call(self, request: TextRequest, payload: bytes | memoryview, tenant: str) -> bytes:
        """The result of one request.

        Raises what the process refuses, TEMPLATE_STOPPED or TEXT_UNUSABLE when the template or
        the tokenizer breaks a limit, TEXT_UNAVAILABLE when no process can be started.
        """
        self._check_open()
        job = _Job(request, payload, tenant)
        line = self._long if len(payload) > SHORT_BYTES_MAX else self._short
        line = self._check if isinstance(request, Check) else line
        line.queue.push(tenant, len(payload) + 1024, job)
        self._dispatch(line)
        try:
            return await job.answer
        finally:
            job.payload = b""  # of a client that left while its request waited

    def _check_open(self) -> None:
        if self._closed:
            raise errors.TEXT_UNAVAILABLE(why="the engine stops")

    async def close(self) -> None:
        """Ends every process; what waits or runs fails. Idempotent."""
        self._closed = True
        for worker in self._all:
            worker.kill("was closed")
        for line in (self._short, self._long, self._check):
            while (job := line.queue.pop()) is not None:
                _fail(job, errors.TEXT_UNAVAILABLE(why="the engine stops"))
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        for worker in self._all:
            await worker.ended()

    def _dispatch(self, line: _Line) -> None:
        while (taken := line.take()) is not None:
            self._run(self._serve(line, *taken))

    async def _start(self, line: _Line, worker: TextWorker) -> None:
        try:
            if not self._closed:
                await self._begin(worker)
        except (BatchEngineError, ProcessLost) as error:
            if not self._closed:
                log.warning("a text process did not start: %s", error)
        finally:
            self._release(line, worker)

    async def _serve(self, line: _Line, worker: TextWorker, job: _Job) -> None:
        try:
            result = await self._attempt(worker, job)
            if not job.answer.done():
                job.answer.set_result(result)
        except BatchEngineError as error:
            _fail(job, error)
        except Exception as error:
            log.exception("a text request failed")
            _fail(job, errors.TOKENIZER_FAILED(why=str(error)))
        finally:
            line.end(job)
            if worker.is_running or self._closed:
                self._release(line, worker)
            else:  # replaced now: the next request should not wait for a start
                self._run(self._start(line, worker))

    async def _attempt(self, worker: TextWorker, job: _Job) -> bytes:
        payload = job.payload
        for attempt in range(1, ATTEMPTS_MAX + 1):
            self._check_open()
            try:
                await self._begin(worker)
            except ProcessLost as lost:
                if self._closed:
                    raise errors.TEXT_UNAVAILABLE(why="the engine stops") from lost
                log.warning("a text process did not start: it %s", lost)
                if attempt == ATTEMPTS_MAX:
                    raise errors.TEXT_UNAVAILABLE(why=f"its process {lost}") from lost
                continue
            self._check_open()  # a process that started meanwhile was not ended
            try:
                return await worker.ask(job.request, payload)
            except ProcessLost as lost:
                if self._closed:
                    raise errors.TEXT_UNAVAILABLE(why="the engine stops") from lost
                log.warning("a text process %s during %s", lost, lost.phase)
                if attempt == ATTEMPTS_MAX or lost.is_final or job.answer.done():
                    row = errors.TEXT_UNAVAILABLE if lost.is_idle else problem_of(lost.phase)
                    raise row(why=f"its process {lost}") from lost
        raise AssertionError("the last attempt returns or raises")

    async def _begin(self, worker: TextWorker) -> None:
        """Start a process unless one runs. Raises as TextWorker.start."""
        try:
            await worker.start()
        except (BatchEngineError, ProcessLost) as error:
            self._unstarted = f"a text process does not start: {error}"
            raise

    def _release(self, line: _Line, worker: TextWorker) -> None:
        line.idle.append(worker)
        if not self._closed:
            self._dispatch(line)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fail(job: _Job, error: BatchEngineError) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)


class TextWorker:
    """One text process at a time, and the frames to and from it; one request in flight."""

    def __init__(self, opening: Open, reader: str, limits: TextLimits, nice: int) -> None:
        self._nice = nice
        self._opening = opening
        self._reader = reader
        self._limits = limits
        self._child: ChildProcess | None = None
        self._protocol: FrameProtocol[TextMessage] | None = None
        self._end: asyncio.Future[str] | None = None  # how the process ended
        self._reply: asyncio.Future[TextFrame] | None = None
        self._phase = ""
        self._is_open = False  # it has read the vocabulary
        self._is_spent = False
        self._used_its_time = False

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.is_running and not self._is_spent

    @property
    def is_ready(self) -> bool:
        """Whether its process has started."""
        return self.is_running and self._is_open

    @property
    def pid(self) -> int:
        """Process id, 0 if there is none."""
        return self._child.process.pid if self._child is not None and self.is_running else 0

    async def start(self) -> None:
        """Starts a process unless one runs. Raises ProcessLost, or what the process refuses."""
        if self.is_running:
            return
        await self.ended()
        await self._spawn()
        await self._exchange(self._opening, b"", self._limits.start_s)
        self._is_open = True

    async def ask(self, request: TextRequest, payload: bytes | memoryview) -> bytes:
        """The payload of the answer. Raises ProcessLost, or what the process refuses."""
        mib = len(payload) / BYTES_PER_CPU_S
        return await self._exchange(request, payload, self._limits.wall_s * (1 + mib))

    def kill(self, why: str) -> None:
        """SIGKILL; the process holds no state."""
        if self._child is not None:
            self._child.kill(why)

    async def ended(self) -> None:
        """Waits until no process is left; one that is not in use is killed."""
        if self._end is not None:
            self.kill("was closed")
            await self._end

    async def _exchange(
        self, message: TextMessage, payload: bytes | memoryview, wall_s: float
    ) -> bytes:
        assert self._protocol is not None
        assert self._end is not None
        self._phase = "its start" if isinstance(message, Open) else "the reading of the request"
        self._reply = asyncio.get_running_loop().create_future()
        self._protocol.send(TEXT_LINK.encode(message, payload))
        try:
            is_idle = await self._wait((self._reply, self._end), wall_s)
            if self._reply.done():
                return self._result(self._reply.result())
            if not self._end.done():
                idle = f"used no processor time for {self._limits.idle_s:.0f} s"
                self.kill(idle if is_idle else f"took longer than {wall_s:.0f} s")
                await self._end
                why, is_final = self._end.result(), not is_idle
                raise ProcessLost(why, self._phase, is_final=is_final, is_idle=is_idle)
            raise ProcessLost(self._end.result(), self._phase, is_final=self._used_its_time)
        except asyncio.CancelledError:
            self.kill("was closed")
            raise
        finally:
            self._reply = None

    async def _wait(self, ends: tuple[asyncio.Future[Any], ...], wall_s: float) -> bool:
        """Waits for one of `ends`, at most `wall_s`; True as soon as the process has used no
        processor time for `idle_s`. One that waits for a processor on a loaded machine uses some.
        """
        assert self._child is not None
        left, used_ns = wall_s, _cpu_ns(self._child.process.pid)
        while left > 0:
            span = min(left, self._limits.idle_s)
            done, _ = await asyncio.wait(ends, timeout=span, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return False
            left -= span
            before, used_ns = used_ns, _cpu_ns(self._child.process.pid)
            if used_ns == before and span == self._limits.idle_s:
                return True
        return False

    def _result(self, frame: TextFrame) -> bytes:
        match frame.message:
            case Done(is_last):
                self._is_spent = is_last
                return bytes(frame.payload)
            case Refused() as refused:
                self._is_spent = refused.is_last
                raise errors.received(
                    refused.code, refused.what, refused.why, refused.fix,
                    param=refused.param, retry_ms=refused.retry_ms, details=refused.details,
                )  # fmt: skip
            case other:
                self.kill(f"answered with {type(other).__name__}")
                raise ProcessLost("broke the protocol", self._phase)

    def _on_frame(self, frame: TextFrame) -> None:
        if isinstance(frame.message, Phase):
            self._phase = frame.message.name
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result(frame)

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            child, sock = self._start_child()
        except OSError as error:
            raise ProcessLost(f"could not be started: {error.strerror}", "its start") from error
        self._child, self._end = child, loop.create_future()
        self._is_open = self._is_spent = False

        def on_lost(_: Exception | None) -> None:  # it exits, or it sent a bad frame
            loop.call_later(LINGER_S, child.kill, "closed its link")

        protocol = self._protocol = FrameProtocol(TEXT_LINK, self._on_frame, on_lost)
        await loop.create_connection(lambda: protocol, sock=sock)

    def _start_child(self) -> tuple[ChildProcess, socket.socket]:
        words = python_command(
            "batchengine.text.process", str(os.getpid()), self._reader, str(self._nice)
        )
        return ChildProcess.start_linked(words, self._on_end)

    def _on_end(self, how: str, status: int) -> None:
        assert self._end is not None
        self._used_its_time = status == -signal.SIGXCPU
        if self._used_its_time:
            how = "used more processor time than it may"
        if self._protocol is not None:
            self._protocol.close()
        self._end.set_result(how)


def _cpu_ns(pid: int) -> int:
    """The processor time that a process has used; 0 once it is reaped.

    The number of its clock is what clock_getcpuclockid(3) returns.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0
