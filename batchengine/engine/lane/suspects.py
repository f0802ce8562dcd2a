"""Suspects: sessions that may have crashed a worker or the engine, and therefore compute alone.

Owns the strikes of sessions by durable name: how often a worker, or the engine, died while the
session was alone in a step. A mark is in the ledger before such a step runs, so that a crash of the
engine is attributed to the session after the restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from batchengine.engine.lane.steps.inflight import StepEntry
from batchengine.engine.turns.journal import Journal
from batchengine.engine.turns.turn import Turn
from batchengine.session import Session
from kv_store.errors import StoreError
from kv_store.ledger import writes
from kv_store.ledger.queries import SuspectInfo
from kv_store.store import Store

log = logging.getLogger("batchengine.lane")

ALONE_DEATHS_MAX = 2  # crashes of a worker with a session alone: its turn fails
STRIKES_MAX = 2  # crashes of worker or engine with one session alone: then it is quarantined
ATTRIBUTED = 0  # in place of an incarnation: a crash of that run has been counted already


class Suspects:
    """Strikes and marks of the sessions of one engine. All methods run on its loop."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self._strikes: dict[str, int] = {}
        self._marked: set[str] = set()  # in the ledger, by this run
        self._interrupted: set[str] = set()  # had a turn when an earlier engine exited

    def __repr__(self) -> str:
        return f"<Suspects strikes={self._strikes} marked={len(self._marked)}>"

    async def load(self, rows: Sequence[SuspectInfo], *, crashed: bool) -> None:
        """Take over the marks of earlier runs.

        A mark of the last run counts only if that run crashed: after a SIGKILL, say, the session
        that computed is not the cause.
        """
        waits: list[asyncio.Future[int]] = []
        for row in rows:
            strikes = row.strikes
            if row.incarnation != ATTRIBUTED:
                strikes -= not crashed
                mark = self._store.ledger.append(
                    writes.SetSuspect(row.session, ATTRIBUTED, strikes, row.alone)
                )
                waits.append(asyncio.wrap_future(mark))
            if row.alone and strikes > 0:
                self._strikes[row.session] = strikes
        self._store.ledger.commit()
        for error in await asyncio.gather(*waits, return_exceptions=True):
            if isinstance(error, BaseException):
                log.error("marks of the last run are counted again by the next one: %s", error)

    def strikes(self, session: Session) -> int:
        """Return how many crashes happened with this session alone in the step."""
        return self._strikes.get(session.name.decode(), 0)

    def note_interrupted(self, session: Session) -> None:
        """Have the next turn of a session begin alone: an earlier engine exited during its turn."""
        self._interrupted.add(session.name.decode())

    def begin(self, turn: Turn) -> None:
        """Have the first step of the turn compute alone if its session is a suspect."""
        session = turn.session
        strikes = self.strikes(session)
        if strikes or session.name.decode() in self._interrupted:
            session.suspect, session.alone_deaths = True, strikes
            turn.suspect_until = len(session.tokens)

    async def mark(self, session: Session) -> None:
        """Record the suspect durably before its solo step; anonymous sessions have no record."""
        name = session.name.decode()
        if session.logged < 0 or name in self._marked:
            return
        self._marked.add(name)
        self._strikes[name] = session.alone_deaths + 1
        try:
            await self._journal.mark_suspect(session, self._strikes[name])
        except StoreError as error:
            log.error("%r computes alone without a mark: %s", session, error)

    async def mark_all(self, entries: Sequence[StepEntry]) -> None:
        """Record the suspects of a step durably, before it is sent."""
        for turn, *_ in entries:
            if turn.session.suspect:
                await self.mark(turn.session)

    def clear(self, session: Session) -> None:
        """Delete mark and strikes of a session that got past the position of the crash."""
        name = session.name.decode()
        session.suspect, session.alone_deaths = False, 0
        self._interrupted.discard(name)
        if self._strikes.pop(name, 0) or name in self._marked:
            self._marked.discard(name)
            self._journal.clear_suspect(session)

    def forget(self, name: str) -> None:
        """Delete strikes and marks of a dropped session, by its durable name."""
        self._strikes.pop(name, None)
        self._marked.discard(name)
        self._interrupted.discard(name)

    def blame(self, entries: Sequence[StepEntry], *, alone: bool) -> list[Turn]:
        """Make suspects of the sessions of a step in which the worker died; `alone`: it had one.

        Returns the turns that are to fail: ALONE_DEATHS_MAX workers died with them alone.
        """
        failed: list[Turn] = []
        for turn, n, *_ in entries:
            session = turn.session
            session.suspect = True
            turn.suspect_until = max(turn.suspect_until, len(session.tokens), session.frontier + n)
            session.alone_deaths += alone
            if session.alone_deaths >= ALONE_DEATHS_MAX:
                failed.append(turn)
        return failed
