"""Cases of gated delta networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import kernels
from bench.cuda.cases.experts import Owned
from bench.cuda.cases.values import F32, compare, one_nan, rows_of
from bench.models.tensors import aligned
from kernels.cuda.gpu import Gpu
from kernels.cuda.ops import CudaOps

EPS = 1e-6
UNREAD = 0xFF  # bytes of an image before it is written: no value that is computed

Image = NDArray[np.uint8]


def some_shape(rng: np.random.Generator) -> kernels.StateShape:
    """Heads of any number of chains, those of models more often."""
    head_dim = int(rng.choice([64, 128, 32 * rng.integers(1, 9)]))
    n_k_head, ratio = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    key_run = ratio if rng.random() < 0.5 else 1
    n_layer, conv_kernel = int(rng.integers(1, 3)), int(rng.integers(2, 5))
    return kernels.StateShape(n_layer, n_k_head, n_k_head * ratio, head_dim, conv_kernel, key_run)


def finite_image(rng: np.random.Generator, shape: kernels.StateShape) -> Image:
    """An image that a step may read."""
    image = aligned(shape.image_bytes)
    image.view(np.float32)[:] = 0.3 * rng.standard_normal(shape.image_bytes // 4)
    return image


def unread(shape: kernels.StateShape) -> Image:
    """An image that a step is to write, layer by layer."""
    image = aligned(shape.image_bytes)
    image[:] = UNREAD
    return image


class DeltaNet:
    """The vectors of one layer of a shape, there and on the CPU."""

    def __init__(self, pool: kernels.Pool, rng: np.random.Generator, shape: kernels.StateShape):
        self.pool, self.shape, self.layer = pool, shape, int(rng.integers(shape.n_layer))
        decays = -np.exp(rng.standard_normal(shape.n_v_head))
        self.vectors = tuple(
            kernels.Vector(np.ascontiguousarray(values, np.float32))
            for values in (
                rng.standard_normal((shape.channels, shape.conv_kernel)),
                rng.standard_normal(shape.n_v_head) * 3,
                decays,
                1 + 0.1 * rng.standard_normal(shape.head_dim),
            )
        )

    def on_cpu(self, rows: F32, counts: Sequence[int], images: Sequence[Image | None]) -> Step:
        """A step of entries that go on from images, None: zeros."""
        shape, tokens = self.shape, len(rows)
        written = [unread(shape) for _ in counts]
        pages = [-(-n // kernels.PAGE_TOKENS) for n in counts]
        entries = np.array([(n, 0, of) for n, of in zip(counts, pages, strict=True)], np.int32)
        batch = kernels.Batch(tokens, len(counts), sum(pages))
        at = np.full(sum(pages), kernels.address_of(written[0]), np.uint64)  # none is read
        batch.set(np.zeros(tokens, np.int32), entries, at)
        reads = [0 if image is None else kernels.address_of(image) for image in images]
        addresses = [kernels.address_of(image) for image in written]
        batch.set_states(np.array(reads, np.uint64), np.array(addresses, np.uint64))
        out = kernels.Rows(tokens, shape.value_width)
        kernels.delta_net(
            self.pool, rows_of(rows), batch, shape, self.layer, *self.vectors, EPS, out
        )
        return out.view(tokens).copy(), written

    def on_gpu(
        self, ops: CudaOps, gpu: Gpu, rows: F32, counts: Sequence[int], reads: Sequence[int]
    ) -> tuple[F32, list[int]]:
        """The same, of images of the GPU by address."""
        shape, tokens = self.shape, len(rows)
        ops.upload(*self.vectors)
        written = [gpu.allocate(shape.image_bytes) for _ in counts]
        pages = [-(-n // kernels.PAGE_TOKENS) for n in counts]
        entries = np.array([(n, 0, of) for n, of in zip(counts, pages, strict=True)], np.int32)
        batch = ops.make_batch(tokens, len(counts), sum(pages))
        batch.set(np.zeros(tokens, np.int32), entries, np.zeros(sum(pages), np.uint64))
        batch.set_states(np.array(reads, np.uint64), np.array(written, np.uint64))
        projected = ops.make_rows(tokens, shape.in_width)
        out = ops.make_rows(tokens, shape.value_width)
        gpu.copy_in(projected.address, rows)
        ops.delta_net(projected, batch, shape, self.layer, *self.vectors, EPS, out)
        return ops.read_rows(out, tokens), written

    def layer_of(self, image: Image) -> F32:
        """What the layer has in an image, without the padding."""
        shape, first = self.shape, self.layer * self.shape.layer_bytes // 4
        values = shape.n_v_head * shape.head_dim**2 + (shape.conv_kernel - 1) * shape.channels
        return image.view(np.float32)[first : first + values]

    def read(self, gpu: Gpu, address: int) -> F32:
        """The same of an image of the GPU."""
        first, like = self.layer * self.shape.layer_bytes, self.layer_of(unread(self.shape))
        values = np.empty_like(like)
        gpu.copy_out(address + first, values)
        return values


Step = tuple[F32, list[Image]]


def some_rows(rng: np.random.Generator, tokens: int, width: int) -> F32:
    """Projected rows, at times of zeros or with one value that is not finite."""
    rows = (2 * rng.standard_normal((tokens, width))).astype(np.float32)
    if rng.random() < 0.2:
        rows[rng.integers(tokens)] = rng.choice([0.0, -0.0])
    if rng.random() < 0.2:
        bad = np.float32(rng.choice([np.nan, np.inf, -np.inf, 3e38]))
        rows[rng.integers(tokens), rng.integers(width)] = bad
    return rows


def delta_net_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """A step of several entries, of which some begin from zeros, and then a second one that goes on
    from the images of the first."""
    shape = some_shape(rng)
    net, n_entries = DeltaNet(pool, rng, shape), int(rng.integers(1, 4))
    images = [finite_image(rng, shape) if rng.random() < 0.6 else None for _ in range(n_entries)]
    what = f"delta_net of {shape.n_k_head} and {shape.n_v_head} heads of {shape.head_dim}"
    with Owned(gpu) as own:
        ops = CudaOps(own, pool)
        at = [0 if image is None else own.allocate(image.nbytes) for image in images]
        for address, image in zip(at, images, strict=True):
            if image is not None:
                own.copy_in(address, image)
        for _ in range(2):
            counts = [int(n) for n in rng.choice([1, 1, 2, 3, 7, 12], n_entries)]
            rows = some_rows(rng, sum(counts), shape.in_width)
            want, images = net.on_cpu(rows, counts, images)
            got, at = net.on_gpu(ops, own, rows, counts, at)
            compare(one_nan(got), one_nan(want), f"{what}: outputs")
            for address, image in zip(at, images, strict=True):
                same = one_nan(net.layer_of(image))
                compare(one_nan(net.read(own, address)), same, f"{what}: an image")
