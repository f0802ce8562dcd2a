"""The state of the data link to one peer, as a table: what each event leads to, and what is done.

Sans-IO: events and the time come in, effects go out. Owns the deadlines of the steps and the times
of the next attempt. An event that the table does not list for a state changes nothing.
"""

from __future__ import annotations

import enum
import random

EXPECTED_S = 6.0  # for the peer's connection: a little longer than its token is good for
OPENING_S = 10.0  # for the handshake of the workers, which have a shorter deadline themselves
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 2.0
PROVEN_S = 5.0  # a link that was up for so long is tried again at once


class DataState(enum.Enum):
    """State of a data link. The values are shown to operators."""

    OFF = "off"  # there can be none: no control link, or no worker
    DOWN = "down"  # until this side tries again, or the peer asks
    ASKING = "asking"  # this side asks for it and connects
    EXPECTED = "expected"  # the peer has asked and is to connect
    OPENING = "opening"  # the worker has the connection
    UP = "up"


class DataEvent(enum.Enum):
    """What happens to a data link."""

    ENABLED = enum.auto()  # there can be one
    DISABLED = enum.auto()  # there can be none any more
    RETRY = enum.auto()  # it is time to ask
    ASKED = enum.auto()  # the peer asks for a new one
    GIVEN = enum.auto()  # the worker was given the connection
    OPENED = enum.auto()  # the worker reports it as up
    LOST = enum.auto()  # it, or the attempt to make it, ended


class DataEffect(enum.Enum):
    """What the caller does after an event."""

    ASK = enum.auto()  # ask the peer and connect, which ends in GIVEN or LOST
    STOP = enum.auto()  # give that up, and expect no connection of the peer
    CLOSE = enum.auto()  # have the worker close the link


_S, _E, _F = DataState, DataEvent, DataEffect
TABLE: dict[tuple[DataState, DataEvent], tuple[DataState, tuple[DataEffect, ...]]] = {
    (_S.OFF, _E.ENABLED): (_S.DOWN, ()),
    (_S.DOWN, _E.DISABLED): (_S.OFF, ()),
    (_S.DOWN, _E.RETRY): (_S.ASKING, (_F.ASK,)),
    (_S.DOWN, _E.ASKED): (_S.EXPECTED, ()),
    (_S.ASKING, _E.DISABLED): (_S.OFF, (_F.STOP,)),
    (_S.ASKING, _E.GIVEN): (_S.OPENING, ()),
    (_S.ASKING, _E.LOST): (_S.DOWN, ()),
    (_S.EXPECTED, _E.DISABLED): (_S.OFF, (_F.STOP,)),
    (_S.EXPECTED, _E.ASKED): (_S.EXPECTED, ()),
    (_S.EXPECTED, _E.GIVEN): (_S.OPENING, ()),
    (_S.EXPECTED, _E.LOST): (_S.DOWN, (_F.STOP,)),
    (_S.OPENING, _E.DISABLED): (_S.OFF, (_F.CLOSE,)),
    (_S.OPENING, _E.ASKED): (_S.EXPECTED, (_F.CLOSE,)),
    (_S.OPENING, _E.OPENED): (_S.UP, ()),
    (_S.OPENING, _E.LOST): (_S.DOWN, (_F.CLOSE,)),
    (_S.UP, _E.DISABLED): (_S.OFF, (_F.CLOSE,)),
    (_S.UP, _E.ASKED): (_S.EXPECTED, (_F.CLOSE,)),
    (_S.UP, _E.LOST): (_S.DOWN, (_F.CLOSE,)),
}
DEADLINES_S = {DataState.EXPECTED: EXPECTED_S, DataState.OPENING: OPENING_S}


class DataLinkMachine:
    """State of one data link, since when and why. Times are seconds of a monotonic clock."""

    def __init__(self, *, dials: bool, rng: random.Random, now: float) -> None:
        """`dials`: this side connects. `rng` is of the times of the attempts."""
        self.state = DataState.OFF
        self.why = "there is no control link yet"
        self.since = now
        self._dials = dials
        self._rng = rng
        self._retry_at = now
        self._backoff_s = BACKOFF_MIN_S

    def __repr__(self) -> str:
        return f"<DataLinkMachine {self.state.value}: {self.why}>"

    def on(self, event: DataEvent, now: float, why: str = "") -> tuple[DataEffect, ...]:
        """Take an event; return what is to be done. `why` explains DISABLED and LOST."""
        found = TABLE.get((self.state, event))
        if found is None:
            if event is DataEvent.DISABLED:
                self.why = why
            return ()
        if self.state is DataState.UP and now - self.since >= PROVEN_S:
            self._backoff_s = BACKOFF_MIN_S
        self.state, effects = found
        self.since = now
        # while it is tried again the reason of the last failure is still the news
        self.why = "" if self.state is DataState.UP else why or self.why or "the peer began again"
        if event is DataEvent.ENABLED:
            self.why, self._retry_at, self._backoff_s = "not tried yet", now, BACKOFF_MIN_S
        elif self.state is DataState.DOWN:
            self._retry_at = now + self._backoff_s * self._rng.uniform(0.5, 1.0)
            self._backoff_s = min(BACKOFF_MAX_S, 2.0 * self._backoff_s)
        return effects

    def hasten(self, now: float) -> None:
        """Try at the next tick, and soon again if that fails: the peer says that it is ready."""
        self._retry_at, self._backoff_s = now, BACKOFF_MIN_S

    def tick(self, now: float) -> tuple[DataEvent, str] | None:
        """The event that time alone brings and why, which the caller passes to `on`."""
        if self.state is DataState.DOWN and self._dials and now >= self._retry_at:
            return DataEvent.RETRY, ""
        deadline_s = DEADLINES_S.get(self.state)
        if deadline_s is not None and now - self.since >= deadline_s:
            what = (
                "the peer did not connect" if self.state is DataState.EXPECTED else "no handshake"
            )
            return DataEvent.LOST, f"{what} within {deadline_s:g} s"
        return None
