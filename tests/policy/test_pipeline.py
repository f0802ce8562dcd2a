"""The pipeline planner: its search against all splits, its times against a simulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from batchengine.policy.cost import LinkSpeed
from batchengine.policy.linked.pipeline import (
    CHUNKS,
    EARLY_MAX,
    Links,
    PipelineModel,
    PipelineStage,
    PrefillWork,
    PromptWork,
    StageHost,
    StageTimes,
    blocks_of,
    plan,
    times,
    total_of,
)
from tests.policy import layouts_simulation

LAN = LinkSpeed(1.25e6, 0.05)  # 10 Gb/s
COST = (0.2, 0.04, 3e-7)  # ms of a layer: of a chunk, a token and a pair


class Case(NamedTuple):
    """Arguments of `plan`."""

    hosts: tuple[StageHost, ...]
    links: Links
    owner: str
    model: PipelineModel
    prompt: PromptWork


# The last chunk of 512 has one token.
ONE_TOKEN_OVER = Case(
    (StageHost("a", 0.0, 0.5, 0.0), StageHost("b", 0.0, 0.25, 0.0)),
    {("a", "b"): LinkSpeed(20000.0, 1.0)},
    "b",
    PipelineModel(3, 2000, 4096),
    PromptWork(0, 513),
)


def mesh(names: Sequence[str], link: LinkSpeed = LAN) -> dict[tuple[str, str], LinkSpeed]:
    return dict.fromkeys(itertools.permutations(names, 2), link)


def case(speeds: Sequence[float], n_tokens: int = 8192, n_layers: int = 28) -> Case:
    """Hosts a, b, ... that compute `speeds` times as fast as COST, all linked; a is the owner."""
    hosts = tuple(
        StageHost(chr(ord("a") + i), *(ms / speed for ms in COST)) for i, speed in enumerate(speeds)
    )
    links = mesh([host.name for host in hosts])
    return Case(hosts, links, "a", PipelineModel(n_layers, 2176, 4096), PromptWork(0, n_tokens))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three hosts with costs that differ by up to a factor of thirty, some without links."""
    names = ["", "b", "c"][: draw(st.integers(1, 3))]
    hosts = tuple(
        StageHost(
            name,
            draw(st.floats(0.0, 1.0)),
            draw(st.floats(0.02, 0.6)),
            draw(st.sampled_from((0.0, 1e-6, 1e-5))),
        )
        for name in names
    )
    links = {
        pair: LinkSpeed(draw(st.sampled_from((1.25e6, 1.25e5, 2e4))), draw(st.floats(0.01, 2.0)))
        for pair in itertools.permutations(names, 2)
        if draw(st.integers(0, 5))
    }
    shape = PipelineModel(draw(st.integers(1, 7)), draw(st.sampled_from((0, 500, 2000))), 4096)
    prompt = PromptWork(draw(st.sampled_from((0, 0, 3000))), draw(st.integers(1, 5000)))
    return Case(hosts, links, draw(st.sampled_from(names)), shape, prompt)


# ---- every split and order, by definition ----


def all_stages(given_case: Case) -> Iterator[tuple[PipelineStage, ...]]:
    """Every legal pipeline of the case."""
    hosts, _, _, shape, _ = given_case
    n = shape.n_layers
    for count in range(1, min(n, len(hosts)) + 1):
        for order in itertools.permutations(hosts, count):
            for inner in itertools.combinations(range(1, n), count - 1):
                stages = stages_of(given_case, order, (0, *inner, n))
                if stages is not None:
                    yield stages


def stages_of(
    given_case: Case, order: Sequence[StageHost], cuts: Sequence[int]
) -> tuple[PipelineStage, ...] | None:
    """These hosts with layers cuts[i] to cuts[i + 1], or None without links."""
    _, links, owner, shape, _ = given_case
    found: list[PipelineStage] = []
    for index, host in enumerate(order):
        first, end = cuts[index], cuts[index + 1]
        onward = push = None
        hidden = 0
        if index + 1 < len(order):
            link = links.get((host.name, order[index + 1].name))
            if link is None:
                return None
            onward = StageTimes(0.0, shape.hidden_bytes / link.bytes_per_ms, 0.0, link.latency_ms)
            hidden = shape.hidden_bytes if order[index + 1].name == owner else 0
        if host.name != owner:
            link = links.get((host.name, owner))
            if link is None:
                return None
            sent = (end - first) * shape.kv_bytes + hidden
            push = StageTimes(0.0, sent / link.bytes_per_ms, 0.0, link.latency_ms)
        _, chunk_ms, token_ms, pair_ms = host
        n = end - first
        compute = StageTimes(n * chunk_ms, n * token_ms, n * pair_ms)
        found.append(PipelineStage(host.name, first, end, compute, onward, push))
    return tuple(found)


def longest_run(given_case: Case, stages: Sequence[PipelineStage], total: PrefillWork) -> float:
    """The longest work of a stage, of a link between stages, or of a link with KV alone."""
    runs: list[float] = []
    for index, stage in enumerate(stages):
        runs.append(stage.compute.of(total))
        if stage.onward is not None:
            runs.append(stage.onward.of(total))
        if stage.push is not None:
            push = stage.push.of(total)
            onward = stage.onward
            if onward is not None and stages[index + 1].name == given_case.owner:
                push -= onward.of(total)
            runs.append(push)
    return max(runs)


@settings(deadline=None)
@given(cases())
@example(ONE_TOKEN_OVER)
def test_the_split_is_the_best_of_all_for_its_hosts(given_case: Case) -> None:
    """The search finds the least longest run of all orders and splits with the same hosts and the
    same last one. The total time is at most (C + 2N - 2) / C times that of any other pipeline of N
    stages whose chunks have 1/C of the tokens."""
    found = plan(*given_case)
    every = list(all_stages(given_case))
    if found is None:
        assert not every
        return
    assert [stage for stage in every if _same(stage, found.stages)]
    prompt = given_case.prompt
    total = total_of(blocks_of(prompt, found.chunk_tokens))
    names = {stage.name for stage in found.stages}
    last = found.stages[-1].name
    alike = [s for s in every if {one.name for one in s} == names and s[-1].name == last]
    least = min(longest_run(given_case, stages, total) for stages in alike)
    assert longest_run(given_case, found.stages, total) == pytest.approx(least)
    bounds: list[float] = []
    for size in CHUNKS:
        if size < 2 * prompt.n_tokens or size == CHUNKS[0]:
            blocks = blocks_of(prompt, size)
            parts = total_of(blocks).tokens / size
            for stages in every:
                total_ms = times(stages, blocks).total_ms
                bounds.append(total_ms * (parts + 2 * len(stages) - 2) / parts)
    assert found.times.total_ms <= min(bounds) * (1 + 1e-9)


def _same(one: Sequence[PipelineStage], other: Sequence[PipelineStage]) -> bool:
    return len(one) == len(other) and all(
        (a.name, a.first, a.end) == (b.name, b.first, b.end)
        and a.compute == pytest.approx(b.compute)
        and (a.push is None) == (b.push is None)
        and (a.push is None or a.push == pytest.approx(b.push))
        for a, b in zip(one, other, strict=True)
    )


@settings(deadline=None)
@given(cases())
def test_times_agree_with_a_simulation_of_every_chunk(given_case: Case) -> None:
    found = plan(*given_case)
    assume(found is not None)
    assert found is not None
    seen = layouts_simulation.pipeline(found.stages, given_case.prompt, found.chunk_tokens)
    bound = 1.0 + EARLY_MAX
    assert found.times.makespan_ms <= seen.makespan_ms * (1 + 1e-9)
    assert seen.makespan_ms <= bound * found.times.makespan_ms
    assert found.times.total_ms <= seen.arrived_ms * (1 + 1e-9)
    assert seen.arrived_ms <= bound * found.times.total_ms


@settings(deadline=None)
@given(
    st.builds(PromptWork, st.integers(0, 5000), st.integers(1, 9000)),
    st.sampled_from(CHUNKS),
    st.integers(1, 9),
)
def test_blocks_have_the_work_of_all_chunks(
    prompt: PromptWork, chunk_tokens: int, count: int
) -> None:
    chunks = layouts_simulation.chunks_of(prompt, chunk_tokens)
    blocks = blocks_of(prompt, chunk_tokens, count)
    assert len(blocks) <= count
    at = 0
    for block in blocks:
        own = chunks[at : at + block.total.chunks]
        at += len(own)
        assert block.total == pytest.approx([sum(column) for column in zip(*own, strict=True)])
        assert (block.first, block.last) == (pytest.approx(own[0]), pytest.approx(own[-1]))
    assert at == len(chunks)


# ---- efficiency, and who takes part ----


@pytest.mark.parametrize(("chunks", "efficiency"), [(8, 0.73), (16, 0.84), (64, 0.96)])
def test_equal_stages_are_as_efficient_as_their_chunks_allow(
    chunks: int, efficiency: float
) -> None:
    stage, free = StageTimes(0.0, 1.0, 0.0), StageTimes(0.0, 0.0, 0.0)
    stages = [
        PipelineStage(str(i), i, i + 1, stage, free if i < 3 else None, None) for i in range(4)
    ]
    found = times(stages, blocks_of(PromptWork(0, 32 * chunks), 32))
    assert found.longest_ms / found.makespan_ms == pytest.approx(chunks / (chunks + 3))
    assert found.longest_ms / found.makespan_ms == pytest.approx(efficiency, abs=0.006)


def test_layers_are_divided_as_the_speeds_are() -> None:
    found = plan(*case((3.0, 1.0), n_tokens=32_768, n_layers=40))
    assert found is not None
    assert {stage.name: stage.end - stage.first for stage in found.stages} == {"a": 30, "b": 10}
    assert found.times.longest_ms / found.times.makespan_ms > 0.95


def test_a_much_slower_host_is_left_out() -> None:
    found = plan(*case((60.0, 1.0), n_layers=28))
    assert found is not None
    assert [stage.name for stage in found.stages] == ["a"]


def test_a_host_without_a_link_to_the_owner_is_left_out() -> None:
    given_case = case((1.0, 1.0))
    links = {pair: link for pair, link in given_case.links.items() if pair != ("b", "a")}
    found = plan(*given_case._replace(links=links))
    assert found is not None
    assert [stage.name for stage in found.stages] == ["a"]
    assert plan(given_case.hosts[1:], {}, "a", given_case.model, given_case.prompt) is None


def test_a_slow_link_to_the_owner_is_counted() -> None:
    """KV is sent while later chunks are computed, so that a fast link exposes little of it."""
    given_case = case((1.0, 1.0), n_tokens=4096)
    fast = plan(*given_case)
    assert fast is not None
    assert fast.times.exposed_ms < 0.01 * fast.times.makespan_ms
    slow_links = mesh("ab", LinkSpeed(2e3, 0.05))
    slow = plan(*given_case._replace(links=slow_links))
    assert slow is not None
    assert slow.times.total_ms > fast.times.total_ms
    assert [stage.name for stage in slow.stages] == ["a"]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_a_further_host_never_makes_the_plan_slower(given_case: Case) -> None:
    found = plan(*given_case)
    assert found == plan(*given_case)
    for host in given_case.hosts:
        others = tuple(other for other in given_case.hosts if other is not host)
        fewer = plan(*given_case._replace(hosts=others)) if others else None
        if fewer is not None:
            assert found is not None
            assert found.times.total_ms <= fewer.times.total_ms * (1 + 1e-9)


def test_what_the_owner_is_called_changes_nothing() -> None:
    """This daemon plans with "" as its own name."""
    shape, prompt, link = PipelineModel(28, 2176, 4096), PromptWork(0, 8192), LinkSpeed(2e4, 1.0)
    named, unnamed = (
        plan(
            (StageHost("b", *COST), StageHost(owner, *COST)),
            mesh(("b", owner), link),
            owner,
            shape,
            prompt,
        )
        for owner in ("a", "")
    )
    assert named is not None
    assert unnamed is not None
    assert named.times == unnamed.times
    assert [stage[1:] for stage in named.stages] == [stage[1:] for stage in unnamed.stages]
