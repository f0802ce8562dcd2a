"""Durations and counts of a lane's steps, for metrics and for the cost model.

Owns the counters of a lane since it started. Times are milliseconds.
"""

from __future__ import annotations

from collections import deque

from prometheus_client import Histogram

from batchengine.engine.lane.steps.inflight import InFlightStep
from batchengine.policy.cost import CostModel, work_of
from batchengine.wire import lane as wire

OBSERVE_ALL = 256  # first steps, all of which the cost model observes
OBSERVE_EVERY = 4  # later it observes one decode step in four: they are all alike
OVERHEAD_GAIN = 0.05
SAMPLES = 6  # of the counters, once a second: speeds are of the last five


class StepMeter:
    """Counters of one lane's steps."""

    def __init__(self, cost: CostModel, seconds: Histogram) -> None:
        """`seconds` observes the worker's time for every step that computes."""
        self.steps = 0
        self.ahead = 0  # of these, sent before the answer to the step before
        self.void = 0  # entries of those whose token was not used
        self.tokens = 0
        self.generated = 0
        self.drafted = 0  # tokens of drafts that were computed,
        self.accepted = 0  # and of these the ones that became tokens of their timeline
        self.recomputed = 0  # tokens that an earlier step had computed, or was sent with
        self.predicted_ms = 0.0
        self.step_ms = 0.0  # of the last step that computed
        self.overhead_ms = 0.0  # time of a step outside the worker, on average
        self.prefill_per_s = self.generated_per_s = 0.0  # tokens of the last seconds
        self.cost = cost
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=SAMPLES)
        self._seconds = seconds
        self._waits: dict[str, tuple[int, float]] = {}
        self._last: tuple[InFlightStep, wire.StepDone] | None = None

    def committed(self, in_flight: InFlightStep, done: wire.StepDone, n_void: int) -> None:
        """Record a committed step, of which `n_void` entries were void."""
        self.steps += 1
        self.ahead += in_flight.is_ahead
        self.void += n_void
        self.recomputed += in_flight.recomputed
        self._last = in_flight, done
        held = [segment for turn, *_ in in_flight.parts for segment in turn.session.kv.held]
        for peer in {segment.peer for segment in held}:
            n_steps, waited_ms = self._waits.get(peer, (0, 0.0))
            self._waits[peer] = n_steps + 1, waited_ms + done.waited_us / 1000

    def take_waits(self) -> dict[str, float]:
        """Average ms that a step with pages at a peer waited, by peer, since the last call.

        A step that waited counts for every peer that it needed.
        """
        waits, self._waits = self._waits, {}
        return {peer: waited_ms / n_steps for peer, (n_steps, waited_ms) in waits.items()}

    def learn(self) -> None:
        """Evaluate the last committed step; called while the worker computes the next one."""
        if self._last is None:
            return
        (in_flight, done), self._last = self._last, None
        entries = in_flight.step.entries
        if not entries:
            return
        self.step_ms = done.elapsed_us / 1000.0
        self.tokens += sum([entry.n_tokens - entry.drafts for entry in entries])
        work = work_of([(entry.start, entry.n_tokens - entry.drafts) for entry in entries])
        drafts = [(entry.start, entry.drafts) for entry in entries if entry.drafts]
        n_scored = sum([entry.scored for entry in entries])
        if drafts:
            if not n_scored:  # else it is not known what takes which part of the time
                self.cost.observe_drafted(work, drafts, self.step_ms)
        elif n_scored:
            self.cost.observe_scored(work, n_scored, self.step_ms)
        elif work.prefill_tokens or self.steps < OBSERVE_ALL or not self.steps % OBSERVE_EVERY:
            self.cost.observe(work, self.step_ms)
        self._seconds.observe(done.elapsed_us / 1e6)
        self.predicted_ms += in_flight.predicted_ms

    def sample(self, now_s: float) -> None:
        """Update the speeds; called once a second."""
        self._samples.append((now_s, self.tokens, self.generated))
        then_s, tokens, generated = self._samples[0]
        if now_s > then_s:
            made, computed = self.generated - generated, self.tokens - tokens
            self.generated_per_s = made / (now_s - then_s)
            self.prefill_per_s = max(0, computed - made) / (now_s - then_s)

    def add_overhead(self, outside_ms: float) -> None:
        """Update `overhead_ms` with the ms of a computing step outside the worker."""
        self.overhead_ms += OVERHEAD_GAIN * (max(0.0, outside_ms) - self.overhead_ms)
