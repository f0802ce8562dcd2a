"""Admission of requests by the engine: the reasons to refuse one before anything has changed.

Owns the bound on a session's queue, and whether the engine takes requests at all. Bounds per lane
and per tenant are the dispatcher's.
"""

from __future__ import annotations

import dataclasses

from batchengine import errors
from batchengine.core import GenerationRequest, ModelInfo
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import check_request
from batchengine.policy import cost

SESSION_QUEUE_MAX = 16  # requests waiting for one session


class RequestAdmission:
    """Checks the requests of one engine."""

    def __init__(self, state: EngineState, info: ModelInfo, dispatcher: Dispatcher) -> None:
        self._state = state
        self._info = info
        self._dispatcher = dispatcher

    def check(self, request: GenerationRequest) -> None:
        """Raise BatchEngineError for any reason to refuse the request."""
        state = self._state
        if state.stopping:
            raise errors.DRAINING()
        if state.fatal is not None:
            raise errors.ENGINE_FAILED(defect=type(state.fatal).__name__)
        if state.leaving and (request.tenant, request.session_id) not in state.sessions:
            raise errors.LEAVING()
        if state.model_changed:
            raise errors.MODEL_CHANGED(why=state.model_changed)
        check_request(request, self._info)
        if state.waiting >= state.config.limits.queue_max:
            retry_ms = cost.retry_after_ms(self._dispatcher.wait_ms(request))
            raise errors.OVERLOADED(
                waiting=state.waiting, setting="limits.queue_max", retry_ms=retry_ms
            )
        self._check_session(request)
        self._dispatcher.admit(request)

    def _check_session(self, request: GenerationRequest) -> None:
        """Raise BatchEngineError if the request's session takes none now."""
        if request.session_id is None:
            return
        state, name = self._state, (request.tenant, request.session_id)
        if name in state.dropping:
            raise errors.SESSION_DROPPED(session_id=request.session_id)
        session = state.sessions.get(name)
        line = None if session is None else state.lines.get(session.key)
        if line is not None and len(line.waiting) >= SESSION_QUEUE_MAX:
            raise errors.SESSION_BUSY(queued=len(line.waiting))


def with_session(request: GenerationRequest, recovery: SessionRecovery) -> GenerationRequest:
    """Return the request with a session id: its own, that of its tool calls, or its key's."""
    if request.session_id is not None:
        return request
    found = recovery.calls.find(request.tenant, request.tool_call_ids, request.prompt)
    found = found or request.session_of_key
    return dataclasses.replace(request, session_id=found) if found else request


def with_turn(request: GenerationRequest, state: EngineState) -> GenerationRequest:
    """Return the request under the id of the turn that has its key and is served now, if any.

    It repeats that turn, and its client may be shown the id before the turn ends.
    """
    key, name = request.idempotency_key, (request.tenant, request.session_id or "")
    if not key or (session := state.sessions.get(name)) is None:
        return request
    for served, of in state.requests.items():
        if of is session and not served.is_over and served.request.idempotency_key == key:
            return dataclasses.replace(request, request_id=served.turn_id)
    return request
