"""Attention layers: what the keys of a file say of them.

Refuses heads, windows and rotations that `AttentionSpec` cannot say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from batchengine import errors
from batchengine.gguf import GgufFile
from batchengine.weights import yarn
from batchengine.weights.architectures import ARCHITECTURES, OTHERS_BASE
from batchengine.weights.keys import (
    count_of,
    each_layer,
    flags_of,
    is_last_of,
    number_between,
    same_for_all_layers,
    unsupported,
)
from kv_store.layout import KvHeads

HEAD_DIM_MAX, LATENT_HEADS_MAX = 576, 1024
WINDOWS = {"of_64_layers": 4096}  # of files that do not say

# A factor per rotated pair: those of Llama 3, or those of LongRoPE for contexts longer than the
# first training, which has others for shorter ones.
ROPE_FREQS, ROPE_FACTORS_LONG = "rope_freqs.weight", "rope_factors_long.weight"
ROPE_FACTORS_SHORT = "rope_factors_short.weight"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions: angle(p, i) = p · base^(-2i/n_rot) / factor_i · position_scale.

    style "norm" rotates the pairs (2i, 2i+1), "neox" the pairs (i, i+n_rot/2). attn_factor
    multiplies cos and sin. has_factors: the file has a factor per pair; else they are `factors`, or
    all 1 if these are empty. Queries are scaled by 1 + query_log · ln(1 + floor(p / query_span)).
    """

    style: str
    base: float
    n_rot: int
    position_scale: float
    attn_factor: float
    has_factors: bool
    factors: tuple[float, ...] = ()
    query_log: float = 0.0
    query_span: int = 1


class AttentionWidths(NamedTuple):
    """See `AttentionSpec.widths`."""

    n_head: int
    n_kv_head: int
    head_dim: int
    has_kv: bool
    has_post_norm: bool
    has_gate: bool
    gate_rows: int


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: K and V of a token are one latent row of kv_rank values, which
    all heads share, beside the rotated values of K (rule 16 of docs/numerics.md).

    q_rank: width of the projection that queries are made of; 0 = they are made of the row itself.
    nope_dim: values of a head of q that are not rotated, before its matrix maps them to kv_rank.
    value_dim: values of a head of the output.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A mixer: causal attention of grouped heads over KV pages; scale multiplies q·k.

    norms_whole_qk: all heads of Q are normed as one row, and those of K, not each alone.
    norms_rotated: heads of Q and K are normed after the rotation, not before.
    has_v_norm: heads of V are normed, too, without weights. kv_from: the layer whose K and V this
    one reads instead of its own; -1 = it has some. has_rope: heads are rotated. window: how many
    positions a query sees, its own included; 0 = all before it. has_sinks: each query head has a
    sink, which takes a share of the weight of its tokens. has_pre_norm: the row that is read is
    normed. has_post_norm: the output is normed before it is added. has_gate: the output is
    multiplied by a sigmoid of another product of the input; gates_heads: that has one value for
    each head. mla: how q, K, V and the output are
    made of latent rows; then there is one KV head, whose first rope.n_rot dims are rotated, and V
    is the rest of K.
    """

    n_head: int
    n_kv_head: int
    head_dim: int
    scale: float
    has_qk_norm: bool
    rope: RopeSpec
    has_rope: bool = True
    window: int = 0
    has_sinks: bool = False
    has_post_norm: bool = False
    has_gate: bool = False
    gates_heads: bool = False
    has_v_norm: bool = False
    norms_whole_qk: bool = False
    norms_rotated: bool = False
    kv_from: int = -1
    has_pre_norm: bool = True
    mla: MlaSpec | None = None

    @property
    def has_kv(self) -> bool:
        """Whether a KV page has rows of this layer."""
        return self.kv_from < 0

    @property
    def kv_heads(self) -> KvHeads:
        """What it has in a KV page, or reads of another layer there."""
        return KvHeads(self.n_kv_head, self.head_dim, self.rope.n_rot if self.mla else 0)

    @property
    def widths(self) -> AttentionWidths:
        """What the buffers of a step are as wide as."""
        heads = self.n_head, self.n_kv_head, self.head_dim
        gate = self.has_gate, self.gate_rows
        return AttentionWidths(*heads, self.has_kv, self.has_post_norm, *gate)

    @property
    def q_rows(self) -> int:
        """Width of all query heads."""
        return self.n_head * self.head_dim

    @property
    def gate_rows(self) -> int:
        """Width of the gate, of a layer that has one."""
        return self.n_head if self.gates_heads else self.q_rows

    @property
    def kv_rows(self) -> int:
        """Width of all K (or V) heads."""
        return self.n_kv_head * self.head_dim


def read_attentions(gguf: GgufFile, arch: str, n_embd: int, n_layer: int) -> list[AttentionSpec]:
    """The attention of each layer, as if all had some."""
    row = ARCHITECTURES[arch]
    if row.has_mla:
        return [_read_mla(gguf, arch, n_layer)] * n_layer
    heads = _query_heads(gguf, arch, n_layer)
    kv_heads = _kv_heads(gguf, arch, heads, n_layer)
    head_dim = _head_dim(gguf, arch, "", n_embd // heads[0])
    rotates, n_rot = _rotates(gguf, arch), head_dim
    if rotates:
        n_rot = _rotated_whole(gguf, arch, head_dim)
    if row.full_every or row.sections_are_neox:  # of others with the key it is computed as text
        _refuse_other_sections(gguf, arch, n_rot)
    _refuse_other_windows(gguf, arch)
    base = number_between(gguf, f"{arch}.rope.freq_base", 10000.0, 1.0, 1e15)
    scale_width = n_embd // heads[0] if n_layer == row.embd_scale_layers else head_dim
    whole = AttentionSpec(
        n_head=heads[0],
        n_kv_head=kv_heads[0],
        head_dim=head_dim,
        scale=_attention_scale(gguf, arch, scale_width),
        has_qk_norm=_has_qk_norm(gguf, arch),
        rope=_rope(gguf, arch, n_rot, base),
        has_sinks=row.has_sinks,
        has_post_norm=row.has_post_norms,
        has_gate=row.has_gate,
        gates_heads=row.gates_heads,
        has_v_norm=row.has_v_norm,
        norms_whole_qk=row.norms_whole_qk,
        norms_rotated=row.norms_rotated,
        has_pre_norm=row.has_pre_norms,
    )
    is_windowed = _windowed_layers(gguf, arch, n_layer)
    windowed = _with_window(gguf, arch, whole) if _has_windows(gguf, arch, n_layer) else whole
    rotates_whole = row.rotates != "windowed" or not any(is_windowed)
    is_rotated = _rotated_layers(gguf, arch, n_layer)
    specs = [
        replace(
            windowed if is_windowed[index] else whole,
            n_head=heads[index],
            n_kv_head=kv_heads[index],
            has_rope=rotates and is_rotated[index] and (is_windowed[index] or rotates_whole),
        )
        for index in range(n_layer)
    ]
    return _share_kv(gguf, arch, specs)


def _read_mla(gguf: GgufFile, arch: str, n_layer: int) -> AttentionSpec:
    """The attention of all layers of a model with MLA, in its absorbed form: queries are mapped to
    the latent rows."""
    prefix = f"{arch}.attention."
    key = prefix + "key_length_mla"
    if key not in gguf.values:
        why = "K and V of its heads are one matrix (attn_kv_b) in this file"
        raise unsupported(gguf, key, "not given", why, "convert it again with a newer llama.cpp")
    n_head = same_for_all_layers(gguf, prefix + "head_count", None, n_layer)
    if n_head > LATENT_HEADS_MAX:
        why = f"{LATENT_HEADS_MAX:,} heads at most"
        raise unsupported(gguf, prefix + "head_count", n_head, why)
    n_rot = _multiple_of_32(gguf, f"{arch}.rope.dimension_count")
    mla = MlaSpec(
        q_rank=_query_rank(gguf, arch),
        kv_rank=_multiple_of_32(gguf, prefix + "kv_lora_rank"),
        nope_dim=_multiple_of_32(gguf, key) - n_rot,
        value_dim=_multiple_of_32(gguf, prefix + "value_length_mla"),
    )
    if mla.nope_dim < 32:
        why = f"{n_rot} values of each head are rotated, and some others are needed"
        raise unsupported(gguf, key, mla.nope_dim + n_rot, why)
    head_dim = n_rot + mla.kv_rank
    if head_dim > HEAD_DIM_MAX:
        why = f"with {n_rot} rotated values they are {head_dim}, {HEAD_DIM_MAX} at most"
        raise unsupported(gguf, prefix + "kv_lora_rank", mla.kv_rank, why)
    for name, only in (
        ("head_count_kv", 1),
        ("key_length", head_dim),
        ("value_length", mla.kv_rank),
    ):
        if (value := same_for_all_layers(gguf, prefix + name, only, n_layer)) != only:
            why = f"beside these latent rows it must be {only}"
            raise unsupported(gguf, prefix + name, value, why)
    base = number_between(gguf, f"{arch}.rope.freq_base", 10000.0, 1.0, 1e15)
    rope = _rope(gguf, arch, n_rot, base)
    return AttentionSpec(
        n_head=n_head,
        n_kv_head=1,
        head_dim=head_dim,
        scale=_mla_scale(gguf, arch, rope, mla.nope_dim + n_rot),
        has_qk_norm=False,
        rope=rope,
        mla=mla,
    )


def _multiple_of_32(gguf: GgufFile, key: str) -> int:
    if (value := count_of(gguf, key)) % 32:
        raise unsupported(gguf, key, value, "a multiple of 32 is needed")
    return value


def _query_rank(gguf: GgufFile, arch: str) -> int:
    """Width of what queries are made of; 0: of the row itself, as the tensors say."""
    has_direct = "blk.0.attn_q.weight" in gguf.tensors
    return 0 if has_direct else _multiple_of_32(gguf, f"{arch}.attention.q_lora_rank")


def _mla_scale(gguf: GgufFile, arch: str, rope: RopeSpec, width: int) -> float:
    """The scale of q·k. Q and K grow with the factor of YaRN, by a key that is a tenth of what the
    model's own configuration says."""
    growth = rope.attn_factor
    if gguf.text(f"{arch}.rope.scaling.type", "linear") == "yarn":
        factor = number_between(gguf, f"{arch}.rope.scaling.factor", None, 1.0, 1e6)
        multiplier = gguf.number(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)
        growth *= yarn.log_growth(factor, multiplier)
    elif rope.position_scale != 1.0:
        scaling = f"{arch}.rope.scaling.factor"
        key = scaling if gguf.number(scaling, 0.0) else f"{arch}.rope.scale_linear"
        raise unsupported(gguf, key, gguf.number(key), "only yarn scales positions here")
    return growth * growth / math.sqrt(width)


def _query_heads(gguf: GgufFile, arch: str, n_layer: int) -> list[int]:
    """Query heads of each layer."""
    key = f"{arch}.attention.head_count"
    if ARCHITECTURES[arch].has_layer_heads:
        return each_layer(gguf, key, None, n_layer)
    return [same_for_all_layers(gguf, key, None, n_layer)] * n_layer


def _kv_heads(gguf: GgufFile, arch: str, heads: list[int], n_layer: int) -> list[int]:
    """KV heads of each layer, whose query heads are `heads`; recurrent layers, which have none, get
    as many as others."""
    key, row = f"{arch}.attention.head_count_kv", ARCHITECTURES[arch]
    if key not in gguf.values:
        return heads
    if row.recurrent in ("mamba2", "conv"):
        counts = each_layer(gguf, key, None, n_layer, least=0)
        others = max(counts) or heads[0]
        counts = [count or others for count in counts]
    elif row.has_window_heads or row.has_layer_heads:
        counts = each_layer(gguf, key, None, n_layer)
    else:
        counts = [same_for_all_layers(gguf, key, None, n_layer)] * n_layer
    for n_head, count in zip(heads, counts, strict=True):
        if n_head % count:
            raise unsupported(gguf, key, count, f"does not divide {n_head} heads")
    return counts


def _share_kv(gguf: GgufFile, arch: str, specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """The last layers, as many as a key says, read the K and V of the last ones before them that
    have their kind: with a window, or without."""
    key = f"{arch}.attention.shared_kv_layers"
    n_shared = gguf.integer(key, 0)
    if n_shared == 0 or not ARCHITECTURES[arch].has_window_heads:
        return specs
    n_own = len(specs) - n_shared
    if not 2 <= n_own < len(specs):
        why = f"some of {len(specs)} layers must share, and two have K and V of their own"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=n_shared, why=why)
    shared = list[AttentionSpec]()
    for spec in specs[n_own:]:
        source = n_own - (2 if spec.window else 1)
        shared.append(replace(spec, kv_from=source))
        owner = specs[source]
        if (owner.window, owner.n_kv_head, owner.head_dim) != (
            spec.window,
            spec.n_kv_head,
            spec.head_dim,
        ):
            why = (
                f"layer {source} has other heads or another window than those that read its K and V"
            )
            raise unsupported(gguf, key, n_shared, why)
    return specs[:n_own] + shared


def _rotates(gguf: GgufFile, arch: str) -> bool:
    """Whether heads of Q and K are rotated."""
    row, key = ARCHITECTURES[arch].rotates, f"{arch}.rope.scaling.finetuned"
    if row != "by_key":
        return row != "none"
    value = gguf.values.get(key, True)
    if not isinstance(value, bool):
        why = "it must be true or false"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=value, why=why)
    return value


def _rotated_layers(gguf: GgufFile, arch: str, n_layer: int) -> list[bool]:
    """Whether each layer rotates heads, if those with or without a window do: by a flag per layer,
    or all but the last of a run."""
    row, key = ARCHITECTURES[arch], f"{arch}.attention.rope_pattern"
    if row.rotates == "by_layer" and key in gguf.values:
        return flags_of(gguf, key, n_layer)
    return [not is_last_of(row.rope_every, index) for index in range(n_layer)]


def _refuse_other_windows(gguf: GgufFile, arch: str) -> None:
    """Raises for a window of a model with short convolutions: all its attention would have it."""
    key = f"{arch}.attention.sliding_window"
    if ARCHITECTURES[arch].recurrent == "conv" and (window := gguf.integer(key, 0)):
        raise unsupported(gguf, key, window, "windows are not supported in this architecture")


def _has_qk_norm(gguf: GgufFile, arch: str) -> bool:
    """Whether heads of Q and K are normed, which of some architectures the tensors say."""
    by_name = ARCHITECTURES[arch].has_qk_norm
    return "blk.0.attn_q_norm.weight" in gguf.tensors if by_name is None else by_name


def _rotated_whole(gguf: GgufFile, arch: str, head_dim: int) -> int:
    """Leading dimensions of a head that RoPE rotates in layers without a window."""
    row, key = ARCHITECTURES[arch], f"{arch}.rope.dimension_count"
    n_rot = _rotated(gguf, key, head_dim, row.rotates_part)
    if not row.rotates_half:
        return n_rot
    if n_rot % 4:
        raise unsupported(gguf, key, n_rot, "half of it is rotated, which must be even")
    return n_rot // 2


def _rotated(
    gguf: GgufFile, key: str, head_dim: int, is_part: bool, default: int | None = None
) -> int:
    """Leading dimensions of a head that RoPE rotates; is_part: some may be left out. default:
    without the key; None = all."""
    n_rot = count_of(gguf, key, default or head_dim)
    if n_rot == head_dim or (is_part and n_rot < head_dim and not n_rot % 2):
        return n_rot
    raise unsupported(gguf, key, n_rot, f"head_dim is {head_dim}")


def _sections(gguf: GgufFile, arch: str) -> list[int]:
    """How many rotated pairs turn with each axis of an image; empty = the file does not say."""
    key = f"{arch}.rope.dimension_sections"
    value = gguf.values.get(key)
    if value is None:
        return []
    sections: list[int] = []
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        sections = [int(pairs) for pairs in value.tolist()]
    if not 3 <= len(sections) <= 4 or min(sections) < 0 or not sum(sections):
        why = "three or four numbers of pairs are needed"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=sections[:8], why=why)
    return sections


def _refuse_other_sections(gguf: GgufFile, arch: str, n_rot: int) -> None:
    """Raises unless every rotated pair turns with one of a token's first three positions, which are
    one number in text. Pair i turns with the axis i mod 3, as long as that has pairs left; in glm4
    those of an axis follow each other."""
    sections = _sections(gguf, arch)
    for pair in range(n_rot // 2 if sections else 0):
        place = pair % sum(sections)
        if ARCHITECTURES[arch].sections_are_neox:
            is_in_text = place < sum(sections[:3])
        else:
            is_in_text = place < 3 * sections[place % 3]
        if not is_in_text:
            why = f"pair {pair} turns with an axis that text has no position on"
            raise unsupported(gguf, f"{arch}.rope.dimension_sections", sections, why)


def _has_windows(gguf: GgufFile, arch: str, n_layer: int) -> bool:
    """Whether some layers of a model have a window."""
    row = ARCHITECTURES[arch]
    if row.windows == "flagged":
        return True
    if row.windows == "by_key":
        return gguf.integer(f"{arch}.attention.sliding_window", 0) != 0
    return row.window_every > 0 and (row.windows == "all" or n_layer == 64)


def _windowed_layers(gguf: GgufFile, arch: str, n_layer: int) -> list[bool]:
    """Whether queries of each layer see a window: by a flag per layer, or all but the last of a
    run."""
    every = ARCHITECTURES[arch].window_every if _has_windows(gguf, arch, n_layer) else 0
    key = f"{arch}.attention.sliding_window_pattern"
    if ARCHITECTURES[arch].windows == "flagged":
        return flags_of(gguf, key, n_layer)
    if not every or key not in gguf.values:
        return [every > 0 and not is_last_of(every, index) for index in range(n_layer)]
    if isinstance(gguf.values[key], np.ndarray):
        return flags_of(gguf, key, n_layer)
    every = count_of(gguf, key)
    return [not is_last_of(every, index) for index in range(n_layer)]


def _with_window(gguf: GgufFile, arch: str, whole: AttentionSpec) -> AttentionSpec:
    """The layers with a window, of an architecture that has some; `whole` are the others.

    Other architectures may have the keys, too: there they are of no effect, as in llama.cpp.
    """
    row, head_dim, n_rot = ARCHITECTURES[arch], whole.head_dim, whole.rope.n_rot
    if row.has_window_heads:
        head_dim = _head_dim(gguf, arch, "_swa", head_dim)
        n_rot = _rotated(gguf, f"{arch}.rope.dimension_count_swa", head_dim, is_part=False)
    elif row.windows == "flagged":
        all_rotated = _rotated(gguf, f"{arch}.rope.dimension_count", head_dim, is_part=True)
        key = f"{arch}.rope.dimension_count_swa"
        n_rot = _rotated(gguf, key, head_dim, is_part=True, default=all_rotated)
    for name, only in (
        ("attention.key_length_swa", head_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count_swa", n_rot),
    ):
        if (width := gguf.integer(f"{arch}.{name}", only)) != only:
            why = f"head_dim is {head_dim} in the layers that see all positions"
            raise unsupported(gguf, f"{arch}.{name}", width, why)
    return replace(
        whole,
        head_dim=head_dim,
        window=count_of(gguf, f"{arch}.attention.sliding_window", WINDOWS.get(row.windows)),
        rope=_window_rope(gguf, arch, whole.rope, n_rot),
    )


def _rope(gguf: GgufFile, arch: str, n_rot: int, base: float) -> RopeSpec:
    _refuse_alpha(gguf, arch)
    rope = RopeSpec(
        style=_pairs(gguf, arch),
        base=base,
        n_rot=n_rot,
        position_scale=_position_scale(gguf, arch),
        attn_factor=_attn_factor(gguf, arch),
        has_factors=_has_factors(gguf, arch),
    )
    if ARCHITECTURES[arch].scales_queries:
        log = number_between(gguf, f"{arch}.attention.temperature_scale", 0.0, 0.0, 1e3)
        rope = replace(rope, query_log=log, query_span=_query_span(gguf, arch, log))
    is_yarn = gguf.text(f"{arch}.rope.scaling.type", "linear") == "yarn"
    return _with_yarn(gguf, arch, rope) if is_yarn else rope


def _refuse_alpha(gguf: GgufFile, arch: str) -> None:
    """Raises for a base that grows with another key; usual files have the base that it gives.

    Other architectures may have the key, too: there it is of no effect, as in llama.cpp.
    """
    key = f"{arch}.rope.scaling.alpha"
    if ARCHITECTURES[arch].has_alpha and (alpha := gguf.number(key, 0.0)) > 0.0:
        raise unsupported(gguf, key, alpha, f"{arch}.rope.freq_base must be the whole base")


def _pairs(gguf: GgufFile, arch: str) -> str:
    """Which values RoPE rotates together; sections count if there are two at least, as in
    llama.cpp."""
    row = ARCHITECTURES[arch]
    is_neox = row.sections_are_neox and all((_sections(gguf, arch) or [0])[:2])
    return "neox" if is_neox else row.pairs


def rope_factors_of(arch: str) -> str:
    """The tensor with a factor of RoPE per pair."""
    return ROPE_FACTORS_LONG if ARCHITECTURES[arch].rope_factors == "long" else ROPE_FREQS


def _has_factors(gguf: GgufFile, arch: str) -> bool:
    """Whether the file has a factor per pair for layers without a window."""
    row = ARCHITECTURES[arch].rope_factors
    return row == "all" or (row != "none" and rope_factors_of(arch) in gguf.tensors)


def _window_rope(gguf: GgufFile, arch: str, others: RopeSpec, n_rot: int) -> RopeSpec:
    """RoPE of the layers that have a window."""
    row, base = ARCHITECTURES[arch], others.base
    own_base = row.window_base
    if own_base != OTHERS_BASE:
        base = number_between(gguf, f"{arch}.rope.freq_base_swa", own_base or base, 1.0, 1e15)
    if row.unscales_windows:
        return RopeSpec(others.style, base, n_rot, 1.0, 1.0, has_factors=False)
    if own_base <= 0:
        return _rope(gguf, arch, n_rot, base)
    factor = _attn_factor(gguf, arch)
    return RopeSpec(others.style, base, n_rot, 1.0, factor, has_factors=False)


def _attn_factor(gguf: GgufFile, arch: str) -> float:
    return number_between(gguf, f"{arch}.rope.scaling.attn_factor", 1.0, 1e-3, 1e3)


def _with_yarn(gguf: GgufFile, arch: str, rope: RopeSpec) -> RopeSpec:
    prefix = f"{arch}.rope.scaling."
    kind = ARCHITECTURES[arch].log_multiplier
    log_multiplier = gguf.number(prefix + "yarn_log_multiplier", 0.0)
    for key, only in (
        ("yarn_ext_factor", 1.0),
        ("yarn_log_multiplier", log_multiplier if kind != "none" else 0.0),
    ):
        if (value := gguf.number(prefix + key, only)) != only:
            raise unsupported(gguf, prefix + key, value, f"{only:g} is supported")
    if kind != "none":
        log_multiplier = number_between(gguf, prefix + "yarn_log_multiplier", 0.0, 0.0, 1e3)
    if kind == "tenth":
        log_multiplier *= 10.0
    elif kind == "flag" and log_multiplier:
        log_multiplier = 1.0
    if rope.has_factors:
        why = "it has factors per pair (rope_freqs.weight) as well"
        raise unsupported(gguf, prefix + "type", "yarn", why)
    if rope.base < 2.0:
        raise unsupported(gguf, f"{arch}.rope.freq_base", rope.base, "YaRN needs 2 at least")
    factor = number_between(gguf, prefix + "factor", None, 1.0, 1e6)
    trained = _first_context(gguf, arch)
    fast = number_between(gguf, prefix + "yarn_beta_fast", 32.0, 1e-3, 1e6)
    slow = number_between(gguf, prefix + "yarn_beta_slow", 1.0, 1e-3, 1e6)
    return replace(
        rope,
        position_scale=1.0,
        attn_factor=rope.attn_factor * yarn.magnitude(factor, log_multiplier),
        factors=yarn.frequency_divisors(rope.n_rot, rope.base, factor, trained, fast, slow),
    )


def _query_span(gguf: GgufFile, arch: str, log: float) -> int:
    """Positions after which queries are scaled further."""
    if not ARCHITECTURES[arch].has_mla:
        return _first_context(gguf, arch)
    return count_of(gguf, f"{arch}.attention.temperature_length", None if log else 1)


def _first_context(gguf: GgufFile, arch: str) -> int:
    """Positions of the first training, before the context was made longer."""
    key = f"{arch}.rope.scaling.original_context_length"
    return count_of(gguf, key, count_of(gguf, f"{arch}.context_length"))


def _attention_scale(gguf: GgufFile, arch: str, width: int) -> float:
    """1 / sqrt(width), or the scale of the architecture, unless the key says otherwise; 0 is the
    format's "not given"."""
    key = f"{arch}.attention.scale"
    if gguf.number(key, 0.0) == 0.0:
        return ARCHITECTURES[arch].attention_scale or 1.0 / math.sqrt(width)
    return number_between(gguf, key, None, 1e-6, 1e3)


def _head_dim(gguf: GgufFile, arch: str, suffix: str, default: int) -> int:
    """Width of a head of Q, K and V, by the keys with this suffix."""
    key = f"{arch}.attention.key_length{suffix}"
    head_dim = count_of(gguf, key, default)
    if head_dim % 32 or head_dim > HEAD_DIM_MAX:
        why = "a multiple of 32 is needed" if head_dim % 32 else f"{HEAD_DIM_MAX} at most"
        raise unsupported(gguf, key, head_dim, why)
    key = f"{arch}.attention.value_length{suffix}"
    if (value_dim := count_of(gguf, key, head_dim)) != head_dim:
        raise unsupported(gguf, key, value_dim, f"key_length is {head_dim}")
    return head_dim


def _position_scale(gguf: GgufFile, arch: str) -> float:
    """1 / linear factor, in the order of keys that converters have used; 0 means not scaled."""
    if gguf.text(f"{arch}.rope.scaling.type", "linear") == "none":
        return 1.0
    key = f"{arch}.rope.scaling.factor"
    factor = gguf.number(key, 0.0)
    if not factor:
        key = f"{arch}.rope.scale_linear"
        factor = gguf.number(key, 0.0)
    return 1.0 / number_between(gguf, key, None, 1e-3, 1e6) if factor else 1.0
