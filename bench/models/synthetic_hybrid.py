"""What random models of Granite 4, Nemotron-H and LFM2 have that those of other architectures have
not: layers of Mamba-2 or of short convolutions, blocks that are a mixer or a feed-forward part, and
scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import numpy as np

from batchengine.weights.architectures import ARCHITECTURES
from bench.models.shapes import RandomTensor, Shape

Matrix = Callable[..., "RandomTensor"]
Vector = Callable[[str, int], "RandomTensor"]
ATTENTION, FFN = "*", "-E"  # in Shape.pattern; anything else is recurrent


def is_hybrid(shape: Shape) -> bool:
    """Whether a model has layers of Mamba-2 or of short convolutions."""
    return ARCHITECTURES[shape.arch].recurrent in ("mamba2", "conv")


def is_recurrent(shape: Shape, block: int) -> bool:
    """Whether a block is a recurrent mixer, or begins with one."""
    return is_hybrid(shape) and shape.pattern[block] not in ATTENTION + FFN


def has_mixer(shape: Shape, block: int) -> bool:
    """Whether a block has a part that mixes tokens."""
    return not _splits(shape) or shape.pattern[block] not in FFN


def has_ffn(shape: Shape, block: int) -> bool:
    """Whether a block has a feed-forward part."""
    return not _splits(shape) or shape.pattern[block] in FFN


def _splits(shape: Shape) -> bool:
    return ARCHITECTURES[shape.arch].splits_layers


def mixer(shape: Shape, prefix: str, matrix: Matrix, vector: Vector) -> Iterator[RandomTensor]:
    """The tensors of a recurrent layer. States fade within some ten to a thousand tokens."""
    n, taps = shape.n_embd, shape.conv_kernel
    if ARCHITECTURES[shape.arch].recurrent == "conv":
        yield matrix(prefix + "shortconv.in_proj", "shortconv_in", 3 * n, n)
        yield _normal(prefix + "shortconv.conv.weight", (n, taps), 0.6)
        yield matrix(prefix + "shortconv.out_proj", "shortconv_out", n, n)
        return
    heads, groups, width = shape.n_v_head, shape.n_k_head, shape.n_v_head * shape.value_dim
    channels = width + 2 * groups * shape.state_dim

    def drawn(name: str, low: float, high: float, *dims: int) -> RandomTensor:
        return RandomTensor(
            prefix + name, "f32", dims, lambda rng: rng.uniform(low, high, dims).astype(np.float32)
        )

    yield matrix(prefix + "ssm_in", "ssm_in", width + channels + heads, n)
    yield _normal(prefix + "ssm_conv1d.weight", (channels, taps), 0.5)
    yield _normal(prefix + "ssm_conv1d.bias", (channels,), 0.2)
    yield drawn("ssm_dt.bias", -4.0, -1.0, heads)
    yield drawn("ssm_a", -2.0, -0.2, heads, 1)
    yield drawn("ssm_d", 0.5, 1.5, heads, 1)
    ones = vector(prefix + "ssm_norm.weight", width)
    yield ones._replace(dims=(groups, width // groups))
    yield matrix(prefix + "ssm_out", "ssm_out", n, width)


def _normal(name: str, dims: tuple[int, ...], spread: float) -> RandomTensor:
    return RandomTensor(
        name, "f32", dims, lambda rng: rng.normal(0.0, spread, dims).astype(np.float32)
    )


def write_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The keys of a file that those of other architectures have not, or otherwise."""
    row = ARCHITECTURES[shape.arch]
    if shape.scales:
        embedding, residual, logits, attention = shape.scales
        writer.add_embedding_scale(embedding)
        writer.add_residual_scale(residual)
        writer.add_logit_scale(logits)
        writer.add_attention_scale(attention)
    if not is_hybrid(shape):
        return
    counts = [shape.n_kv_head if kind in ATTENTION else 0 for kind in shape.pattern]
    writer.add_head_count_kv(counts)
    if row.splits_layers:
        n_ff = shape.n_ff
        writer.add_feed_forward_length([n_ff if kind in FFN else 0 for kind in shape.pattern])
        writer.add_layer_norm_eps(1e-6)
    if shape.n_latent:
        writer.add_uint32(f"{shape.arch}.moe_latent_size", shape.n_latent)
    if row.recurrent == "conv":
        writer.add_shortconv_l_cache(shape.conv_kernel)
        return
    if row.rotates == "by_key":
        writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(shape.conv_kernel)
    writer.add_ssm_state_size(shape.state_dim)
    writer.add_ssm_group_count(shape.n_k_head)
    writer.add_ssm_time_step_rank(shape.n_v_head)
    writer.add_ssm_inner_size(shape.n_v_head * shape.value_dim)
