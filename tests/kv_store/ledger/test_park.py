"""Parked tails: found by their parent, never matched, superseded ones evicted first."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bench.processes.store_check import check_integrity
from kv_store.errors import NumericsFault, StaleRef
from kv_store.keys import ROOT_KEY, content_key, payload_digest, sealed_checksum
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.index import PageState
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    SALT,
    Lane,
    descriptor,
    evict,
    page_state,
    payload_of,
    read_page,
    settings,
    tokens_of,
)

IDS = tokens_of(1, 2)
FIRST, SECOND = IDS[:PAGE_TOKENS], IDS[PAGE_TOKENS:]
tmp_path, store, lane = kv_scene.tmp_path, kv_scene.store, kv_scene.lane


def parked(lane: Lane, parent: bytes, ids: np.ndarray, priority: int = 0) -> bytes:
    """A published tail without a pin; its key."""
    ref, key = lane.add(parent, ids, priority)
    lane.store.pages.unpin(ref)
    return key


@pytest.mark.parametrize("n", [1, 2, 63, 254, 255])
def test_a_tail_is_found_by_its_parent_and_never_matched(store: Store, lane: Lane, n: int) -> None:
    first, parent = lane.add(ROOT_KEY, FIRST)
    ref, key = lane.add(parent, SECOND[:n])
    assert key == content_key(parent, SECOND[:n], store.pages.repr_id, SALT)
    assert store.pages.match_prefix(IDS, SALT) == [first]
    assert store.pages.find_tail(parent, SECOND, SALT) == ref
    assert store.pages.find_tail(parent, SECOND[:n], SALT) == ref
    assert store.pages.find_tail(parent, SECOND[: n - 1], SALT) is None
    assert store.pages.page_tokens(ref) == n
    assert store.pages.page_tokens(first) == PAGE_TOKENS
    page, proof = read_page(store, ref), store.pages.proof(ref)
    assert page == payload_of(key).tobytes()
    assert sealed_checksum(page, proof.seed) == proof.checksum
    assert store.pages.digest(ref) == payload_digest(page)
    store.pages.unpin(ref)
    store.pages.unpin(first)


def test_the_longest_matching_tail_is_found_and_other_tenants_find_none(
    store: Store, lane: Lane
) -> None:
    long_key = parked(lane, ROOT_KEY, FIRST[:100])
    parked(lane, ROOT_KEY, FIRST[:40])
    other = FIRST[:200].copy()
    other[60] ^= 1
    parked(lane, ROOT_KEY, other)
    found = store.pages.find_tail(ROOT_KEY, FIRST, SALT)
    assert found is not None
    assert read_page(store, found) == payload_of(long_key).tobytes()
    assert store.pages.page_tokens(found) == 100
    short = store.pages.find_tail(ROOT_KEY, FIRST[:99], SALT)
    assert short is not None
    assert store.pages.page_tokens(short) == 40
    assert store.pages.find_tail(ROOT_KEY, FIRST, b"another tenant") is None
    assert (
        store.pages.find_tail(content_key(ROOT_KEY, FIRST, store.pages.repr_id), SECOND, SALT)
        is None
    )


def test_token_ids_of_a_tail_are_compared_not_only_their_hash(store: Store, lane: Lane) -> None:
    parked(lane, ROOT_KEY, FIRST[:100])
    ref = store.pages.find_tail(ROOT_KEY, FIRST, SALT)
    assert ref is not None
    page = store.pages.index.get(ref)
    page.tokens = page.tokens[:-4] + b"\0\0\0\0"
    assert store.pages.find_tail(ROOT_KEY, FIRST, SALT) is None


def test_no_page_follows_a_tail(store: Store, lane: Lane) -> None:
    key = parked(lane, ROOT_KEY, FIRST[:100])
    with pytest.raises(ValueError, match="no page follows"):
        store.pages.reserve(key, SECOND, SALT)
    with pytest.raises(ValueError, match=r"1\.\.256"):
        store.pages.reserve(ROOT_KEY, IDS[:0], SALT)
    with pytest.raises(ValueError, match=r"1\.\.256"):
        store.pages.reserve(ROOT_KEY, IDS[: PAGE_TOKENS + 1], SALT)


def test_a_pinned_tail_stays_and_an_invalid_one_is_removed(store: Store, lane: Lane) -> None:
    parked(lane, ROOT_KEY, FIRST[:100])
    ref = store.pages.find_tail(ROOT_KEY, FIRST, SALT, pin=True)
    assert ref is not None
    assert evict(store, 5) == 0
    store.pages.invalidate(ref)
    assert store.pages.find_tail(ROOT_KEY, FIRST, SALT) is None
    assert page_state(store, ref) is PageState.QUARANTINE
    store.pages.unpin(ref)
    with pytest.raises(StaleRef):
        store.pages.page_tokens(ref)


def test_equal_tails_are_deduplicated_and_unequal_ones_are_a_fault(
    store: Store, lane: Lane
) -> None:
    ref = lane.add(ROOT_KEY, FIRST[:100])[0]
    assert lane.add(ROOT_KEY, FIRST[:100])[0] == ref
    with pytest.raises(NumericsFault):
        lane.seal(ROOT_KEY, FIRST[:100], flip=1)
    store.pages.unpin(ref)
    store.pages.unpin(ref)


@pytest.mark.parametrize("longer", [120, PAGE_TOKENS])
def test_a_superseded_tail_is_evicted_before_anything_else(
    store: Store, lane: Lane, longer: int
) -> None:
    parked(lane, ROOT_KEY, FIRST[:100], priority=9)
    away = FIRST[:100].copy()
    away[99] ^= 1
    parked(lane, ROOT_KEY, away)  # another continuation: not superseded
    parked(lane, ROOT_KEY, tokens_of(5, 1))  # the oldest full page of the lowest class
    parked(lane, ROOT_KEY, FIRST[:longer])
    assert store.stat()["tails_superseded_total"] == 1
    assert evict(store, 1) == 1
    assert store.pages.find_tail(ROOT_KEY, FIRST[:100], SALT) is None
    assert store.pages.find_tail(ROOT_KEY, away, SALT) is not None
    assert len(store.pages.match_prefix(tokens_of(5, 1), SALT)) == 1


def test_a_superseded_tail_that_is_used_again_is_kept(store: Store, lane: Lane) -> None:
    parked(lane, ROOT_KEY, FIRST[:100])
    parked(lane, ROOT_KEY, FIRST[:120])
    assert store.pages.find_tail(ROOT_KEY, FIRST[:110], SALT, priority=3) is not None  # cut back
    assert evict(store, 1) == 1
    assert store.pages.find_tail(ROOT_KEY, FIRST[:110], SALT) is not None


def test_another_tenants_longer_tail_supersedes_nothing(store: Store, lane: Lane) -> None:
    parked(lane, ROOT_KEY, FIRST[:100])
    ticket = store.pages.reserve(ROOT_KEY, FIRST[:120], b"another tenant")
    at = lane.arena.reserve()
    assert ticket is not None
    assert at is not None
    store.pages.seal(ticket, lane.arena, at, lane.mapping.digest(at.slot)).result(20)
    future = store.pages.publish(ticket)
    store.ledger.commit()
    store.pages.unpin(future.result(20))
    assert "tails_superseded_total" not in store.stat()


def test_tails_survive_a_restart(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    lane = Lane(store)
    parent = parked(lane, ROOT_KEY, FIRST)
    parked(lane, parent, SECOND[:30])
    key = parked(lane, parent, SECOND[:77])
    lane.close()
    store.ledger.close()  # killed: no ages are written
    store.core.thread.close()
    store.core.extents.close()
    os.close(store._lock_fd)
    store = Store.open(tmp_path / "s", descriptor(), settings())
    (first,) = store.pages.match_prefix(IDS, SALT)
    ref = store.pages.find_tail(parent, SECOND, SALT)
    assert ref is not None
    assert store.pages.page_tokens(ref) == 77
    assert page_state(store, ref) is PageState.LISTED
    assert store.pages.load([first, ref]).result(20) == [True, True]
    assert read_page(store, ref) == payload_of(key).tobytes()
    assert evict(store, 1) == 1
    assert store.pages.find_tail(parent, SECOND[:30], SALT) is None, "superseded: the first to go"
    assert store.pages.find_tail(parent, SECOND, SALT) == ref
    check_integrity(store)
    store.close()


def test_a_damaged_tail_is_rejected_and_parked_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    lane = Lane(store)
    parked(lane, ROOT_KEY, FIRST[:100])
    lane.close()
    store.close()
    extent = tmp_path / "s" / "ext" / "000001.kv"
    data = bytearray(extent.read_bytes())
    data[99] ^= 1
    extent.write_bytes(data)
    store = Store.open(tmp_path / "s", descriptor(), settings())
    ref = store.pages.find_tail(ROOT_KEY, FIRST, SALT)
    assert ref is not None
    assert store.pages.load([ref]).result(20) == [False]
    assert store.pages.find_tail(ROOT_KEY, FIRST, SALT) is None
    lane = Lane(store, incarnation=2)
    parked(lane, ROOT_KEY, FIRST[:100])
    again = store.pages.find_tail(ROOT_KEY, FIRST, SALT)
    assert again is not None
    assert store.pages.load([again]).result(20) == [True]
    lane.close()
    store.close()
