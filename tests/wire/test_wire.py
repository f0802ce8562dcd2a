"""Frames: equal after encode and decode in any chunks, and an error for each defect."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import Sampling
from batchengine.wire import frames
from batchengine.wire.connection import FrameProtocol
from batchengine.wire.frames import (
    HEADER,
    BlockingLink,
    Decoder,
    Frame,
    LinkSchema,
    Message,
)
from batchengine.wire.lane import (
    LANE_LINK,
    Attach,
    CloseLink,
    CloseStage,
    CpuResources,
    CudaResources,
    Digest,
    Entry,
    Failed,
    FromArena,
    FromPage,
    Gather,
    GatherChanged,
    GatherPages,
    GatherState,
    Hold,
    HoldChanged,
    ImportRows,
    LaneFrame,
    LaneMessage,
    LinkChanged,
    LinkIdentity,
    Load,
    ModelFacts,
    OpenLink,
    OpenStage,
    Part,
    Ping,
    Pong,
    Ready,
    Relabel,
    Release,
    ReserveSlot,
    SampledRow,
    Segment,
    StageChanged,
    StageDone,
    StageStep,
    Step,
    StepDone,
    Verify,
)
from kv_store.layout import KvHeads
from tests.wire import checks
from tests.wire.checks import (
    check_allocates_nothing,
    check_flipped_byte,
    check_random_bytes,
    check_round_trip,
    pack,
    refused,
    samplings,
)

forge = partial(checks.forge, version=LANE_LINK.version, kind=9, meta=b"\x91\x09")
u31 = st.integers(0, 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
number = st.floats(allow_nan=False, width=32)
segments = st.lists(st.builds(Segment, u31, u64, u31, u31), max_size=3).map(tuple)
entries = st.builds(Entry, u64, u31, u31, u31, u31, st.none() | samplings, u31, segments)
slots = st.lists(u31, max_size=4).map(tuple)
digest = st.binary(min_size=16, max_size=16)
whole_slots = st.builds(ReserveSlot, u31, u31, digest, u64, u31)
sources = st.builds(FromArena, st.text(max_size=30), u31, u31, u64) | st.builds(
    FromPage, u64, u64, digest
)


def few(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=3).map(tuple)


messages: st.SearchStrategy[LaneMessage] = st.one_of(
    st.just(Ping()),
    st.builds(
        Load, st.text(max_size=30), st.text(max_size=30),
        st.builds(CpuResources, u31, st.lists(u31, max_size=4).map(tuple), u31)
        | st.builds(CudaResources, u31, u64, u31, u31, st.lists(u31, max_size=4).map(tuple), u31),
        u31, u31, u31,
        st.none() | st.builds(LinkIdentity, st.text(max_size=9), st.text(max_size=9)),
    ),
    st.builds(
        Ready,
        st.builds(
            ModelFacts, st.text(max_size=9), st.text(max_size=9), u31,
            few(st.builds(KvHeads, u31, u31, u31)), u31, u31,
            st.dictionaries(st.text(max_size=9), st.text(max_size=9) | u31 | number, max_size=3),
            st.none(), u31, st.booleans(), few(st.booleans()),
        ),
    ),
    st.builds(Attach, st.text(max_size=30), u31, u31, st.text(max_size=30), st.text(max_size=30)),
    st.builds(Failed, st.text(), st.text(), st.text(), st.text(), st.booleans()),
    st.builds(
        Step, st.lists(entries, max_size=4).map(tuple), slots,
        few(whole_slots), few(st.builds(Digest, u31, u31)),
        few(st.builds(Verify, u64, u64, digest)),
        few(st.builds(Relabel, u31, u31, digest, u64, u31, u31)),
        few(st.builds(ImportRows, whole_slots, u31, sources)), few(u64), u31, few(u64),
    ),
    st.builds(
        StepDone,
        st.lists(st.builds(SampledRow, u64, u31, number), max_size=4).map(tuple),
        slots, st.lists(digest, max_size=3).map(tuple),
        st.lists(st.booleans(), max_size=3).map(tuple), u31, slots, slots,
    ),
    st.builds(Pong, st.dictionaries(st.text(max_size=9), u31, max_size=3)),
    st.builds(OpenLink, u31, st.text(max_size=9), st.binary(max_size=16), st.booleans()),
    st.builds(CloseLink, u31),
    st.builds(Hold, u64, few(u64)),
    st.builds(Release, u64),
    st.builds(LinkChanged, u31, st.booleans(), st.text(max_size=9)),
    st.builds(HoldChanged, u64, st.booleans(), st.text(max_size=9)),
    st.builds(
        OpenStage, u64, u31, u31, u31,
        st.text(max_size=9), st.text(max_size=9), st.text(max_size=9),
    ),
    st.builds(CloseStage, u64),
    st.builds(StageStep, u64, u31, u31),
    st.builds(StageDone, u64, u31, st.text(max_size=9)),
    st.builds(StageChanged, u64, u31, st.text(max_size=9)),
    st.builds(Gather, u64, few(st.builds(Part, st.text(max_size=9), u31, u31))),
    st.builds(GatherPages, u64, slots),
    st.builds(GatherChanged, u64, u31, u31, st.text(max_size=9), u31),
    st.builds(GatherState, u64, u31, st.text(max_size=9), u64),
)  # fmt: skip
whole_frames = st.builds(
    Frame, messages, st.binary(max_size=200), u64, u64, st.integers(0, 2**32 - 1)
)


def test_forge_is_a_valid_frame_by_default() -> None:
    assert [f.message for f in Decoder(LANE_LINK).feed(forge())] == [Ping()]


@given(st.lists(whole_frames, max_size=4), st.integers(1, 97))
@settings(deadline=None)
def test_frames_round_trip_in_any_chunks(sent: list[LaneFrame], chunk: int) -> None:
    check_round_trip(LANE_LINK, sent, chunk)


@given(st.binary(max_size=400), st.integers(1, 50))
@settings(deadline=None)
def test_random_bytes_raise_wire_errors_only(noise: bytes, chunk: int) -> None:
    check_random_bytes(LANE_LINK, noise, chunk)


@given(whole_frames, st.data())
@settings(deadline=None)
def test_a_flipped_byte_is_refused_or_stays_inside_its_field(
    frame: LaneFrame, data: st.DataObject
) -> None:
    check_flipped_byte(LANE_LINK, frame, data)


HOSTILE = [
    (forge(magic=b"HTTP"), errors.FRAME_MAGIC),
    (forge(version=2), errors.FRAME_VERSION),
    (forge(crc=1), errors.FRAME_HEADER),
    (forge(flags=1), errors.FRAME_FLAGS),
    (forge(kind=999), errors.FRAME_KIND),
    (forge(meta_len=frames.META_BYTES_MAX + 1), errors.META_TOO_LONG),
    (forge(meta_len=2**32 - 1), errors.META_TOO_LONG),
    (forge(payload_len=frames.PAYLOAD_BYTES_MAX + 1), errors.PAYLOAD_TOO_LONG),
    (forge(payload_len=2**64 - 1), errors.PAYLOAD_TOO_LONG),
    (forge(meta=b"\xc1"), errors.FRAME_META),
    (forge(meta=b""), errors.FRAME_META),
    (forge(meta=b"\x91\x09" * 2), errors.FRAME_META),  # trailing bytes
    (forge(meta=b"\x92\x09\x01"), errors.FRAME_META),  # one field too many
    (forge(meta=b"\x91\x63"), errors.FRAME_META),  # unknown tag
    (forge(kind=6, meta=b"\x92\x06\xa1x", payload_len=0), errors.FRAME_META),  # entries: text
    (
        forge(kind=6, meta=b"\x95\x06\x90\x90\x90\x91\x00"),
        errors.FRAME_META,
    ),  # a bare digest: version 1
    (forge(kind=1, meta=b"\x97\x01\xa1m\xa1c\x91\xa3tpu\x01\x01\x01"), errors.FRAME_META),  # device
    (forge(meta=b"\x91" * 5000), errors.FRAME_META),  # deep nesting
    (forge(kind=11), errors.FRAME_MISMATCH),
]


@pytest.mark.parametrize(("data", "error"), HOSTILE)
def test_every_defect_has_its_error(data: bytes, error: errors.Problem) -> None:
    decoder = Decoder(LANE_LINK)
    with refused(error):
        list(decoder.feed(data))
    with refused(error):  # the link stays closed
        list(decoder.feed(forge()))
    left, right = socket.socketpair()
    with left, right:
        threading.Thread(target=left.sendall, args=(data,)).start()
        with refused(error):
            BlockingLink(right, LANE_LINK).receive()


def test_every_error_of_a_frame_has_a_case() -> None:
    seen = {row.code for _, row in HOSTILE} | {errors.FRAME_TRUNCATED.code}
    assert seen == {code for code in errors.CATALOGUE if code.startswith("BE21")}
    assert len(seen) == 10


def test_a_huge_length_allocates_nothing() -> None:
    check_allocates_nothing(LANE_LINK, forge(payload_len=1 << 40))


def test_an_end_inside_a_frame_is_an_error() -> None:
    for cut in (1, 47, 48, 49):
        decoder = Decoder(LANE_LINK)
        assert list(decoder.feed(forge()[:cut])) == []
        with refused(errors.FRAME_TRUNCATED):
            decoder.end()
        left, right = socket.socketpair()
        with left, right:
            left.sendall(forge()[:cut])
            left.shutdown(socket.SHUT_WR)
            with pytest.raises(frames.Truncated):
                BlockingLink(right, LANE_LINK).receive()


def test_sampling_is_encoded_by_field_name_and_checked_by_type() -> None:
    entry = Entry(1, 2, 3, 4, 5, Sampling(temperature=0.5, logit_bias=((7, -1.0),)))
    good = LANE_LINK.encode(Step((entry,)))
    (frame,) = Decoder(LANE_LINK).feed(good)
    assert frame.message == Step((entry,))
    meta = good[HEADER.size :].replace(b"\xa5top_k\x00", b"\xa5top_k\xc0")
    assert len(meta) == len(good) - HEADER.size
    with refused(errors.FRAME_META, match="top_k"):
        list(Decoder(LANE_LINK).feed(forge(kind=6, meta=meta)))


def test_encode_refuses_what_the_reader_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PAYLOAD_BYTES_MAX", 8)
    with refused(errors.PAYLOAD_TOO_LONG):
        LANE_LINK.encode(Ping(), b"123456789")
    monkeypatch.setattr(frames, "META_BYTES_MAX", 8)
    with refused(errors.META_TOO_LONG):
        LANE_LINK.encode(Failed("BE1", "x" * 9, "", "", True))


def test_blocking_and_asyncio_ends_exchange_frames() -> None:
    left, right = socket.socketpair()
    sent: LaneFrame = Frame(Step((Entry(1, 2, 3, 4, 5, None),)), bytes(range(256)) * 4000, 7, 8, 9)

    def echo() -> None:
        link = BlockingLink(right, LANE_LINK)
        while (frame := link.receive()) is not None:
            link.send(pack(LANE_LINK, frame))
        link.close()

    thread = threading.Thread(target=echo)
    thread.start()

    async def talk() -> list[LaneFrame]:
        loop = asyncio.get_running_loop()
        got: list[LaneFrame] = []
        done: asyncio.Future[Exception | None] = loop.create_future()
        enough = asyncio.Event()

        def on_frame(frame: LaneFrame) -> None:
            got.append(frame)
            if len(got) == 3:
                enough.set()

        protocol = FrameProtocol(LANE_LINK, on_frame, done.set_result)
        await loop.create_connection(lambda: protocol, sock=left)
        for _ in range(3):
            protocol.send(pack(LANE_LINK, sent))
        await enough.wait()
        protocol.close()
        assert await done is None
        return got

    assert asyncio.run(talk()) == [sent] * 3
    thread.join(5)
    assert not thread.is_alive()


class Hello(Message, tag=1, frozen=True):
    """A message of another kind of link, whose tag is in use on the lane link too."""

    name: str


OTHER_LINK = LinkSchema[Hello](LANE_LINK.version + 1, Hello)


def test_each_kind_of_link_has_its_own_messages_and_version() -> None:
    hello = OTHER_LINK.encode(Hello("b"), b"payload", step=3)
    (frame,) = Decoder(OTHER_LINK).feed(hello)
    assert (frame.message, frame.payload, frame.step) == (Hello("b"), b"payload", 3)
    with refused(errors.FRAME_VERSION):
        list(Decoder(LANE_LINK).feed(hello))
    same_version = LinkSchema[Hello](LANE_LINK.version, Hello)
    with refused(errors.FRAME_KIND):
        list(Decoder(same_version).feed(LANE_LINK.encode(Ping())))
    with refused(errors.FRAME_META):
        list(Decoder(LANE_LINK).feed(same_version.encode(Hello("b"))))


def test_a_received_payload_of_any_size_is_aligned_and_read_only() -> None:
    left, right = socket.socketpair()
    with left, right:
        link = BlockingLink(right, LANE_LINK)
        for size in (0, 8, 100_000, 24, 300_000, 16):
            sent = bytes(range(256)) * (size // 256 + 1)
            frame: LaneFrame = Frame(Failed("BE1", "x" * (size % 7), "", "", False), sent, size)
            writer = threading.Thread(target=left.sendall, args=(pack(LANE_LINK, frame),))
            writer.start()
            got = link.receive()
            writer.join()
            assert got == frame
            payload = memoryview(got.payload)
            assert payload.readonly
            assert np.frombuffer(payload, np.uint8).ctypes.data % 8 == 0


def test_a_received_payload_stays_while_further_frames_come() -> None:
    """A worker has three steps in flight, and takes them all while it waits for a mask."""
    left, right = socket.socketpair()
    with left, right:
        link, sent = BlockingLink(right, LANE_LINK), [bytes([i]) * 64 for i in range(4)]
        for payload in sent:
            left.sendall(LANE_LINK.encode(Ping(), payload))
        received = [link.receive() for _ in sent]
        assert [bytes(frame.payload) for frame in received if frame is not None] == sent


def test_the_asyncio_end_reports_bad_bytes_once() -> None:
    left, right = socket.socketpair()

    async def talk() -> Exception | None:
        lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        protocol = FrameProtocol(LANE_LINK, lambda _: None, lost.set_result)
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=left)
        right.sendall(forge(flags=4))
        return await lost

    with right:
        error = asyncio.run(talk())
    assert isinstance(error, frames.WireError)
    assert error.code == errors.FRAME_FLAGS.code


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_sending_to_a_worker_that_just_died_raises_nothing(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Its link may end before its pidfd reports it; uvloop does not write to closed transports."""
    left, right = socket.socketpair()

    async def talk() -> None:
        lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        protocol = FrameProtocol(LANE_LINK, lambda _: None, lost.set_result)
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=left)
        right.close()
        await lost
        for _ in range(2):
            protocol.send(b"a frame")
            await asyncio.sleep(0)
        protocol.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())
