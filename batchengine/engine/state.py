"""The shared state of a running engine: lanes, turns, sessions, lines of requests and migrations.

Owns the tables and the few changes that keep them consistent. Decides nothing: admission and the
order of a session's requests are in `sessions.requests`, the order of turns in the scheduler.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from batchengine.config import Config
from batchengine.core import DaemonLoad
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.turns.records import SessionFacts, parked_row
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn
from batchengine.gguf import Identity
from batchengine.metrics import Metrics
from batchengine.session import Session, State
from batchengine.wire.peer import PeerLoad
from kv_store.store import Store

ErasePages = Callable[[Sequence[int], bytes, int], Awaitable[None]]  # timeline, salt, kept tokens
NAMED_SESSIONS_MAX = 4096  # in memory; beyond it, the oldest idle ones are in the ledger only.
NAMED_TOKENS_MAX = 8 << 20  # the same for the tokens of all of them; about 40 bytes each
HeldFacts = Callable[[Session], dict[str, Any]]


class Line(NamedTuple):
    """The requests of a busy named session: those that wait, and the task that serves them."""

    waiting: deque[Generation]
    task: asyncio.Task[None]


class EngineState:
    """Tables shared by the parts of the engine, which all run on its event loop.

    `lanes` is empty and `store` None until the engine has started.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.store: Store | None = None
        self.lanes: list[LaneLoop] = []
        self.requests: dict[Generation, Session] = {}  # admitted and not ended
        self.turns: dict[Generation, Turn] = {}  # of those requests that have a lane
        self.home: dict[int, LaneLoop] = {}  # session key -> its lane
        self.sessions: dict[tuple[str, str], Session] = {}  # named ones, oldest use first
        self.dropping: dict[tuple[str, str], asyncio.Event] = {}  # names being erased -> its end
        self.lines: dict[int, Line] = {}  # busy session's key -> its requests
        self.moves: dict[int, asyncio.Future[None]] = {}  # session key -> end of its migration
        self.facts: dict[int, SessionFacts] = {}  # session key -> facts of a named one
        self.started = time.monotonic()
        self.finished = 0
        self.model_identity: Identity | None = None  # of the model's file when it was read
        self.model_changed = ""  # how the file on disk differs now; or ""
        self.peer_load = PeerLoad()  # what peers learn of this daemon, at most a second old
        self.erase_at_peers: ErasePages | None = None  # set once there may be peers
        self.held_facts: HeldFacts = lambda session: {}  # of linked daemons; set at the start
        self.fatal: BaseException | None = None  # defect for which the daemon must restart
        self.stopping = False  # no request is admitted; cancelled turns end with "shutdown"
        self.leaving = False  # takes no new sessions, and no pages of peers: see `Engine.leave`
        self.troubles: dict[str, str] = {}  # what is wrong, by subject: see `report.troubles`
        self.trouble_of: list[Callable[[], str]] = []  # of parts, each of which says it, or ""
        self._epochs_used = 0  # highest epoch of a session that `forget` removed

    def now_ms(self) -> float:
        """Milliseconds of the monotonic clock."""
        return time.monotonic() * 1000.0

    @property
    def waiting(self) -> int:
        """Requests that were admitted and have no seat."""
        return max(0, len(self.requests) - sum(len(loop.running) for loop in self.lanes))

    @property
    def load(self) -> DaemonLoad:
        """What the lanes have to do now."""
        slots = sum(loop.kv.slots.total for loop in self.lanes)
        free = sum(loop.kv.slots.available for loop in self.lanes)
        running = sum(len(loop.running) for loop in self.lanes)
        return DaemonLoad(running, self.waiting, (slots - free) / max(slots, 1))

    @property
    def first_epoch(self) -> int:
        """Epoch of a new session: above those of forgotten ones, whose rows may be in an arena."""
        return self._epochs_used + 1

    def is_busy(self, session: Session) -> bool:
        """Whether a request of the named session is being served or waits."""
        return session.key in self.lines

    def is_at_rest(self, session: Session) -> bool:
        """Whether the session is idle, has no request, and is not in a migration."""
        return (
            session.state is State.IDLE
            and session.key not in self.lines
            and session.key not in self.moves
        )

    async def moved(self, session: Session) -> None:
        """Wait until the session is in no migration."""
        while (move := self.moves.get(session.key)) is not None:
            await asyncio.wait([move])

    async def at_rest(self, tenant: str, session_id: str) -> None:
        """Wait until the named session has no request."""
        while (session := self.sessions.get((tenant, session_id))) is not None:
            if (line := self.lines.get(session.key)) is None:
                return
            await asyncio.wait([line.task])

    def find(self, tenant: str, session_id: str) -> Session | None:
        """Return the named session in memory, or the anonymous one that computes now; or None."""
        found = self.sessions.get((tenant, session_id))
        if found is not None:
            return found
        name = tenant, session_id
        computing = (turn.session for turn in self.turns.values())
        return next((s for s in computing if (s.tenant, s.session_id) == name), None)

    def known(self) -> list[Session]:
        """Named sessions in memory, then anonymous ones that compute now; oldest use first."""
        sessions = (*self.sessions.values(), *(turn.session for turn in self.turns.values()))
        return list({session.key: session for session in sessions}.values())

    def turn_of(self, session: Session) -> Turn | None:
        """The turn of a session, on its way to a lane or there; a session has one at a time."""
        return next((turn for turn in self.turns.values() if turn.session is session), None)

    def names(self) -> list[tuple[str, str]]:
        """(tenant, id) of every session that `find` returns."""
        return [(session.tenant, session.session_id) for session in self.known()]

    @property
    def is_serving(self) -> bool:
        """Whether a request sent now would be computed, once it has a seat: the model is the one
        that was loaded, and a lane is up or soon will be."""
        return not self.model_changed and not all(loop.outage.is_down for loop in self.lanes)

    def lane(self, name: str) -> LaneLoop | None:
        """The lane of this name."""
        return next((loop for loop in self.lanes if loop.lane.name == name), None)

    def forget(self, session: Session) -> None:
        """Remove a session at rest from memory; the ledger keeps a named one."""
        name = session.tenant, session.session_id
        if self.sessions.get(name) is session:  # and not a later session of that name
            del self.sessions[name]
        self.facts.pop(session.key, None)
        self._epochs_used = max(self._epochs_used, session.epoch)
        loop = self.home.pop(session.key, None)
        if loop is not None:
            loop.close_session(session)

    def forget_old_sessions(self) -> None:
        """Forget the oldest named sessions at rest until both limits of this module hold, and that
        of the store, whose garbage collection keeps those in memory."""
        count, count_max = len(self.sessions), self.config.store.sessions_max
        count_max = min(count_max, NAMED_SESSIONS_MAX)
        tokens = sum(len(session.tokens) for session in self.sessions.values())
        for session in list(self.sessions.values()):
            if count <= count_max and tokens <= NAMED_TOKENS_MAX:
                return
            if self.is_at_rest(session):
                self.forget(session)
                count -= 1
                tokens -= len(session.tokens)


def parked_facts(state: EngineState, session: Session) -> dict[str, Any]:
    """Facts of a session that waits for a tool only (see `records.parked_row`); else {}."""
    facts = state.facts.get(session.key)
    if facts is None or session.state is not State.IDLE or state.is_busy(session):
        return {}
    return parked_row(facts.meta)
