"""Recounts all that an open store counts incrementally: O(n) under one hold of its lock."""

from __future__ import annotations

from collections import Counter

from kv_store.keys import ROOT_KEY
from kv_store.pages.index import GEN_MAX, RESIDENT, SUPERSEDED, PageIndex, PageState
from kv_store.store import Store


def check_integrity(store: Store) -> None:
    """Raises AssertionError for a wrong index, allocator or budget."""
    core, pools = store.core, store.pools
    with core.lock:
        for pool in pools:
            check_index(pool.index)
            slots = sum(info.slots for info in pool.allocator.infos)
            assert len(pool.index) == slots, (len(pool.index), slots)
        held = [info for pool in pools for info in pool.allocator.infos]
        total = sum(info.file_bytes for info in held + core.foreign)
        assert total == core.extent_bytes, (total, core.extent_bytes)
        assert total <= core.budget.budget_bytes, (total, core.budget)


def check_index(index: PageIndex) -> None:
    index.check_sums()
    counts = dict.fromkeys(PageState, 0)
    tails: dict[bytes, Counter[int]] = {}
    for page in index:
        index.check_page(page)
        counts[page.state] += 1
        if page.state in RESIDENT and page.is_tail:
            tails.setdefault(page.parent, Counter())[page.n_tokens] += 1
    children = {parent: list(index.children(parent)) for parent in index._children}
    linked = [page for pages in children.values() for page in pages]
    gone = {key for key in children if key != ROOT_KEY and key not in index._by_key}
    assert gone == index._parents_gone
    assert counts == index.counts(), (counts, index.counts())
    assert sorted(page.page_id for page in linked) == sorted(index._verified)
    assert all(page.parent == parent for parent, pages in children.items() for page in pages)
    assert tails == index._tails
    assert index.tails == sum(lengths.total() for lengths in tails.values())
    assert index.pinned == sum(page.pins > 0 for page in index)
    assert index.superseded == sum(page.priority == SUPERSEDED for page in index)
    evictable = sum(page.page_id in index._order for page in index)
    assert evictable == len(index._order)
    free = {i for i in index._free if (p := index.find(i)) and p.state is PageState.FREE}
    usable = {p.page_id for p in index if p.state is PageState.FREE and p.gen < GEN_MAX}
    assert free == usable, "the free list and the free slots differ"
