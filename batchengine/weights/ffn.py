"""Feed-forward parts, dense and of experts: what the keys of a file say of them.

Refuses experts that are chosen, weighted or placed in another way than `MoeSpec` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchengine import errors
from batchengine.gguf import GgufFile, StringArray
from batchengine.weights.architectures import ARCHITECTURES, Activation, Gating
from batchengine.weights.keys import (
    each_layer,
    number_between,
    numbers_of,
    same_for_all_layers,
    unsupported,
)

EXPERTS_MAX = 1024  # as llama.cpp; keeps a step's tables of experts and pairs small
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
SIGMOIDS = "sigmoid", "normed_sigmoid"  # gatings
WITH_BIAS = (*SIGMOIDS, "biased_softmax")  # which may have one of the choice
GLM_FLASH_VOCAB, GLM_FLASH_LAYERS = 154880, (47, 48)
LIMIT_MIN, LIMIT_MAX = 1e-3, 1e6  # bounds of gates and ups
GROUPS_MAX = 32  # EXPERT_GROUPS_MAX of choice.h
BANK_ROWS_MAX = 1 << 31  # of all experts in one matrix, as kernels take it: at most 2**57 bytes


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward part: down(activation(gate·x) * (up·x)), n_ff values wide in between; of the
    activation "relu2", which has no gate, down(relu(up·x)²).

    has_post_norm: the output is normed before it is added; has_pre_norm: the row that is read is.
    limit: the bound of silu(gate·x) and of up·x; 0 = there is none.
    """

    n_ff: int
    activation: Activation = "silu"
    has_post_norm: bool = False
    has_pre_norm: bool = True
    limit: float = 0.0

    @property
    def unlimited(self) -> DenseSpec:
        """The same without a limit: what buffers depend on."""
        return replace(self, limit=0.0) if self.limit else self


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: n_expert feed-forward parts of n_ff values each.

    A selector chooses n_used of them for each token. Their outputs are summed with weights, times
    scale: by `gating` the softmax over the chosen, or over all ("softmax_all"), or the sigmoid of
    each one's logit, "normed" by the sum over the chosen. The choice of "biased_softmax" is by the
    softmax over all. activation: what becomes of the gate and up products, by the name that kernels
    have for it; "relu2" has no gate. has_bias: the products of the selector and of each expert have
    biases. n_ff_shared: width of one more expert, which every token uses; 0 = there is none.
    has_shared_weight: it has a weight of its own for each token. n_latent: width of the projection
    that experts read, and of their sum, which is projected back; 0 = there is none. n_group,
    n_group_used: of so many groups of experts those of so many can be chosen for a token: of those
    whose best two have the largest sums. has_post_norm: the sum of all is normed before it is
    added. limit, shared_limit: the bounds of silu(gate·x) and of up·x of the experts, and of the
    shared one; 0 = there is none.
    """

    n_expert: int
    n_used: int
    n_ff: int
    scale: float
    activation: Activation = "silu"
    has_bias: bool = False
    n_ff_shared: int = 0
    gating: Gating = "softmax"
    has_shared_weight: bool = False
    n_latent: int = 0
    n_group: int = 1
    n_group_used: int = 1
    has_post_norm: bool = False
    limit: float = 0.0
    shared_limit: float = 0.0

    @property
    def unlimited(self) -> MoeSpec:
        """The same without limits: what buffers depend on."""
        is_limited = self.limit or self.shared_limit
        return replace(self, limit=0.0, shared_limit=0.0) if is_limited else self


@dataclass(frozen=True, slots=True)
class PairedSpec:
    """A dense part and a mixture of experts side by side.

    Each norms the residual stream and its own output; the sum of the two is normed and added. The
    selector reads the residual stream with another norm.
    """

    dense: DenseSpec
    experts: MoeSpec

    @property
    def n_ff(self) -> int:
        """Width of the dense part."""
        return self.dense.n_ff

    @property
    def unlimited(self) -> PairedSpec:
        """The same: these have no limits."""
        return self


FfnSpec = DenseSpec | MoeSpec | PairedSpec


def read_ffns(gguf: GgufFile, arch: str, n_embd: int, n_layer: int) -> list[FfnSpec | None]:
    """The feed-forward part of each layer; None: it has none."""
    row = ARCHITECTURES[arch]
    n_expert = gguf.integer(f"{arch}.expert_count", None if row.experts == "all" else 0)
    is_dense = n_expert == 0 or (n_expert == 1 and row.experts == "none")
    if is_dense and row.experts != "all":
        return [*_read_dense(gguf, arch, n_layer)]
    experts = _read_experts(gguf, arch, n_embd, n_layer)
    if row.splits_layers:
        return [dense and experts for dense in _read_dense(gguf, arch, n_layer)]
    if row.experts == "beside":
        return [dense and PairedSpec(dense, experts) for dense in _read_dense(gguf, arch, n_layer)]
    n_dense = _count_dense(gguf, arch, n_layer)
    dense = _read_dense(gguf, arch, n_layer)[:n_dense] if n_dense else []
    specs = [*dense, *[experts] * (n_layer - n_dense)]
    return _limited(gguf, arch, specs) if row.has_limits else [*specs]


def _limited(
    gguf: GgufFile, arch: str, specs: Sequence[DenseSpec | MoeSpec | None]
) -> list[FfnSpec | None]:
    """Feed-forward parts with the bounds that each layer has; dense ones have that of the shared
    expert."""
    limits = _limits(gguf, f"{arch}.swiglu_clamp_exp", len(specs))
    others = _limits(gguf, f"{arch}.swiglu_clamp_shexp", len(specs))
    found = list[FfnSpec | None]()
    for spec, limit, other in zip(specs, limits, others, strict=True):
        if isinstance(spec, MoeSpec):
            shared = other if spec.n_ff_shared else 0.0
            found.append(replace(spec, limit=limit, shared_limit=shared))
        else:
            found.append(spec and replace(spec, limit=other))
    return found


def _limits(gguf: GgufFile, key: str, n_layer: int) -> list[float]:
    """The bound of each layer; 0 = there is none."""
    limits = numbers_of(gguf, key, n_layer)
    for limit in limits:
        if limit != 0.0 and not LIMIT_MIN <= limit <= LIMIT_MAX:
            why = f"neither 0 nor from {LIMIT_MIN:g} to {LIMIT_MAX:g}"
            raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=limit, why=why)
    return [float(np.float32(limit)) for limit in limits]


def _read_experts(gguf: GgufFile, arch: str, n_embd: int, n_layer: int) -> MoeSpec:
    """The mixture of all layers that have experts."""
    key = f"{arch}.expert_count"
    row = ARCHITECTURES[arch]
    experts = row.experts
    n_expert = gguf.integer(key, None)
    if experts == "none":
        known = [name for name, row in ARCHITECTURES.items() if row.experts != "none"]
        why = f"experts are supported in {', '.join(known)}"
        raise unsupported(gguf, key, n_expert, why, "use a dense model, or one of these")
    if not 2 <= n_expert <= EXPERTS_MAX:
        raise unsupported(gguf, key, n_expert, f"2 to {EXPERTS_MAX} experts are supported")
    _refuse_other_mixtures(gguf, arch)
    used_key = f"{arch}.expert_used_count"
    n_used = same_for_all_layers(gguf, used_key, None, n_layer)
    if n_used > n_expert:
        why = f"a token can use {n_expert} experts at most"
        raise errors.KEY_VALUE(file=gguf.path.name, key=used_key, value=n_used, why=why)
    n_ff = _expert_width(gguf, arch, n_used, n_layer)
    rows = n_expert * max(n_ff, n_embd)
    if rows > BANK_ROWS_MAX:
        why = f"with these widths they have {rows:,} rows in one tensor, {BANK_ROWS_MAX:,} at most"
        raise unsupported(gguf, key, n_expert, why)
    scale_key = f"{arch}.expert_weights_scale"
    is_given = gguf.number(scale_key, 0.0) != 0.0  # 0 is the format's "not given"
    scale = number_between(gguf, scale_key, None, 1e-3, 1e3) if is_given else 1.0
    return MoeSpec(
        n_expert,
        n_used,
        n_ff,
        scale,
        row.activation,
        row.has_expert_bias,
        _shared_width(gguf, arch, n_ff, n_layer),
        _gating(gguf, arch),
        row.shared_expert == "weighted",
        _latent_width(gguf, arch),
        *_groups(gguf, arch, n_expert, n_used),
        row.has_post_norms and experts != "beside",
    )


def _groups(gguf: GgufFile, arch: str, n_expert: int, n_used: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token uses; (1, 1): there are none."""
    key, used_key = f"{arch}.expert_group_count", f"{arch}.expert_group_used_count"
    n_group = gguf.integer(key, 0)
    if n_group in (0, 1):
        return 1, 1
    if ARCHITECTURES[arch].sigmoid == "none" or _gating(gguf, arch) not in SIGMOIDS:
        raise unsupported(gguf, key, n_group, "groups are supported of experts chosen by sigmoids")
    if not 2 <= n_group <= GROUPS_MAX or n_expert % n_group or n_expert // n_group < 2:
        why = f"{n_expert} experts are in 2 to {GROUPS_MAX} equal groups, two at least in each"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=n_group, why=why)
    n_group_used = gguf.integer(used_key, 0)
    if not 1 <= n_group_used <= n_group or n_group_used * (n_expert // n_group) < n_used:
        why = f"of {n_group} groups, as many as have {n_used} experts are needed"
        raise errors.KEY_VALUE(file=gguf.path.name, key=used_key, value=n_group_used, why=why)
    return n_group, n_group_used


def _read_dense(gguf: GgufFile, arch: str, n_layer: int) -> list[DenseSpec | None]:
    """The dense feed-forward part of each layer, as if none had experts; None: it has no part."""
    row, key = ARCHITECTURES[arch], f"{arch}.feed_forward_length"
    if row.has_window_heads or row.splits_layers:
        widths = each_layer(gguf, key, None, n_layer, least=0 if row.splits_layers else 1)
    else:
        widths = [same_for_all_layers(gguf, key, None, n_layer)] * n_layer
    specs = list[DenseSpec | None]()
    for width in widths:
        if width:
            _check_ffn_width(gguf, key, width, 1)
        norms = row.has_post_norms, row.has_pre_norms
        specs.append(DenseSpec(width, row.activation, *norms) if width else None)
    return specs


def _count_dense(gguf: GgufFile, arch: str, n_layer: int) -> int:
    """How many of the first layers have no experts, in a model whose others have."""
    if not ARCHITECTURES[arch].starts_dense:
        return 0
    key = f"{arch}.leading_dense_block_count"
    # 0 is also what converters write that do not find the number.
    count = gguf.integer(key, 0) or _count_without_selector(gguf, n_layer)
    if not 0 <= count < n_layer:
        why = f"some of the {n_layer} layers must have experts"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=count, why=why)
    return count


def _count_without_selector(gguf: GgufFile, n_layer: int) -> int:
    """How many of the first layers of a file have no selector of experts."""
    has_one = [f"blk.{index}.ffn_gate_inp.weight" in gguf.tensors for index in range(n_layer)]
    return has_one.index(True) if True in has_one else 0


def _latent_width(gguf: GgufFile, arch: str) -> int:
    """Width of the projection that experts read; 0 = they read the row itself."""
    key = f"{arch}.moe_latent_size"
    width = gguf.integer(key, 0)
    if width and not ARCHITECTURES[arch].splits_layers:
        why = "experts that read a projection of the row are not supported here"
        raise unsupported(gguf, key, width, why)
    return _check_ffn_width(gguf, key, width, 1) if width else 0


def _gating(gguf: GgufFile, arch: str) -> Gating:
    """How the weights of experts come from the selector's logits."""
    kind = ARCHITECTURES[arch].sigmoid
    if kind == "by_function" and _gating_function(gguf, arch) == SOFTMAX:
        return "softmax" if gguf.values.get(f"{arch}.expert_weights_norm", False) else "softmax_all"
    if kind == "none" and ARCHITECTURES[arch].keeps_softmax:
        return "softmax_all"
    if kind == "none":
        return "biased_softmax" if ARCHITECTURES[arch].has_choice_bias else "softmax"
    is_normed = kind == "normed" or gguf.values.get(f"{arch}.expert_weights_norm", False)
    return "normed_sigmoid" if is_normed else "sigmoid"


def _gating_function(gguf: GgufFile, arch: str) -> int:
    """SOFTMAX or SIGMOID, of a file that may have either. Older files of DeepSeek V2 and
    GLM-4.7-Flash do not say; those of the latter have its vocabulary and layers."""
    function = gguf.integer(f"{arch}.expert_gating_func", 0)
    if function:
        return function
    n_block = gguf.integer(f"{arch}.block_count", 0)
    n_layer = n_block - gguf.integer(f"{arch}.nextn_predict_layers", 0)
    tokens = gguf.values.get("tokenizer.ggml.tokens")
    n_vocab = gguf.integer(
        f"{arch}.vocab_size", len(tokens) if isinstance(tokens, StringArray) else 0
    )
    return SIGMOID if n_vocab == GLM_FLASH_VOCAB and n_layer in GLM_FLASH_LAYERS else SOFTMAX


def _shared_width(gguf: GgufFile, arch: str, n_ff: int, n_layer: int) -> int:
    """n_ff of the expert that every token uses; several, of n_ff each, are one that is wider."""
    kind, key = ARCHITECTURES[arch].shared_expert, f"{arch}.expert_shared_feed_forward_length"
    has_one = f"blk.{n_layer - 1}.ffn_up_shexp.weight" in gguf.tensors
    if kind in ("weighted", "sized") and has_one and gguf.integer(key, 0) == 0:
        key = f"{arch}.feed_forward_length"  # as older files of qwen2moe have it
    if kind == "weighted" or (kind == "sized" and (has_one or gguf.integer(key, 0))):
        return _ffn_width(gguf, key, n_layer)
    if kind not in ("plain", "counted"):
        return 0
    width = gguf.integer(key, 0) if kind == "counted" else 0
    n_shared = gguf.integer(f"{arch}.expert_shared_count", 0)
    return _check_ffn_width(gguf, key, n_shared * (width or n_ff), 1) if n_shared else 0


_SHARED = (
    ("expert_shared_count", 0, "experts that every token uses are not supported"),
    ("expert_shared_feed_forward_length", 0, "experts that every token uses are not supported"),
)
_ONE_SHARED = (("expert_shared_count", 1, "one expert that every token uses is supported"),)
_SOME_SHARED = (
    ("expert_shared_count", EXPERTS_MAX, "so many experts that every token uses are not supported"),
    ("expert_shared_feed_forward_length", 0, "these experts have the width of the others"),
)
_SHARED_KEYS = {
    "none": _SHARED,
    "weighted": _ONE_SHARED,
    "plain": _SOME_SHARED,
    "sized": (),  # another key has their width
    "counted": _SOME_SHARED[:1],
}
_ALL_HAVE = ("leading_dense_block_count", 0, "every layer must have experts")
# Keys of other mixtures: the largest value with which a file is one of ours, and what more means.
_OTHER_MIXTURES = (("interleave_moe_layer_step", 1, "every layer must have experts"),)


def _refuse_other_mixtures(gguf: GgufFile, arch: str) -> None:
    """Raises for experts that are chosen, weighted or placed in another way than `MoeSpec` says."""
    row = ARCHITECTURES[arch]
    shared = _SHARED_KEYS[row.shared_expert]
    dense = () if row.starts_dense else (_ALL_HAVE,)
    for name, most, why in (*shared, *dense, *_OTHER_MIXTURES):
        value = gguf.integer(f"{arch}.{name}", 0)
        if not 0 <= value <= most:
            raise unsupported(gguf, f"{arch}.{name}", value, why)
    function = gguf.integer(f"{arch}.expert_gating_func", 0)
    if row.sigmoid != "none":
        known = (0, SIGMOID) if row.sigmoid != "by_function" else (0, SOFTMAX, SIGMOID)
        if function not in known:
            also = " or a softmax (1)" if SOFTMAX in known else ""
            why = f"the weights of experts must come from a sigmoid (2){also}"
            raise unsupported(gguf, f"{arch}.expert_gating_func", function, why)
        norm = gguf.values.get(f"{arch}.expert_weights_norm", False)
        if not isinstance(norm, bool):
            key, why = f"{arch}.expert_weights_norm", "it must be true or false"
            raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=norm, why=why)
        return
    is_normed = not row.keeps_softmax
    # 3, a softmax over the chosen ones, is what one over all becomes when the weights are normed.
    known = (0, 1, 3) if is_normed else (0, 1)
    if function not in known:
        why = f"the weights of experts must come from a softmax ({'1 or 3' if is_normed else 1})"
        raise unsupported(gguf, f"{arch}.expert_gating_func", function, why)
    if (norm := gguf.values.get(f"{arch}.expert_weights_norm", is_normed)) is not is_normed:
        why = "the weights of the chosen experts must have the sum 1"
        if row.keeps_softmax:
            why = "the weights of the chosen experts must be those of a softmax over all"
        raise unsupported(gguf, f"{arch}.expert_weights_norm", str(norm).lower(), why)


def _expert_width(gguf: GgufFile, arch: str, n_used: int, n_layer: int) -> int:
    """n_ff of one expert. Without a key of its own, feed_forward_length is the width of all that a
    token uses where every model has experts, and that of one expert elsewhere; where the first
    layers may be dense it is theirs."""
    key, row = f"{arch}.expert_feed_forward_length", ARCHITECTURES[arch]
    is_array = isinstance(gguf.values.get(key), np.ndarray)
    if is_array or row.starts_dense or gguf.integer(key, 0) != 0:
        return _ffn_width(gguf, key, n_layer)
    parts = n_used if row.experts == "all" else 1
    if row.splits_layers:
        key = f"{arch}.feed_forward_length"
        widths = {width for width in each_layer(gguf, key, None, n_layer, least=0) if width}
        if len(widths) != 1:
            why = "experts of all layers must have the same width"
            raise unsupported(gguf, key, sorted(widths)[:8], why)
        return _check_ffn_width(gguf, key, widths.pop(), parts)
    return _ffn_width(gguf, f"{arch}.feed_forward_length", n_layer, parts)


def _ffn_width(gguf: GgufFile, key: str, n_layer: int, parts: int = 1) -> int:
    """n_ff by a key that counts `parts` of them."""
    return _check_ffn_width(gguf, key, same_for_all_layers(gguf, key, None, n_layer), parts)


def _check_ffn_width(gguf: GgufFile, key: str, value: int, parts: int) -> int:
    n_ff = value // parts
    if n_ff <= 0 or n_ff % 32:
        of_one = f" for each of {parts} experts" if parts > 1 else ""
        raise unsupported(gguf, key, value, f"a multiple of 32{of_one} is needed")
    return n_ff
