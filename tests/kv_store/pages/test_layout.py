"""Bytes of a page, content keys and checksums: sizes, order, and the effect of every field."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_store import keys as k
from kv_store.keys import ROOT_KEY, chain_keys, content_key
from kv_store.layout import PAGE_TOKENS, Descriptor, KvHeads, PageLayout, differing_fields
from tests.support.arena_rows import row_digests
from tests.support.kv_workload import LAYOUT, SALT, descriptor, payload_of, tokens_of

REPR = b"r" * 32
MIXED = PageLayout((KvHeads(2, 32), KvHeads(2, 32), KvHeads(1, 96), KvHeads(2, 32), KvHeads(3, 64)))
LATENT = PageLayout((KvHeads(1, 96, 32), KvHeads(1, 96, 32), KvHeads(2, 64), KvHeads(2, 160, 64)))
LAYOUTS = [PageLayout.uniform(2, 3, 64), MIXED, LATENT]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_sizes_follow_the_layout(dim: int) -> None:
    layout = PageLayout.uniform(3, 2, dim)
    head_bytes = layout.layers[0].head_bytes
    assert head_bytes == 2 * 256 * dim + 16 * (dim // 32) * 16 * 2 + 256 * 2
    assert layout.payload_bytes == 3 * 2 * head_bytes
    assert layout.page_bytes % 65536 == 0
    assert 0 <= layout.page_bytes - layout.payload_bytes < 65536
    assert layout.row_bytes == 3 * 2 * (2 * dim + dim // 16 + 2)


def test_a_latent_layer_has_k_alone() -> None:
    """A token of GLM-4.7-Flash or DeepSeek V3 has 582 bytes in a layer, K and V apart 1,190."""
    assert PageLayout.uniform(1, 1, 576, 64).row_bytes == 576 + 2 * 2 + 2 == 582
    assert PageLayout.uniform(1, 1, 576).row_bytes == 1190
    assert LATENT.row_bytes == 2 * (96 + 2 + 2) + 2 * (2 * 64 + 2 * 2 + 2) + 2 * (160 + 4 + 2)


@pytest.mark.parametrize(
    "bad",
    [
        (0, 1, 32), (1, 0, 32), (1, 1, 0), (1, 1, 48),
        (1, 1, 64, 64), (1, 1, 64, 16), (1, 1, 64, -32), (1, 1, 64, 96),
    ],
)  # fmt: skip
def test_impossible_shapes_are_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"head|layers|v_first"):
        PageLayout.uniform(*bad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_gathered_by_the_written_definition(layout: PageLayout) -> None:
    """Byte by byte from the layout's formula, against the array form."""
    page = payload_of(b"g", layout)
    rows = layout.gather_rows(page.tobytes(), 0, PAGE_TOKENS)
    heads = [of for of in layout.layers for _ in range(of.n_kv_head)]
    for t in (0, 1, 15, 16, 100, 255):
        expected: list[int] = []
        for head, of in enumerate(heads):
            at, dim = sum(before.head_bytes for before in heads[:head]), of.head_dim
            expected += [
                page[at + ((t // 16 * (dim // 4) + d // 4) * 16 + t % 16) * 4 + d % 4]
                for d in range(dim)
            ]
            at += of.k_bytes
            scales = (of.v_first or dim) // 32
            for g in range(scales):
                scale = at + ((t // 16 * scales + g) * 16 + t % 16) * 2
                expected += [page[scale], page[scale + 1]]
            at += of.k_scale_bytes
            if not of.v_first:
                expected += [page[at + (t // 4 * dim + d) * 4 + t % 4] for d in range(dim)]
                at += 256 * dim
            at += t * 2
            expected += [page[at], page[at + 1]]
        assert rows[t].tolist() == expected, t
    assert rows[7:9].tolist() == layout.gather_rows(page.tobytes(), 7, 2).tolist()


def test_a_descriptor_is_read_back_from_its_json() -> None:
    extra = (("a", "1"), ("b", "x"))
    texts = descriptor(), descriptor(extra=extra, rope_digest="r"), descriptor(MIXED)
    for made in (*texts, descriptor(LATENT), descriptor(PageLayout.uniform(2, 1, 576, 64))):
        assert Descriptor.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        descriptor().to_json() + " ",
        descriptor().to_json().replace('"version":"1"', '"version":"2"'),
        descriptor().to_json().replace(f'"n_layer":"{LAYOUT.n_layer}"', '"n_layer":"0"'),
        descriptor().to_json().replace(f'"n_layer":"{LAYOUT.n_layer}"', '"n_layer":"x"'),
        descriptor()
        .to_json()
        .replace(f'"head_dim":"{LAYOUT.layers[0].head_dim}"', '"head_dim":"33"'),
        descriptor().to_json().replace('"page_bytes":"', '"page_bytes":"1'),
        descriptor(MIXED).to_json().replace('"n_layer":"5"', '"n_layer":"6"'),
        descriptor(MIXED).to_json().replace("2,2,1,2,3", "2,2,1,2"),
        descriptor(MIXED).to_json().replace("2,2,1,2,3", "02,2,1,2,3"),
        descriptor(PageLayout.uniform(2, 1, 32)).to_json().replace('"1"', '"1,1"'),
        descriptor().to_json().replace(f'"n_layer":"{LAYOUT.n_layer}"', f'"n_layer":"{1 << 40}"'),
        descriptor(LATENT).to_json().replace("32,32,0,64", "32,32,0,160"),
        descriptor(LATENT).to_json().replace("32,32,0,64", "32,32,0"),
        descriptor(LATENT).to_json().replace("32,32,0,64", "0,0,0,0"),
        descriptor(LATENT).to_json().replace("kv8-mla-v1", "kv8-v1"),
        descriptor().to_json().replace('"version":"1"', '"v_first":"0","version":"1"'),
    ],
)
def test_no_other_text_is_a_descriptor(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Descriptor.from_json(text)


@pytest.mark.parametrize(
    ("n_layer", "n_kv_head", "head_dim"),
    [
        ("65536", "1", "32"), ("2", "9" * 4000, "32"), ("2", "1", "32" + "0" * 4000),
        ("4096", ",".join(["1"] * 100_000), "32"), ("2", "1" * 10_000_000, "32"),
        ("2", "1_0,1", "32,32"), ("2", "+1,2", "32,32"), ("2", " 1,2", "32,32"),
        ("2", "1,٢", "32,32"),
        ("2", "1,2,", "32,32"), ("2", "1,2", "32"), ("2", "1,1", "32,32"), ("-2", "1", "32"),
        ("2", "1,0", "32,32"), ("2", "1,2", "32,48"), ("", "1", "32"), ("1", "", "32"),
    ],
)  # fmt: skip
def test_no_other_texts_are_layouts(n_layer: str, n_kv_head: str, head_dim: str) -> None:
    """However long they are, they cost no time."""
    began = time.process_time()
    with pytest.raises(ValueError, match=r".+"):
        PageLayout.from_text(n_layer, n_kv_head, head_dim)
    assert time.process_time() - began < 0.5


def test_every_descriptor_field_changes_the_representation() -> None:
    base = descriptor()
    others = [
        dataclasses.replace(base, **{name: value})
        for name, value in {
            "model_hash": "cc" * 32,
            "arith_id": "cc",
            "arch": "llama",
            "layout": PageLayout.uniform(1, 1, 64, 32),
            "first_layer": 4,
            "provenance": "fast",
            "rope_digest": "x",
            "tokenizer_hash": "y",
            "extra": (("eps", "1e-6"),),
        }.items()
    ]
    assert len(others) == len(dataclasses.fields(base))
    ids = [d.repr_id for d in (base, *others)]
    assert len(set(ids)) == len(ids)
    assert differing_fields(base, base.to_json()) == []
    assert differing_fields(base, others[0].to_json()) == ["model_hash"]
    assert differing_fields(base, "[]") == differing_fields(base, "{") == ["unreadable"]


def test_every_shape_has_its_own_layout_id() -> None:
    shapes = [PageLayout.uniform(*s) for s in itertools.product((1, 2), (1, 2), (32, 64))]
    shapes += [MIXED, PageLayout(MIXED.layers[::-1])]
    assert len({s.layout_id for s in shapes}) == len(shapes)


def test_content_key_depends_on_every_input() -> None:
    ids = tokens_of(0, 1)
    base = content_key(ROOT_KEY, ids, REPR, SALT)
    changed = [
        content_key(base, ids, REPR, SALT),
        content_key(ROOT_KEY, ids[:255], REPR, SALT),
        content_key(ROOT_KEY, ids[::-1], REPR, SALT),
        content_key(ROOT_KEY, ids, b"q" * 32, SALT),
        content_key(ROOT_KEY, ids, REPR, b"other"),
        content_key(ROOT_KEY, ids, REPR + SALT, b""),  # same bytes, another boundary
    ]
    assert len({base, *changed}) == 7
    assert base == content_key(ROOT_KEY, ids.tolist(), REPR, SALT)
    assert base == content_key(ROOT_KEY, k.token_bytes(ids), REPR, SALT)


def test_content_key_is_pinned() -> None:
    """The format must not change: pages of existing stores must be found."""
    key = content_key(ROOT_KEY, range(256), bytes(32), b"")
    assert key.hex() == "afcb8d4e98ce29ba928ae1f95a4a93d02361cff75bf84847cd8ff9bee3bae9a2"
    assert k.sealed_seed(bytes(16), 1, 2, key, "l") == 8132417788143123635
    assert k.blob_checksum("s", 3, b"abcd").hex() == "a57f47d83adde493"
    assert (
        descriptor().repr_id.hex()
        == "8cf782ac4d1017faea6094a4fb118ae86caccc9cec1246048361e6efe883a9e3"
    )
    assert LAYOUT.layout_id == "28be79d04771c0860bbd35c958e7d4d4bf1ec6a4b6cc7a83dca4e222557964b9"


@pytest.mark.parametrize("bad", [[-1], [1 << 32], []])
def test_impossible_token_ids_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        content_key(ROOT_KEY, bad, REPR)


def test_numpy_ids_outside_u32_are_refused() -> None:
    with pytest.raises(ValueError, match="u32"):
        k.token_bytes(np.array([-1]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 800), st.integers(0, 800))
def test_chains_share_exactly_the_common_full_pages(n: int, cut: int) -> None:
    ids = tokens_of(3, 4)[:n]
    other = ids.copy()
    if cut < n:
        other[cut] ^= 1
    left, right = chain_keys(ids, REPR), chain_keys(other, REPR)
    assert len(left) == len(right) == n // PAGE_TOKENS
    same = sum(a == b for a, b in zip(left, right, strict=True))
    assert same == min(min(cut, n) // PAGE_TOKENS, len(left))
    assert left[:same] == right[:same]


def test_sealed_seed_identifies_one_page_of_one_store() -> None:
    seeds = {
        k.sealed_seed(uuid, page, gen, key, layout)
        for uuid in (b"a" * 16, b"b" * 16)
        for page in (0, 1)
        for gen in (0, 1)
        for key in (b"k" * 32, b"l" * 32)
        for layout in ("x", "y")
    }
    assert len(seeds) == 32


def test_row_seeds_wrap_and_never_repeat() -> None:
    seeds = k.row_seeds(b"a" * 16, 1, 2, b"s", 3, 1 << 40, 4096)
    assert len(set(seeds.tolist())) == 4096
    again = k.row_seeds(b"a" * 16, 1, 2, b"s", 3, (1 << 40) + 100, 5)
    assert again.tolist() == seeds[100:105].tolist()
    assert seeds[0] != k.row_seeds(b"a" * 16, 1, 2, b"s", 4, 1 << 40, 1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_and_store_compute_equal_row_digests(layout: PageLayout) -> None:
    """The kernels' row digests equal the definition here."""
    kernels = pytest.importorskip("kernels")
    shape = kernels.PageShape(layout.layers)
    for index, heads in enumerate(layout.layers):
        assert shape.layer(index).head_bytes == heads.head_bytes
    assert shape.payload_bytes == layout.payload_bytes
    memory = np.zeros(layout.page_bytes + 64, np.uint8)
    page = memory[-kernels.address_of(memory) % 64 :][: layout.page_bytes]
    page[:] = payload_of(b"n", layout)
    first, count = 11, 40
    batch = kernels.Batch(64, 1, 1)
    batch.set(
        np.arange(count, dtype=np.int32),
        np.array([[count, first, 1]], np.int32),
        np.array([kernels.address_of(page)], np.uint64),
    )
    seeds = k.row_seeds(b"a" * 16, 0, 0, b"s", 1, first, count)
    ours = row_digests(layout, page.tobytes(), seeds, first)
    assert np.array_equal(np.asarray(kernels.row_digests(batch, shape, seeds)), ours)
