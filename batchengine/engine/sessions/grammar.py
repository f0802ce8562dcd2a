"""Grammars of turns: compiled before a turn joins its lane.

Owns what a turn does when its grammar gives up, or the mask of its next token is known.
"""

from __future__ import annotations

from batchengine.core import BatchEngineError
from batchengine.engine.state import EngineState
from batchengine.engine.turns.turn import Turn, TurnEnd
from batchengine.grammar.matchers import Grammars


class TurnGrammars:
    """The matchers of one engine's turns."""

    def __init__(self, state: EngineState, grammars: Grammars) -> None:
        self._state = state
        self._grammars = grammars

    async def begin(self, turn: Turn) -> bool:
        """Give a constrained turn its matcher, after the tokens that its answer has already; False
        if the turn has ended, since its grammar cannot be used."""
        generation = turn.generation
        request, more = generation.request, generation.continuation
        if request.constraint is None:
            return True
        tokens = () if more is None else more.tokens
        try:
            matcher = await self._grammars.begin(request.constraint, request.tenant, tokens)
        except BatchEngineError as error:
            turn.finish(TurnEnd(error=error))
            return False
        turn.matcher, key = matcher, turn.session.key

        def on_change() -> None:
            if matcher.error is not None:
                generation.abort(matcher.error)
            elif (loop := self._state.home.get(key)) is not None:
                loop.mask_known(turn)

        matcher.on_change = on_change
        return True
