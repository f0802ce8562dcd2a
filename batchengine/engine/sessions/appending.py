"""Requests that send their newest messages alone: the prompt is made from the session's timeline.

Owns that prompt. It is the daemon's own tokens, so all of their KV is there, whatever the client's
text of earlier answers would have become. A session computes one request at a time, so one that
appends waits until the session has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from batchengine import errors
from batchengine.core import Found, GenerationRequest, TimelineUse
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState
from kv_store.ledger.queries import SessionRecord, TurnInfo


class Appending:
    """Prompts of the requests of one engine that append. All methods run on its event loop."""

    def __init__(
        self,
        state: EngineState,
        recovery: SessionRecovery,
        end_tokens: frozenset[int],
        context_tokens: int,
    ) -> None:
        """`end_tokens` end a message of the model."""
        self._state = state
        self._recovery = recovery
        self._end_tokens = end_tokens
        self._context_tokens = context_tokens

    async def prompted(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with its whole prompt, to be submitted before any other task runs.

        A request whose session has no timeline keeps the prompt that it has. Raises
        BatchEngineError (400, 503).
        """
        if request.session_id is None:
            raise errors.NOT_APPENDABLE(why="the request names no session")
        name = request.tenant, request.session_id
        await self._state.at_rest(*name)
        found = await self._recovery.find(*name)
        session = self._state.sessions.get(name)
        if session is not None and self._state.is_busy(session):  # another one was faster
            return await self.prompted(request)
        if session is not None and session.tokens and session.logged >= 0:
            timeline: Sequence[int] = session.tokens
        else:
            timeline = () if found is None else found.tokens
        if not timeline or found is None:
            if request.append_to:
                raise errors.TURN_FOLLOWED(session_id=name[1], turn_id=request.append_to)
            return dataclasses.replace(request, append=(), found=Found(TimelineUse.NEW))
        prompt = self._repeated(request, found, timeline) or self._longer(request, timeline)
        tokens_max = min(request.tokens_max, max(1, self._context_tokens - len(prompt)))
        use = Found(TimelineUse.APPENDED, name[1], len(timeline))
        return dataclasses.replace(
            request, prompt=prompt, append=(), tokens_max=tokens_max, found=use
        )

    def _longer(self, request: GenerationRequest, timeline: Sequence[int]) -> tuple[int, ...]:
        """Return the timeline, the end of its last message if it has none, and the new messages."""
        added = request.append
        if timeline[-1] in self._end_tokens and added[0] in self._end_tokens:
            added = added[1:]
        return (*timeline, *added)

    def _repeated(
        self, request: GenerationRequest, found: SessionRecord, timeline: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the prompt of the turn that this request repeats; () if it repeats none."""
        turn = _repeated_turn(request, found.turns)
        if turn is None or turn.prompt_end > len(timeline):
            return ()
        prompt, added = tuple(timeline[: turn.prompt_end]), request.append[1:]
        return prompt if prompt[len(prompt) - len(added) :] == added else ()


def _repeated_turn(request: GenerationRequest, turns: Sequence[TurnInfo]) -> TurnInfo | None:
    """Return the turn that this request may be sent again for."""
    if request.idempotency_key:
        same = (t for t in turns if t.idempotency_key == request.idempotency_key)
        return next(same, None)
    return turns[-1] if turns and request.is_retry else None
