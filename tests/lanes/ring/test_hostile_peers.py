"""What a peer that lies, repeats or floods can do to a worker: lose its own link, nothing else."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

import kernels as K
from batchengine.wire import data
from batchengine.wire import lane as wire
from batchengine.wire.data import DATA_LINK, Accumulators, HeldSpan, Hop, Query, QueryEntry, Refuse
from batchengine.wire.frames import Decoder
from kernels import SUPERPAGE_TOKENS
from kv_store.layout import PageLayout
from tests.lanes.ring.scene import Entry, Node, Piece, Scene, running_scene, same_rows
from tests.support.engines import words

LENGTH = 2 * SUPERPAGE_TOKENS + 40
HEADS, GROUP, DIM = 4, 2, 64  # of the pocket model: query heads, those of a KV head


class Peer:
    """The test as a daemon: the other end of a data link of a worker."""

    def __init__(self, sock: socket.socket, node: Node, number: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.node = node
        self.number = number
        self._decoder = Decoder(DATA_LINK)

    async def send(self, message: data.DataMessage, payload: bytes = b"") -> None:
        await self.send_bytes(DATA_LINK.encode(message, payload))

    async def send_bytes(self, frame: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, frame)

    async def receive(self) -> list[data.DataFrame]:
        """The frames that come next, at least one."""
        async with asyncio.timeout(60):
            while True:
                got = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20)
                assert got, "the worker closed the link"
                if found := list(self._decoder.feed(got)):
                    return found

    async def one(self) -> data.DataFrame:
        (frame,) = await self.receive()
        return frame

    async def ends(self) -> str:
        """Wait until the worker has closed the link; returns why."""
        event = await self.node.next_change(self.number)
        assert not event.is_up
        return event.why


async def peer_of(scene: Scene, name: str, number: int, peer: str = "m") -> Peer:
    ours, theirs = socket.socketpair()
    scene.sockets.append(ours)
    with theirs:
        node = scene[name]
        node.links[peer] = number
        node.lane.open_link(wire.OpenLink(number, peer, number.to_bytes(16, "big"), False), theirs)
        await node.until(wire.LinkChanged(number, True))
    return Peer(ours, node, number)


@asynccontextmanager
async def scene_of(model: Path, cache_dir: Path, folder: Path) -> AsyncIterator[Scene]:
    async with running_scene("a", model, cache_dir, folder) as scene:
        await scene["a"].prefill(1, words(1, LENGTH))
        await scene.hold("a", 1)
        yield scene


def good_query(scene: Scene, unit: int = 1) -> Query:
    """A query that `a` answers at once; the peer is its owner."""
    hold = scene["a"].holds[1]
    hop = Hop("a", (HeldSpan(hold, 0, 0, 2),))
    return Query(unit, 0, 0, HEADS, 0, "m", (QueryEntry(1, 2 * SUPERPAGE_TOKENS),), (hop,))


def queries(tokens: int = 1, heads: int = HEADS, dim: int = DIM) -> bytes:
    return bytes(tokens * heads * (dim + dim // 8))


replace = msgspec.structs.replace


def with_span(query: Query, **fields: int) -> Query:
    hop = query.hops[0]
    return replace(query, hops=(replace(hop, spans=(replace(hop.spans[0], **fields),)),))


def with_entry(query: Query, **fields: int) -> Query:
    return replace(query, entries=(replace(query.entries[0], **fields),))


def malformed(good: Query) -> list[tuple[Query, bytes]]:
    """Queries that name what is not there."""
    hop, entry = good.hops[0], good.entries[0]
    changed = [
        replace(good, layer=4),
        replace(good, layer=-1),
        replace(good, first_head=HEADS),
        replace(good, first_head=-1),
        replace(good, first_head=-GROUP),
        replace(good, first_head=1 << 62, n_heads=1),
        replace(good, first_head=1, n_heads=GROUP),
        replace(good, n_heads=GROUP + 1),
        replace(good, n_heads=HEADS + GROUP),
        replace(good, n_heads=0),
        replace(good, n_heads=-GROUP),
        replace(good, n_heads=1 << 62),
        replace(good, window=-1),
        replace(good, window=(1 << 31) + 1),
        replace(good, hops=()),
        replace(good, hops=(replace(hop, peer="b"),)),
        replace(good, hops=(hop, Hop("unlinked", hop.spans))),
        replace(good, hops=(hop,) * 65),
        replace(good, entries=()),
        replace(good, entries=(entry, entry)),
        replace(good, hops=(replace(hop, spans=hop.spans * 2),)),
        with_entry(good, n_tokens=0),
        with_entry(good, n_tokens=-1),
        with_entry(good, n_tokens=1 << 40),
        with_entry(good, start=2 * SUPERPAGE_TOKENS - 1),
        with_entry(good, start=-1),
        with_entry(good, start=1 << 62),
        with_span(good, hold=good.hops[0].spans[0].hold ^ 1),
        with_span(good, hold=-1),
        with_span(good, page=1),
        with_span(good, page=-4),
        with_span(good, page=1 << 63),
        with_span(good, count=0),
        with_span(good, count=3),
        with_span(good, count=-1),
        with_span(good, count=1 << 62),
        with_span(good, first=-1),
        with_span(good, first=1 << 62),
    ]
    payload = queries()
    return [(query, payload) for query in changed] + [
        (good, payload[:-1]),
        (good, payload + b"\0"),
        (good, b""),
        (good, queries(2)),
        (replace(good, n_heads=1), payload),
        (replace(good, first_head=GROUP, n_heads=GROUP), payload),
    ]


async def test_queries_for_what_is_not_there_are_refused(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        peer = await peer_of(scene, "a", 1)
        for query, payload in malformed(good_query(scene)):
            await peer.send(query, payload)
            answer = (await peer.one()).message
            assert isinstance(answer, Refuse), (query, answer)
            assert (answer.unit, bool(answer.why)) == (1, True)
        await peer.send(good_query(scene), queries())
        frame = await peer.one()
        assert frame.message == Accumulators(1, 0, 0)
        part = K.Partials(1, HEADS, DIM)
        part.load_bytes(frame.payload)
        assert part.spans == [(0, 2)]
        for first in range(HEADS):  # some of the heads that read a KV head
            await peer.send(replace(good_query(scene), first_head=first, n_heads=1), queries(1, 1))
            part = K.Partials(1, 1, DIM)
            part.load_bytes((await peer.one()).payload)
            assert part.spans == [(0, 2)]


OTHER = wire.HeadShape(3, 3, 32, 12)  # of a model that the worker does not have


async def held(scene: Scene, hold: int, codes: tuple[int, ...], shape: wire.HeadShape) -> str:
    """Have the worker hold pages of another model; returns why it does not, or ""."""
    node = scene["a"]
    node.lane.note(wire.Hold(hold, codes, shape))
    while True:
        for event in list(node.events):
            if isinstance(event, wire.HoldChanged) and event.hold == hold:
                node.events.remove(event)
                return event.why
        node.changed.clear()
        async with asyncio.timeout(60):
            await node.changed.wait()


async def test_pages_of_another_model(pocket_path: Path, cache_dir: Path, tmp_path: Path) -> None:
    """They are attended to with the heads of that model, and with no others."""
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        page_bytes = PageLayout.uniform(OTHER.n_layer, OTHER.n_kv_head, OTHER.head_dim).page_bytes
        (tmp_path / "ext/000001.kv").write_bytes(bytes(8 * page_bytes))
        codes = tuple(1 << 32 | slot for slot in range(8))
        peer, good = await peer_of(scene, "a", 1), good_query(scene)
        assert not await held(scene, 5, codes, OTHER)
        shapes = (
            (3, 3, 48, 12),
            (3, 3, 32, 10),
            (0, 3, 32, 12),
            (3, -1, 32, 12),
            (3, 3, 1 << 40, 3),
        )
        for shape in shapes:
            assert await held(scene, 6, codes, wire.HeadShape(*shape)), shape
        for wrong in ((1 << 32 | 8,), (2 << 32,), (1 << 63,), (-1,)):
            assert await held(scene, 6, wrong, OTHER), wrong
        assert "bytes" in await held(scene, 6, (1 << 32,), wire.HeadShape(3, 6, 32, 12))
        span = HeldSpan(5, 0, 0, 2)
        query = replace(good, n_heads=12, hops=(Hop("a", (span,)),))
        payload = bytes(12 * (32 + 32 // 8))
        entry = good.entries[0]
        for refused, data in (
            (query, queries()),
            (query, payload[:-1]),
            (replace(query, layer=3), payload),
            (replace(query, n_heads=16), payload),
            (replace(query, first_head=4), payload),
            (with_span(query, count=3), payload),
            (
                replace(
                    query,
                    entries=(entry, entry),
                    hops=(Hop("a", (span, good.hops[0].spans[0])),),
                ),
                payload * 2,
            ),
        ):
            await peer.send(refused, data)
            assert isinstance((await peer.one()).message, Refuse), refused
        for layer in range(3):
            await peer.send(replace(query, layer=layer), payload)
            frame = await peer.one()
            assert frame.message == Accumulators(1, layer, 0)
            part = K.Partials(1, 12, 32)
            part.load_bytes(frame.payload)
            assert part.spans == [(0, 2)]
        await peer.send(good, queries())  # its own model's, beside them
        assert (await peer.one()).message == Accumulators(1, 0, 0)
        scene["a"].lane.note(wire.Release(5))
        await peer.send(query, payload)
        assert isinstance((await peer.one()).message, Refuse)


LATENT = wire.HeadShape(1, 1, 576, 128, 64)  # as DeepSeek V3, but for its layers


async def test_latent_pages_of_another_model(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Accumulators have the dims that V has, and no others; a query may be of any of the heads that
    read the one KV head, as long as its answer is one message."""
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        page_bytes = PageLayout.uniform(1, 1, LATENT.head_dim, LATENT.v_first).page_bytes
        (tmp_path / "ext/000001.kv").write_bytes(bytes(8 * page_bytes))
        codes = tuple(1 << 32 | slot for slot in range(8))
        peer, good = await peer_of(scene, "a", 1), good_query(scene)
        for v_first in (-32, 48, LATENT.head_dim):
            assert await held(scene, 6, codes, wire.HeadShape(1, 1, 576, 128, v_first)), v_first
        assert not await held(scene, 5, codes, LATENT)
        query = replace(good, n_heads=5, hops=(Hop("a", (HeldSpan(5, 0, 0, 2),)),))
        for first in (0, 9, 123):
            await peer.send(replace(query, first_head=first), queries(1, 5, 576))
            frame = await peer.one()
            assert frame.message == Accumulators(1, 0, 0)
            part = K.Partials(1, 5, 576, 64)
            part.load_bytes(frame.payload)
            assert part.spans == [(0, 2)]
            assert len(frame.payload) == 16 + 24 + 5 * 4 * (512 + 2)
        answer = bytes(frame.payload)
        for first, n in ((124, 5), (128, 1), (-1, 5), (0, 129), (0, 0), (0, -1)):
            await peer.send(replace(query, first_head=first, n_heads=n), queries(1, 5, 576))
            assert isinstance((await peer.one()).message, Refuse), (first, n)
        for n in (576 - 64, 4 * 576):
            await peer.send(query, queries(1, 5, n))
            assert isinstance((await peer.one()).message, Refuse), n
        many = with_entry(replace(query, n_heads=128), n_tokens=260)
        await peer.send(many, queries(260, 128, 576))
        assert "more than a message" in (await peer.one()).message.why
        later = with_entry(with_span(query, first=2, page=4, count=1), start=3 * SUPERPAGE_TOKENS)
        before = moved(answer, 3 * SUPERPAGE_TOKENS)
        wide = bytes(
            before[:12] + bytes(4) + before[16:40] + bytes(5 * 4 * (576 + 2))
        )  # all dims of a head, v_first 0
        other = before[:12] + bytes([96]) + before[13:]
        for wrong in (wide, other, before[:-4], before + bytes(4)):
            await peer.send(later, queries(1, 5, 576))
            await peer.send(Accumulators(1, 0, 1), wrong)
            assert isinstance((await peer.one()).message, Refuse)
        await peer.send(later, queries(1, 5, 576))
        await peer.send(Accumulators(1, 0, 1), before)
        assert (await peer.one()).message == Accumulators(1, 0, 0)


async def test_a_query_for_pages_that_leave_their_hold_is_refused(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """Their memory is gone when the accumulators come that it waited for."""
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        page_bytes = PageLayout.uniform(OTHER.n_layer, OTHER.n_kv_head, OTHER.head_dim).page_bytes
        for extent in (1, 2):
            (tmp_path / f"ext/{extent:06}.kv").write_bytes(bytes(4 * page_bytes))
        codes = tuple(extent << 32 | slot for extent in (1, 2) for slot in range(4))
        peer = await peer_of(scene, "a", 1)
        assert not await held(scene, 5, codes, OTHER)
        entry = QueryEntry(64, 3 * SUPERPAGE_TOKENS)
        query = Query(1, 0, 0, 12, 0, "m", (entry,), (Hop("a", (HeldSpan(5, 0, 1, 2),)),))
        await peer.send(query, bytes(64 * 12 * (32 + 32 // 8)))
        await settled(scene, "query", 1)
        assert not await held(scene, 5, codes[:4], OTHER)
        assert isinstance((await peer.one()).message, Refuse)
        await scene["a"].lane.run(wire.Step((), deleted=(2,)), b"", deadline_s=60.0)
        await peer.send(Accumulators(1, 0, 1), b"")
        assert await settled(scene, "late", 1) == {"query": 1, "late": 1}


async def test_what_is_late_doubled_or_of_no_query_is_counted(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """A query behind the first hop waits for accumulators; its frames are sent again and again."""
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        peer, good = await peer_of(scene, "a", 1), good_query(scene)
        await peer.send(good, queries())
        first = bytes((await peer.one()).payload)
        second = with_entry(with_span(good, page=0, first=2, count=2), start=4 * SUPERPAGE_TOKENS)
        before = moved(first, 4 * SUPERPAGE_TOKENS)
        for message, payload in (
            (Accumulators(1, 0, 1), before),  # before its query
            (second, queries()),
            (second, queries()),  # doubled
            (Accumulators(1, 1, 1), before),  # of another layer
            (Accumulators(2, 0, 1), before),  # of another unit
            (Accumulators(1, 0, 2), before),  # of another hop
            (Accumulators(1, 0, 0), before),  # to this worker as the owner, which it is not
            (Refuse(1, "x"), b""),
        ):
            await peer.send(message, payload)
        await peer.send(Accumulators(1, 0, 1), before)
        frame = await peer.one()
        assert frame.message == Accumulators(1, 0, 0)
        await peer.send(Accumulators(1, 0, 1), before)  # finished
        counts = await settled(scene, "late", 7)
        assert counts == {"query": 2, "late": 7, "duplicate": 1}
        for wrong in (first, before[:-1], b"", moved(before, 4 * SUPERPAGE_TOKENS, count=1)):
            await peer.send(second, queries())
            await peer.send(Accumulators(1, 0, 1), wrong)
            assert isinstance((await peer.one()).message, Refuse)


def moved(partials: bytes, start: int, count: int = 2) -> bytes:
    """Partials of one entry at another position, of its first `count` super-pages."""
    return (
        partials[:24] + count.to_bytes(4, "little") + partials[28:32]
        + start.to_bytes(8, "little") + partials[40:]
    )  # fmt: skip


async def settled(scene: Scene, name: str, count: int) -> dict[str, int]:
    for _ in range(500):
        counts = await scene["a"].counts()
        if counts.get(name) == count:
            break
        await asyncio.sleep(0.01)
    return counts


async def test_a_peer_that_answers_wrongly_costs_its_entries_only(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """The test holds the pages and answers a routed step with everything but the truth."""
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        node, peer = scene["a"], await peer_of(scene, "a", 1)
        other = await peer_of(scene, "a", 2, "n")
        await node.prefill(2, words(2, 600))
        alone = await node.step(Entry(2, 599, 1))
        whole = await node.step(Entry(1, LENGTH - 1, 1))
        node.holds[9] = 77
        scene.nodes["m"] = Node("m", node.lane, node.arena, node.layout, holds={1: 77})

        def begin() -> asyncio.Task[wire.StepDone]:
            pair = Entry(1, LENGTH - 1, 1, [Piece("m", 0, 2)]), Entry(2, 599, 1)
            return node.start_step(*pair, scene=scene, lap_ms=20_000)

        async def truth(query: Query, payload: bytes) -> bytes:
            """What the worker itself, as a holder, answers to the query."""
            hold = node.holds[1]
            hop = Hop("a", (HeldSpan(hold, 0, 0, 2),))
            await other.send(replace(query, owner="n", hops=(hop,)), payload)
            return bytes((await other.one()).payload)

        step = begin()
        last = b""
        for layer in range(4):
            frame = await peer.one()
            query = frame.message
            assert isinstance(query, Query)
            assert (query.layer, query.owner, query.hops[0].peer) == (layer, "a", "m")
            right = await truth(query, bytes(frame.payload))
            await other.send(Accumulators(query.unit, layer, 0), right)  # by the wrong link
            if layer:
                await peer.send(Accumulators(query.unit, layer - 1, 0), last)  # late
            await peer.send(Accumulators(query.unit + 1, layer, 0), right)  # of another unit
            await peer.send(Accumulators(query.unit, layer, 0), right)
            await peer.send(Accumulators(query.unit, layer, 0), last or right)  # doubled
            last = right
        done = await step
        assert done.unreachable == ()
        assert same_rows(wire.StepDone(done.rows[:1], (), (), (), 0), whole)
        for wrong in (b"", last[:-1], moved(last, 7), moved(last, LENGTH - 1, count=1), last * 2):
            step = begin()
            query = (await peer.one()).message
            await peer.send(Accumulators(query.unit, 0, 0), wrong)
            done = await step
            assert done.unreachable == (0,)
            assert same_rows(done, alone)
        step = begin()
        query = (await peer.one()).message
        await peer.send(Refuse(query.unit, "no"))
        assert (await step).unreachable == (0,)
        # NaN is what it is: nonfinite, and only the entry that has it.
        step = begin()
        for layer in range(4):
            query = (await peer.one()).message
            await peer.send(
                Accumulators(query.unit, layer, 0), last[:40] + b"\xff" * (len(last) - 40)
            )
        done = await step
        assert (done.unreachable, done.nonfinite) == ((), (0,))
        assert same_rows(done, alone)


async def test_garbage_floods_and_silence_cost_the_link_alone(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        good, node = good_query(scene), scene["a"]
        frame = DATA_LINK.encode(good, queries())
        witness = await peer_of(scene, "a", 1, "n")
        rng = random.Random(5)
        for number in range(2, 60):
            peer = await peer_of(scene, "a", number)
            at, kind = rng.randrange(48), rng.randrange(3)
            if kind == 0:  # a damaged header
                damaged = frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :]
            elif kind == 1:
                damaged = rng.randbytes(200)
            else:
                damaged = frame + rng.randbytes(100)
            await peer.send_bytes(damaged)
            assert await peer.ends()
            peer.sock.close()
        peer = await peer_of(scene, "a", 60)
        await peer.send_bytes(frame[:30])
        peer.sock.close()
        assert "inside a frame" in await peer.ends()
        # A peer that does not read: what waits for it is bounded, then the link is closed.
        peer = await peer_of(scene, "a", 61)
        many = tuple([QueryEntry(512, 2 * SUPERPAGE_TOKENS)] * 4)
        short = with_span(good, count=1).hops[0].spans  # the least work for as many bytes
        big = replace(good, entries=many, hops=(Hop("a", short * 4),))
        frames = DATA_LINK.encode(big, queries(2048))
        await flood(peer, frames)
        assert "wait for the peer" in await peer.ends()
        # Queries whose accumulators never come.
        peer = await peer_of(scene, "a", 62)
        later = with_entry(
            with_span(good, first=2, count=1), start=4 * SUPERPAGE_TOKENS, n_tokens=2048
        )
        units = (DATA_LINK.encode(replace(later, unit=unit), queries(2048)) for unit in range(200))
        await flood(peer, *units)
        assert "more than is served" in await peer.ends()
        await witness.send(replace(good, owner="n"), queries())
        assert isinstance((await witness.one()).message, Accumulators)
        assert isinstance(await node.lane._ask(wire.Ping(), b"", 5.0), wire.Pong)


async def flood(peer: Peer, *frames: bytes) -> None:
    """Send frames over and over, and read nothing, until the worker closes the link."""
    try:
        async with asyncio.timeout(300):
            for frame in itertools.cycle(frames):
                await peer.send_bytes(frame)
    except ConnectionError:
        pass


async def test_sockets_and_numbers_that_do_not_fit_are_refused(
    pocket_path: Path, cache_dir: Path, tmp_path: Path
) -> None:
    async with scene_of(pocket_path, cache_dir, tmp_path) as scene:
        node = scene["a"]
        node.lane.note(wire.OpenLink(1, "m", b"none", True))
        assert "no socket" in (await node.next_change(1)).why
        await peer_of(scene, "a", 1)
        for number in (1, 0, -1, 1 << 30):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                node.lane.open_link(wire.OpenLink(number, "m", bytes(16), True), theirs)
                assert "in use or out of range" in (await node.next_change(number)).why
        for number in range(40):  # more than it keeps: the oldest go
            ours, theirs = socket.socketpair()
            with ours, theirs:
                socket.send_fds(node.lane._files, [bytes([number]) * 16], [theirs.fileno()])  # type: ignore[list-item]
            if number % 10 == 9:
                assert await node.counts() == {}
                node.lane.note(wire.OpenLink(50 + number, "m", b"none", True))
                assert "no socket" in (await node.next_change(50 + number)).why
