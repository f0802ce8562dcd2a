"""What the engine knows at this moment: lanes, turns, sessions and their queues, as plain tables.

Owns the tables and the few moves that keep them consistent. Decides nothing: admission is in
`engine`, order in the scheduler, reports only read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from batchengine import cost
from batchengine.config import Config
from batchengine.engine.generation import Generation
from batchengine.engine.loop import LaneLoop
from batchengine.engine.record import Facts
from batchengine.engine.turn import Turn
from batchengine.gguf import Identity
from batchengine.metrics import Metrics
from batchengine.session import Session
from kv_store.store import Store

NAMED_SESSIONS_MAX = 4096  # in memory; older idle ones live on in the ledger,
NAMED_TOKENS_MAX = 8 << 20  # and so do those beyond this many tokens: about 40 bytes each


class Tables:
    """Shared by the parts of the engine; all of them run on its event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.store: Store | None = None
        self.loops: list[LaneLoop] = []
        self.turns: dict[Generation, Turn] = {}
        self.home: dict[int, LaneLoop] = {}  # session key -> its lane
        self.named: dict[tuple[str, str], Session] = {}  # oldest use first
        self.queues: dict[int, deque[Generation]] = {}  # session key -> waiting requests
        self.facts: dict[int, Facts] = {}  # session key -> what else is known of a named one
        self.started = time.monotonic()
        self.finished = 0
        self.model_identity: Identity | None = None  # of the model's file when it was read,
        self.model_changed = ""  # and why that is not what is on disk now
        self.troubles: dict[str, str] = {}  # what is wrong, by subject: see `reports.troubles`
        self.moving: dict[int, asyncio.Future[None]] = {}  # session key -> end of its hand-over
        self.beginning: dict[Generation, Session] = {}  # wait for the ledger, or for a hand-over
        self._epochs_used = 0  # highest of a session that this life has forgotten

    def now_ms(self) -> float:
        """The engine's clock."""
        return time.monotonic() * 1000.0

    @property
    def waiting(self) -> int:
        """Requests that were admitted and have no seat."""
        queued = sum(len(queue) for queue in self.queues.values())
        running = sum(len(loop.running) for loop in self.loops)
        return queued + len(self.beginning) + max(0, len(self.turns) - running)

    @property
    def first_epoch(self) -> int:
        """For a session that begins: what one of its name left in an arena is not its own."""
        return self._epochs_used + 1

    def forget(self, session: Session) -> None:
        """An idle named session leaves the memory; the ledger remembers it."""
        name = session.tenant, session.session_id
        if self.named.get(name) is session:  # not one that came after it
            del self.named[name]
        self.facts.pop(session.key, None)
        self._epochs_used = max(self._epochs_used, session.epoch)
        loop = self.home.pop(session.key, None)
        if loop is not None:
            loop.close_session(session)

    def forget_old_sessions(self) -> None:
        """Keep idle named sessions and their tokens bounded."""
        count = len(self.named)
        tokens = sum(len(session.tokens) for session in self.named.values())
        for session in list(self.named.values()):
            if count <= NAMED_SESSIONS_MAX and tokens <= NAMED_TOKENS_MAX:
                return
            if session.key not in self.queues:
                self.forget(session)
                count -= 1
                tokens -= len(session.tokens)


def queue_etas(loop: LaneLoop) -> tuple[list[Turn], list[float]]:
    """The turns that wait on a lane in order of service, and when each has its first token (ms)."""

    def work(turn: Turn) -> cost.QueuedWork:
        left = turn.generation.request.tokens_max - turn.generation.completion_tokens
        return cost.QueuedWork(turn.session.frontier, turn.session.to_compute, left)

    seated = [work(turn) for turn in loop.running.values()]
    free = loop.config.entries_max - len(seated)
    turns = sorted(loop.waiting.values(), key=lambda turn: (turn.rank, turn.deadline_ms))
    return turns, cost.etas_ms(loop.cost.cost, seated, free, [work(turn) for turn in turns])
