"""Plans of restores: whether KV on disk is read or computed again, and how long that took.

Owns neither the reading nor the prediction (`policy.cost`); logs both in the decision log.
"""

from __future__ import annotations

from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.decision_log import DecisionLog
from batchengine.engine.placement.lane_view import LaneViews
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn
from batchengine.policy import cost


class Restores:
    """Plans and counts the restores of one engine."""

    def __init__(self, state: EngineState, lanes: LaneViews, log: DecisionLog) -> None:
        self._state = state
        self._lanes = lanes
        self._log = log

    def plan(
        self, turn: Turn, loop: LaneLoop, tokens: int, cold_tokens: int, cold_bytes: int
    ) -> cost.RestorePlan:
        """Choose and log whether to read KV or to recompute it; see `cost.plan_restore`."""
        load, store = self._lanes.of(loop).load, self._state.store
        found = cost.plan_restore(
            load.cost,
            tokens=tokens,
            cold_tokens=cold_tokens,
            cold_bytes=cold_bytes,
            read_bytes_per_s=self._read_rate(),
            queued_bytes=0 if store is None else store.pages.loader.bytes_loading,
            decodes=load.decodes,
        )
        self._state.metrics.restores_total.labels(found.choice).inc()
        record = self._log.of_request(turn.generation.request_id)
        if record is not None:
            record.restore = found
        return found

    def _read_rate(self) -> float:
        store = self._state.store
        return 0.0 if store is None else store.rates.read_bytes_per_s or 0.0

    def done(self, turn: Turn, actual_ms: float) -> None:
        """Record how long the planned restore took."""
        record = self._log.of_request(turn.generation.request_id)
        if record is None or record.restore is None:
            return
        record.restored_ms = actual_ms
        if record.restore.choice == "load" and record.restore.load_ms > 0.0:
            ratio = actual_ms / record.restore.load_ms
            self._state.metrics.restore_ratio.observe(ratio)
