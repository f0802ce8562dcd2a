"""The engine's end of a lane: spawns the worker, exchanges frames, reports its exit, restarts it.

Owns the worker process, its socket and its incarnation. An exit gives one `LaneDied` and a reaped
process; the engine decides what follows for sessions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from batchengine import errors
from batchengine.child.command import python_command
from batchengine.child.process import ChildProcess
from batchengine.wire import lane as wire
from batchengine.wire.connection import FrameProtocol
from batchengine.wire.frames import WireError

log = logging.getLogger("batchengine.lane")

WORKER = python_command("batchengine.lanes.worker")
BACKOFF_S = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)  # first restart at once: a stream is waiting
LATE_S = 0.1  # an event loop that is later than this was stopped or blocked itself
LINGER_S = 1.0  # between the end of the socket and the end of the process
OUTSIDE_DEATHS_MAX = 4  # SIGKILL from outside is no crash loop: the backoff stays within 1 s
HEALTHY_S = 60.0  # a run this long resets the count of `deaths`,
HEALTHY_STEPS = 16  # and so does a run of so many steps
REPORT_BYTES_MAX = 8192  # of a fatal-signal report kept for the log
REQUESTS_MAX = 3  # two steps may be sent while the worker computes the one before
CLOSED = "was closed"
LOADING_SILENCE_S = 60.0  # without a Loading frame, after which a worker that loads is killed


class LaneDied(Exception):
    """The worker ended or was killed; it has been reaped. The step in flight has no result.

    `blames_step`: the step in flight may be the cause. A SIGKILL from outside (an operator, the
    OOM killer: a worker's memory does not depend on what it computes) does not blame it.
    """

    def __init__(self, lane: str, reason: str, report: str = "", blames_step: bool = True) -> None:
        super().__init__(f"worker of lane {lane} {reason}")
        self.reason = reason
        self.report = report
        self.blames_step = blames_step


class LaneRequest(NamedTuple):
    """A request in flight: the number of its frame, the future for its answer, and the time that
    the worker has once it has answered the request before."""

    number: int
    reply: asyncio.Future[wire.LaneMessage]
    deadline_s: float


class Lane:
    """One worker at a time, and the frames to and from it: REQUESTS_MAX requests in flight at
    most, which the worker answers in order."""

    def __init__(self, name: str, *, command: Sequence[str] = WORKER) -> None:
        self.name = name
        self.incarnation = 0
        self.deaths = 0
        self.steps = 0
        self.facts: wire.ModelFacts | None = None
        self.frames_late = 0  # that were ignored: no request waits for them
        self.unconfined = ""  # why the worker may use every system call, or ""
        self.on_event: Callable[[wire.LaneEvent], None] = lambda event: None
        self.is_attached = False  # the worker has its arena: it takes steps and notes
        self.on_attached: Callable[[], None] = lambda: None  # called when `is_attached` changes
        self.signal = asyncio.Event()  # set when the worker has ended; the lane's loop waits for it
        self._command = tuple(command)
        self._child: ChildProcess | None = None
        self._report_fd = -1
        self._files: socket.socket | None = None
        self._protocol: FrameProtocol[wire.LaneMessage] | None = None
        self._requests: deque[LaneRequest] = deque()  # in flight, oldest first
        self._timer: asyncio.TimerHandle | None = None  # of the oldest
        self._on_loading: Callable[[wire.Loading], None] | None = None
        self._is_blameless = False  # the worker is killed, and its step is not the cause
        self._is_closing = False  # the worker was asked to end
        self._died: asyncio.Future[LaneDied] | None = None
        self._step = 0
        self._born = 0.0
        self._born_steps = 0

    def __repr__(self) -> str:
        state = "up" if self.alive else "down"
        return f"<Lane {self.name} {state} incarnation={self.incarnation} steps={self.steps}>"

    @property
    def alive(self) -> bool:
        return self._died is not None and not self._died.done()

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 if there is none."""
        return self._child.process.pid if self._child is not None and self.alive else 0

    async def start(
        self, load: wire.Load, on_loading: Callable[[wire.Loading], None] | None = None
    ) -> wire.ModelFacts:
        """Spawn the next incarnation and load the model. Raises LaneDied or the load error.

        Each Loading frame extends the deadline of the load.
        """
        if self.alive:
            raise RuntimeError(f"{self!r} is already running")
        await self._spawn()
        self._on_loading = on_loading
        try:
            answer = await self._ask(load, b"", LOADING_SILENCE_S)
        finally:
            self._on_loading = None
        if not isinstance(answer, wire.Ready):
            raise await self._unexpected(answer)
        self.facts, self.unconfined = answer.facts, answer.unconfined
        return answer.facts

    async def attach(self, attach: wire.Attach, deadline_s: float = 60.0) -> None:
        """Have the worker map its arena; steps may start afterwards."""
        answer = await self._ask(attach, b"", deadline_s)
        if not isinstance(answer, wire.Attached):
            raise await self._unexpected(answer)
        self.is_attached = True
        self.on_attached()

    def post(self, step: wire.Step, payload: bytes, *, deadline_s: float) -> LaneRequest:
        """Send one step; `answer` waits for its result."""
        return self._send(step, payload, deadline_s)

    async def answer(self, request: LaneRequest) -> wire.StepDone:
        """Wait for the answer to a step. Past its deadline the worker is killed: LaneDied.
        BatchEngineError if the worker refuses the step."""
        got = await self._receive(request)
        if isinstance(got, wire.StepDone):
            self.steps += 1
            return got
        if isinstance(got, wire.Failed):
            raise errors.received(got.code, got.what, got.why, got.fix)
        raise await self._unexpected(got)

    async def run(self, step: wire.Step, payload: bytes, *, deadline_s: float) -> wire.StepDone:
        """Send one step and wait for its result: `post` and `answer`."""
        return await self.answer(self.post(step, payload, deadline_s=deadline_s))

    async def run_stage(
        self, step: wire.StageStep, payload: bytes, *, deadline_s: float
    ) -> wire.StageDone:
        """Send one step of a pipeline's stage and wait for its result; errors as of `answer`."""
        got = await self._receive(self._send(step, payload, deadline_s))
        if isinstance(got, wire.StageDone):
            return got
        if isinstance(got, wire.Failed):
            raise errors.received(got.code, got.what, got.why, got.fix)
        raise await self._unexpected(got)

    def open_link(self, note: wire.OpenLink, sock: socket.socket) -> None:
        """Give a connected socket to the worker as a data link; the socket stays the caller's.

        `on_event` has how it went. Raises OSError when the worker has ended or takes no more.
        """
        if self._files is None:
            raise BrokenPipeError(f"{self!r} has no process")
        socket.send_fds(self._files, [note.token], [sock.fileno()])
        self.note(note)

    def note(self, note: wire.LinkNote | wire.Mask, step: int = 0) -> None:
        """Send what the worker does at once, even while it computes a step. step: the number of the
        step that a mask is for."""
        if self._protocol is not None:
            frame = wire.LANE_LINK.encode(note, step=step, incarnation=self.incarnation)
            self._protocol.send(frame)

    def kill(self, reason: str, *, blames_step: bool = True) -> None:
        """SIGKILL the worker; `died` resolves once it is reaped or given up."""
        if self._child is not None:
            self._is_blameless = not (blames_step or self._child.kill_reason)
            self._child.kill(reason)

    async def died(self) -> LaneDied:
        """Wait for the end of the current worker."""
        if self._died is None:
            return LaneDied(self.name, "was never started", blames_step=False)
        return await asyncio.shield(self._died)

    def backoff_s(self) -> float:
        """Seconds to wait before the next start."""
        return BACKOFF_S[min(max(self.deaths - 1, 0), len(BACKOFF_S) - 1)]

    async def close(self, grace_s: float = 2.0) -> None:
        """End the worker: ask, then kill; returns when it is reaped."""
        if self._child is None or not self.alive:
            return
        self._is_closing = True
        if self._protocol is not None:
            self._protocol.send(
                wire.LANE_LINK.encode(wire.Shutdown(), incarnation=self.incarnation)
            )
        try:
            await asyncio.wait_for(self.died(), grace_s)
        except TimeoutError:
            self.kill(CLOSED)
            await self.died()

    # ------------------------------------------------------------------------- one request

    async def _ask(
        self, message: wire.LaneMessage, payload: bytes, deadline_s: float
    ) -> wire.LaneMessage:
        return await self._receive(self._send(message, payload, deadline_s))

    def _send(self, message: wire.LaneMessage, payload: bytes, deadline_s: float) -> LaneRequest:
        """Put one frame on the link; the future ends with the answer or LaneDied."""
        if len(self._requests) >= REQUESTS_MAX:
            raise RuntimeError(f"{self!r} has {REQUESTS_MAX} requests in flight")
        self._step += 1
        reply = asyncio.get_running_loop().create_future()
        request = LaneRequest(self._step, reply, deadline_s)
        if self._died is None or self._protocol is None:
            reply.set_exception(LaneDied(self.name, "was never started", blames_step=False))
            return request
        if self._died.done():
            reply.set_exception(self._died.result())
            return request
        self._requests.append(request)
        if len(self._requests) == 1:
            self._set_deadline(deadline_s)
        frame = wire.LANE_LINK.encode(
            message, payload, step=self._step, incarnation=self.incarnation
        )
        self._protocol.send(frame)
        return request

    def _set_deadline(self, deadline_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_s = time.monotonic() + deadline_s
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(deadline_s, self._overdue, deadline_s, due_s, False)

    def _overdue(self, deadline_s: float, due_s: float, is_last: bool) -> None:
        """Kill the worker whose deadline passed, unless this process itself was late.

        An engine that was stopped (SIGSTOP, a frozen machine) runs its timers before it reads the
        answers, and the worker may have been stopped with it: the deadline is extended once by the
        time that the timer is late, up to a whole deadline.
        """
        if not self._requests:
            return
        late_s = time.monotonic() - due_s
        if is_last or late_s <= LATE_S:
            self.kill(f"missed a deadline of {deadline_s:.0f} s")
            return
        log.warning(
            "lane %s: the engine ran %.1f s late: its worker gets more time", self.name, late_s
        )
        more_s = min(late_s, deadline_s)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(more_s, self._overdue, deadline_s, due_s, True)

    async def _receive(self, request: LaneRequest) -> wire.LaneMessage:
        try:
            return await request.reply
        finally:
            if request in self._requests:
                self._remove(request)

    def _remove(self, request: LaneRequest) -> None:
        """Forget a request; the time of the next one begins."""
        self._requests.remove(request)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._requests:
            self._set_deadline(self._requests[0].deadline_s)

    def _on_frame(self, frame: wire.LaneFrame) -> None:
        is_current = frame.incarnation == self.incarnation  # else its worker was given up
        if is_current and isinstance(frame.message, wire.LaneEvent):
            self.on_event(frame.message)
            return
        first = self._requests[0] if self._requests else None
        if not is_current or first is None or frame.step != first.number or first.reply.done():
            self.frames_late += 1
            return
        if not isinstance(frame.message, wire.Loading):
            self._remove(first)
            first.reply.set_result(frame.message)
            return
        if self._timer is not None:
            self._set_deadline(LOADING_SILENCE_S)
        if self._on_loading is not None:
            self._on_loading(frame.message)

    async def _unexpected(self, answer: wire.LaneMessage) -> Exception:
        if isinstance(answer, wire.Failed):
            self.kill(f"reported {answer.code}")
            await self.died()
            return errors.received(answer.code, answer.what, answer.why, answer.fix)
        self.kill(f"answered with {type(answer).__name__}")
        return await self.died()

    # ------------------------------------------------------------------------ start and end

    async def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        self.incarnation += 1
        ours, theirs = socket.socketpair()
        files, files_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files.setblocking(False)
        report_read, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._child = ChildProcess.start(
                [
                    *self._command,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(report_write),
                    str(files_end.fileno()),
                    str(self.incarnation),
                ],
                self._on_end,
                pass_fds=(theirs.fileno(), report_write, files_end.fileno()),
                stdin=subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            files.close()
            os.close(report_read)
            raise
        finally:
            theirs.close()
            files_end.close()
            os.close(report_write)
        self._files = files
        self._report_fd = report_read
        self._born = time.monotonic()
        self._born_steps = self.steps
        self._died = loop.create_future()
        self._is_blameless = self._is_closing = False
        child = self._child
        protocol = FrameProtocol(
            wire.LANE_LINK, self._on_frame, lambda error: self._on_lost(child, error)
        )
        self._protocol = protocol
        await loop.create_connection(lambda: protocol, sock=ours)

    def _on_lost(self, child: ChildProcess, error: Exception | None) -> None:
        """The socket of a worker ended: it exits, which its pidfd reports, or it sent a bad frame.

        One that has ended may have a successor by now, which goes on.
        """
        if not child.is_running:
            return
        if isinstance(error, WireError):
            self.kill(f"sent a bad frame ({error})")
        else:
            loop, why = asyncio.get_running_loop(), "closed its link but lived on"
            loop.call_later(LINGER_S, child.kill, why)

    def _on_end(self, reason: str, status: int) -> None:
        child, died = self._child, self._died
        if child is None or died is None:
            return
        report = _read_report(self._report_fd)
        os.close(self._report_fd)
        if self._files is not None:
            self._files.close()
            self._files = None
        if self._protocol is not None:
            self._protocol.close()
        long = time.monotonic() - self._born > HEALTHY_S
        if long or self.steps - self._born_steps >= HEALTHY_STEPS:
            self.deaths = 0
        outside = status == -signal.SIGKILL and (not child.kill_reason or self._is_blameless)
        if not outside or self.deaths < OUTSIDE_DEATHS_MAX:
            self.deaths += 1
        if self._is_closing and not child.kill_reason:
            reason = CLOSED  # it ended as it was asked
        death = LaneDied(self.name, reason, report, blames_step=not outside)
        if not self._is_closing:
            log.warning("%s (pid %d)%s", death, child.process.pid, f"\n{report}" if report else "")
        died.set_result(death)
        self.is_attached = False
        self.on_attached()
        while self._requests:
            request = self._requests.popleft()
            if not request.reply.done():
                request.reply.set_exception(death)
                request.reply.exception()  # retrieved: only the oldest one has a reader
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.signal.set()


def _read_report(fd: int) -> str:
    """The text a fatal-signal handler left in the pipe; empty for SIGKILL."""
    try:
        return os.read(fd, REPORT_BYTES_MAX).decode("utf-8", "replace").strip()
    except BlockingIOError:
        return ""
