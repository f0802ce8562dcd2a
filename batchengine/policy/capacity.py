"""Capacity of a processor for a model: what fits its memory, and how fast it should be.

A roofline model, which measures nothing of the model itself: a decode step reads the weights once
and the KV of its sessions, and computes one product per weight and session; prefill computes a
product per weight and token, and two per pair of tokens and query value. `Processor` has what of
the peaks kernels reach. Speeds are predictions, within a factor of two as a rule; `CostModel`
replaces them once steps run.
"""

from __future__ import annotations

from typing import NamedTuple

BATCH = 16  # sessions of the batch that plans are made for
# What kernels reach of a measured peak (`bench kernels`, `bench engine` on Zen 4, bench/results/).
READ_SHARE = 0.85
LINEAR_SHARE = 0.65
ATTENTION_SHARE = 0.55
STEP_MS = 0.3
CHUNK_TOKENS = 512  # of one prefill step


class ModelSize(NamedTuple):
    """Work and bytes of a model. `step_weight_bytes` are read by each step: all but the embedding,
    of which a token reads one row. `attention_values`: query values of all layers and heads."""

    weight_bytes: int
    step_weight_bytes: int
    products: int  # per token
    attention_values: int
    page_bytes: int  # of 256 tokens of KV
    page_tokens: int
    context_tokens: int


class Processor(NamedTuple):
    """What computes: read GB/s, int8 operations (two per product) in GOPS, time of a step apart
    from both, and bytes for weights and KV. The rates are what kernels reach, not peaks."""

    name: str
    read_gbps: float
    linear_gops: float
    attention_gops: float
    step_ms: float
    memory_bytes: int


class ContextPlan(NamedTuple):
    """Sessions of one context length. Times in milliseconds."""

    context_tokens: int
    sessions: int  # whose KV fits in memory at once
    sessions_on_disk: int
    prefill_ms: float  # of the whole context, alone
    tpot_ms: float  # of one session
    batch: int  # BATCH, or as many as fit
    batch_tpot_ms: float
    batch_tokens_per_s: float


class LaneCapacity(NamedTuple):
    """What a processor can do for a model."""

    processor: Processor
    kv_bytes: int  # left for KV beside the weights; 0: the weights do not fit
    contexts: tuple[ContextPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether the weights and one page for each of two sessions fit."""
        return self.kv_bytes > 0


def cpu_processor(
    name: str, peak_read_gbps: float, peak_int8_gops: float, memory_bytes: int
) -> Processor:
    """A CPU with these measured peaks."""
    return Processor(
        name,
        READ_SHARE * peak_read_gbps,
        LINEAR_SHARE * peak_int8_gops,
        ATTENTION_SHARE * peak_int8_gops,
        STEP_MS,
        memory_bytes,
    )


def capacity(
    model: ModelSize, processor: Processor, disk_bytes: int, contexts: tuple[int, ...]
) -> LaneCapacity:
    """Plan contexts up to the model's own; `disk_bytes` are what the store may take on disk."""
    kv_bytes = max(0, processor.memory_bytes - model.weight_bytes)
    if kv_bytes < 2 * model.page_bytes:
        return LaneCapacity(processor, 0, ())
    longest = min(model.context_tokens, kv_bytes // model.page_bytes * model.page_tokens)
    lengths = sorted({min(tokens, longest) for tokens in contexts})
    return LaneCapacity(
        processor,
        kv_bytes,
        tuple(_context(model, processor, kv_bytes, disk_bytes, tokens) for tokens in lengths),
    )


def decode_ms(model: ModelSize, processor: Processor, sessions: int, context_tokens: int) -> float:
    """One decode step of `sessions` with `context_tokens` of KV each."""
    kv_bytes = sessions * context_tokens * model.page_bytes / model.page_tokens
    pairs = sessions * context_tokens * model.attention_values
    reads = _read_ms(processor, model.step_weight_bytes)
    products = _compute_ms(processor.linear_gops, sessions * model.products)
    # K and V are read while they are computed with; the slower of the two bounds attention.
    attention = max(_read_ms(processor, kv_bytes), _compute_ms(processor.attention_gops, 2 * pairs))
    return processor.step_ms + max(reads, products) + attention


def prefill_ms(model: ModelSize, processor: Processor, tokens: int) -> float:
    """Prefill of `tokens` from the start."""
    pairs = tokens * tokens / 2 * model.attention_values
    linear = _compute_ms(processor.linear_gops, tokens * model.products)
    steps = -(-tokens // CHUNK_TOKENS)
    return steps * processor.step_ms + linear + _compute_ms(processor.attention_gops, 2 * pairs)


def _read_ms(processor: Processor, n_bytes: float) -> float:
    return n_bytes / (processor.read_gbps * 1e6)


def _compute_ms(gops: float, products: float) -> float:
    return 2 * products / (gops * 1e6)


def _context(
    model: ModelSize, processor: Processor, kv_bytes: int, disk_bytes: int, tokens: int
) -> ContextPlan:
    session_bytes = -(-tokens // model.page_tokens) * model.page_bytes
    sessions = kv_bytes // session_bytes
    batch = max(1, min(BATCH, sessions))
    tpot_ms = decode_ms(model, processor, batch, tokens)
    return ContextPlan(
        tokens,
        sessions,
        disk_bytes // session_bytes,
        prefill_ms(model, processor, tokens),
        decode_ms(model, processor, 1, tokens),
        batch,
        tpot_ms,
        1000 * batch / tpot_ms,
    )
