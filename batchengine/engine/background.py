"""What happens once a second, whoever asks for what: slow readers, gauges, positions, audits.

Owns the rhythm and the counters that the step loops keep as plain numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter

from batchengine import scheduler
from batchengine.core import QueuedEvent
from batchengine.engine import refusals
from batchengine.engine.tables import Tables, queue_etas
from batchengine.engine.turn import Turn
from batchengine.session import State
from kv_store.pages import PageState

log = logging.getLogger("batchengine.background")

HOUSEKEEPING_S = 1.0
MAINTAIN_S = 10.0  # store audit and ages, when idle
MAINTAIN_BUSY_S = 60.0  # what a full disk had stopped is tried again under load too
QUEUED_EVENT_S = 5.0


class Background:
    """The engine's second hand. Use: `run` as a task."""

    def __init__(self, tables: Tables, tick: Callable[[], None]) -> None:
        """`tick` is called every second."""
        self._tables = tables
        self._tick = tick
        self._maintained = time.monotonic()
        self._told: dict[str, dict[tuple[Counter, tuple[str, ...]], float]] = {}

    async def run(self) -> None:
        """Until cancelled."""
        told = 0.0
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_ms = self._tables.now_ms()
            self._end_slow_readers(now_ms)
            self._set_gauges()
            self._set_counters()
            if now_ms - told > QUEUED_EVENT_S * 1000:
                told = now_ms
                self._tell_waiting()
            self._tables.forget_old_sessions()
            self._tick()
            for loop in self._tables.loops:
                loop.pages.retry()
                loop.pages.park_resting()
                if loop.pages.has_work:
                    loop.wake()
            since_s = now_ms / 1000 - self._maintained
            if since_s > (MAINTAIN_BUSY_S if self._tables.turns else MAINTAIN_S):
                self._maintained = now_ms / 1000
                await self._audit()

    def _end_slow_readers(self, now_ms: float) -> None:
        limit_ms = self._tables.config.server.reader_stall_s * 1000
        for generation, turn in list(self._tables.turns.items()):
            since = generation.paused_since_ms
            if since is not None and now_ms - since > limit_ms:
                generation.fail(refusals.client_too_slow(limit_ms))
                self._tables.home[turn.session.key].cancel(turn)

    def _tell_waiting(self) -> None:
        for loop in self._tables.loops:
            told = zip(*queue_etas(loop), strict=True)
            for position, (turn, wait_ms) in enumerate(told, 1):
                if turn.generation.started_ms is None:
                    turn.generation.push(QueuedEvent(position, wait_ms))

    def _set_gauges(self) -> None:
        waiting: dict[str, int] = {}
        running: dict[tuple[str, str], int] = {}
        metrics = self._tables.metrics
        for loop in self._tables.loops:
            for turn in loop.waiting.values():
                name = turn.generation.request.sla.sla_class.value
                waiting[name] = waiting.get(name, 0) + 1
            for turn in loop.running.values():
                pair = (turn.generation.request.sla.sla_class.value, loop.lane.name)
                running[pair] = running.get(pair, 0) + 1
        for sla_class in scheduler.RANK:
            name = sla_class.value
            metrics.requests_waiting.labels(name).set(waiting.get(name, 0))
            for loop in self._tables.loops:
                pair = (name, loop.lane.name)
                metrics.requests_running.labels(*pair).set(running.get(pair, 0))

    def _set_counters(self) -> None:
        """Counters kept as plain numbers by the step loops, brought up to date."""
        metrics = self._tables.metrics
        for loop in self._tables.loops:
            metrics.lane_up.labels(loop.lane.name).set(loop.up)
            name, told = loop.lane.name, self._told.setdefault(loop.lane.name, {})
            for counter, labels, value in (
                (metrics.steps_total, (name,), loop.steps),
                (metrics.tokens_total, ("computed",), loop.tokens),
                (metrics.tokens_total, ("generated",), loop.generated),
                (metrics.step_predicted_seconds_total, (name,), loop.predicted_ms / 1000),
                (metrics.kv_pages_total, ("sealed",), loop.pages.sealed),
                (metrics.kv_pages_total, ("seal_failed",), loop.pages.seal_failures),
            ):
                key = (counter, labels)
                counter.labels(*labels).inc(value - told.get(key, 0))
                told[key] = value
        if self._tables.store is not None:
            stat = self._tables.store.stat()
            used, budget = float(stat["used_bytes"]), float(stat["budget_bytes"])
            metrics.kv_usage_ratio.labels("disk").set(used / max(budget, 1.0))
            metrics.kv_tier_ok.set(stat["page_tier"] == "ok")
            metrics.ledger_ok.set(not stat["ledger_failed"])
            for state in PageState:
                metrics.kv_page_places.labels(state.value).set(float(stat[f"pages_{state.value}"]))

    async def _audit(self) -> None:
        """Invariants of every idle session, then of the store, which also does its own duties."""
        tables = self._tables
        for session in list(tables.named.values()):
            if session.state is not State.IDLE or session.key in tables.queues:
                continue
            try:
                session.check()
            except AssertionError as error:
                if session.key in tables.moving:
                    raise  # two lanes have a part of it
                log.error("a session is forgotten, its history stays in the ledger: %s", error)
                tables.metrics.sessions_forgotten_total.inc()
                tables.forget(session)
        if self._tables.store is not None:
            await asyncio.to_thread(self._tables.store.maintain)


def count_turn(tables: Tables, turn: Turn, reason: str) -> None:
    """A turn ended: its times join the histograms."""
    tables.finished += 1
    generation, metrics = turn.generation, tables.metrics
    sla_class, route = generation.request.sla.sla_class.value, generation.lane or "none"
    now_ms = tables.now_ms()
    usage = generation.usage(now_ms)
    first, last = generation.first_token_ms, generation.last_token_ms
    metrics.e2e_seconds.labels(sla_class, route).observe(usage.total_ms / 1000)
    if first is None or last is None:
        return
    metrics.ttft_seconds.labels(sla_class, route).observe(usage.ttft_ms / 1000)
    tpot_ms = (last - first) / max(1, usage.completion_tokens - 1)
    if usage.completion_tokens > 1:
        metrics.tpot_seconds.labels(sla_class, route).observe(tpot_ms / 1000)
    if reason in ("stop", "length"):
        metrics.slo_requests_total.labels(sla_class, _outcome(turn, tpot_ms, now_ms)).inc()


def _outcome(turn: Turn, tpot_ms: float, now_ms: float) -> str:
    generation, sla = turn.generation, turn.generation.request.sla
    if sla.ttlt_ms is not None and now_ms - generation.arrived_ms > sla.ttlt_ms:
        return "ttlt_miss"
    due_ms = generation.arrived_ms + turn.horizon_ms
    if generation.first_token_ms is not None and generation.first_token_ms > due_ms:
        return "ttft_miss"
    return "tpot_miss" if tpot_ms > turn.tpot_ms else "met"
