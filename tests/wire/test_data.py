"""Frames of data links: equal after encode and decode in any chunks; damaged ones end the link."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.wire.data import (
    DATA_LINK,
    Accumulators,
    DataFrame,
    HeldSpan,
    Hidden,
    Hop,
    Query,
    QueryEntry,
    Refuse,
    StatePart,
    Tile,
)
from batchengine.wire.frames import Frame
from tests.wire.checks import check_flipped_byte, check_random_bytes, check_round_trip

u31 = st.integers(0, 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
names = st.text(max_size=20)
spans = st.builds(HeldSpan, u64, u31, u31, u31)
hops = st.builds(Hop, names, st.lists(spans, max_size=4).map(tuple))
entries = st.lists(st.builds(QueryEntry, u31, u31), max_size=4).map(tuple)
messages = (
    st.builds(Query, u64, u31, u31, u31, u31, names, entries, st.lists(hops, max_size=3).map(tuple))
    | st.builds(Accumulators, u64, u31, u31)
    | st.builds(Refuse, u64, st.text(max_size=40))
    | st.builds(Hidden, u64, u31, u31)
    | st.builds(Tile, u64, u31, u31, st.binary(min_size=16, max_size=16))
    | st.builds(StatePart, u64, u31, u64, st.binary(min_size=16, max_size=16))
)
frames = st.builds(Frame, messages, st.binary(max_size=300))


@given(st.lists(frames, max_size=4), st.integers(1, 97))
@settings(deadline=None)
def test_frames_round_trip_in_any_chunks(sent: list[DataFrame], chunk: int) -> None:
    check_round_trip(DATA_LINK, sent, chunk)


@given(frames, st.data())
@settings(deadline=None)
def test_a_damaged_header_is_an_error_and_a_damaged_meta_is_never_another_kind(
    frame: DataFrame, data: st.DataObject
) -> None:
    check_flipped_byte(DATA_LINK, frame, data)


@given(st.binary(max_size=400), st.integers(1, 50))
@settings(deadline=None)
def test_bytes_that_are_no_frames_are_none(noise: bytes, chunk: int) -> None:
    check_random_bytes(DATA_LINK, noise, chunk)
