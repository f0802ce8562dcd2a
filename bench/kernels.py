"""GB/s and GOPS of kernels against the machine's measured peaks; whole models against llama.cpp.

Peaks are measured first, in the same run and on the same threads: register-only int8 dots and fp32
fma of the instruction set in use, and sequential reads from DRAM. One row per kernel, as a share of
its roof: `gops` of the int8 peak (float matrices: of the fma peak) when the kernel computes (16
tokens and more); `gbps` of the read peak when it streams (few tokens, decode attention), or of the
rate at which the peak of computing would use up what is read, if that is lower.
Rows `model_*` run the same synthetic GGUF through this engine and through llama.cpp in turn.
With AMX-INT8 rows `levels_*` compare it with AVX512-VNNI, in turn.

Each kernel row also prints a hash of its result, so that another result is noticed.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kernels
from bench import report

WINDOW = 128  # gpt-oss
Row = dict[str, float | bool]


def random_packed(pool: Any, kind: str, rows: int, cols: int, rng: np.random.Generator) -> Any:
    """A Matrix of seeded random blocks with sane scales, packed as the engine packs it."""
    from bench.models import synthetic

    source = np.ascontiguousarray(synthetic.random_matrix(rng, kind, rows, cols, 1.0))
    source = source.reshape(-1).view(np.uint8)
    packed = aligned(kernels.packed_bytes(kind, rows, cols))
    kernels.pack(pool, kind, rows, cols, source, packed)
    return kernels.Matrix(kind, rows, cols, packed)


def aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def best_seconds(run: Callable[[], object], budget_s: float) -> tuple[float, float]:
    """(best, median) seconds per call over about `budget_s`."""
    once = report.seconds(run)
    repeats = max(3, min(200, int(budget_s / max(once, 1e-6))))
    times = sorted(report.seconds(run) for _ in range(repeats))
    return times[0], times[len(times) // 2]


def fingerprint(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()[:12]


@dataclass
class Case:
    """One kernel with its inputs made: what to call, what it writes, what it reads and computes."""

    run: Callable[[], None]
    out: np.ndarray
    read_bytes: float
    operations: float


def linear_case(
    pool: Any, rng: np.random.Generator, kind: str, tokens: int, shape: tuple[int, int], cold: int
) -> Case:
    """`tokens` rows times a matrix (rows, cols); `cold` bytes of further matrices take turns with
    it when streaming, so that none of them stays in a cache."""
    rows, cols = shape
    one = kernels.packed_bytes(kind, rows, cols)
    copies = 1 if tokens >= 16 else max(2, cold // one)
    matrices = [random_packed(pool, kind, rows, cols, rng) for _ in range(copies)]
    values = kernels.Rows(tokens, cols)
    values.view(tokens)[:] = rng.standard_normal((tokens, cols), np.float32)
    acts = kernels.Activations(tokens, cols, kind in ("f16", "bf16", "f32"))
    kernels.quantise(pool, values, tokens, acts)
    out = kernels.Rows(tokens, rows)

    def run() -> None:
        for matrix in matrices:
            kernels.linear(pool, acts, [matrix], [None], tokens, out)

    return Case(run, out.view(tokens), one * copies, 2.0 * rows * cols * tokens * copies)


def attention_case(
    pool: Any,
    rng: np.random.Generator,
    group: int,
    context: int,
    queries: int,
    sequences: int,
    window: int = 0,
) -> Case:
    """The last `queries` tokens of `context` ones, for 8 KV heads of 128 and `group` heads each.

    A case with a window has the bytes and operations of one without.
    """
    heads_kv, dim = 8, 128
    shape = kernels.PageShape(1, heads_kv, dim)
    pages = -(-context // 256)
    store = aligned(shape.payload_bytes * pages * sequences)
    n_head = heads_kv * group
    fill = kernels.Rows(256, (n_head + 2 * heads_kv) * dim)
    fill.view(256)[:] = rng.standard_normal(fill.view(256).shape, np.float32)
    rope = kernels.RopeTable("neox", dim, dim, 1e6, None, 1.0, 1.0)
    batch = kernels.Batch(max(256, queries, sequences), sequences, pages * sequences)

    def slot(rows: Any, q: Any) -> None:
        kernels.place_kv(pool, rows, batch, shape, 0, n_head, None, None, 1e-6, rope, dim**-0.5, q)

    q = kernels.Queries(max(256, queries), n_head, dim)
    base = kernels.address_of(store)
    table = base + np.arange(pages * sequences, dtype=np.uint64) * shape.payload_bytes
    for s in range(sequences):
        for p in range(pages):
            mine = table[s * pages : s * pages + p + 1]
            batch.set(np.zeros(256, np.int32), np.array([[256, p * 256, p + 1]], np.int32), mine)
            slot(fill, q)
    start, count = context - queries, queries * sequences
    entries = np.array([[queries, start, pages]] * sequences, np.int32)
    batch.set(np.zeros(count, np.int32), entries, table)
    last = kernels.Rows(count, (n_head + 2 * heads_kv) * dim)
    last.view(count)[:] = 0.5
    wide = kernels.Queries(count, n_head, dim)
    slot(last, wide)
    out = kernels.Rows(count, n_head * dim)

    def run(_keep: np.ndarray = store) -> None:
        kernels.attend(pool, wide, batch, shape, 0, out, window=window)

    seen = sum(start + i + 1 for i in range(queries))
    read_bytes = shape.payload_bytes * (context / 256) * sequences
    return Case(run, out.view(count), read_bytes, 2.0 * 2.0 * seen * dim * n_head * sequences)


def state_batch(shape: Any, tokens: int) -> tuple[Any, list[np.ndarray]]:
    """Tokens of one session, and the images that they read and write."""
    images = [aligned(shape.image_bytes) for _ in range(2)]
    images[0].view(np.float32)[:] = 0.01
    addresses = [np.array([kernels.address_of(image)], np.uint64) for image in images]
    page = np.array([kernels.address_of(images[0])], np.uint64)  # no kernel of the case reads it
    batch = kernels.Batch(tokens, 1, 1)
    batch.set(np.zeros(tokens, np.int32), np.array([[tokens, 0, 1]], np.int32), page)
    batch.set_states(addresses[0], addresses[1])
    return batch, images


def delta_case(pool: Any, rng: np.random.Generator, tokens: int, layers: int) -> Case:
    """`tokens` rows of one session through recurrent layers of Qwen3.5-9B: 16 and 32 heads of 128.

    Each layer reads and writes its own state.
    """
    shape = kernels.StateShape(layers, 16, 32, 128, 4)
    batch, images = state_batch(shape, tokens)
    projected = kernels.Rows(tokens, shape.in_width)
    projected.view(tokens)[:] = rng.standard_normal((tokens, shape.in_width), np.float32)
    out = kernels.Rows(tokens, shape.value_width)
    conv, dt_bias, a, norm = (
        kernels.Vector(rng.standard_normal(size, np.float32))
        for size in (shape.channels * shape.conv_kernel, shape.n_v_head, shape.n_v_head, 128)
    )

    def run(_keep: list[np.ndarray] = images) -> None:
        for layer in range(layers):
            kernels.delta_net(
                pool, projected, batch, shape, layer, conv, dt_bias, a, norm, 1e-6, out
            )

    values = layers * shape.n_v_head * shape.head_dim**2
    return Case(run, out.view(tokens), 2 * 4.0 * values, 7.0 * values * tokens)


def mamba2_case(pool: Any, rng: np.random.Generator, tokens: int, layers: int) -> Case:
    """`tokens` rows of one session through layers of Mamba-2: 64 heads of 64, states of 128 keys.

    Each layer reads and writes its own state, which is as large as one of `delta_case`.
    """
    shape = kernels.StateShape.mamba2(layers, 8, 64, 64, 128, 4)
    batch, images = state_batch(shape, tokens)
    projected = kernels.Rows(tokens, shape.in_width)
    projected.view(tokens)[:] = rng.standard_normal((tokens, shape.in_width), np.float32)
    out = kernels.Rows(tokens, shape.value_width)
    heads, channels = shape.n_v_head, shape.channels
    conv, bias, dt_bias, a, d, norm = (
        kernels.Vector(rng.standard_normal(size, np.float32))
        for size in (4 * channels, channels, heads, heads, heads, shape.value_width)
    )

    def run(_keep: list[np.ndarray] = images) -> None:
        for layer in range(layers):
            at = pool, projected, batch, shape, layer
            kernels.mamba2(*at, conv, bias, dt_bias, a, d, norm, 1e-6, out)

    values = layers * heads * shape.state_dim * shape.head_dim
    return Case(run, out.view(tokens), 2 * 4.0 * values, 5.0 * values * tokens)


def norm_case(pool: Any, rng: np.random.Generator, tokens: int, width: int) -> Case:
    """RMSNorm and quantisation of `tokens` rows."""
    x = kernels.Rows(tokens, width)
    x.view(tokens)[:] = rng.standard_normal((tokens, width), np.float32)
    weight = kernels.Vector(np.ones(width, np.float32))
    acts = kernels.Activations(tokens, width)

    def run() -> None:
        kernels.norm_quantise(pool, x, weight, 1e-6, tokens, acts)

    return Case(run, x.view(tokens), 4.0 * tokens * width, 0.0)


class Bench:
    """Shapes, threads and peaks of one run."""

    def __init__(self, threads: int, quick: bool) -> None:
        self.quick = quick
        self.threads = threads
        self.pool = kernels.Pool(threads)
        self.rng = np.random.default_rng(7)
        self.budget_s = 0.05 if quick else 0.6
        seconds = 0.2 if quick else 1.0
        self.int8_gops = kernels.peak_int8_gops(threads, seconds)
        self.float_gops = kernels.peak_float_gops(threads, seconds)
        self.read_gbps = kernels.peak_read_gbps(threads, repeats=5 if quick else 30)
        self.result: dict[str, Row] = {}

    def record(self, name: str, value: float, unit: str, peak: float, hashed: str) -> None:
        self.result[name] = {
            unit: round(value, 2),
            "peak": round(peak, 1),
            "ratio": round(value / peak, 3) if peak else 0.0,
        }
        share = 100 * value / max(peak, 1e-9)
        print(f"  {name:<28}{value:9.1f} {unit:<5}{share:6.1f} % of {peak:6.1f}   {hashed}")

    def linear(self, kind: str, tokens: int, rows: int, cols: int) -> None:
        cold = (32 if self.quick else 256) * 2**20
        case = linear_case(self.pool, self.rng, kind, tokens, (rows, cols), cold)
        peak = self.float_gops if kind in ("f16", "bf16", "f32") else self.int8_gops
        self.measure(f"linear_{kind}_{tokens}", case, peak, computes=tokens >= 16)

    def attention(self, group: int, context: int, queries: int) -> None:
        """Decode (queries = 1) streams KV; prefill (queries > 1) computes."""
        sequences = 1 if queries > 1 else (2048 if self.quick else 65536) // context
        case = attention_case(self.pool, self.rng, group, context, queries, sequences)
        kind = "decode" if queries == 1 else "prefill"
        name = f"attend_{kind}_g{group}_{context}"
        self.measure(name, case, self.int8_gops, computes=queries > 1)

    def window(self, context: int, queries: int) -> None:
        """The last of `context` tokens with a window of WINDOW positions, and without, in turn."""
        cases = [
            attention_case(self.pool, self.rng, 8, context, queries, 1, window)
            for window in (WINDOW, 0)
        ]
        best = [float("inf")] * 2
        for _ in range(3):
            for i, case in enumerate(cases):
                best[i] = min(best[i], best_seconds(case.run, self.budget_s / 3)[0])
        name = f"attend_window_{WINDOW}_{queries}_of_{context}"
        us, whole_us = (1e6 * seconds for seconds in best)
        self.result[name] = {"us": us, "whole_us": whole_us, "ratio": us / whole_us}
        print(f"  {name:<32}{us:9.1f} us, without a window {whole_us:.1f}")

    def levels(self, name: str, case: Case) -> None:
        """The level in use and the one before it, in turn: times, and whether bits are the same."""
        now, before = kernels.isa(), kernels.isa_levels()[-2]
        best, hashes = dict.fromkeys((before, now), float("inf")), set[str]()
        for _ in range(5):
            for level in best:
                kernels.set_isa(level)
                best[level] = min(best[level], best_seconds(case.run, self.budget_s / 10)[0])
                hashes.add(fingerprint(case.out))
        kernels.set_isa(now)
        us, before_us = 1e6 * best[now], 1e6 * best[before]
        row = {"us": us, "before_us": before_us, "ratio": before_us / us}
        self.result[f"levels_{name}"] = row | {"identical": len(hashes) == 1}
        print(f"  {name:<32}{us:9.0f} us, {before} {before_us:.0f}: {before_us / us:.2f} times")

    def mixer(self, name: str, make: Callable[..., Case], tokens: int) -> None:
        """Nanoseconds per token and layer; in decode GB/s of states, read and written."""
        layers = 4 if tokens > 1 else 24  # decode: more bytes than a cache holds
        case = make(self.pool, self.rng, tokens, layers)
        best, _ = best_seconds(case.run, self.budget_s)
        ns, gbps = 1e9 * best / tokens / layers, case.read_bytes / best / 1e9
        name, row = f"{name}_{tokens}", {"ns": round(ns)}
        self.result[name] = row | ({"gbps": round(gbps, 2)} if tokens == 1 else {})
        rate = f", {gbps:.1f} GB/s of states" if tokens == 1 else ""
        print(f"  {name:<28}{ns:9.0f} ns per token and layer{rate}   {fingerprint(case.out)}")

    def measure(self, name: str, case: Case, peak_gops: float, *, computes: bool) -> None:
        best, _ = best_seconds(case.run, self.budget_s)
        hashed = fingerprint(case.out)
        if computes:
            self.record(name, case.operations / best / 1e9, "gops", peak_gops, hashed)
        else:
            roof = self.read_gbps
            if case.operations and peak_gops:
                roof = min(roof, peak_gops * case.read_bytes / case.operations)
            self.record(name, case.read_bytes / best / 1e9, "gbps", roof, hashed)

    def small_ops(self) -> None:
        """Microseconds of the element-wise ops and of an empty dispatch; no peak applies."""
        runs = {
            "norm_quantise_1": norm_case(self.pool, self.rng, 1, 1024).run,
            "dispatch": self.pool.run_empty,
        }
        for name, run in runs.items():
            _, median = best_seconds(run, self.budget_s / 4)
            self.result[name] = {"us": round(median * 1e6, 2)}
            print(f"  {name:<28}{median * 1e6:9.2f} us")


def models(bench: Bench, path: str | None) -> dict[str, Any]:
    """The same GGUF through both engines: effective GOPS of prefill, GB/s of decode."""
    from bench import engine

    duel = engine.Duel(path, threads=bench.threads, quick=bench.quick)
    repeats = 2 if bench.quick else 5
    tokens = 64 if bench.quick else 512
    prefill = report.interleave(duel.prefill_contenders(f"prefill_{tokens}", tokens), repeats)
    decode = report.interleave(duel.decode_contenders(1, 16, 8 if bench.quick else 32), repeats)
    per_token = 2.0 * duel.linear_parameters / 1e9
    for name, samples, factor in (
        ("model_prefill_gops", prefill, per_token),
        ("model_decode_gbps", decode, duel.streamed_bytes / 1e9),
    ):
        scaled = {who: report.Samples([v * factor for v in s.values]) for who, s in samples.items()}
        bench.result[name] = report.ratio_row(scaled, "ours", "llama.cpp")
        print(f"  {name:<28}{bench.result[name]}")
    details = {"gguf": duel.description, "llama_settings": duel.llama_settings}
    duel.close()
    return details


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench kernels", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, under a minute")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="GGUF of the model rows (default: a synthetic one)")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    bench = Bench(args.threads, args.quick)
    print(
        f"{kernels.isa()}, {args.threads} threads: int8 peak {bench.int8_gops:.0f} GOPS, "
        f"fma peak {bench.float_gops:.0f} GOPS, read peak {bench.read_gbps:.1f} GB/s"
    )
    rows, cols = (512, 512) if args.quick else (3072, 1024)
    for kind in kernels.KINDS[:-2]:  # all but bf16 and f32
        for tokens in (1, 16) if args.quick else (1, 4, 16, 512):
            bench.linear(kind, tokens, rows, cols)
    for group in (2, 8):
        for context in (1024,) if args.quick else (4096, 32768):
            bench.attention(group, context, 1)
        for context in (512,) if args.quick else (512, 4096, 32768):
            bench.attention(group, context, 256)
    for context in (1024,) if args.quick else (4096, 32768):
        for queries in (1, 256):
            bench.window(context, queries)
    for tokens in (1, 64):
        bench.mixer("delta_net", delta_case, tokens)
        bench.mixer("mamba2", mamba2_case, tokens)
    bench.small_ops()
    if kernels.isa() == "amx-int8" and not args.quick:
        for kind in kernels.KINDS[:-3]:
            for tokens in (14, 16, 18, 64, 512):
                case = linear_case(bench.pool, bench.rng, kind, tokens, (2048, 4096), 1 << 28)
                bench.levels(f"linear_{kind}_{tokens}", case)
        shapes = (
            (2, 512, 512),
            (4, 8192, 256),
            (8, 8192, 256),
            (8, 4096, 1),
            (8, 80, 1),
            (8, 16, 16),
        )
        for group, context, queries in shapes:
            case = attention_case(bench.pool, bench.rng, group, context, queries, 1)
            bench.levels(f"attend_g{group}_{queries}_of_{context}", case)
    details = models(bench, args.model)
    report.finish(
        {
            "peaks": {
                "int8_gops": round(bench.int8_gops, 1),
                "float_gops": round(bench.float_gops, 1),
                "read_gbps": round(bench.read_gbps, 1),
            }
        }
        | bench.result,
        details=details,
        json_path=args.json,
    )
    return 0
