"""Frames: length-prefixed messages on one link, and the end of a link in a process that waits.

A frame is a 48-byte header, a msgpack meta part that decodes into exactly one typed message, and
raw payload bytes. `LinkSchema` holds the messages that one kind of link carries; `Decoder` is
sans-IO: bytes in, frames out, whatever the chunking. Lengths are checked against caps before
anything is allocated, and every way in which the bytes can be wrong has its own error. What a
message means is defined elsewhere (see `lane`).

  offset  0     4       6      8       12         16            24     32            40        44
          magic version kind   flags   meta_len   payload_len   step   incarnation   attempt   crc32
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, Union, cast

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.errors import Problem

HEADER = struct.Struct("<4sHHIIQQQII")
if HEADER.size != 48:
    raise AssertionError("the frame header is 48 bytes")
CRC_SPAN = HEADER.size - 4  # the checksum covers everything before itself
MAGIC = b"BEWF"
META_BYTES_MAX = 16 << 20  # a step of 512 entries with 20 best logprobs each stays far below
PAYLOAD_BYTES_MAX = 64 << 20  # tokens and slot codes of a step; bulk pages never travel here
RECEIVE_BYTES = 64 << 10  # first size of a receive buffer: most steps fit


class WireError(BatchEngineError):
    """The bytes on a link are not a frame of its schema; the link must be closed."""

    def __init__(self, row: Problem, why: str) -> None:
        super().__init__(row.code, row.kind, row.name, row.what, why)


class Truncated(WireError):
    """The link ended inside a frame."""

    def __init__(self, why: str) -> None:
        super().__init__(errors.FRAME_TRUNCATED, why)


# ------------------------------------------------------------------------------------ frames


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Base of every message; its msgspec tag, an int, is also the kind in the header."""


M = TypeVar("M", bound=Message)
Payload = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Frame(Generic[M]):
    """One decoded frame.

    `step` and `attempt` name the request that a frame carries or answers; `incarnation` numbers
    the process that it is meant for or comes from. A `payload` from BlockingLink is a read-only
    view that is valid until the next `receive`.
    """

    message: M
    payload: Payload = b""
    step: int = 0
    incarnation: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The checked fields of one header."""

    kind: int
    meta_len: int
    payload_len: int
    step: int
    incarnation: int
    attempt: int


_encode = msgspec.msgpack.Encoder().encode


class LinkSchema(Generic[M]):
    """The messages of one kind of link: their kinds in the header, their codec, their version.

    Both ends of a link refuse frames of another `version`; it grows with every change of the
    bytes. Instances hold no state of a link and are shared.
    """

    def __init__(self, version: int, *messages: type[M]) -> None:
        self.version = version
        self._kinds: dict[type[M], int] = {}
        for message in messages:
            tag = message.__struct_config__.tag
            if not isinstance(tag, int):
                raise TypeError(f"{message.__name__} has no numeric tag")
            self._kinds[message] = tag
        self._known = frozenset(self._kinds.values())
        union = cast(type[M], Union[messages])  # noqa: UP007  made of a variable
        self._decode = msgspec.msgpack.Decoder(union).decode

    def encode(
        self,
        message: M,
        payload: Payload = b"",
        *,
        step: int = 0,
        incarnation: int = 0,
        attempt: int = 0,
    ) -> bytes:
        """One frame as bytes; refuses what the other side's caps would refuse."""
        meta = _encode(message)
        _check_lengths(len(meta), len(payload))
        head = HEADER.pack(
            MAGIC, self.version, self._kinds[type(message)], 0, len(meta), len(payload), step,
            incarnation, attempt, 0,
        )[:CRC_SPAN]  # fmt: skip
        return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), meta, payload))

    def parse_header(self, head: bytes | bytearray | memoryview) -> Header:
        """Check 48 bytes and return their fields; allocates nothing that depends on them."""
        magic, version, kind, flags, meta_len, payload_len, step, incarnation, attempt, crc = (
            HEADER.unpack_from(head)
        )
        if magic != MAGIC:
            raise WireError(errors.FRAME_MAGIC, f"starts with {magic!r}")
        if zlib.crc32(memoryview(head)[:CRC_SPAN]) != crc:
            raise WireError(errors.FRAME_HEADER, "crc32 differs")
        if version != self.version:
            raise WireError(
                errors.FRAME_VERSION, f"version {version}, this side has {self.version}"
            )
        if flags:
            raise WireError(errors.FRAME_FLAGS, f"flags {flags:#x}")
        if kind not in self._known:
            raise WireError(errors.FRAME_KIND, f"kind {kind}")
        _check_lengths(meta_len, payload_len)
        return Header(kind, meta_len, payload_len, step, incarnation, attempt)

    def parse_body(self, header: Header, meta: bytes | memoryview, payload: Payload) -> Frame[M]:
        """Decode the meta part, which must be exactly the message that the header names."""
        try:
            message = self._decode(meta)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(errors.FRAME_META, str(error)) from None
        if self._kinds[type(message)] != header.kind:
            raise WireError(
                errors.FRAME_MISMATCH,
                f"the header names {header.kind}, meta is {type(message).__name__}",
            )
        return Frame(message, payload, header.step, header.incarnation, header.attempt)


def _check_lengths(meta_len: int, payload_len: int) -> None:
    if meta_len > META_BYTES_MAX:
        raise WireError(errors.META_TOO_LONG, f"{meta_len} bytes of {META_BYTES_MAX}")
    if payload_len > PAYLOAD_BYTES_MAX:
        raise WireError(errors.PAYLOAD_TOO_LONG, f"{payload_len} bytes of {PAYLOAD_BYTES_MAX}")


class Decoder(Generic[M]):
    """Bytes in, frames out. After an error the link is unusable: every later feed raises again."""

    def __init__(self, schema: LinkSchema[M]) -> None:
        self._schema = schema
        self._buffer = bytearray()
        self._header: Header | None = None
        self._error: WireError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame[M]]:
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
        """Note that the link closed; raises Truncated if that was inside a frame."""
        if self._buffer or self._header is not None:
            raise Truncated(f"{len(self._buffer)} bytes of an unfinished frame")

    def _next(self) -> Frame[M] | None:
        buffer = self._buffer
        header = self._header
        if header is None:
            if len(buffer) < HEADER.size:
                if buffer and not MAGIC.startswith(bytes(buffer[: len(MAGIC)])):
                    raise WireError(errors.FRAME_MAGIC, f"starts with {bytes(buffer[:4])!r}")
                return None
            header = self._header = self._schema.parse_header(buffer)
        meta_end = HEADER.size + header.meta_len
        end = meta_end + header.payload_len
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            meta, payload = bytes(view[HEADER.size : meta_end]), bytes(view[meta_end:end])
        del buffer[:end]
        self._header = None
        return self._schema.parse_body(header, meta, payload)


# ------------------------------------------------------------------------------------- links


class BlockingLink(Generic[M]):
    """The blocking end of a link: one frame at a time.

    Each payload has memory of its own, which begins at an aligned address: it is used while those
    of further frames come.
    """

    def __init__(self, sock: socket.socket, schema: LinkSchema[M]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._schema = schema
        self._head = memoryview(bytearray(HEADER.size))
        self._meta = memoryview(bytearray(RECEIVE_BYTES))

    def send(self, frame: bytes) -> None:
        """Send one encoded frame; returns when the socket has taken all of it."""
        self._sock.sendall(frame)

    def receive(self) -> Frame[M] | None:
        """The next frame, or None when the other side closed between two frames."""
        if not self._fill(self._head, at_boundary=True):
            return None
        header = self._schema.parse_header(self._head)
        self._meta = _at_least(self._meta, header.meta_len)
        meta = self._meta[: header.meta_len]
        self._fill(meta, at_boundary=False)
        payload = memoryview(bytearray(header.payload_len))
        self._fill(payload, at_boundary=False)
        return self._schema.parse_body(header, meta, payload.toreadonly())

    def fileno(self) -> int:
        """The file number of the socket, for a poll set."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _fill(self, view: memoryview, *, at_boundary: bool) -> bool:
        """Receive len(view) bytes; False if the link ended before the first, at a boundary."""
        done = 0
        while done < len(view):
            count = self._sock.recv_into(view[done:])
            if count == 0:
                if at_boundary and done == 0:
                    return False
                raise Truncated(f"{done} of {len(view)} bytes arrived")
            done += count
        return True


def _at_least(buffer: memoryview, n_bytes: int) -> memoryview:
    """The buffer, or a new one where it is too small; frames may still view the old one."""
    return buffer if len(buffer) >= n_bytes else memoryview(bytearray(n_bytes))
