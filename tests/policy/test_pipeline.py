"""The pipeline planner: its search against all splits, its times against a simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from batchengine.policy.cost import LinkSpeed
from batchengine.policy.pipeline import (
    CHUNKS,
    EARLY_MAX,
    LayerCost,
    LayerKind,
    LeftOut,
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
DENSE = LayerKind(10_000_000, 2176)
COST = LayerCost(0.2, 0.04, 3e-7)


class Case(NamedTuple):
    """Arguments of `plan`."""

    hosts: tuple[StageHost, ...]
    links: Links
    owner: str
    model: PipelineModel
    prompts: tuple[PromptWork, ...]


# The last chunk of 512 has one token.
ONE_TOKEN_OVER = Case(
    (
        StageHost("a", (LayerCost(0.0, 0.5, 0.0), LayerCost(0.0, 0.125, 0.0))),
        StageHost("b", (LayerCost(0.0, 0.25, 0.0), LayerCost(0.0, 0.0625, 0.0))),
    ),
    {("a", "b"): LinkSpeed(20000.0, 1.0)},
    "b",
    PipelineModel((LayerKind(1000, 0), LayerKind(1000, 2000)), (1, 1, 0), 4096, 0, 0),
    (PromptWork(0, 513),),
)


def mesh(names: Sequence[str], link: LinkSpeed = LAN) -> dict[tuple[str, str], LinkSpeed]:
    return dict.fromkeys(itertools.permutations(names, 2), link)


def model(n_layers: int = 28) -> PipelineModel:
    return PipelineModel((DENSE,), (0,) * n_layers, 4096, 80_000_000, 120_000_000)


def case(speeds: Sequence[float], n_tokens: int = 8192, n_layers: int = 28) -> Case:
    """Hosts a, b, ... that compute `speeds` times as fast as COST, all linked; a is the owner."""
    hosts = tuple(
        StageHost(chr(ord("a") + i), (LayerCost(*(ms / speed for ms in COST)),))
        for i, speed in enumerate(speeds)
    )
    links = mesh([host.name for host in hosts])
    return Case(hosts, links, "a", model(n_layers), (PromptWork(0, n_tokens),))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three hosts with costs that differ by up to a factor of thirty, some without links."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    kinds = tuple(
        LayerKind(1000, draw(st.sampled_from((0, 500, 2000))), draw(st.sampled_from((0, 100_000))))
        for _ in range(draw(st.integers(1, 2)))
    )
    costs = st.builds(
        LayerCost, st.floats(0.0, 1.0), st.floats(0.02, 0.6), st.sampled_from((0.0, 1e-6, 1e-5))
    )
    hosts = tuple(
        StageHost(
            name,
            tuple(draw(costs) for _ in kinds),
            draw(st.floats(0.0, 0.5)),
            draw(st.floats(0.0, 0.01)),
            draw(st.floats(0.0, 5.0)),
            draw(st.sampled_from((math.inf, math.inf, 4000.0))),
            draw(st.sampled_from((math.inf, math.inf, 30e6))),
        )
        for name in names
    )
    links = {
        pair: LinkSpeed(draw(st.sampled_from((1.25e6, 1.25e5, 2e4))), draw(st.floats(0.01, 2.0)))
        for pair in itertools.permutations(names, 2)
        if draw(st.integers(0, 5))
    }
    layers = tuple(draw(st.integers(0, len(kinds) - 1)) for _ in range(draw(st.integers(1, 7))))
    prompts = tuple(
        PromptWork(draw(st.sampled_from((0, 0, 3000))), draw(st.integers(1, 5000)))
        for _ in range(draw(st.integers(1, 3)))
    )
    shape = PipelineModel(kinds, layers, 4096, draw(st.sampled_from((0, 1500))), 0)
    return Case(hosts, links, draw(st.sampled_from(names)), shape, prompts)


# ---- every split and order, by definition ----


def all_stages(given_case: Case, n_prompts: int) -> Iterator[tuple[PipelineStage, ...]]:
    """Every legal pipeline of the case."""
    hosts, _, _, shape, _ = given_case
    n = len(shape.layers)
    for count in range(1, min(n, len(hosts)) + 1):
        for order in itertools.permutations(hosts, count):
            for inner in itertools.combinations(range(1, n), count - 1):
                cuts = (0, *inner, n)
                stages = stages_of(given_case, order, cuts, n_prompts)
                if stages is not None:
                    yield stages


def stages_of(
    given_case: Case, order: Sequence[StageHost], cuts: Sequence[int], n_prompts: int
) -> tuple[PipelineStage, ...] | None:
    """These hosts with layers cuts[i] to cuts[i + 1], or None without memory or links."""
    _, links, owner, shape, prompts = given_case
    kv_tokens = sum(frontier + n for frontier, n in prompts[:n_prompts])
    found: list[PipelineStage] = []
    for index, host in enumerate(order):
        first, end = cuts[index], cuts[index + 1]
        kinds = [shape.kinds[k] for k in shape.layers[first:end]]
        costs = [host.layers[k] for k in shape.layers[first:end]]
        weights = sum(kind.weight_bytes for kind in kinds)
        weights += shape.embedding_bytes * (index == 0)
        weights += shape.head_bytes * (index == len(order) - 1)
        kv = sum(kind.kv_bytes for kind in kinds)
        state = sum(kind.state_bytes for kind in kinds)
        if weights > host.weight_bytes_max:
            return None
        if kv * kv_tokens + state * n_prompts > host.kv_bytes_max:
            return None
        onward = push = None
        hidden = 0
        if index + 1 < len(order):
            link = links.get((host.name, order[index + 1].name))
            if link is None:
                return None
            onward = StageTimes(
                0.0, shape.hidden_bytes / link.bytes_per_ms, 0.0, 0.0, link.latency_ms
            )
            hidden = shape.hidden_bytes if order[index + 1].name == owner else 0
        if host.name != owner:
            link = links.get((host.name, owner))
            if link is None:
                return None
            speed, latency_ms = link
            push = StageTimes(0.0, (kv + hidden) / speed, 0.0, state / speed, latency_ms)
        compute = StageTimes(
            host.fixed_ms + sum(cost.chunk_ms for cost in costs),
            sum(cost.token_ms for cost in costs) + host.embed_token_ms * (index == 0),
            sum(cost.pair_ms for cost in costs),
            host.head_ms * (index == len(order) - 1),
        )
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
    n_prompts = len(given_case.prompts) if found is None else found.n_prompts
    every = list(all_stages(given_case, n_prompts))
    if found is None:
        assert not list(all_stages(given_case, 1))
        return
    if found.n_prompts < len(given_case.prompts):
        assert not list(all_stages(given_case, found.n_prompts + 1))
    assert [stage for stage in every if _same(stage, found.stages)]
    prompts = given_case.prompts[:n_prompts]
    total = total_of(blocks_of(prompts, found.chunk_tokens))
    names = {stage.name for stage in found.stages}
    last = found.stages[-1].name
    alike = [s for s in every if {one.name for one in s} == names and s[-1].name == last]
    least = min(longest_run(given_case, stages, total) for stages in alike)
    assert longest_run(given_case, found.stages, total) == pytest.approx(least)
    bounds: list[float] = []
    for size in CHUNKS:
        if size < 2 * max(n for _, n in prompts) or size == CHUNKS[0]:
            blocks = blocks_of(prompts, size)
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
    prompts = given_case.prompts[: found.n_prompts]
    seen = layouts_simulation.pipeline(found.stages, prompts, found.chunk_tokens)
    bound = 1.0 + EARLY_MAX
    assert found.times.makespan_ms <= seen.makespan_ms * (1 + 1e-9)
    assert seen.makespan_ms <= bound * found.times.makespan_ms
    assert found.times.total_ms <= seen.arrived_ms * (1 + 1e-9)
    assert seen.arrived_ms <= bound * found.times.total_ms
    assert found.times.bubble == pytest.approx(seen.bubble, abs=EARLY_MAX)
    few = layouts_simulation.pipeline(found.stages, prompts, found.chunk_tokens, found.in_flight)
    assert few.makespan_ms <= 1.1 * seen.makespan_ms  # so many chunks in flight are enough


@settings(deadline=None)
@given(
    st.lists(
        st.builds(PromptWork, st.integers(0, 5000), st.integers(1, 3000)), min_size=1, max_size=4
    ),
    st.sampled_from(CHUNKS),
    st.integers(1, 9),
)
def test_blocks_have_the_work_of_all_chunks(
    prompts: list[PromptWork], chunk_tokens: int, count: int
) -> None:
    chunks = layouts_simulation.chunks_of(prompts, chunk_tokens)
    blocks = blocks_of(prompts, chunk_tokens, count)
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
    stage, free = StageTimes(0.0, 1.0, 0.0, 0.0), StageTimes(0.0, 0.0, 0.0, 0.0)
    stages = [
        PipelineStage(str(i), i, i + 1, stage, free if i < 3 else None, None) for i in range(4)
    ]
    found = times(stages, blocks_of([PromptWork(0, 32 * chunks)], 32))
    assert 1.0 - found.bubble == pytest.approx(chunks / (chunks + 3))
    assert 1.0 - found.bubble == pytest.approx(efficiency, abs=0.006)


def test_layers_are_divided_as_the_speeds_are() -> None:
    found = plan(*case((3.0, 1.0), n_tokens=32_768, n_layers=40))
    assert found is not None
    assert {stage.name: stage.end - stage.first for stage in found.stages} == {"a": 30, "b": 10}
    assert found.times.bubble < 0.05
    assert found.left_out == ()


def test_a_much_slower_host_is_left_out_with_the_time_that_it_would_cost() -> None:
    found = plan(*case((60.0, 1.0), n_layers=28))
    assert found is not None
    assert [stage.name for stage in found.stages] == ["a"]
    (out,) = found.left_out
    assert (out.name, out.why) == ("b", LeftOut.SLOWER)
    assert out.total_ms > found.times.total_ms


def test_each_daemon_left_out_has_its_reason() -> None:
    given_case = case((1.0, 1.0, 1.0, 1.0))
    a, b, c, d = given_case.hosts
    lone = {pair: link for pair, link in given_case.links.items() if pair != ("b", "a")}
    no_way = {pair: link for pair, link in lone.items() if pair not in {("d", "a"), ("a", "d")}}
    small = c._replace(kv_bytes_max=1000.0)
    found = plan((a, b, small, d), lone, "a", given_case.model, given_case.prompts)
    assert found is not None
    assert {out.name: out.why for out in found.left_out} == {
        "b": LeftOut.NO_LINK,
        "c": LeftOut.NO_MEMORY,
    }
    found = plan((a, d), no_way, "a", given_case.model, given_case.prompts)
    assert found is not None
    assert [(out.name, out.why) for out in found.left_out] == [("d", LeftOut.NO_LINK)]
    assert plan((small,), {}, "c", given_case.model, given_case.prompts) is None


def test_a_host_that_fits_no_order_is_named() -> None:
    """Two hosts with links to the owner, none that another stage could use: it holds layers, but
    not the embedding or the head, so it can only stand between two others."""
    given_case = case((1.0, 1.0))
    a, b = given_case.hosts
    middle = b._replace(weight_bytes_max=30_000_000.0)
    found = plan((a, middle), given_case.links, "a", given_case.model, given_case.prompts)
    assert found is not None
    assert [(out.name, out.why) for out in found.left_out] == [("b", LeftOut.NO_ORDER)]


def test_prompts_go_together_as_far_as_the_memory_reaches() -> None:
    given_case = case((1.0, 1.0))
    prompts = (PromptWork(0, 400),) * 6
    alone = plan(*given_case._replace(prompts=prompts[:1]))
    together = plan(*given_case._replace(prompts=prompts))
    assert alone is not None
    assert together is not None
    assert together.n_prompts == 6
    assert together.times.bubble < alone.times.bubble
    assert together.times.total_ms < 6 * alone.times.total_ms
    limited = tuple(h._replace(kv_bytes_max=2000 * 14 * 2176.0) for h in given_case.hosts)
    found = plan(*given_case._replace(hosts=limited, prompts=prompts))
    assert found is not None
    assert found.n_prompts == 5  # 2000 tokens, if each has half of the layers


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
            if fewer.n_prompts == found.n_prompts:
                assert found.times.total_ms <= fewer.times.total_ms * (1 + 1e-9)
            else:
                assert fewer.n_prompts < found.n_prompts


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        plan(*case((1.0,))._replace(prompts=(PromptWork(5, 0),)))
