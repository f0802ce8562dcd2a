"""The hyper-parameters of a model, read from GGUF metadata and checked.

Owns `ModelSpec`, a tuple of layer kinds, and the meaning of the metadata keys (defaults included):
later stages use the spec and never the name of the architecture. Refuses every feature it would
otherwise ignore silently: experts that are chosen or summed in another way, unknown position
scalings, layers of different shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from batchengine import errors
from batchengine.gguf import GgufFile, StringArray
from batchengine.weights import yarn
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.ffn import FfnSpec, MoeSpec, count_dense, read_dense, read_ffn
from batchengine.weights.keys import count_of, number_between, same_for_all_layers, unsupported
from kv_store.layout import KvHeads, PageLayout

HEAD_DIM_MAX = 256
CONV_KERNEL_MAX = 4

_COMPANIONS = ("adapter", "mmproj", "imatrix")  # values of general.type

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M",
    18: "Q6_K", 25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4",
}  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """A mixer: causal attention of grouped heads over KV pages; scale multiplies q·k.

    has_v_norm: heads of V are normed, too, without weights. kv_from: the layer whose K and V this
    one reads instead of its own; -1 = it has some. has_rope: heads are rotated. window: how many
    positions a query sees, its own included; 0 = all before it. has_sinks: each query head has a
    sink, which takes a share of the weight of its tokens. has_post_norm: the output is normed
    before it is added. has_gate: the output is multiplied by a sigmoid of another product of the
    input.
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
    has_v_norm: bool = False
    kv_from: int = -1

    @property
    def has_kv(self) -> bool:
        """Whether a KV page has rows of this layer."""
        return self.kv_from < 0

    @property
    def widths(self) -> AttentionWidths:
        """What the buffers of a step are as wide as."""
        heads = self.n_head, self.n_kv_head, self.head_dim
        return AttentionWidths(*heads, self.has_kv, self.has_post_norm, self.has_gate)

    @property
    def q_rows(self) -> int:
        """Width of all query heads."""
        return self.n_head * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Width of all K (or V) heads."""
        return self.n_kv_head * self.head_dim


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A mixer with recurrent state: a gated delta network, with a causal convolution before it.

    Each of n_v_head heads has a state of head_dim keys by head_dim values; head h uses the keys and
    queries of head h mod n_k_head. conv_kernel: inputs that the convolution sees, the present one
    included.
    """

    n_k_head: int
    n_v_head: int
    head_dim: int
    conv_kernel: int

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.n_v_head * self.head_dim

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.n_k_head * self.head_dim + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one layer, in whole cache lines (kernels.StateShape)."""
        values = self.value_width * self.head_dim + (self.conv_kernel - 1) * self.channels
        return -(-4 * values // 64) * 64


MixerSpec = AttentionSpec | DeltaNetSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: the part that mixes tokens, then the part that works on each token alone.

    Both are added to the residual stream. Options of a kind are fields of its class; further kinds
    are further classes for these fields.
    """

    mixer: MixerSpec
    ffn: FfnSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Hyper-parameters of one model, all with their final values.

    layers: one per block of the file, in order. tied = the head is the embedding matrix.
    embed_scale: what embeddings are multiplied by.
    """

    arch: str
    name: str
    quantisation: str
    n_embd: int
    n_vocab: int
    context_trained: int
    eps: float
    tied: bool
    layers: tuple[LayerSpec, ...]
    embed_scale: float = 1.0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_layer_whole(self) -> int:
        """How many layers attend to the whole context, not to a window of it."""
        return sum(mixer.window == 0 for mixer in self.attentions)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The layers with attention."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple([mixer for mixer in mixers if isinstance(mixer, AttentionSpec)])

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the first layer that has some; that of others may differ."""
        return self.attentions[0]

    @property
    def n_layer_kv(self) -> int:
        """How many layers have rows in a KV page."""
        return len(self.page_layout.layers)

    @property
    def page_layout(self) -> PageLayout:
        """The layout of a KV page."""
        heads = [KvHeads(of.n_kv_head, of.head_dim) for of in self.attentions if of.has_kv]
        return PageLayout(tuple(heads))

    @property
    def whole_query_dims(self) -> int:
        """Values of the queries of one token in the layers that attend to the whole context."""
        return sum(of.q_rows for of in self.attentions if of.window == 0)

    @property
    def delta_net(self) -> DeltaNetSpec | None:
        """The recurrent layers of this model, all of one shape; None = it has none."""
        mixers = [layer.mixer for layer in self.layers]
        return next((mixer for mixer in mixers if isinstance(mixer, DeltaNetSpec)), None)

    @property
    def n_layer_recurrent(self) -> int:
        """How many layers have recurrent state."""
        return self.n_layer - len(self.attentions)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one session; 0 = the model has none."""
        net = self.delta_net
        return 0 if net is None else self.n_layer_recurrent * net.state_bytes

    @property
    def experts(self) -> MoeSpec | None:
        """The experts of this model, the same in all layers that have some; None = none has. Layers
        without are the first ones."""
        ffn = self.layers[-1].ffn
        return ffn if isinstance(ffn, MoeSpec) else None

    def __repr__(self) -> str:
        attention, experts = self.attention, self.experts
        mixture = f" experts={experts.n_used}/{experts.n_expert}" if experts else ""
        recurrent = f" recurrent={self.n_layer_recurrent}" if self.n_layer_recurrent else ""
        return (
            f"<ModelSpec {self.arch} layers={self.n_layer}{recurrent} embd={self.n_embd} "
            f"ff={self.layers[-1].ffn.n_ff}{mixture} heads={attention.n_head}/{attention.n_kv_head}"
            f"x{attention.head_dim} vocab={self.n_vocab} "
            f"{self.quantisation}{' tied' if self.tied else ''}>"
        )


def read_spec(gguf: GgufFile) -> ModelSpec:
    """The hyper-parameters of a model file; BatchEngineError naming the key that is wrong."""
    _refuse_other_files(gguf)
    arch = gguf.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise unsupported(
            gguf,
            "general.architecture",
            arch,
            f"supported are {', '.join(ARCHITECTURES)}",
            "use a model of one of these architectures",
        )
    _refuse_unknown_features(gguf, arch)
    n_embd = count_of(gguf, f"{arch}.embedding_length")
    n_layer = _block_count(gguf, arch, n_embd)
    n_head = same_for_all_layers(gguf, f"{arch}.attention.head_count", None, n_layer)
    n_kv_head = same_for_all_layers(gguf, f"{arch}.attention.head_count_kv", n_head, n_layer)
    head_dim = count_of(gguf, f"{arch}.attention.key_length", n_embd // n_head)
    ffn = read_ffn(gguf, arch, n_embd, n_layer)
    n_dense = count_dense(gguf, arch, n_layer)
    first_ffn = read_dense(gguf, arch, n_layer) if n_dense else ffn
    _check_widths(gguf, arch, n_embd, n_head, n_kv_head, head_dim)
    row = ARCHITECTURES[arch]
    n_rot = _rotated(gguf, arch, head_dim)
    if row.full_every:  # their RoPE has sections; of others with the key it is computed as text
        _refuse_other_sections(gguf, arch, n_rot)
    base = number_between(gguf, f"{arch}.rope.freq_base", 10000.0, 1.0, 1e15)
    scale_width = n_embd // n_head if n_layer == row.embd_scale_layers else head_dim
    attention = AttentionSpec(
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        scale=_attention_scale(gguf, arch, scale_width),
        has_qk_norm=_has_qk_norm(gguf, arch),
        rope=_rope(gguf, arch, n_rot, base),
        has_sinks=row.has_sinks,
        has_post_norm=row.has_post_norms,
        has_gate=row.has_gate,
    )
    recurrent = _delta_net(gguf, arch) if row.full_every else None
    is_recurrent = _recurrent_layers(gguf, arch, n_layer)
    with_window = replace(
        attention,
        window=_window(gguf, arch, n_layer, head_dim),
        rope=_window_rope(gguf, arch, attention.rope),
    )
    return ModelSpec(
        arch=arch,
        name=gguf.text("general.name", gguf.path.stem),
        quantisation=_FILE_TYPES.get(gguf.integer("general.file_type", -1), "mixed"),
        n_embd=n_embd,
        n_vocab=_vocab_size(gguf, arch),
        context_trained=count_of(gguf, f"{arch}.context_length"),
        eps=number_between(gguf, f"{arch}.attention.layer_norm_rms_epsilon", None, 1e-30, 1.0),
        tied="output.weight" not in gguf.tensors,
        layers=tuple(
            LayerSpec(
                recurrent
                if recurrent is not None and is_recurrent[index]
                else replace(
                    attention if _is_last_of(row.window_every, index) else with_window,
                    has_rope=not _is_last_of(row.rope_every, index),
                ),
                first_ffn if index < n_dense else ffn,
            )
            for index in range(n_layer)
        ),
        embed_scale=float(np.float32(math.sqrt(n_embd))) if row.scales_embedding else 1.0,
    )


def _has_qk_norm(gguf: GgufFile, arch: str) -> bool:
    """Whether heads of Q and K are normed, which of some architectures the tensors say."""
    by_name = ARCHITECTURES[arch].has_qk_norm
    return "blk.0.attn_q_norm.weight" in gguf.tensors if by_name is None else by_name


def _rotated(gguf: GgufFile, arch: str, head_dim: int) -> int:
    """Leading dimensions of a head that RoPE rotates."""
    key = f"{arch}.rope.dimension_count"
    n_rot = count_of(gguf, key, head_dim)
    if n_rot == head_dim or (
        ARCHITECTURES[arch].rotates_part and n_rot < head_dim and not n_rot % 2
    ):
        return n_rot
    raise unsupported(gguf, key, n_rot, f"head_dim is {head_dim}")


def _delta_net(gguf: GgufFile, arch: str) -> DeltaNetSpec:
    """The recurrent layers of an architecture that has some."""
    head_dim = count_of(gguf, f"{arch}.ssm.state_size")
    n_k_head = count_of(gguf, f"{arch}.ssm.group_count")
    n_v_head = count_of(gguf, f"{arch}.ssm.time_step_rank")
    conv_kernel = count_of(gguf, f"{arch}.ssm.conv_kernel")
    inner = count_of(gguf, f"{arch}.ssm.inner_size")
    for name, value, fits, why in (
        ("state_size", head_dim, head_dim % 32 == 0 and head_dim <= HEAD_DIM_MAX,
         f"a multiple of 32 up to {HEAD_DIM_MAX} is needed"),
        ("time_step_rank", n_v_head, n_v_head % n_k_head == 0, f"no multiple of {n_k_head} heads"),
        ("inner_size", inner, inner == n_v_head * head_dim, f"{n_v_head} heads of {head_dim}"),
        ("conv_kernel", conv_kernel, 2 <= conv_kernel <= CONV_KERNEL_MAX,
         f"2 to {CONV_KERNEL_MAX} are supported"),
    ):  # fmt: skip
        if not fits:
            raise unsupported(gguf, f"{arch}.ssm.{name}", value, why)
    return DeltaNetSpec(n_k_head, n_v_head, head_dim, conv_kernel)


def _recurrent_layers(gguf: GgufFile, arch: str, n_layer: int) -> list[bool]:
    """Whether each layer is recurrent: by a flag per layer, or all but the last of a run."""
    every = ARCHITECTURES[arch].full_every
    if not every:
        return [False] * n_layer
    key = f"{arch}.attention.recurrent_layers"
    if key in gguf.values:
        found, value = _flags(gguf, key, n_layer), "an array"
    else:
        key = f"{arch}.full_attention_interval"
        value = every = count_of(gguf, key, every)
        found = [not _is_last_of(every, index) for index in range(n_layer)]
    if all(found) or not any(found):
        why = "some layers must be recurrent, and some must have attention"
        raise unsupported(gguf, key, value, why)
    return found


def _flags(gguf: GgufFile, key: str, n_layer: int) -> list[bool]:
    """One flag per layer; those of further blocks are left out."""
    flags = gguf.values[key]
    if not isinstance(flags, np.ndarray) or flags.dtype.kind not in "biu":
        why = "it must be an array of flags"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=type(flags).__name__, why=why)
    if len(flags) < n_layer:
        why = f"it has {len(flags)} flags for {n_layer} layers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    return [bool(flag) for flag in flags[:n_layer].tolist()]


def _refuse_other_sections(gguf: GgufFile, arch: str, n_rot: int) -> None:
    """Raises unless every rotated pair turns with one of a token's first three positions, which are
    one number in text: pair i with the axis i mod 3, as long as that has pairs left."""
    key = f"{arch}.rope.dimension_sections"
    value = gguf.values.get(key)
    if value is None:
        return
    sections: list[int] = []
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        sections = [int(pairs) for pairs in value.tolist()]
    if not 3 <= len(sections) <= 4 or min(sections) < 0 or not sum(sections):
        why = "three or four numbers of pairs are needed"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=sections[:8], why=why)
    for pair in range(n_rot // 2):
        place = pair % sum(sections)
        if place >= 3 * sections[place % 3]:
            why = f"pair {pair} turns with an axis that text has no position on"
            raise unsupported(gguf, key, sections, why)


def _is_last_of(every: int, layer: int) -> bool:
    """Whether a layer is the last one of a run of `every`; 0 = there are no runs."""
    return every > 0 and (layer + 1) % every == 0


def _window(gguf: GgufFile, arch: str, n_layer: int, head_dim: int) -> int:
    """Positions that a query sees in the layers that have a window; 0 = none has.

    Other architectures may have the key, too: there it is of no effect, as in llama.cpp.
    """
    every = ARCHITECTURES[arch].window_every
    if not every:
        return 0
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = gguf.values.get(key, every)
    if isinstance(pattern, np.ndarray):  # one flag per layer
        is_ours = pattern.tolist() == [not _is_last_of(every, i) for i in range(n_layer)]
    else:
        is_ours = pattern == every
    if not is_ours:
        why = f"only the last of {every} layers each must see all positions"
        raise unsupported(gguf, key, "another pattern", why)
    for name in (
        "attention.key_length_swa",
        "attention.value_length_swa",
        "rope.dimension_count_swa",
    ):
        if (width := gguf.integer(f"{arch}.{name}", head_dim)) != head_dim:
            why = f"head_dim is {head_dim} in the layers that see all positions"
            raise unsupported(gguf, f"{arch}.{name}", width, why)
    return count_of(gguf, f"{arch}.attention.sliding_window")


def _rope(gguf: GgufFile, arch: str, n_rot: int, base: float) -> RopeSpec:
    rope = RopeSpec(
        style=ARCHITECTURES[arch].pairs,
        base=base,
        n_rot=n_rot,
        position_scale=_position_scale(gguf, arch),
        attn_factor=_attn_factor(gguf, arch),
        has_factors=arch == "llama" and "rope_freqs.weight" in gguf.tensors,
    )
    if ARCHITECTURES[arch].scales_queries:
        log = number_between(gguf, f"{arch}.attention.temperature_scale", 0.0, 0.0, 1e3)
        rope = replace(rope, query_log=log, query_span=_first_context(gguf, arch))
    is_yarn = gguf.text(f"{arch}.rope.scaling.type", "linear") == "yarn"
    return _with_yarn(gguf, arch, rope) if is_yarn else rope


def _window_rope(gguf: GgufFile, arch: str, others: RopeSpec) -> RopeSpec:
    """RoPE of the layers that have a window."""
    own_base = ARCHITECTURES[arch].window_base
    base = number_between(gguf, f"{arch}.rope.freq_base_swa", own_base or others.base, 1.0, 1e15)
    if not own_base:
        return _rope(gguf, arch, others.n_rot, base)
    factor = _attn_factor(gguf, arch)
    return RopeSpec(others.style, base, others.n_rot, 1.0, factor, has_factors=False)


def _attn_factor(gguf: GgufFile, arch: str) -> float:
    return number_between(gguf, f"{arch}.rope.scaling.attn_factor", 1.0, 1e-3, 1e3)


def _with_yarn(gguf: GgufFile, arch: str, rope: RopeSpec) -> RopeSpec:
    prefix = f"{arch}.rope.scaling."
    has_log = ARCHITECTURES[arch].has_log_multiplier
    log_multiplier = gguf.number(prefix + "yarn_log_multiplier", 0.0)
    for key, only in (
        ("yarn_ext_factor", 1.0),
        ("yarn_log_multiplier", log_multiplier if has_log else 0.0),
    ):
        if (value := gguf.number(prefix + key, only)) != only:
            raise unsupported(gguf, prefix + key, value, f"{only:g} is supported")
    if has_log:
        log_multiplier = number_between(gguf, prefix + "yarn_log_multiplier", 0.0, 0.0, 1e3)
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


def _first_context(gguf: GgufFile, arch: str) -> int:
    """Positions of the first training, before the context was made longer."""
    key = f"{arch}.rope.scaling.original_context_length"
    return count_of(gguf, key, count_of(gguf, f"{arch}.context_length"))


def _refuse_other_files(gguf: GgufFile) -> None:
    """Raises for files that belong to a model; they lack most of its keys."""
    kind = gguf.values.get("general.type")
    if kind in _COMPANIONS:
        why, fix = "it belongs to a model and is none", "name the GGUF file of the model itself"
        raise unsupported(gguf, "general.type", kind, why, fix)


def _refuse_unknown_features(gguf: GgufFile, arch: str) -> None:
    key = f"{arch}.nextn_predict_layers"  # the last layers, which are no part of the model then
    if (n_mtp := gguf.integer(key, 0)) > 0 and not ARCHITECTURES[arch].has_mtp:
        raise unsupported(gguf, key, n_mtp, "layers that predict further tokens are not supported")
    if gguf.values.get(f"{arch}.attention.causal", True) is not True:
        raise unsupported(gguf, f"{arch}.attention.causal", "false", "not a text generator")
    for key in (f"{arch}.attn_logit_softcapping", f"{arch}.final_logit_softcapping"):
        if (cap := gguf.number(key, 0.0)) != 0.0:
            raise unsupported(gguf, key, cap, "logits with a soft bound are not supported")
    kind = gguf.text(f"{arch}.rope.scaling.type", "linear")
    if kind not in ("linear", "yarn", "none"):
        why = "linear and yarn are supported"
        raise unsupported(gguf, f"{arch}.rope.scaling.type", kind, why)


def _block_count(gguf: GgufFile, arch: str, n_embd: int) -> int:
    """The number of layers, without those that predict further tokens; a spec is made for each, so
    an absurd number is refused here."""
    count = count_of(gguf, f"{arch}.block_count")
    if count > len(gguf.tensors):  # every layer has tensors, so one of the first has none
        names = (f"blk.{i}.attn_norm.weight" for i in range(count))
        missing = next(name for name in names if name not in gguf.tensors)
        raise errors.TENSOR_MISSING(file=gguf.path.name, tensor=missing, shape=[n_embd])
    n_mtp = gguf.integer(f"{arch}.nextn_predict_layers", 0)
    if not 0 <= n_mtp < count:
        key, why = f"{arch}.nextn_predict_layers", f"the file has {count} blocks"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=n_mtp, why=why)
    return count - n_mtp


def _attention_scale(gguf: GgufFile, arch: str, width: int) -> float:
    """1 / sqrt(width) unless the key says otherwise; 0 is the format's "not given"."""
    key = f"{arch}.attention.scale"
    if gguf.number(key, 0.0) == 0.0:
        return 1.0 / math.sqrt(width)
    return number_between(gguf, key, None, 1e-6, 1e3)


def _check_widths(
    gguf: GgufFile, arch: str, n_embd: int, n_head: int, n_kv_head: int, head_dim: int
) -> None:
    multiple = "a multiple of 32 is needed"
    for key, value, fits, why in (
        ("embedding_length", n_embd, n_embd % 32 == 0, multiple),
        ("attention.key_length", head_dim, head_dim % 32 == 0, multiple),
        ("attention.key_length", head_dim, head_dim <= HEAD_DIM_MAX, f"{HEAD_DIM_MAX} at most"),
    ):
        if not fits:
            raise unsupported(gguf, f"{arch}.{key}", value, why)
    if n_head % n_kv_head:
        raise unsupported(
            gguf, f"{arch}.attention.head_count_kv", n_kv_head, f"does not divide {n_head} heads"
        )
    value_dim = count_of(gguf, f"{arch}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise unsupported(
            gguf, f"{arch}.attention.value_length", value_dim, f"key_length is {head_dim}"
        )


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


def _vocab_size(gguf: GgufFile, arch: str) -> int:
    """The tokenizer's size, against which the embedding is checked later; else the key's."""
    tokens = gguf.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray):
        if not len(tokens):
            key, why = "tokenizer.ggml.tokens", "no model has an empty vocabulary"
            raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="empty", why=why)
        return len(tokens)
    info = gguf.tensors.get("token_embd.weight")
    rows = info.shape[1] if info is not None and len(info.shape) == 2 else None
    return count_of(gguf, f"{arch}.vocab_size", rows)
