"""Emission of sampled tokens to readers, after their step was committed.

Owns the queue between a commit and the readers' streams: text and events of a step are produced
while the worker computes the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from batchengine.core import TokenEvent, TokenLogprob
from batchengine.engine.turns.turn import Turn, TurnEnd
from batchengine.wire import lane as wire


class Emissions:
    """Queue of the emissions of one lane, in the order of their commits."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        """`piece` returns the bytes of a token."""
        self._piece = piece
        self._queue: list[tuple[Turn, wire.SampledRow | None, str]] = []

    def add(self, turn: Turn, row: wire.SampledRow | None, finish: str = "") -> None:
        """Queue a token, the end of the turn (`finish` is its reason), or both: with "stop" the
        token is the one that ends the answer, and is shown without text."""
        self._queue.append((turn, row, finish))

    def flush(self) -> None:
        """Emit what is queued. A stop string must not be completed here: turns with stop strings
        are emitted at their commit."""
        queue, self._queue = self._queue, []
        for turn, row, finish in queue:
            is_end = finish == "stop"
            if row is not None and self.emit(turn, row, is_end=is_end) and not finish:
                raise AssertionError("a stop string was found too late")
            if finish:
                turn.finish(TurnEnd(finish))

    def show_prompt(self, turn: Turn) -> None:
        """Give the reader the log-probabilities of the prompt, if asked, before the first token."""
        if turn.scores is not None:
            turn.generation.show_prompt(turn.scores.events(self._piece))

    def emit(self, turn: Turn, row: wire.SampledRow, *, is_end: bool = False) -> bool:
        """Append one token to the reader's stream; True if a stop string is complete."""
        logprob, top = None, ()
        if turn.sampling.logprobs >= 0:
            piece = self._piece
            logprob = TokenLogprob(row.token, piece(row.token), row.logprob)
            top = tuple([TokenLogprob(t, piece(t), value) for t, value in row.top])
        if is_end:
            turn.generation.push(TokenEvent(row.token, "", logprob, top))
            return False
        return turn.generation.add_token(row.token, logprob, top)
