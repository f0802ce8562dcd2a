"""The canary: one fixed page that every lane computes now and then, and must compute alike.

Owns when, and what it must be: what the first lane of this life made of it. A lane that has rested
computes it in small pieces, in free places of its arena, and gives it up for the first who comes.
It is in no store and no session. A lane that differs is a matter for the jury.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array

from batchengine.core import PAGE_TOKENS
from batchengine.engine.doubt import Jury, PageOf
from batchengine.engine.loop import LaneLoop
from batchengine.engine.tables import Tables
from batchengine.engine.trial import NotFinite, TrialFailed

log = logging.getLogger("batchengine.engine")

LOOK_S = 1.0
REST_S = 5.0  # without a step: the lane is not needed
RETRY_S = 30.0  # after one that was given up
PIECE_MAX = 16  # tokens of one frame: whoever comes waits for no more than these
SALT = b"\0canary"  # no caller's name: its key is nobody's
NOT_FINITE = b""  # in place of a digest


def canary_tokens(n_vocab: int) -> array[int]:
    """One page of tokens, spread over the vocabulary but for its end, which is often padding."""
    span = max(1, n_vocab * 15 // 16)
    return array("i", [(i * 40503 % 65536 * span) >> 16 for i in range(PAGE_TOKENS)])


class Canary:
    """Looks after the lanes of one engine. Use: `look` again and again."""

    def __init__(self, tables: Tables, jury: Jury, n_vocab: int) -> None:
        self._tables = tables
        self._jury = jury
        self._every_s = tables.config.limits.canary_s
        self._page = PageOf(canary_tokens(n_vocab), SALT, 0)
        self._first: tuple[bytes, LaneLoop] | None = None  # its digest, and who said so
        self._rest: dict[str, tuple[int, float]] = {}  # lane -> its steps, and since when so many
        self._due: dict[str, tuple[int, float]] = {}  # lane -> incarnation, when it is due again

    def __repr__(self) -> str:
        return f"<Canary first={self._first} due={self._due}>"

    async def look(self) -> None:
        """A moment later: every lane that rests and is due computes it."""
        await asyncio.sleep(min(LOOK_S, self._every_s))
        for loop in self._tables.loops:
            if self._rests(loop) and self._is_due(loop):
                await self._compute(loop)

    def _rests(self, loop: LaneLoop) -> bool:
        now, name = time.monotonic(), loop.lane.name
        steps, since = self._rest.get(name, (-1, now))
        if steps != loop.steps or loop.assigned or loop.expected or loop.running or loop.waiting:
            self._rest[name] = (loop.steps, now)
            return False
        return loop.up and now - since >= min(REST_S, self._every_s)

    def _is_due(self, loop: LaneLoop) -> bool:
        """A worker that has just started is due at once."""
        incarnation, at = self._due.get(loop.lane.name, (0, 0.0))
        return incarnation != loop.lane.incarnation or time.monotonic() >= at

    async def _compute(self, loop: LaneLoop) -> None:
        name, every_s = loop.lane.name, self._every_s
        self._due[name] = (loop.lane.incarnation, time.monotonic() + every_s)
        if self._first is not None and self._first[1].drained:
            self._first = None  # who said so was wrong elsewhere: its word is worth nothing
        try:
            got = await self._jury.digest(loop, self._page, urgent=False, piece_max=PIECE_MAX)
        except NotFinite:
            got = NOT_FINITE
        except TrialFailed as error:
            log.debug("canary on lane %s: %s", name, error)
            self._due[name] = (loop.lane.incarnation, time.monotonic() + min(RETRY_S, every_s))
            self._count(loop, "given_up")
            return
        if self._first is None and got != NOT_FINITE:
            self._first = got, loop
        if self._first is not None and got == self._first[0]:
            self._count(loop, "equal")
            self._tables.troubles.pop(f"canary {name}", None)
        else:
            await self._differs(loop, got)

    async def _differs(self, loop: LaneLoop, got: bytes) -> None:
        """F46: who is wrong? Until the lane is right again, or drained, health tells of it."""
        name = loop.lane.name
        self._count(loop, "different")
        self._tables.metrics.numeric_faults_total.inc()
        what = "is not finite" if got == NOT_FINITE else "differs from the first of this life"
        self._tables.troubles[f"canary {name}"] = f"the canary of lane {name} {what}"
        log.error("the canary of lane %s %s", name, what)
        if self._first is None:
            return  # there is nothing to compare: the next lane, or the next time, says more
        digest, writer = self._first
        verdict = await self._jury.judge(loop, self._page, got, digest, writer)
        if verdict is not None and not verdict.stored_is_right:
            known = got != NOT_FINITE and verdict.is_known
            self._first = (got, loop) if known else None
        if loop.drained:
            self._tables.troubles.pop(f"canary {name}", None)  # which says it all

    def _count(self, loop: LaneLoop, result: str) -> None:
        self._tables.metrics.canaries_total.labels(loop.lane.name, result).inc()
