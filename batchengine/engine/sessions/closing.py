"""Closes turns: last event, record in the ledger, outcome for the dispatcher, metrics.

Owns the finish reason that the reader gets, and the status in the ledger.
"""

from __future__ import annotations

from batchengine.core import BatchEngineError, DoneEvent, ErrorEvent
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState
from batchengine.engine.turns.journal import DONE, Journal
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn, TurnEnd


class TurnClosing:
    """Closes the turns of one engine."""

    def __init__(
        self,
        state: EngineState,
        journal: Journal,
        recovery: SessionRecovery,
        dispatcher: Dispatcher,
    ) -> None:
        self._state = state
        self._journal = journal
        self._recovery = recovery
        self._dispatcher = dispatcher

    def close(self, turn: Turn, end: TurnEnd) -> None:
        """Close a turn; its last event is sent once its record is durable."""
        generation, reason = turn.generation, end.reason
        if turn.matcher is not None:
            turn.matcher.close()
        if self._state.turns.pop(generation, None) is None:
            return  # `fail_all` has sent the last event
        if self._state.stopping and reason == "cancelled" and not generation.cancelled:
            reason = "shutdown"
        self._count(turn, reason)
        self._dispatcher.ended(turn, reason)
        event, status = self._last_event(generation, reason, end.error)
        if turn.turn_id:
            self._journal.end(turn, event, status, self._recovery.closing_meta(turn))
        else:
            generation.end(event)

    def _last_event(
        self, generation: Generation, reason: str, error: BatchEngineError | None
    ) -> tuple[DoneEvent | ErrorEvent, str]:
        """Return the last event, and the turn's status in the ledger."""
        if error is not None:
            return ErrorEvent(error), "failed"
        text = generation.rest(reason == "stop" and generation.stops.stopped)
        usage = generation.usage(self._state.now_ms())
        found = generation.stops.found if reason == "stop" else ""
        event = DoneEvent(reason, usage, text, found)
        return event, DONE if reason in ("stop", "length") else reason

    def _count(self, turn: Turn, reason: str) -> None:
        """Add the times of a turn that ended to the histograms."""
        state, generation = self._state, turn.generation
        state.finished += 1
        metrics, now_ms = state.metrics, state.now_ms()
        sla_class, route = generation.request.sla.sla_class.value, generation.lane or "none"
        usage = generation.usage(now_ms)
        metrics.e2e_seconds.labels(sla_class, route).observe(usage.total_ms / 1000)
        if generation.first_token_ms is None:
            return
        metrics.ttft_seconds.labels(sla_class, route).observe(usage.ttft_ms / 1000)
        if (tpot_ms := generation.tpot_ms) is not None:
            metrics.tpot_seconds.labels(sla_class, route).observe(tpot_ms / 1000)
        if reason in ("stop", "length"):
            metrics.slo_requests_total.labels(sla_class, _slo_outcome(turn, now_ms)).inc()


def _slo_outcome(turn: Turn, now_ms: float) -> str:
    generation, sla = turn.generation, turn.generation.request.sla
    if sla.ttlt_ms is not None and now_ms - generation.arrived_ms > sla.ttlt_ms:
        return "ttlt_miss"
    due_ms = generation.arrived_ms + turn.horizon_ms
    if generation.first_token_ms is not None and generation.first_token_ms > due_ms:
        return "ttft_miss"
    return "tpot_miss" if (generation.tpot_ms or 0.0) > turn.tpot_ms else "met"
