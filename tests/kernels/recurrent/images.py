"""Entries with state images of their own, and the formulas of recurrent mixers in numpy.

They are those of rules 12, 14 and 15 of docs/numerics.md, value by value, in binary32:
`tests.kernels.binary32` has fma, exp and ln.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

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


class Mixer(Protocol):
    """The weights of one layer."""

    def mix(
        self,
        pool: K.Pool,
        projected: K.Rows,
        batch: K.Batch,
        shape: K.StateShape,
        layer: int,
        out: K.Rows,
    ) -> None: ...


@dataclass
class Weights:
    """Those of a delta network."""

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

    def mix(
        self,
        pool: K.Pool,
        projected: K.Rows,
        batch: K.Batch,
        shape: K.StateShape,
        layer: int,
        out: K.Rows,
    ) -> None:
        K.delta_net(pool, projected, batch, shape, layer, *self.vectors, float(EPS), out)


@dataclass
class Mamba2Weights:
    """Those of a layer of Mamba-2."""

    conv: F32
    conv_bias: F32 | None
    dt_bias: F32
    a: F32
    d: F32
    norm: F32 | None

    def mix(
        self,
        pool: K.Pool,
        projected: K.Rows,
        batch: K.Batch,
        shape: K.StateShape,
        layer: int,
        out: K.Rows,
    ) -> None:
        bias = None if self.conv_bias is None else K.Vector(self.conv_bias)
        norm = None if self.norm is None else K.Vector(self.norm)
        heads = (K.Vector(values) for values in (self.dt_bias, self.a, self.d))
        at = pool, projected, batch, shape, layer
        K.mamba2(*at, K.Vector(self.conv), bias, *heads, norm, float(EPS), out)


@dataclass
class ConvWeights:
    """Those of a short convolution."""

    conv: F32

    def mix(
        self,
        pool: K.Pool,
        projected: K.Rows,
        batch: K.Batch,
        shape: K.StateShape,
        layer: int,
        out: K.Rows,
    ) -> None:
        K.short_conv(pool, projected, batch, shape, layer, K.Vector(self.conv), out)


def random_weights(shape: K.StateShape, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    conv = rng.standard_normal((shape.channels, shape.conv_kernel))
    return Weights(
        conv.astype(np.float32),
        rng.standard_normal(shape.n_v_head).astype(np.float32),
        -np.exp(rng.standard_normal(shape.n_v_head)).astype(np.float32),
        (1 + 0.1 * rng.standard_normal(shape.head_dim)).astype(np.float32),
    )


def random_mamba2(
    shape: K.StateShape, seed: int, *, has_bias: bool = True, is_normed: bool = True
) -> Mamba2Weights:
    rng = np.random.default_rng(seed)

    def values(*size: int) -> F32:
        return rng.standard_normal(size).astype(np.float32)

    return Mamba2Weights(
        values(shape.channels, shape.conv_kernel),
        values(shape.channels) if has_bias else None,
        values(shape.n_v_head),
        -np.exp(values(shape.n_v_head)),
        values(shape.n_v_head),
        1 + np.float32(0.1) * values(shape.value_width) if is_normed else None,
    )


def random_conv(shape: K.StateShape, seed: int) -> ConvWeights:
    rng = np.random.default_rng(seed)
    conv = rng.standard_normal((shape.channels, shape.conv_kernel))
    return ConvWeights(conv.astype(np.float32))


def random_rows(shape: K.StateShape, tokens: int, seed: int) -> F32:
    rng = np.random.default_rng(seed)
    return (2 * rng.standard_normal((tokens, shape.in_width))).astype(np.float32)


class Entry:
    """A session: its image, from zeros on, and the outputs of all its tokens."""

    def __init__(self, shape: K.StateShape, weights: Mixer, layer: int = 0) -> None:
        self.shape, self.weights, self.layer = shape, weights, layer
        self.read: NDArray[np.uint8] | None = None
        self.outputs: list[F32] = []

    def state(self) -> tuple[F32, F32]:
        """S and the convolution's inputs of the layer."""
        assert self.read is not None
        shape, layer_bytes = self.shape, self.shape.layer_bytes
        layer = self.read[self.layer * layer_bytes : (self.layer + 1) * layer_bytes]
        values = layer.view(np.float32)
        sizes = shape.n_v_head, shape.state_dim, shape.head_dim
        n, taps = math.prod(sizes), shape.conv_kernel - 1
        conv = values[n : n + taps * shape.channels].reshape(taps, shape.channels)
        return values[:n].reshape(sizes), conv


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
    one.weights.mix(pool, projected, batch, shape, one.layer, out)
    made = np.split(out.view(total).copy(), np.cumsum([len(r) for r in rows])[:-1])
    for entry, image, result in zip(entries, writes, made, strict=True):
        entry.read = image
        entry.outputs.append(result)


def run(
    pool: K.Pool, shape: K.StateShape, weights: Mixer, rows: F32, cuts: Sequence[int] = ()
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


def convolve(weights: F32, x: F32) -> tuple[F32, F32]:
    """The convolution of each token's inputs, from zeros, and the inputs that are left."""
    taps = weights.shape[1]
    inputs = np.concatenate([np.zeros((taps - 1, x.shape[1]), np.float32), x])
    c = inputs[: len(x)] * weights[:, 0]
    for j in range(1, taps):
        c = fma(inputs[j : j + len(x)], weights[:, j], c)
    return c, inputs[len(x) :]


def formula(shape: K.StateShape, w: Weights, rows: F32) -> tuple[F32, F32, F32]:
    """Outputs, S and the convolution's inputs after `rows`, from zeros."""
    d, n_k, n_v = shape.head_dim, shape.n_k_head, shape.n_v_head
    s = np.zeros((n_v, d, d), np.float32)
    convolved, left = convolve(w.conv, rows[:, : shape.channels])
    out = np.zeros((len(rows), n_v, d), np.float32)
    root = ONE / np.sqrt(np.float32(d))
    for t, row in enumerate(rows):
        q, k, v = np.split(silu(convolved[t]).reshape(-1, d), [n_k, 2 * n_k])
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
    return out.reshape(len(rows), -1), s, left


def mamba2_formula(shape: K.StateShape, w: Mamba2Weights, rows: F32) -> tuple[F32, F32, F32]:
    """Outputs, S and the convolution's inputs after `rows`, from zeros."""
    d, keys, groups, heads = shape.head_dim, shape.state_dim, shape.n_k_head, shape.n_v_head
    width = heads * d
    s = np.zeros((heads, keys, d), np.float32)
    convolved, left = convolve(w.conv, rows[:, : shape.channels])
    out = np.zeros((len(rows), width), np.float32)
    for t, row in enumerate(rows):
        c = silu(convolved[t] if w.conv_bias is None else convolved[t] + w.conv_bias)
        x, b, q = np.split(c, [width, width + groups * keys])
        z, dt = np.split(row[shape.channels :], [width])
        size = softplus(dt + w.dt_bias)
        decay = exp(w.a * size)
        gate = silu(z)
        for h in range(heads):
            own, group = slice(h * d, (h + 1) * d), h * groups // heads
            of = slice(group * keys, (group + 1) * keys)
            e = x[own] * size[h]
            for i in range(keys):
                s[h, i] = fma(b[of][i], e, decay[h] * s[h, i])
            out[t, own] = fma(w.d[h], x[own], columns(s[h], q[of])) * gate[own]
        if w.norm is not None:
            for g in range(groups):
                own = slice(g * width // groups, (g + 1) * width // groups)
                o = out[t, own]
                factor = ONE / np.sqrt(squares(o) / np.float32(len(o)) + EPS)
                out[t, own] = (o * factor) * w.norm[own]
    return out, s, left


def conv_formula(w: ConvWeights, rows: F32) -> tuple[F32, F32]:
    """Outputs of a short convolution and the products that it keeps after `rows`, from zeros."""
    b, c, x = np.split(rows, 3, axis=1)
    convolved, left = convolve(w.conv, b * x)
    return c * convolved, left


def check_levels(
    pool: K.Pool, shape: K.StateShape, weights: Mixer, rows: F32, outputs: F32, *states: F32
) -> None:
    """Every level has these outputs and, at the end, these last parts of the state: in one step,
    and token by token."""
    for level in LEVELS:
        K.set_isa(level)
        for cuts in ([], range(1, len(rows))):
            entry = Entry(shape, weights)
            for part in np.split(rows, list(cuts)):
                step(pool, [entry], [part])
            assert np.array_equal(bits(np.concatenate(entry.outputs)), bits(outputs)), level
            for found, wanted in zip(entry.state()[-len(states) :], states, strict=True):
                assert np.array_equal(bits(found), bits(wanted)), level
