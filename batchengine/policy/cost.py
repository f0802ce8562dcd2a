"""Step time of a lane: a linear model with five coefficients, fitted online from observed steps.

Owns every prediction: `StepCost` (frozen coefficients, which the scheduler reads), `CostModel` (the
fit), `LaneLoad` (sums of a lane's queued work), TTFT and TPOT of a request, and whether KV on disk
is read or computed again. Reads no clock and sets no policy: times are arguments, and the router
and the scheduler act on the predictions.

    step_ms = fixed + prefill_token * prefill tokens + decode_entry * decode entries
            + decode_kv * attended KV tokens of decodes
            + prefill_pair * (query, key) pairs of prefill
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec


class StepCost(NamedTuple):
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


class LinkSpeed(NamedTuple):
    """A link to another daemon, in one direction."""

    bytes_per_ms: float
    latency_ms: float = 0.0


class StepWork(NamedTuple):
    """Work of one step, as counts."""

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


class CostModel:
    """Fits `StepCost` to observed steps by multiplying coefficients by powers of the error.

    A step that took e times its prediction multiplies every coefficient by a power of e: the
    larger its share of the prediction, the larger the power. So coefficients stay positive, five
    very different units need no common scale, and a step changes only coefficients of work that
    it did: an hour of pure decode does not change the cost of prefill. Least squares with positive
    coefficients would drift when two features grow together, as prefill tokens and pairs do.

    The age of a coefficient is 1 plus the sum of its shares. It moves fast at a low age, later as
    an average of about 1 / GAIN_MIN steps. An error is clipped at four times the median one, so
    that a stolen time slice moves the fit little. STREAK clipped errors in a row on one side mean
    that the lane has changed: ages are reduced. A step whose prediction is mostly due to *young*
    coefficients (age below YOUNG) first scales all of these by one factor, since a prior has the
    right proportions but may be wrong by any factor. Deterministic: same observations, same bits.
    """

    GAIN_MIN = 0.02
    MEDIAN_STEP = 1.05  # the median of |error| is tracked by steps of this factor
    LIMIT_MAX = 0.7  # clip of a single error, as a logarithm: a factor of two
    LIMIT_CHANGED = 2.3  # clip after a streak: a factor of ten
    STREAK = 6
    YOUNG = 2.0  # ends after the first step that a coefficient explains alone
    SCALE_MAX = 100.0
    SCORED_GAIN = 0.25
    SCORED_CHANGE_MAX = 2.0  # factor of one step
    DRAFT_SHARE = 0.1  # prior of `draft_share`
    DRAFT_GAIN, DRAFT_GAIN_BACK = 0.05, 0.005
    DRAFT_SHARE_MIN, DRAFT_SHARE_MAX = 0.005, 1.0

    def __init__(self, prior: StepCost) -> None:
        """Raises ValueError unless all coefficients of `prior` are positive: 0 would stay 0."""
        self._age = [1.0] * len(prior)  # sum of prediction shares, per coefficient
        self.error_ratio = 0.25  # estimated median of |log(observed / predicted)|
        self._streak = 0.0  # steps beyond the limit in a row, signed by side
        self.steps = 0
        self._scored_token_ms = 0.0  # more than of other tokens of prompts; 0 = not known
        self.draft_share = self.DRAFT_SHARE  # of a step of one decode, per token of its draft
        self.assume(prior)

    def assume(self, prior: StepCost) -> None:
        """Begin with another prior, unless steps were observed."""
        if not all(math.isfinite(c) and c > 0.0 for c in prior):
            raise ValueError(f"a prior coefficient is not positive: {prior}")
        if not self.steps:
            self.cost = prior

    def __repr__(self) -> str:
        return f"<CostModel steps={self.steps} error={self.error_ratio:.0%} {self.cost}>"

    @property
    def scored_cost(self) -> StepCost:
        """`cost` for a session that wants the log-probabilities of its prompt. Until a step with
        some was observed, their tokens take twice the time of others."""
        return self.cost._replace(prefill_token_ms=self.cost.prefill_token_ms + self.scored_ms(1))

    def scored_ms(self, n_tokens: int) -> float:
        """What tokens of a prompt take besides `cost` if their log-probabilities are wanted."""
        return n_tokens * (self._scored_token_ms or self.cost.prefill_token_ms)

    def observe_scored(self, work: StepWork, n_scored: int, step_ms: float) -> None:
        """Learn from a step in which log-probabilities of `n_scored` tokens of prompts were
        computed: what it took besides the prediction. The coefficients stay."""
        if not (math.isfinite(step_ms) and step_ms > 0.0):
            return
        known_ms = self._scored_token_ms or self.cost.prefill_token_ms
        found_ms = max(0.0, step_ms - self.cost.predict_ms(work)) / n_scored
        found_ms = min(found_ms, self.SCORED_CHANGE_MAX * known_ms)
        known_ms += self.SCORED_GAIN * (found_ms - known_ms)
        self._scored_token_ms = max(COEFFICIENT_MIN, known_ms)

    def draft_ms(self, frontier: int) -> float:
        """What each token of a draft adds to a step that decodes a session at `frontier`."""
        return self.draft_share * (self.cost.fixed_ms + entry_ms(self.cost, frontier, 1))

    def observe_drafted(
        self, work: StepWork, drafts: Iterable[tuple[int, int]], step_ms: float
    ) -> None:
        """Learn from a step with drafts, given as (frontier, n_tokens), besides `work`.

        What a step of decodes took besides the prediction is due to them; of one with prefill their
        predicted time is taken off.
        """
        ms = sum([n * self.draft_ms(frontier) for frontier, n in drafts])
        if not (math.isfinite(step_ms) and step_ms > 0.0):
            return
        if work.prefill_tokens:
            self.observe(work, step_ms - ms)
            return
        found = self.draft_share * (step_ms - self.cost.predict_ms(work)) / ms
        found = min(self.DRAFT_SHARE_MAX, max(self.DRAFT_SHARE_MIN, found))
        self.draft_share += self.DRAFT_GAIN * (found - self.draft_share)

    def no_draft_paid(self) -> None:
        """No draft of a step was worth its time: what they take is not learnt, so it moves back to
        the prior."""
        self.draft_share += self.DRAFT_GAIN_BACK * (self.DRAFT_SHARE - self.draft_share)

    def observe(self, work: StepWork, step_ms: float) -> None:
        """Learn from one step. Times that are not positive and finite are ignored."""
        if not (math.isfinite(step_ms) and step_ms > 0.0):
            return
        self._rescale(work, step_ms)
        predicted_ms = self.cost.predict_ms(work)
        error = math.log(step_ms / predicted_ms)
        limit = self._limit(error)
        step = self.MEDIAN_STEP if abs(error) > self.error_ratio else 1.0 / self.MEDIAN_STEP
        self.error_ratio = min(1.0, max(0.005, self.error_ratio * step))
        self.steps += 1
        self._blame(work, predicted_ms, max(-limit, min(limit, error)))

    def _limit(self, error: float) -> float:
        """Return the clip of this step's error, as a logarithm; it is large after a streak."""
        limit = min(self.LIMIT_MAX, max(0.2, 4.0 * self.error_ratio))
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
        """Scale all young coefficients by one factor, if they are most of the prediction."""
        old = tuple(self.cost)
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
        old = tuple(self.cost)
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


COEFFICIENT_MIN = 1e-12  # ms; positive, since a coefficient of 0 would stay 0
COEFFICIENT_MAX = 1e9


class QueuedWork(NamedTuple):
    """Remaining work of one session, in tokens, for `etas_ms`."""

    frontier: int
    to_compute: int
    tokens_left: int  # tokens it may still generate
    scored_ms: float = 0.0  # for the log-probabilities of its prompt


def etas_ms(
    cost: StepCost, seated: Sequence[QueuedWork], seats_free: int, queue: Iterable[QueuedWork]
) -> list[float]:
    """Milliseconds until each session of `queue`, in order of service, has its first token.

    Assumes that prefills run one after another, at half speed while decodes run beside them, and
    that a seated session generates up to its limit, so the result is late rather than early.
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
        return [math.inf for _ in queue]
    heapq.heapify(seats)
    etas: list[float] = []
    for work in queue:
        start_ms = max(heapq.heappop(seats), prefill_free_ms)
        prefill_free_ms = start_ms + _prefill_ms(cost, work, entries > 0)
        heapq.heappush(seats, prefill_free_ms + work.tokens_left * decode_ms)
        etas.append(prefill_free_ms)
    return etas


def _prefill_ms(cost: StepCost, work: QueuedWork, shared: bool) -> float:
    alone_ms = prefill_ms(cost, work.frontier, work.to_compute) + work.scored_ms
    return cost.fixed_ms + alone_ms * (2.0 if shared else 1.0)


def retry_after_ms(wait_ms: float) -> int:
    """Return the delay of a retry: the predicted wait, in 100 .. 60000 whole milliseconds."""
    return int(min(60_000.0, max(100.0, wait_ms)))


# ---- queueing: predicted times of a request on a lane ----

RANKS = 4  # SLA classes, 0 = most urgent
QUANTUM_URGENT_MS = 100.0  # how soon a more urgent class may take a seat (scheduler.Policy)


class LaneLoad(msgspec.Struct, frozen=True):
    """Sums of a lane's queued work, so that a prediction costs the same at any queue length.

    Every number grows with load, and every prediction grows with every number.
    """

    cost: StepCost = StepCost()
    seats: int = 64
    seated: int = 0
    waiting: int = 0
    chunk_tokens: int = 512
    decodes: int = 0  # sessions that decode now
    step_ms: float = 1.0  # of a step in which all seats decode
    prefill_ms: tuple[float, ...] = (0.0,) * RANKS  # [rank] prefill of that rank and more urgent
    seat_ms: tuple[float, ...] = (0.0,) * RANKS  # [rank] until a seat is free for that rank
    stage_ms: float = 0.0  # stages of pipelines, which get as long as the lane's steps meanwhile


class LoadRow(NamedTuple):
    """One session of a lane, for `load_of`."""

    rank: int
    frontier: int
    to_compute: int  # 1 = decoding
    tokens_left: int  # it may still generate
    seated: bool
    scored_ms: float = 0.0  # for the log-probabilities of its prompt


class Prediction(msgspec.Struct, frozen=True, gc=False):
    """Milliseconds from now to the first token, and per later token."""

    ttft_ms: float
    tpot_ms: float


def load_of(
    cost: StepCost,
    seats: int,
    chunk_tokens: int,
    rows: Iterable[LoadRow],
    stage_ms: float = 0.0,
) -> LaneLoad:
    """Sum up the sessions of a lane. Paused ones are no rows: their seats count as free."""
    prefill = [0.0] * RANKS
    seated, waiting = [0] * RANKS, [0] * RANKS
    decodes = context = left = 0
    contexts: list[int] = []  # of waiting sessions
    for rank, frontier, to_compute, tokens_left, is_seated, scored_ms in rows:
        (seated if is_seated else waiting)[rank] += 1
        if to_compute > 1:
            prefill[rank] += prefill_ms(cost, frontier, to_compute) + scored_ms
        elif is_seated:
            decodes += 1
        left += tokens_left
        if is_seated:
            context += frontier + to_compute
        else:
            contexts.append(frontier + to_compute)
    n_seated, n_waiting = sum(seated), sum(waiting)
    free = max(0, seats - n_seated)
    context += sum(heapq.nlargest(free, contexts))  # at most those seated next
    entries = min(max(seats, n_seated), n_seated + n_waiting)
    step_ms = cost.fixed_ms + cost.decode_entry_ms * entries + cost.decode_kv_ms * context
    # Between two seats that become free: the mean remaining answer over the number of seats.
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
        stage_ms,
    )


def _seat_ms(
    rank: int, free: int, seated: Sequence[int], waiting: Sequence[int], turnover_ms: float
) -> float:
    """Predict the ms until a session that joins now gets a seat: free, displaced or left."""
    ahead = sum(waiting[: rank + 1])
    if ahead < free:
        return 0.0
    lacking = ahead - free - sum(seated[rank + 1 :]) + 1
    return QUANTUM_URGENT_MS + max(0, lacking) * turnover_ms


def prefill_ms(cost: StepCost, frontier: int, n_tokens: int) -> float:
    """Time of `n_tokens` prefill tokens after `frontier`, without the fixed cost of a step."""
    pairs = n_tokens * (frontier + n_tokens / 2)
    return cost.prefill_token_ms * n_tokens + cost.prefill_pair_ms * pairs


def entry_ms(cost: StepCost, frontier: int, n: int) -> float:
    """Time in ms that the next `n` tokens of one session add to a step."""
    if n == 1:
        return cost.decode_entry_ms + cost.decode_kv_ms * (frontier + 1)
    return prefill_ms(cost, frontier, n)


def tokens_in(cost: StepCost, frontier: int, ms: float) -> int:
    """Return the most tokens whose `entry_ms` is at most `ms`: a root of a quadratic equation."""
    if ms <= 0.0:
        return 0
    half = cost.prefill_pair_ms / 2
    linear = cost.prefill_token_ms + cost.prefill_pair_ms * frontier
    root = linear + math.sqrt(linear * linear + 4 * half * ms)
    return int(min(2 * ms / root, 1e9)) if root > 0.0 else 1_000_000_000


def predict(load: LaneLoad, rank: int, frontier: int, n_tokens: int, tokens_out: int) -> Prediction:
    """Predict TTFT and TPOT of a request that joins now and computes `n_tokens` from `frontier`.

    Prefill runs at half speed beside other sessions, which are assumed to decode, and the lane at
    half speed beside stages, as long as there are some. Queued prefill and stages delay later
    tokens too: spread over the answer, and at most by the time of a decode per token.
    """
    cost, step_ms = load.cost, load.step_ms
    work_ms = prefill_ms(cost, frontier, n_tokens) + load.prefill_ms[rank]
    if load.seated or load.waiting:
        work_ms += work_ms + step_ms
    else:
        work_ms += cost.fixed_ms * (1 + n_tokens // load.chunk_tokens)
    work_ms += min(work_ms, load.stage_ms)
    kv_tokens = frontier + n_tokens + tokens_out / 2
    decode_ms = step_ms + cost.decode_entry_ms + cost.decode_kv_ms * kv_tokens
    beside_ms = (load.prefill_ms[-1] + load.stage_ms) / (tokens_out or 1)
    return Prediction(
        load.seat_ms[rank] + work_ms,
        decode_ms + (beside_ms if beside_ms < decode_ms else decode_ms),
    )


def wait_ms(load: LaneLoad, rank: int) -> float:
    """Predict the ms before a request's own work begins: for a seat, and for prefill before it."""
    ahead_ms = 2.0 * load.prefill_ms[rank]
    return load.seat_ms[rank] + ahead_ms + min(ahead_ms, load.stage_ms)


def joined(
    load: LaneLoad, rank: int, frontier: int, n_tokens: int, scored_ms: float = 0.0
) -> LaneLoad:
    """Return an estimate of `load` after one more session has joined, until the next `load_of`."""
    own_ms = prefill_ms(load.cost, frontier, n_tokens) + scored_ms
    ahead = load.prefill_ms
    sums = tuple(ahead[r] + own_ms if r >= rank else ahead[r] for r in range(RANKS))
    return msgspec.structs.replace(load, waiting=load.waiting + 1, prefill_ms=sums)


def without(load: LaneLoad, row: LoadRow) -> LaneLoad:
    """Return an estimate of `load` without one of its sessions. The seat of one that has one is
    free for it."""
    own_ms = 0.0
    if row.to_compute > 1:
        own_ms = prefill_ms(load.cost, row.frontier, row.to_compute) + row.scored_ms
    context = row.frontier + row.to_compute
    decode_ms = load.cost.decode_entry_ms + load.cost.decode_kv_ms * context
    computes = row.seated or load.seated + load.waiting <= load.seats
    step_ms = load.step_ms - decode_ms if computes else load.step_ms
    ahead = load.prefill_ms
    return msgspec.structs.replace(
        load,
        seated=max(0, load.seated - row.seated),
        waiting=max(0, load.waiting - (not row.seated)),
        decodes=max(0, load.decodes - (row.seated and row.to_compute <= 1)),
        step_ms=max(load.cost.fixed_ms, step_ms),
        prefill_ms=tuple(max(0.0, ahead[r] - own_ms * (r >= row.rank)) for r in range(RANKS)),
        seat_ms=(0.0,) * RANKS if row.seated else load.seat_ms,
    )


# ---- load, recompute or share ----


RESTORE_MARGIN = 1.25  # reading may take this times as long as computing


class RestorePlan(NamedTuple):
    """Decision on KV that is published but has not been read since start."""

    choice: str  # "share": nothing to read; "load"; "recompute"
    tokens: int  # leading tokens that the store has pages for
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
) -> RestorePlan:
    """Decide whether to read `cold_bytes`, or to recompute the last `cold_tokens` of `tokens`.

    `tokens` are the leading tokens the store has pages for; of those the last `cold_tokens` are
    not in memory yet. `read_bytes_per_s` 0 = not measured: then reading is chosen. Reading is
    preferred unless it is RESTORE_MARGIN times slower: it takes no compute time from others.
    """
    if cold_tokens <= 0:
        return RestorePlan("share", tokens, 0.0, 0.0, "the pages are in memory")
    share = 2.0 if decodes else 1.0
    recompute_ms = share * prefill_ms(cost, tokens - cold_tokens, cold_tokens)
    if not (math.isfinite(read_bytes_per_s) and read_bytes_per_s > 0.0):
        return RestorePlan("load", tokens, 0.0, recompute_ms, "reading was never measured")
    load_ms = (cold_bytes + queued_bytes) * 1000.0 / read_bytes_per_s
    if load_ms > RESTORE_MARGIN * recompute_ms:
        return RestorePlan("recompute", tokens, load_ms, recompute_ms, "computing is faster")
    return RestorePlan("load", tokens, load_ms, recompute_ms, "reading is faster")
