"""Drafts for the decodes of a lane's steps: which turns have one, and how long it is.

Owns the rules of what may have a draft; `policy/drafts.py` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchengine.config import LaneConfig
from batchengine.core import PAGE_TOKENS
from batchengine.engine.lane.steps.inflight import InFlightStep
from batchengine.engine.turns.turn import Turn
from batchengine.policy.cost import CostModel, entry_ms
from batchengine.policy.drafts import Draft, DraftOffer, StepRate, grant
from batchengine.session_kv import full_pages
from batchengine.wire.lane import logits_rows_max

AGAIN_MAX = 16  # tokens of a decode that a draft has made be computed once more

Planned = Sequence[tuple[Turn, int]]  # turns of a step, and how many of their tokens it computes


class Drafting:
    """Chooses the drafts of one lane's steps."""

    def __init__(self, config: LaneConfig, cost: CostModel) -> None:
        self._tokens_max = config.draft_tokens
        self._rows_max = logits_rows_max(config.entries_max)
        self._step_tokens_max = config.tokens_per_step
        self._cost = cost

    def choose(self, planned: Planned, overhead_ms: float) -> dict[Turn, Draft]:
        """The drafts of a step. overhead_ms: what a step takes outside the worker.

        Only the most urgent class of the step's decodes has drafts: those of another one would make
        its tokens late.
        """
        rows = self._rows_max - len(planned)
        room = min(rows, self._step_tokens_max - sum([n for _, n in planned]))
        if not self._tokens_max or room < 1:
            return {}
        decodes = [(turn, n) for turn, n in planned if _is_decode(turn, n)]
        rank = min([turn.rank for turn, _ in decodes], default=0)
        found: dict[int, tuple[Turn, Draft]] = {}
        offers = list[DraftOffer]()
        for turn, _ in decodes:
            longest = min(room, self._longest(turn)) if turn.rank == rank else 0
            draft = turn.drafts.find(turn.session.tokens, longest)
            if not draft.tokens:
                continue
            key, frontier = turn.session.key, turn.session.frontier
            found[key] = turn, draft
            chance, token_ms = turn.drafts.odds.chance(draft.matched), self._cost.draft_ms(frontier)
            offers.append(DraftOffer(key, len(draft.tokens), chance, token_ms))
        if not offers:
            return {}
        cost = self._cost.cost
        ms = sum([entry_ms(cost, turn.session.frontier, n) for turn, n in decodes])
        step = StepRate(len(decodes), ms + cost.fixed_ms + overhead_ms)
        granted = grant(offers, step, room)
        if not granted:
            self._cost.no_draft_paid()
        return {
            found[key][0]: found[key][1]._replace(tokens=found[key][1].tokens[:n])
            for key, n in granted.items()
        }

    def may_follow(self, step: InFlightStep) -> bool:
        """Whether the step after one that is in flight may have a draft, as the timelines without
        the samples of this one have. None can be ahead, since its drafts follow these samples."""
        if not self._tokens_max:
            return False
        decodes = [(part.turn, 1) for part in step.parts if part.wants]
        return any(len(draft.tokens) > 1 for draft in self.choose(decodes, 0.0).values())

    def _longest(self, turn: Turn) -> int:
        """The most tokens of a draft that the next step of a decode may have; 0 = none.

        They lie in the page of the token before them and do not fill it, so that pages are filled
        by tokens of the timeline alone.
        """
        session, generation = turn.session, turn.generation
        kv, end = session.kv, len(session.tokens)
        is_scored = turn.scores is not None and not turn.scores.is_complete
        is_bound = kv.held or kv.later or kv.pending or turn.shared_with or is_scored
        is_bound = is_bound or session.suspect or turn.drafts.is_off or turn.banned(end)
        if is_bound or turn.matcher is not None or full_pages(session.frontier) != full_pages(end):
            return 0
        left = generation.request.tokens_max - generation.completion_tokens - 1
        return min(self._tokens_max, left, PAGE_TOKENS - 1 - end % PAGE_TOKENS)


def _is_decode(turn: Turn, n_tokens: int) -> bool:
    """Whether an entry of a step samples the next token of an answer. With a recurrent state it may
    have the tokens that its last draft has brought (`LaneStates.drafted`)."""
    is_last = n_tokens == turn.session.to_compute
    return is_last and (n_tokens == 1 or bool(_has_begun(turn) and n_tokens <= AGAIN_MAX))


def _has_begun(turn: Turn) -> bool:
    return turn.generation.completion_tokens > 0
