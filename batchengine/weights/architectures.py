"""The architectures of model files: one row each, with what the name alone says of a model.

Everything else is in the keys of the file. Later stages read `ModelSpec` and never the name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu", "oai", "relu2"]
Gating = Literal["softmax", "sigmoid", "normed_sigmoid", "softmax_all", "biased_softmax"]
Sigmoid = Literal["none", "by_key", "normed", "by_function"]


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """What an architecture has that no key of a file says.

    pairs: which values RoPE rotates together, (2i, 2i+1) for "norm" or (i, i+n_rot/2) for "neox".
    sections_are_neox: in files with sections of RoPE, for images, they are those of "neox".
    has_qk_norm: heads of Q and K are normed before RoPE; None = if the file has the tensors.
    norms_whole_qk: all heads of Q are normed as one row, and those of K. norms_rotated: heads of Q
    and K are normed after RoPE. has_alpha: another key may make RoPE's base larger than it says
    (rope.scaling.alpha); such files are refused. experts: whether a model has experts, "beside" a
    dense part in each layer if it has any. ffn_norm: the tensor that norms
    the input of the feed-forward part. rope_every: of so many layers the last one has no RoPE; 0 =
    all have it. log_multiplier: of YaRN: its magnitude is divided by the one that a
    key gives, "whole" or a "tenth" of it; "flag": with any it is 1.
    scales_queries: queries are scaled by their position, which a key says
    (attention.temperature_scale). window_every: of so many layers all but the last see a window of
    positions (attention.sliding_window); 0 = no layer does. has_sinks: each query head has a sink.
    activation: of the gate of feed-forward parts. has_expert_bias: experts and their selector have
    biases. has_post_norms: what attention and feed-forward part add is normed before.
    scales_embedding: embeddings are multiplied by the square root of their width. window_base:
    RoPE's base in layers with a window, unless a key says so (rope.freq_base_swa), without scaling
    of positions; 0 = layers with a window have the RoPE of the others. embd_scale_layers: in a
    model of so many layers products of Q and K are scaled by the width of the embedding for each
    head, not by that of a head. full_every: of so many layers all but the last are recurrent,
    unless a key says so (full_attention_interval); 0 = none is. recurrent: what these layers are;
    "mamba2" and "conv" are those without KV heads. groups_values: value heads of recurrent layers
    that follow each other use the same keys. has_gate: what attention gives is multiplied by a
    sigmoid; gates_heads: by one for each head. rotates_part: RoPE may leave out the last dimensions
    of a head. rotates_half: it rotates half of those that a key says in layers without a window.
    has_layer_heads: query and KV heads may be given for each layer. shared_expert: beside
    the experts that are chosen there is one for every token, "weighted" by a sigmoid or "plain";
    the width of a "sized" one, which is plain, is in a key, and so is that of each of "counted"
    ones. has_mtp: the last blocks of a file may predict further tokens (nextn_predict_layers); they
    are not used. sigmoid: experts are chosen and weighted by sigmoids of the selector's logits
    (expert_gating_func 2), "normed" by their sum or as a key says (expert_weights_norm), and a bias
    may count in the choice; "by_function": so or by softmaxes, as a key says (expert_gating_func).
    has_choice_bias: experts that are weighted by softmaxes are chosen by those over all, and a bias
    may count. keeps_softmax: experts are weighted by softmaxes over all, which are not divided by
    the sum of the chosen ones. starts_dense: the first layers may have no experts
    (leading_dense_block_count; in a file without the key, those without a selector).
    has_window_heads: layers with a window have heads of their own width (key_length_swa), KV heads
    and widths of feed-forward parts may be given for each layer, and the last layers may read the K
    and V of others (shared_kv_layers). has_v_norm: heads of V are normed, too; without a matrix of
    their own they are made with that of K. attention_scale: of products of Q and K, 0 = by the
    width of a head. rope_factors: whether a file has factors of RoPE for layers without a window;
    "long": it may have those of a long context, beside those of a short one, which are not used.
    caps_logits: logits may have a soft bound (final_logit_softcapping). has_layer_embeddings: each
    layer may have embeddings of its own (embedding_length_per_layer_input). rotates: whether heads
    are rotated, "by_key" unless one says that they are not (rope.scaling.finetuned), "windowed": in
    models with windows only those of layers with a window, "by_layer": those of layers that a key
    lists (attention.rope_pattern), or all. has_scales: keys may scale embeddings,
    what each part of a layer adds, and logits (embedding_scale, residual_scale, logit_scale).
    has_limits: keys may bound what becomes of gates and ups in each layer (swiglu_clamp_exp of
    experts, swiglu_clamp_shexp of other feed-forward parts).
    splits_layers: each block of the file is a mixer or a feed-forward part, and those with a width
    are the latter (feed_forward_length). output_norm: the tensor that norms the input of the head.
    has_mla: K and V are latent rows (kv_lora_rank). has_pre_norms: the row that attention and
    feed-forward part read is normed. windows: which models with a window_every have windows, those
    whose file has the key or those of 64 layers; "flagged": without a window_every, a file has a
    flag for each layer. unscales_windows: positions are not scaled in
    layers with a window.
    """

    pairs: Literal["norm", "neox"] = "neox"
    sections_are_neox: bool = False
    has_qk_norm: bool | None = False
    norms_whole_qk: bool = False
    norms_rotated: bool = False
    has_alpha: bool = False
    experts: Literal["none", "some", "all", "beside"] = "none"
    ffn_norm: str = "ffn_norm.weight"
    rope_every: int = 0
    log_multiplier: Literal["none", "whole", "tenth", "flag"] = "none"
    scales_queries: bool = False
    window_every: int = 0
    has_sinks: bool = False
    activation: Activation = "silu"
    has_expert_bias: bool = False
    has_post_norms: bool = False
    scales_embedding: bool = False
    window_base: float = 0.0
    embd_scale_layers: int = 0
    full_every: int = 0
    recurrent: Literal["none", "delta", "mamba2", "conv"] = "none"
    groups_values: bool = False
    has_gate: bool = False
    gates_heads: bool = False
    rotates_part: bool = False
    rotates_half: bool = False
    has_layer_heads: bool = False
    shared_expert: Literal["none", "weighted", "plain", "sized", "counted"] = "none"
    has_mtp: bool = False
    sigmoid: Sigmoid = "none"
    has_choice_bias: bool = False
    keeps_softmax: bool = False
    starts_dense: bool = False
    has_window_heads: bool = False
    has_v_norm: bool = False
    attention_scale: float = 0.0
    rope_factors: Literal["none", "some", "all", "long"] = "none"
    caps_logits: bool = False
    has_layer_embeddings: bool = False
    rotates: Literal["all", "none", "by_key", "windowed", "by_layer"] = "all"
    has_scales: bool = False
    has_limits: bool = False
    splits_layers: bool = False
    output_norm: str = "output_norm.weight"
    has_mla: bool = False
    has_pre_norms: bool = True
    windows: Literal["all", "by_key", "of_64_layers", "flagged"] = "all"
    unscales_windows: bool = False


OTHERS_BASE = -1.0  # of RoPE in layers with a window: that of the others, whatever a key says

_QWEN3 = ModelArchitecture(has_qk_norm=True)
_QWEN3_MOE = ModelArchitecture(has_qk_norm=True, experts="all")
_HUNYUAN = ModelArchitecture(has_qk_norm=True, norms_rotated=True)
_QWEN35 = ModelArchitecture(
    has_qk_norm=True,
    ffn_norm="post_attention_norm.weight",
    full_every=4,
    recurrent="delta",
    has_gate=True,
    rotates_part=True,
    has_mtp=True,
)
_QWEN35_MOE = replace(_QWEN35, experts="all", shared_expert="weighted")
_GRANITE = ModelArchitecture(
    pairs="norm", rotates_part=True, rope_factors="some", rotates="by_key", has_scales=True
)
_GRANITE_MOE = replace(_GRANITE, experts="some", shared_expert="sized")
_NEMOTRON_H = ModelArchitecture(
    ffn_norm="attn_norm.weight",
    activation="relu2",
    recurrent="mamba2",
    rotates="none",
    splits_layers=True,
)
_DEEPSEEK2 = ModelArchitecture(
    pairs="norm",
    experts="some",
    log_multiplier="flag",
    scales_queries=True,
    shared_expert="plain",
    has_mtp=True,
    sigmoid="by_function",
    starts_dense=True,
    has_mla=True,
)
_LFM2 = ModelArchitecture(has_qk_norm=True, recurrent="conv", output_norm="token_embd_norm.weight")

# Of qwen2vl, qwen3vl and qwen3vlmoe only text is computed: there their RoPE is as without images.
ARCHITECTURES = {
    "llama": ModelArchitecture(pairs="norm", experts="some", rope_factors="some"),
    "mistral3": ModelArchitecture(pairs="norm", log_multiplier="whole", scales_queries=True),
    "smollm3": ModelArchitecture(pairs="norm", rope_every=4),
    "qwen2": ModelArchitecture(),
    "qwen2vl": ModelArchitecture(),
    "qwen2moe": ModelArchitecture(experts="all", shared_expert="weighted", keeps_softmax=True),
    "seed_oss": ModelArchitecture(ffn_norm="post_attention_norm.weight"),
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
    "hunyuan-dense": replace(_HUNYUAN, has_alpha=True),
    "hunyuan-moe": replace(_HUNYUAN, experts="all", shared_expert="sized"),
    "maincoder": ModelArchitecture(pairs="norm", has_qk_norm=True, norms_rotated=True),
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen3next": replace(_QWEN35_MOE, groups_values=True),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "glm4": ModelArchitecture(
        pairs="norm", sections_are_neox=True, has_post_norms=True, rotates_part=True
    ),
    "glm4moe": ModelArchitecture(
        has_qk_norm=None,
        experts="all",
        ffn_norm="post_attention_norm.weight",
        rotates_part=True,
        shared_expert="plain",
        has_mtp=True,
        sigmoid="by_key",
        starts_dense=True,
    ),
    "minimax-m2": ModelArchitecture(
        has_qk_norm=True,
        norms_whole_qk=True,
        experts="all",
        rotates_part=True,
        sigmoid="normed",
    ),
    "deepseek2": _DEEPSEEK2,
    "mistral4": replace(_DEEPSEEK2, log_multiplier="tenth"),
    "phi3": ModelArchitecture(rotates_part=True, rope_factors="long"),
    "olmo2": ModelArchitecture(
        has_qk_norm=True,
        norms_whole_qk=True,
        window_every=4,
        has_post_norms=True,
        window_base=OTHERS_BASE,
        has_pre_norms=False,
        windows="by_key",
        unscales_windows=True,
    ),
    "olmoe": ModelArchitecture(
        has_qk_norm=True, norms_whole_qk=True, experts="some", keeps_softmax=True
    ),
    "exaone4": ModelArchitecture(
        has_qk_norm=True,
        window_every=4,
        has_post_norms=True,
        window_base=OTHERS_BASE,
        rope_factors="some",
        rotates="windowed",
        has_mtp=True,
        has_pre_norms=False,
        windows="of_64_layers",
    ),
    "exaone-moe": replace(
        _QWEN3_MOE,
        window_every=4,
        window_base=OTHERS_BASE,
        rope_factors="some",
        rotates="windowed",
        shared_expert="sized",
        has_mtp=True,
        sigmoid="by_key",
        starts_dense=True,
    ),
    "mellum": replace(
        _QWEN3_MOE,
        window_every=4,
        window_base=OTHERS_BASE,
        windows="by_key",
        unscales_windows=True,
    ),
    "hy_v3": replace(
        _QWEN3_MOE, shared_expert="sized", has_mtp=True, sigmoid="by_key", starts_dense=True
    ),
    "afmoe": replace(
        _QWEN3_MOE,
        rope_every=4,
        window_every=4,
        windows="by_key",
        has_gate=True,
        has_post_norms=True,
        scales_embedding=True,
        shared_expert="plain",
        sigmoid="by_key",
        starts_dense=True,
    ),
    "step35": ModelArchitecture(
        has_qk_norm=None,
        experts="all",
        window_base=10000.0,
        has_gate=True,
        gates_heads=True,
        rotates_part=True,
        rotates_half=True,
        has_layer_heads=True,
        shared_expert="sized",
        has_mtp=True,
        sigmoid="by_key",
        starts_dense=True,
        rope_factors="some",
        has_limits=True,
        windows="flagged",
    ),
    "spark2_5": ModelArchitecture(
        activation="gelu",
        has_gate=True,
        gates_heads=True,
        rotates_part=True,
        has_layer_heads=True,
        windows="flagged",
    ),
    "arcee": ModelArchitecture(pairs="norm", activation="relu2", rope_factors="some"),
    "dots1": replace(_QWEN3_MOE, shared_expert="plain", sigmoid="by_key", starts_dense=True),
    "bailingmoe2": replace(
        _QWEN3_MOE,
        rotates_part=True,
        shared_expert="counted",
        has_mtp=True,
        sigmoid="by_key",
        starts_dense=True,
    ),
    "ernie4_5": ModelArchitecture(pairs="norm"),
    "ernie4_5-moe": ModelArchitecture(
        pairs="norm",
        experts="all",
        shared_expert="sized",
        has_choice_bias=True,
        starts_dense=True,
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granite_swa": replace(
        _GRANITE_MOE,
        window_every=4,
        window_base=OTHERS_BASE,
        has_sinks=True,
        rotates_part=False,
        rotates="by_layer",
    ),
    "granitehybrid": replace(_GRANITE_MOE, recurrent="mamba2"),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H, experts="all", shared_expert="sized", sigmoid="by_key", has_mtp=True
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, experts="all", sigmoid="normed", starts_dense=True),
    "gpt-oss": ModelArchitecture(
        experts="all",
        ffn_norm="post_attention_norm.weight",
        window_every=2,
        has_sinks=True,
        activation="oai",
        has_expert_bias=True,
    ),
    "gemma3": ModelArchitecture(
        has_qk_norm=True,
        window_every=6,
        activation="gelu",
        has_post_norms=True,
        scales_embedding=True,
        window_base=10000.0,
        embd_scale_layers=62,
    ),
    "gemma4": ModelArchitecture(
        has_qk_norm=True,
        experts="beside",
        window_every=6,
        activation="gelu",
        has_post_norms=True,
        scales_embedding=True,
        window_base=10000.0,
        has_window_heads=True,
        has_v_norm=True,
        attention_scale=1.0,
        rope_factors="all",
        caps_logits=True,
        has_layer_embeddings=True,
    ),
}
