"""The text process: `python -m batchengine.text.process PARENT READER NICE`.

Owns this process's limits and the requests on its one channel, a text link on file descriptor 0.
Tokenizers and templates run here because either may crash, hang or eat memory on hostile input.
The process holds no secrets, opens no files once it is confined, and may be killed at any moment.
READER names a function `module:name` that answers `wire.text.Read`: (encoder, question, body) ->
bytes; "" = none. NICE lowers the priority of what follows the start.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, cast

import msgspec

from batchengine import errors
from batchengine.child import guard
from batchengine.child.limits import Memory, confine, set_cpu_limit
from batchengine.core import BatchEngineError, Constraint
from batchengine.text.encoder import TextEncoder
from batchengine.text.renderer import OutputTooLong, Renderer, warm_up
from batchengine.text.vocab import Tokenizer
from batchengine.wire.frames import BlockingLink, Frame
from batchengine.wire.text import (
    BYTES_PER_CPU_S,
    TEXT_LINK,
    Check,
    Done,
    Encode,
    EncodeChat,
    Open,
    Phase,
    Read,
    Refused,
    TextMessage,
    problem_of,
    token_bytes,
)

Reader = Callable[[TextEncoder, bytes, bytes], bytes]

# llama.cpp splits text with a recursive std::regex: about 400 bytes of stack per character of a
# run of one class. This much holds a run of 2.5 million.
STACK_BYTES = 1 << 30
CHECK_CPU_S = 2  # of a grammar, which takes milliseconds as a rule; the kernel counts in seconds
GROWTH_BYTES_MAX = 256 << 20  # a request that made the process grow by more is its last


class TextProcess:
    """Answers the frames of one link until the engine goes away."""

    def __init__(self, link: BlockingLink[TextMessage], reader: Reader | None, nice: int) -> None:
        self._link = link
        self._nice = nice
        self._reader = reader
        self._memory = Memory()
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
        os.nice(self._nice)  # of this thread; a start at low priority would take too long
        confine(self._memory.address_bytes() + opening.memory_bytes)
        self._resident_bytes_max = self._memory.resident_bytes() + GROWTH_BYTES_MAX
        self._link.send(TEXT_LINK.encode(Done(is_last=False)))
        while (frame := self._link.receive()) is not None:
            set_cpu_limit(opening.cpu_s + len(frame.payload) // BYTES_PER_CPU_S)
            self._phase = ""
            message, payload = self._answer(encoder, frame)
            self._link.send(TEXT_LINK.encode(message, payload))
            if message.is_last:
                return

    def _open(self, opening: Open) -> TextEncoder:
        tokenizer = Tokenizer(opening.vocabulary)
        tokenizer.prepare()  # before files are forbidden
        source, for_tools = tokenizer.chat_template, tokenizer.tool_template
        if opening.template is not None:
            source, for_tools = opening.template, None
        today = datetime.date.fromisoformat(opening.today)
        renderer = Renderer(source, today, opening.output_chars_max, for_tools)
        return TextEncoder(tokenizer, renderer, self._report)

    def _report(self, phase: str) -> None:
        self._phase = phase
        self._link.send(TEXT_LINK.encode(Phase(phase)))

    def _answer(
        self, encoder: TextEncoder, frame: Frame[TextMessage]
    ) -> tuple[Done | Refused, bytes]:
        encoder.begin_request()
        try:
            result = self._handle(encoder, frame)
        except BatchEngineError as error:
            for name in ("what", "why", "fix"):  # a template's message may hold half a surrogate
                text: str = getattr(error, name)
                setattr(error, name, text.encode("utf-8", "replace").decode())
            return Refused.of(error, self._has_grown()), b""
        except (MemoryError, OutputTooLong) as error:
            what = "memory" if isinstance(error, MemoryError) else "output"
            row = problem_of(self._phase)
            return Refused.of(row(why=f"its {what} passed the limit"), is_last=True), b""
        except BaseException as error:  # a defect of a library may raise what is no Exception
            row = problem_of(self._phase)
            return Refused.of(row(why=f"it failed: {type(error).__name__}"), self._has_grown()), b""
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
            case Check():
                encoder.prepare_check()
                set_cpu_limit(CHECK_CPU_S)
                constraint = msgspec.msgpack.decode(frame.payload, type=Constraint)
                return msgspec.msgpack.encode(encoder.check_constraint(constraint))
            case other:
                raise errors.TOKENIZER_FAILED(why=f"no reader for {type(other).__name__}")

    def _has_grown(self) -> bool:
        return self._memory.resident_bytes() > self._resident_bytes_max


def find_reader(name: str) -> Reader | None:
    """The function that `module:name` names; None for ""."""
    if not name:
        return None
    module, _, function = name.partition(":")
    return cast(Reader, getattr(importlib.import_module(module), function))


def main(parent: int, reader: str, nice: int) -> NoReturn:
    """Serves on a thread with a large stack, then ends the process."""
    guard.tie_to_parent(parent)
    guard.drop_privileges()
    guard.keep_private()
    link = BlockingLink(socket.socket(fileno=0), TEXT_LINK)
    process = TextProcess(link, find_reader(reader), nice)
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
