"""The tensors of a model: names, shapes and types, checked before any of them is packed.

Owns the mapping from GGUF tensor names to the roles of a layer (`weights.roles`). Refuses files
with a missing tensor, a tensor of another shape or of a type that has no kernel, and tensors whose
meaning is unknown (ignoring one would change the answer silently). Shapes are (rows, cols): a
matrix maps cols inputs to rows outputs, and cols is the file's contiguous dimension. A bank, the
same matrix of every expert in one tensor, is one matrix: its rows are those of expert 0, then of
expert 1, ...
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import kernels
from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile, TensorInfo
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.attention import (
    ROPE_FACTORS_SHORT,
    AttentionSpec,
    MlaSpec,
    rope_factors_of,
)
from batchengine.weights.ffn import WITH_BIAS, DenseSpec, FfnSpec, MoeSpec, PairedSpec
from batchengine.weights.keys import unsupported
from batchengine.weights.recurrent import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from batchengine.weights.roles import (
    AttentionRoles,
    DeltaNetRoles,
    DenseRoles,
    LayerEmbeddingRoles,
    LayerInputRoles,
    LayerRoles,
    Mamba2Roles,
    MlaRoles,
    MoeRoles,
    PairedRoles,
    SharedRoles,
    ShortConvRoles,
)
from batchengine.weights.spec import LAYER_TABLE, TABLE, LayerSpec, MixerSpec, ModelSpec

# Storage type in the file -> kind of kernels.Matrix
MATRIX_KINDS = {kind.upper(): kind for kind in kernels.KINDS}
DECAYS = re.compile(r"blk\.\d+\.ssm_a$")  # of recurrent state: -exp of what was trained
FLOAT_TYPES = ("F32", "F16", "BF16")  # of vectors and selectors

_CONVERT = "convert the model again with a newer llama.cpp"
_OTHER = "use another model"
# Tensors of mixtures of experts that have another form or meaning: why, and what to do.
_OTHER_EXPERTS = (
    (re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$"),
     "it is one expert's; all experts of a layer must be in one tensor", _CONVERT),
)  # fmt: skip
_CHOICE_BIAS = (
    re.compile(r"blk\.\d+\.exp_probs_b(\.bias)?$"),
    "a bias on the choice of experts is not supported", _OTHER,
)  # fmt: skip

_BLOCK = re.compile(r"blk\.(\d+)\.")
# Tables that old converters wrote and every reader computes itself.
_IGNORED = re.compile(r"(blk\.\d+\.attn_rot_embd|rotary_emb\.inv_freq)(\.weight)?$")


class EveryRows(NamedTuple):
    """Rows of a tensor: of each `every` ones, `n_rows` from `first` on."""

    first: int
    n_rows: int
    every: int


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A matrix to pack: the kind of kernels.Matrix, and its (rows, cols). It is the tensor `name`,
    or the rows `part` of the tensor `source`."""

    name: str
    kind: str
    rows: int
    cols: int
    source: str = ""
    part: EveryRows | None = None

    @property
    def tensor(self) -> str:
        """The tensor of the file."""
        return self.source or self.name


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """A float32 vector joined from 1-D tensors, times `factor`; a part without one is `absent`.

    parts: (tensor name or None, size) in order.
    """

    name: str
    parts: tuple[tuple[str | None, int], ...]
    absent: float = 0.0
    factor: float = 1.0

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, slots=True)
class SinksPlan(VectorPlan):
    """The sinks of a layer's query heads."""


AttentionPlan = AttentionRoles[MatrixPlan, VectorPlan, SinksPlan]
MlaPlan = MlaRoles[MatrixPlan, VectorPlan]
DeltaNetPlan = DeltaNetRoles[MatrixPlan, VectorPlan]
Mamba2Plan = Mamba2Roles[MatrixPlan, VectorPlan]
ShortConvPlan = ShortConvRoles[MatrixPlan, VectorPlan]
DensePlan = DenseRoles[MatrixPlan, VectorPlan]
MoePlan = MoeRoles[MatrixPlan, VectorPlan]
PairedPlan = PairedRoles[MatrixPlan, VectorPlan]
LayerEmbeddingPlan = LayerEmbeddingRoles[MatrixPlan, VectorPlan]
LayerPlan = LayerRoles[MatrixPlan, VectorPlan, SinksPlan]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """All tensors of a model by role; `matrices` and `vectors` list each of them once."""

    embedding: MatrixPlan
    output_norm: VectorPlan
    head: MatrixPlan
    head_bias: VectorPlan | None
    rope_factors: VectorPlan | None
    layer_embeddings: LayerEmbeddingPlan | None
    layers: tuple[LayerPlan, ...]
    matrices: tuple[MatrixPlan, ...] = field(repr=False)
    vectors: tuple[VectorPlan, ...] = field(repr=False)


def plan_tensors(gguf: GgufFile, spec: ModelSpec) -> TensorPlan:
    """Finds every tensor of the model; BatchEngineError naming the first one that is wrong."""
    find = _Finder(gguf)
    if spec.experts:
        _refuse_other_experts(gguf, spec.experts)
    embedding = find.matrix(TABLE, spec.n_vocab, spec.n_embd)
    head = embedding
    if not spec.tied:
        head = find.matrix("output.weight", spec.n_vocab, spec.n_embd)
    plan = TensorPlan(
        embedding=embedding,
        output_norm=find.vector(_output_norm(gguf, spec.arch), spec.n_embd),
        head=head,
        head_bias=find.optional("output.bias", spec.n_vocab),
        rope_factors=_plan_rope_factors(find, spec),
        layer_embeddings=_plan_layer_embeddings(find, spec) if spec.n_embd_layer else None,
        layers=tuple([_plan_layer(find, spec, layer) for layer in spec.layers]),
        matrices=tuple(find.matrices),
        vectors=tuple(find.vectors),
    )
    if spec.attention.rope.has_factors:
        find.leave_out(ROPE_FACTORS_SHORT, spec.attention.rope.n_rot // 2)
    n_mtp = gguf.integer(f"{spec.arch}.nextn_predict_layers", 0)
    find.refuse_unused(range(spec.n_block, spec.n_block + n_mtp))
    return plan


def _plan_rope_factors(find: _Finder, spec: ModelSpec) -> VectorPlan | None:
    """A factor for each rotated pair; where layers without a window rotate fewer dimensions, which
    are the first ones, those with one have no factors, and the others do not need all."""
    rotated = [of.rope.n_rot for of in spec.attentions if of.rope.has_factors]
    if not rotated:
        return None
    is_half = ARCHITECTURES[spec.arch].rotates_half
    n_rot = max(of.rope.n_rot for of in spec.attentions) if is_half else rotated[0]
    return find.vector(rope_factors_of(spec.arch), n_rot // 2)


def _output_norm(gguf: GgufFile, arch: str) -> str:
    """The tensor that norms the input of the head; older files of some have the usual name."""
    name, usual = ARCHITECTURES[arch].output_norm, "output_norm.weight"
    return usual if name not in gguf.tensors and usual in gguf.tensors else name


def _plan_layer(find: _Finder, spec: ModelSpec, layer: LayerSpec) -> LayerPlan:
    n_embd, prefix = spec.n_embd, f"blk.{layer.block}."
    norm = ARCHITECTURES[spec.arch].ffn_norm
    ffn = layer.ffn and _plan_ffn(find, layer.ffn, n_embd, f"blk.{layer.ffn_block}.", norm)
    return LayerPlan(
        _plan_mixer(find, layer.mixer, n_embd, prefix),
        ffn,
        _plan_layer_inputs(find, spec, prefix) if spec.n_embd_layer else None,
        find.optional(prefix + "layer_output_scale.weight", 1),
    )


def _plan_layer_embeddings(find: _Finder, spec: ModelSpec) -> LayerEmbeddingPlan:
    width = spec.n_embd_layer * spec.n_layer
    return LayerEmbeddingPlan(
        table=find.matrix(LAYER_TABLE, spec.n_vocab, width),
        projection=find.matrix("per_layer_model_proj.weight", width, spec.n_embd),
        norm=find.vector("per_layer_proj_norm.weight", spec.n_embd_layer),
    )


def _plan_layer_inputs(
    find: _Finder, spec: ModelSpec, prefix: str
) -> LayerInputRoles[MatrixPlan, VectorPlan]:
    return LayerInputRoles(
        gate=find.matrix(prefix + "inp_gate.weight", spec.n_embd_layer, spec.n_embd),
        output=find.matrix(prefix + "proj.weight", spec.n_embd, spec.n_embd_layer),
        post_norm=find.vector(prefix + "post_norm.weight", spec.n_embd),
    )


def _plan_mixer(
    find: _Finder, spec: MixerSpec, n_embd: int, prefix: str
) -> AttentionPlan | MlaPlan | DeltaNetPlan | Mamba2Plan | ShortConvPlan:
    if isinstance(spec, DeltaNetSpec):
        return _plan_delta_net(find, spec, n_embd, prefix)
    if isinstance(spec, Mamba2Spec):
        return _plan_mamba2(find, spec, n_embd, prefix)
    if isinstance(spec, ShortConvSpec):
        return _plan_short_conv(find, spec, n_embd, prefix)
    if spec.mla is not None:
        return _plan_mla(find, spec, spec.mla, n_embd, prefix)
    return _plan_attention(find, spec, n_embd, prefix)


def _plan_delta_net(find: _Finder, spec: DeltaNetSpec, n_embd: int, prefix: str) -> DeltaNetPlan:
    width, heads = spec.value_width, spec.n_v_head
    dt = prefix + ("ssm_dt.bias" if prefix + "ssm_dt.bias" in find.gguf.tensors else "ssm_dt")
    return DeltaNetPlan(
        norm=find.vector(prefix + "attn_norm.weight", n_embd),
        inputs=[
            *_plan_state_inputs(find, spec, n_embd, prefix),
            *_plan_state_factors(find, spec, n_embd, prefix),
        ],
        conv=find.table(prefix + "ssm_conv1d.weight", spec.conv_kernel, spec.channels),
        dt_bias=find.vector(dt, heads),
        a=find.vector(prefix + "ssm_a", heads),
        value_norm=find.vector(prefix + "ssm_norm.weight", spec.head_dim),
        output=find.matrix(prefix + "ssm_out.weight", n_embd, width),
    )


def _plan_mamba2(find: _Finder, spec: Mamba2Spec, n_embd: int, prefix: str) -> Mamba2Plan:
    width, channels, heads = spec.value_width, spec.channels, spec.n_head
    rows = width, channels, heads
    gate, channel_inputs, steps = find.parts(prefix + "ssm_in.weight", 1, rows, n_embd, sum(rows))
    return Mamba2Plan(
        norm=find.vector(prefix + "attn_norm.weight", n_embd),
        inputs=[channel_inputs, gate, steps],
        conv=find.table(prefix + "ssm_conv1d.weight", spec.conv_kernel, channels),
        conv_bias=find.optional(prefix + "ssm_conv1d.bias", channels),
        dt_bias=find.vector(prefix + "ssm_dt.bias", heads),
        a=find.table(prefix + "ssm_a", 1, heads),
        d=find.table(prefix + "ssm_d", 1, heads),
        value_norm=find.table(prefix + "ssm_norm.weight", width // spec.n_group, spec.n_group),
        output=find.matrix(prefix + "ssm_out.weight", n_embd, width),
    )


def _plan_short_conv(find: _Finder, spec: ShortConvSpec, n_embd: int, prefix: str) -> ShortConvPlan:
    return ShortConvPlan(
        norm=find.vector(prefix + "attn_norm.weight", n_embd),
        inputs=[find.matrix(prefix + "shortconv.in_proj.weight", 3 * spec.width, n_embd)],
        conv=find.table(prefix + "shortconv.conv.weight", spec.conv_kernel, spec.width),
        output=find.matrix(prefix + "shortconv.out_proj.weight", n_embd, spec.width),
    )


def _plan_state_inputs(
    find: _Finder, spec: DeltaNetSpec, n_embd: int, prefix: str
) -> list[MatrixPlan]:
    """q, k and v as one matrix, then the gate; of older files all are in one, key head by key
    head."""
    fused, d = prefix + "ssm_in.weight", spec.head_dim
    if fused in find.gguf.tensors and spec.n_v_head == spec.n_k_head * spec.key_run:
        values = spec.key_run * d
        rows = spec.channels + spec.value_width
        return find.parts(fused, spec.n_k_head, (d, d, values, values), n_embd, rows)
    return [
        find.matrix(prefix + "attn_qkv.weight", spec.channels, n_embd),
        find.matrix(prefix + "attn_gate.weight", spec.value_width, n_embd),
    ]


def _plan_state_factors(
    find: _Finder, spec: DeltaNetSpec, n_embd: int, prefix: str
) -> list[MatrixPlan]:
    """beta and alpha: two matrices, or one with the rows of both for each key head."""
    fused, heads = prefix + "ssm_ba.weight", spec.n_v_head
    if fused in find.gguf.tensors and heads == spec.n_k_head * spec.key_run:
        return find.halves(fused, spec.n_k_head, spec.key_run, n_embd, 2 * heads)
    return [find.matrix(f"{prefix}ssm_{of}.weight", heads, n_embd) for of in ("beta", "alpha")]


def _plan_attention(find: _Finder, spec: AttentionSpec, n_embd: int, prefix: str) -> AttentionPlan:
    qk_norm = spec.has_qk_norm
    gate: MatrixPlan | None = None
    if spec.has_gate:
        qkv, qkv_bias, gate = _plan_gated_qkv(find, spec, n_embd, prefix)
    else:
        qkv, qkv_bias = _plan_qkv(find, spec, n_embd, prefix)
    norms_k = qk_norm and spec.has_kv
    n_q, n_kv = (spec.n_head, spec.n_kv_head) if spec.norms_whole_qk else (1, 1)
    q_norm, k_norm = prefix + "attn_q_norm.weight", prefix + "attn_k_norm.weight"
    return AttentionPlan(
        norm=find.vector(prefix + "attn_norm.weight", n_embd) if spec.has_pre_norm else None,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=find.vector(q_norm, n_q * spec.head_dim) if qk_norm else None,
        k_norm=find.vector(k_norm, n_kv * spec.head_dim) if norms_k else None,
        output=find.matrix(prefix + "attn_output.weight", n_embd, spec.q_rows),
        output_bias=find.optional(prefix + "attn_output.bias", n_embd),
        sinks=find.sinks(prefix + "attn_sinks.weight", spec.n_head) if spec.has_sinks else None,
        post_norm=_post_norm(find, spec, prefix + "post_attention_norm.weight", n_embd),
        gate=gate,
        v_norm=find.ones(spec.head_dim) if spec.has_v_norm and spec.has_kv else None,
    )


def _plan_mla(
    find: _Finder, spec: AttentionSpec, mla: MlaSpec, n_embd: int, prefix: str
) -> MlaPlan:
    heads, n_rot, rank = spec.n_head, spec.rope.n_rot, mla.kv_rank
    q_down: MatrixPlan | None = None
    q_norm: VectorPlan | None = None
    q_name, q_width = prefix + "attn_q.weight", n_embd
    if mla.q_rank:
        q_down = find.matrix(prefix + "attn_q_a.weight", mla.q_rank, n_embd)
        q_norm = find.vector(prefix + "attn_q_a_norm.weight", mla.q_rank)
        q_name, q_width = prefix + "attn_q_b.weight", mla.q_rank
    of_head = mla.nope_dim, n_rot
    queries = find.parts(q_name, heads, of_head, q_width, heads * sum(of_head))
    kv_name = prefix + "attn_kv_a_mqa.weight"
    latent, rotated = find.parts(kv_name, 1, (rank, n_rot), n_embd, rank + n_rot)
    return MlaPlan(
        norm=find.vector(prefix + "attn_norm.weight", n_embd),
        q_down=q_down,
        q_norm=q_norm,
        queries=queries,
        kv=[rotated, latent],
        kv_norm=find.vector(prefix + "attn_kv_a_norm.weight", rank),
        key_bank=find.bank(prefix + "attn_k_b.weight", heads, rank, mla.nope_dim),
        value_bank=find.bank(prefix + "attn_v_b.weight", heads, mla.value_dim, rank),
        output=find.matrix(prefix + "attn_output.weight", n_embd, heads * mla.value_dim),
    )


def _post_norm(
    find: _Finder, spec: AttentionSpec | DenseSpec | MoeSpec, name: str, n_embd: int
) -> VectorPlan | None:
    return find.vector(name, n_embd) if spec.has_post_norm else None


def _refuse_other_experts(gguf: GgufFile, spec: MoeSpec) -> None:
    """Raises for the first tensor of a mixture of experts of another form."""
    others = (*_OTHER_EXPERTS, *([_CHOICE_BIAS] if spec.gating not in WITH_BIAS else []))
    for name, info in gguf.tensors.items():
        for pattern, why, fix in others:
            if pattern.match(name):
                raise unsupported(gguf, name, list(info.shape), why, fix)


def _plan_ffn(
    find: _Finder, spec: FfnSpec, n_embd: int, prefix: str, norm: str
) -> DensePlan | MoePlan | PairedPlan:
    if isinstance(spec, DenseSpec):
        return _plan_dense(find, spec, n_embd, prefix, norm)
    if isinstance(spec, PairedSpec):
        return _plan_paired(find, spec, n_embd, prefix, norm)
    return _plan_moe(find, spec, n_embd, prefix, norm)


def _plan_paired(
    find: _Finder, spec: PairedSpec, n_embd: int, prefix: str, norm: str
) -> PairedPlan:
    """The selector reads the row that is normed, divided by the square root of its width, and
    scaled: these are one norm."""
    selector = prefix + "ffn_gate_inp.scale"
    parts = ((find.use_vector(selector, n_embd), n_embd),)
    experts = _plan_moe(find, spec.experts, n_embd, prefix, "pre_ffw_norm_2.weight")
    return PairedPlan(
        dense=_plan_dense(find, spec.dense, n_embd, prefix, norm, "post_ffw_norm_1.weight"),
        experts=replace(
            experts,
            scales=find.optional(prefix + "ffn_down_exps.scale", spec.experts.n_expert),
            selector_norm=find.add(VectorPlan(selector, parts, factor=1 / math.sqrt(n_embd))),
            post_norm=find.vector(prefix + "post_ffw_norm_2.weight", n_embd),
        ),
        post_norm=find.vector(prefix + "post_ffw_norm.weight", n_embd),
    )


def _plan_moe(find: _Finder, spec: MoeSpec, n_embd: int, prefix: str, norm: str) -> MoePlan:
    n, width = spec.n_expert, spec.n_latent or n_embd  # width: of what experts read

    def latent(name: str, rows: int, cols: int) -> MatrixPlan | None:
        return find.matrix(prefix + name, rows, cols) if spec.n_latent else None

    def bias(role: str, size: int) -> VectorPlan | None:
        return find.bank_vector(f"{prefix}ffn_{role}_exps.bias", n, size) if spec.has_bias else None

    selector = find.float_matrix(prefix + "ffn_gate_inp.weight", n, n_embd)
    gate: MatrixPlan | None = None
    if spec.activation == "relu2":
        up = find.bank(prefix + "ffn_up_exps.weight", n, spec.n_ff, width)
    else:
        gate, up = _plan_gate_up(find, spec, n_embd, prefix)
    return MoePlan(
        norm=find.vector(prefix + norm, n_embd),
        selector=selector,
        gate=gate,
        up=up,
        down=find.bank(prefix + "ffn_down_exps.weight", n, width, spec.n_ff),
        selector_bias=find.vector(prefix + "ffn_gate_inp.bias", n) if spec.has_bias else None,
        gate_bias=bias("gate", spec.n_ff),
        up_bias=bias("up", spec.n_ff),
        down_bias=bias("down", width),
        shared=_plan_shared(find, spec, n_embd, prefix) if spec.n_ff_shared else None,
        choice_bias=_plan_choice_bias(find, spec, prefix),
        post_norm=_post_norm(find, spec, prefix + "post_ffw_norm.weight", n_embd),
        latent_down=latent("ffn_latent_down.weight", width, n_embd),
        latent_up=latent("ffn_latent_up.weight", n_embd, width),
    )


def _plan_choice_bias(find: _Finder, spec: MoeSpec, prefix: str) -> VectorPlan | None:
    """What is added to what experts are chosen by; older files have another name for it."""
    if spec.gating not in WITH_BIAS:
        return None
    bias = find.optional(prefix + "exp_probs_b.bias", spec.n_expert)
    return bias or find.optional(prefix + "exp_probs_b", spec.n_expert)


def _plan_gate_up(find: _Finder, spec: MoeSpec, n_embd: int, prefix: str) -> list[MatrixPlan]:
    """The gate and up banks: two tensors, or one with the rows of both for each expert."""
    n, n_ff = spec.n_expert, spec.n_ff
    fused = prefix + "ffn_gate_up_exps.weight"
    if fused in find.gguf.tensors and not spec.has_bias:
        return find.halves(fused, n, n_ff, n_embd, 2 * n_ff, n)
    return [find.bank(f"{prefix}ffn_{of}_exps.weight", n, n_ff, n_embd) for of in ("gate", "up")]


def _plan_shared(find: _Finder, spec: MoeSpec, n_embd: int, prefix: str) -> SharedRoles[MatrixPlan]:
    name, n_ff = prefix + "ffn_gate_inp_shexp.weight", spec.n_ff_shared
    gate, up = _plan_gate_and_up(find, spec.activation, n_ff, n_embd, prefix, "_shexp")
    return SharedRoles(
        selector=find.float_row(name, n_embd) if spec.has_shared_weight else None,
        gate=gate,
        up=up,
        down=find.matrix(prefix + "ffn_down_shexp.weight", n_embd, n_ff),
    )


def _plan_dense(
    find: _Finder,
    spec: DenseSpec,
    n_embd: int,
    prefix: str,
    norm: str,
    post_norm: str = "post_ffw_norm.weight",
) -> DensePlan:
    gate, up = _plan_gate_and_up(find, spec.activation, spec.n_ff, n_embd, prefix)
    return DensePlan(
        norm=find.vector(prefix + norm, n_embd) if spec.has_pre_norm else None,
        gate=gate,
        up=up,
        down=find.matrix(prefix + "ffn_down.weight", n_embd, spec.n_ff),
        gate_bias=gate and find.optional(prefix + "ffn_gate.bias", spec.n_ff),
        up_bias=find.optional(prefix + "ffn_up.bias", spec.n_ff),
        down_bias=find.optional(prefix + "ffn_down.bias", n_embd),
        post_norm=_post_norm(find, spec, prefix + post_norm, n_embd),
    )


def _plan_gate_and_up(
    find: _Finder, activation: str, n_ff: int, n_embd: int, prefix: str, ending: str = ""
) -> tuple[MatrixPlan | None, MatrixPlan]:
    """The gate and up matrices: two tensors, or one with the rows of both; relu2 has no gate."""
    gate_name, up_name = f"{prefix}ffn_gate{ending}.weight", f"{prefix}ffn_up{ending}.weight"
    found = find.gguf.tensors.get(up_name)
    is_apart = found is None or found.shape == (n_embd, n_ff)
    if activation == "relu2":
        return None, find.matrix(up_name, n_ff, n_embd)
    if is_apart or gate_name in find.gguf.tensors:
        return find.matrix(gate_name, n_ff, n_embd), find.matrix(up_name, n_ff, n_embd)
    gate, up = find.halves(up_name, 1, n_ff, n_embd, 2 * n_ff)
    return gate, up


def _plan_qkv(
    find: _Finder, spec: AttentionSpec, n_embd: int, prefix: str
) -> tuple[list[MatrixPlan], list[VectorPlan | None]]:
    """q, k and v as three matrices, or as the fused one; biases in the same arrangement. A layer
    without K and V of its own has q.

    A fused bias for separate matrices does not occur; separate biases for a fused matrix do.
    """
    if spec.has_v_norm:
        return _plan_plain_qkv(find, spec, n_embd, prefix)
    sizes = (spec.q_rows, spec.kv_rows, spec.kv_rows)
    fused = prefix + "attn_qkv"
    if fused + ".weight" not in find.gguf.tensors:
        stems = [prefix + "attn_" + letter for letter in "qkv"]
        pairs = list(zip(stems, sizes, strict=True))
        return (
            [find.matrix(stem + ".weight", rows, n_embd) for stem, rows in pairs],
            [find.optional(stem + ".bias", rows) for stem, rows in pairs],
        )
    matrix = find.matrix(fused + ".weight", sum(sizes), n_embd)
    bias = find.optional(fused + ".bias", sum(sizes))
    biases = [f"{prefix}attn_{letter}.bias" for letter in "qkv"]
    if bias is None and any(name in find.gguf.tensors for name in biases):
        parts = [
            (find.use_vector(name, rows) if name in find.gguf.tensors else None, rows)
            for name, rows in zip(biases, sizes, strict=True)
        ]
        bias = find.add(VectorPlan(fused + ".bias", tuple(parts)))
    return [matrix], [bias]


def _plan_plain_qkv(
    find: _Finder, spec: AttentionSpec, n_embd: int, prefix: str
) -> tuple[list[MatrixPlan], list[VectorPlan | None]]:
    """q, k and v without biases; without a matrix of v, v is made as k."""
    qkv = [find.matrix(prefix + "attn_q.weight", spec.q_rows, n_embd)]
    if spec.has_kv:
        qkv.append(find.matrix(prefix + "attn_k.weight", spec.kv_rows, n_embd))
        v = prefix + "attn_v.weight"
        has_v = v in find.gguf.tensors
        qkv.append(find.matrix(v, spec.kv_rows, n_embd) if has_v else qkv[1])
    else:  # files may have what nothing reads
        for letter in "kv":
            find.leave_out(f"{prefix}attn_{letter}.weight", n_embd, spec.kv_rows)
        find.leave_out(prefix + "attn_k_norm.weight", spec.head_dim)
    return qkv, [None] * len(qkv)


def _plan_gated_qkv(
    find: _Finder, spec: AttentionSpec, n_embd: int, prefix: str
) -> tuple[list[MatrixPlan], list[VectorPlan | None], MatrixPlan]:
    """q, k and v, and the gate, which has a tensor of its own, or rows in that of q, head by head
    behind those of q."""
    heads, width = spec.n_head, spec.head_dim
    if spec.gates_heads or prefix + "attn_gate.weight" in find.gguf.tensors:
        gate = find.matrix(prefix + "attn_gate.weight", spec.gate_rows, n_embd)
        return *_plan_qkv(find, spec, n_embd, prefix), gate
    q, gate = find.halves(prefix + "attn_q.weight", heads, width, n_embd, 2 * heads * width)
    k, v = [find.matrix(f"{prefix}attn_{letter}.weight", spec.kv_rows, n_embd) for letter in "kv"]
    biases = [find.optional(f"{prefix}attn_{letter}.bias", spec.kv_rows) for letter in "kv"]
    return [q, k, v], [None, *biases], gate


def _whole(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of 1 at its end, which llama-quantize leaves out."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class _Finder:
    """Looks tensors up by name, checks them, and remembers which ones had a role."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.matrices: list[MatrixPlan] = []
        self.vectors: list[VectorPlan] = []
        self._used: set[str] = set()

    def matrix(self, name: str, rows: int, cols: int) -> MatrixPlan:
        return self._matrix(self._info(name, (cols, rows)), rows, cols)

    def float_matrix(self, name: str, rows: int, cols: int) -> MatrixPlan:
        return self._matrix(self._info(name, (cols, rows)), rows, cols, FLOAT_TYPES)

    def float_row(self, name: str, cols: int) -> MatrixPlan:
        """A matrix of one row, which the file has as a vector."""
        return self._matrix(self._info(name, (cols,)), 1, cols, FLOAT_TYPES)

    def halves(self, name: str, n_run: int, run_rows: int, *dims: int) -> list[MatrixPlan]:
        """Two matrices of n_run * run_rows rows each, whose runs of rows alternate in one tensor of
        the shape `dims`."""
        return self.parts(name, n_run, (run_rows, run_rows), *dims)

    def parts(self, name: str, n_run: int, sizes: tuple[int, ...], *dims: int) -> list[MatrixPlan]:
        """Matrices whose rows alternate in one tensor of the shape `dims`, `sizes` rows of each in
        turn, n_run times."""
        info = self._info(name, dims)
        if info.type.name not in MATRIX_KINDS:
            raise self._wrong_type(info, tuple(MATRIX_KINDS))
        kind, plans, first = MATRIX_KINDS[info.type.name], list[MatrixPlan](), 0
        for index, size in enumerate(sizes):
            rows = EveryRows(first, size, sum(sizes))
            plans.append(MatrixPlan(f"{name}.{index}", kind, n_run * size, dims[0], name, rows))
            first += size
        self.matrices += plans
        return plans

    def bank(self, name: str, n_expert: int, rows: int, cols: int) -> MatrixPlan:
        """The matrices of (rows, cols) of all experts, one below the other."""
        return self._matrix(self._info(name, (cols, rows, n_expert)), n_expert * rows, cols)

    def vector(self, name: str, size: int) -> VectorPlan:
        return self.add(VectorPlan(name, ((self.use_vector(name, size), size),)))

    def table(self, name: str, *shape: int) -> VectorPlan:
        """A vector that the file has as a tensor of two dimensions."""
        return self.add(VectorPlan(name, ((self.use_vector(name, *shape), math.prod(shape)),)))

    def leave_out(self, name: str, *shape: int) -> None:
        """A tensor of this shape that the file may have, and that nothing reads."""
        if name in self.gguf.tensors:
            self._info(name, shape)

    def ones(self, size: int) -> VectorPlan:
        """Ones, the same for all who ask for so many."""
        name = f"ones {size}"
        found = next((plan for plan in self.vectors if plan.name == name), None)
        return found or self.add(VectorPlan(name, ((None, size),), absent=1.0))

    def sinks(self, name: str, n_head: int) -> SinksPlan:
        plan = SinksPlan(name, ((self.use_vector(name, n_head), n_head),))
        self.vectors.append(plan)
        return plan

    def bank_vector(self, name: str, n_expert: int, size: int) -> VectorPlan:
        """The vectors of all experts, one after the other."""
        return self.add(
            VectorPlan(name, ((self.use_vector(name, size, n_expert), n_expert * size),))
        )

    def optional(self, name: str, size: int) -> VectorPlan | None:
        return self.vector(name, size) if name in self.gguf.tensors else None

    def add(self, plan: VectorPlan) -> VectorPlan:
        self.vectors.append(plan)
        return plan

    def use_vector(self, name: str, *shape: int) -> str:
        info = self._info(name, shape)
        if info.type.name not in FLOAT_TYPES:
            raise self._wrong_type(info, FLOAT_TYPES)
        return name

    def refuse_unused(self, skipped: range) -> None:
        """Raises for a tensor without a role; those of blocks in `skipped` need none."""
        for name in self.gguf.tensors:
            block = _BLOCK.match(name)
            is_skipped = block is not None and int(block[1]) in skipped
            if name not in self._used and not is_skipped and not _IGNORED.match(name):
                raise errors.TENSOR_UNUSED(tensor=name, file=self.gguf.path.name)

    def _matrix(
        self, info: TensorInfo, rows: int, cols: int, types: tuple[str, ...] = tuple(MATRIX_KINDS)
    ) -> MatrixPlan:
        if info.type.name not in types:
            raise self._wrong_type(info, types)
        plan = MatrixPlan(info.name, MATRIX_KINDS[info.type.name], rows, cols)
        self.matrices.append(plan)
        return plan

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self.gguf.tensors.get(name)
        if info is None:
            raise errors.TENSOR_MISSING(file=self.gguf.path.name, tensor=name, shape=list(shape))
        if _whole(info.shape) != _whole(shape):
            raise errors.TENSOR_WRONG_SHAPE(
                tensor=name, file=self.gguf.path.name, shape=list(info.shape), wanted=list(shape)
            )
        self._used.add(name)
        return info

    def _wrong_type(self, info: TensorInfo, wanted: tuple[str, ...]) -> BatchEngineError:
        return errors.TENSOR_WRONG_TYPE(
            tensor=info.name,
            file=self.gguf.path.name,
            found=info.type.name,
            wanted=", ".join(wanted),
        )
