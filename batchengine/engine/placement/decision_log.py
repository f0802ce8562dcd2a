"""A ring of the latest routing decisions, each with its inputs, predictions and outcome.

Owns these records, and turns them into plain data for `explain`; the command line makes text of
them. Decides nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import asdict

from batchengine.core import ID_PREFIX_CHARS_MIN
from batchengine.engine.placement.move_report import MoveReport
from batchengine.policy.cost import LaneLoad, RestorePlan
from batchengine.policy.linked.layouts import Rejected
from batchengine.policy.router import (
    Decision,
    LaneState,
    Outlook,
    RouteRequest,
    RouteSession,
    RouteState,
)

DECISIONS_MAX = 4096
PREDICTED = ("lane", "ttft_ms", "tpot_ms", "move_ms")  # of a candidate, in a report
NOTES_MAX = 16  # moves, and notes, of one record


class RequestOutcome(NamedTuple):
    """How a request ended. Times are milliseconds since the decision."""

    lane: str
    finish: str
    tokens: int
    cached_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None


@dataclass(slots=True, eq=False)
class DecisionRecord:
    """One routing decision and its outcome. `lane` is where the session went, which may differ
    from the router's choice in `decision`."""

    request_id: str
    session_id: str
    tenant: str
    sla_class: str
    decided_ms: float
    request: RouteRequest
    session: RouteSession | None
    state: RouteState
    decision: Decision
    lane: str
    moves: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    notes: list[str] = field(default_factory=list[str])
    restore: RestorePlan | None = None
    restored_ms: float | None = None
    outcome: RequestOutcome | None = None

    def note(self, text: str) -> None:
        """Add a note for `explain`, up to NOTES_MAX."""
        if len(self.notes) < NOTES_MAX:
            self.notes.append(text)

    def add_move(self, moved: MoveReport, now_ms: float) -> None:
        """Add a migration that has ended, up to NOTES_MAX."""
        if len(self.moves) < NOTES_MAX:
            after_ms = round(now_ms - self.decided_ms, 3)
            self.moves.append({**move_dict(moved), "after_ms": after_ms})

    def as_dict(self, now_ms: float) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        decision = self.decision
        found = decision.predicted
        predicted = {} if found is None else {name: getattr(found, name) for name in PREDICTED}
        return {
            "request_id": self.request_id,
            "session_id": self.session_id,
            "tenant": self.tenant,
            "class": self.sla_class,
            "age_s": round((now_ms - self.decided_ms) / 1000, 3),
            "lane": self.lane,
            "reason": str(decision.reason),
            "reason_id": decision.reason.name.lower(),
            "strategy": {**decision.strategy._asdict(), "peers": list(decision.peers)},
            "request": _plain(asdict(self.request)),
            "session": None if self.session is None else _plain(asdict(self.session)),
            "predicted": _plain(predicted) or None,
            "candidates": [
                {**_plain(asdict(candidate)), **_lane_dict(lane)}
                for candidate, lane in zip(decision.candidates, self.state.lanes, strict=False)
            ],
            "outlooks": [_outlook_dict(outlook) for outlook in decision.outlooks],
            "happened": self._happened(),
            "moves": list(self.moves),
            "restore": self._restore(),
            "notes": list(self.notes),
        }

    def _happened(self) -> dict[str, Any] | None:
        outcome, predicted = self.outcome, self.decision.predicted
        if outcome is None:
            return None
        found: dict[str, Any] = outcome._asdict()
        if predicted is not None and outcome.ttft_ms is not None:
            found["ttft_ratio"] = outcome.ttft_ms / max(predicted.ttft_ms, 1e-9)
        if predicted is not None and outcome.tpot_ms is not None:
            found["tpot_ratio"] = outcome.tpot_ms / max(predicted.tpot_ms, 1e-9)
        return _plain(found)

    def _restore(self) -> dict[str, Any] | None:
        if self.restore is None:
            return None
        return _plain({**self.restore._asdict(), "actual_ms": self.restored_ms})


def _lane_dict(lane: LaneState) -> dict[str, Any]:
    load: LaneLoad = lane.load
    return {
        "tier": lane.tier,
        "pool": lane.pool,
        "alive": lane.alive,
        "seated": load.seated,
        "waiting": load.waiting,
        "seats": load.seats,
        "step_ms": round(load.step_ms, 3),
        "prefill_backlog_ms": round(load.prefill_ms[-1], 3),
        "stage_backlog_ms": round(load.stage_ms, 3),
    }


def _outlook_dict(outlook: Outlook) -> dict[str, Any]:
    """Return a strategy over peers, with `rejected`: why it was not chosen, "" = it was."""
    fields = asdict(outlook)
    strategy, why = fields.pop("strategy"), fields.pop("why")
    rejected = str(why) if isinstance(why, Rejected) else ""
    peers = list(fields.pop("peers"))
    return _plain({**strategy._asdict(), "peers": peers, **fields, "rejected": rejected})


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Round floats to 3 digits; infinities and NaN, which JSON does not have, become None."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, float):
            value = round(value, 3) if math.isfinite(value) else None
        found[name] = value
    return found


def move_dict(moved: MoveReport) -> dict[str, Any]:
    """Return a migration as plain data."""
    fields = moved.as_dict()
    del fields["session_id"]
    return _plain({"from": fields.pop("source"), "to": fields.pop("target"), **fields})


class DecisionLog:
    """The latest DECISIONS_MAX records, found by request or session."""

    def __init__(self, size: int = DECISIONS_MAX) -> None:
        self._ring: deque[DecisionRecord] = deque()
        self._size = size
        self._by_request: dict[str, DecisionRecord] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Iterate over the records, newest first."""
        return reversed(self._ring)

    def add(self, record: DecisionRecord) -> None:
        """Add a record; when the ring is full, the oldest is removed."""
        if len(self._ring) >= self._size:
            oldest = self._ring.popleft()
            if self._by_request.get(oldest.request_id) is oldest:
                del self._by_request[oldest.request_id]
        self._ring.append(record)
        self._by_request[record.request_id] = record

    def of_request(self, request_id: str, tenant: str | None = None) -> DecisionRecord | None:
        """Return the latest decision about a request; with `tenant`, about one of that tenant."""
        found = self._by_request.get(request_id)
        if found is None or tenant in (None, found.tenant):
            return found
        mine = (r for r in self if (r.request_id, r.tenant) == (request_id, tenant))
        return next(mine, None)  # clients choose ids, so two tenants may use the same one

    def predicted(self, request_id: str) -> dict[str, Any] | None:
        """Return the predicted lane, ttft_ms, tpot_ms and move_ms; None = no prediction."""
        record = self.of_request(request_id)
        found = None if record is None else record.decision.predicted
        return None if found is None else asdict(found)

    def latest(self, session_id: str, tenant: str) -> DecisionRecord | None:
        """The latest decision about a session."""
        return next((r for r in self if (r.session_id, r.tenant) == (session_id, tenant)), None)

    def of_session(self, session_id: str, tenant: str) -> list[DecisionRecord]:
        """Decisions about a session, oldest first."""
        return [r for r in self._ring if (r.session_id, r.tenant) == (session_id, tenant)]

    def find(
        self,
        given: str,
        sessions: Collection[tuple[str, str]] = (),
        tenant: str | None = None,
    ) -> list[tuple[str, ...]]:
        """Return all matches of `given`: ("request", id) or ("session", tenant, id).

        If `given` is no full id, requests whose id begins with it match; a leading "be_" is
        ignored. `sessions` are (tenant, id) of sessions in memory, which may be older than the
        ring. With `tenant` only that tenant's match: ids made from keys may be equal for several.
        """
        if self.of_request(given, tenant) is not None:
            return [("request", given)]
        owners = {owner for owner, name in sessions if name == given}
        owners |= {record.tenant for record in self._ring if record.session_id == given}
        exact: list[tuple[str, ...]] = [
            ("session", owner, given) for owner in sorted(owners) if tenant in (None, owner)
        ]
        beginning = given.removeprefix("be_")
        if exact or len(beginning) < ID_PREFIX_CHARS_MIN:
            return exact
        return [
            ("request", record.request_id)
            for record in self._by_request.values()
            if record.request_id.startswith(beginning) and tenant in (None, record.tenant)
        ]
