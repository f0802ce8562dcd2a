"""Cases of recurrent mixers: gated delta networks, Mamba-2 and gated short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

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


def some_mamba2(rng: np.random.Generator) -> kernels.StateShape:
    """Heads that fill their blocks of columns or not, and states of any number of chains."""
    n_group, ratio = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    head_dim = int(rng.choice([64, 80, 16 * rng.integers(1, 17)]))
    state_dim = int(rng.choice([64, 128, 32 * rng.integers(1, 9)]))
    n_layer, conv_kernel = int(rng.integers(1, 3)), int(rng.integers(2, 5))
    sizes = n_group, n_group * ratio, head_dim, state_dim, conv_kernel
    return kernels.StateShape.mamba2(n_layer, *sizes)


def some_short_conv(rng: np.random.Generator) -> kernels.StateShape:
    n_layer, conv_kernel = int(rng.integers(1, 3)), int(rng.integers(2, 5))
    return kernels.StateShape.short_conv(n_layer, 32 * int(rng.integers(1, 20)), conv_kernel)


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


class Mixer:
    """The weights of one layer of a shape, there and on the CPU."""

    def __init__(self, pool: kernels.Pool, rng: np.random.Generator, shape: kernels.StateShape):
        self.pool, self.shape, self.layer = pool, shape, int(rng.integers(shape.n_layer))
        self.arguments = _arguments(rng, shape)  # between the layer and the output

    def _mix(self, on: Callable[[str], Callable[..., None]], *given: object) -> None:
        """The operation of the shape. on: the operations of a device by name."""
        name = {"delta": "delta_net", "mamba2": "mamba2", "conv": "short_conv"}[self.shape.kind]
        *inputs, out = given
        on(name)(*inputs, self.shape, self.layer, *self.arguments, out)

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
        self._mix(partial(getattr, kernels), self.pool, rows_of(rows), batch, out)
        return out.view(tokens).copy(), written

    def on_gpu(
        self, ops: CudaOps, gpu: Gpu, rows: F32, counts: Sequence[int], reads: Sequence[int]
    ) -> tuple[F32, list[int]]:
        """The same, of images of the GPU by address."""
        shape, tokens = self.shape, len(rows)
        ops.upload(*[given for given in self.arguments if isinstance(given, kernels.Vector)])
        written = [gpu.allocate(shape.image_bytes) for _ in counts]
        pages = [-(-n // kernels.PAGE_TOKENS) for n in counts]
        entries = np.array([(n, 0, of) for n, of in zip(counts, pages, strict=True)], np.int32)
        batch = ops.make_batch(tokens, len(counts), sum(pages))
        batch.set(np.zeros(tokens, np.int32), entries, np.zeros(sum(pages), np.uint64))
        batch.set_states(np.array(reads, np.uint64), np.array(written, np.uint64))
        projected = ops.make_rows(tokens, shape.in_width)
        out = ops.make_rows(tokens, shape.value_width)
        gpu.copy_in(projected.address, rows)
        self._mix(partial(getattr, ops), projected, batch, out)
        return ops.read_rows(out, tokens), written

    def layer_of(self, image: Image) -> F32:
        """What the layer has in an image, without the padding."""
        shape, first = self.shape, self.layer * self.shape.layer_bytes // 4
        values = shape.value_width * shape.state_dim + (shape.conv_kernel - 1) * shape.channels
        return image.view(np.float32)[first : first + values]

    def read(self, gpu: Gpu, address: int) -> F32:
        """The same of an image of the GPU."""
        first, like = self.layer * self.shape.layer_bytes, self.layer_of(unread(self.shape))
        values = np.empty_like(like)
        gpu.copy_out(address + first, values)
        return values


Step = tuple[F32, list[Image]]


def _arguments(
    rng: np.random.Generator, shape: kernels.StateShape
) -> list[kernels.Vector | float | None]:
    def vector(*size: int, middle: float = 0, scale: float = 1) -> kernels.Vector:
        values = middle + scale * rng.standard_normal(size)
        return kernels.Vector(np.ascontiguousarray(values, np.float32))

    conv = vector(shape.channels, shape.conv_kernel)
    if shape.kind == "conv":
        return [conv]
    heads = shape.n_v_head
    decays = kernels.Vector(-np.exp(rng.standard_normal(heads)).astype(np.float32))
    if shape.kind == "delta":
        norm = vector(shape.head_dim, middle=1, scale=0.1)
        return [conv, vector(heads, scale=3), decays, norm, EPS]
    bias = vector(shape.channels) if rng.random() < 0.7 else None
    norm = vector(shape.value_width, middle=1, scale=0.1) if rng.random() < 0.7 else None
    return [conv, bias, vector(heads, scale=3), decays, vector(heads), norm, EPS]


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
    """`mixer_case` of a gated delta network."""
    shape = some_shape(rng)
    what = f"delta_net of {shape.n_k_head} and {shape.n_v_head} heads of {shape.head_dim}"
    mixer_case(gpu, pool, rng, shape, what)


def mamba2_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """`mixer_case` of Mamba-2."""
    shape = some_mamba2(rng)
    what = f"mamba2 of {shape.n_v_head} heads of {shape.state_dim} by {shape.head_dim}"
    mixer_case(gpu, pool, rng, shape, what)


def short_conv_case(gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator) -> None:
    """`mixer_case` of a gated short convolution."""
    shape = some_short_conv(rng)
    what = f"short_conv of {shape.value_width} channels, {shape.conv_kernel} taps"
    mixer_case(gpu, pool, rng, shape, what)


def mixer_case(
    gpu: Gpu, pool: kernels.Pool, rng: np.random.Generator, shape: kernels.StateShape, what: str
) -> None:
    """A step of several entries, of which some begin from zeros, and then a second one that goes on
    from the images of the first."""
    net, n_entries = Mixer(pool, rng, shape), int(rng.integers(1, 4))
    images = [finite_image(rng, shape) if rng.random() < 0.6 else None for _ in range(n_entries)]
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
