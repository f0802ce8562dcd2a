"""Data links between simulated workers, which fetch the pages that a peer holds.

A real worker sends queries and gets partial results of attention. HashLM reads every byte of a
page, so here the pages themselves travel: a step asks for those of each segment, and has them, or
the entry is unreachable. The answer is made from the holder's memory as it is when the question
arrives. Questions for an unknown hold are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchengine.core import BatchEngineError
from batchengine.lanes.host_memory import HostMemory
from batchengine.wire import lane as wire
from bench.models.hashlm import LAYOUT

if TYPE_CHECKING:
    from tests.simulation.lanes import SimProcess
    from tests.simulation.linked.network import End

Pages = NDArray[np.uint8]  # (n, payload bytes)
OPENING_S = 5.0  # for the other end's first message
SERVICE_S = 0.0003  # to read the pages of a question
_LENGTH = struct.Struct("<I")


class Begin(msgspec.Struct, tag="begin"):
    """First message of each end: the daemon's name."""

    name: str


class Ask(msgspec.Struct, tag="ask"):
    """For `n_pages` pages of a hold, from its page `first`."""

    number: int
    hold: int
    first: int
    n_pages: int


class Answer(msgspec.Struct, tag="answer"):
    """The payloads of the pages, or `why` there are none."""

    number: int
    data: bytes = b""
    why: str = ""


_CODER = msgspec.msgpack.Decoder(Begin | Ask | Answer)


class DataEnd(asyncio.Protocol):
    """A worker's end of one data link."""

    def __init__(self, links: FarPages, note: wire.OpenLink, end: End) -> None:
        self.note = note
        self.is_up = False
        self._links = links
        self._end: End | None = end
        self._read = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.note.dials:
            self.send(Begin(self._links.name))

    def send(self, message: Begin | Ask | Answer) -> None:
        if self._end is not None:
            data = msgspec.msgpack.encode(message)
            self._end.write(_LENGTH.pack(len(data)) + data)

    def data_received(self, data: bytes) -> None:
        self._read += data
        while len(self._read) >= _LENGTH.size and self._end is not None:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            message = _CODER.decode(bytes(self._read[_LENGTH.size : end]))
            del self._read[:end]
            self._take(message)

    def _take(self, message: Begin | Ask | Answer) -> None:
        match message:
            case Begin():
                if message.name != self.note.peer:
                    self.close(f"it is {message.name}")
                    return
                if not self.note.dials:
                    self.send(Begin(self._links.name))
                self.is_up = True
                self._links.changed(self, "")
            case Ask():
                self._links.on_ask(self, message)
            case Answer():
                self._links.on_answer(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.close("it has ended" if exc is None else str(exc))

    def close(self, why: str) -> None:
        """End the link, and report it."""
        end, self._end = self._end, None
        if end is not None:
            end.close()
            self._links.ended(self, why)

    def kill(self) -> None:
        """The worker's process is gone."""
        end, self._end = self._end, None
        if end is not None:
            end.kill()


class Fetch:
    """The pages that one step asks of others; `done` is called once, when all have come or failed.

    `pages[entry]`: of each entry with segments, None if it is unreachable.
    """

    def __init__(self, done: Callable[[Fetch], None]) -> None:
        self.pages: dict[int, list[Pages] | None] = {}
        self.waiting: dict[int, tuple[int, int, int]] = {}  # number -> entry, index, link
        self._done: Callable[[Fetch], None] | None = done

    def fail(self, entry: int) -> None:
        self.pages[entry] = None

    def settle(self) -> None:
        """Go on if nothing is awaited."""
        if not self.waiting and self._done is not None:
            done, self._done = self._done, None
            done(self)


class FarPages:
    """The data links and holds of one worker's run."""

    def __init__(self, process: SimProcess, name: str) -> None:
        self.name = name
        self.holds: dict[int, wire.Hold] = {}
        self.serves: Callable[[wire.Hold | None, Ask], str] = _why_not
        self._process = process
        self._links: dict[int, DataEnd] = {}
        self._ends: dict[int, End] = {}  # that came for links of the next notes, by number
        self._fetches: dict[int, Fetch] = {}
        self._numbers = 0

    # ---------------------------------------------------------------------------- the engine

    def take(self, note: wire.LinkNote) -> None:
        """Do what the engine has noted."""
        match note:
            case wire.OpenLink():
                self._open(note, self._ends.pop(note.number))
            case wire.CloseLink():
                if (link := self._links.get(note.number)) is not None:
                    link.close("the engine closed it")
            case wire.Hold():
                self._hold(note)
            case wire.Release():
                self.holds.pop(note.hold, None)

    def give(self, note: wire.OpenLink, end: End) -> None:
        """The socket of a link whose note comes soon."""
        self._ends[note.number] = end

    def kill(self) -> None:
        """The process is gone, and so are its links."""
        for link in self._links.values():
            link.kill()
        for end in self._ends.values():
            end.kill()
        self._links.clear()
        self._ends.clear()
        self._fetches.clear()

    def _open(self, note: wire.OpenLink, end: End) -> None:
        link = self._links[note.number] = DataEnd(self, note, end)
        end.begin(link)

        def give_up() -> None:
            if not link.is_up:
                link.close("the handshake took too long")

        self._process.later(OPENING_S, give_up)

    def _hold(self, note: wire.Hold) -> None:
        why = ""
        try:
            self._read(note.codes)
        except BatchEngineError as error:
            why = error.why
        if not why:
            self.holds[note.hold] = note
        self._process.report(wire.HoldChanged(note.hold, not why, why))

    # ----------------------------------------------------------------------------- the links

    def changed(self, link: DataEnd, why: str) -> None:
        """A link has come up."""
        self._process.report(wire.LinkChanged(link.note.number, link.is_up, why))

    def ended(self, link: DataEnd, why: str) -> None:
        """A link has ended: nothing that was asked over it will come."""
        number, link.is_up = link.note.number, False
        if self._links.pop(number, None) is None:
            return
        self.changed(link, why)
        for fetch in list(dict.fromkeys(self._fetches.values())):
            for unit, (entry, _, over) in list(fetch.waiting.items()):
                if over == number:
                    self._forget(fetch, unit)
                    fetch.fail(entry)
            fetch.settle()

    def on_ask(self, link: DataEnd, ask: Ask) -> None:
        """Answer, refuse, or say nothing at all."""
        process = self._process
        if process.hung or process.world.decides("mute"):
            return
        why = "the worker refuses" if process.world.decides("refuse") else ""
        why = why or self.serves(self.holds.get(ask.hold), ask)
        data = b""
        if not why:
            try:
                codes = self.holds[ask.hold].codes[ask.first : ask.first + ask.n_pages]
                process.world.on_served(process.lane, codes)
                data = self._read(codes).tobytes()
            except BatchEngineError as error:
                why = error.why
        delay_s = SERVICE_S * process.world.tape("service").choice([1, 1, 1, 10])
        process.later(delay_s, lambda: link.send(Answer(ask.number, data, why)))

    def on_answer(self, answer: Answer) -> None:
        fetch = self._fetches.get(answer.number)
        if fetch is None:
            return  # it is late
        entry, index, _ = fetch.waiting[answer.number]
        self._forget(fetch, answer.number)
        self._place(fetch, entry, index, answer)
        fetch.settle()

    # ------------------------------------------------------------------------------ questions

    def fetch(self, step: wire.Step, done: Callable[[Fetch], None]) -> None:
        """Get the pages of all segments of a step; `done` is called within its `lap_ms`."""
        fetch = Fetch(done)
        for index, entry in enumerate(step.entries):
            if entry.segments:
                fetch.pages[index] = [_NONE] * len(entry.segments)
            for place, segment in enumerate(entry.segments):
                self._ask(fetch, index, place, segment)

        def too_late() -> None:
            for unit, (entry, _, _) in list(fetch.waiting.items()):
                self._forget(fetch, unit)
                fetch.fail(entry)
            fetch.settle()

        fetch.settle()
        if fetch.waiting:
            self._process.later(step.lap_ms / 1000.0, too_late)

    def _ask(self, fetch: Fetch, entry: int, place: int, segment: wire.Segment) -> None:
        self._numbers += 1
        ask = Ask(self._numbers, segment.hold, segment.first_page, segment.n_pages)
        if segment.link == wire.SELF:
            hold = self.holds.get(segment.hold)
            why = _why_not(hold, ask)
            pages = hold.codes[ask.first : ask.first + ask.n_pages] if hold else ()
            data = b"" if why else self._read(pages).tobytes()
            self._place(fetch, entry, place, Answer(ask.number, data, why))
            return
        link = self._links.get(segment.link)
        if link is None or not link.is_up:
            fetch.fail(entry)
            return
        fetch.waiting[ask.number] = entry, place, segment.link
        self._fetches[ask.number] = fetch
        link.send(ask)

    def _place(self, fetch: Fetch, entry: int, place: int, answer: Answer) -> None:
        found = fetch.pages[entry]
        if answer.why or found is None:
            fetch.fail(entry)
        else:
            found[place] = np.frombuffer(answer.data, np.uint8).reshape(-1, LAYOUT.payload_bytes)

    def _forget(self, fetch: Fetch, number: int) -> None:
        del fetch.waiting[number]
        self._fetches.pop(number, None)

    def _read(self, codes: tuple[int, ...]) -> Pages:
        """The payloads of pages of this worker, as they are now."""
        memory = self._process.memory
        found = np.empty((len(codes), LAYOUT.payload_bytes), np.uint8)
        for row, address in zip(found, _addresses(memory, codes), strict=True):
            ctypes.memmove(row.ctypes.data, address, LAYOUT.payload_bytes)
        return found


_NONE: Pages = np.zeros((0, LAYOUT.payload_bytes), np.uint8)


def _why_not(hold: wire.Hold | None, ask: Ask) -> str:
    """Why these pages of a hold are not served; "" = they are."""
    if hold is None:
        return "there is no such hold"
    if ask.first + ask.n_pages > len(hold.codes):
        return f"the hold has {len(hold.codes)} pages"
    return ""


def _addresses(memory: HostMemory, codes: tuple[int, ...]) -> list[int]:
    with contextlib.suppress(OverflowError):
        return memory.addresses(np.array(codes, np.uint64)).tolist()
    return []
