"""Moves that were asked for: to a lane here, or to a peer, which computes the turn that runs."""

from __future__ import annotations

import dataclasses

from batchengine.core import BatchEngineError
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.placement.move_report import MoveCause, MoveOutcome, MoveReport
from batchengine.engine.remote.away import AwayTurns
from batchengine.engine.state import EngineState
from batchengine.policy.router import FAST
from batchengine.session import Session


async def relocate(
    state: EngineState,
    dispatcher: Dispatcher,
    away: AwayTurns,
    session: Session,
    to: str | None,
    tier: str,
) -> MoveReport:
    """Move a session to `to`, or to the best place of a tier.

    Raises BatchEngineError: then nothing has changed.
    """
    if to is None and tier == FAST:
        peer, reason = dispatcher.peer_for(session)
        if peer:
            return await _to_peer(state, dispatcher, away, session, peer, reason)
    moved = await away.relocate(session, to)
    return moved if moved is not None else await dispatcher.relocate(session, to, tier)


async def _to_peer(
    state: EngineState,
    dispatcher: Dispatcher,
    away: AwayTurns,
    session: Session,
    peer: str,
    reason: str,
) -> MoveReport:
    """Have a peer compute the session's turn, which the router chose for `reason`. If it
    refuses, move the session to the best lane here, if there is another one."""
    try:
        moved = await away.relocate(session, peer, reason)
        if moved is not None:
            return moved
        why = f"{peer} is no peer any more"
    except BatchEngineError as error:
        why = f"not to peer {peer}: {error.why}"
    try:
        moved = await dispatcher.relocate(session, None, FAST)
    except BatchEngineError as error:
        home = state.home.get(session.key)
        name = "none" if home is None else home.lane.name
        stayed, cause = MoveOutcome.STAYED, MoveCause.PROMOTION
        why = f"{why}; {error.why}"
        return MoveReport(session.session_id, name, name, cause, outcome=stayed, why=why)
    return dataclasses.replace(moved, reason=why)
