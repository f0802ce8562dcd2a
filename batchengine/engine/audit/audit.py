"""Audit of a page that two computations made differently: which lane is wrong.

Owns the decision and its consequences. All lanes are paused between two steps and every open row
is dropped; then every lane that is up computes the page again, and a fresh worker does too if
fewer than three lanes could. The digest of the majority is right. A lane with another digest is
drained, and every page with rows of that lane is invalidated with its descendants; the only lane
gets a new worker instead, and after two faults publishes no more. Requests wait meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

from batchengine import errors
from batchengine.core import PAGE_TOKENS
from batchengine.engine.audit.majority import (
    FRESH_WORKER,
    NOT_FINITE,
    UNKNOWN,
    Outcome,
    PageContent,
    Statement,
    majority,
    statement,
)
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.recompute import (
    PAGES_MAX,
    PIECES,
    NotFinite,
    PageRecompute,
    RecomputeFailed,
)
from batchengine.engine.state import EngineState
from batchengine.kv import Disputes
from kv_store.errors import StaleRef, StoreError
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.audit")

FAULTS_MAX = 2  # after so many faults, a lane publishes no more
DISPUTES_MAX = 2  # with more disputed pages, a turn fails
RECOMPUTE_S = 120.0  # timeout; the slowest machine computes a page in seconds


class Audit:
    """Recomputes pages on lanes, and compares the results. Use: `run` as a task."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        disputes: Disputes,
        fresh_worker: Callable[[], AbstractAsyncContextManager[LaneLoop]],
    ) -> None:
        self._state = state
        self._store = store
        self._disputes = disputes
        self._fresh_worker = fresh_worker
        self._one = asyncio.Lock()  # one page at a time
        self._faults = Counter[str]()  # by lane

    def __repr__(self) -> str:
        return f"<Audit faults={dict(self._faults)} {self._disputes!r}>"

    async def run(self) -> None:
        """Audit pages that lanes dispute when they seal, until cancelled."""
        disputes = self._disputes
        while True:
            await disputes.has_disputed.wait()
            disputes.has_disputed.clear()
            while disputes.disputed:
                found = disputes.disputed[0]
                page = PageContent(array("i", found.chain), found.salt)
                self._state.metrics.numeric_faults_total.inc()
                try:
                    await self.disputed(page, statement(found.lanes, found.digest))
                except (StoreError, OSError) as error:  # open rows have been dropped already
                    log.error("a disputed page cannot be audited: %r", error)
                self._count_dispute(page)

    def watch_store(self) -> None:
        """Have lanes recheck their sessions whenever a thread of the store invalidates pages."""
        event_loop = asyncio.get_running_loop()

        def ready() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                event_loop.call_soon_threadsafe(self._pages_lost)

        self._store.events.on_ready(ready)

    def _pages_lost(self) -> None:
        """Invalidate what this run computed after lost pages, and have the lanes recheck."""
        lost = self._store.events.drain()
        if lost:
            self._disputes.invalidate_descendants(lost)
            for loop in self._state.lanes:
                loop.recheck()

    # ----------------------------------------------------------------------------- computing

    async def digest(
        self, loop: LaneLoop, page: PageContent, *, urgent: bool, piece_max: int = PIECES[0]
    ) -> bytes:
        """Return the payload digest of the page as this lane computes it, or NOT_FINITE.

        Raises RecomputeFailed.
        """
        refs = await self._prefix(page)
        codes = [self._store.pages.slot_code(ref) for ref in refs]
        recompute = PageRecompute(page.tokens, codes, urgent=urgent, piece_max=piece_max)
        try:
            if recompute.n_pages - recompute.first > PAGES_MAX:
                raise RecomputeFailed("the pages before it are gone")
            loop.ask_recompute(recompute)
            async with asyncio.timeout(RECOMPUTE_S):
                return await asyncio.shield(recompute.digest)
        except NotFinite:
            return NOT_FINITE
        except TimeoutError as error:
            raise RecomputeFailed("it took too long") from error
        finally:
            loop.recomputes.close(recompute)
            for ref in refs:
                self._store.pages.unpin(ref)
            loop.wake()

    async def _prefix(self, page: PageContent) -> list[PageRef]:
        """Return the verified pages of the store before this page, each pinned once."""
        refs = self._store.pages.match_prefix(
            page.tokens, page.salt, tokens_max=page.page * PAGE_TOKENS, pin=True
        )
        count = 0
        try:
            good = await asyncio.wrap_future(self._store.pages.load(refs))
            count = good.index(False) if False in good else len(good)
        finally:
            for ref in refs[count:]:
                self._store.pages.unpin(ref)
        return refs[:count]

    # ------------------------------------------------------------------------------- auditing

    async def disputed(
        self, page: PageContent, stated: Statement, other: Statement | None = None
    ) -> Outcome | None:
        """Audit a page of which two computations differ, and act on the result.

        `other` None = the page in the store. Returns None if that is gone, or does not differ.
        """
        async with self._one, self._paused_lanes():
            for loop in self._state.lanes:
                loop.drop_open()
            self._disputes.audits += 1
            other = other or self._stored(page)
            if other is None or other.digest == stated.digest:
                return None
            votes = await self._votes(page)
            outcome = majority([stated, other, *votes])
            if outcome.digest is None or len(votes) < 3:
                votes += await self._fresh_vote(page)
                outcome = majority([stated, other, *votes])
            log.critical(
                "numerics fault: page %d of %d tokens has two contents; %s",
                page.page,
                len(page.tokens),
                outcome.why,
            )
            self._invalidate(page, other, outcome)
            await self._remove(outcome)
            return outcome

    @contextlib.asynccontextmanager
    async def _paused_lanes(self) -> AsyncGenerator[None]:
        """Pause every lane: no step is in flight inside the context."""
        loops = list(self._state.lanes)
        try:
            await asyncio.gather(*(loop.pause() for loop in loops))
            yield
        finally:
            self._disputes.disputed.clear()  # the rows of the others are dropped
            for loop in loops:
                loop.unpause()

    def _stored(self, page: PageContent) -> Statement | None:
        """Return the digest of the page in the store and its lane; None if it is not there."""
        ref = self._store.pages.find(page.key(self._store.pages.repr_id))
        with contextlib.suppress(StaleRef):
            if ref is not None:
                return statement(self._store.pages.lanes_of(ref), self._store.pages.digest(ref))
        return None

    async def _votes(self, page: PageContent) -> list[Statement]:
        """Return the statements of lanes that are up and answer."""
        able = [loop for loop in self._state.lanes if loop.up]
        found = await asyncio.gather(*(self._vote(loop, loop.lane.name, page) for loop in able))
        return [statement for statements in found for statement in statements]

    async def _fresh_vote(self, page: PageContent) -> list[Statement]:
        """Return the statement of a new worker, or none."""
        try:
            async with asyncio.timeout(RECOMPUTE_S), self._fresh_worker() as loop:
                return await self._vote(loop, FRESH_WORKER, page)
        except Exception as error:  # for example too little memory
            log.error("no fresh worker could compute the page: %r", error)
            return []

    async def _vote(self, loop: LaneLoop, name: str, page: PageContent) -> list[Statement]:
        """Return one statement, or none if the lane dies, hangs or has no room."""
        try:
            return [Statement(name, await self.digest(loop, page, urgent=True))]
        except (RecomputeFailed, StoreError) as error:
            log.warning("%s has no vote: %s", name, error)
            return []

    # --------------------------------------------------------------------------------- acting

    def _invalidate(self, page: PageContent, other: Statement, outcome: Outcome) -> None:
        """Invalidate all pages with rows of wrong lanes, and the page itself if it was wrong."""
        if self._store.states is not None:
            self._store.states.clear()  # who computed a state is not known, nor what it should be
        wrong = self._store.pages.computed_by(outcome.wrong)
        has_lost = other.digest != outcome.digest
        stored = self._stored(page)
        if has_lost or (stored is not None and stored.digest != outcome.digest):
            wrong.add(page.key(self._store.pages.repr_id))
        self._disputes.invalidate(wrong, rootless=has_lost and other.witness == UNKNOWN)
        if outcome.digest is None:
            why = f"page {page.page} of {len(page.tokens)} tokens: {outcome.why}"
            self._state.troubles["audit"] = why
        else:
            self._state.troubles.pop("audit", None)

    async def _remove(self, outcome: Outcome) -> None:
        """Drain the lanes that were wrong; if no other is up, give them new workers instead."""
        wrong = [loop for loop in self._state.lanes if loop.lane.name in outcome.wrong]
        has_others = any(loop.up for loop in self._state.lanes if loop not in wrong)
        for loop in wrong:
            name = loop.lane.name
            self._faults[name] += 1
            if has_others:
                loop.drain(loop.draining or outcome.why)
            elif not loop.draining:
                loop.lane.kill("computes other numbers than it did")
                await loop.lane.died()
            if self._faults[name] >= FAULTS_MAX and loop.kv.sealing.publishes:
                loop.kv.sealing.publishes = False
                log.critical("lane %s was wrong twice: it publishes no more", name)
        for loop in self._state.lanes:
            loop.recheck()

    def _count_dispute(self, page: PageContent) -> None:
        """Fail turns with more than DISPUTES_MAX disputed pages."""
        tokens = page.tokens.tolist()
        for turn in self._state.turns.values():
            if turn.session.salt == page.salt and turn.session.tokens[: len(tokens)] == tokens:
                turn.disputes += 1
                if turn.disputes > DISPUTES_MAX and not turn.generation.finished:
                    turn.generation.abort(
                        errors.PAGES_DIFFER(request_id=turn.generation.request_id)
                    )
