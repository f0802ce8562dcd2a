"""Report of the routing decisions about one request or session, with their outcomes."""

from __future__ import annotations

from typing import Any

from batchengine import errors
from batchengine.engine.placement.decision_log import DecisionLog
from batchengine.engine.placement.session_times import NO_TIME, TimesOfSessions
from batchengine.engine.state import EngineState, parked_facts
from batchengine.session import Session


def explain(
    state: EngineState, log: DecisionLog, times: TimesOfSessions, given: str, tenant: str | None
) -> dict[str, Any]:
    """Return the decisions about the request or session `given`, an id or a request id's prefix.

    With `tenant` only requests and sessions of that tenant are found. Raises AMBIGUOUS_ID or
    NOTHING_TO_EXPLAIN.
    """
    names = log.find(given, state.names(), tenant)
    if len(names) > 1:
        raise errors.AMBIGUOUS_ID(given=given, found=", ".join(name[-1] for name in names[:8]))
    if not names:
        raise errors.NOTHING_TO_EXPLAIN(given=given)
    now_ms = state.now_ms()
    kind, *rest = names[0]
    if kind == "request":
        record = log.of_request(rest[0], tenant)
        if record is None:
            raise errors.NOTHING_TO_EXPLAIN(given=given)
        return {"kind": "request", **record.as_dict(now_ms)}
    owner, session_id = rest
    records = log.of_session(session_id, owner)
    session = state.sessions.get((owner, session_id))
    return {
        "kind": "session",
        "session_id": session_id,
        "tenant": owner,
        **({} if session is None else _session_facts(state, times, session, now_ms)),
        "decisions": [record.as_dict(now_ms) for record in records],
    }


def _session_facts(
    state: EngineState, times: TimesOfSessions, session: Session, now_ms: float
) -> dict[str, Any]:
    home, note = state.home.get(session.key), times.of(session)

    def ago(at_ms: float) -> float | None:
        return None if at_ms == NO_TIME else round((now_ms - at_ms) / 1000, 3)

    return {
        "lane": "" if home is None else home.lane.name,
        "state": session.state.value,
        **parked_facts(state, session),
        "tokens": len(session.tokens),
        **state.held_facts(session),
        "moving": session.key in state.moves,
        "moved_ago_s": ago(note.moved_ms),
        "urgent_ago_s": ago(note.urgent_ms),
        "used_ago_s": ago(note.used_ms),
    }
