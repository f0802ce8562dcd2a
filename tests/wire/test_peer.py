"""Frames of the control link: equal after encode and decode, and an error for each defect."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import Sampling, SlaClass
from batchengine.wire import frames, peer
from batchengine.wire.frames import Decoder, Frame
from batchengine.wire.peer import (
    HOLD_PAGES_MAX,
    PEER_LINK,
    Bulk,
    BulkReceived,
    DataExpected,
    DataReady,
    DataRefused,
    Declined,
    ErasePages,
    Heartbeat,
    Hello,
    HoldGone,
    HoldReserved,
    HoldServed,
    OfferPage,
    OfferState,
    OpenData,
    OpenPipeline,
    PageAnswer,
    PagePart,
    PageSent,
    PagesErased,
    PageStored,
    PeerFrame,
    PeerLoad,
    PeerMessage,
    PipelineEnded,
    PipelineGo,
    PipelineOpened,
    ReadPage,
    ReleaseHold,
    ReserveHold,
    RunTurn,
    ServeHold,
    StateBytes,
    TokenChoice,
    TurnAccepted,
    TurnEnded,
    TurnGo,
    TurnTokens,
)
from tests.wire import checks
from tests.wire.checks import (
    check_allocates_nothing,
    check_flipped_byte,
    check_random_bytes,
    check_round_trip,
    refused,
    samplings,
)

forge = partial(checks.forge, version=peer.VERSION)
count = st.integers(0, 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=40)
counts = [count] * 7
loads = st.builds(PeerLoad, *counts, st.booleans(), count)


def bytes_of(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


finite = st.floats(allow_nan=False)
choices = st.builds(TokenChoice, finite, st.lists(st.tuples(count, finite), max_size=3).map(tuple))
messages: st.SearchStrategy[PeerMessage] = st.one_of(
    st.builds(Hello, text, text, text, text, text, st.lists(text, max_size=3).map(tuple), loads),
    st.builds(Heartbeat, count, count, count, loads),
    st.builds(Declined, text),
    st.just(Bulk()),
    st.builds(BulkReceived, count),
    st.just(OpenData()),
    st.builds(DataExpected, st.binary(min_size=16, max_size=16)),
    st.builds(DataRefused, text),
    st.just(DataReady()),
    st.builds(ReserveHold, count, st.integers(1, HOLD_PAGES_MAX)),
    st.builds(HoldReserved, count, text),
    st.builds(OfferPage, count, count, bytes_of(32), bytes_of(16), st.binary(max_size=99)),
    st.builds(PageAnswer, st.booleans(), text),
    st.builds(PagePart, count, count, count),
    st.builds(PageStored, text),
    st.builds(ServeHold, count),
    st.builds(HoldServed, count, text),
    st.builds(ReleaseHold, count, count),
    st.builds(HoldGone, count, text),
    st.builds(ReadPage, count, count),
    st.builds(PageSent, text),
    st.builds(
        OpenPipeline,
        count,
        st.integers(0, 4095),
        st.integers(1, 4096),
        st.integers(1, 1 << 16).map(lambda pages: 256 * pages),
        st.integers(32, 1024),
        text,
        text,
        st.integers(0, 1 << 16).map(lambda pages: 256 * pages),
    ),
    st.builds(PipelineOpened, text),
    st.builds(PipelineGo, count, count),
    st.builds(PipelineEnded, count, text),
    st.builds(ErasePages, st.binary(max_size=99), count),
    st.builds(OfferState, bytes_of(32), bytes_of(16), st.binary(max_size=99)),
    st.just(StateBytes()),
    st.builds(PagesErased, count, text),
    st.builds(
        RunTurn,
        count,
        st.integers(1, 1 << 24),
        st.integers(1, 1 << 24),
        samplings,
        st.sampled_from(SlaClass),
        st.binary(max_size=99),
    ),
    st.builds(TurnAccepted, text),
    st.builds(TurnTokens, count, st.booleans(), count, st.lists(choices, max_size=3).map(tuple)),
    st.builds(TurnGo, count, count),
    st.builds(TurnEnded, count, st.booleans(), text),
)
whole_frames = st.builds(
    Frame, messages, st.binary(max_size=200), u64, u64, st.sampled_from([0, 1, 2])
)


@given(st.lists(whole_frames, max_size=4), st.integers(1, 97))
@settings(deadline=None)
def test_frames_round_trip_in_any_chunks(sent: list[PeerFrame], chunk: int) -> None:
    check_round_trip(PEER_LINK, sent, chunk)


@given(st.binary(max_size=400), st.integers(1, 50))
@settings(deadline=None)
def test_random_bytes_raise_wire_errors_only(noise: bytes, chunk: int) -> None:
    check_random_bytes(PEER_LINK, noise, chunk)


@given(st.integers(1, 44), st.binary(max_size=120))
@settings(deadline=None)
def test_random_meta_parts_are_messages_or_wire_errors(kind: int, meta: bytes) -> None:
    try:
        (frame,) = Decoder(PEER_LINK).feed(forge(kind, meta))
    except frames.WireError:
        return
    assert PEER_LINK.encode(frame.message)


@given(whole_frames, st.data())
@settings(deadline=None)
def test_a_flipped_byte_is_refused_or_stays_inside_its_field(
    frame: PeerFrame, data: st.DataObject
) -> None:
    check_flipped_byte(PEER_LINK, frame, data)


HOSTILE = [
    (forge(1, b"\x91\x01"), errors.FRAME_META),  # no fields
    (forge(1, b"\x98\x01" + b"\xa1x" * 5 + b"\x90\x90"), None),  # a Hello with a default load
    (forge(1, b"\x98\x01\xda\x01\x01" + b"x" * 257 + b"\xa1x" * 4 + b"\x90\x90"),
     errors.FRAME_META),
    (forge(1, b"\x98\x01" + b"\xa1x" * 5 + b"\xdc\x00\x21" + b"\xa1f" * 33 + b"\x90"),
     errors.FRAME_META),  # 33 features
    (forge(2, b"\x95\x02\xff\x00\x00\x90"), errors.FRAME_META),  # a clock below 0
    (forge(2, b"\x95\x02\xcf" + b"\xff" * 8 + b"\x00\x00\x90"), errors.FRAME_META),
    (forge(2, b"\x95\x02\xca\x00\x00\x00\x00\x00\x00\x90"), errors.FRAME_META),  # a float
    (forge(3, b"\x92\x03\xda\x04\x01" + b"x" * 1025), errors.FRAME_META),
    (forge(3, b"\x92\x03\xa1\xff"), errors.FRAME_META),  # not UTF-8
    (forge(4, b"\x91" * 5000), errors.FRAME_META),
    (forge(4, b"\x91\x05"), errors.FRAME_META),
    (forge(5, b"\x91\x04"), errors.FRAME_MISMATCH),
    (forge(6, b"\x92\x06\x00"), errors.FRAME_META),
    (forge(7, b"\x92\x07\xc4\x0f" + bytes(15)), errors.FRAME_META),  # a short token
    (forge(7, b"\x92\x07\xc4\x11" + bytes(17)), errors.FRAME_META),
    (forge(8, b"\x92\x08\xda\x01\x01" + b"x" * 257), errors.FRAME_META),
    (forge(10, b"\x93\x0a\x01\x00"), errors.FRAME_META),  # no page
    (forge(10, b"\x93\x0a\xff\x01"), errors.FRAME_META),  # a hold below 0
    (forge(12, b"\x96\x0c\x01\x01" + b"\xc4\x1f" + bytes(31) + b"\xc4\x10" + bytes(16)
           + b"\xc4\x00"), errors.FRAME_META),  # a short key
    (forge(18, b"\x92\x12\x01"), errors.FRAME_META),
    (forge(42, b"\x95\x2a\x01\xc2\xff\x90"), errors.FRAME_META),  # a position below 0
    (forge(44, b"\x94\x2c\x01\x01\xa0"), errors.FRAME_META),  # no boolean
    (forge(99, b"\x91\x63"), errors.FRAME_KIND),
    (forge(4, b"\x91\x04", version=peer.VERSION + 1), errors.FRAME_VERSION),
    (forge(4, b"\x91\x04", payload_len=2**32 - 1), errors.PAYLOAD_TOO_LONG),
]  # fmt: skip


@pytest.mark.parametrize(("data", "error"), HOSTILE)
def test_every_defect_has_its_error(data: bytes, error: errors.Problem | None) -> None:
    if error is None:
        (frame,) = Decoder(PEER_LINK).feed(data)
        assert frame.message == Hello(*["x"] * 5, (), PeerLoad())
        return
    with refused(error):
        list(Decoder(PEER_LINK).feed(data))


@pytest.mark.parametrize(
    "asked",
    [
        RunTurn(1, 0, 1, Sampling(), SlaClass.BATCH, b""),
        RunTurn(1, 1 << 25, 1, Sampling(), SlaClass.BATCH, b""),
        RunTurn(1, 1, 1, Sampling(temperature=float("nan")), SlaClass.BATCH, b""),
        RunTurn(1, 1, 1, Sampling(logit_bias=((-1, 0.0),)), SlaClass.BATCH, b""),
        RunTurn(1, 1, 1, Sampling(logprobs=21), SlaClass.BATCH, b""),
        RunTurn(1, 1, 1, Sampling(), SlaClass.BATCH, bytes(1025)),
        TurnTokens(1, False, 0, (TokenChoice(0.0, ((1, 0.0),) * 21),)),
    ],
)
def test_a_turn_that_no_worker_could_compute(asked: PeerMessage) -> None:
    with refused(errors.FRAME_META):
        list(Decoder(PEER_LINK).feed(PEER_LINK.encode(asked)))


def test_a_huge_length_allocates_nothing() -> None:
    check_allocates_nothing(PEER_LINK, forge(4, b"\x91\x04", payload_len=2**32 - 1))
