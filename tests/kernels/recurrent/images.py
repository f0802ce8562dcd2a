"""Entries with state images of their own, and the formula of rule 12 in numpy, value by value.

The formula is that of docs/numerics.md, in binary32: `tests.kernels.binary32` has fma, exp and ln.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import kernels as K
from tests.kernels.binary32 import F32, exp, fma, ln

LEVELS = K.isa_levels()
BEST = LEVELS[-1]
EPS = np.float32(1e-6)
ONE = np.float32(1)


def bits(x: F32) -> NDArray[np.uint32]:
    """Bit patterns, every NaN as one."""
    return np.where(np.isnan(x), np.float32("nan"), x).astype(np.float32).view(np.uint32)


def aligned(size: int) -> NDArray[np.uint8]:
    raw = np.zeros(size + 64, np.uint8)
    skip = -K.address_of(raw) % 64
    return raw[skip : skip + size]


@dataclass
class Weights:
    """The vectors of one layer."""

    conv: F32
    dt_bias: F32
    a: F32
    norm: F32
    vectors: tuple[K.Vector, K.Vector, K.Vector, K.Vector] = field(init=False)

    def __post_init__(self) -> None:
        self.vectors = (
            K.Vector(np.ascontiguousarray(self.conv)),
            K.Vector(self.dt_bias),
            K.Vector(self.a),
            K.Vector(self.norm),
        )


def random_weights(shape: K.StateShape, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    conv = rng.standard_normal((shape.channels, shape.conv_kernel))
    return Weights(
        conv.astype(np.float32),
        rng.standard_normal(shape.n_v_head).astype(np.float32),
        -np.exp(rng.standard_normal(shape.n_v_head)).astype(np.float32),
        (1 + 0.1 * rng.standard_normal(shape.head_dim)).astype(np.float32),
    )


def random_rows(shape: K.StateShape, tokens: int, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    return (2 * rng.standard_normal((tokens, shape.in_width))).astype(np.float32)


class Entry:
    """A session: its image, from zeros on, and the outputs of all its tokens."""

    def __init__(self, shape: K.StateShape, weights: Weights, layer: int = 0) -> None:
        self.shape, self.weights, self.layer = shape, weights, layer
        self.read: NDArray[np.uint8] | None = None
        self.outputs: list[F32] = []

    def state(self) -> tuple[F32, F32]:
        """S and the convolution's inputs of the layer."""
        assert self.read is not None
        shape, layer_bytes = self.shape, self.shape.layer_bytes
        layer = self.read[self.layer * layer_bytes : (self.layer + 1) * layer_bytes]
        values = layer.view(np.float32)
        heads, d = shape.n_v_head, shape.head_dim
        n, taps = heads * d * d, shape.conv_kernel - 1
        conv = values[n : n + taps * shape.channels].reshape(taps, shape.channels)
        return values[:n].reshape(heads, d, d), conv


def step(pool: K.Pool, entries: Sequence[Entry], rows: Sequence[F32]) -> None:
    """One call for the next rows of each entry."""
    one, total = entries[0], sum(len(r) for r in rows)
    shape, page = one.shape, aligned(64)
    counts = [[len(r), 0, -(-len(r) // K.PAGE_TOKENS)] for r in rows]
    n_pages = sum(count[2] for count in counts)
    batch = K.Batch(total, len(entries), n_pages)
    batch.set(
        np.zeros(total, np.int32),
        np.array(counts, np.int32),
        np.full(n_pages, K.address_of(page), np.uint64),
    )
    writes = [aligned(shape.image_bytes) for _ in entries]
    for image in writes:
        image[:] = 0xFF
    reads = [0 if e.read is None else K.address_of(e.read) for e in entries]
    batch.set_states(
        np.array(reads, np.uint64), np.array([K.address_of(w) for w in writes], np.uint64)
    )
    projected, out = K.Rows(total, shape.in_width), K.Rows(total, shape.value_width)
    projected.view(total)[:] = np.concatenate(rows)
    conv, dt_bias, a, norm = one.weights.vectors
    K.delta_net(pool, projected, batch, shape, one.layer, conv, dt_bias, a, norm, float(EPS), out)
    made = np.split(out.view(total).copy(), np.cumsum([len(r) for r in rows])[:-1])
    for entry, image, result in zip(entries, writes, made, strict=True):
        entry.read = image
        entry.outputs.append(result)


def run(
    pool: K.Pool, shape: K.StateShape, weights: Weights, rows: F32, cuts: Sequence[int] = ()
) -> tuple[F32, NDArray[np.uint8]]:
    """Outputs and image of a prompt that is cut into steps at `cuts`."""
    entry = Entry(shape, weights)
    for part in np.split(rows, list(cuts)):
        step(pool, [entry], [part])
    assert entry.read is not None
    return np.concatenate(entry.outputs), entry.read


# --- the formula


def sigmoid(x: F32) -> F32:
    return ONE / (ONE + exp(-x))


def silu(x: F32) -> F32:
    return x / (ONE + exp(-x))


def softplus(x: F32) -> F32:
    low = np.minimum(x, np.float32(20))
    return np.where(x > 20, x, np.array([ln(v) for v in ONE + exp(low)], np.float32))


def squares(x: F32) -> np.float32:
    """The sum of rule 3."""
    lane = np.zeros(64, np.float32)
    for i in range(0, len(x), 64):
        part = x[i : i + 64]
        lane[: len(part)] = fma(part, part, lane[: len(part)])
    for width in (32, 16, 8, 4, 2, 1):
        lane = lane[:width] + lane[width : 2 * width]
    return lane[0]


def unit(x: F32) -> F32:
    return x * np.float32(ONE / np.sqrt(squares(x) + EPS))


def columns(s: F32, x: F32) -> F32:
    """The product of every column of a state with x: chains of 32, folded in pairs."""
    chains: list[F32] = []
    for first in range(0, len(x), 32):
        chain = np.zeros(s.shape[1], np.float32)
        for i in range(first, first + 32):
            chain = fma(s[i], x[i], chain)
        chains.append(chain)
    while len(chains) > 1:
        pairs = [chains[i] + chains[i + 1] for i in range(0, len(chains) - 1, 2)]
        chains = pairs + ([chains[-1]] if len(chains) % 2 else [])
    return chains[0]


def formula(shape: K.StateShape, w: Weights, rows: F32) -> tuple[F32, F32, F32]:
    """Outputs, S and the convolution's inputs after `rows`, from zeros."""
    d, n_k, n_v, taps = shape.head_dim, shape.n_k_head, shape.n_v_head, shape.conv_kernel
    s = np.zeros((n_v, d, d), np.float32)
    before = np.zeros((taps - 1, shape.channels), np.float32)
    inputs = np.concatenate([before, rows[:, : shape.channels]])
    out = np.zeros((len(rows), n_v, d), np.float32)
    root = ONE / np.sqrt(np.float32(d))
    for t, row in enumerate(rows):
        c = inputs[t] * w.conv[:, 0]
        for j in range(1, taps):
            c = fma(inputs[t + j], w.conv[:, j], c)
        q, k, v = np.split(silu(c).reshape(-1, d), [n_k, 2 * n_k])
        z, beta, alpha = np.split(row[shape.channels :], [n_v * d, n_v * d + n_v])
        decay = exp(w.a * softplus(alpha + w.dt_bias))
        share, gate = sigmoid(beta), silu(z).reshape(n_v, d)
        for h in range(n_v):
            of = h // shape.key_run % n_k
            key, query = unit(k[of]), unit(q[of])
            delta = (v[h] - decay[h] * columns(s[h], key)) * share[h]
            for i in range(d):
                s[h, i] = fma(delta, key[i], decay[h] * s[h, i])
            o = columns(s[h], query) * root
            factor = ONE / np.sqrt(squares(o) / np.float32(d) + EPS)
            out[t, h] = ((o * factor) * w.norm) * gate[h]
    return out.reshape(len(rows), -1), s, inputs[len(rows) :]
