"""Sampling: counter-based random numbers, the order of steps, equal tokens on every level."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kernels as K
from tests.kernels import binary32

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
LEVELS = K.isa_levels()
POOL = K.Pool(2)

LOWEST = np.finfo(np.float32).min
LOGPROB_TOLERANCE = 1e-5


def draw(logits: F32, *specs: K.SampleSpec) -> list[K.Sampled]:
    """Every spec on the same logits row, on all levels; they must agree."""
    rows = K.Rows(len(specs), logits.size)
    rows.view(len(specs))[:] = logits
    results: list[list[K.Sampled]] = []
    for level in LEVELS:
        K.set_isa(level)
        results.append(K.sample(POOL, rows, list(specs)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a.token, a.nonfinite, a.top) == (b.token, b.nonfinite, b.top)
            assert a.logprob == b.logprob
    return results[0]


def one(logits: F32, **kwargs: Any) -> K.Sampled:
    return draw(logits, K.SampleSpec(**kwargs))[0]


def random_logits(seed: int, vocab: int, size: float = 3.0) -> F32:
    return (np.random.default_rng(seed).standard_normal(vocab) * size).astype(np.float32)


# The published known answers of Philox4x32-10 use all four counter words, of which the fourth is 0
# here; the first is published, the others were computed once with the plain Python below.
def plain_philox(seed: int, position: int, number: int) -> tuple[int, ...]:
    key = [seed & 0xFFFFFFFF, seed >> 32]
    c = [position & 0xFFFFFFFF, position >> 32, number, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (b >> 32) ^ c[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ c[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def test_philox_gives_the_known_answers() -> None:
    assert K.philox(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_philox_equals_plain_python(seed: int, position: int, number: int) -> None:
    assert K.philox(seed, position, number) == plain_philox(seed, position, number)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 1000, 151_936])
def test_greedy_takes_the_largest_logit_and_then_the_lowest_id(vocab: int) -> None:
    logits = random_logits(vocab, vocab)
    assert one(logits).token == int(np.argmax(logits))
    logits[vocab // 3 :: 5] = 50.0
    assert one(logits).token == vocab // 3
    logits[:] = -0.0
    logits[vocab // 2] = 0.0
    assert one(logits).token == 0, "both zeros are equal"


def penalised(logits: F32, spec: dict[str, Any]) -> F32:
    x = logits.copy()
    for token, bias in spec.get("bias", []):
        x[token] += np.float32(bias)
    tokens, counts = np.unique(np.array(spec.get("history", []), int), return_counts=True)
    repetition = np.float32(spec.get("repetition_penalty", 1))
    for token, count in zip(tokens, counts.astype(np.float32), strict=True):
        y = x[token]
        y = y / repetition if y > 0 else y * repetition
        x[token] = (y - count * np.float32(spec.get("frequency_penalty", 0))) - np.float32(
            spec.get("presence_penalty", 0)
        )
    x = np.maximum(x, LOWEST)
    return np.where(spec.get("allowed", True), x, np.float32(-np.inf))


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=40, deadline=None)
def test_penalties_and_bias_apply_in_the_documented_order(seed: int, data: st.DataObject) -> None:
    logits = random_logits(seed, 50)
    token = st.integers(0, 49)
    spec: dict[str, Any] = {
        "bias": data.draw(st.lists(st.tuples(token, st.floats(-8, 8, width=32)), max_size=4)),
        "history": data.draw(st.lists(token, max_size=30)),
        "repetition_penalty": data.draw(st.floats(0.5, 2, width=32)),
        "presence_penalty": data.draw(st.floats(-2, 2, width=32)),
        "frequency_penalty": data.draw(st.floats(-2, 2, width=32)),
    }
    expected = int(np.argmax(penalised(logits, spec)))
    spec["history"] = np.array(spec["history"], np.int32)
    assert one(logits, **spec).token == expected


def test_a_bias_of_minus_infinity_excludes_a_token() -> None:
    logits = random_logits(1, 40)
    best = int(np.argmax(logits))
    ban = [(best, float("-inf"))]
    assert one(logits, bias=ban).token == int(np.argsort(-logits)[1])
    tokens = {one(logits, bias=ban, temperature=5.0, seed=s).token for s in range(200)}
    assert best not in tokens
    assert len(tokens) > 10


def mask_of(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    bits = np.zeros(-(-allowed.size // 32) * 32, np.uint8)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


def test_a_mask_excludes_tokens_after_bias_and_penalties() -> None:
    """No bias brings an excluded token back, and none takes the last allowed one away."""
    logits = random_logits(3, 70)
    allowed = np.zeros(70, bool)
    allowed[[5, 40, 69]] = True
    mask = mask_of(allowed)
    assert one(logits, mask=mask).token == max((5, 40, 69), key=lambda token: logits[token])
    assert one(logits, mask=mask, bias=[(6, 100.0)]).token in (5, 40, 69)
    ban = [(token, float("-inf")) for token in (5, 40, 69)]
    assert one(logits, mask=mask, bias=ban).token == 5
    for temperature, top_k in ((0.0, 0), (2.0, 0), (2.0, 40), (2.0, 300)):
        for seed in range(20):
            spec = {"temperature": temperature, "top_k": top_k, "seed": seed, "bias": ban}
            assert one(logits, mask=mask, **spec).token in (5, 40, 69)


def test_a_mask_of_all_tokens_changes_nothing_and_log_probabilities_see_none() -> None:
    logits = random_logits(4, 100)
    everything = mask_of(np.ones(100, bool))
    few = mask_of(np.arange(100) % 9 == 4)
    for seed in range(20):
        spec: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "seed": seed, "logprobs": 5}
        free, same, masked = (
            one(logits, **spec),
            one(logits, mask=everything, **spec),
            one(logits, mask=few, **spec),
        )
        assert (free.token, free.logprob, free.top) == (same.token, same.logprob, same.top)
        assert masked.top == free.top
        assert masked.token % 9 == 4
        assert masked.logprob == np.float32(oracle_logprobs(logits)[masked.token])


def test_a_mask_that_does_not_fit_is_refused() -> None:
    rows = K.Rows(1, 40)
    for words in ([1], [0, 0], [0, 1 << 9], [1, 1, 1]):
        with pytest.raises(ValueError, match="mask"):
            K.sample(POOL, rows, [K.SampleSpec(mask=np.array(words, np.uint32))])


def integer_weights(x: F32, temperature: float) -> I64:
    with np.errstate(over="ignore"):  # a banned token is infinitely far below the largest
        w = binary32.exp((x - x.max()) / np.float32(temperature))
    return np.rint(w.astype(np.float64) * 2**30).astype(np.int64)


def kept_ids(x: F32, w: I64, spec: dict[str, Any]) -> I64:
    """Rule 10, step 5: ids of the candidates that are left, rising."""
    ranked = np.argsort(-x, kind="stable")
    ranked = ranked[w[ranked] > 0]
    if spec.get("top_k", 0):
        ranked = ranked[: spec["top_k"]]
    top_p = int(np.float32(spec.get("top_p", 1.0)).astype(np.float64) * 2**32)
    if top_p < 2**32:
        target = int(w[ranked].sum()) * top_p >> 32
        ranked = ranked[: int(np.searchsorted(np.cumsum(w[ranked]), target)) + 1]
    least = int(np.rint(np.float32(spec.get("min_p", 0.0)).astype(np.float64) * 2**30))
    return np.sort(ranked[w[ranked] >= least])


def oracle_token(logits: F32, spec: dict[str, Any]) -> int:
    """The token of rule 10, with integers of Python and binary32 of numpy."""
    x = penalised(logits, spec)
    w = integer_weights(x, spec["temperature"])
    kept = kept_ids(x, w, spec)
    word = plain_philox(spec["seed"], spec.get("position", 0), spec.get("draw", 0))[0]
    target = int(w[kept].sum()) * word >> 32
    return int(kept[np.searchsorted(np.cumsum(w[kept]), target, side="right")])


def oracle_logprobs(logits: F32) -> F32:
    total = int(integer_weights(logits, 1.0).sum())
    log_sum = binary32.ln(np.float32(total) * np.float32(2**-30))
    return (logits - logits.max()) - log_sum


VOCABULARIES = [3, 15, 16, 17, 40, 700, 1023, 1024, 1025, 5000]
SELECTIONS = {
    "temperature": st.sampled_from([1e-3, 0.01, 0.7, 1.0, 1.4, 30.0]),
    "top_k": st.sampled_from([0, 1, 2, 20, 256, 257, 600, 4999, 5000, 5001]),
    "top_p": st.sampled_from([0.0, 1e-9, 0.3, 0.95, 0.9999999, 1.0]),
    "min_p": st.sampled_from([0.0, 1e-9, 0.05, 1.0]),
    "seed": st.integers(0, 2**64 - 1),
    "position": st.integers(0, 2**40),
    "draw": st.integers(0, 3),
}


@given(st.integers(0, 1000), st.fixed_dictionaries(SELECTIONS), st.data())
@settings(max_examples=300, deadline=None)
def test_draws_follow_the_documented_steps(
    seed: int, spec: dict[str, Any], data: st.DataObject
) -> None:
    vocab = data.draw(st.sampled_from(VOCABULARIES))
    logits = random_logits(seed, vocab, data.draw(st.sampled_from([0.0, 0.1, 2.0, 8.0, 1e30])))
    if data.draw(st.booleans()):  # many equal values, zeros of both signs among them
        logits = np.round(logits, 0)
    token = st.integers(0, vocab - 1)
    bias = st.sampled_from([float("-inf"), -3.0, 0.0, 2.5])
    spec["bias"] = data.draw(st.lists(st.tuples(token, bias), max_size=2))
    assert one(logits, **spec).token == oracle_token(logits, spec)
    allowed = np.random.default_rng(seed).random(vocab) < data.draw(st.sampled_from([0.01, 0.6]))
    allowed[data.draw(token)] = True
    found = one(logits, mask=mask_of(allowed), **spec).token
    assert found == oracle_token(logits, {**spec, "allowed": allowed})


@pytest.mark.parametrize("vocab", [32_001, 151_936])
@pytest.mark.parametrize("shape", ["flat", "peaked", "equal", "ties"])
def test_draws_of_a_whole_vocabulary_follow_the_documented_steps(vocab: int, shape: str) -> None:
    logits = random_logits(11, vocab, 1.0)
    if shape == "peaked":
        logits[vocab - 7 :] += 20
    elif shape == "equal":
        logits[:] = -2.5
    elif shape == "ties":
        logits = np.round(logits, 1)
    for number, narrow in enumerate(
        [{}, {"top_p": 0.95}, {"top_k": 40}, {"top_k": 3000, "top_p": 0.5}, {"min_p": 0.02}]
    ):
        spec: dict[str, Any] = {"temperature": 0.8, "seed": number, **narrow}
        assert one(logits, **spec).token == oracle_token(logits, spec)


def seeds_where(wanted: Callable[[int], bool], count: int) -> list[int]:
    """The first seeds whose random number for position 0 and draw 0 is wanted."""
    return list(islice((s for s in itertools.count() if wanted(K.philox(s, 0, 0)[0])), count))


def test_a_target_between_two_tokens_takes_the_later_one() -> None:
    """Of 2^17 equal logits, token k has the sums from k·2^30; a target may be that very number."""
    logits = np.full(2**17, 3.0, np.float32)
    for seed in seeds_where(lambda word: word % 2**15 == 0, 3):
        assert one(logits, temperature=0.9, seed=seed).token == K.philox(seed, 0, 0)[0] >> 15


def test_every_bit_of_the_random_number_counts() -> None:
    """Tokens of a weight of 2^-24 stand before one of 1: 8 bits fewer would not reach them all."""
    logits = np.full(2**17, -24 * np.log(2), np.float32)
    logits[-1] = 0
    tokens: set[int] = set()
    for seed in seeds_where(lambda word: word < 2**24, 20):
        spec = {"temperature": 1.0, "seed": seed}
        token = one(logits, **spec).token
        assert token == oracle_token(logits, spec)
        tokens.add(token)
    assert len(tokens) == 20


def test_weights_never_rise_as_logits_fall_to_where_they_vanish() -> None:
    """So a candidate without weight ranks behind all others, and top_k may count it or not."""
    x = np.arange(-22, -21, 2.0**-19, dtype=np.float32)
    w = np.rint(binary32.exp(x).astype(np.float64) * 2**30)
    assert (np.diff(w) >= 0).all()
    assert (w[0], w[-1]) == (0, 1)


def test_the_order_of_the_vocabulary_changes_no_sum() -> None:
    """Another order of the same logits: the same log-probabilities, and the same set is kept."""
    logits = random_logits(12, 3000, 2.0)
    order = np.random.default_rng(13).permutation(logits.size)
    spec: dict[str, Any] = {"temperature": 1.3, "top_p": 0.6, "min_p": 0.001, "logprobs": 20}
    kept = kept_ids(logits, integer_weights(logits, 1.3), spec)
    first, second = one(logits, seed=1, **spec), one(logits[order], seed=1, **spec)
    assert second.top == [(int(np.flatnonzero(order == t)[0]), p) for t, p in first.top]
    drawn: set[int] = set()
    for x, ids in ((logits, np.arange(logits.size)), (logits[order], order)):
        specs = [K.SampleSpec(seed=s, **spec) for s in range(5 * kept.size)]
        drawn |= {int(ids[r.token]) for r in draw(x, *specs)}
        assert drawn <= set(kept.tolist())
        for seed in range(20):
            token = one(x, seed=seed, **spec).token
            assert token == oracle_token(x, {"seed": seed, **spec})


def test_selections_that_leave_one_token_are_greedy() -> None:
    logits = random_logits(2, 3000)
    best = int(np.argmax(logits))
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        specs = [K.SampleSpec(temperature=9.0, seed=s, **narrow) for s in range(50)]
        assert {r.token for r in draw(logits, *specs)} == {best}
    assert one(logits, temperature=1e-30, seed=3).token == best


def test_parameters_without_effect_change_no_token() -> None:
    """A limit above all values or a zero bias takes another code path, with equal tokens."""
    for vocab in (100, 4000):
        logits = np.round(random_logits(3, vocab, 2.0), 1)  # many ties
        for seed in range(60):
            base = {"temperature": 1.3, "seed": seed, "position": seed * 7}
            tokens = {
                r.token
                for r in draw(
                    logits,
                    K.SampleSpec(**base),
                    K.SampleSpec(top_k=vocab, **base),
                    K.SampleSpec(top_k=vocab + 1, **base),
                    K.SampleSpec(bias=[(0, 0.0)], **base),
                )
            }
            assert len(tokens) == 1


def test_a_draw_depends_on_seed_position_and_number_only() -> None:
    """Alone or in a batch, first or last row: the same token."""
    logits = random_logits(4, 2000, 1.0)
    specs = [
        K.SampleSpec(temperature=1.0, seed=s, position=p, draw=d)
        for s in (0, 1)
        for p in (5, 6, 2**33)
        for d in (0, 1)
    ]
    together = [r.token for r in draw(logits, *specs)]
    assert together == [draw(logits, spec)[0].token for spec in specs]
    assert together[::-1] == [r.token for r in draw(logits, *specs[::-1])]
    assert len(set(together)) > 8


def test_frequencies_follow_the_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.0], np.float32)
    n = 20_000
    specs = [K.SampleSpec(temperature=1.0, seed=7, position=i) for i in range(n)]
    counts = np.bincount([r.token for r in draw(logits, *specs)], minlength=5)
    p = np.exp(logits) / np.exp(logits).sum()
    chi_square = float(((counts - n * p) ** 2 / (n * p)).sum())
    assert chi_square < 18.5, "4 degrees of freedom: one in a thousand"


@pytest.mark.parametrize("vocab", [5, 64, 65, 1000, 32_001])
def test_logprobs_come_from_the_raw_logits(vocab: int) -> None:
    logits = random_logits(5, vocab, 4.0)
    logits[vocab // 2] = logits[0]
    exact = logits - np.log(np.exp(logits.astype(float) - logits.max()).sum()) - logits.max()
    r = one(logits, temperature=0.8, seed=1, logprobs=min(20, vocab), bias=[(0, 3.0)])
    assert abs(r.logprob - exact[r.token]) < LOGPROB_TOLERANCE
    canonical = oracle_logprobs(logits)
    assert r.logprob == canonical[r.token]
    assert [p for _, p in r.top] == [canonical[t] for t, _ in r.top]
    order = np.argsort(-logits, kind="stable")[:20]
    assert [t for t, _ in r.top] == order.tolist()
    np.testing.assert_allclose([p for _, p in r.top], exact[order], atol=LOGPROB_TOLERANCE)
    assert one(logits, logprobs=0).top == []
    assert one(logits).logprob == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 15, 16, 99])
def test_a_nonfinite_row_gives_no_token(bad: float, where: int) -> None:
    logits = random_logits(6, 100)
    logits[where] = bad
    for spec in ({}, {"temperature": 1.0}, {"bias": [(where, 1.0)], "logprobs": 3}):
        r = one(logits, **spec)
        assert r.nonfinite
        assert r.token == -1
    rows = K.Rows(2, 100)
    rows.view(2)[0] = logits
    rows.view(2)[1] = random_logits(7, 100)
    results = K.sample(POOL, rows, [K.SampleSpec(), K.SampleSpec()])
    assert [r.nonfinite for r in results] == [True, False]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logprobs": 21},
        {"bias": [(0, float("nan"))]},
        {"bias": [(0, float("inf"))]},
    ],
)
def test_bad_parameters_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SampleSpec"):
        K.SampleSpec(**bad)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    rows = K.Rows(1, 10)
    for spec in (
        K.SampleSpec(history=np.array([10], np.int32)),
        K.SampleSpec(history=np.array([-1], np.int32)),
        K.SampleSpec(bias=[(10, 1.0)]),
    ):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            K.sample(POOL, rows, [spec])
    with pytest.raises(ValueError, match="do not fit"):
        K.sample(POOL, rows, [K.SampleSpec(), K.SampleSpec()])
