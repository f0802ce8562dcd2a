"""What is going on, as plain rows: lanes, sessions, requests, numbers. Reads, changes nothing."""

from __future__ import annotations

import time
from typing import Any

from batchengine.core import SlaClass
from batchengine.engine.generation import Generation
from batchengine.engine.loop import LaneLoop
from batchengine.engine.record import parked_row
from batchengine.engine.tables import Tables
from batchengine.session import Session, State

CLASSES = tuple(c.value for c in SlaClass)  # a session's priority counts them from the other end


def lane_rows(tables: Tables) -> list[dict[str, Any]]:
    """One row per lane."""
    return [
        {
            "name": loop.lane.name,
            "kind": loop.config.kind,
            "tier": loop.config.tier,
            "state": _lane_state(loop),
            "why": _lane_why(loop),
            "pid": loop.lane.pid,
            "incarnation": loop.lane.incarnation,
            "threads": loop.config.threads,
            "cores": ",".join(map(str, loop.config.cores)),
            "running": len(loop.running),
            "waiting": len(loop.waiting),
            "steps": loop.steps,
            "step_ms": round(loop.step_ms, 3),
            "isa": loop.lane.ready.isa if loop.lane.ready else "",
        }
        for loop in tables.loops
    ]


def _lane_state(loop: LaneLoop) -> str:
    """ready, restarting, drained or down."""
    if loop.drained:
        return "drained"
    if loop.lane.alive and loop.pages.is_attached:
        return "ready"
    return "down" if loop.down else "restarting"


def _lane_why(loop: LaneLoop) -> str:
    """Why it is not ready, or not all of it."""
    if loop.drained or (loop.down and not loop.lane.alive):
        return loop.drained or loop.down
    return f"its pages are not published: {loop.pages.muted}" if loop.pages.muted else ""


def ledger_state(tables: Tables) -> str:
    """ "ok", or why the ledger cannot be written."""
    store = tables.store
    if store is None:
        return "off: not open yet"
    failure = store.ledger.failure
    if failure is None and store.ledger.stats.is_full:
        return "full: turns with a session id are refused until there is disk space"
    return "ok" if failure is None else f"failing: {failure}"


def troubles(tables: Tables) -> list[str]:
    """Everything that is not as it should be, a sentence each; empty = all is well."""
    found = list(tables.troubles.values())
    for loop in tables.loops:
        state, why = _lane_state(loop), _lane_why(loop)
        if state != "ready" or why:
            found.append(f"lane {loop.lane.name} {state}" + (f": {why}" if why else ""))
    if tables.store is not None and tables.store.tier != "ok":
        found.append(f"KV cache {tables.store.tier}")
    if tables.store is not None:
        found += tables.store.troubles
    if ledger_state(tables) not in ("ok", "off: not open yet"):
        found.append(f"ledger {ledger_state(tables)}")
    return found


def session_rows(tables: Tables, tenant: str | None = None) -> list[dict[str, Any]]:
    """Named sessions in memory, and anonymous ones that compute now; of all tenants, or of one."""
    computing = (turn.session for turn in tables.turns.values())
    known = (*tables.named.values(), *computing)
    found = {s.key: s for s in known if tenant in (None, s.tenant)}
    return [
        {
            "session_id": session.session_id,
            "tenant": session.tenant,
            "class": CLASSES[-1 - session.priority],
            "state": session.state.value,
            "tokens": len(session.tokens),
            "frontier": session.frontier,
            "pages": len(session.codes),
            "pages_sealed": len(session.pinned),
            "epoch": session.epoch,
            **_reuse(tables, session),
            "lane": tables.home[session.key].lane.name if session.key in tables.home else "",
            **parked_facts(tables, session),
        }
        for session in found.values()
    ]


def parked_facts(tables: Tables, session: Session) -> dict[str, Any]:
    """Of a session that waits for a tool and for nothing else: see `record.parked_row`."""
    facts = tables.facts.get(session.key)
    if facts is None or session.state is not State.IDLE or session.key in tables.queues:
        return {}
    return parked_row(facts.meta)


def _reuse(tables: Tables, session: Session) -> dict[str, Any]:
    """What the session's last turn reused of old KV, of how much, and why not more."""
    facts = tables.facts.get(session.key)
    found = None if facts is None else facts.meta.rebase
    if found is None:
        return {"tokens_reused": 0, "tokens_prompt": 0, "reason": ""}
    return {
        "tokens_reused": max(0, found.kept),
        "tokens_prompt": found.prompt,
        "reason": found.reason,
    }


def request_rows(tables: Tables) -> list[dict[str, Any]]:
    """Requests that were admitted and have neither ended nor been cancelled."""
    now_ms = tables.now_ms()
    queued = [g for queue in tables.queues.values() for g in queue]
    live = [g for g in [*tables.turns, *queued] if not g.cancelled]
    return [_request_row(tables, g, now_ms) for g in live]


def _request_row(tables: Tables, generation: Generation, now_ms: float) -> dict[str, Any]:
    turn = tables.turns.get(generation)
    state = "queued" if turn is None else turn.session.state.value
    usage = generation.usage(now_ms)
    return {
        "request_id": generation.request_id,
        "session_id": generation.session_id,
        "class": generation.request.sla.sla_class.value,
        "state": "paused" if turn is not None and turn.paused else state,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "to_compute": 0 if turn is None else turn.session.to_compute,
        "age_ms": round(usage.total_ms, 1),
        "lane": generation.lane,
        **_speeds(generation),
    }


def _speeds(generation: Generation) -> dict[str, float | None]:
    """Time to the first token and per later token so far; None = there was none yet."""
    first, last, n = (
        generation.first_token_ms,
        generation.last_token_ms,
        generation.completion_tokens - generation.resumed_tokens,
    )
    if first is None or last is None:
        return {"ttft_ms": None, "tpot_ms": None}
    tpot_ms = round((last - first) / (n - 1), 3) if n > 1 else None
    return {"ttft_ms": round(first - generation.arrived_ms, 3), "tpot_ms": tpot_ms}


def numbers(tables: Tables) -> dict[str, Any]:
    """For /health and the status command."""
    loops = tables.loops
    found: dict[str, Any] = {
        "uptime_s": round(time.monotonic() - tables.started, 1),
        "requests_running": sum(len(loop.running) for loop in loops),
        "requests_waiting": tables.waiting,
        "requests_finished": tables.finished,
        "sessions": len(tables.named),
        "tokens_computed": sum(loop.tokens for loop in loops),
        "tokens_recomputed": sum(loop.recomputed for loop in loops),
        "rows_adopted": sum(loop.pages.rows_adopted for loop in loops),
        "pages_sealed": sum(loop.pages.sealed for loop in loops),
        "seal_failures": sum(loop.pages.seal_failures for loop in loops),
        "durability": tables.config.store.durability,
        "ledger": ledger_state(tables),
        "kv_tier": "off: not open yet" if tables.store is None else tables.store.tier,
        "troubles": troubles(tables),
    }
    if tables.store is not None:
        found["store"] = tables.store.stat()
    return found
