"""A turn: one generation being computed on one session, with the inputs of the scheduler.

Owns the state of a turn that belongs neither to the session, which outlives the turn, nor to the
reader's stream. Plain state; the lane loop is the only writer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from typing import NamedTuple

from batchengine import errors
from batchengine.core import BatchEngineError, GenerationRequest, ModelInfo
from batchengine.engine.turns.drafts import TurnDrafts
from batchengine.engine.turns.scores import PromptScores
from batchengine.engine.turns.stream import Generation
from batchengine.grammar.matchers import Matcher
from batchengine.policy.rows import RANK, TurnRow
from batchengine.session import Loss, Session
from batchengine.session_kv import pages_for


def check_request(request: GenerationRequest, info: ModelInfo) -> None:
    """Raise BatchEngineError of kind INVALID for a request that can never run."""
    n_prompt, most = len(request.prompt), request.tokens_max
    if n_prompt < 1:
        what, fix = "the prompt is empty", "send at least one token"
        raise errors.INVALID_REQUEST(param="prompt", what=what, fix=fix)
    if most < 1:
        what, fix = "max_tokens is less than 1", "ask for at least one token"
        raise errors.INVALID_REQUEST(param="max_tokens", what=what, fix=fix)
    if request.prompt_logprobs >= 0 and request.session_id is not None:
        what, fix = "a session has no log-probabilities of prompts", "leave out the session"
        raise errors.INVALID_REQUEST(param="prompt_logprobs", what=what, fix=fix)
    if min(request.prompt) < 0 or max(request.prompt) >= info.vocab_size:
        what, fix = "a token id is outside the vocabulary", "use this model's tokens"
        raise errors.INVALID_REQUEST(param="prompt", what=what, fix=fix)
    if n_prompt + most > info.context_tokens:
        raise errors.PROMPT_TOO_LONG(
            asked=f"{n_prompt:,} tokens + max {most:,}",
            n_prompt_tokens=n_prompt,
            n_ctx=info.context_tokens,
            longer=info.context_bound,
        )


class TurnEnd(NamedTuple):
    """End of a turn: a reason (stop, length, cancelled, shutdown), or an error."""

    reason: str = "error"
    error: BatchEngineError | None = None


class Stall(NamedTuple):
    """Where a turn found no room last. `computed`: of its session, then; `relapses`: see
    `Turn.note_stall`."""

    computed: int = 0
    frontier: int = 0
    served_ms: float = 0.0
    relapses: int = 0


class Turn:
    """One generation on one session. Times are milliseconds of the engine's clock."""

    def __init__(
        self,
        session: Session,
        generation: Generation,
        *,
        horizon_ms: float,
        tpot_ms: float,
        now_ms: float,
        end_tokens: Collection[int] = (),
    ) -> None:
        """`end_tokens`: tokens that end a generation."""
        request = generation.request
        self.session = session
        self.generation = generation
        self.rank = RANK[request.sla.sla_class]
        self.deadline_ms = generation.arrived_ms + horizon_ms
        self.horizon_ms = horizon_ms
        self.tpot_ms = tpot_ms
        self.served_ms = now_ms
        self.admitted_ms = now_ms
        self.priority = 3 - self.rank  # of its pages against eviction: higher stays
        self.pages_max = pages_for(len(request.prompt) + request.tokens_max)
        self.sampling = request.sampling
        self.history_tokens = request.sampling.history_tokens
        self._end_tokens = tuple(end_tokens)
        self._ends_from = len(request.prompt) + request.sampling.tokens_min  # position
        self.paused = False  # computes nothing, since its reader is slow, or since it `is_away`
        self.shared_with = ""  # the peer that computes it too: it stays on its lane
        self.differs = False  # a token of that peer is another one than was computed here
        self.is_away = False  # only that peer computes it
        self.matcher: Matcher | None = None  # of a constrained answer
        best = request.prompt_logprobs  # -1: none are asked for
        self.scores = PromptScores(request.prompt, best) if best >= 0 else None
        self.drafts = TurnDrafts(request.predicted, len(request.prompt))
        self.is_late = False  # the mask of its next token was late for a step
        self.needs_match = False  # its session lost KV: match the prompt with the store again
        self.stop_early = bool(request.stop)  # text decides the end: emit tokens at their commit
        self.suspect_until = 0
        self.disputes = 0  # audits of pages that it shares
        self._stall = Stall()
        self._ways = (0, 0)  # see `note_way`: of the session computed, times
        self.cached_row: TurnRow | None = None  # valid while the turn waits for a seat
        self.reported = False  # `start` was called, which sets the next three:
        self.reused = 0  # leading tokens that had KV
        self.length = 0  # tokens of the timeline
        self.loss: Loss | None = None  # why KV that the session had is gone
        self.end: TurnEnd | None = None
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self.timeline = 0  # tokens of the session's timeline before the turn's rebase
        self.shared = 0  # leading tokens of those that the turn's timeline has too
        self.turn_id = ""  # "" = not in the ledger

    def __repr__(self) -> str:
        return f"<Turn {self.generation.request_id} {self.session!r}>"

    def start(self, reused: int, loss: Loss | None) -> None:
        """Record, before the first step is sent, that `reused` leading tokens have KV already."""
        self.reported, self.loss = True, loss
        self.reused, self.length = reused, len(self.session.tokens)
        generation = self.generation
        generation.cached_tokens = min(reused, len(generation.request.prompt))
        self._started.set()

    def finish(self, end: TurnEnd) -> None:
        """Set how the turn ended. Later calls do nothing."""
        if self.end is None:
            self.end = end
            self._started.set()
            self._ended.set()

    async def started(self) -> None:
        """Wait until `start` or `finish` was called."""
        await self._started.wait()

    async def ended(self) -> TurnEnd:
        """Wait for the end of the turn, and return how it ended."""
        await self._ended.wait()
        if self.end is None:
            raise RuntimeError(f"{self!r} ended without a reason")
        return self.end

    @property
    def reusable(self) -> float:
        """Leading tokens that may have KV already: those whose rows are still to score the prompt
        may not, as no logits of them are kept."""
        scores = self.scores
        return math.inf if scores is None or scores.is_complete else scores.rows

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.scores is not None and not self.scores.is_complete

    @property
    def is_bound(self) -> bool:
        """Whether its next token takes more than its pages here and one known step: pages at peers
        or under way, a peer that computes it too, a prompt that is scored, masks that are late; or
        it is a suspect."""
        kv = self.session.kv
        return bool(
            kv.held
            or kv.later
            or kv.pending
            or self.shared_with
            or self.is_scoring
            or self.session.suspect
            or self.masks_are_slow
        )

    @property
    def awaits_mask(self) -> bool:
        """Whether the turn computes nothing before the mask of its next token is known: one that
        is late makes all entries of a step wait."""
        return self.masks_are_slow and self.matcher is not None and self.matcher.mask is None

    @property
    def masks_are_slow(self) -> bool:
        """Whether the last mask was late, or took so long that the next one may be."""
        return self.matcher is not None and (self.is_late or self.matcher.is_slow)

    def row(self, *, running: bool, evictable: int = 0) -> TurnRow:
        """Return the turn as a row for the scheduler; cached while the turn waits for a seat.

        `evictable`: number of its pages that no session with a seat holds.
        """
        if not running and self.cached_row is not None:
            return self.cached_row
        session, kv = self.session, self.session.kv
        # By position: 64 rows are made before every step, and names cost four times as much.
        row = TurnRow(
            self.rank,
            self.deadline_ms,
            session.key,
            self.horizon_ms,
            self.tpot_ms,
            self.served_ms,
            self.admitted_ms,
            session.frontier,
            len(session.tokens) - session.frontier,
            kv.reach(),
            len(kv.codes),
            self.pages_max,
            len(kv.open),
            running,
            self.paused
            or session.is_expecting
            or kv.cut_off
            or kv.awaits_state
            or self.awaits_mask,
            session.suspect,
            evictable,
            session.tenant,
            self.is_scoring,
        )
        if not running:
            self.cached_row = row
        return row

    def note_stall(self) -> int:
        """Note that the lane has no room for what the turn would compute now. Returns how often it
        had lost KV, computed it again and found no room, since its session got further than ever.
        """
        last, session = self._stall, self.session
        if session.computed > last.computed:
            self._stall = Stall(session.computed, session.frontier, self.served_ms)
        elif self.served_ms > last.served_ms:  # it has computed since the last stall
            relapses = last.relapses + (session.frontier <= last.frontier)
            self._stall = Stall(last.computed, session.frontier, self.served_ms, relapses)
        return self._stall.relapses

    def note_way(self) -> int:
        """Note that a turn makes way while this one has got furthest. Returns how often that was
        since its session got further than ever."""
        computed, times = self._ways
        times = times + 1 if computed == self.session.computed else 0
        self._ways = self.session.computed, times
        return times

    def banned(self, position: int) -> tuple[int, ...]:
        """Tokens that are not chosen at a position of the timeline."""
        return self._end_tokens if position < self._ends_from else ()
