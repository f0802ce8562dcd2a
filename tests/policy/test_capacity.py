"""The capacity planner: bounds that hold for every model and processor."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchengine.lanes.gpu.kv_room import KvRoom, divide
from batchengine.policy.capacity import (
    BATCH,
    ENTRY_MS,
    GPU_STEP_MS,
    GPUS,
    Experts,
    ModelSize,
    Processor,
    capacity,
    cpu_processor,
    decode_ms,
    found_gpu,
    gpu_processor,
    prefill_ms,
    prior_cost,
    step_bytes,
    unmeasured_cpu,
)
from batchengine.policy.cost import CostModel, StepCost, StepWork, work_of
from kernels.cuda.page_parts import LayerPart, Run
from service.cli.plan import GpuName

GIB = 1 << 30
MODEL = ModelSize(
    weight_bytes=4 * GIB,
    step_weight_bytes=3 * GIB,
    products=7 * 10**9,
    attention_values=32 * 4096,
    page_bytes=16 << 20,
    page_tokens=256,
    context_tokens=32768,
)
# 30B-A3B of Q4_0: most of it is experts, of which a token uses a sixteenth.
MIXTURE = ModelSize(
    weight_bytes=16 * GIB,
    step_weight_bytes=GIB,
    products=3 * 10**9,
    attention_values=48 * 4096,
    page_bytes=13 << 20,
    page_tokens=256,
    context_tokens=32768,
    experts=Experts(n_expert=128, n_used=8, n_bytes=15 * GIB),
)
# Layers with five sixths of a page see a window of 1,024 tokens.
WINDOWED = MODEL._replace(attention_share=1 / 6, window_share=5 / 6, window_pages=5)
CPU = cpu_processor("cpu", 40.0, 1000.0, 16 * GIB)
models = st.sampled_from((MODEL, MIXTURE))
CONTEXTS = (2048, 8192, 32768, 131072)

processors = st.builds(
    Processor,
    st.just("any"),
    st.floats(1, 1e4),
    st.floats(10, 1e6),
    st.floats(10, 1e6),
    st.floats(0, 5),
    st.integers(1, 1 << 40),
    st.booleans(),
)


@given(processors, st.integers(0, 1 << 44), st.floats(0.0, 1.0), st.integers(1, 20))
def test_what_is_planned_fits(
    processor: Processor, disk_bytes: int, window_share: float, window_pages: int
) -> None:
    model = MODEL._replace(window_share=window_share, window_pages=window_pages)
    found = capacity(model, processor, disk_bytes, CONTEXTS)
    assert found.fits == (processor.memory_bytes >= MODEL.weight_bytes + 2 * MODEL.page_bytes)
    for plan in found.contexts:
        assert plan.context_tokens <= MODEL.context_tokens
        pages = -(-plan.context_tokens // MODEL.page_tokens)
        in_window = window_share * min(pages, window_pages) + (1.0 - window_share) * pages
        held = plan.sessions * in_window * MODEL.page_bytes
        assert plan.sessions >= 1
        assert held + MODEL.weight_bytes <= processor.memory_bytes + plan.sessions
        assert plan.sessions_on_disk * pages * MODEL.page_bytes <= disk_bytes
        assert 1 <= plan.batch <= min(BATCH, plan.sessions)
        assert plan.batch_tpot_ms >= plan.tpot_ms


@given(processors, models)
def test_a_step_takes_no_less_than_its_reads_and_its_products(
    processor: Processor, model: ModelSize
) -> None:
    for sessions in (1, 4, 16):
        for tokens in (256, 8192):
            ms = decode_ms(model, processor, sessions, tokens)
            kv_bytes = sessions * tokens * model.page_bytes // model.page_tokens
            read_bytes = step_bytes(model, sessions) + kv_bytes
            assert ms * processor.read_gbps * 1e6 >= 0.999 * read_bytes
            assert ms * processor.linear_gops * 1e6 >= 0.999 * 2 * sessions * model.products
    assert prefill_ms(model, processor, 4096) >= 1.999 * prefill_ms(model, processor, 2048)
    steps_of_prefill = 4096 / 512
    read_ms = steps_of_prefill * step_bytes(model, 512) / (processor.read_gbps * 1e6)
    assert prefill_ms(model, processor, 4096) >= 0.999 * read_ms


@given(st.integers(2, 1024), st.data())
def test_a_step_reads_the_experts_that_its_tokens_choose(
    n_expert: int, data: st.DataObject
) -> None:
    """From those of one token to all, by ever less with each token, and never more than all."""
    n_used = data.draw(st.integers(1, n_expert))
    model = MIXTURE._replace(experts=Experts(n_expert, n_used, 15 * GIB))
    found = [step_bytes(model, tokens) - GIB for tokens in range(65)]
    assert found[0] == 0.0
    assert found[1] == pytest.approx(15 * GIB * n_used / n_expert)
    growth = [b - a for a, b in itertools.pairwise(found)]
    assert all(a + 1.0 >= b >= -1.0 for a, b in itertools.pairwise(growth))
    assert found[-1] <= 15 * GIB
    assert step_bytes(model, 1 << 20) == pytest.approx(16 * GIB)
    assert step_bytes(MODEL, 1) == step_bytes(MODEL, 512) == MODEL.step_weight_bytes


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.0625), (8, 0.40), (32, 0.87), (512, 1.0)])
def test_the_share_of_experts_that_a_batch_reads(tokens: int, share: float) -> None:
    """Of 128 experts of which a token uses 8."""
    assert (step_bytes(MIXTURE, tokens) - GIB) / (15 * GIB) == pytest.approx(share, abs=0.005)


def test_a_batch_gains_less_from_experts_than_from_dense_weights() -> None:
    """A step of 16 sessions takes over four times as long as one of one session; of a dense model
    that reads as much for one session it takes little longer."""
    dense = MIXTURE._replace(experts=None, step_weight_bytes=GIB + 15 * GIB // 16)
    fast = cpu_processor("cpu", 40.0, 1e6, 64 * GIB)  # bound by what it reads
    slower = decode_ms(MIXTURE, fast, 16, 256) / decode_ms(MIXTURE, fast, 1, 256)
    assert slower > 4 > 1.5 > decode_ms(dense, fast, 16, 256) / decode_ms(dense, fast, 1, 256)


def test_contexts_end_at_the_model_and_at_memory() -> None:
    found = capacity(MODEL, CPU, 64 * GIB, CONTEXTS)
    assert [plan.context_tokens for plan in found.contexts] == [2048, 8192, 32768]
    small = cpu_processor("cpu", 40.0, 1000.0, MODEL.weight_bytes + 8 * MODEL.page_bytes)
    few = capacity(MODEL, small, 0, CONTEXTS)
    assert [(plan.context_tokens, plan.sessions) for plan in few.contexts] == [(2048, 1)]
    assert not capacity(MODEL, small._replace(memory_bytes=1), 0, CONTEXTS).fits


@pytest.mark.parametrize("share", [0.5, 5 / 6, 1.0])
def test_memory_holds_no_more_than_the_longest_session(share: float) -> None:
    """Also if it has room for few more pages than the window shows."""
    model = MODEL._replace(window_share=share, window_pages=5)
    for tenths in range(20, 100):
        kv_bytes = tenths * MODEL.page_bytes // 10
        tokens = min(MODEL.context_tokens, model.tokens_in(kv_bytes))
        assert model.read_bytes(tokens) <= kv_bytes
        longer = model.read_bytes(tokens + MODEL.page_tokens)
        assert longer > kv_bytes or tokens == MODEL.context_tokens, tenths


def test_memory_holds_what_windows_show_of_long_sessions() -> None:
    """32,768 tokens are 128 pages; layers with a window see 5 of them."""
    whole, windowed = (capacity(m, CPU, 64 * GIB, (1024, 32768)) for m in (MODEL, WINDOWED))
    of_page = 12 * GIB / MODEL.page_bytes
    assert [plan.sessions for plan in whole.contexts] == [of_page // 4, of_page // 128]
    assert [plan.sessions for plan in windowed.contexts] == [of_page // 4, of_page // (25.5)]
    assert whole.contexts[1].sessions_on_disk == windowed.contexts[1].sessions_on_disk
    few = CPU._replace(memory_bytes=MODEL.weight_bytes + 8 * MODEL.page_bytes)
    longest = [capacity(m, few, 0, (1 << 20,)).contexts[0] for m in (MODEL, WINDOWED)]
    assert [plan.context_tokens // 256 for plan in longest] == [8, 23]
    every = MODEL._replace(window_share=1.0, window_pages=5)
    assert capacity(every, few, 0, (1 << 20,)).contexts[0].context_tokens == MODEL.context_tokens


@pytest.mark.parametrize(
    "model",
    [
        WINDOWED,
        *(WINDOWED._replace(window_share=s, window_pages=n) for s, n in ((0.5, 2), (0.2, 9))),
    ],
)
@pytest.mark.parametrize("gib", [3, 12, 40])
def test_layers_with_a_window_have_memory_of_their_own_on_a_gpu(model: ModelSize, gib: int) -> None:
    """Half of it at most, so short sessions are fewer than by their bytes: as many as a GPU lane
    with so many seats has pages for, of each of the two parts."""
    gpu = CPU._replace(memory_bytes=model.weight_bytes + gib * GIB, divides_kv=True)
    planned = capacity(model, gpu, 64 * GIB, (512, 1024, 4096, 32768)).contexts
    in_window = round(model.window_share * model.page_bytes)
    parts = [
        LayerPart(256 * (model.window_pages - 1) + 1, (Run(0, in_window),)),
        LayerPart(0, (Run(in_window, model.page_bytes),)),
    ]
    for plan in planned:
        pages = -(-plan.context_tokens // 256)

        def lane(seats: int, pages: int = pages) -> int:
            room = KvRoom(gib * GIB, planned[-1].context_tokens // 256, 16, seats)
            windows, whole = divide(parts, room, lambda n_bytes: n_bytes)
            return min(windows // min(pages, model.window_pages), whole // pages)

        least, most = int(plan.sessions * 0.95) - 1, int(plan.sessions * 1.05) + 2
        assert lane(least) >= least
        assert lane(most) < most


def test_the_prediction_of_a_measured_model() -> None:
    """0.6B Q4_0 on two Zen 4 cores: prefill of 8,192 tokens at 237 tokens/s, 40.7 ms for 16
    sessions with 200 tokens each (bench engine, 2026-11-22)."""
    model = ModelSize(376 << 20, 376 << 20, 596 * 10**6, 28 * 2048, 28 * 532480, 256, 40960)
    machine = cpu_processor("2 cores", 33.1, 943.0, 16 * GIB)
    assert 0.6 < prefill_ms(model, machine, 8192) / (8192 / 237 * 1000) < 1.7
    assert 0.6 < decode_ms(model, machine, 16, 200) / 40.7 < 1.7


# ---- priors ----

SMALL = ModelSize(360 << 20, 360 << 20, 600 * 10**6, 28 * 2048, 28 * 532480, 256, 40960)


def test_the_prior_of_a_cpu_has_the_right_order_of_magnitude() -> None:
    """0.6B Q4_0 on two cores: 512 tokens of prefill take about 0.75 s, a decode about 12 ms."""
    prior = prior_cost(SMALL, unmeasured_cpu(2))
    assert 500 < prior.predict_ms(StepWork(512, 0, 0, 512 * 256.0)) < 5000
    assert 4 < prior.predict_ms(StepWork(0, 1, 100, 0.0)) < 40


@given(processors, models)
def test_a_prior_is_no_less_than_the_roofline_and_at_most_twice(
    processor: Processor, model: ModelSize
) -> None:
    prior = prior_cost(model, processor)
    CostModel(prior)  # which takes positive coefficients only
    for sessions in (1, 16):
        for tokens in (256, 8192):
            ms = prior.predict_ms(work_of([(tokens - 1, 1)] * sessions)) - sessions * ENTRY_MS
            least = decode_ms(model, processor, sessions, tokens)
            assert 0.999 * least <= ms <= 2.001 * least
    chunk_ms = prior.predict_ms(work_of([(0, 512)]))
    least = prefill_ms(model, processor, 512)
    assert 0.999 * least <= chunk_ms <= 2.001 * least + prior.fixed_ms


@given(processors, st.integers(2, 15))
def test_the_prior_of_a_small_batch_of_experts_is_three_quarters_of_the_roofline_at_least(
    processor: Processor, sessions: int
) -> None:
    """The reads of experts grow most with the first sessions; a prior is linear."""
    ms = prior_cost(MIXTURE, processor).predict_ms(work_of([(255, 1)] * sessions))
    assert ms >= 0.75 * decode_ms(MIXTURE, processor, sessions, 256)


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_gpu_is_found_by_the_name_of_its_driver(name: str, sheet: str) -> None:
    known = GPUS[sheet]
    found = found_gpu(name, known.multiprocessors, known.memory_bytes)
    assert found[1:] == gpu_processor(sheet)[1:]
    part = found_gpu(f"{name} MIG 1g", known.multiprocessors // 4, known.memory_bytes // 8)
    assert part.linear_gops == pytest.approx(found.linear_gops / 4, rel=0.05)
    assert part.read_gbps == pytest.approx(found.read_gbps / 8)
    some = found_gpu(name, known.multiprocessors // 4, known.memory_bytes)  # of a lane's part
    assert some.read_gbps == pytest.approx(found.read_gbps / 4, rel=0.05)


def test_an_unknown_gpu_is_assumed_to_be_slower_than_every_known_one() -> None:
    for sheet, known in GPUS.items():
        unknown = found_gpu("Another L40SX GH200", known.multiprocessors, known.memory_bytes)
        least, most = prior_cost(MODEL, gpu_processor(sheet)), prior_cost(MODEL, unknown)
        assert all(a <= b for a, b in zip(least, most, strict=True))
        assert most.prefill_token_ms < prior_cost(MODEL, unmeasured_cpu(8)).prefill_token_ms
    none = found_gpu("", 0, 0)
    assert none.step_ms == GPU_STEP_MS
    CostModel(prior_cost(MODEL, none))


def test_the_prior_of_a_gpu_is_replaced_by_measurement() -> None:
    """A device that is five times as slow in what it computes: a mixed step and a few decodes."""
    prior = prior_cost(MODEL, gpu_processor("h100"))
    truth = StepCost(2 * prior.fixed_ms, *(5 * each for each in prior[1:]))
    model = CostModel(prior)
    for _ in range(12):
        for work in [StepWork(512, 0, 0, 512 * 256.0)] + [StepWork(0, 8, 8 * 2000, 0.0)] * 4:
            model.observe(work, truth.predict_ms(work))
    for work in (StepWork(256, 0, 0, 256 * 4000.0), StepWork(0, 4, 4 * 2000, 0.0)):
        assert model.cost.predict_ms(work) == pytest.approx(truth.predict_ms(work), rel=0.3)


def test_the_command_line_names_every_gpu() -> None:
    assert get_args(GpuName) == tuple(GPUS)
