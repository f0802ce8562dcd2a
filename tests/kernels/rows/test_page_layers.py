"""Pages whose layers differ in their heads: each layer is that of a page of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

import kernels as K
from bench.models.tensors import aligned
from tests.kernels.recurrent.images import LEVELS, bits
from tests.kernels.recurrent.test_gates import rows_of

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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("n_kv", "dim", "first"), [(1, 576, 64), (2, 96, 32), (1, 64, 1)])
def test_v_may_be_a_part_of_k(pool: K.Pool, level: str, n_kv: int, dim: int, first: int) -> None:
    """V is K before its norm and its RoPE, and 0 in its first dims: as if these were columns."""
    K.set_isa(level)
    shape, qkv = K.PageShape(1, n_kv, dim), qkv_of(7, n_kv, dim)
    norm = K.Vector(np.linspace(0.5, 1.5, dim).astype(np.float32))
    rope = K.RopeTable("norm", dim, 2 * (first // 2) or 2, 1e4)
    of_k = slice(N_HEAD * dim, (N_HEAD + n_kv) * dim)
    qkv[5, of_k] *= 1e-30
    qkv[9, of_k.stop - 1] = np.inf
    qkv[:, of_k.stop :] = qkv[:, of_k]
    for head in range(n_kv):
        qkv[:, of_k.stop + head * dim :][:, :first] = 0
    found = []
    for values, v_first in ((qkv[:, : of_k.stop].copy(), first), (qkv, 0)):
        line = Timeline(shape)
        queries = K.Queries(TOKENS, N_HEAD, dim)
        at = line.batch, shape, 0, N_HEAD, norm, norm, EPS, rope, 1.0, queries, line.rows
        K.place_kv(pool, rows_of(values), *at, v_first=v_first)
        pages = b"".join(page.tobytes() for page in line.pages)
        found.append(pages + line.rows.view(TOKENS).tobytes())
    assert found[0] == found[1]


def test_v_of_k_has_no_norm_and_dims_of_k(pool: K.Pool) -> None:
    shape, qk = K.PageShape(1, 1, 64), qkv_of(7, 1, 64)[:, : (N_HEAD + 1) * 64].copy()
    norm, line = K.Vector(np.ones(64, np.float32)), Timeline(shape)
    at = line.batch, shape, 0, N_HEAD, None, None, EPS, None, 1.0, K.Queries(TOKENS, N_HEAD, 64)
    for kwargs in (
        {"v_norm": norm, "v_first": 8},
        {"has_kv": False, "v_first": 8},
        {"v_first": 64},
    ):
        with pytest.raises(ValueError, match="V of K has no norm"):
            K.place_kv(pool, rows_of(qk), *at, **kwargs)
    with pytest.raises(ValueError, match="width"):
        K.place_kv(pool, rows_of(qk), *at)


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
