"""When sessions last moved or could not, had an urgent request, or were used.

Owns these times of every session in memory, in milliseconds of the engine's clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from batchengine.engine.state import EngineState
from batchengine.session import Session

NO_TIME = -math.inf


@dataclass(slots=True)
class SessionTimes:
    """Times of one session."""

    used_ms: float
    moved_ms: float = NO_TIME
    refused_ms: float = NO_TIME  # a migration ended without a change
    refused: tuple[str, str] | None = None  # target and reason of that one, since the last move
    urgent_ms: float = NO_TIME


class TimesOfSessions:
    """Times by session. The first `of` counts as a use of the session."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._times: dict[int, SessionTimes] = {}

    def of(self, session: Session) -> SessionTimes:
        """The times of this session."""
        times = self._times.get(session.key)
        if times is None:
            times = self._times[session.key] = SessionTimes(self._state.now_ms())
        return times

    def forget_others(self, keys: Collection[int]) -> None:
        """Forget every session but those with these keys."""
        for key in [key for key in self._times if key not in keys]:
            del self._times[key]
