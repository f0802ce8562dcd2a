"""Recompute of one page by one lane, for the digest of its KV.

Owns the recomputes of a lane: their slots in its arena and the frames that fill them. A recompute
belongs to no session, samples no token and does not read the page itself from the store. It runs
when its lane has nothing else to do, or, if it is urgent, between two steps.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence

from batchengine.config import LaneConfig
from batchengine.kv import LaneKv, RowImport
from batchengine.lanes.worker_process import Lane
from batchengine.policy.cost import StepCost, work_of
from batchengine.session import Session
from batchengine.session_kv import StateSlot, page_start, pages_for
from batchengine.wire import lane as wire

KEY = 0  # sessions count from 1
EPOCH = 1
PIECE_MS = 100.0  # predicted time of one frame at most: a request that arrives waits for it
PIECES = (256, 128, 64, 32, 16)  # tokens
DEADLINE_S = 30.0
PAGES_MAX = 8  # pages computed for one digest: pages of its prefix may be gone as well


class RecomputeFailed(Exception):
    """The recompute ended without a digest. The page may be good or bad."""


class NotFinite(RecomputeFailed):
    """The page was computed, and its rows are NaN or Inf."""


class PageRecompute:
    """One recompute: the last page of `tokens`, after the sealed pages `codes` of its prefix."""

    def __init__(
        self,
        tokens: Sequence[int],
        codes: Sequence[int],
        *,
        urgent: bool,
        piece_max: int = PIECES[0],
    ) -> None:
        self.tokens = array("i", tokens)
        self.codes = array("Q", codes)
        self.first = len(codes)
        self.frontier = page_start(self.first)
        self.urgent = urgent
        self.piece_max = piece_max  # tokens of one frame
        self.row_import: RowImport | None = None  # holds its slots
        self.state: StateSlot | None = None  # the recurrent state at the frontier
        self.digest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return (
            f"<PageRecompute page={self.n_pages - 1} frontier={self.frontier}/{len(self.tokens)}>"
        )

    @property
    def n_pages(self) -> int:
        return pages_for(len(self.tokens))

    def fail(self, why: str, kind: type[RecomputeFailed] = RecomputeFailed) -> None:
        """End the recompute: awaiting `digest` raises `kind`."""
        if not self.digest.done():
            self.digest.set_exception(kind(why))


class RecomputeQueue:
    """Recomputes of one lane, one at a time. The lane's loop sends the frames."""

    def __init__(self, kv: LaneKv, config: LaneConfig) -> None:
        self._kv = kv
        self._tokens_max = min(config.tokens_per_step, config.chunk_tokens_max)
        self._due: deque[PageRecompute] = deque()
        self._asked: PageRecompute | None = None  # whose frame is in flight
        self._sent = 0  # tokens of that frame

    def __bool__(self) -> bool:
        return bool(self._due)

    def ask(self, recompute: PageRecompute) -> None:
        """Queue a recompute; await `recompute.digest`, then call `close`."""
        self._due.append(recompute)

    def close(self, recompute: PageRecompute) -> None:
        """Remove a recompute and free its slots."""
        if recompute in self._due:
            self._due.remove(recompute)
        recompute.fail("it was cancelled")
        recompute.digest.exception()  # retrieved: there may be no waiter
        if recompute.row_import is not None:
            self._kv.importing.abandon(recompute.row_import)
        self._set_state(recompute, None)

    async def run(self, lane: Lane, cost: StepCost, *, idle: bool) -> bool:
        """Compute a piece if one is due; returns whether one was. Errors as of `Lane.answer`."""
        if not self.is_due(idle=idle):
            return False
        frame = self.frame(cost)
        if frame is not None:
            self.answered(await lane.run(*frame, deadline_s=DEADLINE_S))
        return True

    def is_due(self, *, idle: bool) -> bool:
        """Whether a frame may be sent now. Fails recomputes that are not urgent unless `idle`."""
        while self._due:
            recompute = self._due[0]
            if not recompute.digest.done() and (idle or recompute.urgent):
                return True
            recompute.fail("the lane has other work")
            self._due.popleft()
        return False

    def frame(self, cost: StepCost) -> tuple[wire.Step, bytes] | None:
        """Return frame and payload of the first recompute's next piece; None if it has no slot."""
        recompute = self._due[0]
        reserve: tuple[wire.ReserveSlot, ...] = ()
        if recompute.row_import is None:
            reserve = self._take_slots(recompute)
        if recompute.row_import is None or recompute.row_import.over:
            recompute.fail("its lane has no slot for it")
            return None
        read, written = -1, None
        if self._kv.states.is_used:
            if recompute.state is None and recompute.frontier:
                recompute.fail("the recurrent state before the page is not kept")
                return None
            if (written := self._kv.states.take_alone()) is None:
                recompute.fail("its lane has no room for the recurrent state")
                return None
            read = -1 if recompute.state is None else recompute.state.index
            self._set_state(recompute, written)
        n = self._piece(recompute, cost)
        end = recompute.frontier + n
        n_pages = pages_for(end)
        digest: tuple[wire.Digest, ...] = ()
        if end == len(recompute.tokens):
            rows = end - page_start(n_pages - 1)
            digest = (wire.Digest(recompute.row_import.slots[-1].slot, rows),)
        entry = wire.Entry(
            KEY, EPOCH, recompute.frontier, n, n_pages, None,
            state_read=read, state_written=-1 if written is None else written.index,
        )  # fmt: skip
        self._asked = recompute
        payload = (
            recompute.codes[:n_pages].tobytes()
            + recompute.tokens[recompute.frontier : end].tobytes()
        )
        return wire.Step((entry,), reserve=reserve, digest=digest), payload

    def _set_state(self, recompute: PageRecompute, state: StateSlot | None) -> None:
        """Replace the state of a recompute; the frame that is sent next may still read it."""
        before, recompute.state = recompute.state, state
        if before is not None:
            before.release()

    def answered(self, done: wire.StepDone) -> None:
        """Apply the answer to the frame in flight."""
        recompute, self._asked = self._asked, None
        if recompute is None or recompute.digest.done():
            return  # the recompute was closed meanwhile
        if done.nonfinite:
            recompute.fail("its numbers are not finite", NotFinite)
        elif done.digests:
            recompute.digest.set_result(done.digests[0])
        else:
            recompute.frontier += self._sent

    def died(self) -> None:
        """Fail every recompute, after the worker's exit."""
        for recompute in self._due:
            recompute.fail("its worker died")
        self._due.clear()

    def _take_slots(self, recompute: PageRecompute) -> tuple[wire.ReserveSlot, ...]:
        owner = Session(KEY, "", "")  # of the slots
        n_new = recompute.n_pages - recompute.first
        recompute.row_import = self._kv.importing.prepare(
            owner, EPOCH, n_new, reclaim=recompute.urgent
        )
        if recompute.row_import is None:
            return ()
        slots = recompute.row_import.slots
        recompute.codes.extend(slot.code for slot in slots)
        return tuple(
            wire.ReserveSlot(slot.slot, slot.gen, owner.name, EPOCH, recompute.first + i)
            for i, slot in enumerate(slots)
        )

    def _piece(self, recompute: PageRecompute, cost: StepCost) -> int:
        left = min(
            len(recompute.tokens) - recompute.frontier, self._tokens_max, recompute.piece_max
        )
        fits = (
            n for n in PIECES if cost.predict_ms(work_of([(recompute.frontier, n)])) <= PIECE_MS
        )
        self._sent = min(left, next(fits, PIECES[-1]))
        return self._sent
