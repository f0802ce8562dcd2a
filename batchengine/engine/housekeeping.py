"""Housekeeping once a second: slow readers, queue positions, metrics, audits of sessions and store,
and the load that peers learn of.

Owns the intervals, and copies the plain counters of the lanes to the metrics.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time

from prometheus_client import Counter

from batchengine import errors
from batchengine.core import QueuedEvent, SlaClass
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.rows import LinkedRows
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.placement.lane_view import answer_max, scored_ms_of
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.peers.peers import Peers
from batchengine.peers.transitions import LinkState
from batchengine.policy import cost
from batchengine.wire.peer import PeerLoad
from kv_store.pages.index import PageState
from kv_store.store import Store

log = logging.getLogger("batchengine.engine")

HOUSEKEEPING_S = 1.0
MAINTAIN_S = 10.0  # between two audits, while no turn runs
MAINTAIN_BUSY_S = 60.0  # under load, so that writes that a full disk stopped are tried again
QUEUED_EVENT_S = 5.0


class Housekeeping:
    """Does the work of this module once a second. Use: `run` as a task."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        dispatcher: Dispatcher,
        peers: Peers,
        linked: LinkedRows,
    ) -> None:
        self._state = state
        self._store = store
        self._dispatcher = dispatcher
        self._peers = peers
        self._linked = linked
        self._peers_seen: set[str] = set()
        self._counted_refused = 0
        self._maintained = time.monotonic()
        self._counted: dict[tuple[str, Counter, tuple[str, ...]], float] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        sent_ms = 0.0
        self._measure()
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_ms = self._state.now_ms()
            self._end_slow_readers(now_ms)
            self._measure()
            if now_ms - sent_ms > QUEUED_EVENT_S * 1000:
                sent_ms = now_ms
                self._send_positions()
            self._state.forget_old_sessions()
            self._dispatcher.tick()
            for loop in self._state.lanes:
                loop.kv.sealing.retry()
                loop.kv.park_resting()
                if loop.kv.is_busy:
                    loop.wake()
            since_s = now_ms / 1000 - self._maintained
            if since_s > (MAINTAIN_BUSY_S if self._state.turns else MAINTAIN_S):
                self._maintained = now_ms / 1000
                await self._audit()

    def _end_slow_readers(self, now_ms: float) -> None:
        limit_ms = self._state.config.server.reader_stall_s * 1000
        for generation, turn in list(self._state.turns.items()):
            since = generation.paused_since_ms
            if since is not None and now_ms - since > limit_ms:
                generation.fail(errors.CLIENT_TOO_SLOW(seconds=limit_ms / 1000))
                self._state.home[turn.session.key].cancel(turn)

    def _send_positions(self) -> None:
        """Send each waiting turn its place among those of its tenant, and when it may have its
        first token."""
        for loop in self._state.lanes:
            seated = [_work(loop, turn) for turn in loop.running.values() if not turn.paused]
            free = loop.config.entries_max - len(seated)
            turns = loop.seats.queue()
            etas = cost.etas_ms(loop.cost.cost, seated, free, [_work(loop, t) for t in turns])
            places: collections.Counter[str] = collections.Counter()
            for turn, wait_ms in zip(turns, etas, strict=True):
                places[turn.session.tenant] += 1
                if turn.generation.started_ms is None:
                    turn.generation.push(QueuedEvent(places[turn.session.tenant], wait_ms))

    def _measure(self) -> None:
        """Set all metrics of this module, and the load that peers learn of."""
        self._set_gauges()
        self._set_counters()
        self._set_store()
        self._set_peers()
        self._set_peer_load()

    def _set_gauges(self) -> None:
        """Set the gauges of lanes and requests."""
        lanes, metrics = self._state.lanes, self._state.metrics
        metrics.serving.set(self._state.is_serving and not self._state.leaving)
        for loop in lanes:
            loop.meter.sample(self._state.now_ms() / 1000)
            metrics.lane_up.labels(loop.lane.name).set(loop.up)
            metrics.lane_confined.labels(loop.lane.name).set(not loop.lane.unconfined)
        waiting = collections.Counter(
            turn.generation.request.sla.sla_class
            for loop in lanes
            for turn in loop.waiting.values()
        )
        running = collections.Counter(
            (turn.generation.request.sla.sla_class, loop)
            for loop in lanes
            for turn in loop.running.values()
        )
        for sla_class in SlaClass:
            metrics.requests_waiting.labels(sla_class.value).set(waiting[sla_class])
            for loop in lanes:
                labels = (sla_class.value, loop.lane.name)
                metrics.requests_running.labels(*labels).set(running[sla_class, loop])

    def _set_counters(self) -> None:
        """Add to the metrics what the step loops have counted since the last call."""
        metrics = self._state.metrics
        for loop in self._state.lanes:
            name = loop.lane.name
            for counter, labels, value in (
                (metrics.steps_total, (name,), loop.meter.steps),
                (metrics.tokens_total, ("computed",), loop.meter.tokens),
                (metrics.tokens_total, ("generated",), loop.meter.generated),
                (metrics.lane_tokens_total, (name, "computed"), loop.meter.tokens),
                (metrics.lane_tokens_total, (name, "generated"), loop.meter.generated),
                (metrics.lane_tokens_total, (name, "drafted"), loop.meter.drafted),
                (metrics.lane_tokens_total, (name, "accepted"), loop.meter.accepted),
                (metrics.step_predicted_seconds_total, (name,), loop.meter.predicted_ms / 1000),
                (metrics.kv_pages_total, ("sealed",), loop.kv.sealing.sealed),
                (metrics.kv_pages_total, ("seal_failed",), loop.kv.sealing.seal_failures),
            ):
                key = (name, counter, labels)
                counter.labels(*labels).inc(value - self._counted.get(key, 0))
                self._counted[key] = value

    def _set_store(self) -> None:
        """Set the gauges of pages, store and ledger."""
        metrics, stat = self._state.metrics, self._store.stat()
        used, budget = float(stat["used_bytes"]), float(stat["budget_bytes"])
        metrics.kv_usage_ratio.labels("cpu").set(self._state.load.kv_usage_ratio)
        metrics.kv_usage_ratio.labels("disk").set(used / max(budget, 1.0))
        metrics.kv_tier_ok.set(stat["page_tier"] == "ok")
        metrics.ledger_ok.set(not stat["ledger_failed"])
        for page_state in PageState:
            slots = float(stat[f"pages_{page_state.value}"])
            metrics.kv_page_slots.labels(page_state.value).set(slots)

    def _set_peers(self) -> None:
        metrics, peers = self._state.metrics, self._peers
        metrics.page_moves.set(self._linked.numbers()["page_moves"])
        metrics.peer_connections_refused_total.inc(
            peers.connections_refused - self._counted_refused
        )
        self._counted_refused = peers.connections_refused
        for name in self._peers_seen - peers.links.keys():
            for gauge in metrics.of_peer:
                gauge.remove(name)
        self._peers_seen = set(peers.links)
        for name, link in peers.links.items():
            metrics.peer_up.labels(name).set(link.state is LinkState.UP)
            row = self._linked.of_peer(name)
            metrics.peer_data_up.labels(name).set(row.get("data") == "up")
            metrics.peer_pages_taken.labels(name).set(row["pages_taken"])
            metrics.peer_pages_given.labels(name).set(row["pages_given"])
            metrics.peer_rtt_seconds.labels(name).set((link.rtt_us or 0.0) / 1e6)

    def _set_peer_load(self) -> None:
        """Set the load that peers learn of."""
        state, linked, stat = self._state, self._state.lanes[0], self._store.stat()
        used, budget = int(float(stat["used_bytes"])), int(float(stat["budget_bytes"]))
        allocator, token_ms = self._store.pages.allocator, linked.cost.cost.prefill_token_ms
        barred = (allocator.slots_max - allocator.slots_now) * allocator.layout.page_bytes
        state.peer_load = PeerLoad(
            requests_running=state.load.requests_running,
            requests_waiting=state.load.requests_waiting,
            kv_bytes=budget,
            kv_free_bytes=max(0, budget - used - barred),
            prefill_tokens_per_s=round(1000 / token_ms) if linked.meter.steps else 0,
            read_bytes_per_s=round(float(stat["read_bytes_per_s"])),
            leaves=state.leaving,
        )

    async def _audit(self) -> None:
        """Check the invariants of every session at rest, then run `Store.maintain`."""
        state = self._state
        for session in list(state.sessions.values()):
            if not state.is_at_rest(session):
                continue
            try:
                session.check()
            except AssertionError as error:
                log.error("a session is forgotten, its history stays in the ledger: %s", error)
                state.metrics.sessions_forgotten_total.inc()
                state.forget(session)
        await asyncio.to_thread(self._store.maintain)


def _work(loop: LaneLoop, turn: Turn) -> cost.QueuedWork:
    request, to_compute = turn.generation.request, turn.session.to_compute
    left = max(1, answer_max(request) - turn.generation.completion_tokens)
    scored_ms = scored_ms_of(loop, request, to_compute)
    return cost.QueuedWork(turn.session.frontier, to_compute, left, scored_ms)
