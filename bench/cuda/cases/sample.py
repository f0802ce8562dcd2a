"""Cases of samples: tokens and log-probabilities, and tokens that the next step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.arrays import Arrays
from bench.cuda.cases.values import F32, compare, rows_of
from kernels.cuda.gpu import Gpu

SAMPLE_ROW = np.dtype(  # `SampleRow` of sample.cu
    [
        *((name, np.float32) for name in ("temperature", "top_p", "min_p")),
        *((name, np.float32) for name in ("repetition", "frequency", "presence")),
        ("top_k", np.int32),
        ("logprobs", np.int32),
        ("seed", np.uint64),
        ("position", np.uint64),
        ("draw", np.uint32),
        *((name, np.int32) for name in ("first_history", "n_history", "first_bias", "n_bias")),
        ("first_mask", np.int32),
    ]
)


def some_logits(rng: np.random.Generator, rows: int, vocab: int) -> F32:
    """Rows of one kind each: random, of few values, equal but for one, huge, with a bad value."""
    logits = np.empty((rows, vocab), np.float32)
    for row in logits:
        row[:] = rng.standard_normal(vocab) * rng.choice([0.0, 0.1, 1.0, 8.0, 3e37])
        if rng.random() < 0.4:
            row[:] = np.round(row * 2) / 2  # ties, and zeros of both signs
        if rng.random() < 0.3:
            row[rng.integers(vocab)] = rng.choice([10.0, 3e38, -3e38])
        if rng.random() < 0.1:
            row[rng.integers(vocab)] = rng.choice([np.nan, np.inf, -np.inf])
    return logits


@dataclass(frozen=True, slots=True)
class Asked:
    """What is sampled from: logits, a row of parameters for each, and what those point into."""

    logits: F32
    table: NDArray[Any]  # of SAMPLE_ROW
    history: NDArray[np.int32]
    bias_tokens: NDArray[np.int32]
    bias_values: F32
    masks: NDArray[np.uint32]

    def past(self, row: Any) -> NDArray[np.int32]:
        """The history of a row."""
        return self.history[row["first_history"] :][: row["n_history"]]

    def biases(self, row: Any) -> tuple[NDArray[np.int32], F32]:
        """Tokens and values of the biases of a row."""
        span = slice(row["first_bias"], row["first_bias"] + row["n_bias"])
        return self.bias_tokens[span], self.bias_values[span]

    def specs(self) -> list[kernels.SampleSpec]:
        """The same for the kernels of the CPU."""
        made: list[kernels.SampleSpec] = []
        for row, mask in zip(self.table, self.masks, strict=True):
            biased, values = self.biases(row)
            made.append(
                kernels.SampleSpec(
                    temperature=float(row["temperature"]),
                    top_k=int(row["top_k"]),
                    top_p=float(row["top_p"]),
                    min_p=float(row["min_p"]),
                    repetition_penalty=float(row["repetition"]),
                    presence_penalty=float(row["presence"]),
                    frequency_penalty=float(row["frequency"]),
                    seed=int(row["seed"]),
                    position=int(row["position"]),
                    draw=int(row["draw"]),
                    history=self.past(row),
                    bias=list(zip(biased.tolist(), values.tolist(), strict=True)),
                    logprobs=int(row["logprobs"]),
                    mask=mask if row["first_mask"] >= 0 else None,
                )
            )
        return made


def some_parameters(rng: np.random.Generator, n: int, vocab: int) -> NDArray[Any]:
    """Rows of any parameters, without masks; in one of ten half of equal weights are kept."""
    table = np.zeros(n, SAMPLE_ROW)
    table["temperature"] = rng.choice([0.0, 0.01, 0.7, 1.0, 5.0, 100.0], n)
    table["top_p"] = rng.choice([0.0, 0.5, 0.95, 1.0, 1.0, 1.0], n)
    table["min_p"] = rng.choice([0.0, 0.0, 0.0, 0.05, 0.5, 1.0], n)
    table["repetition"] = rng.choice([1.0, 1.1, 0.5, 1e30], n, p=[0.5, 0.3, 0.1, 0.1])
    table["frequency"] = rng.choice([0.0, 0.25, -2.0, 1e38], n, p=[0.5, 0.3, 0.1, 0.1])
    table["presence"] = rng.choice([0.0, 0.5, -1.0, 3e38], n, p=[0.5, 0.3, 0.1, 0.1])
    table["top_k"] = rng.choice([0, 0, 1, 2, 40, vocab, vocab + 1], n)
    table["logprobs"] = rng.choice([-1, 0, 1, 20], n)
    table["seed"], table["position"] = rng.integers(0, 1 << 63, (2, n), np.uint64)
    table["draw"] = rng.integers(0, 4, n)
    table["n_history"] = rng.choice([0, 0, 5, 200], n)
    table["n_bias"] = rng.choice([0, 0, 1, 8], n)
    for name in ("history", "bias"):
        table[f"first_{name}"] = np.cumsum(table[f"n_{name}"]) - table[f"n_{name}"]
    return table


def some_asked(rng: np.random.Generator) -> Asked:
    """Random logits and parameters. In one row of ten the biases of a token add up to infinity."""
    vocab = int(rng.choice([1, 2, 33, rng.integers(3, 5000), rng.integers(8193, 40_000)]))
    n = int(rng.integers(1, 24 if vocab < 8193 else 7))  # the large ones take several rounds
    logits, table = some_logits(rng, n, vocab), some_parameters(rng, n, vocab)
    words = -(-vocab // 32)
    masks = rng.integers(0, 1 << 32, (n, words), np.uint32)
    masks &= rng.integers(0, 1 << 32, (n, words), np.uint32)  # one bit of four
    masks[:, 0] |= 1  # else a mask may allow no token
    table["first_mask"] = np.where(rng.random(n) < 0.4, words * np.arange(n), -1)
    n_history, n_bias = (int(table[f"n_{name}"].sum()) + 1 for name in ("history", "bias"))
    values = rng.choice([-np.inf, -1.5, 0.25, 100.0, 3e38], n_bias).astype(np.float32)
    history, bias_tokens = (
        rng.integers(0, vocab, count).astype(np.int32) for count in (n_history, n_bias)
    )
    asked = Asked(logits, table, history, bias_tokens, values, masks)
    best = np.argsort(-np.nan_to_num(logits), axis=1)[:, :8]
    for row, likely in zip(table, best, strict=True):
        for tokens in (asked.past(row), asked.biases(row)[0]):  # half of them among the best
            is_likely = rng.random(len(tokens)) < 0.5
            tokens[is_likely] = rng.choice(likely, int(is_likely.sum()))
        biased, values = asked.biases(row)
        if len(biased) > 1 and rng.random() < 0.2:
            biased[:2], values[:2] = rng.integers(vocab), 3e38
    for index in range(n if vocab > 2 else 0):
        if rng.random() < 0.1:
            halve(asked, index)
        elif rng.random() < 0.7 and np.isfinite(logits[index]).all():
            put_tie(asked, index, rng)
    return asked


def halve(asked: Asked, index: int) -> None:
    """Have a row keep the first half of an even number of equal logits."""
    row, logits = asked.table[index], asked.logits[index]
    logits[:], logits[len(logits) // 2 * 2 :] = 1.0, -np.inf
    row["temperature"], row["top_p"], row["min_p"], row["top_k"] = 1.0, 0.5, 0.0, 0
    row["n_history"] = row["n_bias"] = 0
    row["first_mask"] = -1


def put_tie(asked: Asked, index: int, rng: np.random.Generator) -> None:
    """Let another logit of a row be what penalties, or biases, make of the largest one: of both,
    that with the lower token is the most likely one."""
    row, logits = asked.table[index], asked.logits[index]
    past, (biased, values) = asked.past(row), asked.biases(row)
    if len(past) and not len(biased):
        token, x = int(past[0]), np.float32(rng.standard_normal() * 8)
        row["repetition"], row["frequency"], row["presence"] = 1.1, 0.3, 0.7
        tie = x / row["repetition"] if x > 0 else x * row["repetition"]
        tie = tie - np.float32((past == token).sum()) * row["frequency"] - row["presence"]
    elif len(biased) > 1 and not len(past):
        token, x = int(biased[0]), np.float32(rng.standard_normal())
        biased[:], values[:] = token, rng.choice([0.1, 0.7, -0.3], len(values))
        tie = x
        for value in values:
            tie = tie + value
    else:
        return
    other = (token + rng.choice([1, -1])) % len(logits)
    if other not in past:
        logits[:] = -50
        logits[token], logits[other], row["temperature"] = x, tie, 0


def sample_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Tokens and log-probabilities of random logits with random parameters."""
    asked = some_asked(rng)
    n, vocab = asked.logits.shape
    want = kernels.sample(pool, rows_of(asked.logits), asked.specs())
    biases = asked.bias_tokens, asked.bias_values
    pointed = asked.table, asked.history, *biases, asked.masks
    with Arrays(gpu) as arrays:
        tokens, logprobs = arrays.empty(np.int32, n), arrays.empty(np.float32, n)
        top_tokens, top_logprobs = arrays.empty(np.int32, n, 32), arrays.empty(np.float32, n, 32)
        gpu.launch(
            "sample",
            (n, 1, 1),
            32 * int(rng.choice([1, 2, 7, 32])),
            [
                arrays.put(asked.logits).address,
                vocab,
                vocab,
                *(arrays.put(array).address for array in pointed),
                arrays.empty(np.float32, n, vocab).address,
                arrays.empty(np.int32, n, vocab).address,
                *(a.address for a in (tokens, logprobs, top_tokens, top_logprobs)),
                32,
            ],
        )
        all_tokens, all_logprobs = top_tokens.read(), top_logprobs.read()
        what = f"sample of {vocab} logits"
        compare(tokens.read(), np.array([one.token for one in want], np.int32), f"{what}: tokens")
        found = np.array([one.logprob for one in want], np.float32)
        compare(logprobs.read(), found, f"{what}: log-probabilities")
        for row, one in enumerate(want):
            ids = np.array([token for token, _ in one.top], np.int32)
            found = np.array([logprob for _, logprob in one.top], np.float32)
            compare(all_tokens[row, : len(ids)], ids, f"{what}: best tokens of {asked.table[row]}")
            compare(all_logprobs[row, : len(ids)], found, f"{what}: the best of {asked.table[row]}")


def take_samples_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """Samples of one step, to places of the next one."""
    n, rows, room = int(rng.integers(1, 400)), int(rng.integers(1, 70)), 500
    sampled = rng.integers(-1, 1 << 31, rows).astype(np.int32)
    sampled[rng.random(rows) < 0.2] = -1
    sources = rng.integers(0, rows, n).astype(np.int32)
    places = rng.permutation(room)[:n].astype(np.int32)
    want = rng.integers(0, 1000, room).astype(np.int32)
    with Arrays(gpu) as arrays:
        to = arrays.put(want)
        given = [arrays.put(array).address for array in (sampled, sources, places)]
        threads = 32 * int(rng.choice([1, 3, 8]))
        gpu.launch("take_samples", (-(-n // threads), 1, 1), threads, [*given, n, to.address])
        want[places] = sampled[sources].clip(0)
        compare(to.read(), want, "take_samples")
