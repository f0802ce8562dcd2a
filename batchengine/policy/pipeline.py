"""Pipeline prefill: which layers of a model each of several daemons computes, and how long that
takes.

Owns the choice of stages, their order, their layers and the chunk, as one pure function over
measured speeds, and the closed form of the times. A chunk of n tokens after p others takes on a
stage

    fixed + sum over its layers of (chunk + token * n + pair * n * (p + n / 2))   milliseconds,

so all chunks of many prompts take a sum that depends on their counts alone (`PrefillWork`).
Chunks pass the stages in one order, and each stage and each link between two stages has one of
them at a time. The last chunk leaves the last stage at the end of the longest path through all
(stage or link, chunk). `times` takes the longest of the paths that go on to the next stage at the
first or last chunk of a block only, where a block is one of BLOCKS equal parts of the chunks: it is
exact where one stage is the slowest for all chunks, never too late, and too early by less than
EARLY_MAX where the slowest stage changes along a prompt, since prompts have different lengths and
daemons different costs of attention. tests/policy/test_pipeline.py compares it with a simulation.

The KV of each stage goes to the session's daemon while later chunks are computed; what remains to
be sent when the last chunk is computed is the exposed time.
"""

from __future__ import annotations

import enum
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
Layers = tuple[tuple[int, int], ...]  # of each stage: [first layer, end)


class LayerKind(NamedTuple):
    """Bytes of one kind of layer: weights, KV of a token, and recurrent state of a session."""

    weight_bytes: int
    kv_bytes: int
    state_bytes: int = 0


class PipelineModel(NamedTuple):
    """What the planner knows of a model. `layers`: the index in `kinds` of each layer."""

    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    hidden_bytes: int  # of one token, between two layers
    embedding_bytes: int  # weights that the first stage maps
    head_bytes: int  # weights that the last stage maps


class LayerCost(NamedTuple):
    """Measured times of one kind of layer on one daemon, milliseconds."""

    chunk_ms: float  # of any chunk: mostly reading the weights
    token_ms: float
    pair_ms: float  # of a token and a position that it attends to; 0 for recurrent layers


class StageHost(NamedTuple):
    """One daemon that could be a stage. `layers`: its cost of each kind of the model.

    The limits are bytes; `weight_bytes_max` is infinite where the whole model is mapped anyway.
    """

    name: str
    layers: tuple[LayerCost, ...]
    fixed_ms: float = 0.0  # of any chunk
    embed_token_ms: float = 0.0
    head_ms: float = 0.0  # of the last token of a prompt
    weight_bytes_max: float = math.inf
    kv_bytes_max: float = math.inf


Links = Mapping[tuple[str, str], LinkSpeed]  # by (from, to)


class PromptWork(NamedTuple):
    """Tokens of one session to compute: `n_tokens` from `frontier` on."""

    frontier: int
    n_tokens: int


class PrefillWork(NamedTuple):
    """Work of some chunks, as counts; `ends` = chunks that are the last of their prompt."""

    chunks: int
    tokens: int
    pairs: float
    ends: int


NO_WORK = PrefillWork(0, 0, 0.0, 0)


class StageTimes(NamedTuple):
    """Cost of a stage or link per unit of `PrefillWork`, and a delay that chunks pass side by
    side."""

    chunk_ms: float
    token_ms: float
    pair_ms: float
    end_ms: float
    delay_ms: float = 0.0

    def of(self, work: PrefillWork) -> float:
        """Milliseconds for which `work` keeps the stage or link, without the delay."""
        chunks, tokens, pairs, ends = work
        return (
            self.chunk_ms * chunks
            + self.token_ms * tokens
            + self.pair_ms * pairs
            + self.end_ms * ends
        )


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
    from then until the session's daemon has all KV; `bubble`: idle share of the stages' time."""

    makespan_ms: float
    exposed_ms: float
    bubble: float
    longest_ms: float  # all chunks on the slowest stage

    @property
    def total_ms(self) -> float:
        """Until the session can decode."""
        return self.makespan_ms + self.exposed_ms


class LeftOut(enum.StrEnum):
    """Why a daemon is no stage of the plan."""

    NO_LINK = "no link to the session's daemon"
    NO_MEMORY = "not one layer fits its memory"
    NO_ORDER = "no order of stages that includes it has all links and enough memory"
    SLOWER = "the prefill takes longer with it"


class Omission(NamedTuple):
    """One daemon that is no stage, and how long the best plan with it takes (infinite: none)."""

    name: str
    why: LeftOut
    total_ms: float


class PipelinePlan(msgspec.Struct, frozen=True):
    """Stages in order, and how prompts go through them.

    The first `n_prompts` of the given prompts go together: more do not fit the stages' memory.
    They make `micro_batches` chunks of at most `chunk_tokens`, of which `in_flight` at a time
    keep every stage at work.
    """

    stages: tuple[PipelineStage, ...]
    chunk_tokens: int
    n_prompts: int
    micro_batches: int
    in_flight: int
    times: PipelineTimes
    left_out: tuple[Omission, ...] = ()


def plan(
    hosts: Sequence[StageHost],
    links: Links,
    owner: str,
    model: PipelineModel,
    prompts: Sequence[PromptWork],
) -> PipelinePlan | None:
    """Plan the prefill of leading `prompts` for the daemon `owner`; None = no stages can hold one.

    Any subset of `hosts` in any order may be the stages, if there are links between neighbours
    and from each to the owner; a plan of one stage is legal. For each subset and last stage the
    layers and the order minimise the longest work of a stage (`_Search`), then the least total
    time decides. Any other pipeline of N stages whose chunks have 1/C of the tokens each takes at
    least C / (C + 2N - 2) times as long. Takes 5 to 50 ms for two to four hosts, and about three
    times as long with each further one.
    Raises ValueError for prompts without tokens.
    """
    if not prompts or min(prompt.n_tokens for prompt in prompts) < 1:
        raise ValueError("a prompt without tokens")
    for count in range(len(prompts), 0, -1):
        taken = prompts[:count]
        kv_tokens = sum(prompt.frontier + prompt.n_tokens for prompt in taken)
        found: list[PipelinePlan] = []
        longest = max(prompt.n_tokens for prompt in taken)
        sizes = [size for size in CHUNKS if size < 2 * longest] or [CHUNKS[0]]
        for size in sizes:
            blocks = blocks_of(taken, size)
            search = _Search(hosts, links, owner, model, total_of(blocks), kv_tokens)
            found += [_planned(stages, blocks, size, count) for stages in search.candidates()]
        if found:
            best = min(found, key=_order)
            return msgspec.structs.replace(
                best, left_out=tuple(_omissions(best, found, hosts, links, owner, model, kv_tokens))
            )
    return None


class Block(NamedTuple):
    """Some chunks in a row: all of them, the first one and the last one."""

    total: PrefillWork
    first: PrefillWork
    last: PrefillWork


def blocks_of(prompts: Sequence[PromptWork], chunk_tokens: int, count: int = BLOCKS) -> list[Block]:
    """Count the work of prompts that are computed one after another, each in chunks, as at most
    `count` blocks of about equally many chunks."""
    chunks = sum(-(-n // chunk_tokens) for _, n in prompts)
    size = -(-chunks // count)
    found: list[Block] = []
    total, first, room = NO_WORK, NO_WORK, size
    for frontier, n_tokens in prompts:
        at = 0
        while at < n_tokens:
            begin, n = at, min(n_tokens - at, room * chunk_tokens)
            at += n
            taken = -(-n // chunk_tokens)
            is_end = at == n_tokens
            rest = n - (taken - 1) * chunk_tokens
            if room == size:
                head = min(n, chunk_tokens)
                first = PrefillWork(
                    1, head, head * (frontier + begin + head / 2), int(is_end and taken == 1)
                )
            total = PrefillWork(
                total.chunks + taken,
                total.tokens + n,
                total.pairs + n * (frontier + begin + n / 2),
                total.ends + is_end,
            )
            last = PrefillWork(1, rest, rest * (frontier + at - rest / 2), int(is_end))
            room -= taken
            chunks -= taken
            if not room or not chunks:
                found.append(Block(total, first, last))
                total, room = NO_WORK, size
    return found


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
    runs = [0.0] * len(parts)
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
    bubble = max(0.0, 1.0 - sum(runs[::2]) / (len(stages) * makespan)) if makespan else 0.0
    return PipelineTimes(makespan, arrived - makespan, bubble, max(runs))


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
        kv_tokens: int,
    ) -> None:
        self._hosts, self._links, self._owner, self._model = hosts, links, owner, model
        self._total = total
        self._runs = [self._run(host, kv_tokens) for host in hosts]

    def candidates(self) -> Iterator[tuple[PipelineStage, ...]]:
        """The best stages of each set and last host that can compute all layers."""
        n_layers, hosts = len(self._model.layers), self._hosts
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

    def _run(self, host: StageHost, kv_tokens: int) -> Matrix:
        """Return the run (ms) of `host` for layers [a, b), at [a, b]; infinite where it has no
        memory for them."""
        model, total = self._model, self._total
        n = len(model.layers)
        columns = np.zeros((4, n + 1))  # ms, bytes to send, KV bytes to hold, bytes of weights
        for index, kind in enumerate(model.layers):
            cost, size = host.layers[kind], model.kinds[kind]
            state = size.state_bytes * total.ends
            columns[:, index + 1] = columns[:, index] + (
                StageTimes(*cost, 0.0).of(total),
                size.kv_bytes * total.tokens + state,
                size.kv_bytes * kv_tokens + state,
                size.weight_bytes,
            )
        run, sent, held, mapped = columns[:, None, :] - columns[:, :, None]
        run += host.fixed_ms * total.chunks
        run[0] += host.embed_token_ms * total.tokens
        run[:, n] += host.head_ms * total.ends
        mapped[0] += model.embedding_bytes
        mapped[:, n] += model.head_bytes
        if host.name != self._owner:
            link = self._links.get((host.name, self._owner))
            speed = 0.0 if link is None else link.bytes_per_ms
            run = np.maximum(run, sent / speed) if speed else np.full_like(run, np.inf)
        fits = (held <= host.kv_bytes_max) & (mapped <= host.weight_bytes_max)
        run[~(fits & np.triu(np.ones_like(run, dtype=bool), 1))] = np.inf
        return run

    def _stages(self, order: Sequence[tuple[int, int, int]]) -> tuple[PipelineStage, ...]:
        return tuple(
            self._stage(k, first, end, order[index + 1][0] if index + 1 < len(order) else None)
            for index, (k, first, end) in enumerate(order)
        )

    def _stage(self, k: int, first: int, end: int, after: int | None) -> PipelineStage:
        host, model = self._hosts[k], self._model
        kinds = model.layers[first:end]
        costs = [host.layers[kind] for kind in kinds]
        compute = StageTimes(
            host.fixed_ms + sum(cost.chunk_ms for cost in costs),
            sum(cost.token_ms for cost in costs) + (0.0 if first else host.embed_token_ms),
            sum(cost.pair_ms for cost in costs),
            0.0 if after is not None else host.head_ms,
        )
        onward = push = None
        next_name = "" if after is None else self._hosts[after].name
        if next_name:
            link = self._links[host.name, next_name]
            hidden_ms = model.hidden_bytes / link.bytes_per_ms
            onward = StageTimes(0.0, hidden_ms, 0.0, 0.0, link.latency_ms)
        if host.name != self._owner:
            link = self._links[host.name, self._owner]
            hidden = model.hidden_bytes if next_name == self._owner else 0
            kv = sum(model.kinds[kind].kv_bytes for kind in kinds)
            state = sum(model.kinds[kind].state_bytes for kind in kinds)
            speed, delay_ms = link.bytes_per_ms, link.latency_ms
            push = StageTimes(0.0, (kv + hidden) / speed, 0.0, state / speed, delay_ms)
        return PipelineStage(host.name, first, end, compute, onward, push)


def _planned(
    stages: tuple[PipelineStage, ...], blocks: Sequence[Block], chunk_tokens: int, n_prompts: int
) -> PipelinePlan:
    found, total = times(stages, blocks), total_of(blocks)
    # A chunk of mean size is under way for this long; meanwhile the slowest part takes so many.
    chunks = total.chunks
    parts = [stage.compute for stage in stages]
    parts += [stage.onward for stage in stages if stage.onward is not None]
    runs = [part.of(total) for part in parts]
    under_way = sum(runs) / chunks + sum(part.delay_ms for part in parts)
    in_flight = min(chunks, 1 + math.ceil(under_way * chunks / max(runs)))
    return PipelinePlan(stages, chunk_tokens, n_prompts, chunks, in_flight, found)


def _order(found: PipelinePlan) -> tuple[float, int, int, tuple[str, ...]]:
    names = tuple(stage.name for stage in found.stages)
    return found.times.total_ms, len(names), -found.chunk_tokens, names


def _omissions(
    best: PipelinePlan,
    found: Sequence[PipelinePlan],
    hosts: Sequence[StageHost],
    links: Links,
    owner: str,
    model: PipelineModel,
    kv_tokens: int,
) -> Iterator[Omission]:
    names = {stage.name for stage in best.stages}
    for host in hosts:
        if host.name in names:
            continue
        with_it = [
            one.times.total_ms for one in found if host.name in (stage.name for stage in one.stages)
        ]
        if with_it:
            why = LeftOut.SLOWER
        elif host.name != owner and (host.name, owner) not in links:
            why = LeftOut.NO_LINK
        elif not any(_holds(host, kind, kv_tokens) for kind in model.kinds):
            why = LeftOut.NO_MEMORY
        else:
            why = LeftOut.NO_ORDER
        yield Omission(host.name, why, min(with_it, default=math.inf))


def _holds(host: StageHost, kind: LayerKind, kv_tokens: int) -> bool:
    return (
        kind.weight_bytes <= host.weight_bytes_max
        and kind.kv_bytes * kv_tokens <= host.kv_bytes_max
    )
