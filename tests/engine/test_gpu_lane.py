"""A lane on an emulated GPU beside a CPU lane: tokens, pages and records of the CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from batchengine import errors
from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError, Constraint, Sampling
from batchengine.lanes.gpu.lane import LATE_ENTRIES_MIN
from batchengine.policy.cost import StepCost
from bench.models.synthetic import PRESETS, write_synthetic
from bench.simt.emulator import COMPILER, ROOT, compile_kernels
from tests.engine.lane.test_drafts import cheap_drafts, repeating
from tests.engine.lane.test_prompt_scores import asking, scores_of
from tests.engine.lane.test_prompt_scores import expected as expected_scores
from tests.engine.test_constrained import LONG, constrained, expected
from tests.engine.test_tokens_min import asked as unending
from tests.engine.test_tokens_min import expected as bounded
from tests.lanes.emulated_worker import ABSENT, FULL, GOOD, QUEUED, WRONG, plan_failure
from tests.support.engines import (
    Reference,
    Site,
    WatchedEngine,
    read,
    request,
    running_engine,
    started,
    unread,
    until,
    words,
)

EMULATED = (sys.executable, "-m", "tests.lanes.emulated_worker")
MIB = 1 << 20
__all__ = ["cheap_drafts"]  # a fixture
SHORT = Constraint("regex", "([a-f]{2} ){7}")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
# An eighth of the pocket model: an emulated GPU takes milliseconds for a token of that one.
SMALL = replace(PRESETS["small"], n_embd=128, n_ff=128, head_dim=32, n_vocab=2000)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """The emulator's library is there before a worker has a deadline."""
    compile_kernels(ROOT / "build/simt", is_checked=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    write_synthetic(path, SMALL)
    return path


@pytest.fixture
def site(small: Path, tmp_path: Path, cache_dir: Path) -> Site:
    """A model that an emulated GPU computes quickly, and an empty folder."""
    return Site(small, tmp_path, cache_dir)


@pytest.fixture(scope="module")
def reference(small: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of that model when it computes one timeline alone."""
    made = Reference(small, cache_dir)
    yield made
    made.close()


@asynccontextmanager
async def gpu_engine(
    site: Site,
    device: int = GOOD,
    vram_bytes: int = 64 * MIB,
    *,
    context: int = 2048,
    seats: int = 64,
    first: bool = False,
    plan: Path | None = None,
    require: str = "",
    drafts: int = -1,
    **overrides: object,
) -> AsyncIterator[WatchedEngine]:
    """An engine with the lanes `cpu` and `gpu`, which is the `first`; sessions move on request
    only."""
    lanes = (
        LaneConfig(name="cpu", threads=1, tier="bulk", entries_max=seats),
        LaneConfig(
            name="gpu",
            kind="cuda",
            threads=1,
            tier="fast",
            device=device,
            vram_bytes=vram_bytes,
            steps_in_flight=3,
            draft_tokens_max=drafts,
        ),
    )
    overrides = {"router__promote_auto": False, "limits__context_tokens": context, **overrides}
    command = EMULATED if plan is None else (*EMULATED, str(plan))
    lanes = lanes[::-1] if first else lanes
    async with running_engine(site, command, lanes, require=require, **overrides) as engine:
        yield engine


def gpu_state(engine: WatchedEngine) -> str:
    return next(str(lane["state"]) for lane in engine.lanes() if lane["name"] == "gpu")


async def eventually(condition: Callable[[], bool]) -> None:
    """As `until`, for what waits for an emulated GPU."""
    async with asyncio.timeout(110):
        while not condition():  # noqa: ASYNC110  the engine has no event for every fact
            await asyncio.sleep(0.01)


async def moved(engine: WatchedEngine, session: str, to: str) -> None:
    """Move a session, and ask again while three emulated steps take longer than a lane may wait."""
    async with asyncio.timeout(110):
        while True:
            try:
                report = await engine.promote("", session, to=to)
            except BatchEngineError as error:
                if error.code != errors.NOT_MOVED.code or "long step" not in str(error.why):
                    raise
            else:
                break
    assert report["result"] == "moved", report


async def prepared(engine: WatchedEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Sessions s0, s1, ... with the KV of prompts, on the GPU; returns the prompts to continue."""
    longer: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        answer = await read(engine.submit(request(prompt, 1, session=f"s{i}")))
        longer.append([*prompt, *answer.tokens, 7])
    await eventually(lambda: gpu_state(engine) == "ready")
    for i in range(len(prompts)):
        await moved(engine, f"s{i}", "gpu")
    return longer


async def test_log_probabilities_of_a_prompt(site: Site, reference: Reference) -> None:
    prompt = words(8, 90)
    async with gpu_engine(site) as engine:
        await eventually(lambda: gpu_state(engine) == "ready")
        answer = await read(engine.submit(replace(asking(prompt, 3), promote=True)))
        assert answer.done is not None
        assert answer.done.usage.lane == "gpu"
        assert scores_of(answer, prompt) == expected_scores(reference, prompt, 3)


@pytest.mark.usefixtures("cheap_drafts")
async def test_drafts_on_a_gpu(site: Site, reference: Reference) -> None:
    """Alone and beside so many others that rows are stored late; the rows that it has kept go on
    on the CPU."""
    prompts = [repeating(i, 60) for i in range(LATE_ENTRIES_MIN + 1)]
    async with gpu_engine(site, drafts=6) as engine:
        cpu, gpu = engine.state.lanes
        longer = await prepared(engine, prompts)
        alone = await read(engine.submit(request(longer[0], 30, session="s0")))
        asked = [request(one, 12, session=f"s{i}") for i, one in enumerate(longer) if i]
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        assert gpu.meter.accepted
        assert not cpu.meter.drafted
        computed = cpu.meter.tokens
        await moved(engine, "s0", "cpu")
        more = [*longer[0], *alone.tokens, 9]
        again = await read(engine.submit(request(more, 20, session="s0")))
        assert again.done is not None
        assert again.done.usage.cached_tokens >= len(longer[0]) + len(alone.tokens) - 1
        assert cpu.meter.tokens > computed
    assert alone.tokens == reference.tokens(longer[0], 30)
    assert again.tokens == reference.tokens(more, 20)
    for one, answer in zip(longer[1:], answers, strict=True):
        assert answer.tokens == reference.tokens(one, 12)


@pytest.mark.usefixtures("cheap_drafts")
async def test_drafts_of_a_constrained_answer_on_a_gpu(site: Site, reference: Reference) -> None:
    async with gpu_engine(site, drafts=6) as engine:
        (longer,) = await prepared(engine, [words(3, 60)])
        asked = constrained(longer, Constraint("regex", "(la ){30}"), session="s0")
        answer = await read(engine.submit(asked))
        assert answer.done is not None
        assert answer.done.usage.lane == "gpu"
        assert engine.state.lanes[1].meter.accepted
    assert answer.tokens == expected(reference, asked)


@pytest.mark.usefixtures("cheap_drafts")
async def test_drafts_of_a_model_with_recurrent_state_on_a_gpu(
    tmp_path: Path, cache_dir: Path
) -> None:
    """Its states are taken back there, and go on on the CPU."""
    path = tmp_path / "model.gguf"
    write_synthetic(path, replace(PRESETS["qwen35-tiny"], n_vocab=2000))
    reference = Reference(path, cache_dir)
    site = Site(path, tmp_path, cache_dir)
    try:
        async with gpu_engine(site, GOOD, 512 * MIB, drafts=6) as engine:
            prompts = await prepared(engine, [repeating(i, 60) for i in range(2)])
            song = Constraint("regex", "((la li lo|la lu) ){10}")
            asked = [constrained(p, song, session=f"s{i}") for i, p in enumerate(prompts)]
            answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
            gpu = engine.state.lanes[1]
            assert 0 < gpu.meter.accepted < gpu.meter.drafted
            await moved(engine, "s0", "cpu")
            more = request([*prompts[0], *answers[0].tokens, 9], 20, session="s0")
            again = await read(engine.submit(more))
        for one, answer in zip(asked, answers, strict=True):
            assert answer.tokens == expected(reference, one)
        assert again.tokens == reference.tokens(more.prompt, 20)
    finally:
        reference.close()


async def test_a_stream_goes_to_the_gpu_and_back(site: Site, reference: Reference) -> None:
    async with gpu_engine(site) as engine:
        lane = engine.state.lanes[1]
        before = lane.cost.cost
        await eventually(lambda: gpu_state(engine) == "ready")
        assert lane.cost.cost != before  # its prior is that of the GPU, not of one core
        assert lane.lane.facts is not None
        assert lane.lane.facts.gpu is not None
        (prompt,) = await prepared(engine, [words(1, 250)])
        generation, reader = await started(engine, request(prompt, 1500, session="s0"), 2)
        for lane in ("cpu", "gpu", "cpu"):
            await moved(engine, "s0", lane)
            n = generation.completion_tokens
            await eventually(lambda n=n: generation.completion_tokens > n + 2)
        assert engine.state.lanes[1].meter.ahead
        generation.cancel()
        answer = await reader
        assert answer.error is None
        assert answer.tokens == reference.tokens(prompt, len(answer.tokens))


@pytest.mark.parametrize(
    ("preset", "device"),
    [
        pytest.param("moe-tiny", QUEUED, marks=pytest.mark.slow),
        pytest.param("gpt-oss-tiny", QUEUED, marks=pytest.mark.slow),
        pytest.param("gemma3-tiny", GOOD, marks=pytest.mark.slow),
        pytest.param("gemma4-tiny", QUEUED, marks=pytest.mark.slow),
        pytest.param("qwen35-tiny", QUEUED, marks=pytest.mark.slow),
        ("qwen35moe-tiny", QUEUED),
        pytest.param("glm4moe-tiny", GOOD, marks=pytest.mark.slow),
        ("deepseek2-tiny", GOOD),
        pytest.param("nemotron_h_moe-tiny", QUEUED, marks=pytest.mark.slow),
    ],
)
async def test_sessions_of_other_models_go_to_the_gpu_and_back(
    tmp_path: Path, cache_dir: Path, preset: str, device: int
) -> None:
    """Two sessions, whose tokens choose other experts in the same steps: one leaves the GPU in the
    middle of its answer, and comes back for the next one."""
    path = tmp_path / "model.gguf"
    write_synthetic(path, replace(PRESETS[preset], n_vocab=2000))
    reference = Reference(path, cache_dir)
    try:
        async with gpu_engine(Site(path, tmp_path, cache_dir), device, 512 * MIB) as engine:
            prompts = await prepared(engine, [words(i, n) for i, n in ((1, 250), (2, 40))])
            asked = [
                request(prompts[0], 600, session="s0"),
                request(prompts[1], 24, session="s1"),
            ]
            streams = [await started(engine, one, 4) for one in asked]
            await moved(engine, "s0", "cpu")
            answers = [await reader for _, reader in streams]
            assert engine.state.lanes[1].meter.ahead
            await moved(engine, "s0", "gpu")
            asked.append(request([*prompts[0], *answers[0].tokens, 9], 6, session="s0"))
            answers.append(await read(engine.submit(asked[-1])))
            assert answers[-1].done is not None
            assert answers[-1].done.usage.lane == "gpu"
        for one, answer in zip(asked, answers, strict=True):
            assert answer.tokens == reference.tokens(one.prompt, one.tokens_max)
    finally:
        reference.close()


async def test_pages_begin_and_end_in_steps_that_the_gpu_has_early(
    site: Site, reference: Reference
) -> None:
    """Sessions at the end of a page decode on the GPU: no step waits for their pages, and what it
    is given early has the rows of the step before."""
    async with gpu_engine(site) as engine:
        lane = engine.state.lanes[1]
        prompts = await prepared(engine, [words(i, 246 + 3 * i) for i in range(3)])
        before = lane.meter.steps, lane.meter.ahead
        asked = [request(prompt, 16, session=f"s{i}") for i, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        steps, ahead = lane.meter.steps - before[0], lane.meter.ahead - before[1]
        assert {answer.done.usage.lane for answer in answers if answer.done} == {"gpu"}
        assert ahead > steps // 2
        again = [[*one.prompt, *a.tokens, 5] for one, a in zip(asked, answers, strict=True)]
        longer = [request(prompt, 6, session=f"s{i}") for i, prompt in enumerate(again)]
        later = await asyncio.gather(*(read(engine.submit(one)) for one in longer))
    for one, answer in zip((*asked, *longer), (*answers, *later), strict=True):
        assert answer.tokens == reference.tokens(one.prompt, one.tokens_max)


async def test_a_gpu_that_computes_later_takes_its_own_samples(
    site: Site, reference: Reference
) -> None:
    """Free, penalised and constrained answers on a GPU that has done nothing before it is waited
    for, and has the next step by then; beside them a stream that leaves and comes back."""
    async with gpu_engine(site, QUEUED) as engine:
        lane = engine.state.lanes[1]
        prompts = await prepared(engine, [words(i, 246 + 3 * i) for i in range(4)])
        sampling = Sampling(temperature=0.7, seed=5, repetition_penalty=1.3)
        asked = [
            request(prompts[0], 1500, session="s0"),
            request(prompts[1], 16, session="s1"),
            request(prompts[2], 16, session="s2", sampling=sampling),
        ]
        masked = constrained(prompts[3], SHORT, session="s3")
        streams = [await started(engine, one, 0) for one in (*asked, masked)]
        answers = [await reader for _, reader in streams[1:]]
        assert lane.meter.ahead > lane.meter.steps // 3
        for to in ("cpu", "gpu"):
            n = streams[0][0].completion_tokens
            await moved(engine, "s0", to)
            await eventually(lambda n=n: streams[0][0].completion_tokens > n + 4)
        streams[0][0].cancel()
        first = await streams[0][1]
    assert first.tokens == reference.tokens(prompts[0], len(first.tokens))
    assert answers[0].tokens == reference.tokens(prompts[1], 16)
    assert answers[1].tokens == reference.tokens(prompts[2], 16, sampling)
    assert answers[2].tokens == expected(reference, masked)


async def test_an_interactive_turn_goes_to_the_gpu_once_that_is_up(
    site: Site, reference: Reference
) -> None:
    """The CPU serves while the GPU loads, and is predicted to be slower."""
    prompt = words(9, 250)
    async with gpu_engine(site, router__promote_auto=True) as engine:
        cpu = engine.state.lanes[0].cost
        cpu.observe = lambda work, step_ms: None  # type: ignore[method-assign]
        cpu.cost = StepCost(fixed_ms=40.0)
        asked = request(prompt, 1500, session="s0", sla="interactive")
        generation = await unread(engine, asked, 2)
        first = engine.explain(asked.request_id)
        assert (first["lane"], first["reason_id"]) == ("cpu", "only")
        assert first["candidates"][1]["excluded"] == "it is starting"
        await eventually(lambda: gpu_state(engine) == "ready")
        reader = asyncio.ensure_future(read(generation))

        def is_moved() -> bool:
            engine.running.dispatcher.tick()
            return engine.sessions()[0]["lane"] == "gpu"

        await eventually(is_moved)
        n = generation.completion_tokens
        await eventually(lambda: generation.completion_tokens > n + 2)
        generation.cancel()
        answer = await reader
        assert answer.tokens == reference.tokens(prompt, len(answer.tokens))
        explained = engine.explain(asked.request_id)
        assert "predicted to end" in explained["notes"][0]
        assert explained["moves"][0]["cause"] == "promotion: it ends earlier"


async def test_a_page_of_the_gpu_is_the_page_of_the_cpu(site: Site) -> None:
    """Both lanes compute a prompt; the store compares what the second one seals with the first."""
    prompt = words(2, 270)
    digests: list[dict[bytes, bytes]] = []
    for lane in ("cpu", "gpu"):
        async with gpu_engine(site.at(lane)) as engine:
            await eventually(lambda: gpu_state(engine) == "ready")
            await read(engine.submit(request([5], 1, session="s")))
            if lane == "gpu":
                await moved(engine, "s", lane)
            await read(engine.submit(request(prompt, 2, session="s")))
            await until(lambda: engine.stats()["pages_sealed"] >= 1)
            index = engine.running.store.pages.index
            digests.append({page.key: page.digest for page in index if page.key})
    assert digests[0] == digests[1] != {}


async def test_sessions_that_do_not_fit_the_gpu_together_take_turns(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """Steps are computed in parts, and pages give way to others, when memory is refused too."""
    site, prompts = Site(pocket_path, tmp_path, cache_dir), [words(3 + i, 600) for i in range(3)]
    reference = Reference(pocket_path, cache_dir)
    async with gpu_engine(site, FULL, 24 * MIB, context=1024) as engine:
        longer = await prepared(engine, prompts)
        asked = [request(p, 4, session=f"s{i}") for i, p in enumerate(longer)]
        answers = await asyncio.gather(*(read(engine.submit(one)) for one in asked))
        for prompt, answer in zip(longer, answers, strict=True):
            assert answer.error is None
            assert answer.tokens == reference.tokens(prompt, 4)
        assert engine.lanes()[1]["incarnation"] == 1
    reference.close()


async def test_turns_leave_a_gpu_that_stays_dead(site: Site, reference: Reference) -> None:
    """More of them than the CPU has seats, and blamed at first. It is used once it is back."""
    plan = site.folder / "plan"
    prompts = [words(20 + i, 40) for i in range(3)]
    async with gpu_engine(site, plan=plan, seats=2) as engine:
        engine.state.lanes[1].lane.backoff_s = lambda: 0.1  # type: ignore[method-assign]
        longer = await prepared(engine, prompts)
        streams = [
            await started(engine, request(prompt, 60, session=f"s{i}"), 0)
            for i, prompt in enumerate(longer)
        ]
        plan_failure(plan, "gone", 60)
        answers = await asyncio.gather(*(reader for _, reader in streams))
        for prompt, answer in zip(longer, answers, strict=True):
            assert answer.error is None
            assert answer.tokens == reference.tokens(prompt, 60)
        assert {generation.lane for generation, _ in streams} == {"cpu"}
        assert engine.phase == "degraded"
        await eventually(lambda: "off the bus" in str(engine.stats()["troubles"]))
        other = await read(engine.submit(request(words(30, 20), 5, sla="interactive")))
        assert other.error is None
        plan.unlink()
        await eventually(lambda: engine.phase == "ready")
        await moved(engine, "s0", "gpu")
        longest = [*longer[0], *answers[0].tokens, 7]
        answer = await read(engine.submit(request(longest, 2, session="s0")))
        assert answer.tokens == reference.tokens(longest, 2)


async def test_rows_that_wait_in_the_worker_of_a_gpu_may_be_lost(
    site: Site, reference: Reference
) -> None:
    """So many sessions that their rows are stored by sixteen; two of them leave, then the worker
    ends, and the others go on on the CPU."""
    plan, n_tokens = site.folder / "plan", 80  # none ends before the worker, on a busy machine
    prompts = [words(40 + i, 30) for i in range(LATE_ENTRIES_MIN + 2)]
    async with gpu_engine(site, plan=plan) as engine:
        longer = await prepared(engine, prompts)
        streams = [
            await started(engine, request(prompt, n_tokens, session=f"s{i}"), 0)
            for i, prompt in enumerate(longer)
        ]
        await eventually(lambda: all(stream.completion_tokens >= 8 for stream, _ in streams))
        for session in ("s0", "s1"):
            await moved(engine, session, "cpu")
        await eventually(lambda: all(stream.completion_tokens >= 20 for stream, _ in streams[2:]))
        plan_failure(plan, "abort", 5)
        answers = await asyncio.gather(*(reader for _, reader in streams))
        assert engine.stats()["tokens_recomputed"] > LATE_ENTRIES_MIN  # a row of each, and those
        for prompt, answer in zip(longer, answers, strict=True):
            assert answer.error is None
            assert answer.tokens == reference.tokens(prompt, n_tokens)


@pytest.mark.parametrize(
    ("failure", "why"), [("memory", "a GPU failed: out of memory"), ("abort", "SIGABRT")]
)
async def test_a_turn_does_not_wait_for_a_gpu_that_is_started_again(
    site: Site, reference: Reference, caplog: pytest.LogCaptureFixture, failure: str, why: str
) -> None:
    """Nor does it prove there that it was not the cause."""
    plan = site.folder / "plan"
    async with gpu_engine(site, plan=plan, require="gpu") as engine:
        assert gpu_state(engine) == "ready"
        (prompt,) = await prepared(engine, [words(9, 40)])
        plan_failure(plan, failure, 50)
        generation = engine.submit(request(prompt, 20, session="s0"))
        answer = await read(generation)
        assert answer.tokens == reference.tokens(prompt, 20)
        assert generation.lane == "cpu"
        assert why in caplog.text


async def test_a_daemon_that_requires_a_gpu_does_not_start_without(site: Site) -> None:
    with pytest.raises(BatchEngineError) as refusal:
        async with gpu_engine(site, ABSENT, require="gpu"):
            pass
    assert refusal.value.code == errors.GPU_REQUIRED.code
    assert "there is none" in refusal.value.why


@pytest.mark.parametrize(("device", "first"), [(ABSENT, True), (WRONG, False)])
async def test_without_a_gpu_the_cpu_serves_and_health_says_why(
    site: Site, reference: Reference, device: int, first: bool
) -> None:
    prompt = words(8, 40)
    async with gpu_engine(site, device, first=first) as engine:
        answer = await read(engine.submit(request(prompt, 5)))
        assert answer.tokens == reference.tokens(prompt, 5)
        await eventually(lambda: "GPU" in str(engine.stats()["troubles"]))
        assert engine.phase == "degraded"


async def test_constrained_answers_move_from_the_gpu_to_the_cpu(
    site: Site, reference: Reference
) -> None:
    """By a grammar, and by a least number of tokens."""
    async with gpu_engine(site) as engine:
        first, second = await prepared(engine, [words(5, 60), words(6, 60)])
        asked = constrained(first, LONG, session="s0")
        other = dataclasses.replace(unending(reference, 1), prompt=tuple(second))
        _, reader = await started(engine, asked, 5)
        _, beside = await started(engine, other, 5)
        assert engine.state.lanes[1].meter.steps >= 5
        await moved(engine, "s1", "cpu")
        await moved(engine, "s0", "cpu")
        assert (await reader).tokens == expected(reference, asked)
        assert (await beside).tokens == bounded(reference, other)
