"""Drafts of one turn: where they are looked up, and how often they were right."""

from __future__ import annotations

from batchengine.policy.drafts import Draft, DraftOdds, PromptLookup


class TurnDrafts:
    """The source of a turn's drafts. Its tokens are copied when the first one is looked for.

    is_off: none are made any more, as one had a row that is not finite: no token of the turn may
    depend on what was only drafted.
    """

    def __init__(self) -> None:
        self.odds = DraftOdds()
        self.is_off = False
        self._lookup: PromptLookup | None = None

    def find(self, timeline: list[int], tokens_max: int) -> Draft:
        """A draft behind the timeline, which has only grown since the last call."""
        if self._lookup is None:
            self._lookup = PromptLookup(timeline)
        self._lookup.extend(timeline[len(self._lookup) :])
        return self._lookup.find(tokens_max)
