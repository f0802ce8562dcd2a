"""Erasing of pages that a representation which is not open has left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.processes.store_check import check_integrity
from kv_store.arenas.arena import POISON
from kv_store.keys import chain_keys, token_bytes
from kv_store.ledger.queries import PageLink
from kv_store.pages.erase import linked_pages
from kv_store.pages.index import PageRef
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import LAYOUT, SALT, Lane, descriptor, settings, tokens_of

SIZE = LAYOUT.page_bytes
IDS = np.concatenate([tokens_of(1, 4), tokens_of(2, 1)[:100]])  # four pages and a tail
OTHER = descriptor(arith_id="ee" * 32)
tmp_path = kv_scene.tmp_path


def extent_bytes(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((path / "ext").iterdir()))


@pytest.fixture
def left(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A store with two chains that share a page, and the bytes of the first one's pages."""
    path = tmp_path / "store"
    store = Store.open(path, descriptor(), settings())
    lane = Lane(store)
    lane.add_chain(IDS)
    lane.add_chain(np.concatenate([IDS[:256], tokens_of(7, 1)]))
    held = store.pages.match_prefix(IDS[:1024], SALT)
    whole, pages = extent_bytes(path), list[bytes]()
    for ref in held:
        info = store.pages.allocator.info(ref.page_id)
        at = info.offset_of(ref.page_id)
        pages.append(whole[at : at + SIZE])
    lane.close()
    store.close()
    return path, pages


def test_pages_of_an_earlier_arithmetic_are_erased_with_their_session(
    left: tuple[Path, list[bytes]],
) -> None:
    """What another session shares stays, and is of use to the arithmetic that computed it."""
    path, pages = left
    assert [page in extent_bytes(path) for page in pages] == [True] * 4
    store = Store.open(path, OTHER, settings())
    assert store.pages.erase(IDS, SALT, 1030).result(20) == 1, "the tail"
    assert store.pages.erase(IDS, SALT, 256).result(20) == 3
    assert store.core.counters["pages_erased"] == 4
    assert [page in extent_bytes(path) for page in pages] == [True, False, False, False]
    assert store.pages.erase(IDS, SALT, 256).result(20) == 0
    assert store.pages.erase(IDS, b"another tenant", 0).result(20) == 0
    check_integrity(store)
    store.close()
    store = Store.open(path, descriptor(), settings())
    assert len(store.pages.match_prefix(IDS, SALT)) == 1
    assert len(store.pages.match_prefix([*IDS[:256], *tokens_of(7, 1)], SALT)) == 2
    check_integrity(store)
    store.close()


def test_all_that_follows_an_erased_page_goes_too(left: tuple[Path, list[bytes]]) -> None:
    path, _ = left
    store = Store.open(path, OTHER, settings())
    assert store.pages.erase(IDS[:300], SALT, 0).result(20) == 6
    store.close()
    assert bytes([POISON]) * (4 * SIZE) in extent_bytes(path)


@pytest.mark.parametrize("size", [None, 100])
def test_an_extent_that_is_gone_or_cut_does_not_stop_erasing(
    left: tuple[Path, list[bytes]], size: int | None
) -> None:
    path, _ = left
    store = Store.open(path, OTHER, settings())
    for file in (path / "ext").iterdir():
        if file.name == "000001.kv":
            file.unlink() if size is None else file.write_bytes(b"x" * size)
    assert store.pages.erase(IDS, SALT, 0).result(20) == 6
    assert not (path / "ext/000001.kv").exists()
    check_integrity(store)
    store.close()


def test_damaged_rows_that_follow_each_other_end() -> None:
    ids, salt, repr_id = token_bytes(IDS[:512]), b"", b"r" * 32
    first, second = chain_keys(ids, repr_id, salt)
    links = [
        PageLink(PageRef(1, 0), first, second, 256),
        PageLink(PageRef(2, 0), second, first, 256),
    ]
    assert set(linked_pages(links, ids, repr_id, salt, 0)) >= {PageRef(1, 0), PageRef(2, 0)}
