"""Random cases of every GPU kernel: what it writes has the bits of the CPU's kernels.

A case takes a GPU, a pool and a generator of random numbers, chooses its shapes, and raises
`Differs`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

import kernels
from bench.cuda.cases.attention import (
    Attention,
    attention_case,
    attention_long_case,
    attention_small_case,
    attention_spans_case,
    attention_wide_case,
    attention_window_case,
    attention_window_spans_case,
    random_page,
)
from bench.cuda.cases.experts import experts_case, select_case
from bench.cuda.cases.heads import heads_case
from bench.cuda.cases.linear import embed_case, linear_case, norm_add_case, quantise_case
from bench.cuda.cases.recurrent import delta_net_case, mamba2_case, short_conv_case
from bench.cuda.cases.rows import gates_case, values_case
from bench.cuda.cases.sample import sample_case, take_samples_case
from bench.cuda.cases.values import Differs, compare, packed_with_bytes, rows_of
from kernels.cuda.gpu import Gpu
from kernels.cuda.products import PACKED_AS

__all__ = [
    "Attention",
    "Case",
    "Differs",
    "cases",
    "compare",
    "experts_case",
    "linear_case",
    "packed_with_bytes",
    "random_page",
    "rows_of",
]

# Of each way in which a product reads weights one: the kernels are those of experts.
HEAD_KINDS = "q4_0", "q8_0", "q6_k", "f16", "f32"
Case = Callable[[Gpu, kernels.Pool, np.random.Generator], None]


def cases() -> dict[str, Case]:
    """Every case by name."""
    table: dict[str, Case] = {
        "quantise": quantise_case,
        "norm add": norm_add_case,
        "attention": attention_case,
        "attention, small heads": attention_small_case,
        "attention, spans": attention_spans_case,
        "attention, wide heads": attention_wide_case,
        "attention, long": attention_long_case,
        "attention, window": attention_window_case,
        "attention, window, spans": attention_window_spans_case,
        "delta net": delta_net_case,
        "mamba 2": mamba2_case,
        "short conv": short_conv_case,
        "gates": gates_case,
        "values": values_case,
        "sample": sample_case,
        "take samples": take_samples_case,
        "select experts": select_case,
    }
    for kind in (kind for kind in kernels.KINDS if kind not in PACKED_AS):
        table[f"linear {kind}"] = partial(linear_case, kind=kind)
        table[f"embed {kind}"] = partial(embed_case, kind=kind)
        table[f"experts {kind}"] = partial(experts_case, kind=kind)
    for kind in HEAD_KINDS:
        table[f"heads {kind}"] = partial(heads_case, kind=kind)
    return table
