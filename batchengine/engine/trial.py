"""One page computed again, for its digest only: what a lane says its tokens' KV is.

Owns pages on trial: their places in the lane's arena and the frames that fill them. They belong
to no session, ask for no token and are denied what the store has of the page itself. A trial
runs when its lane has nothing else to do, or, if it is urgent, between two steps.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence

from batchengine import wire
from batchengine.config import LaneConfig
from batchengine.core import PAGE_TOKENS
from batchengine.cost import StepCost, work_of
from batchengine.pages import Adoption, LanePages
from batchengine.session import Session

KEY = 0  # sessions count from 1
EPOCH = 1
PIECE_MS = 100.0  # of one frame: whoever comes meanwhile waits so long at most
PIECES = (256, 128, 64, 32, 16)  # tokens
PAGES_MAX = 8  # computed for the sake of one: what comes before it may be gone as well


class TrialFailed(Exception):
    """There is no digest, and why. Says nothing about the page."""


class NotFinite(TrialFailed):
    """It was computed, and what came out is no number."""


class Trial:
    """The last page of `tokens`, computed after the sealed pages `codes` of its prefix."""

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
        self.frontier = self.first * PAGE_TOKENS
        self.urgent = urgent
        self.piece_max = piece_max  # tokens of one frame
        self.adoption: Adoption | None = None  # its places
        self.digest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Trial page={self.n_pages - 1} frontier={self.frontier}/{len(self.tokens)}>"

    @property
    def n_pages(self) -> int:
        return -(-len(self.tokens) // PAGE_TOKENS)

    def fail(self, why: str, kind: type[TrialFailed] = TrialFailed) -> None:
        """It will not be computed."""
        if not self.digest.done():
            self.digest.set_exception(kind(why))


class Trials:
    """Trials of one lane, one at a time. The lane's loop sends the frames."""

    def __init__(self, pages: LanePages, config: LaneConfig) -> None:
        self._pages = pages
        self._tokens_max = min(config.tokens_per_step, config.chunk_tokens_max)
        self._due: deque[Trial] = deque()
        self._asked: Trial | None = None  # whose frame is under way
        self._sent = 0  # its tokens

    def __bool__(self) -> bool:
        return bool(self._due)

    def ask(self, trial: Trial) -> None:
        """Compute it when its time has come; await `trial.digest`, then `close` it."""
        self._due.append(trial)

    def close(self, trial: Trial) -> None:
        """Its places are free again."""
        if trial in self._due:
            self._due.remove(trial)
        trial.fail("it was given up")
        trial.digest.exception()  # nobody may have waited for it
        if trial.adoption is not None:
            self._pages.abandon(trial.adoption)

    def is_due(self, *, idle: bool) -> bool:
        """Whether a frame may be sent now. One that can wait gives way to whoever computes."""
        while self._due:
            trial = self._due[0]
            if not trial.digest.done() and (idle or trial.urgent):
                return True
            trial.fail("the lane has other work")
            self._due.popleft()
        return False

    def frame(self, cost: StepCost) -> tuple[wire.Step, bytes] | None:
        """The next piece of the first trial; None if it cannot be computed."""
        trial = self._due[0]
        reserve: tuple[wire.Place, ...] = ()
        if trial.adoption is None:
            reserve = self._take_places(trial)
        if trial.adoption is None or trial.adoption.over:
            trial.fail("its lane has no place for it")
            return None
        n = self._piece(trial, cost)
        end = trial.frontier + n
        n_pages = -(-end // PAGE_TOKENS)
        digest: tuple[wire.Digest, ...] = ()
        if end == len(trial.tokens):
            rows = end - (n_pages - 1) * PAGE_TOKENS
            digest = (wire.Digest(trial.adoption.places[-1].place, rows),)
        entry = wire.Entry(KEY, EPOCH, trial.frontier, n, n_pages, None)
        self._asked = trial
        payload = trial.codes[:n_pages].tobytes() + trial.tokens[trial.frontier : end].tobytes()
        return wire.Step((entry,), reserve=reserve, digest=digest), payload

    def answered(self, done: wire.StepDone) -> None:
        """The frame was executed."""
        trial, self._asked = self._asked, None
        if trial is None or trial.digest.done():
            return  # closed meanwhile
        if done.poisoned:
            trial.fail("its numbers are not finite", NotFinite)
        elif done.digests:
            trial.digest.set_result(done.digests[0])
        else:
            trial.frontier += self._sent

    def died(self) -> None:
        """The worker is gone, and its places with it."""
        for trial in self._due:
            trial.fail("its worker died")
        self._due.clear()

    def _take_places(self, trial: Trial) -> tuple[wire.Place, ...]:
        nobody = Session(KEY, "", "")
        n_new = trial.n_pages - trial.first
        trial.adoption = self._pages.prepare(
            nobody, EPOCH, n_new, lambda _: None, borrow=trial.urgent
        )
        if trial.adoption is None:
            return ()
        places = trial.adoption.places
        trial.codes.extend(place.code for place in places)
        return tuple(
            wire.Place(place.place, place.gen, nobody.name, EPOCH, trial.first + i)
            for i, place in enumerate(places)
        )

    def _piece(self, trial: Trial, cost: StepCost) -> int:
        left = min(len(trial.tokens) - trial.frontier, self._tokens_max, trial.piece_max)
        fits = (n for n in PIECES if cost.predict_ms(work_of([(trial.frontier, n)])) <= PIECE_MS)
        self._sent = min(left, next(fits, PIECES[-1]))
        return self._sent
