"""Cases of mixtures of experts: what is chosen, the products of pairs, and the sums of experts."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.arrays import free_all
from bench.cuda.cases.values import (
    F32,
    Differs,
    compare,
    packed_with_bytes,
    rows_of,
    some_activation,
    some_values,
)
from bench.models.tensors import SUPERBLOCK_KINDS
from kernels.cuda.experts import EXPERTS_MAX, GATINGS, ExpertPairs
from kernels.cuda.gpu import Gpu
from kernels.cuda.ops import CudaOps
from kernels.cuda.products import FLOATS

BY_LOGITS, GROUPS_MAX = ("softmax", "softmax_all"), 32
GROUP = 16  # rows of pairs of the CPU that have one expert
BANK_VALUES, PAIR_VALUES = 1 << 20, 6 << 20  # of a bank, and of the products of all pairs with one


class Owned:
    """Another GPU, whose allocations end with a `with` block."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._addresses: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def allocate(self, n_bytes: int) -> int:
        self._addresses.append(self._gpu.allocate(n_bytes))
        return self._addresses[-1]

    def free(self, address: int) -> None:
        self._addresses.remove(address)
        self._gpu.free(address)

    def __enter__(self) -> Gpu:
        return cast(Gpu, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        free_all(self._gpu, self._addresses, error)


def some_counts(rng: np.random.Generator, n_expert_max: int = 128) -> tuple[int, int, int]:
    """Tokens, experts, and experts of a token."""
    tokens = int(np.exp(rng.uniform(0, np.log(200.5))))
    n_expert = int(np.exp(rng.uniform(0, np.log(n_expert_max + 0.5))))
    return tokens, n_expert, int(rng.integers(1, min(8, n_expert) + 1))


def some_selector_logits(rng: np.random.Generator, tokens: int, n_expert: int) -> F32:
    """Logits with equal ones, zeros of both signs, experts that all tokens choose or none, and at
    times a row that is not finite."""
    logits = rng.standard_normal((tokens, n_expert)).astype(np.float32)
    logits *= np.float32(rng.choice([0.3, 3.0, 60.0, 1e37]))
    if rng.random() < 0.5:  # many are equal
        logits = np.round(logits).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.float32(rng.choice([0.0, -0.0]))
    if rng.random() < 0.3:
        logits[:, rng.integers(n_expert)] = np.float32(3e38)
    logits[:, rng.random(n_expert) < rng.choice([0.0, 0.5, 0.9])] -= np.float32(1e4)
    if rng.random() < 0.3:
        bad = np.float32(rng.choice([np.nan, np.inf, -np.inf]))
        logits[rng.integers(tokens), rng.integers(n_expert)] = bad
    return logits


def chosen(
    gpu: Gpu,
    pool: kernels.Pool,
    logits: F32,
    n_used: int,
    scale: float,
    gating: str = "softmax",
    bias: kernels.Vector | None = None,
    scales: kernels.Vector | None = None,
    groups: tuple[int, int] = (1, 1),
) -> tuple[CudaOps, ExpertPairs, kernels.ExpertPairs]:
    """Both selections, once they are equal."""
    ops, (tokens, n_expert) = CudaOps(gpu, pool), logits.shape
    rows, pairs = ops.make_rows(tokens, n_expert), ops.make_expert_pairs(tokens, n_expert, n_used)
    on_cpu = kernels.ExpertPairs(tokens, n_expert, n_used)
    gpu.copy_in(rows.address, logits)
    ops.upload(*[vector for vector in (bias, scales) if vector is not None])
    given = gating, bias, scales, *groups
    ops.select_experts(rows, tokens, scale, pairs, *given)
    kernels.select_experts(pool, rows_of(logits), tokens, scale, on_cpu, *given)
    of = f"of {tokens} tokens, {n_used} of {n_expert}, {gating}, bias {bias is not None}"
    of += f", scales {scales is not None}, {groups[1]} of {groups[0]} groups"
    for got, want, what in zip(pairs.unpack(), on_cpu.unpack(), ("ids", "weights"), strict=True):
        compare(got, want, f"select_experts: {what} {of}")
    return ops, pairs, on_cpu


def some_gating(rng: np.random.Generator, n_expert: int) -> tuple[str, kernels.Vector | None]:
    """A gating, and at times a bias, of which some values are equal."""
    gating = str(rng.choice(GATINGS))
    if gating in BY_LOGITS or rng.random() < 0.4:
        return gating, None
    bias = rng.choice([0.1, 1.0, 30.0]) * rng.standard_normal(n_expert)
    return gating, kernels.Vector(np.round(bias, int(rng.integers(0, 6))).astype(np.float32))


def some_groups(
    rng: np.random.Generator, gating: str, n_expert: int, n_used: int
) -> tuple[int, int]:
    """Groups of experts and how many are kept, of gatings that may have some."""
    sizes = [n for n in range(2, GROUPS_MAX + 1) if n_expert % n == 0 and n_expert // n >= 2]
    if "softmax" in gating or not sizes or rng.random() < 0.3:
        return 1, 1
    n_group = int(rng.choice(sizes))
    least = -(-n_used // (n_expert // n_group))
    return n_group, int(rng.integers(least, n_group + 1))


def select_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """The experts of random logits, and the pairs by expert."""
    tokens, n_expert, n_used = some_counts(rng, EXPERTS_MAX if rng.random() < 0.2 else 128)
    if rng.random() < 0.2:
        tokens, n_used = min(tokens, 20), int(rng.integers(1, min(n_expert, 200) + 1))
    logits, scale = some_selector_logits(rng, tokens, n_expert), float(rng.choice([1.0, 2.5]))
    gating, bias = some_gating(rng, n_expert)
    scales = None
    if rng.integers(2):
        scales = kernels.Vector(rng.standard_normal(n_expert).astype(np.float32))
    with Owned(gpu) as own:
        groups = some_groups(rng, gating, n_expert, n_used)
        _, pairs, on_cpu = chosen(own, pool, logits, n_used, scale, gating, bias, scales, groups)
        ids, at = on_cpu.unpack()[0].reshape(-1), pairs.at(1)
        order = np.empty(tokens * n_used, np.int32)
        portions = np.empty((at.portions_max, 4), np.uint32)
        own.copy_out(at.order, order)
        own.copy_out(at.portions, portions)
        compare(order, np.argsort(ids, kind="stable").astype(np.int32), "order of pairs")
        compare(portions, portions_of(ids, at.columns, at.portions_max), "portions")


def portions_of(ids: NDArray[np.int32], columns: int, most: int) -> NDArray[np.uint32]:
    """Expert, first, count and number of each portion. Differs if there are more than `most`."""
    found: list[tuple[int, int, int, int]] = []
    first = 0
    for expert, count in zip(*np.unique(ids, return_counts=True), strict=True):
        for nth, at in enumerate(range(0, count, columns)):
            found.append((expert, first + at, min(columns, count - at), nth))
        first += count
    if len(found) > most:
        raise Differs(f"{len(found)} portions, and a launch has {most} blocks")
    return np.array([*found, *[(0, 0, 0, 0)] * (most - len(found))], np.uint32)


def experts_case(
    gpu: Gpu,
    pool: kernels.Pool,
    rng: np.random.Generator,
    kind: str,
    counts: tuple[int, int, int] | None = None,
    widths: tuple[int, int] | None = None,
) -> None:
    """A feed-forward part of random experts of `kind`, with some biases and any activation.

    counts: tokens, experts, experts of a token; else random ones, at times with a bank of another
    kind. widths: of a token and of an expert, else random ones.
    """
    kinds = [kind, kind, kind]
    if counts is None and rng.random() < 0.3:
        kinds[rng.integers(3)] = str(rng.choice(kernels.KINDS))
    step = 256 if any(one in SUPERBLOCK_KINDS for one in kinds) else 32
    n_embd, n_ff = (step * int(rng.integers(1, max(2, 97 // step + 1))) for _ in range(2))
    if rng.random() < 0.1:  # several segments of k
        n_embd = 256 * int(rng.integers(4, 10))
    n_embd, n_ff = widths or (n_embd, n_ff)
    tokens, n_expert, n_used = counts or some_counts(rng)
    n_expert = max(n_used, min(n_expert, BANK_VALUES // (n_embd * n_ff)))
    tokens = max(1, min(tokens, PAIR_VALUES // (n_embd * n_ff * n_used)))
    shapes = [(n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff)]
    banks = [
        packed_with_bytes(pool, one, n_expert * rows, cols, rng)[0]
        for one, (rows, cols) in zip(kinds, shapes, strict=True)
    ]
    biases = [some_bias(rng, n_expert * rows) for rows, _ in shapes]
    activation, limit = some_activation(rng)
    gate = None if activation == "relu2" else banks[0]
    biases[0] = None if gate is None else biases[0]
    logits = some_selector_logits(rng, tokens, n_expert)
    values, before = some_values(rng, tokens, n_embd), rng.standard_normal((tokens, n_embd))
    biased = "".join(["-" if bias is None else "b" for bias in biases])
    what = f"{kinds}, {tokens} tokens, {n_used} of {n_expert}, {n_embd} x {n_ff}"
    what += f", {activation}, limit {limit}, biases {biased}"
    keeps = [any(one in FLOATS for one in kinds[:2]), kinds[2] in FLOATS]
    with Owned(gpu) as own:
        ops, pairs, on_cpu = chosen(own, pool, logits, n_used, float(rng.choice([1.0, 0.3])))
        ops.upload(*banks, *[bias for bias in biases if bias is not None])
        order, rows = np.argsort(on_cpu.unpack()[0].reshape(-1), kind="stable"), cpu_rows(on_cpu)
        # The activations of tokens, those of pairs, what the gate lets through, and the output.
        x = ops.make_rows(tokens, n_embd)
        own.copy_in(x.address, values)
        of_tokens = ops.make_activations(tokens, n_embd, keeps[0])
        ops.quantise(x, tokens, of_tokens)
        gathered = ops.make_activations(pairs.rows_max, n_embd, keeps[0])
        gated = ops.make_rows(pairs.rows_max, n_ff)
        gated_q8 = ops.make_activations(pairs.rows_max, n_ff, keeps[1])
        out = ops.make_rows(tokens, n_embd)
        own.copy_in(out.address, before.astype(np.float32))
        ops.gather_pairs(of_tokens, pairs, gathered)
        ops.pairs_gated(gathered, gate, banks[1], pairs, gated, *biases[:2], activation, limit)
        given = values, before.astype(np.float32)
        wanted = cpu_part(pool, *given, banks, on_cpu, biases, activation, limit)
        want = np.empty((len(order), n_ff), np.float32)
        want[order] = wanted[0].view(on_cpu.rows_max)[rows]
        compare_finite(ops.read_rows(gated, len(order)), want, f"pairs_gated: {what}")
        ops.quantise_pairs(gated, pairs, gated_q8)
        ops.pairs_add(gated_q8, banks[2], pairs, out, biases[2])
        compare_finite(ops.read_rows(out, tokens), wanted[1].view(tokens), f"pairs_add: {what}")


def some_bias(rng: np.random.Generator, n: int) -> kernels.Vector | None:
    """None, or values of which many exceed the bounds of `oai`, at times with one that is not
    finite."""
    if rng.random() < 0.4:
        return None
    values = (rng.choice([0.3, 8.0, 40.0]) * rng.standard_normal(n)).astype(np.float32)
    if rng.random() < 0.2:
        values[rng.integers(n)] = np.float32(rng.choice([np.nan, np.inf, -np.inf]))
    return kernels.Vector(values)


def cpu_rows(pairs: kernels.ExpertPairs) -> NDArray[np.int64]:
    """The rows of the CPU's buffers with pairs, ascending."""
    _, counts = np.unique(pairs.unpack()[0], return_counts=True)
    ends = np.cumsum(-(-counts // GROUP) * GROUP)
    starts = ends - -(-counts // GROUP) * GROUP
    return np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=True)])


def cpu_part(
    pool: kernels.Pool,
    values: F32,
    before: F32,
    banks: list[kernels.Matrix],
    pairs: kernels.ExpertPairs,
    biases: Sequence[kernels.Vector | None] = (None, None, None),
    activation: str = "silu",
    limit: float = 0.0,
) -> tuple[kernels.Rows, kernels.Rows]:
    """What the CPU's gate lets through, and its output."""
    tokens, n_embd = values.shape
    gate, up, down = banks
    of_tokens = kernels.Activations(tokens, n_embd, keep_float=True)
    gathered = kernels.Activations(pairs.rows_max, n_embd, keep_float=True)
    gated = kernels.Rows(pairs.rows_max, down.cols)
    gated_q8 = kernels.Activations(pairs.rows_max, down.cols, keep_float=True)
    out = rows_of(before)
    kernels.quantise(pool, rows_of(values), tokens, of_tokens)
    kernels.gather_pairs(pool, of_tokens, pairs, gathered)
    of_gate = None if activation == "relu2" else gate
    kernels.pairs_gated(pool, gathered, of_gate, up, pairs, gated, *biases[:2], activation, limit)
    kernels.quantise_pairs(pool, gated, pairs, gated_q8)
    kernels.pairs_add(pool, gated_q8, down, pairs, out, biases[2])
    return gated, out


def compare_finite(got: F32, want: F32, what: str) -> None:
    """Compare rows whose NaN may have any bits."""
    finite = np.isfinite(want)
    compare(np.isfinite(got), finite, what)
    compare(got[finite], want[finite], what)
