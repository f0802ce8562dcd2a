"""The shapes of models whose logits are compared with llama.cpp's."""

from __future__ import annotations

from dataclasses import replace

from bench.models.synthetic import Shape

LLAMA = Shape(arch="llama", n_embd=256, n_ff=512, n_head=4, n_kv_head=2, head_dim=64)
QWEN2 = replace(LLAMA, arch="qwen2", bias=0.3, k_bias=0.3, rope_base=1e6)
QWEN3 = replace(LLAMA, arch="qwen3", rope_base=1e6)
QWEN3MOE = replace(
    QWEN3, arch="qwen3moe", n_ff=128, n_expert=16, n_used=4, tied=False, kinds={"token_embd": "f32"}
)
BANKS = ("ffn_gate", "ffn_up", "ffn_down")
GPT_OSS = replace(
    QWEN3MOE, arch="gpt-oss", n_layer=3, n_embd=288, n_ff=160, bias=0.3, k_bias=0.3, window=40,
    yarn_factor=32.0, yarn_trained=50, rope_base=150000.0, n_head=8,
)  # fmt: skip
GEMMA3 = replace(
    LLAMA, arch="gemma3", n_layer=7, window=40, rope_base=1e6, linear_factor=8.0, head_dim=128,
    head_gain=0.5,  # else a token's own embedding is nearly all of its last row
)  # fmt: skip
GEMMA4 = replace(
    GEMMA3, arch="gemma4", linear_factor=0.0, head_dim=256, n_kv_head=1, window_dim=128,
    window_kv=2, layer_scale=True, logit_cap=30.0, v_from_k=True,
)  # fmt: skip
GEMMA4_LAYERS = replace(
    GEMMA4, v_from_k=False, n_embd_layer=64, n_shared=3, full_every=3, n_layer=9
)
GEMMA4_EXPERTS = replace(
    GEMMA4, n_expert=16, n_used=4, n_ff=96, n_ff_expert=128, kinds={"token_embd": "f32"}
)
QWEN35 = replace(
    QWEN3, arch="qwen35", n_layer=4, head_dim=128, n_rot=64, rope_base=1e7, n_k_head=2, n_v_head=4,
    tied=False,
)  # fmt: skip
QWEN35MOE = replace(
    QWEN35, arch="qwen35moe", n_ff=128, n_expert=16, n_used=4, n_ff_shared=96,
    kinds={"token_embd": "f32"},
)  # fmt: skip
GLM4MOE = replace(
    QWEN3MOE, arch="glm4moe", n_layer=4, head_dim=128, n_rot=64, bias=0.3, k_bias=0.3,
    n_ff_shared=128, n_dense=1, n_ff_dense=320, choice_bias=0.3, weights_scale=2.5, qk_norm=True,
)  # fmt: skip
QWEN3NEXT = replace(QWEN35MOE, arch="qwen3next", n_v_head=6)
MINIMAX = replace(
    QWEN3MOE, arch="minimax-m2", head_dim=128, n_rot=64, choice_bias=0.3, n_ff_dense=128
)
GLM4 = replace(
    LLAMA, arch="glm4", n_rot=32, bias=0.3, k_bias=0.3, fused_up=True, tied=False, n_layer=3,
    head_gain=1.0,
)  # fmt: skip
PHI3 = replace(LLAMA, arch="phi3", fused=True, fused_up=True, rope_base=250000.0, tied=False)
GRANITE = replace(LLAMA, arch="granite", scales=(12.0, 0.22, 8.0, 0.03125))
GRANITE_EXPERTS = replace(
    GRANITE, arch="granitemoe", n_ff=128, n_expert=16, n_used=4, n_ff_shared=96, tied=False,
    kinds={"token_embd": "f32"},
)  # fmt: skip
GRANITE_SWA = replace(GRANITE, arch="granite_swa", n_layer=5, window=40)
GRANITE_SWA_EXPERTS = replace(
    GRANITE_EXPERTS, arch="granite_swa", n_layer=5, window=40, fused_up=True, seed=3
)
GRANITE_HYBRID = replace(
    GRANITE_EXPERTS, arch="granitehybrid", n_layer=4, n_k_head=1, n_v_head=8, pattern="MM*M"
)
NEMOTRON_H = replace(
    LLAMA, arch="nemotron_h", n_layer=8, n_k_head=2, n_v_head=6, value_dim=80, pattern="M-M*-M*-",
    tied=False,
)  # fmt: skip
NEMOTRON_H_MOE = replace(
    NEMOTRON_H, arch="nemotron_h_moe", n_ff=128, n_expert=16, n_used=4, n_ff_shared=96,
    choice_bias=0.3, weights_scale=2.5, pattern="MEM*EMEM", kinds={"token_embd": "f32"},
)  # fmt: skip
LFM2 = replace(LLAMA, arch="lfm2", n_layer=5, conv_kernel=3, pattern="CC*C*", rope_base=1e6)
LFM2_EXPERTS = replace(
    LFM2, arch="lfm2moe", n_ff=128, n_expert=16, n_used=4, n_dense=1, n_ff_dense=320,
    choice_bias=0.3, kinds={"token_embd": "f32"}, tied=False,
)  # fmt: skip
OLMO2 = replace(LLAMA, arch="olmo2", tied=False, n_layer=4)
EXAONE4 = replace(LLAMA, arch="exaone4", rope_base=1e6, n_layer=3)
DOTS1 = replace(GLM4MOE, arch="dots1", bias=0.0, k_bias=0.0, n_rot=0, n_kv_head=4, qk_norm=False)
BAILING2 = replace(DOTS1, arch="bailingmoe2", n_kv_head=2, fused=True, n_rot=64)
EXAONE_MOE = replace(DOTS1, arch="exaone-moe", n_kv_head=2, window=40, n_layer=4, seed=6)
HY_V3 = replace(DOTS1, arch="hy_v3", n_kv_head=2, n_layer=3)
AFMOE = replace(DOTS1, arch="afmoe", n_kv_head=2, window=40, head_gain=1.0)
ERNIE_MOE = replace(
    DOTS1, arch="ernie4_5-moe", n_kv_head=2, weights_scale=1.0, choice_bias=0.05, rope_base=5e5
)
HUNYUAN = replace(QWEN3, arch="hunyuan-dense", n_layer=3)
HUNYUAN_MOE = replace(QWEN3MOE, arch="hunyuan-moe", n_ff_shared=96, n_ff_dense=128)
MAINCODER = replace(LLAMA, arch="maincoder", rope_factors=False)
OLMOE = replace(QWEN3MOE, arch="olmoe", n_kv_head=4, tied=False)
QWEN2MOE = replace(QWEN3MOE, arch="qwen2moe", bias=0.3, k_bias=0.3, n_ff_shared=96, tied=False)
STEP35 = replace(
    DOTS1, arch="step35", n_layer=6, n_dense=2, n_head=4, n_kv_head=2, window_heads=6, window=40,
    rope_base=5e6, window_base=1e4, qk_norm=True, limits=(0.4, 0.5), rope_factors=True,
)  # fmt: skip
SPARK = replace(
    LLAMA, arch="spark2_5", n_layer=3, n_head=4, n_kv_head=2, window_heads=6, window=40, n_rot=32,
    rope_base=5e6, window_base=1e4, rope_factors=False,
)  # fmt: skip
MELLUM = replace(QWEN3MOE, arch="mellum", n_layer=5, window=40, yarn_factor=4.0, rope_base=5e5)
MLA = replace(
    LLAMA, arch="deepseek2", n_layer=3, n_head=4, n_kv_head=1, head_dim=160, n_rot=32, q_rank=192,
    kv_rank=128, nope_dim=96, value_dim=64, tied=False, yarn_factor=4.0,
)  # fmt: skip
MLA_EXPERTS = replace(
    MLA, n_ff=128, n_expert=16, n_used=4, n_ff_shared=256, n_dense=1, n_ff_dense=320,
    choice_bias=0.3, weights_scale=1.8, kinds={"token_embd": "f32"},
)  # fmt: skip
MLA_SOFTMAX = replace(MLA_EXPERTS, gating="softmax", weights_norm=False, choice_bias=0.0)
LLAMA_EXPERTS = replace(LLAMA, n_expert=8, n_used=2, tied=False, kinds={"token_embd": "f32"})

# Odd sizes, every head_dim and GQA ratio, both heads, every storage type
SHAPES: dict[str, Shape] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama_untied": replace(LLAMA, tied=False),
    "qwen2_untied": replace(QWEN2, tied=False),
    "qwen3_untied": replace(QWEN3, tied=False),
    "head_dim_32": replace(QWEN3, head_dim=32, n_head=8),
    "head_dim_96": replace(QWEN3, head_dim=96, n_head=3, n_kv_head=1),
    "head_dim_128": replace(QWEN3, head_dim=128, n_head=4, n_kv_head=4),
    "head_dim_256": replace(QWEN3, head_dim=256, n_head=2, n_kv_head=1),
    "llama_head_dim_96": replace(LLAMA, n_embd=288, head_dim=96, n_head=3, n_kv_head=3),
    "llama_head_dim_128": replace(LLAMA, n_embd=512, head_dim=128, n_head=4, n_kv_head=1),
    "gqa_1": replace(QWEN3, n_head=4, n_kv_head=4),
    "gqa_3": replace(QWEN3, n_head=6, n_kv_head=2),
    "gqa_5": replace(QWEN3, n_head=5, n_kv_head=1),
    "gqa_7": replace(QWEN3, n_head=14, n_kv_head=2),
    "gqa_8": replace(QWEN3, n_head=8, n_kv_head=1),
    "odd_widths": replace(QWEN3, n_embd=224, n_ff=608, n_vocab=351),
    "odd_layers": replace(
        LLAMA, n_layer=5, n_embd=160, n_head=5, n_kv_head=5, head_dim=32, n_ff=96
    ),
    "large_k_bias": replace(QWEN2, k_outlier=50.0),
    "llama_biases": replace(LLAMA, bias=0.5, k_bias=0.5),
    "llama3_factors": replace(LLAMA, rope_factors=True, rope_base=500000.0),
    "linear_scaling": replace(LLAMA, linear_factor=4.0),
    "neox_linear_scaling": replace(QWEN3, linear_factor=2.5),
    # Trained for 64 positions: most of the 300 of a test lie beyond.
    "yarn": replace(QWEN3, yarn_factor=4.0, head_dim=128, n_head=4, n_kv_head=4),
    "llama_yarn": replace(LLAMA, yarn_factor=8.0, yarn_trained=100, rope_base=5e5),
    # Queries of the 300 positions have six scales, 1 to 1.18.
    "mistral3": replace(
        LLAMA, arch="mistral3", yarn_factor=16.0, yarn_trained=50, rope_base=1e6, temperature=0.1
    ),
    "smollm3": replace(LLAMA, arch="smollm3", n_layer=5, rope_base=5e6),
    "seed_oss": replace(QWEN2, arch="seed_oss"),
    "qwen2vl": replace(QWEN2, arch="qwen2vl", sections=(8, 12, 12, 0)),
    "qwen3vl": replace(QWEN3, arch="qwen3vl"),
    "fused_qkv": replace(QWEN2, arch="llama", fused=True),
    "f32": replace(QWEN3, base="f32"),
    "f16": replace(QWEN3, base="f16", tied=False),
    "bf16": replace(LLAMA, base="bf16"),
    "q8_0": replace(QWEN3, base="q8_0"),
    "q4_1": replace(QWEN3, base="q4_1"),
    "q6_k": replace(QWEN3, base="q6_k"),
    "q5_0": replace(QWEN3, base="q5_0"),
    "q5_1": replace(QWEN3, base="q5_1"),
    "iq4_nl": replace(LLAMA, base="iq4_nl"),
    "iq4_xs": replace(LLAMA, base="iq4_xs"),
    "pure_iq4_xs": replace(QWEN3, base="iq4_xs", kinds={"token_embd": "iq4_xs"}),
    # The mix of an IQ4_XS file: attn_v and some layers' ffn_down in Q5_K, the head in Q6_K. Rows
    # of 608 fall back to IQ4_NL and Q5_1.
    "iq4_xs_mix": replace(
        QWEN3,
        n_ff=608,
        base="iq4_xs",
        kinds={"attn_v": "q5_k"},
        more_bits={"ffn_down": "q5_k"},
    ),
    "q3_k": replace(LLAMA, base="q3_k"),
    "pure_q3_k": replace(QWEN3, base="q3_k", kinds={"token_embd": "q3_k"}),
    "q2_k": replace(LLAMA, base="q2_k"),
    "pure_q2_k": replace(QWEN3, base="q2_k", kinds={"token_embd": "q2_k"}),
    # All types with a codebook, as "UD" files mix them.
    "codebooks": replace(
        QWEN3,
        base="iq2_xxs",
        tied=False,
        kinds={
            "token_embd": "iq2_s",
            "attn_k": "iq3_xxs",
            "attn_v": "iq3_s",
            "attn_output": "iq1_s",
            "ffn_up": "iq2_xs",
            "ffn_down": "iq1_m",
        },
    ),
    "qwen3moe_codebooks": replace(
        QWEN3MOE,
        n_ff=256,
        base="iq3_s",
        kinds={**QWEN3MOE.kinds, "ffn_up": "iq2_xs", "ffn_gate": "iq2_xs", "ffn_down": "iq1_m"},
    ),
    # The mix of Q3_K_M; rows of 608 fall back to Q5_0.
    "q3_k_m": replace(
        QWEN3,
        n_ff=608,
        base="q3_k",
        kinds={"attn_v": "q5_k", "attn_output": "q4_k", "ffn_down": "q4_k"},
    ),
    "mxfp4": replace(LLAMA, base="mxfp4"),
    "pure_mxfp4": replace(QWEN3, base="mxfp4", kinds={"token_embd": "mxfp4"}),
    "q4_k": replace(QWEN3, base="q4_k"),
    "q5_k": replace(QWEN3, base="q5_k"),
    "pure_q4_k": replace(QWEN3, base="q4_k", kinds={"token_embd": "q4_k"}),
    "pure_q5_k": replace(QWEN3, base="q5_k", kinds={"token_embd": "q5_k"}),
    # The mix of Q4_K_M; rows of 608 fall back to Q5_0 and Q8_0.
    "q4_k_m": replace(
        QWEN3, n_ff=608, base="q4_k", more_bits={"attn_v": "q6_k", "ffn_down": "q6_k"}
    ),
    "imatrix_mix": replace(QWEN3, kinds={"ffn_down": "q4_1", "attn_k": "q8_0", "attn_v": "q8_0"}),
    "float_mix": replace(LLAMA, kinds={"attn_q": "f16", "attn_v": "bf16", "ffn_up": "f32"}),
    "pure_q4_0": replace(QWEN3, kinds={"token_embd": "q4_0"}),
    "untied_f16_head": replace(QWEN3, tied=False, kinds={"output": "f16"}),
    "qwen3moe": QWEN3MOE,
    "qwen3moe_q4_k_m": replace(
        QWEN3MOE, n_ff=256, base="q4_k", more_bits={"attn_v": "q6_k", "ffn_down": "q6_k"}
    ),
    "qwen3moe_iq4_xs": replace(
        QWEN3MOE, n_ff=256, base="iq4_xs", kinds={**QWEN3MOE.kinds, "attn_v": "q5_k"}
    ),
    "qwen3moe_q2_k": replace(
        QWEN3MOE, n_ff=256, base="q2_k", kinds={**QWEN3MOE.kinds, "attn_v": "q4_k"}
    ),
    "qwen3moe_q3_k": replace(
        QWEN3MOE, n_ff=256, base="q3_k", kinds={**QWEN3MOE.kinds, "attn_v": "q5_k"}
    ),
    # Banks of experts in MXFP4 beside Q8_0, as files of gpt-oss.
    "qwen3moe_mxfp4": replace(
        QWEN3MOE,
        base="q8_0",
        kinds={
            **QWEN3MOE.kinds,
            "ffn_gate": "mxfp4",
            "ffn_up": "mxfp4",
            "ffn_down": "mxfp4",
        },
    ),
    "qwen3moe_every_expert": replace(QWEN3MOE, n_expert=6, n_used=6),
    "qwen3moe_many_experts": replace(QWEN3MOE, n_ff=32, n_expert=128, n_used=8),
    "gpt_oss": GPT_OSS,
    "gpt_oss_f32": replace(GPT_OSS, base="f32"),
    "gpt_oss_wide_window": replace(GPT_OSS, window=128, n_layer=4, n_head=16),
    "gpt_oss_mxfp4": replace(
        GPT_OSS,
        base="q8_0",
        kinds={**GPT_OSS.kinds, "output": "q8_0"} | dict.fromkeys(BANKS, "mxfp4"),
    ),
    "gemma3": GEMMA3,
    "gemma3_f32": replace(GEMMA3, base="f32"),
    "gemma3_q4_k_m": replace(
        GEMMA3, n_ff=608, base="q4_k", more_bits={"attn_v": "q6_k", "ffn_down": "q6_k"}
    ),
    # Of 62 layers: another scale of Q and K. So many layers of few heads add rounding up.
    "gemma3_27b": replace(
        GEMMA3, base="f32", n_layer=62, n_embd=96, n_ff=96, n_head=2, n_kv_head=1, head_gain=4.0
    ),
    "gemma4": GEMMA4,
    "gemma4_f32": replace(GEMMA4, base="f32"),
    "gemma4_layers": GEMMA4_LAYERS,
    "gemma4_layers_f32": replace(GEMMA4_LAYERS, base="f32"),
    "gemma4_experts": GEMMA4_EXPERTS,
    "gemma4_experts_f32": replace(GEMMA4_EXPERTS, base="f32"),
    "qwen35": QWEN35,
    "qwen35_f32": replace(QWEN35, base="f32", n_layer=8),
    "qwen35_q4_k_m": replace(
        QWEN35, n_ff=608, base="q4_k", more_bits={"attn_qkv": "q6_k", "ffn_down": "q6_k"}
    ),
    "qwen35_mtp": replace(QWEN35, n_mtp=1, head_dim=256, n_head=3, n_kv_head=1),
    "qwen35_one_key_head": replace(QWEN35, n_k_head=1, n_v_head=3),
    "qwen35moe": QWEN35MOE,
    "qwen35moe_f32": replace(QWEN35MOE, base="f32"),
    # Attention in every third layer; the last one is recurrent, or there is a block behind it.
    "qwen35_every_third": replace(
        QWEN35, base="f32", n_layer=7, full_every=3, head_dim=256, n_head=3, n_kv_head=1
    ),
    "qwen35moe_mtp": replace(QWEN35MOE, base="f32", n_layer=3, full_every=2, n_mtp=1),
    "glm4moe": GLM4MOE,
    "glm4moe_f32": replace(GLM4MOE, base="f32"),
    "glm4moe_air": replace(GLM4MOE, qk_norm=False, weights_scale=1.0, n_mtp=1),
    "glm4moe_without_norm": replace(GLM4MOE, weights_norm=False, weights_scale=1.0),
    "glm4moe_three_dense": replace(GLM4MOE, n_layer=5, n_dense=3, n_ff_shared=256),
    "glm4moe_q4_k_m": replace(
        GLM4MOE,
        n_ff=256,
        n_ff_shared=256,
        base="q4_k",
        n_ff_dense=608,
        more_bits={"attn_v": "q6_k", "ffn_down": "q6_k"},
    ),
    "qwen3next": QWEN3NEXT,
    "qwen3next_f32": replace(QWEN3NEXT, base="f32"),
    "qwen3next_older": replace(QWEN3NEXT, fused_inputs=True),
    "qwen3next_q4_k_m": replace(
        QWEN3NEXT, n_ff=256, n_ff_shared=256, base="q4_k", more_bits={"attn_qkv": "q6_k"}
    ),
    "minimax_m2": MINIMAX,
    "minimax_m2_f32": replace(MINIMAX, base="f32"),
    "glm4": GLM4,
    "glm4_q4_k": replace(GLM4, base="q4_k"),
    "glm4_sections": replace(GLM4, sections=(4, 6, 6, 0)),
    "phi3": PHI3,
    # Of 96 dimensions 72 are rotated; the 300 positions are more than the first training has seen.
    "phi3_long": replace(PHI3, head_dim=96, n_head=4, n_embd=384, n_rot=72, rope_factors=True),
    "granite": GRANITE,
    "granitemoe": GRANITE_EXPERTS,
    "granitehybrid": GRANITE_HYBRID,
    "granitehybrid_f32": replace(GRANITE_HYBRID, base="f32"),
    "granitehybrid_dense": replace(GRANITE_HYBRID, n_expert=0, n_used=0, n_ff_shared=0, n_k_head=2),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_f32": replace(NEMOTRON_H, base="f32"),
    "nemotron_h_moe": NEMOTRON_H_MOE,
    "nemotron_h_moe_f32": replace(NEMOTRON_H_MOE, base="f32"),
    "nemotron_h_latent": replace(NEMOTRON_H_MOE, n_latent=160),
    "nemotron_h_latent_f32": replace(NEMOTRON_H_MOE, n_latent=96, base="f32"),
    "nemotron_h_q4_k_m": replace(NEMOTRON_H, n_ff=608, base="q4_k", more_bits={"ffn_down": "q6_k"}),
    "lfm2": LFM2,
    "lfm2_f32": replace(LFM2, base="f32"),
    "lfm2moe": LFM2_EXPERTS,
    "lfm2moe_f32": replace(LFM2_EXPERTS, base="f32"),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, base="f32", window=40, yarn_factor=8.0, rope_base=5e5),
    "exaone4": EXAONE4,
    "exaone4_32b": replace(  # of 64 layers three of four see a window, the others turn nothing
        EXAONE4,
        base="f32",
        n_layer=64,
        n_embd=96,
        n_ff=96,
        n_head=3,
        head_dim=32,
        window=40,
        n_kv_head=1,
    ),
    "dots1": replace(DOTS1, seed=3),
    "exaone_moe": replace(EXAONE_MOE, weights_scale=1.0),
    "exaone_moe_f32": replace(EXAONE_MOE, base="f32"),
    "hy_v3": replace(HY_V3, n_mtp=1),
    "hy_v3_f32": replace(HY_V3, base="f32", n_dense=2, n_layer=4, seed=3),
    "afmoe": AFMOE,
    "afmoe_f32": replace(AFMOE, base="f32", n_layer=5, n_dense=2),
    "granite_swa": GRANITE_SWA,
    "granite_swa_f32": replace(GRANITE_SWA, base="f32"),
    "granite_swa_experts": GRANITE_SWA_EXPERTS,
    "granite_swa_experts_f32": replace(GRANITE_SWA_EXPERTS, base="f32"),
    "hunyuan_dense": HUNYUAN,
    "hunyuan_dense_f32": replace(HUNYUAN, base="f32"),
    "hunyuan_moe": HUNYUAN_MOE,
    "hunyuan_moe_f32": replace(HUNYUAN_MOE, base="f32"),
    "maincoder": MAINCODER,
    "olmoe": OLMOE,
    "olmoe_f32": replace(OLMOE, base="f32"),
    "qwen2moe": QWEN2MOE,
    "qwen2moe_f32": replace(QWEN2MOE, base="f32"),
    "spark2_5": SPARK,
    "spark2_5_f32": replace(SPARK, base="f32"),
    "step35": STEP35,
    "step35_f32": replace(STEP35, base="f32", n_ff_shared=96, n_mtp=1),
    "step35_plain_f32": replace(
        STEP35,
        base="f32",
        limits=(0.0, 0.0),
        rope_factors=False,
        qk_norm=False,
        window_heads=0,
        window_base=0.0,
        window_kv=1,
    ),
    "mellum": MELLUM,
    "mellum_f32": replace(MELLUM, base="f32"),
    "arcee": replace(LLAMA, arch="arcee", rope_factors=True, rope_base=5e5),
    "arcee_f32": replace(LLAMA, arch="arcee", base="f32", yarn_factor=8.0, yarn_trained=100),
    "bailingmoe2": replace(BAILING2, n_group=4, n_group_used=2, n_embd=512, n_layer=3),
    "ernie4_5": replace(LLAMA, arch="ernie4_5", rope_base=5e5),
    "ernie4_5_moe": ERNIE_MOE,
    "ernie4_5_moe_f32": replace(ERNIE_MOE, base="f32"),
    "ernie4_5_moe_plain": replace(ERNIE_MOE, base="f32", choice_bias=0.0, n_ff_shared=0),
    "mla": MLA,
    "mla_f32": replace(MLA, base="f32"),
    # llama.cpp takes queries without a projection in models of 26 layers and a few others.
    "mistral4_f32": replace(MLA, base="f32", arch="mistral4", temperature=0.1, yarn_factor=16.0),
    "mla_direct_f32": replace(MLA, base="f32", n_layer=26, n_embd=96, n_ff=96, n_head=2, q_rank=0),
    "mla_temperature_f32": replace(MLA, base="f32", temperature=0.1, yarn_factor=0.0),
    "mla_576_f32": replace(MLA, base="f32", head_dim=576, kv_rank=512, n_rot=64, nope_dim=192),
    "mla_experts": MLA_EXPERTS,
    "mla_softmax_f32": replace(MLA_SOFTMAX, base="f32"),
    "mla_groups_f32": replace(MLA_EXPERTS, base="f32", n_group=4, n_group_used=2, n_mtp=1),
    "glm4moe_groups": replace(GLM4MOE, n_group=4, n_group_used=3),
    "llama_experts": LLAMA_EXPERTS,
    # Experts as in Q4_K_M. Attention stays Q4_0: with Q5_K, whose activations have one scale per
    # 256 values in llama.cpp, the worst rows on the same file are below the tolerance.
    "llama_experts_q4_k": replace(
        LLAMA_EXPERTS,
        kinds={**LLAMA_EXPERTS.kinds, "ffn_gate": "q4_k", "ffn_up": "q4_k", "ffn_down": "q6_k"},
    ),
    "llama_experts_f16": replace(LLAMA_EXPERTS, base="f16"),
    "llama_experts_float_mix": replace(
        LLAMA_EXPERTS, kinds={**LLAMA_EXPERTS.kinds, "ffn_up": "bf16", "ffn_down": "f32"}
    ),
}
