"""Shapes of random models, by name, and their tensors before numbers are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from bench.models.tensors import CODEBOOK_KINDS


@dataclass(frozen=True)
class Shape:
    """A model to write. `kinds` overrides the tensor type of a role ("attn_k", "output" ...); the
    banks of experts have the roles of dense layers ("ffn_down"), the selector is "ffn_gate_inp".

    more_bits: types of a role in the layers that llama-quantize gives more bits in Q4_K_M. A role
    whose rows are no whole superblocks of 256 falls back to a type of 32, as there.
    bias: standard deviation of q and v biases (0 = none), k_bias likewise for K; k_outlier: the
    large K bias of qwen2 in the slowest RoPE pair of each head, which softmax nearly cancels but
    which dominates the scale of its block of int8 KV. rope_factors: llama 3 scaling baked as a
    tensor; of phi3 those of LongRoPE, for more positions than yarn_trained. linear_factor:
    rope.scaling.factor (0 = key absent), yarn_factor likewise of YaRN, whose original context is
    yarn_trained. temperature: that of attention (mistral3). fused: one attn_qkv per layer;
    fused_up: one matrix of gate and up; fused_inputs: one ssm_in of a recurrent layer, as older
    files of qwen3next have.
    n_expert (0 = dense), n_used: experts of n_ff values each, of which a token uses some.
    selector_gain: standard deviation of the selector's logits. It gives the last of the chosen
    experts a small weight, so that rounding which chooses another one there changes little.
    window: attention.sliding_window, of architectures that have one; with sinks and biases of the
    attention's output and of experts, where there are such, `bias` is their deviation, too.
    n_rot: dimensions of a head that RoPE rotates, 0 = all. n_k_head, n_v_head, state_dim: heads of
    recurrent layers, of architectures that have some; full_every: of so many layers the last one
    has attention there, 0 = as the architecture has it. n_mtp: blocks behind the model's own that
    predict further tokens. n_ff_shared: width of the expert that every token uses.
    n_dense: layers in front that have no experts, of n_ff_dense values. qk_norm: norms of Q and K
    heads, of architectures that may have them. choice_bias: deviation of what is added to what
    experts are chosen by, weights_norm and weights_scale: expert_weights_norm and
    expert_weights_scale, of architectures with sigmoids.
    Of gemma4: window_kv and window_dim: KV heads of layers with a window and their width, 0 = as of
    the others; full_every: of so many layers the last one has no window; n_shared: the last layers,
    which read K and V of others; v_from_k: layers without a window have no matrix of V;
    n_embd_layer: width of each layer's own embeddings; layer_scale: layers have a scale; logit_cap:
    the soft bound of logits; n_ff_expert: width of experts, n_ff is that of the part beside them.
    Of step35: three of four layers have a window, with window_heads query heads, 0 = as the others,
    and window_kv KV heads; limits: swiglu_clamp_exp and swiglu_clamp_shexp of each second layer,
    0 = of none; window_base: rope.freq_base_swa.
    Of glm4: sections: pairs that turn with each axis of an image.
    Of granite, nemotron_h, lfm2 and their kin: pattern: a letter for each block: "*" has attention,
    "-" and "E" are feed-forward parts of nemotron_h, others are recurrent. scales: of embeddings,
    of what parts of layers add, of logits and of attention; empty = none. n_k_head groups of
    n_v_head heads of value_dim values have states of state_dim values each. n_latent: width of the
    projection that experts of nemotron_h_moe read.
    Of deepseek2, whose head_dim is kv_rank + n_rot: q_rank, kv_rank: widths of what queries, and K
    and V, are made of; q_rank 0: of the row itself. nope_dim: values of a head of q that are not
    rotated, value_dim: those of its output. gating: of experts, "softmax" or "sigmoid"; n_group,
    n_group_used: expert_group_count and expert_group_used_count.
    """

    arch: str = "qwen3"
    n_layer: int = 2
    n_embd: int = 256
    n_ff: int = 512
    n_expert: int = 0
    n_used: int = 0
    n_head: int = 4
    n_kv_head: int = 2
    head_dim: int = 64
    n_vocab: int = 320
    context: int = 32768
    tied: bool = True
    base: str = "q4_0"
    kinds: Mapping[str, str] = field(default_factory=dict)
    more_bits: Mapping[str, str] = field(default_factory=dict)
    bias: float = 0.0
    k_bias: float = 0.0
    k_outlier: float = 0.0
    rope_base: float = 10000.0
    rope_factors: bool = False
    linear_factor: float = 0.0
    yarn_factor: float = 0.0
    yarn_trained: int = 64
    temperature: float = 0.0
    window: int = 0
    fused: bool = False
    fused_up: bool = False
    fused_inputs: bool = False
    seed: int = 1
    n_rot: int = 0
    n_k_head: int = 0
    n_v_head: int = 0
    state_dim: int = 128
    conv_kernel: int = 4
    full_every: int = 0
    n_mtp: int = 0
    n_ff_shared: int = 0
    n_dense: int = 0
    n_ff_dense: int = 0
    qk_norm: bool = False
    choice_bias: float = 0.0
    weights_norm: bool = True
    weights_scale: float = 1.0
    head_gain: float = 4.0
    selector_gain: float = 3.0
    window_kv: int = 0
    window_heads: int = 0
    window_base: float = 0.0
    limits: tuple[float, float] = (0.0, 0.0)
    window_dim: int = 0
    n_shared: int = 0
    v_from_k: bool = False
    n_embd_layer: int = 0
    layer_scale: bool = False
    logit_cap: float = 0.0
    n_ff_expert: int = 0
    sections: tuple[int, ...] = ()
    pattern: str = ""
    scales: tuple[float, ...] = ()
    value_dim: int = 64
    n_latent: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    nope_dim: int = 0
    gating: str = "sigmoid"
    n_group: int = 0
    n_group_used: int = 0


_Q4_K_M = {"attn_v": "q6_k", "ffn_down": "q6_k"}
_MXFP4 = {"ffn_gate": "mxfp4", "ffn_up": "mxfp4", "ffn_down": "mxfp4", "output": "q8_0"}
PRESETS = {
    "0.6b": Shape(
        n_layer=28, n_embd=1024, n_ff=3072, n_head=16, n_kv_head=8, head_dim=128,
        n_vocab=151936, rope_base=1e6, context=40960,
    ),
    "0.1b": Shape(
        n_layer=8, n_embd=768, n_ff=2048, n_head=12, n_kv_head=4, head_dim=64, n_vocab=32000
    ),
    "8b": Shape(
        n_layer=32, n_embd=4096, n_ff=14336, n_head=32, n_kv_head=8, head_dim=128,
        n_vocab=128256, rope_base=5e5, context=131072, tied=False,
    ),
    "27b": Shape(
        n_layer=62, n_embd=5376, n_ff=21504, n_head=32, n_kv_head=16, head_dim=128,
        n_vocab=151936, rope_base=1e6, context=131072,
    ),
    "30b-a3b": Shape(
        arch="qwen3moe", n_layer=48, n_embd=2048, n_ff=768, n_expert=128, n_used=8, n_head=32,
        n_kv_head=4, head_dim=128, n_vocab=151936, rope_base=1e6, context=40960, tied=False,
    ),
    "moe-tiny": Shape(
        arch="qwen3moe", n_layer=3, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_head=4,
        n_kv_head=2, head_dim=32, tied=False,
    ),
    "gpt-oss-20b": Shape(
        arch="gpt-oss", n_layer=24, n_embd=2880, n_ff=2880, n_expert=32, n_used=4, n_head=64,
        n_kv_head=8, head_dim=64, n_vocab=201088, rope_base=150000.0, context=131072, tied=False,
        base="q8_0", kinds=_MXFP4, bias=0.1, k_bias=0.1, yarn_factor=32.0, yarn_trained=4096,
        window=128,
    ),
    "gpt-oss-tiny": Shape(
        arch="gpt-oss", n_layer=4, n_embd=96, n_ff=96, n_expert=10, n_used=3, n_head=4,
        n_kv_head=2, head_dim=32, tied=False, base="q8_0", kinds=_MXFP4, bias=0.3, k_bias=0.3,
        rope_base=150000.0, yarn_factor=32.0, window=40,
    ),
    "gemma3-4b": Shape(
        arch="gemma3", n_layer=34, n_embd=2560, n_ff=10240, n_head=8, n_kv_head=4, head_dim=256,
        n_vocab=262208, rope_base=1e6, linear_factor=8.0, context=131072, window=1024,
    ),
    "gemma3-tiny": Shape(
        arch="gemma3", n_layer=7, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32,
        rope_base=1e6, linear_factor=8.0, window=40, head_gain=0.5,
    ),
    "gemma4-31b": Shape(
        arch="gemma4", n_layer=60, n_embd=5376, n_ff=21504, n_head=32, n_kv_head=4, head_dim=512,
        window_kv=16, window_dim=256, v_from_k=True, n_vocab=262144, rope_base=1e6, context=131072,
        window=1024, layer_scale=True, logit_cap=30.0,
    ),
    "gemma4-tiny": Shape(  # all that models of Gemma 4 have, in one
        arch="gemma4", n_layer=8, n_embd=128, n_ff=96, n_expert=10, n_used=3, n_ff_expert=64,
        n_head=4, n_kv_head=1, head_dim=64, window_kv=2, window_dim=32, v_from_k=True, n_shared=2,
        full_every=3, n_embd_layer=32, rope_base=1e6, window=40, layer_scale=True, logit_cap=30.0,
        head_gain=0.5,
    ),
    "qwen35-27b": Shape(
        arch="qwen35", n_layer=64, n_embd=5120, n_ff=17408, n_head=24, n_kv_head=4, head_dim=256,
        n_rot=64, n_k_head=16, n_v_head=48, n_vocab=248320, rope_base=1e7, context=262144,
        tied=False,
    ),
    "qwen35moe-35b-a3b": Shape(
        arch="qwen35moe", n_layer=40, n_embd=2048, n_ff=512, n_expert=256, n_used=8,
        n_ff_shared=512, n_head=16, n_kv_head=2, head_dim=256, n_rot=64, n_k_head=16, n_v_head=32,
        n_vocab=248320, rope_base=1e7, context=262144, tied=False,
    ),
    "qwen35-tiny": Shape(
        arch="qwen35", n_layer=8, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=64,
        n_rot=32, n_k_head=1, n_v_head=2, tied=False, n_mtp=1,
    ),
    "qwen35moe-tiny": Shape(
        arch="qwen35moe", n_layer=5, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_ff_shared=96,
        n_head=4, n_kv_head=2, head_dim=32, n_rot=16, n_k_head=1, n_v_head=2, tied=False,
        full_every=2,
    ),
    "qwen3next-80b-a3b": Shape(
        arch="qwen3next", n_layer=48, n_embd=2048, n_ff=512, n_expert=512, n_used=10,
        n_ff_shared=512, n_head=16, n_kv_head=2, head_dim=256, n_rot=64, n_k_head=16, n_v_head=32,
        n_vocab=151936, rope_base=1e7, context=262144, tied=False,
    ),
    "qwen3next-tiny": Shape(
        arch="qwen3next", n_layer=5, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_ff_shared=96,
        n_head=4, n_kv_head=2, head_dim=32, n_rot=16, n_k_head=2, n_v_head=4, state_dim=64,
        tied=False, full_every=2,
    ),
    "minimax-m2-230b-a10b": Shape(
        arch="minimax-m2", n_layer=62, n_embd=3072, n_ff=1536, n_ff_dense=1536, n_expert=256,
        n_used=8, n_head=48, n_kv_head=8, head_dim=128, n_rot=64, n_vocab=200064, rope_base=5e6,
        context=196608, tied=False, choice_bias=0.1,
    ),
    "minimax-m2-tiny": Shape(
        arch="minimax-m2", n_layer=3, n_embd=96, n_ff=64, n_ff_dense=64, n_expert=10, n_used=3,
        n_head=4, n_kv_head=2, head_dim=32, n_rot=16, tied=False, choice_bias=0.2,
    ),
    "glm4-9b": Shape(
        arch="glm4", n_layer=40, n_embd=4096, n_ff=13696, n_head=32, n_kv_head=2, head_dim=128,
        n_rot=64, n_vocab=151552, context=32768, tied=False, bias=0.1, k_bias=0.1, fused_up=True,
    ),
    "glm4-tiny": Shape(
        arch="glm4", n_layer=3, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32, n_rot=16,
        tied=False, bias=0.3, k_bias=0.3, fused_up=True,
    ),
    "phi3-14b": Shape(
        arch="phi3", n_layer=40, n_embd=5120, n_ff=17920, n_head=40, n_kv_head=10, head_dim=128,
        n_vocab=100352, rope_base=250000.0, context=16384, tied=False, fused=True, fused_up=True,
    ),
    "phi3-tiny": Shape(
        arch="phi3", n_layer=2, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32, n_rot=24,
        tied=False, fused=True, fused_up=True, rope_factors=True,
    ),
    "glm4moe-106b-a12b": Shape(
        arch="glm4moe", n_layer=46, n_embd=4096, n_ff=1408, n_expert=128, n_used=8,
        n_ff_shared=1408, n_dense=1, n_ff_dense=10944, n_head=96, n_kv_head=8, head_dim=128,
        n_rot=64, n_vocab=151552, rope_base=1e6, context=131072, tied=False, bias=0.1, k_bias=0.1,
        choice_bias=0.1,
    ),
    "glm4moe-tiny": Shape(
        arch="glm4moe", n_layer=4, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_ff_shared=64,
        n_dense=1, n_ff_dense=96, n_head=4, n_kv_head=2, head_dim=32, n_rot=16, tied=False,
        bias=0.3, k_bias=0.3, choice_bias=0.2, weights_scale=2.5, qk_norm=True, n_mtp=1,
    ),
    "glm47-flash": Shape(
        arch="deepseek2", n_layer=47, n_embd=2048, n_ff=1536, n_expert=64, n_used=4,
        n_ff_shared=1536, n_dense=1, n_ff_dense=10240, n_head=20, n_kv_head=1, head_dim=576,
        n_rot=64, q_rank=768, kv_rank=512, nope_dim=192, value_dim=256, n_vocab=154880,
        rope_base=1e6, context=202752, tied=False, choice_bias=0.1, weights_scale=1.8,
    ),
    "olmo2-tiny": Shape(
        arch="olmo2", n_layer=5, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32,
        tied=False, window=40, rope_base=5e5, yarn_factor=4.0,
    ),
    "afmoe-tiny": Shape(
        arch="afmoe", n_layer=4, n_embd=128, n_ff=64, n_expert=10, n_used=3, n_ff_shared=64,
        n_dense=1, n_ff_dense=96, n_head=4, n_kv_head=2, head_dim=32, tied=False, window=40,
        choice_bias=0.2, weights_scale=2.5, head_gain=1.0,
    ),
    "step35-tiny": Shape(
        arch="step35", n_layer=5, n_embd=128, n_ff=64, n_expert=10, n_used=3, n_ff_shared=96,
        n_dense=2, n_ff_dense=96, n_head=2, n_kv_head=1, window_heads=6, window_kv=2, head_dim=32,
        rope_base=5e6, window_base=1e4, rope_factors=True, tied=False, window=40, qk_norm=True,
        choice_bias=0.2, weights_scale=2.5, limits=(0.4, 0.3), n_mtp=1,
    ),
    "bailingmoe2-tiny": Shape(
        arch="bailingmoe2", n_layer=3, n_embd=128, n_ff=64, n_expert=12, n_used=3, n_ff_shared=64,
        n_dense=1, n_ff_dense=96, n_head=4, n_kv_head=2, head_dim=32, n_rot=16, tied=False,
        fused=True, choice_bias=0.2, weights_scale=2.5, n_group=4, n_group_used=2,
    ),
    "deepseek2-tiny": Shape(
        arch="deepseek2", n_layer=4, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_ff_shared=64,
        n_dense=1, n_ff_dense=96, n_head=3, n_kv_head=1, head_dim=160, n_rot=32, q_rank=64,
        kv_rank=128, nope_dim=64, value_dim=32, tied=False, choice_bias=0.2, weights_scale=1.8,
        yarn_factor=4.0,
    ),
    "granite-tiny": Shape(
        arch="granite", n_layer=3, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32,
        scales=(12.0, 0.22, 8.0, 0.0625),
    ),
    "granite4-7b-a1b": Shape(
        arch="granitehybrid", n_layer=40, n_embd=1536, n_ff=512, n_expert=64, n_used=6,
        n_ff_shared=1024, n_head=12, n_kv_head=4, head_dim=128, n_k_head=1, n_v_head=48,
        n_vocab=100352, context=131072, pattern=4 * "MMMMM*MMMM",
        scales=(12.0, 0.22, 6.0, 0.0078125),
    ),
    "granitehybrid-tiny": Shape(
        arch="granitehybrid", n_layer=4, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_ff_shared=96,
        n_head=4, n_kv_head=2, head_dim=32, n_k_head=2, n_v_head=4, value_dim=48, state_dim=64,
        pattern="MM*M", scales=(12.0, 0.22, 6.0, 0.0625),
    ),
    "granitemoe-tiny": Shape(
        arch="granitemoe", n_layer=3, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_head=4,
        n_kv_head=2, head_dim=32, tied=False, scales=(12.0, 0.22, 6.0, 0.0625),
    ),
    "nemotron3-30b-a3b": Shape(
        arch="nemotron_h_moe", n_layer=52, n_embd=2688, n_ff=1856, n_expert=128, n_used=6,
        n_ff_shared=3712, n_head=32, n_kv_head=2, head_dim=128, n_k_head=8, n_v_head=64,
        n_vocab=131072, context=262144, tied=False, choice_bias=0.1, weights_scale=2.5,
        pattern="MEMEM*" + 4 * "EMEMEM*" + "EMEMEMEM*EMEMEMEME",
    ),
    "nemotron_h-tiny": Shape(
        arch="nemotron_h", n_layer=7, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32,
        n_k_head=1, n_v_head=5, value_dim=32, state_dim=32, tied=False, pattern="M-M*-M-",
    ),
    "nemotron_h_moe-tiny": Shape(
        arch="nemotron_h_moe", n_layer=7, n_embd=96, n_ff=64, n_expert=10, n_used=3,
        n_ff_shared=96, n_head=4, n_kv_head=2, head_dim=32, n_k_head=2, n_v_head=6, value_dim=80,
        state_dim=96, tied=False, choice_bias=0.2, weights_scale=2.5, pattern="MEM*EME",
    ),
    "lfm2-8b-a1b": Shape(
        arch="lfm2moe", n_layer=24, n_embd=2048, n_ff=1792, n_expert=32, n_used=4, n_dense=2,
        n_ff_dense=7168, n_head=32, n_kv_head=8, head_dim=64, conv_kernel=3, n_vocab=65536,
        rope_base=1e6, context=128000, choice_bias=0.1, pattern="CC*CCC*CCC*CCC*CCC*CC*CC",
    ),
    "lfm2-1.2b": Shape(
        arch="lfm2", n_layer=16, n_embd=2048, n_ff=8192, n_head=32, n_kv_head=8, head_dim=64,
        conv_kernel=3, n_vocab=65536, rope_base=1e6, context=128000, pattern="CC*CC*CC*C*C*C*C",
    ),
    "lfm2-tiny": Shape(
        arch="lfm2", n_layer=5, n_embd=128, n_ff=96, n_head=4, n_kv_head=2, head_dim=32,
        conv_kernel=3, pattern="CC*C*",
    ),
    "lfm2moe-tiny": Shape(
        arch="lfm2moe", n_layer=4, n_embd=96, n_ff=64, n_expert=10, n_used=3, n_dense=1,
        n_ff_dense=128, n_head=3, n_kv_head=1, head_dim=32, conv_kernel=3, choice_bias=0.2,
        pattern="C*CC",
    ),
    "small": Shape(),
    "tiny": Shape(n_layer=1, n_ff=256),
}  # fmt: skip
# The mix of Q4_K_M: Q4_K and Q6_K, in the small one also the types for rows of 2,080.
PRESETS["0.6b-q4_k_m"] = replace(PRESETS["0.6b"], base="q4_k", more_bits=_Q4_K_M)
PRESETS["0.1b-q4_k_m"] = replace(PRESETS["0.1b"], base="q4_k", more_bits=_Q4_K_M, n_ff=2080)
PRESETS["30b-a3b-q4_k_m"] = replace(PRESETS["30b-a3b"], base="q4_k", more_bits=_Q4_K_M)
# Six of its layers, 1.8 GiB.
PRESETS["glm47-small"] = replace(PRESETS["glm47-flash"], n_layer=6, n_vocab=32000)
# Thirteen of its blocks, 3.8 GiB.
PRESETS["nemotron3-small"] = replace(
    PRESETS["nemotron3-30b-a3b"], n_layer=13, pattern="MEMEM*EMEMEM*", n_vocab=32000
)
# Four layers of the same: 1.3 GiB.
for _kind in ("", "-q4_k_m"):
    PRESETS["moe-small" + _kind] = replace(PRESETS["30b-a3b" + _kind], n_layer=4, n_vocab=32000)

TYPES = {
    name: gguf.GGMLQuantizationType[name.upper()]
    for name in (
        "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "q4_k", "q5_k",
        "q6_k", "mxfp4", "iq4_xs", "q3_k", "q2_k", *CODEBOOK_KINDS,
    )
}  # fmt: skip


class RandomTensor(NamedTuple):
    """A tensor of a model before its numbers are drawn; dims as the writer takes them."""

    name: str
    kind: str
    dims: tuple[int, ...]
    draw: Callable[[np.random.Generator], npt.NDArray[Any]]

    def __call__(self, rng: np.random.Generator) -> npt.NDArray[Any]:
        """The numbers, or the bytes of blocks: the last of the dimensions is another one then."""
        return self.draw(rng).reshape(*self.dims[:-1], -1)

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        items, n_bytes = gguf.GGML_QUANT_SIZES[TYPES[self.kind]]
        return math.prod(self.dims) // items * n_bytes
