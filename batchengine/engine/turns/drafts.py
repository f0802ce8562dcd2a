"""Drafts of one turn: where they are looked up, and how often they were right."""

from __future__ import annotations

from collections.abc import Sequence

from batchengine.policy.drafts import MATCH_MAX, NO_DRAFT, Draft, DraftOdds, PromptLookup

FOUND_MAX = 16  # tokens that are looked up at once


class TurnDrafts:
    """The source of a turn's drafts: its timeline, and what its client predicts of the answer. Its
    tokens are copied when the first one is looked for.

    is_off: none are made any more, as one had a row that is not finite: no token of the turn may
    depend on what was only drafted.
    """

    def __init__(self, predicted: Sequence[int] = (), n_prompt: int = 0) -> None:
        """predicted: what probably follows the first `n_prompt` tokens of the timeline."""
        self._predicted, self._n_prompt = predicted, n_prompt
        self.odds = DraftOdds()
        self.is_off = False
        self._lookup: PromptLookup | None = None
        self._n_before = 0  # tokens there that are none of the timeline
        self._found = 0, NO_DRAFT  # the draft behind so many tokens

    def find(self, timeline: list[int], tokens_max: int) -> Draft:
        """A draft behind the timeline, which has only grown since the last call."""
        if tokens_max < 1:
            return NO_DRAFT
        if self._lookup is None:
            before: list[int] = []
            if self._predicted:  # as if the prompt's end had been answered so, before all else
                end = self._n_prompt
                before = [*timeline[max(0, end - MATCH_MAX) : end], *self._predicted]
            self._lookup, self._n_before = PromptLookup(before), len(before)
        self._lookup.extend(timeline[len(self._lookup) - self._n_before :])
        if self._found[0] != len(timeline):
            self._found = len(timeline), self._lookup.find(FOUND_MAX)
        draft = self._found[1]
        return draft._replace(tokens=draft.tokens[:tokens_max])
