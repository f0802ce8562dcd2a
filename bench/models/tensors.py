"""Random tensors and activations that are more extreme than those of models, for comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels as k

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
BLOCK_BYTES = {
    "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "iq4_nl": 18,
    "q4_k": 144, "q5_k": 176, "q6_k": 210, "mxfp4": 17, "iq4_xs": 136,
    "q3_k": 110, "q2_k": 84, "iq3_xxs": 98, "iq3_s": 110, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82,
    "iq1_s": 50, "iq1_m": 56,
}  # fmt: skip
CODEBOOK_KINDS = ("iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m")
SUPERBLOCK_KINDS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", *CODEBOOK_KINDS)
# Where a block's scales stand, if not at its start alone: d, then m or dmin. Of iq1_m it is where
# four words begin, whose upper four bits are d.
SCALES_AT = {
    "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q3_k": (108,),
    "q2_k": (80, 82), "iq1_m": (48,),
}  # fmt: skip


def block_width(kind: str) -> int:
    """How many weights a block of a file has; of floats 1."""
    if kind not in BLOCK_BYTES:
        return 1
    return 256 if kind in SUPERBLOCK_KINDS else 32


def scale_bytes(kind: str) -> NDArray[np.bool_]:
    """Which bytes of a block are those of its scales and minimum."""
    found = np.zeros(BLOCK_BYTES[kind], np.bool_)
    for at in SCALES_AT.get(kind, (0,)):
        found[at : at + (1 if kind == "mxfp4" else 2)] = True
    if kind == "iq1_m":
        found[48:] = [False, True] * 4
    return found


def put_scales(
    kind: str, blocks: U8, values: NDArray[np.float16] | np.float16, which: int = 0
) -> None:
    """Sets d, or the minimum if `which` is 1, of blocks [..., byte]; values as many as these, or
    one for all."""
    at = SCALES_AT.get(kind, (0,))[which]
    halves = np.broadcast_to(values, blocks.shape[:-1])
    if kind != "iq1_m":
        raw = np.frombuffer(halves.tobytes(), np.uint8)
        blocks[..., at : at + 2] = raw.reshape(*halves.shape, 2)
        return
    bits = halves.copy().view(np.uint16)
    for i in range(4):
        upper = (bits >> 4 * i & 15).astype(np.uint8) << 4
        blocks[..., at + 2 * i + 1] = blocks[..., at + 2 * i + 1] & 15 | upper


def aligned(count: int) -> U8:
    raw = np.zeros(count + 64, np.uint8)
    start = -k.address_of(raw) % 64
    return raw[start : start + count]


def random_tensor(kind: str, rows: int, cols: int, rng: np.random.Generator) -> U8:
    """Bytes of a legal tensor, more extreme than a quantiser makes them: every weight pattern,
    scales of both signs, some subnormal, some zero."""
    if kind in ("f16", "bf16", "f32"):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        values[rng.random((rows, cols)) < 0.02] *= np.float32(1e-6)
        if kind == "f16":
            return values.astype(np.float16).view(np.uint8).reshape(-1)
        bits = values.view(np.uint32)
        return (
            (bits >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
            if kind == "bf16"
            else (values.view(np.uint8).reshape(-1))
        )
    stride = BLOCK_BYTES[kind]
    count = rows * cols // block_width(kind)
    blocks = rng.integers(0, 256, (count, stride), dtype=np.uint8)
    if kind == "mxfp4":  # bytes e: those of models, and 0 to 2 for none and for the smallest scale
        draw = rng.random(len(blocks))
        blocks[:, 0] = 115 + blocks[:, 0] % 8
        blocks[draw < 0.1, 0] %= 3
        return blocks.reshape(-1)
    for which in range(len(SCALES_AT.get(kind, (0,)))):
        scales = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        scales[rng.random(len(blocks)) < 0.05] = np.float16(2.0**-23)
        scales[rng.random(len(blocks)) < 0.05] = np.float16(0)
        put_scales(kind, blocks, scales, which)
    return blocks.reshape(-1)


def packed(pool: k.Pool, kind: str, tensor: U8, rows: int, cols: int) -> k.Matrix:
    buffer = aligned(k.packed_bytes(kind, rows, cols))
    k.pack(pool, kind, rows, cols, tensor, buffer)
    return k.Matrix(kind, rows, cols, buffer)


def random_values(tokens: int, cols: int, rng: np.random.Generator) -> F32:
    """Activations with outliers, a zero block, a block below the quantiser's floor, and -0."""
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    x[:, ::61] *= np.float32(30)
    x[0, :32] = 0
    x[tokens // 2, cols - 32 :] = np.float32(1e-32)
    x[tokens - 1, 3] = np.float32(-0.0)
    return x


def hadamard(x: NDArray[Any]) -> NDArray[np.float64]:
    """Each head (the last axis) times the Hadamard matrix of the largest power of two in its size:
    twice gives the head times that power."""
    width = x.shape[-1] & -x.shape[-1]
    i = np.arange(width)
    signs = 1.0 - 2.0 * (np.bitwise_count(i[:, None] & i) % 2)
    return (x.reshape(-1, width) @ signs).reshape(x.shape)
