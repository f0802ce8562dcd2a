"""Connects a worker's data links with its attention server, its routed steps and its pipelines."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from batchengine.core import BatchEngineError
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.pipeline.stages import Stages
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.routed import RoutedAttention
from batchengine.lanes.ring.server import AttentionServer
from batchengine.lanes.ring.spans import SpanAttention
from batchengine.lanes.state_memory import save_named
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.model import Stepper
from batchengine.wire import lane as wire
from batchengine.wire.data import (
    DATA_LINK,
    DataFrame,
    DataMessage,
    Hidden,
    Query,
    Refuse,
    StatePart,
    Tile,
)
from batchengine.wire.frames import Frame, Payload, WireError
from kv_store.layout import PageLayout

TICK_S = 0.25  # between two looks at timers while nothing arrives
BETWEEN_NS = 200_000  # between two looks at the links while a step computes


class Ring:
    """The data links of a worker, in use.

    `memory` translates page codes and raises BadStep. `on_engine` is called when the engine's
    link can be read, and `report` takes what the engine is to know of a hold or a pipeline.
    """

    def __init__(
        self,
        links: DataLinks,
        attention: SpanAttention,
        memory: HostMemory,
        stepper: Stepper,
    ) -> None:
        self.on_engine: Callable[[], None] = lambda: None
        self.report: Callable[[wire.LaneEvent], None] = lambda event: None
        self.counts: Counter[str] = Counter()
        self._links = links
        self._memory = memory
        self._server = AttentionServer(attention, links.name, self._send_to, self.counts)
        self._routed = RoutedAttention(
            attention, self._send, links.peer_of, self.poll, self.counts, secrets.randbits(64)
        )
        self.stages = Stages(
            stepper,
            memory.tile,
            lambda name, seed, state: save_named(memory.states_dir, name, seed, state),
            links,
            self._send,
            lambda event: self.report(event),
            self.counts,
        )
        self._own: deque[DataFrame] = deque()  # from this worker to itself
        self._lost: deque[int] = deque()
        self._next_look_ns = 0
        links.on_frame = self._on_frame
        links.on_lost = self._lost.append

    def take(self, note: wire.LinkNote) -> None:
        """Do what the engine says of a link, a hold or a pipeline."""
        match note:
            case wire.OpenLink():
                self._links.open(note)
            case wire.CloseLink():
                self._links.close(note.number, "the engine closed it")
            case wire.Release():
                self._server.release(note.hold)
            case wire.Hold():
                why = self._hold(note)
                self.report(wire.HoldChanged(note.hold, not why, why))
            case _:
                self.stages.take(note)

    def route(self, batch: StepInput, addresses: U64Array) -> RoutedAttention:
        """The attention of a step that has segments; addresses: 0 for a page that a peer holds."""
        self._routed.begin(batch, addresses)
        return self._routed

    def poll(self, timeout_s: float | None) -> None:
        """Serve the links: everything that has arrived, one query and some tiles.

        Waits for something to arrive if there is nothing to do, at most `timeout_s`.
        """
        server, stages = self._server, self.stages
        if server.has_work or stages.has_work or self._own or self._lost:
            timeout_s = 0.0
        elif server.has_timers or self._links.has_timers:
            timeout_s = TICK_S if timeout_s is None else min(timeout_s, TICK_S)
        if self._links.poll(timeout_s):
            self.on_engine()
        while self._own:
            self._on_frame(wire.SELF, self._own.popleft())
        while self._lost:
            link = self._lost.popleft()
            server.lose(link)
            self._routed.lose(link)
            stages.lose(link)
        stages.pump()
        if server.has_work:
            server.serve()
        elif server.has_timers:
            server.expire(time.monotonic())

    def look(self) -> None:
        """Serve what has arrived, between two operations of a step."""
        now = time.perf_counter_ns()
        if now < self._next_look_ns:
            return
        for _ in range(1 + self._server.n_work):
            self.poll(0.0)
        self._next_look_ns = time.perf_counter_ns() + BETWEEN_NS

    def _hold(self, note: wire.Hold) -> str:
        try:
            codes, shape = np.array(note.codes, np.uint64), note.shape
            if shape is None:
                addresses = self._memory.addresses(codes)
            else:
                layout = PageLayout.uniform(
                    shape.n_layer, shape.n_kv_head, shape.head_dim, shape.v_first
                )
                addresses = self._memory.extents.addresses(codes, layout.page_bytes)
            self._server.hold(note, addresses)
        except (BatchEngineError, OverflowError, ValueError) as error:
            return str(error)
        return ""

    def _on_frame(self, link: int, frame: DataFrame) -> None:
        message, is_kept = frame.message, True
        if isinstance(message, Query):
            is_kept = self._server.on_query(link, message, frame.payload, time.monotonic())
        elif isinstance(message, Hidden):
            self.stages.on_hidden(link, message, frame.payload)
        elif isinstance(message, Tile | StatePart):
            self.stages.on_tile(link, message, frame.payload)
        elif isinstance(message, Refuse):
            self._routed.on_refusal(message.unit, message.why)
        elif message.hops_left == 0:
            self._routed.on_accumulators(link, message, frame.payload)
        else:
            is_kept = self._server.on_accumulators(link, message, frame.payload)
        if not is_kept:
            self._links.close(link, "it sends more than is served")

    def _send_to(self, peer: str, message: DataMessage, payload: Payload) -> bool:
        link = self._links.link_to(peer)
        return link is not None and self._send(link, message, payload)

    def _send(self, link: int, message: DataMessage, payload: Payload) -> bool:
        if link == wire.SELF:
            self._own.append(Frame(message, payload))
            return True
        try:
            return self._links.send(link, DATA_LINK.encode(message, payload))
        except WireError:  # longer than a frame may be
            return False
