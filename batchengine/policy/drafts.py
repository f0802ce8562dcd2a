"""Drafts: tokens that probably follow a timeline, so that one step may compute several of them.

Owns where they come from, how often they have been right, and how many a step may carry. A worker
computes the rows of a session's next token and of its draft at once, samples behind each, and keeps
those up to the first that differs. As the sampler's random numbers depend on the position alone,
the kept tokens are those of as many steps without a draft.

The source is the timeline itself ("prompt lookup decoding", Saxena 2023): its last tokens are
looked up further back, and what followed there is the draft. That is right for several tokens
where an agent says again what stands in its context: code that it edits, paths, results of tools.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

MATCH_MIN = 2  # last tokens that must be found: a single one is followed by anything
MATCH_MAX = 16  # a longer match says no more
CLASS_ENDS = (3, 4, 8, MATCH_MAX)  # lengths of matches below each are of one class, the last beyond
N_CLASSES = len(CLASS_ENDS) + 1
# That a token of a draft is right if those before it are, by class: a guess, until drafts of the
# turn have had some tokens.
PRIOR_CHANCES = (0.4, 0.5, 0.6, 0.75, 0.9)
PRIOR_WEIGHT = 4.0  # tokens that a prior counts as
PLACES_MAX = 512  # of the last token, the latest ones: enough, and a search does not grow with them
SEEN_MAX = 32.0  # tokens that a class remembers; more are halved, so that it follows the text
CHANCE_MIN = 0.05  # of a token of a draft that is sent


class Draft(NamedTuple):
    """Tokens that may follow a timeline. matched: how many of its last tokens were found before
    them; 0 = there is none."""

    tokens: tuple[int, ...] = ()
    matched: int = 0


NO_DRAFT = Draft()


def before_any(draft: Draft, tokens: Collection[int]) -> Draft:
    """The draft up to the first of these tokens, behind which nothing is wanted."""
    ends = (at for at, token in enumerate(draft.tokens) if token in tokens)
    return draft._replace(tokens=draft.tokens[: next(ends, len(draft.tokens))])


def class_of(matched: int) -> int:
    """The class of a match by its length."""
    return sum([matched >= end for end in CLASS_ENDS])


class PromptLookup:
    """The tokens of one timeline, to be searched for what followed its last ones before.

    A search is one pass over four bytes per token: 10 to 110 us for 128K tokens, which take 2 ms to
    copy at first.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._ids = np.zeros(max(256, 2 * len(tokens)), np.int32)
        self._n = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._n

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the timeline."""
        n = self._n + len(tokens)
        if n > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._n], np.zeros(n, np.int32)])
        self._ids[self._n : n] = tokens
        self._n = n

    def find(self, tokens_max: int) -> Draft:
        """What followed the longest match of the last tokens, the latest if there are several.

        Where a match reaches the end of the timeline, that repeats itself, so the draft does.
        """
        n, ids = self._n, self._ids[: self._n]
        if n < MATCH_MIN + 1 or tokens_max < 1:
            return NO_DRAFT
        ends = np.flatnonzero(ids[:-1] == ids[-1])[-PLACES_MAX:]  # where a match may end
        matched = 1
        while len(ends) and matched < min(MATCH_MAX, n - 1):
            # A wrapped index compares a token of the end: it is one before the timeline's first.
            longer = ends[(ids[ends - matched] == ids[-1 - matched]) & (ends >= matched)]
            if not len(longer):
                break
            ends, matched = longer, matched + 1
        if not len(ends) or matched < MATCH_MIN:
            return NO_DRAFT
        following = int(ends[-1]) + 1
        period = n - following
        tokens = ids[following : following + tokens_max].tolist()
        while len(tokens) < tokens_max:
            tokens.append(tokens[len(tokens) - period])
        return Draft(tuple(tokens), matched)


class DraftOdds:
    """How often tokens of drafts of one turn were right, by class of their match."""

    def __init__(self) -> None:
        self._right = [PRIOR_WEIGHT * chance for chance in PRIOR_CHANCES]
        self._seen = [PRIOR_WEIGHT] * N_CLASSES

    def chance(self, matched: int) -> float:
        """That a token is right if those before it in its draft are."""
        of = class_of(matched)
        return self._right[of] / self._seen[of]

    @property
    def best(self) -> float:
        """The chance of the likeliest class."""
        return max([right / seen for right, seen in zip(self._right, self._seen, strict=True)])

    def learn(self, matched: int, drafted: int, accepted: int) -> None:
        """Count a draft: what is behind its first wrong token says nothing."""
        of = class_of(matched)
        self._right[of] += accepted
        self._seen[of] += min(accepted + 1, drafted)
        if self._seen[of] > SEEN_MAX:
            self._right[of] /= 2
            self._seen[of] /= 2


class DraftOffer(NamedTuple):
    """A draft that a session has. chance: that a token of it is right if those before it are;
    token_ms: what each adds to a step."""

    key: int
    n_tokens: int
    chance: float
    token_ms: float


class StepRate(NamedTuple):
    """A step without drafts: the tokens that it yields, and its milliseconds."""

    tokens: float
    ms: float


def pays(chance: float, token_ms: float, step: StepRate) -> bool:
    """Whether a token of a draft yields more for its time than the step does without it."""
    return chance >= CHANCE_MIN and chance * step.ms > step.tokens * token_ms


def grant(offers: Sequence[DraftOffer], step: StepRate, tokens_max: int) -> dict[int, int]:
    """How many tokens of each draft a step carries, so that it yields most tokens per time.

    The token that is kept most likely for its time comes first, as long as it yields more for that
    than the step with those before it does: any further one would lower the rate. tokens_max: of
    all drafts.
    """
    granted: dict[int, int] = {}
    tokens, ms = step
    # Per token of a draft that is next: -(tokens per ms), key, its chance, the draft.
    likely = [(-offer.chance / offer.token_ms, offer.key, offer.chance, offer) for offer in offers]
    heapq.heapify(likely)
    while likely and tokens_max > 0:
        _, key, kept, offer = heapq.heappop(likely)
        if not pays(kept, offer.token_ms, StepRate(tokens, ms)):
            break
        granted[key] = n = granted.get(key, 0) + 1
        tokens, ms, tokens_max = tokens + kept, ms + offer.token_ms, tokens_max - 1
        if n < offer.n_tokens:
            kept *= offer.chance
            heapq.heappush(likely, (-kept / offer.token_ms, key, kept, offer))
    return granted
