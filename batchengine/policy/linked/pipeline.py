"""Pipeline prefill: which layers of a model each of several daemons computes, and how long that
takes.

Owns the choice of stages, their order, their layers and the chunk, as one pure function over
measured speeds, and the closed form of the times. A chunk of n tokens after p others takes on a
stage

    layers * (chunk + token * n + pair * n * (p + n / 2))   milliseconds,

so all chunks of a prompt take a sum that depends on their counts alone (`PrefillWork`).
Chunks pass the stages in one order, and each stage and each link between two stages has one of
them at a time. The last chunk leaves the last stage at the end of the longest path through all
(stage or link, chunk). `times` takes the longest of the paths that go on to the next stage at the
first or last chunk of a block only, where a block is one of BLOCKS equal parts of the chunks: it is
exact where one stage is the slowest for all chunks, never too late, and too early by less than
EARLY_MAX where the slowest stage changes along a prompt, since daemons have different costs of
attention. tests/policy/test_pipeline.py compares it with a simulation.

The KV of each stage goes to the session's daemon while later chunks are computed; what remains to
be sent when the last chunk is computed is the exposed time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from batchengine.policy.cost import LinkSpeed

CHUNKS = (32, 64, 128, 256, 512, 1024)  # tokens; a CPU computes at full speed from about 64 on
BLOCKS = 8
EARLY_MAX = 0.05  # of a predicted time
Matrix = npt.NDArray[np.float64]


class PipelineModel(NamedTuple):
    """What the planner knows of a model, whose layers are all alike."""

    n_layers: int
    kv_bytes: int  # of one token in one layer
    hidden_bytes: int  # of one token, between two layers


class StageHost(NamedTuple):
    """One daemon that could be a stage, and its measured times of one layer in milliseconds."""

    name: str
    chunk_ms: float  # of any chunk: mostly reading the weights
    token_ms: float
    pair_ms: float  # of a token and a position that it attends to


Links = Mapping[tuple[str, str], LinkSpeed]  # by (from, to)


class PromptWork(NamedTuple):
    """Tokens of a prompt to compute: `n_tokens` from `frontier` on."""

    frontier: int
    n_tokens: int


class PrefillWork(NamedTuple):
    """Work of some chunks, as counts."""

    chunks: int
    tokens: int
    pairs: float


class StageTimes(NamedTuple):
    """Cost of a stage or link per unit of `PrefillWork`, and a delay that chunks pass side by
    side."""

    chunk_ms: float
    token_ms: float
    pair_ms: float
    delay_ms: float = 0.0

    def of(self, work: PrefillWork) -> float:
        """Milliseconds for which `work` keeps the stage or link, without the delay."""
        chunks, tokens, pairs = work
        return self.chunk_ms * chunks + self.token_ms * tokens + self.pair_ms * pairs


class PipelineStage(NamedTuple):
    """One stage of a plan: layers [first, end).

    `onward` is the link to the next stage (None: this is the last one), `push` the link to the
    session's daemon with all that it carries (None: this is that daemon).
    """

    name: str
    first: int
    end: int
    compute: StageTimes
    onward: StageTimes | None
    push: StageTimes | None


class PipelineTimes(NamedTuple):
    """Predicted times of a prefill. `makespan_ms`: until the last chunk is computed; `exposed_ms`:
    from then until the session's daemon has all KV."""

    makespan_ms: float
    exposed_ms: float
    longest_ms: float  # all chunks on the slowest stage or link

    @property
    def total_ms(self) -> float:
        """Until the session can decode."""
        return self.makespan_ms + self.exposed_ms


class PipelinePlan(msgspec.Struct, frozen=True):
    """Stages in order, and how a prompt goes through them: in chunks of at most `chunk_tokens`."""

    stages: tuple[PipelineStage, ...]
    chunk_tokens: int
    times: PipelineTimes


def plan(
    hosts: Sequence[StageHost],
    links: Links,
    owner: str,
    model: PipelineModel,
    prompt: PromptWork,
) -> PipelinePlan | None:
    """Plan the prefill of a prompt for the daemon `owner`; None = no stages have all links.

    Any subset of `hosts` in any order may be the stages, if there are links between neighbours
    and from each to the owner; a plan of one stage is legal. For each subset and last stage the
    layers and the order minimise the longest work of a stage (`_Search`), then the least total
    time decides. Any other pipeline of N stages whose chunks have 1/C of the tokens each takes at
    least C / (C + 2N - 2) times as long. Takes 5 to 50 ms for two to four hosts, and about three
    times as long with each further one.
    """
    found: list[PipelinePlan] = []
    sizes = [size for size in CHUNKS if size < 2 * prompt.n_tokens] or [CHUNKS[0]]
    for size in sizes:
        blocks = blocks_of(prompt, size)
        for stages in _Search(hosts, links, owner, model, total_of(blocks)).candidates():
            found.append(PipelinePlan(stages, size, times(stages, blocks)))
    return min(found, key=_order, default=None)


class Block(NamedTuple):
    """Some chunks in a row: all of them, the first one and the last one."""

    total: PrefillWork
    first: PrefillWork
    last: PrefillWork


def blocks_of(prompt: PromptWork, chunk_tokens: int, count: int = BLOCKS) -> list[Block]:
    """Count the work of a prompt that is computed in chunks, as at most `count` blocks of about
    equally many chunks."""
    n_chunks = -(-prompt.n_tokens // chunk_tokens)
    size = -(-n_chunks // count)
    return [
        Block(
            _work(prompt, chunk_tokens, at, min(at + size, n_chunks)),
            _work(prompt, chunk_tokens, at, at + 1),
            _work(prompt, chunk_tokens, min(at + size, n_chunks) - 1, min(at + size, n_chunks)),
        )
        for at in range(0, n_chunks, size)
    ]


def _work(prompt: PromptWork, chunk_tokens: int, first: int, end: int) -> PrefillWork:
    """The work of the prompt's chunks [first, end)."""
    start = first * chunk_tokens
    n = min(end * chunk_tokens, prompt.n_tokens) - start
    return PrefillWork(end - first, n, n * (prompt.frontier + start + n / 2))


def total_of(blocks: Iterable[Block]) -> PrefillWork:
    """Sum the work of blocks."""
    return PrefillWork(*map(sum, zip(*(block.total for block in blocks), strict=True)))


def times(
    stages: Sequence[PipelineStage], blocks: Sequence[Block], slowdown: Sequence[float] = ()
) -> PipelineTimes:
    """Predict the times of `blocks`. `slowdown`: a factor for each stage's computing, >= 1."""
    parts: list[tuple[StageTimes, float, StageTimes | None]] = []
    for index, stage in enumerate(stages):
        parts.append((stage.compute, slowdown[index] if slowdown else 1.0, stage.push))
        if stage.onward is not None:
            parts.append((stage.onward, 1.0, None))
    runs = [0.0] * len(parts)  # time for which each part is kept
    ends = [0.0] * len(parts)  # of the latest chunk
    sent = [0.0] * len(parts)  # when its KV has left
    for total, first, last in blocks:
        come = done = 0.0  # the block's first and last chunk are ready for the part
        for index, (part, factor, push) in enumerate(parts):
            begin = max(ends[index], come)
            run = factor * part.of(total)
            runs[index] += run
            come = begin + factor * part.of(first)
            done = ends[index] = max(begin + run, done + factor * part.of(last))
            if push is not None:
                begin = max(sent[index], come)
                sent[index] = max(begin + push.of(total), done + push.of(last))
            come += part.delay_ms
            done += part.delay_ms
    makespan = arrived = ends[-1]
    for ms, (_, _, push) in zip(sent, parts, strict=True):
        if push is not None:
            arrived = max(arrived, ms + push.delay_ms)
    return PipelineTimes(makespan, arrived - makespan, max(runs))


# ---- search ----


class _Search:
    """Dynamic programming over (set of hosts, last of them, layers done).

    The value is the least longest run: all chunks on one stage, on the link between two stages,
    or of KV on the link to the owner. As `max` and the least longest run are monotone, the best
    way to a state is part of a best way through it.
    """

    def __init__(
        self,
        hosts: Sequence[StageHost],
        links: Links,
        owner: str,
        model: PipelineModel,
        total: PrefillWork,
    ) -> None:
        self._hosts, self._links, self._owner, self._model = hosts, links, owner, model
        self._total = total
        self._runs = [self._run(host) for host in hosts]

    def candidates(self) -> Iterator[tuple[PipelineStage, ...]]:
        """The best stages of each set and last host that can compute all layers."""
        n_layers, hosts = self._model.n_layers, self._hosts
        best: dict[tuple[int, int], Matrix] = {}
        came: dict[tuple[int, int], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        begin = np.full(n_layers + 1, np.inf)
        begin[0] = 0.0
        for chosen in range(1, 1 << len(hosts)):
            for k in range(len(hosts)):
                if not chosen >> k & 1:
                    continue
                rest = chosen ^ (1 << k)
                least = np.full(n_layers + 1, np.inf)
                start = np.zeros(n_layers + 1, dtype=np.int64)
                before = np.full(n_layers + 1, -1)
                for j in range(len(hosts)) if rest else (-1,):
                    done = begin if j < 0 else best.get((rest, j))
                    link = 0.0 if j < 0 else self._link_ms(j, k)
                    if done is None or link == math.inf:
                        continue
                    longest = np.maximum(np.maximum(done, link)[:, None], self._runs[k])
                    at = longest.argmin(axis=0)
                    value = longest[at, np.arange(n_layers + 1)]
                    better = value < least
                    least[better], start[better], before[better] = value[better], at[better], j
                best[chosen, k], came[chosen, k] = least, (start, before)
        for (chosen, k), least in best.items():
            if least[n_layers] < np.inf:
                order: list[tuple[int, int, int]] = []
                end, at, last = n_layers, chosen, k
                while last >= 0:
                    start, before = came[at, last]
                    order.insert(0, (last, int(start[end]), end))
                    at, end, last = at ^ (1 << last), int(start[end]), int(before[end])
                yield self._stages(order)

    def _link_ms(self, j: int, k: int) -> float:
        link = self._links.get((self._hosts[j].name, self._hosts[k].name))
        if link is None:
            return math.inf
        return self._total.tokens * self._model.hidden_bytes / link.bytes_per_ms

    def _run(self, host: StageHost) -> Matrix:
        """Return the run (ms) of `host` for layers [a, b), at [a, b]; infinite for none, and
        without a link to the owner."""
        ends = np.arange(self._model.n_layers + 1)
        n_layers = ends[None, :] - ends[:, None]
        layer_ms = StageTimes(*host[1:]).of(self._total)
        if host.name != self._owner:
            link = self._links.get((host.name, self._owner))
            if link is None:
                return np.full(n_layers.shape, np.inf)
            kv_bytes = self._model.kv_bytes * self._total.tokens
            layer_ms = max(layer_ms, kv_bytes / link.bytes_per_ms)
        return np.where(n_layers > 0, n_layers * layer_ms, np.inf)

    def _stages(self, order: Sequence[tuple[int, int, int]]) -> tuple[PipelineStage, ...]:
        return tuple(
            self._stage(k, first, end, order[index + 1][0] if index + 1 < len(order) else None)
            for index, (k, first, end) in enumerate(order)
        )

    def _stage(self, k: int, first: int, end: int, after: int | None) -> PipelineStage:
        host, model, n_layers = self._hosts[k], self._model, end - first
        compute = StageTimes(*(n_layers * ms for ms in host[1:]))
        onward = push = None
        sent_bytes = n_layers * model.kv_bytes
        if after is not None:
            next_name = self._hosts[after].name
            link = self._links[host.name, next_name]
            onward = StageTimes(0.0, model.hidden_bytes / link.bytes_per_ms, 0.0, link.latency_ms)
            if next_name == self._owner:  # one link for both
                sent_bytes += model.hidden_bytes
        if host.name != self._owner:
            link = self._links[host.name, self._owner]
            push = StageTimes(0.0, sent_bytes / link.bytes_per_ms, 0.0, link.latency_ms)
        return PipelineStage(host.name, first, end, compute, onward, push)


def _order(found: PipelinePlan) -> tuple[float, int, int, tuple[str, ...]]:
    names = tuple(stage.name for stage in found.stages)
    return found.times.total_ms, len(names), -found.chunk_tokens, names
