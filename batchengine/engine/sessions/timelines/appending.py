"""Requests that send their newest messages alone: the prompt is made from the session's timeline.

Owns that prompt. It is the daemon's own tokens, so all of their KV is there, whatever the client's
text of earlier answers would have become. A session computes one request at a time, so one that
appends waits until the session has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from batchengine import errors
from batchengine.core import Found, GenerationRequest, ModelInfo, TimelineUse
from batchengine.engine.sessions.past.turns import PastTurns
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState
from batchengine.engine.turns.journal import RUNNING
from kv_store.ledger.queries import SessionRecord, TurnInfo


class Appending:
    """Prompts of the requests of one engine that append. All methods run on its event loop."""

    def __init__(
        self,
        state: EngineState,
        recovery: SessionRecovery,
        past_turns: PastTurns,
        end_tokens: frozenset[int],
        info: ModelInfo,
    ) -> None:
        """`end_tokens` end a message of the model."""
        self._state = state
        self._recovery = recovery
        self._past_turns = past_turns
        self._end_tokens = end_tokens
        self._info = info

    async def prompted(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with its whole prompt, to be submitted before any other task runs.

        A request whose session has no timeline keeps the prompt that it has. Raises
        BatchEngineError (400, 404, 409, 503).
        """
        if request.append_to:
            return await self._behind(request)
        if request.session_id is None:
            raise errors.NOT_APPENDABLE(why="the request names no session")
        name = request.tenant, request.session_id
        await self._state.at_rest(*name)
        found = await self._recovery.readable(*name)
        session = self._state.sessions.get(name)
        if session is not None and self._state.is_busy(session):  # another one was faster
            return await self.prompted(request)
        if session is not None and session.tokens and session.logged >= 0:
            timeline: Sequence[int] = session.tokens
        else:
            timeline = () if found is None else found.tokens
        if not timeline or found is None:
            return dataclasses.replace(request, append=(), found=Found(TimelineUse.NEW))
        prompt = self._repeated(request, found, timeline) or self._longer(request, timeline)
        use = Found(TimelineUse.APPENDED, name[1], _shared(timeline, prompt))
        return self._with_prompt(request, prompt, use)

    def _with_prompt(
        self, request: GenerationRequest, prompt: tuple[int, ...], use: Found
    ) -> GenerationRequest:
        tokens_max = min(request.tokens_max, max(1, self._info.context_tokens - len(prompt)))
        return dataclasses.replace(
            request, prompt=prompt, append=(), append_to="", tokens_max=tokens_max, found=use
        )

    async def _behind(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with a prompt behind the answer of turn `append_to`.

        The session of that turn goes on if nothing has followed it. Otherwise, and for a request
        that names no session, the prompt is a timeline of its own, which shares their pages.
        """
        while True:
            place = await self._past_turns.place(request.tenant, request.append_to)
            name, found = (request.tenant, place.session_id), place.record
            if again := self._repeated(request, found, found.tokens):
                turn = _repeated_turn(request, found.turns)
                assert turn is not None  # `again` is its prompt
                use = Found(TimelineUse.CONTINUED, name[1], len(again))
                asked = dataclasses.replace(request, session_id=name[1], request_id=turn.id)
                return self._with_prompt(asked, again, use)
            session = self._state.sessions.get(name)
            is_busy = session is not None and self._state.is_busy(session)
            if not (is_busy and place.is_last and place.turn.status == RUNNING):
                break
            await self._state.at_rest(*name)
        timeline = found.tokens[: place.end]
        prompt = self._longer(request, timeline)
        is_followed = session is not None and 0 <= session.logged != len(timeline)
        if is_busy or is_followed or not place.is_last or request.session_id is None:
            use = Found(TimelineUse.FORKED, name[1], _shared(timeline, prompt))
            return self._with_prompt(request, prompt, use)
        use = Found(TimelineUse.APPENDED, name[1], _shared(timeline, prompt))
        asked = dataclasses.replace(request, session_id=name[1], in_family=False)
        return self._with_prompt(asked, prompt, use)

    def _longer(self, request: GenerationRequest, timeline: Sequence[int]) -> tuple[int, ...]:
        """Return the timeline, the end of its last message if it has none, and the new messages.

        Where the template has another token behind an answer than the one that ended it, the
        template's takes its place.
        """
        added = request.append
        if timeline[-1] not in self._end_tokens:
            return (*timeline, *added)
        if added[0] in self._end_tokens:
            return (*timeline, *added[1:])
        return (*timeline[:-1], *added)

    def _repeated(
        self, request: GenerationRequest, found: SessionRecord, timeline: Sequence[int]
    ) -> tuple[int, ...]:
        """Return the prompt of the turn that this request repeats; () if it repeats none."""
        turn = _repeated_turn(request, found.turns)
        if turn is None or turn.prompt_end > len(timeline):
            return ()
        prompt, added = tuple(timeline[: turn.prompt_end]), request.append[1:]
        return prompt if prompt[len(prompt) - len(added) :] == added else ()


def _shared(timeline: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many tokens of a timeline begin the prompt that was made of it."""
    last = len(timeline) - 1
    return last if last < len(prompt) and prompt[last] != timeline[last] else last + 1


def _repeated_turn(request: GenerationRequest, turns: Sequence[TurnInfo]) -> TurnInfo | None:
    """Return the turn that this request may be sent again for."""
    if request.idempotency_key:
        same = (t for t in turns if t.idempotency_key == request.idempotency_key)
        return next(same, None)
    return turns[-1] if turns and request.is_retry else None
