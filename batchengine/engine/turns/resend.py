"""The tokens of a turn that an earlier stream computed, as events for the next reader.

Owns the events that are ready, at most SLICE: they are made while the reader takes them, so a
resume costs the memory of its token ids, and never holds the event loop for more than one slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from batchengine.core import GenerationEvent, SkippedEvent, TokenEvent
from batchengine.text.detokeniser import Detokeniser, StopMatcher

SLICE = 256  # tokens between two chances for other tasks: below a millisecond


class Resend:
    """Events of `tokens`, of which the reader has the first `known`."""

    def __init__(
        self, tokens: Sequence[int], known: int, detokeniser: Detokeniser, stops: StopMatcher
    ) -> None:
        self.events = deque[GenerationEvent]()
        self._tokens = tokens
        self._known = known
        self._detokeniser = detokeniser
        self._stops = stops
        self._made = 0

    async def fill(self) -> bool:
        """Make more events if none is ready; False once all were taken."""
        while not self.events and self._made < len(self._tokens):
            await asyncio.sleep(0)
            for token in self._tokens[self._made : self._made + SLICE]:
                text, _ = self._stops.push(self._detokeniser.push(token))
                is_known = self._made < self._known
                self.events.append(SkippedEvent(text) if is_known else TokenEvent(token, text))
                self._made += 1
        return bool(self.events)
