"""Discrete-event simulations of a pipeline and of a ring, independent of their closed forms.

Every daemon and every link has a queue and serves one item at a time. In the pipeline a link sends
hidden states before KV, which goes in pieces, so that a hidden state never waits long. In the ring
every message of one layer is an item: the query and the accumulators of each head group.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batchengine.policy.cost import LinkSpeed
from batchengine.policy.linked.pipeline import PipelineStage, PrefillWork, PromptWork, StageTimes
from batchengine.policy.linked.ring import RingHolder, RingShape

PIECES = 8  # of the KV of one chunk, on its way to the owner


@dataclass
class Clock:
    """Events in order of time."""

    now_ms: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0

    def at(self, ms: float, call: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (ms, self.count, call))

    def run(self) -> None:
        while self.events:
            self.now_ms, _, call = heapq.heappop(self.events)
            call()


@dataclass
class Server:
    """One stage or link: it serves one item at a time, the lowest priority number first."""

    clock: Clock
    is_busy: bool = False
    queue: list[tuple[int, int, float, Callable[[], None]]] = field(default_factory=list)

    def put(self, ms: float, done: Callable[[], None], priority: int = 0) -> None:
        self.clock.count += 1
        heapq.heappush(self.queue, (priority, self.clock.count, ms, done))
        self._next()

    def _next(self) -> None:
        if self.is_busy or not self.queue:
            return
        _, _, ms, done = heapq.heappop(self.queue)
        self.is_busy = True

        def end() -> None:
            self.is_busy = False
            done()
            self._next()

        self.clock.at(self.clock.now_ms + ms, end)


@dataclass(frozen=True)
class Simulated:
    """What happened, in ms."""

    makespan_ms: float
    arrived_ms: float


def chunks_of(prompt: PromptWork, chunk_tokens: int) -> list[PrefillWork]:
    """Every chunk of the prompt, in order."""
    found: list[PrefillWork] = []
    for start in range(0, prompt.n_tokens, chunk_tokens):
        n = min(chunk_tokens, prompt.n_tokens - start)
        found.append(PrefillWork(1, n, n * (prompt.frontier + start + n / 2)))
    return found


def pipeline(stages: Sequence[PipelineStage], prompt: PromptWork, chunk_tokens: int) -> Simulated:
    """Run the chunks of `prompt` through `stages`."""
    clock = Clock()
    work = chunks_of(prompt, chunk_tokens)
    computing = [Server(clock) for _ in stages]
    links = [Server(clock) for _ in stages]  # to the next stage
    pushes: list[Server] = []  # to the owner; the same link if the next stage is the owner
    shared: list[bool] = []
    for index in range(len(stages)):
        onward = index + 1 < len(stages)
        to_owner = onward and stages[index + 1].push is None
        pushes.append(links[index] if to_owner else Server(clock))
        shared.append(to_owner)
    done_ms = arrived_ms = 0.0

    def arrive(k: int, chunk: int) -> None:
        computing[k].put(stages[k].compute.of(work[chunk]), lambda: computed(k, chunk))

    def computed(k: int, chunk: int) -> None:
        nonlocal done_ms, arrived_ms
        stage = stages[k]
        if stage.onward is not None:
            link: StageTimes = stage.onward

            def send() -> None:
                clock.at(clock.now_ms + link.delay_ms, lambda: arrive(k + 1, chunk))

            links[k].put(link.of(work[chunk]), send)
        else:
            done_ms = clock.now_ms
        if (push := stage.push) is not None:
            kv = push
            if shared[k] and stage.onward is not None:
                kv = push._replace(token_ms=push.token_ms - stage.onward.token_ms)
            delay_ms = push.delay_ms
            for _ in range(PIECES):
                pushes[k].put(kv.of(work[chunk]) / PIECES, lambda: sent(delay_ms), priority=1)

    def sent(delay_ms: float) -> None:
        nonlocal arrived_ms
        arrived_ms = max(arrived_ms, clock.now_ms + delay_ms)

    for chunk in range(len(work)):
        arrive(0, chunk)
    clock.run()
    return Simulated(done_ms, max(done_ms, arrived_ms))


def ring(
    shape: RingShape,
    holders: Sequence[RingHolder],
    home: LinkSpeed,
    own_tokens: int,
    own_kv_token_ms: float,
) -> float:
    """Milliseconds of attention of one token of a session, over all layers."""
    clock = Clock()
    units = shape.kv_heads
    per_unit = 1.0 / (shape.layers * shape.kv_heads)
    speeds = [*(holder.link for holder in holders), home]
    links = [Server(clock) for _ in speeds]
    computing = {holder.name: Server(clock) for holder in holders}
    own_ms = own_tokens * own_kv_token_ms * per_unit
    partial = {(j, unit): False for j in range(len(holders)) for unit in range(units)}
    accumulators = {key: key[0] == 0 for key in partial}
    ends = [0.0] * units

    def send(j: int, n_bytes: int, then: Callable[[], None]) -> None:
        def gone() -> None:
            clock.at(clock.now_ms + speeds[j].latency_ms, then)

        links[j].put(n_bytes / speeds[j].bytes_per_ms, gone)

    def query(j: int, unit: int) -> None:
        if j + 1 < len(holders):
            send(j + 1, shape.query_bytes, lambda: query(j + 1, unit))
        holder = holders[j]

        def begin() -> None:
            ms = holder.tokens * holder.kv_token_ms * per_unit
            computing[holder.name].put(ms, lambda: attended(j, unit))

        clock.at(clock.now_ms + holder.wait_ms, begin)

    def attended(j: int, unit: int) -> None:
        partial[j, unit] = True
        fold(j, unit)

    def arrived(j: int, unit: int) -> None:
        if j == len(holders):
            ends[unit] = max(clock.now_ms, (unit + 1) * own_ms)
        else:
            accumulators[j, unit] = True
            fold(j, unit)

    def fold(j: int, unit: int) -> None:
        if partial[j, unit] and accumulators[j, unit]:
            send(j + 1, shape.accumulator_bytes, lambda: arrived(j + 1, unit))

    def begin(unit: int) -> None:
        send(0, shape.query_bytes, lambda: query(0, unit))

    for unit in range(units):
        begin(unit)
    clock.run()
    assert min(ends) > 0.0
    return max(*ends, units * own_ms) * shape.layers
