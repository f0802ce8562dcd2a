"""Which sessions change their lane by themselves, as pure functions over the router's views.

An idle session leaves a fast lane (`demotion`). A turn that computes elsewhere goes to a fast lane
(`promotion`), as when one comes up or a lane falls behind what it promised, if

 1. the router would choose that lane for what is left of the turn,
 2. a seat is free there, so that no other turn waits for it, and
 3. the turn is predicted to end earlier by `tolerance` of the time that it has left, with the move.

No session moves twice within `dwell_ms_min`.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from batchengine.policy.cost import LoadRow, without
from batchengine.policy.router import (
    BULK,
    FAST,
    Candidate,
    Reason,
    RouteRequest,
    RouteSession,
    RouteState,
    best_lane,
    route,
)


class Promotion(NamedTuple):
    """A lane where a turn is predicted to end earlier; `reason` is the router's. Milliseconds from
    now to its last token, here and there."""

    lane: str
    reason: Reason
    here_ms: float
    there_ms: float


def promotion(
    request: RouteRequest, session: RouteSession, row: LoadRow, state: RouteState
) -> Promotion | None:
    """Return where the turn goes; None: it stays.

    `request` is what is left of the turn, whose timeline is the prompt; `row` is the turn in the
    load of its lane.
    """
    policy = state.policy
    home = next((lane for lane in state.lanes if lane.name == session.lane), None)
    if home is None or not home.alive or home.tier == FAST:
        return None
    if session.dwell_ms < policy.dwell_ms_min:
        return None
    alone = replace(home, load=without(home.load, row))
    lanes = tuple([alone if lane is home else lane for lane in state.lanes])
    decision = route(request, session, RouteState(lanes, policy))
    there = decision.predicted
    lane = next((lane for lane in lanes if lane.name == decision.lane), None)
    if there is None or lane is None or lane.tier != FAST:
        return None
    if lane.load.seated + lane.load.waiting >= lane.load.seats:
        return None
    here = decision.candidates[lanes.index(alone)]
    here_ms, there_ms = _end_ms(request, here), _end_ms(request, there)
    if here.excluded or here_ms - there_ms <= policy.tolerance * here_ms:
        return None
    return Promotion(lane.name, decision.reason, here_ms, there_ms)


def _end_ms(request: RouteRequest, candidate: Candidate) -> float:
    return candidate.ttft_ms + candidate.tpot_ms * request.tokens_out


def demotion(session: RouteSession, idle_ms: float, tokens: int, state: RouteState) -> str:
    """Return the lane to which an idle session leaves a fast lane; "" = it stays.

    `idle_ms` is the time since its last turn. It leaves if it was idle and without a
    latency-sensitive turn for `demote_idle_ms`.
    """
    policy = state.policy
    at = next((lane for lane in state.lanes if lane.name == session.lane), None)
    if at is None or at.tier != FAST:
        return ""
    if min(idle_ms, session.urgent_ms) < policy.demote_idle_ms:
        return ""
    if session.dwell_ms < policy.dwell_ms_min:
        return ""
    return best_lane(state, BULK, tokens, session.lane)
