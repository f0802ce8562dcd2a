"""The capacity planner: bounds that hold for every model and processor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchengine.policy.capacity import (
    BATCH,
    ModelSize,
    Processor,
    capacity,
    cpu_processor,
    decode_ms,
    prefill_ms,
)

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
CPU = cpu_processor("cpu", 40.0, 1000.0, 16 * GIB)
CONTEXTS = (2048, 8192, 32768, 131072)

processors = st.builds(
    Processor,
    st.just("any"),
    st.floats(1, 1e4),
    st.floats(10, 1e6),
    st.floats(10, 1e6),
    st.floats(0, 5),
    st.integers(1, 1 << 40),
)


@given(processors, st.integers(0, 1 << 44))
def test_what_is_planned_fits(processor: Processor, disk_bytes: int) -> None:
    found = capacity(MODEL, processor, disk_bytes, CONTEXTS)
    assert found.fits == (processor.memory_bytes >= MODEL.weight_bytes + 2 * MODEL.page_bytes)
    for plan in found.contexts:
        assert plan.context_tokens <= MODEL.context_tokens
        pages = -(-plan.context_tokens // MODEL.page_tokens)
        held = plan.sessions * pages * MODEL.page_bytes
        assert plan.sessions >= 1
        assert held + MODEL.weight_bytes <= processor.memory_bytes
        assert plan.sessions_on_disk * pages * MODEL.page_bytes <= disk_bytes
        assert 1 <= plan.batch <= min(BATCH, plan.sessions)
        assert plan.batch_tpot_ms >= plan.tpot_ms


@given(processors)
def test_a_step_takes_no_less_than_its_reads_and_its_products(processor: Processor) -> None:
    for sessions in (1, 4, 16):
        for tokens in (256, 8192):
            ms = decode_ms(MODEL, processor, sessions, tokens)
            kv_bytes = sessions * tokens * MODEL.page_bytes // MODEL.page_tokens
            assert ms * processor.read_gbps * 1e6 >= 0.999 * (MODEL.step_weight_bytes + kv_bytes)
            assert ms * processor.linear_gops * 1e6 >= 0.999 * 2 * sessions * MODEL.products
    assert prefill_ms(MODEL, processor, 4096) >= 1.999 * prefill_ms(MODEL, processor, 2048)


def test_contexts_end_at_the_model_and_at_memory() -> None:
    found = capacity(MODEL, CPU, 64 * GIB, CONTEXTS)
    assert [plan.context_tokens for plan in found.contexts] == [2048, 8192, 32768]
    small = cpu_processor("cpu", 40.0, 1000.0, MODEL.weight_bytes + 8 * MODEL.page_bytes)
    few = capacity(MODEL, small, 0, CONTEXTS)
    assert [(plan.context_tokens, plan.sessions) for plan in few.contexts] == [(2048, 1)]
    assert not capacity(MODEL, small._replace(memory_bytes=1), 0, CONTEXTS).fits


def test_the_prediction_of_a_measured_model() -> None:
    """0.6B Q4_0 on two Zen 4 cores: prefill of 8,192 tokens at 237 tokens/s, 40.7 ms for 16
    sessions with 200 tokens each (bench engine, 2026-11-22)."""
    model = ModelSize(376 << 20, 376 << 20, 596 * 10**6, 28 * 2048, 28 * 532480, 256, 40960)
    machine = cpu_processor("2 cores", 33.1, 943.0, 16 * GIB)
    assert 0.6 < prefill_ms(model, machine, 8192) / (8192 / 237 * 1000) < 1.7
    assert 0.6 < decode_ms(model, machine, 16, 200) / 40.7 < 1.7
