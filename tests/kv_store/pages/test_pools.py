"""Several representations in one store: one byte budget, one page thread, one ledger."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from bench.processes.store_check import check_integrity
from kv_store.arenas.arena import Arena, ArenaMapping, SlotOwner
from kv_store.keys import ROOT_KEY
from kv_store.layout import PAGE_TOKENS
from kv_store.pages import allocator
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import PageRef, PageState
from kv_store.pages.pool import PagePool, Ticket
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import SALT, descriptor, payload_of, settings, tokens_of

tmp_path = kv_scene.tmp_path
OURS = descriptor()
THEIRS = descriptor(model_hash="cc" * 32)


def add_chain(store: Store, pool: PagePool, ids: np.ndarray, incarnation: int) -> list[PageRef]:
    """Seal and publish a timeline in a pool; returns its references, unpinned."""
    arena = store.create_arena("cpu", incarnation, 2, pool)
    mapping = ArenaMapping(arena.path, pool.layout)
    assert mapping.repr_id == pool.repr_id
    parent, refs = ROOT_KEY, list[PageRef]()
    for first in range(0, len(ids), PAGE_TOKENS):
        ticket = pool.reserve(parent, ids[first : first + PAGE_TOKENS], SALT)
        while isinstance(ticket, NoRoom):
            assert pool.allocator.is_growing, ticket
            store.core.thread.submit(lambda: None).result(20)
            ticket = pool.reserve(parent, ids[first : first + PAGE_TOKENS], SALT)
        refs.append(seal(store, pool, arena, mapping, ticket))
        parent = ticket.key
    mapping.close()
    arena.close(delete=True)
    store.core.thread.submit(lambda: None).result(20)
    return refs


def seal(
    store: Store, pool: PagePool, arena: Arena, mapping: ArenaMapping, ticket: Ticket
) -> PageRef:
    at = arena.reserve()
    mapping.reserve(at.slot, SlotOwner(b"s", 1, at.gen, 0))
    np.frombuffer(mapping.page(at.slot), np.uint8)[:] = payload_of(ticket.key)
    pool.seal(ticket, arena, at, mapping.digest(at.slot)).result(20)
    mapping.poison(at.slot)
    arena.release(at)
    future = pool.publish(ticket)
    store.ledger.commit()
    ref = future.result(20)
    pool.unpin(ref)
    return ref


def check(store: Store, pool: PagePool, ids: np.ndarray, pages: int) -> None:
    """The pool has so many leading pages of a timeline, and their bytes are right."""
    refs = pool.match_prefix(ids, SALT)
    assert len(refs) == pages
    assert pool.load(refs).result(20) == [True] * pages
    for ref in refs:
        info = pool.allocator.info(ref.page_id)
        into = memoryview(bytearray(info.page_bytes))
        store.core.extents.read_page(info, ref.page_id, into)
        assert bytes(into) == payload_of(pool.index.get(ref).key).tobytes()


def returned(store: Store, pool: PagePool) -> None:
    """Have a pool give back every extent; its pages are overwritten first."""
    for _ in range(200):
        if store.core.thread.submit(pool.allocator.give_idle_extents).result(20):
            break
        time.sleep(0.01)
    assert pool.allocator.file_bytes == 0


def test_two_representations_seal_and_load_side_by_side(tmp_path: Path) -> None:
    ids = tokens_of(1, 3)
    store = Store.open(tmp_path / "s", OURS, settings(pages=32))
    other = store.pool(THEIRS)
    assert other is store.pool(THEIRS)
    assert store.pool(OURS) is store.pages
    mine = add_chain(store, store.pages, ids, 1)
    theirs = add_chain(store, other, ids, 2)
    assert not {ref.page_id for ref in mine} & {ref.page_id for ref in theirs}
    for pool in (store.pages, other):
        check(store, pool, ids, 3)
    assert store.stat()["pages_published"] == 6
    key = other.index.get(theirs[1]).key
    other.invalidate(theirs[1])
    assert store.events.drain() == [key]
    check(store, store.pages, ids, 3)
    check_integrity(store)
    store.maintain()
    store.close()


def test_a_second_representation_is_kept_over_a_restart(tmp_path: Path) -> None:
    ids = tokens_of(1, 3)
    store = Store.open(tmp_path / "s", OURS, settings(pages=32))
    add_chain(store, store.pool(THEIRS), ids, 1)
    add_chain(store, store.pages, ids, 2)
    store.close()
    store = Store.open(tmp_path / "s", OURS, settings(pages=32))
    assert store.stat()["extent_bytes_other_reprs"]
    other = store.pool(THEIRS)
    assert store.stat()["extent_bytes_other_reprs"] == 0
    check(store, other, ids, 3)
    check(store, store.pages, ids, 3)
    check_integrity(store)
    store.close()


def test_the_budget_is_shared_and_the_largest_pool_is_reclaimed_from(tmp_path: Path) -> None:
    """Four extents of four pages: one pool has them all, and loses extents until both have two."""
    budget = settings(pages=16)
    store = Store.open(tmp_path / "s", OURS, budget)
    for name in range(4):
        add_chain(store, store.pages, tokens_of(name, 4), 1 + name)
    full = store.pages.allocator.file_bytes
    assert full == budget.budget_bytes
    held = store.pages.match_prefix(tokens_of(3, 4), SALT, pin=True)
    other = store.pool(THEIRS)
    for name in range(4):
        add_chain(store, other, tokens_of(name, 4), 11 + name)
        assert store.core.extent_bytes <= budget.budget_bytes
        check_integrity(store)
    assert other.allocator.file_bytes == full // 2
    assert store.pages.allocator.file_bytes == full // 2
    assert store.counters["extents_reclaimed"] == 2
    for ref in held:
        assert store.pages.is_resident(ref), "a page in use went to another pool"
        store.pages.unpin(ref)
    check(store, other, tokens_of(3, 4), 4)
    for pool in (store.pages, other):  # no page is left without its prefix
        assert pool.index.rootless() == []
    path = store.path
    store.close()
    store = Store.open(path, OURS, budget)
    assert not store.dropped
    check(store, store.pool(THEIRS), tokens_of(3, 4), 4)
    store.close()


def test_a_retired_slot_stays_retired_when_its_extent_cannot_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is pinned after its extent was chosen."""
    store = Store.open(tmp_path / "s", OURS, settings(pages=4))
    for name in range(2):
        (spot,) = add_chain(store, store.pages, tokens_of(name, 1), 1 + name)
        store.pages.invalidate(spot, slot_failed=True)
    add_chain(store, store.pages, tokens_of(2, 1), 3)
    (held,) = store.pages.match_prefix(tokens_of(2, 1), SALT, pin=True)
    assert store.pages.index.count(PageState.BAD) == 1
    monkeypatch.setattr(store.pages.allocator, "_cost", lambda info: 0)
    assert not store.core.thread.submit(store.pages.allocator.give_extent).result(20)
    assert store.pages.index.count(PageState.BAD) == 1
    assert store.pages.is_resident(held)
    store.maintain()
    check_integrity(store)
    store.pages.unpin(held)
    store.close()


def test_pages_of_no_open_pool_are_evicted_first(tmp_path: Path) -> None:
    budget = settings(pages=16)
    store = Store.open(tmp_path / "s", THEIRS, budget)
    add_chain(store, store.pages, tokens_of(1, 4), 1)
    store.close()
    store = Store.open(tmp_path / "s", OURS, budget)
    for name in range(4):
        add_chain(store, store.pages, tokens_of(name, 3), 2 + name)
    assert store.stat()["extent_bytes_other_reprs"] == 0
    assert "extents_reclaimed" not in store.counters
    check_integrity(store)
    store.close()


def test_a_pool_on_demand_has_extents_for_pages_in_use_only(tmp_path: Path) -> None:
    """Its extents come when a page needs one, also from the other pool, and go back."""
    budget = settings(pages=16)
    store = Store.open(tmp_path / "s", OURS, budget)
    deleted: list[int] = []
    store.core.on_deleted.append(deleted.append)
    for name in range(4):
        add_chain(store, store.pages, tokens_of(name, 4), 1 + name)
    other = store.pools.open(THEIRS, on_demand=True).result(20)
    assert other is store.pool(THEIRS)
    store.maintain()
    store.core.thread.submit(lambda: None).result(20)
    assert other.allocator.file_bytes == 0
    ids = tokens_of(9, 3)
    add_chain(store, other, ids, 11)
    assert len(deleted) == 1
    own, own_extents = store.pages.allocator, budget.budget_bytes // budget.extent_bytes
    assert own.file_bytes == (own_extents - 1) * budget.extent_bytes
    held = other.match_prefix(ids, SALT, pin=True)
    give = store.core.thread.submit
    assert give(other.allocator.give_idle_extents).result(20) == 0
    check(store, other, ids, 3)
    for ref in held:
        other.unpin(ref)
    returned(store, other)
    assert len(deleted) == 2
    assert other.match_prefix(ids, SALT) == []
    store.maintain()
    give(lambda: None).result(20)
    assert own.file_bytes == budget.budget_bytes
    check_integrity(store)
    store.close()


def test_an_extent_of_a_long_chain_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "CHAIN_MAX", 5)
    store = Store.open(tmp_path / "s", OURS, settings(pages=32, extent_pages=8))
    other = store.pools.open(THEIRS, on_demand=True).result(20)
    add_chain(store, other, tokens_of(9, 7), 11)
    returned(store, other)
    store.close()


def test_a_pool_without_extents_is_closed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", OURS, settings(pages=16))
    other = store.pools.open(THEIRS, on_demand=True).result(20)
    add_chain(store, other, tokens_of(9, 2), 11)
    assert not store.pools.close(other).result(20)
    returned(store, other)
    assert store.pools.close(other).result(20)
    assert list(store.pools) == [store.pages]
    again = store.pool(THEIRS)
    assert again is not other
    add_chain(store, again, tokens_of(9, 2), 12)
    check_integrity(store)
    store.close()


def test_a_disk_without_room_costs_no_extent(tmp_path: Path) -> None:
    """No pool gives an extent whose room would not be enough."""
    budget = settings(pages=16)
    store = Store.open(tmp_path / "s", OURS, budget)
    for name in range(4):
        add_chain(store, store.pages, tokens_of(name, 4), 1 + name)
    store.core.budget.free_floor_bytes = 1 << 60
    other = store.pools.open(THEIRS, on_demand=True).result(20)
    ids = tokens_of(9, 1)
    while (found := other.reserve(ROOT_KEY, ids, SALT)) is NoRoom.GROWING:
        store.core.thread.submit(lambda: None).result(20)
    assert found is NoRoom.FULL
    assert "MiB free" in other.allocator.growth_blocked
    assert store.pages.allocator.file_bytes == budget.budget_bytes
    store.close()
