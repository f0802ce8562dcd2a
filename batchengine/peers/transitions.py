"""The state of one control link, as a table: what each event leads to, and what is then done.

Sans-IO: events and the time come in, effects go out. Owns the deadlines of silence and the times
of the next dial. An event that the table does not list for a state changes nothing.

A link is open in UP and SUSPECT. Whatever depends on it ends when it leaves these two, which
happens once per loss; SUSPECT means only that no new work goes there.
"""

from __future__ import annotations

import enum
import random

TICK_S = 0.1  # how often `tick` is called
SUSPECT_S = 1.0  # of silence
DOWN_S = 3.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 5.0
STEADY_S = 3.0  # of a link that is open, after which its loss is dialled again at once
REFUSED_RETRY_S = 30.0


class LinkState(enum.Enum):
    """State of a link. The values are shown to operators."""

    DOWN = "down"  # no connection
    DIALLING = "dialling"  # this side makes one
    GREETING = "greeting"  # there is one; the other side's Hello has not come
    UP = "up"
    SUSPECT = "suspect"  # silent for SUSPECT_S
    REFUSED = "refused"  # the two daemons have no use for each other, or speak other versions

    @property
    def is_open(self) -> bool:
        """Whether frames of any kind may be sent."""
        return self in (LinkState.UP, LinkState.SUSPECT)


class LinkEvent(enum.Enum):
    """What happens to a link."""

    RETRY = enum.auto()  # it is time to dial
    CONNECTED = enum.auto()  # there is a new connection to the right daemon
    ACCEPTED = enum.auto()  # Hello came, and nothing in it forbids the link
    REFUSED = enum.auto()  # Hello came from a daemon of another kind
    HEARD = enum.auto()  # bytes came
    QUIET = enum.auto()  # none for SUSPECT_S
    SILENT = enum.auto()  # none for DOWN_S
    LOST = enum.auto()  # the connection, or the attempt to make it, ended


class Effect(enum.Enum):
    """What the caller does after an event, in this order."""

    CLOSE = enum.auto()  # end the connection that was there before the event
    GREET = enum.auto()  # send Hello on the new one
    DIAL = enum.auto()


_S, _E, _F = LinkState, LinkEvent, Effect
_GREET = (LinkState.GREETING, (_F.GREET,))
_REPLACE = (LinkState.GREETING, (_F.CLOSE, _F.GREET))  # the peer began again
TABLE: dict[tuple[LinkState, LinkEvent], tuple[LinkState, tuple[Effect, ...]]] = {
    (_S.DOWN, _E.RETRY): (_S.DIALLING, (_F.DIAL,)),
    (_S.DOWN, _E.CONNECTED): _GREET,
    (_S.DIALLING, _E.CONNECTED): _GREET,
    (_S.DIALLING, _E.LOST): (_S.DOWN, ()),
    (_S.GREETING, _E.CONNECTED): _REPLACE,
    (_S.GREETING, _E.ACCEPTED): (_S.UP, ()),
    (_S.GREETING, _E.REFUSED): (_S.REFUSED, (_F.CLOSE,)),
    (_S.GREETING, _E.SILENT): (_S.DOWN, (_F.CLOSE,)),
    (_S.GREETING, _E.LOST): (_S.DOWN, ()),
    (_S.UP, _E.CONNECTED): _REPLACE,
    (_S.UP, _E.QUIET): (_S.SUSPECT, ()),
    (_S.UP, _E.LOST): (_S.DOWN, ()),
    (_S.SUSPECT, _E.CONNECTED): _REPLACE,
    (_S.SUSPECT, _E.HEARD): (_S.UP, ()),
    (_S.SUSPECT, _E.SILENT): (_S.DOWN, (_F.CLOSE,)),
    (_S.SUSPECT, _E.LOST): (_S.DOWN, ()),
    (_S.REFUSED, _E.RETRY): (_S.DIALLING, (_F.DIAL,)),
    (_S.REFUSED, _E.CONNECTED): _GREET,
}


WHY = {
    LinkEvent.CONNECTED: "its Hello has not come",
    LinkEvent.QUIET: "nothing is heard from it",
    LinkEvent.SILENT: "nothing was heard from it",
}


class LinkMachine:
    """State of one link, since when and why. Times are seconds of a monotonic clock."""

    def __init__(self, *, dials: bool, rng: random.Random, now: float) -> None:
        """`dials`: this side makes the connection. `rng` is of the retry times."""
        self.state = LinkState.DOWN
        self.why = "not connected yet" if dials else "not connected yet: the other side dials"
        self.since = now
        self._dials = dials
        self._rng = rng
        self._retry_at = now
        self._backoff_s = BACKOFF_MIN_S
        self._accepted = now
        self._heard = now
        self._ticked = now

    def __repr__(self) -> str:
        return f"<LinkMachine {self.state.value}: {self.why}>"

    def on(self, event: LinkEvent, now: float, why: str = "") -> tuple[Effect, ...]:
        """Take an event; return what is to be done. `why` explains LOST and REFUSED."""
        if event in (LinkEvent.HEARD, LinkEvent.CONNECTED):
            self._heard = now
        found = TABLE.get((self.state, event))
        if found is None:
            return ()
        before = self.state
        self.state, effects = found
        if self.state is not before:
            self.since = now
        # while it dials again the reason of the last failure is still the news
        self.why = "" if self.state is LinkState.UP else why or WHY.get(event, self.why)
        if event is LinkEvent.ACCEPTED:
            self._accepted = now
        # two daemons of one name take the link from each other as soon as they dial
        if before.is_open and now - self._accepted >= STEADY_S:
            self._backoff_s = BACKOFF_MIN_S
        if self.state is LinkState.REFUSED:
            self._retry_at = now + REFUSED_RETRY_S
        elif self.state is LinkState.DOWN:
            self._retry_at = now + self._backoff_s * self._rng.uniform(0.5, 1.0)
            self._backoff_s = min(BACKOFF_MAX_S, 2.0 * self._backoff_s)
        return effects

    def tick(self, now: float) -> LinkEvent | None:
        """The event that time alone brings, which the caller passes to `on`; None = none.

        Called every TICK_S. Time in which this process did not run is not the peer's silence.
        """
        stopped_s = now - self._ticked - 2.0 * TICK_S
        if stopped_s > 0.0:
            self._heard = min(now, self._heard + stopped_s)
        self._ticked = now
        if self.state in (LinkState.DOWN, LinkState.REFUSED):
            return LinkEvent.RETRY if self._dials and now >= self._retry_at else None
        silent_s = now - self._heard
        if self.state is LinkState.UP and silent_s >= SUSPECT_S:
            return LinkEvent.QUIET
        if self.state in (LinkState.GREETING, LinkState.SUSPECT) and silent_s >= DOWN_S:
            return LinkEvent.SILENT
        return None
