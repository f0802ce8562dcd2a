"""The text process: `python -m batchengine.text.process PARENT READER NICE`.

Owns this process's limits and the requests on its one channel, a text link on file descriptor 0.
Tokenizers and templates run here because either may crash, hang or eat memory on hostile input.
The process holds no secrets, opens no files once it is confined, and may be killed at any moment.
READER names a function `module:name` that answers `wire.text.Read`: (encoder, question, body) ->
bytes; "" = none. NICE lowers the process's priority.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, cast

import msgspec

from batchengine import errors
from batchengine.child import confinement, guard
from batchengine.core import BatchEngineError
from batchengine.text.encoder import TextEncoder
from batchengine.text.renderer import OutputTooLong, Renderer, warm_up
from batchengine.text.vocab import Tokenizer
from batchengine.wire.frames import BlockingLink, Frame
from batchengine.wire.text import (
    TEMPLATE,
    TEXT_LINK,
    Done,
    Encode,
    EncodeChat,
    Open,
    Phase,
    Read,
    Refused,
    TextMessage,
    token_bytes,
)

Reader = Callable[[TextEncoder, bytes, bytes], bytes]

# llama.cpp splits text with a recursive std::regex: about 400 bytes of stack per character of a
# run of one class. This much holds a run of 2.5 million.
STACK_BYTES = 1 << 30
GROWTH_BYTES_MAX = 256 << 20  # a request that made the process grow by more is its last


def confine(address_bytes: int) -> None:
    """Limits this process for good: bounded memory, no files, processes or sockets.

    A kernel that refuses the filter of system calls refuses it to workers too, which log it.
    """
    confinement.confine()
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 3)
    _limit(resource.RLIMIT_AS, address_bytes)


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


class TextProcess:
    """Answers the frames of one link until the engine goes away."""

    def __init__(self, link: BlockingLink[TextMessage], reader: Reader | None) -> None:
        self._link = link
        self._reader = reader
        self._memory = _Memory()
        self._resident_bytes_max = 0
        self._phase = ""  # of the request

    def serve(self) -> None:
        """Handles Open, then requests; returns when the link ends."""
        first = self._link.receive()
        if first is None or not isinstance(first.message, Open):
            return
        opening = first.message
        try:
            encoder = self._open(opening)
        except BatchEngineError as error:
            self._link.send(TEXT_LINK.encode(Refused.of(error, is_last=True)))
            return
        confine(self._memory.address_bytes() + opening.memory_bytes)
        self._resident_bytes_max = self._memory.resident_bytes() + GROWTH_BYTES_MAX
        self._link.send(TEXT_LINK.encode(Done(is_last=False)))
        while (frame := self._link.receive()) is not None:
            _set_cpu_limit(opening.cpu_s)
            self._phase = ""
            message, payload = self._answer(encoder, frame)
            self._link.send(TEXT_LINK.encode(message, payload))
            if message.is_last:
                return

    def _open(self, opening: Open) -> TextEncoder:
        tokenizer = Tokenizer(opening.vocabulary)
        source = tokenizer.chat_template if opening.template is None else opening.template
        today = datetime.date.fromisoformat(opening.today)
        return TextEncoder(
            tokenizer, Renderer(source, today, opening.output_chars_max), self._report
        )

    def _report(self, phase: str) -> None:
        self._phase = phase
        self._link.send(TEXT_LINK.encode(Phase(phase)))

    def _answer(
        self, encoder: TextEncoder, frame: Frame[TextMessage]
    ) -> tuple[Done | Refused, bytes]:
        try:
            result = self._handle(encoder, frame)
        except BatchEngineError as error:
            for name in ("what", "why", "fix"):  # a template's message may hold half a surrogate
                text: str = getattr(error, name)
                setattr(error, name, text.encode("utf-8", "replace").decode())
            return Refused.of(error, self._has_grown()), b""
        except (MemoryError, OutputTooLong) as error:
            what = "memory" if isinstance(error, MemoryError) else "output"
            row = errors.TEMPLATE_STOPPED if self._phase == TEMPLATE else errors.TEXT_UNUSABLE
            return Refused.of(row(why=f"its {what} passed the limit"), is_last=True), b""
        return Done(self._has_grown()), result

    def _handle(self, encoder: TextEncoder, frame: Frame[TextMessage]) -> bytes:
        match frame.message:
            case Encode(special):
                return token_bytes(encoder.encode(str(frame.payload, "utf-8"), special=special))
            case EncodeChat():
                messages, tools, kwargs = msgspec.msgpack.decode(frame.payload)
                return token_bytes(encoder.encode_chat(messages, tools, kwargs))
            case Read(question) if self._reader is not None:
                return self._reader(encoder, question, bytes(frame.payload))
            case other:
                raise errors.TOKENIZER_FAILED(why=f"no reader for {type(other).__name__}")

    def _has_grown(self) -> bool:
        return self._memory.resident_bytes() > self._resident_bytes_max


class _Memory:
    """The resident bytes of this process; opened before files are forbidden."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def resident_bytes(self) -> int:
        return int(os.pread(self._fd, 256, 0).split()[1]) * resource.getpagesize()

    def address_bytes(self) -> int:
        return int(os.pread(self._fd, 256, 0).split()[0]) * resource.getpagesize()


def _set_cpu_limit(cpu_s: int) -> None:
    """CPU limits count from the start of the process; each request gets a share of its own."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + cpu_s
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def find_reader(name: str) -> Reader | None:
    """The function that `module:name` names; None for ""."""
    if not name:
        return None
    module, _, function = name.partition(":")
    return cast(Reader, getattr(importlib.import_module(module), function))


def main(parent: int, reader: str, nice: int) -> NoReturn:
    """Serves on a thread with a large stack, then ends the process."""
    os.nice(nice)
    guard.tie_to_parent(parent)
    guard.drop_privileges()
    guard.keep_private()
    link = BlockingLink(socket.socket(fileno=0), TEXT_LINK)
    process = TextProcess(link, find_reader(reader))
    warm_up()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(process,))
    thread.start()
    thread.join()
    sys.exit(0)


def _serve(process: TextProcess) -> None:
    with contextlib.suppress(ConnectionError):  # the engine has gone
        process.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
