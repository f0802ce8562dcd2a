"""What every kind of link must keep, as checks of its schema; and frames with any defect."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import Sampling
from batchengine.wire.frames import HEADER, MAGIC, Decoder, Frame, LinkSchema, M, WireError


def number(least: float, most: float) -> st.SearchStrategy[float]:
    """Binary32 numbers, with both ends."""
    return st.floats(least, most, width=32)


penalty = number(-2, 2)
samplings = st.builds(
    Sampling, number(0, 2), st.integers(0, 1 << 20), number(0, 1), number(0, 1), number(0, 10),
    penalty, penalty, st.integers(0, 1 << 24), st.integers(0, 2**64 - 1), st.integers(-1, 20),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), number(-100, 100)), max_size=3).map(tuple),
)  # fmt: skip


def pack(schema: LinkSchema[M], frame: Frame[M]) -> bytes:
    """The bytes of a frame."""
    return schema.encode(
        frame.message,
        frame.payload,
        step=frame.step,
        incarnation=frame.incarnation,
        attempt=frame.attempt,
    )


def forge(
    kind: int,
    meta: bytes,
    *,
    version: int,
    magic: bytes = MAGIC,
    flags: int = 0,
    meta_len: int | None = None,
    payload_len: int = 0,
    crc: int | None = None,
) -> bytes:
    """Header and meta part with the given fields; by default only those can be wrong."""
    n_meta = len(meta) if meta_len is None else meta_len
    head = HEADER.pack(magic, version, kind, flags, n_meta, payload_len, 0, 0, 0, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head) if crc is None else crc) + meta


@contextlib.contextmanager
def refused(row: errors.Problem, match: str | None = None) -> Iterator[None]:
    """The block raises the WireError of `row`."""
    with pytest.raises(WireError, match=match) as caught:
        yield
    assert caught.value.code == row.code


def read(schema: LinkSchema[M], data: bytes, chunk: int) -> tuple[list[Frame[M]], str]:
    """The frames before the first error, and its code; "" = none, also not at the end."""
    decoder, found = Decoder(schema), list[Frame[M]]()
    try:
        for at in range(0, len(data), chunk):
            for frame in decoder.feed(data[at : at + chunk]):
                found.append(frame)
        decoder.end()
    except WireError as error:
        return found, error.code
    return found, ""


def check_round_trip(schema: LinkSchema[M], sent: list[Frame[M]], chunk: int) -> None:
    """Frames are read as they were sent, in chunks of any size."""
    data = b"".join(pack(schema, frame) for frame in sent)
    for size in (1, chunk, len(data) + 1):
        assert read(schema, data, size) == (sent, "")


def check_random_bytes(schema: LinkSchema[M], noise: bytes, chunk: int) -> None:
    """Bytes that are no frames yield none, and raise nothing but WireError."""
    for size in (chunk, len(noise) + 1):
        assert not read(schema, noise, size)[0]


def check_flipped_byte(schema: LinkSchema[M], frame: Frame[M], data: st.DataObject) -> None:
    """A damaged header is an error; a damaged meta part is never another kind of message."""
    bad = bytearray(pack(schema, frame))
    n_payload = len(frame.payload)
    # most positions are before the payload, whose bytes the decoder never looks at
    at = data.draw(st.integers(0, len(bad) - 1 - n_payload) | st.integers(0, len(bad) - 1))
    bad[at] ^= data.draw(st.integers(1, 255))
    found, code = read(schema, bytes(bad), len(bad))
    # repr: a NaN inside a flipped float is not equal to itself
    assert repr((found, code)) == repr(read(schema, bytes(bad), 1))
    if at < HEADER.size:
        assert not found, "a damaged header must never yield a frame"
        assert code not in ("", errors.FRAME_TRUNCATED.code), "nor wait for more bytes"
    assert all(type(other.message) is type(frame.message) for other in found)


def check_allocates_nothing(schema: LinkSchema[M], data: bytes) -> None:
    """A header that announces a payload of any size is refused before memory is taken."""
    tracemalloc.start()
    with refused(errors.PAYLOAD_TOO_LONG):
        list(Decoder(schema).feed(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
