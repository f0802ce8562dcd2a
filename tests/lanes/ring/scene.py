"""Several real workers with data links between them, which hold pages for each other.

One worker computes the pages of the timelines alone, and every other gets a copy, so any of them
can hold any page, and an answer by any route must be the one of a worker with all pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from batchengine.core import PAGE_TOKENS, SUPERPAGE_PAGES, Sampling
from batchengine.lanes.worker_process import WORKER, Lane
from batchengine.wire import data
from batchengine.wire import lane as wire
from batchengine.wire.frames import Decoder
from batchengine.wire.lane import ARENA_BIT, HELD_BIT
from kv_store.arenas.arena import Arena
from kv_store.layout import PageLayout
from tests.lanes.ring.certificates import Authority

CHUNK = 512
SLOTS = 96
CONTEXT = 16384
GREEDY_WITH_LOGPROB = Sampling(logprobs=2)


@dataclass(slots=True)
class Piece:
    """Super-pages [first, first + count) of a timeline, held by the node `holder`."""

    holder: str
    first: int
    count: int


@dataclass(slots=True)
class Timeline:
    """Tokens, and the slots of their pages in a node's arena."""

    tokens: list[int]
    slots: list[int]


@dataclass(slots=True)
class Entry:
    """One entry of a step: tokens [start, start + n) of a timeline, by a route."""

    key: int
    start: int
    n: int
    pieces: Sequence[Piece] = ()
    wants: bool = True


@dataclass(slots=True)
class Node:
    """One worker, its arena, and what it holds."""

    name: str
    lane: Lane
    arena: Arena
    layout: PageLayout
    timelines: dict[int, Timeline] = field(default_factory=dict[int, Timeline])
    events: list[wire.LaneEvent] = field(default_factory=list[wire.LaneEvent])
    links: dict[str, int] = field(default_factory=dict[str, int])
    holds: dict[int, int] = field(default_factory=dict[int, int])
    used: int = 0
    free: list[int] = field(default_factory=list[int])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_event(self, event: wire.LaneEvent) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, event: wire.LaneEvent) -> None:
        """Wait for an event; consumes it and those before it."""
        async with asyncio.timeout(60):
            while event not in self.events:
                self.changed.clear()
                await self.changed.wait()
        del self.events[: self.events.index(event) + 1]

    async def next_change(self, number: int) -> wire.LinkChanged:
        """The next event of a link."""
        async with asyncio.timeout(60):
            while True:
                for event in self.events:
                    if isinstance(event, wire.LinkChanged) and event.number == number:
                        self.events.remove(event)
                        return event
                self.changed.clear()
                await self.changed.wait()

    def reserve(self, key: int, page: int) -> wire.ReserveSlot:
        """A new slot for a page of a timeline."""
        if not self.free:
            self.free.append(self.used)
            self.used += 1
        slot = self.free.pop()
        self.timelines[key].slots[page:] = [slot]
        return wire.ReserveSlot(slot, 0, str(key).encode(), 1, page)

    async def prefill(self, key: int, tokens: list[int]) -> None:
        """Compute the pages of a timeline alone."""
        self.timelines[key] = Timeline(tokens, [])
        await self.compute(key, 0)

    async def copy(self, key: int, other: Node, first: int = 0) -> None:
        """Take over the pages of a timeline from `first` on, which another node has computed."""
        source = other.timelines[key]
        mine = self.timelines.setdefault(key, Timeline(source.tokens, []))
        self.renew(key, first)
        reserve = tuple(self.reserve(key, page) for page in range(first, len(source.slots)))
        await self.lane.run(wire.Step((), reserve=reserve), b"", deadline_s=60.0)
        page = memoryview(bytearray(self.layout.page_bytes))
        for theirs, ours in zip(source.slots[first:], mine.slots[first:], strict=True):
            os.preadv(other.arena.fd, [page], other.arena.shape.page_offset(theirs))
            os.pwritev(self.arena.fd, [page], self.arena.shape.page_offset(ours))

    async def compute(self, key: int, first: int) -> None:
        """Compute the rows of a timeline from `first` on alone."""
        end = len(self.timelines[key].tokens)
        for start in range(first, end, CHUNK):
            await self.step(Entry(key, start, min(CHUNK, end - start), wants=False))

    async def step(
        self, *entries: Entry, scene: Scene | None = None, lap_ms: int = 20_000
    ) -> wire.StepDone:
        """Run one step; slots are reserved for pages that have none."""
        return await self.start_step(*entries, scene=scene, lap_ms=lap_ms)

    def start_step(
        self, *entries: Entry, scene: Scene | None = None, lap_ms: int = 20_000
    ) -> asyncio.Task[wire.StepDone]:
        """As `step`, which runs from now on."""
        made: list[wire.Entry] = []
        codes, tokens = array("Q"), array("i")
        reserve: list[wire.ReserveSlot] = []
        for entry in entries:
            timeline, end = self.timelines[entry.key], entry.start + entry.n
            n_pages = -(-end // PAGE_TOKENS)
            while len(timeline.slots) < n_pages:
                reserve.append(self.reserve(entry.key, len(timeline.slots)))
            segments = [scene.segment(self, entry.key, p) for p in entry.pieces] if scene else []
            own = [ARENA_BIT | slot for slot in timeline.slots[:n_pages]]
            held = [
                HELD_BIT | s.link << 32 | s.first_page + i
                for s in segments
                for i in range(s.n_pages)
            ]
            own[: len(held)] = held
            codes.extend(own)
            tokens.extend(timeline.tokens[entry.start : end])
            sampling = GREEDY_WITH_LOGPROB if entry.wants else None
            made.append(
                wire.Entry(
                    entry.key, 1, entry.start, entry.n, n_pages, sampling, 0, tuple(segments)
                )
            )
        step = wire.Step(tuple(made), reserve=tuple(reserve), lap_ms=lap_ms)
        payload = codes.tobytes() + tokens.tobytes()
        return asyncio.ensure_future(self.lane.run(step, payload, deadline_s=60.0))

    def rows(self, key: int, first: int, end: int) -> bytes:
        """The bytes of rows [first, end) of a timeline, as they lie in this node's arena."""
        found: list[bytes] = []
        page = memoryview(bytearray(self.layout.page_bytes))
        for index in range(first // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
            slot = self.timelines[key].slots[index]
            os.preadv(self.arena.fd, [page], self.arena.shape.page_offset(slot))
            begin = index * PAGE_TOKENS
            low, high = max(first, begin) - begin, min(end, begin + PAGE_TOKENS) - begin
            found.append(self.layout.gather_rows(page, low, high - low))
        return b"".join(found)

    def renew(self, key: int, first_page: int) -> None:
        """Forget the slots of pages from `first_page` on: the next step computes them anew."""
        slots = self.timelines[key].slots
        self.free += slots[first_page:]
        del slots[first_page:]

    async def counts(self) -> dict[str, int]:
        """What became of the frames of data links."""
        pong = await self.lane._ask(wire.Ping(), b"", 5.0)
        assert isinstance(pong, wire.Pong)
        return pong.counts

    async def close(self) -> None:
        await self.lane.close()
        self.arena.close(delete=True)


class Scene:
    """Nodes by name, linked in pairs."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self.sockets: list[socket.socket] = []  # closed at the end
        self._numbers = iter(range(1, 1 << 20))

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    async def prefill(self, name: str, timelines: dict[int, list[int]]) -> None:
        """Have a node compute these timelines alone, and every node hold all of their pages."""
        for key, tokens in timelines.items():
            await self.nodes[name].prefill(key, tokens)
            for other in self.nodes.values():
                if other.name != name:
                    await other.copy(key, self.nodes[name])
                await self.hold(other.name, key)

    async def link(self, one: str, other: str, *, tcp: bool = False, up: bool = True) -> None:
        """A new data link between two nodes."""
        ends = loopback() if tcp else socket.socketpair()
        for name, peer, sock, dials in ((one, other, ends[0], True), (other, one, ends[1], False)):
            node, number = self.nodes[name], next(self._numbers)
            node.links[peer] = number
            note = wire.OpenLink(number, peer, secrets.token_bytes(16), dials)
            node.lane.open_link(note, sock)
            sock.close()
        if up:
            await self.nodes[one].until(wire.LinkChanged(self.nodes[one].links[other], True))
            await self.nodes[other].until(wire.LinkChanged(self.nodes[other].links[one], True))

    async def hold(self, name: str, key: int) -> None:
        """Have a node hold all full pages of a timeline, for every other."""
        node = self.nodes[name]
        timeline = node.timelines[key]
        codes = [ARENA_BIT | slot for slot in timeline.slots[: len(timeline.tokens) // PAGE_TOKENS]]
        hold = node.holds.setdefault(key, secrets.randbits(64))
        node.lane.note(wire.Hold(hold, tuple(codes)))
        await node.until(wire.HoldChanged(hold, True))

    def segment(self, owner: Node, key: int, piece: Piece) -> wire.Segment:
        """The segment of a piece as its owner names it."""
        hold = self.nodes[piece.holder].holds[key]
        link = owner.links[piece.holder] if piece.holder != owner.name else wire.SELF
        return wire.Segment(
            link, hold, piece.first * SUPERPAGE_PAGES, piece.count * SUPERPAGE_PAGES
        )


def loopback() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


async def start_node(
    name: str,
    model: Path,
    cache_dir: Path,
    folder: Path,
    identity: wire.LinkIdentity,
    *,
    threads: int = 1,
    slots: int = SLOTS,
    command: Sequence[str] = WORKER,
) -> Node:
    """One worker, attached to an arena of its own."""
    lane = Lane(name, command=command)
    cpu = wire.CpuResources(threads, (), 60)
    load = wire.Load(str(model), str(cache_dir), cpu, 2048, 32, CONTEXT, identity)
    facts = await lane.start(load)
    layout = PageLayout(facts.layers)
    (folder / "ext").mkdir(exist_ok=True)
    path = str(folder / f"{name}.{lane.incarnation}")
    arena = Arena.create(path, layout, slots, lane.incarnation)
    await lane.attach(wire.Attach(path, slots, layout.page_bytes, str(folder / "ext")))
    node = Node(name, lane, arena, layout)
    lane.on_event = node.on_event
    return node


@contextlib.asynccontextmanager
async def running_scene(
    names: str,
    model: Path,
    cache_dir: Path,
    folder: Path,
    *,
    tcp: bool = False,
    is_linked: bool = True,
    identities: dict[str, wire.LinkIdentity] | None = None,
    threads: int = 1,
    slots: int = SLOTS,
) -> AsyncIterator[Scene]:
    """Nodes with one-letter names, each linked with every other if `is_linked`."""
    found = identities or {name: wire.LinkIdentity(name) for name in names}
    starts = (
        start_node(name, model, cache_dir, folder, found[name], threads=threads, slots=slots)
        for name in names
    )
    nodes = dict(zip(names, await asyncio.gather(*starts), strict=True))
    scene = Scene(dict(nodes))
    try:
        for index, one in enumerate(names):
            for other in names[index + 1 :] if is_linked else "":
                await scene.link(one, other, tcp=tcp)
        yield scene
    finally:
        for node in nodes.values():
            await node.close()
        for sock in scene.sockets:
            sock.close()


@contextlib.contextmanager
def lasting_scene(
    names: str, model: Path, cache_dir: Path, folder: Path, *, tcp: bool
) -> Iterator[tuple[asyncio.Runner, Scene]]:
    """A scene on a loop of its own, for all tests of a module; links over TCP have TLS."""
    identities = None
    if tcp:
        authority = Authority(folder)
        identities = {name: authority.identity(name) for name in names}
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        running = running_scene(names, model, cache_dir, folder, tcp=tcp, identities=identities)
        scene = runner.run(stack.enter_async_context(running))
        yield runner, scene
        runner.run(stack.aclose())


def same_rows(found: wire.StepDone, expected: wire.StepDone) -> bool:
    """Whether two steps sampled the same, with the same bits of log-probabilities."""
    ours = [(r.session, r.token, np.float32(r.logprob).tobytes(), r.top) for r in found.rows]
    theirs = [(r.session, r.token, np.float32(r.logprob).tobytes(), r.top) for r in expected.rows]
    return ours == theirs


def measure_visits(scene: Scene, name: str, key: int, sock: socket.socket, n: int) -> list[float]:
    """Seconds from a query to its accumulators, `n` times: one token, one layer, one super-page.

    `sock` is the other end of a data link of the node, blocking, with or without TLS; its peer is
    called `bench`. A visit is two hops and the attention to the super-page.
    """
    node = scene[name]
    hold = node.holds[key]
    heads, dim, _ = node.layout.layers[0]
    group = 2
    queries = bytes(heads * group * (dim + dim // 8))
    entries = (data.QueryEntry(1, 2048),)
    hops = (data.Hop(name, (data.HeldSpan(hold, 0, 0, 1),)),)
    decoder = Decoder(data.DATA_LINK)
    found: list[float] = []
    for unit in range(n):
        began = time.perf_counter()
        query = data.Query(unit, 0, 0, heads * group, 0, "bench", entries, hops)
        sock.sendall(data.DATA_LINK.encode(query, queries))
        frames: list[data.DataFrame] = []
        while not frames:
            frames = list(decoder.feed(sock.recv(1 << 20)))
        found.append(time.perf_counter() - began)
        assert isinstance(frames[0].message, data.Accumulators), frames[0].message
    return found
