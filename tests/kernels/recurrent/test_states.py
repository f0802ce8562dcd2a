"""State images of a batch and the sizes of recurrent mixers: what the bindings refuse."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import kernels as K
from tests.kernels.recurrent.images import aligned, random_weights

U64 = NDArray[np.uint64]
MAMBA = K.StateShape.mamba2(1, 1, 2, 48, 32, 2)


def addresses(*values: int) -> U64:
    return np.array(values, np.uint64)


def two_entries() -> K.Batch:
    batch = K.Batch(4, 3, 4)
    entries = np.array([[1, 0, 1], [2, 5, 1]], np.int32)
    batch.set(np.zeros(3, np.int32), entries, addresses(64, 128))
    return batch


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 1, 1, 32, 4), "must be positive"),
        ((1, 0, 1, 32, 4), "must be positive"),
        ((1, 1, 0, 32, 4), "must be positive"),
        ((1, 2, 3, 32, 4), "a multiple of n_k_head"),
        ((1, 1, 1, 48, 4), "head_dim must be a multiple of 32 up to 256, not 48"),
        ((1, 1, 1, 288, 4), "not 288"),
        ((1, 1, 1, 0, 4), "not 0"),
        ((1, 1, 1, 32, 1), "conv_kernel must be 2, 3 or 4, not 1"),
        ((1, 1, 1, 32, 5), "not 5"),
        ((1, 2, 4, 32, 4, 0), "key_run must divide"),
        ((1, 2, 8, 32, 4, 3), "key_run must divide"),
        ((1, 2, 4, 32, 4, 4), "key_run must divide"),
    ],
)
def test_shapes_that_are_refused(sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        K.StateShape(*sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 1, 1, 64, 32, 4), "must be positive"),
        ((1, 0, 1, 64, 32, 4), "must be positive"),
        ((1, 1, 0, 64, 32, 4), "must be positive"),
        ((1, 2, 3, 64, 32, 4), "n_head a multiple of n_group"),
        ((1, 1, 1, 24, 32, 4), "head_dim must be a multiple of 16 up to 256, not 24"),
        ((1, 1, 1, 272, 32, 4), "not 272"),
        ((1, 1, 1, 64, 48, 4), "state_dim must be a multiple of 32 up to 256, not 48"),
        ((1, 1, 1, 64, 0, 4), "not 0"),
        ((1, 1, 1, 64, 288, 4), "not 288"),
        ((1, 1, 1, 64, 32, 1), "conv_kernel must be 2, 3 or 4, not 1"),
        ((1, 1, 1, 64, 32, 5), "not 5"),
    ],
)
def test_shapes_of_mamba_2_that_are_refused(sizes: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        K.StateShape.mamba2(*sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 32, 3), "n_layer must be positive"),
        ((1, 0, 3), "width must be a multiple of 32, not 0"),
        ((1, 48, 3), "not 48"),
        ((1, 32, 1), "conv_kernel must be 2, 3 or 4, not 1"),
        ((1, 32, 5), "not 5"),
    ],
)
def test_shapes_of_a_short_convolution_that_are_refused(
    sizes: tuple[int, int, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        K.StateShape.short_conv(*sizes)


def test_sizes_of_models_with_other_mixers() -> None:
    """Mamba-2 of 112 heads of 80 in 8 groups, states of 128 keys; LFM2 of 2,048 channels."""
    shape = K.StateShape.mamba2(27, 8, 112, 80, 128, 4)
    assert (shape.kind, shape.n_k_head, shape.n_v_head, shape.key_run) == ("mamba2", 8, 112, 14)
    assert (shape.head_dim, shape.state_dim, shape.conv_kernel) == (80, 128, 4)
    assert shape.value_width == 8960
    assert shape.channels == 8960 + 2 * 8 * 128
    assert shape.in_width == shape.channels + 8960 + 112
    assert shape.layer_bytes == 4 * (112 * 128 * 80 + 3 * shape.channels)
    assert shape.image_bytes == 27 * shape.layer_bytes
    shape = K.StateShape.short_conv(10, 2048, 3)
    assert (shape.kind, shape.n_layer, shape.conv_kernel) == ("conv", 10, 3)
    assert (shape.channels, shape.value_width, shape.in_width) == (2048, 2048, 6144)
    assert shape.layer_bytes == 4 * 2 * 2048
    assert shape.image_bytes == 10 * shape.layer_bytes
    assert K.StateShape(1, 1, 1, 32, 4).kind == "delta"


def test_the_sizes_of_a_model() -> None:
    """Qwen3.5-27B: 48 layers of 16 and 48 heads of 128."""
    shape = K.StateShape(48, 16, 48, 128, 4)
    assert (shape.n_layer, shape.n_k_head, shape.n_v_head) == (48, 16, 48)
    assert (shape.head_dim, shape.conv_kernel) == (128, 4)
    assert shape.channels == 10240
    assert shape.value_width == 6144
    assert shape.in_width == 10240 + 6144 + 96
    assert shape.layer_bytes == 4 * (48 * 128 * 128 + 3 * 10240)
    assert shape.image_bytes == 48 * shape.layer_bytes


@pytest.mark.parametrize(
    ("reads", "writes", "said"),
    [
        ((0,), (64, 128), "1 and 2 addresses of 2 entries"),
        ((0, 0, 0), (64, 128, 192), "3 and 3 addresses of 2 entries"),
        ((0, 0), (64, 0), "entry 1 has no address to write"),
        ((64, 128), (256, 64), "entry 0 reads an address that is written"),
        ((256, 128), (256, 64), "entry 0 reads an address that is written"),
        ((0, 0), (64, 64), "two entries write one address"),
        ((0, 0), (64, 100), "entry 1 has an address that is not 64-byte aligned"),
        ((0, 8), (64, 128), "entry 1 has an address that is not 64-byte aligned"),
    ],
)
def test_addresses_that_are_refused(
    pool: K.Pool, reads: tuple[int, ...], writes: tuple[int, ...], said: str
) -> None:
    batch = two_entries()
    batch.set_states(addresses(0, 64), addresses(128, 192))
    with pytest.raises(ValueError, match=said):
        batch.set_states(addresses(*reads), addresses(*writes))
    with pytest.raises(ValueError, match="the batch has no states"):
        Layer().call(pool, batch)


def test_entries_may_read_one_image() -> None:
    two_entries().set_states(addresses(64, 64), addresses(128, 192))


def test_a_new_step_has_no_states(pool: K.Pool) -> None:
    batch = two_entries()
    batch.set_states(addresses(0, 0), addresses(128, 192))
    batch.set(np.zeros(1, np.int32), np.array([[1, 0, 1]], np.int32), addresses(64))
    with pytest.raises(ValueError, match="the batch has no states"):
        Layer().call(pool, batch)


class Layer:
    """Arguments of one call, of which a test replaces some."""

    def __init__(self) -> None:
        self.shape = K.StateShape(2, 1, 2, 32, 4)
        self.layer = 0
        self.projected = K.Rows(3, self.shape.in_width)
        self.out = K.Rows(3, self.shape.value_width)
        self.conv, self.dt_bias, self.a, self.norm = random_weights(self.shape, 1).vectors

    def call(self, pool: K.Pool, batch: K.Batch) -> None:
        K.delta_net(
            pool, self.projected, batch, self.shape, self.layer, self.conv, self.dt_bias, self.a,
            self.norm, 1e-6, self.out,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("layer", 2, "layer 2 of 2"),
        ("projected", (2, 196), "3 tokens do not fit 2"),
        ("projected", (3, 100), "projected: width is 100, expected 196"),
        ("out", (2, 64), "3 tokens do not fit 2"),
        ("out", (3, 63), "out: width is 63, expected 64"),
        ("conv", 5, "conv: width is 5, expected 512"),
        ("dt_bias", 1, "dt_bias: width is 1, expected 2"),
        ("a", 3, "a: width is 3, expected 2"),
        ("norm", 64, "norm: width is 64, expected 32"),
    ],
)
def test_sizes_that_are_refused(
    pool: K.Pool, name: str, size: int | tuple[int, int], said: str
) -> None:
    batch, layer = two_entries(), Layer()
    images = aligned(2 * layer.shape.image_bytes)
    first = K.address_of(images)
    batch.set_states(addresses(0, 0), addresses(first, first + layer.shape.image_bytes))
    layer.call(pool, batch)
    if isinstance(size, tuple):
        setattr(layer, name, K.Rows(*size))
    else:
        setattr(layer, name, size if name == "layer" else K.Vector(np.zeros(size, np.float32)))
    with pytest.raises(ValueError, match=said):
        layer.call(pool, batch)


def test_a_closed_pool_computes_nothing() -> None:
    closed = K.Pool(1)
    closed.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        Layer().call(closed, two_entries())


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("projected", 100, "projected: width is 100, expected 258"),
        ("out", 63, "out: width is 63, expected 96"),
        ("conv", 5, "conv: width is 5, expected 320"),
        ("conv_bias", 5, "conv_bias: width is 5, expected 160"),
        ("dt_bias", 1, "dt_bias: width is 1, expected 2"),
        ("a", 3, "a: width is 3, expected 2"),
        ("d", 3, "d: width is 3, expected 2"),
        ("norm", 48, "norm: width is 48, expected 96"),
    ],
)
def test_sizes_of_mamba_2_that_are_refused(pool: K.Pool, name: str, size: int, said: str) -> None:
    shape = MAMBA
    batch, images = two_entries(), aligned(2 * shape.image_bytes)
    first = K.address_of(images)
    batch.set_states(addresses(0, 0), addresses(first, first + shape.image_bytes))
    sizes = {"projected": shape.in_width, "conv": 2 * shape.channels, "conv_bias": shape.channels}
    sizes |= {"dt_bias": 2, "a": 2, "d": 2, "norm": shape.value_width, "out": shape.value_width}

    def call() -> None:
        given = {of: K.Vector(np.zeros(n, np.float32)) for of, n in sizes.items()}
        rows = K.Rows(3, sizes["projected"]), K.Rows(3, sizes["out"])
        vectors = [given[of] for of in ("conv", "conv_bias", "dt_bias", "a", "d", "norm")]
        K.mamba2(pool, rows[0], batch, shape, 0, *vectors, 1e-6, rows[1])

    call()
    sizes[name] = size
    with pytest.raises(ValueError, match=f"mamba2: {said}"):
        call()


def test_shapes_of_another_kind_are_refused(pool: K.Pool) -> None:
    batch, layer, vector = two_entries(), Layer(), K.Vector(np.zeros(1, np.float32))
    rows = layer.projected, batch
    layer.shape = MAMBA
    with pytest.raises(ValueError, match="delta_net: the shape is one of mamba2"):
        layer.call(pool, batch)
    shape = K.StateShape.short_conv(1, 32, 2)
    with pytest.raises(ValueError, match="mamba2: the shape is one of conv"):
        K.mamba2(pool, *rows, shape, 0, *[vector] * 6, 1e-6, layer.out)
    with pytest.raises(ValueError, match="short_conv: the shape is one of delta"):
        K.short_conv(pool, *rows, K.StateShape(1, 1, 1, 32, 2), 0, vector, layer.out)
