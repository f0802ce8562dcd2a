"""When two computations of one page differ: who is wrong, and what becomes of its work.

Owns the verdict. A third computation decides: on a lane that has made neither claim, or on a
fresh worker that serves nobody. The loser is drained and every page it wrote is given up, with
what others computed from them; a lane that is alone gets a new worker instead, and after a second
verdict publishes no more. Pages of a turn that met NaN are given up, or proven, here as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.engine import refusals
from batchengine.engine.loop import LaneLoop
from batchengine.engine.tables import Tables
from batchengine.engine.trial import PAGES_MAX, PIECES, Trial, TrialFailed
from batchengine.engine.turn import Turn
from batchengine.pages import Seal
from kv_store import keys
from kv_store.errors import StaleRef, StoreError
from kv_store.pages import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.engine")

VERDICTS_MAX = 2  # against the only lane: then it publishes no more
DOUBTS_MAX = 2  # of one turn: then it fails
TRIAL_S = 120.0  # a page is computed in seconds on the slowest machine


class PageOf(NamedTuple):
    """A page by its content: the tokens of its chain up to its end, and whose they are."""

    tokens: array[int]
    salt: bytes
    priority: int

    @property
    def page(self) -> int:
        return (len(self.tokens) - 1) // PAGE_TOKENS

    def key(self, repr_id: bytes) -> bytes:
        """Its content key."""
        return self.link(repr_id)[1]

    def link(self, repr_id: bytes) -> tuple[bytes, bytes]:
        """The content keys of the page before it and of itself."""
        start = self.page * PAGE_TOKENS
        before = keys.chain_keys(self.tokens[:start], repr_id, self.salt) if start else []
        parent = before[-1] if before else keys.ROOT_KEY
        return parent, keys.content_key(parent, self.tokens[start:], repr_id, self.salt)


class Verdict(NamedTuple):
    """`wrong` None: nobody who is here now. `stored_is_right`: about the page in the store."""

    wrong: LaneLoop | None
    stored_is_right: bool
    why: str
    is_known: bool = True  # False: all witnesses contradict one another, or there are none


class Jury:
    """Recomputes pages on lanes, and judges lanes by them."""

    def __init__(
        self,
        tables: Tables,
        store: Store,
        referee: Callable[[], AbstractAsyncContextManager[LaneLoop]],
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self._tables = tables
        self._store = store
        self._referee = referee
        self._spawn = spawn
        self._verdicts: dict[str, int] = {}
        self._doubts: dict[Turn, int] = {}
        self._open: Counter[LaneLoop] = Counter()  # doubts of its pages
        self._one = asyncio.Lock()  # one page on trial at a time
        self._rejected: deque[bytes] = deque()  # keys of pages that the store serves no more
        event_loop = asyncio.get_running_loop()

        def rejected(key: bytes) -> None:  # on any thread
            self._rejected.append(key)
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                event_loop.call_soon_threadsafe(self._follow_rejected)

        store.on_rejected = rejected
        for loop in tables.loops:
            loop.pages.on_doubt = lambda seal, loop=loop: self.doubt(loop, seal)
            loop.pages.writers = self.writers
            loop.pages.on_withdrawn = functools.partial(self.withdrawn, loop)

    def __repr__(self) -> str:
        return f"<Jury verdicts={self._verdicts}>"

    # ----------------------------------------------------------------------------- computing

    @contextlib.asynccontextmanager
    async def computed(
        self, loop: LaneLoop, page: PageOf, *, urgent: bool, piece_max: int = PIECES[0]
    ) -> AsyncGenerator[tuple[Trial, bytes]]:
        """The page as this lane computes it, in a place of its arena, and its payload digest.

        Raises TrialFailed.
        """
        refs = await self._prefix(page)
        codes = [self._store.place_code(ref) for ref in refs]
        trial = Trial(page.tokens, codes, urgent=urgent, piece_max=piece_max)
        try:
            if trial.n_pages - trial.first > PAGES_MAX:
                raise TrialFailed("the pages before it are gone")
            loop.ask_trial(trial)
            try:
                async with asyncio.timeout(TRIAL_S):
                    digest = await asyncio.shield(trial.digest)
            except TimeoutError as error:
                raise TrialFailed("it took too long") from error
            yield trial, digest  # what is done with it takes its time
        finally:
            loop.trials.close(trial)
            for ref in refs:
                self._store.unpin(ref)
            loop.wake()

    async def digest(
        self, loop: LaneLoop, page: PageOf, *, urgent: bool, piece_max: int = PIECES[0]
    ) -> bytes:
        """The page's payload digest as this lane computes it. Raises TrialFailed."""
        async with self.computed(loop, page, urgent=urgent, piece_max=piece_max) as (_, digest):
            return digest

    async def _prefix(self, page: PageOf) -> list[PageRef]:
        """Verified pages from the start up to the one in question, each pinned once."""
        refs = self._store.match_prefix(
            page.tokens, page.salt, tokens_max=page.page * PAGE_TOKENS, pin=True
        )
        count = 0
        try:
            good = await asyncio.wrap_future(self._store.load(refs))
            count = good.index(False) if False in good else len(good)
        finally:
            for ref in refs[count:]:
                self._store.unpin(ref)
        return refs[:count]

    # --------------------------------------------------------------------------------- doubt

    def doubt(self, lane: LaneLoop, seal: Seal) -> None:
        """The store has other bytes for a page this lane filled (F46). Called by its loop.

        Its session waits for the verdict, and meanwhile nothing of this lane is published. One
        that has taken the rows elsewhere since, or whose worker died, gives up all open ones.
        """
        self._tables.metrics.numeric_faults_total.inc()
        end = seal.index * PAGE_TOKENS + len(seal.tokens)
        page = PageOf(array("i", seal.timeline[:end]), seal.salt, seal.priority)
        session, home, turn = seal.session, lane, None
        if (left := seal.taken_by) is not None and left.tokens[:end] == page.tokens.tolist():
            session, home = left, self._tables.home.get(left.key, lane)
            session.distrusted = True
            home.recheck()
        if session is not None:  # one that is frozen has its turn in no lane's tables
            turn = next((t for t in self._tables.turns.values() if t.session is session), None)
        if turn is not None:
            turn.paused, turn.cached_row = True, None
            turn.doubts += 1
            home.session_cut(turn.session)  # if it waits, the plan has a row of it
        self._open[lane] += 1
        lane.pages.muted = lane.pages.muted or "another computation of one of its pages differs"
        self._spawn(self._resolve(lane, page, seal.digest, turn), "verdict")

    async def _resolve(
        self, lane: LaneLoop, page: PageOf, digest: bytes, turn: Turn | None
    ) -> None:
        try:
            await self.judge(lane, page, digest, None)
        finally:
            self._open[lane] -= 1
            self._unmute(lane)
            lane.wake()
            if turn is not None:
                self._release(lane, turn)

    def _unmute(self, lane: LaneLoop) -> None:
        """Its pages are published again, if nothing speaks against it."""
        is_trusted = self._verdicts.get(lane.lane.name, 0) < VERDICTS_MAX
        if is_trusted and not (lane.drained or self._open[lane]):
            lane.pages.muted = ""

    def _release(self, lane: LaneLoop, turn: Turn) -> None:
        """The turn goes on; not for ever, if its pages are in doubt again and again."""
        for old in [old for old in self._doubts if old.generation.finished]:
            del self._doubts[old]
        turn.doubts -= 1
        self._doubts[turn] = self._doubts.get(turn, 0) + 1
        if self._doubts[turn] > DOUBTS_MAX and not turn.generation.finished:
            turn.generation.abort(refusals.pages_differ(turn))
        self._tables.home.get(turn.session.key, lane).resume(turn)

    # ----------------------------------------------------------------------------- withdrawn

    def withdrawn(
        self,
        lane: LaneLoop,
        tokens: Sequence[int],
        salt: bytes,
        priority: int,
        wrote: Sequence[tuple[int, PageRef]],
    ) -> None:
        """A turn met NaN (F45): what it had published here goes, unless somebody else holds it.

        `wrote` are (index, page) that its session has just let go of. A page that others hold is
        computed again, on another lane if there is one, and goes if it does not come out alike.
        """
        held: list[tuple[PageOf, PageRef]] = []
        mine: list[PageRef] = []
        for index, ref in wrote:
            if any(ref in s.pinned for one in self._tables.loops for s in one.sessions.values()):
                chain = array("i", tokens[: (index + 1) * PAGE_TOKENS])
                held.append((PageOf(chain, salt, priority), ref))
            else:
                mine.append(ref)
        if mine:
            self._give_up(mine)
        if held:
            self._spawn(self._prove(lane, held), "proof")

    async def _prove(self, lane: LaneLoop, held: Sequence[tuple[PageOf, PageRef]]) -> None:
        for page, ref in held:
            able = sorted((one for one in self._tables.loops if one.up), key=lambda o: o is lane)
            got, by = b"", lane
            for by in able:
                with contextlib.suppress(TrialFailed):
                    got = await self.digest(by, page, urgent=True)
                    break
            if not self._store.is_resident(ref):
                continue
            stored = self._store.digest(ref)
            if not got:
                log.warning("page %d of a turn that met NaN cannot be proven", page.page)
                self._give_up([ref])
            elif got != stored:
                await self.judge(by, page, got, stored)

    def _give_up(self, refs: Sequence[PageRef]) -> None:
        """These pages are served no more, nor what anybody computed from them."""
        wrong: set[bytes] = set()
        for ref in refs:
            written = [loop.pages.wrote.pop(ref, None) for loop in self._tables.loops]
            found = {wrote.key for wrote in written if wrote is not None}
            # one that was evicted took all after it along; its key may be a good page's by now
            wrong.update(key for key in found if self._store.find(key) in (ref, None))
            if not found:
                with contextlib.suppress(StoreError):
                    self._store.condemn(ref)
        self._give_up_content(wrong)

    def _give_up_content(self, wrong: set[bytes], *, orphans: bool = False) -> None:
        """Pages with these keys were computed wrongly, and so was all that follows, in whatever
        life: it would be found again once the pages before it are."""
        after = self._store.condemn_with_descendants(wrong, orphans=orphans)
        self._give_up_after(wrong | after)

    def _follow_rejected(self) -> None:
        """Whoever holds a rejected page falls back; what this life computed from it goes too."""
        wrong: set[bytes] = set()
        while self._rejected:  # many at once cost one look
            wrong.add(self._rejected.popleft())
        if wrong:
            self._give_up_after(wrong)

    def _give_up_after(self, wrong: set[bytes]) -> None:
        """What lanes of this life computed from pages with these keys is served no more."""
        more = True
        while more:
            more = False
            for loop in self._tables.loops:
                more = loop.pages.spoil_after(wrong, "a page before it was given up") or more
                for ref, wrote in list(loop.pages.wrote.items()):
                    if wrote.parent in wrong:
                        more = True
                        wrong.add(wrote.key)
                        del loop.pages.wrote[ref]
                        with contextlib.suppress(StoreError):
                            self._store.condemn(ref)
        for loop in self._tables.loops:
            loop.recheck()

    # ------------------------------------------------------------------------------- verdict

    async def judge(
        self,
        lane: LaneLoop,
        page: PageOf,
        digest: bytes,
        stored: bytes | None,
        writer: LaneLoop | None = None,
    ) -> Verdict | None:
        """`lane` says `digest`, the store says otherwise (`stored`; None = look). Acts on it.

        `writer` said so of a page that is not in the store. None: there is nothing to compare.
        """
        async with self._one:
            ref = self._store.find(page.key(self._store.repr_id))
            writer = writer if ref is None else self._writer(ref)
            if stored is None:
                stored = self._stored(page.key(self._store.repr_id))
            if stored is None or stored == digest:
                return None  # the other page is gone
            verdict = await self._vote(lane, page, digest, stored, writer)
            log.critical(
                "numerics fault: page %d of %d tokens has two contents; %s",
                page.page,
                len(page.tokens),
                verdict.why,
            )
            if not verdict.stored_is_right:  # nor is what was stored anew during the trials
                key = page.key(self._store.repr_id)
                if self._stored(key) in (None, stored):
                    self._give_up_content({key}, orphans=writer is None)
            if verdict.wrong is not None:
                await self._punish(verdict.wrong, verdict.why)
            return verdict

    def _stored(self, key: bytes) -> bytes | None:
        """Digest of the page that the store has now."""
        ref = self._store.find(key)
        with contextlib.suppress(StaleRef):
            return None if ref is None else self._store.digest(ref)
        return None

    def writers(self, ref: PageRef) -> frozenset[str]:
        """The lanes that computed a page of the store and what it was computed from, if known."""
        lane = self._writer(ref)
        return frozenset() if lane is None else lane.pages.wrote[ref].lanes | {lane.lane.name}

    def _writer(self, ref: PageRef) -> LaneLoop | None:
        """The lane that computed a page of the store in this life."""
        return next((loop for loop in self._tables.loops if ref in loop.pages.wrote), None)

    async def _vote(
        self,
        lane: LaneLoop,
        page: PageOf,
        digest: bytes,
        stored: bytes,
        writer: LaneLoop | None,
    ) -> Verdict:
        claimants = (lane, writer)
        others = [one for one in self._tables.loops if one.up and one not in claimants]
        for one in others:
            with contextlib.suppress(TrialFailed):
                third = await self.digest(one, page, urgent=True)
                if third in (digest, stored):
                    return _verdict(lane, writer, third == stored, f"lane {one.lane.name}")
        try:
            async with self._referee() as one:
                third = await self.digest(one, page, urgent=True)
            if third in (digest, stored):
                return _verdict(lane, writer, third == stored, "a fresh worker")
        except Exception as error:  # no memory for it, say: one witness less
            log.error("no fresh worker could compute the page: %r", error)
        if writer is not None and writer is not lane and writer.up:
            with contextlib.suppress(TrialFailed):
                third = await self.digest(writer, page, urgent=True)
                if third in (digest, stored):
                    return _verdict(lane, writer, third == stored, f"lane {writer.lane.name}")
        why = "nobody can say which is right, and both are given up"
        return Verdict(None, False, why, is_known=False)

    async def _punish(self, loop: LaneLoop, why: str) -> None:
        """Nothing this lane has computed is used any more, nor what was computed from that."""
        name = loop.lane.name
        self._verdicts[name] = self._verdicts.get(name, 0) + 1
        distrusted = [one.pages.distrust(name, why) for one in self._tables.loops]
        self._give_up([*loop.pages.wrote, *(ref for refs in distrusted for ref in refs)])
        loop.drain(why)
        if any(one.up for one in self._tables.loops):
            return
        while loop.is_rechecking and loop.lane.alive:  # noqa: ASYNC110  between two steps
            await asyncio.sleep(0.005)
        loop.lane.kill("computes other numbers than it did")
        loop.drained = ""
        if self._verdicts[name] >= VERDICTS_MAX:
            loop.pages.muted = f"{self._verdicts[name]} of its pages differed: none is published"
            log.critical("lane %s: %s", name, loop.pages.muted)
        else:
            self._unmute(loop)


def _verdict(
    lane: LaneLoop, writer: LaneLoop | None, stored_is_right: bool, witness: str
) -> Verdict:
    """Two of three agree."""
    wrong = lane if stored_is_right else writer
    name = "nobody who is here" if wrong is None else f"lane {wrong.lane.name}"
    said = "what the store has" if stored_is_right else f"what lane {lane.lane.name} has"
    return Verdict(wrong, stored_is_right, f"{witness} computes {said}: {name} was wrong")
