"""The parent's side of a chat template: one killable child process, limits, clear errors.

Owns the child: starts it by exec, feeds it, waits a bounded time, kills it when it breaks a
limit, and starts the next one for the next request. Blocking; call it from one worker thread.
A template can cost one request its time limit. It cannot stop the daemon, and it never sees the
daemon's memory, environment or files.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError

# The template of files without one.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 20
# One loss may be caused by the machine (memory, a killed process); a second one in a row is
# attributed to the template.
_COMPILES_LOST_MAX = 2


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Bounds of one rendering. The defaults fit a prompt of several million characters."""

    wall_s: float = 5.0
    cpu_s: int = 5  # in case the parent itself cannot watch the clock
    start_s: float = 20.0  # a cold, loaded machine may take seconds to start an interpreter
    address_bytes: int = 1 << 30
    input_bytes_max: int = 64 << 20
    output_bytes_max: int = 64 << 20


class _Answer(msgspec.Struct):
    ok: str | None = None
    error: str = ""
    text: str = ""


class _ChildLost(Exception):
    """The child ended or broke the protocol; the text describes how."""


class _ChildKilled(_ChildLost):
    """SIGKILL from outside; a limit of its own ends a child with another signal."""


class ChatTemplate:
    """Renders chats with one template; the child starts on first use or by `start`."""

    def __init__(
        self,
        source: str | None,
        *,
        limits: TemplateLimits | None = None,
        today: datetime.date | None = None,
    ) -> None:
        """`source` None = the file brings none: ChatML is used and `warning` is set.

        `today` is what templates see as the date. It is fixed for the lifetime of this object,
        since a prompt that changes at midnight would lose every shared prefix.
        """
        self.source = CHATML if source is None else source
        self.warning = (
            "the model file has no chat template; using ChatML, which it may not understand"
            if source is None
            else None
        )
        self.limits = limits or TemplateLimits()
        self._today = (today or datetime.date.today()).isoformat()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._broken: BatchEngineError | None = None
        self._compiles_lost = 0
        self._encoder = msgspec.json.Encoder()

    def start(self) -> None:
        """Start the child and compile the template ahead of the first request.

        TEMPLATE_BROKEN when the template does not compile; later calls raise it without a child.
        """
        with self._lock:
            self._ready()

    def render(
        self, chat: Mapping[str, object], variables: Mapping[str, object] | None = None
    ) -> str:
        """The prompt of `chat`, which holds messages and perhaps tools; `variables` are others.

        MESSAGES_REFUSED when the template refuses the messages, TEMPLATE_FAILED when it fails,
        TEMPLATE_STOPPED when it breaks a limit.
        """
        defaults = {"add_generation_prompt": True, "documents": None}
        frame = self._frame({"render": {**defaults, **(variables or {}), "tools": None, **chat}})
        with self._lock:
            try:
                answer = self._exchange(frame)
            except _ChildLost as lost:
                raise errors.TEMPLATE_STOPPED(why=lost) from lost
        return self._prompt(answer)

    def close(self) -> None:
        """End the child; idempotent, and a later render starts a new one."""
        with self._lock:
            self._drop()

    def _exchange(self, frame: bytes) -> _Answer:
        try:
            return self._attempt(frame)
        except _ChildKilled:
            # Killed from outside, while idle or just now: the template is rendered once more.
            return self._attempt(frame)

    def _attempt(self, frame: bytes) -> _Answer:
        child = self._ready()
        try:
            child.send(frame, self.limits.wall_s)
            return child.receive(self.limits, self.limits.wall_s)
        except _ChildLost:
            self._drop()
            raise

    def _ready(self) -> _Child:
        if self._broken is not None:
            raise self._broken
        if self._child is not None and self._child.alive():
            return self._child
        self._drop()
        self._child = child = _Child(self.limits)
        try:
            child.receive(self.limits, self.limits.start_s)
            answer = self._compile(child)
        except _ChildLost as lost:
            self._drop()
            self._compiles_lost += 1
            if self._compiles_lost < _COMPILES_LOST_MAX:
                raise errors.TEMPLATE_STOPPED(why=f"compiling: {lost}") from lost
            answer = _Answer(error="lost", text=f"twice in a row, {lost}")
        if answer.ok is None:
            self._drop()
            self._broken = errors.TEMPLATE_BROKEN(why=answer.text or answer.error)
            raise self._broken
        self._compiles_lost = 0
        return child

    def _compile(self, child: _Child) -> _Answer:
        limits = {
            "cpu_s": self.limits.cpu_s,
            "output_bytes_max": self.limits.output_bytes_max,
            "today": self._today,
        }
        child.send(self._frame({"load": self.source, "limits": limits}), self.limits.wall_s)
        return child.receive(self.limits, self.limits.wall_s)

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _frame(self, message: Mapping[str, object]) -> bytes:
        try:
            body = self._encoder.encode(message)
        except (UnicodeEncodeError, RecursionError, TypeError) as error:
            what = "the messages are not valid JSON text"
            raise errors.INVALID_MESSAGES(what=what, why=error) from error
        if len(body) > self.limits.input_bytes_max:
            why = f"{len(body)} > {self.limits.input_bytes_max} bytes"
            raise errors.INVALID_MESSAGES(what="the messages are too large", why=why)
        return len(body).to_bytes(_LENGTH_BYTES, "little") + body

    def _prompt(self, answer: _Answer) -> str:
        if answer.ok is not None:
            return answer.ok
        if answer.error == "refused":
            raise errors.MESSAGES_REFUSED(why=answer.text)
        if answer.error in ("output", "memory"):
            self.close()  # the next request gets a process with an empty heap
            raise errors.TEMPLATE_STOPPED(why=f"its {answer.error} passed the limit")
        raise errors.TEMPLATE_FAILED(why=answer.text)


class _Child:
    """One child process and the socket to it."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._socket, theirs = socket.socketpair()
        # Nothing of this process's environment: it may hold keys. The path finds our packages.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LC_ALL": "C.UTF-8"}
        command = [sys.executable, "-P", "-B", "-m", "batchengine.text.template_child"]
        try:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(limits.address_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
            )
        finally:
            theirs.close()

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill and reap the process; it holds no state."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def send(self, data: bytes, wall_s: float) -> None:
        self._socket.settimeout(wall_s)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise _ChildLost("it took too long") from None
        except OSError as error:
            raise self._ending() from error

    def receive(self, limits: TemplateLimits, wall_s: float) -> _Answer:
        deadline = time.monotonic() + wall_s
        size = int.from_bytes(self._read(_LENGTH_BYTES, deadline), "little")
        # JSON escapes can widen a character sixfold.
        if size > 6 * limits.output_bytes_max + 4096:
            raise _ChildLost("its output passed the limit")
        try:
            return msgspec.json.decode(self._read(size, deadline), type=_Answer)
        except msgspec.DecodeError as error:
            raise _ChildLost("its process sent no valid answer") from error

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            left_s = deadline - time.monotonic()
            try:
                if left_s <= 0:
                    raise TimeoutError
                self._socket.settimeout(left_s)
                part = self._socket.recv(min(size - len(data), _READ_BYTES))
            except TimeoutError:
                raise _ChildLost("it took too long") from None
            except OSError as error:
                raise self._ending() from error
            if not part:
                raise self._ending()
            data += part
        return data

    def _ending(self) -> _ChildLost:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return _ChildLost("its process closed the channel")
        kind = _ChildKilled if status == -signal.SIGKILL else _ChildLost
        return kind(f"its process ended with status {status}")
