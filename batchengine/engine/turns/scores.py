"""Log-probabilities of the tokens of a prompt: as its turn computes them, and for its reader.

Owns them as packed numbers, 4 + 8 n bytes per token for the n best ones: events are made while the
reader takes them.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from batchengine.core import GenerationEvent, PromptTokenEvent, TokenLogprob
from batchengine.wire.lane import ScoredRows

SLICE = 16  # events between two chances for other tasks: each has up to 20 best tokens


class PromptScores:
    """What one turn has computed of them. Each token is scored by the row of the one before it."""

    def __init__(self, prompt: Sequence[int], best: int) -> None:
        """`best`: how many of the best tokens are asked for in each place."""
        self.prompt = prompt
        self.best = best
        self._logprobs = array("f")
        self._best, self._best_logprobs = array("i"), array("f")

    def __repr__(self) -> str:
        return f"<PromptScores {self.rows} of {len(self.prompt) - 1}>"

    @property
    def rows(self) -> int:
        """Leading rows of the prompt whose next tokens are scored."""
        return len(self._logprobs)

    @property
    def is_complete(self) -> bool:
        return self.rows == len(self.prompt) - 1

    def wanted(self, start: int, end: int) -> Sequence[int]:
        """The tokens that rows [start, end) score."""
        return self.prompt[start + 1 : end + 1]

    def add(self, start: int, scored: ScoredRows) -> None:
        """Add what rows from `start` on have given; those that are known have the same numbers."""
        if not 0 <= start <= self.rows:
            raise RuntimeError(f"{self!r}: rows from {start} on")
        given = (scored.logprobs, self._logprobs), (scored.best, self._best)
        n, known = len(scored.logprobs) // 4, self.rows - start
        for source, to in (*given, (scored.best_logprobs, self._best_logprobs)):
            to.frombytes(source[known * (len(source) // n) :])

    def events(self, piece: Callable[[int], bytes]) -> PromptEvents:
        """The events of the whole prompt; `piece` returns the bytes of a token."""
        return PromptEvents(self, piece)

    def event(self, index: int, piece: Callable[[int], bytes]) -> PromptTokenEvent:
        """The event of one token of the prompt."""
        token, row = self.prompt[index], index - 1
        if row < 0:
            return PromptTokenEvent(token, piece(token), None)
        n = len(self._best) // self.rows
        span = slice(row * n, (row + 1) * n)
        best = zip(self._best[span], self._best_logprobs[span], strict=True)
        top = tuple([TokenLogprob(one, piece(one), logprob) for one, logprob in best])
        return PromptTokenEvent(token, piece(token), self._logprobs[row], top)


class PromptEvents:
    """The events of a prompt, of which at most SLICE are ready."""

    def __init__(self, scores: PromptScores, piece: Callable[[int], bytes]) -> None:
        self.events = deque[GenerationEvent]()
        self._scores = scores
        self._piece = piece
        self._made = 0

    async def fill(self) -> bool:
        """Make more events if none is ready; False once all were taken."""
        end = len(self._scores.prompt)
        if not self.events and self._made < end:
            await asyncio.sleep(0)
            after = min(end, self._made + SLICE)
            made = range(self._made, after)
            self.events.extend([self._scores.event(index, self._piece) for index in made])
            self._made = after
        return bool(self.events)
