"""Drafts: what is looked up, what is learnt from it, and how many tokens of it a step carries."""

from __future__ import annotations

import itertools
import random

import pytest

from batchengine.policy.drafts import (
    CHANCE_MIN,
    MATCH_MAX,
    MATCH_MIN,
    NO_DRAFT,
    PRIOR_CHANCES,
    Draft,
    DraftOdds,
    DraftOffer,
    PromptLookup,
    StepRate,
    class_of,
    grant,
)


def looked_up(tokens: list[int], tokens_max: int) -> Draft:
    """As PromptLookup.find, place by place."""
    best, at = 0, 0
    for end in range(1, len(tokens)):
        n = 0
        while n < min(end, MATCH_MAX) and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        if n >= max(best, MATCH_MIN):
            best, at = n, end
    if not best or tokens_max < 1:
        return NO_DRAFT
    repeated = itertools.cycle(tokens[at:])
    return Draft(tuple(itertools.islice(repeated, tokens_max)), best)


@pytest.mark.parametrize("seed", range(40))
def test_a_draft_is_what_followed_the_longest_and_latest_match(seed: int) -> None:
    rng = random.Random(seed)
    n_ids = rng.choice([1, 2, 3, 20])
    tokens = [rng.randrange(n_ids) for _ in range(rng.randrange(60))]
    lookup = PromptLookup(tokens)
    for _ in range(300):
        most = rng.randrange(6)
        assert lookup.find(most) == looked_up(tokens, most)
        more = [rng.randrange(n_ids) for _ in range(rng.randrange(4))]
        lookup.extend(more)
        tokens += more
        assert len(lookup) == len(tokens)


def test_a_draft_goes_on_with_a_text_that_repeats_itself() -> None:
    assert PromptLookup([9, 1, 2, 3, 1, 2, 3]).find(7) == Draft((1, 2, 3, 1, 2, 3, 1), 3)
    assert PromptLookup([5, 5, 5]).find(4) == Draft((5, 5, 5, 5), 2)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3], [1, 2, 3, 2]])
def test_there_is_no_draft_without_a_match_of_two(tokens: list[int]) -> None:
    assert PromptLookup(tokens).find(5) == NO_DRAFT


def test_odds_follow_what_was_right() -> None:
    odds = DraftOdds()
    assert [odds.chance(n) for n in (2, 3, 4, 8, 16, 40)] == [*PRIOR_CHANCES, PRIOR_CHANCES[-1]]
    for _ in range(20):
        odds.learn(5, 6, 6)
    assert odds.chance(5) > 0.95
    for _ in range(60):
        odds.learn(5, 6, 0)  # the text has changed
    assert odds.chance(5) < 0.15
    assert odds.chance(9) == PRIOR_CHANCES[class_of(9)]
    assert odds.best == PRIOR_CHANCES[-1]


@pytest.mark.parametrize("seed", range(60))
def test_a_step_has_the_drafts_of_the_best_rate(seed: int) -> None:
    """Compared with all choices of lengths. One token of many equal rates may be there or not."""
    rng = random.Random(seed)
    token_ms = rng.choice([0.3, 1.0, 4.0])
    offers = [
        DraftOffer(key, rng.randrange(1, 6), rng.uniform(0.1, 0.99), token_ms)
        for key in range(rng.randrange(1, 4))
    ]
    step, most = StepRate(len(offers), rng.uniform(2.0, 20.0)), rng.randrange(1, 9)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens, ms = step
        for offer, n in zip(offers, lengths, strict=True):
            tokens += sum([offer.chance**i for i in range(1, n + 1)])
            ms += n * offer.token_ms
        return tokens / ms

    granted = grant(offers, step, most)
    lengths = tuple([granted.get(offer.key, 0) for offer in offers])
    assert sum(lengths) <= most
    choices = itertools.product(*[range(offer.n_tokens + 1) for offer in offers])
    possible = [of for of in choices if sum(of) <= most]
    likely = [
        of
        for of in possible
        if all(offer.chance**n >= CHANCE_MIN for offer, n in zip(offers, of, strict=True) if n)
    ]
    assert rate(lengths) == pytest.approx(max(map(rate, likely)))


def test_a_cheap_draft_comes_before_a_dear_one() -> None:
    offers = [DraftOffer(1, 3, 0.8, 5.0), DraftOffer(2, 3, 0.8, 0.5)]
    assert grant(offers, StepRate(2, 10.0), 3) == {2: 3}
    assert grant(offers, StepRate(2, 100.0), 6) == {2: 3, 1: 3}
    assert grant(offers, StepRate(2, 1.0), 6) == {}
