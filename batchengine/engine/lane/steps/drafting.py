"""Drafts for the decodes of a lane's steps: which turns have one, and how long it is.

Owns the rules of what may have a draft; `policy/drafts.py` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from batchengine.config import LaneConfig
from batchengine.core import PAGE_TOKENS
from batchengine.engine.lane.steps.inflight import InFlightStep
from batchengine.engine.turns.turn import Turn
from batchengine.policy.cost import CostModel, entry_ms
from batchengine.policy.drafts import Draft, DraftOffer, StepRate, before_any, grant, pays
from batchengine.wire.lane import logits_rows_max

Planned = Sequence[tuple[Turn, int]]  # turns of a step, and how many of their tokens it computes


class Drafting:
    """Chooses the drafts of one lane's steps."""

    def __init__(self, config: LaneConfig, cost: CostModel, end_tokens: Collection[int]) -> None:
        self._end_tokens = end_tokens
        self._tokens_max = config.draft_tokens
        # Of a step with one, none is ahead, which a single token does not make up for.
        self._tokens_min = 2 if config.steps_in_flight > 1 else 1
        self._rows_max = logits_rows_max(config.entries_max)
        self._step_tokens_max = config.tokens_per_step
        self._cost = cost

    def choose(self, planned: Planned, overhead_ms: float) -> dict[Turn, Draft]:
        """The drafts of a step. overhead_ms: what a step takes outside the worker."""
        if not self._tokens_max:
            return {}
        rate = self._rate(planned, overhead_ms)
        found = self._find(planned, rate)
        drafts = self._granted(planned, found, rate)
        if found and not drafts:
            self._cost.no_draft_paid()
        return drafts

    def may_follow(self, step: InFlightStep) -> bool:
        """Whether the step after one that is in flight may have a draft, as the timelines without
        the samples of this one have. None can be ahead, since its drafts follow these samples."""
        if not self._tokens_max:
            return False
        decodes = [(part.turn, 1) for part in step.parts if part.wants]
        rate = self._rate(decodes, 0.0)
        return bool(self._granted(decodes, self._find(decodes, rate), rate))

    def _room(self, planned: Planned) -> int:
        """Tokens that the drafts of a step may have together."""
        rows = self._rows_max - len(planned)
        return min(rows, self._step_tokens_max - sum([n for _, n in planned]))

    def _rate(self, planned: Planned, overhead_ms: float) -> StepRate:
        """What the decodes of a step yield without drafts."""
        cost, frontiers = self._cost.cost, [turn.session.frontier for turn, n in planned if n == 1]
        ms = sum([entry_ms(cost, frontier, 1) for frontier in frontiers])
        return StepRate(len(frontiers), ms + cost.fixed_ms + overhead_ms)

    def _find(self, planned: Planned, rate: StepRate) -> dict[int, tuple[Turn, Draft]]:
        """What may follow the decodes of a step, by session, if the likeliest draft that a turn has
        had would be worth its time.

        Only those of the most urgent class in the step have drafts: those of another one would make
        its tokens late.
        """
        room, found = self._room(planned), dict[int, tuple[Turn, Draft]]()
        if room < 1:
            return found
        rank = min([turn.rank for turn, _ in planned], default=0)
        for turn, n in planned:
            if turn.rank == rank and n == 1 and turn.session.to_compute == 1:
                session = turn.session
                if not pays(turn.drafts.odds.best, self._cost.draft_ms(session.frontier), rate):
                    continue
                draft = turn.drafts.find(session.tokens, min(room, self._longest(turn)))
                if turn.generation.request.ends_at_end_token:
                    draft = before_any(draft, self._end_tokens)
                if draft.tokens:
                    found[session.key] = turn, draft
        return found

    def _granted(
        self, planned: Planned, found: Mapping[int, tuple[Turn, Draft]], rate: StepRate
    ) -> dict[Turn, Draft]:
        """What is worth its time of these drafts, as far as there is room for it."""
        offers = [
            DraftOffer(
                key,
                len(draft.tokens),
                turn.drafts.odds.chance(draft.matched),
                self._cost.draft_ms(turn.session.frontier),
            )
            for key, (turn, draft) in found.items()
        ]
        return {
            found[key][0]: found[key][1]._replace(tokens=found[key][1].tokens[:n])
            for key, n in grant(offers, rate, self._room(planned)).items()
            if n >= self._tokens_min
        }

    def _longest(self, turn: Turn) -> int:
        """The most tokens of a draft that the next step of a decode may have; 0 = none.

        They lie in the page of the token before them and do not fill it, so that pages are filled
        by tokens of the timeline alone.
        """
        session, generation = turn.session, turn.generation
        end, matcher = len(session.tokens), turn.matcher
        is_bound = turn.is_bound or turn.drafts.is_off or turn.banned(end)
        is_bound = is_bound or (matcher is not None and not matcher.may_follow)
        if is_bound or not end % PAGE_TOKENS:
            return 0
        left = generation.request.tokens_max - generation.completion_tokens - 1
        return min(self._tokens_max, left, PAGE_TOKENS - 1 - end % PAGE_TOKENS)
