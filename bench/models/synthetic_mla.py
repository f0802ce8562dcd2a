"""What random models with multi-head latent attention have that others have not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import gguf

from batchengine.weights.architectures import ARCHITECTURES
from bench.models.shapes import RandomTensor, Shape

Matrix = Callable[..., "RandomTensor"]
Vector = Callable[[str, int], "RandomTensor"]
LOG_MULTIPLIER = 0.0707  # of YaRN, a tenth of DeepSeek V2's


def has_mla(shape: Shape) -> bool:
    """Whether a model has it."""
    return ARCHITECTURES[shape.arch].has_mla


def attention(shape: Shape, prefix: str, matrix: Matrix, vector: Vector) -> Iterator[RandomTensor]:
    """Matrices and norms of a layer's attention."""
    n, heads, rank = shape.n_embd, shape.n_head, shape.kv_rank
    of_query = heads * (shape.nope_dim + shape.n_rot)
    if shape.q_rank:
        yield matrix(prefix + "attn_q_a", "attn_q_a", shape.q_rank, n)
        yield vector(prefix + "attn_q_a_norm.weight", shape.q_rank)
        yield matrix(prefix + "attn_q_b", "attn_q_b", of_query, shape.q_rank)
    else:
        yield matrix(prefix + "attn_q", "attn_q", of_query, n)
    yield matrix(prefix + "attn_kv_a_mqa", "attn_kv_a", rank + shape.n_rot, n)
    yield vector(prefix + "attn_kv_a_norm.weight", rank)
    yield matrix(prefix + "attn_k_b", "attn_k_b", rank, shape.nope_dim, n_expert=heads)
    yield matrix(prefix + "attn_v_b", "attn_v_b", shape.value_dim, rank, n_expert=heads)
    yield matrix(prefix + "attn_output", "attn_output", n, heads * shape.value_dim)


def write_keys(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The keys of a file that those of other architectures have not."""
    if not has_mla(shape):
        return
    if shape.q_rank:
        writer.add_q_lora_rank(shape.q_rank)
    writer.add_kv_lora_rank(shape.kv_rank)
    writer.add_key_length_mla(shape.nope_dim + shape.n_rot)
    writer.add_value_length_mla(shape.value_dim)
    if not shape.n_expert:  # llama.cpp wants these of any model
        writer.add_expert_feed_forward_length(shape.n_ff)
        writer.add_expert_shared_count(0)
        writer.add_leading_dense_block_count(shape.n_layer)
    if shape.temperature:
        key = f"{shape.arch}.attention.temperature_length"
        writer.add_uint32(key, shape.yarn_trained)
