"""Capacity of a processor for a model: what fits its memory, and how fast it should be.

A roofline model, which measures nothing of the model itself: a step reads its weights once and the
KV of its sessions, and computes one product per weight and token; prefill computes two more per
pair of tokens and query value. Of experts, a step reads those that its tokens choose, and computes
with those that a token uses. `Processor` has what of the peaks kernels reach. Speeds are
predictions, within a factor of two as a rule; `CostModel` begins with them (`prior_cost`) and
replaces them once steps run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from batchengine.policy.cost import StepCost

BATCH = 16  # sessions of the batch that plans are made for
# What kernels reach of a measured peak (`bench kernels`, `bench engine` on Zen 4, bench/results/).
READ_SHARE = 0.85
LINEAR_SHARE = 0.65
ATTENTION_SHARE = 0.55
STEP_MS = 0.3
CHUNK_TOKENS = 512  # of one prefill step
# Of a core that was not measured, and in all: reading in GB/s, int8 in GOPS.
CORE_READ_GBPS, READ_GBPS_MAX, CORE_GOPS = 10.0, 60.0, 150.0
CORE_ATTENTION_GOPS = CORE_GOPS * ATTENTION_SHARE / LINEAR_SHARE
# Of a GPU's data sheet: reading by a copy, and the bound that the fp32 step of every block sets.
GPU_READ_SHARE, GPU_LINEAR_SHARE, GPU_ATTENTION_SHARE = 0.7, 0.13, 0.1
GPU_RESERVE_BYTES = 2 << 30
COPY_GBPS = 8.0  # of pages to a GPU, through pinned memory
GPU_STEP_MS = 1.0
ARENA_SHARE = 8  # open pages of a lane may take an eighth of the KV budget
OPEN_PAGES_MIN = 8
ENTRY_MS = 0.01  # of a decode beside its products: its token is sampled


class Experts(NamedTuple):
    """The experts of a model: n_used of n_expert in each layer for a token, n_bytes in all."""

    n_expert: int
    n_used: int
    n_bytes: int


class ModelSize(NamedTuple):
    """Work and bytes of a model. `step_weight_bytes` are read by each step: all but experts and the
    embedding, of which a token reads one row. `attention_values`: query values of all heads in the
    layers that attend to the whole context. `attention_share` of the KV is theirs; what the others
    read and compute, whose queries see a window, does not grow with the context; they hold
    `window_share` of a page, and see the last `window_pages` of a session at most. `state_bytes`:
    of the recurrent state of a session, which each of its tokens reads and writes anew."""

    weight_bytes: int
    step_weight_bytes: int
    products: int  # per token
    attention_values: int
    page_bytes: int  # of 256 tokens of KV
    page_tokens: int
    context_tokens: int
    experts: Experts | None = None
    attention_share: float = 1.0
    state_bytes: int = 0
    window_share: float = 0.0
    window_pages: int = 0

    @property
    def token_read_bytes(self) -> float:
        """Bytes of KV that a query reads for each token before it."""
        return self.attention_share * self.page_bytes / self.page_tokens

    def read_bytes(self, tokens: int) -> int:
        """Bytes of KV of a session of `tokens` that its next tokens read."""
        pages = -(-tokens // self.page_tokens)
        hidden = max(0, pages - self.window_pages) * self.window_share
        return round((pages - hidden) * self.page_bytes)

    def window_bytes(self, tokens: int) -> float:
        """Those of them in layers with a window."""
        pages = min(-(-tokens // self.page_tokens), self.window_pages)
        return pages * self.window_share * self.page_bytes

    def tokens_in(self, kv_bytes: int) -> int:
        """Tokens of whole pages of the longest session that reads at most `kv_bytes`."""
        pages = kv_bytes // self.page_bytes
        if self.window_share and pages >= self.window_pages:
            left = kv_bytes / self.page_bytes - self.window_pages * self.window_share
            most = self.context_tokens // self.page_tokens + 1
            if self.window_share < 1.0:
                most = min(most, int(left / (1.0 - self.window_share)))
            pages = max(pages, most)
        return pages * self.page_tokens


class Processor(NamedTuple):
    """What computes: read GB/s, int8 operations (two per product) in GOPS, time of a step apart
    from both, and bytes for weights and KV. The rates are what kernels reach, not peaks.
    `divides_kv`: layers with a window have memory of their own, half at most of what one context
    leaves, as on a GPU (`lanes/gpu/kv_room.py`)."""

    name: str
    read_gbps: float
    linear_gops: float
    attention_gops: float
    step_ms: float
    memory_bytes: int
    divides_kv: bool = False


class GpuSheet(NamedTuple):
    """A GPU by its data sheet. `tops`: int8 operations without sparsity."""

    memory_bytes: int
    read_gbps: float
    tops: float
    multiprocessors: int


GPUS: Mapping[str, GpuSheet] = {
    "a100-40": GpuSheet(40 << 30, 1555, 624, 108),
    "a100-80": GpuSheet(80 << 30, 2039, 624, 108),
    "l4": GpuSheet(24 << 30, 300, 242, 58),
    "l40s": GpuSheet(48 << 30, 864, 733, 142),
    "rtx4090": GpuSheet(24 << 30, 1008, 661, 128),
    "h100": GpuSheet(80 << 30, 3350, 1979, 132),
    "h200": GpuSheet(141 << 30, 4800, 1979, 132),
    "b200": GpuSheet(180 << 30, 8000, 4500, 148),
}
# Of a GPU that has no sheet, per multiprocessor: less than any with a sheet has.
UNKNOWN_READ_GBPS, UNKNOWN_TOPS = 5.0, 3.0


class ContextPlan(NamedTuple):
    """Sessions of one context length. Times in milliseconds."""

    context_tokens: int
    sessions: int  # whose KV fits in memory at once, as far as they read it
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


def unmeasured_cpu(threads: int) -> Processor:
    """A CPU with `threads` threads at typical rates: wrong by a factor of three at worst."""
    threads = max(1, threads)
    return Processor(
        f"cpu, {threads} threads, not measured",
        min(READ_GBPS_MAX, CORE_READ_GBPS * threads),
        CORE_GOPS * threads,
        CORE_ATTENTION_GOPS * threads,
        STEP_MS,
        0,
    )


def gpu_processor(name: str) -> Processor:
    """A whole GPU of the table, by its name there."""
    return _by_sheet(name, GPUS[name])


def found_gpu(name: str, multiprocessors: int, memory_bytes: int) -> Processor:
    """A GPU as its driver describes it: by its data sheet, in proportion to what it has of it, as
    a partition has less; or by its multiprocessors, if no sheet has its name."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    words |= {word.removesuffix("gb") for word in words}
    named = [key for key in GPUS if words.issuperset(key.removeprefix("rtx").split("-"))]
    if named:
        sheet = GPUS[named[0]]
        computes = min(1.0, multiprocessors / sheet.multiprocessors)
        reads = min(computes, memory_bytes / sheet.memory_bytes)
    else:
        n = max(1, multiprocessors)
        sheet, computes, reads = GpuSheet(0, UNKNOWN_READ_GBPS * n, UNKNOWN_TOPS * n, n), 1.0, 1.0
    return _by_sheet(
        name,
        GpuSheet(memory_bytes, reads * sheet.read_gbps, computes * sheet.tops, multiprocessors),
    )


def _by_sheet(name: str, sheet: GpuSheet) -> Processor:
    return Processor(
        f"gpu {name}, by its data sheet",
        GPU_READ_SHARE * sheet.read_gbps,
        GPU_LINEAR_SHARE * sheet.tops * 1000,
        GPU_ATTENTION_SHARE * sheet.tops * 1000,
        GPU_STEP_MS,
        sheet.memory_bytes - GPU_RESERVE_BYTES,
        divides_kv=True,
    )


def step_bytes(model: ModelSize, tokens: int) -> float:
    """Bytes of weights that a step of `tokens` tokens reads. Their choices of experts are assumed
    to be independent of each other, so those of n experts that one of them chooses are
    n (1 - (1 - used / n)^tokens): of 128 of which a token uses 8, 40 % for 8 tokens, 87 % for 32.
    """
    if model.experts is None:
        return model.step_weight_bytes
    n_expert, n_used, n_bytes = model.experts
    return model.step_weight_bytes + n_bytes * (1.0 - (1.0 - n_used / n_expert) ** tokens)


def prior_cost(model: ModelSize, processor: Processor) -> StepCost:
    """What steps are assumed to cost until they were measured.

    Each coefficient is what the work costs alone: reads and products, which overlap, are added, so
    a step of one session or of BATCH is predicted at most twice as long as by `decode_ms`. Between
    the two, reads of experts grow with each session by the same; a chunk of CHUNK_TOKENS reads
    what it reads.
    """
    token_ms = _compute_ms(processor.linear_gops, model.products)
    pair_ms = _compute_ms(processor.attention_gops, 2 * model.attention_values)
    one_ms, batch_ms, chunk_ms = (
        _read_ms(processor, step_bytes(model, tokens)) for tokens in (1, BATCH, CHUNK_TOKENS)
    )
    entry_ms = (batch_ms - one_ms) / (BATCH - 1)
    fixed_ms = one_ms - entry_ms
    entry_ms += _read_ms(processor, 2 * model.state_bytes)
    return StepCost(
        processor.step_ms + fixed_ms,
        token_ms + (chunk_ms - fixed_ms) / CHUNK_TOKENS,
        token_ms + entry_ms + ENTRY_MS,
        max(_read_ms(processor, model.token_read_bytes), pair_ms),
        pair_ms,
    )


def capacity(
    model: ModelSize, processor: Processor, disk_bytes: int, contexts: tuple[int, ...]
) -> LaneCapacity:
    """Plan contexts up to the model's own; `disk_bytes` are what the store may take on disk."""
    kv_bytes = max(0, processor.memory_bytes - model.weight_bytes)
    if kv_bytes < 2 * model.page_bytes:
        return LaneCapacity(processor, 0, ())
    longest = min(model.context_tokens, model.tokens_in(kv_bytes))
    lengths = sorted({min(tokens, longest) for tokens in contexts})
    return LaneCapacity(
        processor,
        kv_bytes,
        tuple(_context(model, processor, kv_bytes, disk_bytes, tokens) for tokens in lengths),
    )


def decode_ms(model: ModelSize, processor: Processor, sessions: int, context_tokens: int) -> float:
    """One decode step of `sessions` with `context_tokens` of KV each."""
    kv_bytes = sessions * context_tokens * model.token_read_bytes
    pairs = sessions * context_tokens * model.attention_values
    state_bytes = 2 * sessions * model.state_bytes
    reads = _read_ms(processor, step_bytes(model, sessions) + state_bytes)
    products = _compute_ms(processor.linear_gops, sessions * model.products)
    # K and V are read while they are computed with; the slower of the two bounds attention.
    attention = max(_read_ms(processor, kv_bytes), _compute_ms(processor.attention_gops, 2 * pairs))
    return processor.step_ms + max(reads, products) + attention


def prefill_ms(model: ModelSize, processor: Processor, tokens: int) -> float:
    """Prefill of `tokens` from the start."""
    pairs = tokens * tokens / 2 * model.attention_values
    steps = -(-tokens // CHUNK_TOKENS)
    products = _compute_ms(processor.linear_gops, tokens * model.products)
    reads = steps * _read_ms(processor, step_bytes(model, min(tokens, CHUNK_TOKENS)))
    attention = _compute_ms(processor.attention_gops, 2 * pairs)
    return steps * processor.step_ms + max(reads, products) + attention


def _read_ms(processor: Processor, n_bytes: float) -> float:
    return n_bytes / (processor.read_gbps * 1e6)


def _compute_ms(gops: float, products: float) -> float:
    return 2 * products / (gops * 1e6)


def _context(
    model: ModelSize, processor: Processor, kv_bytes: int, disk_bytes: int, tokens: int
) -> ContextPlan:
    session_bytes = -(-tokens // model.page_tokens) * model.page_bytes + model.state_bytes
    # The next state is written beside the last one.
    sessions = kv_bytes // (model.read_bytes(tokens) + 2 * model.state_bytes)
    if processor.divides_kv and model.window_share:
        sessions = min(sessions, max(1, _sessions_apart(model, kv_bytes, tokens)))
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


def _sessions_apart(model: ModelSize, kv_bytes: int, tokens: int) -> int:
    """Sessions that fit where layers with a window have memory of their own: for each seat the
    pages that a window shows, and half at most of what one context leaves."""
    longest = min(model.context_tokens, model.tokens_in(kv_bytes))
    left = max(0, kv_bytes - model.read_bytes(longest))
    windows = model.window_bytes(longest) + left / 2
    in_windows, of_seat = map(model.window_bytes, (tokens, longest))
    whole = model.read_bytes(tokens) - in_windows + 2 * model.state_bytes
    most = windows / in_windows
    if whole >= 1.0:
        most = min(most, max(kv_bytes / (whole + of_seat), (kv_bytes - windows) / whole))
    return int(most)


def open_pages(entries_max: int, budget_bytes: int, page_bytes: int) -> int:
    """Pages that a lane has room for that are not full yet, unless its configuration says how many:
    an open one of each session, and those that are filled by prompts and read by moves."""
    return min(3 * entries_max + 16, max(OPEN_PAGES_MIN, budget_bytes // ARENA_SHARE // page_bytes))
