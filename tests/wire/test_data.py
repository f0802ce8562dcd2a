"""Frames of data links: equal after encode and decode in any chunks; damaged ones end the link."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.wire.data import (
    DATA_LINK,
    Accumulators,
    DataFrame,
    HeldSpan,
    Hop,
    Query,
    QueryEntry,
    Refuse,
)
from batchengine.wire.frames import HEADER, Decoder, Frame, WireError

u31 = st.integers(0, 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
names = st.text(max_size=20)
spans = st.builds(HeldSpan, u64, u64, u31, u31, u31)
hops = st.builds(Hop, names, st.lists(spans, max_size=4).map(tuple))
entries = st.lists(st.builds(QueryEntry, u31, u31), max_size=4).map(tuple)
messages = (
    st.builds(Query, u64, u31, u31, u31, names, entries, st.lists(hops, max_size=3).map(tuple))
    | st.builds(Accumulators, u64, u31, u31)
    | st.builds(Refuse, u64, st.text(max_size=40))
)
frames = st.builds(Frame, messages, st.binary(max_size=300))


def pack(frame: DataFrame) -> bytes:
    return DATA_LINK.encode(frame.message, frame.payload)


def read(data: bytes, chunk: int) -> list[DataFrame]:
    """The frames before the first error, if there is one."""
    decoder, found = Decoder(DATA_LINK), list[DataFrame]()
    with contextlib.suppress(WireError):
        for at in range(0, len(data), chunk):
            for frame in decoder.feed(data[at : at + chunk]):
                found.append(frame)
    return found


@given(st.lists(frames, max_size=4), st.integers(1, 97))
@settings(deadline=None)
def test_frames_round_trip_in_any_chunks(sent: list[DataFrame], chunk: int) -> None:
    data = b"".join(pack(frame) for frame in sent)
    for size in (1, chunk, len(data) + 1):
        assert read(data, size) == sent


@given(frames, st.data())
@settings(deadline=None)
def test_a_damaged_header_is_an_error_and_a_damaged_meta_is_never_another_kind(
    frame: DataFrame, data: st.DataObject
) -> None:
    whole = bytearray(pack(frame))
    at = data.draw(st.integers(0, len(whole) - 1 - len(frame.payload)))
    whole[at] ^= data.draw(st.integers(1, 255))
    for chunk in (1, len(whole)):
        found = read(bytes(whole), chunk)
        assert at >= HEADER.size or not found
        assert all(type(other.message) is type(frame.message) for other in found)


@given(st.binary(max_size=400), st.integers(1, 50))
@settings(deadline=None)
def test_bytes_that_are_no_frames_are_none(data: bytes, chunk: int) -> None:
    assert not read(data, chunk)
    assert not read(data, len(data) + 1)
