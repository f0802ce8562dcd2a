"""Writes synthetic GGUF models: any supported shape, seeded random weights, in seconds.

The files load in llama.cpp as well as here: a valid
byte-level vocabulary, tensor types per role as `llama-quantize ... Q4_0` chooses them, and
weights of a scale at which logits spread (block bytes are drawn directly with a sane fp16
scale, so a 0.6B model takes seconds). They serve to measure speed and to compare engines only.

    python -m bench.models.synthetic --preset 0.6b --out synthetic-0.6b.gguf
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from batchengine.weights.architectures import ARCHITECTURES
from bench.models import synthetic_gemma4, synthetic_hybrid, synthetic_mla
from bench.models.shapes import PRESETS, TYPES, RandomTensor, Shape
from bench.models.tensors import BLOCK_BYTES, block_width, put_scales

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Tensor = tuple[npt.NDArray[Any], str]  # data as the writer takes it, and its kind

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_MIN = 256 + len(SPECIALS) + 1
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


LONG_FACTOR = 1.19  # of cosines and sines, of a context 40 times as long as the first
_FALLBACKS = {  # of rows that are not whole superblocks
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "iq4_xs": "iq4_nl", "q3_k": "q4_0",
    "q2_k": "q4_0", "iq3_xxs": "iq4_nl", "iq3_s": "iq4_nl", "iq2_xxs": "iq4_nl", "iq2_xs": "iq4_nl",
    "iq2_s": "iq4_nl", "iq1_s": "iq4_nl", "iq1_m": "iq4_nl",
}  # fmt: skip
CODEBOOK_SPREADS = {  # standard deviation of the weights of random blocks with d = 1
    "iq3_xxs": 142, "iq3_s": 140, "iq2_xxs": 53.4, "iq2_xs": 55.9, "iq2_s": 56.4, "iq1_s": 7.2,
    "iq1_m": 7.2,
}  # fmt: skip
_FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k": 12, "q4_k": 15, "q5_k": 17, "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30, "bf16": 32,
    "mxfp4": 38, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq1_s": 24, "iq3_s": 26, "iq2_s": 28,
    "iq1_m": 31,
}  # fmt: skip


def write_synthetic(path: Path, shape: Shape) -> None:
    """Writes the model file, a tensor at a time; the same shape gives the same bytes."""
    writer, tensors = _begin(path, shape)
    rng = _generator(shape)
    for tensor in tensors:
        writer.write_tensor_data(tensor(rng))
    writer.close()


def write_sparse(path: Path, shape: Shape) -> None:
    """Writes the header of the model file alone, and a hole in place of every number: what reads
    the header finds a file of the whole size, which takes no room."""
    writer, tensors = _begin(path, shape)
    writer.close()
    align = writer.data_alignment
    sizes = [path.stat().st_size, *(tensor.n_bytes for tensor in tensors)]
    os.truncate(path, sum(-(-size // align) * align for size in sizes))


def _begin(path: Path, shape: Shape) -> tuple[gguf.GGUFWriter, list[RandomTensor]]:
    """The writer of a file of which everything is written but the numbers of these tensors."""
    writer = _writer(path, shape)
    tensors = list(_tensors_of(shape))
    for tensor in tensors:
        dtype, raw = np.dtype(np.float32), TYPES[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.dims, dtype, tensor.n_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer, tensors


def write_tensors(path: Path, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
    """Writes a model file of this shape with the given tensors."""
    writer = _writer(path, shape)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_tensors(shape: Shape) -> dict[str, Tensor]:
    """Seeded random tensors of a model by name; the same shape gives the same bytes."""
    rng = _generator(shape)
    return {tensor.name: (tensor(rng), tensor.kind) for tensor in _tensors_of(shape)}


def _generator(shape: Shape) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(shape.seed))


def _writer(path: Path, shape: Shape) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, shape.arch)
    _write_metadata(writer, shape)
    _write_vocabulary(writer, shape)
    return writer


def _tensors_of(shape: Shape) -> Iterator[RandomTensor]:
    """The tensors in the order of the file, in which their numbers are drawn."""
    n, q, kv = shape.n_embd, shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim

    def matrix(
        name: str, role: str, rows: int, cols: int, gain: float = 1.0, n_expert: int = 0
    ) -> RandomTensor:
        kind = _kind_of(shape, name, role, cols)
        dims = (n_expert, rows, cols) if n_expert else (rows, cols)
        all_rows = rows * max(1, n_expert)
        return RandomTensor(
            name + ".weight", kind, dims, lambda rng: random_matrix(rng, kind, all_rows, cols, gain)
        )

    def vector(name: str, size: int) -> RandomTensor:
        return RandomTensor(
            name, "f32", (size,), lambda rng: rng.normal(1.0, 0.1, size).astype(np.float32)
        )

    def bias(name: str, *dims: int, mean: float = 0.0, ending: str = "bias") -> RandomTensor:
        return RandomTensor(
            f"{name}.{ending}",
            "f32",
            dims,
            lambda rng: rng.normal(mean, shape.bias, dims).astype(np.float32),
        )

    row = ARCHITECTURES[shape.arch]
    has_expert_bias = row.has_expert_bias
    has_post_norms = ARCHITECTURES[shape.arch].has_post_norms
    yield matrix(
        "token_embd", "token_embd", shape.n_vocab, n, shape.head_gain if shape.tied else 1.0
    )
    yield vector(ARCHITECTURES[shape.arch].output_norm, n)
    if not shape.tied:
        yield matrix("output", "output", shape.n_vocab, n, shape.head_gain)
    is_gemma4 = shape.arch == "gemma4"
    if is_gemma4:
        yield from synthetic_gemma4.layer_embeddings(shape, matrix, vector)
    if shape.rope_factors or is_gemma4:
        yield from _rope_factors(shape)
    has_gate = ARCHITECTURES[shape.arch].has_gate
    for i in range(shape.n_layer + shape.n_mtp):
        p = f"blk.{i}."
        n_head, n_kv_head = _heads_of(shape, i)
        q, kv = n_head * shape.head_dim, n_kv_head * shape.head_dim
        if row.has_pre_norms:
            yield vector(p + "attn_norm.weight", n)
        is_recurrent = _is_recurrent(shape, i)
        has_ffn = synthetic_hybrid.has_ffn(shape, i)
        has_attention = synthetic_hybrid.has_mixer(shape, i) and not is_recurrent
        if is_recurrent and synthetic_hybrid.is_hybrid(shape):
            yield from synthetic_hybrid.mixer(shape, p, matrix, vector)
        elif is_recurrent:
            yield from _delta_net(shape, p, matrix, vector)
        elif is_gemma4:
            yield from synthetic_gemma4.attention(shape, i, matrix, vector)
        elif synthetic_mla.has_mla(shape):
            yield from synthetic_mla.attention(shape, p, matrix, vector)
        elif shape.fused:
            yield matrix(p + "attn_qkv", "attn_qkv", q + 2 * kv, n)
        elif has_attention:
            # The gate, which elsewhere has rows of that matrix.
            is_apart = shape.arch == "afmoe" or row.gates_heads
            gate_rows = n_head if row.gates_heads else q
            for letter, rows in (
                ("q", q * (1 + (has_gate and not is_apart))),
                ("k", kv),
                ("v", kv),
                *([("gate", gate_rows)] if is_apart else []),
            ):
                yield matrix(f"{p}attn_{letter}", f"attn_{letter}", rows, n)
        if has_attention:
            yield from _biases(shape, p)
        is_other = not has_attention or is_gemma4 or synthetic_mla.has_mla(shape)
        if (ARCHITECTURES[shape.arch].has_qk_norm or shape.qk_norm) and not is_other:
            is_whole = ARCHITECTURES[shape.arch].norms_whole_qk
            yield vector(p + "attn_q_norm.weight", q if is_whole else shape.head_dim)
            yield vector(p + "attn_k_norm.weight", kv if is_whole else shape.head_dim)
        if not is_other:
            yield matrix(p + "attn_output", "attn_output", n, q)
        if ARCHITECTURES[shape.arch].has_sinks:
            yield bias(p + "attn_output", n)
            yield bias(p + "attn_sinks", shape.n_head, mean=1.0, ending="weight")
        if has_post_norms and not is_gemma4:
            yield vector(p + "post_attention_norm.weight", n)
        if not has_ffn:
            continue
        if (has_attention or is_recurrent) and row.has_pre_norms:
            yield vector(p + row.ffn_norm, n)
        if is_gemma4 and shape.n_expert:
            yield from synthetic_gemma4.experts(shape, i, matrix, vector)
        n_expert = shape.n_expert if i >= shape.n_dense and not is_gemma4 else 0
        n_ff = shape.n_ff if i >= shape.n_dense else shape.n_ff_dense
        if n_expert:
            gain = shape.selector_gain
            yield matrix(p + "ffn_gate_inp", "ffn_gate_inp", n_expert, n, gain)
        if n_expert and shape.n_latent:
            yield matrix(p + "ffn_latent_down", "ffn_latent_down", shape.n_latent, n)
            yield matrix(p + "ffn_latent_up", "ffn_latent_up", n, shape.n_latent)
        if n_expert and shape.choice_bias:
            yield _choice_bias(shape, p)
        if has_expert_bias:
            yield bias(p + "ffn_gate_inp", shape.n_expert)
        has_gate_matrix = ARCHITECTURES[shape.arch].activation != "relu2"
        gate_up = [("ffn_gate", n_ff, n), ("ffn_up", n_ff, n)][not has_gate_matrix :]
        if shape.fused_up:
            gate_up = [("ffn_gate_up" if n_expert else "ffn_up", 2 * n_ff, n)]
        for role, rows, cols in (*gate_up, ("ffn_down", n, n_ff)):
            name = p + role + ("_exps" if n_expert else "")
            if shape.n_latent and n_expert:  # of what experts read and give
                rows, cols = (width if width != n else shape.n_latent for width in (rows, cols))
            yield matrix(name, role, rows, cols, n_expert=n_expert)
            if has_expert_bias:
                yield bias(name, shape.n_expert, rows)
        if shape.n_ff_shared and ARCHITECTURES[shape.arch].shared_expert == "weighted":
            yield RandomTensor(
                p + "ffn_gate_inp_shexp.weight",
                "f32",
                (n,),
                lambda rng: (rng.standard_normal(n) / np.sqrt(n)).astype(np.float32),
            )
        if shape.n_ff_shared and n_expert:
            is_apart = has_gate_matrix and not shape.fused_up
            if is_apart:
                yield matrix(p + "ffn_gate_shexp", "ffn_gate", shape.n_ff_shared, n)
            rows = shape.n_ff_shared * (1 if is_apart or not has_gate_matrix else 2)
            yield matrix(p + "ffn_up_shexp", "ffn_up", rows, n)
            yield matrix(p + "ffn_down_shexp", "ffn_down", n, shape.n_ff_shared)
        if has_post_norms:
            yield vector(p + "post_ffw_norm.weight", n)
        if is_gemma4:
            yield from synthetic_gemma4.layer_inputs(shape, i, matrix, vector)
        if i >= shape.n_layer:
            yield matrix(p + "nextn.eh_proj", "eh_proj", n, 2 * n)
            for name in ("enorm", "hnorm", "shared_head_norm"):
                yield vector(f"{p}nextn.{name}.weight", n)


def _has_window(shape: Shape, layer: int) -> bool:
    """Whether a layer has a window, by a flag in its file: the first of four has none."""
    return ARCHITECTURES[shape.arch].windows == "flagged" and layer % 4 != 0


def _heads_of(shape: Shape, layer: int) -> tuple[int, int]:
    """Query and KV heads of a layer, of all but gemma4."""
    if not _has_window(shape, layer):
        return shape.n_head, shape.n_kv_head
    return shape.window_heads or shape.n_head, shape.window_kv or shape.n_kv_head


def _write_layers(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The keys of step35 and spark2_5 with a value for each layer."""
    row, layers = ARCHITECTURES[shape.arch], range(shape.n_layer + shape.n_mtp)
    heads = [_heads_of(shape, i) for i in layers]
    writer.add_head_count([n_head for n_head, _ in heads])
    writer.add_head_count_kv([n_kv_head for _, n_kv_head in heads])
    writer.add_sliding_window_pattern([_has_window(shape, i) for i in layers])
    if shape.window_base:
        writer.add_rope_freq_base_swa(shape.window_base)
    if not row.has_limits:
        return
    experts, others = ([limit * (i % 2) for i in layers] for limit in shape.limits)
    writer.add_swiglu_clamp_exp(experts)
    writer.add_swiglu_clamp_shexp(others)


def _choice_bias(shape: Shape, prefix: str) -> RandomTensor:
    """What is added to what experts are chosen by."""
    n = shape.n_expert

    def draw(rng: np.random.Generator) -> F32:
        return rng.normal(0.0, shape.choice_bias, n).astype(np.float32)

    suffix = "" if shape.arch == "hy_v3" else ".bias"
    return RandomTensor(f"{prefix}exp_probs_b{suffix}", "f32", (n,), draw)


def _is_recurrent(shape: Shape, layer: int) -> bool:
    """Whether a layer is; those behind the model's own have attention."""
    if synthetic_hybrid.is_hybrid(shape):
        return synthetic_hybrid.is_recurrent(shape, layer)
    every = (shape.full_every if shape.n_v_head else 0) or ARCHITECTURES[shape.arch].full_every
    return every > 0 and layer < shape.n_layer and (layer + 1) % every != 0


def _delta_net(
    shape: Shape,
    prefix: str,
    matrix: Callable[..., RandomTensor],
    vector: Callable[[str, int], RandomTensor],
) -> Iterator[RandomTensor]:
    """Those of a recurrent layer. States fade within some ten to a thousand tokens."""
    n, heads, width = shape.n_embd, shape.n_v_head, shape.n_v_head * shape.state_dim
    channels = 2 * shape.n_k_head * shape.state_dim + width
    dims = channels, shape.conv_kernel

    def drawn(name: str, low: float, high: float) -> RandomTensor:
        return RandomTensor(
            prefix + name, "f32", (heads,), lambda rng: rng.uniform(low, high, heads).astype("f4")
        )

    if shape.fused_inputs:
        yield matrix(prefix + "ssm_in", "ssm_in", channels + width, n)
    else:
        yield matrix(prefix + "attn_qkv", "attn_qkv", channels, n)
        yield matrix(prefix + "attn_gate", "attn_gate", width, n)
    yield RandomTensor(
        prefix + "ssm_conv1d.weight",
        "f32",
        dims,
        lambda rng: rng.normal(0.0, 0.5, dims).astype(np.float32),
    )
    if ARCHITECTURES[shape.arch].groups_values:
        yield matrix(prefix + "ssm_ba", "ssm_ba", 2 * heads, n)
    else:
        yield matrix(prefix + "ssm_beta", "ssm_beta", heads, n)
        yield matrix(prefix + "ssm_alpha", "ssm_alpha", heads, n)
    yield drawn("ssm_dt.bias", -4.0, -1.0)
    yield drawn("ssm_a", -2.0, -0.2)
    yield vector(prefix + "ssm_norm.weight", shape.state_dim)
    yield matrix(prefix + "ssm_out", "ssm_out", n, width)


def _biases(shape: Shape, prefix: str) -> Iterator[RandomTensor]:
    """Those of q, k and v that the shape has."""
    q, kv = shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim
    for letter, rows, spread in (
        ("q", q, shape.bias),
        ("k", kv, shape.k_bias),
        ("v", kv, shape.bias),
    ):

        def draw(
            rng: np.random.Generator, letter: str = letter, rows: int = rows, spread: float = spread
        ) -> F32:
            bias = rng.normal(0.0, spread, rows).astype(np.float32)
            if letter == "k" and shape.k_outlier:
                bias[shape.head_dim - 1 :: shape.head_dim] = shape.k_outlier
            return bias

        if spread:
            yield RandomTensor(f"{prefix}attn_{letter}.bias", "f32", (rows,), draw)


def _kind_of(shape: Shape, name: str, role: str, cols: int) -> str:
    """The type of a tensor as llama-quantize chooses it: the head in more bits, selectors as
    floats, and attention in more bits beside eight experts; then the overrides."""
    kind = shape.base
    if role == "ffn_gate_inp":
        kind = "f32"
    elif shape.base in ("f32", "f16", "bf16"):
        pass
    elif role == ("token_embd" if shape.tied else "output"):
        kind = "q6_k"
    elif shape.n_expert == 8 and role in ("attn_k", "attn_v"):
        return shape.kinds.get(role, "q8_0")
    elif shape.n_expert == 8 and role == "attn_output" and shape.base == "q4_k":
        kind = "q5_k"
    kind = shape.kinds.get(role, kind)
    if role in shape.more_bits and _has_more_bits(int(name.split(".")[1]), shape.n_layer):
        kind = shape.more_bits[role]
    return _FALLBACKS.get(kind, kind) if cols % 256 else kind


def _has_more_bits(layer: int, n_layer: int) -> bool:
    """The first and last eighth of the layers, and every third between them."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def random_matrix(
    rng: np.random.Generator, kind: str, rows: int, cols: int, gain: float
) -> U8 | F32 | npt.NDArray[np.float16]:
    """Weights of zero mean and standard deviation gain / sqrt(cols), in the bytes of `kind`."""
    spread = gain / np.sqrt(cols)
    if kind in ("f32", "f16", "bf16"):
        values = rng.standard_normal((rows, cols), np.float32) * np.float32(spread)
        if kind == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind == "f16" else np.float32)
    n_blocks = rows * cols // block_width(kind)

    # Divisor = standard deviation of the integers below; the sign of the scale is random, which
    # removes their small mean (nibbles are -8..7).
    def scales(divisor: float) -> npt.NDArray[np.float16]:
        size = spread / divisor * rng.uniform(0.6, 1.4, n_blocks)
        return (size * rng.choice((-1.0, 1.0), n_blocks)).astype(np.float16)

    def raw(n_bytes: int) -> U8:
        return np.frombuffer(rng.bytes(n_blocks * n_bytes), np.uint8).reshape(n_blocks, n_bytes)

    def half(values: npt.NDArray[np.float16]) -> U8:
        return values.view(np.uint8).reshape(n_blocks, 2)

    if kind == "q4_0":
        parts = [half(scales(4.6)), raw(16)]
    elif kind == "q4_1":
        d = scales(4.6)
        parts = [half(d), half((d * np.float16(-7.5)).astype(np.float16)), raw(16)]
    elif kind == "q5_0":
        parts = [half(scales(9.2)), raw(20)]
    elif kind == "q5_1":
        d = scales(9.2)
        parts = [half(d), half((d * np.float16(-15.5)).astype(np.float16)), raw(20)]
    elif kind == "q8_0":
        parts = [half(scales(74.0)), raw(32)]
    elif kind == "iq4_nl":
        parts = [half(scales(67.0)), raw(16)]
    elif kind == "iq4_xs":  # six-bit scales of both signs, -32 to 31
        parts = [half(scales(18.5 * 67.0)), raw(134)]
    elif kind == "q3_k":  # the same for each 16 weights
        parts = [raw(108), half(scales(18.5 * 2.3))]
    elif kind == "q2_k":  # minima equal to the scales, so that the weights have no mean
        d = scales(10.9 * 1.12)
        least = half((d * np.float16(1.5)).astype(np.float16))
        parts = [raw(16) % 10 * 17 + 6 * 17, raw(64), half(d), least]
    elif kind == "mxfp4":  # scales are powers of two
        size = np.log2(spread / 5.85 * rng.uniform(0.6, 1.4, n_blocks))
        parts = [(128 + np.rint(size)).astype(np.uint8).reshape(n_blocks, 1), raw(16)]
    elif kind in CODEBOOK_SPREADS:  # odd factors of four or three bits, the same for 16 or 32
        parts = [raw(BLOCK_BYTES[kind]).copy()]
        put_scales(kind, parts[0], scales(CODEBOOK_SPREADS[kind]))
    elif kind == "q6_k":
        parts = [raw(192), raw(16), half(scales(18.5 * 74.0))]
    elif kind in ("q4_k", "q5_k"):
        d, middle = (scales(45 * 4.6), 7.5) if kind == "q4_k" else (scales(45 * 9.2), 15.5)
        dmin = (d * np.float16(middle)).astype(np.float16)
        parts = [
            half(d),
            half(dmin),
            _sub_scales(rng, n_blocks),
            raw(128 if kind == "q4_k" else 160),
        ]
    else:
        raise ValueError(f"unknown kind {kind}")
    return np.concatenate(parts, axis=1).reshape(rows, -1)


def _sub_scales(rng: np.random.Generator, n_blocks: int) -> U8:
    """Six-bit scales and minima of Q4_K and Q5_K: equal, so that the weights have no mean."""
    scale = rng.integers(24, 64, (n_blocks, 8), np.uint8)
    first, last = scale[:, :4], scale[:, 4:]
    upper = last >> 4 << 6
    return np.concatenate([first | upper, first | upper, last & 15 | last << 4], axis=1)


def _write_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    arch = shape.arch.replace("phi3", "phi")  # llama.cpp wants certain tokens of a "phi3"
    writer.add_name(f"synthetic-{arch}-{shape.n_layer}x{shape.n_embd}")
    writer.add_block_count(shape.n_layer + shape.n_mtp)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.n_embd)
    row = ARCHITECTURES[shape.arch]
    if row.experts == "all" or (synthetic_mla.has_mla(shape) and shape.n_expert):
        if not row.splits_layers:
            writer.add_feed_forward_length(shape.n_ff_dense or shape.n_ff * shape.n_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    elif not row.splits_layers:
        writer.add_feed_forward_length(shape.n_ff)
    if row.windows == "flagged":
        _write_layers(writer, shape)
    else:
        writer.add_head_count(shape.n_head)
    if shape.arch == "gemma4":
        synthetic_gemma4.write_keys(writer, shape)
    elif row.windows != "flagged" and not synthetic_hybrid.is_hybrid(shape):
        writer.add_head_count_kv(shape.n_kv_head)
    synthetic_hybrid.write_keys(writer, shape)
    synthetic_mla.write_keys(writer, shape)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.kv_rank or shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.n_rot or shape.head_dim)
    writer.add_file_type(_FILE_TYPES[shape.base])
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_used)
    if row.sigmoid != "none" and shape.n_expert:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[shape.gating.upper()])
        writer.add_expert_weights_norm(shape.weights_norm)
        writer.add_expert_weights_scale(shape.weights_scale)
        if shape.arch != "hy_v3":  # whose files do not say
            writer.add_leading_dense_block_count(shape.n_dense)
        if shape.n_group:
            writer.add_expert_group_count(shape.n_group)
            writer.add_expert_group_used_count(shape.n_group_used)
        is_plain, is_counted = row.shared_expert == "plain", row.shared_expert == "counted"
        n_shared = shape.n_ff_shared // shape.n_ff if is_plain else 0
        if is_counted and shape.n_ff_shared:
            n_shared = 1
        writer.add_expert_shared_count(n_shared)
    if row.has_choice_bias and shape.n_expert:
        writer.add_leading_dense_block_count(shape.n_dense)
        writer.add_interleave_moe_layer_step(1)
        writer.add_expert_shared_count(int(shape.n_ff_shared > 0))
    if shape.arch.startswith("qwen3vl"):  # pairs by the axis of an image that they turn with
        pairs = shape.head_dim // 2
        writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    if shape.sections:
        writer.add_rope_dimension_sections(list(shape.sections))
    if shape.n_v_head and not synthetic_hybrid.is_hybrid(shape):
        pairs = shape.n_rot // 2  # pair i turns with the axis i mod 3
        sections = [(pairs + 2 - axis) // 3 for axis in range(3)]
        if not ARCHITECTURES[shape.arch].groups_values:
            writer.add_rope_dimension_sections([*sections, 0])
        if shape.full_every:
            writer.add_full_attention_interval(shape.full_every)
        writer.add_ssm_conv_kernel(shape.conv_kernel)
        writer.add_ssm_state_size(shape.state_dim)
        writer.add_ssm_group_count(shape.n_k_head)
        writer.add_ssm_time_step_rank(shape.n_v_head)
        writer.add_ssm_inner_size(shape.n_v_head * shape.state_dim)
    if shape.n_mtp:
        writer.add_uint32(f"{shape.arch}.nextn_predict_layers", shape.n_mtp)
    if shape.n_ff_shared and row.shared_expert in ("weighted", "sized", "counted"):
        writer.add_expert_shared_feed_forward_length(shape.n_ff_shared)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if row.rotates == "by_layer":
        writer.add_sliding_window_pattern([i % 4 != 0 for i in range(shape.n_layer)])
        rotated = [i % 3 != 2 for i in range(shape.n_layer)]
        writer.add_array(f"{shape.arch}.attention.rope_pattern", rotated)
    if shape.temperature:
        key = f"{shape.arch}.attention.temperature_scale"
        writer.add_float32(key, shape.temperature)
    if shape.linear_factor:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.linear_factor)
    if shape.rope_factors and shape.arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(shape.yarn_trained)
        writer.add_rope_scaling_attn_factors(LONG_FACTOR)
    if shape.yarn_factor:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(shape.yarn_factor)
        writer.add_rope_scaling_orig_ctx_len(shape.yarn_trained)
        if row.log_multiplier != "none":
            of_mla = synthetic_mla.LOG_MULTIPLIER
            writer.add_rope_scaling_yarn_log_mul(of_mla if row.has_mla else 1.0)


def _write_vocabulary(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Writes all bytes, one merge (the format needs some), specials, then numbered fillers."""
    if shape.n_vocab < VOCAB_MIN:
        raise ValueError(f"a vocabulary has at least {VOCAB_MIN} tokens")
    byte_tokens = _byte_tokens()
    tokens = [*byte_tokens, byte_tokens[ord("t")] + byte_tokens[ord("h")], *SPECIALS]
    tokens += [f"[filler{i}]" for i in range(len(tokens), shape.n_vocab)]
    types = [int(gguf.TokenType.NORMAL)] * shape.n_vocab
    for i in range(257, 257 + len(SPECIALS)):
        types[i] = int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if shape.arch.startswith("qwen35") else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _byte_tokens() -> list[str]:
    """The byte-level tokens: a byte is itself if printable, else the next character from 256."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(256, 512))
    return [chr(b) if b in shown else chr(next(free)) for b in range(256)]


def _rope_factors(shape: Shape) -> Iterator[RandomTensor]:
    """The factors of RoPE that a model has."""
    if shape.arch == "phi3":
        pairs = (shape.n_rot or shape.head_dim) // 2
        for name, most in (("long", 40.0), ("short", 1.5)):
            factors = np.geomspace(1.0, most, pairs).astype(np.float32)
            yield RandomTensor(
                f"rope_factors_{name}.weight", "f32", (pairs,), lambda _, found=factors: found
            )
        return
    factors = (
        synthetic_gemma4.rope_factors(shape) if shape.arch == "gemma4" else _llama3_factors(shape)
    )
    yield RandomTensor("rope_freqs.weight", "f32", factors.shape, lambda _: factors)


def _llama3_factors(shape: Shape) -> F32:
    """Frequency factors of llama 3.1 (factor 8, low 1, high 4, original context 8192)."""
    exponent = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    wavelength = 2.0 * np.pi * shape.rope_base**exponent
    smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0)
    blended = 1.0 / ((1.0 - smooth) / 8.0 + smooth)
    factors = np.where(wavelength < 8192.0 / 4.0, 1.0, blended)
    return np.where(wavelength > 8192.0, 8.0, factors).astype(np.float32)


def main() -> None:
    """Command line: a preset, with single dimensions changed."""
    parser = argparse.ArgumentParser(prog="python -m bench.models.synthetic", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="0.6b")
    integers = (
        "n_layer", "n_embd", "n_ff", "n_expert", "n_used", "n_head", "n_kv_head", "head_dim",
        "n_vocab", "seed",
    )  # fmt: skip
    for name in integers:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--arch", choices=("llama", "qwen2", "qwen3", "qwen3moe"))
    parser.add_argument("--untied", action="store_true")
    args = parser.parse_args()
    changes = {k: getattr(args, k) for k in (*integers, "arch") if getattr(args, k) is not None}
    shape = replace(PRESETS[args.preset], **changes)
    if args.untied:
        shape = replace(shape, tied=False)
    start = time.perf_counter()
    write_synthetic(args.out, shape)
    seconds = time.perf_counter() - start
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.0f} MiB in {seconds:.1f} s")


if __name__ == "__main__":
    main()
