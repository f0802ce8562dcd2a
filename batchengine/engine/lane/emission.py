"""Emission of sampled tokens to readers, after their step was committed.

Owns the queue between a commit and the readers' streams: text and events of a step are produced
while the worker computes the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from batchengine.core import TokenLogprob
from batchengine.engine.turns.turn import Turn, TurnEnd
from batchengine.wire import lane as wire


class Emissions:
    """Queue of the emissions of one lane, in the order of their commits."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        """`piece` returns the bytes of a token."""
        self._piece = piece
        self._queue: list[tuple[Turn, wire.SampledRow | None, str]] = []

    def add(self, turn: Turn, row: wire.SampledRow | None, finish: str = "") -> None:
        """Queue a token, the end of the turn (`finish` is its reason), or both."""
        self._queue.append((turn, row, finish))

    def flush(self) -> None:
        """Emit what is queued. A stop string must not be completed here: turns with stop strings
        are emitted at their commit."""
        queue, self._queue = self._queue, []
        for turn, row, finish in queue:
            if row is not None and self.emit(turn, row) and not finish:
                raise AssertionError("a stop string was found too late")
            if finish:
                turn.finish(TurnEnd(finish))

    def emit(self, turn: Turn, row: wire.SampledRow) -> bool:
        """Append one token to the reader's stream; True if a stop string is complete."""
        logprob, top = None, ()
        if turn.sampling.logprobs >= 0:
            piece = self._piece
            logprob = TokenLogprob(row.token, piece(row.token), row.logprob)
            top = tuple([TokenLogprob(t, piece(t), value) for t, value in row.top])
        return turn.generation.add_token(row.token, logprob, top)
