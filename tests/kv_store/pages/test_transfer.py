"""Pages from and for peers: what enters the pool is what its digest says, under its own key."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from bench.processes.store_check import check_integrity
from kv_store.errors import NumericsFault, StaleRef, StoreCorrupt, StoreError
from kv_store.fsck import fsck
from kv_store.keys import ROOT_KEY, chain_keys, content_key, payload_digest
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import PageRef, PageState
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    Lane,
    descriptor,
    failing_files,
    page_state,
    payload_of,
    pin,
    read_page,
    scratch,
    settings,
    tokens_of,
    wait_for_growth,
)

tmp_path, store, lane = kv_scene.tmp_path, kv_scene.store, kv_scene.lane
ORIGIN = "peer north"


def content(store: Store, parent: bytes, ids: np.ndarray) -> bytes:
    key = content_key(parent, ids, store.pages.repr_id, SALT)
    return payload_of(key, store.pages.layout).tobytes()


def begin(
    store: Store, parent: bytes, ids: np.ndarray, data: bytes = b"", digest: bytes = b""
) -> Future[PageRef] | NoRoom:
    data = data or content(store, parent, ids)
    digest = digest or payload_digest(data)
    return store.pages.import_page(parent, ids, SALT, digest, data, origin=ORIGIN)


def receive(store: Store, parent: bytes, ids: np.ndarray, **other: bytes) -> PageRef:
    future = begin(store, parent, ids, **other)
    assert isinstance(future, Future)
    return future.result(20)


def read_out(store: Store, ref: PageRef) -> bytes:
    return store.pages.read_page(ref).result(20)


def pins(store: Store) -> int:
    return int(store.stat()["pages_pinned"])


def test_an_imported_page_is_found_by_its_tokens_and_marked_with_its_origin(store: Store) -> None:
    ids = tokens_of(1, 2)
    first = receive(store, ROOT_KEY, ids[:PAGE_TOKENS])
    chain = chain_keys(ids, store.pages.repr_id, SALT)
    second = receive(store, chain[0], ids[PAGE_TOKENS:])
    assert store.pages.match_prefix(ids, SALT) == [first, second]
    assert store.pages.match_prefix(ids[PAGE_TOKENS:], SALT, parent=chain[0]) == [second]
    assert read_page(store, second) == payload_of(chain[1]).tobytes()
    assert store.pages.computed_by(frozenset((ORIGIN,))) == set(chain)
    assert pins(store) == 2
    for ref in (first, second):
        store.pages.unpin(ref)
    path = store.path
    store.close()
    again = Store.open(path, descriptor(), settings())
    try:  # it is durable like a sealed page
        found = again.pages.match_prefix(ids, SALT)
        assert again.pages.load(found).result(20) == [True, True]
    finally:
        again.close()


def test_a_page_whose_prefix_is_elsewhere_is_matched_after_its_parent(store: Store) -> None:
    ids = tokens_of(1, 3)
    chain = chain_keys(ids, store.pages.repr_id, SALT)
    ref = receive(store, chain[1], ids[2 * PAGE_TOKENS :])
    assert store.pages.match_prefix(ids, SALT) == []
    assert store.pages.match_prefix(ids[2 * PAGE_TOKENS :], SALT, parent=chain[1]) == [ref]
    assert store.pages.match_prefix(ids[2 * PAGE_TOKENS :], SALT, parent=chain[0]) == []


def test_a_page_that_is_here_is_not_written_again(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    sealed, _ = lane.add(ROOT_KEY, ids)
    before = store.stat()["pages_sealed"]
    assert receive(store, ROOT_KEY, ids) == sealed
    assert store.stat()["pages_sealed"] == before
    assert pins(store) == 1
    assert not store.pages.computed_by(frozenset((ORIGIN,)))


@pytest.mark.parametrize("flip", [0, 17_000, LAYOUT.page_bytes - 1])
def test_other_bytes_than_the_digest_says_are_not_published(store: Store, flip: int) -> None:
    ids = tokens_of(1, 1)
    data = bytearray(content(store, ROOT_KEY, ids))
    good = payload_digest(data)
    data[flip] ^= 4
    with pytest.raises(StoreCorrupt, match="digest"):
        receive(store, ROOT_KEY, ids, data=bytes(data), digest=good)
    assert store.pages.match_prefix(ids, SALT) == []
    assert pins(store) == 0


def test_another_content_under_one_key_is_a_numerics_fault(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    lane.add(ROOT_KEY, ids)
    wrong = bytearray(content(store, ROOT_KEY, ids))
    wrong[3] ^= 1
    with pytest.raises(NumericsFault):
        receive(store, ROOT_KEY, ids, data=bytes(wrong))
    assert pins(store) == 1


@pytest.mark.parametrize("size", [0, 1, LAYOUT.page_bytes - 1, LAYOUT.page_bytes + 1])
def test_a_page_of_another_size_is_refused_before_anything_changes(store: Store, size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        store.pages.import_page(
            ROOT_KEY, tokens_of(1, 1), SALT, bytes(16), bytes(size), origin=ORIGIN
        )
    check_integrity(store)


def test_a_full_pool_refuses_and_a_full_disk_fails_the_import_only(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "small", descriptor(), settings(2, 1))
    ids, parent, refs = tokens_of(1, 3), ROOT_KEY, list[PageRef]()
    for at in range(2):
        part = ids[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS]
        wait_for_growth(store)
        refs.append(receive(store, parent, part))
        parent = content_key(parent, part, store.pages.repr_id, SALT)
    wait_for_growth(store)
    assert begin(store, parent, ids[2 * PAGE_TOKENS :]) is NoRoom.FULL
    store.pages.unpin(refs[1])
    store.pages.unpin(refs[0])
    check_integrity(store)
    store.close()
    files = failing_files({}, errno.ENOSPC)
    store = Store.open(tmp_path / "full", descriptor(), settings(4, 2), files=files)
    wait_for_growth(store)
    seen = files.on_call
    files.on_call = lambda name, _: _no_space() if name.startswith("pwrite") else seen(name, 0)
    with pytest.raises((StoreError, OSError)):
        receive(store, ROOT_KEY, ids[:PAGE_TOKENS])
    files.on_call = seen
    wait_for_growth(store)
    ref = receive(store, ROOT_KEY, ids[:PAGE_TOKENS])
    assert page_state(store, ref) is PageState.PUBLISHED
    check_integrity(store)
    store.close()


def _no_space() -> None:
    raise OSError(errno.ENOSPC, "no space")


def test_what_a_peer_computed_can_be_invalidated_with_what_follows(
    store: Store, lane: Lane
) -> None:
    ids = tokens_of(1, 3)
    chain = chain_keys(ids, store.pages.repr_id, SALT)
    good, _ = lane.add(ROOT_KEY, ids[:PAGE_TOKENS])
    receive(store, chain[0], ids[PAGE_TOKENS : 2 * PAGE_TOKENS])
    lane.add(chain[1], ids[2 * PAGE_TOKENS :])
    store.pages.invalidate(*store.pages.computed_by(frozenset((ORIGIN,))), descendants=True)
    assert store.pages.match_prefix(ids, SALT) == [good]


# -- reading a page for a peer --------------------------------------------------------------------


def test_a_page_is_read_as_it_was_received(store: Store) -> None:
    ids = tokens_of(1, 1)
    ref = receive(store, ROOT_KEY, ids)
    assert read_out(store, ref) == content(store, ROOT_KEY, ids)
    assert pins(store) == 1
    store.pages.unpin(ref)
    check_integrity(store)


def test_a_page_of_an_earlier_run_is_verified_by_reading_it_out(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    lane.add_chain(ids)
    path = store.path
    store.close()
    again = Store.open(path, descriptor(), settings())
    try:
        ref = again.pages.match_prefix(ids, SALT)[0]
        assert again.pages.cold([ref]) == [True]
        assert read_out(again, ref) == content(again, ROOT_KEY, ids)
        assert again.pages.cold([ref]) == [False]
    finally:
        check_integrity(again)
        again.close()


def test_a_damaged_page_is_not_read_out_and_is_invalid(store: Store, lane: Lane) -> None:
    ref, _ = lane.add(ROOT_KEY, tokens_of(1, 1))
    info = store.pages.allocator.info(ref.page_id)
    with open(info.path, "r+b") as file:
        file.seek(info.offset_of(ref.page_id) + 1000)
        file.write(b"\xa5\x5a")
    with pytest.raises(StoreCorrupt):
        read_out(store, ref)
    assert not store.pages.is_resident(ref)
    with pytest.raises(StaleRef):
        store.pages.read_page(ref)
    store.pages.unpin(ref)
    check_integrity(store)


def test_a_page_that_becomes_invalid_before_it_is_read_is_not_sent(
    store: Store, lane: Lane
) -> None:
    ref, _ = lane.add(ROOT_KEY, tokens_of(1, 1))
    begun, go_on = threading.Event(), threading.Event()
    store.core.thread.submit(lambda: begun.set() or go_on.wait(20))
    assert begun.wait(20)
    reading = store.pages.read_page(ref)
    store.pages.invalidate(ref)
    go_on.set()
    with pytest.raises(StoreCorrupt):
        reading.result(20)
    store.pages.unpin(ref)
    check_integrity(store)


@hypothesis_settings(deadline=None, max_examples=25)
@given(st.data())
def test_imports_leave_pins_at_the_baseline_in_every_order(data: st.DataObject) -> None:
    """Imports of a few pages, some with wrong bytes, some twice at once, and unpins in between."""
    for folder in scratch():
        store = Store.open(folder / "s", descriptor(), settings(data.draw(st.integers(2, 6)), 2))
        ids = tokens_of(7, 3)
        chain = [ROOT_KEY, *chain_keys(ids, store.pages.repr_id, SALT)]
        under_way, held = list[Future[PageRef]](), list[PageRef]()
        for _ in range(data.draw(st.integers(1, 12))):
            act = data.draw(st.sampled_from(["import", "import", "wait", "unpin", "corrupt"]))
            page = data.draw(st.integers(0, 2))
            part = ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            if act == "import":
                future = begin(store, chain[page], part)
                if isinstance(future, Future):
                    under_way.append(future)
            elif act == "corrupt":
                future = begin(store, chain[page], part, digest=bytes(16))
                if isinstance(future, Future):
                    with pytest.raises((StoreCorrupt, NumericsFault)):
                        future.result(20)
            elif act == "wait" and under_way:
                held.append(under_way.pop(0).result(20))
            elif act == "unpin" and held:
                store.pages.unpin(held.pop())
        held += [future.result(20) for future in under_way]
        for ref in held:
            assert read_page(store, ref) in [payload_of(key).tobytes() for key in chain[1:]]
            store.pages.unpin(ref)
        assert pins(store) == 0
        check_integrity(store)
        store.close()


# -- room for pages that a peer has ---------------------------------------------------------------


def test_pages_that_a_peer_has_leave_room_though_the_next_page_stays(
    store: Store, lane: Lane
) -> None:
    ids = tokens_of(1, 4)
    refs = lane.add_chain(ids, unpin=False)
    store.pages.give_up(refs[:2])
    assert [store.pages.is_resident(ref) for ref in refs] == [False, False, True, True]
    chain = chain_keys(ids, store.pages.repr_id, SALT)
    assert store.pages.match_prefix(ids[2 * PAGE_TOKENS :], SALT, parent=chain[1]) == refs[2:]
    check_integrity(store)
    for ref in refs[2:]:
        store.pages.unpin(ref)
    with pytest.raises(StaleRef):
        store.pages.give_up(refs[:1])
    path = store.path
    store.close()
    again = Store.open(path, descriptor(), settings())
    try:  # the manifest has the rest of the chain, and it can be used
        found = again.pages.match_prefix(ids[2 * PAGE_TOKENS :], SALT, parent=chain[1])
        assert again.pages.load(found).result(20) == [True, True]
        assert (
            read_page(again, receive(again, ROOT_KEY, ids[:PAGE_TOKENS]))
            == payload_of(chain[0]).tobytes()
        )
    finally:
        check_integrity(again)
        again.close()
    assert fsck(path).ok


def test_pages_that_others_need_stay(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 3)
    refs = lane.add_chain(ids, unpin=False)
    other = tokens_of(2, 1)
    chain = chain_keys(ids, store.pages.repr_id, SALT)
    branch, _ = lane.add(chain[0], other)
    store.pages.give_up(refs[:2])  # page 0 is the start of another timeline, too
    assert [store.pages.is_resident(ref) for ref in refs] == [True, False, True]
    pin(store, refs[2])
    store.pages.give_up(refs[2:])
    assert store.pages.is_resident(refs[2])
    store.pages.unpin(refs[2])
    store.pages.unpin(branch)
    check_integrity(store)
    assert pins(store) == 0
