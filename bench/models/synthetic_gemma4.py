"""What random models of Gemma 4 have that those of other architectures have not.

Layers with a window have heads of their own; the last layers read the K and V of others; each layer
has embeddings of its own, a scale, and, with experts, a dense part beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf
import numpy as np

from batchengine.weights.keys import is_last_of
from bench.models.shapes import RandomTensor, Shape

EVERY = 6  # of so many layers the last one has no window, unless the shape says otherwise
IDENTITY = 1e30  # of RoPE: a pair that does not turn
Matrix = Callable[..., "RandomTensor"]
Vector = Callable[[str, int], "RandomTensor"]


def is_windowed(shape: Shape, layer: int) -> bool:
    """Whether queries of a layer see a window."""
    return not is_last_of(shape.full_every or EVERY, layer)


def heads_of(shape: Shape, layer: int) -> tuple[int, int]:
    """KV heads of a layer, and their width."""
    if is_windowed(shape, layer):
        return shape.window_kv or shape.n_kv_head, shape.window_dim or shape.head_dim
    return shape.n_kv_head, shape.head_dim


def rope_factors(shape: Shape) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Only the first quarter of the pairs of a layer without a window turn."""
    pairs = np.arange(shape.head_dim // 2)
    return np.where(pairs < shape.head_dim // 8, 1.0, IDENTITY).astype(np.float32)


def attention(shape: Shape, layer: int, matrix: Matrix, vector: Vector) -> Iterator[RandomTensor]:
    """Matrices and norms of a layer's attention."""
    prefix, n = f"blk.{layer}.", shape.n_embd
    n_kv, dim = heads_of(shape, layer)
    yield matrix(prefix + "attn_q", "attn_q", shape.n_head * dim, n)
    yield _head_norm(vector(prefix + "attn_q_norm.weight", dim), dim)
    if layer < shape.n_layer - shape.n_shared:
        yield matrix(prefix + "attn_k", "attn_k", n_kv * dim, n)
        if is_windowed(shape, layer) or not shape.v_from_k:
            yield matrix(prefix + "attn_v", "attn_v", n_kv * dim, n)
        yield _head_norm(vector(prefix + "attn_k_norm.weight", dim), dim)
    yield matrix(prefix + "attn_output", "attn_output", n, shape.n_head * dim)
    yield vector(prefix + "post_attention_norm.weight", n)


def _head_norm(ones: RandomTensor, dim: int) -> RandomTensor:
    """The norm of heads of Q or K, whose products have the deviation 1: nothing scales them."""
    return ones._replace(draw=lambda rng: (ones.draw(rng) * dim**-0.25).astype(np.float32))


def experts(shape: Shape, layer: int, matrix: Matrix, vector: Vector) -> Iterator[RandomTensor]:
    """A layer's experts and what they have in norms and scales beside the dense part."""
    prefix, n = f"blk.{layer}.", shape.n_embd
    yield matrix(prefix + "ffn_gate_inp", "ffn_gate_inp", shape.n_expert, n, shape.selector_gain)
    yield vector(prefix + "ffn_gate_inp.scale", n)
    yield vector(prefix + "pre_ffw_norm_2.weight", n)
    count = {"n_expert": shape.n_expert}
    yield matrix(prefix + "ffn_gate_up_exps", "ffn_up", 2 * shape.n_ff_expert, n, **count)
    yield matrix(prefix + "ffn_down_exps", "ffn_down", n, shape.n_ff_expert, **count)
    yield vector(prefix + "ffn_down_exps.scale", shape.n_expert)
    yield vector(prefix + "post_ffw_norm_1.weight", n)
    yield vector(prefix + "post_ffw_norm_2.weight", n)


def layer_inputs(
    shape: Shape, layer: int, matrix: Matrix, vector: Vector
) -> Iterator[RandomTensor]:
    """What a layer has for its own embeddings, and its scale."""
    prefix, n, width = f"blk.{layer}.", shape.n_embd, shape.n_embd_layer
    if width:
        yield matrix(prefix + "inp_gate", "inp_gate", width, n)
        yield matrix(prefix + "proj", "proj", n, width)
        yield vector(prefix + "post_norm.weight", n)
    if shape.layer_scale:
        yield vector(prefix + "layer_output_scale.weight", 1)


def layer_embeddings(shape: Shape, matrix: Matrix, vector: Vector) -> Iterator[RandomTensor]:
    """The embeddings that layers have of their own."""
    width = shape.n_embd_layer * shape.n_layer
    if width:
        table = "per_layer_token_embd"
        yield matrix(table, table, shape.n_vocab, width, (width / shape.n_embd_layer) ** 0.5)
        yield matrix("per_layer_model_proj", "per_layer_model_proj", width, shape.n_embd)
        yield vector("per_layer_proj_norm.weight", shape.n_embd_layer)


def write_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The keys of a file that those of other architectures have not, or otherwise."""
    layers = range(shape.n_layer)
    dim = shape.window_dim or shape.head_dim
    writer.add_head_count_kv([heads_of(shape, layer)[0] for layer in layers])
    writer.add_sliding_window_pattern([is_windowed(shape, layer) for layer in layers])
    writer.add_key_length_swa(dim)
    writer.add_value_length_swa(dim)
    writer.add_rope_dimension_count_swa(dim)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_shared_kv_layers(shape.n_shared)
    writer.add_embedding_length_per_layer_input(shape.n_embd_layer)
    if shape.logit_cap:
        writer.add_final_logit_softcapping(shape.logit_cap)
    if shape.n_expert:
        writer.add_expert_feed_forward_length(shape.n_ff_expert)
