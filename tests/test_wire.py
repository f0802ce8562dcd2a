"""Frames: what goes in comes out whatever the chunking, and each lie has its own error."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine import wire
from batchengine.wire import (
    HEADER,
    Adopt,
    AnyMessage,
    Attach,
    BlockingLink,
    Decoder,
    Digest,
    Entry,
    Failed,
    Frame,
    FromArena,
    FromPage,
    Ping,
    Place,
    Retitle,
    Row,
    Spec,
    Step,
    StepDone,
    Verify,
    encode,
)

u31 = st.integers(0, 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
number = st.floats(allow_nan=False, width=32)
specs = st.builds(
    Spec, number, u31, number, number, number, number, number, u64, st.integers(-1, 20),
    st.lists(st.tuples(u31, number), max_size=3).map(tuple), u31,
)  # fmt: skip
entries = st.builds(Entry, u64, u31, u31, u31, u31, st.none() | specs)
places = st.lists(u31, max_size=4).map(tuple)
digest = st.binary(min_size=16, max_size=16)
whole_places = st.builds(Place, u31, u31, digest, u64, u31)
sources = st.builds(FromArena, st.text(max_size=30), u31, u31, u64) | st.builds(
    FromPage, u64, u64, digest
)


def few(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=3).map(tuple)


messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.just(Ping()),
    st.builds(Attach, st.text(max_size=30), u31, u31, st.text(max_size=30), st.text(max_size=30)),
    st.builds(Failed, st.text(), st.text(), st.text(), st.text(), st.booleans()),
    st.builds(
        Step, st.lists(entries, max_size=4).map(tuple), places,
        few(whole_places), few(st.builds(Digest, u31, u31)),
        few(st.builds(Verify, u64, u64, digest)),
        few(st.builds(Retitle, u31, u31, digest, u64, u31, u31)),
        few(st.builds(Adopt, whole_places, u31, sources)), few(u64),
    ),
    st.builds(
        StepDone,
        st.lists(st.builds(Row, u64, u31, number), max_size=4).map(tuple),
        places, st.lists(digest, max_size=3).map(tuple),
        st.lists(st.booleans(), max_size=3).map(tuple), u31, u31, places,
    ),
)  # fmt: skip
frames = st.builds(Frame, messages, st.binary(max_size=200), u64, u64, st.integers(0, 2**32 - 1))


def pack(frame: Frame) -> bytes:
    return encode(
        frame.message,
        frame.payload,
        step=frame.step,
        incarnation=frame.incarnation,
        attempt=frame.attempt,
    )


def forge(*, magic: bytes = b"BEWF", version: int = 2, kind: int = 9, flags: int = 0,
          meta: bytes = b"\x91\x09", meta_len: int | None = None, payload_len: int = 0,
          crc: int | None = None) -> bytes:  # fmt: skip
    head = HEADER.pack(
        magic, version, kind, flags, len(meta) if meta_len is None else meta_len, payload_len,
        0, 0, 0, 0,
    )[:-4]  # fmt: skip
    return head + struct.pack("<I", zlib.crc32(head) if crc is None else crc) + meta


def test_forge_is_a_valid_frame_by_default() -> None:
    assert [f.message for f in Decoder().feed(forge())] == [Ping()]


@given(st.lists(frames, max_size=4), st.integers(1, 97))
@settings(max_examples=150, deadline=None)
def test_round_trip_in_any_chunking(sent: list[Frame], chunk: int) -> None:
    data = b"".join(pack(f) for f in sent)
    assert list(Decoder().feed(data)) == sent
    for size in (1, chunk):
        decoder = Decoder()
        got = [f for i in range(0, len(data), size) for f in decoder.feed(data[i : i + size])]
        decoder.end()
        assert got == sent


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_noise_never_becomes_a_frame_or_another_error(noise: bytes) -> None:
    decoder = Decoder()
    try:
        assert list(decoder.feed(noise)) == []
        decoder.end()
    except wire.WireError:
        pass


@given(frames, st.data())
@settings(max_examples=300, deadline=None)
def test_a_flipped_byte_is_refused_or_stays_inside_its_field(
    frame: Frame, data: st.DataObject
) -> None:
    good = pack(frame)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    whole: list[Frame] | type[Exception]
    try:
        whole = list(Decoder().feed(bytes(bad)))
    except wire.WireError as error:
        whole = type(error)
    decoder = Decoder()
    bytewise: list[Frame] | type[Exception]
    try:
        bytewise = [f for b in bad for f in decoder.feed(bytes([b]))]
    except wire.WireError as error:
        bytewise = type(error)
    assert repr(whole) == repr(bytewise)  # repr: a NaN inside a flipped float equals itself
    if at < HEADER.size:
        assert isinstance(whole, type), "a damaged header must never yield a frame"


LIES = [
    (forge(magic=b"HTTP"), wire.BadMagic),
    (forge(version=1), wire.BadVersion),
    (forge(crc=1), wire.BadHeaderChecksum),
    (forge(flags=1), wire.BadFlags),
    (forge(kind=999), wire.UnknownKind),
    (forge(meta_len=wire.META_BYTES_MAX + 1), wire.MetaTooLong),
    (forge(meta_len=2**32 - 1), wire.MetaTooLong),
    (forge(payload_len=wire.PAYLOAD_BYTES_MAX + 1), wire.PayloadTooLong),
    (forge(payload_len=2**64 - 1), wire.PayloadTooLong),
    (forge(meta=b"\xc1"), wire.BadMeta),
    (forge(meta=b""), wire.BadMeta),
    (forge(meta=b"\x91\x09" * 2), wire.BadMeta),  # trailing bytes
    (forge(meta=b"\x92\x09\x01"), wire.BadMeta),  # one field too many
    (forge(meta=b"\x91\x63"), wire.BadMeta),  # unknown tag
    (forge(kind=6, meta=b"\x92\x06\xa1x", payload_len=0), wire.BadMeta),  # entries is a string
    (forge(kind=6, meta=b"\x95\x06\x90\x90\x90\x91\x00"), wire.BadMeta),  # a bare digest: version 1
    (forge(meta=b"\x91" * 5000), wire.BadMeta),  # deep nesting
    (forge(kind=11), wire.KindMismatch),
]


@pytest.mark.parametrize(("data", "error"), LIES)
def test_every_lie_has_its_error(data: bytes, error: type[wire.WireError]) -> None:
    decoder = Decoder()
    with pytest.raises(error) as caught:
        list(decoder.feed(data))
    assert type(caught.value) is error
    with pytest.raises(error):  # the link stays dead
        list(decoder.feed(forge()))
    left, right = socket.socketpair()
    with left, right:
        threading.Thread(target=left.sendall, args=(data,)).start()
        with pytest.raises(error):
            BlockingLink(right).receive()


def test_error_codes_are_distinct() -> None:
    errors = wire.WireError.__subclasses__()
    assert len({e.wire_code for e in errors}) == len(errors) == 10


def test_a_huge_length_allocates_nothing() -> None:
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(wire.PayloadTooLong):
        list(Decoder().feed(forge(payload_len=1 << 40)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_end_inside_a_frame() -> None:
    for cut in (1, 47, 48, 49):
        decoder = Decoder()
        assert list(decoder.feed(forge()[:cut])) == []
        with pytest.raises(wire.Truncated):
            decoder.end()
        left, right = socket.socketpair()
        with left, right:
            left.sendall(forge()[:cut])
            left.shutdown(socket.SHUT_WR)
            with pytest.raises(wire.Truncated):
                BlockingLink(right).receive()


def test_encode_refuses_what_the_reader_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PAYLOAD_BYTES_MAX", 8)
    with pytest.raises(wire.PayloadTooLong):
        encode(Ping(), b"123456789")
    monkeypatch.setattr(wire, "META_BYTES_MAX", 8)
    with pytest.raises(wire.MetaTooLong):
        encode(Failed("BE1", "x" * 9, "", "", True))


def test_blocking_and_asyncio_ends_talk() -> None:
    left, right = socket.socketpair()
    sent = Frame(Step((Entry(1, 2, 3, 4, 5, None),)), bytes(range(256)) * 4000, 7, 8, 9)

    def echo() -> None:
        link = BlockingLink(right)
        while (frame := link.receive()) is not None:
            link.send(pack(frame))
        link.close()

    thread = threading.Thread(target=echo)
    thread.start()

    async def talk() -> list[Frame]:
        loop = asyncio.get_running_loop()
        got: list[Frame] = []
        done: asyncio.Future[Exception | None] = loop.create_future()
        enough = asyncio.Event()

        def on_frame(frame: Frame) -> None:
            got.append(frame)
            if len(got) == 3:
                enough.set()

        protocol = wire.FrameProtocol(on_frame, done.set_result)
        await loop.create_connection(lambda: protocol, sock=left)
        for _ in range(3):
            protocol.send(pack(sent))
        await enough.wait()
        protocol.close()
        assert await done is None
        return got

    assert asyncio.run(talk()) == [sent] * 3
    thread.join(5)
    assert not thread.is_alive()


def test_asyncio_end_reports_bad_bytes_once() -> None:
    left, right = socket.socketpair()

    async def talk() -> Exception | None:
        lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        protocol = wire.FrameProtocol(lambda _: None, lost.set_result)
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=left)
        right.sendall(forge(flags=4))
        return await lost

    with right:
        assert isinstance(asyncio.run(talk()), wire.BadFlags)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_frame_for_a_worker_that_just_died_is_no_error(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Its link may end before its pidfd says so; uvloop refuses to write to a closed transport."""
    left, right = socket.socketpair()

    async def talk() -> None:
        lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        protocol = wire.FrameProtocol(lambda _: None, lost.set_result)
        await asyncio.get_running_loop().create_connection(lambda: protocol, sock=left)
        right.close()
        await lost
        for _ in range(2):
            protocol.send(b"a frame")
            await asyncio.sleep(0)
        protocol.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())
