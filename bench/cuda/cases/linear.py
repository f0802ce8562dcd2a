"""Cases of quantised rows, products of matrices, and embeddings."""

from __future__ import annotations

import numpy as np

import kernels
from bench.cuda.arrays import Arrays
from bench.cuda.cases.values import (
    F32,
    Quantised,
    any_threads,
    compare,
    packed_with_bytes,
    rows_of,
    some_activation,
    some_values,
)
from bench.models.tensors import SUPERBLOCK_KINDS
from kernels.cuda.gpu import Gpu
from kernels.cuda.ops import KIND_INDEX
from kernels.cuda.products import ADD, FLOATS, GATE_OF, LIMITED, RELU2, STORE, kernel_of


def quantise_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """`quantise` and `norm_quantise` of random rows; of three in ten cases wider ones, which
    `norm_quantise` holds in parts."""
    tokens, width = int(rng.integers(1, 20)), int(rng.integers(32, 700))
    if rng.random() < 0.3:
        tokens, width = int(rng.integers(1, 3)), int(rng.integers(4000, 9000))
    values, w = some_values(rng, tokens, width), rng.standard_normal(width).astype(np.float32)
    eps, is_kept = 1e-6, bool(rng.integers(2))
    with Arrays(gpu) as arrays:
        x = arrays.put(values)
        plain = Quantised.empty(arrays, tokens, width)
        threads = any_threads(rng, 16)
        grid = tokens, -(-width // (4 * threads)), 1  # a warp for each 128 values
        gpu.launch("quantise", grid, threads, [x.address, width, width, *plain.addresses])
        want = kernels.Activations(tokens, width)
        kernels.quantise(pool, rows_of(values), tokens, want)
        plain.compare(want, "quantise")
        normed = Quantised.empty(arrays, tokens, width)
        weights = arrays.put(w)
        arguments = [x.address, width, weights.address, eps, width, *normed.addresses]
        kept = [normed.values.address, width] if is_kept else [0, 0]
        gpu.launch("norm_quantise", (tokens, 1, 1), max(64, threads), [*arguments, *kept])
        kernels.norm_quantise(pool, rows_of(values), kernels.Vector(w), eps, tokens, want)
        normed.compare(want, "norm_quantise")
        if is_kept:
            out = kernels.Rows(tokens, width)
            kernels.rmsnorm(pool, rows_of(values), kernels.Vector(w), eps, tokens, out)
            finite = np.isfinite(out.view(tokens))
            got = normed.values.read()
            compare(got[finite], out.view(tokens)[finite], "norm_quantise: values")


def norm_add_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """`norm_add` of random rows; of three in ten cases wider ones, which it holds in parts."""
    tokens, width = int(rng.integers(1, 20)), int(rng.integers(4, 700))
    if rng.random() < 0.3:
        tokens, width = int(rng.integers(1, 3)), int(rng.integers(4000, 9000))
    values, before = some_values(rng, tokens, width), some_values(rng, tokens, width)
    w, eps, stride = rng.standard_normal(width).astype(np.float32), 1e-6, width + 3
    want = rows_of(before)
    kernels.norm_add(pool, rows_of(values), kernels.Vector(w), eps, tokens, want)
    with Arrays(gpu) as arrays:
        x, weights = arrays.put(values), arrays.put(w)
        wider = np.full((tokens, stride), 7, np.float32)
        wider[:, :width] = before
        out = arrays.put(wider)
        arguments = [x.address, width, weights.address, eps, width, out.address, stride]
        gpu.launch("norm_add", (tokens, 1, 1), max(64, any_threads(rng, 16)), arguments)
        got, finite = out.read(), np.isfinite(want.view(tokens))
        what = f"norm_add of {tokens} x {width}"
        compare(got[:, width:], wider[:, width:], f"{what}: what lies between rows")
        compare(np.isfinite(got[:, :width]), finite, what)
        compare(got[:, :width][finite], want.view(tokens)[finite], what)


def invalidate_unused(gpu: Gpu, x: Quantised, blocks: int) -> None:
    """Give the groups of activations past the last one any values: no kernel writes them."""
    q, scale, sums = x.q.read(), x.scale.read(), x.sums.read()
    q[:, -1, :, (blocks - 1) % 4 + 1 :] = 77
    scale[:, blocks:], sums[:, blocks:] = np.nan, 1 << 20
    for to, values in ((x.q, q), (x.scale, scale), (x.sums, sums)):
        gpu.copy_in(to.address, values)


def linear_case(
    gpu: Gpu,
    pool: kernels.Pool,
    rng: np.random.Generator,
    kind: str,
    shape: tuple[int, int, int] | None = None,
    byte: int | None = None,
) -> None:
    """A product of a random matrix of `kind`: stored, added and through one of the activations, by
    every kernel for it.

    shape: rows, columns, tokens, else random ones; a block has all segments of a row then. byte: of
    all weights, beside activations that are the largest of their groups.
    """
    rows, tokens = int(rng.integers(1, 90)), int(rng.integers(1, 80))
    is_super = kind in SUPERBLOCK_KINDS
    cols = 256 * int(rng.integers(1, 10)) if is_super else 32 * int(rng.integers(1, 70))
    rows, cols, tokens = shape or (rows, cols, tokens)
    values = some_values(rng, tokens, cols)
    if byte is not None:
        values[:] = np.where(rng.random((tokens, 1)) < 0.5, -127.0, 127.0)
    if kind in FLOATS:
        if rng.random() < 0.5:  # a product that becomes -0
            values[0], values[0, -1] = 0, -1e-42
        elif rng.random() < 0.5:  # finite, and too large for rule 1
            values[-1, -1] = 2.0**97
    matrix, buffer = packed_with_bytes(pool, kind, rows, cols, rng, byte)
    gate, gate_buffer = packed_with_bytes(pool, kind, rows, cols, rng)
    bias = rng.standard_normal(rows).astype(np.float32) if rng.integers(2) else None
    before = rng.standard_normal((tokens, rows)).astype(np.float32)
    activations = kernels.Activations(tokens, cols, keep_float=True)
    kernels.quantise(pool, rows_of(values), tokens, activations)
    vector = None if bias is None else kernels.Vector(bias)
    gate_bias = rng.standard_normal(rows).astype(np.float32) if rng.integers(2) else None
    gate_vector = None if gate_bias is None else kernels.Vector(gate_bias)
    stored, added, gated = kernels.Rows(tokens, rows), rows_of(before), kernels.Rows(tokens, rows)
    kernels.linear(pool, activations, [matrix], [vector], tokens, stored)
    kernels.linear_add(pool, activations, matrix, vector, tokens, added)
    activation, limit = some_activation(rng)
    is_plain = activation == "relu2"
    products = None if is_plain else gate, matrix, None if is_plain else gate_vector, vector
    kernels.linear_gated(pool, activations, *products, tokens, gated, activation, limit)
    gate_product = kernels.Rows(tokens, rows)
    kernels.linear(pool, activations, [gate], [gate_vector], tokens, gate_product)
    tiles, eights = -(-rows // 16), -(-tokens // 8)
    segments = -(-cols // 1024)
    each = segments if shape else int(rng.integers(1, segments + 1))  # segments of a block
    groups = -(-tiles // 4), -(-segments // each)
    kernel = kernel_of(kind)
    shapes = {
        f"linear_few_{kernel}": ((eights, tiles, 1), 32 * int(rng.integers(4, 9))),
        f"linear_few2_{kernel}": ((-(-tokens // 16), tiles, 1), 32 * int(rng.integers(4, 9))),
        f"linear_some_{kernel}": ((-(-tokens // 32), *groups), 128),
        f"linear_many_{kernel}": ((-(-tokens // 64), *groups), 128),
    }
    if kind in FLOATS:
        shapes = {
            f"linear_{kind}": ((eights, tiles, 1), 128 * int(rng.integers(1, 5))),
            f"linear_many_{kind}": ((-(-tokens // 32), tiles, 1), 128 * int(rng.integers(1, 3))),
        }
    with Arrays(gpu) as arrays:
        x = Quantised.empty(arrays, tokens, cols)
        gpu.copy_in(x.values.address, values)
        grid = tokens, -(-cols // 256), 1
        gpu.launch("quantise", grid, 64, [x.values.address, cols, cols, *x.addresses])
        invalidate_unused(gpu, x, -(-cols // 32))
        weights = arrays.put(buffer)
        b = 0 if bias is None else arrays.put(bias).address
        q, scale, sums = x.addresses
        source = [x.values.address, cols, scale] if kind in FLOATS else [q, scale, sums]
        held = gate_product.view(tokens)  # before the other product is gated with it
        of_gate = 0 if gate_bias is None else arrays.put(gate_bias).address
        once = [arrays.put(gate_buffer).address, of_gate]
        plans: list[tuple[str, int, F32, kernels.Rows, list[int]]] = []
        partials = arrays.empty(np.float32, segments, tokens, rows).address if groups[1] > 1 else 0
        for kernel in shapes:
            rest = [0, 0] if "_few" in kernel else [partials, each] if kind not in FLOATS else []
            plans += [(kernel, STORE, before, stored, rest), (kernel, ADD, before, added, rest)]
            if is_plain:
                plans.append((kernel, RELU2, before, gated, rest))
                continue
            then = LIMITED if limit else GATE_OF[activation]
            plans.append((kernel, then, held, gated, rest))
            if "_few" in kernel:  # with both products of a gate
                plans.append((kernel, then, before, gated, once))
        for kernel, then, given, want, rest in plans:
            out = arrays.put(given)
            after = [b, then, out.address, rows, limit]
            arguments = [weights.address, rows, cols, *source, tokens, *after]
            of_pairs = [0, 0, 1, 1] if "_few" in kernel else [0, 0, 1]
            gpu.launch(kernel, *shapes[kernel], [*arguments, *rest, *of_pairs])
            if rest[:1] == [partials] != [0]:
                threads = any_threads(rng)
                grid = tokens, -(-rows // threads), 1
                given_sums = [partials, segments, rows, tokens, *after]
                gpu.launch("add_segments", grid, threads, given_sums)
            finite = np.isfinite(want.view(tokens))
            got = out.read()
            what = f"{kernel}, {rows} x {cols}, {tokens} tokens, then {then}, {rest}"
            compare(np.isfinite(got), finite, what)
            compare(got[finite], want.view(tokens)[finite], what)


def embed_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator, kind: str) -> None:
    """Embeddings of random tokens, at times scaled, rows taken of them, and which are finite."""
    rows, cols, n = int(rng.integers(1, 60)), 256 * int(rng.integers(1, 3)), int(rng.integers(1, 9))
    matrix, buffer = packed_with_bytes(pool, kind, rows, cols, rng)
    tokens = rng.integers(0, rows, n).astype(np.int32)
    want = kernels.Rows(n, cols)
    scale = float(rng.choice([1.0, 1.0, 33.941125, -(2.0**-140)]))
    kernels.embed(pool, matrix, tokens, want, scale)
    with Arrays(gpu) as arrays:
        weights = arrays.put(buffer)
        out, ids = arrays.empty(np.float32, n, cols), arrays.put(tokens)
        index = KIND_INDEX[kind]
        arguments = [weights.address, index, cols, ids.address, out.address, cols, scale]
        gpu.launch("embed", (n, 1, 1), any_threads(rng), arguments)
        got = out.read()
        compare(got, want.view(n).copy(), f"embed of {kind}")
        chosen = rng.integers(0, n, 3).astype(np.int32)
        taken, at = arrays.empty(np.float32, 3, cols), arrays.put(chosen)
        arguments = [out.address, cols, at.address, cols, taken.address, cols]
        gpu.launch("take_rows", (3, 1, 1), any_threads(rng), arguments)
        compare(taken.read(), got[chosen], "take_rows")
        values = some_values(rng, n, cols)
        x, bad = arrays.put(values), arrays.zeros(np.uint8, n)
        arguments = [x.address, cols, cols, bad.address]
        gpu.launch("nonfinite_rows", (n, 1, 1), any_threads(rng), arguments)
        compare(bad.read(), (~np.isfinite(values).all(axis=1)).astype(np.uint8), "nonfinite_rows")
