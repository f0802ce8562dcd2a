"""Step time of a lane: a linear model with five coefficients, fitted online from observed steps.

Owns the numbers behind every prediction: `StepCost` (frozen coefficients, what the scheduler
reads), `CostModel` (the fit), `LaneLoad` (what a lane has to do already, summed up) and what is
predicted from it: TTFT and TPOT of a request, and whether KV on disk is read or computed again.
Refuses clocks and policy: times come in as numbers, and what to do about a slow lane is decided
elsewhere.

    step_ms = fixed + prefill_token * prefill tokens + decode_entry * decode entries
            + decode_kv * attended KV tokens of decodes
            + prefill_pair * (query, key) pairs of prefill
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of one lane, milliseconds per unit; all finite and >= 0."""

    fixed_ms: float = 1.0
    prefill_token_ms: float = 1.0
    decode_entry_ms: float = 1.0
    decode_kv_ms: float = 1e-4
    prefill_pair_ms: float = 1e-5

    def predict_ms(self, work: StepWork) -> float:
        """Predicted duration of a step that does `work`."""
        return (
            self.fixed_ms
            + self.prefill_token_ms * work.prefill_tokens
            + self.decode_entry_ms * work.decode_entries
            + self.decode_kv_ms * work.decode_kv_tokens
            + self.prefill_pair_ms * work.prefill_pairs
        )


class StepWork(NamedTuple):
    """What one step computes, as counts."""

    prefill_tokens: int = 0
    decode_entries: int = 0
    decode_kv_tokens: int = 0
    prefill_pairs: float = 0.0


def work_of(entries: Iterable[tuple[int, int]]) -> StepWork:
    """Work of batch entries given as (frontier, n_tokens); an entry of one token is a decode."""
    prefill = decodes = kv = 0
    pairs = 0.0
    for frontier, n in entries:
        if n == 1:
            decodes += 1
            kv += frontier + 1
        else:
            prefill += n
            pairs += n * (frontier + n / 2)
    return StepWork(prefill, decodes, kv, pairs)


def prior_cost(weight_bytes: int, n_params: int, threads: int) -> StepCost:
    """A guess before the first step, from what a CPU core usually does.

    A step reads the weights once (10 GB/s per core, 60 in all); a token costs two operations per
    weight at 150 GOPS per core. Wrong by a factor of three at worst, and forgotten soon.
    """
    read_ms = weight_bytes / (min(60.0, 10.0 * max(1, threads)) * 1e6)
    token_ms = 2.0 * n_params / (150e6 * max(1, threads))
    token_ms = max(token_ms, 1e-4)
    return StepCost(read_ms + 0.1, token_ms, token_ms + 0.01, token_ms / 2e4, token_ms / 2e4)


class CostModel:
    """Fits `StepCost` to observed steps by multiplying coefficients, in proportion to their blame.

    A step that took e times its prediction multiplies every coefficient by a power of e: the
    larger its share of the prediction, the larger the power. So coefficients stay positive,
    five very different units need no common scale, and what a step did not use it does not
    change: an hour of pure decode leaves the cost of prefill alone. Least squares was tried
    first; with positive coefficients it drifts when two features grow together, as prefill
    tokens and pairs do.

    A coefficient moves fast while young and as an average of some GAIN_MIN^-1 steps later. A
    residual is cut at four times the median one: a stolen time slice moves the fit little.
    STREAK such steps in a row on one side are no accident: the lane has changed, and
    everything is young again. Before that, a step that is mostly
    made of what was hardly ever seen sets the scale of all of that: a prior has the right
    proportions and may be wrong by any factor, and a prefill is rare between decodes.
    Deterministic: same observations, same bits.
    """

    GAIN_MIN = 0.02
    MEDIAN_STEP = 1.05  # the median of |error| is tracked by steps of this factor
    LIMIT_MAX = 0.7  # largest pull of an accident, as a logarithm: a factor of two
    LIMIT_CHANGED = 2.3  # a factor of ten
    STREAK = 6
    YOUNG = 2.0  # the first step that a coefficient explains alone ends its youth
    SCALE_MAX = 100.0

    def __init__(self, prior: StepCost) -> None:
        """`prior` coefficients must be positive: zero times anything stays zero."""
        values = _coefficients(prior)
        if not all(math.isfinite(c) and c > 0.0 for c in values):
            raise ValueError(f"a prior coefficient is not positive: {prior}")
        self._age = [1.0] * len(values)  # prediction shares summed up: how much it has learned
        self._median = 0.25
        self._streak = 0.0  # steps beyond the limit in a row, signed by side
        self.cost = prior
        self.steps = 0

    def __repr__(self) -> str:
        return f"<CostModel steps={self.steps} error={self._median:.0%} {self.cost}>"

    @property
    def error_ratio(self) -> float:
        """Median of |log(observed / predicted)| of late, about: 0.1 = ten per cent."""
        return self._median

    def observe(self, work: StepWork, step_ms: float) -> None:
        """Learn from one step. Times that are not positive and finite teach nothing."""
        if not (math.isfinite(step_ms) and step_ms > 0.0):
            return
        self._rescale(work, step_ms)
        predicted_ms = self.cost.predict_ms(work)
        error = math.log(step_ms / predicted_ms)
        limit = self._limit(error)
        step = self.MEDIAN_STEP if abs(error) > self._median else 1.0 / self.MEDIAN_STEP
        self._median = min(1.0, max(0.005, self._median * step))
        self.steps += 1
        self._blame(work, predicted_ms, max(-limit, min(limit, error)))

    def _limit(self, error: float) -> float:
        """How far this step may pull, as a logarithm; far once the lane has changed."""
        limit = min(self.LIMIT_MAX, max(0.2, 4.0 * self._median))
        if abs(error) <= limit:
            self._streak = 0.0
            return limit
        same_side = error * self._streak > 0.0
        self._streak = math.copysign((abs(self._streak) if same_side else 0.0) + 1.0, error)
        if abs(self._streak) < self.STREAK:
            return limit
        self._age = [min(a, 4.0) for a in self._age]
        return self.LIMIT_CHANGED

    def _rescale(self, work: StepWork, step_ms: float) -> None:
        """Bring what was hardly ever seen to the scale of its first steps, all of it together."""
        old = _coefficients(self.cost)
        terms = [value * n for value, n in zip(old, (1.0, *work), strict=True)]
        young = [age < self.YOUNG for age in self._age]
        young_ms = sum(ms for ms, is_young in zip(terms, young, strict=True) if is_young)
        known_ms = sum(terms) - young_ms
        if young_ms < known_ms:
            return
        factor = max(1.0 / self.SCALE_MAX, min(self.SCALE_MAX, (step_ms - known_ms) / young_ms))
        if abs(math.log(factor)) > self.LIMIT_MAX:
            scaled = [v * factor if y else v for v, y in zip(old, young, strict=True)]
            self.cost = StepCost(*(min(COEFFICIENT_MAX, max(COEFFICIENT_MIN, v)) for v in scaled))

    def _blame(self, work: StepWork, predicted_ms: float, error: float) -> None:
        """Spread `error` over the coefficients by their share of the prediction."""
        old = _coefficients(self.cost)
        counts = (1.0, *work)
        shares = [c * n / predicted_ms for c, n in zip(old, counts, strict=True)]
        pull = error / sum(s * s for s in shares)
        new: list[float] = []
        for i, (value, share) in enumerate(zip(old, shares, strict=True)):
            gain = max(self.GAIN_MIN, 1.0 / (1.0 + self._age[i]))
            self._age[i] += share
            value *= math.exp(gain * pull * share)
            new.append(min(COEFFICIENT_MAX, max(COEFFICIENT_MIN, value)))
        self.cost = StepCost(*new)


COEFFICIENT_MIN = 1e-12  # ms; keeps every coefficient alive
COEFFICIENT_MAX = 1e9


def _coefficients(cost: StepCost) -> tuple[float, float, float, float, float]:
    return (
        cost.fixed_ms,
        cost.prefill_token_ms,
        cost.decode_entry_ms,
        cost.decode_kv_ms,
        cost.prefill_pair_ms,
    )


class QueuedWork(NamedTuple):
    """What a waiting session still costs, for `eta_ms`."""

    frontier: int
    to_compute: int
    tokens_left: int  # tokens it may still generate


def eta_ms(
    cost: StepCost, seated: Sequence[QueuedWork], seats_free: int, queue: Sequence[QueuedWork]
) -> float:
    """Milliseconds until the last session of `queue` has its first token; 0 for no queue."""
    etas = etas_ms(cost, seated, seats_free, queue)
    return etas[-1] if etas else 0.0


def etas_ms(
    cost: StepCost, seated: Sequence[QueuedWork], seats_free: int, queue: Sequence[QueuedWork]
) -> list[float]:
    """Milliseconds until each session of `queue`, in order of service, has its first token.

    Seats serve the queue in order; prefills run one after another, each at half the lane while
    decodes run beside it; a seated session decodes to its limit, so this errs on the late side.
    """
    entries = len(seated)
    context = sum(s.frontier for s in seated)
    decode_ms = cost.fixed_ms + cost.decode_entry_ms * entries + cost.decode_kv_ms * context
    prefill_free_ms = 0.0
    seats: list[float] = [0.0] * max(0, seats_free)
    for work in seated:
        ready_ms = 0.0
        if work.to_compute > 1:
            prefill_free_ms += _prefill_ms(cost, work, entries > 1)
            ready_ms = prefill_free_ms
        seats.append(ready_ms + work.tokens_left * decode_ms)
    if not seats:
        return [math.inf] * len(queue)
    heapq.heapify(seats)
    etas: list[float] = []
    for work in queue:
        start_ms = max(heapq.heappop(seats), prefill_free_ms)
        prefill_free_ms = start_ms + _prefill_ms(cost, work, entries > 0)
        heapq.heappush(seats, prefill_free_ms + work.tokens_left * decode_ms)
        etas.append(prefill_free_ms)
    return etas


def _prefill_ms(cost: StepCost, work: QueuedWork, shared: bool) -> float:
    n = work.to_compute
    alone_ms = cost.prefill_token_ms * n + cost.prefill_pair_ms * n * (work.frontier + n / 2)
    return cost.fixed_ms + alone_ms * (2.0 if shared else 1.0)


def retry_after_ms(wait_ms: float) -> int:
    """When to ask again: the predicted wait, between 0.1 s and 60 s, whole milliseconds."""
    return int(min(60_000.0, max(100.0, wait_ms)))


# ---- queueing: what a request will see on a lane ----

RANKS = 4  # classes of promise, 0 = most urgent
QUANTUM_URGENT_MS = 100.0  # how soon a more urgent class may take a seat (scheduler.Policy)


class LaneLoad(msgspec.Struct, frozen=True):
    """What a lane has to do already, summed up: a prediction costs the same at any queue length.

    Every number grows with load, and every prediction grows with every number.
    """

    cost: StepCost = StepCost()
    seats: int = 64
    seated: int = 0
    waiting: int = 0
    chunk_tokens: int = 512
    decodes: int = 0  # sessions that decode now
    step_ms: float = 1.0  # of a step in which everybody here decodes
    prefill_ms: tuple[float, ...] = (0.0,) * RANKS  # [rank] prefill of that rank and more urgent
    seat_ms: tuple[float, ...] = (0.0,) * RANKS  # [rank] until a seat is free for that rank


class LoadRow(NamedTuple):
    """One session of a lane, for `load_of`."""

    rank: int
    frontier: int
    to_compute: int  # 1 = decoding
    tokens_left: int  # it may still generate
    seated: bool


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Milliseconds from now to the first token, and per later token."""

    ttft_ms: float
    tpot_ms: float


def load_of(
    cost: StepCost, seats: int, chunk_tokens: int, rows: Iterable[LoadRow], paused: int = 0
) -> LaneLoad:
    """Sum up the sessions of a lane; `paused` seated ones hold no seat worth waiting for."""
    prefill = [0.0] * RANKS
    seated, waiting = [0] * RANKS, [0] * RANKS
    decodes = context = left = 0
    contexts: list[int] = []  # of those who wait
    for rank, frontier, to_compute, tokens_left, is_seated in rows:
        (seated if is_seated else waiting)[rank] += 1
        if to_compute > 1:
            prefill[rank] += prefill_ms(cost, frontier, to_compute)
        elif is_seated:
            decodes += 1
        left += tokens_left
        if is_seated:
            context += frontier + to_compute
        else:
            contexts.append(frontier + to_compute)
    n_seated, n_waiting = sum(seated), sum(waiting)
    free = max(0, seats - n_seated + paused)
    context += sum(heapq.nlargest(free, contexts))  # they will be seated next
    entries = min(max(seats, n_seated), n_seated + n_waiting)
    step_ms = cost.fixed_ms + cost.decode_entry_ms * entries + cost.decode_kv_ms * context
    # Between two seats that become free: the mean answer, as many at once as there are seats.
    turnover_ms = left / max(1, n_seated + n_waiting) * step_ms / max(1, entries)
    return LaneLoad(
        cost,
        seats,
        n_seated,
        n_waiting,
        chunk_tokens,
        decodes,
        step_ms,
        tuple(sum(prefill[: rank + 1]) for rank in range(RANKS)),
        tuple(_seat_ms(rank, free, seated, waiting, turnover_ms) for rank in range(RANKS)),
    )


def _seat_ms(
    rank: int, free: int, seated: Sequence[int], waiting: Sequence[int], turnover_ms: float
) -> float:
    """Until a session of `rank` that joins now gets a seat: a free one, a taken one, a left one."""
    ahead = sum(waiting[: rank + 1])
    if ahead < free:
        return 0.0
    lacking = ahead - free - sum(seated[rank + 1 :]) + 1
    return QUANTUM_URGENT_MS + max(0, lacking) * turnover_ms


def prefill_ms(cost: StepCost, frontier: int, n_tokens: int) -> float:
    """Time of `n_tokens` prefill tokens after `frontier`, without what a step costs anyway."""
    pairs = n_tokens * (frontier + n_tokens / 2)
    return cost.prefill_token_ms * n_tokens + cost.prefill_pair_ms * pairs


def predict(load: LaneLoad, rank: int, frontier: int, n_tokens: int, tokens_out: int) -> Prediction:
    """What a request of `rank` will see that joins now and computes `n_tokens` from `frontier`.

    Prefill runs at half the lane beside others, who decode by then if they do not yet. What is
    to prefill delays later tokens too, spread over the answer and at most as much per token as
    the decodes themselves take.
    """
    cost, step_ms = load.cost, load.step_ms
    pairs = n_tokens * (frontier + n_tokens / 2)
    own_ms = cost.prefill_token_ms * n_tokens + cost.prefill_pair_ms * pairs
    work_ms = own_ms + load.prefill_ms[rank]
    if load.seated or load.waiting:
        work_ms += work_ms + step_ms
    else:
        work_ms += cost.fixed_ms * (1 + n_tokens // load.chunk_tokens)
    kv_tokens = frontier + n_tokens + tokens_out / 2
    decode_ms = step_ms + cost.decode_entry_ms + cost.decode_kv_ms * kv_tokens
    beside_ms = load.prefill_ms[-1] / (tokens_out or 1)
    return Prediction(
        load.seat_ms[rank] + work_ms,
        decode_ms + (beside_ms if beside_ms < decode_ms else decode_ms),
    )


def wait_ms(load: LaneLoad, rank: int) -> float:
    """How long a request of `rank` waits before its own work begins: a seat, and who is first."""
    ahead_ms = load.prefill_ms[rank]
    return load.seat_ms[rank] + 2.0 * ahead_ms


def joined(load: LaneLoad, rank: int, frontier: int, n_tokens: int) -> LaneLoad:
    """`load` after one more session has joined the queue: exact sums come with the next look."""
    own_ms = prefill_ms(load.cost, frontier, n_tokens)
    ahead = load.prefill_ms
    sums = tuple(ahead[r] + own_ms if r >= rank else ahead[r] for r in range(RANKS))
    return msgspec.structs.replace(load, waiting=load.waiting + 1, prefill_ms=sums)


# ---- load, recompute or share ----


class RestorePlan(NamedTuple):
    """What to do about KV that is published but has not been read since start."""

    choice: str  # "share": nothing to read; "load"; "recompute"
    tokens: int  # whose KV it is about
    load_ms: float
    recompute_ms: float
    reason: str


def plan_restore(
    cost: StepCost,
    *,
    tokens: int,
    cold_tokens: int,
    cold_bytes: int,
    read_bytes_per_s: float,
    queued_bytes: int = 0,
    decodes: int = 0,
    margin: float = 1.25,
) -> RestorePlan:
    """Read and verify `cold_bytes`, or compute the last `cold_tokens` of `tokens` again.

    `tokens` are the leading tokens the store has pages for; of those the last `cold_tokens` are
    not in memory yet. `read_bytes_per_s` was measured; 0 = never, then reading is tried. Reading
    is preferred unless it is `margin` times slower: it takes no compute from other sessions.
    """
    if cold_tokens <= 0:
        return RestorePlan("share", tokens, 0.0, 0.0, "the pages are in memory")
    share = 2.0 if decodes else 1.0
    recompute_ms = share * prefill_ms(cost, tokens - cold_tokens, cold_tokens)
    if not (math.isfinite(read_bytes_per_s) and read_bytes_per_s > 0.0):
        return RestorePlan("load", tokens, 0.0, recompute_ms, "reading was never measured")
    load_ms = (cold_bytes + queued_bytes) * 1000.0 / read_bytes_per_s
    if load_ms > margin * recompute_ms:
        return RestorePlan("recompute", tokens, load_ms, recompute_ms, "computing is faster")
    return RestorePlan("load", tokens, load_ms, recompute_ms, "reading is faster")
