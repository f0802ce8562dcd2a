"""The canary: one fixed page, of which every lane must compute the same digest.

Owns the schedule, and the reference: the digest of the lane that computed the page first in this
run. A lane that has rested computes the page in small pieces, in free slots of its arena, until a
turn arrives. The page is in no store and no session. Another digest is audited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array

from batchengine.core import PAGE_TOKENS
from batchengine.engine.audit.audit import Audit
from batchengine.engine.audit.majority import NOT_FINITE, PageContent, Statement
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.recompute import RecomputeFailed
from batchengine.engine.state import EngineState

log = logging.getLogger("batchengine.audit")

LOOK_S = 1.0
REST_S = 5.0  # a lane without work for so long has rested
RETRY_S = 30.0  # after a canary that was abandoned
PIECE_MAX = 16  # tokens of one frame: a request that arrives waits for one frame at most
SALT = b"\0canary"  # the name of no tenant: no request has the same key


def canary_tokens(n_vocab: int) -> array[int]:
    """Return one page of tokens, spread over the vocabulary except its last 1/16, often padding."""
    span = max(1, n_vocab * 15 // 16)
    return array("i", [(i * 40503 % 65536 * span) >> 16 for i in range(PAGE_TOKENS)])


class Canary:
    """Computes the canary on the lanes of one engine. Call `look` repeatedly."""

    def __init__(self, state: EngineState, audit: Audit, n_vocab: int) -> None:
        self._state = state
        self._audit = audit
        self._every_s = state.config.limits.canary_s
        self._page = PageContent(canary_tokens(n_vocab), SALT)
        self._first: Statement | None = None  # the reference
        self._rest: dict[str, tuple[int, float]] = {}  # lane -> its steps, and when they changed
        self._due: dict[str, tuple[int, float]] = {}  # lane -> incarnation, when it is due again

    def __repr__(self) -> str:
        return f"<Canary first={self._first} due={self._due}>"

    async def look(self) -> None:
        """Sleep for LOOK_S at most, then compute the canary on lanes that rest and are due."""
        await asyncio.sleep(min(LOOK_S, self._every_s))
        for loop in self._state.lanes:
            if self._rests(loop) and self._is_due(loop):
                await self._compute(loop)

    def _rests(self, loop: LaneLoop) -> bool:
        now, name = time.monotonic(), loop.lane.name
        steps, since = self._rest.get(name, (-1, now))
        if loop.assigned or loop.seats.expected or loop.running or loop.waiting:
            steps = -1
        if steps != loop.meter.steps:  # a turn between two looks is work too
            since = now
        self._rest[name] = loop.meter.steps, since
        return loop.up and now - since >= min(REST_S, self._every_s)

    def _is_due(self, loop: LaneLoop) -> bool:
        """Whether the lane's canary is due; that of a new worker is due at once."""
        incarnation, at = self._due.get(loop.lane.name, (0, 0.0))
        return incarnation != loop.lane.incarnation or time.monotonic() >= at

    async def _compute(self, loop: LaneLoop) -> None:
        name, every_s = loop.lane.name, self._every_s
        self._due[name] = (loop.lane.incarnation, time.monotonic() + every_s)
        draining = [one.lane.name for one in self._state.lanes if one.draining]
        if self._first is not None and self._first.witness in draining:
            self._first = None  # the reference lane is drained: take a new reference
        try:
            got = await self._audit.digest(loop, self._page, urgent=False, piece_max=PIECE_MAX)
        except RecomputeFailed as error:
            log.debug("canary on lane %s: %s", name, error)
            self._due[name] = (loop.lane.incarnation, time.monotonic() + min(RETRY_S, every_s))
            self._count(loop, "given_up")
            return
        if self._first is None and got != NOT_FINITE:
            self._first = Statement(name, got)
        if self._first is not None and got == self._first.digest:
            self._count(loop, "equal")
            self._state.troubles.pop(f"canary {name}", None)
        else:
            await self._differs(loop, got)

    async def _differs(self, loop: LaneLoop, got: bytes) -> None:
        """Audit a lane with another digest. /health names it until it is right or drained."""
        name = loop.lane.name
        self._count(loop, "different")
        self._state.metrics.numeric_faults_total.inc()
        what = "is not finite" if got == NOT_FINITE else "differs from the first of this run"
        self._state.troubles[f"canary {name}"] = f"the canary of lane {name} {what}"
        log.error("the canary of lane %s %s", name, what)
        if self._first is None:
            return  # there is no reference yet: `_compute` takes the next finite digest
        stated, first = Statement(name, got), self._first
        outcome = await self._audit.disputed(self._page, stated, first)
        if outcome is not None and outcome.digest != first.digest:
            self._first = stated if got == outcome.digest != NOT_FINITE else None
        if loop.draining:
            self._state.troubles.pop(f"canary {name}", None)  # the lane's state reports it

    def _count(self, loop: LaneLoop, result: str) -> None:
        self._state.metrics.canaries_total.labels(loop.lane.name, result).inc()
