"""Which sessions change their lane by themselves, as pure functions over the router's views.

An idle session leaves a fast lane (`demotion`), and a turn with its first token leaves it, if it is
neither latency-sensitive nor was its session a moment ago, while the lane's steps take nearly as
long as latency-sensitive turns are promised, or turns wait there (`relief`): if a bulk lane has a
free seat and is predicted to keep the turn's promise, with `tolerance` to spare. So a fast lane
computes a prompt for which a bulk lane is too slow, and the bulk lane the answer.

A turn that computes elsewhere goes to a fast lane (`promotion`), as when one comes up or a lane
falls behind what it promised, if

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
    RouteRequest,
    RouteSession,
    RouteState,
    best_lane,
    is_urgent,
    route,
)

RELIEVES = "urgent turns need the fast lane"


class TurnMove(NamedTuple):
    """A lane to which a turn goes, and why. Predicted milliseconds from now to its last token, here
    and there."""

    lane: str
    reason: str
    here_ms: float
    there_ms: float


def promotion(
    request: RouteRequest, session: RouteSession, row: LoadRow, state: RouteState
) -> TurnMove | None:
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
    return TurnMove(lane.name, decision.reason, here_ms, there_ms)


def relief(
    request: RouteRequest, session: RouteSession, row: LoadRow, state: RouteState
) -> TurnMove | None:
    """Return the bulk lane that a turn on a fast lane goes to; None: it stays. The arguments are
    those of `promotion`."""
    policy = state.policy
    home = next((lane for lane in state.lanes if lane.name == session.lane), None)
    if home is None or not home.alive or home.tier != FAST or row.to_compute > 1:
        return None
    near_ms = home.load.step_ms * (1.0 + policy.tolerance)
    if is_urgent(request, policy) or not (home.load.waiting or near_ms > policy.urgent_tpot_ms):
        return None
    if session.dwell_ms < policy.dwell_ms_min or session.urgent_ms < policy.demote_idle_ms:
        return None
    decision = route(request, session, RouteState(state.lanes, policy))
    here = decision.candidates[state.lanes.index(home)]
    able = [
        (candidate.sla_ratio, lane.name, candidate)
        for lane, candidate in zip(state.lanes, decision.candidates, strict=True)
        if lane.tier == BULK and not candidate.excluded
        if lane.load.seated + lane.load.waiting < lane.load.seats
        if candidate.sla_ratio <= 1.0 - policy.tolerance
    ]
    if not able or here.excluded:
        return None
    _, name, there = min(able, key=lambda row: row[:2])
    return TurnMove(name, RELIEVES, _end_ms(request, here), _end_ms(request, there))


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
