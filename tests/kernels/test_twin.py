"""A twin of the arithmetic, written from docs/numerics.md alone: the kernels give its bits.

Values are Python floats that hold binary32 numbers. Sums, products, quotients and roots are rounded
right by way of binary64; fma is rounded once from the exact rational number. The section
numbers are those of the document.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

import kernels as K
from tests.kernels.timelines import Timeline, step

F32 = NDArray[np.float32]
NAN = "7FC00000"

# --- the primitives


def rn(x: float) -> float:
    """A binary64 value rounded to binary32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def value(pattern: int | str) -> float:
    number = int(pattern, 16) if isinstance(pattern, str) else pattern & 0xFFFFFFFF
    return float(struct.unpack("<f", struct.pack("<I", number))[0])


def fma(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    near = float(exact)
    if Fraction(near) != exact:  # round to odd, so that the second rounding is right
        other = math.nextafter(near, math.inf if Fraction(near) < exact else -math.inf)
        odd = struct.unpack("<Q", struct.pack("<d", near))[0] & 1
        near = near if odd else other
    return rn(near)


def add(a: float, b: float) -> float:
    return rn(a + b)


def mul(a: float, b: float) -> float:
    return rn(a * b)


def div(a: float, b: float) -> float:
    return rn(a / b)


def largest_bits(x: Sequence[float]) -> int:
    return max(bits(v) & 0x7FFFFFFF for v in x)


def horner(x: float, *patterns: str) -> float:
    p = value(patterns[0])
    for pattern in patterns[1:]:
        p = fma(p, x, value(pattern))
    return p


# --- 5: exp and ln


def scaled(p: float, t: float) -> float:
    return value(bits(p) + ((bits(t) - 0x4B400000) << 23))


def exp2(x: float) -> float:
    t = add(x, value("4B400000"))
    r = add(x, -add(t, -value("4B400000")))
    p = horner(
        r, "3920FDDE", "3AAF9F29", "3C1D96A6", "3D635774", "3E75FDEE", "3F317218", "3F800000"
    )
    return 0.0 if x < -126 else scaled(p, t)


def exp(x: float) -> float:
    t = fma(x, value("3FB8AA3B"), value("4B400000"))
    n = add(t, -value("4B400000"))
    r = fma(n, value("B5BFBE8E"), fma(n, value("BF317200"), x))
    p = horner(r, "39506967", "3AB743CE", "3C088908", "3D2AA9C1", "3E2AAAAA", "3F000000")
    p = add(fma(p, mul(r, r), r), 1.0)
    return 0.0 if x < -87 else math.inf if x > 88 else scaled(p, t)


def ln(x: float) -> float:
    b = (bits(x) - 0x3F3504F3) & 0xFFFFFFFF
    e = float((b - (1 << 32) if b >> 31 else b) >> 23)
    z = add(value((b & 0x007FFFFF) + 0x3F3504F3), -1.0)
    p = horner(
        z, "3D9021BB", "BDEBD1B8", "3DEF251A", "BDFE5D4F", "3E11E9BF", "BE2AAE50", "3E4CCEAC",
        "BE7FFFFC", "3EAAAAAA",
    )  # fmt: skip
    z2 = mul(z, z)
    y = fma(e, value("B95E8083"), mul(mul(p, z), z2))
    return fma(e, value("3F318000"), add(z, fma(z2, value("BF000000"), y)))


def gelu(x: float) -> float:
    w = mul(x, fma(mul(x, x), value("3D922279"), value("3FCC422A")))
    return div(x, add(1.0, exp(min(max(-w, -89.0), 89.0))))  # 0 or infinity from there on


# --- 1: activations


def quantise(x: Sequence[float]) -> tuple[list[int], float] | None:
    """(q, t) of a group; None if it is nonfinite."""
    a = largest_bits(x)
    if a >= 0x6F800000:
        return None
    if a < 0x12800000:
        return [0] * len(x), 1.0
    t = value((bits(mul(value(a), value("3C010204"))) + 0x1FFFF) & 0xFFFE0000)
    r = div(1.0, t)
    return [round(mul(v, r)) for v in x], t


def groups(row: F32) -> list[list[float]]:
    padded = np.zeros(-(-len(row) // 32) * 32, np.float32)
    padded[: len(row)] = row
    return padded.reshape(-1, 32).tolist()


# --- 2: matrix products


def product_q4_0(row: F32, blocks: list[tuple[float, list[int]]]) -> float:
    y: float | None = None
    for first in range(0, len(blocks), 32):
        acc = 0.0
        for x, (d, n) in list(zip(groups(row), blocks, strict=True))[first : first + 32]:
            found = quantise(x)
            if found is None:
                return value(NAN)
            q, t = found
            integer = sum((a - 8) * b for a, b in zip(n, q, strict=True))
            acc = fma(float(integer), d * t, acc)
        y = acc if y is None else add(y, acc)
    assert y is not None
    return y


def product_float(row: F32, weights: F32) -> float:
    y: float | None = None
    for first in range(0, len(row), 1024):
        acc = 0.0
        for w, x in zip(weights[first:][:1024].tolist(), row[first:][:1024].tolist(), strict=True):
            acc = fma(w, x, acc)
        y = acc if y is None else add(y, acc)
    assert y is not None
    return y


def packed(pool: K.Pool, kind: str, n_rows: int, cols: int, tensor: bytes) -> K.Matrix:
    size = K.packed_bytes(kind, n_rows, cols)
    raw = np.zeros(size + 64, np.uint8)
    skip = -K.address_of(raw) % 64
    buffer = raw[skip : skip + size]
    K.pack(pool, kind, n_rows, cols, np.frombuffer(tensor, np.uint8), buffer)
    return K.Matrix(kind, n_rows, cols, buffer)


def linear(pool: K.Pool, kind: str, x: F32, n_rows: int, tensor: bytes) -> F32:
    tokens, cols = x.shape
    matrix = packed(pool, kind, n_rows, cols, tensor)
    rows, out = K.Rows(tokens, cols), K.Rows(tokens, n_rows)
    rows.view(tokens)[:] = x
    quantised = K.Activations(tokens, cols, keep_float=True)
    K.quantise(pool, rows, tokens, quantised)
    K.linear(pool, quantised, [matrix], [None], tokens, out)
    return out.view(tokens).copy()


def activations(seed: int, tokens: int, cols: int) -> F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    x[:, ::41] *= np.float32(50)
    x[0, :32] = np.float32(2.0**-95)  # a zero group
    x[0, 32:64] = np.float32(1.9921875)  # just below the bound of the next scale
    return x


def assert_bits(got: F32, wanted: list[list[float]]) -> None:
    assert [[bits(v) for v in row] for row in got.tolist()] == [
        [bits(v) for v in row] for row in wanted
    ]


@pytest.mark.parametrize("cols", [96, 1056])
def test_q4_0(pool: K.Pool, cols: int) -> None:
    rng = np.random.default_rng(cols)
    x = activations(1, 3, cols)
    x[2, 40] = np.float32(2.0**96)  # nonfinite: the whole row
    rows: list[list[tuple[float, list[int]]]] = []
    tensor = b""
    for _ in range(3):
        row: list[tuple[float, list[int]]] = []
        for b in range(cols // 32):
            d = np.float16(0 if b == 1 else rng.standard_normal() * 0.05)
            n = rng.integers(0, 16, 32)
            tensor += d.tobytes() + (n[:16] | n[16:] << 4).astype(np.uint8).tobytes()
            row.append((float(d), n.tolist()))
        rows.append(row)
    assert_bits(
        linear(pool, "q4_0", x, 3, tensor), [[product_q4_0(t, row) for row in rows] for t in x]
    )


def test_f16(pool: K.Pool) -> None:
    x = activations(2, 2, 1056)
    w = (np.random.default_rng(3).standard_normal((3, 1056)) * 0.1).astype(np.float16)
    wanted = [[product_float(t, row.astype(np.float32)) for row in w] for t in x]
    assert_bits(linear(pool, "f16", x, 3, w.tobytes()), wanted)


def test_scaled_embeddings(pool: K.Pool) -> None:
    rng, cols = np.random.default_rng(6), 96
    d = (rng.standard_normal((3, cols // 32)) * 0.05).astype(np.float16)
    n = rng.integers(0, 16, (3, cols // 32, 32))
    tensor = b"".join(
        one.tobytes() + (q[:16] | q[16:] << 4).astype(np.uint8).tobytes()
        for row, of in zip(d, n, strict=True)
        for one, q in zip(row, of, strict=True)
    )
    matrix, out = packed(pool, "q4_0", 3, cols, tensor), K.Rows(3, cols)
    for scale in (1.0, math.sqrt(cols), 0.3):
        K.embed(pool, matrix, np.array([2, 0, 2], np.int32), out, scale)
        wanted = [
            [
                mul(mul(float(q - 8), float(one)), rn(scale))
                for one, of in zip(d[t], n[t].tolist(), strict=True)
                for q in of
            ]
            for t in (2, 0, 2)
        ]
        assert_bits(out.view(3), wanted)


def test_the_gate_of_gelu(pool: K.Pool) -> None:
    """Of matrices without weights, so that each product is its bias."""
    gate = np.concatenate([np.linspace(-12, 12, 481), 0.1 * np.arange(-9, 9)]).astype(np.float32)
    gate[:7] = [1e-20, -1e-20, 3e-39, 1e9, -1e9, -9.5, 40.0]
    up = np.random.default_rng(8).standard_normal(len(gate)).astype(np.float32)
    zero = packed(pool, "q4_0", len(gate), 32, bytes(18 * len(gate)))
    x, out = K.Activations(1, 32), K.Rows(1, len(gate))
    K.quantise(pool, K.Rows(1, 32), 1, x)
    K.linear_gated(pool, x, zero, zero, K.Vector(gate), K.Vector(up), 1, out, "gelu")
    assert_bits(
        out.view(1),
        [[mul(gelu(add(0.0, g)), u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]],
    )


# --- 3: RMS norm


def rms_norm(x: list[float], w: list[float], eps: float) -> list[float]:
    lane = [0.0] * 64
    for i, v in enumerate(x):
        lane[i % 64] = fma(v, v, lane[i % 64])
    for width in (32, 16, 8, 4, 2, 1):
        lane = [add(lane[i], lane[i + width]) for i in range(width)]
    r = div(1.0, rn(math.sqrt(add(div(lane[0], float(len(x))), rn(eps)))))
    return [mul(mul(a, r), b) for a, b in zip(x, w, strict=True)]


def test_rms_norm(pool: K.Pool) -> None:
    x, w = activations(4, 1, 300)[0], activations(5, 1, 300)[0]
    rows, out = K.Rows(1, 300), K.Rows(1, 300)
    rows.view(1)[:] = x
    K.rmsnorm(pool, rows, K.Vector(w), 1e-5, 1, out)
    assert_bits(out.view(1), [rms_norm(x.tolist(), w.tolist(), 1e-5)])


@pytest.mark.parametrize("width", [1, 48, 300, 1152])
def test_the_norm_of_a_branch(pool: K.Pool, width: int) -> None:
    rng = np.random.default_rng(width)
    x, w, before = rng.standard_normal((3, width)).astype(np.float32)
    rows, out = K.Rows(1, width), K.Rows(1, width)
    rows.view(1)[:], out.view(1)[:] = x, before
    K.norm_add(pool, rows, K.Vector(w), 1e-6, 1, out)
    normed = rms_norm(x.tolist(), w.tolist(), 1e-6)
    assert_bits(out.view(1), [[add(a, b) for a, b in zip(before.tolist(), normed, strict=True)]])


# --- 4: the transform of heads


def transformed(x: list[float]) -> list[float]:
    n = len(x) & -len(x)
    x, step = list(x), 1
    while step < n:
        for i in range(len(x)):
            if not i % n & step:
                x[i], x[i + step] = add(x[i], x[i + step]), add(x[i], -x[i + step])
        step *= 2
    return x


# --- 6 and 7: K, V and attention


def kv8(x: list[float]) -> tuple[list[int], float]:
    a = value(largest_bits(x))
    d = float(np.float16(np.float32(div(a, 127.0))))
    if d == 0:
        return [0] * len(x), 0.0
    inverse = div(1.0, d)
    return [round(min(max(mul(v, inverse), -127.0), 127.0)) for v in x], d


def partial(
    q: list[float], keys: list[list[float]], values: list[list[float]], factor: float
) -> tuple[float, float, list[float]]:
    """(m, l, o) of the visible tokens of one page."""
    found = [quantise([mul(v, factor) for v in q[b : b + 32]]) for b in range(0, len(q), 32)]
    scores: list[float] = []
    for key in keys:
        s = 0.0
        for b, group in enumerate(found):
            assert group is not None
            k, d = kv8(key[32 * b : 32 * b + 32])
            s = fma(float(sum(a * c for a, c in zip(k, group[0], strict=True))), d * group[1], s)
        scores.append(s)
    m = float(math.ceil(max(scores)))
    p = [exp2(add(s, -m)) for s in scores]
    denominator = rn(float(sum(round(v * 2.0**22) for v in p))) * 2.0**-22
    quantised = [kv8(v) for v in values]
    w = [mul(a, d) for a, (_, d) in zip(p, quantised, strict=True)]
    b = largest_bits(w)
    if b < 0x12800000:
        return m, denominator, [0.0] * len(values[0])
    u = ((b + 0x200) >> 23) - 140
    integer = [round(v * 2.0**-u) for v in w]
    sums = [
        sum(a * v[d] for a, (v, _) in zip(integer, quantised, strict=True)) for d in range(len(q))
    ]
    return m, denominator, [rn(float(s)) * 2.0**u for s in sums]


def sunk(sink: float, d: int) -> tuple[float, float, list[float]]:
    """(m, l, o) of a sink."""
    z = mul(sink, value("3FB8AA3B"))
    m = float(math.ceil(z))
    return m, rn(float(round(exp2(add(z, -m)) * 2.0**22))) * 2.0**-22, [0.0] * d


def folded(
    a: tuple[float, float, list[float]], b: tuple[float, float, list[float]]
) -> tuple[float, float, list[float]]:
    small, big = (a, b) if b[0] > a[0] else (b, a)
    k = exp2(add(small[0], -big[0]))
    o = [fma(x, k, y) for x, y in zip(small[2], big[2], strict=True)]
    return big[0], fma(small[1], k, big[1]), o


@pytest.mark.parametrize(
    ("d", "length", "size", "window", "sink"),
    [
        (96, 40, 1.0, 0, None),
        (64, 300, 4.0, 0, None),
        (64, 300, 4.0, 0, 21.7),
        (64, 300, 1.0, 128, -0.3),
        (32, 530, 2.0, 277, 1.5),
        (32, 530, 2.0, 7, None),
    ],
)
def test_attention(
    pool: K.Pool, d: int, length: int, size: float, window: int, sink: float | None
) -> None:
    qkv = (np.random.default_rng(length).standard_normal((length, 3 * d)) * size).astype(np.float32)
    qkv[5, d : 2 * d] *= np.float32(30)
    qkv[7, 2 * d :] = 0
    timeline = Timeline(K.PageShape(1, 1, d), 1, 3)
    sinks = None if sink is None else K.Sinks(np.array([sink], np.float32))
    out = step(pool, [timeline], [qkv], window, sinks)[0][-1:]
    begin = length - window if window else 0
    factor = rn(1.4426950408889634 * timeline.scale / (d & -d))
    pages = [
        partial(
            transformed(qkv[-1, :d].tolist()),
            [transformed(k) for k in qkv[max(first, begin) : first + 256, d : 2 * d].tolist()],
            qkv[max(first, begin) : first + 256, 2 * d :].tolist(),
            factor,
        )
        for first in range(begin // 256 * 256, length, 256)
    ]
    whole = pages[0]
    for page in pages[1:]:
        whole = folded(whole, page)
    if sink is not None:
        whole = folded(whole, sunk(rn(sink), d))
    r = div(1.0, whole[1])
    assert_bits(out, [[mul(v, r) for v in whole[2]]])


# --- 10: sampling


def philox(seed: int, position: int, draw: int) -> int:
    key = [seed & 0xFFFFFFFF, seed >> 32]
    c = [position & 0xFFFFFFFF, position >> 32, draw, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0]


def sampled(x: list[float], spec: dict[str, float], seed: int, position: int) -> int:
    temperature, top_p, min_p = (rn(spec[name]) for name in ("temperature", "top_p", "min_p"))
    top = max(x)
    w = [exp(div(add(v, -top), temperature)) for v in x]
    integer = [round(v * 2.0**30) for v in w]
    ranked = sorted((i for i in range(len(x)) if integer[i]), key=lambda i: (-x[i], i))
    if spec["top_k"]:
        ranked = ranked[: int(spec["top_k"])]
    if top_p < 1:
        needed = sum(integer[i] for i in ranked) * int(top_p * 2.0**32) >> 32
        total, count = 0, 0
        while count < len(ranked) and (count == 0 or total < needed):
            total += integer[ranked[count]]
            count += 1
        ranked = ranked[:count]
    kept = sorted(i for i in ranked if w[i] >= min_p)
    target = sum(integer[i] for i in kept) * philox(seed, position, 0) >> 32
    total = 0
    for i in kept:
        total += integer[i]
        if total > target:
            return i
    raise AssertionError("the sum exceeds every share of it")


@pytest.mark.parametrize("top_k", [0, 12])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_sampling(pool: K.Pool, top_k: int, top_p: float, min_p: float) -> None:
    x = (np.random.default_rng(9).standard_normal(150) * 3).astype(np.float32)
    x[40:44] = x[17]  # ties
    rows = K.Rows(1, len(x))
    rows.view(1)[:] = x
    for seed in (1, 2**40 + 5, 77):
        spec = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        given = K.SampleSpec(
            temperature=0.8,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=9,
            logprobs=0,
        )
        got = K.sample(pool, rows, [given])[0]
        assert got.token == sampled(x.tolist(), spec, seed, 9)
        top = float(x.max())
        total = sum(round(exp(add(v, -top)) * 2.0**30) for v in x.tolist())
        log_sum = ln(rn(float(total)) * 2.0**-30)
        assert bits(got.logprob) == bits(add(add(float(x[got.token]), -top), -log_sum))
