"""Reports on a running engine as plain dicts: lanes, sessions, requests, numbers.

Reads the state and the ledger; changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any

from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.sessions.directory import family_of, name_of
from batchengine.engine.state import EngineState, parked_facts
from batchengine.engine.turns.journal import PARKED
from batchengine.engine.turns.records import SessionMeta, parked_row, session_meta
from batchengine.engine.turns.stream import Generation
from batchengine.session import Session
from kv_store.ledger.queries import SessionInfo
from kv_store.store import Store


def lane_rows(state: EngineState) -> list[dict[str, Any]]:
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
            "steps": loop.meter.steps,
            "steps_ahead": loop.meter.ahead,
            "entries_void": loop.meter.void,
            "frames_late": loop.lane.frames_late,
            "step_ms": round(loop.meter.step_ms, 3),
            "tokens_computed": loop.meter.tokens,
            "tokens_generated": loop.meter.generated,
            "tokens_drafted": loop.meter.drafted,
            "tokens_accepted": loop.meter.accepted,
            "pages": loop.kv.slots.total,
            "pages_free": loop.kv.slots.available,
            "seats": loop.config.entries_max,
            "tokens_per_s": round(loop.meter.generated_per_s, 1),
            "prefill_per_s": round(loop.meter.prefill_per_s, 1),
            "isa": loop.lane.facts.isa if loop.lane.facts else "",
        }
        for loop in state.lanes
    ]


def _lane_state(loop: LaneLoop) -> str:
    """Return ready, restarting, drained, down or stuck."""
    if loop.is_stuck:
        return "stuck"
    if loop.draining:
        return "drained"
    if loop.lane.alive and loop.kv.slots.is_attached:
        return "ready"
    return "down" if loop.outage.is_down else "restarting"


def _lane_why(loop: LaneLoop) -> str:
    """Return why the lane is not ready, or publishes no pages; or ""."""
    if loop.draining or loop.outage.why:
        return loop.draining or loop.outage.why
    return "" if loop.kv.sealing.publishes else "its pages were wrong too often: none is published"


def ledger_state(state: EngineState) -> str:
    """Return "ok", or why the ledger cannot be written."""
    store = state.store
    if store is None:
        return "off: not open yet"
    failure = store.ledger.failure
    if failure is None and store.ledger.stats.is_full:
        return "full: turns with a session id are refused until there is disk space"
    return "ok" if failure is None else f"failing: {failure}"


def troubles(state: EngineState) -> list[str]:
    """One sentence per fault of lanes, store, ledger, model and other parts; empty = no fault."""
    found = list(state.troubles.values())
    for loop in state.lanes:
        phase, why = _lane_state(loop), _lane_why(loop)
        if phase != "ready" or why:
            found.append(f"lane {loop.lane.name} {phase}" + (f": {why}" if why else ""))
        if loop.lane.unconfined:
            why = f"its worker may use every system call: {loop.lane.unconfined}"
            found.append(f"lane {loop.lane.name} unconfined: {why}")
    if state.store is not None and state.store.tier != "ok":
        found.append(f"KV cache {state.store.tier}")
    if state.store is not None:
        found += state.store.troubles
    if ledger_state(state) not in ("ok", "off: not open yet"):
        found.append(f"ledger {ledger_state(state)}")
    return [*found, *filter(None, [trouble() for trouble in state.trouble_of])]


def session_rows(
    state: EngineState, tenant: str | None = None, count_max: int | None = None
) -> list[dict[str, Any]]:
    """One row per named session in memory or computing anonymous one; of one tenant, or of all.

    With `count_max` only those that were used last.
    """
    known = [session for session in state.known() if tenant in (None, session.tenant)]
    return [
        {
            "session_id": session.session_id,
            "family": family_of(session.session_id),
            "tenant": session.tenant,
            **_use(state.facts[session.key].meta if session.key in state.facts else None),
            "class": session.sla_class,
            "state": session.state.value,
            "tokens": len(session.tokens),
            "frontier": session.frontier,
            "pages": len(session.kv.codes),
            "pages_sealed": len(session.kv.sealed),
            "epoch": session.epoch,
            **_reuse(state, session),
            "lane": state.home[session.key].lane.name if session.key in state.home else "",
            **parked_facts(state, session),
            **state.held_facts(session),
        }
        for session in (known if count_max is None else known[-count_max:])
    ]


def _use(meta: SessionMeta | None) -> dict[str, Any]:
    """What the client calls the session, and when it was last used; None = not known."""
    return {"name": meta and (meta.name or None), "used_s": meta and (meta.used_s or None)}


def _reuse(state: EngineState, session: Session) -> dict[str, Any]:
    """Tokens of KV that the session's last turn reused, of its prompt, and why not more."""
    facts = state.facts.get(session.key)
    found = None if facts is None else facts.meta.rebase
    if found is None:
        return {"tokens_reused": 0, "tokens_prompt": 0, "reason": ""}
    return {
        "tokens_reused": max(0, found.kept),
        "tokens_prompt": found.prompt,
        "reason": found.reason,
    }


def request_rows(
    state: EngineState, tenant: str | None = None, count_max: int | None = None
) -> list[dict[str, Any]]:
    """One row per request that was admitted and has neither ended nor been cancelled; of one
    tenant, or of all. With `count_max` only the first."""
    now_ms = state.now_ms()
    found = (
        one for one in state.requests if not one.cancelled and tenant in (None, one.request.tenant)
    )
    return [_request_row(state, one, now_ms) for one in itertools.islice(found, count_max)]


def _request_row(state: EngineState, generation: Generation, now_ms: float) -> dict[str, Any]:
    turn = state.turns.get(generation)
    phase = "queued" if turn is None else turn.session.state.value
    usage, tpot_ms = generation.usage(now_ms), generation.tpot_ms
    waiting = generation.waiting(now_ms)
    return {
        "request_id": generation.request_id,
        "session_id": generation.request.session_id,
        "name": generation.request.client_name or None,
        "tenant": generation.request.tenant,
        "class": generation.request.sla.sla_class.value,
        "state": "paused" if turn is not None and turn.paused and not turn.is_away else phase,
        "position": waiting.position or None,
        "eta_ms": None if waiting.eta_ms is None else round(waiting.eta_ms, 1),
        "prompt_tokens": usage.prompt_tokens,
        "computed_tokens": waiting.computed_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "to_compute": 0 if turn is None else turn.session.to_compute,
        "age_ms": round(usage.total_ms, 1),
        "lane": generation.lane,
        "ttft_ms": None if generation.first_token_ms is None else round(usage.ttft_ms, 3),
        "tpot_ms": None if tpot_ms is None else round(tpot_ms, 3),
        **({} if turn is None else state.held_facts(turn.session)),
    }


def numbers(state: EngineState) -> dict[str, Any]:
    """Return the numbers of /health and of the status command."""
    loops, load = state.lanes, state.load
    found: dict[str, Any] = {
        "uptime_s": round(time.monotonic() - state.started, 1),
        "requests_running": load.requests_running,
        "requests_waiting": load.requests_waiting,
        "requests_finished": state.finished,
        "sessions": len(state.sessions),
        "tokens_computed": sum(loop.meter.tokens for loop in loops),
        "tokens_recomputed": sum(loop.meter.recomputed for loop in loops),
        "rows_imported": sum(loop.kv.importing.rows_imported for loop in loops),
        "pages_sealed": sum(loop.kv.sealing.sealed for loop in loops),
        "seal_failures": sum(loop.kv.sealing.seal_failures for loop in loops),
        "outcomes": state.metrics.outcomes(),
        "prefix_hit_tokens": state.metrics.prefix_hits(),
        "durability": state.config.store.durability,
        "ledger": ledger_state(state),
        "kv_tier": "off: not open yet" if state.store is None else state.store.tier,
        "troubles": troubles(state),
    }
    if state.store is not None:
        found["store"] = state.store.stat()
    return found


def interrupted_rows(
    interrupted: Mapping[tuple[str, str], SessionInfo], tenant: str | None = None
) -> list[dict[str, Any]]:
    """One row per session whose turn an earlier engine left unfinished, not requested since."""
    return [
        {
            "session_id": session_id,
            "family": family_of(session_id),
            "tenant": owner,
            **_use(session_meta(info.meta)),
            "state": "interrupted",
            "tokens": info.ledger_len,
            "frontier": 0,
            "pages": 0,
            "pages_sealed": 0,
            "epoch": info.epoch,
            "lane": info.owner_lane,
        }
        for (owner, session_id), info in interrupted.items()
        if tenant in (None, owner)
    ]


async def stored_rows(store: Store, count_max: int) -> list[dict[str, Any]]:
    """One row per session of the ledger, also of those in memory; most recently used first."""
    infos = await asyncio.wrap_future(store.ledger.list_sessions())
    rows: list[dict[str, Any]] = []
    for info in infos[:count_max]:
        parked = info.state == PARKED
        rows.append(
            {
                "session_id": name_of(info.id)[1],
                "family": family_of(name_of(info.id)[1]),
                "tenant": info.tenant,
                **_use(session_meta(info.meta)),
                "state": "on disk",
                "tokens": info.ledger_len,
                "epoch": info.epoch,
                "lane": info.owner_lane,
                **({"state": PARKED, **parked_row(session_meta(info.meta))} if parked else {}),
            }
        )
    return rows


def tenant_rows(usage: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Sessions and bytes of the ledger per tenant, as numbers of `store stat`."""
    rows: dict[str, int] = {}
    for tenant, (sessions, size) in usage.items():
        rows[f"sessions of {tenant or '-'}"] = sessions
        rows[f"ledger_bytes of {tenant or '-'}"] = size
    return rows
