"""A plain forward pass in binary64: what a GGUF file computes when only its weights are rounded.

Owns `FloatModel`, the reference of `bench quality`: numpy, one layer after the other, no cache and
no page; architectures llama, qwen2 and qwen3 as the synthetic models and the pocket model use them.
It shares no code with the product: keys, types and tensors are read by the `gguf` package.
A `Rounding` adds one source of error at a time, so that its share can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt

from bench.models.tensors import hadamard

F64 = npt.NDArray[np.float64]
Round = Callable[[F64], F64]
LOG2_E = 1.4426950408889634
HALF_MAX = 65504.0


def unchanged(x: F64) -> F64:
    """No rounding."""
    return x


def ratio_scales(x: F64) -> F64:
    """Groups of 32 as int8 with the scale max / 127."""
    groups = x.reshape(-1, 32)
    scale = np.abs(groups).max(1, keepdims=True) / 127.0
    scale[scale == 0.0] = 1.0
    return (np.rint(groups / scale) * scale).reshape(x.shape)


def short_scales(x: F64, bits: int) -> F64:
    """Groups of 32 as int8; the scale has `bits` significant bits and lets no value exceed 127."""
    groups = x.reshape(-1, 32)
    largest = np.abs(groups).max(1, keepdims=True)
    largest[largest == 0.0] = 1.0
    mantissa, exponent = np.frexp(largest / 127.0)  # mantissa from 0.5 to 1
    scale = np.ldexp(np.ceil(np.ldexp(mantissa, bits)), exponent - bits)
    return (np.rint(groups / scale) * scale).reshape(x.shape)


def half_scales(x: F64, width: int) -> F64:
    """Groups of `width` as int8 with the scale max / 127 in binary16, as pages hold K and V."""
    groups = x.reshape(-1, width)
    scale = np.abs(groups).max(1, keepdims=True) / 127.0
    scale = np.minimum(scale, HALF_MAX).astype(np.float16).astype(np.float64)
    scale[scale == 0.0] = 1.0
    return (np.clip(np.rint(groups / scale), -127, 127) * scale).reshape(x.shape)


def transformed(x: F64) -> F64:
    """Each head times the orthonormal Hadamard matrix of the largest power of two in its size,
    which is its own inverse."""
    return hadamard(x) / np.sqrt(x.shape[-1] & -x.shape[-1])


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a pass rounds besides the weights; queries are rounded after the factor of attention."""

    inputs: Round = unchanged  # of matrices, per group of 32
    queries: Round = unchanged
    keys: Round = unchanged
    values: Round = unchanged


EXACT = Rounding()


class FloatModel:
    """Keys of a model file, without the architecture before them, and its weights as numbers."""

    def __init__(self, keys: Mapping[str, Any], weights: Mapping[str, F64]) -> None:
        self.keys = keys
        self.weights = weights
        self.n_head = int(keys["attention.head_count"])
        self.n_kv_head = int(keys["attention.head_count_kv"])
        self.head_dim = int(keys["attention.key_length"])
        self.eps = float(keys["attention.layer_norm_rms_epsilon"])
        self.is_interleaved = keys["architecture"] == "llama"  # pairs (2i, 2i + 1) in RoPE

    @classmethod
    def from_file(cls, path: Path) -> FloatModel:
        """The model of a file, every tensor dequantised."""
        reader = gguf.GGUFReader(path)
        arch = str(reader.fields["general.architecture"].contents())
        keys: dict[str, Any] = {
            name.removeprefix(f"{arch}."): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(f"{arch}.")
        }
        weights = {
            str(t.name): gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }
        return cls(keys | {"architecture": arch}, weights)

    def with_weights(self, weights: Mapping[str, F64]) -> FloatModel:
        """The same model with other values in some tensors."""
        return FloatModel(self.keys, {**self.weights, **weights})

    def logits(self, tokens: npt.ArrayLike, rounding: Rounding = EXACT) -> F64:
        """Logits (n_tokens, n_vocab) after every token of a text."""
        w = self.weights
        x = w["token_embd.weight"][np.asarray(tokens)]
        turn = self._rotation(len(x))
        for layer in range(int(self.keys["block_count"])):
            name = f"blk.{layer}."
            x = x + self._attention(name, x, turn, rounding)
            normed = rounding.inputs(self._norm(x, w[name + "ffn_norm.weight"]))
            gate = normed @ w[name + "ffn_gate.weight"].T
            up = normed @ w[name + "ffn_up.weight"].T
            gated = rounding.inputs(gate / (1.0 + np.exp(-gate)) * up)
            x = x + gated @ w[name + "ffn_down.weight"].T
        normed = rounding.inputs(self._norm(x, w["output_norm.weight"]))
        return normed @ w.get("output.weight", w["token_embd.weight"]).T

    def _norm(self, x: F64, weight: F64) -> F64:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def _rotation(self, n_tokens: int) -> tuple[F64, F64]:
        """cos and sin, each (n_tokens, 1, head_dim / 2)."""
        pairs = np.arange(0, self.head_dim, 2) / self.head_dim
        angles = np.arange(n_tokens)[:, None] * float(self.keys["rope.freq_base"]) ** -pairs
        return np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def _rotate(self, x: F64, turn: tuple[F64, F64]) -> F64:
        cosine, sine = turn
        half = self.head_dim // 2
        even, odd = (
            (slice(0, None, 2), slice(1, None, 2))
            if self.is_interleaved
            else (slice(0, half), slice(half, None))
        )
        out = np.empty_like(x)
        out[..., even] = x[..., even] * cosine - x[..., odd] * sine
        out[..., odd] = x[..., even] * sine + x[..., odd] * cosine
        return out

    def _attention(self, name: str, x: F64, turn: tuple[F64, F64], rounding: Rounding) -> F64:
        """What attention adds to the hidden rows `x`."""
        w, n = self.weights, len(x)
        normed = rounding.inputs(self._norm(x, w[name + "attn_norm.weight"]))
        heads: dict[str, F64] = {}
        for letter in "qkv":
            rows = normed @ w[f"{name}attn_{letter}.weight"].T
            rows = rows + w.get(f"{name}attn_{letter}.bias", 0.0)
            heads[letter] = rows.reshape(n, -1, self.head_dim)
            if letter != "v":
                norm = w.get(f"{name}attn_{letter}_norm.weight")
                if norm is not None:
                    heads[letter] = self._norm(heads[letter], norm)
                heads[letter] = self._rotate(heads[letter], turn)
        q = rounding.queries(heads["q"] * (LOG2_E / np.sqrt(self.head_dim)))
        k, v = rounding.keys(heads["k"]), rounding.values(heads["v"])
        hidden = np.triu(np.full((n, n), -np.inf), 1)
        mixed = np.empty_like(q)
        for head in range(self.n_head):
            kv_head = head * self.n_kv_head // self.n_head
            scores = q[:, head] @ k[:, kv_head].T + hidden
            weights = np.exp2(scores - scores.max(1, keepdims=True))
            mixed[:, head] = weights @ v[:, kv_head] / weights.sum(1, keepdims=True)
        return rounding.inputs(mixed.reshape(n, -1)) @ w[name + "attn_output.weight"].T
