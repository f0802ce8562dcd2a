"""Frames between the engine and its workers (and later between daemons): one protocol.

A frame is a 48-byte header, a msgpack meta part that decodes into exactly one typed message, and
raw payload bytes. `Decoder` is sans-IO: bytes in, frames out, whatever the chunking. Lengths are
checked against caps before anything is allocated; every way in which bytes can lie has its own
error. Nothing here knows what a message means, and no pointer, path or address taken from a
request travels in one: pages are named by place codes that the receiver checks.

  offset  0     4       6      8       12         16            24     32            40        44
          magic version kind   flags   meta_len   payload_len   step   incarnation   attempt   crc32
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import msgspec

from batchengine.core import BatchEngineError

HEADER = struct.Struct("<4sHHIIQQQII")
if HEADER.size != 48:
    raise AssertionError("the frame header is 48 bytes")
CRC_SPAN = HEADER.size - 4  # the checksum covers everything before itself
MAGIC = b"BEWF"
VERSION = 2
META_BYTES_MAX = 16 << 20  # a step of 512 entries with 20 best logprobs each stays far below
PAYLOAD_BYTES_MAX = 64 << 20  # tokens and place codes of a step; bulk pages never travel here
U64_MAX = (1 << 64) - 1


class WireError(BatchEngineError):
    """The bytes on a link are not a frame of this protocol; the link must be closed."""

    wire_code = "BE2100"
    wire_what = "bad frame"

    def __init__(self, why: str) -> None:
        super().__init__(self.wire_code, self.wire_what, why=why)


class BadMagic(WireError):
    wire_code, wire_what = "BE2101", "not a batchengine frame"


class BadVersion(WireError):
    wire_code, wire_what = "BE2102", "the other side speaks another link version"


class BadHeaderChecksum(WireError):
    wire_code, wire_what = "BE2103", "frame header is damaged"


class BadFlags(WireError):
    wire_code, wire_what = "BE2104", "frame has unknown flags"


class UnknownKind(WireError):
    wire_code, wire_what = "BE2105", "frame of unknown kind"


class MetaTooLong(WireError):
    wire_code, wire_what = "BE2106", "frame meta exceeds its cap"


class PayloadTooLong(WireError):
    wire_code, wire_what = "BE2107", "frame payload exceeds its cap"


class BadMeta(WireError):
    wire_code, wire_what = "BE2108", "frame meta does not match its schema"


class KindMismatch(WireError):
    wire_code, wire_what = "BE2109", "frame header and meta name different messages"


class Truncated(WireError):
    wire_code, wire_what = "BE2110", "link ended inside a frame"


# ---------------------------------------------------------------------------------- messages


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of every message; the msgspec tag is also the kind in the header."""


class Load(Message, tag=1, frozen=True):
    """Engine -> worker, first frame: which model to map and how much a step may hold."""

    model_path: str
    cache_dir: str
    threads: int
    cores: tuple[int, ...]
    spin_us: int
    tokens_max: int
    entries_max: int
    context_tokens: int


class Loading(Message, tag=2, frozen=True):
    """Worker -> engine: a load stage ended or advanced; progress is 0..1 over the whole load."""

    stage: str
    detail: str
    progress: float
    seconds: float


class Ready(Message, tag=3, frozen=True):
    """Worker -> engine, its HELLO: what its numbers and pages look like.

    `identity` holds the fields of the KV representation; lanes whose identities differ
    must not share pages.
    """

    pid: int
    arith_id: str
    isa: str
    threads: int
    n_layer: int
    n_kv_head: int
    head_dim: int
    payload_bytes: int
    identity: dict[str, str | int | float]


class Attach(Message, tag=4, frozen=True):
    """Engine -> worker: map this arena read-write and serve extents of this folder read-only.

    `arenas_dir` holds the arenas that rows may be adopted from; empty = none.
    """

    arena_path: str
    places: int
    page_bytes: int
    extents_dir: str
    arenas_dir: str = ""


class Attached(Message, tag=5, frozen=True):
    """Worker -> engine: steps may start."""

    places: int


class Spec(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """How to sample one row. Floats are already binary32 values; `history_len` tokens of the
    payload's history part are the penalty window."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logprobs: int
    bias: tuple[tuple[int, float], ...]
    history_len: int


class Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One sequence of a step: tokens at positions [start, start + n_tokens), n_pages place codes.

    `spec` None = no token wanted (a prefill chunk that does not reach the end).
    """

    session: int
    epoch: int
    start: int
    n_tokens: int
    n_pages: int
    spec: Spec | None


class Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An arena place that now belongs to page `page` of a session: zero it, name its owner."""

    place: int
    gen: int
    session: bytes
    epoch: int
    page: int


class Verify(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Read the page at `code` through the worker's own mapping; its sealed checksum must match."""

    code: int
    seed: int
    checksum: bytes


class Digest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Digest the page in `place`; with rows < 256, zero the rows from there on first."""

    place: int
    rows: int


class Retitle(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The rows of an open place belong to another owner now: its header and the records of rows
    [0, rows) are written anew, records from `rows` on become invalid; page bytes do not change."""

    place: int
    gen: int
    session: bytes
    epoch: int
    page: int
    rows: int


class FromArena(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=1):
    """Rows another worker wrote: a file of the arenas folder, and the place's generation and
    epoch there. Each row must prove itself by its record."""

    arena: str
    place: int
    gen: int
    epoch: int


class FromPage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=2):
    """Rows of a sealed page, which must have this sealed checksum."""

    code: int
    seed: int
    checksum: bytes


class Adopt(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Reserve `to` and copy the leading rows of a source that are proven to hold the tokens
    given in the payload; at most `rows`. In a source arena, page and session are those of `to`."""

    to: Place
    rows: int
    source: FromArena | FromPage


class Step(Message, tag=6, frozen=True):
    """Engine -> worker: one batch, and page chores around it.

    Order: poison, reserve, retitle, adopt, touch, forward + sample, digest, verify. Payload: place
    codes u64 of all entries, then their tokens i32, then penalty histories i32, then the tokens
    i32 of every Adopt (`rows` each). An empty `entries` is legal (chores only). `touch` holds
    codes of sealed pages to fault in, best effort.
    """

    entries: tuple[Entry, ...]
    poison: tuple[int, ...] = ()
    reserve: tuple[Place, ...] = ()
    digest: tuple[Digest, ...] = ()
    verify: tuple[Verify, ...] = ()
    retitle: tuple[Retitle, ...] = ()
    adopt: tuple[Adopt, ...] = ()
    touch: tuple[int, ...] = ()


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The token sampled for one entry; `top` = n best (token, logprob) if asked."""

    session: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepDone(Message, tag=7, frozen=True):
    """Worker -> engine: what a Step produced.

    `poisoned` = indices of entries with NaN or Inf: no token, their new rows are unusable.
    `digests` answers Step.digest in order; `verified` answers Step.verify in order; `adopted` =
    leading rows proven and copied per Step.adopt, in order.
    """

    rows: tuple[Row, ...]
    poisoned: tuple[int, ...]
    digests: tuple[bytes, ...]
    verified: tuple[bool, ...]
    elapsed_us: int
    forward_us: int = 0
    adopted: tuple[int, ...] = ()


class Failed(Message, tag=8, frozen=True):
    """Worker -> engine: it refuses or cannot go on. `fatal` = the process ends after this."""

    code: str
    what: str
    why: str
    fix: str
    fatal: bool


class Ping(Message, tag=9, frozen=True):
    """Either way; answered with Pong."""


class Pong(Message, tag=10, frozen=True):
    """Answer to Ping."""


class Shutdown(Message, tag=11, frozen=True):
    """Engine -> worker: end now; nothing is in flight."""


AnyMessage = (
    Load | Loading | Ready | Attach | Attached | Step | StepDone | Failed | Ping | Pong | Shutdown
)
_MESSAGES: tuple[type[Message], ...] = (
    Load, Loading, Ready, Attach, Attached, Step, StepDone, Failed, Ping, Pong, Shutdown,
)  # fmt: skip
KINDS: dict[type[Message], int] = {}
for _cls in _MESSAGES:
    KINDS[_cls] = int(_cls.__struct_config__.tag)  # type: ignore[arg-type]  # may be text elsewhere
_KNOWN = frozenset(KINDS.values())
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyMessage).decode


# ------------------------------------------------------------------------------------ frames


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame. step and attempt name the work; incarnation names the worker life."""

    message: AnyMessage
    payload: bytes = b""
    step: int = 0
    incarnation: int = 0
    attempt: int = 0


def encode(
    message: AnyMessage,
    payload: bytes = b"",
    *,
    step: int = 0,
    incarnation: int = 0,
    attempt: int = 0,
) -> bytes:
    """One frame as bytes; refuses what the other side's caps would refuse."""
    meta = _encode(message)
    if len(meta) > META_BYTES_MAX:
        raise MetaTooLong(f"{len(meta)} bytes of {META_BYTES_MAX}")
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLong(f"{len(payload)} bytes of {PAYLOAD_BYTES_MAX}")
    head = HEADER.pack(
        MAGIC, VERSION, KINDS[type(message)], 0, len(meta), len(payload), step, incarnation,
        attempt, 0,
    )[:CRC_SPAN]  # fmt: skip
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), meta, payload))


@dataclass(frozen=True, slots=True)
class Header:
    """The checked fields of one header."""

    kind: int
    meta_len: int
    payload_len: int
    step: int
    incarnation: int
    attempt: int


def parse_header(head: bytes | bytearray | memoryview) -> Header:
    """Check 48 bytes and return their fields; allocates nothing that depends on them."""
    magic, version, kind, flags, meta_len, payload_len, step, incarnation, attempt, crc = (
        HEADER.unpack_from(head)
    )
    if magic != MAGIC:
        raise BadMagic(f"starts with {magic!r}")
    if zlib.crc32(memoryview(head)[:CRC_SPAN]) != crc:
        raise BadHeaderChecksum("crc32 differs")
    if version != VERSION:
        raise BadVersion(f"version {version}, this side has {VERSION}")
    if flags:
        raise BadFlags(f"flags {flags:#x}")
    if kind not in _KNOWN:
        raise UnknownKind(f"kind {kind}")
    if meta_len > META_BYTES_MAX:
        raise MetaTooLong(f"{meta_len} bytes of {META_BYTES_MAX}")
    if payload_len > PAYLOAD_BYTES_MAX:
        raise PayloadTooLong(f"{payload_len} bytes of {PAYLOAD_BYTES_MAX}")
    return Header(kind, meta_len, payload_len, step, incarnation, attempt)


def parse_body(header: Header, meta: bytes | memoryview, payload: bytes) -> Frame:
    """Decode the meta part against the schema of exactly the message the header names."""
    try:
        message = _decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMeta(str(error)) from None
    if KINDS[type(message)] != header.kind:
        raise KindMismatch(f"header says {header.kind}, meta is {type(message).__name__}")
    return Frame(message, payload, header.step, header.incarnation, header.attempt)


class Decoder:
    """Bytes in, frames out. After an error the link is unusable: every later feed raises again."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: Header | None = None
        self._error: WireError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Append `data` and yield every frame that is now complete; must be iterated to the end."""
        if self._error is not None:
            raise self._error
        self._buffer += data
        try:
            while (frame := self._next()) is not None:
                yield frame
        except WireError as error:
            self._error = error
            self._buffer.clear()
            raise

    def end(self) -> None:
        """The link closed; raises Truncated if that was inside a frame."""
        if self._buffer or self._header is not None:
            raise Truncated(f"{len(self._buffer)} bytes of an unfinished frame")

    def _next(self) -> Frame | None:
        buffer = self._buffer
        header = self._header
        if header is None:
            if len(buffer) < HEADER.size:
                if buffer and not MAGIC.startswith(bytes(buffer[: len(MAGIC)])):
                    raise BadMagic(f"starts with {bytes(buffer[:4])!r}")
                return None
            header = self._header = parse_header(buffer)
        meta_end = HEADER.size + header.meta_len
        end = meta_end + header.payload_len
        if len(buffer) < end:
            return None
        meta = bytes(buffer[HEADER.size : meta_end])
        payload = bytes(buffer[meta_end:end])
        del buffer[:end]
        self._header = None
        return parse_body(header, meta, payload)


# ------------------------------------------------------------------------------------- links


class BlockingLink:
    """A worker's end of the link: blocking, one frame at a time, one reusable header buffer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._head = bytearray(HEADER.size)

    def send(self, frame: bytes) -> None:
        self._sock.sendall(frame)

    def receive(self) -> Frame | None:
        """The next frame, or None when the other side closed between two frames."""
        if not self._fill(memoryview(self._head), at_boundary=True):
            return None
        header = parse_header(self._head)
        body = bytearray(header.meta_len + header.payload_len)
        self._fill(memoryview(body), at_boundary=False)
        meta = memoryview(body)[: header.meta_len]
        return parse_body(header, meta, bytes(memoryview(body)[header.meta_len :]))

    def close(self) -> None:
        self._sock.close()

    def _fill(self, view: memoryview, *, at_boundary: bool) -> bool:
        done = 0
        while done < len(view):
            count = self._sock.recv_into(view[done:])
            if count == 0:
                if at_boundary and done == 0:
                    return False
                raise Truncated(f"{done} of {len(view)} bytes arrived")
            done += count
        return True


class FrameProtocol(asyncio.Protocol):
    """The engine's end of a link: calls `on_frame` per frame and `on_lost` exactly once."""

    def __init__(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no common base

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except WireError as error:
            self._error = error
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # uvloop raises when a closed transport is written to
        self._on_lost(self._error or exc)

    def send(self, frame: bytes) -> None:
        """Queue one frame; the transport sends it at once when the socket takes it.

        A link that has ended takes it too: that its worker died is told elsewhere.
        """
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
