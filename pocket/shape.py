"""Sizes of a pocket model, and the names and shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32  # weights per Q4_0 block: one fp16 scale, sixteen bytes of nibbles


@dataclass(frozen=True)
class Shape:
    """Sizes of a qwen3-shaped model; the defaults are the shipped ones."""

    vocab: int = 2048
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 768
    context_tokens: int = 16_384
    rope_base: float = 1e6
    eps: float = 1e-6


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """GGUF tensor name -> (rows, columns) or (size,), in file order."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        shapes |= {
            f"blk.{layer}.{name}.weight": size
            for name, size in {
                "attn_norm": (shape.hidden,),
                "attn_q": (queries, shape.hidden),
                "attn_k": (keys, shape.hidden),
                "attn_v": (keys, shape.hidden),
                "attn_q_norm": (shape.head_dim,),
                "attn_k_norm": (shape.head_dim,),
                "attn_output": (shape.hidden, queries),
                "ffn_norm": (shape.hidden,),
                "ffn_gate": (shape.ffn, shape.hidden),
                "ffn_up": (shape.ffn, shape.hidden),
                "ffn_down": (shape.hidden, shape.ffn),
            }.items()
        }
    shapes["output_norm.weight"] = (shape.hidden,)
    return shapes
