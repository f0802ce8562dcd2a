"""Logits of batchengine against those of llama.cpp on the same file, within tolerances.

llama.cpp is an independent implementation of the architectures. It rounds too: on a quantised
file its activations are int8 as ours are. Hence two oracles: llama.cpp on the same weights
dequantised to F32 with F32 KV, where only our rounding remains and every row must agree; and
llama.cpp on the same file, where both roundings add up and the median row must agree.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
import pytest

from batchengine.gguf import GgufFile
from batchengine.weights.architectures import ARCHITECTURES
from bench.models.llama import LlamaContext, LlamaModel, blocks_of, quantise
from bench.models.local_runner import LocalRunner
from bench.models.shapes import TYPES
from bench.models.synthetic import Shape, write_synthetic
from bench.models.tensors import CODEBOOK_KINDS
from tests.hostile.rewrite import edited
from tests.model.agreement.shapes import GLM4MOE, GPT_OSS, GRANITE_HYBRID, QWEN3, SHAPES

COSINE_MIN = 0.999
# Against exact weights and floats: half of the positions, and the worst one of 300, which is one
# draw of the rounding noise (0.9992 with the scales of CA-1, 0.9990 since CA-2, medians equal).
EXACT_MEDIAN, EXACT_WORST = 0.9995, 0.9985
# Of models with recurrent layers the state keeps the rounding of all tokens, of both equally: as
# parts of the difference of llama.cpp on the file from llama.cpp on exact weights.
RECURRENT_MEDIAN, RECURRENT_WORST = 1.2, 3.0
F32 = npt.NDArray[np.float32]

WRITERS = (
    "attn_output", "ssm_out", "shortconv.out_proj", "ffn_down", "ffn_down_exps", "ffn_down_shexp",
    "ffn_latent_up", "proj",
)  # fmt: skip


def with_clear_choices(path: Path, shape: Shape) -> Path:
    """The model of a file with experts, of which no two are nearly equally good for a token.

    Where they are, the rounding of either implementation chooses, and the outputs of two experts
    have nothing in common. Here a token's embedding has a dimension for each expert, with the
    numbers of a random order; no layer writes there, and the selector reads little else. Where a
    bias counts in the choice, one expert is always chosen by it, one never, and others not at all.
    """
    n, spacing = shape.n_expert, max(0.1, 4.0 / shape.n_expert)
    rng = np.random.default_rng(7)
    levels = (np.arange(n) - (n - 1) / 2) * spacing
    if shape.n_group:  # of sigmoids of x and -x the sum is 1, so groups with such pairs were equal
        levels += levels**2 / 4
    spread = spacing / 10 / np.sqrt(shape.n_embd)  # of the rest: a tenth of what choices differ by

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        embedding = tensors["token_embd.weight"][0]
        scale = shape.n_embd**0.25 if ARCHITECTURES[shape.arch].scales_embedding else 1.0
        embedding[:, :n] = rng.permuted(np.tile(levels, (len(embedding), 1)), axis=1) / scale
        for i in range(shape.n_layer):
            prefix = f"blk.{i}."
            if prefix + "exp_probs_b.bias" in tensors:
                choice = tensors[prefix + "exp_probs_b.bias"][0]
                choice[:] = 0
                choice[rng.choice(n, 2, replace=False)] = 2, -2
            norm = tensors[prefix + ARCHITECTURES[shape.arch].ffn_norm][0]
            for ending in ("weight", "bias"):
                for role in WRITERS:
                    if f"{prefix}{role}.{ending}" in tensors:
                        written = tensors[f"{prefix}{role}.{ending}"][0]
                        rows = written.swapaxes(-2, 0) if ending == "weight" else written.T
                        rows[:n] = 0
            if (scale := tensors.get(prefix + "ffn_gate_inp.scale")) is not None:
                scale[0][:] *= np.sqrt(shape.n_embd)  # by which gemma4 divides
                norm = scale[0] / np.sqrt(shape.n_embd)
                scale[0][:n] = np.sqrt(shape.n_embd)
            norm[:n] = 1.0
            if i < shape.n_dense:
                continue
            if prefix + "ffn_gate_inp.weight" not in tensors:
                continue
            selector = tensors[prefix + "ffn_gate_inp.weight"][0]
            selector[:] = rng.normal(0.0, spread, selector.shape)
            selector[np.arange(n), rng.permutation(n)] += 1.0
            if prefix + "ffn_gate_inp.bias" in tensors:
                tensors[prefix + "ffn_gate_inp.bias"][0][:] *= spacing / 10

    return edited(path, edit)


def cosines(ours: F32, theirs: F32) -> F32:
    """Cosine per row."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def theirs_of(path: Path, tokens: list[int]) -> F32:
    """llama.cpp's logits after every token, KV in f32."""
    with LlamaModel(path) as model, LlamaContext(model, kv_type="f32", threads=1) as context:
        return context.all_logits(tokens)


def ours_of(path: Path, tokens: list[int], cache_dir: Path) -> F32:
    """Our logits after every token."""
    with LocalRunner(path, cache_dir=cache_dir, n_pages=8, logits_max=64) as runner:
        return runner.all_logits(tokens)


def dequantise(_: Any, tensors: dict[str, Any]) -> None:
    """Every matrix as F32, its values unchanged."""
    for name, (data, kind) in tensors.items():
        if data.ndim >= 2:
            row = data.reshape(1, -1)  # gguf takes 16 rows at a time
            values = gguf.quants.dequantize(row, kind).astype(np.float32)
            shaped = values.reshape(*data.shape[:-1], -1)
            tensors[name] = (shaped, gguf.GGMLQuantizationType.F32)


def model_of(name: str, folder: Path) -> Path:
    """The file of a shape, with clear choices if it has experts."""
    path = folder / f"{name}.gguf"
    write_synthetic(path, SHAPES[name])
    if SHAPES[name].n_expert:
        return with_clear_choices(path, SHAPES[name]).rename(path)
    return path


# A model in blocks whose twin in floats is here too is outside the default suite: the twin has the
# layers, and other shapes have the types of blocks.
SHAPES_BY_SUITE = [
    pytest.param(name, marks=pytest.mark.slow if f"{name}_f32" in SHAPES else ()) for name in SHAPES
]


@pytest.mark.parametrize("name", SHAPES_BY_SUITE)
def test_logits_agree(name: str, tmp_path: Path, cache_dir: Path) -> None:
    shape, path = SHAPES[name], model_of(name, tmp_path)
    tokens = np.random.default_rng(5).integers(0, shape.n_vocab, 300).tolist()
    ours, theirs = ours_of(path, tokens, cache_dir), theirs_of(path, tokens)
    of_floats = theirs_of(edited(path, dequantise), tokens)
    exact, same = cosines(ours, of_floats), cosines(ours, theirs)
    own = 1 - cosines(theirs, of_floats)
    print(
        f"AGREEMENT {name} on F32 values: min={exact.min():.6f} median={np.median(exact):.6f}; "
        f"on the file: min={same.min():.6f} median={np.median(same):.6f}"
    )
    # With MLA twice as many products follow each other in a layer; scores are sums of more values.
    depth = 2 if shape.kv_rank or shape.n_layer > 62 else 1
    middle, worst = depth * (1 - EXACT_MEDIAN), depth * (1 - EXACT_WORST)
    # Of the file llama.cpp rounds activations its own way, which differs between processors.
    same_middle, same_worst = depth * (1 - COSINE_MIN), depth * (1 - COSINE_MIN + 0.0015)
    if shape.n_v_head or shape.pattern:
        middle = max(middle, RECURRENT_MEDIAN * float(np.median(own)))
        worst = max(worst, RECURRENT_WORST * float(own.max()))
        same_middle, same_worst = max(same_middle, 2 * middle), max(same_worst, 2 * worst)
    assert float(np.median(1 - exact)) < middle
    assert float((1 - exact).max()) < worst
    assert float(np.median(1 - same)) < same_middle
    assert float((1 - same).max()) < same_worst
    if shape.base == "f32" and (shape.n_v_head or shape.pattern):
        assert float(exact.min()) > 0.9999
    # Rows differ from each other, so constant or shifted logits cannot pass.
    assert float(cosines(ours[1:], theirs[:-1]).mean()) < 0.8


# Files of llama-quantize: the number of the type, and the types of tensors that it chooses.
DENSE = replace(QWEN3, base="f32", n_ff=608, n_layer=8, n_head=8)
HYBRID = replace(
    GRANITE_HYBRID, base="f32", n_expert=0, n_used=0, n_ff_shared=0, n_layer=8, pattern=2 * "MM*M"
)
QUANTISED_FILES = {
    "IQ4_XS": (30, {"IQ4_XS", "IQ4_NL", "Q5_K", "Q5_1", "Q6_K"}),
    "Q2_K": (10, {"Q2_K", "Q3_K", "Q4_K", "Q4_0", "Q6_K"}),
    "Q3_K_S": (11, {"Q3_K", "Q4_0", "Q6_K"}),
    "Q3_K_M": (12, {"Q3_K", "Q4_K", "Q5_K", "Q5_0", "Q6_K"}),
    "Q4_K_M": (15, {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, DENSE) for name in QUANTISED_FILES), ("Q4_K_M", HYBRID)],
    ids=[*QUANTISED_FILES, "hybrid"],
)
def test_logits_agree_on_a_file_of_llama_quantize(
    name: str, shape: Shape, tmp_path: Path, cache_dir: Path
) -> None:
    """Blocks that a quantiser wrote, in rows of 608, which are no whole superblocks, too; and of a
    model with one group of Mamba-2, where it leaves out a dimension."""
    path, floats = tmp_path / "model.gguf", tmp_path / "floats.gguf"
    file_type, types = QUANTISED_FILES[name]
    write_synthetic(floats, shape)
    quantise(floats, path, file_type)
    with GgufFile(path) as file:
        assert {info.type.name for info in file.tensors.values()} == types | {"F32"}
    tokens = np.random.default_rng(8).integers(0, QWEN3.n_vocab, 300).tolist()
    exact = cosines(ours_of(path, tokens, cache_dir), theirs_of(edited(path, dequantise), tokens))
    print(f"AGREEMENT {name} min={exact.min():.6f} median={np.median(exact):.6f}")
    assert float(np.median(exact)) > EXACT_MEDIAN
    assert float(exact.min()) > EXACT_WORST


@pytest.mark.slow
def test_logits_agree_on_codebooks_that_a_quantiser_filled(tmp_path: Path, cache_dir: Path) -> None:
    """Entries that llama.cpp's quantiser chose for a model of floats, a type for each role."""
    floats, kinds = tmp_path / "floats.gguf", [TYPES[kind] for kind in CODEBOOK_KINDS]
    write_synthetic(floats, replace(QWEN3, base="f32", n_layer=1))

    def quantise_all(_: Any, tensors: dict[str, Any]) -> None:
        matrices = sorted(name for name, (data, _kind) in tensors.items() if data.ndim == 2)
        for name, kind in zip(matrices, itertools.cycle(kinds), strict=False):
            values = np.ascontiguousarray(tensors[name][0], np.float32)
            tensors[name] = blocks_of(values, kind), kind

    path = edited(floats, quantise_all).rename(tmp_path / "codebooks.gguf")
    with GgufFile(path) as file:
        assert {info.type.name for info in file.tensors.values()} == {k.name for k in kinds} | {
            "F32"
        }
    tokens = np.random.default_rng(9).integers(0, QWEN3.n_vocab, 300).tolist()
    ours = ours_of(path, tokens, cache_dir)
    exact = cosines(ours, theirs_of(edited(path, dequantise), tokens))
    same = cosines(ours, theirs_of(path, tokens))
    print(f"AGREEMENT codebooks min={exact.min():.6f} median={np.median(exact):.6f}")
    assert float(np.median(exact)) > EXACT_MEDIAN
    assert float(exact.min()) > EXACT_WORST
    assert float(np.median(same)) > COSINE_MIN


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "gpt_oss", "qwen35_f32", "glm4moe"])
def test_logits_agree_past_a_super_page(name: str, tmp_path: Path, cache_dir: Path) -> None:
    """1,300 tokens: six pages, two super-pages to fold."""
    path = model_of(name, tmp_path)
    tokens = np.random.default_rng(6).integers(0, SHAPES[name].n_vocab, 1300).tolist()
    exact = cosines(ours_of(path, tokens, cache_dir), theirs_of(edited(path, dequantise), tokens))[
        256:
    ]
    print(f"AGREEMENT {name} tokens 256..1300 min={exact.min():.6f} median={np.median(exact):.6f}")
    assert float(exact.min()) > COSINE_MIN


@pytest.mark.parametrize(
    "name", ["qwen3_untied", "qwen3moe", "llama_experts", "gpt_oss", "glm4moe"]
)
def test_greedy_tokens_agree(name: str, tmp_path: Path, cache_dir: Path) -> None:
    """Of 960 tokens that llama.cpp chose greedily. Logits of random models have near ties, so 94 %
    are equal; but every token that leads by a fifth of the logits' deviation is."""
    path = model_of(name, tmp_path)
    rows: list[F32] = []
    agreed: list[bool] = []
    with (
        LlamaModel(path) as model,
        LlamaContext(model, kv_type="f32", threads=1) as context,
        LocalRunner(path, cache_dir=cache_dir, n_pages=8, logits_max=64) as runner,
    ):
        for seed in range(20):
            tokens = np.random.default_rng(seed).integers(0, 320, 16).tolist()
            context.clear()
            logits = context.prefill(tokens)
            while True:
                rows.append(logits)
                tokens.append(int(logits.argmax()))
                if len(tokens) == 16 + 48:
                    break
                logits = context.prefill(tokens[-1:], start=len(tokens) - 1)
            ours = runner.all_logits(tokens[:-1])[15:]
            agreed += (ours.argmax(1) == np.array(tokens[16:])).tolist()
    best = np.sort(np.stack(rows), axis=1)
    leads = (best[:, -1] - best[:, -2]) / np.stack(rows).std(1) > 0.2
    print(f"AGREEMENT {name} greedy={sum(agreed)}/{len(agreed)} clear={leads.mean():.0%}")
    assert len(agreed) == 960
    assert sum(agreed) >= 0.94 * 960
    assert leads.mean() > 0.5
    assert np.array(agreed)[leads].all()


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3moe_many_experts", "llama_experts", "glm4moe"])
def test_most_logits_agree_where_experts_are_nearly_equal(
    name: str, tmp_path: Path, cache_dir: Path
) -> None:
    """With a random selector: where rounding chooses, a row differs, and those are few."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, SHAPES[name])
    tokens = np.random.default_rng(5).integers(0, 320, 300).tolist()
    exact = cosines(ours_of(path, tokens, cache_dir), theirs_of(edited(path, dequantise), tokens))
    share = float((exact < EXACT_WORST).mean())
    print(f"AGREEMENT {name} random choices median={np.median(exact):.6f} other rows={share:.1%}")
    assert float(np.median(exact)) > COSINE_MIN
    assert share < 0.35


@pytest.mark.parametrize("name", ["qwen3moe", "llama_experts", "gpt_oss", "glm4moe"])
def test_with_another_number_of_experts_used_the_logits_disagree(
    name: str, tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail."""
    path = model_of(name, tmp_path)
    key, n_used = f"{SHAPES[name].arch}.expert_used_count", SHAPES[name].n_used
    fewer = edited(path, lambda values, _: values.update({key: (n_used - 1, values[key][1])}))
    tokens = np.random.default_rng(5).integers(0, 320, 100).tolist()
    found = cosines(ours_of(path, tokens, cache_dir), theirs_of(fewer, tokens))
    assert float(np.median(found)) < COSINE_MIN - 0.01


def wider_window(values: dict[str, Any], _: Any) -> None:
    key = "gpt-oss.attention.sliding_window"
    values[key] = (values[key][0] + 1, values[key][1])


def larger_sinks(_: Any, tensors: dict[str, Any]) -> None:
    for i in range(GPT_OSS.n_layer):
        tensors[f"blk.{i}.attn_sinks.weight"][0][:] += 0.5


def other_bias(_: Any, tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_up_exps.bias"][0][:] *= -1.0


@pytest.mark.parametrize("edit", [wider_window, larger_sinks, other_bias])
def test_with_another_window_or_other_sinks_the_logits_disagree(
    edit: Any, tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail, by one position of a window."""
    path = model_of("gpt_oss_f32", tmp_path)
    tokens = np.random.default_rng(5).integers(0, 320, 300).tolist()
    found = cosines(ours_of(path, tokens, cache_dir), theirs_of(edited(path, edit), tokens))
    print(f"AGREEMENT {edit.__name__} median={np.median(found):.6f} min={found.min():.6f}")
    assert float(found.min()) < 0.99 < EXACT_WORST


def other_heads(_: Any, tensors: dict[str, Any]) -> None:
    """Values of head h beside the keys of head h div 2."""
    data = tensors["blk.0.attn_qkv.weight"][0]
    values = data[-4 * 128 :].reshape(4, 128, -1)
    values[:] = values[[0, 2, 1, 3]]


def longer_memory(_: Any, tensors: dict[str, Any]) -> None:
    tensors["blk.1.ssm_a"][0][:] *= 0.5


def gate_first(_: Any, tensors: dict[str, Any]) -> None:
    data = tensors["blk.3.attn_q.weight"][0].reshape(4, 2, 128, -1)
    data[:] = data[:, ::-1].copy()


def more_turned(values: dict[str, Any], _: Any) -> None:
    values["qwen35.rope.dimension_count"] = (66, values["qwen35.rope.dimension_count"][1])


@pytest.mark.parametrize("edit", [other_heads, longer_memory, gate_first, more_turned])
def test_with_another_recurrent_layer_or_gate_the_logits_disagree(
    edit: Any, tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, SHAPES["qwen35_f32"])
    tokens = np.random.default_rng(5).integers(0, 320, 300).tolist()
    found = cosines(ours_of(path, tokens, cache_dir), theirs_of(edited(path, edit), tokens))
    print(f"AGREEMENT {edit.__name__} median={np.median(found):.6f} min={found.min():.6f}")
    assert float(found.min()) < 0.9999


def shared_expert_of_other_weight(_: Any, tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_gate_inp_shexp.weight"][0][:] *= -1.0


def test_with_another_weight_of_the_shared_expert_the_logits_disagree(
    tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail."""
    path = model_of("qwen35moe_f32", tmp_path)
    tokens = np.random.default_rng(5).integers(0, 320, 100).tolist()
    ours = ours_of(path, tokens, cache_dir)
    found = cosines(ours, theirs_of(edited(path, shared_expert_of_other_weight), tokens))
    assert float(np.median(found)) < 0.999


def other_choice(_: Any, tensors: dict[str, Any]) -> None:
    for i in range(GLM4MOE.n_dense, GLM4MOE.n_layer):
        tensors[f"blk.{i}.exp_probs_b.bias"][0][:] *= -1.0


def smaller_shared_expert(_: Any, tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_down_shexp.weight"][0][:] *= 0.5


def without_norm(values: dict[str, Any], _: Any) -> None:
    key = "glm4moe.expert_weights_norm"
    values[key] = (False, values[key][1])


def another_scale(values: dict[str, Any], _: Any) -> None:
    key = "glm4moe.expert_weights_scale"
    values[key] = (1.0, values[key][1])


def less_turned(values: dict[str, Any], _: Any) -> None:
    values["glm4moe.rope.dimension_count"] = (62, values["glm4moe.rope.dimension_count"][1])


@pytest.mark.parametrize(
    "edit", [other_choice, smaller_shared_expert, without_norm, another_scale, less_turned]
)
def test_with_another_choice_or_shared_expert_the_logits_disagree(
    edit: Any, tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail."""
    path = model_of("glm4moe_f32", tmp_path)
    tokens = np.random.default_rng(5).integers(0, 320, 100).tolist()
    found = cosines(ours_of(path, tokens, cache_dir), theirs_of(edited(path, edit), tokens))
    print(f"AGREEMENT {edit.__name__} median={np.median(found):.6f} min={found.min():.6f}")
    assert float(np.median(found)) < COSINE_MIN


def wider_limit(values: dict[str, Any], _: Any) -> None:
    key = "step35.swiglu_clamp_exp"
    values[key] = ([0.0] * len(values[key][0]), values[key][1])


def wider_limit_of_others(values: dict[str, Any], _: Any) -> None:
    key = "step35.swiglu_clamp_shexp"
    values[key] = ([limit * 1.5 for limit in values[key][0]], values[key][1])


def other_gates(_: Any, tensors: dict[str, Any]) -> None:
    for i in range(6):
        data = tensors[f"blk.{i}.attn_gate.weight"][0]
        data[:] = data[::-1].copy()


def same_base(values: dict[str, Any], _: Any) -> None:
    values["step35.rope.freq_base_swa"] = values["step35.rope.freq_base"]


def fewer_turned_in_windows(values: dict[str, Any], tensors: dict[str, Any]) -> None:
    count, types = values["step35.rope.dimension_count"]
    values["step35.rope.dimension_count_swa"] = (count - 8, types)
    factors, kind = tensors["rope_freqs.weight"]
    tensors["rope_freqs.weight"] = (factors[: count // 2 - 4], kind)


@pytest.mark.parametrize(
    "edit",
    [wider_limit, wider_limit_of_others, other_gates, same_base, fewer_turned_in_windows],
)
def test_with_other_limits_gates_or_rotations_the_logits_disagree(
    edit: Any, tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail; of a file edited so, both agree again."""
    path = model_of("step35_f32", tmp_path)
    other = edited(path, edit)
    tokens = np.random.default_rng(5).integers(0, 320, 200).tolist()
    theirs = theirs_of(other, tokens)
    found = cosines(ours_of(path, tokens, cache_dir), theirs)
    print(f"AGREEMENT {edit.__name__} median={np.median(found):.6f} min={found.min():.6f}")
    assert float(np.median(found)) < COSINE_MIN
    assert float(np.median(cosines(ours_of(other, tokens, cache_dir), theirs))) > 0.9999


@pytest.mark.parametrize("name", ["llama3_factors", "linear_scaling"])
def test_without_rope_scaling_the_logits_disagree(
    name: str, tmp_path: Path, cache_dir: Path
) -> None:
    """This proves that the tests above can fail."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, SHAPES[name])
    plain = tmp_path / "plain.gguf"
    write_synthetic(plain, replace(SHAPES[name], rope_factors=False, linear_factor=0.0))
    tokens = np.random.default_rng(5).integers(0, 320, 300).tolist()
    with LocalRunner(path, cache_dir=cache_dir, n_pages=4, logits_max=64) as runner:
        scaled = runner.all_logits(tokens)
    with LocalRunner(plain, cache_dir=cache_dir, n_pages=4, logits_max=64) as runner:
        unscaled = runner.all_logits(tokens)
    assert float(cosines(scaled, unscaled).min()) < COSINE_MIN


# -- the pocket model: text instead of random weights

WORDS = ("amber", "cello", "bronze", "walnut", "mint", "prairie", "opal", "robin", "garden")
FILLER = (
    "Here are some notes. It was a cold evening at the lake. The owl was lost and the boat old.",
    "Here are some notes. The wind was cold, but the sky was blue. The farm was soft and broken.",
    "Here are some notes. The dog walked slowly to the museum. A carpenter came to visit.",
)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def conversations(count: int) -> list[str]:
    """Prompts of the kinds the pocket model was trained on, each ending before an answer."""
    source = random.Random(20)
    prompts: list[str] = []
    for index in range(count):
        words = source.sample(WORDS, 4)
        facts = " ".join(f"The code for {w} is {source.randint(0, 9999):04d}." for w in words)
        text = turn("user", facts) + turn("assistant", "Okay, I will remember these facts.")
        for filler in source.sample(FILLER, 1 + index % 3):
            text += turn("user", filler) + turn("assistant", "Thank you, I have read the notes.")
        first = source.randint(1, 150)
        text += turn(
            "user",
            (
                f"What is the code for {words[0]}?",
                f"Count from {first} to {first + 7}.",
                f"Copy these words: {', '.join(words)}.",
                f"Reverse this list: {', '.join(words[:3])}.",
                f"Tell me a story about Eva and a {words[1]}.",
            )[index % 5],
        )
        prompts.append(text + "<|im_start|>assistant\n")
    return prompts


def test_greedy_agreement_on_the_pocket_model(pocket_path: Path, cache_dir: Path) -> None:
    """Over 2,000 tokens that llama.cpp chose greedily: ours are equal at 99 % of positions."""
    agreed = total = 0
    cosine_min = 1.0
    with (
        LlamaModel(pocket_path) as model,
        LlamaContext(model, kv_type="f32", threads=1) as context,
        LocalRunner(pocket_path, cache_dir=cache_dir, n_pages=8, logits_max=64) as runner,
    ):
        end = model.tokenize("<|im_end|>")[0]
        for prompt in conversations(100):
            tokens = model.tokenize(prompt)
            n_prompt = len(tokens)
            context.clear()
            logits = context.prefill(tokens)
            theirs: list[F32] = []
            while len(theirs) < 96:
                theirs.append(logits)
                tokens.append(int(logits.argmax()))
                if tokens[-1] == end:
                    break
                logits = context.prefill(tokens[-1:], start=len(tokens) - 1)
            ours = runner.all_logits(tokens[:-1])[n_prompt - 1 :]
            agreed += int((ours.argmax(1) == np.array(tokens[n_prompt:])).sum())
            total += len(theirs)
            cosine_min = min(cosine_min, float(cosines(ours, np.stack(theirs)).min()))
    print(f"AGREEMENT pocket greedy={agreed}/{total} cosine_min={cosine_min:.6f}")
    assert total >= 2000
    assert agreed >= 0.99 * total
    assert cosine_min > COSINE_MIN
