"""Pages whose layers differ in their heads: each layer is that of a page of its own; latent layers,
whose V is read of K, and the transform of what they give."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

import kernels as K
from bench.models.tensors import aligned
from tests.kernels.recurrent.images import LEVELS, bits
from tests.kernels.recurrent.test_gates import rows_of
from tests.kernels.timelines import hadamard, kv8

HEADS = [(2, 32), (1, 96), (2, 32), (3, 64), (1, 512)]
TOKENS, N_HEAD, EPS = 270, 6, 1e-6


@dataclass
class Timeline:
    """One sequence of TOKENS tokens in pages of a shape."""

    shape: K.PageShape
    pages: list[NDArray[np.uint8]] = field(init=False)
    batch: K.Batch = field(init=False)
    rows: K.KvRows = field(init=False)

    def __post_init__(self) -> None:
        self.pages = [aligned(self.shape.payload_bytes) for _ in range(2)]
        for page in self.pages:
            page[:] = 0
        self.batch = self.batch_of(self.pages)
        self.rows = K.KvRows(TOKENS, self.shape)

    def batch_of(self, pages: list[NDArray[np.uint8]]) -> K.Batch:
        batch = K.Batch(TOKENS, 1, 2)
        addresses = np.array([K.address_of(page) for page in pages], np.uint64)
        batch.set(np.zeros(TOKENS, np.int32), np.array([[TOKENS, 0, 2]], np.int32), addresses)
        return batch

    def attend(self, pool: K.Pool, layer: int, qkv: NDArray[np.float32]) -> NDArray[np.float32]:
        """The output of a layer, whose K and V are put into the pages."""
        dim = self.shape.layer(layer).head_dim
        norm = K.Vector(np.linspace(0.5, 1.5, dim).astype(np.float32))
        queries, out = K.Queries(TOKENS, N_HEAD, dim), K.Rows(TOKENS, N_HEAD * dim)
        at = self.batch, self.shape, layer
        norms = N_HEAD, norm, norm, EPS, None, dim**-0.5
        K.place_kv(pool, rows_of(qkv), *at, *norms, queries, self.rows, norm)
        K.attend(pool, queries, *at, out)
        return out.view(TOKENS).copy()


def qkv_of(seed: int, n_kv: int, dim: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((TOKENS, (N_HEAD + 2 * n_kv) * dim)).astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
def test_each_layer_is_that_of_a_page_of_its_own(pool: K.Pool, level: str) -> None:
    K.set_isa(level)
    mixed = Timeline(K.PageShape(HEADS))
    row_parts = list[NDArray[np.uint8]]()
    for layer, (n_kv, dim) in enumerate(HEADS):
        alone, qkv = Timeline(K.PageShape(1, n_kv, dim)), qkv_of(layer, n_kv, dim)
        assert np.array_equal(
            bits(mixed.attend(pool, layer, qkv)), bits(alone.attend(pool, 0, qkv))
        )
        at = mixed.shape.layer(layer)
        assert (at.n_kv_head, at.head_dim) == (n_kv, dim)
        for page, whole in zip(mixed.pages, alone.pages, strict=True):
            assert np.array_equal(page[at.page_offset : at.page_offset + at.page_bytes], whole)
        row_parts.append(alone.rows.view(TOKENS).copy())
    rows = np.concatenate(row_parts, axis=1)
    assert np.array_equal(mixed.rows.view(TOKENS), rows)
    seeds = np.arange(TOKENS, dtype=np.uint64)
    digests = K.row_digests(mixed.batch, mixed.shape, seeds)
    assert digests.tolist() == [
        K.xxh3_64(row.tobytes(), int(seed)) for row, seed in zip(rows, seeds, strict=True)
    ]
    assert K.step_digests(pool, mixed.rows, seeds).tolist() == digests.tolist()
    copies = [aligned(mixed.shape.payload_bytes) for _ in range(2)]
    for copy in copies:
        copy[:] = 0
    K.store_rows(pool, mixed.rows, mixed.batch_of(copies))
    for copy, page in zip(copies, mixed.pages, strict=True):
        assert np.array_equal(copy, page)


@pytest.mark.parametrize("level", LEVELS)
def test_v_is_normed_as_by_a_norm_before(pool: K.Pool, level: str) -> None:
    K.set_isa(level)
    shape, qkv = K.PageShape(1, 1, 64), qkv_of(9, 1, 64)
    norm = K.Vector(np.linspace(0.5, 1.5, 64).astype(np.float32))
    v, normed = rows_of(qkv[:, -64:].copy()), K.Rows(TOKENS, 64)
    K.rmsnorm(pool, v, norm, EPS, TOKENS, normed)
    before = qkv.copy()
    before[:, -64:] = normed.view(TOKENS)
    found = []
    for values, v_norm in ((qkv, norm), (before, None)):
        line = Timeline(shape)
        queries = K.Queries(TOKENS, N_HEAD, 64)
        at = line.batch, shape, 0, N_HEAD, None, None, EPS, None, 1.0, queries
        K.place_kv(pool, rows_of(values), *at, v_norm=v_norm)
        found.append(b"".join(page.tobytes() for page in line.pages))
    assert found[0] == found[1]


# Of latent layers: KV heads, dims, the first of V. The last has transforms of 64 dims, not of 256.
LATENT = [(1, 576, 64), (2, 96, 32), (1, 256, 64)]


def latent_rows(seed: int, n_kv: int, dim: int, first: int) -> NDArray[np.float32]:
    """Q and K heads: K of token 5 is tiny, the rest of token 9 is infinite, the start of 11 NaN."""
    rows = qkv_of(seed, n_kv, dim)[:, : (N_HEAD + n_kv) * dim].copy()
    k = rows[:, N_HEAD * dim :].reshape(TOKENS, n_kv, dim)
    k[5] *= 1e-30
    k[9, :, -1] = np.inf
    k[11, :, first - 1] = np.nan
    return rows


@dataclass
class Placed:
    """K of a token as a latent page has it, by head: bytes, its own scales, the scale of V."""

    k: NDArray[np.int8]  # [token][head][dim]
    own: NDArray[np.uint16]
    v: NDArray[np.uint16]

    @classmethod
    def of(cls, line: Timeline) -> Placed:
        at = line.shape.layer(0)
        n_own = at.v_first // 32
        rows = line.rows.view(TOKENS).reshape(TOKENS, at.n_kv_head, -1)
        assert rows.shape[2] == at.head_dim + 2 * n_own + 2
        scales = rows[:, :, at.head_dim :].copy().view(np.uint16)
        return cls(rows[:, :, : at.head_dim].view(np.int8), scales[..., :n_own], scales[..., n_own])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("n_kv", "dim", "first"), LATENT)
def test_a_latent_layer_has_one_scale_for_the_dims_of_v(
    pool: K.Pool, level: str, n_kv: int, dim: int, first: int
) -> None:
    """K is normed, rotated and transformed as in other layers."""
    K.set_isa(level)
    norm = K.Vector(np.linspace(0.5, 1.5, dim).astype(np.float32))
    rope = K.RopeTable("norm", dim, first, 1e4)
    line, rows = Timeline(K.PageShape(1, n_kv, dim, first)), latent_rows(7, n_kv, dim, first)
    queries = K.Queries(TOKENS, N_HEAD, dim)
    at = line.batch, line.shape, 0, N_HEAD, None, norm, EPS, rope, 1.0, queries, line.rows
    K.place_kv(pool, rows_of(rows), *at)
    found, width = Placed.of(line), line.shape.layer(0).transform_width
    assert width == min(dim & -dim, first & -first)
    for head in range(n_kv):
        heads = rows[:, (N_HEAD + head) * dim :][:, :dim].copy()
        normed = K.Rows(TOKENS, dim)
        K.rmsnorm(pool, rows_of(heads), norm, EPS, TOKENS, normed)
        want = rotated(normed.view(TOKENS), rope, first)
        with np.errstate(invalid="ignore"):
            want = hadamard(want.reshape(TOKENS, -1, width)).reshape(TOKENS, dim)
        for group in range(first // 32):
            of_group = slice(32 * group, 32 * group + 32)
            k, scale = kv8(want[:, of_group])
            assert np.array_equal(found.k[:, head, of_group], k)
            assert np.array_equal(found.own[:, head, group], scale.view(np.uint16))
        k, scale = kv8(want[:, first:])
        assert np.array_equal(found.k[:, head, first:], k)
        assert np.array_equal(found.v[:, head], scale.view(np.uint16))


def rotated(x: NDArray[np.float32], rope: K.RopeTable, n_rot: int) -> NDArray[np.float32]:
    """RoPE of style "norm" by rule 4: a fused product and sum in binary64 rounds as in binary32
    here, since a product of two binary32 is exact there."""
    y = x.astype(np.float64)
    for token in range(len(x)):
        row = np.array(rope.row(token))
        cos, sin = row[: n_rot // 2], row[n_rot // 2 :]
        x0, x1 = y[token, 0:n_rot:2].copy(), y[token, 1:n_rot:2].copy()
        with np.errstate(invalid="ignore"):
            y[token, 0:n_rot:2] = x0 * cos - (x1 * sin).astype(np.float32)
            y[token, 1:n_rot:2] = x0 * sin + (x1 * cos).astype(np.float32)
    return y.astype(np.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("n_kv", "dim", "first"), LATENT)
@pytest.mark.parametrize("window", [0, 70])
def test_v_of_a_latent_layer_is_its_k(
    pool: K.Pool, level: str, n_kv: int, dim: int, first: int, window: int
) -> None:
    """Attention is that to a page whose V has the bytes of K, and whose scales are repeated."""
    K.set_isa(level)
    line, rows = Timeline(K.PageShape(1, n_kv, dim, first)), latent_rows(8, n_kv, dim, first)
    queries, out = K.Queries(TOKENS, N_HEAD, dim), K.Rows(TOKENS, N_HEAD * dim)
    at = line.batch, line.shape, 0
    K.place_kv(pool, rows_of(rows), *at, N_HEAD, None, None, EPS, None, 0.1, queries, line.rows)
    K.attend(pool, queries, *at, out, window=window)
    placed = Placed.of(line)
    n_rest = (dim - first) // 32
    scales = np.concatenate([placed.own, np.repeat(placed.v[..., None], n_rest, 2)], 2)
    k = placed.k.view(np.uint8)
    parts = k, scales.view(np.uint8), k, placed.v[..., None].view(np.uint8)
    whole = Timeline(K.PageShape(1, n_kv, dim))
    whole.rows.view(TOKENS)[:] = np.concatenate(parts, axis=2).reshape(TOKENS, -1)
    K.store_rows(pool, whole.rows, whole.batch)
    want = K.Rows(TOKENS, N_HEAD * dim)
    K.attend(pool, queries, whole.batch, whole.shape, 0, want, window=window)
    assert np.array_equal(bits(out.view(TOKENS)), bits(want.view(TOKENS)))
    seeds = np.arange(TOKENS, dtype=np.uint64)
    digests = K.row_digests(line.batch, line.shape, seeds)
    assert digests.tolist() == K.step_digests(pool, line.rows, seeds).tolist()
    copy = Timeline(line.shape)
    K.store_rows(pool, line.rows, copy.batch)
    for page, expected in zip(copy.pages, line.pages, strict=True):
        assert np.array_equal(page, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("column", "run", "width"), [(64, 576, 64), (0, 32, 32), (3, 515, 512)])
def test_heads_are_transformed_back(
    pool: K.Pool, level: str, column: int, run: int, width: int
) -> None:
    K.set_isa(level)
    values = np.random.default_rng(5).standard_normal((9, 3 * run)).astype(np.float32)
    values[7, run - 1] = np.nan
    x = rows_of(values)
    K.transform_heads(pool, x, 3, column, width, 8)
    want = values.copy().reshape(9, 3, run)
    part = want[:8, :, column:].reshape(8, 3, -1, width)
    want[:8, :, column:] = (hadamard(part) / np.float32(width)).reshape(8, 3, -1)
    found, expected = x.view(9), want.reshape(9, -1)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.isnan(found).sum() == width


def test_shapes_of_latent_layers_are_checked(pool: K.Pool) -> None:
    for dim, first in ((64, 8), (64, 64), (64, 96)):
        with pytest.raises(ValueError, match="v_first must be a multiple of 32 below head_dim"):
            K.PageShape(1, 1, dim, first)
    line, norm = Timeline(K.PageShape(1, 1, 64, 32)), K.Vector(np.ones(64, np.float32))
    at = (
        line.batch,
        line.shape,
        0,
        N_HEAD,
        None,
        None,
        EPS,
        None,
        1.0,
        K.Queries(TOKENS, N_HEAD, 64),
    )
    with pytest.raises(ValueError, match="V of a latent layer has no norm"):
        K.place_kv(pool, K.Rows(TOKENS, (N_HEAD + 1) * 64), *at, v_norm=norm)
    with pytest.raises(ValueError, match="width"):
        K.place_kv(pool, K.Rows(TOKENS, (N_HEAD + 2) * 64), *at)
    x = K.Rows(2, 3 * 96)
    for args, error in (
        ((5, 0, 32, 2), "no whole heads"),
        ((3, 0, 48, 2), "no transform has 48 values"),
        ((3, 0, 1024, 2), "no transform has 1024 values"),
        ((3, 96, 32, 2), "have no transforms of 32 from 96 on"),
        ((3, 8, 32, 2), "have no transforms of 32 from 8 on"),
        ((3, 0, 32, 3), "3 tokens do not fit 2"),
    ):
        with pytest.raises(ValueError, match=error):
            K.transform_heads(pool, x, *args)


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_without_kv_reads_that_of_another(pool: K.Pool, level: str) -> None:
    """It writes no byte of a page, and its output is that of a layer with the same K and V."""
    K.set_isa(level)
    shape, qkv = K.PageShape([(2, 32), (1, 64)]), qkv_of(3, 1, 64)
    line = Timeline(shape)
    want = line.attend(pool, 1, qkv)
    before = [page.copy() for page in line.pages]
    norm = K.Vector(np.linspace(0.5, 1.5, 64).astype(np.float32))
    queries, out = K.Queries(TOKENS, N_HEAD, 64), K.Rows(TOKENS, N_HEAD * 64)
    only_q = rows_of(qkv[:, : N_HEAD * 64].copy())
    at = line.batch, shape, 1, N_HEAD, norm, None, EPS, None, 64**-0.5, queries
    K.place_kv(pool, only_q, *at, has_kv=False)
    K.attend(pool, queries, line.batch, shape, 1, out)
    assert np.array_equal(bits(out.view(TOKENS)), bits(want))
    for page, same in zip(line.pages, before, strict=True):
        assert np.array_equal(page, same)
    with pytest.raises(ValueError, match="width is 384, expected 512"):
        K.place_kv(pool, only_q, *at)


def test_shapes_that_are_refused() -> None:
    for heads in ([], [(0, 32)], [(1, 32), (1, 48)], [(1, 0)], [(1, 608)]):
        with pytest.raises(ValueError, match="PageShape"):
            K.PageShape(heads)
    with pytest.raises(ValueError, match="layer 2 of 2"):
        K.PageShape([(1, 32), (1, 64)]).layer(2)
