"""Windows and sinks over links: two holders and an owner in this process, with the kernels. A step
by any route has the bits of attention to all pages at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

import kernels as K
from batchengine.core import SUPERPAGE_PAGES
from batchengine.lanes.ring.routed import RoutedAttention
from batchengine.lanes.ring.server import AttentionServer
from batchengine.lanes.ring.spans import SpanAttention
from batchengine.lanes.step_input import StepInput
from batchengine.wire import lane as wire
from batchengine.wire.data import Accumulators, DataMessage, Query, Refuse
from batchengine.wire.frames import Payload
from tests.kernels.timelines import Step, Timeline, append, bits, random_qkv

N_HEAD, N_KV, DIM, LAYERS = 4, 2, 64, 2
NUMBERS = {"owner": 1, "a": 2, "b": 3}  # of the links to each
WINDOWS = (0, 1, 128, 700, 1024, 1500, 3000)
SINKS = K.Sinks(np.array([0.5, -2.0, 3.0, 8.0], np.float32))


@dataclass
class Links:
    """Holders of all pages of some timelines, whose hold is the timeline's index, and an owner."""

    pool: K.Pool
    timelines: Sequence[Timeline]
    n_head: int = N_HEAD
    sent: Counter[str] = field(default_factory=Counter[str])  # messages by kind
    frames: deque[tuple[str, str, DataMessage, Payload]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.attention = SpanAttention(self.pool, self.timelines[0].shape, self.n_head, 256)
        self.holders = {name: self._holder(name) for name in ("a", "b")}
        names = {number: name for name, number in NUMBERS.items()} | {wire.SELF: "owner"}
        self.routed = RoutedAttention(
            self.attention,
            lambda link, message, data: self._send("owner", names[link], message, data),
            names.get,
            self._serve,
            Counter(),
            7,
        )

    def _holder(self, name: str) -> AttentionServer:
        server = AttentionServer(
            SpanAttention(self.pool, self.timelines[0].shape, self.n_head, 256),
            name,
            lambda peer, message, data: self._send(name, peer, message, data),
            Counter(),
        )
        for index, timeline in enumerate(self.timelines):
            held = timeline.addresses[
                : len(timeline.addresses) // SUPERPAGE_PAGES * SUPERPAGE_PAGES
            ]
            server.hold(wire.Hold(index, ()), held)
        return server

    def _send(self, sender: str, to: str, message: DataMessage, data: Payload) -> bool:
        self.sent[type(message).__name__] += 1
        self.frames.append((sender, to, message, bytes(data)))
        return True

    def _serve(self, timeout_s: float) -> None:
        """Deliver everything, and all that comes of it."""
        while self.frames:
            sender, to, message, data = self.frames.popleft()
            link = NUMBERS[sender]
            if isinstance(message, Query):
                assert self.holders[to].on_query(link, message, data, 0.0)
            elif isinstance(message, Accumulators) and to == "owner":
                self.routed.on_accumulators(link, message, data)
            elif isinstance(message, Accumulators):
                assert self.holders[to].on_accumulators(link, message, data)
            elif isinstance(message, Refuse):
                self.routed.on_refusal(message.unit, message.why)
            for holder in self.holders.values():
                while holder.has_work:
                    holder.serve()


Route = Sequence[tuple[str, int]]  # holders, and how many super-pages each has


def routed_step(links: Links, one: Step, routes: Sequence[Route]) -> StepInput:
    """The step as its owner has it: pages that the holders of a route have are not there."""
    entries: list[wire.Entry] = []
    addresses = one.addresses.copy()
    first_page = 0
    for index, (route, (n, start, n_pages)) in enumerate(
        zip(routes, one.entries.tolist(), strict=True)
    ):
        at = 0
        segments: list[wire.Segment] = []
        for holder, count in route:
            n_held = count * SUPERPAGE_PAGES
            segments.append(wire.Segment(NUMBERS[holder], index, at, n_held))
            at += n_held
        addresses[first_page : first_page + at] = 0
        first_page += n_pages
        entries.append(wire.Entry(index, 1, start, n, n_pages, None, 0, tuple(segments)))
    none = np.zeros(0, np.int32)
    batch = StepInput(
        tuple(entries), one.entries, none, addresses, [], [], is_routed=True, lap_ms=20_000
    )
    links.routed.begin(batch, addresses)
    return batch


@pytest.fixture(scope="module")
def scene(pool: K.Pool) -> tuple[Links, Step]:
    """Decode at 3,300, a chunk that crosses a super-page, and an entry of the owner's alone."""
    timelines: list[Timeline] = []
    rows = []
    for seed, (history, new) in enumerate([(3300, 1), (2030, 40), (10, 3)]):
        qkv = random_qkv(seed, history + new, N_HEAD, N_KV, DIM)
        timeline = Timeline(
            K.PageShape(LAYERS, N_KV, DIM), N_HEAD, -(-(history + new) // K.PAGE_TOKENS), layer=1
        )
        append(pool, timeline, qkv[:history])
        timelines.append(timeline)
        rows.append(qkv[history:])
    return Links(pool, timelines), Step(pool, timelines, rows)


@pytest.fixture(scope="module")
def pool() -> K.Pool:
    return K.Pool(1)


@pytest.mark.parametrize(
    "routes",
    [
        ([("a", 3)], [("b", 1)], []),
        ([("a", 1), ("b", 2)], [("a", 1)], []),
        ([("b", 1), ("a", 1)], [("b", 1)], []),
        ([("a", 1), ("b", 1), ("a", 1)], [], []),
    ],
)
def test_every_route_gives_the_bits_of_all_pages_at_once(
    scene: tuple[Links, Step], routes: Sequence[Route]
) -> None:
    """Layers with a window and without take turns: a holder keeps the spans of the last query."""
    links, one = scene
    routed_step(links, one, routes)
    for window in (*WINDOWS, *reversed(WINDOWS)):
        for sinks in (None, SINKS):
            out = one.rows()
            links.routed.attend(one.queries, 1, out, window, sinks)
            np.testing.assert_array_equal(
                bits(out.view(one.total)), bits(one.attend(window, sinks)), f"window {window}"
            )
    assert links.routed.end() == []


def queries_of(links: Links, one: Step, window: int) -> int:
    before = links.sent["Query"]
    links.routed.attend(one.queries, 1, one.rows(), window, None)
    return links.sent["Query"] - before


def test_a_window_that_hides_the_pages_of_peers_sends_nothing(scene: tuple[Links, Step]) -> None:
    """Entry 0 stands 228 tokens behind its peers' pages, entry 1 has 1,006 tokens of its own."""
    links, one = scene
    routed_step(links, one, ([("a", 3)], [("b", 1)], []))
    assert queries_of(links, one, 0) == 2
    assert queries_of(links, one, 229) == 0
    assert queries_of(links, one, 230) == 1
    assert queries_of(links, one, 1007) == 1
    assert queries_of(links, one, 1008) == 2
    assert links.routed.end() == []
    assert links.routed.waited_us < 10_000_000
