"""The pocket network for training: qwen3 in torch, with Q4_0 in the forward pass when asked.

Owns the arithmetic of training only; what the daemon computes is defined in `kernels`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pocket.shape import BLOCK, Shape


def round_to_q4_0(weights: Tensor) -> Tensor:
    """The fp32 matrix that a Q4_0 file of `weights` decodes to."""
    blocks = weights.reshape(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)
    levels = torch.trunc(blocks * inverse + 8.5).clamp(0, 15) - 8
    return (levels * scale.half().float()).reshape(weights.shape)


class Weight(nn.Module):
    """A matrix that is rounded on its way into use; the gradient passes straight through."""

    def __init__(self, rows: int, columns: int, spread: float) -> None:
        super().__init__()
        self.master = nn.Parameter(torch.randn(rows, columns) * spread)
        self.quantised = False

    def use(self, dtype: torch.dtype) -> Tensor:
        """The matrix in the dtype of the forward pass."""
        value = self.master
        if self.quantised:
            value = value + (round_to_q4_0(value) - value).detach()
        return value.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x times the transposed matrix."""
        return functional.linear(x, self.use(x.dtype))


class Norm(nn.Module):
    """RMS norm in fp32."""

    def __init__(self, width: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x over its root mean square, times the gain."""
        return functional.rms_norm(x.float(), self.gain.shape, self.gain, self.eps)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding, halves paired (NEOX)."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cosine + turned * sine


class Block(nn.Module):
    """Attention and gated MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, depth = shape.hidden, math.sqrt(shape.layers)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        spread = 0.8 / math.sqrt(hidden)
        self.attn_norm = Norm(hidden, shape.eps)
        self.attn_q = Weight(queries, hidden, spread)
        self.attn_k = Weight(keys, hidden, spread)
        self.attn_v = Weight(keys, hidden, spread)
        # Norms of queries and keys start a little sharp: recall circuits appear sooner.
        self.attn_q_norm = Norm(shape.head_dim, shape.eps, 1.3)
        self.attn_k_norm = Norm(shape.head_dim, shape.eps, 1.3)
        self.attn_output = Weight(hidden, queries, 0.5 / math.sqrt(queries) / depth)
        self.ffn_norm = Norm(hidden, shape.eps)
        self.ffn_gate = Weight(shape.ffn, hidden, spread)
        self.ffn_up = Weight(shape.ffn, hidden, spread)
        self.ffn_down = Weight(hidden, shape.ffn, 0.5 / math.sqrt(shape.ffn) / depth)

    def forward(
        self, x: Tensor, cosine: Tensor, sine: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The residual stream (fp32) after this block; `bias` is added to attention logits."""
        x = x + self._attend(self.attn_norm(x).to(dtype), cosine, sine, bias).float()
        y = self.ffn_norm(x).to(dtype)
        return x + self.ffn_down(functional.silu(self.ffn_gate(y)) * self.ffn_up(y)).float()

    def _attend(self, x: Tensor, cosine: Tensor, sine: Tensor, bias: Tensor | None) -> Tensor:
        shape, dtype = self.shape, x.dtype
        rows, length = x.shape[:2]

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(rows, length, count, shape.head_dim).transpose(1, 2)

        query = self.attn_q_norm(heads(self.attn_q(x), shape.heads)).to(dtype)
        key = self.attn_k_norm(heads(self.attn_k(x), shape.kv_heads)).to(dtype)
        value = heads(self.attn_v(x), shape.kv_heads)
        group = shape.heads // shape.kv_heads
        out = functional.scaled_dot_product_attention(
            rotate(query, cosine, sine),
            rotate(key, cosine, sine).repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            attn_mask=bias,
            is_causal=bias is None,
        )
        return self.attn_output(out.transpose(1, 2).reshape(rows, length, -1))


class Net(nn.Module):
    """The whole model; the embedding is also the output head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = Weight(shape.vocab, shape.hidden, 0.02)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = Norm(shape.hidden, shape.eps)
        powers = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        self.register_buffer("frequencies", shape.rope_base**-powers, persistent=False)

    def quantise(self) -> None:
        """From now on every matrix is used as its Q4_0 file would hold it."""
        for module in self.modules():
            if isinstance(module, Weight):
                module.quantised = True

    def matrices(self) -> list[nn.Parameter]:
        """The hidden matrices: everything two-dimensional but the embedding."""
        weights = (m for m in self.blk.modules() if isinstance(m, Weight))
        return [weight.master for weight in weights]

    def forward(
        self, tokens: Tensor, positions: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """(rows, length) tokens and positions -> normed hidden state in `dtype`."""
        angles = positions.double()[..., None] * self.frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
        x = functional.embedding(tokens, self.token_embd.use(dtype)).float()
        for block in self.blk:
            x = block(x, cosine, sine, bias, dtype)
        return self.output_norm(x).to(dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits of normed hidden states."""
        return functional.linear(hidden, self.token_embd.use(hidden.dtype)).float()
