"""Timelines of random K, V and queries over separate pages, for tests of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels as K

F32 = NDArray[np.float32]
LEVELS = K.isa_levels()
BEST = LEVELS[-1]
PAGE = K.PAGE_TOKENS


def bits(x: F32) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32)


def hadamard(x: NDArray[Any]) -> NDArray[Any]:
    """The transform of rule 4 over the last axis, in the type of `x`."""
    d = x.shape[-1]
    y, step = x, 1
    while step < d & -d:
        pairs = y.reshape(*x.shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([first + second, first - second], -2).reshape(x.shape)
        step *= 2
    return y


def kv8(x: F32) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Rule 6 over the last axis; every operation here is the IEEE one, so bits can be compared."""
    with np.errstate(all="ignore"):
        d = (np.abs(x).max(-1) / np.float32(127)).astype(np.float16)
        d[~np.isfinite(d)] = np.nan
        scaled = x * (np.float32(1) / d.astype(np.float32))[..., None]
    q = np.clip(np.rint(np.where(d[..., None] > 0, scaled, 0)), -127, 127)
    return q.astype(np.int8), d


@dataclass
class Timeline:
    """One sequence with its own pages: takes qkv rows in chunks, keeps the outputs."""

    shape: K.PageShape
    n_head: int
    pages_max: int
    rope: K.RopeTable | None = None
    norm: K.Vector | None = None
    scale: float = 0.0
    layer: int = 0
    done: int = 0
    norms_rotated: bool = False
    memory: NDArray[np.uint8] = field(init=False)
    addresses: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        size = self.shape.payload_bytes
        raw = np.zeros(self.pages_max * size + 64, np.uint8)
        skip = -K.address_of(raw) % 64
        self.memory = raw[skip : skip + self.pages_max * size].reshape(self.pages_max, size)
        first = K.address_of(raw) + skip
        self.addresses = np.arange(self.pages_max, dtype=np.uint64) * size + np.uint64(first)
        self.scale = self.scale or self.shape.layer(0).head_dim ** -0.5

    def pages_for(self, tokens: int) -> int:
        return -(-(self.done + tokens) // PAGE)

    def head_page(self, page: int, head: int) -> dict[str, NDArray[np.generic]]:
        d = self.shape.layer(0).head_dim
        start = self.shape.layer(self.layer).page_offset + head * self.shape.layer(0).head_bytes
        raw = self.memory[page, start : start + self.shape.layer(0).head_bytes]
        k, ks, v, vs = np.split(raw, np.cumsum([256 * d, 16 * d, 256 * d]))
        return {
            "k": k.view(np.int8).reshape(16, d // 4, 16, 4).transpose(0, 2, 1, 3).reshape(256, d),
            "ks": ks.view(np.float16).reshape(16, d // 32, 16).transpose(0, 2, 1).reshape(256, -1),
            "v": v.view(np.int8).reshape(64, d, 4).transpose(0, 2, 1).reshape(256, d),
            "vs": vs.view(np.float16),
        }

    def dequantised(self, head: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """K, as it was before the transform of heads, and V."""
        d = self.shape.layer(0).head_dim
        parts = [self.head_page(p, head) for p in range(-(-self.done // PAGE))]
        k = np.concatenate([p["k"] * np.repeat(p["ks"].astype(float), 32, 1) for p in parts])
        v = np.concatenate([p["v"] * p["vs"].astype(float)[:, None] for p in parts])
        return hadamard(k[: self.done]) / (d & -d), v[: self.done]


class Step:
    """One batch, K and V placed: the next rows of each timeline."""

    def __init__(
        self,
        pool: K.Pool,
        timelines: Sequence[Timeline],
        rows: Sequence[F32],
        kv_rows: K.KvRows | None = None,
    ) -> None:
        one = timelines[0]
        self.pool = pool
        self.timelines = timelines  # own the pages
        self.shape, self.layer, self.n_head = one.shape, one.layer, one.n_head
        self.counts = [len(r) for r in rows]
        self.total = sum(self.counts)
        self.entries = np.array(
            [[n, t.done, t.pages_for(n)] for t, n in zip(timelines, self.counts, strict=True)],
            np.int32,
        )
        used = [t.addresses[: e[2]] for t, e in zip(timelines, self.entries, strict=True)]
        self.addresses: NDArray[np.uint64] = np.concatenate(used)
        self.batch = K.Batch(self.total, len(rows), len(self.addresses))
        self.batch.set(np.zeros(self.total, np.int32), self.entries, self.addresses)
        qkv = K.Rows(self.total, rows[0].shape[1])
        qkv.view(self.total)[:] = np.concatenate(rows)
        self.queries = K.Queries(self.total, self.n_head, self.shape.layer(0).head_dim)
        K.place_kv(
            pool, qkv, self.batch, self.shape, self.layer, self.n_head, one.norm, one.norm, 1e-6,
            one.rope, one.scale, self.queries, kv_rows, norms_rotated=one.norms_rotated,
        )  # fmt: skip
        for t, n in zip(timelines, self.counts, strict=True):
            t.done += n

    def rows(self) -> K.Rows:
        return K.Rows(self.total, self.n_head * self.shape.layer(0).head_dim)

    def attend(self, window: int = 0, sinks: K.Sinks | None = None) -> F32:
        """(tokens, n_head * head_dim), copied."""
        out = self.rows()
        at = self.pool, self.queries, self.batch, self.shape, self.layer
        K.attend(*at, out, window=window, sinks=sinks)
        return out.view(self.total).copy()


def step(
    pool: K.Pool,
    timelines: Sequence[Timeline],
    rows: Sequence[F32],
    window: int = 0,
    sinks: K.Sinks | None = None,
) -> list[F32]:
    """Writes the next rows of each timeline and returns each timeline's attention rows."""
    one = Step(pool, timelines, rows)
    return np.split(one.attend(window, sinks), np.cumsum(one.counts)[:-1])


def random_qkv(seed: int, tokens: int, n_head: int, n_kv: int, d: int) -> F32:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokens, (n_head + 2 * n_kv) * d)).astype(np.float32)


def append(pool: K.Pool, timeline: Timeline, qkv: F32) -> None:
    """Writes rows in chunks, without attention."""
    for start in range(0, len(qkv), 512):
        Step(pool, [timeline], [qkv[start : start + 512]])


def tail_of(pool: K.Pool, qkv: F32, timeline: Timeline, tail: int) -> F32:
    """Appends everything, attends only for the last `tail` tokens (the scalar level is slow)."""
    append(pool, timeline, qkv[: len(qkv) - tail])
    return step(pool, [timeline], [qkv[len(qkv) - tail :]])[0]
