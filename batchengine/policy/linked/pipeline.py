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

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from batchengine.policy.cost import LinkSpeed

CHUNKS = (32, 64, 128, 256, 512, 1024)  # tokens; a CPU computes at full speed from about 64 on
BLOCKS = 8
EARLY_MAX = 0.05  # of a predicted time


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
    and from each to the owner; a plan of one stage is legal. The layers of each subset minimise
    the longest work of a stage (`_layers`), then the least total time decides. Any other pipeline
    of N stages whose chunks have 1/C of the tokens takes at least C / (C + 2N - 2) times as long.
    """
    best: PipelinePlan | None = None
    for split in sorted(_splits(hosts, links, owner, model, prompt), key=lambda one: one.least_ms):
        if best is not None and split.least_ms > best.times.total_ms:
            break
        for order in itertools.permutations(split.parts):
            if (stages := _stages(order, links, owner, model)) is not None:
                found = PipelinePlan(stages, split.chunk_tokens, times(stages, split.blocks))
                best = found if best is None else min(best, found, key=_order)
    return best


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


# ---- stages ----


class _Split(NamedTuple):
    """Hosts and their numbers of layers, for chunks of this size. `least_ms`: the prompt takes no
    less in any order of them, with all chunks on the slowest host and one on each other."""

    least_ms: float
    chunk_tokens: int
    blocks: list[Block]
    parts: tuple[tuple[StageHost, int], ...]


def _splits(
    hosts: Sequence[StageHost], links: Links, owner: str, model: PipelineModel, prompt: PromptWork
) -> Iterator[_Split]:
    """The layers of each subset of hosts with links to the owner, for each size of chunks."""
    able = [host for host in hosts if host.name == owner or (host.name, owner) in links]
    counts = range(1, min(len(able), model.n_layers) + 1)
    for size in [size for size in CHUNKS if size < 2 * prompt.n_tokens] or [CHUNKS[0]]:
        blocks = blocks_of(prompt, size)
        total, ends = total_of(blocks), (blocks[0].first, blocks[-1].last)
        for chosen in itertools.chain(*(itertools.combinations(able, n) for n in counts)):
            compute_ms = [StageTimes(*host[1:]).of(total) for host in chosen]
            layer_ms = list(compute_ms)
            for i, host in enumerate(chosen):
                if host.name != owner:  # its KV may take longer than its computation
                    sent_bytes = model.kv_bytes * total.tokens
                    link_ms = sent_bytes / links[host.name, owner].bytes_per_ms
                    layer_ms[i] = max(layer_ms[i], link_ms)
            layers = _layers(layer_ms, model.n_layers)
            parts = tuple(zip(chosen, layers, strict=True))
            chunk_ms = [n * min(map(StageTimes(*host[1:]).of, ends)) for host, n in parts]
            by_host = zip(layers, compute_ms, chunk_ms, strict=True)
            pass_ms = max([n * ms - one_ms for n, ms, one_ms in by_host]) + sum(chunk_ms)
            longest_ms = max([n * ms for n, ms in zip(layers, layer_ms, strict=True)])
            yield _Split(max(longest_ms, pass_ms), size, blocks, parts)


def _layers(layer_ms: Sequence[float], n_layers: int) -> list[int]:
    """How many layers each stage has, at least one, so that the longest stage takes least."""
    layers = [1] * len(layer_ms)
    for _ in range(n_layers - len(layers)):
        layers[min(range(len(layers)), key=lambda i: (layers[i] + 1) * layer_ms[i])] += 1
    return layers


def _stages(
    order: Sequence[tuple[StageHost, int]], links: Links, owner: str, model: PipelineModel
) -> tuple[PipelineStage, ...] | None:
    """The stages of these hosts with so many layers each; None without a link between two."""
    found, first = list[PipelineStage](), 0
    for index, (host, n_layers) in enumerate(order):
        onward = push = None
        sent_bytes = n_layers * model.kv_bytes
        if index + 1 < len(order):
            next_name = order[index + 1][0].name
            if (link := links.get((host.name, next_name))) is None:
                return None
            onward = StageTimes(0.0, model.hidden_bytes / link.bytes_per_ms, 0.0, link.latency_ms)
            if next_name == owner:  # one link for both
                sent_bytes += model.hidden_bytes
        if host.name != owner:
            link = links[host.name, owner]
            push = StageTimes(0.0, sent_bytes / link.bytes_per_ms, 0.0, link.latency_ms)
        compute = StageTimes(*(n_layers * ms for ms in host[1:]))
        found.append(PipelineStage(host.name, first, first + n_layers, compute, onward, push))
        first += n_layers
    return tuple(found)


def _order(found: PipelinePlan) -> tuple[float, int, int, tuple[str, ...]]:
    names = tuple(stage.name for stage in found.stages)
    return found.times.total_ms, len(names), -found.chunk_tokens, names
