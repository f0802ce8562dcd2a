"""Recurrent mixers on an emulated GPU: the bits of the CPU, however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest

import kernels
from bench.cuda.cases.experts import Owned
from bench.cuda.cases.recurrent import Image, Mixer
from bench.cuda.cases.values import compare
from bench.simt.emulator import Emulator
from kernels.cuda.memory import Batch
from kernels.cuda.ops import CudaOps


@pytest.mark.parametrize("conv_kernel", [2, 3, 4])
@pytest.mark.parametrize(("n_k_head", "n_v_head"), [(1, 1), (2, 4), (1, 3)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_prompt_from_zeros_cut_in_steps(
    gpu: Emulator,
    pool: kernels.Pool,
    head_dim: int,
    n_k_head: int,
    n_v_head: int,
    conv_kernel: int,
) -> None:
    shape = kernels.StateShape(2, n_k_head, n_v_head, head_dim, conv_kernel)
    check_steps(gpu, pool, shape, [head_dim, n_k_head, n_v_head, conv_kernel])


@pytest.mark.parametrize(
    "sizes", [(1, 2, 64, 128, 4), (2, 4, 80, 32, 3), (1, 1, 16, 256, 2), (3, 3, 48, 96, 4)]
)
def test_a_prompt_of_mamba_2_cut_in_steps(
    gpu: Emulator, pool: kernels.Pool, sizes: tuple[int, int, int, int, int]
) -> None:
    check_steps(gpu, pool, kernels.StateShape.mamba2(2, *sizes), list(sizes))


@pytest.mark.parametrize("conv_kernel", [2, 3, 4])
def test_a_prompt_of_a_short_convolution_cut_in_steps(
    gpu: Emulator, pool: kernels.Pool, conv_kernel: int
) -> None:
    check_steps(gpu, pool, kernels.StateShape.short_conv(2, 288, conv_kernel), [conv_kernel])


def check_steps(
    gpu: Emulator, pool: kernels.Pool, shape: kernels.StateShape, seed: list[int]
) -> None:
    """Two sessions, one of which begins later: outputs and images after every step, and at the end
    the image of one step on the CPU."""
    gpu.seed = sum(seed)
    rng = np.random.default_rng(seed)
    net = Mixer(pool, rng, shape)
    rows = rng.standard_normal((13, shape.in_width)).astype(np.float32)
    with Owned(gpu) as own:
        ops = CudaOps(own, pool)
        images: list[Image | None] = [None]
        at, done = [0], 0
        for n in (2, 1, 9, 1):
            part = rows[done : done + n]
            want, written = net.on_cpu(np.concatenate([part] * len(at)), [n] * len(at), images)
            got, at = net.on_gpu(ops, own, np.concatenate([part] * len(at)), [n] * len(at), at)
            compare(got, want, f"outputs of tokens {done} to {done + n}")
            for address, image in zip(at, written, strict=True):
                compare(net.read(own, address), net.layer_of(image), f"an image behind {done + n}")
            images, done = [*written, *([None] if len(at) == 1 else [])], done + n
            if len(at) == 1:
                at.append(0)
        _, (whole,) = net.on_cpu(rows, [len(rows)], [None])
        compare(net.read(own, at[0]), net.layer_of(whole), "the image of one step")


def test_a_step_changes_no_image_that_it_reads(gpu: Emulator, pool: kernels.Pool) -> None:
    """So a step may be computed again."""
    rng = np.random.default_rng(5)
    net = Mixer(pool, rng, kernels.StateShape(1, 1, 2, 64, 4))
    rows = rng.standard_normal((4, net.shape.in_width)).astype(np.float32)
    with Owned(gpu) as own:
        ops = CudaOps(own, pool)
        _, (first,) = net.on_gpu(ops, own, rows, [4], [0])
        before = net.read(own, first)
        once, (second,) = net.on_gpu(ops, own, rows, [4], [first])
        again, (third,) = net.on_gpu(ops, own, rows, [4], [first])
        compare(net.read(own, first), before, "the image that was read")
        compare(again, once, "outputs")
        compare(net.read(own, third), net.read(own, second), "the images that were written")


def test_shapes_of_another_kind_are_refused(gpu: Emulator, pool: kernels.Pool) -> None:
    rng = np.random.default_rng(6)
    shapes = [
        kernels.StateShape(1, 1, 1, 32, 2),
        kernels.StateShape.mamba2(1, 1, 1, 32, 32, 2),
        kernels.StateShape.short_conv(1, 32, 2),
    ]
    with Owned(gpu) as own:
        ops = CudaOps(own, pool)
        for shape, other in zip(shapes, [*shapes[1:], shapes[0]], strict=True):
            operation = {"delta": ops.delta_net, "mamba2": ops.mamba2, "conv": ops.short_conv}
            rows = ops.make_rows(2, other.in_width), ops.make_rows(2, other.value_width)
            batch, given = ops.make_batch(2, 1, 1), Mixer(pool, rng, shape).arguments
            with pytest.raises(ValueError, match=f"a shape of {other.kind} where"):
                operation[shape.kind](rows[0], batch, other, 0, *given, rows[1])


def test_states_of_a_batch_are_checked(gpu: Emulator, pool: kernels.Pool) -> None:
    """As those of `kernels.Batch`; `set` forgets them."""

    def addresses(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.array(values, np.uint64)

    def prepare() -> None:
        entries = np.array([(2, 0, 1), (1, 5, 1)], np.int32)
        batch.set(np.zeros(3, np.int32), entries, np.zeros(2, np.uint64))

    with Owned(gpu) as own:
        batch = Batch(own, 8, 2, 2)
        prepare()
        for reads, writes in (
            (addresses(0), addresses(64)),
            (addresses(0, 0), addresses(64, 64)),
            (addresses(0, 0), addresses(64, 0)),
            (addresses(0, 64), addresses(64, 128)),
            (addresses(0, 8), addresses(64, 128)),
        ):
            with pytest.raises(ValueError, match=r"state|address"):
                batch.set_states(reads, writes)
            with pytest.raises(ValueError, match="no states"):
                _ = batch.states
        batch.set_states(addresses(0, 256), addresses(64, 128))
        entry_of, _ = batch.states
        found = np.empty(3, np.int32)
        gpu.copy_out(entry_of, found)
        assert found.tolist() == [0, 0, 1]
        with pytest.raises(ValueError, match="was sent"):
            batch.set_states(addresses(0, 256), addresses(64, 128))
        prepare()
        with pytest.raises(ValueError, match="no states"):
            _ = batch.states
